"""A training run in its folder: its log, its checkpoints, resuming, and stopping on request.

All stages that train use it. A checkpoint is written whole or not at all, and a run that resumes
goes on as if it had never stopped.
"""

import contextlib
import fcntl
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import common
from common import Process, UserError

LOG_EVERY = 20      # steps
# Flags that may differ when a run resumes: they say where its files are, how fast it works or how
# long. --amp may, too, because another precision can rescue a run whose numbers overflow.
FREE_FLAGS = {"data", "out", "workers", "micro_batch", "compile", "recompute", "amp", "save_every",
              "max_steps"}


class Run:
    """A training run in its folder `args.out`: it resumes, logs, saves, and stops when asked to.

    model_name: for the line that a run begins with. images: the number of training images. steps,
    epoch_steps: the steps of the whole run, and of an epoch. encoder: what rebuilds the encoder, or
    the name of a probe's. shown: the fields of the log that the progress bar shows. parts: what has
    a state that last.pt keeps, by name; other checkpoints keep the model's alone.
    """

    def __init__(self, args, process: Process, model_name: str, *, images: int, steps: int,
                 epoch_steps: int, encoder, shown=("loss",), **parts):
        self.args, self.process, self.folder = args, process, Path(args.out)
        self.model_name = model_name
        self.images, self.total, self.epoch_steps = images, steps, epoch_steps
        # steps between two evaluations or kept checkpoints, and between two last.pt
        self.save_every = self.last_every = args.save_every
        if "epochs" in args:      # segmentation counts in iterations
            self.save_every, self.last_every = args.save_every * epoch_steps, epoch_steps
        self.stop_step = min(steps, args.max_steps or steps)
        self.encoder, self.shown = encoder, shown
        self.parts = parts | {"scaler": process.scaler}
        self.best = {}               # the best evaluation's scores
        self.line = {}               # of the log, the last one
        self.signal = 0              # the number of the one that asked to stop
        self.metrics = {}            # since the last line of the log: by name, values of steps
        self.lost = 0                # steps in a row, in lines of which no loss was finite
        self.timed_from = None       # the speed is that of the steps since this one
        self.since = self.waited = 0.0

    def say(self, line: str):
        """Prints a line, once for all processes."""
        if self.process.rank == 0:
            tqdm.write(line)      # beside a progress bar
            sys.stdout.flush()

    # ------------------------------------------------------------------------- resuming

    def resume(self) -> int:
        """Claims the folder, and loads last.pt, if there is one -> the first step to do. Raises
        UserError.
        """
        self.claim()
        first = 0
        last = self.folder / "last.pt"
        if last.exists():
            try:
                # mapped into memory: not each process reads all of it at once
                state = torch.load(last, map_location="cpu", weights_only=True, mmap=True)
                for name, part in self.parts.items():
                    # the scale of one precision means nothing to another
                    if name != "scaler" or state["amp"] == str(self.process.amp):
                        part.load_state_dict(state[name])
                first, self.best = state["step"], state["best"]
            except OSError as error:
                raise UserError(f"{last}: {error.strerror}") from error
            except Exception as error:      # each kind of damage has its own
                raise UserError(f"cannot resume from {last}, which is damaged or of another kind "
                                f"({type(error).__name__})") from error
        of_all = self.process.sum(torch.tensor(first, device=self.process.device))
        if of_all != first * self.process.world:
            raise UserError(f"not all processes see the same {last}")
        if self.process.rank == 0:
            self.trim_log(first)
            self.compare_ages(last)
        self.say(f"{self.folder}: {self.model_name}; {self.images} images, {self.epoch_steps} "
                 f"steps an epoch, {self.process.world} x {self.process.device.type} in "
                 f"{self.process.amp or torch.float32}, from step {first} of {self.total}")
        return first

    def claim(self):
        """Opens the log, and writes args.json: the flags, their defaults, the number of images, and
        where the run comes from. Raises UserError if the folder is another run's or no folder, or
        if this run is already at work.
        """
        common.make_folder(self.folder)
        busy = torch.zeros((), device=self.process.device)
        if self.process.rank == 0:
            self.log_file = open(self.folder / "log.jsonl", "a+b")      # noqa: SIM115
            # POSIX locks end with the process, even if its loaders outlive it, and also where the
            # process closes the file, opened a second time
            try:
                fcntl.lockf(self.log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in self.folder.glob("*.tmp"):      # by a process that was killed
                    left.unlink()
            except BlockingIOError:
                busy += 1
            except OSError:      # the file system has no locks
                pass
        record = {"args": vars(self.args), "defaults": self.args.defaults, "images": self.images,
                  "origins": []}
        file = self.folder / "args.json"
        if file.exists():
            try:
                known = {"defaults": {}} | json.loads(file.read_text())
                record["origins"] = known["origins"]
                changed = differences(*comparable(known, record))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{file} is damaged, so that nothing says which run {self.folder} "
                                "holds; if this command is that run's, remove the file") from error
            if changed:
                raise UserError(f"{self.folder} holds another run, so give another --out: "
                                + changed)
        if self.process.sum(busy) > 0:
            raise UserError(f"{self.folder}: another process trains in this folder")
        if self.process.rank == 0:
            origins, origin = record["origins"], find_origin(self.process)
            if origins and origin != origins[-1]:
                self.say(f"{self.folder} goes on: {differences(origins[-1], origin)}")
            if origin not in origins[-1:]:
                origins.append(origin)
            self.write("args.json", lambda path: path.write_text(json.dumps(record, indent=1)))

    def trim_log(self, first: int):
        """Cuts off the log what a run that was killed wrote after `first`, its last.pt's step, so
        that the log has each step once, and no half of a line.
        """
        whole = 0      # bytes
        self.log_file.seek(0)
        for line in self.log_file:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                if json.loads(line)["step"] <= first and line.endswith(b"\n"):
                    whole += len(line)
                    continue
            break
        self.log_file.truncate(whole)

    def compare_ages(self, last: Path):
        """Prints a line if the model that a run starts from, or its teacher, has changed since."""
        files = (vars(self.args).get(name) for name in ("checkpoint", "encoder", "teacher"))
        for file in filter(None, files):
            if last.exists() and os.path.isfile(file) and (
                    os.path.getmtime(file) > last.stat().st_mtime):
                common.note(f"{file} is newer than {last}: if it is another model now, give "
                            "another --out")

    # ------------------------------------------------------------------------- the loop

    @contextlib.contextmanager
    def listening(self):
        """Within this context, signals ask the run to stop at its next line of the log: Ctrl-C's,
        Slurm's, and that of a terminal that is closed, unless nohup ignores it.
        """
        def ask(number: int, frame):
            self.signal = number
            line = (f"{signal.Signals(number).name}: saves and stops at the next line of the log, "
                    f"within {LOG_EVERY} steps")
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                line += "; a second Ctrl-C leaves at once, without saving"
            if self.process.rank == 0:      # not by print, which the signal may have interrupted
                with contextlib.suppress(OSError):
                    os.write(2, f"\n{line}\n".encode())
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def steps(self, first: int):
        """Yields the steps to do, with a progress bar."""
        with common.progress_bar(range(first, self.stop_step), self.args.stage, self.stop_step,
                                 initial=first, unit="step", disable=self.process.rank > 0) as bar:
            for step in bar:
                yield step
                if self.line:
                    shown = {name: self.line[name] for name in self.shown} | self.best
                    bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items()},
                                    refresh=False)

    def timed(self, batches):
        """Passes `batches` on, and adds up how long the loop waits for them."""
        start = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def start_clock(self, step: int):
        """Measures the speed from here, so that evaluating and saving do not count."""
        self.timed_from, self.since, self.waited = step, time.perf_counter(), 0.0

    def log(self, metrics: dict[str, Tensor], **more: Tensor):
        """Keeps scalars and vectors on their device until the next line of the log."""
        for name, value in (metrics | more).items():
            self.metrics.setdefault(name, []).append(value.detach())

    def end_step(self, step: int, lr: float, evaluate=None) -> bool:
        """Logs, evaluates and saves, each if it is time -> whether a signal asks to stop

        `evaluate` returns scores in percent, of which the first decides what best.pt is. A stage
        without it keeps epoch_NNNN.pt instead.
        """
        done = step + 1
        if self.timed_from is None:      # the first step compiles
            self.start_clock(done)
        scheduled = done % self.save_every == 0 or done == self.total
        saves = scheduled or done % self.last_every == 0 or done == self.stop_step
        if not saves and done % LOG_EVERY:
            return False
        stops = self.write_line(done, lr, evaluate if scheduled else None)
        if scheduled and not evaluate:
            self.save(f"epoch_{done // self.epoch_steps:04d}.pt", done)
        if saves or stops:
            self.save("last.pt", done, *self.parts)
        if stops or done == self.stop_step:
            self.report(done)
        self.start_clock(done)
        return stops

    def write_line(self, done: int, lr: float, evaluate) -> bool:
        """Appends a line of means over steps and processes to log.jsonl -> whether any process was
        asked to stop. Raises UserError if no loss is finite any more.

        Apart from saving, only here does the host wait for the device in pretraining.
        """
        steps = len(self.metrics["skipped"])
        totals = {}      # of each metric, [2, ...]: the sum, and the number, of its finite values
        for name, values in self.metrics.items():
            values = torch.stack(values).float()
            counts = values.isfinite()
            totals[name] = torch.stack([values.where(counts, 0).sum(0), counts.sum(0)])
        self.metrics = {}
        asked = torch.tensor([float(self.signal > 0)], device=self.process.device)
        flat = torch.cat([asked, *(total.flatten() for total in totals.values())])
        asked, *parts = self.process.sum(flat).cpu().split(
            [1, *(total.numel() for total in totals.values())])
        seconds = time.perf_counter() - self.since
        self.line = {"step": done, "epoch": done / self.epoch_steps, "lr": lr}
        for (name, total), part in zip(totals.items(), parts):
            value, count = part.view(total.shape)
            self.line[name] = (value / count).tolist()
        self.line |= {
            "skipped": round(self.line["skipped"] * steps),
            "memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30,
            "images_per_second": self.args.batch_size * (done - self.timed_from) / seconds,
            "loader_wait": self.waited / seconds}
        if evaluate:
            self.line |= self.keep_best(done, evaluate())
        if self.process.rank == 0:
            self.log_file.write(json.dumps(rounded(self.line)).encode() + b"\n")
            self.log_file.flush()
        if self.line["skipped"] == steps:
            self.say(f"step {done}: all {steps} updates since the last line of the log were "
                     "skipped, because their gradients were not finite")
        self.lost = 0 if math.isfinite(self.line["loss"]) else self.lost + steps
        if self.lost >= LOG_EVERY:
            raise UserError(f"step {done}: no loss of the last {self.lost} steps is finite; --amp "
                            "bf16 may help, or another run with a lower --lr or --clip-grad")
        return asked.item() > 0

    def keep_best(self, done: int, scores: dict[str, float]) -> dict[str, float]:
        """Writes best.pt if the first score is the highest so far -> the scores"""
        score = next(iter(scores))
        if scores[score] > self.best.get(score, -1.0):
            self.best = scores
            self.save("best.pt", done)
        return scores

    def save(self, name: str, step: int, *parts: str):
        """Writes a checkpoint of `parts` (default: the model), and never one that holds a NaN."""
        if self.process.rank > 0:
            return
        state = {part: self.parts[part].state_dict() for part in parts or ("model",)}
        if not finite(state):
            raise UserError(f"step {step}: the model or the optimizer holds a NaN or infinity, "
                            f"and {name} is not written")
        state |= {"encoder": self.encoder, "args": vars(self.args), "amp": str(self.process.amp),
                  "step": step, "epoch": step / self.epoch_steps, "best": self.best}
        self.write(name, lambda path: torch.save(state, path))

    def write(self, name: str, save):
        """Lets save(path) write a file, which takes its name when it is whole."""
        temporary = self.folder / f"{name}.{uuid.uuid4().hex}.tmp"
        save(temporary)
        temporary.replace(self.folder / name)

    def report(self, done: int):
        """Prints the last line of a run."""
        said = [f"step {done} of {self.total}",
                "{images_per_second:.0f} images/s, {loader_wait:.0%} of the time waiting for them"
                .format(**self.line)]
        said += [f"best {name} {value:.2f}%" for name, value in self.best.items()]
        if done < self.stop_step:
            name = signal.Signals(self.signal).name if self.signal else "a signal"
            said.append(f"stopped by {name}, and the same command resumes")
        self.say(f"{self.folder}: {'; '.join(said)}")


def comparable(known: dict, record: dict) -> tuple[dict, dict]:
    """What must be equal in two records of args.json if they are of one run: all flags but
    FREE_FLAGS, and the number of images. A flag that only one version of the code has counts as the
    default in the other.
    """
    sides = []
    for own, other in ((known, record), (record, known)):
        flags = other["args"] | other["defaults"] | own["args"]
        sides.append({f"--{name.replace('_', '-')}": value for name, value in flags.items()
                      if name not in FREE_FLAGS} | {"the number of images": own["images"]})
    return tuple(sides)


def find_origin(process: Process) -> dict:
    """Where a run comes from: versions, the device's name, how many processes, and the git commit
    of these files, if they have one.
    """
    origin = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "timm", "open_clip_torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            origin[package] = metadata.version(package)
    cuda = process.device.type == "cuda"
    origin["device"] = torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()})"
    origin["processes"] = process.world
    describe = "git describe --always --exclude=* --abbrev=40 --dirty=+changes".split()
    with contextlib.suppress(OSError, subprocess.CalledProcessError):      # no git, no repository
        origin["commit"] = subprocess.check_output(
            describe, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()
    return origin


def differences(old: dict, new: dict) -> str:
    """What was and is: the names whose values differ, and both values."""
    return ", ".join(f"{name} was {old.get(name)}, is {new.get(name)}"
                     for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name))


def finite(state) -> bool:
    """Whether all tensors of nested dicts are finite."""
    if isinstance(state, dict):
        return all(finite(value) for value in state.values())
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def rounded(value):
    """Nested lists and dicts with six digits of each float, and None for NaN and infinity, which
    JSON does not have.
    """
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"),
                      parse_constant=lambda text: None)
