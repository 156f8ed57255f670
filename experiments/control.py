"""A control for routed losses: some targets are planted, so that the best weights are known.

    python experiments/control.py shapes-noise --plant noise --rows unweighted oracle softmin-V1
    python experiments/control.py /data/cifar10 --plant random --share 0.4 --epochs 24 --seeds 0 1 2

A student is pretrained with the token loss alone. On the planted patches, the teacher's tokens are
replaced by random ones of the same mean and standard deviation, drawn anew each time, so nothing
can be learned there. A row is the name of an arm of ARMS; behind a dash, its lambda: L0.5 is
--entropy-weight 0.5, and V1 is --variation 1; then changes, see CHANGES. What each run measures on
validation images is a line of --out; a line that is there is not measured again. With --draw, the
first row is trained for a picture instead: its router's weights after each epoch.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import common
import data
import finetune
import knn
import pretrain
from balance import Lambda
from checkpoint import load_checkpoint
from losses import (
    dispatch_entropy,
    patch_std,
    patch_weights,
    routed_mean,
    softmin_weights,
    token_loss,
)
from model import Router
from routing import roc_auc
from run import rounded
from shapes import Shapes
from teacher import Teacher, build_teacher

# Flags of pretrain.py. The oracle's weights are made here. The loss of a routed arm trains the
# encoder in two ways: it is weighted, and its gradient passes through the router. `aside` has the
# second alone, with an unweighted loss.
ARMS = {
    "unweighted": "--loss-weights uniform",
    "oracle": "--loss-weights uniform",
    "softmin": "--loss-weights softmin",
    "routed": "",
    "aside": "",
    "detached": "--detach",
    "router": "--experts 0 --loss-router",
    "none": "--experts 0",
    "none_oracle": "--experts 0",
    "none_softmin": "--experts 0 --loss-weights softmin",
}
# what may follow a row's lambda, as in routed-V1-rate20
CHANGES = {
    "keep": "the oracle's weight of planted patches, where the others have 1",
    "start": "the routers' scale starts there instead of at 1",
    "rate": "their scale learns at so many times the rate",
    "cut": "the student's loss leaves out patches below this share of the mean weight",
    "times": "softmin's weights times the router's",
    "block": "the block whose router weights the loss",
}
W = torch.ones(1)      # of Eq. 8: the token loss is the only objective
FAILED = 30      # a teacher below this top-1 accuracy in percent failed; chance is 10
RUN = ["--batch-size", "64", "--warmup-epochs", "1", "--lr", "2e-3", "--drop-path", "0", "--amp",
       "off", "--workers", "0"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("data", metavar="DATA", help="as --data of pretrain.py, with labels")
    add("--plant", choices=("none", "noise", "random", "pasted"), default="none",
        help="noise: the patches that are noise, of shapes-noise; random: a --share of each "
             "view's patches;\npasted: the same, and their pixels become noise, too")
    add("--share", type=float, default=0.4, help="of patches (default: 0.4)")
    add("--rows", nargs="+", default=["unweighted", "oracle"], metavar="ROW")
    add("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    add("--epochs", type=int, default=8)
    add("--model", default="vit_nano")
    add("--encoding", choices=("sparse", "dense"), default="sparse")
    add("--image-size", type=int, default=48)
    add("--patch-size", type=int, default=6)
    add("--images", type=int, default=4096, help="of train/ (default: 4096)")
    add("--teacher", default="runs/control-teacher", metavar="FOLDER",
        help="the teacher of seed S is FOLDER-S: it is trained there, with seed S, on all of "
             "train/, if it is missing;\na seed whose teacher failed is left out")
    add("--teacher-seed", type=int, metavar="S", help="the teacher of all seeds is FOLDER-S")
    add("--teacher-epochs", type=int, default=4)
    add("--out", type=Path, default=HERE / "control.jsonl", metavar="FILE")
    add("--draw", type=Path, metavar="FILE", help="draw the first row of the first seed")
    return parser.parse_args(argv)


# --------------------------------------------------------------------------- the images

class Cached(Dataset):
    """The images of a data set in memory, and for each a map of kinds, uint8 [3, H, W].

    Its channels are 255 on the object, 255 where the image is noise, and unused. A set without
    masks has zeros.
    """

    def __init__(self, dataset: Dataset, indices):
        self.rows = [dataset[int(i)] for i in indices]
        self.maps = [kinds(dataset, int(i), row[0]) for i, row in zip(indices, self.rows)]
        self.classes = dataset.classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index]


def kinds(dataset: Dataset, index: int, image: Tensor) -> Tensor:
    found = torch.zeros_like(image)
    if isinstance(dataset, Shapes):
        found[0] = 255 * dataset.mask(index)
        if dataset.noise:      # drawn last: without it, the image is the same elsewhere
            split = "val" if dataset.stream else "train"
            other, _ = Shapes(split, image.shape[-1])[index]
            found[1] = 255 * (image != other).any(0)
    return found


class Views(data.TrainViews):
    """TrainViews that also crop and flip the maps: "object", "noise" and "clear", bool [N], are the
    patches of which at least 0.5 is on the object, and at least 0.95, or at most 0.05, is noise.
    """

    def __getitem__(self, key: tuple[int, int]) -> dict:
        seed = (self.seed, *key)
        image, label = self.dataset[key[1]]
        view = self.view(np.random.default_rng(seed), image, label)
        maps = self.view(np.random.default_rng(seed), self.dataset.maps[key[1]], label)["image"]
        maps = maps.flip(-1) if view["flip"] else maps
        size = self.image_size // self.grid
        shares = F.avg_pool2d(maps[:2] / 255, size).flatten(1)
        return view | {"object": shares[0] >= 0.5, "noise": shares[1] >= 0.95,
                       "clear": shares[1] <= 0.05}


class Planting:
    """Chooses patches, and replaces the teacher's tokens there, and pixels if it is to paste."""

    def __init__(self, how: str, share: float, seed: int):
        self.how, self.share = how, share
        self.generator = torch.Generator().manual_seed(seed)

    def learn(self, tokens: Tensor):
        """Takes mean and standard deviation of each feature from the teacher's [B, 1 + N, D]."""
        patches = tokens[:, 1:].flatten(0, 1)
        self.mean, self.std = patches.mean(0), patches.std(0)

    def choose(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, 3, S, S], noise bool [B, N] -> (images, planted [B, N], bool)"""
        if self.how == "noise":
            return images, noise
        if self.how == "none":
            return images, torch.zeros_like(noise)
        ranks = torch.rand(noise.shape, generator=self.generator).argsort(1).argsort(1)
        planted = ranks < round(self.share * noise.shape[1])
        if self.how == "pasted":
            grid = math.isqrt(noise.shape[1])
            where = F.interpolate(planted.view(-1, 1, grid, grid).float(), images.shape[-2:])
            noise = torch.rand(images.shape, generator=self.generator)
            images = torch.where(where > 0, noise, images)
        return images, planted

    def plant(self, tokens: Tensor, planted: Tensor) -> Tensor:
        """The teacher's tokens [B, 1 + N, D], with random ones where planted [B, N]."""
        random = torch.randn(tokens[:, 1:].shape, generator=self.generator)
        patches = torch.where(planted[..., None], self.mean + self.std * random, tokens[:, 1:])
        return torch.cat([tokens[:, :1], patches], dim=1)


# ------------------------------------------------------------------------------ an arm

class Arm:
    """A student that is trained as a row's name says, such as routed-V1-rate20."""

    def __init__(self, name: str, options, seed: int, teacher: Teacher):
        self.kind, *words = name.split("-")
        flags = ARMS[self.kind].split()
        self.changes = {}
        for word in words:
            if word[0] in "LV":
                flags += ["--entropy-weight" if word[0] == "L" else "--variation", word[1:]]
            else:
                change = next(each for each in CHANGES if word.startswith(each))
                self.changes[change] = float(word.removeprefix(change) or 1)
        if "block" in self.changes:
            flags += ["--loss-block", str(int(self.changes["block"]))]
        args = pretrain.parse_args([
            "--data", options.data, "--model", options.model, "--image-size",
            str(options.image_size), "--patch-size", str(options.patch_size), "--epochs",
            str(options.epochs), "--seed", str(seed), "--objective", "token", "--encoding",
            options.encoding, *RUN, *flags])
        self.args, self.process = args, common.Process(args)
        common.seed_torch(seed)
        self.student = pretrain.build_student(args, teacher.dim).train()
        for module in self.student.modules():
            if isinstance(module, Router):
                nn.init.constant_(module.scale, self.changes.get("start", 1.0))
        rate = self.changes.get("rate", 1.0)
        self.optimizer = common.adamw(self.student, args.lr, args.weight_decay, args.betas,
                                      lambda name: rate if name.endswith("scale") else 1.0)
        self.lambdas = Lambda(args.entropy_weight, pretrain.lambda_objectives(args) or ["token"],
                              ["token"], args.variation)

    def weigh(self, pred, patch_loss: Tensor, selected: Tensor, planted: Tensor
              ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weights [B, N] of the student's loss; those that teach the router, if there is one that
        weights the loss; and the dispatch weights [B, T, E], if there are experts.
        """
        dispatch = None
        if pred.loss_routing is not None:
            dispatch = pred.loss_routing.dispatch
        elif pred.routing:
            block, = self.args.loss_block or [max(pred.routing)]
            dispatch = pred.routing[block].dispatch
        if self.kind.endswith("oracle"):
            keep = self.changes.get("keep", 0.0)
            return selected * torch.where(planted, keep, 1.0), None, dispatch
        softmin = softmin_weights(patch_loss, selected, self.lambdas(W)[0])
        if self.args.loss_weights == "softmin":
            return softmin, None, dispatch
        if dispatch is None or self.args.loss_weights == "uniform":
            return selected, None, dispatch
        routed = selected * patch_weights(dispatch, 0, self.args.detach)
        weight = routed
        if self.kind == "aside":
            weight = selected
        if "times" in self.changes:
            weight = softmin * routed.detach()
        if "cut" in self.changes:
            mean = routed.detach().sum(1, keepdim=True) / selected.sum(1, keepdim=True)
            weight = routed.detach() * (routed.detach() >= self.changes["cut"] * mean)
        return weight, routed, dispatch

    def step(self, lr: float, images: Tensor, mask: Tensor, targets: Tensor, planted: Tensor):
        """A step of pretrain.main, with Eq. 5 and 7."""
        common.set_rate(self.optimizer, lr)
        pred = self.student(data.normalize(images), mask)
        patch_loss = token_loss(pred.tokens[:, 1:], of_student(pred, targets[:, 1:]))
        selected = select(pred, mask)
        weight, routed, dispatch = self.weigh(pred, patch_loss, selected,
                                              of_student(pred, planted))
        # an image without any weight, as the oracle may have, counts as zero
        total = weight.sum(1).clamp_min(1e-20)
        loss = ((weight * patch_loss).sum(1) / total).mean()
        router_loss = torch.zeros(())
        if routed is not None and routed is not weight:
            router_loss = routed_mean(patch_loss.detach(), routed)
        if dispatch is not None:
            lambdas = self.lambdas(W)[:dispatch.shape[-1]]
            router_loss = router_loss - (lambdas * dispatch_entropy(dispatch)).sum()
        self.process.scaler.scale(loss + router_loss).backward()
        common.optimizer_step(self.optimizer, self.process.scaler, self.args.clip_grad)
        self.lambdas.observe({"token_std": patch_std(patch_loss, selected)})
        self.lambdas.update()


def of_student(pred, x: Tensor) -> Tensor:
    """x [B, N, ...] -> those of the patches that the student has tokens of."""
    if pred.ids_keep is None:
        return x
    ids = pred.ids_keep.view(*pred.ids_keep.shape, *[1] * (x.ndim - 2))
    return x.take_along_dim(ids, dim=1)


def select(pred, mask: Tensor) -> Tensor:
    """1.0 for the student's patches that have a loss, else 0.0: [B, N] in dense encoding, else
    [B, V].
    """
    return mask.float() if pred.ids_keep is None else torch.ones(pred.ids_keep.shape)


def train(arms: list[Arm], teacher: Teacher, views: Views, planting: Planting,
          after_epoch=lambda: None):
    """pretrain.main without its log and checkpoints: all arms see the same planted batches.

    `after_epoch` is called at the start, too.
    """
    args = arms[0].args
    plan = common.make_plan(args, 1, len(views))
    order = data.train_order(len(views), args.batch_size, plan.micro_batch, args.seed, 0,
                             plan.steps)
    after_epoch()
    for step, batch in enumerate(data.load(views, order, arms[0].process)):
        images = data.augment(batch)
        images, planted = planting.choose(images, batch["noise"])
        with torch.no_grad():
            targets = planting.plant(teacher(images), planted)
        for arm in arms:
            arm.step(plan.learning_rate(step), images, batch["mask"], targets, planted)
        if (step + 1) % (plan.steps // args.epochs) == 0:
            after_epoch()
    for arm in arms:
        arm.student.eval()


# ------------------------------------------------------------------------- what it gave

@torch.no_grad()
def measure(arm: Arm, teacher: Teacher, views: Views, planting: Planting) -> dict:
    """On cropped and masked validation images, the same for all rows: for each kind of patch, the
    token loss with clean targets, the part of their variance that is explained, and the weight
    that the row gives with planted targets, in units of the mean.
    """
    planting.generator.manual_seed(0)
    columns = []
    order = [[(0, i) for i in part.tolist()] for part in torch.arange(len(views)).split(64)]
    for batch in data.load(views, order, arm.process):
        images, mask = data.augment(batch), batch["mask"]
        images, planted = planting.choose(images, batch["noise"])
        pred = arm.student(data.normalize(images), mask)
        clean = teacher(images)
        found = pred.tokens[:, 1:]
        target = of_student(pred, clean[:, 1:])
        loss = token_loss(found, target)
        hard = token_loss(found, of_student(pred, planting.plant(clean, planted)[:, 1:]))
        selected = select(pred, mask)
        there = of_student(pred, planted)
        weight, routed, _ = arm.weigh(pred, hard, selected, there)
        weight = weight if routed is None else routed
        mean = weight.sum(1, keepdim=True) / selected.sum(1, keepdim=True)
        weight = weight / mean.clamp_min(1e-20)
        columns.append([each.flatten(0, 1)[selected.flatten() > 0] for each in (
            loss, hard, weight, there, of_student(pred, batch["object"]),
            of_student(pred, batch["noise"]), of_student(pred, batch["clear"]), found,
            F.layer_norm(target, target.shape[-1:]))])
    columns = map(torch.cat, zip(*columns))
    loss, hard, weight, there, on_object, noise, clear, found, target = columns
    row = {"cv": weight.std().item(), "planted": there.float().mean().item(),
           "correlation": torch.corrcoef(torch.stack([hard, weight]))[0, 1].nan_to_num().item()}
    # where the content says what is planted, the clean loss of these patches cannot be low
    learned = ~there if planting.how in ("noise", "pasted") else torch.ones_like(there)
    for name, group in {"learned": learned, "object": learned & on_object, "noise": noise,
                        "other": learned & ~on_object & ~noise, "clear": learned & clear,
                        "mixed": learned & ~clear & ~noise, "planted": there}.items():
        if group.any():
            error = (found - target)[group].square().mean()
            row |= {f"loss_{name}": loss[group].mean().item(),
                    f"weight_{name}": weight[group].mean().item(),
                    f"explained_{name}": 1 - (error / target[group].var(0).mean()).item()}
    if there.any():
        row["auc"] = roc_auc(weight, ~there)
    order = hard.argsort().tensor_split(20)
    row["curve"] = [[hard[part].mean().item(), weight[part].mean().item()] for part in order]
    return row


@torch.no_grad()
def extract(arm: Arm, dataset: Cached) -> tuple[Tensor, Tensor]:
    """-> [CLS] and mean patch token of whole images, [2, M, D]; labels [M]"""
    features = []
    labels = []
    views = data.CenterViews(dataset, arm.args.image_size)
    order = [part.tolist() for part in torch.arange(len(views)).split(256)]
    for batch in data.load(views, order, arm.process):
        tokens, _ = arm.student.encoder(data.normalize(batch["image"] / 255))
        features.append(torch.stack([tokens[:, 0], tokens[:, 1:].mean(1)]))
        labels.append(batch["label"])
    return torch.cat(features, dim=1), torch.cat(labels)


def probe(bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor) -> float:
    """Accuracy of logistic regression in percent: features [M, D], standardized here."""
    mean, std = bank.mean(0), bank.std(0)
    bank, queries = (bank - mean) / std, (queries - mean) / std
    layer = nn.Linear(bank.shape[1], int(labels.max()) + 1)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(bank), labels) + 1e-3 * layer.weight.square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
    return 100 * (layer(queries).argmax(1) == truth).float().mean().item()


def evaluate(arm: Arm, train_set: Cached, val_set: Cached) -> dict:
    """k-NN of [CLS] and of the mean patch token, and a linear probe of the latter, in percent"""
    bank, labels = extract(arm, train_set)
    queries, truth = extract(arm, val_set)
    row = {}
    for name, known, asked in zip(("knn_cls", "knn_mean"), bank, queries):
        predicted = knn.classify(F.normalize(asked, dim=1), F.normalize(known, dim=1), labels,
                                 len(train_set.classes), 20, 0.07)
        row[name] = 100 * (predicted == truth).float().mean().item()
    return row | {"probe_mean": probe(bank[1], labels, queries[1], truth)}


# --------------------------------------------------------------------------- a picture

def draw(options, count: int = 6):
    """Draws validation images, and expert 0's weights on all of their patches after each epoch."""
    from matplotlib.figure import Figure
    seed = options.seeds[0]
    teacher, _ = make_teacher(options, seed)
    arm = Arm(options.rows[0], options, seed, teacher)
    grid = arm.args.image_size // arm.args.patch_size
    views, val_views = (
        Views(subset(options, split, size), arm.args.image_size, seed, grid, arm.args.mask_ratio)
        for split, size in (("train", options.images), ("val", 1024)))
    planting, shown = (Planting(options.plant, options.share, each) for each in (seed, 0))
    learn(planting, teacher, views)
    batch = next(data.load(val_views, [[(0, i) for i in range(len(val_views))]], arm.process))
    images, planted = shown.choose(data.augment(batch), batch["noise"])
    rows = []

    @torch.no_grad()
    def watch():
        _, routing = arm.student.encoder(data.normalize(images))
        weight = routing[max(routing)].dispatch[:, 1:, 0]                       # [M, N]
        weight = weight / weight.mean(1, keepdim=True)
        print(f"epoch {len(rows)}: planted patches weigh {weight[planted].mean():.2f}", flush=True)
        rows.append(weight[:count].unflatten(1, (grid, grid)))

    train([arm], teacher, views, planting, watch)
    epochs = [0, *(epoch for epoch in (1, 2, 4, 8) if epoch < len(rows))]
    figure = Figure(figsize=(1.3 * count + 1, 1.35 * (1 + len(epochs))), layout="constrained")
    axes = figure.subplots(1 + len(epochs), count)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, image in zip(axes[0], images):
        axis.imshow(image.permute(1, 2, 0))
    axes[0, 0].set_ylabel("image")
    for line, epoch in zip(axes[1:], epochs):
        line[0].set_ylabel(f"epoch {epoch}")
        for axis, weight in zip(line, rows[epoch]):
            colors = axis.imshow(weight, cmap="coolwarm", vmin=0.5, vmax=1.5)
    figure.colorbar(colors, ax=axes[1:], label="weight / uniform", extend="both")
    figure.savefig(options.draw, dpi=72)


# ---------------------------------------------------------------------------- all rows

def make_teacher(options, seed: int) -> tuple[Teacher, dict]:
    """A supervised ViT-nano, trained on all of train/ -> (it, what it is)

    A training that was stopped goes on, and a complete one is not repeated. Another processor
    trains a slightly different teacher, so its digest says which rows can be compared.
    """
    folder = f"{options.teacher}-{seed}"
    scores = finetune.main(finetune.parse_args([
        "--data", options.data, "--model", "vit_nano", "--image-size", str(options.image_size),
        "--patch-size", str(options.patch_size), "--epochs", str(options.teacher_epochs),
        "--seed", str(seed), *RUN, "--augment", "plain", "--layer-decay", "1", "--out", folder]))
    last = f"{folder}/last.pt"
    weights = torch.cat([x.flatten() for x in load_checkpoint(last)["model"].values()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:8]
    return (build_teacher(last, options.image_size // options.patch_size),
            {"teacher_top1": scores["top1"], "teacher_digest": digest})


def subset(options, split: str, count: int) -> Cached:
    """`count` images, with all classes alike: every w-th."""
    dataset = data.open_images(options.data, split, options.image_size)
    count = min(count, len(dataset))
    return Cached(dataset, np.arange(count) * len(dataset) // count)


def main(options: argparse.Namespace):
    torch.set_num_threads(1)
    if options.draw:
        draw(options)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = [json.loads(line).items() for line in lines]
    case = {"set": Path(options.data).name, "plant": options.plant, "share": options.share,
            "encoding": options.encoding, "model": options.model, "epochs": options.epochs,
            "teacher": "own" if options.teacher_seed is None else "one"}
    sets = None
    for seed in options.seeds:
        keys = {name: case | {"row": name, "seed": seed} for name in options.rows}
        names = [name for name, key in keys.items()
                 if not any(key.items() <= row for row in done)]
        if not names:
            continue
        sets = sets or [subset(options, split, count) for split, count in
                        (("train", options.images), ("val", 1024))]
        teacher_seed = seed if options.teacher_seed is None else options.teacher_seed
        teacher, known = make_teacher(options, teacher_seed)
        if known["teacher_top1"] < FAILED:
            print(f"seed {seed} is left out: its teacher has {known['teacher_top1']:.1f} %")
            continue
        for name, row in run_rows(names, options, seed, teacher, *sets):
            with open(options.out, "a") as file:
                file.write(json.dumps(rounded(keys[name] | known | row)) + "\n")
            print(f"seed {seed}, {name}: loss {row['loss_learned']:.4f}, "
                  f"k-NN {row['knn_mean']:.2f}", flush=True)


@torch.no_grad()
def learn(planting: Planting, teacher: Teacher, views: Views):
    first = [views[0, i]["image"] for i in range(min(512, len(views)))]
    planting.learn(teacher(torch.stack(first) / 255))


def run_rows(names: list[str], options, seed: int, teacher: Teacher, train_set: Cached,
             val_set: Cached):
    """Trains the rows of one seed side by side -> yields (name, measures)"""
    started = time.perf_counter()
    arms = [Arm(name, options, seed, teacher) for name in names]
    args = arms[0].args
    grid = args.image_size // args.patch_size
    views = Views(train_set, args.image_size, seed, grid, args.mask_ratio)
    planting = Planting(options.plant, options.share, seed)
    learn(planting, teacher, views)
    train(arms, teacher, views, planting)
    seconds = (time.perf_counter() - started) / len(arms)
    val_views = Views(val_set, args.image_size, 0, grid, args.mask_ratio)
    for name, arm in zip(names, arms):
        row = {"lambda": arm.lambdas(W)[0].item(), "seconds": seconds}
        row |= measure(arm, teacher, val_views, planting)
        yield name, row | evaluate(arm, train_set, val_set)


if __name__ == "__main__":
    main(parse_args())
