"""Is a router better than none on your images? Pretrains students with and without, and compares.

    python experiments/compare.py --data photos
    python experiments/compare.py --data photos --teacher ViT-B-16/openai --epochs 50 --out runs/50

The first command trains a teacher from scratch, and pretrains four kinds of students with three
seeds each: about 20 minutes on two cores with 2,000 photographs. Each run has a folder in --out,
and the same command resumes. Flags that are not named below go to pretrain.py, and change no
teacher; expert 0 has lambda 0.05, and expert 1 none.

The tables show the last token loss of training, without weights, and the accuracy of k-NN and of a
linear probe (ridge regression) on [CLS]: means over the seeds, and differences between arms of the
same seed. "to none" is what experts change, and "to uniform" what weighting the loss changes. The
95 % intervals of accuracies are for other seeds and other images of val/.
"""

import argparse
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import data
import knn
import pretrain
from encoders import build_frozen
from experiments.measures import half_width, probe
from run import read_lines

SMALL = ("--model vit_nano --image-size 64 --patch-size 8 --batch-size 64 --lr 1e-3 --epochs 20 "
         "--warmup-epochs 1").split()
ARMS = {"none": "--experts 0 --entropy-weight 5",      # --experts 0 refuses other lambdas
        "uniform": "--loss-weights uniform", "detached": "--detach", "routed": ""}
PAPER = """On ImageNet, the paper's 2 experts gain 1.3 points of k-NN by weighting the losses, and
against no experts, they lose 0.3 points of k-NN and gain 3.4 in the linear probe."""


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """-> flags, and those for pretrain.py"""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="in ImageNet's layout")
    parser.add_argument("--teacher", help="as pretrain.py takes it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="at least two")
    parser.add_argument("--out", default="runs/compare", metavar="FOLDER")
    args, others = parser.parse_known_args(argv)
    if len(args.seeds) < 2:
        parser.error("--seeds: intervals need at least two")
    return args, others


def plan(args: argparse.Namespace, others: list[str]) -> list[list[str]]:
    """-> the commands of all stages, in their order"""
    commands = [] if args.teacher else [["finetune.py", "--data", args.data, *SMALL, "--augment",
                                         "plain", "--out", f"{args.out}/teacher"]]
    teacher = args.teacher or f"{args.out}/teacher/last.pt"
    for seed in args.seeds:
        for arm, own in ARMS.items():
            flags = [*SMALL, "--entropy-weight", "0.05", "0", *others, *own.split(),
                     "--data", args.data, "--teacher", teacher, "--seed", str(seed),
                     "--out", f"{args.out}/{arm}-{seed}"]
            pretrain.parse_args(flags)      # a wrong flag ends this before the teacher is trained
            commands.append(["pretrain.py", *flags])
    return commands


def evaluate(folder: Path, train, val, process: common.Process) -> tuple[float, Tensor]:
    """-> a student's last token loss, and whether k-NN and the probe are right, bool [2, M], for
    each of the M images of val/
    """
    log = read_lines(folder / "log.jsonl")[-1]
    encoder = build_frozen(str(folder / "last.pt")).to(process.device)
    settings = argparse.Namespace(batch_size=256, workers=0, pool="cls")
    (bank, labels), (queries, truth) = (
        knn.extract(encoder, data.CenterViews(images, encoder.image_size), settings, process, name)
        for name, images in (("bank", train), ("val", val)))
    classes = len(train.classes)
    voted = knn.classify(queries, bank, labels, classes, k=20, temperature=0.07)
    probed = probe(bank, labels, queries, classes)
    return log.get("token_unweighted", log["token"]), torch.stack([voted, probed]) == truth


def print_table(title: str, values: np.ndarray, digits: int):
    """values [seeds, arms, M]: a number for each image, or one for all"""
    print(f"\n{title:12}    mean    to none           to uniform")
    for i, arm in enumerate(ARMS):
        line = f"{arm:12}{values[:, i].mean():8.{digits}f}"
        for other in range(min(i, 2)):      # none, uniform
            difference = values[:, i] - values[:, other]                        # [seeds, M]
            cell = f"{difference.mean():+.{digits}f} ± {half_width(difference):.{digits}f}"
            line += f"    {cell:14}"
        print(line.rstrip())


def main(args: argparse.Namespace, others: list[str]):
    size = int(pretrain.parse_args([*SMALL, "--entropy-weight", "0.05", "0", *others]).image_size)
    train, val = (data.open_images(args.data, split, size) for split in ("train", "val"))
    print(f"{len(train)} training and {len(val)} validation images of {len(train.classes)} classes:"
          f" an accuracy has a standard error of up to {50 / math.sqrt(len(val)):.1f} points.")
    print(PAPER, flush=True)
    commands = plan(args, others)
    stopped = []      # Ctrl-C reaches the stage, too, which saves
    signal.signal(signal.SIGINT, lambda *signal_and_frame: stopped.append(True))
    for i, (script, *flags) in enumerate(commands, start=1):
        print(f"{i} of {len(commands)}: {script} {flags[-1]}", flush=True)
        code = subprocess.run([sys.executable, f"{sys.path[0]}/{script}", *flags]).returncode
        if stopped:
            sys.exit("the same command resumes")
        if code:
            sys.exit(code)      # the stage has said why
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folders = [[Path(args.out, f"{arm}-{seed}") for arm in ARMS] for seed in args.seeds]
    ends = {read_lines(folder / "log.jsonl")[-1]["epoch"] for row in folders for folder in row}
    if len(ends) > 1:      # a signal stopped one
        sys.exit("not all runs are complete; the same command resumes")
    process = common.Process(argparse.Namespace(amp="off"))
    found = [[evaluate(folder, train, val, process) for folder in row] for row in folders]
    losses = np.array([[[loss] for loss, _ in row] for row in found])           # [seeds, arms, 1]
    right = 100 * np.array([[right.double().cpu().numpy() for _, right in row] for row in found])
    print_table("token loss", losses, 4)
    print_table("k-NN, %", right[:, :, 0], 1)
    print_table("probe, %", right[:, :, 1], 1)
    print("\nOf twenty such intervals, one excludes zero by luck.")
    cv = np.mean([read_lines(row[-1] / "log.jsonl")[-1]["dispatch_cv"][0] for row in folders])
    print(f"The dispatch_cv of routed students is {cv:.2f}. Below 0.1, their weights are nearly "
          "uniform; a smaller --entropy-weight makes them differ more.")


if __name__ == "__main__":
    common.launch(lambda flags: main(*flags), parse_args())
