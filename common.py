"""What the stages share: errors, flags, the machine, the schedule, the optimizer, recipes."""

import argparse
import contextlib
import fcntl
import math
import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint import LoadError
from model import ViT

# Flags that may change when a run resumes: they say where, how fast or how long it works, not
# what it computes. --amp can save a run whose numbers went wrong; the contents of --data and
# CHECKPOINT must stay.
FREE_FLAGS = {"data", "checkpoint", "out", "workers", "micro_batch", "compile", "recompute",
              "amp", "save_every", "save_minutes", "max_steps"}
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


# ------------------------------------------------------------------------------- errors

class UserError(Exception):
    """A user error, printed as one line; exit code 2."""


class LocalError(UserError):
    """A user error that one process may meet alone, such as a broken image: it prints it."""


def launch(main, args: argparse.Namespace):
    """What a script's `__main__` calls."""
    script = Path(sys.argv[0]).name
    try:
        main(args)
        leave_group()
    except (UserError, LoadError, OSError) as error:      # on each machine: it may concern one
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, LocalError):
            print(f"{script}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{script}: stopped", file=sys.stderr)
        sys.exit(130)
    finally:      # loaders ignore the SIGTERM that multiprocessing would send, and wait forever
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)      # PyTorch's raises for a killed one
        for process in multiprocessing.active_children():
            process.kill()


def leave_group():
    """Leaves the process group with all other processes; after an error, they do not come."""
    if dist.is_initialized():
        dist.barrier()      # older Gloos deadlock if destroyed while they release a tensor
        dist.destroy_process_group()


# -------------------------------------------------------------------------------- flags

def add_flags(parser: argparse.ArgumentParser, title: str, flags: dict[str, dict]):
    """Flags by their names. A number's type is its default's; help texts name defaults.

    `range` is an interval, by default "[1, inf)" for whole numbers and "[0, inf)" for others.
    """
    group = parser.add_argument_group(title)
    for name, how in flags.items():
        default = how.get("default")
        kind = how.get("type", type(default))
        if kind in (int, float):
            interval = how.pop("range", "[1, inf)" if kind is int else "[0, inf)")
            how = {"metavar": "X"} | how | {"type": number(kind, interval)}
        if default is not None and "default: " not in how["help"]:
            how["help"] += " (default: %(default)s)"
        group.add_argument(name, **how)


def number(kind: type, interval: str):
    """An argparse type: number(float, "[0, 1)") refuses 1. NaN is in no interval."""
    low, high = map(float, interval[1:-1].split(","))

    def convert(text: str) -> int | float:
        value = kind(text)
        ends = [end for end, closed in ((low, "["), (high, "]")) if closed in interval]
        if not low < value < high and value not in ends:
            raise argparse.ArgumentTypeError(f"{value} is outside {interval}")
        return value
    convert.__name__ = kind.__name__      # for the message about what is no number
    return convert


def make_parser(doc: str, batch_size: int,
                batches: str = "images per step, over all processes",
                out: str = "runs/NAME, made of the flags that matter",
                without: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """A parser with the flags of every stage, but for those that it is `without`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    flags = {
        "--data": dict(
            default=os.environ.get("IMAGENET", "data/imagenet"), metavar="FOLDER",
            help="with {train,val}/CLASS/*.jpg; for segment.py in ADE20K's layout; for "
                 "pretrain.py and routing.py also of photos, or one photo; or cifar10, "
                 "food101 (downloaded to data/), shapes, shapes-noise (drawn on the fly) "
                 "(default: $IMAGENET, else data/imagenet)"),
        "--out": dict(metavar="FOLDER", help=f"for the results (default: {out})"),
        "--batch-size": dict(default=batch_size, help=batches),
        "--workers": dict(
            type=int, range="[0, inf)",
            help="loader processes of each training process (default: its share of the "
                 "cores, at most 16)"),
        "--amp": dict(
            choices=("fp16", "bf16", "off"), default="fp16",
            help="precision of matrix products; without CUDA, fp16 becomes off, and bf16 "
                 "is for CPUs that have units for it"),
        "--compile": dict(
            action=argparse.BooleanOptionalAction,
            help="torch.compile: slower to start, faster steps (default: on CUDA)"),
        "--seed": dict(default=42, range="[0, 4294967296)", help="of all random numbers"),
    }
    flags = {name: how for name, how in flags.items() if name not in without}
    add_flags(parser, "input, output, machine", flags)
    return parser


def add_trainer_flags(parser: argparse.ArgumentParser, *, warmup: float, lr: float,
                      min_lr: float, weight_decay: float, clip_grad: float,
                      epochs: int | None = None, iterations: int | None = None):
    """A run counts in `epochs` or `iterations`. A default warm-up keeps its share of them."""
    parser.set_defaults(warmup_share=warmup / (epochs or iterations))
    share = f"linear (default: {warmup} of {epochs or iterations}, in proportion)"
    in_epochs = {
        "--epochs": dict(default=epochs, help="length of the run"),
        "--warmup-epochs": dict(type=float, help=share),
    }
    in_iterations = {
        "--iterations": dict(default=iterations, help="length of the run"),
        "--warmup-iterations": dict(type=float, help=share),
    }
    add_flags(parser, "optimization (AdamW)", (in_epochs if epochs else in_iterations) | {
        "--micro-batch": dict(
            type=int, help="images of one forward pass of one process; gradients accumulate "
                           "to --batch-size (default: the largest divisor of a process's "
                           "share up to 256)"),
        "--lr": dict(default=lr, help="peak learning rate, absolute"),
        "--min-lr": dict(default=min_lr, help="final learning rate"),
        "--weight-decay": dict(
            default=weight_decay, help="except for biases, norms, positions and tokens"),
        "--clip-grad": dict(
            default=clip_grad, help="largest gradient norm, 0 for no clipping"),
        "--save-every": dict(
            default=10 if epochs else 8000,
            help="epochs, or iterations, between evaluations and kept checkpoints"),
        "--save-minutes": dict(
            default=30.0, help="write last.pt after so many minutes as well, 0 for never"),
        "--max-steps": dict(
            type=int, help="stop after step N; the same command without it resumes"),
        "--repeat-batch": dict(
            action="store_true", help="train on the first batch alone, without the loader"),
    })


def add_transfer_flags(parser: argparse.ArgumentParser, layer_decay: float):
    add_flags(parser, "transfer", {
        "--recipe": dict(
            nargs="+", choices=("fr", "fa", "exd", "none"), metavar="R",
            help="fr: freeze phi and scale; fa: freeze attention; exd: drop whole experts "
                 "(default: all three with experts, else none)"),
        "--expert-dropout": dict(
            type=float, range="[0, 1)", help="probability of --recipe exd (default: 0.4)"),
        "--layer-decay": dict(
            default=layer_decay, range="(0, 1]",
            help="learning-rate factor from each block to the one below"),
        "--drop-path": dict(
            default=0.1, range="[0, 1)",
            help="stochastic depth of the last block, rising from 0"),
    })


def parse(parser: argparse.ArgumentParser, argv: list[str] | None,
          stage: str) -> argparse.Namespace:
    """Parses, and names a run's folder after the flags that matter."""
    args = parser.parse_args(argv, argparse.Namespace(stage=stage))
    if "max_steps" in args and not args.out:
        parts = [stage]
        unnamed = {"stage", *FREE_FLAGS} - {"checkpoint", "data"}
        for name, value in sorted(vars(args).items()):
            if name not in unnamed and value != parser.get_default(name):
                value = Path(value).name if name == "data" else value
                value = "+".join(map(str, value)) if isinstance(value, list) else value
                parts.append(f"{name}={value}")
        args.out = "runs/" + re.sub(r"[^\w.=+-]+", "-", "_".join(parts))
    return args


def flag(name: str) -> str:
    return "--" + name.replace("_", "-") if len(name) > 1 else "-" + name


# ------------------------------------------------------------------------------ machine

class Machine:
    """This process and its device: its rank in the world, its precision, its loaders."""

    def __init__(self, args: argparse.Namespace):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")

        amp = args.amp if cuda or args.amp != "fp16" else "off"
        self.amp = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[amp]
        self.scaler = torch.amp.GradScaler(self.device.type,
                                           init_scale=2.0 ** 16 if amp == "fp16" else 1.0)
        if amp != "fp16":      # then all it does is to skip updates that are not finite
            self.scaler.set_growth_factor(1.0)
            self.scaler.set_backoff_factor(1.0)

        linux = hasattr(os, "sched_getaffinity")      # macOS has none
        cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
        share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.workers = min(16, share) if args.workers is None else args.workers
        compiles = getattr(args, "compile", False)
        self.compile = cuda if compiles is None else compiles

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None)

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def largest(self, *values: float) -> list[float]:
        """The maximum of each value over all processes, on the CPU: no device is waited for."""
        values = torch.tensor(values)
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()

    def share_buffers(self, model: nn.Module):
        """The first process's BatchNorm statistics for all: they evaluate the same model."""
        for buffer in model.buffers() if self.world > 1 else ():
            dist.broadcast(buffer, 0)

    def parallel(self, model: nn.Module) -> nn.Module:
        return (DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world > 1
                else model)

    def accumulating(self, model: nn.Module, last: bool):
        """Gradients of all processes meet in the last micro-step."""
        return contextlib.nullcontext() if self.world == 1 or last else model.no_sync()


def seed_everything(*key: int):
    """Seeds torch: (seed,) for the weights, (seed, step, rank) for a step's drop path."""
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1)


def lock(folder: Path, wait: bool = False) -> contextlib.ExitStack:
    """Makes the folder and takes it for one process, until the stack is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    held = contextlib.ExitStack()
    try:
        file = held.enter_context((folder / ".lock").open("w"))
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is using {folder}: wait, or give another --out") from None
    except OSError:      # a folder that is read-only, or a disk without locks: go on
        pass
    return held


# ------------------------------------------------------------------------- optimization

class Plan(NamedTuple):
    """How a run divides its images into steps."""
    micro_batch: int      # images of one forward pass of one process
    micro_steps: int      # of a step
    epoch_steps: int      # an incomplete last batch is left out
    steps: int            # of the whole run
    warmup: int           # steps
    save_every: int       # steps


def make_plan(args: argparse.Namespace, world: int, images: int) -> Plan:
    """Raises UserError for numbers that do not fit together."""
    if args.batch_size % world:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of the {world} "
                        "processes")
    if images < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: {args.data} has only {images} "
                        "training images")
    share = args.batch_size // world
    micro_batch = args.micro_batch or max(
        n for n in range(1, min(share, 256) + 1) if share % n == 0)
    if share % micro_batch:
        raise UserError(f"--micro-batch {micro_batch} does not divide {share}, each process's "
                        f"share of --batch-size {args.batch_size}")
    epoch_steps = images // args.batch_size
    unit, unit_steps = ("epochs", epoch_steps) if "epochs" in args else ("iterations", 1)
    length = getattr(args, unit)
    warmup = getattr(args, f"warmup_{unit}")
    if warmup is None:
        warmup = length * args.warmup_share
    if warmup >= length:
        raise UserError(f"--warmup-{unit} {warmup:g} leaves nothing of --{unit} {length}")
    return Plan(micro_batch, share // micro_batch, epoch_steps, length * unit_steps,
                round(warmup * unit_steps), args.save_every * unit_steps)


def learning_rate(step: int, plan: Plan, peak: float, floor: float,
                  linear: bool = False) -> float:
    """Linear from peak / warmup at step 0 to the peak at step warmup - 1, then by cosine, or by
    a line, to the floor at the last step.
    """
    if step < plan.warmup:
        return peak * (step + 1) / plan.warmup
    progress = (step + 1 - plan.warmup) / (plan.steps - plan.warmup)
    if linear:
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float],
          lr_scale=lambda name: 1.0) -> torch.optim.AdamW:
    """AdamW over what is not frozen; a parameter learns at lr_scale(name) times the rate.

    No weight decay on biases (the experts' b1, b2 too), norms, LayerScale, `scale`, positions,
    tokens.
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith(
                (".b1", ".b2", "pos_embed", "_token"))
            groups.setdefault((decays, lr_scale(name)), []).append(parameter)
    groups = [dict(params=parameters, weight_decay=weight_decay * decays, lr_scale=scale)
              for (decays, scale), parameters in groups.items()]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
                   clip_grad: float) -> dict[str, Tensor]:
    """Clips, steps, clears the gradients -> metrics on the device.

    Nothing here waits for the device: where a gradient is not finite, the scaler tells fused
    AdamW to skip the update.
    """
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]
                  if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    if clip_grad:
        nn.utils.clip_grads_with_norm_(parameters, clip_grad, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=not dist.is_initialized())      # DDP's are views of buckets
    return {"grad_norm": norm, "skipped": (~norm.isfinite()).float()}


# ----------------------------------------------------------------------------- transfer

def layerwise_lr(depth: int, decay: float):
    """Layer-wise decay, name -> rate factor: embeddings are layer 0, block i is i + 1."""
    def scale(name: str) -> float:
        name = name.removeprefix("encoder.")
        if name.startswith("blocks."):      # experts, phi and scale belong to their block
            return decay ** (depth - int(name.split(".")[1]))
        embeddings = "patch_embed", "pos_embed", "cls_token"
        return decay ** (depth + 1) if name.startswith(embeddings) else 1.0
    return scale


def apply_recipe(args: argparse.Namespace, encoder: ViT):
    """FR freezes routers' phi and scale, FA attention, ExD drops experts (Table 4)."""
    moes = [encoder.blocks[i].mlp for i in encoder.moe_blocks]
    recipe = args.recipe or (["fr", "fa", "exd"] if moes else ["none"])
    if "none" in recipe and len(recipe) > 1:
        raise UserError(f"--recipe {' '.join(recipe)}: none excludes the others")
    if not moes and {"fr", "exd"} & set(recipe):
        raise UserError(f"--recipe {' '.join(recipe)}: {args.checkpoint or 'the model'} has no "
                        "experts")
    if args.expert_dropout is not None and "exd" not in recipe:
        raise UserError("--expert-dropout needs --recipe exd")
    for name, parameter in encoder.named_parameters():
        routing, attention = name.endswith(("mlp.phi", "mlp.scale")), ".attn." in name
        parameter.requires_grad_(not ("fr" in recipe and routing or "fa" in recipe and attention))
    for moe in moes if "exd" in recipe else ():
        moe.dropout = 0.4 if args.expert_dropout is None else args.expert_dropout
