"""Frozen encoders by name: teachers, and the models that k-NN and probes evaluate.

`build_frozen` takes a checkpoint file, or a model of open_clip or timm by name. Each encoder
normalizes images by its own mean and standard deviation.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoints import (
    digest,
    is_torchscript,
    load_checkpoint,
    load_encoder,
    read_torchscript,
    resize_pos_embed,
    safe_types,
)
from common import note, user_errors
from model import IMAGENET_MEAN, IMAGENET_STD, Attention, normalize, patchify


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
    On an H200, this made all of pretraining 3 % faster; nobody has measured today's PyTorch yet.
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
    fewer copies of its queries, keys and values. Nobody has measured today's PyTorch yet.
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
        options = dict(pretrained=model == name, num_classes=0)
        body = timm.create_model(model, **options)
        config = timm.data.resolve_model_data_config(body)
        size, resizable = config["input_size"][-1], hasattr(body, "set_input_size")
        # only timm's plain ViTs have both; others have a map, or tokens in an order of their own
        is_vit = resizable and hasattr(body, "num_prefix_tokens")
        if grid:
            size = grid * body.feature_info[-1]["reduction"]      # the pixels of a patch's side
        if grid and is_vit:
            body.set_input_size(img_size=(size, size))
        elif grid and resizable:      # a Swin, whose windows set_input_size would stretch
            torch.manual_seed(0)      # the same random weights
            body = timm.create_model(model, img_size=size, **options)
        super().__init__(size, body.num_features, config["mean"], config["std"])
        self.body, self.is_vit = body, is_vit
        if not is_vit:
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
    with user_errors(name), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)      # "random" weights are the same every time
        if os.path.exists(name):
            frozen = CheckpointEncoder(name, grid)
        elif model == "timm":
            frozen = TimmEncoder(pretrained, grid)
        else:
            frozen = ClipEncoder(model, pretrained, grid)
    frozen.digest = digest(frozen.state_dict())
    return frozen.eval().requires_grad_(False)
