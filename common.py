"""What the stages share: errors, flags, processes and precision, the schedule, the optimizer."""

import argparse
import contextlib
import dataclasses
import difflib
import fcntl
import hashlib
import inspect
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint import LoadError

# Flags that may differ when a run resumes. They say where it finds its files, how fast it works
# or how long, but not what it computes; --amp is among them because another precision can save a
# run whose numbers overflow. What --data, --teacher and CHECKPOINT contain must not change, and
# `Run` compares that.
FREE_FLAGS = {"data", "teacher", "checkpoint", "out", "workers", "micro_batch", "compile",
              "recompute", "amp", "save_every", "save_minutes", "max_steps"}
# what a flag of one stage is called in another
SYNONYMS = (("epochs", "iterations"), ("iterations", "epochs"), ("image-size", "crop-size"),
            ("crop-size", "image-size"))
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


# ------------------------------------------------------------------------------- errors

class UserError(Exception):
    """An error that the user can mend. It is printed as one line, and the exit code is 2."""


class ReadError(UserError):
    """An image or annotation that cannot be read."""


def launch(main, args: argparse.Namespace):
    """Calls `main(args)` as a program: an error that the user can mend is one line, exit code 2."""
    script = Path(sys.argv[0]).name
    try:
        main(args)
        leave_group()
    except (UserError, LoadError, OSError) as error:
        if first_to_say(str(error)):
            print(f"{script}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{script}: stopped", file=sys.stderr)
        sys.exit(130)
    finally:
        # Loader processes ignore SIGTERM (see data.ignore_signals), which is what multiprocessing
        # would send them at exit before it waits for them: so they are killed. PyTorch's handler
        # of SIGCHLD would raise an error for each.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in multiprocessing.active_children():
            process.kill()


def first_to_say(message: str) -> bool:
    """Whether no other process of this machine has said this before.

    Another machine says it again, because its files may be other ones.
    """
    if not dist.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.suppress(Exception):      # without the first process, nobody keeps count
        store = dist.distributed_c10d._get_default_store()
        # two words, because number 11 of the name node1 is not number 1 of the name node11
        machine = socket.gethostname(), os.environ.get("GROUP_RANK")
        return store.add(f"{machine}: {message}", 1) == 1
    return True


def leave_group():
    """Leaves the process group, together with all other processes."""
    if dist.is_initialized():
        # a process that leaves while another is still in its last all-reduce can block that one
        dist.barrier()
        dist.destroy_process_group()


# -------------------------------------------------------------------------------- flags

class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter,
                    argparse.RawDescriptionHelpFormatter):
    """Names the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help if action.default is None else super()._get_help_string(action)


def number(kind: type, interval: str):
    """An argparse type for numbers in an interval: number(float, "[0, 1)") takes 0, but not 1."""
    low, high = map(float, interval[1:-1].split(","))

    def convert(text: str) -> int | float:
        value = kind(text)
        ends = [end for end, closed in ((low, "["), (high, "]")) if closed in interval]
        if not low < value < high and value not in ends:      # NaN is in no interval
            raise argparse.ArgumentTypeError(f"{value} is outside {interval}")
        return value
    convert.__name__ = kind.__name__      # in argparse's message about what is no number
    return convert


positive_int = number(int, "[1, inf)")
non_negative_int = number(int, "[0, inf)")
non_negative = number(float, "[0, inf)")


class Parser(argparse.ArgumentParser):
    """Says what an unknown flag is called here, and says it once on each machine."""

    def error(self, message: str):
        if os.environ.get("LOCAL_RANK", "0") != "0":      # all processes have the same flags
            sys.exit(2)
        for word in re.findall(r"(--[\w-]+)", message) if "unrecognized" in message else ():
            if known := self.known_as(word):
                message += f"; {word} is {known} here"
        super().error(message)

    def known_as(self, flag: str) -> str | None:
        """This parser's flag for what others call `flag`."""
        flag = flag.replace("_", "-")
        names = [flag] + [flag.replace(a, b) for a, b in SYNONYMS]
        close = difflib.get_close_matches(flag, self._option_string_actions, 1, cutoff=0.8)
        return next((name for name in names + close if name in self._option_string_actions), None)


def make_parser(doc: str, arguments: str = "") -> argparse.ArgumentParser:
    """A parser with the flags that every stage has. `arguments` are in its line of usage."""
    parser = Parser(description=doc, formatter_class=HelpFormatter, allow_abbrev=False,
                    usage=f"%(prog)s {arguments}[FLAG ...]; --help explains the flags")
    group = parser.add_argument_group("input and machine")
    group.add_argument(
        "--data", metavar="FOLDER", default=os.environ.get("IMAGENET", "data/imagenet"),
        help="a folder with train/CLASS/*.jpg and val/CLASS/*.jpg (segment.py: in ADE20K's "
             "layout; pretrain.py and routing.py: any folder of images, or one image); or cifar10 "
             "or food101, which are downloaded to data/; or shapes or shapes-noise, which are "
             "drawn on the fly. $IMAGENET, if set, is the default")
    group.add_argument(
        "--workers", type=non_negative_int,
        help="loader processes of each training process (default: its share of the cores, at "
             "most 16)")
    group.add_argument(
        "--amp", choices=("fp16", "bf16", "off"), default="fp16",
        help="precision of matrix products. Without a GPU, fp16 means float32, and bf16 is slow "
             "on processors that have no instructions for it")
    return parser


def add_run_flags(parser: argparse.ArgumentParser, *, batch_size: int, lr: float, min_lr: float,
                  weight_decay: float, clip_grad: float):
    """The flags of every stage that trains."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--out", metavar="FOLDER",
        help="folder of the run (default: runs/NAME, where NAME has the flags that differ from "
             "their defaults)")
    group.add_argument("--seed", type=number(int, "[0, 4294967296)"), default=42,
                       help="seed of all random numbers")
    group.add_argument(
        "--compile", action=argparse.BooleanOptionalAction,
        help="use torch.compile, which starts slower and then takes faster steps (default: on a "
             "GPU)")
    group.add_argument(
        "--save-minutes", type=non_negative, default=30.0,
        help="also write last.pt whenever it is so many minutes old; 0 for never")
    group.add_argument("--max-steps", type=positive_int,
                       help="stop after this step; the same command without it resumes")
    group.add_argument(
        "--repeat-batch", action="store_true",
        help="train on the first batch again and again, which measures a step without the loader")

    group = parser.add_argument_group("optimization with AdamW")
    group.add_argument("--batch-size", type=positive_int, default=batch_size,
                       help="images of one step, over all processes")
    group.add_argument(
        "--micro-batch", type=positive_int,
        help="images of one forward pass of one process; gradients accumulate to --batch-size "
             "(default: the largest divisor, up to 256, of a process's share of --batch-size)")
    group.add_argument("--lr", type=non_negative, default=lr,
                       help="peak learning rate, which is not scaled by the batch size")
    group.add_argument("--min-lr", type=non_negative, default=min_lr, help="last learning rate")
    group.add_argument(
        "--weight-decay", type=non_negative, default=weight_decay,
        help="not applied to biases, norms, scales, position embeddings, [CLS] and mask tokens")
    group.add_argument("--clip-grad", type=non_negative, default=clip_grad,
                       help="largest norm of the gradient; 0 for no clipping")


def add_epoch_flags(parser: argparse.ArgumentParser, *, epochs: int, warmup: int):
    """The length of a run that counts in epochs. A run of another length than `epochs` keeps the
    share of the warm-up: `warmup` of `epochs`.
    """
    parser.set_defaults(warmup_share=warmup / epochs)
    group = parser.add_argument_group("length")
    group.add_argument("--epochs", type=positive_int, default=epochs, help="length of the run")
    group.add_argument(
        "--warmup-epochs", type=non_negative,
        help=f"epochs of linear warm-up (default: {warmup}/{epochs} of --epochs)")
    group.add_argument("--save-every", type=positive_int, default=10,
                       help="epochs between evaluations and kept checkpoints")


def parse_run(parser: argparse.ArgumentParser, argv: list[str] | None, stage: str
              ) -> argparse.Namespace:
    """Parses the flags of a stage that trains, names its run's folder after them, and sets a
    warm-up that is not given to its share of the run.
    """
    args = parser.parse_args(argv, argparse.Namespace(stage=stage))
    share = vars(args).pop("warmup_share")
    if not args.out:
        args.out = f"runs/{name_run(parser, args)}"
    for name, length in (("warmup_epochs", "epochs"), ("warmup_iterations", "iterations")):
        if hasattr(args, name) and getattr(args, name) is None:
            setattr(args, name, getattr(args, length) * share)
    return args


def name_run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """A folder's name: the stage, and the flags that are not at their defaults."""
    # of the flags that may change when a run resumes, these say what the run is
    named = (vars(args).keys() - FREE_FLAGS - {"stage"}) | {"teacher", "checkpoint", "data"}
    words = [args.stage]
    for name in sorted(named & vars(args).keys()):
        value = getattr(args, name)
        if value != parser.get_default(name):
            if name == "data" and os.sep in value:      # other folders may have the same name
                digest = hashlib.sha256(os.fsencode(os.path.abspath(value))).hexdigest()[:6]
                value = f"{Path(value).name}-{digest}"
            value = "+".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"{name}={value}")
    name = re.sub(r"[^\w.=+-]+", "-", "_".join(words))
    if len(os.fsencode(name)) > 200:      # file systems take 255 bytes
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
        name = f"{os.fsencode(name)[:190].decode(errors='ignore')}-{digest}"
    return name


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# ------------------------------------------------------------------------------ process

class Process:
    """This process: its rank among all processes, its device, its precision, its loaders."""

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
        if amp != "fp16":      # the scale stays 1: all it does is to skip non-finite updates
            self.scaler.set_growth_factor(1.0)
            self.scaler.set_backoff_factor(1.0)

        # the cores that this process may use; macOS cannot say, so there it is all of them
        linux = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
        share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.workers = min(16, share) if args.workers is None else args.workers
        compiles = getattr(args, "compile", False)      # routing.py has no such flag
        self.compile = cuda if compiles is None else compiles

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def largest(self, *values: float) -> list[float]:
        """The maximum of each value over all processes, on the CPU: no GPU is waited for."""
        values = torch.tensor(values)
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()

    def first_alone(self, function, *args):
        """Calls a function in the first process alone. If it raises a UserError there, all
        processes raise it.
        """
        said = [None]
        if self.rank == 0:
            try:
                function(*args)
            except UserError as error:
                said = [str(error)]
        if self.world > 1:
            dist.broadcast_object_list(said, 0, device=torch.device("cpu"))
        if said[0]:
            raise UserError(said[0])

    def share_buffers(self, model: nn.Module):
        """Gives all processes the first one's BatchNorm statistics, so that they evaluate the
        same model.
        """
        for buffer in model.buffers() if self.world > 1 else ():
            dist.broadcast(buffer, 0)

    def parallel(self, model: nn.Module) -> nn.Module:
        if self.world == 1:
            return model
        # Not in each forward pass: see `share_buffers`. In PyTorch 2.14, the argument for it has
        # another name, and the old one prints a warning in each process.
        names = inspect.signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        return DistributedDataParallel(model, gradient_as_bucket_view=True, **{sync: False})

    def accumulating(self, model: nn.Module, last: bool):
        """A context: processes exchange their gradients in the last micro-step alone."""
        return contextlib.nullcontext() if self.world == 1 or last else model.no_sync()


def seed_torch(*key: int):
    """Seeds PyTorch's generators of all devices.

    The key (seed,) is for the initial weights, and (seed, step, rank) for what a process draws in
    a step: drop path, Expert Dropout, dropout and mixup.
    """
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(state) >> 1)      # any 63 bits would do; these are those of all runs


def lock(folder: Path, wait: bool = False) -> contextlib.ExitStack:
    """Makes a folder and locks it for one process, until the stack is closed.

    Another process that holds it is waited for, or raises UserError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = contextlib.ExitStack()
    try:
        file = held.enter_context((folder / ".lock").open("w"))
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is using {folder}: wait, or give another --out") from None
    except OSError:      # a read-only folder, or a disk that has no locks: go on without one
        pass
    return held


# ------------------------------------------------------------------------- optimization

@dataclasses.dataclass
class Plan:
    """How a run divides its images into steps, and the learning rate of each step."""
    micro_batch: int      # images of one forward pass of one process
    micro_steps: int      # forward passes of one process in a step
    epoch_steps: int      # an incomplete last batch is left out
    steps: int            # of the whole run
    warmup: int           # steps
    save_steps: int       # between evaluations and kept checkpoints
    lr: float             # at the end of the warm-up
    min_lr: float         # at the last step
    decay: str            # from lr to min_lr: "cosine" or "linear"

    def learning_rate(self, step: int) -> float:
        """The rate rises linearly until step warmup - 1, and then falls until the last step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step + 1 - self.warmup) / (self.steps - self.warmup)      # 0 to 1
        if self.decay == "linear":
            return self.lr + (self.min_lr - self.lr) * progress
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def make_plan(args: argparse.Namespace, world: int, images: int, *, unit: str = "epochs",
              decay: str = "cosine") -> Plan:
    """The plan of a run of `world` processes that counts in "epochs" or "iterations".

    Raises UserError if the numbers do not fit together.
    """
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
    unit_steps = epoch_steps if unit == "epochs" else 1
    length = getattr(args, unit)
    warmup = getattr(args, f"warmup_{unit}")
    if warmup >= length:
        raise UserError(f"--warmup-{unit} {warmup:g} leaves nothing of --{unit} {length}")
    return Plan(micro_batch=micro_batch, micro_steps=share // micro_batch,
                epoch_steps=epoch_steps, steps=length * unit_steps,
                warmup=round(warmup * unit_steps), save_steps=args.save_every * unit_steps,
                lr=args.lr, min_lr=args.min_lr, decay=decay)


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float],
          lr_scale=lambda name: 1.0) -> torch.optim.AdamW:
    """AdamW over the parameters that are not frozen, each at lr_scale(name) times the rate.

    Weight decay leaves out biases (also the experts' b1 and b2, which have two dimensions), norms,
    LayerScale, `scale`, position embeddings, [CLS] and mask tokens.
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
    """Clips the gradients, updates the parameters and clears the gradients -> metrics.

    Where a gradient is not finite, the scaler tells fused AdamW to skip the update; that and the
    metrics stay on the device, so the host does not wait for it.
    """
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, clip_grad or math.inf)
    scaler.step(optimizer)
    scaler.update()
    # DDP's gradients are views of its buckets, and None would separate them
    optimizer.zero_grad(set_to_none=not dist.is_initialized())
    return {"grad_norm": norm, "skipped": (~norm.isfinite()).float()}
