"""Probes on a frozen encoder: a linear layer on [CLS], or Efficient Probing on the patch tokens.

    torchrun --nproc_per_node 4 linprobe.py runs/pretrain/epoch_0300.pt
    python linprobe.py runs/pretrain/epoch_0300.pt --probe ep --data food101
"""

import argparse

import torch
from torch import Tensor, nn

import common
import data
import finetune      # a probe is finetuning with everything but the head frozen: the loop is the same
from common import UserError
from model import ViT, load_encoder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="of ExPLoRe, the authors' release or timm")
    parser.add_argument("--probe", choices=("linear", "ep"), default="linear", help="linear: on [CLS]; ep: "
                        "Efficient Probing, 32 queries on the patch tokens (default: %(default)s)")
    common.add_common_flags(parser, batch_size=2048)
    common.add_trainer_flags(parser, length=100, warmup=10, lr=2e-3, min_lr=0.0, weight_decay=0.0,
                             clip_grad=0.0)
    finetune.add_supervised_flags(parser)
    return common.parse(parser, argv, "linprobe")


class FrozenTokens(nn.Module):
    """The encoder in eval mode, without gradient. images [B, 3, S, S] -> tokens [B, 1 + N, D]"""

    def __init__(self, encoder: ViT):
        super().__init__()
        self.encoder = encoder.eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images)[0]


class LinearProbe(nn.Module):
    """tokens [B, 1 + N, D] -> logits [B, C] from [CLS]"""

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.head = nn.Linear(dim, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(tokens[:, 0])


class EfficientProbe(nn.Module):
    """Efficient Probing: learned queries attend to the patch tokens, without a key projection; each pools
    its own slice of their value projection. tokens [B, 1 + N, D] -> logits [B, C]
    """

    def __init__(self, dim: int, classes: int, queries: int = 32):
        super().__init__()
        if dim % queries:
            raise UserError(f"--probe ep: width {dim} is not a multiple of the {queries} queries")
        self.queries = nn.Parameter(torch.empty(queries, dim))
        self.value = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim, affine=False)
        self.head = nn.Linear(dim, classes)
        for weight in (self.queries, self.value.weight, self.head.weight):
            nn.init.trunc_normal_(weight, std=0.02)
        nn.init.zeros_(self.value.bias)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        patches = tokens[:, 1:]
        scores = torch.einsum("bnd,qd->bqn", patches, self.queries) / patches.shape[-1] ** 0.5
        attention = scores.softmax(-1)
        slices = self.value(patches).unflatten(-1, (len(self.queries), -1))      # [B, N, Q, D / Q]
        pooled = torch.einsum("bqn,bnqs->bqs", attention.to(slices.dtype), slices).flatten(1)
        return self.head(self.norm(pooled.float()))


def main(args: argparse.Namespace) -> dict[str, float]:
    """-> top-1 and top-5 accuracy of the best epoch on val/, in percent"""
    run = common.Run(args)
    encoder = load_encoder(args.checkpoint).to(run.device)
    image_size = encoder.config["image_size"]
    images, val = (data.open_images(args.data, split, image_size) for split in ("train", "val"))
    common.seed_everything(args.seed)
    kind = LinearProbe if args.probe == "linear" else EfficientProbe
    probe = kind(encoder.dim, len(images.classes)).to(run.device)
    if args.probe == "ep" and common.sizes(args, run.world, len(images))[0] == 1:
        raise UserError("--micro-batch 1: the BatchNorm of --probe ep needs at least 2 images")
    return finetune.fit(args, run, probe, encoder, images, val, {"checkpoint": common.digest(encoder)},
                        prepare=FrozenTokens(encoder))


if __name__ == "__main__":
    common.run(main, parse_args())
