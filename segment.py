"""Semantic segmentation: UperNet on a pretrained encoder, with the paper's recipes.

    torchrun --nproc_per_node 4 segment.py runs/pretrain/epoch_0300.pt \\
        --data /path/to/ADEChallengeData2016
    python segment.py runs/demo/last.pt --data shapes --crop-size 48 --iterations 600 \\
        --warmup-iterations 50      # after sh demo.sh
"""

import argparse
import itertools
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as TF

import common
import data
import optim
import supervised
from checkpoints import digest, load_checkpoint, load_encoder
from common import UserError, positive_int, user_errors
from model import IMAGENET_MEAN, ViT, normalize

# the auxiliary head's loss weight and width, from the release's configuration of mmsegmentation
AUXILIARY_WEIGHT = 0.4
AUXILIARY_WIDTH = 256
CPU_LOG_EVERY = 5      # steps between lines of the log: a step takes 8 s, and a signal waits for it


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, "CHECKPOINT ")
    group = parser.add_argument_group("segmentation")
    group.add_argument("checkpoint", type=common.path, metavar="CHECKPOINT",
                       help="an encoder of ExPLoRe, of the authors' release, or with timm's names")
    group.add_argument(
        "--crop-size", type=positive_int, default=512,
        help="side in pixels of training crops and of evaluation windows; the windows' stride is "
             "2/3 of it")
    group.add_argument("--classes", type=positive_int,
                       help="number of classes (default: 150 as in ADE20K, or 11 for shapes)")
    group.add_argument(
        "--zero-is-class", action="store_true",
        help="annotations count classes from 0, and 255 is ignored, as in Cityscapes and VOC; "
             "without this flag, annotations count from 1, and 0 is ignored, as in ADE20K")
    group.add_argument("--width", type=positive_int, default=768, help="channels of UperNet")
    common.add_train_flags(parser, "segment", batch_size=16, lr=8e-5, min_lr=0.0,
                           weight_decay=0.05, clip_grad=0.0, length=160_000, warmup=1500,
                           save_every=8000, unit="iterations")
    supervised.add_transfer_flags(parser, layer_decay=0.85)
    return common.parse_run(parser, argv)


# --------------------------------------------------------------------------------- data

class Scenes(data.ImageFiles):
    """Images in ADE20K's layout: ROOT/images/SPLIT/NAME.jpg and ROOT/annotations/SPLIT/NAME.png.

    `annotation(index)` is uint8 [H, W], the class of each pixel, counted from 1; 0 is ignored. With
    `zero_is_class`, the annotation files count classes from 0, and 255 is ignored.
    """

    def __init__(self, root: str, split: str, zero_is_class: bool = False):
        folder = os.path.join(root, "images", split)
        super().__init__(folder, f"--data {root}: no image in {folder}; expected ADE20K's layout, "
                         f"images/{split}/*.jpg and annotations/{split}/*.png")
        names = (os.path.relpath(self.path(i), folder) for i in range(len(self)))
        annotations = os.path.join(root, "annotations", split)
        self.annotations = [Path(annotations, name).with_suffix(".png") for name in names]
        self.zero_is_class = zero_is_class
        there = {Path(here, name) for here, _, names in data.walk(annotations) for name in names}
        if missing := [file for file in self.annotations if file not in there]:
            raise UserError(f"--data {root}: no annotation {missing[0]}; {len(missing)} of "
                            f"{len(self)} images of {split} have none")

    def annotation(self, index: int) -> Tensor:
        with Image.open(self.path(index)) as image:
            turn = image.getexif().get(0x0112)
        if turn in range(2, 9):      # `read_image` turns the image; who knows if its annotation is?
            raise UserError(f"the image {self.path(index)} has an EXIF orientation (it is "
                            f"{turn}), but its annotation has none: save both upright, without it")
        with user_errors(f"cannot read the annotation {self.annotations[index]}"):
            picture = Image.open(self.annotations[index])
            if picture.format != "PNG":      # JPEG changes class numbers, and Pillow's GIF, too
                raise ValueError(f"it is in the format {picture.format}; expected PNG")
            stored = picture.tile[0][3]      # the file's own mode, such as "L;4" for 4-bit gray
            if picture.mode not in ("L", "P") or stored in ("L;2", "L;4"):
                # Pillow would rescale 4-bit gray values, and convert("P") renumbers colors
                raise ValueError(f"it is {stored}; expected class numbers as 8-bit gray or as "
                                 "palette indices. Replace each color by its class number, and "
                                 "save the numbers as 8-bit gray")
            annotation = torch.from_numpy(np.array(picture))
        return annotation + 1 if self.zero_is_class else annotation      # in uint8, 255 becomes 0


class EvalScenes(Dataset):
    """Evaluation views of scenes.

    Each is a dict of image uint8 [3, h, w], whose shorter side is resized to `crop`, and annotation
    uint8 [H, W], with classes 1 to `classes`, and 0 for ignored pixels.
    """

    def __init__(self, dataset, crop: int, classes: int):
        self.dataset, self.crop, self.classes = dataset, crop, classes

    def __len__(self) -> int:
        return len(self.dataset)

    def annotation(self, index: int, image: Tensor) -> Tensor:
        """The annotation uint8 [H, W] of an image [3, H, W]. Raises UserError if they do not match.
        """
        annotation = self.dataset.annotation(index)
        name = getattr(self.dataset, "annotations", range(len(self)))[index]      # shapes: no files
        if annotation.shape != image.shape[1:]:
            raise UserError(f"the annotation {name} has shape {tuple(annotation.shape)}, but its "
                            f"image has {tuple(image.shape[1:])}")
        if annotation.max() > self.classes:
            raise UserError(f"--classes {self.classes}: the annotation {name} has class "
                            f"{annotation.max()}, counted from 1 (without --zero-is-class, 0 is "
                            "ignored and 1 is the first class)")
        return annotation

    def __getitem__(self, index: int) -> dict:
        image, _ = self.dataset[index]
        annotation = self.annotation(index, image)
        image = TF.resize(image, self.crop, antialias=True)
        return dict(image=image, annotation=annotation)


class TrainScenes(EvalScenes):
    """Training views, indexed by (epoch, index). Each is a dict of image uint8 [3, crop, crop] and
    annotation uint8 [crop, crop].

    The augmentation is mmsegmentation's: random scale 0.5 to 2, crop, flip, photometric distortion.
    """

    def __init__(self, dataset, crop: int, classes: int, seed: int):
        super().__init__(dataset, crop, classes)
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> dict:
        rng = common.generator("view", self.seed, *key)
        index, image, _ = data.first_readable(self.dataset, key[1])
        annotation = self.annotation(index, image)
        short = max(1, round(self.crop * rng.uniform(0.5, 2)))
        image = TF.resize(image, short, antialias=True)
        annotation = TF.resize(annotation[None], image.shape[1:],
                               interpolation=TF.InterpolationMode.NEAREST)
        top, left = scene_crop(rng, annotation, self.crop)
        image, annotation = (x[:, top:top + self.crop, left:left + self.crop]
                             for x in (image, annotation))
        if rng.random() < 0.5:
            image, annotation = image.flip(-1), annotation.flip(-1)
        image = photometric_distortion(rng, image)
        padding = [0, 0, self.crop - image.shape[2], self.crop - image.shape[1]]
        gray = [round(255 * x) for x in IMAGENET_MEAN]      # about 0 once normalized
        return dict(image=TF.pad(image, padding, fill=gray),
                    annotation=TF.pad(annotation, padding, fill=0)[0])


def scene_crop(rng: np.random.Generator, annotation: Tensor, crop: int) -> tuple[int, int]:
    """Draws a random crop of an annotation [1, H, W] -> (top, left)

    Redraws the crop, up to ten times, if one class has 75 % or more of the crop's labeled pixels.
    """
    _, height, width = annotation.shape
    for _ in range(11):
        top, left = (int(rng.integers(max(0, size - crop) + 1)) for size in (height, width))
        inside = annotation[:, top:top + crop, left:left + crop]
        pixels = inside.flatten().bincount(minlength=2)[1:]
        if pixels.max() < 0.75 * pixels.sum():
            break
    return top, left


def photometric_distortion(rng: np.random.Generator, image: Tensor) -> Tensor:
    """Changes an image's brightness, contrast, saturation and hue, each with probability 0.5.

    uint8 [3, H, W] -> uint8 [3, H, W]. Brightness adds at most 32 in absolute value. Contrast
    multiplies by 0.5 to 1.5, before or after saturation and hue. In HSV, saturation multiplies by
    0.5 to 1.5, and hue turns by at most 0.1.
    """
    def draw(low: float, high: float, nothing: float) -> float:
        return rng.uniform(low, high) if rng.random() < 0.5 else nothing

    x = (image + draw(-32, 32, 0.0)).clamp(0, 255)
    contrast, contrast_first = draw(0.5, 1.5, 1.0), rng.random() < 0.5
    saturation, turn = draw(0.5, 1.5, 1.0), draw(-0.1, 0.1, 0.0)
    if contrast_first:
        x = (x * contrast).clamp(0, 255)
    if (saturation, turn) != (1.0, 0.0):
        h, s, v = TF.to_pil_image(x.to(torch.uint8)).convert("HSV").split()
        h = h.point(lambda value: round(value + 256 * turn) % 256)
        s = s.point(lambda value: min(255, round(value * saturation)))
        x = TF.pil_to_tensor(Image.merge("HSV", (h, s, v)).convert("RGB"))
    if not contrast_first:
        x = (x * contrast).clamp(0, 255)
    return x.to(torch.uint8)


# -------------------------------------------------------------------------------- model

def conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


def upsample(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size=tuple(size), mode="bilinear")


class UperNet(nn.Module):
    """UperNet: pyramid pooling on the deepest of four maps, a feature pyramid, and an auxiliary FCN
    head on the third map.

    maps [B, D, g, g] x 4 -> (logits [B, C, 4 g, 4 g], auxiliary logits [B, C, g, g]). A ViT's maps
    all have the same stride; UperNet resizes the first to a quarter of this stride, the second to
    half, and the last to twice the stride.
    """

    def __init__(self, dim: int, classes: int, width: int, scales=(1, 2, 3, 6),
                 dropout: float = 0.1):
        super().__init__()
        quarter = nn.Sequential(nn.ConvTranspose2d(dim, dim, 2, 2), nn.BatchNorm2d(dim),
                                nn.GELU(), nn.ConvTranspose2d(dim, dim, 2, 2))
        self.strides = nn.ModuleList([quarter, nn.ConvTranspose2d(dim, dim, 2, 2),
                                      nn.Identity(), nn.MaxPool2d(2, ceil_mode=True)])
        self.pyramid = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(scale), conv(dim, width, 1)) for scale in scales)
        self.bottleneck = conv(dim + len(scales) * width, width, 3)
        self.lateral = nn.ModuleList(conv(dim, width, 1) for _ in range(3))
        self.output = nn.ModuleList(conv(width, width, 3) for _ in range(3))
        self.fuse = conv(4 * width, width, 3)
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(width, classes, 1))
        self.auxiliary = nn.Sequential(conv(dim, AUXILIARY_WIDTH, 3), nn.Dropout2d(dropout),
                                       nn.Conv2d(AUXILIARY_WIDTH, classes, 1))

    def forward(self, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        auxiliary = self.auxiliary(maps[2])
        maps = [stride(x) for stride, x in zip(self.strides, maps)]
        deepest = maps[3]
        pooled = [upsample(level(deepest), deepest.shape[2:]) for level in self.pyramid]
        top = self.bottleneck(torch.cat([deepest, *pooled], dim=1))
        levels = [lateral(x) for lateral, x in zip(self.lateral, maps[:3])] + [top]
        for i in (2, 1, 0):      # from the top down
            levels[i] = levels[i] + upsample(levels[i + 1], levels[i].shape[2:])
        levels = [output(x) for output, x in zip(self.output, levels)] + [top]
        levels = [upsample(x, levels[0].shape[2:]) for x in levels]
        return self.classify(self.fuse(torch.cat(levels, dim=1))), auxiliary


def feature_blocks(depth: int) -> list[int]:
    """The blocks whose tokens UperNet sees: 3, 5, 7 and 11 of 12, or in proportion to the depth."""
    return [round(depth * (block + 1) / 12) - 1 for block in (3, 5, 7, 11)]


class Segmenter(nn.Module):
    """An encoder with UperNet: images [B, 3, crop, crop] in [0, 1] -> UperNet's two logits"""

    def __init__(self, encoder: ViT, classes: int, width: int):
        super().__init__()
        self.encoder = encoder
        self.blocks = feature_blocks(len(encoder.blocks))
        encoder.norm.requires_grad_(False)      # the features come before the final norm
        self.decoder = UperNet(encoder.dim, classes, width)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x, maps = self.encoder.embed(normalize(images)), []
        for block in self.encoder.blocks:
            x, _ = block(x)
            maps.append(x[:, 1:].mT.unflatten(2, (self.encoder.grid, self.encoder.grid)))
        return self.decoder([maps[i] for i in self.blocks])


# --------------------------------------------------------------------------- evaluation

def sliding_window(model, images: Tensor, classes: int, crop: int, stride: int) -> Tensor:
    """Averages the logits of all windows that cover a pixel: images [1, 3, H, W] -> [1, C, H, W]

    model: [1, 3, crop, crop] -> logits [1, C, crop, crop], where C is `classes`. H and W are at
    least `crop`. The last window of a row or column ends at the edge of the image.
    """
    _, _, height, width = images.shape
    rows, columns = ([min(start, size - crop) for start in range(0, size - crop + stride, stride)]
                     for size in (height, width))
    total = images.new_zeros(1, classes, height, width)
    count = images.new_zeros(1, 1, height, width)
    for y, x in itertools.product(rows, columns):
        total[:, :, y:y + crop, x:x + crop] += model(images[:, :, y:y + crop, x:x + crop])
        count[:, :, y:y + crop, x:x + crop] += 1
    return total / count


def confusion(predicted: Tensor, annotation: Tensor, classes: int) -> Tensor:
    """Counts pixels by true and predicted class -> [1 + C, C]

    annotation [H, W] counts classes from 1, predicted [H, W] from 0. The first row counts pixels
    without a label, whose annotation is 0.
    """
    pairs = annotation.long() * classes + predicted
    return pairs.flatten().bincount(minlength=(1 + classes) * classes).view(1 + classes, classes)


def score(matrix: Tensor) -> dict[str, float]:
    """Returns mIoU, mean class accuracy and pixel accuracy, in percent.

    matrix [C, C]: number of pixels by true and predicted class. Means skip classes without a value.
    """
    matrix = matrix.double()
    hit, true, predicted = matrix.diag(), matrix.sum(1), matrix.sum(0)
    iou = hit / (true + predicted - hit)
    return {"miou": 100 * iou.nanmean().item(),
            "mean_accuracy": 100 * (hit / true).nanmean().item(),
            "pixel_accuracy": 100 * (hit.sum() / matrix.sum()).item()}


def evaluate_scenes(model: Segmenter, views: EvalScenes, args, process: common.Process
            ) -> dict[str, float]:
    """Computes `score` by sliding windows, over all of `views` and all processes.

    Prints how many pixels are unlabeled and how many classes never occur, because neither counts in
    the scores. Raises UserError if no pixel is labeled.
    """
    crop, classes = views.crop, views.classes
    stride = max(1, round(crop * 341 / 512))
    matrix = torch.zeros(1 + classes, classes, dtype=torch.long, device=process.device)
    for batch in data.eval_batches(views, 1, args, process):
        annotation = batch["annotation"][0]
        with process.autocast():
            logits = sliding_window(lambda x: upsample(model(x)[0].float(), (crop, crop)),
                                    batch["image"] / 255, classes, crop, stride)
        predicted = upsample(logits, annotation.shape)[0].argmax(0)                  # [H, W]
        matrix += confusion(predicted, annotation, classes)
    matrix = process.sum(matrix)
    pixels = matrix.sum(1)      # pixels of each true class, [1 + C]; 0 is unlabeled
    absent = (pixels[1:] == 0).sum().item()
    if absent == classes:
        raise UserError(f"--data {args.data}: no pixel of the validation images is labeled")
    unlabeled = (pixels[0] / pixels.sum()).item()
    if unlabeled or absent:
        common.note(f"val: {unlabeled:.1%} of the pixels are unlabeled, and {absent} of {classes} "
                   "classes never occur")
    return score(matrix[1:])


def main(args) -> dict[str, float]:
    """Returns the scores of the best evaluation."""
    process = common.Process(args)
    checkpoint = load_checkpoint(args.checkpoint)
    crop = args.crop_size
    patch_size = checkpoint["encoder"]["patch_size"]
    if crop % patch_size:
        raise UserError(f"--crop-size {crop} is not a multiple of the patch size {patch_size}")
    drawn = args.data in data.DRAWN
    classes = args.classes or (11 if drawn else 150)
    if drawn:
        scenes, val = (data.open_images(args.data, split, crop) for split in ("train", "val"))
    else:
        scenes, val = (Scenes(args.data, split, args.zero_is_class)
                       for split in ("training", "validation"))
    val_views = EvalScenes(val, crop, classes)
    data.check(val_views, args, process)      # once the run has begun, --classes cannot change

    common.seed_torch("weights", args.seed)
    encoder = load_encoder(checkpoint, crop // patch_size, args.drop_path)
    recipe = supervised.apply_recipe(args, encoder)
    segmenter = Segmenter(encoder, classes, args.width).to(process.device)
    if process.world > 1 and process.device.type == "cuda":
        # In place. Batch statistics are over all ranks' images, for which the host waits in each
        # forward pass.
        nn.SyncBatchNorm.convert_sync_batchnorm(segmenter)
    if args.compile:
        encoder.compile_blocks()

    def compute_loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        target = batch["annotation"].long() - 1                 # -1 is ignored
        with process.autocast():
            outputs = model(batch["image"] / 255)
        # the mean is over all pixels, labeled or not, as in mmsegmentation
        main_loss, auxiliary = (
            F.cross_entropy(upsample(logits.float(), target.shape[1:]), target, ignore_index=-1,
                            reduction="none").mean()
            for logits in outputs)
        loss = main_loss + AUXILIARY_WEIGHT * auxiliary
        return {"loss": loss, "main": main_loss, "auxiliary": auxiliary}

    def evaluate() -> dict[str, float]:
        return evaluate_scenes(segmenter, val_views, args, process)

    return supervised.fit(args, process, segmenter, TrainScenes(scenes, crop, classes, args.seed),
                          compute_loss, evaluate, title=f"UperNet on {args.checkpoint}, {recipe},",
                          val_image_count=len(val), encoder=encoder.config,
                          log_every=CPU_LOG_EVERY if process.device.type == "cpu" else None,
                          digest=digest(checkpoint["model"]),
                          lr_scale=optim.layerwise_lr(len(encoder.blocks), args.layer_decay))


if __name__ == "__main__":
    common.launch(main, parse_args())
