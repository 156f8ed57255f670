"""Masked pretraining with expert patch-level loss routing.

    torchrun --nproc_per_node 4 pretrain.py --experts 2 --objective token_cls

These flags are the defaults: the paper's main model.
"""

import shlex
import warnings

import torch

import common
import data
from balance import EntropyWeights, FixedWeights, GradNorm, RandomLossWeighting
from checkpoint import digest_weights
from losses import explore_losses
from model import PRESETS, Explore, Router, build_vit
from run import Run
from teacher import Teacher, build_teacher


def parse_args(argv: list[str] | None = None):
    parser = common.make_parser(__doc__, batch_size=4096)
    common.add_trainer_flags(parser, epochs=300, warmup=40, lr=1.5e-3, min_lr=1e-6,
                             weight_decay=0.05, clip_grad=3.0)
    common.add_flags(parser, "more of AdamW and the machine", {
        "--betas": dict(default=[0.9, 0.95], type=float, nargs=2, range="[0, 1)",
                        help="of AdamW"),
        "--recompute": dict(
            action="store_true",
            help="keep only the blocks' inputs for the backward pass: less memory, slower "
                 "steps"),
    })
    common.add_flags(parser, "student", {
        "--model": dict(
            choices=PRESETS, default="vit_base",
            help="width and depth; vit_base is the paper's, vit_nano is for small images on CPUs"),
        "--image-size": dict(default=224, help="pixels a side"),
        "--patch-size": dict(default=16, help="pixels a side"),
        "--experts": dict(
            default=2, range="[0, inf)",
            help="experts of each Soft-MoE block, 0 for a plain ViT"),
        "--moe-blocks": dict(
            type=int, nargs="+", range="[0, inf)",
            help="0-based blocks whose MLP is a Soft-MoE (default: 1 3 5 ...)"),
        "--drop-path": dict(
            default=0.1, range="[0, 1)",
            help="stochastic depth of the last block, rising from 0"),
    })
    common.add_flags(parser, "objective", {
        "--objective": dict(
            choices=("token", "token_cls", "token_pixel", "token_cls_pixel"),
            default="token_cls",
            help="distill patch tokens, align [CLS], reconstruct pixels"),
        "--encoding": dict(
            choices=("sparse", "dense"), default="sparse",
            help="sparse: the student sees only the visible patches, as in MAE; dense: all, "
                 "with mask tokens for the masked ones, as in BEiT"),
        "--mask-ratio": dict(
            default=0.4, range="(0, 1)",
            help="share of patches that the student does not see"),
        "--teacher": dict(
            default="ViT-B-16/openai",
            help="a checkpoint, an open_clip MODEL/PRETRAINED (a tag, a file or random), or "
                 "timm/NAME"),
        "--cls-weight": dict(default=0.4, help="weight of the [CLS] loss (w of Eq. 8)"),
        "--pixel-weight": dict(default=1.0, help="weight of the pixel loss (w of Eq. 8)"),
    })
    common.add_flags(parser, "loss routing", {
        "--loss-weights": dict(
            choices=("dispatch", "combine", "uniform"), default="dispatch",
            help="weights of the patch losses. dispatch: expert 0's for the token loss and, "
                 "with --encoding dense, expert 1's for the pixel loss; combine: their "
                 "combine weights, not normalized; uniform: none"),
        "--loss-block": dict(
            type=int, nargs="+", range="[0, inf)",
            help="MoE block that gives the weights; several are averaged (default: the last "
                 "one)"),
        "--loss-router": dict(
            action="store_true",
            help="beyond the paper: a router for the losses alone, on the final tokens, also "
                 "with --experts 0"),
        "--detach": dict(
            action="store_true",
            help="weight the loss by constants, which send the router no gradient: the "
                 "paper's main ablation"),
        "--entropy-weight": dict(
            default=[5.0], type=float, nargs="+",
            help="lambda of the entropy of experts 0, 1, ...; the last value counts for the "
                 "rest"),
        "--variation": dict(
            type=float, range="(0, inf)",
            help="beyond the paper: set lambda after each step so that expert 0's weights vary "
                 "by V over an image's patches, in units of their mean", metavar="V"),
        "--entropy-on": dict(
            choices=("dispatch", "combine"), default="dispatch",
            help="weights whose entropy is regularized"),
        "--importance-weight": dict(
            default=0.0, help="weight of the importance loss on combine weights"),
    })
    common.add_flags(parser, "global balancing of the objectives, the baselines", {
        "--balance": dict(
            choices=("static", "gradnorm", "rlw"), default="static",
            help="static: 1, --cls-weight, --pixel-weight; gradnorm: learned; rlw: drawn at "
                 "random in every step"),
        "--gradnorm-alpha": dict(default=0.12, help="how strongly training rates are equalized"),
        "--gradnorm-lr": dict(default=0.025, help="learning rate of its weights"),
    })
    args = common.parse(parser, argv, "pretrain")
    check(parser, args)
    return args


def check(parser, args):
    """Validates flag combinations."""
    patches = (args.image_size // args.patch_size) ** 2
    masked = int(args.mask_ratio * patches)
    static = args.balance == "static"
    dense_pixels = args.encoding == "dense" and "pixel" in args.objective
    routed = args.experts or args.loss_router
    experts = 2 if args.loss_router else args.experts
    depth = PRESETS[args.model]["depth"]
    blocks = args.moe_blocks or list(range(1, depth, 2))
    for met, needs, names in (      # flags that would have no effect
            (args.experts, "--experts above 0", "moe_blocks loss_block"),
            (not args.loss_router, "a run without --loss-router", "loss_block"),
            (routed, "--experts above 0 or --loss-router",
             "loss_weights detach entropy_weight variation entropy_on importance_weight"),
            (not args.variation, "a run without --variation", "entropy_weight entropy_on detach"),
            (args.loss_weights == "dispatch", "--loss-weights dispatch", "variation"),
            (static, "--balance static", "variation"),
            (not dense_pixels, "--encoding sparse or no pixel in --objective", "variation"),
            (len(args.loss_block or []) < 2, "one --loss-block", "variation"),
            (args.loss_weights != "uniform", "--loss-weights dispatch or combine",
             "detach loss_router"),
            ("_" in args.objective, "an --objective of several terms", "balance"),
            (static and "cls" in args.objective, "--balance static, and cls in --objective",
             "cls_weight"),
            (static and "pixel" in args.objective, "--balance static, and pixel in --objective",
             "pixel_weight"),
            (args.balance == "gradnorm", "--balance gradnorm", "gradnorm_alpha gradnorm_lr")):
        for name in names.split():
            if not met and getattr(args, name) != parser.get_default(name):
                parser.error(f"{common.flag(name)} needs {needs}")
    for wrong, message in (
            (args.image_size % args.patch_size,
             f"--image-size {args.image_size} is not a multiple of --patch-size "
             f"{args.patch_size}"),
            (not 0 < masked < patches,
             f"--mask-ratio {args.mask_ratio} masks {masked} of {patches} patches: at least one "
             "must be masked and one visible"),
            (routed and len(args.entropy_weight) > experts,
             f"--entropy-weight has {len(args.entropy_weight)} values for {experts} experts"),
            (experts == 1 and dense_pixels and args.loss_weights != "uniform",
             "--experts 1: with --encoding dense, expert 1 weights the pixel loss, so there must "
             "be 2"),
            (max(blocks) >= depth,
             f"--moe-blocks {max(blocks)}: {args.model} has blocks 0 to {depth - 1}"),
            (set(args.loss_block or []) - set(blocks),
             f"--loss-block {args.loss_block}: the MoE blocks are {blocks}")):
        if wrong:
            parser.error(message)


def build_student(args, teacher_dim: int) -> Explore:
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                        experts=args.experts, moe_blocks=args.moe_blocks,
                        drop_path=args.drop_path)
    encoder.recompute = args.recompute
    return Explore(encoder, teacher_dim, args.mask_ratio, dense=args.encoding == "dense",
                   pixels="pixel" in args.objective, loss_router=args.loss_router)


def build_balance(args, student: Explore,
                  machine: common.Machine) -> FixedWeights:
    """w of Eq. 8."""
    fixed = dict(token=1.0, cls=args.cls_weight, pixel=args.pixel_weight)
    weights = [fixed[name] for name in args.objective.split("_")]
    weights = torch.tensor(weights, device=machine.device)      # [K]
    if args.balance == "gradnorm":
        return GradNorm(weights, student.encoder.norm, args.gradnorm_alpha, args.gradnorm_lr,
                        machine.scaler)
    if args.balance == "rlw":
        return RandomLossWeighting(weights, args.seed)
    return FixedWeights(weights)


def compile_step(args, machine: common.Machine, teacher: Teacher,
                 student: Explore):
    """Compiles the models in place, if asked to -> `explore_losses`, compiled too"""
    if not machine.compile:
        return explore_losses
    teacher.compile()
    if args.balance == "gradnorm":      # it differentiates what follows the blocks, repeatedly
        for block in student.encoder.blocks:
            block.compile()
        return explore_losses
    student.compile()
    return torch.compile(explore_losses)


def main(args):
    machine = common.Machine(args)
    images = data.open_images(args.data, "train", args.image_size, labels=False)
    plan = common.make_plan(args, machine.world, len(images))

    # a frozen teacher of the whole image, and a student of what the mask leaves
    grid = args.image_size // args.patch_size
    teacher = build_teacher(args.teacher, grid)
    sources = {"teacher": digest_weights(teacher), "images": data.digest_names(images)}
    teacher.to(machine.device, machine.amp)
    common.seed_everything(args.seed)
    student = build_student(args, teacher.dim).to(machine.device)
    optimizer = common.adamw(student, args.lr, args.weight_decay, args.betas)

    balance = build_balance(args, student, machine)                         # w of Eq. 8
    objectives = args.objective.split("_")
    experts = 2 if args.loss_router else args.experts
    entropy = EntropyWeights(args.entropy_weight, experts, args.variation).to(machine.device)
    coupling = dict(objectives=objectives, loss_block=args.loss_block,      # Eq. 5 to 7
                    loss_weights=args.loss_weights, detach=args.detach,
                    entropy_weights=entropy.weights, entropy_on=args.entropy_on,
                    importance_weight=args.importance_weight)

    run = Run(args, machine, plan, student.encoder.config, sources, shown=objectives,
              model=student, optimizer=optimizer, balance=balance, entropy=entropy)
    millions = sum(p.numel() for p in student.encoder.parameters()) / 1e6
    run.announce(f"{args.model}, {millions:.1f} M parameters, {args.experts} experts, "
                 f"{args.objective}", f"{len(images)} images")
    if run.first == 0:
        run.save("epoch_0000.pt", 0)
    compute_losses = compile_step(args, machine, teacher, student)
    model = machine.parallel(student).train()
    routers = [module for module in student.modules() if isinstance(module, Router)]
    batches = run.batches(
        data.TrainViews(images, args.image_size, args.seed, grid, args.mask_ratio))

    for step in run.steps():
        common.set_rate(optimizer, common.learning_rate(step, plan, args.lr, args.min_lr))
        common.seed_everything(args.seed, step, machine.rank)       # drop path

        for micro_step in range(1, plan.micro_steps + 1):
            batch = next(batches)
            pixels, mask = data.augment(batch), batch["mask"]       # [B, 3, S, S], bool [B, N]
            with torch.no_grad():
                targets = teacher(pixels)                           # [B, 1 + N, Dt]
            with machine.accumulating(model, last=micro_step == plan.micro_steps):
                with machine.autocast():
                    pred = model(data.normalize(pixels), mask)
                losses, regularizer, metrics = compute_losses(pred, targets, pixels, mask,
                                                              **coupling)
                loss = (balance(step, losses) * losses).sum() + regularizer      # Eq. 8
                machine.scaler.scale(loss / plan.micro_steps).backward()
            entropy.collect(metrics)
            run.log.add(metrics | {"loss": loss.detach(),
                                   "objective_weights": balance.weights.clone()})

        run.log.add(common.optimizer_step(optimizer, machine.scaler, args.clip_grad))
        balance.update()
        if routers:
            scale = torch.stack([router.scale.detach() for router in routers])
            run.log.add({"scale": scale, "lambda": entropy.weights.clone()})
        entropy.update()
        warn_of_collapse(run.end_step(step))                    # log line, checkpoint, signal
    labeled = not isinstance(images, data.Photos)
    script, which = ("knn.py", "epoch_*.pt") if labeled else ("routing.py", "last.pt")
    run.report(f"next: python {script} {shlex.quote(args.out)}/{which} "
               f"--data {shlex.quote(args.data)}")


def warn_of_collapse(line: dict):
    """The paper's sign of collapse, once: weighting has brought a loss far below its mean."""
    for name, value in line.items():
        if name.endswith("_ratio") and value < 0.2:
            warnings.warn(f"the router collapses: {name}, the ratio of weighted to unweighted "
                          "loss, is below 0.2. A higher --entropy-weight, or a lower "
                          "--variation, keeps it near 1",
                          stacklevel=2)


if __name__ == "__main__":
    common.launch(main, parse_args())
