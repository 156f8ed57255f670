"""Supervised training: finetuning a pretrained encoder with the paper's transfer recipes, or from scratch.

    torchrun --nproc_per_node 4 finetune.py runs/pretrain/epoch_0300.pt           # FR + FA + ExD where there are experts
    python finetune.py --model vit_nano --data shapes --image-size 48 --patch-size 8 --augment plain      # a small teacher
"""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2
from tqdm import tqdm

import common
import data
from common import UserError
from model import PRESETS, ViT, build_vit, load_checkpoint, load_encoder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT",
                        help="encoder to finetune: of ours, of the authors' release, or a ViT with timm's names; none: from scratch")
    common.add_common_flags(parser, batch_size=1024)
    common.add_trainer_flags(parser, epochs=100, warmup_epochs=5, lr=5e-4, min_lr=1e-6, weight_decay=0.05, clip_grad=0.0,
                             drop_path=0.1)
    add_supervised_flags(parser)
    group = common.add_recipe_flags(parser, layer_decay=0.65)
    group.add_argument("--pool", choices=("cls", "mean"), default="cls",
                       help="the head sees [CLS], or the mean of the patch tokens (default: %(default)s)")
    group = parser.add_argument_group("model, where there is no checkpoint")
    group.add_argument("--model", choices=PRESETS, default="vit_base", help="default: %(default)s")
    group.add_argument("--patch-size", type=common.positive_int, default=16, help="default: %(default)s")
    group.add_argument("--image-size", type=common.positive_int, help="default: the checkpoint's, else 224")
    args = parser.parse_args(argv)
    args.out = str(common.run_folder("finetune", args, parser))
    return args


def add_supervised_flags(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("supervision")
    group.add_argument("--augment", choices=("strong", "plain"), default="strong",
                       help="strong: crops of scale 0.08 to 1, timm's RandAugment, mixup 0.8 or cutmix 1.0, label smoothing 0.1, in "
                            "finetuning also random erasing 0.25; plain: crops and colour jitter of pretraining (default: %(default)s)")
    group.add_argument("--eval-only", action="store_true",
                       help="evaluate best.pt in --out on val/ and stop")


class Classifier(nn.Module):
    """A ViT and a linear head on [CLS] or the mean patch token, after the final norm. images [B, 3, S, S] -> logits [B, C]."""

    def __init__(self, encoder: ViT, classes: int, pool: str):
        super().__init__()
        self.encoder, self.pool = encoder, pool
        self.head = nn.Linear(encoder.dim, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.001 * 0.02)      # small, as in the authors' release
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        tokens, _ = self.encoder(images)
        return self.head(tokens[:, 0] if self.pool == "cls" else tokens[:, 1:].mean(1))


@torch.no_grad()
def accuracy(forward, batches, process: common.Process) -> tuple[float, float]:
    """Top-1 and top-5 in percent over all processes; each image counts once. forward: images -> logits."""
    counts = torch.zeros(3, dtype=torch.float64, device=process.device)
    for batch in batches:
        with process.autocast():
            logits = forward(data.normalize(batch["image"] / 255))
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch["label"][:, None]
        counts += torch.stack([hits[:, 0].sum(), hits.sum(), batch["label"].new_tensor(len(logits))])
    if process.world > 1:
        dist.all_reduce(counts)
    top1, top5 = (100 * counts[:2] / counts[2]).tolist()
    return top1, top5


def fit(args: argparse.Namespace, process: common.Process, model: nn.Module, config: dict, images, val, image_size: int,
        prepare=nn.Identity(), lr_scale=lambda name: 1.0, erase: bool = False) -> tuple[float, float]:
    """The supervised loop of finetune.py and linprobe.py -> (top-1, top-5) of the best epoch on val/, in percent.

    `model` is what learns. `prepare` comes before it, without gradient and out of DDP: nothing, or a frozen encoder.
    `erase` adds random erasing to strong augmentation.
    `config` rebuilds the encoder of a saved `model`.
    """
    rank, world, device, _ = process
    micro_batch, micro_steps, epoch_steps = common.sizes(args, world, len(images))
    steps, warmup = common.schedule(args, epoch_steps)
    folder = Path(args.out)

    def evaluate() -> tuple[float, float]:
        model.eval()
        for buffer in model.buffers() if world > 1 else ():      # BatchNorm's statistics: the first process's for all
            dist.broadcast(buffer, 0)
        order = data.EvalOrder(len(val), 256, rank, world)
        batches = data.load(data.CentreViews(val, image_size), order, args.workers, device)
        result = accuracy(lambda x: model(prepare(x)), batches, process)
        model.train()
        return result

    if args.eval_only:
        try:
            model.load_state_dict(load_checkpoint(folder / "best.pt")["model"])
        except (ValueError, RuntimeError) as error:
            raise UserError(f"--eval-only: {error}") from error
        top1, top5 = evaluate()
        if common.is_first():
            print(f"{folder / 'best.pt'}: top-1 {top1:.2f}%, top-5 {top5:.2f}%")
        return top1, top5

    state = common.open_run(folder, args, epoch_steps)
    optimizer = common.adamw(model, args.lr, args.weight_decay, (0.9, 0.999), lr_scale)
    scaler = torch.amp.GradScaler(device.type, enabled=process.amp == torch.float16)
    skips, first = common.resume(state, model, optimizer, scaler, device)
    best = tuple(state["best"]) if state else (0.0, 0.0)                       # before the first evaluation
    description = dict(encoder=config, args=common.plain(vars(args)))
    if args.compile:
        model.compile(), prepare.compile()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True) if world > 1 else model
    model.train()

    strong, classes = args.augment == "strong", len(images.classes)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=classes), v2.CutMix(alpha=1.0, num_classes=classes)])
    last = min(steps, args.max_steps or steps)
    views = data.TrainViews(images, image_size, args.seed, strong=strong, erase=erase)
    order = data.TrainOrder(len(images), args.batch_size, micro_batch, args.seed, first, last, rank, world)
    log, watch = common.Log(folder / "log.jsonl", first, world), common.Watch(args, process, first)
    batches = log.waiting(data.load(views, order, args.workers, device))
    bar = tqdm(range(first, last), initial=first, total=last, desc=folder.name, unit="step", disable=not common.is_first())
    for step in bar:
        lr = common.learning_rate(step, steps, warmup, args.lr, args.min_lr)
        common.set_rate(optimizer, lr)
        common.seed_everything(args.seed, step, rank)                           # drop path, expert dropout, mixup
        statistics = [(buffer, buffer.clone()) for buffer in model.buffers()]

        for micro_step in range(micro_steps):
            batch = next(batches)
            pixels, target = data.normalize(data.augment(batch)), batch["label"]
            if strong and classes > 1:
                pixels, target = mix(pixels, target)                            # [B, C], sums to 1
            last_micro = micro_step == micro_steps - 1
            with contextlib.nullcontext() if world == 1 or last_micro else parallel.no_sync():
                with process.autocast():
                    logits = parallel(prepare(pixels))
                loss = F.cross_entropy(logits.float(), target, label_smoothing=0.1 if strong else 0.0)
                scaler.scale(loss / micro_steps).backward()
            log.add({"loss": loss.detach()})

        norm, skipped = common.update(optimizer, scaler, args.clip_grad, statistics)
        skips.add(skipped)
        log.add({"grad_norm": norm})

        done = step + 1
        scheduled = done % (args.save_every * epoch_steps) == 0 or done == last
        saves = watch(scheduled)
        if saves or done % 20 == 0:
            log.add(skips.metrics())
            line = log.write(done, args.batch_size, epoch=done / epoch_steps, lr=lr)
            watch.check(done, line)
            bar.set_postfix({"loss": f"{line['loss']:.3f}"} | ({"best": f"{best[0]:.1f}%"} if best[0] else {}))
        if scheduled:
            top1, top5 = evaluate()
            log.append({"step": done, "val_top1": top1, "val_top5": top5})
            if top1 > best[0]:
                best = (top1, top5)
                common.save(folder / "best.pt", model=model.state_dict(), step=done, **description)
        if saves:
            watch.save(done, model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
                       skipped=line["skipped"], steps_per_epoch=epoch_steps, best=list(best), **description)
            log.restart_clock()
    watch.close()
    if common.is_first():
        print(f"{folder}: step {max(first, last)} of {steps}, best top-1 {best[0]:.2f}%, top-5 {best[1]:.2f}%")
    return best


def main(args: argparse.Namespace) -> tuple[float, float]:
    """-> (top-1, top-5) accuracy of the best epoch on val/, in percent."""
    process = common.start(args)
    try:
        if args.checkpoint:
            config = load_checkpoint(args.checkpoint)["encoder"]
        else:
            config = dict(build_vit(args.model, image_size=args.image_size or 224, patch_size=args.patch_size).config)
    except ValueError as error:
        raise UserError(f"{args.checkpoint}: {error}" if args.checkpoint else f"--image-size, --patch-size: {error}") from error
    image_size = args.image_size or config["image_size"]
    if image_size % config["patch_size"]:
        raise UserError(f"--image-size {image_size} is not a multiple of the patch size {config['patch_size']}")
    recipe = common.choose_recipe(args, has_experts=bool(config["moe_blocks"]))
    images, val = (data.open_images(args.data, split, image_size) for split in ("train", "val"))

    common.seed_everything(args.seed)
    dropouts = dict(drop_path=args.drop_path, expert_dropout=args.expert_dropout if "exd" in recipe else 0.0)
    if args.checkpoint:
        encoder = load_encoder(args.checkpoint, grid=image_size // config["patch_size"], **dropouts)
    else:
        encoder = build_vit(args.model, image_size=image_size, patch_size=args.patch_size, **dropouts)
    common.freeze(encoder, recipe)
    classifier = Classifier(encoder, len(images.classes), args.pool).to(process.device)
    return fit(args, process, classifier, encoder.config, images, val, image_size,
               lr_scale=common.layer_scale(len(encoder.blocks), args.layer_decay), erase=True)


if __name__ == "__main__":
    common.run(main, parse_args())
