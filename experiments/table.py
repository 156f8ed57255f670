"""The tables of experiments/README.md, from the runs of experiments/run.sh.

    python experiments/table.py noise shapes cifar      # in the repository, or --runs FOLDER
    python experiments/table.py noise --to none         # differences to another row

Measures each finished run of runs/SET/ROW-SEED and writes its values to experiments/SET.json,
where those of earlier calls stay, so that a new row can be paired with them. Prints the tables
and updates the README's. With --to, it measures nothing.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import common
import data
import pretrain
import routing
from checkpoint import load_checkpoint
from losses import token_loss
from run import rounded
from teacher import build_teacher

# key in SET.json, title, digits, whether the table has the difference to `uniform`
COLUMNS = [("knn", "k-NN", 1, True), ("linear", "linear", 1, True), ("ep", "EP", 1, True),
           ("token_loss", "token loss", 4, True), ("miou", "CamVid mIoU", 1, True),
           ("ratio", "ratio", 3, False), ("r", "r", 2, False),
           ("variation", "variation", 3, False), ("cls", "[CLS]", 3, False),
           ("silhouette", "silhouette", 3, False), ("foreground", "foreground", 2, False)]
ORDER = ("none", "uniform", "detached", "coupled", "aimed", "combine", "router", "expert",
         "token", "long")      # of rows


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("sets", nargs="+", choices=("noise", "shapes", "cifar"), metavar="SET",
        help="noise, shapes, cifar")
    add("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="default: runs")
    add("--to", metavar="ROW", help="print the differences to this row")
    add("--out", type=Path, default=HERE, metavar="FOLDER",
        help="of SET.json and README.md (default: here)")
    return parser.parse_args(argv)


# ------------------------------------------------------------------- from runs to JSON

@torch.no_grad()
def held_out(path: Path, count: int = 1000) -> tuple[Tensor, Tensor | None]:
    """On cropped and masked validation images, the same for each run of a set.

    -> the token loss of visible patches [M, V]; their dispatch weights [M, V, E] of the router
    that weights them, in units of the uniform weight; None if there is no router.
    """
    file = load_checkpoint(path)
    args = argparse.Namespace(**file["args"])
    teacher = build_teacher(args.teacher, args.image_size // args.patch_size)
    student = pretrain.build_student(args, teacher.dim).eval()
    student.load_state_dict(file["model"])
    process = common.Process(routing.parse_args([str(path), "--amp", "off", "--workers", "0"]))
    teacher.to(process.device)
    student.to(process.device)
    dataset = data.open_images(args.data, "val", args.image_size)
    views = data.TrainViews(dataset, args.image_size, 0, student.encoder.grid, args.mask_ratio)
    order = np.random.default_rng(0).permutation(len(dataset))[:count]
    batches = [[(0, int(i)) for i in part] for part in np.array_split(order, 10)]
    losses = []
    weights = []
    for batch in data.load(views, batches, process):
        images = data.augment(batch)
        pred = student(data.normalize(images), batch["mask"])
        ids = pred.ids_keep[..., None].expand(-1, -1, teacher.dim)
        target = teacher(images)[:, 1:].gather(1, ids)
        losses.append(token_loss(pred.tokens[:, 1:], target).cpu())
        if pred.routing:
            weights.append(pred.routing[max(pred.routing)].dispatch[:, 1:].cpu())
    if not weights:
        return torch.cat(losses), None
    weights = torch.cat(weights)
    return torch.cat(losses), weights / weights.mean(1, keepdim=True)


def measure(run: Path) -> dict:
    """The values of a finished run, a row of SET.json."""
    def rows(file: str) -> list[dict]:
        return list(map(json.loads, (run / file).read_text().splitlines()))

    def log(stage: str, name: str) -> list:
        return [line[name] for line in rows(f"{stage}/log.jsonl") if name in line]

    args = json.loads((run / "args.json").read_text())
    name, seed = run.name.rsplit("-", 1)
    # the latest row of a checkpoint counts
    knn = {Path(row["checkpoint"]).name: row["top1"] for row in rows("knn.jsonl")}
    loss, weight = held_out(run / "last.pt")
    row = {"row": name, "seed": int(seed), "knn": knn["last.pt"],
           "linear": max(log("linear", "top1")), "ep": max(log("ep", "top1")),
           "token_loss": loss.mean().item(), "std": loss.std(1, False).mean().item()}
    if (run / "camvid" / "best.pt").exists():
        row["miou"] = max(log("camvid", "miou"))
    if weight is not None:
        seen, = json.loads((run / "routing.json").read_text())
        block = seen["blocks"][-1]      # of the router that weights the loss
        first = weight[..., 0]          # expert 0
        aimed = log(".", "lambda")[-1][0] if args.get("variation") else None
        row |= {"ratio": (log(".", "token_ratio") or [1.0])[-1], "r": seen["correlation"],
                "variation": first.std(1, False).mean().item(), "cls": max(block["cls_share"]),
                "silhouette": block["silhouette"], "scale": block["scale"],
                "lambda": aimed or args["entropy_weight"][0]}
        if "foreground_auc" in seen:
            row["foreground"] = seen["foreground_auc"][0]
    return rounded(row)


def rank(row: dict) -> tuple:
    kinds = (i for i, start in enumerate(ORDER) if row["row"].startswith(start))
    weight = 0 if "aimed" in row["row"] else -row.get("lambda", 0)
    return next(kinds, len(ORDER)), "uniform" not in row["row"], weight, row["row"], row["seed"]


def update(path: Path, folder: Path):
    """Measures the runs in `folder`, and puts them beside other rows and seeds of the file."""
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = {(row["row"], row["seed"]): row for row in rows}
    for run in sorted(best.parents[1] for best in folder.glob("*-[0-9]*/ep/best.pt")):
        print(run, file=sys.stderr)
        row = measure(run)
        rows[row["row"], row["seed"]] = row
    if rows:
        lines = [json.dumps(row) for row in sorted(rows.values(), key=rank)]
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


# ----------------------------------------------------------------- from JSON to tables

def by_row(rows: list[dict], key: str) -> dict[str, dict[int, float]]:
    """Row -> seed -> value, of those that have one."""
    values = {}
    for row in rows:
        if row.get(key) is not None:
            values.setdefault(row["row"], {})[row["seed"]] = row[key]
    return values


def reference(name: str) -> str:
    kinds = (f"{kind}-uniform" for kind in ("token", "long") if name.startswith(kind))
    return next(kinds, "uniform")


def number(value: float, digits: int, sign: str = "") -> str:
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}"      # no -0.0


def cell(mine: dict[int, float], other: dict[int, float], digits: int) -> str:
    """Mean ± standard deviation (paired difference ± standard error).

    Star: three seeds, and above 4.3 errors (Student's t at 95 %, two degrees of freedom).
    """
    text = number(statistics.mean(mine.values()), digits)
    pairs = [mine[seed] - other[seed] for seed in mine if seed in other]
    if len(mine) > 1:
        text += f" ± {number(statistics.stdev(mine.values()), digits)}"
    if len(pairs) == 1:
        text += f" ({number(pairs[0], digits + 1, '+')})"
    elif pairs:
        difference = statistics.mean(pairs)
        error = statistics.stdev(pairs) / len(pairs) ** 0.5
        star = "*" if len(pairs) == 3 and abs(difference) > 4.3 * error else ""
        text += (f" ({number(difference, digits + 1, '+')} ± {number(error, digits + 1)}"
                 f"{star})")
    return text


def markdown(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results(rows: list[dict], to: str | None = None) -> str:
    """A line for each row: means, and differences to the row `to` or that of `reference`."""
    names = list(dict.fromkeys(row["row"] for row in rows))
    values = {key: by_row(rows, key) for key, *_ in COLUMNS}
    columns = [column for column in COLUMNS if values[column[0]]]
    table = [["", "seeds", *(title for _, title, _, _ in columns)]]
    for name in names:
        line = [name, str(len(values["knn"][name]))]
        for key, _, digits, paired in columns:
            other = to or reference(name)
            compared = (paired or to) and other != name
            other = values[key].get(other, {}) if compared else {}
            mine = values[key].get(name)
            line.append(cell(mine, other, digits) if mine else "")
        table.append(line)
    return markdown(table)


def fill(text: str, name: str, table: str) -> str:
    """Puts a table between <!-- table.py NAME --> and <!-- end -->."""
    return re.sub(rf"(<!-- table.py {name} -->\n).*?(<!-- end -->)",
                  lambda match: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL)


def main(args: argparse.Namespace) -> dict[str, str]:
    """-> the tables by name"""
    files = {name: args.out / f"{name}.json" for name in ("noise", "shapes", "cifar")}
    for name in () if args.to else args.sets:
        update(files[name], args.runs / name)
    sets = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    tables = {name: results(sets[name], args.to) for name in args.sets if name in sets}
    if not args.to:
        readme = args.out / "README.md"
        for name, table in tables.items() if readme.exists() else ():
            readme.write_text(fill(readme.read_text("utf-8"), name, table), "utf-8")
    print("\n\n".join(tables.values()))
    return tables


if __name__ == "__main__":
    main(parse_args())
