"""Pretrained encoders: for further training, or frozen, as teachers and for evaluation.

`load_encoder` reads a file: our checkpoint, the authors' checkpoint, or a plain ViT whose tensors
have timm's names, as in the files of timm, MAE, DeiT and DINO. Any prefix may come before the
names. The loader skips heads and decoders, and refuses other tensors that our ViT has no place for.
It assumes that the encoder was trained with ImageNet's mean and standard deviation.

`build_frozen` also takes models of open_clip and timm by name, with their own mean and std.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import UserError, naming, note
from model import DECODER, IMAGENET_MEAN, IMAGENET_STD, Attention, Explore, ViT, normalize, patchify

# -------------------------------------------------------------------------- from a file

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


def safe_types() -> list:
    """Types that checkpoints hold beside tensors, for `torch.serialization.safe_globals`: NumPy
    numbers and arrays, argparse.Namespace, and paths. Unpickling them runs no code.
    """
    # NumPy 1 and 2 have different names for the two functions that rebuild numbers and arrays, and
    # Python 3.13 has another name for the module of paths. Only Windows can make a WindowsPath, so
    # every path becomes a PurePath.
    make_number, make_array = (x.__reduce__()[0] for x in (np.float64(0), np.empty(0)))
    functions = [(function, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")
                 for function, name in ((make_number, "scalar"), (make_array, "_reconstruct"))]
    paths = [(pathlib.PurePath, f"pathlib{local}.{name}") for local in ("", "._local")
             for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")]
    numbers = {type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"]
               + np.typecodes["AllFloat"]}
    return [argparse.Namespace, np.ndarray, np.dtype, *numbers, *functions, *paths]


def load_checkpoint(path: str | Path, heads: int | None = None, prefix: str | None = None) -> dict:
    """Reads a checkpoint file into a dict. Raises UserError.

    The dict has "model", a state dict in which the encoder's tensors are named "encoder.NAME";
    "encoder", the arguments of `ViT`; "args", the flags of the run; "path"; and whatever else our
    checkpoint holds. Other repositories' files are converted to this form. `heads` is the number of
    attention heads for a file that does not say it, and `prefix` stands before the names of the
    encoder's tensors in a file that holds several encoders.
    """
    with naming(path):
        file = read_file(path)
        if not {"model", "encoder", "args"} <= file.keys():
            file = convert(file, path, heads, prefix)
        if not isinstance(file["encoder"], dict):
            raise ValueError(f"it holds only a probe's head; its encoder is {file['encoder']}")
    return file | {"path": str(path)}


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
        """The encoder with the smallest rank counts."""
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
    with naming(checkpoint["path"]):
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
    with naming(checkpoint["path"]):
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


# ---------------------------------------------------------------------- frozen, by name

class FrozenEncoder(nn.Module):
    """Turns images [B, 3, S, S] in [0, 1] into tokens [B, 1 + N, dim], [CLS] first.

    The images may have any size: the encoder resizes them to `image_size`, and normalizes them by
    the model's own `mean` and `std`. A subclass defines `tokens`, which takes normalized images.
    """
    cpu_images = 16      # at a time

    def __init__(self, image_size: int, dim: int, mean: tuple, std: tuple):
        super().__init__()
        self.image_size, self.dim, self.mean, self.std = image_size, dim, mean, std

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (self.image_size, self.image_size):
            images = F.interpolate(images, (self.image_size, self.image_size), mode="bicubic",
                                   antialias=True)
        images = normalize(images.clamp(0, 1), self.mean, self.std)
        images = images.to(next(self.parameters()).dtype)
        if images.device.type != "cpu":
            return self.tokens(images)
        # A CPU gives the memory of large activations back to the system each time, and faults it
        # in anew, so a ConvNet is several times as fast on few images.
        images = images.contiguous(memory_format=torch.channels_last)
        return torch.cat([self.tokens(part) for part in images.split(self.cpu_images)])


class CheckpointEncoder(FrozenEncoder):
    """The encoder of any checkpoint that `load_encoder` reads: tokens after the final norm."""

    def __init__(self, path: str, grid: int | None):
        checkpoint = load_checkpoint(path)
        encoder = load_encoder(checkpoint, grid)
        super().__init__(encoder.grid * encoder.patch_size, encoder.dim, IMAGENET_MEAN,
                         IMAGENET_STD)
        self.encoder = encoder
        self.step, self.epoch = checkpoint.get("step"), checkpoint.get("epoch")
        self.trained_on = checkpoint["args"].get("data")

    def tokens(self, images: Tensor) -> Tensor:
        return self.encoder(images)[0]


class ClipPatchEmbed(nn.Module):
    """CLIP's patch embedding as a linear layer, because its convolution has no overlap and no bias.
    On an H200, this makes all of pretraining 3 % faster.
    """

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.weight = conv.weight
        self.patch_size = conv.stride[0]

    def forward(self, images: Tensor) -> Tensor:
        """images [B, 3, S, S] -> [B, D, grid, grid]"""
        patches = patchify(images, self.patch_size).contiguous()      # else one product per row
        tokens = F.linear(patches, self.weight.flatten(1))            # [B, N, D]
        grid = images.shape[2] // self.patch_size
        return tokens.mT.unflatten(2, (grid, grid))


class ClipAttention(Attention):
    """Our ViT's attention with the weights of CLIP's nn.MultiheadAttention: torch.compile makes
    fewer copies of its queries, keys and values.
    """

    def __init__(self, theirs: nn.MultiheadAttention):
        super().__init__(theirs.embed_dim, theirs.num_heads)
        self.qkv.weight, self.qkv.bias = theirs.in_proj_weight, theirs.in_proj_bias
        self.proj = theirs.out_proj

    def forward(self, x: Tensor, *_, **__) -> tuple[Tensor]:      # CLIP passes x as keys, values
        return super().forward(x),


class ClipEncoder(FrozenEncoder):
    """CLIP's ViT from open_clip: tokens after the last block, before `ln_post`.

    `pretrained` is one of open_clip's tags, a file, or "random".
    """

    def __init__(self, name: str, pretrained: str, grid: int | None):
        import open_clip
        config = open_clip.get_model_config(name) or {"vision_cfg": {}}
        # open_clip's ResNets and ConvNeXts, and its ViTs from timm, have no patch_size
        patch_size = config["vision_cfg"].get("patch_size")
        if not patch_size or not pretrained:
            raise ValueError("no such file, and neither MODEL/PRETRAINED of an open_clip ViT, such "
                             "as ViT-B-16/openai, nor timm/NAME")
        # OpenAI's weights were trained with QuickGELU. With any other activation, every target is
        # silently wrong. open_clip knows which tags need QuickGELU; for a file, the user must know.
        quick_gelu = open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False)
        archive = is_torchscript(pretrained)      # the format of OpenAI's own files
        weights = None if archive or pretrained == "random" else pretrained
        with torch.serialization.safe_globals(safe_types()):
            visual = open_clip.create_model(name, weights, force_quick_gelu=quick_gelu).visual
        if archive:
            visual.load_state_dict(read_torchscript(pretrained, "visual."))
        if Path(pretrained).is_file():
            say_activation(name, pretrained)

        if grid is not None:
            position = resize_pos_embed(visual.positional_embedding[None], grid)[0]
            visual.positional_embedding = nn.Parameter(position.detach())
        size = grid * patch_size if grid else visual.image_size[0]
        normalization = visual.preprocess_cfg
        super().__init__(size, visual.conv1.out_channels, normalization["mean"],
                         normalization["std"])
        visual.conv1 = ClipPatchEmbed(visual.conv1)
        for block in visual.transformer.resblocks:
            if type(block.attn) is nn.MultiheadAttention and block.attn.batch_first:
                block.attn = ClipAttention(block.attn)
        self.visual = visual

    def tokens(self, images: Tensor) -> Tensor:
        last = self.visual.forward_intermediates(
            images, indices=1,      # only the last block
            intermediates_only=True, output_fmt="NLC", output_extra_tokens=True)
        return torch.cat([last["image_intermediates_prefix"][0],
                          last["image_intermediates"][0]], dim=1)


def read_torchscript(path: str, prefix: str) -> dict[str, Tensor]:
    """Reads the tensors of a TorchScript archive whose names begin with `prefix`, in float32. The
    result's names are without the prefix.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)      # TorchScript is deprecated
        state = torch.jit.load(path, map_location="cpu").state_dict()
    return {name.removeprefix(prefix): x.float() for name, x in state.items()
            if name.startswith(prefix)}


def say_activation(name: str, file: str):
    """Prints which activation open_clip's model `name` has, if there is one with another. A file
    does not say which activation its weights need.
    """
    import open_clip
    quick = name.endswith("-quickgelu")
    other = name.removesuffix("-quickgelu") if quick else f"{name}-quickgelu"
    if other in open_clip.list_models():
        used, instead = ("QuickGELU", "GELU") if quick else ("GELU", "QuickGELU")
        note(f"{name}/{file} uses {used}; for weights that were trained with {instead}, "
             f"give {other}/{file}")


class TimmEncoder(FrozenEncoder):
    """A model of timm, by what its own `forward_features` returns.

    A ViT's tokens come without registers. The map of a ConvNet or a Swin becomes patches, row by
    row. A model without [CLS] has its pooled output in place of it, or the mean of the map if the
    pooled output has another width, as in MobileNetV3. `name` is timm's name of the model, for
    weights from the Hugging Face Hub, or NAME/random.
    """

    def __init__(self, name: str, grid: int | None):
        import timm
        model = name.removesuffix("/random")
        if not (timm.is_model(model) or ":" in model):      # hf-hub:..., local-dir:...
            raise ValueError("timm has no model of this name; timm.list_models() lists all names")
        body = timm.create_model(model, pretrained=model == name, num_classes=0)
        config = timm.data.resolve_model_data_config(body)
        size, resizable = config["input_size"][-1], hasattr(body, "set_input_size")
        if grid:
            size = grid * body.feature_info[-1]["reduction"]      # the pixels of a patch's side
            if resizable:      # ConvNets take any size
                body.set_input_size(img_size=(size, size))
        super().__init__(size, body.num_features, config["mean"], config["std"])
        self.body = body
        # only timm's plain ViTs have both; others have a map, or tokens in an order of their own
        self.is_vit = resizable and hasattr(body, "num_prefix_tokens")
        if not self.is_vit:
            self.cpu_images = 4
            with torch.no_grad():
                features = body.eval().forward_features(torch.zeros(1, 3, size, size))
            if not isinstance(features, Tensor) or features.ndim != 4:
                raise ValueError("neither a plain vision transformer, such as ViT, DeiT, DINOv2 or "
                                 "EVA, nor a model with a map of features, such as ResNet or Swin")
            side = features.shape[2]
            if grid and side != grid:
                raise ValueError(f"images of {size} pixels give {side} x {side} patches, and not "
                                 f"{grid} x {grid}")

    def tokens(self, images: Tensor) -> Tensor:
        features = self.body.forward_features(images)
        if self.is_vit:
            patches = features[:, self.body.num_prefix_tokens:]
            if getattr(self.body, "cls_token", None) is not None:
                return torch.cat([features[:, :1], patches], dim=1)
        elif features.shape[-1] == self.dim:      # channels last, as in Swin
            patches = features.flatten(1, 2)
        else:
            patches = features.flatten(2).mT
        cls = self.body.forward_head(features, pre_logits=True)
        if cls.shape[1] != self.dim:
            cls = patches.mean(1)
        return torch.cat([cls[:, None], patches], dim=1)


def build_frozen(name: str, grid: int | None = None) -> FrozenEncoder:
    """Builds the model of this name, frozen and in eval mode. Raises UserError.

    `name` is a checkpoint file, timm/NAME or open_clip's MODEL/PRETRAINED. The first "/" ends
    MODEL, so PRETRAINED may be the path of a file. `grid` is the number of patches on a side of an
    image: a teacher gets its student's grid. The default is the model's own image size.
    """
    model, _, pretrained = name.partition("/")
    pretrained = os.path.expanduser(pretrained)
    with naming(name), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)      # "random" weights are the same every time
        if os.path.exists(name):
            frozen = CheckpointEncoder(name, grid)
        elif model == "timm":
            frozen = TimmEncoder(pretrained, grid)
        else:
            frozen = ClipEncoder(model, pretrained, grid)
    frozen.digest = digest(frozen.state_dict())
    return frozen.eval().requires_grad_(False)


def digest(state: dict[str, Tensor]) -> str:
    """A checksum of weights on the CPU, by which a run notices that a file was written anew.

    Position embeddings do not count, because they are resized to a grid.
    """
    checksum = 0
    for name, x in state.items():
        if "pos" not in name:
            checksum = zlib.crc32(x.contiguous().view(-1).view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"
