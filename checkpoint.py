"""Loads encoders: from our checkpoints, from those of the authors' release, and from plain ViTs.

A plain ViT is a state dict whose tensors have timm's names, as the files of timm, MAE, DeiT and
DINO have. All encoders take images in ImageNet's mean and standard deviation, so a file must be of
a model that was trained with these. `teacher.py` takes timm's models by name, and knows theirs.
"""

import argparse
import math
import re
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from model import ViT

# Beginnings of the names of tensors that other repositories save beside the encoder's.
NOT_ENCODER = re.compile(
    r"\w*head|decoder|mask_token|fc_norm|pre_logits|predictor|projector")


def load_checkpoint(path: str | Path) -> dict:
    """Reads a checkpoint file. Raises UserError.

    The result has "model", a state dict in which the names of the encoder's tensors begin with
    "encoder."; "encoder", the arguments of `ViT`; "args", the flags of the run; "path"; and
    whatever else a file of ours holds. Other files are converted to this form. No code in a file
    ever runs.
    """
    try:
        # MAE and DeiT save their flags, an argparse.Namespace, beside the weights
        with torch.serialization.safe_globals([argparse.Namespace]):
            file = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except Exception as error:      # another format, a file cut short, code: each has its own
        raise UserError(f"{path}: not a PyTorch file of plain tensors, or damaged") from error
    try:
        if not {"model", "encoder", "args"} <= file.keys():
            file = convert(file)
        if not isinstance(file["encoder"], dict):
            raise ValueError("a probe's head, without its encoder")
    except Exception as error:      # whatever the file holds instead
        raise UserError(f"{path}: neither an ExPLoRe checkpoint nor a ViT with timm's names "
                        f"({one_line(error)})") from error
    return file | {"path": str(path)}


def convert(file: dict) -> dict:
    """Converts other people's ViT weights to the form of our checkpoints.

    Heads and decoders are dropped. Other tensors that our encoder has no place for, such as
    register tokens, are kept, so that `load_encoder` refuses the file: without them, the
    features would be wrong, and nothing would say so.
    """
    state = file.get("model", file.get("state_dict", file))
    state = {name.removeprefix("module."): x for name, x in state.items() if isinstance(x, Tensor)}
    # the authors' release saves its student and its teacher in one state dict
    if any(name.startswith("student.") for name in state):
        state = {name.removeprefix("student."): x for name, x in state.items()
                 if name.startswith("student.")}
    state = {name: x for name, x in state.items() if not NOT_ENCODER.match(name)}

    grid = math.isqrt(state["pos_embed"].shape[1] - 1)
    dim, _, patch_size, _ = state["patch_embed.proj.weight"].shape
    if dim % 64:
        raise ValueError(f"nothing says how many attention heads a width of {dim} has")
    heads = 16 if dim == 1280 else dim // 64      # ViT-H; weights have the same shapes for any
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    moe_blocks = [i for i in range(depth) if f"blocks.{i}.mlp.phi" in state]
    experts = state[f"blocks.{moe_blocks[0]}.mlp.phi"].numel() // dim if moe_blocks else 0
    for i in range(depth):
        convert_block(state, f"blocks.{i}.", dim, experts)
    config = dict(image_size=grid * patch_size, patch_size=patch_size, dim=dim, depth=depth,
                  heads=heads, experts=experts, moe_blocks=moe_blocks)
    model = {f"encoder.{name}": x for name, x in state.items()}
    return {"model": model, "encoder": config, "args": {}}


def convert_block(state: dict[str, Tensor], at: str, dim: int, experts: int):
    """Gives the tensors of one block, whose names start with `at`, our names and shapes."""
    for n in (1, 2):      # a block without LayerScale scales by one
        gamma = state.pop(f"{at}gamma_{n}", torch.ones(dim))
        state.setdefault(f"{at}ls{n}.gamma", gamma)
    # The release's keys have no bias. It would add the same to all logits of a query, so that
    # zeros are as good.
    if f"{at}attn.q_bias" in state:
        q, v = state.pop(f"{at}attn.q_bias"), state.pop(f"{at}attn.v_bias")
        state[f"{at}attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    if f"{at}mlp.phi" in state:      # the release has one more dimension, for its one slot
        state[f"{at}mlp.router.phi"] = state.pop(f"{at}mlp.phi").view(dim, experts)
        state[f"{at}mlp.router.scale"] = state.pop(f"{at}mlp.scale").view(())
        for n in (1, 2):             # its experts are linear layers
            layers = [f"{at}mlp.experts.{e}.fc{n}" for e in range(experts)]
            state[f"{at}mlp.w{n}"] = torch.stack([state.pop(f"{x}.weight").T for x in layers])
            state[f"{at}mlp.b{n}"] = torch.stack([state.pop(f"{x}.bias") for x in layers])


def load_encoder(source: str | Path | dict, grid: int | None = None,
                 drop_path: float = 0.0) -> ViT:
    """The encoder of a checkpoint file, or of what `load_checkpoint` returned. Raises UserError.

    `grid` is the number of patches on a side of its images: position embeddings are resized to
    it. By default, they stay as they are.
    """
    checkpoint = source if isinstance(source, dict) else load_checkpoint(source)
    config = dict(checkpoint["encoder"])
    state = {name.removeprefix("encoder."): x for name, x in checkpoint["model"].items()
             if name.startswith("encoder.")}
    try:
        if grid is not None and "pos_embed" in state:
            config["image_size"] = grid * config["patch_size"]
            state["pos_embed"] = resize_pos_embed(state["pos_embed"], grid)
        encoder = ViT(**config, drop_path=drop_path)
        encoder.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{checkpoint['path']}: {one_line(error)}") from error
    return encoder


def resize_pos_embed(pos_embed: Tensor, grid: int) -> Tensor:
    """Resizes position embeddings by bicubic interpolation; that of [CLS] stays as it is.

    [1, 1 + M * M, D] -> [1, 1 + grid * grid, D], in float32 if M is not `grid`.
    """
    old = math.isqrt(pos_embed.shape[1] - 1)
    if old == grid:
        return pos_embed
    # float32, because interpolation on a CPU does not take half precision
    cls, patches = pos_embed.float().tensor_split([1], dim=1)
    patches = patches.unflatten(1, (old, old)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, (grid, grid), mode="bicubic", antialias=True)
    return torch.cat([cls, patches.flatten(2).transpose(1, 2)], dim=1)


def one_line(error: Exception) -> str:
    """An error's message as one line, shortened: the first line alone may say nothing."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
