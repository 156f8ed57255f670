"""The model of ExPLoRe: a ViT with Soft-MoE blocks, and the student around it.

Needs nothing but torch. Shapes: B images, N patches, V visible patches, T = 1 + N or 1 + V
tokens with [CLS] first, D width, E experts, H hidden width. A boolean `mask` is True where a
patch is masked.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

PRESETS = {
    "vit_nano": dict(dim=96, depth=4, heads=3),      # for small images and CPUs
    "vit_tiny": dict(dim=192, depth=12, heads=3),
    "vit_small": dict(dim=384, depth=12, heads=6),
    "vit_base": dict(dim=768, depth=12, heads=12),   # the paper's ViT-B/16
    "vit_large": dict(dim=1024, depth=24, heads=16),
}
DECODER = dict(dim=512, depth=8, heads=16)      # App. E


# ----------------------------------------------------------------------------- Soft-MoE

class Routing(NamedTuple):
    """The routing weights of one Soft-MoE block, both from the same logits (Eq. 4).

    dispatch sums to 1 over tokens: how much each token gives to an expert's slot. combine
    sums to 1 over experts: how much of each expert's output a token takes.
    """
    dispatch: Tensor   # [B, T, E]
    combine: Tensor    # [B, T, E]


class Router(nn.Module):
    """How much each token gives to each expert, and takes from it: scaled cosines (Eq. 4)."""

    def __init__(self, dim: int, experts: int):
        super().__init__()
        self.phi = nn.Parameter(torch.empty(dim, experts))   # what each expert looks for
        self.scale = nn.Parameter(torch.ones(()))            # how sharply: 1 / temperature
        nn.init.uniform_(self.phi, -experts ** -0.5, experts ** -0.5)

    def route(self, x: Tensor) -> Routing:
        """x [B, T, D] -> weights [B, T, E], in float32 even in half precision."""
        precision = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            x = F.normalize(x.to(precision), dim=-1)
            phi = F.normalize(self.phi.to(precision), dim=0)
            logits = self.scale * (x @ phi)                  # scaled cosines, [B, T, E]
            return Routing(dispatch=logits.softmax(dim=1), combine=logits.softmax(dim=2))


class SoftMoE(Router):
    """Soft mixture of `experts` MLPs with one slot each, in place of an MLP (Eq. 4, App. G).

    `dropout` is the recipe Expert Dropout (ExD): in training, an expert's whole output for an
    image is zeroed with that probability, and scaled by 1 / (1 - dropout) otherwise.
    """

    def __init__(self, dim: int, experts: int, hidden: int, dropout: float = 0.0):
        super().__init__(dim, experts)
        self.dropout = dropout
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b1 = nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b2 = nn.Parameter(torch.zeros(experts, dim))
        # nn.init would take the wrong fan of [E, in, out]; nn.Linear's bound is 1 / sqrt(in)
        nn.init.uniform_(self.w1, -dim ** -0.5, dim ** -0.5)
        nn.init.uniform_(self.w2, -hidden ** -0.5, hidden ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x [B, T, D] -> (y [B, T, D], Routing)"""
        routing = self.route(x)
        slots = torch.einsum("bte,btd->ebd", routing.dispatch.to(x.dtype), x)      # [E, B, D]
        hidden = F.gelu(torch.baddbmm(self.b1[:, None], slots, self.w1))           # [E, B, H]
        slots = torch.baddbmm(self.b2[:, None], hidden, self.w2)
        slots = slots * F.dropout(torch.ones_like(slots[..., :1]), self.dropout, self.training)
        return torch.einsum("bte,ebd->btd", routing.combine.to(slots.dtype), slots), routing


# ------------------------------------------------------------------- Vision Transformer

class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                 # each [B, heads, T, D / heads]
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, t, d))


class LayerScale(nn.Module):
    def __init__(self, dim: int, init: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, drops an image's branch with probability p."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(x.new_ones(len(x), 1, 1), self.p) if self.training and self.p else x


class Block(nn.Module):
    """Pre-norm transformer block, whose MLP is a SoftMoE if experts > 0.

    `layer_scale` is the initial value of LayerScale; None: there is none.
    """

    def __init__(self, dim: int, heads: int, experts: int = 0, drop_path: float = 0.0,
                 layer_scale: float | None = 0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = SoftMoE(dim, experts, 4 * dim) if experts else nn.Sequential(OrderedDict(
            fc1=nn.Linear(dim, 4 * dim), act=nn.GELU(), fc2=nn.Linear(4 * dim, dim)))
        self.ls1 = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()
        self.ls2 = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """x [B, T, D] -> (x [B, T, D], the SoftMoE's Routing)"""
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        y = self.mlp(self.norm2(x))
        y, routing = y if isinstance(self.mlp, SoftMoE) else (y, None)
        return x + self.drop_path(self.ls2(y)), routing


class ViT(nn.Module):
    """Vision Transformer whose `moe_blocks` are Soft-MoE if experts > 0.

    `moe_blocks` are 0-based; the default is 1, 3, 5, ... Parameters carry timm's names: without
    experts, its state loads into timm's VisionTransformer and back. `drop_path` rises linearly
    from 0 at the first block to its value at the last. With `recompute` set, the backward pass
    computes each block again from its input: less memory for one more forward pass.
    """
    recompute = False

    def __init__(self, image_size: int, patch_size: int, dim: int, depth: int, heads: int,
                 experts: int = 0, moe_blocks: list[int] | None = None, drop_path: float = 0.0):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image size {image_size} is no multiple of patch size {patch_size}")
        if moe_blocks is None:
            moe_blocks = range(1, depth, 2)
        moe_blocks = sorted(set(moe_blocks)) if experts else []
        if not set(moe_blocks) <= set(range(depth)):
            raise ValueError(f"MoE blocks {moe_blocks}: there are blocks 0 to {depth - 1}")
        # what a checkpoint needs to build this encoder again; drop path belongs to a run
        self.config = dict(image_size=image_size, patch_size=patch_size, dim=dim, depth=depth,
                           heads=heads, experts=experts, moe_blocks=moe_blocks)
        self.dim, self.patch_size, self.moe_blocks = dim, patch_size, moe_blocks
        self.grid = image_size // patch_size

        self.patch_embed = nn.Sequential(OrderedDict(
            proj=nn.Conv2d(3, dim, patch_size, stride=patch_size)))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid ** 2, dim))
        self.blocks = nn.ModuleList(
            Block(dim, heads, experts if i in moe_blocks else 0, drop_path * i / max(depth - 1, 1))
            for i in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        init_weights(self)

    def forward(self, images: Tensor, ids_keep: Tensor | None = None, mask: Tensor | None = None,
                mask_token: Tensor | None = None) -> tuple[Tensor, dict[int, Routing]]:
        """images [B, 3, S, S] -> (tokens [B, T, D] after the norm, Routing of each MoE block).

        Sparse encoding: ids_keep int64 [B, V] names the patches to process, in their order.
        Dense encoding: mask bool [B, N] marks those that mask_token [1, 1, D] replaces.
        """
        x = self.embed(images, ids_keep, mask, mask_token)
        routings = {}
        for i, block in enumerate(self.blocks):
            if self.recompute:
                x, routing = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x, routing = block(x)
            if routing is not None:
                routings[i] = routing
        return self.norm(x), routings

    def intermediate(self, images: Tensor, blocks: list[int]) -> list[Tensor]:
        """The patch tokens after each of `blocks`: [B, 3, S, S] -> maps [B, D, grid, grid]."""
        x = self.embed(images)
        maps = []
        for block in self.blocks:
            x, _ = block(x)
            maps.append(x[:, 1:].transpose(1, 2).unflatten(2, (self.grid, self.grid)))
        return [maps[i] for i in blocks]

    def embed(self, images: Tensor, ids_keep: Tensor | None = None, mask: Tensor | None = None,
              mask_token: Tensor | None = None) -> Tensor:
        """images [B, 3, S, S] -> the tokens that enter the first block [B, T, D]."""
        x = self.patch_embed(images).flatten(2).transpose(1, 2)      # [B, N, D]
        if mask is not None:
            x = torch.where(mask[..., None], mask_token.to(x.dtype), x)
        x = x + self.pos_embed[:, 1:]      # before patches are dropped: each keeps its place
        if ids_keep is not None:
            x = x.gather(1, ids_keep[..., None].expand(-1, -1, x.shape[-1]))     # [B, V, D]
        cls = self.cls_token + self.pos_embed[:, :1]
        return torch.cat([cls.expand(len(x), -1, -1), x], dim=1)


@torch.no_grad()
def init_weights(module: nn.Module):
    """Truncated normal 0.02, but for routers and experts, which have their own.

    Residual projections, the experts' too, shrink with depth, as in BEiT.
    """
    for name, parameter in module.named_parameters():
        if name.split(".")[-1] in ("cls_token", "pos_embed", "mask_token"):
            nn.init.trunc_normal_(parameter, std=0.02)
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    for depth, block in enumerate(getattr(module, "blocks", []), start=1):
        mlp = block.mlp.w2 if isinstance(block.mlp, SoftMoE) else block.mlp.fc2.weight
        mlp.div_(math.sqrt(2 * depth))
        block.attn.proj.weight.div_(math.sqrt(2 * depth))


def build_vit(name: str, **overrides) -> ViT:
    """A ViT by its name in PRESETS, at 224 px and patch 16 unless overridden."""
    return ViT(**dict(image_size=224, patch_size=16) | PRESETS[name] | overrides)


def encoder_macs(vit: ViT, tokens: int = 197) -> int:
    """Multiply-accumulates of an image in the blocks: Table 6, whose "GFLOPs" are MACs.

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


# ------------------------------------------------------------------------------ student

class PixelDecoder(nn.Module):
    """Pixels of all patches from the encoder's patch tokens (App. E).

    It is discarded after pretraining.
    """

    def __init__(self, encoder: ViT, dim: int, depth: int, heads: int):
        super().__init__()
        self.embed = nn.Linear(encoder.dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, encoder.grid ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, layer_scale=None) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pixels = nn.Linear(dim, 3 * encoder.patch_size ** 2)
        init_weights(self)

    def forward(self, patches: Tensor, ids_keep: Tensor | None, mask: Tensor) -> Tensor:
        """Pixels of all patches, [B, N, 3 * patch_size ** 2].

        Sparse: patches [B, V, D] that ids_keep [B, V] names. Dense: all [B, N, D], and None.
        Mask tokens stand where mask [B, N] is True.
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
    """What a student makes of B images: its guess of the teacher's tokens, and of pixels."""
    tokens: Tensor                  # [B, T, Dt], [CLS] first
    pixels: Tensor | None           # of all patches [B, N, 3 * patch_size ** 2]
    routing: dict[int, Routing]     # of each MoE block, and of the loss router at the end
    ids_keep: Tensor | None         # the patches in `tokens` [B, V]; None: all N


class Explore(nn.Module):
    """The student: a ViT, one linear head on every token to the teacher's width, and a
    decoder for pixels.

    Sparse encoding processes the visible patches alone, as MAE does. Dense encoding processes
    all, with a mask token in place of the masked ones, as BEiT does. `pixels` adds a decoder of
    size `decoder`. `loss_router`, the paper's future work, adds a router of two experts for the
    losses alone, on the final tokens: Routing number len(encoder.blocks).
    """

    def __init__(self, encoder: ViT, teacher_dim: int, mask_ratio: float = 0.4,
                 dense: bool = False, pixels: bool = False, loss_router: bool = False,
                 decoder: dict = DECODER):
        super().__init__()
        self.encoder, self.dense = encoder, dense
        self.visible = encoder.grid ** 2 - int(mask_ratio * encoder.grid ** 2)
        self.head = nn.Linear(encoder.dim, teacher_dim)
        init_weights(self.head)
        mask_token = nn.Parameter(torch.empty(1, 1, encoder.dim))
        self.mask_token = nn.init.trunc_normal_(mask_token, std=0.02) if dense else None
        self.decoder = PixelDecoder(encoder, **decoder) if pixels else None
        self.loss_router = Router(encoder.dim, 2) if loss_router else None

    def forward(self, images: Tensor, mask: Tensor) -> Prediction:
        """images [B, 3, S, S]; mask bool [B, N], int(mask_ratio * N) of each image are True"""
        ids_keep = None
        if self.dense:
            tokens, routing = self.encoder(images, mask=mask, mask_token=self.mask_token)
        else:      # the visible patches come first
            ids_keep = mask.int().argsort(dim=1, stable=True)[:, :self.visible]
            tokens, routing = self.encoder(images, ids_keep)
        if self.loss_router:
            routing[len(self.encoder.blocks)] = self.loss_router.route(tokens)
        pixels = self.decoder(tokens[:, 1:], ids_keep, mask) if self.decoder else None
        return Prediction(self.head(tokens), pixels, routing, ids_keep)
