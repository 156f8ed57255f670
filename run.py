"""A run in its folder: it logs, saves, resumes, refuses what does not fit, and leaves when it is asked to."""

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import first_line, load_checkpoint
from common import FREE_FLAGS, STOP_SIGNALS, Machine, Plan, UserError, flag, is_first, leave_group, lock

SOURCES = {"teacher": "the weights of --teacher", "encoder": "the weights in CHECKPOINT",
           "images": "the class or file names in --data"}      # what a run is made of besides its flags
LOG_EVERY = 20      # steps
PATIENCE = 20       # skipped updates in a row; fp16's scaler settles in fewer


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


def finite(state) -> bool:
    """Whether all tensors of nested dicts are finite."""
    if isinstance(state, dict):
        return all(finite(value) for value in state.values())
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def plain(value):
    """For JSON: six digits of each number, and null for what is not finite, which JSON has no word for."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"),
                      parse_constant=lambda text: None)
