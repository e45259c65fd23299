"""The claims about RobustViT, held against what `benchmarks/relevance.py` has run.

    python benchmarks/relevance_claims.py runs/relevance --out benchmarks/results/claims_relevance.json

It reads answers and measurements, and needs neither weights nor pictures. Verdicts are those of benchmarks/claims.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional

from claim_figures import apart
from claims import NOT_RUN, Claim, Finding, conclude, verdict
from record import record
from relevance_evidence import CORRECT, WORST, Evidence, subsets_of, versus
from relevance_rows import RULE as RATE_RULE
from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from untested_claims import UNTESTED

KNOWN = {one[0]: one for one in UNTESTED}
SMALL = 0.02  # what counts as a small cost, and as nearly as well
ENOUGH = 0.01  # within which fewer masks are enough, and classes gain as much
FAITHFUL = 0.02
SURE = 0.9  # of labels drawn at random that must be reachable, for any to be
RULE = (
    "A test holds when the 95 % interval of its difference lies above the margin, fails when it lies below, and is "
    "undecided when it spans it. A claim fails when one of its deciding tests fails, holds when all of them hold, and "
    "is undecided otherwise, also when only some were run; other tests are shown beside them. Each test is at 95 % by "
    "itself, not all together. Rows are compared on the same pictures and with the seeds that both have, since a row "
    "goes on with the run of its seed; intervals are over pictures, and over seeds where there are several. `usual` is "
    "Waterbirds on its own place, CUB's photographs, SI-Score's cut-outs in the centre; `shifted` is the other place, "
    "swapped backgrounds, and cut-outs that are moved, turned or resized. Margins: a small cost is 2 points, so is "
    "nearly as well; enough, and as much as others, is within 1 point; faithful is within 2 points of before. 'Any "
    f"label' is at least 90 % of labels drawn at random. Learning rates: {RATE_RULE}."
)


@dataclass(frozen=True)
class Versus:
    """One row against another, on the same pictures."""

    kind: str
    ours: str
    theirs: str
    measure: str = CORRECT
    part: str = "all"
    margin: float = 0.0
    decides: bool = True
    lower_is_better: bool = False
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        pair = (self.theirs, self.ours) if self.lower_is_better else (self.ours, self.theirs)
        margin = f" > {100 * self.margin:+g} points" if self.margin else ""
        part = f", {self.part}" if self.part != "all" else ""
        return f"{self.kind}{part}, {self.measure}: {pair[0]} − {pair[1]}{margin}"

    def find(self, evidence: Evidence) -> Finding:
        figures, gain, seeds = versus(
            evidence, self.kind, (self.ours, self.measure), (self.theirs, self.measure), self.part
        )
        gain = turned(gain) if self.lower_is_better else gain
        return Finding(self.words, verdict(gain, self.margin), figures, gain, self.margin, self.decides, seeds)


def turned(gain: Estimate) -> Estimate:
    return Estimate(-gain.value, -gain.high, -gain.low, gain.n, gain.how, difference=True)


@dataclass(frozen=True)
class BeyondChance:
    """A row's map is more faithful than a random one, in one direction."""

    kind: str
    row: str
    direction: str
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.kind}, {self.row}: {self.direction} curve of GAE better than the random map's"

    def find(self, evidence: Evidence) -> Finding:
        sides = [(self.row, f"{self.direction} {name}") for name in ("gae", "random")]
        figures, gain, seeds = versus(evidence, self.kind, *(sides[::-1] if self.direction == "positive" else sides))
        return Finding(self.words, verdict(gain), figures, gain, 0.0, self.decides, seeds)


@dataclass(frozen=True)
class AsMuch:
    """Classes that were not learnt from gain as much as those that were: other pictures, so drawn apart."""

    kind: str
    ours: str
    theirs: str
    part: str
    margin: float = -ENOUGH
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return (
            f"{self.kind}, {self.part}, gain of {self.ours} over {self.theirs}: classes not learnt from − learnt from "
            f"> {100 * self.margin:+g} points"
        )

    def find(self, evidence: Evidence) -> Finding:
        gains = {}
        for word in ("not learnt", "learnt"):
            sides = (self.ours, CORRECT), (self.theirs, CORRECT)
            _, gains[word], seeds = versus(evidence, self.kind, *sides, f"{self.part}, {word}")
        new, old = gains.values()
        difference = apart(new, old, new.n + old.n, "from the intervals of both gains")
        figures: dict[str, Any] = {f"gain, {word}": one for word, one in gains.items()}
        found = verdict(difference, self.margin)
        return Finding(self.words, found, figures, difference, self.margin, self.decides, seeds)


@dataclass(frozen=True)
class Reaches:
    """How often sufficient pixels exist for a label drawn at random."""

    kind: str
    row: str
    least: float
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return (
            f"{self.kind}, {self.row}: sufficient pixels for a random label found in more than {100 * self.least:g} %"
        )

    def find(self, evidence: Evidence) -> Finding:
        known = subsets_of(evidence, self.kind, self.row)
        reached = Estimate(**known["reached"])
        ends = [end - self.least for end in (reached.value, reached.low, reached.high)]
        over = Estimate(*ends, reached.n, reached.how, difference=True)
        sizes = {name: Estimate(**known[name]) for name in ("size", "own_size") if known[name]}
        note = (
            f"at {100 * known['confidence']:g} % confidence, {known['labels']} labels for each of {known['n']} pictures"
        )
        return Finding(self.words, verdict(over), {"reached": reached} | sizes, over, 0.0, self.decides, note=note)


# ---- the claims ------------------------------------------------------------------------------------------------------

Tests = tuple[Any, ...]
OURS, START = "RobustViT", "ERM"
BIRDS3, CUB_ALL = "RobustViT, 3 masks", "RobustViT, 10 masks"


def raises_under_shift() -> Tests:
    gains = [
        Versus("birds", BIRDS3, START, WORST), Versus("birds", BIRDS3, START, part="shifted"),
        Versus("cub", OURS, START, part="shifted"),
    ]  # fmt: skip
    costs = [Versus(k, row, START, part="usual", margin=-SMALL) for k, row in (("birds", BIRDS3), ("cub", OURS))]
    counts = [Versus("birds", row, START, WORST, decides=False) for row in (OURS, "RobustViT, 300 masks")]
    moved = [Versus("si", OURS, START, part=p, decides=False) for p in ("usual", "location", "rotation", "size")]
    inside = [Versus(k, OURS, START, "mass gae", decides=False) for k in ("birds", "cub", "si")]
    return (*gains, *costs, *counts, *moved, *inside, Versus("imagenet", OURS, "before", margin=-0.03, decides=False))


def rows_beaten(names: Sequence[str], *, beside: Sequence[str] = ()) -> Tests:
    """Under shift, on both sets."""
    return tuple(
        Versus(kind, OURS, name, part="shifted", decides=name in names)
        for kind in ("birds", "cub")
        for name in (*names, *beside)
    )


def stay_faithful() -> Tests:
    tests: list[Any] = []
    for kind, start in (("birds", START), ("cub", START), ("imagenet", "before")):
        decides = kind != "imagenet"
        for direction in ("positive", "negative"):
            tests.append(
                Versus(
                    kind, OURS, start, f"{direction} gae", margin=-FAITHFUL, decides=decides,
                    lower_is_better=direction == "positive",
                )
            )  # fmt: skip
            tests += [BeyondChance(kind, row, direction, decides and row == OURS) for row in (OURS, start)]
    of_vit_s = [(row, direction) for row in ("ERM, S", "RobustViT, S") for direction in ("positive", "negative")]
    return (*tests, *(BeyondChance("birds", row, direction, decides=False) for row, direction in of_vit_s))


TESTS: dict[str, Tests] = {
    "R1": raises_under_shift(),
    "R2": rows_beaten(("RobustViT, rollout", "RobustViT, attention"), beside=("RobustViT, second order",)),
    "R3": rows_beaten(
        tuple(
            f"RobustViT, {how}" for how in ("no background", "no foreground", "only background", "only foreground")
        ),
        beside=("RobustViT, no answer",),
    ),
    "R4": (
        *rows_beaten(("RobustViT, label",)),
        Versus("imagenet", OURS, "RobustViT, label", decides=False),
    ),
    "R5": (
        *rows_beaten(("RRR", "GradMask"), beside=("MaskTune",)),
        *(
            Versus(kind, row, START, part="shifted", decides=False)
            for kind in ("birds", "cub")
            for row in ("RRR", "GradMask", "MaskTune")
        ),
    ),
    "R6": (
        AsMuch("cub", OURS, START, "shifted"),
        AsMuch("cub", OURS, START, "all", decides=False),
        *(Versus("cub", OURS, START, part=f"shifted, {word}", decides=False) for word in ("not learnt", "learnt")),
    ),
    "R7": (
        *(
            Versus("cub", OURS, row, part="shifted", margin=-ENOUGH)
            for row in ("RobustViT, 3 masks", "RobustViT, 10 masks of 100 classes", CUB_ALL)
        ),
        *(
            Versus("cub", OURS, row, part="shifted", decides=False)
            for row in ("RobustViT, 1 masks of 100 classes", "RobustViT, 3 masks of 50 classes")
        ),
        *(
            Versus("birds", BIRDS3, row, WORST, margin=-ENOUGH, decides=False)
            for row in (OURS, "RobustViT, 300 masks")
        ),
    ),
    "R8": stay_faithful(),
    "R9": (
        Versus("cub", OURS, START, "10 neighbours", "not learnt"),
        Versus("cub", OURS, START, "1 neighbours", "not learnt", decides=False),
        Versus("cub", OURS, START, "10 neighbours", "shifted, not learnt", decides=False),
        Versus("birds", OURS, START, "10 neighbours", decides=False),
    ),
    "R10": (Reaches("imagenet", "before", SURE), Reaches("imagenet", "before", 0.5, decides=False)),
    "R11": (
        *(
            Versus(kind, "RobustViT, TokenCut", OURS, part="shifted", margin=-SMALL)
            for kind in ("birds", "cub")
        ),
        *(Versus(kind, "RobustViT, TokenCut", START, part="shifted", decides=False) for kind in ("birds", "cub")),
        Versus("imagenet", OURS, "before", decides=False),
    ),
    "R12": (
        Versus("birds", "RobustViT, S", "ERM, S", WORST),
        Versus("birds", "RobustViT, S", "ERM, S", part="shifted"),
        Versus("cub", "RobustViT, S", "ERM, S", part="shifted"),
        *(
            Versus(kind, "RobustViT, S", "ERM, S", part="usual", margin=-SMALL, decides=False)
            for kind in ("birds", "cub")
        ),
    ),
}  # fmt: skip
CLAIMS = tuple(Claim(*KNOWN[id][:3], tests=tests) for id, tests in TESTS.items())


# ---- from runs to verdicts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RelevanceClaims:
    runs: Positional[Path]
    """The folder that `benchmarks/relevance.py` made."""
    only: tuple[str, ...] = ()
    """These claims. Default: all."""
    out: Path | None = None


def show(concluded: Sequence[tuple[Claim, str, list[Finding]]]) -> None:
    table = Table("", "", "figures", "difference", "", "", box=None, pad_edge=False)
    for claim, conclusion, findings in concluded:
        table.add_row(claim.id, f"[bold]{escape(claim.says)}[/]", "", "", f"[bold]{conclusion}[/]", "")
        table.add_row("", f"[dim]paper: {escape(claim.paper)}[/]")
        for one in findings:
            figures = ", ".join(e.figure for e in (one.figures or {}).values())
            name = f"  {'' if one.decides else '(beside) '}{escape(one.test)}"
            difference = escape(str(one.difference or ""))
            table.add_row("", name, figures, difference, one.verdict, f"[dim]{escape(one.note)}[/]")
        table.add_section()
    console = Console(highlight=False, width=240)
    console.print(table)
    console.print(RULE, width=120)


def main() -> None:
    config = tyro.cli(RelevanceClaims, description=__doc__)
    evidence = Evidence(config.runs)
    if unknown := set(config.only) - {claim.id for claim in CLAIMS}:
        raise UserError(f"--only {' '.join(sorted(unknown))}: known are {', '.join(claim.id for claim in CLAIMS)}")
    chosen = [claim for claim in CLAIMS if not config.only or claim.id in config.only]
    concluded = [(claim, *conclude(claim, evidence)) for claim in chosen]  # ty: ignore[invalid-argument-type]
    show(concluded)
    if config.out:
        content = [
            {"id": claim.id, "claim": claim.says, "paper": claim.paper, "verdict": conclusion}
            | {"tests": [asdict(one) for one in findings if one.verdict != NOT_RUN or one.decides]}
            for claim, conclusion, findings in concluded
        ]
        record(config.out, "cpu", {"rule": RULE, "claims": content})


if __name__ == "__main__":
    main()
