"""Prints the table of the control's page, then all others, and draws assets/control.png.

All numbers come from control.jsonl.

Gains are how far a loss is below the unweighted one, in percent of that. Those of look-alikes and
of other clean patches are what these contribute: they add up to the gain on all clean patches.
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from experiments.control import ARMS, SERIES, SETS, read_rows

PARTS = {"": "all clean patches", "_lookalikes": "look-alikes", "_others": "other clean patches"}
DRAWN = ("softmin", "own-detached", "routed", "routed-0.5", "routed-5")
PAGE = ("oracle", "softmin", "own", "own-detached", "copied", "routed", "routed-0.5", "routed-5",
        "unweighted-5", "detached", "router-only")


# ------------------------------------------------------- of the rows of one set and length

def measured(rows: list[dict], arm: str, measure: str) -> np.ndarray:
    """A measure of an arm -> [seeds]"""
    found = {row["seed"]: row[measure] for row in rows if row["arm"] == arm}
    return np.array([found[seed] for seed in sorted(found)], dtype=float)      # None is NaN


def is_finished(rows: list[dict], arm: str) -> bool:
    """Whether an arm has all three seeds"""
    return len(measured(rows, arm, "knn")) == 3


def share_of(rows: list[dict], part: str) -> np.ndarray:
    """The share of a part of PARTS among clean patches -> [seeds]"""
    if not part:
        return np.ones_like(measured(rows, "unweighted", "loss"))
    share = measured(rows, "unweighted", "lookalikes")
    return share if part == "_lookalikes" else 1 - share


def gain(rows: list[dict], arm: str, part: str) -> np.ndarray:
    """In percent -> [seeds]"""
    share = share_of(rows, part)
    lower = measured(rows, "unweighted", f"loss{part}") - measured(rows, arm, f"loss{part}")
    return 100 * np.where(share, share * lower, 0) / measured(rows, "unweighted", "loss")


def interval(values: np.ndarray) -> tuple[float, float]:
    """The mean of three seeds, and half of its 95 % interval by Student's t."""
    return np.mean(values).item(), 4.303 * np.std(values, ddof=1).item() / len(values) ** 0.5


def recovered(rows: list[dict], arm: str, part: str, of: str) -> np.ndarray | None:
    """An arm's gain on a part over the oracle's on the part `of` -> [seeds], or None where the
    interval of that includes zero: what is divided by it says nothing.
    """
    best = gain(rows, "oracle", of)
    mean, half = interval(best)
    return gain(rows, arm, part) / best if mean > half else None


# --------------------------------------------------------------------------------- tables

def cell(values: np.ndarray, digits: int) -> str:
    mean, half = interval(values)
    text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
    return f"**{text}**" if abs(mean) > half else text


def part_cell(rows: list[dict], arm: str, part: str) -> str:
    """The unweighted loss; the oracle's gain, and its share in that on all; and the share of the
    oracle's gain that another arm has, or where that says nothing, its own gain.
    """
    if arm == "unweighted":
        return f"{measured(rows, arm, f'loss{part}').mean():.4f}"
    own = f"{cell(gain(rows, arm, part), 1)} %"
    share = recovered(rows, arm, part, of="" if arm == "oracle" else part)
    if share is None:
        return own
    return f"{own}, {share.mean():.2f}" if arm == "oracle" else cell(share, 2)


def knn_gain(rows: list[dict], arm: str) -> np.ndarray:
    """In points of accuracy -> [seeds]"""
    return measured(rows, arm, "knn") - measured(rows, "unweighted", "knn")


def print_table(title: str, groups: dict[tuple[str, int], list[dict]], text, arms=ARMS):
    """groups: {(set, epochs): its rows}; text(rows, arm) is what a cell says"""
    print(f"{title}:\n\n| set | epochs | {' | '.join(arms)} |\n{'| --- ' * (2 + len(arms))}|")
    for (name, epochs), rows in groups.items():
        cells = [text(rows, arm) if is_finished(rows, arm) else "" for arm in arms]
        print(f"| {name} | {epochs} | {' | '.join(cells)} |")
    print()


def print_tables(groups: dict, planted: dict):
    print_table("Gain in the token loss on clean patches, in percent, and in k-NN, in points",
                groups, lambda rows, arm: (
                    f"{cell(gain(rows, arm, ''), 1)}<br>{cell(knn_gain(rows, arm), 1)}"), PAGE)
    for part, title in PARTS.items():
        some = {group: rows for group, rows in planted.items() if share_of(rows, part).all()}
        print_table(f"Unweighted loss, the oracle's gain and the share of it, on {title}", some,
                    lambda rows, arm, part=part: part_cell(rows, arm, part))
    print_table("Weight of planted patches over that of clean ones", planted,
                lambda rows, arm: f"{measured(rows, arm, 'planted_weight').mean():.2f}")
    print_table("Gain, %", groups, lambda rows, arm: cell(gain(rows, arm, ""), 1))
    print_table("k-NN above the unweighted, points", groups,
                lambda rows, arm: cell(knn_gain(rows, arm), 1))


# -------------------------------------------------------------------------------- picture

def draw_part(axis, groups: dict[int, list[dict]], part: str):
    """The oracle's gain in grey, and the gains of DRAWN before it. groups: {epochs: rows}"""
    for at, rows in enumerate(groups.values()):
        axis.bar(at, gain(rows, "oracle", part).mean(), 0.9, color="0.85", label="oracle")
        for i, arm in enumerate(DRAWN):
            if is_finished(rows, arm):
                mean, half = interval(gain(rows, arm, part))
                axis.bar(at + 0.16 * (i - 2), mean, 0.15, yerr=half, capsize=2, color=f"C{i}",
                         label=arm)
    axis.axhline(0, color="black", linewidth=0.8)
    patches = [100 * share_of(rows, part).mean() for rows in groups.values()]
    axis.set_xticks(range(len(groups)), [f"{epochs} epochs\n({share:.0f} %)"
                                         for epochs, share in zip(groups, patches)],
                   fontsize="small")


def draw(planted: dict[tuple[str, int], list[dict]], path: Path):
    """Gains on look-alikes (above) and on other clean patches (below), a column for each set"""
    from matplotlib.figure import Figure
    sets = list(dict.fromkeys(name for name, _ in planted))
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots(2, len(sets), sharey=True, squeeze=False)
    for row, part in zip(axes, ("_lookalikes", "_others")):
        row[0].set_ylabel(f"gain from {PARTS[part]}, %")
        for axis, name in zip(row, sets):
            axis.set_title(name)
            draw_part(axis, {epochs: rows for (each, epochs), rows in planted.items()
                             if each == name}, part)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = dict(zip(labels, handles))      # each once
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=len(legend))
    figure.savefig(path, dpi=100)


def main(path: Path, picture: Path):
    groups = {}
    for name in SETS:
        for epochs in SERIES:
            rows = [row for row in read_rows(path) if (row["set"], row["epochs"]) == (name, epochs)]
            if len({row["seed"] for row in rows}) == 3:
                groups[name, epochs] = rows
    planted = {group: rows for group, rows in groups.items() if SETS[group[0]][1] != "none"}
    print_tables(groups, planted)
    draw(planted, picture)


if __name__ == "__main__":
    main(HERE / "control.jsonl", HERE.parent / "assets" / "control.png")
