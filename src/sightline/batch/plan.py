"""How a collection is divided: into chunks of consecutive images, each of which becomes one part, whoever computes it.

A chunk depends on the list of images and the size of a chunk only. So any number of machines, processes or workers
writes the same parts, and a part that is there need not be computed again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.remote import join, names_in, read_bytes, write_bytes
from ..errors import UserError
from .sources import Item

FORMAT = 1
PLAN = "plan.json"
WORDS = {
    "kind": "another command",
    "weights": "other weights",
    "intervention": "another intervention",
    "inputs": "other images, or images that have changed",
    "images": "another number of images",
    "chunk": "another --chunk",
}


@dataclass(frozen=True)
class Chunk:
    """Consecutive images: those from `start` on."""

    number: int
    start: int
    items: Sequence[Item]

    @property
    def name(self) -> str:
        return f"part-{self.number:08d}.parquet"

    @property
    def inputs(self) -> str:
        return inputs_digest(self.items)


class Chunks(Sequence[Chunk]):
    """All chunks of a list of images, made when they are asked for."""

    def __init__(self, items: Sequence[Item], size: int):
        self.items, self.size = items, size

    def __len__(self) -> int:
        return -(-len(self.items) // self.size)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.size
        return Chunk(number, start, self.items[start : start + self.size])


def inputs_digest(items: Sequence[Item]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item.key}\0{item.version}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True)
class Shard:
    """Of `count` shards, which one: it has the chunks index, index + count, index + 2 count, …"""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """From i/n, with i from 0 to n - 1."""
        if text is None:
            return cls()
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not int(match.group(1)) < int(match.group(2)):
            raise UserError(f"--shard {text}: must be i/n with i from 0 to n - 1, such as 0/4")
        return cls(int(match.group(1)), int(match.group(2)))

    def among_processes(self, process: int, processes: int) -> Shard:
        """This process's share of the shard."""
        return Shard(self.index + self.count * process, self.count * processes)

    def numbers(self, chunks: int) -> range:
        return range(self.index, chunks, self.count)


def check_plan(folder: str, facts: Mapping[str, Any]) -> bool:
    """Whether the folder holds this very plan already; an error if it holds another, or something else."""
    names = names_in(folder)
    if PLAN not in names:
        if others := [name for name in names if not name.startswith(".") and not name.endswith(".partial")]:
            raise UserError(f"{folder}: is not empty ({others[0]}) and holds no {PLAN}; choose another --out")
        return False
    try:
        known = json.loads(read_bytes(join(folder, PLAN)))
        assert isinstance(known, dict)
    except (OSError, ValueError, AssertionError):
        raise UserError(f"{join(folder, PLAN)}: not the plan of a prediction; choose another --out") from None
    for name, value in json.loads(json.dumps(facts)).items():
        if known.get(name) != value:
            what = WORDS.get(name, f"another {name}")
            raise UserError(f"{folder}: holds results of {what}; choose another --out, or remove the folder")
    return True


def write_plan(folder: str, facts: Mapping[str, Any]) -> None:
    write_bytes(join(folder, PLAN), (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode())


def read_plan(folder: str) -> dict[str, Any]:
    try:
        return json.loads(read_bytes(join(folder, PLAN)))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no readable {PLAN}; give a folder that `predict` or `embed` wrote") from error
