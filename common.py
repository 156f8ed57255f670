"""What the stages share: flags, process group, optimizer, recipes, and the bookkeeping of a training run."""

import argparse
import contextlib
import copy
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from model import LoadError, first_line, load_checkpoint

# Flags that say where, how fast or how long a run works, not what it computes, may change when it resumes. So
# may the precision, which can save a run whose numbers went wrong.
FREE_FLAGS = {"data", "out", "workers", "micro_batch", "compile", "recompute", "amp", "save_every",
              "save_minutes", "max_steps", "demo", "eval_only", "bench"}
LOG_EVERY = 20                                # steps
PATIENCE = 20                                 # skipped updates in a row; fp16's scaler settles in fewer
SIGNALS = signal.SIGTERM, signal.SIGUSR1      # how schedulers announce that they will kill


class UserError(Exception):
    """Something that the user can put right: one line that names the flag or file, exit code 2."""


class FileError(UserError):
    """A file that cannot be read. The process that meets it says so, whichever it is."""


def run(main, args: argparse.Namespace):
    """What a script's `__main__` calls."""
    script = Path(sys.argv[0]).name
    try:
        main(args)
        if dist.is_initialized():      # not after an error: the other processes would never come
            dist.barrier()             # older Gloos deadlock if destroyed while they release a tensor
            dist.destroy_process_group()
    except (UserError, LoadError) as error:      # each machine says it, for it may concern one of them alone
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 or isinstance(error, FileError):
            message = str(error).split("FileError: ")[-1].strip()      # after a loader process's traceback
            print(f"{script}: error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{script}: stopped. The same command resumes training from last.pt.", file=sys.stderr)
        sys.exit(130)


# ------------------------------------------------------------------------------------------------- flags

def add_common_flags(parser: argparse.ArgumentParser, batch_size: int, seed: bool = True,
                     batches: str = "images per step, over all processes",
                     compiles: bool = True, out: str = "default: runs/NAME, made of the flags that matter"):
    group = parser.add_argument_group("input, output, machine")
    group.add_argument("--data", default=os.environ.get("IMAGENET", "data/imagenet"), metavar="FOLDER",
                       help="folder with {train,val}/CLASS/*.jpg, or cifar10, food101 (downloaded to data/), "
                            "shapes (drawn on the fly); default: $IMAGENET, else data/imagenet")
    group.add_argument("--out", help=f"folder for the results ({out})")
    group.add_argument("--batch-size", type=int, default=batch_size,
                       help=f"{batches} (default: %(default)s)")
    group.add_argument("--workers", type=int, metavar="N", help="loader processes for each training process "
                       "(default: its share of the cores, at most 16)")
    group.add_argument("--amp", choices=("fp16", "bf16", "off"), default="fp16",
                       help="precision of matrix products (default: %(default)s; without CUDA, off)")
    if compiles:
        group.add_argument("--compile", action=argparse.BooleanOptionalAction,
                           help="torch.compile: slower to start, faster steps (default: on CUDA)")
    if seed:
        group.add_argument("--seed", type=int, default=42, help="default: %(default)s")


def add_trainer_flags(parser: argparse.ArgumentParser, *, unit: str = "epochs", length: int, warmup: float,
                      drop_path: float | None = None, **rates: float):
    """A run counts in "epochs" or "iterations". A default warm-up keeps its share of another length."""
    parser.set_defaults(warmup_share=warmup / length)
    group = parser.add_argument_group("optimization (AdamW)")
    group.add_argument(f"--{unit}", type=int, default=length, metavar="N", help="default: %(default)s")
    group.add_argument(f"--warmup-{unit}", type=float, metavar="N",
                       help=f"linear warm-up (default: {warmup} of {length} {unit}, and in proportion)")
    group.add_argument("--micro-batch", type=int, metavar="N",
                       help="images of one forward pass of one process; gradients accumulate to --batch-size "
                            "(default: the largest divisor of a process's share up to 256)")
    for name, text in dict(lr="peak learning rate, absolute", min_lr="final learning rate",
                           weight_decay="weight decay, except for biases, norms, positions and tokens",
                           clip_grad="largest gradient norm, 0 for no clipping").items():
        group.add_argument(flag(name), type=float, default=rates[name], metavar="X",
                           help=f"{text} (default: %(default)s)")
    if drop_path is not None:
        group.add_argument("--drop-path", type=float, default=drop_path, metavar="P",
                           help="stochastic depth of the last block, rising from 0 (default: %(default)s)")
    group.add_argument("--save-every", type=int, default=10 if unit == "epochs" else 8000, metavar="N",
                       help=f"{unit} between evaluations and kept checkpoints (default: %(default)s)")
    group.add_argument("--save-minutes", type=float, default=30.0, metavar="MINUTES",
                       help="write last.pt after so many minutes as well, 0 for never (default: %(default)g)")
    group.add_argument("--max-steps", type=int, metavar="N",
                       help="stop after step N of the schedule; the same command without it resumes")


RECIPES = ("fr", "fa", "exd")


def add_recipe_flags(parser: argparse.ArgumentParser, layer_decay: float):
    group = parser.add_argument_group("transfer")
    group.add_argument("--recipe", nargs="+", choices=(*RECIPES, "none"), metavar="R",
                       help="fr: freeze phi and scale; fa: freeze attention; exd: drop whole experts; none "
                            "(default: fr fa exd with experts, else none)")
    group.add_argument("--expert-dropout", type=float, metavar="P",
                       help="probability of --recipe exd (default: 0.4)")
    group.add_argument("--layer-decay", type=float, default=layer_decay, metavar="D",
                       help="learning-rate factor from each block to the one below (default: %(default)s)")
    return group


# The numbers that a flag takes; of the others, whole numbers start at 1 and fractions at 0
RANGES = {
    "seed": "[0, 4294967296)", "workers": "[0, inf)", "experts": "[0, inf)", "entropy_experts": "[0, inf)",
    "block": "[0, inf)", "moe_blocks": "[0, inf)", "loss_block": "[0, inf)", "mask_ratio": "(0, 1)",
    "drop_path": "[0, 1)", "expert_dropout": "[0, 1)", "betas": "[0, 1)", "layer_decay": "(0, 1]",
    "temperature": "(0, inf)"}


def in_range(number: float, interval: str) -> bool:
    """in_range(0.0, "[0, 1)") is True. NaN is in no interval."""
    low, high = map(float, interval[1:-1].split(","))
    return low < number < high or number == (low if "[" in interval else high if "]" in interval else math.nan)


def parse(parser: argparse.ArgumentParser, argv: list[str] | None, stage: str | None = None):
    """Parses, refuses numbers out of range, names a stage's run folder after the flags that matter."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            interval = RANGES.get(name, "[1, inf)" if type(number) is int else "[0, inf)")
            if type(number) in (int, float) and not in_range(number, interval):
                parser.error(f"{flag(name) if len(name) > 1 else '-k'} {number} is outside {interval}")
    if stage and not args.out:
        differ = {name: "+".join(map(str, value)) if isinstance(value, list) else value
                  for name, value in sorted(vars(args).items())
                  if value != parser.get_default(name) and name not in FREE_FLAGS - {"data", "amp"}}
        differ |= {"data": Path(args.data).name} if "data" in differ else {}
        name = "_".join([stage, *(f"{name}={value}" for name, value in differ.items())])
        name = re.sub(r"[^\w.=+-]+", "-", name)
        if len(name) > 120:
            name = f"{name[:110]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        args.out = f"runs/{name}"
    return args


def given(parser: argparse.ArgumentParser, argv: list[str] | None, args: argparse.Namespace) -> set[str]:
    """The flags that `argv` names, whether or not their values are the defaults."""
    unset = argparse.Namespace(**dict.fromkeys(vars(args), parser))      # any value that no flag can have
    return {name for name, value in vars(parser.parse_args(argv, unset)).items() if value is not parser}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# --------------------------------------------------------------------------------------------- processes

def is_first() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


class Process:
    """This process among torchrun's: rank, world, device, and `amp`, autocast's dtype (None: full precision).

    Fills in what `args` left to the machine: --workers and --compile.
    """

    def __init__(self, args: argparse.Namespace):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if cuda:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        if args.amp == "fp16" and not cuda:      # bf16 is a hundred times slower on CPUs without units for it
            args.amp = "off"
            if is_first():
                print("no CUDA: --amp fp16 becomes off (float32); --amp bf16 is for CPUs with bf16 units")
        if args.workers is None:
            linux = hasattr(os, "sched_getaffinity")      # macOS has none
            cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
            args.workers = min(16, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        if getattr(args, "compile", False) is None:
            args.compile = cuda
        self.amp = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[args.amp]

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None)

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def share_buffers(self, model: nn.Module):
        """BatchNorm's statistics of the first process for all, so that they evaluate the same model."""
        for buffer in model.buffers() if self.world > 1 else ():
            dist.broadcast(buffer, 0)


@contextlib.contextmanager
def one_after_another():
    """For downloads: the first process goes alone, then the first of each other machine, which may share its
    disk or not, then the rest. They wait for a day: the process group's 30 minutes may not do.
    """
    turn = 0 if is_first() else 1 if int(os.environ.get("LOCAL_RANK", 0)) == 0 else 2
    if dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        for _ in range(turn):
            dist.barrier(group)
    yield
    if dist.is_initialized():
        for _ in range(2 - turn):
            dist.barrier(group)


def seed_everything(*key: int):
    """Seeds torch by `key`: (seed,) for the weights, (seed, step, rank) for a step's drop path."""
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1)


# ------------------------------------------------------------------------------------------ optimization

def sizes(args: argparse.Namespace, world: int, images: int) -> tuple[int, int, int]:
    """-> (micro-batch, micro-steps of a step, steps of an epoch)"""
    if args.batch_size % world:
        raise UserError(f"--batch-size {args.batch_size} is not a multiple of the {world} processes")
    if images < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: {args.data} has only {images} training images")
    share = args.batch_size // world
    micro = args.micro_batch or max(n for n in range(1, min(share, 256) + 1) if share % n == 0)
    if share % micro:
        raise UserError(f"--micro-batch {micro} does not divide the {share} images that each of {world} "
                        f"processes has of --batch-size {args.batch_size}")
    return micro, share // micro, images // args.batch_size


def schedule(args: argparse.Namespace, epoch_steps: int) -> tuple[int, int]:
    """-> (steps of the whole run, warm-up steps)"""
    unit, unit_steps = ("epochs", epoch_steps) if "epochs" in args else ("iterations", 1)
    length, warmup = getattr(args, unit), getattr(args, f"warmup_{unit}")
    warmup = length * args.warmup_share if warmup is None else warmup
    if warmup >= length:
        raise UserError(f"--warmup-{unit} {warmup:g} leaves nothing of --{unit} {length}")
    return length * unit_steps, round(warmup * unit_steps)


def learning_rate(step: int, steps: int, warmup: int, peak: float, floor: float, linear=False) -> float:
    """From peak / warmup at step 0 to the peak at step warmup - 1, then by cosine or line to the floor."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step + 1 - warmup) / (steps - warmup)
    if linear:
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def decays(name: str, parameter: Tensor) -> bool:
    """No weight decay on biases (the experts' b1, b2 too), norms, LayerScale, `scale`, positions, tokens."""
    undecayed = ("b1", "b2", "pos_embed", "cls_token", "mask_token")
    return parameter.ndim > 1 and name.split(".")[-1] not in undecayed


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float],
          lr_scale=lambda name: 1.0) -> torch.optim.AdamW:
    """AdamW over what is not frozen; parameter `name` learns at lr_scale(name) times `set_rate`'s rate."""
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((decays(name, parameter), lr_scale(name)), []).append(parameter)
    groups = [dict(params=parameters, weight_decay=weight_decay if decay else 0.0, lr_scale=scale)
              for (decay, scale), parameters in groups.items()]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def update(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clip_grad: float) -> dict:
    """Clips, steps, clears the gradients -> metrics on the device. Nothing here waits for it: where a
    gradient is not finite, the scaler tells fused AdamW to skip the update.
    """
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, clip_grad or math.inf)
    for found in scaler._found_inf_per_device(optimizer).values():      # finite gradients of an infinite norm
        found.logical_or_(~norm.isfinite())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=not dist.is_initialized())      # DDP's are views of its buckets
    return {"grad_norm": norm, "skipped": (~norm.isfinite()).float()}


def layer_scale(depth: int, decay: float):
    """Layer-wise decay: name -> rate factor. Embeddings are layer 0, block i is i + 1, then the rest."""
    def scale(name: str) -> float:
        name = name.removeprefix("encoder.")
        if name.startswith("blocks."):      # experts, phi and scale belong to their block
            layer = int(name.split(".")[1]) + 1
        else:
            layer = 0 if name.startswith(("patch_embed", "pos_embed", "cls_token")) else depth + 1
        return decay ** (depth + 1 - layer)
    return scale


def freeze(encoder: nn.Module, recipe: list[str]):
    """FR freezes each router's phi and scale, FA each attention's qkv and projection."""
    for name, parameter in encoder.named_parameters():
        routing, attention = name.endswith(("mlp.phi", "mlp.scale")), ".attn." in name
        parameter.requires_grad_(not ("fr" in recipe and routing or "fa" in recipe and attention))


def choose_recipe(args: argparse.Namespace, has_experts: bool) -> tuple[list[str], float]:
    """What --recipe means for this checkpoint -> (recipes, expert dropout). Says which have no effect."""
    recipe = args.recipe or (list(RECIPES) if has_experts else ["none"])
    if "none" in recipe and len(recipe) > 1:
        raise UserError(f"--recipe {' '.join(recipe)}: none excludes the others")
    ignored = [r for r in recipe if r in ("fr", "exd") and not has_experts]
    if ignored and is_first():
        print(f"{args.checkpoint or 'the model'} has no experts: --recipe {' '.join(ignored)} is ignored")
    recipe = [r for r in recipe if r not in ignored and r != "none"]
    if args.expert_dropout is not None and "exd" not in recipe:
        raise UserError("--expert-dropout needs --recipe exd and a checkpoint with experts")
    return recipe, 0.0 if "exd" not in recipe else 0.4 if args.expert_dropout is None else args.expert_dropout


# --------------------------------------------------------------------------------------------------- run

class Run(Process):
    """The bookkeeping of a training run: its folder, scaler, progress bar, log, checkpoints and signals.

    A stage calls `resume`, loops over `steps`, adds metrics with `log`, and ends each step with `after`.
    """

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.args, self.folder, self.best, self.signal = args, Path(args.out), {}, 0
        self.scaler = torch.amp.GradScaler(self.device.type)
        if args.amp != "fp16":      # then all it does is to skip updates that are not finite
            self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1.0)
            self.scaler.set_growth_factor(1.0)
            self.scaler.set_backoff_factor(1.0)
        self.sums, self.counts, self.skipped, self.parts, self.locked = {}, {}, 0, {}, None

    def parallel(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world > 1 else model

    def accumulating(self, model: nn.Module, micro_step: int, micro_steps: int):
        """Gradients of all processes meet in the last micro-step."""
        last = micro_step == micro_steps - 1
        return contextlib.nullcontext() if self.world == 1 or last else model.no_sync()

    def resume(self, encoder: dict, epoch_steps: int, sources: dict[str, str], **parts) -> int:
        """Takes the run folder and loads last.pt, where there is one, into `parts` -> the first step to do.

        `parts` are what a checkpoint consists of: model, optimizer, ...; `encoder` rebuilds the encoder.
        `sources` are digests of what the run is made of, by the flags that name it.
        """
        args = {name: list(x) if isinstance(x, tuple) else x for name, x in vars(self.args).items()}
        self.epoch_steps, self.parts = epoch_steps, parts | {"scaler": self.scaler}
        self.description = {"encoder": encoder, "args": args, "sources": sources}
        if is_first():
            self.lock()
        last, step, problem = self.folder / "last.pt", 0, None
        if last.exists():
            try:
                state = load_checkpoint(last)
                self.refuse_changes(state)
                if state["args"]["amp"] != args["amp"]:
                    state["scaler"] = self.scaler.state_dict()
                if self.device.type == "cpu":      # the optimizer would keep what is still a part of the file
                    state["optimizer"] = copy.deepcopy(state["optimizer"])
                for name, part in self.parts.items():
                    part.load_state_dict(state[name])
                step, self.best = state["step"], state["best"]
            except UserError as error:
                problem = error
            except (KeyError, RuntimeError, ValueError) as error:
                message = f"cannot resume from {last} ({first_line(error)}); remove it to start over"
                problem = UserError(message)
        steps = torch.tensor([-1, 1] if problem else [step, -step])
        if self.world > 1:
            dist.all_reduce(steps, dist.ReduceOp.MAX)
        if not problem and steps.sum():
            problem = UserError(f"not all processes see the same {last.name}: --out must be on a disk that all "
                                "machines share")
        if problem:
            self.unlock()
            raise problem
        if is_first():
            (self.folder / "args.json").write_text(json.dumps(args, indent=1) + "\n")
        return step

    def lock(self):
        """One run per folder, until its last step or the end of the process."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.locked = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT)
            fcntl.lockf(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            raise UserError(f"another run is using {self.folder}: wait, or give another --out") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):      # no locks on this disk
                raise UserError(f"--out {self.folder}: {error.strerror}") from error

    def unlock(self):
        if self.locked is not None:
            os.close(self.locked)
        self.locked = None

    def refuse_changes(self, state: dict):
        """What a run was made of does not change under it."""
        new, old = self.description["args"], state["args"]
        differ = [f"{flag(name)} was {old.get(name)}, is {new.get(name)}" for name in sorted(new | old)
                  if name not in FREE_FLAGS and new.get(name) != old.get(name)]
        differ += changed_sources(self.args, self.description["sources"], state)
        if differ:
            raise UserError(f"{self.folder} holds another run ({'; '.join(differ)}): give the same flags and "
                            "files to resume, or another --out")

    def save(self, name: str, step: int, parts=("model",)):
        """Writes a checkpoint of `parts` whole or not at all, and never one that holds a NaN."""
        state = {part: self.parts[part].state_dict() for part in parts}
        if self.sum(torch.tensor(int(not finite(state)))):      # all processes stop, or none
            raise UserError(f"step {step}: the model or the optimizer holds a NaN or infinity; {self.good()} "
                            "To try: a lower --lr, a smaller --weight-decay, --clip-grad 1")
        if is_first():
            temporary = self.folder / f"{name}.tmp"
            with open(temporary, "wb") as file:
                try:
                    torch.save(state | self.description | {"step": step, "best": self.best}, file)
                except RuntimeError as error:      # what PyTorch makes of a Ctrl-C while it writes
                    raise error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / name)

    def load_best(self, model: nn.Module, sources: dict[str, str]):
        """For --eval-only."""
        state = load_checkpoint(self.folder / "best.pt")
        if differ := changed_sources(self.args, sources, state):
            raise UserError(f"--eval-only: {self.folder / 'best.pt'} is of another run ({'; '.join(differ)})")
        try:
            model.load_state_dict(state["model"])
        except RuntimeError as error:
            message = f"--eval-only: {self.folder / 'best.pt'} is of another model: {first_line(error)}"
            raise UserError(message) from error

    def good(self) -> str:
        last = self.folder / "last.pt"
        return f"{last} is good." if last.exists() else "nothing was saved yet."

    def steps(self, first: int, last: int):
        """The steps to do. Meanwhile, SIGTERM and SIGUSR1 mean: finish the step, save and leave."""
        def catch(number, frame):
            self.signal = number

        for number in SIGNALS:
            if self.parts:      # a benchmark has nothing to save
                signal.signal(number, catch)
        self.logged, self.last, self.saved = first, last, time.monotonic()
        self.restart_clock()
        try:
            with tqdm(range(first, last), initial=first, total=last, desc=self.folder.name, unit="step",
                      disable=not is_first()) as self.bar:
                yield from self.bar
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self.unlock()

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

    def log(self, metrics: dict[str, Tensor]):
        """Adds up detached scalars and vectors on the device; log.jsonl gets their means."""
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
            self.counts[name] = self.counts.get(name, 0) + 1

    def after(self, step: int, evaluate=None) -> dict | None:
        """Ends a step: a log line every 20; a checkpoint by schedule, clock or signal. -> the log line

        `evaluate` is called by the schedule for scores by name; best.pt keeps the best of the first of them.
        Without it, the schedule keeps an epoch_NNNN.pt.
        """
        done, unit_steps = step + 1, self.epoch_steps if "epochs" in self.args else 1
        scheduled = done % (self.args.save_every * unit_steps) == 0 or done == self.last
        overdue = 0 < 60 * self.args.save_minutes <= time.monotonic() - self.saved
        agreed = torch.tensor([overdue, self.signal])      # on the CPU, over gloo: no device is waited for
        if self.world > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        overdue, number = agreed.tolist()
        saves = scheduled or overdue or number
        if not saves and done % LOG_EVERY:
            return None
        line = self.means(done)
        if scheduled and evaluate:
            scores = evaluate()
            line |= scores
            if next(iter(scores.values())) > next(iter(self.best.values()), -1.0):
                self.best = scores
                self.save("best.pt", done)
        elif scheduled and done % self.epoch_steps == 0:
            self.save(f"epoch_{done // self.epoch_steps:04d}.pt", done)
        if is_first():
            with open(self.folder / "log.jsonl", "a") as file:
                file.write(json.dumps(plain(line)) + "\n")
        shown = {name: line[name] for name in ("loss", "token", "cls") if name in line} | self.best
        self.bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items()})
        if self.skipped >= PATIENCE:
            raise UserError(f"step {done}: {self.skipped} updates in a row had no finite gradient; "
                            f"{self.good()} To try: resume with --amp bf16 or off, or start over with "
                            "a lower --lr")
        if saves:
            self.save("last.pt", done, tuple(self.parts))
            self.saved = time.monotonic()
        if number:
            if is_first():
                print(f"{signal.Signals(number).name}: saved {self.folder / 'last.pt'} of step {done}. The "
                      "same command resumes from there.", flush=True)
            sys.exit(0)
        self.restart_clock()
        return line

    def restart_clock(self):
        self.since, self.waited = time.perf_counter(), 0.0

    def means(self, done: int) -> dict:
        """A log line: means since the last one, over all processes. The one place where the host waits."""
        seconds, steps = time.perf_counter() - self.since, done - self.logged
        means = [(total / self.counts[name]).float().reshape(-1) for name, total in self.sums.items()]
        means = (self.sum(torch.cat(means)) / self.world).cpu().split([len(mean) for mean in means])
        means = {name: mean.tolist() if total.ndim else mean.item()
                 for (name, total), mean in zip(self.sums.items(), means)}
        means["skipped"] = round(means["skipped"] * steps)
        self.skipped = self.skipped + steps if means["skipped"] == steps else 0
        self.logged, self.sums, self.counts = done, {}, {}
        group = self.parts["optimizer"].param_groups[0]
        return means | {"step": done, "epoch": done / self.epoch_steps, "lr": group["lr"] / group["lr_scale"],
                        "images_per_second": self.args.batch_size * steps / seconds,
                        "loader_wait": self.waited / seconds}

    def report(self, what: str, scores: dict[str, float]) -> dict[str, float]:
        if is_first():
            scored = ", ".join(f"{name} {value:.2f}%" for name, value in scores.items())
            print(f"{self.folder}: {what} {scored}".strip())
        return scores


def digest(model: nn.Module) -> str:
    """A short hash of a few values of each of a model's tensors, which tells other weights apart.

    Not of position embeddings: they may have been resized, which does not give the same bits on every CPU.
    """
    sha = hashlib.sha256()
    for name, x in model.state_dict().items():
        if "pos" not in name:
            some = x.flatten()[::max(1, x.numel() // 16)]
            sha.update(f"{name} {tuple(x.shape)} {some.tolist()}".encode())
    return sha.hexdigest()[:16]


def changed_sources(args: argparse.Namespace, sources: dict[str, str], state: dict) -> list[str]:
    what = {"data": "the class or file names in --data", "teacher": "the weights of --teacher",
            "checkpoint": "the weights in CHECKPOINT"}
    return [f"{what[name]} {getattr(args, name)} are not those that it began with"
            for name, value in sources.items() if value != state["sources"].get(name)]


def finite(state) -> bool:
    """Whether all tensors of nested dicts are finite."""
    if isinstance(state, dict):
        return all(finite(value) for value in state.values())
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def plain(value):
    """For JSON: six digits of each number, and null for what is not finite, which JSON has no word for."""
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
