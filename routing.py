"""What the router learned: pictures and numbers of the dispatch weights, on unmasked images in eval mode.

    python routing.py runs/coupled/last.pt --data FOLDER                        # beside the checkpoint
    python routing.py runs/coupled/last.pt runs/detached/last.pt --out DIR      # two models in one picture

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
from checkpoint import LoadError, load_checkpoint, load_encoder
from common import UserError
from losses import dispatch_entropy, token_loss, variation
from model import Router
from teacher import build_teacher

# cool to warm: colors at equal distances
COLORS = torch.tensor([[0.23, 0.30, 0.75], [0.55, 0.69, 1.00], [0.87, 0.87, 0.87], [0.96, 0.60, 0.48],
                       [0.71, 0.02, 0.15]])
IMAGES, EXPERTS, TILE, GAP, MARGIN = 6, 8, 112, 4, 84      # of heatmaps.png: images, experts at most; pixels
TOKENS = 10_000                                            # drawn for silhouette and correlation


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, batch_size=64, batches="images per batch", compiles=False,
                                out="the first checkpoint's")
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="one or two models with experts")
    add("--images", type=int, default=200, metavar="N",
        help=f"images to measure, drawn by --seed; the first {IMAGES} become pictures (default: %(default)s)")
    add("--block", type=int, metavar="B",
        help="MoE block of heatmaps, correlation and foreground (default: the checkpoint's last loss block)")
    args = common.parse(parser, argv, "routing")
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


def roc_auc(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: score [M], positive bool [M]; ties count half. NaN if a class is missing."""
    _, group, counts = score.double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[group]      # from 1, the mean rank of ties
    n, m = positive.sum().item(), (~positive).sum().item()
    return ((rank[positive].sum().item() - n * (n + 1) / 2) / (n * m)) if n and m else math.nan


def patch_foreground(images, chosen: list[int], size: int, patch_size: int) -> Tensor:
    """Which patches of the evaluation view lie at least half on the foreground -> bool [M, N]"""
    masks = [data.center_view(images.mask(i)[None].to(torch.uint8) * 255, size) for i in chosen]
    return F.avg_pool2d(torch.stack(masks).float() / 255, patch_size).flatten(1) >= 0.5


@torch.no_grad()
def measure(path: str, args: argparse.Namespace, machine: common.Machine) -> tuple[dict, dict]:
    """One checkpoint -> (numbers for routing.json, tensors for the pictures)"""
    checkpoint, rng = load_checkpoint(path), np.random.default_rng(args.seed)
    encoder = load_encoder(checkpoint).to(machine.device).eval()
    routers = {i: encoder.blocks[i].mlp for i in encoder.moe_blocks}
    if "loss_router.phi" in checkpoint["model"]:      # after the last block, on the final tokens
        state = {name: checkpoint["model"][f"loss_router.{name}"] for name in ("phi", "scale")}
        routers[len(encoder.blocks)] = Router(*state["phi"].shape).to(machine.device)
        routers[len(encoder.blocks)].load_state_dict(state)
    blocks = list(routers)
    if not blocks:
        raise UserError(f"{path} has no experts: there is no routing to show")
    block = (checkpoint["args"].get("loss_block") or blocks)[-1] if args.block is None else args.block
    if block not in blocks:
        raise UserError(f"--block {block} has no experts: the MoE blocks are {' '.join(map(str, blocks))}")
    head, teacher = distillation(checkpoint, encoder, path, machine)

    images = data.open_images(args.data, "val", encoder.config["image_size"], labels=False)
    views = data.CenterViews(images, encoder.config["image_size"])
    chosen = rng.permutation(len(images))[:args.images].tolist()
    tokens = len(chosen) * (1 + encoder.grid ** 2)
    drawn = torch.from_numpy(rng.random((len(chosen), 1 + encoder.grid ** 2)) < TOKENS / tokens)      # [M, T]
    inputs, routings, losses, pixels = {i: [] for i in blocks}, [], [], []
    for i in encoder.moe_blocks:
        encoder.blocks[i].register_forward_pre_hook(lambda _, x, i=i: inputs[i].append(x[0]))
    order = torch.tensor(chosen).split(args.batch_size)
    for batch, sample in zip(data.load(views, [rows.tolist() for rows in order], machine),
                             drawn.split(args.batch_size)):
        pixels.append(batch["image"] / 255)
        with machine.autocast():
            tokens, routing = encoder(data.normalize(pixels[-1]))
        for i in blocks[len(encoder.moe_blocks):]:
            inputs[i].append(tokens)
            routing[i] = routers[i].route(tokens)
        routings.append({i: [weights.float().cpu() for weights in routing[i]] for i in blocks})
        for i in blocks:
            inputs[i][-1] = inputs[i][-1].cpu().float()[sample]
        if head:
            losses.append(token_loss(head(tokens)[:, 1:].float(), teacher(pixels[-1])[:, 1:].float()).cpu())
    dispatch, combine = ({i: torch.cat([routing[i][k] for routing in routings]) for i in blocks}
                         for k in (0, 1))

    rows = [{"block": i, "silhouette": silhouette(torch.cat(inputs[i]), dispatch[i][drawn].argmax(1)),
             "scale": routers[i].scale.item(), "entropy": dispatch_entropy(dispatch[i]).tolist(),
             "dispatch_cv": variation(dispatch[i][:, 1:]).tolist(),
             "cls_share": dispatch[i][:, 0].mean(0).tolist(), "usage": combine[i].mean((0, 1)).tolist()}
            for i in blocks]
    weights = dispatch[block][:, 1:] * dispatch[block].shape[1]      # in units of the uniform weight
    numbers = {"checkpoint": str(path), "name": Path(path).resolve().parent.name, "loss_block": block,
               "images": len(chosen), "tokens": int(drawn.sum()), "blocks": rows,
               "shown": most_and_least(combine[block].mean((0, 1)))}
    tensors = {"pixels": torch.cat(pixels)[:IMAGES].cpu(), "weights": weights[:IMAGES]}
    if head:
        tensors |= {"weight": weights[..., 0][drawn[:, 1:]], "loss": torch.cat(losses)[drawn[:, 1:]]}
        pair = torch.stack([tensors["weight"], tensors["loss"]]).double()
        numbers["correlation"] = torch.corrcoef(pair)[0, 1].item()
    if hasattr(images, "mask"):
        foreground = patch_foreground(images, chosen, views.image_size, encoder.patch_size)
        numbers["foreground_auc"] = [roc_auc(weight, foreground) for weight in weights.unbind(2)]
    return numbers, tensors


def distillation(checkpoint: dict, encoder: nn.Module, path: str, machine: common.Machine):
    """A pretraining checkpoint's head and teacher, or (None, None) and one line that says why not."""
    name, weight = checkpoint["args"].get("teacher"), checkpoint["model"].get("head.weight")
    try:
        if not name or weight is None:
            raise LoadError("it is not a pretraining checkpoint")
        teacher = build_teacher(name, encoder.grid).to(machine.device, machine.amp)
    except LoadError as error:
        if common.is_first():
            print(f"{path}: no correlation with the distillation loss: {error}")
        return None, None
    head = nn.Linear(weight.shape[1], weight.shape[0]).to(machine.device)
    head.load_state_dict({"weight": weight, "bias": checkpoint["model"]["head.bias"]})
    return head, teacher


def most_and_least(usage: Tensor) -> list[int]:
    """Experts to show, in their order: all, or the most and least used where there are too many. usage [E]"""
    order, half = usage.argsort(descending=True).tolist(), EXPERTS // 2
    return sorted(order if len(order) <= EXPERTS else order[:half] + order[-half:])


def table(numbers: dict) -> str:
    """The same numbers as in routing.json, for the terminal."""
    lines = [f"{numbers['checkpoint']}: {numbers['images']} images, {numbers['tokens']} tokens",
             "block  silhouette   scale  expert  entropy       cv  [CLS] share   usage"]
    for row in numbers["blocks"]:
        lines += [f"{row['block']:5}{row['silhouette']:12.3f}{row['scale']:8.3f}{e:8}{row['entropy'][e]:9.4f}"
                  f"{row['dispatch_cv'][e]:9.4f}{row['cls_share'][e]:13.4f}{row['usage'][e]:8.3f}"
                  for e in numbers["shown"]]
    for name, what in (("correlation", "r of expert 0's dispatch weight and token loss"),
                       ("foreground_auc", "area under the ROC curve of each expert's weight on objects")):
        if name in numbers:
            lines.append(f"{what}, block {numbers['loss_block']}: {np.round(numbers[name], 3)}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- pictures

def color(values: Tensor, low: float, high: float) -> Tensor:
    """values [...] -> colors [..., 3] in [0, 1], cool at `low`, warm at `high`"""
    at = ((values - low) / max(high - low, 1e-12)).clamp(0, 1) * (len(COLORS) - 1)
    below = at.floor().long().clamp(max=len(COLORS) - 2)
    return torch.lerp(COLORS[below], COLORS[below + 1], (at - below)[..., None])


def tile(images: Tensor, mode: str = "nearest") -> Tensor:
    return F.interpolate(images, (TILE, TILE), mode=mode, antialias=mode == "bicubic").clamp(0, 1)


def heatmaps(pixels: Tensor, models: list[tuple[str, Tensor, list[int]]]) -> Image.Image:
    """A row of images, then a row for each model's experts: dispatch weights over the image, warm is high.

    pixels [M, 3, S, S] in [0, 1]; of each model its name, weights [M, N, E] in units of the uniform weight,
    and the experts to show. Each model has a color scale of its own, from the 1st to the 99th percentile of
    its weights: a few extreme patches would dull the rest.
    """
    step, rows = TILE + GAP, 1 + sum(len(experts) for _, _, experts in models)
    canvas = Image.new("RGB", (2 * MARGIN + len(pixels) * step, GAP + rows * step), "white")
    draw, images, y = ImageDraw.Draw(canvas), tile(pixels, "bicubic"), GAP

    def add_row(title: str, tiles: Tensor):
        draw.multiline_text((MARGIN - 8, y + TILE / 2), title, fill="black", anchor="rm", align="right")
        for m, picture in enumerate(tiles):
            canvas.paste(to_pil_image(picture), (MARGIN + m * step, y))
    add_row("image", images)
    for name, weights, experts in models:
        low, high = np.quantile(weights[..., experts].numpy(), (0.01, 0.99))
        top = y = y + step
        for expert in experts:
            maps = color(weights[..., expert], low, high).permute(0, 2, 1)                      # [M, 3, N]
            maps = maps.unflatten(2, (math.isqrt(maps.shape[2]), -1))
            add_row(f"{name[-12:]}\nexpert {expert}".strip(), 0.65 * tile(maps) + 0.35 * data.gray(images))
            y += step
        y, x = y - step, MARGIN + len(pixels) * step + 8
        scale = color(torch.linspace(1, 0, y + TILE - top - 24), 0, 1).T[..., None].expand(-1, -1, 14)
        canvas.paste(to_pil_image(scale), (x, top + 12))
        for value, at in ((high, top + 12), (low, y + TILE - 12)):
            draw.text((x + 18, at), f"{value:.2f}", fill="black", anchor="lm")
        draw.text((x + 18, (top + y + TILE) / 2), "x uniform", fill="black", anchor="lm")
    return canvas


def draw_figures(models: list[dict], tensors: list[dict], out: Path) -> list[str]:
    """blocks.png: silhouette, entropy, variation, [CLS] share over MoE blocks, a line per model and expert.
    correlation.png: expert 0's dispatch weight against the token's loss, with the regression line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    titles = {"silhouette": "silhouette", "entropy": "dispatch entropy (nats)",
              "dispatch_cv": "coefficient of variation", "cls_share": "[CLS] share"}
    for axis, name in zip(figure.subplots(1, 4), titles):
        for m, (style, numbers) in enumerate(zip(("-o", "--s"), models)):
            blocks, values = zip(*((row["block"], row[name]) for row in numbers["blocks"]))
            for e in numbers["shown"] if name != "silhouette" else [0]:
                line = values if name == "silhouette" else [value[e] for value in values]
                label = numbers["name"] + (f", expert {e}" if name != "silhouette" else "")
                axis.plot(blocks, line, style, color=f"C{m}", alpha=1.0 if e == 0 else 0.45, label=label)
        axis.set(title=titles[name], xlabel="block", xticks=blocks)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(out / "blocks.png", dpi=90)

    points = [(numbers, each) for numbers, each in zip(models, tensors) if "correlation" in numbers]
    if not points:
        return ["blocks.png"]
    figure = Figure(figsize=(4.6 * len(points), 3.6), layout="constrained")
    for axis, (numbers, each) in zip(figure.subplots(1, len(points), squeeze=False, sharey=True)[0], points):
        weight, loss = each["weight"].double().numpy(), each["loss"].double().numpy()
        axis.scatter(weight, loss, s=2, alpha=0.25, rasterized=True)
        ends = np.array([weight.min(), weight.max()])
        axis.plot(ends, np.maximum(np.polyval(np.polyfit(weight, loss, 1), ends), 0), "k--", linewidth=1)
        axis.set(title=f"{numbers['name']}: r = {numbers['correlation']:.3f}", ylabel="token loss",
                 xlabel="expert 0's dispatch weight / uniform weight")
        axis.xaxis.set_major_locator(MaxNLocator(5))
    figure.savefig(out / "correlation.png", dpi=90)
    return ["blocks.png", "correlation.png"]


def main(args: argparse.Namespace) -> list[dict]:
    """-> the numbers of routing.json, one dict for each checkpoint"""
    machine, out = common.Machine(args), Path(args.out or Path(args.checkpoints[0]).parent)
    out.mkdir(parents=True, exist_ok=True)
    models, tensors = zip(*(measure(path, args, machine) for path in args.checkpoints))
    if len({numbers["name"] for numbers in models}) < len(models):
        for numbers in models:
            numbers["name"] = numbers["checkpoint"]
    if common.is_first():
        rows = [(numbers["name"] if len(models) > 1 else "", each["weights"], numbers["shown"])
                for numbers, each in zip(models, tensors)]
        heatmaps(tensors[0]["pixels"], rows).save(out / "heatmaps.png")
        (out / "routing.json").write_text(json.dumps(common.plain(models), indent=1) + "\n")
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
