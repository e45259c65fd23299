"""Results of the pairs of a selector and a predictor, as lines of a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..console.files import append_line
from ..errors import UserError
from ..metrics.estimates import Estimate, Metrics
from .words import Spec


@dataclass(frozen=True)
class Cell:
    """One pair: metrics on the test data, or the reason why there are none."""

    where: Spec
    what: Spec
    key: str = ""  # hash of everything it depends on
    data: str = ""  # fingerprint; missing in older files
    truth: bool = False  # the selector uses the data's own masks
    published: str | None = None  # the name of this pair in the literature
    empty: str | None = None  # the reason
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
        """Its name, and a hash that distinguishes cells of the same name."""
        return f"{self.where.file_name}--{self.what.file_name}-{self.key[:6]}"

    @property
    def figure(self) -> Estimate | None:
        """Worst-group accuracy; accuracy if there are no groups."""
        return None if self.metrics is None else self.metrics.worst_group or self.metrics.accuracy

    @property
    def uses_true_masks(self) -> bool:
        """An upper bound, not a rival."""
        return self.truth or str(self.where) == "masks:data"  # older files have only the spec

    def to_dict(self) -> dict[str, Any]:
        metrics = None if self.metrics is None else self.metrics.to_dict()
        return asdict(self) | {"where": str(self.where), "what": str(self.what), "metrics": metrics}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        read: dict[str, Any] = dict(values)
        read |= {side: Spec(*values[side].partition(":")[::2]) for side in ("where", "what")}
        read["metrics"] = values["metrics"] and Metrics.from_dict(values["metrics"])
        return cls(**read)


def read_cells(path: Path) -> dict[str, Cell]:
    """Computed cells by key. A truncated line is skipped, and its cell computed again."""
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
    """Append a line, also after a truncated one."""
    append_line(path, json.dumps(cell.to_dict(), ensure_ascii=False))
