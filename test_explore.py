"""The tests, as statements about the method. CPU, no network: `python -m pytest -q`

Sections follow the files, from model.py to plot.py, then README. Those of experiments/ are in
experiments/test_experiments.py.
"""

import argparse
import ast
import colorsys
import contextlib
import errno
import functools
import gc
import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref
from collections import namedtuple
from pathlib import Path
from unittest.mock import MagicMock, Mock, call

os.environ["HF_HUB_OFFLINE"] = "1"        # a test that would download fails at once
os.environ["OMP_NUM_THREADS"] = "1"       # in processes that tests start, too

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

import balance
import checkpoint
import common
import data
import finetune
import knn
import linprobe
import losses
import model
import plot
import pretrain
import routing
import run
import segment
from shapes import Shapes
from teacher import build_teacher

for number in common.STOP_SIGNALS:        # nohup and a script's background jobs ignore some
    if signal.getsignal(number) == signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)
torch.set_num_threads(1)
gc.freeze()      # what the imports made is never garbage, so the collector need not look at it
HERE = Path(__file__).parent
README = (HERE / "README.md").read_text("utf-8")
RUNNING = (HERE / "RUNNING.md").read_text("utf-8")
CONTRIBUTING = (HERE / "CONTRIBUTING.md").read_text("utf-8")
SCRIPTS = {"pretrain": pretrain, "finetune": finetune, "linear": linprobe, "ep": linprobe,
           "segment": segment, "knn": knn, "routing": routing, "plot": plot}
QUICK = ["--amp", "off", "--workers", "0"]
TOY = ["--model", "vit_nano", "--image-size", "32", "--patch-size", "8", "--batch-size", "8",
       *QUICK]
rand = functools.partial(torch.rand, dtype=torch.float64)
randn = functools.partial(torch.randn, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    """Every test has the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def signals():
    """A run leaves its handlers where they are: the process ends after it."""
    handlers = [(number, signal.getsignal(number)) for number in common.STOP_SIGNALS]
    yield
    for number, handler in handlers:
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """ImageNet's layout: 4 classes of 8 training and 4 validation JPEGs of different sizes."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 8), ("val", 4)):
        for label, i in np.ndindex(4, count):
            folder = root / split / f"class_{label}"
            folder.mkdir(parents=True, exist_ok=True)
            picture = Shapes(split, 40 + 4 * i)[label + 10 * i][0].permute(1, 2, 0).numpy()
            Image.fromarray(picture[:, :36 + 2 * i]).save(folder / f"{i}.jpg", quality=95)
    return str(root)


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """ADE20K's layout: eight training and three validation photographs of 11 classes."""
    root = tmp_path_factory.mktemp("scenes")
    for split, name, count in (("train", "training", 8), ("val", "validation", 3)):
        shapes = Shapes(split, 72)
        for kind in ("images", "annotations"):
            (root / kind / name).mkdir(parents=True)
        for i in range(count):
            rows = slice(20, 50 + 2 * i)      # twice as wide as high
            picture = shapes[i][0].permute(1, 2, 0).numpy()[rows]
            Image.fromarray(picture).save(root / "images" / name / f"{i}.jpg", quality=95)
            annotation = shapes.annotation(i).numpy()[rows]
            Image.fromarray(annotation).save(root / "annotations" / name / f"{i}.png")
    return str(root)


def nano(**vit):
    return model.build_vit("vit_nano", **dict(image_size=32, patch_size=8) | vit)


SMALL_DECODER = dict(dim=64, depth=1, heads=2)
small_student = functools.partial(model.Explore, decoder=SMALL_DECODER)
small_decoder = functools.partial(pretrain.build_student, decoder=SMALL_DECODER)


def write_checkpoint(path, **vit):
    """A checkpoint of ours around a fresh encoder -> its path"""
    encoder = nano(**vit)
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    torch.save({"model": state, "encoder": encoder.config, "args": {}}, path)
    return str(path)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    torch.manual_seed(1)
    return write_checkpoint(tmp_path_factory.mktemp("teacher") / "teacher.pt", depth=1, dim=60)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    torch.manual_seed(2)
    return write_checkpoint(tmp_path_factory.mktemp("encoder") / "e2.pt", experts=2)


@pytest.fixture
def stage(photos, scenes, teacher, encoder, tmp_path):
    """stage(name, "--flags of one string", *words, out="run") -> a run's command line.

    It has eight steps, four an epoch.
    """
    epochs = ["--epochs", "2", "--warmup-epochs", "1", "--batch-size", "8", "--data", photos]
    iterations = ("--iterations 8 --warmup-iterations 1 --batch-size 4 --save-every 4 "
                  "--classes 11 --crop-size 32 --width 8").split()
    argv = {"pretrain": [*TOY, "--teacher", teacher, *epochs],
            "finetune": [encoder, *epochs, *QUICK],
            "linear": [encoder, *epochs, *QUICK],
            "ep": [encoder, *epochs, *QUICK, "--probe", "ep"],
            "segment": [encoder, "--data", scenes, *iterations, *QUICK],
            "knn": [encoder, "--data", photos, *QUICK]}

    def build(name, flags="", *words, out="run"):
        return [*argv[name], "--out", str(tmp_path / out), *flags.split(), *words]
    return build


def play(name, argv):
    """Runs the stage `name` of SCRIPTS on command-line flags, in this process.

    -> (what its main returns, the contents of last.pt, the lines of the log)
    """
    args = SCRIPTS[name].parse_args(argv)
    return SCRIPTS[name].main(args), *read_run(args.out)


def train(argv):
    """Pretrains in this process -> (last.pt, the log)"""
    return play("pretrain", argv)[1:]


def read_run(folder):
    lines = Path(folder, "log.jsonl").read_text().splitlines()
    last = torch.load(Path(folder, "last.pt"), weights_only=False)      # the faster way
    return last, list(map(json.loads, lines))


def spy(monkeypatch, owner, name):
    """-> a growing list of the calls of a function, which still does its work"""
    mock = Mock(wraps=getattr(owner, name))
    monkeypatch.setattr(owner, name, mock)
    return mock.call_args_list


# To import PyTorch and timm takes seconds. This Python does it once, and forks itself for each
# program that a test starts. It reads what to start, or what to wait for, and prints a number.
WARM = """
import gc, json, os, runpy, sys
import timm.data, torch, torchvision.transforms.v2, tqdm
gc.freeze()      # the collector would touch, and so copy, all of that in each process
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
        continue
    files = [os.open(name, os.O_WRONLY | os.O_CREAT) for name in job["files"]]
    if pid := os.fork():
        print(pid, flush=True)
        for file in files:
            os.close(file)
        continue
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = job["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    break
"""
Program = namedtuple("Program", "pid files living")


@functools.cache
def warm():
    return subprocess.Popen([sys.executable, "-c", WARM], text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, start_new_session=True)


def ask(**job):
    print(json.dumps(job), file=warm().stdin, flush=True)
    return int(warm().stdout.readline())


def start(script, *argv, folder=HERE, **variables):
    """Starts `python SCRIPT ARGV` in a session of its own."""
    files = tempfile.TemporaryDirectory()
    names = [f"{files.name}/{name}" for name in ("out", "error", "living")]
    os.mkfifo(names[2])      # the program and its children hold one end as long as they live
    living = os.open(names[2], os.O_RDONLY | os.O_NONBLOCK)
    pid = ask(files=names, argv=[str(Path(folder, script)), *map(str, argv)], folder=str(folder),
              environment=os.environ | variables)
    return Program(pid, files, living)


def finish(program):
    """Waits for a program and its children -> (exit code, standard output, standard error)"""
    ended, _, _ = select.select([program.living], [], [], 300)
    if not ended:
        os.killpg(program.pid, signal.SIGKILL)
    os.close(program.living)
    with program.files as folder:
        code = ask(wait=program.pid)
        return code, *(Path(folder, name).read_text("utf-8") for name in ("out", "error"))


def run_command(*argv, **kwargs):
    """Runs a command in a session of its own -> (exit code, standard output)"""
    process = subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, start_new_session=True,
                               **kwargs)
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):      # if nothing of it is left
            os.killpg(process.pid, signal.SIGTERM)
    return process.returncode, out


def loopback():
    """Whether processes of this machine can reach each other, as torchrun's have to."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
        return True
    return False


needs_loopback = pytest.mark.skipif(not loopback(), reason="no network interface is up")


def start_two(script, *argvs, machines=1, **variables):
    """Starts two processes of one group, with the variables that torchrun sets on one machine or
    on two.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables |= dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(free.getsockname()[1]))
    started = []
    for rank, argv in zip("01", argvs):
        group, local = (rank, "0") if machines == 2 else ("0", rank)
        ranks = dict(RANK=rank, GROUP_RANK=group, LOCAL_RANK=local)
        started.append(start(script, *argv, **ranks | variables))
    return started


def run_two(script, *argv):
    """Runs a script in two processes -> the standard output of both"""
    ends = list(map(finish, start_two(script, argv, argv)))
    assert [code for code, _, _ in ends] == [0, 0], "".join(error for _, _, error in ends)
    return "".join(out for _, out, _ in ends)


def refusal(capsys, name, *argv):
    """Runs a stage on flags that it must refuse -> its one line of error."""
    with pytest.raises(SystemExit) as stop:
        common.launch(SCRIPTS[name].main, SCRIPTS[name].parse_args(list(argv)))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return error.split("error: ", 1)[1]


def assert_same_bits(a, b):
    for part in ("model", "optimizer"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)


def normalized(images):
    return TF.normalize(images, model.IMAGENET_MEAN, model.IMAGENET_STD)


# ----------------------------------------------------------------------------- Soft-MoE

def test_soft_moe_is_equation_4_separate_mlps_between_dispatch_and_combine():
    moe = model.SoftMoE(7, 3, 11).double()
    moe.scale.data.fill_(2.5)
    nn.init.normal_(moe.b1)
    nn.init.normal_(moe.b2)
    x = randn(2, 5, 7)
    x[0, 1] *= 1e-6      # a cosine has no length
    y, (dispatch, combine) = moe(x)
    power = (2.5 * F.cosine_similarity(x[:, :, None], moe.phi.T, dim=3)).exp()      # [2, 5, 3]
    assert torch.allclose(dispatch, power / power.sum(1, keepdim=True), rtol=1e-10)
    assert torch.allclose(combine, power / power.sum(2, keepdim=True), rtol=1e-10)
    expected = 0
    for e in range(3):
        slot = (dispatch[:, :, e, None] * x).sum(1)
        output = F.gelu(slot @ moe.w1[e] + moe.b1[e]) @ moe.w2[e] + moe.b2[e]
        expected = expected + combine[:, :, e, None] * output[:, None]
    assert torch.allclose(y, expected, atol=1e-12)


def test_routing_stays_in_float32_under_autocast():
    moe = model.SoftMoE(64, 2, 128)
    x = torch.randn(2, 9, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, (dispatch, combine) = moe(x)
    plain = moe.route(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(dispatch, plain.dispatch)
    assert torch.equal(combine, plain.combine)


@pytest.mark.parametrize("precision", (torch.bfloat16, torch.float16))
def test_tokens_in_half_precision_are_routed_in_float32(precision):
    router = model.Router(64, 3)
    x = torch.randn(2, 9, 64).to(precision)
    routing = router.route(x)
    expected = router.route(x.float())
    for weights, exact in zip(routing, expected):
        assert weights.dtype == torch.float32
        assert torch.equal(weights, exact)


def test_experts_start_as_linear_layers():
    moe = model.SoftMoE(64, 4, 256)
    for weight, bound in ((moe.w1, 64 ** -0.5), (moe.w2, 256 ** -0.5), (moe.phi, 4 ** -0.5)):
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3 ** 0.5, rel=0.1)
    assert moe.scale.item() == 1
    assert not moe.b1.any() and not moe.b2.any()


def test_residual_projections_shrink_with_depth_and_layer_scale_starts_at_a_tenth():
    vit = model.build_vit("vit_tiny", image_size=32, experts=2)
    for depth, block in enumerate(vit.blocks, start=1):
        shrunk = 1 / (2 * depth) ** 0.5
        assert block.attn.proj.weight.std().item() == pytest.approx(0.02 * shrunk, rel=0.05)
        assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        if depth % 2 == 0:
            largest = block.mlp.w2.abs().max().item()
            assert largest == pytest.approx(768 ** -0.5 * shrunk, rel=0.01)
        else:
            assert block.mlp.fc2.weight.std().item() == pytest.approx(0.02 * shrunk, rel=0.05)
        assert (block.ls1.gamma == 0.1).all() and (block.ls2.gamma == 0.1).all()


def test_expert_dropout_drops_whole_experts_of_an_image_and_keeps_the_expectation():
    moe = model.SoftMoE(8, 2, 16, dropout=0.4).double()
    nn.init.normal_(moe.b2)
    x = randn(1, 3, 8).expand(4000, -1, -1)
    whole, _ = moe.eval()(x[:1])
    dropped, _ = moe.train()(x)
    # with two experts an image has one of four outputs: of none, of either, or of both
    assert len(dropped.flatten(1).round(decimals=9).unique(dim=0)) == 4
    assert (dropped == 0).all((1, 2)).double().mean().item() == pytest.approx(0.16, abs=0.03)
    assert torch.allclose(dropped.mean(0), whole[0], atol=0.1)


# ------------------------------------------------------------ encoder, student, decoder

def test_patches_are_dropped_or_replaced_around_the_position_embedding():
    """Sparse: each keeps its own position. Dense: a mask token has that of its patch."""
    vit = model.ViT(40, 8, dim=18, depth=0, heads=2).double()
    nn.init.normal_(vit.patch_embed.proj.bias)
    images = randn(2, 3, 40, 40)
    whole, _ = vit(images)
    patch = images[1, :, 8:16, 24:32]                               # row 1, column 3 of 5
    layer = vit.patch_embed.proj
    embedded = (layer.weight * patch).sum((1, 2, 3)) + layer.bias
    assert torch.allclose(whole[1, 1 + 8], vit.norm(embedded + vit.pos_embed[0, 1 + 8]))
    assert torch.allclose(whole[:, 0], vit.norm(vit.cls_token[0] + vit.pos_embed[:, 0]))

    ids_keep = torch.stack([torch.randperm(25)[:7] for _ in range(2)])
    sparse, _ = vit(images, ids_keep)
    for b in range(2):
        assert torch.equal(sparse[b], whole[b, [0, *(1 + ids_keep[b]).tolist()]])

    mask = torch.rand(2, 25) < 0.5
    mask_token = randn(1, 1, 18)
    dense, _ = vit(images, mask=mask, mask_token=mask_token)
    replaced = vit.norm(mask_token + vit.pos_embed[:, 1:])
    assert torch.allclose(dense[:, 1:], torch.where(mask[..., None], replaced, whole[:, 1:]))


@pytest.mark.parametrize("ratio, visible", ((0.4, 118), (0.006, 195), (0.999, 1)))
def test_the_student_sees_the_118_visible_patches_of_196(ratio, visible):
    """With other ratios, at least one and not all."""
    rng = np.random.default_rng(0)
    student = model.Explore(model.ViT(28, 2, dim=24, depth=1, heads=2), 8, mask_ratio=ratio)
    mask = torch.stack([torch.from_numpy(data.block_mask(rng, 14, ratio)) for _ in range(5)])
    pred = student(torch.rand(5, 3, 28, 28), mask)
    assert pred.ids_keep.shape == (5, visible) and pred.tokens.shape == (5, 1 + visible, 8)
    for ids, row in zip(pred.ids_keep, mask):
        assert ids.tolist() == (~row).nonzero()[:, 0].tolist()


def test_the_order_of_visible_patches_changes_nothing():
    """The paper shuffles them."""
    student = model.Explore(nano(experts=2), 8).double()
    images = randn(3, 3, 32, 32)
    mask = torch.arange(48).view(3, 16) % 16 >= 10
    pred = student(images, mask)
    order = torch.randperm(10)
    tokens, routing = student.encoder(images, pred.ids_keep[:, order])
    shuffled = model.Prediction(student.head(tokens), None, routing, None,
                                pred.ids_keep[:, order])
    assert torch.allclose(shuffled.tokens[:, 1:], pred.tokens[:, 1:][:, order])
    targets = randn(3, 17, 8)
    ours, regularizer, _ = losses.explore_losses(pred, targets, images, mask)
    theirs, other, _ = losses.explore_losses(shuffled, targets, images, mask)
    assert torch.allclose(ours, theirs) and torch.allclose(regularizer, other)


@pytest.mark.parametrize("dense", (False, True))
def test_the_student_never_sees_a_masked_patch(dense):
    student = small_student(nano(experts=2), 8, dense=dense, pixels=True)
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, :6] = mask[1, 5:11] = True
    images = torch.rand(2, 3, 32, 32)
    pred = student(images, mask)
    hidden = mask.view(2, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    for where, same in ((hidden, True), (~hidden, False)):
        other = student(torch.where(where, torch.rand(2, 3, 32, 32), images), mask)
        assert torch.equal(other.tokens, pred.tokens) == same
        assert torch.equal(other.pixels, pred.pixels) == same


@pytest.mark.parametrize("dense", (False, True))
def test_head_and_decoder_see_what_the_encoder_made_and_teach_it(dense):
    student = small_student(nano(experts=2), 8, dense=dense, pixels=True, loss_router=True)
    images = torch.rand(2, 3, 32, 32)
    mask = torch.arange(32).view(2, 16) % 16 >= 10
    pred = student(images, mask)
    tokens, _ = student.encoder(images, pred.ids_keep, mask if dense else None,
                                student.mask_token)
    assert torch.equal(pred.tokens, student.head(tokens))
    assert torch.equal(pred.pixels, student.decoder(tokens[:, 1:], pred.ids_keep, mask))
    assert all(map(torch.equal, pred.loss_routing, student.loss_router.route(tokens)))
    pred.pixels.sum().backward()
    assert student.encoder.patch_embed.proj.weight.grad.any()


def test_the_loss_router_teaches_the_encoder_too():
    student = model.Explore(nano(), 8, loss_router=True)
    pred = student(torch.rand(2, 3, 32, 32), torch.arange(32).view(2, 16) % 16 >= 10)
    pred.loss_routing.dispatch[:, 0, 0].sum().backward()
    assert student.encoder.blocks[0].attn.qkv.weight.grad.any()


def test_moe_blocks_may_be_given_in_any_order_and_twice():
    """The last one is that of the highest number, wherever it was given."""
    encoder = nano(experts=2, moe_blocks=[3, 0, 3, 2])
    assert encoder.moe_blocks == encoder.config["moe_blocks"] == [0, 2, 3]
    _, routed = encoder(torch.rand(2, 3, 32, 32))
    assert list(routed) == [0, 2, 3]
    pred = model.Prediction(None, None, routed, None, None)
    assert torch.equal(losses.stack_routings(pred, None)["dispatch"][0], routed[3].dispatch)
    routers = routing.find_routers(model.Explore(encoder, 5))
    assert routing.choose_block({"args": {}}, list(routers), None) == 3


def test_drop_path_rises_with_depth_drops_branches_and_keeps_the_expectation():
    vit = nano(drop_path=0.3)
    assert isinstance(vit.blocks[0].drop_path, nn.Identity)
    shares = [block.drop_path.p.item() for block in vit.blocks[1:]]
    assert shares == pytest.approx([0.1, 0.2, 0.3])
    assert not any("drop_path" in name for name in vit.state_dict())
    block = vit.blocks[3]
    kept = block.drop_path(torch.ones(4000, 2, 3))
    assert kept.unique().tolist() == pytest.approx([0, 1 / (1 - 0.3)])
    assert (kept == kept[:, :1, :1]).all()
    assert kept.mean().item() == pytest.approx(1, abs=0.05)
    x = torch.rand(2, 17, 96)
    block.drop_path.p.fill_(1 - 1e-7)
    assert torch.equal(block(x)[0], x)                  # both branches
    assert not torch.equal(block.eval()(x)[0], x)


@pytest.mark.parametrize("experts, millions", (
    (0, 85.8), (2, 114.2), (16, 510.9), (32, 964.3), (64, 1871.2)))
def test_the_vit_base_has_the_papers_size(experts, millions):
    with torch.device("meta"):
        vit = model.build_vit("vit_base", experts=experts)
    assert sum(p.numel() for p in vit.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    assert vit.moe_blocks == ([1, 3, 5, 7, 9, 11] if experts else [])


@pytest.mark.parametrize("name", ("tiny", "small", "base", "large"))
def test_models_have_the_tensors_and_heads_of_timms(name):
    import timm
    with torch.device("meta"):
        theirs = timm.create_model(f"vit_{name}_patch16_224", init_values=0.1, num_classes=0)
        ours = model.build_vit(f"vit_{name}")
    shapes, expected = ({key: x.shape for key, x in vit.state_dict().items()}
                        for vit in (ours, theirs))
    assert shapes == expected
    assert ours.blocks[0].attn.heads == theirs.blocks[0].attn.num_heads


def test_encoder_is_timms_both_ways():
    import timm
    theirs = timm.create_model("vit_base_patch16_224", init_values=0.1, num_classes=0, depth=3,
                               img_size=80)
    for p in theirs.eval().parameters():
        p.data.add_(0.02 * torch.randn_like(p))        # no bias is zero and no norm is one
    ours = model.build_vit("vit_base", depth=3, image_size=80).eval()
    images = torch.randn(2, 3, 80, 80)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert torch.allclose(ours(images)[0], theirs.forward_features(images), atol=1e-4)
        ours.blocks[1].attn.qkv.weight.mul_(1.1)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        assert torch.allclose(ours(images)[0], theirs.forward_features(images), atol=1e-4)


def test_the_decoder_puts_every_visible_token_back_where_it_came_from():
    encoder = model.ViT(32, 8, dim=192, depth=0, heads=2)
    decoder = model.PixelDecoder(encoder, dim=192, depth=0, heads=2)
    nn.init.eye_(decoder.embed.weight)                  # without blocks and norm, nothing changes
    nn.init.eye_(decoder.pixels.weight)
    decoder.norm = nn.Identity()
    nn.init.constant_(decoder.mask_token, -1)
    tags = torch.arange(16.0)[None, :, None].expand(3, 16, 192)      # a patch says its place
    mask = torch.stack([torch.randperm(16) for _ in range(3)]) >= 9
    ids_keep = torch.stack([(~row).nonzero()[torch.randperm(9), 0] for row in mask])
    expected = torch.where(mask[..., None], -1.0, tags) + decoder.pos_embed
    sparse = tags[torch.arange(3)[:, None], ids_keep]
    assert torch.equal(decoder(sparse, ids_keep, mask), expected)
    assert torch.equal(decoder(tags, None, mask), expected)


def test_the_decoder_has_8_blocks_of_width_512_without_experts_and_layer_scale():
    with torch.device("meta"):
        decoder = model.Explore(nano(experts=2), 8, dense=True, pixels=True).decoder
    assert len(decoder.blocks) == 8
    assert decoder.blocks[0].attn.heads == 16
    assert decoder.pos_embed.shape == (1, 16, 512)
    names = " ".join(decoder.state_dict())
    assert "phi" not in names and "ls1" not in names


def test_tokens_and_positions_start_at_0_02_and_mask_tokens_are_not_the_encoders():
    student = model.Explore(nano(dim=768, depth=1), 8, dense=True, pixels=True,
                            decoder=dict(dim=768, depth=0, heads=2))
    for token in (student.mask_token, student.decoder.mask_token, student.decoder.pos_embed,
                  student.encoder.cls_token, student.encoder.pos_embed, student.head.weight,
                  student.encoder.patch_embed.proj.weight):
        assert token.std().item() == pytest.approx(0.02, rel=0.1)
    assert not any("mask_token" in name for name in student.encoder.state_dict())


def test_files_to_copy_import_torch_alone_and_imports_run_downwards():
    imports = {}
    for path in HERE.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        names = [[alias.name for alias in node.names] if isinstance(node, ast.Import)
                 else [node.module] for node in nodes
                 if isinstance(node, (ast.Import, ast.ImportFrom))]
        imports[path.stem] = {name.split(".")[0] for name in itertools.chain(*names)}
    for name in ("model", "losses", "balance"):
        assert imports[name] <= {"torch", *sys.stdlib_module_names}, name
    stages = {"pretrain", "knn", "linprobe", "finetune", "segment", "routing"}
    order = ["shapes", "model", "losses", "balance", "checkpoint", "teacher", "common", "data",
             "run", *stages]
    for name in order[:-len(stages)]:
        assert not imports[name] & set(order[order.index(name):]), name
    for name in stages - {"linprobe", "segment"}:      # those are finetuning's loop
        assert not imports[name] & stages, name
    assert imports["linprobe"] & stages == imports["segment"] & stages == {"finetune"}


# -------------------------------------------------------------------- losses, Eq. 1 to 8

def test_token_loss_is_equation_1():
    pred = 2 * randn(3, 4, 192)
    target = 3 * randn(3, 4, 192) + 1
    target[0] *= 1e-3      # so small that the 1e-5 of the norm counts
    variance = target.var(-1, correction=0, keepdim=True)
    normed = (target - target.mean(-1, True)) / (variance + 1e-5).sqrt()
    distance = (pred - normed).abs()
    huber = torch.where(distance < 1, 0.5 * distance ** 2, distance - 0.5).mean(-1)
    assert torch.allclose(losses.token_loss(pred, target), huber)


def test_cls_loss_is_equation_2():
    pred = randn(4, 192)
    target = randn(4, 192)
    cosines = [(p @ t / (p @ p).sqrt() / (t @ t).sqrt()).item() for p, t in zip(pred, target)]
    expected = 1 - np.mean(cosines)
    assert losses.cls_loss(pred, target).item() == pytest.approx(expected, rel=1e-12)


def test_pixel_loss_is_the_mean_over_pixels_of_equation_3():
    pred = randn(5, 6, 192)
    images = rand(5, 3, 24, 16)
    images[0] *= 1e-2      # so dark that the 1e-6 counts
    for b, i in np.ndindex(5, 6):
        row, column = divmod(i, 2)
        patch = images[b, :, 8 * row:8 * row + 8, 8 * column:8 * column + 8].flatten()
        patch = (patch - patch.mean()) / (patch.var(correction=1) + 1e-6).sqrt()
        expected = ((pred[b, i] - patch) ** 2).mean()
        assert torch.allclose(losses.pixel_loss(pred, images)[b, i], expected)


def test_routed_losses_teach_the_router_to_leave_hard_patches():
    weight = torch.full((1, 3), 1 / 3, requires_grad=True)
    losses.routed_mean(torch.tensor([[0.1, 0.5, 0.9]]), weight).backward()
    assert weight.grad[0, 0] < 0 < weight.grad[0, 2]      # descent raises the easy one's weight
    assert abs(weight.grad[0, 1]) < 1e-6


def test_the_entropy_of_uniform_dispatch_is_the_logarithm_of_119():
    uniform = torch.full((1, 119, 1), 1 / 119)
    assert losses.dispatch_entropy(uniform).item() == pytest.approx(4.779, abs=5e-4)


def test_the_entropy_of_one_token_is_0_and_has_a_gradient():
    point = F.one_hot(torch.tensor([[3]]), 119).float().transpose(1, 2).requires_grad_()
    entropy = losses.dispatch_entropy(point).sum()
    entropy.backward()
    assert entropy.item() == 0
    assert point.grad.isfinite().all()


def plain_losses(pred, targets, images, mask, objectives, loss_block, loss_weights="dispatch",
                 detach=False, lambdas=(), entropy_on="dispatch", importance_weight=0.0):
    """Eq. 5 to 8, image by image -> (losses [K] without their global weights, regularizer, the
    standard deviation of each patch loss)
    """
    routed = [pred.routing[block] for block in loss_block]
    sparse = pred.ids_keep is not None
    found = []
    spread = {}
    for name in objectives:
        per_image = []
        stds = []
        for b in range(len(mask)):
            if name == "cls":
                per_image.append(losses.cls_loss(pred.tokens[b, :1], targets[b, :1]))
                continue
            if name == "token":
                kept = pred.ids_keep[b] if sparse else torch.arange(len(mask[b]))
                loss = losses.token_loss(pred.tokens[b, 1:], targets[b, 1 + kept])
                chosen = torch.ones(len(kept)).bool() if sparse else mask[b]
            else:
                loss = losses.pixel_loss(pred.pixels[b], images[b:b + 1])[0]
                chosen = mask[b]
            expert = 1 if name == "pixel" else 0
            weight = torch.ones_like(loss)
            if loss_weights == "softmin":
                weight = (-loss.detach() / lambdas[expert]).exp()
            elif routed and loss_weights != "uniform" and not (sparse and name == "pixel"):
                weight = sum(getattr(r, loss_weights)[b, 1:, expert] for r in routed)
                weight = weight / len(routed)
            if detach:
                weight = weight.detach()
            total = chosen.sum() if loss_weights == "combine" else weight[chosen].sum()
            per_image.append((weight * loss)[chosen].sum() / total)
            stds.append(loss[chosen].std(correction=0))
        found.append(sum(per_image) / len(per_image))
        if stds:
            spread[name] = sum(stds) / len(stds)
    regularizer = torch.zeros(())
    for r in routed:
        p = getattr(r, entropy_on)
        negentropy = (p * p.log()).sum((0, 1)) / len(mask)
        for each, h in zip(lambdas, negentropy):      # softmin has two lambdas with one expert, too
            regularizer = regularizer + each * h / len(routed)
        usage = r.combine.sum((0, 1))
        importance = usage.var(correction=0) / usage.mean() ** 2
        regularizer = regularizer + importance_weight * importance / len(routed)
    return torch.stack(found), regularizer, spread


Case = namedtuple("Case", "pred targets images mask routers")      # a random prediction


def make_case(dense=False, experts=3):
    """4 images of 25 patches, 14 of which are visible; routers of blocks 0 and 3.

    In dense encoding, where the losses can take it, each image has another number of them.
    """
    routers = {block: model.Router(7, experts).double() for block in (0, 3)}
    for router in routers.values():
        router.scale.data.fill_(3)
    visible = torch.tensor([[4], [24], [11], [17]]) if dense else 14
    mask = torch.stack([torch.randperm(25) for _ in range(4)]) >= visible
    ids_keep = None
    if not dense:
        ids_keep = torch.stack([(~row).nonzero()[torch.randperm(14), 0] for row in mask])
    tokens = 26 if dense else 15
    routed = {block: router.route(randn(4, tokens, 7)) for block, router in routers.items()}
    hard = torch.arange(1, 5)[:, None, None]      # unequal losses: of images, and of patches
    pixels = torch.randn(4, 25, 192) * (hard + 2 * torch.rand(4, 25, 1))
    pred = model.Prediction(hard * torch.randn(4, tokens, 9), pixels, routed, None, ids_keep)
    return Case(pred, torch.randn(4, 26, 9), torch.rand(4, 3, 40, 40), mask, routers)


def couple(case, objectives=("token", "cls"), lambdas=0.0, loss_block=(3,), **keywords):
    """-> (the sum of losses and regularizers, metrics)"""
    values, regularizer, metrics = losses.explore_losses(
        *case[:4], objectives=objectives, loss_block=loss_block,
        lambdas=lambdas, **keywords)
    return values.sum() + regularizer, metrics


@pytest.mark.parametrize("dense, objectives, keywords", (
    (False, ("token", "cls", "pixel"),
     dict(lambdas=(0.5, 2.0, 0.1), importance_weight=300.0, loss_block=(0, 3))),
    (True, ("token", "cls", "pixel"),
     dict(lambdas=(1.0, 2.0, 0.2), entropy_on="combine", loss_block=(0, 3))),
    (True, ("token", "pixel"),
     dict(loss_weights="combine", lambdas=(0.0, 1.0, 0.3), loss_block=(0, 3))),
    (True, ("cls", "pixel"), dict(loss_weights="uniform", lambdas=(1.0, 1.0, 2.0))),
    (False, ("token", "cls", "pixel"), dict(loss_weights="softmin", lambdas=(0.05, 0.4, 3.0))),
    (True, ("pixel", "token"),
     dict(loss_weights="softmin", lambdas=(0.05, 0.4, 3.0), loss_block=(0, 3)))))
def test_explore_losses_are_equation_8_and_their_metrics(dense, objectives, keywords):
    """Their gradients: see the plain loop of pretraining."""
    case = make_case(dense)
    keywords = dict(loss_block=(3,)) | keywords
    expected, negentropy, spread = plain_losses(*case[:4], objectives, **keywords)
    plain, _, _ = plain_losses(*case[:4], objectives, loss_block=())
    keywords["lambdas"] = torch.tensor(keywords["lambdas"])
    values, regularizer, metrics = losses.explore_losses(*case[:4], objectives=objectives,
                                                         **keywords)
    assert torch.allclose(values.double(), expected.double(), rtol=1e-5)
    assert regularizer.item() == pytest.approx(negentropy.item(), rel=1e-5)
    kind = keywords.get("loss_weights", "dispatch")
    even = 1 / 3 if kind == "combine" else 1
    for name, value, mean in zip(objectives, values, plain):
        assert metrics[name] == value and not metrics[name].requires_grad
        weighted = kind != "uniform" and (
            name == "token" or name == "pixel" and (dense or kind == "softmin"))
        assert weighted == (f"{name}_ratio" in metrics) == (f"{name}_std" in metrics)
        if weighted:
            assert abs(value - mean * even) > 1e-3 * mean      # the weights are not even
            assert metrics[f"{name}_unweighted"].item() == pytest.approx(mean.item(), rel=1e-5)
            ratio = (value / mean / even).item()
            assert metrics[f"{name}_ratio"].item() == pytest.approx(ratio, rel=1e-5)
            assert metrics[f"{name}_std"].item() == pytest.approx(spread[name].item(), rel=1e-5)
    dispatch = torch.stack([case.pred.routing[b].dispatch for b in keywords["loss_block"]])
    patches = dispatch.mean(0)[:, 1:]
    cv = (patches.std(1, correction=0) / patches.mean(1)).mean(0)
    assert torch.allclose(metrics["cls_share"], dispatch[:, :, 0].mean((0, 1)))
    assert torch.allclose(metrics["dispatch_cv"], cv)
    entropies = torch.stack([losses.dispatch_entropy(each) for each in dispatch])
    assert torch.allclose(metrics["entropy"], entropies.mean(0))


@pytest.mark.parametrize("keywords", (
    dict(detach=True), dict(loss_weights="uniform"), dict(loss_weights="softmin")), ids=str)
def test_the_router_has_no_gradient_but_the_entropys_unless_it_weights_the_loss(keywords):
    for entropy in (1e-9, 5.0):
        case = make_case()
        total, _ = couple(case, lambdas=entropy, **keywords)
        total.backward()
        assert (case.routers[3].phi.grad.abs().max() > 1e-6) == (entropy == 5)


@pytest.mark.parametrize("kind, experts", (("dispatch", 3), ("softmin", 3), ("softmin", 1)))
def test_one_lambda_counts_for_all_experts_and_softmin(kind, experts):
    case = make_case(dense=True, experts=experts)
    objectives = ("token", "pixel")
    values, regularizer, _ = losses.explore_losses(*case[:4], objectives=objectives, lambdas=0.7,
                                                   loss_weights=kind)
    expected, negentropy, _ = plain_losses(*case[:4], objectives, (3,), kind,
                                           lambdas=[0.7] * max(2, experts))
    assert torch.allclose(values.double(), expected.double(), rtol=1e-5)
    assert regularizer.item() == pytest.approx(negentropy.item(), rel=1e-5)


@pytest.mark.parametrize("dense", (False, True))
def test_softmin_needs_no_router(dense):
    case = make_case(dense)
    alone = case._replace(pred=case.pred._replace(routing={}))
    keywords = dict(objectives=("token", "pixel"), loss_weights="softmin",
                    lambdas=0.2)
    values, regularizer, metrics = losses.explore_losses(*alone[:4], **keywords)
    expected, _, _ = losses.explore_losses(*case[:4], **keywords)
    assert torch.equal(values, expected)
    assert regularizer == 0 and "entropy" not in metrics and "token_ratio" in metrics


def test_softmin_weights_have_the_gradient_of_the_tilted_loss():
    """-lambda log mean exp(-loss / lambda) over the selected patches, a mean over images."""
    loss = (3 * rand(5, 13)).requires_grad_()
    selected = (rand(5, 13) < 0.6).double()
    weight = losses.softmin_weights(loss, selected, 0.3)
    assert not weight.requires_grad
    found, = torch.autograd.grad(losses.routed_mean(loss, weight * selected), loss)
    tilted = [-0.3 * (-row[chosen > 0] / 0.3).exp().mean().log()
              for row, chosen in zip(loss, selected)]
    expected, = torch.autograd.grad(sum(tilted) / 5, loss)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    assert (found > 0).sum() == selected.sum()


def test_a_free_router_that_minimizes_equations_5_and_7_arrives_at_softmin_weights():
    loss = rand(3, 11)
    logits = torch.zeros(3, 11, 1, dtype=torch.float64, requires_grad=True)
    for _ in range(2000):
        dispatch = logits.softmax(1)      # of one expert, without [CLS]
        total = losses.routed_mean(loss, losses.patch_weights(dispatch, 0, prefix=0))
        total = total - 0.2 * losses.dispatch_entropy(dispatch).sum()
        gradient, = torch.autograd.grad(total, logits)
        logits.data -= 30 * gradient
    weight = losses.softmin_weights(loss, torch.ones_like(loss), 0.2)
    expected = weight / weight.sum(1, keepdim=True)
    assert expected.max() > 3 * expected.min()
    assert torch.allclose(dispatch[..., 0], expected, rtol=1e-6)


def test_free_weights_vary_by_v_and_more_where_the_entropy_counts_tokens_without_a_loss():
    """std / V as lambda: a variation of V in sparse encoding, and above V / 0.4 in dense."""
    loss, aim = rand(3, 50), 0.1
    lambda_ = losses.patch_std(loss, torch.ones_like(loss)) / aim
    found = {}
    for other in (1, 76):      # [CLS] alone, or [CLS] and 75 visible patches, of 126 patches
        logits = torch.zeros(3, other + 50, 1, dtype=torch.float64, requires_grad=True)
        for _ in range(4000):
            dispatch = logits.softmax(1)
            total = losses.routed_mean(loss, losses.patch_weights(dispatch, 0, prefix=other))
            total = total - lambda_ * losses.dispatch_entropy(dispatch).sum()
            gradient, = torch.autograd.grad(total, logits)
            logits.data -= 20 * gradient
        found[other] = losses.dispatch_cv(dispatch[:, other:]).item()
    assert found[1] == pytest.approx(aim, rel=0.1)
    assert found[76] > aim * 126 / 50


def test_softmin_weights_are_even_at_a_huge_lambda_and_one_patch_at_a_tiny_one():
    loss = torch.rand(4, 9) + 7
    selected = torch.ones(4, 9)
    selected[:, 0] = 0
    loss[:, 0] = 1.0      # the smallest does not count
    even = losses.softmin_weights(loss, selected, 1e9)
    assert torch.equal(even, selected)
    for tiny in (1e-9, torch.tensor(torch.finfo(torch.float32).tiny)):
        one = losses.softmin_weights(loss, selected, tiny)
        assert torch.equal(one, F.one_hot(loss[:, 1:].argmin(1) + 1, 9).float())
    assert torch.equal(losses.softmin_weights(loss, 0 * selected, 0.1), 0 * selected)


def test_routed_mean_takes_a_mask():
    loss = rand(3, 7)
    mask = rand(3, 7) < 0.5
    assert losses.routed_mean(loss, mask) == losses.routed_mean(loss, mask.double())


def test_losses_read_foreign_routings_by_name():
    case = make_case()
    names = namedtuple("Foreign", "combine dispatch")      # in another order
    foreign = {block: names(r.combine, r.dispatch) for block, r in case.pred.routing.items()}
    foreign = case._replace(pred=case.pred._replace(routing=foreign))
    assert couple(foreign, lambdas=1.0)[0] == couple(case, lambdas=1.0)[0]


def test_the_default_loss_block_is_the_loss_router_else_the_last_and_objectives_keep_their_order():
    case = make_case()
    first, last, default = (couple(case, loss_block=block)[0] for block in (0, 3, None))
    assert first != last == default
    with_router = case.pred._replace(loss_routing=case.pred.routing[0])
    assert couple(case._replace(pred=with_router), loss_block=None)[0] == first
    _, papers, _ = losses.explore_losses(*case[:4])
    assert papers == losses.explore_losses(*case[:4], lambdas=5.0)[1]
    reverse, _, _ = losses.explore_losses(*case[:4], objectives=("cls", "token"))
    assert torch.equal(reverse, losses.explore_losses(*case[:4])[0].flip(0))


def test_losses_refuse_targets_with_registers_and_unknown_words():
    case = make_case()
    registers = case._replace(targets=torch.cat([case.targets, case.targets[:, :4]], dim=1))
    with pytest.raises(ValueError, match="targets have 30 tokens, but .* 25 patches need 26"):
        couple(registers)
    with pytest.raises(KeyError, match="CLS"):
        couple(case, ("token", "CLS"))
    with pytest.raises(KeyError, match="dipsatch"):
        couple(case, loss_weights="dipsatch")


@pytest.mark.parametrize("prefix", (0, 1, 5))
def test_patch_weights_leave_out_the_tokens_before_the_patches(prefix):
    """None, [CLS], or [CLS] and four registers."""
    dispatch = rand(2, 9, 3)
    assert torch.equal(losses.patch_weights(dispatch, 2, prefix=prefix), dispatch[:, prefix:, 2])
    assert torch.equal(losses.patch_weights(dispatch, 0), dispatch[:, 1:, 0])


def test_an_image_whose_weights_all_underflow_counts_as_if_unweighted():
    case = make_case()
    dispatch = torch.zeros(4, 15, 3)
    dispatch[:, 0] = 1
    case.pred.routing[3] = model.Routing(dispatch.requires_grad_(), dispatch)
    total, metrics = couple(case, ("token",))
    total.backward()
    unweighted = metrics["token_unweighted"].item()
    assert metrics["token"].item() == pytest.approx(unweighted, rel=1e-5)
    assert dispatch.grad.isfinite().all()


# ------------------------------------------------------ balance: the paper's baselines, lambda

def gradnorm_weights(*steps, scale=1.0, alpha=1.0):
    """GradNorm's weights after steps, each (the losses [K], their gradients [K, P])."""
    shared = nn.ParameterList([torch.zeros(len(steps[0][1][0]))])
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    gradnorm = balance.GradNorm(torch.ones(len(steps[0][0])), shared, alpha, 0.01, scaler)
    for values, gradients in steps:
        gradnorm.observe(torch.tensor(values) + torch.tensor(gradients) @ shared[0])
        gradnorm.update()
    assert gradnorm.state_dict().keys() == {"weights", "first"}      # what resuming needs
    return gradnorm(0).tolist()


EVEN = [[1.0], [1.0]]      # gradients
ONES = ([1.0, 1.0], EVEN)
LAGS = ([0.9, 0.1], EVEN)      # the first has hardly fallen


@pytest.mark.parametrize("alpha", (0.0, 0.5, 2.0))
def test_gradnorm_is_its_papers_algorithm(alpha):
    """Of three objectives, so often that each weight rises and falls, and one is at its limit."""
    rng = np.random.default_rng(0)
    steps = [(rng.uniform(0.2, 2, 3), rng.normal(size=(3, 5)) * [[1], [2], [0.5]])
             for _ in range(60)]
    steps.append((steps[0][0], steps[0][1] * [[1], [500], [1]]))
    first = steps[0][0]
    weights = np.ones(3)
    signs = []
    for i, (values, gradients) in enumerate(steps, start=1):
        norms = np.linalg.norm(gradients, axis=1)
        rate = values / first
        target = np.mean(weights * norms) * (rate / rate.mean()) ** alpha
        signs.append(np.sign(weights * norms - target))
        weights = np.maximum(weights - 0.01 * signs[-1] * norms, 1e-3)
        weights = weights / weights.sum() * 3
        if i in (1, 20, 60, 61):
            found = gradnorm_weights(*((x.tolist(), g.tolist()) for x, g in steps[:i]),
                                     alpha=alpha)
            assert found == pytest.approx(weights, rel=1e-4)
    assert (abs(np.sum(signs, 0)) < 55).all() and weights.min() < 2e-3


def test_gradnorm_helps_the_objective_that_lags_whatever_the_scale_of_fp16():
    first, second = gradnorm_weights(ONES, LAGS)
    assert first > 1 > second
    assert gradnorm_weights(ONES, LAGS, scale=1024.0) == [first, second]


def test_gradnorm_sees_gradients_that_would_be_zero_in_fp16():
    """Below 2 ** -25, unless they are scaled; what it keeps has no scale."""
    tiny = torch.tensor([[3.0, 5.0, 0.0], [-7.0, 1.0, 2.0]]) * 2.0 ** -30
    assert not tiny.half().any()
    shared = nn.ParameterList([torch.zeros(3)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
    gradnorm = balance.GradNorm(torch.ones(2), shared, 1.0, 0.01, scaler)
    values = torch.tensor([2.0, 11.0])
    gradnorm.observe(values + tiny @ shared[0].half().float())      # its gradient is in FP16
    assert torch.equal(gradnorm.observed[0], torch.cat([values[:, None], tiny], 1))


def test_gradnorm_survives_numbers_that_are_not_finite():
    wrong = ([math.nan, 0.1], [[1.0], [math.inf]])
    assert gradnorm_weights(ONES, LAGS, wrong) == gradnorm_weights(ONES, LAGS)
    late = gradnorm_weights(([math.nan, 1.0], EVEN), ([4.0, 1.0], EVEN), ([2.0, 1.0], EVEN))
    assert late[0] < 1 < late[1]      # what is not finite is no first loss


def follow(*stds, variation=0.1, follows=("token", "pixel", "token", "token"), times_w=True):
    """-> lambda of each expert after steps with these stds (of token, pixel); w is 2, 9, 3"""
    lambdas = balance.Lambda([5.0, 4.0], list(follows), ["token", "cls", "pixel"], variation,
                             times_w)
    for token, pixel in stds:
        for share in (0.4, 1.6):      # of two micro-batches
            lambdas.observe({"token_std": torch.tensor(float(token * share)), "other": None,
                             "pixel_std": torch.tensor(float(pixel * share))})
        lambdas.update()
    return lambdas(torch.tensor([2.0, 9.0, 3.0])).tolist()


def test_lambda_follows_the_running_mean_of_the_losses_standard_deviation():
    mean = np.zeros(2)      # over ten steps
    stds = np.random.default_rng(0).random((25, 2))
    for step, std in enumerate(stds, start=1):
        mean += max(0.1, 1 / step) * (std - mean)      # the plain mean of the first ten
        if step in (1, 2, 10, 11, 25):
            token, pixel = mean / 0.1
            found = follow(*stds[:step])
            assert found == pytest.approx([2 * token, 3 * pixel, 2 * token, 2 * token], rel=1e-5)
            found = follow(*stds[:step], times_w=False, variation=0.4)
            assert found == pytest.approx([token / 4, pixel / 4, token / 4, token / 4], rel=1e-5)


def test_lambda_is_the_entropy_weight_before_the_first_finite_step_and_without_variation():
    assert follow() == [5, 4, 4, 4]
    assert follow((math.nan, 0.1), (0.1, math.inf)) == [5, 4, 4, 4]
    assert follow((0.3, 0.1), variation=None) == [5, 4, 4, 4]
    assert follow((0.3, 0.1), (math.nan, 0.1), (0.5, 0.2)) == follow((0.3, 0.1), (0.5, 0.2))
    assert 0 < follow((0.0, 0.0))[0] < 1e-30


# ------------------------------------------------------ checkpoint: other people's weights

def timm_vit(**kwargs):
    """A timm ViT of one block; its state dict has timm's names."""
    from timm.models import VisionTransformer
    return VisionTransformer(**dict(img_size=32, patch_size=16, embed_dim=192, depth=1,
                                    num_heads=3, num_classes=0) | kwargs).eval()


@pytest.mark.parametrize("scale, wrap, zipped", (
    (0.1, lambda state: state, False),
    (None, lambda state: {"model": state, "args": argparse.Namespace(lr=1)}, True),
    (None, lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}}, True)))
def test_plain_vit_state_dicts_load(tmp_path, scale, wrap, zipped):
    theirs = timm_vit(img_size=80, depth=2, num_classes=7, init_values=scale)
    state = wrap({**theirs.state_dict(), "decoder_pos_embed": torch.zeros(1)})
    torch.save(state, tmp_path / "timm.pt", _use_new_zipfile_serialization=zipped)
    encoder = checkpoint.load_encoder(tmp_path / "timm.pt").eval()
    images = torch.rand(1, 3, 80, 80)
    assert torch.allclose(encoder(images)[0], theirs.forward_features(images), atol=1e-4)


@pytest.mark.parametrize("width, heads, said", (
    (192, 3, False), (384, 6, False), (512, 8, False), (768, 12, False), (1024, 16, False),
    (1280, 16, False), (128, 4, True), (192, 4, True)))
def test_heads_are_those_of_the_width_unless_the_file_says_them(tmp_path, width, heads, said):
    """As in DeiT, ViT-L and MAE's ViT-H."""
    theirs = timm_vit(embed_dim=width, num_heads=heads)
    path = tmp_path / "timm.pt"
    state = theirs.state_dict()
    torch.save({"model": state, "heads": heads} if said else state, path)
    ours = checkpoint.load_encoder(path).eval()
    images = torch.rand(1, 3, 32, 32)
    assert torch.allclose(ours(images)[0], theirs.forward_features(images), atol=1e-4)


@pytest.mark.parametrize("said, assumed", (
    ({}, "assumed 3 attention heads, ImageNet's mean, ImageNet's std."),
    ({"heads": 3}, "assumed ImageNet's mean, ImageNet's std."),
    ({"heads": 3, "mean": (0.5, 0.5, 0.5)}, "assumed ImageNet's std."),
    ({"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}, "assumed 3 attention heads."),
    ({"heads": 3, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}, None)))
def test_what_a_file_does_not_say_is_assumed_and_printed_in_one_line(tmp_path, monkeypatch, said,
                                                                     assumed, capsys):
    path = tmp_path / "timm.pt"
    torch.save({"model": nano(dim=192).state_dict()} | said, path)
    checkpoint.load_encoder(path)
    how = ("If that is wrong, save the file as {'model': state_dict, 'heads': NUMBER, "
           "'mean': (R, G, B), 'std': (R, G, B)}.")
    expected = [f"{path}: {assumed} {how}"] if assumed else []
    assert capsys.readouterr().out.splitlines() == expected
    monkeypatch.setenv("RANK", "1")
    checkpoint.load_encoder(path)
    assert not capsys.readouterr().out


@pytest.fixture(params=(None, dict(mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28))),
                ids=("its own", "other"))
def other_normalization(request, tmp_path):
    """Weights for another normalization than ImageNet's, in float64, where rounding is small.

    -> (their file, which says the normalization, images, timm's features of these)
    """
    import timm
    request.addfinalizer(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    theirs = timm.create_model("vit_tiny_patch16_224", pretrained_cfg_overlay=request.param,
                               img_size=80, depth=2).eval()
    config = timm.data.resolve_model_data_config(theirs)
    path = str(tmp_path / "timm.pt")
    torch.save({"model": theirs.state_dict(), "heads": 3, "mean": config["mean"],
                "std": config["std"]}, path)
    images = rand(1, 3, 80, 80)
    with torch.no_grad():
        features = theirs.forward_features(TF.normalize(images, config["mean"], config["std"]))
    return path, images, features


def test_weights_for_another_normalization_take_imagenets(other_normalization):
    path, images, expected = other_normalization
    encoder = checkpoint.load_encoder(path).eval()
    assert torch.allclose(encoder(normalized(images))[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", (tuple, list), ids=("tuple", "list"))
def test_weights_for_imagenets_normalization_keep_their_bits(tmp_path, kind):
    state = nano(dim=192).state_dict()
    nn.init.normal_(state["patch_embed.proj.bias"])
    torch.save({"model": state, "mean": kind(model.IMAGENET_MEAN), "std": kind(model.IMAGENET_STD)},
               tmp_path / "x.pt")
    loaded = checkpoint.load_encoder(tmp_path / "x.pt").patch_embed.proj
    assert torch.equal(loaded.weight, state["patch_embed.proj.weight"])
    assert torch.equal(loaded.bias, state["patch_embed.proj.bias"])


@pytest.mark.parametrize("name", ("mean", "std"))
def test_weights_that_share_one_half_of_imagenets_normalization_take_the_other(tmp_path, name):
    """MEAN alone differs, or STD alone."""
    other = {"mean": (0.0, 1.0, 0.3), "std": (1.0, 0.4, 0.3)}[name]      # up to the limits
    said = {"mean": model.IMAGENET_MEAN, "std": model.IMAGENET_STD} | {name: other}
    theirs = nano(dim=192).eval()
    torch.save({"model": theirs.state_dict(), "heads": 3} | said, tmp_path / "x.pt")
    images = torch.rand(2, 3, 32, 32)
    expected, _ = theirs(TF.normalize(images, said["mean"], said["std"]))
    found, _ = checkpoint.load_encoder(tmp_path / "x.pt").eval()(normalized(images))
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_normalization_is_folded_in_float64_and_rounded_once(tmp_path):
    state = nano(dim=192).to(torch.bfloat16).state_dict()
    torch.save({"model": state, "mean": [0.5, 0.4, 0.3], "std": [0.5, 0.6, 0.7]},
               tmp_path / "x.pt")
    loaded = checkpoint.load_checkpoint(tmp_path / "x.pt")["model"]
    weight = state["patch_embed.proj.weight"]
    exact = weight.double().clone()
    for channel, (ours, theirs) in enumerate(zip(model.IMAGENET_STD, (0.5, 0.6, 0.7))):
        exact[:, channel] *= ours / theirs
    folded = loaded["encoder.patch_embed.proj.weight"]
    assert folded.dtype == loaded["encoder.patch_embed.proj.bias"].dtype == torch.bfloat16
    assert torch.equal(folded, exact.to(torch.bfloat16))


def test_heads_and_decoders_are_left_out(tmp_path):
    state = model.build_vit("vit_tiny", image_size=32).state_dict()
    others = ("cls_head.bias fc_norm.bias decoder_pos_embed mask_token pre_logits.x predictor.x "
              "projector.x").split()
    torch.save(state | dict.fromkeys(others, torch.zeros(1)), tmp_path / "x.pt")
    assert checkpoint.load_encoder(tmp_path / "x.pt").state_dict().keys() == state.keys()


@pytest.mark.parametrize("prefix", ("", "module."))
def test_checkpoints_of_the_authors_release_load(tmp_path, prefix):
    encoder = model.ViT(32, 8, dim=192, depth=4, heads=3, experts=3, moe_blocks=[0, 2]).eval()
    state = {f"{prefix}teacher.cls_token": torch.zeros(1)}
    for name, value in encoder.state_dict().items():                     # in the release's words
        value.add_(0.05 * torch.randn_like(value))
        name = prefix + "student." + re.sub(r"ls([12])\.gamma", r"gamma_\1", name)
        if name.endswith("qkv.bias"):
            value[192:384] = 0                                           # its keys have no bias
            stem = name.removesuffix("qkv.bias")
            state[f"{stem}q_bias"], _, state[f"{stem}v_bias"] = value.chunk(3)
        elif found := re.fullmatch(r"(.*mlp\.)([wb])([12])", name):
            kind = "weight" if found[2] == "w" else "bias"
            for j, part in enumerate(value):
                part = part.T.contiguous() if kind == "weight" else part
                state[f"{found[1]}experts.{j}.fc{found[3]}.{kind}"] = part
        elif name.endswith(("mlp.phi", "mlp.scale")):                    # a dimension for slots
            state[name] = value[..., None]
        else:
            state[name] = value
    torch.save({"model": state, "config": {}}, tmp_path / "release.pt")
    loaded = checkpoint.load_encoder(tmp_path / "release.pt").eval()
    images = torch.rand(2, 3, 32, 32)
    assert torch.allclose(loaded(images)[0], encoder(images)[0], atol=1e-6)
    assert loaded.moe_blocks == [0, 2]


def test_timms_safetensors_load(tmp_path):
    from safetensors.torch import save_file
    theirs = timm_vit()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    images = torch.rand(1, 3, 32, 32)
    ours = checkpoint.load_encoder(tmp_path / "model.safetensors").eval()
    assert torch.allclose(ours(images)[0], theirs.forward_features(images), atol=1e-4)


def test_openais_archives_are_refused_with_the_line_that_converts_them(tmp_path):
    class Archive(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("input_resolution", torch.tensor(224))
            self.logit_scale = nn.Parameter(torch.tensor(4.6))
            self.weight = nn.Parameter(torch.rand(2, 3))

        def forward(self, x):
            return x
    file = tmp_path / "ViT-B-16.pt"
    torch.jit.script(Archive()).save(file)
    for load in (lambda: checkpoint.load_encoder(file),
                 lambda: build_teacher(f"ViT-B-16-quickgelu/{file}", 14)):
        with pytest.raises(checkpoint.LoadError, match="TorchScript archive") as caught:
            load()
    code = str(caught.value).split("save its weights with ")[1]
    new = tmp_path / "new.pt"
    exec(code.replace("NEW_FILE", "new").replace("FILE", "str(file)"),
         {"torch": torch, "new": new, "file": file})
    assert torch.load(new).keys() == {"logit_scale", "weight"}      # what open_clip expects


BIAS = "blocks.3.norm1.bias"
PATCHES = "patch_embed.proj.weight"


@pytest.mark.parametrize("content, expected", (
    (lambda vit: None, "x.pt: No such file"),
    (lambda vit: [1, 2], "is neither an ExPLoRe checkpoint"),
    (lambda vit: {"weight": torch.zeros(1)}, "timm-style ViT ('pos_embed')"),
    (lambda vit: {name: x for name, x in vit.items() if name != BIAS}, BIAS),
    (lambda vit: vit | {BIAS: torch.zeros(3)}, BIAS),
    (lambda vit: vit | {"reg_token": torch.zeros(1)}, 'Unexpected key(s) in state_dict: "reg_'),
    (lambda vit: vit | {"pos_embed": torch.zeros(1, 15, 192)}, "size mismatch for pos_embed"),
    (lambda vit: {"model": vit, "mean": [127.5] * 3, "std": [127.5] * 3}, "of pixels in [0, 1]"),
    *((lambda vit, said=said: {"model": vit, **said}, "of pixels in [0, 1]") for said in (
        dict(mean=[0.5, -0.01, 0.5]), dict(mean=[0.5, 0.5, 1.01]), dict(std=[0.5, 0.5, 0]),
        dict(std=[1.01, 0.5, 0.5]))),
    (lambda vit: {"model": vit, "mean": 0.5, "std": 0.5}, "invalid for input of size 1"),
    (lambda vit: {"model": vit | {PATCHES: torch.zeros(192, 1, 8, 8)}, "std": [0.5] * 3},
     "expected input"),
    (lambda vit: nano().state_dict(), "width 96 has: save the file as {'model'")))
def test_files_that_do_not_load_are_named_in_one_line(tmp_path, capsys, photos, content, expected):
    path = tmp_path / "x.pt"
    content = content(nano(dim=192).state_dict())
    if content is not None:
        torch.save(content, path)
    error = refusal(capsys, "knn", str(path), "--data", photos)
    assert str(path) in error and expected in error and len(error.splitlines()) == 1


def test_code_in_a_file_never_runs(tmp_path, capsys, photos, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.pt").write_bytes(b"cos\nmkdir\n(S'sprung'\ntR.")      # a pickle that makes a folder
    assert "x.pt: not a PyTorch file" in refusal(capsys, "knn", "x.pt", "--data", photos)
    assert not Path("sprung").exists()


def test_a_checkpoint_that_was_saved_on_a_gpu_is_read_into_the_memory_of_the_cpu(tmp_path,
                                                                                 monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    path = Path(write_checkpoint(tmp_path / "x.pt"))
    assert b"cuda:0" in path.read_bytes()
    state = checkpoint.load_checkpoint(path)["model"]
    assert {value.device.type for value in state.values()} == {"cpu"}


def test_position_embeddings_resize_to_another_grid_as_timms():
    from timm.layers import resample_abs_pos_embed
    embed = torch.randn(1, 17, 3)
    expected = resample_abs_pos_embed(embed, [6, 6])
    assert torch.allclose(checkpoint.resize_pos_embed(embed, 6), expected, atol=1e-6)
    assert checkpoint.resize_pos_embed(embed, 4) is embed


def test_checkpoints_in_half_precision_load_on_another_grid(tmp_path):
    encoder = nano(dim=192).to(torch.bfloat16)
    torch.save(encoder.state_dict(), tmp_path / "half.pt")
    loaded = checkpoint.load_encoder(tmp_path / "half.pt", grid=6)
    exact = checkpoint.resize_pos_embed(encoder.pos_embed.float(), 6)
    assert torch.equal(loaded.pos_embed, exact)
    assert torch.equal(loaded.cls_token, encoder.cls_token.float())


def test_position_embeddings_without_one_for_cls_are_those_of_deit_3(tmp_path):
    theirs = timm_vit(img_size=64, no_embed_class=True)
    torch.save(theirs.state_dict(), tmp_path / "deit3.pt")
    ours = checkpoint.load_encoder(tmp_path / "deit3.pt").eval()
    images = torch.rand(1, 3, 64, 64)
    assert torch.allclose(ours(images)[0], theirs.forward_features(images), atol=1e-4)


def test_a_digest_sees_every_part_of_a_file_wherever_it_lies(tmp_path):
    """Large enough that it is not read at once."""
    file = tmp_path / "file.pt"
    size = 33 * 2 ** 20
    digests = []
    for place in (None, 0, size // 2, size - 1):
        with open(file, "wb") as opened:
            opened.truncate(size)      # zeros that take no room
            if place is not None:
                opened.seek(place)
                opened.write(b"1")
        digests.append(run.digest_input(str(file)))
    assert len(set(digests)) == 4
    moved = file.rename(tmp_path / "moved.pt")
    assert run.digest_input(str(moved)) == digests[-1]


def test_a_digest_tells_models_of_the_same_file_apart_and_knows_tags_by_name(tmp_path):
    file = tmp_path / "file.pt"
    file.write_bytes(b"weights")
    plain = run.digest_input(f"ViT-B-16/{file}")
    quick = run.digest_input(f"ViT-B-16-quickgelu/{file}")
    assert len({plain, quick, run.digest_input(str(file))}) == 3
    moved = file.rename(tmp_path / "moved.pt")
    assert run.digest_input(f"ViT-B-16/{moved}") == plain
    moved.write_bytes(b"others!")
    assert run.digest_input(f"ViT-B-16/{moved}") != plain
    for name in ("ViT-B-16/openai", "timm/vit_base_patch14_dinov2.lvd142m", "nowhere.pt"):
        assert run.digest_input(name) == name


@pytest.mark.parametrize("vit", (
    dict(experts=3, moe_blocks=[0, 2]), dict(image_size=48, patch_size=12), dict(depth=2)), ids=str)
def test_a_checkpoint_rebuilds_the_encoder_that_it_is_of(tmp_path, vit):
    images = torch.rand(2, 3, vit.get("image_size", 32), vit.get("image_size", 32))
    torch.manual_seed(1)
    encoder = nano(**vit).eval()
    torch.manual_seed(1)
    loaded = checkpoint.load_encoder(write_checkpoint(tmp_path / "e.pt", **vit)).eval()
    assert torch.equal(loaded(images)[0], encoder(images)[0])


# ------------------------------------------------------------------------------ teacher

@pytest.fixture(scope="session")
def small_clips(tmp_path_factory):
    """open_clip models of toy size by the names small-16 and small-16-quickgelu."""
    import open_clip
    folder = tmp_path_factory.mktemp("clip")
    text = dict(context_length=8, vocab_size=100, width=32, heads=2, layers=1)
    vision = dict(image_size=64, layers=3, width=64, patch_size=16, head_width=32)
    for name in ("small-16", "small-16-quickgelu"):
        config = dict(embed_dim=24, vision_cfg=vision, text_cfg=text, quick_gelu="quick" in name)
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return folder


def pooled(teacher, images):
    """What CLIP makes of an image, from our tokens: ln_post and projection of [CLS]."""
    return teacher.visual.ln_post(teacher(images)[:, 0]) @ teacher.visual.proj


@pytest.fixture
def quick_gelu(small_clips, tmp_path):
    """-> (a file of weights, images, what CLIP with QuickGELU makes of them)"""
    import open_clip
    path = str(tmp_path / "weights.pt")
    theirs = open_clip.create_model("small-16-quickgelu").eval()
    for parameter in theirs.parameters():      # no bias is zero, no norm neutral
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    torch.save(theirs.state_dict(), path)
    images = torch.rand(2, 3, 64, 64)
    mean = (0.48145466, 0.4578275, 0.40821073)
    std = (0.26862954, 0.26130258, 0.27577711)
    return path, images, theirs.visual(TF.normalize(images, mean, std))


def test_a_clip_teacher_is_open_clips_forward_with_quick_gelu_if_the_name_says_so(quick_gelu):
    path, images, expected = quick_gelu
    quick = build_teacher(f"small-16-quickgelu/{path}", grid=4)
    normal = build_teacher(f"small-16/{path}", grid=4)
    assert quick(images).shape == (2, 17, 64) and quick.dim == 64
    assert torch.allclose(pooled(quick, images), expected, atol=1e-4)
    assert not torch.allclose(pooled(normal, images), expected, atol=1e-2)


def test_a_tag_has_quick_gelu_if_its_record_says_so(quick_gelu, monkeypatch):
    import open_clip
    path, images, expected = quick_gelu
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda name: ["tag"])
    for module in (open_clip, open_clip.factory):
        monkeypatch.setattr(module, "get_pretrained_cfg",
                            lambda name, tag: dict(url="", quick_gelu=True))
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *a, **k: path)
    teacher = build_teacher("small-16/tag", grid=4)
    assert torch.allclose(pooled(teacher, images), expected, atol=1e-4)


def test_a_teacher_resizes_images_to_have_the_students_grid(small_clips):
    teacher = build_teacher("small-16/random", grid=6)      # its own images are of 64 pixels
    for size in (48, 112):
        images = torch.rand(2, 3, size, size)
        assert teacher.image_size == 96 and teacher(images).shape == (2, 37, 64)
        resized = F.interpolate(images, (96, 96), mode="bicubic", antialias=True).clamp(0, 1)
        assert torch.allclose(teacher(images), teacher(resized), atol=1e-5)


def test_random_teachers_are_the_same_every_time_and_draw_no_global_numbers(small_clips):
    state = torch.get_rng_state()
    one = build_teacher("small-16/random", grid=4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    two = build_teacher("small-16/random", grid=4)
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ("small-16/random", "timm/vit_tiny_patch16_224/random", "ours",
                                  "experts"))
def test_every_kind_of_teacher_works_in_every_precision(small_clips, tmp_path, kind):
    path = write_checkpoint(tmp_path / "x.pt", experts=3 if kind == "experts" else 0)
    name = kind if "/" in kind else path
    images = torch.rand(2, 3, 32, 32)
    teacher = build_teacher(name, grid=4)
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training
    exact = teacher(images)
    if name == path:
        expected, _ = checkpoint.load_encoder(path).eval()(normalized(images))
        assert torch.equal(exact, expected)
    for precision, error in ((torch.bfloat16, 0.03), (torch.float16, 0.003)):
        features = build_teacher(name, grid=4).to(dtype=precision)(images)
        assert features.dtype == precision
        assert ((features.float() - exact).norm() / exact.norm()).item() < error


def test_weights_for_another_normalization_teach_what_timm_makes_of_it(other_normalization):
    path, images, expected = other_normalization
    assert torch.allclose(build_teacher(path, grid=5)(images), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name, prefix, has_cls", (
    ("vit_small_patch14_reg4_dinov2", 5, True), ("vit_small_patch16_dinov3", 5, True),
    ("vit_base_patch16_siglip_224", 0, False), ("eva02_tiny_patch14_224", 1, True),
    ("vit_base_patch16_clip_224", 1, True), ("vit_medium_patch16_reg4_gap_256", 4, False)))
def test_timms_teachers_are_its_own_forward_without_registers(name, prefix, has_cls, monkeypatch):
    import timm
    monkeypatch.setattr(timm, "create_model", functools.partial(timm.create_model, depth=3))
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=0).eval()
    side = 4 * theirs.patch_embed.patch_size[0]
    theirs.set_input_size(img_size=(side, side))
    config = timm.data.resolve_model_data_config(theirs)
    images = torch.rand(2, 3, side, side)
    with torch.no_grad():
        tokens = theirs.forward_features(TF.normalize(images, config["mean"], config["std"]))
        cls = tokens[:, 0] if has_cls else theirs.forward_head(tokens, pre_logits=True)
    teacher = build_teacher(f"timm/{name}/random", grid=4)
    assert teacher(images).shape == (2, 17, teacher.dim)
    assert torch.allclose(teacher(images)[:, 1:], tokens[:, prefix:], atol=1e-5)
    assert torch.allclose(teacher(images)[:, 0], cls, atol=1e-5)


def test_a_timm_teacher_has_the_hubs_weights_unless_they_are_random(monkeypatch):
    import timm
    calls = spy(monkeypatch, timm, "create_model")
    build_teacher("timm/vit_tiny_patch16_224/random", grid=2)
    with pytest.raises(checkpoint.LoadError, match="See Nodes without a network in RUNNING"):
        build_teacher("timm/vit_tiny_patch16_224", grid=2)
    assert [each.kwargs["pretrained"] for each in calls] == [False, True]


@pytest.mark.parametrize("name, expected", (
    *((name, "no such file, and neither open_clip's MODEL/PRETRAINED, such as ViT-B-16/openai, "
       "nor timm/NAME, such as timm/vit_base_patch14_dinov2.lvd142m")
      for name in ("dinov2", "/a/none.pt", "./none.pt")),
    ("timm/swin_tiny_patch4_window7_224/random", "224 is not a plain vision transformer"),
    ("RN50/random", "RN50 is not one of open_clip's own vision transformers")))
def test_what_cannot_be_a_teacher_is_refused_in_plain_words(capsys, stage, name, expected):
    error = refusal(capsys, "pretrain", *stage("pretrain", f"--teacher {name}"))
    assert error.startswith(f"teacher {name}: ") and expected in error


@pytest.mark.parametrize("tag, hint", (("openai", True), ("laion2b_s34b_b88k", False)))
def test_a_clip_teacher_that_cannot_be_downloaded_is_named(capsys, stage, monkeypatch, tag, hint):
    """As ViT-B-16/FILE, OpenAI's targets would silently be wrong."""
    import open_clip
    failure = Mock(side_effect=OSError("no network, nothing to download"))
    monkeypatch.setattr(open_clip.factory, "download_pretrained", failure)
    error = refusal(capsys, "pretrain", *stage("pretrain", f"--teacher ViT-B-16/{tag}"))
    assert error.startswith(f"teacher ViT-B-16/{tag}: ") and "no network" in error
    assert error.endswith("See Nodes without a network in RUNNING.md.")
    assert ("ViT-B-16-quickgelu/FILE" in error) == hint


# ------------------------------------------------------------------------- data, shapes

def outside_blocks(mask, smallest):
    """Masked patches that no fully masked rectangle of `smallest` patches covers."""
    covered = np.zeros_like(mask)
    side = 1 + len(mask)
    for h, w in np.ndindex(side, side):
        if smallest <= h * w < 3 * smallest and 0.25 <= h / w <= 4:
            for top, left in np.ndindex(side - h, side - w):
                if mask[top:top + h, left:left + w].all():
                    covered[top:top + h, left:left + w] = True
    return (mask & ~covered).sum()


@pytest.mark.parametrize("grid, smallest, ratio", ((14, 16, 0.4), (28, 16, 0.06), (7, 4, 0.3)))
def test_block_masks_are_blocks_of_at_least_16_patches_or_fewer_on_small_grids(grid, smallest,
                                                                               ratio):
    rng = np.random.default_rng(0)
    masks = [data.block_mask(rng, grid, ratio).reshape(grid, grid) for _ in range(20)]
    lone = [outside_blocks(mask, smallest) / mask.sum() for mask in masks]
    assert np.mean(lone) < 0.2


@pytest.mark.parametrize("grid, ratio", ((14, 0.4), (14, 0.75), (8, 0.4), (6, 0.5), (2, 0.4)))
def test_block_masks_have_exact_counts_and_reach_every_patch(grid, ratio):
    rng = np.random.default_rng(0)
    masks = np.array([data.block_mask(rng, grid, ratio) for _ in range(200)])
    assert (masks.sum(1) == int(ratio * grid ** 2)).all()
    share = masks.mean(0).reshape(grid, grid)
    assert share.min() > 0
    for flipped in (share[::-1], share[:, ::-1], share.T):      # no side is preferred
        assert abs(share - flipped).max() < 0.25


def test_blocks_reach_all_edges_and_ten_in_a_row_that_do_not_fit_end_them():
    """70 patches of 14 x 14 are missing; a draw is (share of the area, tilt, top, left)."""
    tilt = (math.log(14 / 5) / math.log(0.3) + 1) / 2
    for place, left in ((0.0, 0), (0.999, 9)):      # as high as the grid, and all that is missing
        for draw, seen in (((1.0, tilt, 0.5, place), lambda mask: mask),
                           ((1.0, 1 - tilt, place, 0.5), np.transpose)):
            rng = Mock(random=lambda shape, draw=draw: np.tile(draw, (32, 1)),
                       permutation=lambda x: x)
            mask = seen(data.block_mask(rng, 14, 70.5 / 196).reshape(14, 14))
            assert mask[:, left:left + 5].all() and mask.sum() == 70

    fails = (99.0, 0.5, 0.0, 0.0)
    draws = [*9 * [fails], (0.0, 0.5, 0.0, 0.0), *9 * [fails], (0.0, 0.5, 0.999, 0.999),
             *10 * [fails], *2 * [(0.0, 0.5, 0.5, 0.5)]]
    rng = Mock(random=Mock(return_value=np.array(draws[::-1])), permutation=lambda x: x)
    expected = np.zeros((14, 14), dtype=bool)
    expected[:4, :4] = expected[10:, 10:] = True
    singles = np.flatnonzero(~expected)[:70 - 32]
    expected.flat[singles] = True
    assert (data.block_mask(rng, 14, 70.5 / 196).reshape(14, 14) == expected).all()


def test_blocks_are_as_often_wide_as_high():
    """Their aspect is log-uniform: pairs of masked neighbors lie across as often as along."""
    rng = np.random.default_rng(0)
    masks = np.array([data.block_mask(rng, 14, 0.2) for _ in range(3000)]).reshape(-1, 14, 14)
    across = (masks[:, :, 1:] & masks[:, :, :-1]).sum(dtype=float)
    along = (masks[:, 1:] & masks[:, :-1]).sum(dtype=float)
    assert across / along == pytest.approx(1, abs=0.015)


def test_the_area_of_blocks_is_uniform_and_their_aspect_log_uniform():
    """On a grid so large that blocks rarely touch, so that each is seen from its corner.

    Each block takes a uniform share of the area that is still missing. For a stick that is broken
    like this, the largest piece has 0.624 of its length on average: Golomb and Dickman's constant.
    """
    rng = np.random.default_rng(0)
    largest, aspects = [], []
    for _ in range(300):
        mask = np.pad(data.block_mask(rng, 300, 0.03).reshape(300, 300), 1)
        corners = np.argwhere(mask[1:, 1:] & ~mask[:-1, 1:] & ~mask[1:, :-1]) + 1
        h, w = np.array([(mask[top:, left].argmin(), mask[top, left:].argmin())
                         for top, left in corners]).T
        largest.append((h * w).max() / mask.sum())
        aspects += np.log(h / w)[h * w > 300].tolist()      # where rounding counts little
    assert np.mean(largest) == pytest.approx(0.624, abs=0.03)
    quantiles = np.quantile(aspects, (0.1, 0.25, 0.5, 0.75, 0.9)) / math.log(1 / 0.3)
    assert quantiles == pytest.approx([-0.8, -0.5, 0, 0.5, 0.8], abs=0.08)


PICTURE = np.stack([np.mgrid[0:64, 0:80][0] * 3, np.mgrid[0:64, 0:80][1] * 3,
                    np.mgrid[0:64, 0:80].sum(0)], -1).astype(np.uint8)


def test_transparency_is_white(tmp_path):
    alpha = np.where(np.arange(80) < 40, 255, 0) * np.ones((64, 1))
    Image.fromarray(np.dstack([PICTURE, alpha.astype(np.uint8)])).save(tmp_path / "x.png")
    seen = data.read_image(tmp_path / "x.png").permute(1, 2, 0).numpy()
    assert (seen[:, :40] == PICTURE[:, :40]).all() and (seen[:, 40:] == 255).all()


def test_a_png_that_is_named_jpeg_is_read_as_a_png(tmp_path):
    Image.fromarray(PICTURE).save(tmp_path / "x.JPEG", format="PNG")
    assert (data.read_image(tmp_path / "x.JPEG").permute(1, 2, 0).numpy() == PICTURE).all()


def test_16_bits_are_refused_for_they_would_become_white(tmp_path):
    Image.fromarray(PICTURE[..., 0].astype(np.uint16) * 257).save(tmp_path / "x.png")
    with pytest.raises(common.ReadError, match="x.png .ValueError: mode I;16, expected 8 bits"):
        data.read_image(tmp_path / "x.png")


@pytest.mark.skipif(not hasattr(torchvision.io, "decode_jpeg"), reason="without a decoder")
def test_jpegs_are_read_without_pillow_and_have_its_pixels(tmp_path, monkeypatch):
    """Whatever their name, color space or orientation."""
    image = Image.fromarray(PICTURE)
    pictures = {"gray.png": (image.convert("L"), {}),
                "cmyk.JPEG": (image.convert("CMYK"), {}),
                "progressive.jpg": (image, dict(progressive=True))}
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        pictures[f"{orientation}.jpg"] = image, dict(exif=exif)
    expected = {}
    for name, (picture, how) in pictures.items():
        picture.save(tmp_path / name, format="JPEG", **how)
        upright = ImageOps.exif_transpose(Image.open(tmp_path / name))
        expected[name] = TF.pil_to_tensor(upright.convert("RGB"))
    monkeypatch.setattr(Image, "open", Mock(side_effect=AssertionError))
    for name, pixels in expected.items():
        assert torch.equal(data.read_image(tmp_path / name), pixels), name


XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x="adobe:ns:meta/">%s</x:xmpmeta>'


@pytest.mark.parametrize("segment, in_exif", (
    (XMP % b'<rdf:Description tiff:Orientation="6"/>', False), (XMP % b"", True)),
    ids=("in XMP", "in EXIF behind XMP"))
def test_an_orientation_that_torchvision_does_not_find_is_applied(tmp_path, segment, in_exif):
    exif = Image.Exif()
    if in_exif:
        exif[0x0112] = 6
    path = tmp_path / "x.jpg"
    Image.fromarray(PICTURE).save(path, exif=exif)
    jpeg = path.read_bytes()
    jfif = 4 + int.from_bytes(jpeg[4:6], "big")      # the segment that comes first
    long = b"\xff\xed" + (702).to_bytes(2, "big") + 700 * b" "      # its length takes two bytes
    app1 = b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment
    path.write_bytes(jpeg[:jfif] + long + app1 + jpeg[jfif:])
    upright = ImageOps.exif_transpose(Image.open(path))
    assert upright.size == (64, 80)
    assert torch.equal(data.read_image(path), TF.pil_to_tensor(upright))


def test_without_labels_all_images_below_a_folder_count_in_the_order_of_classes(tmp_path):
    names = ["a/1.jpg", "a/2.JPG", "a/deep/er/0.png", "a-b/0.jpg", "b.png"]
    for name in (*names, "notes.txt", ".hidden/0.jpg", "a/.0.jpg"):
        path = tmp_path / "val" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PICTURE).save(path, format="PNG")
    images = data.open_images(str(tmp_path), "val", 32, labels=False)
    found = [os.path.relpath(path, tmp_path / "val") for path in images.paths]
    assert found == ["b.png", "a/1.jpg", "a/2.JPG", "a/deep/er/0.png", "a-b/0.jpg"]
    assert images[1][1] == 0
    for name in ("b.png", "a/.0.jpg"):      # as torchvision orders the rest, which has classes
        (tmp_path / "val" / name).unlink()
    shutil.rmtree(tmp_path / "val" / ".hidden")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "0.jpg").touch()
    (tmp_path / "val" / "a" / "c").symlink_to(tmp_path / "linked")
    (tmp_path / "val" / "c").symlink_to(tmp_path / "linked")
    classes = torchvision.datasets.DatasetFolder(tmp_path / "val", str, data.IMG_EXTENSIONS)
    assert len(classes) == 6
    assert [path for path, _ in classes.samples] == data.Photos(str(tmp_path / "val")).paths
    one = data.open_images(str(tmp_path / "val/a/1.jpg"), "train", 32, labels=False)
    assert one.paths == [str(tmp_path / "val/a/1.jpg")]
    everything = data.open_images(str(tmp_path), "train", 32, labels=False)      # no train/
    assert len(everything) == 7


@pytest.mark.parametrize("split", ("train", "val"))
def test_images_beside_the_folder_of_a_split_are_left_out_and_one_line_says_so(
        tmp_path, monkeypatch, capsys, split):
    for name in ("0.jpg", "1.JPG", "notes.txt", ".2.jpg", "other/3.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def opened():
        data.print_once.cache_clear()
        count = [len(data.open_images(str(tmp_path), split, 32, labels=False)) for _ in range(2)]
        return count, capsys.readouterr().err
    assert opened() == ([3, 3], "")      # all of the folder, and nothing to say
    (tmp_path / split).mkdir()
    for i in range(5):
        (tmp_path / split / f"{i}.jpg").touch()
    line = f"--data {tmp_path}: the images are the 5 in {tmp_path / split}; others, such as"
    assert opened() == ([5, 5], f"{line} 0.jpg, are left out\n")
    monkeypatch.setenv("RANK", "1")
    assert opened() == ([5, 5], "")
    monkeypatch.delenv("RANK")
    for name in ("0.jpg", "1.JPG"):
        (tmp_path / name).unlink()
    assert opened() == ([5, 5], f"{line} other, are left out\n")
    shutil.rmtree(tmp_path / "other")
    for name in ("train", "val", "test", ".hidden"):
        (tmp_path / name).mkdir(exist_ok=True)
    assert opened() == ([5, 5], "")


def test_photographs_that_are_not_there_are_one_error_that_names_the_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    for name in ("notes.txt", ".0.jpg"):
        (tmp_path / "texts" / name).write_text("no image")
    for name in ("empty", "texts", "texts/notes.txt", "nowhere", "nowhere.jpg"):
        with pytest.raises(common.UserError) as caught:
            data.Photos(str(tmp_path / name))
        assert str(caught.value).startswith(
            f"no such file or folder, or no image in it: {tmp_path / name}; expected files that "
            "end in .jpg, ")


def break_image(path):
    path.write_bytes(path.read_bytes()[:-40])
    return path


def test_a_broken_image_is_named_and_the_next_one_takes_its_place(photos, tmp_path, capsys):
    folder = shutil.copytree(Path(photos, "train"), tmp_path / "train")
    views = data.TrainViews(data.Photos(str(folder)), 32, 7, 4, 0.4)
    places = {5: 5, 6: 8, 7: 8, 31: 0}      # two in a row are broken, and the last of all
    for index in (6, 7, 31):
        path = break_image(Path(views.dataset.paths[index]))
    data.print_once.cache_clear()      # an earlier test's file may have had the same path
    for epoch in (0, 1):
        for index, place in places.items():      # what is random does not move with the image
            rng = np.random.default_rng((7, epoch, index))
            expected = views.view(rng, *views.dataset[place])
            torch.testing.assert_close(views[epoch, index], expected, rtol=0, atol=0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 3      # each is named once
    assert lines[-1].startswith(f"cannot read the image {path} (")
    assert lines[-1].endswith("): the next image takes its place")
    with pytest.raises(common.ReadError, match="cannot read the image"):
        data.CenterViews(views.dataset, 32)[6]      # a score is of all images


def test_a_broken_scene_is_replaced_with_its_annotation_in_training_alone(scenes, tmp_path):
    broken = shutil.copytree(scenes, tmp_path / "broken")
    break_image(broken / "images/training/3.jpg")
    same = shutil.copytree(scenes, tmp_path / "same")
    for name in ("images/training/{}.jpg", "annotations/training/{}.png"):
        shutil.copy(same / name.format(4), same / name.format(3))
    seen, expected = (segment.TrainScenes(segment.Scenes(str(root), "training"), 32, 11, 7)
                      for root in (broken, same))
    for epoch in range(4):
        torch.testing.assert_close(seen[epoch, 3], expected[epoch, 3], rtol=0, atol=0)
    with pytest.raises(common.ReadError, match="cannot read the image"):
        segment.EvalScenes(seen.dataset, 32, 11)[3]


@pytest.mark.parametrize("name", ("pretrain", "finetune", "segment"))
def test_a_run_outlives_broken_images(stage, photos, scenes, tmp_path, capsys, name):
    source, folder = (scenes, "images/training") if name == "segment" else (photos, "train/class_1")
    shutil.copytree(source, tmp_path / "copy")
    path = break_image(tmp_path / "copy" / folder / "3.jpg")
    data.print_once.cache_clear()      # an earlier test's file may have had the same path
    play(name, stage(name, "--data", str(tmp_path / "copy")))
    assert capsys.readouterr().err.count(f"cannot read the image {path} (") == 1


def test_fifty_broken_images_in_a_row_stop_a_run_and_loaders_leave(stage, tmp_path):
    for i in range(50):
        (tmp_path / f"{i:02d}.jpg").write_text("no image")
    argv = stage("pretrain", "--workers 2", "--data", str(tmp_path))
    code, _, error = finish(start("pretrain.py", *argv))
    assert code == 2 and "Traceback" not in error
    said = "pretrain.py: error: 50 images in a row cannot be read; the last one: cannot read the"
    assert said in error
    Image.new("RGB", (8, 8)).save(tmp_path / "50.jpg")
    images = data.Photos(str(tmp_path))
    assert data.first_readable(images, 1)[0] == 50
    with pytest.raises(common.ReadError, match="50 images in a row"):
        data.first_readable(images, 0)


def test_a_broken_image_ends_an_evaluation_and_loaders_leave(stage, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "copy")
    path = break_image(tmp_path / "copy" / "val" / "class_1" / "3.jpg")
    argv = stage("knn", "--workers 2", "--data", str(tmp_path / "copy"))
    code, _, error = finish(start("knn.py", *argv))
    assert code == 2 and "Traceback" not in error
    assert f"knn.py: error: cannot read the image {path} (" in error


def test_classes_are_those_of_train(tmp_path):
    for name in ("train/ant", "train/bee", "val/bee"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "x.png")
    val = data.Folder(str(tmp_path), "val")
    assert val.classes == ["ant", "bee"] and val[0][1] == 1


def test_folders_that_do_not_fit_are_named(capsys, stage, tmp_path):
    folder = tmp_path / "data"
    argv = {name: stage(name, "", "--data", str(folder))
            for name in ("pretrain", "finetune", "segment")}

    def said(name):
        return refusal(capsys, name, *argv[name])
    for name in ("finetune", "pretrain"):
        assert f"--data {folder}: " in said(name) and "no such file" in said(name).lower()
        assert "and sh demo.sh needs none" in said(name)
    assert f"'{folder}/train'; expected {folder}/train/CLASS/*" in said("finetune")
    assert f"--data {folder}: no image in {folder}/images/training; expected ADE" in said("segment")
    (folder / "photos").mkdir(parents=True)
    assert f"No such file or directory: '{folder}/train'; expected " in said("finetune")
    assert f"--data {folder}: no image in {folder}/images/training; expected " in said("segment")
    assert "no image for 'train' in it; expected files that end in" in said("pretrain")
    (folder / "train").mkdir()
    assert "no image for 'train' in it; expected files that end in" in said("pretrain")
    assert f"class folder in {folder}/train; expected " in said("finetune")
    (folder / "train" / "ant").mkdir()
    assert "no image for 'train' in it; expected files that end in" in said("finetune")
    for name in ("train/ant", "val/wasp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name / "x.png")
    error = f"class 'wasp' of {folder / 'val'} is not among those of train/"
    assert error in said("finetune")


@pytest.mark.parametrize("name, kind, split, expected", (
    ("cifar10", "CIFAR10", "train", call("data", True, TF.pil_to_tensor, download=True)),
    ("cifar10", "CIFAR10", "val", call("data", False, TF.pil_to_tensor, download=True)),
    ("food101", "Food", "train", call("data", "train", download=True)),
    ("food101", "Food", "val", call("data", "test", download=True))))
def test_torchvisions_sets_are_downloaded(monkeypatch, tmp_path, name, kind, split, expected):
    monkeypatch.chdir(tmp_path)
    made = MagicMock()
    made.return_value.__len__.return_value = 1
    monkeypatch.setattr(data, kind, made)
    assert data.open_images(name, split, 32) is made.return_value
    assert made.call_args == expected


def test_food_101_is_read_as_folders_are(tmp_path, photos):
    """A photo on its side stands up, and a broken one is named."""
    root = tmp_path / "food-101"
    for folder in (root / "images" / "pie", root / "meta"):
        folder.mkdir(parents=True)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(PICTURE).save(root / "images" / "pie" / "1.jpg", exif=turned)
    (root / "images" / "pie" / "2.jpg").write_bytes(b"x")
    for split in ("train", "test"):
        (root / "meta" / f"{split}.json").write_text('{"pie": ["pie/1", "pie/2"]}')
    food = data.Food(tmp_path, "test")
    image, label = food[0]
    assert label == 0 and image.shape == (3, PICTURE.shape[1], PICTURE.shape[0])
    with pytest.raises(common.ReadError, match="2.jpg"):
        food[1]
    batch = data.TrainViews(food, 16, 0)[0, 1]      # the other one takes its place
    assert batch["image"].shape == (3, 16, 16)


def test_a_download_that_fails_is_one_line(capsys, stage, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "CIFAR10", Mock(side_effect=OSError("no route to host")))
    error = refusal(capsys, "pretrain", *stage("pretrain", "--data cifar10"))
    assert error.startswith("--data cifar10: torchvision could not download it (no route to host)")


def test_epochs_visit_every_image_once_in_another_order_and_resume_in_the_middle():
    order = list(data.train_order(33, 8, 8, 42, 0, 8))
    first = [key for batch in order[:4] for key in batch]
    second = [key for batch in order[4:] for key in batch]
    assert len(set(first)) == len(set(second)) == 32
    assert [i for _, i in first] != [i for _, i in second]
    assert list(data.train_order(33, 8, 8, 42, 3, 8)) == order[3:]
    two = [list(data.train_order(33, 8, 2, 42, 1, 5, rank, 2)) for rank in (0, 1)]
    for rank in (0, 1):      # every second image, in two micro-batches
        parts = [(batch[rank::2][:2], batch[rank::2][2:]) for batch in order[1:5]]
        assert two[rank] == list(itertools.chain(*parts))


def test_a_view_is_a_crop_by_seed_epoch_and_index_a_flip_and_jitter(photos):
    views = data.TrainViews(data.Folder(photos, "train"), 32, 42, 14, 0.4)
    image, label = views.dataset[5]
    crop = data.random_crop(np.random.default_rng((42, 1, 5)), *image.shape[1:], (0.2, 1.0))
    image = TF.resized_crop(image, *crop, [32, 32], TF.InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(views[1, 5]["image"], image) and views[1, 5]["label"] == label
    drawn = [views[epoch, index] for epoch, index in np.ndindex(8, 32)]
    assert len({view["mask"].tobytes() for view in drawn}) > 250
    assert 0.4 < np.mean([view["flip"] for view in drawn]) < 0.6
    jitter = np.array([view["jitter"] for view in drawn])
    assert len(np.unique(jitter)) == jitter.size
    assert (abs(jitter.min(0) - 0.6) < 0.02).all() and (abs(jitter.max(0) - 1.4) < 0.02).all()


def test_crops_are_drawn_as_random_resized_crop_draws_them():
    rng = np.random.default_rng(0)
    crops = np.array([data.random_crop(rng, 300, 400, (0.2, 1.0)) for _ in range(2000)])
    top, left, h, w = crops.T
    assert top.min() == left.min() == 0
    assert (top + h).max() == 300 and (left + w).max() == 400
    share = h * w / 120000
    aspect = w / h
    assert 0.19 < share.min() < 0.22 and 0.95 < share.max() <= 1
    assert 0.74 < aspect.min() < 0.77 and 1.3 < aspect.max() < 1.35
    crops = np.array([data.random_crop(rng, 6, 7, (0.2, 1.0)) for _ in range(2000)])
    for size, starts, lengths in ((6, crops[:, 0], crops[:, 2]), (7, crops[:, 1], crops[:, 3])):
        everywhere = {(at, n) for n in range(3, size + 1) for at in range(size - n + 1)}
        assert set(zip(starts.tolist(), lengths.tolist())) >= everywhere


def test_the_area_of_crops_is_uniform_and_their_aspect_log_uniform():
    rng = np.random.default_rng(0)
    crops = [data.random_crop(rng, 1000, 1000, (0.1, 0.3), (0.5, 3)) for _ in range(20000)]
    _, _, h, w = np.array(crops).T
    area = h * w / 1e6
    aspect = np.log(w / h)
    for values, low, high in ((area, 0.1, 0.3), (aspect, -math.log(2), math.log(3))):
        quantiles = np.quantile((values - low) / (high - low), (0.1, 0.25, 0.5, 0.75, 0.9))
        assert quantiles == pytest.approx([0.1, 0.25, 0.5, 0.75, 0.9], abs=0.02)
    top, left = (np.array(crops)[:, :2] / (1000 - np.stack([h, w], 1))).T
    assert np.quantile(top, 0.5) == pytest.approx(0.5, abs=0.02)
    assert np.quantile(left, 0.5) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("height, width, expected", (
    (1, 1, (0, 0, 1, 1)), (20000, 10, (9993, 0, 13, 10)), (10, 20000, (0, 9993, 10, 13)),
    (1, 500, (0, 249, 1, 1))))
def test_crops_of_very_long_or_small_images_are_their_middle(height, width, expected):
    rng = np.random.default_rng(0)
    assert {data.random_crop(rng, height, width, (0.2, 1.0)) for _ in range(50)} == {expected}


def test_flip_and_color_jitter_are_torchvisions_image_by_image():
    image = torch.randint(0, 256, (5, 3, 8, 11), dtype=torch.uint8)
    factors = 0.6 + 0.8 * torch.rand(5, 3)
    factors[:3] = torch.tensor([[1.4, 1.4, 1.4], [0.6, 0.6, 0.6], [0.6, 1.4, 1.4]])
    flip = torch.tensor([True, False, True, False, False])
    ours = data.augment(dict(image=image, flip=flip, jitter=factors))
    for i, (brightness, contrast, saturation) in enumerate(factors.tolist()):
        theirs = image[i].flip(-1) / 255 if flip[i] else image[i] / 255
        theirs = TF.adjust_brightness(theirs, brightness)
        theirs = TF.adjust_saturation(TF.adjust_contrast(theirs, contrast), saturation)
        assert torch.allclose(ours[i], theirs, atol=1e-5)
    assert ours.min() == 0 and ours.max() == 1      # each of the first three goes beyond a limit


@pytest.mark.parametrize("size, shorter", ((224, 256), (112, 128), (32, 37)))
def test_evaluation_views_are_resized_to_256_and_cropped_to_224_of_224(size, shorter):
    image = torch.randint(0, 256, (3, 300, 500), dtype=torch.uint8)
    bicubic = TF.InterpolationMode.BICUBIC
    resized = TF.resize(image, shorter, interpolation=bicubic, antialias=True)
    assert torch.equal(data.center_view(image, size), TF.center_crop(resized, size))


def test_shapes_are_the_same_every_time_and_others_in_val():
    image, label = Shapes("train", 48)[7]
    assert torch.equal(image, Shapes("train", 48)[7][0])
    assert not torch.equal(image, Shapes("val", 48)[7][0])
    assert Shapes.classes[label] == "spotted blue"
    assert Shapes("train", 48).annotation(7).unique().tolist() == [1, 9]


@pytest.mark.parametrize("name, noise", (("shapes", False), ("shapes-noise", True)))
def test_drawn_sets_have_names(name, noise):
    drawn = data.open_images(name, "val", 48)
    assert torch.equal(drawn[3][0], Shapes("val", 48, noise)[3][0])


def test_a_drawn_set_never_changes():
    """Or figures of one version could not be compared with those of another."""
    means = [sum(Shapes(split, 48, noise)[i][0].float().mean().item() for i in range(4))
             for split, noise in (("train", False), ("val", False), ("val", True))]
    assert means == pytest.approx([481.0, 499.4, 500.0], rel=1e-3)


def test_the_masks_of_shapes_are_their_objects_in_their_colors():
    train = Shapes("train", 48)
    white = {"striped": [], "spotted": []}
    for index in range(40):                                     # spots are white
        texture, name = train.classes[index % 10].split()
        mask = train.mask(index)
        picture = train[index][0].permute(1, 2, 0) / 255
        spread = picture.amax(2) - picture.amin(2)
        hue = colorsys.rgb_to_hsv(*picture[mask][spread[mask].argmax()].tolist())[0]
        assert abs((hue - Shapes.hues[name] + 0.5) % 1 - 0.5) < 0.04
        assert 0.02 < mask.float().mean() < 0.6
        assert texture == "spotted" or spread[mask].mean() > spread[~mask].mean()
        white[texture].append((picture[mask].amin(1) > 0.75).float().mean().item())
    assert max(white["striped"]) == 0 and 0.2 < np.mean(white["spotted"]) < 0.36


# ------------------------------------------------------------------ machine, optimization

@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA")
def test_without_cuda_fp16_becomes_float32():
    args = pretrain.parse_args([])
    process = common.Process(args)
    assert process.amp is None and process.compile is False
    assert vars(args) == vars(pretrain.parse_args([]))      # nobody assigns to them
    assert common.Process(pretrain.parse_args(["--amp", "bf16"])).amp == torch.bfloat16


@pytest.mark.parametrize("cores, processes, flags, workers", (
    (24, "1", "", 16), (24, "4", "", 6), (2, "4", "", 1), (24, "1", "--workers 40", 40)))
def test_a_process_has_its_share_of_the_cores_as_loaders(monkeypatch, cores, processes, flags,
                                                         workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert common.Process(pretrain.parse_args(f"--amp off {flags}".split())).workers == workers


def test_loaders_are_counted_on_macos_too(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert common.Process(pretrain.parse_args(["--amp", "off"])).workers == 12


@pytest.mark.parametrize("rank, local_rank, says", (("2", "0", True), ("3", "1", False)))
def test_each_machine_prints_an_error_once(monkeypatch, capsys, rank, local_rank, says):
    """Before processes know each other. Later: see the two processes that fail."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit):
        common.launch(Mock(side_effect=common.UserError("no such disk")), None)
    assert ("no such disk" in capsys.readouterr().err) == says
    with pytest.raises(SystemExit) as stop:
        pretrain.parse_args(["--epochs", "0"])
    assert stop.value.code == 2
    assert ("--epochs: 0 is outside" in capsys.readouterr().err) == says


def test_processes_that_know_each_other_tell_machines_apart_by_name_and_number(monkeypatch):
    """Slurm gives no number, and machines of two torchrun may have one name."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(common.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(common.dist.distributed_c10d, "_get_default_store", lambda: store)
    for name, number in itertools.product(("node1", "node11"), ("0", "1", "11", None)):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        if number:
            monkeypatch.setenv("GROUP_RANK", number)
        else:
            monkeypatch.delenv("GROUP_RANK")
        assert [common.first_to_say("no such disk") for _ in range(3)] == [True, False, False]
        assert common.first_to_say("no such file")


def test_each_step_and_rank_has_random_numbers_of_its_own():
    drawn = {}
    for key in ((1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0), (1, 0, 0)):
        common.seed_torch(*key)
        number = torch.rand(()).item()
        assert drawn.setdefault(key, number) == number
    assert len(set(drawn.values())) == 4


def test_processes_download_one_at_a_time(tmp_path):
    log = tmp_path / "log"

    def download(name):
        with common.lock(tmp_path / "data", wait=True):
            for _ in range(2):
                time.sleep(0.05)
                log.open("a").write(name)
    fork = torch.multiprocessing.get_context("fork")
    processes = [fork.Process(target=download, args=(name,)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert re.fullmatch(r"(\w)\1(\w)\2(\w)\3", log.read_text())


def test_a_folder_that_cannot_be_locked_is_used_without(tmp_path):
    (tmp_path / ".lock").mkdir()      # as on a read-only disk
    common.lock(tmp_path, wait=True).close()


def test_batches_must_divide_among_processes():
    with pytest.raises(common.UserError, match="--batch-size 10 is not a multiple of the 4 proc"):
        common.make_plan(pretrain.parse_args(["--batch-size", "10"]), 4, 100)


@pytest.mark.parametrize("flags, world, micro, epoch_steps", (
    ("", 4, (256, 4), 312), ("", 1, (256, 16), 312),
    ("--batch-size 514", 2, (1, 257), 2492), ("--batch-size 510", 2, (255, 1), 2512)))
def test_any_number_of_gpus_has_the_papers_batch(flags, world, micro, epoch_steps):
    plan = common.make_plan(pretrain.parse_args(flags.split()), world, 1281167)
    assert (plan.micro_batch, plan.micro_steps) == micro
    assert (plan.epoch_steps, plan.save_steps) == (epoch_steps, 10 * epoch_steps)


@pytest.mark.parametrize("name, flags, expected", (
    ("pretrain", "", (3000, 400)), ("finetune", "--epochs 20", (200, 10)),
    ("linear", "x.pt", (1000, 100)), ("segment", "x.pt --iterations 1600", (1600, 15)),
    ("segment", "x.pt --iterations 1650", (1650, 15)),      # of 15.5, and of 15.9
    ("segment", "x.pt --iterations 1700", (1700, 16)),
    ("pretrain", "--warmup-epochs 0", (3000, 0))))
def test_a_default_warm_up_keeps_its_share_and_a_given_one_is_taken_as_it_is(name, flags, expected):
    args = SCRIPTS[name].parse_args([*flags.split(), "--batch-size", "10"])
    unit = "iterations" if name == "segment" else "epochs"
    plan = common.make_plan(args, 1, 100, unit=unit)
    assert (plan.steps, plan.warmup) == expected
    rates = [plan.learning_rate(step) for step in range(plan.steps)]
    assert max(rates) == rates[max(plan.warmup - 1, 0)]
    assert rates[-1] == pytest.approx(args.min_lr)


def test_no_weight_decay_on_biases_scales_norms_positions_and_tokens():
    student = small_student(nano(experts=2), 96, dense=True, pixels=True, loss_router=True)
    optimizer = common.adamw(student, 0.1, 0.05, (0.9, 0.95))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups
             for p in group["params"]}
    spared = {name.split(".")[-1] for name, p in student.named_parameters()
              if p.ndim > 1 and decay[id(p)] == 0}
    assert spared == {"b1", "b2", "pos_embed", "cls_token", "mask_token"}
    assert all(decay[id(p)] == (0.05 if p.ndim > 1 else 0)
               for name, p in student.named_parameters() if name.split(".")[-1] not in spared)


@pytest.mark.parametrize("amp, scales", (
    ("fp16", (512, 256, 256)), ("bf16", (1, 1, 1)), ("off", (1, 1, 1))))
def test_updates_are_skipped_and_counted_where_a_gradient_is_not_finite(amp, scales):
    scaler = common.Process(pretrain.parse_args(["--amp", amp])).scaler
    if amp == "fp16":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert scaler.get_growth_factor() == (2.0 if amp == "fp16" else 1.0)
    layer = nn.Linear(4, 4, bias=False)
    optimizer = common.adamw(layer, 0.1, 0.05, (0.0, 0.95))
    before = layer.weight.detach().clone()
    for value, scale in zip((math.inf, math.nan, 1.0), scales):
        scaler.scale(100 * layer(torch.ones(1, 4)).sum()).backward()
        layer.weight.grad[0, 0] *= value
        metrics = common.optimizer_step(optimizer, scaler, 3.0)
        assert metrics["skipped"].item() == (value != 1.0)
        assert torch.equal(layer.weight, before) == (value != 1.0)
        assert scaler.get_scale() == scale and layer.weight.grad is None
    assert metrics["grad_norm"].item() == 400                   # unscaled, before clipping


def test_gradients_of_several_processes_stay_views_of_their_buckets(monkeypatch):
    layer = nn.Linear(4, 4, bias=False)
    optimizer = common.adamw(layer, 0.1, 0.05, (0.0, 0.95))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
    gradient = layer.weight.grad
    monkeypatch.setattr(common.dist, "is_initialized", lambda: True)
    common.optimizer_step(optimizer, scaler, 3.0)
    assert layer.weight.grad is gradient and not gradient.any()


READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique2",
         "item", "bincount")


class HostReads(TorchDispatchMode):
    """Refuses the operations that make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in READS
        return func(*args, **(kwargs or {}))


def at_step(monkeypatch, step, action):
    """Calls `action` in the middle of one step, counted over all runs of the test from 0."""
    steps = itertools.count()

    def wrapped(*args, set_rate=common.set_rate):
        if next(steps) == step:
            action()
        set_rate(*args)
    monkeypatch.setattr(common, "set_rate", wrapped)


@pytest.mark.parametrize("flags", (
    "", "--recompute --balance rlw", "--experts 0 --balance gradnorm",
    "--encoding dense --objective token_cls_pixel --importance-weight 1"))
def test_the_host_waits_for_nothing_between_logged_steps(stage, monkeypatch, flags):
    """A step, backward pass included, reads no value: on a GPU it would empty the queue."""
    monkeypatch.setattr(pretrain, "build_student", small_decoder)
    reads = HostReads()
    at_step(monkeypatch, 0, reads.__enter__)
    at_step(monkeypatch, 1, lambda: reads.__exit__(None, None, None))
    train(stage("pretrain", f"--max-steps 3 --repeat-batch {flags}"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
def test_no_step_synchronizes_a_gpu(stage, monkeypatch):
    at_step(monkeypatch, 3, lambda: torch.cuda.set_sync_debug_mode("error"))
    at_step(monkeypatch, 6, lambda: torch.cuda.set_sync_debug_mode("default"))
    train(stage("pretrain", "--max-steps 8 --repeat-batch --amp fp16"))


# ------------------------------------------------------------- a GPU that is not there

def test_a_process_takes_the_gpu_of_its_rank_on_its_machine(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name, value in dict(RANK="5", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4").items():
        monkeypatch.setenv(name, value)
    process = common.Process(argparse.Namespace(amp="fp16", workers=0, compile=None))
    assert chosen == [process.device] == [torch.device("cuda", 1)]
    assert process.rank == 5 and process.compile and process.amp == torch.float16


def test_memory_in_the_log_is_in_gibibytes(stage, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2 ** 30)
    _, log = train(stage("pretrain", "--max-steps 1"))
    assert log[0]["memory_gib"] == 3


@pytest.mark.parametrize("world, device, synchronized", (
    (2, "cuda", True), (1, "cuda", False), (2, "cpu", False)))
def test_several_gpus_share_the_statistics_of_batch_normalization(
        stage, monkeypatch, world, device, synchronized):
    process = common.Process(argparse.Namespace(amp="off", workers=0))
    process.world, process.device = world, torch.device(device)
    monkeypatch.setattr(common, "Process", lambda args: process)
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(finetune, "fit", lambda *args, model, **kwargs: model)
    segmenter = SCRIPTS["segment"].main(SCRIPTS["segment"].parse_args(stage("segment")))
    kinds = {type(module) for module in segmenter.modules() if "BatchNorm" in str(type(module))}
    assert kinds == {nn.SyncBatchNorm if synchronized else nn.BatchNorm2d}


class Gpu(TorchDispatchMode):
    """Within a step, refuses what makes the host wait for the GPU. Else, reads have a value."""
    step = False

    def tensors(self, tree):
        return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        inputs = self.tensors((args, kwargs))
        watched = self.step and any(x.device.type == "cuda" for x in inputs)
        if name == "_local_scalar_dense" and not watched:
            return 0.5 if inputs[0].is_floating_point() else 1
        outputs = func(*args, **(kwargs or {}))
        if watched:
            assert name not in READS, f"{name} reads values"
            masks = torch.bool in {x.dtype for x in inputs}
            assert "index" not in name or not masks, f"{name} by a mask"
            devices = {x.device.type for x in self.tensors(outputs)}
            assert devices <= {"cuda"}, f"{name} copies back"
        return outputs


def parameters_below(loss):
    """The parameters that a backward pass from `loss` would reach."""
    nodes = [loss.grad_fn]
    seen = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [below for below, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


@pytest.fixture
def fake_gpu(monkeypatch):
    """fake_gpu(STAGE, ARGV) runs main on `cuda:0`: tensors have a device, but no values."""
    gpu = Gpu()
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)
    cuda = dict(is_available=True, device_count=1, max_memory_allocated=1, set_device=None)
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)

    def to(module, device, dtype=None):      # PyTorch's would swap fake tensors, which cannot be
        for part in module.modules():
            for name, x in part.named_parameters(recurse=False):
                x = torch.empty(x.shape, dtype=dtype or x.dtype, device=device)
                setattr(part, name, nn.Parameter(x, getattr(part, name).requires_grad))
            for name, x in part.named_buffers(recurse=False):
                setattr(part, name, torch.empty(x.shape, dtype=dtype or x.dtype, device=device))
        return module

    def real_images(views, batch_sampler, **kwargs):
        for keys in batch_sampler:
            with _disable_current_modes():
                batch = torch.utils.data.default_collate([views[key] for key in keys])
            yield {name: fakes.from_tensor(x) for name, x in batch.items()}

    def backward(loss):
        for parameter in parameters_below(loss):
            parameter.grad = torch.zeros_like(parameter)

    def optimizer_step(optimizer, *args, step=common.optimizer_step):
        for group in optimizer.param_groups:
            assert all(p.grad is not None for p in group["params"]), "a parameter is not reached"
        return step(optimizer, *args)

    def end_step(*args, end=run.Run.end_step):
        gpu.step = False
        line = end(*args)
        gpu.step = True
        return line

    def tolist(x):
        assert not gpu.step, "tolist reads values"
        return np.ones(x.shape).tolist()
    for owner, name, changed in (
            (nn.Module, "to", to), (data, "DataLoader", real_images),
            (torch.Tensor, "backward", backward), (FakeTensor, "tolist", tolist),
            (torch.autograd, "grad", lambda loss, inputs, **k: [*map(torch.zeros_like, inputs)]),
            (nn.init, "trunc_normal_", lambda x, **kwargs: x),      # looks at values
            (common, "optimizer_step", optimizer_step), (run.Run, "end_step", end_step),
            (run.Run, "save", lambda *args: None),
            (common.Process, "first_alone", lambda process, function, *args: function(*args)),
            (common.Process, "largest", lambda process, *values: values)):
        monkeypatch.setattr(owner, name, changed)
    at_step(monkeypatch, 0, lambda: setattr(gpu, "step", True))

    def on_gpu(name, argv):
        with fakes, gpu:
            SCRIPTS[name].main(SCRIPTS[name].parse_args(argv))
    return on_gpu


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="PyTorch 2.6 asks for a driver")
@pytest.mark.parametrize("name, flags", (
    ("pretrain", "--teacher small-16/random --image-size 64 --patch-size 16"),
    ("pretrain", "--encoding dense --objective token_pixel --balance gradnorm"),
    ("pretrain", "--loss-router --experts 0 --variation 0.1"), ("finetune", ""), ("linear", ""),
    ("ep", ""), ("segment", "--batch-size 8")))
def test_a_step_stays_on_its_gpu_reads_no_value_and_reaches_every_parameter(
        stage, fake_gpu, small_clips, name, flags):
    flags = f"--amp fp16 --no-compile --repeat-batch --max-steps 2 --micro-batch 4 {flags}"
    fake_gpu(name, stage(name, flags))


# ----------------------------------------------------- every stage equals a plain loop

class Plain:
    """What the plain loops share: order of images, schedule, AdamW, all written once more."""

    def __init__(self, args, trained, images, views, rates=lambda name: 1.0, betas=(0.9, 0.999),
                 world=1):
        self.args, self.trained, self.images, self.views = args, trained, images, views
        self.world = world
        groups = []
        for name, p in trained.named_parameters():
            decays = p.ndim > 1 and not name.endswith(("b1", "b2", "_token", "pos_embed"))
            if p.requires_grad:
                groups.append(dict(params=[p], share=rates(name),
                                   weight_decay=decays * args.weight_decay))
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas)
        self.norms = []
        self.rates = []
        self.felt = {}      # parameter -> largest share of the gradient's norm
        self.lost = {}      # parameter -> whether rounding has taken a gradient's digits

    def steps(self, linear=False):
        """Yields (step, share of the gradient, micro-batch) for each micro-batch of all steps."""
        args = self.args
        epoch_steps = len(self.images) // args.batch_size
        if "epochs" in args:
            total, warmup = args.epochs * epoch_steps, args.warmup_epochs * epoch_steps
        else:
            total, warmup = args.iterations, args.warmup_iterations
        for step in range(args.max_steps):
            rate = args.lr * (step + 1) / warmup
            way = (step + 1 - warmup) / (total - warmup)
            if way > 0:
                fall = 1 - way if linear else (1 + math.cos(math.pi * way)) / 2
                rate = args.min_lr + (args.lr - args.min_lr) * fall
            epoch, at = divmod(step, epoch_steps)
            order = np.random.default_rng((args.seed, epoch)).permutation(len(self.images))
            order = order[at * args.batch_size:(at + 1) * args.batch_size]
            for rank in range(self.world):
                common.seed_torch(args.seed, step, rank)
                parts = order[rank::self.world].reshape(-1, args.micro_batch)
                for part in parts:
                    batch = [self.views[epoch, int(i)] for i in part]
                    batch = torch.utils.data.default_collate(batch)
                    yield step, 1 / len(parts) / self.world, batch
            self.update(rate)

    def update(self, rate):
        groups = self.optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            felt = (p.grad / norm).abs()
            self.felt[p] = torch.maximum(self.felt.get(p, felt), felt)
            lost = p.grad.abs() < 1e-5 * p.grad.abs().max()
            self.lost[p] = self.lost.get(p, lost) | lost
            if self.args.clip_grad and norm > self.args.clip_grad:
                p.grad.mul_(self.args.clip_grad / norm)
        for group in groups:
            group["lr"] = rate * group["share"]
        self.norms.append(norm.item())
        self.rates.append(rate)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def equals(self, state, log):
        """The model and the log of a run are those of this loop.

        AdamW moves a weight by about the rate a step, whatever the size of its gradient; so
        weights agree to a hundredth of the rate and 1e-4 of their size. Where a gradient is
        rounding, so is what AdamW makes of it. So two kinds of values do not count: those whose
        share of the gradient's norm never exceeded 1e-6 (keys' biases, those before BatchNorm),
        and those whose gradient was once 1e-5 of the largest in its tensor, or less.
        """
        for first, line in zip([0, *(line["step"] for line in log)], log):
            norm = np.mean(self.norms[first:line["step"]])
            assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)
            assert line["lr"] == pytest.approx(self.rates[line["step"] - 1], rel=1e-5)
        assert self.trained.state_dict().keys() == state["model"].keys()
        for name, value in self.trained.state_dict(keep_vars=True).items():
            tolerance = self.args.lr / 100 + 1e-4 * value.abs()
            wrong = (value - state["model"][name]).abs() > tolerance
            if value in self.felt:
                wrong = wrong & (self.felt[value] > 1e-6) & ~self.lost[value]
            elif name.endswith("running_mean"):      # of what such biases shift
                continue
            assert wrong.double().mean() < 0.001, name


def plain_pretraining(args, world=1):
    """pretrain.main, image by image"""
    grid = args.image_size // args.patch_size
    objectives = args.objective.split("_")
    images = data.open_images(args.data, "train", args.image_size)
    views = data.TrainViews(images, args.image_size, args.seed, grid, args.mask_ratio)
    teacher = checkpoint.load_encoder(args.teacher, grid=grid).eval()
    common.seed_torch(args.seed)
    encoder = model.build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                              experts=args.experts, moe_blocks=args.moe_blocks,
                              drop_path=args.drop_path)
    student = model.Explore(encoder, teacher.dim, args.mask_ratio, args.encoding == "dense",
                            "pixel" in objectives, args.loss_router, SMALL_DECODER)
    plain = Plain(args, student, images, views, betas=args.betas, world=world)
    plain.weights = []
    plain.losses = []
    fixed = dict(token=1.0, cls=args.cls_weight, pixel=args.pixel_weight)
    weights = torch.tensor([fixed[name] for name in objectives])
    experts = 2 if args.loss_router else args.experts
    softmin = args.loss_weights == "softmin"
    if softmin:
        experts = max(experts, 1 + ("pixel" in objectives))
    routed = "pixel" in objectives and (softmin or args.encoding == "dense")
    follows = ["pixel" if routed and e == 1 else "token" for e in range(experts)]
    lambdas = (args.entropy_weight + args.entropy_weight[-1:] * experts)[:experts]
    plain.lambdas = []      # after each step
    plain.totals = []
    blocks = ["router"] if args.loss_router else args.loss_block or encoder.moe_blocks[-1:]
    shared = list(encoder.norm.parameters())
    seen = []
    spread = []      # of each step, the standard deviations of its micro-batches
    if args.balance == "gradnorm":
        weights = torch.ones(len(objectives))
        plain.first = None
    last = 0
    for step, share, batch in plain.steps():
        if step > last and args.balance == "gradnorm":      # from all micro-batches of the last
            values, grads = (torch.stack(x).mean(0) for x in zip(*seen))
            seen = []
            plain.first = values if plain.first is None else plain.first
            norms = grads.norm(dim=1)
            rate = values / plain.first
            goal = (weights * norms).mean() * (rate / rate.mean()) ** args.gradnorm_alpha
            slope = torch.sign(weights * norms - goal) * norms
            weights = (weights - args.gradnorm_lr * slope).clamp_min(1e-3)
            weights = weights / weights.sum() * len(objectives)
        if args.balance == "rlw":
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
            weights = torch.randn(len(objectives), generator=generator).softmax(0)
        if args.variation and step > 0:      # of fewer than ten steps, the plain mean
            lambdas = plain_lambdas(spread[:step], follows, dict(zip(objectives, weights)), args)
        last = step
        pixels = data.augment(batch)
        with torch.no_grad():
            targets, _ = teacher(normalized(pixels))
        pred = student(normalized(pixels), batch["mask"])
        pred = pred._replace(routing=pred.routing | {"router": pred.loss_routing})
        values, regularizer, stds = plain_losses(
            pred, targets, pixels, batch["mask"], objectives, blocks, args.loss_weights,
            args.detach, lambdas, args.entropy_on, args.importance_weight)
        if args.balance == "gradnorm":
            grads = [torch.autograd.grad(x, shared, retain_graph=True) for x in values]
            seen.append((values.detach(), torch.stack([torch.cat(g) for g in grads])))
        if step == len(spread):
            spread.append([])
        spread[step].append({name: std.item() for name, std in stds.items()})
        plain.lambdas[step:] = [lambdas]
        if args.variation:
            plain.lambdas[step:] = [plain_lambdas(spread, follows,
                                                  dict(zip(objectives, weights)), args)]
        plain.weights.append(weights.tolist())
        plain.losses.append(values.tolist())
        total = (weights * values).sum() + regularizer
        plain.totals.append(total.item())
        (share * total).backward()
    return plain


def plain_lambdas(spread, follows, weights, args):
    """std / V, times w for a router; spread: of each step, of each micro-batch, {loss: std}"""
    stds = {name: np.mean([np.mean([micro[name] for micro in step]) for step in spread])
            for name in set(follows)}
    return [stds[name] / args.variation
            * (1 if args.loss_weights == "softmin" else float(weights[name])) for name in follows]


# flags that differ from their defaults, so that a run that ignores one of them is noticed
ODD = ("--max-steps 3 --epochs 3 --warmup-epochs 0.5 --lr 0.01 --min-lr 0.002 --weight-decay 0.5 "
       "--clip-grad 0.5 --betas 0.8 0.7 --drop-path 0.4 --seed 7 --micro-batch 4 --save-every 1 "
       "--experts 3 ")


@pytest.mark.parametrize("flags", (
    "--mask-ratio 0.6 --cls-weight 0.3 --entropy-weight 0.2 --moe-blocks 0 2 3 --loss-block 2 "
    "--recompute",
    "--encoding dense --objective token_cls_pixel --pixel-weight 0.3 --entropy-weight 0.3 0.1 "
    "--importance-weight 2 --loss-weights combine",
    "--objective token_pixel --detach --loss-block 1 3 --entropy-on combine --balance rlw",
    "--encoding dense --objective token_pixel --balance gradnorm --gradnorm-alpha 0.5 "
    "--gradnorm-lr 0.3",
    "--experts 0 --objective token --drop-path 0.1 --clip-grad 0",
    "--loss-router --entropy-weight 0.1",
    "--variation 0.7 --encoding dense --objective token_pixel --balance rlw",
    "--variation 0.3 --objective token_pixel --loss-block 1 3 --entropy-on combine",
    "--loss-router --experts 0 --encoding dense --objective token_pixel --entropy-weight 0.2 0.1",
    "--loss-weights softmin --entropy-weight 0.03 0.2 --experts 0 --objective token_pixel",
    "--loss-weights softmin --variation 0.5 --encoding dense --objective token_pixel "
    "--balance gradnorm --gradnorm-lr 0.3 --experts 1",
    "--loss-weights uniform --balance gradnorm --gradnorm-alpha 0 --gradnorm-lr 0.1 "
    "--image-size 48"))
def test_pretraining_equals_a_plain_loop(stage, monkeypatch, flags):
    monkeypatch.setattr(pretrain, "build_student", small_decoder)
    recomputed = spy(monkeypatch, torch.utils.checkpoint, "checkpoint")
    argv = stage("pretrain", ODD + flags)
    state, log = train(argv)
    assert bool(recomputed) == ("recompute" in flags)
    plain = plain_pretraining(pretrain.parse_args(argv))
    plain.equals(state, log)
    assert log[-1]["loss"] == pytest.approx(np.mean(plain.totals), rel=1e-3)
    assert log[-1]["objective_weights"] == pytest.approx(np.mean(plain.weights, 0), rel=1e-3)
    assert ("lambda" in log[-1]) == (len(plain.lambdas[0]) > 0)
    if "lambda" in log[-1]:
        assert log[-1]["lambda"] == pytest.approx(np.mean(plain.lambdas, 0), rel=1e-3)
    assert len(log[-1].get("scale", [])) == " ".join(state["model"]).count(".scale")


@needs_loopback
@pytest.mark.parametrize("flags", (
    "--balance gradnorm --gradnorm-lr 0.3",
    "--experts 0 --loss-weights softmin --variation 0.5"))
def test_two_processes_equal_a_plain_loop_over_the_images_of_both(stage, flags, tmp_path):
    argv = stage("pretrain", ODD + "--micro-batch 2 " + flags)
    run_two("pretrain.py", *argv)
    plain = plain_pretraining(pretrain.parse_args(argv), world=2)
    state, log = read_run(tmp_path / "run")
    plain.equals(state, log)
    if "gradnorm" in flags:
        assert torch.allclose(state["balance"]["first"], plain.first)
    expected = np.mean(plain.losses, 0)
    assert [log[-1]["token"], log[-1]["cls"]] == pytest.approx(expected, rel=1e-5)
    assert log[-1]["lambda"] == pytest.approx(np.mean(plain.lambdas, 0), rel=1e-3)


@pytest.mark.parametrize("flags, names", (
    ("", ["token", "token"]),
    ("--encoding dense --objective token_pixel --loss-router", ["token", "pixel"])))
def test_lambda_is_the_losses_std_by_the_variation_whatever_the_micro_batch(stage, monkeypatch,
                                                                            flags, names):
    """The number of processes changes nothing either: see the plain loop of two.

    The rate is small, so the loss changes little within the steps of the running mean.
    """
    monkeypatch.setattr(pretrain, "build_student", small_decoder)
    monkeypatch.setattr(run, "LOG_EVERY", 1)
    found = []
    for micro_batch in (4, 12):
        words = (f"--variation 0.5 --drop-path 0 --lr 1e-5 --epochs 9 --max-steps 5 --batch-size "
                 f"12 --micro-batch {micro_batch} {flags}")
        _, log = train(stage("pretrain", words, out=f"run{micro_batch}"))
        for line in log:
            for value, name in zip(line["lambda"], names):
                assert 0.67 < value * 0.5 / line[f"{name}_std"] < 1.5
        found.append(log[-1]["lambda"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def layerwise(depth, decay):
    """The rate of each parameter by its layer: embeddings, `depth` blocks, then the rest."""
    def rate(name):
        if block := re.search(r"encoder\.blocks\.(\d+)\.", name):
            return decay ** (depth - int(block[1]))
        embeddings = ("encoder.patch_embed", "encoder.pos_embed", "encoder.cls_token")
        return decay ** (depth + 1) if name.startswith(embeddings) else 1
    return rate


def plain_supervised(name, args, world=1):
    """finetune.main and linprobe.main, image by image -> (the loop, the trained model)"""
    strong = args.augment == "strong"
    encoder = checkpoint.load_encoder(args.checkpoint)
    size = getattr(args, "image_size", None) or 32
    images = data.open_images(args.data, "train", size)
    views = data.TrainViews(images, size, args.seed)
    if strong:
        views = finetune.StrongViews(images, size, args.seed, erase=name == "finetune")
    common.seed_torch(args.seed)
    if name == "finetune":
        encoder = checkpoint.load_encoder(args.checkpoint, size // 8)
        for i, block in enumerate(encoder.blocks[1:], start=1):
            block.drop_path = model.DropPath(args.drop_path * i / 3)
        for i in encoder.moe_blocks:
            encoder.blocks[i].mlp.dropout = args.expert_dropout or 0.0
        frozen = {"fr": (".phi", "mlp.scale"), "fa": (".attn.",), "exd": (), "none": ()}
        for recipe, (key, p) in itertools.product(args.recipe, encoder.named_parameters()):
            if any(part in key for part in frozen[recipe]):
                p.requires_grad_(False)
        head = finetune.LinearHead(96, 4, args.pool, std=0.001 * 0.02)
        rates = layerwise(4, args.layer_decay)
    else:
        encoder.requires_grad_(False)
        head = {"linear": finetune.LinearHead, "ep": linprobe.EfficientProbe}[name](96, 4)
        rates = layerwise(4, 1)
    trained = finetune.Classifier(encoder, head)
    plain = Plain(args, trained, images, views, rates, world=world)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=4),
                           v2.CutMix(alpha=1.0, num_classes=4)])
    for _, share, batch in plain.steps():
        inputs = normalized(data.augment(batch))
        target = F.one_hot(batch["label"], 4).float()
        if strong:
            inputs, target = mix(inputs, batch["label"])
            target = 0.9 * target + 0.1 / 4
        loss = -(target * trained(inputs).log_softmax(1)).sum(1).mean()
        (share * loss).backward()
    return plain, trained


UNUSUAL_SUPERVISED = ("--max-steps 3 --epochs 3 --warmup-epochs 1 --lr 0.02 --min-lr 0.002 "
                      "--seed 7 --weight-decay 0.5 --clip-grad 0.5 --save-every 1 ")


@pytest.mark.parametrize("name, flags", (
    ("finetune", "--recipe fr exd --expert-dropout 0.3 --layer-decay 0.4 --drop-path 0.4 "
                 "--image-size 48"),
    ("finetune", "--recipe fa --layer-decay 1 --drop-path 0.4 --pool mean --augment plain "
                 "--clip-grad 0"),
    ("linear", ""), ("ep", "--augment plain")))
def test_supervised_stages_equal_a_plain_loop(stage, name, flags):
    argv = stage(name, f"{UNUSUAL_SUPERVISED} --batch-size 32 --micro-batch 16 {flags}")
    scores, state, log = play(name, argv)
    args = SCRIPTS[name].parse_args(argv)
    plain, trained = plain_supervised(name, args)
    plain.equals(state, log)

    trained.load_state_dict(state["model"])      # or rounding would decide between near equals
    trained.eval()
    size = trained.encoder.config["image_size"]
    hits = []
    for image, label in data.open_images(args.data, "val", size):
        view = normalized(data.center_view(image, size) / 255)[None]
        hits.append(trained(view).argmax().item() == label)
    assert log[-1]["top1"] == pytest.approx(100 * np.mean(hits))
    assert scores["top1"] == max(line["top1"] for line in log) and len(log) == 3


@needs_loopback
def test_two_processes_accumulate_the_gradients_of_finetuning_as_a_plain_loop(stage, tmp_path):
    argv = stage("finetune", f"{UNUSUAL_SUPERVISED} --batch-size 16 --micro-batch 2 --recipe none "
                 "--drop-path 0.4 --layer-decay 0.5 --augment plain")
    run_two("finetune.py", *argv)
    plain, _ = plain_supervised("finetune", finetune.parse_args(argv), world=2)
    plain.equals(*read_run(tmp_path / "run"))


def plain_segmentation(segmenter, val, crop, classes):
    """Mean IoU in percent, with a loop over the windows and one over the classes."""
    hits = np.zeros(classes)
    union = np.zeros(classes)
    stride = round(crop * 341 / 512)
    bicubic = TF.InterpolationMode.BICUBIC
    for i in range(len(val)):
        image = TF.resize(val[i][0], crop, interpolation=bicubic, antialias=True)
        image = normalized(image / 255)[None]
        truth = val.annotation(i)
        total = torch.zeros(2, classes, *image.shape[2:])
        starts = ({min(at, side - crop) for at in range(0, side, stride)}
                  for side in image.shape[2:])
        for top, left in itertools.product(*starts):
            logits, _ = segmenter(image[:, :, top:top + crop, left:left + crop])
            logits = F.interpolate(logits, (crop, crop), mode="bilinear")[0]
            window = torch.stack([logits, torch.ones_like(logits)])
            total[:, :, top:top + crop, left:left + crop] += window
        mean = (total[0] / total[1])[None]
        found = F.interpolate(mean, truth.shape, mode="bilinear")[0].argmax(0) + 1
        for c in range(classes):
            hits[c] += ((found == c + 1) & (truth == c + 1)).sum()
            union[c] += ((truth > 0) & ((found == c + 1) | (truth == c + 1))).sum()
    return 100 * np.mean(hits[union > 0] / union[union > 0])


def test_segmentation_equals_a_plain_loop(stage):
    argv = stage("segment", "--max-steps 3 --iterations 6 --warmup-iterations 2 --lr 0.003 "
                 "--min-lr 0.0003 --seed 7 --weight-decay 0.5 --clip-grad 0.5 --batch-size 8 "
                 "--micro-batch 4 --save-every 1 --drop-path 0.4 --layer-decay 0.6 --crop-size 40 "
                 "--recipe fr exd --expert-dropout 0")
    _, state, log = play("segment", argv)
    args = segment.parse_args(argv)
    scenes, val = (segment.Scenes(args.data, split) for split in ("training", "validation"))
    common.seed_torch(args.seed)
    encoder = checkpoint.load_encoder(args.checkpoint, 5)
    for i, block in enumerate(encoder.blocks[1:], start=1):
        block.drop_path = model.DropPath(0.4 * i / 3)
    segmenter = segment.Segmenter(encoder, 11, args.width)
    for key, p in segmenter.named_parameters():
        frozen = key.endswith((".phi", "mlp.scale")) or key.startswith("encoder.norm")
        p.requires_grad_(not frozen)
    views = segment.TrainScenes(scenes, 40, 11, args.seed)
    plain = Plain(args, segmenter, scenes, views, layerwise(4, args.layer_decay))
    for _, share, batch in plain.steps(linear=True):
        truth = batch["annotation"].long()
        loss = 0.0
        for part, logits in zip((1.0, 0.4), segmenter(normalized(batch["image"] / 255))):
            logits = F.interpolate(logits, (40, 40), mode="bilinear").log_softmax(1)
            named = logits.gather(1, (truth - 1).clamp_min(0)[:, None])[:, 0]
            loss = loss - part * (named * (truth > 0)).sum() / truth.numel()      # of all pixels
        (share * loss).backward()
    plain.equals(state, log)
    segmenter.load_state_dict(state["model"])      # or rounding would decide between near equals
    miou = plain_segmentation(segmenter.eval(), val, 40, 11)
    assert log[-1]["miou"] == pytest.approx(miou, rel=1e-5)


def test_drawn_shapes_are_segmented_too_and_evaluated_on_others(stage, monkeypatch):
    """They have 11 classes and ADE20K has 150, unless --classes says otherwise."""
    training = spy(monkeypatch, segment, "TrainScenes")
    evaluation = spy(monkeypatch, segment, "EvalScenes")
    drawn, scenes = (stage("segment", f"--max-steps 1 --seed 7 {flags}", out=out)
                     for flags, out in (("--data shapes", "drawn"), ("", "scenes")))
    for argv in (drawn, scenes):
        at = argv.index("--classes")
        del argv[at:at + 2]
    play("segment", drawn)
    for calls, expected in ((training, (0, 32, 11, 7)), (evaluation, (1, 32, 11))):
        shapes, *others = calls[0].args
        assert (shapes.stream, *others) == expected
    play("segment", scenes)
    assert training[1].args[1:] == (32, 150, 7) and evaluation[1].args[1:] == (32, 150)


def test_all_processes_evaluate_with_the_buffers_of_the_first(monkeypatch):
    process = common.Process(argparse.Namespace(amp="off", workers=0))
    process.world = 2      # the other adds nothing
    monkeypatch.setattr(common.dist, "all_reduce", lambda *args: None)
    monkeypatch.setattr(common.dist, "broadcast", lambda buffer, source: buffer.fill_(7 + source))
    norm = nn.BatchNorm2d(3)
    views = [dict(image=torch.zeros(3, 8, 8), label=0)]
    finetune.evaluate(nn.Sequential(norm, nn.Flatten()), views, process)
    assert (norm.running_mean == 7).all() and norm.training
    norm = nn.BatchNorm2d(3)
    norm.forward = lambda images: [images.repeat(1, 4, 1, 1)[:, :11]]
    views = segment.EvalScenes(Shapes("val", 8), 8, 11)
    views.dataset.length = 1
    segment.evaluate(norm, views, process)
    assert (norm.running_mean == 7).all() and norm.training


def test_evaluations_sum_over_all_processes():
    process = common.Process(argparse.Namespace(amp="off", workers=0))
    process.sum = lambda hits: hits + torch.tensor([1, 1])      # another process's
    logits = torch.eye(8)[[0, 1, 2, 3]] + torch.arange(8) * 0.01
    views = [dict(image=torch.zeros(3, 8, 8), label=label) for label in (0, 4, 3, 3)]
    classifier = nn.Identity()
    classifier.forward = lambda images: logits
    scores = finetune.evaluate(classifier, views, process)      # labels are 1st, 5th, 6th, 1st
    assert scores == {"top1": 75.0, "top5": 100.0}
    process.sum = lambda matrix: torch.eye(11)      # as if the others had all pixels right
    views = segment.EvalScenes(Shapes("val", 8), 8, 11)
    views.dataset.length = 2
    segmenter = nn.Identity()
    segmenter.forward = lambda images: [images.new_zeros(len(images), 11, 2, 2)]
    assert segment.evaluate(segmenter, views, process)["miou"] == 100


# ----------------------------------------------------- resuming, saving, being stopped

@pytest.mark.parametrize("name, flags, number", (
    ("pretrain", "--balance gradnorm --gradnorm-lr 0.2 --variation 0.2 --drop-path 0.2 "
                 "--micro-batch 4", signal.SIGUSR1),
    ("pretrain", "--balance rlw", signal.SIGHUP),
    ("finetune", "", signal.SIGTERM),
    ("ep", "", signal.SIGINT), ("segment", "", signal.SIGTERM)), ids=str)
def test_a_run_stopped_by_a_signal_is_the_run_that_was_never_stopped(
        stage, monkeypatch, name, flags, number, capsys, tmp_path):
    """It finishes the step, saves and leaves with 0, or 130 for Ctrl-C; it resumes its bits."""
    _, whole, _ = play(name, stage(name, flags, out="whole"))
    argv = stage(name, flags, out="parts")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        at_step(patch, 2, lambda: os.kill(os.getpid(), number))
        play(name, argv)
    assert stop.value.code == (130 if number == signal.SIGINT else 0)
    last = tmp_path / "parts" / "last.pt"
    said = f"{number.name}: {last} holds step 3; the same command resumes"
    assert said in capsys.readouterr().out
    play(name, [*argv, "--max-steps", "5", "--workers", "1"])
    _, parts, log = play(name, argv)
    assert_same_bits(whole, parts)
    assert parts["step"] == log[-1]["step"] == 8


def test_a_finished_run_stays_as_it_is(stage, tmp_path):
    argv = stage("pretrain", "--max-steps 9")      # it has eight
    assert train(argv)[0]["step"] == 8
    written = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    train(argv)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == written


def driver(tmp_path, fault, at_exit="0"):
    """Writes a program that pretrains, and evaluates `fault` in the middle of each step.

    `fault` is an expression of `step`, counted from 1, and `rank`. `at_exit` is evaluated when
    the program ends. -> the program's path
    """
    path = tmp_path / "driver.py"
    path.write_text(f"""
import atexit, itertools, os, signal, sys
import torch.distributed as dist
sys.path.insert(0, {str(HERE)!r})
import common, pretrain
set_rate, steps, rank = common.set_rate, itertools.count(1), os.environ.get("RANK")
atexit.register(lambda: {at_exit})
common.set_rate = lambda *args: (step := next(steps), {fault}, set_rate(*args))
common.launch(pretrain.main, pretrain.parse_args())
""", "utf-8")
    return path


def test_a_signal_to_all_processes_of_a_run_leaves_no_traceback(stage, tmp_path):
    """As terminals and schedulers send it: to the loader's processes too."""
    argv = stage("pretrain", "--epochs 3000 --save-every 1")
    program = driver(tmp_path, "step == 6 and os.killpg(0, signal.SIGTERM)")
    code, out, error = finish(start(program, *argv, "--workers", "2"))
    assert code == 0 and "Traceback" not in error and "SIGTERM: " in out, error
    assert checkpoint.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 6


def test_a_signal_that_is_ignored_as_under_nohup_stays_ignored(stage, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert train(stage("pretrain"))[0]["step"] == 8


def test_a_second_ctrl_c_leaves_at_once(stage, tmp_path):
    fault = "step == 3 and [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"
    program = start(driver(tmp_path, fault), *stage("pretrain", "--save-minutes 1e-9"))
    code, _, error = finish(program)
    assert code == -signal.SIGINT and "Traceback" not in error
    assert checkpoint.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 2


# in one write, for two processes write at once
GROUP = "os.write(1, f'group {dist.is_initialized()}\\n'.encode())"


@needs_loopback
def test_two_processes_leave_together_when_one_gets_the_signal_and_one_resumes(stage, tmp_path):
    argv = stage("pretrain", "--drop-path 0")
    whole, _ = train(stage("pretrain", "--drop-path 0", out="whole"))
    fault = "step == 3 and rank == '1' and os.kill(os.getpid(), signal.SIGTERM)"
    torchrun = sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split()
    code, out = run_command(*torchrun, driver(tmp_path, fault, GROUP), *argv)
    assert code == 0 and "SIGTERM: " in out and "last.pt holds step 3;" in out
    assert re.findall("group (.*)", out) == ["False", "False"]      # NCCL warns of one left behind
    parts, _ = train(argv)                     # another number of processes: the same curve
    assert parts["step"] == 8
    torch.testing.assert_close(whole["model"], parts["model"], rtol=1e-5, atol=1e-4)


@needs_loopback
@pytest.mark.parametrize("name", ("ep", "segment"))
def test_other_stages_resume_and_evaluate_with_another_number_of_processes(stage, name, tmp_path):
    argv = stage(name, f"--lr 1e-3 --save-every {4 if name == 'segment' else 1}")
    play(name, [*argv, "--max-steps", "3"])
    out = run_two(f"{SCRIPTS[name].__name__}.py", *argv)
    state, log = read_run(tmp_path / "run")
    assert state["step"] == 8 and run.finite(state)
    assert [line["step"] for line in log if "top1" in line or "miou" in line] == [4, 8]
    scores, again, _ = play(name, argv)      # one process sees the two processes' numbers
    assert scores == again["best"] == state["best"]
    printed = ", ".join(f"{key} {value:.2f}%" for key, value in scores.items())
    assert out.splitlines()[-1].endswith(f"best {printed}")


@needs_loopback
def test_all_processes_start_from_the_same_step_or_none_starts(stage):
    """As on two machines that share no disk; one of them has a last.pt."""
    play("finetune", stage("finetune", "--max-steps 2", out="one"))
    argvs = [stage("finetune", out=out) for out in ("one", "two")]
    for program in start_two("finetune.py", *argvs, machines=2):
        code, _, error = finish(program)
        assert code == 2
        assert "not all processes see the same last.pt: --out must be on a disk" in error


def test_a_run_resumes_with_its_own_stage_and_flags_alone(capsys, stage):
    argv = stage("pretrain")
    train([*argv, "--max-steps", "1"])
    for name, value in (("epochs", "3"), ("lr", "0.1"), ("seed", "7"), ("batch-size", "4"),
                        ("weight-decay", "0.1"), ("min-lr", "1e-4"), ("warmup-epochs", "0.5"),
                        ("clip-grad", "1"), ("drop-path", "0")):
        assert f"(--{name} was " in refusal(capsys, "pretrain", *argv, f"--{name}", value)
    error = refusal(capsys, "pretrain", *argv, "--experts", "4", "--mask-ratio", "0.5")
    assert "--experts was 2, is 4; --mask-ratio was 0.4, is 0.5" in error
    error = refusal(capsys, "finetune", *stage("finetune"))
    assert "holds a run of pretrain.py: give another --out" in error


def test_a_flag_that_only_the_last_checkpoint_knows_keeps_it_from_resuming(
        capsys, stage, tmp_path):
    """As of another version, which had more flags."""
    state, _ = train(stage("pretrain", "--max-steps 1"))
    torch.save(state | {"args": state["args"] | {"old_flag": 3}}, tmp_path / "run" / "last.pt")
    error = refusal(capsys, "pretrain", *stage("pretrain"))
    assert "(--old-flag was 3, is None)" in error


def test_flags_that_say_where_or_how_fast_are_free(stage, monkeypatch, tmp_path):
    free = {"data", "teacher", "checkpoint", "out", "workers", "micro_batch", "compile",
            "recompute", "amp", "save_every", "save_minutes", "max_steps"}
    assert free == common.FREE_FLAGS
    train(stage("pretrain", "--max-steps 1"))
    (tmp_path / "run").rename(tmp_path / "moved")
    calls = spy(monkeypatch, pretrain, "explore_losses")
    free = ("--amp bf16 --micro-batch 4 --recompute --no-compile --workers 1 --save-every 1 "
            "--save-minutes 1 --max-steps 2")
    assert train(stage("pretrain", free, out="moved"))[0]["step"] == 2
    pred, targets = calls[-1].args[:2]
    assert pred.tokens.dtype == targets.dtype == torch.bfloat16


@pytest.mark.parametrize("growth, scale", ((1.0, 4.0), (2.0, 1.0)))
def test_the_scaler_goes_on_but_not_that_of_another_precision(stage, tmp_path, growth, scale):
    state, _ = train(stage("pretrain", "--max-steps 1"))
    state["scaler"] |= {"scale": 4.0, "growth_factor": growth}      # fp16's grows by 2
    torch.save(state, tmp_path / "run" / "last.pt")
    resumed, _ = train(stage("pretrain", "--max-steps 2"))
    assert resumed["scaler"]["scale"] == scale


@pytest.mark.parametrize("name, title", (("pretrain", "--teacher"), ("linear", "CHECKPOINT")))
def test_a_run_notices_other_contents_and_classes_in_the_same_place(
        stage, photos, encoder, tmp_path, capsys, name, title):
    copy = shutil.copytree(photos, tmp_path / "copy")      # the same files in another place
    first = shutil.copy(encoder, tmp_path / "first.pt")
    moved = shutil.copy(encoder, tmp_path / "moved.pt")

    def command(file, folder, *flags):
        argv = stage(name, f"--data {folder}", *flags)
        return [*argv, "--teacher", str(file)] if name == "pretrain" else [str(file), *argv[1:]]
    play(name, command(first, photos, "--max-steps", "1"))
    assert play(name, command(moved, copy, "--max-steps", "2"))[1]["step"] == 2
    write_checkpoint(first, experts=2)
    error = refusal(capsys, name, *command(first, photos))
    assert f"({title} was {moved}, is {first}, with other contents)" in error
    write_checkpoint(moved, experts=2)
    error = refusal(capsys, name, *command(moved, photos))
    assert f"({title} was {moved}, is {moved}, with other contents)" in error
    if name == "linear":      # pretraining has no classes
        for split in ("train", "val"):
            (copy / split / "class_3").rename(copy / split / "class_9")
        error = refusal(capsys, name, *command(moved, copy))
        assert (f"with other contents; the classes in --data {copy} changed; the validation "
                f"classes in --data {copy} changed)") in error


@pytest.mark.parametrize("name", ("pretrain", "finetune"))
def test_a_run_goes_on_with_another_number_of_images_or_folder_and_says_so(
        stage, photos, tmp_path, capsys, name):
    copy = shutil.copytree(photos, tmp_path / "copy")
    argv = stage(name, f"--data {copy}")
    play(name, [*argv, "--max-steps", "1"])
    (copy / "train" / "class_1" / "0.jpg").unlink()
    capsys.readouterr()
    assert play(name, [*argv, "--max-steps", "2"])[1]["step"] == 2
    said = "--data was {} with {} images, is {} with {} images: the run goes on with these"
    assert capsys.readouterr().out.splitlines()[0] == said.format(copy, 32, copy, 31)
    moved = copy.rename(tmp_path / "moved")
    assert play(name, [*argv, "--data", str(moved), "--max-steps", "3"])[1]["step"] == 3
    assert capsys.readouterr().out.splitlines()[0] == said.format(copy, 31, moved, 31)
    play(name, [*argv, "--data", str(moved), "--max-steps", "4"])
    assert "goes on" not in capsys.readouterr().out


def test_the_log_of_a_killed_run_goes_on_where_its_checkpoint_does(stage, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "LOG_EVERY", 2)
    argv = stage("pretrain", "--save-minutes 0")
    train([*argv, "--max-steps", "3"])
    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_text()
    log.write_text(lines + '{"step": 4}\n{"step": 6}\n{"st')      # killed while it wrote
    _, resumed = train(argv)
    assert [line["step"] for line in resumed] == [2, 3, 4, 6, 8]
    assert log.read_text().startswith(lines)


@pytest.mark.parametrize("breaks", (
    lambda state: {name: part for name, part in state.items() if name != "optimizer"},
    lambda state: state | {"model": state["model"] | {"head.weight": torch.zeros(1)}},
    None), ids=("a part missing", "another shape", "cut off"))
def test_a_last_checkpoint_that_does_not_resume_is_named(stage, tmp_path, capsys, breaks):
    state, _ = train(stage("pretrain", "--max-steps 1"))
    last = tmp_path / "run" / "last.pt"
    if breaks:
        torch.save(breaks(state), last)
    else:
        last.write_bytes(last.read_bytes()[:1000])
    error = refusal(capsys, "pretrain", *stage("pretrain"))
    assert error.startswith(f"cannot resume from {last} (")


def test_a_run_folder_has_what_the_readme_says_and_its_lock_is_released(stage, tmp_path, teacher):
    def locks():
        links = Path("/proc/self/fd").iterdir()
        return [link for link in links if os.path.realpath(link).endswith(".lock")]
    before = locks()
    folder = tmp_path / "run"
    train(stage("pretrain", "--max-steps 4 --save-every 1"))
    assert locks() == before
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "args.json", "epoch_0000.pt", "epoch_0001.pt", "last.pt", "log.jsonl"]
    assert json.loads((folder / "args.json").read_text())["teacher"] == teacher
    kept = checkpoint.load_checkpoint(folder / "epoch_0001.pt")
    assert kept["args"]["experts"] == 2 and kept["step"] == 4 and "optimizer" not in kept
    assert checkpoint.load_encoder(kept).moe_blocks == [1, 3]


def test_a_save_that_fails_is_one_line_and_leaves_the_last_checkpoint(stage, tmp_path, capsys):
    argv = stage("pretrain", "--save-minutes 1e-9")      # last.pt at every step
    before, _ = train([*argv, "--max-steps", "1"])
    last = tmp_path / "run" / "last.pt"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))      # as on a full disk
    try:
        error = refusal(capsys, "pretrain", *argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    reason = f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}"
    assert error == f"cannot write {last} ({reason}); {last} holds step 1"
    assert not list((tmp_path / "run").glob("*.tmp"))
    assert_same_bits(before, checkpoint.load_checkpoint(last))
    assert train([*argv, "--max-steps", "2"])[0]["step"] == 2


def test_a_log_that_cannot_be_written_is_one_line_too(stage, tmp_path, capsys, monkeypatch):
    """A disk that is full after the first line of the resumed run."""
    monkeypatch.setattr(run, "LOG_EVERY", 1)
    argv = stage("pretrain", "--epochs 4 --save-every 9")
    train([*argv, "--max-steps", "12"])
    log = tmp_path / "run" / "log.jsonl"
    length = len(log.read_bytes())
    assert length > 2 * len((tmp_path / "run" / "args.json").read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + 900, hard))
    try:
        error = refusal(capsys, "pretrain", *argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    reason = f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}"
    assert error == f"cannot write {log} ({reason}); {log.with_name('last.pt')} holds step 12"
    _, lines = train(argv)      # half a line was written
    assert [line["step"] for line in lines] == list(range(1, 17))


def test_a_damaged_log_is_cut_there_and_nothing_else_is_lost(stage, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "LOG_EVERY", 1)
    argv = stage("pretrain", "--drop-path 0")
    whole, _ = train([*argv[:-2], "--out", str(tmp_path / "whole"), "--drop-path", "0"])
    train([*argv, "--max-steps", "5"])
    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:2], b'{"step": 3, \n', *lines[3:]]))
    with open(log, "rb") as file:
        before = os.fstat(file.fileno()).st_ino
    capsys.readouterr()
    state, rows = train(argv)
    assert f"{log}: line 3 is damaged; the log ends before it" in capsys.readouterr().out
    assert [row["step"] for row in rows] == [1, 2, 6, 7, 8]
    assert log.read_bytes().startswith(lines[0] + lines[1])
    assert log.stat().st_ino == before      # cut in place: no moment without a log
    assert_same_bits(whole, state)


def test_a_complete_run_stays_complete_and_one_in_the_middle_keeps_its_schedule(
        stage, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "LOG_EVERY", 1)
    folder = shutil.copytree(photos, tmp_path / "copy")
    argv = stage("pretrain", f"--data {folder} --save-every 1 --warmup-epochs 1.5")
    train([*argv, "--max-steps", "3"])
    for i in range(8):      # ten steps instead of eight
        shutil.copy(folder / "train/class_0/0.jpg", folder / f"train/class_1/more_{i}.jpg")
    state, log = train(argv)
    assert state["step"] == log[-1]["step"] == 8
    assert "with 32 images, is" in capsys.readouterr().out
    plan = common.make_plan(pretrain.parse_args(argv), 1, 32)      # six steps of warm-up, not eight
    assert [line["lr"] for line in log] == pytest.approx(
        [plan.learning_rate(step) for step in range(8)], rel=1e-5)
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    state, log = train(argv)
    assert "complete, " in capsys.readouterr().out and state["step"] == 8
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files


def test_another_validation_set_is_said_and_the_best_starts_anew(
        stage, photos, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(photos, tmp_path / "copy")
    scores = iter([90.0, 0.0])
    monkeypatch.setattr(finetune, "evaluate", lambda *args: {"top1": next(scores)})
    argv = stage("finetune", f"--data {folder} --save-every 1")
    play("finetune", [*argv, "--max-steps", "4"])
    (folder / "val/class_2/1.jpg").unlink()
    best, state, _ = play("finetune", argv)
    assert "--data had 16 validation images, has 15: earlier scores" in capsys.readouterr().out
    assert best == state["best"] == {"top1": 0.0}
    assert checkpoint.load_checkpoint(tmp_path / "run" / "best.pt")["step"] == 8


def test_a_flag_that_an_unfinished_run_did_not_know_is_said_and_taken(stage, tmp_path, capsys):
    argv = stage("pretrain")
    state, _ = train([*argv, "--max-steps", "2"])
    del state["args"]["importance_weight"]
    torch.save(state, tmp_path / "run" / "last.pt")
    assert train(argv)[0]["step"] == 8
    assert ("the run was started before there was --importance-weight, and goes on with 0.0"
            in capsys.readouterr().out)


def test_another_precision_starts_the_scale_anew_and_says_so(stage, tmp_path, capsys, monkeypatch):
    argv = stage("pretrain")
    state, _ = train([*argv, "--max-steps", "2"])
    assert "the scale of the loss" not in capsys.readouterr().out
    state["scaler"] |= {"growth_factor": 2.0, "scale": 1024.0}      # a run in fp16
    state["args"]["amp"] = "fp16"
    torch.save(state, tmp_path / "run" / "last.pt")
    state, _ = train(argv)
    assert ("--amp was fp16, is off: the scale of the loss starts anew"
            in capsys.readouterr().out)
    assert state["scaler"]["scale"] == 1


@pytest.mark.parametrize("first", (0, 1))
def test_the_first_step_does_not_count_as_training_time(stage, monkeypatch, first):
    """It compiles, and starts DDP, in a run that resumes, too."""
    if first:
        train(stage("pretrain", "--max-steps 1"))
    seconds = iter([0.0, *itertools.accumulate([100.0] + 1000 * [1.0])])
    monkeypatch.setattr(run, "time", Mock(wraps=time, perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(run.Log, "waiting", lambda log, batches: batches)
    monkeypatch.setattr(run, "LOG_EVERY", 4)
    _, log = train(stage("pretrain"))
    assert log[first]["images_per_second"] == 8 * (3 - first) / 1      # restarted, and read again
    assert log[first + 1]["images_per_second"] == 8 * 4 / 1


@pytest.mark.parametrize("flags, last", (("", 8), ("--max-steps 5", 5)))
def test_a_signal_in_the_last_step_ends_a_run_that_is_complete(stage, tmp_path, monkeypatch,
                                                              capsys, flags, last):
    """slurm.sh would put it into the queue again."""
    end_step = run.Run.end_step
    monkeypatch.setattr(run.Run, "end_step", lambda self, step, *args: (
        step == last - 1 and self.signals.append(signal.SIGUSR1), end_step(self, step, *args))[1])
    state, _ = train(stage("pretrain", flags))
    assert state["step"] == last and "SIGUSR1" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ("segment", "ep"))
def test_batch_normalization_of_one_image_is_refused_before_training(stage, capsys, tmp_path, name):
    error = refusal(capsys, name, *stage(name, "--micro-batch 1"))
    assert error.startswith("--micro-batch 1: batch normalization needs two images")
    assert not (tmp_path / "run").exists()
    assert play(name, stage(name, "--micro-batch 2 --max-steps 1"))[1]["step"] == 1


FAILURES = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import argparse, common, run
rank = int(os.environ["RANK"])
process = common.Process(argparse.Namespace(amp="off", workers=0))


def fail(text):
    raise common.UserError(text)


def attempt(name, main):
    try:
        common.launch(main, None)
    except SystemExit as stop:
        print(name, rank, stop.code, flush=True)


common.leave_group = lambda: None
attempt("alone", lambda args: rank == 1 and fail("disk of one"))
attempt("both", lambda args: fail("disk of both"))
attempt("first", lambda args: process.first_alone(fail, "of the first: ü" + 2000 * "x"))
process.first_alone(print, "once")
folder = Path({folder!r})
plan = common.Plan(1, 1, 4, 8, 1, 4, 1e-3, 1e-6, "cosine")
args = argparse.Namespace(out=str(folder), batch_size=2, max_steps=None, stage="x", data="x")
training = run.Run(args, process, plan, [], {{}}, {{}})
attempt("lock", lambda args: training.resume())
training.log = run.Log(folder / "nowhere" / "log.jsonl", process, 0, 2)
attempt("log", lambda args: process.first_alone(training.write_line))
attempt("save", lambda args: training.save("nowhere/last.pt", 1, ()))
"""


@needs_loopback
def test_two_processes_fail_together_and_say_why_once(tmp_path):
    """A lock that is refused and a file that cannot be written concern the first one alone."""
    folder = tmp_path / "run"
    script = tmp_path / "failures.py"
    script.write_text(FAILURES.format(here=str(HERE), folder=str(folder)))
    with common.lock(folder):
        programs = list(map(finish, start_two(script, (), ())))
    assert [code for code, _, _ in programs] == [0, 0]
    out = "".join(out for _, out, _ in programs)
    error = "".join(error for _, _, error in programs)
    ends = sorted(line for line in out.splitlines() if line[-1:] == "2")
    assert ends == ["alone 1 2", *(f"{name} {rank} 2" for name in
                                   ("both", "first", "lock", "log", "save") for rank in (0, 1))]
    assert out.count("once") == 1
    said = [line.split("error: ")[1] for line in error.splitlines() if "failures.py: error" in line]
    assert sorted(line[:13] for line in said) == [
        "another run i", "cannot write ", "cannot write ", "disk of both", "disk of one",
        "of the first:"]
    longest = max(said, key=len)
    assert longest == "of the first: ü" + 2000 * "x"
    assert "Traceback" not in error


@pytest.mark.parametrize("minutes, steps", (("0", [8]), ("0.05", [3, 6, 8])))
def test_long_epochs_are_saved_by_the_clock(stage, monkeypatch, minutes, steps):
    seconds = Mock(side_effect=itertools.count())      # one for each look
    monkeypatch.setattr(run, "time", Mock(wraps=time, monotonic=seconds))
    saves = spy(monkeypatch, torch, "save")
    train(stage("pretrain", f"--save-minutes {minutes}"))
    files = [(Path(each.args[1].name).stem, each.args[0]["step"]) for each in saves]
    assert [step for name, step in files if name == "last.pt"] == steps
    assert files[0] == ("epoch_0000.pt", 0)
    assert files[-2:] == [("epoch_0002.pt", 8), ("last.pt", 8)]


def another_process(monkeypatch, step, *seen):
    """In this step, where processes compare as many values, another one has these."""
    def largest(process, *values, alone=common.Process.largest):
        return list(map(max, values, seen)) if len(values) == len(seen) else alone(process, *values)
    for at, function in ((step, largest), (step + 1, common.Process.largest)):
        at_step(monkeypatch, at, functools.partial(
            monkeypatch.setattr, common.Process, "largest", function))


def test_all_processes_save_when_the_clock_of_one_says_so(stage, monkeypatch):
    another_process(monkeypatch, 2, True, 0)      # last.pt is old, there is no signal
    saves = spy(monkeypatch, torch, "save")
    train(stage("pretrain"))
    assert [each.args[0]["step"] for each in saves if "last.pt" in each.args[1].name] == [3, 8]


def test_all_processes_leave_when_one_gets_a_signal(stage, monkeypatch, tmp_path, capsys):
    another_process(monkeypatch, 2, False, float(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        train(stage("pretrain"))
    said = f"SIGTERM: {tmp_path / 'run' / 'last.pt'} holds step 3; the same command resumes"
    assert stop.value.code == 0 and said in capsys.readouterr().out


def test_no_process_saves_when_one_holds_a_nan(stage, monkeypatch, capsys, tmp_path):
    another_process(monkeypatch, 4, True)
    error = refusal(capsys, "pretrain", *stage("pretrain", "--save-minutes 1e-9"))
    last = tmp_path / "run" / "last.pt"
    assert error.startswith("step 5: the model or the optimizer holds a NaN or infinity; "
                            f"{last} holds step 4")
    assert checkpoint.load_checkpoint(last)["step"] == 4


def test_the_best_checkpoint_is_that_of_the_highest_score_also_after_a_restart(
        stage, monkeypatch, tmp_path):
    scores = iter([dict(top1=50.0, top5=90.0), dict(top1=80.0, top5=85.0),
                   dict(top1=60.0, top5=99.0), dict(top1=80.0, top5=99.0)])
    monkeypatch.setattr(finetune, "evaluate", lambda *args: next(scores))
    argv = stage("finetune", "--epochs 4 --save-every 1")
    play("finetune", [*argv, "--max-steps", "8"])
    best, state, log = play("finetune", argv)
    assert best == state["best"] == {"top1": 80.0, "top5": 85.0}
    assert [line["top1"] for line in log] == [50.0, 80.0, 60.0, 80.0]      # the first of equals
    assert checkpoint.load_checkpoint(tmp_path / "run" / "best.pt")["step"] == 8


def test_a_second_run_in_the_same_folder_says_so_and_leaves(stage, tmp_path, capsys):
    argv = stage("pretrain", "--max-steps 1")
    (tmp_path / "run").mkdir()
    program = ("import fcntl; fcntl.lockf(f := open('.lock', 'w+'), fcntl.LOCK_SH); "
               "print('locked'); input()")
    holder = subprocess.Popen([sys.executable, "-u", "-c", program], cwd=tmp_path / "run",
                              text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == "locked\n"
    assert f"another run is using {tmp_path / 'run'}" in refusal(capsys, "pretrain", *argv)
    holder.kill()                              # however the first one ended
    holder.communicate()
    assert train(argv)[0]["step"] == 1


def test_numbers_that_stay_wrong_stop_the_run_and_reach_no_checkpoint(stage, monkeypatch, capsys,
                                                                       tmp_path):
    assert run.PATIENCE == run.LOG_EVERY == 20
    monkeypatch.setattr(run, "PATIENCE", 7)
    monkeypatch.setattr(run, "LOG_EVERY", 5)
    argv = stage("pretrain", "--epochs 5")
    good, _ = train([*argv, "--max-steps", "3"])
    last = tmp_path / "run" / "last.pt"
    with monkeypatch.context() as patch:
        patch.setattr(losses, "token_loss", lambda pred, target: (pred * math.nan).mean(-1))
        error = refusal(capsys, "pretrain", *argv)
    said = f"step 10: 7 updates in a row had no finite gradient; {last} holds step 3. To"
    assert error.startswith(said)
    assert_same_bits(good, checkpoint.load_checkpoint(last))
    assert train([*argv, "--max-steps", "4", "--amp", "bf16"])[0]["step"] == 4


def spoil_steps(monkeypatch, *wrong):
    """Makes the loss of some steps a NaN, and a run stop after five of them in a row."""
    steps = itertools.count()

    def token_loss(*args, loss=losses.token_loss):
        return loss(*args) * (math.nan if next(steps) in wrong else 1.0)
    monkeypatch.setattr(losses, "token_loss", token_loss)
    monkeypatch.setattr(run, "PATIENCE", 5)


def test_fewer_wrong_numbers_are_left_out_and_counted(stage, monkeypatch):
    monkeypatch.setattr(run, "LOG_EVERY", 10)
    spoil_steps(monkeypatch, 0, 1, 2, 4, 5, 6, 9, *range(10, 14))
    state, log = train(stage("pretrain", "--epochs 5"))
    assert state["step"] == 20 and run.finite(state)
    assert [line["skipped"] for line in log] == [7, 4]


def test_one_nan_in_the_optimizers_state_alone_is_not_saved(stage, capsys, monkeypatch, tmp_path):
    good, _ = train(stage("pretrain", "--max-steps 1"))

    def spoil(optimizer, *args, step=common.optimizer_step):
        metrics = step(optimizer, *args)
        [*optimizer.state.values()][-1]["exp_avg_sq"].view(-1)[-1] = math.nan
        return metrics
    monkeypatch.setattr(common, "optimizer_step", spoil)
    error = refusal(capsys, "pretrain", *stage("pretrain", "--max-steps 2"))
    assert "step 2: the model or the optimizer holds a NaN or infinity" in error
    assert_same_bits(good, checkpoint.load_checkpoint(tmp_path / "run" / "last.pt"))


@pytest.mark.parametrize("wrong", (math.nan, math.inf, -math.inf))
def test_every_element_of_every_tensor_of_a_checkpoint_has_to_be_finite(wrong):
    tensors = torch.zeros(2, 3), torch.zeros(5), torch.zeros(())
    state = {"model": {"a": tensors[0]}, "step": 7,
             "optimizer": {"state": {0: {"b": tensors[1]}, 1: {"c": tensors[2]}}, "groups": [0.1]}}
    assert run.finite(state)
    for tensor in tensors:
        for i in range(tensor.numel()):
            tensor.view(-1)[i] = wrong
            assert not run.finite(state)
            tensor.zero_()


def test_skipped_updates_count_in_a_row_alone(stage, monkeypatch):
    """Log lines are after steps 4, 6, 8 and 12: four are skipped, two are not, two are skipped."""
    monkeypatch.setattr(run, "LOG_EVERY", 6)
    spoil_steps(monkeypatch, 0, 1, 2, 3, 6, 7)
    _, log = train(stage("pretrain", "--epochs 3 --save-every 1"))
    assert [line["skipped"] for line in log] == [4, 0, 2, 0]


@pytest.mark.parametrize("name", ("pretrain", "finetune", "segment"))
def test_no_checkpoint_ever_holds_a_nan(stage, capsys, name, tmp_path):
    error = refusal(capsys, name, *stage(name, "--lr 1e39 --save-every 1 --save-minutes 1e-9"))
    assert "the model or the optimizer holds a NaN or infinity; nothing was saved yet" in error
    for path in (tmp_path / "run").glob("*.pt"):
        assert run.finite(checkpoint.load_checkpoint(path)), path


# ------------------------------------------------------------- log, bar, names, flags

def test_the_first_lines_say_what_runs_and_the_last_where_its_result_is(stage, tmp_path, capsys):
    out = tmp_path / "run"
    train(stage("pretrain", "--max-steps 3"))
    what, where, last = capsys.readouterr().out.splitlines()
    assert what == ("pretrain: vit_nano, 0.6 M parameters, 2 experts, token_cls; 32 images; steps "
                    "0 to 3 of 8, 4 an epoch; 1 x cpu in float32")
    assert where == f"{out}: a new run"
    speed = r"step 3 of 8; \d+ images/s, \d+% of the time waiting for them"
    assert re.fullmatch(rf"{re.escape(str(out))}: {speed}; next: .*", last)
    first = (out / "epoch_0000.pt").read_bytes()
    train(stage("pretrain", "--max-steps 2"))      # less than it has done
    what, where, _ = capsys.readouterr().out.splitlines()
    assert "steps 3 to 3 of 8" in what
    assert where == f"{out}: resumes, {out / 'last.pt'} holds step 3"
    assert (out / "epoch_0000.pt").read_bytes() == first


def test_the_next_commands_can_be_pasted(stage, photos, tmp_path, capsys):
    folder = str(shutil.copytree(Path(photos, "train", "class_0"), tmp_path / "my photos"))
    train(stage("pretrain", "--max-steps 1", "--data", folder))
    pictures, scores = capsys.readouterr().out.rsplit("next: ", 1)[1].split("; with labels: ")
    heatmaps, curves = pictures.split("; ")
    run = f"{tmp_path}/run"
    assert shlex.split(heatmaps) == ["python", "routing.py", f"{run}/last.pt", "--data", folder]
    assert shlex.split(curves) == ["python", "plot.py", run]
    assert shlex.split(scores) == ["python", "knn.py", f"{run}/epoch_*.pt", "--data", folder]


def test_the_log_says_what_share_of_the_time_went_into_waiting_for_the_loader(stage, monkeypatch):
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(run.time, "perf_counter", clock)

    def slow(owner, name, seconds):
        function = getattr(owner, name)

        def wrapped(*args):
            clock.return_value += seconds
            return function(*args)
        monkeypatch.setattr(owner, name, wrapped)
    slow(data.TrainViews, "__getitem__", 0.5)      # 4 s for a batch of 8
    slow(common, "set_rate", 6)
    _, log = train(stage("pretrain", "--max-steps 6 --save-every 1"))
    assert log[-1]["loader_wait"] == pytest.approx(0.4)      # of two steps
    assert log[-1]["images_per_second"] == pytest.approx(0.8)


def test_training_on_the_first_batch_alone_lowers_the_loss_and_logs_the_diagnostics(stage):
    _, log = train(stage("pretrain", "--repeat-batch --epochs 10 --lr 4e-3 --drop-path 0"))
    first, last = log[0], log[-1]
    assert last["token"] < 0.7 * first["token"] and last["cls"] < first["cls"]
    assert [(line["step"], line["epoch"]) for line in log] == [(20, 5), (40, 10)]
    total = last["token"] + 0.4 * last["cls"] + last["entropy_loss"]
    assert last["loss"] == pytest.approx(total, rel=1e-3)
    assert last.keys() >= {"token_unweighted", "token_ratio"}
    for name in ("entropy", "dispatch_cv", "cls_share", "scale", "objective_weights"):
        assert len(last[name]) == 2      # experts, MoE blocks, objectives
    assert last["loader_wait"] == 0


def test_scales_are_logged_in_the_order_of_blocks_and_then_that_of_the_loss_router(stage,
                                                                                   monkeypatch):
    def build(args, teacher_dim):
        student = small_decoder(args, teacher_dim)
        for i in student.encoder.moe_blocks:
            student.encoder.blocks[i].mlp.scale.data.fill_(5 - i)
        student.loss_router.scale.data.fill_(9)
        return student
    monkeypatch.setattr(pretrain, "build_student", build)
    state, log = train(stage("pretrain", "--max-steps 1 --loss-router --moe-blocks 3 0 2"))
    names = [*(f"encoder.blocks.{i}.mlp.scale" for i in (0, 2, 3)), "loss_router.scale"]
    expected = [state["model"][name].item() for name in names]      # after the step
    assert log[0]["scale"] == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx([5, 3, 2, 9], abs=0.1)


def test_a_resumed_run_repeats_the_same_batch(stage, monkeypatch):
    drawn = []

    def view(views, rng, image, label, draw=data.TrainViews.view):
        drawn.append(image)
        return draw(views, rng, image, label)
    monkeypatch.setattr(data.TrainViews, "view", view)
    for steps in (1, 3):
        train(stage("pretrain", f"--repeat-batch --micro-batch 4 --max-steps {steps}"))
    assert len(drawn) == 16
    assert all(torch.equal(a, b) for a, b in zip(drawn[:8], drawn[8:]))


def test_metrics_keep_no_graph(stage, monkeypatch):
    def add(log, metrics, add=run.Log.add):
        assert not any(value.requires_grad for value in metrics.values())
        add(log, metrics)
    monkeypatch.setattr(run.Log, "add", add)
    for name in ("pretrain", "finetune", "segment"):
        play(name, stage(name, "--max-steps 1", out=name))


def test_a_router_that_collapses_is_warned_of(recwarn):
    routed, softmin = (argparse.Namespace(loss_weights=kind) for kind in ("combine", "softmin"))
    pretrain.warn_of_collapse(routed, {"token_ratio": 0.2, "token": 0.1})
    pretrain.warn_of_collapse(softmin, {"token_ratio": 0.199})
    assert not recwarn
    with pytest.warns(UserWarning, match="the weights collapse: pixel_ratio"):
        pretrain.warn_of_collapse(routed, {"pixel_ratio": 0.199})


@pytest.mark.parametrize("name, flags, folder", (
    ("pretrain", "--workers 3 --micro-batch 8 --max-steps 4 --amp bf16 --save-every 1", ""),
    ("pretrain", "--data cifar10 --lr 1e-3 --detach", "_data=cifar10_detach=True_lr=0.001"),
    ("pretrain", "--entropy-weight 5 24", "_entropy_weight=5.0+24.0"),
    ("pretrain", "--teacher timm/a/random", "_teacher=timm-a-random"),
    ("finetune", "runs/a/x.pt", "_checkpoint=runs-a-x.pt")))
def test_the_run_folder_is_named_after_the_flags_that_matter(name, flags, folder):
    assert SCRIPTS[name].parse_args(flags.split()).out == f"runs/{name}{folder}"


@pytest.mark.parametrize("name, flags, hint", (
    ("segment", "x.pt --epochs 3", "--epochs is --iterations here"),
    ("finetune", "--warmup-iterations 3", "--warmup-iterations is --warmup-epochs here"),
    ("segment", "x.pt --image-size 3", "--image-size is --crop-size here"),
    ("pretrain", "--batch_size 3", "--batch_size is --batch-size here"),
    ("pretrain", "--entropy-weigth=3", "--entropy-weigth is --entropy-weight here")))
def test_a_flag_of_another_stage_or_spelling_is_named(capsys, name, flags, hint):
    with pytest.raises(SystemExit):
        SCRIPTS[name].parse_args(flags.split())
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"; {hint}")


def test_data_in_another_place_is_another_run_folder(monkeypatch, tmp_path):
    names = [pretrain.parse_args(["--data", folder]).out
             for folder in ("/a/train", "/b/train", "/a/b/../train", "a/train")]
    assert names[0] == names[2] and len(set(names)) == 3
    for name in names:
        assert re.fullmatch("runs/pretrain_data=train-[0-9a-f]{6}", name)


def test_a_long_name_of_a_run_folder_is_shortened_and_stays_unique(tmp_path):
    """File systems take 255 bytes; letters may take several."""
    names = {Path(linprobe.parse_args([f"runs/{'ü' * 300}/{end}.pt"]).out).name for end in "ab"}
    assert len(names) == 2
    for name in names:
        (tmp_path / name).mkdir()
        assert re.fullmatch("linprobe_checkpoint=runs-ü+-[0-9a-f]{8}", name)
    for letters, shortened in (      # 200 bytes and more
            (170 * "x", False), (171 * "x", True), (85 * "ü", False), (86 * "ü", True)):
        name = Path(linprobe.parse_args([f"runs/{letters}/a.pt"]).out).name
        assert (name != f"linprobe_checkpoint=runs-{letters}-a.pt") == shortened


@pytest.mark.parametrize("name, expected", (
    ("pretrain", dict(lr=1.5e-3, min_lr=1e-6, weight_decay=0.05, clip_grad=3.0, drop_path=0.1,
                      betas=[0.9, 0.95], seed=42, batch_size=4096, epochs=300, mask_ratio=0.4,
                      experts=2, entropy_weight=[5.0], cls_weight=0.4, pixel_weight=1.0,
                      save_every=10, save_minutes=30.0, data="there")),
    ("knn", dict(k=20, temperature=0.07)),
    ("linear", dict(lr=2e-3, weight_decay=0.0, batch_size=2048, epochs=100)),
    ("finetune", dict(lr=5e-4, layer_decay=0.65, drop_path=0.1, batch_size=1024, epochs=100)),
    ("segment", dict(lr=8e-5, layer_decay=0.85, crop_size=512, iterations=160_000,
                     batch_size=16))))
def test_the_defaults_are_the_papers(monkeypatch, name, expected):
    monkeypatch.setenv("IMAGENET", "there")
    args = vars(SCRIPTS[name].parse_args([] if name == "pretrain" else ["x.pt"]))
    assert args == args | expected


@pytest.mark.parametrize("flags, backend", (
    ("", "aot_eager"), ("--balance gradnorm", "aot_eager"),      # it compiles backward passes, too
    ("--objective token_cls_pixel --encoding dense", "eager")))
def test_compiled_training_follows_the_plain_curve(stage, monkeypatch, flags, backend):
    compiler = functools.partial(torch.compile, backend=backend)
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(pretrain, "build_student", small_decoder)
    monkeypatch.setitem(model.PRESETS, "vit_nano", dict(dim=96, depth=2, heads=3))
    flags = f"--drop-path 0 --max-steps 2 --micro-batch 4 {flags}"
    plain, (plain_line,) = train(stage("pretrain", f"{flags} --no-compile", out="plain"))
    compiled, (line,) = train(stage("pretrain", f"{flags} --compile", out="compiled"))
    for name in ("loss", "token", "entropy_loss", "grad_norm", "objective_weights"):
        assert plain_line[name] == pytest.approx(line[name], rel=1e-4), name
    torch.testing.assert_close(plain["model"], compiled["model"], rtol=1e-5, atol=1e-4)


def test_every_block_is_compiled_in_few_graphs_that_serve_all_steps(stage, monkeypatch):
    """Eleven blocks have eleven probabilities of drop path, more than torch.compile tries."""
    graphs = []
    calls = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *args: calls.append(graph) or graph(*args)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setitem(model.PRESETS, "vit_nano", dict(dim=96, depth=12, heads=3))
    seen = []
    end_step = run.Run.end_step
    monkeypatch.setattr(run.Run, "end_step", lambda *args: (
        seen.append((len(graphs), len(calls))), end_step(*args))[1])
    torch._dynamo.reset()
    train(stage("pretrain", "--max-steps 4 --compile --drop-path 0.3 --recompute"))
    compiled, called = zip(*seen)
    assert compiled[1] == compiled[3] < 12
    # each block twice, for its outputs are computed again; the teacher; explore_losses
    assert min(np.diff(called)) >= 12 * 2 + 1 + 1      # PyTorch 2.6 splits some in two


@pytest.mark.parametrize("flags, expected", (
    ("--image-size 33", "image size 33 is no multiple of patch size 8"),
    ("--batch-size 33", "has only 32 training images"),
    ("--micro-batch 3", "--micro-batch 3 does not divide 8, each process's share"),
    *((f"--experts 0 {flags}", f"{flags.split()[0]} needs --experts above 0") for flags in (
        "--detach", "--loss-block 3", "--loss-weights combine", "--entropy-weight 1",
        "--entropy-on combine", "--importance-weight 1")),
    ("--experts 0 --variation 0.1", "--variation needs --experts above 0 or --loss-router, or "),
    ("--variation 0.1 --loss-weights uniform", "--variation needs --loss-weights dispatch"),
    ("--variation 0.1 --entropy-weight 5", "--variation needs a run without --entropy-weight"),
    ("--loss-weights softmin", "softmin needs --entropy-weight or --variation"),
    ("--loss-weights softmin --entropy-weight 1 0", "softmin needs an --entropy-weight above 0"),
    *((f"--loss-weights {kind} --entropy-weight 1 {flag}",
       f"{flag} needs --loss-weights dispatch or combine")
      for kind in ("uniform", "softmin") for flag in ("--detach", "--loss-router")),
    *((f"--loss-weights softmin --entropy-weight 1 --experts 0 {flags}",
       f"{flags.split()[0]} needs --experts above 0")
      for flags in ("--loss-block 3", "--entropy-on combine", "--importance-weight 1")),
    ("--experts 0 --loss-weights softmin --entropy-weight 1 2",
     "has 2 values; this run uses at most 1"),
    ("--experts 0 --moe-blocks 1 --loss-router", "--moe-blocks needs --experts above 0"),
    ("--balance gradnorm --cls-weight 1", "--cls-weight needs --balance static"),
    ("--objective token --cls-weight 1", "--cls-weight needs --balance static, and cls in"),
    ("--pixel-weight 2", "--pixel-weight needs --balance static, and pixel in --objective"),
    ("--balance rlw --gradnorm-lr 1", "--gradnorm-lr needs --balance gradnorm"),
    ("--loss-block 2", "--loss-block [2]: the MoE blocks are [1, 3]"),
    ("--moe-blocks 4", "MoE blocks [4]: there are blocks 0 to 3"),
    ("--entropy-weight 1 2 3", "--entropy-weight has 3 values; this run uses at most 2"),
    ("--loss-router --experts 3 --entropy-weight 1 2 3", "has 3 values; this run uses at most 2"),
    ("--loss-router --loss-block 3", "--loss-block needs a run without --loss-router"),
    ("--experts 1 --objective token_pixel --encoding dense",
     "--experts 1: expert 1 weights the pixel loss, so there must be 2"),
    ("--balance gradnorm --objective token", "--balance needs an --objective of several terms"),
    ("--mask-ratio 0.01", "--mask-ratio 0.01 masks 0 of 16 patches"),
    ("--warmup-epochs 300", "--warmup-epochs 300 leaves nothing of --epochs 2"),
    ("--teacher ViT-B-32/", "teacher ViT-B-32/: no such file, and neither open_clip's"),
    ("--teacher ViT-Z-99/openai", "teacher ViT-Z-99/openai: "),
    ("--teacher timm/vit_tiny_patch16_224/x.pth", "teacher timm/vit_tiny_patch16_224/x.pth: "),
    ("--teacher README.md", "README.md: not a PyTorch file of plain tensors"),
    ("--data README.md", "--data README.md: "), ("--data nowhere", "--data nowhere: ")))
def test_bad_flags_are_refused_by_name(capsys, stage, tmp_path, monkeypatch, flags, expected):
    monkeypatch.chdir(HERE)
    assert expected in refusal(capsys, "pretrain", *stage("pretrain", flags))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name, flags, expected", (
    ("segment", "--crop-size 50", "--crop-size 50 is not a multiple of the patch size 8"),
    ("segment", "--warmup-iterations 9", "--warmup-iterations 9 leaves nothing of"),
    ("segment", "--warmup-iterations 8", "--warmup-iterations 8 leaves nothing of"),
    ("segment", "--data nowhere", "expected ADE20K's layout"),
    ("finetune", "--recipe none fr", "none excludes the others"),
    ("finetune", "--recipe fr --expert-dropout 0.4", "--expert-dropout needs --recipe exd"),
    ("finetune", "--image-size 33", "--image-size 33 is not a multiple of the patch size 8"),
    ("knn", "-k 33", "-k 33: there are only 32 training images")))
def test_bad_flags_of_later_stages_are_refused_by_name(capsys, stage, name, flags, expected):
    assert expected in refusal(capsys, name, *stage(name, flags))


def test_recipes_for_experts_need_experts(stage, teacher, capsys):
    _, *argv = stage("finetune", "--recipe fa exd")
    expected = f"--recipe fa exd: {teacher} has no experts"
    assert expected in refusal(capsys, "finetune", teacher, *argv)


@pytest.mark.parametrize("name, refused", (
    ("pretrain", "--epoch 3, --epochs 0, --experts -1, --lr fast, --objective pixels, "
     "--clip-grad -1, --lr inf, --mask-ratio nan, --mask-ratio 0, --mask-ratio 1, --betas 0.9 1, "
     "--variation 0, --seed 4294967296, --seed -1, --workers -1, --loss-block -1, "
     "--drop-path 1, --entropy-weight nan, --gradnorm-lr -1, --micro-batch 0"),
    ("finetune", "--expert-dropout 1, --layer-decay 0, --layer-decay 1.001, --drop-path 1, "
     "--weight-decay nan, --model vit_base, --patch-size 16"),
    ("knn", "--temperature -1, --temperature 0, -k 0")))
def test_values_without_a_meaning_are_refused_by_the_parser(name, refused, capsys):
    for flags in refused.split(", "):
        argv = [*([] if name == "pretrain" else ["x.pt"]), *flags.split()]
        with pytest.raises(SystemExit) as stop:
            SCRIPTS[name].parse_args(argv)
        assert stop.value.code == 2
        assert flags.split()[0] in capsys.readouterr().err.splitlines()[-1], flags


# ------------------------------------------------ k-NN, probes, finetuning, segmentation

@pytest.mark.parametrize("temperature", (0.07, 5.0))      # at 5.0, one neighbor more would show
@pytest.mark.parametrize("k", (1, 6, 61))
def test_knn_is_the_weighted_vote_of_the_nearest(temperature, k):
    bank = F.normalize(torch.randn(61, 7), dim=1)
    queries = F.normalize(torch.randn(300, 7), dim=1)
    labels = torch.randint(0, 4, (61,))      # of five classes, the last has no image
    cosine = queries @ bank.T
    near = cosine.argsort(1, descending=True)[:, :k]
    weight = (cosine.gather(1, near).double() / temperature).exp()
    vote = weight[..., None] * F.one_hot(labels[near], 5)
    for chunk in (256, 300, 7):                                 # in pieces as in one
        ours = knn.classify(queries, bank, labels, 5, k, temperature, chunk)
        assert torch.equal(ours, vote.sum(1).argmax(1))
    # what the smallest temperature leaves is the nearest
    nearest = knn.classify(queries, bank, labels, 5, 20, 1e-300)
    assert torch.equal(nearest, labels[near[:, 0]])


def test_knn_votes_on_cls_after_the_norm_of_normalized_images(photos, tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "e.pt", experts=2)
    encoder = checkpoint.load_encoder(path).eval()
    calls = spy(monkeypatch, knn, "classify")
    flags = ["-k", "7", "--temperature", "0.05", "--out", str(tmp_path / "out"), *QUICK]
    accuracy, = knn.main(knn.parse_args([path, "--data", photos, *flags]))
    assert (tmp_path / "out" / "knn.jsonl").exists()
    val, bank = (data.Folder(photos, split) for split in ("val", "train"))
    for images, features in zip((val, bank), calls[0].args):
        views = [normalized(data.center_view(image, 32) / 255)[None] for image, _ in images]
        tokens = torch.cat([encoder(view)[0][:, 0] for view in views])
        assert torch.allclose(features, F.normalize(tokens, dim=1), atol=1e-6)
    assert calls[0].args[2].tolist() == bank.targets
    assert calls[0].args[3:] == (4, 7, 0.05)
    predicted = knn.classify(*calls[0].args)
    assert accuracy == 100 * np.mean(predicted.numpy() == val.targets)


@needs_loopback
def test_knn_prints_the_best_and_appends_rows_the_same_in_two_processes(photos, tmp_path, capsys):
    paths = [write_checkpoint(tmp_path / f"e{experts}.pt", experts=experts)
             for experts in (0, 2)]
    flags = ["--data", photos, "-k", "5", "--batch-size", "5", *QUICK]  # unequal last batches
    results = knn.main(knn.parse_args([*paths, *flags]))
    printed = capsys.readouterr().out
    best = paths[results.index(max(results))]
    assert printed.splitlines()[-1] == f"best: {max(results):.2f}%  {best}"
    assert run_two("knn.py", *paths, *flags) == printed
    lines = (tmp_path / "knn.jsonl").read_text().splitlines()
    rows = [tuple(json.loads(line)[key] for key in ("checkpoint", "data", "k", "top1"))
            for line in lines]
    assert rows == [(path, photos, 5, top1) for path, top1 in zip(paths, results)] * 2


def test_knn_opens_a_set_once_for_each_image_size(photos, tmp_path, monkeypatch):
    opened = spy(monkeypatch, data, "open_images")
    paths = [write_checkpoint(tmp_path / f"{i}.pt", image_size=size)
             for i, size in enumerate((32, 48, 32))]
    knn.main(knn.parse_args([*paths, "--data", photos, *QUICK]))
    assert [each.args[1:3] for each in opened] == [
        ("train", 32), ("val", 32), ("train", 48), ("val", 48)]


def test_a_checkpoint_with_experts_is_finetuned_with_all_three_recipes(stage, monkeypatch):
    calls = spy(monkeypatch, finetune, "apply_recipe")
    argv = stage("finetune", "--max-steps 1 --weight-decay 0.1")
    after = play("finetune", argv)[1]["model"]
    before = checkpoint.load_checkpoint(argv[0])["model"]
    last = calls[0].args[1].blocks[3]
    assert last.mlp.dropout == 0.4 and last.drop_path.p == pytest.approx(0.1)
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    assert frozen == {name for name in before
                      if name.endswith((".phi", "mlp.scale")) or ".attn." in name}


@pytest.mark.parametrize("flags, expected", (
    ([], ("vit_base", 224, 16, 0.1)),
    ([*TOY, "--drop-path", "0.3"], ("vit_nano", 32, 8, 0.3))), ids=("default", "flags"))
def test_training_from_scratch_is_of_the_papers_model_unless_told(monkeypatch, photos, flags,
                                                                  expected):
    build = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(finetune, "build_vit", build)
    with pytest.raises(InterruptedError):
        finetune.main(finetune.parse_args(["--data", photos, *flags]))
    vit = build.call_args.kwargs
    assert expected == (*build.call_args.args, vit["image_size"], vit["patch_size"],
                        vit["drop_path"])


def test_efficient_probing_is_one_query_a_slice_of_the_values_of_patches():
    tokens = torch.randn(2, 6, 96)
    probe = linprobe.EfficientProbe(96, 7).eval()
    assert probe.queries.std().item() == pytest.approx(0.02, rel=0.05)
    for tensor in (probe.queries, probe.value.bias, probe.norm.running_mean):
        nn.init.normal_(tensor)
    probe.norm.running_var.uniform_(0.5, 2)
    patches = tokens[:, 1:]
    weights = (patches @ probe.queries.T / 96 ** 0.5).softmax(1)
    values = probe.value(patches)
    pooled = [(weights[:, :, q, None] * values[:, :, 3 * q:3 * q + 3]).sum(1) for q in range(32)]
    deviation = (probe.norm.running_var + 1e-5).sqrt()
    normed = (torch.cat(pooled, 1) - probe.norm.running_mean) / deviation
    assert torch.allclose(probe(tokens), probe.head(normed), atol=1e-5)


@pytest.mark.parametrize("pool, pooled", (
    ("cls", lambda tokens: tokens[:, 0]), ("mean", lambda tokens: tokens[:, 1:].mean(1))))
def test_the_linear_head_pools_where_asked(pool, pooled):
    encoder = nano()
    images = torch.rand(2, 3, 32, 32)
    head = finetune.LinearHead(96, 1000, pool)
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.05) and not head.bias.any()
    nn.init.normal_(head.bias)
    expected = pooled(encoder(images)[0]) @ head.weight.T + head.bias
    assert torch.allclose(finetune.Classifier(encoder, head)(images), expected, atol=1e-5)


def test_a_finetuned_head_starts_at_a_thousandth_of_the_usual_size(stage, monkeypatch):
    heads = spy(monkeypatch, finetune, "Classifier")
    monkeypatch.setattr(finetune, "fit_classifier", Mock())
    finetune.main(finetune.parse_args(stage("finetune")))
    assert heads[0].args[1].weight.std().item() == pytest.approx(0.001 * 0.02, rel=0.2)


@pytest.mark.parametrize("name", ("linear", "ep"))
def test_a_probe_trains_its_head_alone_and_its_checkpoint_holds_the_encoder(
        stage, monkeypatch, name, capsys, photos):
    argv = stage(name, "--max-steps 4")
    before = checkpoint.load_checkpoint(argv[0])["model"]
    _, state, _ = play(name, argv)
    assert "M parameters, 0.0 M of them trained" in capsys.readouterr().out
    assert all(torch.equal(state["model"][key], value) for key, value in before.items())
    heads = [key for key in state["model"] if key.startswith("head.") and "running" not in key]
    trained = sum(len(group["params"]) for group in state["optimizer"]["param_groups"])
    assert trained == len([key for key in heads if "num_batches" not in key])
    last = Path(argv[argv.index("--out") + 1], "last.pt")
    knn.main(knn.parse_args([str(last), "--data", photos, *QUICK]))


def test_rand_augment_is_timms():
    import timm.data
    transforms = timm.data.create_transform(
        32, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", hflip=0,
        interpolation="bicubic").transforms
    theirs = next(each for each in transforms if "RandAugment" in repr(each))
    ours = finetune.rand_augment(32)
    picture = TF.to_pil_image(Shapes("train", 32)[0][0])
    same = 0
    for seed in range(2000):                 # none of ours fails, as posterizing to 0 bits does
        random.seed(seed)
        np.random.seed(seed)
        after = ours(picture)
        random.seed(seed)
        np.random.seed(seed)
        with contextlib.suppress(ValueError):
            same += after == theirs(picture)
    assert same > 1900                       # magnitudes at timm's limit of 10 aside


def test_what_rand_augment_draws_is_a_function_of_seed_epoch_and_index():
    def draw(seed, *key):
        views = finetune.StrongViews(Shapes("train", 8), 8, seed)
        drawn = []
        views.rand_augment = lambda picture: drawn.extend((random.random(), np.random.rand())
                                                          ) or picture
        views[key]
        return drawn
    keys = list(itertools.product((3, 5), (0, 1), (2, 7)))
    drawn = list(itertools.starmap(draw, keys))
    assert len(set(itertools.chain(*drawn))) == 2 * 8      # of Python and of NumPy
    assert drawn == list(itertools.starmap(draw, keys))


def test_strong_views_augment_and_erase_crops_from_8_percent_on(photos, monkeypatch):
    images = data.Folder(photos, "train")
    state = torch.get_rng_state()
    plain = data.TrainViews(images, 32, 42)
    strong = finetune.StrongViews(images, 32, 42)
    assert (plain.scale, strong.scale) == ((0.2, 1.0), (0.08, 1.0))
    assert (strong[1, 5]["jitter"] == 1).all()
    strong.rand_augment = ImageOps.invert
    assert not torch.equal(255 - plain[1, 5]["image"], strong[1, 5]["image"])
    strong.scale = plain.scale
    erased = spy(monkeypatch, finetune, "random_erasing")
    assert torch.equal(255 - plain[1, 5]["image"], strong[1, 5]["image"])
    assert not erased
    strong.erase = True
    for index in range(32):
        assert torch.equal(strong[1, index]["image"], strong[1, index]["image"])
    assert 0 < len(erased) < 64
    assert torch.equal(torch.get_rng_state(), state)     # which drop path draws from


def test_a_quarter_of_the_images_is_erased(monkeypatch):
    views = finetune.StrongViews(Shapes("train", 8), 8, 0, erase=True)
    erased = spy(monkeypatch, finetune, "random_erasing")
    for index in range(2000):
        views[0, index]
    assert len(erased) / 2000 == pytest.approx(0.25, abs=0.03)


def test_what_is_erased_is_2_to_33_percent_of_an_image_and_becomes_noise():
    rng = np.random.default_rng(0)
    sides, pixels = [], []
    for _ in range(2000):
        image = torch.full((3, 40, 40), 255, dtype=torch.uint8)
        finetune.random_erasing(rng, image)
        erased = (image != 255).any(0)
        sides.append((erased.any(1).sum().item(), erased.any(0).sum().item()))
        pixels.append(image[:, erased] / 255)
    h, w = np.array(sides).T
    quantiles = (np.quantile(h * w / 1600, (0.05, 0.5, 0.9)) - 0.02) / (1 / 3 - 0.02)
    assert quantiles == pytest.approx([0.05, 0.5, 0.9], abs=0.015)
    quantiles = np.quantile(np.log(h / w), (0.1, 0.5, 0.9)) / math.log(1 / 0.3)
    assert quantiles == pytest.approx([-0.8, 0, 0.8], abs=0.06)
    box = image[:, erased.any(1)][:, :, erased.any(0)].double()      # each pixel is drawn anew
    assert box.diff(dim=1).ne(0).double().mean() > 0.8 and box.diff(dim=2).ne(0).any()
    noise = torch.cat(pixels, 1).double()      # its upper end is clipped
    assert torch.allclose(noise.corrcoef(), torch.eye(3).double(), atol=0.05)
    assert noise.quantile(0.5, 1).tolist() == pytest.approx(model.IMAGENET_MEAN, abs=0.01)
    below = noise.quantile(0.5, 1) - noise.quantile(0.16, 1)
    assert below.tolist() == pytest.approx(model.IMAGENET_STD, abs=0.01)


def test_upernet_is_a_pooled_top_a_pyramid_from_the_top_down_and_an_auxiliary_head():
    net = segment.UperNet(6, 5, 8).double().eval()
    maps = [randn(2, 6, 4, 4) for _ in range(4)]
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)

    def resize(x, like):
        return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)
    a, b, c, d = (stride(x) for stride, x in zip(net.strides, maps))
    assert [x.shape[2] for x in (a, b, c, d)] == [16, 8, 4, 2]
    assert torch.equal(c, maps[2])
    assert torch.equal(d, F.max_pool2d(maps[3], 2))
    pooled = [resize(conv(F.adaptive_avg_pool2d(d, bins)), d)
              for bins, (_, conv) in zip((1, 2, 3, 6), net.pyramid)]
    top = net.bottleneck(torch.cat([d, *pooled], 1))
    third = net.lateral[2](c) + resize(top, c)
    second = net.lateral[1](b) + resize(third, b)
    first = net.lateral[0](a) + resize(second, a)
    outputs = [output(x) for output, x in zip(net.output, (first, second, third), strict=True)]
    fused = net.fuse(torch.cat([resize(x, first) for x in (*outputs, top)], 1))
    logits, auxiliary = net(maps)
    assert torch.allclose(logits, net.classify[1](fused))
    assert torch.allclose(auxiliary, net.auxiliary[2](net.auxiliary[0](maps[2])))
    for dropout in (net.classify[0], net.auxiliary[1]):
        dropped = dropout.train()(torch.ones(200, 7, 3, 5))
        assert (dropped == dropped[:, :, :1, :1]).all()      # whole channels of an image
        assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.03)


def test_features_come_from_the_blocks_that_the_release_takes():
    assert segment.feature_blocks(12) == [3, 5, 7, 11]
    assert segment.feature_blocks(24) == [7, 11, 15, 23]


def test_features_are_patch_tokens_before_the_norm():
    vit = nano(experts=2)
    images = torch.rand(2, 3, 32, 32)
    segmenter = segment.Segmenter(vit, 3, 8)
    segmenter.decoder = nn.Identity()
    x = vit.embed(images)
    for block, features in zip(vit.blocks, segmenter(images), strict=True):
        x, _ = block(x)
        assert torch.equal(features, x[:, 1:].transpose(1, 2).reshape(2, 96, 4, 4))


@pytest.mark.parametrize("height, rows", ((12, [0]), (13, [0, 1]), (28, [0, 8, 16])))
def test_sliding_windows_of_a_pointwise_model_are_the_whole_image(height, rows):
    images = torch.randn(1, 3, height, 50)
    images[0, 0] = torch.arange(50 * height).view(height, 50)      # a pixel says its place
    weight = torch.randn(5, 3, 1, 1)
    corners = []

    def pointwise(window):
        corners.append(divmod(int(window[0, 0, 0, 0]), 50))
        return F.conv2d(window, weight)
    logits = segment.sliding_window(pointwise, images, 5, 12, 8)
    assert torch.allclose(logits, F.conv2d(images, weight), atol=1e-5, rtol=1e-5)
    assert corners == list(itertools.product(rows, [0, 8, 16, 24, 32, 38]))


def test_scores_of_a_hand_counted_case():
    annotation = torch.tensor([[1, 1, 1, 2], [2, 2, 0, 0], [4, 4, 4, 4]])      # 0 is ignored
    predicted = torch.tensor([[0, 0, 1, 1], [1, 0, 4, 2], [3, 3, 3, 0]])
    matrix = segment.confusion(predicted, annotation, 5)
    assert segment.scores(matrix) == pytest.approx({      # of classes 1, 2 and 4
        "miou": 100 * (2 / 5 + 2 / 4 + 3 / 4) / 3, "pixel_accuracy": 70,
        "mean_accuracy": 100 * (2 / 3 + 2 / 3 + 3 / 4) / 3})


@pytest.fixture
def scene():
    """-> scenes of one image: class 1 is black, a rectangle of class 9 white"""
    shade = torch.ones(60, 80, dtype=torch.uint8)
    shade[20:45, 30:70] = 9
    picture = (255 * (shade // 9)).expand(3, -1, -1)
    return Mock(__getitem__=lambda self, index: (picture, 0), shade=shade,
                annotation=lambda index: shade.clone())


def test_scene_views_resize_and_move_image_and_annotation_together(scene, monkeypatch):
    views = segment.TrainScenes(scene, 40, 9, seed=3)
    sizes = spy(monkeypatch, TF, "resize")
    padding = torch.tensor([124, 116, 104])      # ImageNet's mean
    seen = set()
    for epoch in range(100):
        view = views[epoch, 0]
        torch.testing.assert_close(view, views[epoch, 0], rtol=0, atol=0)
        assert view["image"].shape == (3, 40, 40)
        bright = view["image"].float().mean(0)
        classes = view["annotation"]
        seen |= set(classes.unique().tolist())
        assert (padding == view["image"][:, classes == 0].T).all()
        if (classes == 1).sum() > 50 and (classes == 9).sum() > 50:
            assert bright[classes == 9].mean() > bright[classes == 1].mean() + 40
    assert seen == {0, 1, 9}                     # 0 is what padding adds
    shorts = [each.args[1] for each in sizes[::2]]      # the image's, not the annotation's
    assert 20 <= min(shorts) < 22 and 78 < max(shorts) <= 80      # half the crop up to twice


def test_scenes_are_cropped_flipped_and_distorted(scene, monkeypatch):
    views = segment.TrainScenes(scene, 40, 9, seed=3)
    monkeypatch.setattr(segment, "scene_crop",
                        lambda rng, classes, crop: [n - 1 for n in classes.shape[1:]])
    assert (views[0, 0]["annotation"] > 0).sum() == 1                   # the last pixel alone
    monkeypatch.setattr(segment, "scene_crop", lambda rng, classes, crop: (0, 0))
    scene.shade.fill_(1)
    scene.shade[:, :10] = 2
    flipped = [views[epoch, 0]["annotation"][0, 0] != 2 for epoch in range(40)]
    assert 10 < sum(flipped) < 30
    monkeypatch.setattr(segment, "photometric_distortion",
                        lambda rng, image: torch.full_like(image, 77))
    view = views[0, 0]
    assert (view["image"][:, view["annotation"] > 0] == 77).all()


def test_photometric_distortion_is_mmsegmentations():
    """The ranges of offset, contrast, saturation, hue, and no permutation of the channels."""
    before = torch.tensor([[130, 60, 50], [100, 100, 100]], dtype=torch.uint8)
    color = colorsys.rgb_to_hsv(*before[0].tolist())
    seen = []
    for seed in range(800):
        rng = np.random.default_rng(seed)
        after = segment.photometric_distortion(rng, before.T[..., None])[..., 0].T
        hue, saturation, _ = colorsys.rgb_to_hsv(*after[0].tolist())
        turn = (hue - color[0] + 0.5) % 1 - 0.5
        seen.append((after.equal(before), turn, saturation, after[1, 0].item()))
    untouched, turn, saturation, gray = np.array(seen, dtype=float).T
    assert untouched.mean() == pytest.approx(1 / 16, abs=0.03)
    assert 0.08 < turn.max() < 0.14 and -0.14 < turn.min() < -0.08               # a tenth
    assert saturation.min() < 0.4 and saturation.max() > 0.85                    # 0.615 before
    for end, turn, expected in ((min, -0.1, 34), (max, 0.1, 198)):      # (100 -+ 32) * (0.5, 1.5)
        rng = Mock(uniform=end, random=lambda: 0.25)
        after = segment.photometric_distortion(rng, before.T[..., None])[..., 0].T
        hue, _, _ = colorsys.rgb_to_hsv(*after[0].tolist())
        assert (hue - color[0] + 0.5) % 1 - 0.5 == pytest.approx(turn, abs=0.01)
        assert after[1].tolist() == [expected] * 3


def test_photometric_distortion_ends_where_a_byte_does_and_hues_go_round():
    def distort(image, offset, contrast, saturation, turn, first=True):
        rng = Mock(uniform=Mock(side_effect=[offset, contrast, saturation, turn]),
                   random=Mock(side_effect=[0.25, 0.25, 0.25 if first else 0.75, 0.25, 0.25]))
        return segment.photometric_distortion(rng, image)
    byte = np.arange(256)
    gray = torch.from_numpy(byte.astype(np.uint8)).expand(3, 1, 256)
    for offset, contrast, first in itertools.product((-32.0, 0.0, 32.0), (0.5, 1.0, 1.5),
                                                      (True, False)):
        expected = np.clip(np.clip(byte + offset, 0, 255) * contrast, 0, 255).astype(np.uint8)
        found = distort(gray, offset, contrast, 1.0, 0.0, first)
        assert (found.numpy() == expected).all(), (offset, contrast, first)
    colors = np.stack([byte, byte * 7 % 256, 0 * byte + 200], -1)[None].astype(np.uint8)
    image = TF.pil_to_tensor(Image.fromarray(colors, "HSV").convert("RGB"))
    h, s, v = np.moveaxis(np.array(TF.to_pil_image(image).convert("HSV")).astype(int), 2, 0)
    for turn, steps, saturation in ((0.1, 26, 1.5), (-0.1, -26, 0.5)):      # 25.6 of 256
        turned = (h + steps) % 256, np.rint(s * saturation).clip(0, 255), v
        expected = Image.fromarray(np.stack(turned, -1).astype(np.uint8), "HSV").convert("RGB")
        found = distort(image, 0.0, 1.0, saturation, turn)
        assert torch.equal(found, TF.pil_to_tensor(expected))


@pytest.mark.parametrize("left, drawn, first", (
    (171, 1, 1), (170, 11, 1), (189, 1, 1), (190, 11, 1), (180, 11, 0)))
def test_a_crop_of_nearly_one_class_is_drawn_again_ten_times_at_most(left, drawn, first):
    annotation = torch.ones(1, 40, 400, dtype=torch.uint8)
    annotation[..., 200:] = 2
    annotation[..., :200] = first              # what is not labeled does not count
    rng = Mock(integers=Mock(side_effect=[0, left] * 11))
    assert segment.scene_crop(rng, annotation, 40) == (0, left)
    assert rng.integers.call_count == 2 * drawn
    assert rng.integers.call_args.args == (361,)


@pytest.mark.parametrize("content, expected", (
    (None, "cannot read the annotation {path} ("),
    (np.zeros((50, 72, 3)), "annotation {path} (mode RGB"),
    (np.zeros((7, 9)), "the annotation {path} has shape (7, 9)"),
    (np.full((36, 72), 12), "its classes end at 12, --classes is 11")),
    ids=("cut off", "in color", "of another shape", "with more classes"))
def test_a_bad_annotation_is_named(stage, scenes, tmp_path, capsys, content, expected):
    shutil.copytree(scenes, tmp_path / "scenes")
    path = tmp_path / "scenes" / "annotations" / "training" / "3.png"
    if content is None:
        path.write_bytes(path.read_bytes()[:-30])
    else:
        Image.fromarray(content.astype(np.uint8)).save(path)
    argv = stage("segment", "--batch-size 8", "--data", str(tmp_path / "scenes"))
    assert expected.format(path=path) in refusal(capsys, "segment", *argv)


# ------------------------------------------------------------------------------ routing

def test_the_silhouette_is_that_of_the_definition():
    features = randn(23, 4)
    three = torch.arange(23) % 3
    three[7] = 5                                                # alone in its cluster: counts 0
    for labels in (three, (torch.arange(23) < 2).int()):        # a cluster of two
        check_silhouette(features, labels)
    assert routing.silhouette(features, torch.zeros_like(labels)) == 0      # of one cluster
    assert routing.silhouette(torch.zeros_like(features), labels) == 0      # of one point


def check_silhouette(features, labels):
    values = []
    for i, label in enumerate(labels.tolist()):
        distance = (features - features[i]).norm(dim=1)
        others = torch.arange(23) != i
        mean = {c: distance[(labels == c) & others].mean().item() for c in labels.tolist()}
        a = mean.pop(label)
        b = min(mean.values())
        values.append((b - a) / max(a, b) if (labels == label).sum() > 1 else 0)
    assert routing.silhouette(features, labels) == pytest.approx(np.mean(values), rel=1e-9)


def test_the_area_under_the_curve_counts_ties_half():
    score = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.2])
    positive = torch.tensor([False, True, False, True, False])
    assert routing.roc_auc(score, positive) == pytest.approx(5.5 / 6)      # of six pairs
    assert math.isnan(routing.roc_auc(score, torch.ones(5, dtype=torch.bool)))


def test_json_has_no_word_for_nan():
    found = run.rounded({"a": [math.nan, 1, {"b": math.inf}], "c": "x", "d": 0.1234567})
    assert found == {"a": [None, 1, {"b": None}], "c": "x", "d": 0.123457}


@pytest.fixture
def write_student(tmp_path, request):
    """write_student(name, **args) -> a pretraining checkpoint

    It has a router for the losses, and a teacher.
    """
    torch.manual_seed(3)
    experts = getattr(request, "param", 2)
    student = model.Explore(nano(experts=experts, depth=6), 60, loss_router=True)
    for i in student.encoder.moe_blocks:
        student.encoder.blocks[i].mlp.scale.data.fill_(3 + i)
        nn.init.normal_(student.encoder.blocks[i].norm2.bias)
    student.loss_router.scale.data.fill_(9)

    def write(name, **args):
        teacher = tmp_path / "teacher.pt"
        if not teacher.exists():
            write_checkpoint(teacher, dim=60)
        (tmp_path / name).mkdir()
        torch.save({"model": student.state_dict(), "encoder": student.encoder.config,
                    "args": {"teacher": str(teacher), "loss_block": [3, 1]} | args,
                    "inputs": {"teacher": run.digest_input(str(teacher))}},
                   tmp_path / name / "last.pt")
        return str(tmp_path / name / "last.pt")
    return write


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take longer than the numbers."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def show(*argv):
    """Runs routing.py on five drawn images -> its numbers, a dict for each checkpoint"""
    flags = "--data shapes --images 5 --seed 3".split()
    return routing.main(routing.parse_args([*argv, *flags, *QUICK]))


@pytest.fixture
def drawn(monkeypatch):
    """{file name: the last figure that was to be saved there}, of matplotlib"""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    figures = {}
    monkeypatch.setattr(Figure, "savefig",
                        lambda figure, path, **how: figures.update({Path(path).name: figure}))
    return figures


def tiles(figure, columns):
    """The images of heatmaps.png -> [rows, columns] of lists of their arrays; the color limits"""
    axes = [axis for axis in figure.axes if axis.images]
    grid = [axes[i:i + columns] for i in range(0, len(axes), columns)]
    return ([[[np.asarray(image.get_array()) for image in axis.images] for axis in row]
             for row in grid], [row[0].images[-1].get_clim() for row in grid[1:]])


@pytest.mark.usefixtures("no_pictures")
@torch.no_grad()
def test_routing_json_equals_numpy_on_the_same_weights(write_student, tmp_path, monkeypatch):
    path = write_student("one")
    measured = spy_results(monkeypatch, routing, "measure")
    monkeypatch.setattr(routing, "TOKENS", 60)
    numbers, = show(path, "--batch-size", "2", "--block", "3")
    written, = json.loads((tmp_path / "one" / "routing.json").read_text())
    assert written.keys() == numbers.keys() and written["block"] == 3

    # the images, the tokens and the routings of each block, once more
    rng = np.random.default_rng(3)
    images = Shapes("val", 32)
    chosen = rng.permutation(1024)[:5].tolist()
    drawn = torch.from_numpy(rng.random((5, 17)) < 60 / 5 / 17)
    assert written["tokens"] == drawn.sum() < 5 * 17
    views = torch.stack([data.center_view(images[i][0], 32) for i in chosen])
    encoder = checkpoint.load_encoder(path).eval()
    state = checkpoint.load_checkpoint(path)["model"]
    x = encoder.embed(normalized(views / 255))
    seen = {}
    for i, block in enumerate(encoder.blocks):
        entered = x
        x, weights = block(x)
        seen[i] = entered, weights
    x = encoder.norm(x)
    logits = 9 * F.normalize(x, dim=2) @ F.normalize(state["loss_router.phi"], dim=0)
    seen["loss router"] = x, (logits.softmax(1), logits.softmax(2))

    assert [row["block"] for row in numbers["blocks"]] == [1, 3, 5, "loss router"]
    for row, scale in zip(numbers["blocks"], (4, 6, 8, 9)):
        entered, weights = seen[row["block"]]
        dispatch, combine = (each.double().numpy() for each in weights)
        patches = dispatch[:, 1:]
        labels = torch.from_numpy(dispatch.argmax(2))[drawn]
        expected = {"entropy": -(dispatch * np.log(dispatch)).sum(1).mean(0),
                    "dispatch_cv": (patches.std(1) / patches.mean(1)).mean(0),
                    "cls_share": dispatch[:, 0].mean(0), "usage": combine.mean((0, 1)),
                    "silhouette": routing.silhouette(entered[drawn], labels), "scale": scale}
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name

    # the foreground, the correlation with the loss, and what is drawn
    weight = seen[3][1].dispatch[:, 1:]
    flat = weight.flatten(0, 1)
    masks = [data.center_view(255 * images.mask(i)[None].byte(), 32) for i in chosen]
    inside = F.avg_pool2d(torch.stack(masks) / 255, 8).flatten() >= 0.5
    for e in range(2):
        above = (flat[inside, e][:, None] > flat[~inside, e]).double().mean()
        assert numbers["foreground_auc"][e] == pytest.approx(above.item(), abs=1e-3)
    predicted = F.linear(x, state["head.weight"], state["head.bias"])
    targets = build_teacher(str(tmp_path / "teacher.pt"), 4)(views / 255)
    loss = losses.token_loss(predicted, targets)[:, 1:]
    pair = torch.stack([weight[..., 0], loss])[:, drawn[:, 1:]]
    assert numbers["correlation"] == pytest.approx(torch.corrcoef(pair)[0, 1].item(), abs=1e-4)
    model_, = measured
    assert torch.equal(model_.images, views)
    assert torch.allclose(model_.weights, 17 * weight, atol=1e-4)
    assert np.allclose(model_.points, pair * torch.tensor([[17.0], [1.0]]), atol=1e-4)


def spy_results(monkeypatch, owner, name):
    """-> a growing list of what a function returns"""
    results = []
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: results.append(function(*args)) or results[-1])
    return results


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("block", (None, 1))
def test_the_block_that_is_shown_is_the_last_one_that_weights_the_loss(write_student, block):
    """The loss router, unless the run had loss blocks or --block names another one."""
    flags = [] if block is None else ["--block", str(block)]
    assert show(write_student("a", loss_block=None), *flags)[0]["block"] == block or "loss router"
    assert show(write_student("b"), *flags)[0]["block"] == block or 3


def test_heatmaps_show_each_experts_weights_over_each_image(write_student, drawn):
    numbers, _ = show(write_student("one"), write_student("other"))
    grid, limits = tiles(drawn["heatmaps.png"], 5)
    assert len(grid) == 5      # images, and two experts of each model
    weights = routing.measure(numbers["checkpoint"], routing.parse_args(
        [numbers["checkpoint"], "--data", "shapes", "--images", "5", "--seed", "3", *QUICK]),
        common.Process(argparse.Namespace(amp="off", workers=0)))
    for column, image in enumerate(weights.images.permute(0, 2, 3, 1).numpy()):
        assert np.array_equal(grid[0][column][0], image)
        for expert in range(2):
            below, above = grid[1 + expert][column]
            assert np.allclose(below, image.mean(-1))
            expected = weights.weights[column, :, expert].view(4, 4).numpy()
            assert np.array_equal(above, expected)
    span = np.quantile(weights.weights, (0.01, 0.99))
    assert np.allclose(limits, [span] * 4)
    picture = drawn["heatmaps.png"].axes
    assert picture[5].get_title(loc="left") == "one/last"
    assert [axis.get_ylabel() for axis in picture[5:25:5]] == 2 * ["expert 0", "expert 1"]


@pytest.mark.usefixtures("no_pictures")
def test_two_checkpoints_stand_side_by_side(write_student, tmp_path, capsys):
    argv = [write_student("coupled"), write_student("detached", teacher="nowhere.pt")]
    (tmp_path / "link").symlink_to(tmp_path / "coupled")
    argv[0] = str(tmp_path / "link" / "last.pt")
    coupled, detached = show(*argv, "--out", str(tmp_path / "both"))
    printed = capsys.readouterr().out
    assert [coupled["name"], detached["name"]] == ["coupled/last", "detached/last"]
    area = np.round(coupled["foreground_auc"], 3)
    assert f"block 3  foreground_auc {area}" in printed
    assert "block loss router  silhouette" in printed
    assert printed.count("cls_share") == 8
    assert "no correlation with the distillation loss: teacher nowhere.pt: no such" in printed
    assert coupled.keys() - detached.keys() == {"correlation"}


@pytest.mark.usefixtures("no_pictures")
def test_only_the_teacher_of_the_training_gives_a_correlation(write_student, tmp_path, capsys):
    path = write_student("one")
    teacher = tmp_path / "teacher.pt"
    assert "correlation" in show(path)[0]
    write_checkpoint(teacher, depth=1, dim=60)
    assert "correlation" not in show(path)[0]
    assert f"the contents of {teacher} have changed since the training" in capsys.readouterr().out
    teacher.rename(tmp_path / "moved.pt")
    assert "correlation" not in show(path)[0]
    message = f"{path}: no correlation with the distillation loss: teacher {teacher}: no such file"
    assert message in capsys.readouterr().out


@pytest.fixture
def epochs(write_student):
    """Three checkpoints, whose routers differ in scale -> their paths, in another order"""
    paths = []
    for epoch, scale in ((2, 9.0), (0, 1.0), (1, 3.0)):
        path = Path(write_student(f"epoch_{epoch}"))
        file = torch.load(path)
        for name in file["model"]:
            if name.endswith("scale"):
                file["model"][name].fill_(scale)
        torch.save(file, path)
        paths.append(str(path))
    return paths


def test_more_than_two_checkpoints_have_a_row_of_expert_0_each_in_the_order_given(
        epochs, tmp_path, drawn):
    models = show(*epochs, "--out", str(tmp_path / "all"))
    assert json.loads((tmp_path / "all" / "routing.json").read_text()) == run.rounded(models)
    assert [numbers["blocks"][0]["scale"] for numbers in models] == [9, 1, 3]
    assert len(models[0]["foreground_auc"]) == 2                  # the numbers are of all experts
    grid, limits = tiles(drawn["heatmaps.png"], 5)
    assert len(grid) == 4 and len(set(limits)) == 3      # each has a scale of its own
    titles = [axis.get_title(loc="left") for axis in drawn["heatmaps.png"].axes]
    assert [title for title in titles if title] == ["epoch_2/last", "epoch_0/last", "epoch_1/last"]

    blocks = drawn["blocks.png"]
    for axis, name in zip(blocks.axes, ("silhouette", "entropy", "dispatch_cv", "cls_share")):
        values = [line.get_ydata().tolist() for line in axis.lines]
        assert values == [[np.atleast_1d(row[name])[0] for row in numbers["blocks"]]
                          for numbers in models]
        assert [label.get_text() for label in axis.get_xticklabels()] == [
            "1", "3", "5", "loss router"]
        assert [line.get_label() for line in axis.lines] == [
            f"epoch_{epoch}/last, expert 0" for epoch in (2, 0, 1)]
        assert len({str(line.get_color()) for line in axis.lines}) == 3
    titles = [axis.get_title() for axis in drawn["correlation.png"].axes]
    assert titles == [f"epoch_{epoch}/last: r = {numbers['correlation']:.3f}"
                      for epoch, numbers in zip((2, 0, 1), models)]


@pytest.mark.usefixtures("no_pictures")
def test_one_checkpoint_at_a_time_is_in_memory(epochs, monkeypatch):
    alive = []
    load_student = routing.load_student

    def load(file):
        assert not any(student() for student in alive)
        student = load_student(file)
        alive.append(weakref.ref(student))
        return student
    monkeypatch.setattr(routing, "load_student", load)
    monkeypatch.setattr(routing, "IMAGES", 2)
    measured = spy_results(monkeypatch, routing, "measure")
    show(*epochs)
    assert len(alive) == 3
    for each in measured:      # of two images, 16 patches and two experts
        assert each.weights.untyped_storage().nbytes() == 4 * 2 * 16 * 2
        assert len(each.images) == 2


def test_routing_writes_three_pictures_and_without_matplotlib_one_line(
        write_student, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    path = write_student("one")
    show(path, write_student("another", teacher="nowhere.pt"))
    for name in ("heatmaps", "blocks", "correlation"):
        assert min(Image.open(tmp_path / "one" / f"{name}.png").size) > 200
    assert "matplotlib" not in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    show(path)
    assert "pictures need matplotlib: pip install matplotlib" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_broken_images_are_named_and_routing_is_measured_on_others(write_student, photos, tmp_path,
                                                                   capsys):
    path = write_student("one", teacher=None)
    folder = shutil.copytree(Path(photos, "val", "class_1"), tmp_path / "photos")      # four
    broken = [folder / name for name in ("a.jpg", "b.jpg", "c.jpg")]

    def show(images):
        data.print_once.cache_clear()
        flags = ["--images", str(images), "--data", str(folder), *QUICK]
        return routing.main(routing.parse_args([path, path, *flags]))[1]
    whole = show(9)
    assert whole["images"] == 4 and not capsys.readouterr().err
    for each in broken:
        each.write_text("no image")
    some = show(9)
    lines = capsys.readouterr().err.splitlines()      # once, though there are two checkpoints
    assert sorted(line.split(" (")[0] for line in lines) == [
        f"cannot read the image {each}" for each in broken]
    assert all(line.endswith("): left out") for line in lines)
    assert some["images"] == 4
    for row, expected in zip(some["blocks"], whole["blocks"]):      # of the same four
        assert row["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)
    assert show(3)["images"] == 3      # others take their places
    for each in folder.iterdir():
        each.write_text("no image")
    error = refusal(capsys, "routing", path, "--data", str(folder), *QUICK)
    assert error == f"--data {folder}: none of its images can be read"


def test_routing_refuses_what_has_no_experts(write_student, tmp_path, capsys):
    error = refusal(capsys, "routing", write_student("one"), "--block", "0")
    assert "--block 0 has no experts: the MoE blocks are 1 3 5 loss router" in error
    error = refusal(capsys, "routing", write_checkpoint(tmp_path / "e0.pt"))
    assert "has no experts: there is" in error


@pytest.mark.parametrize("write_student, of_block, of_router", ((1, 1, 2), (5, 4, 2)),
                         indirect=["write_student"])
def test_the_first_experts_are_shown_of_each_block(write_student, of_block, of_router,
                                                   monkeypatch, capsys, drawn):
    """A loss router has two, whatever the blocks have. Each line ends where its expert does."""
    monkeypatch.setattr(routing, "EXPERTS", 4)
    numbers, = show(write_student("one"))
    rows = numbers["blocks"]
    usages = re.findall(r"usage \[([^\]]*)\]", capsys.readouterr().out)
    assert [len(usage.split()) for usage in usages] == [of_block] * 3 + [of_router]
    assert len(tiles(drawn["heatmaps.png"], 5)[0]) == 1 + of_block
    silhouettes, entropies, *_ = drawn["blocks.png"].axes
    lines = [line.get_ydata() for line in entropies.lines]
    assert len(lines) == max(of_block, 2)
    for expert, line in enumerate(lines):
        expected = [row["entropy"][expert] if expert < len(row["entropy"]) else math.nan
                    for row in rows]
        assert line.tolist() == pytest.approx(expected, nan_ok=True)
    assert silhouettes.lines[0].get_ydata().tolist() == [row["silhouette"] for row in rows]


# --------------------------------------------------------------------------------- plot

@pytest.fixture
def write_run(tmp_path):
    """write_run(name, **fields) -> the folder of a run of two epochs, with k-NN accuracies"""
    def write(name, **fields):
        (tmp_path / name).mkdir()
        lines = [{"step": 4 * epoch, "epoch": epoch, "lr": 1e-3}
                 | {field: values[epoch - 1] for field, values in fields.items()}
                 for epoch in (1, 2)]
        # a killed run leaves half of a line
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "epo'
        (tmp_path / name / "log.jsonl").write_text(text)
        own = tmp_path / name
        rows = [(own / "last.pt", 2.0, 30.0), (own / "epoch_0001.pt", 1.0, 90.0),
                (own / "epoch_0001.pt", 1.0, 20.0),                      # the latest counts
                (tmp_path / "other" / name / "epoch_0002.pt", 2.0, 5.0)]
        rows = [json.dumps({"checkpoint": path.name, "path": str(path), "epoch": epoch,
                            "top1": top1}) + "\n" for path, epoch, top1 in rows]
        (own / "knn.jsonl").write_text("".join(rows))
        return str(tmp_path / name)
    return write


def test_each_run_is_drawn_over_epochs_in_a_panel_for_each_quantity_it_has(
        write_run, tmp_path, monkeypatch, capsys):
    figure = pytest.importorskip("matplotlib.figure")
    figures = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig",
                        lambda self, *args, **kw: figures.append(self) or save(self, *args, **kw))
    runs = [write_run("routed", loss=[-9, -8], token=[0.4, 0.2], token_ratio=[1, 0.9],
                      token_unweighted=[0.6, 0.3], dispatch_cv=[[0.1, 7], [0.3, 7]],
                      **{"lambda": [[0.5, 7], [0.6, 7]]}),
            write_run("plain", loss=[-3, -2], token=[0.5, 0.1])]
    plot.main(plot.parse_args(runs))
    picture = tmp_path / "routed" / "curves.png"
    assert min(Image.open(picture).size) > 200 and str(picture) in capsys.readouterr().out

    found, = figures
    panels = {axis.get_title().split(" (")[0]:
              [(line.get_linestyle(), line.get_color(), *zip(*line.get_data()))
               for line in axis.lines if len(line.get_xdata())] for axis in found.axes}
    assert panels == {
        "token loss": [("-", "C0", (1, 0.4), (2, 0.2)), ("--", "C0", (1, 0.6), (2, 0.3)),
                       ("-", "C1", (1, 0.5), (2, 0.1))],
        "weighted / unweighted token loss": [("-", "C0", (1, 1), (2, 0.9))],
        "variation of expert 0's weights": [("-", "C0", (1, 0.1), (2, 0.3))],
        "lambda of expert 0": [("-", "C0", (1, 0.5), (2, 0.6))],
        "learning rate": [("-", "C0", (1, 1e-3), (2, 1e-3)), ("-", "C1", (1, 1e-3), (2, 1e-3))],
        "k-NN accuracy": [("-", "C0", (1, 20), (2, 30)), ("-", "C1", (1, 20), (2, 30))]}
    legend, = found.legends
    assert [text.get_text() for text in legend.get_texts()] == runs
    assert [line.get_color() for line in legend.get_lines()] == ["C0", "C1"]
    assert not any(legend.get_window_extent().overlaps(axis.get_tightbbox())
                   for axis in found.axes)


def test_supervised_runs_have_loss_and_scores(write_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", pictures := MagicMock())
    folder = write_run("a", loss=[2.3, 1.2], top1=[30, 40], miou=[5, 6])
    plot.main(plot.parse_args([folder, "--out", str(tmp_path / "new")]))
    panels = pictures.Figure.return_value.add_subplot.return_value
    drawn = [line.args[1] for line in panels.plot.call_args_list]
    assert drawn == [[2.3, 1.2], [1e-3, 1e-3], [20, 30], [30, 40], [5, 6]]
    pictures.Figure.return_value.savefig.assert_called_with(tmp_path / "new/curves.png", dpi=90)


def test_a_run_that_is_given_through_a_link_has_its_knn_accuracies(write_run, tmp_path):
    folder = write_run("a", token=[0.4, 0.2])
    (tmp_path / "link").symlink_to(folder)
    assert plot.read_run(str(tmp_path / "link")) == plot.read_run(folder)
    assert plot.read_run(folder)[2:] == [{"epoch": 1, "knn": 20}, {"epoch": 2, "knn": 30}]


def test_rows_of_knn_that_an_earlier_version_wrote_are_drawn_where_they_are_clear(
        write_run, tmp_path, monkeypatch, capsys):
    """They had no path and no epoch."""
    folder = write_run("a", token=[0.4, 0.2])
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("a")
    rows = [("link/epoch_0001.pt", 20.0), ("a/last.pt", 30.0), ("other/a/epoch_0002.pt", 40.0),
            ("b/epoch_0002.pt", 50.0)]
    Path(folder, "knn.jsonl").write_text("".join(
        json.dumps({"checkpoint": path, "top1": top1}) + "\n" for path, top1 in rows))
    for name in (folder, "link"):
        assert plot.read_run(name)[2:] == [{"epoch": 1.0, "knn": 20.0}]
    assert "2 rows of knn.jsonl do not say of which run" in capsys.readouterr().out


def test_knn_says_which_checkpoint_it_measured(stage, tmp_path, monkeypatch):
    play("pretrain", stage("pretrain", "--max-steps 5 --save-every 1"))
    monkeypatch.chdir(tmp_path)
    encoder, *flags = stage("knn", "-k 32")      # all training images
    Path("link").symlink_to("run")
    knn.main(knn.parse_args(["run/last.pt", "link/epoch_0001.pt", encoder, *flags]))
    rows = [json.loads(line) for line in Path("run/knn.jsonl").read_text().splitlines()]
    assert [(row["step"], row["epoch"]) for row in rows] == [(5, 1.25), (4, 1.0), (None, None)]
    assert [row["checkpoint"] for row in rows] == ["run/last.pt", "link/epoch_0001.pt", encoder]
    for row, name in zip(rows, ("last.pt", "epoch_0001.pt")):
        assert row["path"] == str(tmp_path.resolve() / "run" / name)


@pytest.mark.parametrize("file", ("log", "knn"))
def test_a_damaged_line_is_named_by_plot(write_run, capsys, file):
    folder = write_run("a", token=[0.4, 0.2])
    path = Path(folder, f"{file}.jsonl")
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, first[:9] + "\n", *rest]))
    assert refusal(capsys, "plot", folder) == f"{path}: line 2 is not JSON"


def test_plot_says_in_one_line_what_it_misses(write_run, tmp_path, capsys, monkeypatch):
    folder = write_run("a", token=[0.4, 0.2])
    assert f"{tmp_path} has no log.jsonl" in refusal(capsys, "plot", folder, str(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot.main(plot.parse_args([folder]))
    assert capsys.readouterr().out == "curves.png needs matplotlib: pip install matplotlib\n"


# ------------------------------------------------------------------------ README, demo

PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_readme_fits_on_267_lines_of_100_columns_and_links_lead_somewhere():
    lines = README.splitlines()
    assert len(lines) <= 267
    assert not [line for line in lines if len(line) > 100]
    for page in ("README.md", "RUNNING.md", "CONTRIBUTING.md"):
        text = (HERE / page).read_text("utf-8")
        anchors = {"#" + re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
                   for line in text.splitlines() if line.startswith("#")}
        for link in re.findall(r"\]\(([^)]+)\)", text):
            found = link.startswith("https://") or link in anchors or (HERE / link).exists()
            assert found, (page, link)


def test_the_table_of_files_has_every_file():
    section, = re.findall("## Files\n(.*?)\n## ", CONTRIBUTING, re.S)
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    files = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    product = {path.name for kind in ("*.py", "*.sh", "*.md") for path in HERE.glob(kind)}
    assert files == product - {"README.md", "CONTRIBUTING.md"}


def without_docstring(function):
    if ast.get_docstring(function):
        function.body = function.body[1:]
    return ast.unparse(function)


def test_the_functions_that_the_readme_quotes_are_the_sources():
    """But for their docstrings."""
    source = {}
    for file in ("model.py", "losses.py"):
        for node in ast.walk(ast.parse((HERE / file).read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                source[node.name] = without_docstring(node)
    quoted = [function for code in PYTHON if code.startswith("def ")
              for function in ast.parse(code).body]
    assert [function.name for function in quoted] == ["route", "patch_weights", "routed_mean"]
    for function in quoted:
        assert without_docstring(function) == source[function.name]


@pytest.mark.parametrize("code", [code for code in PYTHON if "losses import" in code
                                  or "model import" in code], ids=("router", "moe", "softmin"))
def test_the_readmes_training_programs_run_beside_copies_of_two_files(code, tmp_path):
    for file in ("model.py", "losses.py"):
        shutil.copy(HERE / file, tmp_path)
    code = code.replace("rand(2, 8, 3,", "rand(1, 2, 3,")
    if "backward" in code:      # the coupling reaches the router, and the head
        code = code.replace("    optimizer.zero_grad()\n", "")
        code += "\nassert router.phi.grad.abs().max() > 0 and head.weight.grad.abs().max() > 0\n"
    elif "SoftMoE" in code:
        code += "\nassert dispatch.shape == (8, 197, 2) and dispatch.requires_grad\n"
    else:
        code += "\nassert loss < patch_loss[hidden].mean() - 0.05\n"
    (tmp_path / "program.py").write_text(code, "utf-8")
    code, _, error = finish(start("program.py", folder=tmp_path))
    assert code == 0, error


def test_the_readmes_program_saves_features_of_all_readable_photographs(photos, tmp_path):
    code, = [code for code in PYTHON if "features.pt" in code]
    for file in ("model.py", "checkpoint.py", "data.py", "common.py", "shapes.py"):
        shutil.copy(HERE / file, tmp_path)
    folder = tmp_path / "photos"
    shutil.copytree(Path(photos, "val"), folder)
    (folder / "._0.jpg").write_bytes(b"macOS")
    (folder / "broken.jpg").write_bytes(b"no image")
    drawn = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 4), np.uint8))
    drawn.save(folder / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6      # turned
    drawn.convert("RGB").save(folder / "turned.jpg", exif=exif)
    write_checkpoint(tmp_path / "encoder.pt", experts=2)
    (tmp_path / "program.py").write_text(code, "utf-8")
    code, out, error = finish(start("program.py", folder=tmp_path))
    assert code == 0, error
    assert "broken.jpg" in out and "._0" not in out
    saved = torch.load(tmp_path / "features.pt")
    names = [str(path) for path in sorted(folder.rglob("*.*g")) if path.name[0] not in ".b"]
    assert sorted(str(tmp_path / path) for path in saved["paths"]) == names and len(names) == 18
    encoder = checkpoint.load_encoder(tmp_path / "encoder.pt").eval()
    for path, feature in zip(saved["paths"], saved["features"]):
        image = data.center_view(data.read_image(tmp_path / path), 32)
        tokens, _ = encoder(normalized(image / 255)[None])
        assert torch.allclose(feature, F.normalize(tokens[0, 0], dim=0), atol=1e-4)
    cosine = saved["features"] @ saved["features"][0]
    order = cosine.argsort(descending=True)[1:6]      # without the photograph itself
    assert out.split()[-5:] == [saved["paths"][i] for i in order]


def test_the_program_of_running_md_prints_the_class_of_each_photograph(photos, tmp_path):
    out = tmp_path / "runs" / "classes"
    top1 = finetune.main(finetune.parse_args([
        "--data", photos, "--pool", "mean", "--model", "vit_nano", "--image-size", "32",
        "--patch-size", "8", "--batch-size", "5", "--epochs", "2", "--augment", "plain",
        "--workers", "0", "--out", str(out)]))["top1"]
    code, = re.findall(r"```python\n(.*?)```", (HERE / "RUNNING.md").read_text("utf-8"), re.S)
    shutil.copytree(Path(photos, "val"), tmp_path / "photos")
    for file in HERE.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "program.py").write_text(code, "utf-8")
    code, printed, error = finish(start("program.py", folder=tmp_path))
    assert code == 0, error
    found = [line.rsplit(" ", 1) for line in printed.splitlines()]
    images = sorted(tmp_path.glob("photos/*/*.*g"))
    assert sorted(path for path, _ in found) == [
        str(path.relative_to(tmp_path)) for path in images]
    right = sum(Path(path).parent.name == name for path, name in found)
    assert 100 * right / len(images) == pytest.approx(top1, abs=0.01)


def stand_in(folder, name, script):
    """A shell script in a program's place -> the environment in which it is found first."""
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_printed_commands_are_ones_that_the_scripts_take(tmp_path, capsys):
    """Of the README, with the flags in its prose; of demo.sh, where python is a stand-in."""
    environment = stand_in(tmp_path, "python", 'echo "python $*" >> commands')
    subprocess.run(["sh", HERE / "demo.sh", "--epochs", "8"], cwd=tmp_path, check=True,
                   env=environment)
    demo = (tmp_path / "commands").read_text()
    assert len(demo.splitlines()) == 5 and "--out runs/demo --epochs 8" in demo
    text = README.replace("\\\n", " ") + demo
    commands = re.findall(r"\b(?:python|torchrun [^`\n]*?) (\w+)\.py((?: +[^`#|\s]+)*)", text)
    scripts = {name: importlib.import_module(name) for name, _ in commands}
    assert len(scripts) == 7
    for name, argv in commands:
        scripts[name].parse_args(argv.split())
    for script in scripts.values():
        with pytest.raises(SystemExit):
            script.parse_args(["--help"])
    flags = set(re.findall("--[a-z-]+", capsys.readouterr().out))
    assert set(re.findall("`(--[a-z-]+)", README)) <= flags


# --------------------------------------------------- RUNNING, CONTRIBUTING, cluster script

@pytest.mark.parametrize("text", (RUNNING, CONTRIBUTING), ids=("running", "contributing"))
def test_the_reference_has_lines_of_100_columns(text):
    assert not [line for line in text.splitlines() if len(line) > 100 and line[0] != "|"]


def test_commands_and_flags_that_the_reference_names_exist(capsys):
    text = RUNNING.replace("\\\n", " ")
    commands = re.findall(r"(?:pretrain\.py|sbatch slurm\.sh) (--[^#\n]*)", text)
    assert len(commands) == 3
    for argv in commands:
        pretrain.parse_args(argv.split())
    for name in ("pretrain", "linear", "finetune", "segment", "knn", "routing"):
        with pytest.raises(SystemExit):
            SCRIPTS[name].parse_args(["--help"])
    flags = set(re.findall(r"--[a-z_-]+", capsys.readouterr().out))
    flags |= {"--node_rank", "--signals-to-handle"}                        # torchrun's
    flags |= {"--gpus-per-task", "--gpus-per-node", "--ntasks-per-node", "--signal"}      # Slurm's
    assert set(re.findall(r"`(--[a-z_-]+)", RUNNING)) <= flags


@pytest.mark.parametrize("name, flags", (
    *(("pretrain", f"--objective {objective} --importance-weight 0.1 --encoding dense --experts 3")
      for objective in pretrain.OBJECTIVES),
    ("pretrain", "--variation 0.2"), ("finetune", ""), ("segment", "")))
def test_the_reference_names_every_field_of_the_log(stage, monkeypatch, name, flags):
    monkeypatch.setattr(pretrain, "build_student", small_decoder)
    log = play(name, stage(name, flags))[2]
    rows = re.findall(r"^\| (`[^|]*) \|", RUNNING, re.MULTILINE)
    named = {field for row in rows for field in re.findall(r"`(\w+)`", row)}
    assert {field for line in log for field in line} <= named


@pytest.mark.parametrize("encoding", ("sparse", "dense"))
@pytest.mark.parametrize("objective", pretrain.OBJECTIVES)
def test_the_fewest_experts_that_are_accepted_are_enough(objective, encoding, stage, monkeypatch):
    monkeypatch.setattr(pretrain, "build_student", small_decoder)
    flags = f"--objective {objective} --encoding {encoding} --max-steps 1 --variation 1 --experts "
    for experts in range(1, 9):
        with contextlib.suppress(SystemExit):
            args = pretrain.parse_args(stage("pretrain", f"{flags}{experts}"))
            break
    pretrain.main(args)
    assert args.experts == 1 + max(pretrain.loss_of_expert(args))


def test_the_reference_names_every_field_of_knn(stage, tmp_path):
    knn.main(knn.parse_args(stage("knn", "-k 3")))
    sentence = RUNNING.split("A line of `knn.jsonl` has ")[1].split(".")[0]
    line = json.loads((tmp_path / "run" / "knn.jsonl").read_text())
    assert set(line) == set(re.findall(r"`(\w+)`", sentence))


def test_the_disk_that_a_run_takes_is_four_and_twelve_bytes_a_parameter():
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) M \| (.*) \|$", RUNNING, re.MULTILINE)
    assert [experts for experts, _, _ in rows] == ["0", "2", "64"]
    for experts, millions, sizes in rows:
        args = pretrain.parse_args(["--experts", experts])
        with torch.device("meta"):
            student = pretrain.build_student(args, teacher_dim=768)
        parameters = sum(parameter.numel() for parameter in student.parameters()) / 1e9
        state = sum(value.nbytes for value in student.state_dict().values()) / 1e9
        last = state + 8 * parameters
        kept = 1 + args.epochs // args.save_every
        assert f"{1000 * parameters:.1f}" == millions
        assert sizes == (f"{state:.2f} GB | {kept * state:.1f} GB | {last:.2f} GB | "
                         f"{kept * state + 2 * last:.1f} GB")


FOLLOWED = """
import contextlib, io, json, sys
sys.path.insert(0, {folder!r})
import common, knn, pretrain, run
run.LOG_EVERY = 1
flags = ("--model vit_nano --image-size 32 --patch-size 8 --batch-size 3 --amp off --workers 0 "
         "--epochs 4 --warmup-epochs 1 --data moons --max-steps 1 --teacher color/gain").split()
for case in json.load(open("cases.json")):
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            if case[0] == "knn":
                common.launch(knn.main, knn.parse_args([folder + "/last.pt", *case[1:]]))
            else:
                args = pretrain.parse_args([*flags, *case])
                common.launch(pretrain.main, args)
                case = folder = args.out
        print(json.dumps([case, json.loads(open(case + "/log.jsonl").readlines()[-1])]))
    except SystemExit:
        print(json.dumps([case, error.getvalue().strip().splitlines()[-1]]))
"""
MOONS = """class Moons(Dataset):
    def __init__(self, split):
        pass

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return (torch.arange(3 * 40 * 44) * (index + 1) % 255).view(3, 40, 44).to(torch.uint8), 0


"""


def test_an_objective_a_data_set_and_a_teacher_are_added_as_contributing_says(tmp_path):
    blocks = re.findall(r"^   ```python\n(.*?)   ```", CONTRIBUTING, re.S | re.MULTILINE)
    score, name, weight, expert, branch, color, prefix = map(textwrap.dedent, blocks)
    places = (("losses.py", "def routed_mean(", "edge_loss = token_loss\n\n\n"),
              ("losses.py", "\n    # Couple (Eq. 5)", score),
              ("pretrain.py", '"token_pixel": [', name.strip() + " "),
              ("pretrain.py", "cls=args.cls_weight", weight.strip() + " "),
              ("pretrain.py", "    return losses\n", expert),
              ("data.py", "class Folder(", MOONS), ("data.py", "    elif labels:\n", branch),
              ("teacher.py", "def build_teacher(", color + "\n\n"),
              ("teacher.py", "            # Nothing behind the", prefix))
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    for file, before, block in places:
        path = tmp_path / file
        source = path.read_text("utf-8")
        assert source.count(before) == 1, before
        indent = before[:len(before) - len(before.lstrip(" \n"))].strip("\n")
        path.write_text(source.replace(before, textwrap.indent(block, indent) + before), "utf-8")
    (tmp_path / "gain").write_text("2.5")
    edge = ["--objective", "token_edge"]
    accepted = [edge, [*edge, "--experts", "0"], [*edge, "--encoding", "dense", "--variation", "1"],
                [*edge, "--loss-router", "--experts", "1"],
                [*edge, "--experts", "0", "--loss-weights", "softmin", "--variation", "0.5"],
                ["--objective", "token"]]
    refused = [[*edge, "--experts", "1"], [*edge, "--experts", "1", "--encoding", "dense"],
               ["knn", "--data", "moons"]]
    (tmp_path / "cases.json").write_text(json.dumps([*accepted, *refused]))
    (tmp_path / "followed.py").write_text(FOLLOWED.format(folder=str(tmp_path)))
    _, out, error = finish(start("followed.py", folder=tmp_path))
    results = [json.loads(line) for line in out.splitlines()]
    assert len(results) == len(accepted) + len(refused), error
    for flags, (folder, log) in zip(accepted, results):
        assert isinstance(log, dict), log
        assert ("objective=token_edge" in folder) == ("edge" in log) == (flags[1] == "token_edge")
        coupled = "edge" in log and flags[2:] != ["--experts", "0"]
        assert coupled == ({"edge_unweighted", "edge_ratio", "edge_std"} <= log.keys())
        if "edge" in log:
            assert log["objective_weights"] == [1, 0.5]
    dense, softmin = results[2][1], results[4][1]
    assert dense["lambda"][1] == pytest.approx(0.5 * dense["edge_std"], rel=1e-4)      # w is 0.5
    assert softmin["lambda"][1] == pytest.approx(softmin["edge_std"] / 0.5, rel=1e-4)
    lines = [line for _, line in results[len(accepted):]]
    assert all("--experts 1: expert 1 weights the edge loss, so there must be 2" in line
               for line in lines[:2])
    assert lines[2].endswith("--data moons has no labels, and this needs some")

    (tmp_path / "gain").write_text("3.5")      # another teacher in the same file
    (tmp_path / "cases.json").write_text(json.dumps([[*edge, "--max-steps", "2"]]))
    _, out, _ = finish(start("followed.py", folder=tmp_path))
    assert "--teacher was color/gain, is color/gain, with other contents" in out


JOB = str(7_000_000 + os.getpid())      # Slurm's number, from which slurm.sh makes a port


@pytest.fixture
def submit(tmp_path):
    """submit(python, *argv, tasks=1) -> (exit code, standard output) of slurm.sh

    `python` is a shell script in Python's place, and Slurm's programs have stand-ins, too:
    `requeued` in tmp_path is what scontrol does.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_in(programs, "scontrol",
             f'if [ $1 = show ]; then echo 127.0.0.1; seq -f "machine-%07g" 10000; '
             f'else echo "$@" >> {tmp_path}/requeued; fi')
    environment = stand_in(programs, "srun", """
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & jobs+=($!); done
for job in ${jobs[@]}; do wait $job || code=$?; done
exit ${code:-0}""")
    environment |= dict(SLURM_JOB_ID=JOB, SLURM_CPUS_PER_TASK="1", SLURM_JOB_NODELIST="n")

    def run_script(python, *argv, tasks=1):
        stand_in(programs, "python", python)
        variables = environment | {"SLURM_NTASKS": str(tasks)}
        return run_command("bash", HERE / "slurm.sh", *argv, cwd=HERE, env=variables)
    return run_script


@needs_loopback
def test_the_cluster_script_requeues_after_a_signal_to_any_process(submit, stage, tmp_path):
    program = driver(tmp_path, "step == 3 and rank == '1' and os.kill(os.getpid(), signal.SIGUSR1)")
    python = f'[ $1 = pretrain.py ]; shift; exec {shlex.join([sys.executable, str(program)])} "$@"'
    code, _ = submit(python, "pretrain.py", *stage("pretrain", out="two words"), tasks=2)
    assert code == 0 and (tmp_path / "requeued").read_text() == f"requeue {JOB}\n"
    assert checkpoint.load_checkpoint(tmp_path / "two words" / "last.pt")["step"] == 3


def test_the_cluster_script_runs_any_stage(submit, tmp_path):
    code, out = submit('echo "$@"', "knn.py", "a b.pt", tasks=2)
    assert code == 0 and out == 2 * "knn.py a b.pt\n"
    assert not (tmp_path / "requeued").exists()


def test_the_cluster_script_does_not_requeue_after_an_error_or_the_end(
        submit, stage, tmp_path, capsys):
    code, _ = submit("echo SIGUSR1: ; [ $RANK = 0 ] || exit 2", tasks=2)
    assert code == 2
    for flags in ("--max-steps 3", ""):      # what pretraining prints there
        train(stage("pretrain", flags))
        printed = capsys.readouterr().out
        (tmp_path / "printed").write_text(printed, "utf-8")
        assert submit(f"cat {tmp_path}/printed") == (0, printed)
    assert not (tmp_path / "requeued").exists()


def test_the_cluster_script_gives_each_task_its_rank_and_all_arguments(submit):
    python = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" "$#" "$@"'
    code, out = submit(python, "pretrain.py", "--out", "two words", tasks=3)
    port = 20000 + int(JOB) % 10000
    assert code == 0 and sorted(out.splitlines()) == [
        f"{rank} {rank} 3 127.0.0.1:{port} 3 pretrain.py --out two words" for rank in range(3)]
