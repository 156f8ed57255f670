"""A training run in its folder: its log, its checkpoints, resuming, and stopping on request.

It knows no stage. A checkpoint is written whole or not at all, and a run that resumes is the run
that was never stopped.
"""

import contextlib
import hashlib
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
from common import FREE_FLAGS, STOP_SIGNALS, Plan, Process, UserError, flag, leave_group, lock

LOG_EVERY = 20      # steps
# A run stops after this many skipped updates in a row. They are counted in whole windows between
# log lines, so it stops after 20 to 39 of them. fp16's scale starts at 2 ** 16 and halves
# at each of them: after 16 it is 1, and something else must be wrong.
PATIENCE = 20


class Log:
    """log.jsonl: means since the last line over all processes, speed, and memory."""

    def __init__(self, path: Path, process: Process, step: int, batch_size: int):
        self.path, self.process, self.batch_size = path, process, batch_size
        self.restart(step)

    def restart(self, step: int):
        """Measures from `step` on, so that evaluation and saving do not count as training."""
        self.step = step
        self.metrics = {}      # by name, the values of the steps
        self.restart_clock(step)

    def restart_clock(self, step: int):
        self.timed_from, self.since, self.waited = step, time.perf_counter(), 0.0

    def add(self, metrics: dict[str, Tensor]):
        """Keeps detached scalars and vectors, on their device."""
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append(value)

    def waiting(self, batches):
        """Passes `batches` on, and adds up how long the loop waits for them."""
        start = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def means(self, step: int) -> dict:
        """-> the line for `step`.

        In training, this is the only place where the host waits for the device.
        """
        means = {name: torch.stack(values).float().mean(0)
                 for name, values in self.metrics.items()}
        sizes = [mean.numel() for mean in means.values()]
        flat = self.process.sum(torch.cat([mean.flatten() for mean in means.values()]))
        parts = (flat / self.process.world).cpu().split(sizes)
        line = {name: part.view(mean.shape).tolist()
                for (name, mean), part in zip(means.items(), parts)}
        seconds = time.perf_counter() - self.since
        return line | {"step": step, "skipped": round(line["skipped"] * (step - self.step)),
                       "memory_gib": torch.cuda.max_memory_allocated() / 2 ** 30,
                       "images_per_second": self.batch_size * (step - self.timed_from) / seconds,
                       "loader_wait": self.waited / seconds}

    def cut(self):
        """Cuts off what a killed run logged after its last checkpoint, and what is damaged."""
        self.path.touch()
        size = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    # without a line break, a kill cut the line short
                    if not line.endswith(b"\n") or json.loads(line)["step"] > self.step:
                        break
                except (ValueError, KeyError, TypeError):
                    print(f"{self.path}: line {number} is damaged; the log ends before it")
                    break
                size += len(line)
        os.truncate(self.path, size)


class Run:
    """A training run in its folder `args.out`: it resumes, logs, saves, and stops when asked to.

    dataset: what it trains on. encoder: the arguments that rebuild the encoder. stateful: what a
    checkpoint consists of, by name, such as model and optimizer. val: what it is evaluated on, if
    it is. shown: the fields of the log that the progress bar shows.
    """

    def __init__(self, args, process: Process, plan: Plan, dataset, encoder: dict, stateful: dict,
                 val=None, shown=("loss",)):
        self.args, self.process, self.plan, self.folder = args, process, plan, Path(args.out)
        self.stateful = stateful | {"scaler": process.scaler}
        self.shown = shown
        inputs = {name: digest_input(file) for name, file in vars(args).items()
                  if name in ("teacher", "checkpoint") and file}
        inputs |= {"images": len(dataset), "classes": list(getattr(dataset, "classes", []))}
        if val is not None:
            inputs |= {"val_images": len(val), "val_classes": list(getattr(val, "classes", []))}
        self.description = {"encoder": encoder, "args": vars(args), "inputs": inputs}
        self.first = 0               # step to do
        self.best = {}               # the best evaluation's scores
        self.line = {}               # of the log, the last one
        self.skipped_in_a_row = 0
        self.signals = []            # received and not yet acted on
        self.saved_at = time.monotonic()
        self.saved_step = None       # of last.pt
        self.held = contextlib.ExitStack()      # the lock of the folder, in the first process

    def resume(self):
        """Locks the folder, and loads last.pt, if there is one.

        All processes start from the same step. Raises UserError.
        """
        self.process.first_alone(lambda: self.held.enter_context(lock(self.folder)))
        last = self.folder / "last.pt"
        try:
            if last.exists():
                state = load_checkpoint(last)
                self.best = state["best"]
                self.refuse_changes(state)
                if state["scaler"]["growth_factor"] != self.process.scaler.get_growth_factor():
                    state["scaler"] = self.process.scaler.state_dict()
                    self.say(f"--amp was {state['args']['amp']}, is {self.args.amp}: the scale of "
                             "the loss starts anew")
                for name, part in self.stateful.items():
                    part.load_state_dict(state[name])
                self.saved_step = self.first = state["step"]
                # the schedule stays what it was, even if --data has another number of images now
                self.plan.steps = state.get("steps", self.plan.steps)
                self.plan.warmup = state.get("warmup", self.plan.warmup)
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(f"cannot resume from {last} ({first_line(error)}); remove it to "
                            "start over") from error
        highest, minus_lowest = self.process.largest(self.first, -self.first)
        if highest != -minus_lowest:
            raise UserError("not all processes see the same last.pt: --out must be on a disk "
                            "that all machines share")
        self.last = max(self.first, min(self.plan.steps, self.args.max_steps or self.plan.steps))
        self.log = Log(self.folder / "log.jsonl", self.process, self.first, self.args.batch_size)
        if self.process.rank == 0:
            self.log.cut()

    def say(self, line: str):
        """Prints a line, once for all processes."""
        if self.process.rank == 0:
            print(line, flush=True)

    def refuse_changes(self, state: dict):
        """Raises UserError if last.pt is of a run with other flags, input files or classes.

        The folder of the images may have moved, and their number may differ, because a broken one
        may have been removed: a printed line says so.
        """
        new = self.description["args"]
        old = state["args"]
        if new["stage"] != old.get("stage"):
            raise UserError(f"{self.folder} holds a run of {old.get('stage')}.py: give another "
                            "--out")
        changes = [f"{flag(name)} was {old[name]}, is {new.get(name)}"
                   for name in sorted(old.keys() - FREE_FLAGS) if new.get(name) != old[name]]
        inputs = self.description["inputs"]
        changes += [f"{title} was {old[name]}, is {new[name]}, with other contents"
                    for name, title in (("teacher", "--teacher"), ("checkpoint", "CHECKPOINT"))
                    if inputs.get(name) != state["inputs"].get(name)]
        changes += [f"the {title}classes in --data {new['data']} changed"
                    for name, title in (("classes", ""), ("val_classes", "validation "))
                    if inputs.get(name) != state["inputs"].get(name, inputs.get(name))]
        if changes:
            raise UserError(f"{self.folder} holds another run ({'; '.join(changes)}): give the "
                            "same flags and files to resume, or another --out")
        before = f"{old['data']} with {state['inputs']['images']} images"
        now = f"{new['data']} with {inputs['images']} images"
        if before != now:
            self.say(f"--data was {before}, is {now}: the run goes on with these")
        before, now = state["inputs"].get("val_images"), inputs.get("val_images")
        if before not in (None, now):
            self.say(f"--data had {before} validation images, has {now}: earlier scores were of "
                     "another set, and the best one is looked for anew")
            self.best = {}
        for name in sorted(new.keys() - old.keys() - FREE_FLAGS):
            self.say(f"the run was started before there was {flag(name)}, and goes on with "
                     f"{new[name]}")

    def saved(self) -> str:
        """A sentence about what last.pt holds."""
        if self.saved_step is None:
            return "nothing was saved yet"
        return f"{self.folder / 'last.pt'} holds step {self.saved_step}"

    def announce(self, *what: str):
        """Prints the first lines of a run: what it is, and where it is."""
        precision = str(self.process.amp or torch.float32).removeprefix("torch.")
        what = "; ".join([
            *what, f"steps {self.first} to {self.last} of {self.plan.steps}, "
            f"{self.plan.epoch_steps} an epoch",
            f"{self.process.world} x {self.process.device.type} in {precision}"])
        where = f"resumes, {self.saved()}" if self.first else "a new run"
        if self.first == self.plan.steps:
            where = f"complete, {self.saved()}: there is nothing to do"
        self.say(f"{self.args.stage}: {what}\n{self.folder}: {where}")
        flags = json.dumps(vars(self.args), indent=1) + "\n"
        self.process.first_alone(self.write, "args.json", lambda path: path.write_text(flags))

    def batches(self, views):
        """Yields the micro-batches of the steps to do. With --repeat-batch, those of step 0 come
        again and again.
        """
        args, process = self.args, self.process
        first, last = (0, 1) if args.repeat_batch else (self.first, self.last)
        order = data.train_order(len(views), args.batch_size, self.plan.micro_batch, args.seed,
                                 first, last, process.rank, process.world)
        batches = data.load(views, order, process)
        return itertools.cycle(list(batches)) if args.repeat_batch else self.log.waiting(batches)

    def steps(self):
        """Yields the steps to do, with a progress bar."""
        self.hear_signals()
        with tqdm(range(self.first, self.last), self.args.stage, self.last, unit="step",
                  initial=self.first, disable=self.process.rank > 0) as bar:
            for step in bar:
                yield step
                if self.line:
                    shown = {name: self.line[name] for name in self.shown} | self.best
                    bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items()},
                                    refresh=False)

    def hear_signals(self):
        """Makes a signal a request to finish the step, save and leave.

        A second Ctrl-C leaves at once. A signal that is ignored stays so, such as SIGHUP under
        nohup.
        """
        def receive(signum, frame):
            self.signals.append(signum)
            if signum == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, receive)

    def end_step(self, step: int, evaluate=None) -> dict:
        """Logs, evaluates, saves and stops, each if it is time -> the log's line, or {}.

        `evaluate` returns scores in percent, of which the first decides which step is the best.
        """
        done = step + 1
        scheduled = done % self.plan.save_steps == 0 or done == self.plan.steps
        overdue = 0 < 60 * self.args.save_minutes <= time.monotonic() - self.saved_at
        # all processes do the same, whichever got the signal
        overdue, signum = self.process.largest(overdue, max(self.signals, default=0))      # 0: none
        saves = scheduled or overdue or signum or done == self.last
        if not saves and done % LOG_EVERY:
            if step == self.first:      # which compiles, and starts DDP
                self.log.restart_clock(done)
            return {}
        self.line = self.log.means(done) | {"epoch": done / self.plan.epoch_steps,
                                            "lr": self.plan.learning_rate(step)}
        if scheduled and evaluate:
            self.line |= self.keep_best(done, evaluate())
        elif scheduled:
            self.save(f"epoch_{done // self.plan.epoch_steps:04d}.pt", done)
        self.process.first_alone(self.write_line)
        self.stop_if_stuck(done)
        if saves:
            self.save("last.pt", done, tuple(self.stateful))
            self.saved_at = time.monotonic()
            self.saved_step = done
        if signum and done < self.last:
            self.leave(signum)
        self.log.restart(done)
        return self.line

    def keep_best(self, done: int, scores: dict[str, float]) -> dict[str, float]:
        """Writes best.pt if the first score is the highest so far -> the scores"""
        score = next(iter(scores))
        if scores[score] > self.best.get(score, -1.0):
            self.best = scores
            self.save("best.pt", done)
        return scores

    def stop_if_stuck(self, done: int):
        """Raises UserError after PATIENCE skipped updates in a row."""
        steps = done - self.log.step
        all_skipped = self.line["skipped"] == steps
        self.skipped_in_a_row = self.skipped_in_a_row + steps if all_skipped else 0
        if self.skipped_in_a_row >= PATIENCE:
            raise UserError(f"step {done}: {self.skipped_in_a_row} updates in a row had no finite "
                            f"gradient; {self.saved()}. To try: resume with --amp bf16 or off, or "
                            "restart with a lower --lr")

    def leave(self, signum: int):
        """Ends all processes after a signal, once last.pt is written."""
        self.say(f"{signal.Signals(signum).name}: {self.saved()}; the same command resumes")
        leave_group()
        sys.exit(130 if signum == signal.SIGINT else 0)

    def save(self, name: str, step: int, what: tuple[str, ...] = ("model",)):
        """Writes a checkpoint of `what`, whole or not at all, and never one that holds a NaN."""
        state = {each: self.stateful[each].state_dict() for each in what}
        if self.process.largest(not finite(state))[0]:      # all processes stop, or none
            raise UserError(f"step {step}: the model or the optimizer holds a NaN or infinity; "
                            f"{self.saved()}. To try: a lower --lr, a smaller --weight-decay, "
                            "--clip-grad 1")
        state |= self.description | {"step": step, "epoch": step / self.plan.epoch_steps,
                                     "steps": self.plan.steps, "warmup": self.plan.warmup,
                                     "best": self.best}
        self.process.first_alone(self.write, name, lambda path: save_whole(state, path))

    def write_line(self):
        """Appends the line to the log."""
        with self.writing(self.log.path), open(self.log.path, "a") as file:
            file.write(json.dumps(rounded(self.line)) + "\n")

    def write(self, name: str, function):
        """Lets `function` write a temporary file, which then takes the place of an older one."""
        temporary = self.folder / f"{name}.tmp"
        with self.writing(self.folder / name):
            try:
                function(temporary)
                temporary.replace(self.folder / name)
            finally:
                temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, path: Path):
        """Makes a UserError of what goes wrong while `path` is written."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            # PyTorch's writer raises an error of its own on top of that of a full disk
            reason = error if isinstance(error, OSError) else error.__context__ or error
            raise UserError(f"cannot write {path} ({first_line(reason)}); {self.saved()}"
                            ) from error

    def report(self, *what: str) -> dict[str, float]:
        """Prints the last line of a run, and releases its folder -> the best scores"""
        said = [f"step {self.last} of {self.plan.steps}"]
        if self.line:
            said.append("{images_per_second:.0f} images/s, {loader_wait:.0%} of the time waiting "
                        "for them".format(**self.line))
            if self.process.device.type == "cuda":
                said.append(f"{self.line['memory_gib']:.1f} GiB on the GPU")
        if self.best:
            scores = [f"{name} {value:.2f}%" for name, value in self.best.items()]
            said.append("best " + ", ".join(scores))
        self.say(f"{self.folder}: {'; '.join([*said, *what])}")
        self.held.close()
        return self.best


def save_whole(state: dict, path: Path):
    """Writes a checkpoint, and returns when it is on the disk."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def finite(state) -> bool:
    """Whether all tensors of nested dicts are finite."""
    if isinstance(state, dict):
        return all(finite(value) for value in state.values())
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def rounded(value):
    """Nested lists and dicts with six digits of each number; JSON has no NaN, so None for it."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"),
                      parse_constant=lambda text: None)


def digest_input(name: str) -> str:
    """What a --teacher or CHECKPOINT is, wherever it lies: a hash of the contents of its file.

    The file may be open_clip's MODEL/FILE, where MODEL counts, too. What names no file, such as
    a tag or timm/NAME, stands for itself.
    """
    model, _, file = name.partition("/")
    for prefix, path in (("", Path(name)), (f"{model}/", Path(file))):
        if path.is_file():
            sha = hashlib.sha256()
            with open(path, "rb") as opened:
                while chunk := opened.read(2 ** 24):
                    sha.update(chunk)
            return prefix + sha.hexdigest()
    return name
