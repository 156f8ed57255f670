"""Supervised training: finetuning with the paper's recipes, or a teacher from scratch.

    torchrun --nproc_per_node 4 finetune.py runs/pretrain/epoch_0300.pt
    python finetune.py --model vit_nano --data shapes --image-size 48 --patch-size 6 \\
        --augment plain --layer-decay 1

The first finetunes with FR + FA + ExD, if the encoder has experts.
"""

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
from checkpoint import digest_weights, load_checkpoint, load_encoder
from model import IMAGENET_MEAN, IMAGENET_STD, PRESETS, ViT, build_vit
from run import Run


def parse_args(argv: list[str] | None = None):
    parser = common.make_parser(__doc__, batch_size=1024)
    common.add_trainer_flags(parser, epochs=100, warmup=5, lr=5e-4, min_lr=1e-6,
                             weight_decay=0.05, clip_grad=0.0)
    add_supervised_flags(parser)
    common.add_transfer_flags(parser, layer_decay=0.65)
    common.add_flags(parser, "model", {
        "checkpoint": dict(
            nargs="?", metavar="CHECKPOINT",
            help="encoder of ExPLoRe, the authors' release or timm; none: from scratch"),
        "--model": dict(choices=PRESETS, help="from scratch (default: vit_base)"),
        "--patch-size": dict(type=int, help="from scratch (default: 16)"),
        "--image-size": dict(type=int, help="default: the checkpoint's, else 224"),
        "--pool": dict(choices=("cls", "mean"), default="cls",
                       help="the head sees [CLS], or the mean of the patch tokens"),
    })
    args = common.parse(parser, argv, "finetune")
    for name in ("model", "patch_size"):
        if args.checkpoint and getattr(args, name):
            parser.error(f"{common.flag(name)} is for training from scratch: CHECKPOINT has "
                         "its own")
    return args


def add_supervised_flags(parser):
    common.add_flags(parser, "supervision", {
        "--augment": dict(
            choices=("strong", "plain"), default="strong",
            help="strong: crops of scale 0.08 to 1, timm's RandAugment, mixup 0.8 or cutmix "
                 "1.0, label smoothing 0.1, in finetuning also random erasing 0.25; plain: "
                 "as in pretraining")})


# ------------------------------------------------------------------------- augmentation

def rand_augment(size: int):
    """The release's RandAugment, timm's own, for PIL images of `size`.

    Two operations, each with probability 0.5 and a magnitude of its own around 9. It draws from
    Python's and NumPy's global generators.
    """
    from timm.data.auto_augment import rand_augment_transform  # supervised training alone
    mean = tuple(round(255 * value) for value in IMAGENET_MEAN)
    return rand_augment_transform("rand-m9-mstd0.5-inc1", dict(
        translate_const=int(0.45 * size), img_mean=mean, interpolation=Image.BICUBIC,
        magnitude_max=9.99))      # at 10, timm posterizes to 0 bits, which Pillow refuses


def random_erasing(rng: np.random.Generator, image: Tensor, probability: float = 0.25):
    """Noise in a box of 2 to 33 % of the area, as timm's. uint8 [3, S, S], in place"""
    if rng.random() >= probability:
        return
    top, left, h, w = data.random_crop(rng, *image.shape[-2:], scale=(0.02, 1 / 3),
                                       ratio=(0.3, 1 / 0.3))
    mean, std = (255 * np.array(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
    noise = rng.normal(mean, std, (3, h, w)).clip(0, 255)
    image[:, top:top + h, left:left + w] = torch.from_numpy(noise)


class StrongViews(data.TrainViews):
    """TrainViews with smaller crops, RandAugment for jitter and, with `erase`, erasing."""
    scale = (0.08, 1.0)

    def __init__(self, images: data.Images, image_size: int, seed: int, erase: bool = False):
        super().__init__(images, image_size, seed)
        self.erase = erase
        self.rand_augment = rand_augment(image_size)

    def view(self, rng: np.random.Generator, image: Tensor, label: int) -> dict:
        view = super().view(rng, image, label)
        random.seed(int(rng.integers(2 ** 32)))
        np.random.seed(int(rng.integers(2 ** 32)))
        image = TF.pil_to_tensor(self.rand_augment(TF.to_pil_image(view["image"])))
        if self.erase:
            random_erasing(rng, image)
        return view | dict(image=image, jitter=np.ones_like(view["jitter"]))


# ----------------------------------------------------------------------------- training

class Classifier(nn.Module):
    """A linear head on a ViT's [CLS] or mean patch token: [B, 3, S, S] -> logits [B, C]."""

    def __init__(self, encoder: ViT, classes: int, pool: str):
        super().__init__()
        self.encoder, self.pool = encoder, pool
        self.head = nn.Linear(encoder.dim, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.001 * 0.02)      # small, as the release's
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        tokens, _ = self.encoder(images)
        return self.head(tokens[:, 0] if self.pool == "cls" else tokens[:, 1:].mean(1))


@torch.no_grad()
def evaluate(model: nn.Module, features, views: data.CenterViews,
             machine: common.Machine) -> dict[str, float]:
    """Top-1 and top-5 accuracy in percent over all of `views` and all processes"""
    model.eval()
    machine.share_buffers(model)
    hits = torch.zeros(2, dtype=torch.long, device=machine.device)
    for batch in data.eval_batches(views, 256, machine):
        with machine.autocast():
            logits = model(features(data.normalize(batch["image"] / 255)))
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        correct = best == batch["label"][:, None]
        hits += torch.stack([correct[:, 0].sum(), correct.sum()])
    model.train()
    top1, top5 = machine.sum(hits).tolist()
    return {"top1": 100 * top1 / len(views), "top5": 100 * top5 / len(views)}


def fit(args, machine: common.Machine, encoder: ViT, model: nn.Module,
        views, sources: dict[str, str], compute_loss, evaluate, score: str, classes: int,
        lr_scale=lambda name: 1.0,
        linear: bool = False) -> dict[str, float]:
    """The supervised loop, of linprobe.py and segment.py too -> the best scores.

    `model` is what learns. compute_loss(model, batch) returns metrics, of which "loss" is the
    loss, evaluate() scores, of which `score` says which are the best. `linear`: the rate falls
    along a line, not a cosine. `sources` and `encoder`: see `Run`.
    """
    plan = common.make_plan(args, machine.world, len(views))
    optimizer = common.adamw(model, args.lr, args.weight_decay, (0.9, 0.999), lr_scale)
    run = Run(args, machine, plan, encoder.config, sources, score=score, model=model,
              optimizer=optimizer)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    run.announce(args.checkpoint or "from scratch", f"{millions:.1f} M parameters",
                 f"{len(views)} images of {classes} classes")
    if machine.compile:
        model.compile()
    parallel = machine.parallel(model).train()
    batches = run.batches(views)

    for step in run.steps():
        common.set_rate(
            optimizer, common.learning_rate(step, plan, args.lr, args.min_lr, linear))
        common.seed_everything(args.seed, step, machine.rank)      # drop path, ExD, mixup

        for micro_step in range(1, plan.micro_steps + 1):
            batch = next(batches)
            with machine.accumulating(parallel, last=micro_step == plan.micro_steps):
                metrics = compute_loss(parallel, batch)
                machine.scaler.scale(metrics["loss"] / plan.micro_steps).backward()
            run.log.add({name: value.detach() for name, value in metrics.items()})

        run.log.add(common.optimizer_step(optimizer, machine.scaler, args.clip_grad))
        run.end_step(step, evaluate)
    return run.report()


def fit_classifier(args, machine: common.Machine, encoder: ViT,
                   model: nn.Module, images: data.Images, val: data.Images,
                   sources: dict[str, str], features=lambda pixels: pixels,
                   lr_scale=lambda name: 1.0,
                   erase: bool = False) -> dict[str, float]:
    """Trains a classifier on labels, also a probe's -> the best epoch's scores on `val`.

    `features` of the pixels are what the model gets: a probe's come from a frozen encoder,
    outside DDP. `erase` adds random erasing to strong augmentation.
    """
    classes = len(images.classes)
    image_size = encoder.config["image_size"]
    strong = args.augment == "strong"
    views = (StrongViews(images, image_size, args.seed, erase) if strong
             else data.TrainViews(images, image_size, args.seed))
    val_views = data.CenterViews(val, image_size)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=classes),
                           v2.CutMix(alpha=1.0, num_classes=classes)])

    def compute_loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        pixels, target = data.normalize(data.augment(batch)), batch["label"]
        if strong and classes > 1:
            pixels, target = mix(pixels, target)                   # [B, C], sums to 1
        with machine.autocast():
            logits = model(features(pixels))
        return {"loss": F.cross_entropy(logits.float(), target,
                                        label_smoothing=0.1 if strong else 0.0)}

    return fit(args, machine, encoder, model, views,
               sources | {"images": data.digest_names(images, val)}, compute_loss,
               lambda: evaluate(model, features, val_views, machine), "top1", classes, lr_scale)


def main(args) -> dict[str, float]:
    """-> top-1 and top-5 accuracy of the best epoch on val/, in percent"""
    machine = common.Machine(args)
    checkpoint = load_checkpoint(args.checkpoint) if args.checkpoint else {}
    config = checkpoint.get("encoder", dict(image_size=224, patch_size=args.patch_size or 16))
    image_size = args.image_size or config["image_size"]
    patch_size = config["patch_size"]
    if image_size % patch_size:
        raise common.UserError(f"--image-size {image_size} is not a multiple of the patch size "
                               f"{patch_size}")
    images, val = (data.open_images(args.data, split, image_size) for split in ("train", "val"))

    common.seed_everything(args.seed)
    sources = {}
    if checkpoint:
        encoder = load_encoder(checkpoint, image_size // patch_size, args.drop_path)
        sources = {"encoder": digest_weights(encoder)}
    else:
        encoder = build_vit(args.model or "vit_base", image_size=image_size,
                            patch_size=patch_size, drop_path=args.drop_path)
    common.apply_recipe(args, encoder)
    classifier = Classifier(encoder, len(images.classes), args.pool).to(machine.device)
    lr_scale = common.layerwise_lr(len(encoder.blocks), args.layer_decay)
    return fit_classifier(args, machine, encoder, classifier, images, val, sources,
                          lr_scale=lr_scale, erase=True)


if __name__ == "__main__":
    common.launch(main, parse_args())
