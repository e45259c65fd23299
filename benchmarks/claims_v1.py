"""Claims decided on Waterbirds v1.0, the published images: F2 to F6, A3, A14, B3, and what our default is worth.

WB-R stands beside, where its rows were trained too. "iFAM" is the papers' method here (`papers`), never our variant of
it; our default has claims of its own (B3, B4).
"""

from __future__ import annotations

from collections.abc import Sequence

from claim_texts import claim
from evidence import Evidence
from rows.waterbirds_v1 import ALL, FROZEN, GRIDS, SETS, selected_of_grids
from selection import validation_score
from sightline.metrics.comparison import compare
from verdicts import FAILS, HOLDS, RULE, UNDECIDED, Claim, ClaimsOfStudy, Measured, Test, verdict

V1, WBR = "birds", "wbr"
THIS_RULE = RULE.replace("Each test is at 95 % by itself, not all together. ", "") + (
    "Intervals of the tests of one claim hold together at 95 % (Bonferroni). A comparison in which a trained row has a "
    "single seed is undecided; rows without randomness in training (probes, crops, A²) need no seeds. All rows have 10 "
    "epochs, the same augmentation and image size. Rivals have the hyperparameters that the validation worst group of "
    "the first seed selects. "
)
GROUP_FREE = ("ERM", "ERM, our recipe", "JTT", "CVaR", "LfF", "GEORGE", "MaskTune", "probe", "S2", "A2 TI>TI")
GROUP_LABELS = ("GroupDRO", "IRM", "CORAL", "DFR val", "DFR train", "ERM, balanced groups")


def chosen(evidence: Evidence, kind: str, row: str) -> str:
    """Of a rival with a grid, the row that validation selects."""
    if row not in GRIDS:
        return row
    found = selected_of_grids(lambda name: validation_score(evidence.runs / kind, name))
    return next((name for name in found if name.startswith(f"{row}, ")), f"{row}, {next(iter(GRIDS[row]))}")


def beats(
    ours: str, theirs: str, margin: float = 0.0, *, kind: str = V1, family: int = 1, decides: bool = True
) -> Test:
    """Worst-group accuracy of one row against another, on the same images."""

    def find(evidence: Evidence) -> Measured:
        rival = chosen(evidence, kind, theirs)
        runs = {rival: evidence.predictions(kind, rival), ours: evidence.predictions(kind, ours)}
        reference, entry = compare(runs, comparisons=family).entries
        gain, seeds = entry.worst_gain, evidence.seeds(kind, ours, rival)
        assert gain is not None, "two rows are compared"
        single = [row for row, count in seeds.items() if count == 1 and row not in FROZEN]
        decided = verdict(gain, margin)
        alone = decided in (HOLDS, FAILS) and bool(single)
        note = f"one seed of {' and '.join(single)}: {decided} by images alone" if alone else ""
        figures = {ours: entry.worst, rival: reference.worst}
        return Measured(figures, gain, seeds, note, UNDECIDED if alone else "")

    where = "" if kind == V1 else f" on {kind}"
    words = f"worst group{where}: {ours} − {theirs}" + (f" > {100 * margin:+.0f} points" if margin else "")
    return Test(words, find, margin, decides, ((kind, ours), (kind, theirs)))


def together(*pairs: tuple[str, str] | tuple[str, str, float]) -> tuple[Test, ...]:
    """Tests that decide a claim, corrected for their number; and the same on WB-R, beside it."""
    tests = [beats(*pair, family=len(pairs)) for pair in pairs]
    return (*tests, *(beats(*pair, kind=WBR, decides=False) for pair in pairs))


TRUE, PIXELS = "early mask, true", "early mask, true, pixels"
PAPERS = tuple(f"iFAM K={k}, papers" for k in (4, 8))
DEFAULTS = tuple(f"iFAM K={k}" for k in (1, 4, 8))


def default_beats(rivals: Sequence[str], margin: float) -> tuple[Test, ...]:
    return together(*(("iFAM K=4", rival, margin) for rival in rivals))


CLAIMS: tuple[Claim, ...] = (
    claim("F2", *together((TRUE, "late mask, true"))),
    claim("F3", *together(*((f"iFAM K={k}, papers", f"PDiscoFormer K={k}") for k in (4, 8)))),
    claim("F4", *together(*((PAPERS[1], rival) for rival in ("ERM", "probe")))),
    claim("F5", *together((PAPERS[1], TRUE, -0.01))),
    claim("F6", *together((PAPERS[1], "early mask, FOUND"))),
    claim("A3", *together(("A2 TI>TI", "probe"), ("A2 SELF>SELF", "probe SELF"))),
    claim("A14", *together(("A2 TI>TI", "A2 TI>TI, untuned"))),
    claim(
        "B3",
        *together((PIXELS, TRUE)),
        # Without our selector stage 1 is learned and nothing is zoomed: more than the pixels differs.
        *(
            beats("iFAM K=4", f"iFAM K=4, whole patches, our {which}", kind=kind, decides=False)
            for which in ("selector", "recipe")
            for kind in (V1, WBR)
        ),
        *(beats(ours, f"{ours}, papers", decides=False) for ours in DEFAULTS),
    ),
    claim("B4", *default_beats(GROUP_FREE, 0.05)),
    claim("B5", *default_beats(GROUP_LABELS, 0.01)),
)


def claims_of_study(evidence: Evidence) -> ClaimsOfStudy:  # noqa: ARG001 (as of every study)
    lines = {(kind, row): line for kind in SETS for row, line in ALL.items()}
    lines |= {(kind, rival): ALL[f"{rival}, {next(iter(grid))}"] for kind in SETS for rival, grid in GRIDS.items()}
    return ClaimsOfStudy(CLAIMS, THIS_RULE, lines, all_tests=False)
