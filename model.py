"""The models of ExPLoRe: a ViT with Soft-MoE blocks, the student around it and its frozen teachers.

Needs nothing but torch when it is imported; open_clip is imported where a CLIP teacher is built.

Shapes: B images, N patches, V visible patches, T = 1 + N or 1 + V tokens with [CLS] first, D width,
E experts, H hidden width. A boolean `mask` is True where a patch is masked.
"""

import argparse
import logging
import math
import re
import zipfile
from pathlib import Path
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


class SoftMoE(nn.Module):
    """Soft mixture of `experts` MLPs with one slot each, in place of a block's MLP (Eq. 4, App. G).

    `dropout` is the recipe Expert Dropout (ExD): while training, an expert's whole output for an image is
    zeroed with that probability and scaled by 1 / (1 - dropout) otherwise.
    """

    def __init__(self, dim: int, experts: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.phi = nn.Parameter(torch.empty(dim, experts))     # the direction that each expert looks for
        self.scale = nn.Parameter(torch.ones(()))              # how sharply: an inverse temperature
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b1 = nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b2 = nn.Parameter(torch.zeros(experts, dim))
        # nn.init would take the wrong fan from [E, in, out]; these are nn.Linear's bounds, 1 / sqrt(fan_in)
        nn.init.uniform_(self.w1, -dim ** -0.5, dim ** -0.5)
        nn.init.uniform_(self.w2, -hidden ** -0.5, hidden ** -0.5)
        nn.init.uniform_(self.phi, -experts ** -0.5, experts ** -0.5)

    def route(self, x: Tensor) -> Routing:
        """Eq. 4: x [B, T, D] -> weights [B, T, E], in float32 even under autocast or in half precision."""
        precision = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            x, phi = F.normalize(x.to(precision), dim=-1), F.normalize(self.phi.to(precision), dim=0)
            logits = self.scale * (x @ phi)                                        # scaled cosines, [B, T, E]
            return Routing(dispatch=logits.softmax(dim=1), combine=logits.softmax(dim=2))

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
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:      # four times as fast there as PyTorch's own
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

    def __init__(self, dim, heads, experts=0, drop_path=0.0, expert_dropout=0.0, layer_scale=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = SoftMoE(dim, experts, 4 * dim, expert_dropout) if experts else Mlp(dim, 4 * dim)
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
                 moe_blocks: list[int] | None = None, drop_path: float = 0.0, expert_dropout: float = 0.0):
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
        self.blocks = nn.ModuleList(Block(dim, heads, experts if i in moe_blocks else 0, rate, expert_dropout)
                                    for i, rate in enumerate(rates))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        init_weights(self)

    def forward(self, images, ids_keep=None, mask=None, mask_token=None) -> tuple[Tensor, dict[int, Routing]]:
        """images [B, 3, S, S] -> (tokens [B, T, D] after the final norm, Routing of each MoE block).

        Sparse encoding: ids_keep [B, V] names the patches to process; the tokens follow in that order.
        Dense encoding: mask [B, N] marks the patches that mask_token [1, 1, D] replaces.
        """
        x, routing = self.features(images, ids_keep, mask, mask_token)
        return self.norm(x), routing

    def features(self, images, ids_keep=None, mask=None, mask_token=None):
        """`forward` without the final norm."""
        x, routing = self.embed(images, ids_keep, mask, mask_token), {}
        for i, block in enumerate(self.blocks):
            if self.recompute:
                x, routed = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x, routed = block(x)
            if routed is not None:
                routing[i] = routed
        return x, routing

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
            x = gather_patches(x, ids_keep)
        return torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1), x], dim=1)


@torch.no_grad()
def init_weights(module: nn.Module):
    """Truncated normal 0.02, but for the experts; residual projections shrink with depth, as in BEiT."""
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


def gather_patches(x: Tensor, ids: Tensor) -> Tensor:
    """x [B, N, D], ids [B, V] -> [B, V, D]: of each image, the patches `ids` in that order."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))


def shuffle_visible(mask: Tensor, noise: Tensor, visible: int) -> tuple[Tensor, Tensor]:
    """Shuffles an image's patches and drops the masked ones, for sparse encoding.

    mask [B, N], with `visible` patches of each image not masked, and noise [B, N] in [0, 1) -> ids_keep
    [B, V], the patches to keep, and ids_restore [B, N], the position of patch i in "kept, then masked".
    """
    order = torch.argsort(mask + noise, dim=1)      # the paper's pi: visible patches, below 1, come first
    return order[:, :visible], torch.argsort(order, dim=1)


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

    def forward(self, patches, ids_restore=None, mask=None) -> Tensor:
        """-> pixels of all patches in spatial order [B, N, 3 * patch_size ** 2].

        Sparse: patches [B, V, D] of the visible patches and ids_restore [B, N] from `shuffle_visible`.
        Dense: patches [B, N, D] of all, and mask [B, N].
        """
        x = self.embed(patches)
        mask_token = self.mask_token.to(x.dtype)
        if mask is None:      # kept tokens, then mask tokens, then each to its place
            missing = mask_token.expand(len(x), ids_restore.shape[1] - x.shape[1], -1)
            x = gather_patches(torch.cat([x, missing], dim=1), ids_restore)
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
    """The student: a ViT, one linear head on every token to the teacher's width, and a decoder for pixels.

    Dense encoding has a mask token, which is not part of the encoder that later stages load.
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

    def forward(self, images, mask, ids_keep=None, ids_restore=None) -> Prediction:
        """images [B, 3, S, S], mask [B, N]. Sparse encoding also takes the two parts of `shuffle_visible`."""
        if self.mask_token is None:
            tokens, routing = self.encoder(images, ids_keep)
            pixels = self.decoder and self.decoder(tokens[:, 1:], ids_restore)
        else:
            tokens, routing = self.encoder(images, mask=mask, mask_token=self.mask_token)
            pixels = self.decoder and self.decoder(tokens[:, 1:], mask=mask)
        return Prediction(self.head(tokens), pixels, routing)


class LoadError(ValueError):
    """A teacher or checkpoint that cannot be loaded. The message names it and says why, in one line."""


# ---------------------------------------------------------------------------------------------- teachers

class Teacher(nn.Module):
    """A frozen model whose tokens are the targets: square images in [0, 1] of any size -> [B, 1 + N, dim].

    It resizes images so that its patch grid is the student's, and normalizes them its own way.
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


class ClipTeacher(Teacher):
    """CLIP's ViT from open_clip: tokens after its last block, before `ln_post` and the projection.

    `pretrained` is an open_clip tag, a file or "random" (always the same weights, for tests and benchmarks).
    `grid` is the student's number of patches along a side.
    """

    def __init__(self, name: str, pretrained: str, grid: int):
        import open_clip
        # OpenAI's weights need QuickGELU; with another activation every target would silently be wrong. A tag
        # says so; a file does not: there the model's name has to, as in ViT-B-16-quickgelu.
        quick_gelu = open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False)
        if name not in open_clip.list_models():
            raise LoadError(f"teacher {name}/{pretrained}: no such file, and open_clip has no model {name}")
        patch_size = open_clip.get_model_config(name)["vision_cfg"].get("patch_size") or 1
        logging.disable(logging.ERROR)      # open_clip and the hub log what they also raise
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                visual = open_clip.create_model(name, None if pretrained == "random" else pretrained,
                                                force_image_size=grid * patch_size,
                                                force_quick_gelu=quick_gelu).visual
        except Exception as error:          # the model, the tag, the file, the network: open_clip says which
            hint = f"; these weights as a file are {name}-quickgelu/FILE" if quick_gelu else ""
            raise LoadError(f"teacher {name}/{pretrained}: {first_line(error)}{hint}") from error
        finally:
            logging.disable(logging.NOTSET)
        if not isinstance(visual, open_clip.transformer.VisionTransformer):
            raise LoadError(f"teacher {name}: it is not a vision transformer with a [CLS] token")
        mean, std = visual.preprocess_cfg["mean"], visual.preprocess_cfg["std"]
        super().__init__(grid * patch_size, visual.conv1.out_channels, mean, std)
        self.visual = visual

    def tokens(self, images: Tensor) -> Tensor:
        last = self.visual.forward_intermediates(images, indices=1, intermediates_only=True,
                                                 output_fmt="NLC", output_extra_tokens=True)
        return torch.cat([last["image_intermediates_prefix"][0], last["image_intermediates"][0]], dim=1)


class EncoderTeacher(Teacher):
    """An encoder from any checkpoint that `load_encoder` reads: its tokens after the final norm."""

    def __init__(self, path: str, grid: int):
        encoder = load_encoder(path, grid=grid)
        super().__init__(grid * encoder.patch_size, encoder.dim, IMAGENET_MEAN, IMAGENET_STD)
        self.encoder = encoder

    def tokens(self, images: Tensor) -> Tensor:
        return self.encoder(images)[0]


def build_teacher(name: str, grid: int) -> Teacher:
    """`name`: a checkpoint file or open_clip's MODEL/PRETRAINED, split at the first "/". Raises LoadError."""
    if Path(name).is_file():
        teacher = EncoderTeacher(name, grid)
    elif "/" in name:
        teacher = ClipTeacher(*name.split("/", 1), grid)
    else:
        raise LoadError(f"teacher {name}: neither a file nor an open_clip MODEL/PRETRAINED (ViT-B-16/openai)")
    return teacher.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------- checkpoints

HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}      # by width: state dicts do not say
NOT_ENCODER = re.compile(r"\w*head|decoder|mask_token|fc_norm|pre_logits|predictor|projector")


def load_checkpoint(path: str | Path) -> dict:
    """Loads a checkpoint -> a dict of "model" (the state dict; the encoder's names begin with "encoder."),
    "encoder" (the arguments of `ViT`) and "args".

    ViT weights with timm's names (timm, DeiT, MAE) and the authors' release are converted. Raises LoadError
    for anything else, and for a file that holds more than tensors, numbers, strings and argparse's Namespace:
    its code is never run.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):      # which DeiT's and MAE's files have
            file = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        return file if {"model", "encoder", "args"} <= file.keys() else convert_foreign(file)
    except Exception as error:      # missing, cut off, with code inside, of another model: a dozen kinds
        message = f"{path} is neither an ExPLoRe checkpoint nor a timm-style ViT ({first_line(error)})"
        raise LoadError(message) from error


def convert_foreign(file: dict) -> dict:
    """Other people's ViT weights -> the form of our checkpoints. Raises ValueError where they do not fit.

    Heads and decoders are left out; any other tensor that our encoder has no place for refuses the file, for
    without it the features would silently be wrong.
    """
    weights = file.get("model", file.get("state_dict", file))
    state = {name.removeprefix("module."): x for name, x in weights.items() if isinstance(x, Tensor)}
    if any(name.startswith("student.") for name in state):      # the release keeps other networks beside it
        state = {name.removeprefix("student."): x for name, x in state.items() if name.startswith("student.")}
    state = {name: x for name, x in state.items() if not NOT_ENCODER.match(name)}
    missing = {"patch_embed.proj.weight", "pos_embed", "cls_token", "norm.weight"} - state.keys()
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")

    dim, _, patch_size, _ = state["patch_embed.proj.weight"].shape
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    moe_blocks = [i for i in range(depth) if f"blocks.{i}.mlp.phi" in state]
    experts = state[f"blocks.{moe_blocks[0]}.mlp.phi"].reshape(dim, -1).shape[1] if moe_blocks else 0
    heads = file.get("heads", HEADS.get(dim))
    if not heads:
        raise ValueError(f"nothing says how many attention heads an encoder of width {dim} has: save it as "
                         "{'model': state_dict, 'heads': NUMBER}")
    config = dict(image_size=math.isqrt(state["pos_embed"].shape[1] - 1) * patch_size, patch_size=patch_size,
                  dim=dim, depth=depth, heads=heads, experts=experts, moe_blocks=moe_blocks)
    for i in range(depth):
        at = f"blocks.{i}."
        for ours, theirs in (("ls1.gamma", "gamma_1"), ("ls2.gamma", "gamma_2")):      # no LayerScale: ones
            state[at + ours] = state.pop(at + theirs, state.get(at + ours, torch.ones(dim)))
        if at + "attn.q_bias" in state:                                                # keys without a bias
            q, v = state.pop(at + "attn.q_bias"), state.pop(at + "attn.v_bias")
            state[at + "attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
        if i in moe_blocks:
            state[at + "mlp.phi"] = state[at + "mlp.phi"].reshape(dim, experts)
            state[at + "mlp.scale"] = state[at + "mlp.scale"].reshape(())
        for n in (1, 2) if at + "mlp.experts.0.fc1.weight" in state else ():
            layers = [at + f"mlp.experts.{e}.fc{n}." for e in range(experts)]
            state[at + f"mlp.w{n}"] = torch.stack([state.pop(layer + "weight").T for layer in layers])
            state[at + f"mlp.b{n}"] = torch.stack([state.pop(layer + "bias") for layer in layers])
    with torch.device("meta"):
        strays = sorted(state.keys() - ViT(**config).state_dict().keys())
    if strays:
        raise ValueError(f"{', '.join(strays[:3])} has no place in our encoder")
    return {"model": {f"encoder.{name}": x for name, x in state.items()}, "encoder": config, "args": {}}


def load_encoder(path: str | Path, grid: int | None = None, **dropouts) -> ViT:
    """The encoder of a checkpoint (see `load_checkpoint`). `grid` resizes its position embeddings to as many
    patches a side; `dropouts` are ViT's drop_path and expert_dropout. Raises LoadError.
    """
    checkpoint = load_checkpoint(path)
    config, weights = dict(checkpoint["encoder"]), checkpoint["model"]
    state = {name.removeprefix("encoder."): x for name, x in weights.items() if "encoder." in name}
    if grid is not None and "pos_embed" in state:
        config["image_size"] = grid * config["patch_size"]
        state["pos_embed"] = resize_pos_embed(state["pos_embed"], grid)
    encoder = ViT(**config, **dropouts)
    try:
        encoder.load_state_dict(state)
    except RuntimeError as error:
        raise LoadError(f"{path}: {' '.join(str(error).split())[:400]}") from error
    return encoder


def resize_pos_embed(pos_embed: Tensor, grid: int) -> Tensor:
    """pos_embed [1, 1 + M * M, D] -> [1, 1 + grid * grid, D], bicubic; [CLS] keeps its own."""
    cls, patches = pos_embed[:, :1], pos_embed[:, 1:]
    old = math.isqrt(patches.shape[1])
    if old == grid:
        return pos_embed
    patches = patches.unflatten(1, (old, old)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, (grid, grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([cls, patches.flatten(2).transpose(1, 2)], dim=1)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300] or type(error).__name__
