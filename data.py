"""Images: data sets, views, block masks, batches, workers, and augmentation on the device.

The augmentation of a training image is a function of (seed, epoch, index), and the order of images
in an epoch is a function of (seed, epoch), so the numbers of workers and processes change nothing.
Workers send uint8 images. Operations that are cheaper for a whole batch, such as color jitter, run
on the device.
"""

import argparse
import atexit
import contextlib
import functools
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import CIFAR10, Food101
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional as TF

from common import Process, UserError, default_data, generator, note, progress_bar, user_errors
from shapes import Shapes

BICUBIC = TF.InterpolationMode.BICUBIC
DRAWN = ("shapes", "shapes-noise")
ENDINGS = (*IMG_EXTENSIONS, ".avif", ".gif", ".jfif", ".jpe", ".jp2")
# Names of systems begin like this: hidden files, thumbnails, recycle bins, snapshots.
SYSTEM_NAMES = (".", "@", "#", "$", "__MACOSX", "lost+found")
DOWNLOADED = ("cifar10", "food101")      # torchvision's sets, in data/


# ------------------------------------------------------------------------------- images

def read_image(path: str | os.PathLike) -> Tensor:
    """Reads an image file as RGB, uint8 [3, H, W], and applies its EXIF orientation. Raises
    UserError.
    """
    with user_errors(f"cannot read the image {path}"):
        encoded = np.fromfile(path, np.uint8)
        if encoded[:2].tolist() == [0xFF, 0xD8]:      # a JPEG
            with contextlib.suppress(AttributeError, RuntimeError):
                # Same pixels as Pillow's, but faster. If this torchvision cannot decode JPEGs, or
                # the file is damaged, Pillow tries.
                return torchvision.io.decode_jpeg(
                    torch.from_numpy(encoded), torchvision.io.ImageReadMode.RGB,
                    apply_exif_orientation=True)
        with Image.open(path) as picture:
            if picture.mode[0] in "IF":      # 16 or 32 bits, which Pillow would convert to white
                raise ValueError(f"mode {picture.mode}, expected 8 bits a channel")
            rgb = TF.pil_to_tensor(ImageOps.exif_transpose(picture).convert("RGB"))
    if picture.format == "JPEG":
        print_once("torchvision does not decode some JPEGs, so Pillow reads them, which takes "
                   "longer")
    return rgb


def first_readable(dataset: Dataset, index: int) -> tuple[int, Tensor, int]:
    """The image at `index` or, if it is broken, the next readable one -> (index, image, label)

    One broken file should not end a run of days. A hundred in a row, or a whole set, raise
    UserError: then the disk is gone.
    """
    for place in range(index, index + min(len(dataset), 100)):
        place %= len(dataset)
        try:
            return place, *dataset[place]
        except UserError as error:
            print_once(f"{error}; the next image replaces it, until you put another in its place")
            last = error
    raise last


@functools.cache
def print_once(line: str):
    """Prints a line to stderr, once in each process."""
    print(line, file=sys.stderr, flush=True)


def walk(folder: str, above: frozenset[Path] = frozenset()):
    """Yields (folder, names of its subfolders, names of its files), first for `folder`, then for
    each folder in it, in the order of names and without SYSTEM_NAMES.

    Follows symlinks, but not into `above`, the folders that hold this one, because that would never
    end. Yields nothing if `folder` does not exist. Raises UserError if a folder cannot be listed.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot list the folder {folder}: {error.strerror}") from None
    entries = [entry for entry in entries if not entry.name.startswith(SYSTEM_NAMES)]
    real = Path(folder).resolve()
    above = above | {real, *real.parents}
    folders = [entry.name for entry in entries
               if entry.is_dir() and Path(entry.path).resolve() not in above]
    yield folder, folders, [entry.name for entry in entries if not entry.is_dir()]
    for name in folders:
        yield from walk(os.path.join(folder, name), above)


def list_files(folder: str) -> list[str]:
    """The paths of all files in a folder: first the folder's own, then its subfolders' files."""
    return [os.path.join(here, name) for here, _, names in walk(folder) for name in names]


def is_image(path: str) -> bool:
    return path.lower().endswith(ENDINGS)


class ImageFiles(Dataset):
    """Image files: a single file, or all images in a folder and its subfolders.

    An image's label is the index of its folder in `classes`, or 0 without classes. Raises UserError
    with the message `missing` if there is no image.
    """

    def __init__(self, root: str, missing: str, classes: list[str] | None = None):
        if os.path.isfile(root):
            files = [[root]]
        elif classes is None:
            files = [list_files(root)]
        else:
            files = [list_files(os.path.join(root, name)) for name in classes]
        found = [list(filter(is_image, group)) for group in files]
        others = [path for group in files for path in group if not is_image(path)]
        if not any(found):
            raise UserError(missing)
        if others:
            note(f"{root}: files without an image's ending are left out: {len(others)}, such as "
                 f"{others[0]}")
        # Forked workers share an array's memory. They would copy a list, because reading a Python
        # object writes its reference count.
        self.paths = np.array([os.fsencode(path) for paths in found for path in paths], dtype="S")
        self.labels = np.repeat(np.arange(len(found)), [len(paths) for paths in found])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self.path(index)), int(self.labels[index])

    def path(self, index: int) -> str:
        return os.fsdecode(self.paths[index])


class Food(Food101):
    """torchvision's Food-101 with our `read_image`, whose errors name broken files."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self._image_files[index]), self._labels[index]


class ClassFolders(ImageFiles):
    """Images in ImageNet's layout, ROOT/{train,val}/CLASS/*.jpg, with the classes of train/.

    Raises UserError.
    """

    def __init__(self, root: str, split: str):
        train, folder = os.path.join(root, "train"), os.path.join(root, split)
        nothing = root, [], []
        _, self.classes, _ = next(walk(train), nothing)
        _, classes, _ = next(walk(folder), nothing)
        if others := set(classes) - set(self.classes):
            raise UserError(f"--data {root}: the class {folder}/{min(others)} is not in {train}")
        super().__init__(folder, f"--data {root}: no image in {folder}/CLASS/; see \"Your own "
                         "images\" in RUNNING.md", self.classes)
        empty = set(range(len(self.classes))) - set(self.labels.tolist())
        if split == "train" and empty:
            raise UserError(f"--data {root}: no image in {train}/{self.classes[min(empty)]}")
        if len(self.classes) == 1:
            raise UserError(f"--data {root}: {train} has one folder, {self.classes[0]}, so there "
                            "is one class; are the classes inside it?")


def open_images(data: str, split: str, image_size: int, labels: bool = True) -> Dataset:
    """Opens the data set that `--data` names; `split` is "train" or "val". Raises UserError.

    Without `labels`, any folder of images will do.
    """
    if data in DRAWN:
        return Shapes(split, image_size, noise=data == "shapes-noise")
    if data in DOWNLOADED:
        with user_errors(f"--data {data}: data/ does not have torchvision's set"):
            if data == "cifar10":
                return CIFAR10("data", split == "train", transform=TF.pil_to_tensor)
            return Food("data", "train" if split == "train" else "test")
    with user_errors(f"--data {data}"):
        os.stat(data)
    if labels:
        return ClassFolders(data, split)
    folder = os.path.join(data, split)
    if os.path.isdir(folder):
        return ImageFiles(folder, f"--data {data}: no image in {folder}")
    photos = ImageFiles(data, f"--data {data}: no image in {data}")
    if os.path.isdir(data):      # is it Train/, or has it annotations?
        note(f"{data} has no {split}/, so all of its {len(photos)} images count")
    return photos


def recorded_or_default(recorded: str | None) -> str:
    """The --data that a checkpoint records, if the set is still there, else the default --data."""
    there = recorded and (recorded in (*DRAWN, *DOWNLOADED) or Path(recorded).exists())
    return recorded if there else default_data()


def describe(data: str, image_count: int, val_image_count: int, classes: list[str]) -> dict:
    """The facts about a data set in which all processes, and a resumed run, must agree"""
    names = {f"class {i}": name for i, name in enumerate(classes)}
    return {"--data": data if data in (*DRAWN, *DOWNLOADED) else "a folder",
            "the number of images": image_count,
            "the number of validation images": val_image_count,
            "the number of classes": len(classes)} | names


# ------------------------------------------------------------------- views of one image

def random_crop(rng: np.random.Generator, height: int, width: int, scale: tuple[float, float],
                ratio: tuple[float, float] = (3 / 4, 4 / 3)) -> tuple[int, int, int, int]:
    """Draws a crop like torchvision's RandomResizedCrop -> (top, left, height, width)

    The crop's fraction of the area is uniform in `scale`, and its aspect ratio, width over height,
    is log-uniform in `ratio`.
    """
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        h = round(math.sqrt(area / aspect))
        w = round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            top = int(rng.integers(height - h + 1))
            return top, int(rng.integers(width - w + 1)), h, w
    # no crop with such an aspect ratio fits into a very long image: take the image's middle
    h = max(1, min(height, round(width / ratio[0])))
    w = max(1, min(width, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


def center_view(image: Tensor, size: int) -> Tensor:
    """The evaluation view, uint8 [3, size, size]: resizes the short side to 256/224 of `size`, then
    crops the center.
    """
    image = TF.resize(image, round(size * 256 / 224), interpolation=BICUBIC, antialias=True)
    return TF.center_crop(image, [size, size])


def count_masked(grid: int, mask_ratio: float) -> int:
    """The number of masked patches in an image of grid x grid patches."""
    return int(mask_ratio * grid ** 2)


def block_mask(rng: np.random.Generator, grid: int, ratio: float) -> np.ndarray:
    """BEiT's block masking: bool [grid * grid], True for exactly count_masked(grid, ratio) patches.

    A block's area is uniform between 16 patches, in proportion below 14 x 14, and the number still
    missing; its aspect ratio is log-uniform in 0.3 to 1/0.3. Once ten blocks in a row do not fit,
    single random patches make up the number.
    """
    missing = count_masked(grid, ratio)
    smallest = max(1, round(16 * min(1, grid ** 2 / 14 ** 2)))
    mask = np.zeros((grid, grid), dtype=bool)
    failed = 0      # blocks in a row that did not fit
    while missing and failed < 10:
        added = add_block(rng, mask, missing, smallest)
        missing -= added
        failed = 0 if added else failed + 1
    mask = mask.ravel()
    mask[rng.permutation(np.flatnonzero(~mask))[:missing]] = True
    return mask


def add_block(rng: np.random.Generator, mask: np.ndarray, missing: int, smallest: int) -> int:
    """Masks a random block if it fits -> the number of newly masked patches, 0 if it does not"""
    grid = len(mask)
    # random() takes a third of the time of uniform() and integers()
    area = smallest + rng.random() * (missing - smallest)
    aspect = 0.3 ** (2 * rng.random() - 1)
    h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if h >= grid or w >= grid:
        return 0
    top, left = int(rng.random() * (grid - h + 1)), int(rng.random() * (grid - w + 1))
    block = mask[top:top + h, left:left + w]
    new = block.size - np.count_nonzero(block)
    if new > missing:
        return 0
    block[:] = True
    return new


class CenterViews(Dataset):
    """Evaluation views. Each is a dict of image uint8 [3, S, S], label and index."""

    def __init__(self, dataset: Dataset, image_size: int):
        self.dataset, self.image_size = dataset, image_size

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        image, label = self.dataset[index]
        return dict(image=center_view(image, self.image_size), label=label, index=index)


class TrainViews(CenterViews):
    """Training views, indexed by (epoch, index).

    Each is a dict of image uint8 [3, S, S], label, flip bool, jitter [3] and, with a `mask_ratio`,
    mask bool [N] and ids_keep [V], the indices of the visible patches. `augment` applies flip and
    jitter.
    """
    scale = (0.2, 1.0)      # crop area as a fraction of the image

    def __init__(self, dataset: Dataset, image_size: int, seed: int, grid: int = 0,
                 mask_ratio: float | None = None):
        super().__init__(dataset, image_size)
        self.seed, self.grid, self.mask_ratio = seed, grid, mask_ratio

    def __getitem__(self, key: tuple[int, int]) -> dict:
        _, image, label = first_readable(self.dataset, key[1])
        return self.view(generator("view", self.seed, *key), image, label)

    def view(self, rng: np.random.Generator, image: Tensor, label: int) -> dict:
        crop = random_crop(rng, *image.shape[-2:], self.scale)
        image = TF.resized_crop(image, *crop, [self.image_size, self.image_size],
                                interpolation=BICUBIC, antialias=True)
        view = dict(image=image, label=label, flip=bool(rng.random() < 0.5),
                    jitter=rng.uniform(1 - 0.4, 1 + 0.4, 3).astype(np.float32))
        if self.mask_ratio is not None:
            view["mask"] = block_mask(rng, self.grid, self.mask_ratio)
            view["ids_keep"] = np.flatnonzero(~view["mask"])
        return view


# ----------------------------------------------------------------- batches and workers

MICRO_BATCH = 256      # maximum number of images, without --micro-batch


def plan_steps(args: argparse.Namespace, world: int, image_count: int) -> tuple[int, int]:
    """Splits --batch-size into micro-batches, and an epoch into steps -> (micro_steps, epoch_steps)

    micro_steps is the number of forward passes per process in a step. epoch_steps is the number of
    steps in an epoch, without an incomplete last one. `world` is the number of processes. Raises
    UserError.
    """
    share = args.batch_size // world      # images per process
    if args.batch_size % world:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of {world} processes")
    # the largest divisor of the share up to MICRO_BATCH
    micro_batch = args.micro_batch or max(
        n for n in range(1, min(share, MICRO_BATCH) + 1) if share % n == 0)
    if not args.micro_batch and micro_batch < min(share, 16):      # silently slow
        raise UserError(f"--batch-size {args.batch_size}: each process's share is {share}, so that "
                        f"micro-batches would have {micro_batch} images; give --micro-batch, or "
                        "another --batch-size")
    if share % micro_batch:
        raise UserError(f"--micro-batch {micro_batch} does not divide {share}, each process's "
                        f"share of --batch-size {args.batch_size}")
    if image_count < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: {args.data} has only {image_count} "
                        "training images")
    return share // micro_batch, image_count // args.batch_size


def train_order(count: int, batch_size: int, micro_steps: int, seed: int, start: int,
                stop: int, rank: int = 0, world: int = 1):
    """Yields a list of (epoch, index) keys for each micro-batch of one process, from step `start`
    until before step `stop`.

    Each epoch is a permutation of all `count` images, cut into global batches; an incomplete last
    batch is left out. A process takes every `world`-th image of a batch, starting at its `rank`, so
    any number of processes trains on the same batches.
    """
    for step in range(start, stop):
        epoch, at = divmod(step, count // batch_size)
        if step == start or at == 0:
            order = generator("order", seed, epoch).permutation(count)
        batch = order[at * batch_size:(at + 1) * batch_size]
        for micro in batch[rank::world].reshape(micro_steps, -1):
            yield [(epoch, int(index)) for index in micro]


def load(views: Dataset, batches_of_keys, process: Process, workers: int):
    """Yields a batch of `views` for each list of keys, on the device of `process`. Raises
    UserError.
    """
    temporary = tempfile.gettempdir()
    if workers and len(os.fsencode(temporary)) > 70:      # workers would hang
        raise UserError(f"the name of the temporary folder {temporary} is too long for the sockets "
                        "of workers: export TMPDIR=/tmp, or give --workers 0")
    # The DataLoader calls views[key] for each key. It draws a seed when it starts, and gets its own
    # generator for that: a draw from the global generator would change the step's drop path. Python
    # 3.14's fork server would die of the signals from which `ignore_signals` protects workers.
    loader = DataLoader(
        views, batch_sampler=batches_of_keys, num_workers=workers, worker_init_fn=ignore_signals,
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        pin_memory=process.device.type == "cuda", generator=torch.Generator())
    others = multiprocessing.active_children()
    try:
        batches = iter(loader)
    finally:      # also if one of them could not start
        WORKERS.update(set(multiprocessing.active_children()) - set(others))
    try:
        for batch in batches:
            yield {name: value.to(process.device, non_blocking=True)
                   for name, value in batch.items()}
    except UserError as error:      # cut off the traceback that a worker's error begins with
        raise UserError(str(error).split("UserError: ")[-1].strip()) from None


def eval_batches(views: Dataset, batch_size: int, args, process: Process, what: str = "val"):
    """Yields this process's batches of `views`, in order. Each of w processes has every w-th batch.

    Rank 0 shows a progress bar with the label `what`.
    """
    batches = torch.arange(len(views)).split(batch_size)[process.rank::process.world]
    order = progress_bar([batch.tolist() for batch in batches], what, leave=False)
    return load(views, order, process, args.workers)


class Broken(Dataset):
    """For each item of `dataset`, {"broken": 1 if it cannot be read, else 0}. A line says why."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        try:
            self.dataset[index]
        except UserError as error:
            print_once(str(error))
            return {"broken": 1}
        return {"broken": 0}


def check(dataset: Dataset, args, process: Process):
    """Reads all of `dataset` once, because an evaluation would name broken images hours later, one
    at a time. Raises UserError in all processes if an image is broken.
    """
    broken = torch.zeros((), dtype=torch.long, device=process.device)
    for batch in eval_batches(Broken(dataset), MICRO_BATCH, args, process, "check"):
        broken += batch["broken"].sum()
    if count := process.sum(broken).item():
        raise UserError(f"--data {args.data}: {count} of {len(dataset)} images to evaluate on "
                        "cannot be used, as the lines above say; put others in their place, "
                        "because a deleted image makes this another run")


def ignore_signals(worker: int):
    """Shields a worker from the signals that stop a run: the run needs it until it has saved.

    Terminals and torchrun send signals to the process group, Slurm and systemd to every process.
    """
    os.setpgrp()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


WORKERS = weakref.WeakSet()      # all that `load` has started, until their files are closed


@atexit.register
def end_workers():
    """Kills the workers of a program that failed. At exit, Python sends them SIGTERM, which they
    ignore (`ignore_signals`), and would wait for them forever.
    """
    for worker in WORKERS:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)      # or PyTorch reports a worker's death
        worker.kill()


# --------------------------------------------------------------- on the training device

def augment(batch: dict) -> Tensor:
    """Flips images and changes their brightness, contrast and saturation.

    batch: `TrainViews` with image uint8 [B, 3, S, S], flip [B] and jitter [B, 3], the random draws
    for each image -> images [B, 3, S, S] in [0, 1]
    """
    images = batch["image"]
    images = torch.where(batch["flip"][:, None, None, None], images.flip(-1), images) / 255
    brightness, contrast, saturation = batch["jitter"][:, :, None, None, None].unbind(1)
    images = (images * brightness).clamp(0, 1)
    mean = TF.rgb_to_grayscale(images).mean((-2, -1), keepdim=True)
    images = torch.lerp(mean, images, contrast).clamp(0, 1)
    return torch.lerp(TF.rgb_to_grayscale(images), images, saturation).clamp(0, 1)
