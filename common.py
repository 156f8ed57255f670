"""Code that all stages share: errors and messages, flags, processes, and random numbers."""

import argparse
import contextlib
import datetime
import math
import os
import pickle
import signal
import string
import sys
import textwrap
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

# ------------------------------------------------------------------------------- errors

class UserError(Exception):
    """An error that the user can fix: `launch` prints it as one line and exits with code 2."""


class Stopped(Exception):
    """A signal has stopped a run before it was complete.

    number: of the signal, or 0 if another process has received it
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def get_rank() -> int:
    """This process's rank. RANK without WORLD_SIZE is left over from another job, so it is ignored.
    """
    return int(os.environ["RANK"]) if "WORLD_SIZE" in os.environ else 0


def note(line: str, stream=None):
    """Prints a line for the user to stderr, or to `stream`, on rank 0."""
    if get_rank() == 0:
        stream = stream or sys.stderr
        tqdm.write(line, file=stream)      # tqdm keeps the line clear of a progress bar
        stream.flush()


@contextlib.contextmanager
def user_errors(what: str | Path):
    """Turns any error of a file, or of another library, into a UserError that begins with `what`,
    on one line. Errors that are UserErrors, and a lack of memory, stay as they are.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:      # damaged files and other libraries raise many types
        # with weights_only, PyTorch's own error is long advice on loading everything; the error
        # that it was handling has the reason
        cause = error.__context__ if isinstance(error, pickle.UnpicklingError) else error
        reason = str(getattr(cause, "strerror", None) or cause or error).split(" Please use")[0]
        reason = textwrap.shorten(reason, 300, placeholder=" ...") or type(error).__name__
        raise UserError(f"{what}: {reason}") from error


def progress_bar(*args, **kwargs) -> tqdm:
    """A tqdm bar on rank 0, if stderr is a terminal."""
    tqdm.monitor_interval = 0      # no monitor thread: forking workers beside a thread is unsafe
    return tqdm(*args, disable=None if get_rank() == 0 else True, **kwargs)


def rounded(value):
    """Rounds the floats in nested lists and dicts to six digits. NaN and infinity become None,
    because JSON has neither.
    """
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def differences(old: dict, new: dict) -> str:
    """Names the first keys of both dicts whose values differ, as "NAME was OLD, is NEW, ..." """
    changed = [f"{name} was {old[name]}, is {new[name]}"
               for name in old if name in new and old[name] != new[name]]
    return ", ".join(changed[:3]) + f" and {len(changed) - 3} more" * (len(changed) > 3)


class Output:
    """Stdout or stderr that keeps the run alive when nobody can read its output any more: Ctrl-C
    has ended `tee` in a pipe, the terminal is closed, the disk of a log file is full.
    """

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:      # nobody reads this any more: from now on, write to /dev/null
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)


def launch(main, args: argparse.Namespace):
    """Calls main(args) as a program: a UserError or OOM becomes one line and exit code 2.

    A program that a signal stopped ends with this signal, so that a shell does not go on with what
    was to come after it. SIGUSR1 is Slurm's, after which slurm.sh wants exit code 0.
    """
    sys.stdout.reconfigure(errors="replace")      # a path may have letters that it cannot show
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    stopped_by = 0
    try:
        main(args)
    except Stopped as stop:
        stopped_by = stop.number
    except (UserError, torch.OutOfMemoryError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, torch.OutOfMemoryError):
            line = f"a smaller --micro-batch or --batch-size needs less memory: {line}"
        print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            note("torch.compile failed; --no-compile runs without it")
        raise
    if dist.is_initialized():
        # a process that exits while another is still in its last all-reduce can block the other
        dist.barrier()
        dist.destroy_process_group()
    if stopped_by not in (0, signal.SIGUSR1):
        signal.signal(stopped_by, signal.SIG_DFL)
        os.kill(os.getpid(), stopped_by)


# -------------------------------------------------------------------------------- flags

def checked(kind: type, valid, words: str):
    """Makes an argparse type: a number of this kind for which valid(number) is true. `words`
    describe valid numbers.
    """
    def convert(text: str) -> int | float:
        value = kind(text)
        if not valid(value):
            raise argparse.ArgumentTypeError(f"{text} is not {words}")
        return value
    convert.__name__ = kind.__name__      # argparse shows the name if the text is not a number
    return convert


positive_int = checked(int, lambda x: x > 0, "above 0")
non_negative_int = checked(int, lambda x: x >= 0, "0 or above")
positive = checked(float, lambda x: 0 < x < math.inf, "above 0")
non_negative = checked(float, lambda x: 0 <= x < math.inf, "0 or above")
fraction = checked(float, lambda x: 0 <= x < 1, "in [0, 1)")


def path(text: str) -> str:
    """An argparse type: a path or a name; ~ becomes the home folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; is a shell variable not set?")
    return os.path.expanduser(text)


def flag(name: str) -> str:
    """batch_size -> --batch-size"""
    return "--" + name.replace("_", "-")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter,
                    argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help if action.default is None else super()._get_help_string(action)


def default_data() -> str:
    return os.path.expanduser(os.environ.get("IMAGENET") or "data/imagenet")


def make_parser(doc: str, arguments: str = "") -> argparse.ArgumentParser:
    """A parser with the flags that every stage has. `arguments` go into its usage line."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=HelpFormatter, allow_abbrev=False,
        usage=f"%(prog)s {arguments}[FLAG ...]; --help explains the flags")
    group = parser.add_argument_group("input and machine")
    group.add_argument(
        "--data", metavar="FOLDER", type=path, default=default_data(),
        help="a folder with train/CLASS/*.jpg and val/CLASS/*.jpg (segment.py: ADE20K's layout; "
             "pretrain.py and analyze.py: any folder of images); or cifar10 or food101, which are "
             "read from data/; or shapes or shapes-noise, which are synthetic. $IMAGENET, if set, "
             "is the default; knn.py and analyze.py take the checkpoint's own set first")
    group.add_argument("--workers", type=non_negative_int, default=min(16, count_cores()),
                       help="workers that load images, per process")
    group.add_argument(
        "--amp", choices=("fp16", "bf16", "off"), default="fp16",
        help="precision of matrix products. Without a GPU, fp16 means float32, and bf16 is slow "
             "on processors that have no instructions for it")
    group.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(),
        help="use torch.compile: the start takes longer, and steps are faster")
    group.add_argument("--seed", type=non_negative_int, default=42,
                       help="seed of all random numbers")
    return parser


def count_cores() -> int:
    """The number of cores for this process, its share on this machine, at least one."""
    linux = hasattr(os, "sched_getaffinity")      # macOS does not say which cores a process may use
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def add_train_flags(parser: argparse.ArgumentParser, stage: str, *, batch_size: int, lr: float,
                    min_lr: float, weight_decay: float, clip_grad: float, length: int, warmup: int,
                    save_every: int, unit: str = "epochs"):
    """Adds the flags of every stage that trains; a run's length counts in `unit`."""
    parser.set_defaults(stage=stage)
    group = parser.add_argument_group("run")
    group.add_argument("--out", metavar="FOLDER", type=path, default=f"runs/{stage}",
                       help="folder of the run; the same command resumes it")
    group.add_argument(f"--{unit}", type=positive_int, default=length, help="length of the run")
    group.add_argument(f"--warmup-{unit}", type=non_negative_int, default=warmup,
                       help=f"{unit} of linear warm-up")
    group.add_argument("--save-every", type=positive_int, default=save_every,
                       help=f"{unit} between evaluations and kept checkpoints")
    group.add_argument("--max-steps", type=positive_int,
                       help="stop after this step; the same command without it resumes")

    group = parser.add_argument_group("optimization with AdamW")
    group.add_argument("--batch-size", type=positive_int, default=batch_size,
                       help="images per step, over all processes")
    group.add_argument(
        "--micro-batch", type=positive_int,
        help="images per forward pass of a process; gradient accumulation makes up --batch-size "
             "(default: the largest divisor, up to 256, of a process's share of --batch-size)")
    group.add_argument("--lr", type=non_negative, default=lr,
                       help="peak learning rate; the batch size does not scale it")
    group.add_argument("--min-lr", type=non_negative, default=min_lr,
                       help="final learning rate")
    group.add_argument(
        "--weight-decay", type=non_negative, default=weight_decay,
        help="weight decay, except for biases, norms, scales, position embeddings, [CLS] and mask "
             "tokens")
    group.add_argument("--clip-grad", type=non_negative, default=clip_grad,
                       help="maximum norm of the gradient; 0 for no clipping")


def add_pool_flag(group):
    group.add_argument("--pool", choices=("cls", "mean"), default="cls",
                       help="pooling: the [CLS] token, or the mean patch token")


def parse_run(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses the flags of a stage that trains. The warm-up must be shorter than the run."""
    args = parser.parse_args(argv)
    unit = "epochs" if "epochs" in args else "iterations"
    length, warmup = getattr(args, unit), getattr(args, f"warmup_{unit}")
    if warmup >= length:
        parser.error(f"--warmup-{unit} {warmup} is not below --{unit} {length}")
    return args


# ------------------------------------------------------------------------------ process

class Process:
    """This process: its rank among all processes, its device and its precision."""

    def __init__(self, args: argparse.Namespace):
        self.rank = get_rank()
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")      # Slurm sets it, too
        if not cuda and visible.startswith((*string.digits, "GPU-", "MIG-")):
            raise UserError(f"CUDA_VISIBLE_DEVICES is {visible}, but PyTorch finds no GPU; to run "
                            "on a CPU, unset it")
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cpu")
        if cuda:      # some launchers let each process see its own GPU alone
            self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if self.world > 1 and not dist.is_initialized():
            place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            note(f"{self.world} processes connect at {place}")
            # long enough for rank 0 to save 30 GB to a slow disk while the other ranks wait
            dist.init_process_group("nccl" if cuda else "gloo",
                                    timeout=datetime.timedelta(hours=2))

        amp = args.amp if cuda or args.amp != "fp16" else "off"
        self.amp = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[amp]
        # outside fp16, the loss scale stays 1: the scaler only skips updates that are not finite
        fp16 = amp == "fp16"
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=2.0 ** 16 if fp16 else 1.0)
        if not fp16:
            self.scaler.set_growth_factor(1.0)
            self.scaler.set_backoff_factor(1.0)

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None)

    @contextlib.contextmanager
    def together(self):
        """A context in which an error of one process ends all of them with this error. The others
        would wait for the process for hours.
        """
        own = None
        try:
            yield
        except Exception as error:
            own = error
        errors = self.gather(own and str(own))
        if own:
            raise own
        for other in errors:
            if other is not None:
                raise UserError(other)

    def agree(self, args: argparse.Namespace, facts: dict):
        """Raises UserError in all processes if their flags, or these facts, differ."""
        # machines may have folders of their own
        facts = facts | {flag(name): value for name, value in vars(args).items()
                         if name not in ("data", "out", "workers")}
        everyone = self.gather(facts)
        for rank, other in enumerate(everyone):
            if changed := differences(everyone[0], other):
                raise UserError(f"rank {rank} does not run what rank 0 runs: {changed}")

    def gather(self, value) -> list:
        """The `value` of each process, in the order of their ranks"""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Sums values over all processes, in place (all-reduce)."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def parallel(self, model: nn.Module) -> nn.Module:
        if self.world == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def accumulating(self, model: nn.Module, last: bool):
        """A context for gradient accumulation: only the last micro-step all-reduces gradients."""
        return contextlib.nullcontext() if self.world == 1 or last else model.no_sync()


# ---------------------------------------------------------------------- random numbers

# {purpose: tag}. A generator's key is the tag, then the numbers in the comment. Each purpose has a
# tag, so that no two share a key: NumPy takes (5,) and (5, 0) for one seed. shapes.py has 0 and 1.
STREAMS = {"order": 2,        # (seed, epoch): the order of an epoch's images
           "view": 3,         # (seed, epoch, index): crop, jitter, mask, augmentation of an image
           "weights": 4,      # (seed): initial weights
           "step": 5,         # (seed, step, rank): drop path, Expert Dropout, dropout, mixup
           "rlw": 6}          # (seed, step): the objective weights of Random Loss Weighting


def generator(stream: str, *key: int) -> np.random.Generator:
    """NumPy's generator for a purpose, a name in STREAMS, and a key."""
    return np.random.default_rng((STREAMS[stream], *key))


def seed_torch(stream: str, *key: int):
    """Seeds PyTorch's generators on all devices for a purpose, a name in STREAMS, and a key."""
    torch.manual_seed(int(generator(stream, *key).integers(2 ** 63)))
