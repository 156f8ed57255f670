"""Does weighting the patches help? A control in which the right weights are known.

    python experiments/control.py --cifar /path/to/cifar10      # everything; starts where it was
    python experiments/control.py --draw                        # the table, and assets/control.png

A small student is pretrained with the token loss alone, through the functions of this repository.
On planted patches, the teacher's tokens are replaced by random ones of the same mean and standard
deviation, drawn anew each time, so that nothing can be learned there. The arms differ in the
weights of the patch losses (Eq. 5):

  unweighted   all patches count alike
  oracle       planted patches count nothing
  softmin      exp(-loss / lambda), without a gradient
  routed       the paper's: expert 0's dispatch weights, which learn from the loss

Each arm has the routers of two experts and their regularizer (Eq. 7), with the lambda behind the
arm's name, so arms of one lambda differ in their weights alone. Each run is measured on held-out
images with clean targets, and is a line of control.jsonl.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import common
import data
import finetune
import knn
import pretrain
from encoders import build_frozen
from losses import dispatch_entropy, patch_weights, token_loss, weighted_mean
from model import normalize
from run import rounded
from shapes import Shapes

ARMS = ("unweighted-0.5", "oracle-0.5", "softmin-0.5", "routed-0.5", "unweighted-0.1", "routed-0.1")
# sets: where targets are planted, the size of images and patches, and the teacher's epochs
SETS = {"shapes-noise": ("noise", 48, 6, 4), "cifar10": ("random", 32, 4, 2),
        "shapes-clean": ("none", 48, 6, 4)}
SERIES = (("shapes-noise", 8), ("cifar10", 8), ("shapes-clean", 8), ("shapes-noise", 24),
          ("cifar10", 24))
RUN = ("--model vit_nano --batch-size 64 --warmup-epochs 1 --lr 2e-3 --drop-path 0 --amp off "
       "--no-compile --workers 0").split()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=list(SETS))
    add("--arms", nargs="+", choices=ARMS, default=ARMS)
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--epochs", nargs="+", type=int, default=[8, 24])
    add("--cifar", default="cifar10", metavar="FOLDER",
        help="CIFAR-10 in ImageNet's layout (default: torchvision's, in data/)")
    add("--images", type=int, default=4096, help="of train/ (default: 4096)")
    add("--teachers", default="runs/control", metavar="FOLDER")
    add("--out", type=Path, default=HERE / "control.jsonl", metavar="FILE")
    add("--draw", action="store_true", help="print the table and draw assets/control.png instead")
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

    def __call__(self, targets: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, 1 + N, D], noise bool [B, N] -> (tokens with planted ones, planted [B, N])"""
        planted = noise if self.how == "noise" else torch.zeros_like(noise)
        if self.how == "random":
            ranks = torch.rand(noise.shape, **self.drawn).argsort(1).argsort(1)
            planted = ranks < round(0.4 * noise.shape[1])
        random = torch.randn(targets[:, 1:].shape, **self.drawn)
        patches = torch.where(planted[..., None], self.mean + self.std * random, targets[:, 1:])
        return torch.cat([targets[:, :1], patches], dim=1), planted


# ---------------------------------------------------------------------------- one arm

def softmin(patch_loss: Tensor) -> Tensor:
    """exp(-loss / lambda), where lambda is the standard deviation of the image's losses [B, V].

    They are what an ideal router would give: the p that minimizes sum(p loss) - lambda H(p).
    """
    patch_loss = patch_loss.detach()
    lambda_ = patch_loss.std(1, keepdim=True)
    return ((patch_loss.amin(1, keepdim=True) - patch_loss) / lambda_).exp()


def compute_loss(arm: str, pred, targets: Tensor, planted: Tensor) -> Tensor:
    """Eq. 5 and 7 with the weights of an arm: targets [B, 1 + N, D], planted bool [B, N]"""
    kind, lambda_ = arm.split("-")
    seen = pred.ids_keep
    patch_loss = token_loss(pred.tokens[:, 1:], targets[:, 1:].take_along_dim(seen[..., None], 1))
    dispatch = pred.routing[max(pred.routing)].dispatch
    weight = torch.ones_like(patch_loss)
    if kind == "oracle":
        weight = 1 - planted.take_along_dim(seen, 1).float()
    elif kind == "softmin":
        weight = softmin(patch_loss)
    elif kind == "routed":
        weight = patch_weights(dispatch, expert=0)
    some = weight.sum(1) > 0      # of an image whose seen patches are all planted, nothing is left
    loss = weighted_mean(patch_loss[some], weight[some])
    return loss - (float(lambda_) * dispatch_entropy(dispatch)).sum()


def train(arm: str, args, process, teacher, views: Views, planting: Planting):
    """pretrain.main without its log and checkpoints -> the student"""
    common.seed_torch("weights", args.seed)
    student = pretrain.build_student(args, teacher.dim).to(process.device).train()
    optimizer = common.adamw(student, args.lr, args.weight_decay, betas=(0.9, 0.95))
    epoch_steps = len(views) // args.batch_size
    steps = args.epochs * epoch_steps
    order = data.train_order(len(views), args.batch_size, args.batch_size, args.seed, 0, steps)
    for step, batch in enumerate(data.load(views, order, process, workers=0)):
        common.set_rate(optimizer, common.learning_rate(
            step, steps, args.warmup_epochs * epoch_steps, args.lr, args.min_lr))
        images = data.augment(batch)
        with torch.no_grad():
            targets, planted = planting(teacher(images), batch["noise"])
        pred = student(normalize(images), batch["mask"])
        process.scaler.scale(compute_loss(arm, pred, targets, planted)).backward()
        common.optimizer_step(optimizer, process.scaler, args.clip_grad)
    return student.eval()


@torch.no_grad()
def measure(student, process, teacher, views: Views, train_set: Cached) -> dict:
    """The token loss with clean targets of the patches that are no noise, on masked views, and the
    k-NN accuracy in percent of the mean patch token of whole images."""
    order = [[(0, i) for i in part.tolist()] for part in torch.arange(len(views)).split(64)]
    total = count = 0
    for batch in data.load(views, order, process, workers=0):
        images = data.augment(batch)
        pred = student(normalize(images), batch["mask"])
        seen = pred.ids_keep
        target = teacher(images)[:, 1:].take_along_dim(seen[..., None], 1)
        clean = ~batch["noise"].take_along_dim(seen, 1)
        total += token_loss(pred.tokens[:, 1:], target)[clean].sum().item()
        count += clean.sum().item()

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
    return {"loss": total / count, "knn": 100 * (predicted == truth).float().mean().item()}


# ---------------------------------------------------------------------------- all rows

def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_series(options, name: str, epochs: int, seed: int):
    """Trains the arms of one set, length and seed that have no row yet."""
    key = {"set": name, "epochs": epochs, "seed": seed}
    done = [row["arm"] for row in read_rows(options.out) if key.items() <= row.items()]
    how, size, patch, teacher_epochs = SETS[name]
    arms = [arm for arm in options.arms if how != "none" or "oracle" not in arm]
    missing = [arm for arm in arms if arm not in done]
    if not missing:
        return
    source = options.cifar if name == "cifar10" else name.replace("-clean", "")
    sizes = ["--data", source, "--image-size", str(size), "--patch-size", str(patch)]
    folder = f"{options.teachers}-{name}-{seed}"
    scores = finetune.main(finetune.parse_args([
        *RUN, *sizes, "--epochs", str(teacher_epochs), "--seed", str(seed), "--augment", "plain",
        "--layer-decay", "1", "--out", folder]))
    if scores["top1"] < 30:
        print(f"{name}, seed {seed}: left out, its teacher has {scores['top1']:.1f} %")
        return
    args = pretrain.parse_args([*RUN, *sizes, "--epochs", str(epochs), "--seed", str(seed),
                                "--objective", "token"])
    process = common.Process(args)
    teacher = build_frozen(f"{folder}/last.pt").to(process.device)
    train_set = Cached(source, "train", size, options.images)
    val_set = Cached(source, "val", size, 1024)
    views, val_views = (Views(each, size, view_seed, size // patch, args.mask_ratio)
                        for each, view_seed in ((train_set, seed), (val_set, 0)))
    for arm in missing:
        planting = Planting(how, teacher, views, seed, process.device)
        student = train(arm, args, process, teacher, views, planting)
        row = key | {"arm": arm, "teacher_top1": scores["top1"]}
        row |= measure(student, process, teacher, val_views, train_set)
        with open(options.out, "a") as file:
            file.write(json.dumps(rounded(row)) + "\n")
        print("{set}, {epochs} epochs, seed {seed}, {arm}: loss {loss:.4f}, k-NN {knn:.2f} %"
              .format(**row), flush=True)


# ------------------------------------------------------------------- table and picture

def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval by Student's t, of 2 to 5 seeds."""
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(values)]
    return np.mean(values).item(), t * np.std(values, ddof=1).item() / len(values) ** 0.5


def compare(rows: list[dict], name: str, epochs: int, arm: str) -> dict[str, tuple[float, float]]:
    """An arm against the unweighted one of the same lambda, seed by seed -> {measure: interval}:
    the change of the loss in percent, that of k-NN in points, and the share of the oracle's gain.
    """
    runs = {(row["arm"], row["seed"]): row for row in rows
            if row["set"] == name and row["epochs"] == epochs}
    seeds = sorted(seed for kind, seed in runs if kind == arm)
    floor = [runs["unweighted-" + arm.split("-")[1], seed] for seed in seeds]
    run = [runs[arm, seed] for seed in seeds]
    found = {"loss": [100 * (a["loss"] / b["loss"] - 1) for a, b in zip(run, floor)],
             "knn": [a["knn"] - b["knn"] for a, b in zip(run, floor)]}
    if SETS[name][0] != "none":
        oracle = [runs["oracle-0.5", seed] for seed in seeds]
        found["recovered"] = [(b["loss"] - a["loss"]) / (b["loss"] - o["loss"])
                              for a, b, o in zip(run, floor, oracle)]
    return {measure: interval(values) for measure, values in found.items()}


def cell(mean: float, half: float, digits: int) -> str:
    text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
    return f"**{text}**" if abs(mean) > half else text


def draw(rows: list[dict], path: Path):
    """Prints the table, and draws the share of the oracle's gain that each arm recovers."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 3), layout="constrained")
    axis = figure.add_subplot(ylabel="share of the oracle's gain")
    arms = "softmin-0.5", "routed-0.5", "routed-0.1"
    groups = []
    print("| set | epochs | arm | loss, % | k-NN, points | share of the oracle's gain |\n"
          "| --- | --- | --- | --- | --- | --- |")
    for name, epochs in SERIES:
        if SETS[name][0] != "none":
            groups.append(f"{name}\n{epochs} epochs")
        for arm in arms if SETS[name][0] == "none" else ("oracle-0.5", *arms):
            found = compare(rows, name, epochs, arm)
            share = ""
            if "recovered" in found and arm in arms:
                share = cell(*found["recovered"], 2)
                x = len(groups) - 1 + 0.25 * (arms.index(arm) - 1)
                mean, half = found["recovered"]
                axis.bar(x, mean, 0.22, yerr=half, capsize=3, color=f"C{arms.index(arm)}",
                         label=arm if len(groups) == 1 else None)
            print(f"| {name} | {epochs} | {arm} | {cell(*found['loss'], 1)} "
                  f"| {cell(*found['knn'], 1)} | {share} |")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(groups)), groups)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=100)


def main(options: argparse.Namespace):
    if options.draw:
        draw(read_rows(options.out), HERE.parent / "assets" / "control.png")
        return
    torch.set_num_threads(1)
    for seed in options.seeds:
        for name, epochs in SERIES:
            if name in options.sets and epochs in options.epochs:
                run_series(options, name, epochs, seed)


if __name__ == "__main__":
    common.launch(main, parse_args())
