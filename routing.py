"""What the router learned: the dispatch weights of whole images, in pictures and numbers.

    python routing.py runs/coupled/last.pt --data FOLDER_OR_PHOTO
    python routing.py runs/coupled/last.pt runs/detached/last.pt    # two models side by side
    python routing.py runs/coupled/epoch_*.pt                       # one run, epoch by epoch

What most runs change: --data, --images, --block, --out. It writes
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

import itertools
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import common
import data
from checkpoint import LoadError, load_checkpoint, load_encoder
from common import non_negative_int, number, positive_int
from losses import dispatch_cv, dispatch_entropy, token_loss
from model import Explore, Router, ViT
from run import digest_input, rounded
from teacher import Teacher, build_teacher

LOSS_ROUTER = "loss router"           # where other routers have the number of their block
IMAGES = 6                            # at most, in heatmaps.png
EXPERTS = 8                           # at most, in pictures and in print
TOKENS = 10_000      # about as many for the silhouette: distances of all pairs take 400 MB


def parse_args(argv: list[str] | None = None):
    parser = common.make_parser(__doc__, "CHECKPOINT [CHECKPOINT ...] ")
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


# ----------------------------------------------------------------------- one checkpoint

class Sample(NamedTuple):
    """The M images that are measured, and what is known of their patches."""
    views: data.CenterViews
    indices: list[int]              # [M]: positions of the images in `views`
    sampled: Tensor                 # bool [M, T]: tokens for silhouette and correlation
    foreground: Tensor | None       # bool [M, N]: patches on the object, if there are masks


class Trace(NamedTuple):
    """What one router makes of the M images."""
    tokens: Tensor                  # [M', D]: the sampled tokens as they enter the block
    dispatch: Tensor                # [M, T, E]
    combine: Tensor                 # [M, T, E]


class Measured(NamedTuple):
    """What is known of one checkpoint in the end."""
    numbers: dict                   # for routing.json
    images: Tensor                  # uint8 [IMAGES, 3, S, S]
    weights: Tensor                 # [IMAGES, N, E]: dispatch weights of patches, 1 is uniform
    points: np.ndarray | None       # [2, M']: expert 0's weight and the token loss of patches


def measure(path: str, args, process: common.Process) -> Measured:
    """Measures one checkpoint. Only its numbers stay in memory, not the model."""
    checkpoint = load_checkpoint(path)
    student = load_student(checkpoint).to(process.device)
    routers = find_routers(student)
    block = choose_block(checkpoint, list(routers), args.block)
    teacher = find_teacher(checkpoint, student.encoder.grid, process)
    sample = draw_sample(student.encoder, args)
    traces, patch_loss = observe(student, teacher, sample, args.batch_size, process)

    weights = traces[block].dispatch[:, 1:] * sample.sampled.shape[1]      # 1 is uniform
    name = f"{Path(path).resolve().parent.name}/{Path(path).stem}"
    shown = tqdm(routers.items(), desc=name, unit="block", leave=False, disable=None)
    numbers = {"checkpoint": path, "block": block, "images": len(sample.indices), "name": name,
               "tokens": int(sample.sampled.sum()),
               "blocks": [{"block": i} | describe(router, traces[i], sample.sampled)
                          for i, router in shown]}
    points = None
    if patch_loss is not None:
        patches = sample.sampled[:, 1:]      # without [CLS], which has no token loss
        points = torch.stack([weights[..., 0][patches], patch_loss[patches]]).double().numpy()
        numbers["correlation"] = np.corrcoef(points)[0, 1].item()
    if sample.foreground is not None:
        numbers["foreground_auc"] = [roc_auc(weight, sample.foreground)
                                     for weight in weights.unbind(2)]
    images = [sample.views[i]["image"] for i in sample.indices[:IMAGES]]
    # cloned, because a slice alone would keep the weights of all images in memory
    return Measured(numbers, torch.stack(images), weights[:IMAGES].clone(), points)


def load_student(checkpoint: dict) -> Explore:
    """The student of a pretraining checkpoint, or a new one around another stage's encoder."""
    encoder = load_encoder(checkpoint)
    state = checkpoint["model"]
    # only its size matters without a teacher, because then it is not used
    head = state.get("head.weight", torch.empty(1, encoder.dim))
    student = Explore(encoder, len(head), loss_router="loss_router.phi" in state)
    student.load_state_dict(state, strict=False)      # without mask token and pixel decoder
    return student.eval()


def find_routers(student: Explore) -> dict[int | str, Router]:
    """The routers by the number of their block, and then the loss router."""
    blocks = student.encoder.blocks
    routers = {i: blocks[i].mlp for i in student.encoder.moe_blocks}
    return routers | ({LOSS_ROUTER: student.loss_router} if student.loss_router else {})


def choose_block(checkpoint: dict, blocks: list[int | str], wanted: int | None) -> int | str:
    """Which of `blocks` to show: the one that is wanted, or the last one that weights the loss."""
    if not blocks:
        raise common.UserError(f"{checkpoint['path']} has no experts: there is no routing to show")
    if wanted is None:
        loss_block = checkpoint["args"].get("loss_block")
        return max(loss_block) if loss_block else blocks[-1]
    if wanted not in blocks:
        raise common.UserError(f"--block {wanted} has no experts: the MoE blocks are "
                               f"{' '.join(map(str, blocks))}")
    return wanted


def find_teacher(checkpoint: dict, grid: int, process: common.Process) -> Teacher | None:
    """The teacher that trained a student, or None, after printing why there is none."""
    name = checkpoint["args"].get("teacher")
    try:
        if not name:
            raise LoadError("it is not a pretraining checkpoint")
        teacher = build_teacher(name, grid)
        if checkpoint["inputs"]["teacher"] != digest_input(name):
            raise LoadError(f"the contents of {name} have changed since the training")
        return teacher.to(process.device, process.amp)
    except LoadError as error:
        print(f"{checkpoint['path']}: no correlation with the distillation loss: {error}")
        return None


def draw_sample(encoder: ViT, args) -> Sample:
    """Draws images and tokens: the same ones for all encoders of one image and patch size."""
    size = encoder.config["image_size"]
    dataset = data.open_images(args.data, "val", size, labels=False)
    rng = np.random.default_rng(args.seed)
    indices = list(itertools.islice(readable(rng, dataset), args.images))
    if not indices:
        raise common.UserError(f"--data {args.data}: none of its images can be read")
    sampled = torch.from_numpy(rng.random((len(indices), 1 + encoder.grid ** 2)))
    sampled = sampled < TOKENS / sampled.numel()
    foreground = None
    if hasattr(dataset, "mask"):      # at least half of a foreground patch is on the object
        masks = torch.stack([dataset.mask(i) for i in indices]).to(torch.uint8) * 255
        masks = data.center_view(masks, size) / 255                                  # [M, S, S]
        foreground = F.avg_pool2d(masks, encoder.patch_size).flatten(1) >= 0.5
    return Sample(data.CenterViews(dataset, size), indices, sampled, foreground)


def readable(rng: np.random.Generator, dataset):
    """Yields the positions of all images that can be read, in random order. A line names each
    other one that is drawn.
    """
    for index in rng.permutation(len(dataset)).tolist():
        try:
            dataset[index]      # read here, too, because tokens are drawn for a known number
            yield index
        except common.ReadError as error:
            data.print_once(f"{error}: left out")


@torch.no_grad()
def observe(student: Explore, teacher: Teacher | None, sample: Sample, batch_size: int,
            process: common.Process) -> tuple[dict[int | str, Trace], Tensor | None]:
    """-> (what each router makes of the images, token losses [M, N] or None without a teacher)"""
    traces = {i: [] for i in find_routers(student)}
    losses = []
    order = [indices.tolist() for indices in torch.tensor(sample.indices).split(batch_size)]
    batches = data.load(sample.views, order, process)
    for batch, sampled in zip(batches, sample.sampled.split(batch_size)):
        images = batch["image"] / 255
        states = []
        with process.autocast():
            tokens, routings = student.encoder(data.normalize(images), states=states)
        entering = dict(enumerate(states))
        if student.loss_router:
            entering[LOSS_ROUTER] = tokens
            routings[LOSS_ROUTER] = student.loss_router.route(tokens)
        for i, trace in traces.items():
            entered = entering[i].cpu().float()[sampled]
            trace.append((entered, routings[i].dispatch.cpu(), routings[i].combine.cpu()))
        if teacher:
            predicted = student.head(tokens)[:, 1:].float()
            losses.append(token_loss(predicted, teacher(images)[:, 1:].float()).cpu())
    traces = {i: Trace(*map(torch.cat, zip(*trace))) for i, trace in traces.items()}
    return traces, torch.cat(losses) if losses else None


def describe(router: Router, trace: Trace, sampled: Tensor) -> dict:
    """A router's numbers in routing.json. Its lists have one number for each expert."""
    dispatch = trace.dispatch
    return {"silhouette": silhouette(trace.tokens, dispatch[sampled].argmax(1)),
            "scale": router.scale.item(), "entropy": dispatch_entropy(dispatch).tolist(),
            "dispatch_cv": dispatch_cv(dispatch[:, 1:]).tolist(),
            "cls_share": dispatch[:, 0].mean(0).tolist(),
            "usage": trace.combine.mean((0, 1)).tolist()}


def report(numbers: dict):
    """Prints the numbers of the first experts, one line for each block."""
    print(f"\n{numbers['checkpoint']}: {numbers['images']} images, {numbers['tokens']} tokens")
    of_block = {name: numbers[name] for name in ("block", "correlation", "foreground_auc")
                if name in numbers}
    for row in (*numbers["blocks"], of_block):
        print("  ".join(f"{name} {short(value)}" for name, value in row.items()))


def short(value) -> str:
    if isinstance(value, str):
        return value
    return str(np.round(value[:EXPERTS] if isinstance(value, list) else value, 3))


# ----------------------------------------------------------------------------- pictures

def draw_heatmaps(models: list[Measured], experts: int, path: Path):
    """A row of images, then a row for each expert of each model: its weights over the images.

    Each model has a scale of colors of its own. It spans the 1st to the 99th percentile of the
    weights, because a few extreme patches would otherwise leave hardly any difference between the
    others.
    """
    from matplotlib.figure import Figure
    weights = [model.weights[..., :experts] for model in models]
    images = models[0].images.permute(0, 2, 3, 1).numpy()                           # [M, S, S, 3]
    height, width = images.shape[1:3]
    rows = 1 + sum(weight.shape[2] for weight in weights)
    figure = Figure(figsize=(1.3 * len(images) + 1.2, 1.35 * rows), layout="constrained")
    axes = figure.subplots(rows, len(images), squeeze=False,
                           subplot_kw=dict(xticks=[], yticks=[]))
    for axis, image in zip(axes[0], images):
        axis.imshow(image)
    row = 1
    for model, weight in zip(models, weights):
        low, high = np.quantile(weight, (0.01, 0.99))
        side = math.isqrt(weight.shape[1])
        own = axes[row:row + weight.shape[2]]
        row += weight.shape[2]
        own[0, 0].set_title(model.numbers["name"], loc="left", fontsize="medium")
        for expert, line in enumerate(own):
            line[0].set_ylabel(f"expert {expert}")
            for axis, values, image in zip(line, weight[..., expert].numpy(), images):
                axis.imshow(image.mean(-1), cmap="gray", vmin=0, vmax=255)
                colors = axis.imshow(values.reshape(side, side), cmap="coolwarm", vmin=low,
                                     vmax=high, alpha=0.65, extent=(0, width, height, 0))
        bar = figure.colorbar(colors, ax=own, label="weight / uniform")
        bar.ax.locator_params(axis="y", nbins=5)
    figure.savefig(path, dpi=90)


def draw_blocks(models: list[Measured], experts: int, path: Path):
    """Silhouette, entropy, variation and [CLS] share over blocks, a line for each expert.

    Experts differ by color, and the second of two models is dashed. More than two models differ
    by color, from dark to light in the order given.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    panels = {"silhouette": "silhouette", "entropy": "dispatch entropy (nats)",
              "dispatch_cv": "coefficient of variation", "cls_share": "[CLS] share"}
    several = len(models) > 2
    rows = [{row["block"]: row for row in model.numbers["blocks"]} for model in models]
    blocks = sorted(set().union(*rows), key=lambda block: (block == LOSS_ROUTER, block))
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(models)))
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (name, panel) in zip(axes, panels.items()):
        axis.set(title=panel, xlabel="block", xticks=range(len(blocks)), xticklabels=blocks)
        for i, (row, model) in enumerate(zip(rows, models)):
            style = "--s" if i == 1 and not several else "-o"
            lines = over_blocks(row, blocks, name)
            for expert, line in enumerate(itertools.islice(lines, experts)):
                color = f"C{expert}"
                if several:
                    color = shades[i]
                elif name == "silhouette":      # one value for all experts together
                    color = "black"
                axis.plot(line, style, color=color,
                          label=f"{model.numbers['name']}, expert {expert}")
    lines = axes[1].lines
    figure.legend(handles=lines, loc="outside right center", ncols=math.ceil(len(lines) / 16),
                  fontsize=8)
    figure.savefig(path, dpi=90)


def over_blocks(rows: dict[int | str, dict], blocks: list[int | str], name: str):
    """Yields each expert's values of `name`: NaN where a block has no router or fewer experts."""
    values = [np.atleast_1d(rows[block][name] if block in rows else []) for block in blocks]
    return itertools.zip_longest(*values, fillvalue=math.nan)


def draw_correlation(models: list[Measured], path: Path):
    """The token loss of patches over expert 0's weight, with the regression line."""
    from matplotlib.figure import Figure
    columns = min(3, len(models))      # as wide as blocks.png
    rows = math.ceil(len(models) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    for i, model in enumerate(models, start=1):
        weight, loss = model.points
        axis = figure.add_subplot(rows, columns, i)
        axis.scatter(weight, loss, s=2, alpha=0.25)
        slope, _ = np.polyfit(weight, loss, 1)      # the line goes through the means
        axis.axline((weight.mean(), loss.mean()), slope=slope, color="black", linestyle="--",
                    linewidth=1)
        axis.locator_params(axis="x", nbins=5)      # more labels, such as 1.0005, would overlap
        axis.set(title="{name}: r = {correlation:.3f}".format(**model.numbers),
                 xlabel="expert 0's dispatch weight / uniform weight", ylabel="token loss")
    figure.savefig(path, dpi=90)


def main(args) -> list[dict]:
    """-> the numbers of routing.json, one dict for each checkpoint"""
    process = common.Process(args)
    out = Path(args.out or Path(args.checkpoints[0]).parent)
    out.mkdir(parents=True, exist_ok=True)
    models = [measure(path, args, process) for path in args.checkpoints]
    numbers = [model.numbers for model in models]
    (out / "routing.json").write_text(json.dumps(rounded(numbers), indent=1) + "\n")
    for each in numbers:
        report(each)

    experts = EXPERTS if len(models) <= 2 else 1
    try:
        draw_heatmaps(models, experts, out / "heatmaps.png")
        draw_blocks(models, experts, out / "blocks.png")
        known = [model for model in models if model.points is not None]
        if known:
            draw_correlation(known, out / "correlation.png")
    except ImportError:
        print("pictures need matplotlib: pip install matplotlib")
    print(f"{out}: pictures and routing.json")
    return numbers


if __name__ == "__main__":
    common.launch(main, parse_args())
