"""k-NN accuracy of frozen encoders on val/, with train/ as the bank: no training, no parameters.

    python knn.py runs/NAME/epoch_0300.pt
    torchrun --nproc_per_node 4 knn.py runs/NAME/epoch_*.pt        # a table, the best of them, and knn.json
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import common
import data
from common import UserError
from model import ViT, load_encoder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoints of any of our stages")
    common.add_common_flags(parser, batch_size=256, seed=False, out="default: that of the first checkpoint")
    parser.add_argument("-k", type=common.positive_int, default=20, help="neighbours that vote (default: %(default)s)")
    parser.add_argument("--temperature", type=common.positive, default=0.07, metavar="T",
                        help="a neighbour's vote weighs exp(cosine / T) (default: %(default)s)")
    return parser.parse_args(argv)


@torch.no_grad()
def extract(encoder: ViT, images, args: argparse.Namespace, process: common.Process, what: str) -> tuple[Tensor, Tensor]:
    """[CLS] after the final norm, of unit length -> (features [M, D], labels [M]) of all images, in every process.

    Processes share the work batch by batch. The order differs from that of the images, but not by the number of processes.
    """
    order = data.EvalOrder(len(images), args.batch_size, process.rank, process.world)
    batches = data.load(data.CentreViews(images, encoder.config["image_size"]), order, args.workers, process.device)
    features, labels = [torch.empty(0, encoder.dim, device=process.device)], [torch.empty(0, dtype=torch.long, device=process.device)]
    for batch in tqdm(batches, total=len(order), desc=what, unit="batch", leave=False, disable=not common.is_first()):
        with process.autocast():
            tokens, _ = encoder(data.normalize(batch["image"] / 255))
        features.append(F.normalize(tokens[:, 0].float(), dim=1))
        labels.append(batch["label"])
    return gather(torch.cat(features), process), gather(torch.cat(labels), process)


def gather(local: Tensor, process: common.Process) -> Tensor:
    """Concatenates the processes' rows, as many as each has."""
    if process.world == 1:
        return local
    counts = [torch.zeros(1, dtype=torch.long, device=local.device) for _ in range(process.world)]
    dist.all_gather(counts, torch.tensor([len(local)], device=local.device))
    longest = max(counts).item()
    padded = torch.cat([local, local.new_zeros(longest - len(local), *local.shape[1:])])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


def classify(queries: Tensor, bank: Tensor, labels: Tensor, classes: int, k: int, temperature: float,
             query_chunk: int = 4096, bank_chunk: int = 65536) -> Tensor:
    """Each query's class by the vote of its k nearest in the bank, each weighing exp(cosine / temperature).

    queries [Q, D] and bank [M, D] of unit length, labels [M] -> [Q]. Never more than query_chunk x bank_chunk cosines.
    """
    predicted = []
    for chunk in queries.split(query_chunk):
        cosine = torch.empty(len(chunk), 0, device=bank.device)
        label = torch.empty(len(chunk), 0, dtype=torch.long, device=bank.device)
        for start in range(0, len(bank), bank_chunk):      # the k best so far against the next part of the bank
            part = chunk @ bank[start:start + bank_chunk].T
            part, at = part.topk(min(k, part.shape[1]), dim=1)
            cosine, label = torch.cat([cosine, part], 1), torch.cat([label, labels[start:start + bank_chunk][at]], 1)
            cosine, at = cosine.topk(min(k, cosine.shape[1]), dim=1)
            label = label.gather(1, at)
        weight = ((cosine - cosine[:, :1]).double() / temperature).exp()      # from 1 down: small temperatures do not overflow
        votes = torch.zeros(len(chunk), classes, dtype=weight.dtype, device=bank.device).scatter_add_(1, label, weight)
        predicted.append(votes.argmax(1))
    return torch.cat(predicted)


def main(args: argparse.Namespace) -> list[float]:
    """-> top-1 accuracy of each checkpoint, in percent."""
    process = common.start(args)
    results = []
    for path in args.checkpoints:
        try:
            encoder = load_encoder(path).to(process.device).eval()
        except ValueError as error:
            raise UserError(str(error)) from error
        bank, val = (data.open_images(args.data, split, encoder.config["image_size"]) for split in ("train", "val"))
        if args.k > len(bank):
            raise UserError(f"-k {args.k}: there are only {len(bank)} training images in {args.data}")
        if args.compile:
            encoder.compile()
        bank_features, bank_labels = extract(encoder, bank, args, process, "bank")
        features, labels = extract(encoder, val, args, process, "val")
        mine = slice(process.rank, None, process.world)
        predicted = classify(features[mine], bank_features, bank_labels, len(bank.classes), args.k, args.temperature)
        correct = (predicted == labels[mine]).sum()
        if process.world > 1:
            dist.all_reduce(correct)
        results.append(100 * correct.item() / len(labels))
        if common.is_first():
            print(f"{results[-1]:6.2f}%  {path}", flush=True)
    if common.is_first() and len(results) > 1:
        best = max(range(len(results)), key=results.__getitem__)
        print(f"best: {results[best]:.2f}%  {args.checkpoints[best]}")
    if common.is_first():
        out = Path(args.out or Path(args.checkpoints[0]).parent)
        out.mkdir(parents=True, exist_ok=True)
        (out / "knn.json").write_text(json.dumps(dict(zip(args.checkpoints, results)), indent=1) + "\n")
    return results


if __name__ == "__main__":
    common.run(main, parse_args())
