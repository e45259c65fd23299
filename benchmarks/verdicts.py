"""One rule for every claim: a test compares an interval with its margin, and the deciding tests decide the claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evidence import Evidence, Missing
from sightline.metrics.estimates import Estimate

HOLDS, FAILS, UNDECIDED, NOT_TESTABLE, NOT_RUN = "holds", "fails", "undecided", "not testable here", "not run"
RULE = (
    "A test holds when the 95 % interval of its difference lies above the margin, fails when it lies below, and is "
    "undecided when it spans it. A claim fails when one of its deciding tests fails, holds when all of them hold, and "
    "is undecided otherwise, also when only some were run; other tests are shown beside them. Each test is at 95 % by "
    "itself, not all together. "
)


@dataclass(frozen=True)
class Finding:
    """What came of one test."""

    test: str
    verdict: str
    figures: dict[str, Any] | None = None  # by row
    difference: Estimate | None = None
    margin: float = 0.0
    decides: bool = True
    seeds: dict[str, int] | None = None  # by row
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """The figures of a test and their difference, or a verdict where there is none."""

    figures: Mapping[str, Any]
    difference: Estimate | None = None
    seeds: dict[str, int] | None = None
    note: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Test:
    """A comparison, and the margin that its difference has to exceed."""

    name: str
    measure: Callable[[Evidence], Measured]
    margin: float = 0.0
    decides: bool = True
    rows: tuple[tuple[str, str], ...] = ()  # dataset and row
    within: bool = False  # the difference has to lie within ± margin instead
    spread: tuple[str, str, str] | None = None  # dataset, part and figure whose spread between runs counts

    def find(self, evidence: Evidence) -> Finding:
        found = self.measure(evidence)
        decided = found.verdict
        if not decided:
            assert found.difference is not None, "either a difference or a verdict"
            decided = (inside if self.within else verdict)(found.difference, self.margin)
        return Finding(
            self.name,
            decided,
            dict(found.figures),
            found.difference,
            self.margin,
            self.decides,
            found.seeds,
            found.note,
        )


@dataclass(frozen=True)
class Claim:
    id: str
    says: str
    paper: str
    tests: tuple[Test, ...] = ()
    lacks: str = ""
    """What it would take to test it at all."""

    def rows(self, *, deciding: bool = False) -> list[tuple[str, str]]:
        """Datasets and rows that its tests compare."""
        return list(dict.fromkeys(row for test in self.tests if test.decides or not deciding for row in test.rows))


@dataclass(frozen=True)
class ClaimsOfStudy:
    """What claims_STUDY.py says."""

    claims: Sequence[Claim]
    rule: str
    lines: Mapping[tuple[str, str], str] = field(default_factory=dict)  # the recipe of a dataset's row
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the data and the backbone
    all_tests: bool = False  # also those beside the claim that were not run


# ---- the rule --------------------------------------------------------------------------------------------------------


def verdict(difference: Estimate, margin: float = 0.0) -> str:
    if difference.low > margin:
        return HOLDS
    return FAILS if difference.high < margin else UNDECIDED


def inside(difference: Estimate, margin: float) -> str:
    """`Does not matter`: the whole interval lies within the margin on either side."""
    if -margin < difference.low and difference.high < margin:
        return HOLDS
    return FAILS if difference.low > margin or difference.high < -margin else UNDECIDED


def together(verdicts: Sequence[str]) -> str:
    """Of a claim, from those of its deciding tests."""
    if FAILS in verdicts:
        return FAILS
    for same in (NOT_RUN, HOLDS):
        if all(one == same for one in verdicts):
            return same
    return UNDECIDED


def find(test: Test, evidence: Evidence) -> Finding:
    try:
        return test.find(evidence)
    except Missing as missing:
        return Finding(test.name, NOT_RUN, decides=test.decides, note=str(missing))


def decide(claim: Claim, evidence: Evidence) -> tuple[str, list[Finding]]:
    if claim.lacks:
        return NOT_TESTABLE, []
    findings = [find(test, evidence) for test in claim.tests]
    return together([finding.verdict for finding in findings if finding.decides]), findings
