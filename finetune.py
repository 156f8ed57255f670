"""Supervised training of a ViT from scratch: also how a small teacher is made.

    python finetune.py --data shapes --model vit_nano --image-size 48 --patch-size 8 --batch-size 64 --epochs 6 --warmup-epochs 1
"""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import common
import data
from common import UserError
from model import PRESETS, ViT, build_vit


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_common_flags(parser, batch_size=1024)
    common.add_trainer_flags(parser, epochs=100, warmup_epochs=5, lr=5e-4, min_lr=1e-6, weight_decay=0.05, clip_grad=0.0,
                             drop_path=0.1)
    group = parser.add_argument_group("model")
    group.add_argument("--model", choices=PRESETS, default="vit_base", help="default: %(default)s")
    group.add_argument("--image-size", type=common.positive_int, default=224, help="default: %(default)s")
    group.add_argument("--patch-size", type=common.positive_int, default=16, help="default: %(default)s")
    args = parser.parse_args(argv)
    args.out = str(common.run_folder("finetune", args, parser))
    return args


class Classifier(nn.Module):
    """A ViT and a linear head on its [CLS] token after the final norm. images [B, 3, S, S] -> logits [B, classes]."""

    def __init__(self, encoder: ViT, classes: int):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.dim, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        tokens, _ = self.encoder(images)
        return self.head(tokens[:, 0])


@torch.no_grad()
def accuracy(model: nn.Module, batches, process: common.Process) -> float:
    """Top-1 in percent over all processes; each image counts once."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=process.device)
    for batch in batches:
        with process.autocast():
            logits = model(data.normalize(batch["image"] / 255))
        counts[0] += (logits.argmax(1) == batch["label"]).sum()
        counts[1] += len(logits)
    model.train()
    if process.world > 1:
        dist.all_reduce(counts)
    return 100 * (counts[0] / counts[1]).item()


def main(args: argparse.Namespace) -> float:
    """-> top-1 accuracy on val/ in percent."""
    process = common.start(args)
    rank, world, device, _ = process
    if args.image_size % args.patch_size:
        raise UserError(f"--image-size {args.image_size} is not a multiple of --patch-size {args.patch_size}")

    # data
    images, val = (data.open_images(args.data, split, args.image_size) for split in ("train", "val"))
    micro_batch, micro_steps, epoch_steps = common.sizes(args, world, len(images))
    steps, warmup = common.schedule(args, epoch_steps)
    folder = Path(args.out)
    state = common.open_run(folder, args, epoch_steps)

    # model
    common.seed_everything(args.seed)
    encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size, drop_path=args.drop_path)
    classifier = Classifier(encoder, len(images.classes)).to(device)
    optimizer = common.adamw(classifier, args.lr, args.weight_decay, (0.9, 0.999))
    scaler = torch.amp.GradScaler(device.type, enabled=process.amp == torch.float16)
    skipped, first = common.resume(state, classifier, optimizer, scaler, device)
    description = dict(encoder=encoder.config, args=common.plain(vars(args)))

    if args.compile:
        classifier.compile()
    model = DistributedDataParallel(classifier, gradient_as_bucket_view=True) if world > 1 else classifier
    model.train()

    def evaluate() -> float:
        order = data.EvalOrder(len(val), 256, rank, world)
        batches = data.load(data.CentreViews(val, args.image_size), order, args.workers, device)
        return accuracy(classifier, batches, process)

    # the loop
    last = min(steps, args.max_steps or steps)
    views = data.TrainViews(images, args.image_size, args.seed)
    order = data.TrainOrder(len(images), args.batch_size, micro_batch, args.seed, first, last, rank, world)
    batches = data.load(views, order, args.workers, device)
    log = common.Log(folder / "log.jsonl", first, world)
    bar = tqdm(range(first, last), initial=first, total=last, desc="finetune", unit="step", disable=not common.is_first())
    top1 = None
    for step in bar:
        lr = common.learning_rate(step, steps, warmup, args.lr, args.min_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        common.seed_everything(args.seed, step, rank)

        for micro_step in range(micro_steps):
            batch = next(batches)
            last_micro = micro_step == micro_steps - 1
            with contextlib.nullcontext() if world == 1 or last_micro else model.no_sync():
                with process.autocast():
                    logits = model(data.normalize(data.augment(batch)))
                loss = F.cross_entropy(logits.float(), batch["label"])
                scaler.scale(loss / micro_steps).backward()
            log.add({"loss": loss.detach()})

        norm, skip = common.update(optimizer, scaler, args.clip_grad)
        skipped += skip
        log.add({"grad_norm": norm})

        done = step + 1
        saves = done % (args.save_every * epoch_steps) == 0 or done == last
        if saves or done % 20 == 0:
            log.add({"skipped": skipped})
            line = log.write(done, args.batch_size, epoch=done / epoch_steps, lr=lr)
            if saves:
                log.append({"step": done, "val_top1": (top1 := evaluate())})
            bar.set_postfix(loss=f"{line['loss']:.3f}", **({"top-1": f"{top1:.1f}%"} if top1 is not None else {}))
        if saves:
            common.save(folder / "last.pt", model=classifier.state_dict(), optimizer=optimizer.state_dict(),
                        scaler=scaler.state_dict(), step=done, skipped=line["skipped"], steps_per_epoch=epoch_steps,
                        **description)
            log.restart_clock()
    top1 = evaluate() if top1 is None else top1
    if common.is_first():
        print(f"{folder / 'last.pt'}: step {max(first, last)} of {steps}, top-1 {top1:.1f}%")
    return top1


if __name__ == "__main__":
    common.run(main, parse_args())
