"""Many faults, drawn from a seed, and what must hold after each of them.

1. The command ends with exit code 0, 1 or 2 and, if 2, with one line that says why: no traceback, no hang.
2. Every file that was there is as it was or as the command makes it: never a part of a file, never another content.
3. After a fault in writing, the same command succeeds and leaves what it leaves without any fault, and no leftovers.
4. After damage to what it reads, a command that succeeds has computed what it computes from undamaged files.
"""

import errno
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .child import Ended, Fault, run_in_child
from .workspace import COMMANDS, READ, SLOW, Reference, copy_of, digests, reference_of

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
DAMAGES = ("flip", "cut", "empty", "remove", "garbage")
# Whoever changes what a user wrote gets other results: there is no checksum of data before the first training.
UNGUARDED = ("data/rows.csv",)
OF_THE_DATA = ("check", "train probe", "train erm", "predict", "predict json", "matrix")  # what they find is then new


@dataclass(frozen=True)
class Trial:
    command: str
    fault: Fault
    damage: str = ""  # to a file that the command may read
    file: str = ""

    def __str__(self) -> str:
        return f"{self.command}: " + (f"{self.damage} {self.file}" if self.damage else str(self.fault))


@dataclass(frozen=True)
class Failure:
    trial: Trial
    reason: str


KINDS = ("kill", "kill-at", "kill-at", "error", "error", "read-only", "disk", "damage", "damage")


class Session:
    def __init__(
        self, workspace: Path, scratch: Path, seed: int, *, slow: float, references: dict[str, Reference] | None = None
    ):
        """`slow` is how often a slow command is drawn, in comparison with a fast one. `references`, of the same
        workspace and scratch folder, are filled as they are needed."""
        self.workspace, self.scratch, self.random = workspace, scratch, random.Random(seed)
        self.weights = {name: slow if name in SLOW else 1.0 for name in COMMANDS}
        self.before = digests(workspace)
        self.references = {} if references is None else references

    def reference(self, name: str) -> Reference:
        if name not in self.references:
            self.references[name] = reference_of(name, self.workspace, self.scratch / "home", run_in_child)
        return self.references[name]

    def trials(self, count: int) -> Iterator[Trial]:
        for _ in range(count):
            (name,) = self.random.choices(list(self.weights), list(self.weights.values()))
            yield self.draw(name)

    def draw(self, name: str) -> Trial:
        reference = self.reference(name)
        kind = self.random.choice(
            ("kill", "kill-at", "kill-at", "error", "error", "read-only", "disk", "damage", "damage")
        )
        at = self.random.randrange(max(1, reference.events))
        if kind == "damage":
            file = self.random.choice([path for path in self.before if path.startswith(READ) and path not in UNGUARDED])
            return Trial(name, Fault("none"), self.random.choice(DAMAGES), file)
        if kind == "kill":
            return Trial(name, Fault(kind, after=self.random.uniform(0, reference.seconds)))
        if kind == "disk":
            return Trial(name, Fault(kind, size=int(10 ** self.random.uniform(2, 6))))
        return Trial(name, Fault(kind, at, self.random.choice(ERRORS)))

    def run(self, trial: Trial) -> Failure | None:
        home = copy_of(self.workspace, self.scratch / "home")
        if trial.damage:
            damage(home / trial.file, trial.damage, self.random)
        started = digests(home)
        ended = run_in_child(COMMANDS[trial.command], home, trial.fault)
        reason = self.problem(trial, ended, started, home)
        if reason is None and not trial.damage:
            reason = self.problem_after(trial, home)
        shutil.rmtree(home, ignore_errors=True)
        return None if reason is None else Failure(trial, reason)

    def problem(self, trial: Trial, ended: Ended, started: dict[str, str], home: Path) -> str | None:
        killed = trial.fault.kind in ("kill", "kill-at")
        if ended.code not in ((0, 1, 2, -9) if killed else (0, 1, 2)) or "Traceback" in ended.stderr:
            return f"exit code {ended.code}: {ended.stderr[-1500:]}"
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        if ended.code == 2 and not (said and said[-1].startswith("sightline: ")):
            return f"exit code 2 without a line that says why: {ended.stderr[-500:]}"
        reference, now = self.reference(trial.command), digests(home)
        for path, content in now.items():
            if path.endswith((".partial", "lock")) or ".partial/" in path or content == started.get(path):
                continue
            if trial.damage and path == trial.file and content == self.before.get(path):
                continue  # repaired
            if not self.is_whole(home / path, path, content, reference, trial):
                return f"{path} is neither what it was nor what the command writes; exit code {ended.code}: {said[-1:]}"
        lost = [path for path in started if path not in now]
        if lost:
            return f"{lost[0]} is gone"
        if ended.code == 0 and trial.damage and not (trial.file.startswith("data/") and trial.command in OF_THE_DATA):
            return self.wrong_result(now, reference, trial)
        return None

    def is_whole(self, file: Path, path: str, content: str, reference: Reference, trial: Trial) -> bool:
        if content == reference.files.get(path):
            return True
        if path.endswith((".jsonl", ".sha256")) or path.startswith("cache/"):  # grow, or have a name of their own
            return True
        in_progress = path.startswith(("new/", "grid/", "erm/", "masked/", "probe/"))
        if path.endswith(".json") and (path in reference.volatile or in_progress):
            try:
                return isinstance(json.loads(file.read_text()), dict | list)
            except ValueError:
                return False
        if path.endswith(".safetensors"):
            from sightline.vit.weights import read_tensors

            return bool(read_tensors(file)[0])  # an intermediate checkpoint, which has a checksum
        return path in reference.volatile or trial.damage != ""

    def wrong_result(self, now: dict[str, str], reference: Reference, trial: Trial) -> str | None:
        for path, content in reference.files.items():
            unchanged = content == self.before.get(path)
            if unchanged or path in reference.volatile or path == trial.file or path.startswith("cache/"):
                continue
            if now.get(path) != content:
                return f"succeeded with another {path}"
        return None

    def problem_after(self, trial: Trial, home: Path) -> str | None:
        """The same command again, now without a fault."""
        arguments, reference = COMMANDS[trial.command], self.reference(trial.command)
        arguments = (
            (*arguments, "--resume") if trial.command == "train probe" and (home / "new").exists() else arguments
        )
        if trial.command == "toy" and (home / "new").exists():
            return None  # it was finished
        again = run_in_child(arguments, home)
        if again.code != reference.code:
            return f"not again: exit code {again.code}: {again.stderr[-1500:]}"
        now = digests(home)
        if left := [path for path in now if ".partial" in path]:
            return f"left behind: {left[0]}"
        resumed = "new/run.json" if "--resume" in arguments else ""  # it says so
        for path, content in reference.files.items():
            if path != resumed and path not in reference.volatile and now.get(path) != content:
                return f"another {path} after a second try"
        return None


def damage(file: Path, how: str, drawn: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
    elif how == "empty" or not content:
        file.write_bytes(b"")
    elif how == "cut":
        file.write_bytes(content[: drawn.randrange(len(content))])
    elif how == "garbage":
        file.write_bytes(drawn.randbytes(len(content)))
    else:
        at = drawn.randrange(8 * len(content))
        content[at // 8] ^= 1 << at % 8
        file.write_bytes(content)
