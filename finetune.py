"""Supervised training: finetuning an encoder with the paper's transfer recipes, or a teacher from scratch.

    torchrun --nproc_per_node 4 finetune.py runs/pretrain/epoch_0300.pt      # FR + FA + ExD if it has experts
    python finetune.py --model vit_nano --data shapes --image-size 48 --patch-size 6 --augment plain
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

import common
import data
from common import UserError
from model import PRESETS, ViT, build_vit, load_checkpoint, load_encoder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT",
                        help="encoder of ExPLoRe, the authors' release or timm; none: from scratch")
    common.add_common_flags(parser, batch_size=1024)
    common.add_trainer_flags(parser, length=100, warmup=5, lr=5e-4, min_lr=1e-6, weight_decay=0.05,
                             clip_grad=0.0, drop_path=0.1)
    add_supervised_flags(parser)
    group = common.add_recipe_flags(parser, layer_decay=0.65)
    group.add_argument("--pool", choices=("cls", "mean"), default="cls",
                       help="the head sees [CLS], or the mean of the patch tokens (default: %(default)s)")
    group = parser.add_argument_group("model, without a checkpoint")
    group.add_argument("--model", choices=PRESETS, default="vit_base", help="default: %(default)s")
    group.add_argument("--patch-size", type=int, default=16, help="default: %(default)s")
    group.add_argument("--image-size", type=int, help="also with one (default: the checkpoint's, else 224)")
    args = common.parse(parser, argv, "finetune")
    for name in ("model", "patch_size"):
        if args.checkpoint and name in common.given(parser, argv, args):
            parser.error(f"{common.flag(name)} is for training from scratch: CHECKPOINT has its own")
    return args


def add_supervised_flags(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("supervision")
    group.add_argument("--augment", choices=("strong", "plain"), default="strong",
                       help="strong: crops of scale 0.08 to 1, timm's RandAugment, mixup 0.8 or cutmix 1.0, "
                            "label smoothing 0.1, in finetuning also random erasing 0.25; plain: as in "
                            "pretraining (default: %(default)s)")
    group.add_argument("--eval-only", action="store_true", help="evaluate best.pt in --out and stop")


class Classifier(nn.Module):
    """A linear head on a ViT's normalized [CLS] or mean patch token. images [B, 3, S, S] -> logits [B, C]"""

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
def accuracy(forward, batches, process: common.Process) -> dict[str, float]:
    """Top-1 and top-5 in percent over all processes; each image counts once. forward: images -> logits"""
    counts = torch.zeros(3, dtype=torch.float64, device=process.device)
    for batch in batches:
        with process.autocast():
            logits = forward(data.normalize(batch["image"] / 255))
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch["label"][:, None]
        counts += torch.stack([hits[:, 0].sum(), hits.sum(), batch["label"].new_tensor(len(logits))])
    top1, top5, images = process.sum(counts).tolist()
    return {"top1": 100 * top1 / images, "top5": 100 * top5 / images}


def fit(args: argparse.Namespace, run: common.Run, model: nn.Module, encoder: ViT, images, val,
        sources: dict[str, str], prepare=nn.Identity(), lr_scale=lambda name: 1.0,
        erase: bool = False) -> dict[str, float]:
    """The supervised loop of finetune.py and linprobe.py -> scores of the best epoch on `val`, in percent.

    `model` is what learns. `prepare` comes before it, without gradient and outside DDP: nothing, or a frozen
    encoder. `erase` adds random erasing to strong augmentation.
    """
    image_size, sources = encoder.config["image_size"], sources | {"data": data.digest(images, val)}
    micro_batch, micro_steps, epoch_steps = common.sizes(args, run.world, len(images))
    steps, warmup = common.schedule(args, epoch_steps)

    def evaluate() -> dict[str, float]:
        run.share_buffers(model)
        order = data.eval_order(len(val), 256, run.rank, run.world)
        batches = data.load(data.CentreViews(val, image_size), order, args.workers, run.device)
        model.eval()
        scores = accuracy(lambda x: model(prepare(x)), batches, run)
        model.train()
        return scores

    if args.eval_only:
        run.load_best(model, sources)
        return run.report("best.pt:", evaluate())

    optimizer = common.adamw(model, args.lr, args.weight_decay, (0.9, 0.999), lr_scale)
    first = run.resume(encoder.config, epoch_steps, sources, model=model, optimizer=optimizer)
    last = min(steps, args.max_steps or steps)
    if args.compile:
        model.compile()
        prepare.compile()
    parallel = run.parallel(model).train()

    strong, classes = args.augment == "strong", len(images.classes)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=classes),
                           v2.CutMix(alpha=1.0, num_classes=classes)])
    views = data.TrainViews(images, image_size, args.seed, strong=strong, erase=erase)
    order = data.train_order(len(images), args.batch_size, micro_batch, args.seed, first, last,
                             run.rank, run.world)
    batches = run.waiting(data.load(views, order, args.workers, run.device))
    for step in run.steps(first, last):
        common.set_rate(optimizer, common.learning_rate(step, steps, warmup, args.lr, args.min_lr))
        common.seed_everything(args.seed, step, run.rank)       # drop path, expert dropout, mixup

        for micro_step in range(micro_steps):
            batch = next(batches)
            pixels, target = data.normalize(data.augment(batch)), batch["label"]
            if strong and classes > 1:
                pixels, target = mix(pixels, target)            # [B, C], sums to 1
            with run.accumulating(parallel, micro_step, micro_steps):
                with run.autocast():
                    logits = parallel(prepare(pixels))
                loss = F.cross_entropy(logits.float(), target, label_smoothing=0.1 if strong else 0.0)
                run.scaler.scale(loss / micro_steps).backward()
            run.log({"loss": loss.detach()})

        run.log(common.update(optimizer, run.scaler, args.clip_grad))
        run.after(step, evaluate)                               # log line, best.pt, last.pt, signal
    return run.report(f"step {max(first, last)} of {steps}, best", run.best)


def main(args: argparse.Namespace) -> dict[str, float]:
    """-> top-1 and top-5 accuracy of the best epoch on val/, in percent"""
    run = common.Run(args)
    config = dict(image_size=224, patch_size=args.patch_size, moe_blocks=[])
    if args.checkpoint:
        config = load_checkpoint(args.checkpoint)["encoder"]
    image_size, patch_size = args.image_size or config["image_size"], config["patch_size"]
    if image_size % patch_size:
        raise UserError(f"--image-size {image_size} is not a multiple of the patch size {patch_size}")
    recipe, expert_dropout = common.choose_recipe(args, has_experts=bool(config["moe_blocks"]))
    images, val = (data.open_images(args.data, split, image_size) for split in ("train", "val"))

    common.seed_everything(args.seed)
    dropouts = dict(drop_path=args.drop_path, expert_dropout=expert_dropout)
    if args.checkpoint:
        encoder = load_encoder(args.checkpoint, grid=image_size // patch_size, **dropouts)
    else:
        encoder = build_vit(args.model, image_size=image_size, patch_size=patch_size, **dropouts)
    common.freeze(encoder, recipe)
    sources = {"checkpoint": common.digest(encoder)} if args.checkpoint else {}
    classifier = Classifier(encoder, len(images.classes), args.pool).to(run.device)
    return fit(args, run, classifier, encoder, images, val, sources, erase=True,
               lr_scale=common.layer_scale(len(encoder.blocks), args.layer_decay))


if __name__ == "__main__":
    common.run(main, parse_args())
