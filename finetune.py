"""Supervised training: finetuning with the paper's recipes, or a classifier from scratch.

    torchrun --nproc_per_node 4 finetune.py runs/pretrain/epoch_0300.pt
    python finetune.py --model vit_nano --data shapes --image-size 48 --patch-size 6 \\
        --augment plain --batch-size 64 --lr 2e-3 --epochs 4 --warmup-epochs 1 \\
        --out runs/teacher

The first command finetunes an encoder with experts by all three parts of --recipe. The second
command trains a classifier from scratch, which can be the teacher of a pretraining run.
"""

import argparse

from torch import Tensor, nn

import common
import data
import optim
import supervised
from checkpoints import digest, load_checkpoint, load_encoder
from common import UserError, positive_int
from model import PRESETS, ViT, build_vit, normalize
from supervised import LinearHead


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, "[CHECKPOINT] ")
    common.add_train_flags(parser, "finetune", batch_size=1024, lr=5e-4, min_lr=1e-6,
                           weight_decay=0.05, clip_grad=0.0, length=100, warmup=5,
                           save_every=10)
    supervised.add_augment_flag(parser)
    supervised.add_transfer_flags(parser, layer_decay=None)

    group = parser.add_argument_group("model")
    group.add_argument(
        "checkpoint", nargs="?", type=common.path, metavar="CHECKPOINT",
        help="an encoder of ExPLoRe, of the authors' release, or with timm's names; without a "
             "checkpoint, the model is trained from scratch")
    group.add_argument("--model", choices=PRESETS, default="vit_base",
                       help="the model to train from scratch")
    group.add_argument("--patch-size", type=positive_int, default=16,
                       help="side of a patch in pixels, for a model from scratch")
    group.add_argument("--image-size", type=positive_int,
                       help="side of an image in pixels (default: the checkpoint's, else 224)")
    common.add_pool_flag(group)

    args = common.parse_run(parser, argv)
    scratch = ("model", "patch_size")
    if args.checkpoint and any(getattr(args, x) != parser.get_default(x) for x in scratch):
        parser.error("CHECKPOINT has its own --model and --patch-size")
    return args


class Classifier(nn.Module):
    """An encoder with a head on its tokens: images [B, 3, S, S] in [0, 1] -> logits [B, C]"""

    def __init__(self, encoder: ViT, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, images: Tensor) -> Tensor:
        tokens, _ = self.encoder(normalize(images))      # [B, 1 + N, D]
        return self.head(tokens)


def main(args) -> dict[str, float]:
    """Returns the top-1 and top-5 accuracy of the best evaluation on val/, in percent."""
    process = common.Process(args)
    checkpoint = load_checkpoint(args.checkpoint) if args.checkpoint else None
    config = (checkpoint["encoder"] if checkpoint      # the arguments of ViT
              else dict(image_size=224, patch_size=args.patch_size))
    image_size, patch_size = args.image_size or config["image_size"], config["patch_size"]
    if image_size % patch_size:
        raise UserError(f"--image-size {image_size} is not a multiple of the patch size "
                        f"{patch_size}")
    dataset, val = (data.open_images(args.data, split, image_size) for split in ("train", "val"))

    common.seed_torch("weights", args.seed)
    if checkpoint:
        encoder = load_encoder(checkpoint, image_size // patch_size, args.drop_path)
    else:
        encoder = build_vit(args.model, image_size=image_size, patch_size=patch_size,
                            drop_path=args.drop_path)
    recipe = supervised.apply_recipe(args, encoder)
    # a thousandth of the usual std, as in the release
    head = LinearHead(encoder.dim, len(dataset.classes), args.pool, std=0.001 * 0.02)
    classifier = Classifier(encoder, head).to(process.device)
    layer_decay = args.layer_decay or (0.65 if checkpoint else 1.0)
    if args.compile:
        encoder.compile_blocks()
    return supervised.fit_classifier(
        args, process, classifier, dataset, val, image_size, erase=True,
        title=f"{args.checkpoint}, {recipe}," if checkpoint else f"{args.model} from scratch",
        encoder=encoder.config,
        digest=digest(checkpoint["model"]) if checkpoint else "",
        lr_scale=optim.layerwise_lr(len(encoder.blocks), layer_decay))


if __name__ == "__main__":
    common.launch(main, parse_args())
