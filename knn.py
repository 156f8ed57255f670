"""k-NN accuracy of frozen encoders on val/, with train/ as the bank: no training, no parameters.

    python knn.py runs/NAME/epoch_0300.pt
    torchrun --nproc_per_node 4 knn.py runs/NAME/epoch_*.pt        # a table, the best of them, and knn.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import common
import data
from checkpoint import load_encoder
from common import UserError
from model import ViT


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, batch_size=256, batches="images per batch of a process", seed=False,
                            out="that of the first checkpoint")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT",
                        help="of ExPLoRe, the authors' release or timm")
    parser.add_argument("-k", type=int, default=20, help="neighbors that vote (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.07, metavar="T",
                        help="a neighbor's vote weighs exp(cosine / T) (default: %(default)s)")
    return common.parse(parser, argv, "knn")


@torch.no_grad()
def extract(encoder: ViT, images, batch_size: int, machine: common.Machine, what: str):
    """[CLS] after the final norm, of unit length -> (features [M, D], labels [M]) of all, in every process.

    Processes share the batches; the order of the rows does not depend on how many there are.
    """
    features = torch.zeros(len(images), encoder.dim, device=machine.device)
    labels = torch.zeros(len(images), dtype=torch.long, device=machine.device)
    views = data.CenterViews(images, encoder.config["image_size"])
    for batch in data.eval_batches(views, batch_size, machine, what):
        with machine.autocast():
            tokens, _ = encoder(data.normalize(batch["image"] / 255))
        features[batch["index"]] = F.normalize(tokens[:, 0].float(), dim=1)
        labels[batch["index"]] = batch["label"]
    return machine.sum(features), machine.sum(labels)      # the other processes' rows are zero here


def classify(queries: Tensor, bank: Tensor, labels: Tensor, classes: int, k: int, temperature: float,
             chunk: int = 256) -> Tensor:
    """Each query's class by the vote of its k nearest in the bank, each weighing exp(cosine / temperature).

    queries [Q, D] and bank [M, D] of unit length, labels [M] -> [Q]. At most chunk x M cosines are in memory:
    1.3 GB against ImageNet.
    """
    predicted = []
    for part in queries.split(chunk):
        cosine, nearest = (part @ bank.T).topk(k, dim=1)
        weight = ((cosine - cosine[:, :1]).double() / temperature).exp()      # from 1 down: does not overflow
        votes = weight.new_zeros(len(part), classes).scatter_add_(1, labels[nearest], weight)
        predicted.append(votes.argmax(1))
    return torch.cat(predicted)


def main(args: argparse.Namespace) -> list[float]:
    """-> top-1 accuracy of each checkpoint, in percent"""
    machine, results = common.Machine(args), {}
    file = Path(args.out or Path(args.checkpoints[0]).parent, "knn.jsonl")
    if common.is_first():
        common.make_folder(file.parent)
    for path in args.checkpoints:
        encoder = load_encoder(path).to(machine.device).eval()
        size = encoder.config["image_size"]
        bank, val = (data.open_images(args.data, split, size) for split in ("train", "val"))
        if args.k > len(bank):
            raise UserError(f"-k {args.k}: there are only {len(bank)} training images in {args.data}")
        if machine.compile:
            encoder.compile()
        bank_features, bank_labels = extract(encoder, bank, args.batch_size, machine, "bank")
        features, labels = extract(encoder, val, args.batch_size, machine, "val")
        mine = slice(machine.rank, None, machine.world)
        predicted = classify(features[mine], bank_features, bank_labels, len(bank.classes), args.k,
                             args.temperature)
        results[path] = 100 * machine.sum((predicted == labels[mine]).sum()).item() / len(labels)
        if common.is_first():
            print(f"{results[path]:6.2f}%  {path}", flush=True)
            row = {"checkpoint": path, "data": args.data, "k": args.k, "temperature": args.temperature,
                   "top1": results[path]}
            with open(file, "a") as lines:      # nothing is read: runs beside this one lose no row
                lines.write(json.dumps(row) + "\n")
    if common.is_first() and len(results) > 1:
        best = max(results, key=results.get)
        print(f"best: {results[best]:.2f}%  {best}")
    return list(results.values())


if __name__ == "__main__":
    common.launch(main, parse_args())
