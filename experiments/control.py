"""Does weighting the patches help? A control in which the right weights are known.

    python experiments/control.py --cifar /path/to/cifar10      # everything; starts where it was
    python experiments/control.py --draw                        # the tables, and assets/control.png

A small student is pretrained with the token loss alone, through the functions of this repository.
On planted patches, the teacher's tokens are replaced by random ones of the same mean and standard
deviation, drawn anew each time, so that nothing can be learned there. The arms differ in the
weights of the patch losses (Eq. 5):

  unweighted              all patches count alike
  oracle                  planted patches count nothing
  tenth                   planted patches count a tenth
  softmin                 exp(-loss / lambda), without a gradient
  routed                  the paper's: expert 0's dispatch weights, which learn from the loss
  copied                  those of the routed student in the same step, for another student
  routed-hidden           as routed, but the routers have a hidden layer in place of cosines
  routed-split            the same, and combine weights come from cosines of their own
  routed-split-detached   the same, and the encoder gets no gradient from the loss's weights
  own                     a router with a hidden layer, beside the experts' own, for the loss alone
  own-detached            the same, and the encoder gets no gradient from it

All have two experts, and the entropy of the last router (Eq. 7) with the same lambda. Each run is
measured on held-out images with clean targets, and is a line of control.jsonl.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import common
import data
import knn
import pretrain
from common import rounded
from encoders import build_frozen
from losses import dispatch_entropy, patch_weights, patchify, token_loss, weighted_mean
from model import Router, Routing, normalize
from shapes import Shapes

ARMS = ("unweighted", "oracle", "tenth", "softmin", "routed", "copied", "routed-hidden",
        "routed-split", "routed-split-detached", "own", "own-detached")
LAMBDA = 0.1
IMAGES = 4096      # of the training set
# sets: where targets are planted, the size of images and patches, and the teacher's epochs
SETS = {"shapes-noise": ("noise", 48, 6, 4), "cifar10-flat": ("flat", 32, 4, 2),
        "cifar10-random": ("random", 32, 4, 2), "shapes-clean": ("none", 48, 6, 4),
        "cifar10-clean": ("none", 32, 4, 2)}
LONG = ("unweighted", "oracle", "routed", "own", "own-detached")
# set and epochs: arms
SERIES = {("shapes-noise", 8): ARMS, ("shapes-noise", 24): ARMS, ("shapes-noise", 72): LONG,
          ("cifar10-flat", 8): ARMS, ("cifar10-flat", 24): ARMS, ("cifar10-flat", 72): LONG,
          ("cifar10-random", 8): ARMS, ("shapes-clean", 8): ARMS, ("cifar10-clean", 8): ARMS}
RUN = ("--model vit_nano --batch-size 64 --warmup-epochs 1 --lr 2e-3 --drop-path 0 --amp off "
       "--no-compile --workers 0").split()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=list(SETS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--cifar", default="cifar10", metavar="FOLDER",
        help="CIFAR-10 in ImageNet's layout (default: torchvision's, in data/)")
    add("--teachers", default="runs/control", metavar="FOLDER")
    add("--out", type=Path, default=HERE / "control.jsonl", metavar="FILE")
    add("--draw", action="store_true", help="print the tables and draw assets/control.png instead")
    return parser.parse_args(argv)


# --------------------------------------------------------------------------- the images

class Cached(Dataset):
    """`count` images of a set in memory, and for each, uint8 [3, H, W], 255 where it is noise."""

    def __init__(self, source: str, split: str, size: int, count: int):
        dataset = data.open_images(source, split, size)
        count = min(count, len(dataset))
        indices = np.arange(count) * len(dataset) // count      # every w-th: all classes alike
        self.rows = [dataset[int(i)] for i in indices]
        self.noise = [torch.zeros_like(image) for image, _ in self.rows]
        if source == "shapes-noise":      # without its noise, the image is the same elsewhere
            plain = Shapes(split, size)
            self.noise = [255 * (image != plain[int(i)][0]).any(0, keepdim=True).byte().expand(
                3, -1, -1) for i, (image, _) in zip(indices, self.rows)]
        self.classes = dataset.classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index]


class Views(data.TrainViews):
    """TrainViews with "noise", bool [N]: the patches of which at least 95 % is noise."""

    def __getitem__(self, key: tuple[int, int]) -> dict:
        image, label = self.dataset[key[1]]
        view, noise = (self.view(common.generator("view", self.seed, *key), each, label)
                       for each in (image, self.dataset.noise[key[1]]))
        noise = noise["image"].flip(-1) if view["flip"] else noise["image"]
        share = F.avg_pool2d(noise[:1] / 255, self.image_size // self.grid)
        return view | {"noise": share.flatten() >= 0.95}


class Planting:
    """Chooses patches, and replaces the teacher's tokens there."""

    def __init__(self, how: str, teacher, views: Views, seed: int, device: torch.device):
        self.how = how
        self.drawn = dict(generator=torch.Generator(device).manual_seed(seed), device=device)
        first = [views[0, i]["image"] for i in range(min(512, len(views)))]
        with torch.no_grad():
            tokens = teacher(torch.stack(first).to(device) / 255)[:, 1:].flatten(0, 1)
        self.mean, self.std = tokens.mean(0), tokens.std(0)

    def __call__(self, images: Tensor, targets: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's tokens of images, [B, 1 + N, D], and noise bool [B, N] -> (tokens with
        planted ones, planted [B, N]). 40 % of the patches are planted if they are flat or random.
        """
        planted = noise if self.how == "noise" else torch.zeros_like(noise)
        if self.how in ("flat", "random"):
            order = torch.rand(noise.shape, **self.drawn)
            if self.how == "flat":      # by the variance of a patch's pixels, mean over channels
                patch_size = images.shape[-1] // math.isqrt(noise.shape[1])
                order = patchify(images, patch_size).unflatten(-1, (3, -1)).var(-1).mean(-1)
            planted = order.argsort(1).argsort(1) < round(0.4 * noise.shape[1])
        random = torch.randn(targets[:, 1:].shape, **self.drawn)
        patches = torch.where(planted[..., None], self.mean + self.std * random, targets[:, 1:])
        return torch.cat([targets[:, :1], patches], dim=1), planted


# ---------------------------------------------------------------------------- one arm

class HiddenRouter(nn.Module):
    """A Router whose logits have a hidden layer. With `split`, combine weights come from a Router
    of their own, so that a patch that counts little in the loss still takes what it needs.
    """

    def __init__(self, dim: int, experts: int, split: bool = False):
        super().__init__()
        self.logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(),
                                    nn.Linear(dim, experts))
        self.other = Router(dim, experts) if split else None

    def forward(self, x: Tensor) -> Routing:
        logits = self.logits(x)
        combine = self.other(x).combine if self.other else logits.softmax(2)
        return Routing(logits.softmax(1), combine)


class Student(nn.Module):
    """The student of pretrain.py with the routers of an arm, and what weights its loss.

    `others` are the students of the arms before it.
    """

    def __init__(self, arm: str, args, teacher_dim: int, others: dict[str, nn.Module]):
        super().__init__()
        common.seed_torch("weights", args.seed)
        self.arm, self.others = arm, [others]      # in a list, because they are no part of it
        self.model = pretrain.build_student(args, teacher_dim)
        self.encoder = self.model.encoder
        self.moe = [self.encoder.blocks[block].mlp for block in self.encoder.moe_blocks]
        if arm.startswith("routed-"):
            for moe in self.moe:
                moe.router = HiddenRouter(self.encoder.dim, args.experts, split="split" in arm)
        self.own = HiddenRouter(self.encoder.dim, 1) if arm.startswith("own") else None
        self.moe[-1].register_forward_pre_hook(self.remember)

    def remember(self, moe, inputs: tuple[Tensor]):
        self.entering, = inputs      # tokens [B, T, D]

    def forward(self, images: Tensor, mask: Tensor, targets: Tensor, planted: Tensor):
        """Mask and planted bool [B, N], targets [B, 1 + N, D] -> of the visible patches, their
        token losses, their weights and whether they are planted, [B, V] each; and the entropy of
        the router that gives the weights, or of the last one.
        """
        visible = (~mask).nonzero()[:, 1].view(len(mask), -1)
        pred = self.model(normalize(images), mask, visible)
        seen_targets = targets[:, 1:].take_along_dim(pred.ids_keep[..., None], 1)
        seen_planted = planted.take_along_dim(pred.ids_keep, 1)
        patch_loss = token_loss(pred.tokens[:, 1:], seen_targets)
        routing = pred.routing[max(pred.routing)]
        if self.arm == "unweighted":
            weight = torch.ones_like(patch_loss)
        elif self.arm == "oracle":
            weight = 1 - seen_planted.to(patch_loss)
        elif self.arm == "tenth":
            weight = 1 - 0.9 * seen_planted.to(patch_loss)
        elif self.arm == "softmin":      # the p that minimizes sum(p loss) - lambda H(p)
            weight = (-patch_loss.detach() / LAMBDA).softmax(1)
        elif self.arm == "copied":
            with torch.no_grad():
                _, weight, _, _ = self.others[0]["routed"](images, mask, targets, planted)
        else:
            tokens = self.entering.detach() if "detached" in self.arm else self.entering
            routing = (self.own or self.moe[-1].router)(tokens)
            weight = patch_weights(routing.dispatch, expert=0)
        return patch_loss, weight, seen_planted, dispatch_entropy(routing.dispatch).sum()


def compute_loss(patch_loss: Tensor, weight: Tensor, entropy: Tensor) -> Tensor:
    """Eq. 5 and 7"""
    some = weight.sum(1) > 0      # of an image whose seen patches are all planted, nothing is left
    return weighted_mean(patch_loss[some], weight[some]) - LAMBDA * entropy


def train(arms: list[str], args, process, teacher, views: Views, planting: Planting):
    """pretrain.main without its log and checkpoints -> {arm: its student}, all of which are
    trained at once, on the same batches
    """
    students = {}
    for arm in arms:
        students[arm] = Student(arm, args, teacher.dim, students).to(process.device).train()
    optimizers = [common.adamw(student, args.lr, args.weight_decay, betas=(0.9, 0.95))
                  for student in students.values()]
    epoch_steps = len(views) // args.batch_size
    steps = args.epochs * epoch_steps
    order = data.train_order(len(views), args.batch_size, 1, args.seed, 0, steps)
    for step, batch in enumerate(data.load(views, order, process, workers=0)):
        lr = common.learning_rate(step, steps, args.warmup_epochs * epoch_steps, args.lr,
                                  args.min_lr)
        images = data.augment(batch)
        with torch.no_grad():
            targets, planted = planting(images, teacher(images), batch["noise"])
        for student, optimizer in zip(students.values(), optimizers):
            patch_loss, weight, _, entropy = student(images, batch["mask"], targets, planted)
            process.scaler.scale(compute_loss(patch_loss, weight, entropy)).backward()
            common.set_rate(optimizer, lr)
            common.optimizer_step(optimizer, process.scaler, args.clip_grad)
    return students


@torch.no_grad()
def measure(student: Student, process, teacher, views: Views, train_set: Cached,
            planting: Planting) -> dict:
    """On masked views: the token loss, with clean targets, of the patches that are not planted, and
    the mean weight of planted patches over that of the others. On whole images: the accuracy in
    percent of k-NN on the mean patch token.
    """
    order = [[(0, i) for i in part.tolist()] for part in torch.arange(len(views)).split(64)]
    losses, weights, where = [], [], []
    for batch in data.load(views, order, process, workers=0):
        images = data.augment(batch)
        clean = teacher(images)
        targets, planted = planting(images, clean, batch["noise"])
        losses.append(student(images, batch["mask"], clean, planted)[0])
        _, weight, planted, _ = student(images, batch["mask"], targets, planted)
        weights.append(weight / weight.sum(1, keepdim=True).clamp_min(1e-30))
        where.append(planted)
    loss, weight, planted = (torch.cat(parts) for parts in (losses, weights, where))

    def features(dataset: Cached) -> Tensor:
        whole = data.CenterViews(dataset, views.image_size)
        parts = torch.arange(len(whole)).split(256)
        tokens = [student.encoder(normalize(batch["image"] / 255))[0][:, 1:].mean(1)
                  for batch in data.load(whole, [p.tolist() for p in parts], process, workers=0)]
        return F.normalize(torch.cat(tokens), dim=1)

    labels, truth = (torch.tensor([label for _, label in dataset.rows], device=process.device)
                     for dataset in (train_set, views.dataset))
    predicted = knn.classify(features(views.dataset), features(train_set), labels,
                             len(train_set.classes), k=20, temperature=0.07)
    return {"loss": loss[~planted].mean().item(),
            "planted_weight": (weight[planted].mean() / weight[~planted].mean()).item(),
            "knn": 100 * (predicted == truth).float().mean().item()}


# ---------------------------------------------------------------------------- all rows

def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_series(options, name: str, epochs: int, seed: int):
    """Trains the arms of one set, length and seed, if they have no rows yet."""
    key = {"set": name, "epochs": epochs, "seed": seed}
    if any(key.items() <= row.items() for row in read_rows(options.out)):
        return
    how, size, patch, teacher_epochs = SETS[name]
    arms = [arm for arm in SERIES[name, epochs] if how != "none" or arm not in ("oracle", "tenth")]
    source = options.cifar if "cifar10" in name else name.removesuffix("-clean")
    sizes = ["--data", source, "--image-size", str(size), "--patch-size", str(patch)]
    folder = f"{options.teachers}-{Path(source).name}-{seed}"
    # a process of its own, which ends with its lock on the folder and its handlers of signals
    subprocess.run([sys.executable, HERE.parent / "finetune.py", *RUN, *sizes, "--epochs",
                    str(teacher_epochs), "--seed", str(seed), "--augment", "plain",
                    "--layer-decay", "1", "--out", folder], check=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})
    top1 = read_rows(Path(folder, "log.jsonl"))[-1]["top1"]
    args = pretrain.parse_args([*RUN, *sizes, "--epochs", str(epochs), "--seed", str(seed),
                                "--objective", "token"])
    process = common.Process(args)
    teacher = build_frozen(f"{folder}/last.pt").to(process.device)
    train_set = Cached(source, "train", size, IMAGES)
    val_set = Cached(source, "val", size, 1024)
    views, val_views = (Views(each, size, view_seed, size // patch, args.mask_ratio)
                        for each, view_seed in ((train_set, seed), (val_set, 0)))
    planting = Planting(how, teacher, views, seed, process.device)
    students = train(arms, args, process, teacher, views, planting)
    rows = []
    for arm, student in students.items():
        planting = Planting(how, teacher, views, seed, process.device)      # the same for each
        measured = measure(student.eval(), process, teacher, val_views, train_set, planting)
        rows.append(key | {"arm": arm, "teacher_top1": top1} | measured)
        print("{set}, {epochs} epochs, seed {seed}, {arm}: loss {loss:.4f}, planted / clean weight "
              "{planted_weight:.3f}, k-NN {knn:.2f} %".format(**rows[-1]), flush=True)
    with open(options.out, "a") as file:
        file.writelines(json.dumps(rounded(row)) + "\n" for row in rows)


# ------------------------------------------------------------------- table and picture

def interval(values: list[float]) -> tuple[float, float]:
    """The mean of three seeds, and half of its 95 % interval by Student's t."""
    return np.mean(values).item(), 4.303 * np.std(values, ddof=1).item() / len(values) ** 0.5


def compare(rows: list[dict], arm: str) -> dict[str, tuple[float, float]]:
    """An arm against the unweighted one, seed by seed, in the rows of one set and length ->
    {measure: interval}: the change of the loss in percent, that of k-NN in points and, where
    there is an oracle, the weight of planted patches over that of the others, and the share of the
    oracle's gain.
    """
    runs = {(row["arm"], row["seed"]): row for row in rows}
    seeds = sorted(seed for kind, seed in runs if kind == arm)
    run, floor, best = ([runs.get((kind, seed)) for seed in seeds]
                        for kind in (arm, "unweighted", "oracle"))
    found = {"loss": [100 * (a["loss"] / b["loss"] - 1) for a, b in zip(run, floor)],
             "knn": [a["knn"] - b["knn"] for a, b in zip(run, floor)]}
    if None not in best:
        found["weight"] = [row["planted_weight"] for row in run]
        found["share"] = [(b["loss"] - a["loss"]) / (b["loss"] - o["loss"])
                          for a, b, o in zip(run, floor, best)]
    return {measure: interval(values) for measure, values in found.items()}


def cell(found: dict, measure: str, digits: int) -> str:
    mean, half = found[measure]
    text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
    return f"**{text}**" if abs(mean) > half else text


def draw(rows: list[dict], path: Path):
    """Prints tables, and draws the share of the oracle's gain that each arm recovers."""
    from matplotlib.figure import Figure
    found = {}
    for group in SERIES:
        done = [row for row in rows if (row["set"], row["epochs"]) == group]
        if len({row["seed"] for row in done}) == 3:
            found[group] = {arm: compare(done, arm) for arm in ARMS[1:]
                            if any(row["arm"] == arm for row in done)}
    planted = [group for group, arms in found.items() if "oracle" in arms]

    def table(title: str, groups: list[tuple[str, int]], text):
        print(f"{title}:\n\n| arm | {' | '.join(f'{name}, {epochs}' for name, epochs in groups)} |"
              f"\n| --- |{' --- |' * len(groups)}")
        for arm in ARMS[1:]:
            cells = [text(found[group][arm]) if arm in found[group] else "" for group in groups]
            print(f"| {arm} | {' | '.join(cells)} |")
        print()

    table("Share of the oracle's gain, and weight of planted patches over clean ones", planted,
          lambda each: f"{cell(each, 'share', 2)}, {each['weight'][0]:.2f}")
    table("Loss, %", list(found), lambda each: cell(each, "loss", 1))
    table("k-NN, points", list(found), lambda each: cell(each, "knn", 1))

    figure = Figure(figsize=(10, 4), layout="constrained")
    axis = figure.add_subplot(ylabel="share of the oracle's gain")
    for i, arm in enumerate(ARMS[2:]):
        there = [at for at, group in enumerate(planted) if arm in found[group]]
        mean, half = zip(*(found[planted[at]][arm]["share"] for at in there))
        axis.bar([at + 0.09 * (i - 4) for at in there], mean, 0.08, yerr=half, capsize=2,
                 color=f"C{i}", label=arm)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(planted)), [f"{name}\n{epochs} epochs" for name, epochs in planted],
                    fontsize="small")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=100)


def main(options: argparse.Namespace):
    if options.draw:
        draw(read_rows(options.out), HERE.parent / "assets" / "control.png")
        return
    torch.set_num_threads(1)
    for name, epochs in SERIES:
        for seed in options.seeds:
            if name in options.sets:
                run_series(options, name, epochs, seed)


if __name__ == "__main__":
    common.launch(main, parse_args())
