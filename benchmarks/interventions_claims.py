"""The claims about parts, interventions and ablations, held against what `benchmarks/interventions.py` has run.

    python benchmarks/interventions_claims.py runs/interventions --out benchmarks/results/claims_interventions.json
    python benchmarks/interventions_claims.py runs/interventions --only F17 F18

It reads answers and measurements, and needs neither weights nor pictures. Verdicts are those of benchmarks/claims.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional

from claim_figures import Missing
from claims import FAILS, HOLDS, NOT_RUN, UNDECIDED, Claim, Finding, conclude, verdict
from interventions_evidence import PLAIN, Evidence, Term, contrast
from interventions_rows import ABLATED, DROPOUTS, QUANTILES, SETS, WITH_OBJECTS, rows_of
from record import record
from sightline.errors import UserError
from sightline.intervals import wilson
from sightline.metrics import Estimate
from untested_claims import OURS, UNTESTED
from waterbirds_results import facts_of

CLAIMED = [f"F{number}" for number in range(8, 24)]
KNOWN = {one[0]: one for one in UNTESTED}
NEAR = 1.6  # times the cost of one dense ViT; the first stage alone is one
RULE = (
    "A test holds when the 95 % interval of its difference lies above the margin, fails when it lies below, and is "
    "undecided when it spans it; a claim fails when one of its deciding tests fails, holds when all hold, and is "
    "undecided otherwise. Each test is at 95 % by itself. The backbone is a small ViT trained on ImageNet, no DINOv2; "
    "data and recipes are ours, and are in interventions_rows.py. MetaShift and SIIM are not at hand: what the papers "
    "show there is asked of a set where every picture has a drawn post or tag, which in training always goes with the "
    "class (pair: F16, F17, F19, F20). Where only one class has a tag, mostly (object), leaving it out cannot help "
    "waterbirds without one, and so the same tests there do not decide. "
    "What is left out was chosen on validation data; fixed quantiles were not chosen at all. Costs are near each other "
    f"when one is at most {NEAR} times the other, which is our word; costs and speeds have no interval."
)


# ---- kinds of tests --------------------------------------------------------------------------------------------------


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
        found = verdict(difference, self.margin)
        return Finding(self.words, found, figures, difference, self.margin, self.decides, seeds)


@dataclass(frozen=True)
class TookTheObject:
    """Whether what the search leaves out first, of parts alone, is the part that a drawn object is in."""

    kind: str
    row: str
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.kind}: of {self.row}, the part left out first is one that took an object"

    def find(self, evidence: Evidence) -> Finding:
        cases = {}
        for seed, one in evidence.found(self.kind, self.row).items():
            if things := one.get("objects"):
                took = {thing: {"part": known["part"], "share": max(known["share_of_the_object"])}
                        for thing, known in things.items()}  # fmt: skip
                tried = one["searches"]["parts"]
                first = max(tried["trials"], key=lambda trial: trial["score"])["drop"] if tried["drop"] else []
                cases[f"seed {seed}"] = {"left_out": tried["drop"], "first": first, "of_objects": took}
        if not cases:
            raise Missing(f"{self.row}: no objects were looked for")
        taken = [{known["part"] for known in one["of_objects"].values()} for one in cases.values()]
        right = sum(bool(some & {*one["first"]}) for some, one in zip(taken, cases.values(), strict=True))
        silent = sum(not one["left_out"] for one in cases.values())
        found = HOLDS if right == len(cases) else FAILS if right + silent < len(cases) else UNDECIDED
        note = f"{right} of {len(cases)} runs; in {silent} nothing surely helped"
        return Finding(self.words, found, cases, decides=self.decides, seeds={self.row: len(cases)}, note=note)


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
        found = HOLDS if ratio > 1 else FAILS
        return Finding(self.words, found, speed, decides=self.decides, note=f"{ratio:.2f} times as fast")


# ---- the claims ------------------------------------------------------------------------------------------------------

Tests = tuple[object, ...]
FULL, WITHOUT_STAGE_2 = "iFAM K=4", "PDiscoFormer K=4"
SWAPPED, ORIGINAL = "swapped", "original"
SPURIOUS = "iFAM K=8"  # on the sets with objects
DECIDING = "pair"  # of these


def less(ours: str, theirs: str, part: str = "all", hows: tuple[str, str] = (PLAIN, PLAIN)) -> tuple[Term, Term]:
    return Term(1.0, ours, hows[0], part), Term(-1.0, theirs, hows[1], part)


def on_both(ours: str, theirs: str, *, decides: bool = True) -> Tests:
    """Out of distribution: species on swapped backgrounds, and the worst group of Waterbirds."""
    return (
        Contrast("cub", less(ours, theirs, SWAPPED), decides=decides),
        Contrast("birds", less(ours, theirs), "worst group", decides=decides),
    )


def ablations() -> dict[str, Tests]:
    others = [f"{FULL}, {how}" for how in ABLATED if not how.startswith("part dropout")]
    soft = f"{FULL}, soft masks"
    return {
        "F8": (*on_both(FULL, WITHOUT_STAGE_2), *(t for row in others for t in on_both(row, WITHOUT_STAGE_2))),
        "F9": (
            Contrast("cub", less(soft, FULL, ORIGINAL)),
            Contrast("cub", less(FULL, soft, SWAPPED)),
            Contrast("birds", less(FULL, soft), "worst group", decides=False),
        ),
        "F10": on_both(FULL, f"{FULL}, no shaping"),
        "F11": on_both(FULL, f"{FULL}, no stage-1 classification"),
        "F12": on_both(FULL, f"{FULL}, frozen stage 2"),
        "F13": tuple(test for share in DROPOUTS for test in on_both(FULL, f"{FULL}, part dropout {share:g}")),
    }


def seeing_everything() -> dict[str, Tests]:
    early, late = "early mask, true", "late mask, true"
    return {
        "F14": (
            Contrast("cub", less("ERM", "probe", ORIGINAL)),
            Contrast("cub", less("probe", "ERM", SWAPPED)),
        ),
        "F15": (
            Contrast("cub", less(early, late, SWAPPED)),
            Contrast("cub", less("ERM", late, SWAPPED), margin=-0.01),
            Contrast("cub", less("iFAM K=4", late, SWAPPED), decides=False),
        ),
        "F21": tuple(
            Contrast("mixed", less(rival, ours), "gap", decides=ours == FULL)
            for ours in (FULL, "iFAM K=1, pixels")
            for rival in ("ERM", WITHOUT_STAGE_2)
        ),
        "F22": (Costs("cub", FULL, "ERM"), Costs("birds", "iFAM K=4", WITHOUT_STAGE_2, decides=False)),
    }


def interventions() -> dict[str, Tests]:
    rival = "PDiscoFormer K=8"
    chosen, fixed, both = "parts", "q0.99", "parts, q0.99"

    def of_object(kind: str, *terms: Term, decides: bool = True) -> Contrast:
        return Contrast(kind, terms, "worst group", decides=decides and kind == DECIDING)

    gains = [
        of_object(kind, *less(row, row, hows=(chosen, PLAIN)), decides=row == SPURIOUS)
        for kind in WITH_OBJECTS
        for row in (SPURIOUS, "iFAM K=8, pixels", rival, "iFAM K=4", "iFAM K=16")
    ]
    removed = [
        Contrast("cub", less(row, row, SWAPPED, (f"q{q:g}", PLAIN)), measure, decides="pixels" not in row)
        for k in (4, 8, 16)
        for row in (f"iFAM K={k}", f"iFAM K={k}, pixels")
        for q in QUANTILES
        for measure in ("accuracy", "IoU")
    ]
    more = [
        of_object(
            kind,
            *less(SPURIOUS, SPURIOUS, hows=(how, PLAIN)),
            *less(rival, rival, hows=(PLAIN, how)),
            decides=how == both,
        )
        for kind in WITH_OBJECTS
        for how in (chosen, fixed, both)
    ]
    return {
        "F16": (
            *(of_object(kind, *less("iFAM K=4", "iFAM K=16")) for kind in WITH_OBJECTS),
            Contrast("object", less("iFAM K=1", "iFAM K=8"), "worst group", decides=False),
            Contrast("birds", less("iFAM K=4", "iFAM K=16"), "worst group", decides=False),
        ),
        "F17": tuple(gains),
        "F18": tuple(removed),
        "F19": tuple(
            of_object(kind, *less(SPURIOUS, SPURIOUS, hows=(both, one)))
            for kind in WITH_OBJECTS
            for one in (chosen, fixed)
        ),
        "F20": tuple(more),
    }


def timed() -> dict[str, Tests]:
    fp32 = f"{FULL}, fp32"
    others = (FULL, f"{fp32}, averaged", f"{FULL}, bf16, averaged")  # the first is bf16, too
    fast = (f"{FULL}, timed, {how}" for how in ("bf16", "bf16, averaged"))
    return {
        "F23": (
            *(Contrast("birds", less(one, fp32), "accuracy", margin=-0.01) for one in others),
            *(Faster(one, f"{FULL}, timed, fp32") for one in fast),
        )
    }


def claims_about() -> list[Claim]:
    tests = ablations() | seeing_everything() | interventions() | timed()
    published = [Claim(*KNOWN[id][:3], tests=tests[id]) for id in CLAIMED]  # ty: ignore[invalid-argument-type]
    ours: dict[str, tuple[str, Tests]] = {
        "I1": (
            "Leaving out parts finds the one that took the shortcut.",
            tuple(
                TookTheObject(kind, row, decides=(kind, row) == (DECIDING, SPURIOUS))
                for kind in WITH_OBJECTS
                for row in (SPURIOUS, "PDiscoFormer K=8")
            ),
        ),
        "I2": (
            "On pure noise the search finds nothing.",
            tuple(SilentOnNoise(kind, SPURIOUS) for kind in WITH_OBJECTS),
        ),
    }
    return [*published, *(Claim(id, says, OURS, tests=some) for id, (says, some) in ours.items())]  # ty: ignore[invalid-argument-type]


def rows_named(claim: Claim) -> set[tuple[str, str]]:
    """Sets and rows that a claim is about."""
    found = set()
    for test in claim.tests:
        if isinstance(test, Contrast):
            found |= {(test.kind, term.row) for term in test.terms}
        elif isinstance(test, Costs):
            found |= {(test.kind, test.ours), (test.kind, test.dense)}
        elif isinstance(test, Faster):
            found |= {("birds", test.ours), ("birds", test.theirs)}
        elif isinstance(test, TookTheObject | SilentOnNoise):
            found.add((test.kind, test.row))
    return found


def command_for(claim: Claim) -> str:
    """What runs the rows of a claim."""
    named = rows_named(claim)
    sets, rows = (sorted({one[k] for one in named}) for k in (0, 1))
    data = " ".join(f"--{kind} DATA" for kind in sets)
    return f"python benchmarks/interventions.py {data} --backbone BACKBONE --only {' '.join(sets)} --rows " + " ".join(
        f"'{row}'" for row in rows
    )


# ---- from runs to verdicts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InterventionClaims:
    runs: Positional[Path]
    """The folder that `benchmarks/interventions.py` made."""
    only: tuple[str, ...] = ()
    out: Path | None = None


def show(concluded: Sequence[tuple[Claim, str, list[Finding]]]) -> None:
    table = Table("", "", "figures", "seeds", "difference", "", "", box=None, pad_edge=False)
    for claim, conclusion, findings in concluded:
        table.add_row(claim.id, f"[bold]{escape(claim.says)}[/]", "", "", "", f"[bold]{conclusion}[/]", "")
        table.add_row("", f"[dim]paper: {escape(claim.paper)}[/]")
        for one in findings:
            figures = ", ".join(e.figure for e in (one.figures or {}).values() if isinstance(e, Estimate))
            name = f"  {'' if one.decides else '(beside) '}{escape(one.test)}"
            seeds = ", ".join(map(str, (one.seeds or {}).values()))
            table.add_row(
                "", name, figures, seeds, str(one.difference or ""), one.verdict, f"[dim]{escape(one.note)}[/]"
            )
        table.add_section()
    console = Console(highlight=False, width=260)
    console.print(table)
    console.print(RULE, width=120)


def main() -> None:
    config = tyro.cli(InterventionClaims, description=__doc__)
    every = claims_about()
    if unknown := set(config.only) - {claim.id for claim in every}:
        raise UserError(f"--only {' '.join(sorted(unknown))}: known are {', '.join(claim.id for claim in every)}")
    evidence = Evidence(config.runs)
    chosen = [claim for claim in every if not config.only or claim.id in config.only]
    concluded = [(claim, *conclude(claim, evidence)) for claim in chosen]  # ty: ignore[invalid-argument-type]
    show(concluded)
    if config.out:
        lines = {(row.set, row.name): row.line for kind in SETS for row in rows_of(kind)}
        content = [
            {"id": claim.id, "claim": claim.says, "paper": claim.paper, "verdict": conclusion}
            | {"runs_made_by": command_for(claim)}
            | {"recipes": {f"{kind}: {row}": lines[kind, row] for kind, row in sorted(rows_named(claim))}}
            | {"tests": [asdict(one) for one in findings if one.verdict != NOT_RUN or one.decides]}
            for claim, conclusion, findings in concluded
        ]
        record(config.out, "cpu", {"rule": RULE, "claims": content})


if __name__ == "__main__":
    main()
