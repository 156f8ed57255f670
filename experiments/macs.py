"""Parameters and multiply-accumulates of ViT-B/16 by number of experts, as in Table 6.

    python experiments/macs.py
"""

import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import ViT, build_vit


def encoder_macs(vit: ViT) -> int:
    """Multiply-accumulates (MACs) of all blocks of a ViT on the "meta" device, for one image: Table
    6 calls them "GFLOPs".

    Experts process E slots instead of T tokens, which is why 64 of them cost less than one MLP.
    """
    with FlopCounterMode(display=False) as counter:
        for block in vit.blocks:
            block(torch.empty(1, 1 + vit.grid ** 2, vit.dim, device="meta"))
    return counter.get_total_flops() // 2      # a multiplication and an addition


def main():
    for experts in (0, 2, 16, 32, 64):
        with torch.device("meta"):
            vit = build_vit("vit_base", experts=experts)
        millions = sum(p.numel() for p in vit.parameters()) / 1e6
        print(f"{experts:3} experts: {millions:7.1f} M parameters, "
              f"{encoder_macs(vit) / 1e9:.2f} G MACs")


if __name__ == "__main__":
    main()
