"""What the stages share: flags, the machine, optimization, transfer recipes, and errors."""

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

# Flags that may change when a run resumes: they say where, how fast or how long it works, not what it
# computes. --amp can save a run whose numbers went wrong; of data and CHECKPOINT, the contents must stay.
FREE_FLAGS = {"data", "checkpoint", "out", "workers", "micro_batch", "compile", "recompute", "amp",
              "save_every", "save_minutes", "max_steps"}
# The numbers that a flag takes; of the others, whole numbers start at 1 and fractions at 0
RANGES = dict(seed="[0, 4294967296)", workers="[0, inf)", experts="[0, inf)", moe_blocks="[0, inf)",
              block="[0, inf)", loss_block="[0, inf)", mask_ratio="(0, 1)", drop_path="[0, 1)",
              expert_dropout="[0, 1)", betas="[0, 1)", layer_decay="(0, 1]", temperature="(0, inf)")
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


class UserError(Exception):
    """A user error, printed as one line; exit code 2."""


class LocalError(UserError):
    """One that a single process may meet, such as a broken image: that process prints it."""


def launch(main, args: argparse.Namespace):
    """What a script's `__main__` calls."""
    script = Path(sys.argv[0]).name
    try:
        main(args)
        leave_group()
    except (UserError, LoadError, OSError) as error:      # on each machine: it may concern one of them alone
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 or isinstance(error, LocalError):
            message = str(error).split("LocalError: ")[-1].strip()      # after a loader process's traceback
            print(f"{script}: error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{script}: stopped", file=sys.stderr)
        sys.exit(130)
    finally:      # multiprocessing would send loaders a SIGTERM, which they ignore, and wait forever
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)      # where PyTorch raises for a loader that is killed
        for process in multiprocessing.active_children():
            process.kill()


def leave_group():
    """Ends this process's part in the group. Not after an error: the other processes would never come."""
    if dist.is_initialized():
        dist.barrier()      # older Gloos deadlock if destroyed while they release a tensor
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------- flags

def make_parser(doc: str, batch_size: int, batches: str = "images per step, over all processes",
                out: str = "runs/NAME, made of the flags that matter", seed=True, compiles=True):
    """A parser with the flags of every stage."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("input, output, machine").add_argument
    add("--data", default=os.environ.get("IMAGENET", "data/imagenet"), metavar="FOLDER",
        help="with {train,val}/CLASS/*.jpg; for segment.py in ADE20K's layout; for pretrain.py and "
             "routing.py also of photos, or one photo; or cifar10, food101 (downloaded to data/), shapes, "
             "shapes-noise (drawn on the fly) (default: $IMAGENET, else data/imagenet)")
    add("--out", metavar="FOLDER", help=f"for the results (default: {out})")
    add("--batch-size", type=int, default=batch_size, metavar="N", help=f"{batches} (default: %(default)s)")
    add("--workers", type=int, metavar="N",
        help="loader processes of each training process (default: its share of the cores, at most 16)")
    add("--amp", choices=("fp16", "bf16", "off"), default="fp16",
        help="precision of matrix products (default: %(default)s; without CUDA, off)")
    if compiles:
        add("--compile", action=argparse.BooleanOptionalAction,
            help="torch.compile: slower to start, faster steps (default: on CUDA)")
    if seed:
        add("--seed", type=int, default=42, metavar="N", help="default: %(default)s")
    return parser


def add_trainer_flags(parser: argparse.ArgumentParser, *, unit: str = "epochs", length: int, warmup: float,
                      drop_path: float | None = None, **defaults: float):
    """A run counts in "epochs" or "iterations". A default warm-up keeps its share of another length."""
    parser.set_defaults(warmup_share=warmup / length)
    add = parser.add_argument_group("optimization (AdamW)").add_argument
    add(f"--{unit}", type=int, default=length, metavar="N", help="default: %(default)s")
    add(f"--warmup-{unit}", type=float, metavar="N",
        help=f"linear (default: {warmup} of {length}, in proportion)")
    add("--micro-batch", type=int, metavar="N",
        help="images of one forward pass of one process; gradients accumulate to --batch-size (default: the "
             "largest divisor of a process's share up to 256)")
    for name, text in dict(lr="peak learning rate, absolute", min_lr="final learning rate",
                           weight_decay="except for biases, norms, positions and tokens",
                           clip_grad="largest gradient norm, 0 for no clipping").items():
        add(flag(name), type=float, default=defaults[name], metavar="X",
            help=f"{text} (default: %(default)s)")
    if drop_path is not None:
        add("--drop-path", type=float, default=drop_path, metavar="P",
            help="stochastic depth of the last block, rising from 0 (default: %(default)s)")
    add("--save-every", type=int, default=10 if unit == "epochs" else 8000, metavar="N",
        help=f"{unit} between evaluations and kept checkpoints (default: %(default)s)")
    add("--save-minutes", type=float, default=30.0, metavar="MINUTES",
        help="write last.pt after so many minutes as well, 0 for never (default: %(default)g)")
    add("--max-steps", type=int, metavar="N", help="stop after step N; the same command without it resumes")
    add("--repeat-batch", action="store_true", help="train on the first batch alone, without the loader")


def add_recipe_flags(parser: argparse.ArgumentParser, layer_decay: float):
    add = parser.add_argument_group("transfer").add_argument
    add("--recipe", nargs="+", choices=("fr", "fa", "exd", "none"), metavar="R",
        help="fr: freeze phi and scale; fa: freeze attention; exd: drop whole experts (default: all three "
             "with experts, else none)")
    add("--expert-dropout", type=float, metavar="P", help="probability of --recipe exd (default: 0.4)")
    add("--layer-decay", type=float, default=layer_decay, metavar="D",
        help="learning-rate factor from each block to the one below (default: %(default)s)")


def parse(parser: argparse.ArgumentParser, argv: list[str] | None, stage: str) -> argparse.Namespace:
    """Parses, refuses numbers out of range, and names a run's folder after the flags that matter."""
    args = parser.parse_args(argv, argparse.Namespace(stage=stage))
    for name, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            interval = RANGES.get(name, "[1, inf)" if type(number) is int else "[0, inf)")
            if type(number) in (int, float) and not in_range(number, interval):
                parser.error(f"{flag(name)} {number} is outside {interval}")
    if "max_steps" in args and not args.out:
        parts, unnamed = [stage], {"stage", *FREE_FLAGS} - {"checkpoint", "data"}
        for name, value in sorted(vars(args).items()):
            if name not in unnamed and value != parser.get_default(name):
                value = Path(value).name if name == "data" else value
                parts.append(f"{name}={'+'.join(map(str, value)) if isinstance(value, list) else value}")
        args.out = "runs/" + re.sub(r"[^\w.=+-]+", "-", "_".join(parts))
    return args


def in_range(number: float, interval: str) -> bool:
    """in_range(0.0, "[0, 1)") is True. NaN is in no interval."""
    low, high = map(float, interval[1:-1].split(","))
    return low < number < high or number == low and "[" in interval or number == high and "]" in interval


def flag(name: str) -> str:
    return "--" + name.replace("_", "-") if len(name) > 1 else "-" + name


# ----------------------------------------------------------------------------------------------- machine

def is_first() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


class Machine:
    """This process and its device: its rank in the world, its precision, its loaders."""

    def __init__(self, args: argparse.Namespace):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        cuda, local_rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda and local_rank >= torch.cuda.device_count():
            raise LocalError(f"process {local_rank} of this machine has no GPU: there are "
                             f"{torch.cuda.device_count()}, counted from 0")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")

        amp = args.amp if cuda or args.amp != "fp16" else "off"
        if amp != args.amp and is_first():      # bf16 is a hundred times slower on CPUs without units for it
            print("no CUDA: --amp fp16 becomes off (float32); --amp bf16 is for CPUs with bf16 units")
        self.amp = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[amp]      # autocast's dtype
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0 ** 16 if amp == "fp16" else 1.0)
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
        """Of each value, the largest in any process. On the CPU, over Gloo: no device is waited for."""
        values = torch.tensor(values)
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()

    def share_buffers(self, model: nn.Module):
        """BatchNorm's statistics of the first process for all, so that they evaluate the same model."""
        for buffer in model.buffers() if self.world > 1 else ():
            dist.broadcast(buffer, 0)

    def parallel(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world > 1 else model

    def accumulating(self, model: nn.Module, last: bool):
        """Gradients of all processes meet in the last micro-step."""
        return contextlib.nullcontext() if self.world == 1 or last else model.no_sync()


def seed_everything(*key: int):
    """Seeds torch by `key`: (seed,) for the weights, (seed, step, rank) for a step's drop path."""
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1)


def make_folder(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write to {folder}: give another --out")


def lock(folder: Path, wait: bool = False) -> contextlib.ExitStack:
    """Makes the folder and takes it for one process, until the stack is closed or the process ends."""
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


# ------------------------------------------------------------------------------------------ optimization

class Plan(NamedTuple):
    """How a run divides its images into steps."""
    micro_batch: int      # images of one forward pass of one process
    micro_steps: int      # of a step
    epoch_steps: int      # an incomplete last batch is left out
    steps: int            # of the whole run
    warmup: int           # steps


def make_plan(args: argparse.Namespace, world: int, images: int) -> Plan:
    if args.batch_size % world:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of the {world} processes")
    if images < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: {args.data} has only {images} training images")
    share, epoch_steps = args.batch_size // world, images // args.batch_size
    micro = args.micro_batch or max(n for n in range(1, min(share, 256) + 1) if share % n == 0)
    if share % micro:
        raise UserError(f"--micro-batch {micro} does not divide {share}, each process's share of "
                        f"--batch-size {args.batch_size}")
    if args.min_lr > args.lr:
        raise UserError(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    unit, unit_steps = ("epochs", epoch_steps) if "epochs" in args else ("iterations", 1)
    length, warmup = getattr(args, unit), getattr(args, f"warmup_{unit}")
    warmup = length * args.warmup_share if warmup is None else warmup
    if warmup >= length:
        raise UserError(f"--warmup-{unit} {warmup:g} leaves nothing of --{unit} {length}")
    return Plan(micro, share // micro, epoch_steps, length * unit_steps, round(warmup * unit_steps))


def learning_rate(step: int, plan: Plan, peak: float, floor: float, linear: bool = False) -> float:
    """From peak / warmup at step 0 to the peak at step warmup - 1, then by cosine or line to the floor."""
    if step < plan.warmup:
        return peak * (step + 1) / plan.warmup
    progress = (step + 1 - plan.warmup) / (plan.steps - plan.warmup)
    if linear:
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float],
          lr_scale=lambda name: 1.0) -> torch.optim.AdamW:
    """AdamW over what is not frozen; parameter `name` learns at lr_scale(name) times `set_rate`'s rate.

    No weight decay on biases (the experts' b1, b2 too), norms, LayerScale, `scale`, positions, tokens.
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith((".b1", ".b2", "pos_embed", "_token"))
            groups.setdefault((decays, lr_scale(name)), []).append(parameter)
    groups = [dict(params=parameters, weight_decay=weight_decay if decay else 0.0, lr_scale=scale)
              for (decay, scale), parameters in groups.items()]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clip_grad: float) -> dict:
    """Clips, steps, clears the gradients -> metrics on the device. Nothing here waits for it: where a
    gradient is not finite, the scaler tells fused AdamW to skip the update.
    """
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    if clip_grad:
        nn.utils.clip_grads_with_norm_(parameters, clip_grad, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=not dist.is_initialized())      # DDP's are views of its buckets
    return {"grad_norm": norm, "skipped": (~norm.isfinite()).float()}


def layerwise_lr(depth: int, decay: float):
    """Layer-wise decay: name -> rate factor. Embeddings are layer 0, block i is i + 1, then the rest."""
    def scale(name: str) -> float:
        name = name.removeprefix("encoder.")
        if name.startswith("blocks."):      # experts, phi and scale belong to their block
            return decay ** (depth - int(name.split(".")[1]))
        return decay ** (depth + 1) if name.startswith(("patch_embed", "pos_embed", "cls_token")) else 1.0
    return scale


def apply_recipe(args: argparse.Namespace, encoder: ViT):
    """FR freezes each router's phi and scale, FA each attention's qkv and projection, ExD drops experts."""
    moes = [encoder.blocks[i].mlp for i in encoder.moe_blocks]
    recipe = args.recipe or (["fr", "fa", "exd"] if moes else ["none"])
    if "none" in recipe and len(recipe) > 1:
        raise UserError(f"--recipe {' '.join(recipe)}: none excludes the others")
    if not moes and {"fr", "exd"} & set(recipe):
        raise UserError(f"--recipe {' '.join(recipe)}: {args.checkpoint or 'the model'} has no experts")
    if args.expert_dropout is not None and "exd" not in recipe:
        raise UserError("--expert-dropout needs --recipe exd")
    for name, parameter in encoder.named_parameters():
        routing, attention = name.endswith(("mlp.phi", "mlp.scale")), ".attn." in name
        parameter.requires_grad_(not ("fr" in recipe and routing or "fa" in recipe and attention))
    for moe in moes if "exd" in recipe else ():
        moe.dropout = 0.4 if args.expert_dropout is None else args.expert_dropout
