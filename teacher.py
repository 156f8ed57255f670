"""Frozen teachers, whose tokens are the targets: from open_clip, from timm, or a checkpoint."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import TORCHSCRIPT, LoadError, first_line, load_encoder
from model import IMAGENET_MEAN, IMAGENET_STD


class Teacher(nn.Module):
    """A frozen model that turns images into tokens: [B, 3, S, S] in [0, 1] -> [B, 1 + N, dim].

    [CLS] comes first. The images may have any size: they are resized to `image_size`, at which
    the model has as many patches as the student, and normalized by `mean` and `std`.
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
    """CLIP's ViT from open_clip: its tokens after the last block, before `ln_post`.

    `pretrained` is one of open_clip's tags, a file, or "random". `grid` is the number of patches
    on a side of the student's images.
    """

    def __init__(self, name: str, pretrained: str, grid: int):
        import open_clip
        config = open_clip.get_model_config(name) or {"vision_cfg": {}}
        # open_clip's ResNets and ConvNeXts, and its ViTs that come from timm, have none
        patch_size = config["vision_cfg"].get("patch_size")
        if not patch_size:
            raise ValueError(f"no such file, and {name} is not one of open_clip's own vision "
                             "transformers")
        # OpenAI's weights were trained with QuickGELU. With any other activation, every target
        # is wrong, and nothing says so. open_clip knows which tags need it. A file needs the name
        # of a model that has it, such as ViT-B-16-quickgelu.
        quick_gelu = open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False)
        try:
            visual = open_clip.create_model(
                name, None if pretrained == "random" else pretrained,
                force_image_size=grid * patch_size, force_quick_gelu=quick_gelu).visual
        except Exception as error:
            # if a download failed, the same weights may be given as a file
            hint = f" As a file, these weights are {name}-quickgelu/FILE." if quick_gelu else ""
            reason = TORCHSCRIPT if "TorchScript" in str(error) else first_line(error)
            raise ValueError(reason + hint) from error
        preprocess = visual.preprocess_cfg
        super().__init__(grid * patch_size, visual.conv1.out_channels, preprocess["mean"],
                         preprocess["std"])
        self.visual = visual

    def tokens(self, images: Tensor) -> Tensor:
        last = self.visual.forward_intermediates(
            images, indices=1,      # the last one
            intermediates_only=True, output_fmt="NLC", output_extra_tokens=True)
        return torch.cat([last["image_intermediates_prefix"][0],
                          last["image_intermediates"][0]], dim=1)


class TimmTeacher(Teacher):
    """A ViT from timm: the tokens of its own `forward_features`.

    Register tokens are dropped. If the teacher has no [CLS] token, its pooled output is used
    instead. `name` is timm's name of the model, for weights from the Hugging Face Hub, or
    NAME/random.
    """

    def __init__(self, name: str, grid: int):
        import timm
        model = name.removesuffix("/random")
        vit = timm.create_model(model, pretrained=model == name, num_classes=0)
        # of timm's models, plain ViTs have both
        if not (hasattr(vit, "num_prefix_tokens") and hasattr(vit, "set_input_size")):
            raise ValueError(f"{model} is not a plain vision transformer, as ViT, DeiT, DINOv2 "
                             "and EVA are")
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
    """The encoder of any checkpoint that `load_encoder` reads: its tokens after the last norm."""

    def __init__(self, path: str, grid: int):
        encoder = load_encoder(path, grid=grid)
        super().__init__(grid * encoder.patch_size, encoder.dim, IMAGENET_MEAN, IMAGENET_STD)
        self.encoder = encoder

    def tokens(self, images: Tensor) -> Tensor:
        return self.encoder(images)[0]


def build_teacher(name: str, grid: int) -> Teacher:
    """The teacher that `--teacher` names, frozen, in eval mode. Raises LoadError.

    `name` is a checkpoint file, timm/NAME or open_clip's MODEL/PRETRAINED. The first "/" ends
    MODEL, so PRETRAINED may be the path of a file. `grid` is the number of patches on a side of
    the student's images.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)      # so that "random" weights are the same every time
            if Path(name).is_file():
                teacher = EncoderTeacher(name, grid)
            elif name.startswith("timm/"):
                teacher = TimmTeacher(name.removeprefix("timm/"), grid)
            # Nothing behind the "/" is refused: open_clip would make random weights of it.
            elif "/" in name.rstrip("/") and name[0] not in "./":
                teacher = ClipTeacher(*name.split("/", 1), grid)
            else:
                raise ValueError("no such file, and neither open_clip's MODEL/PRETRAINED, such as "
                                 "ViT-B-16/openai, nor timm/NAME, such as "
                                 "timm/vit_base_patch14_dinov2.lvd142m")
    except LoadError as error:      # its message begins with the path
        raise LoadError(f"teacher {error}") from error
    except Exception as error:      # timm and open_clip raise many kinds
        reason = first_line(error)
        # timm passes on an error of the Hub's library, and open_clip tells of it in its own
        if "huggingface_hub" in type(error).__module__ or "download" in reason:
            reason += " See Nodes without a network in RUNNING.md."
        raise LoadError(f"teacher {name}: {reason}") from error
    return teacher.eval().requires_grad_(False)
