"""What the router learned: the dispatch weights of whole images, in pictures and numbers.

    python analyze.py runs/coupled/last.pt --data FOLDER_OR_PHOTO
    python analyze.py runs/coupled/last.pt runs/detached/last.pt    # two models side by side
    python analyze.py runs/coupled/epoch_*.pt                       # one run, epoch by epoch

What most runs change: --data (by default, val/ of what the checkpoint was trained on), --images,
--block, --out. It writes
  heatmaps.png     the weight of each patch, over some images (Fig. 1 and A1)
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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import data
from common import UserError, non_negative_int, positive_int, rounded
from encoders import FrozenEncoder, build_frozen, load_checkpoint, load_encoder, load_student
from losses import dispatch_cv, dispatch_entropy, token_loss
from model import ViT, normalize
from plot import plain

IMAGES = 6           # at most, in heatmaps.png
EXPERTS = 8          # at most, in pictures
TOKENS = 10_000      # about as many for the silhouette: distances of all pairs take 400 MB
LEGEND = """Expert 0 in the block whose router weights the losses, or in --block:
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
        help=f"images to measure, drawn by --seed; the first {IMAGES} become pictures")
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
            raise UserError("no teacher trained it")
        teacher = build_frozen(name, encoder.grid).to(process.device, process.amp)
        return load_student(checkpoint).head.to(process.device), teacher
    except UserError as error:
        print(f"{checkpoint['path']}: no correlation with the token loss: {error}")
        return None, None


@torch.no_grad()
def collect(checkpoint: dict, encoder: ViT, args, process: common.Process) -> tuple:
    """Lets the encoder and its teacher see M images, in batches -> what they make of them

    pictures: uint8 [IMAGES, 3, S, S], the first. sampled: bool [M, T], where M' tokens are
    sampled; images and these are the same for all models of one image and patch size. entering:
    {MoE block: the sampled tokens that enter it, [M', D]}. dispatch: {MoE block: its weights
    [M, T, E]}. losses: the token losses of patches, [M, N], or None without a teacher.
    Raises UserError.
    """
    size, blocks = encoder.config["image_size"], encoder.moe_blocks
    images = args.data or data.trained_on(checkpoint)
    views = data.CenterViews(data.open_images(images, "val", size, labels=False), size)
    rng = np.random.default_rng(args.seed)
    indices = torch.from_numpy(rng.permutation(len(views))[:args.images])
    sampled = torch.from_numpy(rng.random((len(indices), 1 + encoder.grid ** 2)))
    sampled = (sampled < TOKENS / sampled.numel()).to(process.device)
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
    pictures = torch.stack([views[i]["image"] for i in indices[:IMAGES].tolist()])
    return pictures, sampled, entering, dispatch, torch.cat(losses) if teacher else None


def measure(path: str, args, process: common.Process) -> dict:
    """Measures one checkpoint -> what is written and drawn of it. Raises UserError.

    numbers: for routing.json. images: uint8 [IMAGES, 3, S, S]. weights: the dispatch weights of
    their patches in the block that is shown, [IMAGES, N, E], where 1 is uniform. points: expert
    0's weight and the token loss of sampled patches, [2, M'], or None without a teacher.
    """
    checkpoint = load_checkpoint(path)
    encoder = load_encoder(checkpoint).to(process.device).eval()
    blocks = encoder.moe_blocks
    if not blocks:
        raise UserError(f"{path} has no experts")
    shown = args.block
    if shown is None:
        shown = max(checkpoint["args"].get("loss_block") or blocks)
    if shown not in blocks:
        raise UserError(f"--block {shown}: the MoE blocks of {path} are {blocks}")
    if args.compile:
        encoder.compile_blocks()
    pictures, sampled, entering, dispatch, losses = collect(checkpoint, encoder, args, process)

    # The numbers of each block; lists have one for each expert.
    file = Path(path).resolve()
    numbers = {"checkpoint": path, "name": f"{file.parent.name}/{file.stem}", "block": shown,
               "loss_weights": checkpoint["args"].get("loss_weights", "dispatch"),
               "images": len(sampled), "blocks": []}
    for i, of_block in dispatch.items():
        expert = of_block[sampled].argmax(1)
        numbers["blocks"].append({
            "block": i, "silhouette": silhouette(entering[i], expert),
            "scale": encoder.blocks[i].mlp.router.scale.item(),
            "entropy": dispatch_entropy(of_block).tolist(),
            "dispatch_cv": dispatch_cv(of_block[:, 1:]).tolist(),
            "cls_share": of_block[:, 0].mean(0).tolist()})

    # What the router of the block that is shown makes of patches, which have losses.
    patches = sampled[:, 1:]
    weights = dispatch[shown][:, 1:] * sampled.shape[1]                             # [M, N, E]
    points = None
    if losses is not None:
        points = torch.stack([weights[..., 0][patches], losses[patches]]).double()
        numbers["correlation"] = torch.corrcoef(points)[0, 1].item()
        points = points.cpu().numpy()
    # cloned, because a slice alone would keep the weights of all images in memory
    return dict(numbers=numbers, images=pictures, weights=weights[:IMAGES].clone().cpu(),
                points=points)


def shown_numbers(numbers: dict) -> dict:
    """The numbers of a checkpoint, with those of the block that is shown among them."""
    row, = (row for row in numbers["blocks"] if row["block"] == numbers["block"])
    return numbers | row


def report(numbers: dict):
    """Prints a line: what one checkpoint's expert 0 does in the block that is shown."""
    found = shown_numbers(numbers)
    said = [f"{name} {np.ravel(found[name])[0]:.3f}" for name in (
        "dispatch_cv", "correlation", "silhouette") if name in found]
    print(f"{numbers['checkpoint']}, block {numbers['block']}{other_weights(numbers)}: "
          f"{', '.join(said)}")


def other_weights(numbers: dict) -> str:
    """Words for a title, if the run's loss had other weights than the dispatch weights"""
    kind = numbers["loss_weights"]
    return "" if kind == "dispatch" else f" (the loss had {kind} weights)"


# ----------------------------------------------------------------------------- pictures

def draw_heatmaps(models: list[dict], experts: int, path: Path):
    """A row of images, then a row for each expert of each model: its weights over the images. A
    single image stands beside its heatmaps.

    Red patches have more than the uniform weight, blue ones less. All rows have one scale of
    colors, so that weights which hardly vary are pale beside others. The scale leaves out the 1 %
    of the patches whose weights are furthest from uniform, because few of them would make all
    others pale. It reaches at least 10 % up and down, so that rows may all be pale.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    images = models[0]["images"].permute(0, 2, 3, 1).numpy()                        # [M, S, S, 3]
    height, width = images.shape[1:3]
    shown = [model["weights"][..., :experts].numpy() for model in models]
    far = np.concatenate([abs(weights - 1).ravel() for weights in shown])
    half = max(0.1, np.quantile(far, 0.99))
    scale = TwoSlopeNorm(1, max(0.0, 1 - half), 1 + half)
    rows = 1 + sum(weights.shape[2] for weights in shown)
    single = len(images) == 1
    size = (3 * rows + 1, 3.6) if single else (max(4.5, 1.3 * len(images) + 1.2), 1.35 * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*((1, rows) if single else (rows, len(images))), squeeze=False,
                           subplot_kw=dict(xticks=[], yticks=[]))
    axes = axes.T if single else axes
    for axis, image in zip(axes[0], images):
        axis.imshow(image)
    row = 1
    for model, weights in zip(models, shown):
        side = math.isqrt(weights.shape[1])
        own = axes[row:row + weights.shape[2]]
        row += weights.shape[2]
        title = (f"{model['numbers']['name']}: dispatch weights from {weights.min():.2f} to "
                 f"{weights.max():.2f}{other_weights(model['numbers'])}")
        own[0, (len(images) - 1) // 2].set_title(plain(title), fontsize="medium", wrap=True)
        for expert, line in enumerate(own):
            line[0].set_ylabel(f"expert {expert}")
            for axis, values, image in zip(line, weights[..., expert], images):
                axis.imshow(image.mean(-1), cmap="gray", vmin=-255, vmax=255)      # pale
                colors = axis.imshow(values.reshape(side, side), cmap="coolwarm", alpha=0.65,
                                     norm=scale, extent=(0, width, height, 0))
    bar = figure.colorbar(colors, ax=axes if single else axes[1:],
                          label="weight / uniform weight", shrink=0.5)
    bar.ax.locator_params(axis="y", nbins=5)
    figure.savefig(path, dpi=90)


def draw_blocks(models: list[dict], experts: int, path: Path):
    """Silhouette, entropy, variation and [CLS] share over blocks, a line for each expert.

    Experts differ by color, and the second of two models is dashed. More than two models differ
    by color, from dark to light in the order given.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    panels = {      # title, what the axis says, and its lower end
        "silhouette": ("silhouette of tokens by expert", "1: separated, 0: mixed", -1),
        "entropy": ("entropy of dispatch weights", "nats, at most ln(tokens)", 0),
        "dispatch_cv": ("variation over patches", "standard deviation / mean", 0),
        "cls_share": ("dispatch weight of [CLS]", "share, 1 / tokens if uniform", 0)}
    blocks = sorted({row["block"] for model in models for row in model["numbers"]["blocks"]})
    several = len(models) > 2
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(models)))
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (name, (title, unit, low)) in zip(axes, panels.items()):
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
        axis.set_ylim(low, 1 if name == "silhouette" else 1.05 * axis.dataLim.ymax)
    lines = axes[1].lines
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
        found = shown_numbers(model["numbers"])
        title = "{name}: r = {correlation:.2f}, cv {dispatch_cv[0]:.2g}".format(**found)
        axis.set(title=plain(title), xlabel="expert 0's dispatch weight / uniform weight",
                 ylabel="token loss (Eq. 1)")
    figure.savefig(path, dpi=90)


def main(args) -> list[dict]:
    """-> the numbers of routing.json, one dict for each checkpoint"""
    process = common.Process(args)
    models = []
    print(LEGEND)
    for path in args.checkpoints:
        models.append(measure(path, args, process))      # one encoder at a time is in memory
        report(models[-1]["numbers"])
    numbers = [model["numbers"] for model in models]
    out = Path(args.out or Path(args.checkpoints[0]).parent)
    out.mkdir(parents=True, exist_ok=True)
    (out / "routing.json").write_text(json.dumps(rounded(numbers), indent=1) + "\n")
    experts = EXPERTS if len(models) <= 2 else 1
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
