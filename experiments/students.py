"""What experiments/compare.py trains and measures: small students on a teacher's cached tokens.

`prepare` writes images, labels and tokens into a folder, once; `open_sets` reads them; `train` is
the loop of pretrain.py on them; `probe` and k-NN measure a student's features.
"""

import functools
import json
import math
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import knn
import optim
from common import UserError
from data import BICUBIC, block_mask, open_images
from encoders import TimmEncoder, build_frozen
from losses import explore_losses, patch_weights, token_loss, weighted_mean
from model import Explore, ViT, build_vit, normalize

GRID, BATCH, RATE = 8, 64, 2e-3
TEACHER_IMAGES = 6000      # at most so many test images measure the teacher
RAW_SIZE = 32              # of the images whose raw pixels are a reference


# ------------------------------------------------------------------------- images and tokens

def square(image: Tensor) -> Tensor:
    """The central square of an image: uint8 [3, H, W] -> [3, S, S]"""
    return TF.center_crop(image, [min(image.shape[1:])] * 2)


def list_images(data: str, images: int, bank: int) -> list[list]:
    """The (data set, index) of images to train on, of the bank, whose labels probe and k-NN use,
    and of the test set: val/ and, if there is a bank, what is left of train/. Raises UserError.
    """
    train, val = (open_images(data, split, 64) for split in ("train", "val"))
    images = min(images, len(train) - bank)
    if images < BATCH:
        raise UserError(f"--data {data} has {len(train)} images in train/, too few for --bank "
                        f"{bank} and {BATCH} to train on")
    chosen = [i * len(train) // images for i in range(images)]
    rest = sorted(set(range(len(train))) - set(chosen))
    labeled = [rest[i * len(rest) // bank] for i in range(bank)]
    left = sorted(set(rest) - set(labeled)) if bank else []
    return [[(train, i) for i in chosen], [(train, i) for i in labeled],
            [(train, i) for i in left] + [(val, i) for i in range(len(val))]]


class Teacher:
    """A frozen encoder by name. Called with images, it returns tokens [B, N, D], or [B, 1 + N, D]
    with [CLS] first if it is a vision transformer.

    A network with a map of features pads images with zeros, and beside zeros, tokens are easy to
    predict. So its images get a margin of their reflection, whose tokens are left out.
    """

    def __init__(self, name: str):
        self.frozen = build_frozen(name, GRID)
        self.margin = isinstance(self.frozen, TimmEncoder) and not self.frozen.is_vit
        self.size, self.dim = self.frozen.image_size, self.frozen.dim
        self.count = GRID ** 2 + (not self.margin)      # of tokens
        if self.margin:
            self.frozen = build_frozen(name, GRID + 2)

    @torch.no_grad()
    def __call__(self, images: list[Tensor]) -> Tensor:
        """images uint8 [3, H, W]"""
        x = torch.cat([F.interpolate(square(image)[None] / 255, self.size, mode="bicubic",
                                     antialias=True) for image in images])
        if not self.margin:
            return self.frozen(x)
        x = F.pad(x, (self.size // GRID,) * 4, mode="reflect")
        tokens = self.frozen(x)[:, 1:].unflatten(1, (GRID + 2, GRID + 2))
        return tokens[:, 1:-1, 1:-1].flatten(1, 2)


def prepare(folder: Path, data: str, teacher: str, image_size: int, images: int, bank: int):
    """Writes all images and labels, and the teacher's tokens of those to train on, into a folder,
    and then facts.json. Raises UserError.
    """
    facts = dict(data=data, teacher=teacher, image_size=image_size, images=images, bank=bank)
    sets = list_images(data, images, bank)
    counts, places = [len(each) for each in sets], sum(sets, [])
    encoder = Teacher(teacher)
    folder.mkdir(parents=True, exist_ok=True)
    create = functools.partial(np.lib.format.open_memmap, mode="w+")
    small = create(folder / "images.npy", dtype=np.uint8,
                   shape=(len(places), 3, image_size, image_size))
    tokens = create(folder / "tokens.npy", dtype=np.float16,
                    shape=(counts[0], encoder.count, encoder.dim))
    labels = np.zeros(len(places), np.int64)
    for at in common.progress_bar(range(0, len(places), 16), "teacher"):
        found = [dataset[i] for dataset, i in places[at:at + 16]]
        for i, (image, label) in enumerate(found, start=at):
            small[i] = TF.resize(square(image), image_size, BICUBIC).numpy()
            labels[i] = label
        if at < counts[0]:
            part = [image for image, _ in found[:counts[0] - at]]
            tokens[at:at + 16] = encoder(part).half().numpy()
    np.save(folder / "labels.npy", labels)
    (folder / "facts.json").write_text(json.dumps(facts | dict(counts=counts)))


def pool(tokens: Tensor) -> Tensor:
    """A teacher's [CLS] [B, D], or the mean of its tokens if it has none"""
    return tokens[:, 0] if tokens.shape[1] > GRID ** 2 else tokens.mean(1)


def open_sets(folder: Path, held_out: bool = False) -> list[dict[str, np.ndarray]]:
    """What `prepare` wrote -> the training set, the bank and the test set: images uint8
    [M, 3, S, S], labels [M] and, of training images, the teacher's tokens [M, N, D]

    Without a bank, the bank is the training set. With `held_out`, every fourth training image is in
    the test set, and all others are in the bank.
    """
    first, second, _ = json.loads((folder / "facts.json").read_text())["counts"]
    files = {name: np.load(folder / f"{name}.npy", mmap_mode="r")
             for name in ("images", "labels", "tokens")}
    train = {name: x[:first] for name, x in files.items()}
    if held_out:
        test = np.arange(first) % 4 == 0
        train, test = ({name: x[index] for name, x in train.items()} for index in (~test, test))
        return [train, train, test]
    del files["tokens"]
    bank = {name: x[first:first + second] for name, x in files.items()} if second else train
    return [train, bank, {name: x[first + second:] for name, x in files.items()}]


def find_features(folder: Path, held_out: bool) -> tuple[Tensor, Tensor, np.ndarray]:
    """The teacher's [CLS] or mean token of the bank [M, D] and of Q test images, and which these
    are [Q]
    """
    facts = json.loads((folder / "facts.json").read_text())
    _, bank, test = open_sets(folder, held_out)
    _, *places = sets = list_images(facts["data"], facts["images"], facts["bank"])
    if [len(each) for each in sets] != facts["counts"]:
        raise UserError(f"{facts['data']} has other images than {folder}; give another --out")
    everything = np.arange(len(bank["labels"]))
    count = min(len(test["labels"]), TEACHER_IMAGES)
    seen = np.arange(count) * len(test["labels"]) // count
    features = []
    for found, index, place in zip((bank, test), (everything, seen), places):
        if "tokens" in found:
            parts = (torch.from_numpy(found["tokens"][part]).float()
                     for part in np.array_split(index, math.ceil(len(index) / 64)))
        else:
            teacher = Teacher(facts["teacher"])
            parts = (teacher([dataset[i][0] for dataset, i in map(place.__getitem__, part)])
                     for part in np.array_split(index, math.ceil(len(index) / 16)))
        features.append(torch.cat([pool(tokens) for tokens in parts]))
    return *features, seen


def checksum(*arrays: np.ndarray) -> str:
    value = 0
    for array in arrays:
        for at in range(0, len(array), 500):      # they may be larger than the memory
            value = zlib.crc32(np.ascontiguousarray(array[at:at + 500]), value)
    return f"{value:08x}"


def describe_tokens(tokens: np.ndarray) -> list[float]:
    """Four numbers of tokens [M, N, D] that tell teachers apart: mean absolute values of the first
    token's first channels. A checksum would differ from CPU to CPU, as the last bits do.
    """
    return np.abs(tokens[:, 0, :4]).mean(0, dtype=np.float64).tolist()


# ------------------------------------------------------------------------------- the students

def read_batch(train_set: dict, rng: np.random.Generator, index: np.ndarray) -> tuple[Tensor, ...]:
    """Flips half of the images, and their tokens -> images [B, 3, S, S] in [0, 1], the teacher's
    tokens [B, 1 + N, D], [CLS] or their mean first, mask bool [B, N], ids_keep [B, V]
    """
    index = np.sort(index)      # as they lie in the file
    flip = rng.random(len(index)) < 0.5
    images, tokens = train_set["images"][index], train_set["tokens"][index]
    images[flip] = images[flip, ..., ::-1]
    patches = tokens[:, -GRID ** 2:].reshape(-1, GRID, GRID, tokens.shape[2])
    patches[flip] = patches[flip, :, ::-1]      # and so are `tokens`, of which this is a view
    targets = torch.empty(len(index), 1 + GRID ** 2, tokens.shape[2])
    targets[:, -tokens.shape[1]:] = torch.from_numpy(tokens)
    if tokens.shape[1] == GRID ** 2:
        targets[:, 0] = targets[:, 1:].mean(1)
    mask = torch.from_numpy(np.stack([block_mask(rng, GRID, 0.4) for _ in index]))
    return (torch.from_numpy(images) / 255, targets, mask,
            (~mask).nonzero()[:, 1].view(len(mask), -1))


def train(setting: dict, train_set: dict, epochs: int, seed: int, positions: Tensor | None = None,
          lender: ViT | None = None) -> tuple[Explore, dict]:
    """The loop of pretrain.py on cached tokens -> a student, and means of the last epoch's log

    positions [N]: the weights of `fixed`; lender: the routed student whose weights `lent` takes
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    size = train_set["images"].shape[2]
    vit = build_vit("vit_nano", image_size=size, patch_size=size // GRID,
                    experts=setting["experts"])
    student = Explore(vit, train_set["tokens"].shape[2]).train()
    optimizer = optim.adamw(student, RATE, 0.05, (0.9, 0.95), lr_scale=lambda name: (
        setting["router_rate"] if ".router." in name else 1.0))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    routed = setting["weights"] in ("dispatch", "uniform")
    coupling = dict(lambdas=torch.tensor([setting["lambda_"], 0.0]), detach=setting["detach"],
                    loss_weights=setting["weights"] if routed else "uniform")
    w = torch.tensor([1.0, setting["cls_weight"]])
    epoch_steps = len(train_set["images"]) // BATCH
    logged = [{}]
    for step in range(epochs * epoch_steps):
        at = step % epoch_steps * BATCH
        if at == 0:
            order, logged = rng.permutation(len(train_set["images"])), []
        images, targets, mask, ids_keep = read_batch(train_set, rng, order[at:at + BATCH])
        optim.set_rate(optimizer, optim.learning_rate(step, epochs * epoch_steps, epoch_steps,
                                                      RATE, 1e-6))
        pred = student(normalize(images), mask, ids_keep)
        losses, regularizer, metrics = explore_losses(pred, targets, images, mask,
                                                      **coupling if setting["experts"] else {})
        if not routed:      # weights that are not the router's
            index = ids_keep[..., None].expand(-1, -1, targets.shape[2])
            patch_loss = token_loss(pred.tokens[:, 1:], targets[:, 1:].gather(1, index))
            if setting["weights"] == "fixed":
                weight = positions[ids_keep]
            elif setting["weights"] == "loss":
                weight = (-patch_loss.detach() / setting["lambda_"]).softmax(1)
            else:
                weight = find_weights(lender, images, ids_keep)
            losses = torch.stack([weighted_mean(patch_loss, weight), losses[1]])
        (w @ losses + regularizer).backward()
        optim.optimizer_step(optimizer, scaler, clip_grad=3.0)
        logged.append({name: np.ravel(x)[0] for name, x in metrics.items()})      # expert 0's
    means = {name: float(np.mean([each[name] for each in logged])) for name in logged[0]}
    return student.eval(), means


@torch.no_grad()
def find_weights(vit: ViT, images: Tensor, ids_keep: Tensor | None = None) -> Tensor:
    """Expert 0's weights of the last router on patches [B, V], images [B, 3, S, S] in [0, 1]"""
    _, routing = vit(normalize(images), ids_keep)
    return patch_weights(routing[vit.moe_blocks[-1]].dispatch)


def batches(images: np.ndarray):
    """Yields images uint8 [M, 3, S, S] in parts, in [0, 1]."""
    for at in range(0, len(images), 250):
        yield torch.from_numpy(images[at:at + 250].copy()) / 255


def shrink(images: np.ndarray) -> Tensor:
    """The pixels [M, 3072] of images uint8 [M, 3, S, S], at RAW_SIZE pixels a side"""
    return torch.cat([F.interpolate(part, RAW_SIZE, mode="area").flatten(1)
                      for part in batches(images)])


@torch.no_grad()
def find_cls(vit: ViT, images: np.ndarray) -> Tensor:
    """[CLS] [M, D] of images uint8 [M, 3, S, S]"""
    return torch.cat([vit(normalize(part))[0][:, 0] for part in batches(images)])


def probe(x: Tensor, y: Tensor, test_x: Tensor, classes: int) -> Tensor:
    """A linear probe by ridge regression on standardized features: x [M, D], y [M], test_x [Q, D]
    -> classes [Q]. A quarter of the labeled images chooses the penalty.
    """
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x, test_x = (F.pad(((each - mean) / std).double(), (0, 1), value=1.0) for each in (x, test_x))

    def fit(x: Tensor, y: Tensor, penalty: float) -> Tensor:
        gram = x.T @ x + penalty * len(x) * torch.eye(x.shape[1]).to(x)
        return torch.linalg.solve(gram, x.T @ F.one_hot(y, classes).double())

    held = torch.arange(len(x), device=x.device) % 4 == 0
    penalty = max((10.0 ** power for power in range(-6, 2)), key=lambda penalty: (
        (x[held] @ fit(x[~held], y[~held], penalty)).argmax(1) == y[held]).sum())
    return (test_x @ fit(x, y, penalty)).argmax(1)


def classify(x: Tensor, y: Tensor, test_x: Tensor, truth: Tensor) -> Tensor:
    """Whether probe and k-NN are right: features x [M, D] of the bank, labels y [M], test_x [Q, D],
    truth [Q] -> bool [2, Q]
    """
    classes = 1 + int(y.max())
    voted = knn.classify(F.normalize(test_x), F.normalize(x), y, classes, k=min(20, len(x)),
                         temperature=0.07)
    return torch.stack([probe(x, y, test_x, classes), voted]) == truth
