"""The claims about parts, interventions and ablations, held against what `benchmarks/interventions.py` has run.

    cd benchmarks/results; python ../interventions_claims.py interventions --twice interventions_h200.json
    python benchmarks/interventions_claims.py runs/interventions --only F17 F18

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

from claims import NOT_RUN, Claim, Finding, conclude
from interventions_evidence import PLAIN, Evidence, Term, unpacked
from interventions_kinds import FASTER, NEAR, Contrast, Costs, Faster, SilentOnNoise, TookTheObject
from interventions_rows import ABLATED, DROPOUTS, QUANTILES, SETS, WITH_OBJECTS, rows_of
from record import record
from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from untested_claims import OURS, UNTESTED

CLAIMED = [f"F{number}" for number in range(8, 24)]
KNOWN = {one[0]: one for one in UNTESTED}
RULE = (
    "A test holds when the 95 % interval of its difference lies above the margin, fails when it lies below, and is "
    "undecided when it spans it; a claim fails when one of its deciding tests fails, holds when all hold, and is "
    "undecided otherwise. Each test is at 95 % by itself. The backbone is a small ViT trained on ImageNet, no DINOv2; "
    "data and recipes are ours, and are in interventions_rows.py. MetaShift and SIIM are not at hand: what the papers "
    "show there is asked of a set where every picture has a drawn post or tag, which in training always goes with the "
    "class (pair: F16, F17, F19, F20). Where only one class has a tag, mostly (object), leaving it out cannot help "
    "waterbirds without one, and so the same tests there do not decide. Most rows have one seed. How far figures come "
    "apart when a row is trained again is known from rows that were, and intervals between runs allow for it (pooled "
    "over the rows of a set, t distribution); those of a run against itself, under an intervention, are over pictures. "
    "That rule, and the one on speeds, were made when these figures had been seen; each claim has its verdict by "
    "pictures alone beside it. "
    "What is left out was chosen on validation data; fixed quantiles were not chosen at all. Costs are near each other "
    f"when one is at most {NEAR} times the other, and speeds differ when it is {FASTER} times or more, which is our "
    "word; costs and speeds have no interval."
)


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
        of_object(kind, *less(row, row, hows=(how, PLAIN)), decides=(row, how) == (SPURIOUS, chosen))
        for kind in WITH_OBJECTS
        for row in (SPURIOUS, "iFAM K=8, pixels", rival, *("iFAM K=4", "iFAM K=16") * (kind == DECIDING))
        for how in (chosen, "both")  # as the command searches
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
            *(of_object(DECIDING, *less(f"iFAM K={k}", "iFAM K=16"), decides=k == 4) for k in (1, 2, 4, 8)),
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
                TookTheObject(kind, row, by, decides=(kind, row, by) == (DECIDING, SPURIOUS, "left out first"))
                for kind in WITH_OBJECTS
                for row in (SPURIOUS, "PDiscoFormer K=8", *("iFAM K=4", "iFAM K=16") * (kind == DECIDING))
                for by in ("left out first", "helps a group most")
            ),
        ),
        "I2": (
            "On pure noise the search finds nothing.",
            tuple(
                SilentOnNoise(kind, row, decides=row == SPURIOUS)
                for kind in WITH_OBJECTS
                for row in (SPURIOUS, "PDiscoFormer K=8")
            ),
        ),
    }
    return [*published, *(Claim(id, says, OURS, tests=some) for id, (says, some) in ours.items())]  # ty: ignore[invalid-argument-type]


def deciding_rows() -> set[tuple[str, str]]:
    """Sets and rows that verdicts hang on."""
    return {row for claim in claims_about() for row in rows_named(claim, only_deciding=True)}


def rows_named(claim: Claim, *, only_deciding: bool = False) -> set[tuple[str, str]]:
    """Sets and rows that a claim is about."""
    found = set()
    for test in [one for one in claim.tests if one.decides or not only_deciding]:
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
    """The folder that `benchmarks/interventions.py` made, or its `--pack`."""
    twice: Path | None = None
    """A file of `interventions.py --before`: how far rows that were trained again came apart widens the intervals."""
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


def spreads(claims: Sequence[Claim], evidence: Evidence) -> list[dict[str, Any]]:
    """How far apart runs of a row come, by set and figure, wherever rows are compared."""
    compared = dict.fromkeys(
        (test.kind, test.terms[0].part, test.measure)
        for claim in claims
        for test in claim.tests
        if isinstance(test, Contrast) and test.measure != "IoU" and len({term.row for term in test.terms}) > 1
    )
    found = {one: evidence.spread(*one) for one in compared}
    return [
        {"set": kind, "of": part, "figure": measure} | asdict(one)
        for (kind, part, measure), one in found.items()
        if one is not None
    ]


def main() -> None:
    config = tyro.cli(InterventionClaims, description=__doc__)
    every = claims_about()
    if unknown := set(config.only) - {claim.id for claim in every}:
        raise UserError(f"--only {' '.join(sorted(unknown))}: known are {', '.join(claim.id for claim in every)}")
    chosen = [claim for claim in every if not config.only or claim.id in config.only]
    with unpacked(config.runs) as runs:
        evidence, of_pictures = Evidence(runs, config.twice), Evidence(runs)
        concluded = [(claim, *conclude(claim, evidence)) for claim in chosen]  # ty: ignore[invalid-argument-type]
        otherwise = {claim.id: conclude(claim, of_pictures)[0] for claim in chosen}  # ty: ignore[invalid-argument-type]
    show(concluded)
    if config.out:
        lines = {(row.set, row.name): row.line for kind in SETS for row in rows_of(kind)}
        content = [
            {"id": claim.id, "claim": claim.says, "paper": claim.paper, "verdict": conclusion}
            | {"verdict_by_pictures_alone": otherwise[claim.id]}
            | {"runs_made_by": command_for(claim)}
            | {"recipes": {f"{kind}: {row}": lines[kind, row] for kind, row in sorted(rows_named(claim))}}
            | {"tests": [asdict(one) for one in findings if one.verdict != NOT_RUN or one.decides]}
            for claim, conclusion, findings in concluded
        ]
        record(config.out, "cpu", {"rule": RULE, "spread": spreads(chosen, evidence), "claims": content})


if __name__ == "__main__":
    main()
