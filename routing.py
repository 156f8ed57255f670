"""What the router learned: dispatch weights of unmasked images, in pictures and numbers.

    python routing.py runs/coupled/last.pt --data FOLDER_OR_PHOTO
    python routing.py runs/coupled/last.pt runs/detached/last.pt --out DIR

heatmaps.png (Fig. 1, A1), blocks.png (Fig. A2) and correlation.png (Fig. A3), of expert 0's
weights and the token loss, go beside the first checkpoint or to DIR; so does routing.json, with
every number, and each expert's area under the ROC curve on the foreground.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import make_grid

import common
import data
from checkpoint import LoadError, digest_input, load_checkpoint, load_encoder
from common import non_negative_int, number, positive_int
from losses import dispatch_entropy, token_loss, variation
from model import Explore, Router
from run import rounded
from teacher import Teacher, build_teacher

# low to high, blue over gray to red: colors at equal distances
COLORS = ((0.23, 0.30, 0.75), (0.55, 0.69, 1.00), (0.87, 0.87, 0.87), (0.96, 0.60, 0.48),
          (0.71, 0.02, 0.15))
IMAGES = 6                            # of heatmaps.png
EXPERTS = 8                           # in pictures and in print: the first ones
TILE, GAP, MARGIN = 112, 4, 84        # pixels
TOKENS = 10_000                       # drawn for silhouette and correlation


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
    """Mean silhouette coefficient by Euclidean distance: features [M, D], labels [M] -> -1 to 1.

    For a point, a is its mean distance to the others of its cluster, b the smallest mean
    distance to another cluster, its coefficient (b - a) / max(a, b); alone in its cluster it
    counts 0. A single cluster gives 0.
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
    """Area under the ROC curve: score [M], positive bool [M]; ties count half.

    NaN if a class is missing.
    """
    inside = score[positive]
    outside = score[~positive].sort().values
    below = torch.searchsorted(outside, inside)
    below = below + torch.searchsorted(outside, inside, right=True)
    return (below.double().mean() / (2 * len(outside))).item()


def load_student(checkpoint: dict) -> Explore:
    """The student of a checkpoint; from another stage's, its encoder is what counts."""
    encoder = load_encoder(checkpoint)
    state = checkpoint["model"]
    head = state.get("head.weight", torch.empty(1, encoder.dim))
    student = Explore(encoder, len(head), loss_router="loss_router.phi" in state)
    student.load_state_dict(state, strict=False)
    return student.eval()


def find_teacher(checkpoint: dict, grid: int) -> Teacher | None:
    """A pretraining checkpoint's teacher, or None, after printing why."""
    name = checkpoint["args"].get("teacher")
    try:
        if not name:
            raise LoadError("it is not a pretraining checkpoint")
        teacher = build_teacher(name, grid)
        if checkpoint["inputs"]["teacher"] != digest_input(name):
            raise LoadError(f"the contents of {name} have changed")
        return teacher
    except LoadError as error:
        print(f"{checkpoint['path']}: no correlation with the distillation loss: {error}")
        return None


@torch.no_grad()
def observe(student: Explore, teacher: Teacher | None, routers: dict[int, Router], batches,
            drawn: Tensor, machine: common.Machine
            ) -> tuple[dict[int, list[Tensor]], Tensor | None]:
    """What happens to M whole images, of which `drawn` bool [M, T] names some tokens.

    -> ({block: [the drawn tokens that enter it [M', D], dispatch, combine [M, T, E]]},
    token losses [M, N], or None without a teacher)
    """
    seen = {i: [] for i in routers}
    losses = []
    for batch in batches:
        pixels = batch["image"] / 255
        sample, drawn = drawn[:len(pixels)], drawn[len(pixels):]
        routing = {}
        with machine.autocast():
            entering = [student.encoder.embed(data.normalize(pixels))]
            for i, block in enumerate(student.encoder.blocks):
                x, routing[i] = block(entering[i])
                entering.append(x)
            tokens = student.encoder.norm(x)
        if student.loss_router:      # which sees the final tokens
            entering[-1] = tokens
            routing[len(entering) - 1] = student.loss_router.route(tokens)
        for i, parts in seen.items():
            some = entering[i].cpu().float()[sample]
            parts.append((some, routing[i].dispatch.cpu(), routing[i].combine.cpu()))
        if teacher:
            predicted = student.head(tokens)[:, 1:].float()
            losses.append(token_loss(predicted, teacher(pixels)[:, 1:].float()).cpu())
    seen = {i: [torch.cat(x) for x in zip(*parts)] for i, parts in seen.items()}
    return seen, torch.cat(losses) if losses else None


def describe(router: Router, tokens: Tensor, dispatch: Tensor, combine: Tensor,
             drawn: Tensor) -> dict:
    """A row of routing.json: one block's numbers, the lists by expert; see `observe`."""
    return {"silhouette": silhouette(tokens, dispatch[drawn].argmax(1)),
            "scale": router.scale.item(), "entropy": dispatch_entropy(dispatch).tolist(),
            "dispatch_cv": variation(dispatch[:, 1:]).tolist(),
            "cls_share": dispatch[:, 0].mean(0).tolist(),
            "usage": combine.mean((0, 1)).tolist()}


def measure(path: str, args, machine: common.Machine) -> tuple[dict, dict]:
    """One checkpoint -> (numbers for routing.json, tensors for the pictures)"""
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
        block = (checkpoint["args"].get("loss_block") or list(routers))[-1]
    if block not in routers:
        raise common.UserError(f"--block {block} has no experts: the MoE blocks are "
                               f"{' '.join(map(str, routers))}")
    teacher = find_teacher(checkpoint, encoder.grid)
    if teacher:
        teacher.to(machine.device, machine.amp)

    size = encoder.config["image_size"]
    images = data.open_images(args.data, "val", size, labels=False)
    views = data.CenterViews(images, size)
    rng = np.random.default_rng(args.seed)
    chosen = rng.permutation(len(images))[:args.images].tolist()
    drawn = torch.from_numpy(rng.random((len(chosen), 1 + encoder.grid ** 2)))       # [M, T]
    drawn = drawn < TOKENS / drawn.numel()
    order = [rows.tolist() for rows in torch.tensor(chosen).split(args.batch_size)]
    seen, losses = observe(student, teacher, routers, data.load(views, order, machine), drawn,
                           machine)

    rows = [{"block": i} | describe(router, *seen[i], drawn) for i, router in routers.items()]
    weights = seen[block][1][:, 1:] * drawn.shape[1]         # in units of the uniform weight
    numbers = {"checkpoint": str(path), "block": block, "images": len(chosen),
               "name": f"{Path(path).resolve().parent.name}/{Path(path).stem}",
               "tokens": int(drawn.sum()), "blocks": rows}
    pixels = torch.stack([views[i]["image"] for i in chosen[:IMAGES]]) / 255
    tensors = {"pixels": pixels, "weights": weights[:IMAGES]}
    if teacher:      # of the drawn patches, by weight and by loss
        some = drawn[:, 1:]
        points = torch.stack([weights[..., 0][some], losses[some]]).double()
        numbers["correlation"] = torch.corrcoef(points)[0, 1].item()
        tensors["points"] = points.numpy()
    if hasattr(images, "mask"):      # a patch at least half on the object is foreground
        masks = torch.stack([images.mask(i) for i in chosen]).to(torch.uint8) * 255
        masks = data.center_view(masks, size) / 255                                  # [M, S, S]
        foreground = F.avg_pool2d(masks, encoder.patch_size).flatten(1) >= 0.5       # [M, N]
        numbers["foreground_auc"] = [roc_auc(weight, foreground) for weight in weights.unbind(2)]
    return numbers, tensors


def report(numbers: dict):
    """Prints the numbers, a line for each block, of the first experts."""
    print(f"\n{numbers['checkpoint']}: {numbers['images']} images, {numbers['tokens']} tokens")
    of_block = {name: numbers[name] for name in ("block", "correlation", "foreground_auc")
                if name in numbers}
    for row in (*numbers["blocks"], of_block):
        print("  ".join(
            f"{name} {np.round(value[:EXPERTS] if isinstance(value, list) else value, 3)}"
            for name, value in row.items()))


# ----------------------------------------------------------------------------- pictures

def colored(values: Tensor, low: float, high: float) -> Tensor:
    """values [..., H, W] -> colors [..., 3, H, W] in [0, 1], blue at `low`, red at `high`"""
    at = np.linspace(low, high, len(COLORS))
    channels = [np.interp(values, at, channel) for channel in zip(*COLORS)]
    return torch.from_numpy(np.stack(channels, axis=-3)).float()


def heatmaps(pixels: Tensor, models: list[tuple[str, Tensor]]) -> Image.Image:
    """A row of images, then one for each expert of each model: its weights over the image.

    pixels [M, 3, S, S] in [0, 1]; of each model its name and weights [M, N, E] in units of the
    uniform weight. Colors span the 1st to the 99th percentile of a model's weights, as the scale
    in the margin says: a few extreme patches would dull the rest.
    """
    images = F.interpolate(pixels, TILE, mode="bicubic", antialias=True).clamp(0, 1)
    rows, titles, scales = [images], ["image"], [None]
    for name, weights in models:
        weights = weights[..., :EXPERTS]
        low, high = np.quantile(weights, (0.01, 0.99))
        side = math.isqrt(weights.shape[1])
        scale = colored(torch.linspace(low, high, MARGIN - 12).expand(8, -1), low, high)
        for expert, weight in enumerate(weights.unbind(2)):
            maps = colored(weight.unflatten(1, (side, side)), low, high)
            rows.append(0.65 * F.interpolate(maps, TILE) + 0.35 * data.gray(images))
            title = f"{name}\nexpert {expert}\n\n{low:.2f} to {high:.2f}\nx uniform"
            titles.append(title.replace("/", "\n"))
            scales.append(to_pil_image(scale))
    tiles = make_grid(torch.cat(rows), nrow=len(images), padding=GAP, pad_value=1.0)
    canvas = Image.new("RGB", (MARGIN + tiles.shape[2], tiles.shape[1]), "white")
    canvas.paste(to_pil_image(tiles), (MARGIN, 0))
    for row, (title, scale) in enumerate(zip(titles, scales)):
        middle = GAP + TILE // 2 + row * (TILE + GAP)
        ImageDraw.Draw(canvas).multiline_text((MARGIN - 4, middle), title, fill="black",
                                              anchor="rm", align="right")
        if scale:
            canvas.paste(scale, (8, middle))
    return canvas


def draw_blocks(models: list[dict], path: Path):
    """Silhouette, entropy, variation and [CLS] share over MoE blocks, by model and expert."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    axes = figure.subplots(1, 4)
    titles = {"silhouette": "silhouette", "entropy": "dispatch entropy (nats)",
              "dispatch_cv": "coefficient of variation", "cls_share": "[CLS] share"}
    for style, numbers in zip(("-o", "--s"), models):
        rows = numbers["blocks"]
        experts = max(len(row["usage"]) for row in rows)
        for axis, (name, title) in zip(axes, titles.items()):
            axis.set(title=title, xlabel="block", xticks=[row["block"] for row in rows])
            for expert in range(min(experts, EXPERTS)):      # a silhouette has one value
                points = [(row["block"], np.atleast_1d(row[name])[expert]) for row in rows
                          if expert < np.size(row[name])]
                axis.plot(*np.array(points).reshape(-1, 2).T, style,
                          color="black" if name == "silhouette" else f"C{expert}",
                          label=f"{numbers['name']}, expert {expert}")
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def draw_correlation(models: list[tuple[dict, np.ndarray]], path: Path):
    """Expert 0's weight against the token's loss, [2, M'], with the regression line."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(4.6 * len(models), 3.6), layout="constrained")
    for i, (numbers, (weight, loss)) in enumerate(models, start=1):
        axis = figure.add_subplot(1, len(models), i)
        axis.scatter(weight, loss, s=2, alpha=0.25)
        slope, _ = np.polyfit(weight, loss, 1)      # the line goes through the means
        axis.axline((weight.mean(), loss.mean()), slope=slope, color="black", linestyle="--",
                    linewidth=1)
        axis.locator_params(axis="x", nbins=5)      # where weights hardly vary, ticks overlap
        axis.set(title=f"{numbers['name']}: r = {numbers['correlation']:.3f}",
                 xlabel="expert 0's dispatch weight / uniform weight", ylabel="token loss")
    figure.savefig(path, dpi=90)


def main(args) -> list[dict]:
    """-> the numbers of routing.json, one dict for each checkpoint"""
    machine = common.Machine(args)
    out = Path(args.out or Path(args.checkpoints[0]).parent)
    out.mkdir(parents=True, exist_ok=True)
    models, tensors = zip(*(measure(path, args, machine) for path in args.checkpoints))
    rows = [(numbers["name"], each["weights"]) for numbers, each in zip(models, tensors)]
    heatmaps(tensors[0]["pixels"], rows).save(out / "heatmaps.png")
    (out / "routing.json").write_text(json.dumps(rounded(models), indent=1) + "\n")
    for numbers in models:
        report(numbers)
    try:
        draw_blocks(models, out / "blocks.png")
        points = [(numbers, each["points"]) for numbers, each in zip(models, tensors)
                  if "points" in each]
        if points:
            draw_correlation(points, out / "correlation.png")
    except ImportError:
        print("blocks.png and correlation.png need matplotlib: pip install matplotlib")
    print(f"{out}: pictures and routing.json")
    return list(models)


if __name__ == "__main__":
    common.launch(main, parse_args())
