"""The model of ExPLoRe: a ViT with Soft-MoE blocks, and the student around it. Needs nothing but torch.

Shapes: B images, N patches, V visible patches, T = 1 + N or 1 + V tokens with [CLS] first, D width,
E experts, H hidden width. A boolean `mask` is True where a patch is masked.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

PRESETS = {
    "vit_nano": dict(dim=96, depth=4, heads=3),      # for small images and CPUs
    "vit_tiny": dict(dim=192, depth=12, heads=3),
    "vit_small": dict(dim=384, depth=12, heads=6),
    "vit_base": dict(dim=768, depth=12, heads=12),   # the paper's ViT-B/16
    "vit_large": dict(dim=1024, depth=24, heads=16),
}


# ---------------------------------------------------------------------------------------------- Soft-MoE

class Routing(NamedTuple):
    """The routing weights of one Soft-MoE block, both from the same logits (Eq. 4)."""
    dispatch: Tensor   # [B, T, E], sums to 1 over tokens: how much each token gives to an expert's slot
    combine: Tensor    # [B, T, E], sums to 1 over experts: how much of each expert's output a token takes


class Router(nn.Module):
    """How much each token gives to each expert, and takes from it, by scaled cosines (Eq. 4)."""

    def __init__(self, dim: int, experts: int):
        super().__init__()
        self.phi = nn.Parameter(torch.empty(dim, experts))     # the direction that each expert looks for
        self.scale = nn.Parameter(torch.ones(()))              # how sharply: an inverse temperature
        nn.init.uniform_(self.phi, -experts ** -0.5, experts ** -0.5)

    def route(self, x: Tensor) -> Routing:
        """x [B, T, D] -> weights [B, T, E], in float32 even under autocast or in half precision."""
        precision = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            x, phi = F.normalize(x.to(precision), dim=-1), F.normalize(self.phi.to(precision), dim=0)
            logits = self.scale * (x @ phi)                                        # scaled cosines, [B, T, E]
            return Routing(dispatch=logits.softmax(dim=1), combine=logits.softmax(dim=2))


class SoftMoE(Router):
    """Soft mixture of `experts` MLPs with one slot each, in place of a block's MLP (Eq. 4, App. G).

    `dropout` is the recipe Expert Dropout (ExD): while training, an expert's whole output for an image is
    zeroed with that probability and scaled by 1 / (1 - dropout) otherwise.
    """

    def __init__(self, dim: int, experts: int, hidden: int, dropout: float = 0.0):
        super().__init__(dim, experts)
        self.dropout = dropout
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b1 = nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b2 = nn.Parameter(torch.zeros(experts, dim))
        # nn.init would take the wrong fan from [E, in, out]; these are nn.Linear's bounds, 1 / sqrt(fan_in)
        nn.init.uniform_(self.w1, -dim ** -0.5, dim ** -0.5)
        nn.init.uniform_(self.w2, -hidden ** -0.5, hidden ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x [B, T, D] -> (y [B, T, D], Routing)"""
        routing = self.route(x)
        slots = torch.einsum("bte,btd->ebd", routing.dispatch.to(x.dtype), x)      # one slot per expert
        hidden = F.gelu(torch.baddbmm(self.b1[:, None], slots, self.w1))           # all experts at once
        slots = torch.baddbmm(self.b2[:, None], hidden, self.w2)
        slots = slots * F.dropout(slots.new_ones(*slots.shape[:2], 1), self.dropout, self.training)
        return torch.einsum("bte,ebd->btd", routing.combine.to(slots.dtype), slots), routing


# ------------------------------------------------------------------------------------ Vision Transformer

def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of each head: [B, heads, T, d] each -> the same."""
    # faster than PyTorch's own on CPUs with bf16 units, by a quarter of a ViT-B/16's training step
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(attention(q, k, v).transpose(1, 2).reshape(b, t, d))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    def __init__(self, dim: int, init: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, drops an image's branch with probability p and scales up the others."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(x.new_ones(len(x), 1, 1), self.p) if self.training and self.p else x


class Block(nn.Module):
    """Pre-norm transformer block; the MLP is a SoftMoE if experts > 0. `layer_scale` None: no LayerScale."""

    def __init__(self, dim, heads, experts=0, drop_path=0.0, layer_scale=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = SoftMoE(dim, experts, 4 * dim) if experts else Mlp(dim, 4 * dim)
        self.ls1 = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()
        self.ls2 = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        y = self.mlp(self.norm2(x))
        y, routing = y if isinstance(self.mlp, SoftMoE) else (y, None)
        return x + self.drop_path(self.ls2(y)), routing


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, dim: int):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """Vision Transformer whose `moe_blocks` (0-based; default 1, 3, 5, ...) are Soft-MoE if experts > 0.

    Parameters carry timm's names: without experts, its state loads into timm's VisionTransformer and back.
    `drop_path` rises linearly from 0 at the first block to its value at the last. With `recompute` set, the
    backward pass computes each block again from its input: less memory for one more forward pass.
    """
    recompute = False

    def __init__(self, image_size: int, patch_size: int, dim: int, depth: int, heads: int, experts: int = 0,
                 moe_blocks: list[int] | None = None, drop_path: float = 0.0):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image size {image_size} is not a multiple of patch size {patch_size}")
        moe_blocks = sorted(range(1, depth, 2) if moe_blocks is None else set(moe_blocks)) if experts else []
        if not set(moe_blocks) <= set(range(depth)):
            raise ValueError(f"MoE blocks {moe_blocks}: a ViT of depth {depth} has blocks 0 to {depth - 1}")
        # what a checkpoint needs to build this encoder again; dropout belongs to a run, not to the model
        self.config = dict(image_size=image_size, patch_size=patch_size, dim=dim, depth=depth, heads=heads,
                           experts=experts, moe_blocks=moe_blocks)
        self.dim, self.patch_size, self.grid = dim, patch_size, image_size // patch_size
        self.moe_blocks = moe_blocks

        self.patch_embed = PatchEmbed(patch_size, dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid ** 2, dim))
        rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.ModuleList(Block(dim, heads, experts if i in moe_blocks else 0, rate)
                                    for i, rate in enumerate(rates))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        init_weights(self)

    def forward(self, images, ids_keep=None, mask=None, mask_token=None) -> tuple[Tensor, dict[int, Routing]]:
        """images [B, 3, S, S] -> (tokens [B, T, D] after the final norm, Routing of each MoE block).

        Sparse encoding: ids_keep [B, V] names the patches to process, in the order of the tokens.
        Dense encoding: mask [B, N] marks the patches that mask_token [1, 1, D] replaces.
        """
        x, routing = self.embed(images, ids_keep, mask, mask_token), {}
        for i, block in enumerate(self.blocks):
            if self.recompute:
                x, routed = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x, routed = block(x)
            if routed is not None:
                routing[i] = routed
        return self.norm(x), routing

    def intermediate(self, images: Tensor, blocks: list[int]) -> list[Tensor]:
        """The patch tokens after each of `blocks`: images [B, 3, S, S] -> maps [B, D, grid, grid]."""
        x, maps = self.embed(images), {}
        for i, block in enumerate(self.blocks):
            x, _ = block(x)
            maps[i] = x[:, 1:].transpose(1, 2).unflatten(2, (self.grid, self.grid))
        return [maps[i] for i in blocks]

    def embed(self, images, ids_keep=None, mask=None, mask_token=None) -> Tensor:
        """images [B, 3, S, S] -> the tokens that enter the first block [B, T, D]."""
        x = self.patch_embed(images)
        if mask is not None:
            x = torch.where(mask[..., None], mask_token.to(x.dtype), x)
        x = x + self.pos_embed[:, 1:]      # before patches are dropped: each still knows where it came from
        if ids_keep is not None:
            x = x.gather(1, ids_keep[..., None].expand(-1, -1, x.shape[-1]))      # [B, V, D]
        return torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1), x], dim=1)


@torch.no_grad()
def init_weights(module: nn.Module):
    """Truncated normal 0.02, but not for routers and experts; residual projections, the experts' too, shrink
    with depth, as in BEiT."""
    for name, parameter in module.named_parameters():
        if name.split(".")[-1] in ("cls_token", "pos_embed", "mask_token"):
            nn.init.trunc_normal_(parameter, std=0.02)
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    for depth, block in enumerate(getattr(module, "blocks", []), start=1):
        block.attn.proj.weight.div_(math.sqrt(2 * depth))
        (block.mlp.w2 if isinstance(block.mlp, SoftMoE) else block.mlp.fc2.weight).div_(math.sqrt(2 * depth))


def build_vit(name: str, **overrides) -> ViT:
    """A ViT by its name in PRESETS, at 224 px and patch 16 unless overridden."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}: one of {', '.join(PRESETS)}")
    return ViT(**dict(image_size=224, patch_size=16) | PRESETS[name] | overrides)


def encoder_macs(vit: ViT, tokens: int = 197) -> int:
    """Multiply-accumulates of an image's pass through the blocks: Table 6, whose "GFLOPs" are MACs.

    Experts see E slots instead of T tokens: that is why 64 of them cost less than one MLP.
    """
    macs = 0
    for block in vit.blocks:
        macs += 4 * tokens * vit.dim ** 2 + 2 * tokens ** 2 * vit.dim      # attention
        if isinstance(block.mlp, SoftMoE):      # logits, dispatch, combine; the MLPs
            experts, _, hidden = block.mlp.w1.shape
            macs += 3 * tokens * experts * vit.dim + 2 * experts * vit.dim * hidden
        else:
            macs += 2 * tokens * vit.dim * block.mlp.fc1.out_features
    return macs


# ----------------------------------------------------------------------------------------------- student

class PixelDecoder(nn.Module):
    """Pixels of all patches from the encoder's patch tokens (App. E); discarded after pretraining."""

    def __init__(self, encoder: ViT, dim: int = 512, depth: int = 8, heads: int = 16):
        super().__init__()
        self.embed = nn.Linear(encoder.dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, encoder.grid ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, layer_scale=None) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pixels = nn.Linear(dim, 3 * encoder.patch_size ** 2)
        init_weights(self)

    def forward(self, patches: Tensor, ids_keep: Tensor | None, mask: Tensor) -> Tensor:
        """Sparse: patches [B, V, D] that ids_keep [B, V] names. Dense: all [B, N, D], and None. mask [B, N]
        is where mask tokens stand. -> pixels of all patches [B, N, 3 * patch_size ** 2]
        """
        x = self.embed(patches)
        if ids_keep is not None:
            everywhere = x.new_zeros(*mask.shape, x.shape[-1])
            x = everywhere.scatter(1, ids_keep[..., None].expand_as(x), x)
        x = torch.where(mask[..., None], self.mask_token.to(x.dtype), x) + self.pos_embed
        for block in self.blocks:
            x, _ = block(x)
        return self.pixels(self.norm(x))


class Prediction(NamedTuple):
    tokens: Tensor                  # of the teacher's tokens [B, T, Dt], [CLS] first
    pixels: Tensor | None           # of all patches [B, N, 3 * patch_size ** 2], where there is a decoder
    routing: dict[int, Routing]     # of each MoE block, and of the loss router at the end
    ids_keep: Tensor | None         # the visible patches [B, V], in the order of `tokens`; None if dense


class Explore(nn.Module):
    """The student: a ViT, one linear head on every token to the teacher's width, and a decoder for pixels.

    Sparse encoding processes the visible patches alone, as MAE does. Dense encoding processes all, with a
    mask token in place of the masked ones, as BEiT does. `loss_router`, the paper's future work, adds a
    router of two experts for the losses alone, on the final tokens: Routing number len(encoder.blocks).
    """

    def __init__(self, encoder: ViT, teacher_dim: int, mask_ratio: float = 0.4, dense: bool = False,
                 pixels: bool = False, loss_router: bool = False):
        super().__init__()
        self.encoder, self.dense = encoder, dense
        self.visible = encoder.grid ** 2 - int(mask_ratio * encoder.grid ** 2)
        self.head = nn.Linear(encoder.dim, teacher_dim)
        init_weights(self.head)
        mask_token = nn.init.trunc_normal_(torch.empty(1, 1, encoder.dim), std=0.02) if dense else None
        self.mask_token = nn.Parameter(mask_token) if dense else None
        self.decoder = PixelDecoder(encoder) if pixels else None
        self.loss_router = Router(encoder.dim, 2) if loss_router else None

    def forward(self, images: Tensor, mask: Tensor) -> Prediction:
        """images [B, 3, S, S]; mask [B, N], of which int(mask_ratio * N) are True in each image"""
        if self.dense:
            ids_keep = None
            tokens, routing = self.encoder(images, mask=mask, mask_token=self.mask_token)
        else:      # the visible patches come first
            ids_keep = mask.int().argsort(dim=1, stable=True)[:, :self.visible]
            tokens, routing = self.encoder(images, ids_keep)
        if self.loss_router:
            routing[len(self.encoder.blocks)] = self.loss_router.route(tokens)
        pixels = self.decoder(tokens[:, 1:], ids_keep, mask) if self.decoder else None
        return Prediction(self.head(tokens), pixels, routing, ids_keep)
