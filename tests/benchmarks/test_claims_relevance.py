"""Claims about RobustViT: verdicts on made-up predictions."""

import csv
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from claims_relevance import CLAIMS, beyond_chance, gains_as_much, reaches, versus_row
from contrasts import versus
from evidence import Evidence, Missing
from rows import folder_of
from rows.relevance import SETS, selected_rows, starting_rows
from verdicts import FAILS, HOLDS, UNDECIDED, decide


def test_what_is_claimed_is_run():
    """Ablations that are too costly for both datasets are run on one, and never decide on the other."""
    known = {(kind, row.name) for kind in SETS for row in (*starting_rows(kind), *selected_rows(kind))}
    for claim in CLAIMS:
        for test in claim.tests:
            beside = {kind for kind, _ in test.rows} == {"cub"} and not test.decides
            assert beside or set(test.rows) <= known, (claim.id, test.name)


# ---- verdicts, on predictions that are made up -----------------------------------------------------------------------

SPECIES, EACH = ("a", "b", "c", "d"), 60


def add(
    runs: Path, kind: str, row: str, mistakes: dict[str, int], column: dict[str, float] | None = None, seed: int = 0
) -> None:
    """Of 60 swapped images of each of four classes so many are wrong; and a column of what was measured."""
    folder = folder_of(runs / kind, row, seed)
    (folder / "predictions").mkdir(parents=True)
    (folder / "stress").mkdir()
    facts = {"data": {"group_names": []}, "learnt_from": {"classes": ["a", "b"] if seed != 1 else ["b", "c"]}}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "metrics.json").write_text("{}")
    images = [(f"{label}{i}.png", label, i) for label in SPECIES for i in range(EACH)]
    lines = [[image, label, "x" if i < mistakes[label] else label, f"{label}/swapped"] for image, label, i in images]
    tables = {"predictions": [["image", "label", "predicted", "group"], *lines]}
    tables["stress"] = [["image", *(column or {})], *([image, *(column or {}).values()] for image, _, _ in images)]
    for name, table in tables.items():
        with (folder / name / "test.csv").open("w", newline="") as file:
            csv.writer(file).writerows(table)


def same(count: int) -> dict[str, int]:
    return dict.fromkeys(SPECIES, count)


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(5, 25, HOLDS), (25, 5, FAILS), (10, 10, UNDECIDED)])
def test_a_row_beats_another_under_shift(tmp_path, ours, theirs, expected):
    add(tmp_path, "cub", "RobustViT", same(ours))
    add(tmp_path, "cub", "ERM", same(theirs))
    found = versus_row("cub", "RobustViT", "ERM", part="shifted").find(Evidence(tmp_path))
    assert found.verdict == expected
    assert found.difference.value == pytest.approx((theirs - ours) / EACH)


def test_only_seeds_that_both_have_are_compared(tmp_path):
    add(tmp_path, "cub", "RobustViT", same(5))
    add(tmp_path, "cub", "RobustViT", same(5), seed=2)
    for seed, mistakes in enumerate((25, 0, 15)):
        add(tmp_path, "cub", "ERM", same(mistakes), seed=seed)
    test, evidence = versus_row("cub", "RobustViT", "ERM", part="shifted"), Evidence(tmp_path)
    found = test.find(evidence)
    assert found.difference.value == pytest.approx(15 / EACH)  # the mean of 20 and 10
    assert found.figures["ERM"].value == pytest.approx(1 - 20 / EACH)
    assert found.seeds == {"RobustViT": 2, "ERM": 2}
    add(tmp_path, "cub", "RobustViT, label", same(5), seed=1)
    with pytest.raises(Missing, match="no seed in common"):
        versus_row("cub", "RobustViT", "RobustViT, label").find(evidence)


def test_weights_as_they_were_stand_beside_every_seed(tmp_path):
    add(tmp_path, "imagenet", "before", same(20))
    for seed, mistakes in enumerate((10, 0)):
        add(tmp_path, "imagenet", "RobustViT", same(mistakes), seed=seed)
    found = versus_row("imagenet", "RobustViT", "before").find(Evidence(tmp_path))
    assert found.difference.value == pytest.approx(15 / EACH)
    assert found.seeds == {"RobustViT": 2, "before": 1}
    assert "seeds" not in found.figures["before"].how


def test_the_classes_that_were_learnt_from_are_those_of_the_seed_that_both_have(tmp_path):
    add(tmp_path, "cub", "RobustViT", same(2), seed=1)
    for seed, mistakes in enumerate((50, 30)):
        add(tmp_path, "cub", "ERM", same(mistakes), seed=seed)
    found = gains_as_much("cub", "RobustViT", "ERM", "shifted", margin=-0.2).find(Evidence(tmp_path))
    assert found.verdict == HOLDS
    assert [one.value for one in found.figures.values()] == [pytest.approx(28 / EACH)] * 2


def test_classes_that_were_not_learnt_from_gain_as_much_or_do_not(tmp_path):
    add(tmp_path / "yes", "cub", "RobustViT", same(2))
    add(tmp_path / "no", "cub", "RobustViT", {"a": 2, "b": 2, "c": 30, "d": 30})
    for place in ("yes", "no"):
        add(tmp_path / place, "cub", "ERM", same(30))
    test = gains_as_much("cub", "RobustViT", "ERM", "shifted", margin=-0.2)
    assert test.find(Evidence(tmp_path / "yes")).verdict == HOLDS
    found = test.find(Evidence(tmp_path / "no"))
    assert found.verdict == FAILS
    assert found.figures["gain, not learnt"].value == 0


def test_every_seed_has_classes_of_its_own_that_it_did_not_learn_from(tmp_path):
    """Seed 0 learnt from a and b, seed 1 from b and c."""
    for seed in (0, 1):
        add(tmp_path, "cub", "ERM", same(30), seed=seed)
    add(tmp_path, "cub", "RobustViT", {"a": 0, "b": 0, "c": 20, "d": 20})
    add(tmp_path, "cub", "RobustViT", {"a": 10, "b": 0, "c": 0, "d": 10}, seed=1)
    _, gained, seeds = versus(
        Evidence(tmp_path), "cub", ("RobustViT", "accuracy"), ("ERM", "accuracy"), "shifted, not learnt"
    )
    assert gained.value == pytest.approx((10 + 20) / 2 / EACH)
    assert gained.low < 12 / EACH < 18 / EACH < gained.high
    assert (gained.n, seeds) == (3 * EACH, {"RobustViT": 2, "ERM": 2})


def test_a_map_that_turns_worse_than_before_or_than_chance_is_not_faithful(tmp_path):
    good = {"positive gae": 0.2, "negative gae": 0.8, "positive random": 0.5, "negative random": 0.5}
    add(tmp_path, "cub", "ERM", same(5), good)
    add(tmp_path, "cub", "RobustViT", same(5), good | {"positive gae": 0.6})
    evidence = Evidence(tmp_path)
    positive = versus_row("cub", "RobustViT", "ERM", "positive gae", margin=-0.02, lower_is_better=True)
    assert positive.find(evidence).verdict == FAILS
    assert versus_row("cub", "RobustViT", "ERM", "negative gae", margin=-0.02).find(evidence).verdict == HOLDS
    verdicts = {way: beyond_chance("cub", "RobustViT", way).find(evidence).verdict for way in ("positive", "negative")}
    assert verdicts == {"positive": FAILS, "negative": HOLDS}


def test_any_label_is_reached_or_not(tmp_path):
    add(tmp_path, "imagenet", "before", same(5))
    path = folder_of(tmp_path / "imagenet", "before", 0) / "stress" / "test.json"
    ends = {"value": 0.97, "low": 0.93, "high": 0.99, "n": 32, "how": ""}
    reported = {"reached": ends, "size": None, "own_size": None, "confidence": 0.9, "labels": 3, "n": 32}
    path.write_text(json.dumps({"subsets": reported}))
    evidence = Evidence(tmp_path)
    assert reaches("imagenet", "before", 0.9).find(evidence).verdict == HOLDS
    assert reaches("imagenet", "before", 0.95).find(evidence).verdict == UNDECIDED
    (claim,) = (claim for claim in CLAIMS if claim.id == "R10")
    assert decide(claim, evidence)[0] == HOLDS
