"""Masked pretraining with expert patch-level loss routing.

    torchrun --nproc_per_node 4 pretrain.py --experts 2 --objective token_cls
    python pretrain.py --data shapes --model vit_nano --image-size 48 --patch-size 6 \\
        --teacher runs/teacher/last.pt --batch-size 64 --lr 2e-3 --epochs 4 --warmup-epochs 1

The first command trains the paper's main model on ImageNet; the flags that it names are the
defaults. The second command runs on a laptop; its teacher comes from the second command in
finetune.py --help.
"""

import argparse
import functools

import torch

import common
import data
import optim
from balance import GradNorm, ObjectiveWeights, RandomLossWeighting
from common import fraction, non_negative, non_negative_int, positive_int
from encoders import build_frozen
from losses import EXPERTS, explore_losses
from model import DECODER, PRESETS, Explore, build_vit, normalize
from run import Run

# {value of --objective: its terms, by their names in losses.explore_losses}
OBJECTIVES = {"token": ["token"], "token_cls": ["token", "cls"],
              "token_pixel": ["token", "pixel"], "token_cls_pixel": ["token", "cls", "pixel"]}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    common.add_train_flags(parser, "pretrain", batch_size=4096, lr=1.5e-3, min_lr=1e-6,
                           weight_decay=0.05, clip_grad=3.0, length=300, warmup=40,
                           save_every=10)

    group = parser.add_argument_group("student")
    group.add_argument(
        "--model", choices=PRESETS, default="vit_base",
        help="width and depth; the paper uses vit_base, and vit_nano is for small images on CPUs")
    group.add_argument("--image-size", type=positive_int, default=224,
                       help="side of an image in pixels")
    group.add_argument("--patch-size", type=positive_int, default=16,
                       help="side of a patch in pixels")
    group.add_argument("--experts", type=non_negative_int, default=2,
                       help="experts per Soft-MoE block; 0 for a plain ViT")
    group.add_argument(
        "--moe-blocks", type=non_negative_int, nargs="+", metavar="B",
        help="blocks, counted from 0, in which a Soft-MoE replaces the MLP (default: 1 3 5 ...)")
    group.add_argument("--drop-path", type=fraction, default=0.1,
                       help="stochastic depth: drop probability of the last block, which rises "
                            "linearly from 0 at the first block")
    group.add_argument(
        "--recompute", action="store_true",
        help="activation checkpointing: compute the encoder's blocks again in the backward pass, "
             "for less memory and slower steps")

    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective", default="token_cls", choices=OBJECTIVES,
        help="losses to minimize: token distills the teacher's patch tokens, cls aligns [CLS], "
             "pixel reconstructs pixels")
    group.add_argument(
        "--encoding", choices=("sparse", "dense"), default="sparse",
        help="sparse: the student sees only the visible patches, as in MAE; dense: the student "
             "sees mask tokens in place of the masked patches, as in BEiT")
    group.add_argument("--mask-ratio", type=fraction, default=0.4,
                       help="fraction of patches to mask")
    group.add_argument(
        "--teacher", type=common.path, default="ViT-B-16/openai",
        help="a checkpoint file; or open_clip's MODEL/PRETRAINED, where PRETRAINED is a tag, a "
             "file or random; or timm/NAME")
    group.add_argument("--cls-weight", type=non_negative, default=0.4,
                       help="weight of the [CLS] loss, w in Eq. 8")
    group.add_argument("--pixel-weight", type=non_negative, default=1.0,
                       help="weight of the pixel loss, w in Eq. 8")

    group = parser.add_argument_group("loss routing")
    group.add_argument(
        "--loss-weights", choices=("dispatch", "combine", "uniform"), default="dispatch",
        help="weights of the patch losses. dispatch: expert 0's dispatch weights for the token "
             "loss and, with --encoding dense, expert 1's for the pixel loss; combine: the same "
             "experts' combine weights, not normalized; uniform: all patches count equally, but "
             "the router is still regularized")
    group.add_argument(
        "--loss-block", type=non_negative_int, nargs="+", metavar="B",
        help="MoE blocks whose routers weight the losses and are regularized; both are averaged "
             "over several blocks (default: the last MoE block)")
    group.add_argument(
        "--detach", action="store_true",
        help="the paper's main ablation: the weights still weight the loss, but send the router "
             "no gradient")
    group.add_argument(
        "--entropy-weight", type=non_negative, nargs="+", default=[5.0], metavar="L",
        help="lambda, the weight of the entropy, for experts 0, 1, ...; the last value also counts "
             "for the remaining experts. With a smaller lambda, patch weights differ more; "
             "RUNNING.md says how to choose it")
    group.add_argument("--entropy-on", choices=("dispatch", "combine"), default="dispatch",
                       help="routing weights whose entropy is regularized")
    group.add_argument("--importance-weight", type=non_negative, default=0.0,
                       help="weight of the importance loss, which is on combine weights")

    group = parser.add_argument_group("objective weights: the paper's baselines")
    group.add_argument(
        "--balance", choices=("static", "gradnorm", "rlw"), default="static",
        help="objective weights. static: 1 for the token loss, --cls-weight and --pixel-weight for "
             "the others; gradnorm: learned; rlw: random in each step")
    group.add_argument("--gradnorm-alpha", type=non_negative, default=0.12,
                       help="how strongly GradNorm equalizes the objectives' training rates")
    group.add_argument("--gradnorm-lr", type=non_negative, default=0.025,
                       help="learning rate of GradNorm's weights")

    args = common.parse_run(parser, argv)
    if wrong := find_contradiction(parser, args):
        parser.error(wrong)
    return args


def find_contradiction(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """Returns an error message if flags contradict each other or have no effect, or None."""
    def given(*names: str) -> list[str]:
        return [common.flag(name) for name in names
                if getattr(args, name) != parser.get_default(name)]

    objectives = OBJECTIVES[args.objective]
    routed = given("moe_blocks", "loss_weights", "loss_block", "detach", "entropy_weight",
                   "entropy_on", "importance_weight")
    if routed and not args.experts:
        return f"{routed[0]} needs --experts above 0"
    for name in ("cls", "pixel"):
        if (weight := given(f"{name}_weight")) and (
                name not in objectives or args.balance != "static"):
            return f"{weight[0]} needs {name} in --objective, and --balance static"
    if (rate := given("gradnorm_alpha", "gradnorm_lr")) and args.balance != "gradnorm":
        return f"{rate[0]} needs --balance gradnorm"
    if len(args.entropy_weight) > max(1, args.experts):
        return f"--entropy-weight has {len(args.entropy_weight)} values for {args.experts} experts"
    for name, expert in EXPERTS.items():
        weighted = name in objectives and (name != "pixel" or args.encoding == "dense")
        if weighted and args.loss_weights != "uniform" and 0 < args.experts <= expert:
            return (f"--experts {args.experts}: expert {expert} weights the {name} loss, so there "
                    f"must be {expert + 1}")
    if args.loss_weights == "uniform" and args.detach:
        return "--detach has no effect with --loss-weights uniform"
    combine = given("entropy_on", "importance_weight")
    combine += ["--loss-weights combine"] * (args.loss_weights == "combine")
    if combine and args.experts == 1:
        return f"{combine[0]} needs 2 experts: a single expert's combine weights are all 1"
    if args.balance != "static" and len(objectives) == 1:
        return f"--balance {args.balance} needs several objectives, and --objective has one"
    try:      # "meta" tensors take no memory
        with torch.device("meta"):
            student = build_student(args, teacher_dim=1)
    except ValueError as error:      # sizes or blocks that do not fit
        return str(error)
    patches = student.encoder.grid ** 2
    masked = data.count_masked(student.encoder.grid, args.mask_ratio)
    if not 0 < masked < patches:
        return f"--mask-ratio {args.mask_ratio} masks {masked} of {patches} patches"
    moe_blocks = student.encoder.moe_blocks
    if not set(args.loss_block or []) <= set(moe_blocks):
        return f"--loss-block {args.loss_block}: the MoE blocks are {moe_blocks}"
    return None


def build_student(args, teacher_dim: int, decoder: dict = DECODER) -> Explore:
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                        experts=args.experts, moe_blocks=args.moe_blocks,
                        drop_path=args.drop_path)
    encoder.recompute = args.recompute
    return Explore(encoder, teacher_dim, dense=args.encoding == "dense",
                   pixels="pixel" in OBJECTIVES[args.objective], decoder=decoder)


def build_balance(args, student: Explore, process: common.Process) -> ObjectiveWeights:
    """Builds the objective weights, w in Eq. 8."""
    fixed = dict(token=1.0, cls=args.cls_weight, pixel=args.pixel_weight)
    weights = [fixed[name] for name in OBJECTIVES[args.objective]]
    weights = torch.tensor(weights, device=process.device)      # [K]
    if args.balance == "gradnorm":
        return GradNorm(weights, student.encoder.norm, args.gradnorm_alpha, args.gradnorm_lr,
                        process.scaler)
    if args.balance == "rlw":
        return RandomLossWeighting(weights, functools.partial(common.generator, "rlw", args.seed))
    return ObjectiveWeights(weights)


def main(args):
    process = common.Process(args)
    dataset = data.open_images(args.data, "train", args.image_size, labels=False)
    micro_steps, epoch_steps = data.plan_steps(args, process.world, len(dataset))
    steps = args.epochs * epoch_steps

    grid = args.image_size // args.patch_size
    teacher = build_frozen(args.teacher, grid)              # always sees the whole image
    teacher.to(process.device, process.amp)                 # amp: a dtype, or None for float32
    common.seed_torch("weights", args.seed)
    student = build_student(args, teacher.dim).to(process.device)
    optimizer = optim.adamw(student, args.lr, args.weight_decay, betas=(0.9, 0.95))
    balance = build_balance(args, student, process)                             # w in Eq. 8

    lambdas = args.entropy_weight + args.entropy_weight[-1:] * args.experts     # repeat the last
    lambdas = torch.tensor(lambdas[:args.experts], device=process.device)       # [E]
    loss_settings = dict(
        objectives=OBJECTIVES[args.objective], loss_block=args.loss_block, lambdas=lambdas,
        loss_weights=args.loss_weights, detach=args.detach, entropy_on=args.entropy_on,
        importance_weight=args.importance_weight)

    title = f"{args.model} with {args.experts} experts, taught by {args.teacher},"
    run = Run(args, process, title, steps=steps, epoch_steps=epoch_steps, image_count=len(dataset),
              encoder=student.encoder.config, digest=teacher.digest, model=student,
              optimizer=optimizer, balance=balance)
    run.resume()                        # loads last.pt if it exists, else saves epoch_0000.pt
    if args.compile:
        student.encoder.compile_blocks()
        teacher.compile()
    parallel = process.parallel(student.train())            # DDP if there are several processes
    views = data.TrainViews(dataset, args.image_size, args.seed, grid, args.mask_ratio)
    batches = run.batches(views, micro_steps)               # from the step of last.pt on

    for step in run.steps():                                # a progress bar
        lr = optim.learning_rate(step, steps, args.warmup_epochs * epoch_steps, args.lr,
                                 args.min_lr)
        optim.set_rate(optimizer, lr)
        common.seed_torch("step", args.seed, step, process.rank)    # drop path: resumes exactly
        w = balance(step)                                           # [K]

        for micro_step in range(1, micro_steps + 1):
            batch = next(batches)
            images, mask = data.augment(batch), batch["mask"]       # [B, 3, S, S], bool [B, N]
            with torch.no_grad():
                targets = teacher(images)                           # [B, 1 + N, Dt]
            with process.accumulating(parallel, last=micro_step == micro_steps):
                with process.autocast():
                    pred = parallel(normalize(images), mask, batch["ids_keep"])
                # pred.routing weights the patches, and learns from their losses
                losses, regularizer, metrics = explore_losses(pred, targets, images, mask,
                                                              **loss_settings)
                loss = (w * losses).sum() + regularizer             # Eq. 8, and Eq. 7
                balance.observe(losses)
                process.scaler.scale(loss / micro_steps).backward()
            run.log(metrics, loss=loss)

        run.log(optim.optimizer_step(optimizer, process.scaler, args.clip_grad),
                objective_weights=w)
        balance.update()
        run.end_step(step, lr)                  # logs and saves; after a signal, raises Stopped


if __name__ == "__main__":
    common.launch(main, parse_args())
