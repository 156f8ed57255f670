"""What the router learned: pictures and numbers of the dispatch weights, on unmasked images in eval mode.

    python routing.py runs/coupled/last.pt --data FOLDER                                  # beside the checkpoint
    python routing.py runs/coupled/last.pt runs/detached/last.pt --data shapes --out DIR     # two models side by side

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
from model import build_teacher, load_checkpoint, load_encoder

# cool to warm: colours at equal distances
COLOURS = torch.tensor([[0.23, 0.30, 0.75], [0.55, 0.69, 1.00], [0.87, 0.87, 0.87], [0.96, 0.60, 0.48], [0.71, 0.02, 0.15]])
ROWS, COLUMNS, TILE, GAP, TITLE = 6, 8, 112, 2, 28      # of heatmaps.png: at most so many images and experts; pixels


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="one or two checkpoints with experts")
    common.add_common_flags(parser, batch_size=64, compiles=False, out="default: that of the first checkpoint")
    parser.add_argument("--images", type=common.positive_int, default=200, metavar="N",
                        help=f"validation images to measure, drawn by --seed; the first {ROWS} become pictures "
                             "(default: %(default)s)")
    parser.add_argument("--tokens", type=common.positive_int, default=10000, metavar="N",
                        help="tokens to draw from them for the silhouette and the correlation (default: %(default)s)")
    parser.add_argument("--block", type=common.natural, metavar="B",
                        help="MoE block of heatmaps, correlation and foreground (default: the last of the checkpoint's loss blocks)")
    parser.add_argument("--foreground", type=common.natural, nargs="+", metavar="CLASS",
                        help="classes that are foreground, where --data is a folder in ADE20K's layout "
                             "(images/validation, annotations/validation)")
    args = parser.parse_args(argv)
    if len(args.checkpoints) > 2:
        parser.error(f"{len(args.checkpoints)} checkpoints: give one, or two to compare")
    return args


# ------------------------------------------------------------------------------------------------------------ numbers

def silhouette(features: Tensor, labels: Tensor, chunk: int = 1024) -> float:
    """Mean silhouette coefficient by Euclidean distance, exact: features [M, D], labels [M] -> -1 to 1.

    For a point, a is its mean distance to the others of its cluster, b the smallest mean distance to another cluster, its
    coefficient (b - a) / max(a, b); alone in its cluster it counts 0. One single cluster gives 0, as the paper counts it.
    """
    _, labels = labels.unique(return_inverse=True)
    member = F.one_hot(labels).to(features.dtype)                               # [M, C]
    sizes = member.sum(0)
    if len(sizes) < 2:
        return 0.0
    total = 0.0
    for part, own in zip(features.split(chunk), labels.split(chunk)):
        sums = torch.cdist(part, features, compute_mode="donot_use_mm_for_euclid_dist") @ member      # [chunk, C]
        own_size = sizes[own]
        a = sums.gather(1, own[:, None])[:, 0] / (own_size - 1).clamp_min(1)
        b = (sums / sizes).scatter(1, own[:, None], math.inf).amin(1)
        s = (b - a) / torch.maximum(a, b).clamp_min(torch.finfo(a.dtype).tiny)
        total += s[own_size > 1].sum().item()
    return total / len(features)


def pearson(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation coefficient of x [M] and y [M]; NaN where one of them is constant."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return (x @ y / (x.norm() * y.norm())).item()


def area_under_curve(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive's score is above a negative's, ties count half. [M], bool [M].

    NaN where all are positive or none is.
    """
    _, group, counts = score.double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[group]              # from 1, the mean rank within ties
    n, m = positive.sum().item(), (~positive).sum().item()
    return ((rank[positive].sum().item() - n * (n + 1) / 2) / (n * m)) if n and m else math.nan


def patch_foreground(images, chosen: list[int], size: int, patch_size: int) -> Tensor:
    """Which patches of the evaluation view lie at least half on the foreground -> bool [M, N]."""
    masks = torch.stack([data.centre_view(images.mask(i)[None].to(torch.uint8) * 255, size) for i in chosen])
    return F.avg_pool2d(masks.float() / 255, patch_size).flatten(1) >= 0.5


# ----------------------------------------------------------------------------------------------------------- pictures

def warm(weight: Tensor) -> Tensor:
    """weight [...] in [0, 1] -> its colour [3, ...] from cool (low) to warm (high)."""
    at = weight.clamp(0, 1) * (len(COLOURS) - 1)
    low = at.floor().long().clamp(max=len(COLOURS) - 2)
    return torch.lerp(COLOURS[low], COLOURS[low + 1], (at - low)[..., None]).movedim(-1, 0)


def overlays(images: Tensor, dispatch: Tensor) -> Tensor:
    """Each expert's dispatch weights over each image, warm is high -> [M, E, 3, TILE, TILE] in [0, 1].

    images [M, 3, S, S] in [0, 1], dispatch [M, N, E] of the patches. One colour range for them all, from the 1st to the
    99th percentile of the weights.
    """
    count, patches, experts = dispatch.shape
    grid = math.isqrt(patches)
    low, high = np.quantile(dispatch.numpy(), (0.01, 0.99))        # a few extreme patches would dull the rest
    maps = warm((dispatch - low) / max(high - low, 1e-12))                                   # [3, M, N, E]
    maps = maps.permute(1, 3, 0, 2).reshape(count * experts, 3, grid, grid)
    maps = F.interpolate(maps, size=(TILE, TILE), mode="nearest").view(count, experts, 3, TILE, TILE)
    return 0.65 * maps + 0.35 * data.grey(data.resize(images, TILE, TILE).clamp(0, 1))[:, None]


def heatmaps(images: Tensor, models: list[list[tuple[str, Tensor]]]) -> Image.Image:
    """One row an image: the image, then for each model its columns (title, tiles [M, 3, TILE, TILE]), a line between models."""
    columns = [("image", data.resize(images, TILE, TILE).clamp(0, 1)), *(column for model in models for column in model)]
    tiles = F.pad(torch.stack([tiles for _, tiles in columns], dim=1), [GAP] * 4, value=1.0)  # [M, columns, 3, ...]
    picture = to_pil_image(tiles.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2))
    canvas = Image.new("RGB", (picture.width, picture.height + TITLE), "white")
    canvas.paste(picture, (0, TITLE))
    draw, width = ImageDraw.Draw(canvas), TILE + 2 * GAP
    for i, (title, _) in enumerate(columns):
        draw.multiline_text(((i + 0.5) * width, TITLE / 2), title, fill="black", anchor="mm", align="center", spacing=2)
    for x in np.cumsum([1] + [len(model) for model in models])[1:-1] * width:
        draw.line([(x, 0), (x, canvas.height)], fill="black", width=2)
    return canvas


def most_and_least(use: Tensor) -> list[int]:
    """Experts to show, in their order: all, or where there are too many, the most and the least used ones. use [E]."""
    order = use.argsort(descending=True).tolist()
    half = COLUMNS // 2
    return sorted(order if len(order) <= COLUMNS else order[:half] + order[-half:])


def draw_blocks(models: list[dict], path: Path):
    """Silhouette, entropy, variation and [CLS] share over the MoE blocks, a line a model (and expert)."""
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
    for m, (style, numbers) in enumerate(zip(("-o", "--s"), models)):
        blocks = [row["block"] for row in numbers["blocks"]]
        axes[0].plot(blocks, [row["silhouette"] for row in numbers["blocks"]], style, color=f"C{m}", label=numbers["name"])
        for axis, name in zip(axes[1:], ("entropy", "dispatch_cv", "cls_share")):
            for expert in numbers["shown"]:
                axis.plot(blocks, [row[name][expert] for row in numbers["blocks"]], style, color=f"C{m}",
                          alpha=1.0 if expert == 0 else 0.45, label=f"{numbers['name']}, expert {expert}")
    for axis, title in zip(axes, ("silhouette coefficient", "dispatch entropy (nats)", "coefficient of variation", "[CLS] share")):
        axis.set(title=title, xlabel="block")
        axis.set_xticks(sorted({row["block"] for numbers in models for row in numbers["blocks"]}))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    axes[1].legend(fontsize=6) if max(len(numbers["shown"]) for numbers in models) <= 4 else None
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_correlation(points: list[tuple[str, Tensor, Tensor, float]], path: Path):
    """Scatter of expert 0's dispatch weight and the token's loss, with the regression line, one panel a model."""
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(points), figsize=(4.6 * len(points), 3.6), layout="constrained", squeeze=False, sharey=True)
    for axis, (name, weight, loss, r) in zip(axes[0], points):
        axis.scatter(weight, loss, s=2, alpha=0.25, rasterized=True)
        if not math.isnan(r):
            slope, offset = np.polyfit(weight.double().numpy(), loss.double().numpy(), 1)
            ends = np.array([weight.min().item(), weight.max().item()])
            axis.plot(ends, np.maximum(slope * ends + offset, 0), "k--", linewidth=1)
        axis.set(title=f"{name}: r = {r:.3f}", xlabel="expert 0's dispatch weight")
        axis.locator_params(axis="x", nbins=5)
    axes[0, 0].set_ylabel("token loss")
    figure.savefig(path, dpi=90)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------ measure

@torch.no_grad()
def measure(path: str, args: argparse.Namespace, process: common.Process) -> tuple[dict, dict]:
    """One checkpoint -> (numbers for routing.json, tensors for the pictures)."""
    try:
        checkpoint, encoder = load_checkpoint(path), load_encoder(path).to(process.device).eval()
    except ValueError as error:
        raise UserError(str(error)) from error
    if not encoder.moe_blocks:
        raise UserError(f"{path} has no experts: there is no routing to show")
    block = args.block if args.block is not None else (checkpoint["args"].get("loss_block") or encoder.moe_blocks)[-1]
    if block not in encoder.moe_blocks:
        raise UserError(f"--block {block} has no experts: the MoE blocks are {' '.join(map(str, encoder.moe_blocks))}")
    head, teacher = distillation(checkpoint, encoder, path, process)

    size = encoder.config["image_size"]
    images = data.Scenes(args.data, "validation", args.foreground) if args.foreground else data.open_images(args.data, "val", size)
    chosen = np.random.default_rng(args.seed).permutation(len(images))[:args.images].tolist()
    order = [chosen[at:at + args.batch_size] for at in range(0, len(chosen), args.batch_size)]
    tokens_per_image = 1 + encoder.grid ** 2
    sample = np.random.default_rng(args.seed).permutation(len(chosen) * tokens_per_image)[:args.tokens]
    sample = torch.from_numpy(np.sort(sample))                                  # of all tokens, [CLS] included

    inputs, pixels, losses = {i: [] for i in encoder.moe_blocks}, [], []
    dispatch, combine = ({i: [] for i in encoder.moe_blocks} for _ in range(2))
    for i in encoder.moe_blocks:
        encoder.blocks[i].register_forward_pre_hook(lambda _, x, i=i: inputs[i].append(x[0].flatten(0, 1)))
    seen = 0
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
        pixels.append(batch["image"].cpu())
    dispatch, combine = ({i: torch.cat(parts[i]) for i in parts} for parts in (dispatch, combine))      # [M, T, E]

    rows = []
    for i in encoder.moe_blocks:
        expert = dispatch[i].flatten(0, 1)[sample].argmax(1)
        rows.append({"block": i, "silhouette": silhouette(torch.cat(inputs[i]), expert), "scale": encoder.blocks[i].mlp.scale.item(),
                     "entropy": dispatch_entropy(dispatch[i]).tolist(), "dispatch_cv": variation(dispatch[i][:, 1:]).tolist(),
                     "cls_share": dispatch[i][:, 0].mean(0).tolist(), "use": combine[i].mean((0, 1)).tolist()})
    patches = dispatch[block][:, 1:]                                            # [CLS] has no place in a picture
    numbers = {"checkpoint": str(path), "name": Path(path).resolve().parent.name, "loss_block": block, "images": len(chosen),
               "silhouette_tokens": len(sample), "blocks": rows, "shown": most_and_least(combine[block].mean((0, 1)))}
    tensors = {"pixels": torch.cat(pixels)[:ROWS] / 255, "patches": patches[:ROWS]}
    if losses:
        pairs = np.random.default_rng(args.seed).permutation(patches.shape[0] * patches.shape[1])[:args.tokens]
        weight, loss = patches[..., 0].flatten()[pairs], torch.cat(losses).flatten()[pairs]
        numbers |= {"correlation": pearson(weight, loss), "correlation_tokens": len(pairs)}
        tensors |= {"weight": weight, "loss": loss}
    if hasattr(images, "mask"):
        foreground = patch_foreground(images, chosen, size, encoder.patch_size).flatten()
        numbers |= {"foreground_auc": [area_under_curve(weight, foreground) for weight in patches.flatten(0, 1).unbind(1)],
                    "foreground_patches": int(foreground.sum()), "patches": len(foreground)}
    return numbers, tensors


def distillation(checkpoint: dict, encoder: nn.Module, path: str, process: common.Process):
    """The head and the teacher of a pretraining checkpoint, or (None, None) and one line that says why not."""
    name, weight = checkpoint["args"].get("teacher"), checkpoint["model"].get("head.weight")
    try:
        if not name or weight is None:
            raise ValueError("it is no pretraining checkpoint")
        teacher = build_teacher(name, encoder.grid).to(process.device, process.amp)
        head = nn.Linear(weight.shape[1], weight.shape[0]).to(process.device)
        head.load_state_dict({"weight": weight, "bias": checkpoint["model"]["head.bias"]})
        return head, teacher
    except ValueError as error:
        if common.is_first():
            print(f"{path}: no correlation with the distillation loss: {f'teacher {name}: ' if name else ''}{error}")
        return None, None


def table(numbers: dict) -> str:
    """The same numbers as in routing.json, for the terminal."""
    lines = [f"{numbers['checkpoint']}: {numbers['images']} images, {numbers['silhouette_tokens']} tokens",
             "block  silhouette   scale  expert  entropy       cv  [CLS] share     use"]
    for row in numbers["blocks"]:
        for e in numbers["shown"]:
            start = f"{row['block']:5}{row['silhouette']:12.3f}{row['scale']:8.3f}" if e == numbers["shown"][0] else " " * 25
            lines.append(f"{start}{e:8}{row['entropy'][e]:9.4f}{row['dispatch_cv'][e]:9.4f}{row['cls_share'][e]:13.4f}{row['use'][e]:8.3f}")
    if "correlation" in numbers:
        lines.append(f"expert 0's dispatch weight and token loss at block {numbers['loss_block']}: r = {numbers['correlation']:.3f} "
                     f"({numbers['correlation_tokens']} tokens)")
    if "foreground_auc" in numbers:
        lines.append(f"area under the ROC curve against the foreground at block {numbers['loss_block']}: " + ", ".join(
            f"expert {e} {numbers['foreground_auc'][e]:.3f}" for e in numbers["shown"])
            + f" ({numbers['foreground_patches']} of {numbers['patches']} patches)")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> list[dict]:
    """-> the numbers of routing.json, one dict a checkpoint."""
    process = common.start(args)
    measured = [measure(path, args, process) for path in args.checkpoints]
    models = [numbers for numbers, _ in measured]
    if len(models) == 2 and models[0]["name"] == models[1]["name"]:
        for numbers in models:
            numbers["name"] = numbers["checkpoint"]
    out = Path(args.out or Path(args.checkpoints[0]).parent)
    if not common.is_first():
        return models
    out.mkdir(parents=True, exist_ok=True)
    columns = []
    for numbers, tensors in measured:
        tiles, name = overlays(tensors["pixels"], tensors["patches"]), f"{numbers['name'][-18:]}\n" if len(models) > 1 else ""
        columns.append([(f"{name}expert {e}", tiles[:, e]) for e in numbers["shown"]])
    heatmaps(measured[0][1]["pixels"], columns).save(out / "heatmaps.png")
    (out / "routing.json").write_text(json.dumps(common.rounded(models), indent=1) + "\n")
    written = ["heatmaps.png", "routing.json"]
    try:
        draw_blocks(models, out / "blocks.png")
        written.append("blocks.png")
        points = [(n["name"], t["weight"], t["loss"], n["correlation"]) for n, t in measured if "correlation" in n]
        if points:
            draw_correlation(points, out / "correlation.png")
            written.append("correlation.png")
    except ImportError:
        print("blocks.png and correlation.png need matplotlib: pip install matplotlib")
    print("\n\n".join(table(numbers) for numbers in models))
    print(f"{out}: {', '.join(written)}")
    return models


if __name__ == "__main__":
    common.run(main, parse_args())
