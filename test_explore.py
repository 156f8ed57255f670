"""The tests, as statements about the method. CPU, no network: `python -m pytest -q test_explore.py`

Sections follow the files: model, losses, balance, checkpoint, teacher, data, common and runs, the stages,
routing, and what the README and experiments/ promise.
"""

import argparse
import colorsys
import contextlib
import errno
import functools
import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from unittest.mock import MagicMock, Mock, call

os.environ["HF_HUB_OFFLINE"] = "1"        # a test that would download fails at once
os.environ["OMP_NUM_THREADS"] = "1"       # in processes that tests start, too: more would wait for each other

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torchvision  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional as TF  # noqa: E402

import balance  # noqa: E402
import checkpoint  # noqa: E402
import common  # noqa: E402
import data  # noqa: E402
import finetune  # noqa: E402
import knn  # noqa: E402
import linprobe  # noqa: E402
import losses  # noqa: E402
import model  # noqa: E402
import pretrain  # noqa: E402
import routing  # noqa: E402
import run  # noqa: E402
import segment  # noqa: E402
from shapes import Shapes  # noqa: E402
from teacher import build_teacher  # noqa: E402

for number in common.STOP_SIGNALS:        # nohup and a script's background jobs ignore some
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
torch.set_num_threads(1)
HERE = Path(__file__).parent
README = (HERE / "README.md").read_text("utf-8")
SCRIPTS = {"pretrain": pretrain, "finetune": finetune, "linear": linprobe, "ep": linprobe, "segment": segment,
           "knn": knn, "routing": routing}
QUICK = ["--amp", "off", "--workers", "0"]
TOY = ["--model", "vit_nano", "--image-size", "32", "--patch-size", "8", "--batch-size", "8", *QUICK]
rand = functools.partial(torch.rand, dtype=torch.float64)
randn = functools.partial(torch.randn, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    """Every test has the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder in ImageNet's layout: 4 classes of 8 training and 4 validation JPEGs, of different sizes."""
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
            picture, annotation = shapes[i][0].permute(1, 2, 0).numpy(), shapes.annotation(i).numpy()
            Image.fromarray(picture[20:50 + 2 * i]).save(root / "images" / name / f"{i}.jpg", quality=95)
            Image.fromarray(annotation[20:50 + 2 * i]).save(root / "annotations" / name / f"{i}.png")
    return str(root)


def nano(**vit):
    return model.build_vit("vit_nano", **dict(image_size=32, patch_size=8) | vit)


def write_checkpoint(path, **vit):
    """A checkpoint of ours around a fresh encoder."""
    encoder = nano(**vit)
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    torch.save({"model": state, "encoder": encoder.config, "args": {}}, path)
    return str(path)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    torch.manual_seed(1)
    return write_checkpoint(tmp_path_factory.mktemp("teacher") / "teacher.pt")


@pytest.fixture
def stage(photos, scenes, teacher, tmp_path):
    """stage(name, *flags, out="run") -> the command line of a run of eight steps, four an epoch"""
    encoder = write_checkpoint(tmp_path / "e2.pt", experts=2)
    epochs = ["--epochs", "2", "--warmup-epochs", "1", "--batch-size", "8", "--data", photos, *QUICK]
    iterations = "--iterations 8 --warmup-iterations 1 --batch-size 4 --save-every 4".split()
    iterations += "--classes 11 --crop-size 32 --width 8".split()
    argv = {"pretrain": [*TOY, "--teacher", teacher, *epochs], "finetune": [encoder, *epochs],
            "linear": [encoder, *epochs], "ep": [encoder, *epochs, "--probe", "ep"],
            "segment": [encoder, "--data", scenes, *iterations, *QUICK]}

    def build(name, *flags, out="run"):
        flags = [word for flag in flags for word in (flag.split() if flag[:2] in ("", "--") else [flag])]
        return [*argv[name], "--out", str(tmp_path / out), *flags]
    return build


def play(name, argv):
    """Runs a stage in this process -> (what its main returns, last.pt, the log)"""
    args = SCRIPTS[name].parse_args(argv)
    return SCRIPTS[name].main(args), *read_run(args.out)


def spy(monkeypatch, owner, name):
    """-> a growing list of the calls of a function, which still does its work"""
    mock = Mock(wraps=getattr(owner, name))
    monkeypatch.setattr(owner, name, mock)
    return mock.call_args_list


def read_run(folder):
    log = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return checkpoint.load_checkpoint(Path(folder, "last.pt")), log


def train(argv):
    """-> (last.pt, the log)"""
    return play("pretrain", argv)[1:]


def start(*argv, **kwargs):
    """A Python program in a session of its own."""
    return subprocess.Popen([sys.executable, *map(str, argv)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True, **dict(cwd=HERE) | kwargs)


def loopback():
    """Whether processes of this machine can reach each other, as torchrun's have to."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
        return True
    return False


needs_loopback = pytest.mark.skipif(not loopback(), reason="no network interface is up, no loopback either")


def finish(process):
    """Waits for a process -> (its standard output, its standard error)"""
    try:
        return process.communicate(timeout=300)
    finally:
        process.terminate()      # torchrun ends its processes


def torchrun(processes, script, *argv):
    """A real torchrun on the CPU -> its standard output."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    process = start(*command, HERE / script, *argv)
    out, error = finish(process)
    assert process.returncode == 0, error
    return out


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


# ------------------------------------------------------------------------------------------------ Soft-MoE

def test_soft_moe_is_equation_4_separate_mlps_between_dispatch_and_combine():
    moe, x, expected = model.SoftMoE(8, 3, 16).double(), randn(2, 5, 8), 0.0
    moe.scale.data.fill_(2.5)
    for bias in (moe.b1, moe.b2):
        nn.init.normal_(bias)
    y, (dispatch, combine) = moe(x)
    power = (2.5 * F.cosine_similarity(x[:, :, None], moe.phi.T, dim=3)).exp()      # [2, 5, 3]
    assert torch.allclose(dispatch, power / power.sum(1, keepdim=True), rtol=1e-10)
    assert torch.allclose(combine, power / power.sum(2, keepdim=True), rtol=1e-10)
    for e in range(3):
        slot = (dispatch[:, :, e, None] * x).sum(1)
        output = F.gelu(slot @ moe.w1[e] + moe.b1[e]) @ moe.w2[e] + moe.b2[e]
        expected = expected + combine[:, :, e, None] * output[:, None]
    assert torch.allclose(y, expected, atol=1e-12)


def test_routing_stays_in_float32_under_autocast():
    moe, x = model.SoftMoE(64, 2, 128), torch.randn(2, 9, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, (dispatch, combine) = moe(x)
    plain = moe.route(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(dispatch, plain.dispatch) and torch.equal(combine, plain.combine)


def test_experts_start_as_linear_layers_and_residual_projections_shrink_with_depth():
    moe = model.SoftMoE(64, 4, 256)
    for weight, bound in ((moe.w1, 64 ** -0.5), (moe.w2, 256 ** -0.5), (moe.phi, 4 ** -0.5)):
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3 ** 0.5, rel=0.1)
    assert moe.scale.item() == 1 and not moe.b1.any() and not moe.b2.any()
    for depth, block in enumerate(model.build_vit("vit_tiny", image_size=32, experts=2).blocks, start=1):
        assert block.attn.proj.weight.std().item() == pytest.approx(0.02 / (2 * depth) ** 0.5, rel=0.05)
        assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert (block.ls1.gamma == 0.1).all() and (block.ls2.gamma == 0.1).all()
        if depth % 2 == 0:
            bound = 768 ** -0.5 / (2 * depth) ** 0.5
            assert block.mlp.w2.abs().max().item() == pytest.approx(bound, rel=0.01)


def test_expert_dropout_drops_whole_experts_of_an_image_and_keeps_the_expectation():
    moe, x = model.SoftMoE(8, 2, 16, dropout=0.4).double(), randn(1, 3, 8).expand(4000, -1, -1)
    nn.init.normal_(moe.b2)
    whole, dropped = moe.eval()(x)[0][0], moe.train()(x)[0]
    # with two experts an image has one of four outputs: none, either, or both, survivors scaled by 1 / 0.6
    assert len(dropped.flatten(1).round(decimals=9).unique(dim=0)) == 4
    assert (dropped == 0).all((1, 2)).double().mean().item() == pytest.approx(0.16, abs=0.03)
    assert torch.allclose(dropped.mean(0), whole, atol=0.1)


# ------------------------------------------------------------------------------- encoder, student, decoder

def test_patches_are_dropped_or_replaced_in_their_places_around_the_position_embedding():
    """Sparse: each keeps its own position. Dense: a mask token has that of the patch it replaces."""
    vit = model.ViT(32, 8, dim=16, depth=0, heads=2).double()
    images, mask, mask_token = randn(3, 3, 32, 32), torch.rand(3, 16) < 0.5, randn(1, 1, 16)
    ids_keep = torch.stack([torch.randperm(16)[:7] for _ in range(3)])
    whole, sparse, dense = vit(images)[0], vit(images, ids_keep)[0], vit(images, None, mask, mask_token)[0]
    patch = images[1, :, 8:16, 24:]                                 # row 1, column 3
    embedded = (vit.patch_embed.proj.weight * patch).sum((1, 2, 3)) + vit.patch_embed.proj.bias
    assert torch.allclose(whole[1, 1 + 7], vit.norm(embedded + vit.pos_embed[0, 1 + 7]))
    assert torch.allclose(whole[:, 0], vit.norm(vit.cls_token[0] + vit.pos_embed[:, 0]))
    for b in range(3):
        assert torch.equal(sparse[b], whole[b, [0, *(1 + ids_keep[b]).tolist()]])
    replaced = vit.norm(mask_token + vit.pos_embed[:, 1:])
    assert torch.allclose(dense[:, 1:], torch.where(mask[..., None], replaced, whole[:, 1:]))


def test_the_student_sees_the_118_visible_patches_of_196_whose_order_changes_nothing():
    rng, encoder = np.random.default_rng(0), model.ViT(28, 2, dim=24, depth=2, heads=2, experts=2).double()
    mask = torch.stack([torch.from_numpy(data.block_mask(rng, 14, 0.4)) for _ in range(3)])
    student, images = model.Explore(encoder, 8, mask_ratio=0.4).double(), randn(3, 3, 28, 28)
    pred, order = student(images, mask), torch.randperm(118)
    assert pred.ids_keep.shape == (3, 118) and pred.tokens.shape == (3, 119, 8)
    assert all(ids.tolist() == (~row).nonzero()[:, 0].tolist() for ids, row in zip(pred.ids_keep, mask))
    tokens, routing = encoder(images, pred.ids_keep[:, order])      # the paper's shuffling
    shuffled = model.Prediction(student.head(tokens), None, routing, pred.ids_keep[:, order])
    assert torch.allclose(shuffled.tokens[:, 1:], pred.tokens[:, 1:][:, order])
    targets = randn(3, 197, 8)
    ours, theirs = (losses.explore_losses(p, targets, images, mask)[:2] for p in (pred, shuffled))
    assert torch.allclose(ours[0], theirs[0]) and torch.allclose(ours[1], theirs[1])


@pytest.mark.parametrize("dense", (False, True))
def test_the_student_never_sees_a_masked_patch_and_its_decoder_sees_what_the_encoder_made(dense):
    student = model.Explore(nano(experts=2), 8, dense=dense, pixels=True)
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, :6] = mask[1, 5:11] = True
    images = torch.rand(2, 3, 32, 32)
    pred = student(images, mask)
    hidden = mask.view(2, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    for where, same in ((hidden, True), (~hidden, False)):
        other = student(torch.where(where, torch.rand(2, 3, 32, 32), images), mask)
        assert torch.equal(other.tokens, pred.tokens) == torch.equal(other.pixels, pred.pixels) == same
    tokens, _ = student.encoder(images, pred.ids_keep, mask if dense else None, student.mask_token)
    assert torch.equal(pred.tokens, student.head(tokens))
    assert torch.equal(pred.pixels, student.decoder(tokens[:, 1:], pred.ids_keep, mask))
    pred.pixels.sum().backward()
    assert student.encoder.patch_embed.proj.weight.grad.any()


def test_the_loss_router_teaches_the_encoder_too():
    student = model.Explore(nano(), 8, loss_router=True)
    pred = student(torch.rand(2, 3, 32, 32), torch.arange(32).view(2, 16) % 16 >= 10)
    pred.routing[4].dispatch[:, 0, 0].sum().backward()
    assert student.encoder.blocks[0].attn.qkv.weight.grad.any()


def test_drop_path_rises_with_depth_drops_per_image_and_keeps_the_expectation():
    vit = nano(drop_path=0.3)
    assert [round(block.drop_path.p, 6) for block in vit.blocks] == [0, 0.1, 0.2, 0.3]
    branch, block, x = torch.ones(4000, 2, 3), vit.blocks[3], torch.rand(2, 17, 96)
    kept = block.drop_path(branch)
    assert kept.unique().tolist() == pytest.approx([0, 1 / (1 - 0.3)]) and (kept == kept[:, :1, :1]).all()
    assert kept.mean().item() == pytest.approx(1, abs=0.05)
    block.drop_path.p = 1.0
    assert torch.equal(block(x)[0], x) and not torch.equal(block.eval()(x)[0], x)


@pytest.mark.parametrize("experts, millions, gigamacs", (
    (0, 85.8, 17.45), (2, 114.2, 11.93), (16, 510.9, None), (32, 964.3, None), (64, 1871.2, 13.86)))
def test_parameters_and_macs_are_those_of_the_paper_and_of_pytorchs_counter(experts, millions, gigamacs):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    with torch.device("meta"):
        vit = model.build_vit("vit_base", experts=experts)
    assert sum(p.numel() for p in vit.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    assert vit.moe_blocks == ([1, 3, 5, 7, 9, 11] if experts else [])
    if gigamacs:
        assert model.encoder_macs(vit) / 1e9 == pytest.approx(gigamacs, abs=0.005)
    small, x = nano(experts=experts), torch.rand(1, 17, 96)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for block in small.blocks:
            x, _ = block(x)
    assert counter.get_total_flops() == 2 * model.encoder_macs(small, tokens=17)


def test_encoder_is_timms_both_ways():
    import timm
    theirs = timm.create_model("vit_base_patch16_224", init_values=0.1, num_classes=0).eval()
    ours, images = model.build_vit("vit_base").eval(), torch.randn(1, 3, 224, 224)
    for _, p in theirs.named_parameters():
        p.data.add_(0.02 * torch.randn_like(p))        # so that no bias is zero and no norm is one
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert torch.allclose(ours(images)[0], theirs.forward_features(images), atol=1e-4)
        ours.blocks[3].attn.qkv.weight.mul_(1.1)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        assert torch.allclose(ours(images)[0], theirs.forward_features(images), atol=1e-4)


def test_attention_in_bf16_on_a_cpu_is_attention():
    q, k, v = torch.randn(3, 2, 3, 50, 64).bfloat16()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (model.attention(q, k, v) - exact).abs().max() < 0.02


def test_the_decoder_puts_every_visible_token_back_where_it_came_from():
    decoder = model.PixelDecoder(model.ViT(32, 8, dim=192, depth=0, heads=2), dim=192, depth=0)
    for layer in (decoder.embed, decoder.pixels):                   # without blocks and norm, nothing changes
        nn.init.eye_(layer.weight)
    decoder.norm = nn.Identity()
    nn.init.constant_(decoder.mask_token, -1)
    tags = torch.arange(16.0)[None, :, None].expand(3, 16, 192)     # a patch says its place
    mask = torch.stack([torch.randperm(16) for _ in range(3)]) >= 9
    ids_keep = torch.stack([(~row).nonzero()[torch.randperm(9), 0] for row in mask])
    expected, rows = torch.where(mask[..., None], -1.0, tags) + decoder.pos_embed, torch.arange(3)[:, None]
    assert torch.equal(decoder(tags[rows, ids_keep], ids_keep, mask), expected)
    assert torch.equal(decoder(tags, None, mask), expected)


def test_the_decoder_has_8_blocks_of_width_512_and_positions_of_its_own():
    student = model.Explore(nano(experts=2), 8, dense=True, pixels=True)
    decoder, names = student.decoder, " ".join(student.decoder.state_dict())
    assert len(decoder.blocks) == 8 and decoder.blocks[0].attn.heads == 16 and decoder.norm.eps == 1e-6
    assert decoder.pos_embed.shape == (1, 16, 512) and student.mask_token.shape == (1, 1, 96)
    assert "phi" not in names and "ls1" not in names                # as the release's
    assert not any("mask_token" in name for name in student.encoder.state_dict())
    for token in (student.mask_token, decoder.mask_token, decoder.pos_embed, student.encoder.cls_token,
                  student.head.weight):
        assert token.std().item() == pytest.approx(0.02, rel=0.3)
    pred = student(torch.rand(2, 3, 32, 32), torch.rand(2, 16) < 0.5)
    assert pred.pixels.shape == (2, 16, 192)
    (pred.pixels.sum() + pred.tokens.sum()).backward()
    assert all(p.grad is not None for p in student.parameters())


def test_these_files_import_torch_alone_and_stages_only_what_is_below_them():
    source = {path.stem: path.read_text("utf-8") for path in HERE.glob("*.py")}
    pattern = re.compile(r"^\s*(?:import|from) (\w+)", re.M)
    imports = {name: set(pattern.findall(text)) for name, text in source.items()}
    assert imports["model"] | imports["losses"] | imports["balance"] <= {"torch", *sys.stdlib_module_names}
    assert "distributed" not in source["model"] + source["losses"]
    stages = {"pretrain", "knn", "linprobe", "finetune", "segment", "routing"}
    assert all(not imports[name] & stages for name in source.keys() - stages - {"test_explore"})
    assert {(a, b) for a in stages for b in imports[a] & stages} == {("linprobe", "finetune")}


# --------------------------------------------------------------------------------------- losses, Eq. 1 to 8

def test_token_cls_and_pixel_loss_are_equations_1_to_3():
    pred, target = 2 * randn(3, 4, 192), 3 * randn(3, 4, 192) + 1
    normed = (target - target.mean(-1, True)) / (target.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    distance = (pred - normed).abs()
    huber = torch.where(distance < 1, 0.5 * distance ** 2, distance - 0.5).mean(-1)
    assert torch.allclose(losses.token_loss(pred, target), huber)
    cosines = [(p @ t / (p @ p).sqrt() / (t @ t).sqrt()).item() for p, t in zip(pred[0], target[0])]
    assert losses.cls_loss(pred[0], target[0]).item() == pytest.approx(1 - np.mean(cosines), rel=1e-12)
    images = rand(3, 3, 16, 16)
    for b, i in np.ndindex(3, 4):                  # its mean over a patch's pixels, not the sum
        row, column = divmod(i, 2)
        patch = images[b, :, 8 * row:8 * row + 8, 8 * column:8 * column + 8].flatten()
        patch = (patch - patch.mean()) / (patch.var(correction=1) + 1e-6).sqrt()
        assert torch.allclose(losses.pixel_loss(pred, images, 8)[b, i], ((pred[b, i] - patch) ** 2).mean())


def test_routed_mean_is_equation_5_and_teaches_the_router_to_leave_hard_patches():
    loss, weight = rand(3, 6), rand(3, 6)
    images = [(w * x).sum() / w.sum() for w, x in zip(weight, loss)]      # normalized within each image
    assert losses.routed_mean(loss, weight).item() == pytest.approx(sum(images).item() / 3, rel=1e-12)
    loss, weight = torch.tensor([[0.1, 0.5, 0.9]]), torch.full((1, 3), 1 / 3, requires_grad=True)
    losses.routed_mean(loss, weight).backward()
    assert weight.grad[0, 0] < 0 < weight.grad[0, 2]               # descent raises the easy one's weight
    assert abs(weight.grad[0, 1]) < 1e-6


def test_dispatch_entropy_is_equation_6_and_variation_is_deviation_over_mean():
    dispatch = randn(3, 7, 2).softmax(1)
    expected = -(dispatch * dispatch.log()).sum(1).mean(0)
    assert torch.allclose(losses.dispatch_entropy(dispatch), expected)
    variation = (dispatch.numpy().std(1) / dispatch.numpy().mean(1)).mean(0)
    assert losses.variation(dispatch).tolist() == pytest.approx(variation)
    assert losses.dispatch_entropy(torch.full((1, 119, 1), 1 / 119)).item() == pytest.approx(4.779, abs=5e-4)
    point = F.one_hot(torch.tensor([[3]]), 119).float().transpose(1, 2).requires_grad_()
    losses.dispatch_entropy(point).sum().backward()
    assert losses.dispatch_entropy(point).item() == 0 and point.grad.isfinite().all()


def test_importance_is_on_combine_weights_for_dispatch_weights_have_equal_totals():
    dispatch = randn(3, 7, 4).softmax(1)
    assert losses.importance_loss(dispatch).item() == pytest.approx(0, abs=1e-20)
    total = np.array([1.0, 2.0, 5.0])
    expected = total.var() / total.mean() ** 2
    assert losses.importance_loss(torch.tensor(total)[None, None]).item() == pytest.approx(expected)


def plain_losses(pred, targets, images, mask, objectives, loss_block, loss_weights="dispatch", detach=False,
                 entropy_weights=(), entropy_on="dispatch", importance_weight=0.0):
    """Eq. 5 to 8, image by image -> (losses [K] without their global weights, the regularizer)"""
    routed, sparse, found = [pred.routing[b] for b in loss_block], pred.ids_keep is not None, []
    for name in objectives:
        per_image = []
        for b in range(len(mask)):
            if name == "cls":
                per_image.append(losses.cls_loss(pred.tokens[b, :1], targets[b, :1]))
                continue
            if name == "token":
                kept = pred.ids_keep[b] if sparse else torch.arange(len(mask[b]))
                loss = losses.token_loss(pred.tokens[b, 1:], targets[b, 1 + kept])
                chosen = torch.ones(len(kept)).bool() if sparse else mask[b]
            else:
                patch_size = math.isqrt(pred.pixels.shape[2] // 3)
                loss, chosen = losses.pixel_loss(pred.pixels[b], images[b:b + 1], patch_size)[0], mask[b]
            weight = torch.ones_like(loss)
            if routed and loss_weights != "uniform" and not (sparse and name == "pixel"):
                expert = int(name == "pixel")
                weight = sum(getattr(r, loss_weights)[b, 1:, expert] for r in routed) / len(routed)
                weight = weight.detach() if detach else weight
            total = chosen.sum() if loss_weights == "combine" else weight[chosen].sum()
            per_image.append((weight * loss)[chosen].sum() / total)
        found.append(sum(per_image) / len(per_image))
    regularizer = torch.zeros(())
    for r in routed:
        p, usage = getattr(r, entropy_on), r.combine.sum((0, 1))
        negentropy = (p * p.log()).sum((0, 1)) / len(mask)
        regularizer = regularizer + sum(w * h for w, h in zip(entropy_weights, negentropy)) / len(routed)
        importance = usage.var(correction=0) / usage.mean() ** 2
        regularizer = regularizer + importance_weight * importance / len(routed)
    return torch.stack(found), regularizer


Case = namedtuple("Case", "pred targets images mask routers")      # a random prediction of a student


def make_case(dense=False, experts=2):
    """4 images of 16 patches, 9 visible and 7 masked; routers of blocks 1 and 3."""
    routers = {block: model.SoftMoE(8, experts, 16).double() for block in (1, 3)}
    for router in routers.values():
        router.scale.data.fill_(3)
    mask = torch.stack([torch.randperm(16) for _ in range(4)]) >= 9
    ids_keep = None if dense else torch.stack([(~row).nonzero()[torch.randperm(9), 0] for row in mask])
    tokens = 17 if dense else 10
    routed = {block: router.route(randn(4, tokens, 8)) for block, router in routers.items()}
    pred = model.Prediction(torch.randn(4, tokens, 8), torch.randn(4, 16, 192), routed, ids_keep)
    return Case(pred, torch.randn(4, 17, 8), torch.rand(4, 3, 32, 32), mask, routers)


def couple(case, objectives=("token", "cls"), entropy=(0.0, 0.0), loss_block=(3,), **keywords):
    """-> (the sum of losses and regularizers, metrics)"""
    values, regularizer, metrics = losses.explore_losses(
        *case[:4], objectives=objectives, loss_block=loss_block, entropy_weights=torch.tensor(entropy),
        **keywords)
    return values.sum() + regularizer, metrics


ALL = ("token", "cls", "pixel")


@pytest.mark.parametrize("dense, objectives, keywords", (
    (False, ALL, dict(entropy_weights=(0.5, 2.0), importance_weight=3.0, loss_block=(1, 3))),
    (True, ALL, dict(entropy_weights=(1.0, 2.0), entropy_on="combine")),
    (True, ("token", "pixel"), dict(loss_weights="combine", entropy_weights=(0.0, 1.0), loss_block=(1, 3))),
    (False, ("cls", "pixel"), dict(loss_weights="uniform", entropy_weights=(1.0, 1.0)))))
def test_explore_losses_are_equation_8_and_their_metrics(dense, objectives, keywords):
    """Their gradients: see the plain loop of pretraining."""
    case, keywords = make_case(dense), dict(loss_block=(3,)) | keywords
    expected, negentropy = plain_losses(*case[:4], objectives, **keywords)
    plain, _ = plain_losses(*case[:4], objectives, keywords["loss_block"], loss_weights="uniform")
    keywords["entropy_weights"] = torch.tensor(keywords["entropy_weights"])
    values, regularizer, metrics = losses.explore_losses(*case[:4], objectives=objectives, **keywords)
    assert torch.allclose(values.double(), expected.double(), rtol=1e-5)
    assert regularizer.item() == pytest.approx(negentropy.item(), rel=1e-5)
    for name, value, mean in zip(objectives, values, plain):
        assert metrics[name] == value and not metrics[name].requires_grad
        if name == "token" or name == "pixel" and dense:
            ratio = value / mean * (2 if keywords.get("loss_weights") == "combine" else 1)      # 1 is neutral
            assert metrics[f"{name}_unweighted"].item() == pytest.approx(mean.item(), rel=1e-5)
            assert metrics[f"{name}_ratio"].item() == pytest.approx(ratio.item(), rel=1e-5)
    dispatch = torch.stack([case.pred.routing[block].dispatch for block in keywords["loss_block"]])
    assert torch.allclose(metrics["cls_share"], dispatch[:, :, 0].mean((0, 1)))
    assert torch.allclose(metrics["dispatch_cv"], losses.variation(dispatch.mean(0)[:, 1:]))
    assert torch.allclose(metrics["entropy"], sum(map(losses.dispatch_entropy, dispatch)) / len(dispatch))


@pytest.mark.parametrize("keywords", (dict(detach=True), dict(loss_weights="uniform")), ids=str)
def test_detached_and_uniform_weights_give_the_router_no_gradient_but_the_entropys(keywords):
    for entropy in (0.0, 5.0):
        case = make_case()
        (couple(case, entropy=(entropy, entropy), **keywords)[0] + 0 * case.routers[3].phi.sum()).backward()
        assert case.routers[3].phi.grad.any() == bool(entropy)


def test_losses_read_foreign_routings_by_name_and_refuse_targets_with_registers():
    case, names = make_case(), namedtuple("Foreign", "combine dispatch")
    foreign = {block: names(*reversed(r)) for block, r in case.pred.routing.items()}
    foreign = case._replace(pred=case.pred._replace(routing=foreign))
    first, second, last = (couple(case, loss_block=block, entropy=(1.0, 1.0))[0] for block in (1, 3, None))
    assert first != second == last == couple(foreign, entropy=(1.0, 1.0))[0]
    registers = case._replace(targets=torch.cat([case.targets, case.targets[:, :4]], dim=1))
    with pytest.raises(ValueError, match="targets have 21 tokens, but .* 16 patches need 17: leave out reg"):
        couple(registers)
    with pytest.raises(KeyError, match="CLS"):
        couple(case, ("token", "CLS"))
    reverse = losses.explore_losses(*case[:4], objectives=("cls", "token"))[0]
    assert torch.equal(reverse, losses.explore_losses(*case[:4])[0].flip(0))      # in the order asked for


def test_an_image_whose_weights_all_underflow_counts_as_if_unweighted():
    case, dispatch = make_case(), torch.zeros(4, 10, 2)
    dispatch[:, 0] = 1
    case.pred.routing[3] = model.Routing(dispatch.requires_grad_(), dispatch)
    total, metrics = couple(case, ("token",))
    total.backward()
    assert metrics["token"] == pytest.approx(metrics["token_unweighted"].item(), rel=1e-5)
    assert dispatch.grad.isfinite().all()
    assert losses.routed_mean(torch.ones(2, 3), torch.zeros(2, 3)) == 0


# ----------------------------------------------------------------------------- balance: the paper's baselines
def scaler(**kwargs):
    return torch.amp.GradScaler("cpu", **(dict(init_scale=1.0) | kwargs))


def test_gradnorm_helps_the_objective_that_lags_and_survives_numbers_that_are_not_finite():
    shared, one = nn.ParameterList([torch.tensor(1.0)]), [1.0, 1.0]

    def weights(*steps, scale=1.0):
        gradnorm = balance.GradNorm(torch.ones(2), shared, 1.0, 0.01, scaler(init_scale=scale))
        for values, gradients in steps:
            slope = shared[0] - shared[0].detach()
            gradnorm(0, torch.tensor(values) + torch.tensor(gradients) * slope)
            gradnorm.update()
        assert gradnorm.state_dict().keys() == {"weights", "first"}      # what resuming needs
        return gradnorm.weights.tolist()
    lags = weights((one, one), ([0.9, 0.1], one))               # the first has hardly fallen
    assert lags[0] > 1 > lags[1] and lags == weights((one, one), ([0.9, 0.1], one), scale=1024.0)
    assert weights((one, one), ([0.9, 0.1], one), ([math.nan, 0.1], [1.0, math.inf])) == lags
    assert min(weights((one, one), ([0.9, 0.1], [1e3, 1e3]))) > 0
    first, second = weights(([math.nan, 1.0], one), ([4.0, 1.0], one), ([2.0, 1.0], one))
    assert first < 1 < second                                   # what is not finite is no first loss


# ------------------------------------------------------------------------- checkpoint: other people's weights
def test_plain_vit_state_dicts_load(tmp_path):
    import timm
    images = torch.rand(1, 3, 224, 224)
    for scale, wrap in ((0.1, lambda s: s), (None, lambda s: {"model": s, "args": argparse.Namespace(lr=1)}),
                        (None, lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}})):
        theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, init_values=scale).eval()
        state = wrap({**theirs.state_dict(), "decoder_pos_embed": torch.zeros(1)})
        torch.save(state, tmp_path / "timm.pt", _use_new_zipfile_serialization=not scale)      # and the older
        encoder = checkpoint.load_encoder(tmp_path / "timm.pt").eval()
        assert torch.allclose(encoder(images)[0], theirs.forward_features(images), atol=1e-4)


@pytest.mark.parametrize("width, heads", (
    (192, 3), (384, 6), (512, 8), (768, 12), (1024, 16), (1280, 16), (128, 4), (192, 4)))
def test_known_widths_have_their_own_heads_and_others_need_to_say(tmp_path, width, heads, capsys):
    """As in DeiT, ViT-L and MAE's ViT-H; what is not in the file is said."""
    from timm.models import VisionTransformer
    theirs = VisionTransformer(32, 16, embed_dim=width, depth=1, num_heads=heads, num_classes=0).eval()
    path, images = tmp_path / "timm.pt", torch.rand(1, 3, 32, 32)
    torch.save(theirs.state_dict(), path)
    if width == 128:
        with pytest.raises(checkpoint.LoadError, match="heads an encoder of width 128 has: save it as {'mod"):
            checkpoint.load_encoder(path)
    if heads == 4:      # what a file says comes first
        torch.save({"model": theirs.state_dict(), "heads": heads}, path)
    ours = checkpoint.load_encoder(path).eval()
    assert torch.allclose(ours(images)[0], theirs.forward_features(images), atol=1e-4)
    assumed = f"{path}: does not say its number of attention heads; took {heads}, as other ViTs of width {width}."
    assert capsys.readouterr().out.startswith(assumed) == (heads != 4)


def test_a_tensor_without_a_place_in_our_encoder_refuses_the_file_by_name(tmp_path):
    """DINOv2's and timm's registers, DeiT's distillation token, CLIP's pre-norm: features would be wrong."""
    state, path = model.build_vit("vit_tiny", image_size=32).state_dict(), tmp_path / "x.pt"
    others = "cls_head.bias fc_norm.bias decoder_pos_embed mask_token pre_logits.x predictor.x projector.x"
    state |= dict.fromkeys(others.split(), torch.zeros(1))
    torch.save(state, path)
    assert checkpoint.load_encoder(path).dim == 192
    for name in ("register_tokens", "reg_token", "dist_token", "norm_pre.weight"):
        torch.save(state | {name: torch.zeros(1)}, path)
        with pytest.raises(checkpoint.LoadError, match=f"{name} has no place in our encoder"):
            checkpoint.load_encoder(path)


@pytest.mark.parametrize("prefix", ("", "module."))
def test_checkpoints_of_the_authors_release_load(tmp_path, prefix):
    encoder, state = model.ViT(32, 8, dim=192, depth=4, heads=3, experts=3).eval(), {}
    for name, value in encoder.state_dict().items():                     # in the words of the release
        value.add_(0.05 * torch.randn_like(value))
        name = prefix + "student." + re.sub(r"ls([12])\.gamma", r"gamma_\1", name)
        if name.endswith("qkv.bias"):
            value[192:384] = 0                                           # its keys have no bias
            stem = name.removesuffix("qkv.bias")
            state[f"{stem}q_bias"], _, state[f"{stem}v_bias"] = value.chunk(3)
        elif found := re.fullmatch(r"(.*mlp\.)([wb])([12])", name):
            for j, part in enumerate(value):
                name = f"{found[1]}experts.{j}.fc{found[3]}.{'weight' if found[2] == 'w' else 'bias'}"
                state[name] = part.T.contiguous() if found[2] == "w" else part
        else:      # a router's have a dimension for slots
            state[name] = value[..., None] if name.endswith(("mlp.phi", "mlp.scale")) else value
    state[f"{prefix}teacher.cls_token"] = torch.zeros(1)
    torch.save({"model": state, "config": {}}, tmp_path / "release.pt")
    loaded, images = checkpoint.load_encoder(tmp_path / "release.pt").eval(), torch.rand(2, 3, 32, 32)
    assert torch.allclose(loaded(images)[0], encoder(images)[0], atol=1e-6) and loaded.moe_blocks == [1, 3]


def test_files_that_do_not_load_are_named_and_their_code_never_runs(tmp_path, capsys, photos, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, vit, bias = tmp_path / "x.pt", nano(dim=192).state_dict(), "blocks.3.norm1.bias"
    probe = {"model": {"head.weight": torch.zeros(1)}, "encoder": nano().config, "args": {}}
    for content, expected in ((None, "x.pt: No such file"), ([1, 2], "is neither an ExPLoRe checkpoint"),
                              ({"weight": torch.zeros(1)}, "timm-style ViT (it lacks cls_token, norm.weight"),
                              ({name: x for name, x in vit.items() if name != bias}, bias),
                              (vit | {bias: torch.zeros(3)}, bias),
                              (probe, "x.pt holds a probe without its encoder; give"),
                              (b"cos\nmkdir\n(S'sprung'\ntR.", "x.pt: not a PyTorch file of plain")):
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):      # a pickle that makes a folder
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        error = refusal(capsys, "knn", str(path), "--data", photos)
        assert str(path) in error and expected in error and len(error.splitlines()) == 1, error
    for name in ("finetune", "linear", "segment", "routing"):             # every stage asks the same question
        assert f"{path}: not a PyTorch file" in refusal(capsys, name, str(path), "--data", photos)
    assert not Path("sprung").exists()


def test_position_embeddings_resize_to_another_grid_as_timms():
    from timm.layers import resample_abs_pos_embed as theirs
    embed, ours = torch.randn(1, 17, 3), checkpoint.resize_pos_embed
    assert torch.allclose(ours(embed, 6), theirs(embed, [6, 6]), atol=1e-6) and ours(embed, 4) is embed


@pytest.mark.parametrize("precision", (torch.float16, torch.bfloat16))
def test_checkpoints_in_half_precision_load_on_another_grid(tmp_path, precision):
    path, encoder = tmp_path / "half.pt", nano(dim=192)
    torch.save({name: x.to(precision) for name, x in encoder.state_dict().items()}, path)
    encoder.to(precision).float()
    loaded, resized = checkpoint.load_encoder(path, grid=6), checkpoint.resize_pos_embed(encoder.pos_embed, 6)
    assert torch.equal(loaded.pos_embed, resized) and torch.equal(loaded.cls_token, encoder.cls_token)


def test_position_embeddings_without_one_for_cls_are_those_of_deit_3(tmp_path):
    from timm.models import VisionTransformer
    theirs = VisionTransformer(64, 16, embed_dim=192, depth=1, num_heads=3, num_classes=0, init_values=0.1,
                               no_embed_class=True).eval()
    path, images = tmp_path / "deit3.pt", torch.rand(1, 3, 64, 64)
    torch.save(theirs.state_dict(), path)
    assert torch.allclose(checkpoint.load_encoder(path).eval()(images)[0], theirs.forward_features(images), atol=1e-4)
    torch.save(theirs.state_dict() | {"pos_embed": torch.zeros(1, 15, 192)}, path)
    for grid in (None, 6):
        with pytest.raises(checkpoint.LoadError, match="15 position embeddings are not those of .CLS. and a square"):
            checkpoint.load_encoder(path, grid=grid)


# ------------------------------------------------------------------------------------------------- teacher

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
    """What CLIP itself makes of an image, computed from our tokens: ln_post and projection of [CLS]."""
    return teacher.visual.ln_post(teacher(images)[:, 0]) @ teacher.visual.proj


def test_a_clip_teacher_is_open_clips_own_forward(small_clips, tmp_path):
    import open_clip
    theirs, path = open_clip.create_model("small-16").eval(), tmp_path / "weights.pt"
    for parameter in theirs.parameters():      # no bias is zero, no norm neutral
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    torch.save(theirs.state_dict(), path)
    teacher, images = build_teacher(f"small-16/{path}", grid=4), torch.rand(2, 3, 64, 64)
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    assert teacher(images).shape == (2, 17, 64) and teacher.dim == 64
    assert torch.allclose(pooled(teacher, images), theirs.visual(TF.normalize(images, mean, std)), atol=1e-5)
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training


def test_quick_gelu_comes_from_the_tag_or_from_the_models_name(small_clips, monkeypatch, tmp_path):
    import open_clip
    file, images = str(tmp_path / "weights.pt"), torch.rand(2, 3, 64, 64)
    torch.save(open_clip.create_model("small-16-quickgelu").state_dict(), file)
    expected = open_clip.create_model("small-16-quickgelu", file).eval().visual
    quick, normal = (build_teacher(f"small-16{name}/{file}", grid=4) for name in ("-quickgelu", ""))
    expected = expected((images - quick.mean) / quick.std)
    assert torch.allclose(pooled(quick, images), expected, atol=1e-6)
    assert not torch.allclose(pooled(normal, images), expected, atol=1e-4)
    # a tag whose record says quick_gelu, on a model whose configuration does not
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda name: ["tag"])
    for module in (open_clip, open_clip.factory):
        monkeypatch.setattr(module, "get_pretrained_cfg", lambda name, tag: dict(url="", quick_gelu=True))
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *a, **k: file)
    assert torch.allclose(pooled(build_teacher("small-16/tag", grid=4), images), expected, atol=1e-6)


def test_a_teacher_of_another_patch_size_has_the_students_grid(small_clips):
    images, state = torch.rand(2, 3, 48, 48), torch.get_rng_state()
    teacher = build_teacher("small-16/random", grid=6)
    assert torch.equal(torch.get_rng_state(), state)      # random teachers do not touch the global RNG
    again = (torch.rand(1), build_teacher("small-16/random", grid=6))[1]
    assert teacher.image_size == 96 and teacher(images).shape == (2, 37, 64)
    resized = F.interpolate(images, (96, 96), mode="bicubic", antialias=True).clamp(0, 1)
    assert torch.allclose(teacher(images), again(resized), atol=1e-5)      # and are the same every time


@pytest.mark.parametrize("kind", ("small-16/random", "timm/vit_tiny_patch16_224/random", "ours", "experts"))
def test_every_kind_of_teacher_works_in_every_precision(small_clips, tmp_path, kind):
    path = write_checkpoint(tmp_path / "x.pt", experts=3 if kind == "experts" else 0)
    name, images = kind if "/" in kind else path, torch.rand(2, 3, 32, 32)
    exact = build_teacher(name, grid=4)(images)
    if name == path:
        assert torch.equal(exact, checkpoint.load_encoder(path).eval()(normalized(images))[0])
    for precision, error in ((torch.bfloat16, 0.03), (torch.float16, 0.003)):
        features = build_teacher(name, grid=4).to(dtype=precision)(images)
        assert features.dtype == precision
        assert ((features.float() - exact).norm() / exact.norm()).item() < error


@pytest.mark.parametrize("name, prefix, has_cls", (
    ("vit_small_patch14_reg4_dinov2", 5, True), ("vit_small_patch16_dinov3", 5, True),
    ("vit_base_patch16_siglip_224", 0, False), ("eva02_tiny_patch14_224", 1, True),
    ("vit_base_patch16_clip_224", 1, True), ("vit_medium_patch16_reg4_gap_256", 4, False)))
def test_timms_teachers_are_its_own_forward_without_registers(name, prefix, has_cls):
    import timm
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=0).eval()
    patch = theirs.patch_embed.patch_size[0]
    theirs.set_input_size(img_size=(4 * patch, 4 * patch))
    teacher, images = build_teacher(f"timm/{name}/random", grid=4), torch.rand(2, 3, 4 * patch, 4 * patch)
    config = timm.data.resolve_model_data_config(theirs)
    with torch.no_grad():
        tokens = theirs.forward_features(TF.normalize(images, config["mean"], config["std"]))
        cls = tokens[:, 0] if has_cls else theirs.forward_head(tokens, pre_logits=True)
    assert teacher(images).shape == (2, 17, teacher.dim)
    assert torch.allclose(teacher(images)[:, 1:], tokens[:, prefix:], atol=1e-5)
    assert torch.allclose(teacher(images)[:, 0], cls, atol=1e-5)


def test_a_timm_teacher_has_the_hubs_weights_unless_they_are_random(monkeypatch):
    import timm
    calls = spy(monkeypatch, timm, "create_model")
    build_teacher("timm/vit_tiny_patch16_224/random", grid=2)
    with pytest.raises(checkpoint.LoadError):      # without a network
        build_teacher("timm/vit_tiny_patch16_224", grid=2)
    assert [each.kwargs["pretrained"] for each in calls] == [False, True]


def test_a_clip_teacher_that_cannot_be_downloaded_is_named(capsys, stage, monkeypatch):
    import open_clip
    monkeypatch.setattr(open_clip.factory, "download_pretrained", Mock(side_effect=OSError("no network")))
    openai, laion = (refusal(capsys, "pretrain", *stage("pretrain", "--teacher", f"ViT-B-16/{tag}"))
                     for tag in ("openai", "laion2b_s34b_b88k"))
    assert openai.startswith("teacher ViT-B-16/openai: ") and "no network" in openai
    assert "ViT-B-16-quickgelu/FILE" in openai      # as ViT-B-16/FILE, its targets would silently be wrong
    assert "quickgelu" not in laion


# ---------------------------------------------------------------------------------------------- data, shapes

def outside_blocks(mask, smallest):
    """Masked patches that no fully masked rectangle of `smallest` patches and aspect 0.25 to 4 covers."""
    covered = np.zeros_like(mask)
    for h, w in np.ndindex(15, 15):
        if h * w >= smallest and 0.25 <= h / w <= 4:
            for top, left in np.ndindex(15 - h, 15 - w):
                if mask[top:top + h, left:left + w].all():
                    covered[top:top + h, left:left + w] = True
    return (mask & ~covered).sum()


def test_block_masks_have_exact_counts_and_are_blocks():
    rng, lone = np.random.default_rng(0), []
    for grid, ratio in ((14, 0.4), (14, 0.75), (8, 0.4), (6, 0.5), (2, 0.4)):
        for _ in range(50):
            mask = data.block_mask(rng, grid, ratio)
            assert mask.sum() == int(ratio * grid ** 2)
            if (grid, ratio) == (14, 0.4):
                lone.append(outside_blocks(mask.reshape(grid, grid), 16))
    assert np.mean(lone) < 8 and max(lone) < 16      # nearly all 78 lie in whole blocks of at least 16


def test_every_view_of_every_image_has_a_mask_of_its_own(photos):
    views = data.TrainViews(data.Folder(photos, "train"), 28, 42, 14, 0.4)
    masks = [views[epoch, index]["mask"].tobytes() for epoch, index in np.ndindex(2, 32)]
    assert len(set(masks)) == 64


def test_odd_images_load_right(tmp_path):
    y, x = np.mgrid[0:64, 0:80]
    picture = np.stack([y * 3, x * 3, x + y], -1).astype(np.uint8)
    image, exif, gray = Image.fromarray(picture), Image.Exif(), picture.mean(-1).astype(np.uint8)
    exif[0x0112] = 6                                                       # stored lying on its side
    half = Image.fromarray(np.dstack([picture, np.where(x < 40, 255, 0).astype(np.uint8)]))
    for name, stored, wanted, how in (
            ("png_named.JPEG", image, picture, dict(format="PNG")),
            ("cmyk.jpg", image.convert("CMYK"), picture, {}),
            ("gray.jpg", Image.fromarray(gray), np.stack([gray] * 3, -1), {}),
            ("turned.jpg", image.transpose(2), picture, dict(exif=exif)),
            ("alpha.png", half, np.where(x[..., None] < 40, picture, 255), {})):
        stored.save(tmp_path / name, **dict(quality=95) | how)
        seen = data.read_image(tmp_path / name).permute(1, 2, 0).numpy()
        assert seen.dtype == np.uint8 and np.abs(seen.astype(int) - wanted).mean() < 2, name
    Image.fromarray(gray.astype(np.uint16) * 257).save(tmp_path / "16bit.png")
    (tmp_path / "val").mkdir()
    names = [path.rename(tmp_path / "val" / path.name).name for path in tmp_path.glob("*.*")]
    (tmp_path / "val" / ".hidden").mkdir()
    assert data.open_images(str(tmp_path), "val", 32, labels=False).names() == sorted(names)
    with pytest.raises(common.UserError, match="no image|find any class"):      # where labels are needed
        data.open_images(str(tmp_path / "val"), "val", 32)
    with pytest.raises(common.LocalError, match="16bit.png .ValueError: mode I;16, expected 8 bits a channel"):
        data.read_image(tmp_path / "val" / "16bit.png")      # not white, as Pillow would have it


@pytest.mark.skipif(not hasattr(torchvision.io, "decode_jpeg"), reason="a torchvision without a decoder")
def test_jpegs_are_read_without_pillow_and_have_its_pixels(tmp_path, monkeypatch):
    """Whatever their name, color space or orientation; a PNG by that name is read as a PNG."""
    image, pictures, expected = TF.to_pil_image(Shapes("train", 50)[0][0]).crop((0, 0, 41, 50)), {}, {}
    for orientation in range(1, 9):
        pictures[f"{orientation}.jpg"] = image, dict(exif=Image.Exif())
        pictures[f"{orientation}.jpg"][1]["exif"][0x0112] = orientation
    pictures |= {"gray.png": (image.convert("L"), {}), "cmyk.JPEG": (image.convert("CMYK"), {}),
                 "progressive.jpg": (image, dict(progressive=True))}
    for name, (picture, how) in pictures.items():
        picture.save(tmp_path / name, format="JPEG", **how)
        expected[name] = TF.pil_to_tensor(ImageOps.exif_transpose(Image.open(tmp_path / name)).convert("RGB"))
    monkeypatch.setattr(Image, "open", Mock(side_effect=AssertionError))
    for name, pixels in expected.items():
        assert torch.equal(data.read_image(tmp_path / name), pixels), name


def test_an_image_that_cannot_be_read_is_named(stage, photos, tmp_path):
    """The run leaves, and so do its loaders."""
    shutil.copytree(Path(photos, "train", "class_0"), tmp_path / "train" / "ant")
    path = tmp_path / "train" / "ant" / "3.jpg"
    path.write_bytes(path.read_bytes()[:-40])
    process = start(HERE / "pretrain.py", *stage("pretrain", "--data", str(tmp_path), "--workers 2"))
    error = finish(process)[1]
    assert process.returncode == 2 and "Traceback" not in error
    assert f"cannot read the image {path} (" in error


def test_classes_are_those_of_train_and_folders_that_do_not_fit_are_named(capsys, stage, tmp_path):
    argv = stage("finetune", "--data", str(tmp_path))
    folders = [tmp_path / name for name in ("train/ant", "train/bee", "val/bee")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert f"no image in {tmp_path / 'train'}" in refusal(capsys, "finetune", *argv)
    for folder in folders:
        Image.new("RGB", (8, 8)).save(folder / "x.png")
    val = data.Folder(str(tmp_path), "val")
    assert val.classes == ["ant", "bee"] and val[0][1] == 1
    (tmp_path / "val" / "wasp").mkdir()
    error = refusal(capsys, "finetune", *argv)
    assert f"class 'wasp' of {tmp_path / 'val'} is not among those of train/" in error


@pytest.mark.parametrize("name, kind, splits", (
    ("cifar10", "CIFAR10", ({"train": True}, {"train": False})), ("food101", "Food101", ("train", "test"))))
def test_torchvisions_sets_are_downloaded_or_refused_in_words(capsys, stage, monkeypatch, name, kind, splits):
    for ours, theirs in zip(("train", "val"), splits):
        monkeypatch.setattr(data, kind, made := Mock())
        assert data.open_images(name, ours, 32) is made.return_value
        words = dict(transform=TF.pil_to_tensor, download=True)
        assert made.call_args == (call("data", **theirs | words) if kind == "CIFAR10" else
                                  call("data", theirs, **words))
    monkeypatch.setattr(data, kind, Mock(side_effect=OSError("no route to host")))
    error = refusal(capsys, "pretrain", *stage("pretrain", "--data", name))
    assert error.startswith(f"--data {name}: torchvision could not download it (no route to host)")


def test_epochs_visit_every_image_once_in_new_views_and_resume_in_the_middle(photos):
    order = list(data.train_order(33, 8, 8, 42, 0, 8))
    first, second = ([key for batch in order[at:at + 4] for key in batch] for at in (0, 4))
    assert len(set(first)) == len(set(second)) == 32 and [i for _, i in first] != [i for _, i in second]
    assert list(data.train_order(33, 8, 8, 42, 3, 8)) == order[3:]
    views = data.TrainViews(data.Folder(photos, "train"), 32, 42, 4, 0.4)
    image, label = views.images[5]
    crop = data.random_crop(np.random.default_rng((42, 1, 5)), *image.shape[1:], (0.2, 1.0))
    image = TF.resized_crop(image, *crop, [32, 32], TF.InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(views[1, 5]["image"], image) and views[1, 5]["label"] == label
    drawn = [views[epoch, index] for epoch, index in np.ndindex(8, 32)]
    jitter = np.array([view["jitter"] for view in drawn])
    assert 0.4 < np.mean([view["flip"] for view in drawn]) < 0.6
    assert len(np.unique(jitter)) == jitter.size
    assert (abs(jitter.min(0) - 0.6) < 0.02).all() and (abs(jitter.max(0) - 1.4) < 0.02).all()


def test_crops_are_drawn_as_random_resized_crop_draws_them():
    rng = np.random.default_rng(0)
    crops = np.array([data.random_crop(rng, 300, 400, (0.2, 1.0)) for _ in range(2000)])
    top, left, h, w = crops.T
    assert top.min() == left.min() == 0 and (top + h).max() == 300 and (left + w).max() == 400
    share, aspect = h * w / 120000, w / h
    assert 0.19 < share.min() < 0.22 and 0.95 < share.max() <= 1
    assert 0.74 < aspect.min() < 0.77 and 1.3 < aspect.max() < 1.35
    for height, width in ((1, 1), (20000, 10), (1, 500)):
        top, left, h, w = data.random_crop(rng, height, width, (0.2, 1.0))
        assert 0 < h <= height and 0 < w <= width and top + h <= height and left + w <= width
    assert data.random_crop(rng, 20000, 10, (0.2, 1.0)) == (9993, 0, 13, 10)      # the middle


def test_flip_and_color_jitter_are_torchvisions_image_by_image():
    image, factors = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8), 0.6 + 0.8 * torch.rand(5, 3)
    flip = torch.tensor([True, False, True, False, False])
    ours = data.augment(dict(image=image, flip=flip, jitter=factors))
    for i, (brightness, contrast, saturation) in enumerate(factors.tolist()):
        theirs = TF.adjust_brightness(image[i].flip(-1) / 255 if flip[i] else image[i] / 255, brightness)
        theirs = TF.adjust_saturation(TF.adjust_contrast(theirs, contrast), saturation)
        assert torch.allclose(ours[i], theirs, atol=1e-5)


def test_evaluation_views_are_resize_256_and_center_crop_224():
    image = torch.randint(0, 256, (3, 300, 500), dtype=torch.uint8)
    resized = TF.resize(image, 256, interpolation=TF.InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(data.center_view(image, 224), TF.center_crop(resized, 224))


def test_shapes_are_the_same_every_time_and_their_masks_are_the_object():
    train, val = Shapes("train", 48), Shapes("val", 48)
    image, label = train[7]
    assert torch.equal(image, Shapes("train", 48)[7][0]) and not torch.equal(image, val[7][0])
    assert train.classes[label] == "spotted blue" and train.annotation(7).unique().tolist() == [1, 9]
    white = {"striped": [], "spotted": []}
    for index in range(40):                                     # each of its class's hue; spots are white
        (texture, name), mask = train.classes[index % 10].split(), train.mask(index)
        picture = train[index][0].permute(1, 2, 0) / 255
        spread = picture.amax(2) - picture.amin(2)
        hue = colorsys.rgb_to_hsv(*picture[mask][spread[mask].argmax()].tolist())[0]
        assert abs((hue - Shapes.hues[name] + 0.5) % 1 - 0.5) < 0.04 and 0.02 < mask.float().mean() < 0.6
        assert texture == "spotted" or spread[mask].mean() > spread[~mask].mean()
        white[texture].append((picture[mask].amin(1) > 0.75).float().mean().item())
    assert max(white["striped"]) == 0 and 0.2 < np.mean(white["spotted"]) < 0.36


def test_names_of_images_are_told_apart_by_class_and_file(photos, scenes, tmp_path):
    images, copy = data.Folder(photos, "train"), shutil.copytree(photos, tmp_path / "copy")
    (copy / "train/class_3").rename(copy / "train/class_9")
    shutil.copytree(Path(photos, "train"), tmp_path / "more/train").joinpath("class_0a").mkdir()
    drawn = Shapes("train", 8), *(data.open_images(name, "val", 8) for name in ("shapes", "shapes-noise"))
    labeled = (segment.Scenes(scenes, split) for split in ("training", "validation"))
    sets = (images, *(data.Folder(str(tmp_path / x), "train") for x in ("copy", "more")), *labeled, *drawn)
    assert len({data.digest(images, images), *map(data.digest, sets)}) == 9


# ------------------------------------------------------------------------------------- machine, optimization

@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA")
def test_without_cuda_fp16_becomes_float32_in_one_line(capsys):
    args = pretrain.parse_args([])
    machine = common.Machine(args)
    assert machine.amp is None and machine.compile is False and vars(args) == vars(pretrain.parse_args([]))
    line, = capsys.readouterr().out.splitlines()
    assert "--amp fp16 becomes off" in line and "--amp bf16" in line
    assert common.Machine(pretrain.parse_args(["--amp", "bf16"])).amp == torch.bfloat16


def test_a_process_has_its_share_of_the_cores_as_loaders(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    for processes, flags, workers in (("1", "", 16), ("1", "--workers 40", 40), ("4", "", 6),
                                      ("macOS", "", 12)):
        if processes == "macOS":
            monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes.replace("macOS", "1"))
        assert common.Machine(pretrain.parse_args(f"--amp off {flags}".split())).workers == workers


def test_an_error_of_any_machine_is_printed(monkeypatch, capsys):
    def fails(args):
        raise common.UserError("no such disk")
    for rank, local_rank, says in (("2", "0", True), ("3", "1", False)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit):
            common.launch(fails, None)
        assert ("no such disk" in capsys.readouterr().err) == says


def test_each_step_and_rank_has_random_numbers_of_its_own():
    drawn = {}
    for key in ((1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0), (1, 0, 0)):
        common.seed_everything(*key)
        assert drawn.setdefault(key, number := torch.rand(()).item()) == number
    assert len(set(drawn.values())) == len(drawn) == 4


def test_a_process_without_a_gpu_says_so(monkeypatch, capsys):
    """It alone: the others wait for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    error = refusal(capsys, "knn", "x.pt")
    assert error == "process 2 of this machine has no GPU: there are 2, counted from 0"


def test_processes_download_one_at_a_time_where_the_disk_has_locks(tmp_path):
    log, fork = tmp_path / "log", torch.multiprocessing.get_context("fork")

    def download(name):
        with common.lock(tmp_path / "data", wait=True):
            for _ in range(2):
                time.sleep(0.05)
                log.open("a").write(name)
    processes = [fork.Process(target=download, args=(name,)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert re.fullmatch(r"(\w)\1(\w)\2(\w)\3", log.read_text())
    (tmp_path / "other" / ".lock").mkdir(parents=True)      # one that cannot be written
    common.lock(tmp_path / "other", wait=True).close()


def test_batches_must_divide_among_processes():
    with pytest.raises(common.UserError, match="--batch-size 10 is not a multiple of the 4 processes"):
        common.make_plan(pretrain.parse_args(["--batch-size", "10"]), 4, 100)
    for world, micro_steps in ((4, 4), (1, 16)):
        assert common.make_plan(pretrain.parse_args([]), world, 1281167)[:3] == (256, micro_steps, 312)


@pytest.mark.parametrize("name, flags, expected", (
    ("pretrain", "", (3000, 400)), ("finetune", "--epochs 20", (200, 10)), ("linear", "x.pt", (1000, 100)),
    ("segment", "x.pt --iterations 1600", (1600, 15)), ("pretrain", "--warmup-epochs 0", (3000, 0))))
def test_a_default_warm_up_keeps_its_share_and_a_given_one_is_taken_as_it_is(name, flags, expected):
    args = SCRIPTS[name].parse_args([*flags.split(), "--batch-size", "10"])
    plan = common.make_plan(args, 1, 100)
    assert (plan.steps, plan.warmup) == expected
    rates = [common.learning_rate(step, plan, 1.5e-3, 1e-6) for step in range(plan.steps)]
    assert max(rates) == rates[max(plan.warmup - 1, 0)] and rates[-1] == pytest.approx(1e-6)


@pytest.mark.parametrize("amp, clip", (("fp16", 3.0), ("off", 3.0), ("off", 0.0)))
def test_updates_are_clipped_and_skipped_and_counted_where_a_gradient_is_not_finite(monkeypatch, amp, clip):
    machine = common.Machine(pretrain.parse_args(["--amp", "off"]))
    grad_scaler = scaler(init_scale=1024.0) if amp == "fp16" else machine.scaler
    assert machine.scaler.get_growth_factor() == 1.0            # or its scale would overflow in the end
    layer = nn.Linear(4, 4, bias=False)
    optimizer, before = common.adamw(layer, 0.1, 0.05, (0.0, 0.95)), layer.weight.detach().clone()
    for value, scale in ((math.inf, 512), (math.nan, 256), (1.0, 256)):
        grad_scaler.scale(100 * layer(torch.ones(1, 4)).sum()).backward()
        layer.weight.grad[0, 0] *= value
        metrics = common.optimizer_step(optimizer, grad_scaler, clip)
        assert metrics["skipped"].item() == (value != 1.0) == torch.equal(layer.weight, before)
        assert grad_scaler.get_scale() == (scale if amp == "fp16" else 1.0) and layer.weight.grad is None
    assert metrics["grad_norm"].item() == 400                   # of the unscaled gradients, before clipping
    assert optimizer.state[layer.weight]["exp_avg"].norm().item() == pytest.approx(clip or 400, rel=1e-4)
    grad_scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
    gradient = layer.weight.grad
    monkeypatch.setattr(common.dist, "is_initialized", lambda: True)      # there it is a view of DDP's bucket
    common.optimizer_step(optimizer, grad_scaler, clip)
    assert layer.weight.grad is gradient and not gradient.any()


class HostReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses the operations that make the host wait for a device."""
    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique2", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.waiting
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flags", (
    "", "--recompute --balance rlw", "--experts 0 --balance gradnorm",
    "--encoding dense --objective token_cls_pixel --importance-weight 1"))
def test_the_host_waits_for_nothing_between_logged_steps(stage, monkeypatch, flags):
    """A step reads no value of a tensor; on a GPU each such read would empty the queue."""
    reads = HostReads()
    at_step(monkeypatch, 0, reads.__enter__)
    at_step(monkeypatch, 1, lambda: reads.__exit__(None, None, None))
    train(stage("pretrain", f"--max-steps 3 --repeat-batch {flags}"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
def test_no_step_synchronizes_a_gpu(stage, monkeypatch):
    at_step(monkeypatch, 3, lambda: torch.cuda.set_sync_debug_mode("error"))
    at_step(monkeypatch, 6, lambda: torch.cuda.set_sync_debug_mode("default"))
    train(stage("pretrain", "--max-steps 8 --repeat-batch --amp fp16"))


# -------------------------------------------------------------------------- every stage equals a plain loop

class Plain:
    """What the plain loops share: the order of images, the schedule, AdamW, all written once more."""

    def __init__(self, args, trained, images, views, rates=lambda name: 1.0, betas=(0.9, 0.999), world=1):
        self.args, self.trained, self.images, self.views, self.world = args, trained, images, views, world
        groups = []
        for name, p in trained.named_parameters():
            decays = p.ndim > 1 and not name.endswith(("b1", "b2", "_token", "pos_embed"))
            if p.requires_grad:
                groups.append(dict(params=[p], share=rates(name), weight_decay=decays * args.weight_decay))
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas)
        self.logged, self.rates, self.felt = [], [], {}

    def steps(self, linear=False):
        """Yields (step, share of the gradient, micro-batch) for each micro-batch of each of the steps."""
        args, epoch_steps = self.args, len(self.images) // self.args.batch_size
        if "epochs" in args:
            total, warmup = args.epochs * epoch_steps, args.warmup_epochs * epoch_steps
        else:
            total, warmup = args.iterations, args.warmup_iterations
        for step in range(args.max_steps):
            way = (step + 1 - warmup) / (total - warmup)
            fall = 1 - way if linear else (1 + math.cos(math.pi * way)) / 2
            rate = args.min_lr + (args.lr - args.min_lr) * fall if way > 0 else args.lr * (step + 1) / warmup
            epoch, at = divmod(step, epoch_steps)
            order = np.random.default_rng((args.seed, epoch)).permutation(len(self.images))
            order = order[at * args.batch_size:(at + 1) * args.batch_size]
            for rank in range(self.world):
                common.seed_everything(args.seed, step, rank)
                parts = order[rank::self.world].reshape(-1, args.micro_batch)
                for part in parts:
                    batch = torch.utils.data.default_collate([self.views[epoch, int(i)] for i in part])
                    yield step, 1 / len(parts) / self.world, batch
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
            for p in parameters:
                self.felt[p] = torch.maximum(self.felt.get(p, p.detach() * 0), (p.grad / norm).abs())
                if args.clip_grad and norm > args.clip_grad:
                    p.grad.mul_(args.clip_grad / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["share"]
            self.logged.append(norm.item())
            self.rates.append(rate)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def equals(self, state, log):
        for first, line in zip([0, *(line["step"] for line in log)], log):
            assert line["grad_norm"] == pytest.approx(np.mean(self.logged[first:line["step"]]), rel=1e-3)
            assert line["lr"] == pytest.approx(self.rates[line["step"] - 1], rel=1e-5)
        assert self.trained.state_dict().keys() == state["model"].keys()
        for name, value in self.trained.state_dict(keep_vars=True).items():
            wrong = (value - state["model"][name]).abs() > self.args.lr / 100 + 1e-4 * value.abs()
            # where a gradient is rounding, so is what AdamW makes of it: keys' biases, those before BatchNorm
            felt = self.felt[value] > 1e-6 if value in self.felt else not name.endswith("running_mean")
            assert (wrong & felt).double().mean() < 0.001, name


def plain_pretraining(args, world=1):
    """pretrain.main, image by image"""
    grid, experts, objectives = args.image_size // args.patch_size, args.experts, args.objective.split("_")
    images = data.open_images(args.data, "train", args.image_size)
    views = data.TrainViews(images, args.image_size, args.seed, grid, args.mask_ratio)
    teacher = checkpoint.load_encoder(args.teacher, grid=grid).eval()
    common.seed_everything(args.seed)
    encoder = model.build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                              experts=experts, moe_blocks=args.moe_blocks, drop_path=args.drop_path)
    student = model.Explore(encoder, teacher.dim, args.mask_ratio, args.encoding == "dense",
                            "pixel" in objectives, args.loss_router)
    plain = Plain(args, student, images, views, betas=args.betas, world=world)
    fixed = dict(token=1.0, cls=args.cls_weight, pixel=args.pixel_weight)
    weights = torch.tensor([fixed[name] for name in objectives])
    lambdas, given = [], args.entropy_weight
    for e in range(2 if args.loss_router else experts):
        lambdas.append(given[e] if e < len(given) else given[-1])
    blocks = [len(encoder.blocks)] if args.loss_router else args.loss_block or encoder.moe_blocks[-1:]
    if args.balance == "gradnorm":
        weights, first, seen, shared = torch.ones(len(objectives)), None, [], list(encoder.norm.parameters())
    at, plain.weights, plain.losses, plain.first = 0, [], [], None
    for step, share, batch in plain.steps():
        if step > at and args.balance == "gradnorm":      # between steps, from all micro-batches of the last
            values, grads = (torch.stack(x).mean(0) for x in zip(*seen))
            plain.first = first = values if first is None else first
            seen, norms = [], grads.norm(dim=1)
            rate = values / first
            goal = (weights * norms).mean() * (rate / rate.mean()) ** args.gradnorm_alpha
            slope = torch.sign(weights * norms - goal) * norms
            weights = (weights - args.gradnorm_lr * slope).clamp_min(1e-3)
            weights = weights / weights.sum() * len(objectives)
        if args.balance == "rlw":
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
            weights = torch.randn(len(objectives), generator=generator).softmax(0)
        at, pixels, mask = step, data.augment(batch), batch["mask"]
        with torch.no_grad():
            targets = teacher(normalized(pixels))[0]
        values, regularizer = plain_losses(
            student(normalized(pixels), mask), targets, pixels, mask, objectives, blocks, args.loss_weights,
            args.detach, lambdas, args.entropy_on, args.importance_weight)
        if args.balance == "gradnorm":
            grads = [torch.autograd.grad(x, shared, retain_graph=True) for x in values]
            seen.append((values.detach(), torch.stack([torch.cat(g) for g in grads])))
        plain.weights.append(weights.tolist())
        plain.losses.append(values.tolist())
        (share * ((weights * values).sum() + regularizer)).backward()
    return plain


ODD = ("--max-steps 3 --epochs 3 --warmup-epochs 0.5 --lr 0.01 --min-lr 0.002 --weight-decay 0.5 "
       "--clip-grad 0.5 --betas 0.8 0.7 --drop-path 0.4 --seed 7 --micro-batch 4 --save-every 1 --experts 3 ")


@pytest.mark.parametrize("flags", (
    "--mask-ratio 0.6 --cls-weight 0.3 --entropy-weight 0.2 --moe-blocks 0 2 3 --loss-block 2 --recompute",
    "--encoding dense --objective token_cls_pixel --pixel-weight 0.3 --entropy-weight 0.3 0.1 "
    "--importance-weight 2 --loss-weights combine",
    "--objective token_pixel --detach --loss-block 1 3 --entropy-on combine --balance rlw",
    "--encoding dense --objective token_pixel --balance gradnorm --gradnorm-alpha 0.5 --gradnorm-lr 0.3",
    "--experts 0 --objective token --drop-path 0.1 --clip-grad 0", "--loss-router --entropy-weight 0.1",
    "--loss-router --experts 0 --encoding dense --objective token_pixel --entropy-weight 0.2 0.1",
    "--loss-weights uniform --balance gradnorm --gradnorm-alpha 0 --gradnorm-lr 0.1 --image-size 48"))
def test_pretraining_equals_a_plain_loop(stage, monkeypatch, flags):
    monkeypatch.setattr(model.PixelDecoder.__init__, "__defaults__", (64, 1, 2))
    argv, watched = stage("pretrain", ODD + flags), spy(monkeypatch, pretrain, "warn_of_collapse")
    recomputed = spy(monkeypatch, torch.utils.checkpoint, "checkpoint")
    _, state, log = play("pretrain", argv)
    assert bool(recomputed) == ("recompute" in flags)
    plain = plain_pretraining(pretrain.parse_args(argv))
    plain.equals(state, log)
    assert log[-1]["objective_weights"] == pytest.approx(np.mean(plain.weights, 0), rel=1e-3)
    assert len(log[-1].get("scale", [])) == " ".join(state["model"]).count(".scale")
    assert watched[-1].args[0].keys() == log[-1].keys()


@needs_loopback
def test_two_processes_equal_a_plain_loop_over_the_images_of_both(stage, tmp_path):
    """Each with a drop path of its own, and one GradNorm for both."""
    argv = stage("pretrain", ODD + "--micro-batch 2 --balance gradnorm --gradnorm-lr 0.3")
    torchrun(2, "pretrain.py", *argv)
    plain, (state, log) = plain_pretraining(pretrain.parse_args(argv), world=2), read_run(tmp_path / "run")
    plain.equals(state, log)
    assert torch.allclose(state["balance"]["first"], plain.first)      # of both
    assert [log[-1]["token"], log[-1]["cls"]] == pytest.approx(np.mean(plain.losses, 0), rel=1e-5)


def layerwise(depth, decay):
    """The rate of each parameter by its layer: embeddings, `depth` blocks, then the rest."""
    def rate(name):
        block = re.search(r"encoder\.blocks\.(\d+)\.", name)
        bottom = name.startswith(("encoder.patch_embed", "encoder.pos_embed", "encoder.cls_token"))
        return decay ** (depth - int(block[1]) if block else depth + 1 if bottom else 0)
    return rate


def normalized(images):
    return TF.normalize(images, model.IMAGENET_MEAN, model.IMAGENET_STD)


@pytest.mark.parametrize("name, flags", (
    ("finetune", "--recipe fr exd --expert-dropout 0.3 --layer-decay 0.4 --drop-path 0.4 --image-size 48"),
    ("finetune", "--recipe fa --layer-decay 1 --drop-path 0.4 --pool mean --augment plain --clip-grad 0"),
    ("linear", ""), ("ep", "--augment plain")))
def test_supervised_stages_equal_a_plain_loop(stage, name, flags):
    argv = stage(name, "--max-steps 3 --epochs 3 --warmup-epochs 1 --lr 0.02 --min-lr 0.002 --seed 7 "
                 "--weight-decay 0.5 --clip-grad 0.5 --batch-size 32 --micro-batch 16 --save-every 1", flags)
    scores, state, log = play(name, argv)
    args, strong, size = SCRIPTS[name].parse_args(argv), "plain" not in flags, 48 if "48" in flags else 32
    images, val = (data.open_images(args.data, split, size) for split in ("train", "val"))
    views = data.TrainViews(images, size, args.seed)
    if strong:
        views = finetune.StrongViews(images, size, args.seed, erase=name == "finetune")
    common.seed_everything(args.seed)
    if name == "finetune":
        dropout = args.expert_dropout if "exd" in args.recipe else 0.0
        encoder = checkpoint.load_encoder(args.checkpoint, size // 8, drop_path=0.4)
        for i in encoder.moe_blocks:
            encoder.blocks[i].mlp.dropout = dropout
        for key, p in encoder.named_parameters():
            p.requires_grad_(key not in frozen_by(args.recipe, [key]))
        trained, frozen = finetune.Classifier(encoder, 4, args.pool), nn.Identity()
        plain = Plain(args, trained, images, views, layerwise(4, args.layer_decay))
    else:
        encoder = checkpoint.load_encoder(args.checkpoint).eval()
        common.seed_everything(args.seed)
        trained = (linprobe.LinearProbe if name == "linear" else linprobe.EfficientProbe)(96, 4)
        frozen, plain = lambda x: encoder(x)[0].detach(), Plain(args, trained, images, views)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=4), v2.CutMix(alpha=1.0, num_classes=4)])
    for _, share, batch in plain.steps():
        pixels, target = normalized(data.augment(batch)), F.one_hot(batch["label"], 4).float()
        if strong:
            pixels, target = mix(pixels, batch["label"])
            target = 0.9 * target + 0.1 / 4
        (-share * (target * trained(frozen(pixels)).log_softmax(1)).sum(1).mean()).backward()
    plain.equals(state, log)
    trained.eval()
    shown = [normalized(data.center_view(val[i][0], size) / 255)[None] for i in range(len(val))]
    ranked = torch.cat([trained(frozen(x)) for x in shown]).argsort(1, descending=True)
    assert log[-1]["top1"] == pytest.approx(100 * np.mean(ranked[:, 0].numpy() == val.targets))
    assert scores["top1"] == max(line["top1"] for line in log) and len(log) == 3


def plain_segmentation(segmenter, val, crop, classes):
    """Mean IoU in percent, with a loop over the windows and one over the classes."""
    hits, union, stride = np.zeros(classes), np.zeros(classes), round(crop * 341 / 512)
    for i in range(len(val)):
        image = TF.resize(val[i][0], crop, interpolation=TF.InterpolationMode.BICUBIC, antialias=True)
        image = normalized(image / 255)[None]
        total, truth = torch.zeros(2, classes, *image.shape[2:]), val.annotation(i)
        starts = ({min(at, side - crop) for at in range(0, side, stride)} for side in image.shape[2:])
        for top, left in itertools.product(*starts):
            logits = segmenter(image[:, :, top:top + crop, left:left + crop])[0]
            logits = F.interpolate(logits, (crop, crop), mode="bilinear")[0]
            total[:, :, top:top + crop, left:left + crop] += torch.stack([logits, torch.ones_like(logits)])
        found = F.interpolate((total[0] / total[1])[None], truth.shape, mode="bilinear")[0].argmax(0) + 1
        for c in range(classes):
            hits[c] += ((found == c + 1) & (truth == c + 1)).sum()
            union[c] += ((truth > 0) & ((found == c + 1) | (truth == c + 1))).sum()
    return 100 * np.mean(hits[union > 0] / union[union > 0])


def test_segmentation_equals_a_plain_loop(stage, monkeypatch):
    argv = stage("segment", "--max-steps 3 --iterations 6 --warmup-iterations 2 --lr 0.003 --min-lr 0.0003 "
                 "--seed 7 --weight-decay 0.5 --clip-grad 0.5 --batch-size 8 --micro-batch 4 --save-every 1 "
                 "--drop-path 0.4 --layer-decay 0.6 --recipe fr exd --expert-dropout 0")
    _, state, log = play("segment", argv)
    args = segment.parse_args(argv)
    scenes, val = (segment.Scenes(args.data, split) for split in ("training", "validation"))
    common.seed_everything(args.seed)
    encoder = checkpoint.load_encoder(args.checkpoint, 4, drop_path=0.4)
    for i in encoder.moe_blocks:
        encoder.blocks[i].mlp.dropout = 0.0
    segmenter = segment.Segmenter(encoder, 11, args.width)
    for key, p in segmenter.named_parameters():
        p.requires_grad_(not key.endswith((".phi", "mlp.scale")) and not key.startswith("encoder.norm"))
    views = segment.SceneViews(scenes, 32, 11, args.seed)
    plain = Plain(args, segmenter, scenes, views, layerwise(4, args.layer_decay))
    for _, share, batch in plain.steps(linear=True):
        truth, loss = batch["annotation"].long(), 0.0
        for part, logits in zip((1.0, 0.4), segmenter(normalized(batch["image"] / 255))):
            logits = F.interpolate(logits, (32, 32), mode="bilinear").log_softmax(1)
            named = logits.gather(1, (truth - 1).clamp_min(0)[:, None])[:, 0]
            loss = loss - part * (named * (truth > 0)).sum() / truth.numel()      # all pixels, labeled or not
        (share * loss).backward()
    plain.equals(state, log)
    assert log[-1]["miou"] == pytest.approx(plain_segmentation(segmenter.eval(), val, 32, 11), rel=1e-3)
    process = common.Machine(args)
    process.sum = lambda matrix: torch.eye(11)      # as if the other processes had all pixels right
    assert segment.evaluate(segmenter, segment.SceneViews(val, 32, 11), process)["miou"] == 100
    calls = spy(monkeypatch, segment, "SceneViews")
    play("segment", stage("segment", "--data shapes --max-steps 1 --seed 7", out="drawn"))
    assert [(each.args[0].stream, *each.args[1:]) for each in calls] == [(0, 32, 11, 7), (1, 32, 11)]


# ------------------------------------------------------------------------- resuming, saving, being stopped

def at_step(monkeypatch, step, action):
    """Calls `action` in the middle of one step, counted over all runs of the test from 0."""
    steps, set_rate = itertools.count(), common.set_rate

    def wrapped(*args):
        if next(steps) == step:
            action()
        set_rate(*args)
    monkeypatch.setattr(common, "set_rate", wrapped)


@pytest.mark.parametrize("name, flags, number", (
    ("pretrain", "--balance gradnorm --gradnorm-lr 0.2 --drop-path 0.2 --micro-batch 4", signal.SIGUSR1),
    ("pretrain", "--balance rlw", signal.SIGHUP), ("finetune", "", signal.SIGTERM),
    ("ep", "", signal.SIGINT), ("segment", "", signal.SIGTERM)), ids=str)
def test_a_run_stopped_by_a_signal_is_the_run_that_was_never_stopped(
        stage, monkeypatch, name, flags, number, capsys, tmp_path):
    """It finishes the step, saves and leaves with 0, or 130 for Ctrl-C; it resumes to the same bits."""
    whole, handler = play(name, stage(name, flags, out="whole"))[1], signal.getsignal(number)
    argv, last = stage(name, flags, out="parts"), tmp_path / "parts" / "last.pt"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        at_step(patch, 2, lambda: os.kill(os.getpid(), number))
        play(name, argv)
    assert stop.value.code == (130 if number == signal.SIGINT else 0)
    assert f"{number.name}: {last} holds step 3; the same command resumes" in capsys.readouterr().out
    play(name, [*argv, "--max-steps", "5", "--workers", "1"])
    _, parts, log = play(name, argv)
    assert_same_bits(whole, parts)
    assert parts["step"] == log[-1]["step"] == 8
    assert signal.getsignal(number) == handler                       # it leaves signals as they were
    written = last.read_bytes()
    play(name, argv)                                                 # a finished run stays as it is
    assert last.read_bytes() == written
    assert parts["sources"].keys() == {"images", "teacher" if name == "pretrain" else "encoder"}


def driver(tmp_path, fault, at_exit="0"):
    """A program: pretrain.py with `fault`, an expression, in the middle of each step, another at its exit."""
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
    process = start(driver(tmp_path, "step == 6 and os.killpg(0, signal.SIGTERM)"), *argv, "--workers", "2")
    out, error = finish(process)
    assert process.returncode == 0 and "Traceback" not in error and "SIGTERM: " in out, error
    assert checkpoint.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 6


def test_a_signal_that_is_ignored_stays_ignored(stage, monkeypatch):
    """SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGHUP))
    try:
        assert train(stage("pretrain"))[0]["step"] == 8
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_leaves_at_once(stage, tmp_path):
    fault = "step == 3 and [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"
    process = start(driver(tmp_path, fault), *stage("pretrain", "--save-minutes 1e-9"))
    error = finish(process)[1]
    assert process.returncode == -signal.SIGINT and "Traceback" not in error
    assert checkpoint.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 2


@needs_loopback
def test_two_processes_leave_together_when_one_gets_the_signal_and_one_resumes(stage, tmp_path):
    argv = stage("pretrain", "--drop-path 0")
    whole, _ = train(stage("pretrain", "--drop-path 0", out="whole"))
    fault = "step == 3 and rank == '1' and os.kill(os.getpid(), signal.SIGTERM)"
    out = torchrun(2, driver(tmp_path, fault, "print('group', dist.is_initialized())"), *argv)
    assert "SIGTERM: " in out and "last.pt holds step 3;" in out      # and torchrun exited with 0
    assert re.findall("group (.*)", out) == ["False", "False"]        # NCCL would warn of a group left behind
    parts, _ = train(argv)                                     # another number of processes: the same curve
    assert parts["step"] == 8
    torch.testing.assert_close(whole["model"], parts["model"], rtol=1e-5, atol=1e-4)


@needs_loopback
@pytest.mark.parametrize("name", ("finetune", "ep", "segment"))
def test_other_stages_resume_and_evaluate_with_another_number_of_processes(stage, name, tmp_path):
    argv = stage(name, f"--lr 1e-3 --save-every {4 if name == 'segment' else 1}")
    play(name, [*argv, "--max-steps", "3"])
    out = torchrun(2, f"{SCRIPTS[name].__name__}.py", *argv)
    state, log = read_run(tmp_path / "run")
    assert state["step"] == 8 and run.finite(state)
    assert [line["step"] for line in log if "top1" in line or "miou" in line] == [4, 8]
    scores, again, _ = play(name, argv)                        # one process sees the two processes' numbers
    assert scores == again["best"] == state["best"]
    assert out.splitlines()[-1].endswith("best " + ", ".join(f"{k} {v:.2f}%" for k, v in scores.items()))


@needs_loopback
def test_all_processes_start_from_the_same_step_or_none_starts(stage, tmp_path):
    """Two agents, as on two machines that share no disk; one of them has a last.pt."""
    play("finetune", stage("finetune", "--max-steps 2", out="one"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1, "--rdzv_backend", "c10d",
               "--rdzv_endpoint", at, HERE / "finetune.py"]
    agents = [start(*command, *stage("finetune", out=out)) for out in ("one", "two")]
    for agent in agents:      # on both machines
        error = finish(agent)[1]
        assert agent.returncode and "not all processes see the same last.pt: --out must be on a disk" in error


def test_a_run_resumes_with_its_own_flags_alone(capsys, stage, monkeypatch, tmp_path):
    argv, calls = stage("pretrain"), spy(monkeypatch, pretrain, "explore_losses")
    train([*argv, "--max-steps", "1"])
    error = refusal(capsys, "pretrain", *argv, "--experts", "4", "--mask-ratio", "0.5")
    assert "--experts was 2, is 4; --mask-ratio was 0.4, is 0.5" in error and "another --out" in error
    error = refusal(capsys, "finetune", *stage("finetune"))
    assert "holds a run of pretrain.py: give another --out" in error
    (tmp_path / "run").rename(tmp_path / "moved")
    argv, last = stage("pretrain", "--amp bf16 --micro-batch 4", out="moved"), tmp_path / "moved" / "last.pt"
    free = "--recompute --no-compile --workers 1 --save-every 1 --save-minutes 1 --max-steps 2"
    state, _ = train([*argv, *free.split()])
    pred, targets = calls[-1].args[:2]
    assert state["step"] == 2 and pred.tokens.dtype == targets.dtype == torch.bfloat16
    for growth, scale in ((1.0, 4.0), (2.0, 1.0)):      # the scaler goes on, but not that of fp16
        torch.save(state | {"scaler": state["scaler"] | {"scale": 4.0, "growth_factor": growth}}, last)
        assert train([*argv, "--max-steps", "3"])[0]["scaler"]["scale"] == scale


def test_a_run_notices_that_what_it_was_made_of_has_changed(stage, photos, tmp_path, capsys):
    """Another teacher of the same name, other images of the same name, a continued encoder."""
    for name in ("one", "two"):
        shutil.copytree(photos, tmp_path / name / "photos")
    teacher, saved = write_checkpoint(tmp_path / "teacher.pt"), (tmp_path / "teacher.pt").read_bytes()
    argv = stage("pretrain", "--teacher", teacher, "--data", f"{tmp_path}/one/photos")
    train([*argv, "--max-steps", "1"])
    write_checkpoint(teacher)
    assert "(the weights of --teacher changed)" in refusal(capsys, "pretrain", *argv)
    Path(teacher).write_bytes(saved)
    argv = [*argv, "--data", f"{tmp_path}/two/photos"]                # the same files in another place
    assert train([*argv, "--max-steps", "2"])[0]["step"] == 2
    (tmp_path / "two/photos/train/class_1/0.jpg").rename(tmp_path / "two/photos/train/class_1/x.jpg")
    assert "(the class or file names in --data changed)" in refusal(capsys, "pretrain", *argv)
    linear = stage("linear", out="linear")
    play("linear", [*linear, "--max-steps", "1"])
    moved = str(shutil.copy(linear[0], tmp_path / "moved.pt"))        # the same weights in another place
    assert play("linear", [moved, *linear[1:], "--max-steps", "2"])[1]["step"] == 2
    copy = shutil.copytree(photos, tmp_path / "val_renamed")
    (copy / "val/class_1/0.jpg").rename(copy / "val/class_1/x.jpg")
    error = refusal(capsys, "linear", *linear, "--data", str(copy))
    assert "(the class or file names in --data changed)" in error
    before = checkpoint.digest(encoder := nano())
    nn.init.zeros_(encoder.pos_embed)      # which may have been resized
    assert checkpoint.digest(encoder) == before
    write_checkpoint(linear[0], experts=2)
    assert "(the weights in CHECKPOINT changed)" in refusal(capsys, "linear", *linear)


def test_the_log_of_a_killed_run_goes_on_where_its_checkpoint_does(stage, tmp_path):
    argv, log = stage("pretrain", "--epochs 20 --save-minutes 0"), tmp_path / "run" / "log.jsonl"
    train([*argv, "--max-steps", "30"])
    lines = log.read_text()
    log.write_text(lines + '{"step": 40}\n{"step": 60}\n{"st')      # killed while it wrote
    assert [line["step"] for line in train(argv)[1]] == [20, 30, 40, 60, 80]
    assert log.read_text().startswith(lines) and not log.with_suffix(".tmp").exists()


def test_a_last_checkpoint_that_does_not_resume_is_named(stage, tmp_path, capsys):
    argv, last = stage("pretrain"), tmp_path / "run" / "last.pt"
    state, _ = train([*argv, "--max-steps", "1"])
    other = state | {"model": state["model"] | {"head.weight": torch.zeros(1)}}
    for broken in ({name: part for name, part in state.items() if name != "optimizer"}, other):
        torch.save(broken, last)
        assert refusal(capsys, "pretrain", *argv).startswith(f"cannot resume from {last} (")
    last.write_bytes(last.read_bytes()[:1000])
    assert f"cannot resume from {last} (" in refusal(capsys, "pretrain", *argv)


def test_a_checkpoint_is_plain_and_rebuilds_its_model(stage, tmp_path, teacher):
    def locks():
        return [link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link).endswith(".lock")]
    before, (state, _) = locks(), train(stage("pretrain", "--max-steps 4 --save-every 1"))
    assert locks() == before
    out = tmp_path / "run"
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock", "args.json", "epoch_0000.pt", "epoch_0001.pt", "last.pt", "log.jsonl"]
    kept = torch.load(out / "epoch_0001.pt", weights_only=True)
    assert kept["args"]["experts"] == 2 and kept["step"] == 4 and "optimizer" not in kept
    encoder = checkpoint.load_encoder(out / "epoch_0001.pt")
    assert encoder.moe_blocks == [1, 3]
    assert torch.equal(encoder.blocks[1].mlp.phi, state["model"]["encoder.blocks.1.mlp.phi"])
    assert json.loads((out / "args.json").read_text())["teacher"] == teacher


def test_a_save_that_fails_leaves_the_last_checkpoint(stage, tmp_path):
    argv = stage("pretrain", "--save-minutes 1e-9")      # last.pt at every step
    before = train([*argv, "--max-steps", "1"])[0]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))      # of a file: as on a full disk
    try:
        with pytest.raises((OSError, RuntimeError)):
            train(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same_bits(before, checkpoint.load_checkpoint(tmp_path / "run" / "last.pt"))
    assert train(argv)[0]["step"] == 8


def test_long_epochs_are_saved_by_the_clock(stage, monkeypatch):
    clock = Mock(wraps=run.time, monotonic=Mock(side_effect=itertools.count()))      # a second a look
    monkeypatch.setattr(run, "time", clock)
    saves = spy(monkeypatch, torch, "save")
    for minutes, steps in (("0", [8]), ("0.05", [3, 6, 8])):
        train(stage("pretrain", "--save-minutes", minutes, out=minutes))
        files = [(Path(file.name).stem, state["step"]) for state, file in (call.args for call in saves)]
        assert [step for name, step in files if name == "last.pt"] == steps
        assert files[0] == ("epoch_0000.pt", 0) and files[-2:] == [("epoch_0002.pt", 8), ("last.pt", 8)]
        saves.clear()


def test_the_best_score_survives_a_restart(stage, tmp_path):
    argv, last = stage("finetune", "--save-every 1"), tmp_path / "run" / "last.pt"
    play("finetune", [*argv, "--max-steps", "4"])
    state, best = torch.load(last, weights_only=True), (tmp_path / "run" / "best.pt").read_bytes()
    torch.save(state | {"best": {"top1": 101.0, "top5": 101.0}}, last)
    scores, _, _ = play("finetune", argv)
    assert scores["top1"] == 101 and (tmp_path / "run" / "best.pt").read_bytes() == best


def test_the_best_checkpoint_is_that_of_the_highest_score(stage, monkeypatch, tmp_path):
    scores = iter([{"top1": top1, "top5": top5} for top1, top5 in ((50.0, 90.0), (80.0, 85.0), (60.0, 99.0))])
    monkeypatch.setattr(finetune, "evaluate", lambda *args: next(scores))
    best, state, log = play("finetune", stage("finetune", "--epochs 3 --save-every 1"))
    assert best == state["best"] == {"top1": 80.0, "top5": 85.0}
    assert [line["top1"] for line in log] == [50.0, 80.0, 60.0]
    assert checkpoint.load_checkpoint(tmp_path / "run" / "best.pt")["step"] == 8


def test_a_second_run_in_the_same_folder_says_so_and_leaves(stage, tmp_path, capsys):
    argv = stage("pretrain", "--max-steps", "1")
    (tmp_path / "run").mkdir()
    program = "import fcntl; fcntl.lockf(f := open('.lock', 'w+'), fcntl.LOCK_SH); print('locked'); input()"
    holder = start("-u", "-c", program, cwd=tmp_path / "run", stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "locked\n"
    assert f"another run is using {tmp_path / 'run'}" in refusal(capsys, "pretrain", *argv)
    holder.kill()
    holder.communicate()
    assert train(argv)[0]["step"] == 1                                    # however the first one ended


def test_a_run_works_on_a_disk_without_locks(stage, monkeypatch):
    monkeypatch.setattr(common.fcntl, "lockf", Mock(side_effect=OSError(errno.ENOLCK, "no locks available")))
    assert train(stage("pretrain", "--max-steps", "1"))[0]["step"] == 1


def test_numbers_that_stay_wrong_stop_the_run_and_reach_no_checkpoint(stage, monkeypatch, capsys, tmp_path):
    argv, last = stage("pretrain", "--epochs", "20"), tmp_path / "run" / "last.pt"
    good, _ = train([*argv, "--max-steps", "15"])
    with monkeypatch.context() as patch:
        patch.setattr(losses, "token_loss", lambda pred, target: (pred * math.nan).mean(-1))
        error = refusal(capsys, "pretrain", *argv)
    assert error.startswith(f"step 40: 25 updates in a row had no finite gradient; {last} holds step 15. To")
    assert_same_bits(good, checkpoint.load_checkpoint(last))
    assert train([*argv, "--max-steps", "17", "--amp", "bf16"])[0]["step"] == 17


def test_fewer_wrong_numbers_are_left_out_and_counted(stage, monkeypatch):
    token_loss, nan = losses.token_loss, math.nan
    factors = iter([1.0] * 5 + [nan] * 19 + [1.0] * 16 + [nan, 1.0] * 20)
    monkeypatch.setattr(losses, "token_loss", lambda *args: token_loss(*args) * next(factors))
    state, log = train(stage("pretrain", "--epochs", "20"))
    assert state["step"] == 80 and run.finite(state)
    assert [line["skipped"] for line in log] == [15, 4, 10, 10]


@pytest.mark.parametrize("name", ("pretrain", "finetune", "segment"))
def test_no_checkpoint_ever_holds_a_nan(stage, capsys, name, tmp_path):
    argv = stage(name, "--lr", "1e39", "--save-every", "1", "--save-minutes", "1e-9")
    error = refusal(capsys, name, *argv)
    assert "the model or the optimizer holds a NaN or infinity; nothing was saved yet. To try:" in error
    assert all(run.finite(checkpoint.load_checkpoint(path)) for path in (tmp_path / "run").glob("*.pt"))


# ------------------------------------------------------------------------------------ a GPU that is not there

class Gpu(torch.utils._python_dispatch.TorchDispatchMode):
    """Within a step, refuses what makes the host wait for the GPU. Elsewhere, what is read has a value."""
    step = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        inputs = self.tensors((args, kwargs))
        watched = self.step and any(x.device.type == "cuda" for x in inputs)
        if name == "_local_scalar_dense" and not watched:
            return 0.5 if inputs[0].is_floating_point() else 1
        assert not watched or name not in (*HostReads.waiting, "bincount"), f"{name} reads values"
        assert not watched or "index" not in name or torch.bool not in {x.dtype for x in inputs}, f"{name} by a mask"
        outputs = func(*args, **(kwargs or {}))
        assert not watched or all(x.device.type == "cuda" for x in self.tensors(outputs)), f"{name} copies back"
        return outputs

    def tensors(self, tree):
        return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def parameters_below(loss):
    """The parameters that a backward pass from `loss` would reach."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node not in seen and node is not None:
            seen.add(node)
            nodes += [below for below, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


@pytest.fixture
def fake_gpu(monkeypatch):
    """fake_gpu(STAGE, ARGV) runs main on `cuda:0` with tensors that have a device, but no values."""
    gpu, fakes = Gpu(), FakeTensorMode(allow_non_fake_inputs=True)
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)
    for name, value in dict(is_available=True, device_count=1, max_memory_allocated=1, set_device=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)

    def to(module, device, dtype=None):      # PyTorch's would swap fake tensors, which cannot be
        for part in module.modules():
            for name, x in part.named_parameters(recurse=False):
                x = nn.Parameter(torch.empty(x.shape, dtype=dtype or x.dtype, device=device), x.requires_grad)
                setattr(part, name, x)
            for name, x in part.named_buffers(recurse=False):
                setattr(part, name, torch.empty(x.shape, dtype=dtype or x.dtype, device=device))
        return module

    def loader(views, batch_sampler, **kwargs):      # reads real images
        for keys in batch_sampler:
            with torch.utils._python_dispatch._disable_current_modes():
                batch = torch.utils.data.default_collate([views[key] for key in keys])
            yield {name: fakes.from_tensor(x) for name, x in batch.items()}

    def backward(loss):
        for parameter in parameters_below(loss):
            parameter.grad = torch.zeros_like(parameter)

    def optimizer_step(optimizer, *args, step=common.optimizer_step):
        assert all(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        return step(optimizer, *args)

    def end_step(*args, end=run.Run.end_step):
        gpu.step = False
        line = end(*args)
        gpu.step = True
        return line
    for owner, changed in ((nn.Module, to), (data, loader), (torch.Tensor, backward), (common, optimizer_step),
                           (run.Run, end_step)):
        monkeypatch.setattr(owner, changed.__name__.replace("loader", "DataLoader"), changed)
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda x, **kwargs: x)      # looks at values
    monkeypatch.setattr(FakeTensor, "tolist", lambda x: np.ones(x.shape).tolist() if not gpu.step else 1 / 0)
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, inputs, **kwargs: list(map(torch.zeros_like, inputs)))
    monkeypatch.setattr(common.Machine, "largest", lambda machine, *values: values)
    monkeypatch.setattr(run.Run, "save", lambda *args: None)
    at_step(monkeypatch, 0, lambda: setattr(gpu, "step", True))

    def on_gpu(name, argv):
        with fakes, gpu:
            SCRIPTS[name].main(SCRIPTS[name].parse_args(argv))
    yield on_gpu
    data.constant.cache_clear()


@pytest.mark.parametrize("name, flags", (
    ("pretrain", "--teacher small-16/random --image-size 64 --patch-size 16"),
    ("pretrain", "--encoding dense --objective token_pixel --balance gradnorm"),
    ("pretrain", "--loss-router --experts 0"), ("finetune", ""), ("linear", ""), ("ep", ""),
    ("segment", "--batch-size 8")))
def test_a_step_stays_on_its_gpu_reads_no_value_and_reaches_every_parameter(
        stage, fake_gpu, small_clips, name, flags):
    fake_gpu(name, stage(name, "--amp fp16 --no-compile --repeat-batch --max-steps 2 --micro-batch 4", flags))


# ---------------------------------------------------------------------------------- log, bar, names, flags

def test_the_first_lines_and_the_last_say_what_runs_and_where_its_result_is(stage, photos, tmp_path, capsys):
    train(stage("pretrain", "--max-steps 3"))
    what, where, last = capsys.readouterr().out.splitlines()
    out = tmp_path / "run"
    assert where == f"{out}: nothing was saved yet" and what == (
        "pretrain: vit_nano, 0.6 M parameters, 2 experts, token_cls; 32 images; steps 0 to 3 of 8, 4 an "
        "epoch; 1 x cpu in float32")
    speed = r"step 3 of 8; \d+ images/s, \d+% of the time waiting for them, \d+\.\d GiB"
    assert re.fullmatch(rf"{re.escape(str(out))}: {speed}; next: python knn.py .*/epoch_\*.pt --d.*", last)
    first = (out / "epoch_0000.pt").read_bytes()
    train(stage("pretrain", "--max-steps 4"))
    assert f"\n{out}: {out / 'last.pt'} holds step 3\n" in capsys.readouterr().out
    train(stage("pretrain", "--max-steps 2"))
    assert "steps 4 to 4 of 8" in capsys.readouterr().out and (out / "epoch_0000.pt").read_bytes() == first
    shutil.copytree(Path(photos, "train", "class_0"), tmp_path / "my photos")      # no labels for k-NN
    train(stage("pretrain", "--data", str(tmp_path / "my photos"), "--max-steps 1", out="flat"))
    flat = f"next: python routing.py {tmp_path / 'flat'}/last.pt --data '{tmp_path / 'my photos'}'\n"
    assert capsys.readouterr().out.endswith(flat) or "'" in str(tmp_path) or " " in str(tmp_path)


def test_the_progress_bar_names_the_stage_and_no_score_before_the_first_evaluation(stage, monkeypatch):
    shown = []
    monkeypatch.setattr(run.tqdm, "set_postfix", lambda bar, x, refresh: shown.append((bar.desc, *x)))
    play("finetune", stage("finetune", "--save-minutes 1e-9 --save-every 9"))
    play("pretrain", stage("pretrain", "--max-steps 1 --objective token_cls_pixel", out="pretrained"))
    assert shown == [*[("finetune", "loss")] * 7, ("finetune", "loss", "top1", "top5"),
                     ("pretrain", "token", "cls", "pixel")]


def test_the_log_says_what_share_of_the_time_went_into_waiting_for_the_loader(stage, monkeypatch):
    now, views = [0.0], data.TrainViews.__getitem__

    def takes(seconds, function):
        return lambda *args: (now.__setitem__(0, now[0] + seconds), function(*args))[1]
    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(data.TrainViews, "__getitem__", takes(0.5, views))      # 4 s for a batch of 8
    monkeypatch.setattr(common, "set_rate", takes(6, common.set_rate))
    line = train(stage("pretrain", "--max-steps 6 --save-every 1"))[1][-1]      # of two steps
    assert line["loader_wait"] == pytest.approx(0.4) and line["images_per_second"] == pytest.approx(0.8)


def test_training_on_the_first_batch_alone_lowers_the_loss_and_logs_the_diagnostics(stage, monkeypatch):
    drawn, view, watched = [], data.TrainViews.view, spy(monkeypatch, pretrain, "warn_of_collapse")
    monkeypatch.setattr(data.TrainViews, "view", lambda *args: (drawn.append(args), view(*args))[1])
    added, add = [], run.Log.add
    monkeypatch.setattr(run.Log, "add", lambda log, metrics: (added.append(metrics), add(log, metrics)))
    _, log = train(stage("pretrain", "--repeat-batch --micro-batch 4 --epochs 20 --lr 2e-3 --drop-path 0"))
    first, last = log[0], log[-1]
    assert len(drawn) == 8 and last["loader_wait"] == 0 and 0.1 < last["memory_gib"] < 100
    assert watched[-1].args[0]["step"] == 80
    assert not any(x.requires_grad for metrics in added for x in metrics.values())      # they keep no graph
    assert last["token"] < 0.7 * first["token"] and last["cls"] < first["cls"]
    assert [(line["step"], line["epoch"]) for line in log] == [(20, 5), (40, 10), (60, 15), (80, 20)]
    assert last["lr"] == pytest.approx(1e-6) and last.keys() >= {"token_unweighted", "token_ratio"}
    assert last["loss"] == pytest.approx(last["token"] + 0.4 * last["cls"] + last["entropy_loss"], rel=1e-3)
    for name in "entropy dispatch_cv cls_share scale objective_weights".split():
        assert len(last[name]) == 2      # experts, MoE blocks, objectives
    for steps in (1, 3):      # a resumed run goes on with the same batch
        train(stage("pretrain", f"--repeat-batch --max-steps {steps}", out="again"))
    assert all(torch.equal(a[2], b[2]) for a, b in zip(drawn[8:16], drawn[16:], strict=True))


def test_a_router_that_collapses_is_warned_of(recwarn):
    for line, warned in (({}, False), ({"token_ratio": 0.25}, False), ({"pixel_ratio": 0.15}, True)):
        pretrain.warn_of_collapse(line)
        assert [f"collapses: {name}" in str(w.message) for name in line for w in recwarn.list] == [True] * warned
        recwarn.clear()


def test_the_run_folder_is_named_after_the_flags_that_matter():
    for flags, name in (("", ""), ("--workers 3 --micro-batch 8 --max-steps 4 --amp bf16 --save-every 1", ""),
                        ("--data x/cifar10 --lr 1e-3 --detach", "_data=cifar10_detach=True_lr=0.001"),
                        ("--entropy-weight 5 24", "_entropy_weight=5.0+24.0")):
        assert pretrain.parse_args(flags.split()).out == f"runs/pretrain{name}"
    assert finetune.parse_args(["runs/a b/x.pt"]).out == "runs/finetune_checkpoint=runs-a-b-x.pt"
    assert knn.parse_args(["x.pt"]).out is None


def test_the_defaults_are_the_papers(monkeypatch):
    monkeypatch.setenv("IMAGENET", "there")
    args = pretrain.parse_args([])
    assert (args.lr, args.min_lr, args.weight_decay, args.clip_grad, args.drop_path, args.betas) == (
        1.5e-3, 1e-6, 0.05, 3.0, 0.1, [0.9, 0.95])
    assert (args.seed, args.save_every, args.save_minutes, args.data) == (42, 10, 30.0, "there")
    near, probe, tuned, scenes = (s.parse_args(["x.pt"]) for s in (knn, linprobe, finetune, segment))
    assert (near.k, near.temperature, probe.lr, probe.weight_decay) == (20, 0.07, 2e-3, 0.0)
    assert (tuned.lr, tuned.layer_decay, tuned.drop_path) == (5e-4, 0.65, 0.1)
    assert (scenes.lr, scenes.layer_decay, scenes.crop_size, scenes.iterations) == (8e-5, 0.85, 512, 160_000)


@pytest.mark.parametrize("flags", ("", "--balance gradnorm", "--objective token_cls_pixel --encoding dense"))
def test_compiled_training_follows_the_plain_curve(stage, monkeypatch, flags):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(model.PixelDecoder.__init__, "__defaults__", (64, 1, 2))
    monkeypatch.setitem(model.PRESETS, "vit_nano", dict(dim=96, depth=2, heads=3))
    flags = f"--drop-path 0 --max-steps 2 --micro-batch 4 {flags}"
    (plain, plain_log), (compiled, compiled_log) = (
        train(stage("pretrain", f"{flags} {flag}", out=flag)) for flag in ("--no-compile", "--compile"))
    for name in ("loss", "token", "entropy_loss", "grad_norm", "objective_weights"):
        assert plain_log[-1][name] == pytest.approx(compiled_log[-1][name], rel=1e-4), name
    torch.testing.assert_close(plain["model"], compiled["model"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("flags, expected", (
    ("--image-size 33", "--image-size 33 is not a multiple of --patch-size 8"),
    ("--batch-size 64", "has only 32 training images"),
    ("--micro-batch 3", "--micro-batch 3 does not divide 8, each process's share"),
    *((f"--experts 0 {flag}", f"{flag.split()[0]} needs --experts above 0") for flag in (
        "--detach", "--loss-block 3", "--loss-weights combine", "--entropy-weight 1",
        "--entropy-on combine", "--importance-weight 1", "--moe-blocks 1", "--moe-blocks 1 --loss-router")),
    ("--balance gradnorm --cls-weight 1", "--cls-weight needs --balance static"),
    ("--objective token --cls-weight 1", "--cls-weight needs --balance static, and cls in --objective"),
    ("--pixel-weight 2", "--pixel-weight needs --balance static, and pixel in --objective"),
    ("--balance rlw --gradnorm-lr 1", "--gradnorm-lr needs --balance gradnorm"),
    ("--loss-block 2", "--loss-block 2 has no experts: the MoE blocks are 1 3"),
    ("--moe-blocks 4", "--moe-blocks 4: vit_nano has blocks 0 to 3"),
    ("--entropy-weight 1 2 3", "--entropy-weight has 3 values for 2 experts"),
    ("--detach --loss-weights uniform", "--detach needs --loss-weights dispatch or combine"),
    ("--loss-router --loss-block 3", "--loss-block needs a run without --loss-router"),
    ("--loss-router --loss-weights uniform", "--loss-router needs --loss-weights dispatch or combine"),
    ("--loss-router --experts 3 --entropy-weight 1 2 3", "--entropy-weight has 3 values for 2 experts"),
    ("--experts 1 --objective token_pixel --encoding dense", "--experts 1: with --encoding dense"),
    ("--balance gradnorm --objective token", "--balance needs an --objective of several terms"),
    ("--mask-ratio 0.01", "--mask-ratio 0.01 masks 0 of 16 patches"),
    ("--warmup-epochs 300", "--warmup-epochs 300 leaves nothing of --epochs 2"),
    ("--lr 1e-7", "--min-lr 1e-06 is above --lr 1e-07"),
    ("--teacher ViT-B-32/", "teacher ViT-B-32/: neither a file nor an open_clip MODEL/PRETRAINED"),
    ("--teacher timm/vit_tiny_patch16_224/x.pth", "x.pth is not a choice of weights: give timm/NAME"),
    ("--teacher timm/vit_tiny_r_s16_p8_224/random", "its grid cannot be 4 x 4"),
    ("--teacher ViT-B-16", "teacher ViT-B-16: neither a file nor an open_clip MODEL/PRETRAINED"),
    ("--teacher ViT-Z-99/openai", "teacher ViT-Z-99/openai: "),
    ("--teacher RN50/random", "RN50 is not one of open_clip's own vision transformers"),
    ("--teacher timm/resnet18/random", "teacher timm/resnet18/random: it has no patch tokens on a grid"),
    ("--teacher README.md", "README.md: not a PyTorch file of plain tensors"),
    ("--data README.md", "--data README.md: "), ("--data nowhere", "--data nowhere: ")))
def test_bad_flags_are_refused_by_name(capsys, stage, tmp_path, monkeypatch, flags, expected):
    monkeypatch.chdir(HERE)
    assert expected in refusal(capsys, "pretrain", *stage("pretrain", flags))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name, refused", (
    ("pretrain", "--epochs 0, --experts -1, --lr fast, --objective pixels, --clip-grad -1, --lr inf, "
     "--seed -1, --mask-ratio nan, --mask-ratio 0, --mask-ratio 1, --drop-path 1, --betas 0.9 1, "
     "--entropy-weight nan, --cls-weight nan, --gradnorm-lr -1, --seed 1234567890123, --workers -1, "
     "--micro-batch 0"),
    ("finetune", "--expert-dropout 1.5, --layer-decay 0, --layer-decay 1.1, --weight-decay nan, "
     "--model vit_base, --patch-size 16"),
    ("knn", "--temperature -1, --temperature 0, -k 0")))
def test_values_without_a_meaning_are_refused_by_the_parser(name, refused, capsys):
    for flags in refused.split(", "):
        with pytest.raises(SystemExit) as stop:
            SCRIPTS[name].parse_args([*([] if name == "pretrain" else ["x.pt"]), *flags.split()])
        assert stop.value.code == 2 and flags.split()[0] in capsys.readouterr().err.splitlines()[-1], flags


# --------------------------------------------------------------------- k-NN, probes, finetuning, segmentation
@pytest.mark.parametrize("temperature", (0.07, 5.0))             # at 5.0, one neighbor more would show
def test_knn_is_the_weighted_vote_of_the_nearest(temperature):
    bank, queries = (F.normalize(torch.randn(n, 8), dim=1) for n in (60, 30))
    labels, cosine = torch.randint(0, 4, (60,)), queries @ bank.T
    near = cosine.argsort(1, descending=True)[:, :7]
    vote = (cosine.gather(1, near) / temperature).exp()[..., None] * F.one_hot(labels[near], 4)
    for chunk in (256, 7):                                      # in pieces as in one
        ours = knn.classify(queries, bank, labels, 4, 7, temperature, chunk)
        assert torch.equal(ours, vote.sum(1).argmax(1))
    # what the smallest temperature leaves is the nearest
    assert torch.equal(knn.classify(queries, bank, labels, 4, 20, 1e-300), labels[near[:, 0]])


@needs_loopback
def test_knn_finds_its_own_images_prints_the_best_and_is_the_same_in_two_processes(photos, tmp_path, capsys):
    first, other = (write_checkpoint(tmp_path / f"e{experts}.pt", experts=experts) for experts in (0, 2))
    flags = ["--data", photos, "-k", "5", "--batch-size", "5", *QUICK]      # unequal last batches
    results = knn.main(knn.parse_args([first, other, *flags]))
    printed, best = capsys.readouterr().out, [first, other][results.index(max(results))]
    assert printed.splitlines()[-1] == f"best: {max(results):.2f}%  {best}"
    assert torchrun(2, "knn.py", first, other, *flags) == printed
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(Path(photos, "train"))
    assert knn.main(knn.parse_args([first, *flags, "-k", "1", "--data", str(tmp_path)])) == [100.0]
    rows = list(map(json.loads, (tmp_path / "knn.jsonl").read_text().splitlines()))
    assert [(row["checkpoint"], row["data"], row["k"], row["top1"]) for row in rows] == [
        *[(first, photos, 5, results[0]), (other, photos, 5, results[1])] * 2, (first, str(tmp_path), 1, 100.0)]
    assert "-k 33: there are only 32 training images" in refusal(capsys, "knn", first, *flags, "-k", "33")


def test_runs_of_knn_beside_each_other_lose_no_row(photos, tmp_path, monkeypatch):
    """Not the one that another run wrote since this one began, nor one that is cut off."""
    argv, file = [write_checkpoint(tmp_path / "e.pt"), "--data", photos, *QUICK], tmp_path / "knn.jsonl"
    file.write_text('{"checkpoint": "a.p\n')

    def beside(*args, classify=knn.classify):
        file.open("a").write("another\n")
        return classify(*args)
    monkeypatch.setattr(knn, "classify", beside)
    knn.main(knn.parse_args(argv))
    cut, another, row = file.read_text().splitlines()
    assert (cut, another) == ('{"checkpoint": "a.p', "another") and json.loads(row)["checkpoint"] == argv[0]


def test_knn_votes_on_cls_after_the_norm_of_normalized_images(photos, tmp_path, monkeypatch):
    path, calls = write_checkpoint(tmp_path / "e.pt", experts=2), spy(monkeypatch, knn, "classify")
    encoder, features = checkpoint.load_encoder(path).eval(), []
    bank, val = (data.Folder(photos, split) for split in ("train", "val"))
    for images in (val, bank):
        views = [normalized(data.center_view(image, 32) / 255)[None] for image, _ in images]
        tokens = torch.cat([encoder(view)[0][:, 0] for view in views])
        features.append((tokens / tokens.norm(dim=1, keepdim=True)).detach())
    flags = ["-k", "7", "--temperature", "0.05", "--out", str(tmp_path / "out"), *QUICK]
    accuracy, = knn.main(knn.parse_args([path, "--data", photos, *flags]))
    assert (tmp_path / "out" / "knn.jsonl").exists()
    assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(calls[0].args, features))
    assert calls[0].args[2].tolist() == bank.targets and calls[0].args[3:] == (4, 7, 0.05)
    predicted = knn.classify(*features, torch.tensor(bank.targets), 4, 7, 0.05)
    assert accuracy == 100 * np.mean(predicted.numpy() == val.targets)


def frozen_by(recipe, names):
    return {name for name in names if "fr" in recipe and name.endswith((".phi", "mlp.scale"))
            or "fa" in recipe and ".attn." in name}


def test_recipes_need_experts_and_default_to_all_three(stage, teacher, capsys, monkeypatch, tmp_path):
    calls = spy(monkeypatch, common, "apply_recipe")
    argv = stage("finetune", "--max-steps 1 --weight-decay 0.1")
    after, before = play("finetune", argv)[1]["model"], checkpoint.load_checkpoint(argv[0])["model"]
    encoder = calls[0].args[1]
    assert encoder.blocks[3].mlp.dropout == 0.4 and encoder.blocks[3].drop_path.p == pytest.approx(0.1)
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    assert frozen == frozen_by(["fr", "fa", "exd"], before)
    for encoder, flags, expected in (
            (argv[0], "--recipe none fr", "none excludes the others"),
            (teacher, "--recipe fr", f"--recipe fr: {teacher} has no experts"),
            (teacher, "--recipe fa exd", f"--recipe fa exd: {teacher} has no experts"),
            (argv[0], "--recipe fr --expert-dropout 0.4", "--expert-dropout needs --recipe exd")):
        assert expected in refusal(capsys, "finetune", encoder, *argv[1:], *flags.split())
    built = spy(monkeypatch, finetune, "build_vit")
    play("finetune", [*TOY, *argv[1:], "--out", f"{tmp_path}/scratch", "--drop-path", "0.3"])
    assert built[0].args == ("vit_nano",) and built[0].kwargs["drop_path"] == 0.3
    error = refusal(capsys, "linear", *stage("ep", "--micro-batch 1", out="probe"))
    assert "--micro-batch 1: BatchNorm needs at least 2 images" in error


def test_the_linear_probe_sees_cls_and_efficient_probing_is_one_query_a_slice():
    linear, tokens = linprobe.LinearProbe(64, 3), torch.randn(2, 6, 64)
    assert torch.equal(linear(tokens), linear.head(tokens[:, 0]))
    probe = linprobe.EfficientProbe(64, 3).eval()
    assert probe.queries.std().item() == pytest.approx(0.02, rel=0.05)
    for tensor in (probe.queries, probe.value.bias, probe.norm.running_mean):
        nn.init.normal_(tensor)
    probe.norm.running_var.uniform_(0.5, 2)
    patches = tokens[:, 1:]                                        # not [CLS]
    weights, values = (patches @ probe.queries.T / 8).softmax(1), probe.value(patches)
    pooled = [(weights[:, :, q, None] * values[:, :, 2 * q:2 * q + 2]).sum(1) for q in range(32)]
    normed = (torch.cat(pooled, 1) - probe.norm.running_mean) / (probe.norm.running_var + 1e-5).sqrt()
    assert torch.allclose(probe(tokens), probe.head(normed), atol=1e-5)


def test_the_classifier_pools_where_asked_and_its_head_starts_at_a_thousandth():
    encoder, images = nano(), torch.rand(2, 3, 32, 32)
    tokens = encoder(images)[0]
    for pool, expected in (("cls", tokens[:, 0]), ("mean", tokens[:, 1:].mean(1))):
        classifier = finetune.Classifier(encoder, 1000, pool)
        assert classifier.head.weight.std().item() == pytest.approx(0.001 * 0.02, rel=0.05)
        nn.init.normal_(classifier.head.weight)
        assert torch.allclose(classifier(images), classifier.head(expected))


def test_strong_views_are_timms_rand_augment_on_crops_from_8_percent_on(photos, monkeypatch):
    import timm.data
    transforms = timm.data.create_transform(32, is_training=True, auto_augment="rand-m9-mstd0.5-inc1",
                                            hflip=0, interpolation="bicubic").transforms
    theirs, ours = next(each for each in transforms if "RandAugment" in repr(each)), finetune.rand_augment(32)
    state, picture, same = torch.get_rng_state(), TF.to_pil_image(Shapes("train", 32)[0][0]), 0
    for seed in range(2000):                             # none fails, as posterizing to 0 bits does
        random.seed(seed)
        np.random.seed(seed)
        after = ours(picture)
        random.seed(seed)
        np.random.seed(seed)
        with contextlib.suppress(ValueError):
            same += after == theirs(picture)
    assert same > 1900                                   # magnitudes at timm's limit of 10 aside
    images = data.Folder(photos, "train")
    plain, strong = data.TrainViews(images, 32, 42), finetune.StrongViews(images, 32, 42)
    assert (plain.scale, strong.scale) == ((0.2, 1.0), (0.08, 1.0))
    strong.rand_augment, erased = ImageOps.invert, spy(monkeypatch, finetune, "random_erasing")
    before, after = plain[1, 5], strong[1, 5]
    assert (after["jitter"] == 1).all() and not torch.equal(255 - before["image"], after["image"])
    strong.scale = plain.scale
    assert torch.equal(255 - before["image"], strong[1, 5]["image"]) and not erased
    strong.erase = True
    assert strong[1, 5]["image"].shape == (3, 32, 32) and len(erased) == 1
    assert torch.equal(strong[1, 5]["image"], strong[1, 5]["image"])
    assert torch.equal(torch.get_rng_state(), state)     # which drop path draws from


def test_a_third_of_a_quarter_of_the_images_is_erased():
    rng, images = np.random.default_rng(0), torch.full((400, 3, 40, 40), 255, dtype=torch.uint8)
    for image in images:
        finetune.random_erasing(rng, image)
    shares = (images != 255).any(1).float().mean((1, 2)).tolist()
    noise = images[images != 255].double() / 255                # of ImageNet's mean and deviation, clipped
    assert noise.mean().item() == pytest.approx(0.45, abs=0.02) and 0.2 < noise.std() < 0.23
    assert 0.18 < np.mean([s > 0 for s in shares]) < 0.32 and max(shares) < 0.36


def test_top_1_and_top_5_count_each_image_once():
    logits = torch.eye(8)[[0, 1, 2, 3]] + torch.arange(8) * 0.01
    views = [dict(image=torch.zeros(3, 8, 8), label=label) for label in (0, 7, 0, 3)]
    process = common.Machine(argparse.Namespace(amp="off", workers=0))
    process.sum = lambda hits: hits + torch.tensor([1, 1])      # another process's
    scores = finetune.evaluate(nn.Identity(), lambda images: logits, views, process)
    assert scores == {"top1": 75.0, "top5": 100.0}


def test_all_processes_evaluate_with_the_buffers_of_the_first(monkeypatch):
    process = common.Machine(argparse.Namespace(amp="off", workers=0))
    process.world = 2
    monkeypatch.setattr(common.dist, "all_reduce", lambda *args: None)
    monkeypatch.setattr(common.dist, "broadcast", lambda buffer, source: buffer.fill_(7 + source))
    classifier, segmenter = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()), nn.BatchNorm2d(3)
    segmenter.forward = lambda images: [images]
    views = [dict(image=torch.zeros(3, 8, 8), label=0)]
    finetune.evaluate(classifier, lambda images: images, views, process)
    segment.evaluate(segmenter, segment.SceneViews(Shapes("val", 8), 8, 11), process)
    for norm in (classifier[0], segmenter):
        assert (norm.running_mean == 7).all() and (norm.running_var == 7).all() and norm.training


def test_upernet_is_a_pooled_top_a_pyramid_from_the_top_down_and_an_auxiliary_head_on_the_third_map():
    net, maps = segment.UperNet(6, 5, 8).double().eval(), [randn(2, 6, 4, 4) for _ in range(4)]
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)

    def resize(x, like):
        return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)
    a, b, c, d = (stride(x) for stride, x in zip(net.strides, maps))
    assert [x.shape[2] for x in (a, b, c, d)] == [16, 8, 4, 2] and torch.equal(c, maps[2])
    assert torch.equal(d, F.max_pool2d(maps[3], 2))
    pooled = [conv(F.adaptive_avg_pool2d(d, bins)) for bins, (_, conv) in zip((1, 2, 3, 6), net.pyramid)]
    top = net.bottleneck(torch.cat([d, *(resize(x, d) for x in pooled)], 1))
    third = net.lateral[2](c) + resize(top, c)
    second = net.lateral[1](b) + resize(third, b)
    first = net.lateral[0](a) + resize(second, a)
    outputs = [*(output(x) for output, x in zip(net.output, (first, second, third), strict=True)), top]
    logits, auxiliary = net(maps)
    fused = net.fuse(torch.cat([resize(x, first) for x in outputs], 1))
    assert torch.allclose(logits, net.classify[1](fused))
    assert torch.allclose(auxiliary, net.auxiliary[2](net.auxiliary[0](maps[2])))
    assert net.classify[0].p == net.auxiliary[1].p == 0.1


def test_features_come_from_blocks_3_5_7_and_11_before_the_norm():
    assert segment.feature_blocks(12) == [3, 5, 7, 11] and segment.feature_blocks(24) == [7, 11, 15, 23]
    assert segment.feature_blocks(4) == [0, 1, 2, 3]
    vit, images = nano(experts=2), torch.rand(2, 3, 32, 32)
    segmenter, x = segment.Segmenter(vit, 3, 8), vit.embed(images)
    segmenter.decoder = nn.Identity()
    for block, features in zip(vit.blocks, segmenter(images), strict=True):
        x, _ = block(x)
        assert torch.equal(features, x[:, 1:].transpose(1, 2).reshape(2, 96, 4, 4))
    assert torch.equal(vit.norm(x), vit(images)[0])


def test_sliding_windows_of_a_pointwise_model_are_the_whole_image():
    images, weight = torch.randn(1, 3, 29, 50), torch.randn(5, 3, 1, 1)      # 24 windows
    windows = segment.sliding_window(lambda x: F.conv2d(x, weight), images, 12, 8)
    assert torch.allclose(windows, F.conv2d(images, weight), atol=1e-5)


def test_scores_of_a_hand_counted_case():
    annotation = torch.tensor([[1, 1, 1, 2], [2, 2, 0, 0], [4, 4, 4, 4]])      # 0 is ignored
    predicted = torch.tensor([[0, 0, 1, 1], [1, 0, 4, 2], [3, 3, 3, 0]])
    matrix = segment.confusion(predicted, annotation, 5)
    assert segment.scores(matrix) == pytest.approx({      # of classes 1, 2 and 4
        "miou": 100 * (2 / 5 + 2 / 4 + 3 / 4) / 3, "pixel_accuracy": 70,
        "mean_accuracy": 100 * (2 / 3 + 2 / 3 + 3 / 4) / 3})


def test_scene_views_move_image_and_annotation_together(monkeypatch):
    shade, padding = np.ones((60, 80), dtype=np.uint8), torch.tensor([124, 116, 104])      # ImageNet's mean
    shade[20:45, 30:70] = 9                                             # class 1 is black, class 9 white
    picture, shade = torch.from_numpy(np.stack([255 * (shade // 9)] * 3)), torch.from_numpy(shade)
    scenes = Mock(__getitem__=lambda self, index: (picture, 0), annotation=lambda index: shade.clone())
    views, seen, sizes = segment.SceneViews(scenes, 40, 9, seed=3), set(), spy(monkeypatch, TF, "resize")
    for epoch in range(40):
        view, again = views[epoch, 0], views[epoch, 0]
        assert view["image"].shape == (3, 40, 40) and all(torch.equal(view[key], again[key]) for key in view)
        bright, classes = view["image"].float().mean(0), view["annotation"]
        seen |= set(classes.unique().tolist())
        assert (padding == view["image"][:, classes == 0].T).all()
        if (classes == 1).sum() > 50 and (classes == 9).sum() > 50:
            assert bright[classes == 9].mean() > bright[classes == 1].mean() + 40
    assert seen == {0, 1, 9}                                            # 0 is what padding adds
    shorts = [each.args[1] for each in sizes[::2]]                      # from half the crop to twice
    assert 20 <= min(shorts) < 24 and 75 < max(shorts) <= 80
    assert views[0]["image"].shape == (3, 40, 53) and views[0]["annotation"].shape == (60, 80)
    monkeypatch.setattr(segment, "scene_crop", lambda rng, classes, crop: [n - 1 for n in classes.shape[1:]])
    assert (views[0, 0]["annotation"] > 0).sum() == 1                   # the last pixel alone
    monkeypatch.setattr(segment, "scene_crop", lambda rng, classes, crop: (0, 0))
    shade[:], shade[:, :10] = 1, 2
    flipped = [views[epoch, 0]["annotation"][0, 0] != 2 for epoch in range(40)]
    assert 10 < sum(flipped) < 30
    monkeypatch.setattr(segment, "photometric_distortion", lambda rng, image: torch.full_like(image, 77))
    assert (views[0, 0]["image"][:, views[0, 0]["annotation"] > 0] == 77).all()


def test_photometric_distortion_is_mmsegmentations():
    """The ranges of offset, contrast, saturation and hue, and no permutation of the channels."""
    before, seen = torch.tensor([[130, 60, 50], [100, 100, 100]], dtype=torch.uint8), []
    for seed in range(800):
        after = segment.photometric_distortion(np.random.default_rng(seed), before.T[..., None])[..., 0].T
        hue, saturation, _ = colorsys.rgb_to_hsv(*after[0].tolist())
        turn = (hue - colorsys.rgb_to_hsv(*before[0].tolist())[0] + 0.5) % 1 - 0.5
        seen.append((after.equal(before), turn, saturation, after[1, 0].item()))
    untouched, turn, saturation, gray = np.array(seen, dtype=float).T
    assert untouched.mean() == pytest.approx(1 / 16, abs=0.03)
    assert 0.08 < turn.max() < 0.14 and -0.14 < turn.min() < -0.08                   # a tenth
    assert saturation.min() < 0.4 and saturation.max() > 0.85                        # 0.615 before
    assert 34 <= gray.min() < 42 and 185 < gray.max() <= 198                    # (100 -+ 32) * (0.5, 1.5)


def test_a_crop_of_nearly_one_class_is_drawn_again_ten_times_at_most():
    annotation = torch.ones(1, 40, 400, dtype=torch.uint8)
    annotation[..., 200:] = 2
    for left, drawn, first in ((171, 1, 1), (170, 11, 1), (189, 1, 1), (190, 11, 1), (180, 11, 0)):
        annotation[..., :200] = first              # what is not labeled does not count
        rng = Mock(integers=Mock(side_effect=[0, left] * 11))
        assert segment.scene_crop(rng, annotation, 40) == (0, left)
        assert rng.integers.call_count == 2 * drawn and rng.integers.call_args.args == (361,)


def test_bad_segmentation_input_is_named(stage, scenes, tmp_path, capsys):
    for flags, expected in (("--crop-size 50", "--crop-size 50 is not a multiple of the patch size 8"),
                            ("--warmup-iterations 9", "--warmup-iterations 9 leaves nothing of"),
                            ("--micro-batch 1", "--micro-batch 1: BatchNorm needs at least 2 images"),
                            ("--data nowhere", "expected ADE20K's layout")):
        assert expected in refusal(capsys, "segment", *stage("segment", flags)), flags
    shutil.copytree(scenes, tmp_path / "scenes")
    path = tmp_path / "scenes" / "annotations" / "training" / "3.png"
    whole, shape = path.read_bytes(), np.asarray(Image.open(path)).shape
    argv = stage("segment", "--data", str(tmp_path / "scenes"), "--batch-size 8")
    for content, expected in (
            (whole[:-30], f"cannot read the annotation {path} ("),
            (np.zeros((*shape, 3)), f"annotation {path} (mode RGB"),
            (np.zeros((7, 9)), f"the annotation {path} has shape (7, 9)"),
            (np.full(shape, 12), "its classes end at 12, --classes is 11")):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            Image.fromarray(content.astype(np.uint8)).save(path)
        assert expected in refusal(capsys, "segment", *argv)


# ------------------------------------------------------------------------------------------------- routing

def test_the_silhouette_is_that_of_the_definition():
    features, labels, values = randn(23, 3), torch.arange(23) % 3, []
    labels[7] = 5                                               # alone in its cluster: counts 0
    for i in range(23):
        distance = (features - features[i]).norm(dim=1)
        mean = {c: distance[(labels == c) & (torch.arange(23) != i)].mean().item() for c in (0, 1, 2, 5)}
        a = mean.pop(labels[i].item())
        b = min(mean.values())
        values.append((b - a) / max(a, b) if i != 7 else 0)
    assert routing.silhouette(features, labels) == pytest.approx(np.mean(values), rel=1e-9)
    assert routing.silhouette(features, torch.zeros(23, dtype=torch.long)) == 0
    assert routing.silhouette(torch.zeros(4, 3), torch.tensor([0, 0, 1, 1])) == 0       # identical points


def test_area_under_the_curve_counts_ties_half_and_json_has_no_word_for_nan():
    score, positive = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.2]), torch.tensor([False, True, False, True, False])
    assert routing.roc_auc(score, positive) == pytest.approx(5.5 / 6)      # of six pairs
    assert math.isnan(routing.roc_auc(score, torch.ones(5, dtype=torch.bool)))
    assert run.plain({"a": [math.nan, 1, {"b": math.inf}], "c": "x", "d": 0.1234567}) == {
        "a": [None, 1, {"b": None}], "c": "x", "d": 0.123457}


@pytest.fixture
def write_student(tmp_path, request):
    """write_student(name, **args) -> a pretraining checkpoint with a router for the losses and a teacher."""
    torch.manual_seed(3)
    experts, teacher = getattr(request, "param", 2), tmp_path / "teacher.pt"
    student = model.Explore(nano(experts=experts, depth=6), 96, loss_router=True)
    for i in student.encoder.moe_blocks:
        student.encoder.blocks[i].mlp.scale.data.fill_(3 + i)
        nn.init.normal_(student.encoder.blocks[i].norm2.bias)
    student.loss_router.scale.data.fill_(9)

    def write(name, **args):
        args = {"teacher": write_checkpoint(teacher), "loss_block": [1, 3], **args}
        (tmp_path / name).mkdir()
        torch.save({"model": student.state_dict(), "encoder": student.encoder.config, "args": args},
                   tmp_path / name / "last.pt")
        return str(tmp_path / name / "last.pt")
    return write


def show(*argv):
    flags = "--data shapes --images 5 --seed 3".split()
    return routing.main(routing.parse_args([*argv, *flags, *QUICK]))


@torch.no_grad()
def test_routing_json_equals_numpy_on_the_same_weights(write_student, tmp_path, monkeypatch, capsys):
    path, pictures = write_student("one"), spy(monkeypatch, routing, "heatmaps")
    monkeypatch.setattr(routing, "TOKENS", 60)
    numbers, = show(path, "--batch-size", "2")
    written, = json.loads((tmp_path / "one" / "routing.json").read_text())
    assert written.keys() == numbers.keys() and written["block"] == 3
    assert f"block 3  foreground_auc {np.round(numbers['foreground_auc'], 3)}" in capsys.readouterr().out
    rng, images = np.random.default_rng(3), Shapes("val", 32)
    chosen, drawn = rng.permutation(1024)[:5].tolist(), torch.from_numpy(rng.random((5, 17)) < 60 / 5 / 17)
    assert written["tokens"] == drawn.sum() < 5 * 17
    views = torch.stack([data.center_view(images[i][0], 32) for i in chosen]) / 255
    encoder, state = checkpoint.load_encoder(path).eval(), checkpoint.load_checkpoint(path)["model"]
    entered, routed = [encoder.embed(normalized(views))], []
    for block in encoder.blocks:
        x, weights = block(entered[-1])
        entered.append(x)
        routed.append(weights)
    entered[-1] = encoder.norm(x)
    logits = 9 * F.normalize(entered[-1], dim=2) @ F.normalize(state["loss_router.phi"], dim=0)
    routed.append((logits.softmax(1), logits.softmax(2)))
    assert [row["block"] for row in numbers["blocks"]] == [1, 3, 5, 6]
    for row, scale in zip(numbers["blocks"], (4, 6, 8, 9)):
        dispatch, combine = (weights.double().numpy() for weights in routed[row["block"]])      # [5, 17, 2]
        patches, labels = dispatch[:, 1:], torch.from_numpy(dispatch.argmax(2))[drawn]
        assert row["scale"] == scale
        assert row["entropy"] == pytest.approx(-(dispatch * np.log(dispatch)).sum(1).mean(0), rel=1e-4)
        assert row["dispatch_cv"] == pytest.approx((patches.std(1) / patches.mean(1)).mean(0), rel=1e-4)
        assert row["cls_share"] == pytest.approx(dispatch[:, 0].mean(0), rel=1e-4)
        assert row["usage"] == pytest.approx(combine.mean((0, 1)), rel=1e-4)
        silhouette = routing.silhouette(entered[row["block"]][drawn], labels)
        assert row["silhouette"] == pytest.approx(silhouette, abs=1e-4)
    weight = routed[3].dispatch[:, 1:]
    flat = weight.flatten(0, 1)
    covered = torch.stack([data.center_view(255 * images.mask(i)[None].byte(), 32) for i in chosen]) / 255
    inside = F.avg_pool2d(covered, 8).flatten() >= 0.5
    for e in range(2):
        above = (flat[inside, e][:, None] > flat[~inside, e]).double().mean()
        assert numbers["foreground_auc"][e] == pytest.approx(above.item(), abs=1e-3)
    predicted = F.linear(entered[-1], state["head.weight"], state["head.bias"])
    targets = build_teacher(str(tmp_path / "teacher.pt"), 4)(views)
    pair = torch.stack([weight[..., 0], losses.token_loss(predicted, targets)[:, 1:]])[:, drawn[:, 1:]]
    assert numbers["correlation"] == pytest.approx(torch.corrcoef(pair)[0, 1].item(), abs=1e-4)
    pixels, ((_, shown, experts),) = pictures[0].args
    assert torch.equal(pixels, views) and experts == [0, 1] and torch.allclose(shown, 17 * weight, atol=1e-4)


def test_heatmaps_are_warm_where_an_experts_weight_is_high():
    left = (torch.arange(16) % 4 < 2).float()[:, None]                # of a grid of 4 x 4
    weights = torch.cat([left, 1 - left], 1).expand(5, 16, 2)
    picture = routing.heatmaps(torch.full((5, 3, 32, 32), 0.5), [("name", weights, [0, 1])])
    red, _, blue = np.moveaxis(np.asarray(picture).astype(int), 2, 0)
    assert red.shape == (4 + 3 * 116, 84 + 4 + 5 * 116)         # image and two experts; margin, five images
    warm = red - blue
    first, second = (warm[4 + e * 116 + 50, 88 + 4 * 116 + 20:] for e in (1, 2))      # each one's last tile
    assert first[0] > 50 > -50 > first[72] and second[0] < -50 < 50 < second[72] and not warm[4:116].any()
    assert all(red[4 + row * 116:, :84][:112].min() < 128 for row in range(3))      # titles
    assert all(warm[row * 116 + 60, 10] < -50 < 50 < warm[row * 116 + 60, 75] for row in (1, 2))      # scales


def test_two_checkpoints_stand_side_by_side(write_student, tmp_path, capsys, monkeypatch):
    argv = [write_student("coupled"), write_student("detached", teacher="nowhere.pt")]
    argv += ["--out", str(tmp_path / "both")]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        coupled, detached = show(*argv)
    printed = capsys.readouterr().out
    assert [coupled["name"], detached["name"]] == ["coupled/last", "detached/last"]
    assert Image.open(tmp_path / "both" / "heatmaps.png").size == (84 + 4 + 5 * 116, 4 + 5 * 116)
    assert "blocks.png and correlation.png need matplotlib: pip install matplotlib" in printed
    assert "no correlation with the distillation loss: teacher nowhere.pt: neither a file" in printed
    assert "correlation" in coupled and "correlation" not in detached and "foreground_auc" in detached
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        for name in ("routing", "knn"):
            assert "cannot write to" in refusal(capsys, name, argv[0], "--data", "shapes")
    error = refusal(capsys, "routing", argv[0], "--block", "0")
    assert "--block 0 has no experts: the MoE blocks are 1 3 5 6" in error
    assert "has no experts: there is" in refusal(capsys, "routing", write_checkpoint(tmp_path / "e0.pt"))
    if importlib.util.find_spec("matplotlib"):
        show(*argv)
        for name in ("blocks.png", "correlation.png"):
            assert min(Image.open(tmp_path / "both" / name).size) > 200
    torch.save(torch.load(argv[0]) | {"sources": {"teacher": "others"}}, argv[0])
    assert "correlation" not in show(argv[0])[0] and ".pt have changed" in capsys.readouterr().out


@pytest.mark.parametrize("write_student, of_block, of_router", ((1, 1, 2), (5, 4, 2)), indirect=["write_student"])
def test_each_row_shows_experts_of_its_own(write_student, of_block, of_router, tmp_path, monkeypatch, capsys):
    """A loss router has two, whatever the blocks have. In blocks.png, a line ends where its expert does."""
    monkeypatch.setattr(routing, "EXPERTS", 4)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", pictures := MagicMock())
    axes = [Mock() for _ in range(4)]
    pictures.Figure.return_value.subplots.return_value = axes
    path = write_student("one", loss_block=None)
    for flags, lines in (([], of_router), (["--block", "3"], of_block)):
        numbers, = show(path, *flags)
        printed = capsys.readouterr().out
        assert [len(row["shown"]) for row in numbers["blocks"]] == [of_block] * 3 + [of_router]
        assert len(re.findall(r"usage \[[^\]]*\]", printed)) == 4
        assert Image.open(tmp_path / "one" / "heatmaps.png").size[1] == 4 + (1 + lines) * 116
        assert axes[1].plot.call_count == lines
        for expert, line in zip(numbers["shown"], axes[1].plot.call_args_list):
            rows = [row for row in numbers["blocks"] if expert < len(row["entropy"])]
            assert line.args[:2] == ([row["block"] for row in rows], [row["entropy"][expert] for row in rows])
        axes[1].reset_mock()


def test_heatmaps_show_the_most_and_the_least_used_of_many_experts():
    assert routing.most_and_least(torch.rand(8)) == list(range(8))
    use = (torch.arange(64) * 37 % 64).float()
    assert routing.most_and_least(use) == [i for i in range(64) if use[i] < 4 or use[i] >= 60]


# ---------------------------------------------------------------------------------- README, demo, experiments

FENCES = re.findall(r"([^\n]*)\n+```(\w*)\n(.*?)```", README, re.S)      # line before, language, content
PYTHON = [(before, code) for before, language, code in FENCES if language == "python"]


def test_the_readme_fits_on_230_lines_of_120_columns_and_its_links_lead_somewhere():
    lines = README.splitlines()
    assert len(lines) <= 230 and not [line for line in lines if len(line) > 120 and line[0] != "|"]
    anchors = {"#" + re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
               for line in lines if line.startswith("#")}
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or link in anchors or (HERE / link).exists(), link


def test_what_the_readme_quotes_is_the_source():
    quotes = [(re.search(r"From `(\w+\.py)`:$", before), code) for before, code in PYTHON]
    assert sum(file is not None for file, _ in quotes) == 2
    for file, code in quotes:
        if file:
            source = iter([line.strip() for line in (HERE / file[1]).read_text("utf-8").splitlines()])
            for line in code.splitlines():
                assert line.strip() in source, f"{file[1]} does not have, or not in this order: {line}"


def test_the_readmes_python_runs_as_printed(tmp_path, monkeypatch):
    import timm
    monkeypatch.chdir(tmp_path)
    names = {}
    for run in ("demo", "plain"):
        Path("runs", run).mkdir(parents=True)
    write_checkpoint("runs/demo/last.pt", experts=2)
    torch.save(model.build_vit("vit_tiny").state_dict(), "runs/plain/last.pt")
    Image.fromarray(Shapes("val", 60)[0][0].permute(1, 2, 0).numpy()).save("photo.jpg")
    for before, code in PYTHON:
        if "From `" not in before:
            exec(code, names)
    assert names["logits"].shape == (1, 10) and names["losses"].isfinite().all()
    assert names["router"].phi.grad.abs().max() > 0 and names["student"].encoder.pos_embed.grad is None
    theirs, images = names["vit"].eval(), torch.rand(1, 3, 224, 224)
    config = timm.data.resolve_model_data_config(theirs)
    assert (config["mean"], config["std"]) == (model.IMAGENET_MEAN, model.IMAGENET_STD)
    ours = checkpoint.load_encoder("runs/plain/last.pt").eval()(images)[0]
    assert torch.allclose(theirs.forward_features(images), ours, atol=1e-4)


def stand_in(folder, name, script):
    """A shell script in the place of a program -> the environment in which it is found first."""
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_printed_commands_are_ones_that_the_scripts_take(tmp_path, capsys):
    """Of the README, with the flags in its prose; of demo.sh, whose python writes down its arguments."""
    environment = stand_in(tmp_path, "python", 'echo "python $*" >> commands')
    subprocess.run(["sh", HERE / "demo.sh", "--epochs", "8"], cwd=tmp_path, check=True, env=environment)
    demo, scripts = (tmp_path / "commands").read_text(), {}
    assert len(demo.splitlines()) == 4 and "--out runs/demo --epochs 8" in demo
    text = README.replace('"$out"\'', "runs/a") + demo
    for script, argv in re.findall(r"\b(?:python|torchrun [^`\n]*?) (\w+)\.py((?: +[^`#|\s]+)*)", text):
        scripts[script] = globals()[script].parse_args
        scripts[script](argv.split())
    assert len(scripts) == 6
    for parse_args in scripts.values():
        with pytest.raises(SystemExit):
            parse_args(["--help"])
    flags = {"--gpus-per-task", "--signals-to-handle", *re.findall("--[a-z-]+", capsys.readouterr().out)}
    assert set(re.findall("`(--[a-z-]+)", README)) <= flags


def test_an_objective_is_added_in_two_lines_as_the_readme_says():
    two, = re.findall(r"`(if \"mine\".*?)` and `(losses\[\"mine\"\] .*?)`", " ".join(README.split()))
    before, source = "    metrics = dict(losses)", (HERE / "losses.py").read_text("utf-8")
    assert source.count(before) == 1
    source = source.replace(before, f"    {two[0]}\n        {two[1]}\n{before}")
    exec(compile(source, "losses.py", "exec"), names := {"mine": losses.token_loss})
    for ids_keep, patches in ((None, 4), (torch.tensor([[0, 2, 3], [1, 2, 3]]), 3)):      # dense, sparse
        routing = model.Routing(rand(2, 1 + patches, 2), rand(2, 1 + patches, 2))
        pred = model.Prediction(randn(2, 1 + patches, 6), None, {3: routing}, ids_keep)
        found, _, metrics = names["explore_losses"](pred, randn(2, 5, 6), None, torch.ones(2, 4) > 0,
                                                    objectives=("token", "mine"))
        assert found[0] != found[1] == metrics["mine"]      # weighted by expert 0, by expert 1


@needs_loopback
def test_the_cluster_script_requeues_after_the_signal_alone(stage, tmp_path):
    """With four processes, and stand-ins for Slurm's programs; not after the end, not after an error."""
    script, = [code for _, language, code in FENCES if language == "bash"]
    script = script.replace("/shared/a", str(tmp_path / "a")).replace("epoch_0300", "epoch_0002")
    fault = "step == 3 and rank == '1' and 'SIGNAL' in os.environ and os.kill(os.getpid(), signal.SIGUSR1)"
    toy = shlex.join([sys.executable, str(driver(tmp_path, fault)), *stage("pretrain", "--drop-path 0")])
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_in(programs, "python", f'[ -z "$ERROR" ] || exit 2\nshift\nexec {toy} "$@"')
    stand_in(programs, "scontrol", f'[ $1 = show ] && echo 127.0.0.1 || echo "$@" >> {tmp_path}/requeued')
    environment = stand_in(programs, "srun", """
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & jobs+=($!); done
for job in ${jobs[@]}; do wait $job || code=$?; done
exit ${code:-0}""")
    environment |= dict(SLURM_JOB_ID=str(os.getpid()), SLURM_CPUS_PER_TASK="1", SLURM_JOB_NODELIST="n")
    requeued = tmp_path / "requeued"

    def submit(tasks, **variables):
        job = subprocess.Popen(["bash", "-c", script], cwd=HERE, stderr=subprocess.PIPE, text=True,
                               env=environment | {"SLURM_NTASKS": str(tasks)} | variables)
        print(finish(job)[1])
        return job.returncode
    assert submit(4, ERROR="1") == 2 and not requeued.exists()
    assert submit(4, SIGNAL="1") == 0 and requeued.read_text() == f"requeue {os.getpid()}\n"
    assert checkpoint.load_checkpoint(tmp_path / "a/last.pt")["step"] == 3
    requeued.unlink()
    assert submit(1) == 0 and not requeued.exists()
    assert checkpoint.load_checkpoint(tmp_path / "a/last.pt")["step"] == 8


def test_memory_counts_what_autograd_saves_each_storage_once_and_no_parameter(monkeypatch, capsys):
    monkeypatch.syspath_prepend(HERE / "experiments")
    import memory
    layer, x = nn.Linear(8, 16), torch.rand(4, 8, requires_grad=True)
    own = list(layer.parameters())
    once = 2 * 4 * 8 + 2 * 8 * 16                            # fp16 copies of the input and of the weight
    assert memory.saved_bytes(lambda: layer(x), own) == once
    assert memory.saved_bytes(lambda: F.gelu(layer(x)), own) == once + 2 * 4 * 16
    assert memory.saved_bytes(lambda: (x * x, x.view(-1) * x.view(-1), x[0] * layer.weight), own) == 4 * 4 * 8
    memory.main(["--model", "vit_tiny", "--image-size", "64", "--objective", "token"])
    rows = [[float(cell.split()[0]) for cell in row.split("|")[1:-1]]
            for row in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [0, 2, 64] and all(0 < row[5] < row[4] for row in rows)
    assert rows[2][2] == pytest.approx(16e6 * rows[2][1] / 2 ** 30, abs=0.06)


EXPERIMENTS = (HERE / "experiments" / "README.md").read_text("utf-8")


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(HERE / "experiments")
    return __import__("table")


@pytest.fixture
def experiments(photos, tmp_path):
    """experiments(SEEDS, SET, ROW ...) -> (stage, argv) of each command of run.sh; none is run."""
    log, images = tmp_path / "log", tmp_path / "a folder"
    images.symlink_to(photos)
    environment = stand_in(tmp_path, "python", f'printf "%s\\n" "$@" "" >> "{log}"')

    def commands(seeds, *argv, camvid=""):
        log.write_text("")
        subprocess.run(["sh", HERE / "experiments" / "run.sh", *argv], check=True, env=environment | {
            "RUNS": str(tmp_path / "the runs"), "SEEDS": seeds, "CIFAR": str(images), "FULL": str(images),
            "CAMVID": camvid, "MORE": "--max-steps 4 --save-every 1 --save-minutes 1e-9"})
        calls = [call.split("\n") for call in log.read_text().strip().split("\n\n")]
        return [(call[0].removesuffix(".py").replace("linprobe", "linear"), call[1:]) for call in calls]
    return commands


def test_experiments_are_run_measured_and_drawn(experiments, scenes, photos, table, tmp_path, capsys):
    calls = experiments("0", "cifar", "none", "uniform", "coupled", "router-2")
    calls += experiments("1", "cifar", "uniform") + experiments("1", "cifar", "coupled", camvid=scenes)
    for stage, argv in calls:
        SCRIPTS[stage].main(SCRIPTS[stage].parse_args([*argv, "--batch-size", "8", "--workers", "0"]))
    again = [stage for stage, _ in experiments("0", "cifar", "uniform")]
    assert again == ["pretrain", "linear", "linear"]      # they find their last.pt
    for file in tmp_path.glob("the runs/cifar/*/knn.jsonl"):      # of an earlier model, and of another
        rows = {"checkpoint": "last.pt", "top1": 101.0}, {"checkpoint": "epoch_0000.pt", "top1": 101.0}
        file.write_text("\n".join([json.dumps(rows[0]), file.read_text() + json.dumps(rows[1])]))

    (tmp_path / "README.md").write_text(EXPERIMENTS, "utf-8")
    argv = ["cifar", "--runs", str(tmp_path / "the runs"), "--out", str(tmp_path)]
    printed = table.main(table.parse_args(argv))["cifar"]
    assert printed in capsys.readouterr().out and printed in (tmp_path / "README.md").read_text("utf-8")
    rows = {(row["row"], row["seed"]): row for row in json.loads((tmp_path / "cifar.json").read_text())}
    assert list(rows) == [("none", 0), *((name, seed) for name in ("uniform", "coupled") for seed in (0, 1)),
                          ("router-2", 0)]
    coupled = np.array([rows["coupled", seed]["knn"] for seed in (0, 1)])
    gain = coupled - [rows["uniform", seed]["knn"] for seed in (0, 1)]
    assert (f"| coupled | 2 | {coupled.mean():.1f} ± {coupled.std(ddof=1):.1f} ({gain.mean() + 0.0:+.2f} ± "
            f"{gain.std(ddof=1) / 2 ** 0.5:.2f}) |") in printed
    router = torch.load(tmp_path / "the runs/cifar/router-2-0/last.pt", weights_only=True)["model"]
    assert rows["router-2", 0]["scale"] == pytest.approx(router["loss_router.scale"].item(), rel=1e-5)
    assert max(row["knn"] for row in rows.values()) <= 100      # of last.pt, not of the random initialization
    file = checkpoint.load_checkpoint(tmp_path / "the runs/cifar/coupled-0/last.pt")
    student, val = model.Explore(checkpoint.load_encoder(file), 96, 0.4).eval(), data.Folder(photos, "val")
    student.load_state_dict(file["model"])
    batch = torch.utils.data.default_collate([data.TrainViews(val, 32, 0, 8, 0.4)[0, i] for i in range(16)])
    pixels, visible = data.augment(batch), ~batch["mask"]
    pred = student(normalized(pixels), batch["mask"])
    target = build_teacher(file["args"]["teacher"], 8)(pixels)[:, 1:][visible].view(len(val), -1, 96)
    loss, weight = losses.token_loss(pred.tokens[:, 1:], target), pred.routing[3].dispatch[:, 1:]
    weight = (weight / weight.mean(1, keepdim=True)).detach().double()
    balance = -((weight[..., 0] - 1) * loss).mean() / weight.var(1, correction=0).sum(1).mean()
    expected = [loss.mean().item(), losses.variation(weight)[0].item(), balance.item()]
    assert [rows["coupled", 0][x] for x in "token_loss variation balance".split()] == pytest.approx(
        expected, rel=1e-3)
    run, row = tmp_path / "the runs/cifar/coupled-1", rows["coupled", 1]
    assert row["ratio"] == pytest.approx(read_run(run)[1][-1]["token_ratio"], rel=1e-5)
    for name, score in (("linear", "top1"), ("ep", "top1"), ("camvid", "miou")):
        best = max(line.get(score, 0) for line in read_run(run / name)[1])
        assert row[score if score == "miou" else name] == pytest.approx(best, rel=1e-5)
    std, variation, at_balance = table.at_balance([row])
    assert (std, variation) == (row["std"] / 0.05, row["variation"])
    assert at_balance == pytest.approx(row["variation"] * row["balance"] / 0.05)
    assert "ratio" not in rows["none", 0] and rows["uniform", 0]["ratio"] == 1
    assert [key for key, row in rows.items() if "miou" in row] == [("coupled", 1)]
    (tmp_path / "the runs" / "cifar").rename(tmp_path / "gone")      # rows of earlier calls stay
    assert table.main(table.parse_args(argv))["cifar"] == printed
    pytest.importorskip("matplotlib")
    plot = __import__("plot")
    plot.main(plot.parse_args(["--json", str(tmp_path), "--out", str(tmp_path / "lambda.png")]))
    assert min(Image.open(tmp_path / "lambda.png").size) > 200


def test_a_star_is_a_difference_above_4_3_errors_of_three_seeds_to_the_row_that_is_asked_for(table):
    for second, text in ((1.0, "2.0 ± 1.0 (+2.00 ± 0.58)"), (1.9, "2.0 ± 0.1 (+2.00 ± 0.06*)")):
        assert table.cell({0: second, 1: 2.0, 2: 4 - second}, dict.fromkeys(range(3), 0.0), 1) == text
    rows = [{"row": name, "seed": 0, "knn": top1} for name, top1 in (("none", 1), ("uniform", 3), ("a", 6))]
    assert "| 6.0 (+3.00) |" in table.results(rows) and "| 6.0 (+5.00) |" in table.results(rows, "none")


def test_the_readme_of_the_experiments_is_what_the_scripts_take_and_make(experiments, table):
    for name in ("noise", "shapes", "cifar"):
        if (file := HERE / "experiments" / f"{name}.json").exists():
            results = table.results(json.loads(file.read_text()))
            assert table.fill(EXPERIMENTS, name, results) == EXPERIMENTS, f"run table.py {name}"
    assert len(EXPERIMENTS.splitlines()) <= 300
    rows = re.findall(r"^\| .* \| (.*) \| (`\w+\.py .*`) \|$", EXPERIMENTS, re.MULTILINE)
    assert len(rows) >= 35
    for figures, cell in rows:
        commands = []
        for command in re.findall("`(.*?)`", cell):
            values = zip(*(braces.split(",") for braces in re.findall("{(.*?)}", command)), strict=True)
            commands += [re.sub("{.*?}", "{}", command).format(*value) for value in values] or [command]
        assert len(figures.split("; ")) % len(commands) == 0, cell
        for script, *argv in map(str.split, commands):
            __import__(script.removesuffix(".py")).parse_args(argv)
    for flags in ("--entropy-weight 0.5", "--entropy-weight 0.5 --detach"):
        assert pretrain.parse_args(flags.split()).out + "/last.pt" in EXPERIMENTS
    others = "detached combine router experts16 expert0 token-detached long-uniform long-coupled".split()
    for stage, argv in experiments("0", "shapes", *others) + experiments("0", "transfer", camvid="x"):
        SCRIPTS[stage].parse_args(argv)
