"""A training run in its folder: its log, its checkpoints, resuming, and stopping on request.

All stages that train use it. A checkpoint is written whole or not at all, and a run that resumes
goes on as if it had never stopped.
"""

import json
import math
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from common import Process, UserError

LOG_EVERY = 20      # steps
# Flags that may differ when a run resumes: they say where its files are, how fast it works or how
# long. --amp may, too, because another precision can rescue a run whose numbers overflow.
FREE_FLAGS = {"data", "out", "workers", "micro_batch", "compile", "recompute", "amp", "save_every",
              "max_steps"}


class Run:
    """A training run in its folder `args.out`: it resumes, logs, saves, and stops when asked to.

    images: the number of training images. steps, epoch_steps: the steps of the whole run, and of
    an epoch. encoder: what rebuilds the encoder, or the name of a probe's. shown: the fields of the
    log that the progress bar shows. parts: what has a state that last.pt keeps, by name; other
    checkpoints keep the model's alone.
    """

    def __init__(self, args, process: Process, *, images: int, steps: int, epoch_steps: int,
                 encoder, shown=("loss",), **parts):
        self.args, self.process, self.folder = args, process, Path(args.out)
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
        self.timed_from = None       # the speed is that of the steps since this one
        self.since = self.waited = 0.0

    def say(self, line: str):
        """Prints a line, once for all processes."""
        if self.process.rank == 0:
            tqdm.write(line)      # beside a progress bar
            sys.stdout.flush()

    # ------------------------------------------------------------------------- resuming

    def resume(self) -> int:
        """Loads last.pt, if there is one -> the first step to do. Raises UserError."""
        first = 0
        last = self.folder / "last.pt"
        if last.exists():
            try:
                state = torch.load(last, map_location="cpu", weights_only=True)
                self.refuse_changes(state)
                for name, part in self.parts.items():
                    # the scale of one precision means nothing to another
                    if name != "scaler" or state["amp"] == str(self.process.amp):
                        part.load_state_dict(state[name])
                first, self.best = state["step"], state["best"]
            except UserError:
                raise
            except Exception as error:      # each kind of damage has its own
                raise UserError(f"cannot resume from {last}, which is damaged or of another kind "
                                f"({type(error).__name__})") from error
        of_all = self.process.sum(torch.tensor(first, device=self.process.device))
        if of_all != first * self.process.world:
            raise UserError(f"not all processes see the same {last}")
        self.say(f"{self.folder}: {self.images} images, {self.epoch_steps} steps an epoch, "
                 f"{self.process.world} x {self.process.device.type} in "
                 f"{self.process.amp or torch.float32}, from step {first} of {self.total}")
        return first

    def refuse_changes(self, state: dict):
        """Raises UserError if last.pt is of a run with other flags or another number of images."""
        old, new = state["args"], vars(self.args)
        changes = [f"--{name.replace('_', '-')} was {old.get(name)}, is {new.get(name)}"
                   for name in sorted((old.keys() | new.keys()) - FREE_FLAGS)
                   if old.get(name) != new.get(name)]
        if state["images"] != self.images:
            changes.append(f"--data had {state['images']} images, has {self.images}")
        if changes:
            raise UserError(f"{self.folder} holds another run, so give another --out: "
                            + ", ".join(changes))

    # ------------------------------------------------------------------------- the loop

    def steps(self, first: int):
        """Yields the steps to do, with a progress bar. From here on, SIGINT, SIGTERM and SIGUSR1
        ask the run to stop at its next line of the log.
        """
        def ask(signum, frame):
            self.signal = signum
            if signum == signal.SIGINT:      # a second Ctrl-C leaves at once
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, ask)
        with tqdm(range(first, self.stop_step), self.args.stage, self.stop_step, initial=first,
                  unit="step", disable=self.process.rank > 0) as bar:
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
        asked to stop. Raises UserError if the loss is not finite.

        Apart from saving, only here does the host wait for the device in pretraining.
        """
        steps = len(self.metrics["skipped"])
        means = {name: torch.stack(values).float().mean(0)
                 for name, values in self.metrics.items()}
        self.metrics = {}
        asked = torch.tensor([float(self.signal > 0)], device=self.process.device)
        flat = torch.cat([asked, *(mean.flatten() for mean in means.values())])
        asked, *parts = (self.process.sum(flat) / self.process.world).cpu().split(
            [1, *(mean.numel() for mean in means.values())])
        seconds = time.perf_counter() - self.since
        self.line = {"step": done, "epoch": done / self.epoch_steps, "lr": lr}
        self.line |= {name: part.view(mean.shape).tolist()
                      for (name, mean), part in zip(means.items(), parts)}
        self.line |= {
            "skipped": round(self.line["skipped"] * steps),
            "memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30,
            "images_per_second": self.args.batch_size * (done - self.timed_from) / seconds,
            "loader_wait": self.waited / seconds}
        if evaluate:
            self.line |= self.keep_best(done, evaluate())
        if self.process.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "log.jsonl", "a") as file:
                file.write(json.dumps(rounded(self.line)) + "\n")
        if not math.isfinite(self.line["loss"]):
            raise UserError(f"step {done}: the loss is not finite; a lower --lr, --amp bf16 or a "
                            "smaller --clip-grad may help")
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
        state |= {"encoder": self.encoder, "args": vars(self.args), "images": self.images,
                  "amp": str(self.process.amp), "step": step, "epoch": step / self.epoch_steps,
                  "best": self.best}
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f"{name}.tmp"
        torch.save(state, temporary)
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
