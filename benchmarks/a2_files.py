"""Tests of claims about A² whose figures lie in result files of other benchmarks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claim_figures import Missing, apart
from claims import HOLDS, UNDECIDED, Finding, verdict
from sightline.metrics.estimates import Estimate


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


OF_INTERVALS = "from two intervals, as of different pictures"


def family_in(file: Path | None) -> tuple[dict[str, Estimate], dict[str, Any]]:
    """Attention's mass on the thing, of sizes trained with labels; and all else that the file says."""
    content = content_of(file, "no family was given: `pretrain.py family --out FILE`, then --pretrained FILE")
    return {one["size"]: estimated(one["supervised"]["mass"]) for one in content["family"]}, content


def estimated(known: dict[str, Any]) -> Estimate:
    return Estimate(known["value"], *known["interval"], known["n"], "bootstrap over images")


@dataclass(frozen=True)
class Supervised:
    """Attention's mass on the thing, of two sizes trained with labels."""

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
        family, _ = family_in(self.file)
        if missing := {self.ours, self.theirs} - family.keys():
            raise Missing(f"nobody has measured where supervised {sorted(missing)[0]} looks")
        figures = {size: family[size] for size in (self.ours, self.theirs)}
        gain = apart(*figures.values(), family[self.ours].n, OF_INTERVALS)
        return Finding(
            self.words, verdict(gain, self.margin), figures, gain, self.margin, self.decides, note=OF_INTERVALS
        )


@dataclass(frozen=True)
class Localises:
    """Whether a size trained with labels looks at the thing at all. It holds or is undecided: where nobody looks there
    is nothing to compare, and nothing refuted."""

    file: Path | None
    size: str
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"family: mass of supervised {self.size} − mass of a map that is the same everywhere"

    def find(self, evidence: Any) -> Finding:  # noqa: ARG002 (as for every test)
        family, content = family_in(self.file)
        if self.size not in family or "mass_of_even" not in content:
            raise Missing(f"nobody has measured where supervised {self.size} looks, or what an even map has")
        figures = {self.size: family[self.size], "even": estimated(content["mass_of_even"])}
        above = apart(*figures.values(), family[self.size].n, OF_INTERVALS)
        found = HOLDS if verdict(above) == HOLDS else UNDECIDED
        lost = "; it does not localise, so sizes cannot be compared by where they look" * (found != HOLDS)
        return Finding(self.words, found, figures, above, decides=self.decides, note=OF_INTERVALS + lost)
