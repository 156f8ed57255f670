"""A training run: resuming, the log, checkpoints, evaluations, and stopping on request.

Every stage that trains uses this file; folder.py writes the run's files. A resumed run continues
as if it had never stopped. Checkpoints need no generator states for this, because every random
number is a function of the seed and of the step or image (`common.STREAMS`).
"""

import contextlib
import math
import os
import signal
import sys
import time

import torch
from torch import Tensor
from tqdm import tqdm

import common
from common import Process, UserError
from folder import RunFolder, settings

LOG_EVERY = 20      # steps


class Run:
    """A training run in the folder `args.out`.

    model_name: the model, in words, for the first line that the run prints
    image_count, classes: number of images and names of the classes in the training set
    steps, epoch_steps: number of steps in the run, and in an epoch
    micro_steps: forward passes per process in a step (gradient accumulation)
    encoder_config: saved in checkpoints as "encoder": the arguments of `ViT` or, in a probe, the
        name of its encoder
    keeps: True in pretraining, which keeps an epoch_NNNN.pt every --save-every epochs; other stages
        evaluate instead and keep best.pt
    shown: the fields of the log that the progress bar shows
    parts: the objects whose state dicts last.pt holds, by name; other checkpoints hold only the
        model's state dict
    """

    def __init__(self, args, process: Process, model_name: str, *, image_count: int, steps: int,
                 epoch_steps: int, micro_steps: int, encoder_config, classes=(),
                 keeps: bool = False, shown=("loss",), **parts):
        self.args, self.process, self.folder = args, process, RunFolder(args.out)
        self.model_name, self.encoder_config = model_name, encoder_config
        self.image_count, self.classes = image_count, classes
        self.record = {"args": vars(args), "images": image_count}
        self.keeps, self.shown = keeps, shown
        self.total, self.epoch_steps, self.micro_steps = steps, epoch_steps, micro_steps
        # steps between evaluations or kept checkpoints, and steps between last.pt and last.pt
        self.save_every = self.last_every = args.save_every
        if "epochs" in args:      # segmentation counts in iterations
            self.save_every, self.last_every = args.save_every * epoch_steps, epoch_steps
        self.stop_step = min(steps, args.max_steps or steps)
        self.parts = parts | {"scaler": process.scaler}
        self.best_scores = {}
        self.evaluated_step = 0         # steps done at the last evaluation
        self.evaluating = False
        self.log_bytes = 0              # the log's length when last.pt was written
        self.metrics = {}               # {name: [its values since the last line of the log]}
        self.last_line = {}
        self.steps_without_loss = 0     # steps of the latest log lines without a finite loss
        self.stop_signal = 0            # the number of the signal that asked to stop, or 0
        self.timed_step = None          # the speed is measured from this step on
        self.timed_since = self.waited = 0.0

    def say(self, line: str):
        """Prints a line on rank 0."""
        if self.process.rank == 0:
            tqdm.write(line)      # tqdm keeps the line clear of a progress bar
            sys.stdout.flush()

    # ------------------------------------------------------------------------- resuming

    def resume(self) -> int:
        """Claims the folder and loads last.pt if it exists -> the first step to do

        Checks that all processes agree on flags, data and this step. Raises UserError.
        """
        facts = common.describe_data(self.image_count, self.classes)
        self.process.agree(self.args, facts, act=self.folder.claim)
        first = self.load_last()
        self.process.agree(self.args, {"the step of last.pt": first,
                                       "the step of its evaluation": self.evaluated_step})
        if self.process.rank == 0:
            self.folder.start(self.record, self.process, self.log_bytes)
        if self.keeps and first == 0:
            self.save("epoch_0000.pt", 0)
        if first == 0:      # a full disk shows now, not after the first epoch
            self.save("last.pt", 0, *self.parts)
        micro_batch = self.args.batch_size // self.process.world // self.micro_steps
        self.say(f"{self.args.out}: {self.model_name}; {self.image_count} images, "
                 f"{self.epoch_steps} steps an epoch, {self.process.world} x "
                 f"{self.process.device.type} in {self.process.amp or torch.float32}, "
                 f"micro-batches of {micro_batch} images, from step {first} of {self.total}")
        return first

    def load_last(self) -> int:
        """Loads last.pt into the parts -> its step, or 0 if it does not exist. Raises UserError."""
        last = self.folder.path / "last.pt"
        if not last.exists():
            return 0
        try:      # with mmap, not every process reads the whole file into memory at once
            state = torch.load(last, map_location="cpu", weights_only=True, mmap=True)
            # an earlier version saved no number of images
            saved = settings(self.record | state)
            if changed := common.differences(saved, settings(self.record)):
                raise UserError(f"{self.args.out} holds another run, so give another --out: "
                                f"{changed}")
            for name, part in self.parts.items():
                # the loss scale of one precision means nothing in another
                if name != "scaler" or state["amp"] == str(self.process.amp):
                    part.load_state_dict(state[name])
            self.best_scores, self.log_bytes = state["best"], state["log_bytes"]
            self.evaluated_step = state["evaluated_step"]
            return int(state["step"])
        except OSError as error:
            raise UserError(f"{last}: {error.strerror}") from error
        except (UserError, torch.OutOfMemoryError):      # the file is whole
            raise
        except Exception as error:                       # each kind of damage has its own
            raise UserError(f"cannot resume from {last}: {type(error).__name__}: {error}"
                            ) from error

    # ------------------------------------------------------------------------- the loop

    @contextlib.contextmanager
    def listening(self):
        """A context in which a signal asks the run to stop at its next line of the log.

        The signals are SIGINT, SIGTERM, Slurm's SIGUSR1 and, unless nohup ignores it, SIGHUP from a
        closed terminal.
        """
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.ask_to_stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask_to_stop(self, number: int, frame):
        """The signal handler: asks the run to stop.

        During an evaluation, the signal ends the process at once, because last.pt was written
        before the evaluation.
        """
        self.stop_signal = number
        name = signal.Signals(number).name
        if self.evaluating:
            line = f"stopped by {name} during an evaluation; the same command evaluates again"
        else:
            line = (f"{name}: the run saves and stops at the next line of the log, within "
                    f"{LOG_EVERY} steps")
            if number == signal.SIGINT:
                line += "; a second Ctrl-C ends it at once, without saving"
        if self.process.rank == 0:      # no print, which may be interrupted; slurm.sh reads stdout
            with contextlib.suppress(OSError):
                os.write(1 if self.evaluating else 2, f"\n{line}\n".encode())
        if self.evaluating or number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if self.evaluating:
            signal.raise_signal(number)

    def steps(self, first: int):
        """Yields the remaining steps and shows a progress bar."""
        with common.progress_bar(range(first, self.stop_step), self.args.stage, self.stop_step,
                                 initial=first, unit="step", disable=self.process.rank > 0) as bar:
            for step in bar:
                yield step
                if self.last_line:
                    shown = {name: self.last_line[name] for name in self.shown} | self.best_scores
                    bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items()},
                                    refresh=False)

    def timed(self, batches):
        """Yields `batches` and adds up how long the loop waits for them."""
        start = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def log(self, metrics: dict[str, Tensor], **more: Tensor):
        """Collects scalars and vectors, on their device, until the next line of the log."""
        for name, value in (metrics | more).items():
            self.metrics.setdefault(name, []).append(value.detach())

    def is_scheduled(self, done: int) -> bool:
        """Whether --save-every asks for an evaluation or a kept checkpoint after `done` steps"""
        return done % self.save_every == 0 or done == self.total

    def end_step(self, step: int, lr: float) -> bool:
        """Logs and saves when each is due -> whether a signal asks all processes to stop"""
        done = step + 1
        if self.timed_step is None:      # the first step compiles, so its time does not count
            self.start_clock(done)
        scheduled = self.is_scheduled(done)
        saves = scheduled or done % self.last_every == 0 or done == self.stop_step
        if not saves and done % LOG_EVERY:
            return False
        stops = self.log_line(done, lr)
        if scheduled and self.keeps:      # first: after a kill, it is written again
            self.save(f"epoch_{done // self.epoch_steps:04d}.pt", done)
        if saves or stops:                # before an evaluation, which may fail
            self.save("last.pt", done, *self.parts)
        self.start_clock(done)
        return stops

    def is_evaluation_due(self, done: int) -> bool:
        return not self.keeps and self.is_scheduled(done) and done > self.evaluated_step

    def evaluate(self, done: int, measure):
        """Logs the scores that measure() returns, in percent, and saves last.pt. If the first score
        is the highest so far, saves best.pt, too.
        """
        self.evaluating = True
        scores = measure()
        self.evaluating = False
        self.evaluated_step = done
        first = next(iter(scores))
        if scores[first] > self.best_scores.get(first, -1.0):
            self.best_scores = scores
            self.save("best.pt", done)
        self.write_line({"step": done, "epoch": done / self.epoch_steps} | scores)
        self.save("last.pt", done, *self.parts)
        said = ", ".join(f"{name} {value:.2f}%" for name, value in scores.items())
        self.say(f"step {done} of {self.total}: {said}")
        if self.timed_step is not None:      # else the first step, which compiles, is to come
            self.start_clock(done)

    def start_clock(self, done: int):
        """Measures the speed from now on, so that evaluations and saving do not count."""
        self.timed_step, self.timed_since, self.waited = done, time.perf_counter(), 0.0

    # -------------------------------------------------------------------------- the log

    def log_line(self, done: int, lr: float) -> bool:
        """Writes a line of the log -> whether a signal asks any process to stop

        Raises UserError if no loss has been finite for LOG_EVERY steps.
        """
        updates = len(self.metrics["skipped"])      # since the last line
        stop = torch.tensor(float(self.stop_signal > 0), device=self.process.device)
        self.log({"stop": stop})
        means = self.reduce_metrics()
        stops = means.pop("stop") > 0
        means["skipped"] = round(updates * means["skipped"])
        seconds = time.perf_counter() - self.timed_since
        self.last_line = {"step": done, "epoch": done / self.epoch_steps, "lr": lr} | means | {
            "memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30,
            "images_per_second": self.args.batch_size * (done - self.timed_step) / seconds,
            "loader_wait": self.waited / seconds}
        self.write_line(self.last_line)
        if means["skipped"] == updates:
            self.say(f"step {done}: all {updates} updates since the last line of the log were "
                     "skipped, because their gradients were not finite")
        finite = math.isfinite(means["loss"])
        self.steps_without_loss = 0 if finite else self.steps_without_loss + updates
        if self.steps_without_loss >= LOG_EVERY:
            raise UserError(f"step {done}: no loss of the last {self.steps_without_loss} steps is "
                            "finite; --amp bf16 may help, or another run with a lower --lr or "
                            "--clip-grad")
        return stops

    def reduce_metrics(self) -> dict:
        """The mean of each metric since the last line of the log, over steps and processes.

        Values that are not finite are left out. Besides saving, this is the only place where the
        host waits for the device.
        """
        rows = {name: torch.stack(values).float() for name, values in self.metrics.items()}
        self.metrics = {}
        sums = [x.where(x.isfinite(), 0).sum(0).flatten() for x in rows.values()]
        counts = [x.isfinite().sum(0).flatten() for x in rows.values()]
        total, count = self.process.sum(torch.stack([torch.cat(sums), torch.cat(counts)])).cpu()
        means = (total / count).split([len(each) for each in sums])
        return {name: mean.view(x.shape[1:]).tolist()
                for (name, x), mean in zip(rows.items(), means)}

    def write_line(self, line: dict):
        if self.process.rank == 0:
            self.folder.append(line)

    # ---------------------------------------------------------------------- checkpoints

    def save(self, name: str, done: int, *parts: str):
        """Writes the state dicts of `parts` (default: the model) to a checkpoint, on rank 0.

        Raises UserError, and writes nothing, if they hold a NaN or infinity.
        """
        if self.process.rank > 0:
            return
        state = {part: self.parts[part].state_dict() for part in parts or ("model",)}
        if not finite(state):
            raise UserError(f"step {done}: the model or the optimizer holds a NaN or infinity, "
                            f"and {name} is not written")
        state |= self.record | {
            "encoder": self.encoder_config, "amp": str(self.process.amp), "step": done,
            "epoch": done / self.epoch_steps, "best": self.best_scores,
            "evaluated_step": self.evaluated_step, "log_bytes": self.folder.log.tell()}
        self.folder.write(name, lambda file: torch.save(state, file))

    def report(self):
        """Prints the run's last line, unless there was nothing left to do."""
        if not self.last_line:
            return
        done = self.last_line["step"]
        said = [f"step {done} of {self.total}",
                "{images_per_second:.0f} images/s, {loader_wait:.0%} of the time waiting for data"
                .format(**self.last_line)]
        if self.best_scores:
            said.append("best evaluation: " + ", ".join(
                f"{name} {value:.2f}%" for name, value in self.best_scores.items()))
        if done < self.stop_step or self.is_evaluation_due(done):
            number = self.stop_signal
            name = signal.Signals(number).name if number else "a signal"
            said.append(f"stopped by {name}; the same command resumes")
        self.say(f"{self.args.out}: {'; '.join(said)}")


def finite(state) -> bool:
    """Whether all tensors in nested dicts are finite"""
    if isinstance(state, dict):
        return all(finite(value) for value in state.values())
    return not isinstance(state, Tensor) or bool(state.isfinite().all())
