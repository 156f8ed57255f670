"""Parameters and multiply-accumulates of ViT-B/16 by number of experts, as in Table 6.

    python experiments/macs.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import SoftMoE, ViT, build_vit


def encoder_macs(vit: ViT, tokens: int = 197) -> int:
    """Multiply-accumulates (MACs) of all blocks for one image: Table 6 calls them "GFLOPs".

    Experts process E slots instead of T tokens, which is why 64 of them cost less than one MLP.
    """
    macs = 0
    for block in vit.blocks:
        macs += 4 * tokens * vit.dim ** 2 + 2 * tokens ** 2 * vit.dim      # attention
        if isinstance(block.mlp, SoftMoE):      # logits, dispatch and combine, then MLPs
            experts, _, hidden = block.mlp.w1.shape
            macs += 3 * tokens * experts * vit.dim + 2 * experts * vit.dim * hidden
        else:
            macs += 2 * tokens * vit.dim * block.mlp.fc1.out_features
    return macs


def main():
    for experts in (0, 2, 16, 32, 64):
        with torch.device("meta"):
            vit = build_vit("vit_base", experts=experts)
        millions = sum(p.numel() for p in vit.parameters()) / 1e6
        print(f"{experts:3} experts: {millions:7.1f} M parameters, "
              f"{encoder_macs(vit) / 1e9:.2f} G MACs")


if __name__ == "__main__":
    main()
