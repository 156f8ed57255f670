"""Checkpoints: what is in a file, and how it becomes our ViT.

`load_encoder` reads our checkpoint, the authors' checkpoint, or a plain ViT whose tensors have
timm's names, as in the files of timm, MAE, DeiT and DINO. Any prefix may come before the names. The
loader skips heads and decoders, and refuses other tensors that our ViT has no place for. It assumes
that the encoder was trained with ImageNet's mean and standard deviation.
"""

import argparse
import contextlib
import json
import math
import re
import warnings
import zipfile
import zlib
from pathlib import Path, PurePath

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import UserError, note, user_errors
from model import DECODER, Explore, ViT

# ------------------------------------------------------------------------------ loading

def load_checkpoint(path: str | Path, heads: int | None = None, prefix: str | None = None) -> dict:
    """Reads a checkpoint file into a dict. Raises UserError.

    The dict has "model", a state dict in which the encoder's tensors are named "encoder.NAME";
    "encoder", the arguments of `ViT`; "args", the flags of the run; "path"; and whatever else our
    checkpoint holds. Other repositories' files are converted to this form. `heads` is the number of
    attention heads for a file that does not say it, and `prefix` stands before the names of the
    encoder's tensors in a file that holds several encoders.
    """
    with user_errors(path):
        file = read_file(path)
        if not {"model", "encoder", "args"} <= file.keys():
            file = convert(file, path, heads, prefix)
        if not isinstance(file["encoder"], dict):
            raise ValueError(f"it holds only a probe's head; its encoder is {file['encoder']}")
    return file | {"path": str(path)}


def load_encoder(source: str | Path | dict, grid: int | None = None,
                 drop_path: float = 0.0) -> ViT:
    """Loads the encoder of a checkpoint: a file, or the dict from `load_checkpoint`. Raises
    UserError.

    With `grid`, position embeddings are resized to grid x grid patches, and the encoder takes
    images of grid * patch_size pixels a side. By default, it keeps the checkpoint's image size.
    """
    checkpoint = source if isinstance(source, dict) else load_checkpoint(source)
    config = dict(checkpoint["encoder"])
    state = {name.removeprefix("encoder."): x for name, x in checkpoint["model"].items()
             if name.startswith("encoder.")}
    with user_errors(checkpoint["path"]):
        if grid is not None and "pos_embed" in state:
            config["image_size"] = grid * config["patch_size"]
            state["pos_embed"] = resize_pos_embed(state["pos_embed"], grid)
        encoder = ViT(**config, drop_path=drop_path)
        encoder.load_state_dict(state)
    return encoder


def load_student(source: str | Path | dict, decoder: dict = DECODER) -> Explore:
    """Loads the student of a checkpoint of pretrain.py: encoder, head and, if the checkpoint has
    one, a pixel decoder of size `decoder`. Raises UserError.
    """
    checkpoint = source if isinstance(source, dict) else load_checkpoint(source)
    if checkpoint["args"].get("stage") != "pretrain":
        raise UserError(f"{checkpoint['path']}: no student of pretrain.py")
    state = checkpoint["model"]
    with user_errors(checkpoint["path"]):
        student = Explore(ViT(**checkpoint["encoder"]), len(state["head.bias"]), decoder=decoder,
                          dense="mask_token" in state, pixels="decoder.mask_token" in state)
        student.load_state_dict(state)
    return student


def resize_pos_embed(pos_embed: Tensor, grid: int) -> Tensor:
    """Resizes position embeddings by bicubic interpolation, except the one of [CLS].

    [1, 1 + M * M, D] -> [1, 1 + grid * grid, D], in float32 if M is not `grid`
    """
    old = math.isqrt(pos_embed.shape[1] - 1)
    if old == grid:
        return pos_embed
    # float32, because interpolation rejects half precision on a CPU
    cls, patches = pos_embed.float().tensor_split([1], dim=1)
    patches = patches.unflatten(1, (old, old)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, (grid, grid), mode="bicubic", antialias=True)
    return torch.cat([cls, patches.flatten(2).transpose(1, 2)], dim=1)


def digest(state: dict[str, Tensor]) -> str:
    """A checksum of weights on the CPU, by which a run notices that a file was written anew.

    Position embeddings do not count, because they are resized to a grid.
    """
    checksum = 0
    for name, x in state.items():
        if "pos" not in name:
            checksum = zlib.crc32(x.contiguous().view(-1).view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"


# -------------------------------------------------------------------- what is in a file

def read_file(path: str | Path) -> dict:
    """Reads a file of PyTorch or safetensors without running any code in it."""
    with open(path, "rb") as file:
        start = file.read(40)
    if start[:2] not in (b"PK", b"\x80\x02") and start[8:9] != b"{":
        # probably a web page, or a Git LFS pointer
        raise ValueError(f"not a file of PyTorch or safetensors: it begins with {start!r}")
    if Path(path).suffix == ".safetensors":
        from safetensors.torch import load_file  # a dependency of timm and open_clip, too
        return load_file(path)
    if is_torchscript(path):
        raise ValueError("a TorchScript archive; if it is OpenAI's CLIP, name its model, as in "
                         f"ViT-B-16-quickgelu/{path}")
    with torch.serialization.safe_globals(safe_types()):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"neither an ExPLoRe checkpoint nor a ViT, but a {type(content).__name__}")
    return content


def is_torchscript(path: str | Path) -> bool:
    """Whether torch.jit.save wrote this file."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def read_torchscript(path: str, prefix: str) -> dict[str, Tensor]:
    """Reads the tensors of a TorchScript archive whose names begin with `prefix`, in float32. The
    result's names are without the prefix.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)      # TorchScript is deprecated
        state = torch.jit.load(path, map_location="cpu").state_dict()
    return {name.removeprefix(prefix): x.float() for name, x in state.items()
            if name.startswith(prefix)}


def safe_types() -> list:
    """What checkpoints hold beside tensors: NumPy numbers and arrays, argparse.Namespace, and
    paths. Unpickling it runs no code.

    `torch.serialization.safe_globals` takes this list. A pair has an object, and the name by which
    a file asks for it.
    """
    make_number = np.float64(0).__reduce__()[0]
    make_array = np.empty(0).__reduce__()[0]
    safe = [argparse.Namespace, np.ndarray, np.dtype]
    for letter in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]:
        safe.append(type(np.dtype(letter)))
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):      # NumPy 1 and NumPy 2
        safe += [(make_number, f"{module}.scalar"), (make_array, f"{module}._reconstruct")]
    for module in ("pathlib", "pathlib._local"):      # Python 3.13 has the second name
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            # a PurePath, because only Windows can make a WindowsPath
            safe.append((PurePath, f"{module}.{name}"))
    return safe


# --------------------------------------------------------- another repository's encoder

# This tensor locates the encoder in another repository's state dict: its prefix is the prefix of
# all tensors of the encoder, such as `module.` from DDP, `_orig_mod.` from torch.compile, or
# `backbone.`.
PATCH_EMBED = "patch_embed.proj.weight"
# Keys under which trainers save state dicts. We load the one that the file's own library evaluates:
# DINO, iBOT, I-JEPA and timm train one model and evaluate its average; DeiT evaluates `model`, and
# not `model_ema`; DeepSpeed writes `module`.
STATE_DICTS = ("teacher", "target_encoder", "state_dict_ema", "model", "model_ema", "state_dict",
               "module", "encoder", "student")
# Prefixes of encoders that a state dict has beside others: the release's student, DINOv2's average,
# and MoCo v3's trained encoder
PREFIXES = ("student.", "teacher.backbone.", "base_encoder.")
# Tensors that other repositories save beside the encoder, by the beginnings of their names.
NOT_ENCODER = re.compile(
    r"\w*head|decoder|mask_token|fc_norm|fc\.|pre_logits|predictor|projector")


def convert(file: dict, path: str | Path, heads: int | None, prefix: str | None) -> dict:
    """Converts another repository's file to the form of our checkpoints. Raises ValueError.

    The conversion drops heads and decoders. It keeps other tensors that our encoder has no place
    for, such as register tokens, so that `load_encoder` refuses the file: without these tensors,
    the features would be silently wrong.
    """
    state = {name: x for name, x in find_encoder(file, path, prefix).items()
             if not NOT_ENCODER.match(name)}
    dim, *_, patch_size = state[PATCH_EMBED].shape
    positions = state.get("pos_embed", torch.empty(1, 0)).shape[1]      # [CLS] and a square
    grid = math.isqrt(max(positions - 1, 0))
    if ("cls_token" not in state or positions != 1 + grid ** 2
            or any("reg" in name for name in state)):
        raise ValueError("its tokens are not [CLS] and a square of patches with learned positions; "
                         "as a frozen encoder, timm/NAME may take it")
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    # a router's phi belongs to the MLP in the release, and to a module of its own here
    phis = {int(found[1]): x for name, x in state.items()
            if (found := re.fullmatch(r"blocks\.(\d+)\.mlp\.(?:router\.)?phi", name))}
    moe_blocks = sorted(phis)
    experts = phis[moe_blocks[0]].numel() // dim if moe_blocks else 0
    for i in range(depth):
        convert_block(state, f"blocks.{i}.", dim, experts)
    beside = read_config(path)
    config = dict(image_size=grid * patch_size, patch_size=patch_size, dim=dim, depth=depth,
                  heads=heads or find_heads(file, beside, path, dim), experts=experts,
                  moe_blocks=moe_blocks)
    model = {f"encoder.{name}": x for name, x in state.items()}
    return {"model": model, "encoder": config, "args": {}}


def convert_block(state: dict[str, Tensor], at: str, dim: int, experts: int):
    """Gives our names and shapes to the tensors of one block, in place. `at` is their prefix."""
    for n in (1, 2):      # no LayerScale is the same as a LayerScale of one
        gamma = state.pop(f"{at}gamma_{n}", torch.ones(dim))
        state.setdefault(f"{at}ls{n}.gamma", gamma)
    # Keys have no bias in the release's attention. A bias of keys adds the same number to all of a
    # query's logits, so zeros change nothing.
    if f"{at}attn.q_bias" in state:
        q, v = state.pop(f"{at}attn.q_bias"), state.pop(f"{at}attn.v_bias")
        state[f"{at}attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    if f"{at}mlp.phi" in state:      # the release's scale has no dimension
        state[f"{at}mlp.router.phi"] = state.pop(f"{at}mlp.phi").view(dim, experts)
        state[f"{at}mlp.router.scale"] = state.pop(f"{at}mlp.scale").view(1)
        for n in (1, 2):             # the release's experts are separate linear layers
            layers = [f"{at}mlp.experts.{e}.fc{n}" for e in range(experts)]
            state[f"{at}mlp.w{n}"] = torch.stack([state.pop(f"{x}.weight").T for x in layers])
            state[f"{at}mlp.b{n}"] = torch.stack([state.pop(f"{x}.bias") for x in layers])


def find_encoder(file: dict, path: str | Path, prefix: str | None) -> dict[str, Tensor]:
    """Finds the ViT's state dict in another repository's file, and removes its prefix.

    The tensors have timm's names or the release's. If the file has several encoders, one with a
    router comes first, then the order of STATE_DICTS counts, then the order of PREFIXES; a line
    says which one was taken. Raises ValueError if there is none, or if nothing says which.
    """
    states = {key: x for key, x in file.items() if isinstance(x, dict)} | {"": file}
    found = [(key, name.removesuffix(PATCH_EMBED)) for key, state in states.items()
             for name in state if f".{name}".endswith(f".{PATCH_EMBED}")]      # of each encoder
    if prefix is not None:
        found = [(key, start) for key, start in found if start.rstrip(".") == prefix.rstrip(".")]
    if not found:
        largest = max(states.values(), key=len)
        raise ValueError("neither an ExPLoRe checkpoint nor a ViT with timm's names: "
                         + no_such_tensor((prefix or "") + PATCH_EMBED, largest))

    def rank(place: tuple[str, str]) -> tuple:
        """The encoder with the smallest rank is taken."""
        key, start = place
        routed = any(x.startswith(start) and x.endswith(".phi") for x in states[key])
        words = re.sub(r"module\.|_orig_mod\.", "", start)
        return not routed, position(STATE_DICTS, key), position(PREFIXES, words)

    found.sort(key=rank)
    names = [f"{key} {start}".strip() for key, start in found]
    if len(found) > 1 and rank(found[0]) == rank(found[1]):
        raise ValueError(f"its encoders are {', '.join(names)}; choose one by "
                         "load_checkpoint(path, prefix=...)")
    if len(found) > 1:
        note(f"{path}: takes {names[0]} of its encoders {', '.join(names)}")
    key, start = found[0]
    state = {name.removeprefix(start).replace("_orig_mod.", ""): x
             for name, x in states[key].items()
             if name.startswith(start) and isinstance(x, Tensor)}
    # DINOv2 may split its blocks into chunks, and puts the chunk's number before the block's
    return {re.sub(r"^blocks\.\d+\.(?=\d)", "blocks.", name): x for name, x in state.items()}


def position(words: tuple[str, ...], word: str) -> int:
    """The index of a word, or the number of words if it is another one"""
    return words.index(word) if word in words else len(words)


def no_such_tensor(name: str, state: dict) -> str:
    names = [each for each, x in state.items() if isinstance(x, Tensor)]
    return f"no tensor {name!r} among {len(names)}" + (f", such as {names[0]!r}" if names else "")


def find_heads(file: dict, config: dict, path: str | Path, dim: int) -> int:
    """The number of attention heads, which the shapes of weights do not say.

    It comes from the release's configuration, MoCo v3's name, or a model name of timm's in the file
    or in the config.json beside it. Else it is assumed, and a line says so.
    """
    with contextlib.suppress(KeyError, TypeError):
        return file["config"]["model"]["student"]["num_heads"]
    if dim == 384 and file.get("arch") == "vit_small":
        return 12      # MoCo v3's trainers write this; DINO's vit_small has 6, and no "arch"
    args = file.get("args")
    args = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    names = [file.get("arch"), args.get("model"), args.get("arch"), config.get("architecture")]
    for name in filter(None, names):
        import timm
        if timm.is_model(str(name)):
            with torch.device("meta"):
                return timm.create_model(str(name)).blocks[0].attn.num_heads
    if dim % 64:
        raise ValueError(f"the number of attention heads is unknown for a width of {dim}; give it "
                         "to load_checkpoint(path, heads=...)")
    heads = 16 if dim == 1280 else dim // 64      # ViT-H has 80 channels per head
    note(f"{path} does not say how many attention heads it has, so it gets {heads}; RUNNING.md "
         "says how to load it with another number")
    return heads


def read_config(path: str | Path) -> dict:
    """The content of timm's config.json beside a file, or {} if there is none"""
    with contextlib.suppress(OSError, ValueError):
        config = json.loads(Path(path).with_name("config.json").read_text())
        return config if isinstance(config, dict) else {}
    return {}
