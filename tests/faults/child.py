"""A command in a process of its own, forked from this one, in which file operations fail or the process is killed."""

import builtins
import contextlib
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from sightline import cli


@dataclass(frozen=True)
class Fault:
    """What goes wrong, when."""

    kind: str  # none, kill, kill-at, error, read-only, disk
    at: int = 0  # the number of the file operation, from 0
    code: int = 0  # errno
    after: float = 0.0  # seconds
    size: int = 0  # bytes that a file may have

    def __str__(self) -> str:
        told = {"kill": f"after {self.after:.3f} s", "disk": f"files of {self.size} bytes"}
        name = os.strerror(self.code) if self.code else ""
        return f"{self.kind} {told.get(self.kind, f'operation {self.at}')} {name}".strip()


NO_FAULT = Fault("none")


@dataclass(frozen=True)
class Ended:
    code: int  # negative: the signal
    stderr: str
    events: int
    seconds: float


class Interference:
    """Counts the operations that change files, and makes one of them fail."""

    def __init__(self, fault: Fault, counter: int):
        self.fault, self.counter, self.count = fault, counter, 0

    def event(self, half_written: object = None) -> None:
        number, fault = self.count, self.fault
        self.count += 1
        os.pwrite(self.counter, self.count.to_bytes(8, "little"), 0)
        if fault.kind == "read-only" or (fault.kind == "error" and number == fault.at):
            halve(half_written)
            raise OSError(fault.code, os.strerror(fault.code))
        if fault.kind == "kill-at" and number == fault.at:
            halve(half_written)
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        real = {"open": io.open, "fsync": os.fsync, "replace": os.replace, "rename": os.rename}

        def opened(file, mode="r", *arguments, **options):
            if isinstance(mode, str) and any(sign in mode for sign in "wax+") and file != os.devnull:
                self.event()
            return real["open"](file, mode, *arguments, **options)

        def synced(handle):
            self.event(handle)
            return real["fsync"](handle)

        def moved(name):
            def call(source, target, **options):
                self.event(source)
                return real[name](source, target, **options)

            return call

        builtins.open = io.open = opened
        os.fsync, os.replace, os.rename = synced, moved("replace"), moved("rename")


def halve(written: object) -> None:
    """As a full disk or a kill leaves a file: cut off."""
    try:
        if isinstance(written, int):
            written = f"/proc/self/fd/{written}"
        if written is not None and os.path.isfile(written):  # noqa: PTH113
            os.truncate(os.path.realpath(written), os.path.getsize(written) // 2)  # noqa: PTH202
    except OSError:
        pass


def run_in_child(arguments: tuple, folder: Path, fault: Fault = NO_FAULT, limit: float = 300.0) -> Ended:
    """`sightline ARGUMENTS` in this folder."""
    reading, writing = os.pipe()  # not a file, which a full disk would concern, too
    os.set_blocking(reading, False)
    with tempfile.TemporaryFile() as counter:
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            in_the_child(arguments, folder, fault, writing, counter.fileno())
        os.close(writing)
        status, stderr = wait_for(pid, reading, began + (fault.after if fault.kind == "kill" else limit))
        os.close(reading)
        events = int.from_bytes(os.pread(counter.fileno(), 8, 0), "little")
        return Ended(os.waitstatus_to_exitcode(status), stderr, events, time.monotonic() - began)


def wait_for(pid: int, reading: int, until: float) -> tuple[int, str]:
    text = b""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended and time.monotonic() >= until:
            os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(reading, 1 << 16):
                text += more
        if ended:
            return status, text.decode(errors="replace")
        time.sleep(0.002)


def in_the_child(arguments: tuple, folder: Path, fault: Fault, errors: int, counter: int) -> None:
    code = 70
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(errors, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        os.chdir(folder)
        sys.argv = ["sightline", *map(str, arguments)]
        os.environ["COLUMNS"] = "250"
        if fault.kind == "disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.size, fault.size))
        Interference(fault, counter).install()
        cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(code)  # never back into the code of the parent
