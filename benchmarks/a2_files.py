"""Tests of claims about A² whose figures lie in result files of other benchmarks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claim_figures import Missing
from claims import Finding, verdict
from sightline.metrics import Estimate


def content_of(file: Path | None, lacking: str) -> dict[str, Any]:
    if file is None or not file.exists():
        raise Missing(lacking)
    return json.loads(file.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Duel:
    """The best new pairing of a matrix against its best published one, both chosen on validation data."""

    file: Path | None
    decides: bool = True
    rows: tuple[str, ...] = ()
    words: str = "worst group: best new pairing − best published one, neither told the truth"

    def find(self, evidence: Any) -> Finding:  # noqa: ARG002 (as for every test)
        lacking = "no matrix was given: `sightline matrix DATA --where … --what …`, then --matrix FILE"
        content = content_of(self.file, lacking)
        duels = content["best_new_against_best_published"]
        if not duels:
            raise Missing(f"{content['data']}: nothing new, or nothing published, to compare")
        duel = duels[-1]  # of those that are not told the truth, where some are
        gain = Estimate(**{key: value for key, value in duel["gain"].items() if key != "verdict"})
        figures = {f"{duel[k]['where']} × {duel[k]['what']}": Estimate(**duel[k]["test"]) for k in ("new", "published")}
        return Finding(f"{content['data']}, {self.words}", verdict(gain), figures, gain, note=duel["rule"])


@dataclass(frozen=True)
class Supervised:
    """Attention's mass on the thing, of two sizes trained with labels. The file has intervals, not pictures, so the
    difference is held against the spread of both, as if they had seen different pictures: wider than it need be."""

    file: Path | None
    ours: str
    theirs: str
    margin: float = 0.0
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        margin = f" > {100 * self.margin:+g} points" if self.margin else ""
        return f"family: mass of supervised {self.ours} − mass of supervised {self.theirs}{margin}"

    def find(self, evidence: Any) -> Finding:  # noqa: ARG002 (as for every test)
        lacking = "no family was given: `pretrain.py family --out FILE`, then --pretrained FILE"
        family = {one["size"]: one["supervised"]["mass"] for one in content_of(self.file, lacking)["family"]}
        if missing := {self.ours, self.theirs} - family.keys():
            raise Missing(f"nobody has measured where supervised {sorted(missing)[0]} looks")
        figures = {size: self._estimate(family[size]) for size in (self.ours, self.theirs)}
        a, b = figures.values()
        value = a.value - b.value
        below, above = (
            (x**2 + y**2) ** 0.5 for x, y in ((a.value - a.low, b.high - b.value), (a.high - a.value, b.value - b.low))
        )
        how = "from two intervals, as of different pictures"
        gain = Estimate(value, value - below, value + above, a.n, how, difference=True)
        return Finding(self.words, verdict(gain, self.margin), figures, gain, self.margin, self.decides, note=how)

    @staticmethod
    def _estimate(known: dict[str, Any]) -> Estimate:
        return Estimate(known["value"], *known["interval"], known["n"], "bootstrap over images")
