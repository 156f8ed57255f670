"""The tables and the picture of experiments/README.md, from the lines of control.jsonl.

    python experiments/table.py            # prints the tables, and writes them into README.md
    python experiments/table.py --draw     # draws assets/control.png too, with matplotlib

A row's *recovered share* is (floor - row) / (floor - ceiling) in the token loss of held-out patches
that can be learned, with clean targets: 0 for unweighted losses, 1 for the oracle, seed by seed.
± is the standard error over seeds. A value that is closer to zero than Student's t at 95 % times
its standard error is no answer: the cell says "cannot tell", and how large it would have had to be.
"""

import argparse
import json
import math
import re
import statistics
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Student's t at 95 %, two-sided, by degrees of freedom
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
SELECTION = 100      # seeds from here on chose lambda, and are in no other table

# Each seed has its own teacher, or all seeds of a set have one.
NOISE = {"set": "shapes-noise", "plant": "noise", "encoding": "sparse", "model": "vit_nano",
         "teacher": "own"}
PASTED = NOISE | {"set": "shapes", "plant": "pasted"}
RANDOM = NOISE | {"set": "cifar10", "plant": "random"}
ONE = NOISE | {"teacher": "one"}
ONE_RANDOM = RANDOM | {"teacher": "one"}
NONE = ONE | {"plant": "none"}
CIFAR_NONE = NONE | {"set": "cifar10"}
DENSE = NONE | {"encoding": "dense"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--rows", type=Path, default=HERE / "control.jsonl", metavar="FILE")
    add("--readme", type=Path, default=HERE / "README.md", metavar="FILE")
    add("--draw", type=Path, nargs="?", const=HERE.parent / "assets" / "control.png",
        metavar="FILE", help="draw the picture, too (default: assets/control.png)")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------- arithmetic

class Rows:
    """The lines of a case, such as NOISE | {"epochs": 8}: row -> seed -> measures."""

    def __init__(self, lines: list[dict], case: dict, selection: bool = False):
        self.rows = {}
        for line in lines:
            chosen = (line["seed"] >= SELECTION) == selection
            if chosen and case.items() <= line.items():
                self.rows.setdefault(line["row"], {})[line["seed"]] = line

    def values(self, row: str, field: str) -> dict[int, float]:
        return {seed: line[field] for seed, line in self.rows.get(row, {}).items()
                if field in line}

    def shares(self, row: str, patches: str = "learned") -> list[float]:
        """The recovered share of each seed that has the row, its floor and its ceiling."""
        mine, floor, ceiling = (self.values(name, f"loss_{patches}")
                                for name in (row, *floor_and_ceiling(row)))
        return [(floor[seed] - mine[seed]) / (floor[seed] - ceiling[seed])
                for seed in mine if seed in floor and seed in ceiling]

    def gains(self, row: str, field: str, relative: bool = False) -> list[float]:
        """What the row is above its floor, seed by seed; with `relative`, in percent of it."""
        mine = self.values(row, field)
        floor = self.values(floor_and_ceiling(row)[0], field)
        return [(mine[seed] - floor[seed]) * (100 / floor[seed] if relative else 1)
                for seed in mine if seed in floor]


def floor_and_ceiling(row: str) -> tuple[str, str]:
    """The rows that a row is compared with: with experts, or without."""
    if row.startswith(("none", "router")):
        return "none", "none_oracle"
    return "unweighted", "oracle"


def error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


def detectable(values: list[float]) -> float:
    """The smallest mean that differs from zero at 95 %, by the spread of the seeds."""
    return T95[len(values) - 1] * error(values)


def number(value: float, digits: int, sign: str = "") -> str:
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}"      # no -0.0


def cell(values: list[float], digits: int, sign: str = "") -> str:
    if not values:
        return ""
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{number(mean, digits, sign)} (one seed)"
    text = f"{number(mean, digits, sign)} ± {number(error(values), digits)}"
    limit = detectable(values)
    return text if abs(mean) > limit else f"{text}, cannot tell below {number(limit, digits)}"


def mean_cell(values: dict[int, float], digits: int) -> str:
    """A mean ± its standard error, which is compared with nothing."""
    if not values:
        return ""
    text = number(statistics.mean(values.values()), digits)
    return text if len(values) == 1 else f"{text} ± {number(error([*values.values()]), digits)}"


# ----------------------------------------------------------------------------- tables

def markdown(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(lines: list[dict], columns: list[tuple], rows: list[str] | None = None,
          selection: bool = False) -> str:
    """A line for each row that has a value; a column is (title, case, function(Rows, row))."""
    cases = [(title, Rows(lines, case, selection), value) for title, case, value in columns]
    names = rows or list(dict.fromkeys(row for _, found, _ in cases for row in found.rows))
    out = [["", *(title for title, _, _ in columns)]]
    for name in names:
        cells = [value(found, name) if name in found.rows else "" for _, found, value in cases]
        if any(cells):
            out.append([name, *cells])
    return markdown(out)


def share(found: Rows, row: str, patches: str = "learned") -> str:
    ends = dict(zip(floor_and_ceiling(row), ("0 (floor)", "1 (ceiling)")))
    return ends.get(row) or cell(found.shares(row, patches), 2)


def share_of(patches: str):
    return lambda found, row: share(found, row, patches)


def gain(field: str, digits: int, relative: bool = False):
    def text(found: Rows, row: str) -> str:
        floor, _ = floor_and_ceiling(row)
        return "floor" if row == floor else cell(found.gains(row, field, relative), digits, "+")
    return text


def mean(field: str, digits: int):
    return lambda found, row: mean_cell(found.values(row, field), digits)


def seeds(found: Rows, row: str) -> str:
    return str(len(found.rows[row]))


MAIN = ["oracle", "softmin-V1", "routed-V0.3", "routed-V1"]
ONE_TEACHER = [*MAIN, "routed-L5", "detached-V1", "none_oracle", "none_softmin-V1", "router-V0.3",
               "router-V1"]
APART = ["oracle", "oracle-keep0.6", "routed-V0.3", "aside-V0.3", "apart-V0.3"]
MENDS = ["routed-V1", "routed-V1-rate20", "routed-V1-rate100", "routed-V1-start5",
         "routed-V1-cut0.5", "routed-V1-block1", "routed-V1-times", "router-V1",
         "router-V1-rate20"]


def tables(lines: list[dict]) -> dict[str, str]:
    def at(case: dict, epochs: int) -> dict:
        return case | {"epochs": epochs}
    planted = [("noise, 8", at(NOISE, 8)), ("noise, 24", at(NOISE, 24)),
               ("random, 8, one teacher", at(ONE_RANDOM, 8)), ("random, 24", at(RANDOM, 24)),
               ("pasted, 8", at(PASTED, 8))]
    shown = [("noise, 8", at(NOISE, 8)), ("random, 24", at(RANDOM, 24)),
             ("pasted, 8", at(PASTED, 8))]
    kinds = ("object", "other", "noise")
    return {
        "share": table(lines, [(title, case, share) for title, case in planted], MAIN),
        "loss": table(lines, [
            *((title, case, mean("loss_learned", 4)) for title, case in planted),
            *((f"noise, 8: {patches}", at(NOISE, 8), mean(f"loss_{patches}", 4))
              for patches in ("clear", "mixed"))], ["unweighted", "oracle"]),
        "kinds": table(lines, [
            (f"{patches}, {epochs} epochs", at(NOISE, epochs), share_of(patches))
            for epochs in (8, 24) for patches in ("clear", "mixed")], MAIN),
        "apart": table(lines, [
            ("weight of planted", at(NOISE, 8), mean("weight_planted", 2)),
            ("ROC area", at(NOISE, 8), mean("auc", 2)),
            *((patches, at(NOISE, 8), share_of(patches))
              for patches in ("learned", "clear", "mixed"))], APART),
        "weights": table(lines, [
            (f"{name}, {title}", case, mean(field, 2)) for title, case in shown
            for name, field in (("ROC area", "auc"), ("planted", "weight_planted"))], MAIN),
        "features": table(lines, [
            (f"{measure}, {title}", case, gain(field, 1))
            for title, case in (*shown, ("noise, 24, one teacher", at(ONE, 24)))
            for measure, field in (("k-NN", "knn_mean"), ("probe", "probe_mean"))], MAIN),
        "lambda": table(lines, [("recovered share, 8 epochs", at(ONE, 8), share),
                                ("lambda at the end", at(ONE, 8), mean("lambda", 3)),
                                ("variation of the weights", at(ONE, 8), mean("cv", 2))],
                        selection=True),
        "one": table(lines, [("seeds", at(ONE, 8), seeds),
                             ("8 epochs", at(ONE, 8), share),
                             ("24 epochs", at(ONE, 24), share)], ONE_TEACHER),
        "mends": table(lines, [("seeds", at(ONE, 8), seeds),
                               ("recovered share, 8 epochs", at(ONE, 8), share),
                               ("24 epochs", at(ONE, 24), share)], MENDS),
        "none": table(lines, [
            (f"{title}, {case['set']}", at(case, 8), value)
            for case in (NONE, CIFAR_NONE) for title, value in (
                ("loss (%)", gain("loss_learned", 1, relative=True)),
                ("k-NN", gain("knn_mean", 1)), ("probe", gain("probe_mean", 1)))],
            ["softmin-V0.3", "softmin-V1", "routed-V1", "none_softmin-V1"]),
        "masked": table(lines, [
            ("loss (%)", at(DENSE, 8), gain("loss_learned", 1, relative=True)),
            *((f"explained, {kind}", at(DENSE, 8), mean(f"explained_{kind}", 2))
              for kind in kinds),
            *((f"weight, {kind}", at(DENSE, 8), mean(f"weight_{kind}", 2)) for kind in kinds),
            ("k-NN", at(DENSE, 8), gain("knn_mean", 1)),
            ("probe", at(DENSE, 8), gain("probe_mean", 1))]),
    }


def fill(text: str, name: str, content: str) -> str:
    """Puts a table between <!-- table.py NAME --> and <!-- end -->."""
    return re.sub(rf"(<!-- table.py {name} -->\n).*?(<!-- end -->)",
                  lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)


def count_comparisons(lines: list[dict]) -> tuple[int, int]:
    """How many cells compare a row with its floor, and how many of these differ from zero."""
    text = "\n".join(content for name, content in tables(lines).items()
                     if name in ("share", "kinds", "apart", "one", "mends", "features", "none"))
    compared = re.findall(r"[-+]?[\d.]+ ± [\d.]+(, cannot tell)?", text)
    return len(compared), compared.count("")


# ----------------------------------------------------------------------------- picture

def draw(lines: list[dict], path: Path):
    """Recovered shares with error bars, and weights against losses."""

    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = {"oracle": "oracle", "softmin-V1": "softmin", "routed-V0.3": "routed"}
    names = list(labels)
    cases = [("noise", NOISE, 8, "learned"), ("noise: clear\npatches", NOISE, 8, "clear"),
             ("noise: mixed\npatches", NOISE, 8, "mixed"),
             ("noise,\n24 epochs", NOISE, 24, "learned"),
             ("random,\n24 epochs", RANDOM, 24, "learned")]
    for i, name in enumerate(names):
        bars = [Rows(lines, case | {"epochs": epochs}).shares(name, patches)
                for _, case, epochs, patches in cases]
        at = [j + 0.25 * (i - 1) for j, bar in enumerate(bars) if bar]
        left.bar(at, [statistics.mean(bar) for bar in bars if bar], 0.24, label=labels[name],
                 yerr=[error(bar) if len(bar) > 1 else 0 for bar in bars if bar], capsize=2)
    left.axhline(0, color="black", linewidth=0.8)
    left.set(ylabel="recovered share of what can be gained",
             title="0: unweighted, 1: planted patches weigh nothing")
    left.set_xticks(range(len(cases)), [title for title, *_ in cases], fontsize=8)
    left.legend(fontsize=8, loc="lower left")
    found = Rows(lines, NOISE | {"epochs": 8}).rows
    for color, name in enumerate(names[1:3], start=1):
        line = found[name][min(found[name])]
        losses, weights = zip(*line["curve"])
        right.plot(losses, weights, "o", color=f"C{color}", label=labels[name], markersize=4)
        closed = [math.exp(-loss / line["lambda"]) for loss in losses]
        mean_weight = statistics.mean(closed)
        right.plot(losses, [value / mean_weight for value in closed], color=f"C{color}",
                   linewidth=1)
    right.set(xlabel="token loss of a patch, planted targets", ylabel="weight / mean",
              title="weight against loss; lines: exp(-loss / lambda)")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def main(args: argparse.Namespace) -> dict[str, str]:
    """-> the tables by name"""
    lines = [json.loads(line) for line in args.rows.read_text().splitlines()]
    found = tables(lines)
    text = args.readme.read_text("utf-8")
    for name, content in found.items():
        text = fill(text, name, content)
        print(f"{name}\n{content}\n")
    args.readme.write_text(text, "utf-8")
    compared, told = count_comparisons(lines)
    print(f"{compared} comparisons with a floor, {told} of them above their limit; by chance, "
          f"{0.05 * compared:.1f} would be")
    if args.draw:
        draw(lines, args.draw)
    return found


if __name__ == "__main__":
    main(parse_args())
