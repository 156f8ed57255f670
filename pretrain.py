"""Stage 1: masked pretraining with expert patch-level loss routing. Without flags: the paper's Token+CLS, 2 experts.

    torchrun --nproc_per_node 4 pretrain.py --experts 2 --objective token_cls
    python pretrain.py --demo
"""

import argparse
import contextlib
import itertools
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import common
import data
from common import UserError
from losses import (GradNorm, cls_loss, dispatch_entropy, gradients_at, importance_loss, pixel_loss, random_loss_weights,
                    routed_mean, token_loss, variation)
from model import PRESETS, Explore, Prediction, build_teacher, build_vit, encoder_macs, shuffle_visible, take

# What --demo sets where no flag says otherwise: small enough for minutes on two cores
DEMO = dict(data="shapes", out="runs/demo", model="vit_nano", image_size=48, patch_size=6, teacher="runs/demo-teacher/last.pt",
            batch_size=64, epochs=4, warmup_epochs=1, lr=2e-3, drop_path=0.0, entropy_weight=[0.5], amp="off", save_every=1)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_common_flags(parser, batch_size=4096)
    common.add_trainer_flags(parser, epochs=300, warmup_epochs=40, lr=1.5e-3, min_lr=1e-6, weight_decay=0.05,
                             clip_grad=3.0, drop_path=0.1)
    parser.add_argument("--betas", type=common.fraction, nargs=2, default=[0.9, 0.95], help="AdamW's (default: 0.9 0.95)")
    group = parser.add_argument_group("student")
    group.add_argument("--model", choices=PRESETS, default="vit_base", help="default: %(default)s")
    group.add_argument("--image-size", type=common.positive_int, default=224, help="default: %(default)s")
    group.add_argument("--patch-size", type=common.positive_int, default=16, help="default: %(default)s")
    group.add_argument("--experts", type=common.natural, default=2,
                       help="experts of each Soft-MoE block, 0 for a plain ViT (default: %(default)s)")
    group.add_argument("--moe-blocks", type=common.natural, nargs="+", metavar="B",
                       help="0-based blocks whose MLP is a Soft-MoE (default: 1 3 5 ...)")
    group = parser.add_argument_group("objective")
    group.add_argument("--objective", choices=("token", "token_cls", "token_pixel", "token_cls_pixel"), default="token_cls",
                       help="distil patch tokens, align [CLS], reconstruct pixels (default: %(default)s)")
    group.add_argument("--encoding", choices=("sparse", "dense"), default="sparse",
                       help="sparse: the student sees the visible patches alone, as in MAE; dense: all, with mask tokens for "
                            "the masked ones, as in BEiT (default: %(default)s)")
    group.add_argument("--mask-ratio", type=common.open_fraction, default=0.4, metavar="R",
                       help="share of patches that the student does not see (default: %(default)s)")
    group.add_argument("--teacher", default="ViT-B-16/openai",
                       help="a checkpoint of ours, or an open_clip MODEL/PRETRAINED where PRETRAINED is a tag, a file or "
                            "random (default: %(default)s)")
    group.add_argument("--cls-weight", type=common.non_negative, default=0.4, metavar="W", help="default: %(default)s")
    group.add_argument("--pixel-weight", type=common.non_negative, default=1.0, metavar="W", help="default: %(default)s")
    group = parser.add_argument_group("loss routing")
    group.add_argument("--loss-weights", choices=("dispatch", "combine", "uniform"), default="dispatch",
                       help="what weights the losses over patches: expert 0's dispatch weights the token loss (with --encoding "
                            "dense also expert 1's the pixel loss), their combine weights, which are not normalized over an image's patches, "
                            "or nothing (default: %(default)s)")
    group.add_argument("--loss-block", type=common.natural, nargs="+", metavar="B",
                       help="MoE block that gives the weights; several are averaged (default: the last MoE block)")
    group.add_argument("--detach", action="store_true",
                       help="weight the loss, but pass no gradient of it to the router: the paper's main ablation")
    group.add_argument("--entropy-weight", type=common.finite, nargs="+", default=[5.0], metavar="L",
                       help="lambda of the entropy, one for all experts or one for each (default: 5.0)")
    group.add_argument("--entropy-on", choices=("dispatch", "combine"), default="dispatch",
                       help="weights whose entropy is regularized (default: %(default)s)")
    group.add_argument("--entropy-experts", type=common.natural, nargs="+", metavar="E",
                       help="experts whose entropy is regularized (default: all)")
    group.add_argument("--importance-weight", type=common.non_negative, default=0.0, metavar="W",
                       help="weight of the importance loss on combine weights (default: %(default)s)")
    group = parser.add_argument_group("global balancing of the objectives, the baselines")
    group.add_argument("--balance", choices=("static", "gradnorm", "rlw"), default="static",
                       help="static: 1, --cls-weight, --pixel-weight; gradnorm: learned; rlw: drawn at random in every step "
                            "(default: %(default)s)")
    group.add_argument("--gradnorm-alpha", type=common.non_negative, default=0.12, metavar="A", help="default: %(default)s")
    group.add_argument("--gradnorm-lr", type=common.non_negative, default=0.025, metavar="LR", help="default: %(default)s")
    parser.add_argument("--recompute", action="store_true",
                        help="keep only the blocks' inputs for the backward pass and compute the rest again there: less memory, slower steps")
    parser.add_argument("--demo", action="store_true",
                        help="small defaults and the whole way: a teacher, pretraining, k-NN, heatmaps; no download")
    parser.add_argument("--bench", type=common.positive_int, metavar="STEPS",
                        help="time STEPS real steps on images that are already on the device (drawn, or from an explicit --data), "
                             "with all other flags, and save nothing; with --data FOLDER its loader too")
    known = parser.parse_known_args(argv)[0]
    if known.demo:
        parser.set_defaults(**DEMO)
    if known.bench:
        parser.set_defaults(data=None)      # no folder is needed; where one is given, its loader is timed as well
    args = parser.parse_args(argv)
    args.out = str(common.run_folder("pretrain", args, parser))
    return args


def objective_weights(args: argparse.Namespace) -> dict[str, float]:
    """The objectives of --objective with their fixed weights: token 1, cls and pixel by flag."""
    fixed = {"token": 1.0, "cls": args.cls_weight, "pixel": args.pixel_weight}
    return {name: fixed[name] for name in args.objective.split("_")}


def check(args: argparse.Namespace):
    """Refuses by name what has no meaning together; fills in the loss block."""
    if args.image_size % args.patch_size:
        raise UserError(f"--image-size {args.image_size} is not a multiple of --patch-size {args.patch_size}")
    patches = (args.image_size // args.patch_size) ** 2
    if not 0 < int(args.mask_ratio * patches) < patches:
        raise UserError(f"--mask-ratio {args.mask_ratio} masks {int(args.mask_ratio * patches)} of {patches} patches: "
                        "at least one must be masked and one visible")
    if args.balance != "static" and args.objective == "token":
        raise UserError(f"--balance {args.balance} has nothing to balance: --objective token is one objective")
    if not args.experts:
        meaningless = {"detach": args.detach, "loss_block": args.loss_block, "moe_blocks": args.moe_blocks,
                       "entropy_experts": args.entropy_experts, "importance_weight": args.importance_weight,
                       "loss_weights combine": args.loss_weights == "combine",
                       "entropy_on combine": args.entropy_on == "combine"}
        for name in (name for name, given in meaningless.items() if given):
            raise UserError(f"{common.flag(name)} needs experts, but --experts is 0")
        return
    if args.detach and args.loss_weights == "uniform":
        raise UserError("--detach has nothing to detach with --loss-weights uniform")
    if len(args.entropy_weight) not in (1, args.experts):
        raise UserError(f"--entropy-weight has {len(args.entropy_weight)} values: give one, or one for each of the "
                        f"{args.experts} experts")
    if max(args.entropy_experts or [0]) >= args.experts:
        raise UserError(f"--entropy-experts {max(args.entropy_experts)}: there are only experts 0 to {args.experts - 1}")
    if args.experts == 1 and couples_pixels(args):
        raise UserError("--experts 1: with --encoding dense, expert 1 weights the pixel loss, so there must be 2 (or "
                        "--loss-weights uniform)")
    depth = PRESETS[args.model]["depth"]
    blocks = list(range(1, depth, 2)) if args.moe_blocks is None else args.moe_blocks
    if max(blocks) >= depth:
        raise UserError(f"--moe-blocks {max(blocks)}: {args.model} has blocks 0 to {depth - 1}")
    args.loss_block = args.loss_block or [max(blocks)]
    for block in args.loss_block:
        if block not in blocks:
            raise UserError(f"--loss-block {block} has no experts: the MoE blocks are {' '.join(map(str, blocks))}")


def couples_pixels(args: argparse.Namespace) -> bool:
    """In sparse encoding masked patches have no dispatch weight, so there the pixel loss stays unweighted (Table 1)."""
    return args.encoding == "dense" and "pixel" in args.objective and args.loss_weights != "uniform" and args.experts > 0


def lambdas(args: argparse.Namespace) -> list[float]:
    """Entropy weights, one for each expert; 0 for those that --entropy-experts leaves out."""
    each = args.entropy_weight if len(args.entropy_weight) > 1 else args.entropy_weight * args.experts
    return [weight if args.entropy_experts is None or e in args.entropy_experts else 0.0 for e, weight in enumerate(each)]


def objectives(args: argparse.Namespace, entropy_weights: Tensor, pred: Prediction, targets: Tensor, images: Tensor,
               mask: Tensor, ids_keep: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The terms of the training objective (Eq. 8) -> (each objective's loss [K], before the weights 1, w_cls and w_pixel;
    the regularizers' sum; detached metrics for the log).

    entropy_weights [E], pred.tokens [B, T, Dt] the student's and targets [B, 1 + N, Dt] the teacher's tokens of the whole
    image, images [B, 3, S, S] in [0, 1], mask [B, N]; ids_keep [B, V] the patches that a sparse student saw, in the order
    of its tokens, or None for a dense one.
    """
    losses, metrics = {}, {}
    routing = [pred.routing[block] for block in args.loss_block] if pred.routing else []
    if routing:
        dispatch, combine = (torch.stack(weights) for weights in zip(*routing))                   # [blocks, B, T, E]

    def coupling(expert: int) -> Tensor | float:
        """What weights each patch of the student's tokens in `expert`'s loss: [B, T - 1], or 1."""
        if not routing or args.loss_weights == "uniform":
            return 1.0
        weight = (dispatch if args.loss_weights == "dispatch" else combine).mean(0)[:, 1:, expert]
        return weight.detach() if args.detach else weight      # undetached, it is what couples loss and router

    def weighted(per_patch: Tensor, lives_on: Tensor, weight: Tensor | float) -> Tensor:
        if args.loss_weights == "combine":      # as the paper's: nothing but Eq. 5's normalization keeps weights from vanishing
            return routed_mean(weight * per_patch, lives_on)
        return routed_mean(per_patch, lives_on * weight)

    # token distillation, on the visible patches in sparse encoding and on the masked ones in dense encoding
    target = targets[:, 1:] if ids_keep is None else take(targets[:, 1:], ids_keep)
    per_patch = token_loss(pred.tokens[:, 1:].float(), target.float())                            # [B, T - 1]
    lives_on = mask.float() if ids_keep is None else torch.ones_like(per_patch)
    losses["token"] = weighted(per_patch, lives_on, coupling(0))
    metrics["token_unweighted"] = routed_mean(per_patch, lives_on)

    if "cls" in args.objective:
        losses["cls"] = cls_loss(pred.tokens[:, 0].float(), targets[:, 0].float())

    # pixels, always on the masked patches
    if "pixel" in args.objective:
        per_patch = pixel_loss(pred.pixels.float(), images, args.patch_size)                      # [B, N]
        losses["pixel"] = weighted(per_patch, mask.float(), coupling(1) if couples_pixels(args) else 1.0)
        metrics["pixel_unweighted"] = routed_mean(per_patch, mask.float())

    metrics |= losses
    for name in losses.keys() - {"cls"}:      # far below 1: the router flees the hard patches instead of learning them
        metrics[f"{name}_ratio"] = losses[name] / metrics[f"{name}_unweighted"]

    regularizers = targets.new_zeros(())
    if routing:      # means over images, and over loss blocks
        entropy = {"dispatch": dispatch_entropy(dispatch.flatten(0, 1)), "combine": dispatch_entropy(combine.flatten(0, 1))}
        regularizers = metrics["entropy_loss"] = -(entropy_weights * entropy[args.entropy_on]).sum()      # Eq. 7
        if args.importance_weight:
            metrics["importance_loss"] = torch.stack([importance_loss(block) for block in combine]).mean()
            regularizers = regularizers + args.importance_weight * metrics["importance_loss"]
        weights = dispatch.mean(0)
        metrics |= {"entropy": entropy["dispatch"], "dispatch_cv": variation(weights[:, 1:]), "cls_share": weights[:, 0].mean(0)}
    return torch.stack(list(losses.values())), regularizers, {name: value.detach() for name, value in metrics.items()}


def main(args: argparse.Namespace):
    process = common.start(args)
    rank, world, device, _ = process
    check(args)
    if args.demo:
        train_demo_teacher(args)

    # data
    grid = args.image_size // args.patch_size
    images = data.open_images(args.data or "shapes", "train", args.image_size)
    micro_batch, micro_steps, epoch_steps = common.sizes(args, world, len(images) if args.data else args.batch_size)
    steps, warmup = common.schedule(args, epoch_steps)

    # models
    try:
        teacher = build_teacher(args.teacher, grid).to(device, process.amp)
    except ValueError as error:
        raise UserError(f"--teacher {args.teacher}: {error}") from error
    folder = Path(args.out)
    state = None if args.bench else common.open_run(folder, args, epoch_steps)
    common.seed_everything(args.seed)
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size, experts=args.experts,
                        moe_blocks=args.moe_blocks, drop_path=args.drop_path)
    encoder.recompute = args.recompute
    weights = torch.tensor(list(objective_weights(args).values()), device=device)                   # [K], static
    entropy_weights = torch.tensor(lambdas(args), device=device)                                    # [E]
    student = Explore(encoder, teacher.dim, dense=args.encoding == "dense", pixels="pixel" in args.objective).to(device)
    optimizer = common.adamw(student, args.lr, args.weight_decay, args.betas)
    scaler = torch.amp.GradScaler(device.type, enabled=process.amp == torch.float16)
    gradnorm = GradNorm(len(weights), args.gradnorm_alpha, args.gradnorm_lr, device) if args.balance == "gradnorm" else None
    skips, first = common.resume(state, student, optimizer, scaler, device)
    if state and gradnorm:
        gradnorm.state = {name: value.to(device) for name, value in state["gradnorm"].items()}
    description = dict(encoder=encoder.config, args=common.plain(vars(args)))      # what rebuilds the model from a file
    if not state and not args.bench:
        common.save(folder / "epoch_0000.pt", model=student.state_dict(), step=0, **description)

    objective, packed = objectives, contextlib.nullcontext()
    if args.compile:
        teacher.compile()
        if device.type == "cpu":      # its weights never change: they are laid out once as the products like them best
            packed = torch._inductor.config.patch(freezing=True)
        if gradnorm:      # it differentiates twice from the last norm on, which compiled code cannot
            encoder.features = torch.compile(encoder.features)
        else:
            student.compile()
            objective = torch.compile(objectives)
    model = DistributedDataParallel(student, gradient_as_bucket_view=True) if world > 1 else student
    model.train()

    # the loop
    last, collapsed, watch = min(steps, args.max_steps or steps), False, common.Watch(args, process, first)
    log = common.Log(folder / "log.jsonl", first, world)
    views = data.TrainViews(images, args.image_size, args.seed, grid, args.mask_ratio)
    if args.bench:      # one batch, over and over, and nothing to save when a signal comes
        watch.close()
        last, lap = WARM_UP + args.bench, common.Laps(device)
        batches = itertools.repeat(next(data.load(views, [[(0, i % 32) for i in range(micro_batch)]], 0, device)))
    else:
        lap = lambda step, part: None
        order = data.TrainOrder(len(images), args.batch_size, micro_batch, args.seed, first, last, rank, world)
        batches = log.waiting(data.load(views, order, args.workers, device))
    visible, sparse = grid ** 2 - int(args.mask_ratio * grid ** 2), args.encoding == "sparse"
    bar = tqdm(range(first, last), initial=first, total=last, desc="pretrain", unit="step", disable=not common.is_first())
    for step in bar:
        lr = common.learning_rate(step, steps, warmup, args.lr, args.min_lr)
        common.set_rate(optimizer, lr)
        common.seed_everything(args.seed, step, rank)                               # drop path

        if args.balance == "rlw":
            weights = random_loss_weights(len(weights), args.seed, step).to(device, non_blocking=True)
        elif gradnorm:
            weights, shared = gradnorm.weights.clone(), []

        for micro_step in range(micro_steps):
            batch = next(batches)
            mask, pixels = batch["mask"], data.augment(batch)                       # [B, N], [B, 3, S, S] in [0, 1]
            ids_keep, ids_restore = shuffle_visible(mask, batch["noise"], visible) if sparse else (None, None)
            last_micro = micro_step == micro_steps - 1
            lap(step, "input")
            with torch.no_grad(), packed:
                targets = teacher(pixels)                                           # [B, 1 + N, Dt]
            lap(step, "teacher")
            with contextlib.nullcontext() if world == 1 or last_micro else model.no_sync():
                with process.autocast():
                    pred = model(data.normalize(pixels), mask, ids_keep, ids_restore)
                losses, regularizers, metrics = objective(args, entropy_weights, pred, targets, pixels, mask, ids_keep)
                if gradnorm:
                    gradients = gradients_at(encoder.norm, losses, scaler.scale(torch.ones((), device=device)))
                    shared.append(torch.cat([losses.detach()[:, None], gradients], dim=1))          # [K, 1 + numbers]
                loss = (weights * losses).sum() + regularizers
                scaler.scale(loss / micro_steps).backward()
            log.add(metrics | {"loss": loss.detach()})
            lap(step, "student")

        norm, skipped = common.update(optimizer, scaler, args.clip_grad)
        skips.add(skipped)
        log.add({"grad_norm": norm})
        if gradnorm:
            shared = common.mean_over_processes(torch.stack(shared).mean(0), world)
            gradnorm.update(shared[:, 0], shared[:, 1:].norm(dim=1))
        if args.balance != "static":
            log.add({"objective_weights": weights})
        lap(step, "student")
        if args.bench:
            continue

        done = step + 1
        scheduled = done % (args.save_every * epoch_steps) == 0 or done == last
        saves = watch(scheduled)
        if saves or done % 20 == 0:
            if encoder.moe_blocks:
                log.add({"scale": torch.stack([encoder.blocks[block].mlp.scale.detach() for block in encoder.moe_blocks])})
            log.add(skips.metrics())
            line = log.write(done, args.batch_size, epoch=done / epoch_steps, lr=lr)
            watch.check(done, line)
            collapsed = collapsed or warn_of_collapse(done, line, 1 / args.experts if args.loss_weights == "combine" else 1.0)
            bar.set_postfix({name: f"{line[name]:.3f}" for name in ("loss", "token", "cls") if name in line})
        if saves:
            if scheduled and done % epoch_steps == 0:
                common.save(folder / f"epoch_{done // epoch_steps:04d}.pt", model=student.state_dict(), step=done, **description)
            watch.save(done, model=student.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
                       skipped=line["skipped"], steps_per_epoch=epoch_steps, gradnorm=gradnorm.state if gradnorm else {},
                       **description)
            log.restart_clock()
    watch.close()
    if args.bench:
        macs = 3 * encoder_macs(encoder, 1 + (visible if sparse else grid ** 2)) + teacher.macs      # backward is two forwards
        return report_bench(args, process, lap.medians(WARM_UP), macs, views, micro_batch)
    if common.is_first():
        print(f"{folder / 'last.pt'}: step {max(first, last)} of {steps}")
    if args.demo:
        show_demo(args)


def warn_of_collapse(step: int, line: dict, neutral: float) -> bool:
    """Says so where the router has left the hard patches: a loss below a fifth of what neutral routing gives is the paper's sign of it."""
    found = [name for name in ("token_ratio", "pixel_ratio") if line.get(name, neutral) < 0.2 * neutral]
    if found and common.is_first():
        tqdm.write(f"step {step}: the router collapses: {found[0]}, the ratio of weighted to unweighted loss, is {line[found[0]]:.3f}. "
                   "A higher --entropy-weight keeps its weights nearer to uniform", file=sys.stderr)
    return bool(found)


# -------------------------------------------------------------------------------------------------------------- bench

WARM_UP = 3      # steps that are not timed: they compile, choose kernels, fetch memory


def report_bench(args: argparse.Namespace, process: common.Process, spent: dict[str, float], macs: int, views: data.TrainViews,
                 micro_batch: int):
    """Prints one line of medians. `spent` in ms, `macs` of one image: the blocks' alone, forward and backward.

    Times, TFLOP/s and memory are those of each process, images/s of all together.
    """
    flops = 2 * macs * args.batch_size / process.world / (spent["step"] / 1000)
    if common.is_first():
        print(f"teacher {spent['teacher']:.1f} ms | student {spent['student']:.1f} ms | "
              f"{1000 * args.batch_size / spent['step']:.0f} images/s | {flops / 1e12:.1f} TFLOP/s | "
              f"{common.peak_memory(process.device):.1f} GiB", flush=True)
    if args.data:
        workers, order = max(1, args.workers), data.TrainOrder(len(views.images), micro_batch, micro_batch, args.seed, 0, 10 ** 9)
        batches = data.load(views, order, args.workers, process.device)
        for _ in range(3 * workers):      # what they work on ahead does not count
            next(batches)
        start = time.perf_counter()
        for _ in range(5 * workers):
            next(batches)
        rate = 5 * micro_batch / (time.perf_counter() - start)
        if common.is_first():
            print(f"loader {rate:.0f} images/s per worker, {workers} of them", flush=True)


# --------------------------------------------------------------------------------------------------------------- demo

def train_demo_teacher(args: argparse.Namespace):
    """A small supervised ViT on the same images, if there is none yet. A stage calls others here alone: as a user would."""
    import finetune
    if args.teacher == DEMO["teacher"]:
        finetune.main(finetune.parse_args([
            "--data", args.data or "shapes", "--out", str(Path(args.teacher).parent), "--model", args.model, "--image-size",
            str(args.image_size), "--patch-size", str(args.patch_size), "--epochs", "4", "--warmup-epochs", "1", "--lr",
            "2e-3", "--batch-size", "64", "--drop-path", "0", "--augment", "plain", "--layer-decay", "1", "--amp", args.amp]))


def show_demo(args: argparse.Namespace):
    """k-NN before and after, and what the router looks at."""
    import knn
    import routing
    last = Path(args.out, "last.pt")
    before, after = knn.main(knn.parse_args([str(Path(args.out, "epoch_0000.pt")), str(last), "--data", args.data,
                                             "--amp", args.amp]))
    if args.experts:
        routing.main(routing.parse_args([str(last), "--data", args.data, "--out", args.out, "--amp", args.amp]))
    if common.is_first():
        print(f"k-NN random init {before:.1f}% -> pretrained {after:.1f}%")


if __name__ == "__main__":
    common.run(main, parse_args())
