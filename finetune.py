"""Supervised training: finetuning with the paper's recipes, or a classifier from scratch.

    torchrun --nproc_per_node 4 finetune.py runs/pretrain/epoch_0300.pt
    python finetune.py --model vit_nano --data shapes --image-size 48 --patch-size 6 \\
        --augment plain --layer-decay 1 --batch-size 64 --lr 2e-3 --epochs 4 --out runs/teacher

The first finetunes an encoder with experts by all three of --recipe. The second trains a
classifier from scratch, which can be the teacher of a pretraining run. What most runs change:
--data, --out, --recipe, --epochs, and --batch-size together with --lr.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

import common
import data
from checkpoint import load_checkpoint, load_encoder
from common import UserError, number, positive_int
from model import IMAGENET_MEAN, IMAGENET_STD, PRESETS, ViT, build_vit
from run import Run

EVAL_BATCH = 256      # images of one forward pass; any number gives the same scores


def parse_args(argv: list[str] | None = None):
    parser = common.make_parser(__doc__, "[CHECKPOINT] ")
    common.add_run_flags(parser, batch_size=1024, lr=5e-4, min_lr=1e-6, weight_decay=0.05,
                         clip_grad=0.0)
    common.add_epoch_flags(parser, epochs=100, warmup=5)
    add_supervised_flags(parser)
    add_transfer_flags(parser, layer_decay=0.65)
    group = parser.add_argument_group("model")
    group.add_argument(
        "checkpoint", nargs="?", metavar="CHECKPOINT",
        help="an encoder of ExPLoRe, of the authors' release, or with timm's names; without one, "
             "the model is trained from scratch")
    group.add_argument("--model", choices=PRESETS,
                       help="the model to train from scratch (default: vit_base)")
    group.add_argument("--patch-size", type=positive_int,
                       help="that of a model from scratch (default: 16)")
    group.add_argument("--image-size", type=positive_int,
                       help="pixels a side (default: the checkpoint's, else 224)")
    group.add_argument("--pool", choices=("cls", "mean"), default="cls",
                       help="what the head sees: [CLS], or the mean of the patch tokens")
    args = common.parse_run(parser, argv, "finetune")
    for name in ("model", "patch_size"):
        if args.checkpoint and getattr(args, name):
            parser.error(f"{common.flag(name)} is for training from scratch: CHECKPOINT has "
                         "its own")
    return args


def add_supervised_flags(parser):
    """The flag of finetuning and probes."""
    group = parser.add_argument_group("supervision")
    group.add_argument(
        "--augment", choices=("strong", "plain"), default="strong",
        help="strong: crops of scale 0.08 to 1, timm's RandAugment, mixup 0.8 or cutmix 1.0, label "
             "smoothing 0.1 and, in finetuning, random erasing 0.25; plain: as in pretraining")


def add_transfer_flags(parser, layer_decay: float):
    """The flags of finetuning and segmentation."""
    group = parser.add_argument_group("transfer")
    group.add_argument(
        "--recipe", nargs="+", choices=("fr", "fa", "exd", "none"), metavar="R",
        help="fr: freeze the routers' phi and scale; fa: freeze attention; exd: drop whole experts "
             "(default: all three for a model with experts, else none)")
    group.add_argument("--expert-dropout", type=number(float, "[0, 1)"),
                       help="probability of --recipe exd (default: 0.4)")
    group.add_argument("--layer-decay", type=number(float, "(0, 1]"), default=layer_decay,
                       help="factor of the learning rate from each block to the one before it")
    group.add_argument("--drop-path", type=number(float, "[0, 1)"), default=0.1,
                       help="stochastic depth of the last block, rising from 0 at the first")


# ------------------------------------------------------------------------- augmentation

def rand_augment(size: int):
    """The release's RandAugment, which is timm's, for PIL images of `size`.

    It applies two operations, each with probability 0.5 and a magnitude of its own around 9. It
    draws from the global generators of Python and NumPy.
    """
    # imported here, because importing timm takes seconds, and plain augmentation does without
    from timm.data.auto_augment import rand_augment_transform
    mean = tuple(round(255 * value) for value in IMAGENET_MEAN)
    return rand_augment_transform("rand-m9-mstd0.5-inc1", dict(
        translate_const=int(0.45 * size), img_mean=mean, interpolation=Image.BICUBIC,
        magnitude_max=9.99))      # from 10 on, timm posterizes to 0 bits, which Pillow refuses


def random_erasing(rng: np.random.Generator, image: Tensor):
    """timm's random erasing: noise in a box of 2 to 33 % of the area of uint8 [3, S, S], in place.

    The ranges are timm's. The noise is as well, but for clipping to what uint8 can hold.
    """
    top, left, h, w = data.random_crop(rng, *image.shape[-2:], scale=(0.02, 1 / 3),
                                       ratio=(0.3, 1 / 0.3))
    mean, std = (255 * np.array(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
    noise = rng.normal(mean, std, (3, h, w)).clip(0, 255)
    image[:, top:top + h, left:left + w] = torch.from_numpy(noise)


class StrongViews(data.TrainViews):
    """TrainViews with smaller crops and RandAugment instead of color jitter; `erase` adds random
    erasing.
    """
    scale = (0.08, 1.0)

    def __init__(self, dataset: Dataset, image_size: int, seed: int,
                 erase: bool = False):
        super().__init__(dataset, image_size, seed)
        self.erase = erase
        self.rand_augment = rand_augment(image_size)

    def view(self, rng: np.random.Generator, image: Tensor, label: int) -> dict:
        view = super().view(rng, image, label)
        random.seed(int(rng.integers(2 ** 32)))
        np.random.seed(int(rng.integers(2 ** 32)))
        image = TF.pil_to_tensor(self.rand_augment(TF.to_pil_image(view["image"])))
        if self.erase and rng.random() < 0.25:
            random_erasing(rng, image)
        # no color jitter: its factors are 1
        return view | dict(image=image, jitter=np.ones_like(view["jitter"]))


# ----------------------------------------------------------------------------- transfer

def apply_recipe(args, encoder: ViT):
    """FR freezes the routers' phi and scale, FA freezes attention, ExD drops experts (Table 4).

    Changes `encoder` in place. Raises UserError if --recipe does not fit it.
    """
    moes = [encoder.blocks[i].mlp for i in encoder.moe_blocks]
    recipe = args.recipe or (["fr", "fa", "exd"] if moes else ["none"])
    if "none" in recipe and len(recipe) > 1:
        raise UserError(f"--recipe {' '.join(recipe)}: none excludes the others")
    if not moes and {"fr", "exd"} & set(recipe):
        raise UserError(f"--recipe {' '.join(recipe)}: {args.checkpoint or 'the model'} has no "
                        "experts")
    if args.expert_dropout is not None and "exd" not in recipe:
        raise UserError("--expert-dropout needs --recipe exd")
    for name, parameter in encoder.named_parameters():
        in_router = name.endswith(("mlp.phi", "mlp.scale"))
        in_attention = ".attn." in name
        frozen = ("fr" in recipe and in_router) or ("fa" in recipe and in_attention)
        parameter.requires_grad_(not frozen)
    if "exd" in recipe:
        for moe in moes:
            moe.dropout = 0.4 if args.expert_dropout is None else args.expert_dropout


def layerwise_lr(depth: int, decay: float):
    """Layer-wise decay of the learning rate -> a function of a parameter's name.

    What follows the last block, such as the final norm and the head, learns at the whole rate, the
    last block at `decay` times the rate, and each layer below at `decay` times that of the layer
    above. The embeddings are the lowest layer.
    """
    def lr_scale(name: str) -> float:
        name = name.removeprefix("encoder.")
        if name.startswith("blocks."):      # experts, phi and scale belong to their block
            return decay ** (depth - int(name.split(".")[1]))
        embeddings = "patch_embed", "pos_embed", "cls_token"
        return decay ** (depth + 1) if name.startswith(embeddings) else 1.0
    return lr_scale


# ----------------------------------------------------------------------------- training

class LinearHead(nn.Linear):
    """A linear layer on [CLS] or on the mean patch: tokens [B, 1 + N, D] -> logits [B, C]."""

    def __init__(self, dim: int, classes: int, pool: str = "cls", std: float = 0.02):
        super().__init__(dim, classes)
        self.pool = pool
        nn.init.trunc_normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens[:, 0] if self.pool == "cls" else tokens[:, 1:].mean(1))


class Classifier(nn.Module):
    """An encoder and a head on its tokens: images [B, 3, S, S] -> logits [B, C]"""

    def __init__(self, encoder: ViT, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, images: Tensor) -> Tensor:
        tokens, _ = self.encoder(images)      # [B, 1 + N, D]
        return self.head(tokens)


@torch.no_grad()
def evaluate(model: nn.Module, views: data.CenterViews,
             process: common.Process) -> dict[str, float]:
    """-> top-1 and top-5 accuracy in percent over all of `views` and all processes"""
    model.eval()
    process.share_buffers(model)      # BatchNorm's statistics differ between processes
    hits = torch.zeros(2, dtype=torch.long, device=process.device)
    for batch in data.eval_batches(views, EVAL_BATCH, process):
        with process.autocast():
            logits = model(data.normalize(batch["image"] / 255))
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        correct = top == batch["label"][:, None]
        hits += torch.stack([correct[:, 0].sum(), correct.sum()])
    model.train()
    top1, top5 = process.sum(hits).tolist()
    return {"top1": 100 * top1 / len(views), "top5": 100 * top5 / len(views)}


def fit(args, process: common.Process, plan: common.Plan, model: nn.Module,
        views, val_views, compute_loss, evaluate, lr_scale=lambda name: 1.0) -> dict[str, float]:
    """The supervised loop, which linprobe.py and segment.py use too -> the best scores.

    model has an `encoder`. views: of training images, as `data.TrainViews` are. compute_loss(model,
    batch) returns metrics, among them "loss", which is what the gradient is of. evaluate(model,
    val_views, process) returns scores in percent, and the first of them decides which evaluation
    is the best. lr_scale: see `common.adamw`.
    """
    if plan.micro_batch == 1 and any(isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))
                                     for module in model.modules()):
        raise UserError("--micro-batch 1: batch normalization needs two images or more in each "
                        "process")
    optimizer = common.adamw(model, args.lr, args.weight_decay, (0.9, 0.999), lr_scale)
    run = Run(args, process, plan, views.dataset, model.encoder.config,
              dict(model=model, optimizer=optimizer), val=val_views.dataset)
    run.resume()
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    run.announce(args.checkpoint or "from scratch",
                 f"{parameters:.1f} M parameters, {trained:.1f} M of them trained",
                 f"{len(views)} images")
    if process.compile:
        model.compile()
    parallel = process.parallel(model).train()
    batches = run.batches(views)

    for step in run.steps():
        common.set_rate(optimizer, plan.learning_rate(step))
        common.seed_torch(args.seed, step, process.rank)      # drop path, ExD, mixup

        for micro_step in range(1, plan.micro_steps + 1):
            batch = next(batches)
            with process.accumulating(parallel, last=micro_step == plan.micro_steps):
                metrics = compute_loss(parallel, batch)
                process.scaler.scale(metrics["loss"] / plan.micro_steps).backward()
            run.log.add({name: value.detach() for name, value in metrics.items()})

        run.log.add(common.optimizer_step(optimizer, process.scaler, args.clip_grad))
        run.end_step(step, lambda: evaluate(model, val_views, process))
    return run.report()


def fit_classifier(args, process: common.Process, model: Classifier,
                   dataset: Dataset, val: Dataset,
                   lr_scale=lambda name: 1.0, erase: bool = False) -> dict[str, float]:
    """Trains a classifier on labels -> the scores on `val` of the best evaluation

    `erase` adds random erasing to strong augmentation.
    """
    classes = len(dataset.classes)
    image_size = model.encoder.config["image_size"]
    strong = args.augment == "strong"
    views = (StrongViews(dataset, image_size, args.seed, erase) if strong
             else data.TrainViews(dataset, image_size, args.seed))
    val_views = data.CenterViews(val, image_size)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=classes),
                           v2.CutMix(alpha=1.0, num_classes=classes)])

    def compute_loss(parallel: nn.Module, batch: dict) -> dict[str, Tensor]:
        images, target = data.normalize(data.augment(batch)), batch["label"]
        if strong:
            images, target = mix(images, target)      # target [B, C], which sums to 1
        with process.autocast():
            logits = parallel(images)
        return {"loss": F.cross_entropy(logits.float(), target,
                                        label_smoothing=0.1 if strong else 0.0)}

    return fit(args, process, plan=common.make_plan(args, process.world, len(dataset)),
               model=model, views=views, val_views=val_views, compute_loss=compute_loss,
               evaluate=evaluate, lr_scale=lr_scale)


def main(args) -> dict[str, float]:
    """-> top-1 and top-5 accuracy of the best evaluation on val/, in percent"""
    process = common.Process(args)
    checkpoint = load_checkpoint(args.checkpoint) if args.checkpoint else {}
    config = checkpoint.get("encoder",      # the arguments of ViT
                            dict(image_size=224, patch_size=args.patch_size or 16))
    image_size = args.image_size or config["image_size"]
    patch_size = config["patch_size"]
    if image_size % patch_size:
        raise UserError(f"--image-size {image_size} is not a multiple of the patch size "
                        f"{patch_size}")
    dataset, val = (data.open_images(args.data, split, image_size) for split in ("train", "val"))

    common.seed_torch(args.seed)
    if checkpoint:
        encoder = load_encoder(checkpoint, grid=image_size // patch_size,
                               drop_path=args.drop_path)
    else:
        encoder = build_vit(args.model or "vit_base", image_size=image_size,
                            patch_size=patch_size, drop_path=args.drop_path)
    apply_recipe(args, encoder)
    # a thousandth of the usual size, as in the release
    head = LinearHead(encoder.dim, len(dataset.classes), args.pool, std=0.001 * 0.02)
    classifier = Classifier(encoder, head).to(process.device)
    return fit_classifier(args, process, classifier, dataset, val, erase=True,
                          lr_scale=layerwise_lr(len(encoder.blocks), args.layer_decay))


if __name__ == "__main__":
    common.launch(main, parse_args())
