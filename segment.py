"""Semantic segmentation: UperNet on a pretrained encoder, with the paper's transfer recipes.

    torchrun --nproc_per_node 4 segment.py runs/pretrain/epoch_0300.pt --data /path/to/ADEChallengeData2016
    python segment.py runs/demo/last.pt --data shapes --crop-size 48 --iterations 600 --warmup-iterations 50
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

import common
import data
from checkpoint import digest, load_checkpoint, load_encoder
from common import LocalError, UserError
from model import IMAGENET_MEAN, ViT
from run import Run


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, batch_size=16)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="of ExPLoRe, the authors' release or timm")
    common.add_trainer_flags(parser, unit="iterations", length=160_000, warmup=1500, lr=8e-5, min_lr=0.0,
                             weight_decay=0.05, clip_grad=0.0, drop_path=0.1)
    common.add_recipe_flags(parser, layer_decay=0.85)
    add = parser.add_argument_group("segmentation").add_argument
    add("--crop-size", type=int, default=512, metavar="N",
        help="of training crops and evaluation windows, whose stride is 2/3 of it (default: %(default)s)")
    add("--classes", type=int, metavar="N",
        help="classes 1 to N of the annotations, 0 is ignored (default: ADE20K's 150; 11 of shapes)")
    add("--width", type=int, default=768, metavar="N", help="of UperNet (default: %(default)s)")
    return common.parse(parser, argv, "segment")


# -------------------------------------------------------------------------------------------------- data

class Scenes(data.Photos):
    """ADE20K's layout: ROOT/images/SPLIT/NAME.jpg, ROOT/annotations/SPLIT/NAME.png with a class per pixel.

    Index it for (uint8 [3, H, W], 0). `annotation(index)` is uint8 [H, W] of classes from 1, 0 is ignored.
    """

    def __init__(self, root: str, split: str):
        super().__init__(Path(root, "images", split))
        self.annotations = [Path(root, "annotations", split, path.stem + ".png") for path in self.paths]
        if not self.paths:
            raise UserError(f"--data {root}: no image in {root}/images/{split}; expected ADE20K's layout, "
                            f"images/{split}/*.jpg and annotations/{split}/*.png")

    def annotation(self, index: int) -> Tensor:
        try:
            picture = Image.open(self.annotations[index])
            if picture.mode not in ("L", "P"):
                raise ValueError(f"mode {picture.mode}; expected one 8-bit class for each pixel")
            return torch.from_numpy(np.array(picture))
        except Exception as error:
            raise LocalError(f"cannot read the annotation {self.annotations[index]} ({error})") from error


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
            raise LocalError(f"the annotation {name} has shape {tuple(annotation.shape)}, its image "
                            f"{tuple(image.shape[1:])}; its classes end at {annotation.max()}, --classes is "
                            f"{self.classes}")
        if not isinstance(key, tuple):
            image = TF.resize(image, self.crop, interpolation=InterpolationMode.BICUBIC, antialias=True)
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
    """Top and left of a random crop, redrawn up to ten times if one class has 75 % of its labeled pixels."""
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


# ------------------------------------------------------------------------------------------------- model

def conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


def resize(x: Tensor, size) -> Tensor:
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


class UperNet(nn.Module):
    """Pyramid pooling on the deepest of four maps, a feature pyramid, an auxiliary FCN head on the third.

    A ViT's maps share one stride; here the first gets a quarter of it, the second half, the last twice.
    maps [B, D, g, g] x 4 -> (logits [B, C, 4 g, 4 g], auxiliary logits [B, C, g, g])
    """

    def __init__(self, dim: int, classes: int, width: int, scales=(1, 2, 3, 6), dropout: float = 0.1):
        super().__init__()
        quarter = nn.Sequential(nn.ConvTranspose2d(dim, dim, 2, 2), nn.BatchNorm2d(dim), nn.GELU(),
                                nn.ConvTranspose2d(dim, dim, 2, 2))
        self.strides = nn.ModuleList([quarter, nn.ConvTranspose2d(dim, dim, 2, 2), nn.Identity(),
                                      nn.MaxPool2d(2, ceil_mode=True)])
        self.pyramid = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(scale), conv(dim, width, 1))
                                     for scale in scales)
        self.bottleneck = conv(dim + len(scales) * width, width, 3)
        self.lateral = nn.ModuleList(conv(dim, width, 1) for _ in range(3))
        self.output = nn.ModuleList(conv(width, width, 3) for _ in range(3))
        self.fuse = conv(4 * width, width, 3)
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(width, classes, 1))
        self.auxiliary = nn.Sequential(conv(dim, 256, 3), nn.Dropout2d(dropout), nn.Conv2d(256, classes, 1))

    def forward(self, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        auxiliary = self.auxiliary(maps[2])
        maps = [stride(x) for stride, x in zip(self.strides, maps)]
        deepest = maps[3]
        pooled = [resize(level(deepest), deepest.shape[2:]) for level in self.pyramid]
        top = self.bottleneck(torch.cat([deepest, *pooled], dim=1))
        levels = [lateral(x) for lateral, x in zip(self.lateral, maps)] + [top]
        for i in (2, 1, 0):                                                     # from the top down
            levels[i] = levels[i] + resize(levels[i + 1], levels[i].shape[2:])
        levels = [output(x) for output, x in zip(self.output, levels)] + [top]
        levels = [resize(x, levels[0].shape[2:]) for x in levels]
        return self.classify(self.fuse(torch.cat(levels, dim=1))), auxiliary


def feature_blocks(depth: int) -> list[int]:
    """The blocks whose tokens UperNet sees: 3, 5, 7 and 11 of 12, in proportion of other depths."""
    return [round(depth * (block + 1) / 12) - 1 for block in (3, 5, 7, 11)]


class Segmenter(nn.Module):
    """images [B, 3, crop, crop] -> UperNet's two logits"""

    def __init__(self, encoder: ViT, classes: int, width: int):
        super().__init__()
        self.encoder, self.blocks = encoder, feature_blocks(len(encoder.blocks))
        encoder.norm.requires_grad_(False)      # the features come before the final norm
        self.decoder = UperNet(encoder.dim, classes, width)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder(self.encoder.intermediate(images, self.blocks))


# -------------------------------------------------------------------------------------------- evaluation

def sliding_window(model, images: Tensor, crop: int, stride: int) -> Tensor:
    """The mean logits of all windows over each pixel: images [1, 3, H, W], H and W >= crop -> [1, C, H, W].

    model: [K, 3, crop, crop] -> logits [K, C, crop, crop]. The last of a row or column ends at the edge.
    """
    _, _, height, width = images.shape
    starts = [[min(i * stride, size - crop) for i in range(math.ceil((size - crop) / stride) + 1)]
              for size in (height, width)]
    corners = [(y, x) for y in starts[0] for x in starts[1]]
    total, count = None, images.new_zeros(1, 1, height, width)
    for at in range(0, len(corners), 8):
        crops = [images[:, :, y:y + crop, x:x + crop] for y, x in corners[at:at + 8]]
        windows = model(torch.cat(crops)).float()
        total = windows.new_zeros(1, windows.shape[1], height, width) if total is None else total
        for (y, x), window in zip(corners[at:at + 8], windows):
            total[0, :, y:y + crop, x:x + crop] += window
            count[:, :, y:y + crop, x:x + crop] += 1
    return total / count


def confusion(predicted: Tensor, annotation: Tensor, classes: int) -> Tensor:
    """Pixels by true and predicted class: predicted [H, W] from 0, annotation from 1 (0 ignored) -> [C, C]"""
    valid = annotation > 0
    pairs = (annotation[valid].long() - 1) * classes + predicted[valid]
    return torch.bincount(pairs, minlength=classes ** 2).view(classes, classes)


def scores(matrix: Tensor) -> dict[str, float]:
    """mIoU, mean class accuracy and pixel accuracy in percent; the means skip classes without a value."""
    matrix = matrix.double()
    hit, true, predicted = matrix.diag(), matrix.sum(1), matrix.sum(0)
    iou, accuracy = hit / (true + predicted - hit), hit / true
    return {"miou": 100 * iou.nanmean().item(), "mean_accuracy": 100 * accuracy.nanmean().item(),
            "pixel_accuracy": 100 * (hit.sum() / matrix.sum()).item()}


@torch.no_grad()
def evaluate(model: Segmenter, views: SceneViews, machine: common.Machine) -> dict[str, float]:
    """-> scores over all of `views` and all processes, by sliding windows"""
    model.eval()
    machine.share_buffers(model)
    crop, classes, stride = views.crop, views.classes, max(1, round(views.crop * 341 / 512))
    matrix = torch.zeros(classes, classes, dtype=torch.long, device=machine.device)
    for batch in data.eval_batches(views, 1, machine):
        with machine.autocast():
            logits = sliding_window(lambda x: resize(model(x)[0].float(), (crop, crop)),
                                    data.normalize(batch["image"] / 255), crop, stride)
        annotation = batch["annotation"][0]
        matrix += confusion(resize(logits, annotation.shape)[0].argmax(0), annotation, classes)
    model.train()
    return scores(machine.sum(matrix))


def main(args: argparse.Namespace) -> dict[str, float]:
    """-> the scores of the best evaluation"""
    machine, checkpoint = common.Machine(args), load_checkpoint(args.checkpoint)
    crop, patch_size = args.crop_size, checkpoint["encoder"]["patch_size"]
    if crop % patch_size:
        raise UserError(f"--crop-size {crop} is not a multiple of the patch size {patch_size}")
    drawn = args.data in ("shapes", "shapes-noise")
    if drawn:
        scenes, val = (data.open_images(args.data, split, crop) for split in ("train", "val"))
    else:
        scenes, val = (Scenes(args.data, split) for split in ("training", "validation"))
    classes = args.classes or (11 if drawn else 150)
    views, val_views = SceneViews(scenes, crop, classes, args.seed), SceneViews(val, crop, classes)
    plan = common.make_plan(args, machine.world, len(scenes))

    common.seed_everything(args.seed)
    encoder = load_encoder(checkpoint, grid=crop // patch_size, drop_path=args.drop_path)
    common.apply_recipe(args, encoder)
    sources = {"encoder": digest(encoder), "images": data.digest(scenes, val)}
    model = Segmenter(encoder, classes, args.width).to(machine.device)
    if machine.world > 1 and machine.device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)      # its forward pass makes the host wait for the device
    optimizer = common.adamw(model, args.lr, args.weight_decay, (0.9, 0.999),
                             common.layerwise_lr(len(encoder.blocks), args.layer_decay))
    run = Run(args, machine, plan, encoder.config, sources, model=model, optimizer=optimizer)
    run.announce(args.checkpoint, f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters",
                 f"{len(scenes)} images of {classes} classes")
    if machine.compile:
        model.compile()
    parallel = machine.parallel(model).train()
    batches = data.train_batches(views, len(scenes), run)

    for step in run.steps():
        common.set_rate(optimizer, common.learning_rate(step, plan, args.lr, args.min_lr, linear=True))
        common.seed_everything(args.seed, step, machine.rank)            # drop path, expert dropout, dropout

        for micro_step in range(1, plan.micro_steps + 1):
            batch = next(batches)
            target = batch["annotation"].long() - 1                      # -1 is ignored
            with machine.accumulating(parallel, last=micro_step == plan.micro_steps):
                with machine.autocast():
                    outputs = parallel(data.normalize(batch["image"] / 255))
                losses = torch.stack([      # means over all pixels, labeled or not, as by mmsegmentation
                    F.cross_entropy(resize(logits.float(), target.shape[1:]), target, ignore_index=-1,
                                    reduction="none").mean() for logits in outputs])
                loss = losses[0] + 0.4 * losses[1]
                machine.scaler.scale(loss / plan.micro_steps).backward()
            run.log.add({"loss": loss.detach(), "main": losses[0].detach(), "auxiliary": losses[1].detach()})

        run.log.add(common.optimizer_step(optimizer, machine.scaler, args.clip_grad))
        run.end_step(step, lambda: evaluate(model, val_views, machine))
    return run.report()


if __name__ == "__main__":
    common.launch(main, parse_args())
