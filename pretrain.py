"""Masked pretraining with expert patch-level loss routing.

    torchrun --nproc_per_node 4 pretrain.py --experts 2 --objective token_cls      # the defaults: the paper's
    python pretrain.py --demo
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import common
import data
from common import UserError
from losses import OBJECTIVES, GradNorm, RandomLossWeighting, Static, objectives
from model import PRESETS, Explore, build_teacher, build_vit, encoder_macs, shuffle_visible

# What --demo sets where no flag says otherwise: small enough for minutes on two cores
DEMO = dict(data="shapes", out="runs/demo", model="vit_nano", image_size=48, patch_size=6, batch_size=64,
            epochs=4, teacher="runs/demo-teacher/last.pt", warmup_epochs=1.0, lr=2e-3, drop_path=0.0,
            entropy_weight=[0.5], amp="off", save_every=1)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_common_flags(parser, batch_size=4096)
    common.add_trainer_flags(parser, length=300, warmup=40, lr=1.5e-3, min_lr=1e-6, weight_decay=0.05,
                             clip_grad=3.0, drop_path=0.1)
    parser.add_argument("--betas", type=float, nargs=2, default=[0.9, 0.95], help="AdamW (default: 0.9 0.95)")
    group = parser.add_argument_group("student")
    group.add_argument("--model", choices=PRESETS, default="vit_base", help="default: %(default)s")
    group.add_argument("--image-size", type=int, default=224, help="default: %(default)s")
    group.add_argument("--patch-size", type=int, default=16, help="default: %(default)s")
    group.add_argument("--experts", type=int, default=2,
                       help="experts of each Soft-MoE block, 0 for a plain ViT (default: %(default)s)")
    group.add_argument("--moe-blocks", type=int, nargs="+", metavar="B",
                       help="0-based blocks whose MLP is a Soft-MoE (default: 1 3 5 ...)")
    group = parser.add_argument_group("objective")
    group.add_argument("--objective", choices=combinations(), default="token_cls",
                       help="distil patch tokens, align [CLS], reconstruct pixels (default: %(default)s)")
    group.add_argument("--encoding", choices=("sparse", "dense"), default="sparse",
                       help="sparse: the student sees only the visible patches, as in MAE; dense: all, with "
                            "mask tokens for the masked ones, as in BEiT (default: %(default)s)")
    group.add_argument("--mask-ratio", type=float, default=0.4, metavar="R",
                       help="share of patches that the student does not see (default: %(default)s)")
    group.add_argument("--teacher", default="ViT-B-16/openai", help="a checkpoint, or an open_clip "
                       "MODEL/PRETRAINED, where PRETRAINED is a tag, a file or random (default: %(default)s)")
    group.add_argument("--cls-weight", type=float, default=0.4, metavar="W",
                       help="w of Eq. 8 with --balance static (default: %(default)s)")
    group.add_argument("--pixel-weight", type=float, default=1.0, metavar="W",
                       help="w of Eq. 8 with --balance static (default: %(default)s)")
    group = parser.add_argument_group("loss routing")
    group.add_argument("--loss-weights", choices=("dispatch", "combine", "uniform"), default="dispatch",
                       help="weights of the patch losses. dispatch: expert 0's for the token loss and, with "
                            "--encoding dense, expert 1's for the pixel loss; combine: their combine "
                            "weights, not normalized; uniform: none (default: %(default)s)")
    group.add_argument("--loss-block", type=int, nargs="+", metavar="B",
                       help="MoE block that gives the weights; several are averaged (default: the last one)")
    group.add_argument("--detach", action="store_true",
                       help="weight the loss by constants, which send the router no gradient: the "
                            "paper's main ablation")
    group.add_argument("--entropy-weight", type=float, nargs="+", default=[5.0], metavar="L",
                       help="lambda of the entropy, one for all experts or one for each (default: 5.0)")
    group.add_argument("--entropy-on", choices=("dispatch", "combine"), default="dispatch",
                       help="weights whose entropy is regularized (default: %(default)s)")
    group.add_argument("--entropy-experts", type=int, nargs="+", metavar="E",
                       help="experts whose entropy is regularized (default: all)")
    group.add_argument("--importance-weight", type=float, default=0.0, metavar="W",
                       help="weight of the importance loss on combine weights (default: %(default)s)")
    group = parser.add_argument_group("global balancing of the objectives, the baselines")
    group.add_argument("--balance", choices=("static", "gradnorm", "rlw"), default="static",
                       help="static: 1, --cls-weight, --pixel-weight; gradnorm: learned; rlw: drawn at "
                            "random in every step (default: %(default)s)")
    group.add_argument("--gradnorm-alpha", type=float, default=0.12, metavar="A", help="default: %(default)s")
    group.add_argument("--gradnorm-lr", type=float, default=0.025, metavar="LR", help="default: %(default)s")
    parser.add_argument("--recompute", action="store_true",
                        help="keep only the blocks' inputs for the backward pass: less memory, slower steps")
    parser.add_argument("--demo", action="store_true",
                        help="small and end to end: a teacher, pretraining, k-NN, heatmaps; no download")
    parser.add_argument("--bench", type=int, metavar="STEPS", help="time STEPS steps with all other flags, "
                        "on one drawn batch or, with an explicit --data, with its loader; saves nothing")
    known = parser.parse_known_args(argv)[0]
    if known.demo:
        parser.set_defaults(**DEMO)
    if known.bench:
        parser.set_defaults(data="shapes")
    args = common.parse(parser, argv, "pretrain")
    try:
        check(args, common.given(parser, argv, args))
    except UserError as error:
        parser.error(str(error))
    return args


def combinations() -> list[str]:
    """token, token_cls, token_pixel, token_cls_pixel."""
    others = [name for name in OBJECTIVES if name != "token"]
    subsets = (some for n in range(len(others) + 1) for some in itertools.combinations(others, n))
    return ["_".join(("token", *some)) for some in subsets]


def check(args: argparse.Namespace, given: set[str]):
    """Refuses by name what has no meaning together; fills in the loss block."""
    patches, depth = (args.image_size // args.patch_size) ** 2, PRESETS[args.model]["depth"]
    if args.image_size % args.patch_size:
        raise UserError(f"--image-size {args.image_size} is not a multiple of --patch-size {args.patch_size}")
    if not 0 < int(args.mask_ratio * patches) < patches:
        raise UserError(f"--mask-ratio {args.mask_ratio} masks {int(args.mask_ratio * patches)} of {patches} "
                        "patches: at least one must be masked and one visible")
    if args.balance != "static" and args.objective == "token":
        raise UserError(f"--balance {args.balance} has nothing to balance: "
                        "--objective token is one objective")
    if not args.experts:
        for name in ("detach", "moe_blocks", "loss_block", "loss_weights", "entropy_weight", "entropy_on",
                     "entropy_experts", "importance_weight"):
            if name in given:
                raise UserError(f"{common.flag(name)} needs experts, but --experts is 0")
        args.loss_block = []
        return
    if args.detach and args.loss_weights == "uniform":
        raise UserError("--detach has nothing to detach with --loss-weights uniform")
    if len(args.entropy_weight) not in (1, args.experts):
        raise UserError(f"--entropy-weight has {len(args.entropy_weight)} values: give one, or one for each "
                        f"of the {args.experts} experts")
    if strangers := set(args.entropy_experts or []) - set(range(args.experts)):
        raise UserError(f"--entropy-experts {min(strangers)}: experts are 0 to {args.experts - 1}")
    dense_pixels = args.encoding == "dense" and "pixel" in args.objective
    if args.experts == 1 and dense_pixels and args.loss_weights != "uniform":
        raise UserError("--experts 1: with --encoding dense, expert 1 weights the pixel loss, "
                        "so there must be 2")
    blocks = args.moe_blocks or list(range(1, depth, 2))
    if strangers := set(blocks) - set(range(depth)):
        raise UserError(f"--moe-blocks {min(strangers)}: {args.model} has blocks 0 to {depth - 1}")
    args.loss_block = args.loss_block or [max(blocks)]
    if strangers := set(args.loss_block) - set(blocks):
        raise UserError(f"--loss-block {min(strangers)} has no experts: the MoE blocks are "
                        f"{' '.join(map(str, blocks))}")


def entropy_weights(args: argparse.Namespace) -> list[float]:
    """lambda of each expert; 0 for those that --entropy-experts leaves out."""
    weights = args.entropy_weight if len(args.entropy_weight) > 1 else args.entropy_weight * args.experts
    chosen = args.entropy_experts or range(args.experts)
    return [weight if e in chosen else 0.0 for e, weight in enumerate(weights)]


def main(args: argparse.Namespace):
    run = common.Run(args)
    if args.demo:
        train_demo_teacher(args)

    # data
    grid, sparse = args.image_size // args.patch_size, args.encoding == "sparse"
    visible = grid ** 2 - int(args.mask_ratio * grid ** 2)
    images = data.open_images(args.data, "train", args.image_size)
    one_batch = args.bench and args.data == "shapes"      # drawn once and repeated
    available = args.batch_size if one_batch else len(images)
    micro_batch, micro_steps, epoch_steps = common.sizes(args, run.world, available)
    steps, warmup = common.schedule(args, epoch_steps)

    # teacher, student, optimizer
    with common.one_after_another():      # a download
        teacher = build_teacher(args.teacher, grid)
    sources = {"teacher": common.digest(teacher), "data": data.digest(images)}
    teacher.to(run.device, run.amp)
    common.seed_everything(args.seed)
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                        experts=args.experts, moe_blocks=args.moe_blocks, drop_path=args.drop_path)
    encoder.recompute = args.recompute
    student = Explore(encoder, teacher.dim, dense=not sparse, pixels="pixel" in args.objective).to(run.device)
    optimizer = common.adamw(student, args.lr, args.weight_decay, args.betas)

    # losses
    names, fixed = args.objective.split("_"), {"cls": args.cls_weight, "pixel": args.pixel_weight}
    coupling = dict(names=names, loss_block=args.loss_block, loss_weights=args.loss_weights,
                    detach=args.detach, entropy_on=args.entropy_on, importance_weight=args.importance_weight,
                    entropy_weights=torch.tensor(entropy_weights(args), device=run.device))
    weights = torch.tensor([fixed.get(name, 1.0) for name in names], device=run.device)      # [K]
    balance = (Static(weights) if args.balance == "static"
               else RandomLossWeighting(weights, args.seed) if args.balance == "rlw"
               else GradNorm(weights, encoder.norm, args.gradnorm_alpha, args.gradnorm_lr, run.scaler))

    first, last = 0, WARM_UP + args.bench if args.bench else min(steps, args.max_steps or steps)
    if not args.bench:
        first = run.resume(encoder.config, epoch_steps, sources, model=student, optimizer=optimizer,
                           balance=balance)
    if first == 0 and not args.bench:
        run.save("epoch_0000.pt", 0)
    compute_losses = objectives
    if args.compile:
        teacher.compile()
        if args.balance == "gradnorm":      # it differentiates twice from the last norm on
            encoder.features = torch.compile(encoder.features)
        else:
            student.compile()
            compute_losses = torch.compile(objectives)
    model = run.parallel(student).train()

    views = data.TrainViews(images, args.image_size, args.seed, grid, args.mask_ratio)
    if one_batch:
        order = [[(0, i % len(images)) for i in range(micro_batch)]]
        batches = itertools.repeat(next(data.load(views, order, 0, run.device)))
    else:
        order = data.train_order(len(images), args.batch_size, micro_batch, args.seed, first, last,
                                 run.rank, run.world)
        batches = run.waiting(data.load(views, order, args.workers, run.device))
    marks, warned = [clock(run.device)], False
    for step in run.steps(first, last):
        common.set_rate(optimizer, common.learning_rate(step, steps, warmup, args.lr, args.min_lr))
        common.seed_everything(args.seed, step, run.rank)                   # drop path

        for micro_step in range(micro_steps):
            batch = next(batches)
            pixels, mask = data.augment(batch), batch["mask"]               # [B, 3, S, S] in [0, 1], [B, N]
            ids_keep, ids_restore = shuffle_visible(mask, batch["noise"], visible) if sparse else (None, None)
            with torch.no_grad():
                targets = teacher(pixels)                                   # [B, 1 + N, Dt]
            with run.accumulating(model, micro_step, micro_steps):
                with run.autocast():
                    pred = model(data.normalize(pixels), mask, ids_keep, ids_restore)
                terms, regularizer, metrics = compute_losses(
                    pred, targets, pixels, mask, ids_keep, **coupling)
                loss = (balance(step, terms) * terms).sum() + regularizer   # Eq. 8
                run.scaler.scale(loss / micro_steps).backward()
            run.log(metrics | {"loss": loss.detach(), "objective_weights": balance.weights})

        run.log(common.update(optimizer, run.scaler, args.clip_grad))
        balance.update()
        if encoder.moe_blocks:
            scales = [encoder.blocks[i].mlp.scale.detach() for i in encoder.moe_blocks]
            run.log({"scale": torch.stack(scales)})
        if args.bench:
            marks.append(clock(run.device))
        elif (line := run.after(step)) and not warned:                      # log line, checkpoint, signal
            warned = warn_of_collapse(line, 1 / args.experts if args.loss_weights == "combine" else 1.0)

    if args.bench:
        macs = 3 * encoder_macs(encoder, 1 + (visible if sparse else grid ** 2))      # backward is double
        return report_bench(args, run, marks, teacher, pixels, micro_steps, macs)
    run.report(f"step {max(first, last)} of {steps}", {})
    if args.demo:
        show_demo(args)


def warn_of_collapse(line: dict, neutral: float) -> bool:
    """The paper's sign of collapse: a loss that weighting has brought far below its plain mean."""
    found = [name for name in ("token_ratio", "pixel_ratio") if line.get(name, neutral) < 0.2 * neutral]
    if found and common.is_first():
        tqdm.write(f"step {line['step']}: the router collapses: {found[0]}, the ratio of weighted to "
                   f"unweighted loss, is {line[found[0]]:.3f}. A higher --entropy-weight keeps it "
                   "near uniform", file=sys.stderr)
    return bool(found)


# ------------------------------------------------------------------------------------------- bench, demo

WARM_UP = 3      # steps that are not timed: they compile, choose kernels, fetch memory


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def report_bench(args, run: common.Run, marks: list[float], teacher, pixels, micro_steps: int, macs: int):
    """Prints one line of medians; `macs` are the student's for one image. Images/s are of all processes."""
    import resource

    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    laps = [clock(run.device)]
    for _ in range(args.bench):
        with torch.no_grad():
            teacher(pixels)
        laps.append(clock(run.device))
    step, teacher_step = np.median(np.diff(marks[WARM_UP:])), micro_steps * np.median(np.diff(laps))
    torch.backends.mha.set_fastpath_enabled(False)      # the counter knows plain products best
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        teacher.forward(pixels[:1])
    flops = (2 * macs + counter.get_total_flops()) * args.batch_size / run.world / step
    resident = (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = (torch.cuda.max_memory_allocated() if run.device.type == "cuda" else resident) / 2 ** 30
    if common.is_first():
        print(f"teacher {1000 * teacher_step:.1f} ms | student {1000 * (step - teacher_step):.1f} ms | "
              f"{args.batch_size / step:.0f} images/s | {flops / 1e12:.1f} TFLOP/s | {memory:.1f} GiB")


def train_demo_teacher(args: argparse.Namespace):
    """A small supervised ViT on the same images, if there is none. The demo calls stages as a user would."""
    import finetune
    if args.teacher == DEMO["teacher"]:
        finetune.main(finetune.parse_args([
            "--data", args.data, "--out", str(Path(args.teacher).parent), "--model", args.model,
            "--image-size", str(args.image_size), "--patch-size", str(args.patch_size), "--epochs", "4",
            "--warmup-epochs", "1", "--lr", "2e-3", "--batch-size", "64", "--drop-path", "0",
            "--augment", "plain", "--layer-decay", "1", "--amp", args.amp]))
        if dist.is_initialized():      # the first process has written it
            dist.barrier()


def show_demo(args: argparse.Namespace):
    """k-NN before and after, and what the router looks at."""
    import knn
    import routing
    first, last = (str(Path(args.out, name)) for name in ("epoch_0000.pt", "last.pt"))
    before, after = knn.main(knn.parse_args([first, last, "--data", args.data, "--amp", args.amp]))
    if args.experts:
        routing.main(routing.parse_args([last, "--data", args.data, "--out", args.out, "--amp", args.amp]))
    if common.is_first():
        print(f"k-NN random init {before:.1f}% -> pretrained {after:.1f}%")


if __name__ == "__main__":
    common.run(main, parse_args())
