"""Curves of one or several runs over epochs, drawn from their logs into curves.png.

    python plot.py runs/demo
    python plot.py runs/coupled runs/uniform --out FOLDER

The picture has a panel for each of these that the logs have: the losses, the ratio of weighted to
unweighted token loss, the variation of expert 0's dispatch weights over an image's patches, the
learning rate, the scores on val/, and the k-NN accuracies, which knn.py writes to knn.jsonl, by
data set and pooling.
"""

import argparse
import contextlib
import json
import math
import os
from pathlib import Path

import common

# title, unit, scale, and the fields of log.jsonl: the first is a thin line, the second a pale one
# that is wide, so that both are seen where they are equal
PANELS = (
    ("training loss", "cross-entropy (nats)", "log", ("loss",)),
    ("token loss (pale: unweighted)", "Huber loss", "log", ("token", "token_unweighted")),
    ("[CLS] loss", "1 - cosine", "log", ("cls",)),
    ("pixel loss (pale: unweighted)", "squared error, normalized patches", "log",
     ("pixel", "pixel_unweighted")),
    ("weighted / unweighted token loss", "ratio, 1 is neutral", "linear", ("token_ratio",)),
    ("variation of expert 0's weights", "standard deviation / mean", "linear", ("dispatch_cv",)),
    ("learning rate", "AdamW's rate", "linear", ("lr",)),
    ("validation accuracy", "top-1 (%)", "linear", ("top1",)),
    ("segmentation of the validation images", "mIoU (%)", "linear", ("miou",)),
)
STYLES = (dict(linewidth=1.5, zorder=3), dict(linewidth=6, alpha=0.3))
# what is in a log and has no panel
OTHERS = {"step", "epoch", "grad_norm", "skipped", "objective_weights", "memory_gib",
          "images_per_second", "loader_wait", "entropy", "entropy_loss", "importance_loss",
          "cls_share", "top5", "mean_accuracy", "pixel_accuracy", "main", "auxiliary"}
COLUMNS = 4


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=common.path,
                        help="folder of a run, with log.jsonl")
    parser.add_argument("--out", metavar="FOLDER", type=common.path,
                        help="for curves.png (default: that of the first run)")
    return parser.parse_args(argv)


def read_lines(path: Path) -> list[dict]:
    """The rows of a file that may be missing, without those that do not parse."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def read_run(folder: str) -> list[dict]:
    """-> the lines of log.jsonl, then those of knn.jsonl, in which the accuracy has the name of its
    data set and pooling. Of equal ones, the last counts. Raises UserError if there is no line.
    """
    lines = read_lines(Path(folder, "log.jsonl"))
    if not lines:
        raise common.UserError(f"{folder} is no run's folder: it has no log.jsonl with a line")
    # knn.jsonl may hold other encoders, too; by its folder's name, a run that was moved is known
    name = os.path.basename(os.path.abspath(folder))
    knn = {}
    for row in read_lines(Path(folder, "knn.jsonl")):
        if row["epoch"] is not None and Path(row["encoder"]).parent.name in ("", name):
            kind = "[CLS]" if row["pool"] == "cls" else "mean patch"
            data = Path(*Path(row["data"]).parts[-2:])      # of two imagenet/, their parents differ
            field = f"k-NN, {data}, {kind}"
            knn[field, row["epoch"]] = {"epoch": row["epoch"], field: row["top1"]}
    lines += [knn[key] for key in sorted(knn)]
    if "objective_weights" in lines[0]:      # pretraining's total is mostly the entropies
        lines = [{name: line[name] for name in line if name != "loss"} for line in lines]
    return lines


def read_curve(lines: list[dict], field: str) -> tuple[list[float], list[float]]:
    """-> epochs, values; of expert 0, where a field has a value for each expert"""
    lines = [line for line in lines if field in line]
    values = [line[field] for line in lines]
    return ([line["epoch"] for line in lines],
            [value[0] if isinstance(value, list) else value for value in values])


def plain(text: str) -> str:
    """The text as matplotlib shows it as it is: what stands between two $ would be mathematics."""
    return text.replace("$", r"\$")


def find_panels(logged: set[str]) -> list[tuple]:
    """PANELS of these fields, and one for each other field that is no measure beside a loss: k-NN,
    and an objective of one's own.
    """
    known = OTHERS.union(*(fields for *_, fields in PANELS))
    own = [name for name in sorted(logged - known)
           if not name.endswith(("_unweighted", "_ratio", "_spread"))]
    return [panel for panel in PANELS if logged.intersection(panel[-1])] + [
        (name, "top-1 (%)", "linear", (name,)) if name.startswith("k-NN")
        else (f"{name} loss (pale: unweighted)", "loss", "log", (name, f"{name}_unweighted"))
        for name in own]


def draw(runs: dict[str, list[dict]], path: Path):
    """A panel for each quantity that a run has, in which each run has its color."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter
    logged = set().union(*(line for lines in runs.values() for line in lines))
    panels = find_panels(logged)
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * rows + 0.25 * len(runs)), layout="constrained")
    for i, (title, unit, scale, fields) in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, i, xlabel="epoch", ylabel=unit)
        axis.set_title(title, fontsize="medium")
        axis.sharex(figure.axes[0])
        for color, lines in enumerate(runs.values()):
            for field, style in zip(fields, STYLES):
                epochs, values = read_curve(lines, field)
                axis.plot(epochs, values, color=f"C{color}",
                          marker="." if len(epochs) < 20 else "", **style)
        if scale == "log" and axis.dataLim.ymin > 0:      # a loss of one's own may be negative
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axis.yaxis.set_major_formatter("{x:g}")      # 0.2, not 2 x 10^-1
            axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlim(left=0)      # of all panels
    figure.legend(axis.lines[::len(fields)], map(plain, runs), loc="outside lower center")
    figure.savefig(path, dpi=90)


def main(args: argparse.Namespace):
    runs = {folder: read_run(folder) for folder in args.runs}
    out = Path(args.out or args.runs[0])
    common.make_folder(out)
    draw(runs, out / "curves.png")
    print(out / "curves.png")


if __name__ == "__main__":
    common.launch(main, parse_args())
