"""assets/lambda.png: the variation of dispatch weights against lambda, from table.py's JSON.

    python experiments/plot_lambda.py        # needs matplotlib
"""

import argparse
import json
from pathlib import Path

import table

TITLES = {"noise": "shapes-noise", "shapes": "shapes", "cifar": "CIFAR-10"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, default=table.HERE, metavar="FOLDER",
                        help="of SET.json (default: here)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: assets/lambda.png",
                        default=table.HERE.parent / "assets" / "lambda.png")
    return parser.parse_args(argv)


def main(args: argparse.Namespace):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    for color, (name, title) in enumerate(TITLES.items()):
        file = args.json / f"{name}.json"
        rows = json.loads(file.read_text()) if file.exists() else []
        points = [(group[0]["lambda"], *table.at_equilibrium(group))
                  for group in table.groups(rows, "coupled")]
        if points:
            weights, free, measured, settled = zip(*points, strict=True)
            axis.loglog(weights, free, f"C{color}_:", label=f"std(loss) / lambda, {title}")
            axis.loglog(weights, settled, f"C{color}x", label=f"at equilibrium, {title}")
            axis.loglog(weights, measured, f"C{color}o", label=f"measured, {title}",
                        fillstyle="none")
    axis.set(xlabel="lambda", ylabel="variation")
    axis.minorticks_off()
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(args.out, dpi=90)


if __name__ == "__main__":
    main(parse_args())
