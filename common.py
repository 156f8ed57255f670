"""What the stages share: flags, the machine, optimization, transfer recipes, and the bookkeeping of a run."""

import argparse
import contextlib
import fcntl
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from checkpoint import LoadError, first_line, load_checkpoint
from model import ViT

# Flags that may change when a run resumes: they say where, how fast or how long it works, not what it
# computes. --amp can save a run whose numbers went wrong; of data and CHECKPOINT, the contents must stay.
FREE_FLAGS = {"data", "checkpoint", "out", "workers", "micro_batch", "compile", "recompute", "amp",
              "save_every", "save_minutes", "max_steps"}
# The numbers that a flag takes; of the others, whole numbers start at 1 and fractions at 0
RANGES = dict(seed="[0, 4294967296)", workers="[0, inf)", experts="[0, inf)", moe_blocks="[0, inf)",
              block="[0, inf)", loss_block="[0, inf)", mask_ratio="(0, 1)", drop_path="[0, 1)",
              expert_dropout="[0, 1)", betas="[0, 1)", layer_decay="(0, 1]", temperature="(0, inf)")
SOURCES = {"teacher": "the weights of --teacher", "encoder": "the weights in CHECKPOINT",
           "images": "the class or file names in --data"}      # what a run is made of besides its flags
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
LOG_EVERY = 20      # steps
PATIENCE = 20       # skipped updates in a row; fp16's scaler settles in fewer


class UserError(Exception):
    """A user error, printed as one line; exit code 2."""


class LocalError(UserError):
    """One that a single process may meet, such as a broken image: that process prints it."""


def run(main, args: argparse.Namespace):
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


# --------------------------------------------------------------------------------------------------- run

class Log:
    """log.jsonl: the means of metrics since its last line, over all processes, and speed and memory."""

    def __init__(self, path: Path, machine: Machine, step: int, batch_size: int):
        self.path, self.machine, self.batch_size = path, machine, batch_size
        self.restart(step)

    def restart(self, step: int):
        """After `step`; evaluation and saving do not count as training."""
        self.step, self.metrics, self.waited, self.since = step, [], 0.0, time.perf_counter()

    def add(self, metrics: dict[str, Tensor]):
        """Keeps detached scalars and vectors on the device."""
        self.metrics.append(metrics)

    def waiting(self, batches):
        """Passes `batches` on, and adds up how long the loop waits for them."""
        start = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def means(self, step: int) -> dict:
        """A line for `step`. The one place where the host waits for the device."""
        line = {}
        for name in dict.fromkeys(name for metrics in self.metrics for name in metrics):
            mean = torch.stack([metrics[name] for metrics in self.metrics if name in metrics]).float().mean(0)
            line[name] = (self.machine.sum(mean) / self.machine.world).tolist()
        seconds, steps = time.perf_counter() - self.since, step - self.step
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if self.machine.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        return line | {"step": step, "skipped": round(line["skipped"] * steps), "memory_gib": peak / 2 ** 30,
                       "images_per_second": self.batch_size * steps / seconds,
                       "loader_wait": self.waited / seconds}

    def write(self, line: dict):
        if is_first():
            with open(self.path, "a") as file:
                file.write(json.dumps(plain(line)) + "\n")

    def forget(self, step: int):
        """Drops the lines of steps above `step`, which a killed run did but did not save; they come again."""
        if self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(line for line in whole if json.loads(line)["step"] <= step))
            os.replace(temporary, self.path)


@contextlib.contextmanager
def stop_requests(received: list[int]):
    """Collects the signals that ask to finish the step, save and leave; a second Ctrl-C leaves at once.

    What is ignored stays so, such as SIGHUP under nohup.
    """
    def receive(number, frame):
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    handlers = [signal.signal(number, receive) for number in heard]
    try:
        yield
    finally:
        for number, handler in zip(heard, handlers):
            signal.signal(number, handler)


class Run:
    """A training run in its folder: it resumes from last.pt, logs, saves, and leaves when it is asked to.

    `parts` are what a checkpoint consists of: model, optimizer, ...; `encoder` are the arguments that rebuild
    the encoder; `sources` are digests of what the run is made of besides its flags, by the names in SOURCES.
    """

    def __init__(self, args: argparse.Namespace, machine: Machine, plan: Plan, encoder: dict,
                 sources: dict[str, str], **parts):
        self.args, self.machine, self.plan, self.folder = args, machine, plan, Path(args.out)
        self.parts = parts | {"scaler": machine.scaler}
        kinds = {type(module) for module in parts["model"].modules()}      # SyncBatchNorm spans processes
        if plan.micro_batch == 1 and kinds & {nn.BatchNorm1d, nn.BatchNorm2d}:
            raise UserError("--micro-batch 1: BatchNorm needs at least 2 images")
        self.description = {"encoder": encoder, "args": vars(args), "sources": sources}
        self.best, self.line, self.skipped, self.signals = {}, {}, 0, []
        self.saved_at, self.good = time.monotonic(), "nothing was saved yet"
        self.lock = lock(self.folder) if is_first() else contextlib.nullcontext()
        self.first = self.resume()
        self.last = max(self.first, min(plan.steps, args.max_steps or plan.steps))
        self.log = Log(self.folder / "log.jsonl", machine, self.first, args.batch_size)
        if is_first():
            self.log.forget(self.first)

    def resume(self) -> int:
        """Loads last.pt, where there is one -> the first step to do, the same in all processes."""
        last, step, problem = self.folder / "last.pt", 0, None
        try:
            if last.exists():
                state = load_checkpoint(last)
                self.refuse_changes(state)
                if state["scaler"]["growth_factor"] != self.machine.scaler.get_growth_factor():
                    state["scaler"] = self.machine.scaler.state_dict()      # of another precision
                for name, part in self.parts.items():
                    part.load_state_dict(state[name])
                step, self.best = state["step"], state["best"]
                self.good = f"{last} holds step {step}"
        except UserError as error:
            step, problem = -1, error
        except (KeyError, RuntimeError, ValueError) as error:
            message = f"cannot resume from {last} ({first_line(error)}); remove it to start over"
            step, problem = -1, UserError(message)
        highest, lowest = self.machine.largest(step, -step)
        if problem:
            raise problem
        if highest != -lowest:
            raise UserError("not all processes see the same last.pt: --out must be on a disk that all "
                            "machines share")
        return step

    def refuse_changes(self, state: dict):
        """What a run was made of does not change under it."""
        new, old = self.description["args"], state["args"]
        if new["stage"] != old.get("stage"):
            raise UserError(f"{self.folder} holds a run of {old.get('stage')}.py: give another --out")
        changes = [f"{flag(name)} was {old.get(name)}, is {new.get(name)}" for name in sorted(new | old)
                   if name not in FREE_FLAGS and new.get(name) != old.get(name)]
        changes += [f"{SOURCES[name]} changed" for name, value in self.description["sources"].items()
                    if value != state["sources"].get(name)]
        if changes:
            raise UserError(f"{self.folder} holds another run ({'; '.join(changes)}): give the same flags "
                            "and files to resume, or another --out")

    def announce(self, *what: str):
        """The first lines that a run prints."""
        if is_first():
            (self.folder / "args.json").write_text(json.dumps(vars(self.args), indent=1) + "\n")
            precision = str(self.machine.amp or torch.float32).removeprefix("torch.")
            plan, machine = self.plan, self.machine
            steps = f"steps {self.first} to {self.last} of {plan.steps}, {plan.epoch_steps} an epoch"
            what = "; ".join([*what, steps, f"{machine.world} x {machine.device.type} in {precision}"])
            print(f"{self.args.stage}: {what}\n{self.folder}: {self.good}", flush=True)

    def steps(self):
        """Yields the steps to do, with a progress bar."""
        bar = tqdm(range(self.first, self.last), self.args.stage, self.last, initial=self.first, unit="step",
                   disable=not is_first())
        with stop_requests(self.signals), bar, self.lock:
            for step in bar:
                yield step
                if self.line:
                    names = self.args.objective.split("_") if "objective" in self.args else ["loss"]
                    shown = {name: self.line[name] for name in names} | self.best
                    bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items()}, refresh=False)

    def end_step(self, step: int, evaluate=None) -> dict:
        """A log line every 20 steps; a checkpoint by schedule, clock or signal. -> the line, or nothing

        By the schedule, `evaluate` returns scores by name, and best.pt keeps the step whose first score is
        the highest. Without it, the schedule keeps an epoch_NNNN.pt.
        """
        done, epoch_steps, args = step + 1, self.plan.epoch_steps, self.args
        every = args.save_every * (epoch_steps if "epochs" in args else 1)
        scheduled = done % every == 0 or done == self.plan.steps
        overdue = 0 < 60 * args.save_minutes <= time.monotonic() - self.saved_at
        overdue, number = self.machine.largest(overdue, max(self.signals, default=0))
        saves = scheduled or overdue or number or done == self.last
        if not saves and done % LOG_EVERY:
            return {}
        group, steps = self.parts["optimizer"].param_groups[0], done - self.log.step
        self.line = self.log.means(done)
        self.line |= {"epoch": done / epoch_steps, "lr": group["lr"] / group["lr_scale"]}
        if scheduled and evaluate:
            scores = evaluate()
            self.line |= scores
            if next(iter(scores.values())) > next(iter(self.best.values()), -1.0):
                self.best = scores
                self.save("best.pt", done)
        elif scheduled:
            self.save(f"epoch_{done // epoch_steps:04d}.pt", done)
        self.log.write(self.line)
        self.skipped = self.skipped + steps if self.line["skipped"] == steps else 0
        if self.skipped >= PATIENCE:
            problem = f"step {done}: {self.skipped} updates in a row had no finite gradient; {self.good}"
            raise UserError(f"{problem}. To try: resume with --amp bf16 or off, or restart with a lower --lr")
        if saves:
            self.save("last.pt", done, tuple(self.parts))
            self.saved_at, self.good = time.monotonic(), f"{self.folder / 'last.pt'} holds step {done}"
        if number:
            if is_first():
                print(f"{signal.Signals(number).name}: {self.good}; the same command resumes", flush=True)
            leave_group()      # all processes are here
            sys.exit(130 if number == signal.SIGINT else 0)
        self.log.restart(done)
        return self.line

    def save(self, name: str, step: int, parts=("model",)):
        """Writes a checkpoint of `parts` whole or not at all, and never one that holds a NaN."""
        state = {part: self.parts[part].state_dict() for part in parts}
        if self.machine.largest(not finite(state))[0]:      # all processes stop, or none
            raise UserError(f"step {step}: the model or the optimizer holds a NaN or infinity; {self.good}. "
                            "To try: a lower --lr, a smaller --weight-decay, --clip-grad 1")
        if is_first():
            temporary = self.folder / f"{name}.tmp"
            with open(temporary, "wb") as file:
                torch.save(state | self.description | {"step": step, "best": self.best}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / name)

    def report(self, *what: str) -> dict[str, float]:
        """Prints the last line of a run -> the best scores"""
        parts = [f"step {self.last} of {self.plan.steps}"]
        if self.line:
            parts.append("{images_per_second:.0f} images/s, {loader_wait:.0%} of the time waiting for them, "
                         "{memory_gib:.1f} GiB".format(**self.line))
        if self.best:
            parts.append("best " + ", ".join(f"{name} {value:.2f}%" for name, value in self.best.items()))
        if is_first():
            print(f"{self.folder}: {'; '.join([*parts, *what])}")
        return self.best


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


def finite(state) -> bool:
    """Whether all tensors of nested dicts are finite."""
    if isinstance(state, dict):
        return all(finite(value) for value in state.values())
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def plain(value):
    """For JSON: six digits of each number, and null for what is not finite, which JSON has no word for."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"),
                      parse_constant=lambda text: None)
