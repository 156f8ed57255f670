"""A training run in its folder: its log, its checkpoints, resuming, and stopping on request.

All stages that train use it. A checkpoint is written whole or not at all, and a run that resumes
goes on as if it had never stopped. For that, no state of a random generator is saved: all that is
random is a function of the seed and of the step or the image (`common.STREAMS`).
"""

import contextlib
import fcntl
import json
import math
import os
import platform
import re
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
TEMPORARY = re.compile(r"(args\.json|\w+\.pt)\.[0-9a-f]{32}\.tmp")      # what `Run.write` writes


class Run:
    """A training run in its folder `args.out`: it resumes, logs, saves, and stops when asked to.

    model_name: for the line that a run begins with. image_count: of the training set. steps,
    epoch_steps: the steps of the whole run, and of an epoch. encoder_config: what checkpoints save
    as "encoder", the arguments of `ViT` or, of a probe, its encoder's name. keeps: True in
    pretraining, which keeps an epoch_NNNN.pt every --save-every; other stages evaluate then, and
    keep best.pt. shown: the fields of the log that the progress bar shows. parts: what has a state
    that last.pt keeps, by name; other checkpoints keep the model's alone.
    """

    def __init__(self, args, process: Process, model_name: str, *, image_count: int, steps: int,
                 epoch_steps: int, encoder_config, keeps: bool = False, shown=("loss",), **parts):
        self.args, self.process, self.folder = args, process, Path(args.out)
        self.model_name, self.encoder_config = model_name, encoder_config
        self.keeps, self.shown = keeps, shown
        self.image_count, self.total, self.epoch_steps = image_count, steps, epoch_steps
        # steps between two evaluations or kept checkpoints, and between two last.pt
        self.save_every = self.last_every = args.save_every
        if "epochs" in args:      # segmentation counts in iterations
            self.save_every, self.last_every = args.save_every * epoch_steps, epoch_steps
        self.stop_step = min(steps, args.max_steps or steps)
        self.parts = parts | {"scaler": process.scaler}
        self.log_file = None         # of the first process, from `claim` on
        self.best = {}               # the best evaluation's scores
        self.evaluation_due = False  # True: last.pt is from before its evaluation
        self.line = {}               # of the log, the last one
        self.signal = 0              # the number of the one that asked to stop
        self.metrics = {}            # since the last line of the log: by name, values of steps
        self.lost = 0                # steps of the last lines that have no finite loss
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
        first = self.process.from_first(self.claim)
        state = self.read_last()
        seen = state["step"] if state else 0
        if self.process.sum(torch.tensor(float(seen != first), device=self.process.device)) > 0:
            raise UserError(f"not all processes see the same {self.folder}/last.pt")
        if state:
            try:
                for name, part in self.parts.items():
                    # the scale of one precision means nothing to another
                    if name != "scaler" or state["amp"] == str(self.process.amp):
                        part.load_state_dict(state[name])
                self.best = state["best"]
                self.evaluation_due = state.get("evaluation_due", False)
            except Exception as error:      # each kind of damage has its own
                raise self.damaged(error) from error
        if self.keeps and self.is_scheduled(first - 1):      # the first, or a kill came before it
            self.keep(first)
        self.say(f"{self.folder}: {self.model_name}; {self.image_count} images, {self.epoch_steps} "
                 f"steps an epoch, {self.process.world} x {self.process.device.type} in "
                 f"{self.process.amp or torch.float32}, from step {first} of {self.total}")
        return first

    def claim(self) -> int:
        """Decides whether this run may work in its folder, and starts to -> last.pt's step, or 0

        Writes args.json: the flags, their defaults, the number of images, and where the run comes
        from. Raises UserError if the folder is another run's, or if this run is already at work.
        """
        common.make_folder(self.folder)
        record = {"args": vars(self.args), "defaults": self.args.defaults,
                  "images": self.image_count}
        origins = read_origins(self.folder, record)
        if not (self.folder / "last.pt").exists():
            check_new(self.folder, known=bool(origins))
        self.log_file = lock_log(self.folder)
        state = self.read_last()
        for left in self.folder.iterdir():      # by a process that was killed
            if TEMPORARY.fullmatch(left.name):
                left.unlink()
        origin = find_origin(self.process)
        if origins and origin != origins[-1]:
            self.say(f"{self.folder} goes on: {differences(origins[-1], origin)}")
        if origin not in origins[-1:]:
            origins.append(origin)
        record = json.dumps(record | {"origins": origins}, indent=1)
        self.write("args.json", lambda path: path.write_text(record))
        first = state["step"] if state else 0
        trim_log(self.log_file, first, bool(state) and state.get("evaluation_due", False))
        if state:
            self.compare_ages()
        return first

    def read_last(self) -> dict | None:
        """The content of last.pt, or None if there is none. Raises UserError."""
        last = self.folder / "last.pt"
        if not last.exists():
            return None
        try:      # mapped into memory: not each process reads all of it at once
            state = torch.load(last, map_location="cpu", weights_only=True, mmap=True)
            return state | {"step": int(state["step"])}
        except OSError as error:
            raise UserError(f"{last}: {error.strerror}") from error
        except Exception as error:      # each kind of damage has its own
            raise self.damaged(error) from error

    def damaged(self, error: Exception) -> UserError:
        return UserError(f"cannot resume from {self.folder}/last.pt, which is damaged or of "
                         f"another kind ({type(error).__name__})")

    def compare_ages(self):
        """Prints a line if the model that a run starts from, or its teacher, has changed since."""
        last = self.folder / "last.pt"
        for name in ("checkpoint", "encoder", "teacher"):
            file = vars(self.args).get(name)
            if file and os.path.isfile(file) and os.path.getmtime(file) > os.path.getmtime(last):
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

    def log(self, metrics: dict[str, Tensor], **more: Tensor):
        """Keeps scalars and vectors on their device until the next line of the log."""
        for name, value in (metrics | more).items():
            self.metrics.setdefault(name, []).append(value.detach())

    def is_scheduled(self, step: int) -> bool:
        """Whether --save-every asks for an evaluation, or a checkpoint to keep, after this step."""
        return (step + 1) % self.save_every == 0 or step + 1 == self.total

    def end_step(self, step: int, lr: float) -> bool:
        """Logs and saves, each if it is time -> whether a signal asks all processes to stop

        Before an evaluation, last.pt is saved: a broken image must not cost the training so far.
        """
        done = step + 1
        if self.timed_from is None:      # the first step compiles
            self.start_clock(done)
        scheduled = self.is_scheduled(step)
        saves = scheduled or done % self.last_every == 0 or done == self.stop_step
        if not saves and done % LOG_EVERY:
            return False
        updates = len(self.metrics["skipped"])      # since the last line
        means, stops = self.reduce_metrics()
        means["skipped"] = round(updates * means["skipped"])
        seconds = time.perf_counter() - self.since
        self.line = {"step": done, "epoch": done / self.epoch_steps, "lr": lr} | means | {
            "memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30,
            "images_per_second": self.args.batch_size * (done - self.timed_from) / seconds,
            "loader_wait": self.waited / seconds}
        self.write_line(self.line)
        self.check_losses(done, updates)
        if saves or stops:
            self.save("last.pt", done, *self.parts, evaluation_due=scheduled and not self.keeps)
        if scheduled and self.keeps:
            self.keep(done)
        self.start_clock(done)
        return stops

    def end_evaluation(self, step: int, scores: dict[str, float]):
        """Logs the scores of the evaluation after a step, in percent, and saves best.pt, if the
        first of them is the highest so far, and last.pt.
        """
        done = step + 1
        score = next(iter(scores))
        if scores[score] > self.best.get(score, -1.0):
            self.best = scores
            self.save("best.pt", done)
        self.write_line({"step": done, "epoch": done / self.epoch_steps} | scores)
        self.save("last.pt", done, *self.parts)
        self.start_clock(done)

    def keep(self, done: int):
        """Saves epoch_NNNN.pt, if it is not there."""
        name = f"epoch_{done // self.epoch_steps:04d}.pt"
        if not (self.folder / name).exists():
            self.save(name, done)

    def start_clock(self, done: int):
        """Measures the speed from here, so that evaluating and saving do not count."""
        self.timed_from, self.since, self.waited = done, time.perf_counter(), 0.0

    def reduce_metrics(self) -> tuple[dict, bool]:
        """Means since the last line, over steps and processes, and whether any process was asked to
        stop. Apart from saving, only here does the host wait for the device in pretraining.
        """
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
        means = {}
        for (name, total), part in zip(totals.items(), parts):
            value, count = part.view(total.shape)
            means[name] = (value / count).tolist()
        return means, asked.item() > 0

    def write_line(self, line: dict):
        """Appends a line to log.jsonl."""
        if self.process.rank == 0:
            self.log_file.write(json.dumps(common.rounded(line)).encode() + b"\n")
            self.log_file.flush()

    def check_losses(self, done: int, updates: int):
        """Says if all updates of the last line were skipped. Raises UserError if no loss has been
        finite for as many steps as a line has.
        """
        if self.line["skipped"] == updates:
            self.say(f"step {done}: all {updates} updates since the last line of the log were "
                     "skipped, because their gradients were not finite")
        self.lost = 0 if math.isfinite(self.line["loss"]) else self.lost + updates
        if self.lost >= LOG_EVERY:
            raise UserError(f"step {done}: no loss of the last {self.lost} steps is finite; --amp "
                            "bf16 may help, or another run with a lower --lr or --clip-grad")

    def save(self, name: str, step: int, *parts: str, evaluation_due: bool = False):
        """Writes a checkpoint of `parts` (default: the model), and never one that holds a NaN."""
        if self.process.rank > 0:
            return
        state = {part: self.parts[part].state_dict() for part in parts or ("model",)}
        if not finite(state):
            raise UserError(f"step {step}: the model or the optimizer holds a NaN or infinity, "
                            f"and {name} is not written")
        state |= {"encoder": self.encoder_config, "args": vars(self.args),
                  "amp": str(self.process.amp), "step": step, "epoch": step / self.epoch_steps,
                  "best": self.best, "evaluation_due": evaluation_due}
        self.write(name, lambda path: torch.save(state, path))

    def write(self, name: str, save):
        """Lets save(path) write a file, which takes its name when it is whole."""
        temporary = self.folder / f"{name}.{uuid.uuid4().hex}.tmp"
        try:
            save(temporary)
            temporary.replace(self.folder / name)
        except Exception:      # a full disk
            temporary.unlink(missing_ok=True)
            raise

    def report(self):
        """Prints the last line of a run, unless there was nothing left to do."""
        if not self.line:
            return
        done = self.line["step"]
        said = [f"step {done} of {self.total}",
                "{images_per_second:.0f} images/s, {loader_wait:.0%} of the time waiting for them"
                .format(**self.line)]
        if self.best:
            said.append("best evaluation: " + ", ".join(
                f"{name} {value:.2f}%" for name, value in self.best.items()))
        if done < self.stop_step:
            name = signal.Signals(self.signal).name if self.signal else "a signal"
            said.append(f"stopped by {name}, and the same command resumes")
        self.say(f"{self.folder}: {'; '.join(said)}")


# ------------------------------------------------------------- whose folder, and its log

def read_origins(folder: Path, record: dict) -> list[dict]:
    """Where the run of this folder comes from, by its args.json, if there is one. Raises UserError
    if that is of another run than `record`.
    """
    file = folder / "args.json"
    if not file.exists():
        return []
    try:
        known = {"defaults": {}} | json.loads(file.read_text())
        origins = known["origins"]
        changed = differences(all_flags(known, record), all_flags(record, known))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged, so that nothing says which run {folder} holds; if "
                        "this command is that run's, remove the file") from error
    if changed:
        raise UserError(f"{folder} holds another run, so give another --out: {changed}")
    return origins


def lock_log(folder: Path):
    """Opens log.jsonl for this process alone. Raises UserError if another one has it."""
    file = open(folder / "log.jsonl", "a+b")      # noqa: SIM115
    # POSIX locks end with the process, even if its loaders outlive it; and also where the process
    # opens the file a second time, and closes it
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another process trains in this folder") from None
    except OSError:      # the file system has no locks
        pass
    return file


def check_new(folder: Path, known: bool):
    """Refuses a folder without last.pt that has what a new run would write over. Raises UserError.

    known: whether args.json is there.
    """
    kept = [path.name for path in folder.glob("*.pt") if path.name != "epoch_0000.pt"]
    if kept:
        raise UserError(f"{folder} has {min(kept)} and no last.pt to go on from: give another "
                        "--out")
    log = folder / "log.jsonl"
    if not known and log.exists() and log.stat().st_size:
        raise UserError(f"{folder} has a log.jsonl and no args.json, so that it is no run of this "
                        "code: give another --out")


def trim_log(file, last: int, evaluation_due: bool):
    """Leaves in the log what a run that was killed wrote up to step `last`, and each line once and
    whole. If the evaluation of that step is due, it will be logged again.
    """
    file.seek(0)
    lines, kept = file.readlines(), {}
    for line in lines:
        with contextlib.suppress(KeyError, TypeError, ValueError):      # half of a line
            row = json.loads(line)
            step, evaluation = row["step"], "lr" not in row
            again = evaluation_due and evaluation and step == last
            if step <= last and line.endswith(b"\n") and not again:
                kept[step, evaluation] = line      # of equal ones, the last
    if list(kept.values()) != lines:
        file.truncate(0)
        file.writelines(kept.values())
        file.flush()


def all_flags(record: dict, other: dict) -> dict:
    """What says which run a record of args.json is of: all flags but FREE_FLAGS, and the number of
    images. A flag that only the other record's version of the code knows is at its default.
    """
    flags = other["args"] | other["defaults"] | record["args"]
    return {f"--{name.replace('_', '-')}": value for name, value in flags.items()
            if name not in FREE_FLAGS} | {"the number of images": record["images"]}


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
