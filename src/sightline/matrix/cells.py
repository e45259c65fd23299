"""What came of each pair of a where and a what, as lines of a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..console.files import cannot_write
from ..errors import UserError
from ..metrics.estimates import Estimate, Metrics
from .words import Word


@dataclass(frozen=True)
class Cell:
    """One pair: figures on the test data, or the reason why there are none."""

    where: Word
    what: Word
    key: str = ""  # of everything it depends on
    data: str = ""  # their fingerprint; older files do not say it
    truth: bool = False  # where to look is part of the data
    published: str | None = None  # what this pairing is called in the literature
    empty: str | None = None  # why
    metrics: Metrics | None = None
    validation: float | None = None  # class-balanced accuracy
    way: str = ""
    tried: dict[str, float] = field(default_factory=dict)
    rule: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, int | None] = field(default_factory=dict)  # of `where` and `what`
    seconds: float = 0.0
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.where.short} × {self.what.short}"

    @property
    def folder(self) -> str:
        """Its name, and what tells it from others that are called so."""
        return f"{self.where.file_name}--{self.what.file_name}-{self.key[:6]}"

    @property
    def figure(self) -> Estimate | None:
        """The worst group; accuracy where there are no groups."""
        return None if self.metrics is None else self.metrics.worst_group or self.metrics.accuracy

    @property
    def told_the_truth(self) -> bool:
        """An upper bound, not a rival."""
        return self.truth or str(self.where) == "masks:data"  # older files say no more than the word

    def to_dict(self) -> dict[str, Any]:
        said = {"where": str(self.where), "what": str(self.what)}
        metrics = None if self.metrics is None else self.metrics.to_dict()
        return asdict(self) | said | {"metrics": metrics}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        read: dict[str, Any] = dict(values)
        read |= {side: Word(*values[side].partition(":")[::2]) for side in ("where", "what")}
        read["metrics"] = values["metrics"] and Metrics.from_dict(values["metrics"])
        return cls(**read)


def read_cells(path: Path) -> dict[str, Cell]:
    """Those that are filled, by key. A line that was cut off is left out: its cell is filled again."""
    if not path.exists():
        return {}
    found = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    for line in lines:
        try:
            cell = Cell.from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if cell.metrics is not None:
            found[cell.key] = cell
    return found


def add_cell(path: Path, cell: Cell) -> None:
    """On a line of its own, also after one that was cut off."""
    try:
        whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write(("" if whole else "\n") + json.dumps(cell.to_dict(), ensure_ascii=False) + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error
