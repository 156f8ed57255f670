"""The tests, as statements about the method. CPU, no network: `python -m pytest -q test_explore.py`"""

import argparse
import ast
import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional as TF

os.environ["HF_HUB_OFFLINE"] = "1"        # a test that would download fails at once
import common                             # noqa: E402
import data                               # noqa: E402
import finetune                           # noqa: E402
import linprobe                           # noqa: E402
import knn                                # noqa: E402
import losses                             # noqa: E402
import model                              # noqa: E402
import pretrain                           # noqa: E402
import routing                            # noqa: E402
import segment                            # noqa: E402

warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)       # bench and slow are this file's own
# torchvision deprecates its decoders in favour of another package
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
HERE = Path(__file__).parent
TOY = ["--model", "vit_nano", "--image-size", "32", "--patch-size", "8", "--batch-size", "8", "--amp", "off", "--workers", "0"]


def rand(*shape, **kwargs):
    return torch.rand(*shape, dtype=torch.float64, **kwargs)


def randn(*shape, **kwargs):
    return torch.randn(*shape, dtype=torch.float64, **kwargs)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def only_where_asked_for(request):
    """Benchmarks and long checks run with `-m bench` and `-m slow` alone."""
    for mark in ("bench", "slow"):
        if request.node.get_closest_marker(mark) and mark not in request.config.getoption("markexpr"):
            pytest.skip(f"-m {mark}")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder in ImageNet's layout: 4 classes, 8 training and 4 validation JPEGs each, of different sizes."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 8), ("val", 4)):
        for label in range(4):
            (root / split / f"class_{label}").mkdir(parents=True)
            for i in range(count):
                picture = data.Shapes(split, 40 + 4 * i)[label + 10 * i][0].permute(1, 2, 0).numpy()
                Image.fromarray(picture[:, :36 + 2 * i]).save(root / split / f"class_{label}" / f"{i}.jpg", quality=95)
    return str(root)


def write_checkpoint(path, **vit):
    """A checkpoint of ours around a fresh encoder."""
    encoder = model.build_vit("vit_nano", **(dict(image_size=32, patch_size=8) | vit))
    common.save(Path(path), model={f"encoder.{k}": v for k, v in encoder.state_dict().items()}, encoder=encoder.config, args={})
    return str(path)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    torch.manual_seed(1)
    return write_checkpoint(tmp_path_factory.mktemp("teacher") / "teacher.pt")


@pytest.fixture
def toy(photos, teacher, tmp_path):
    """Flags of a run of seconds: 4 steps an epoch."""
    return [*TOY, "--data", photos, "--teacher", teacher, "--epochs", "2", "--warmup-epochs", "1", "--out", str(tmp_path / "run")]


def train(argv):
    args = pretrain.parse_args(argv)
    pretrain.main(args)
    out = Path(args.out)
    return model.load_checkpoint(out / "last.pt"), [json.loads(line) for line in open(out / "log.jsonl")]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def torchrun(processes, script, *argv, options=()):
    """A real torchrun on the CPU -> its standard output."""
    process = start(*TORCHRUN, processes, *options, HERE / script, *argv)
    try:
        out, error = process.communicate(timeout=300)
    finally:
        kill_tree(process.pid)
    assert process.returncode == 0, error
    return out


def refusal(capsys, script, *argv):
    """Runs a script's main on flags that it must refuse -> its one line of error."""
    with pytest.raises(SystemExit) as stop:
        common.run(script.main, script.parse_args(list(argv)))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return error.split("error: ", 1)[1]


# ---------------------------------------------------------------------------------------------------------- equations

def test_token_loss_is_equation_1():
    pred, target = 2 * randn(3, 4, 8), 3 * randn(3, 4, 8) + 1
    for b in range(3):
        for i in range(4):
            t = target[b, i]
            t = (t - t.mean()) / (t.var(unbiased=False) + 1e-5).sqrt()
            huber = [0.5 * d ** 2 if d < 1 else d - 0.5 for d in (pred[b, i] - t).abs().tolist()]
            assert losses.token_loss(pred, target)[b, i].item() == pytest.approx(sum(huber) / 8, rel=1e-12)


def test_cls_loss_is_equation_2():
    pred, target = randn(5, 8), randn(5, 8)
    cosines = [(p @ t / (p @ p).sqrt() / (t @ t).sqrt()).item() for p, t in zip(pred, target)]
    assert losses.cls_loss(pred, target).item() == pytest.approx(1 - sum(cosines) / 5, rel=1e-12)


def test_routed_mean_is_equation_5():
    loss, weight = rand(3, 6), rand(3, 6)
    images = [sum(w * x for w, x in zip(ws, xs)) / sum(ws) for ws, xs in zip(weight.tolist(), loss.tolist())]
    assert losses.routed_mean(loss, weight).item() == pytest.approx(sum(images) / 3, rel=1e-12)
    assert torch.allclose(losses.routed_mean(loss, torch.ones_like(loss)), loss.mean())


def test_scaling_all_weights_of_an_image_changes_nothing():
    loss, weight = rand(3, 6), rand(3, 6)
    scaled = weight * torch.tensor([0.01, 1, 100.0])[:, None]
    assert torch.allclose(losses.routed_mean(loss, weight), losses.routed_mean(loss, scaled))


def test_the_router_is_taught_to_leave_hard_patches():
    loss, weight = torch.tensor([[0.1, 0.5, 0.9]]), torch.full((1, 3), 1 / 3, requires_grad=True)
    losses.routed_mean(loss, weight).backward()
    assert weight.grad[0, 0] < 0 < weight.grad[0, 2] and abs(weight.grad[0, 1]) < 1e-6      # descent raises the easy one


def test_dispatch_entropy_is_equation_6():
    dispatch = randn(3, 7, 2).softmax(1)
    for e in range(2):
        entropies = [-sum(p * math.log(p) for p in dispatch[b, :, e].tolist()) for b in range(3)]
        assert losses.dispatch_entropy(dispatch)[e].item() == pytest.approx(sum(entropies) / 3, rel=1e-12)


def test_entropy_has_its_limits():
    uniform, point = torch.full((1, 119, 2), 1 / 119), F.one_hot(torch.tensor([[3]]), 119).float().transpose(1, 2).requires_grad_()
    assert losses.dispatch_entropy(uniform)[0].item() == pytest.approx(4.779, abs=5e-4)      # ln 119, the paper's tokens
    assert losses.dispatch_entropy(point).item() == 0
    losses.dispatch_entropy(point).sum().backward()
    assert point.grad.isfinite().all()


def test_variation_is_standard_deviation_over_mean():
    dispatch = rand(3, 7, 2)
    for e in range(2):
        cv = [np.std(dispatch[b, :, e].numpy()) / np.mean(dispatch[b, :, e].numpy()) for b in range(3)]
        assert losses.variation(dispatch)[e].item() == pytest.approx(sum(cv) / 3, rel=1e-12)


# ----------------------------------------------------------------------------------------------------------- Soft-MoE

def test_routing_is_equation_4():
    moe, x = model.SoftMoE(8, 3, 16).double(), randn(2, 5, 8)
    moe.scale.data.fill_(2.5)
    dispatch, combine = moe(x)[1]
    for b in range(2):
        logits = [[2.5 * (x[b, t] @ moe.phi[:, e] / x[b, t].norm() / moe.phi[:, e].norm()).item() for e in range(3)]
                  for t in range(5)]
        for t in range(5):
            for e in range(3):
                assert dispatch[b, t, e].item() == pytest.approx(
                    math.exp(logits[t][e]) / sum(math.exp(logits[n][e]) for n in range(5)), rel=1e-10)
                assert combine[b, t, e].item() == pytest.approx(
                    math.exp(logits[t][e]) / sum(math.exp(logits[t][k]) for k in range(3)), rel=1e-10)


def test_soft_moe_is_separate_mlps_between_dispatch_and_combine():
    moe, x = model.SoftMoE(8, 3, 16).double(), randn(2, 5, 8)
    nn.init.normal_(moe.b1), nn.init.normal_(moe.b2)
    y, (dispatch, combine) = moe(x)
    expected = torch.zeros_like(x)
    for e in range(3):
        fc1, fc2 = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
        fc1.weight.data, fc1.bias.data = moe.w1[e].T, moe.b1[e]
        fc2.weight.data, fc2.bias.data = moe.w2[e].T, moe.b2[e]
        for b in range(2):
            slot = sum(dispatch[b, t, e] * x[b, t] for t in range(5))
            for t in range(5):
                expected[b, t] += combine[b, t, e] * fc2(F.gelu(fc1(slot)))
    assert torch.allclose(y, expected, atol=1e-12)


def test_routing_stays_in_float32_under_autocast():
    moe, x = model.SoftMoE(64, 2, 128), torch.randn(2, 9, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, (dispatch, combine) = moe(x)
    plain = moe.route(x)
    assert y.dtype == torch.bfloat16 and torch.equal(dispatch, plain.dispatch) and torch.equal(combine, plain.combine)


def test_experts_start_as_linear_layers_do():
    moe = model.SoftMoE(64, 4, 256)
    for weight, bound in ((moe.w1, 64 ** -0.5), (moe.w2, 256 ** -0.5), (moe.phi, 4 ** -0.5)):
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3 ** 0.5, rel=0.1)
    assert moe.scale.item() == 1 and not moe.b1.any() and not moe.b2.any()


def test_residual_projections_shrink_with_depth():
    vit = model.build_vit("vit_tiny", image_size=32, experts=2)
    for depth, block in enumerate(vit.blocks, start=1):
        assert block.attn.proj.weight.std().item() == pytest.approx(0.02 / (2 * depth) ** 0.5, rel=0.05)
        assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for index in (1, 11):
        assert vit.blocks[index].mlp.w2.abs().max().item() == pytest.approx(768 ** -0.5 / (2 * (index + 1)) ** 0.5, rel=0.01)


def test_expert_dropout_drops_whole_experts_of_an_image_and_keeps_the_expectation():
    moe, x = model.SoftMoE(8, 2, 16, dropout=0.4).double(), randn(1, 3, 8).expand(4000, -1, -1)
    nn.init.normal_(moe.b2)
    whole = moe.eval()(x)[0][0]
    dropped = moe.train()(x)[0]
    # with two experts an image has one of four outputs: none, either, or both, each survivor scaled by 1 / 0.6
    assert len(dropped.flatten(1).round(decimals=9).unique(dim=0)) == 4
    assert (dropped == 0).all((1, 2)).double().mean().item() == pytest.approx(0.16, abs=0.03)
    assert torch.allclose(dropped.mean(0), whole, atol=0.1)


# ------------------------------------------------------------------------------------------- the coupling of loss and router

def objective_flags(*argv):
    args = pretrain.parse_args([*TOY, "--experts", "2", *argv])
    pretrain.check(args)
    return args


def objectives(args, *inputs):
    return pretrain.objectives(args, torch.tensor(pretrain.lambdas(args)), *inputs)


def coupling(args, dense=False):
    """The objective on random predictions: only the loss weights and the regularizers reach the router.

    -> (total, metrics, routers of blocks 1 and 3, the arguments of `objectives` after the flags).
    """
    routers = {block: model.SoftMoE(8, args.experts, 16).double() for block in (1, 3)} if args.experts else {}
    for router in routers.values():
        router.scale.data.fill_(3)
    mask = torch.stack([torch.randperm(16) for _ in range(4)]) >= 9               # 9 visible, 7 masked
    ids_keep = None if dense else model.shuffle_visible(mask, torch.rand(4, 16), 9)[0]
    tokens = 17 if dense else 10
    pixels = torch.randn(4, 16, 192) if "pixel" in args.objective else None
    pred = model.Prediction(torch.randn(4, tokens, 8), pixels, {b: r.route(randn(4, tokens, 8)) for b, r in routers.items()})
    inputs = pred, torch.randn(4, 17, 8), torch.rand(4, 3, 32, 32), mask, ids_keep
    values, regularizers, metrics = objectives(args, *inputs)
    weights = torch.tensor(list(pretrain.objective_weights(args).values()))
    return (weights * values).sum() + regularizers, metrics, routers, inputs


def test_coupled_weights_teach_the_router():
    total, _, routers, _ = coupling(objective_flags("--entropy-weight", "0"))
    total.backward()
    assert routers[3].phi.grad.norm() > 1e-4 and routers[3].scale.grad.abs() > 1e-6
    assert routers[3].phi.grad[:, 1].norm() == 0                      # expert 1 weights no loss
    assert routers[1].phi.grad is None                                # nor does any other block


@pytest.mark.parametrize("flags", (["--detach"], ["--loss-weights", "uniform"]))
def test_detached_and_uniform_weights_give_the_router_no_gradient(flags):
    total, _, routers, _ = coupling(objective_flags("--entropy-weight", "0", *flags))
    grads = torch.autograd.grad(total, [routers[3].phi, routers[3].scale], allow_unused=True)
    assert all(g is None or not g.any() for g in grads)
    total, _, routers, _ = coupling(objective_flags("--entropy-weight", "5", *flags))
    total.backward()
    assert routers[3].phi.grad.norm() > 1e-4                          # the entropy stays on


def test_detaching_changes_the_gradient_and_not_the_loss():
    values = []
    for flags in ([], ["--detach"]):
        torch.manual_seed(0)
        values.append(coupling(objective_flags(*flags))[0].item())
    assert values[0] == values[1]


def test_objective_is_equation_8_with_expert_0_on_the_visible_patches():
    args = objective_flags("--cls-weight", "0.3", "--entropy-weight", "0.5", "2")
    total, metrics, _, (pred, targets, _, _, ids_keep) = coupling(args)
    dispatch, token = pred.routing[3].dispatch, 0.0
    for b in range(4):
        weights = [dispatch[b, 1 + i, 0].item() for i in range(9)]    # [CLS] is token 0
        values = [losses.token_loss(pred.tokens[b, 1 + i][None, None], targets[b, 1 + ids_keep[b, i]][None, None]).item()
                  for i in range(9)]
        token += sum(w * v for w, v in zip(weights, values)) / sum(weights) / 4
    cls = losses.cls_loss(pred.tokens[:, 0], targets[:, 0]).item()
    entropy = losses.dispatch_entropy(dispatch)
    assert metrics["token"].item() == pytest.approx(token, rel=1e-5)
    assert metrics["entropy_loss"].item() == pytest.approx(-(0.5 * entropy[0] + 2 * entropy[1]).item(), rel=1e-6)
    assert total.item() == pytest.approx(token + 0.3 * cls - (0.5 * entropy[0] + 2 * entropy[1]).item(), rel=1e-5)
    assert torch.allclose(metrics["cls_share"], dispatch[:, 0].mean(0))
    assert metrics["token_ratio"].item() == pytest.approx(token / metrics["token_unweighted"].item(), rel=1e-5)


def test_token_objective_is_without_cls():
    assert "cls" not in coupling(objective_flags("--objective", "token"))[1]


def test_several_loss_blocks_are_averaged():
    args = objective_flags("--loss-block", "1", "3")
    _, metrics, _, (pred, targets, _, _, ids_keep) = coupling(args)
    first, second = (pred.routing[block].dispatch for block in (1, 3))
    per_patch = losses.token_loss(pred.tokens[:, 1:], model.take(targets[:, 1:], ids_keep))
    assert metrics["token"].item() == pytest.approx(losses.routed_mean(per_patch, (first + second)[:, 1:, 0] / 2).item(), rel=1e-5)
    assert torch.allclose(metrics["entropy"], (losses.dispatch_entropy(first) + losses.dispatch_entropy(second)) / 2)


@pytest.mark.parametrize("flags", ([], ["--experts", "0"], ["--detach"], ["--importance-weight", "2", "--loss-block", "1", "3"],
                                   ["--objective", "token_cls_pixel", "--encoding", "dense", "--entropy-weight", "5", "24"]))
def test_the_compiled_objective_has_the_plain_ones_values_and_gradients(flags):
    args, results = objective_flags(*flags), []
    for objective in (pretrain.objectives, torch.compile(pretrain.objectives)):
        torch.manual_seed(0)
        _, _, routers, (pred, *inputs) = coupling(args, dense="dense" in flags)
        pred = pred._replace(tokens=pred.tokens.requires_grad_(), routing={b: r.route(torch.sin(torch.arange(
            4.0 * pred.tokens.shape[1] * 8)).view(4, -1, 8).double()) for b, r in routers.items()})
        values, regularizers, metrics = objective(args, torch.tensor(pretrain.lambdas(args)), pred, *inputs)
        (values.sum() + regularizers).backward()
        grads = [pred.tokens.grad, *(p.grad for r in routers.values() for p in (r.phi, r.scale) if p.grad is not None)]
        results.append([values.detach(), regularizers.detach(), *(metrics[name] for name in sorted(metrics)), *grads])
    for plain, compiled in zip(*results, strict=True):
        assert torch.allclose(plain, compiled.to(plain.dtype), rtol=1e-4, atol=1e-6)


ALL = ["--objective", "token_cls_pixel", "--entropy-weight", "0"]


def test_in_dense_encoding_the_token_loss_lives_on_masked_patches_and_expert_1_weights_the_pixel_loss():
    total, metrics, _, (pred, targets, images, mask, _) = coupling(objective_flags(*ALL, "--encoding", "dense"), dense=True)
    dispatch = pred.routing[3].dispatch[:, 1:]
    token, pixel = losses.token_loss(pred.tokens[:, 1:], targets[:, 1:]), losses.pixel_loss(pred.pixels, images, 8)
    for name, loss, expert in (("token", token, 0), ("pixel", pixel, 1)):
        expected, plain = 0.0, 0.0
        for b in range(4):
            masked = [i for i in range(16) if mask[b, i]]
            weights = [dispatch[b, i, expert].item() for i in masked]
            expected += sum(w * loss[b, i].item() for w, i in zip(weights, masked)) / sum(weights) / 4
            plain += sum(loss[b, i].item() for i in masked) / len(masked) / 4
        assert metrics[name].item() == pytest.approx(expected, rel=1e-5)
        assert metrics[f"{name}_unweighted"].item() == pytest.approx(plain, rel=1e-5)
        assert metrics[f"{name}_ratio"].item() == pytest.approx(expected / plain, rel=1e-5)


def test_in_sparse_encoding_the_pixel_loss_is_the_plain_mean_over_masked_patches():
    _, metrics, _, (pred, _, images, mask, _) = coupling(objective_flags(*ALL))
    assert metrics["pixel"].item() == pytest.approx(losses.pixel_loss(pred.pixels, images, 8)[mask].mean().item(), rel=1e-5)


@pytest.mark.parametrize("dense", (False, True))
def test_each_objective_ignores_the_patches_that_it_does_not_live_on(dense):
    args = objective_flags(*ALL, "--encoding", "dense" if dense else "sparse")
    _, before, _, (pred, targets, images, mask, ids_keep) = coupling(args, dense)
    elsewhere = targets.clone()
    where = ~mask if dense else mask                            # tokens: masked patches when dense, visible ones when sparse
    elsewhere[:, 1:][where] += torch.randn_like(elsewhere[:, 1:][where])
    pixels = torch.where(mask[..., None], pred.pixels, torch.randn_like(pred.pixels))
    after = objectives(args, pred._replace(pixels=pixels), elsewhere, images, mask, ids_keep)[2]
    assert torch.equal(after["token"], before["token"]) and torch.equal(after["pixel"], before["pixel"])
    elsewhere[:, 1:] += 1 + torch.randn_like(elsewhere[:, 1:])
    changed = objectives(args, pred._replace(pixels=pixels + 1), elsewhere, images, mask, ids_keep)[2]
    assert changed["token"] != before["token"] and changed["pixel"] != before["pixel"]


def test_each_expert_hears_its_own_loss_alone():
    for objective, hears in (("token", [True, False]), ("token_pixel", [True, True])):
        total, _, routers, _ = coupling(objective_flags("--objective", objective, "--entropy-weight", "0", "--encoding", "dense"),
                                        dense=True)
        total.backward()
        assert [bool(g.norm() > 1e-5) for g in routers[3].phi.grad.unbind(1)] == hears


def test_combine_weights_can_all_shrink_where_dispatch_weights_keep_their_sum():
    x, loss = randn(1, 10, 8), rand(1, 10)
    shares = []
    for scale in (1, 100):
        moe = model.SoftMoE(8, 2, 16).double()
        moe.phi.data = torch.stack([-x.mean((0, 1)), x.mean((0, 1))], dim=1)     # expert 0 turns away from every token
        moe.scale.data.fill_(scale)
        x = x + 3 * x.mean(1, keepdim=True)                     # tokens that all point the same way
        dispatch, combine = moe.route(x)
        shares.append((combine[..., 0] * loss).sum().item())
        assert torch.allclose(dispatch.sum(1), torch.ones(1, 2, dtype=torch.float64))
        # normalized within the image, neither changes the scale of its loss
        for weight in (dispatch[..., 0], combine[..., 0]):
            assert loss.min() <= losses.routed_mean(loss, weight) <= loss.max()
    assert shares[1] < 1e-6 < shares[0]                         # unnormalized, the combine-weighted loss is gone


def test_combine_weights_weight_the_loss_where_asked():
    """Not normalized, as the paper's: all weights at a tenth make a tenth of the loss."""
    _, metrics, _, (pred, targets, _, _, ids_keep) = coupling(objective_flags("--loss-weights", "combine"))
    combine, expected = pred.routing[3].combine, 0.0
    for b in range(4):
        for i in range(9):
            loss = losses.token_loss(pred.tokens[b, 1 + i][None, None], targets[b, 1 + ids_keep[b, i]][None, None]).item()
            expected += combine[b, 1 + i, 0].item() * loss / 9 / 4
    assert metrics["token"].item() == pytest.approx(expected, rel=1e-5)
    assert metrics["token_ratio"].item() == pytest.approx(expected / metrics["token_unweighted"].item(), rel=1e-5)

    args = objective_flags(*ALL, "--encoding", "dense", "--loss-weights", "combine")
    _, metrics, _, (pred, targets, images, mask, _) = coupling(args, dense=True)
    token, pixel = losses.token_loss(pred.tokens[:, 1:], targets[:, 1:]), losses.pixel_loss(pred.pixels, images, 8)
    for name, loss, expert in (("token", token, 0), ("pixel", pixel, 1)):
        weighted = [pred.routing[3].combine[b, 1 + i, expert].item() * loss[b, i].item() for b in range(4) for i in range(16) if mask[b, i]]
        assert metrics[name].item() == pytest.approx(sum(weighted) / 28, rel=1e-5)                  # 7 masked patches an image
    combine = {block: r._replace(combine=0.1 * r.combine) for block, r in pred.routing.items()}
    smaller = objectives(args, pred._replace(routing=combine), targets, images, mask, None)[2]
    assert smaller["token"].item() == pytest.approx(0.1 * metrics["token"].item(), rel=1e-5)


def test_a_router_can_move_weight_off_a_hard_patch():
    moe, x = model.SoftMoE(8, 2, 16).double(), randn(1, 6, 8)
    loss = torch.tensor([[1.0, 0.1, 0.1, 0.1, 0.1, 0.1]], dtype=torch.float64)
    first = moe.route(x).dispatch[0, 0, 0].item()
    optimizer = torch.optim.SGD(moe.parameters(), lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        losses.routed_mean(loss, moe.route(x).dispatch[..., 0]).backward()
        optimizer.step()
    assert moe.route(x).dispatch[0, 0, 0].item() < 0.5 * first


def test_entropy_is_taken_of_the_chosen_weights_and_experts():
    for flags, source, lambdas in ((["--entropy-weight", "2"], "dispatch", [2, 2]), (["--entropy-weight", "5", "24"], "dispatch", [5, 24]),
                                   (["--entropy-experts", "0"], "dispatch", [5, 0]), (["--entropy-on", "combine"], "combine", [5, 5]),
                                   (["--entropy-weight", "1", "3", "--entropy-experts", "1"], "dispatch", [0, 3])):
        _, metrics, _, (pred, *_) = coupling(objective_flags(*flags))
        weights = getattr(pred.routing[3], source)
        expected = 0.0
        for e in range(2):
            expected += lambdas[e] * sum(p * math.log(p) for p in weights[:, :, e].flatten().tolist()) / len(weights)
        assert metrics["entropy_loss"].item() == pytest.approx(expected, rel=1e-6), flags


def test_importance_is_the_squared_variation_of_combine_weights_and_zero_for_equal_use():
    combine = randn(3, 7, 4).softmax(2)
    total = [sum(combine[b, t, e].item() for b in range(3) for t in range(7)) for e in range(4)]
    mean = sum(total) / 4
    expected = sum((x - mean) ** 2 for x in total) / 4 / mean ** 2
    assert losses.importance_loss(combine).item() == pytest.approx(expected, rel=1e-10)
    assert losses.importance_loss(torch.full((3, 7, 4), 0.25)).item() == 0
    assert losses.importance_loss(torch.cat([combine.roll(e, 2) for e in range(4)])).item() == pytest.approx(0, abs=1e-12)
    dispatch = randn(3, 7, 4).softmax(1)                        # why not on dispatch weights: their totals cannot differ
    assert losses.importance_loss(dispatch).item() == pytest.approx(0, abs=1e-20)
    args = objective_flags("--importance-weight", "2", "--entropy-weight", "0")
    total, metrics, _, (pred, *_) = coupling(args)
    assert metrics["importance_loss"].item() == pytest.approx(losses.importance_loss(pred.routing[3].combine).item())
    assert total.item() == pytest.approx((metrics["token"] + 0.4 * metrics["cls"] + 2 * metrics["importance_loss"]).item(), rel=1e-5)


def test_pixel_loss_is_equation_3_over_the_number_of_pixels():
    pred, images = randn(2, 4, 192), rand(2, 3, 16, 16)
    for b in range(2):
        for i in range(4):
            row, column = divmod(i, 2)
            patch = images[b, :, 8 * row:8 * row + 8, 8 * column:8 * column + 8].flatten()
            patch = (patch - patch.mean()) / (patch.var(unbiased=True) + 1e-6).sqrt()
            assert torch.equal(losses.patchify(images, 8)[b, i], images[b, :, 8 * row:8 * row + 8, 8 * column:8 * column + 8].flatten())
            expected = sum((p - x) ** 2 for p, x in zip(pred[b, i].tolist(), patch.tolist())) / 192
            assert losses.pixel_loss(pred, images, 8)[b, i].item() == pytest.approx(expected, rel=1e-10)


# --------------------------------------------------------------------------------------------- global balancing, baselines

def test_gradnorm_finds_the_weights_that_make_gradients_equal():
    balance = losses.GradNorm(2, alpha=0.0, lr=0.01)
    for _ in range(300):                                        # w_1 * 4 = w_2 * 1 and w_1 + w_2 = 2
        balance.update(torch.tensor([3.0, 5.0]), torch.tensor([4.0, 1.0]))
        assert balance.weights.sum().item() == pytest.approx(2, rel=1e-6)
    assert balance.weights.tolist() == pytest.approx([0.4, 1.6], abs=0.05)


def test_gradnorm_moves_two_quadratics_toward_equal_rates():
    def final_rates(lr, alpha=1.0):
        x, balance = torch.tensor([1.0, 1.0], requires_grad=True), losses.GradNorm(2, alpha, lr)
        scales = torch.tensor([1.0, 10.0])                      # the second objective's gradient is ten times larger
        for _ in range(60):
            values = scales * x ** 2
            grads = torch.stack([torch.autograd.grad(v, x, retain_graph=True)[0] for v in values])
            with torch.no_grad():
                x -= 0.01 * (balance.weights[:, None] * grads).sum(0)
            balance.update(values.detach(), grads.norm(dim=1))
        return (scales * x ** 2).detach() / scales, balance.weights
    plain, _ = final_rates(0.0)
    balanced, weights = final_rates(0.02)
    assert weights[0] > 1 > weights[1] and weights.sum().item() == pytest.approx(2)
    assert (balanced.log()[0] - balanced.log()[1]).abs() < 0.5 * (plain.log()[0] - plain.log()[1]).abs()


def test_gradnorm_helps_the_objective_that_lags_and_survives_numbers_that_are_not_finite():
    balance = losses.GradNorm(2, alpha=1.0, lr=0.01)
    balance.update(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0]))
    balance.update(torch.tensor([0.9, 0.1]), torch.tensor([1.0, 1.0]))      # the first has hardly fallen
    assert balance.weights[0] > 1 > balance.weights[1]
    before = balance.weights.clone()
    balance.update(torch.tensor([math.nan, 0.1]), torch.tensor([1.0, math.inf]))
    assert torch.equal(balance.weights, before)


def test_gradients_are_those_of_each_loss_at_the_layer_and_leave_the_backward_pass_alone():
    layer, head = nn.Linear(4, 4), nn.Linear(4, 2)
    y = head(layer(torch.randn(3, 4)))
    values = torch.stack([y.square().mean(), y.abs().mean()])
    got = losses.gradients_at(layer, values, torch.tensor(1024.0))
    assert layer.weight.grad is None
    for k in range(2):
        layer.zero_grad()
        values[k].backward(retain_graph=True)
        assert torch.allclose(got[k], torch.cat([layer.weight.grad.flatten(), layer.bias.grad]), atol=1e-6)


def test_random_loss_weights_are_a_softmax_drawn_by_seed_and_step():
    draws = torch.stack([losses.random_loss_weights(3, 42, step) for step in range(2000)])
    assert torch.allclose(draws.sum(1), torch.ones(2000)) and len(draws.unique(dim=0)) == 2000
    assert torch.equal(draws[7], losses.random_loss_weights(3, 42, 7)) and not torch.equal(draws[7], losses.random_loss_weights(3, 43, 7))
    logits = draws.log() - draws.log().mean(1, keepdim=True)    # what is left of standard normals after the softmax
    assert logits.var().item() == pytest.approx(2 / 3, rel=0.1)


# ------------------------------------------------------------------------------------------------------------ decoder

def identity_decoder():
    """A decoder without blocks, positions and norm: what it gives is what it was given, put in place."""
    decoder = model.PixelDecoder(model.ViT(32, 8, dim=192, depth=0, heads=2), dim=192, depth=0)
    for layer in (decoder.embed, decoder.pixels):
        nn.init.eye_(layer.weight)
    decoder.norm = nn.Identity()
    nn.init.zeros_(decoder.pos_embed), nn.init.constant_(decoder.mask_token, -1)
    return decoder


def test_the_decoder_puts_every_visible_token_back_where_it_came_from():
    decoder, tags = identity_decoder(), torch.arange(16.0)[None, :, None].expand(3, 16, 192)      # a patch says its place
    mask = torch.stack([torch.randperm(16) for _ in range(3)]) >= 9
    ids_keep, ids_restore = model.shuffle_visible(mask, torch.rand(3, 16), 9)
    expected = torch.where(mask[..., None], -1.0, tags)
    assert torch.equal(decoder(model.take(tags, ids_keep), ids_restore), expected)
    assert torch.equal(decoder(tags, mask=mask), expected)


def test_the_decoder_has_8_blocks_of_width_512_and_positions_of_its_own():
    student = model.Explore(model.build_vit("vit_nano", image_size=32, patch_size=8, experts=2), 8, dense=True, pixels=True)
    decoder = student.decoder
    assert len(decoder.blocks) == 8 and decoder.norm.normalized_shape == (512,) and decoder.blocks[0].attn.heads == 16
    assert decoder.pos_embed.shape == (1, 16, 512) and decoder.pixels.out_features == 192
    assert not any(isinstance(block.mlp, model.SoftMoE) for block in decoder.blocks)
    assert not any("ls1" in name or "ls2" in name for name in decoder.state_dict())      # the release's has no LayerScale
    assert student.mask_token.shape == (1, 1, 96) and not any("mask_token" in name for name in student.encoder.state_dict())
    mask = torch.rand(2, 16) < 0.5
    pred = student(torch.rand(2, 3, 32, 32), mask)
    assert pred.tokens.shape == (2, 17, 8) and pred.pixels.shape == (2, 16, 192) and pred.routing[3].dispatch.shape == (2, 17, 2)
    pred.pixels.sum().backward()
    assert student.mask_token.grad.any() and decoder.mask_token.grad.any() and student.encoder.cls_token.grad.any()


# ------------------------------------------------------------------------------------------------------------ encoder

def test_block_masks_have_exact_counts_and_are_blocks():
    rng, lone = np.random.default_rng(0), []
    for grid, ratio in ((14, 0.4), (14, 0.75), (8, 0.4), (6, 0.5), (2, 0.4)):
        for _ in range(50):
            mask = data.block_mask(rng, grid, ratio)
            assert mask.sum() == int(ratio * grid ** 2)
            if (grid, ratio) == (14, 0.4):
                lone.append(outside_blocks(mask.reshape(grid, grid), 16))
    assert np.mean(lone) < 8 and max(lone) < 16       # nearly all 78 patches lie in whole blocks of at least 16
    scattered = [outside_blocks(rng.permutation(196).reshape(14, 14) < 78, 16) for _ in range(20)]
    assert min(scattered) > 70                        # as those of a random mask do not


def outside_blocks(mask, smallest):
    """Masked patches that no fully masked rectangle of `smallest` patches and aspect 0.25 to 4 covers."""
    covered, n = np.zeros_like(mask), len(mask)
    for h in range(1, n + 1):
        for w in range(1, n + 1):
            if h * w >= smallest and 0.25 <= h / w <= 4:
                for top in range(n - h + 1):
                    for left in range(n - w + 1):
                        if mask[top:top + h, left:left + w].all():
                            covered[top:top + h, left:left + w] = True
    return (mask & ~covered).sum()


def test_the_student_sees_118_patches_of_196():
    mask = torch.stack([torch.from_numpy(data.block_mask(np.random.default_rng(i), 14, 0.4)) for i in range(4)])
    ids_keep, ids_restore = model.shuffle_visible(mask, torch.rand(4, 196), 118)
    assert ids_keep.shape == (4, 118) and mask.sum(1).tolist() == [78] * 4
    for b in range(4):
        assert sorted(ids_keep[b].tolist()) == (~mask[b]).nonzero()[:, 0].tolist()      # all of the visible ones, once
        assert ids_keep[b].tolist() != sorted(ids_keep[b].tolist())                     # shuffled
        for i in range(196):                                     # the inverse: where each patch went
            assert (ids_restore[b, i] < 118) == (~mask[b, i]) and (mask[b, i] or ids_keep[b, ids_restore[b, i]] == i)


def test_sparse_tokens_are_the_visible_patches_in_the_order_of_ids_keep():
    vit = model.ViT(32, 8, dim=16, depth=0, heads=2).double()
    images, ids_keep = randn(3, 3, 32, 32), torch.stack([torch.randperm(16)[:7] for _ in range(3)])
    tokens, _ = vit(images, ids_keep)
    for b in range(3):
        assert torch.allclose(tokens[b, 0], vit.norm(vit.cls_token[0, 0] + vit.pos_embed[0, 0]))
        for place, i in enumerate(ids_keep[b].tolist()):
            row, column = divmod(i, 4)
            patch = images[b, :, 8 * row:8 * row + 8, 8 * column:8 * column + 8]
            embedded = (vit.patch_embed.proj.weight * patch).sum((1, 2, 3)) + vit.patch_embed.proj.bias
            assert torch.allclose(tokens[b, 1 + place], vit.norm(embedded + vit.pos_embed[0, 1 + i]))


def test_encoding_does_not_depend_on_the_order_of_the_visible_patches():
    vit, images = model.build_vit("vit_nano", image_size=32, patch_size=8, experts=2).double(), randn(2, 3, 32, 32)
    ids = torch.stack([torch.randperm(16)[:9] for _ in range(2)])
    shuffled, order = vit(images, ids), torch.randperm(9)
    other = vit(images, ids[:, order])
    assert torch.allclose(other[0][:, 0], shuffled[0][:, 0]) and torch.allclose(other[0][:, 1:], shuffled[0][:, 1 + order])


def test_dense_encoding_replaces_masked_patches_before_the_position_embedding():
    vit = model.ViT(32, 8, dim=16, depth=0, heads=2).double()
    images, mask, mask_token = randn(2, 3, 32, 32), torch.rand(2, 16) < 0.5, randn(1, 1, 16)
    tokens, whole = vit(images, mask=mask, mask_token=mask_token)[0], vit(images)[0]
    assert torch.allclose(tokens[:, 1:][~mask], whole[:, 1:][~mask])
    assert torch.allclose(tokens[:, 1:][mask], vit.norm(mask_token + vit.pos_embed[:, 1:]).expand(2, -1, -1)[mask])


def test_drop_path_rises_with_depth_drops_per_image_and_keeps_the_expectation():
    vit = model.build_vit("vit_nano", image_size=32, patch_size=8, drop_path=0.3)
    assert [round(block.drop_path.p, 6) for block in vit.blocks] == [0, 0.1, 0.2, 0.3]
    branch = torch.ones(4000, 2, 3)
    kept = vit.blocks[3].drop_path(branch)
    assert kept.unique().tolist() == [0, torch.tensor(1 / (1 - 0.3)).item()] and (kept == kept[:, :1, :1]).all()      # whole images
    assert kept.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(vit.blocks[3].eval().drop_path(branch), branch)
    block, x = vit.blocks[3], torch.rand(2, 17, 96)
    assert not torch.equal(block(x)[0], x)
    block.drop_path.forward = lambda x: x * torch.tensor([0.0, 1.0]).view(2, 1, 1)      # of the first image, both branches are dropped
    assert torch.equal(block(x)[0][0], x[0]) and not torch.equal(block(x)[0][1], x[1])


@pytest.mark.parametrize("experts, millions, gigamacs", ((0, 85.8, 17.45), (2, 114.2, 11.93), (16, 510.9, None),
                                                         (32, 964.3, None), (64, 1871.2, 13.86)))
def test_parameters_and_macs_are_those_of_the_paper(experts, millions, gigamacs):
    with torch.device("meta"):
        vit = model.build_vit("vit_base", experts=experts)
    assert sum(p.numel() for p in vit.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    assert vit.moe_blocks == ([1, 3, 5, 7, 9, 11] if experts else [])
    if gigamacs:
        assert model.encoder_macs(vit) / 1e9 == pytest.approx(gigamacs, abs=0.005)


def test_mac_count_agrees_with_pytorchs_counter():
    from torch.utils.flop_counter import FlopCounterMode
    with torch.device("meta"):
        vit, x = model.build_vit("vit_base", experts=16), torch.empty(1, 119, 768)
    with FlopCounterMode(display=False) as counter:
        for block in vit.blocks:
            x, _ = block(x)
    assert counter.get_total_flops() == 2 * model.encoder_macs(vit, tokens=119)


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


def test_model_and_losses_need_nothing_but_torch():
    for name in ("model.py", "losses.py"):
        for node in ast.parse((HERE / name).read_text()).body:
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert all(m.split(".")[0] in {"torch", *sys.stdlib_module_names} for m in modules)


def test_position_embeddings_resize_to_another_grid():
    ramp = torch.arange(4.0)[:, None].expand(4, 4).reshape(1, 16, 1)
    embed = torch.cat([torch.full((1, 1, 1), 7.0), ramp], dim=1)
    assert model.resize_pos_embed(embed, 4) is embed
    larger = model.resize_pos_embed(embed, 8)
    rows = larger[0, 1:].view(8, 8)
    assert larger[0, 0] == 7 and torch.allclose(rows, rows[:, :1].expand(8, 8), atol=1e-5)
    assert torch.allclose(rows[2:6, 0], torch.tensor([0.75, 1.25, 1.75, 2.25]), atol=0.05)       # inside, a ramp stays one


# ----------------------------------------------------------------------------------------------------------- teachers

@pytest.fixture(scope="session")
def small_clips(tmp_path_factory):
    """open_clip models of toy size by the names small-16, small-16-quickgelu and small-8."""
    import open_clip
    folder = tmp_path_factory.mktemp("clip")
    text = dict(context_length=8, vocab_size=100, width=32, heads=2, layers=1)
    for name, patch, quick in (("small-16", 16, False), ("small-16-quickgelu", 16, True), ("small-8", 8, False)):
        config = dict(embed_dim=24, vision_cfg=dict(image_size=64, layers=3, width=64, patch_size=patch, head_width=32),
                      text_cfg=text, quick_gelu=quick)
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return folder


def pooled(teacher, images):
    """What CLIP itself makes of an image, computed from our tokens: ln_post and projection of [CLS]."""
    return teacher.visual.ln_post(teacher(images)[:, 0]) @ teacher.visual.proj


def test_clip_teacher_is_open_clips_own_forward(small_clips, tmp_path):
    import open_clip
    theirs = open_clip.create_model("small-16").eval()
    with torch.no_grad():      # no bias is zero, no norm neutral
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    teacher, images = model.build_teacher(f"small-16/{tmp_path / 'weights.pt'}", grid=4), torch.rand(2, 3, 64, 64)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)))
    assert teacher(images).shape == (2, 17, 64) and teacher.dim == 64
    assert torch.allclose(pooled(teacher, images), theirs.visual((images - mean) / std), atol=1e-5)
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training


def test_a_random_clip_teacher_is_the_same_every_time(small_clips):
    state = torch.get_rng_state()
    one, other = (model.build_teacher("small-16/random", grid=4).state_dict() for _ in range(2))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert torch.equal(torch.get_rng_state(), state)      # and nobody else's random numbers are taken


def test_quick_gelu_comes_from_the_tag_or_from_the_models_name(small_clips, monkeypatch, tmp_path):
    import open_clip
    file, images = str(tmp_path / "weights.pt"), torch.rand(2, 3, 64, 64)
    torch.save(open_clip.create_model("small-16-quickgelu").state_dict(), file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = open_clip.create_model("small-16-quickgelu", file).eval().visual
    quick = model.build_teacher(f"small-16-quickgelu/{file}", grid=4)
    normal = model.build_teacher(f"small-16/{file}", grid=4)
    expected = expected((images - quick.mean) / quick.std)
    assert torch.allclose(pooled(quick, images), expected, atol=1e-6)
    assert not torch.allclose(pooled(normal, images), expected, atol=1e-4)
    # a tag whose record says quick_gelu, on a model whose configuration does not
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda name: ["tag"])
    for module in (open_clip, open_clip.factory):
        monkeypatch.setattr(module, "get_pretrained_cfg", lambda name, tag: dict(url="", quick_gelu=True))
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *a, **k: file)
    assert torch.allclose(pooled(model.build_teacher("small-16/tag", grid=4), images), expected, atol=1e-6)


def test_openais_weights_are_known_to_need_quick_gelu():
    import open_clip
    assert open_clip.get_pretrained_cfg("ViT-B-16", "openai")["quick_gelu"] is True


@pytest.mark.parametrize("name, size", (("small-16", 96), ("small-8", 48)))
def test_a_teacher_of_another_patch_size_has_the_students_grid(small_clips, name, size):
    teacher, images = model.build_teacher(f"{name}/random", grid=6), torch.rand(2, 3, 48, 48)
    assert teacher.image_size == size and teacher(images).shape == (2, 37, 64)
    resized = F.interpolate(images, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
    assert torch.allclose(teacher(images), teacher(resized), atol=1e-5)


def test_a_checkpoint_of_ours_is_a_teacher_on_any_grid(tmp_path):
    path = write_checkpoint(tmp_path / "e2.pt", experts=2)
    teacher, encoder, images = model.build_teacher(path, grid=4), model.load_encoder(path).eval(), torch.rand(2, 3, 32, 32)
    assert torch.equal(teacher(images), encoder(data.normalize(images))[0])
    assert model.build_teacher(path, grid=6)(images).shape == (2, 37, 96)


@pytest.mark.parametrize("kind", ("clip", "no experts", "experts", "timm"))
def test_every_kind_of_teacher_works_in_every_precision(small_clips, tmp_path, kind):
    if kind == "timm":
        import timm
        torch.save(timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2).state_dict(), tmp_path / "timm.pt")
    name = {"clip": "small-16/random", "timm": str(tmp_path / "timm.pt")}.get(kind) or write_checkpoint(
        tmp_path / "ours.pt", experts=3 if kind == "experts" else 0)
    images = torch.rand(2, 3, 32, 32)
    exact = model.build_teacher(name, grid=4)(images)
    for precision in (torch.bfloat16, torch.float16):
        features = model.build_teacher(name, grid=4).to(dtype=precision)(images)
        assert features.dtype == precision
        assert ((features.float() - exact).norm() / exact.norm()).item() < (0.02 if precision == torch.bfloat16 else 0.003)


# --------------------------------------------------------------------------------------------------------------- data

def test_an_image_that_torchvision_cannot_decode_is_decoded_by_pillow(tmp_path, monkeypatch):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)).resize((60, 40))
    def refuse(*args, **kwargs):
        raise RuntimeError("unsupported")
    for torchvision_can in (True, False):
        for name, mode, kind in (("cmyk.jpg", "CMYK", "JPEG"), ("png.JPEG", "RGB", "PNG"), ("grey.jpg", "L", "JPEG"),
                                 ("palette.png", "P", "PNG"), ("alpha.png", "RGBA", "PNG"), ("rgb.jpg", "RGB", "JPEG")):
            picture.convert(mode).save(tmp_path / name, kind)
            image = data.read_image(str(tmp_path / name))
            expected = TF.pil_to_tensor(Image.open(tmp_path / name).convert("RGB")).float()
            assert image.dtype == torch.uint8 and image.shape == (3, 40, 60)
            assert (image.float() - expected).abs().mean() < 4, name
        monkeypatch.setattr(data, "decode_image", refuse)


def test_images_load_without_torchvisions_decoders(photos):
    """torchvision will remove them."""
    program = f"""
import torchvision.io
del torchvision.io.decode_image, torchvision.io.ImageReadMode
import data
image, label = data.Folder({photos!r}, "train")[9]
print(data.decode_image, tuple(image.shape), label, image.float().mean().item())"""
    printed = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=HERE, capture_output=True, text=True, check=True).stdout
    image, label = data.Folder(photos, "train")[9]
    decoder, shape, mean = re.fullmatch(rf"(\w+) (\(.*\)) {label} (.*)\n", printed).groups()
    assert decoder == "None" and shape == str(tuple(image.shape)) and float(mean) == pytest.approx(image.float().mean().item(), abs=1)


def test_images_stand_upright_and_16_bits_become_8(tmp_path):
    wide = np.zeros((20, 40, 3), dtype=np.uint8)
    wide[:, :20] = 255
    exif = Image.Exif()
    exif[0x0112] = 6                                  # the camera was turned: show it rotated by 90 degrees
    Image.fromarray(wide).save(tmp_path / "turned.jpg", exif=exif)
    image = data.read_image(str(tmp_path / "turned.jpg"))
    assert image.shape == (3, 40, 20) and image[:, 5].min() > 200 and image[:, 35].max() < 50
    Image.fromarray((np.arange(400, dtype=np.uint16) * 160).reshape(20, 20)).save(tmp_path / "deep.png")
    deep = data.read_image(str(tmp_path / "deep.png"))
    assert deep.dtype == torch.uint8 and abs(int(deep[0, 10, 0]) - 200 * 160 // 257) <= 1


def test_classes_are_those_of_train(photos, tmp_path):
    for split, names in (("train", ("ant", "bee", "cat")), ("val", ("bee", "cat"))):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / split / name / "x.png")
    val = data.Folder(str(tmp_path), "val")
    assert val.classes == ["ant", "bee", "cat"] and [val[i][1] for i in range(2)] == [1, 2]


def batches(photos, workers=0, world=1, rank=0, first=0, last=9):
    images = data.Folder(photos, "train")
    order = data.TrainOrder(len(images), 12, 6, 42, first, last, rank, world)
    return list(data.load(data.TrainViews(images, 32, 42, 4, 0.4), order, workers, torch.device("cpu")))


def test_workers_and_processes_change_nothing_about_an_image(photos):
    alone, helped = batches(photos), batches(photos, workers=2)
    assert len(alone) == len(helped) == 18                       # 9 steps of 2 micro-batches
    for a, b in zip(alone, helped):
        assert a.keys() == b.keys() == {"image", "label", "flip", "jitter", "mask", "noise"}
        assert all(torch.equal(a[key], b[key]) for key in a) and a["image"].dtype == torch.uint8
    pairs = [batches(photos, world=2, rank=rank) for rank in range(2)]
    for step in range(9):                                        # each step, two processes share the images that one has
        one = torch.cat([b["noise"] for b in alone[2 * step:2 * step + 2]])
        two = torch.cat([pairs[0][step]["noise"], pairs[1][step]["noise"]])
        assert sorted(one.tolist()) == sorted(two.tolist())


def test_epochs_visit_every_image_once_in_new_views_and_resuming_goes_on_in_the_middle(photos):
    order = list(data.TrainOrder(32, 8, 8, 42, 0, 8))
    keys = [key for batch in order for key in batch]
    assert sorted(keys) == sorted((epoch, index) for epoch in range(2) for index in range(32))
    assert [index for _, index in keys[:32]] != [index for _, index in keys[32:]]
    assert list(data.TrainOrder(32, 8, 8, 42, 3, 8)) == order[3:]
    views = data.TrainViews(data.Folder(photos, "train"), 32, 42, 4, 0.4)
    assert torch.equal(views[0, 5]["image"], views[0, 5]["image"]) and not torch.equal(views[0, 5]["image"], views[1, 5]["image"])


def test_crops_are_drawn_as_random_resized_crop_draws_them():
    rng, shares, aspects = np.random.default_rng(0), [], []
    for _ in range(2000):
        top, left, h, w = data.random_crop(rng, 300, 400, (0.2, 1.0))
        assert 0 <= top <= 300 - h and 0 <= left <= 400 - w
        shares.append(h * w / 120000), aspects.append(w / h)
    assert 0.19 < min(shares) < 0.22 and 0.95 < max(shares) <= 1 and 0.74 < min(aspects) < 0.77 and 1.3 < max(aspects) < 1.35
    for height, width in ((1, 1), (20000, 10), (1, 500)):
        top, left, h, w = data.random_crop(rng, height, width, (0.2, 1.0))
        assert 0 < h <= height and 0 < w <= width and top + h <= height and left + w <= width


def test_colour_jitter_is_torchvisions_image_by_image():
    images, factors = torch.rand(5, 3, 8, 8), 0.6 + 0.8 * torch.rand(5, 3)
    for image, (brightness, contrast, saturation), ours in zip(images, factors.tolist(), data.colour_jitter(images, factors)):
        theirs = TF.adjust_saturation(TF.adjust_contrast(TF.adjust_brightness(image, brightness), contrast), saturation)
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.allclose(data.colour_jitter(images, torch.ones(5, 3)), images, atol=1e-6)


def test_flips_are_per_image():
    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    out = data.augment(dict(image=image, flip=torch.tensor([True, False]), jitter=torch.ones(2, 3)))
    assert torch.allclose(out[0], image[0].flip(-1) / 255, atol=1e-6) and torch.allclose(out[1], image[1] / 255, atol=1e-6)


def test_evaluation_views_are_resize_256_and_centre_crop_224():
    image = torch.randint(0, 256, (3, 300, 500), dtype=torch.uint8)
    resized = TF.resize(image, 256, interpolation=TF.InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(data.centre_view(image, 224), TF.center_crop(resized, 224))
    assert data.centre_view(image[:, :1], 32).shape == (3, 32, 32)


def test_shapes_are_the_same_every_time_and_their_masks_are_the_object():
    train, val = data.Shapes("train", 48), data.Shapes("val", 48)
    image, label = train[7]
    assert torch.equal(image, data.Shapes("train", 48)[7][0]) and not torch.equal(image, val[7][0])
    assert train.classes[label] == "spotted blue" and len(set(train.classes)) == 10
    for index in range(40):
        picture, mask = train[index][0].float(), train.mask(index)
        spread = picture.amax(0) - picture.amin(0)              # the object is colourful, its background is dull
        assert 0.02 < mask.float().mean() < 0.6 and spread[mask].mean() > spread[~mask].mean()


# ----------------------------------------------------------------------------------------------------------- training

def test_the_schedule_warms_up_to_the_peak_and_ends_at_the_floor():
    rates = [common.learning_rate(step, 100, 10, 1.5e-3, 1e-6) for step in range(100)]
    assert rates[0] == pytest.approx(1.5e-4) and rates[9] == 1.5e-3 and rates[99] == pytest.approx(1e-6)
    assert rates[54] == pytest.approx((1.5e-3 + 1e-6) / 2) and all(a >= b for a, b in zip(rates[9:], rates[10:]))
    assert common.learning_rate(0, 10, 0, 1.0, 0.0) < 1 and common.learning_rate(9, 10, 0, 1.0, 0.0) == 0


@pytest.mark.parametrize("script, flags, expected", (
    (pretrain, [], (3000, 400)), (pretrain, ["--epochs", "3"], (30, 4)), (finetune, [], (1000, 50)), (finetune, ["--epochs", "20"], (200, 10)),
    (linprobe, ["x.pt", "--epochs", "5"], (50, 5)), (segment, ["x.pt"], (160000, 1500)), (segment, ["x.pt", "--iterations", "1600"], (1600, 15)),
    (linprobe, ["x.pt", "--epochs", "5", "--warmup-epochs", "2"], (50, 20)), (pretrain, ["--warmup-epochs", "0"], (3000, 0)),
    (segment, ["x.pt", "--iterations", "100", "--warmup-iterations", "9"], (100, 9))))
def test_a_default_warm_up_keeps_its_share_and_one_given_by_hand_is_taken_as_it_is(script, flags, expected):
    assert common.schedule(script.parse_args(flags), 10) == expected


def test_weight_decay_spares_biases_norms_scales_positions_and_tokens():
    student = model.Explore(model.build_vit("vit_nano", image_size=32, experts=2), 8)
    student.mask_token = nn.Parameter(torch.zeros(1, 1, 8))
    decayed = {name for name, p in student.named_parameters() if common.decays(name, p)}
    kinds = {re.sub(r"blocks\.\d+", "blocks.i", name) for name in decayed}
    assert kinds == {"head.weight", "encoder.patch_embed.proj.weight", *(f"encoder.blocks.i.{name}" for name in (
        "attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight", "mlp.phi", "mlp.w1", "mlp.w2"))}
    groups = common.adamw(student, 1e-3, 0.05, (0.9, 0.95)).param_groups
    assert sorted(g["weight_decay"] for g in groups) == [0, 0.05] and sum(len(g["params"]) for g in groups) == len(list(student.parameters()))


def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_and_counted():
    layer = nn.Linear(4, 4)
    optimizer, scaler = common.adamw(layer, 0.1, 0.05, (0.9, 0.95)), torch.amp.GradScaler("cpu", enabled=False)
    before, counts = layer.weight.detach().clone(), []
    for value in (math.inf, math.nan, 1.0):
        layer(torch.ones(2, 4)).sum().backward()
        layer.weight.grad[0, 0] = value
        counts.append(common.update(optimizer, scaler, 3.0)[1].item())
        assert torch.equal(layer.weight, before) == (value != 1.0) and layer.weight.isfinite().all()
    assert counts == [1, 1, 0]


def test_the_fp16_scaler_skips_by_itself_and_lowers_its_scale():
    layer = nn.Linear(4, 4)
    optimizer, scaler = common.adamw(layer, 0.1, 0.05, (0.9, 0.95)), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = layer.weight.detach().clone()
    for value, skips, scale in ((math.inf, 1, 512), (1.0, 0, 512)):
        scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
        layer.weight.grad[0, 0] = value
        norm, skipped = common.update(optimizer, scaler, 3.0)
        assert skipped.item() == skips and scaler.get_scale() == scale and torch.equal(layer.weight, before) == bool(skips)
    assert norm.item() < 20                                     # the norm of the unscaled gradients


def test_gradients_are_clipped_to_the_norm_and_zero_means_unclipped():
    layer = nn.Linear(4, 4, bias=False)
    for clip, expected in ((3.0, 3.0), (0.0, 400.0)):
        optimizer = common.adamw(layer, 0.0, 0.0, (0.0, 0.95))
        layer.weight.grad = torch.full((4, 4), 100.0)
        norm, _ = common.update(optimizer, torch.amp.GradScaler("cpu", enabled=False), clip)
        assert norm.item() == 400 and optimizer.state[layer.weight]["exp_avg"].norm().item() == pytest.approx(expected, rel=1e-4)


def test_training_lowers_the_loss_and_logs_the_diagnostics(toy):
    toy[toy.index("--epochs") + 1] = "20"
    state, log = train([*toy, "--lr", "2e-3"])
    assert log[-1]["token"] < 0.7 * log[0]["token"] and log[-1]["cls"] < log[0]["cls"]
    assert log[-1]["step"] == state["step"] == 80 and [line["step"] for line in log] == [20, 40, 60, 80]
    for key in ("loss", "token", "token_unweighted", "cls", "entropy_loss", "token_ratio", "lr", "images_per_second",
                "skipped", "grad_norm", "epoch"):
        assert isinstance(log[-1][key], float), key
    for key in ("entropy", "dispatch_cv", "cls_share", "scale"):
        assert len(log[-1][key]) == 2, key                      # two experts; two MoE blocks
    assert log[-1]["loss"] == pytest.approx(log[-1]["token"] + 0.4 * log[-1]["cls"] + log[-1]["entropy_loss"], rel=1e-3)
    assert log[-1]["entropy"][0] <= math.log(11) + 1e-5         # 10 visible patches and [CLS]


@pytest.mark.parametrize("flags", (["--experts", "0"], ["--objective", "token"], ["--detach"], ["--loss-weights", "uniform"],
                                   ["--experts", "4", "--entropy-weight", "1", "2", "3", "4", "--loss-block", "1", "3"],
                                   ["--amp", "bf16"], ["--encoding", "dense", "--objective", "token"],
                                   ["--objective", "token_pixel"], ["--balance", "rlw"],
                                   ["--objective", "token_cls_pixel", "--encoding", "dense", "--balance", "gradnorm"],
                                   ["--loss-weights", "combine", "--importance-weight", "2", "--entropy-on", "combine"]))
def test_variants_train(toy, flags):
    state, log = train([*toy, *flags, "--max-steps", "2"])
    assert state["step"] == 2 and math.isfinite(log[-1]["loss"])


@pytest.mark.parametrize("flags", ([], ["--balance", "gradnorm", "--gradnorm-lr", "0.2", "--micro-batch", "4"]))
def test_compiled_training_follows_the_plain_curve(toy, tmp_path, flags):
    toy += ["--drop-path", "0", "--max-steps", "4", *flags]
    (plain, plain_log), (compiled, compiled_log) = (train([*toy, flag, "--out", str(tmp_path / flag)])
                                                    for flag in ("--no-compile", "--compile"))
    for key in ("loss", "token", "cls", "entropy_loss", "grad_norm"):
        assert compiled_log[-1][key] == pytest.approx(plain_log[-1][key], rel=1e-4), key
    for name, value in plain["model"].items():
        assert torch.allclose(value, compiled["model"][name], atol=1e-4), name


def test_a_compiled_clip_teachers_weights_are_packed_on_a_cpu_and_teach_the_same(toy, small_clips, tmp_path):
    """Packed: the products are oneDNN's on weights in its own layout, bias and residual sum inside."""
    if torch.cuda.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("a GPU, or no bf16 products on this processor")
    toy += ["--teacher", "small-16-quickgelu/random", "--amp", "bf16", "--max-steps", "2", "--drop-path", "0", "--experts", "0",
            "--objective", "token"]
    from torch._dynamo.utils import counters
    counters.clear()
    (_, plain), (_, compiled) = (train([*toy, flag, "--out", str(tmp_path / flag)]) for flag in ("--no-compile", "--compile"))
    assert counters["inductor"]["mkldnn_linear_weight_pack_matcher_count"] == 3 * 4      # three blocks of four layers
    assert compiled[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=1e-2)


def equal_states(a, b):
    for part in ("model", "optimizer"):
        for x, y in zip(flatten(a[part]), flatten(b[part]), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def flatten(value):
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in flatten(value[key])]
    return [leaf for item in value for leaf in flatten(item)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("flags", ([], ["--balance", "gradnorm", "--gradnorm-lr", "0.2"], ["--balance", "rlw"]))
def test_an_interrupted_run_is_the_run_that_was_never_stopped(toy, tmp_path, flags):
    toy += ["--drop-path", "0.2", "--micro-batch", "4", *flags]         # drop path and accumulation too
    whole, log = train([*toy, "--out", str(tmp_path / "whole")])
    for stop in ("1", "3", "6"):
        parts = train([*toy, "--out", str(tmp_path / "parts"), "--max-steps", stop])[0]
        assert parts["step"] == int(stop)
    parts, parts_log = train([*toy, "--out", str(tmp_path / "parts"), "--workers", "1"])
    equal_states(whole, parts)
    assert parts_log[-1]["step"] == log[-1]["step"] == 8 and len({line["step"] for line in parts_log}) == len(parts_log)
    before = (tmp_path / "parts" / "last.pt").read_bytes()
    train([*toy, "--out", str(tmp_path / "parts")])             # a finished run stays as it is
    assert (tmp_path / "parts" / "last.pt").read_bytes() == before


@pytest.mark.parametrize("stage", ("finetune", "linear", "ep"))
def test_supervised_training_resumes_to_the_bit_too(photos, tmp_path, stage):
    flags = ["--batch-size", "8", "--amp", "off", "--workers", "0", "--data", photos, "--epochs", "2", "--warmup-epochs", "1"]
    script, flags = {"finetune": (finetune, flags), "linear": (linprobe, flags), "ep": (linprobe, [*flags, "--probe", "ep"])}[stage]
    flags = [write_checkpoint(tmp_path / "e2.pt", experts=2), *flags]
    for out, more in (("whole", []), ("parts", ["--max-steps", "3"]), ("parts", [])):
        script.main(script.parse_args([*flags, "--out", str(tmp_path / out), *more]))
    equal_states(*(model.load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "parts")))


@pytest.mark.parametrize("flags", (["--balance", "rlw"], ["--balance", "gradnorm", "--gradnorm-lr", "0.2", "--objective",
                                                          "token_cls_pixel", "--encoding", "dense"]))
def test_one_process_and_two_follow_the_same_curve(toy, tmp_path, flags):
    toy += ["--drop-path", "0", *flags]
    one, one_log = train([*toy, "--out", str(tmp_path / "one")])
    torchrun(2, "pretrain.py", *toy, "--out", str(tmp_path / "two"), "--micro-batch", "2")
    two = model.load_checkpoint(tmp_path / "two" / "last.pt")
    two_log = [json.loads(line) for line in open(tmp_path / "two" / "log.jsonl")]
    for key in ("loss", "token", "cls", "grad_norm", "objective_weights"):
        assert two_log[-1][key] == pytest.approx(one_log[-1][key], rel=1e-4), key
    for name, value in one["model"].items():
        assert torch.allclose(value, two["model"][name], atol=1e-4), name


@pytest.mark.parametrize("flags", ([], ["--balance", "gradnorm", "--gradnorm-lr", "0.2"]))
def test_accumulation_changes_nothing(toy, tmp_path, flags):
    states = [train([*toy, *flags, "--drop-path", "0", "--micro-batch", n, "--out", str(tmp_path / n)])[0] for n in ("8", "2")]
    for name, value in states[0]["model"].items():
        assert torch.allclose(value, states[1]["model"][name], atol=1e-4), name


def test_a_checkpoint_is_plain_and_rebuilds_its_model(toy, tmp_path):
    state, _ = train([*toy, "--max-steps", "4", "--save-every", "1"])
    out = tmp_path / "run"
    assert sorted(p.name for p in out.iterdir()) == [".lock", "args.json", "epoch_0000.pt", "epoch_0001.pt", "last.pt", "log.jsonl"]
    kept = torch.load(out / "epoch_0001.pt", weights_only=True)
    assert set(kept) == {"model", "encoder", "args", "step"} and kept["args"]["experts"] == 2
    encoder = model.load_encoder(out / "epoch_0001.pt")
    assert encoder.moe_blocks == [1, 3] and torch.equal(encoder.blocks[1].mlp.phi, state["model"]["encoder.blocks.1.mlp.phi"])
    assert json.loads((out / "args.json").read_text())["teacher"] == toy[toy.index("--teacher") + 1]


def test_a_save_that_fails_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    common.save(path, step=1)
    def full_disk(state, file):
        file.write(b"half a checkp")
        raise OSError("no space left on device")
    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(common.UserError, match="no space left on device"):
        common.save(path, step=2)
    assert torch.load(path, weights_only=True) == {"step": 1} and os.listdir(tmp_path) == ["last.pt"]


def test_the_run_folder_is_named_after_the_flags_that_matter():
    name = lambda *argv: pretrain.parse_args(list(argv)).out
    assert name() == name("--workers", "3", "--micro-batch", "8", "--max-steps", "4") == "runs/pretrain"
    assert name("--experts", "4") == name("--experts", "4", "--save-every", "1") == "runs/pretrain_experts=4"
    assert len({name("--lr", "1e-3"), name("--lr", "1e-4"), name("--detach"), name("--entropy-weight", "5", "24"),
                name("--amp", "bf16"), name()}) == 6


def test_without_cuda_fp16_becomes_float32_in_one_line(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    args = pretrain.parse_args([])
    assert common.start(args).amp is None and args.compile is False and args.amp == "off"
    assert capsys.readouterr().out == ("no CUDA device: --amp fp16 becomes off, float32; processors with bf16 units are faster with "
                                       "--amp bf16\n")
    assert common.start(pretrain.parse_args(["--amp", "bf16"])).amp == torch.bfloat16


def test_a_process_has_its_share_of_the_cores_as_loaders(monkeypatch):
    def workers(*argv):
        args = pretrain.parse_args([*argv, "--amp", "off"])
        common.start(args)
        return args.workers
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)), raising=False)
    assert workers() == 16 and workers("--workers", "40") == 40
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert workers() == 6
    monkeypatch.delattr(os, "sched_getaffinity")                # macOS has none
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert workers() == 3


@pytest.mark.parametrize("slow, least, most", ((False, 0.0, 0.9), (True, 0.7, 1.0)))
def test_the_log_says_what_share_of_the_time_went_into_waiting_for_the_loader(toy, monkeypatch, slow, least, most):
    views = data.TrainViews.__getitem__
    monkeypatch.setattr(data.TrainViews, "__getitem__", lambda self, key: (time.sleep(0.1 * slow), views(self, key))[1])
    _, log = train([*toy, "--max-steps", "4"])
    assert least <= log[-1]["loader_wait"] <= most


def test_gradients_stay_in_ddps_buckets_so_that_accumulation_needs_no_second_copy():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallel = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
        optimizer, scaler = common.adamw(layers, 0.1, 0.05, (0.9, 0.95)), torch.amp.GradScaler("cpu", enabled=False)
        places = []
        for _ in range(3):
            with parallel.no_sync():
                parallel(torch.randn(2, 4)).sum().backward()
            places.append([p.grad.untyped_storage().data_ptr() for p in layers.parameters()])
            parallel(torch.randn(2, 4)).sum().backward()
            places.append([p.grad.untyped_storage().data_ptr() for p in layers.parameters()])
            common.update(optimizer, scaler, 3.0)
        assert places[2] == places[3] == places[4] == places[5] and len(set(places[2])) == 1      # DDP lays them out after the first step
    finally:
        torch.distributed.destroy_process_group()


# --------------------------------------------------------------------------------------------- finetuning and the probes

@pytest.fixture
def downstream(photos, tmp_path):
    """A checkpoint with two experts, and the flags of a run of seconds from it."""
    return [write_checkpoint(tmp_path / "e2.pt", experts=2), "--data", photos, "--batch-size", "8", "--amp", "off", "--workers", "0",
            "--epochs", "1", "--warmup-epochs", "0", "--out", str(tmp_path / "run")]


def test_layer_decay_is_that_of_a_hand_counted_model():
    scale = common.layer_scale(4, 0.5)
    by_hand = {"encoder.patch_embed.proj.weight": 1 / 32, "encoder.pos_embed": 1 / 32, "encoder.cls_token": 1 / 32,
               "encoder.blocks.0.attn.qkv.weight": 1 / 16, "encoder.blocks.1.mlp.phi": 1 / 8, "encoder.blocks.1.mlp.scale": 1 / 8,
               "encoder.blocks.1.mlp.w1": 1 / 8, "encoder.blocks.2.ls1.gamma": 1 / 4, "encoder.blocks.3.mlp.b2": 1 / 2,
               "encoder.norm.weight": 1, "head.weight": 1, "head.bias": 1}
    assert {name: scale(name) for name in by_hand} == by_hand
    encoder = model.build_vit("vit_nano", image_size=32, patch_size=8, experts=2)
    optimizer = common.adamw(finetune.Classifier(encoder, 3, "cls"), 1.0, 0.05, (0.9, 0.999), scale)
    common.set_rate(optimizer, 0.01)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(encoder.blocks[1].mlp.phi)] == 0.01 / 8 and rates[id(encoder.patch_embed.proj.bias)] == 0.01 / 32


@pytest.mark.parametrize("recipe", (["none"], ["fr"], ["fa"], ["fr", "exd"], ["fr", "fa", "exd"], []))
def test_each_recipe_freezes_exactly_its_parameters(downstream, tmp_path, recipe):
    finetune.main(finetune.parse_args([*downstream, "--weight-decay", "0.1", *(["--recipe", *recipe] if recipe else [])]))
    before, after = (model.load_checkpoint(path)["model"] for path in (downstream[0], tmp_path / "run" / "last.pt"))
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    recipe = recipe or ["fr", "fa", "exd"]                                      # the default with experts
    expected = {name for name in before if "fr" in recipe and name.endswith((".phi", "mlp.scale")) or "fa" in recipe and ".attn." in name}
    assert frozen == expected
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["optimizer"]
    assert len(state["state"]) == len(after) - len(expected)                    # frozen parameters have left the optimizer


def test_frozen_parameters_get_no_gradient_and_exd_is_in_the_model():
    encoder = model.build_vit("vit_nano", image_size=32, patch_size=8, experts=2, expert_dropout=0.4)
    common.freeze(encoder, ["fr", "fa"])
    encoder(torch.rand(2, 3, 32, 32))[0].sum().backward()
    for name, p in encoder.named_parameters():
        assert (p.grad is None) == (name.endswith((".phi", "mlp.scale")) or ".attn." in name), name
    assert encoder.blocks[1].mlp.dropout == 0.4


def test_recipes_without_experts_are_ignored_in_one_line(photos, teacher, tmp_path, capsys):
    flags = ["--data", photos, "--batch-size", "8", "--amp", "off", "--workers", "0", "--epochs", "1", "--warmup-epochs", "0"]
    finetune.main(finetune.parse_args([teacher, *flags, "--recipe", "fr", "fa", "exd", "--out", str(tmp_path / "run")]))
    assert f"{teacher} has no experts: --recipe fr exd is ignored" in capsys.readouterr().out
    after, before = model.load_checkpoint(tmp_path / "run" / "last.pt")["model"], model.load_checkpoint(teacher)["model"]
    assert all(torch.equal(before[name], after[name]) == (".attn." in name) for name in before)
    assert "none stands alone" in refusal(capsys, finetune, teacher, *flags, "--recipe", "none", "fr", "--out", str(tmp_path / "no"))


@pytest.mark.parametrize("probe", ("linear", "ep"))
def test_probes_leave_the_encoder_alone(downstream, monkeypatch, tmp_path, probe):
    encoders = []
    load = linprobe.load_encoder
    monkeypatch.setattr(linprobe, "load_encoder", lambda path: encoders.append(load(path)) or encoders[-1])
    linprobe.main(linprobe.parse_args([*downstream, "--probe", probe]))
    encoder, = encoders
    before = model.load_checkpoint(downstream[0])["model"]
    assert all(torch.equal(before[f"encoder.{name}"], value) for name, value in encoder.state_dict().items())
    assert not encoder.training and all(p.grad is None and not p.requires_grad for p in encoder.parameters())
    assert not any(name.startswith("encoder") for name in model.load_checkpoint(tmp_path / "run" / "last.pt")["model"])


def test_efficient_probing_is_one_query_a_slice():
    probe, tokens = linprobe.EfficientProbe(64, 3).eval(), torch.randn(2, 6, 64)
    nn.init.normal_(probe.queries), nn.init.normal_(probe.value.bias)
    probe.norm.running_mean.normal_(), probe.norm.running_var.uniform_(0.5, 2)
    for b in range(2):
        pooled = []
        for q in range(32):
            scores = [(tokens[b, 1 + n] @ probe.queries[q]).item() / 8 for n in range(5)]      # [CLS] is left out
            weights = [math.exp(s) / sum(math.exp(x) for x in scores) for s in scores]
            values = sum(w * probe.value(tokens[b, 1 + n]) for n, w in enumerate(weights))
            pooled += values[2 * q:2 * q + 2].tolist()
        normed = (torch.tensor(pooled) - probe.norm.running_mean) / (probe.norm.running_var + 1e-5).sqrt()
        assert torch.allclose(probe(tokens)[b], probe.head(normed), atol=1e-5)


def test_strong_supervision_mixes_targets_that_sum_to_one(downstream, monkeypatch):
    targets, plain = [], F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda logits, target, **kwargs: targets.append((target, kwargs)) or plain(logits, target, **kwargs))
    finetune.main(finetune.parse_args(downstream))
    assert len(targets) == 4 and all(t.shape == (8, 4) and torch.allclose(t.sum(1), torch.ones(8)) for t, _ in targets)
    assert any(((t > 0) & (t < 1)).any() for t, _ in targets) and all(k == {"label_smoothing": 0.1} for _, k in targets)


def test_strong_views_are_a_function_of_seed_epoch_and_index(photos):
    views = data.TrainViews(data.Folder(photos, "train"), 32, 42, strong=True, erase=True)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    first = [views[0, i] for i in range(32)]
    assert all(torch.equal(a["image"], views[0, i]["image"]) and (a["jitter"] == 1).all() for i, a in enumerate(first))
    assert not torch.equal(first[3]["image"], views[1, 3]["image"])
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]      # the global generators are as they were
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2]))


def test_strong_views_are_timms_rand_augment_on_crops_from_8_percent_on(photos, monkeypatch):
    import timm.data
    scales, crop = [], data.random_crop
    monkeypatch.setattr(data, "random_crop", lambda rng, h, w, scale, *more: scales.append(scale) or crop(rng, h, w, (1.0, 1.0), *more))
    strong, plain = (data.TrainViews(data.Folder(photos, "train"), 32, 42, strong=strong) for strong in (True, False))
    theirs = timm.data.create_transform(32, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", hflip=0)
    theirs, untouched, same = next(t for t in theirs.transforms if "RandAugment" in repr(t)), 0, 0
    for epoch in range(20):
        for i in range(32):
            before, after = plain[epoch, i]["image"], strong[epoch, i]["image"]
            untouched += torch.equal(before, after)
            if epoch == 0:
                rng = np.random.default_rng((42, epoch, i))
                crop(rng, *strong.images[i][0].shape[1:], (1.0, 1.0)), rng.random(), rng.uniform(size=3)
                with data.seeded(rng), contextlib.suppress(ValueError):
                    same += torch.equal(after, TF.pil_to_tensor(theirs(TF.to_pil_image(before))))
    assert same >= 30                                           # the 2 % of magnitudes at timm's limit of 10 aside
    assert 0.2 < untouched / 640 < 0.35                         # both operations are left out in a quarter of the images
    for seed in range(3000):                                    # and none fails, as posterizing to 0 bits does in newer Pillows
        with data.seeded(np.random.default_rng(seed)):
            strong.rand_augment(Image.new("RGB", (4, 4)))
    assert set(scales[1::2]) == {(0.08, 1.0)} and set(scales[::2]) == {(0.2, 1.0)}


def test_random_erasing_takes_a_quarter_of_the_images_and_a_third_of_one_at_most():
    rng, shares = np.random.default_rng(0), []
    for _ in range(400):
        erased = data.random_erasing(rng, torch.full((3, 40, 40), 255, dtype=torch.uint8))
        shares.append((erased != 255).any(0).float().mean().item())
    assert 0.18 < np.mean([s > 0 for s in shares]) < 0.32 and max(shares) < 0.36


def test_finetuning_erases_and_probes_do_not(downstream, monkeypatch, tmp_path):
    erased = []
    monkeypatch.setattr(data, "random_erasing", lambda rng, image: erased.append(1) or image)
    linprobe.main(linprobe.parse_args([*downstream, "--out", str(tmp_path / "probe")]))
    assert not erased
    finetune.main(finetune.parse_args(downstream))
    assert len(erased) == 32


def test_the_classification_head_starts_at_a_thousandth_of_the_usual_size():
    classifier = finetune.Classifier(model.build_vit("vit_tiny", image_size=32), 1000, "cls")
    assert classifier.head.weight.std().item() == pytest.approx(0.001 * 0.02, rel=0.05) and not classifier.head.bias.any()


def test_the_progress_bar_names_no_best_before_the_first_evaluation(downstream, scenes, tmp_path, capsys):
    flags = ["--save-minutes", "1e-9", "--max-steps", "4"]
    finetune.main(finetune.parse_args([*downstream, *flags, "--epochs", "2"]))
    segment.main(segment.parse_args([*segmentation(scenes, tmp_path), *flags, "--iterations", "8", "--out", str(tmp_path / "s")]))
    bars = [bar for bar in re.split("[\n\r]", capsys.readouterr().err) if "loss=" in bar]
    assert len(bars) > 4 and not any("best" in bar for bar in bars)


def test_top_1_and_top_5_count_each_image_once():
    logits = torch.eye(8)[[0, 1, 2, 3]] + torch.arange(8) * 0.01
    batches = [dict(image=torch.zeros(2, 3, 8, 8), label=torch.tensor(labels)) for labels in ([0, 7], [0, 3])]
    parts = iter(logits.split(2))
    process = common.Process(0, 1, torch.device("cpu"), None)
    assert finetune.accuracy(lambda images: next(parts), batches, process) == (50.0, 75.0)


@pytest.mark.parametrize("stage", ("finetune", "linear", "ep"))
def test_eight_images_are_learned_by_heart(photos, tmp_path, stage):
    for split in ("train", "val"):
        for i in range(8):
            folder = tmp_path / split / f"class_{i}"
            folder.mkdir(parents=True)
            (folder / "0.jpg").symlink_to(Path(photos, "train", f"class_{i // 2}", f"{i}.jpg"))
    script, flags = {"finetune": (finetune, ["--layer-decay", "1", "--drop-path", "0", "--recipe", "none"]), "linear": (linprobe, []),
                     "ep": (linprobe, ["--probe", "ep"])}[stage]
    top1, top5 = script.main(script.parse_args([
        write_checkpoint(tmp_path / "e2.pt", experts=2), "--data", str(tmp_path), "--batch-size", "8", "--amp", "off", "--workers", "0",
        "--epochs", "150", "--warmup-epochs", "5", "--lr", "0.003" if stage == "finetune" else "0.05", "--augment", "plain", "--save-every", "30",
        "--out", str(tmp_path / "run"), *flags]))
    assert top1 >= 87.5 and top5 == 100


def test_evaluation_alone_gives_the_best_epochs_numbers_in_one_process_and_in_two(downstream, capsys):
    best = finetune.main(finetune.parse_args([*downstream, "--epochs", "3", "--save-every", "1"]))
    capsys.readouterr()
    assert finetune.main(finetune.parse_args([*downstream, "--epochs", "3", "--eval-only"])) == best
    line = capsys.readouterr().out
    assert re.search(r"best.pt: top-1 \d+\.\d\d%, top-5 \d+\.\d\d%\n$", line)
    assert torchrun(2, "finetune.py", *downstream, "--epochs", "3", "--eval-only") == line


def test_the_mean_patch_token_is_pooled_where_asked():
    encoder, images = model.build_vit("vit_nano", image_size=32, patch_size=8).eval(), torch.rand(2, 3, 32, 32)
    tokens = encoder(images)[0]
    for pool, expected in (("cls", tokens[:, 0]), ("mean", tokens[:, 1:].mean(1))):
        classifier = finetune.Classifier(encoder, 3, pool)
        assert torch.allclose(classifier(images), classifier.head(expected))


# -------------------------------------------------------------------------------------------------------- segmentation

@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """Eight training and three validation photographs with a class for each pixel, in ADE20K's layout: 11 classes."""
    root = tmp_path_factory.mktemp("scenes")
    for split, name, count in (("train", "training", 8), ("val", "validation", 3)):
        for kind in ("images", "annotations"):
            (root / kind / name).mkdir(parents=True)
        for i in range(count):
            shapes = data.Shapes(split, 72)
            Image.fromarray(shapes[i][0].permute(1, 2, 0).numpy()[:, :60 + 2 * i]).save(root / "images" / name / f"{i}.jpg", quality=95)
            Image.fromarray(shapes.annotation(i).numpy()[:, :60 + 2 * i]).save(root / "annotations" / name / f"{i}.png")
    return str(root)


def segmentation(scenes, tmp_path, *more):
    path = tmp_path / "e2.pt"
    return [str(path) if path.exists() else write_checkpoint(path, experts=2), "--data", scenes, "--classes", "11", "--crop-size", "48",
            "--width", "16", "--batch-size", "4", "--iterations", "4", "--warmup-iterations", "1", "--amp", "off", "--workers", "0", "--out",
            str(tmp_path / "run"), *more]


@pytest.mark.parametrize("grid", (1, 3, 7, 8))
def test_upernet_gives_a_quarter_of_the_patch_stride_at_any_size(grid):
    decoder = segment.UperNet(8, 5, 16).eval()
    logits, auxiliary = decoder([torch.randn(2, 8, grid, grid) for _ in range(4)])
    assert logits.shape == (2, 5, 4 * grid, 4 * grid) and auxiliary.shape == (2, 5, grid, grid)


def test_features_come_from_blocks_3_5_7_and_11_before_the_norm():
    assert segment.feature_blocks(12) == [3, 5, 7, 11] and segment.feature_blocks(24) == [7, 11, 15, 23]
    assert segment.feature_blocks(4) == [0, 1, 2, 3]
    vit, images = model.build_vit("vit_nano", image_size=32, patch_size=8, experts=2).eval(), torch.rand(2, 3, 32, 32)
    maps = vit.intermediate(images, [1, 3])
    assert maps[0].shape == (2, 96, 4, 4)
    assert torch.allclose(vit.norm(maps[1].flatten(2).transpose(1, 2)), vit(images)[0][:, 1:], atol=1e-5)


def test_sliding_windows_of_a_pointwise_model_are_the_whole_image():
    for height, width in ((12, 31), (12, 12), (29, 17)):
        images = torch.randn(1, 3, height, width)
        weight = torch.randn(5, 3, 1, 1)
        windows = segment.sliding_window(lambda x: F.conv2d(x, weight), images, 12, 8)
        assert torch.allclose(windows, F.conv2d(images, weight), atol=1e-5)


def test_scores_of_a_hand_counted_case():
    annotation = torch.tensor([[1, 1, 1, 2], [2, 2, 0, 0], [4, 4, 4, 4]])         # 0 is ignored; class 3 and 5 are nowhere
    predicted = torch.tensor([[0, 0, 1, 1], [1, 0, 4, 2], [3, 3, 3, 0]])
    matrix = segment.confusion(predicted, annotation, 5)
    assert matrix.sum() == 10 and matrix[0].tolist() == [2, 1, 0, 0, 0] and matrix[3].tolist() == [1, 0, 0, 3, 0]
    ious = [2 / 5, 2 / 4, 3 / 4]                    # class 1: 2 hits, 3 true, 4 predicted; 2: 2, 3, 3; 4: 3, 4, 3
    accuracies = [2 / 3, 2 / 3, 3 / 4]
    result = segment.scores(matrix)
    assert result["miou"] == pytest.approx(100 * sum(ious) / 3) and result["mean_accuracy"] == pytest.approx(100 * sum(accuracies) / 3)
    assert result["pixel_accuracy"] == pytest.approx(70)


def test_scene_views_move_image_and_annotation_together(tmp_path):
    for kind in ("images", "annotations"):
        (tmp_path / kind / "training").mkdir(parents=True)
    annotation = np.ones((60, 80), dtype=np.uint8)
    annotation[20:45, 30:70] = 2                                                  # class 2 is white, class 1 black
    Image.fromarray(annotation).save(tmp_path / "annotations" / "training" / "0.png")
    Image.fromarray((annotation == 2).astype(np.uint8) * 255).convert("RGB").save(tmp_path / "images" / "training" / "0.jpg", quality=100)
    views = data.SceneViews(data.Scenes(str(tmp_path), "training"), 40, 2, seed=3)
    seen = set()
    for epoch in range(40):
        view = views[epoch, 0]
        again = views[epoch, 0]
        assert view["image"].shape == (3, 40, 40) and torch.equal(view["image"], again["image"])
        assert torch.equal(view["annotation"], again["annotation"])
        bright, classes = view["image"].float().mean(0), view["annotation"]
        seen |= set(classes.unique().tolist())
        if (classes == 1).sum() > 50 and (classes == 2).sum() > 50:
            assert bright[classes == 2].mean() > bright[classes == 1].mean() + 40
    assert seen == {0, 1, 2}                                                      # 0 is what padding adds
    whole = data.SceneViews(data.Scenes(str(tmp_path), "training"), 40, 2)[0]
    assert whole["image"].shape == (3, 40, 53) and whole["annotation"].shape == (60, 80)


def test_photometric_distortion_is_mmsegmentations_and_keeps_the_order_of_the_channels():
    import colorsys
    colours = torch.tensor([[250, 10, 20], [15, 200, 40], [30, 20, 220], [90, 120, 60]], dtype=torch.uint8)
    untouched = 0
    for seed in range(300):
        out = data.photometric_distortion(np.random.default_rng(seed), colours.T[..., None])[..., 0].T
        untouched += torch.equal(out, colours)
        assert out[:3].argmax(1).tolist() == [0, 1, 2] or out[:3].float().std(1).min() < 25         # a tenth of a turn is no permutation
        rng = np.random.default_rng(seed)
        draw = lambda low, high, nothing: rng.uniform(low, high) if rng.random() < 0.5 else nothing
        offset, contrast, first = draw(-32, 32, 0), draw(0.5, 1.5, 1), rng.random() < 0.5
        saturation, turn = draw(0.5, 1.5, 1), draw(-0.1, 0.1, 0)
        clip = lambda values, top: [min(max(v, 0), top) for v in values]
        for colour, seen in zip(colours.tolist(), out.tolist()):
            x = clip([v + offset for v in colour], 255)
            x = clip([v * contrast for v in x], 255) if first else x
            h, s, v = colorsys.rgb_to_hsv(*(value / 255 for value in x))
            x = [255 * value for value in colorsys.hsv_to_rgb((h + turn) % 1, min(s * saturation, 1), v)]
            x = x if first else clip([v * contrast for v in x], 255)
            assert seen == pytest.approx(x, abs=16)                                     # Pillow counts hue in 256 steps
    assert 0.03 < untouched / 300 < 0.1                                             # a sixteenth


def test_a_crop_of_nearly_one_class_is_drawn_again_ten_times_at_most():
    annotation = torch.ones(1, 40, 400, dtype=torch.uint8)
    annotation[..., 200:] = 2
    shares = []
    for seed in range(200):
        top, left = data.scene_crop(np.random.default_rng(seed), annotation, 40)
        classes = annotation[:, top:top + 40, left:left + 40]
        shares.append(max((classes == 1).float().mean().item(), (classes == 2).float().mean().item()))
    # one crop in 18 is mixed enough, and eleven are drawn
    assert np.mean([share < 0.75 for share in shares]) == pytest.approx(1 - (17 / 18) ** 11, abs=0.12)
    draws, rng = [], np.random.default_rng(0)
    class Counting:
        def integers(self, high): return draws.append(1) or rng.integers(high)
    data.scene_crop(Counting(), torch.ones(1, 80, 80, dtype=torch.uint8), 40)
    assert len(draws) == 2 * 11
    unlabelled = torch.zeros(1, 40, 80, dtype=torch.uint8)                          # does not count: one class and nothing else is one class
    unlabelled[..., 70:] = 3
    draws.clear()
    data.scene_crop(Counting(), unlabelled, 80)
    assert len(draws) == 2 * 11


def test_one_image_in_a_process_is_enough_where_batch_norm_is_synchronized():
    assert segment.images_at_once(1, 4, torch.device("cuda")) == 4 and segment.images_at_once(1, 4, torch.device("cpu")) == 1
    assert segment.images_at_once(1, 1, torch.device("cuda")) == 1


def test_segmentation_trains_with_the_papers_recipe_resumes_to_the_bit_and_evaluates_alone(scenes, tmp_path, capsys):
    whole = segment.main(segment.parse_args(segmentation(scenes, tmp_path)))
    printed = capsys.readouterr().out
    assert re.search(r"best mIoU \d+\.\d\d%, mean accuracy \d+\.\d\d%, pixel accuracy \d+\.\d\d%\n$", printed)
    before, after = (model.load_checkpoint(path)["model"] for path in (tmp_path / "e2.pt", tmp_path / "run" / "last.pt"))
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    unused = {"encoder.norm.weight", "encoder.norm.bias"}
    recipe = {name for name in before if name.endswith((".phi", "mlp.scale")) or ".attn." in name}
    assert recipe <= frozen and not (frozen - recipe - unused - {"encoder.pos_embed"})
    assert Image.open(tmp_path / "run" / "segmentation.png").size == (3 * 256, 3 * 192)
    for stop in (["--max-steps", "2"], []):
        segment.main(segment.parse_args(segmentation(scenes, tmp_path, "--out", str(tmp_path / "parts"), *stop)))
    equal_states(*(model.load_checkpoint(tmp_path / name / "last.pt") for name in ("run", "parts")))
    capsys.readouterr()
    assert segment.main(segment.parse_args(segmentation(scenes, tmp_path, "--eval-only"))) == whole
    alone = capsys.readouterr().out
    assert torchrun(2, "segment.py", *segmentation(scenes, tmp_path, "--eval-only")) == alone


def test_two_processes_train_segmentation_and_evaluate_with_the_same_statistics(scenes, tmp_path):
    flags = segmentation(scenes, tmp_path, "--recipe", "none", "--lr", "0.01")
    printed = torchrun(2, "segment.py", *flags).split("best ")[1]
    alone = segment.main(segment.parse_args([*flags, "--eval-only"]))     # BatchNorm's are those of the first process
    assert segment.summary(alone) + "\n" == printed


def test_segmentation_learns_eight_images_by_heart(scenes, tmp_path):
    same = tmp_path / "same"
    for kind in ("images", "annotations"):
        (same / kind).mkdir(parents=True)
        for split in ("training", "validation"):
            (same / kind / split).symlink_to(Path(scenes, kind, "training"))
    result = segment.main(segment.parse_args([*segmentation(str(same), tmp_path), "--iterations", "250", "--batch-size", "8", "--lr", "0.002",
                                              "--layer-decay", "1", "--recipe", "none", "--drop-path", "0", "--width", "32"]))
    assert result["pixel_accuracy"] > 93 and result["miou"] > 60


def test_bad_segmentation_input_is_named(scenes, tmp_path, capsys):
    for flags, expected in ((["--crop-size", "50"], "--crop-size 50 is not a multiple of the patch size 8"),
                            (["--warmup-iterations", "9"], "--warmup-iterations 9 leaves nothing of --iterations 4"),
                            (["--micro-batch", "1"], "--micro-batch 1: UperNet's BatchNorm needs at least 2 images"), (["--batch-size", "1"], "--micro-batch 1: "),
                            (["--classes", "5"], "but --classes is 5"), (["--data", str(tmp_path)], "expected ADE20K's layout"),
                            (["--eval-only"], "--eval-only: there is no checkpoint")):
        assert expected in refusal(capsys, segment, *segmentation(scenes, tmp_path, *flags)), flags


# ---------------------------------------------------------------------------------------------- other people's weights

def test_plain_vit_state_dicts_load(tmp_path):
    import timm
    images = torch.rand(1, 3, 224, 224)
    for options, wrap in ((dict(init_values=0.1), lambda s: s), (dict(), lambda s: {"model": s}),
                          (dict(), lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}})):
        theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options).eval()
        torch.save(wrap({**theirs.state_dict(), "decoder_pos_embed": torch.zeros(1)}), tmp_path / "timm.pt")
        encoder = model.load_encoder(tmp_path / "timm.pt").eval()
        assert torch.allclose(encoder(images)[0], theirs.forward_features(images), atol=1e-4)


@pytest.mark.parametrize("width, heads", ((192, 3), (384, 6), (512, 8), (768, 12), (1024, 16), (1280, 16)))
def test_known_widths_have_their_own_heads(tmp_path, width, heads):
    """As in DeiT, ViT-S/B/L and MAE's ViT-H."""
    import timm
    theirs = timm.models.VisionTransformer(32, 16, embed_dim=width, depth=1, num_heads=heads, num_classes=0).eval()
    torch.save(theirs.state_dict(), tmp_path / "timm.pt")
    images = torch.rand(1, 3, 32, 32)
    assert torch.allclose(model.load_encoder(tmp_path / "timm.pt").eval()(images)[0], theirs.forward_features(images), atol=1e-4)


def test_other_widths_load_with_the_number_of_their_heads_alone(tmp_path):
    import timm
    theirs = timm.models.VisionTransformer(32, 16, embed_dim=128, depth=2, num_heads=4, num_classes=0).eval()
    torch.save(theirs.state_dict(), tmp_path / "timm.pt")
    with pytest.raises(ValueError, match="how many attention heads an encoder of width 128 has: save it as {'model': state_dict, 'heads': N"):
        model.load_encoder(tmp_path / "timm.pt")
    torch.save({"model": theirs.state_dict(), "heads": 4}, tmp_path / "told.pt")
    images = torch.rand(1, 3, 32, 32)
    assert torch.allclose(model.load_encoder(tmp_path / "told.pt").eval()(images)[0], theirs.forward_features(images), atol=1e-4)


@pytest.mark.parametrize("stray", ("register_tokens", "reg_token", "dist_token", "norm_pre.weight", "rel_pos_bias.relative_position_bias_table"))
def test_a_tensor_without_a_place_in_our_encoder_refuses_the_file_by_name(tmp_path, stray):
    """DINOv2's and timm's registers, DeiT's distillation token, CLIP's norm before the blocks: without them features would be wrong."""
    state = model.build_vit("vit_tiny", image_size=32).state_dict()
    torch.save(state | {"head.weight": torch.zeros(1), "decoder_pos_embed": torch.zeros(1), "mask_token": torch.zeros(1)}, tmp_path / "fits.pt")
    assert model.load_encoder(tmp_path / "fits.pt").dim == 192
    torch.save(state | {stray: torch.zeros(1, 4, 192)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=f"{stray} has no place in our encoder"):
        model.load_encoder(tmp_path / "x.pt")


def release_checkpoint(encoder, head):
    """Our encoder in the words of the authors' release."""
    state = {}
    for name, value in encoder.state_dict().items():
        name = name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")
        if name.endswith("qkv.bias"):
            state[name.replace("qkv.bias", "q_bias")], _, state[name.replace("qkv.bias", "v_bias")] = value.chunk(3)
        elif re.search(r"mlp\.[wb][12]$", name):
            for j, part in enumerate(value):
                kind = "weight" if name[-2] == "w" else "bias"
                state[f"{name[:-2]}experts.{j}.fc{name[-1]}.{kind}"] = part.T.contiguous() if kind == "weight" else part
        else:
            state[name] = value
    state |= {f"distill_head.{k}": v for k, v in head.state_dict().items()}
    return {f"student.{k}": v for k, v in state.items()} | {"teacher.cls_token": torch.zeros(1)}


@pytest.mark.parametrize("prefix", ("", "module."))
def test_checkpoints_of_the_authors_release_load(tmp_path, prefix):
    encoder, head = model.ViT(32, 8, dim=192, depth=4, heads=3, experts=3).eval(), nn.Linear(192, 16)
    for name, p in encoder.named_parameters():
        p.data.add_(0.05 * torch.randn_like(p))
        if name.endswith("qkv.bias"):
            p.data[192:384] = 0                                                 # the release's keys have no bias
    state = {prefix + name: value for name, value in release_checkpoint(encoder, head).items()}
    torch.save({"model": state, "config": {"lr": 1e-3}}, tmp_path / "release.pt")
    loaded, images = model.load_encoder(tmp_path / "release.pt").eval(), torch.rand(2, 3, 32, 32)
    assert torch.allclose(loaded(images)[0], encoder(images)[0], atol=1e-6) and loaded.moe_blocks == [1, 3]
    assert not loaded.blocks[0].attn.qkv.bias[192:384].any()
    assert torch.equal(model.load_checkpoint(tmp_path / "release.pt")["model"]["head.weight"], head.weight)


def test_a_release_checkpoint_with_a_pickled_config_is_refused_with_a_way_to_convert_it(tmp_path):
    import argparse
    path, converted = tmp_path / "config.pt", tmp_path / "converted.pt"
    encoder = model.ViT(32, 8, dim=192, depth=2, heads=3, experts=2)
    torch.save({"model": release_checkpoint(encoder, nn.Linear(192, 4)), "config": argparse.Namespace(lr=1)}, path)
    with pytest.raises(ValueError, match="could run code when read") as refused:
        model.load_encoder(path)
    command = re.search(r'python -c "(.*)"', str(refused.value)).group(1)
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True)    # the advice works as it is printed
    assert model.load_encoder(converted).moe_blocks == [1]


def test_files_that_are_no_vit_say_what_is_missing(tmp_path):
    vit = model.build_vit("vit_tiny", image_size=32).state_dict()
    for state, expected in (({"weight": torch.zeros(1)}, "it lacks patch_embed.proj.weight"), ([1, 2], "it is no dict of tensors"),
                            ({k: v for k, v in vit.items() if k != "blocks.3.norm1.bias"}, "blocks.3.norm1.bias is missing")):
        torch.save(state, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=expected):
            model.load_encoder(tmp_path / "x.pt")


# --------------------------------------------------------------------------------------------------------------- k-NN

@pytest.mark.parametrize("temperature", (0.07, 5.0))             # at 5.0 all neighbours count nearly alike: one more would show
def test_knn_is_the_weighted_vote_of_the_nearest(temperature):
    bank, queries = (F.normalize(torch.randn(n, 8), dim=1) for n in (60, 30))
    labels = torch.randint(0, 4, (60,))
    expected = []
    for query in queries:
        near = sorted(range(60), key=lambda i: -(query @ bank[i]).item())[:7]
        votes = [sum(math.exp((query @ bank[i]).item() / temperature) for i in near if labels[i] == c) for c in range(4)]
        expected.append(votes.index(max(votes)))
    for chunks in ((4096, 65536), (7, 5), (30, 13)):            # in pieces as in one
        assert knn.classify(queries, bank, labels, 4, 7, temperature, *chunks).tolist() == expected


def test_knn_at_the_smallest_temperature_is_the_nearest_neighbour():
    bank, labels = F.normalize(torch.randn(50, 8), dim=1), torch.arange(50) % 5
    queries = F.normalize(torch.randn(30, 8), dim=1)
    assert torch.equal(knn.classify(queries, bank, labels, 5, 20, 1e-300), labels[(queries @ bank.T).argmax(1)])
    votes = F.one_hot(labels[(queries @ bank.T).topk(20).indices], 5).sum(1)
    assert torch.equal(knn.classify(queries, bank, labels, 5, 20, 1e300), votes.argmax(1))      # and at the largest all count alike


def test_knn_finds_its_own_images_and_prints_the_best(photos, teacher, tmp_path, capsys):
    other = write_checkpoint(tmp_path / "other.pt", experts=2)
    flags = ["--data", photos, "-k", "1", "--amp", "off", "--workers", "0", "--batch-size", "5"]
    results = knn.main(knn.parse_args([teacher, other, *flags]))
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(Path(teacher).with_name("knn.json").read_text()) == dict(zip([teacher, other], results))
    assert len(results) == 2 and lines[-1] == f"best: {max(results):.2f}%  {[teacher, other][results.index(max(results))]}"
    copied = tmp_path / "copied"
    (copied / "val").parent.mkdir()
    for split in ("train", "val"):
        (copied / split).symlink_to(Path(photos, "train"))
    assert knn.main(knn.parse_args([teacher, *flags, "--data", str(copied)])) == [100.0]


def test_knn_of_two_processes_is_that_of_one(photos, teacher, tmp_path, capsys):
    flags = [teacher, write_checkpoint(tmp_path / "other.pt"), "--data", photos, "-k", "5", "--amp", "off", "--workers", "0",
             "--batch-size", "5"]                               # 32 and 16 images: the last batches are unequal
    knn.main(knn.parse_args(flags))
    assert torchrun(2, "knn.py", *flags) == capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ routing

def test_an_expert_that_prefers_the_left_half_is_warm_there():
    left = torch.zeros(2, 4, 4)
    left[:, :, :2] = 1
    dispatch = torch.stack([left, 1 - left], dim=-1).reshape(2, 16, 2)
    tiles = routing.overlays(torch.full((2, 3, 32, 32), 0.5), dispatch)
    red_over_blue = tiles[:, :, 0] - tiles[:, :, 2]                             # [M, E, 112, 112]
    assert (red_over_blue[:, 0, :, :56] > 0.2).all() and (red_over_blue[:, 0, :, 56:] < -0.2).all()
    assert torch.allclose(red_over_blue[:, 1], red_over_blue[:, 0].flip(-1), atol=1e-5)
    picture = routing.heatmaps(torch.full((2, 3, 32, 32), 0.5), [[("expert 0", tiles[:, 0]), ("expert 1", tiles[:, 1])]])
    assert picture.size == (3 * 116, 28 + 2 * 116)                              # image and two experts; a title; two rows
    def colours(column, x):
        red, _, blue = picture.getpixel((116 * column + x, 28 + 60))
        return red - blue
    assert abs(colours(0, 30)) <= 1 and colours(1, 20) > 50 > -50 > colours(1, 90) and colours(2, 20) < -50 < 50 < colours(2, 90)
    assert min(picture.getpixel((x, y))[0] for x in range(116, 232) for y in range(28)) < 128      # there is a title


def test_heatmaps_show_the_most_and_the_least_used_of_many_experts():
    assert routing.most_and_least(torch.rand(8)) == list(range(8))
    assert routing.most_and_least((torch.arange(64) * 37 % 64).float()) == sorted(
        [i for i in range(64) if i * 37 % 64 < 4 or i * 37 % 64 >= 60])


def test_the_silhouette_is_that_of_the_definition():
    features, labels = randn(23, 3), torch.randint(0, 3, (23,))
    labels[7] = 5                                               # alone in its cluster: counts 0
    def distance(i, cluster):
        others = [j for j in range(23) if labels[j] == cluster and j != i]
        return sum((features[i] - features[j]).norm().item() for j in others) / len(others)
    values = []
    for i in range(23):
        own = labels[i].item()
        if (labels == own).sum() == 1:
            values.append(0.0)
            continue
        a, b = distance(i, own), min(distance(i, c) for c in (0, 1, 2, 5) if c != own)
        values.append((b - a) / max(a, b))
    for chunk in (1024, 5):
        assert routing.silhouette(features, labels, chunk) == pytest.approx(sum(values) / 23, rel=1e-9)
    assert routing.silhouette(features, torch.zeros(23, dtype=torch.long)) == 0
    apart = torch.cat([randn(10, 3), randn(10, 3) + 100])
    assert routing.silhouette(apart, torch.arange(20) // 10) > 0.95 and routing.silhouette(apart, torch.arange(20) % 2) < 0.1
    assert routing.silhouette(torch.zeros(4, 3), torch.tensor([0, 0, 1, 1])) == 0       # identical points


def test_silhouette_and_area_agree_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    features, labels, score = randn(200, 5), torch.randint(0, 4, (200,)), torch.randint(0, 50, (200,)).float()
    assert routing.silhouette(features, labels) == pytest.approx(metrics.silhouette_score(features.numpy(), labels.numpy()), rel=1e-6)
    assert routing.area_under_curve(score, labels > 1) == pytest.approx(metrics.roc_auc_score((labels > 1).numpy(), score.numpy()), rel=1e-9)


def test_pearsons_r_is_that_of_the_definition():
    x, y = [1.0, 2.0, 3.0, 5.0], [2.0, 1.0, 0.5, -1.0]
    mx, my = sum(x) / 4, sum(y) / 4
    expected = sum((a - mx) * (b - my) for a, b in zip(x, y)) / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))
    assert routing.pearson(torch.tensor(x), torch.tensor(y)) == pytest.approx(expected, rel=1e-12)
    assert routing.pearson(torch.tensor(x), -2 * torch.tensor(x)) == pytest.approx(-1) and math.isnan(routing.pearson(torch.ones(4), torch.tensor(y)))


def test_area_under_the_curve_counts_pairs():
    score, positive = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.2]), torch.tensor([False, True, False, True, False])
    pairs = [(p > n) + 0.5 * (p == n) for p in (0.4, 0.8) for n in (0.1, 0.4, 0.2)]
    assert routing.area_under_curve(score, positive) == pytest.approx(sum(pairs) / 6)
    assert routing.area_under_curve(positive.float(), positive) == 1 and routing.area_under_curve(-positive.float(), positive) == 0
    assert math.isnan(routing.area_under_curve(score, torch.ones(5, dtype=torch.bool)))


def test_the_foreground_of_a_patch_is_that_of_the_picture():
    images = data.Shapes("val", 48)
    foreground = routing.patch_foreground(images, [3, 4], 48, 8).view(2, 6, 6)
    for row, index in enumerate((3, 4)):
        view = data.centre_view(images.mask(index)[None].to(torch.uint8) * 255, 48)[0]
        for y in range(6):
            for x in range(6):
                assert foreground[row, y, x] == (view[8 * y:8 * y + 8, 8 * x:8 * x + 8].float().mean() >= 127.5)


@pytest.fixture
def planted(tmp_path):
    """A student whose last router knows one thing: expert 0 looks for tokens that a bright patch makes, expert 1 for dark."""
    encoder = model.ViT(32, 8, dim=96, depth=2, heads=3, experts=2).eval()
    for p in encoder.parameters():
        nn.init.zeros_(p)
    nn.init.ones_(encoder.blocks[1].norm2.weight), nn.init.ones_(encoder.norm.weight)
    encoder.patch_embed.proj.weight.data[0] = 1.0               # channel 0 says how bright; channel 1 sets the scale
    encoder.patch_embed.proj.bias.data[1] = 50.0
    encoder.blocks[1].mlp.phi.data[0] = torch.tensor([1.0, -1.0])
    encoder.blocks[1].mlp.scale.data.fill_(5.0)
    teacher = write_checkpoint(tmp_path / "teacher.pt")
    student = model.Explore(encoder, 96)
    def write(name, **args):
        (tmp_path / name).mkdir()
        common.save(tmp_path / name / "last.pt", model=student.state_dict(), encoder=encoder.config,
                    args={"teacher": teacher, "loss_block": [1], **args})
        return str(tmp_path / name / "last.pt")
    return write


def bright_left(tmp_path, count=4):
    """Photographs whose left half is white, in ADE20K's layout; class 7 marks it."""
    for kind in ("images", "annotations"):
        (tmp_path / kind / "validation").mkdir(parents=True)
    for i in range(count):
        picture = np.zeros((64, 64), dtype=np.uint8)
        picture[:, :32] = 1
        Image.fromarray(picture * 255).convert("RGB").save(tmp_path / "images" / "validation" / f"{i}.jpg", quality=95)
        Image.fromarray(1 + 6 * picture).save(tmp_path / "annotations" / "validation" / f"{i}.png")
    return str(tmp_path)


def test_a_planted_router_gives_the_planted_heatmap_and_numbers(planted, tmp_path, capsys):
    folder = bright_left(tmp_path / "scenes")
    flags = ["--data", folder, "--foreground", "7", "--amp", "off", "--workers", "0", "--tokens", "40"]
    numbers, = routing.main(routing.parse_args([planted("one"), *flags]))
    assert numbers["foreground_auc"] == [1.0, 0.0] and numbers["foreground_patches"] == 32 and numbers["patches"] == 64
    assert numbers["loss_block"] == 1 and [row["block"] for row in numbers["blocks"]] == [1] and numbers["images"] == 4
    assert numbers["blocks"][0]["silhouette"] > 0.9 and numbers["blocks"][0]["scale"] == 5.0 and numbers["silhouette_tokens"] == 40
    picture = Image.open(tmp_path / "one" / "heatmaps.png")
    assert picture.size == (3 * 116, 28 + 4 * 116)
    red = lambda x, y: picture.getpixel((x, y))[0] - picture.getpixel((x, y))[2]
    assert red(116 + 20, 70) > 50 and red(116 + 95, 70) < -50 and red(232 + 20, 70) < -50 and red(232 + 95, 70) > 50
    assert json.loads((tmp_path / "one" / "routing.json").read_text())[0]["correlation_tokens"] == 40
    printed = capsys.readouterr().out
    assert "expert 0 1.000, expert 1 0.000 (32 of 64 patches)" in printed and "r = " in printed


def test_correlation_is_between_expert_0s_weight_and_the_loss_against_the_checkpoints_teacher(planted, tmp_path):
    folder = bright_left(tmp_path / "scenes")
    path = planted("one")
    numbers, = routing.main(routing.parse_args([path, "--data", folder, "--foreground", "7", "--amp", "off", "--workers", "0"]))
    checkpoint, encoder = model.load_checkpoint(path), model.load_encoder(path).eval()
    teacher, images = model.build_teacher(checkpoint["args"]["teacher"], 4), data.Scenes(folder, "validation", [7])
    view = torch.stack([data.centre_view(images[i][0], 32) for i in range(4)]) / 255
    with torch.no_grad():
        tokens, routed = encoder(data.normalize(view))
        predicted = tokens @ checkpoint["model"]["head.weight"].T + checkpoint["model"]["head.bias"]
        loss = losses.token_loss(predicted[:, 1:], teacher(view)[:, 1:])
    expected = np.corrcoef(routed[1].dispatch[:, 1:, 0].flatten().numpy(), loss.flatten().numpy())[0, 1]
    assert numbers["correlation"] == pytest.approx(expected, abs=1e-4) and numbers["correlation_tokens"] == 64


def test_two_checkpoints_stand_side_by_side(planted, tmp_path, capsys):
    folder = bright_left(tmp_path / "scenes")
    flags = ["--data", folder, "--foreground", "7", "--amp", "off", "--workers", "0", "--out", str(tmp_path / "both")]
    both = routing.main(routing.parse_args([planted("coupled"), planted("detached"), *flags]))
    assert [numbers["name"] for numbers in both] == ["coupled", "detached"]
    assert Image.open(tmp_path / "both" / "heatmaps.png").size == (5 * 116, 28 + 4 * 116)
    assert len(json.loads((tmp_path / "both" / "routing.json").read_text())) == 2
    assert "coupled/last.pt: 4 images" in capsys.readouterr().out


def test_without_matplotlib_the_heatmaps_and_numbers_still_come(planted, tmp_path, capsys, monkeypatch):
    folder = bright_left(tmp_path / "scenes")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    routing.main(routing.parse_args([planted("one"), "--data", folder, "--foreground", "7", "--amp", "off", "--workers", "0"]))
    assert "blocks.png and correlation.png need matplotlib: pip install matplotlib" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["heatmaps.png", "last.pt", "routing.json"]


def test_with_matplotlib_the_figures_come_too(planted, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    folder = bright_left(tmp_path / "scenes")
    routing.main(routing.parse_args([planted("one"), planted("two"), "--data", folder, "--foreground", "7", "--amp", "off", "--workers", "0"]))
    for name in ("blocks.png", "correlation.png"):
        assert min(Image.open(tmp_path / "one" / name).size) > 200


def test_a_teacher_that_is_not_there_costs_the_correlation_alone(planted, tmp_path, capsys):
    folder = bright_left(tmp_path / "scenes")
    path = planted("one", teacher="nowhere.pt")
    numbers, = routing.main(routing.parse_args([path, "--data", folder, "--foreground", "7", "--amp", "off", "--workers", "0"]))
    assert "correlation" not in numbers and "foreground_auc" in numbers
    assert "no correlation with the distillation loss: teacher nowhere.pt: neither a checkpoint" in capsys.readouterr().out


def test_a_router_without_preference_is_uniform(tmp_path):
    path = write_checkpoint(tmp_path / "e3.pt", experts=3, image_size=48)
    checkpoint = model.load_checkpoint(path)
    checkpoint["model"]["encoder.blocks.3.mlp.phi"] = torch.zeros(96, 3)
    common.save(Path(path), **checkpoint)
    numbers, = routing.main(routing.parse_args([path, "--data", "shapes", "--images", "20", "--amp", "off", "--workers", "0"]))
    last = numbers["blocks"][-1]
    assert last["entropy"] == pytest.approx([math.log(37)] * 3, rel=1e-5) and last["dispatch_cv"] == pytest.approx([0] * 3, abs=1e-4)
    assert last["cls_share"] == pytest.approx([1 / 37] * 3, rel=1e-4) and numbers["foreground_auc"] == pytest.approx([0.5] * 3, abs=0.03)
    assert last["silhouette"] == 0 and numbers["blocks"][0]["silhouette"] != 0       # all tokens in one expert


def test_the_demo_works_at_toy_size(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data.Shapes, "__len__", lambda self: {0: 128, 1: 64}[self.stream])
    pretrain.main(pretrain.parse_args(["--demo", "--epochs", "2", "--workers", "0", "--experts", "3"]))
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"k-NN random init \d+\.\d% -> pretrained \d+\.\d%", last)
    assert Image.open("runs/demo/heatmaps.png").size == (4 * 116, 28 + 6 * 116)      # image and three experts, six rows
    teacher = model.load_checkpoint("runs/demo-teacher/last.pt")
    assert teacher["step"] == 12 and teacher["encoder"]["experts"] == 0
    pretrain.main(pretrain.parse_args(["--demo", "--epochs", "2", "--workers", "0", "--experts", "3"]))
    assert capsys.readouterr().out.splitlines()[-1] == last                     # started again: nothing is trained twice


# ---------------------------------------------------------------------------------------------------------- bad input

def test_bad_flags_are_refused_by_name(capsys, photos, teacher, tmp_path):
    base = [*TOY, "--data", photos, "--teacher", teacher, "--out", str(tmp_path / "run")]
    for flags, expected in (
            (["--image-size", "33"], "--image-size 33 is not a multiple of --patch-size 8"),
            (["--batch-size", "64"], "--batch-size 64: there are only 32 training images"),
            (["--micro-batch", "3"], "--micro-batch 3 does not divide the 8 images"),
            (["--experts", "0", "--detach"], "--detach needs experts, but --experts is 0"),
            (["--experts", "0", "--loss-block", "3"], "--loss-block needs experts, but --experts is 0"),
            (["--loss-block", "2"], "--loss-block 2 has no experts: the MoE blocks are 1 3"),
            (["--moe-blocks", "4"], "--moe-blocks 4: vit_nano has blocks 0 to 3"),
            (["--entropy-weight", "1", "2", "3"], "--entropy-weight has 3 values: give one, or one for each of the 2 experts"),
            (["--detach", "--loss-weights", "uniform"], "--detach has nothing to detach"),
            (["--experts", "0", "--loss-weights", "combine"], "--loss-weights combine needs experts"),
            (["--experts", "0", "--entropy-experts", "0"], "--entropy-experts needs experts"),
            (["--experts", "0", "--importance-weight", "1"], "--importance-weight needs experts"),
            (["--entropy-experts", "2"], "--entropy-experts 2: there are only experts 0 to 1"),
            (["--experts", "1", "--objective", "token_pixel", "--encoding", "dense"], "--experts 1: with --encoding dense, expert 1"),
            (["--balance", "gradnorm", "--objective", "token"], "--balance gradnorm has nothing to balance"),
            (["--mask-ratio", "0.01"], "--mask-ratio 0.01 masks 0 of 16 patches"),
            (["--warmup-epochs", "300"], "--warmup-epochs 300 leaves nothing of --epochs 300"),
            (["--teacher", "ViT-B-16"], "--teacher ViT-B-16: neither a checkpoint file nor an open_clip MODEL/PRETRAINED"),
            (["--teacher", "ViT-Z-99/openai"], "--teacher ViT-Z-99/openai: open_clip has no model 'ViT-Z-99'"),
            (["--teacher", "ViT-B-16/nothing"], "'nothing' is no file and no weights of ViT-B-16; it has openai"),
            (["--teacher", "RN50/openai"], "RN50 is no vision transformer"),
            (["--teacher", __file__], f"--teacher {__file__}: {__file__} is no checkpoint of ours"),
            (["--data", str(tmp_path / "nowhere")], f"there is no folder {tmp_path / 'nowhere' / 'train'}")):
        assert expected in refusal(capsys, pretrain, *base, *flags), flags
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_cannot_be_downloaded_here_is_named(capsys, photos, tmp_path, monkeypatch):
    import open_clip
    def offline(*args, **kwargs):
        raise OSError("no network")
    monkeypatch.setattr(open_clip.factory, "download_pretrained", offline)
    error = refusal(capsys, pretrain, *TOY, "--data", photos, "--out", str(tmp_path / "run"))
    assert error.startswith("--teacher ViT-B-16/openai: the weights of ViT-B-16 could not be downloaded here")
    assert "give a file as ViT-B-16-quickgelu/FILE" in error        # as ViT-B-16/FILE, OpenAI's weights would silently be wrong
    error = refusal(capsys, pretrain, *TOY, "--data", photos, "--out", str(tmp_path / "run"), "--teacher", "ViT-B-16/laion2b_s34b_b88k")
    assert "give a file as ViT-B-16/FILE" in error


@pytest.mark.parametrize("argv", (["--mask-ratio", "1"], ["--mask-ratio", "nan"], ["--experts", "-1"], ["--lr", "inf"],
                                  ["--epochs", "0"], ["--epochs", "1" + "0" * 400], ["--workers", "257"], ["--save-minutes", "nan"],
                                  ["--objective", "pixels"], ["--model", "vit_huge"], ["--drop-path", "1"]))
def test_values_without_a_meaning_are_refused_by_the_parser(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        pretrain.parse_args(argv)
    assert stop.value.code == 2 and argv[0] in capsys.readouterr().err


def test_data_folders_that_are_empty_or_do_not_fit_are_named(capsys, tmp_path, teacher):
    flags = [*TOY, "--data", str(tmp_path), "--teacher", teacher, "--out", str(tmp_path / "run")]
    (tmp_path / "train" / "ant").mkdir(parents=True)
    (tmp_path / "val" / "wasp").mkdir(parents=True)
    assert f"no image in {tmp_path / 'train'}" in refusal(capsys, pretrain, *flags)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "ant" / "x.png")
    assert "class 'wasp' of val/ is not among those of train/" in refusal(
        capsys, finetune, *TOY, "--data", str(tmp_path), "--out", str(tmp_path / "run"))


def test_an_image_that_cannot_be_read_is_named_by_its_path(capsys, tmp_path, teacher):
    (tmp_path / "train" / "ant").mkdir(parents=True)
    for i in range(8):
        Image.new("RGB", (40, 40)).save(tmp_path / "train" / "ant" / f"{i}.jpg")
    for content in (b"", b"no image at all", (tmp_path / "train" / "ant" / "0.jpg").read_bytes()[:150]):
        (tmp_path / "train" / "ant" / "3.jpg").write_bytes(content)
        for workers in ("0", "1"):
            error = refusal(capsys, pretrain, *TOY, "--data", str(tmp_path), "--teacher", teacher, "--out",
                            str(tmp_path / "run"), "--workers", workers, "--epochs", "1", "--warmup-epochs", "0")
            assert f"cannot read the image {tmp_path / 'train' / 'ant' / '3.jpg'}" in error


def test_a_run_goes_on_with_its_own_flags_alone(capsys, toy):
    train([*toy, "--max-steps", "1"])
    error = refusal(capsys, pretrain, *toy, "--experts", "4", "--mask-ratio", "0.5")
    assert "--experts was 2, is 4; --mask-ratio was 0.4, is 0.5" in error and "another --out" in error


class Trap:
    """Its pickle writes a file when it is loaded."""
    def __init__(self, path):
        self.path = path
    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_foreign_and_missing_checkpoints_are_named(capsys, tmp_path, photos, teacher):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "foreign.pt")
    torch.save({"model": Trap(str(tmp_path / "sprung")), "encoder": {}, "args": {}}, tmp_path / "pickle.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("foreign.pt", "pickle.pt", "empty.pt"):
        assert f"{tmp_path / name} is no checkpoint of ours" in refusal(capsys, knn, str(tmp_path / name), "--data", photos)
    assert not (tmp_path / "sprung").exists()                   # no code of a stranger's file has run
    assert "there is no checkpoint" in refusal(capsys, knn, str(tmp_path / "none.pt"), "--data", photos)
    assert "-k 33: there are only 32 training images" in refusal(capsys, knn, teacher, "--data", photos, "-k", "33")
    assert "has no experts" in refusal(capsys, routing, teacher, "--data", photos)
    experts = write_checkpoint(tmp_path / "e2.pt", experts=2)
    assert "--block 2 has no experts: the MoE blocks are 1 3" in refusal(capsys, routing, experts, "--data", photos, "--block", "2")
    assert "expected ADE20K's layout" in refusal(capsys, routing, experts, "--data", photos, "--foreground", "1")


def test_torchvisions_sets_are_downloaded_or_refused_in_words(capsys, tmp_path, monkeypatch):
    import torchvision.datasets
    class Local:                                                # stands for a downloaded set: PIL images and labels
        classes = ["ant", "bee"]
        def __init__(self, root, train=None, split=None, download=False):
            assert root == "data" and download
            self.train = train if split is None else split == "train"
        def __len__(self):
            return 3 if self.train else 2
        def __getitem__(self, index):
            return Image.new("L", (20, 10), 50 * index), index % 2
    def offline(*args, **kwargs):
        raise OSError("no route to host")
    for name, kind in (("cifar10", "CIFAR10"), ("food101", "Food101")):
        monkeypatch.setattr(torchvision.datasets, kind, Local)
        images, val = (data.open_images(name, split, 32) for split in ("train", "val"))
        image, label = images[1]
        assert (len(images), len(val), label) == (3, 2, 1) and image.shape == (3, 10, 20) and image.unique().tolist() == [50]
        monkeypatch.setattr(torchvision.datasets, kind, offline)
        error = refusal(capsys, pretrain, *TOY, "--data", name, "--out", str(tmp_path / "run"))
        assert error.startswith(f"--data {name}: torchvision could not download it here (no route to host)")


def test_ctrl_c_stops_without_a_traceback_and_the_same_command_goes_on(toy, tmp_path):
    toy[toy.index("--epochs") + 1] = "3000"
    command = [sys.executable, str(HERE / "pretrain.py"), *toy, "--save-every", "1", "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))   # a background job ignores it
    try:
        for _ in range(600):
            if (tmp_path / "run" / "epoch_0002.pt").exists():
                break
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)                   # as a terminal does: to the loader's processes too
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in error
    assert error.endswith("pretrain.py: stopped. The same command goes on from the last checkpoint.\n")
    stopped = model.load_checkpoint(tmp_path / "run" / "last.pt")["step"]
    state, log = train([*toy, "--max-steps", str(stopped + 1)])
    assert state["step"] == stopped + 1 and [line["step"] for line in log] == sorted({line["step"] for line in log})


def test_batches_must_divide_among_processes():
    args = pretrain.parse_args(["--batch-size", "10"])
    with pytest.raises(common.UserError, match="--batch-size 10 is not a multiple of the 4 processes"):
        common.sizes(args, 4, 100)
    args = pretrain.parse_args(["--batch-size", "4096"])
    assert common.sizes(args, 4, 1281167) == (256, 4, 312) and common.sizes(args, 1, 1281167) == (256, 16, 312)


@pytest.mark.parametrize("script", (pretrain, finetune, linprobe, segment, knn, routing))
def test_every_script_has_help(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.parse_args(["--help"])
    assert stop.value.code == 0 and "--data" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- long runs

def at_step(monkeypatch, step, action):
    """Calls `action` in the middle of one step, counted over all runs of the test from 0."""
    steps, set_rate = [], common.set_rate
    def wrapped(*args):
        steps.append(1)
        if len(steps) == step + 1:
            action()
        set_rate(*args)
    monkeypatch.setattr(common, "set_rate", wrapped)


def driver(tmp_path, script, fault):
    """A program that runs `script` with `fault` beside it: for subprocesses and torchrun."""
    path = tmp_path / f"driver_{len(list(tmp_path.glob('driver_*')))}.py"
    path.write_text(f"import os, signal, sys, time\nsys.path.insert(0, {str(HERE)!r})\nimport torch\nimport common\nimport {script} as script\n"
                    f"{fault}\ncommon.run(script.main, script.parse_args())\n")
    return path


def start(*argv, **kwargs):
    return subprocess.Popen([sys.executable, *map(str, argv)], cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True, **kwargs)


@pytest.mark.parametrize("name", ("SIGTERM", "SIGUSR1"))
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(toy, tmp_path, monkeypatch, capsys, name):
    """Twice the signal is once the signal; the same command goes on to the same bits."""
    number = getattr(signal, name)
    toy += ["--drop-path", "0.2"]
    whole, _ = train([*toy, "--out", str(tmp_path / "whole")])
    save = torch.save
    def signals():                                                   # once in the step, once while last.pt is written
        monkeypatch.setattr(torch, "save", lambda *args: (os.kill(os.getpid(), number), save(*args)))
        os.kill(os.getpid(), number)
    at_step(monkeypatch, 2, signals)
    with pytest.raises(SystemExit) as stop:
        train(toy)
    monkeypatch.setattr(torch, "save", save)
    last = tmp_path / "run" / "last.pt"
    assert stop.value.code == 0 and model.load_checkpoint(last)["step"] == 3
    assert capsys.readouterr().out.splitlines()[-1] == f"{name}: saved {last} of step 3. The same command goes on from there."
    equal_states(whole, train(toy)[0])
    assert signal.getsignal(number) == signal.SIG_DFL               # a finished run leaves signals as they were


@pytest.mark.parametrize("stage", ("finetune", "ep", "segment"))
def test_a_signal_ends_every_stage_after_its_step_with_a_checkpoint(photos, scenes, tmp_path, monkeypatch, stage):
    flags = [write_checkpoint(tmp_path / "e2.pt", experts=2), "--batch-size", "8", "--amp", "off", "--workers", "0"]
    if stage == "segment":
        script, flags = segment, [*flags, "--data", scenes, "--crop-size", "32", "--classes", "11", "--width", "8", "--iterations", "4",
                                  "--warmup-iterations", "1"]
    else:
        script = finetune if stage == "finetune" else linprobe
        flags += ["--data", photos, "--epochs", "1", "--warmup-epochs", "0", *(["--probe", "ep"] if stage == "ep" else [])]
    script.main(script.parse_args([*flags, "--out", str(tmp_path / "whole")]))
    at_step(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        script.main(script.parse_args([*flags, "--out", str(tmp_path / "parts")]))
    assert stop.value.code == 0 and model.load_checkpoint(tmp_path / "parts" / "last.pt")["step"] == 2
    script.main(script.parse_args([*flags, "--out", str(tmp_path / "parts")]))
    whole, parts = (model.load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    assert parts["step"] == 4
    equal_states(whole, parts)


def test_a_signal_to_the_whole_process_group_spares_the_loader_until_the_step_is_done(toy, tmp_path):
    toy[toy.index("--epochs") + 1] = "3000"
    process = start(HERE / "pretrain.py", *toy, "--save-every", "1", "--workers", "2")
    try:
        wait_for(tmp_path / "run" / "epoch_0002.pt")
        os.killpg(process.pid, signal.SIGTERM)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in error and out.splitlines()[-1].startswith("SIGTERM: saved ")


def test_a_run_that_ends_early_ends_its_loader_too(photos, teacher, tmp_path, capsys, monkeypatch):
    """At once, whatever ended it: an image that is not there, a signal, a bug."""
    def bug(*args):
        raise ZeroDivisionError
    for i, fault in enumerate((lambda: shutil.rmtree(tmp_path / "photos" / "train"), lambda: os.kill(os.getpid(), signal.SIGTERM), bug)):
        shutil.copytree(photos, tmp_path / "photos", dirs_exist_ok=True)
        with monkeypatch.context() as patch:
            at_step(patch, 1, fault)
            argv = [*TOY, "--data", str(tmp_path / "photos"), "--teacher", teacher, "--epochs", "50", "--warmup-epochs", "0",
                    "--out", str(tmp_path / str(i))]
            begin = time.monotonic()
            with pytest.raises((SystemExit, ZeroDivisionError)):
                common.run(pretrain.main, pretrain.parse_args([*argv, "--workers", "2"]))
            assert not multiprocessing.active_children() and time.monotonic() - begin < 15


def wait_for(path, seconds=60):
    for _ in range(10 * seconds):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} has not appeared")


def test_two_processes_leave_together_when_one_gets_the_signal(toy, tmp_path):
    fault = """
set_rate, steps = common.set_rate, []
def wrapped(*args):
    steps.append(1)
    if len(steps) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    set_rate(*args)
common.set_rate = wrapped"""
    out = torchrun(2, driver(tmp_path, "pretrain", fault), *toy)          # asserts that torchrun exits with 0
    assert out.splitlines()[-1].startswith("SIGTERM: saved ") and "of step 3." in out
    assert model.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 3


def test_torchrun_passes_the_signal_on_and_waits_for_the_checkpoint(toy, tmp_path):
    toy[toy.index("--epochs") + 1] = "3000"
    process = start("-m", *TORCHRUN[1:], "2", str(HERE / "pretrain.py"), *toy, "--save-every", "1")
    try:
        wait_for(tmp_path / "run" / "epoch_0002.pt")
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
    finally:
        kill_tree(process.pid)
    assert process.returncode != 0                                        # torchrun's own code for a signal
    step = model.load_checkpoint(tmp_path / "run" / "last.pt")["step"]
    assert out.splitlines()[-1] == f"SIGTERM: saved {tmp_path / 'run' / 'last.pt'} of step {step}. The same command goes on from there."


def test_torchruns_own_restart_goes_on_to_the_same_bits(toy, tmp_path):
    fault = """
set_rate, steps = common.set_rate, []
def wrapped(*args):
    steps.append(1)
    if len(steps) == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    set_rate(*args)
common.set_rate = wrapped"""
    toy += ["--drop-path", "0.2", "--save-minutes", "1e-9"]
    torchrun(2, "pretrain.py", *toy, "--out", str(tmp_path / "whole"))
    torchrun(2, driver(tmp_path, "pretrain", fault), *toy, options=["--max-restarts", "2"])
    equal_states(*(model.load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "run")))


def kill_tree(pid):
    """SIGKILL for a process and all that it has started, whichever session they are in."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            child, parent = stat.read_text().rpartition(")")[::2]
            parents.setdefault(int(parent.split()[1]), []).append(int(child.split()[0]))
    family = [pid]
    for member in family:
        family += parents.get(member, [])
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("stage, processes", (("pretrain", 1), ("pretrain", 2), ("finetune", 1), ("linprobe", 1), ("segment", 1)))
def test_slow_killed_20_times_a_run_ends_with_the_same_bits(photos, scenes, teacher, tmp_path, capsys, stage, processes):
    """SIGKILL at random moments, while it starts, trains and writes."""
    experts, rng = write_checkpoint(tmp_path / "e2.pt", experts=2), np.random.default_rng(0)
    flags = ["--batch-size", "8", "--amp", "off", "--workers", "1", *dict(
        pretrain=["--model", "vit_nano", "--image-size", "32", "--patch-size", "8", "--data", photos, "--teacher", teacher, "--epochs", "60",
                  "--warmup-epochs", "1", "--drop-path", "0.2", "--balance", "gradnorm", "--save-every", "7"],
        finetune=[experts, "--data", photos, "--epochs", "60", "--warmup-epochs", "1", "--save-every", "7"],
        linprobe=[experts, "--probe", "ep", "--data", photos, "--epochs", "300", "--warmup-epochs", "1", "--save-every", "7"],
        segment=[experts, "--data", scenes, "--crop-size", "32", "--classes", "11", "--width", "8", "--iterations", "240", "--warmup-iterations",
                 "4", "--save-every", "31"])[stage]]
    command = [*(TORCHRUN + [str(processes)] if processes > 1 else []), str(HERE / f"{stage}.py"), *flags, "--out"]
    last, steps, halves = tmp_path / "parts" / "last.pt", [], 0
    for _ in range(20):
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = start(*command, str(tmp_path / "parts"), "--save-minutes", "1e-9")      # a good part of the time it writes
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0, 8))
        else:
            for _ in range(600):                                          # until it trains, and a little longer
                if process.poll() is not None or last.exists() and last.stat().st_mtime_ns > before:
                    break
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 0.4))
        assert process.poll() is None, process.communicate()              # it was still at work
        kill_tree(process.pid)
        process.communicate()
        halves += (tmp_path / "parts" / "last.pt.tmp").exists()
        steps.append(model.load_checkpoint(last)["step"] if last.exists() else 0)
    for folder in ("parts", "whole"):
        done = subprocess.run([sys.executable, *command, str(tmp_path / folder)], cwd=HERE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    whole, parts = (model.load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    with capsys.disabled():
        print(f"\n{stage}, {processes} processes: 20 kills, {halves} of them while a checkpoint was being written; "
              f"last.pt at steps {steps}, then {parts['step']}")
    assert steps == sorted(steps) and 0 < steps[-1] < parts["step"] == (1200 if stage == "linprobe" else 240)
    assert halves > 0 or stage == "linprobe"      # whose checkpoints are small
    equal_states(whole, parts)
    for name in {path.name for folder in ("whole", "parts") for path in (tmp_path / folder).glob("*.pt")} - {"last.pt"}:
        for a, b in zip(*(flatten(model.load_checkpoint(tmp_path / folder / name)["model"]) for folder in ("whole", "parts")), strict=True):
            assert torch.equal(a, b), name                                # what is kept for good, too


def test_a_save_that_torchrun_would_not_wait_for_is_not_begun(toy, tmp_path, monkeypatch, capsys):
    train([*toy, "--max-steps", "1"])
    before = (tmp_path / "run" / "last.pt").read_bytes()
    args = pretrain.parse_args(toy)
    watch = common.Watch(args, common.start(args), 1)
    watch.catch(signal.SIGTERM, None)
    first = watch.caught
    watch.catch(signal.SIGUSR1, None)
    assert watch.caught is first and watch.time_left() == math.inf        # torchrun counts from the first signal; without it nobody does
    watch.close()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    init = common.Watch.__init__
    def remembers(self, *args):
        init(self, *args)
        self.cost = 31.0                                                  # the last save took longer than torchrun's 30 s
    monkeypatch.setattr(common.Watch, "__init__", remembers)
    at_step(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        train(toy)
    said = capsys.readouterr().out.splitlines()[-1]
    assert stop.value.code == 0 and said.startswith("SIGTERM: not saved, for that takes 31 s and torchrun gives 30 s. ")
    assert said.endswith("last.pt is good, of step 1.") and (tmp_path / "run" / "last.pt").read_bytes() == before


def test_long_epochs_are_saved_by_the_clock(toy, tmp_path, monkeypatch):
    saves, save = [], common.save
    monkeypatch.setattr(common, "save", lambda path, **state: (saves.append((path.name, state["step"])), save(path, **state)))
    whole, _ = train([*toy, "--out", str(tmp_path / "whole"), "--save-minutes", "0"])
    assert saves == [("epoch_0000.pt", 0), ("epoch_0002.pt", 8), ("last.pt", 8)]      # what is done for good comes before last.pt
    saves.clear()
    clocked, _ = train([*toy, "--save-minutes", "1e-9"])
    assert [step for name, step in saves if name == "last.pt"] == list(range(1, 9))
    assert [name for name, step in saves if name != "last.pt"] == ["epoch_0000.pt", "epoch_0002.pt"]
    equal_states(whole, clocked)


def test_a_process_killed_while_it_saves_goes_on_to_the_same_bits(toy, tmp_path):
    fault = """
save, saves = torch.save, []
def kills(state, file):
    saves.append(1)
    if len(saves) == 4:
        file.write(b"half a checkpoint"), file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, file)
torch.save = kills"""
    toy += ["--drop-path", "0.2"]
    whole, _ = train([*toy, "--out", str(tmp_path / "whole")])
    process = start(driver(tmp_path, "pretrain", fault), *toy, "--save-minutes", "1e-9")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL and (tmp_path / "run" / "last.pt.tmp").exists()
    assert model.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 2
    (tmp_path / "run" / "epoch_0009.pt.tmp").write_bytes(b"half a checkpoint")
    equal_states(whole, train(toy)[0])
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_full_disk_stops_the_run_with_the_last_checkpoint(toy, tmp_path, capsys):
    before = train([*toy, "--max-steps", "1"])[0]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))       # no file may grow beyond it: a disk with no more space
    try:
        error = refusal(capsys, pretrain, *toy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    last = tmp_path / "run" / "last.pt"
    assert re.search(rf"cannot write {tmp_path}/run/\w+.pt \(File too large\). {last} is still there", error)
    equal_states(before, model.load_checkpoint(last))
    assert not list((tmp_path / "run").glob("*.tmp")) and train(toy)[0]["step"] == 8


def test_the_number_of_processes_may_change_when_a_run_goes_on(toy, photos, tmp_path):
    toy += ["--drop-path", "0"]
    whole, _ = train([*toy, "--out", str(tmp_path / "whole")])
    train([*toy, "--max-steps", "3"])
    torchrun(2, "pretrain.py", *toy, "--max-steps", "6", "--workers", "1")
    parts, _ = train(toy)
    assert parts["step"] == 8
    for name, value in whole["model"].items():
        assert torch.allclose(value, parts["model"][name], atol=1e-4), name


@pytest.mark.parametrize("stage", ("finetune", "linprobe", "segment"))
def test_every_other_stage_goes_on_with_another_number_of_processes_too(photos, scenes, tmp_path, stage):
    flags = [write_checkpoint(tmp_path / "e2.pt", experts=2), "--batch-size", "8", "--amp", "off", "--workers", "0", "--lr", "1e-3", "--out",
             str(tmp_path / "run"), *(["--data", scenes, "--crop-size", "32", "--classes", "11", "--width", "8", "--iterations", "8",
                                       "--warmup-iterations", "1", "--save-every", "4"] if stage == "segment" else
                                      ["--data", photos, "--epochs", "2", "--warmup-epochs", "0", "--save-every", "1"])]
    script, run = {"finetune": finetune, "linprobe": linprobe, "segment": segment}[stage], tmp_path / "run"
    script.main(script.parse_args([*flags, "--max-steps", "3"]))
    torchrun(2, f"{stage}.py", *flags)
    state, log = model.load_checkpoint(run / "last.pt"), [json.loads(line) for line in open(run / "log.jsonl")]
    assert state["step"] == 8 and state["skipped"] == 0 and common.all_finite(state)
    assert [line["step"] for line in log if "loss" in line] == [3, 4, 8]
    assert sum("val_top1" in line or "miou" in line for line in log) == 3


@pytest.mark.parametrize("amp", ("off", "bf16"))
def test_numbers_that_stay_wrong_stop_the_run_and_never_reach_a_checkpoint(toy, tmp_path, monkeypatch, capsys, amp):
    toy[toy.index("--epochs") + 1], toy[toy.index("--amp") + 1] = "20", amp
    toy += ["--save-minutes", "1e-9"]
    good = train([*toy, "--max-steps", "15"])[0]
    token_loss = pretrain.token_loss
    monkeypatch.setattr(pretrain, "token_loss", lambda *args: token_loss(*args) * math.nan)
    error = refusal(capsys, pretrain, *toy)
    last = tmp_path / "run" / "last.pt"
    assert re.match(rf"step 35: 20 updates in a row had no finite gradient. {last} is good, of step 34. To try: ", error)
    for advice in (f"--out {tmp_path / 'run'} and --amp bf16 or off", "--lr", "--clip-grad"):
        assert advice in error
    stopped = model.load_checkpoint(last)
    assert stopped["step"] == 34 and stopped["skipped"] == 19
    for name, value in good["model"].items():
        assert torch.equal(value, stopped["model"][name]), name                 # 19 updates, and nothing has moved
    monkeypatch.undo()
    other = {"off": "bf16", "bf16": "off"}[amp]
    assert train([*toy, "--max-steps", "36", "--amp", other])[0]["step"] == 36
    assert f"{tmp_path / 'run'}: --amp was {amp}, is {other} from step 34 on" in capsys.readouterr().out


def test_fewer_wrong_numbers_are_left_out_and_counted(toy, monkeypatch):
    toy[toy.index("--epochs") + 1] = "20"
    token_loss, calls = pretrain.token_loss, []
    def sometimes(*args):
        calls.append(1)
        return token_loss(*args) * (math.nan if 5 < len(calls) <= 24 or len(calls) > 40 and len(calls) % 2 else 1.0)
    monkeypatch.setattr(pretrain, "token_loss", sometimes)
    state, log = train(toy)
    assert state["step"] == 80 and state["skipped"] == 19 + 20 and [line["skipped_in_a_row"] for line in log] == [15, 19, 19, 19]
    assert all(value.isfinite().all() for value in flatten(state["model"]))


def test_a_weight_that_is_not_finite_is_never_saved(toy, tmp_path, capsys):
    train([*toy, "--max-steps", "2"])
    before = (tmp_path / "run" / "last.pt").read_bytes()
    def poison(state):
        state["model"]["head.bias"][0] = math.inf
    poisoned = model.load_checkpoint(tmp_path / "run" / "last.pt")
    args = pretrain.parse_args(toy)
    watch = common.Watch(args, common.start(args), 2)
    poison(poisoned)
    with pytest.raises(common.UserError, match=r"step 3: a weight.* is not finite. .*last.pt is good. "):
        watch.save(3, model=poisoned["model"], optimizer=poisoned["optimizer"])
    watch.close()
    assert (tmp_path / "run" / "last.pt").read_bytes() == before
    for kept in ("epoch_0003.pt", "best.pt"):                             # nor anywhere else
        with pytest.raises(common.UserError, match="is not finite"):
            common.save(tmp_path / "run" / kept, model=poisoned["model"], step=12)
        assert not (tmp_path / "run" / kept).exists()
    assert "is not finite" in refusal(capsys, pretrain, *toy[:-1], str(tmp_path / "explodes"), "--lr", "1e39", "--warmup-epochs", "0")


def test_a_skipped_update_leaves_no_trace_in_batch_norm():
    norm = nn.BatchNorm1d(3)
    optimizer, scaler = common.adamw(norm, 0.1, 0.0, (0.9, 0.95)), torch.amp.GradScaler("cpu", enabled=False)
    for images, skips in ((torch.randn(4, 3), False), (torch.full((4, 3), math.nan), True), (torch.full((4, 3), math.inf), True)):
        before = [buffer.clone() for buffer in norm.buffers()]
        statistics = [(buffer, buffer.clone()) for buffer in norm.buffers()]
        norm(images).sum().backward()
        common.update(optimizer, scaler, 0.0, statistics)
        same = [torch.equal(a, b) for a, b in zip(before, norm.buffers())]
        assert all(same) if skips else not any(same)


@pytest.mark.parametrize("stage", ("ep", "segment"))
def test_statistics_of_a_skipped_step_are_not_kept(photos, scenes, tmp_path, monkeypatch, stage):
    flags = [write_checkpoint(tmp_path / "e2.pt", experts=2), "--batch-size", "8", "--amp", "off", "--workers", "0", "--out", str(tmp_path / "run")]
    normalize, calls = data.normalize, []
    def spoiled(images):
        calls.append(1)
        return normalize(images) * (math.nan if len(calls) == 2 else 1.0)
    monkeypatch.setattr(data, "normalize", spoiled)
    if stage == "ep":
        linprobe.main(linprobe.parse_args([*flags, "--probe", "ep", "--data", photos, "--epochs", "1", "--warmup-epochs", "0"]))
    else:
        segment.main(segment.parse_args([*flags, "--data", scenes, "--crop-size", "32", "--classes", "11", "--width", "8", "--iterations",
                                         "4", "--warmup-iterations", "1"]))
    state = model.load_checkpoint(tmp_path / "run" / "last.pt")
    assert state["skipped"] == 1 and common.all_finite(state["model"])


def test_a_router_that_collapses_is_warned_of_once(toy, monkeypatch, capsys):
    toy[toy.index("--epochs") + 1] = "20"
    objectives_, steps = pretrain.objectives, []
    def collapses(*args):
        steps.append(1)
        losses, regularizers, metrics = objectives_(*args)
        return losses, regularizers, metrics | {"token_ratio": torch.tensor(0.15 if len(steps) > 20 else 0.25)}
    monkeypatch.setattr(pretrain, "objectives", collapses)
    train(toy)
    warnings_ = [line for line in re.split("[\n\r]", capsys.readouterr().err) if "collapses" in line]
    assert len(warnings_) == 1 and warnings_[0].startswith("step 40: the router collapses: token_ratio") and "0.150" in warnings_[0]


def test_too_little_memory_and_killed_loader_processes_are_said_in_a_line(toy, scenes, tmp_path, capsys):
    argv = [write_checkpoint(tmp_path / "e2.pt", experts=2), "--data", scenes, "--batch-size", "8", "--amp", "off", "--crop-size", "32"]
    assert outcome(segment, [*argv, "--classes", "11", "--width", "999999999", "--out", str(tmp_path / "wide")]) == 1
    error = capsys.readouterr().err
    assert "error: out of memory: a smaller --micro-batch" in error and "Traceback" not in error
    fault = """
import multiprocessing
set_rate, steps = common.set_rate, []
def wrapped(*args):
    steps.append(1)
    if len(steps) == 2:
        [os.kill(child.pid, signal.SIGKILL) for child in multiprocessing.active_children()]
    set_rate(*args)
common.set_rate = wrapped"""
    toy[toy.index("--epochs") + 1] = "2000"
    process = start(driver(tmp_path, "pretrain", fault), *toy, "--workers", "1")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "Traceback" not in error
    assert "error: a loader process was killed, perhaps for lack of memory: fewer --workers may help" in error
    with pytest.raises(AttributeError):                                         # a bug keeps its traceback
        common.run(lambda args: args.missing, None)


def test_where_nothing_can_be_compiled_one_line_says_how_to_go_without(toy, tmp_path):
    """As where there is no C++ compiler."""
    result = subprocess.run([sys.executable, "pretrain.py", *toy, "--max-steps", "1", "--compile"], cwd=HERE, capture_output=True, text=True,
                            env=os.environ | {"CXX": "no-such-compiler", "CUDA_VISIBLE_DEVICES": "",
                                              "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "error: torch.compile does not work here: --no-compile goes without it" in result.stderr


def test_a_second_run_in_the_same_folder_says_so_and_leaves(toy, tmp_path, capsys):
    holder = subprocess.Popen([sys.executable, "-c", "import sys, common; from pathlib import Path; folder = Path(sys.argv[1]); "
                               "common.make_folder(folder); common.lock(folder); print('locked', flush=True); sys.stdin.read()",
                               str(tmp_path / "run")], cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    error = refusal(capsys, pretrain, *toy)
    assert error.startswith(f"another run works in {tmp_path / 'run'} (process {holder.pid} on ")
    holder.kill(), holder.wait()
    assert train([*toy, "--max-steps", "1"])[0]["step"] == 1                    # however the first one ended


def test_a_run_that_goes_on_does_not_read_its_checkpoint_any_more(toy, tmp_path):
    """A checkpoint is mapped into memory: were its pages still in use, whoever overwrites the file would change the run."""
    state, _ = train([*toy, "--max-steps", "2"])
    student = model.Explore(model.ViT(**state["encoder"]), 96)
    optimizer = common.adamw(student, 1e-3, 0.05, (0.9, 0.95))
    common.resume(state, student, optimizer, torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu"))
    pages = {x.data_ptr() for x in flatten([state["model"], state["optimizer"]]) if isinstance(x, torch.Tensor)}
    used = {x.data_ptr() for x in flatten([student.state_dict(), optimizer.state_dict()]) if isinstance(x, torch.Tensor)}
    assert len(used) > 100 and not pages & used


def test_resuming_on_a_gpu_makes_no_copy_of_the_optimizers_state_in_host_memory(toy, monkeypatch):
    """There, putting it on the device is the copy."""
    state, _ = train([*toy, "--max-steps", "2"])
    student = model.Explore(model.ViT(**state["encoder"]), 96)
    copies = []
    monkeypatch.setattr(common.copy, "deepcopy", lambda value: copies.append(1) or value)
    for device, expected in (("cpu", 1), ("meta", 0)):                     # meta: a device that is not the CPU
        copies.clear()
        common.resume(state, student, common.adamw(student, 1e-3, 0.05, (0.9, 0.95)), torch.amp.GradScaler("cpu", enabled=False),
                      torch.device(device))
        assert len(copies) == expected


def test_a_log_with_broken_lines_is_gone_on_from(toy, tmp_path):
    train([*toy, "--max-steps", "4", "--save-minutes", "1e-9"])
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text() + "\0\0\0}\n" + '{"step": 3, "lo')
    _, lines = train(toy)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 8]


def test_a_last_checkpoint_that_cannot_be_gone_on_from_is_named(toy, tmp_path, capsys):
    state, _ = train([*toy, "--max-steps", "2"])
    last = tmp_path / "run" / "last.pt"
    common.save(last, **{name: value for name, value in state.items() if name not in ("skipped", "optimizer")})
    assert "last.pt cannot be gone on from: it lacks optimizer, skipped" in refusal(capsys, pretrain, *toy)
    common.save(last, **state | {"model": state["model"] | {"head.weight": torch.zeros(1)}})
    assert "last.pt does not fit the model of these flags" in refusal(capsys, pretrain, *toy)
    last.write_bytes(last.read_bytes()[:1000])
    assert "is no checkpoint of ours" in refusal(capsys, pretrain, *toy)


def odd_images(folder):
    """File name -> the picture that it holds [H, W, 3], for everything that loads but JPEG's own rounding; writes the files."""
    y, x = np.mgrid[0:64, 0:80]
    picture = np.stack([y * 3, x * 3, x + y], -1).astype(np.uint8)
    image = Image.fromarray(picture)
    grey = np.asarray(image.convert("L"))
    turned, movie = Image.Exif(), dict(save_all=True, append_images=[image.transpose(0), image.transpose(1)])
    turned[0x0112] = 6                                                     # stored lying on its side
    wanted = {}
    for name, stored, shown, how in (
            ("png_named.JPEG", image, picture, dict(format="PNG")), ("cmyk.jpg", image.convert("CMYK"), picture, dict(quality=95)),
            ("grey.jpg", image.convert("L"), grey, dict(quality=95)), ("progressive.jpg", image, picture, dict(quality=95, progressive=True)),
            ("turned.jpg", image.transpose(2), picture, dict(quality=95, exif=turned.tobytes())),
            ("turned.png", image.transpose(2), picture, dict(exif=turned.tobytes())),
            ("turned.webp", image.transpose(2), picture, dict(exif=turned.tobytes(), lossless=True)),
            ("16bit.png", Image.fromarray(grey.astype(np.uint16) * 257), grey, {}),
            ("16bit.tif", Image.fromarray(grey.astype(np.uint16) * 257), grey, {}),
            ("bilevel.png", image.convert("1"), np.asarray(image.convert("1")) * np.uint8(255), {}),
            ("alpha.png", image.convert("RGBA"), picture, {}),
            ("movie.png", image, picture, movie), ("movie.webp", image, picture, movie | dict(lossless=True)),
            ("movie.gif", image.convert("P"), np.asarray(image.convert("P").convert("RGB")), movie),
            ("one.jpg", Image.new("RGB", (1, 1), "red"), np.array([[[254, 0, 0]]]), {}),
            ("long.jpg", Image.new("RGB", (20000, 10), "red"), np.full((10, 20000, 3), (254, 0, 0)), {}),
            (os.fsdecode(b"caf\xe9.png"), image, picture, {})):
        stored.save(os.path.join(folder, name), **how)
        wanted[name] = np.broadcast_to(shown[..., None] if shown.ndim == 2 else shown, (*shown.shape[:2], 3))
    return wanted


def test_odd_images_load_right(tmp_path):
    """A PNG named .JPEG, CMYK, grey, 16 bits, animations, 1 x 1, 20000 x 10, turned by EXIF, a name that is not UTF-8."""
    folder = tmp_path / "train" / "ant"
    folder.mkdir(parents=True)
    wanted = odd_images(folder)
    (folder / "directory.jpg").mkdir()                                     # is no image
    images = data.Folder(str(tmp_path), "train")
    assert len(images) == len(wanted)
    for i, path in enumerate(images.paths):
        name = os.path.basename(os.fsdecode(path))
        image = images[i][0].permute(1, 2, 0).numpy()
        assert image.dtype == np.uint8 and image.shape == wanted[name].shape, name
        assert np.abs(image.astype(int) - wanted[name]).mean() < (2 if name.endswith("jpg") else 0.5), name
    views, order = data.TrainViews(images, 32, 0, grid=4, mask_ratio=0.4), data.TrainOrder(len(wanted), len(wanted), len(wanted), 0, 0, 2)
    assert [batch["image"].shape for batch in data.load(views, order, 1, torch.device("cpu"))] == 2 * [(len(wanted), 3, 32, 32)]
    order = data.EvalOrder(len(images), 4)
    assert sum(len(batch["image"]) for batch in data.load(data.CentreViews(images, 32), order, 1, torch.device("cpu"))) == len(wanted)


def test_of_a_very_long_image_only_the_middle_is_resized(monkeypatch):
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 10, 20000), dtype=np.uint8))
    assert torch.equal(data.centre_view(image, 224), data.centre_view(image[:, :, 9980:10020], 224))
    assert torch.equal(data.centre_view(image.mT, 224), data.centre_view(image[:, :, 9980:10020].mT, 224))
    resize, sizes = data.TF.resize, []
    monkeypatch.setattr(data.TF, "resize", lambda image, *args, **kwargs: (sizes.append(image.shape), resize(image, *args, **kwargs))[1])
    data.centre_view(image, 224)
    assert sizes == [(3, 10, 40)]


@pytest.mark.parametrize("fault", ("empty", "cut", "cut_early", "text", "float.tif", "bomb", "gone", "no_permission_to_be_a_file"))
def test_images_that_do_not_load_stop_the_run_with_their_path(tmp_path, capsys, teacher, monkeypatch, fault):
    folder = tmp_path / "train" / "ant"
    folder.mkdir(parents=True)
    for i in range(8):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
    path = folder / "3.jpg"
    whole = path.read_bytes()
    at = whole.index(b"\xff\xc0")                                          # the frame header: height and width follow
    flags = [*TOY, "--data", str(tmp_path), "--teacher", teacher, "--out", str(tmp_path / "run"), "--epochs", "2", "--warmup-epochs", "0"]
    if fault == "gone":
        at_step(monkeypatch, 0, path.unlink)                               # while the epoch is under way
    elif fault == "float.tif":
        path.unlink()
        path = folder / "3.tif"
        Image.fromarray(np.zeros((8, 8), np.float32)).save(path)
    elif fault == "no_permission_to_be_a_file":
        at_step(monkeypatch, 0, lambda: (path.unlink(), path.mkdir()))
    else:
        path.write_bytes({"empty": b"", "cut": whole[:-40], "cut_early": whole[:150], "text": b"no image at all",
                          "bomb": whole[:at + 5] + b"\xf0\xf0\xf0\xf0" + whole[at + 9:]}[fault])
    assert f"cannot read the image {path} (" in refusal(capsys, pretrain, *flags)


def test_bad_annotations_are_named(scenes, tmp_path, capsys):
    shutil.copytree(scenes, tmp_path / "scenes")
    path = tmp_path / "scenes" / "annotations" / "training" / "3.png"
    whole, shape = path.read_bytes(), np.asarray(Image.open(path)).shape
    flags = [write_checkpoint(tmp_path / "e0.pt"), "--data", str(tmp_path / "scenes"), "--batch-size", "8", "--amp", "off", "--workers", "0",
             "--crop-size", "32", "--width", "8", "--iterations", "4", "--warmup-iterations", "1", "--classes", "11", "--out", str(tmp_path / "run")]
    def write(array, mode=None):
        Image.fromarray(array, mode).save(path)
    for fault, expected in (
            (lambda: path.write_bytes(b""), f"cannot read the annotation {path} ("),
            (lambda: path.write_bytes(whole[:-30]), f"cannot read the annotation {path} ("),
            (lambda: path.unlink(), f"cannot read the annotation {path} ("),
            (lambda: write(np.zeros((*shape, 3), np.uint8)), f"the annotation {path} has mode RGB"),
            (lambda: write(np.zeros(shape, np.uint16)), f"the annotation {path} has mode I;16"),
            (lambda: write(np.zeros((7, 9), np.uint8)), f"the annotation {path} is (7, 9), its image ({shape[0]}, {shape[1]})"),
            (lambda: write(np.full(shape, 12, np.uint8)), f"the annotation {path} has class 12, but --classes is 11")):
        fault()
        assert expected in refusal(capsys, segment, *flags)
    write(np.zeros((4, 80), np.uint8))
    Image.new("RGB", (80, 4)).save(tmp_path / "scenes" / "images" / "training" / "3.jpg")
    assert f"the image of {path} is 80 x 4: more than 16 times as long as wide" in refusal(capsys, segment, *flags)


def mutated(originals, count, seed=0):
    """`count` files made of `originals` by flipped, lost, added and zeroed bytes, all over them and near their beginning."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        file, kind = bytearray(originals[i % len(originals)]), i // len(originals) % 6
        at, length = int(rng.integers(len(file))), int(rng.integers(1, 200))
        if kind == 0:
            for at in rng.integers(len(file), size=rng.integers(1, 20)):
                file[at] = rng.integers(256)
        elif kind == 1:
            del file[at:]
        elif kind == 2:
            del file[at:at + length]
        elif kind == 3:
            file[at:at] = rng.bytes(length)
        elif kind == 4:
            file[at:at + length] = b"\0" * min(length, 8)
        else:
            file[int(rng.integers(min(600, len(file))))] = rng.integers(256)
        yield bytes(file)


@pytest.mark.slow
def test_slow_mutated_jpegs_load_as_other_programs_load_them_or_are_named(tmp_path, capsys):
    """2,000 of them: no crash, no hang, no memory that nobody wrote (twice the same), no picture that Pillow does not see."""
    originals = []
    for i in range(8):
        picture = Image.fromarray(data.Shapes("train", 96 if i % 2 else 40)[i][0].permute(1, 2, 0).numpy())
        picture = picture.convert(("RGB", "RGB", "L", "CMYK")[i % 4])
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = 6
        picture.save(file, "JPEG", quality=90, progressive=i % 3 == 0, subsampling=2 * (i % 2) if picture.mode == "RGB" else -1,
                     exif=exif.tobytes() if i % 2 else b"")
        originals.append(file.getvalue())
    counts, longest = dict(refused=0, same=0, other=0), 0.0
    path = tmp_path / "x.jpg"
    for content in mutated(originals, 2000):
        path.write_bytes(content)
        start = time.perf_counter()
        try:
            image = data.read_image(str(path))
        except common.UserError as error:
            assert str(error).startswith(f"cannot read the image {path} (")
            counts["refused"] += 1
            continue
        finally:
            longest = max(longest, time.perf_counter() - start)
        assert image.dtype == torch.uint8 and image.ndim == 3 and len(image) == 3 and torch.equal(image, data.read_image(str(path)))
        seen = data.decode_with_pillow(Image.open(path))
        counts["same" if seen.shape == image.shape and (seen.int() - image.int()).abs().float().mean() < 1 else "other"] += 1
    with capsys.disabled():
        print(f"\n{counts}, {longest:.2f} s at most")
    # damaged marks of the colour space or of the orientation leave it to each decoder what they mean
    assert counts["other"] <= 20 and counts["refused"] > 500 and counts["same"] > 500 and longest < 5


def strange_checkpoints(folder):
    """Files that are no checkpoint to load -> what the message says of each."""
    encoder = model.build_vit("vit_nano", image_size=32, patch_size=8, experts=2)
    state, config = encoder.state_dict(), encoder.config
    ours = {"model": {f"encoder.{name}": value for name, value in state.items()}, "encoder": config, "args": {}}
    without = {name: value for name, value in ours["model"].items() if "phi" not in name}
    whole = io.BytesIO()
    torch.save(ours, whole)
    whole = whole.getvalue()
    files = {"empty": b"", "cut": whole[:len(whole) // 2], "cut_by_one": whole[:-1], "text": b"no checkpoint", "html": b"<!DOCTYPE html>"}
    says = {"empty": "it is empty", "cut": "it is cut off or damaged", "cut_by_one": "it is cut off or damaged", "text": "is no checkpoint of ours",
            "html": "PyTorch has not written it, or it is damaged"}
    for name, content, expected in (
            ("list", [1, 2], "it is no dict of tensors"), ("resnet", {"conv1.weight": torch.zeros(1)}, "it lacks patch_embed.proj.weight"),
            ("clip", {"visual.conv1.weight": torch.zeros(1)}, "it is a CLIP model, which is for --teacher"),
            ("no_model", ours | {"model": 3}, "its 'model' is no dict"),
            ("no_tensors", ours | {"model": {"encoder.norm.weight": "a"}}, "more than named tensors"),
            ("no_names", ours | {"model": {3: torch.zeros(1)}}, "more than named tensors"),
            ("no_config", ours | {"encoder": [1]}, "its 'encoder' is no dict"),
            ("older", ours | {"encoder": {name: value for name, value in config.items() if name != "heads"}},
             "this version reads depth, dim, experts, heads"),
            ("newer", ours | {"encoder": config | {"registers": 4}}, "registers, but this version reads"),
            ("no_phi", ours | {"model": without}, "blocks.1.mlp.phi is missing or has another shape"),
            ("wide", ours | {"encoder": config | {"experts": 10 ** 9}}, "blocks.1.mlp.phi is missing or has another shape"),
            ("deep", ours | {"encoder": config | {"depth": 10 ** 9}}, "too few for depth 1000000000"),
            ("heads", ours | {"encoder": config | {"heads": 5}}, "its encoder is impossible"),
            ("negative", ours | {"encoder": config | {"patch_size": -8}}, "its encoder is impossible"),
            ("text_size", ours | {"encoder": config | {"dim": "96"}}, "its encoder is impossible"),
            ("blocks", state | {"blocks.999999999.norm1.weight": torch.zeros(1)}, "blocks.4.norm1.weight is missing"),
            ("rel_pos", state | {"blocks.0.attn.relative_position_bias_table": torch.zeros(1)},
             "blocks.0.attn.relative_position_bias_table has no place in it"),
            ("flat", {name: torch.zeros(2) for name in ("patch_embed.proj.weight", "pos_embed", "cls_token", "norm.weight")},
             "no ViT with timm's names")):
        file = io.BytesIO()
        torch.save(content, file)
        files[name], says[name] = file.getvalue(), expected
    for name, content in files.items():
        (folder / f"{name}.pt").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), folder / "script.pt")
    (folder / "directory.pt").mkdir()
    return says | {"script": "it is a TorchScript archive", "directory": "PyTorch cannot read it (IsADirectoryError"}


def test_strangers_files_are_refused_with_what_is_wrong_and_what_would_fit(tmp_path, capsys, photos):
    for name, expected in strange_checkpoints(tmp_path).items():
        path = str(tmp_path / f"{name}.pt")
        error = refusal(capsys, knn, path, "--data", photos)
        assert error.startswith(path) and expected in error, (name, error)
        if "whole encoder" not in error:
            assert "What fits: a checkpoint of ours, the authors' release, or a ViT's weights with timm's names" in error, name
    for script, more in ((finetune, []), (linprobe, []), (segment, []), (routing, [])):      # every stage asks the same question
        assert "it is cut off or damaged" in refusal(capsys, script, str(tmp_path / "cut.pt"), "--data", photos, *more)
    assert "it is cut off or damaged" in refusal(capsys, pretrain, *TOY, "--data", photos, "--teacher", str(tmp_path / "cut.pt"))


def test_pytorchs_older_file_format_loads(tmp_path):
    encoder = model.build_vit("vit_nano", image_size=32, patch_size=8)
    torch.save(encoder.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    loaded = model.load_checkpoint(tmp_path / "old.pt")["model"]
    assert all(torch.equal(loaded[f"encoder.{name}"], value) for name, value in encoder.state_dict().items())


@pytest.mark.slow
def test_slow_mutated_checkpoints_load_or_are_named(tmp_path, capsys):
    """2,000 of them, in both of PyTorch's formats: a whole encoder or a ValueError with the path, no crash, no hang."""
    encoder = model.build_vit("vit_nano", image_size=8, patch_size=4, dim=6, heads=1, experts=2)
    originals = []
    for new in (True, False):
        file = io.BytesIO()
        torch.save({"model": {f"encoder.{k}": v for k, v in encoder.state_dict().items()}, "encoder": encoder.config, "args": {"lr": 1.0}}, file,
                   _use_new_zipfile_serialization=new)
        originals.append(file.getvalue())
    counts, longest = dict(loads=0, refused=0), 0.0
    for i, content in enumerate(mutated(originals, 2000)):
        path, start = tmp_path / f"{i}.pt", time.perf_counter()
        path.write_bytes(content)
        try:
            model.load_encoder(path)
            counts["loads"] += 1
        except ValueError as error:
            assert str(path) in str(error)
            counts["refused"] += 1
        longest = max(longest, time.perf_counter() - start)
        path.unlink()
    with capsys.disabled():
        print(f"\n{counts}, {longest:.2f} s at most")
    assert counts["refused"] > 500 and counts["loads"] > 50 and longest < 20


ODD_NUMBERS = ("0", "-1", "0.5", "-0.5", "1", "1e-300", "1e300", "999999937", "8000000000", "1" + "0" * 30,"1" + "0" * 400,
               "nan", "inf", "-inf", "", "x")


def numeric_flags(script, *argv):
    """The flags that take numbers -> how many each takes, from the script's own parser."""
    parsers = []
    parse_args = argparse.ArgumentParser.parse_args
    def spy(parser, *args, **kwargs):
        parsers.append(parser)
        return parse_args(parser, *args, **kwargs)
    argparse.ArgumentParser.parse_args = spy
    try:
        script.parse_args(list(argv))
    finally:
        argparse.ArgumentParser.parse_args = parse_args
    return {action.option_strings[0]: action.nargs if isinstance(action.nargs, int) else 1
            for action in parsers[0]._actions if action.type is not None and action.option_strings}


def outcome(script, argv, seconds=120):
    """Runs a script's main as its `__main__` does -> "works", or the exit code; fails on any other exception and on a hang."""
    def too_long(number, frame):
        raise AssertionError(f"{argv} hangs")
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        common.run(script.main, script.parse_args(argv))
    except SystemExit as stop:
        return stop.code
    finally:
        signal.alarm(0)
    return "works"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ("pretrain", "bench", "finetune", "linprobe", "segment", "knn", "routing"))
def test_slow_every_numeric_flag_at_odd_numbers(stage, photos, scenes, teacher, tmp_path, capsys):
    """Zero, negative, tiny, huge, not a number: an error of one line or sensible work, never a traceback or a hang."""
    experts = write_checkpoint(tmp_path / "e2.pt", experts=2)
    common_flags = ["--batch-size", "8", "--amp", "off", "--workers", "0"]
    one_step = ["--epochs", "1", "--warmup-epochs", "0", "--max-steps", "1"]
    script, argv = {
        "pretrain": (pretrain, [*TOY, *one_step, "--data", photos, "--teacher", teacher, "--objective", "token_cls_pixel"]),
        "bench": (pretrain, [*TOY, "--teacher", teacher, "--bench", "1", "--balance", "gradnorm"]),
        "finetune": (finetune, [experts, *common_flags, *one_step, "--data", photos]),
        "linprobe": (linprobe, [experts, *common_flags, *one_step, "--data", photos]),
        "segment": (segment, [experts, *common_flags, "--data", scenes, "--crop-size", "32", "--classes", "11", "--width", "8",
                              "--iterations", "4", "--warmup-iterations", "1", "--max-steps", "1"]),
        "knn": (knn, [experts, *common_flags, "--data", photos]),
        "routing": (routing, [experts, *common_flags, "--data", photos])}[stage]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2 ** 34, limits[1]))             # what does not fit into 16 GiB is out of memory
    counts = {}
    try:
        for flag, values in numeric_flags(script, *argv).items():
            for number in ODD_NUMBERS:
                if len(number) > 8 and (flag == "--bench" or stage == "bench" and flag == "--batch-size"):      # as many as were asked for
                    continue
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
                result = outcome(script, [*argv, "--out", str(tmp_path / "run"), flag, *[number] * values])
                error = capsys.readouterr().err
                assert result in ("works", 1, 2) and "Traceback" not in error, (flag, number, error)
                assert result == "works" or "error: " in error, (flag, number, error)
                counts[result] = counts.get(result, 0) + 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    with capsys.disabled():
        print(f"\n{stage}: {counts}")
    assert counts["works"] > 10 and counts[2] > 50


# -------------------------------------------------------------------------------------------------------------- speed

def plain_route(self, x):
    """Eq. 4 as it is written: normalized tokens times normalized columns."""
    with model.no_autocast(x.device.type):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        logits = self.scale * (F.normalize(x, dim=-1) @ F.normalize(self.phi, dim=0))
        return model.Routing(logits.softmax(1), logits.softmax(2))


def plain_block(self, x):
    """LayerScale and drop path one after the other."""
    def residual(branch, gamma):
        branch = branch * gamma
        return branch * F.dropout(branch.new_ones(len(branch), 1, 1), self.drop_path, self.training)
    x = x + residual(self.attn(self.norm1(x)), self.ls1.gamma)
    y = self.mlp(self.norm2(x))
    y, routing = y if isinstance(self.mlp, model.SoftMoE) else (y, None)
    return x + residual(y, self.ls2.gamma), routing


def make_plain(setattr=setattr):
    """The step as one would write it first: the yardstick of the fast one."""
    setattr(common, "keep_freed_memory", lambda: None)
    setattr(model, "attention", F.scaled_dot_product_attention)
    setattr(model, "ClipAttention", lambda theirs: theirs)
    setattr(model.SoftMoE, "route", plain_route)
    setattr(model.Block, "forward", plain_block)


@pytest.mark.parametrize("experts", (0, 2, 5))
def test_the_fast_encoder_has_the_plain_ones_values_and_gradients(monkeypatch, experts):
    def values_and_gradients():
        torch.manual_seed(3)
        vit = model.build_vit("vit_nano", image_size=32, patch_size=8, experts=experts, drop_path=0.5).double()
        tokens, routing = vit(rand(6, 3, 32, 32))
        loss = tokens.sin().sum() + sum((r.dispatch ** 2).sum() + r.combine.cos().sum() for r in routing.values())
        return [tokens, loss, *torch.autograd.grad(loss, list(vit.parameters()))]
    fast = values_and_gradients()
    make_plain(monkeypatch.setattr)
    for a, b in zip(fast, values_and_gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_attention_in_bf16_on_a_cpu_is_attention():
    q, k, v = (torch.randn(2, 3, 50, 64).bfloat16().requires_grad_() for _ in range(3))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    ours, theirs = model.attention(q, k, v), F.scaled_dot_product_attention(*exact)
    assert ours.dtype == torch.bfloat16
    assert "ScaledDotProduct" not in str(ours.grad_fn)          # the fast path, not the fused one
    assert (ours - theirs).abs().max() < 0.02
    direction = randn(2, 3, 50, 64)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), direction.bfloat16()), torch.autograd.grad(theirs, exact, direction)):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_recomputed_blocks_give_the_same_bits_and_keep_less(toy, tmp_path, monkeypatch):
    toy += ["--drop-path", "0.5", "--max-steps", "3", "--experts", "4"]
    checkpoint, blocks = torch.utils.checkpoint.checkpoint, []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint",
                        lambda block, *args, **kwargs: (blocks.append(block), checkpoint(block, *args, **kwargs))[1])
    equal_states(*(train([*toy, *flags, "--out", str(tmp_path / f"run{len(flags)}")])[0] for flags in ([], ["--recompute"])))
    assert len(blocks) == 3 * 4                                     # the flag alone asks for it

    encoder, kept = model.build_vit("vit_nano", image_size=32, patch_size=8, experts=4), {}
    parameters = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
    for encoder.recompute in (False, True):
        tensors = {}
        def pack(x):
            if x.untyped_storage().data_ptr() not in parameters:
                tensors[x.untyped_storage().data_ptr()] = x
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            encoder(torch.rand(8, 3, 32, 32))
        kept[encoder.recompute] = sum(x.untyped_storage().nbytes() for x in tensors.values())
    assert kept[True] < 0.2 * kept[False]


def test_freed_memory_is_kept_for_the_next_tensor():
    program = """if True:
        import resource, sys, torch, common
        if sys.argv[1] == "keep": common.keep_freed_memory()
        faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        def step(): [torch.ones(2 ** 24) for _ in range(3)]
        for _ in range(4): step()
        before = faults(); step(); print(faults() - before)"""
    keep, give_back = (int(subprocess.run([sys.executable, "-c", program, how], cwd=HERE, capture_output=True, text=True,
                                          check=True).stdout) for how in ("keep", "plain"))
    assert keep < 100 < give_back


BENCH_LINE = r"teacher ([\d.]+) ms \| student ([\d.]+) ms \| (\d+) images/s \| ([\d.]+) TFLOP/s \| ([\d.]+) GiB"


@pytest.mark.parametrize("flags", ((), ("--compile",), ("--encoding", "dense", "--objective", "token_cls_pixel", "--micro-batch", "4"),
                                   ("--experts", "0", "--balance", "gradnorm")), ids=" ".join)
def test_bench_times_a_real_run_and_leaves_nothing_behind(tmp_path, teacher, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    pretrain.main(pretrain.parse_args([*TOY, "--teacher", teacher, "--bench", "2", *flags]))
    times = [float(number) for number in re.search("^" + BENCH_LINE + "$", capsys.readouterr().out, re.M).groups()]
    assert times[0] > 0 and times[1] > times[0] and times[2] > 0 and times[4] > 0.1
    assert times[2] <= 8 / (times[0] + times[1]) * 1000 + 1
    assert not list(tmp_path.iterdir())


def test_bench_counts_the_blocks_flops_and_times_the_loader_of_a_folder(photos, capsys, monkeypatch):
    """1 GFLOP in a step of 1 ms is 1 TFLOP/s."""
    monkeypatch.setattr(common.Laps, "medians", lambda self, first: {"teacher": 300.0, "student": 500.0, "step": 1000.0})
    pretrain.main(pretrain.parse_args(["--model", "vit_small", "--teacher", "ViT-S-32-alt/random", "--batch-size", "4", "--bench", "1",
                                       "--workers", "1", "--data", photos]))
    line, loader = capsys.readouterr().out.strip().splitlines()[-2:]
    with torch.device("meta"):
        student, teacher = model.build_vit("vit_small", experts=2), model.ViT(224, 16, 384, 12, 6)
    macs = 3 * model.encoder_macs(student, 119) + model.encoder_macs(teacher, 197)
    assert line.split(" | ")[:3] == ["teacher 300.0 ms", "student 500.0 ms", "4 images/s"]
    assert line.split(" | ")[3] == f"{2 * 4 * macs / 1e12:.1f} TFLOP/s"
    assert re.fullmatch(r"loader \d+ images/s per worker, 1 of them", loader) and int(loader.split()[1]) > 0


def test_bench_takes_the_demos_sizes(teacher, capsys, monkeypatch):
    trained = []
    monkeypatch.setattr(finetune, "main", lambda args: trained.append(args.data))
    monkeypatch.setitem(pretrain.DEMO, "teacher", teacher)
    pretrain.main(pretrain.parse_args(["--demo", "--bench", "1", "--batch-size", "4"]))
    assert trained == ["shapes"] and re.search(BENCH_LINE, capsys.readouterr().out)


def test_laps_are_medians_of_each_steps_parts():
    laps = common.Laps(torch.device("cpu"))
    laps.marks = [(0, "a", 0.0), (1, "a", 1.0), (1, "b", 3.0), (1, "b", 4.0), (2, "a", 5.0), (2, "b", 6.0), (3, "a", 16.0), (3, "b", 17.0)]
    assert laps.medians(1) == {"a": 1000, "b": 1000, "step": 4000}


class HostReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Lists the operations that make the host wait for a device."""
    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique2", "item")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.waiting:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flags", ((), ("--recompute",), ("--experts", "0", "--balance", "rlw"), ("--experts", "0", "--balance", "gradnorm"),
                                   ("--encoding", "dense", "--objective", "token_cls_pixel", "--importance-weight", "1")), ids=" ".join)
def test_the_host_waits_for_nothing_between_logged_steps(teacher, monkeypatch, flags):
    """A step reads no value of a tensor; on a GPU each such read would empty the queue."""
    reads = HostReads()
    def lap(self, step, part):
        if part == "input" and step == 1:
            reads.__enter__()
    def medians(self, first):
        reads.__exit__(None, None, None)
        return {"teacher": 1.0, "student": 1.0, "step": 2.0}
    monkeypatch.setattr(common.Laps, "__call__", lap)
    monkeypatch.setattr(common.Laps, "medians", medians)
    pretrain.main(pretrain.parse_args([*TOY, "--teacher", teacher, "--bench", "1", *flags]))
    assert reads.seen == []
    with reads:
        torch.ones(1).item()
    assert reads.seen                                                                            # the mode does see them


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
def test_a_batch_is_copied_ahead_and_arrives_whole():
    device = torch.device("cuda")
    loader = [{"x": torch.full((1000, 1000), float(i)).pin_memory()} for i in range(20)]
    assert [batch["x"].mean().item() for batch in data.copy_ahead(loader, device)] == list(range(20))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
def test_no_step_synchronizes_a_gpu(teacher, monkeypatch):
    def lap(self, step, part):
        if part == "input" and step == pretrain.WARM_UP:
            torch.cuda.set_sync_debug_mode("error")
    monkeypatch.setattr(common.Laps, "__call__", lap)
    monkeypatch.setattr(common.Laps, "medians", lambda self, first: {"teacher": 1.0, "student": 1.0, "step": 2.0})
    try:
        pretrain.main(pretrain.parse_args([*TOY[:-4], "--teacher", teacher, "--bench", "3", "--workers", "0"]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Benchmarks print what they measure: `python -m pytest -s -m bench test_explore.py`

@pytest.mark.bench
def test_bench_the_loader_against_imagefolder_and_pillow():
    """Both with one worker and the same crops, on a folder of photographs in ImageNet's layout."""
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms
    root = os.environ.get("BENCH_IMAGES") or pytest.skip("BENCH_IMAGES=FOLDER names no photographs")
    torch.set_num_threads(1)
    views = data.TrainViews(data.Folder(root, "train"), 224, 0)

    class SameCrop:
        """RandomResizedCrop's own code with our numbers in the place of its draws."""
        def __init__(self): self.index = 0
        def __call__(self, image):
            rng = np.random.default_rng((0, 0, self.index))
            top, left, height, width = data.random_crop(rng, image.height, image.width, (0.2, 1.0))
            return transforms.functional.resized_crop(image, top, left, height, width, [224, 224], transforms.InterpolationMode.BICUBIC)

    class Usual(datasets.ImageFolder):
        def __getitem__(self, index):
            crop.index = index
            return super().__getitem__(index)
    crop = SameCrop()
    usual = Usual(os.path.join(root, "train"), transforms.Compose([crop, transforms.RandomHorizontalFlip(),
                                                                   transforms.ColorJitter(0.4, 0.4, 0.4), transforms.ToTensor()]))
    order = [range(start, start + 32) for start in range(0, len(usual) - 31, 32)] * 4

    def rate(dataset, keys, **collate):
        batches = iter(DataLoader(dataset, batch_sampler=keys, num_workers=1, **collate))
        for _ in range(4):
            next(batches)
        start = time.perf_counter()
        count = sum(32 for _ in batches)
        return count / (time.perf_counter() - start)
    ours, theirs = zip(*((rate(views, [[(0, i) for i in batch] for batch in order], collate_fn=data.collate), rate(usual, order))
                         for _ in range(5)))
    print(f"\nours {np.median(ours):.0f} images/s per worker, usual {np.median(theirs):.0f}, ratio "
          f"{np.median(np.array(ours) / theirs):.2f} ({min(np.array(ours) / theirs):.2f} to {max(np.array(ours) / theirs):.2f})")


@pytest.mark.bench
def test_bench_the_step_against_a_plain_one():
    """ViT-B/16, 2 experts, batch 32, bf16, a teacher of the architecture of OpenAI's: ours, ours compiled and the plain version in turn,
    each in a process of its own."""
    flags = ["--teacher", "ViT-B-16-quickgelu/random", "--batch-size", "32", "--amp", "bf16", "--bench", "5"]
    plain = "import sys, pretrain, test_explore; test_explore.make_plain(); pretrain.main(pretrain.parse_args(sys.argv[1:]))"
    programs = {"plain": [sys.executable, "-c", plain, *flags], "ours": [sys.executable, "pretrain.py", *flags],
                "ours compiled": [sys.executable, "pretrain.py", *flags, "--compile"]}
    milliseconds = {name: [] for name in programs}
    for _ in range(3):
        for name, command in programs.items():
            line = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            teacher, student, *_ = map(float, re.fullmatch(BENCH_LINE, line).groups())
            milliseconds[name].append(teacher + student)
            print(f"\n{name}: {line}", end="", flush=True)
    for name in ("ours", "ours compiled"):
        print(f"\n{name} takes {np.median(np.array(milliseconds[name]) / milliseconds['plain']):.2f} of the plain step's time", end="")
    print()


@pytest.mark.bench
@pytest.mark.parametrize("experts", (2, 64))
def test_bench_what_the_backward_pass_keeps(experts, monkeypatch):
    """Bytes that ViT-B/16's forward pass keeps for the backward one, per image, under bf16 autocast and with fused attention, as on a
    GPU; and what a micro-batch of 1024 then needs beside weights, gradients and AdamW's state. Counted, not timed; 64 experts take 14 GB."""
    monkeypatch.setattr(model, "attention", F.scaled_dot_product_attention)
    args = pretrain.parse_args(["--experts", str(experts)])
    pretrain.check(args)
    encoder = model.build_vit("vit_base", experts=experts, drop_path=0.1)
    student = model.Explore(encoder, 768)
    parameters = {p.untyped_storage().data_ptr() for p in student.parameters()}
    def kept(images):
        mask, storages = torch.arange(196).expand(images, -1) < 78, {}
        def pack(x):
            if x.untyped_storage().data_ptr() not in parameters:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            pixels, (ids_keep, ids_restore) = torch.rand(images, 3, 224, 224), model.shuffle_visible(mask, torch.rand(images, 196), 118)
            with torch.autocast("cpu", torch.bfloat16):
                pred = student(pixels, mask, ids_keep, ids_restore)
            targets = torch.randn(images, 197, 768)
            losses_, regularizers, _ = pretrain.objectives(args, torch.full((experts,), 5.0), pred, targets, pixels, mask, ids_keep)
            total = losses_.sum() + regularizers
        return sum(storage.nbytes() for storage in storages.values()) + 0 * total.item()
    for encoder.recompute in (False, True):
        few, more = kept(2), kept(6)
        image = (more - few) / 4
        state = 16 * sum(p.numel() for p in student.parameters())
        print(f"\n{experts} experts{', --recompute' * encoder.recompute}: {image / 2 ** 20:.1f} MiB an image, "
              f"{(few - 2 * image + 1024 * image + state) / 2 ** 30:.1f} GiB at micro-batch 1024")


@pytest.mark.bench
def test_bench_the_experts_products_by_their_rows():
    """A slot is one row of an expert's product, and an image has one: TFLOP/s of 16 experts' first layer beside a dense layer's."""
    def rate(x, w):
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            x @ w
            times.append(time.perf_counter() - begin)
        return 2 * x.numel() * w.shape[-1] / np.median(times) / 1e12
    w = torch.randn(16, 768, 3072).bfloat16()
    rates = {rows: rate(torch.randn(16, rows, 768).bfloat16(), w) for rows in (16, 32, 128, 512)}
    print("\n" + ", ".join(f"{rows} images: {value:.2f}" for rows, value in rates.items()),
          f"dense: {rate(torch.randn(3808, 768).bfloat16(), w[0]):.2f} TFLOP/s", sep="; ")


@pytest.mark.bench
def test_bench_knn_against_the_matrix_product_alone():
    """A tenth of ImageNet: 128,000 features of width 768 against 5,000."""
    common.keep_freed_memory()
    bank, queries = (F.normalize(torch.randn(n, 768), dim=1) for n in (128_000, 5_000))
    labels, seconds = torch.randint(1000, (128_000,)), []
    for _ in range(3):
        start = time.perf_counter()
        for chunk in queries.split(4096):
            for part in bank.split(65536):
                chunk @ part.T
        product, before, start = time.perf_counter() - start, common.peak_memory(bank.device), time.perf_counter()
        knn.classify(queries, bank, labels, 1000, 20, 0.07)
        seconds.append((product, time.perf_counter() - start))
    product, whole = np.median(seconds, axis=0)
    print(f"\nproduct {product:.2f} s, k-NN {whole:.2f} s, ratio {whole / product:.2f}, "
          f"{common.peak_memory(bank.device) - before:.2f} GiB more than the product at its peak")


def readme_commands():
    """The flags of pretrain.py in the README's table of the paper's numbers, one command a row."""
    table = (HERE / "README.md").read_text().split("## The paper's numbers")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|") and line.rstrip().endswith("` |")]
    return [re.search(r"`([^`]*)` \|$", row).group(1) for row in rows]


@pytest.mark.parametrize("command", readme_commands())
def test_every_command_of_the_readmes_table_trains(toy, monkeypatch, command):
    monkeypatch.setattr(common, "save", lambda *args, **kwargs: None)
    flags = command.removeprefix("pretrain.py").split()
    args = pretrain.parse_args([*toy, *flags, "--model", "vit_tiny", "--max-steps", "2"])
    pretrain.main(args)
    log = [json.loads(line) for line in open(Path(args.out) / "log.jsonl")]
    assert log[-1]["step"] == 2 and math.isfinite(log[-1]["loss"])


def test_the_readmes_table_has_a_command_for_every_ablation():
    commands = " ".join(readme_commands())
    for flag in ("--experts 0", "--experts 64", "--loss-weights uniform", "--loss-weights combine", "--detach", "--loss-block 7 9 11",
                 "--entropy-on combine", "--importance-weight 2", "--balance gradnorm", "--balance rlw", "--encoding dense",
                 "--objective token_pixel", "--objective token_cls_pixel", "--entropy-weight 5 24", "--mask-ratio 0.5", "--seed"):
        assert flag in commands, flag


def test_the_lines_of_code_in_the_readmes_method_are_those_of_the_program():
    method = (HERE / "README.md").read_text().split("## The method in one screen")[1].split("\n## ")[0]
    lines = [line.split("#")[0].strip() for block in re.findall(r"```python\n(.*?)```", method, re.S) for line in block.splitlines()]
    program = "".join((HERE / name).read_text() for name in ("model.py", "losses.py", "pretrain.py"))
    lines = [line for line in lines if not line.startswith("def ")]
    assert len(lines) >= 5 and all(line in program for line in lines), [line for line in lines if line not in program]


def test_the_readme_test_command_is_what_ci_runs():
    command = "python -m pytest -q test_explore.py"
    assert command in (HERE / "README.md").read_text() and command in (HERE / ".ci" / "run").read_text()
