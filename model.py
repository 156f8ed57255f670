"""The model of ExPLoRe: a ViT with Soft-MoE blocks, and the student around it.

This file needs nothing but torch. Shapes: B images, N patches, V visible patches, T = 1 + N or
1 + V tokens with [CLS] first, D width, E experts, H hidden width. A boolean `mask` is True where a
patch is masked.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

# Mean and standard deviation of ImageNet's pixels in [0, 1] (red, green, blue), the same as in
# torchvision and timm.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Width, depth and heads of ViT and DeiT. vit_nano is ours, for small images on CPUs. The paper's
# model is vit_base with a patch size of 16.
PRESETS = {
    "vit_nano": dict(dim=96, depth=4, heads=3),
    "vit_tiny": dict(dim=192, depth=12, heads=3),
    "vit_small": dict(dim=384, depth=12, heads=6),
    "vit_base": dict(dim=768, depth=12, heads=12),
    "vit_large": dict(dim=1024, depth=24, heads=16),
    "vit_huge": dict(dim=1280, depth=32, heads=16),
}
DECODER = dict(dim=512, depth=8, heads=16)      # App. E


def decays(name: str, parameter: Tensor) -> bool:
    """Whether this parameter has weight decay.

    All parameters have it, `phi` too, except biases (the experts' b1 and b2 have two dimensions),
    norms, LayerScale, `scale`, position embeddings, and [CLS], register and mask tokens. The names
    of embeddings and tokens are timm's.
    """
    return parameter.ndim > 1 and not f".{name}".endswith((".b1", ".b2", "pos_embed", "_token"))


def normalize(images: Tensor, mean=IMAGENET_MEAN, std=IMAGENET_STD) -> Tensor:
    """Normalizes images [..., 3, H, W] in [0, 1] to zero mean and unit variance, for the model.

    Raises ValueError if they are not floats, or have another number of channels.
    """
    if not images.is_floating_point():
        raise ValueError(f"images of {images.dtype}; expected floats in [0, 1]")
    # Python floats, because copying tensors to a GPU would make the host wait
    channels = zip(images.unbind(-3), mean, std, strict=True)
    return torch.stack([(x - m) / s for x, m, s in channels], dim=-3)


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cuts images [B, C, H, W] into flat patches [B, N, P], where P = C * patch_size ** 2.

    The pixels of a patch are in the order (channel, y, x), like a convolution's weight.
    """
    return F.pixel_unshuffle(images, patch_size).flatten(2).transpose(1, 2)


# ----------------------------------------------------------------------------- Soft-MoE

class Routing(NamedTuple):
    """The two kinds of weights that a router computes from the same logits (Eq. 4).

    dispatch: how much each token contributes to an expert's input, its slot; sums to 1 over tokens
    combine: how much each expert's output contributes to a token; sums to 1 over experts
    """
    dispatch: Tensor   # [B, T, E]
    combine: Tensor    # [B, T, E]


class Router(nn.Module):
    """Computes routing weights from the cosine of each token and each expert's phi (Eq. 4).

    x [B, T, D] -> Routing, [B, T, E] each, in float32 even if x has half precision. Tokens
    [T, B, D], the default of nn.Transformer, would be weighted over the batch, without an error.

    Where `valid`, bool [B, T], is False, a token is padding, and no expert gets any of it;
    nn.Transformer's key_padding_mask is the inverse. A masked patch is no padding: if it is to have
    a loss, it needs a weight. Raises ValueError if x does not have three dimensions.
    """

    def __init__(self, dim: int, experts: int = 1):
        super().__init__()
        self.phi = nn.Parameter(torch.empty(dim, experts))   # what each expert looks for
        # 1 / temperature of the softmaxes; [1] because fully_shard takes no scalars
        self.scale = nn.Parameter(torch.ones(1))
        self.reset_parameters()

    def reset_parameters(self):
        # Only the direction of phi matters to the weights, but its length sets how fast AdamW can
        # turn it: these are the initial values of the authors' code.
        bound = self.phi.shape[1] ** -0.5
        nn.init.uniform_(self.phi, -bound, bound)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        if x.ndim != 3:      # a map [B, H, W, D] would be normalized column by column
            raise ValueError(f"tokens {tuple(x.shape)}; expected [B, T, D]")
        precision = torch.promote_types(x.dtype, torch.float32)
        device = "cpu" if x.is_meta else x.device.type      # the meta device has no autocast
        with torch.autocast(device, enabled=False):
            x = F.normalize(x.to(precision), dim=-1)
            phi = F.normalize(self.phi.to(precision), dim=0)
            logits = self.scale * (x @ phi)                  # scaled cosines, [B, T, E]
            combine = logits.softmax(dim=2)
            if valid is not None:
                logits = logits.masked_fill(~valid[..., None], -math.inf)
            return Routing(dispatch=logits.softmax(dim=1), combine=combine)


class SoftMoE(nn.Module):
    """A soft mixture of `experts` MLPs that replaces a block's MLP (Eq. 4, App. G).

    Each expert has one slot. `dropout` is the probability of the recipe Expert Dropout (ExD): in
    training, an expert's whole output for an image is zeroed with this probability, and otherwise
    scaled by 1 / (1 - dropout).

    Every output depends on all tokens of its row, later ones too, so a SoftMoE must not stand in
    the trunk of a causal model; a Router beside the trunk changes no token. A row needs all tokens
    of one image and no others: images packed into one row would share the experts' inputs, and
    windows, or tokens split over ranks, would each have a routing of their own.
    """

    def __init__(self, dim: int, experts: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.router = Router(dim, experts)
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b1 = nn.Parameter(torch.empty(experts, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b2 = nn.Parameter(torch.empty(experts, dim))
        self.reset_parameters()

    def reset_parameters(self):
        dim, hidden = self.w1.shape[1:]
        # nn.Linear's bound, 1 / sqrt(in). nn.init would take in * out as the fan-in of a tensor
        # [E, in, out].
        nn.init.uniform_(self.w1, -dim ** -0.5, dim ** -0.5)
        nn.init.uniform_(self.w2, -hidden ** -0.5, hidden ** -0.5)
        nn.init.zeros_(self.b1)
        nn.init.zeros_(self.b2)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Routing]:
        """x [B, T, D] -> (y [B, T, D], Routing); `valid` as in `Router`"""
        routing = self.router(x, valid)
        slots = torch.einsum("bte,btd->ebd", routing.dispatch.to(x.dtype), x)      # [E, B, D]
        hidden = F.gelu(torch.baddbmm(self.b1[:, None], slots, self.w1))           # [E, B, H]
        outputs = torch.baddbmm(self.b2[:, None], hidden, self.w2)                 # [E, B, D]
        kept = F.dropout(torch.ones_like(outputs[..., :1]), self.dropout, self.training)
        outputs = outputs * kept
        y = torch.einsum("bte,ebd->btd", routing.combine.to(outputs.dtype), outputs)
        return y, routing      # with its graph: patch losses train the router through `dispatch`


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
    """Stochastic depth: in training, zeroes an image's residual branch with probability p, and
    scales it by 1 / (1 - p) otherwise. In evaluation, it changes nothing.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        # not F.dropout: torch.compile would build a graph for each block's p, and give up after 8
        kept = torch.rand(x.shape[0], 1, 1, device=x.device) >= self.p
        return x * (kept / (1 - self.p)).to(x.dtype)


class Block(nn.Module):
    """A pre-norm transformer block; its MLP is a SoftMoE if experts > 0.

    `layer_scale` is the initial value of LayerScale, or None for no LayerScale. The default comes
    from the authors' code. The MLP's width of 4 * dim and the norms' eps are ViT's.
    """

    def __init__(self, dim: int, heads: int, experts: int = 0, drop_path: float = 0.0,
                 layer_scale: float | None = 0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = SoftMoE(dim, experts, 4 * dim) if experts else nn.Sequential(OrderedDict(
            fc1=nn.Linear(dim, 4 * dim), act=nn.GELU(), fc2=nn.Linear(4 * dim, dim)))
        scaled = layer_scale is not None
        self.ls1 = LayerScale(dim, layer_scale) if scaled else nn.Identity()
        self.ls2 = LayerScale(dim, layer_scale) if scaled else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """x [B, T, D] -> (x [B, T, D], the SoftMoE's Routing or None)"""
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        y, routing = self.mlp(self.norm2(x)), None
        if isinstance(y, tuple):      # a SoftMoE's, also if something wraps it
            y, routing = y
        return x + self.drop_path(self.ls2(y)), routing


class ViT(nn.Module):
    """Vision Transformer; if experts > 0, a SoftMoE replaces the MLP in each of `moe_blocks`.

    `moe_blocks` are counted from 0; the default is 1, 3, 5, ... The probability of dropping a
    residual branch rises linearly from 0 at the first block to `drop_path` at the last. With
    `recompute` set (activation checkpointing), the backward pass computes each block again from
    its input, which saves memory and costs one more forward pass.

    Parameters have timm's names: the state dict of a ViT without experts loads into timm's
    VisionTransformer(init_values=0.1, num_classes=0), and `checkpoints.load_encoder` reads timm's
    state dicts.
    """
    recompute = False

    def __init__(self, image_size: int, patch_size: int, dim: int, depth: int, heads: int,
                 experts: int = 0, moe_blocks: list[int] | None = None, drop_path: float = 0.0):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image size {image_size} is not a multiple of the patch size "
                             f"{patch_size}")
        if moe_blocks is None:
            moe_blocks = range(1, depth, 2)
        moe_blocks = sorted(set(moe_blocks)) if experts else []
        if not set(moe_blocks) <= set(range(depth)):
            raise ValueError(f"MoE blocks {moe_blocks}: the model has blocks 0 to {depth - 1}")
        # Checkpoints save this to build the encoder again. It leaves out drop_path, because each
        # stage has its own.
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
        """images [B, 3, S, S] -> (tokens [B, T, D] after the norm, {MoE block: its Routing})

        Sparse encoding processes only the patches with indices ids_keep, int64 [B, V], in this
        order. Dense encoding processes all patches; mask_token [1, 1, D] replaces the patches
        where mask, bool [B, N], is True.
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

    def embed(self, images: Tensor, ids_keep: Tensor | None = None, mask: Tensor | None = None,
              mask_token: Tensor | None = None) -> Tensor:
        """images [B, 3, S, S] -> the tokens [B, T, D] that enter the first block

        Arguments as in `forward`. Raises ValueError if the images do not have the ViT's size.
        """
        size = self.grid * self.patch_size
        if images.shape[2:] != (size, size):
            raise ValueError(f"images of {tuple(images.shape[2:])} pixels; this ViT takes {size} x "
                             f"{size}, a grid of {self.grid} x {self.grid} patches of "
                             f"{self.patch_size} pixels")
        patches = patchify(images, self.patch_size)                              # [B, N, P]
        positions = self.pos_embed[:, 1:]
        if ids_keep is not None:      # select first, so that masked patches cost nothing
            index = ids_keep[..., None].expand(images.shape[0], -1, patches.shape[2])
            patches = patches.gather(1, index)
            # not by indexing, whose backward pass adds in a different order in each run
            positions = F.embedding(ids_keep, positions[0])                      # [B, V, D]
        proj = self.patch_embed.proj      # a convolution without overlap is a linear layer
        x = F.linear(patches, proj.weight.flatten(1), proj.bias)                 # [B, N or V, D]
        if mask is not None:
            x = torch.where(mask[..., None], mask_token.to(x.dtype), x)
        x = x + positions
        cls = self.cls_token + self.pos_embed[:, :1]
        return torch.cat([cls.expand(x.shape[0], -1, -1), x], dim=1)

    def compile_blocks(self):
        """Compiles each block in place with torch.compile. All blocks share a few graphs."""
        for block in self.blocks:
            block.compile()


@torch.no_grad()
def init_weights(module: nn.Module):
    """Initializes linear layers, patch embedding, tokens and position embeddings of a module.

    Weights come from a truncated normal distribution with standard deviation 0.02; biases are zero.
    Then the last layer of each residual branch (attention, MLP or experts) is divided by
    sqrt(2 * i), where i counts the blocks from 1, as in BEiT. Apart from this division, routers
    and experts keep the values from their constructors.
    """
    for name, parameter in module.named_parameters():
        if name.split(".")[-1] in ("cls_token", "pos_embed", "mask_token"):
            nn.init.trunc_normal_(parameter, std=0.02)
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    for i, block in enumerate(getattr(module, "blocks", []), start=1):
        last = block.mlp.w2 if isinstance(block.mlp, SoftMoE) else block.mlp.fc2.weight
        last.div_(math.sqrt(2 * i))
        block.attn.proj.weight.div_(math.sqrt(2 * i))


def build_vit(name: str, **overrides) -> ViT:
    """Builds the ViT with this name in PRESETS, by default for images of 224 and patches of 16
    pixels. `overrides` are arguments of `ViT`.
    """
    config = dict(image_size=224, patch_size=16) | PRESETS[name] | overrides
    return ViT(**config)


# ------------------------------------------------------------------------------ student

class PixelDecoder(nn.Module):
    """Predicts the pixels of all patches from the encoder's patch tokens (App. E).

    The decoder is a transformer without experts; DECODER is the paper's size. A mask token stands
    in for masked patches. The position embeddings are learned; the authors' release has fixed
    sines and cosines. The paper describes the decoder only for sparse encoding. In dense encoding,
    the mask token also replaces the encoder's output at masked patches, as in the release.
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
        """Returns the pixels of all patches, [B, N, 3 * patch_size ** 2].

        Sparse encoding: `patches` [B, V, D] are the visible patches, with indices ids_keep [B, V].
        Dense encoding: `patches` [B, N, D] are all patches, and ids_keep is None. In both, the mask
        token replaces the patches where mask [B, N] is True.
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
    """A student's predictions for B images: the teacher's tokens, and pixels."""
    tokens: Tensor                  # [B, T, Dt], [CLS] first; Dt is the teacher's width
    pixels: Tensor | None           # of all patches, [B, N, 3 * patch_size ** 2]
    routing: dict[int, Routing]     # {MoE block: its Routing}
    ids_keep: Tensor | None         # indices [B, V] of the patches in `tokens`; None for all N


class Explore(nn.Module):
    """The student: a ViT, and a linear head from its width to the teacher's.

    Sparse encoding processes only the visible patches, as MAE does. Dense encoding processes all
    patches, with a mask token in place of masked patches, as BEiT does. `pixels` adds a pixel
    decoder of size `decoder`.
    """

    def __init__(self, encoder: ViT, teacher_dim: int, dense: bool = False, pixels: bool = False,
                 decoder: dict = DECODER):
        super().__init__()
        self.encoder, self.dense = encoder, dense
        self.head = nn.Linear(encoder.dim, teacher_dim)
        init_weights(self.head)
        self.mask_token = None
        if dense:
            self.mask_token = nn.Parameter(torch.empty(1, 1, encoder.dim))
            nn.init.trunc_normal_(self.mask_token, std=0.02)
        self.decoder = PixelDecoder(encoder, **decoder) if pixels else None

    def forward(self, images: Tensor, mask: Tensor, ids_keep: Tensor | None = None) -> Prediction:
        """Predicts the teacher's tokens and, with a decoder, the pixels of images [B, 3, S, S].

        mask bool [B, N]: True where a patch is masked
        ids_keep int64 [B, V]: indices of the visible patches; every image has V of them. Sparse
            encoding needs them, and raises ValueError if they are missing.
        """
        if self.dense:
            ids_keep = None
            tokens, routing = self.encoder(images, mask=mask, mask_token=self.mask_token)
        elif ids_keep is None:
            raise ValueError("a sparse student needs ids_keep, the indices of the visible patches")
        else:      # App. E's shuffle would change nothing: each patch has its position embedding
            tokens, routing = self.encoder(images, ids_keep)
        pixels = self.decoder(tokens[:, 1:], ids_keep, mask) if self.decoder else None
        return Prediction(self.head(tokens), pixels, routing, ids_keep)


def pool(tokens: Tensor, kind: str) -> Tensor:
    """Pools tokens [B, 1 + N, D] to [B, D]: "cls" takes [CLS], "mean" the mean patch token."""
    if kind not in ("cls", "mean"):
        raise ValueError(f"pooling {kind!r}: expected cls or mean")
    return tokens[:, 0] if kind == "cls" else tokens[:, 1:].mean(1)
