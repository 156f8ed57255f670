"""Images: data sets, views, block masks, how a batch is cut, loaders, augmentation on the device.

What is random about a training image is a function of (seed, epoch, index), and the order of the
images of an epoch is one of (seed, epoch). So the numbers of loaders and processes change nothing.
Loaders send uint8; what is cheaper for a batch, such as color jitter, happens on the device.
"""

import argparse
import atexit
import contextlib
import functools
import math
import mimetypes
import multiprocessing
import os
import signal
import sys
import tempfile
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

from common import Process, UserError, generator, note, progress_bar
from shapes import Shapes

BICUBIC = TF.InterpolationMode.BICUBIC
DRAWN = ("shapes", "shapes-noise")
ENDINGS = (*IMG_EXTENSIONS, ".avif", ".gif", ".jfif", ".jpe", ".jp2")
DOWNLOADED = {"cifar10": "CIFAR10", "food101": "Food101"}      # torchvision's names


# ------------------------------------------------------------------------------- images

def read_image(path: str | os.PathLike) -> Tensor:
    """Reads an image file as RGB, uint8 [3, H, W], upright by its EXIF orientation. Raises
    UserError.
    """
    try:
        encoded = np.fromfile(path, np.uint8)
        if encoded[:2].tolist() == [0xFF, 0xD8]:      # as all JPEGs begin
            with contextlib.suppress(AttributeError, RuntimeError):
                # Pillow's pixels in less time, where this torchvision decodes and the file is whole
                return torchvision.io.decode_jpeg(
                    torch.from_numpy(encoded), torchvision.io.ImageReadMode.RGB,
                    apply_exif_orientation=True)
        with Image.open(path) as picture:
            if picture.mode[0] in "IF":      # 16 or 32 bits, which Pillow would turn white
                raise ValueError(f"mode {picture.mode}, expected 8 bits a channel")
            rgb = TF.pil_to_tensor(ImageOps.exif_transpose(picture).convert("RGB"))
    except Exception as error:      # Pillow raises many kinds for broken files
        raise UserError(f"cannot read the image {path} ({type(error).__name__}: {error})"
                        ) from error
    if picture.format == "JPEG":
        print_once("Pillow reads some JPEGs, which takes longer, because torchvision does not "
                   "decode them")
    return rgb


def first_readable(dataset: Dataset, index: int) -> tuple[int, Tensor, int]:
    """The image at `index` or, if it cannot be read, the next one -> (index, image, label)

    With this, a broken file does not end a run of days. Raises UserError if a hundred in a row are
    broken, or all: then the disk is gone.
    """
    for place in range(index, index + min(len(dataset), 100)):
        place %= len(dataset)
        try:
            return place, *dataset[place]
        except UserError as error:
            print_once(f"{error}: the next image takes its place")
            last = error
    raise last


@functools.cache
def print_once(line: str):
    """Prints a line to standard error, once in each process."""
    print(line, file=sys.stderr, flush=True)


def walk(folder: str, parents: frozenset[str] = frozenset()):
    """Like os.walk, sorted, without hidden files and folders. Follows symlinks, except to a parent
    folder, which would never end. Yields nothing if there is no such folder. Raises UserError if a
    folder cannot be listed.
    """
    here = os.path.realpath(folder)
    parents = parents or frozenset(map(str, Path(here).parents))
    if here in parents:
        return
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries
                           if entry.name[0] != "." and entry.name != "__MACOSX")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot list the folder {folder}: {error.strerror}") from error
    folders = [name for name, is_folder in found if is_folder]
    yield folder, folders, [name for name, is_folder in found if not is_folder]
    for name in folders:
        yield from walk(os.path.join(folder, name), parents | {here})


def list_images(folder: str) -> list[str]:
    """The paths of the images in a folder, and then those in the folders inside it."""
    paths, others = [], set()
    for here, folders, names in walk(folder):
        if {"train", "val"} <= set(folders):
            note(f"{here} has train/ and val/, and the images of both count: --data {here} takes "
                 "those of train/ alone")
        for name in names:
            if name.lower().endswith(ENDINGS):
                paths.append(os.path.join(here, name))
            elif "image/" in str(mimetypes.guess_type(name)[0]):
                others.add(os.path.splitext(name)[1])
    if others:
        note(f"{folder}: images of these kinds are not read: {', '.join(sorted(others))}")
    return paths


class Photos(Dataset):
    """Image files: one, or all in a folder and in the folders inside it.

    The label is the index of the image's folder in `classes`, or 0 without classes. Raises
    UserError with the text `missing` if there is no image.
    """

    def __init__(self, root: str, missing: str, classes: list[str] | None = None):
        if os.path.isfile(root):
            found = [[root]]
        elif classes is None:
            found = [list_images(root)]
        else:
            found = [list_images(os.path.join(root, name)) for name in classes]
        if not any(found):
            raise UserError(missing)
        # Forked workers share arrays. They would copy lists, because reading a Python object
        # counts a reference in it.
        self.paths = np.array([os.fsencode(path) for paths in found for path in paths], dtype="S")
        self.labels = np.repeat(np.arange(len(found)), [len(paths) for paths in found])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self.path(index)), int(self.labels[index])

    def path(self, index: int) -> str:
        return os.fsdecode(self.paths[index])


class Food(Food101):
    """torchvision's Food-101, but its images are read, and broken ones named, as in `Photos`."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self._image_files[index]), self._labels[index]


class Folder(Photos):
    """ImageNet's layout, ROOT/{train,val}/CLASS/*.jpg, with the classes of train/.

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
            raise UserError(f"--data {root}: {train} has one folder, {self.classes[0]}, and so one "
                            "class; are the classes inside it?")


def open_images(data: str, split: str, image_size: int, labels: bool = True) -> Dataset:
    """The set that `--data` names, of `split` "train" or "val". Raises UserError.

    Without `labels`, any folder of images will do.
    """
    if data in DRAWN:
        return Shapes(split, image_size, noise=data == "shapes-noise")
    if data in DOWNLOADED:
        try:
            if data == "cifar10":
                return CIFAR10("data", split == "train", transform=TF.pil_to_tensor)
            return Food("data", "train" if split == "train" else "test")
        except Exception as error:      # not there, cut short, of another kind
            raise UserError(
                f"--data {data} is not whole in data/ ({type(error).__name__}), and this downloads "
                f"it: python -c \"import torchvision; torchvision.datasets.{DOWNLOADED[data]}"
                "('data', download=True)\"") from error
    check_data(data)
    if labels:
        return Folder(data, split)
    folder = os.path.join(data, split)
    folder = folder if os.path.isdir(folder) else data
    return Photos(folder, f"--data {data}: no image in {folder}")


def check_data(data: str):
    """Raises UserError if there is no folder of this name, unless it is a single image."""
    try:
        os.stat(data)
        if os.path.isfile(data):
            read_image(data)
    except OSError as error:
        raise UserError(f"--data {data}: {error.strerror}; expected a folder of images") from error
    except UserError as error:
        raise UserError(f"--data {data} is a file, and no image; expected a folder of images, and "
                        "archives have to be unpacked") from error


# ------------------------------------------------------------------- views of one image

def random_crop(rng: np.random.Generator, height: int, width: int, scale: tuple[float, float],
                ratio: tuple[float, float] = (3 / 4, 4 / 3)) -> tuple[int, int, int, int]:
    """Draws a crop as torchvision's RandomResizedCrop does -> top, left, height, width

    Its share of the area is uniform in `scale`, and its aspect, width over height, is log-uniform
    in `ratio`.
    """
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        h = round(math.sqrt(area / aspect))
        w = round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            top = int(rng.integers(height - h + 1))
            return top, int(rng.integers(width - w + 1)), h, w
    # no crop of this aspect fits into a very long image: take its middle
    h = max(1, min(height, round(width / ratio[0])))
    w = max(1, min(width, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


def center_view(image: Tensor, size: int) -> Tensor:
    """The evaluation view, uint8 [3, size, size]: resize to 256/224 of `size`, center crop."""
    image = TF.resize(image, round(size * 256 / 224), interpolation=BICUBIC, antialias=True)
    return TF.center_crop(image, [size, size])


def count_masked(grid: int, mask_ratio: float) -> int:
    """The number of masked patches in each image of grid x grid patches."""
    return int(mask_ratio * grid ** 2)


def block_mask(rng: np.random.Generator, grid: int, ratio: float) -> np.ndarray:
    """BEiT's block masking: bool [grid * grid], True for exactly count_masked(grid, ratio) patches.

    A block's area is uniform between 16 patches (fewer on grids below 14 x 14) and the number that
    is still missing, which may be less; its aspect is log-uniform in 0.3 to 1/0.3. Where ten
    blocks in a row do not fit, single patches fill up.
    """
    missing = count_masked(grid, ratio)
    smallest = max(1, round(16 * min(1, grid ** 2 / 14 ** 2)))
    mask = np.zeros((grid, grid), dtype=bool)
    failures = 0
    while missing and failures < 10:
        # random() takes a third of the time of uniform() and integers()
        area = smallest + rng.random() * (missing - smallest)
        aspect = 0.3 ** (2 * rng.random() - 1)
        h = round(math.sqrt(area * aspect))
        w = round(math.sqrt(area / aspect))
        failures += 1
        if h < grid and w < grid:
            top = int(rng.random() * (grid - h + 1))
            left = int(rng.random() * (grid - w + 1))
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

    def __init__(self, dataset: Dataset, image_size: int):
        self.dataset, self.image_size = dataset, image_size

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        image, label = self.dataset[index]
        return dict(image=center_view(image, self.image_size), label=label, index=index)


class TrainViews(CenterViews):
    """Training views, indexed by (epoch, index): a dict of image uint8 [3, S, S], label, flip
    bool, jitter [3] and, with a `mask_ratio`, mask bool [N] and ids_keep [V], the indices of the
    visible patches. `augment` applies flip and jitter.
    """
    scale = (0.2, 1.0)      # of the image's area

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


# ------------------------------------------------------------------------------ loaders

MICRO_BATCH = 256      # images at most, if --micro-batch does not say otherwise


def plan_steps(args: argparse.Namespace, world: int, image_count: int) -> tuple[int, int]:
    """How `world` processes cut --batch-size into micro-batches, and an epoch into steps ->
    (micro_steps, epoch_steps)

    micro_steps is the number of forward passes of a process in each step, and epoch_steps the
    number of steps in an epoch, of which an incomplete last one is left out. Raises UserError.
    """
    share = args.batch_size // world      # of one process
    if args.batch_size % world:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of {world} processes")
    # the largest divisor of the share that is not above MICRO_BATCH
    micro_batch = args.micro_batch or max(
        n for n in range(1, min(share, MICRO_BATCH) + 1) if share % n == 0)
    if share % micro_batch:
        raise UserError(f"--micro-batch {micro_batch} does not divide {share}, each process's "
                        f"share of --batch-size {args.batch_size}")
    if image_count < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: {args.data} has only {image_count} "
                        "training images")
    return share // micro_batch, image_count // args.batch_size


def train_order(count: int, batch_size: int, micro_steps: int, seed: int, first: int,
                last: int, rank: int = 0, world: int = 1):
    """Yields the (epoch, index) keys of each of the `micro_steps` micro-batches of one process, of
    the steps from `first` to before `last`.

    Each epoch is a permutation of all `count` images, cut into global batches; an incomplete last
    batch is left out. Process r of w takes every w-th image of a batch, so that any w trains on
    the same batches.
    """
    for step in range(first, last):
        epoch, at = divmod(step, count // batch_size)
        if step == first or at == 0:
            order = generator("order", seed, epoch).permutation(count)
        batch = order[at * batch_size:(at + 1) * batch_size]
        for micro in batch[rank::world].reshape(micro_steps, -1):
            yield [(epoch, int(index)) for index in micro]


def load(views: Dataset, batches_of_keys, process: Process, workers: int):
    """Yields a batch of `views` on the device of `process` for each list of their keys. Raises
    UserError.
    """
    temporary = tempfile.gettempdir()
    if workers and len(os.fsencode(temporary)) > 70:      # or they wait for each other for good
        raise UserError(f"the name of the temporary folder {temporary} is too long for the sockets "
                        "of loaders: export TMPDIR=/tmp, or give --workers 0")
    # It calls views[key] for each key. It draws a seed when it starts, from a generator of its own:
    # drawing from the global one would change the drop path of the step.
    loader = DataLoader(
        views, batch_sampler=batches_of_keys, num_workers=workers, worker_init_fn=shield,
        pin_memory=process.device.type == "cuda", generator=torch.Generator())
    try:
        for batch in loader:
            yield {name: value.to(process.device, non_blocking=True)
                   for name, value in batch.items()}
    except UserError as error:      # the message of a loader's error begins with its traceback
        raise UserError(str(error).split("UserError: ")[-1].strip()) from None


def train_batches(views: Dataset, args, process: Process, micro_steps: int, first: int,
                  last: int):
    """Yields this process's micro-batches of the steps from `first` to before `last`."""
    order = train_order(len(views), args.batch_size, micro_steps, args.seed, first, last,
                        process.rank, process.world)
    return load(views, order, process, args.workers)


def eval_batches(views: Dataset, batch_size: int, args, process: Process, what: str = "val"):
    """Yields this process's batches of `views`, in order: every w-th batch of w processes."""
    batches = torch.arange(len(views)).split(batch_size)[process.rank::process.world]
    order = progress_bar([batch.tolist() for batch in batches], what, leave=False,
                         disable=process.rank > 0)
    return load(views, order, process, args.workers)


def shield(worker: int):
    """Keeps from a loader the signals that a run gets: it needs its loaders until it has saved.

    Terminals and torchrun send them to the group of processes, and Slurm and systemd to all.
    """
    os.setpgrp()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def end_loaders():
    """Where a run fails, Python sends them SIGTERM when it ends, and would wait forever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)      # where PyTorch reports their death
            process.kill()


# --------------------------------------------------------------- on the training device

def augment(batch: dict) -> Tensor:
    """Flips images and changes brightness, contrast and saturation, by what was drawn for each.

    batch of TrainViews: image uint8 [B, 3, S, S], flip [B], jitter [B, 3] -> images [B, 3, S, S]
    in [0, 1]
    """
    images = batch["image"]
    images = torch.where(batch["flip"][:, None, None, None], images.flip(-1), images) / 255
    brightness, contrast, saturation = batch["jitter"][:, :, None, None, None].unbind(1)
    images = (images * brightness).clamp(0, 1)
    mean = TF.rgb_to_grayscale(images).mean((-2, -1), keepdim=True)
    images = torch.lerp(mean, images, contrast).clamp(0, 1)
    return torch.lerp(TF.rgb_to_grayscale(images), images, saturation).clamp(0, 1)
