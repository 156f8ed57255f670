"""Masked pretraining with expert patch-level loss routing.

    torchrun --nproc_per_node 4 pretrain.py --experts 2 --objective token_cls

Both flags are the defaults, which are the paper's main model.
"""

import shlex
import warnings

import torch

import common
import data
from balance import EntropyWeights, FixedWeights, GradNorm, RandomLossWeighting
from common import non_negative, non_negative_int, number, positive_int
from losses import explore_losses
from model import DECODER, PRESETS, Explore, Router, build_vit
from run import Run
from teacher import Teacher, build_teacher


def parse_args(argv: list[str] | None = None):
    parser = common.make_parser(__doc__)
    common.add_run_flags(parser, batch_size=4096, lr=1.5e-3, min_lr=1e-6, weight_decay=0.05,
                         clip_grad=3.0)
    common.add_epoch_flags(parser, epochs=300, warmup=40)

    group = parser.add_argument_group("more of AdamW and of the machine")
    group.add_argument("--betas", type=number(float, "[0, 1)"), nargs=2, default=[0.9, 0.95],
                       metavar="B", help="decay rates of AdamW's two running means")
    group.add_argument(
        "--recompute", action="store_true",
        help="keep only the inputs of the blocks for the backward pass, and compute the rest "
             "again: less memory, slower steps")

    group = parser.add_argument_group("student")
    group.add_argument(
        "--model", choices=PRESETS, default="vit_base",
        help="width and depth; vit_base is the paper's, vit_nano is for small images on CPUs")
    group.add_argument("--image-size", type=positive_int, default=224, help="pixels a side")
    group.add_argument("--patch-size", type=positive_int, default=16, help="pixels a side")
    group.add_argument("--experts", type=non_negative_int, default=2,
                       help="experts of each Soft-MoE block; 0 for a plain ViT")
    group.add_argument(
        "--moe-blocks", type=non_negative_int, nargs="+", metavar="B",
        help="blocks, counted from 0, whose MLP is a Soft-MoE (default: 1 3 5 ...)")
    group.add_argument("--drop-path", type=number(float, "[0, 1)"), default=0.1,
                       help="stochastic depth of the last block, rising from 0 at the first")

    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective", default="token_cls",
        choices=("token", "token_cls", "token_pixel", "token_cls_pixel"),
        help="what is learned: token distills the teacher's patch tokens, cls aligns [CLS], pixel "
             "reconstructs pixels")
    group.add_argument(
        "--encoding", choices=("sparse", "dense"), default="sparse",
        help="sparse: the student sees only the visible patches, as in MAE; dense: it sees mask "
             "tokens in place of the masked patches, as in BEiT")
    group.add_argument("--mask-ratio", type=number(float, "(0, 1)"), default=0.4,
                       help="share of patches that the student does not see")
    group.add_argument(
        "--teacher", default="ViT-B-16/openai",
        help="a checkpoint file; or MODEL/PRETRAINED of open_clip, where PRETRAINED is a tag, a "
             "file or random; or timm/NAME")
    group.add_argument("--cls-weight", type=non_negative, default=0.4,
                       help="weight of the [CLS] loss, w of Eq. 8")
    group.add_argument("--pixel-weight", type=non_negative, default=1.0,
                       help="weight of the pixel loss, w of Eq. 8")

    group = parser.add_argument_group("loss routing")
    group.add_argument(
        "--loss-weights", choices=("dispatch", "combine", "uniform"), default="dispatch",
        help="weights of the patch losses. dispatch: expert 0's for the token loss and, with "
             "--encoding dense, expert 1's for the pixel loss; combine: their combine weights, "
             "not normalized; uniform: none")
    group.add_argument(
        "--loss-block", type=non_negative_int, nargs="+", metavar="B",
        help="the MoE block that gives the weights; several are averaged (default: the last one)")
    group.add_argument(
        "--loss-router", action="store_true",
        help="beyond the paper: a router for the losses alone, on the final tokens; works with "
             "--experts 0, too")
    group.add_argument(
        "--detach", action="store_true",
        help="the paper's main ablation: the weights still weight the loss, but send the router "
             "no gradient")
    group.add_argument(
        "--entropy-weight", type=non_negative, nargs="+", default=[5.0], metavar="L",
        help="lambda, the weight of the entropy of experts 0, 1, ...; the last one counts for the "
             "remaining experts")
    group.add_argument(
        "--variation", type=number(float, "(0, inf)"), metavar="V",
        help="beyond the paper: adapt lambda after each step, so that expert 0's weights vary by V "
             "over the patches of an image, in units of their mean")
    group.add_argument("--entropy-on", choices=("dispatch", "combine"), default="dispatch",
                       help="weights whose entropy is regularized")
    group.add_argument("--importance-weight", type=non_negative, default=0.0,
                       help="weight of the importance loss on combine weights")

    group = parser.add_argument_group("weights of the objectives: the paper's baselines")
    group.add_argument(
        "--balance", choices=("static", "gradnorm", "rlw"), default="static",
        help="static: 1, --cls-weight and --pixel-weight; gradnorm: learned; rlw: drawn at random "
             "in each step")
    group.add_argument("--gradnorm-alpha", type=non_negative, default=0.12,
                       help="how strongly the objectives' rates of training are equalized")
    group.add_argument("--gradnorm-lr", type=non_negative, default=0.025,
                       help="learning rate of the weights")

    args = common.parse_run(parser, argv, "pretrain")
    if args.warmup_epochs is None:
        args.warmup_epochs = args.epochs * (40 / 300)
    check(parser, args)
    return args


def check(parser, args):
    """Refuses flags that would change nothing, and flags that contradict each other."""
    static = args.balance == "static"
    dense_pixels = args.encoding == "dense" and "pixel" in args.objective
    routed = args.experts or args.loss_router

    def needs(met, condition: str, *names: str):
        """Refuses flags that are not at their defaults, unless their condition is met."""
        for name in names:
            if not met and getattr(args, name) != parser.get_default(name):
                parser.error(f"{common.flag(name)} needs {condition}")

    needs(args.experts, "--experts above 0", "moe_blocks", "loss_block")
    needs(not args.loss_router, "a run without --loss-router", "loss_block")
    needs(routed, "--experts above 0 or --loss-router", "loss_weights", "detach",
          "entropy_weight", "variation", "entropy_on", "importance_weight")
    needs(not args.variation, "a run without --variation", "entropy_weight", "entropy_on",
          "detach")
    # losses.routing_gain assumes one routed loss, weights of one router, and w that do not change
    needs(args.loss_weights == "dispatch", "--loss-weights dispatch", "variation")
    needs(static, "--balance static", "variation")
    needs(not dense_pixels, "--encoding sparse or no pixel in --objective", "variation")
    needs(len(args.loss_block or []) < 2, "one --loss-block", "variation")
    needs(args.loss_weights != "uniform", "--loss-weights dispatch or combine", "detach",
          "loss_router")
    needs("_" in args.objective, "an --objective of several terms", "balance")
    needs(static and "cls" in args.objective, "--balance static, and cls in --objective",
          "cls_weight")
    needs(static and "pixel" in args.objective, "--balance static, and pixel in --objective",
          "pixel_weight")
    needs(args.balance == "gradnorm", "--balance gradnorm", "gradnorm_alpha", "gradnorm_lr")

    def refuse(wrong, message: str):
        if wrong:
            parser.error(message)

    patches = (args.image_size // args.patch_size) ** 2
    masked = int(args.mask_ratio * patches)
    experts = 2 if args.loss_router else args.experts      # of the router that weights the losses
    depth = PRESETS[args.model]["depth"]
    blocks = args.moe_blocks or list(range(1, depth, 2))
    refuse(args.image_size % args.patch_size,
           f"--image-size {args.image_size} is not a multiple of --patch-size {args.patch_size}")
    refuse(not 0 < masked < patches,
           f"--mask-ratio {args.mask_ratio} masks {masked} of {patches} patches: at least one must "
           "be masked and one visible")
    refuse(routed and len(args.entropy_weight) > experts,
           f"--entropy-weight has {len(args.entropy_weight)} values for {experts} experts")
    refuse(experts == 1 and dense_pixels and args.loss_weights != "uniform",
           "--experts 1: with --encoding dense, expert 1 weights the pixel loss, so there must "
           "be 2")
    refuse(max(blocks) >= depth,
           f"--moe-blocks {max(blocks)}: {args.model} has blocks 0 to {depth - 1}")
    refuse(set(args.loss_block or []) - set(blocks),
           f"--loss-block {args.loss_block}: the MoE blocks are {blocks}")


def build_student(args, teacher_dim: int, decoder: dict = DECODER) -> Explore:
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                        experts=args.experts, moe_blocks=args.moe_blocks,
                        drop_path=args.drop_path)
    encoder.recompute = args.recompute
    return Explore(encoder, teacher_dim, args.mask_ratio, dense=args.encoding == "dense",
                   pixels="pixel" in args.objective, loss_router=args.loss_router,
                   decoder=decoder)


def build_balance(args, student: Explore, machine: common.Machine) -> FixedWeights:
    """w of Eq. 8: the weights of the objectives."""
    fixed = dict(token=1.0, cls=args.cls_weight, pixel=args.pixel_weight)
    weights = [fixed[name] for name in args.objective.split("_")]
    weights = torch.tensor(weights, device=machine.device)      # [K]
    if args.balance == "gradnorm":
        return GradNorm(weights, student.encoder.norm, args.gradnorm_alpha, args.gradnorm_lr,
                        machine.scaler)
    if args.balance == "rlw":
        return RandomLossWeighting(weights, args.seed)
    return FixedWeights(weights)


def compile_models(args, machine: common.Machine, teacher: Teacher, student: Explore):
    """Compiles the models in place, if asked to -> `explore_losses`, compiled if possible"""
    if not machine.compile:
        return explore_losses
    teacher.compile()
    if args.balance == "gradnorm":
        # it differentiates what follows the blocks once for each objective, but the backward pass
        # of a compiled graph must run only once
        for block in student.encoder.blocks:
            block.compile()
        return explore_losses
    student.compile()
    return torch.compile(explore_losses)


def main(args):
    machine = common.Machine(args)
    dataset = data.open_images(args.data, "train", args.image_size, labels=False)
    plan = common.make_plan(args, machine.world, len(dataset))

    # a frozen teacher of the whole image, and a student of what the mask leaves
    grid = args.image_size // args.patch_size
    teacher = build_teacher(args.teacher, grid)
    teacher.to(machine.device, machine.amp)      # amp: a dtype, or None for float32
    common.seed_everything(args.seed)
    student = build_student(args, teacher.dim).to(machine.device)
    optimizer = common.adamw(student, args.lr, args.weight_decay, args.betas)

    balance = build_balance(args, student, machine)                         # w of Eq. 8
    objectives = args.objective.split("_")
    experts = 2 if args.loss_router else args.experts
    entropy = EntropyWeights(args.entropy_weight, experts, args.variation).to(machine.device)
    coupling = dict(objectives=objectives, loss_block=args.loss_block,      # Eq. 5 to 7
                    loss_weights=args.loss_weights, detach=args.detach,
                    entropy_weights=entropy.weights,      # the tensor that entropy.update() changes
                    entropy_on=args.entropy_on, importance_weight=args.importance_weight)

    run = Run(args, machine, plan, dataset, student.encoder.config, shown=objectives,
              model=student, optimizer=optimizer, balance=balance, entropy=entropy)
    millions = sum(p.numel() for p in student.encoder.parameters()) / 1e6
    run.announce(f"{args.model}, {millions:.1f} M parameters, {args.experts} experts, "
                 f"{args.objective}", f"{len(dataset)} images")
    if run.first == 0:
        run.save("epoch_0000.pt", 0)
    compute_losses = compile_models(args, machine, teacher, student)
    model = machine.parallel(student).train()
    routers = [module for module in student.modules() if isinstance(module, Router)]
    batches = run.batches(
        data.TrainViews(dataset, args.image_size, args.seed, grid, args.mask_ratio))

    for step in run.steps():
        common.set_rate(optimizer, plan.learning_rate(step))
        common.seed_everything(args.seed, step, machine.rank)       # drop path

        for micro_step in range(1, plan.micro_steps + 1):
            batch = next(batches)
            images, mask = data.augment(batch), batch["mask"]       # [B, 3, S, S], bool [B, N]
            with torch.no_grad():
                targets = teacher(images)      # normalizes them itself -> [B, 1 + N, Dt]
            with machine.accumulating(model, last=micro_step == plan.micro_steps):
                with machine.autocast():
                    pred = model(data.normalize(images), mask)
                losses, regularizer, metrics = compute_losses(pred, targets, images, mask,
                                                              **coupling)
                loss = (balance(step, losses) * losses).sum() + regularizer      # Eq. 8
                machine.scaler.scale(loss / plan.micro_steps).backward()
            if routers:
                entropy.collect(metrics)                  # its own: routing_gain, routing_spread
            run.log.add(metrics | {"loss": loss.detach(),
                                   "objective_weights": balance.weights.clone()})

        run.log.add(common.optimizer_step(optimizer, machine.scaler, args.clip_grad))
        balance.update()
        if routers:
            scale = torch.stack([router.scale.detach() for router in routers])
            run.log.add({"scale": scale} | entropy.update())
        line = run.end_step(step)      # writes the log and checkpoints, stops after a signal
        warn_of_collapse(line)
    out = shlex.quote(args.out)
    what = f"knn.py {out}/epoch_*.pt" if data.has_labels(args.data) else f"routing.py {out}/last.pt"
    run.report(f"next: python {what} --data {shlex.quote(args.data)} && python plot.py {out}")


def warn_of_collapse(line: dict):
    """Warns once if weighting brings a loss far below its mean, which is how collapse shows.

    The paper's collapsed run had a ratio of 0.13, and its others about 1; 0.2 is our limit.
    """
    for name, value in line.items():
        if name.endswith("_ratio") and value < 0.2:
            warnings.warn(f"the router collapses: {name}, the ratio of weighted to unweighted "
                          "loss, is below 0.2. A higher --entropy-weight, or a lower "
                          "--variation, keeps it near 1",
                          stacklevel=2)


if __name__ == "__main__":
    common.launch(main, parse_args())
