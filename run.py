"""A training run: its folder, its log and its checkpoints; resuming, and stopping on a signal.

Every stage that trains uses this file. A resumed run continues as if it had never stopped.
Checkpoints need no generator states for this, because every random number is a function of the
seed and of the step or image (`common.STREAMS`).
"""

import contextlib
import fcntl
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import common
import data
from common import Process, Stopped, UserError, note

LOG_EVERY = 20      # steps
# Flags that may change when a run resumes: they set where files are, how fast the run is, and when
# it saves or stops. --amp may change, too, because another precision can rescue a run whose numbers
# overflow.
FREE_FLAGS = {"data", "out", "workers", "micro_batch", "compile", "recompute", "amp", "save_every",
              "max_steps"}
BAR_FIELDS = "loss", "token", "cls", "pixel", "top1", "miou"      # of the log


class Run:
    """A training run in the folder `args.out`. Only rank 0 writes there.

    title: the model in words, for the first line that the run prints
    steps, epoch_steps: number of steps in the run, and in an epoch
    image_count, val_image_count: numbers of images to train on and to evaluate on
    classes: their names
    encoder: saved in checkpoints: the arguments of `ViT` or, in a probe, the name of its encoder
    digest: of the pretrained weights that the run starts from, or learns from
    measure: returns scores in percent; the first one decides which model best.pt keeps. Pretraining
        measures nothing, and keeps an epoch_NNNN.pt every --save-every epochs.
    log_every: steps between lines of the log, LOG_EVERY by default; a signal waits for a line
    parts: the objects whose state dicts last.pt holds, by name; other checkpoints hold only the
        model's state dict
    """

    def __init__(self, args, process: Process, title: str, *, steps: int, epoch_steps: int,
                 image_count: int, val_image_count: int = 0, encoder, digest: str = "",
                 classes=(), measure=None, log_every: int | None = None, **parts):
        self.args, self.process, self.title, self.measure = args, process, title, measure
        self.folder = Path(args.out)
        self.total, self.epoch_steps = steps, epoch_steps
        # in steps: between evaluations or kept checkpoints, and between writes of last.pt
        self.save_every = self.last_every = args.save_every
        if "epochs" in args:      # segmentation counts in iterations
            self.save_every, self.last_every = args.save_every * epoch_steps, epoch_steps
        self.log_every = log_every or LOG_EVERY
        self.stop_step = min(steps, args.max_steps or steps)
        self.parts = parts | {"scaler": process.scaler}
        # runs of earlier versions have these keys, and resume
        self.record = {"args": vars(args), "images": image_count, "val_images": val_image_count,
                       "classes": list(classes), "weights": digest, "encoder": encoder}
        self.start_step = 0                  # the step of last.pt
        self.file = None                # the log, which rank 0 opens
        self.log_bytes = 0              # the log's length when last.pt was written
        self.best_scores = {}
        self.due = False                # whether an evaluation is due at the step of last.pt
        self.metrics = {}               # {name: [its values since the last line of the log]}
        self.last_line = {}
        self.updated_step = 0           # of the latest line of the log that saw an update
        self.stop_signal = 0            # the number of the signal that asked to stop, or 0
        self.timed_step = 0             # the speed is measured from this step on
        self.timed_since = self.waited = 0.0

    # ------------------------------------------------------------------------- resuming

    def resume(self):
        """Locks the folder and loads last.pt if it exists, else saves it.

        Checks that all processes agree on flags, data and this step. Raises UserError.
        """
        with self.process.together():
            if self.process.rank == 0:
                self.file = self.claim()
            last = self.folder / "last.pt"
            if last.exists():
                with common.user_errors(last):
                    self.load(last)
        self.process.agree(self.args, identity(self.record) | {
            "the step of last.pt": self.start_step, "an evaluation is due": self.due})
        with self.process.together():
            if self.process.rank == 0:
                self.begin()
        note(f"{self.folder}: {self.title} on {self.record['images']} images, from step "
             f"{self.start_step} of {self.total}, {self.process.world} x "
             f"{self.process.device.type} in {self.process.amp or torch.float32}", sys.stdout)

    def claim(self):
        """Makes the folder and locks it for this process -> the log, which holds the lock

        Raises UserError if another process has the lock, or if there are models, a log or
        accuracies of another run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = open(self.folder / "log.jsonl", "ab")      # noqa: SIM115
        try:      # a POSIX lock ends with this process, even if its workers outlive it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"{self.folder}: another process trains in this folder") from None
        except OSError:
            note(f"{self.folder}: this file system has no locks; two processes must not train here")
        found = [path.name for pattern in ("*.pt", "log.jsonl", "knn.jsonl")
                 for path in self.folder.glob(pattern) if path.stat().st_size]
        if found and "last.pt" not in found:
            raise UserError(f"{self.folder} has {min(found)}, but no last.pt to resume from; give "
                            "another --out")
        return file

    def begin(self):
        """Writes what a run has before its first step, so that a full disk shows now."""
        # drop what a run that was killed had logged after last.pt
        self.log_bytes = min(self.log_bytes, self.file.tell())      # it was opened at its end
        self.file.truncate(self.log_bytes)
        self.file.seek(self.log_bytes)
        if self.start_step < self.total:      # a complete run keeps its origin
            record = self.record | {"origin": find_origin()}      # for people
            (self.folder / "args.json").write_text(json.dumps(record, indent=1))
        if self.start_step == 0:
            self.save("last.pt", 0, *self.parts)
            if not self.measure:
                self.save("epoch_0000.pt", 0, "model")

    def load(self, last: Path):
        """Loads last.pt into the parts. Raises UserError if another run wrote it."""
        read = functools.partial(torch.load, last, map_location="cpu", weights_only=True)
        try:      # with mmap, not every process reads the whole file into memory at once
            state = read(mmap=True)
        except RuntimeError:      # some network file systems have no mmap
            state = read()
        if changed := common.differences(identity(state), identity(self.record)):
            raise UserError(f"{self.folder} holds another run, so give another --out: {changed}")
        if state["args"]["data"] != self.args.data:      # moved, or another fold of as many images?
            note(f"{self.folder}: --data was {state['args']['data']}, is {self.args.data}")
        for name, part in self.parts.items():
            # the loss scale of one precision means nothing in another
            if name != "scaler" or state["amp"] == str(self.process.amp):
                part.load_state_dict(state[name])
        self.start_step = self.updated_step = state["step"]
        self.log_bytes, self.best_scores = state["log_bytes"], state["best"]
        self.due = state.get("evaluation_due", False)      # earlier versions do not say

    # ------------------------------------------------------------------------- the loop

    def steps(self):
        """Yields the remaining steps, in a progress bar, after an evaluation that is due."""
        with self.listening():
            if self.due:      # the run was stopped before this evaluation, or in it
                self.evaluate(self.start_step)
            self.start_clock(self.start_step)
            with common.progress_bar(
                    range(self.start_step, self.stop_step), self.args.stage, self.stop_step,
                    initial=self.start_step, unit="step") as bar:
                for step in bar:
                    yield step
                    fields = self.last_line | self.best_scores
                    bar.set_postfix({name: fields[name] for name in BAR_FIELDS if name in fields},
                                    refresh=False)

    @contextlib.contextmanager
    def listening(self):
        """A context in which a signal asks the run to stop."""
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:      # nohup ignores it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.ask_to_stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask_to_stop(self, number: int, frame):
        """The signal handler: asks the run to stop at its next line of the log."""
        self.stop_signal = number
        if number == signal.SIGINT:      # a second Ctrl-C ends the process at once
            signal.signal(number, signal.SIG_DFL)
        if self.process.rank == 0:       # not print, which this signal may have interrupted
            with contextlib.suppress(OSError):      # the terminal is closed
                os.write(2, f"\n{signal.Signals(number).name}: the run saves and stops at the next "
                            "line of the log; a second Ctrl-C ends it at once\n".encode())

    def batches(self, views, micro_steps: int):
        """Yields the micro-batches of the remaining steps, and adds up how long the loop waits."""
        args, process = self.args, self.process
        order = data.train_order(len(views), args.batch_size, micro_steps, args.seed,
                                 self.start_step, self.stop_step, process.rank, process.world)
        start = time.perf_counter()
        for batch in data.load(views, order, process, args.workers):
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def start_clock(self, done: int):
        """Measures the speed from now on, so that evaluations and saving do not count."""
        self.timed_step, self.timed_since, self.waited = done, time.perf_counter(), 0.0

    def log(self, metrics: dict[str, Tensor], **more: Tensor):
        """Collects scalars and vectors, on their device, until the next line of the log."""
        for name, value in (metrics | more).items():
            self.metrics.setdefault(name, []).append(value.detach())

    def end_step(self, step: int, lr: float):
        """Logs, saves and evaluates when each is due. Raises Stopped, in all processes, if a signal
        has asked one of them to stop before the run is complete.
        """
        done = step + 1
        scheduled = done % self.save_every == 0 or done == self.total
        saves = scheduled or done % self.last_every == 0 or done == self.stop_step
        if not saves and done % self.log_every:
            if step == self.start_step:      # it compiles, so its time does not count
                self.start_clock(done)
            return
        asked = self.log_means(done, lr)        # to stop
        if scheduled and not self.measure:      # before last.pt, or a kill between them loses it
            self.save(f"epoch_{done // self.epoch_steps:04d}.pt", done, "model")
        self.due = scheduled and self.measure is not None
        if saves or asked:                      # before an evaluation, which may fail
            self.save("last.pt", done, *self.parts)
        if self.due and not asked:              # else the same command evaluates
            self.evaluate(done)
        stops = asked and (done < self.stop_step or self.due)
        if stops or done == self.stop_step:
            self.report(done, stops)
            # all ranks keep their signal handlers until rank 0 has saved
            self.process.sum(torch.zeros((), device=self.process.device))
        if stops:
            raise Stopped(self.stop_signal)
        self.start_clock(done)

    def evaluate(self, done: int):
        """Prints and logs the scores that measure() returns, and saves last.pt. If the first score
        is the highest so far, saves best.pt, too.
        """
        scores = self.measure()
        note(f"step {done} of {self.total}: {percent(scores)}", sys.stdout)
        self.due = False
        deciding = next(iter(scores))
        if scores[deciding] > self.best_scores.get(deciding, -1.0):
            self.best_scores = scores
            self.save("best.pt", done, "model")
        self.write_line({"step": done, "epoch": done / self.epoch_steps} | scores)
        self.save("last.pt", done, *self.parts)

    def report(self, done: int, stops: bool):
        """Prints the run's last line. slurm.sh looks for "stopped by" in it."""
        speed = self.last_line["images_per_second"]
        words = [f"{self.folder}: step {done} of {self.total}", last_losses(self.last_line),
                 f"{speed:.{1 if speed < 10 else 0}f} images/s, "
                 f"{self.last_line['loader_wait']:.0%} of the time waiting for data"]
        if self.best_scores:
            words.append(f"best evaluation: {percent(self.best_scores)}")
        if stops:
            name = signal.Signals(self.stop_signal).name if self.stop_signal else "a signal"
            words.append(f"stopped by {name}; the same command resumes")
        note("; ".join(words), sys.stdout)

    # ---------------------------------------------------------------- log and checkpoints

    def log_means(self, done: int, lr: float) -> bool:
        """Writes a line of the log -> whether a signal asks any process to stop

        Raises UserError if no update in LOG_EVERY steps had a finite loss and finite gradients.
        """
        steps = len(self.metrics["skipped"])      # since the last line
        self.log({"stop": torch.tensor(float(self.stop_signal > 0), device=self.process.device)})
        means = self.mean_metrics()
        stops = means.pop("stop") > 0
        means["skipped"] = round(steps * means["skipped"])
        seconds = time.perf_counter() - self.timed_since
        self.last_line = {"step": done, "epoch": done / self.epoch_steps, "lr": lr} | means | {
            "memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30,
            "images_per_second": self.args.batch_size * (done - self.timed_step) / seconds,
            "loader_wait": self.waited / seconds}
        self.write_line(self.last_line)
        if means["skipped"] < steps and math.isfinite(means["loss"]):
            self.updated_step = done
        if done - self.updated_step >= LOG_EVERY:
            raise UserError(f"step {done}: no loss of the last {done - self.updated_step} steps is "
                            "finite, with finite gradients; --amp bf16 may help, or another run "
                            "with a lower --lr or --clip-grad")
        return stops

    def mean_metrics(self) -> dict:
        """The mean of each metric since the last line of the log, over steps and processes.

        Values that are not finite are left out. Besides saving, this is the only place where the
        host waits for the device.
        """
        means = {}
        for name, values in self.metrics.items():
            values = torch.stack(values).float()
            finite = values.isfinite()
            total, count = self.process.sum(torch.stack([values.where(finite, 0).sum(0),
                                                         finite.float().sum(0)]))
            means[name] = (total / count).tolist()
        self.metrics = {}
        return means

    def write_line(self, line: dict):
        if self.process.rank == 0:
            self.file.write(json.dumps(common.rounded(line)).encode() + b"\n")
            self.file.flush()

    def save(self, name: str, done: int, *parts: str):
        """Writes the state dicts of `parts` to a checkpoint, under a temporary name until it is
        complete. Raises UserError, and writes nothing, if they hold a NaN or infinity.
        """
        if self.process.rank > 0:
            return
        state = {part: self.parts[part].state_dict() for part in parts}
        if not is_finite(state):
            raise UserError(f"step {done}: the model or the optimizer holds a NaN or infinity, "
                            f"and {name} is not written; --amp bf16 may help")
        state |= self.record | {
            "amp": str(self.process.amp), "step": done, "epoch": done / self.epoch_steps,
            "best": self.best_scores, "evaluation_due": self.due, "log_bytes": self.file.tell()}
        temporary = self.folder / f"{name}.tmp"
        with open(temporary, "wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:      # torch.save hides the OSError of a full disk
                raise error.__context__ or error from None
            file.flush()
            os.fsync(file.fileno())            # else a power cut could leave an empty file
        temporary.replace(self.folder / name)


def last_losses(line: dict) -> str:
    """In words, what to look at first in a line of the log"""
    names = [name for name in ("token", "token_ratio", "dispatch_cv") if name in line] or ["loss"]
    return ", ".join(f"{name} {np.ravel(line[name])[0]:.3g}" for name in names)      # of expert 0


def percent(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}%" for name, value in scores.items())


def is_finite(state) -> bool:
    """Whether all tensors in nested dicts are finite"""
    if isinstance(state, dict):
        return all(is_finite(value) for value in state.values())
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def identity(record: dict) -> dict:
    """What makes a run another run: its flags, except FREE_FLAGS, its data, and the weights that it
    builds on
    """
    flags = {common.flag(name): value for name, value in record["args"].items()
             if name not in FREE_FLAGS}
    facts = {"the number of images": record["images"]}
    if "weights" in record:      # records of earlier versions have no more
        facts |= {"the digest of the pretrained weights": record["weights"]} | data.describe(
            record["args"]["data"], record["images"], record["val_images"], record["classes"])
    return {"--stage": flags["--stage"]} | flags | facts


def read_lines(path: Path) -> list[dict]:
    """The lines of a log that may be missing, without a last one that a kill cut off"""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def find_origin() -> dict:
    """Versions of packages, and the git commit of this code, if it is in a repository"""
    packages = "torch", "torchvision", "numpy", "timm", "open_clip_torch"
    describe = "git describe --always --exclude=* --abbrev=40 --dirty=+changes"
    commit = subprocess.run(describe, shell=True, cwd=Path(__file__).parent, text=True,
                            capture_output=True).stdout.strip()      # "" without git
    return {name: metadata.version(name) for name in packages} | {"commit": commit}
