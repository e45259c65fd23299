"""Kinds of tests that claims about parts and interventions are made of: what each asks of the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from claim_figures import Missing
from claims import FAILS, HOLDS, UNDECIDED, Finding, verdict
from interventions_evidence import Evidence, Term, contrast
from sightline.metrics.intervals import wilson
from waterbirds_results import facts_of

MOST = 0.5  # of an object's pixels: then a part took it
NEAR = 1.6  # times the cost of one dense ViT; the first stage alone is one
FASTER = 1.1  # times as fast: epochs of one run differ by that much


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of rows' figures, on the same pictures."""

    kind: str  # the set
    terms: tuple[Term, ...]
    measure: str = "accuracy"  # or: worst group, IoU, gap
    margin: float = 0.0
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        signs = {1.0: "+", -1.0: "−"}
        said = " ".join(f"{signs[term.weight]} {term.words}" for term in self.terms).removeprefix("+ ")
        part = f" on {self.terms[0].part}" * (self.terms[0].part != "all")
        return f"{self.kind}, {self.measure}{part}: {said}{f' > {100 * self.margin:+g} points' * bool(self.margin)}"

    def find(self, evidence: Evidence) -> Finding:
        figures, difference = contrast(evidence, self.kind, self.terms, self.measure)
        seeds = {term.row: len(evidence.folders(self.kind, term.row)) for term in self.terms}
        if self.measure != "IoU" and (spread := evidence.spread(self.kind, self.terms[0].part, self.measure)):
            difference = spread.widened(difference, self.terms, seeds)
        found, same = verdict(difference, self.margin), len({term.row for term in self.terms}) == 1
        every = [evidence.values(self.kind, term, self.measure) for term in self.terms]
        note = "nothing was left out, so that answers are the same" if same and every[0] == every[-1] else ""
        return Finding(self.words, found, figures, difference, self.margin, self.decides, seeds, note)


@dataclass(frozen=True)
class TookTheObject:
    """Whether leaving out parts, one at a time, points to one that most of a drawn object is in."""

    kind: str
    row: str
    by: str = "left out first"  # by the search; or: helps a group most
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        which = {
            "left out first": "the part left out first",
            "helps a group most": "the part without which a group gains most",
        }
        return f"{self.kind}: of {self.row}, {which[self.by]} is one that took an object"

    def find(self, evidence: Evidence) -> Finding:
        cases = {
            f"seed {s}": self.case(one) for s, one in evidence.found(self.kind, self.row).items() if "objects" in one
        }
        taken = [one for one in cases.values() if one["took_an_object"]]
        if not taken:
            note = "in no run has a part most of an object"
            return Finding(self.words, UNDECIDED, cases, decides=self.decides, seeds={self.row: len(cases)}, note=note)
        right = sum(one["part"] in one["took_an_object"] for one in taken)
        silent = sum(one["part"] is None for one in taken)
        found = HOLDS if right == len(taken) else FAILS if right + silent < len(taken) else UNDECIDED
        note = f"{right} of {len(taken)} runs; in {silent} nothing surely helped"
        return Finding(self.words, found, cases, decides=self.decides, seeds={self.row: len(cases)}, note=note)

    def case(self, found: dict[str, Any]) -> dict[str, Any]:
        search = found["searches"]["parts"]
        trials = {trial["drop"][0]: trial for trial in search["trials"]}
        most = {part: max(one["value"] for one in trial["groups"].values()) for part, trial in trials.items()}
        if self.by == "helps a group most":
            part = max(most, key=lambda part: most[part])
        else:
            part = max(trials, key=lambda part: trials[part]["score"]) if search["drop"] else None
        shares = {thing: one["share_of_the_object"] for thing, one in (found["objects"] or {}).items()}
        return {
            "part": part,
            "groups_gain": None if part is None else trials[part]["groups"],
            "left_out": search["drop"],
            "took_an_object": sorted({int(np.argmax(some)) for some in shares.values() if max(some) > MOST}),
            "largest_share": {thing: max(some) for thing, some in shares.items()},
        }


@dataclass(frozen=True)
class SilentOnNoise:
    """With shuffled labels the search should find something in at most one of twenty cases."""

    kind: str
    row: str
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.kind}: with shuffled labels, the search on {self.row} finds nothing"

    def find(self, evidence: Evidence) -> Finding:
        known = [one["noise"] for one in evidence.found(self.kind, self.row).values() if one.get("noise")]
        if not known:
            raise Missing(f"{self.row}: not searched with shuffled labels")
        found, searches = (sum(one[key] for one in known) for key in ("found_something", "searches"))
        low, _ = wilson(found, searches)
        said = FAILS if low > 0.05 else HOLDS if found / searches <= 0.05 else UNDECIDED
        return Finding(self.words, said, {"found": found, "searches": searches}, decides=self.decides)


@dataclass(frozen=True)
class Costs:
    """GFLOPs of a row against those of another, of the same backbone: no interval, 16 pictures each."""

    kind: str
    ours: str
    dense: str
    most: float = NEAR
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.kind}: GFLOPs of {self.ours} are at most {self.most:g} times those of {self.dense}"

    def find(self, evidence: Evidence) -> Finding:
        spent = {}
        for row in (self.ours, self.dense):
            path = next(iter(evidence.folders(self.kind, row).values()))
            cost = facts_of(path).get("benchmark", {}).get("cost")
            if cost is None:
                raise Missing(f"{path.name}: nobody has counted what an answer costs")
            spent[row] = cost["gflops"]
        ratio = spent[self.ours] / spent[self.dense]
        found = HOLDS if ratio <= self.most else FAILS
        return Finding(self.words, found, spent, decides=self.decides, note=f"{ratio:.2f} times")


@dataclass(frozen=True)
class Faster:
    """Pictures per second in training, each run alone on the GPU."""

    ours: str
    theirs: str
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"birds: {self.ours} trains faster than {self.theirs}"

    def find(self, evidence: Evidence) -> Finding:
        speed = {}
        for row in (self.ours, self.theirs):
            known = facts_of(next(iter(evidence.folders("birds", row).values()))).get("speed")
            if known is None:
                raise Missing(f"{row}: no speed was noted")
            speed[row] = known["images_per_second"]
        ratio = speed[self.ours] / speed[self.theirs]
        found = HOLDS if ratio >= FASTER else FAILS if ratio <= 1 / FASTER else UNDECIDED
        return Finding(self.words, found, speed, decides=self.decides, note=f"{ratio:.2f} times as fast")
