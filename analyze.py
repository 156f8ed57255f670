"""What the router learned: the dispatch weights of whole images, in pictures and numbers.

    python analyze.py runs/coupled/last.pt --data FOLDER_OR_PHOTO
    python analyze.py runs/coupled/last.pt runs/detached/last.pt    # two models side by side
    python analyze.py runs/coupled/epoch_*.pt                       # one run, epoch by epoch

What most runs change: --data (by default, val/ of what the checkpoint was trained on), --images,
--block, --out. It writes
  heatmaps.png     the weight of each patch, over some images (Fig. 1 and A1), and its token loss
  blocks.png       silhouette, entropy, variation and [CLS] share of each block (Fig. A2)
  correlation.png  expert 0's weight of a patch against the patch's token loss (Fig. A3)
  routing.json     all numbers

With one or two checkpoints, the pictures show the first eight experts; with more, they show expert
0, whose dispatch weights weight the token loss unless --loss-weights said otherwise. "silhouette"
says how well tokens are separated by the expert that gives them most weight, from -1 to 1.
"correlation" compares expert 0's weights with the token loss of Eq. 1: losses.token_loss of the
student and its teacher, whatever loss the run trained.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import data
from checkpoints import load_checkpoint, load_encoder, load_student
from common import UserError, non_negative_int, positive_int, rounded
from encoders import FrozenEncoder, build_frozen
from losses import EXPERTS, dispatch_cv, dispatch_entropy, token_loss
from model import ViT, normalize
from plot import plain

SHOWN_IMAGES = 6           # at most, in heatmaps.png
SHOWN_EXPERTS = 8          # at most, in pictures
SHOWN_SIZE = 224           # pixels at least, in heatmaps.png: more than a small student sees
SAMPLED_TOKENS = 10_000      # about as many for the silhouette: distances of all pairs take 400 MB
LEGEND = """In heatmaps.png, red patches have more than the uniform weight, blue ones less.
Expert 0 in the block whose router weights the losses, or in --block:
  dispatch_cv  the standard deviation of its weights over an image's patches, over their mean
  correlation  of a patch's weight with its token loss: negative if costly patches get less weight
  silhouette   how well the experts separate the tokens: 1 well, 0 not at all"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, "CHECKPOINT [CHECKPOINT ...] ")
    parser.set_defaults(
        compile=False,      # which takes longer than a few images
        data=None)
    group = parser.add_argument_group("analysis")
    group.add_argument("checkpoints", nargs="+", type=common.path, metavar="CHECKPOINT",
                       help="models with experts")
    group.add_argument(
        "--images", type=positive_int, default=200,
        help=f"images to measure, drawn by --seed; the first {SHOWN_IMAGES} become pictures")
    group.add_argument(
        "--block", type=non_negative_int,
        help="the MoE block of heatmaps and correlation (default: the last block whose "
             "weights the checkpoint's loss used)")
    group.add_argument("--batch-size", type=positive_int, default=64,
                       help="images of one forward pass")
    group.add_argument(
        "--out", metavar="FOLDER", type=common.path,
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
    features = features - features.mean(0)      # cdist multiplies matrices, which rounds less then
    sums = torch.cdist(features, features) @ member                             # [M, C]
    own = labels[:, None]
    a = sums.gather(1, own)[:, 0] / (sizes[labels] - 1).clamp_min(1)
    b = (sums / sizes).scatter(1, own, math.inf).amin(1)
    s = (b - a) / torch.maximum(a, b).clamp_min(torch.finfo(a.dtype).tiny)
    return s.where(sizes[labels] > 1, 0).mean().item()


def find_teacher(checkpoint: dict, encoder: ViT, process: common.Process
                 ) -> tuple[nn.Module | None, FrozenEncoder | None]:
    """-> (a student's head, the teacher that trained it), or two None, after printing why"""
    try:
        name = checkpoint["args"].get("teacher")
        if not name:
            raise UserError("the file names no teacher")
        teacher = build_frozen(name, encoder.grid).to(process.device, process.amp)
        return load_student(checkpoint).head.to(process.device), teacher
    except UserError as error:
        print(f"{checkpoint['path']}: no correlation with the token loss: {error}")
        return None, None


class Seen(NamedTuple):
    """What an encoder and its teacher make of M images. Models of one image and patch size see the
    same images, and the same tokens are sampled.
    """
    pictures: Tensor                # the first images, uint8 [SHOWN_IMAGES, 3, P, P], for people
    sampled: Tensor                 # bool [M, T], the tokens for silhouette and correlation
    entering: dict[int, Tensor]     # {MoE block: the M' sampled tokens that enter it, [M', D]}
    dispatch: dict[int, Tensor]     # {MoE block: its dispatch weights, [M, T, E]}
    losses: Tensor | None           # the token losses of patches, [M, N]; None without a teacher


@torch.no_grad()
def collect(checkpoint: dict, encoder: ViT, name: str, args, process: common.Process) -> Seen:
    """Lets the encoder and its teacher see images of the set `name`. Raises UserError."""
    size, blocks = encoder.config["image_size"], encoder.moe_blocks
    views = data.CenterViews(data.open_images(name, "val", size, labels=False), size)
    rng = np.random.default_rng(args.seed)
    indices = torch.from_numpy(rng.permutation(len(views))[:args.images])
    sampled = torch.from_numpy(rng.random((len(indices), 1 + encoder.grid ** 2)))
    sampled = (sampled < SAMPLED_TOKENS / sampled.numel()).to(process.device)
    head, teacher = find_teacher(checkpoint, encoder, process)

    entering, dispatch, losses = {i: [] for i in blocks}, {i: [] for i in blocks}, []
    order = [batch.tolist() for batch in indices.split(args.batch_size)]
    batches = data.load(views, order, process, args.workers)
    for batch, chosen in zip(batches, sampled.split(args.batch_size)):
        images = batch["image"] / 255
        with process.autocast():
            x = encoder.embed(normalize(images))
            for i, block in enumerate(encoder.blocks):
                if i in blocks:
                    entering[i].append(x[chosen].float())
                x, routing = block(x)
                if i in blocks:
                    dispatch[i].append(routing.dispatch)
            tokens = encoder.norm(x)
        if teacher:
            pred = head(tokens.float())
            losses.append(token_loss(pred[:, 1:], teacher(images)[:, 1:].float()))
        if not all(output.isfinite().all() for output in (tokens, *losses[-1:])):
            raise UserError(f"{checkpoint['path']}: its tokens or token losses are not finite "
                            f"with --amp {args.amp}")
    entering, dispatch = ({i: torch.cat(parts) for i, parts in each.items()}
                          for each in (entering, dispatch))
    pictures = torch.stack([data.center_view(views.dataset[i][0], max(size, SHOWN_SIZE))
                            for i in indices[:SHOWN_IMAGES].tolist()])
    return Seen(pictures, sampled, entering, dispatch, torch.cat(losses) if teacher else None)


def analyze_checkpoint(path: str, name: str | None, args, process: common.Process) -> dict:
    """Measures one checkpoint on the set `name`, or on its own set -> what is written and drawn.
    Raises UserError.

    numbers: for routing.json
    images: uint8 [SHOWN_IMAGES, 3, P, P]
    weights: the dispatch weights of the images' patches in the block of the pictures,
        [SHOWN_IMAGES, N, E], where 1 is uniform
    labels: the name of each expert, and the loss that it weighted
    losses: the patches' token losses, [SHOWN_IMAGES, N], or None without a teacher
    points: expert 0's weight and the token loss of sampled patches, [2, M'], or None without a
        teacher
    """
    checkpoint = load_checkpoint(path)
    name = name or data.recorded_or_default(checkpoint["args"].get("data"))
    encoder = load_encoder(checkpoint).to(process.device).eval()
    blocks = encoder.moe_blocks
    if not blocks:
        raise UserError(f"{path} has no experts")
    block = args.block
    if block is None:
        block = max(checkpoint["args"].get("loss_block") or blocks)
    if block not in blocks:
        raise UserError(f"--block {block}: the MoE blocks of {path} are {blocks}")
    if args.compile:
        encoder.compile_blocks()
    seen = collect(checkpoint, encoder, name, args, process)

    # The numbers of each block; lists have one for each expert.
    file = Path(path).resolve()
    numbers = {"checkpoint": path, "name": f"{file.parent.name}/{file.stem}", "data": name,
               "block": block,
               "loss_weights": checkpoint["args"].get("loss_weights", "dispatch"),
               "images": len(seen.sampled), "blocks": []}
    for i, weights in seen.dispatch.items():
        expert = weights[seen.sampled].argmax(1)
        numbers["blocks"].append({
            "block": i, "silhouette": silhouette(seen.entering[i], expert),
            "scale": encoder.blocks[i].mlp.router.scale.item(),
            "entropy": dispatch_entropy(weights).tolist(),
            "dispatch_cv": dispatch_cv(weights[:, 1:]).tolist(),
            "cls_share": weights[:, 0].mean(0).tolist()})

    # the router of this block, on patches, which have losses
    patches = seen.sampled[:, 1:]
    weights = seen.dispatch[block][:, 1:] * seen.sampled.shape[1]                   # [M, N, E]
    points = None
    if seen.losses is not None:
        points = torch.stack([weights[..., 0][patches], seen.losses[patches]]).double()
        numbers["correlation"] = torch.corrcoef(points)[0, 1].item()
        points = points.cpu().numpy()
    losses = None if seen.losses is None else seen.losses[:SHOWN_IMAGES].clone().cpu()
    # cloned, because a slice alone would keep the weights of all images in memory
    return dict(numbers=numbers, images=seen.pictures, losses=losses,
                labels=expert_labels(checkpoint["args"], weights.shape[2]),
                weights=weights[:SHOWN_IMAGES].clone().cpu(), points=points)


def expert_labels(args: dict, experts: int) -> list[str]:
    """Names each expert with the loss that its weights multiplied in a run with the flags `args`.
    Checkpoints of other programs do not say which loss.
    """
    if "objective" not in args:
        return [f"expert {expert}" for expert in range(experts)]
    weighted = {EXPERTS["token"]: "token loss"}
    if "pixel" in args["objective"] and args["encoding"] == "dense":
        weighted[EXPERTS["pixel"]] = "pixel loss"
    if args["loss_weights"] == "uniform":
        weighted = {}
    return [f"expert {expert} ({weighted.get(expert, 'no loss')})" for expert in range(experts)]


def with_block(numbers: dict) -> dict:
    """The numbers of a checkpoint, with the numbers of the pictures' block among them"""
    row, = (row for row in numbers["blocks"] if row["block"] == numbers["block"])
    return numbers | row


def report(numbers: dict):
    """Prints a line: what one checkpoint's expert 0 does in the pictures' block."""
    found = with_block(numbers)
    said = [f"{name} {np.ravel(found[name])[0]:.3f}" for name in (
        "dispatch_cv", "correlation", "silhouette") if name in found]
    print(f"{numbers['checkpoint']}, block {numbers['block']}{other_weights(numbers)}: "
          f"{', '.join(said)}")


def other_weights(numbers: dict) -> str:
    """Words for a title, if the run's loss had other weights than the dispatch weights"""
    kind = numbers["loss_weights"]
    return "" if kind == "dispatch" else f" (the loss had {kind} weights)"


# ----------------------------------------------------------------------------- pictures

class Row(NamedTuple):
    """A row of heatmaps, with a value for each patch of each image"""
    title: str              # above the row; may be empty
    label: str              # on its left
    values: np.ndarray      # [M, N]
    style: dict             # arguments of matplotlib's imshow


def draw_heatmaps(models: list[dict], experts: int, path: Path):
    """A row of images, a row for each expert of each model with its weights over the images, and a
    row with the patches' token losses of the last model that has a teacher. A single image stands
    beside its heatmaps.

    Red patches have more than the uniform weight, blue ones less.
    """
    images = models[0]["images"].permute(0, 2, 3, 1).numpy()                        # [M, P, P, 3]
    rows = weight_rows(models, experts)
    taught = [model for model in models if model["losses"] is not None]
    rows += map(loss_row, taught[-1:])

    figure, axes = image_axes(1 + len(rows), len(images))
    for axis, image in zip(axes[0], images):
        axis.imshow(image)
    drawn = [draw_row(line, images, row) for line, row in zip(axes[1:], rows)]
    bar = figure.colorbar(drawn[0], ax=axes if len(images) == 1 else axes[1:],
                          label="weight / uniform weight", shrink=0.5)
    bar.ax.locator_params(axis="y", nbins=5)
    figure.savefig(path, dpi=90)


def weight_rows(models: list[dict], experts: int) -> list[Row]:
    """A row for each of the first `experts` experts of each model

    All rows have one scale of colors, so that weights which hardly vary are pale beside others. It
    leaves out the 1 % of the patches whose weights are furthest from uniform, because few of them
    would make all others pale. It reaches at least 10 % up and down, so that rows may all be pale.
    """
    from matplotlib.colors import TwoSlopeNorm
    weights = [model["weights"][..., :experts].numpy() for model in models]         # [M, N, E]
    far = np.concatenate([abs(each - 1).ravel() for each in weights])
    half = max(0.1, np.quantile(far, 0.99))
    style = dict(cmap="coolwarm", norm=TwoSlopeNorm(1, max(0.0, 1 - half), 1 + half), alpha=0.65)
    rows = []
    for model, each in zip(models, weights):
        title = (f"{model['numbers']['name']}: dispatch weights from {each.min():.2f} to "
                 f"{each.max():.2f}{other_weights(model['numbers'])}")
        for expert in range(each.shape[2]):
            rows.append(Row(title, model["labels"][expert], each[..., expert], style))
            title = ""      # it stands above a model's first row
    return rows


def loss_row(model: dict) -> Row:
    """The row of a model's token losses; the highest 1 % have one color."""
    losses = model["losses"].numpy()                                                # [M, N]
    title = (f"token loss of {model['numbers']['name']} from {losses.min():.2f} to "
             f"{losses.max():.2f}")
    return Row(title, "token loss", losses, dict(cmap="viridis", vmax=np.quantile(losses, 0.99)))


def image_axes(rows: int, columns: int):
    """-> a figure, and its axes [rows, columns] for images. A single column lies on its side."""
    from matplotlib.figure import Figure
    options = dict(squeeze=False, subplot_kw=dict(xticks=[], yticks=[]))
    if columns == 1:
        figure = Figure(figsize=(3 * rows + 1, 3.6), layout="constrained")
        return figure, figure.subplots(1, rows, **options).T
    size = max(4.5, 1.3 * columns + 1.2), 1.35 * rows
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def draw_row(axes, images: np.ndarray, row: Row):
    """Draws a row's values over pale images -> what matplotlib drew last"""
    axes[0].set_ylabel(row.label.replace(" (", "\n("))      # else, rows overlap
    axes[(len(images) - 1) // 2].set_title(plain(row.title), fontsize="medium", wrap=True)
    side = math.isqrt(row.values.shape[1])
    for axis, image, values in zip(axes, images, row.values):
        height, width, _ = image.shape
        axis.imshow(image.mean(-1), cmap="gray", vmin=-255, vmax=255)      # pale
        drawn = axis.imshow(values.reshape(side, side), extent=(0, width, height, 0), **row.style)
    return drawn


def draw_blocks(models: list[dict], experts: int, path: Path):
    """Silhouette, entropy, variation and [CLS] share over blocks, a line for each expert. A dotted
    line has the value of uniform weights or, for the silhouette, of tokens that are not separated.

    Experts differ by color, and the second of two models is dashed. More than two models differ
    by color, from dark to light in the order given.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    tokens = 1 + models[0]["weights"].shape[1]
    panels = {      # title, what the axis says, and where the dotted line is
        "silhouette": ("silhouette of tokens by expert", "1: separated, 0: mixed", 0),
        "entropy": ("entropy of dispatch weights", "nats, at most ln(tokens)", math.log(tokens)),
        "dispatch_cv": ("variation over patches", "standard deviation / mean", 0),
        "cls_share": ("dispatch weight of [CLS]", "share, 1 / tokens if uniform", 1 / tokens)}
    blocks = sorted({row["block"] for model in models for row in model["numbers"]["blocks"]})
    several = len(models) > 2
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(models)))
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (name, (title, unit, uniform)) in zip(axes, panels.items()):
        axis.axhline(uniform, color="gray", linestyle=":")
        axis.ticklabel_format(useOffset=False)
        axis.set(xlabel="Soft-MoE block", xticks=blocks, ylabel=unit)
        axis.set_title(title, fontsize="medium")
        for i, model in enumerate(models):
            rows = model["numbers"]["blocks"]
            values = np.array([np.atleast_1d(row[name]) for row in rows])      # [blocks, E or 1]
            for expert, line in enumerate(values.T[:experts]):
                color = f"C{expert}"
                if several:
                    color = shades[i]
                elif name == "silhouette":      # one value for all experts together
                    color = "black"
                axis.plot([row["block"] for row in rows], line,
                          "--s" if i == 1 and not several else "-o", color=color,
                          label=plain(f"{model['numbers']['name']}, expert {expert}"))
    lines = axes[1].lines[1:]      # without the dotted one
    figure.legend(handles=lines, loc="outside right center", ncols=math.ceil(len(lines) / 16),
                  fontsize=8)
    figure.savefig(path, dpi=90)


def draw_correlation(models: list[dict], path: Path):
    """The token loss of patches over expert 0's weight, with the regression line.

    Each title has the correlation, and the weights' coefficient of variation beside it: also the
    weights of a router that does nothing correlate with the loss.
    """
    from matplotlib.figure import Figure
    columns = min(3, len(models))      # as wide as blocks.png
    rows = math.ceil(len(models) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    for i, model in enumerate(models, start=1):
        weight, loss = model["points"]
        axis = figure.add_subplot(rows, columns, i)
        axis.scatter(weight, loss, s=2, alpha=0.25)
        slope, _ = np.polyfit(weight, loss, 1)      # the line goes through the means
        axis.axline((weight.mean(), loss.mean()), slope=slope, color="black", linestyle="--",
                    linewidth=1)
        axis.locator_params(axis="x", nbins=5)      # more labels, such as 1.0005, would overlap
        found = with_block(model["numbers"])
        title = "{name}: r = {correlation:.2f}, cv {dispatch_cv[0]:.2g}".format(**found)
        axis.set(title=plain(title), xlabel="expert 0's dispatch weight / uniform weight",
                 ylabel="token loss (Eq. 1)")
    figure.savefig(path, dpi=90)


def main(args) -> list[dict]:
    """-> the numbers of routing.json, one dict for each checkpoint"""
    import matplotlib  # noqa: F401, before the work: it may not be installed
    process = common.Process(args)
    out = Path(args.out or Path(args.checkpoints[0]).parent)
    out.mkdir(parents=True, exist_ok=True)
    open(out / "routing.json", "a").close()      # before the work: one may not write there
    models, name = [], args.data
    print(LEGEND)
    for path in args.checkpoints:
        models.append(analyze_checkpoint(path, name, args, process))      # one at a time in memory
        name = models[0]["numbers"]["data"]      # all see the first one's set
        report(models[-1]["numbers"])
    numbers = [model["numbers"] for model in models]
    (out / "routing.json").write_text(json.dumps(rounded(numbers), indent=1) + "\n")
    experts = SHOWN_EXPERTS if len(models) <= 2 else 1
    draw_heatmaps(models, experts, out / "heatmaps.png")
    draw_blocks(models, experts, out / "blocks.png")
    written = ["heatmaps.png", "blocks.png", "routing.json"]
    known = [model for model in models if model["points"] is not None]
    if known:
        draw_correlation(known, out / "correlation.png")
        written.append("correlation.png")
    print(f"{out}: {', '.join(written)}")
    return numbers


if __name__ == "__main__":
    common.launch(main, parse_args())
