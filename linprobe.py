"""Probes on a frozen encoder: a linear layer on [CLS], or Efficient Probing on the patch tokens.

    torchrun --nproc_per_node 4 linprobe.py runs/pretrain/epoch_0300.pt
    python linprobe.py runs/pretrain/epoch_0300.pt --probe ep --data food101
"""

import argparse

import torch
from torch import Tensor, nn

import common
import data
import finetune  # a probe is finetuning with everything but the head frozen: the loop is the same
from checkpoint import digest, load_encoder
from model import init_weights


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, batch_size=2048)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="of ExPLoRe, the authors' release or timm")
    parser.add_argument("--probe", choices=("linear", "ep"), default="linear", help="linear: on [CLS]; ep: "
                        "Efficient Probing, 32 queries on the patch tokens (default: %(default)s)")
    common.add_trainer_flags(parser, length=100, warmup=10, lr=2e-3, min_lr=0.0, weight_decay=0.0,
                             clip_grad=0.0)
    finetune.add_supervised_flags(parser)
    return common.parse(parser, argv, "linprobe")


class LinearProbe(nn.Module):
    """tokens [B, 1 + N, D] -> logits [B, C] from [CLS]"""

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.head = nn.Linear(dim, classes)
        init_weights(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(tokens[:, 0])


class EfficientProbe(nn.Module):
    """Efficient Probing: learned queries attend to the patch tokens, without a key projection; each pools
    its own slice of their value projection. tokens [B, 1 + N, D] -> logits [B, C]; Q must divide D
    """

    def __init__(self, dim: int, classes: int, queries: int = 32):
        super().__init__()
        self.queries = nn.Parameter(torch.empty(queries, dim))
        self.value = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim, affine=False)
        self.head = nn.Linear(dim, classes)
        nn.init.trunc_normal_(self.queries, std=0.02)
        init_weights(self)

    def forward(self, tokens: Tensor) -> Tensor:
        patches = tokens[:, 1:]
        scores = torch.einsum("bnd,qd->bqn", patches, self.queries) / patches.shape[-1] ** 0.5
        slices = self.value(patches).unflatten(-1, (len(self.queries), -1))      # [B, N, Q, D / Q]
        pooled = torch.einsum("bqn,bnqs->bqs", scores.softmax(-1).to(slices.dtype), slices).flatten(1)
        return self.head(self.norm(pooled.float()))


def main(args: argparse.Namespace) -> dict[str, float]:
    """-> top-1 and top-5 accuracy of the best epoch on val/, in percent"""
    machine, encoder = common.Machine(args), load_encoder(args.checkpoint).eval().requires_grad_(False)
    sources, image_size = {"encoder": digest(encoder)}, encoder.config["image_size"]
    images, val = (data.open_images(args.data, split, image_size) for split in ("train", "val"))
    encoder.to(machine.device)
    if machine.compile:
        encoder.compile()
    common.seed_everything(args.seed)
    kind = LinearProbe if args.probe == "linear" else EfficientProbe
    probe = kind(encoder.dim, len(images.classes)).to(machine.device)
    return finetune.fit(args, machine, encoder, probe, images, val, sources,
                        features=lambda pixels: encoder(pixels)[0])      # tokens [B, 1 + N, D]


if __name__ == "__main__":
    common.launch(main, parse_args())
