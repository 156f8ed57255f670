"""k-NN accuracy of frozen encoders on val/, with train/ as the bank: nothing is trained.

    python knn.py runs/pretrain/epoch_0300.pt
    torchrun --nproc_per_node 4 knn.py runs/pretrain/epoch_*.pt ViT-B-16/openai

Without --data, the set is the one that the first ENCODER was trained on, if that is a checkpoint.
Chance is the accuracy of always guessing the most common class of val/. Each result is appended to
knn.jsonl in the encoder's folder or, if it is no file, in runs/knn.
"""

import argparse
import functools
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import common
import data
from common import UserError, positive, positive_int
from encoders import FrozenEncoder, build_frozen
from model import pool


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, "ENCODER [ENCODER ...] ")
    parser.set_defaults(data=None)
    group = parser.add_argument_group("k-NN")
    group.add_argument("encoders", nargs="+", type=common.path, metavar="ENCODER",
                       help="a checkpoint file, open_clip's MODEL/PRETRAINED, or timm/NAME")
    group.add_argument("-k", type=positive_int, default=20, help="neighbors that vote")
    group.add_argument("--temperature", type=positive, default=0.07, metavar="T",
                       help="a neighbor's vote weighs exp(cosine / T)")
    common.add_pool_flag(group)
    group.add_argument("--batch-size", type=positive_int, default=256,
                       help="images of one forward pass of one process")
    group.add_argument("--out", metavar="FOLDER", type=common.path,
                       help="where all rows go (default: each into knn.jsonl beside its "
                            "checkpoint, and those of encoders without a file into runs/knn)")
    return parser.parse_args(argv)


@torch.no_grad()
def extract(encoder: FrozenEncoder, views: data.CenterViews, args, process: common.Process,
            what: str) -> tuple[Tensor, Tensor]:
    """Each view's [CLS] or mean patch, of unit length -> features [M, D], labels [M]

    Each process computes its share of the batches, and all of them return all rows, in the
    order of the views. `what` names the progress bar.
    """
    features = torch.zeros(len(views), encoder.dim, device=process.device)
    labels = torch.zeros(len(views), dtype=torch.long, device=process.device)
    for batch in data.eval_batches(views, args.batch_size, args, process, what):
        with process.autocast():
            tokens = encoder(batch["image"] / 255)
        features[batch["index"]] = F.normalize(pool(tokens.float(), args.pool), dim=1)
        labels[batch["index"]] = batch["label"]
    return process.sum(features), process.sum(labels)      # rows of other processes are zero


def classify(queries: Tensor, bank: Tensor, labels: Tensor, classes: int, k: int,
             temperature: float, chunk: int = 256) -> Tensor:
    """Each query's class, by the vote of its k nearest neighbors in the bank.

    queries [Q, D] and bank [M, D] of unit length, labels [M] of the bank -> classes [Q]. A vote
    weighs exp(cosine / temperature). Queries are compared `chunk` at a time, because the cosines
    of 256 of them with all training images of ImageNet already take 1.3 GB.
    """
    predicted = []
    for part in queries.split(chunk):
        cosine, nearest = (part @ bank.T).topk(k, dim=1)
        # relative to the nearest, whose vote weighs 1: none overflows at a small temperature
        weight = ((cosine - cosine[:, :1]).double() / temperature).exp()
        votes = weight.new_zeros(len(part), classes)
        predicted.append(votes.scatter_add_(1, labels[nearest], weight).argmax(1))
    return torch.cat(predicted)


def knn_accuracy(name: str, encoder: FrozenEncoder, train: data.CenterViews,
                 val: data.CenterViews, args, process: common.Process) -> tuple[float, float]:
    """-> top-1 accuracy on `val`, by the neighbors in `train`, and chance, in percent; each process
    classifies its share. Raises UserError if the encoder, whose name is given, has no finite
    features.
    """
    # val/ first, because a broken image in either ends the program, and train/ takes hours
    queries, truth = extract(encoder, val, args, process, "val")
    bank, labels = extract(encoder, train, args, process, "bank")
    if not (bank.isfinite().all() and queries.isfinite().all()):
        raise UserError(f"{name}: its features are not finite with --amp {args.amp}")
    share = slice(process.rank, None, process.world)
    predicted = classify(queries[share], bank, labels, len(train.dataset.classes), args.k,
                         args.temperature)
    hits = process.sum((predicted == truth[share]).sum()).item()
    return 100 * hits / len(truth), 100 * truth.bincount().max().item() / len(truth)


def main(args) -> list[float]:
    """-> top-1 accuracy of each encoder, in percent"""
    process = common.Process(args)

    @functools.cache      # to list a million images takes a while, and epochs share them
    def views(images: str, split: str, image_size: int) -> data.CenterViews:
        return data.CenterViews(data.open_images(images, split, image_size), image_size)

    data_name, accuracies = args.data, []
    for name in args.encoders:
        encoder = build_frozen(name).to(process.device)
        # without --data, all encoders see the first one's set
        data_name = data_name or data.recorded_or_default(getattr(encoder, "trained_on", None))
        train, val = (views(data_name, split, encoder.image_size) for split in ("train", "val"))
        facts = data.describe(data_name, len(train), len(val), train.dataset.classes)
        process.agree(args, facts)
        if args.k > len(train):
            raise UserError(f"-k {args.k}: {data_name} has only {len(train)} training images")
        if args.compile:
            encoder.compile()
        beside = Path(name).parent if Path(name).is_file() else "runs/knn"
        out = Path(args.out or beside)
        out.mkdir(parents=True, exist_ok=True)
        # opened before the work, because one may not be allowed to write there
        with open(out / "knn.jsonl", "a") as log:
            top1, chance = knn_accuracy(name, encoder, train, val, args, process)
            accuracies.append(top1)
            if process.rank == 0:
                print(f"{top1:6.2f}% k-NN on {data_name} (chance {chance:.1f}%)  {name}",
                      flush=True)
                row = {"encoder": name, "step": getattr(encoder, "step", None),
                       "epoch": getattr(encoder, "epoch", None), "data": data_name,
                       "pool": args.pool, "k": args.k, "temperature": args.temperature,
                       "top1": top1}
                log.write(json.dumps(row) + "\n")
    return accuracies


if __name__ == "__main__":
    common.launch(main, parse_args())
