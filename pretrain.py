"""Masked pretraining with expert patch-level loss routing.

    torchrun --nproc_per_node 4 pretrain.py --experts 2 --objective token_cls      # the defaults: the paper's
"""

import argparse
import shlex
import warnings

import torch

import common
import data
from balance import FixedWeights, GradNorm, RandomLossWeighting
from checkpoint import digest
from losses import explore_losses
from model import PRESETS, Explore, Router, build_vit
from run import Run
from teacher import build_teacher


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, batch_size=4096)
    common.add_trainer_flags(parser, length=300, warmup=40, lr=1.5e-3, min_lr=1e-6, weight_decay=0.05,
                             clip_grad=3.0, drop_path=0.1)
    parser.add_argument("--betas", type=float, nargs=2, default=[0.9, 0.95], help="AdamW (default: 0.9 0.95)")
    parser.add_argument("--recompute", action="store_true",
                        help="keep only the blocks' inputs for the backward pass: less memory, slower steps")
    add = parser.add_argument_group("student").add_argument
    add("--model", choices=PRESETS, default="vit_base", help="default: %(default)s")
    add("--image-size", type=int, default=224, metavar="N", help="default: %(default)s")
    add("--patch-size", type=int, default=16, metavar="N", help="default: %(default)s")
    add("--experts", type=int, default=2, metavar="N",
        help="experts of each Soft-MoE block, 0 for a plain ViT (default: %(default)s)")
    add("--moe-blocks", type=int, nargs="+", metavar="B",
        help="0-based blocks whose MLP is a Soft-MoE (default: 1 3 5 ...)")
    add = parser.add_argument_group("objective").add_argument
    add("--objective", choices=("token", "token_cls", "token_pixel", "token_cls_pixel"), default="token_cls",
        help="distill patch tokens, align [CLS], reconstruct pixels (default: %(default)s)")
    add("--encoding", choices=("sparse", "dense"), default="sparse",
        help="sparse: the student sees only the visible patches, as in MAE; dense: all, with mask tokens for "
             "the masked ones, as in BEiT (default: %(default)s)")
    add("--mask-ratio", type=float, default=0.4, metavar="R",
        help="share of patches that the student does not see (default: %(default)s)")
    add("--teacher", default="ViT-B-16/openai",
        help="a checkpoint, an open_clip MODEL/PRETRAINED (a tag, a file or random), or timm/NAME "
             "(default: %(default)s)")
    add("--cls-weight", type=float, default=0.4, metavar="W",
        help="w of Eq. 8 with --balance static (default: %(default)s)")
    add("--pixel-weight", type=float, default=1.0, metavar="W",
        help="w of Eq. 8 with --balance static (default: %(default)s)")
    add = parser.add_argument_group("loss routing").add_argument
    add("--loss-weights", choices=("dispatch", "combine", "uniform"), default="dispatch",
        help="weights of the patch losses. dispatch: expert 0's for the token loss and, with --encoding "
             "dense, expert 1's for the pixel loss; combine: their combine weights, not normalized; uniform: "
             "none (default: %(default)s)")
    add("--loss-block", type=int, nargs="+", metavar="B",
        help="MoE block that gives the weights; several are averaged (default: the last one)")
    add("--loss-router", action="store_true",
        help="beyond the paper: a router for the losses alone, on the final tokens, also with --experts 0")
    add("--detach", action="store_true",
        help="weight the loss by constants, which send the router no gradient: the paper's main ablation")
    add("--entropy-weight", type=float, nargs="+", default=[5.0], metavar="L",
        help="lambda of the entropy of experts 0, 1, ...; the last value counts for the rest (default: 5.0)")
    add("--entropy-on", choices=("dispatch", "combine"), default="dispatch",
        help="weights whose entropy is regularized (default: %(default)s)")
    add("--importance-weight", type=float, default=0.0, metavar="W",
        help="weight of the importance loss on combine weights (default: %(default)s)")
    add = parser.add_argument_group("global balancing of the objectives, the baselines").add_argument
    add("--balance", choices=("static", "gradnorm", "rlw"), default="static",
        help="static: 1, --cls-weight, --pixel-weight; gradnorm: learned; rlw: drawn at random in every step "
             "(default: %(default)s)")
    add("--gradnorm-alpha", type=float, default=0.12, metavar="A", help="default: %(default)s")
    add("--gradnorm-lr", type=float, default=0.025, metavar="LR", help="default: %(default)s")
    args = common.parse(parser, argv, "pretrain")
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace):
    """Validates flag combinations."""
    fail, patches = parser.error, (args.image_size // args.patch_size) ** 2
    if args.image_size % args.patch_size:
        fail(f"--image-size {args.image_size} is not a multiple of --patch-size {args.patch_size}")
    if not 0 < int(args.mask_ratio * patches) < patches:
        fail(f"--mask-ratio {args.mask_ratio} masks {int(args.mask_ratio * patches)} of {patches} patches: "
             "at least one must be masked and one visible")
    static, routed = args.balance == "static", args.experts or args.loss_router
    for met, needs, names in (      # flags that would have no effect
            (args.experts, "--experts above 0", "moe_blocks loss_block"),
            (not args.loss_router, "a run without --loss-router", "loss_block"),
            (routed, "--experts above 0 or --loss-router",
             "loss_weights detach entropy_weight entropy_on importance_weight"),
            (args.loss_weights != "uniform", "--loss-weights dispatch or combine", "detach loss_router"),
            ("_" in args.objective, "an --objective of several terms", "balance"),
            (static and "cls" in args.objective, "--balance static, and cls in --objective", "cls_weight"),
            (static and "pixel" in args.objective, "--balance static, and pixel in --objective",
             "pixel_weight"),
            (args.balance == "gradnorm", "--balance gradnorm", "gradnorm_alpha gradnorm_lr")):
        for name in names.split():
            if not met and getattr(args, name) != parser.get_default(name):
                fail(f"{common.flag(name)} needs {needs}")
    if not routed:
        return
    experts = 2 if args.loss_router else args.experts
    if len(args.entropy_weight) > experts:
        fail(f"--entropy-weight has {len(args.entropy_weight)} values for {experts} experts")
    dense_pixels = args.encoding == "dense" and "pixel" in args.objective
    if experts == 1 and dense_pixels and args.loss_weights != "uniform":
        fail("--experts 1: with --encoding dense, expert 1 weights the pixel loss, so there must be 2")
    depth = PRESETS[args.model]["depth"]
    blocks = args.moe_blocks or list(range(1, depth, 2))
    if unexpected := set(blocks) - set(range(depth)):
        fail(f"--moe-blocks {min(unexpected)}: {args.model} has blocks 0 to {depth - 1}")
    if unexpected := set(args.loss_block or []) - set(blocks):
        blocks = " ".join(map(str, blocks))
        fail(f"--loss-block {min(unexpected)} has no experts: the MoE blocks are {blocks}")


def main(args: argparse.Namespace):
    machine = common.Machine(args)
    images = data.open_images(args.data, "train", args.image_size, labels=False)
    plan = common.make_plan(args, machine.world, len(images))

    # teacher, student, optimizer
    grid, objectives = args.image_size // args.patch_size, args.objective.split("_")
    teacher = build_teacher(args.teacher, grid)
    sources = {"teacher": digest(teacher), "images": data.digest(images)}
    teacher.to(machine.device, machine.amp)
    common.seed_everything(args.seed)
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                        experts=args.experts, moe_blocks=args.moe_blocks, drop_path=args.drop_path)
    encoder.recompute = args.recompute
    student = Explore(encoder, teacher.dim, args.mask_ratio, dense=args.encoding == "dense",
                      pixels="pixel" in objectives, loss_router=args.loss_router).to(machine.device)
    optimizer = common.adamw(student, args.lr, args.weight_decay, args.betas)

    # losses and their weights
    lambdas = args.entropy_weight      # of experts 0, 1, ...; the last one counts for the rest
    lambdas = lambdas + lambdas[-1:] * ((2 if args.loss_router else args.experts) - len(lambdas))
    coupling = dict(objectives=objectives, loss_block=args.loss_block, loss_weights=args.loss_weights,
                    detach=args.detach, entropy_on=args.entropy_on, importance_weight=args.importance_weight,
                    entropy_weights=torch.tensor(lambdas, device=machine.device))
    fixed = dict(token=1.0, cls=args.cls_weight, pixel=args.pixel_weight)
    fixed = torch.tensor([fixed[name] for name in objectives], device=machine.device)      # [K]
    if args.balance == "gradnorm":
        balance = GradNorm(fixed, encoder.norm, args.gradnorm_alpha, args.gradnorm_lr, machine.scaler)
    else:
        balance = RandomLossWeighting(fixed, args.seed) if args.balance == "rlw" else FixedWeights(fixed)

    run = Run(args, machine, plan, encoder.config, sources,
                     model=student, optimizer=optimizer, balance=balance)
    run.announce(f"{args.model}, {sum(p.numel() for p in encoder.parameters()) / 1e6:.1f} M parameters, "
                 f"{args.experts} experts, {args.objective}", f"{len(images)} images")
    if run.first == 0:
        run.save("epoch_0000.pt", 0)
    compute_losses = explore_losses
    if machine.compile:
        teacher.compile()
        if args.balance == "gradnorm":      # it differentiates what follows the blocks once an objective
            for block in encoder.blocks:
                block.compile()
        else:
            student.compile()
            compute_losses = torch.compile(explore_losses)
    routers = [module for module in student.modules() if isinstance(module, Router)]
    model = machine.parallel(student).train()
    views = data.TrainViews(images, args.image_size, args.seed, grid, args.mask_ratio)
    batches = data.train_batches(views, len(images), run)

    for step in run.steps():
        common.set_rate(optimizer, common.learning_rate(step, plan, args.lr, args.min_lr))
        common.seed_everything(args.seed, step, machine.rank)               # drop path

        for micro_step in range(1, plan.micro_steps + 1):
            batch = next(batches)
            pixels, mask = data.augment(batch), batch["mask"]               # [B, 3, S, S] in [0, 1], [B, N]
            with torch.no_grad():
                targets = teacher(pixels)                                   # [B, 1 + N, Dt]
            with machine.accumulating(model, last=micro_step == plan.micro_steps):
                with machine.autocast():
                    pred = model(data.normalize(pixels), mask)
                losses, regularizer, metrics = compute_losses(pred, targets, pixels, mask, **coupling)
                loss = (balance(step, losses) * losses).sum() + regularizer      # Eq. 8
                machine.scaler.scale(loss / plan.micro_steps).backward()
            run.log.add(metrics | {"loss": loss.detach(), "objective_weights": balance.weights.clone()})

        run.log.add(common.optimizer_step(optimizer, machine.scaler, args.clip_grad))
        balance.update()
        if routers:
            run.log.add({"scale": torch.stack([router.scale.detach() for router in routers])})
        warn_of_collapse(run.end_step(step))                                # log line, checkpoint, signal
    flat = isinstance(images, data.Photos)      # no labels
    script, which = ("routing.py", "last.pt") if flat else ("knn.py", "epoch_*.pt")
    run.report(f"next: python {script} {shlex.quote(args.out)}/{which} --data {shlex.quote(args.data)}")


def warn_of_collapse(line: dict):
    """The paper's sign of collapse, once: a loss that weighting has brought far below its plain mean."""
    for name, value in line.items():
        if name.endswith("_ratio") and value < 0.2:
            warnings.warn(f"the router collapses: {name}, the ratio of weighted to unweighted loss, is below "
                          "0.2. A higher --entropy-weight keeps it near 1", stacklevel=2)


if __name__ == "__main__":
    common.launch(main, parse_args())
