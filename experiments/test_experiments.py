"""The tests of experiments/: its commands, tables and figures at toy size."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import control
import hours
import macs
import memory
import table

import losses
import pretrain
from test_explore import stand_in

README = (HERE / "README.md").read_text("utf-8")
COMMANDS = (HERE / "COMMANDS.md").read_text("utf-8")
LINES = [json.loads(line) for line in (HERE / "control.jsonl").read_text().splitlines()]


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


def test_memory_prints_what_running_md_says(capsys):
    memory.main(memory.parse_args([]))
    rows = [[float(cell.split()[0]) for cell in line.split("|")[1:-1]]
            for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [0, 2, 64]
    assert all(0 < row[5] < row[4] for row in rows)
    assert rows[2][2] == pytest.approx(16e6 * rows[2][1] / 2 ** 30, abs=0.06)
    section = (HERE.parent / "RUNNING.md").read_text("utf-8").split("## Memory")[1]
    stated = re.findall(r"^\| (\d+) \| (.+) GiB \| (.+) MiB \| (.+) MiB \|$", section, re.M)
    for row, (experts, fixed, each, recompute) in zip(rows, stated, strict=True):
        assert row[0] == int(experts)
        assert row[2] + row[3] == pytest.approx(float(fixed), abs=0.11)      # rounded sums
        # what autograd keeps differs by 0.7 MiB between versions of PyTorch
        assert row[4:] == pytest.approx([float(each), float(recompute)], abs=0.8)


@pytest.mark.parametrize("flag, code, expected", (
    ("--help", 0, memory.__doc__.splitlines()[0]), ("--modle", 2, "--modle")))
def test_memory_prints_its_help_or_an_error_and_no_table(flag, code, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        memory.main(memory.parse_args([flag]))
    printed = "".join(capsys.readouterr())
    assert stop.value.code == code and expected in printed and "|---" not in printed


# --------------------------------------------------------------------------- control.py

def options(tmp_path, *argv):
    small = ["--images", "192", "--epochs", "2", "--image-size", "24", "--teacher-epochs", "2",
             "--teacher", str(tmp_path / "teacher"), "--out", str(tmp_path / "rows.jsonl")]
    return control.parse_args([*argv, *small])


@pytest.fixture
def few_images(monkeypatch):
    """Drawn sets have 192 images for training, of teachers too, and 48 for validation. That is too
    few for a good teacher.
    """
    monkeypatch.setattr(control, "FAILED", 0)
    open_images = control.data.open_images

    def open_few(*args, **keywords):
        dataset = open_images(*args, **keywords)
        dataset.length = {4096: 192, 1024: 48}[dataset.length]
        return dataset
    monkeypatch.setattr(control.data, "open_images", open_few)


def test_control_writes_a_line_for_each_row_once(tmp_path, capsys, few_images):
    rows = ["unweighted", "oracle", "softmin-V1", "routed-L0.1", "router-V0.3-rate20",
            "detached-V1", "none_oracle", "routed-V1-cut0.5", "routed-V1-times-start5",
            "routed-V1-block1", "aside-V1", "oracle-keep0.5"]
    argv = options(tmp_path, "shapes-noise", "--plant", "noise", "--seeds", "3", "--rows", *rows)
    control.main(argv)
    text = (tmp_path / "rows.jsonl").read_text()
    lines = {line["row"]: line for line in map(json.loads, text.splitlines())}
    assert list(lines) == rows
    oracle = lines["oracle"]
    assert oracle["weight_planted"] == 0 and oracle["auc"] == 1 and oracle["teacher"] == "own"
    kept = lines["oracle-keep0.5"]
    assert 0.4 < kept["weight_planted"] / kept["weight_learned"] < 0.6
    assert lines["unweighted"]["cv"] == 0 and lines["unweighted"]["auc"] == 0.5
    softmin = lines["softmin-V1"]
    assert softmin["weight_planted"] < 0.9 < 1.02 < softmin["weight_learned"]
    assert lines["routed-L0.1"]["lambda"] == 0.1 and lines["router-V0.3-rate20"]["lambda"] != 5
    assert len({line["loss_learned"] for line in lines.values()}) == len(rows)
    control.main(argv)      # nothing is measured again
    assert (tmp_path / "rows.jsonl").read_text() == text
    assert [path.name for path in tmp_path.glob("teacher*")] == ["teacher-3"]
    argv.rows, argv.teacher_seed = ["unweighted"], 5
    control.main(argv)      # with the teacher of another seed
    line = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[-1])
    assert line["teacher"] == "one" and line["seed"] == 3 and (tmp_path / "teacher-5").is_dir()
    assert line["loss_learned"] != lines["unweighted"]["loss_learned"]


def test_a_teacher_that_was_stopped_goes_on_and_a_seed_whose_teacher_failed_is_left_out(
        tmp_path, capsys, few_images, monkeypatch):
    argv = options(tmp_path, "shapes-noise", "--seeds", "7", "--rows", "unweighted")
    train, steps = control.finetune.main, []

    def stopped_once(args):
        args.max_steps = None if steps else 4
        scores = train(args)
        steps.append(torch.load(tmp_path / "teacher-7" / "last.pt", weights_only=False)["step"])
        return scores
    monkeypatch.setattr(control.finetune, "main", stopped_once)
    with pytest.raises(KeyError):      # a stopped training has no score
        control.make_teacher(argv, 7)
    _, known = control.make_teacher(argv, 7)
    assert steps == [4, 6] and 0 <= known["teacher_top1"] <= 100

    monkeypatch.setattr(control, "FAILED", known["teacher_top1"] + 0.01)
    control.main(argv)
    assert "seed 7 is left out: its teacher has" in capsys.readouterr().out
    assert not argv.out.exists()
    monkeypatch.setattr(control, "FAILED", known["teacher_top1"])
    control.main(argv)
    line = json.loads(argv.out.read_text())
    assert line["teacher_digest"] == known["teacher_digest"]


@pytest.mark.parametrize("how", ("noise", "random", "pasted", "none"))
def test_planting_chooses_patches_and_replaces_their_tokens_alone(how):
    planting = control.Planting(how, 0.4, seed=1)
    images = torch.full((3, 3, 20, 20), 0.5)
    noise = torch.rand(3, 25) < 0.3
    found, planted = planting.choose(images, noise)
    if how == "noise":
        assert torch.equal(planted, noise)
    elif how == "none":
        assert not planted.any()
    else:
        assert planted.sum(1).tolist() == [10, 10, 10]
    changed = (found != images).view(3, 3, 5, 4, 5, 4).any(5).any(3)      # [B, 3, 5, 5]
    pasted = planted if how == "pasted" else torch.zeros_like(planted)
    assert torch.equal(changed, pasted.view(3, 1, 5, 5).expand(-1, 3, -1, -1))
    assert found.min() >= 0 and found.max() <= 1
    tokens = torch.randn(3, 26, 4000) * 3 + 2
    planting.learn(tokens)
    got, again = planting.plant(tokens, planted), planting.plant(tokens, planted)
    assert torch.equal(got[:, 0], tokens[:, 0])
    assert torch.equal(got[:, 1:][~planted], tokens[:, 1:][~planted])
    if planted.any():
        random = got[:, 1:][planted]
        assert not torch.isclose(random, again[:, 1:][planted]).all(1).any()
        assert abs(random.mean() - 2) < 0.1 and abs(random.std() - 3) < 0.1


def test_kinds_of_patches_follow_the_crop_and_the_flip():
    dataset = control.Cached(control.data.open_images("shapes-noise", "train", 24), range(12))
    views = control.Views(dataset, 24, 0, 4, 0.4)
    found = [views[0, i] for i in range(12)]
    assert {bool(view["flip"]) for view in found} == {False, True}
    for i, view in enumerate(found):
        dataset.rows[i], kept = (dataset.maps[i], dataset.rows[i][1]), dataset.rows[i]
        seen = control.data.TrainViews(dataset, 24, 0, 4, 0.4)[0, i]["image"] / 255
        dataset.rows[i] = kept
        seen = seen.flip(-1) if view["flip"] else seen
        shares = F.avg_pool2d(seen[:2], 6).flatten(1)
        assert torch.equal(view["object"], shares[0] >= 0.5)
        assert torch.equal(view["noise"], shares[1] >= 0.95)
        assert torch.equal(view["clear"], shares[1] <= 0.05)
    assert any((~view["noise"] & ~view["clear"]).any() for view in found)


@pytest.mark.parametrize("kind", ("routed", "aside"))
def test_a_step_of_the_control_is_eq_5_and_7(kind, tmp_path):
    """The gradient of a routed arm is that of explore_losses with the token loss alone. aside has
    the part that passes through the router, and that of an unweighted loss.
    """
    case = options(tmp_path, "shapes-noise")
    teacher = type("Teacher", (), {"dim": 10})()
    arm = control.Arm(f"{kind}-L0.3", case, 0, teacher)
    images, mask = torch.rand(5, 3, 24, 24), torch.arange(16).expand(5, 16) % 3 == 0
    targets = torch.randn(5, 17, 10)
    found = {}
    control.common.optimizer_step, kept = (
        lambda *args: found.update({name: p.grad.clone() for name, p in
                                    arm.student.named_parameters() if p.grad is not None}),
        control.common.optimizer_step)
    try:
        arm.step(0.1, images, mask, targets, torch.zeros(5, 16, dtype=torch.bool))
    finally:
        control.common.optimizer_step = kept

    pred = arm.student(control.data.normalize(images), mask)
    block = max(pred.routing)
    loss = losses.token_loss(pred.tokens[:, 1:], control.of_student(pred, targets[:, 1:]))
    dispatch = pred.routing[block].dispatch
    weight = losses.patch_weights(dispatch, 0)
    weighted = losses.routed_mean(loss, weight.detach())
    through_router = (losses.routed_mean(loss.detach(), weight)
                      - 0.3 * losses.dispatch_entropy(dispatch).sum())
    parameters = dict(arm.student.named_parameters())

    def gradients(total):
        values = torch.autograd.grad(total, parameters.values(), retain_graph=True,
                                     materialize_grads=True)
        return dict(zip(parameters, values))
    first, second = gradients(weighted), gradients(through_router)
    if kind == "aside":
        first = gradients(loss.mean())
    router = [f"encoder.blocks.{block}.mlp.{name}" for name in ("phi", "scale")]
    assert first.keys() >= set(router)
    for name, gradient in first.items():
        expected = gradient + second[name]
        if name in found:
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
        else:
            assert not expected.any()
    assert max(second[name].abs().max() for name in second if name not in router) > 1e-4


def test_the_probe_separates_classes_that_are_linear_in_the_features():
    x = torch.randn(300, 7)
    labels = (x[:, 2] > 0).long()
    assert control.probe(x[:200], labels[:200], x[200:], labels[200:]) > 90
    assert control.probe(x[:200], labels[:200], x[200:], 1 - labels[200:]) < 10


# ----------------------------------------------------------------------------- table.py

def test_shares_and_limits_are_those_of_a_plain_calculation():
    def line(row, seed, loss, **more):
        return table.NOISE | {"row": row, "seed": seed, "loss_learned": loss} | more
    lines = [line(row, seed, loss) for row, values in {
        "unweighted": (10, 12, 11), "oracle": (2, 4, 1), "a": (4, 6, 3), "b": (10, 13, 10.5),
        "none": (7, 7, 7), "none_oracle": (3, 3, 3), "router": (5, 5, 5), }.items()
        for seed, loss in enumerate(values)] + [
            line("a", table.SELECTION, 99), line("b", 0, 1, epochs=9), line("b", 0, 1, share=0.1),
            line("b", 0, 1, teacher_digest="another")]
    found = table.Rows(lines, table.NOISE)
    assert found.shares("a") == [0.75, 0.75, 0.8]
    assert found.shares("router") == [0.5, 0.5, 0.5]      # without experts: another floor
    selected = table.Rows(lines, table.NOISE, selection=True)
    assert selected.values("a", "loss_learned") == {(100, None): 99}
    share, gain = table.Share(), table.Gain("loss_learned", 2)
    assert share(found, "a") == "0.77 ± 0.02"
    assert share(found, "b") == "-0.02 ± 0.05, cannot tell below 0.22"
    assert share(found, "oracle") == "1 (ceiling)"
    assert share(found, "none") == "0 (floor)"
    assert table.Share("clear")(found, "a") == ""      # lines without these patches
    assert found.gains("b", "loss_learned") == [0, 1, -0.5]
    assert found.gains("router", "loss_learned", relative=True) == [-200 / 7] * 3
    assert gain(found, "a") == "-6.67 ± 0.67" and gain(found, "none") == "floor"
    assert gain(found, "b - a") == "+6.83 ± 0.44"         # 6, 7, 7.5
    assert found.gains("b - a", "loss_learned", relative=True) == pytest.approx(
        [150, 700 / 6, 250])
    assert gain(found, "b - missing") == ""
    assert table.cell([1.5], 1, "+") == "+1.5 (one seed)"


def test_comparisons_are_counted_once(monkeypatch):
    lines = [table.NOISE | {"row": row, "seed": seed, "loss_learned": loss, "probe_mean": -loss}
             for row, losses in {"unweighted": (10, 12), "oracle": (2, 4), "a-V1": (4, 6.1),
                                 "b": (9, 14), "none": (3, 5), "none_a": (4, 6)}.items()
             for seed, loss in enumerate(losses)]
    share = ("share", table.NOISE, table.Share())
    gain = ("gain", table.NOISE, table.Gain("loss_learned"))
    probe = ("probe", table.NOISE, table.Gain("probe_mean"))
    monkeypatch.setattr(table, "TABLES", {
        "one": ([share, share, gain, ("mean", table.NOISE, table.Mean("loss_learned", 2))],
                ["unweighted", "oracle", "a-V1", "b"]),
        "two": ([share], ["a-V1", "b"]), "lambda": ([share], None), "features": ([probe], None),
        "pairs": ([gain, probe], ["b - a-V1"])})
    signs = table.comparisons(lines)
    case = tuple(table.NOISE.items())
    # shares of a: 0.75 and 0.7375; gains of a: -6 and -5.9; with two seeds, b never differs
    assert signs == {
        (table.Share, "loss_learned", "a-V1", *case): 1,
        (table.Share, "loss_learned", "b", *case): 0,
        (table.Gain, "loss_learned", "oracle", *case): -1,
        (table.Gain, "loss_learned", "a-V1", *case): -1,
        (table.Gain, "loss_learned", "b", *case): 0,
        (table.Gain, "loss_learned", "b - a-V1", *case): 0,
        (table.Gain, "probe_mean", "oracle", *case): 1,
        (table.Gain, "probe_mean", "a-V1", *case): 1,
        (table.Gain, "probe_mean", "b", *case): 0,
        (table.Gain, "probe_mean", "none_a", *case): -1,
        (table.Gain, "probe_mean", "b - a-V1", *case): 0}
    assert [line.split(" | ") for line in table.count_features(signs).splitlines()[2:]] == [
        ["| oracle", "0", "0", "0", "1", "0", "0 |"], ["| a", "0", "0", "0", "1", "1", "0 |"],
        ["| b", "0", "0", "0", "0", "0", "1 |"]]


def test_the_tables_are_those_of_the_rows():
    text = README
    for name, content in table.tables(LINES).items():
        assert f"<!-- table.py {name} -->" in README
        text = table.fill(text, name, content)
    assert text == README, "run table.py"
    signs = table.comparisons(LINES)
    features = [sign for (_, field, *_), sign in signs.items() if field in table.FEATURES]
    for text, found in (("Of {} comparisons, {} differ from zero", [*signs.values()]),
                        ("Of the {} of k-NN and probe, {} do", features)):
        assert text.format(len(found), sum(map(abs, found))) in " ".join(README.split())


def test_the_weights_of_a_row_are_drawn_after_each_epoch(tmp_path, capsys, few_images):
    pytest.importorskip("matplotlib")
    argv = options(tmp_path, "shapes", "--plant", "pasted", "--rows", "routed-L0.1")
    argv.draw = tmp_path / "a.png"
    control.main(argv)
    lines = [line for line in capsys.readouterr().out.splitlines() if "planted" in line]
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"]
    assert argv.draw.read_bytes()[:4] == b"\x89PNG" and not argv.out.exists()


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    table.draw(LINES, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_run_sh_makes_the_rows_of_the_page(tmp_path):
    log = tmp_path / "log"
    environment = stand_in(tmp_path, "python", f'printf "%s\\n" "$@" "" >> "{log}"')
    (tmp_path / "cifar10").mkdir()
    subprocess.run(["sh", HERE / "run.sh", tmp_path / "cifar10"], check=True, env=environment)
    made = set()
    for call in log.read_text().strip().split("\n\n"):
        script, *argv = call.split("\n")
        assert script == "experiments/control.py"
        args = control.parse_args(argv)
        teacher = "own" if args.teacher_seed is None else "one"
        made |= {(Path(args.data).name, args.plant, args.share, args.encoding, args.epochs, teacher,
                  args.model, row, seed) for row in args.rows for seed in args.seeds}
    keys = ("set", "plant", "share", "encoding", "epochs", "teacher", "model", "row", "seed")
    there = {tuple(line[key] for key in keys) for line in LINES}
    assert made == there


# ----------------------------------------------------------------- macs.py and COMMANDS.md

@pytest.mark.parametrize("experts, gigamacs", ((0, 17.45), (2, 11.93), (64, 13.86)))
def test_macs_are_those_of_table_6(experts, gigamacs, capsys):
    macs.main(macs.parse_args(["--experts", str(experts)]))
    assert f" {gigamacs} G MACs" in capsys.readouterr().out


def test_flops_are_those_of_a_plain_calculation():
    """Of ViT-B/16 without experts: 12 blocks at 197 tokens, and the patch embedding."""
    tokens, dim = 197, 768
    block = 12 * tokens * dim ** 2 + 2 * tokens ** 2 * dim
    forward = 2 * (12 * block + 196 * 768 * dim)
    # some versions of PyTorch do not count attention itself, which is 4 % here
    assert hours.encoder_flops(0, 224, train=False) == pytest.approx(forward, rel=0.05)
    assert 2.8 < hours.encoder_flops(0, 224, train=True) / forward <= 3.05
    # k-NN: both sets once, for each checkpoint
    both = 1_281_167 + 50_000
    assert hours.flops(["knn.py", "runs/experts=0/a.pt", "b.pt"]) == (
        2 * both * hours.encoder_flops(0, 224, train=False))
    with pytest.raises(SystemExit, match="estimated from their FLOPs"):
        hours.main(["--help"])


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """[(script, argv)] of each command that the COMMANDS prints, as bash reads them"""
    folder = tmp_path_factory.mktemp("printed")
    environment = stand_in(folder, "torchrun", f'printf "%s\\n" "$@" "" >> "{folder}/log"')
    stand_in(folder, "python", 'exec torchrun --nproc_per_node 1 "$@"')
    fences = re.findall(r"```sh\n(torchrun .*?)```", COMMANDS, re.DOTALL)
    (folder / "commands").write_text("\n".join(
        [*re.findall(r"`((?:torchrun|python) (?!experiments)[^`]*\.py[^`]*)`", COMMANDS), *fences]))
    logs = []
    for shell in ("bash", "sh"):
        (folder / "log").write_text("")
        subprocess.run([shell, "commands"], cwd=folder, check=True, env=environment)
        logs.append((folder / "log").read_text())
    assert logs[0] == logs[1], "bash and sh read a command differently"
    calls = [call.split("\n") for call in logs[0].strip().split("\n\n")]
    return [(call[2].removesuffix(".py"), call[3:]) for call in calls]


def test_each_row_has_one_command_that_its_script_takes(printed):
    rows = re.findall(r"^\| .* \| `(torchrun .*)` \|$", COMMANDS, re.MULTILINE)
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
    section, = re.findall("## The paper's tables and figures\n(.*?)\n## ", COMMANDS, re.DOTALL)
    index = dict(re.findall(r"^\| (\w+ A?\d) \| [^|]* \| ([^|]*) \|", section, re.MULTILINE))
    assert list(index) == [*(f"Table {i}" for i in "1 2 3 4 5 6 A1 A2 A3 A4 A5".split()),
                           *(f"Figure {i}" for i in "1 2 3 A1 A2 A3 A4".split())]
    for status in index.values():
        assert re.match("settings implemented, tested|MACs computed, tested|a (list|drawing)",
                        status), status


@pytest.mark.parametrize("page", (README, COMMANDS))
def test_lines_fit_on_100_columns_and_links_lead_somewhere(page):
    lines = page.splitlines()
    assert not [line for line in lines if len(line) > 100 and line[0] != "|"]
    anchors = {"#" + re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
               for line in lines if line.startswith("#")}
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert link in anchors or link.startswith("https:") or (HERE / link).exists(), link
