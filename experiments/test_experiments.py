"""The tests of experiments/: its commands, tables and figures at toy size."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import macs
import memory
import table

import checkpoint
import data
import losses
import pretrain
from teacher import build_teacher
from test_explore import (
    SCRIPTS,
    normalized,
    photos,
    read_run,
    scenes,
    seeded,
    signals,
    stand_in,
)

README = (HERE / "README.md").read_text("utf-8")


def test_memory_counts_each_storage_that_autograd_saves_once_and_no_parameter():
    layer = nn.Linear(8, 16)
    x = torch.rand(4, 8, requires_grad=True)
    own = list(layer.parameters())
    once = 2 * 4 * 8 + 2 * 8 * 16                # fp16 copies of the input and of the weight
    assert memory.saved_bytes(lambda: layer(x), own) == once
    assert memory.saved_bytes(lambda: F.gelu(layer(x)), own) == once + 2 * 4 * 16
    views = memory.saved_bytes(
        lambda: (x * x, x.view(-1) * x.view(-1), x[0] * layer.weight), own)
    assert views == 4 * 4 * 8


def test_memory_prints_a_row_for_each_number_of_experts(capsys):
    flags = ["--model", "vit_tiny", "--image-size", "64", "--objective", "token"]
    memory.main(memory.parse_args(flags))
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[float(cell.split()[0]) for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in rows] == [0, 2, 64]
    assert all(0 < row[5] < row[4] for row in rows)
    assert rows[2][2] == pytest.approx(16e6 * rows[2][1] / 2 ** 30, abs=0.06)


@pytest.mark.parametrize("flag, code, expected", (
    ("--help", 0, memory.__doc__.splitlines()[0]), ("--modle", 2, "--modle")))
def test_memory_prints_its_help_or_an_error_and_no_table(flag, code, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        memory.main(memory.parse_args([flag]))
    printed = "".join(capsys.readouterr())
    assert stop.value.code == code and expected in printed and "|---" not in printed


@pytest.fixture
def experiments(photos, tmp_path):
    """experiments(SEEDS, SET, ROW ...) -> (stage, argv) of each command of run.sh; none is run"""
    log = tmp_path / "log"
    images = tmp_path / "a folder"
    images.symlink_to(photos)
    environment = stand_in(tmp_path, "python", f'printf "%s\\n" "$@" "" >> "{log}"')

    def commands(seeds, *argv, camvid=""):
        log.write_text("")
        variables = {"RUNS": str(tmp_path / "the runs"), "SEEDS": seeds, "CIFAR": str(images),
                     "FULL": str(images), "CAMVID": camvid,
                     "MORE": "--max-steps 4 --save-every 1 --save-minutes 1e-9"}
        subprocess.run(["sh", HERE / "run.sh", *argv], check=True, env=environment | variables)
        calls = [call.split("\n") for call in log.read_text().strip().split("\n\n")]
        return [(call[0].removesuffix(".py").replace("linprobe", "linear"), call[1:])
                for call in calls]
    return commands


def test_experiments_are_run_measured_and_drawn(experiments, scenes, photos, tmp_path, capsys):
    calls = [*experiments("0", "cifar", "none", "uniform", "coupled", "router-2", "aimed-0.2"),
             *experiments("1", "cifar", "uniform"),
             *experiments("1", "cifar", "coupled", camvid=scenes)]
    for stage, argv in calls:
        quick = ["--batch-size", "8", "--workers", "0"]
        SCRIPTS[stage].main(SCRIPTS[stage].parse_args([*argv, *quick]))
    runs = tmp_path / "the runs" / "cifar"
    again = [stage for stage, _ in experiments("0", "cifar", "uniform")]
    assert again == ["pretrain", "linear", "linear"]      # they find their last.pt
    for file in runs.glob("*/knn.jsonl"):      # of an earlier model, and of another one
        earlier = {"checkpoint": "last.pt", "top1": 101.0}
        another = {"checkpoint": "epoch_0000.pt", "top1": 101.0}
        file.write_text(f"{json.dumps(earlier)}\n{file.read_text()}{json.dumps(another)}\n")

    (tmp_path / "README.md").write_text(README, "utf-8")
    argv = ["cifar", "--runs", str(tmp_path / "the runs"), "--out", str(tmp_path)]
    printed = table.main(table.parse_args(argv))["cifar"]
    assert printed in capsys.readouterr().out
    assert printed in (tmp_path / "README.md").read_text("utf-8")
    rows = json.loads((tmp_path / "cifar.json").read_text())
    rows = {(row["row"], row["seed"]): row for row in rows}
    assert list(rows) == [("none", 0), ("uniform", 0), ("uniform", 1), ("coupled", 0),
                          ("coupled", 1), ("aimed-0.2", 0), ("router-2", 0)]
    coupled = np.array([rows["coupled", seed]["knn"] for seed in (0, 1)])
    gain = coupled - [rows["uniform", seed]["knn"] for seed in (0, 1)]
    assert (f"| coupled | 2 | {coupled.mean():.1f} ± {coupled.std(ddof=1):.1f} "
            f"({gain.mean() + 0.0:+.2f} ± {gain.std(ddof=1) / 2 ** 0.5:.2f}) |") in printed
    assert max(row["knn"] for row in rows.values()) <= 100      # the latest of last.pt
    assert "ratio" not in rows["none", 0] and rows["uniform", 0]["ratio"] == 1
    assert [key for key, row in rows.items() if "miou" in row] == [("coupled", 1)]

    # values that a run has written
    router = checkpoint.load_checkpoint(runs / "router-2-0" / "last.pt")["model"]
    scale = router["loss_router.scale"].item()
    assert rows["router-2", 0]["scale"] == pytest.approx(scale, rel=1e-5)
    row = rows["coupled", 1]
    _, log = read_run(runs / "coupled-1")
    assert row["ratio"] == pytest.approx(log[-1]["token_ratio"], rel=1e-5)
    assert row["lambda"] == 0.05
    _, log = read_run(runs / "aimed-0.2-0")
    assert rows["aimed-0.2", 0]["lambda"] == log[-1]["lambda"][0] != 5
    for name, score in (("linear", "top1"), ("ep", "top1"), ("camvid", "miou")):
        best = max(line.get(score, 0) for line in read_run(runs / "coupled-1" / name)[1])
        assert row[score if score == "miou" else name] == pytest.approx(best, rel=1e-5)

    # values on validation images
    file = checkpoint.load_checkpoint(runs / "coupled-0" / "last.pt")
    student = pretrain.Explore(checkpoint.load_encoder(file), 96, 0.4).eval()
    student.load_state_dict(file["model"])
    dataset = data.Folder(photos, "val")
    views = data.TrainViews(dataset, 32, 0, 8, 0.4)
    batch = torch.utils.data.default_collate([views[0, i] for i in range(16)])
    images = data.augment(batch)
    pred = student(normalized(images), batch["mask"])
    target = build_teacher(file["args"]["teacher"], 8)(images)[:, 1:]
    target = target[~batch["mask"]].view(len(dataset), -1, 96)
    loss = losses.token_loss(pred.tokens[:, 1:], target)
    weight = pred.routing[3].dispatch[:, 1:].detach().double()
    weight = weight / weight.mean(1, keepdim=True)
    row = rows["coupled", 0]
    assert row["token_loss"] == pytest.approx(loss.mean().item(), rel=1e-3)
    assert row["variation"] == pytest.approx(losses.dispatch_cv(weight)[0].item(), rel=1e-3)

    runs.rename(tmp_path / "gone")      # rows of earlier calls stay
    assert table.main(table.parse_args(argv))["cifar"] == printed


@pytest.mark.parametrize("experts, gigamacs", ((0, 17.45), (2, 11.93), (64, 13.86)))
def test_macs_are_those_of_table_6(experts, gigamacs, capsys):
    macs.main(macs.parse_args(["--experts", str(experts)]))
    assert f" {gigamacs} G MACs" in capsys.readouterr().out


@pytest.mark.parametrize("middle, text", (
    (1.0, "2.0 ± 1.0 (+2.00 ± 0.58)"), (1.9, "2.0 ± 0.1 (+2.00 ± 0.06*)")))
def test_a_star_is_a_difference_above_4_3_errors_of_three_seeds(middle, text):
    mine = {0: middle, 1: 2.0, 2: 4 - middle}
    assert table.cell(mine, dict.fromkeys(range(3), 0.0), 1) == text


def test_differences_are_to_the_row_that_is_asked_for():
    rows = [{"row": name, "seed": 0, "knn": top1}
            for name, top1 in (("none", 1), ("uniform", 3), ("a", 6))]
    assert "| 6.0 (+3.00) |" in table.results(rows)
    assert "| 6.0 (+5.00) |" in table.results(rows, "none")


@pytest.mark.parametrize("name", ("noise", "shapes", "cifar"))
def test_the_tables_are_those_of_the_json_files(name):
    sets = {each: json.loads((HERE / f"{each}.json").read_text())
            for each in ("noise", "shapes", "cifar")}
    text = table.results(sets[name])
    assert table.fill(README, name, text) == README, "run table.py noise shapes cifar"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """[(script, argv)] of each command that the README prints, as bash reads them"""
    folder = tmp_path_factory.mktemp("printed")
    environment = stand_in(folder, "torchrun", f'printf "%s\\n" "$@" "" >> "{folder}/log"')
    stand_in(folder, "python", 'exec torchrun --nproc_per_node 1 "$@"')
    fences = re.findall(r"```sh\n(torchrun .*?)```", README, re.DOTALL)
    (folder / "commands").write_text("\n".join(
        [*re.findall(r"`((?:torchrun|python) [^`]*\.py[^`]*)`", README), *fences]))
    logs = []
    for shell in ("bash", "sh"):
        (folder / "log").write_text("")
        subprocess.run([shell, "commands"], cwd=folder, check=True, env=environment)
        logs.append((folder / "log").read_text())
    assert logs[0] == logs[1], "bash and sh read a command differently"
    calls = [call.split("\n") for call in logs[0].strip().split("\n\n")]
    return [(call[2].removesuffix(".py"), call[3:]) for call in calls]


def test_each_row_has_one_command_that_its_script_takes(printed):
    rows = re.findall(r"^\| .* \| `(torchrun .*)` \|$", README, re.MULTILINE)
    assert len(rows) >= 75 and len(rows) == len(set(rows))
    assert not set("".join(rows)) & set("{};&")
    for script, argv in printed:
        if argv != ["--help"]:
            importlib.import_module(script).parse_args(argv)


def test_printed_commands_name_the_folders_of_printed_runs(printed):
    made = {pretrain.parse_args(argv).out for script, argv in printed
            if script == "pretrain" and "--help" not in argv}
    read = {re.sub(r"/\w+\.pt$", "", word) for _, argv in printed for word in argv
            if word.startswith("runs/")}
    assert len(read) >= 12 and read <= made


def test_the_index_has_every_table_and_figure_of_the_paper_with_a_status():
    section, = re.findall("## The paper's tables and figures\n(.*?)\n## ", README, re.DOTALL)
    index = dict(re.findall(r"^\| (\w+ A?\d) \| [^|]* \| ([^|]*) \|", section, re.MULTILINE))
    assert list(index) == [*(f"Table {i}" for i in "1 2 3 4 5 6 A1 A2 A3 A4 A5".split()),
                           *(f"Figure {i}" for i in "1 2 3 A1 A2 A3 A4".split())]
    for status in index.values():
        assert re.match("reproduced|seen in small|not seen in small|not run", status), status


def test_lines_fit_on_100_columns_and_links_lead_somewhere():
    lines = README.splitlines()
    assert not [line for line in lines if len(line) > 100 and line[0] != "|"]
    anchors = {"#" + re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
               for line in lines if line.startswith("#")}
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link in anchors or (HERE / link).exists(), link


def test_each_row_of_the_small_runs_is_commands_that_the_scripts_take(experiments):
    others = ("detached combine router experts16 experts16-coupled-0.05 experts16-aimed-0.1 "
              "expert0 token-detached long-uniform long-coupled long-aimed-0.3").split()
    calls = experiments("0", "shapes", *others) + experiments("0", "transfer", camvid="x")
    for stage, argv in calls:
        SCRIPTS[stage].parse_args(argv)
