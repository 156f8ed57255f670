"""The tables and the picture of experiments/README.md, from the lines of control.jsonl.

    python experiments/table.py            # prints the tables, and writes them into README.md
    python experiments/table.py --draw     # draws assets/control.png too, with matplotlib

A row's *recovered share* is (floor - row) / (floor - ceiling) in the token loss of held-out patches
that can be learned, with clean targets: 0 for unweighted losses, 1 for the oracle, seed by seed.
± is the standard error over seeds. A value whose 95 % interval, by Student's t, holds zero is no
answer: the cell says "cannot tell", and half the width of the interval.
"""

import argparse
import json
import math
import re
import statistics
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Student's t at 95 %, two-sided, by degrees of freedom
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
PAIR = " - "         # in the name of a pair of rows
SELECTION = 100      # seeds from here on chose lambda, and are in no other table

# Each seed has its own teacher, or all seeds of a set have one.
NOISE = {"set": "shapes-noise", "plant": "noise", "share": 0.4, "encoding": "sparse",
         "model": "vit_nano", "teacher": "own", "epochs": 8}
TINY = NOISE | {"model": "vit_tiny"}
TENTH = NOISE | {"plant": "random", "share": 0.1}
CIFAR = NOISE | {"set": "cifar10", "plant": "random", "epochs": 24}
NONE = NOISE | {"plant": "none"}
NONE_HIDDEN = NONE | {"encoding": "dense"}
ONE = NOISE | {"teacher": "one"}
ONE_CIFAR = CIFAR | {"teacher": "one", "epochs": 8}
CIFAR_NONE = ONE_CIFAR | {"plant": "none"}
ONE_NONE = ONE | {"plant": "none"}
ONE_NONE_HIDDEN = ONE_NONE | {"encoding": "dense"}
HIDDEN = NOISE | {"plant": "random", "encoding": "dense"}


def at(case: dict, epochs: int) -> dict:
    return case | {"epochs": epochs}


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
    """The lines of a case, such as NOISE: row -> (seed, teacher) -> measures. Rows with the same
    seed and the same teacher are compared.
    """

    def __init__(self, lines: list[dict], case: dict, selection: bool = False):
        self.rows = {}
        for line in lines:
            chosen = (line["seed"] >= SELECTION) == selection
            if chosen and case.items() <= line.items():
                if "curve" in line:      # groups of equally many patches, targets as given
                    line = line | {"loss_given": statistics.mean(loss for loss, _ in line["curve"])}
                key = line["seed"], line.get("teacher_digest")
                self.rows.setdefault(line["row"], {})[key] = line

    def values(self, row: str, field: str) -> dict[tuple, float]:
        return {seed: line[field] for seed, line in self.rows.get(row, {}).items()
                if field in line}

    def shares(self, row: str, field: str = "loss_learned") -> list[float]:
        """The recovered share of each seed that has the row, its floor and its ceiling."""
        mine, floor, ceiling = (self.values(name, field)
                                for name in (row, *floor_and_ceiling(row)))
        return [(floor[seed] - mine[seed]) / (floor[seed] - ceiling[seed])
                for seed in mine if seed in floor and seed in ceiling]

    def gains(self, row: str, field: str, relative: bool = False) -> list[float]:
        """What the row is above its floor, seed by seed; with `relative`, in percent of it. Of a
        pair of rows, "A - B", it is what A is above B.
        """
        row, _, other = row.partition(PAIR)
        mine = self.values(row, field)
        floor = self.values(other or floor_and_ceiling(row)[0], field)
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
    """Half the width of the 95 % interval of the mean, by the spread of the seeds."""
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


def mean_cell(values: dict[tuple, float], digits: int) -> str:
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
    """A line for each row, or pair of rows, that has a value; a column is (title, case,
    function(Rows, row)).
    """
    cases = [(title, Rows(lines, case, selection), value) for title, case, value in columns]
    names = rows or list(dict.fromkeys(row for _, found, _ in cases for row in found.rows))
    out = [["", *(title for title, _, _ in columns)]]
    for name in names:
        cells = [value(found, name) if name.partition(PAIR)[0] in found.rows else ""
                 for _, found, value in cases]
        if any(cells):
            out.append([name, *cells])
    return markdown(out)


class Share:
    """A column of recovered shares, of the patches of a kind."""

    def __init__(self, patches: str = "learned"):
        self.field = f"loss_{patches}"

    def values(self, found: Rows, row: str) -> list[float]:
        """Those that compare the row with its floor and its ceiling, if it is neither."""
        return [] if row in floor_and_ceiling(row) else found.shares(row, self.field)

    def __call__(self, found: Rows, row: str) -> str:
        ends = dict(zip(floor_and_ceiling(row), ("0 (floor)", "1 (ceiling)")))
        return ends.get(row) or cell(self.values(found, row), 2)


class Gain:
    """A column of what a row is above its floor, or the first row of a pair above the second; with
    `relative`, in percent of it.
    """

    def __init__(self, field: str, digits: int = 1, relative: bool = False):
        self.field, self.digits, self.relative = field, digits, relative

    def values(self, found: Rows, row: str) -> list[float]:
        floor, _ = floor_and_ceiling(row)
        return [] if row == floor else found.gains(row, self.field, self.relative)

    def __call__(self, found: Rows, row: str) -> str:
        floor, _ = floor_and_ceiling(row)
        return "floor" if row == floor else cell(self.values(found, row), self.digits, "+")


class Mean:
    """A column of means, which are compared with nothing."""

    def __init__(self, field: str, digits: int):
        self.field, self.digits = field, digits

    def values(self, found: Rows, row: str) -> list[float]:
        return []

    def __call__(self, found: Rows, row: str) -> str:
        return mean_cell(found.values(row, self.field), self.digits)


class Seeds(Mean):
    """A column of numbers of seeds."""

    def __init__(self):
        super().__init__("seed", 0)

    def __call__(self, found: Rows, row: str) -> str:
        return str(len(found.rows[row]))


MAIN = ["oracle", "softmin-V1", "routed-V0.3", "routed-V1"]
KINDS = ["unweighted", "oracle", "softmin-V1", "routed-V0.3", "aside-V0.3"]
APART = ["unweighted-L0.5", "oracle", "oracle-keep0.6", "routed-V0.3", "aside-V0.3"]
PAIRS = ["routed-V0.3 - aside-V0.3", "routed-V0.3 - unweighted-L0.5",
         "routed-L0.5 - unweighted-L0.5", "aside-V0.3 - unweighted-L0.5",
         "routed-V0.3 - routed-V1", "softmin-V1.5 - softmin-V1", "none - unweighted"]
LITTLE = ["oracle", "softmin-V0.3", "softmin-V1", "softmin-V1 - softmin-V0.3", "none_softmin-V1",
          "routed-V0.3", "routed-V1"]
HIDDEN_ROWS = ["unweighted", "oracle", "softmin-V0.3", "softmin-V1", "softmin-V1 - oracle",
               "softmin-V1 - softmin-V0.3", "routed-V0.3", "routed-V1", "none", "none_softmin-V1"]
ONE_TEACHER = [*MAIN, "routed-L5", "detached-V1", "none_oracle", "none_softmin-V1", "router-V0.3",
               "router-V1"]
LONGER = ["softmin-L5", "softmin-L0.5", "softmin-V1", "softmin-V1.5", "softmin-V3", "routed-L5",
          "routed-L0.5", "routed-V0.3", "routed-V1", "routed-V1.5", "routed-V3", "detached-V1",
          "none_softmin-V1", "router-L5", "router-L0.5", "router-V0.3", "router-V1"]
GIVEN = [*MAIN, "none_oracle", "none_softmin-V1", "router-V0.3", "router-V1"]
MENDS = ["routed-V1", "routed-V1-rate20", "routed-V1-rate100", "routed-V1-start5",
         "routed-V1-cut0.5", "routed-V1-block1", "routed-V1-times", "router-V1",
         "router-V1-rate20"]

PLANTED = {"noise, 8": NOISE, "noise, 24": at(NOISE, 24), "noise, 72": at(NOISE, 72),
           "noise, 8, ViT-Ti": TINY, "hidden, 8": HIDDEN, "hidden, 24": at(HIDDEN, 24),
           "CIFAR-10, 8, one teacher": ONE_CIFAR, "CIFAR-10, 24": CIFAR}
FEW = {"none": NONE, "a tenth": TENTH, "none, one teacher": ONE_NONE,
       "none, CIFAR-10, one teacher": CIFAR_NONE}
SHOWN = "object", "other", "noise"       # what a patch of shapes-noise shows
BY_SHOWN = [(f"{kind} (%)", Gain(f"loss_{kind}", relative=True)) for kind in SHOWN]
WEIGHTS = [(f"weight, {kind}", Mean(f"weight_{kind}", 2)) for kind in SHOWN]
EXPLAINED = [(f"explained, {kind}", Mean(f"explained_{kind}", 2)) for kind in SHOWN]
LEARNED = Gain("loss_learned", relative=True)
FEATURES = {"knn_mean": "k-NN", "probe_mean": "probe"}
ACCURACY = [(title, Gain(field)) for field, title in FEATURES.items()]

# table: columns of (title, case, cells), and the rows; without rows, all that there are
TABLES = {
    "share": ([(title, case, Share()) for title, case in PLANTED.items()],
              [*MAIN, "softmin-V0.3"]),
    "loss": ([(title, case, Mean("loss_learned", 4)) for title, case in PLANTED.items()],
             ["unweighted", "oracle"]),
    "kinds": ([(f"{patches}, {epochs}", at(NOISE, epochs), Gain(f"loss_{patches}", 0, True))
               for patches in ("clear", "mixed") for epochs in (8, 24, 72)], KINDS),
    "apart": ([("weight of planted", NOISE, Mean("weight_planted", 2)),
               ("ROC area", NOISE, Mean("auc", 2)),
               *((patches, NOISE, Share(patches)) for patches in ("learned", "clear", "mixed"))],
              APART),
    "pairs": ([(f"{name}, {epochs}", at(NOISE, epochs), cells)
               for epochs in (8, 24)
               for name, cells in (("others", LEARNED), *(
                   (patches, Gain(f"loss_{patches}", relative=True))
                   for patches in ("clear", "mixed")), *ACCURACY)], PAIRS),
    "weights": ([(f"{name}, {title}", PLANTED[title], Mean(field, 2))
                 for title in PLANTED
                 for name, field in (("ROC area", "auc"), ("planted", "weight_planted"))], MAIN),
    "features": ([(f"{name}, {title}", PLANTED[title], cells)
                  for title in PLANTED for name, cells in ACCURACY], None),
    "one_features": ([(f"{name}, {epochs}", at(ONE, epochs), cells)
                      for epochs in (8, 24) for name, cells in ACCURACY], None),
    "given": ([(f"{name}, {title}", case, Gain(f"loss_{patches}", relative=True))
               for title, case in (("8", NOISE), ("24", at(NOISE, 24)), ("8, one teacher", ONE),
                                   ("24, one teacher", at(ONE, 24)))
               for name, patches in (("all", "given"), ("others", "learned"))], GIVEN),
    "none": ([(f"{name}, {title}", case, cells) for title, case in FEW.items()
              for name, cells in (("loss (%)", LEARNED), *ACCURACY)], LITTLE),
    "shown": ([(f"{name}, {title}", case, cells) for title, case in FEW.items()
               if case["set"] != "cifar10" for name, cells in BY_SHOWN], LITTLE),
    **{name: ([(title, case, cells) for title, cells in (
        ("loss (%)", LEARNED), *BY_SHOWN, *EXPLAINED, *WEIGHTS, *ACCURACY)],
        HIDDEN_ROWS) for name, case in (("masked", NONE_HIDDEN), ("one_masked", ONE_NONE_HIDDEN))},
    "hidden": ([(f"{name}, {epochs}", at(HIDDEN, epochs), cells) for epochs in (8, 24)
                for name, cells in (*BY_SHOWN, *WEIGHTS,
                                    ("variation of the weights", Mean("cv", 2)))], HIDDEN_ROWS),
    "one": ([("seeds", ONE, Seeds()), ("8 epochs", ONE, Share()),
             ("24 epochs", at(ONE, 24), Share())], ONE_TEACHER),
    "lambda": ([("recovered share, 8 epochs", ONE, Share()),
                ("lambda at the end", ONE, Mean("lambda", 3)),
                ("variation of the weights", ONE, Mean("cv", 2))], None),
    "longer": ([("recovered share, 24 epochs", at(NOISE, 24), Share()),
                ("lambda at the end", at(NOISE, 24), Mean("lambda", 3)),
                ("variation of the weights", at(NOISE, 24), Mean("cv", 2))], LONGER),
    "mends": ([("recovered share, 8 epochs, one teacher", ONE, Share()),
               ("24 epochs, own teachers", at(NOISE, 24), Share())], MENDS),
}
ON_SELECTION_SEEDS = ("lambda",)
SIGNS = {1: "better", -1: "worse", 0: "cannot tell"}


def tables(lines: list[dict]) -> dict[str, str]:
    return {name: table(lines, columns, rows, name in ON_SELECTION_SEEDS)
            for name, (columns, rows) in TABLES.items()} | {
                "told": count_features(comparisons(lines))}


def fill(text: str, name: str, content: str) -> str:
    """Puts a table between <!-- table.py NAME --> and <!-- end -->."""
    return re.sub(rf"(<!-- table.py {name} -->\n).*?(<!-- end -->)",
                  lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)


def comparisons(lines: list[dict]) -> dict[tuple, int]:
    """The numbers of the tables that compare a row with another one: (cells, field, row, *case) ->
    1 if it is above the other, -1 if it is below, 0 if we cannot tell. The seeds that chose lambda
    are left out, and so are single seeds.
    """
    signs = {}
    for name, (columns, rows) in TABLES.items():
        for _, case, cells in columns:
            found = Rows(lines, case)
            for row in rows or found.rows:
                values = cells.values(found, row)
                if len(values) > 1 and name not in ON_SELECTION_SEEDS:
                    # the same number in two tables counts once
                    mean, limit = statistics.mean(values), detectable(values)
                    signs[type(cells), cells.field, row, *case.items()] = (
                        (mean > limit) - (mean < -limit))
    return signs


def count_features(signs: dict[tuple, int]) -> str:
    """A table: in how many comparisons with a floor each kind of row has better features, or
    worse ones.
    """
    counts = {}
    for (_, field, row, *_), sign in signs.items():
        if field in FEATURES and PAIR not in row:
            kind = row.removeprefix("none_").split("-")[0]
            counts.setdefault(kind, Counter())[field, sign] += 1
    out = [["", *(f"{FEATURES[field]}: {word}" for field in FEATURES for word in SIGNS.values())]]
    for kind, found in counts.items():
        out.append([kind, *(str(found[field, sign]) for field in FEATURES for sign in SIGNS)])
    return markdown(out)


# ----------------------------------------------------------------------------- picture

DRAWN = [*((title, PLANTED[title], "learned") for title in (
    "noise, 8", "noise, 24", "noise, 72", "CIFAR-10, 24", "hidden, 24")),
    *((f"{title},\n{name}", PLANTED[title], patches) for title, name, patches in (
        ("hidden, 24", "objects", "object"), ("noise, 8", "clear", "clear"),
        ("noise, 8", "mixed", "mixed")))]
LABELS = {"oracle": "oracle", "softmin-V1": "softmin, V 1", "routed-V0.3": "routed, V 0.3"}


def draw(lines: list[dict], path: Path):
    """Recovered shares with 95 % intervals, and weights against losses."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for i, (name, label) in enumerate(LABELS.items()):
        bars = [Rows(lines, case).shares(name, f"loss_{patches}") for _, case, patches in DRAWN]
        left.bar([j + 0.25 * (i - 1) for j in range(len(bars))], list(map(statistics.mean, bars)),
                 0.24, label=label, capsize=2,
                 yerr=[detectable(bar) if len(bar) > 1 else 0 for bar in bars])
    left.axhline(0, color="black", linewidth=0.8)
    left.set(ylabel="recovered share, with its 95 % interval",
             title="0: unweighted, 1: planted patches weigh nothing")
    left.set_xticks(range(len(DRAWN)), [title for title, *_ in DRAWN], fontsize=8)
    left.legend(fontsize=8)
    found = Rows(lines, NOISE).rows
    for color, (name, label) in list(enumerate(LABELS.items()))[1:]:
        line = next(iter(found[name].values()))
        losses, weights = zip(*line["curve"])
        right.plot(losses, weights, "o", color=f"C{color}", label=label, markersize=4)
        closed = [math.exp(-loss / line["lambda"]) for loss in losses]
        mean_weight = statistics.mean(closed)
        right.plot(losses, [value / mean_weight for value in closed], color=f"C{color}",
                   linewidth=1)
    right.set(xlabel="token loss of a patch, planted targets", ylabel="weight / mean",
              title="noise, 8, one seed; lines: exp(-loss / lambda)")
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
    signs = comparisons(lines)
    print(f"{len(signs)} comparisons, of which {sum(map(abs, signs.values()))} differ from zero; "
          f"by chance, {0.05 * len(signs):.1f} would")
    if args.draw:
        draw(lines, args.draw)
    return found


if __name__ == "__main__":
    main(parse_args())
