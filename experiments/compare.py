"""Is a router better than none on your images? Pretrains students with and without, and compares.

    python experiments/compare.py --data photos
    python experiments/compare.py --data photos --teacher ViT-B-16/openai --epochs 50 --out runs/50

The first command trains a teacher from scratch, and pretrains four kinds of students with three
seeds each: about 20 minutes on two cores with 2,000 photographs. Each run has a folder in --out,
and the same command resumes. Flags that are not named below go to pretrain.py. The tables show the
last token loss of training, without weights, and the k-NN accuracy on val/: means over the seeds,
and differences between arms of the same seed, with 95 % intervals by Student's t. "to none" is what
experts change, and "to uniform" what weighting the loss changes. By luck alone, at least one of the
ten intervals excludes zero in about four of ten comparisons.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import pretrain
from experiments.control_tables import interval
from plot import read_lines

SMALL = ("--model vit_nano --image-size 64 --patch-size 8 --batch-size 64 --lr 1e-3 --epochs 20 "
         "--warmup-epochs 1").split()
ARMS = {"none": "--experts 0 --entropy-weight 5",      # without experts, only the default is taken
        "uniform": "--loss-weights uniform", "detached": "--detach", "routed": ""}
RUNS = [(arm, seed) for seed in range(3) for arm in ARMS]


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """-> flags, and those for pretrain.py"""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="in ImageNet's layout")
    parser.add_argument("--teacher", help="as pretrain.py takes it")
    parser.add_argument("--out", default="runs/compare", metavar="FOLDER")
    return parser.parse_known_args(argv)


def plan(data: str, teacher: str | None, out: str, others: list[str]) -> list[list[str]]:
    """-> the commands of all stages, in their order"""
    commands = [] if teacher else [["finetune.py", "--data", data, *SMALL, "--augment", "plain",
                                    "--out", f"{out}/teacher"]]
    teacher = teacher or f"{out}/teacher/last.pt"
    for arm, seed in RUNS:
        flags = [*SMALL, "--entropy-weight", "0.05", *others, *ARMS[arm].split(), "--data", data,
                 "--teacher", teacher, "--seed", str(seed), "--out", f"{out}/{arm}-{seed}"]
        pretrain.parse_args(flags)      # a wrong flag ends this before the teacher is trained
        commands.append(["pretrain.py", *flags])
    students = [f"{out}/{arm}-{seed}/last.pt" for arm, seed in RUNS]
    return [*commands, ["knn.py", teacher, *students, "--data", data]]


def main(args: argparse.Namespace, others: list[str]):
    commands = plan(args.data, args.teacher, args.out, others)
    stopped = []      # Ctrl-C reaches the stage, too, which saves
    signal.signal(signal.SIGINT, lambda *signal_and_frame: stopped.append(True))
    for i, (script, *flags) in enumerate(commands, start=1):
        print(f"{i} of {len(commands)}: {script} {flags[-1]}", flush=True)
        code = subprocess.run([sys.executable, f"{sys.path[0]}/{script}", *flags]).returncode
        if code or stopped:
            sys.exit(code or "the same command resumes")      # a stage has said why it failed
    last = [[read_lines(Path(args.out, f"{arm}-{seed}", file))[-1] for file in
             ("log.jsonl", "knn.jsonl")] for arm, seed in RUNS]
    if len({log["epoch"] for log, _ in last}) > 1:      # a signal stopped one
        sys.exit("not all runs are complete; the same command resumes")
    found = np.array([(log.get("token_unweighted", log["token"]), knn["top1"])
                      for log, knn in last]).reshape(-1, len(ARMS), 2)      # [seeds, arms, 2]
    differing = []
    for i, (title, n) in enumerate((("token loss", 4), ("k-NN, %", 1))):
        print(f"\n{title:10}    mean    to none           to uniform")
        for arm, values in zip(ARMS, found[..., i].T):
            line = f"{arm:10}{values.mean():8.{n}f}"
            for at, other in enumerate(("none", "uniform")):
                mean, half = interval(values - found[:, at, i])
                line += f"    {f'{mean:+.{n}f} ± {half:.{n}f}':14}"
                if abs(mean) > half and arm != "none":      # uniform has the same difference
                    differing.append(f"{title} of {arm} and {other}")
            print(line.rstrip())
    print("\nthese differ by more than the seeds do:", "; ".join(differing) or "none")


if __name__ == "__main__":
    main(*parse_args())
