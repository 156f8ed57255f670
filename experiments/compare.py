"""Do routed losses help on your images, under a real teacher? Trains small students, and compares.

    python experiments/compare.py --data photos --processes 2
    python experiments/compare.py --data photos --teacher ViT-B-16/openai --out runs/clip

The program computes the teacher's tokens of the training images once. Then it trains a student for
each arm and seed on them, and measures a linear probe and k-NN of its [CLS] on val/. A student is
a row in --rows. The same command goes on after Ctrl-C, and trains only the rows that are missing.
At the end, the program prints a table, the comparisons of --pairs, and a verdict.

An arm is a name and, if you like, settings: "routed, lambda 0.5". The names:

    none        no experts
    uniform     two experts, and all patches count equally
    detached    the router's weights, which send the router no gradient
    routed      the router's weights
    lent        the weights of another seed's routed student for the same image
    loss        weights proportional to exp(-loss / lambda), without a gradient
    fixed       the mean weight that each position has in routed students with the seeds 0 to 2
    untrained   two experts before the first step

Settings are lambda of expert 0, whose weights are the loss's (0.1; expert 1 has none), w_cls (0.4)
and the factor of the router's learning rate ("rate x 10").
"""

import argparse
import collections
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import finetune
from checkpoints import load_encoder
from common import UserError, note, positive_int, rounded
from encoders import build_frozen
from experiments import students
from model import Explore, ViT
from run import read_lines

DEFAULTS = dict(experts=2, weights="dispatch", detach=False, cls_weight=0.4, lambda_=0.1,
                router_rate=1.0)
ARMS = {"none": dict(experts=0), "uniform": dict(weights="uniform"), "detached": dict(detach=True),
        "routed": dict(), "lent": dict(weights="lent"), "loss": dict(weights="loss"),
        "fixed": dict(weights="fixed"), "untrained": dict(weights="uniform")}
SETTINGS = {"lambda": "lambda_", "w_cls": "cls_weight", "rate x": "router_rate"}
REFERENCES = ("chance", "raw pixels", "teacher")      # these rows have no seed
PAIRS = ("routed - uniform", "routed - detached", "routed - none")
MEASURES = {"probe": "linear probe", "knn": "k-NN"}
TEACHER = "timm/tf_efficientnet_lite0.in1k"
PAPERS_GAIN = {"probe": 3.4, "knn": 1.3}      # over none, and over uniform
OBSTACLES = {
    "rows": "it needs all rows of at least two seeds; without --print, the same command measures "
            "them.",
    "duplicates": "most test images are labeled images, too: val/ must hold other photographs.",
    "teacher": "the teacher is not clearly better than an untrained student; take another "
               "--teacher, or more images in val/.",
    "students": "the students may have learned nothing: together, they are not above untrained "
                "ones by more than the interval. Train for more --epochs or on more images.",
    "length": "the weights of routed students hardly differ from uniform ones, or from those that "
              "routers have anyway (dispatch_cv), and by lambda and token_spread, they should: the "
              "run is too short for its router.",
    "lambda": "the weights of routed students hardly differ from uniform ones, or from those that "
              "routers have anyway (dispatch_cv): take a smaller lambda.",
    "intervals": "no difference between them survives the correction, and the intervals are wider "
                 "than the paper's gains (3.4 points of the probe over no experts, 1.3 of k-NN "
                 "over unweighted losses); more seeds and more images in val/ narrow them."}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=common.HelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="images with train/ and val/, as pretrain.py takes them")
    add("--teacher", help=f"as pretrain.py takes it (default: {TEACHER} or, where it cannot be "
                          "loaded, a small one that is trained on your labels)")
    add("--image-size", type=positive_int, default=64, help="of students: a multiple of 8 pixels")
    add("--images", type=positive_int, default=4000, help="at most so many to train on")
    add("--bank", type=int, default=0, metavar="N",
        help="take N other images of train/ as the labeled ones of probe and k-NN, and measure on "
             "all that are left, too (default: the labeled ones are those to train on)")
    add("--held-out", action="store_true",
        help="train on three quarters of the training images and measure on the fourth, to choose "
             "a setting")
    add("--epochs", type=positive_int, default=16, help="of students")
    add("--pairs", nargs="*", default=PAIRS, metavar='"ARM - ARM"', help="what is to be compared")
    add("--arms", nargs="*", default=[], metavar="ARM", help="more arms to train")
    add("--seeds", nargs="+", type=int, default=[3, 4, 5, 6, 7, 8], help="of students")
    add("--processes", type=positive_int, default=1, help="students at a time, each on one core")
    add("--out", type=Path, default=Path("runs/compare"), help="images, tokens, and --rows")
    add("--rows", type=Path, metavar="FILE", help="(default: rows.jsonl in --out)")
    add("--print", action="store_true", help="train nothing; print what --rows has")
    add("--save", type=Path, metavar="FILE",
        help="train one student, of the first of --arms and --seeds, and save it as a checkpoint")
    args = parser.parse_args(argv)
    args.rows = args.rows or args.out / "rows.jsonl"
    args.pairs = [pair.split(" - ") for pair in args.pairs]
    try:
        for arm in itertools.chain(args.arms, *args.pairs):
            find_setting(arm)
        if {len(pair) for pair in args.pairs} - {2}:
            raise ValueError
    except (KeyError, ValueError):
        parser.error('an arm is a name and settings, "routed, lambda 0.5"; a pair is "ARM - ARM"')
    if args.save and not args.arms:
        parser.error("--save: needs one of --arms")
    if args.image_size % students.GRID:
        parser.error("--image-size: students have 8 x 8 patches")
    return args


def find_setting(arm: str) -> dict:
    """"routed, lambda 0.5" -> its settings"""
    name, *words = arm.split(", ")
    given = (word.rsplit(" ", 1) for word in words)
    return DEFAULTS | ARMS[name] | {SETTINGS[key]: float(value) for key, value in given}


# ----------------------------------------------------------------------------------- the rows

def find_teacher(args: argparse.Namespace) -> str:
    """--teacher or, without it, the first that can be had: a real one, or one of our own"""
    if args.teacher:
        return args.teacher
    try:
        build_frozen(TEACHER)
        return TEACHER
    except UserError as error:
        if args.bank or args.held_out:      # it would know the labels of test images
            raise
        note(f"{error}; so a small teacher is trained on the labels of --data, which knows little")
    folder = args.out / "teacher"
    finetune.main(finetune.parse_args([
        "--data", args.data, "--out", str(folder), *"--model vit_nano --image-size 64 --patch-size "
        "8 --augment plain --batch-size 64 --lr 1e-3 --epochs 20 --warmup-epochs 1".split()]))
    return str(folder / "last.pt")


def prepare_once(args: argparse.Namespace):
    """Computes the teacher's tokens, unless --out has them. Raises UserError if it has others."""
    flags = dict(data=args.data, image_size=args.image_size, images=args.images, bank=args.bank)
    if not (args.out / "facts.json").exists():
        students.list_images(args.data, args.images, args.bank)      # before a teacher is fetched
        students.prepare(args.out, teacher=find_teacher(args), **flags)
    if args.teacher:
        flags["teacher"] = args.teacher
    facts = json.loads((args.out / "facts.json").read_text())
    if changed := common.differences(facts, flags):
        raise UserError(f"{args.out} holds other images or tokens; give another --out: {changed}")
    note(f"{args.out}: tokens of {facts['teacher']}", sys.stdout)      # perhaps not the default


def lend(args: argparse.Namespace, train_set: dict, key: dict) -> ViT:
    """The routed student of another seed, which is trained unless its row has been: seeds 1 and 2
    lend to each other, 3 and 4, and so on, and seed 1 lends to 0.
    """
    other = key | dict(arm=key["arm"].replace("lent", "routed"), weights="dispatch",
                       seed=key["seed"] + 1 if key["seed"] % 2 else abs(key["seed"] - 1))
    file = find_file(args, other, "pt")
    if not file.exists():
        train_student(args, other, train_set)      # saves it
    return load_encoder(file)


def find_positions(rows: list[dict], key: dict) -> Tensor:
    """The mean weights [N] of routed students with seeds 0 to 2 and otherwise the same settings"""
    same = {name: key[name] for name in key if name not in ("arm", "seed", "weights")}.items()
    found = {row["seed"]: row["positions"] for row in rows
             if "positions" in row and same <= row.items()}
    if missing := {0, 1, 2} - found.keys():
        raise UserError(f"{key['arm']}: --rows has no routed student with seed {min(missing)} and "
                        "the same settings; train it first")
    return torch.tensor([found[seed] for seed in (0, 1, 2)]).mean(0)


def measure_row(args: argparse.Namespace, key: dict) -> tuple[dict, np.ndarray]:
    """Trains the student of a row, or measures a reference -> the row, and which answers of the
    probe and of k-NN are right, bool [2, Q]
    """
    torch.set_num_threads(1)
    train_set, bank, test = students.open_sets(args.out, args.held_out)
    y, truth = (torch.from_numpy(np.array(each["labels"])) for each in (bank, test))
    more = {}
    if key["arm"] == "chance":
        right = torch.stack([truth == y.bincount().argmax()] * 2)
    elif key["arm"] == "raw pixels":
        x, test_x = (students.shrink(each["images"]) for each in (bank, test))
        right = students.classify(x, y, test_x, truth)
        known = {image.tobytes() for image in bank["images"]}
        more["duplicates"] = float(np.mean([image.tobytes() in known for image in test["images"]]))
    elif key["arm"] == "teacher":
        x, test_x, seen = students.find_features(args.out, args.held_out)
        right = students.classify(x, y, test_x, truth[seen])
    else:
        student, more = train_student(args, key, train_set)
        x, test_x = (students.find_cls(student.encoder, each["images"]) for each in (bank, test))
        right = students.classify(x, y, test_x, truth)
    found = dict(zip(MEASURES, (100 * right.double().mean(1)).tolist()))
    return rounded(key | more | found), right.numpy()


def train_student(args: argparse.Namespace, key: dict, train_set: dict) -> tuple[Explore, dict]:
    """Trains the student of a row -> it, and what the row says of it besides its accuracies"""
    setting = {name: key[name] for name in DEFAULTS}
    more = {}
    if setting["weights"] == "fixed":
        more["positions"] = find_positions(read_lines(args.rows), key)
    if setting["weights"] == "lent":
        more["lender"] = lend(args, train_set, key)
    epochs = 0 if key["arm"].startswith("untrained") else key["epochs"]
    student, means = students.train(setting, train_set, epochs, key["seed"], **more)
    means["parameters"] = sum(p.numel() for p in student.encoder.parameters())
    if key["arm"].startswith("routed"):
        save(args, key, student, find_file(args, key, "pt"))
        if key["seed"] < 3:
            images = torch.from_numpy(np.array(train_set["images"])) / 255
            weights = students.find_weights(student.encoder, images)
            means["positions"] = ((1 + students.GRID ** 2) * weights.mean(0)).tolist()
    return student, means


def save(args: argparse.Namespace, key: dict, student: Explore, file: Path):
    """Writes a checkpoint of the student, as pretrain.py writes one, and says how to make it."""
    flags = dict(stage="pretrain", objective="token_cls", encoding="sparse", data=args.data,
                 loss_weights="dispatch" if key["weights"] == "dispatch" else "uniform",
                 entropy_weight=[key["lambda_"], 0.0], seed=key["seed"],
                 command=" ".join(["python", "experiments/compare.py", *sys.argv[1:]]))
    temporary = file.with_suffix(f".{key['seed']}.tmp")
    torch.save(dict(model=student.state_dict(), encoder=student.encoder.config,
                    epoch=key["epochs"], args=flags), temporary)
    temporary.replace(file)


def find_keys(args: argparse.Namespace) -> list[dict]:
    """What identifies each row: arm, seed, settings, a checksum of the images, and four
    numbers of the tokens. A file holds the rows of one set and one teacher. Raises UserError.
    """
    train_set, bank, test = sets = students.open_sets(args.out, args.held_out)
    arrays = (each[name] for each in sets for name in ("images", "labels"))
    same = dict(data=students.checksum(*arrays),
                tokens=rounded(students.describe_tokens(train_set["tokens"])))
    for row in read_lines(args.rows):
        if row.get("data") != same["data"] or not np.allclose(
                row.get("tokens", 0), same["tokens"], rtol=1e-3, atol=0):
            raise UserError(f"{args.rows} has rows of other images or of another teacher; give "
                            "another --rows")
        same["tokens"] = row["tokens"]      # perhaps of another CPU
    same |= dict(epochs=args.epochs, images=len(train_set["images"]), bank=len(bank["images"]),
                 test=len(test["images"]))
    arms = dict.fromkeys(itertools.chain(["untrained"], *args.pairs, args.arms))
    return [dict(arm=name, seed=None) | same for name in REFERENCES] + [
        dict(arm=arm, seed=seed) | same | find_setting(arm) for seed in args.seeds for arm in arms]


def measure_rows(args: argparse.Namespace):
    """Measures the rows that --rows lacks, and keeps which answers were right in --out."""
    done = read_lines(args.rows)
    keys = [key for key in find_keys(args) if not any(key.items() <= row.items() for row in done)]
    later = [key for key in keys if key.get("weights") in ("fixed", "lent")]
    first = [key for key in keys if key not in later]      # whose students the later rows need
    note(f"{args.out}: {len(keys)} rows to measure", sys.stdout)
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    with open(args.rows, "a") as file, contextlib.ExitStack() as stack:
        apply = map
        if args.processes > 1:      # Ctrl-C is for this process, which ends the others
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(
                args.processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)))
            apply = pool.imap_unordered
        found = itertools.chain.from_iterable(
            apply(functools.partial(measure_row, args), group) for group in (first, later))
        for row, right in common.progress_bar(found, "rows", total=len(keys)):
            np.save(find_file(args, row, "npy"), np.packbits(right, axis=1))
            file.write(json.dumps(row) + "\n")
            file.flush()
            seed = "" if row["seed"] is None else f", seed {row['seed']}"
            note(f"{row['arm']}{seed}: probe {row['probe']:.1f} %, k-NN {row['knn']:.1f} %",
                 sys.stdout)


def find_file(args: argparse.Namespace, row: dict, kind: str) -> Path:
    """Where --out keeps which answers of a row were right (npy), and its student (pt)"""
    return args.out / "rows" / (f"{row['arm']}, seed {row['seed']}, {row['epochs']} epochs, "
                                f"{row['images']} images.{kind}")


# ------------------------------------------------------------------------- tables and verdict

def two_sided(t: float, free: int) -> float:
    """The probability that |t| is larger, of Student's t with `free` degrees of freedom"""
    angles = np.linspace(0, math.pi / 2, 20_001)      # of arctan(t / sqrt(free))
    density = np.cos(angles) ** (free - 1)
    return float(density[angles >= math.atan2(t, math.sqrt(free))].sum() / density.sum())


@functools.cache
def quantile(free: int) -> float:
    """Student's t for a 95 % interval, by bisection"""
    low, high = 0.0, 100.0
    for _ in range(40):
        t = (low + high) / 2
        low, high = (t, high) if two_sided(t, free) > 0.05 else (low, t)
    return low


def standard_error(values: np.ndarray, by_images: float = 0.0) -> float:
    """The standard error of the mean of values [seeds], for other seeds and, with the standard
    error of the choice of test images, for these, too
    """
    return math.hypot(values.std(ddof=1) / math.sqrt(len(values)), by_images)


def half_width(values: np.ndarray, by_images: float = 0.0) -> float:
    """Half of the 95 % interval of the mean"""
    return quantile(len(values) - 1) * standard_error(values, by_images)


def p_value(values: np.ndarray, by_images: float = 0.0) -> float:
    """Student's t test that the mean is 0, two-sided"""
    error = standard_error(values, by_images)
    return two_sided(abs(values.mean()) / error, len(values) - 1) if error else 1.0


def holm(p_values: list[float]) -> list[float]:
    """p values, corrected for their number by Holm's method"""
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = least
    return corrected


def paired_differences(rows: list[dict], arm: str, other: str, measure: str) -> np.ndarray:
    """arm minus other, in points, for each seed that both have"""
    ours, theirs = ({row["seed"]: row[measure] for row in rows if row["arm"] == each}
                    for each in (arm, other))
    return np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def image_error(args: argparse.Namespace, rows: list[dict], arm: str, other: str,
                measure: str) -> float | None:
    """The standard error of a difference over the choice of test images, if --out has which answers
    of these rows were right. The spread over seeds has the noise of single answers, so it does not
    count here.
    """
    ours, theirs = ({row["seed"]: row for row in rows if row["arm"] == each}
                    for each in (arm, other))
    pairs = [(ours[seed], theirs[seed]) for seed in ours.keys() & theirs.keys()]
    files = [[find_file(args, row, "npy") for row in pair] for pair in pairs]
    if not all(file.exists() for file in itertools.chain(*files)):
        return None
    count, at = rows[0].get("test"), list(MEASURES).index(measure)
    right = np.array([[np.unpackbits(np.load(file)[at], count=count) for file in pair]
                      for pair in files], dtype=float)                             # [seeds, 2, Q]
    accuracies = [[row[measure] for row in pair] for pair in pairs]
    if not np.allclose(100 * right.mean(2), accuracies, atol=1e-3):      # of another --rows
        return None
    gain = 100 * (right[:, 0] - right[:, 1])                                           # [seeds, Q]
    noise = (gain - gain.mean(1, keepdims=True)).var(0, ddof=1).mean() / len(gain)
    return math.sqrt(max(0.0, gain.mean(0).var(ddof=1) - noise) / gain.shape[1])


def compare_pairs(args: argparse.Namespace, rows: list[dict]) -> list[dict]:
    """The comparisons of --pairs that have two seeds, first in the probe, then in k-NN: the mean of
    one arm minus the other, its margin of error (half of the interval), and p, by itself and
    corrected by Holm's method

    They are for other seeds and, if --out has all answers (`images`), for other test images, too.
    """
    looks = [(arm, other, measure) for measure in MEASURES for arm, other in args.pairs
             if len(paired_differences(rows, arm, other, measure)) > 1]
    errors = [image_error(args, rows, *look) for look in looks]
    images, found = None not in errors, []
    for (arm, other, measure), error in zip(looks, errors):
        values = paired_differences(rows, arm, other, measure)
        by_images = error if images else 0.0
        found.append(dict(name=f"{arm} minus {other}, {MEASURES[measure]}", pair=[arm, other],
                          measure=measure, images=images, mean=float(values.mean()),
                          seeds=len(values), margin=half_width(values, by_images),
                          p=p_value(values, by_images)))
    for each, corrected in zip(found, holm([each["p"] for each in found])):
        each["corrected_p"] = corrected
    return found


def differing(found: list[dict]) -> list[dict]:
    """The comparisons whose corrected p is below 0.05"""
    return [each for each in found if each["corrected_p"] < 0.05]


def cell(values: np.ndarray) -> str:
    return f"{values.mean():+.2f} ± {half_width(values):.2f}" if len(values) > 1 else ""


def print_table(args: argparse.Namespace, rows: list[dict]):
    """A line for each arm: how its weights vary, its accuracies, and differences to the arms none
    and uniform that the header names, with 95 % intervals for other seeds
    """
    asked = [*REFERENCES, "untrained", *itertools.chain(*args.pairs), *args.arms]
    there = [row["arm"] for row in rows]
    arms = [arm for arm in dict.fromkeys(asked + there) if arm in there]
    none, uniform = (min((arm for arm in arms if arm.split(",")[0] == name), default=name)
                     for name in ("none", "uniform"))
    print(f"| arm (seeds) | dispatch_cv | probe, % | to {none} | to {uniform} | k-NN, % | to "
          f"{uniform} |")
    print("|---" * 7 + "|")
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        cv = [row["dispatch_cv"] for row in own if "dispatch_cv" in row]
        cells = [f"{arm} ({len(own)})" if own[0]["seed"] is not None else arm,
                 f"{np.mean(cv):.3f}" if cv else ""]
        for measure, others in (("probe", (none, uniform)), ("knn", (uniform,))):
            cells.append(f"{np.mean([row[measure] for row in own]):.1f}")
            cells += [cell(paired_differences(rows, arm, other, measure)) if arm != other else ""
                      for other in others]
        print("| " + " | ".join(cells) + " |")


def exceeds(rows: list[dict], others: list[dict], measure: str) -> bool:
    """Whether the accuracy of rows is above the others' by more than the choice of test images"""
    high, low = (np.mean([row[measure] for row in each]) for each in (rows, others))
    count = min(rows[0]["test"], students.TEACHER_IMAGES)
    return high - low > 1.96 * math.sqrt(2 * low * (100 - low) / count)


def have_learned(args: argparse.Namespace, rows: list[dict], measure: str) -> bool:
    """Whether the mean of all arms of --pairs is above the untrained students by more than the
    interval, for other seeds and, if --out has the answers, other test images
    """
    arms = dict.fromkeys(itertools.chain(*args.pairs))
    gains = [paired_differences(rows, arm, "untrained", measure) for arm in arms]
    seeds = min(map(len, gains))
    values = np.mean([each[:seeds] for each in gains], axis=0)
    by_images = image_error(args, rows, next(iter(arms)), "untrained", measure) or 0.0
    return values.mean() > math.hypot(half_width(values), 1.96 * by_images)


def find_obstacle(args: argparse.Namespace, rows: list[dict], found: list[dict]) -> str:
    """What keeps the rows from an answer, a key of OBSTACLES, or "" """
    arm, other = args.pairs[0]
    own, base, untrained, teacher = ([row for row in rows if row["arm"] == name]
                                     for name in (arm, other, "untrained", "teacher"))
    first = [each for each in found if each["pair"] == [arm, other]]
    there = {(row["arm"], row["seed"]) for row in rows}
    needed = itertools.product([*itertools.chain(*args.pairs), "untrained"], args.seeds)
    if not teacher or len(args.seeds) < 2 or set(needed) - there:
        return "rows"
    if any(row.get("duplicates", 0) > 0.5 for row in rows):
        return "duplicates"
    if not any(exceeds(teacher, untrained, measure) for measure in MEASURES):
        return "teacher"
    if not any(have_learned(args, rows, measure) for measure in MEASURES):
        return "students"
    cv, base_cv = (np.mean([row.get("dispatch_cv", 0) for row in each]) for each in (own, base))
    if arm.startswith("routed") and (cv < 0.1 or cv < 1.5 * base_cv):
        # the variation of weights that are free (`losses.loss_spread`); a router's vary less
        free = np.mean([row["token_spread"] for row in own]) / own[0]["lambda_"]
        return "length" if cv < free / 4 else "lambda"
    if not differing(first) and all(2 * each["margin"] > PAPERS_GAIN[each["measure"]]
                                    for each in first):
        return "intervals"
    return ""


def find_verdict(args: argparse.Namespace, rows: list[dict], found: list[dict]) -> str:
    """What the rows can tell of the first of --pairs, and what differs, in words"""
    arm, other = args.pairs[0]
    first = [each for each in found if each["pair"] == [arm, other]]
    obstacle = find_obstacle(args, rows, found)
    if obstacle:
        said = f"This run cannot tell {arm} from {other}, because {OBSTACLES[obstacle]}"
    elif differing(first):
        said = f"After the correction, {arm} differs from {other}."
    else:
        limit = max(abs(each["mean"]) + each["margin"] for each in first)
        said = (f"No difference between {arm} and {other} survives the correction; the intervals "
                f"leave room for up to {limit:.1f} points.")
    names = [f"{each['name']} ({each['mean']:+.2f})" for each in differing(found)]
    if obstacle == "rows" or obstacle and not names:
        return said
    if names:
        said += f" What differs: {'; '.join(names)}."
    images = "and other" if found[0]["images"] else "on the same"
    return (f"{said} This is for other seeds {images} test images, with this teacher, these images "
            "to learn from, small students, fixed crops and this schedule.")


def report(args: argparse.Namespace):
    """Prints a table of --rows, the comparisons and a verdict."""
    groups = collections.defaultdict(list)
    for row in read_lines(args.rows):
        if row["seed"] is not None and not (
                row["seed"] in args.seeds and find_setting(row["arm"]).items() <= row.items()):
            continue      # a row of the first round may have another lambda than its arm
        groups[tuple(row.get(name, "?") for name in ("epochs", "images", "bank", "test"))] += [row]
    for (epochs, images, bank, test), rows in groups.items():
        print(f"\n{epochs} epochs of {images} images, {bank} labeled and {test} test images;\n"
              "dispatch_cv: how much a router's weights of an image's patches differ; "
              "±: 95 % interval for other seeds\n")
        print_table(args, rows)
        if found := compare_pairs(args, rows):
            images = " and other test images" if found[0]["images"] else ""
            print(f"\nDifferences in points with 95 % intervals for other seeds{images}, and p of "
                  f"paired t tests, by themselves and by Holm's method for {len(found)} "
                  "comparisons:")
        for each in found:
            print(f"{each['name']}: {each['mean']:+.2f} ± {each['margin']:.2f}, {each['seeds']} "
                  f"seeds, p {each['p']:.3f}, {each['corrected_p']:.3f}")
        for row in rows:
            if row.get("duplicates", 0) > 0.03:
                print(f"{row['duplicates']:.0%} of the test images are labeled images, too, so "
                      "accuracies are too high: val/ must hold other photographs.")
        if args.pairs and epochs == args.epochs:
            print(f"\n{find_verdict(args, rows, found)}")


def save_one(args: argparse.Namespace):
    """Trains the first of --arms with the first of --seeds, and writes it in half precision to
    --save.
    """
    torch.set_num_threads(1)      # as for a row, so that the student is the same
    key = next(key for key in find_keys(args) if key["arm"] == args.arms[0])
    train_set, *_ = students.open_sets(args.out, args.held_out)
    student, _ = train_student(args, key, train_set)
    save(args, key, student.half(), args.save)
    note(f"{args.save}: {key['arm']}, seed {key['seed']}", sys.stdout)


def main(args: argparse.Namespace):
    if args.print:
        return report(args)
    prepare_once(args)
    (args.out / "rows").mkdir(exist_ok=True)
    if args.save:
        return save_one(args)
    measure_rows(args)
    report(args)


if __name__ == "__main__":
    try:
        common.launch(main, parse_args())
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
