"""Claims about early masking, iFAM and pixel-exact sight: F1 to F7, B1 and B3. The others are listed as not run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from claim_texts import TEXTS, claim
from contrasts import balanced_gain, grid_iou, worst_group
from evidence import Evidence, Missing, about, facts_of, predictions_in, read_json
from measure import certify
from rows.waterbirds import CONTROLS, OTHER_FILLS, ROWS, SELECTED_BY_A_NET, TRUE, TRUE_PIXELS
from sightline.config import Shape
from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import evaluate_seeds
from sightline.metrics.predictions import Predictions
from verdicts import FAILS, HOLDS, RULE, UNDECIDED, Claim, ClaimsOfStudy, Measured, Test

SET = "birds"
OF_V1 = ("B4", "B5")  # decided on Waterbirds v1.0 alone
THIS_RULE = RULE + (
    "The margin is 0; for 'within 1 point' it is −1 point (non-inferiority: being better does not count against it). "
    "With a single seed the interval is over images only. ERM and the rows with given masks have recipes of their own "
    "(epochs, learning rate, head), listed as `recipes`: F4 to F6 compare methods with their recipes, not methods "
    "alone. In F4 and F5 the baseline with the epochs and learning rate of iFAM decides, too."
)

# ---- tests -----------------------------------------------------------------------------------------------------------


def on_birds(*rows: str) -> tuple[tuple[str, str], ...]:
    return tuple((SET, row) for row in rows)


def beats(ours: str, theirs: str, measure: str = "worst group", margin: float = 0.0, *, decides: bool = True) -> Test:
    """One row against another on the same images."""

    def find(evidence: Evidence) -> Measured:
        figures, difference = MEASURES[measure](evidence, SET, ours, theirs)
        return Measured(figures, difference, evidence.seeds(SET, ours, theirs))

    words = f"{measure}: {ours} − {theirs}" + (f" > {100 * margin:+.0f} points" if margin else "")
    return Test(words, find, margin, decides, on_birds(ours, theirs))


def tells_label(row: str, *, decides: bool = True) -> Test:
    """The label predicted from the mask shape of a row, against chance."""

    def find(evidence: Evidence) -> Measured:
        predictions = shape_predictions(evidence, row)
        metrics = evaluate_seeds(predictions)
        found, chance = metrics.balanced, 1 / len(metrics.classes)
        how = f"{found.how}; chance is {100 * chance:.1f} %"
        over = Estimate(found.value - chance, found.low - chance, found.high - chance, found.n, how, difference=True)
        return Measured({row: found}, over, {row: len(predictions)})

    return Test(f"label from shape: {row} − chance", find, decides=decides, rows=on_birds(row))


def certified(expected: str, rows: Sequence[str], *, decides: bool = True) -> Test:
    """The certificates of all of these rows that were trained, on images of their own data."""

    def find(evidence: Evidence) -> Measured:
        figures = certificates(evidence, rows)
        found = judged([(one, one["verdict"] == expected) for one in figures.values() if one["verdict"]], figures)
        lacking = [name for name, one in figures.items() if not one["verdict"]]
        note = f"{found.note}; not certified: {', '.join(lacking)}" if lacking else found.note
        return Measured(figures, verdict=found.verdict, note=note)

    return Test(f"verify says {expected!r} of trained runs", find, decides=decides, rows=on_birds(*rows))


def proved() -> Test:
    """The same on backbones, by `proof.py`: early masking is blind, late leaks, soft is refused."""

    def find(evidence: Evidence) -> Measured:
        if not evidence.proof.exists():
            raise Missing(f"{evidence.proof.name}: make it with `python benchmarks/proof.py`")
        cases = read_json(evidence.proof)["rows"]
        shown = ("verdict", "images", "trials", "changed", "largest_change")
        names = [" ".join(one[key] for key in ("weights", "dtype", "masking")) for one in cases]
        figures = {name: {key: one[key] for key in shown} for name, one in zip(names, cases, strict=True)}
        return judged([(one, one["as_claimed"]) for one in cases], figures)

    return Test("verify of early, late and soft masking, on backbones", find)


def judged(cases: Sequence[tuple[dict[str, Any], bool]], figures: Mapping[str, Any]) -> Measured:
    """No interval: one changed bit is enough. A certificate that was refused proves nothing either way."""
    wrong = [one["verdict"] for one, as_claimed in cases if not as_claimed]
    found = HOLDS if not wrong else UNDECIDED if set(wrong) == {"refused"} else FAILS
    trials, changed = (sum(one[key] for one, _ in cases) for key in ("trials", "changed"))
    note = f"{len(cases) - len(wrong)} of {len(cases)} as claimed; "
    note += f"of {trials:,} redraws {changed:,} changed the prediction"
    return Measured(figures, note=note, verdict=found)


# ---- measurements that are made where they are missing ---------------------------------------------------------------


def measured(evidence: Evidence, folder: Path, file: str, command: str, measure: Callable[[], object]) -> Path:
    """The file; if it is not there, it is measured, if the run's weights and data are."""
    path = folder / file
    if path.exists():
        return path
    missing = Missing(f"not measured: `{command} {folder.name}`")
    if evidence.read_only:
        raise missing
    try:
        measure()
    except UserError as error:
        print(error, file=sys.stderr)  # not in the results: it may name folders of this machine
        raise missing from error
    return path


def shape_predictions(evidence: Evidence, row: str) -> list[Predictions]:
    """Of the probes that see the mask shape alone, of the seeds that have one."""
    from sightline.explain.shape import shape_run

    found, lost, split = [], None, evidence.split
    command: Any = {"split": split, "device": evidence.device, "workers": evidence.workers}
    for folder in evidence.folders(SET, row).values():
        file = f"shape/{split}.csv"
        try:
            measured(evidence, folder, file, "sightline shape", lambda run=folder: shape_run(Shape(run, **command)))
        except Missing as error:
            lost = error
        else:
            found.append(predictions_in(folder, file, split))
    if lost is not None and not found:
        raise lost
    return found


def fit_shape_probe(evidence: Evidence, kind: str, ours: str, theirs: str) -> tuple[dict[str, Any], Estimate]:  # noqa: ARG001 (as all MEASURES)
    sides = {row: shape_predictions(evidence, row) for row in (ours, theirs)}
    return {row: evaluate_seeds(block).balanced for row, block in sides.items()}, balanced_gain(*sides.values())


MEASURES = {"worst group": worst_group, "grid IoU": grid_iou, "label from shape": fit_shape_probe}


def certificates(evidence: Evidence, rows: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By run folder, of the rows that were trained; where it is missing, only that it is."""
    found = {}
    for folder in [folder for row in rows for folder in trained(evidence, row)]:
        to = folder / "certificate.json"
        try:
            path = measured(
                evidence, folder, to.name, "sightline verify",
                lambda run=folder, to=to: certify(
                    run, evidence.split, images=evidence.certified, device=evidence.device
                ).save(to),
            )  # fmt: skip
        except Missing as missing:
            found[folder.name] = {"verdict": None, "sentence": str(missing)}
            continue
        content = read_json(path)
        found[folder.name] = {name: content[name] for name in ("verdict", "sentence", "images")} | {
            name: sum(tried[name] for tried in content["tried"]) for name in ("trials", "changed")
        }
    if not any(one["verdict"] for one in found.values()):
        raise Missing(next(iter(found.values()))["sentence"] if found else f"no run of {', '.join(map(repr, rows))}")
    return found


def trained(evidence: Evidence, row: str) -> list[Path]:
    try:
        return list(evidence.folders(SET, row).values())
    except Missing:
        return []


# ---- claims ----------------------------------------------------------------------------------------------------------

IFAM = ("iFAM K=1", "iFAM K=4", "iFAM K=8")
PAPERS = "iFAM K=8"  # the paper's claims are about it: it decides, the others are shown beside it
SALIENCY = ("early mask, FOUND", "early mask, TokenCut", "early mask, U2-Net (supervised)")
NO_GRADIENT, PUBLISHED = ([f"{row}, {how}" for row in IFAM] for how in ("no mask gradient", "published"))
PDISCOFORMER = ("PDiscoFormer K=4", "PDiscoFormer K=8")
DEFAULT = "iFAM K=1, pixels"
FINER = (DEFAULT, "iFAM K=4, pixels")
EARLY = (*IFAM, *NO_GRADIENT, *PUBLISHED, *FINER, TRUE, TRUE_PIXELS, *SALIENCY)
SOFT = "iFAM K=4, soft"


def every_k_beats(*rivals: str, margin: float = 0.0) -> tuple[Test, ...]:
    """With patch masks, as in the papers; our default is shown beside it."""
    rows = (*IFAM, DEFAULT)
    return tuple(beats(row, rival, margin=margin, decides=row == PAPERS) for rival in rivals for row in rows)


TESTED: dict[str, tuple[Test, ...]] = {
    "F1": (
        proved(),
        certified("blind", (*EARLY, *CONTROLS, *OTHER_FILLS, *SELECTED_BY_A_NET)),
        certified("leaks", ("late mask, true", *PDISCOFORMER)),
        certified("refused", (SOFT,), decides=False),
    ),
    "F2": (beats(TRUE, "late mask, true"),),
    "F3": tuple(beats(f"iFAM K={k}", f"PDiscoFormer K={k}") for k in (4, 8)),
    "F4": every_k_beats("ERM", "ERM, 30 epochs", "probe"),
    "F5": (
        *every_k_beats(TRUE, f"{TRUE}, 30 epochs", margin=-0.01),
        *(
            beats(DEFAULT, f"{TRUE_PIXELS}{how}", margin=-0.01, decides=False)
            for how in ("", ", zoom", ", balanced loss")
        ),
    ),
    "F6": every_k_beats(*SALIENCY),
    "F7": tuple(
        beats(row, without, measure)
        for measure in ("worst group", "grid IoU")
        for row, without in zip(IFAM, NO_GRADIENT, strict=True)
    ),
    "B1": (
        *(tells_label(row, decides=row in IFAM) for row in (*EARLY, *PDISCOFORMER)),
        *(beats(row, TRUE, "label from shape", decides=False) for row in (*IFAM, *NO_GRADIENT)),
    ),
    "B3": (
        *(beats(TRUE_PIXELS, patches) for patches in (TRUE, *CONTROLS)),
        *(beats(filled, TRUE) for filled in OTHER_FILLS),
        beats(f"{TRUE_PIXELS}, zoom", f"{TRUE}, zoom", decides=False),
        *(beats(*pair, decides=False) for pair in SELECTED_BY_A_NET.items()),
        *(beats(row, row.removesuffix(", pixels"), decides=False) for row in FINER),
        *(beats(f"iFAM K={k}, plain pixels", f"iFAM K={k}", decides=False) for k in (1, 4, 8)),
    ),
}
CLAIMS: tuple[Claim, ...] = tuple(
    claim(id, *TESTED.get(id, ())) for id in TEXTS if not id.startswith("I") and id not in OF_V1
)


def common_facts(evidence: Evidence) -> dict[str, Any]:
    """The backbone and the data, which must be the same in all runs, or nothing could be compared."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in sorted((evidence.runs / SET).glob("*/run.json")):
        if (path.parent / "predictions").exists():
            facts = about(facts_of(path.parent))
            key = json.dumps([facts["backbone"], facts["data"]["fingerprint"]], sort_keys=True)
            found.setdefault(key, (path, facts))
    if len(found) > 1:
        (one, _), (other, _) = list(found.values())[:2]
        raise UserError(f"{one} and {other}: other data or another backbone, so they cannot be compared")
    return next(iter(found.values()))[1] if found else {}


def claims_of_study(evidence: Evidence) -> ClaimsOfStudy:
    lines = {(SET, row): line for row, line in ROWS.items()}
    facts = {"split": evidence.split} | common_facts(evidence)
    return ClaimsOfStudy(CLAIMS, THIS_RULE, lines, facts, all_tests=True)
