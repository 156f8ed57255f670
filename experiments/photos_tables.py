"""The tables of README.md in this folder, from photos.jsonl, and the picture assets/photos.png.

    python experiments/photos_tables.py
    python experiments/photos_tables.py --draw      # trains one student, after photos.py prepare
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from analyze import draw_heatmaps
from experiments.measures import half_width, see
from experiments.photos import ARMS, DEFAULTS, TUNING, open_cache, train
from losses import token_loss
from model import normalize
from run import read_lines

COLUMNS = "arm | probe, % | to none | to uniform | k-NN to none | k-NN to uniform".split(" | ")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=HERE / "photos.jsonl", metavar="FILE")
    parser.add_argument("--draw", action="store_true", help="draw the picture, too")
    parser.add_argument("--cache", type=Path, default=Path("runs/photos"), metavar="FOLDER")
    return parser.parse_args(argv)


def compare(rows: list[dict], arm: str, other: str, measure: str) -> str:
    """The mean difference of two arms over their common seeds, with its 95 % interval"""
    ours, theirs = ({row["seed"]: row[measure] for row in rows if row["arm"] == each}
                    for each in (arm, other))
    seeds = sorted(ours.keys() & theirs.keys())
    if arm == other or len(seeds) < 2:
        return ""
    values = np.array([[ours[seed] - theirs[seed]] for seed in seeds])
    return f"{values.mean():+.2f} ± {half_width(values):.2f}"


def print_table(rows: list[dict]):
    most = len({row["seed"] for row in rows})
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for arm in ARMS:
        if own := [row for row in rows if row["arm"] == arm]:
            cells = [compare(rows, arm, other, measure) for measure in ("probe", "knn")
                     for other in ("none", "uniform")]
            name = arm + f" ({len(own)} seeds)" * (len(own) < most)
            probe = f"{np.mean([row['probe'] for row in own]):.1f}"
            print("| " + " | ".join([name, probe, *cells]) + " |")


def draw(cache: Path, path: Path, seed: int = 0, count: int = 8):
    """Photographs, a routed student's weights on their patches, and the patches' token losses"""
    bank, _ = open_cache(cache, 4000)
    student, _ = train(DEFAULTS, bank, epochs=16, seed=seed)
    index = np.linspace(0, len(bank["images"]) - 1, count + 2).astype(int)[1:-1]
    images = torch.from_numpy(bank["images"][index])
    _, weights = see(student.encoder, bank["images"][index])
    targets = torch.from_numpy(bank["tokens"][index]).float()
    everything = torch.arange(targets.shape[1]).expand(count, -1)
    with torch.no_grad():
        pred = student(normalize(images / 255), torch.zeros_like(everything).bool(), everything)
    draw_heatmaps([{"numbers": {"name": f"lambda {DEFAULTS['lambda_']}",
                                "loss_weights": "dispatch"}, "images": images,
                    "weights": weights[..., None],
                    "losses": token_loss(pred.tokens[:, 1:], targets)}], 1, path)


def main(args: argparse.Namespace):
    rows = [row for row in read_lines(args.rows) if row["seed"] not in TUNING
            and (DEFAULTS | ARMS[row["arm"]]).items() <= row.items()]
    for epochs, images in sorted({(row["epochs"], row["images"]) for row in rows}):
        found = [row for row in rows if (row["epochs"], row["images"]) == (epochs, images)]
        seeds = {row["seed"] for row in found}
        print(f"\n{epochs} epochs of {images} images, {len(seeds)} seeds\n")
        print_table(found)
    if args.draw:
        draw(args.cache, HERE.parent / "assets" / "photos.png")


if __name__ == "__main__":
    main(parse_args())
