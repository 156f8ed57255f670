"""What the router learned: heatmaps of the dispatch weights, on unmasked images in eval mode.

    python routing.py runs/NAME/last.pt --data FOLDER --images 6        # writes heatmaps.png beside the checkpoint
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

import common
import data
from common import UserError
from model import load_encoder

# cool to warm: colours at equal distances
COLOURS = torch.tensor([[0.23, 0.30, 0.75], [0.55, 0.69, 1.00], [0.87, 0.87, 0.87], [0.96, 0.60, 0.48], [0.71, 0.02, 0.15]])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint with experts")
    common.add_common_flags(parser, batch_size=64)
    parser.add_argument("--images", type=common.positive_int, default=6, metavar="N",
                        help="validation images to draw (default: %(default)s)")
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


@torch.no_grad()
def main(args: argparse.Namespace) -> Path:
    """-> the path of the picture."""
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

    size = encoder.config["image_size"]
    views = data.CentreViews(data.open_images(args.data, "val", size), size)
    chosen = torch.linspace(0, len(views) - 1, min(args.images, len(views))).long().unique().tolist()
    order = [chosen[at:at + args.batch_size] for at in range(0, len(chosen), args.batch_size)]
    pixels, dispatch = [], []
    for batch in data.load(views, order, args.workers, process.device):
        images = batch["image"] / 255
        with process.autocast():
            _, routing = encoder(data.normalize(images))
        pixels.append(images.cpu())
        dispatch.append(routing[block].dispatch[:, 1:].float().cpu())       # [CLS] has no place in the picture
    out = Path(args.out or Path(args.checkpoint).parent)
    if common.is_first():
        out.mkdir(parents=True, exist_ok=True)
        to_pil_image(heatmaps(torch.cat(pixels), torch.cat(dispatch))).save(out / "heatmaps.png")
        print(out / "heatmaps.png")
    return out / "heatmaps.png"


if __name__ == "__main__":
    common.run(main, parse_args())
