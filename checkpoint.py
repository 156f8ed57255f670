"""Loads encoders: from our checkpoints, from those of the authors' release, and from plain ViTs.

A plain ViT is a state dict whose tensors have timm's names, as those of timm, DeiT and MAE have.
"""

import argparse
import math
import os
import re
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model import IMAGENET_MEAN, IMAGENET_STD, ViT

# The number of attention heads that ViTs of a width usually have: DeiT's tiny and small, timm's
# medium, ViT's base and large, MAE's huge. The shapes of weights are the same for any number.
HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}
HOW_TO_SAVE = ("save the file as {'model': state_dict, 'heads': NUMBER, 'mean': (R, G, B), "
               "'std': (R, G, B)}")
TORCHSCRIPT = ("a TorchScript archive, such as OpenAI's; save its weights with state = "
               "torch.jit.load(FILE).state_dict(); torch.save({name: x for name, x in "
               "state.items() if x.ndim or name == 'logit_scale'}, NEW_FILE)")
# How names of tensors begin that other repositories save beside an encoder's.
NOT_ENCODER = re.compile(
    r"\w*head|decoder|mask_token|fc_norm|pre_logits|predictor|projector")


class LoadError(ValueError):
    """A checkpoint or teacher that cannot be loaded: one line that names it and says why."""


def load_checkpoint(path: str | Path) -> dict:
    """Reads a checkpoint file. Raises LoadError.

    The result has "model", a state dict in which the names of the encoder's tensors begin with
    "encoder."; "encoder", the arguments of `ViT`; "args", the flags of the run; "path"; and
    whatever else a file of ours holds. Files of the authors' release and plain ViTs are
    converted. A file may hold tensors, numbers, strings and argparse's Namespace. Any other file
    is refused, and no code in it ever runs.
    """
    try:
        # DeiT and MAE save their flags, an argparse.Namespace, beside the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            # With a GPU, the file is mapped into memory, and its tensors are read when they are
            # copied to the GPU. Without one, a resumed optimizer would keep tensors that are
            # views of the file, so the file is read as a whole.
            mmap = torch.cuda.is_available() and zipfile.is_zipfile(path)
            if str(path).endswith(".safetensors"):
                from safetensors.torch import load_file  # comes with timm
                file = load_file(path)
            else:
                file = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error
    except Exception as error:      # another format, a file cut short, code: each has its own
        what = "not a PyTorch file of plain tensors, or damaged"
        raise LoadError(f"{path}: {TORCHSCRIPT if 'TorchScript' in str(error) else what}"
                        ) from error
    try:
        if not {"model", "encoder", "args"} <= file.keys():
            file = convert_foreign(file, path)
    except Exception as error:
        raise LoadError(f"{path} is neither an ExPLoRe checkpoint nor a timm-style ViT "
                        f"({first_line(error)})") from error
    return file | {"path": str(path)}


def convert_foreign(file: dict, path: str | Path) -> dict:
    """Converts other people's ViT weights to the form of our checkpoints.

    Heads and decoders are dropped. Other tensors that our encoder has no place for, such as
    register tokens, are kept, so that `load_encoder` refuses the file: without them, the
    features would be wrong, and nothing would say so.

    A file {"model": state_dict, "heads": NUMBER, "mean": (R, G, B), "std": (R, G, B)} says how
    many attention heads the model has, and how it normalizes images in [0, 1]. What a file does
    not say is assumed, and printed.
    """
    weights = file.get("model", file.get("state_dict", file))
    state = {name.removeprefix("module."): x for name, x in weights.items()
             if isinstance(x, Tensor)}
    # the authors' release saves its student and its teacher in one state dict
    if any(name.startswith("student.") for name in state):
        state = {name.removeprefix("student."): x for name, x in state.items()
                 if name.startswith("student.")}
    state = {name: x for name, x in state.items() if not NOT_ENCODER.match(name)}

    positions = state["pos_embed"].shape[1]
    if math.isqrt(positions) ** 2 == positions:      # DeiT-3 adds no position to [CLS]
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
                         f"{dim} has: {HOW_TO_SAVE}")
    config = dict(image_size=grid * patch_size, patch_size=patch_size, dim=dim, depth=depth,
                  heads=heads, experts=experts, moe_blocks=moe_blocks)
    for i in range(depth):
        convert_block(state, f"blocks.{i}.", dim, experts)
    fold_normalization(state, file.get("mean", IMAGENET_MEAN), file.get("std", IMAGENET_STD))
    assumed = {"heads": f"{heads} attention heads", "mean": "ImageNet's mean",
               "std": "ImageNet's std"}
    unsaid = [what for name, what in assumed.items() if name not in file]
    if unsaid and os.environ.get("RANK", "0") == "0":
        print(f"{path}: assumed {', '.join(unsaid)}. If that is wrong, {HOW_TO_SAVE}.")
    model = {f"encoder.{name}": x for name, x in state.items()}
    return {"model": model, "encoder": config, "args": {}}


def fold_normalization(state: dict[str, Tensor], mean: tuple, std: tuple):
    """Makes a patch embedding for images normalized by `mean` and `std` take ImageNet's instead.

    For each channel, (x - mean) / std is a scale and a shift of what ImageNet's normalization
    gives. The convolution pads nothing, so its weight takes the scale and its bias the shift:
    the features stay the same.
    """
    mean, std, imagenet_mean, imagenet_std = (
        torch.as_tensor(x, dtype=torch.float64).view(3, 1, 1)
        for x in (mean, std, IMAGENET_MEAN, IMAGENET_STD))
    if not (mean.min() >= 0 and mean.max() <= 1 and std.min() > 0 and std.max() <= 1):
        raise ValueError("'mean' and 'std' have to be of pixels in [0, 1]")
    weight, bias = state["patch_embed.proj.weight"], state["patch_embed.proj.bias"]
    # the patch that is zero in ImageNet's normalization: the new bias is what becomes of it
    zero = ((imagenet_mean - mean) / std).expand(3, *weight.shape[2:])
    shifted = F.conv2d(zero, weight.double(), bias.double()).flatten()
    scaled = weight.double() * (imagenet_std / std)
    state["patch_embed.proj.weight"] = scaled.to(weight.dtype)
    state["patch_embed.proj.bias"] = shifted.to(bias.dtype)


def convert_block(state: dict[str, Tensor], at: str, dim: int, experts: int):
    """Gives the tensors of one block, whose names start with `at`, our names and shapes."""
    for n in (1, 2):      # a block without LayerScale scales by one
        ones = torch.ones(dim)
        state.setdefault(f"{at}ls{n}.gamma", state.pop(f"{at}gamma_{n}", ones))
    # The release's keys have no bias. It would add the same to all logits of a query, so that
    # zeros are as good.
    if f"{at}attn.q_bias" in state:
        q = state.pop(f"{at}attn.q_bias")
        v = state.pop(f"{at}attn.v_bias")
        state[f"{at}attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    if f"{at}mlp.phi" in state:      # the release has one more dimension, for its one slot
        state[f"{at}mlp.phi"] = state[f"{at}mlp.phi"].reshape(dim, experts)
        state[f"{at}mlp.scale"] = state[f"{at}mlp.scale"].reshape(())
    if f"{at}mlp.experts.0.fc1.weight" in state:      # the release's experts are linear layers
        for n in (1, 2):
            layers = [f"{at}mlp.experts.{e}.fc{n}" for e in range(experts)]
            weights = [state.pop(f"{layer}.weight").T for layer in layers]
            biases = [state.pop(f"{layer}.bias") for layer in layers]
            state[f"{at}mlp.w{n}"] = torch.stack(weights)
            state[f"{at}mlp.b{n}"] = torch.stack(biases)


def load_encoder(source: str | Path | dict, grid: int | None = None,
                 drop_path: float = 0.0) -> ViT:
    """The encoder of a checkpoint file, or of what `load_checkpoint` returned. Raises LoadError.

    It takes images in ImageNet's mean and standard deviation, whatever the weights were trained
    with. `grid` is the number of patches on a side of its images: position embeddings are
    resized to it. By default, they stay as they are.
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


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:500] or type(error).__name__
