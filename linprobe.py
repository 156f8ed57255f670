"""Probes on a frozen encoder: a linear layer, or Efficient Probing on the patch tokens.

    torchrun --nproc_per_node 4 linprobe.py runs/pretrain/epoch_0300.pt
    python linprobe.py ViT-B-16/openai --probe ep --data food101
"""

import argparse

import torch
from torch import Tensor, nn

import common
import data
import supervised
from encoders import FrozenEncoder, build_frozen
from model import init_weights


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, "ENCODER ")
    group = parser.add_argument_group("probe")
    group.add_argument("encoder", metavar="ENCODER", type=common.path,
                       help="a checkpoint file, open_clip's MODEL/PRETRAINED, or timm/NAME")
    group.add_argument(
        "--probe", choices=("linear", "ep"), default="linear",
        help="linear: a linear layer on pooled tokens (--pool); ep: Efficient Probing, with 32 "
             "queries on the patch tokens")
    common.add_pool_flag(group)
    common.add_train_flags(parser, "linprobe", batch_size=2048, lr=2e-3, min_lr=0.0,
                           weight_decay=0.0, clip_grad=0.0, length=100, warmup=10,
                           save_every=10)
    supervised.add_augment_flag(parser)
    args = common.parse_run(parser, argv)
    if args.probe == "ep" and args.pool != "cls":
        parser.error("--pool needs --probe linear")
    return args


class EfficientProbe(nn.Module):
    """The head of Efficient Probing: tokens [B, 1 + N, D] -> logits [B, C]

    Learned queries attend to the patch tokens, without a key projection. Each of Q queries pools
    its own slice of the patches' value projection, so Q must divide D.
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
        slices = self.value(patches).unflatten(-1, (len(self.queries), -1))   # [B, N, Q, D / Q]
        weights = scores.softmax(-1).to(slices.dtype)
        pooled = torch.einsum("bqn,bnqs->bqs", weights, slices).flatten(1)
        return self.head(self.norm(pooled.float()))


class Probe(nn.Module):
    """A head on a frozen encoder: images [B, 3, S, S] in [0, 1] -> logits [B, C]

    The probe's parameters and state dict do not include the encoder.
    """

    def __init__(self, frozen: FrozenEncoder, head: nn.Module):
        super().__init__()
        self.head = head
        self.outside = (frozen,)      # in a tuple, PyTorch does not look for modules

    def forward(self, images: Tensor) -> Tensor:
        frozen, = self.outside
        with torch.no_grad():
            tokens = frozen(images)      # [B, 1 + N, D]
        return self.head(tokens)


def main(args) -> dict[str, float]:
    """Returns the top-1 and top-5 accuracy of the best evaluation on val/, in percent."""
    process = common.Process(args)
    frozen = build_frozen(args.encoder).to(process.device)
    dataset, val = (data.open_images(args.data, split, frozen.image_size)
                    for split in ("train", "val"))
    common.seed_torch("weights", args.seed)
    size = frozen.dim, len(dataset.classes)
    head = (supervised.LinearHead(*size, args.pool) if args.probe == "linear"
            else EfficientProbe(*size)).to(process.device)
    if args.compile:
        frozen.compile()
    return supervised.fit_classifier(args, process, Probe(frozen, head), dataset, val,
                                     frozen.image_size, encoder=args.encoder,
                                     digest=frozen.digest,
                                     title=f"{args.probe} probe of {args.encoder}")


if __name__ == "__main__":
    common.launch(main, parse_args())
