"""k-NN accuracy of frozen encoders on val/, with train/ as the bank: nothing is trained.

    python knn.py runs/NAME/epoch_0300.pt
    torchrun --nproc_per_node 4 knn.py runs/NAME/epoch_*.pt      # several; also names the best

Each result is appended to knn.jsonl as one line. What most runs change: --data, -k, --out.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import common
import data
from checkpoint import load_checkpoint, load_encoder
from common import number, positive_int
from model import ViT


def parse_args(argv: list[str] | None = None):
    parser = common.make_parser(__doc__, "CHECKPOINT [CHECKPOINT ...] ")
    group = parser.add_argument_group("k-NN")
    group.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT",
                       help="of ExPLoRe, of the authors' release, or with timm's names")
    group.add_argument("-k", type=positive_int, default=20, help="neighbors that vote")
    group.add_argument("--temperature", type=number(float, "(0, inf)"), default=0.07, metavar="T",
                       help="a neighbor's vote weighs exp(cosine / T)")
    group.add_argument("--batch-size", type=positive_int, default=256,
                       help="images of one forward pass of one process")
    group.add_argument("--compile", action=argparse.BooleanOptionalAction,
                       help="use torch.compile (default: on a GPU)")
    group.add_argument("--out", metavar="FOLDER",
                       help="where knn.jsonl is (default: the folder of the first checkpoint)")
    return parser.parse_args(argv)


@torch.no_grad()
def extract(encoder: ViT, views: data.CenterViews, batch_size: int, process: common.Process,
            what: str) -> tuple[Tensor, Tensor]:
    """Each view's [CLS] token after the norm, of unit length -> features [M, D], labels [M]

    Each process computes its share of the batches, and all of them return all rows, in the
    order of the views. `what` names the progress bar.
    """
    features = torch.zeros(len(views), encoder.dim, device=process.device)
    labels = torch.zeros(len(views), dtype=torch.long, device=process.device)
    for batch in data.eval_batches(views, batch_size, process, what):
        with process.autocast():
            tokens, _ = encoder(data.normalize(batch["image"] / 255))
        features[batch["index"]] = F.normalize(tokens[:, 0].float(), dim=1)
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


def accuracy(encoder: ViT, train: data.CenterViews, val: data.CenterViews, args,
             process: common.Process) -> float:
    """-> top-1 accuracy on `val` in percent, by the neighbors in `train`; each process classifies
    its share.
    """
    bank, labels = extract(encoder, train, args.batch_size, process, "bank")
    queries, truth = extract(encoder, val, args.batch_size, process, "val")
    share = slice(process.rank, None, process.world)
    predicted = classify(queries[share], bank, labels, len(train.dataset.classes), args.k,
                         args.temperature)
    hits = process.sum((predicted == truth[share]).sum()).item()
    return 100 * hits / len(truth)


def main(args) -> list[float]:
    """-> top-1 accuracy of each checkpoint, in percent"""
    process = common.Process(args)
    out = Path(args.out or Path(args.checkpoints[0]).parent)
    out.mkdir(parents=True, exist_ok=True)
    datasets = {}      # by image size: (training, validation)
    results = {}
    for path in args.checkpoints:
        checkpoint = load_checkpoint(path)
        encoder = load_encoder(checkpoint).to(process.device).eval()
        size = encoder.config["image_size"]
        if size not in datasets:
            datasets[size] = [data.open_images(args.data, split, size)
                              for split in ("train", "val")]
        train, val = datasets[size]
        if args.k > len(train):
            raise common.UserError(f"-k {args.k}: there are only {len(train)} training images in "
                                   f"{args.data}")
        if process.compile:
            encoder.compile()
        results[path] = accuracy(encoder, data.CenterViews(train, size),
                                 data.CenterViews(val, size), args, process)
        if process.rank == 0:
            print(f"{results[path]:6.2f}%  {path}", flush=True)
            row = {"checkpoint": path, "path": str(Path(path).resolve()),
                   "step": checkpoint.get("step"), "epoch": checkpoint.get("epoch"),
                   "data": args.data, "k": args.k, "temperature": args.temperature,
                   "top1": results[path]}
            with open(out / "knn.jsonl", "a") as file:      # keeps what other runs write
                file.write(json.dumps(row) + "\n")
    if process.rank == 0 and len(results) > 1:
        best = max(results, key=results.get)
        print(f"best: {results[best]:.2f}%  {best}")
    return list(results.values())


if __name__ == "__main__":
    common.launch(main, parse_args())
