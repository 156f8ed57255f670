"""Stage 1: masked pretraining with expert patch-level loss routing. Without flags: the paper's Token+CLS, 2 experts.

    torchrun --nproc_per_node 4 pretrain.py --experts 2 --objective token_cls
    python pretrain.py --demo
"""

import argparse
import contextlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import common
import data
from common import UserError
from losses import cls_loss, dispatch_entropy, routed_mean, token_loss, variation
from model import PRESETS, Explore, Routing, build_teacher, build_vit, shuffle_visible, take

# What --demo sets where no flag says otherwise: small enough for two cores and three minutes
DEMO = dict(data="shapes", out="runs/demo", model="vit_nano", image_size=48, patch_size=8, teacher="runs/demo-teacher/last.pt",
            batch_size=64, epochs=6, warmup_epochs=1, lr=2e-3, drop_path=0.0, entropy_weight=[0.1], amp="off", save_every=1)


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
    group.add_argument("--objective", choices=("token", "token_cls"), default="token_cls",
                       help="distil patch tokens, or patch tokens and [CLS] (default: %(default)s)")
    group.add_argument("--mask-ratio", type=common.open_fraction, default=0.4, metavar="R",
                       help="share of patches that the student does not see (default: %(default)s)")
    group.add_argument("--teacher", default="ViT-B-16/openai",
                       help="a checkpoint of ours, or an open_clip MODEL/PRETRAINED where PRETRAINED is a tag, a file or "
                            "random (default: %(default)s)")
    group.add_argument("--cls-weight", type=common.non_negative, default=0.4, metavar="W", help="default: %(default)s")
    group = parser.add_argument_group("loss routing")
    group.add_argument("--loss-weights", choices=("dispatch", "uniform"), default="dispatch",
                       help="what weights the token loss over patches: expert 0's dispatch weights, or nothing "
                            "(default: %(default)s)")
    group.add_argument("--loss-block", type=common.natural, nargs="+", metavar="B",
                       help="MoE block that gives the weights; several are averaged (default: the last MoE block)")
    group.add_argument("--detach", action="store_true",
                       help="weight the loss, but pass no gradient of it to the router: the paper's main ablation")
    group.add_argument("--entropy-weight", type=common.finite, nargs="+", default=[5.0], metavar="L",
                       help="lambda of the dispatch entropy, one for all experts or one for each (default: 5.0)")
    parser.add_argument("--demo", action="store_true",
                        help="small defaults and the whole way: a teacher, pretraining, k-NN, heatmaps; no download")
    if parser.parse_known_args(argv)[0].demo:
        parser.set_defaults(**DEMO)
    args = parser.parse_args(argv)
    args.out = str(common.run_folder("pretrain", args, parser))
    return args


def check(args: argparse.Namespace):
    """Refuses by name what has no meaning together; fills in the loss block."""
    if args.image_size % args.patch_size:
        raise UserError(f"--image-size {args.image_size} is not a multiple of --patch-size {args.patch_size}")
    patches = (args.image_size // args.patch_size) ** 2
    if not 0 < int(args.mask_ratio * patches) < patches:
        raise UserError(f"--mask-ratio {args.mask_ratio} masks {int(args.mask_ratio * patches)} of {patches} patches: "
                        "at least one must be masked and one visible")
    if not args.experts:
        for name in ("detach", "loss_block", "moe_blocks"):
            if getattr(args, name):
                raise UserError(f"{common.flag(name)} needs experts, but --experts is 0")
        return
    if args.detach and args.loss_weights == "uniform":
        raise UserError("--detach has nothing to detach with --loss-weights uniform")
    if len(args.entropy_weight) not in (1, args.experts):
        raise UserError(f"--entropy-weight has {len(args.entropy_weight)} values: give one, or one for each of the "
                        f"{args.experts} experts")
    depth = PRESETS[args.model]["depth"]
    blocks = list(range(1, depth, 2)) if args.moe_blocks is None else args.moe_blocks
    if max(blocks) >= depth:
        raise UserError(f"--moe-blocks {max(blocks)}: {args.model} has blocks 0 to {depth - 1}")
    args.loss_block = args.loss_block or [max(blocks)]
    for block in args.loss_block:
        if block not in blocks:
            raise UserError(f"--loss-block {block} has no experts: the MoE blocks are {' '.join(map(str, blocks))}")


def objectives(args: argparse.Namespace, pred: Tensor, targets: Tensor, routing: dict[int, Routing],
               ids_keep: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The training objective (Eq. 8 plus Eq. 7) -> (its value, detached metrics for the log).

    pred [B, 1 + V, D] are the student's visible tokens in the order of ids_keep [B, V], targets [B, 1 + N, D] the
    teacher's tokens of the whole image.
    """
    pred, targets = pred.float(), targets.float()
    per_patch = token_loss(pred[:, 1:], take(targets[:, 1:], ids_keep))                              # [B, V]
    metrics = {"token_unweighted": per_patch.mean()}

    weight = torch.ones_like(per_patch)
    if routing:
        dispatch = torch.stack([routing[block].dispatch for block in args.loss_block])               # [blocks, B, T, E]
        if args.loss_weights == "dispatch":
            weight = dispatch.mean(0)[:, 1:, 0]      # expert 0's weight of each patch: what couples loss and router
            if args.detach:
                weight = weight.detach()
    total = metrics["token"] = routed_mean(per_patch, weight)
    metrics["loss_ratio"] = metrics["token"] / metrics["token_unweighted"]   # far below 1: the router flees hard patches

    if args.objective == "token_cls":
        metrics["cls"] = cls_loss(pred[:, 0], targets[:, 0])
        total = total + args.cls_weight * metrics["cls"]

    if routing:
        entropy = torch.stack([dispatch_entropy(block) for block in dispatch]).mean(0)               # [E]
        metrics["entropy_loss"] = -sum(weight * h for weight, h in zip(lambdas(args), entropy.unbind()))
        total = total + metrics["entropy_loss"]
        dispatch = dispatch.mean(0)
        metrics |= {"entropy": entropy, "dispatch_cv": variation(dispatch[:, 1:]), "cls_share": dispatch[:, 0].mean(0)}
    metrics["loss"] = total
    return total, {name: value.detach() for name, value in metrics.items()}


def lambdas(args: argparse.Namespace) -> list[float]:
    """Entropy weights, one for each expert."""
    return args.entropy_weight if len(args.entropy_weight) > 1 else args.entropy_weight * args.experts


def main(args: argparse.Namespace):
    process = common.start(args)
    rank, world, device, _ = process
    check(args)
    if args.demo:
        train_demo_teacher(args)

    # data
    grid = args.image_size // args.patch_size
    images = data.open_images(args.data, "train", args.image_size)
    micro_batch, micro_steps, epoch_steps = common.sizes(args, world, len(images))
    steps, warmup = common.schedule(args, epoch_steps)

    # models
    try:
        teacher = build_teacher(args.teacher, grid).to(device, process.amp)
    except ValueError as error:
        raise UserError(f"--teacher {args.teacher}: {error}") from error
    folder = Path(args.out)
    state = common.open_run(folder, args, epoch_steps)
    common.seed_everything(args.seed)
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size, experts=args.experts,
                        moe_blocks=args.moe_blocks, drop_path=args.drop_path)
    student = Explore(encoder, teacher.dim).to(device)
    optimizer = common.adamw(student, args.lr, args.weight_decay, args.betas)
    scaler = torch.amp.GradScaler(device.type, enabled=process.amp == torch.float16)
    skipped, first = common.resume(state, student, optimizer, scaler, device)
    description = dict(encoder=encoder.config, args=common.plain(vars(args)))      # what rebuilds the model from a file
    if not state:
        common.save(folder / "epoch_0000.pt", model=student.state_dict(), step=0, **description)

    objective = torch.compile(objectives) if args.compile else objectives
    if args.compile:
        student.compile()
    model = DistributedDataParallel(student, gradient_as_bucket_view=True) if world > 1 else student
    model.train()

    # the loop
    last = min(steps, args.max_steps or steps)
    views = data.TrainViews(images, args.image_size, args.seed, grid, args.mask_ratio)
    order = data.TrainOrder(len(images), args.batch_size, micro_batch, args.seed, first, last, rank, world)
    batches = data.load(views, order, args.workers, device)
    visible = grid ** 2 - int(args.mask_ratio * grid ** 2)
    log = common.Log(folder / "log.jsonl", first, world)
    bar = tqdm(range(first, last), initial=first, total=last, desc="pretrain", unit="step", disable=not common.is_first())
    for step in bar:
        lr = common.learning_rate(step, steps, warmup, args.lr, args.min_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        common.seed_everything(args.seed, step, rank)                               # drop path

        for micro_step in range(micro_steps):
            batch = next(batches)
            pixels = data.augment(batch)                                            # [B, 3, S, S] in [0, 1]
            ids_keep = shuffle_visible(batch["mask"], batch["noise"], visible)      # [B, V]
            last_micro = micro_step == micro_steps - 1
            with contextlib.nullcontext() if world == 1 or last_micro else model.no_sync():
                with torch.no_grad():
                    targets = teacher(pixels)                                       # [B, 1 + N, Dt]
                with process.autocast():
                    pred, routing = model(data.normalize(pixels), ids_keep)         # [B, 1 + V, Dt]
                loss, metrics = objective(args, pred, targets, routing, ids_keep)
                scaler.scale(loss / micro_steps).backward()
            log.add(metrics)

        norm, skip = common.update(optimizer, scaler, args.clip_grad)
        skipped += skip
        log.add({"grad_norm": norm})

        done = step + 1
        saves = done % (args.save_every * epoch_steps) == 0 or done == last
        if saves or done % 20 == 0:
            if encoder.moe_blocks:
                log.add({"scale": torch.stack([encoder.blocks[block].mlp.scale.detach() for block in encoder.moe_blocks])})
            log.add({"skipped": skipped})
            line = log.write(done, args.batch_size, epoch=done / epoch_steps, lr=lr)
            bar.set_postfix({name: f"{line[name]:.3f}" for name in ("loss", "token", "cls") if name in line})
        if saves:
            common.save(folder / "last.pt", model=student.state_dict(), optimizer=optimizer.state_dict(),
                        scaler=scaler.state_dict(), step=done, skipped=line["skipped"], steps_per_epoch=epoch_steps, **description)
            if done % epoch_steps == 0:
                common.save(folder / f"epoch_{done // epoch_steps:04d}.pt", model=student.state_dict(), step=done, **description)
            log.restart_clock()
    if common.is_first():
        print(f"{folder / 'last.pt'}: step {max(first, last)} of {steps}")
    if args.demo:
        show_demo(args)


# --------------------------------------------------------------------------------------------------------------- demo

def train_demo_teacher(args: argparse.Namespace):
    """A small supervised ViT on the same images, if there is none yet. A stage calls others here alone: as a user would."""
    import finetune
    if args.teacher == DEMO["teacher"]:
        finetune.main(finetune.parse_args([
            "--data", args.data, "--out", str(Path(args.teacher).parent), "--model", args.model, "--image-size",
            str(args.image_size), "--patch-size", str(args.patch_size), "--epochs", "6", "--warmup-epochs", "1", "--lr",
            "2e-3", "--batch-size", "64", "--drop-path", "0", "--amp", args.amp, "--seed", str(args.seed)]))


def show_demo(args: argparse.Namespace):
    """k-NN before and after, and what the router looks at."""
    import knn
    import routing
    last = Path(args.out, "last.pt")
    before, after = knn.main(knn.parse_args([str(Path(args.out, "epoch_0000.pt")), str(last), "--data", args.data,
                                             "--amp", args.amp]))
    routing.main(routing.parse_args([str(last), "--data", args.data, "--out", args.out, "--amp", args.amp]))
    if common.is_first():
        print(f"k-NN random init {before:.1f}% -> pretrained {after:.1f}%")


if __name__ == "__main__":
    common.run(main, parse_args())
