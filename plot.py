"""Curves of one or several runs over epochs, drawn from their logs into curves.png.

    python plot.py runs/demo
    python plot.py runs/coupled runs/uniform --out FOLDER

The picture has a panel for each loss in the logs, with the unweighted loss in pale, for the ratio
of weighted to unweighted token loss, the variation of expert 0's dispatch weights over an image's
patches, the learning rate, the scores on val/, the k-NN accuracies, which knn.py writes to
knn.jsonl, by data set and pooling, and for each field of your own.
"""

import argparse
import math
import os
from pathlib import Path

import common
from run import read_lines

os.environ["MPLBACKEND"] = "agg"      # pictures go to files, and a notebook's may be missing
# the titles of panels that do not have the name of their field in log.jsonl
TITLES = {"loss": "training loss", "token": "token loss (pale: unweighted)", "cls": "[CLS] loss",
          "pixel": "pixel loss (pale: unweighted)",
          "token_ratio": "weighted / unweighted token loss",
          "dispatch_cv": "variation of expert 0's weights", "lr": "learning rate",
          "top1": "validation accuracy (%)", "miou": "mIoU of the validation images (%)"}
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
    """Escapes $, which matplotlib reads as math."""
    return text.replace("$", r"\$")


def find_panels(logged: set[str]) -> list[str]:
    """The fields that have a panel: those of TITLES, then others in alphabetical order"""
    beside = "_unweighted", "_ratio", "_spread"      # of a loss
    return [name for name in TITLES if name in logged] + sorted(
        name for name in logged - OTHERS - TITLES.keys() if not name.endswith(beside))


def draw(runs: dict[str, list[dict]], path: Path):
    """A panel for each quantity that a run has, in which each run has its color."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter
    logged = set().union(*(line for lines in runs.values() for line in lines))
    panels = find_panels(logged)
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * rows + 0.25 * len(runs)), layout="constrained")
    for i, field in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, i, xlabel="epoch")
        axis.set_title(TITLES.get(field, field), fontsize="medium")
        axis.sharex(figure.axes[0])
        for color, lines in enumerate(runs.values()):
            # a wide pale line below a thin one: both are seen where they are equal
            for name, style in ((f"{field}_unweighted", dict(linewidth=6, alpha=0.3)),
                                (field, dict(linewidth=1.5))):
                epochs, values = read_curve(lines, name)
                axis.plot(epochs, values, color=f"C{color}",
                          marker="." if len(epochs) < 20 else "", **style)
        is_loss = field in ("loss", "cls") or f"{field}_spread" in logged
        if is_loss and axis.dataLim.ymin > 0:      # a loss of one's own may be negative
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axis.yaxis.set_major_formatter("{x:g}")      # 0.2, not 2 x 10^-1
            axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlim(left=0)      # of all panels
    figure.legend(axis.lines[1::2], map(plain, runs), loc="outside lower center")
    figure.savefig(path, dpi=90)


def main(args: argparse.Namespace):
    runs = {folder: read_run(folder) for folder in args.runs}
    out = Path(args.out or args.runs[0])
    out.mkdir(parents=True, exist_ok=True)
    draw(runs, out / "curves.png")
    print(out / "curves.png")


if __name__ == "__main__":
    common.launch(main, parse_args())
