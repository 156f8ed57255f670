"""A training run in its folder: it logs, saves, resumes, refuses what does not fit, leaves.

It knows no stage. Checkpoints are written whole or not at all; a run that resumes is the run
that was never stopped.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import data
from checkpoint import first_line, load_checkpoint
from common import FREE_FLAGS, STOP_SIGNALS, Machine, Plan, UserError, flag, leave_group, lock

# what a run is made of besides its flags
SOURCES = {"teacher": "the weights of --teacher", "encoder": "the weights in CHECKPOINT",
           "images": "the class or file names in --data"}
LOG_EVERY = 20      # steps
PATIENCE = 20       # skipped updates in a row; fp16's scaler settles in fewer


class Log:
    """log.jsonl: means since its last line, over all processes, and speed and memory."""

    def __init__(self, path: Path, machine: Machine, step: int, batch_size: int):
        self.path, self.machine, self.batch_size = path, machine, batch_size
        self.restart(step)
        if machine.rank == 0 and path.exists():      # steps that a killed run did not save
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines
                    if line.endswith("\n") and json.loads(line)["step"] <= step]
            path.write_text("".join(kept))

    def restart(self, step: int):
        """After `step`; evaluation and saving do not count as training."""
        self.step, self.since, self.waited = step, time.perf_counter(), 0.0
        self.metrics = []

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
        """A line for `step`. But for saving and evaluation, the host waits for the device here
        alone.
        """
        line = {}
        for name in dict.fromkeys(name for metrics in self.metrics for name in metrics):
            mean = torch.stack([metrics[name] for metrics in self.metrics if name in metrics])
            mean = self.machine.sum(mean.float().mean(0)) / self.machine.world
            line[name] = mean.tolist()
        steps = step - self.step
        seconds = time.perf_counter() - self.since
        return line | {"step": step, "skipped": round(line["skipped"] * steps),
                       "memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30,
                       "images_per_second": self.batch_size * steps / seconds,
                       "loader_wait": self.waited / seconds}

    def write(self, line: dict):
        if self.machine.rank == 0:
            with open(self.path, "a") as file:
                file.write(json.dumps(plain(line)) + "\n")


class Run:
    """A training run in its folder: it resumes, logs, saves, and leaves when it is asked to.

    encoder: the arguments that rebuild the encoder. sources: digests of what the run is made of
    besides its flags, by the names in SOURCES. score: the one by which evaluations are compared.
    shown: fields of the log for the progress bar. parts: what a checkpoint consists of, such as
    model and optimizer.
    """

    def __init__(self, args, machine: Machine, plan: Plan, encoder: dict,
                 sources: dict[str, str], score: str = "", shown=("loss",), **parts):
        self.args, self.machine, self.plan, self.folder = args, machine, plan, Path(args.out)
        self.score = score
        self.shown = shown
        self.parts = parts | {"scaler": machine.scaler}
        self.description = {"encoder": encoder, "args": vars(args), "sources": sources}
        self.best, self.line, self.skipped, self.signals = {}, {}, 0, []
        self.saved_at = time.monotonic()
        self.good = "nothing was saved yet"
        self.lock = lock(self.folder) if machine.rank == 0 else contextlib.nullcontext()
        self.first = self.resume()
        self.last = max(self.first, min(plan.steps, args.max_steps or plan.steps))
        self.log = Log(self.folder / "log.jsonl", machine, self.first, args.batch_size)

    def resume(self) -> int:
        """Loads last.pt, where there is one -> the first step, the same in all processes."""
        last = self.folder / "last.pt"
        step = 0
        try:
            if last.exists():
                state = load_checkpoint(last)
                self.refuse_changes(state)
                if state["scaler"]["growth_factor"] != self.machine.scaler.get_growth_factor():
                    state["scaler"] = self.machine.scaler.state_dict()      # another precision
                for name, part in self.parts.items():
                    part.load_state_dict(state[name])
                self.best = state["best"]
                step = state["step"]
                self.good = f"{last} holds step {step}"
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(f"cannot resume from {last} ({first_line(error)}); remove it to "
                            "start over") from error
        highest, lowest = self.machine.largest(step, -step)
        if highest != -lowest:
            raise UserError("not all processes see the same last.pt: --out must be on a disk "
                            "that all machines share")
        return step

    def refuse_changes(self, state: dict):
        """What a run was made of does not change under it."""
        new, old = self.description["args"], state["args"]
        if new["stage"] != old.get("stage"):
            raise UserError(f"{self.folder} holds a run of {old.get('stage')}.py: give another "
                            "--out")
        changes = [f"{flag(name)} was {old.get(name)}, is {new.get(name)}"
                   for name in sorted(new | old)
                   if name not in FREE_FLAGS and new.get(name) != old.get(name)]
        changes += [f"{SOURCES[name]} changed"
                    for name, digest in self.description["sources"].items()
                    if digest != state["sources"].get(name)]
        if changes:
            raise UserError(f"{self.folder} holds another run ({'; '.join(changes)}): give the "
                            "same flags and files to resume, or another --out")

    def announce(self, *what: str):
        """The first lines that a run prints."""
        if self.machine.rank == 0:
            flags = json.dumps(vars(self.args), indent=1)
            (self.folder / "args.json").write_text(flags + "\n")
            precision = str(self.machine.amp or torch.float32).removeprefix("torch.")
            what = "; ".join([
                *what, f"steps {self.first} to {self.last} of {self.plan.steps}, "
                f"{self.plan.epoch_steps} an epoch",
                f"{self.machine.world} x {self.machine.device.type} in {precision}"])
            print(f"{self.args.stage}: {what}\n{self.folder}: {self.good}", flush=True)

    def batches(self, views):
        """The micro-batches of the steps to do; --repeat-batch: those of step 0, repeatedly."""
        args, machine, plan = self.args, self.machine, self.plan
        first, last = (0, 1) if args.repeat_batch else (self.first, self.last)
        order = data.train_order(len(views), args.batch_size, plan.micro_batch, args.seed,
                                 first, last, machine.rank, machine.world)
        batches = data.load(views, order, machine)
        return itertools.cycle(list(batches)) if args.repeat_batch else self.log.waiting(batches)

    def steps(self):
        """Yields the steps to do, with a progress bar."""
        self.hear_signals()
        bar = tqdm(range(self.first, self.last), self.args.stage, self.last, unit="step",
                   initial=self.first, disable=self.machine.rank > 0)
        with bar, self.lock:
            for step in bar:
                yield step
                if self.line:
                    shown = {name: self.line[name] for name in self.shown} | self.best
                    bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items()},
                                    refresh=False)

    def hear_signals(self):
        """Signals ask to finish the step, save and leave; a second Ctrl-C leaves at once.

        What is ignored stays so, such as SIGHUP under nohup.
        """
        def receive(number, frame):
            self.signals.append(number)
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, receive)

    def end_step(self, step: int, evaluate=None) -> dict:
        """A log line every 20 steps; a checkpoint by schedule, clock or signal. -> the line

        By the schedule, `evaluate` returns scores, and best.pt keeps the step with the highest.
        Without it, the schedule keeps an epoch_NNNN.pt.
        """
        done = step + 1
        scheduled = done % self.plan.save_every == 0 or done == self.plan.steps
        overdue = 0 < 60 * self.args.save_minutes <= time.monotonic() - self.saved_at
        overdue, number = self.machine.largest(overdue, max(self.signals, default=0))
        saves = scheduled or overdue or number or done == self.last
        if not saves and done % LOG_EVERY:
            return {}
        steps = done - self.log.step
        group = self.parts["optimizer"].param_groups[0]
        self.line = self.log.means(done)
        self.line |= {"epoch": done / self.plan.epoch_steps,
                      "lr": group["lr"] / group["lr_scale"]}
        if scheduled and evaluate:
            scores = evaluate()
            self.line |= scores
            if scores[self.score] > self.best.get(self.score, -1.0):
                self.best = scores
                self.save("best.pt", done)
        elif scheduled:
            self.save(f"epoch_{done // self.plan.epoch_steps:04d}.pt", done)
        self.log.write(self.line)
        self.skipped = self.skipped + steps if self.line["skipped"] == steps else 0
        if self.skipped >= PATIENCE:
            raise UserError(f"step {done}: {self.skipped} updates in a row had no finite "
                            f"gradient; {self.good}. To try: resume with --amp bf16 or off, or "
                            "restart with a lower --lr")
        if saves:
            self.save("last.pt", done, tuple(self.parts))
            self.saved_at = time.monotonic()
            self.good = f"{self.folder / 'last.pt'} holds step {done}"
        if number:
            if self.machine.rank == 0:
                print(f"{signal.Signals(number).name}: {self.good}; the same command resumes",
                      flush=True)
            leave_group()
            sys.exit(130 if number == signal.SIGINT else 0)
        self.log.restart(done)
        return self.line

    def save(self, name: str, step: int, parts: tuple[str, ...] = ("model",)):
        """Writes a checkpoint of `parts` whole or not at all, and never one that holds a NaN."""
        state = {part: self.parts[part].state_dict() for part in parts}
        if self.machine.largest(not finite(state))[0]:      # all processes stop, or none
            raise UserError(f"step {step}: the model or the optimizer holds a NaN or infinity; "
                            f"{self.good}. To try: a lower --lr, a smaller --weight-decay, "
                            "--clip-grad 1")
        if self.machine.rank == 0:
            temporary = self.folder / f"{name}.tmp"
            with open(temporary, "wb") as file:
                torch.save(state | self.description | {"step": step, "best": self.best}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)

    def report(self, *what: str) -> dict[str, float]:
        """Prints the last line of a run -> the best scores"""
        parts = [f"step {self.last} of {self.plan.steps}"]
        if self.line:
            parts.append("{images_per_second:.0f} images/s, {loader_wait:.0%} of the time "
                         "waiting for them, {memory_gib:.1f} GiB on the GPU".format(**self.line))
        if self.best:
            scores = [f"{name} {value:.2f}%" for name, value in self.best.items()]
            parts.append("best " + ", ".join(scores))
        if self.machine.rank == 0:
            print(f"{self.folder}: {'; '.join([*parts, *what])}")
        return self.best


def finite(state) -> bool:
    """Whether all tensors of nested dicts are finite."""
    if isinstance(state, dict):
        return all(finite(value) for value in state.values())
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def plain(value):
    """For JSON: six digits of each number, and null for what is not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda text: None,
                      parse_float=lambda text: float(f"{float(text):.6g}"))
