"""An intervention on a trained model, and intervention.json, which stores it with the run.

    Intervention(drop=(3,), quantile=0.99, thresholds=(41.2, 39.0, 44.8, 40.1), names={2: "head"}).save(path)

Part removal makes the patches of a part background. Token removal does so with patches farther from their part's
prototype than a quantile of the training patches; the distances are stored, so that applying it needs no data. A forced
part keeps its patches whatever the background probability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.schema import InterventionFile, json_misfit, read_json
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
    """Fingerprint of the weights, and where it comes from: data, selection rule and gain of the search."""

    def __post_init__(self) -> None:
        for name in ("drop", "force"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        if both := set(self.drop) & set(self.force):
            raise UserError(f"part {min(both)}: cannot be both removed and forced")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise UserError(f"quantile {self.quantile}: must be between 0 and 1, such as 0.99")

    @property
    def changes(self) -> bool:
        """Whether it changes predictions, instead of only naming parts."""
        return bool(self.drop or self.force or self.quantile is not None)

    @property
    def correction(self) -> Correction:
        from ..where.corrections import Correction

        if self.quantile is not None and self.thresholds is None:
            raise UserError(
                f"quantile {self.quantile:g}: needs the distances of training patches; measure them with `sightline "
                f"intervene RUN --quantile {self.quantile:g}`, or with `calibrate` in Python"
            )
        return Correction(self.drop, self.force, None if self.quantile is None else self.thresholds)

    def check_part_numbers(self, parts: int) -> None:
        """Check it against a model with this number of parts."""
        for part in (*self.drop, *self.force, *self.names):
            if not 0 <= part < parts:
                raise UserError(f"part {part}: does not exist; the model has parts 0 to {parts - 1}")
        if len(self.drop) == parts:
            raise UserError(f"all {parts} parts are removed: keep at least one to predict from")
        if self.thresholds is not None and len(self.thresholds) != parts:
            raise UserError(f"{len(self.thresholds)} distance thresholds for {parts} parts: one per part is needed")

    def part_name(self, number: int) -> str:
        name = self.names.get(number)
        return f"part {number} ({name})" if name else f"part {number}"

    @property
    def description(self) -> str:
        removed = [f"without {', '.join(map(self.part_name, self.drop))}"] * bool(self.drop)
        tokens = [] if self.quantile is None else [f"token removal beyond the {self.quantile:g} distance quantile"]
        forced = [f"{', '.join(map(self.part_name, self.force))} forced"] * bool(self.force)
        return "; ".join([*removed, *tokens, *forced]) or "no change"

    @property
    def folder(self) -> str:
        """The name of the subfolder of the run for its metrics and predictions."""
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
    def from_dict(cls, values: Mapping[str, Any]) -> Intervention:
        distances = values["thresholds"]
        return cls(
            tuple(map(int, values["drop"])),
            values["quantile"],
            None if distances is None else tuple(math.nan if d is None else float(d) for d in distances),
            tuple(map(int, values["force"])),
            {int(part): str(name) for part, name in values["names"].items()},
            values["facts"],
        )

    def save(self, path: str | Path) -> None:
        from ..console.checksums import write_json_with_checksum

        write_json_with_checksum(Path(path), self.to_dict(), nan=False)

    @classmethod
    def load(cls, path: str | Path) -> Intervention:
        from ..console.checksums import check_checksum

        check_checksum(Path(path), "restore it, or remove it with `sightline intervene RUN --clear`")
        try:
            values = read_json(Path(path))
            if problem := json_misfit(values, InterventionFile):
                raise ValueError(problem)
            return cls.from_dict(values)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; create it with `sightline intervene RUN`") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({error}); remove it with `sightline intervene RUN --clear`") from error


def parse_names(texts: tuple[str, ...]) -> dict[int, str]:
    """Part names by number, from texts such as `2=head`."""
    names = {}
    for text in texts:
        number, equals, name = text.partition("=")
        if not equals or not number.strip().isdecimal() or not name.strip():
            raise UserError(f"--name {text}: must be NUMBER=NAME, such as 2=head")
        names[int(number)] = name.strip()
    return names


@dataclass(frozen=True, eq=False)
class DistanceSketch:
    """Quantiles of each part's distances in one pass, in 830 kB per part, with a relative error of at most `ERROR`:
    buckets of exponentially growing width (DDSketch, Masson et al. 2019). Ranks are interpolated inside a bucket,
    because distances may be so close together that one bucket holds some per cent of them."""

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
        """The value at rank q (n - 1) of each part; NaN for a part without patches."""
        values = []
        for counts in self.counts:
            up_to, n = counts.cumsum(), int(counts.sum())
            if not n:
                values.append(math.nan)
                continue
            bucket = int(np.searchsorted(up_to, math.floor(q * (n - 1)) + 1))
            inside = (q * (n - 1) + 1 - (up_to[bucket] - counts[bucket])) / counts[bucket]
            values.append(self.LEAST * self.RATIO ** (bucket - 1 + min(float(inside), 1.0)))
        return tuple(values)
