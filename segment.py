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
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

import common
import data
from common import UserError
from model import ViT, load_checkpoint, load_encoder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="of ExPLoRe, the authors' release or timm")
    common.add_common_flags(parser, batch_size=16)
    common.add_trainer_flags(parser, unit="iterations", length=160_000, warmup=1500, lr=8e-5, min_lr=0.0,
                             weight_decay=0.05, clip_grad=0.0, drop_path=0.1)
    common.add_recipe_flags(parser, layer_decay=0.85)
    group = parser.add_argument_group("segmentation")
    group.add_argument("--crop-size", type=int, default=512, help="of training crops and evaluation windows, "
                       "whose stride is two thirds of it (default: %(default)s)")
    group.add_argument("--classes", type=int, metavar="N", help="classes 1 to N of the annotations, 0 is "
                       "ignored (default: ADE20K's 150; 11 of shapes)")
    group.add_argument("--width", type=int, default=768, help="of UperNet (default: %(default)s)")
    group.add_argument("--eval-only", action="store_true", help="evaluate best.pt in --out and stop")
    args = common.parse(parser, argv, "segment")
    args.classes = args.classes or (11 if args.data == "shapes" else 150)
    return args


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
    if depth < 8:
        return [round(i * (depth - 1) / 3) for i in range(4)]
    return [round(depth * (block + 1) / 12) - 1 for block in (3, 5, 7, 11)]


def images_at_once(micro_batch: int, world: int, device: torch.device) -> int:
    """How many images UperNet's BatchNorm sees: on GPUs, where it is synchronized, those of all processes."""
    return micro_batch * world if device.type == "cuda" else micro_batch


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


def colours(classes: int) -> Tensor:
    """A colour for each class from 1, black for 0. -> uint8 [1 + C, 3]"""
    hues = [255 * (0.35 + 0.65 * data.hue_to_rgb(i * 0.618 % 1)) * (1 - 0.15 * (i % 3))
            for i in range(classes)]
    return torch.from_numpy(np.stack([np.zeros(3), *hues])).to(torch.uint8)


@torch.no_grad()
def evaluate(model: Segmenter, views: data.SceneViews, args: argparse.Namespace,
             process: common.Process) -> dict:
    """-> scores over all of `views` and all processes, by sliding windows.

    The first process also draws segmentation.png of four of its images: picture, truth, prediction.
    """
    model.eval()
    process.share_buffers(model)
    crop, stride = args.crop_size, max(1, round(args.crop_size * 341 / 512))
    matrix = torch.zeros(args.classes, args.classes, dtype=torch.long, device=process.device)
    rows, palette = [], colours(args.classes)
    order = data.eval_order(len(views), 1, process.rank, process.world)
    for i, batch in enumerate(data.load(views, order, args.workers, process.device)):
        with process.autocast():
            logits = sliding_window(lambda x: resize(model(x)[0].float(), (crop, crop)),
                                    data.normalize(batch["image"] / 255), crop, stride)
        annotation = batch["annotation"][0]
        predicted = resize(logits, annotation.shape)[0].argmax(0)
        matrix += confusion(predicted, annotation, args.classes)
        if i % max(1, len(order) // 4) == 0 and len(rows) < 4:
            tiles = [palette[x.long().cpu()].permute(2, 0, 1) for x in (annotation, predicted + 1)]
            tiles = [F.interpolate(tile[None], (192, 256))[0] for tile in (batch["image"][0].cpu(), *tiles)]
            rows.append(torch.cat(tiles, dim=2))
    model.train()
    if common.is_first() and rows:
        to_pil_image(torch.cat(rows, dim=1)).save(Path(args.out, "segmentation.png"))
    return scores(process.sum(matrix))


def main(args: argparse.Namespace) -> dict[str, float]:
    """-> the scores of the best evaluation"""
    run = common.Run(args)
    config = load_checkpoint(args.checkpoint)["encoder"]
    patch_size = config["patch_size"]
    if args.crop_size % patch_size:
        raise UserError(f"--crop-size {args.crop_size} is not a multiple of the patch size {patch_size}")
    recipe, expert_dropout = common.choose_recipe(args, has_experts=bool(config["moe_blocks"]))
    if args.data == "shapes":
        scenes, val = (data.Shapes(split, args.crop_size) for split in ("train", "val"))
    else:
        scenes, val = (data.Scenes(args.data, split) for split in ("training", "validation"))
    micro_batch, micro_steps, epoch_steps = common.sizes(args, run.world, len(scenes))
    steps, warmup = common.schedule(args, epoch_steps)
    if images_at_once(micro_batch, run.world, run.device) == 1:
        raise UserError("--micro-batch 1: UperNet's BatchNorm needs at least 2 images (on GPUs over all "
                        "processes, on a CPU in each)")
    views = data.SceneViews(scenes, args.crop_size, args.classes, args.seed)
    val_views = data.SceneViews(val, args.crop_size, args.classes)

    common.seed_everything(args.seed)
    encoder = load_encoder(args.checkpoint, grid=args.crop_size // patch_size, drop_path=args.drop_path,
                           expert_dropout=expert_dropout)
    common.freeze(encoder, recipe)
    sources = {"checkpoint": common.digest(encoder), "data": data.digest(scenes, val)}
    model = Segmenter(encoder, args.classes, args.width).to(run.device)
    if args.eval_only:
        run.load_best(model, sources)
        return run.report("best.pt:", evaluate(model, val_views, args, run))

    optimizer = common.adamw(model, args.lr, args.weight_decay, (0.9, 0.999),
                             common.layer_scale(len(encoder.blocks), args.layer_decay))
    first = run.resume(encoder.config, epoch_steps, sources, model=model, optimizer=optimizer)
    last = min(steps, args.max_steps or steps)
    if run.world > 1 and run.device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        model.compile()
    parallel = run.parallel(model).train()

    order = data.train_order(len(scenes), args.batch_size, micro_batch, args.seed, first, last,
                             run.rank, run.world)
    batches = run.waiting(data.load(views, order, args.workers, run.device))
    for step in run.steps(first, last):
        rate = common.learning_rate(step, steps, warmup, args.lr, args.min_lr, linear=True)
        common.set_rate(optimizer, rate)
        common.seed_everything(args.seed, step, run.rank)                # drop path, expert dropout, dropout

        for micro_step in range(micro_steps):
            batch = next(batches)
            target = batch["annotation"].long() - 1                      # -1 is ignored
            with run.accumulating(parallel, micro_step, micro_steps):
                with run.autocast():
                    outputs = parallel(data.normalize(batch["image"] / 255))
                main_loss, auxiliary_loss = (      # the mean over all pixels, as by mmsegmentation
                    F.cross_entropy(resize(logits.float(), target.shape[1:]), target, ignore_index=-1,
                                    reduction="none").mean() for logits in outputs)
                loss = main_loss + 0.4 * auxiliary_loss
                run.scaler.scale(loss / micro_steps).backward()
            run.log({"loss": loss.detach(), "main": main_loss.detach(), "auxiliary": auxiliary_loss.detach()})

        run.log(common.update(optimizer, run.scaler, args.clip_grad))
        run.after(step, lambda: evaluate(model, val_views, args, run))   # log line, best.pt, last.pt, signal
    return run.report(f"step {max(first, last)} of {steps}, best", run.best)


if __name__ == "__main__":
    common.run(main, parse_args())
