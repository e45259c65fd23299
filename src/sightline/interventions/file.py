"""An intervention: what a user corrects in a trained model, and the small file that keeps it with the run.

    Intervention(drop=(3,), quantile=0.99, thresholds=(41.2, 39.0, 44.8, 40.1), names={2: "head"}).save(path)

A dropped part's patches become background. So do those that lie farther from their own part's prototype than a
quantile of the training patches did; the distances are kept here, so that applying it needs no data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError

if TYPE_CHECKING:
    from ..where.corrections import Correction

FILE = "intervention.json"


@dataclass(frozen=True)
class Intervention:
    drop: tuple[int, ...] = ()
    quantile: float | None = None
    thresholds: tuple[float, ...] | None = None  # a distance per part; NaN where training had no patch of it
    force: tuple[int, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Of which weights, found on which data, by what rule, and what it gains."""

    def __post_init__(self) -> None:
        for name in ("drop", "force"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        if both := set(self.drop) & set(self.force):
            raise UserError(f"part {min(both)}: cannot be dropped and forced at once")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise UserError(f"quantile {self.quantile}: must lie above 0 and below 1, such as 0.99")

    @property
    def changes(self) -> bool:
        """Anything at all, beyond names."""
        return bool(self.drop or self.force or self.quantile is not None)

    @property
    def correction(self) -> Correction:
        from ..where.corrections import Correction

        if self.quantile is not None and self.thresholds is None:
            raise UserError(
                f"quantile {self.quantile:g}: needs distances of training patches; `sightline intervene RUN --quantile "
                f"{self.quantile:g}` measures and keeps them, `calibrate` in Python measures them"
            )
        return Correction(self.drop, self.force, None if self.quantile is None else self.thresholds)

    def check_impossible(self, parts: int) -> None:
        """For a model of so many parts."""
        for part in (*self.drop, *self.force, *self.names):
            if not 0 <= part < parts:
                raise UserError(f"part {part}: there are {parts}, numbered from 0 to {parts - 1}")
        if len(self.drop) == parts:
            raise UserError("without any part there is nothing left to answer from: keep at least one")
        if self.thresholds is not None and len(self.thresholds) != parts:
            raise UserError(f"{len(self.thresholds)} thresholds for {parts} parts: one for each is needed")

    def part(self, number: int) -> str:
        name = self.names.get(number)
        return f"part {number} ({name})" if name else f"part {number}"

    @property
    def words(self) -> str:
        dropped = [f"without {', '.join(map(self.part, self.drop))}"] * bool(self.drop)
        forced = [f"{', '.join(map(self.part, self.force))} always kept"] * bool(self.force)
        beyond = (
            [] if self.quantile is None else [f"patches beyond the {self.quantile:g} quantile of distance left out"]
        )
        return "; ".join([*dropped, *beyond, *forced]) or "no change"

    @property
    def folder(self) -> str:
        """The name of what is measured with it."""
        changed = [*(f"drop{k}" for k in self.drop), *(f"force{k}" for k in self.force)]
        return "-".join(["intervened", *changed, *([] if self.quantile is None else [f"q{self.quantile:g}"])])

    # ---- the file ----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        distances = None if self.thresholds is None else [None if math.isnan(d) else d for d in self.thresholds]
        return {
            "drop": list(self.drop),
            "force": list(self.force),
            "quantile": self.quantile,
            "thresholds": distances,
            "names": {str(part): name for part, name in sorted(self.names.items())},
            "facts": dict(self.facts),
        }

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Intervention:
        distances = said["thresholds"]
        return cls(
            tuple(map(int, said["drop"])),
            said["quantile"],
            None if distances is None else tuple(math.nan if d is None else float(d) for d in distances),
            tuple(map(int, said["force"])),
            {int(part): str(name) for part, name in said["names"].items()},
            said["facts"],
        )

    def save(self, path: str | Path) -> None:
        from ..console.files import save_text

        save_text(Path(path), json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Intervention:
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; `sightline intervene RUN` makes one") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({error}); remove it with `sightline intervene RUN --clear`") from error


def parse_names(said: tuple[str, ...]) -> dict[int, str]:
    """From `2=head`."""
    names = {}
    for one in said:
        number, equals, name = one.partition("=")
        if not equals or not number.strip().isdecimal() or not name.strip():
            raise UserError(f"--name {one}: say which part is what, such as 2=head")
        names[int(number)] = name.strip()
    return names


@dataclass(frozen=True, eq=False)
class DistanceSketch:
    """Quantiles of positive numbers, part by part, in one pass and 830 kB per part, with a relative error of at most
    `ERROR`: buckets whose widths grow with the numbers (DDSketch, Masson et al. 2019). Within a bucket ranks are spread
    evenly, because distances may lie so close to each other that one holds some per cent of them."""

    counts: np.ndarray  # int64 [K, buckets]

    ERROR = 2e-4
    LEAST, MOST = 1e-3, 1e6
    RATIO = 1 + ERROR
    BUCKETS = math.ceil(math.log(MOST / LEAST) / math.log(RATIO)) + 1

    @classmethod
    def empty(cls, parts: int) -> DistanceSketch:
        return cls(np.zeros((parts, cls.BUCKETS), dtype=np.int64))

    def add(self, parts: np.ndarray, values: np.ndarray) -> None:
        values = np.clip(values.astype(np.float64), self.LEAST, self.MOST)
        buckets = np.ceil(np.log(values / self.LEAST) / math.log(self.RATIO)).astype(np.int64)
        flat = parts.astype(np.int64) * self.BUCKETS + buckets.clip(0, self.BUCKETS - 1)
        self.counts[...] += np.bincount(flat, minlength=self.counts.size).reshape(self.counts.shape)

    def quantile(self, q: float) -> tuple[float, ...]:
        """Of each part, the value at rank q (n - 1); NaN where there is none."""
        found = []
        for counts in self.counts:
            up_to, n = counts.cumsum(), int(counts.sum())
            if not n:
                found.append(math.nan)
                continue
            bucket = int(np.searchsorted(up_to, math.floor(q * (n - 1)) + 1))
            inside = (q * (n - 1) + 1 - (up_to[bucket] - counts[bucket])) / counts[bucket]
            found.append(self.LEAST * self.RATIO ** (bucket - 1 + min(float(inside), 1.0)))
        return tuple(found)
