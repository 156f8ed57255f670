"""The folder of a run: its record, its lock, its log, and files that are complete or absent.

Only rank 0 writes here.
"""

import contextlib
import fcntl
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import common
from common import Process, UserError

# Flags that may change when a run resumes: they set where files are, how fast the run is, and when
# it saves or stops. --amp may change, too, because another precision can rescue a run whose numbers
# overflow.
FREE_FLAGS = {"data", "out", "workers", "micro_batch", "compile", "recompute", "amp", "save_every",
              "max_steps"}


class RunFolder:
    """The folder `path` of a run. Call `claim` before anything else.

    args.json tells people about the run: its flags, the number of images, and its origin. last.pt
    has what a resumed run compares.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.log = None      # log.jsonl, open and locked

    def claim(self):
        """Makes the folder and locks it for this process. Changes nothing that is there. Raises
        UserError if another process has the lock, or if the folder holds models or a log that this
        run would write over.
        """
        common.make_folder(self.path)
        found = [file.name for file in (*self.path.glob("*.pt"), *self.path.glob("log.jsonl"))
                 if file.name != "epoch_0000.pt" and file.stat().st_size]
        if found and "last.pt" not in found:
            raise UserError(f"{self.path} has {min(found)}, but no last.pt to resume from; give "
                            "another --out")
        with naming(self.path / "log.jsonl"):
            self.log = open(self.path / "log.jsonl", "ab")      # noqa: SIM115
        # a POSIX lock ends with this process, even if its workers outlive it
        try:
            fcntl.lockf(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"{self.path}: another process trains in this folder") from None
        except OSError:      # the file system has no locks
            pass

    def start(self, record: dict, process: Process, log_bytes: int):
        """Writes args.json and truncates the log to the length that last.pt has saved, so that a
        run that was killed logs each step once. Prints how the origin changed, if it did.
        """
        file, origin = self.path / "args.json", find_origin(process)
        known = json.loads(file.read_text()) if file.exists() else {}
        if changed := common.differences(known.get("origin", {}), origin):
            common.note(f"{self.path} goes on: {changed}")
        text = json.dumps(record | {"origin": origin}, indent=1)
        self.write("args.json", lambda file: file.write(text.encode()))
        self.log.seek(self.log.truncate(min(log_bytes, self.log.tell())))

    def append(self, line: dict):
        """Appends a line to log.jsonl. Raises UserError if the disk is full."""
        with naming(self.path / "log.jsonl"):
            self.log.write(json.dumps(common.rounded(line)).encode() + b"\n")
            self.log.flush()

    def write(self, name: str, save):
        """Writes a file by save(file), under a temporary name until the file is complete. Raises
        UserError if the disk is full.
        """
        temporary = self.path / f"{name}.tmp"
        try:
            with naming(self.path / name):
                with open(temporary, "wb") as file:
                    save(file)
                temporary.replace(self.path / name)
        except Exception:
            temporary.unlink(missing_ok=True)      # a full disk needs the space
            raise


@contextlib.contextmanager
def naming(path: Path):
    """Turns an OSError, such as a full disk, into a UserError that names the file."""
    try:
        yield
    except (OSError, RuntimeError) as error:      # torch.save turns an OSError into a RuntimeError
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"{path}: {cause.strerror}") from error


def settings(record: dict) -> dict:
    """The settings that identify a run: all flags except FREE_FLAGS, and the number of images"""
    flags = {common.flag(name): value for name, value in record["args"].items()
             if name not in FREE_FLAGS}
    return flags | {"the number of images": record["images"]}


def find_origin(process: Process) -> dict:
    """The origin of a run: package versions, device, number of processes, and the git commit of
    this code, if it is in a repository.
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
