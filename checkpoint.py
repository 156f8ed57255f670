"""Loads checkpoints: ours, those of the authors' release, and ViTs with timm's names.

The last are timm's, DeiT's and MAE's, among others.
"""

import argparse
import hashlib
import math
import os
import re
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model import ViT

# heads by width: state dicts do not say
HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}
SAVE_HEADS = "save the file as {'model': state_dict, 'heads': NUMBER}"
NOT_ENCODER = re.compile(
    r"\w*head|decoder|mask_token|fc_norm|pre_logits|predictor|projector")


class LoadError(ValueError):
    """A checkpoint or teacher that cannot be loaded: one line that names it and says why."""


def load_checkpoint(path: str | Path) -> dict:
    """A checkpoint's "model" (the state dict; the encoder's names begin with "encoder."),
    "encoder" (the arguments of `ViT`), "args", what else is in a file of ours, and "path".

    ViT weights with timm's names and the authors' release are converted. Raises LoadError for
    anything else, and for a file with more than tensors, numbers, strings and argparse's
    Namespace: its code never runs.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):      # in DeiT's and MAE's
            # mapped where the weights move to a GPU; on a CPU they would stay part of the file
            mmap = torch.cuda.is_available() and zipfile.is_zipfile(path)
            file = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error
    except Exception as error:      # not of PyTorch, cut off, with code inside: a dozen kinds
        raise LoadError(f"{path}: not a PyTorch file of plain tensors, or damaged") from error
    try:
        if not {"model", "encoder", "args"} <= file.keys():
            file = convert_foreign(file, path)
    except Exception as error:
        raise LoadError(f"{path} is neither an ExPLoRe checkpoint nor a timm-style ViT "
                        f"({first_line(error)})") from error
    return file | {"path": str(path)}


def convert_foreign(file: dict, path: str | Path) -> dict:
    """Other people's ViT weights in the form of our checkpoints.

    Heads and decoders are left out. `load_encoder` refuses any other tensor that our encoder
    has no place for: without it, features would silently be wrong.
    """
    weights = file.get("model", file.get("state_dict", file))
    state = {name.removeprefix("module."): x for name, x in weights.items()
             if isinstance(x, Tensor)}
    if any(name.startswith("student.") for name in state):      # the release has a teacher, too
        state = {name.removeprefix("student."): x for name, x in state.items()
                 if name.startswith("student.")}
    state = {name: x for name, x in state.items() if not NOT_ENCODER.match(name)}

    positions = state["pos_embed"].shape[1]
    if math.isqrt(positions) ** 2 == positions:      # DeiT-3's [CLS] has none
        state["pos_embed"] = F.pad(state["pos_embed"], (0, 0, 1, 0))
        positions += 1
    grid = math.isqrt(positions - 1)
    dim, _, patch_size, _ = state["patch_embed.proj.weight"].shape
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    moe_blocks = [i for i in range(depth) if f"blocks.{i}.mlp.phi" in state]
    experts = state[f"blocks.{moe_blocks[0]}.mlp.phi"].numel() // dim if moe_blocks else 0
    heads = file.get("heads", HEADS.get(dim))
    if not heads:
        raise ValueError("nothing says how many attention heads an encoder of width "
                         f"{dim} has: {SAVE_HEADS}")
    if "heads" not in file and os.environ.get("RANK", "0") == "0":
        print(f"{path}: took {heads} attention heads, as other ViTs of width {dim}; the file "
              f"does not say. If it has another number: {SAVE_HEADS}")
    config = dict(image_size=grid * patch_size, patch_size=patch_size, dim=dim, depth=depth,
                  heads=heads, experts=experts, moe_blocks=moe_blocks)
    for i in range(depth):
        convert_block(state, f"blocks.{i}.", dim, experts)
    model = {f"encoder.{name}": x for name, x in state.items()}
    return {"model": model, "encoder": config, "args": {}}


def convert_block(state: dict[str, Tensor], at: str, dim: int, experts: int):
    """Gives the tensors of one block, whose names start with `at`, our names and shapes."""
    for n in (1, 2):      # no LayerScale is one of ones
        ones = torch.ones(dim)
        state.setdefault(f"{at}ls{n}.gamma", state.pop(f"{at}gamma_{n}", ones))
    if f"{at}attn.q_bias" in state:      # keys have none, which changes nothing
        q = state.pop(f"{at}attn.q_bias")
        v = state.pop(f"{at}attn.v_bias")
        state[f"{at}attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    if f"{at}mlp.phi" in state:      # the release's have a dimension for slots
        state[f"{at}mlp.phi"] = state[f"{at}mlp.phi"].reshape(dim, experts)
        state[f"{at}mlp.scale"] = state[f"{at}mlp.scale"].reshape(())
    for n in (1, 2) if f"{at}mlp.experts.0.fc1.weight" in state else ():
        layers = [f"{at}mlp.experts.{e}.fc{n}" for e in range(experts)]
        weights = [state.pop(f"{layer}.weight").T for layer in layers]
        state[f"{at}mlp.w{n}"] = torch.stack(weights)
        state[f"{at}mlp.b{n}"] = torch.stack([state.pop(f"{layer}.bias") for layer in layers])


def load_encoder(source: str | Path | dict, grid: int | None = None,
                 drop_path: float = 0.0) -> ViT:
    """The encoder of a checkpoint file, or of what `load_checkpoint` returned.

    `grid` resizes its position embeddings to as many patches a side. Raises LoadError.
    """
    checkpoint = source if isinstance(source, dict) else load_checkpoint(source)
    path = checkpoint["path"]
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
        raise LoadError(f"{path}: {' '.join(str(error).split())[:400]}") from error
    return encoder


def resize_pos_embed(pos_embed: Tensor, grid: int) -> Tensor:
    """[1, 1 + M * M, D] -> [1, 1 + grid * grid, D], bicubic, in float32 if it is another grid;
    [CLS] keeps its own.
    """
    old = math.isqrt(pos_embed.shape[1] - 1)
    if old == grid:
        return pos_embed
    cls, patches = pos_embed.float().tensor_split([1], dim=1)      # not in half: CPUs cannot
    patches = patches.unflatten(1, (old, old)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, (grid, grid), mode="bicubic", antialias=True)
    return torch.cat([cls, patches.flatten(2).transpose(1, 2)], dim=1)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def digest_input(name: str) -> str:
    """What a --teacher or CHECKPOINT is, wherever it lies: a hash of the contents of its file.

    The file may be open_clip's MODEL/FILE, where MODEL counts, too. What names no file, such as
    a tag or timm/NAME, stands for itself.
    """
    model, _, file = name.partition("/")
    for prefix, path in ("", Path(name)), (f"{model}/", Path(file)):
        if path.is_file():
            sha = hashlib.sha256()
            with open(path, "rb") as opened:
                while chunk := opened.read(2 ** 24):
                    sha.update(chunk)
            return prefix + sha.hexdigest()
    return name
