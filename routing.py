"""What the router learned: pictures and numbers of the dispatch weights, on unmasked images in eval mode.

    python routing.py runs/coupled/last.pt --data FOLDER                        # beside the checkpoint
    python routing.py runs/coupled/last.pt runs/detached/last.pt --out DIR      # two models side by side

heatmaps.png (Fig. 1, A1), blocks.png (Fig. A2), correlation.png (Fig. A3) and routing.json with every number.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

import common
import data
from common import UserError
from losses import dispatch_entropy, token_loss, variation
from model import LoadError, build_teacher, load_checkpoint, load_encoder

# cool to warm: colours at equal distances
COLOURS = torch.tensor([[0.23, 0.30, 0.75], [0.55, 0.69, 1.00], [0.87, 0.87, 0.87], [0.96, 0.60, 0.48],
                        [0.71, 0.02, 0.15]])
ROWS, COLUMNS, TILE, GAP, TITLE = 6, 8, 112, 2, 28      # of heatmaps.png: images and experts at most; pixels
TOKENS = 10_000                                         # drawn for silhouette and correlation


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="one or two models with experts")
    common.add_common_flags(parser, batch_size=64, batches="images per batch", compiles=False,
                            out="default: the first checkpoint's")
    parser.add_argument("--images", type=int, default=200, metavar="N", help="validation images to measure, "
                        f"drawn by --seed; the first {ROWS} become pictures (default: %(default)s)")
    parser.add_argument("--block", type=int, metavar="B", help="MoE block of heatmaps, correlation and "
                        "foreground (default: the checkpoint's last loss block)")
    args = common.parse(parser, argv)
    if len(args.checkpoints) > 2:
        parser.error(f"{len(args.checkpoints)} checkpoints: give one, or two to compare")
    return args


# ----------------------------------------------------------------------------------------------- numbers

def silhouette(features: Tensor, labels: Tensor, chunk: int = 1024) -> float:
    """Mean silhouette coefficient by Euclidean distance, exact: features [M, D], labels [M] -> -1 to 1.

    For a point, a is its mean distance to the others of its cluster, b the smallest mean distance to another
    cluster, its coefficient (b - a) / max(a, b); alone in its cluster it counts 0. A single cluster gives 0.
    """
    _, labels = labels.unique(return_inverse=True)
    member = F.one_hot(labels).to(features.dtype)                               # [M, C]
    sizes, total = member.sum(0), 0.0
    if len(sizes) < 2:
        return 0.0
    for part, own in zip(features.split(chunk), labels.split(chunk)):
        distances = torch.cdist(part, features, compute_mode="donot_use_mm_for_euclid_dist")
        sums = distances @ member                                               # [chunk, C]
        a = sums.gather(1, own[:, None])[:, 0] / (sizes[own] - 1).clamp_min(1)
        b = (sums / sizes).scatter(1, own[:, None], math.inf).amin(1)
        s = (b - a) / torch.maximum(a, b).clamp_min(torch.finfo(a.dtype).tiny)
        total += s[sizes[own] > 1].sum().item()
    return total / len(features)


def area_under_curve(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: score [M], positive bool [M]; ties count half. NaN if a class is missing."""
    _, group, counts = score.double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[group]      # from 1, the mean rank of ties
    n, m = positive.sum().item(), (~positive).sum().item()
    return ((rank[positive].sum().item() - n * (n + 1) / 2) / (n * m)) if n and m else math.nan


def patch_foreground(images, chosen: list[int], size: int, patch_size: int) -> Tensor:
    """Which patches of the evaluation view lie at least half on the foreground -> bool [M, N]"""
    masks = [data.centre_view(images.mask(i)[None].to(torch.uint8) * 255, size) for i in chosen]
    return F.avg_pool2d(torch.stack(masks).float() / 255, patch_size).flatten(1) >= 0.5


@torch.no_grad()
def measure(path: str, args: argparse.Namespace, process: common.Process) -> tuple[dict, dict]:
    """One checkpoint -> (numbers for routing.json, tensors for the pictures)"""
    checkpoint, encoder = load_checkpoint(path), load_encoder(path).to(process.device).eval()
    if not encoder.moe_blocks:
        raise UserError(f"{path} has no experts: there is no routing to show")
    loss_blocks = checkpoint["args"].get("loss_block") or encoder.moe_blocks
    block = loss_blocks[-1] if args.block is None else args.block
    if block not in encoder.moe_blocks:
        raise UserError(f"--block {block} has no experts: the MoE blocks are "
                        f"{' '.join(map(str, encoder.moe_blocks))}")
    head, teacher = distillation(checkpoint, encoder, path, process)

    size, tokens_per_image = encoder.config["image_size"], 1 + encoder.grid ** 2
    images = data.open_images(args.data, "val", size)
    chosen = np.random.default_rng(args.seed).permutation(len(images))[:args.images].tolist()
    order = [chosen[at:at + args.batch_size] for at in range(0, len(chosen), args.batch_size)]
    sample = np.random.default_rng(args.seed).permutation(len(chosen) * tokens_per_image)[:TOKENS]
    sample = torch.from_numpy(np.sort(sample))      # of all tokens, [CLS] included

    inputs, dispatch, combine = ({i: [] for i in encoder.moe_blocks} for _ in range(3))
    for i in encoder.moe_blocks:
        encoder.blocks[i].register_forward_pre_hook(lambda _, x, i=i: inputs[i].append(x[0].flatten(0, 1)))
    pixels, losses, seen = [], [], 0
    for batch in data.load(data.CentreViews(images, size), order, args.workers, process.device):
        view = batch["image"] / 255
        with process.autocast():
            tokens, routing = encoder(data.normalize(view))
            predicted = head(tokens) if head else None
        first, seen = seen, seen + tokens.shape[0] * tokens.shape[1]
        mine = sample[(sample >= first) & (sample < seen)].to(tokens.device) - first
        for i in encoder.moe_blocks:
            inputs[i][-1] = inputs[i][-1][mine].float().cpu()
            dispatch[i].append(routing[i].dispatch.float().cpu())
            combine[i].append(routing[i].combine.float().cpu())
        if head:
            losses.append(token_loss(predicted[:, 1:].float(), teacher(view)[:, 1:].float()).cpu())
        pixels.append(view.cpu())
    dispatch, combine = ({i: torch.cat(x[i]) for i in x} for x in (dispatch, combine))      # [M, T, E]

    rows = []
    for i in encoder.moe_blocks:
        expert = dispatch[i].flatten(0, 1)[sample].argmax(1)
        rows.append({"block": i, "silhouette": silhouette(torch.cat(inputs[i]), expert),
                     "scale": encoder.blocks[i].mlp.scale.item(),
                     "entropy": dispatch_entropy(dispatch[i]).tolist(),
                     "dispatch_cv": variation(dispatch[i][:, 1:]).tolist(),
                     "cls_share": dispatch[i][:, 0].mean(0).tolist(),
                     "use": combine[i].mean((0, 1)).tolist()})
    patches = dispatch[block][:, 1:]      # [CLS] has no place in a picture
    numbers = {"checkpoint": str(path), "name": Path(path).resolve().parent.name, "loss_block": block,
               "images": len(chosen), "silhouette_tokens": len(sample), "blocks": rows,
               "shown": most_and_least(combine[block].mean((0, 1)))}
    tensors = {"pixels": torch.cat(pixels)[:ROWS], "patches": patches[:ROWS]}
    if losses:
        pairs = np.random.default_rng(args.seed).permutation(patches.shape[0] * patches.shape[1])[:TOKENS]
        tensors |= {"weight": patches[..., 0].flatten()[pairs], "loss": torch.cat(losses).flatten()[pairs]}
        pearson = torch.corrcoef(torch.stack([tensors["weight"], tensors["loss"]]).double())[0, 1].item()
        numbers |= {"correlation": pearson, "correlation_tokens": len(pairs)}
    if hasattr(images, "mask"):
        foreground = patch_foreground(images, chosen, size, encoder.patch_size).flatten()
        areas = [area_under_curve(weight, foreground) for weight in patches.flatten(0, 1).unbind(1)]
        numbers |= {"foreground_auc": areas, "foreground_patches": int(foreground.sum()),
                    "patches": len(foreground)}
    return numbers, tensors


def distillation(checkpoint: dict, encoder: nn.Module, path: str, process: common.Process):
    """A pretraining checkpoint's head and teacher, or (None, None) and one line that says why not."""
    name, weight = checkpoint["args"].get("teacher"), checkpoint["model"].get("head.weight")
    try:
        if not name or weight is None:
            raise LoadError("it is not a pretraining checkpoint")
        teacher = build_teacher(name, encoder.grid).to(process.device, process.amp)
    except LoadError as error:
        if common.is_first():
            print(f"{path}: no correlation with the distillation loss: {error}")
        return None, None
    head = nn.Linear(weight.shape[1], weight.shape[0]).to(process.device)
    head.load_state_dict({"weight": weight, "bias": checkpoint["model"]["head.bias"]})
    return head, teacher


def most_and_least(use: Tensor) -> list[int]:
    """Experts to show, in their order: all, or the most and least used where there are too many. use [E]"""
    order, half = use.argsort(descending=True).tolist(), COLUMNS // 2
    return sorted(order if len(order) <= COLUMNS else order[:half] + order[-half:])


def table(numbers: dict) -> str:
    """The same numbers as in routing.json, for the terminal."""
    lines = [f"{numbers['checkpoint']}: {numbers['images']} images, {numbers['silhouette_tokens']} tokens",
             "block  silhouette   scale  expert  entropy       cv  [CLS] share     use"]
    for row in numbers["blocks"]:
        for e in numbers["shown"]:
            lines.append(f"{row['block']:5}{row['silhouette']:12.3f}{row['scale']:8.3f}{e:8}"
                         f"{row['entropy'][e]:9.4f}{row['dispatch_cv'][e]:9.4f}"
                         f"{row['cls_share'][e]:13.4f}{row['use'][e]:8.3f}")
    for name, what in (
            ("correlation", "r of expert 0's dispatch weight and token loss"),
            ("foreground_auc", "area under the ROC curve of each expert's weights against the foreground")):
        if name in numbers:
            lines.append(f"{what}, block {numbers['loss_block']}: {np.round(numbers[name], 3)}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- pictures

def overlays(images: Tensor, dispatch: Tensor) -> Tensor:
    """Each expert's dispatch weights over each image, warm is high -> [M, E, 3, TILE, TILE] in [0, 1].

    images [M, 3, S, S] in [0, 1], dispatch [M, N, E] of the patches. One colour range for them all, from the
    1st to the 99th percentile of the weights: a few extreme patches would dull the rest.
    """
    low, high = np.quantile(dispatch.numpy(), (0.01, 0.99))
    at = ((dispatch - low) / max(high - low, 1e-12)).clamp(0, 1) * (len(COLOURS) - 1)
    below = at.floor().long().clamp(max=len(COLOURS) - 2)
    maps = torch.lerp(COLOURS[below], COLOURS[below + 1], (at - below)[..., None])      # [M, N, E, 3]
    count, patches, experts, _ = maps.shape
    maps = maps.permute(0, 2, 3, 1).reshape(count, 3 * experts, math.isqrt(patches), -1)
    maps = F.interpolate(maps, size=(TILE, TILE), mode="nearest").view(count, experts, 3, TILE, TILE)
    return 0.65 * maps + 0.35 * data.grey(tile(images))[:, None]


def tile(images: Tensor) -> Tensor:
    return F.interpolate(images, (TILE, TILE), mode="bicubic", antialias=True).clamp(0, 1)


def heatmaps(images: Tensor, models: list[list[tuple[str, Tensor]]]) -> Image.Image:
    """A row per image: the image, each model's columns (title, [M, 3, TILE, TILE]), a line between models."""
    columns = [("image", tile(images)), *(column for model in models for column in model)]
    tiles = F.pad(torch.stack([tiles for _, tiles in columns], dim=1), [GAP] * 4, value=1.0)
    picture = to_pil_image(tiles.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2))
    canvas = Image.new("RGB", (picture.width, picture.height + TITLE), "white")
    canvas.paste(picture, (0, TITLE))
    draw, width = ImageDraw.Draw(canvas), TILE + 2 * GAP
    for i, (title, _) in enumerate(columns):
        draw.multiline_text(((i + 0.5) * width, TITLE / 2), title, fill="black", anchor="mm", align="center",
                            spacing=2)
    for x in np.cumsum([1] + [len(model) for model in models])[1:-1] * width:
        draw.line([(x, 0), (x, canvas.height)], fill="black", width=2)
    return canvas


def draw_figures(models: list[dict], tensors: list[dict], out: Path) -> list[str]:
    """blocks.png: silhouette, entropy, variation, [CLS] share over MoE blocks, a line per model and expert.
    correlation.png: expert 0's dispatch weight against the token's loss, with the regression line."""
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
    for m, (style, numbers) in enumerate(zip(("-o", "--s"), models)):
        rows = numbers["blocks"]
        blocks = [row["block"] for row in rows]
        axes[0].plot(blocks, [row["silhouette"] for row in rows], style, color=f"C{m}", label=numbers["name"])
        for axis, name in zip(axes[1:], ("entropy", "dispatch_cv", "cls_share")):
            for e in numbers["shown"]:
                axis.plot(blocks, [row[name][e] for row in rows], style, color=f"C{m}",
                          alpha=1.0 if e == 0 else 0.45, label=f"{numbers['name']}, expert {e}")
    titles = ("silhouette", "dispatch entropy (nats)", "coefficient of variation", "[CLS] share")
    for axis, title in zip(axes, titles):
        axis.set(title=title, xlabel="block", xticks=blocks)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(out / "blocks.png", dpi=90)

    points = [(numbers, each) for numbers, each in zip(models, tensors) if "correlation" in numbers]
    if not points:
        return ["blocks.png"]
    figure, axes = plt.subplots(1, len(points), figsize=(4.6 * len(points), 3.6), layout="constrained",
                                squeeze=False, sharey=True)
    for axis, (numbers, each) in zip(axes[0], points):
        weight, loss = each["weight"].double().numpy(), each["loss"].double().numpy()
        axis.scatter(weight, loss, s=2, alpha=0.25, rasterized=True)
        slope, offset = np.polyfit(weight, loss, 1)
        ends = np.array([weight.min(), weight.max()])
        axis.plot(ends, np.maximum(slope * ends + offset, 0), "k--", linewidth=1)
        axis.set(title=f"{numbers['name']}: r = {numbers['correlation']:.3f}",
                 xlabel="expert 0's dispatch weight")
    axes[0, 0].set_ylabel("token loss")
    figure.savefig(out / "correlation.png", dpi=90)
    plt.close("all")
    return ["blocks.png", "correlation.png"]


def main(args: argparse.Namespace) -> list[dict]:
    """-> the numbers of routing.json, one dict for each checkpoint"""
    process = common.Process(args)
    models, tensors = zip(*(measure(path, args, process) for path in args.checkpoints))
    if len({numbers["name"] for numbers in models}) < len(models):
        for numbers in models:
            numbers["name"] = numbers["checkpoint"]
    if not common.is_first():
        return models
    out = Path(args.out or Path(args.checkpoints[0]).parent)
    out.mkdir(parents=True, exist_ok=True)
    columns = []
    for numbers, each in zip(models, tensors):
        tiles = overlays(each["pixels"], each["patches"])
        name = f"{numbers['name'][-18:]}\n" if len(models) > 1 else ""
        columns.append([(f"{name}expert {e}", tiles[:, e]) for e in numbers["shown"]])
    heatmaps(tensors[0]["pixels"], columns).save(out / "heatmaps.png")
    (out / "routing.json").write_text(json.dumps(common.plain(list(models)), indent=1) + "\n")
    written = ["heatmaps.png", "routing.json"]
    try:
        written += draw_figures(models, tensors, out)
    except ImportError:
        print("blocks.png and correlation.png need matplotlib: pip install matplotlib")
    print("\n\n".join(table(numbers) for numbers in models))
    print(f"{out}: {', '.join(written)}")
    return list(models)


if __name__ == "__main__":
    common.run(main, parse_args())
