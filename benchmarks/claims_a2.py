"""Claims about A² and about pairings: A1 to A15 and B2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from claim_texts import claim
from contrasts_a2 import Column, Weighted, column_difference, difference_of_gains, weighted_contrast
from evidence import Evidence, Missing, apart, benchmark_rows, facts_of, read_json
from rows.a2 import COUNTS, FAMILY_SIZES, MASSES, PLAIN_LOOK, Family
from selection import knn, matched_states
from sightline.metrics.estimates import Estimate
from verdicts import HOLDS, RULE, UNDECIDED, Claim, ClaimsOfStudy, Measured, Test, verdict

PHOTOGRAPHS = ("birds", "o2o", "m2m", "disjoint")
THIS_RULE = RULE + (
    "'Does not matter' holds when the interval lies inside the margin on both sides, and fails when it lies outside. "
    "Logistic regression has no seeds: intervals are over images, of one pretrained backbone each. 'A2 X>Y' is "
    "attention of X, embeddings of Y; the block and heads of X were selected by validation accuracy, unless the row "
    "names them. The self-supervised backbone decides, but for A7 and A12 (the backbone of iFAM embeds) and A10 "
    "(each). Whether something localises at all, more than a uniform map, holds or is undecided: where it does not, "
    "comparing where sizes attend decides nothing."
)

# ---- tests -----------------------------------------------------------------------------------------------------------


def less(ours: str, theirs: str, part: str = "all") -> tuple[Weighted, Weighted]:
    return (1.0, ours, part), (-1.0, theirs, part)


def limit(margin: float) -> str:
    return f" > {100 * margin:+g} points" if margin else ""


def contrast(
    kind: str, terms: tuple[Weighted, ...], measure: str = "worst group", margin: float = 0.0, *,
    within: bool = False, decides: bool = True,
) -> Test:  # fmt: skip
    """A weighted sum of rows on the same images."""

    def find(evidence: Evidence) -> Measured:
        figures, difference = weighted_contrast(evidence, kind, terms, measure)
        seeds = evidence.seeds(kind, *(row for _, row, _ in terms))
        note = ", ".join(f"{row}: {count} seeds" for row, count in seeds.items() if count > 1)
        return Measured(figures, difference, note=note)

    signs = {1.0: "+", -1.0: "−"}
    said = " ".join(f"{signs[sign]} {row}{f' ({part})' * (part != 'all')}" for sign, row, part in terms)
    end = f" within ±{100 * margin:g} points" if within else limit(margin)
    words = f"{kind}, {measure}: {said.removeprefix('+ ')}{end}"
    return Test(words, find, margin, decides, tuple((kind, row) for _, row, _ in terms), within)


def attention_test(
    kind: str, ours: Column, theirs: Column | None = None, margin: float = 0.0, *, decides: bool = True, note: str = ""
) -> Test:
    """What is measured of each image, of two backbones; or of one, against zero."""

    def find(evidence: Evidence) -> Measured:
        try:
            return Measured(*column_difference(evidence, kind, ours, theirs), note=note)
        except Missing as missing:
            raise Missing(f"{missing}{f'; {note}' * bool(note)}") from None

    words = f"{kind}: {ours.words}{f' − {theirs.words}' if theirs else ''}{limit(margin)}"
    return Test(words, find, margin, decides)


def gains_more(kinds: tuple[str, str], ours: str, theirs: str, *, decides: bool = True) -> Test:
    """A row gains more accuracy over another on one dataset than on another dataset."""

    def find(evidence: Evidence) -> Measured:
        return Measured(*difference_of_gains(evidence, kinds, less(ours, theirs), "accuracy"))

    words = f"accuracy, gain of {ours} over {theirs}: {kinds[0]} − {kinds[1]}"
    return Test(words, find, decides=decides, rows=tuple((kind, row) for kind in kinds for row in (ours, theirs)))


def content_of(file: Path | None, lacking: str) -> dict[str, Any]:
    if file is None or not file.exists():
        raise Missing(lacking)
    return read_json(file)


def duel(file: Path | None) -> Test:
    """The best new pairing of a matrix against its best published one, both selected on validation data."""
    words = "worst group: best new pairing − best published one, neither with true masks"
    name = f"{read_json(file)['data']}, {words}" if file is not None and file.exists() else words

    def find(evidence: Evidence) -> Measured:  # noqa: ARG001 (as of every test)
        content = content_of(
            file, "no matrix was given: `sightline matrix DATA --where … --what …`, then --matrix FILE"
        )
        duels = content["best_new_against_best_published"]
        if not duels:
            raise Missing(f"{content['data']}: nothing new, or nothing published, to compare")
        last = duels[-1]  # without given masks, where some have them
        gain = Estimate(**{key: value for key, value in last["gain"].items() if key != "verdict"})
        sides = [last[key] for key in ("new", "published")]
        figures = {f"{one['where']} × {one['what']}": Estimate(**one["test"]) for one in sides}
        return Measured(figures, gain, note=last["rule"])

    return Test(name, find)


OF_INTERVALS = "from two intervals, as of different images"


def supervised_masses(evidence: Evidence) -> tuple[dict[str, Estimate], dict[str, Any]]:
    """The attention mass on the object, of sizes trained with labels; and the whole file."""
    lacking = "no family was given: `pretrain.py family --out FILE`, then --pretrained FILE"
    content = content_of(evidence.pretrained, lacking)
    return {one["size"]: estimated(one["supervised"]["mass"]) for one in content["family"]}, content


def estimated(known: dict[str, Any]) -> Estimate:
    return Estimate(known["value"], *known["interval"], known["n"], "bootstrap over images")


def supervised(ours: str, theirs: str, margin: float = 0.0) -> Test:
    """The attention mass on the object, of two sizes trained with labels."""

    def find(evidence: Evidence) -> Measured:
        family, _ = supervised_masses(evidence)
        if missing := {ours, theirs} - family.keys():
            raise Missing(f"nobody has measured where supervised {sorted(missing)[0]} looks")
        figures = {size: family[size] for size in (ours, theirs)}
        return Measured(figures, apart(*figures.values(), family[ours].n, OF_INTERVALS), note=OF_INTERVALS)

    return Test(f"family: mass of supervised {ours} − mass of supervised {theirs}{limit(margin)}", find, margin)


def localises(size: str) -> Test:
    """Whether a size trained with labels attends to the object at all. It holds or is undecided: where none does, there
    is nothing to compare and nothing refuted."""

    def find(evidence: Evidence) -> Measured:
        family, content = supervised_masses(evidence)
        if size not in family or "mass_of_even" not in content:
            raise Missing(f"nobody has measured where supervised {size} looks, or what an even map has")
        figures = {size: family[size], "even": estimated(content["mass_of_even"])}
        above = apart(*figures.values(), family[size].n, OF_INTERVALS)
        found = HOLDS if verdict(above) == HOLDS else UNDECIDED
        lost = "; it does not localise, so sizes cannot be compared by where they look" * (found != HOLDS)
        return Measured(figures, above, note=OF_INTERVALS + lost, verdict=found)

    return Test(f"family: mass of supervised {size} − mass of a map that is the same everywhere", find)


# ---- the claims ------------------------------------------------------------------------------------------------------


Tests = tuple[Test, ...]


def looking(evidence: Evidence) -> dict[str, Tests]:
    """A1, A2, A13: of the family."""
    runs = evidence.runs / "family"
    sizes = [size for size in FAMILY_SIZES if (runs / f"attention-{size}-0").exists()] or ["nano", "ti", "s"]
    small, *larger = sizes
    states, steps = states_to_match(runs, sizes), "after equally many steps"
    equal = [
        attention_test("family", Column(a, figure), Column(b, figure), decides=figure == "mass", note=steps)
        for figure in ("mass", "hit")
        for a, b in pairwise(sizes)
    ]
    alike = [
        attention_test("family", Column(small, figure), Column(state, figure), decides=figure == "mass", note=note)
        for figure in ("mass", "hit")
        for state, note in states
    ]
    localising = [localises(size) for size in sizes]
    supervising = [supervised(size, small, margin=-0.01) for size in larger]
    takeover = [
        test
        for state, note in (*((size, steps) for size in larger), *states)
        for test in (
            attention_test(
                "family", *(Column(one, "registers", less="two thirds") for one in (state, small)), note=note
            ),
            attention_test("family", *(Column(one, "mass", less="best") for one in (small, state)), note=note),
        )
    ]
    return {"A1": (*equal, *alike), "A2": (*localising, *supervising), "A13": tuple(takeover)}


def states_to_match(runs: Path, sizes: Sequence[str]) -> list[tuple[str, str]]:
    """Of each larger size, the checkpoint with the k-NN accuracy of the smallest size at the end, and a note."""
    kept = [
        (size, int(found[1]), "")
        for size in sizes
        for path in sorted(runs.glob(f"attention-{size}-*"))
        if (found := re.fullmatch(rf"attention-{size}-(\d+)-0", path.name))
    ]
    states = matched_states(runs, Family([(size, "") for size in sizes], kept))
    found = []
    for size in sizes[1:]:
        known = {one: knn(runs, one) for one in (sizes[0], states.get(size, size))}
        right = ", ".join(f"{one} {100 * share:.1f} %" for one, share in known.items() if share is not None)
        words = f"when the neighbours of {size} were as good as those of {sizes[0]} in the end"
        if size not in states:
            words = f"only the last state of {size} was measured, none to match"
        found.append((states.get(size, f"{size}@matched"), f"{words} (right by neighbours: {right})" * bool(right)))
    return found


def of_one_backbone(head: str) -> Tests:
    """A13, beside: whether registers take over in the last third, and whether attention is best in the last block."""
    return (
        attention_test("birds", Column(head, "registers", less="two thirds"), decides=False),
        attention_test(
            "birds", Column(head, "mass", less="best"), decides=False, note="below 0: the last block is not the best"
        ),
    )


def pairs_of_sizes(evidence: Evidence, head: str, names: Sequence[str]) -> Tests:
    """A4: attention of smaller ones, embeddings of the largest."""
    sizes = [size for size in FAMILY_SIZES if size in evidence.backbones("toy")] or ["nano", "ti", "s"]
    large, plain = sizes[-1], PLAIN_LOOK.words
    tests = [contrast("toy", less(f"A2 {size}>{large}", f"A2 {large}>{large}")) for size in sizes[:-1]]
    tests += [
        contrast("toy", less(f"A2 {size}>{large}, {plain}", f"A2 {large}>{large}, {plain}"), decides=False)
        for size in sizes[:-1]
    ]
    tests.append(contrast("toy", less(f"A2 {sizes[0]}>{large}, {plain}", f"A2 {large}-matched>{large}, {plain}")))
    others = [name for name in names if name != head]
    return (
        *tests,
        *(contrast("birds", less(f"A2 {one}>{head}", f"A2 {head}>{head}"), decides=False) for one in others),
    )


BOTH = ("worst group", "accuracy")


def crops_against_the_whole(head: str, names: Sequence[str]) -> dict[str, Tests]:
    """A3, and A14: whether that margin is smaller when both are tuned, on every set of photographs."""
    fits, rivals = (", plain", ""), ("full at twice the size", "random", "S2")
    gains = [contrast("birds", less(f"A2 {w}>{w}{f}", f"full, {w}{f}"), decides=w == head) for w in names for f in fits]
    beside = [contrast("birds", less(f"A2 {w}>{w}", f"{r}, {w}"), decides=False) for w in names for r in rivals]
    margins = [
        contrast(
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
        contrast("o2o", less(f"A2 {head}>{w}, DFR train", rival), m, decides=w == head and m == "worst group")
        for w in names
        for m in BOTH
        for rival in (f"DFR train, {w}", f"A2 {head}>{w}")
    ]
    return {"A5": tuple(tests)}


def off_centre(head: str, names: Sequence[str], same: str) -> dict[str, Tests]:
    """A6, A7; `same` is the backbone that iFAM has, too."""
    far = ("farthest 10 %", "displaced")
    tests = [
        contrast(
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
    return {"A6": tuple(tests), "A7": tuple(contrast("birds", drops, m, decides=m == "accuracy") for m in BOTH)}


def how_to_look(head: str, names: Sequence[str]) -> dict[str, Tests]:
    """A8: fewer crops, the more so the more the scene says; A9: other ways to join heads; A10: true masks, moved."""
    cues = ("o2o", "disjoint"), ("o2o", "m2m"), ("m2m", "disjoint")  # the stronger first
    fewer: list[Test] = [
        gains_more(kinds, f"A2 {head}>{w}", f"A2 {head}>{w}, {COUNTS[-1]} crops", decides=(w, kinds) == (head, cues[0]))
        for w in names
        for kinds in cues
    ]
    fewer += [
        contrast(kind, less(f"A2 {head}>{w}", f"A2 {head}>{w}, {count} crops"), m, decides=False)
        for kind in PHOTOGRAPHS
        for w in names
        for m in BOTH
        for count in COUNTS
    ]
    mean = {w: f"A2 {w}>{w}, {PLAIN_LOOK.words}" for w in names}
    joined = [
        contrast(
            "birds", less(mean[w], f"A2 {w}>{w}, block -1, {how}"), "accuracy", 0.02, within=True, decides=w == head
        )
        for w in names
        for how in ("entropy", "lowest", "max")
    ]
    sharper = [
        contrast("birds", less(mean[w], f"A2 {w}>{w}, block -1, lowest"), "accuracy", -0.01, decides=w == head)
        for w in names
    ]
    worse = [
        contrast("birds", less(f"oracle {a:g}, {w}", f"oracle {b:g}, {w}"), m, decides=(a, b) == (0.8, 0.4))
        for w in names
        for m in BOTH
        for a, b in ((0.8, 0.4), *pairwise(MASSES))
    ]
    return {"A8": tuple(fewer), "A9": (*joined, *sharper), "A10": tuple(worse)}


def adapted(head: str) -> dict[str, Tests]:
    tests = [
        contrast(
            "turned",
            less(f"adapter {head}, {look}", f"adapter {head}, {look}, untrained"),
            m,
            decides=(look, m) == ("plain rule", "worst group"),
        )
        for look in ("plain rule", "look at birds")
        for m in BOTH
    ]
    return {"A11": (*tests, contrast("turned", less(f"adapter {head}, plain rule", f"full, {head}"), decides=False))}


def against_ifam(head: str, same: str, same_disjoint: str) -> dict[str, Tests]:
    pairs = {"birds": ("iFAM", f"A2 {head}>{same}"), "disjoint": (f"A2 {head}>{same_disjoint}", "iFAM")}
    tests = [contrast(k, less(*pair), m, decides=m == "worst group") for k, pair in pairs.items() for m in BOTH]
    return {"A12": tuple(tests)}


def all_claims(evidence: Evidence) -> list[Claim]:
    names = evidence.backbones("birds") or ["S"]
    rows = benchmark_rows(evidence.runs / "birds")
    counted = [re.match(r"A2 (.+)>", name) for name in rows if name.endswith(" 2 crops")]
    head = counted[0][1] if counted and counted[0] else names[0]
    names = [head, *(name for name in names if name != head)]
    tests = looking(evidence) | {"A4": pairs_of_sizes(evidence, head, names)}
    same, same_disjoint = (same_backbone_as_ifam(evidence, kind) or head for kind in ("birds", "disjoint"))
    tests |= crops_against_the_whole(head, names) | with_dfr(head, names) | off_centre(head, names, same)
    tests |= how_to_look(head, names) | adapted(head) | against_ifam(head, same, same_disjoint)
    tests["A13"] += of_one_backbone(head)
    tests["B2"] = tuple(duel(file) for file in evidence.matrix) or (duel(None),)
    return [claim(id, *tests.get(id, ())) for id in (*(f"A{number}" for number in range(1, 16)), "B2")]


def same_backbone_as_ifam(evidence: Evidence, kind: str) -> str | None:
    """The name here of the backbone that the iFAM runs started from; None where none is the same."""
    try:
        file = backbone_file(evidence, kind, "iFAM")
        return next(
            (name for name in evidence.backbones(kind) if backbone_file(evidence, kind, f"full, {name}") == file), None
        )
    except Missing:
        return None


def backbone_file(evidence: Evidence, kind: str, row: str) -> str:
    folder = next(iter(evidence.folders(kind, row).values()))
    return Path((facts_of(folder)["backbone"] or {}).get("file") or "").name


def claims_of_study(evidence: Evidence) -> ClaimsOfStudy:
    return ClaimsOfStudy(all_claims(evidence), THIS_RULE)
