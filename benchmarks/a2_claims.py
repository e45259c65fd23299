"""The claims about A², and ours about pairings, held against what `benchmarks/a2.py` has run.

    python benchmarks/a2_claims.py runs/a2 --out benchmarks/results/claims_a2.json
    python benchmarks/a2_claims.py runs/a2 --ifam runs/waterbirds/ifam-k-1--pixels-0 \\
        --matrix benchmarks/results/matrix_wbr_h200.json --pretrained benchmarks/results/pretrain_family_h200.json

It reads answers and measurements, and needs neither weights nor pictures. Verdicts are those of benchmarks/claims.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional

from a2_evidence import Apart, Column, Contrast, Evidence, GainsMore, less
from a2_family import SIZES, Members, knn, matched
from a2_files import Duel, Localises, Supervised
from a2_results import lines_in
from a2_rows import COUNTS, MASSES, PLAIN_LOOK
from claim_figures import Missing
from claims import NOT_RUN, Claim, Finding, conclude
from record import record
from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from untested_claims import UNTESTED

KNOWN = {one[0]: one for one in UNTESTED}
OURS = ("B2",)
PHOTOGRAPHS = ("birds", "o2o", "m2m", "disjoint")
RULE = (
    "A test holds when the 95 % interval of its difference lies above the margin, fails when it lies below, and is "
    "undecided when it spans it; of 'does not matter', it holds when the interval lies inside the margin on both "
    "sides, and fails when it lies outside. A claim fails when one of its deciding tests fails, holds when all of them "
    "hold, and is undecided otherwise, also when only some were run; other tests are shown beside them. Each test is "
    "at 95 % by itself, not all together. Logistic regression has no seeds: intervals are over pictures, of one "
    "pretrained backbone each. 'A2 X>Y' is attention of X, embeddings of Y; which block and heads X looks with was "
    "chosen by validation accuracy, unless the row names them. What decides is of the self-supervised backbone, but "
    "for A7 and A12 (iFAM's backbone answers) and A10 (each). Whether something localises at all, more than a map that "
    "is the same everywhere, holds or is undecided: where it does not, comparing where sizes look decides nothing."
)


# ---- the claims ------------------------------------------------------------------------------------------------------


Tests = tuple[Any, ...]


def looking(evidence: Evidence, pretrained: Path | None) -> dict[str, Tests]:
    """A1, A2, A13: of the family."""
    runs = evidence.runs / "family"
    sizes = [size for size in SIZES if (runs / f"attention-{size}-0").exists()] or ["nano", "ti", "s"]
    small, *larger = sizes
    states, steps = matched_states(runs, sizes), "after equally many steps"
    equal = [
        Apart("family", Column(a, figure), Column(b, figure), decides=figure == "mass", note=steps)
        for figure in ("mass", "hit")
        for a, b in pairwise(sizes)
    ]
    alike = [
        Apart("family", Column(small, figure), Column(state, figure), decides=figure == "mass", note=note)
        for figure in ("mass", "hit")
        for state, note in states
    ]
    localises = [Localises(pretrained, size) for size in sizes]
    supervised = [Supervised(pretrained, size, small, margin=-0.01) for size in larger]
    takeover = [
        test
        for state, note in (*((size, steps) for size in larger), *states)
        for test in (
            Apart("family", *(Column(one, "registers", less="two thirds") for one in (state, small)), note=note),
            Apart("family", *(Column(one, "mass", less="best") for one in (small, state)), note=note),
        )
    ]
    return {"A1": (*equal, *alike), "A2": (*localises, *supervised), "A13": tuple(takeover)}


def matched_states(runs: Path, sizes: Sequence[str]) -> list[tuple[str, str]]:
    """Of each larger size, the state whose neighbours are as good as those of the smallest in the end, and a note."""
    kept = [
        (size, int(found[1]), "")
        for size in sizes
        for path in sorted(runs.glob(f"attention-{size}-*"))
        if (found := re.fullmatch(rf"attention-{size}-(\d+)-0", path.name))
    ]
    states = matched(runs, Members([(size, "") for size in sizes], kept))
    told = []
    for size in sizes[1:]:
        known = {one: knn(runs, one) for one in (sizes[0], states.get(size, size))}
        right = ", ".join(f"{one} {100 * share:.1f} %" for one, share in known.items() if share is not None)
        words = f"when the neighbours of {size} were as good as those of {sizes[0]} in the end"
        if size not in states:
            words = f"only the last state of {size} was measured, none to match"
        told.append((states.get(size, f"{size}@matched"), f"{words} (right by neighbours: {right})" * bool(right)))
    return told


def of_one_backbone(head: str) -> Tests:
    """A13, beside: whether registers take over in the last third, and whether attention is best in the last block."""
    return (
        Apart("birds", Column(head, "registers", less="two thirds"), decides=False),
        Apart(
            "birds", Column(head, "mass", less="best"), decides=False, note="below 0: the last block is not the best"
        ),
    )


def pairs_of_sizes(evidence: Evidence, head: str, names: Sequence[str]) -> Tests:
    """A4: attention of smaller ones, embeddings of the largest."""
    sizes = [size for size in SIZES if size in evidence.names("toy")] or ["nano", "ti", "s"]
    large, plain = sizes[-1], PLAIN_LOOK.words
    tests = [Contrast("toy", less(f"A2 {size}>{large}", f"A2 {large}>{large}")) for size in sizes[:-1]]
    tests += [
        Contrast("toy", less(f"A2 {size}>{large}, {plain}", f"A2 {large}>{large}, {plain}"), decides=False)
        for size in sizes[:-1]
    ]
    tests.append(Contrast("toy", less(f"A2 {sizes[0]}>{large}, {plain}", f"A2 {large}-matched>{large}, {plain}")))
    others = [name for name in names if name != head]
    return (
        *tests,
        *(Contrast("birds", less(f"A2 {one}>{head}", f"A2 {head}>{head}"), decides=False) for one in others),
    )


BOTH = ("worst group", "accuracy")


def crops_against_the_whole(head: str, names: Sequence[str]) -> dict[str, Tests]:
    """A3, and A14: whether that margin is smaller when both are tuned, on every set of photographs."""
    fits, rivals = (", plain", ""), ("full at twice the size", "random", "S2")
    gains = [Contrast("birds", less(f"A2 {w}>{w}{f}", f"full, {w}{f}"), decides=w == head) for w in names for f in fits]
    beside = [Contrast("birds", less(f"A2 {w}>{w}", f"{r}, {w}"), decides=False) for w in names for r in rivals]
    margins = [
        Contrast(
            kind,
            (*less(f"A2 {head}>{w}, plain", f"full, {w}, plain"), *less(f"full, {w}", f"A2 {head}>{w}")),
            measure,
            decides=w == head and measure == "mean of groups",
        )
        for kind in PHOTOGRAPHS
        for w in names
        for measure in ("mean of groups", "worst group")
    ]
    return {"A3": (*gains, *beside), "A14": tuple(margins)}


def with_dfr(head: str, names: Sequence[str]) -> dict[str, Tests]:
    tests = [
        Contrast("o2o", less(f"A2 {head}>{w}, DFR train", rival), m, decides=w == head and m == "worst group")
        for w in names
        for m in BOTH
        for rival in (f"DFR train, {w}", f"A2 {head}>{w}")
    ]
    return {"A5": tuple(tests)}


def off_centre(head: str, names: Sequence[str], same: str) -> dict[str, Tests]:
    """A6, A7; `same` is the backbone that iFAM has, too."""
    far = ("farthest 10 %", "displaced")
    tests = [
        Contrast(
            "birds",
            less(f"A2 {head}>{w}", f"{centre}, {w}", part),
            m,
            decides=(w, centre, m) == (head, "centre", "accuracy") and part in far,
        )
        for w in names
        for centre in ("centre", "centre 2/7")
        for part in ("all", "farthest 1 %", "the rest", "centred", *far)
        for m in (BOTH if part != "farthest 1 %" else ("accuracy",))
    ]
    ours = f"A2 {head}>{same}"
    drops = (
        (1.0, "iFAM", "nearest 10 %"), (-1.0, "iFAM", "farthest 10 %"), (-1.0, ours, "nearest 10 %"),
        (1.0, ours, "farthest 10 %"),
    )  # fmt: skip
    return {"A6": tuple(tests), "A7": tuple(Contrast("birds", drops, m, decides=m == "accuracy") for m in BOTH)}


def how_to_look(head: str, names: Sequence[str]) -> dict[str, Tests]:
    """A8: fewer crops, the more so the more the scene says; A9: other ways to join heads; A10: true masks, moved."""
    cues = ("o2o", "disjoint"), ("o2o", "m2m"), ("m2m", "disjoint")  # the stronger first
    fewer: list[Any] = [
        GainsMore(kinds, f"A2 {head}>{w}", f"A2 {head}>{w}, {COUNTS[-1]} crops", decides=(w, kinds) == (head, cues[0]))
        for w in names
        for kinds in cues
    ]
    fewer += [
        Contrast(kind, less(f"A2 {head}>{w}", f"A2 {head}>{w}, {count} crops"), m, decides=False)
        for kind in PHOTOGRAPHS
        for w in names
        for m in BOTH
        for count in COUNTS
    ]
    mean = {w: f"A2 {w}>{w}, {PLAIN_LOOK.words}" for w in names}
    joined = [
        Contrast("birds", less(mean[w], f"A2 {w}>{w}, block -1, {how}"), "accuracy", 0.02, True, decides=w == head)
        for w in names
        for how in ("entropy", "lowest", "max")
    ]
    sharper = [
        Contrast("birds", less(mean[w], f"A2 {w}>{w}, block -1, lowest"), "accuracy", -0.01, decides=w == head)
        for w in names
    ]
    worse = [
        Contrast("birds", less(f"oracle {a:g}, {w}", f"oracle {b:g}, {w}"), m, decides=(a, b) == (0.8, 0.4))
        for w in names
        for m in BOTH
        for a, b in ((0.8, 0.4), *pairwise(MASSES))
    ]
    return {"A8": tuple(fewer), "A9": (*joined, *sharper), "A10": tuple(worse)}


def adapted(head: str) -> dict[str, Tests]:
    tests = [
        Contrast(
            "turned",
            less(f"adapter {head}, {look}", f"adapter {head}, {look}, untrained"),
            m,
            decides=(look, m) == ("plain rule", "worst group"),
        )
        for look in ("plain rule", "look at birds")
        for m in BOTH
    ]
    return {"A11": (*tests, Contrast("turned", less(f"adapter {head}, plain rule", f"full, {head}"), decides=False))}


def against_ifam(head: str, same: str, same_disjoint: str) -> dict[str, Tests]:
    pairs = {"birds": ("iFAM", f"A2 {head}>{same}"), "disjoint": (f"A2 {head}>{same_disjoint}", "iFAM")}
    tests = [Contrast(k, less(*pair), m, decides=m == "worst group") for k, pair in pairs.items() for m in BOTH]
    return {"A12": tuple(tests)}


def claims_about(evidence: Evidence, matrices: Sequence[Path], pretrained: Path | None = None) -> list[Claim]:
    names = evidence.names("birds") or ["S"]
    counted = [re.match(r"A2 (.+)>", name) for name in lines_in(evidence.runs / "birds") if name.endswith(" 2 crops")]
    head = counted[0][1] if counted and counted[0] else names[0]
    names = [head, *(name for name in names if name != head)]
    tests = looking(evidence, pretrained) | {"A4": pairs_of_sizes(evidence, head, names)}
    same, same_disjoint = (same_as_ifam(evidence, kind, head) for kind in ("birds", "disjoint"))
    tests |= crops_against_the_whole(head, names) | with_dfr(head, names) | off_centre(head, names, same)
    tests |= how_to_look(head, names) | adapted(head) | against_ifam(head, same, same_disjoint)
    tests["A13"] += of_one_backbone(head)
    tests["B2"] = tuple(Duel(file) for file in matrices) or (Duel(None),)
    numbered = [f"A{number}" for number in range(1, 16)]
    return [
        Claim(*KNOWN[id][:3], tests=tests.get(id, ()), lacks=KNOWN[id][4] if len(KNOWN[id]) > 4 else "")
        for id in (*numbered, *OURS)
    ]


def same_as_ifam(evidence: Evidence, kind: str, otherwise: str) -> str:
    try:
        return evidence.same_backbone_as_ifam(kind)
    except Missing:
        return otherwise  # the test says itself what is missing


# ---- from runs to verdicts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class A2Claims:
    runs: Positional[Path]
    """The folder that `benchmarks/a2.py` made."""
    only: tuple[str, ...] = ()
    ifam: tuple[Path, ...] = ()
    """Runs of iFAM on the same Waterbirds, one per seed, with the same backbone as a row here."""
    ifam_disjoint: tuple[Path, ...] = ()
    """The same on the set whose scenes are disjoint."""
    matrix: tuple[Path, ...] = ()
    """matrix.json of `sightline matrix`."""
    pretrained: Path | None = None
    """What `benchmarks/pretrain.py family --out` wrote, for sizes trained with labels."""
    out: Path | None = None


def show(concluded: Sequence[tuple[Claim, str, list[Finding]]]) -> None:
    table = Table("", "", "figures", "difference", "", "", box=None, pad_edge=False)
    for claim, conclusion, findings in concluded:
        table.add_row(claim.id, f"[bold]{escape(claim.says)}[/]", "", "", f"[bold]{conclusion}[/]", escape(claim.lacks))
        table.add_row("", f"[dim]paper: {escape(claim.paper)}[/]")
        for one in findings:
            figures = ", ".join(e.figure for e in (one.figures or {}).values() if isinstance(e, Estimate))
            name = f"  {'' if one.decides else '(beside) '}{escape(one.test)}"
            table.add_row("", name, figures, str(one.difference or ""), one.verdict, f"[dim]{escape(one.note)}[/]")
        table.add_section()
    console = Console(highlight=False, width=260)
    console.print(table)
    console.print(RULE, width=120)


def main() -> None:
    config = tyro.cli(A2Claims, description=__doc__)
    evidence = Evidence(config.runs, config.ifam, config.ifam_disjoint)
    every = claims_about(evidence, config.matrix, config.pretrained)
    if unknown := set(config.only) - {claim.id for claim in every}:
        raise UserError(f"--only {' '.join(sorted(unknown))}: known are {', '.join(claim.id for claim in every)}")
    chosen = [claim for claim in every if not config.only or claim.id in config.only]
    concluded = [(claim, *conclude(claim, evidence)) for claim in chosen]  # ty: ignore[invalid-argument-type]
    show(concluded)
    if config.out:
        content = [
            {"id": claim.id, "claim": claim.says, "paper": claim.paper, "verdict": conclusion, "lacks": claim.lacks}
            | {"tests": [asdict(one) for one in findings if one.verdict != NOT_RUN or one.decides]}
            for claim, conclusion, findings in concluded
        ]
        record(config.out, "cpu", {"rule": RULE, "claims": content})


if __name__ == "__main__":
    main()
