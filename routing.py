"""What the router learned: the dispatch weights of whole images, in pictures and numbers.

    python routing.py runs/coupled/last.pt --data FOLDER_OR_PHOTO
    python routing.py runs/coupled/last.pt runs/detached/last.pt    # two models side by side
    python routing.py runs/coupled/epoch_*.pt                       # one run, epoch by epoch

It writes
  heatmaps.png     the weight of each patch, over some images (Fig. 1 and A1)
  blocks.png       silhouette, entropy, variation and [CLS] share of each block (Fig. A2)
  correlation.png  expert 0's weight of a patch against the patch's token loss (Fig. A3)
  routing.json     all numbers

Of one or two checkpoints, the pictures show the first eight experts. Of more, they show expert 0,
whose weights are those of the token loss. "silhouette" says how well tokens are separated by the
expert that gives them most weight, from -1 to 1; "usage" is an expert's mean combine weight; and
"correlation" is that of expert 0's weights and the token loss. If the data set has object masks,
"foreground_auc" is the area under the ROC curve of an expert's weights as a score for patches on
the object: 1 if all of them weigh more than the background, 0.5 by chance.
"""

import json
import math
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2.functional import rgb_to_grayscale, to_pil_image
from torchvision.utils import make_grid

import common
import data
from checkpoint import LoadError, digest_input, load_checkpoint, load_encoder
from common import non_negative_int, number, positive_int
from losses import dispatch_entropy, token_loss, variation
from model import Explore, Router, Routing, ViT
from run import rounded
from teacher import Teacher, build_teacher

# five colors of Moreland's cool-warm map, from low to high: blue, gray, red
COLORS = ((0.23, 0.30, 0.75), (0.55, 0.69, 1.00), (0.87, 0.87, 0.87), (0.96, 0.60, 0.48),
          (0.71, 0.02, 0.15))
IMAGES = 6                            # at most, in heatmaps.png
EXPERTS = 8                           # at most, in pictures and in print
TILE, GAP, MARGIN = 112, 4, 84        # in heatmaps.png, in pixels
TOKENS = 10_000      # about as many for the silhouette: distances of all pairs take 400 MB


def parse_args(argv: list[str] | None = None):
    parser = common.make_parser(__doc__)
    group = parser.add_argument_group("routing")
    group.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="models with experts")
    group.add_argument(
        "--images", type=positive_int, default=200,
        help=f"images to measure, drawn by --seed; the first {IMAGES} become pictures")
    group.add_argument(
        "--block", type=non_negative_int,
        help="the MoE block of heatmaps, correlation and foreground (default: the last block whose "
             "weights the checkpoint's loss used)")
    group.add_argument("--batch-size", type=positive_int, default=64,
                       help="images of one forward pass")
    group.add_argument("--seed", type=number(int, "[0, 4294967296)"), default=42,
                       help="draws the images")
    group.add_argument(
        "--out", metavar="FOLDER",
        help="where pictures and routing.json go (default: the folder of the first checkpoint)")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------ numbers

def silhouette(features: Tensor, labels: Tensor) -> float:
    """The mean silhouette coefficient: features [M, D], labels [M] -> -1 to 1

    The coefficient of a point is (b - a) / max(a, b), where a is its mean Euclidean distance to
    the other points of its cluster, and b the smallest mean distance to the points of another
    cluster. A point that is alone in its cluster has 0, and so have all points of one cluster.
    """
    _, labels = labels.unique(return_inverse=True)
    member = F.one_hot(labels).to(features.dtype)                               # [M, C]
    sizes = member.sum(0)
    if len(sizes) < 2:
        return 0.0
    exact = "donot_use_mm_for_euclid_dist"
    sums = torch.cdist(features, features, compute_mode=exact) @ member         # [M, C]
    own = labels[:, None]
    a = sums.gather(1, own)[:, 0] / (sizes[labels] - 1).clamp_min(1)
    b = (sums / sizes).scatter(1, own, math.inf).amin(1)
    s = (b - a) / torch.maximum(a, b).clamp_min(torch.finfo(a.dtype).tiny)
    return s.where(sizes[labels] > 1, 0).mean().item()


def roc_auc(score: Tensor, positive: Tensor) -> float:
    """The area under the ROC curve: score [M], positive bool [M] -> 0 to 1

    It is the share of pairs of a positive and a negative in which the positive has the higher
    score. A tie counts half. Without a positive or without a negative, it is NaN.
    """
    inside = score[positive]
    outside = score[~positive].sort().values
    below = torch.searchsorted(outside, inside)
    below = below + torch.searchsorted(outside, inside, right=True)
    return (below.double().mean() / (2 * len(outside))).item()


# ------------------------------------------------- one checkpoint: load, observe, summarize

class Sample(NamedTuple):
    """The M images that are measured, and what is known of their patches."""
    views: data.CenterViews
    indices: list[int]              # [M]: positions of the images in `views`
    drawn: Tensor                   # bool [M, T]: tokens for silhouette and correlation
    foreground: Tensor | None       # bool [M, N]: patches on the object, if there are masks


class Trace(NamedTuple):
    """What one block makes of the M images."""
    tokens: Tensor                  # [M', D]: the drawn tokens as they enter the block
    dispatch: Tensor                # [M, T, E]
    combine: Tensor                 # [M, T, E]


def measure(path: str, args, machine: common.Machine) -> tuple[dict, dict]:
    """One checkpoint -> (numbers for routing.json, tensors for the pictures)

    The model is not returned, so only one at a time is in memory.
    """
    student, routers, block, teacher = load(path, args, machine)
    sample = draw_sample(student.encoder, args)
    traces, losses = observe(student, routers, teacher, sample, args.batch_size, machine)
    return summarize(path, block, routers, sample, traces, losses)


def load(path: str, args, machine: common.Machine
         ) -> tuple[Explore, dict[int, Router], int, Teacher | None]:
    """-> (student, its routers by block number, the block to show, the student's teacher or None)

    The loss router, which follows the last block, has the number of blocks as its number.
    """
    checkpoint = load_checkpoint(path)
    student = load_student(checkpoint).to(machine.device)
    encoder = student.encoder
    routers = {i: encoder.blocks[i].mlp for i in encoder.moe_blocks}
    if student.loss_router:
        routers[len(encoder.blocks)] = student.loss_router
    if not routers:
        raise common.UserError(f"{path} has no experts: there is no routing to show")
    block = args.block
    if block is None:
        block = max(checkpoint["args"].get("loss_block") or routers)
    if block not in routers:
        raise common.UserError(f"--block {block} has no experts: the MoE blocks are "
                               f"{' '.join(map(str, routers))}")
    teacher = find_teacher(checkpoint, encoder.grid)
    if teacher:
        teacher.to(machine.device, machine.amp)
    return student, routers, block, teacher


def load_student(checkpoint: dict) -> Explore:
    """The student of a pretraining checkpoint, or a new one around another stage's encoder."""
    encoder = load_encoder(checkpoint)
    state = checkpoint["model"]
    # only its size matters without a teacher, because then it is not used
    head = state.get("head.weight", torch.empty(1, encoder.dim))
    student = Explore(encoder, len(head), loss_router="loss_router.phi" in state)
    student.load_state_dict(state, strict=False)      # without mask token and pixel decoder
    return student.eval()


def find_teacher(checkpoint: dict, grid: int) -> Teacher | None:
    """The teacher that trained a student, or None, after printing why there is none."""
    name = checkpoint["args"].get("teacher")
    try:
        if not name:
            raise LoadError("it is not a pretraining checkpoint")
        teacher = build_teacher(name, grid)
        if checkpoint["inputs"]["teacher"] != digest_input(name):
            raise LoadError(f"the contents of {name} have changed since the training")
        return teacher
    except LoadError as error:
        print(f"{checkpoint['path']}: no correlation with the distillation loss: {error}")
        return None


def draw_sample(encoder: ViT, args) -> Sample:
    """Draws images and tokens: the same ones for all encoders of one image and patch size."""
    size = encoder.config["image_size"]
    dataset = data.open_images(args.data, "val", size, labels=False)
    rng = np.random.default_rng(args.seed)
    indices = rng.permutation(len(dataset))[:args.images].tolist()
    drawn = torch.from_numpy(rng.random((len(indices), 1 + encoder.grid ** 2)))
    drawn = drawn < TOKENS / drawn.numel()
    foreground = None
    if hasattr(dataset, "mask"):      # at least half of a foreground patch is on the object
        masks = torch.stack([dataset.mask(i) for i in indices]).to(torch.uint8) * 255
        masks = data.center_view(masks, size) / 255                                  # [M, S, S]
        foreground = F.avg_pool2d(masks, encoder.patch_size).flatten(1) >= 0.5
    return Sample(data.CenterViews(dataset, size), indices, drawn, foreground)


@torch.no_grad()
def observe(student: Explore, routers: dict[int, Router], teacher: Teacher | None,
            sample: Sample, batch_size: int, machine: common.Machine
            ) -> tuple[dict[int, Trace], Tensor | None]:
    """-> (what each block with a router does, token losses [M, N] or None without a teacher)"""
    parts = {i: [] for i in routers}
    losses = []
    order = [indices.tolist() for indices in torch.tensor(sample.indices).split(batch_size)]
    batches = data.load(sample.views, order, machine)
    for batch, drawn in zip(batches, sample.drawn.split(batch_size)):
        images = batch["image"] / 255
        with machine.autocast():
            tokens, entering, routing = encode(student, images)
        for i in routers:
            entered = entering[i].cpu().float()[drawn]
            parts[i].append((entered, routing[i].dispatch.cpu(), routing[i].combine.cpu()))
        if teacher:
            predicted = student.head(tokens)[:, 1:].float()
            losses.append(token_loss(predicted, teacher(images)[:, 1:].float()).cpu())
    traces = {i: Trace(*map(torch.cat, zip(*part))) for i, part in parts.items()}
    return traces, torch.cat(losses) if losses else None


def encode(student: Explore, images: Tensor
           ) -> tuple[Tensor, dict[int, Tensor], dict[int, Routing]]:
    """Images in [0, 1] -> (final tokens, tokens entering each block, routing of each block)

    The loss router's entering tokens are the final ones.
    """
    encoder = student.encoder
    x = encoder.embed(data.normalize(images))
    entering = {}
    routing = {}
    for i, block in enumerate(encoder.blocks):
        entering[i] = x
        x, routing[i] = block(x)
    tokens = encoder.norm(x)
    if student.loss_router:
        entering[len(encoder.blocks)] = tokens
        routing[len(encoder.blocks)] = student.loss_router.route(tokens)
    return tokens, entering, routing


def summarize(path: str, block: int, routers: dict[int, Router], sample: Sample,
              traces: dict[int, Trace], losses: Tensor | None) -> tuple[dict, dict]:
    """-> (numbers for routing.json, tensors for the pictures)"""
    images, tokens = sample.drawn.shape
    weights = traces[block].dispatch[:, 1:] * tokens      # 1 is the uniform weight
    rows = [{"block": i} | describe(router, traces[i], sample.drawn)
            for i, router in routers.items()]
    numbers = {"checkpoint": str(path), "block": block, "images": images,
               "name": f"{Path(path).resolve().parent.name}/{Path(path).stem}",
               "tokens": int(sample.drawn.sum()), "blocks": rows}
    views = [sample.views[i]["image"] for i in sample.indices[:IMAGES]]
    # cloned, because a slice alone would keep the weights of all images in memory
    tensors = {"images": torch.stack(views), "weights": weights[:IMAGES].clone()}
    if losses is not None:
        drawn = sample.drawn[:, 1:]      # without [CLS], which has no token loss
        points = torch.stack([weights[..., 0][drawn], losses[drawn]]).double()
        numbers["correlation"] = torch.corrcoef(points)[0, 1].item()
        tensors["points"] = points.numpy()
    if sample.foreground is not None:
        numbers["foreground_auc"] = [roc_auc(weight, sample.foreground)
                                     for weight in weights.unbind(2)]
    return numbers, tensors


def describe(router: Router, trace: Trace, drawn: Tensor) -> dict:
    """A block's numbers in routing.json. Its lists have one number for each expert."""
    dispatch = trace.dispatch
    return {"silhouette": silhouette(trace.tokens, dispatch[drawn].argmax(1)),
            "scale": router.scale.item(), "entropy": dispatch_entropy(dispatch).tolist(),
            "dispatch_cv": variation(dispatch[:, 1:]).tolist(),
            "cls_share": dispatch[:, 0].mean(0).tolist(),
            "usage": trace.combine.mean((0, 1)).tolist()}


def report(numbers: dict):
    """Prints the numbers of the first experts, one line for each block."""
    print(f"\n{numbers['checkpoint']}: {numbers['images']} images, {numbers['tokens']} tokens")
    of_block = {name: numbers[name] for name in ("block", "correlation", "foreground_auc")
                if name in numbers}
    for row in (*numbers["blocks"], of_block):
        print("  ".join(
            f"{name} {np.round(value[:EXPERTS] if isinstance(value, list) else value, 3)}"
            for name, value in row.items()))


# ----------------------------------------------------------------------------- pictures

def name_models(paths: list[str]) -> list[str]:
    """Titles such as "demo/epoch 4", or "epoch 4" if all of several files are in one folder."""
    files = [Path(path).resolve() for path in paths]
    one_folder = len(files) > 1 and len({file.parent for file in files}) == 1
    titles = []
    for file in files:
        title = re.sub(r"^epoch_0*(?=\d)", "epoch ", file.stem)
        folder = file.parent.name
        if len(folder) > 26:      # two lines in the margin of heatmaps.png
            folder = f"{folder[:10]}...{folder[-13:]}"
        titles.append(title if one_folder else f"{folder}/{title}")
    return titles


def colored(values: Tensor, low: float, high: float) -> Tensor:
    """values [..., H, W] -> colors [..., 3, H, W] in [0, 1], blue at `low`, red at `high`"""
    at = np.linspace(low, high, len(COLORS))
    channels = [np.interp(values, at, channel) for channel in zip(*COLORS)]
    return torch.from_numpy(np.stack(channels, axis=-3)).float()


def heatmaps(images: Tensor, models: list[tuple[str, Tensor]]) -> Image.Image:
    """A row of images, then a row for each expert of each model: its weights over the images.

    images [M, 3, S, S] in [0, 1]; of each model its title and its weights [M, N, E], where 1 is
    the uniform weight. Each model has a color scale of its own, shown in the margin. It spans the
    1st to the 99th percentile of the weights, because a few extreme patches would otherwise leave
    hardly any difference between the others.
    """
    images = F.interpolate(images, TILE, mode="bicubic", antialias=True).clamp(0, 1)
    rows = [images]
    labels = [row_label(["image"])]
    for title, weights in models:
        low, high = np.quantile(weights, (0.01, 0.99))
        side = math.isqrt(weights.shape[1])
        for expert, weight in enumerate(weights.unbind(2)):
            maps = colored(weight.unflatten(1, (side, side)), low, high)
            rows.append(0.65 * F.interpolate(maps, TILE) + 0.35 * rgb_to_grayscale(images))
            name = [line for part in title.split("/") for line in textwrap.wrap(part, 13)]
            labels.append(row_label([*name, f"expert {expert}"], low, high))
    tiles = make_grid(torch.cat(rows), nrow=len(images), padding=GAP, pad_value=1.0)
    canvas = Image.new("RGB", (MARGIN + tiles.shape[2], tiles.shape[1]), "white")
    canvas.paste(to_pil_image(tiles), (MARGIN, 0))
    for row, label in enumerate(labels):
        canvas.paste(label, (0, GAP + row * (TILE + GAP)))
    return canvas


def row_label(title: list[str], low: float | None = None, high: float | None = None
              ) -> Image.Image:
    """What is in the margin beside a row: the lines of its title and its color scale."""
    label = Image.new("RGB", (MARGIN, TILE), "white")
    draw = ImageDraw.Draw(label)
    right = MARGIN - 4
    middle = TILE // 2
    draw.multiline_text((right, middle - 3), "\n".join(title), "black", anchor="rd",
                        align="right")
    if low is not None:
        scale = colored(torch.linspace(low, high, right - 8).expand(8, -1), low, high)
        label.paste(to_pil_image(scale), (8, middle))
        span = f"{low:.2f} to {high:.2f}\nx uniform"
        draw.multiline_text((right, middle + 10), span, "black", anchor="ra", align="right")
    return label


def draw_blocks(models: list[dict], titles: list[str], experts: int, path: Path):
    """Silhouette, entropy, variation and [CLS] share over blocks, a line for each expert.

    Experts differ by color, and the second of two models is dashed. More than two models differ
    by color, from dark to light in the order given.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    panels = {"silhouette": "silhouette", "entropy": "dispatch entropy (nats)",
              "dispatch_cv": "coefficient of variation", "cls_share": "[CLS] share"}
    several = len(models) > 2
    blocks = sorted({row["block"] for numbers in models for row in numbers["blocks"]})
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(models)))
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (name, panel) in zip(axes, panels.items()):
        axis.set(title=panel, xlabel="block", xticks=blocks)
        for i, (numbers, title) in enumerate(zip(models, titles)):
            style = "--s" if i == 1 and not several else "-o"
            for expert, points in enumerate(lines_over_blocks(numbers["blocks"], name, experts)):
                color = f"C{expert}"
                if several:
                    color = shades[i]
                elif name == "silhouette":      # one value for all experts together
                    color = "black"
                axis.plot(*np.transpose(points), style, color=color,
                          label=f"{title}, expert {expert}")
    lines = axes[1].lines
    figure.legend(handles=lines, loc="outside right center", ncols=math.ceil(len(lines) / 16),
                  fontsize=8)
    figure.savefig(path, dpi=90)


def lines_over_blocks(rows: list[dict], name: str, experts: int) -> list[list[tuple]]:
    """Rows of routing.json -> of each of the first experts, its points (block, value)

    A loss router and a block may have different numbers of experts.
    """
    values = [np.atleast_1d(row[name]) for row in rows]
    most = max(len(value) for value in values)
    return [[(row["block"], value[expert]) for row, value in zip(rows, values)
             if expert < len(value)] for expert in range(min(experts, most))]


def draw_correlation(models: list[tuple[dict, str, np.ndarray]], path: Path):
    """The token loss of patches over expert 0's weight, with the regression line.

    Of each model: its numbers, its title, and the weights and losses, [2, M'].
    """
    from matplotlib.figure import Figure
    columns = min(3, len(models))      # as wide as blocks.png
    rows = math.ceil(len(models) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    for i, (numbers, title, (weight, loss)) in enumerate(models, start=1):
        axis = figure.add_subplot(rows, columns, i)
        axis.scatter(weight, loss, s=2, alpha=0.25)
        slope, _ = np.polyfit(weight, loss, 1)      # the line goes through the means
        axis.axline((weight.mean(), loss.mean()), slope=slope, color="black", linestyle="--",
                    linewidth=1)
        axis.locator_params(axis="x", nbins=5)      # more labels, such as 1.0005, would overlap
        axis.set(title=f"{title}: r = {numbers['correlation']:.3f}",
                 xlabel="expert 0's dispatch weight / uniform weight", ylabel="token loss")
    figure.savefig(path, dpi=90)


def main(args) -> list[dict]:
    """-> the numbers of routing.json, one dict for each checkpoint"""
    machine = common.Machine(args)
    out = Path(args.out or Path(args.checkpoints[0]).parent)
    out.mkdir(parents=True, exist_ok=True)
    models, tensors = zip(*(measure(path, args, machine) for path in args.checkpoints))
    (out / "routing.json").write_text(json.dumps(rounded(models), indent=1) + "\n")
    for numbers in models:
        report(numbers)

    titles = name_models(args.checkpoints)
    experts = EXPERTS if len(models) <= 2 else 1
    weights = [each["weights"][..., :experts] for each in tensors]
    heatmaps(tensors[0]["images"] / 255, list(zip(titles, weights))).save(out / "heatmaps.png")
    try:
        draw_blocks(models, titles, experts, out / "blocks.png")
        points = [(numbers, title, each["points"])
                  for numbers, title, each in zip(models, titles, tensors) if "points" in each]
        if points:
            draw_correlation(points, out / "correlation.png")
    except ImportError:
        print("blocks.png and correlation.png need matplotlib: pip install matplotlib")
    print(f"{out}: pictures and routing.json")
    return list(models)


if __name__ == "__main__":
    common.launch(main, parse_args())
