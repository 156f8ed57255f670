"""Curves of one or several runs over epochs, drawn from their logs into curves.png.

    python plot.py runs/demo
    python plot.py runs/coupled runs/uniform --out FOLDER

The picture has a panel for each of these that the logs have: the losses, the ratio of weighted to
unweighted token loss, the variation of expert 0's dispatch weights over an image's patches, lambda,
the learning rate, the scores on val/, and the k-NN accuracy, which knn.py writes to knn.jsonl.
Drawing needs matplotlib.
"""

import argparse
import json
import math
import re
from pathlib import Path

import common

# title, unit, and the fields of log.jsonl: the first is a solid line, the second a dashed one
PANELS = (
    ("training loss", "cross-entropy (nats)", ("loss",)),
    ("token loss (dashed: unweighted)", "Huber loss", ("token", "token_unweighted")),
    ("[CLS] loss", "1 - cosine", ("cls",)),
    ("pixel loss (dashed: unweighted)", "squared error, normalized patches",
     ("pixel", "pixel_unweighted")),
    ("weighted / unweighted token loss", "ratio, 1 is neutral", ("token_ratio",)),
    ("variation of expert 0's weights", "standard deviation / mean", ("dispatch_cv",)),
    ("lambda of expert 0", "unit of the loss", ("lambda",)),
    ("learning rate", "AdamW's rate", ("lr",)),
    ("k-NN accuracy", "top-1 (%)", ("knn",)),
    ("validation accuracy", "top-1 (%)", ("top1",)),
    ("segmentation of the validation images", "mIoU (%)", ("miou",)),
)
COLUMNS = 4


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, with log.jsonl")
    parser.add_argument("--out", metavar="FOLDER",
                        help="for curves.png (default: that of the first run)")
    return parser.parse_args(argv)


def read_lines(path: Path) -> list[dict]:
    """The rows of a file that may be missing; a killed run leaves half of a last line."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise common.UserError(f"{path}: line {number} is not JSON") from error
    return rows


def read_run(folder: str) -> list[dict]:
    """-> the lines of log.jsonl, then {"epoch", "knn"} for each epoch that knn.jsonl has"""
    log = read_lines(Path(folder, "log.jsonl"))
    if not log:
        raise common.UserError(f"{folder} has no log.jsonl with a line: give folders of runs")
    own = Path(folder).resolve()
    accuracy = {}      # the latest of each epoch
    unclear = 0
    for row in read_lines(Path(folder, "knn.jsonl")):
        path = Path(row["checkpoint"])
        of_this_run = Path(row.get("path", path.resolve())).parent == own
        epoch = row.get("epoch")
        epoch = epoch_of(path) if epoch is None else epoch
        if of_this_run and epoch is not None:
            accuracy[epoch] = row["top1"]
        elif of_this_run or "path" not in row and path.parent.name in ("", own.name):
            unclear += 1
    if unclear:
        print(f"{folder}: {unclear} rows of knn.jsonl do not say of which run and epoch they are, "
              "and are left out")
    return log + [{"epoch": epoch, "knn": accuracy[epoch]} for epoch in sorted(accuracy)]


def epoch_of(path: Path) -> float | None:
    """That of epoch_NNNN.pt, for rows and checkpoints of earlier versions, which do not say it."""
    found = re.fullmatch(r"epoch_(\d+)", path.stem)
    return float(found[1]) if found else None


def read_curve(lines: list[dict], field: str) -> tuple[list[float], list[float]]:
    """-> epochs, values; of expert 0, where a field has a value for each expert"""
    lines = [line for line in lines if field in line]
    values = [line[field] for line in lines]
    return ([line["epoch"] for line in lines],
            [value[0] if isinstance(value, list) else value for value in values])


def draw(runs: dict[str, list[dict]], path: Path):
    """A panel for each of PANELS that a run has, in which each run has its color."""
    from matplotlib.figure import Figure
    logged = set().union(*(line for lines in runs.values() for line in lines))
    if "token" in logged:      # then the total is mostly minus lambda times the entropies
        logged.remove("loss")
    panels = [panel for panel in PANELS if logged.intersection(panel[2])]
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * rows + 0.25 * len(runs)), layout="constrained")
    for i, (title, unit, fields) in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, i, xlabel="epoch", ylabel=unit)
        axis.set_title(title, fontsize="medium")
        axis.sharex(figure.axes[0])
        for color, lines in enumerate(runs.values()):
            for field, style in zip(fields, ("-", "--")):
                epochs, values = read_curve(lines, field)
                axis.plot(epochs, values, style, color=f"C{color}",
                          marker="." if len(epochs) < 20 else "")
        if "lambda" in fields:
            axis.set_yscale("log", nonpositive="mask")
    axis.set_xlim(left=0)      # of all panels
    figure.legend(axis.lines[::len(fields)], runs, loc="outside lower center")
    figure.savefig(path, dpi=90)


def main(args: argparse.Namespace):
    runs = {folder: read_run(folder) for folder in args.runs}
    out = Path(args.out or args.runs[0])
    out.mkdir(parents=True, exist_ok=True)
    try:
        draw(runs, out / "curves.png")
        print(out / "curves.png")
    except ImportError:
        print("curves.png needs matplotlib: pip install matplotlib")


if __name__ == "__main__":
    common.launch(main, parse_args())
