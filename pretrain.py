"""Masked pretraining with expert patch-level loss routing.

    torchrun --nproc_per_node 4 pretrain.py --experts 2 --objective token_cls
    python pretrain.py --data shapes --model vit_nano --image-size 48 --patch-size 6 \\
        --teacher runs/teacher/last.pt --batch-size 64 --lr 2e-3 --epochs 4

The first needs ImageNet; its flags are the defaults, the paper's main model. The second runs on a
laptop, with the teacher that the second example of finetune.py --help trains. What most runs
change: --data, --out, --teacher, --epochs, and --batch-size together with --lr.
"""

import shlex
import warnings

import torch

import common
import data
from balance import GradNorm, Lambda, ObjectiveWeights, RandomLossWeighting
from common import non_negative, non_negative_int, number, positive_int
from losses import explore_losses
from model import DECODER, LOSS_ROUTER_EXPERTS, PRESETS, Explore, Router, build_vit
from run import Run
from teacher import Teacher, build_teacher

# what --objective takes, and the names that losses.explore_losses gives to the terms
OBJECTIVES = {"token": ["token"], "token_cls": ["token", "cls"],
              "token_pixel": ["token", "pixel"], "token_cls_pixel": ["token", "cls", "pixel"]}


def parse_args(argv: list[str] | None = None):
    parser = common.make_parser(__doc__)
    common.add_run_flags(parser, batch_size=4096, lr=1.5e-3, min_lr=1e-6, weight_decay=0.05,
                         clip_grad=3.0)
    common.add_epoch_flags(parser, epochs=300, warmup=40)

    group = parser.add_argument_group("AdamW's betas, and memory")
    group.add_argument("--betas", type=number(float, "[0, 1)"), nargs=2, default=[0.9, 0.95],
                       metavar="B", help="decay rates of AdamW's two running means")
    group.add_argument(
        "--recompute", action="store_true",
        help="of the encoder's blocks, keep only the inputs for the backward pass, and compute the "
             "rest again: less memory, slower steps")

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
        "--objective", default="token_cls", choices=OBJECTIVES,
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
        "--loss-weights", choices=("dispatch", "combine", "uniform", "softmin"),
        default="dispatch",
        help="weights of the patch losses. dispatch: expert 0's for the token loss and, with "
             "--encoding dense, expert 1's for the pixel loss; combine: the same experts' combine "
             "weights, not normalized; uniform: none; softmin, beyond the paper: exp(-loss / "
             "lambda), which needs no experts, with lambda from --entropy-weight or --variation")
    group.add_argument(
        "--loss-block", type=non_negative_int, nargs="+", metavar="B",
        help="the MoE block whose router gives the weights and is regularized; several are "
             "averaged (default: the last one, or the loss router)")
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
             "remaining experts. The smaller lambda is, the more the weights differ: with softmin, "
             "by a factor of e between patches whose losses differ by lambda")
    group.add_argument(
        "--variation", type=number(float, "(0, inf)"), metavar="V",
        help="beyond the paper, instead of --entropy-weight: lambda is s / V or, for a router, "
             "w * s / V with w of Eq. 8. s is the standard deviation of the patch losses within an "
             "image, averaged over images and recent steps")
    group.add_argument("--entropy-on", choices=("dispatch", "combine"), default="dispatch",
                       help="weights whose entropy is regularized")
    group.add_argument("--importance-weight", type=non_negative, default=0.0,
                       help="weight of the importance loss on combine weights")

    group = parser.add_argument_group("weights of the objectives: the paper's baselines")
    group.add_argument(
        "--balance", choices=("static", "gradnorm", "rlw"), default="static",
        help="static: 1 for the token loss, --cls-weight and --pixel-weight for the others; "
             "gradnorm: learned; rlw: drawn at random in each step")
    group.add_argument("--gradnorm-alpha", type=non_negative, default=0.12,
                       help="how strongly the objectives' rates of training are equalized")
    group.add_argument("--gradnorm-lr", type=non_negative, default=0.025,
                       help="learning rate of the weights")

    args = common.parse_run(parser, argv, "pretrain")
    check(parser, args)
    return args


def check(parser, args):
    """Refuses flags that are not at their default and would change nothing, and flags that
    contradict each other.
    """
    objectives = OBJECTIVES[args.objective]
    softmin = args.loss_weights == "softmin"
    router = args.experts or args.loss_router
    a_router = "--experts above 0 or --loss-router"
    by_router = args.loss_weights in ("dispatch", "combine")
    static = args.balance == "static"
    # "is not", because an explicit --entropy-weight 5 equals the default, but counts as given
    lambda_given = args.entropy_weight is not parser.get_default("entropy_weight")

    # flag, the condition without which it is refused, and the condition in words
    for name, met, condition in (
            ("moe_blocks", args.experts, "--experts above 0"),
            ("loss_block", args.experts, "--experts above 0"),
            ("loss_block", not args.loss_router, "a run without --loss-router"),
            ("loss_router", by_router, "--loss-weights dispatch or combine"),
            ("loss_weights", router or softmin, a_router),      # the flag itself may say softmin
            ("detach", router, a_router),
            ("detach", by_router, "--loss-weights dispatch or combine"),
            ("entropy_weight", router or softmin, f"{a_router}, or --loss-weights softmin"),
            ("variation", router or softmin, f"{a_router}, or --loss-weights softmin"),
            ("variation", by_router or softmin, "--loss-weights dispatch, combine or softmin"),
            ("variation", not lambda_given, "a run without --entropy-weight"),
            ("entropy_on", router, a_router),
            ("importance_weight", router, a_router),
            ("balance", len(objectives) > 1, "an --objective of several terms"),
            ("cls_weight", static and "cls" in objectives,
             "--balance static, and cls in --objective"),
            ("pixel_weight", static and "pixel" in objectives,
             "--balance static, and pixel in --objective"),
            ("gradnorm_alpha", args.balance == "gradnorm", "--balance gradnorm"),
            ("gradnorm_lr", args.balance == "gradnorm", "--balance gradnorm")):
        if not met and getattr(args, name) != parser.get_default(name):
            parser.error(f"{common.flag(name)} needs {condition}")

    try:      # ViT refuses sizes and blocks that do not fit; "meta" tensors take no memory
        with torch.device("meta"):
            student = build_student(args, teacher_dim=1)
    except ValueError as error:
        parser.error(str(error))
    moe_blocks = student.encoder.moe_blocks
    patches = student.encoder.grid ** 2
    masked = patches - student.visible
    lambda_count = len(lambda_objectives(args))
    last_expert = max(loss_of_expert(args))      # of {expert: objective}, the last one needed
    for wrong, message in (
            (not 0 < masked < patches,
             f"--mask-ratio {args.mask_ratio} masks {masked} of {patches} patches: at least one "
             "must be masked and one visible"),
            (softmin and not lambda_given and not args.variation,
             "--loss-weights softmin needs --entropy-weight or --variation"),
            (softmin and min(args.entropy_weight) == 0,
             "--loss-weights softmin needs an --entropy-weight above 0"),
            (lambda_given and len(args.entropy_weight) > lambda_count,
             f"--entropy-weight has {len(args.entropy_weight)} values; this run uses at most "
             f"{lambda_count}"),
            (router and by_router and count_experts(args) <= last_expert,
             f"--experts {args.experts}: expert {last_expert} weights the "
             f"{loss_of_expert(args)[last_expert]} loss, so there must be {last_expert + 1}"),
            (set(args.loss_block or []) - set(moe_blocks),
             f"--loss-block {args.loss_block}: the MoE blocks are {moe_blocks}")):
        if wrong:
            parser.error(message)


def loss_of_expert(args) -> dict[int, str]:
    """Which expert serves which patch loss: {expert: objective}

    With --loss-weights dispatch or combine, this expert's weights weight the loss. With softmin,
    only its lambda is used, and the expert need not exist. Whether it exists is for `check` to say.
    """
    losses = {0: "token"}
    # in sparse encoding, the patches of the pixel loss are no tokens of a router
    if "pixel" in OBJECTIVES[args.objective] and (
            args.encoding == "dense" or args.loss_weights == "softmin"):
        losses[1] = "pixel"
    return losses


def count_experts(args) -> int:
    """The number of experts of the router in use, or 0 without a router. It is the loss router if
    there is one, else that of the MoE blocks.
    """
    return LOSS_ROUTER_EXPERTS if args.loss_router else args.experts


def lambda_objectives(args) -> list[str]:
    """The objective of each lambda: entry e is for expert e. Softmin has a lambda for each patch
    loss, even without experts. Experts that weight nothing follow the token loss.
    """
    losses = loss_of_expert(args)
    count = max(1, count_experts(args))      # at least one, even if nothing uses it
    if args.loss_weights == "softmin":
        count = max(count, len(losses))
    return [losses.get(expert, "token") for expert in range(count)]


def build_student(args, teacher_dim: int, decoder: dict = DECODER) -> Explore:
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                        experts=args.experts, moe_blocks=args.moe_blocks,
                        drop_path=args.drop_path)
    encoder.recompute = args.recompute
    return Explore(encoder, teacher_dim, args.mask_ratio, dense=args.encoding == "dense",
                   pixels="pixel" in OBJECTIVES[args.objective], loss_router=args.loss_router,
                   decoder=decoder)


def build_balance(args, student: Explore, process: common.Process) -> ObjectiveWeights:
    """w of Eq. 8: the weights of the objectives."""
    fixed = dict(token=1.0, cls=args.cls_weight, pixel=args.pixel_weight)
    weights = [fixed[name] for name in OBJECTIVES[args.objective]]
    weights = torch.tensor(weights, device=process.device)      # [K]
    if args.balance == "gradnorm":
        return GradNorm(weights, student.encoder.norm, args.gradnorm_alpha, args.gradnorm_lr,
                        process.scaler)
    if args.balance == "rlw":
        return RandomLossWeighting(weights, args.seed)
    return ObjectiveWeights(weights)


def main(args):
    process = common.Process(args)
    dataset = data.open_images(args.data, "train", args.image_size, labels=False)
    plan = common.make_plan(args, process.world, len(dataset))

    # the frozen teacher sees the whole image, the student what the mask leaves of it
    grid = args.image_size // args.patch_size
    teacher = build_teacher(args.teacher, grid)
    teacher.to(process.device, process.amp)      # amp: a dtype, or None for float32
    common.seed_torch(args.seed)
    student = build_student(args, teacher.dim).to(process.device)
    optimizer = common.adamw(student, args.lr, args.weight_decay, args.betas)

    objectives = OBJECTIVES[args.objective]
    balance = build_balance(args, student, process)                         # w of Eq. 8
    lambdas = Lambda(args.entropy_weight, lambda_objectives(args), objectives, args.variation,
                     times_w=args.loss_weights != "softmin").to(process.device)
    coupling = dict(objectives=objectives, loss_block=args.loss_block,      # Eq. 5 to 7
                    loss_weights=args.loss_weights, detach=args.detach,
                    entropy_on=args.entropy_on, importance_weight=args.importance_weight)
    stateful = dict(model=student, optimizer=optimizer, balance=balance)
    if args.variation:
        stateful["lambda"] = lambdas

    run = Run(args, process, plan, dataset, encoder=student.encoder.config, stateful=stateful,
              shown=objectives)      # in the progress bar
    run.resume()
    millions = sum(p.numel() for p in student.encoder.parameters()) / 1e6
    run.announce(f"{args.model}, {millions:.1f} M parameters, {args.experts} experts, "
                 f"{args.objective}", f"{len(dataset)} images")
    if run.first == 0:
        run.save("epoch_0000.pt", 0)
    compute_losses = compile_all(args, teacher, student) if process.compile else explore_losses
    model = process.parallel(student).train()
    routers = [module for module in student.modules() if isinstance(module, Router)]
    batches = run.batches(
        data.TrainViews(dataset, args.image_size, args.seed, grid, args.mask_ratio))

    for step in run.steps():
        common.set_rate(optimizer, plan.learning_rate(step))
        common.seed_torch(args.seed, step, process.rank)            # drop path
        w = balance(step)                                           # [K]

        for micro_step in range(1, plan.micro_steps + 1):
            batch = next(batches)
            images, mask = data.augment(batch), batch["mask"]       # [B, 3, S, S], bool [B, N]
            with torch.no_grad():
                targets = teacher(images)      # it normalizes the images itself -> [B, 1 + N, Dt]
            with process.accumulating(model, last=micro_step == plan.micro_steps):
                with process.autocast():
                    pred = model(data.normalize(images), mask)
                losses, regularizer, metrics = compute_losses(pred, targets, images, mask,
                                                              lambdas=lambdas(w), **coupling)
                loss = (w * losses).sum() + regularizer             # Eq. 8, and Eq. 7
                balance.observe(losses)
                lambdas.observe(metrics)
                process.scaler.scale(loss / plan.micro_steps).backward()
            run.log.add(metrics | {"loss": loss.detach()})

        run.log.add(common.optimizer_step(optimizer, process.scaler, args.clip_grad))
        run.log.add({"objective_weights": w})
        lambdas.update()
        if routers or args.loss_weights == "softmin":
            # Lambda is logged after its update: with --variation, the lambda that the first step
            # used is only a default, and would distort the mean in the log's first line.
            run.log.add({"lambda": lambdas(w)})
        if routers:
            run.log.add({"scale": torch.stack([router.scale.detach() for router in routers])})
        balance.update()
        line = run.end_step(step)      # saves and logs if it is time, and stops after a signal
        warn_of_collapse(args, line)
    run.report(next_commands(args))


def compile_all(args, teacher: Teacher, student: Explore):
    """Compiles the models in place, and returns the function of the losses: `explore_losses`,
    compiled unless GradNorm is used.

    GradNorm runs backward once for each objective, through the losses and what follows the
    encoder's blocks. A compiled graph may refuse that, because its first backward pass may free
    what the next one needs. With --recompute, a checkpoint around each block calls it in the
    forward pass and again in the backward pass, and stays outside of the compiled code. With
    either, the encoder's blocks are compiled one by one, and the rest of the student is not.
    """
    blockwise = args.balance == "gradnorm" or args.recompute
    for module in [teacher, *(student.encoder.blocks if blockwise else [student])]:
        module.compile()
    return explore_losses if args.balance == "gradnorm" else torch.compile(explore_losses)


def next_commands(args) -> str:
    out, where = shlex.quote(args.out), f"--data {shlex.quote(args.data)}"
    routing = f"python routing.py {out}/last.pt {where}; " if count_experts(args) else ""
    return (f"next: {routing}python plot.py {out}; with labels: "
            f"python knn.py {out}/epoch_*.pt {where}")


def warn_of_collapse(args, line: dict):
    """Warns if a loss that a router weights is far below the unweighted one, which is how collapse
    shows.

    Without a preference, the ratio is 1. In the paper's collapsed run, it was 0.13; 0.2 is our
    limit. Softmin gets there without harm where the rest of the targets is learned well, and it has
    no router that could collapse.
    """
    for name, value in line.items():
        if name.endswith("_ratio") and value < 0.2 and args.loss_weights != "softmin":
            warnings.warn(f"the weights collapse: {name}, the ratio of weighted to unweighted "
                          "loss, is below 0.2. A higher --entropy-weight, or a lower "
                          "--variation, keeps it near 1",
                          stacklevel=2)


if __name__ == "__main__":
    common.launch(main, parse_args())
