"""Images: data sets, views, block masks, loaders, and what happens on the device.

What is random about a training image is a function of (seed, epoch, index), the order of images
one of (seed, epoch): the numbers of workers and processes change nothing. Workers decode, crop
and resize, and send uint8.
"""

import contextlib
import math
import os
import signal
import sys
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torchvision
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import CIFAR10, DatasetFolder, Food101
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional as TF
from tqdm import tqdm

from common import STOP_SIGNALS, LocalError, Machine, UserError, lock
from model import IMAGENET_MEAN, IMAGENET_STD
from shapes import Shapes

BICUBIC = TF.InterpolationMode.BICUBIC


# ------------------------------------------------------------------------------- images

class ImageDataset(Protocol):
    """What a data set offers. Some also have `classes`, the names of their labels, and
    `mask(index)`, an object's pixels, bool [H, W]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """-> (uint8 [3, H, W], label)"""


def read_image(path: str | os.PathLike) -> Tensor:
    """An image file as RGB, uint8 [3, H, W], upright by its EXIF orientation.

    Transparency becomes white.
    """
    with contextlib.suppress(Exception):      # a JPEG: Pillow's pixels, in less time
        jpeg = torchvision.io.read_file(str(path))
        return torchvision.io.decode_jpeg(jpeg, torchvision.io.ImageReadMode.RGB,
                                          apply_exif_orientation=True)
    try:      # other formats, broken files, and JPEGs once torchvision has no decoder any more
        with Image.open(path) as picture:
            if picture.mode[0] in "IF":      # 16 or 32 bits: Pillow would make white of them
                raise ValueError(f"mode {picture.mode}, expected 8 bits a channel")
            picture = ImageOps.exif_transpose(picture)
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(
                    Image.new("RGBA", picture.size, "white"), picture)
            return TF.pil_to_tensor(picture.convert("RGB"))
    except Exception as error:      # a dozen kinds for broken files
        raise LocalError(f"cannot read the image {path} ({type(error).__name__}: {error})"
                         ) from error


class Folder(DatasetFolder):
    """ImageNet's ROOT/{train,val}/CLASS/*.jpg, with the classes of train/."""

    def __init__(self, root: str, split: str):
        folder = os.path.join(root, split)
        try:
            super().__init__(folder, read_image, IMG_EXTENSIONS, allow_empty=True)
            if not self.samples:
                raise FileNotFoundError(f"no image in {folder}")
        except OSError as error:
            raise UserError(f"--data {root}: {error}; expected {{train,val}}/CLASS/*.jpg "
                            "(pretrain.py and routing.py also take photos alone), or cifar10, "
                            "food101, shapes (sh demo.sh needs no images)") from error

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        root = os.path.dirname(directory)
        classes, indices = super().find_classes(os.path.join(root, "train"))
        if unexpected := set(super().find_classes(directory)[0]) - set(classes):
            raise FileNotFoundError(f"class {min(unexpected)!r} of {directory} is not among "
                                    "those of train/")
        return classes, indices


class Photos(Dataset):
    """An image file, or those of a folder without classes. Their label is 0."""

    def __init__(self, path: Path):
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
        self.paths = [path for path in paths if path.suffix.lower() in IMG_EXTENSIONS]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self.paths[index]), 0


def torchvision_set(name: str, split: str) -> CIFAR10 | Food101:
    """CIFAR-10 or Food-101, downloaded by torchvision to data/."""
    how = dict(transform=TF.pil_to_tensor, download=True)
    try:
        with lock(Path("data"), wait=True):      # one process at a time, of all machines
            if name == "cifar10":
                return CIFAR10("data", train=split == "train", **how)
            return Food101("data", "train" if split == "train" else "test", **how)
    except (OSError, RuntimeError) as error:
        raise UserError(f"--data {name}: torchvision could not download it ({error}); "
                        "give a folder of images instead") from error


def open_images(data: str, split: str, image_size: int, labels: bool = True) -> ImageDataset:
    """The set that `--data` names, of "train" or "val". Photos only where no labels are needed."""
    if data in ("shapes", "shapes-noise"):
        return Shapes(split, image_size, noise=data == "shapes-noise")
    if data in ("cifar10", "food101"):
        return torchvision_set(data, split)
    path = Path(data, split) if Path(data, split).is_dir() else Path(data)
    entries = path.iterdir() if path.is_dir() else ()
    folders = [entry for entry in entries if entry.is_dir() and entry.name[0] != "."]
    photos = path.exists() and not folders and not labels
    return Photos(path) if photos and len(Photos(path)) else Folder(data, split)


# ------------------------------------------------------------------- views of one image

def random_crop(rng: np.random.Generator, height: int, width: int, scale: tuple[float, float],
                ratio: tuple[float, float] = (3 / 4, 4 / 3)) -> tuple[int, int, int, int]:
    """As RandomResizedCrop: a random share of the area, an aspect in `ratio`.

    -> top, left, height, width
    """
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        h = round(math.sqrt(area / aspect))
        w = round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            top = int(rng.integers(height - h + 1))
            return top, int(rng.integers(width - w + 1)), h, w
    h = max(1, min(height, round(width / ratio[0])))      # the middle of a very long image
    w = max(1, min(width, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


def center_view(image: Tensor, size: int) -> Tensor:
    """The evaluation view, uint8 [3, size, size]: resize to 256/224 of `size`, center crop."""
    image = TF.resize(image, round(size * 256 / 224), interpolation=BICUBIC, antialias=True)
    return TF.center_crop(image, [size, size])


def block_mask(rng: np.random.Generator, grid: int, ratio: float) -> np.ndarray:
    """BEiT's block masking: bool [grid * grid], True for int(ratio * grid * grid) masked ones.

    Blocks have at least 16 patches of a 14 x 14 grid (in proportion on smaller ones) and an
    aspect in 0.3 to 1/0.3. Where no more blocks fit, single patches fill up.
    """
    missing = int(ratio * grid ** 2)
    smallest = max(1, round(16 * min(1, grid ** 2 / 14 ** 2)))
    mask = np.zeros((grid, grid), dtype=bool)
    failures = 0
    numbers = []
    while missing and failures < 10:
        numbers = numbers or rng.random((32, 4)).tolist()      # in one call: faster
        area, aspect, y, x = numbers.pop()
        area = smallest + area * max(0, missing - smallest)
        aspect = 0.3 ** (2 * aspect - 1)
        h = round(math.sqrt(area * aspect))
        w = round(math.sqrt(area / aspect))
        failures += 1
        if h * w >= smallest and h <= grid and w <= grid:
            top = int(y * (grid - h + 1))
            left = int(x * (grid - w + 1))
            block = mask[top:top + h, left:left + w]
            new = block.size - np.count_nonzero(block)
            if 0 < new <= missing:
                block[:] = True
                missing -= new
                failures = 0
    mask = mask.ravel()
    mask[rng.permutation(np.flatnonzero(~mask))[:missing]] = True
    return mask


class CenterViews(Dataset):
    """Evaluation views: a dict of image uint8 [3, S, S], label and index."""

    def __init__(self, dataset: ImageDataset, image_size: int):
        self.dataset, self.image_size = dataset, image_size

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        image, label = self.dataset[index]
        return dict(image=center_view(image, self.image_size), label=label, index=index)


class TrainViews(CenterViews):
    """Training views, indexed by (epoch, index): a dict of image uint8 [3, S, S], label, flip
    bool, jitter [3] and, with a `mask_ratio`, mask bool [N]."""
    scale = (0.2, 1.0)      # of the image's area

    def __init__(self, images: ImageDataset, image_size: int, seed: int, grid: int = 0,
                 mask_ratio: float | None = None):
        super().__init__(images, image_size)
        self.seed, self.grid, self.mask_ratio = seed, grid, mask_ratio

    def __getitem__(self, key: tuple[int, int]) -> dict:
        return self.view(np.random.default_rng((self.seed, *key)), *self.dataset[key[1]])

    def view(self, rng: np.random.Generator, image: Tensor, label: int) -> dict:
        crop = random_crop(rng, *image.shape[-2:], self.scale)
        image = TF.resized_crop(image, *crop, [self.image_size, self.image_size],
                                interpolation=BICUBIC, antialias=True)
        view = dict(image=image, label=label, flip=bool(rng.random() < 0.5),
                    jitter=rng.uniform(1 - 0.4, 1 + 0.4, 3).astype(np.float32))
        if self.mask_ratio is not None:
            view["mask"] = block_mask(rng, self.grid, self.mask_ratio)
        return view


# ------------------------------------------------------------------------------ loaders

def train_order(images: int, batch_size: int, micro_batch: int, seed: int, first: int,
                last: int, rank: int = 0, world: int = 1):
    """Yields the (epoch, index) keys of each micro-batch of one process, from step `first` on.

    Each epoch is a permutation of all images, cut into global batches; an incomplete last batch
    is left out. Process r of w takes every w-th image of a batch, so that any w trains on the
    same batches.
    """
    for step in range(first, last):
        epoch, at = divmod(step, images // batch_size)
        if step == first or at == 0:
            order = np.random.default_rng((seed, epoch)).permutation(images)
        batch = order[at * batch_size:(at + 1) * batch_size]
        for micro in batch[rank::world].reshape(-1, micro_batch):
            yield [(epoch, int(index)) for index in micro]


def load(views: Dataset, order, machine: Machine):
    """Yields `order`'s batches of `views` on the machine's device."""
    fork = "fork" if machine.workers and sys.platform == "linux" else None      # at once ready
    loader = DataLoader(
        views, batch_sampler=order, num_workers=machine.workers, worker_init_fn=ignore_signals,
        multiprocessing_context=fork, pin_memory=machine.device.type == "cuda",
        generator=torch.Generator())      # not the global one, which belongs to the step
    try:
        for batch in loader:
            yield {name: value.to(machine.device, non_blocking=True)
                   for name, value in batch.items()}
    except LocalError as error:      # a loader process puts its traceback before the message
        raise LocalError(str(error).split("LocalError: ")[-1].strip()) from None


def eval_batches(views: Dataset, batch_size: int, machine: Machine, what: str = "val"):
    """This process's batches of `views`, in order: every w-th of w processes."""
    batches = torch.arange(len(views)).split(batch_size)[machine.rank::machine.world]
    order = tqdm([batch.tolist() for batch in batches], what, leave=False,
                 disable=machine.rank > 0)
    return load(views, order, machine)


def ignore_signals(worker: int):
    """Schedulers signal every process; workers ignore it so that the step can finish."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# --------------------------------------------------------------- on the training device

def augment(batch: dict) -> Tensor:
    """Flips images and jitters brightness, contrast and saturation, by what was drawn for each.

    A batch of TrainViews: image uint8 [B, 3, S, S], flip [B], jitter [B, 3] -> images
    [B, 3, S, S] in [0, 1]
    """
    images = batch["image"] / 255
    images = torch.where(batch["flip"][:, None, None, None], images.flip(-1), images)
    brightness, contrast, saturation = batch["jitter"][:, :, None, None, None].unbind(1)
    images = (images * brightness).clamp(0, 1)
    mean = gray(images).mean((-2, -1), keepdim=True)
    images = (mean + contrast * (images - mean)).clamp(0, 1)
    luma = gray(images)
    return (luma + saturation * (images - luma)).clamp(0, 1)


def gray(images: Tensor) -> Tensor:
    """Luma of [B, 3, H, W] -> [B, 1, H, W]."""
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.5870 * green + 0.1140 * blue)[:, None]


def normalize(images: Tensor) -> Tensor:
    """Images [..., 3, H, W] in [0, 1] -> the student's input, in ImageNet's mean and standard
    deviation. Numbers, not tensors, for a copy to the device would make the host wait.
    """
    channels = zip(images.unbind(-3), IMAGENET_MEAN, IMAGENET_STD)
    return torch.stack([(x - mean) / std for x, mean, std in channels], dim=-3)
