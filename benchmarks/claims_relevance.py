"""Claims about RobustViT and its rivals: R1 to R12."""

from __future__ import annotations

from collections.abc import Sequence

from claim_texts import claim
from contrasts import ACCURACY, WORST, versus
from evidence import Evidence, Missing, apart, read_json
from rows.relevance import RULE as RATE_RULE
from sightline.metrics.estimates import Estimate
from verdicts import RULE, ClaimsOfStudy, Measured, Test

SMALL = 0.02  # what counts as a small cost, and as nearly as well
ENOUGH = 0.01  # within which fewer masks are enough, and classes gain as much
FAITHFUL = 0.02
SURE = 0.9  # of labels drawn at random that must be reachable, for any to be
THIS_RULE = RULE + (
    "Rows are compared on the same images and with the seeds that both have, since a row fine-tunes the run of its "
    "seed; intervals are over images, and over seeds where there are several. `usual`: Waterbirds on their usual "
    "background, CUB's photographs, SI-Score's cut-outs in the centre; `shifted`: the other background, swapped "
    "backgrounds, and cut-outs that are moved, rotated or resized. Margins: a small cost is 2 points, so is nearly as "
    "well; enough, and as much as others, is within 1 point; faithful is within 2 points of before. 'Any label' is at "
    f"least 90 % of labels drawn at random. Learning rates: {RATE_RULE}."
)


def versus_row(
    kind: str, ours: str, theirs: str, measure: str = ACCURACY, part: str = "all", margin: float = 0.0, *,
    decides: bool = True, lower_is_better: bool = False,
) -> Test:  # fmt: skip
    """One row against another on the same images."""

    def find(evidence: Evidence) -> Measured:
        figures, gain, seeds = versus(evidence, kind, (ours, measure), (theirs, measure), part)
        if lower_is_better:
            gain = Estimate(-gain.value, -gain.high, -gain.low, gain.n, gain.how, difference=True)
        return Measured(figures, gain, seeds)

    pair = (theirs, ours) if lower_is_better else (ours, theirs)
    limit = f" > {100 * margin:+g} points" if margin else ""
    words = f"{kind}{f', {part}' * (part != 'all')}, {measure}: {pair[0]} − {pair[1]}{limit}"
    return Test(words, find, margin, decides, ((kind, ours), (kind, theirs)))


def beyond_chance(kind: str, row: str, direction: str, *, decides: bool = True) -> Test:
    """The map of a row is more faithful than a random one, in one direction."""

    def find(evidence: Evidence) -> Measured:
        sides = [(row, f"{direction} {name}") for name in ("gae", "random")]
        return Measured(*versus(evidence, kind, *(sides[::-1] if direction == "positive" else sides)))

    words = f"{kind}, {row}: {direction} curve of GAE better than the random map's"
    return Test(words, find, decides=decides, rows=((kind, row),))


def gains_as_much(
    kind: str, ours: str, theirs: str, part: str, margin: float = -ENOUGH, *, decides: bool = True
) -> Test:
    """Classes without masks gain as much as those with masks: other images, so drawn apart."""

    def find(evidence: Evidence) -> Measured:
        gains, sides = {}, ((ours, ACCURACY), (theirs, ACCURACY))
        for word in ("not learnt", "learnt"):
            _, gains[f"gain, {word}"], seeds = versus(evidence, kind, *sides, f"{part}, {word}")
        new, old = gains.values()
        return Measured(gains, apart(new, old, new.n + old.n, "from the intervals of both gains"), seeds)

    said = f"{kind}, {part}, gain of {ours} over {theirs}: classes not learnt from − learnt from"
    return Test(f"{said} > {100 * margin:+g} points", find, margin, decides, ((kind, ours), (kind, theirs)))


def reaches(kind: str, row: str, least: float, *, decides: bool = True) -> Test:
    """How often sufficient pixels exist for a label drawn at random."""

    def find(evidence: Evidence) -> Measured:
        folder = next(iter(evidence.folders(kind, row).values()))
        path = folder / "stress" / "test.json"
        known = read_json(path).get("subsets") if path.exists() else None
        if known is None:
            raise Missing(f"not measured: `sightline stress {folder.name} --tests subsets`")
        reached = Estimate(**known["reached"])
        ends = [end - least for end in (reached.value, reached.low, reached.high)]
        sizes = {name: Estimate(**known[name]) for name in ("size", "own_size") if known[name]}
        labels, n = known["labels"], known["n"]
        note = f"at {100 * known['confidence']:g} % confidence, {labels} labels for each of {n} images"
        over = Estimate(*ends, reached.n, reached.how, difference=True)
        return Measured({"reached": reached} | sizes, over, note=note)

    words = f"{kind}, {row}: sufficient pixels for a random label found in more than {100 * least:g} %"
    return Test(words, find, decides=decides, rows=((kind, row),))


# ---- the claims ------------------------------------------------------------------------------------------------------

Tests = tuple[Test, ...]
OURS, START = "RobustViT", "ERM"
BIRDS3, CUB_ALL = "RobustViT, 3 masks", "RobustViT, 10 masks"


def raises_under_shift() -> Tests:
    gains = [
        versus_row("birds", BIRDS3, START, WORST), versus_row("birds", BIRDS3, START, part="shifted"),
        versus_row("cub", OURS, START, part="shifted"),
    ]  # fmt: skip
    costs = [versus_row(k, row, START, part="usual", margin=-SMALL) for k, row in (("birds", BIRDS3), ("cub", OURS))]
    counts = [versus_row("birds", row, START, WORST, decides=False) for row in (OURS, "RobustViT, 300 masks")]
    moved = [versus_row("si", OURS, START, part=p, decides=False) for p in ("usual", "location", "rotation", "size")]
    inside = [versus_row(k, OURS, START, "mass gae", decides=False) for k in ("birds", "cub", "si")]
    return (
        *gains,
        *costs,
        *counts,
        *moved,
        *inside,
        versus_row("imagenet", OURS, "before", margin=-0.03, decides=False),
    )


def rows_beaten(names: Sequence[str], *, beside: Sequence[str] = ()) -> Tests:
    """Under shift, on both datasets."""
    return tuple(
        versus_row(kind, OURS, name, part="shifted", decides=name in names)
        for kind in ("birds", "cub")
        for name in (*names, *beside)
    )


def stay_faithful() -> Tests:
    tests: list[Test] = []
    for kind, start in (("birds", START), ("cub", START), ("imagenet", "before")):
        decides = kind != "imagenet"
        for direction in ("positive", "negative"):
            tests.append(
                versus_row(
                    kind, OURS, start, f"{direction} gae", margin=-FAITHFUL, decides=decides,
                    lower_is_better=direction == "positive",
                )
            )  # fmt: skip
            tests += [beyond_chance(kind, row, direction, decides=decides and row == OURS) for row in (OURS, start)]
    of_vit_s = [(row, direction) for row in ("ERM, S", "RobustViT, S") for direction in ("positive", "negative")]
    return (*tests, *(beyond_chance("birds", row, direction, decides=False) for row, direction in of_vit_s))


TESTS: dict[str, Tests] = {
    "R1": raises_under_shift(),
    "R2": rows_beaten(("RobustViT, rollout", "RobustViT, attention"), beside=("RobustViT, second order",)),
    "R3": rows_beaten(
        tuple(
            f"RobustViT, {how}" for how in ("no background", "no foreground", "only background", "only foreground")
        ),
        beside=("RobustViT, no classification loss",),
    ),
    "R4": (
        *rows_beaten(("RobustViT, label",)),
        versus_row("imagenet", OURS, "RobustViT, label", decides=False),
    ),
    "R5": (
        *rows_beaten(("RRR", "GradMask"), beside=("MaskTune",)),
        *(
            versus_row(kind, row, START, part="shifted", decides=False)
            for kind in ("birds", "cub")
            for row in ("RRR", "GradMask", "MaskTune")
        ),
    ),
    "R6": (
        gains_as_much("cub", OURS, START, "shifted"),
        gains_as_much("cub", OURS, START, "all", decides=False),
        *(versus_row("cub", OURS, START, part=f"shifted, {word}", decides=False) for word in ("not learnt", "learnt")),
    ),
    "R7": (
        *(
            versus_row("cub", OURS, row, part="shifted", margin=-ENOUGH)
            for row in ("RobustViT, 3 masks", "RobustViT, 10 masks of 100 classes", CUB_ALL)
        ),
        *(
            versus_row("cub", OURS, row, part="shifted", decides=False)
            for row in ("RobustViT, 1 masks of 100 classes", "RobustViT, 3 masks of 50 classes")
        ),
        *(
            versus_row("birds", BIRDS3, row, WORST, margin=-ENOUGH, decides=False)
            for row in (OURS, "RobustViT, 300 masks")
        ),
    ),
    "R8": stay_faithful(),
    "R9": (
        versus_row("cub", OURS, START, "10 neighbours", "not learnt"),
        versus_row("cub", OURS, START, "1 neighbours", "not learnt", decides=False),
        versus_row("cub", OURS, START, "10 neighbours", "shifted, not learnt", decides=False),
        versus_row("birds", OURS, START, "10 neighbours", decides=False),
    ),
    "R10": (reaches("imagenet", "before", SURE), reaches("imagenet", "before", 0.5, decides=False)),
    "R11": (
        *(
            versus_row(kind, "RobustViT, TokenCut", OURS, part="shifted", margin=-SMALL)
            for kind in ("birds", "cub")
        ),
        *(versus_row(kind, "RobustViT, TokenCut", START, part="shifted", decides=False) for kind in ("birds", "cub")),
        versus_row("imagenet", OURS, "before", decides=False),
    ),
    "R12": (
        versus_row("birds", "RobustViT, S", "ERM, S", WORST),
        versus_row("birds", "RobustViT, S", "ERM, S", part="shifted"),
        versus_row("cub", "RobustViT, S", "ERM, S", part="shifted"),
        *(
            versus_row(kind, "RobustViT, S", "ERM, S", part="usual", margin=-SMALL, decides=False)
            for kind in ("birds", "cub")
        ),
    ),
}  # fmt: skip
CLAIMS = [claim(id, *tests) for id, tests in TESTS.items()]


def claims_of_study(evidence: Evidence) -> ClaimsOfStudy:  # noqa: ARG001 (as of every study)
    return ClaimsOfStudy(CLAIMS, THIS_RULE)
