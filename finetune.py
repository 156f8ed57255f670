"""Supervised training: finetuning an encoder with the paper's transfer recipes, or a teacher from scratch.

    torchrun --nproc_per_node 4 finetune.py runs/pretrain/epoch_0300.pt      # FR + FA + ExD if it has experts
    python finetune.py --model vit_nano --data shapes --image-size 48 --patch-size 6 --augment plain
"""

import argparse
import random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

import common
import data
from checkpoint import digest, load_checkpoint, load_encoder
from common import UserError
from model import IMAGENET_MEAN, IMAGENET_STD, PRESETS, ViT, build_vit
from run import Run


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, batch_size=1024)
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT",
                        help="encoder of ExPLoRe, the authors' release or timm; none: from scratch")
    common.add_trainer_flags(parser, length=100, warmup=5, lr=5e-4, min_lr=1e-6, weight_decay=0.05,
                             clip_grad=0.0, drop_path=0.1)
    add_supervised_flags(parser)
    common.add_recipe_flags(parser, layer_decay=0.65)
    parser.add_argument("--pool", choices=("cls", "mean"), default="cls",
                        help="the head sees [CLS], or the mean of the patch tokens (default: %(default)s)")
    parser.add_argument("--image-size", type=int, metavar="N", help="default: the checkpoint's, else 224")
    add = parser.add_argument_group("model, from scratch").add_argument
    add("--model", choices=PRESETS, help="default: vit_base")
    add("--patch-size", type=int, metavar="N", help="default: 16")
    args = common.parse(parser, argv, "finetune")
    for name in ("model", "patch_size"):
        if args.checkpoint and getattr(args, name):
            parser.error(f"{common.flag(name)} is for training from scratch: CHECKPOINT has its own")
    return args


def add_supervised_flags(parser: argparse.ArgumentParser):
    add = parser.add_argument_group("supervision").add_argument
    add("--augment", choices=("strong", "plain"), default="strong",
        help="strong: crops of scale 0.08 to 1, timm's RandAugment, mixup 0.8 or cutmix 1.0, label smoothing "
             "0.1, in finetuning also random erasing 0.25; plain: as in pretraining (default: %(default)s)")


# ------------------------------------------------------------------------------------------ augmentation

def rand_augment(size: int):
    """The release's RandAugment, timm's own: two operations on a PIL image of `size`, each applied with
    probability 0.5 and a magnitude of its own around 9. It draws from Python's and NumPy's global generators.
    """
    from timm.data.auto_augment import rand_augment_transform  # only supervised training needs it
    mean = tuple(round(255 * value) for value in IMAGENET_MEAN)
    return rand_augment_transform("rand-m9-mstd0.5-inc1", dict(
        translate_const=int(0.45 * size), img_mean=mean, interpolation=Image.BICUBIC,
        magnitude_max=9.99))      # at 10, timm posterizes to 0 bits, which newer Pillows refuse


def random_erasing(rng: np.random.Generator, image: Tensor, probability: float = 0.25):
    """With that probability, noise in a box of 2 to 33 % of the area, as timm's. uint8 [3, S, S], in place"""
    if rng.random() >= probability:
        return
    top, left, h, w = data.random_crop(rng, *image.shape[-2:], scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3))
    mean, std = (255 * np.array(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    image[:, top:top + h, left:left + w] = torch.from_numpy(rng.normal(mean, std, (3, h, w)).clip(0, 255))


class StrongViews(data.TrainViews):
    """TrainViews with smaller crops, RandAugment for color jitter and, with `erase`, random erasing."""
    scale = (0.08, 1.0)

    def __init__(self, images, image_size: int, seed: int, erase: bool = False):
        super().__init__(images, image_size, seed)
        self.erase, self.rand_augment = erase, rand_augment(image_size)

    def view(self, rng: np.random.Generator, image: Tensor, label: int) -> dict:
        view = super().view(rng, image, label)
        random.seed(int(rng.integers(2 ** 32)))
        np.random.seed(int(rng.integers(2 ** 32)))
        image = TF.pil_to_tensor(self.rand_augment(TF.to_pil_image(view["image"])))
        if self.erase:
            random_erasing(rng, image)
        return view | dict(image=image, jitter=np.ones_like(view["jitter"]))


# ---------------------------------------------------------------------------------------------- training

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
def evaluate(model: nn.Module, features, views: data.CenterViews, machine: common.Machine) -> dict:
    """Top-1 and top-5 accuracy in percent over all of `views` and all processes"""
    model.eval()
    machine.share_buffers(model)
    hits = torch.zeros(2, dtype=torch.long, device=machine.device)
    for batch in data.eval_batches(views, 256, machine):
        with machine.autocast():
            logits = model(features(data.normalize(batch["image"] / 255)))
        correct = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch["label"][:, None]
        hits += torch.stack([correct[:, 0].sum(), correct.sum()])
    model.train()
    top1, top5 = machine.sum(hits).tolist()
    return {"top1": 100 * top1 / len(views), "top5": 100 * top5 / len(views)}


def fit(args: argparse.Namespace, machine: common.Machine, encoder: ViT, model: nn.Module, images, val,
        sources: dict[str, str], features=lambda pixels: pixels, lr_scale=lambda name: 1.0,
        erase: bool = False) -> dict[str, float]:
    """The supervised loop of finetune.py and linprobe.py -> scores of the best epoch on `val`, in percent.

    `model` is what learns, from `features` of the pixels: a probe's frozen encoder, outside DDP. `sources`
    are digests of files (see run.Run). `erase` adds random erasing to strong augmentation.
    """
    plan, image_size = common.make_plan(args, machine.world, len(images)), encoder.config["image_size"]
    sources = sources | {"images": data.digest(images, val)}
    optimizer = common.adamw(model, args.lr, args.weight_decay, (0.9, 0.999), lr_scale)
    run = Run(args, machine, plan, encoder.config, sources, model=model, optimizer=optimizer)
    run.announce(args.checkpoint or "from scratch",
                 f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters",
                 f"{len(images)} images of {len(images.classes)} classes")
    if machine.compile:
        model.compile()
    parallel = machine.parallel(model).train()
    strong, classes = args.augment == "strong", len(images.classes)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=classes),
                           v2.CutMix(alpha=1.0, num_classes=classes)])
    views = (StrongViews(images, image_size, args.seed, erase) if strong
             else data.TrainViews(images, image_size, args.seed))
    val_views = data.CenterViews(val, image_size)
    batches = data.train_batches(views, len(images), run)

    for step in run.steps():
        common.set_rate(optimizer, common.learning_rate(step, plan, args.lr, args.min_lr))
        common.seed_everything(args.seed, step, machine.rank)       # drop path, expert dropout, mixup

        for micro_step in range(1, plan.micro_steps + 1):
            batch = next(batches)
            pixels, target = data.normalize(data.augment(batch)), batch["label"]
            if strong and classes > 1:
                pixels, target = mix(pixels, target)                # [B, C], sums to 1
            with machine.accumulating(parallel, last=micro_step == plan.micro_steps):
                with machine.autocast():
                    logits = parallel(features(pixels))
                loss = F.cross_entropy(logits.float(), target, label_smoothing=0.1 if strong else 0.0)
                machine.scaler.scale(loss / plan.micro_steps).backward()
            run.log.add({"loss": loss.detach()})

        run.log.add(common.optimizer_step(optimizer, machine.scaler, args.clip_grad))
        run.end_step(step, lambda: evaluate(model, features, val_views, machine))
    return run.report()


def main(args: argparse.Namespace) -> dict[str, float]:
    """-> top-1 and top-5 accuracy of the best epoch on val/, in percent"""
    machine, sources = common.Machine(args), {}
    checkpoint = load_checkpoint(args.checkpoint) if args.checkpoint else {}
    config = checkpoint.get("encoder", dict(image_size=224, patch_size=args.patch_size or 16))
    image_size, patch_size = args.image_size or config["image_size"], config["patch_size"]
    if image_size % patch_size:
        raise UserError(f"--image-size {image_size} is not a multiple of the patch size {patch_size}")
    images, val = (data.open_images(args.data, split, image_size) for split in ("train", "val"))

    common.seed_everything(args.seed)
    if checkpoint:
        encoder = load_encoder(checkpoint, grid=image_size // patch_size, drop_path=args.drop_path)
        sources = {"encoder": digest(encoder)}
    else:
        encoder = build_vit(args.model or "vit_base", image_size=image_size, patch_size=patch_size,
                            drop_path=args.drop_path)
    common.apply_recipe(args, encoder)
    classifier = Classifier(encoder, len(images.classes), args.pool).to(machine.device)
    return fit(args, machine, encoder, classifier, images, val, sources, erase=True,
               lr_scale=common.layerwise_lr(len(encoder.blocks), args.layer_decay))


if __name__ == "__main__":
    common.launch(main, parse_args())
