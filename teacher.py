"""Frozen encoders, as teachers and for evaluation: from open_clip, from timm, or a checkpoint."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import load_checkpoint, load_encoder, one_line, resize_pos_embed
from common import UserError
from model import IMAGENET_MEAN, IMAGENET_STD, normalize


class Teacher(nn.Module):
    """A frozen model that turns images into tokens: [B, 3, S, S] in [0, 1] -> [B, 1 + N, dim].

    [CLS] comes first. The images may have any size: they are resized to `image_size`, and
    normalized by the model's own `mean` and `std`.
    """

    def __init__(self, image_size: int, dim: int, mean: tuple, std: tuple):
        super().__init__()
        self.image_size, self.dim, self.mean, self.std = image_size, dim, mean, std

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] != self.image_size:
            images = F.interpolate(images, (self.image_size, self.image_size), mode="bicubic",
                                   antialias=True)
        images = normalize(images.clamp(0, 1), self.mean, self.std)
        return self.tokens(images.to(next(self.parameters()).dtype))


class ClipTeacher(Teacher):
    """CLIP's ViT from open_clip: its tokens after the last block, before `ln_post`.

    `pretrained` is one of open_clip's tags, a file, or "random".
    """

    def __init__(self, name: str, pretrained: str, grid: int | None):
        import open_clip
        config = open_clip.get_model_config(name) or {"vision_cfg": {}}
        # open_clip's ResNets and ConvNeXts, and its ViTs that come from timm, have none
        patch_size = config["vision_cfg"].get("patch_size")
        if not patch_size or not pretrained:
            raise ValueError("no such file, and neither MODEL/PRETRAINED of an open_clip ViT, such "
                             "as ViT-B-16/openai, nor timm/NAME")
        # OpenAI's weights were trained with QuickGELU. With any other activation, every target
        # is wrong, and nothing says so. open_clip knows which tags need it; of a file, the user
        # has to.
        quick_gelu = open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False)
        visual = open_clip.create_model(name, None if pretrained == "random" else pretrained,
                                        force_quick_gelu=quick_gelu).visual
        quick = name.endswith("-quickgelu")
        other = name.removesuffix("-quickgelu") if quick else f"{name}-quickgelu"
        if (Path(pretrained).is_file() and other in open_clip.list_models()
                and os.environ.get("RANK", "0") == "0"):
            used, instead = ("QuickGELU", "GELU") if quick else ("GELU", "QuickGELU")
            print(f"{name}/{pretrained} uses {used}; for weights that were trained with {instead}, "
                  f"give {other}/{pretrained}")

        if grid is not None:
            position = resize_pos_embed(visual.positional_embedding[None], grid)[0]
            visual.positional_embedding = nn.Parameter(position.detach())
        size = grid * patch_size if grid else visual.image_size[0]
        normalization = visual.preprocess_cfg
        super().__init__(size, visual.conv1.out_channels, normalization["mean"],
                         normalization["std"])
        self.visual = visual

    def tokens(self, images: Tensor) -> Tensor:
        last = self.visual.forward_intermediates(
            images, indices=1,      # the last one
            intermediates_only=True, output_fmt="NLC", output_extra_tokens=True)
        return torch.cat([last["image_intermediates_prefix"][0],
                          last["image_intermediates"][0]], dim=1)


class TimmTeacher(Teacher):
    """A ViT from timm: the tokens of its own `forward_features`.

    Register tokens are dropped. If the model has no [CLS] token, its pooled output is used
    instead. `name` is timm's name of the model, for weights from the Hugging Face Hub, or
    NAME/random.
    """

    def __init__(self, name: str, grid: int | None):
        import timm
        model = name.removesuffix("/random")
        vit = timm.create_model(model, pretrained=model == name, num_classes=0)
        # of timm's models, plain ViTs have both
        if not (hasattr(vit, "num_prefix_tokens") and hasattr(vit, "set_input_size")):
            raise ValueError("not a plain vision transformer, as ViT, DeiT, DINOv2 and EVA are")
        config = timm.data.resolve_model_data_config(vit)
        size = grid * vit.patch_embed.patch_size[0] if grid else config["input_size"][-1]
        vit.set_input_size(img_size=(size, size))
        super().__init__(size, vit.num_features, config["mean"], config["std"])
        self.vit = vit

    def tokens(self, images: Tensor) -> Tensor:
        tokens = self.vit.forward_features(images)
        cls = tokens[:, :1]
        if getattr(self.vit, "cls_token", None) is None:
            cls = self.vit.forward_head(tokens, pre_logits=True)[:, None]
        return torch.cat([cls, tokens[:, self.vit.num_prefix_tokens:]], dim=1)


class EncoderTeacher(Teacher):
    """The encoder of any checkpoint that `load_encoder` reads: its tokens after the last norm."""

    def __init__(self, path: str, grid: int | None):
        checkpoint = load_checkpoint(path)
        encoder = load_encoder(checkpoint, grid)
        super().__init__(encoder.grid * encoder.patch_size, encoder.dim, IMAGENET_MEAN,
                         IMAGENET_STD)
        self.encoder = encoder
        self.step, self.epoch = checkpoint.get("step"), checkpoint.get("epoch")

    def tokens(self, images: Tensor) -> Tensor:
        return self.encoder(images)[0]


def build_teacher(name: str, grid: int | None = None) -> Teacher:
    """The model of this name, frozen, in eval mode. Raises UserError.

    `name` is a checkpoint file, timm/NAME or open_clip's MODEL/PRETRAINED. The first "/" ends
    MODEL, so PRETRAINED may be the path of a file. `grid` is the number of patches on a side of
    its images, a student's for its teacher. By default, images have the model's own size.
    """
    model, _, pretrained = name.partition("/")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)      # so that "random" weights are the same every time
            if Path(name).is_file():
                teacher = EncoderTeacher(name, grid)
            elif model == "timm":
                teacher = TimmTeacher(pretrained, grid)
            else:
                teacher = ClipTeacher(model, pretrained, grid)
    except UserError:      # of a checkpoint: its message begins with the path
        raise
    except Exception as error:      # timm and open_clip raise many kinds
        raise UserError(f"{name}: {one_line(error)}") from error
    return teacher.eval().requires_grad_(False)
