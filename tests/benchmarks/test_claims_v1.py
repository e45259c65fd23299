"""Claims on Waterbirds v1.0: corrected for their number, and never decided by a single seed of a trained row."""

import json
import sys
from pathlib import Path

import numpy as np

from sightline.metrics.groups import evaluate
from sightline.metrics.predictions import Predictions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from claims_v1 import CLAIMS, beats, claims_of_study
from evidence import Evidence
from rows import folder_of
from verdicts import FAILS, HOLDS, NOT_RUN, UNDECIDED, decide, find

GROUPS = ("landbird/land", "landbird/water", "waterbird/land", "waterbird/water")


def finished(runs: Path, row: str, accuracy: float, seeds: tuple[int, ...] = (0,), val: float | None = None) -> None:
    """Runs that are right on that part of every group."""
    for seed in seeds:
        folder = folder_of(runs / "birds", row, seed)
        (folder / "predictions").mkdir(parents=True)
        splits = {}
        for split, share in (("val", accuracy if val is None else val), ("test", accuracy)):
            groups = np.repeat(np.arange(4), 400)
            right = np.tile(np.arange(400) < 400 * share, 4)
            right = np.concatenate([np.random.default_rng([seed, k]).permutation(right[:400]) for k in range(4)])
            labels = groups // 2
            logits = np.where(np.eye(2, dtype=bool)[np.where(right, labels, 1 - labels)], 1.0, 0.0)
            images = [f"{k}.jpg" for k in range(len(groups))]
            some = Predictions.from_logits(images, labels, logits, ("landbird", "waterbird"), groups, GROUPS, split)
            some.save_csv(folder / "predictions" / f"{split}.csv")
            splits[split] = evaluate(some, resamples=50).to_dict()
        (folder / "metrics.json").write_text(json.dumps({"splits": splits}))
        (folder / "run.json").write_text(json.dumps({"data": {"group_names": GROUPS}}))


def test_a_single_seed_of_a_trained_row_decides_nothing_and_probes_need_none(tmp_path):
    finished(tmp_path, "iFAM K=4", 0.9)
    finished(tmp_path, "ERM", 0.5)
    finished(tmp_path, "probe", 0.5)
    one = find(beats("iFAM K=4", "ERM"), Evidence(tmp_path))
    assert (one.verdict, one.note) == (UNDECIDED, "one seed of iFAM K=4 and ERM: holds by images alone")
    finished(tmp_path, "iFAM K=4", 0.9, (1, 2))
    finished(tmp_path, "ERM", 0.5, (1, 2))
    assert find(beats("iFAM K=4", "ERM"), Evidence(tmp_path)).verdict == HOLDS
    assert find(beats("iFAM K=4", "ERM", 0.6), Evidence(tmp_path)).verdict == FAILS
    assert find(beats("iFAM K=4", "probe"), Evidence(tmp_path)).verdict == HOLDS


def test_more_tests_of_a_claim_have_wider_intervals(tmp_path):
    for row, accuracy in (("iFAM K=4", 0.9), ("ERM", 0.85)):
        finished(tmp_path, row, accuracy, (0, 1, 2))
    alone, of_ten = (find(beats("iFAM K=4", "ERM", family=n), Evidence(tmp_path)).difference for n in (1, 10))
    assert of_ten.low < alone.low < alone.high < of_ten.high
    assert "corrected for 10 comparisons" in of_ten.how


def test_a_rival_is_compared_with_the_hyperparameters_that_validation_selects(tmp_path):
    finished(tmp_path, "iFAM K=4", 0.9, (0, 1))
    finished(tmp_path, "JTT, 5 copies", 0.8, (0, 1), val=0.6)
    finished(tmp_path, "JTT, 20 copies", 0.7, (0, 1), val=0.7)
    found = find(beats("iFAM K=4", "JTT"), Evidence(tmp_path))
    assert list(found.figures) == ["iFAM K=4", "JTT, 20 copies"]


def test_every_claim_has_rows_of_the_study_and_is_not_run_without_them(tmp_path):
    (tmp_path / "birds").mkdir()
    study = claims_of_study(Evidence(tmp_path))
    assert all(row in study.lines for claim in CLAIMS for row in claim.rows())
    assert {decide(claim, Evidence(tmp_path))[0] for claim in CLAIMS} == {NOT_RUN}
