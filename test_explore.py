"""The tests, as statements about the method: `python -m pytest -q`. No GPU, no network.

Fixtures and helpers of several classes come first. Then each class tests one part, in the order of
the files: from model.py to the stages, the analysis, the experiments and the pages.
"""

import argparse
import colorsys
import contextlib
import copy
import functools
import gc
import io
import itertools
import json
import math
import multiprocessing
import multiprocessing.pool
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock, call

os.environ["HF_HUB_OFFLINE"] = "1"        # a test that would download fails at once
os.environ["OMP_NUM_THREADS"] = "1"       # in processes that tests start, too
os.environ["CUDA_VISIBLE_DEVICES"] = ""   # what is compared with plain loops runs on the CPU, too

import matplotlib.figure
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch import nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

import analyze
import balance
import checkpoints
import common
import data
import encoders
import finetune
import knn
import linprobe
import losses
import model
import optim
import plot
import pretrain
import run
import segment
import supervised
from encoders import build_frozen
from experiments import compare, macs, results, students
from shapes import Shapes

STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
for number in STOP_SIGNALS:        # nohup and a script's background jobs ignore some
    if signal.getsignal(number) == signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)
torch.set_num_threads(1)
gc.freeze()      # what the imports made is never garbage, so the collector need not look at it
HERE = Path(__file__).parent
SCRIPTS = {"pretrain": pretrain, "finetune": finetune, "linear": linprobe, "ep": linprobe,
           "segment": segment, "knn": knn, "analyze": analyze, "plot": plot}
QUICK = ["--amp", "off", "--workers", "0"]
TOY = ["--model", "vit_nano", "--image-size", "32", "--patch-size", "8", "--batch-size", "8",
       *QUICK]
rand = functools.partial(torch.rand, dtype=torch.float64)
randn = functools.partial(torch.randn, dtype=torch.float64)


def loopback():
    """Whether processes of this machine can reach each other, as torchrun's have to."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
        return True
    return False


needs_loopback = pytest.mark.skipif(not loopback(), reason="no network interface is up")


@pytest.fixture(autouse=True)
def seeded():
    """Every test has the same random numbers. A test that fails leaves no program behind."""
    torch.manual_seed(0)
    yield
    end_programs()


def normalized(images):
    """Images with ImageNet's mean and standard deviation, by torchvision"""
    return TF.normalize(images, model.IMAGENET_MEAN, model.IMAGENET_STD)


def visible(mask):
    """The indices of the visible patches: bool [B, N] -> [B, V]"""
    return torch.stack([(~row).nonzero()[:, 0] for row in mask])


def nano(**vit):
    """A ViT of 4 blocks, 96 wide, by default for images of 32 and patches of 8 pixels"""
    return model.build_vit("vit_nano", **dict(image_size=32, patch_size=8) | vit)


SMALL_DECODER = dict(dim=64, depth=1, heads=2)
small_student = functools.partial(model.Explore, decoder=SMALL_DECODER)
small_decoder = functools.partial(pretrain.build_student, decoder=SMALL_DECODER)


def write_text(path, text):
    """Writes a text file, and makes its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


PICTURE = np.stack([np.mgrid[0:64, 0:80][0] * 3, np.mgrid[0:64, 0:80][1] * 3,
                    np.mgrid[0:64, 0:80].sum(0)], -1).astype(np.uint8)


def write_images(folder, *names):
    """Files that hold PICTURE as a PNG, whatever their name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PICTURE).save(path, format="PNG")


def system_files(*folders):
    """What macOS, Synology, Windows, QNAP, file systems and notebooks leave in each folder, among
    them whole images
    """
    names = (".hidden/0.jpg .0.jpg ._0.jpg .ipynb_checkpoints/0.png @eaDir/0.jpg/thumb.jpg "
             "@Recycle/0.jpg @__thumb/0.jpg #recycle/0.jpg #snapshot/a/0.jpg $RECYCLE.BIN/0.jpg "
             "$R1.jpg __MACOSX/0.jpg lost+found/0.jpg").split()
    return [folder + name for folder in folders for name in names]


def break_image(path):
    """Cuts off the end of an image file -> its path"""
    Path(path).write_bytes(Path(path).read_bytes()[:-40])
    return path


def write_checkpoint(path, **vit):
    """A checkpoint of ours around a fresh encoder -> its path"""
    encoder = nano(**vit)
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    torch.save({"model": state, "encoder": encoder.config, "args": {}}, path)
    return str(path)


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


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The path of a checkpoint: a ViT of one block, 60 wide"""
    torch.manual_seed(1)
    return write_checkpoint(tmp_path_factory.mktemp("teacher") / "teacher.pt", depth=1, dim=60)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """The path of a checkpoint: a ViT with two experts"""
    torch.manual_seed(2)
    return write_checkpoint(tmp_path_factory.mktemp("encoder") / "e2.pt", experts=2)


@pytest.fixture
def stage(photos, scenes, teacher, encoder, tmp_path, monkeypatch):
    """stage(name, "--flags of one string", *words, out="run") -> a run's command line.

    It has eight steps, four an epoch. In this process, the pixel decoder is a small one.
    """
    monkeypatch.setattr(pretrain, "build_student", small_decoder)
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


def read_run(folder):
    """The contents of last.pt, and the lines of the log"""
    lines = Path(folder, "log.jsonl").read_text().splitlines()
    last = torch.load(Path(folder, "last.pt"), weights_only=False)      # the faster way
    return last, list(map(json.loads, lines))


def play(name, argv):
    """Runs the stage `name` of SCRIPTS on command-line flags, in this process.

    -> (what its main returns, the contents of last.pt, the lines of the log). After a signal, main
    returns nothing.
    """
    args, result = SCRIPTS[name].parse_args(argv), None
    with contextlib.suppress(common.Stopped):
        result = SCRIPTS[name].main(args)
    return result, *read_run(args.out)


def train(argv):
    """Pretrains in this process -> (last.pt, the log)"""
    return play("pretrain", argv)[1:]


def spy(monkeypatch, owner, name):
    """-> a growing list of the calls of a function, which still does its work"""
    mock = Mock(wraps=getattr(owner, name))
    monkeypatch.setattr(owner, name, mock)
    return mock.call_args_list


def refusal(capsys, name, *argv):
    """Runs a stage on flags that it must refuse -> its one line of error."""
    with pytest.raises(SystemExit) as stop:
        common.launch(SCRIPTS[name].main, SCRIPTS[name].parse_args(list(argv)))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return error.split("error: ", 1)[1]


def assert_same_bits(a, b):
    """Two checkpoints hold the same model and the same state of the optimizer."""
    for part in ("model", "optimizer"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)


def at_step(monkeypatch, step, action):
    """Calls `action` in the middle of one step, counted from 0 over all runs to come."""
    steps = itertools.count()

    def wrapped(*args, set_rate=optim.set_rate):
        if next(steps) == step:
            action()
        set_rate(*args)
    monkeypatch.setattr(optim, "set_rate", wrapped)


def loading():
    """The flags and the process of a run without workers on this machine's CPU"""
    args = pretrain.parse_args(["--amp", "off", "--workers", "0"])
    return args, common.Process(args)


# To import PyTorch and timm takes seconds. This server does it once, and forks itself for each
# program that a test starts.
STARTED = []      # that the test at hand has started
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["timm.data", "torch", "torchvision.transforms.v2", "tqdm"])
PROGRAM = """
import multiprocessing, os, runpy, sys
multiprocessing.set_start_method(None, force=True)      # workers start as without a server
os.setsid()
os.dup2(os.open(f"{files}/out", os.O_WRONLY | os.O_CREAT), 1)
os.dup2(os.open(f"{files}/error", os.O_WRONLY | os.O_CREAT), 2)
os.chdir(folder)
os.environ.update(variables)
sys.argv = argv
sys.path = [os.path.dirname(argv[0]), *(path for path in sys.path if path != here)]
runpy.run_path(argv[0], run_name="__main__")
"""


def start(script, *argv, folder=HERE, **variables):
    """Starts `python SCRIPT ARGV` in a session of its own -> what `finish` takes"""
    files = tempfile.TemporaryDirectory()
    names = dict(files=files.name, folder=str(folder), variables=os.environ | variables,
                 argv=[str(Path(folder, script)), *map(str, argv)], here=str(HERE))
    program = SERVER.Process(target=exec, args=(PROGRAM, names))
    program.start()
    STARTED.append(program)
    return program, files


def finish(started):
    """Waits for a program -> (exit code, standard output, standard error)"""
    program, files = started
    program.join(300)
    with files as folder:
        return program.exitcode, *(Path(folder, name).read_text("utf-8")
                                   for name in ("out", "error"))


def end_programs():
    """Kills the programs of a test that are still there: they may wait for one that has failed."""
    while STARTED:
        program = STARTED.pop()
        if program.exitcode is None:
            with contextlib.suppress(ProcessLookupError):      # it has no session yet
                os.killpg(program.pid, signal.SIGKILL)
            program.kill()
            program.join()


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


def start_two(script, *argvs, **variables):
    """Starts two processes of one group, with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables |= dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(free.getsockname()[1]))
    started = []
    for rank, argv in zip("01", argvs):
        started.append(start(script, *argv, RANK=rank, LOCAL_RANK=rank, **variables))
    return started


def run_two(script, *argv):
    """Runs a script in two processes -> the standard output of both"""
    ends = list(map(finish, start_two(script, argv, argv)))
    assert [code for code, _, _ in ends] == [0, 0], "".join(error for _, _, error in ends)
    return "".join(out for _, out, _ in ends)


def driver(tmp_path, fault="None", log_every=1, first="", stage="pretrain"):
    """Writes a program that runs a stage, and evaluates `fault` in the middle of each step -> its
    path

    `fault` is an expression of `step`, counted from 1, and `rank`. `first` are lines that run
    before the training.
    """
    path = tmp_path / "driver.py"
    path.write_text(f"""
import itertools, os, signal, subprocess, sys, time, torch
sys.path.insert(0, {str(HERE)!r})
import optim, common, run, {stage}
{first}
set_rate, steps, rank = optim.set_rate, itertools.count(1), os.environ.get("RANK")
optim.set_rate = lambda *args: (step := next(steps), {fault}, set_rate(*args))
run.LOG_EVERY = {log_every}
common.launch({stage}.main, {stage}.parse_args())
""", "utf-8")
    return path


# lines of a driver: each forward pass of DDP prints whether gradients are exchanged after it
SAY_SYNC = """
class Parallel(common.DistributedDataParallel):
    def forward(self, *args):
        print("exchanged" if self.require_backward_grad_sync else "kept", flush=True)
        return super().forward(*args)
common.DistributedDataParallel = Parallel
"""


def exchanges(out):
    """What SAY_SYNC printed"""
    return re.findall("^(exchanged|kept)$", out, re.M)


def huber(pred, target):
    """Eq. 1 before the mean over patches: [N, D] each -> [N]"""
    variance = target.var(-1, correction=0, keepdim=True)
    distance = (pred - (target - target.mean(-1, True)) / (variance + 1e-5).sqrt()).abs()
    return torch.where(distance < 1, 0.5 * distance ** 2, distance - 0.5).mean(-1)


ALL = tuple(dict.fromkeys(itertools.chain(*pretrain.OBJECTIVES.values())))
LINE = {"step", "epoch", "lr", "loss", "grad_norm", "skipped", "memory_gib", "images_per_second",
        "loader_wait"}


@pytest.fixture
def drawn(monkeypatch):
    """{file name: the figure that was to be saved there}, of matplotlib"""
    figures = {}
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig",
                        lambda self, path, **how: figures.update({Path(path).name: self}))
    return figures


PAGES = {name: (HERE / f"{name}.md").read_text("utf-8")
         for name in ("README", "USING", "REPRODUCE", "RUNNING", "CONTRIBUTING")}


class TestSoftMoE:
    def test_output_is_equation_4_with_a_separate_mlp_per_expert(self):
        moe = model.SoftMoE(7, 3, 11).double()
        moe.router.scale.data.fill_(2.5)
        nn.init.normal_(moe.b1)
        nn.init.normal_(moe.b2)
        x = randn(2, 5, 7)
        x[0, 1] *= 1e-6      # a cosine has no length
        y, (dispatch, combine) = moe(x)
        cosines = F.cosine_similarity(x[:, :, None], moe.router.phi.T, dim=3)      # [2, 5, 3]
        power = (2.5 * cosines).exp()
        assert torch.allclose(dispatch, power / power.sum(1, keepdim=True), rtol=1e-10)
        assert torch.allclose(combine, power / power.sum(2, keepdim=True), rtol=1e-10)
        expected = 0
        for e in range(3):
            slot = (dispatch[:, :, e, None] * x).sum(1)
            output = F.gelu(slot @ moe.w1[e] + moe.b1[e]) @ moe.w2[e] + moe.b2[e]
            expected = expected + combine[:, :, e, None] * output[:, None]
        assert torch.allclose(y, expected, atol=1e-12)

    @pytest.mark.parametrize("precision", (torch.bfloat16, torch.float16))
    def test_routing_is_in_float32_under_autocast_and_half_precision(self, precision):
        moe = model.SoftMoE(64, 3, 110)
        x = torch.randn(2, 9, 64).to(precision)
        exact = moe.router(x.float())
        with torch.autocast("cpu", dtype=precision):
            y, routing = moe(x.float())
        assert y.dtype == precision
        for found in (routing, moe.router(x)):
            torch.testing.assert_close(found, exact, rtol=0, atol=0)      # its dtype, too

    def test_padding_gets_no_weight_and_changes_no_other_token(self):
        moe = model.SoftMoE(7, 3, 11).double()
        x = randn(4, 9, 7).requires_grad_()
        lengths = 9, 2, 5, 1
        valid = torch.arange(9) < torch.tensor(lengths)[:, None]
        valid[0] = valid[0].flip(0)
        y, routing = moe(x, valid)
        for i, length in enumerate(lengths):
            alone, (dispatch, combine) = moe(x[i:i + 1, :length])
            torch.testing.assert_close(y[i:i + 1, :length], alone)
            torch.testing.assert_close(routing.dispatch[i:i + 1, :length], dispatch)
            torch.testing.assert_close(routing.combine[i:i + 1, :length], combine)
            assert not routing.dispatch[i, length:].any()
        entropy = losses.dispatch_entropy(routing.dispatch)
        (entropy.sum() + y.sum()).backward()
        assert entropy.isfinite().all() and x.grad.isfinite().all()
        assert moe.router.phi.grad.isfinite().all() and moe.router.phi.grad.any()

    @pytest.mark.parametrize("part", (model.Router, functools.partial(model.SoftMoE, hidden=11)))
    def test_a_map_is_no_row_of_tokens(self, part):
        with pytest.raises(ValueError, match=re.escape("[B, T, D]")):
            part(7, 3)(torch.rand(2, 5, 6, 7))

    def test_modules_made_without_memory_fill_themselves(self):
        """Hugging Face's from_pretrained and FSDP ask each module to do so."""
        torch.manual_seed(3)
        expected = model.SoftMoE(7, 3, 11).state_dict()
        with torch.device("meta"):
            moe = model.SoftMoE(7, 3, 11)
        moe.to_empty(device="cpu")
        for parameter in moe.parameters():
            parameter.data.fill_(math.nan)
        torch.manual_seed(3)
        moe.router.reset_parameters()
        moe.reset_parameters()
        torch.testing.assert_close(moe.state_dict(), expected, rtol=0, atol=0)

    def test_weights_start_as_in_linear_layers_and_shrink_with_depth(self):
        vit = model.build_vit("vit_tiny", image_size=32, experts=5)
        for depth, block in enumerate(vit.blocks, start=1):
            shrunk = 1 / (2 * depth) ** 0.5
            normal = {block.attn.qkv: 0.02, block.attn.proj: 0.02 * shrunk}
            if depth % 2:
                normal |= {block.mlp.fc1: 0.02, block.mlp.fc2: 0.02 * shrunk}
            else:
                moe = block.mlp
                bounds = {moe.w1: 192 ** -0.5, moe.w2: 768 ** -0.5 * shrunk,
                          moe.router.phi: 5 ** -0.5}
                for weight, bound in bounds.items():
                    assert weight.abs().max().item() == pytest.approx(bound, rel=0.01)
                    assert weight.std().item() == pytest.approx(bound / 3 ** 0.5, rel=0.05)
                assert moe.router.scale == 1 and not moe.b1.any() and not moe.b2.any()
            for layer, std in normal.items():
                assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
                assert not layer.bias.any()
            assert (block.ls1.gamma == 0.1).all() and (block.ls2.gamma == 0.1).all()

    def test_expert_dropout_drops_whole_experts_of_an_image(self):
        moe = model.SoftMoE(7, 2, 13, dropout=0.4).double()
        nn.init.normal_(moe.b2)
        x = randn(1, 3, 7).expand(4000, -1, -1)
        whole, _ = moe.eval()(x[:1])
        dropped, _ = moe.train()(x)
        # with two experts an image has one of four outputs: of none, of either, or of both
        assert len(dropped.flatten(1).round(decimals=9).unique(dim=0)) == 4
        assert (dropped == 0).all((1, 2)).double().mean().item() == pytest.approx(0.16, abs=0.03)
        assert torch.allclose(dropped.mean(0), whole[0], atol=0.1)

    @needs_loopback
    @pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"),
                        reason="this PyTorch's fully_shard needs a GPU")
    def test_a_block_that_fully_shard_shards_is_the_same_block(self, tmp_path):
        """Each of two processes holds half of every parameter."""
        path = tmp_path / "shard.py"
        path.write_text(f"""
import sys, torch
sys.path.insert(0, {str(HERE)!r})
import model
from torch.distributed import destroy_process_group, fsdp, init_process_group
from torch.distributed.device_mesh import init_device_mesh
init_process_group("gloo")
torch.manual_seed(0)
whole, sharded = (model.Block(6, 2, experts=3) for _ in "ab")
sharded.load_state_dict(whole.state_dict())
fsdp.fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
x = torch.randn(5, 7, 6)
results = []
for block in (whole, sharded):
    y, routing = block(x)
    (y.square().mean() + routing.dispatch[:, 1].log().mean()).backward()
    gradients = [p.grad.full_tensor() if block is sharded else p.grad for p in block.parameters()]
    results.append([y, *routing, *gradients])
torch.testing.assert_close(*results)
print(len(sharded.mlp.router.phi.to_local()), "of", len(sharded.mlp.router.phi), "rows")
destroy_process_group()
""", "utf-8")
        assert run_two(path) == 2 * "3 of 6 rows\n"


class TestViT:
    def test_patches_are_dropped_or_replaced_around_their_positions(self):
        """A visible patch keeps its position, and a mask token has that of its patch."""
        vit = model.ViT(40, 8, dim=18, depth=0, heads=2).double()
        images = randn(2, 3, 40, 40)
        whole, _ = vit(images)
        ids_keep = torch.stack([torch.randperm(25)[:7] for _ in range(2)])
        sparse, _ = vit(images, ids_keep)
        for b in range(2):
            assert torch.allclose(sparse[b], whole[b, [0, *(1 + ids_keep[b]).tolist()]])
        mask = torch.rand(2, 25) < 0.5
        mask_token = randn(1, 1, 18)
        dense, _ = vit(images, mask=mask, mask_token=mask_token)
        replaced = vit.norm(mask_token + vit.pos_embed[:, 1:])
        assert torch.allclose(dense[:, 1:], torch.where(mask[..., None], replaced, whole[:, 1:]))

    def test_soft_moes_replace_the_mlps_of_the_given_blocks(self):
        vit = nano(experts=2, moe_blocks=[3, 0, 3]).double()
        assert vit.moe_blocks == vit.config["moe_blocks"] == [0, 3]      # in order, and once
        images = randn(2, 3, 32, 32)
        tokens, routing = vit(images)
        assert list(routing) == [0, 3]
        x = vit.embed(images)
        for i, block in enumerate(vit.blocks):
            x = x + 0.1 * block.attn(block.norm1(x))
            y = block.mlp(block.norm2(x))
            if i in routing:
                y, expected = y
                torch.testing.assert_close(routing[i], expected)
            x = x + 0.1 * y
        torch.testing.assert_close(tokens, vit.norm(x), rtol=1e-5, atol=1e-6)

    def test_pooling_is_cls_or_the_mean_patch_and_nothing_else(self):
        tokens = rand(2, 5, 3)
        assert torch.equal(model.pool(tokens, "cls"), tokens[:, 0])
        assert torch.allclose(model.pool(tokens, "mean"), tokens[:, 1:].sum(1) / 4)
        with pytest.raises(ValueError, match="CLS"):
            model.pool(tokens, "CLS")

    def test_drop_path_rises_with_depth_and_keeps_the_expectation(self):
        vit = nano(drop_path=0.3)
        assert isinstance(vit.blocks[0].drop_path, nn.Identity)
        shares = [block.drop_path.p for block in vit.blocks[1:]]
        assert shares == pytest.approx([0.1, 0.2, 0.3])
        assert not list(vit.buffers())  # a model made on the meta device would have junk in them
        block = vit.blocks[3]
        kept = block.drop_path(torch.ones(4000, 2, 3))
        assert kept.unique().tolist() == pytest.approx([0, 1 / (1 - 0.3)])
        assert (kept == kept[:, :1, :1]).all() and kept.mean().item() == pytest.approx(1, abs=0.05)
        x = torch.rand(2, 17, 96)
        block.drop_path.p = 1 - 1e-7
        assert torch.equal(block(x)[0], x) and not torch.equal(block.eval()(x)[0], x)

    @pytest.mark.parametrize("experts, millions, giga", (
        (0, 85.8, 17.45), (2, 114.2, 11.93), (16, 510.9, None), (32, 964.3, None),
        (64, 1871.2, 13.86)))
    def test_vit_base_has_the_papers_parameters_and_multiplications(self, experts, millions, giga):
        with torch.device("meta"):
            vit = model.build_vit("vit_base", experts=experts)
        assert sum(p.numel() for p in vit.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
        assert vit.moe_blocks == ([1, 3, 5, 7, 9, 11] if experts else [])
        assert not giga or macs.encoder_macs(vit) / 1e9 == pytest.approx(giga, abs=0.006)

    @pytest.mark.parametrize("name, patch_size", (
        ("tiny", 16), ("small", 16), ("base", 16), ("large", 16), ("huge", 14)))
    def test_models_have_the_tensors_and_heads_of_timms(self, name, patch_size):
        import timm
        with torch.device("meta"):
            theirs = timm.create_model(f"vit_{name}_patch{patch_size}_224", init_values=0.1,
                                       num_classes=0)
            ours = model.build_vit(f"vit_{name}", patch_size=patch_size)
        shapes, expected = ({key: x.shape for key, x in vit.state_dict().items()}
                            for vit in (ours, theirs))
        assert shapes == expected
        assert ours.blocks[0].attn.heads == theirs.blocks[0].attn.num_heads

    def test_encoder_is_timms_both_ways(self):
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
        assert timm.data.IMAGENET_DEFAULT_MEAN == model.IMAGENET_MEAN
        assert timm.data.IMAGENET_DEFAULT_STD == model.IMAGENET_STD

    @pytest.mark.parametrize("name", ("losses", "model", "balance"))
    def test_files_to_copy_import_torch_alone(self, name):
        code = (HERE / f"{name}.py").read_text("utf-8")
        imports = re.findall(r"^(?:import|from) (\w+)", code, re.M)
        assert "torch" in imports and set(imports) <= {"torch", *sys.stdlib_module_names}


def make_student(dense=False):
    """-> a small student, 4 images of 25 patches, and masks, each of 11 other patches"""
    encoder = nano(image_size=40, experts=2)
    student = small_student(encoder, 7, dense=dense, pixels=True)
    mask = torch.stack([torch.randperm(25) for _ in range(4)]) < 11
    return student.double(), rand(4, 3, 40, 40), mask


class TestStudent:
    @pytest.mark.parametrize("grid, ratio, masked", (
        (14, 0.4, 78), (14, 0.006, 1), (14, 0.999, 195), (10, 0.29, 28)))
    def test_78_of_196_patches_are_masked_and_the_others_are_seen(self, grid, ratio, masked):
        """In floating point, 0.29 * 100 is below 29."""
        student = model.Explore(model.ViT(2 * grid, 2, dim=24, depth=1, heads=2), 5)
        assert data.count_masked(grid, ratio) == masked
        views = data.TrainViews(Shapes("train", 2 * grid), 2 * grid, 7, grid, ratio)
        batch = torch.utils.data.default_collate([views[0, i] for i in range(3)])
        assert (batch["mask"].sum(1) == masked).all()
        assert torch.equal(batch["ids_keep"], visible(batch["mask"]))
        pred = student(torch.rand(3, 3, 2 * grid, 2 * grid), batch["mask"], batch["ids_keep"])
        assert pred.tokens.shape == (3, 1 + grid ** 2 - masked, 5)

    @pytest.mark.parametrize("dense", (False, True))
    def test_the_student_never_sees_a_masked_patch(self, dense):
        student, images, mask = make_student(dense)
        pred = student(images, mask, visible(mask))
        hidden = mask.view(4, 1, 5, 5).repeat_interleave(8, 2).repeat_interleave(8, 3)
        for where, same in ((hidden, True), (~hidden, False)):
            other = student(torch.where(where, rand(4, 3, 40, 40), images), mask, visible(mask))
            assert torch.equal(other.tokens, pred.tokens) == same
            assert torch.equal(other.pixels, pred.pixels) == same
        if not dense:      # without the indices of the visible patches, it would see every patch
            with pytest.raises(ValueError, match="ids_keep"):
                student(images, mask)

    def test_one_mask_for_all_images_is_that_of_each(self):
        student, images, mask = make_student()
        targets, mask = randn(4, 26, 7), mask[:1].expand(4, -1)
        found = []
        for ids_keep in (visible(mask), visible(mask[:1])):
            pred = student(images, mask, ids_keep)
            found.append(losses.explore_losses(pred, targets, images, mask, objectives=ALL)[0])
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize("dense", (False, True))
    def test_head_and_decoder_see_the_encoders_tokens_and_teach_it(self, dense):
        student, images, mask = make_student(dense)
        pred = student(images, mask, visible(mask))
        tokens, _ = student.encoder(images, pred.ids_keep, mask if dense else None,
                                    student.mask_token)
        assert torch.equal(pred.tokens, student.head(tokens))
        assert torch.equal(pred.pixels, student.decoder(tokens[:, 1:], pred.ids_keep, mask))
        for part in (pred.tokens, pred.pixels):
            gradient, = torch.autograd.grad(part.sum(), student.encoder.pos_embed,
                                            retain_graph=True)
            assert gradient.any()

    def test_the_decoder_puts_every_visible_token_back_in_its_place(self):
        decoder = model.PixelDecoder(nano(), dim=64, depth=1, heads=2).double()
        patches = randn(3, 16, 96)
        mask = torch.stack([torch.randperm(16) for _ in range(3)]) >= 9
        ids_keep = torch.stack([(~row).nonzero()[torch.randperm(9), 0] for row in mask])
        x = torch.where(mask[..., None], decoder.mask_token, decoder.embed(patches))
        x, _ = decoder.blocks[0](x + decoder.pos_embed)
        expected = decoder.pixels(decoder.norm(x))
        sparse = patches[torch.arange(3)[:, None], ids_keep]
        assert torch.allclose(decoder(sparse, ids_keep, mask), expected)
        assert torch.allclose(decoder(patches, None, mask), expected)

    def test_the_decoder_is_the_papers_and_tokens_start_at_0_02(self):
        student = model.Explore(nano(dim=768, depth=1), 8, dense=True, pixels=True)
        decoder = student.decoder
        assert len(decoder.blocks) == 8 and decoder.blocks[0].attn.heads == 16
        assert decoder.pos_embed.shape == (1, 16, 512)
        names = " ".join(decoder.state_dict())
        assert "phi" not in names and "ls1" not in names
        assert not any("mask_token" in name for name in student.encoder.state_dict())
        encoder = student.encoder
        for weight in (student.mask_token, student.head.weight, encoder.cls_token,
                       encoder.pos_embed, encoder.patch_embed.proj.weight, decoder.mask_token,
                       decoder.pos_embed, decoder.embed.weight):
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert not student.head.bias.any() and not decoder.embed.bias.any()


def cosine(pred, target):
    """The cosine of two vectors: [D] each -> scalar"""
    return pred @ target / (pred @ pred).sqrt() / (target @ target).sqrt()


def squares(pred, image, i):
    """Eq. 3 of patch i of 8 x 8 pixels, the mean over them: [P], [3, H, W] -> scalar"""
    row, column = divmod(i, image.shape[2] // 8)
    patch = image[:, 8 * row:8 * row + 8, 8 * column:8 * column + 8].flatten()
    patch = (patch - patch.mean()) / (patch.var(correction=1) + 1e-6).sqrt()
    return ((pred - patch) ** 2).mean()


def plain_token(pred, targets, images, mask, b, prefix):
    """Eq. 1 of image b -> (its patches' losses, which patches count, who weights them)"""
    if pred.ids_keep is None:
        kept, chosen = torch.arange(len(mask[b])), mask[b]
    else:
        kept = pred.ids_keep[b]
        chosen = torch.ones(len(kept)).bool()
    return huber(pred.tokens[b, prefix:], targets[b, 1 + kept]), chosen, 0


def plain_pixel(pred, targets, images, mask, b, prefix):
    """Eq. 3 of image b -> the same"""
    loss = torch.stack([squares(x, images[b], i) for i, x in enumerate(pred.pixels[b])])
    return loss, mask[b], 1 if pred.ids_keep is None else None


PLAIN = {"token": plain_token, "pixel": plain_pixel}      # each loss of patches, by its equation


def plain_losses(pred, targets, images, mask, objectives, loss_block, loss_weights="dispatch",
                 detach=False, lambdas=(), entropy_on="dispatch", importance_weight=0.0,
                 prefix=1):
    """Eq. 5 to 8, image by image -> (losses [K] without their weights w, regularizer)"""
    routed = [pred.routing[block] for block in loss_block]
    found = []
    for name in objectives:
        per_image = []
        for b in range(len(mask)):
            if name == "cls":
                per_image.append(1 - cosine(pred.tokens[b, 0], targets[b, 0]))
                continue
            loss, chosen, expert = PLAIN[name](pred, targets, images, mask, b, prefix)
            weight = torch.ones_like(loss)
            if routed and loss_weights != "uniform" and expert is not None:
                weight = sum(getattr(r, loss_weights)[b, prefix:, expert] for r in routed)
                weight = weight / len(routed)
            if detach:
                weight = weight.detach()
            total = chosen.sum() if loss_weights == "combine" else weight[chosen].sum()
            per_image.append((weight * loss)[chosen].sum() / total)
        found.append(sum(per_image) / len(per_image))
    regularizer = torch.zeros((), dtype=torch.float64)
    for r in routed:
        p = getattr(r, entropy_on)
        negentropy = (p * p.log()).sum((0, 1)) / len(mask)
        usage = r.combine.sum((0, 1))
        importance = usage.var(correction=0) / usage.mean() ** 2
        regularizer = regularizer + importance_weight * importance / len(routed)
        for each, h in zip(lambdas, negentropy):
            regularizer = regularizer + each * h / len(routed)
    return torch.stack(found), regularizer


Case = namedtuple("Case", "pred targets images mask routers")      # a random prediction


def make_case(dense=False, prefix=1):
    """4 images of 25 patches, 14 of which are visible; routers of blocks 0 and 3.

    In dense encoding, where the losses can take it, each image has another number of them.
    """
    routers = {block: model.Router(7, 3).double() for block in (0, 3)}
    for router in routers.values():
        router.scale.data.fill_(6)
    visible = torch.tensor([[4], [24], [11], [17]]) if dense else 14
    mask = torch.stack([torch.randperm(25) for _ in range(4)]) >= visible
    ids_keep = None
    if not dense:
        ids_keep = torch.stack([(~row).nonzero()[torch.randperm(14), 0] for row in mask])
    tokens = prefix + (25 if dense else 14)
    routing = {block: router(randn(4, tokens, 7)) for block, router in routers.items()}
    hard = torch.arange(1, 5)[:, None, None]      # unequal losses: of images, and of patches
    pixels = randn(4, 25, 192) * (hard + 2 * rand(4, 25, 1))
    pred = model.Prediction((hard * randn(4, tokens, 9)).requires_grad_(), pixels.requires_grad_(),
                            routing, ids_keep)
    return Case(pred, randn(4, 26, 9), rand(4, 3, 40, 40), mask, routers)


def couple(case, **keywords):
    """What explore_losses makes of a case"""
    return losses.explore_losses(case.pred, case.targets, case.images, case.mask, **keywords)


class TestLosses:
    def test_token_loss_is_equation_1(self):
        pred = 2 * randn(3, 4, 192)
        target = 3 * randn(3, 4, 192) + 1
        target[0] *= 1e-3      # so small that the 1e-5 of the norm counts
        expected = torch.stack(list(map(huber, pred, target)))
        assert torch.allclose(losses.token_loss(pred, target), expected)

    def test_cls_loss_is_equation_2(self):
        pred, target = randn(2, 5, 192)
        expected = 1 - np.mean([cosine(*pair).item() for pair in zip(pred, target)])
        assert losses.cls_loss(pred, target).item() == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("channels", (1, 3, 4))
    def test_pixel_loss_is_equation_3_averaged_over_pixels(self, channels):
        pred = randn(5, 6, 64 * channels)
        images = rand(5, channels, 24, 16)
        images[0] *= 1e-2      # so dark that the 1e-6 counts
        for b, i in np.ndindex(5, 6):
            expected = squares(pred[b, i], images[b], i)
            assert torch.allclose(losses.pixel_loss(pred, images)[b, i], expected)

    def test_the_pixel_loss_compiles_for_sizes_that_change(self):
        compiled = torch.compile(losses.pixel_loss, backend="eager", fullgraph=True, dynamic=True)
        for size, patch_size in ((24, 8), (40, 8), (36, 12), (30, 5)):
            images = torch.rand(2, 3, size, size)
            pred = torch.rand(2, (size // patch_size) ** 2, 3 * patch_size ** 2)
            torch.testing.assert_close(compiled(pred, images), losses.pixel_loss(pred, images))

    @pytest.mark.parametrize("alike", (False, True))
    def test_spread_is_the_deviation_over_an_images_selected_patches(self, alike):
        """It has no gradient, not even an infinite one where all patches cost the same."""
        patch_loss = rand(5, 9) if not alike else torch.full((5, 9), 0.3).double()
        counts = torch.tensor([[9], [1], [4], [0], [2]])
        selected = torch.stack([torch.randperm(9) for _ in range(5)]) < counts
        expected = np.mean([np.std(x[s].numpy()) if s.any() else 0
                            for x, s in zip(patch_loss, selected)])
        _, found = losses.coupled_loss(patch_loss.requires_grad_(), selected.double())
        assert found["spread"].item() == pytest.approx(expected, abs=1e-12)
        assert not found["spread"].requires_grad

    def test_an_image_without_selected_patches_has_no_gradient(self):
        """iBOT leaves some images whole. The mean is over all images."""
        patch_loss, weight = rand(3, 7) + 5, rand(3, 7).requires_grad_()
        selected = (torch.rand(3, 7) < 0.5).double()
        selected[1] = 0
        selected[:, 2] = torch.tensor([1, 0, 1])
        patch_loss.requires_grad_()
        loss = losses.weighted_mean(patch_loss, weight * selected)
        loss.backward()
        expected = sum((w * x)[s > 0].sum() / w[s > 0].sum() for w, x, s in zip(
            weight, patch_loss, selected) if s.any()) / 3
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        for gradient in (weight.grad, patch_loss.grad):
            assert gradient.isfinite().all() and not gradient[1].any() and gradient[0].any()
        case = make_case(dense=True)
        case.mask[2] = False
        values, _, _ = couple(case, objectives=ALL)
        values.sum().backward()
        for prediction in (case.pred.tokens, case.pred.pixels):
            assert prediction.grad.isfinite().all() and not prediction.grad[2, 1:].any()
        assert all(router.phi.grad is None or router.phi.grad.isfinite().all()
                   for router in case.routers.values())

    def test_routed_losses_teach_the_router_to_leave_hard_patches(self):
        weight = torch.full((1, 3), 1 / 3, requires_grad=True)
        losses.weighted_mean(torch.tensor([[0.1, 0.5, 0.9]]), weight).backward()
        assert weight.grad[0, 0] < 0 < weight.grad[0, 2]      # descent raises the easy one's weight
        assert abs(weight.grad[0, 1]) < 1e-6

    def test_entropy_is_ln_119_if_uniform_and_0_for_one_token(self):
        uniform = torch.full((1, 119, 1), 1 / 119)
        assert losses.dispatch_entropy(uniform).item() == pytest.approx(4.779, abs=5e-4)
        point = F.one_hot(torch.tensor([[3]]), 119).float().transpose(1, 2).requires_grad_()
        entropy = losses.dispatch_entropy(point).sum()
        entropy.backward()
        assert entropy.item() == 0 and point.grad.isfinite().all()

    @pytest.mark.parametrize("dense, keywords", (
        (False, dict(objectives=ALL, lambdas=(0.5, 2.0, 0.1), importance_weight=300.0,
                     loss_block=(0, 3))),
        (True, dict(objectives=ALL, lambdas=(1.0, 2.0, 0.2), entropy_on="combine",
                    loss_block=(0, 3))),
        (True, dict(objectives=("pixel", "token"), lambdas=(0.0, 1.0, 0.3), loss_weights="combine",
                    loss_block=(0, 3))),
        (True, dict(objectives=("cls", "token"), lambdas=(1.0, 1.0, 2.0), loss_weights="uniform")),
        (False, dict(objectives=("token", "cls"), lambdas=(3.0, 1.0, 2.0), detach=True)),
        (False, dict(objectives=("token",), lambdas=(0.3, 1.0, 2.0), prefix=0)),
        (False, dict(objectives=("token", "cls"), lambdas=(3.0, 1.0, 2.0), prefix=5)),
        (True, dict(objectives=ALL, lambdas=(0.3, 1.0, 2.0), prefix=5))))
    def test_explore_losses_are_equations_5_to_8_with_gradients(self, dense, keywords):
        """The last three are of students without [CLS], and with four registers after [CLS]."""
        prefix = keywords.get("prefix", 1)
        case = make_case(dense, prefix)
        keywords = dict(loss_block=(3,)) | keywords
        expected, regularizer = plain_losses(*case[:4], **keywords)
        unweighted, _ = plain_losses(*case[:4], keywords["objectives"], (), prefix=prefix)
        keywords["lambdas"] = torch.tensor(keywords["lambdas"], dtype=torch.float64)
        values, found, metrics = couple(case, **keywords)
        torch.testing.assert_close((values, found), (expected, regularizer), rtol=1e-12, atol=0)
        w = torch.linspace(0.4, 2, len(values))
        leaves = [case.pred.tokens, case.pred.pixels, *(r.phi for r in case.routers.values())]
        torch.testing.assert_close(*(      # gradients of Eq. 8
            torch.autograd.grad((w * each).sum() + more, leaves, retain_graph=True,
                                allow_unused=True)
            for each, more in ((values, found), (expected, regularizer))), rtol=1e-9, atol=1e-12)

        kind = keywords.get("loss_weights", "dispatch")
        for name, value, mean in zip(keywords["objectives"], values, unweighted):
            assert metrics[name] == value
            assert (f"{name}_spread" in metrics) == (name in PLAIN)
            weighted = (kind != "uniform" and name in PLAIN
                        and PLAIN[name](*case[:4], 0, prefix)[2] is not None)
            assert weighted == (f"{name}_ratio" in metrics) == (f"{name}_unweighted" in metrics)
            if weighted:
                assert metrics[f"{name}_unweighted"].item() == pytest.approx(mean.item(), rel=1e-9)
                ratio = (value / mean).item()
                assert metrics[f"{name}_ratio"].item() == pytest.approx(ratio, rel=1e-5)
        assert not any(value.requires_grad for value in metrics.values())
        dispatch = torch.stack([case.pred.routing[b].dispatch for b in keywords["loss_block"]])
        patches = dispatch.mean(0)[:, prefix:]
        cv = (patches.std(1, correction=0) / patches.mean(1)).mean(0)
        assert ("cls_share" in metrics) == (prefix > 0)
        if prefix:
            assert torch.allclose(metrics["cls_share"], dispatch[:, :, 0].mean((0, 1)))
        assert torch.allclose(metrics["dispatch_cv"], cv)
        entropies = torch.stack([losses.dispatch_entropy(each) for each in dispatch])
        assert torch.allclose(metrics["entropy"], entropies.mean(0))

    @pytest.mark.parametrize("keywords", (
        dict(), dict(detach=True), dict(loss_weights="uniform"),
        dict(detach=True, loss_weights="combine")), ids=str)
    def test_detached_and_uniform_weights_give_the_router_no_gradient(self, keywords):
        case = make_case()
        couple(case, lambdas=0.0, **keywords)[0].sum().backward()
        assert (case.routers[3].phi.grad is not None) == (not keywords)
        assert case.routers[0].phi.grad is None

    def test_weights_that_all_underflow_count_as_if_unweighted(self):
        case = make_case()
        dispatch = torch.zeros(4, 15, 3)
        dispatch[:, 0] = 1
        case.pred.routing[3] = model.Routing(dispatch.requires_grad_(), dispatch)
        values, _, metrics = couple(case, objectives=["token"])
        values.sum().backward()
        assert metrics["token_ratio"].item() == pytest.approx(1, rel=1e-5)
        assert dispatch.grad.isfinite().all()

    def test_losses_of_predictions_in_half_precision_are_in_float32(self):
        case = make_case()
        pred = case.pred._replace(tokens=case.pred.tokens.half(), pixels=case.pred.pixels.half())
        half = case._replace(pred=pred, targets=case.targets.half())
        exact = half._replace(pred=pred._replace(tokens=pred.tokens.float(),
                                                 pixels=pred.pixels.float()),
                              targets=half.targets.float())
        torch.testing.assert_close(couple(half, objectives=ALL), couple(exact, objectives=ALL))

    def test_by_default_the_last_block_counts_with_lambda_5(self):
        case = make_case()
        papers = couple(case)
        given = couple(case, objectives=("token", "cls"), loss_block=[3],
                       lambdas=torch.full((3,), 5.0))
        torch.testing.assert_close(papers, given)

    @pytest.mark.parametrize("patch_loss, weight", (
        ((3, 5), (3, 1)), ((5,), (3, 5)), ((1, 5), (3, 5)), ((5,), (5,)), ((3, 5, 1), (3, 5, 1))))
    def test_a_weighted_mean_broadcasts_nothing(self, patch_loss, weight):
        with pytest.raises(ValueError, match=re.escape("must be [B, N]")):
            losses.weighted_mean(torch.rand(patch_loss), torch.rand(weight))

    @pytest.mark.parametrize("dense", (False, True))
    def test_without_the_cls_loss_targets_need_no_cls(self, dense):
        """Targets with registers would be those of other patches."""
        case = make_case(dense)
        patches = case._replace(targets=case.targets[:, 1:])
        torch.testing.assert_close(couple(case, objectives=["token"]),
                                   couple(patches, objectives=["token"]))
        registers = case._replace(targets=torch.cat([case.targets, case.targets[:, :4]], dim=1))
        for wrong in (patches, registers):
            with pytest.raises(ValueError, match="tokens"):
                couple(wrong, objectives=["token", "cls"])
        with pytest.raises(ValueError, match="prefix"):
            couple(make_case(dense, prefix=0), objectives=["token", "cls"], prefix=0)


def gradnorm_weights(*steps, alpha=1.0):
    """GradNorm's weights after steps, each (the losses [K], their gradients [K, P]).

    They are the means over the step's three micro-batches.
    """
    shared = nn.ParameterList([torch.zeros(len(steps[0][1][0]))])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    gradnorm = balance.GradNorm(torch.full((len(steps[0][0]),), 0.4), shared, alpha, 0.01, scaler)
    for values, gradients in steps:
        values, gradients = torch.tensor(values), torch.tensor(gradients)
        for change in (-1.0, 0.25, 0.75):
            gradnorm.observe((1 + change / 2) * values + (gradients + change) @ shared[0])
        gradnorm.update()
    assert gradnorm.state_dict().keys() == {"weights", "initial"}      # what resuming needs
    return gradnorm(0).tolist()


class TestBalance:
    @pytest.mark.parametrize("alpha", (0.0, 0.5, 2.0))
    def test_gradnorm_is_its_papers_algorithm(self, alpha):
        """Each of three weights rises and falls, and one reaches its limit."""
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

    def test_gradnorm_sees_gradients_that_would_be_zero_in_fp16(self):
        """FP16 has no numbers below 2 ** -25."""
        tiny = torch.tensor([[3.0, 5.0, 0.0], [-7.0, 1.0, 2.0]]) * 2.0 ** -30
        assert not tiny.half().any()
        shared = nn.ParameterList([torch.zeros(3)])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
        gradnorm = balance.GradNorm(torch.ones(2), shared, 1.0, 0.01, scaler)
        values = torch.tensor([2.0, 11.0])
        gradnorm.observe(values + tiny @ shared[0].half().float())      # its gradient is in FP16
        assert torch.equal(gradnorm.losses[0], values)
        assert torch.equal(gradnorm.gradients[0], tiny)

    def test_gradnorm_survives_numbers_that_are_not_finite(self):
        even = [[1.0], [1.0]]      # gradients
        steps = ([1.0, 1.0], even), ([0.9, 0.1], even)      # the first loss has hardly fallen
        for wrong in (([math.nan, 0.1], even), ([math.inf, 0.1], even),
                      ([0.9, 0.1], [[1.0], [math.inf]])):
            assert gradnorm_weights(*steps, wrong) == gradnorm_weights(*steps)
        late = gradnorm_weights(([math.nan, 1.0], even), ([4.0, 1.0], even), ([2.0, 1.0], even))
        assert late[0] < 1 < late[1]      # what is not finite is no first loss

    def test_all_processes_draw_the_same_random_weights_and_other_seeds_others(self):
        """PyTorch's generators on a CPU take 32 bits of a seed."""
        def draw(seed, rank, step):
            args = pretrain.parse_args(["--balance", "rlw", "--seed", str(seed)])
            process = argparse.Namespace(rank=rank, device="cpu")
            return pretrain.build_balance(args, None, process)(step)
        assert torch.equal(draw(42, 0, 3), draw(42, 1, 3))
        drawn = [draw(seed, 0, step) for seed in (42, 43, 42 + 2 ** 32) for step in (1, 2)]
        assert len(torch.stack(drawn).unique(dim=0)) == 6


def timm_vit(**kwargs):
    """A timm ViT of one block; its state dict has timm's names."""
    from timm.models import VisionTransformer
    return VisionTransformer(**dict(img_size=32, patch_size=16, embed_dim=192, depth=1,
                                    num_heads=3, num_classes=0) | kwargs).eval()


def check_loads(source, vit):
    """load_encoder(source) has the features of timm's `vit`."""
    images = torch.rand(1, 3, *vit.patch_embed.img_size)
    encoder = checkpoints.load_encoder(source).eval()
    assert torch.allclose(encoder(images)[0], vit.forward_features(images), atol=1e-5)


def wrapped(vit, *names):
    """The state dict of a module that holds `vit` in modules of these names, the innermost last."""
    for name in reversed(names):
        kind = {"module": nn.DataParallel, "_orig_mod": torch.compile}
        vit = kind[name](vit) if name in kind else nn.ModuleDict({name: vit, "head": nn.Identity()})
    return vit.state_dict()


def under(names):
    """A function from a ViT to the state dict of modules of these names around it"""
    return lambda vit: wrapped(vit, *names.split())


def compile_each_block(vit):
    """The state dict of a ViT whose blocks are compiled one by one"""
    vit = copy.deepcopy(vit)
    vit.blocks = nn.Sequential(*map(torch.compile, vit.blocks))
    assert "blocks.2._orig_mod.norm1.bias" in vit.state_dict()
    return vit.state_dict()


def cut_into_chunks(vit):
    """Blocks 0 and 1 are in the first chunk, 2 in the second."""
    return {re.sub(r"^blocks\.(\d)", lambda d: f"blocks.{int(d[1]) // 2}.{d[1]}", name): x
            for name, x in vit.state_dict().items()}


BIAS = "blocks.3.norm1.bias"


class TestCheckpoints:
    @pytest.mark.parametrize("vit, wrap, zipped", (
        (dict(init_values=0.1), lambda state: state, False),
        (dict(embed_dim=512, num_heads=8),
         lambda state: {"model": state, "args": argparse.Namespace(lr=1)}, True),
        (dict(embed_dim=1280, num_heads=16),
         lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}}, True)))
    def test_plain_vits_load_without_their_heads_and_decoders(self, tmp_path, vit, wrap, zipped):
        """Attention heads are 64 wide, and those of ViT-H 80."""
        theirs = timm_vit(img_size=80, depth=2, num_classes=7, **vit)
        others = ("cls_head.bias fc_norm.bias decoder_pos_embed mask_token pre_logits.x "
                  "predictor.x projector.x").split()
        state = wrap({**theirs.state_dict(), **dict.fromkeys(others, torch.zeros(1))})
        torch.save(state, tmp_path / "timm.pt", _use_new_zipfile_serialization=zipped)
        check_loads(tmp_path / "timm.pt", theirs)

    @pytest.mark.parametrize("prefix, core", (("", "core"), ("module.", "_core")))
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")      # NumPy 2's, of NumPy 1's names
    def test_checkpoints_of_the_authors_trainer_load(self, tmp_path, monkeypatch, prefix, core):
        """They hold NumPy's arrays, whose functions NumPy 1 and 2 name differently."""
        pytest.importorskip(f"numpy.{core}.multiarray")      # NumPy 1.26.0 cannot write NumPy 2's
        for x in (np.float64(0), np.empty(0)):
            monkeypatch.setattr(x.__reduce__()[0], "__module__", f"numpy.{core}.multiarray")
        encoder = model.ViT(32, 8, dim=192, depth=4, heads=3, experts=3, moe_blocks=[0, 2]).eval()
        state = {f"{prefix}teacher.cls_token": torch.zeros(1)}
        for name, value in encoder.state_dict().items():  # in the release's words
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
            elif ".router." in name:  # a scale of no dimension
                state[name.replace(".router", "")] = value if "phi" in name else value[0]
            else:
                state[name] = value
        torch.save({"model": state, "config": {"data": Path("a")},
                    "best_loss": np.float32(math.inf),
                    "optimizer": {"param_groups": [{"lr": np.float64(0.1), "params": [0, 1]}]},
                    "lr_schedule": np.linspace(0, 1, 300), "epochs": np.arange(3),
                    "seen": np.ones(2, bool)},
                   tmp_path / "release.pt")
        assert f"numpy.{core}.multiarray".encode() in (tmp_path / "release.pt").read_bytes()
        loaded = checkpoints.load_encoder(tmp_path / "release.pt").eval()
        images = torch.rand(2, 3, 32, 32)
        assert torch.allclose(loaded(images)[0], encoder(images)[0], atol=1e-6)
        assert loaded.moe_blocks == [0, 2]

    def test_timms_config_beside_a_file_says_its_heads(self, tmp_path, capsys):
        torch.save(timm_vit().state_dict(), tmp_path / "x.pt")
        write_text(tmp_path / "config.json", '{"architecture": "vit_tiny_patch16_224"}')
        checkpoints.load_encoder(tmp_path / "x.pt")
        assert not capsys.readouterr().err      # nothing is assumed

    def test_a_config_of_another_library_beside_a_file_is_no_error(self, tmp_path):
        torch.save(timm_vit().state_dict(), tmp_path / "x.pt")
        write_text(tmp_path / "config.json", '{"architectures": ["ViTModel"]}')
        checkpoints.load_encoder(tmp_path / "x.pt")

    @pytest.mark.parametrize("file", (
        # DDP, torch.compile, DINO's and Lightning's modules give their names to what they hold
        *map(under, ("_orig_mod", "_orig_mod module", "backbone", "module backbone", "model", "net",
                     "module _orig_mod student", "a b")),
        lambda vit: {"state_dict": wrapped(vit, "a") | {"b.cls_token": torch.zeros(1)}, "epoch": 3},
        lambda vit: {"target_encoder": wrapped(vit, "module") | {          # MSN, with its head
            "module.fc.fc1.weight": torch.zeros(3, 2)}, "epoch": 3},
        lambda vit: {"module": vit.state_dict(), "dp_world_size": 2},      # DeepSpeed
        lambda vit: {"epoch": 3, "model_state_dict": vit.state_dict()},    # one's own
        compile_each_block,
        lambda vit: {"teacher": {f"backbone.{x}": w for x, w in cut_into_chunks(vit).items()}}))
    def test_an_encoder_is_found_under_the_names_of_other_libraries(self, tmp_path, file):
        vit = timm_vit(depth=3)
        torch.save(file(vit), tmp_path / "x.pt")
        check_loads(tmp_path / "x.pt", vit)

    @pytest.mark.parametrize("first, others", (
        ("teacher backbone", ["student module backbone"]),                         # DINO, iBOT
        ("target_encoder module", ["encoder module", "predictor module"]),         # I-JEPA
        ("model", ["model_ema"]), ("state_dict_ema", ["state_dict"]),              # DeiT, timm
        ("model teacher backbone", ["model student backbone"]),                    # DINOv2
        ("model module student", ["model module teacher model", "model module teacher"]),  # release
        ("state_dict module base_encoder", ["state_dict module momentum_encoder"])))       # MoCo v3
    def test_of_several_encoders_its_own_librarys_choice_counts(self, tmp_path, capsys, first,
                                                                others):
        """A line says which one it is."""
        file = {"epoch": 3}
        vit = timm_vit()
        for names in (first, *others) if "base" in first else (*others, first):
            place, *inner = names.split()
            each = vit if names == first else timm_vit()
            file[place] = file.get(place, {}) | wrapped(each, *inner)
        torch.save(file, tmp_path / "x.pt")
        check_loads(tmp_path / "x.pt", vit)
        line, *_ = capsys.readouterr().err.splitlines()
        place, *inner = first.split()
        assert line.startswith(f"{tmp_path}/x.pt: takes {' '.join([place, *inner[:1]])}")

    @pytest.mark.parametrize("averaged", (True, False))
    def test_of_timms_checkpoints_the_averaged_weights_count(self, tmp_path, averaged):
        from timm.utils import CheckpointSaver, ModelEmaV3
        vit = timm_vit()
        average = ModelEmaV3(vit)
        for parameter in vit.parameters():
            parameter.data *= 1.1
        args = argparse.Namespace(model="vit", lr=np.float64(0.1))
        saver = CheckpointSaver(
            vit, torch.optim.AdamW(vit.parameters()), args, model_ema=average if averaged else None,
            checkpoint_dir=tmp_path, recovery_dir=tmp_path)
        saver.save_checkpoint(3, metric=np.float64(71.5))
        check_loads(tmp_path / "last.pth.tar", average.module if averaged else vit)

    def test_safetensors_load_as_hugging_face_has_them(self, tmp_path):
        from safetensors.torch import save_file
        vit = timm_vit(num_classes=7)
        save_file(vit.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
        images = torch.rand(1, 3, 32, 32)
        frozen = build_frozen(str(tmp_path / "model.safetensors"))
        assert torch.allclose(frozen(images), vit.forward_features(normalized(images)), atol=1e-5)
        (tmp_path / "model.safetensors").write_text("no such file")
        with pytest.raises(common.UserError, match="model.safetensors: .*no such file"):
            build_frozen(str(tmp_path / "model.safetensors"))

    @pytest.mark.parametrize("names, beside, heads", (
        ("module base_encoder", {"arch": "vit_small"}, 12), ("module", {"arch": "vit_small"}, 12),
        ("", {"args": argparse.Namespace(model="deit_small_patch16_224")}, 6),
        ("", {"arch": "vit_small_patch16_224"}, 6), ("backbone", {}, None)), ids=str)
    def test_attention_heads_are_those_the_file_says_or_are_printed(self, tmp_path, capsys,
                                                                    names, beside, heads):
        """MoCo v3's ViT-S has 12, in its own files and in those of main_lincls, and timm's has 6.
        Weights have the same shapes for any number.
        """
        path = tmp_path / "x.pt"
        vit = timm_vit(embed_dim=384, num_heads=heads or 6)
        torch.save({"state_dict": wrapped(vit, *names.split())} | beside, path)
        check_loads(path, vit)
        line = capsys.readouterr().err
        assert not line if heads else (str(path) in line and " 6" in line)
        vit.blocks[0].attn.num_heads, vit.blocks[0].attn.head_dim = 4, 96
        check_loads(checkpoints.load_checkpoint(path, heads=4), vit)
        assert not capsys.readouterr().err

    @pytest.mark.parametrize("content, expected", (
        (lambda vit: {name: x for name, x in vit.items() if name != BIAS}, BIAS),
        (lambda vit: vit | {"blocks.3.norm3.bias": torch.zeros(3)}, "norm3.bias"),
        (lambda vit: nano().state_dict(), "width of 96")),      # of how many heads?
        ids=("a tensor is missing", "a tensor has no place", "heads are unknown"))
    def test_a_file_that_fits_in_part_does_not_load(self, tmp_path, content, expected):
        torch.save(content(nano(dim=192).state_dict()), tmp_path / "x.pt")
        with pytest.raises(common.UserError, match=expected):
            checkpoints.load_encoder(tmp_path / "x.pt")

    @pytest.mark.parametrize("name", (
        "vit_small_patch14_reg4_dinov2", "vit_medium_patch16_reg4_gap_256", "beit_base_patch16_224",
        "vit_base_patch16_siglip_gap_224", "deit_tiny_distilled_patch16_224"))
    def test_a_file_without_cls_and_a_square_of_patches_is_for_timm(self, tmp_path, name):
        import timm
        torch.save(timm.create_model(name, depth=1).state_dict(), tmp_path / "x.pt")
        with pytest.raises(common.UserError, match="timm/NAME may take it"):
            checkpoints.load_encoder(tmp_path / "x.pt")

    def test_code_in_a_file_never_runs(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("x.pt").write_bytes(b"cos\nmkdir\n(S'sprung'\ntR.")      # a pickle that makes a folder
        with pytest.raises(common.UserError, match=r"^x.pt: .*it begins with b.cos"):
            checkpoints.load_encoder("x.pt")

        class Trap:
            def __reduce__(self):
                return os.mkdir, ("sprung",)
        torch.save({"model": nano().state_dict(), "code": Trap()}, "y.pt")
        with pytest.raises(common.UserError, match="^y.pt: .* GLOBAL posix.mkdir"):
            checkpoints.load_encoder("y.pt")
        assert not Path("sprung").exists()

    def test_position_embeddings_resize_to_another_grid_as_timms(self):
        from timm.layers import resample_abs_pos_embed
        embed = torch.randn(1, 17, 3)
        expected = resample_abs_pos_embed(embed, [6, 6])
        assert torch.allclose(checkpoints.resize_pos_embed(embed, 6), expected, atol=1e-6)
        assert checkpoints.resize_pos_embed(embed, 4) is embed
        half = embed.half()      # files are often in half precision
        expected = checkpoints.resize_pos_embed(half.float(), 6)
        torch.testing.assert_close(checkpoints.resize_pos_embed(half, 6), expected, rtol=0, atol=0)

    @pytest.mark.parametrize("flags", ("", "--encoding dense --objective token_cls_pixel"))
    def test_a_student_that_is_loaded_predicts_as_it_did(self, stage, teacher, flags):
        argv = stage("pretrain", f"--max-steps 1 --experts 3 {flags}")
        train(argv)
        path = f"{pretrain.parse_args(argv).out}/last.pt"
        student = checkpoints.load_student(path, decoder=SMALL_DECODER).eval()
        trained = small_decoder(pretrain.parse_args(argv), 60).eval()
        trained.load_state_dict(torch.load(path)["model"])
        mask = torch.stack([torch.randperm(16) < 7 for _ in range(2)])
        seen = torch.rand(2, 3, 32, 32), mask, visible(mask)
        for ours, theirs in zip(student(*seen)[:2], trained(*seen)[:2]):
            assert ours is theirs is None or torch.equal(ours, theirs)

    @pytest.mark.parametrize("vit", (
        dict(experts=3, moe_blocks=[0, 2]), dict(image_size=48, patch_size=12), dict(depth=2)))
    def test_a_checkpoint_rebuilds_its_encoder(self, tmp_path, vit):
        images = torch.rand(2, 3, vit.get("image_size", 32), vit.get("image_size", 32))
        torch.manual_seed(1)
        encoder = nano(**vit).eval()
        torch.manual_seed(1)
        loaded = checkpoints.load_encoder(write_checkpoint(tmp_path / "e.pt", **vit)).eval()
        assert torch.equal(loaded(images)[0], encoder(images)[0])


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
def quick_gelu(small_clips):
    """-> (a CLIP with QuickGELU, images, what it makes of them)"""
    import open_clip
    clip = open_clip.create_model("small-16-quickgelu").eval()
    for parameter in clip.parameters():      # no bias is zero, no norm neutral; all fit 16 bits
        parameter.data = (parameter + 0.1 * torch.randn_like(parameter)).half().float()
    images = torch.rand(2, 3, 64, 64)
    mean = (0.48145466, 0.4578275, 0.40821073)
    std = (0.26862954, 0.26130258, 0.27577711)
    return clip, images, clip.visual(TF.normalize(images, mean, std))


class TestFrozenEncoders:
    def test_a_clip_equals_open_clips_with_or_without_quick_gelu(self, quick_gelu, tmp_path,
                                                                 monkeypatch, capsys):
        """A file does not say it, so a line names the activation, and how to get the other."""
        clip, images, expected = quick_gelu
        torch.save(clip.state_dict(), tmp_path / "weights.pt")
        quick, normal = (f"small-16{x}/{tmp_path}/weights.pt" for x in ("-quickgelu", ""))
        teacher = build_frozen(quick)
        assert {type(block.attn) for block in teacher.visual.transformer.resblocks} == {
            encoders.ClipAttention}
        assert teacher(images).shape == (2, 17, 64) and teacher.dim == teacher.image_size == 64
        assert torch.allclose(pooled(teacher, images), expected, atol=1e-4)
        assert not torch.allclose(pooled(build_frozen(normal), images), expected, atol=1e-2)
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith(f"{quick} uses QuickGELU;") and first.endswith(f"give {normal}")
        assert second.startswith(f"{normal} uses GELU;") and second.endswith(f"give {quick}")
        for name, value in dict(RANK="1", WORLD_SIZE="2").items():      # rank 0 says it
            monkeypatch.setenv(name, value)
        build_frozen(normal)
        assert not capsys.readouterr().err

    @pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning",
                                "ignore::DeprecationWarning")
    def test_openais_torchscript_archive_is_a_teacher(self, quick_gelu, tmp_path):
        """Its weights are in half precision."""
        clip, images, expected = quick_gelu
        traced = torch.jit.trace(clip, (images, torch.ones(2, 8, dtype=torch.long)),
                                 check_trace=False)
        path = str(tmp_path / "ViT.pt")
        traced.half().save(path)
        teacher = build_frozen(f"small-16-quickgelu/{path}")
        assert {p.dtype for p in teacher.parameters()} == {torch.float32}
        assert torch.allclose(pooled(teacher, images), expected, atol=1e-4)

    def test_a_tag_has_quick_gelu_if_its_record_says_so(self, quick_gelu, tmp_path, monkeypatch,
                                                        capsys):
        import open_clip
        clip, images, expected = quick_gelu
        torch.save(clip.state_dict(), tmp_path / "weights.pt")
        for module in (open_clip, open_clip.factory):
            monkeypatch.setattr(module, "get_pretrained_cfg",
                                lambda name, tag: dict(url="", quick_gelu=True))
        monkeypatch.setattr(open_clip.factory, "download_pretrained",
                            lambda *args, **kwargs: str(tmp_path / "weights.pt"))
        teacher = build_frozen("small-16/tag")
        assert torch.allclose(pooled(teacher, images), expected, atol=1e-4)
        assert not capsys.readouterr().err

    @pytest.mark.parametrize("images", (torch.zeros(2, 3, 40, 40, dtype=torch.uint8),
                                        torch.rand(2, 1, 40, 40), torch.rand(2, 4, 40, 40)),
                             ids=("bytes", "gray", "with alpha"))
    def test_images_that_are_not_three_channels_of_floats_are_refused(self, teacher, images):
        with pytest.raises(ValueError, match="zip|uint8"):
            build_frozen(teacher)(images)

    @pytest.mark.parametrize("kind, side", (("clip", 96), ("ours", 48)))
    def test_a_teacher_resizes_images_to_have_the_students_grid(self, small_clips, teacher,
                                                                kind, side):
        ours = build_frozen("small-16/random" if kind == "clip" else teacher, grid=6)
        for size in ((32, 32), (112, 112), (side, 112)):
            images = torch.rand(2, 3, *size)
            assert ours.image_size == side and ours(images).shape == (2, 37, ours.dim)
            resized = F.interpolate(images, (side, side), mode="bicubic", antialias=True)
            assert torch.allclose(ours(images), ours(resized.clamp(0, 1)), atol=1e-5)

    @pytest.mark.parametrize("name, few", (("mobilenetv3_small_050", 4),
                                           ("vit_tiny_patch16_224", 16)))
    def test_a_cpu_sees_few_images_at_a_time_and_other_devices_all(self, monkeypatch, name, few):
        frozen = build_frozen(f"timm/{name}/random", grid=3)
        sizes, tokens = [], type(frozen).tokens
        monkeypatch.setattr(type(frozen), "tokens", lambda self, images: (
            sizes.append(len(images)), tokens(self, images))[1])
        images = torch.rand(19, 3, frozen.image_size, frozen.image_size)
        with torch.no_grad():
            whole = tokens(frozen, model.normalize(images, frozen.mean, frozen.std))
            assert torch.allclose(frozen(images), whole, atol=1e-5)
        assert sizes == [few] * (19 // few) + [3]
        frozen.to("meta")(images.to("meta"))
        assert sizes[-1] == 19

    @pytest.mark.parametrize("kind", ("small-16/random", "timm/vit_tiny_patch16_224/random", "ours",
                                      "experts"))
    def test_every_kind_of_teacher_works_in_every_precision(self, small_clips, tmp_path, kind):
        path = write_checkpoint(tmp_path / "x.pt", experts=3 if kind == "experts" else 0)
        name = kind if "/" in kind else path
        images = torch.rand(2, 3, 32, 32)
        teacher = build_frozen(name, grid=4)
        assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training
        exact = teacher(images)
        if name == path:
            expected, _ = checkpoints.load_encoder(path).eval()(normalized(images))
            assert torch.equal(exact, expected)
            assert torch.equal(build_frozen(path)(images), expected)
        for precision, error in ((torch.bfloat16, 0.03), (torch.float16, 0.003)):
            half = build_frozen(name, grid=4).to(dtype=precision)
            features = half(images)
            assert features.dtype == precision
            assert ((features.float() - exact).norm() / exact.norm()).item() < error
            teacher.tokens = half.tokens = lambda images: images
            assert torch.equal(half(images), teacher(images).to(precision))  # normalized in float32

    @pytest.mark.parametrize("grid", (4, None))
    @pytest.mark.parametrize("name, prefix, has_cls", (
        ("vit_small_patch14_reg4_dinov2", 5, True), ("vit_small_patch16_dinov3", 5, True),
        ("vit_base_patch16_siglip_224", 0, False), ("eva02_tiny_patch14_224", 1, True),
        ("vit_base_patch16_224.mae", 1, True), ("vit_medium_patch16_reg4_gap_256", 4, False)))
    def test_timms_models_give_timms_features_without_registers(self, monkeypatch, name, prefix,
                                                                has_cls, grid):
        import timm
        depth = 3 if grid else 1
        monkeypatch.setattr(timm, "create_model", functools.partial(timm.create_model, depth=depth))
        torch.manual_seed(0)
        theirs = timm.create_model(name, num_classes=0).eval()
        config = timm.data.resolve_model_data_config(theirs)
        side = config["input_size"][1]      # its own, of 224, 256 or 518 pixels
        if grid:
            side = grid * theirs.patch_embed.patch_size[0]
            theirs.set_input_size(img_size=(side, side))
        images = torch.rand(2, 3, side, side)
        with torch.no_grad():
            tokens = theirs.forward_features(TF.normalize(images, config["mean"], config["std"]))
            cls = tokens[:, 0] if has_cls else theirs.forward_head(tokens, pre_logits=True)
        teacher = build_frozen(f"timm/{name}/random", grid)
        assert teacher.image_size == side and teacher.dim == tokens.shape[2]
        ours = teacher(images)
        torch.testing.assert_close(ours[:, 1:], tokens[:, prefix:], rtol=0, atol=1e-5)
        torch.testing.assert_close(ours[:, 0], cls, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("grid", (None, 2))
    @pytest.mark.parametrize("name, channels_last, pools", (
        ("test_resnet", False, True), ("test_convnext", False, True),
        ("swin_tiny_patch4_window7_224", True, True), ("test_mambaout", True, False)))
    def test_maps_of_conv_nets_and_swins_become_patches_row_by_row(self, monkeypatch, name,
                                                                   pools, channels_last, grid):
        """A Swin keeps its windows of 7 x 7 in images of another size."""
        import timm
        if name.startswith("swin"):      # timm has none that is small
            monkeypatch.setattr(timm, "create_model",
                                functools.partial(timm.create_model, depths=(1, 1, 1, 1)))
        torch.manual_seed(0)
        sized = dict(img_size=32 * grid) if grid and name.startswith("swin") else {}
        theirs = timm.create_model(name, num_classes=0, **sized).eval()
        config = timm.data.resolve_model_data_config(theirs)
        side = 32 * grid if grid else config["input_size"][1]
        images = torch.rand(3, 3, side, side)
        with torch.no_grad():
            found = theirs.forward_features(TF.normalize(images, config["mean"], config["std"]))
            cls = (theirs.forward_head(found, pre_logits=True) if pools      # as wide as the map
                   else found.mean((1, 2) if channels_last else (2, 3)))
        teacher = build_frozen(f"timm/{name}/random", grid)
        ours = teacher(images)
        at = range(found.shape[2])
        assert teacher.image_size == side and len(at) == (grid or side // 32)
        patches = torch.stack([found[:, y, x] if channels_last else found[:, :, y, x]
                               for y in at for x in at], 1)
        assert ours.shape[2] == teacher.dim
        torch.testing.assert_close(ours, torch.cat([cls[:, None], patches], 1), rtol=0, atol=1e-5)

    def test_a_conv_net_from_a_folder_of_timms_teaches_a_student(self, stage, tmp_path):
        import timm
        theirs = timm.create_model("test_efficientnet.r160_in1k", num_classes=7)
        timm.models.save_for_hf(theirs, tmp_path / "theirs", safe_serialization=True)
        name = f"timm/local-dir:{tmp_path / 'theirs'}"
        images = torch.rand(2, 3, 128, 128)
        config = timm.data.resolve_model_data_config(theirs)
        with torch.no_grad():
            found = theirs.eval().forward_features(
                TF.normalize(images, config["mean"], config["std"]))
        torch.testing.assert_close(build_frozen(name, 4)(images)[:, 1:], found.flatten(2).mT)
        state, _ = train(stage("pretrain", f"--teacher {name} --max-steps 1"))
        assert state["model"]["head.weight"].shape[0] == theirs.num_features

    def test_a_timm_model_is_pretrained_unless_it_is_random(self, monkeypatch):
        import timm
        create = Mock(side_effect=OSError("no network"))
        monkeypatch.setattr(timm, "create_model", create)
        for name in ("timm/vit_tiny_patch16_224", "timm/vit_tiny_patch16_224/random"):
            with pytest.raises(common.UserError, match=f"^{name}: no network$"):
                build_frozen(name)
        assert [each.kwargs["pretrained"] for each in create.call_args_list] == [True, False]


class TestData:
    def test_a_png_is_a_png_whatever_its_name_and_its_names_bytes(self, tmp_path):
        write_images(tmp_path, "x.JPEG", os.fsdecode(b"\xff.png"))
        for image, _ in data.ImageFiles(str(tmp_path), "no image"):
            assert (image.permute(1, 2, 0).numpy() == PICTURE).all()

    @pytest.mark.parametrize("name, kind", (("x.tiff", np.float32), ("x.png", np.uint16)))
    def test_images_that_do_not_have_8_bits_are_refused(self, tmp_path, name, kind):
        """Nobody knows which float is white, and 16 bits would become white."""
        Image.fromarray(PICTURE[..., 0].astype(kind)).save(tmp_path / name)
        with pytest.raises(common.UserError, match=f"{tmp_path}/{name}: mode"):
            data.read_image(tmp_path / name)

    @pytest.mark.parametrize("kind, mode", (("PNG", "P"), ("JPEG", "CMYK")))
    def test_images_have_pillows_pixels_and_are_upright(self, tmp_path, monkeypatch, kind, mode):
        """Their names, color spaces and orientations do not matter."""
        image = Image.fromarray(PICTURE)
        pictures = {"gray.png": (image.convert("L"), {}), f"{mode}.JPEG": (image.convert(mode), {}),
                    "progressive.jpg": (image, dict(progressive=True))}
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            pictures[f"{orientation}.jpg"] = image, dict(exif=exif)
        expected = {}
        for name, (picture, how) in pictures.items():
            picture.save(tmp_path / name, format=kind, **how)
            upright = ImageOps.exif_transpose(Image.open(tmp_path / name))
            expected[name] = TF.pil_to_tensor(upright.convert("RGB"))
        if kind == "JPEG":
            monkeypatch.setattr(Image, "open", Mock(side_effect=AssertionError))
        for name, pixels in expected.items():
            assert torch.equal(data.read_image(tmp_path / name), pixels), name

    def test_without_labels_all_images_below_a_folder_count(self, tmp_path):
        names = ["b.png", "a/1.jpg", "a/2.JPG", "a/deep/er/0.png", "a-b/0.jpg"]
        write_images(tmp_path / "val", *names, *system_files("", "a/"), "a/notes.txt")
        images = data.open_images(str(tmp_path), "val", 32, labels=False)
        paths = [images.path(i) for i in range(len(images))]
        assert paths == [str(tmp_path / "val" / name) for name in names]
        assert images[1][1] == 0
        write_images(tmp_path, "beside.jpg")
        assert len(data.open_images(str(tmp_path), "val", 32, labels=False)) == 5
        everything = data.open_images(str(tmp_path), "train", 32, labels=False)      # no train/
        assert len(everything) == 6
        one = data.open_images(paths[1], "val", 32, labels=False)
        assert [one.path(i) for i in range(len(one))] == paths[1:2]

    def test_images_have_torchvisions_order_with_and_without_labels(self, photos):
        theirs = torchvision.datasets.ImageFolder(f"{photos}/train").samples
        for labels in (True, False):
            images = data.open_images(photos, "train", 32, labels)
            assert [images.path(i) for i in range(len(images))] == [path for path, _ in theirs]
        classes = data.open_images(photos, "train", 32).labels.tolist()
        assert classes == [label for _, label in theirs]

    @pytest.mark.parametrize("images, links, expected", (
        ("train/a/0.jpg train/b/0.jpg elsewhere/0.jpg elsewhere/more/1.jpg "
         "train/.hidden/0.jpg train/a/.1.jpg",
         {"a/linked": "../../elsewhere", "b/1.jpg": "../../elsewhere/0.jpg",
          "c": "../elsewhere/more", "d.jpg": "../elsewhere"},
         "a/0.jpg a/linked/0.jpg a/linked/more/1.jpg b/0.jpg b/1.jpg c/1.jpg d.jpg/0.jpg "
         "d.jpg/more/1.jpg"),
        ("train/x/0.jpg train/y/0.jpg elsewhere/in/0.jpg",
         {"x/a": ".", "x/b": ".", "x/up": "../..", "x/y": "../y", "y/x": "../x",
          "y/out": "../../elsewhere/in", "../elsewhere/in/out": ".."},
         "x/0.jpg x/y/0.jpg x/y/out/0.jpg y/0.jpg y/out/0.jpg y/x/0.jpg")), ids=("down", "up"))
    @pytest.mark.parametrize("labels", (True, False))
    def test_symlinks_are_followed_but_not_into_a_parent_folder(self, tmp_path, images, links,
                                                                expected, labels):
        """To follow a symlink into a folder above it would never end."""
        write_images(tmp_path, *images.split())
        for link, target in links.items():
            (tmp_path / "train" / link).symlink_to(target)
        found = data.open_images(str(tmp_path), "train", 32, labels)
        assert [os.path.relpath(found.path(i), tmp_path / "train")
                for i in range(len(found))] == expected.split()

    def test_classes_are_those_of_train(self, tmp_path):
        write_images(tmp_path, "train/ant/x.png", "train/bee/x.png", "val/bee/x.png",
                     *system_files("train/", "train/bee/", "val/", "val/bee/"))
        train, val = (data.open_images(str(tmp_path), split, 32) for split in ("train", "val"))
        assert train.classes == val.classes == ["ant", "bee"]
        assert train.labels.tolist() == [0, 1] and val.labels.tolist() == [1]

    @pytest.mark.parametrize("names, split, said", (
        ("train/ant/x.png train/bee/x.png val/ant/x.png val/wasp/x.png", "val",
         "val/wasp is not in {root}/train"),
        ("train/images/ant/x.png train/images/bee/x.png", "train",
         "{root}/train has one folder, images"),
        ("train/ant/x.png train/bee/x.txt", "train", "no image in {root}/train/bee")))
    def test_classes_that_are_always_wrong_or_always_right_are_named(self, tmp_path, names,
                                                                     split, said):
        write_images(tmp_path, *names.split())
        with pytest.raises(common.UserError, match=said.format(root=tmp_path)):
            data.open_images(str(tmp_path), split, 32)
        data.open_images(str(tmp_path), split, 32, labels=False)

    @pytest.mark.parametrize("labels", (True, False))
    @pytest.mark.parametrize("folder", ("val", "val/b/deep"))
    def test_a_folder_that_cannot_be_listed_is_never_empty(self, tmp_path, monkeypatch, labels,
                                                           folder):
        """Without the class b, k-NN would find all others."""
        write_images(tmp_path, *(f"{split}/{name}" for split in ("train", "val")
                                 for name in ("a/0.jpg", "b/0.jpg", "b/deep/1.jpg")))

        def scandir(path, scandir=os.scandir):
            if Path(path) == tmp_path / folder:      # a mode of 000 means nothing to root
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)
        monkeypatch.setattr(os, "scandir", scandir)
        assert len(data.open_images(str(tmp_path), "train", 32, labels)) == 3
        with pytest.raises(common.UserError, match=f"cannot list the folder {tmp_path}/{folder}"):
            data.open_images(str(tmp_path), "val", 32, labels)

    def test_files_left_out_beside_images_are_counted(self, tmp_path, capsys):
        """Once for each set, for all classes together."""
        write_images(tmp_path / "train", "ant/0.jfif", "bee/1.AVIF", "bee/1.gif", "bee/1.HEIC",
                     "ant/x.jpg.1", "ant/x.jpg_large", "ant/labels")
        for labels in (True, False):
            assert len(data.open_images(str(tmp_path), "train", 32, labels)) == 3
            line, = capsys.readouterr().err.splitlines()
            assert line.startswith(f"{tmp_path}/train: ") and ": 4, such as" in line
            assert line.endswith("train/ant/labels")      # an example

    def test_a_folder_without_train_counts_as_a_whole_and_says_so(self, tmp_path, capsys):
        """Its images may be those of val/, and annotations."""
        write_images(tmp_path, "Train/0.png", "val/0.png")
        assert len(data.open_images(str(tmp_path), "train", 32, labels=False)) == 2
        assert "no train/, so all of its 2 images count" in capsys.readouterr().err

    def test_torchvisions_sets_are_in_data_and_have_their_splits(self, tmp_path, monkeypatch):
        made = Mock(return_value=None)
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "__init__", made)
        for split in ("train", "val"):
            data.open_images("cifar10", split, 32)
        assert made.mock_calls == [call("data", part, transform=TF.pil_to_tensor)
                                   for part in (True, False)]
        monkeypatch.chdir(tmp_path)
        kinds = {"train": ["pie/0", "pie/1", "soup/2"], "test": ["soup/3"]}
        write_images(tmp_path / "data/food-101/images",
                     *(f"{name}.jpg" for names in kinds.values() for name in names))
        for split, names in kinds.items():      # of each class, its images
            classes = {kind: [name for name in names if kind in name] for kind in ("pie", "soup")}
            write_text(f"data/food-101/meta/{split}.json", json.dumps(classes))
        train, val = (data.open_images("food101", split, 32) for split in ("train", "val"))
        assert [train[i][1] for i in range(3)] == [0, 0, 1] and val[0][1] == 1
        assert torch.equal(train[0][0], torch.from_numpy(PICTURE).permute(2, 0, 1))
        break_image(tmp_path / "data/food-101/images/pie/0.jpg")
        with pytest.raises(common.UserError, match="food-101/images/pie/0.jpg"):
            train[0]      # so that training takes the next one

    def test_in_training_the_next_image_replaces_a_broken_one(self, photos, tmp_path, capsys):
        folder = shutil.copytree(Path(photos, "train"), tmp_path / "train")
        views = data.TrainViews(data.ImageFiles(str(folder), "no image"), 32, 7, 4, 0.4)
        places = {5: 5, 6: 8, 7: 8, 31: 0}      # two in a row are broken, and the last of all
        broken = [break_image(views.dataset.path(index)) for index in (6, 7, 31)]
        data.print_once.cache_clear()      # an earlier test's file may have had the same path
        for epoch in (0, 1):
            for index, place in places.items():      # what is random does not move with the image
                rng = np.random.default_rng((3, 7, epoch, index))
                expected = views.view(rng, *views.dataset[place])
                torch.testing.assert_close(views[epoch, index], expected, rtol=0, atol=0)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 3 and all(path in line for path, line in zip(broken, lines))

    def test_a_hundred_broken_images_in_a_row_are_an_error(self, capsys):
        class Gone(Shapes):
            def __getitem__(self, index):
                if index in self.there:
                    return super().__getitem__(index)
                raise common.UserError(f"cannot read the image {index}")
        gone = Gone("train", 8)
        gone.there = {50 + 99}
        assert data.first_readable(gone, 50)[0] == 149
        with pytest.raises(common.UserError, match="cannot read the image 148"):
            data.first_readable(gone, 49)
        assert len(capsys.readouterr().err.splitlines()) == 100      # each once
        gone.length, gone.there = 3, {2}
        assert [data.first_readable(gone, i)[0] for i in range(3)] == [2, 2, 2]
        gone.there = {}
        with pytest.raises(common.UserError, match="cannot read the image 0"):
            data.first_readable(gone, 1)      # after all the others

    def test_a_broken_scene_is_replaced_in_training_alone(self, scenes, tmp_path):
        same = Path(shutil.copytree(scenes, tmp_path / "same"))
        for name in ("images/training/{}.jpg", "annotations/training/{}.png"):
            shutil.copy(same / name.format(4), same / name.format(3))
        broken = Path(shutil.copytree(scenes, tmp_path / "broken"))
        break_image(broken / "images/training/3.jpg")
        seen, expected = (segment.TrainScenes(segment.Scenes(str(root), "training"), 32, 11, 7)
                          for root in (broken, same))
        torch.testing.assert_close(seen[1, 3], expected[1, 3], rtol=0, atol=0)
        with pytest.raises(common.UserError, match="cannot read the image"):
            segment.EvalScenes(seen.dataset, 32, 11)[3]

    def test_images_that_another_process_cannot_read_stop_this_one(self, monkeypatch):
        """It would wait for the other process, which has ended."""
        args, process = loading()
        monkeypatch.setattr(process, "sum", lambda broken: broken + 3)
        with pytest.raises(common.UserError, match="3 of 5 images"):
            data.check([None] * 5, args, process)

    @pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc")
    def test_finished_evaluations_keep_no_files_open(self):
        """A run of a hundred evaluations would reach the limit of 1,024 open files."""
        others, open_files = multiprocessing.active_children(), []
        for _ in range(5):
            batches = data.eval_batches(data.CenterViews(Shapes("val", 8), 8), 512,
                                        argparse.Namespace(workers=2), loading()[1])
            assert [len(batch["image"]) for batch in batches] == [512, 512]
            gc.collect()      # a finished worker's files are closed with it, whenever that is
            open_files.append(len(os.listdir("/proc/self/fd")))
        assert open_files[4] - open_files[0] < 4      # workers that are kept have four at a time
        assert set(multiprocessing.active_children()) <= set(others)

    def test_a_program_that_imports_data_keeps_its_children(self, tmp_path):
        """Only workers are killed when it ends."""
        write_text(tmp_path / "host.py", f"""
import multiprocessing, os, sys, time
sys.path.insert(0, {str(HERE)!r})
import data, common
from shapes import Shapes

def write():
    time.sleep(0.5)
    open("written", "w").close()

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    multiprocessing.Process(target=write).start()
    args = common.make_parser("").parse_args(["--workers", "1"])
    batches = data.eval_batches(data.CenterViews(Shapes("val", 8), 8), 8, args,
                                common.Process(args))
    next(batches)
""")
        subprocess.run([sys.executable, "host.py"], cwd=tmp_path, check=True, timeout=100)
        assert (tmp_path / "written").exists()

    @pytest.mark.parametrize("length, fits", ((70, True), (71, False)))
    def test_a_long_temporary_folder_is_refused_for_sockets(self, monkeypatch, length, fits):
        """A socket's name has 108 bytes at most, and loaders would wait for each other for good."""
        monkeypatch.setattr(data.tempfile, "gettempdir", lambda: "/" + "t" * (length - 1))
        monkeypatch.setattr(data, "DataLoader", lambda *args, **kwargs: [{"label": torch.ones(1)}])
        for workers in (0, 1):
            batches = data.load([1, 2], [[0, 1]], loading()[1], workers)
            refused = workers and not fits
            with pytest.raises(common.UserError) if refused else contextlib.nullcontext():
                assert list(batches) == [{"label": torch.ones(1)}]


def beit_mask(rng, grid, count, smallest):
    """BEiT's MaskingGenerator in plain words, with random patches for what it leaves missing."""
    masked = set()
    placed = True
    while placed and len(masked) < count:
        placed = False
        for _ in range(10):
            area = rng.uniform(smallest, count - len(masked))      # also where that is less
            aspect = math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h < grid and w < grid:
                top, left = rng.randint(0, grid - h), rng.randint(0, grid - w)
                block = {(top + y, left + x) for y in range(h) for x in range(w)}
                if 0 < len(block - masked) <= count - len(masked):
                    masked |= block
                    placed = True
                    break
    single = sorted({*np.ndindex(grid, grid)} - masked)
    masked |= set(rng.sample(single, count - len(masked)))
    mask = np.zeros((grid, grid), dtype=bool)
    mask[tuple(zip(*masked))] = True
    return mask


def looks(mask):
    """What a random mask is like: how often the middle, the corners, the edges, pairs of neighbors
    and whole rows and columns are masked, and the share of single patches.
    """
    middle, last = len(mask) // 2, len(mask) - 1
    around = np.pad(mask, 1)
    alone = mask & ~(around[2:, 1:-1] | around[:-2, 1:-1] | around[1:-1, 2:] | around[1:-1, :-2])
    return (mask[middle, middle], mask[::last, ::last].mean(), mask[::last].mean(),
            mask[:, ::last].mean(), (mask[1:] & mask[:-1]).mean(),
            (mask[:, 1:] & mask[:, :-1]).mean(), mask.all(0).any(), mask.all(1).any(),
            alone.sum() / mask.sum())


class TestViews:
    @pytest.mark.parametrize("grid, ratio, smallest", (
        (14, 0.4, 16), (28, 0.1, 16), (7, 0.4, 4), (3, 0.4, 1)))
    def test_block_masks_are_as_beit_draws_them(self, grid, ratio, smallest):
        ours, theirs = np.random.default_rng(0), random.Random(0)
        count = int(ratio * grid ** 2)
        ours = [data.block_mask(ours, grid, ratio).reshape(grid, grid) for _ in range(2000)]
        assert all(mask.sum() == count for mask in ours)
        ours = list(map(looks, ours))
        theirs = [looks(beit_mask(theirs, grid, count, smallest)) for _ in range(2000)]
        error = np.sqrt((np.var(ours, 0) + np.var(theirs, 0)) / 2000)      # of the difference
        assert (abs(np.mean(ours, 0) - np.mean(theirs, 0)) < 4 * error + 1e-9).all()

    def test_a_view_is_a_function_of_seed_epoch_and_index(self, photos):
        views = data.TrainViews(data.ClassFolders(photos, "train"), 32, 42, 14, 0.4)
        image, label = views.dataset[5]
        crop = data.random_crop(np.random.default_rng((3, 42, 1, 5)), *image.shape[1:], (0.2, 1.0))
        bicubic = TF.InterpolationMode.BICUBIC
        image = TF.resized_crop(image, *crop, [32, 32], bicubic, antialias=True)
        assert torch.equal(views[1, 5]["image"], image) and views[1, 5]["label"] == label
        drawn = [views[epoch, index] for epoch, index in np.ndindex(8, 32)]
        assert len({view["mask"].tobytes() for view in drawn}) > 250
        assert 0.4 < np.mean([view["flip"] for view in drawn]) < 0.6
        jitter = np.array([view["jitter"] for view in drawn])
        assert len(np.unique(jitter)) == jitter.size
        assert (abs(jitter.min(0) - 0.6) < 0.02).all() and (abs(jitter.max(0) - 1.4) < 0.02).all()

    def test_crops_are_drawn_as_random_resized_crop_draws_them(self):
        """Their area is uniform, their aspect log-uniform, and they reach all edges."""
        rng = np.random.default_rng(0)
        crops = [data.random_crop(rng, 1000, 1000, (0.1, 0.3), (0.5, 3)) for _ in range(20000)]
        _, _, h, w = np.array(crops).T
        top, left = (np.array(crops)[:, :2] / (1001 - np.stack([h, w], 1))).T
        for values, low, high in ((h * w / 1e6, 0.1, 0.3), (top, 0, 1), (left, 0, 1),
                                  (np.log(w / h), -math.log(2), math.log(3))):
            quantiles = np.quantile((values - low) / (high - low), (0.1, 0.25, 0.5, 0.75, 0.9))
            assert quantiles == pytest.approx([0.1, 0.25, 0.5, 0.75, 0.9], abs=0.02)
        crops = np.array([data.random_crop(rng, 6, 7, (0.2, 1.0)) for _ in range(2000)])
        for size, starts, lengths in ((6, crops[:, 0], crops[:, 2]), (7, crops[:, 1], crops[:, 3])):
            everywhere = {(at, n) for n in range(3, size + 1) for at in range(size - n + 1)}
            assert set(zip(starts.tolist(), lengths.tolist())) >= everywhere

    @pytest.mark.parametrize("height, width, expected", (
        (1, 1, (0, 0, 1, 1)), (20000, 10, (9993, 0, 13, 10)), (10, 20000, (0, 9993, 10, 13)),
        (1, 500, (0, 249, 1, 1))))
    def test_crops_of_very_long_or_small_images_are_their_middle(self, height, width, expected):
        rng = np.random.default_rng(0)
        assert {data.random_crop(rng, height, width, (0.2, 1.0)) for _ in range(50)} == {expected}

    def test_flip_and_color_jitter_are_torchvisions_image_by_image(self):
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
        assert ours.min() == 0 and ours.max() == 1  # each of the first three goes beyond a limit

    @pytest.mark.parametrize("size, shorter", ((224, 256), (112, 128), (32, 37)))
    def test_evaluation_views_are_resized_to_256_and_cropped_to_224(self, size, shorter):
        image = torch.randint(0, 256, (3, 300, 500), dtype=torch.uint8)
        bicubic = TF.InterpolationMode.BICUBIC
        resized = TF.resize(image, shorter, interpolation=bicubic, antialias=True)
        assert torch.equal(data.center_view(image, size), TF.center_crop(resized, size))


class TestShapes:
    def test_drawn_sets_have_names_and_never_change(self):
        """Otherwise, numbers of two versions could not be compared."""
        for name, split, expected in (("shapes", "train", 481.0), ("shapes", "val", 499.4),
                                      ("shapes-noise", "val", 500.0)):
            images = data.open_images(name, split, 48)
            total = sum(images[i][0].float().mean().item() for i in range(4))
            assert total == pytest.approx(expected, rel=1e-3)
        assert Shapes.classes[Shapes("val", 48)[7][1]] == "spotted blue"

    def test_annotations_are_the_objects_in_their_colors(self):
        train = Shapes("train", 48)
        for index in range(20):
            annotation = train.annotation(index)
            assert annotation.unique().tolist() == [1, 2 + index % 10]
            inside = (train[index][0] / 255)[:, annotation > 1]
            vivid = (inside.amax(0) - inside.amin(0)).argmax()
            hue = colorsys.rgb_to_hsv(*inside[:, vivid].tolist())[0]
            name = train.classes[index % 10].split()[1]
            assert abs((hue - Shapes.hues[name] + 0.5) % 1 - 0.5) < 0.04


class TestMachine:
    def test_a_test_that_fails_leaves_no_program_behind(self, tmp_path):
        write_text(tmp_path / "wait.py", "import signal, subprocess\nsignal.pause()")
        program, _ = start(tmp_path / "wait.py")
        end_programs()
        assert not program.is_alive() and not STARTED

    @pytest.mark.parametrize("flag, precision", (
        ("fp16", None), ("off", None), ("bf16", torch.bfloat16)))
    def test_without_cuda_fp16_becomes_float32(self, flag, precision):
        process = common.Process(pretrain.parse_args(["--amp", flag]))
        assert process.amp == precision and process.device.type == "cpu"
        with process.autocast():
            assert (torch.ones(2, 3) @ torch.ones(3, 5)).dtype == (precision or torch.float32)

    @pytest.mark.parametrize("visible, refused", (
        ("0", True), ("1,2", True), ("GPU-8932f937", True), ("MIG-f2c1", True), ("", False),
        ("-1", False), ("NoDevFiles", False)))
    def test_a_job_with_gpus_that_pytorch_cannot_use_does_not_run_on_a_cpu(self, monkeypatch,
                                                                           visible, refused):
        """It would take weeks, and a cluster says nothing."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        expected = pytest.raises(common.UserError, match=f"CUDA_VISIBLE_DEVICES is {visible}")
        with expected if refused else contextlib.nullcontext():
            common.Process(argparse.Namespace(amp="off"))

    @pytest.mark.parametrize("cores, processes, flags, workers", (
        (24, "1", "", 16), (24, "4", "", 6), (2, "4", "", 1), (24, "1", "--workers 40", 40)))
    def test_a_process_has_its_share_of_the_cores_as_workers(self, monkeypatch, cores,
                                                             processes, flags, workers):
        monkeypatch.setattr(os, "cpu_count", lambda: 1000)      # a job has some of a machine's
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert pretrain.parse_args(flags.split()).workers == workers

    def test_each_purpose_has_random_numbers_of_its_own(self):
        """NumPy ignores zeros at the end of a key."""
        drawn = {}
        for key in (("weights", 1), ("weights", 2), ("step", 1, 0, 0), ("step", 1, 1, 0),
                    ("rlw", 1, 0),
                    ("step", 1, 0, 1), ("step", 2, 0, 0), ("order", 1, 0), ("view", 1, 0, 0),
                    ("step", 1, 0, 0)):
            common.seed_torch(*key)
            numbers = torch.rand(()).item(), common.generator(*key).random()
            assert torch.initial_seed() == common.generator(*key).integers(2 ** 63)
            assert drawn.setdefault(key, numbers) == numbers
        assert len(set(np.ravel(list(drawn.values())))) == 18
        shapes = {Shapes(split, 8).stream for split in ("train", "val")}
        assert len(shapes | set(common.STREAMS.values())) == 7

    @pytest.mark.parametrize("flags, world, expected", (
        ("", 1, (16, 312)), ("", 2, (8, 312)), ("", 4, (4, 312)), ("", 8, (2, 312)),
        ("--batch-size 510", 2, (1, 2512)), ("--batch-size 640", 1, (4, 2001)),
        ("--batch-size 514 --micro-batch 1", 2, (257, 2492)), ("--batch-size 320", 1, (2, 4003)),
        ("--batch-size 1024 --micro-batch 8", 2, (64, 1251)),
        ("--batch-size 30 --micro-batch 5", 3, (2, 42705)), ("--batch-size 39", 3, (1, 32850)),
        ("--batch-size 4098 --micro-batch 1", 6, (683, 312)), ("--batch-size 272", 1, (2, 4710)),
        ("--batch-size 8224", 2, (257, 155)), ("--batch-size 257 --micro-batch 1", 1, (257, 4985))))
    def test_any_number_of_processes_has_the_papers_batch_of_4096(self, flags, world, expected):
        """Micro-batches have 256 images at most, all the same number, and few only if asked to."""
        assert data.plan_steps(pretrain.parse_args(flags.split()), world, 1281167) == expected

    @needs_loopback
    @pytest.mark.parametrize("name, flags, said", (
        ("pretrain", "--seed 7", "--seed was 42, is 7"), ("knn", "-k 3", "--k was 20, is 3"),
        ("finetune", "", "class 1 was class_1, is class_1b"),
        ("pretrain", "", "the step of last.pt was 1, is 0")))
    def test_processes_that_do_not_run_the_same_do_not_start(self, stage, photos, tmp_path,
                                                             name, flags, said):
        """Of two machines. Their folders may have other names, and they may have other numbers of
        workers.
        """
        other = Path(shutil.copytree(photos, tmp_path / "other"))
        if "class 1" in said:
            for split in ("train", "val"):
                (other / split / "class_1").rename(other / split / "class_1b")
        elif "last.pt" in said:
            train(stage(name, "--max-steps 1"))
        argv = stage(name, "--workers 1")
        moved = ["--data", str(other), "--out", str(other / "run"), "--workers", "0"]
        for program in start_two(f"{name}.py", argv, [*argv, *flags.split(), *moved]):
            code, _, error = finish(program)
            line = error.strip().splitlines()[-1]
            assert code == 2 and "Traceback" not in error, error
            assert "rank 1" in line and said in line
            assert not re.search("--(data|out|workers) was", line)

    @pytest.mark.parametrize("own, everyone, raised", (
        (PermissionError("no"), ["no", None], PermissionError),
        (None, [None, "no"], common.UserError), (None, [None, None], None)))
    def test_an_error_in_one_process_is_one_in_all(self, monkeypatch, own, everyone, raised):
        """Otherwise, the others would wait two hours for this process."""
        told = []

        def gather(errors, mine):
            told.append(mine)
            errors[:] = everyone
        monkeypatch.setattr(common.dist, "all_gather_object", gather)
        process = loading()[1]
        process.world = 2
        expected = pytest.raises(raised, match="^no$") if raised else contextlib.nullcontext()
        with expected, process.together():
            if own:
                raise own
        assert told == everyone[:1]

    @needs_loopback
    def test_a_full_disk_ends_all_processes_before_the_first_step(self, stage, tmp_path):
        first = """
def save(*args):
    raise OSError(28, "No space left on device")
torch.save = save
"""
        argv = stage("pretrain")
        ends = map(finish, start_two(driver(tmp_path, first=first), argv, argv))
        assert [(code, "No space left on device" in error) for code, _, error in ends] == [
            (1, True), (2, True)]

    def test_a_rank_that_another_job_left_over_means_nothing(self, stage, monkeypatch, capsys):
        """Otherwise, k-NN would print nothing, and leave out a share of the images."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        play_knn = SCRIPTS["knn"].main(SCRIPTS["knn"].parse_args(stage("knn")))
        assert len(play_knn) == 1 and "%" in capsys.readouterr().out

    def test_processes_wait_for_hours_while_rank_0_saves(self, monkeypatch):
        group = Mock()
        monkeypatch.setattr(common.dist, "init_process_group", group)
        for name, value in dict(RANK="0", WORLD_SIZE="2").items():
            monkeypatch.setenv(name, value)
        common.Process(argparse.Namespace(amp="off"))
        assert group.call_args.kwargs["timeout"].total_seconds() >= 3600


class Steps:
    """Updates of two layers, of which `unused` never has a gradient."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.layers = nn.ModuleDict(dict(unused=nn.Linear(2, 3), used=nn.Linear(7, 5)))
        self.optimizer = optim.adamw(self.layers, 0.1, 0.05, (0.9, 0.95))

    def step(self, gradient, clip_grad):
        used = self.layers["used"]
        loss = (used.weight * gradient).sum() + used.bias @ gradient[:, 0]
        self.scaler.scale(loss).backward()
        return optim.optimizer_step(self.optimizer, self.scaler, clip_grad)


class TestOptim:
    def test_the_linear_decay_is_mmcvs(self):
        """The numbers are the rates of the release's segmentation."""
        rates = [optim.learning_rate(step, 160_000, 1500, 8e-5, 0.0, "linear")
                 for step in (0, 1499, 1500, 80_000, 159_999)]
        assert rates == pytest.approx([8e-5 / 1500, 7.92505e-5, 7.925e-5, 4e-5, 5e-10], rel=1e-9)
        assert optim.learning_rate(0, 10, 0, 1.0, 0.0, "linear") == 1

    def test_biases_do_not_decay_and_frozen_weights_are_not_updated(self):
        """The plain loops test all other parameters."""
        student = small_student(nano(experts=2), 7, dense=True, pixels=True)
        student.encoder.norm.weight.requires_grad_(False)
        optimizer = optim.adamw(student, 0.1, 0.05, (0.9, 0.95))
        decays = {p: group["weight_decay"] for group in optimizer.param_groups
                  for p in group["params"]}
        moe = student.encoder.blocks[1].mlp
        assert [decays[p] for p in (moe.w1, moe.w2, moe.router.phi)] == [0.05] * 3
        assert [decays[p] for p in (moe.b1, moe.b2, moe.router.scale)] == [0] * 3
        assert not model.decays("b1", moe.b1) and model.decays("phi", moe.router.phi)      # alone
        assert student.encoder.norm.weight not in decays

    @pytest.mark.parametrize("clip_grad", (0.0, 3.0))
    def test_an_update_is_clipping_and_adamw_of_unscaled_gradients(self, clip_grad):
        ours = Steps(torch.amp.GradScaler("cpu", init_scale=2.0 ** 16))
        layers = copy.deepcopy(ours.layers)
        groups = [dict(params=[p], weight_decay=0.05 * (p.ndim > 1)) for p in layers.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
        for size in (0.1, 1.0, 10.0):      # of norms below and above 3
            gradient = size * torch.randn(5, 7)
            metrics = ours.step(gradient, clip_grad)
            layers["used"].weight.grad, layers["used"].bias.grad = gradient.clone(), gradient[:, 0]
            norm = nn.utils.clip_grad_norm_(layers.parameters(), clip_grad or math.inf)
            optimizer.step()
            assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-5)
            assert metrics["skipped"] == 0
            assert all(p.grad is None for p in ours.layers.parameters())
        torch.testing.assert_close(ours.layers.state_dict(), layers.state_dict())

    @pytest.mark.parametrize("clip_grad", (0.0, 3.0))
    @pytest.mark.parametrize("wrong", (math.nan, math.inf))
    @pytest.mark.parametrize("amp", ("fp16", "bf16", "off"))
    def test_an_update_is_skipped_where_a_gradient_is_not_finite(self, amp, wrong, clip_grad):
        scaler = common.Process(pretrain.parse_args(["--amp", amp])).scaler
        if amp == "fp16":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        steps = Steps(scaler)
        steps.step(torch.randn(5, 7), clip_grad)
        before = copy.deepcopy((steps.layers.state_dict(), steps.optimizer.state_dict()))
        gradient = torch.randn(5, 7)
        gradient[4, 2:] = wrong
        metrics = steps.step(gradient, clip_grad)
        after = steps.layers.state_dict(), steps.optimizer.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert metrics["skipped"] == 1 and not metrics["grad_norm"].isfinite()
        assert scaler.get_scale() == 1 and scaler.get_growth_factor() == (2 if amp == "fp16" else 1)
        assert steps.step(torch.randn(5, 7), clip_grad)["skipped"] == 0
        assert not torch.equal(steps.layers["used"].weight, before[0]["used.weight"])


class TestGPU:
    @pytest.mark.parametrize("sees", (2, 1))
    def test_a_process_takes_the_gpu_of_its_rank_on_its_machine(self, monkeypatch, sees):
        """Some launchers let a process see its own GPU alone."""
        chosen = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: sees)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(common.dist, "is_initialized", lambda: True)
        for name, value in dict(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8").items():
            monkeypatch.setenv(name, value)
        process = common.Process(argparse.Namespace(amp="fp16"))
        assert chosen == [process.device] == [torch.device("cuda", sees - 1)]
        assert process.rank == 5 and process.amp == torch.float16
        assert process.scaler.get_scale() == 2 ** 16 and process.scaler.get_growth_factor() == 2

    @pytest.mark.parametrize("name, flags", (
        ("pretrain", "--recompute --balance rlw"), ("pretrain", "--experts 0 --balance gradnorm"),
        ("pretrain", "--encoding dense --objective token_cls_pixel --importance-weight 1"),
        ("finetune", ""), ("linear", "--augment plain"), ("ep", ""), ("segment", "")))
    def test_a_step_stays_on_its_device_and_the_host_never_waits(self, stage, monkeypatch, name,
                                                                 flags):
        """PyTorch's "meta" device stands in for a GPU. Its tensors have a device and a shape, but
        no values. Code that reads a value raises an error, and so do most operations that mix this
        device with another one. The two steps write no line of the log.
        """
        def process(self, args, init=common.Process.__init__):
            init(self, args)
            self.device = torch.device("meta")

        def end_step(self, step, *args, end=run.Run.end_step):
            end(self, step, *args)
            if step == 1:
                raise common.Stopped(0)
        for owner, attribute, changed in (
                (common.Process, "__init__", process), (run.Run, "end_step", end_step),
                (run.Run, "resume", lambda run: 0), (run.Run, "save", lambda *args: None),
                (data, "plan_steps", lambda *args: (1, 9)), (data, "check", lambda *args: None),
                (torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext()),
                (sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices",
                 lambda: ["meta"])):
            monkeypatch.setattr(owner, attribute, changed)
        steps = spy(monkeypatch, optim, "optimizer_step")
        with pytest.raises(common.Stopped):
            SCRIPTS[name].main(SCRIPTS[name].parse_args(stage(name, flags)))
        assert len(steps) == 2

    @pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="no GPU")
    @pytest.mark.parametrize("flags", ("", "--balance gradnorm", "--balance rlw --recompute"))
    def test_no_step_synchronizes_a_gpu(self, stage, tmp_path, flags):
        """Steps 3, 6 and 7 save nothing and write no line of the log."""
        fault = "torch.cuda.set_sync_debug_mode('error' if step in (3, 6, 7) else 'default')"
        argv = stage("pretrain", f"--amp fp16 {flags}")
        script = driver(tmp_path, fault, log_every=5)
        code, _, error = finish(start(script, *argv, CUDA_VISIBLE_DEVICES="0"))
        assert code == 0, error


class Plain:
    """What plain loops share: order of images, learning rate and AdamW, all written once more."""

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
        self.optimizer = torch.optim.AdamW(groups, betas=betas)
        self.start = {name: p.detach().clone() for name, p in trained.named_parameters()}
        self.rows = []      # of the log, one for each step

    def steps(self, linear=False):
        """Yields (step, share of the step's images, micro-batch) for each micro-batch."""
        args = self.args
        epoch_steps = len(self.images) // args.batch_size
        if "epochs" in args:
            total, warmup = args.epochs * epoch_steps, args.warmup_epochs * epoch_steps
        else:
            total, warmup = args.iterations, args.warmup_iterations
        for step in range(args.max_steps):
            rate = args.lr * (step + 1) / max(warmup, 1)
            way = (step + 1 - warmup) / (total - warmup)
            if linear:
                fall = args.min_lr + (args.lr - args.min_lr) * (1 - step / total)
                rate = min(step + 1, warmup) / warmup * fall
            elif way > 0:
                fall = (1 + math.cos(math.pi * way)) / 2
                rate = args.min_lr + (args.lr - args.min_lr) * fall
            self.rows.append({"lr": rate, "skipped": 0})
            epoch, at = divmod(step, epoch_steps)
            order = np.random.default_rng((2, args.seed, epoch)).permutation(len(self.images))
            order = order[at * args.batch_size:(at + 1) * args.batch_size]
            for rank in range(self.world):
                common.seed_torch("step", args.seed, step, rank)
                parts = order[rank::self.world].reshape(-1, args.micro_batch)
                for part in parts:
                    batch = [self.views[epoch, int(i)] for i in part]
                    batch = torch.utils.data.default_collate(batch)
                    yield step, 1 / len(parts) / self.world, batch
            self.update(rate)

    def add(self, share, **values):
        """Adds this share of values to the step's row of the log."""
        for name, value in values.items():
            self.rows[-1][name] = self.rows[-1].get(name, 0) + share * value.detach().numpy()

    def update(self, rate):
        groups = self.optimizer.param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        self.rows[-1]["grad_norm"] = norm.item()
        if self.args.clip_grad and norm > self.args.clip_grad:
            for gradient in gradients:
                gradient.mul_(self.args.clip_grad / norm)
        for group in groups:
            group["lr"] = rate * group["share"]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def equals(self, state, log):
        """The log of a run, a line for each step, and its model are those of this loop.

        AdamW moves a weight by about the learning rate, also where its gradient is but rounding,
        as that of keys' biases is. So the models' distance is small beside the way from the start.
        """
        log = [line for line in log if "lr" in line]      # without those of evaluations
        assert [line["step"] for line in log] == list(range(1, 1 + len(self.rows)))
        for row, line in zip(self.rows, log):
            for name, value in row.items():
                assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        ends = self.trained.state_dict()
        assert ends.keys() == state["model"].keys()
        distance, way = (math.sqrt(sum((ends[name] - other[name]).double().square().sum()
                                       for name in self.start))
                         for other in (state["model"], self.start))
        assert distance < 0.03 * way


def plain_pretraining(args, world=1):
    """What pretrain.main should do, one forward pass after another -> the loop"""
    grid = args.image_size // args.patch_size
    objectives = args.objective.split("_")
    images = data.open_images(args.data, "train", args.image_size)
    views = data.TrainViews(images, args.image_size, args.seed, grid, args.mask_ratio)
    teacher = checkpoints.load_encoder(args.teacher, grid=grid).eval()
    common.seed_torch("weights", args.seed)
    encoder = model.build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                              experts=args.experts, moe_blocks=args.moe_blocks,
                              drop_path=args.drop_path)
    student = model.Explore(encoder, teacher.dim, args.encoding == "dense",
                            "pixel" in objectives, SMALL_DECODER)
    plain = Plain(args, student, images, views, betas=(0.9, 0.95), world=world)
    fixed = dict(token=1.0, cls=args.cls_weight, pixel=args.pixel_weight)
    weights = torch.tensor([fixed[name] for name in objectives])
    if args.balance == "gradnorm":
        weights = torch.ones(len(objectives))
    lambdas = torch.tensor((args.entropy_weight + 9 * args.entropy_weight[-1:])[:args.experts])
    plain.first = None      # losses
    seen = []               # of each micro-batch of a step: losses, and their gradients
    last = 0
    for step, share, batch in plain.steps():
        if args.balance == "rlw":
            normals = np.random.default_rng((6, args.seed, step)).standard_normal(len(objectives))
            weights = torch.from_numpy(np.exp(normals) / np.exp(normals).sum()).float()
        if args.balance == "gradnorm" and step > last:
            values, gradients = (torch.stack(x).mean(0) for x in zip(*seen))
            plain.first = values if plain.first is None else plain.first
            norms = gradients.norm(dim=1)
            rate = values / plain.first
            goal = (weights * norms).mean() * (rate / rate.mean()) ** args.gradnorm_alpha
            slope = torch.sign(weights * norms - goal) * norms
            weights = (weights - args.gradnorm_lr * slope).clamp_min(1e-3)
            weights = weights / weights.sum() * len(objectives)
            seen, last = [], step
        images = data.augment(batch)
        with torch.no_grad():
            targets, _ = teacher(normalized(images))
        pred = student(normalized(images), batch["mask"], visible(batch["mask"]))
        values, regularizer, metrics = losses.explore_losses(
            pred, targets, images, batch["mask"], objectives=objectives, lambdas=lambdas,
            loss_block=args.loss_block, loss_weights=args.loss_weights, detach=args.detach,
            entropy_on=args.entropy_on, importance_weight=args.importance_weight)
        if args.balance == "gradnorm":
            gradients = [torch.cat(torch.autograd.grad(x, encoder.norm.parameters(),
                                                       retain_graph=True)) for x in values]
            seen.append((values.detach(), torch.stack(gradients)))
        loss = (weights * values).sum() + regularizer
        plain.add(share, loss=loss, objective_weights=weights, **metrics)
        (share * loss).backward()
    return plain


# flags that differ from their defaults, so that a run that ignores one of them is noticed
ODD = ("--batch-size 12 --micro-batch 4 --max-steps 4 --epochs 3 --warmup-epochs 1 --lr 0.01 "
       "--min-lr 0.002 --weight-decay 0.5 --clip-grad 0.5 --drop-path 0.4 --seed 7 --experts 3 ")


def layerwise(depth, decay):
    """The rate of each parameter by its layer: embeddings, `depth` blocks, then the rest."""
    def rate(name):
        if block := re.search(r"encoder\.blocks\.(\d+)\.", name):
            return decay ** (depth - int(block[1]))
        embeddings = ("encoder.patch_embed", "encoder.pos_embed", "encoder.cls_token")
        return decay ** (depth + 1) if name.startswith(embeddings) else 1
    return rate


def set_drop_path(encoder, p):
    """Gives an encoder the rates of drop path that a stage gives it."""
    for i, block in enumerate(encoder.blocks[1:], start=1):
        block.drop_path = model.DropPath(p * i / (len(encoder.blocks) - 1))


def plain_supervised(name, args, world=1):
    """finetune.main and linprobe.main -> (the loop, what is trained, images -> logits)"""
    probe = name in ("linear", "ep")
    strong = args.augment == "strong"
    file = args.encoder if probe else args.checkpoint
    size = 32 if probe else args.image_size or 32
    images = data.open_images(args.data, "train", size)
    views = data.TrainViews(images, size, args.seed)
    if strong:
        views = supervised.StrongViews(images, size, args.seed, erase=not probe)
    encoder = checkpoints.load_encoder(file, size // 8) if file else None
    common.seed_torch("weights", args.seed)
    if not probe:
        encoder = (checkpoints.load_encoder(file, size // 8) if file else
                   model.build_vit(args.model, image_size=size, patch_size=args.patch_size))
        set_drop_path(encoder, args.drop_path)
        frozen = {"fr": ("router.phi", "router.scale"), "fa": (".attn.",), "exd": (), "none": ()}
        for recipe, (key, p) in itertools.product(args.recipe, encoder.named_parameters()):
            p.requires_grad_(p.requires_grad and not any(part in key for part in frozen[recipe]))
        for i in encoder.moe_blocks if "exd" in args.recipe else ():
            encoder.blocks[i].mlp.dropout = args.expert_dropout
    if name == "ep":
        head = linprobe.EfficientProbe(96, 4)
    else:
        head = nn.Linear(96, 4)
        nn.init.trunc_normal_(head.weight, std=0.02 if probe else 0.001 * 0.02)
        nn.init.zeros_(head.bias)
    trained = nn.ModuleDict(dict(head=head) if probe else dict(encoder=encoder, head=head))
    rates = layerwise(4, 1 if probe else vars(args)["layer_decay"] or (0.65 if file else 1))

    def classify(pixels):
        with torch.set_grad_enabled(not probe):
            tokens, _ = encoder(normalized(pixels))
        if name == "ep":
            return head(tokens)
        return head(tokens[:, 1:].mean(1) if args.pool == "mean" else tokens[:, 0])
    plain = Plain(args, trained, images, views, rates, world=world)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=4),
                           v2.CutMix(alpha=1.0, num_classes=4)])
    for _, share, batch in plain.steps():
        pixels, target = data.augment(batch), F.one_hot(batch["label"], 4).float()
        if strong:
            pixels, target = mix(pixels, batch["label"])
            target = 0.9 * target + 0.1 / 4
        loss = -(target * classify(pixels).log_softmax(1)).sum(1).mean()
        plain.add(share, loss=loss)
        (share * loss).backward()
    return plain, trained, classify


def check_top1(args, state, log, trained, classify):
    """The last evaluation is of the model that was saved, on all images of val/."""
    trained.load_state_dict(state["model"])      # or rounding would decide between near equals
    trained.eval()
    size = getattr(args, "image_size", None) or 32
    hits = [classify(data.center_view(image, size)[None] / 255).argmax().item() == label
            for image, label in data.open_images(args.data, "val", size)]
    assert log[-1]["top1"] == pytest.approx(100 * np.mean(hits))


# an epoch is a step, so the log has a line for each step
ODD_SUPERVISED = ("--batch-size 32 --micro-batch 8 --max-steps 3 --epochs 4 --warmup-epochs 1 "
                  "--lr 0.02 --min-lr 0.002 --weight-decay 0.5 --clip-grad 0.5 --seed 7 "
                  "--save-every 1 ")


def plain_segmenter(args):
    """-> (what is trained, images -> UperNet's logits, of patch tokens before the final norm)"""
    common.seed_torch("weights", args.seed)
    encoder = checkpoints.load_encoder(args.checkpoint, args.crop_size // 8)
    set_drop_path(encoder, args.drop_path)
    trained = nn.ModuleDict(dict(encoder=encoder,
                                 decoder=segment.UperNet(96, args.classes, args.width)))

    def predict(pixels):
        x = encoder.embed(normalized(pixels))
        maps = []
        for block in encoder.blocks:      # of four, all have features
            x, _ = block(x)
            maps.append(x[:, 1:].mT.unflatten(2, (encoder.grid, encoder.grid)))
        return trained["decoder"](maps)
    return trained, predict


@torch.no_grad()
def plain_scores(args, state, trained, predict):
    """The scores of the model in `state`, with a loop over the windows and one over the classes"""
    trained.load_state_dict(state["model"])      # or rounding would decide between near equals
    trained.eval()
    val, crop, classes = segment.Scenes(args.data, "validation"), args.crop_size, args.classes
    hits, union, true = np.zeros((3, classes))
    stride = round(crop * 341 / 512)
    for i in range(len(val)):
        image = TF.resize(val[i][0], crop, antialias=True)[None] / 255
        truth = val.annotation(i)
        total = torch.zeros(2, classes, *image.shape[2:])
        starts = ({min(at, side - crop) for at in range(0, side, stride)}
                  for side in image.shape[2:])
        for top, left in itertools.product(*starts):
            logits, _ = predict(image[:, :, top:top + crop, left:left + crop])
            logits = F.interpolate(logits, (crop, crop), mode="bilinear")[0]
            window = torch.stack([logits, torch.ones_like(logits)])
            total[:, :, top:top + crop, left:left + crop] += window
        mean = (total[0] / total[1])[None]
        found = F.interpolate(mean, truth.shape, mode="bilinear")[0].argmax(0) + 1
        for c in range(classes):
            hits[c] += ((found == c + 1) & (truth == c + 1)).sum()
            union[c] += ((truth > 0) & ((found == c + 1) | (truth == c + 1))).sum()
            true[c] += (truth == c + 1).sum()
    return {"miou": 100 * np.mean(hits[union > 0] / union[union > 0]),
            "mean_accuracy": 100 * np.mean(hits[true > 0] / true[true > 0]),
            "pixel_accuracy": 100 * hits.sum() / true.sum()}


ODD_SEGMENT = ("--max-steps 3 --iterations 6 --warmup-iterations 2 --lr 0.003 --min-lr 0.0003 "
               "--seed 7 --weight-decay 0.5 --clip-grad 0.5 --batch-size 8 --micro-batch 4 "
               "--save-every 1 --drop-path 0.4 --layer-decay 0.6 --crop-size 40 "
               "--recipe fr exd --expert-dropout 0")


class TestPlainLoops:
    @pytest.mark.parametrize("flags", (
        "--mask-ratio 0.6 --cls-weight 0.3 --entropy-weight 0.2 --moe-blocks 0 2 3 --loss-block 2 "
        "--recompute",
        "--encoding dense --objective token_cls_pixel --pixel-weight 0.3 --entropy-weight 0.3 0.1 "
        "--importance-weight 2 --loss-weights combine",
        "--objective token_pixel --detach --loss-block 1 3 --entropy-on combine --balance rlw",
        "--encoding dense --objective token_pixel --balance gradnorm --gradnorm-alpha 0.5 "
        "--gradnorm-lr 0.3",
        "--experts 0 --objective token --drop-path 0.1 --clip-grad 0",
        "--loss-weights uniform --image-size 48 --warmup-epochs 0 --amp fp16"))
    def test_pretraining_equals_a_plain_loop(self, stage, monkeypatch, flags):
        monkeypatch.setattr(run, "LOG_EVERY", 1)
        recomputed = spy(monkeypatch, torch.utils.checkpoint, "checkpoint")
        argv = stage("pretrain", ODD + flags)
        state, log = train(argv)
        assert bool(recomputed) == ("recompute" in flags)
        plain_pretraining(pretrain.parse_args(argv)).equals(state, log)

    @needs_loopback
    def test_pretraining_in_two_processes_equals_a_plain_loop(self, stage, tmp_path):
        argv = stage("pretrain", ODD + "--micro-batch 2 --balance gradnorm --gradnorm-lr 0.3")
        out = run_two(driver(tmp_path, first=SAY_SYNC), *argv)
        assert exchanges(out) == ["kept", "kept", "exchanged"] * 4 * 2
        plain = plain_pretraining(pretrain.parse_args(argv), world=2)
        state, log = read_run(tmp_path / "run")
        plain.equals(state, log)
        assert torch.allclose(state["balance"]["initial"], plain.first)

    @pytest.mark.parametrize("name, flags", (
        ("finetune", "--recipe fr exd --expert-dropout 0.3 --layer-decay 0.4 --drop-path 0.4 "
                     "--image-size 48"),
        ("finetune", "--recipe fa --drop-path 0.4 --pool mean --augment plain "
                     "--clip-grad 0"),
        ("scratch", "--model vit_nano --image-size 32 --patch-size 8 --recipe none "
                    "--drop-path 0.4"),
        ("linear", ""), ("linear", "--pool mean --augment plain"), ("ep", "--augment plain")))
    def test_supervised_stages_equal_a_plain_loop(self, stage, name, flags):
        scratch = name == "scratch"
        script = "finetune" if scratch else name
        argv = stage(script, ODD_SUPERVISED + flags)[scratch:]      # without the checkpoint
        scores, state, log = play(script, argv)
        args = SCRIPTS[script].parse_args(argv)
        plain, trained, classify = plain_supervised(script, args)
        plain.equals(state, log)
        check_top1(args, state, log, trained, classify)
        assert scores["top1"] == max(line["top1"] for line in log if "top1" in line)
        if name in ("linear", "ep"):      # whose checkpoint holds the head, and names the encoder
            assert state["encoder"] == args.encoder

    @needs_loopback
    def test_finetuning_in_two_processes_equals_a_plain_loop(self, stage, tmp_path):
        argv = stage("finetune", f"{ODD_SUPERVISED} --recipe none --drop-path 0.4 "
                     "--layer-decay 0.5 --augment plain")
        out = run_two(driver(tmp_path, first=SAY_SYNC, stage="finetune"), *argv)
        assert exchanges(out) == ["kept", "exchanged"] * 3 * 2
        args = finetune.parse_args(argv)
        plain, trained, classify = plain_supervised("finetune", args, world=2)
        plain.equals(*read_run(tmp_path / "run"))
        check_top1(args, *read_run(tmp_path / "run"), trained, classify)

    def test_segmentation_equals_a_plain_loop(self, stage):
        argv = stage("segment", ODD_SEGMENT)
        _, state, log = play("segment", argv)
        args = segment.parse_args(argv)
        trained, predict = plain_segmenter(args)
        for key, p in trained.named_parameters():
            p.requires_grad_("mlp.router." not in key and not key.startswith("encoder.norm"))
        scenes = segment.Scenes(args.data, "training")
        views = segment.TrainScenes(scenes, 40, 11, args.seed)
        plain = Plain(args, trained, scenes, views, layerwise(4, args.layer_decay))
        for _, share, batch in plain.steps(linear=True):
            truth = batch["annotation"].long()
            loss = torch.zeros(())
            for part, logits in zip((1.0, 0.4), predict(batch["image"] / 255)):
                logits = F.interpolate(logits, (40, 40), mode="bilinear").log_softmax(1)
                named = logits.gather(1, (truth - 1).clamp_min(0)[:, None])[:, 0]
                loss = loss - part * (named * (truth > 0)).sum() / truth.numel()  # of all pixels
            plain.add(share, loss=loss)
            (share * loss).backward()
        plain.equals(state, log)
        miou = plain_scores(args, state, trained, predict)["miou"]
        assert log[-1]["miou"] == pytest.approx(miou, rel=1e-5)

    @pytest.mark.parametrize("name", ("pretrain", "finetune", "linear", "ep", "segment", "knn",
                                      "analyze"))
    def test_every_stage_computes_in_the_precision_of_amp(self, stage, monkeypatch, name):
        """The teacher and evaluations, too"""
        calls = spy(monkeypatch, F, "scaled_dot_product_attention")
        flags = "--save-every 4 --max-steps 4 " if name == "segment" else "--max-steps 8 "
        if name in ("knn", "analyze"):
            flags = ""
        argv = stage("knn" if name == "analyze" else name, flags + "--amp bf16")
        SCRIPTS[name].main(SCRIPTS[name].parse_args(argv))
        assert {call.args[0].dtype for call in calls} == {torch.bfloat16}

    @needs_loopback
    def test_two_processes_evaluate_the_segmenter_that_is_saved(self, stage, tmp_path):
        """Without an exchange, their statistics of batch normalization would differ."""
        argv = stage("segment", f"{ODD_SEGMENT} --lr 0.01 --micro-batch 2")
        run_two("segment.py", *argv)
        state, log = read_run(tmp_path / "run")
        args = segment.parse_args(argv)
        scores = plain_scores(args, state, *plain_segmenter(args))
        assert scores["miou"] > 1 and scores["mean_accuracy"] < 90
        assert {name: log[-1][name] for name in scores} == pytest.approx(scores, rel=1e-5)


class TestResume:
    @pytest.mark.parametrize("name, flags, number", (
        ("pretrain", "--balance gradnorm --gradnorm-lr 0.2 --drop-path 0.2 --micro-batch 4",
         signal.SIGUSR1),
        ("pretrain", "--balance rlw", signal.SIGTERM), ("finetune", "", signal.SIGTERM),
        ("ep", "", signal.SIGINT), ("segment", "", signal.SIGUSR1)), ids=str)
    def test_a_run_stopped_by_a_signal_equals_one_never_stopped(self, stage, monkeypatch, name,
                                                                flags, number, capsys):
        """It stops in the middle of an epoch, and resumes to the bit."""
        _, whole, _ = play(name, stage(name, flags, out="whole"))
        argv = stage(name, flags, out="parts")
        monkeypatch.setattr(run, "LOG_EVERY", 3)
        monkeypatch.setattr(segment, "CPU_LOG_EVERY", 3)
        with monkeypatch.context() as patch:
            at_step(patch, 1, lambda: signal.raise_signal(number))
            assert play(name, argv)[1]["step"] == 3
        assert f"stopped by {number.name}" in capsys.readouterr().out
        play(name, [*argv, "--max-steps", "5", "--workers", "1"])
        _, parts, log = play(name, argv)
        assert parts["step"] == log[-1]["step"] == 8
        for part in whole.keys() & {"model", "optimizer", "scaler", "balance"}:
            torch.testing.assert_close(whole[part], parts[part], rtol=0, atol=0)

    @pytest.mark.parametrize("encoding", ("sparse", "dense"))
    def test_two_threads_add_gradients_in_the_same_order(self, encoding):
        """Otherwise, a run that resumes would differ from one that never stopped."""
        student = small_student(nano(image_size=64, patch_size=4, experts=2, depth=2), 60,
                                dense=encoding == "dense", pixels=True)
        images, targets = torch.rand(8, 3, 64, 64), torch.randn(8, 257, 60)
        mask = torch.stack([torch.randperm(256) < 102 for _ in range(8)])
        gradients = []
        torch.set_num_threads(2)
        try:
            for _ in range(3):
                student.zero_grad()
                values, regularizer, _ = losses.explore_losses(
                    student(images, mask, visible(mask)), targets, images, mask, objectives=ALL)
                (values.sum() + regularizer).backward()
                gradients.append([p.grad.clone() for p in student.parameters()
                                  if p.grad is not None])
        finally:
            torch.set_num_threads(1)
        for other in gradients[1:]:
            torch.testing.assert_close(other, gradients[0], rtol=0, atol=0)

    def test_a_complete_run_stays_as_it_is(self, stage, monkeypatch, tmp_path, capsys):
        """A signal in its last step, too, leaves nothing to resume: slurm.sh would requeue it."""
        argv = stage("pretrain", "--max-steps 9")      # it has eight
        at_step(monkeypatch, 7, lambda: signal.raise_signal(signal.SIGUSR1))
        assert train(argv)[0]["step"] == 8
        assert "stopped by" not in capsys.readouterr().out
        written = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        assert written.keys() == {"args.json", "epoch_0000.pt", "epoch_0002.pt", "last.pt",
                                  "log.jsonl"}
        monkeypatch.setattr(run, "find_origin", lambda: {"torch": "9.9"})
        train(argv)
        assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == written

    @pytest.mark.parametrize("at", (1, 2, 3, 4))
    def test_a_kill_while_a_checkpoint_is_written_loses_no_other(self, stage, monkeypatch,
                                                                 tmp_path, at):
        """The kill cuts off last.pt, epoch_0000.pt, epoch_0001.pt or last.pt."""
        argv, names = stage("pretrain", "--save-every 1"), []

        def killed(state, file, save=torch.save):
            names.append(Path(file.name).name.split(".")[0])
            save(state, file)
            if len(names) == at:
                file.truncate(1000)
                raise KeyboardInterrupt
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(torch, "save", killed)
            train(argv)
        assert names == ["last", "epoch_0000", "epoch_0001", "last"][:at]
        assert at < 2 or checkpoints.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 0
        train(argv)
        files = sorted((tmp_path / "run").glob("*.pt"))
        assert [checkpoints.load_checkpoint(path)["step"] for path in files] == [0, 4, 8, 8]
        assert not list((tmp_path / "run").glob("*.tmp"))

    def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(self, stage, monkeypatch):
        calls = []
        fsync, replace = os.fsync, Path.replace
        monkeypatch.setattr(os, "fsync", lambda *args: (calls.append("fsync"), fsync(*args)))
        monkeypatch.setattr(Path, "replace", lambda *args: (
            calls.append("replace"), replace(*args)))
        train(stage("pretrain", "--max-steps 1"))
        assert calls == ["fsync", "replace"] * 3

    def test_an_evaluation_is_kept_before_last_says_it_is_done(self, stage, monkeypatch):
        """Otherwise, a kill between the two files would lose the evaluation."""
        calls, save, write = [], run.Run.save, run.Run.write_line
        monkeypatch.setattr(run.Run, "save", lambda run, name, *parts: (
            calls.append(name), save(run, name, *parts)))
        monkeypatch.setattr(run.Run, "write_line", lambda *args: (
            calls.append("log"), write(*args)))
        play("finetune", stage("finetune"))
        assert calls[-5:] == ["log", "last.pt", "best.pt", "log", "last.pt"]

    @pytest.mark.parametrize("name, every, done", (
        ("finetune", 1, 4), ("segment", 8, 8)))
    def test_what_ends_an_evaluation_costs_no_training(self, stage, photos, scenes, tmp_path,
                                                       monkeypatch, capsys, name, every, done):
        """The same command evaluates again, also after the last step."""
        root = Path(shutil.copytree(photos if name == "finetune" else scenes, tmp_path / "data"))
        image = root / ("val/class_1/0.jpg" if name == "finetune" else "images/validation/1.jpg")
        whole = image.read_bytes()
        flags = f"--save-every {every} --data {root}"
        _, expected, log = play(name, stage(name, flags, out="whole"))
        argv = stage(name, flags)
        with monkeypatch.context() as patch:
            at_step(patch, 1, lambda: break_image(image))
            assert str(image) in refusal(capsys, name, *argv)
        stopped, _ = read_run(tmp_path / "run")
        assert stopped["step"] == done and stopped["evaluation_due"]
        image.write_bytes(whole)

        def without_speed(lines):
            return [{field: value for field, value in line.items()
                     if field not in ("images_per_second", "loader_wait")} for line in lines]
        for _ in range(2):
            _, state, lines = play(name, argv)
            assert without_speed(lines) == without_speed(log)
            assert state["best"] == expected["best"] and not state["evaluation_due"]
            assert_same_bits(state, expected)

    @pytest.mark.parametrize("workers", (0, 2))
    def test_all_broken_images_of_val_are_named_before_the_first_step(
            self, stage, photos, tmp_path, capfd, workers):
        """Each would end an evaluation, one after the other, hours later."""
        root = Path(shutil.copytree(photos, tmp_path / "photos"))
        broken = [break_image(root / "val" / name) for name in ("class_0/1.jpg", "class_3/3.jpg")]
        argv = stage("finetune", f"--data {root} --workers {workers}")
        data.print_once.cache_clear()
        with pytest.raises(common.UserError, match="2 of 16 images .* put others in their place"):
            play("finetune", argv)
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 2
        assert all(any(str(path) in line for line in lines) for path in broken)
        assert not (tmp_path / "run").exists()

    def test_scores_that_a_full_disk_does_not_take_are_printed(self, stage, monkeypatch, capsys):
        """They may have taken an hour."""
        def full(run, name, *parts, save=run.Run.save):
            if name == "best.pt":
                raise OSError(28, "No space left on device")
            save(run, name, *parts)
        monkeypatch.setattr(run.Run, "save", full)
        with pytest.raises(OSError, match="No space left"):
            play("finetune", stage("finetune"))
        assert re.search("step 8 of 8: top1 .*%, top5 .*%", capsys.readouterr().out)

    def test_kept_checkpoints_hold_the_model_and_what_rebuilds_it(self, stage, tmp_path):
        train(stage("pretrain", "--save-every 1 --max-steps 3"))  # no epoch, so it keeps nothing
        train(stage("pretrain", "--save-every 1"))
        for epoch in (0, 1, 2):
            kept = checkpoints.load_checkpoint(tmp_path / "run" / f"epoch_000{epoch}.pt")
            assert kept["args"]["experts"] == 2
            assert (kept["step"], kept["epoch"]) == (4 * epoch, epoch)
            assert "optimizer" not in kept and checkpoints.load_encoder(kept).moe_blocks == [1, 3]

    def test_the_best_checkpoint_has_the_highest_score_of_all_starts(self, stage, monkeypatch,
                                                                     tmp_path):
        scores = iter([(0.0, 0.0), (50.0, 90.0), (80.0, 85.0), (60.0, 99.0), (80.0, 99.0)])
        monkeypatch.setattr(supervised, "accuracy",
                            lambda *args: dict(zip(("top1", "top5"), next(scores))))
        argv = stage("finetune", "--epochs 5 --save-every 1")
        assert play("finetune", [*argv, "--max-steps", "4"])[0] == {"top1": 0.0, "top5": 0.0}
        play("finetune", [*argv, "--max-steps", "12"])
        best, state, log = play("finetune", argv)
        assert best == state["best"] == {"top1": 80.0, "top5": 85.0}
        assert [line["top1"] for line in log if "top1" in line] == [0.0, 50.0, 80.0, 60.0, 80.0]
        best = checkpoints.load_checkpoint(tmp_path / "run" / "best.pt")
        assert best["step"] == 12      # the first
        assert best["classes"] == [f"class_{i}" for i in range(4)]  # the names of its predictions

    def test_other_flags_images_or_stages_are_another_run(self, capsys, stage, photos, tmp_path):
        argv = stage("pretrain")
        before, _ = train([*argv, "--max-steps", "1"])
        for name, value in (("epochs", "3"), ("lr", "0.1"), ("seed", "7"), ("batch-size", "4"),
                            ("weight-decay", "0.1"), ("detach", None), ("entropy-weight", "5 1")):
            flags = [f"--{name}", *(value or "").split()]
            error = refusal(capsys, "pretrain", *argv, *flags)
            assert re.findall(r"--(\S+) was", error) == [name]
        fewer = shutil.copytree(photos, tmp_path / "fewer")
        (fewer / "train" / "class_1" / "0.jpg").unlink()
        error = refusal(capsys, "pretrain", *argv, "--data", str(fewer))
        assert "the number of images was 32, is 31" in error
        error = refusal(capsys, "finetune", *stage("finetune"))
        assert "--stage was pretrain, is finetune" in error
        assert_same_bits(before, checkpoints.load_checkpoint(tmp_path / "run" / "last.pt"))
        drawn = stage("pretrain", "--data shapes --max-steps 1", out="drawn")
        train(drawn)
        error = refusal(capsys, "pretrain", *drawn, "--data", "shapes-noise")
        assert error.endswith("--data was shapes, is shapes-noise")
        tuned = stage("finetune", "--max-steps 1", out="tuned")
        play("finetune", tuned)
        for split in ("train", "val"):      # would change the meaning of all labels
            shutil.copytree(Path(photos, split), tmp_path / "named" / split)
            (tmp_path / "named" / split / "class_0").rename(tmp_path / "named" / split / "z")
        error = refusal(capsys, "finetune", *tuned, "--data", str(tmp_path / "named"))
        assert "class 0 was class_0, is class_1" in error

    @pytest.mark.parametrize("name", ("pretrain", "linear", "finetune", "segment"))
    def test_pretrained_weights_written_anew_are_another_run(self, capsys, stage, teacher,
                                                             encoder, tmp_path, name):
        """The same command may find another teacher in the same folder."""
        path = Path(shutil.copy(teacher if name == "pretrain" else encoder, tmp_path / "x.pt"))
        argv = [str(path) if each in (teacher, encoder) else each for each in stage(name)]
        play(name, argv)
        state = torch.load(path)
        write_checkpoint(path, experts=2)
        assert "the digest of the pretrained weights was" in refusal(capsys, name, *argv)
        torch.save(state, path)
        play(name, argv)      # the same weights in another file

    def test_flags_for_where_how_fast_and_how_long_may_change(self, stage, photos, monkeypatch,
                                                              capsys, tmp_path):
        train(stage("pretrain", "--max-steps 1"))
        assert "--data was" not in capsys.readouterr().err
        (tmp_path / "run").rename(tmp_path / "moved")
        calls = spy(monkeypatch, pretrain, "explore_losses")
        loaders = spy(monkeypatch, data, "DataLoader")
        copy = shutil.copytree(photos, tmp_path / "copy")
        flags = (f"--data {copy} --amp bf16 --micro-batch 4 --recompute --no-compile --workers 1 "
                 "--save-every 1 --max-steps 2")
        assert train(stage("pretrain", flags, out="moved"))[0]["step"] == 2
        # another fold of as many images would have this run's scores
        assert f"--data was {photos}, is {copy}" in capsys.readouterr().err
        assert loaders[-1].kwargs["num_workers"] == 1
        changed = set(re.findall(r"--(\S+)", flags)) - {"no-compile"} | {"out", "compile"}
        assert {name.replace("_", "-") for name in run.FREE_FLAGS} == changed
        pred, targets = calls[-1].args[:2]
        assert pred.tokens.dtype == targets.dtype == torch.bfloat16

    @pytest.mark.parametrize("amp, scale", (("off", 1024.0), ("bf16", 1.0)))
    def test_the_loss_scale_goes_on_but_not_in_another_precision(self, stage, tmp_path, amp, scale):
        state, _ = train(stage("pretrain", "--max-steps 1"))      # --amp off
        state["scaler"]["scale"] = 1024.0
        torch.save(state, tmp_path / "run" / "last.pt")
        state, _ = train(stage("pretrain", f"--max-steps 2 --amp {amp}"))
        assert state["scaler"]["scale"] == scale

    def test_a_run_resumes_from_a_disk_without_mmap(self, stage, monkeypatch):
        _, whole, _ = play("finetune", stage("finetune", out="whole"))
        argv = stage("finetune")
        play("finetune", [*argv, "--max-steps", "3"])
        mmap = Mock(side_effect=RuntimeError("unable to mmap 9 bytes: No such device (19)"))
        monkeypatch.setattr(torch.UntypedStorage, "from_file", mmap)
        assert_same_bits(play("finetune", argv)[1], whole)
        assert mmap.called

    def test_a_run_of_another_version_resumes(self, stage, tmp_path, capsys):
        """An earlier version has fewer flags and facts, and a later one more."""
        argv = stage("finetune")
        _, state, _ = play("finetune", [*argv, "--max-steps", "3"])
        for name in ("val_images", "classes", "weights", "evaluation_due"):
            del state[name]
        del state["args"]["clip_grad"]
        state["args"]["ema"] = 0.9
        torch.save(state, tmp_path / "run" / "last.pt")
        assert "--lr was" in refusal(capsys, "finetune", *argv, "--lr", "0.1")
        assert play("finetune", argv)[1]["step"] == 8


class TestSignals:
    @pytest.mark.parametrize("number", STOP_SIGNALS)
    def test_a_signal_to_workers_too_stops_the_run_at_the_next_line(self, stage, tmp_path, number):
        """Terminals and torchrun send it to the group of the run. Slurm sends some signals to all
        processes. Python 3.14 would start workers by a fork server, as is set here.
        """
        kills = f"subprocess.call(['sh', '-c', 'kill -{int(number)} -$PPID'])"
        if number in (signal.SIGTERM, signal.SIGUSR1):
            kills += f", [os.kill(p.pid, {int(number)}) for p in multiprocessing.active_children()]"
        fault = f"step == 2 and ({kills})"
        argv = stage("pretrain", "--batch-size 2 --workers 1")
        method = "forkserver" if sys.platform == "linux" else None
        first = f"import multiprocessing; multiprocessing.set_start_method({method!r}, force=True)"
        program = driver(tmp_path, fault, log_every=11, first=first)
        code, out, error = finish(start(program, *argv))
        # a shell goes on to the next command after Slurm's signal alone
        assert code == (0 if number == signal.SIGUSR1 else -number), error
        assert "Traceback" not in error
        assert f"stopped by {number.name}" in out
        assert error.count("next line of the log") == 1      # no worker answers
        assert checkpoints.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 11

    @pytest.mark.parametrize("number, fails", tuple(zip(STOP_SIGNALS, (True, False, True, False))))
    def test_a_signal_is_answered_and_given_back_when_main_ends(self, stage, monkeypatch, capfd,
                                                                number, fails):
        """In a notebook, the next interrupt belongs to somebody else."""
        def interrupt():
            signal.raise_signal(number)
            said = capfd.readouterr().err
            assert number.name in said and "next line of the log" in said
            if fails:
                raise ZeroDivisionError
        at_step(monkeypatch, 1, interrupt)
        heard = []
        before = signal.signal(number, lambda number, frame: heard.append(number))
        try:
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                train(stage("pretrain"))
            assert not heard
            signal.raise_signal(number)
            assert heard == [number]
        finally:
            signal.signal(number, before)

    @pytest.mark.parametrize("name, full", (("finetune", False), pytest.param("pretrain", True,
        marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full"))))
    def test_a_run_saves_when_nobody_reads_its_output_any_more(self, stage, monkeypatch, name,
                                                               full):
        """Ctrl-C in `python pretrain.py 2>&1 | tee log` ends tee first. The disk of a log may be
        full.
        """
        reader, writer = os.pipe()
        with open("/dev/full" if full else writer, "w") as output, \
                open(os.dup(output.fileno()), "w") as errors:
            monkeypatch.setattr(sys, "stdout", output)
            monkeypatch.setattr(sys, "stderr", errors)
            at_step(monkeypatch, 1, lambda: (os.close(reader), signal.raise_signal(signal.SIGUSR1)))
            args = SCRIPTS[name].parse_args(stage(name, "--save-every 1"))
            common.launch(SCRIPTS[name].main, args)
        assert read_run(args.out)[0]["step"] == 4

    def test_a_signal_comes_before_the_last_evaluation(self, stage, monkeypatch, capsys):
        """slurm.sh requeues the job in time, and the same command evaluates."""
        at_step(monkeypatch, 7, lambda: signal.raise_signal(signal.SIGUSR1))
        _, state, log = play("finetune", stage("finetune"))
        assert "stopped by SIGUSR1" in capsys.readouterr().out
        assert state["step"] == 8 and state["evaluation_due"] and "top1" not in log[-1]
        assert "top1" in play("finetune", stage("finetune"))[2][-1]

    @pytest.mark.parametrize("fault, first, error", (
        ("step == 6 and 1 / 0", "", "ZeroDivisionError"),
        ("None", """
forks, fork = itertools.count(1), os.fork
def limited():
    if next(forks) == 3:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = limited""", "BlockingIOError")), ids=("in a step", "the third worker does not start"))
    def test_a_program_that_fails_ends_its_workers(self, stage, tmp_path, fault, first, error):
        """They do not listen to SIGTERM, and its error is the last line."""
        if first and sys.platform != "linux":
            pytest.skip("workers are forked on Linux alone")
        ended = subprocess.run([sys.executable, driver(tmp_path, fault, first=first),
                                *stage("pretrain", "--workers 3")],
                               stderr=subprocess.PIPE, text=True, timeout=100)
        assert ended.returncode == 1
        assert ended.stderr.strip().splitlines()[-1].startswith(error)

    def test_a_second_ctrl_c_leaves_at_once(self, stage, tmp_path):
        fault = "step == 6 and [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"
        code, _, error = finish(start(driver(tmp_path, fault), *stage("pretrain")))
        assert code == -signal.SIGINT and "Traceback" not in error
        assert checkpoints.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 4

    @needs_loopback
    def test_two_processes_stop_together_and_save_once(self, stage, tmp_path):
        whole, _ = train(stage("pretrain", "--drop-path 0", out="whole"))
        argv = stage("pretrain", "--drop-path 0")
        number = tmp_path / "number"
        program = driver(tmp_path, "step == 3 and (stop_rank_1(), setattr(torch, 'save', save))",
                         first=f"""
def stop_rank_1():
    if rank == "1":
        open({str(number)!r}, "w").write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGUSR1)

def save(*args, save=torch.save):
    os.write(1, f"saved by {{rank}}\\n".encode())
    time.sleep(0.5)
    os.kill(int(open({str(number)!r}).read()), signal.SIGUSR1)      # a late one
    save(*args)
""")
        torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
        code, out = run_command(sys.executable, *torchrun, program, *argv,
                                stderr=subprocess.STDOUT)
        assert code == 0 and out.count("stopped by ") == out.count("saved by ") == 1
        assert "saved by 0" in out
        parts, _ = train([*argv, "--max-steps", "3"])
        assert parts["step"] == 3
        parts, _ = train(argv)                     # another number of processes: the same curve
        torch.testing.assert_close(whole["model"], parts["model"], rtol=1e-5, atol=1e-4)

    def test_what_nohup_ignores_stays_ignored(self, stage, monkeypatch):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            at_step(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGHUP))
            assert train(stage("pretrain"))[0]["step"] == 8
        finally:
            signal.signal(signal.SIGHUP, before)


class TestFolder:
    @pytest.mark.parametrize("name", ("best.pt", "epoch_0007.pt", "knn.jsonl", "log.jsonl"))
    def test_a_folder_of_another_run_is_refused(self, stage, capsys, tmp_path, name):
        """It belongs to somebody else, or to a run whose last.pt was lost. Accuracies in knn.jsonl
        would count as this run's.
        """
        file = tmp_path / "run" / name
        write_text(file, "mine")
        error = refusal(capsys, "pretrain", *stage("pretrain", "--max-steps 1"))
        assert str(file.parent) in error and name in error
        assert file.read_text() == "mine"

    def test_a_run_that_is_started_twice_works_once(self, stage, tmp_path, capsys):
        """Its workers, which live a little longer, do not hold the folder."""
        fault = "step == 2 and (open('ready', 'w').close(), signal.pause())"
        argv = stage("pretrain")
        program, files = started = start(driver(tmp_path, fault), *argv, "--workers", "1",
                                         folder=tmp_path)
        while not (tmp_path / "ready").exists():
            assert program.is_alive(), finish(started)
            time.sleep(0.01)
        folder = str(tmp_path / "run")
        assert folder in refusal(capsys, "pretrain", *argv)
        if loopback():      # both processes of another job end
            for two in start_two("pretrain.py", argv, argv):
                code, _, error = finish(two)
                assert code == 2 and error.count(folder) == 1, error
        os.kill(program.pid, signal.SIGKILL)
        program.join()
        assert train(argv)[0]["step"] == 8
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        files.cleanup()

    def test_a_run_is_known_from_its_first_step_on(self, stage, monkeypatch, tmp_path):
        """args.json has its flags, and says where its code comes from."""
        argv = stage("pretrain", "--entropy-weight 5 1")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            at_step(patch, 0, Mock(side_effect=KeyboardInterrupt))
            train(argv)
        record = json.loads((tmp_path / "run" / "args.json").read_text())
        assert record["args"] == vars(pretrain.parse_args(argv)) and record["images"] == 32
        for name in ("torch", "timm"):
            assert record["origin"][name] == metadata.version(name)

    @pytest.mark.skipif(not shutil.which("git"), reason="no git")
    def test_the_commit_says_whether_files_have_changes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        assert run.find_origin()["commit"] == ""
        git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
        (tmp_path / "run.py").write_text("1")
        for words in ("init -q", "add run.py", "commit -q -m x", "tag -a v1 -m x"):
            subprocess.run([*git, *words.split()], check=True)
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
        assert run.find_origin()["commit"] == commit
        (tmp_path / "run.py").write_text("2")
        assert run.find_origin()["commit"] == f"{commit}+changes"

    def test_a_file_system_without_locks_is_named_and_used(self, stage, monkeypatch, capsys):
        monkeypatch.setattr(run.fcntl, "lockf", Mock(side_effect=OSError))
        assert train(stage("pretrain"))[0]["step"] == 8
        assert "no locks" in capsys.readouterr().err


def nan_losses(patch, steps):
    """Makes the token loss NaN in these steps, counted from 0 over all runs to come."""
    count = itertools.count()

    def token_loss(pred, target, loss=losses.token_loss):
        return loss(pred, target) * (math.nan if next(count) in steps else 1)
    patch.setattr(losses, "token_loss", token_loss)


class TestNotFinite:
    def test_a_step_whose_loss_is_not_finite_is_skipped_and_counted(self, stage, monkeypatch):
        """The log's loss is the mean of the others."""
        monkeypatch.setattr(run, "LOG_EVERY", 3)
        _, clean = train(stage("pretrain", "--max-steps 1 --drop-path 0", out="clean"))
        nan_losses(monkeypatch, (1, 2, 4, 5, 6))      # lines end at steps 3, 4, 6 and 8
        state, log = train(stage("pretrain", "--drop-path 0"))
        assert [line["skipped"] for line in log] == [2, 0, 2, 1] and state["step"] == 8
        assert log[0]["loss"] == pytest.approx(clean[0]["loss"])
        assert log[2]["loss"] is None and log[3]["loss"] is not None
        assert run.is_finite(state)

    @pytest.mark.parametrize("wrong, ends", (((0, 1, 2, 3), True), ((0, 1, 2), False),
                                             ((1, 2, 3, 4), False), ((2, 3, 4, 5), True)))
    def test_a_run_ends_after_a_line_of_losses_that_are_not_finite(self, stage, monkeypatch,
                                                                   capsys, tmp_path, wrong,
                                                                   ends):
        """Nothing is lost: last.pt is from before, and resumes in another precision."""
        monkeypatch.setattr(run, "LOG_EVERY", 4)
        argv = stage("pretrain", "--batch-size 16 --epochs 4")      # lines of two steps, all epochs
        with monkeypatch.context() as patch:
            nan_losses(patch, wrong)
            if ends:
                error = refusal(capsys, "pretrain", *argv)
                assert error.startswith(f"step {wrong[-1] + 1}: no loss of the last 4 steps")
            else:
                assert train(argv)[0]["step"] == 8
        last = checkpoints.load_checkpoint(tmp_path / "run" / "last.pt")
        assert run.is_finite(last) and last["step"] == (wrong[-1] - 1 if ends else 8)
        assert train([*argv, "--amp", "bf16"])[0]["step"] == 8

    @pytest.mark.parametrize("name", ("pretrain", "finetune", "segment"))
    def test_no_checkpoint_ever_holds_a_nan(self, stage, capsys, name, tmp_path):
        """The loss of the first step is finite. What its update makes is not."""
        length = "" if name == "segment" else "--batch-size 32 --warmup-epochs 0"
        error = refusal(capsys, name, *stage(name, f"--lr 1e39 --save-every 1 {length}"))
        assert error.startswith("step 1: ") and ".pt is not written" in error
        kept = {path.name for path in (tmp_path / "run").glob("*.pt*")}
        assert kept == ({"last.pt", "epoch_0000.pt"} if name == "pretrain" else {"last.pt"})
        assert checkpoints.read_file(tmp_path / "run" / "last.pt")["step"] == 0

    def test_five_of_six_steps_are_five(self, stage, monkeypatch):
        """In float32, 5 / 6 * 6 is below 5."""
        monkeypatch.setattr(run, "LOG_EVERY", 6)
        nan_losses(monkeypatch, range(5))
        flags = "--batch-size 4 --epochs 1 --warmup-epochs 0"
        assert train(stage("pretrain", flags))[1][0]["skipped"] == 5

    def test_steps_before_a_stop_do_not_count_as_not_finite(self, stage, monkeypatch):
        monkeypatch.setattr(run, "LOG_EVERY", 4)
        argv = stage("pretrain", "--batch-size 16 --epochs 4")      # a line every two steps
        train([*argv, "--max-steps", "4"])
        nan_losses(monkeypatch, (0, 1))
        assert train(argv)[0]["step"] == 8

    def test_one_nan_in_the_optimizers_state_alone_is_not_saved(self, stage, capsys,
                                                                monkeypatch, tmp_path):
        good, _ = train(stage("pretrain", "--max-steps 1"))

        def spoil(optimizer, *args, step=optim.optimizer_step):
            metrics = step(optimizer, *args)
            [*optimizer.state.values()][-1]["exp_avg_sq"].view(-1)[-1] = math.nan
            return metrics
        monkeypatch.setattr(optim, "optimizer_step", spoil)
        assert "last.pt" in refusal(capsys, "pretrain", *stage("pretrain", "--max-steps 2"))
        assert_same_bits(good, checkpoints.load_checkpoint(tmp_path / "run" / "last.pt"))


VECTORS = {"objective_weights", "entropy", "dispatch_cv", "cls_share"}


class TestLog:
    @pytest.mark.parametrize("name, flags, fields, scores", (
        ("pretrain", "--objective token_cls_pixel --encoding dense --experts 3",
         {"token", "token_spread", "token_unweighted", "token_ratio", "cls", "pixel",
          "pixel_spread", "pixel_unweighted", "pixel_ratio", "entropy_loss",
          "importance_loss"} | VECTORS, None),
        ("pretrain", "--experts 0 --objective token",
         {"token", "token_spread", "objective_weights"}, None),
        ("finetune", "", set(), {"top1", "top5"}),
        ("segment", "", {"main", "auxiliary"}, {"miou", "mean_accuracy", "pixel_accuracy"})))
    def test_a_line_of_the_log_has_its_fields(self, stage, monkeypatch, name, flags, fields,
                                              scores):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2 ** 30)
        _, _, log = play(name, stage(name, flags))
        if scores:      # an evaluation has a line of its own
            last = log.pop()
            assert last.keys() == {"step", "epoch"} | scores and last["step"] == 8
        if name == "segment":      # its steps are slow on a CPU, and a signal waits for a line
            assert [line["step"] for line in log if "lr" in line] == [4, 5, 8]
        line = log[-1]
        assert line.keys() == LINE | fields
        assert (line["step"], line["memory_gib"], line["skipped"]) == (8, 3, 0)
        if fields > VECTORS:      # of three objectives, or of three experts
            assert all(len(line[vector]) == 3 for vector in VECTORS)

    def test_a_mean_is_over_the_steps_in_which_it_is_finite(self, stage, monkeypatch):
        """Each number of a vector has a mean of its own."""
        calls = itertools.count()

        def explore_losses(*args, **kwargs):
            values, regularizer, metrics = losses.explore_losses(*args, **kwargs)
            step = next(calls)
            metrics["entropy"] = torch.tensor([step, math.nan if step in (1, 2) else step])
            metrics["cls_share"] = torch.full((2,), math.inf)
            return values, regularizer, metrics
        monkeypatch.setattr(pretrain, "explore_losses", explore_losses)
        line, = train(stage("pretrain", "--max-steps 4"))[1]
        assert line["entropy"] == [1.5, 1.5] and line["cls_share"] == [None, None]
        assert line["dispatch_cv"][0] > 0

    def test_the_log_keeps_no_graph_until_its_next_line(self, stage, monkeypatch):
        def mean_metrics(self, reduce=run.Run.mean_metrics):
            assert self.metrics
            assert not any(x.requires_grad for values in self.metrics.values() for x in values)
            return reduce(self)
        monkeypatch.setattr(run.Run, "mean_metrics", mean_metrics)
        train(stage("pretrain", "--max-steps 1"))

    def test_speed_counts_no_first_step_no_evaluation_and_no_saving(self, stage, monkeypatch,
                                                                    capsys):
        """The first step compiles and starts workers, also in a run that resumes, like this one."""
        argv = stage("finetune", "--augment plain --save-every 1")
        play("finetune", [*argv, "--max-steps", "1"])
        clock = Mock(return_value=0.0)
        monkeypatch.setattr(run, "time", Mock(wraps=time, perf_counter=clock))

        def slow(owner, name, seconds):
            function = getattr(owner, name)

            def wrapped(*args):
                clock.return_value += seconds()
                return function(*args)
            monkeypatch.setattr(owner, name, wrapped)
        steps = itertools.count(1)
        slow(data.TrainViews, "__getitem__", lambda: 0.5)      # 4 s for a batch of 8
        slow(optim, "set_rate", lambda: 6 if next(steps) > 1 else 1000)
        slow(supervised, "accuracy", lambda: 1000)
        slow(torch, "save", lambda: 1000)
        log = [line for line in play("finetune", argv)[2] if "lr" in line]
        assert len(log) == 3
        for line in log[1:]:
            assert line["images_per_second"] == pytest.approx(8 / (4 + 6))
            assert line["loader_wait"] == pytest.approx(4 / (4 + 6))
        assert "; 0.8 images/s, 40% of" in capsys.readouterr().out

    @pytest.mark.parametrize("name, flags", (
        ("pretrain", ""), ("pretrain", "--experts 0"), ("finetune", "")))
    def test_a_runs_last_line_has_its_losses_and_its_speed(self, stage, monkeypatch, capsys, name,
                                                           flags):
        """A run of one step has but this step to measure."""
        monkeypatch.setattr(run, "time", Mock(perf_counter=Mock(side_effect=itertools.count())))
        _, _, (line,) = play(name, stage(name, f"--max-steps 1 {flags}"))
        fields = ["loss"] if name == "finetune" else ["token", "token_ratio", "dispatch_cv"]
        values = {field: np.ravel(line[field])[0] for field in fields if field in line}
        assert list(values) == (fields[:1] if "0" in flags else fields)
        said = ", ".join(f"{field} {value:.3g}" for field, value in values.items())
        *_, last = capsys.readouterr().out.splitlines()
        assert f": step 1 of 8; {said}; 2.7 images/s, 33% of" in last

    def test_the_log_holds_each_step_once_after_two_kills(self, stage, monkeypatch):
        monkeypatch.setattr(run, "LOG_EVERY", 1)
        argv = stage("pretrain")
        for _ in range(2):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                at_step(patch, 3, Mock(side_effect=KeyboardInterrupt))
                train(argv)
        assert [line["step"] for line in train(argv)[1]] == list(range(1, 9))

    @pytest.mark.parametrize("cut", (0, 40, None))
    def test_the_log_holds_each_step_once_and_whole_after_a_kill(self, stage, monkeypatch,
                                                                 tmp_path, cut):
        """The kill comes after lines that no last.pt knows of, maybe in the middle of one."""
        monkeypatch.setattr(run, "LOG_EVERY", 1)
        argv = stage("pretrain")
        train([*argv, "--max-steps", "2"])
        last = (tmp_path / "run" / "last.pt").read_bytes()
        train([*argv, "--max-steps", "5"])
        (tmp_path / "run" / "last.pt").write_bytes(last)
        log = (tmp_path / "run" / "log.jsonl")
        lines = log.read_bytes().splitlines(keepends=True)
        if cut is not None:
            log.write_bytes(b"".join(lines[:2 if cut else 4]) + lines[-1][:cut]
                            + b"\0\xff" * (not cut))
        state, after = train(argv)
        assert [line["step"] for line in after] == list(range(1, 9)) and state["step"] == 8
        assert log.read_bytes().splitlines(keepends=True)[:2] == lines[:2]


class TestFlags:
    @pytest.mark.parametrize("name, expected", (
        ("pretrain", dict(lr=1.5e-3, min_lr=1e-6, weight_decay=0.05, clip_grad=3.0, drop_path=0.1,
                          seed=42, batch_size=4096, epochs=300, warmup_epochs=40, mask_ratio=0.4,
                          model="vit_base", experts=2, objective="token_cls", encoding="sparse",
                          entropy_weight=[5.0], cls_weight=0.4, pixel_weight=1.0, amp="fp16",
                          teacher="ViT-B-16/openai", gradnorm_alpha=0.12)),
        ("knn", dict(k=20, temperature=0.07)),
        ("linear", dict(lr=2e-3, batch_size=2048, epochs=100, warmup_epochs=10, weight_decay=0.0,
                        augment="strong")),
        ("finetune", dict(lr=5e-4, layer_decay=None, drop_path=0.1, batch_size=1024, epochs=100,
                          warmup_epochs=5, weight_decay=0.05, expert_dropout=0.4, clip_grad=0.0,
                          augment="strong")),
        ("segment", dict(lr=8e-5, layer_decay=0.85, iterations=160_000, batch_size=16,
                         crop_size=512, warmup_iterations=1500, width=768))))
    def test_the_defaults_are_the_papers(self, name, expected):
        """The temperature of k-NN, and the crop and warm-up of segmentation, are the release's."""
        args = vars(SCRIPTS[name].parse_args([] if name in ("pretrain", "finetune") else ["x.pt"]))
        assert args == args | expected

    @pytest.mark.parametrize("name, flags", (
        *(("pretrain", flags) for flags in (
            *(f"--experts 0 {flag}" for flag in (
                "--detach", "--loss-block 3", "--loss-weights combine", "--entropy-weight 1",
                "--entropy-on combine", "--importance-weight 1", "--moe-blocks 1")),
            *(f"--experts 1 {flag}" for flag in (
                "--loss-weights combine", "--entropy-on combine", "--importance-weight 1")),
            *(f"--objective token --balance {kind}" for kind in ("gradnorm", "rlw")),
            "--objective token --cls-weight 1", "--pixel-weight 2", "--gradnorm-lr 1",
            "--balance gradnorm --cls-weight 1", "--balance rlw --gradnorm-alpha 1",
            "--entropy-weight 1 2 3", "--loss-weights uniform --detach", "--mask-ratio 0.01",
            "--objective token_pixel --encoding dense --experts 1")),
        ("finetune", "--recipe none fr"), ("finetune", "--recipe fr --expert-dropout 0.3"),
        ("finetune", "--model vit_tiny"), ("ep", "--pool mean")))
    def test_a_flag_that_would_have_no_effect_is_refused(self, capsys, stage, tmp_path, name,
                                                         flags):
        """The error names the last flag of each line."""
        error = refusal(capsys, name, *stage(name, flags))
        assert f"--{flags.split('--')[-1].split()[0]}" in error
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("name, flags, said", (
        ("segment", "--crop-size 33", "--crop-size 33"), ("knn", "-k 33", "-k 33"),
        ("pretrain", "--batch-size 33", "has only 32")))
    def test_sizes_that_do_not_fit_are_refused(self, capsys, stage, name, flags, said):
        assert said in refusal(capsys, name, *stage(name, flags))

    def test_a_warm_up_is_shorter_than_the_run(self):
        with pytest.raises(SystemExit):
            pretrain.parse_args(["--epochs", "40"])      # all of them warm-up

    def test_recipes_for_experts_need_experts(self, stage, teacher, capsys):
        _, *argv = stage("finetune", "--recipe fa exd")
        assert "--recipe fa exd" in refusal(capsys, "finetune", teacher, *argv)

    def test_an_empty_name_is_refused_for_its_variable_is_not_set(self, stage):
        """finetune.py "$CKPT" would train from scratch."""
        for name, argv in (("finetune", ["", *stage("finetune")[1:]]), ("segment", [""]),
                           ("pretrain", ["--data", ""]), ("pretrain", ["--teacher="])):
            with pytest.raises(SystemExit):
                SCRIPTS[name].parse_args(argv)


class TestCompile:
    @pytest.mark.parametrize("flags, backend", (
        ("--balance gradnorm", "aot_eager"),      # it compiles backward passes, too
        ("--objective token_cls_pixel --encoding dense --recompute", "eager")))
    def test_compiled_training_follows_the_plain_curve(self, stage, monkeypatch, flags, backend):
        compiled = []
        monkeypatch.setattr(torch, "compile", lambda function, compile=torch.compile: (
            compiled.append(function), compile(function, backend=backend))[1])
        monkeypatch.setitem(model.PRESETS, "vit_nano", dict(dim=96, depth=2, heads=3))
        flags = f"--drop-path 0 --max-steps 2 --micro-batch 4 {flags}"
        plain, (plain_line,) = train(stage("pretrain", f"{flags} --no-compile", out="plain"))
        assert not compiled
        state, (line,) = train(stage("pretrain", f"{flags} --compile", out="compiled"))
        assert len(compiled) == 3      # two blocks and the teacher
        for name in ("loss", "token", "entropy_loss", "grad_norm", "objective_weights"):
            assert plain_line[name] == pytest.approx(line[name], rel=1e-4), name
        torch.testing.assert_close(plain["model"], state["model"], rtol=1e-5, atol=1e-4)

    def test_few_graphs_serve_all_blocks_and_steps(self, stage, monkeypatch):
        """Eleven blocks have eleven probabilities of drop path, more than torch.compile tries."""
        graphs = []
        calls = []

        def backend(graph, inputs):
            graphs.append(graph)
            return lambda *args: calls.append(graph) or graph(*args)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        monkeypatch.setitem(model.PRESETS, "vit_nano", dict(dim=96, depth=12, heads=3))
        seen = []

        def end_step(self, *args, end=run.Run.end_step):
            seen.append((len(graphs), len(calls)))
            return end(self, *args)
        monkeypatch.setattr(run.Run, "end_step", end_step)
        torch._dynamo.reset()
        train(stage("pretrain", "--max-steps 4 --compile --drop-path 0.3 --recompute"))
        compiled, called = zip(*seen)
        assert compiled[1] == compiled[3] < 12
        # each block twice, for its outputs are computed again, and the teacher
        assert min(np.diff(called)) >= 12 * 2 + 1      # PyTorch 2.6 splits some in two


class TestKNN:
    @pytest.mark.parametrize("temperature", (0.07, 5.0))      # at 5.0, one neighbor more would show
    @pytest.mark.parametrize("k", (1, 6, 61))
    def test_knn_is_the_weighted_vote_of_the_nearest(self, temperature, k):
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

    @pytest.mark.parametrize("pool, timms", (("cls", "token"), ("mean", "avg")))
    def test_knn_votes_on_what_timm_pools_of_normalized_images(self, photos, encoder, tmp_path,
                                                               monkeypatch, pool, timms):
        from timm.layers import global_pool_nlc
        vit = checkpoints.load_encoder(encoder).eval()
        calls = spy(monkeypatch, knn, "classify")
        flags = ["-k", "7", "--temperature", "0.05", "--out", str(tmp_path), "--pool", pool, *QUICK]
        accuracy, = knn.main(knn.parse_args([encoder, "--data", photos, *flags]))
        val, bank = (data.ClassFolders(photos, split) for split in ("val", "train"))
        for images, features in zip((val, bank), calls[0].args):
            views = torch.stack([data.center_view(image, 32) for image, _ in images]) / 255
            tokens, _ = vit(normalized(views))
            expected = global_pool_nlc(tokens, timms, num_prefix_tokens=1)
            assert torch.allclose(features, F.normalize(expected, dim=1), atol=1e-5)
        assert calls[0].args[2].tolist() == [label for _, label in bank]
        assert calls[0].args[3:] == (4, 7, 0.05)
        row, = map(json.loads, (tmp_path / "knn.jsonl").read_text().splitlines())
        assert row["pool"] == pool
        predicted = knn.classify(*calls[0].args)
        assert accuracy == 100 * np.mean([label == p for (_, label), p in zip(val, predicted)])

    @needs_loopback
    def test_knn_prints_and_appends_the_same_rows_in_two_processes(self, photos, tmp_path, capsys):
        (tmp_path / "other").mkdir()
        paths = [write_checkpoint(tmp_path / "e0.pt"),
                 write_checkpoint(tmp_path / "other" / "e2.pt", experts=2)]
        file = torch.load(paths[1])
        torch.save(file | {"step": 12, "epoch": 3.0}, paths[1])
        # the largest k, unequal last batches and unequal shares
        photos = str(shutil.copytree(photos, tmp_path / "photos"))
        Path(photos, "val", "class_1", "0.jpg").unlink()
        flags = ["--data", photos, "-k", "32", "--batch-size", "5", *QUICK]
        results = knn.main(knn.parse_args([*paths, *flags]))
        printed = capsys.readouterr().out
        for line, top1, path in zip(printed.splitlines(), results, paths, strict=True):
            assert line.split()[0] == f"{top1:.2f}%" and line.endswith(path)
            assert "26.7%" in line      # chance: the largest of val/'s classes has 4 of 15 images
        assert run_two("knn.py", *paths, *flags) == printed
        knn.main(knn.parse_args([*paths, *flags, "--out", str(tmp_path / "all")]))
        rows = [dict(encoder=path, step=step, epoch=epoch, data=photos, pool="cls", k=32,
                     temperature=0.07,
                     top1=top1) for path, step, epoch, top1 in zip(paths, (None, 12), (None, 3.0),
                                                                   results)]
        for out, expected in ((tmp_path, rows[:1] * 2), (tmp_path / "other", rows[1:] * 2),
                              (tmp_path / "all", rows)):
            lines = (out / "knn.jsonl").read_text().splitlines()
            assert list(map(json.loads, lines)) == expected

    def test_without_data_the_set_is_that_of_the_first_encoder(self, photos, encoder, tmp_path,
                                                               monkeypatch):
        """A set that is gone does not count."""
        monkeypatch.setenv("IMAGENET", photos)
        monkeypatch.setattr(knn, "knn_accuracy", Mock(return_value=(50.0, 10.0)))
        for name in ("shapes", "gone"):
            torch.save(torch.load(encoder) | {"args": {"data": name}}, tmp_path / f"{name}.pt")
        trained = str(tmp_path / "shapes.pt")
        loaded = spy(monkeypatch, torch, "load")
        for argv, seen in (([trained, encoder], "shapes"), ([encoder, trained], photos),
                           (["timm/test_vit/random", trained], photos),
                           ([str(tmp_path / "gone.pt")], photos),
                           ([trained, "--data", photos], photos)):
            knn.main(knn.parse_args([*argv, "--out", str(tmp_path), *QUICK]))
            row = json.loads((tmp_path / "knn.jsonl").read_text().splitlines()[-1])
            assert row["data"] == seen
        assert len(loaded) == 2 + 2 + 1 + 1 + 1      # each checkpoint once

    def test_features_that_are_not_finite_have_no_accuracy(self, stage, encoder, tmp_path, capsys):
        file = torch.load(encoder)
        file["model"]["encoder.norm.weight"][0] = math.inf
        torch.save(file, tmp_path / "inf.pt")
        error = refusal(capsys, "knn", str(tmp_path / "inf.pt"), *stage("knn")[1:])
        assert error.startswith(str(tmp_path / "inf.pt"))
        assert not run.read_lines(tmp_path / "run" / "knn.jsonl")

    def test_what_cannot_be_written_or_drawn_shows_before_the_work(self, stage, encoder,
                                                                   monkeypatch, tmp_path):
        (tmp_path / "run" / "knn.jsonl").mkdir(parents=True)
        (tmp_path / "run" / "routing.json").mkdir()
        work = spy(monkeypatch, data, "load")
        _, *flags = stage("knn")
        for name in ("knn", "analyze"):
            with pytest.raises(IsADirectoryError, match="run"):
                SCRIPTS[name].main(SCRIPTS[name].parse_args([encoder, *flags]))
        monkeypatch.setitem(sys.modules, "matplotlib", None)      # not installed
        with pytest.raises(ImportError):
            analyze.main(analyze.parse_args([encoder, *flags]))
        assert not work

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
    def test_an_accuracy_whose_row_cannot_be_written_is_printed(self, stage, tmp_path, capsys):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "knn.jsonl").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            knn.main(knn.parse_args(stage("knn")))
        assert "% k-NN on " in capsys.readouterr().out

    def test_a_row_that_stdout_cannot_show_is_kept(self, stage, encoder, monkeypatch, tmp_path):
        path = str(shutil.copy(encoder, tmp_path / "ü.pt"))
        argv = stage("knn")
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", "strict"))
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        common.launch(knn.main, knn.parse_args([path, *argv[1:]]))
        out = sys.stdout.buffer.getvalue().decode()
        row, = run.read_lines(tmp_path / "run" / "knn.jsonl")
        assert row["encoder"] == path and f"{row['top1']:6.2f}%" in out and "?.pt" in out


class TestTransfer:
    def test_a_model_with_experts_is_finetuned_with_all_recipes(self, stage, monkeypatch):
        calls = spy(monkeypatch, supervised, "apply_recipe")
        argv = stage("finetune", "--max-steps 1 --weight-decay 0.1")
        after = play("finetune", argv)[1]["model"]
        before = checkpoints.load_checkpoint(argv[0])["model"]
        assert [block.mlp.dropout for block in calls[0].args[1].blocks[1::2]] == [0.4, 0.4]
        frozen = {name for name in before if torch.equal(before[name], after[name])}
        assert frozen == {name for name in before
                          if name.endswith(("router.phi", "router.scale")) or ".attn." in name}

    def test_efficient_probing_is_a_query_per_slice_of_the_values(self):
        tokens = torch.randn(2, 6, 96)
        probe = linprobe.EfficientProbe(96, 7).eval()
        assert not list(probe.norm.parameters())
        for layer in (probe.value, probe.head):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert not layer.bias.any()
        assert probe.queries.std().item() == pytest.approx(0.02, rel=0.05)
        for tensor in (probe.queries, probe.value.bias, probe.norm.running_mean):
            nn.init.normal_(tensor)
        probe.norm.running_var.uniform_(0.5, 2)
        patches = tokens[:, 1:]
        weights = (patches @ probe.queries.T / 96 ** 0.5).softmax(1)
        values = probe.value(patches)
        pooled = [(weights[:, :, q, None] * values[:, :, 3 * q:3 * q + 3]).sum(1)
                  for q in range(32)]
        deviation = (probe.norm.running_var + 1e-5).sqrt()
        normed = (torch.cat(pooled, 1) - probe.norm.running_mean) / deviation
        assert torch.allclose(probe(tokens), probe.head(normed), atol=1e-5)

    def test_rand_augment_is_timms(self):
        import timm.data
        transforms = timm.data.create_transform(
            32, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", hflip=0,
            interpolation="bicubic").transforms
        theirs = next(each for each in transforms if "RandAugment" in repr(each))
        ours = supervised.rand_augment()
        picture = TF.to_pil_image(Shapes("train", 32)[0][0])
        same = 0
        for seed in range(600):                  # none of ours fails, as posterizing to 0 bits does
            random.seed(seed)
            np.random.seed(seed)
            after = ours(picture)
            random.seed(seed)
            np.random.seed(seed)
            with contextlib.suppress(ValueError):
                same += after == theirs(picture)
        assert same > 570                        # magnitudes at timm's limit of 10 aside

    def test_strong_views_have_smaller_crops_and_a_quarter_is_erased(self, monkeypatch):
        images = Shapes("train", 16)
        plain = data.TrainViews(images, 8, 42)
        strong = supervised.StrongViews(images, 8, 42, erase=True)
        assert (plain.scale, strong.scale) == ((0.2, 1.0), (0.08, 1.0))
        strong.scale, strong.rand_augment = plain.scale, ImageOps.invert
        erased = spy(monkeypatch, supervised, "random_erasing")
        for index in range(1000):
            before = len(erased)
            view = strong[1, index]
            assert (view["jitter"] == 1).all()
            if len(erased) == before:
                assert torch.equal(255 - plain[1, index]["image"], view["image"])
            else:
                assert torch.equal(erased[-1].args[1], view["image"])
        assert len(erased) / 1000 == pytest.approx(0.25, abs=0.04)

    def test_what_is_erased_is_2_to_33_percent_and_becomes_noise(self):
        rng = np.random.default_rng(0)
        sides, pixels = [], []
        for _ in range(2000):
            image = torch.full((3, 40, 40), 255, dtype=torch.uint8)
            supervised.random_erasing(rng, image)
            erased = (image != 255).any(0)
            sides.append((erased.any(1).sum().item(), erased.any(0).sum().item()))
            pixels.append(image[:, erased] / 255)
        h, w = np.array(sides).T
        quantiles = (np.quantile(h * w / 1600, (0.05, 0.5, 0.9)) - 0.02) / (1 / 3 - 0.02)
        assert quantiles == pytest.approx([0.05, 0.5, 0.9], abs=0.015)
        quantiles = np.quantile(np.log(h / w), (0.1, 0.5, 0.9)) / math.log(1 / 0.3)
        assert quantiles == pytest.approx([-0.8, 0, 0.8], abs=0.06)
        noise = torch.cat(pixels, 1).double()      # its upper end is clipped
        assert torch.allclose(noise.corrcoef(), torch.eye(3).double(), atol=0.05)
        assert noise.quantile(0.5, 1).tolist() == pytest.approx(model.IMAGENET_MEAN, abs=0.01)
        below = noise.quantile(0.5, 1) - noise.quantile(0.16, 1)
        assert below.tolist() == pytest.approx(model.IMAGENET_STD, abs=0.01)

    def test_top1_and_top5_are_counted_over_all_processes(self, monkeypatch):
        args, process = loading()
        args.micro_batch = 3
        process.sum = lambda hits: hits + torch.tensor([1, 1])      # another process's
        logits = torch.eye(8)[[0, 1, 2, 3]] + torch.arange(8) * 0.01
        views = [dict(image=torch.full((3, 8, 8), 255.0 * i), label=label)
                 for i, label in enumerate((0, 4, 3, 3))]
        scores = supervised.accuracy(lambda images: logits[images[:, 0, 0, 0].long()], views, args,
                                     process)
        assert scores == {"top1": 75.0, "top5": 100.0}      # labels are 1st, 5th, 6th, 1st


class Scene:
    """Scenes of one image: class 1 is black, a rectangle of class 9 white"""

    def __init__(self):
        self.shade = torch.ones(60, 80, dtype=torch.uint8)
        self.shade[20:45, 30:70] = 9
        self.picture = (255 * (self.shade // 9)).expand(3, -1, -1)

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.picture, 0

    def annotation(self, index):
        return self.shade.clone()


def distort(image, offset, contrast, saturation, turn, first=True):
    """Distorts an image by these draws -> (the image, the ranges that they came from)"""
    rng = Mock(uniform=Mock(side_effect=[offset, contrast, saturation, turn]),
               random=Mock(side_effect=[0.25, 0.25, 0.25 if first else 0.75, 0.25, 0.25]))
    image = segment.photometric_distortion(rng, image)
    return image, [each.args for each in rng.uniform.call_args_list]


def four_bit_png(pixels):
    """A gray PNG of four bits, as optimizers of files write it: uint8 [H, W] below 16 -> bytes"""
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(
            ">I", zlib.crc32(kind + content))
    height, width = pixels.shape
    pairs = np.pad(pixels, ((0, 0), (0, width % 2)))
    rows = np.insert(pairs[:, ::2] << 4 | pairs[:, 1::2], 0, 0, axis=1)      # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 4, 0, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(rows.astype(np.uint8).tobytes())) + chunk(b"IEND", b""))


class TestSegmentation:
    def test_upernet_is_a_pooled_top_a_pyramid_and_an_auxiliary_head(self):
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
        assert net.auxiliary[2].in_channels == 256
        for dropout in (net.classify[0], net.auxiliary[1]):
            dropped = dropout.train()(torch.ones(200, 7, 3, 5))
            assert (dropped == dropped[:, :, :1, :1]).all()      # whole channels of an image
            assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.03)

    def test_an_odd_grid_keeps_its_last_row_and_column(self):
        assert segment.UperNet(6, 5, 8).strides[3](rand(1, 6, 5, 7).float()).shape[2:] == (3, 4)

    def test_gpus_share_their_batch_statistics(self, stage, monkeypatch):
        process = Mock(world=2, device=torch.device("cuda"))
        monkeypatch.setattr(common, "Process", lambda args: process)
        monkeypatch.setattr(data, "check", lambda *args: None)
        monkeypatch.setattr(segment.Segmenter, "to", lambda self, device: self)
        monkeypatch.setattr(supervised, "fit", lambda args, process, model, *more, **named: model)
        segmenter = segment.main(segment.parse_args(stage("segment")))
        kinds = {type(module) for module in segmenter.modules()}
        assert nn.SyncBatchNorm in kinds and nn.BatchNorm2d not in kinds

    def test_features_come_from_the_blocks_that_the_release_takes(self):
        assert segment.feature_blocks(12) == [3, 5, 7, 11]
        assert segment.feature_blocks(24) == [7, 11, 15, 23]

    def test_scores_of_a_hand_counted_case(self):
        annotation = torch.tensor([[1, 1, 1, 2], [2, 2, 0, 0], [4, 4, 4, 4]])      # 0 is ignored
        predicted = torch.tensor([[0, 0, 1, 1], [1, 0, 4, 2], [3, 3, 3, 0]])
        matrix = segment.confusion(predicted, annotation.byte(), 5)
        assert matrix[0].tolist() == [0, 0, 1, 0, 1]
        assert segment.score(matrix[1:]) == pytest.approx({      # of classes 1, 2 and 4
            "miou": 100 * (2 / 5 + 2 / 4 + 3 / 4) / 3, "pixel_accuracy": 70,
            "mean_accuracy": 100 * (2 / 3 + 2 / 3 + 3 / 4) / 3})

    def test_an_evaluation_says_what_is_not_labeled(self, monkeypatch):
        said = []
        monkeypatch.setattr(common, "note", said.append)
        scene = Scene()
        views = segment.EvalScenes(scene, 40, 9)

        def evaluate():
            segment.evaluate_scenes(lambda images: [images.new_zeros(1, 9, 2, 2)], views,
                                    *loading())
        scene.shade[:15] = 0
        evaluate()
        assert "25.0%" in said[0] and "7 of 9 classes" in said.pop()
        scene.shade[:] = torch.arange(80) % 9 + 1
        evaluate()
        assert not said
        scene.shade[:] = 0
        with pytest.raises(common.UserError, match="no pixel"):
            evaluate()

    def test_views_resize_and_move_image_and_annotation_together(self, monkeypatch):
        views = segment.TrainScenes(Scene(), 40, 9, seed=3)
        sizes = spy(monkeypatch, TF, "resize")
        padding = torch.tensor([124, 116, 104])      # ImageNet's mean
        seen = set()
        for epoch in range(60):
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
        assert 20 <= min(shorts) < 23 and 77 < max(shorts) <= 80      # half the crop up to twice

    def test_scenes_are_flipped_and_distorted(self, monkeypatch):
        scene = Scene()
        scene.shade[:, :10] = 2
        monkeypatch.setattr(segment, "scene_crop", lambda rng, classes, crop: (0, 0))
        monkeypatch.setattr(segment, "photometric_distortion",
                            lambda rng, image: torch.full_like(image, 77))
        views = [segment.TrainScenes(scene, 40, 9, seed=3)[epoch, 0] for epoch in range(40)]
        assert 10 < sum(view["annotation"][0, 0].item() != 2 for view in views) < 30
        assert all((view["image"][:, view["annotation"] > 0] == 77).all() for view in views)

    def test_photometric_distortion_is_mmsegmentations(self):
        """Offset, contrast, then saturation and hue in HSV; each with probability 0.5."""
        byte = np.arange(256)
        gray = torch.from_numpy(byte.astype(np.uint8)).expand(3, 1, 256)
        for offset, contrast, first in itertools.product((-32.0, 0.0, 32.0), (0.5, 1.0, 1.5),
                                                          (True, False)):
            expected = np.clip(np.clip(byte + offset, 0, 255) * contrast, 0, 255).astype(np.uint8)
            found, ranges = distort(gray, offset, contrast, 1.0, 0.0, first)
            assert (found.numpy() == expected).all(), (offset, contrast, first)
        assert ranges == [(-32, 32), (0.5, 1.5), (0.5, 1.5), (-0.1, 0.1)]
        colors = np.stack([byte, byte * 7 % 256, 0 * byte + 200], -1)[None].astype(np.uint8)
        image = TF.pil_to_tensor(Image.fromarray(colors, "HSV").convert("RGB"))
        h, s, v = np.moveaxis(np.array(TF.to_pil_image(image).convert("HSV")).astype(int), 2, 0)
        for turn, steps, saturation in ((0.1, 26, 1.5), (-0.1, -26, 0.5)):      # 25.6 of 256
            turned = (h + steps) % 256, np.rint(s * saturation).clip(0, 255), v
            expected = Image.fromarray(np.stack(turned, -1).astype(np.uint8), "HSV").convert("RGB")
            found, _ = distort(image, 0.0, 1.0, saturation, turn)
            assert torch.equal(found, TF.pil_to_tensor(expected))

    @pytest.mark.parametrize("left, drawn, first", (
        (171, 1, 1), (170, 11, 1), (189, 1, 1), (190, 11, 1), (180, 11, 0)))
    def test_a_crop_of_nearly_one_class_is_drawn_again_ten_times(self, left, drawn, first):
        annotation = torch.ones(1, 40, 400, dtype=torch.uint8)
        annotation[..., 200:] = 2
        annotation[..., :200] = first              # what is not labeled does not count
        rng = Mock(integers=Mock(side_effect=[0, left] * 11))
        assert segment.scene_crop(rng, annotation, 40) == (0, left)
        assert rng.integers.call_count == 2 * drawn
        assert rng.integers.call_args.args == (361,)

    def test_classes_from_0_are_read_as_those_from_1(self, stage, scenes, tmp_path, monkeypatch):
        shutil.copytree(scenes, tmp_path / "scenes")
        path = tmp_path / "scenes" / "annotations" / "training" / "1.png"
        classes = np.array(Image.open(path))
        classes[0] = 0                               # ignored
        for zero_is_class, content in ((False, classes),
                                       (True, np.where(classes == 0, 255, classes - 1))):
            Image.fromarray(content.astype(np.uint8)).save(path)
            found = segment.Scenes(str(tmp_path / "scenes"), "training", zero_is_class)
            assert found.annotation(1).tolist() == classes.tolist()
        opened = spy(monkeypatch, segment, "Scenes")
        play("segment", stage("segment", "--max-steps 1 --zero-is-class --classes 255"))
        assert [each.args[1:] for each in opened] == [("training", True), ("validation", True)]

    @pytest.mark.parametrize("turn", (0, 1, 2, 8, 9))      # 0 and 9 mean nothing
    def test_an_image_that_exif_turns_without_annotation_is_refused(self, scenes, tmp_path, turn):
        """Upside down, it would have wrong labels, and nothing would say so."""
        root = Path(shutil.copytree(scenes, tmp_path / "scenes"))
        path = root / "images/training/2.jpg"
        exif = Image.Exif()
        exif[0x0112] = turn
        Image.open(path).save(path, exif=exif)
        named = pytest.raises(common.UserError, match=f"{path} .*it is {turn}")
        with contextlib.nullcontext() if turn in (0, 1, 9) else named:
            segment.Scenes(str(root), "training").annotation(2)

    @pytest.mark.parametrize("content, expected", (
        (np.zeros((50, 72, 3)), "it is RGB"), (4, "it is L;4"), (np.zeros((7, 9)), "shape (7, 9)"),
        (np.full((36, 72), 12), "--classes 11"), ("JPEG", "the format JPEG"),
        ("GIF", "the format GIF")),
        ids=("in color", "of four bits", "of another shape", "with more classes", "JPEG", "GIF"))
    def test_an_annotation_that_cannot_be_right_is_named(self, scenes, tmp_path, content, expected):
        root = Path(shutil.copytree(scenes, tmp_path / "scenes"))
        path = root / "annotations/training/3.png"
        if isinstance(content, int):
            path.write_bytes(four_bit_png(np.array(Image.open(path))))
            assert np.array(Image.open(path)).max() > 11      # Pillow scales them
        elif isinstance(content, str):      # under a name that ends with .png
            Image.open(path).save(path, format=content)
        else:
            Image.fromarray(content.astype(np.uint8)).save(path)
        views = segment.TrainScenes(segment.Scenes(str(root), "training"), 32, 11, 7)
        with pytest.raises(common.UserError, match=re.escape(expected)) as caught:
            views[0, 3]
        assert str(path) in str(caught.value)

    def test_a_class_that_only_validation_has_is_named_before_the_first_step(
            self, stage, scenes, tmp_path, capsys):
        root = Path(shutil.copytree(scenes, tmp_path / "scenes"))
        path = root / "annotations/validation/2.png"
        Image.fromarray(np.where(np.array(Image.open(path)) > 1, 12, 1).astype(np.uint8)).save(path)
        with pytest.raises(common.UserError, match="1 of 3 images"):
            play("segment", stage("segment", f"--data {root}"))
        assert f"--classes 11: the annotation {path} has class 12" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    def test_drawn_shapes_are_segmented_and_evaluated_on_others(self, stage, monkeypatch):
        """They have 11 classes and ADE20K has 150, unless --classes says otherwise."""
        training = spy(monkeypatch, segment, "TrainScenes")
        evaluation = spy(monkeypatch, segment, "EvalScenes")
        for i, (flags, classes) in enumerate((("--data shapes", 11), ("", 150))):
            argv = stage("segment", f"--max-steps 1 --seed 7 {flags}", out=str(i))
            at = argv.index("--classes")
            play("segment", argv[:at] + argv[at + 2:])
            assert training[i].args[1:] == (32, classes, 7)
            assert evaluation[i].args[1:] == (32, classes)
        assert (training[0].args[0].stream, evaluation[0].args[0].stream) == (0, 1)


@pytest.fixture
def write_student(tmp_path, teacher):
    """write_student(name, scale, **args) -> a pretraining checkpoint

    The scale of its routers is `scale` more than the number of the block.
    """
    student = model.Explore(nano(experts=3, depth=6), 60)
    for block in student.encoder.blocks[1::2]:
        nn.init.normal_(block.norm2.bias)
        block.ls2.gamma.data.fill_(10)      # so that it changes tokens

    def write(name, scale=3.0, **args):
        for i in student.encoder.moe_blocks:
            student.encoder.blocks[i].mlp.router.scale.data.fill_(scale + i)
        (tmp_path / name).mkdir()
        torch.save({"model": student.state_dict(), "encoder": student.encoder.config,
                    "args": {"stage": "pretrain", "teacher": teacher, "loss_block": [3, 1]} | args},
                   tmp_path / name / "last.pt")
        return str(tmp_path / name / "last.pt")
    return write


FIVE = ["--data", "shapes", "--images", "5", "--seed", "3", *QUICK]      # drawn images


def show(*argv):
    """Runs analyze.py on five images -> its numbers, a dict for each checkpoint"""
    return analyze.main(analyze.parse_args([*FIVE, *argv]))


class TestAnalyze:
    def test_the_silhouette_is_that_of_the_definition(self):
        features = 1000 + randn(41, 4)
        three = torch.arange(41) % 3
        three[7] = 5                                                # alone in its cluster: counts 0
        for labels in (three, (torch.arange(41) < 2).int()):        # a cluster of two
            values = []
            for i, label in enumerate(labels.tolist()):
                distance = (features - features[i]).norm(dim=1)
                others = torch.arange(41) != i
                mean = {c: distance[(labels == c) & others].mean().item() for c in labels.tolist()}
                a = mean.pop(label)
                b = min(mean.values())
                values.append((b - a) / max(a, b) if (labels == label).sum() > 1 else 0)
            for each, error in ((features, 1e-6), (features.float(), 1e-2)):
                found = analyze.silhouette(each, labels)
                assert found == pytest.approx(np.mean(values), rel=error)
        assert analyze.silhouette(features, torch.zeros_like(labels)) == 0      # of one cluster
        assert analyze.silhouette(torch.zeros_like(features), labels) == 0      # of one point

    def test_json_has_no_word_for_nan(self):
        found = common.rounded({"a": [math.nan, 1, {"b": math.inf}], "c": "x", "d": 0.1234567})
        assert found == {"a": [None, 1, {"b": None}], "c": "x", "d": 0.123457}

    @torch.no_grad()
    def test_routing_json_equals_numpy_on_the_same_weights(self, write_student, teacher,
                                                           monkeypatch):
        monkeypatch.setattr(analyze, "SAMPLED_TOKENS", 60)
        path = write_student("one")
        args = analyze.parse_args([path, *FIVE, "--batch-size", "2", "--block", "1"])
        measured = analyze.analyze_checkpoint(path, args.data, args, common.Process(args))
        numbers = measured["numbers"]

        rng = np.random.default_rng(3)
        images = Shapes("val", 32)
        chosen = rng.permutation(1024)[:5].tolist()
        sampled = torch.from_numpy(rng.random((5, 17)) < 60 / 5 / 17)
        views = torch.stack([data.center_view(images[i][0], 32) for i in chosen])
        encoder = checkpoints.load_encoder(path).eval()
        x = encoder.embed(normalized(views / 255))
        seen = {}
        for i, block in enumerate(encoder.blocks):
            entered = x
            x, weights = block(x)
            seen[i] = entered, weights
        x = encoder.norm(x)

        for block, row in zip((1, 3, 5), numbers["blocks"], strict=True):
            entered, weights = seen[block]
            dispatch = weights.dispatch.double().numpy()
            patches = dispatch[:, 1:]
            labels = torch.from_numpy(dispatch.argmax(2))[sampled]
            expected = {"block": block, "scale": 3 + block, "cls_share": dispatch[:, 0].mean(0),
                        "entropy": -(dispatch * np.log(dispatch)).sum(1).mean(0),
                        "dispatch_cv": (patches.std(1) / patches.mean(1)).mean(0),
                        "silhouette": analyze.silhouette(entered[sampled], labels)}
            for name, value in expected.items():
                assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name

        weight = seen[1][1].dispatch[:, 1:]
        state = torch.load(path)["model"]
        predicted = F.linear(x, state["head.weight"], state["head.bias"])
        targets = build_frozen(teacher, 4)(views / 255)
        loss = losses.token_loss(predicted, targets)[:, 1:]
        pair = torch.stack([weight[..., 0], loss])[:, sampled[:, 1:]]
        assert numbers["correlation"] == pytest.approx(torch.corrcoef(pair)[0, 1].item(), abs=1e-4)
        pictures = torch.stack([data.center_view(images[i][0], 224) for i in chosen])
        assert torch.equal(measured["images"], pictures)
        assert torch.allclose(measured["weights"], 17 * weight, atol=1e-4)      # 1 is uniform
        assert np.allclose(measured["points"], pair * torch.tensor([[17.0], [1.0]]), atol=1e-4)

    @pytest.mark.usefixtures("drawn")      # to save pictures takes longer
    def test_each_checkpoint_has_its_loss_block_and_a_correlation(self, write_student, tmp_path,
                                                                  capsys):
        argv = [write_student("a"), write_student("b", teacher="gone.pt"),
                write_student("c", teacher=None, loss_block=None)]
        numbers = show(*argv, "--out", str(tmp_path / "all"))
        assert [each["block"] for each in numbers] == [3, 3, 5]
        assert ["correlation" in each for each in numbers] == [True, False, False]
        printed = capsys.readouterr().out
        assert f"{argv[1]}: no correlation with the token loss: gone.pt" in printed
        written = json.loads((tmp_path / "all" / "routing.json").read_text())
        assert written == common.rounded(numbers)

    def test_heatmaps_show_each_experts_weights_over_each_image(self, write_student, drawn):
        path, other = write_student("one"), write_student("other", scale=9.0)
        show(path, other)
        args = analyze.parse_args([path, *FIVE])
        one, last = (analyze.analyze_checkpoint(each, args.data, args, common.Process(args))
                     for each in (path, other))
        # images, 2 x 3 experts, losses
        axes = np.array(drawn["heatmaps.png"].axes[:40]).reshape(8, 5)
        for column, axis in enumerate(axes[7]):
            assert np.array_equal(axis.images[1].get_array(), last["losses"][column].view(4, 4))
            assert np.allclose(axis.images[1].get_clim()[1], np.quantile(last["losses"], 0.99))
        axes = axes[:7]
        for column, image in enumerate(one["images"].permute(0, 2, 3, 1).numpy()):
            assert np.array_equal(axes[0, column].images[0].get_array(), image)
            for expert in range(3):
                below, above = axes[1 + expert, column].images
                assert np.allclose(below.get_array(), image.mean(-1))
                expected = one["weights"][column, :, expert].view(4, 4)
                assert np.array_equal(above.get_array(), expected)
                assert above.norm(1) == 0.5      # white
        weights = np.stack([np.array(image.images[1].get_array()) for image in axes[1:].flat])
        half = np.quantile(abs(weights - 1), 0.99)
        for image in axes[1:].flat:      # one scale, by which rows can be compared
            assert np.allclose(image.images[1].get_clim(), (max(0, 1 - half), 1 + half))

    def test_a_photograph_stands_beside_its_heatmaps(self, write_student, photos, drawn):
        """Neither the student's set nor its teacher is at hand."""
        path = write_student("a", data="gone", teacher="gone.pt")
        photo = f"{photos}/val/class_1/2.jpg"
        show(path, "--data", photo, "--images", "200")
        picture, *heatmaps, _ = drawn["heatmaps.png"].axes
        view = data.center_view(data.read_image(photo), 224).permute(1, 2, 0)
        assert np.array_equal(picture.images[0].get_array(), view)
        assert [axis.get_ylabel() for axis in heatmaps] == ["expert 0", "expert 1", "expert 2"]
        for axis in heatmaps:      # on the right, and the patches cover the photograph
            assert axis.get_position().x0 > picture.get_position().x1
            assert axis.images[1].get_extent() == [0, 224, 224, 0]

    def test_the_line_is_the_regression_of_loss_on_weight(self, write_student, drawn):
        show(write_student("a"))
        axis, = drawn["correlation.png"].axes
        weight, loss = axis.collections[0].get_offsets().T
        assert axis.lines[0].get_slope() == pytest.approx(np.polyfit(weight, loss, 1)[0])

    def test_all_models_see_the_images_of_the_first_ones_set(self, write_student, monkeypatch):
        paths = [write_student(name, data=name, teacher=None)
                 for name in ("shapes", "shapes-noise")]
        opened = spy(monkeypatch, data, "open_images")
        loaded = spy(monkeypatch, torch, "load")
        numbers = analyze.main(analyze.parse_args([*paths, *FIVE[2:]]))
        assert [each["data"] for each in numbers] == ["shapes"] * 2
        assert [call.args[0] for call in loaded] == paths      # each once
        assert [call.args[0] for call in opened] == ["shapes"] * 2

    def test_of_many_checkpoints_expert_0_is_drawn_in_their_order(self, write_student, drawn):
        models = show(*(write_student(name, scale) for name, scale in zip("cab", (9, 1, 3))))
        assert [numbers["name"] for numbers in models] == ["c/last", "a/last", "b/last"]
        for axis, name in zip(drawn["blocks.png"].axes,
                              ("silhouette", "entropy", "dispatch_cv", "cls_share")):
            uniform, *lines = axis.lines
            for line, numbers in zip(lines, models, strict=True):
                values = {row["block"]: np.ravel(row[name])[0] for row in numbers["blocks"]}
                assert dict(zip(*line.get_data())) == values
            assert uniform.get_ydata()[0] == dict(entropy=math.log(17), cls_share=1 / 17).get(
                name, 0)
            # lines that differ little do not lie on top of each other
            low, high = axis.get_ylim()
            assert high - low == pytest.approx(1.1 * np.ptp(np.concatenate(
                [line.get_ydata() for line in axis.lines])))

    def test_features_that_are_not_finite_have_no_numbers(self, write_student, capsys):
        path = write_student("a")
        file = torch.load(path)
        for name in ("encoder.norm.bias", "head.bias"):
            bad = file["model"] | {name: torch.full_like(file["model"][name], math.nan)}
            torch.save(file | {"model": bad}, path)
            error = refusal(capsys, "analyze", path, *FIVE)
            assert error.startswith(f"{path}: ") and "not finite" in error

    @pytest.mark.parametrize("flags, said", (
        ("--objective token_cls", ["token loss", "no loss", "no loss"]),
        ("--objective token_pixel", ["token loss", "no loss", "no loss"]),
        ("--objective token_pixel --encoding dense", ["token loss", "pixel loss", "no loss"]),
        ("--objective token_pixel --encoding dense --loss-weights uniform", ["no loss"] * 3),
        ("", ["", "", ""])))
    def test_rows_of_heatmaps_say_which_loss_an_expert_weights(self, write_student, drawn, flags,
                                                               said):
        """A checkpoint of another program does not know."""
        args = vars(pretrain.parse_args(flags.split())) if flags else {}
        show(write_student("a", **args | dict(teacher=None, loss_block=None)))
        labels = [axis.get_ylabel().replace("\n", " ")
                  for axis in drawn["heatmaps.png"].axes[5::5]]
        expected = [f"expert {expert}" + f" ({loss})" * bool(loss)
                    for expert, loss in enumerate(said)]
        assert labels[:3] == expected

    def test_a_picture_says_if_the_loss_had_other_weights(self, write_student, drawn, capsys):
        for kind, said in (("uniform", 2), ("combine", 2), ("dispatch", 0)):
            numbers, = show(write_student(kind, loss_weights=kind))
            title, _ = filter(None, (axis.get_title() for axis in drawn["heatmaps.png"].axes))
            assert numbers["loss_weights"] == kind
            text = f"(the loss had {kind} weights)"
            assert (title + capsys.readouterr().out).count(text) == said


@pytest.fixture
def write_run(tmp_path):
    """write_run(name, **fields) -> the folder of a run of two epochs, with k-NN accuracies"""
    def write(name, **fields):
        own = tmp_path / name
        own.mkdir()
        first, second = (json.dumps({"step": 4 * epoch, "epoch": epoch, "lr": 1e-3} | {
            field: values[epoch - 1] for field, values in fields.items()}) for epoch in (1, 2))
        # a run that is killed leaves half of a line
        (own / "log.jsonl").write_text(f"{first}\n{second}\n{second[:9]}")
        rows = [(own / "epoch_0000.pt", 0.0, 10.0, "cls"), (own / "last.pt", 2.0, 30.0, "cls"),
                (own / "epoch_0001.pt", 1.0, 90.0, "cls"), ("last.pt", 2.0, 40.0, "mean"),
                (f"before_it_was_moved/{name}/epoch_0001.pt", 1.0, 20.0, "cls"),  # the last counts
                (tmp_path / "teacher" / "last.pt", 2.0, 5.0, "cls"), ("vit.pt", None, 6.0, "cls")]
        (own / "knn.jsonl").write_text("".join(
            json.dumps({"encoder": str(path), "epoch": epoch, "top1": top1, "pool": pool,
                        "data": "/a/photos/" if pool == "cls" else "shapes"}) + "\n"
            for path, epoch, top1, pool in rows))
        return str(own)
    return write


class TestPlot:
    def test_each_quantity_of_each_run_is_drawn_over_epochs(self, write_run, drawn, tmp_path):
        """The loss of pretraining is left out, because it is mostly entropies. A data set has the
        name of its folder's parent, too, because two may be called imagenet.
        """
        runs = [write_run("routed", loss=[-9, -8], token=[0.4, 0.2], token_ratio=[1, 0.9],
                          objective_weights=[[1], [1]], token_unweighted=[0.6, 0.3],
                          dispatch_cv=[[0.1, 7], [0.3, 7]], edge=[3, 2], edge_unweighted=[4, 3],
                          edge_ratio=[1, 1], entropy=[[1], [1]], token_spread=[1, 1]),
                write_run("tuned", loss=[2.3, 1.2], top1=[30, 40], miou=[5, 6]) + "/"]
        plot.main(plot.parse_args([*runs, "--out", str(tmp_path / "new")]))
        panels = {axis.get_title().split(" (")[0]:
                  [(line.get_color(), *zip(*line.get_data()))
                   for line in axis.lines if len(line.get_xdata())]
                  for axis in drawn["curves.png"].axes}
        assert panels == {      # an unweighted loss comes first
            "training loss": [("C1", (1, 2.3), (2, 1.2))],
            "token loss": [("C0", (1, 0.6), (2, 0.3)), ("C0", (1, 0.4), (2, 0.2))],
            "weighted / unweighted token loss": [("C0", (1, 1), (2, 0.9))],
            "variation of expert 0's weights": [("C0", (1, 0.1), (2, 0.3))],
            "learning rate": [("C0", (1, 1e-3), (2, 1e-3)), ("C1", (1, 1e-3), (2, 1e-3))],
            "k-NN, a/photos, [CLS]": [(color, (0, 10), (1, 20), (2, 30)) for color in ("C0", "C1")],
            "k-NN, shapes, mean patch": [(color, (2, 40)) for color in ("C0", "C1")],
            "edge": [("C0", (1, 4), (2, 3)), ("C0", (1, 3), (2, 2))],
            "validation accuracy": [("C1", (1, 30), (2, 40))],
            "mIoU of the validation images": [("C1", (1, 5), (2, 6))]}

    def test_each_field_of_a_log_has_its_panel_and_no_other(self):
        known = LINE | {"main", "auxiliary", "miou", "mean_accuracy", "pixel_accuracy", "top5"}
        assert plot.find_panels(known) == ["loss", "lr", "miou"]

    def test_a_notebooks_backend_does_not_matter(self, write_run, tmp_path):
        run = write_run("one", token=[0.4, 0.2])
        backend = os.environ | dict(MPLBACKEND="module://a_notebooks.backend")
        subprocess.run([sys.executable, HERE / "plot.py", run], env=backend, check=True)
        assert (tmp_path / "one" / "curves.png").exists()


@pytest.fixture
def comparison(photos, tmp_path, monkeypatch):
    """-> a function that runs compare.py on 4 classes of 8 photographs, under a small random
    teacher, and returns its rows
    """
    monkeypatch.setattr(students, "BATCH", 6)
    monkeypatch.setattr(students, "RAW_SIZE", 8)      # the probe of 3,072 pixels takes long
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def start(*words, teacher="timm/test_vit/random", **flags):
        argv = dict(data=photos, teacher=teacher, image_size=32, epochs=2, out=tmp_path / "out")
        argv = [(common.flag(name), str(value)) for name, value in (argv | flags).items()]
        args = compare.parse_args([*itertools.chain(*argv), *words])
        compare.main(args)
        return run.read_lines(args.rows)
    return start


class TestExperiments:
    @pytest.mark.parametrize("name, margin", (("test_efficientnet", 32), ("test_vit", 0)))
    def test_cached_tokens_are_the_teachers_without_the_margin(self, photos, tmp_path, monkeypatch,
                                                               name, margin):
        """A network with a map sees a margin; a vision transformer has a [CLS]."""
        monkeypatch.setattr(students, "BATCH", 6)
        students.prepare(tmp_path, photos, f"timm/{name}/random", 32, 29, 0)
        train, bank, test = students.open_sets(tmp_path)
        assert bank is train and len(train["labels"]) == 29 and len(test["labels"]) == 16
        teacher = build_frozen(f"timm/{name}/random", 10 if margin else 8)
        dataset = data.open_images(photos, "train", 32)
        for i in (0, 17, 28):
            image, label = dataset[i * 32 // 29]
            side = min(image.shape[1:])
            top, left = ((length - side) // 2 for length in image.shape[1:])
            image = image[:, top:top + side, left:left + side]
            assert train["labels"][i] == label
            small = F.interpolate(image[None] / 255, 32, mode="bicubic", antialias=True)[0]
            assert np.abs(255 * small.numpy() - train["images"][i]).max() <= 1.01 + 255 * (
                small.numpy().min() < 0 or small.numpy().max() > 1)
            size = teacher.image_size - 2 * margin
            large = F.interpolate(image[None] / 255, size, mode="bicubic", antialias=True)[0]
            large = np.pad(large, ((0, 0), (margin, margin), (margin, margin)), mode="reflect")
            expected = teacher(torch.from_numpy(large)[None])[0]
            if margin:
                expected = torch.stack([expected[1 + 10 * y + x]
                                        for y in range(1, 9) for x in range(1, 9)])
            found = torch.from_numpy(train["tokens"][i]).float()
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            pooled = found.mean(0) if margin else found[0]
            assert torch.allclose(students.pool(found[None])[0], pooled, atol=1e-6)

    def test_training_bank_and_test_images_have_none_in_common(self, photos, monkeypatch):
        monkeypatch.setattr(students, "BATCH", 6)
        sets = students.list_images(photos, images=7, bank=5)
        assert [len(each) for each in sets] == [7, 5, 20 + 16]
        places = [(len(dataset), i) for each in sets for dataset, i in each]
        assert sorted(places) == [(16, i) for i in range(16)] + [(32, i) for i in range(32)]
        for each in sets[:2]:      # of all classes
            assert {dataset[i][1] for dataset, i in each} == {0, 1, 2, 3}
        sets = students.list_images(photos, images=7, bank=0)
        assert [len(each) for each in sets] == [7, 0, 16]      # val/ alone
        with pytest.raises(common.UserError, match="--bank 27"):
            students.list_images(photos, images=7, bank=27)

    def test_a_choice_is_made_on_a_fourth_of_the_training_images(self, photos, tmp_path,
                                                                 monkeypatch):
        monkeypatch.setattr(students, "BATCH", 6)
        students.prepare(tmp_path, photos, "timm/test_vit/random", 32, 30, 2)
        everything, _, _ = students.open_sets(tmp_path)
        train, bank, test = students.open_sets(tmp_path, held_out=True)
        held = [i for i in range(30) if i % 4 == 0]
        for name in ("images", "labels", "tokens"):
            assert np.array_equal(test[name], everything[name][held])
            assert np.array_equal(train[name], np.delete(everything[name], held, axis=0))
        assert bank is train

    @pytest.mark.parametrize("cls", (0, 1))
    def test_a_batch_flips_images_with_their_tokens(self, cls):
        drawn = np.random.default_rng(1)
        train = dict(images=drawn.integers(256, size=(70, 3, 24, 24), dtype=np.uint8),
                     tokens=drawn.normal(size=(70, cls + 64, 5)).astype(np.float16))
        index = np.array([5, 3, 60, 41, 17, 28])
        images, targets, mask, ids_keep = students.read_batch(train, drawn, index)
        flipped = []
        for b, i in enumerate(sorted(index)):
            image, tokens = torch.from_numpy(train["images"][i]) / 255, train["tokens"][i]
            flipped.append(torch.equal(images[b], image.flip(2)))
            assert flipped[-1] or torch.equal(images[b], image)
            for y, x in itertools.product(range(8), range(8)):
                at = cls + 8 * y + (7 - x if flipped[-1] else x)
                assert np.array_equal(targets[b, 1 + 8 * y + x], tokens[at].astype(np.float32))
            first = torch.from_numpy(tokens[0]).float() if cls else targets[b, 1:].mean(0)
            assert torch.allclose(targets[b, 0], first, atol=1e-6)
            assert mask[b].sum() == 25
            assert ids_keep[b].tolist() == (~mask[b]).nonzero()[:, 0].tolist()
        assert 0 < sum(flipped) < 6

    def test_each_arm_is_a_row_that_is_trained_once(self, comparison, tmp_path, monkeypatch):
        """The weights of `fixed` are the mean by position of routed students with seeds 0 to 2."""
        trained = spy(monkeypatch, students, "train")
        comparison("--pairs", "--arms", "fixed", "routed", "--seeds", "0", "1", "2", bank=9,
                   images=20)
        words = ["--seeds", "3", "--arms", "lent", "loss, lambda 0.5", "fixed"]
        for _ in range(2):
            rows = comparison(*words, bank=9, images=20)
        names = [(row["arm"], row["seed"]) for row in rows]
        assert names == [("chance", None), ("raw pixels", None), ("teacher", None)] + [
            (arm, seed) for seed in range(3) for arm in ("untrained", "routed")] + [
            ("fixed", seed) for seed in range(3)] + [
            (arm, 3) for arm in ("untrained", "routed", "uniform", "detached", "none",
                                 "loss, lambda 0.5", "lent", "fixed")]
        assert len(trained) == 9 + 8 + 1      # the routed student with seed 4 lends
        by_name = dict(zip(names, rows))
        for call_ in trained:
            if call_.args[0]["weights"] == "fixed":
                expected = np.mean([by_name["routed", seed]["positions"] for seed in range(3)],
                                   axis=0)
                assert np.allclose(call_.kwargs["positions"], expected)
        _, bank, test = students.open_sets(tmp_path / "out")
        often = np.bincount(bank["labels"]).argmax()
        assert rows[0]["knn"] == pytest.approx(100 * (test["labels"] == often).mean(), abs=1e-3)
        for row in rows:
            bits = np.load(compare.find_file(argparse.Namespace(out=tmp_path / "out"), row, "npy"))
            right = np.unpackbits(bits, axis=1, count=3 + 16)
            assert 100 * right.mean(1) == pytest.approx([row["probe"], row["knn"]], abs=1e-3)
            assert ("token" in row) == (row["seed"] is not None and row["arm"] != "untrained")
            assert (row["images"], row["bank"], row["test"]) == (20, 9, 3 + 16)
            assert ("positions" in row) == (row["arm"] == "routed" and row["seed"] < 3)
            assert row["seed"] is None or row == row | compare.find_setting(row["arm"])
        assert by_name["loss, lambda 0.5", 3]["lambda_"] == 0.5
        assert by_name["none", 3]["parameters"] < by_name["uniform", 3]["parameters"]

    def test_rows_of_other_images_or_teachers_do_not_mix(self, comparison, tmp_path):
        words = ["--pairs", "--seeds", "3"]
        comparison(*words)
        with pytest.raises(common.UserError, match="images was 4000, is 20"):
            comparison(*words, images=20)
        epochs = [row["epochs"] for row in comparison(*words, epochs=3)]
        assert epochs == [2] * 4 + [3] * 4      # other students
        assert len(list((tmp_path / "out" / "rows").glob("*.npy"))) == 8
        tokens = np.load(tmp_path / "out" / "tokens.npy")
        np.save(tmp_path / "out" / "tokens.npy", 1.01 * tokens)
        with pytest.raises(common.UserError, match="rows.jsonl"):
            comparison(*words)
        tokens[::7] = np.nextafter(tokens[::7], np.float16(np.inf))      # as on another CPU
        np.save(tmp_path / "out" / "tokens.npy", tokens)
        assert len(comparison(*words, epochs=3)) == 8
        labels = np.load(tmp_path / "out" / "labels.npy")
        np.save(tmp_path / "out" / "labels.npy", labels[::-1])
        with pytest.raises(common.UserError, match="rows.jsonl"):
            comparison(*words)
        rows = dict(rows=tmp_path / "out" / "rows.jsonl", out=tmp_path / "other")
        for changed in (dict(images=20), dict(teacher="timm/test_vit2/random")):
            with pytest.raises(common.UserError, match="rows.jsonl"):
                comparison(*words, **rows, **changed)
            shutil.rmtree(tmp_path / "other")

    def test_other_processes_measure_what_one_measures(self, comparison, tmp_path, monkeypatch):
        """A student depends on nothing that a process did before."""
        words = ["--pairs", "--arms", "none", "--seeds", "3"]
        one = comparison(*words)

        class Pool(multiprocessing.pool.ThreadPool):
            def imap_unordered(self, function, keys):
                return super().imap_unordered(pickle.loads(pickle.dumps(function)), keys[::-1])
        monkeypatch.setattr(multiprocessing, "get_context", lambda kind: Mock(
            Pool=lambda *_: Pool(1)))
        two = comparison(*words, processes=2, rows=tmp_path / "two.jsonl")
        assert one == two[::-1] and len(one) == 5

    def test_references_are_what_they_say(self, comparison, photos, tmp_path, monkeypatch):
        """A test image that is a labeled one, too, is counted."""
        photos = Path(shutil.copytree(photos, tmp_path / "photos"))
        shutil.copy(photos / "train/class_2/5.jpg", photos / "val/class_2/1.jpg")
        monkeypatch.setattr(students, "TEACHER_IMAGES", 7)
        rows = {row["arm"]: row for row in comparison(
            "--pairs", "--seeds", "3", data=photos, teacher="timm/test_efficientnet/random")}
        train, _, test = students.open_sets(tmp_path / "out")
        assert rows["chance"]["probe"] == rows["chance"]["knn"] == 25
        assert rows["raw pixels"]["duplicates"] == 1 / 16
        teacher = students.Teacher("timm/test_efficientnet/random")
        features = [torch.stack([teacher([image])[0].mean(0) for image, _ in data.open_images(
            str(photos), split, 32)]) for split in ("train", "val")]
        pixels = [torch.from_numpy(each["images"]).unflatten(2, (8, 4)).unflatten(4, (8, 4))
                  .float().mean((3, 5)).flatten(1) / 255 for each in (train, test)]
        y, truth = (torch.from_numpy(each["labels"]) for each in (train, test))
        seven = [0, 2, 4, 6, 9, 11, 13]      # of 16
        for name, (x, test_x), seen in (("teacher", features, seven),
                                        ("raw pixels", pixels, slice(None))):
            voted = knn.classify(F.normalize(test_x), F.normalize(x), y, 4, 20, 0.07)
            expected = 100 * (voted == truth)[seen].double().mean().item()
            assert rows[name]["knn"] == pytest.approx(expected, abs=1e-3)

    def test_the_arms_differ_as_they_say(self, comparison, tmp_path, monkeypatch):
        """Equal weights at all positions are no weights, and a router's rate is its own."""
        comparison("--pairs", "--seeds", "3")
        bank, _, _ = students.open_sets(tmp_path / "out")

        def train(arm, **more):
            return students.train(compare.find_setting(arm), bank, 1, 5, **more)[0].state_dict()
        uniform, router = train("uniform"), "encoder.blocks.3.mlp.router.phi"
        same = train("fixed", positions=torch.full((64,), 0.3))
        torch.testing.assert_close(same, uniform)
        other = train("fixed", positions=torch.linspace(0.5, 1.5, 64))
        assert not torch.allclose(other["head.weight"], uniform["head.weight"], atol=1e-5)
        torch.manual_seed(5)
        start = model.build_vit("vit_nano", image_size=32, patch_size=4, experts=2).state_dict()
        moved = [(train(f"uniform, rate x {rate}")[router] - start[router[8:]]).abs().mean()
                 for rate in (1.0, 10.0)]
        assert moved[1] > 5 * moved[0]
        arms = ("uniform", "uniform, w_cls 1.6", "detached", "routed", "routed, lambda 5")
        trained = {arm: train(arm).values() for arm in arms}
        for one, two in itertools.combinations(arms, 2):
            assert not all(map(torch.equal, trained[one], trained[two])), (one, two)

    def test_lent_weights_are_another_students_and_loss_weights_its_own(self, comparison, tmp_path,
                                                                        monkeypatch):
        comparison("--pairs", "--seeds", "3")
        bank, _, _ = students.open_sets(tmp_path / "out")
        torch.manual_seed(1)
        lender = model.build_vit("vit_nano", image_size=32, patch_size=4, experts=2).eval()
        read = students.read_batch
        seen = []
        monkeypatch.setattr(students, "read_batch", lambda *args: (
            seen.append(read(*args)), seen[-1])[1])
        used = spy(monkeypatch, students, "weighted_mean")
        setting = compare.find_setting("lent") | dict(router_rate=0.0)
        students.train(setting, bank, 1, 5, lender=lender)
        for (images, _, _, ids_keep), call_ in zip(seen, used, strict=True):
            _, routing = lender(normalized(images), ids_keep)
            expected = routing[3].dispatch[:, 1:, 0]
            assert torch.allclose(call_.args[1], expected, atol=1e-6)
            assert not call_.args[1].requires_grad
        used.clear()
        students.train(compare.find_setting("loss, lambda 0.3"), bank, 1, 5)
        for call_ in used:
            loss, weight = (x.detach().double().numpy() for x in call_.args)
            expected = np.exp(-loss / 0.3)
            expected /= expected.sum(1, keepdims=True)
            assert np.allclose(weight, expected, atol=1e-5)
            assert call_.args[0].requires_grad and not call_.args[1].requires_grad

    def test_a_student_is_trained_as_by_a_plain_loop(self, monkeypatch):
        """Its row has the means of the last epoch, of expert 0."""
        monkeypatch.setattr(students, "BATCH", 6)
        drawn, seen, indices = np.random.default_rng(4), [], []
        bank = dict(images=drawn.integers(256, size=(14, 3, 24, 24), dtype=np.uint8),
                    tokens=drawn.normal(size=(14, 64, 5)).astype(np.float16))
        read = students.read_batch
        monkeypatch.setattr(students, "read_batch", lambda bank, rng, index: (
            indices.append(set(index.tolist())), seen.append(read(bank, rng, index)), seen[-1])[2])
        found, means = students.train(compare.find_setting("routed, lambda 0.5, w_cls 9"), bank,
                                      3, 5)
        assert [len(indices[at] | indices[at + 1]) for at in (0, 2, 4)] == [12] * 3
        assert indices[0] != indices[2] != indices[4]      # another order in each epoch
        torch.manual_seed(5)
        student = model.Explore(model.build_vit("vit_nano", image_size=24, patch_size=3,
                                                experts=2), 5)
        plain = Plain(argparse.Namespace(weight_decay=0.05, clip_grad=3.0), student, None, None,
                      betas=(0.9, 0.95))
        for step, (images, targets, mask, ids_keep) in enumerate(seen):
            pred = student(normalized(images), mask, ids_keep)
            (token, cls), regularizer, metrics = losses.explore_losses(
                pred, targets, images, mask, lambdas=torch.tensor([0.5, 0.0]))
            (token + 9 * cls + regularizer).backward()
            plain.rows.append({name: np.ravel(x)[0] for name, x in metrics.items()})
            fall = (1 + math.cos(math.pi * (step - 1) / 4)) / 2      # after the first epoch
            plain.update((1e-3, 2e-3)[step] if step < 2 else 1e-6 + (2e-3 - 1e-6) * fall)
        norms = [row.pop("grad_norm") for row in plain.rows]
        assert max(norms) > 6
        for name, value in means.items():
            expected = np.mean([row[name] for row in plain.rows[4:]])
            assert value == pytest.approx(expected, rel=1e-4), name
        ends = student.state_dict()
        distance, way = (math.sqrt(sum((ends[name] - other[name]).square().sum()
                                       for name in ends if "qkv.bias" not in name))
                         for other in (found.state_dict(), plain.start))
        assert distance < 0.001 * way      # the gradients of keys' biases are but rounding

    def test_fixed_weights_are_those_of_the_first_three_seeds(self):
        key = dict(epochs=1, lambda_=0.1, cls_weight=0.4)
        rows = [key | dict(arm="routed", seed=seed, positions=[seed / 2]) for seed in (0, 1, 2, 3)]
        rows += [row | dict(cls_weight=1.6, positions=[9.0]) for row in rows]
        fixed = key | dict(arm="fixed", seed=4, weights="fixed")
        assert compare.find_positions(rows, fixed).tolist() == [0.5]
        with pytest.raises(common.UserError, match="no routed student with seed 1"):
            compare.find_positions([rows[0], *rows[2:]], fixed)

    def test_a_saved_student_is_a_checkpoint(self, comparison, tmp_path):
        file = tmp_path / "student.pt"
        comparison("--arms", "routed, lambda 0.5", "--seeds", "3", save=file)
        student = checkpoints.load_student(file)
        flags = checkpoints.load_checkpoint(file)["args"]
        assert flags["loss_weights"] == "dispatch" and flags["entropy_weight"] == [0.5, 0.0]
        comparison("--pairs", "--arms", "routed, lambda 0.5", "--seeds", "3")
        whole, = (tmp_path / "out" / "rows").glob("routed*.pt")
        whole = checkpoints.load_student(whole)
        for (name, x), y in zip(student.state_dict().items(), whole.state_dict().values()):
            assert torch.equal(x, y.half().float()), name
        assert file.stat().st_size < 0.6 * 4 * sum(p.numel() for p in student.parameters())

    def test_without_a_network_a_teacher_is_trained(self, comparison, tmp_path, monkeypatch,
                                                    capsys):
        build = encoders.build_frozen

        def offline(name, grid=None):
            if name == compare.TEACHER:
                raise common.UserError(f"{name}: no network")
            return build(name, grid)
        monkeypatch.setattr(compare, "build_frozen", offline)
        parse = finetune.parse_args
        monkeypatch.setattr(finetune, "parse_args", lambda argv: parse(
            [*argv, "--batch-size", "8", "--max-steps", "1", *QUICK]))
        rows = comparison("--pairs", "--seeds", "3", teacher="")
        out, err = capsys.readouterr()
        assert "no network" in err and "tokens of" in out and "teacher/last.pt" in out
        assert (tmp_path / "out" / "teacher" / "last.pt").exists() and len(rows) == 4

    def test_the_closed_form_probe_is_ridge_regression(self):
        rng = np.random.default_rng(2)
        y = rng.integers(3, size=61)
        x = (rng.normal(size=(61, 20)) + 1.2 * np.eye(3, 20)[y]) * rng.uniform(1, 9, 20) + 4
        queries = rng.normal(size=(50, 20)) * 5 + 4
        z, q = ((each - x.mean(0)) / x.std(0, ddof=1) for each in (x, queries))
        z, q = (np.column_stack([each, np.ones(len(each))]) for each in (z, q))

        def solve(z, y, penalty):      # as least squares with more rows
            more = np.sqrt(penalty * len(z)) * np.eye(21)
            target = np.vstack([np.eye(3)[y], np.zeros((21, 3))])
            return np.linalg.lstsq(np.vstack([z, more]), target, rcond=None)[0]
        held = np.arange(61) % 4 == 0
        right = {}
        for penalty in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0):
            found = (z[held] @ solve(z[~held], y[~held], penalty)).argmax(1)
            right[penalty] = (found == y[held]).sum()
        assert len(set(right.values())) > 1
        expected = (q @ solve(z, y, max(right, key=right.get))).argmax(1)
        found = students.probe(*map(torch.from_numpy, (x, y, queries)), 3)
        assert np.array_equal(found, expected)

    def test_p_values_and_intervals_are_students(self):
        """Student's t distribution, from a printed table"""
        for free, t in ((1, 12.706), (2, 4.303), (5, 2.571), (11, 2.201), (19, 2.093)):
            assert compare.quantile(free) == pytest.approx(t, abs=2e-3)
        for t, p in ((1.796, 0.1), (2.201, 0.05), (3.106, 0.01)):
            assert compare.two_sided(t, 11) == pytest.approx(p, rel=2e-3)
        values = np.array([1.0, 2.0, 4.0])
        assert compare.half_width(values) == pytest.approx(3.795, abs=1e-3)
        assert compare.p_value(values) == pytest.approx(0.1181, abs=1e-3)      # t = 2.646
        assert compare.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    @pytest.mark.parametrize("spread, low, high", ((1.0, 1.5, 9.0), (0.0, 1.0, 1.1)))
    def test_intervals_hold_for_other_seeds_and_other_images(self, tmp_path, spread, low, high):
        """Where all images are equally hard for an arm, other images are no other result."""
        rng = np.random.default_rng(3)
        args = compare.parse_args(["--data", "x", "--out", str(tmp_path)])
        args.pairs = [["a", "b"]]
        (tmp_path / "rows").mkdir()
        hits, wider = [], []
        for _ in range(80):      # both arms are right on half of all images
            shared = 0.5 + spread * (rng.uniform(-0.5, 0.5, (2, 400)) + 0.1 * rng.normal(
                size=(2, 400)))
            rows = []
            for arm, seed in itertools.product((0, 1), range(5)):
                right = shared[arm] + 0.2 * rng.normal(size=(1, 400)) > 0.5
                rows.append(dict(arm="ab"[arm], seed=seed, epochs=1, images=2, test=400,
                                 probe=100 * right.mean(), knn=100 * right.mean()))
                np.save(compare.find_file(args, rows[-1], "npy"),
                        np.packbits(np.repeat(right, 2, axis=0), axis=1))
            found, _ = compare.compare_pairs(args, rows)
            hits.append(abs(found["mean"]) < found["margin"])
            by_seeds = compare.half_width(compare.paired_differences(rows, "a", "b", "probe"))
            wider.append(found["margin"] / by_seeds)
            assert found["images"]
        assert np.mean(hits) > 0.93 and low <= np.median(wider) < high
        os.remove(compare.find_file(args, rows[0], "npy"))
        found, _ = compare.compare_pairs(args, rows)
        assert not found["images"] and found["margin"] == by_seeds

    def test_other_images_widen_the_intervals_of_the_rows_that_they_belong_to(self, tmp_path,
                                                                              capsys):
        """With three seeds, Student's p is 1 - t / sqrt(2 + t^2)."""
        rng = np.random.default_rng(5)
        settings = "--data x --seeds 3 4 5 --print --out", str(tmp_path)
        args = compare.parse_args([*" ".join(settings).split(), "--pairs", "routed - uniform"])
        (tmp_path / "rows").mkdir()
        rows, right = [], {}
        for arm, chance in (("routed", 0.7), ("uniform", 0.5)):      # seeds differ in 2 images
            right[arm] = np.repeat(rng.random((1, 2, 37)) < chance, 3, axis=0)
            for seed in range(3):
                right[arm][seed, 0, seed:seed + 2] ^= True
                right[arm][seed, 1, 2 * seed:2 * seed + 3] ^= True
                probe, neighbors = 100 * right[arm][seed].mean(1)
                rows.append(common.rounded(compare.find_setting(arm) | dict(
                    arm=arm, seed=3 + seed, epochs=16, images=4000, bank=9, test=37,
                    probe=probe, knn=neighbors)))
                np.save(compare.find_file(args, rows[-1], "npy"),
                        np.packbits(right[arm][seed], axis=1))
        seen = right["routed"].astype(int) - right["uniform"]      # [seeds, measures, images]
        expected = []
        for each in 100 * np.moveaxis(seen, 1, 0):
            by_seeds = each.mean(1).var(ddof=1) / 3
            noise = sum(np.var([each[s, i] - each[s].mean() for s in range(3)], ddof=1) / 3
                        for i in range(37)) / 37
            error = math.sqrt(by_seeds + (each.mean(0).var(ddof=1) - noise) / 37)
            t = abs(each.mean()) / error
            expected.append([4.303 * error, 1 - t / math.sqrt(2 + t * t)])
        few, many = sorted(p for _, p in expected)
        corrected = {few: min(1, 2 * few), many: max(min(1, 2 * few), many)}

        def said(rows):
            write_text(args.rows, "".join(json.dumps(row) + "\n" for row in rows))
            compare.main(args)
            numbers = r"± ([\d.]+), 3 seeds, p ([\d.]+), ([\d.]+)"
            return [[*map(float, found)] for found in re.findall(numbers, capsys.readouterr().out)]
        for found, (width, p) in zip(said(rows), expected, strict=True):
            assert found == pytest.approx([width, p, corrected[p]], abs=0.01)
        assert compare.differing(compare.compare_pairs(args, rows)) == []
        others = [row | dict(probe=row["probe"] + (row["arm"] == "routed")) for row in rows]
        for (found, *_), (width, _) in zip(said(others), expected, strict=True):
            assert found < width - 0.1      # the answers are not of these rows
        found = compare.compare_pairs(args, others)
        assert min(each["corrected_p"] for each in found) < 0.05 < 2 * few

    def test_a_student_is_measured_by_the_cls_of_its_normalized_images(self):
        images = np.random.default_rng(6).integers(256, size=(253, 3, 16, 16), dtype=np.uint8)
        vit = nano(image_size=16, patch_size=8).eval()
        with torch.no_grad():
            expected = vit(normalized(torch.from_numpy(images) / 255))[0][:, 0]
        assert torch.allclose(students.find_cls(vit, images), expected, atol=1e-5)

    def test_a_checksum_is_that_of_all_bytes(self):
        x, y = (np.random.default_rng(7).normal(size=(count, 3)) for count in (1203, 2))
        assert students.checksum(x, y) == f"{zlib.crc32(x.tobytes() + y.tobytes()):08x}"

    def test_a_verdict_is_of_the_first_pair_and_names_what_differs(self, monkeypatch):
        args = compare.parse_args("--data x --pairs".split() + ["routed - uniform",
                                                                "routed - none"])
        found = [dict(name=f"{other} {measure}", pair=["routed", other], mean=mean, margin=1.0,
                      corrected_p=p, images=True)
                 for other, measure, mean, p in (
                     ("uniform", "probe", -2.0, 0.2), ("none", "probe", 6.0, 0.01),
                     ("uniform", "k-NN", 0.5, 0.2), ("none", "k-NN", 0.5, 0.2))]

        def said(obstacle=""):
            monkeypatch.setattr(compare, "find_obstacle", lambda *_: obstacle)
            return compare.find_verdict(args, [], found)
        assert "No difference between routed and uniform" in said() and "up to 3.0 points" in said()
        assert "uniform probe" not in said() and "none probe (+6.00)" in said()
        assert said("lambda").startswith("This run cannot tell routed from uniform")
        assert "none probe (+6.00)" in said("lambda") and "none probe" not in said("rows")
        found[2]["corrected_p"] = 0.04
        assert "routed differs from uniform" in said() and "uniform k-NN (+0.50)" in said()

    @pytest.mark.parametrize("margins, obstacle", (
        ((1.71, 0.66), "intervals"), ((1.71, 0.64), ""), ((1.69, 0.66), "")))
    def test_intervals_wider_than_the_papers_gains_are_no_answer(self, monkeypatch, margins,
                                                                 obstacle):
        """The paper gains 3.4 points in the probe and 1.3 in k-NN."""
        monkeypatch.setattr(compare, "have_learned", lambda *_: True)
        args = compare.parse_args("--data x --seeds 3 4 --pairs".split() + ["routed - uniform"])
        rows = [dict(arm=arm, seed=seed, test=3000, probe=at, knn=at, dispatch_cv=cv,
                     token_spread=0.1, lambda_=0.1)
                for arm, at, cv in (("teacher", 80.0, 0.0), ("untrained", 30.0, 0.0),
                                    ("routed", 50.0, 0.5), ("uniform", 50.0, 0.1))
                for seed in (3, 4)]
        found = [dict(pair=args.pairs[0], measure=measure, mean=0.5, margin=margin, images=True,
                      corrected_p=0.2) for measure, margin in zip(("probe", "knn"), margins)]
        assert compare.find_obstacle(args, rows, found) == obstacle
        found[1]["corrected_p"] = 0.04
        assert compare.find_obstacle(args, rows, found) == ""
        assert compare.find_obstacle(args, rows[:-1], found) == "rows"

    def test_the_tables_pair_arms_by_seed(self, tmp_path, capsys):
        probes = {"none": {3: 40.0, 4: 42.0, 5: 47.0}, "uniform, lambda 0.5": {3: 40.5, 4: 43.0},
                  "routed": {3: 41.0, 4: 44.0, 5: 50.0}}
        rows = [dict(arm="teacher", seed=None, epochs=16, images=4000, probe=70.0, knn=60.0)] + [
            compare.find_setting(arm) | dict(arm=arm, seed=seed, epochs=16, images=4000,
                                             probe=probe, knn=2 * probe)
            for arm, found in probes.items() for seed, probe in found.items()]
        rows += [rows[-1] | dict(seed=9, probe=0.0), rows[-1] | dict(lambda_=7.0, probe=0.0)]
        write_text(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        compare.main(compare.parse_args(["--data", "x", "--print", "--out", str(tmp_path),
                                         "--pairs", "routed - none", "routed - uniform"]))
        out = capsys.readouterr().out
        assert "| to none | to uniform, lambda 0.5 | k-NN" in out
        cells = {line.split(" | ")[0]: line.strip("| ").split(" | ")[1:]
                 for line in out.splitlines() if line.startswith("|")}
        assert cells["| none (3)"] == ["", "43.0", "", "-0.75 ± 3.18", "86.0", "-1.50 ± 6.35"]
        assert cells["| uniform, lambda 0.5 (2)"][1:4] == ["41.8", "+0.75 ± 3.18", ""]
        assert cells["| routed (3)"][1:3] == ["45.0", "+2.00 ± 2.48"]
        assert cells["| teacher"][:2] == ["", "70.0"]
        assert "routed minus none, linear probe: +2.00 ± 2.48, 3 seeds, p 0.074, 0.148" in out

    @pytest.mark.parametrize("obstacle, changes", (
        ("", {}), ("rows", dict(seeds=1)), ("rows", dict(other="none")),
        ("teacher", dict(teacher=31.0)), ("duplicates", dict(teacher=31.0, duplicates=0.6)),
        ("students", dict(untrained=61.0)), ("students", dict(untrained=60.0, noise=1.0)),
        ("lambda", dict(cv=0.03, lambda_=1.5)), ("length", dict(cv=0.03)),
        ("lambda", dict(uniform_cv=0.2)),
        ("intervals", dict(noise=9.0, test=400))))
    def test_a_comparison_says_what_keeps_it_from_an_answer(self, tmp_path, obstacle, changes):
        is_ = dict(seeds=4, teacher=80.0, untrained=30.0, cv=0.25, uniform_cv=0.04, noise=0.1,
                   lambda_=0.1, test=5000, other="uniform", duplicates=0.4) | changes
        rows = [dict(arm="teacher", seed=None, probe=is_["teacher"], knn=is_["teacher"],
                     duplicates=is_["duplicates"])]
        for arm, mean, cv in (("untrained", is_["untrained"], 0.0), ("routed", 60.5, is_["cv"]),
                              (is_["other"], 60.0, is_["uniform_cv"])):
            for seed in range(is_["seeds"]):
                accuracy = mean + is_["noise"] * (arm == "routed") * (-1, 1, -1, 1)[seed]
                rows.append(dict(arm=arm, seed=seed, probe=accuracy, knn=accuracy, dispatch_cv=cv,
                                 lambda_=is_["lambda_"], token_spread=0.05))
        rows = [dict(epochs=1, images=2, test=is_["test"]) | row for row in rows]
        args = compare.parse_args(["--data", "x", "--out", str(tmp_path), "--pairs",
                                   "routed - uniform", f"routed - {is_['other']}", "--seeds",
                                   *map(str, range(is_["seeds"]))])
        found = compare.compare_pairs(args, rows)
        assert compare.find_obstacle(args, rows, found) == obstacle
        verdict = compare.find_verdict(args, rows, found)
        assert verdict.startswith("This run cannot tell" if obstacle else "After the correction, "
                                  "routed differs")
        assert obstacle or ("routed minus uniform, k-NN (+0.50)" in verdict
                            and "other seeds on the same test images" in verdict)

    def test_the_example_has_the_features_that_it_was_saved_with(self):
        file = HERE / "example" / "student.pt"
        encoder = checkpoints.load_encoder(file).eval()
        image = Shapes("val", 32)[5][0]
        tokens, routing = encoder(normalized(image[None] / 255))
        expected = torch.tensor([1.2824, 0.1054, 0.2952, -0.1083, 0.1872])
        assert torch.allclose(tokens[0, 0, :5], expected, atol=2e-3)
        expected = torch.tensor([0.8631, 0.8749, 0.8841])
        assert torch.allclose(65 * routing[3].dispatch[0, 1:4, 0], expected, atol=2e-3)
        assert file.stat().st_size < 2.5e6

    def test_a_missing_folder_is_no_reason_to_fetch_a_teacher(self, tmp_path, monkeypatch):
        monkeypatch.setattr(compare, "find_teacher", lambda args: pytest.fail("fetched"))
        with pytest.raises(common.UserError, match="nowhere"):
            compare.main(compare.parse_args(["--data", str(tmp_path / "nowhere"),
                                             "--out", str(tmp_path / "out")]))

    @pytest.mark.parametrize("seed, lender", ((0, 1), (1, 2), (2, 1), (15, 16), (16, 15)))
    def test_two_seeds_lend_to_each_other(self, tmp_path, monkeypatch, seed, lender):
        args = compare.parse_args(["--data", "x", "--out", str(tmp_path)])
        key = dict(arm="lent, lambda 0.5", weights="lent", seed=seed, epochs=3, images=7)
        trained = []
        monkeypatch.setattr(compare, "train_student", lambda *given: trained.append(given[1]))
        monkeypatch.setattr(compare, "load_encoder", lambda file: file)
        expected = key | dict(arm="routed, lambda 0.5", weights="dispatch", seed=lender)
        assert compare.lend(args, {}, key) == compare.find_file(args, expected, "pt")
        assert trained == [expected]

    def test_arms_are_names_and_settings(self):
        setting = compare.find_setting("routed, lambda 0.5, rate x 10, w_cls 2")
        assert setting == compare.DEFAULTS | dict(lambda_=0.5, router_rate=10.0, cls_weight=2.0)
        for wrong in (["--arms", "route"], ["--arms", "routed, lambda"], ["--pairs", "routed"],
                      ["--arms", "routed, rate 3"], ["--image-size", "60"], ["--save", "x.pt"]):
            with pytest.raises(SystemExit):
                compare.parse_args(["--data", "x", *wrong])

    def test_the_papers_tables_stand_beside_what_runs_have_measured(self, stage, teacher,
                                                                    photos, scenes, tmp_path,
                                                                    monkeypatch, capsys):
        """The runs of a page's rows are small."""
        small = f"--data {photos} --epochs 2 --warmup-epochs 1 --batch-size 8 {' '.join(QUICK)}"
        toy = f"{' '.join(TOY)} --teacher {teacher} --save-every 1"
        scene = (f"--data {scenes} --iterations 8 --warmup-iterations 1 --batch-size 4 "
                 f"--save-every 4 --classes 11 --crop-size 32 --width 8 {' '.join(QUICK)}")
        sizes = {"pretrain.py": f"{toy} {small}", "linprobe.py": small, "finetune.py": small,
                 "segment.py": scene}

        def find_command(row, find=results.find_command):
            script, *flags = find(row)
            return [script, *sizes[script].split(),
                    *(flag.replace("epoch_0300", "epoch_0002") for flag in flags)]
        monkeypatch.setattr(results, "find_command", find_command)
        rows = ["pretrain tc2   # 75.4", "pretrain tc0 --experts 0   # 75.7",
                "pretrain tc3   # Figure 3", "pretrain tc4 --seed 1   # 12.5, collapsed",
                "probe tc2 linear   # 79.60", "finetune tc2 fr exd   # 84.1",
                "segment tc2 none   # 52.5", "probe tc0 linear   # 76.2"]
        page = ("## Commands\n\n```bash\nexport X=1\n```\n\n### k-NN\n\nTable 3, and more:\n\n"
                "```bash\n" + "\n".join(rows[:4]) + "\n```\n\n### Others: Table 4\n\nText.\n\n"
                "```bash\n" + "\n".join(rows[4:]) + "\nfinetune tc9 none\n```\n")
        found = results.read_rows(page)
        assert [f"{row['row']}   # {row['paper']}" for row in found] == rows
        tables = [row["table"] for row in found]
        assert tables == ["Table 3, and more"] * 4 + ["Others: Table 4"] * 4
        monkeypatch.chdir(tmp_path)
        best = {}
        for i in (0, 1, 3, 4, 5, 6):      # the others have not run
            script, *flags = results.find_command(found[i]["row"])
            flags += {1: ["--lr", "0.1"], 3: ["--max-steps", "5"]}.get(i, [])
            name = script.removesuffix(".py").replace("linprobe", "linear")
            scores, _, log = play(name, flags)
            best[i] = scores and max(line.get("top1", line.get("miou", 0)) for line in log)
        epochs = [f"runs/tc2/epoch_000{epoch}.pt" for epoch in (0, 1, 2)]
        knns = knn.main(knn.parse_args([*epochs, teacher, "--data", photos, *QUICK]))
        (tmp_path / "other").symlink_to(photos)
        for other in (["--pool", "mean"], ["-k", "1"], ["--temperature", "1"], ["--data", "other"]):
            knn.main(knn.parse_args([*epochs, "--data", photos, *QUICK, *other]))
        with open("runs/tc2/knn.jsonl") as file:      # as if the others were better
            lines = [json.loads(line) for line in file]
        Path("runs/tc2/knn.jsonl").write_text("".join(
            json.dumps(line | ({"top1": 99.0} if i > 3 else {})) + "\n"
            for i, line in enumerate(lines)))
        (tmp_path / "runs").rename(tmp_path / "moved")
        best[0] = max(knns[:3])
        monkeypatch.setattr(results, "read_rows", lambda text: [dict(row) for row in found])
        others = {"table": "Table 99", "row": "pretrain tc9", "paper": "1"}
        found.append(others)
        *table, _ = results.main(results.parse_args(["moved", "--markdown"]))
        assert [row["measured"] for row in table] == [best.get(i) for i in range(8)]
        assert table[0]["difference"] == pytest.approx(best[0] - 75.4)
        assert table[0]["note"] == f"best at epoch {max(i for i in range(3) if knns[i] == best[0])}"
        assert table[1]["note"] == "other flags: lr 0.1"
        assert table[3]["note"] == "epoch 1.25 of 2"
        assert "best at epoch" in table[5]["note"]
        assert table[5]["difference"] == pytest.approx(best[5] - 84.1)
        assert [row["difference"] is None for row in table] == [0, 1, 1, 1, 0, 0, 0, 1]
        out = capsys.readouterr().out
        assert "Table 99" not in out
        results.main(results.parse_args(["moved", "--all"]))
        assert "Table 99" in capsys.readouterr().out
        for row in table:
            line, = (line for line in out.splitlines() if line.startswith(f"| {row['row']} |"))
            assert f"| {row['paper']} | " in line and line.endswith(f" | {row['note']} |")

    def test_the_papers_accuracies_have_the_deviations_of_table_a5(self):
        accuracies = {
            "pretrain tc2": 75.39, "pretrain tc2-seed1 --seed 1": 75.40,
            "pretrain tc2-seed2 --seed 2": 75.23, "probe tc2 linear": 79.60,
            "probe tc2-seed1 linear": 79.54, "probe tc2-seed2 linear": 79.63, "probe tc2 ep": 80.19,
            "probe tc2-seed1 ep": 80.21, "probe tc2-seed2 ep": 80.28}
        rows = [row | {"measured": accuracies.get(row["row"], 0.0), "difference": 0.0}
                for row in results.read_rows(PAGES["REPRODUCE"])]
        found = results.seed_deviations(rows)
        assert {name: round(deviation, 3) for name, deviation in found.items()} == {
            "pretrain tc2": 0.078, "probe tc2 linear": 0.037, "probe tc2 ep": 0.039}
        for row in rows:      # not measured, or with other flags
            if row["row"] == "probe tc2-seed2 ep":
                row["difference"] = None
        assert list(results.seed_deviations(rows)) == ["pretrain tc2", "probe tc2 linear"]


STAGES = {f"{module.__name__}.py": module for module in SCRIPTS.values()}
# Bash programs print the commands that they would start, instead of starting them.
STAND_INS = """
torchrun() { shift 2; python "$@"; }
python() { printf '%q ' "$@"; echo; }
"""


def blocks(page, language):
    """The pieces of code of a page in this language"""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.M | re.S)


def fragment(words):
    """The piece of code in USING.md that has these words"""
    code, = (code for code in blocks("USING", "python") if words in code)
    return code


PROGRAMS = {found[1]: code for code in blocks("USING", "python")
            if (found := re.search(r"from model import (SoftMoE|Explore|Router)", code))}
PROGRAMS["Router"] += """
class Yours(torch.nn.Linear):
    def forward(self, images, mask):
        tokens = super().forward(images)
        return tokens, tokens[:, 1:].square().mean(-1)

student = Routed(Yours(3, 96), 96)
images, mask = torch.rand(4, 1 + 49, 3), (torch.rand(4, 49) < 0.75).float()
student(images, mask).backward()
"""


class TestPages:
    def test_the_readmes_example_has_the_gradients_that_it_says(self, capsys):
        code, = (code for code in blocks("README", "python") if "logits.grad" in code)
        exec(code, names := {})
        printed = re.findall(r"-?\d\.\d*", capsys.readouterr().out.splitlines()[0])
        said = re.search(r"print.*# (.*):", code)[1].split(", ")
        assert list(map(float, printed)) == pytest.approx(list(map(float, said)), abs=1e-6)
        said = re.search(r"weights (0.39.*)", code)[1].split(", ")
        assert names["weight"][0].tolist() == pytest.approx(list(map(float, said)), abs=0.005)
        assert names["logits"].grad.abs().max() < 1e-7

    def test_the_objective_of_contributing_is_the_plain_one_beside_it(self, monkeypatch):
        pieces = re.findall(r"^   ```python\n(.*?)^   ```", PAGES["CONTRIBUTING"], re.M | re.S)
        loss, experts, coupling, _, _, plain = map(textwrap.dedent, pieces)
        code, end = (HERE / "losses.py").read_text(), "    metrics = losses | metrics\n"
        assert code.count(end) == 1
        code = code.replace(end, textwrap.indent(coupling, "    ") + end) + loss + experts
        exec(code, ours := {})
        exec(plain, theirs := dict(globals()))
        monkeypatch.setitem(PLAIN, "edge", theirs["plain_edge"])
        for dense in (False, True):
            case = make_case(dense)
            keywords = dict(objectives=("edge", "token"), loss_block=(3,))
            values, _, _ = ours["explore_losses"](*case[:4], **keywords)
            torch.testing.assert_close(values, plain_losses(*case[:4], **keywords)[0])

    @needs_loopback
    def test_programs_of_using_run_alone_and_in_two_processes(self, tmp_path):
        """They run beside copies of two files. In DDP, both processes have the same gradient, of
        the images of both.
        """
        for file in ("losses.py", "model.py"):
            shutil.copy(HERE / file, tmp_path)
        (tmp_path / "program.py").write_text(f"""
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for code in {list(PROGRAMS.values())!r}:
    if dist.get_rank() == 0:
        exec(code, {{}})
    end = code.index("\\n", code.index("\\nstudent = ") + 1)
    torch.manual_seed(1)
    exec(code[:end], names := {{}})
    student = names["student"] = torch.nn.parallel.DistributedDataParallel(names["student"])
    for step in range(2):
        torch.manual_seed(dist.get_rank())
        student.zero_grad()
        exec(code[end:], names)
        mine = torch.cat([p.grad.flatten() for p in student.parameters()])
        both = [torch.empty_like(mine) for _ in "ab"]
        dist.all_gather(both, mine)
        routed = all(p.grad.any() for name, p in student.named_parameters() if "phi" in name)
        print(torch.equal(*both), routed)
dist.destroy_process_group()
""", "utf-8")
        assert run_two(tmp_path / "program.py") == 2 * 6 * "True True\n"

    def test_the_timm_vit_of_using_works_with_timms_tools(self, tmp_path):
        """ModelEma copies it, timm's optimizers decay it, and load_encoder reads it."""
        import timm.optim
        import timm.utils
        exec(PROGRAMS["SoftMoE"], names := {})
        student = names["student"]
        images = names["images"]
        copied = timm.utils.ModelEmaV2(student).module.eval()
        torch.testing.assert_close(copied(images), student.eval()(images))
        vit = student.vit
        decayed = {p: group["weight_decay"] > 0 for group in timm.optim.create_optimizer_v2(
            student, "adamw", 0.1, 0.05).param_groups for p in group["params"]}
        for name, p in vit.named_parameters():
            assert decayed[p] == (p.ndim > 1 and name.split(".")[-1] not in (
                "b1", "b2", "pos_embed", "cls_token")), name
        torch.save({"model": vit.state_dict()}, tmp_path / "vit.pt")
        encoder = checkpoints.load_encoder(tmp_path / "vit.pt").eval()
        tokens, routing = encoder(images)
        assert torch.allclose(tokens, vit.forward_features(images), atol=1e-5)
        assert torch.allclose(routing[11].dispatch, student(images)[1])

    def test_padding_of_a_naflex_vit_gets_no_weight_and_changes_no_other_token(self):
        from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
        exec(PROGRAMS["SoftMoE"].split("vit = ")[0], names := {})
        vit = NaFlexVit(NaFlexVitCfg(embed_dim=24, depth=2, num_heads=3, reg_tokens=1)).eval()
        moe = names["Student"](vit, 7).vit.blocks[1].mlp
        rows, columns = torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij")
        patches, lengths = torch.randn(2, 15, 768), (15, 6)
        real = torch.arange(15) < torch.tensor(lengths)[:, None]
        places = torch.stack([rows, columns], -1).view(1, 15, 2) * real[..., None]
        moe.valid = torch.cat([torch.ones(2, 1, dtype=torch.bool), real], 1)      # register first
        tokens, dispatch = vit.forward_features(patches, places, real)["patches"], moe.routing[0]
        moe.valid = None
        for i, n in enumerate(lengths):
            one = (x[i:i + 1, :n] for x in (patches, places, real))
            alone = vit.forward_features(*one)["patches"]
            torch.testing.assert_close(tokens[i:i + 1, :1 + n], alone)
            torch.testing.assert_close(dispatch[i:i + 1, :1 + n], moe.routing[0])
            assert not dispatch[i, 1 + n:].any()

    def test_flat_losses_are_equation_5(self):
        code = fragment("flat_loss")
        patch_loss, weight, mask = rand(3, 9), rand(3, 9), (torch.rand(3, 9) < 0.6).double()
        mask[1] = 0      # an image without masked patches
        names = {"torch": torch, "weight": weight, "mask": mask,
                 "flat_loss": patch_loss[mask.bool()]}
        exec(code, names)
        torch.testing.assert_close(names["loss"], losses.weighted_mean(patch_loss, weight * mask))

    def test_packed_images_are_unpacked_for_a_soft_moe(self):
        moe, lengths = model.SoftMoE(7, 3, 11), [4, 1, 6]
        x = torch.rand(11, 7)
        names = dict(torch=torch, moe=moe, x=x, lengths=lengths)
        exec(fragment("pad_sequence"), names)
        expected = torch.cat([moe(each[None])[0][0] for each in x.split(lengths)])
        torch.testing.assert_close(names["y"], expected)
        padded = dict(moe=moe, x=torch.rand(3, 6, 7), valid=names["valid"],
                      patch_weights=losses.patch_weights)
        exec(fragment("False for padding"), padded)
        assert padded["weight"].shape == (3, 5) and not padded["weight"][1].any()

    def test_a_sparse_student_keeps_visible_patches_of_uneven_masks(self):
        mask = torch.stack([torch.randperm(25) < count for count in (11, 3, 8)])
        names = dict(torch=torch, mask=mask)
        exec(fragment("scatter(1, ids_keep"), names)
        assert names["ids_keep"].shape == (3, 14)
        for before, kept, after in zip(mask, names["ids_keep"], names["mask"]):
            assert not before[kept].any() and sorted(kept.tolist()) == (
                ~after).nonzero()[:, 0].tolist()

    def test_a_student_that_is_saved_alone_is_read_with_its_heads(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        student, teacher = model.Explore(nano(experts=2), 7), nano()
        line = fragment("student.pt").split("encoder = ")[0]
        exec(line, dict(torch=torch, student=student))
        images = torch.rand(2, 3, 32, 32)
        expected = student.encoder.eval()(normalized(images))[0]
        assert torch.equal(build_frozen("student.pt")(images), expected)
        assert torch.equal(checkpoints.load_student("student.pt").head.weight, student.head.weight)

        class Both(nn.Module):      # as in Lightning
            def __init__(self, student):
                super().__init__()
                self.student, self.teacher = student, teacher
        torch.save({"state_dict": Both(student).state_dict()}, "x.ckpt")
        found = checkpoints.load_encoder(checkpoints.load_checkpoint("x.ckpt", heads=3)).eval()
        assert torch.equal(found(normalized(images))[0], expected)
        plain = model.Explore(nano(), 7)      # without a router
        torch.save({"state_dict": Both(plain).state_dict()}, "x.ckpt")
        with pytest.raises(common.UserError, match="student.encoder., state_dict teacher.; choose"):
            checkpoints.load_checkpoint("x.ckpt", heads=3)
        named = checkpoints.load_checkpoint("x.ckpt", 3, "student.encoder")
        found = checkpoints.load_encoder(named)
        assert torch.equal(found.norm.weight, plain.encoder.norm.weight)
        assert torch.equal(found.cls_token, plain.encoder.cls_token)

    def test_encoders_load_beside_copies_of_three_files(self, encoder, tmp_path):
        for file in ("checkpoints.py", "common.py", "model.py"):
            shutil.copy(HERE / file, tmp_path)
        (tmp_path / "program.py").write_text(f"""
from tqdm import tqdm
before = tqdm.monitor_interval
from checkpoints import load_encoder
print(len(load_encoder({encoder!r}).blocks), tqdm.monitor_interval == before)
""", "utf-8")
        code, out, error = finish(start("program.py", folder=tmp_path))
        assert (code, out) == (0, "4 True\n"), error

    def test_using_sees_an_encoders_weights_on_a_photograph(self, encoder, tmp_path):
        code = fragment("grid=14")
        names = {"images": torch.rand(3, 3, 40, 40)}
        code = code.replace("runs/pretrain/epoch_0300.pt", encoder).replace("grid=14", "grid=5")
        exec(code, names)
        assert names["tokens"].shape == (3, 26, 96) and set(names["routing"]) == {1, 3}
        code = fragment("photo.jpg")
        Image.fromarray(PICTURE).save(tmp_path / "photo.jpg")
        for old, new in (("photo.jpg", str(tmp_path / "photo.jpg")), ("224", "40"),
                         ("14, 14", "5, 5"), ("197", "26")):
            code = code.replace(old, new)
        exec(code, names)
        expected = 26 * names["routing"][3].dispatch[0, 1:, 0]
        assert torch.equal(names["weights"], expected.view(5, 5))

    @pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
    def test_the_papers_commands_are_ones_that_the_scripts_take(self):
        page = "\n".join(blocks("REPRODUCE", "bash"))
        code, out = run_command("bash", "-euc", STAND_INS + page)
        assert code == 0
        commands = list(map(shlex.split, out.splitlines()))
        assert len(commands) > 100
        parse = functools.cache(lambda script, *flags: vars(STAGES[script].parse_args(flags)))
        parsed = [parse(*command) for command in commands if command[0] in STAGES]
        runs = [args for args in parsed if "max_steps" in args]
        for row in results.read_rows(PAGES["REPRODUCE"]):      # as bash starts them
            args = parse(*results.find_command(row["row"]))
            assert [each["out"] for each in runs if each | {"data": args["data"]} == args] == [
                args["out"]]
        folders = [args["out"] for args in runs]
        assert len(set(folders)) == len(folders), "two runs have one folder"

    @pytest.mark.parametrize("page", ("README", "RUNNING", "CONTRIBUTING"))
    def test_printed_commands_are_ones_that_the_scripts_take(self, page):
        text = PAGES[page].replace("\\\n", " ")
        found = re.findall(r"(?:^|`|&& |; )(?:torchrun [^`\n]*?|python |sbatch [^`\n]*?slurm.sh )"
                           r"(\w+\.py)([^`\n#;]*)", text, re.M)
        assert found or page == "CONTRIBUTING"
        for script, flags in found:
            if script in STAGES:
                STAGES[script].parse_args(shlex.split(flags))

    @pytest.mark.parametrize("flags, folder", (
        ("", "runs/demo"), ("--epochs 8", "runs/demo-epochs-8"),
        ("--epochs 8 --out x/y", "runs/demo-epochs-8-out-x-y")))
    def test_the_demo_measures_the_run_that_it_trains(self, tmp_path, flags, folder):
        """Other flags are another run, which has a folder of its own."""
        (tmp_path / "python").write_text("#!/bin/sh\necho \"$@\"")
        (tmp_path / "python").chmod(0o755)
        code, out = run_command("sh", HERE / "demo.sh", *flags.split(), cwd=tmp_path,
                                env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
        assert code == 0
        taught, trained, measured, plotted, analyzed = (
            STAGES[script].parse_args(argv) for script, *argv in map(str.split, out.splitlines())
            if script in STAGES)
        assert trained.teacher == measured.encoders[0] == f"{taught.out}/last.pt"
        assert trained.out == plotted.runs[0] == folder and measured.out is None
        for path in (*measured.encoders[1:], *analyzed.checkpoints):
            assert os.path.dirname(path) == folder

    @pytest.mark.parametrize("page", PAGES)
    def test_links_between_pages_lead_somewhere(self, page):
        for target in re.findall(r'\]\((?!http)([^)#]+)|src="([^"]+)"', PAGES[page]):
            assert (HERE / "".join(target)).exists(), target


JOB = str(7_000_000 + os.getpid())      # Slurm's number, from which slurm.sh makes a port


@pytest.fixture
def submit(tmp_path):
    """submit(python, *argv, tasks=1) -> (exit code, standard output, what scontrol was told)

    It runs slurm.sh. `python` is a shell script in Python's place, and Slurm's programs have
    stand-ins, too.
    """
    told = tmp_path / "scontrol was told"
    scripts = {
        "scontrol": f'if [ $1 = show ]; then echo 127.0.0.1; seq -f "machine-%07g" 10000; '
                    f'else echo "$@" >> "{told}"; fi',
        "srun": """
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & jobs+=($!); done
for job in ${jobs[@]}; do wait $job || code=$?; done
exit ${code:-0}"""}

    def run_script(python, *argv, tasks=1):
        for name, script in (scripts | {"python": python}).items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
            (tmp_path / name).chmod(0o755)
        told.write_text("")
        variables = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID=JOB,
                         SLURM_CPUS_PER_TASK="1", SLURM_JOB_NODELIST="n", SLURM_NTASKS=str(tasks))
        code, out = run_command("bash", HERE / "slurm.sh", *argv, env=os.environ | variables)
        return code, out, told.read_text()
    return run_script


class TestCluster:
    def test_each_task_has_its_rank_and_all_arguments(self, submit):
        python = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" "$#" "$@"'
        code, out, told = submit(python, "knn.py", "--out", "two words", tasks=3)
        port = 20000 + int(JOB) % 10000
        assert code == 0 and told == "" and sorted(out.splitlines()) == [
            f"{rank} {rank} 3 127.0.0.1:{port} 3 knn.py --out two words" for rank in range(3)]

    def test_a_run_that_sigusr1_stops_is_requeued_and_no_other(self, submit, stage, capsys,
                                                               monkeypatch, tmp_path):
        def printed(flags):
            train(stage("pretrain", flags))
            (tmp_path / "printed").write_text(capsys.readouterr().out, "utf-8")
            return f'cat "{tmp_path}/printed"'
        monkeypatch.setattr(run, "LOG_EVERY", 1)
        with monkeypatch.context() as patch:
            patch.setattr(optim, "set_rate", lambda *args: signal.raise_signal(signal.SIGUSR1))
            assert submit(printed(""))[::2] == (0, f"requeue {JOB}\n")
        # if it reached others before the one that prints
        assert submit("echo stopped by a signal")[::2] == (0, f"requeue {JOB}\n")
        for flags in ("--max-steps 3", ""):
            assert submit(printed(flags))[::2] == (0, "")
        assert submit("echo stopped by SIGINT")[::2] == (0, "")
        assert submit("kill -USR1 $$")[::2] == (138, "")      # knn.py, which has nothing to resume
        python = '[ $RANK = 0 ] || exit 2; echo stopped by SIGUSR1'
        assert submit(python, tasks=2)[::2] == (0, f"requeue {JOB}\n")      # it has saved
