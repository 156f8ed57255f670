"""Images for every stage: folders, torchvision's sets, the built-in shapes set; block masks, transforms and loaders.

What is random about a training image (crop, flip, colour jitter, mask) is a function of (seed, epoch, index), and so is
the order of images of (seed, epoch): neither the number of workers nor that of processes changes anything.
Workers decode, crop and resize, and send uint8; `augment` does the rest on the training device.
"""

import contextlib
import functools
import io
import math
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

try:      # the fast path: torchvision's own decoders, as long as it has them
    from torchvision.io import ImageReadMode, decode_image
except ImportError:
    decode_image = None

from common import SIGNALS, UserError, first_process_first
from model import IMAGENET_MEAN, IMAGENET_STD

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
TORCHVISION_SETS = ("cifar10", "food101")


# ------------------------------------------------------------------------------------------------------------- images

def read_image(path: str) -> Tensor:
    """The image file as RGB, uint8 [3, H, W], upright by its EXIF orientation. UserError with the path if it is none."""
    try:
        encoded = np.fromfile(path, dtype=np.uint8)
        picture = Image.open(io.BytesIO(encoded))               # reads the header alone, and refuses absurd sizes before they are decoded
        image = None
        if decode_image and picture.format in ("JPEG", "PNG"):  # torchvision turns no others upright
            with contextlib.suppress(RuntimeError, ValueError):     # a colour space or a fault that it cannot take
                image = decode_image(torch.from_numpy(encoded), ImageReadMode.RGB, apply_exif_orientation=True)
        if image is None:
            image = decode_with_pillow(picture)
        return TF.to_dtype(image, torch.uint8, scale=True)      # 16 bits come as uint16
    except Exception as error:                  # Pillow alone raises a dozen kinds for broken files
        raise UserError(f"cannot read the image {path} ({type(error).__name__}: {error})", everywhere=True) from error


def decode_with_pillow(picture: Image.Image) -> Tensor:
    if picture.mode in ("I", "F"):
        raise ValueError(f"mode {picture.mode} does not say which number is white")
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16"):         # convert would cut at 255 what goes up to 65535
        return torch.from_numpy(np.array(picture, dtype=np.uint16)).expand(3, -1, -1)
    return TF.pil_to_tensor(picture.convert("RGB"))


class Folder:
    """Images in class folders: ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, ImageNet's layout.

    Classes are the sorted names in train/, for both splits. Index it for (uint8 [3, H, W], label).
    """

    def __init__(self, root: str, split: str):
        for part in {"train", split}:
            if not Path(root, part).is_dir():
                raise UserError(f"--data {root}: there is no folder {Path(root, part)}; expected {root}/train/CLASS/*.jpg "
                                f"and {root}/val/CLASS/*.jpg, or one of {', '.join(TORCHVISION_SETS)}, shapes "
                                "(`python pretrain.py --demo` needs no images)")
        self.classes = folders(Path(root, "train"))
        unknown = [name for name in folders(Path(root, split)) if name not in set(self.classes)]
        if unknown:
            raise UserError(f"--data {root}: class {unknown[0]!r} of {split}/ is not among those of train/")
        paths, self.labels = [], []
        for label, name in enumerate(self.classes):
            found = images_in(os.path.join(root, split, name))
            paths += found
            self.labels += [label] * len(found)
        if not paths:
            raise UserError(f"--data {root}: no image in {Path(root, split)}; expected {split}/CLASS/*.jpg")
        # One array of bytes, not a million Python strings: workers would copy those as their reference counts change
        self.paths = np.array([os.fsencode(path) for path in paths])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(os.fsdecode(self.paths[index])), self.labels[index]


def folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir()) if root.is_dir() else []


def images_in(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return sorted(e.path for e in os.scandir(folder) if e.name.lower().endswith(EXTENSIONS) and e.is_file())


class Scenes:
    """Photographs with a class for each pixel, in ADE20K's layout: ROOT/images/SPLIT/NAME.jpg, ROOT/annotations/SPLIT/NAME.png.

    Index it for (uint8 [3, H, W], 0). `annotation(index)` is uint8 [H, W] of classes from 1, 0 is ignored; `mask(index)` is
    bool [H, W], True where the class is among `foreground`.
    """

    def __init__(self, root: str, split: str, foreground: list[int] = ()):
        folder = os.path.join(root, "images", split)
        self.paths, self.foreground = images_in(folder), foreground
        if not self.paths:
            raise UserError(f"--data {root}: no image in {folder}; expected ADE20K's layout, images/{split}/*.jpg and "
                            f"annotations/{split}/*.png")
        self.annotations = [os.path.join(root, "annotations", split, os.path.splitext(os.path.basename(path))[0] + ".png")
                            for path in self.paths]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_image(self.paths[index]), 0

    def annotation(self, index: int) -> Tensor:
        path = self.annotations[index]
        try:
            picture = Image.open(path)
            classes = torch.from_numpy(np.array(picture, dtype=np.uint8)) if picture.mode in ("L", "P") else None
        except Exception as error:              # as for images
            raise UserError(f"cannot read the annotation {path} ({type(error).__name__}: {error})", everywhere=True) from error
        if classes is None:
            raise UserError(f"the annotation {path} has mode {picture.mode}; expected one 8-bit class for each pixel (L or P)",
                            everywhere=True)
        return classes

    def mask(self, index: int) -> Tensor:
        return torch.isin(self.annotation(index), torch.tensor(self.foreground, dtype=torch.uint8))


class TorchvisionSet:
    """CIFAR-10 or Food-101 by torchvision's own download, kept in data/. Index it for (uint8 [3, H, W], label)."""

    def __init__(self, name: str, split: str):
        from torchvision import datasets
        try:
            with first_process_first():
                if name == "cifar10":
                    self.images = datasets.CIFAR10("data", train=split == "train", download=True)
                else:
                    self.images = datasets.Food101("data", split="train" if split == "train" else "test", download=True)
        except Exception as error:
            raise UserError(f"--data {name}: torchvision could not download it here ({error}); "
                            "give a folder of images instead") from error
        self.classes = self.images.classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        return TF.pil_to_tensor(image.convert("RGB")), label


class Shapes:
    """A set drawn on the fly: one textured blob on a smooth background; ten classes, five hues by two textures.

    Each image is a function of (split, index). Index it for (uint8 [3, size, size], label); `mask(index)` is the
    object's bool [size, size].
    """
    hues = {"red": 0.0, "yellow": 0.15, "green": 0.35, "blue": 0.6, "purple": 0.8}
    classes = [f"{texture} {hue}" for hue in hues for texture in ("striped", "spotted")]

    def __init__(self, split: str, size: int):
        self.stream, self.length = {"train": (0, 4096), "val": (1, 1024)}[split]
        axis = np.linspace(-1, 1, size, dtype=np.float32)
        self.y, self.x = axis[:, None], axis[None, :]
        self.blend = np.maximum(0, 1 - np.abs(axis[:, None] - np.array([-1, 0, 1], np.float32)))     # [size, 3]

    def __len__(self):
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, _ = self.draw(index)
        return torch.from_numpy(image), index % len(self.classes)

    def mask(self, index: int) -> Tensor:
        return torch.from_numpy(self.draw(index)[1])

    def annotation(self, index: int) -> Tensor:
        """uint8 [size, size]: 1 is background, 2 to 11 the object's class."""
        return torch.where(self.mask(index), 2 + index % len(self.classes), 1).to(torch.uint8)

    def draw(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (uint8 [3, size, size], the object's bool [size, size])."""
        rng, x, y = np.random.default_rng((self.stream, index)), self.x, self.y
        hue, texture = divmod(index % len(self.classes), 2)

        # background: 3 x 3 random dull colours that blend into each other, and a little noise
        dull = rng.uniform(0.25, 0.75, (1, 3, 3)) + rng.uniform(-0.2, 0.2, (3, 3, 3))
        image = self.blend @ dull.astype(np.float32) @ self.blend.T
        image += 0.03 * rng.standard_normal(image.shape, dtype=np.float32)

        # object: a blob whose radius waves with the angle
        dy, dx = y - rng.uniform(-0.5, 0.5), x - rng.uniform(-0.5, 0.5)
        angle, phase, wave = np.arctan2(dy, dx), rng.uniform(0, 2 * np.pi, 2), rng.uniform(0, 0.2, 2)
        radius = rng.uniform(0.3, 0.55) * (1 + wave[0] * np.cos(2 * angle + phase[0]) + wave[1] * np.cos(3 * angle + phase[1]))
        mask = np.hypot(dy, dx) < radius

        # its texture, in any direction: light and dark stripes of its colour, or white spots on it
        turn, pitch = rng.uniform(0, np.pi), rng.uniform(12, 18)
        u, v = pitch * (np.cos(turn) * x + np.sin(turn) * y), pitch * (np.cos(turn) * y - np.sin(turn) * x)
        pure = hue_to_rgb(list(self.hues.values())[hue] + rng.uniform(-0.03, 0.03))
        colour = (1 - rng.uniform(0.5, 0.9) * (1 - pure))[:, None, None]                 # less than full saturation
        if texture == 0:
            pattern, light, dark = np.cos(u) > 0, colour * rng.uniform(0.8, 1.0), colour * rng.uniform(0.3, 0.5)
        else:
            pattern, light, dark = np.cos(u) + np.cos(v) > 0.7, rng.uniform(0.8, 1.0), colour * rng.uniform(0.5, 0.9)
        image = np.where(mask, np.where(pattern, light, dark), image)
        return (image.clip(0, 1) * 255).astype(np.uint8), mask


def hue_to_rgb(hue: float) -> np.ndarray:
    """Hue in turns -> its fully saturated colour, [3] in [0, 1]."""
    return np.clip(np.abs((hue * 6 + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)


def open_images(data: str, split: str, image_size: int):
    """What `--data` names: a Folder, a TorchvisionSet or Shapes, of "train" or "val"."""
    if data == "shapes":
        return Shapes(split, image_size)
    if data in TORCHVISION_SETS:
        return TorchvisionSet(data, split)
    return Folder(data, split)


# ------------------------------------------------------------------------------------------------ views of one image

def random_crop(rng: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio=(3 / 4, 4 / 3)):
    """Top, left, height and width of a crop: a random share `scale` of the area, a random aspect ratio within `ratio`."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    h, w = min(height, round(width / ratio[0])), min(width, round(height * ratio[1]))     # a very long image: its middle
    h, w = max(h, 1), max(w, 1)
    return (height - h) // 2, (width - w) // 2, h, w


def resize(image: Tensor, height: int, width: int) -> Tensor:
    return TF.resize(image, [height, width], interpolation=InterpolationMode.BICUBIC, antialias=True)


def centre_view(image: Tensor, size: int) -> Tensor:
    """The evaluation view, uint8 [3, size, size]: shorter side to 256/224 of `size`, then the centre."""
    height, width = image.shape[-2:]
    longest = 4 * min(height, width)      # of a longer side, the middle is all that will be seen: do not resize the rest
    image = TF.center_crop(image, [min(height, longest), min(width, longest)])
    image = TF.resize(image, round(size * 256 / 224), interpolation=InterpolationMode.BICUBIC, antialias=True)
    return TF.center_crop(image, [size, size])


def block_mask(rng: np.random.Generator, grid: int, ratio: float) -> np.ndarray:
    """BEiT's block masking: bool [grid * grid], True is masked, exactly int(ratio * grid * grid) of them.

    Blocks have at least 16 patches on a 14 x 14 grid (in proportion on smaller ones) and an aspect ratio within
    0.3 to 1/0.3. What no block fits into is filled up with single patches.
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
    """The RandAugment of the authors' release, timm's own: two operations, each applied with probability 0.5 and with a
    magnitude of its own around 9. A transform of PIL images of `size`; it draws from `random` and `numpy.random`.
    """
    from timm.data.auto_augment import rand_augment_transform      # supervised training alone needs it
    settings = dict(translate_const=int(0.45 * size), img_mean=tuple(round(255 * value) for value in IMAGENET_MEAN),
                    interpolation=Image.BICUBIC, magnitude_max=9.99)      # at 10, timm posterizes to 0 bits, which newer Pillows refuse
    return rand_augment_transform("rand-m9-mstd0.5-inc1", settings)


@contextlib.contextmanager
def seeded(rng: np.random.Generator):
    """Seeds the global generators that timm draws from with numbers of `rng`, and puts them back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(int(rng.integers(2 ** 32))), np.random.seed(int(rng.integers(2 ** 32)))
    try:
        yield
    finally:
        random.setstate(python), np.random.set_state(numpy)


def random_erasing(rng: np.random.Generator, image: Tensor, probability: float = 0.25) -> Tensor:
    """With that probability, noise in a box of 2 to 33 % of the area. uint8 [3, S, S] -> the same."""
    if rng.random() >= probability:
        return image
    top, left, h, w = random_crop(rng, *image.shape[-2:], scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3))
    mean, std = (255 * np.array(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    image = image.clone()
    image[:, top:top + h, left:left + w] = torch.from_numpy(rng.normal(mean, std, (3, h, w)).clip(0, 255).astype(np.uint8))
    return image


class TrainViews(Dataset):
    """Training views of `images`, indexed by (epoch, index): a dict of

    image uint8 [3, S, S], label, flip bool, jitter [3] and, where `mask_ratio` is given, mask bool [N] and noise [N].
    `strong` is supervised training's augmentation: smaller crops and RandAugment in place of colour jitter; `erase` adds random
    erasing to it.
    """

    def __init__(self, images, image_size: int, seed: int, grid: int = 0, mask_ratio: float | None = None, strong: bool = False,
                 erase: bool = False):
        self.images, self.image_size, self.seed, self.erase = images, image_size, seed, erase
        self.grid, self.mask_ratio = grid, mask_ratio
        self.rand_augment, self.scale = (rand_augment(image_size), (0.08, 1.0)) if strong else (None, (0.2, 1.0))

    def __getitem__(self, key: tuple[int, int]) -> dict | UserError:
        epoch, index = key
        rng = np.random.default_rng((self.seed, epoch, index))
        try:
            image, label = self.images[index]
        except UserError as error:      # handed on as a value: the loader would wrap it in a worker's traceback
            return error
        top, left, height, width = random_crop(rng, *image.shape[-2:], self.scale)
        view = dict(image=resize(image[:, top:top + height, left:left + width], self.image_size, self.image_size),
                    label=label,
                    flip=bool(rng.random() < 0.5),
                    jitter=rng.uniform(1 - 0.4, 1 + 0.4, 3).astype(np.float32))     # brightness, contrast, saturation
        if self.mask_ratio is not None:
            view |= dict(mask=block_mask(rng, self.grid, self.mask_ratio),
                         noise=rng.random(self.grid ** 2, dtype=np.float32))
        if self.rand_augment:
            with seeded(rng):
                image = TF.pil_to_tensor(self.rand_augment(TF.to_pil_image(view["image"])))
            view |= dict(image=random_erasing(rng, image) if self.erase else image, jitter=np.ones(3, dtype=np.float32))
        return view


class CentreViews(Dataset):
    """Evaluation views of `images`, indexed by index: a dict of image uint8 [3, S, S] and label."""

    def __init__(self, images, image_size: int):
        self.images, self.image_size = images, image_size

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index: int) -> dict | UserError:
        try:
            image, label = self.images[index]
        except UserError as error:
            return error
        return dict(image=centre_view(image, self.image_size), label=label)


class SceneViews(Dataset):
    """Segmentation views of `scenes` (Scenes or Shapes) with classes 1 to `classes`, 0 ignored.

    Training, indexed by (epoch, index): a dict of image uint8 [3, crop, crop] and annotation uint8 [crop, crop] after
    mmsegmentation's random scale 0.5 to 2, crop, flip and photometric distortion, all a function of (seed, epoch, index).
    Evaluation, indexed by index: image uint8 [3, h, w] with its shorter side at `crop`, annotation uint8 [H, W] as it is.
    """

    def __init__(self, scenes, crop: int, classes: int, seed: int = 0):
        self.scenes, self.crop, self.classes, self.seed = scenes, crop, classes, seed

    def __len__(self):
        return len(self.scenes)

    def pair(self, index: int) -> tuple[Tensor, Tensor]:
        (image, _), annotation = self.scenes[index], self.scenes.annotation(index)
        name = self.scenes.annotations[index] if isinstance(self.scenes, Scenes) else index
        if annotation.shape != image.shape[1:]:
            raise UserError(f"the annotation {name} is {tuple(annotation.shape)}, its image {tuple(image.shape[1:])}", everywhere=True)
        if max(image.shape[1:]) > 16 * min(image.shape[1:]):
            raise UserError(f"the image of {name} is {image.shape[2]} x {image.shape[1]}: more than 16 times as long as wide cannot be "
                            "segmented", everywhere=True)
        if annotation.max() > self.classes:
            raise UserError(f"the annotation {name} has class {annotation.max()}, but --classes is {self.classes}", everywhere=True)
        return image, annotation

    def __getitem__(self, key) -> dict | UserError:
        try:
            image, annotation = self.pair(key[1] if isinstance(key, tuple) else key)
        except UserError as error:
            return error
        if not isinstance(key, tuple):
            return dict(image=TF.resize(image, self.crop, interpolation=InterpolationMode.BICUBIC, antialias=True), annotation=annotation)
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
        mean = [round(255 * value) for value in IMAGENET_MEAN]                          # becomes 0 when normalized
        return dict(image=TF.pad(image, padding, fill=mean), annotation=TF.pad(annotation, padding, fill=0)[0])


def scene_crop(rng: np.random.Generator, annotation: Tensor, crop: int, most: float = 0.75) -> tuple[int, int]:
    """Top and left of a random crop of annotation [1, H, W]: where one class has `most` of its labelled pixels or more, it is
    drawn again, ten times at most, as in mmsegmentation."""
    _, height, width = annotation.shape
    for _ in range(11):
        top, left = int(rng.integers(max(0, height - crop) + 1)), int(rng.integers(max(0, width - crop) + 1))
        pixels = annotation[:, top:top + crop, left:left + crop].flatten().bincount(minlength=2)[1:]      # of each class; 0 is ignored
        if pixels.max() < most * pixels.sum():
            break
    return top, left


def photometric_distortion(rng: np.random.Generator, image: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue, each with probability 0.5, as mmsegmentation's PhotoMetricDistortion.

    uint8 [3, H, W] -> the same. Brightness is an offset of 32 at most, contrast a factor of 0.5 to 1.5, before or after
    saturation and hue: in HSV, a factor of 0.5 to 1.5 and a turn of 0.1 at most.
    """
    def draw(low: float, high: float, nothing: float) -> float:
        return rng.uniform(low, high) if rng.random() < 0.5 else nothing

    offset, contrast, contrast_first = draw(-32, 32, 0.0), draw(0.5, 1.5, 1.0), rng.random() < 0.5
    saturation, turn = draw(0.5, 1.5, 1.0), draw(-0.1, 0.1, 0.0)
    x = (image + offset).clamp(0, 255)
    x = (x * contrast).clamp(0, 255) if contrast_first else x
    if (saturation, turn) != (1.0, 0.0):
        h, s, v = TF.to_pil_image(x.to(torch.uint8)).convert("HSV").split()
        h, s = h.point(lambda h: round(h + 256 * turn) % 256), s.point(lambda s: min(255, round(s * saturation)))
        x = TF.pil_to_tensor(Image.merge("HSV", (h, s, v)).convert("RGB"))
    return (x if contrast_first else (x * contrast).clamp(0, 255)).to(torch.uint8)


# ------------------------------------------------------------------------------------------------------------ loaders

class TrainOrder:
    """For each micro-step of one process, from step `first` to `last`, the (epoch, index) keys of its images.

    Each epoch is one permutation of all images, cut into global batches; what does not fill a batch waits for the next
    epoch's permutation. Process r of w takes every w-th image of a batch, so that any w trains on the same batches.
    """

    def __init__(self, images: int, batch_size: int, micro_batch: int, seed: int, first: int, last: int,
                 rank: int = 0, world: int = 1):
        self.images, self.batch_size, self.micro_batch, self.seed = images, batch_size, micro_batch, seed
        self.first, self.last, self.rank, self.world = first, last, rank, world

    def __len__(self):
        return (self.last - self.first) * (self.batch_size // self.world // self.micro_batch)

    def __iter__(self):
        epoch = None
        for step in range(self.first, self.last):
            at = divmod(step, self.images // self.batch_size)
            if at[0] != epoch:
                epoch = at[0]
                order = np.random.default_rng((self.seed, epoch)).permutation(self.images)
            batch = order[at[1] * self.batch_size:(at[1] + 1) * self.batch_size]
            for micro in batch[self.rank::self.world].reshape(-1, self.micro_batch):
                yield [(epoch, int(index)) for index in micro]


class EvalOrder:
    """Batches of indices in their order; process r of w takes every w-th batch.

    Whole batches are shared out, not single images, so that each image is computed beside the same others, and to the
    same bits, for any number of processes.
    """

    def __init__(self, images: int, batch_size: int, rank: int = 0, world: int = 1):
        self.batches = [range(start, min(start + batch_size, images)) for start in range(0, images, batch_size)]
        self.batches = self.batches[rank::world]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def collate(views: list) -> dict | UserError:
    return next((view for view in views if isinstance(view, UserError)), None) or default_collate(views)


def load(views: Dataset, order, workers: int, device: torch.device):
    """Yields `order`'s batches of `views` on `device`. Raises the UserError of an image that cannot be read."""
    loader = DataLoader(views, batch_sampler=order, num_workers=workers, collate_fn=collate, worker_init_fn=outlive_signals,
                        pin_memory=device.type == "cuda", generator=torch.Generator())      # leaves torch's own in peace
    return copy_ahead(loader, device) if device.type == "cuda" else map(whole, loader)


def outlive_signals(worker: int):
    """What asks a run to save and leave often goes to all its processes: the loader's go on for the step, and end 30 s later."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: signal.alarm(30))


def whole(batch: dict | UserError) -> dict:
    if isinstance(batch, UserError):
        raise batch
    return batch


def copy_ahead(loader, device: torch.device):
    """Yields the loader's pinned batches on a CUDA device, each copied by a stream of its own while the last one computes."""
    copies, ahead = torch.cuda.Stream(device), None
    for batch in loader:
        with torch.cuda.stream(copies):
            batch = {name: value.to(device, non_blocking=True) for name, value in whole(batch).items()}
        if ahead:
            yield ahead
        torch.cuda.current_stream(device).wait_stream(copies)      # computing waits for the copy, the host for neither
        for value in batch.values():
            value.record_stream(torch.cuda.current_stream(device))      # nor may its memory be taken while it is in use
        ahead = batch
    if ahead:
        yield ahead


# ---------------------------------------------------------------------------------------------- on the training device

def augment(batch: dict) -> Tensor:
    """Flip and colour jitter, image by image, with what the workers drew -> images [B, 3, S, S] in [0, 1]."""
    images = batch["image"] / 255
    images = torch.where(batch["flip"][:, None, None, None], images.flip(-1), images)
    return colour_jitter(images, batch["jitter"])


def colour_jitter(images: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast, saturation, in this order. images [B, 3, H, W] in [0, 1], factors [B, 3]; 1 changes nothing."""
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
    mean, std = imagenet_statistics(images.device)
    return (images - mean) / std


@functools.cache      # a copy to the device in every step would make the host wait for it
def imagenet_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    return tuple(torch.tensor(values, device=device).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
