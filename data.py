"""Images for every stage: folders, torchvision's sets, the built-in shapes; block masks, views and loaders.

What is random about a training image (crop, flip, colour jitter, mask) is a function of (seed, epoch, index),
and the order of images one of (seed, epoch): the numbers of workers and processes change nothing. Workers
decode, crop and resize, and send uint8; `augment` does the rest on the training device.
"""

import atexit
import contextlib
import functools
import hashlib
import io
import math
import multiprocessing
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import CIFAR10, DatasetFolder, Food101
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

try:      # the fast path: torchvision's own decoders, as long as it has them
    from torchvision.io import ImageReadMode, decode_image
except ImportError:
    decode_image = None

from common import SIGNALS, FileError, UserError, one_after_another
from model import IMAGENET_MEAN, IMAGENET_STD

BICUBIC = InterpolationMode.BICUBIC


# ------------------------------------------------------------------------------------------------ images

def read_image(path: str) -> Tensor:
    """The image file as RGB, uint8 [3, H, W], upright by its EXIF orientation. FileError names the path."""
    try:
        encoded = np.fromfile(path, dtype=np.uint8)
        picture = Image.open(io.BytesIO(encoded))                   # reads the header, refuses absurd sizes
        if decode_image and picture.format in ("JPEG", "PNG"):      # torchvision turns no others upright
            with contextlib.suppress(RuntimeError, ValueError):     # a colour space that it cannot take
                encoded = torch.from_numpy(encoded)
                image = decode_image(encoded, ImageReadMode.RGB, apply_exif_orientation=True)
                return TF.to_dtype(image, torch.uint8, scale=True)  # 16 bits come as uint16
        if picture.mode.startswith("I;16"):
            picture = Image.fromarray((np.array(picture) / 257).round().astype(np.uint8))
        if picture.mode in ("I", "F"):
            raise ValueError(f"mode {picture.mode} does not fit into 8 bits")
        return TF.pil_to_tensor(ImageOps.exif_transpose(picture).convert("RGB"))
    except Exception as error:                                      # a dozen kinds for broken files
        raise FileError(f"cannot read the image {path} ({type(error).__name__}: {error})") from error


class Folder(DatasetFolder):
    """ImageNet's ROOT/{train,val}/CLASS/*.jpg, classes of train/. Index it for (uint8 [3, H, W], label)."""

    def __init__(self, root: str, split: str):
        self.train = os.path.join(root, "train")
        try:
            super().__init__(os.path.join(root, split), read_image, IMG_EXTENSIONS, allow_empty=True)
            if not self.samples:
                raise FileNotFoundError(f"no image in {os.path.join(root, split)}")
        except OSError as error:
            message = (f"--data {root}: {error}; expected train/CLASS/*.jpg and val/CLASS/*.jpg in it, "
                       "or cifar10, food101, shapes (`python pretrain.py --demo` needs no images)")
            raise UserError(message) from error
        # one array of bytes, not a million strings: workers would copy those as reference counts change
        self.samples = np.array([os.fsencode(path) for path, _ in self.samples])

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        classes, indices = super().find_classes(self.train)
        if strangers := set(super().find_classes(directory)[0]) - set(classes):
            raise FileNotFoundError(f"class {min(strangers)!r} of {directory} is not among those of train/")
        return classes, indices

    def names(self) -> list[str]:
        return [os.fsdecode(path)[len(str(self.root)):] for path in self.samples]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(os.fsdecode(self.samples[index])), self.targets[index]


class Scenes:
    """ADE20K's layout: ROOT/images/SPLIT/NAME.jpg, ROOT/annotations/SPLIT/NAME.png with a class per pixel.

    Index it for (uint8 [3, H, W], 0). `annotation(index)` is uint8 [H, W] of classes from 1, 0 is ignored.
    """

    def __init__(self, root: str, split: str):
        files = Path(root, "images", split).glob("*")
        self.paths = sorted(path for path in files if path.suffix.lower() in IMG_EXTENSIONS)
        self.annotations = [Path(root, "annotations", split, path.stem + ".png") for path in self.paths]
        if not self.paths:
            raise UserError(f"--data {root}: no image in {root}/images/{split}; expected ADE20K's layout, "
                            f"images/{split}/*.jpg and annotations/{split}/*.png")

    def __len__(self):
        return len(self.paths)

    def names(self) -> list[str]:
        return [path.name for path in self.paths]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self.paths[index]), 0

    def annotation(self, index: int) -> Tensor:
        try:
            picture = Image.open(self.annotations[index])
            if picture.mode not in ("L", "P"):
                raise ValueError(f"mode {picture.mode}; expected one 8-bit class for each pixel")
            return torch.from_numpy(np.array(picture))
        except Exception as error:
            raise FileError(f"cannot read the annotation {self.annotations[index]} ({error})") from error


def torchvision_set(name: str, split: str) -> CIFAR10 | Food101:
    """CIFAR-10 or Food-101, downloaded by torchvision to data/. Index it for (uint8 [3, H, W], label)."""
    try:
        with one_after_another():
            if name == "cifar10":
                return CIFAR10("data", train=split == "train", transform=rgb, download=True)
            return Food101("data", "train" if split == "train" else "test", transform=rgb, download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"--data {name}: torchvision could not download it ({error}); "
                        "give a folder of images instead") from error


def rgb(image: Image.Image) -> Tensor:
    return TF.pil_to_tensor(image.convert("RGB"))


class Shapes:
    """A set drawn on the fly: a textured blob on a smooth background; ten classes, five hues by two textures.

    Each image is a function of (split, index). Index it for (uint8 [3, size, size], label). `mask(index)` is
    the object's bool [size, size], `annotation(index)` uint8: 1 for background, 2 to 11 for its class.
    """
    hues = {"red": 0.0, "yellow": 0.15, "green": 0.35, "blue": 0.6, "purple": 0.8}
    classes = [f"{texture} {hue}" for hue in hues for texture in ("striped", "spotted")]

    def __init__(self, split: str, size: int):
        self.stream, self.length = {"train": (0, 4096), "val": (1, 1024)}[split]
        axis = np.linspace(-1, 1, size, dtype=np.float32)
        self.y, self.x = axis[:, None], axis[None, :]
        self.blend = np.maximum(0, 1 - np.abs(self.y - np.array([-1, 0, 1], np.float32)))      # [size, 3]

    def __len__(self):
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.draw(index)[0]), index % len(self.classes)

    def mask(self, index: int) -> Tensor:
        return torch.from_numpy(self.draw(index)[1])

    def annotation(self, index: int) -> Tensor:
        return torch.where(self.mask(index), 2 + index % len(self.classes), 1).to(torch.uint8)

    def draw(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (uint8 [3, size, size], the object's bool [size, size])"""
        rng, x, y = np.random.default_rng((self.stream, index)), self.x, self.y
        hue, texture = divmod(index % len(self.classes), 2)

        # background: 3 x 3 random dull colours that blend into each other, and noise
        dull = rng.uniform(0.25, 0.75, (1, 3, 3)) + rng.uniform(-0.2, 0.2, (3, 3, 3))
        image = self.blend @ dull.astype(np.float32) @ self.blend.T
        image += 0.1 * rng.standard_normal(image.shape, dtype=np.float32)

        # object: a blob whose radius waves with the angle
        dy, dx = y - rng.uniform(-0.5, 0.5), x - rng.uniform(-0.5, 0.5)
        angle, phase, wave = np.arctan2(dy, dx), rng.uniform(0, 2 * np.pi, 2), rng.uniform(0, 0.2, 2)
        radius = 1 + wave[0] * np.cos(2 * angle + phase[0]) + wave[1] * np.cos(3 * angle + phase[1])
        mask = np.hypot(dy, dx) < rng.uniform(0.3, 0.55) * radius

        # its texture, in any direction: light and dark stripes of its colour, or white spots on it
        turn, pitch = rng.uniform(0, np.pi), rng.uniform(12, 18)
        u = pitch * (np.cos(turn) * x + np.sin(turn) * y)
        v = pitch * (np.cos(turn) * y - np.sin(turn) * x)
        pure = hue_to_rgb(list(self.hues.values())[hue] + rng.uniform(-0.03, 0.03))
        colour = (1 - rng.uniform(0.5, 0.9) * (1 - pure))[:, None, None]
        light = rng.uniform(0.8, 1.0) * (colour if texture == 0 else 1)
        dark = colour * (rng.uniform(0.3, 0.5) if texture == 0 else rng.uniform(0.5, 0.9))
        pattern = np.cos(u) > 0 if texture == 0 else np.cos(u) + np.cos(v) > 0.7
        image = np.where(mask, np.where(pattern, light, dark), image)
        return (image.clip(0, 1) * 255).astype(np.uint8), mask


def hue_to_rgb(hue: float) -> np.ndarray:
    """Hue in turns -> its fully saturated colour, [3] in [0, 1]."""
    return np.clip(np.abs((hue * 6 + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)


def digest(*sets) -> str:
    """A short hash of the class names and relative file names of image sets: --data may move, not change."""
    sha = hashlib.sha256()
    for images in sets:
        names = images.names() if hasattr(images, "names") else []
        names = [str(len(images)), *getattr(images, "classes", []), *names]
        sha.update(os.fsencode("\0".join(names)))
    return sha.hexdigest()[:16]


def open_images(data: str, split: str, image_size: int):
    """What `--data` names: a Folder, a set of torchvision or Shapes, of "train" or "val"."""
    if data == "shapes":
        return Shapes(split, image_size)
    return torchvision_set(data, split) if data in ("cifar10", "food101") else Folder(data, split)


# ------------------------------------------------------------------------------------ views of one image

def random_crop(rng: np.random.Generator, height: int, width: int, scale, ratio=(3 / 4, 4 / 3)):
    """As RandomResizedCrop: a random share of the area, an aspect in `ratio` -> top, left, height, width"""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    h, w = max(1, min(height, round(width / ratio[0]))), max(1, min(width, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w      # the middle of a very long image


def centre_view(image: Tensor, size: int) -> Tensor:
    """The evaluation view, uint8 [3, size, size]: shorter side to 256/224 of `size`, then the centre."""
    longest = 4 * min(image.shape[-2:])      # of a longer side, do not resize what will not be seen
    image = TF.center_crop(image, [min(side, longest) for side in image.shape[-2:]])
    image = TF.resize(image, round(size * 256 / 224), interpolation=BICUBIC, antialias=True)
    return TF.center_crop(image, [size, size])


def block_mask(rng: np.random.Generator, grid: int, ratio: float) -> np.ndarray:
    """BEiT's block masking: bool [grid * grid], True is masked, exactly int(ratio * grid * grid) of them.

    Blocks have at least 16 patches of a 14 x 14 grid (in proportion on smaller ones) and an aspect in 0.3 to
    1/0.3. Where no more blocks fit, single patches fill up.
    """
    total = int(ratio * grid ** 2)
    smallest = max(1, round(16 * min(1, grid ** 2 / 14 ** 2)))
    mask = np.zeros((grid, grid), dtype=bool)
    failures = 0
    while (missing := total - mask.sum()) and failures < 10:
        area = rng.uniform(smallest, max(smallest, missing))
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        failures += 1
        if h * w >= smallest and h <= grid and w <= grid:
            top, left = rng.integers(grid - h + 1), rng.integers(grid - w + 1)
            block = mask[top:top + h, left:left + w]
            if 0 < block.size - block.sum() <= missing:
                block[:] = True
                failures = 0
    mask = mask.ravel()
    mask[rng.choice(np.flatnonzero(~mask), total - mask.sum(), replace=False)] = True
    return mask


def rand_augment(size: int):
    """The release's RandAugment, timm's own: two operations on a PIL image of `size`, each applied with
    probability 0.5 and a magnitude of its own around 9. It draws from `random` and `numpy.random`.
    """
    from timm.data.auto_augment import rand_augment_transform      # only supervised training needs it
    mean = tuple(round(255 * value) for value in IMAGENET_MEAN)
    return rand_augment_transform("rand-m9-mstd0.5-inc1", dict(
        translate_const=int(0.45 * size), img_mean=mean, interpolation=Image.BICUBIC,
        magnitude_max=9.99))      # at 10, timm posterizes to 0 bits, which newer Pillows refuse


@contextlib.contextmanager
def seeded(rng: np.random.Generator):
    """Seeds Python's and NumPy's global generators by `rng`, and puts them back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(int(rng.integers(2 ** 32)))
    np.random.seed(int(rng.integers(2 ** 32)))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def random_erasing(rng: np.random.Generator, image: Tensor, probability: float = 0.25) -> Tensor:
    """With that probability, noise in a box of 2 to 33 % of the area. uint8 [3, S, S] -> the same."""
    if rng.random() >= probability:
        return image
    top, left, h, w = random_crop(rng, *image.shape[-2:], scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3))
    mean, std = (255 * np.array(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    image = image.clone()
    image[:, top:top + h, left:left + w] = torch.from_numpy(rng.normal(mean, std, (3, h, w)).clip(0, 255))
    return image


class TrainViews(Dataset):
    """Training views of `images`, indexed by (epoch, index): a dict of image uint8 [3, S, S], label, flip
    bool, jitter [3] and, with a `mask_ratio`, mask bool [N] and noise [N].

    `strong` is for supervised training: smaller crops, RandAugment in place of colour jitter; `erase` adds
    random erasing.
    """

    def __init__(self, images, image_size: int, seed: int, grid: int = 0, mask_ratio: float | None = None,
                 strong: bool = False, erase: bool = False):
        self.images, self.image_size, self.seed = images, image_size, seed
        self.grid, self.mask_ratio, self.erase = grid, mask_ratio, erase
        self.rand_augment = rand_augment(image_size) if strong else None
        self.scale = (0.08, 1.0) if strong else (0.2, 1.0)

    def __getitem__(self, key: tuple[int, int]) -> dict:
        rng = np.random.default_rng((self.seed, *key))
        image, label = self.images[key[1]]
        crop, size = random_crop(rng, *image.shape[-2:], self.scale), [self.image_size, self.image_size]
        image = TF.resized_crop(image, *crop, size, interpolation=BICUBIC, antialias=True)
        flip, jitter = bool(rng.random() < 0.5), rng.uniform(1 - 0.4, 1 + 0.4, 3).astype(np.float32)
        if self.rand_augment:
            with seeded(rng):
                image = TF.pil_to_tensor(self.rand_augment(TF.to_pil_image(image)))
            image, jitter = random_erasing(rng, image) if self.erase else image, np.ones_like(jitter)
        view = dict(image=image, label=label, flip=flip, jitter=jitter)
        if self.mask_ratio is not None:
            view["mask"] = block_mask(rng, self.grid, self.mask_ratio)
            view["noise"] = rng.random(self.grid ** 2, dtype=np.float32)
        return view


class CentreViews(Dataset):
    """Evaluation views of `images`, indexed by index: a dict of image uint8 [3, S, S] and label."""

    def __init__(self, images, image_size: int):
        self.images, self.image_size = images, image_size

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index: int) -> dict:
        image, label = self.images[index]
        return dict(image=centre_view(image, self.image_size), label=label)


class SceneViews(Dataset):
    """Segmentation views of `scenes` (Scenes or Shapes) with classes 1 to `classes`, 0 ignored.

    Training, indexed by (epoch, index): a dict of image uint8 [3, crop, crop], annotation uint8 [crop, crop],
    augmented as by mmsegmentation: random scale 0.5 to 2, crop, flip and photometric distortion.
    Evaluation, indexed by index: image uint8 [3, h, w], its shorter side at `crop`, annotation uint8 [H, W].
    """

    def __init__(self, scenes, crop: int, classes: int, seed: int = 0):
        self.scenes, self.crop, self.classes, self.seed = scenes, crop, classes, seed

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, key) -> dict:
        index = key[1] if isinstance(key, tuple) else key
        (image, _), annotation = self.scenes[index], self.scenes.annotation(index)
        if annotation.shape != image.shape[1:] or annotation.max() > self.classes:
            name = self.scenes.annotations[index] if isinstance(self.scenes, Scenes) else index
            raise FileError(f"the annotation {name} has shape {tuple(annotation.shape)}, its image "
                            f"{tuple(image.shape[1:])}; its classes end at {annotation.max()}, --classes is "
                            f"{self.classes}")
        if not isinstance(key, tuple):
            image = TF.resize(image, self.crop, interpolation=BICUBIC, antialias=True)
            return dict(image=image, annotation=annotation)
        rng = np.random.default_rng((self.seed, *key))
        annotation, short = annotation[None], max(1, round(self.crop * rng.uniform(0.5, 2)))
        image = TF.resize(image, short, interpolation=InterpolationMode.BILINEAR, antialias=True)
        annotation = TF.resize(annotation, image.shape[1:], interpolation=InterpolationMode.NEAREST)
        top, left = scene_crop(rng, annotation, self.crop)
        image, annotation = (x[:, top:top + self.crop, left:left + self.crop] for x in (image, annotation))
        if rng.random() < 0.5:
            image, annotation = image.flip(-1), annotation.flip(-1)
        image = photometric_distortion(rng, image)
        padding = [0, 0, self.crop - image.shape[2], self.crop - image.shape[1]]
        image = TF.pad(image, padding, fill=[round(255 * x) for x in IMAGENET_MEAN])      # 0 to the model
        return dict(image=image, annotation=TF.pad(annotation, padding, fill=0)[0])


def scene_crop(rng: np.random.Generator, annotation: Tensor, crop: int) -> tuple[int, int]:
    """Top and left of a random crop, redrawn up to ten times if one class has 75 % of its labelled pixels."""
    _, height, width = annotation.shape
    for _ in range(11):
        top, left = int(rng.integers(max(0, height - crop) + 1)), int(rng.integers(max(0, width - crop) + 1))
        pixels = annotation[:, top:top + crop, left:left + crop].flatten().bincount(minlength=2)[1:]
        if pixels.max() < 0.75 * pixels.sum():
            break
    return top, left


def photometric_distortion(rng: np.random.Generator, image: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue, each with probability 0.5. uint8 [3, H, W] -> the same.

    Brightness is an offset of 32 at most, contrast a factor of 0.5 to 1.5, before or after saturation and
    hue: in HSV, a factor of 0.5 to 1.5 and a turn of 0.1 at most.
    """
    def draw(low: float, high: float, nothing: float) -> float:
        return rng.uniform(low, high) if rng.random() < 0.5 else nothing

    offset, contrast, contrast_first = draw(-32, 32, 0.0), draw(0.5, 1.5, 1.0), rng.random() < 0.5
    saturation, turn = draw(0.5, 1.5, 1.0), draw(-0.1, 0.1, 0.0)
    x = (image + offset).clamp(0, 255)
    x = (x * contrast).clamp(0, 255) if contrast_first else x
    if (saturation, turn) != (1.0, 0.0):
        h, s, v = TF.to_pil_image(x.to(torch.uint8)).convert("HSV").split()
        h = h.point(lambda value: round(value + 256 * turn) % 256)
        s = s.point(lambda value: min(255, round(value * saturation)))
        x = TF.pil_to_tensor(Image.merge("HSV", (h, s, v)).convert("RGB"))
    return (x if contrast_first else (x * contrast).clamp(0, 255)).to(torch.uint8)


# ----------------------------------------------------------------------------------------------- loaders

def train_order(images: int, batch_size: int, micro_batch: int, seed: int, first: int, last: int,
                rank: int = 0, world: int = 1):
    """Yields the (epoch, index) keys of each micro-batch of one process, from step `first` to `last`.

    Each epoch is a permutation of all images, cut into global batches; an incomplete last batch is left out.
    Process r of w takes every w-th image of a batch, so that any w trains on the same batches.
    """
    for step in range(first, last):
        epoch, at = divmod(step, images // batch_size)
        if step == first or at == 0:
            order = np.random.default_rng((seed, epoch)).permutation(images)
        batch = order[at * batch_size:(at + 1) * batch_size]
        for micro in batch[rank::world].reshape(-1, micro_batch):
            yield [(epoch, int(index)) for index in micro]


def eval_order(images: int, batch_size: int, rank: int = 0, world: int = 1) -> list[range]:
    """Batches of indices. Process r of w takes every w-th: results are the same, to the bit, for any w."""
    starts = range(0, images, batch_size)[rank::world]
    return [range(start, min(start + batch_size, images)) for start in starts]


def load(views: Dataset, order, workers: int, device: torch.device):
    """Yields `order`'s batches of `views` on `device`."""
    loader = DataLoader(views, batch_sampler=order, num_workers=workers, pin_memory=device.type == "cuda",
                        worker_init_fn=ignore_signals, generator=torch.Generator())      # not the global RNG
    for batch in loader:
        yield {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def ignore_signals(worker: int):
    """What asks a run to save and leave often goes to all its processes; loaders have to finish the step."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def kill_loaders():
    """At exit, multiprocessing would send them the SIGTERM that they ignore, and wait forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)      # where PyTorch raises for a loader that is killed
    for process in multiprocessing.active_children():
        process.kill()


# -------------------------------------------------------------------------------- on the training device

def augment(batch: dict) -> Tensor:
    """Flip and colour jitter, image by image, with what the workers drew -> images [B, 3, S, S] in [0, 1]."""
    images = batch["image"] / 255
    images = torch.where(batch["flip"][:, None, None, None], images.flip(-1), images)
    return colour_jitter(images, batch["jitter"])


def colour_jitter(images: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast, saturation, in this order. images [B, 3, H, W] in [0, 1], factors [B, 3]."""
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    images = (images * brightness).clamp(0, 1)
    mean = grey(images).mean((-2, -1), keepdim=True)
    images = (mean + contrast * (images - mean)).clamp(0, 1)
    luma = grey(images)
    return (luma + saturation * (images - luma)).clamp(0, 1)


def grey(images: Tensor) -> Tensor:
    """Luma of [B, 3, H, W] -> [B, 1, H, W]."""
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.5870 * green + 0.1140 * blue)[:, None]


def normalize(images: Tensor) -> Tensor:
    """Images in [0, 1] -> the student's input, in ImageNet's mean and standard deviation."""
    return (images - constant(IMAGENET_MEAN, images.device)) / constant(IMAGENET_STD, images.device)


@functools.cache      # a copy to the device in every step would make the host wait for it
def constant(values: tuple, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(3, 1, 1)
