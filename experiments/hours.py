"""GPU hours that the commands in COMMANDS.md would take, estimated from their FLOPs.

    python experiments/hours.py            # fills the column "GPU hours" of COMMANDS.md
    python experiments/hours.py pretrain.py --experts 64      # one command, on ImageNet-1K

PyTorch's flop counter counts a step of one image, and a GPU does PEAK FLOPs a second at EFFICIENCY.
What is neither a matrix product nor a convolution, evaluation and waiting for images are not
counted. Nothing of this was measured on a GPU.
"""

import functools
import re
import shlex
import sys
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import finetune
import knn
import linprobe
import pretrain
import segment
from model import build_vit

PEAK = 989e12          # of an H100 in FP16, dense
EFFICIENCY = 0.4
IMAGES = {"imagenet": 1_281_167, "food101": 75_750}      # for training


def count(build, *shapes, train: bool = True) -> int:
    """FLOPs of a forward pass of the model that `build` returns, and of a backward pass if it
    trains, for inputs of these shapes: images, and a mask.
    """
    with torch.device("meta"):
        model = build()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(train):
        model.to_empty(device="cpu")
        images, *masks = (torch.zeros(1, *shape) for shape in shapes)
        with FlopCounterMode(display=False) as counter:
            outputs = model(images, *(mask.bool() for mask in masks))
            if train:
                sum(x.sum() for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad
                    ).backward()
    return counter.get_total_flops()


def pretrain_flops(args) -> int:
    """Of an image: a step of the student, and the teacher's forward pass"""
    size, grid = args.image_size, args.image_size // args.patch_size
    student = count(lambda: pretrain.build_student(args, teacher_dim=768), (3, size, size),
                    (grid ** 2,))
    return student + encoder_flops(0, 16 * grid, train=False)


@functools.cache
def encoder_flops(experts: int, size: int, train: bool) -> int:
    return count(lambda: build_vit("vit_base", experts=experts, image_size=size), (3, size, size),
                 train=train)


@functools.cache
def segment_flops(experts: int, size: int, width: int) -> int:
    def build():
        encoder = build_vit("vit_base", experts=experts, image_size=size)
        return segment.Segmenter(encoder, 150, width).eval()
    return count(build, (3, size, size))


def flops(words: list[str]) -> float:
    """Of a whole run: the words of its command, from the name of the script on"""
    script, *argv = words
    found = re.search(r"experts=(\d+)", " ".join(argv))      # in the folder of the checkpoint
    experts = int(found[1]) if found else 2
    if script == "pretrain.py":
        args = pretrain.parse_args(argv)
        return args.epochs * IMAGES["imagenet"] * pretrain_flops(args)
    if script == "segment.py":
        args = segment.parse_args(argv)
        return args.iterations * args.batch_size * segment_flops(experts, args.crop_size,
                                                                 args.width)
    if script == "linprobe.py":
        args = linprobe.parse_args(argv)
        count = IMAGES["food101" if args.data == "food101" else "imagenet"]
        return args.epochs * count * encoder_flops(experts, 224, train=False)
    if script == "knn.py":      # a forward pass of both sets
        args = knn.parse_args(argv)
        return len(args.checkpoints) * (IMAGES["imagenet"] + 50_000) * encoder_flops(
            experts, 224, train=False)
    if script != "finetune.py":
        sys.exit(__doc__)
    args = finetune.parse_args(argv)
    return args.epochs * IMAGES["imagenet"] * encoder_flops(experts, 224, train=True)


def hours(words: list[str]) -> str:
    value = flops(words) / (PEAK * EFFICIENCY) / 3600
    return f"{value:.0f}" if value >= 9.5 else f"{value:.1f}"


def fill(text: str) -> str:
    """Writes the hours before the command of each row of a table."""
    def row(match: re.Match) -> str:
        words = shlex.split(match[2].split("--nproc_per_node 4 ")[1])
        return f"| {hours(words)} | `{match[2]}` |"
    return re.sub(r"\| ([\d.]*) \| `(torchrun .*)` \|$", row, text, flags=re.MULTILINE)


def main(argv: list[str]):
    page = HERE / "COMMANDS.md"
    if argv:
        print(f"{flops(argv):.3g} FLOPs, {hours(argv)} GPU hours")
    else:
        page.write_text(fill(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
