"""The models of ExPLoRe: a Vision Transformer with Soft-MoE blocks, the student around it and its frozen teachers.

Needs nothing but torch when it is imported; open_clip is imported where a CLIP teacher is built.

Shapes: B images, N patches, V visible patches, T = 1 + N or 1 + V tokens with [CLS] first, D width, E experts, H hidden
width. A boolean `mask` is True where a patch is masked.
"""

import contextlib
import logging
import math
import pickle
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

PRESETS = {
    "vit_nano": dict(dim=96, depth=4, heads=3),      # the demo's, for small images and CPUs
    "vit_tiny": dict(dim=192, depth=12, heads=3),
    "vit_small": dict(dim=384, depth=12, heads=6),
    "vit_base": dict(dim=768, depth=12, heads=12),   # the paper's ViT-B/16
    "vit_large": dict(dim=1024, depth=24, heads=16),
}


# ----------------------------------------------------------------------------------------------------------- Soft-MoE

class Routing(NamedTuple):
    """What the router of one block decided, both from the same logits (Eq. 4)."""
    dispatch: Tensor   # [B, T, E], sums to 1 over tokens: how much each token gives to an expert's slot
    combine: Tensor    # [B, T, E], sums to 1 over experts: how much of each expert's output a token takes


def no_autocast(device_type: str):
    """Switches autocast off inside; device types without autocast, like meta, have none to switch off."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else contextlib.nullcontext()


class SoftMoE(nn.Module):
    """Soft mixture of `experts` MLPs with one slot per expert, in place of a transformer block's MLP (Eq. 4, App. G).

    `dropout` is the transfer recipe Expert Dropout (ExD): while training, an expert's whole output is zeroed for an
    image with that probability, and scaled by 1 / (1 - dropout) otherwise.
    """

    def __init__(self, dim: int, experts: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.phi = nn.Parameter(torch.empty(dim, experts))          # the direction that each expert looks for
        self.scale = nn.Parameter(torch.ones(()))                   # how sharply it looks: an inverse temperature
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b1 = nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b2 = nn.Parameter(torch.zeros(experts, dim))
        # nn.init would take the wrong fan from [E, in, out]; these are nn.Linear's bounds, 1 / sqrt(fan_in)
        nn.init.uniform_(self.w1, -dim ** -0.5, dim ** -0.5)
        nn.init.uniform_(self.w2, -hidden ** -0.5, hidden ** -0.5)
        nn.init.uniform_(self.phi, -experts ** -0.5, experts ** -0.5)

    def route(self, x: Tensor) -> Routing:
        """x [B, T, D] -> dispatch and combine weights [B, T, E], in float32 under autocast and in half-precision models too."""
        precision = torch.promote_types(x.dtype, torch.float32)
        with no_autocast(x.device.type):
            tokens, phi = F.normalize(x.to(precision), dim=-1), F.normalize(self.phi.to(precision), dim=0)
            logits = self.scale * (tokens @ phi)                                           # cosines, [B, T, E]
            return Routing(dispatch=logits.softmax(dim=1), combine=logits.softmax(dim=2))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x [B, T, D] -> (y [B, T, D], Routing)."""
        routing = self.route(x)
        slots = torch.einsum("bte,btd->ebd", routing.dispatch.to(x.dtype), x)             # one slot per expert
        hidden = F.gelu(torch.baddbmm(self.b1[:, None], slots, self.w1))                  # all experts at once
        slots = torch.baddbmm(self.b2[:, None], hidden, self.w2)
        slots = slots * F.dropout(slots.new_ones(*slots.shape[:2], 1), self.dropout, self.training)
        return torch.einsum("bte,ebd->btd", routing.combine.to(slots.dtype), slots), routing


# ------------------------------------------------------------------------------------------------- Vision Transformer

def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of each head: [B, heads, T, d] each -> the same."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:      # by its definition: PyTorch's fused one takes four times as long here
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
    """Stochastic depth: while training, drops a whole branch for an image with probability `p` and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(x.new_ones(len(x), 1, 1), self.p) if self.training and self.p else x


class Block(nn.Module):
    """Pre-norm transformer block; its MLP is a SoftMoE where `experts` > 0. x [B, T, D] -> ([B, T, D], Routing or None).

    `layer_scale` is LayerScale's initial value; None leaves LayerScale out.
    """

    def __init__(self, dim, heads, experts=0, drop_path=0.0, expert_dropout=0.0, layer_scale: float | None = 0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = SoftMoE(dim, experts, 4 * dim, expert_dropout) if experts else Mlp(dim, 4 * dim)
        self.ls1, self.ls2 = (LayerScale(dim, layer_scale) if layer_scale else nn.Identity() for _ in range(2))
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
    """Vision Transformer whose blocks `moe_blocks` (0-based; 1, 3, 5, ... by default) are Soft-MoE where experts > 0.

    Parameters carry timm's names: without experts its state loads into timm's VisionTransformer and back.
    `drop_path` rises linearly from 0 at the first block to its value at the last. With `recompute` set, the backward pass
    computes each block again from its input, the one thing of it that is kept: less memory for a forward pass more.
    """
    recompute = False

    def __init__(self, image_size: int, patch_size: int, dim: int, depth: int, heads: int, experts: int = 0,
                 moe_blocks: list[int] | None = None, drop_path: float = 0.0, expert_dropout: float = 0.0):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image size {image_size} is not a multiple of patch size {patch_size}")
        moe_blocks = (list(range(1, depth, 2)) if moe_blocks is None else sorted(set(moe_blocks))) if experts else []
        if any(not 0 <= block < depth for block in moe_blocks):
            raise ValueError(f"MoE blocks {moe_blocks}: a ViT of depth {depth} has blocks 0 to {depth - 1}")
        # what a checkpoint needs to build this encoder again; dropout belongs to a training run, not to the model
        self.config = dict(image_size=image_size, patch_size=patch_size, dim=dim, depth=depth, heads=heads,
                           experts=experts, moe_blocks=moe_blocks)
        self.dim, self.patch_size, self.grid, self.moe_blocks = dim, patch_size, image_size // patch_size, moe_blocks

        self.patch_embed = PatchEmbed(patch_size, dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid ** 2, dim))
        self.blocks = nn.ModuleList(
            Block(dim, heads, experts if i in moe_blocks else 0, drop_path * i / max(depth - 1, 1), expert_dropout)
            for i in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        init_weights(self)

    def forward(self, images: Tensor, ids_keep: Tensor | None = None, mask: Tensor | None = None,
                mask_token: Tensor | None = None) -> tuple[Tensor, dict[int, Routing]]:
        """images [B, 3, S, S] -> (tokens [B, T, D] after the final norm, Routing of each MoE block).

        Sparse encoding: ids_keep [B, V] names the patches to process; the tokens follow in that order.
        Dense encoding: mask [B, N] marks the patches that mask_token [1, 1, D] replaces.
        """
        x, routing = self.features(images, ids_keep, mask, mask_token)
        return self.norm(x), routing

    def features(self, images: Tensor, ids_keep: Tensor | None = None, mask: Tensor | None = None,
                 mask_token: Tensor | None = None) -> tuple[Tensor, dict[int, Routing]]:
        """As `forward`, without the final norm."""
        x, routing = self.embed(images, ids_keep, mask, mask_token), {}
        for i, block in enumerate(self.blocks):
            x, routed = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if routed is not None:
                routing[i] = routed
        return x, routing

    def intermediate(self, images: Tensor, blocks: list[int]) -> list[Tensor]:
        """The patch tokens after each of `blocks`, as maps: images [B, 3, S, S] -> [B, D, grid, grid] each."""
        x, maps = self.embed(images), {}
        for i, block in enumerate(self.blocks):
            x, _ = block(x)
            maps[i] = x[:, 1:].transpose(1, 2).unflatten(2, (self.grid, self.grid))
        return [maps[i] for i in blocks]

    def embed(self, images: Tensor, ids_keep: Tensor | None = None, mask: Tensor | None = None,
              mask_token: Tensor | None = None) -> Tensor:
        """images [B, 3, S, S] -> the tokens that enter the first block [B, T, D]."""
        x = self.patch_embed(images)
        if mask is not None:
            x = torch.where(mask[..., None], mask_token.to(x.dtype), x)
        x = x + self.pos_embed[:, 1:]      # before dropping patches: what is left still knows where it came from
        if ids_keep is not None:
            x = take(x, ids_keep)
        return torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1), x], dim=1)


@torch.no_grad()
def init_weights(module: nn.Module):
    """Truncated normal 0.02 (experts have their own init); residual projections shrink with depth, as in BEiT."""
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


def take(x: Tensor, ids: Tensor) -> Tensor:
    """x [B, N, D], ids [B, V] -> [B, V, D]: of each image, the patches `ids` in that order."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))


def shuffle_visible(mask: Tensor, noise: Tensor, visible: int) -> tuple[Tensor, Tensor]:
    """Sparse encoding's permutation and its cut in one: mask [B, N], noise [B, N] in [0, 1) -> (ids_keep [B, V],
    ids_restore [B, N]), the patches to keep and where the decoder finds patch i in the sequence "kept, then masked".

    mask + noise is below 1 for visible patches and above for masked ones, so sorting it puts the visible first, in
    random order. Every image must have exactly `visible` patches that are not masked.
    """
    order = torch.argsort(mask + noise, dim=1)      # the paper's pi
    return order[:, :visible], torch.argsort(order, dim=1)


def build_vit(name: str, **overrides) -> ViT:
    """A ViT by its name in PRESETS, at 224 px and patch 16 unless overridden. Works under torch.device("meta")."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}: one of {', '.join(PRESETS)}")
    return ViT(**(dict(image_size=224, patch_size=16) | PRESETS[name] | overrides))


def encoder_macs(vit: ViT, tokens: int = 197) -> int:
    """Multiply-accumulates of one image's pass through the blocks: the paper's Table 6, where "GFLOPs" are MACs.

    A MoE block's experts see E slots instead of T tokens: that is why 64 experts cost less than one MLP.
    """
    macs = 0
    for block in vit.blocks:
        macs += attention_macs(tokens, vit.dim)
        if isinstance(block.mlp, SoftMoE):
            experts, _, hidden = block.mlp.w1.shape
            macs += 3 * tokens * experts * vit.dim + 2 * experts * vit.dim * hidden  # logits, dispatch, combine; MLPs
        else:
            macs += 2 * tokens * vit.dim * block.mlp.fc1.out_features
    return macs


def attention_macs(tokens: int, dim: int) -> int:
    return 4 * tokens * dim ** 2 + 2 * tokens ** 2 * dim                             # qkv and proj; q k^T and its v


# ------------------------------------------------------------------------------------------------------------ student

class PixelDecoder(nn.Module):
    """Reconstructs the pixels of all patches from the encoder's patch tokens (App. E): 8 blocks, width 512, 16 heads.

    It is trained with the student and left behind afterwards.
    """

    def __init__(self, encoder: ViT, dim: int = 512, depth: int = 8, heads: int = 16):
        super().__init__()
        self.embed = nn.Linear(encoder.dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, encoder.grid ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, layer_scale=None) for _ in range(depth))     # as the release's
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pixels = nn.Linear(dim, 3 * encoder.patch_size ** 2)
        init_weights(self)

    def forward(self, patches: Tensor, ids_restore: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """-> pixels of all patches in spatial order [B, N, 3 * patch_size ** 2].

        Sparse: patches [B, V, D] of the visible patches and ids_restore [B, N] from `shuffle_visible`.
        Dense: patches [B, N, D] of all, and mask [B, N].
        """
        x = self.embed(patches)
        mask_token = self.mask_token.to(x.dtype)
        if mask is None:      # kept tokens, then mask tokens, then each to its place
            missing = ids_restore.shape[1] - x.shape[1]
            x = take(torch.cat([x, mask_token.expand(len(x), missing, -1)], dim=1), ids_restore)
        else:
            x = torch.where(mask[..., None], mask_token, x)
        x = x + self.pos_embed
        for block in self.blocks:
            x, _ = block(x)
        return self.pixels(self.norm(x))


class Prediction(NamedTuple):
    tokens: Tensor                  # of the teacher's tokens [B, T, Dt], [CLS] first
    pixels: Tensor | None           # of all patches [B, N, 3 * patch_size ** 2], where there is a decoder
    routing: dict[int, Routing]     # of each MoE block


class Explore(nn.Module):
    """The student: a ViT, one linear head on every token from its width to the teacher's, and a decoder for pixels.

    `dense` encoding has a mask token, which is no part of the encoder that later stages load.
    """

    def __init__(self, encoder: ViT, teacher_dim: int, dense: bool = False, pixels: bool = False):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.dim, teacher_dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, encoder.dim)) if dense else None
        init_weights(self.head)
        if dense:
            nn.init.trunc_normal_(self.mask_token, std=0.02)
        self.decoder = PixelDecoder(encoder) if pixels else None

    def forward(self, images: Tensor, mask: Tensor, ids_keep: Tensor | None = None,
                ids_restore: Tensor | None = None) -> Prediction:
        """images [B, 3, S, S], mask [B, N]. Sparse encoding also takes the two parts of `shuffle_visible`."""
        if self.mask_token is None:
            tokens, routing = self.encoder(images, ids_keep)
            pixels = self.decoder and self.decoder(tokens[:, 1:], ids_restore)
        else:
            tokens, routing = self.encoder(images, mask=mask, mask_token=self.mask_token)
            pixels = self.decoder and self.decoder(tokens[:, 1:], mask=mask)
        return Prediction(self.head(tokens), pixels, routing)


# ----------------------------------------------------------------------------------------------------------- teachers

class Teacher(nn.Module):
    """A frozen model whose tokens are the targets. Takes images in [0, 1] of any size, gives [B, 1 + N, dim].

    It resizes and normalizes them itself, to its own image size (one patch for each patch of the student), mean and std.
    `macs` are the multiply-accumulates of one image's pass through its blocks.
    """

    def __init__(self, image_size: int, dim: int, mean: tuple, std: tuple):
        super().__init__()
        self.image_size, self.dim = image_size, dim
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] != self.image_size:
            images = F.interpolate(images, (self.image_size, self.image_size), mode="bicubic", antialias=True)
        return self.tokens((images.clamp(0, 1).to(self.mean.dtype) - self.mean) / self.std)


class ClipAttention(Attention):
    """Our attention with the weights of an nn.MultiheadAttention, in its place: compiled, that one is slow on a CPU."""

    def __init__(self, theirs: nn.MultiheadAttention):
        with torch.device("meta"):      # its own weights need not be made
            super().__init__(theirs.embed_dim, theirs.num_heads)
        self.qkv.weight, self.qkv.bias, self.proj = theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, attn_mask: None) -> tuple[Tensor]:
        """query [B, T, D]; a vision transformer's keys and values are the same tokens, and nothing masks them."""
        return (super().forward(query),)


class ClipTeacher(Teacher):
    """CLIP's vision transformer from open_clip: tokens after its last block, before `ln_post` and the projection.

    `pretrained` is a tag of open_clip, a file or "random" (the same weights every time: for tests and benchmarks).
    `grid` is the student's number of patches along a side. Raises ValueError with what would be right.
    """

    def __init__(self, name: str, pretrained: str, grid: int):
        import open_clip
        if name not in open_clip.list_models():
            raise ValueError(f"open_clip has no model {name!r}; it has {', '.join(open_clip.list_models())}")
        tags = open_clip.list_pretrained_tags_by_model(name)
        if pretrained != "random" and pretrained not in tags and not Path(pretrained).is_file():
            raise ValueError(f"{pretrained!r} is no file and no weights of {name}; it has {', '.join(tags)} and random")
        patch_size = open_clip.get_model_config(name)["vision_cfg"].get("patch_size")
        if patch_size is None:
            raise ValueError(f"{name} is no vision transformer with a [CLS] token")
        # OpenAI's weights were trained with QuickGELU; with another activation every target would be silently wrong. A file
        # has no such record: there the model's name says it (ViT-B-16-quickgelu).
        quick_gelu = open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False)
        try:
            with quiet_logging(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                visual = open_clip.create_model(
                    name, None if pretrained == "random" else pretrained, force_image_size=grid * patch_size,
                    force_quick_gelu=quick_gelu).visual
        except Exception as error:   # the network, the hub, the cache, the file: many kinds, one meaning
            if pretrained in tags:      # a file does not say that its weights need QuickGELU: the model's name has to
                quick = f"{name}-quickgelu" if quick_gelu and f"{name}-quickgelu" in open_clip.list_models() else name
                raise ValueError(f"the weights of {name} could not be downloaded here; give a file as {quick}/FILE "
                                 f"({first_line(error)})") from error
            raise ValueError(f"{pretrained} holds no weights of {name} ({first_line(error)})") from error
        if not isinstance(visual, open_clip.transformer.VisionTransformer):
            raise ValueError(f"{name} is no vision transformer with a [CLS] token")
        cfg = visual.preprocess_cfg
        super().__init__(grid * patch_size, visual.conv1.out_channels, cfg["mean"], cfg["std"])
        self.visual = visual
        for block in visual.transformer.resblocks:
            if isinstance(block.attn, nn.MultiheadAttention):
                block.attn = ClipAttention(block.attn)
        self.macs = sum(attention_macs(1 + grid ** 2, self.dim) + 2 * (1 + grid ** 2) * self.dim * block.mlp.c_fc.out_features
                        for block in visual.transformer.resblocks)

    def tokens(self, images: Tensor) -> Tensor:
        last = self.visual.forward_intermediates(images, indices=1, intermediates_only=True, output_fmt="NLC",
                                                 output_extra_tokens=True)
        return torch.cat([last["image_intermediates_prefix"][0], last["image_intermediates"][0]], dim=1)


class EncoderTeacher(Teacher):
    """An encoder from any checkpoint of ours as the teacher: its tokens after the final norm."""

    def __init__(self, path: str, grid: int):
        encoder = load_encoder(path, grid=grid)
        super().__init__(grid * encoder.patch_size, encoder.dim, IMAGENET_MEAN, IMAGENET_STD)
        self.encoder, self.macs = encoder, encoder_macs(encoder, 1 + grid ** 2)

    def tokens(self, images: Tensor) -> Tensor:
        return self.encoder(images)[0]


def build_teacher(name: str, grid: int) -> Teacher:
    """`name` is a checkpoint of ours or an open_clip MODEL/PRETRAINED, split at the first slash. Frozen, in eval mode.

    Raises ValueError with what would be right.
    """
    if Path(name).is_file():
        teacher = EncoderTeacher(name, grid)
    elif "/" in name:
        teacher = ClipTeacher(*name.split("/", 1), grid)
    else:
        raise ValueError("neither a checkpoint file nor an open_clip MODEL/PRETRAINED such as ViT-B-16/openai")
    return teacher.eval().requires_grad_(False)


@contextlib.contextmanager
def quiet_logging():
    """open_clip logs as errors what is raised as well."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


# -------------------------------------------------------------------------------------------------------- checkpoints

HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}      # attention heads by width, which state dicts do not tell
NO_ENCODER = re.compile(r"\w*head|decoder|mask_token|fc_norm|pre_logits|predictor|projector")      # what may stand beside one in a file

FITS = "What fits: a checkpoint of ours, the authors' release, or a ViT's weights with timm's names (timm, DeiT, MAE)"


def load_checkpoint(path: str | Path) -> dict:
    """A checkpoint of any of our stages, or other people's ViT weights in the same form: a dict of "model" (the encoder's
    parameters begin with "encoder."), "encoder" (what rebuilds it) and "args".

    Reads plain ViT state dicts with timm's names (timm, DeiT, MAE) and the authors' release. Only tensors, numbers and
    strings are ever unpickled; ValueError for a file that holds more, or something else.
    """
    checkpoint = read_tensors(path)
    try:
        if isinstance(checkpoint, dict) and {"model", "encoder", "args"} <= checkpoint.keys():
            check_format(checkpoint)
            return checkpoint
        return convert_foreign(checkpoint)
    except Exception as error:      # a stranger's file may have anything anywhere
        raise ValueError(f"{path} is no checkpoint of ours and no ViT with timm's names: {first_line(error)}. {FITS}") from error


def read_tensors(path: str | Path):
    """What torch.save has written, without ever running code from the file. ValueError where it is something else."""
    if not Path(path).exists():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)      # the format of PyTorch before 1.6
    except Exception as error:      # a file can be damaged in a dozen ways
        says = str(error)
        if isinstance(error, pickle.UnpicklingError) and re.search("GLOBAL|global|class", says):
            raise ValueError(
                f"{path} is no checkpoint of ours: it holds more than tensors, numbers and strings, which could run code when read. If "
                f"you trust where it comes from, convert it: python -c \"import torch; torch.save({{'model': torch.load('{path}', "
                "map_location='cpu', weights_only=False)['model']}, 'converted.pt')\"") from error
        cause = f"PyTorch cannot read it ({type(error).__name__}: {first_line(error)})"
        if Path(path).is_file() and Path(path).stat().st_size == 0:
            cause = "it is empty"
        elif isinstance(error, pickle.UnpicklingError):
            cause = "PyTorch has not written it, or it is damaged"
        elif "central directory" in says or "not a ZIP archive" in says:
            cause = "it is cut off or damaged"
        elif "TorchScript" in says:
            cause = "it is a TorchScript archive, as OpenAI's CLIP files are: such a file is for --teacher, as MODEL/FILE"
        raise ValueError(f"{path} is no checkpoint of ours: {cause}. {FITS}") from error


def check_format(checkpoint: dict):
    """ValueError unless a file with our keys also has what belongs under them."""
    for name in ("model", "encoder", "args"):
        if not isinstance(checkpoint[name], dict):
            raise ValueError(f"its {name!r} is no dict")
    model, config = checkpoint["model"], checkpoint["encoder"]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in model.items()):
        raise ValueError("its 'model' holds more than named tensors")
    names = {"image_size", "patch_size", "dim", "depth", "heads", "experts", "moe_blocks"}
    if config.keys() != names:
        raise ValueError(f"its encoder has {', '.join(map(str, config))}, but this version reads {', '.join(sorted(names))}")
    numbers = [config[name] for name in sorted(names - {"moe_blocks"})]
    if not (isinstance(config["moe_blocks"], list) and all(type(n) is int and n >= 0 for n in numbers + config["moe_blocks"])
            and config["patch_size"] and config["heads"] and config["dim"] % config["heads"] == 0):
        raise ValueError(f"its encoder is impossible: {config}")


def misfit(config: dict, state: dict[str, Tensor]) -> str | None:
    """What keeps `state` from being that of an encoder with this `config`: the first name of it; None where all fit."""
    if len(state) < config["depth"]:
        return f"{len(state)} encoder parameters are too few for depth {config['depth']}"
    with torch.device("meta"):
        expected = ViT(**config).state_dict()
    for name, value in expected.items():
        if name not in state or state[name].shape != value.shape:
            return f"{name} is missing or has another shape"
    return next((f"{name} has no place in it" for name in state if name not in expected), None)


def convert_foreign(checkpoint: dict) -> dict:
    """Other people's ViT weights -> the form of our checkpoints. Raises ValueError where something does not fit.

    Heads and decoders beside the encoder are left out; any other tensor that our ViT has no place for is refused by name,
    for without it the features would be silently wrong.
    """
    heads = checkpoint.get("heads") if isinstance(checkpoint, dict) else None
    for wrapper in ("model", "state_dict"):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(wrapper), dict):
            checkpoint = checkpoint[wrapper]
    if not isinstance(checkpoint, dict):
        raise ValueError("it is no dict of tensors")
    if any("visual.conv1.weight" in str(key) for key in checkpoint):
        raise ValueError("it is a CLIP model, which is for --teacher, as MODEL/FILE")
    state = {str(key).removeprefix("module."): value for key, value in checkpoint.items() if isinstance(value, Tensor)}
    if any(key.startswith("student.") for key in state):      # the authors' release keeps other networks beside it
        state = {key.removeprefix("student."): value for key, value in state.items() if key.startswith("student.")}
    if not {"patch_embed.proj.weight", "pos_embed", "cls_token", "norm.weight"} <= state.keys():
        raise ValueError("it lacks patch_embed.proj.weight, pos_embed, cls_token or norm.weight")
    ours = ("patch_embed", "cls_token", "pos_embed", "blocks", "norm")
    if strays := [name for name in state if name.split(".")[0] not in ours and not NO_ENCODER.match(name)]:
        raise ValueError(f"{', '.join(strays[:3])} has no place in our encoder")

    dim, _, patch_size, _ = state["patch_embed.proj.weight"].shape
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    moe_blocks = [i for i in range(depth) if f"blocks.{i}.mlp.phi" in state]
    experts = state[f"blocks.{moe_blocks[0]}.mlp.phi"].reshape(dim, -1).shape[1] if moe_blocks else 0
    config = dict(image_size=math.isqrt(state["pos_embed"].shape[1] - 1) * patch_size, patch_size=patch_size, dim=dim,
                  depth=depth, heads=heads or HEADS.get(dim), experts=experts, moe_blocks=moe_blocks)
    if not config["heads"]:
        raise ValueError(f"nothing tells how many attention heads an encoder of width {dim} has: save it as "
                         "{'model': state_dict, 'heads': NUMBER}")
    for i in range(depth):
        at = f"blocks.{i}."
        for ours, theirs in (("ls1.gamma", "gamma_1"), ("ls2.gamma", "gamma_2")):       # none at all is one of ones
            state[at + ours] = state.pop(at + theirs, state.get(at + ours, torch.ones(dim)))
        if at + "attn.q_bias" in state:                                                 # keys without a bias have a bias of 0
            q, v = state.pop(at + "attn.q_bias"), state.pop(at + "attn.v_bias")
            state[at + "attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
        if i in moe_blocks:
            state[at + "mlp.phi"] = state[at + "mlp.phi"].reshape(dim, experts)
            state[at + "mlp.scale"] = state[at + "mlp.scale"].reshape(())
            for n in (1, 2) if at + "mlp.experts.0.fc1.weight" in state else ():
                layers = [at + f"mlp.experts.{e}.fc{n}." for e in range(experts)]
                state[at + f"mlp.w{n}"] = torch.stack([state.pop(layer + "weight").T for layer in layers])
                state[at + f"mlp.b{n}"] = torch.stack([state.pop(layer + "bias") for layer in layers])
    encoder = {name: value for name, value in state.items() if not NO_ENCODER.match(name)}
    if wrong := misfit(config, encoder):
        raise ValueError(wrong)
    model = {f"encoder.{key}": value for key, value in encoder.items()}
    model |= {f"head.{key}": state[f"distill_head.{key}"] for key in ("weight", "bias") if f"distill_head.{key}" in state}
    return {"model": model, "encoder": config, "args": {}}


def load_encoder(path: str | Path, grid: int | None = None, **dropouts) -> ViT:
    """The encoder of a checkpoint (see `load_checkpoint`). With `grid`, its position embeddings are resized to that many
    patches a side; `dropouts` are ViT's drop_path and expert_dropout.

    Raises ValueError where the file is none.
    """
    checkpoint = load_checkpoint(path)
    config = dict(checkpoint["encoder"])
    state = {key.removeprefix("encoder."): value for key, value in checkpoint["model"].items()
             if key.startswith("encoder.")}
    if grid is not None:
        config["image_size"] = grid * config["patch_size"]
        state |= {"pos_embed": resize_pos_embed(state["pos_embed"], grid)} if "pos_embed" in state else {}
    try:
        if wrong := misfit(config, state):      # before anything of a stranger's size is built
            raise ValueError(wrong)
        encoder = ViT(**config, **dropouts)
        encoder.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} holds no whole encoder ({first_line(error)})") from error
    return encoder


def resize_pos_embed(pos_embed: Tensor, grid: int) -> Tensor:
    """pos_embed [1, 1 + M * M, D] -> [1, 1 + grid * grid, D], bicubic; [CLS] keeps its own."""
    cls, patches = pos_embed[:, :1], pos_embed[:, 1:]
    old = math.isqrt(patches.shape[1])
    if old == grid:
        return pos_embed
    patches = patches.view(1, old, old, -1).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, (grid, grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([cls, patches.flatten(2).transpose(1, 2)], dim=1)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
