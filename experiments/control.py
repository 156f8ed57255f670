"""Does weighting the patches help? A control in which the right weights are known.

    python experiments/control.py --cifar /path/to/cifar10      # everything; starts where it was
    python experiments/control_tables.py                        # tables, and assets/control.png

A small student is pretrained with the token loss alone, through the functions of this repository.
On planted patches, the teacher's tokens are replaced by random ones of the same mean and standard
deviation, drawn anew each time, so that nothing can be learned there. The arms differ in the
weights of the patch losses (Eq. 5):

  unweighted     all patches count alike
  oracle         planted patches count nothing
  softmin        exp(-loss / lambda), without a gradient
  routed         expert 0's dispatch weights, which learn from the loss
  routed-0.5     the same with lambda 0.5, the paper's best for 2 experts
  routed-5       the same with lambda 5, the paper's default
  unweighted-5   the same as unweighted with lambda 5, to compare routed-5 with
  detached       the same as routed, but the weights pass no gradient (--detach)
  router-only    the same as routed, but the weights' gradient stops at phi and scale, before the
                 encoder
  copied         those of the routed student in the same step, for another student
  own            an extra router, with a hidden layer, that weights the loss alone, on the student's
                 tokens
  own-detached   the same, and the encoder gets no gradient from it
  own-target     the same on the targets: it knows the target, and not the loss

All have two experts, and the entropy of the router that gives the weights, or else of the last one
(Eq. 7), with lambda 0.1 unless the arm's name says otherwise. Each run is a line of control.jsonl,
and is measured on held-out images by its loss on clean patches, which are not planted. Look-alikes
are the clean patches to which the router of own-detached gives less than half of the weight of its
image's mean clean patch.
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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import common
import data
import knn
import optim
import pretrain
from common import rounded
from encoders import build_frozen
from losses import dispatch_entropy, patch_weights, patchify, token_loss, weighted_mean
from model import ViT, normalize
from shapes import Shapes

ROUTED = ("routed", "routed-0.5", "routed-5", "detached", "router-only")
OTHERS = ("copied", "own", "own-detached", "own-target")
ARMS = ("unweighted", "oracle", "softmin", *ROUTED, "unweighted-5", *OTHERS)
LAMBDA = 0.1
LAMBDAS = {"routed-0.5": 0.5, "routed-5": 5.0, "unweighted-5": 5.0}      # of the others, LAMBDA
IMAGES = 4096      # of the training set
# sets: their images, where targets are planted, the size of images and patches, and the teacher's
# epochs
SETS = {"shapes-noise": ("shapes-noise", "noise", 48, 6, 4),
        "shapes-blocks": ("shapes-noise", "blocks", 48, 6, 4),
        "cifar10-flat": ("cifar10", "flat", 32, 4, 2),
        "cifar10-random": ("cifar10", "random", 32, 4, 2),
        "shapes-clean": ("shapes", "none", 48, 6, 4),
        "cifar10-clean": ("cifar10", "none", 32, 4, 2)}
# epochs: set: arms. What is short comes first
CLEAN = tuple(arm for arm in ARMS if arm != "oracle")
LONG = ("unweighted", "oracle", "softmin", "routed", "own", "own-detached", "own-target")
EARLIER = tuple(arm for arm in ARMS      # of sets with one lambda
                if arm not in ("unweighted-5", *ROUTED[1:]))
SERIES = {8: {"shapes-noise": ARMS, "cifar10-flat": ARMS, "shapes-clean": CLEAN,
              "shapes-blocks": EARLIER, "cifar10-random": EARLIER,
              "cifar10-clean": tuple(arm for arm in EARLIER if arm != "oracle")},
          24: {"shapes-noise": ARMS, "cifar10-flat": ARMS,
               "shapes-clean": ("unweighted", *ROUTED, "unweighted-5", "own-detached"),
               "shapes-blocks": EARLIER,
               "cifar10-random": ("unweighted", "oracle", "softmin", "own-detached", "own-target")},
          72: {"shapes-noise": LONG, "shapes-blocks": LONG, "cifar10-flat": LONG}}
RUN = ("--model vit_nano --batch-size 64 --warmup-epochs 1 --lr 2e-3 --drop-path 0 --amp off "
       "--no-compile --workers 0").split()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=list(SETS))
    add("--epochs", nargs="+", type=int, choices=SERIES, default=list(SERIES))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--cifar", default="cifar10", metavar="FOLDER",
        help="CIFAR-10 in ImageNet's layout (default: torchvision's, in data/)")
    add("--teachers", default="runs/control", metavar="FOLDER")
    add("--out", type=Path, default=HERE / "control.jsonl", metavar="FILE")
    return parser.parse_args(argv)


# --------------------------------------------------------------------------- the images

class Cached:
    """`count` images of a set, in memory. Of each, `plain` is the same without noise, and `noise`,
    uint8 [1, H, W], is 255 where it is noise; `whole`, uint8 [M, 3, S, S], are their center views.
    """

    def __init__(self, source: str, split: str, size: int, count: int):
        dataset = data.open_images(source, split, size)
        plain = Shapes(split, size) if source == "shapes-noise" else dataset
        count = min(count, len(dataset))
        indices = [i * len(dataset) // count for i in range(count)]      # all classes alike
        self.images, labels = zip(*(dataset[i] for i in indices))
        self.plain = [plain[i][0] for i in indices]
        self.noise = [255 * (image != other).any(0, keepdim=True).byte()
                      for image, other in zip(self.images, self.plain)]
        self.whole = torch.stack([data.center_view(image, size) for image in self.images])
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.images)


class Views(data.TrainViews):
    """TrainViews with "noise", bool [N]: the patches of which at least 95 % is noise. In `blocks`,
    noise covers whole patches or none: those of which at least half would be noise.
    """

    def __init__(self, blocks: bool, *args):
        super().__init__(*args)
        self.blocks = blocks

    def __getitem__(self, key: tuple[int, int]) -> dict:
        rng = common.generator("view", self.seed, *key)
        images = self.dataset.plain if self.blocks else self.dataset.images
        view = self.view(rng, torch.cat([images[key[1]], self.dataset.noise[key[1]]]), 0)
        image, noise = view["image"].split([3, 1])
        patch_size = self.image_size // self.grid
        noise = F.avg_pool2d(noise / 255, patch_size) >= (0.5 if self.blocks else 0.95)
        if self.blocks:
            pixels = torch.from_numpy(rng.integers(256, size=image.shape, dtype=np.uint8))
            where = noise.repeat_interleave(patch_size, 1).repeat_interleave(patch_size, 2)
            image = torch.where(where, pixels, image)
        noise = noise.flip(-1) if view["flip"] else noise      # as `augment` does with the image
        return view | {"image": image, "noise": noise.flatten()}


class Planting:
    """Chooses patches of batches, and replaces the teacher's tokens there."""

    def __init__(self, how: str, teacher, views: Views, seed: int, device: torch.device):
        self.how, self.teacher = how, teacher
        self.drawn = dict(generator=torch.Generator(device).manual_seed(seed), device=device)
        first = [views[0, i]["image"] for i in range(min(512, len(views)))]
        with torch.no_grad():
            tokens = teacher(torch.stack(first).to(device) / 255)[:, 1:].flatten(0, 1)
        self.mean, self.std = tokens.mean(0), tokens.std(0)

    @torch.no_grad()
    def __call__(self, batch: dict) -> tuple[Tensor, ...]:
        """A batch of Views -> images [B, 3, S, S], mask [B, N], the teacher's tokens with planted
        ones [B, 1 + N, D], and planted [B, N]. Planted are the 40 % of an image's patches that are
        flattest, or 40 % at random, or those that are noise.
        """
        images, planted = data.augment(batch), batch["noise"]
        tokens = self.teacher(images)
        if self.how in ("flat", "random"):
            order = torch.rand(planted.shape, **self.drawn)
            if self.how == "flat":      # by the variance of a patch's pixels, mean over channels
                patch_size = images.shape[-1] // math.isqrt(planted.shape[1])
                order = patchify(images, patch_size).unflatten(-1, (3, -1)).var(-1).mean(-1)
            planted = order.argsort(1).argsort(1) < round(0.4 * planted.shape[1])
        random = torch.randn(tokens[:, 1:].shape, **self.drawn)
        patches = torch.where(planted[..., None], self.mean + self.std * random, tokens[:, 1:])
        return images, batch["mask"], torch.cat([tokens[:, :1], patches], dim=1), planted


# ---------------------------------------------------------------------------- one arm

def hidden_router(dim: int) -> nn.Module:
    """A router with a hidden layer: tokens [B, T, D] -> dispatch weights [B, T, 1]"""
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1),
                         nn.Softmax(dim=1))


class Student(nn.Module):
    """The student of pretrain.py, and what weights its loss in an arm.

    `others` are the students of the arms before it.
    """

    def __init__(self, arm: str, args, teacher_dim: int, others: dict[str, nn.Module]):
        super().__init__()
        common.seed_torch("weights", args.seed)
        self.arm, self.others = arm, [others]      # in a list, because they are no part of it
        self.model = pretrain.build_student(args, teacher_dim)
        self.encoder = self.model.encoder
        self.last = max(self.encoder.moe_blocks)
        self.encoder.blocks[self.last].mlp.register_forward_pre_hook(self.remember)
        dims = {"own": self.encoder.dim, "own-detached": self.encoder.dim,
                "own-target": teacher_dim}
        self.own = hidden_router(dims[arm]) if arm in dims else None

    def remember(self, moe, inputs: tuple[Tensor]):
        self.entering, = inputs      # tokens [B, 1 + V, D]

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
        dispatch = pred.routing[self.last].dispatch
        weight = patch_weights(dispatch, expert=0, detach=self.arm == "detached")
        if self.arm == "router-only":
            router = self.encoder.blocks[self.last].mlp.router
            weight = patch_weights(router(self.entering.detach()).dispatch)
        elif self.arm == "own":
            dispatch = self.own(self.entering)
        elif self.arm == "own-detached":
            dispatch = self.own(self.entering.detach())
        elif self.arm == "own-target":
            dispatch = self.own(torch.cat([targets[:, :1], seen_targets], 1))
        if self.own is not None:
            weight = patch_weights(dispatch)
        if self.arm in ("unweighted", "unweighted-5"):
            weight = torch.ones_like(patch_loss)
        elif self.arm == "oracle":
            weight = 1 - seen_planted.to(patch_loss)
        elif self.arm == "softmin":      # the p that minimizes sum(p loss) - lambda H(p)
            weight = (-patch_loss.detach() / LAMBDA).softmax(1)
        elif self.arm == "copied":
            with torch.no_grad():
                _, weight, _, _ = self.others[0]["routed"](images, mask, targets, planted)
        return patch_loss, weight, seen_planted, dispatch_entropy(dispatch).sum()


def compute_loss(patch_loss: Tensor, weight: Tensor, entropy: Tensor, lambda_: float) -> Tensor:
    """Eq. 5 and 7"""
    some = weight.sum(1) > 0      # of an image whose seen patches are all planted, nothing is left
    return weighted_mean(patch_loss[some], weight[some]) - lambda_ * entropy


def train(arms: tuple[str, ...], args, process, views: Views, planting: Planting):
    """pretrain.main without its log and checkpoints -> {arm: its student}, all of which are
    trained at once, on the same batches
    """
    students, teacher_dim = {}, planting.teacher.dim
    for arm in arms:
        students[arm] = Student(arm, args, teacher_dim, students).to(process.device).train()
    optimizers = [optim.adamw(student, args.lr, args.weight_decay, betas=(0.9, 0.95))
                  for student in students.values()]
    epoch_steps = len(views) // args.batch_size
    steps = args.epochs * epoch_steps
    order = data.train_order(len(views), args.batch_size, 1, args.seed, 0, steps)
    for step, batch in enumerate(data.load(views, order, process, workers=0)):
        batch = planting(batch)
        lr = optim.learning_rate(step, steps, args.warmup_epochs * epoch_steps, args.lr,
                                 args.min_lr)
        for student, optimizer in zip(students.values(), optimizers):
            patch_loss, weight, _, entropy = student(*batch)
            loss = compute_loss(patch_loss, weight, entropy, LAMBDAS.get(student.arm, LAMBDA))
            process.scaler.scale(loss).backward()
            optim.set_rate(optimizer, lr)
            optim.optimizer_step(optimizer, process.scaler, args.clip_grad)
    return students


# ---------------------------------------------------------------------------- measures

@torch.no_grad()
def observe(student: Student, batches) -> tuple[Tensor, Tensor, Tensor]:
    """Of the visible patches of held-out batches: their token losses, their weights, which sum to 1
    in each image, and whether they are planted, [images, V] each
    """
    found = []
    for batch in batches:
        losses, weights, planted, _ = student(*batch)
        found.append((losses, weights / weights.sum(1, keepdim=True).clamp_min(1e-30), planted))
    losses, weights, planted = (torch.cat(parts) for parts in zip(*found))
    return losses, weights, planted


def find_lookalikes(weights: Tensor, planted: Tensor) -> Tensor:
    """The clean patches that weigh less than half of their image's mean clean patch, [images, V]"""
    clean = ~planted
    mean = (weights * clean).sum(1, keepdim=True) / clean.sum(1, keepdim=True)
    return clean & (weights < mean / 2)


def summarize(losses: Tensor, weights: Tensor, planted: Tensor, lookalikes: Tensor) -> dict:
    """Mean losses of clean patches, look-alikes and others; the share of look-alikes among clean
    patches; the mean weight of planted patches over that of clean ones. All are [images, V].
    """
    clean = ~planted
    found = {"loss": losses[clean].mean(),
             "loss_lookalikes": losses[lookalikes].mean(),
             "loss_others": losses[clean & ~lookalikes].mean(),
             "lookalikes": lookalikes.sum() / clean.sum(),
             "planted_weight": weights[planted].mean() / weights[clean].mean()}
    return {name: value.item() for name, value in found.items()}


@torch.no_grad()
def knn_accuracy(encoder: ViT, train_set: Cached, val_set: Cached, device) -> float:
    """In percent, of the mean patch token of whole images"""
    def features(images: Tensor) -> Tensor:
        tokens = [encoder(normalize(part.to(device) / 255))[0] for part in images.split(256)]
        return F.normalize(torch.cat(tokens)[:, 1:].mean(1), dim=1)
    labels = train_set.labels.to(device)
    predicted = knn.classify(features(val_set.whole), features(train_set.whole), labels,
                             int(labels.max()) + 1, k=20, temperature=0.07)
    return 100 * (predicted.cpu() == val_set.labels).float().mean().item()


# ---------------------------------------------------------------------------- all rows

def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_teacher(folder: str, flags: list[str]) -> float:
    """A run of finetune.py, which goes on if it has begun -> its accuracy in percent"""
    # a process of its own, which ends with its lock on the folder and its handlers of signals
    subprocess.run([sys.executable, HERE.parent / "finetune.py", *flags, "--augment", "plain",
                    "--out", folder], check=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})
    return read_rows(Path(folder, "log.jsonl"))[-1]["top1"]


def run_series(options, name: str, epochs: int, seed: int):
    """Trains those arms of one set, length and seed that have no rows yet."""
    key = {"set": name, "epochs": epochs, "seed": seed}
    there = {row["arm"] for row in read_rows(options.out) if key.items() <= row.items()}
    missing = [arm for arm in SERIES[epochs][name] if arm not in there]
    if not missing:
        return
    # look-alikes are found by own-detached, and copied has the weights of routed
    needed = {*missing, "own-detached", *(["routed"] if "copied" in missing else [])}
    arms = tuple(arm for arm in ARMS if arm in needed)
    source, how, size, patch, teacher_epochs = SETS[name]
    source = options.cifar if source == "cifar10" else source
    flags = [*RUN, "--data", source, "--image-size", str(size), "--patch-size", str(patch),
             "--seed", str(seed)]
    folder = f"{options.teachers}-{Path(source).name}-{seed}"
    top1 = train_teacher(folder, [*flags, "--epochs", str(teacher_epochs)])
    args = pretrain.parse_args([*flags, "--epochs", str(epochs), "--objective", "token"])
    process = common.Process(args)
    teacher = build_frozen(f"{folder}/last.pt").to(process.device)
    train_set = Cached(source, "train", size, IMAGES)
    val_set = Cached(source, "val", size, 1024)
    views, val_views = (
        Views(how == "blocks", each, size, view_seed, size // patch, args.mask_ratio)
        for each, view_seed in ((train_set, seed), (val_set, 0)))
    planted = how, teacher, views, seed, process.device
    students = train(arms, args, process, views, Planting(*planted))
    order = [[(0, i) for i in part.tolist()] for part in torch.arange(len(val_set)).split(64)]
    batches = list(map(Planting(*planted), data.load(val_views, order, process, workers=0)))
    observed = {arm: observe(student.eval(), batches) for arm, student in students.items()}
    _, *reference = observed["own-detached"]
    lookalikes = find_lookalikes(*reference)
    rows = [key | {"arm": arm, "teacher_top1": top1} | summarize(*observed[arm], lookalikes)
            | {"knn": knn_accuracy(student.encoder, train_set, val_set, process.device)}
            for arm, student in students.items() if arm in missing]
    lines = [json.dumps(rounded(row)) for row in rows]
    with open(options.out, "a") as file:
        file.writelines(f"{line}\n" for line in lines)
    print(*lines, sep="\n", flush=True)


def main(options: argparse.Namespace):
    torch.set_num_threads(1)
    for epochs in options.epochs:
        for seed in options.seeds:
            for name in SERIES[epochs]:
                if name in options.sets:
                    run_series(options, name, epochs, seed)


if __name__ == "__main__":
    common.launch(main, parse_args())
