"""Frozen teachers, whose tokens are the targets: open_clip's, timm's, or a checkpoint's."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import LoadError, first_line, load_encoder
from model import IMAGENET_MEAN, IMAGENET_STD


class Teacher(nn.Module):
    """A frozen model: square images in [0, 1] of any size -> its tokens [B, 1 + N, dim].

    It resizes images so that its patch grid is the student's, and normalizes them its own way.
    """

    def __init__(self, image_size: int, dim: int, mean: tuple, std: tuple):
        super().__init__()
        self.image_size, self.dim = image_size, dim
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] != self.image_size:
            images = F.interpolate(images, (self.image_size, self.image_size), mode="bicubic",
                                   antialias=True)
        return self.tokens((images.clamp(0, 1).to(self.mean.dtype) - self.mean) / self.std)


class ClipTeacher(Teacher):
    """CLIP's ViT from open_clip: tokens after its last block, before `ln_post`.

    `pretrained` is an open_clip tag, a file or "random"; `grid` the student's patches a side.
    """

    def __init__(self, name: str, pretrained: str, grid: int):
        import open_clip
        config = open_clip.get_model_config(name) or {"vision_cfg": {}}
        patch_size = config["vision_cfg"].get("patch_size")      # not of convolutions, timm's
        if not patch_size:
            raise ValueError(f"no such file, and {name} is not one of open_clip's own vision "
                             "transformers")
        # OpenAI's weights need QuickGELU; with another activation, every target would silently
        # be wrong. A tag says so. A file does not: the name has to, as ViT-B-16-quickgelu does.
        quick_gelu = open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False)
        try:
            visual = open_clip.create_model(
                name, None if pretrained == "random" else pretrained,
                force_image_size=grid * patch_size, force_quick_gelu=quick_gelu).visual
        except Exception as error:      # no network: a file by hand needs the name
            hint = f"as a file, these weights are {name}-quickgelu/FILE; " if quick_gelu else ""
            raise ValueError(hint + first_line(error)) from error
        preprocess = visual.preprocess_cfg
        super().__init__(grid * patch_size, visual.conv1.out_channels, preprocess["mean"],
                         preprocess["std"])
        self.visual = visual

    def tokens(self, images: Tensor) -> Tensor:
        last = self.visual.forward_intermediates(
            images, indices=1, intermediates_only=True, output_fmt="NLC",
            output_extra_tokens=True)
        return torch.cat([last["image_intermediates_prefix"][0],
                          last["image_intermediates"][0]], dim=1)


class TimmTeacher(Teacher):
    """A ViT of timm: the tokens of its own `forward_features`, without registers.

    Where it has no [CLS], what its head pools comes first. `name` is timm's, or NAME/random.
    """

    def __init__(self, name: str, grid: int):
        import timm
        model = name.removesuffix("/random")
        vit = timm.create_model(model, pretrained=model == name, num_classes=0)
        size = grid * vit.patch_embed.patch_size[0]
        vit.set_input_size(img_size=(size, size))
        config = timm.data.resolve_model_data_config(vit)
        super().__init__(size, vit.num_features, config["mean"], config["std"])
        self.vit = vit

    def tokens(self, images: Tensor) -> Tensor:
        tokens = self.vit.forward_features(images)
        cls = tokens[:, :1]
        if getattr(self.vit, "cls_token", None) is None:
            cls = self.vit.forward_head(tokens, pre_logits=True)[:, None]
        return torch.cat([cls, tokens[:, self.vit.num_prefix_tokens:]], dim=1)


class EncoderTeacher(Teacher):
    """An encoder from any checkpoint that `load_encoder` reads: its tokens after the norm."""

    def __init__(self, path: str, grid: int):
        encoder = load_encoder(path, grid=grid)
        super().__init__(grid * encoder.patch_size, encoder.dim, IMAGENET_MEAN, IMAGENET_STD)
        self.encoder = encoder

    def tokens(self, images: Tensor) -> Tensor:
        return self.encoder(images)[0]


def build_teacher(name: str, grid: int) -> Teacher:
    """A checkpoint file, timm/NAME or open_clip's MODEL/PRETRAINED, split at the first "/".

    Raises LoadError.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)      # "random" weights are the same every time
            if Path(name).is_file():
                teacher = EncoderTeacher(name, grid)
            elif name.startswith("timm/"):
                teacher = TimmTeacher(name.removeprefix("timm/"), grid)
            elif "/" in name.rstrip("/"):      # open_clip takes an empty tag for random weights
                teacher = ClipTeacher(*name.split("/", 1), grid)
            else:
                raise ValueError("neither a file nor an open_clip MODEL/PRETRAINED, such as "
                                 "ViT-B-16/openai")
    except LoadError as error:      # it begins with the path
        raise LoadError(f"teacher {error}") from error
    except Exception as error:      # a library's own, of a dozen kinds
        raise LoadError(f"teacher {name}: {first_line(error)}") from error
    return teacher.eval().requires_grad_(False)
