"""What every script begins and ends with: flags, process group, seeds, schedule, run folder, checkpoints, signals, log."""

import argparse
import contextlib
import copy
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import first_line, load_checkpoint

# Flags that say where, how fast or how long a run works, not what it computes: they may change when it goes on. So may the
# precision, which can save a run whose numbers went wrong.
FREE_FLAGS = {"data", "out", "workers", "micro_batch", "compile", "recompute", "amp", "save_every", "save_minutes", "max_steps",
              "demo", "eval_only", "bench"}


# ------------------------------------------------------------------------------------------------------ errors, flags

class UserError(Exception):
    """Something that the user can put right: one line that names the flag or file, exit code 2, no traceback.

    `everywhere` marks what may happen in one process alone; all processes meet the rest together, and the first speaks.
    """

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


def run(main, args: argparse.Namespace):
    """What a script's `__main__` calls."""
    script = Path(sys.argv[0]).name
    try:
        main(args)
    except UserError as error:
        if error.everywhere or is_first():
            print(f"{script}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{script}: stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        sys.exit(130)
    except (MemoryError, RuntimeError, ConnectionError, EOFError) as error:
        cause = known_cause(error)
        if cause is None:
            raise
        print(f"{script}: error: {cause} ({first_line(error)})", file=sys.stderr)
        sys.exit(1)
    finally:
        error = sys.exc_info()[1]
        while error:      # lets go of what main still held: the loader's processes end now, not at Python's own exit
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        if dist.is_initialized():
            dist.destroy_process_group()


def known_cause(error: Exception) -> str | None:
    """What an error that is not the user's means to a user; None where it is a bug."""
    words = str(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or re.search(
            "(out of|not enough|allocate) memory|[Ss]torage size|multiplication overflow", words):
        return "out of memory: a smaller --micro-batch or --batch-size may help, or a smaller model, image or crop"
    if "DataLoader worker" in words or isinstance(error, (ConnectionError, EOFError)):      # it was sending a batch
        return "a loader process was killed, perhaps for lack of memory: fewer --workers may help"
    if re.search("Connection (closed|reset) by peer|remote process exited", words):
        return "another of the processes has ended"
    if type(error).__name__ in ("InductorError", "BackendCompilerFailed"):      # no C++ compiler, most often
        return "torch.compile does not work here: --no-compile goes without it"
    return None


def add_common_flags(parser: argparse.ArgumentParser, batch_size: int, seed: bool = True, compiles: bool = True,
                     out: str = "default: runs/NAME, made of the flags that matter"):
    group = parser.add_argument_group("input, output, machine")
    group.add_argument("--data", default=os.environ.get("IMAGENET", "data/imagenet"), metavar="FOLDER",
                       help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or cifar10, food101 (downloaded to data/), "
                            "or shapes (drawn on the fly); default: $IMAGENET, else data/imagenet")
    group.add_argument("--out", help=f"folder for the results ({out})")
    group.add_argument("--batch-size", type=positive_int, default=batch_size, help="images per step, over all processes "
                       "(default: %(default)s)")
    group.add_argument("--workers", type=number(int, lambda x: 0 <= x <= 256, "whole number from 0 to 256"), default=None, metavar="N",
                       help="loader processes for each training process (default: its share of the cores, at most 16)")
    group.add_argument("--amp", choices=("fp16", "bf16", "off"), default="fp16",
                       help="precision of matrix products (default: %(default)s; without CUDA fp16 becomes off)")
    if compiles:
        group.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None,
                           help="torch.compile: slower to start, faster steps (default: on CUDA; on two CPU cores the paper's pretraining "
                                "starts 80 s later, 12 s from the second time on, and its steps take a tenth less time)")
    else:
        parser.set_defaults(compile=False)
    if seed:
        group.add_argument("--seed", type=natural, default=42, help="default: %(default)s")


def add_trainer_flags(parser: argparse.ArgumentParser, *, epochs: int = 0, warmup_epochs: float = 0, iterations: int = 0,
                      warmup_iterations: int = 0, lr: float, min_lr: float, weight_decay: float, clip_grad: float,
                      drop_path: float | None = None):
    """Trainers count in epochs or in iterations. A default warm-up keeps its share of a run of another length."""
    parser.set_defaults(warmup_share=warmup_epochs / epochs if epochs else warmup_iterations / iterations)
    group = parser.add_argument_group("optimization (AdamW)")
    if epochs:
        group.add_argument("--epochs", type=positive_int, default=epochs, help="default: %(default)s")
        group.add_argument("--warmup-epochs", type=non_negative, metavar="EPOCHS",
                           help=f"linear warm-up, then cosine decay (default: {warmup_epochs:g} of {epochs} epochs, in proportion of others)")
    else:
        group.add_argument("--iterations", type=positive_int, default=iterations, help="default: %(default)s")
        group.add_argument("--warmup-iterations", type=natural, metavar="N",
                           help=f"linear warm-up, then linear decay (default: {warmup_iterations} of {iterations}, in proportion of others)")
    group.add_argument("--micro-batch", type=positive_int, metavar="N",
                       help="images of one forward pass of one process; gradients accumulate up to --batch-size "
                            "(default: the largest divisor of a process's share up to 256)")
    group.add_argument("--lr", type=non_negative, default=lr, help="peak learning rate, absolute (default: %(default)s)")
    group.add_argument("--min-lr", type=non_negative, default=min_lr, metavar="LR", help="final rate (default: %(default)s)")
    group.add_argument("--weight-decay", type=non_negative, default=weight_decay, metavar="W", help="default: %(default)s")
    group.add_argument("--clip-grad", type=non_negative, default=clip_grad, metavar="NORM",
                       help="largest gradient norm, 0 for no clipping (default: %(default)s)")
    if drop_path is not None:
        group.add_argument("--drop-path", type=fraction, default=drop_path, metavar="P",
                           help="stochastic depth of the last block, rising from 0 (default: %(default)s)")
    group.add_argument("--save-every", type=positive_int, default=10 if epochs else 8000, metavar="EPOCHS" if epochs else "N",
                       help=f"write last.pt and what else a stage keeps after so many {'epochs' if epochs else 'iterations'} "
                            "(default: %(default)s)")
    group.add_argument("--save-minutes", type=non_negative, default=30.0, metavar="MINUTES",
                       help="write last.pt after so many minutes as well, 0 for never (default: %(default)g)")
    group.add_argument("--max-steps", type=positive_int, metavar="N",
                       help="stop after step N of the schedule; the same command without it goes on")


LARGEST = 10 ** 12      # of whole numbers: more than anything here is counted to


def number(kind, condition, description):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {description}") from None
        if kind is int and abs(value) > LARGEST:
            raise argparse.ArgumentTypeError(f"{text} is too large")
        if not (math.isfinite(value) and condition(value)):
            raise argparse.ArgumentTypeError(f"{text} is no {description}")
        return value
    return parse


natural = number(int, lambda x: x >= 0, "whole number of at least 0")
positive_int = number(int, lambda x: x > 0, "whole number above 0")
non_negative = number(float, lambda x: x >= 0, "number of at least 0")
positive = number(float, lambda x: x > 0, "number above 0")
finite = number(float, lambda x: True, "finite number")
fraction = number(float, lambda x: 0 <= x < 1, "number from 0 to below 1")
unit = number(float, lambda x: 0 < x <= 1, "number above 0 and up to 1")
open_fraction = number(float, lambda x: 0 < x < 1, "number between 0 and 1")


# ---------------------------------------------------------------------------------------------------- transfer recipes

RECIPES = ("fr", "fa", "exd")


def add_recipe_flags(parser: argparse.ArgumentParser, layer_decay: float):
    group = parser.add_argument_group("transfer")
    group.add_argument("--recipe", nargs="+", choices=(*RECIPES, "none"), metavar="R",
                       help="fr: freeze phi and scale; fa: freeze attention; exd: drop whole experts; none "
                            "(default: fr fa exd with experts, else none)")
    group.add_argument("--expert-dropout", type=fraction, default=0.4, metavar="P", help="of exd (default: %(default)s)")
    group.add_argument("--layer-decay", type=unit, default=layer_decay, metavar="D",
                       help="factor of the learning rate from each block to the one below (default: %(default)s)")
    return group


def layer_scale(depth: int, decay: float):
    """Layer-wise decay: name -> factor of its rate. Embeddings are layer 0, block i is i + 1, the rest depth + 1 with 1."""
    def scale(name: str) -> float:
        name = name.removeprefix("encoder.")
        if name.startswith("blocks."):      # experts, phi and scale belong to their block
            layer = int(name.split(".")[1]) + 1
        else:
            layer = 0 if name.startswith(("patch_embed", "pos_embed", "cls_token")) else depth + 1
        return decay ** (depth + 1 - layer)
    return scale


def freeze(encoder: nn.Module, recipe: list[str]):
    """FR freezes each router's phi and scale, FA each attention's qkv and projection: no gradient, no optimizer."""
    for name, parameter in encoder.named_parameters():
        routing, attention = name.endswith(("mlp.phi", "mlp.scale")), ".attn." in name
        parameter.requires_grad_(not ("fr" in recipe and routing or "fa" in recipe and attention))


def choose_recipe(args: argparse.Namespace, has_experts: bool) -> list[str]:
    """What --recipe means for this checkpoint; says so in one line where a recipe has nothing to act on."""
    recipe = args.recipe or (list(RECIPES) if has_experts else ["none"])
    if "none" in recipe and len(recipe) > 1:
        raise UserError(f"--recipe {' '.join(recipe)}: none stands alone")
    ignored = [r for r in recipe if r in ("fr", "exd") and not has_experts]
    if ignored and is_first():
        print(f"{args.checkpoint or 'a model from scratch'} has no experts: --recipe {' '.join(ignored)} is ignored")
    return [r for r in recipe if r not in ignored and r != "none"]


# ---------------------------------------------------------------------------------------------------------- processes

class Process(NamedTuple):
    rank: int
    world: int
    device: torch.device
    amp: torch.dtype | None    # autocast's dtype; None is full precision

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None)


def is_first() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def start(args: argparse.Namespace) -> Process:
    """Joins torchrun's process group where there is one (NCCL for CUDA, gloo for CPU) and picks device and precision.

    Fills in what `args` left to the machine: --workers and --compile.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    if not cuda:
        keep_freed_memory()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        # torchrun restarts processes on the same store, where the dead ones' addresses still stand: each restart has keys of its
        # own. (Several nodes count their restarts differently: they need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.)
        store, _, _ = next(dist.rendezvous("env://"))
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else "0"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo",      # gloo: what processes agree on without a device
                                store=dist.PrefixStore(f"restart {restart}", store), rank=rank, world_size=world)
    if args.amp == "fp16" and not cuda:
        args.amp = "off"      # not bf16: on a CPU without units for it, a product takes a hundred times as long
        if rank == 0:
            print("no CUDA device: --amp fp16 becomes off, float32; processors with bf16 units are faster with --amp bf16", flush=True)
    if args.workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()      # macOS has no affinity
        args.workers = min(16, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    if args.compile is None:
        args.compile = cuda
    return Process(rank, world, device, {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[args.amp])


def keep_freed_memory():
    """Tells glibc's malloc to keep large freed blocks for the next tensor.

    It would give them back to the system at once, and on a CPU the page faults of fetching them again can take ten
    times as long as an elementwise operation itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)                  # M_MMAP_MAX: no block is a mapping of its own
        mallopt(-1, -1)                 # M_TRIM_THRESHOLD: what is free at the heap's end stays, however much it is


@contextlib.contextmanager
def first_process_first():
    """Of each machine's processes the first goes alone (it downloads), the others follow."""
    waits = dist.is_initialized() and int(os.environ.get("LOCAL_RANK", 0)) != 0
    if waits:
        dist.barrier()
    yield
    if dist.is_initialized() and not waits:
        dist.barrier()


def seed_everything(*key: int):
    """Seeds torch with a function of `key`: (seed,) for the weights, (seed, step, rank) for a step's drop path."""
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1)


def mean_over_processes(values: Tensor, world: int) -> Tensor:
    if world > 1:
        dist.all_reduce(values)
        values /= world
    return values


def sizes(args: argparse.Namespace, world: int, images: int) -> tuple[int, int, int]:
    """-> (micro-batch, micro-steps of a step, steps of an epoch), checked."""
    if args.batch_size % world:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of the {world} processes")
    if images < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: there are only {images} training images in {args.data}")
    share = args.batch_size // world
    micro = args.micro_batch or max(n for n in range(1, min(share, 256) + 1) if share % n == 0)
    if share % micro:
        raise UserError(f"--micro-batch {micro} does not divide the {share} images that each of {world} processes has "
                        f"of --batch-size {args.batch_size}")
    return micro, share // micro, images // args.batch_size


# ------------------------------------------------------------------------------------------------------- optimization

def schedule(args: argparse.Namespace, epoch_steps: int) -> tuple[int, int]:
    """-> (steps of the whole run, warm-up steps), from --epochs or --iterations."""
    unit, unit_steps = ("epochs", epoch_steps) if "epochs" in args else ("iterations", 1)
    length, warmup = getattr(args, unit), getattr(args, f"warmup_{unit}")
    steps, warmup_steps = length * unit_steps, round((length * args.warmup_share if warmup is None else warmup) * unit_steps)
    if warmup_steps >= steps:
        raise UserError(f"--warmup-{unit} {warmup:g} leaves nothing of --{unit} {length}")
    return steps, warmup_steps


def learning_rate(step: int, steps: int, warmup: int, peak: float, floor: float) -> float:
    """Linear from peak / warmup at step 0 to the peak at step warmup - 1, then cosine to the floor at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step + 1 - warmup) / (steps - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def linear_rate(step: int, steps: int, warmup: int, peak: float, floor: float) -> float:
    """As `learning_rate`, with a linear decay."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak + (floor - peak) * (step + 1 - warmup) / (steps - warmup)


def decays(name: str, parameter: Tensor) -> bool:
    """No weight decay on biases (the experts' stacked ones too), norms, LayerScale, `scale`, positions and tokens."""
    undecayed = ("b1", "b2", "pos_embed", "cls_token", "mask_token")
    return parameter.ndim > 1 and name.split(".")[-1] not in undecayed


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float],
          lr_scale=lambda name: 1.0) -> torch.optim.AdamW:
    """AdamW over what is not frozen; parameter `name` learns at lr_scale(name) times the rate that `set_rate` sets."""
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = (decays(name, parameter), lr_scale(name))
            groups.setdefault(key, []).append(parameter)
    groups = [dict(params=parameters, weight_decay=weight_decay if decay else 0.0, lr_scale=scale)
              for (decay, scale), parameters in groups.items()]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def set_rate(optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def update(optimizer, scaler, clip_grad: float, statistics: list[tuple[Tensor, Tensor]] = ()) -> tuple[Tensor, Tensor]:
    """Clips, steps, clears the gradients -> (gradient norm, 1.0 if the update was skipped), both left on the device.

    Where a gradient is not finite, fused AdamW is told so by `found_inf` and leaves weights and state alone; the host
    need not know. In fp16 the scaler sets the same attribute, and lowers its scale. `statistics` are buffers that the
    forward pass has changed (BatchNorm's), each with its value of before: a skipped update leaves no trace there either.
    """
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, clip_grad or math.inf)
    skipped = (~norm.isfinite()).float()
    optimizer.found_inf = skipped
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=not dist.is_initialized())      # DDP's gradients stay in its buckets: no second copy of them
    for buffer, before in statistics:
        buffer.copy_(torch.where(skipped > 0, before, buffer))
    return norm, skipped


class Skips:
    """Counts the updates that were skipped, on the device: in all, and at most in a row."""

    def __init__(self, total: float, device: torch.device):
        self.total, self.row, self.longest = (torch.full((), value, device=device) for value in (float(total), 0.0, 0.0))

    def add(self, skipped: Tensor):
        self.total = self.total + skipped
        self.row = (self.row + skipped) * skipped
        self.longest = torch.maximum(self.longest, self.row)

    def metrics(self) -> dict[str, Tensor]:
        return {"skipped": self.total, "skipped_in_a_row": self.longest}


# --------------------------------------------------------------------------------------------- run folder, checkpoints

def run_folder(stage: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> Path:
    """--out, or runs/NAME where NAME lists the flags that differ from the defaults and change what is computed."""
    if args.out:
        return Path(args.out)
    told = {name: value for name, value in sorted(vars(args).items())
            if value != parser.get_default(name) and name not in FREE_FLAGS - {"data", "amp"}}
    if "data" in told:
        told["data"] = Path(told["data"]).name
    name = re.sub(r"[^\w.=+-]+", "-", "_".join([stage] + [f"{flag}={value}" for flag, value in told.items()]))
    if len(name) > 120:
        name = name[:110] + "-" + hashlib.sha256(repr(told).encode()).hexdigest()[:8]
    return Path("runs", name)


def open_run(folder: Path, args: argparse.Namespace, steps_per_epoch: int) -> dict | None:
    """Makes the run folder and its args.json -> the state to go on from, or None for a new run.

    UserError where another process works in the folder, or it holds a run with other flags or another number of images.
    """
    if is_first():
        make_folder(folder)
        lock(folder)
        for unfinished in folder.glob("*.tmp"):      # of a process that was killed while it wrote
            unfinished.unlink()
    last = folder / "last.pt"
    state = None
    if last.exists():
        try:
            state = load_checkpoint(last)
        except ValueError as error:
            raise UserError(f"{error}; remove it to begin anew") from error
        missing = {"optimizer", "scaler", "step", "skipped", "steps_per_epoch"} - state.keys()
        if missing:
            raise UserError(f"{last} cannot be gone on from: it lacks {', '.join(sorted(missing))}, as do checkpoints that are not "
                            "a run's last.pt, or of another version; remove it to begin anew")
        mine, theirs = plain(vars(args)), state["args"]
        differ = [f"{flag(name)} was {theirs.get(name)}, is {mine.get(name)}" for name in sorted(mine.keys() | theirs.keys())
                  if name not in FREE_FLAGS and mine.get(name) != theirs.get(name)]
        if differ:
            raise UserError(f"{folder} holds a run with other flags ({'; '.join(differ)}): "
                            "give the same flags to go on, or another --out")
        if state["steps_per_epoch"] != steps_per_epoch:
            raise UserError(f"{folder} holds a run with {state['steps_per_epoch']} steps an epoch, {args.data} gives "
                            f"{steps_per_epoch}: was it another --data?")
        if is_first() and mine["amp"] != theirs.get("amp"):
            print(f"{folder}: --amp was {theirs.get('amp')}, is {mine['amp']} from step {state['step']} on", flush=True)
    if is_first():
        write(folder / "args.json", lambda file: file.write((json.dumps(plain(vars(args)), indent=1) + "\n").encode()))
        cut_log(folder / "log.jsonl", state["step"] if state else 0)
    return state


def make_folder(folder: Path):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}") from error


LOCKS = {}      # a lock file stays locked as long as it is open, whatever ends its process


def lock(folder: Path):
    """Keeps other processes out of the run folder. (POSIX locks: the loader's processes do not inherit them.)"""
    path = folder.resolve() / ".lock"
    if path in LOCKS:
        return
    try:
        file = open(path, "a+")
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):      # a file system without locks
            return
        file.seek(0)
        raise UserError(f"another run works in {folder} ({file.read().strip()}): wait for it, or give another --out") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    LOCKS[path] = file


def unlock(folder: Path):
    file = LOCKS.pop(folder.resolve() / ".lock", None)
    if file:
        file.close()


def resume(state: dict | None, model: nn.Module, optimizer, scaler, device: torch.device) -> tuple[Skips, int]:
    """Puts `state` back where there is one -> (the count of skipped updates, the step to go on from)."""
    if state is None:
        return Skips(0, device), 0
    try:
        model.load_state_dict(state["model"])
        on_cpu = device.type == "cpu"      # there the optimizer would keep what was read, which is still a part of the file
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]) if on_cpu else state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"last.pt does not fit the model of these flags ({first_line(error)}); remove it to begin anew") from error
    if state["scaler"]:      # empty where the run was not in fp16 so far
        scaler.load_state_dict(state["scaler"])
    return Skips(state["skipped"], device), state["step"]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def plain(args: dict) -> dict:
    """Flags as numbers, strings and lists: what a checkpoint with weights_only=True may hold."""
    return {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in args.items()}


def save(path: Path, **state):
    """Writes a checkpoint whole or not at all. The first process only. UserError where anything in it is not finite."""
    if not all_finite(state):
        last = path.with_name("last.pt")
        raise UserError(f"step {state.get('step')}: a weight, or a state of the optimizer, is not finite. "
                        f"{f'{last} is good' if last.exists() else 'Nothing was saved yet'}. "
                        "To try: a lower --lr, a smaller --weight-decay, --clip-grad 1")
    if is_first():
        write(path, lambda file: torch.save(state, file))


def write(path: Path, fill):
    """Writes a file whole or not at all: `fill` gets a temporary one beside it, which is then renamed.

    UserError where that fails, as on a full disk; what was there before is still there.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:      # torch.save makes either of a full disk
        with contextlib.suppress(OSError):
            temporary.unlink()
        cause, last = error, path.with_name("last.pt")
        while cause.__context__ and not isinstance(cause, OSError):      # torch's own words hide the system's
            cause = cause.__context__
        stays = (f"{last} is still there, as good as before: when there is space, the same command goes on from it" if last.exists() else
                 "Nothing was saved before")
        raise UserError(f"cannot write {path} ({getattr(cause, 'strerror', None) or first_line(cause)}). {stays}", everywhere=True) from error


# ---------------------------------------------------------------------------------------------------------- long runs

class Watch:
    """Keeps a run's last.pt: saves by the clock too, leaves on SIGTERM or SIGUSR1, stops when the numbers go wrong.

    After each step the processes agree on a CPU tensor, over gloo: none waits for its device, and all leave together.
    """

    def __init__(self, args: argparse.Namespace, process: Process, step: int):
        self.last, self.minutes, self.world = Path(args.out) / "last.pt", args.save_minutes, process.world
        self.step = step                # of the last.pt that is there
        self.saved, self.cost = time.monotonic(), 0.0       # when that was written, and how many seconds it took
        self.caught, self.signal = None, 0
        for number in SIGNALS:
            signal.signal(number, self.catch)

    def catch(self, number: int, frame):
        self.caught = self.caught or (number, time.monotonic())      # a second signal changes nothing

    def __call__(self, scheduled: bool) -> bool:
        """Whether to save after this step: because the schedule, the clock or a signal says so. The same in all processes."""
        overdue = is_first() and 0 < 60 * self.minutes <= time.monotonic() - self.saved
        says = torch.tensor([overdue, self.caught[0] if self.caught else 0])
        if self.world > 1:
            dist.all_reduce(says, dist.ReduceOp.MAX)
        overdue, self.signal = says.tolist()
        return bool(scheduled or overdue or self.signal)

    def check(self, step: int, line: dict):
        """UserError where the last PATIENCE updates were all skipped. `line` is the log's, the same in all processes."""
        if line["skipped_in_a_row"] >= PATIENCE:
            raise UserError(f"step {step}: {PATIENCE} updates in a row had no finite gradient. {self.good()} To try: go on with "
                            f"--out {self.last.parent} and --amp bf16 or off; or anew, with another --out, with a lower --lr, a "
                            "longer warm-up or a smaller --clip-grad")

    def good(self) -> str:
        return f"{self.last} is good, of step {self.step}." if self.last.exists() else "Nothing was saved yet."

    def save(self, step: int, **state):
        """Writes last.pt of `step`. Where a signal has come, leaves then, with exit code 0.

        torchrun kills some time after it passed SIGTERM on: a save that takes longer is not begun.
        """
        left = self.time_left()
        if self.cost > left:
            print(f"{signal.Signals(self.caught[0]).name}: not saved, for that takes {self.cost:.0f} s and torchrun gives {left:.0f} s. "
                  f"{self.good()}", flush=True)
        else:
            start = time.monotonic()
            save(self.last, step=step, **state)
            self.step, self.saved, self.cost = step, time.monotonic(), time.monotonic() - start
            if self.signal and is_first():
                print(f"{signal.Signals(self.signal).name}: saved {self.last} of step {step}. The same command goes on from there.",
                      flush=True)
        if self.signal:
            sys.exit(0)

    def time_left(self) -> float:
        """Seconds until torchrun kills this process; no limit before a signal, nor without torchrun."""
        if not self.caught or "TORCHELASTIC_RUN_ID" not in os.environ or not is_first():
            return math.inf
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) - (time.monotonic() - self.caught[1])

    def close(self):
        """The run is over: signals do what they always do, and the folder is free."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        unlock(self.last.parent)


SIGNALS = signal.SIGTERM, signal.SIGUSR1      # how schedulers announce that they will kill
PATIENCE = 20                                 # skipped updates in a row; fp16's scaler needs fewer to find its scale


def all_finite(state: dict) -> bool:
    """Whether all tensors of nested dicts are finite; waits for the device once."""
    finite, parts = [], [state]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, Tensor):
            finite.append(part.isfinite().all())
    return not finite or bool(torch.stack([part.to(finite[0].device) for part in finite]).all())


# ---------------------------------------------------------------------------------------------------------------- log

def cut_log(path: Path, step: int):
    """Drops the lines after `step`, which a run that goes on from there writes again, and broken ones."""
    if path.exists():
        kept = []
        for line in path.read_text().splitlines(keepends=True):
            with contextlib.suppress(json.JSONDecodeError):      # half a line of a process that was killed
                if json.loads(line)["step"] <= step and line.endswith("\n"):
                    kept.append(line)
        write(path, lambda file: file.write("".join(kept).encode()))


class Log:
    """Adds up each step's metrics on the device; `write` is the one place where the host waits for them."""

    def __init__(self, path: Path, step: int, world: int):
        self.path, self.step, self.world, self.sums, self.counts = path, step, world, {}, {}
        self.restart_clock()

    def restart_clock(self):
        self.since, self.waited = time.perf_counter(), 0.0

    def waiting(self, batches):
        """Passes `batches` on, and adds up how long the loop waits for them."""
        batches, done = iter(batches), object()
        while True:
            start = time.perf_counter()
            batch = next(batches, done)
            self.waited += time.perf_counter() - start
            if batch is done:
                return
            yield batch

    def add(self, metrics: dict[str, Tensor]):
        """metrics: detached scalars or vectors by name; their means are written."""
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
            self.counts[name] = self.counts.get(name, 0) + 1

    def write(self, step: int, batch_size: int, **extra) -> dict:
        """Appends the means since the last line, over all processes, to log.jsonl, and returns them."""
        means = torch.cat([(total / self.counts[name]).float().reshape(-1) for name, total in self.sums.items()])
        split = mean_over_processes(means, self.world).cpu().split([total.numel() for total in self.sums.values()])
        line = {"step": step, **extra} | {name: mean.tolist() if total.ndim else mean.item()
                                          for (name, total), mean in zip(self.sums.items(), split)}
        seconds = time.perf_counter() - self.since
        line |= {"images_per_second": batch_size * (step - self.step) / seconds, "loader_wait": self.waited / seconds}
        self.step, self.sums, self.counts = step, {}, {}
        self.restart_clock()
        self.append(line)
        return line

    def append(self, line: dict):
        if is_first():
            try:
                with open(self.path, "a") as file:
                    file.write(json.dumps(rounded(line)) + "\n")
            except OSError as error:
                raise UserError(f"cannot write {self.path} ({error.strerror})", everywhere=True) from error


class Laps:
    """Times the parts of each step on the device's own clock, without making the host wait: the stopwatch of --bench."""

    def __init__(self, device: torch.device):
        self.cuda, self.marks = device.type == "cuda", []

    def __call__(self, step: int, part: str):
        """Everything since the last call was `part` of `step`."""
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.append((step, part, now))

    def medians(self, first: int) -> dict[str, float]:
        """Milliseconds of each part and of the whole "step", medians over the steps from `first` (which is not 0)."""
        if self.cuda:
            torch.cuda.synchronize()
        steps = {}
        for (_, _, start), (step, part, end) in zip(self.marks, self.marks[1:]):
            spent = start.elapsed_time(end) if self.cuda else 1000 * (end - start)
            for name in (part, "step"):
                steps.setdefault(step, {}).setdefault(name, []).append(spent)
        totals = [{name: sum(spent) for name, spent in parts.items()} for step, parts in steps.items() if step >= first]
        return {name: float(np.median([parts[name] for parts in totals])) for name in totals[0]}


def peak_memory(device: torch.device) -> float:
    """GiB at most so far: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2 ** (30 if sys.platform == "darwin" else 20)          # macOS counts bytes, Linux KiB


def rounded(value):
    """Six digits are enough for a log; what is not finite becomes null, for JSON has no word for it."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
