"""What the router learned: pictures and numbers of the dispatch weights, on unmasked images in eval mode.

    python routing.py runs/coupled/last.pt --data FOLDER_OR_PHOTO               # beside the checkpoint
    python routing.py runs/coupled/last.pt runs/detached/last.pt --out DIR      # two models in one picture

heatmaps.png (Fig. 1, A1), blocks.png (Fig. A2), correlation.png (Fig. A3), of expert 0's dispatch weights and
the token loss, and routing.json: every number, and each expert's area under the ROC curve on the foreground.
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
from torchvision.utils import make_grid

import common
import data
from checkpoint import LoadError, digest, load_checkpoint, load_encoder
from common import UserError
from losses import dispatch_entropy, token_loss, variation
from model import Router, ViT
from run import plain
from teacher import build_teacher

# low to high, blue over gray to red: colors at equal distances
COLORS = ((0.23, 0.30, 0.75), (0.55, 0.69, 1.00), (0.87, 0.87, 0.87), (0.96, 0.60, 0.48), (0.71, 0.02, 0.15))
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

def silhouette(features: Tensor, labels: Tensor) -> float:
    """Mean silhouette coefficient by Euclidean distance, exact: features [M, D], labels [M] -> -1 to 1.

    For a point, a is its mean distance to the others of its cluster, b the smallest mean distance to another
    cluster, its coefficient (b - a) / max(a, b); alone in its cluster it counts 0. A single cluster gives 0.
    """
    _, labels = labels.unique(return_inverse=True)
    member = F.one_hot(labels).to(features.dtype)                               # [M, C]
    sizes = member.sum(0)
    if len(sizes) < 2:
        return 0.0
    sums = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist") @ member      # [M, C]
    a = sums.gather(1, labels[:, None])[:, 0] / (sizes[labels] - 1).clamp_min(1)
    b = (sums / sizes).scatter(1, labels[:, None], math.inf).amin(1)
    s = (b - a) / torch.maximum(a, b).clamp_min(torch.finfo(a.dtype).tiny)
    return s.where(sizes[labels] > 1, 0).mean().item()


def roc_auc(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: score [M], positive bool [M]; ties count half. NaN if a class is missing."""
    inside, outside = score[positive], score[~positive].sort().values
    below = torch.searchsorted(outside, inside) + torch.searchsorted(outside, inside, right=True)
    return (below.double().mean() / (2 * len(outside))).item()


def all_routers(checkpoint: dict, encoder: ViT) -> dict[int, Router]:
    """Of each MoE block, and the loss router's, under the number after the last block's."""
    routers = {i: encoder.blocks[i].mlp for i in encoder.moe_blocks}
    phi, scale = (checkpoint["model"].get(f"loss_router.{name}") for name in ("phi", "scale"))
    if phi is not None:
        router = routers[len(encoder.blocks)] = Router(*phi.shape).to(encoder.pos_embed.device)
        router.load_state_dict({"phi": phi, "scale": scale})
    return routers


@torch.no_grad()
def measure(path: str, args: argparse.Namespace, machine: common.Machine) -> tuple[dict, dict]:
    """One checkpoint -> (numbers for routing.json, tensors for the pictures)"""
    checkpoint, rng = load_checkpoint(path), np.random.default_rng(args.seed)
    encoder = load_encoder(checkpoint).to(machine.device).eval()
    routers, last = all_routers(checkpoint, encoder), len(encoder.blocks)
    if not routers:
        raise UserError(f"{path} has no experts: there is no routing to show")
    block = (checkpoint["args"].get("loss_block") or [*routers])[-1] if args.block is None else args.block
    if block not in routers:
        raise UserError(f"--block {block} has no experts: the MoE blocks are {' '.join(map(str, routers))}")
    head, teacher = distillation(checkpoint, encoder, path, machine)

    images = data.open_images(args.data, "val", encoder.config["image_size"], labels=False)
    views = data.CenterViews(images, encoder.config["image_size"])
    chosen = rng.permutation(len(images))[:args.images].tolist()
    tokens = 1 + encoder.grid ** 2
    drawn = torch.from_numpy(rng.random((len(chosen), tokens)) < TOKENS / len(chosen) / tokens)      # [M, T]
    order = [rows.tolist() for rows in torch.tensor(chosen).split(args.batch_size)]

    entering, losses = {}, []      # the tokens that enter each MoE block; the loss router sees the final ones
    inputs, dispatch, combine = ({i: [] for i in routers} for _ in range(3))
    for i in encoder.moe_blocks:
        encoder.blocks[i].register_forward_pre_hook(lambda _, x, i=i: entering.update({i: x[0]}))
    for batch, sample in zip(data.load(views, order, machine), drawn.split(args.batch_size)):
        pixels = batch["image"] / 255
        with machine.autocast():
            entering[last], routing = encoder(data.normalize(pixels))
        if last in routers:
            routing[last] = routers[last].route(entering[last])
        for i in routers:
            inputs[i].append(entering[i].cpu().float()[sample])
            dispatch[i].append(routing[i].dispatch.cpu())
            combine[i].append(routing[i].combine.cpu())
        if head:
            predicted, target = head(entering[last]), teacher(pixels)
            losses.append(token_loss(predicted[:, 1:].float(), target[:, 1:].float()).cpu())
    inputs, dispatch, combine = ({i: torch.cat(x[i]) for i in routers} for x in (inputs, dispatch, combine))

    rows = [{"block": i, "silhouette": silhouette(inputs[i], dispatch[i][drawn].argmax(1)),
             "scale": router.scale.item(), "entropy": dispatch_entropy(dispatch[i]).tolist(),
             "dispatch_cv": variation(dispatch[i][:, 1:]).tolist(),
             "cls_share": dispatch[i][:, 0].mean(0).tolist(), "usage": combine[i].mean((0, 1)).tolist(),
             "shown": most_and_least(combine[i].mean((0, 1)))}
            for i, router in routers.items()]
    weights = dispatch[block][:, 1:] * tokens      # in units of the uniform weight
    numbers = {"checkpoint": str(path), "name": f"{Path(path).resolve().parent.name}/{Path(path).stem}",
               "block": block, "images": len(chosen), "tokens": int(drawn.sum()), "blocks": rows,
               "shown": next(row["shown"] for row in rows if row["block"] == block)}
    pixels = torch.stack([views[i]["image"] for i in chosen[:IMAGES]]) / 255
    tensors = {"pixels": pixels, "weights": weights[:IMAGES]}
    if head:      # of the drawn patches, by weight and by loss
        points = torch.stack([weights[..., 0][drawn[:, 1:]], torch.cat(losses)[drawn[:, 1:]]]).double()
        numbers["correlation"], tensors["points"] = torch.corrcoef(points)[0, 1].item(), points.numpy()
    if hasattr(images, "mask"):      # a patch at least half on the object is foreground
        masks = torch.stack([images.mask(i) for i in chosen]).to(torch.uint8) * 255
        masks = data.center_view(masks, views.image_size) / 255                            # [M, S, S]
        foreground = F.avg_pool2d(masks, encoder.patch_size).flatten(1) >= 0.5             # [M, N]
        numbers["foreground_auc"] = [roc_auc(weight, foreground) for weight in weights.unbind(2)]
    return numbers, tensors


def distillation(checkpoint: dict, encoder: nn.Module, path: str, machine: common.Machine):
    """A pretraining checkpoint's head and teacher, or (None, None) and one line that says why not."""
    name, weight = checkpoint["args"].get("teacher"), checkpoint["model"].get("head.weight")
    try:
        if not name or weight is None:
            raise LoadError("it is not a pretraining checkpoint")
        teacher = build_teacher(name, encoder.grid)
        if checkpoint.get("sources", {}).get("teacher", digest(teacher)) != digest(teacher):
            raise LoadError(f"the weights of {name} have changed")
        teacher.to(machine.device, machine.amp)
    except LoadError as error:
        print(f"{path}: no correlation with the distillation loss: {error}")
        return None, None
    head = nn.Linear(weight.shape[1], weight.shape[0]).to(machine.device)
    head.load_state_dict({"weight": weight, "bias": checkpoint["model"]["head.bias"]})
    return head, teacher


def most_and_least(usage: Tensor) -> list[int]:
    """Experts to show, in their order: all, or the most and least used where there are too many. usage [E]"""
    order, half = usage.argsort(descending=True).tolist(), EXPERTS // 2
    return sorted(order if len(order) <= EXPERTS else order[:half] + order[-half:])


def report(numbers: dict):
    """Prints the numbers, in each row of the experts that are shown of it."""
    def line(values: dict, shown: list[int]) -> str:
        short = {name: np.array(value)[shown] if isinstance(value, list) else value
                 for name, value in values.items() if name != "shown"}
        return "  ".join(f"{name} {np.round(value, 3)}" for name, value in short.items())
    print(f"\n{numbers['checkpoint']}: {numbers['images']} images, {numbers['tokens']} tokens")
    for row in numbers["blocks"]:
        print(line(row, row["shown"]))
    for name in ("correlation", "foreground_auc"):
        if name in numbers:
            print(f"block {numbers['block']}  {line({name: numbers[name]}, numbers['shown'])}")


# ---------------------------------------------------------------------------------------------- pictures

def colored(values: Tensor, low: float, high: float) -> Tensor:
    """values [..., H, W] -> colors [..., 3, H, W] in [0, 1], blue at `low`, red at `high`"""
    at = np.linspace(low, high, len(COLORS))
    channels = np.stack([np.interp(values, at, channel) for channel in zip(*COLORS)], axis=-3)
    return torch.from_numpy(channels).float()


def heatmaps(pixels: Tensor, models: list[tuple[str, Tensor, list[int]]]) -> Image.Image:
    """A row of images, then a row for each model's experts: dispatch weights over the image, red is high.

    pixels [M, 3, S, S] in [0, 1]; of each model its name, weights [M, N, E] in units of the uniform weight,
    and the experts to show. Colors span the 1st to the 99th percentile of a model's weights, as the scale in
    the margin says: a few extreme patches would dull the rest.
    """
    images, scales = F.interpolate(pixels, TILE, mode="bicubic", antialias=True).clamp(0, 1), [None]
    rows, titles = [images], ["image"]
    for name, weights, experts in models:
        low, high = np.quantile(weights[..., experts], (0.01, 0.99))
        grid = math.isqrt(weights.shape[1])
        for expert in experts:
            maps = colored(weights[..., expert].unflatten(1, (grid, grid)), low, high)
            rows.append(0.65 * F.interpolate(maps, TILE) + 0.35 * data.gray(images))
            titles.append(f"{name}\nexpert {expert}\n\n{low:.2f} to {high:.2f}\nx uniform".replace("/", "\n"))
            scales.append(colored(torch.linspace(low, high, MARGIN - 12).expand(8, -1), low, high))
    grid = to_pil_image(make_grid(torch.cat(rows), nrow=len(images), padding=GAP, pad_value=1.0))
    canvas = Image.new("RGB", (MARGIN + grid.width, grid.height), "white")
    canvas.paste(grid, (MARGIN, 0))
    for row, (title, scale) in enumerate(zip(titles, scales)):
        middle = GAP + TILE // 2 + row * (TILE + GAP)
        at = (MARGIN - 4, middle)
        ImageDraw.Draw(canvas).multiline_text(at, title, fill="black", anchor="rm", align="right")
        if scale is not None:
            canvas.paste(to_pil_image(scale), (8, middle))
    return canvas


def draw_figures(models: list[dict], tensors: list[dict], out: Path):
    """blocks.png: silhouette, entropy, variation, [CLS] share over MoE blocks, a line per model and expert.
    correlation.png: expert 0's dispatch weight against the token's loss, with the regression line."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    axes = figure.subplots(1, 4)
    titles = {"entropy": "dispatch entropy (nats)", "dispatch_cv": "coefficient of variation",
              "cls_share": "[CLS] share"}
    for style, numbers in zip(("-o", "--s"), models):
        rows = numbers["blocks"]
        blocks = [row["block"] for row in rows]
        axes[0].plot(blocks, [row["silhouette"] for row in rows], style, color="black")
        axes[0].set(title="silhouette", xlabel="block", xticks=blocks)
        for axis, (name, title) in zip(axes[1:], titles.items()):
            axis.set(title=title, xlabel="block", xticks=blocks)
            for expert in numbers["shown"]:
                having = [row for row in rows if expert < len(row[name])]      # the loss router has two experts
                axis.plot([row["block"] for row in having], [row[name][expert] for row in having], style,
                          label=f"{numbers['name']}, expert {expert}")
    axes[1].legend(fontsize=7)
    figure.savefig(out / "blocks.png", dpi=90)

    shown = [(numbers, each["points"]) for numbers, each in zip(models, tensors) if "points" in each]
    figure = Figure(figsize=(4.6 * len(shown), 3.6), layout="constrained")
    for i, (numbers, (weight, loss)) in enumerate(shown, start=1):
        axis = figure.add_subplot(1, len(shown), i)
        axis.scatter(weight, loss, s=2, alpha=0.25)
        slope, _ = np.polyfit(weight, loss, 1)      # the line goes through the means
        axis.axline((weight.mean(), loss.mean()), slope=slope, color="black", linestyle="--", linewidth=1)
        axis.locator_params(axis="x", nbins=5)      # more ticks would overlap where weights hardly vary
        axis.set(title=f"{numbers['name']}: r = {numbers['correlation']:.3f}", ylabel="token loss",
                 xlabel="expert 0's dispatch weight / uniform weight")
    if shown:
        figure.savefig(out / "correlation.png", dpi=90)


def main(args: argparse.Namespace) -> list[dict]:
    """-> the numbers of routing.json, one dict for each checkpoint"""
    machine, out = common.Machine(args), Path(args.out or Path(args.checkpoints[0]).parent)
    common.make_folder(out)
    models, tensors = zip(*(measure(path, args, machine) for path in args.checkpoints))
    rows = [(numbers["name"], each["weights"], numbers["shown"]) for numbers, each in zip(models, tensors)]
    heatmaps(tensors[0]["pixels"], rows).save(out / "heatmaps.png")
    (out / "routing.json").write_text(json.dumps(plain(models), indent=1) + "\n")
    for numbers in models:
        report(numbers)
    try:
        draw_figures(models, tensors, out)
    except ImportError:
        print("blocks.png and correlation.png need matplotlib: pip install matplotlib")
    print(f"{out}: pictures and routing.json")
    return list(models)


if __name__ == "__main__":
    common.launch(main, parse_args())
