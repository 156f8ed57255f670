"""The tables of REPRODUCE.md with what your runs have measured, and the difference to the paper.

    python experiments/results.py                         # of the runs in runs/
    python experiments/results.py RUNS --markdown > results.md

A row is a command of REPRODUCE.md with the paper's number behind it. What stands beside it is the
best k-NN accuracy of a pretraining run's epochs, and the best evaluation of any other run; a dash
if there is none. Tables without any are left out, unless --all asks for them. A run with other
flags than the command's has no difference to the paper. At the end are Table A5's standard
deviations over seeds.
"""

import argparse
import json
import re
import shlex
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
import common
import finetune
import linprobe
import pretrain
import segment
from run import FREE_FLAGS, read_lines

STAGES = {"pretrain.py": pretrain, "linprobe.py": linprobe, "finetune.py": finetune,
          "segment.py": segment}
COLUMNS = ("row", "paper", "measured", "difference", "note")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=common.path, default=str(HERE / "runs"),
                        help="their folder (default: runs in this repository)")
    parser.add_argument("--all", action="store_true",
                        help="print tables without a measured row, too")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    args = parser.parse_args(argv)
    if not Path(args.runs).is_dir():
        parser.error(f"{args.runs} is no folder")
    return args


def read_rows(page: str) -> list[dict]:
    """The rows of a page -> [{"table", "row", "paper"}]

    table: of the paragraph above the row's block, if it ends with a colon, the first sentence, or
    the last heading.
    """
    rows = []
    for above, code in re.findall(r"(.*?)^```bash\n(.*?)^```", page, re.M | re.S):
        last = above.strip().split("\n\n")[-1]
        title = re.findall(r"^#+ (.*)", above, re.M)[-1:]
        if last.endswith(":"):
            title = [re.split(r"\.\s", last[:-1])[0].replace("\n", " ")]
        rows += [{"table": title[0], "row": row, "paper": paper} for row, paper in re.findall(
            r"^((?:pretrain|probe|finetune|segment|gradnorm) .*?) +# (.*)", code, re.M)]
    return rows


def find_command(row: str) -> list[str]:
    """The script and the flags of a row, as the functions in REPRODUCE.md start it"""
    kind, name, *words = shlex.split(row)
    run = f"runs/{name}"
    if kind == "pretrain":
        return ["pretrain.py", "--out", run, *words]
    if kind == "gradnorm":
        objective, alpha, rate = words
        return ["pretrain.py", "--out", f"{run}-gradnorm-{alpha}-{rate}", "--experts", "0",
                "--encoding", "dense", "--objective", objective, "--balance", "gradnorm",
                "--gradnorm-alpha", alpha, "--gradnorm-lr", rate]
    flags = [f"{run}/epoch_0300.pt", "--out", f"{run}/{'-'.join(words)}"]
    if kind == "probe":      # with the data set after the kind, if it is not ImageNet
        return ["linprobe.py", *flags, "--probe", words[0]]
    flags[-1] = f"{run}/{kind}-{'-'.join(words)}"
    return [f"{kind}.py", *flags, "--recipe", *words]


def find_result(row: str, runs: str) -> tuple[float | None, str, bool]:
    """-> the best score of a row's run, a note on it, and whether it has the row's flags"""
    script, *flags = find_command(row)
    flags = [re.sub("^runs(?=/)", lambda _: runs, flag) for flag in flags]
    expected = vars(STAGES[script].parse_args(flags))
    folder = Path(expected["out"])
    lines = read_lines(folder / "log.jsonl")
    if not (folder / "args.json").exists() or not lines:
        return None, "", True
    args = json.loads((folder / "args.json").read_text())["args"]
    if script == "pretrain.py":
        scores = [(row["top1"], row["epoch"]) for row in read_lines(folder / "knn.jsonl")
                  if Path(row["encoder"]).parent.name == folder.name and row["epoch"] is not None
                  and (row["data"], row["pool"]) == (args["data"], "cls")
                  and (row["k"], row["temperature"]) == (20, 0.07)]
    else:
        scores = [(line[score], line["epoch"]) for line in lines for score in ("top1", "miou")
                  if score in line]
    best, epoch = max(scores, default=(None, None))
    notes = [f"best at epoch {epoch:.4g}"] if scores else []
    done, unit = (("step", "iterations") if script == "segment.py" else ("epoch", "epochs"))
    if lines[-1][done] < args[unit]:
        notes.append(f"{done} {lines[-1][done]:.4g} of {args[unit]}")
    for files in {"checkpoint", "encoder"} & expected.keys():      # RUNS may have been moved
        for each in (expected, args):
            each[files] = "/".join(Path(str(each.get(files))).parts[-2:])
    other = [f"{name.replace('_', '-')} {args.get(name)}" for name in expected
             if name not in FREE_FLAGS and args.get(name) != expected[name]]
    if other:
        notes.append("other flags: " + ", ".join(other))
    return best, "; ".join(notes), not other


def seed_deviations(rows: list[dict]) -> dict[str, float]:
    """Standard deviations of rows that differ in their seed alone -> {row without it: deviation}

    As in Table A5, they divide by the number of seeds. All must be measured with their own flags.
    """
    groups = {}
    for row in rows:
        groups.setdefault(re.sub(r"-seed\d+| --seed \d+", "", row["row"]), []).append(row)
    return {name: statistics.pstdev(row["measured"] for row in group)
            for name, group in groups.items()
            if len(group) > 1 and all(row["difference"] is not None for row in group)}


def main(args: argparse.Namespace) -> list[dict]:
    rows = read_rows((HERE / "REPRODUCE.md").read_text("utf-8"))
    for row in rows:
        row["measured"], row["note"], same = find_result(row["row"], args.runs)
        number = re.match(r"\d+(\.\d+)?$", row["paper"].split(",")[0])
        comparable = same and number and row["measured"] is not None
        row["difference"] = row["measured"] - float(number[0]) if comparable else None
    tables = dict.fromkeys(row["table"] for row in rows
                           if args.all or row["measured"] is not None)
    if not tables:
        print(f"{args.runs} has no run of REPRODUCE.md yet; --all prints the paper's numbers")
    for table in tables:
        lines = [COLUMNS] + [
            (row["row"], row["paper"],
             "-" if row["measured"] is None else f"{row['measured']:.2f}",
             "-" if row["difference"] is None else f"{row['difference']:+.2f}", row["note"])
            for row in rows if row["table"] == table]
        widths = [max(map(len, column)) for column in zip(*lines)]
        print(f"\n### {table}\n" if args.markdown else f"\n{table}\n")
        for i, cells in enumerate(lines):
            if args.markdown:
                print("| " + " | ".join(cells) + " |" + "\n|---|---|---:|---:|---|" * (i == 0))
            else:
                print("  ".join(map(str.ljust, cells, widths)).rstrip())
    for name, deviation in seed_deviations(rows).items():
        print(f"\n{name}: standard deviation over seeds {deviation:.3f}")
    return rows


if __name__ == "__main__":
    main(parse_args())
