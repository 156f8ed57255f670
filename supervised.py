"""The training loop of linprobe.py, finetune.py and segment.py, and what these share."""

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

import common
import data
import optim
from common import UserError, fraction, positive
from model import IMAGENET_MEAN, IMAGENET_STD, ViT, pool
from run import Run

EXPERT_DROPOUT = 0.4


# -------------------------------------------------------------------------------- flags

def add_augment_flag(parser):
    """Adds the flag that finetuning and probes share."""
    group = parser.add_argument_group("supervision")
    group.add_argument(
        "--augment", choices=("strong", "plain"), default="strong",
        help="strong: crops of scale 0.08 to 1, timm's RandAugment, mixup 0.8 or cutmix 1.0, label "
             "smoothing 0.1 and, in finetuning, random erasing 0.25; plain: as in pretraining")


def add_transfer_flags(parser, layer_decay: float | None):
    """Adds the flags that finetuning and segmentation share."""
    group = parser.add_argument_group("transfer")
    group.add_argument(
        "--recipe", nargs="+", choices=("fr", "fa", "exd", "none"), metavar="R",
        help="fr: freeze the routers' phi and scale; fa: freeze attention; exd: drop whole experts "
             "(default: all three for a model with experts, else none)")
    group.add_argument("--expert-dropout", type=fraction, default=EXPERT_DROPOUT,
                       help="probability that --recipe exd drops an expert")
    group.add_argument(
        "--layer-decay", type=positive, default=layer_decay,
        help="layer-wise decay: factor of the learning rate from each block to the block before it "
             "(finetune.py: 0.65, or 1 from scratch)")
    group.add_argument("--drop-path", type=fraction, default=0.1,
                       help="stochastic depth: drop probability of the last block, which rises "
                            "linearly from 0 at the first block")


# ------------------------------------------------------------------------- augmentation

def rand_augment():
    """timm's RandAugment for PIL images, with the release's settings.

    It applies two operations, each with probability 0.5 and a random magnitude around 9. It draws
    from the global generators of Python and NumPy.
    """
    # imported here, because timm takes seconds to import, and plain augmentation does not need it
    from timm.data.auto_augment import rand_augment_transform
    mean = tuple(round(255 * value) for value in IMAGENET_MEAN)
    return rand_augment_transform("rand-m9-mstd0.5-inc1", dict(
        img_mean=mean, interpolation=Image.BICUBIC,
        magnitude_max=9.99))      # from 10 on, timm posterizes to 0 bits, which Pillow rejects


def random_erasing(rng: np.random.Generator, image: Tensor):
    """timm's random erasing: fills a box of 2 to 33 % of the area of uint8 [3, S, S] with noise, in
    place.

    The ranges and the noise are timm's, except that the noise is clipped to the range of uint8.
    """
    top, left, h, w = data.random_crop(rng, *image.shape[-2:], scale=(0.02, 1 / 3),
                                       ratio=(0.3, 1 / 0.3))
    mean, std = (255 * np.array(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
    noise = rng.normal(mean, std, (3, h, w)).clip(0, 255)
    image[:, top:top + h, left:left + w] = torch.from_numpy(noise)


class StrongViews(data.TrainViews):
    """TrainViews with smaller crops, and with RandAugment instead of color jitter.

    `erase` adds random erasing to a quarter of the images.
    """
    scale = (0.08, 1.0)

    def __init__(self, dataset: Dataset, image_size: int, seed: int, erase: bool = False):
        super().__init__(dataset, image_size, seed)
        self.erase = erase
        self.rand_augment = rand_augment()

    def view(self, rng: np.random.Generator, image: Tensor, label: int) -> dict:
        view = super().view(rng, image, label)
        random.seed(int(rng.integers(2 ** 32)))
        np.random.seed(int(rng.integers(2 ** 32)))
        image = TF.pil_to_tensor(self.rand_augment(TF.to_pil_image(view["image"])))
        if self.erase and rng.random() < 0.25:
            random_erasing(rng, image)
        # factors of 1 switch off color jitter
        return view | dict(image=image, jitter=np.ones_like(view["jitter"]))


def mixup_or_cutmix(classes: int):
    """Images [B, 3, S, S] and labels [B] -> mixed images and targets [B, C]; each row sums to 1"""
    return v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=classes),
                            v2.CutMix(alpha=1.0, num_classes=classes)])


# ----------------------------------------------------------------------------- transfer

def apply_recipe(args, encoder: ViT) -> str:
    """Applies --recipe to `encoder`, in place (Table 4) -> the recipe in words

    FR freezes the routers' phi and scale, FA freezes attention, and ExD drops experts. Raises
    UserError if --recipe does not fit the encoder.
    """
    moes = [encoder.blocks[i].mlp for i in encoder.moe_blocks]
    recipe = args.recipe or (["fr", "fa", "exd"] if moes else ["none"])
    if "none" in recipe and len(recipe) > 1:
        raise UserError(f"--recipe {' '.join(recipe)}: \"none\" excludes the others")
    if not moes and {"fr", "exd"} & set(recipe):
        raise UserError(f"--recipe {' '.join(recipe)}: the encoder has no experts")
    if args.expert_dropout != EXPERT_DROPOUT and "exd" not in recipe:
        raise UserError(f"--expert-dropout {args.expert_dropout} needs exd in --recipe")
    for name, parameter in encoder.named_parameters():
        frozen = (("fr" in recipe and ".mlp.router." in name)
                  or ("fa" in recipe and ".attn." in name))
        parameter.requires_grad_(not frozen)
    if "exd" in recipe:
        for moe in moes:
            moe.dropout = args.expert_dropout
    return "recipe " + " ".join(recipe)


# ----------------------------------------------------------------------- classification

class LinearHead(nn.Linear):
    """A linear layer on [CLS] or the mean patch token: tokens [B, 1 + N, D] -> logits [B, C]"""

    def __init__(self, dim: int, classes: int, pooling: str = "cls", std: float = 0.02):
        super().__init__(dim, classes)
        self.pooling = pooling
        nn.init.trunc_normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(pool(tokens, self.pooling))


def accuracy(model: nn.Module, views: data.CenterViews, args, process: common.Process
             ) -> dict[str, float]:
    """Measures top-1 and top-5 accuracy in percent, over all of `views` and all processes.

    model: images [B, 3, S, S] in [0, 1] -> logits [B, C]
    """
    hits = torch.zeros(2, dtype=torch.long, device=process.device)
    batch_size = args.micro_batch or data.MICRO_BATCH      # any number gives the same scores
    for batch in data.eval_batches(views, batch_size, args, process):
        with process.autocast():
            logits = model(batch["image"] / 255)
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        correct = top == batch["label"][:, None]
        hits += torch.stack([correct[:, 0].sum(), correct.sum()])
    top1, top5 = process.sum(hits).tolist()
    return {"top1": 100 * top1 / len(views), "top5": 100 * top5 / len(views)}


def fit_classifier(args, process: common.Process, model: nn.Module, dataset: Dataset, val: Dataset,
                   image_size: int, *, erase: bool = False, **run) -> dict[str, float]:
    """Trains an image classifier -> top-1 and top-5 accuracy of the best evaluation on `val`

    model: images [B, 3, S, S] in [0, 1] -> logits [B, C]. `erase` adds random erasing to strong
    augmentation. run: keyword arguments of `fit`.
    """
    strong = args.augment == "strong"
    views = (StrongViews(dataset, image_size, args.seed, erase) if strong
             else data.TrainViews(dataset, image_size, args.seed))
    val_views = data.CenterViews(val, image_size)
    data.check(val, args, process)
    mix = mixup_or_cutmix(len(dataset.classes))

    def compute_loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        images, target = data.augment(batch), batch["label"]
        if strong:
            images, target = mix(images, target)
        with process.autocast():
            logits = model(images)
        return {"loss": F.cross_entropy(logits.float(), target,
                                        label_smoothing=0.1 if strong else 0.0)}

    def evaluate() -> dict[str, float]:
        return accuracy(model, val_views, args, process)

    return fit(args, process, model, views, compute_loss, evaluate, val_image_count=len(val),
               classes=dataset.classes, **run)


# ----------------------------------------------------------------------------- the loop

def fit(args, process: common.Process, model: nn.Module, views: Dataset, compute_loss, evaluate,
        *, lr_scale=lambda name: 1.0, **record) -> dict[str, float]:
    """Trains `model` and evaluates it every --save-every -> the scores of the best evaluation

    views: training images, as in `data.TrainViews`
    compute_loss(model, batch): returns metrics; metrics["loss"] is minimized
    evaluate(): returns scores in percent; the first score decides which evaluation is the best
    lr_scale: see `optim.adamw`
    record: more arguments of `Run`
    """
    micro_steps, epoch_steps = data.plan_steps(args, process.world, len(views))
    micro_batch = args.batch_size // (process.world * micro_steps)
    if vars(args).get("augment") == "strong" and micro_batch == 1:      # it would mix with itself
        raise UserError("mixup needs micro-batches of several images; give a larger --micro-batch")
    if "epochs" in args:
        steps, warmup = args.epochs * epoch_steps, args.warmup_epochs * epoch_steps
        decay = "cosine"
    else:
        steps, warmup, decay = args.iterations, args.warmup_iterations, "linear"

    @torch.no_grad()
    def measure() -> dict[str, float]:
        if process.world > 1:      # ranks have different batch statistics: broadcast rank 0's
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        model.eval()
        scores = evaluate()
        model.train()
        return scores

    optimizer = optim.adamw(model, args.lr, args.weight_decay, (0.9, 0.999), lr_scale)
    run = Run(args, process, steps=steps, epoch_steps=epoch_steps, image_count=len(views),
              measure=measure, model=model, optimizer=optimizer, **record)
    run.resume()
    parallel = process.parallel(model.train())
    batches = run.batches(views, micro_steps)

    for step in run.steps():
        lr = optim.learning_rate(step, steps, warmup, args.lr, args.min_lr, decay)
        optim.set_rate(optimizer, lr)
        common.seed_torch("step", args.seed, step, process.rank)      # drop path, ExD, mixup

        for micro_step in range(1, micro_steps + 1):
            batch = next(batches)
            with process.accumulating(parallel, last=micro_step == micro_steps):
                metrics = compute_loss(parallel, batch)
                process.scaler.scale(metrics["loss"] / micro_steps).backward()
            run.log(metrics)

        run.log(optim.optimizer_step(optimizer, process.scaler, args.clip_grad))
        run.end_step(step, lr)      # logs, saves and evaluates; after a signal, raises Stopped
    return run.best_scores
