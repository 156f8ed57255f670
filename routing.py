"""What the router learned: heatmaps and numbers of the dispatch weights, on unmasked images in eval mode.

    python routing.py runs/NAME/last.pt --data FOLDER        # writes heatmaps.png and routing.json beside the checkpoint
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

import common
import data
from common import UserError
from losses import dispatch_entropy, variation
from model import load_encoder

# cool to warm: colours at equal distances
COLOURS = torch.tensor([[0.23, 0.30, 0.75], [0.55, 0.69, 1.00], [0.87, 0.87, 0.87], [0.96, 0.60, 0.48], [0.71, 0.02, 0.15]])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint with experts")
    common.add_common_flags(parser, batch_size=64, out="default: that of the checkpoint")
    parser.add_argument("--images", type=common.positive_int, default=512, metavar="N",
                        help="validation images to measure, drawn by --seed; the first six become pictures (default: %(default)s)")
    parser.add_argument("--block", type=common.natural, metavar="B", help="MoE block to show (default: the last)")
    return parser.parse_args(argv)


def warm(weight: Tensor) -> Tensor:
    """weight [...] in [0, 1] -> its colour [3, ...] from cool (low) to warm (high)."""
    at = weight.clamp(0, 1) * (len(COLOURS) - 1)
    low = at.floor().long().clamp(max=len(COLOURS) - 2)
    return torch.lerp(COLOURS[low], COLOURS[low + 1], (at - low)[..., None]).movedim(-1, 0)


def heatmaps(images: Tensor, dispatch: Tensor, tile: int = 112) -> Tensor:
    """One row an image: the image, then each expert's dispatch weights over it, warm is high -> uint8 [3, H, W].

    images [M, 3, S, S] in [0, 1], dispatch [M, N, E] of the patches. One colour range for the whole picture, from the
    1st to the 99th percentile of the weights.
    """
    count, patches, experts = dispatch.shape
    grid = int(patches ** 0.5)
    low, high = dispatch.flatten().quantile(torch.tensor([0.01, 0.99]))        # a few extreme patches would dull the rest
    maps = warm((dispatch - low) / (high - low).clamp_min(1e-12))                            # [3, M, N, E]
    maps = maps.permute(1, 3, 0, 2).reshape(count * experts, 3, grid, grid)
    maps = torch.nn.functional.interpolate(maps, size=(tile, tile), mode="nearest").view(count, experts, 3, tile, tile)
    images = data.resize(images, tile, tile).clamp(0, 1)
    grey = data.grey(images)[:, None]
    rows = torch.cat([images[:, None], 0.65 * maps + 0.35 * grey], dim=1)                    # [M, 1 + E, 3, tile, tile]
    rows = torch.nn.functional.pad(rows, (2, 2, 2, 2), value=1.0)                            # white lines between
    return (rows.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2) * 255).round().to(torch.uint8)


def patch_foreground(images, chosen: list[int], size: int, patch_size: int) -> Tensor:
    """Which patches of the evaluation view lie at least half on the object -> bool [M, N]."""
    masks = torch.stack([data.centre_view(images.mask(i)[None].to(torch.uint8) * 255, size) for i in chosen])
    return torch.nn.functional.avg_pool2d(masks.float() / 255, patch_size).flatten(1) >= 0.5


def area_under_curve(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive's score is above a negative's, ties count half. [M], bool [M]."""
    _, group, counts = score.double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[group]              # from 1, the mean rank within ties
    n, m = positive.sum().item(), (~positive).sum().item()
    return ((rank[positive].sum().item() - n * (n + 1) / 2) / (n * m)) if n and m else float("nan")


@torch.no_grad()
def main(args: argparse.Namespace) -> dict:
    """-> the numbers of routing.json."""
    process = common.start(args)
    try:
        encoder = load_encoder(args.checkpoint).to(process.device).eval()
    except ValueError as error:
        raise UserError(str(error)) from error
    if not encoder.moe_blocks:
        raise UserError(f"{args.checkpoint} has no experts: there is no routing to show")
    block = encoder.moe_blocks[-1] if args.block is None else args.block
    if block not in encoder.moe_blocks:
        raise UserError(f"--block {block} has no experts: the MoE blocks are {' '.join(map(str, encoder.moe_blocks))}")
    if args.compile:
        encoder.compile()

    size = encoder.config["image_size"]
    images = data.open_images(args.data, "val", size)
    chosen = np.random.default_rng(args.seed).permutation(len(images))[:args.images].tolist()
    order = [chosen[at:at + args.batch_size] for at in range(0, len(chosen), args.batch_size)]
    pixels, dispatch = [], []
    for batch in data.load(data.CentreViews(images, size), order, args.workers, process.device):
        with process.autocast():
            _, routing = encoder(data.normalize(batch["image"] / 255))
        pixels.append(batch["image"].cpu())
        dispatch.append(routing[block].dispatch.float().cpu())
    pixels, dispatch = torch.cat(pixels), torch.cat(dispatch)                   # [M, 3, S, S], [M, T, E]
    patches = dispatch[:, 1:]                                                   # [CLS] has no place in a picture

    numbers = {"checkpoint": str(args.checkpoint), "block": block, "images": len(chosen),
               "entropy": dispatch_entropy(dispatch).tolist(), "dispatch_cv": variation(patches).tolist(),
               "cls_share": dispatch[:, 0].mean(0).tolist(), "scale": encoder.blocks[block].mlp.scale.item()}
    if isinstance(images, data.Shapes):
        foreground = patch_foreground(images, chosen, size, encoder.patch_size).flatten()
        numbers["foreground_auc"] = [area_under_curve(weight, foreground) for weight in patches.flatten(0, 1).unbind(1)]

    out = Path(args.out or Path(args.checkpoint).parent)
    if common.is_first():
        out.mkdir(parents=True, exist_ok=True)
        to_pil_image(heatmaps(pixels[:6] / 255, patches[:6])).save(out / "heatmaps.png")
        (out / "routing.json").write_text(json.dumps(common.rounded(numbers), indent=1) + "\n")
        print(f"block {block}, {len(chosen)} images, scale {numbers['scale']:.3f}; {out / 'heatmaps.png'}, {out / 'routing.json'}")
        columns = [name for name in ("entropy", "dispatch_cv", "cls_share", "foreground_auc") if name in numbers]
        print("expert  " + "  ".join(f"{name:>14}" for name in columns))
        for expert in range(dispatch.shape[2]):
            print(f"{expert:6}  " + "  ".join(f"{numbers[name][expert]:14.4f}" for name in columns))
    return numbers


if __name__ == "__main__":
    common.run(main, parse_args())
