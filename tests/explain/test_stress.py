"""Tests of explanations: perturbation curves, sufficient input subsets, nearest neighbours, and segmentation."""

import csv
import json
import shutil
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch

from sightline.errors import UserError
from sightline.explain.neighbours import knn_correct
from sightline.explain.perturbation import (
    RANDOM,
    SHARES,
    blacken,
    bootstrap_mean,
    curves,
    explanation_map,
    faithfulness_summary,
    perturb,
    pixel_ranks,
    random_maps,
    trapezoid,
)
from sightline.explain.segmentation import average_precision, segmentation_columns, segmentation_figures
from sightline.explain.stress import check_bank_labels
from sightline.explain.stress_results import StressResults
from sightline.explain.sufficient_subsets import find_sufficient_subsets, random_other_labels, summarize
from sightline.sight import Method, Prediction, Sight

from ..commands import QUICK, typed

SIDE, CELL = 16, 4


class Corner(Method):
    """Bright in the upper left cell is class 1. Its map `right` marks that cell, its map `wrong` is the negative."""

    blind = False

    def look(self, images):
        keep = torch.zeros(len(images), CELL, CELL, dtype=torch.bool)
        keep[:, :2, :2] = True
        return Sight(keep=keep)

    def judge(self, images, sight):
        light = images[:, :, :4, :4].mean(dim=(1, 2, 3)) - 0.3
        return Prediction(20 * torch.stack([-light, light], dim=1), sight)

    def maps(self, images):
        right = torch.zeros(len(images), CELL, CELL)
        right[:, 0, 0] = 1
        return {"right": right, "wrong": -right}


def bright(count):
    return 0.8 + 0.1 * torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def random_of(count):
    return lambda grid: random_maps(range(count), grid, seed=0)


# ---- perturbation curves ---------------------------------------------------------------------------------------------


def test_pixels_are_ranked_by_relevance_with_ties_in_reading_order():
    maps = torch.tensor([[[0.2, 0.9], [0.2, 0.1]]])
    assert pixel_ranks(maps, (2, 2), "positive").tolist() == [[[1, 0], [2, 3]]]
    assert pixel_ranks(maps, (2, 2), "negative").tolist() == [[[1, 3], [2, 0]]]


@pytest.mark.parametrize("share", SHARES)
def test_the_given_share_of_pixels_is_blackened_rounded_down(share):
    images = torch.ones(2, 3, 15, 15)
    dark = blacken(images, pixel_ranks(torch.rand(2, 5, 5), (15, 15), "positive"), share)
    assert ((dark == 0).all(dim=1).sum(dim=(1, 2)) == int(share * 225)).all()


def test_a_faithful_map_beats_random_and_its_negative_does_worse():
    images, labels = bright(40), torch.ones(40, dtype=torch.int64)
    first, _, predictions = perturb(Corner(), images, None, labels, ["right", "wrong", "sight"], random_of(40))
    found = {(c.map, c.direction): c for c in curves(labels.numpy(), first.numpy(), numbers(predictions))}
    assert found["right", "positive"].accuracy[1].value == 0  # the corner is gone, and with it the prediction
    assert found["right", "negative"].accuracy[-1].value == 1  # all but the corner is gone
    for direction in ("positive", "negative"):
        assert found["right", direction].gain.low > 0
        assert found["wrong", direction].gain.high < 0
        assert found["sight", direction].gain.low > 0
        assert found[RANDOM, direction].gain is None
    results = faithfulness_summary(list(found.values()))
    assert "significantly: right; sight" in results
    assert "significantly less: wrong" in results


def numbers(predictions):
    return {name: one.numpy() for name, one in predictions.items()}


def test_the_map_of_the_true_class_differs_only_where_the_answer_is_wrong(monkeypatch):
    method, asked = Corner(), []

    def of_a_class(method, images, sight, name, classes=None):
        asked.append(classes.tolist())
        return torch.rand(len(images), CELL, CELL, generator=torch.Generator().manual_seed(len(asked)))

    monkeypatch.setattr("sightline.explain.perturbation.explanation_map", of_a_class)
    labels = torch.tensor([1, 0, 1])
    _, _, predictions = perturb(method, bright(3), None, labels, ["gae"], random_of(3))
    assert asked == [[1, 1, 1], [0]]
    assert torch.equal(predictions["gae"][[0, 2]], predictions["gae, true class"][[0, 2]])


def test_the_random_map_of_an_image_does_not_depend_on_its_batch():
    together, alone = random_maps([3, 8], (4, 4), seed=1), random_maps([8], (4, 4), seed=1)
    assert torch.equal(together[1:], alone)
    assert not torch.equal(together[0], together[1])


def test_the_trapezoid_is_the_area_from_a_tenth_to_nine_tenths():
    right = np.random.default_rng(0).random((5, 9))
    area = [sum((a + b) / 2 * 0.1 for a, b in pairwise(line)) for line in right]
    assert trapezoid(right) == pytest.approx(area)
    assert trapezoid(np.ones((1, 9))) == pytest.approx(0.8)


def test_a_paired_difference_has_a_narrower_interval():
    values = np.random.default_rng(0).random(200)
    gain = bootstrap_mean(np.clip(values + 0.05, 0, 1), values)
    assert gain.low > 0
    assert bootstrap_mean(np.clip(values + 0.05, 0, 1)).low < bootstrap_mean(values).high


def test_a_method_that_sees_everything_has_no_map_of_its_sight():
    images = bright(2)
    assert explanation_map(Corner(), images, Sight.everything(images), "sight") is None
    assert explanation_map(Corner(), images, Sight.everything(images), "unknown") is None


# ---- sufficient input subsets ----------------------------------------------------------------------------------------


class Balance(Method):
    """Class 1 by its left half, class 0 by its right half; class 2 never gets a high probability."""

    blind = False

    def look(self, images):
        return Sight.everything(images)

    def judge(self, images, sight):
        left, right = images[..., : SIDE // 2].mean(dim=(1, 2, 3)), images[..., SIDE // 2 :].mean(dim=(1, 2, 3))
        return Prediction(20 * torch.stack([right, left, left * 0 - 1], dim=1), sight)

    def maps(self, images):
        return {}


def test_sufficient_subsets_exist_for_reachable_labels_only():
    images = torch.full((3, 3, SIDE, SIDE), 0.5)
    found = find_sufficient_subsets(Balance(), images, None, torch.tensor([0, 1, 2]), (0.0, 0.0, 0.0), steps=16)
    assert found.reached.tolist() == [True, True, False]
    assert found.share[:2].max() < 0.5
    assert found.share[2] == 0
    assert not found.visible[0, :, : SIDE // 2].any()  # evidence for the other label is removed first
    assert not found.visible[1, :, SIDE // 2 :].any()
    kept = images[:1] * found.visible[:1, None]
    assert Balance().judge(kept, None).probabilities[0, 0] >= 0.9


def test_random_labels_are_reproducible_and_differ_from_the_prediction():
    labels = random_other_labels(5, 2, 10, 4, seed=0)
    assert len(set(labels.tolist())) == 4
    assert 2 not in labels
    assert labels.tolist() == random_other_labels(5, 2, 10, 4, seed=0).tolist()
    assert random_other_labels(5, 1, 2, 4, seed=0).tolist() == [0]


def test_subsets_that_exist_for_any_label_explain_nothing():
    reached, share = np.ones((20, 3), dtype=bool), np.full((20, 3), 0.1)
    found = summarize(reached, share, 0.9, 100)
    assert found.explains_nothing
    assert found.sentence.startswith("A pixel subset (10.0 % of the pixels on average) makes the model 90 % confident")
    assert "explains nothing" in found.sentence
    reached[:, 1:] = False
    assert not (rarely := summarize(reached, share, 0.9, 100)).explains_nothing
    assert rarely.size is None
    assert rarely.own_size.value == pytest.approx(0.1)


# ---- neighbours ------------------------------------------------------------------------------------------------------


def test_neighbours_come_from_the_bank_or_from_the_other_images():
    angles = torch.tensor([0.0, 0.1, 3.0, 3.1])
    points, labels = torch.stack([angles.cos(), angles.sin()], dim=1), torch.tensor([0, 0, 1, 1])
    assert knn_correct(points, labels)[1].all()
    assert not knn_correct(points, torch.tensor([0, 1, 0, 1]))[1].any()
    assert knn_correct(points, labels, points.flip(0), labels.flip(0))[1].all()
    assert not knn_correct(points, labels, points, 1 - labels)[1].any()


def test_the_number_of_neighbours_is_at_most_the_number_of_candidates():
    points, labels = torch.eye(10), torch.arange(10) % 2
    assert set(knn_correct(points, labels)) == {1, 9}
    assert set(knn_correct(points, labels, points, labels)) == {1, 10}
    assert set(knn_correct(points[:2], labels[:2])) == {1}


# ---- segmentation ----------------------------------------------------------------------------------------------------


def test_average_precision_equals_scikit_learn_over_both_classes_of_every_pixel(generator):
    from sklearn.metrics import average_precision_score

    scores = torch.randint(0, 5, (4, 50), generator=generator).float()  # quarters: many are exactly equal
    true = torch.rand(4, 50, generator=generator) > 0.6
    for found, score, label in zip(average_precision(scores, true), scores.double(), true, strict=True):
        unit = (score - score.min()) / (score.max() - score.min())
        expected = average_precision_score(torch.cat([~label, label]), torch.cat([1 - unit, unit]))
        assert found.item() == pytest.approx(expected)


def test_a_map_that_equals_the_mask_is_a_perfect_segmentation():
    masks = torch.zeros(3, 32, 32, dtype=torch.bool)
    masks[:, 8:20, 4:16] = True
    figures = [
        segmentation_figures({name: column.numpy() for name, column in segmentation_columns(maps, masks).items()})
        for maps in (masks.float(), 1 - masks.float())
    ]
    assert [round(one.value, 6) for one in figures[0].values()] == [1, 1, 1, 1, 1]
    assert figures[1]["accuracy"].value == figures[1]["miou"].value == figures[1]["hit"].value == 0


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "bank", "why"),
    [
        ([3, 4, 3], [0, 1, 2], "no label of these images occurs among the training images"),
        ([3, 4, 5], [], "no two of these images share a label"),
        ([3, 4, 3], [4, 4], "all candidate neighbours are of one class"),
        ([3, 3, 3], [], "all candidate neighbours are of one class"),
        ([3, 4, 3], [0, 4], None),
        ([3, 4, 3], [], None),
    ],
)
def test_neighbours_are_refused_if_the_accuracy_is_known_beforehand(labels, bank, why):
    with pytest.raises(UserError, match=why) if why else nullcontext():
        check_bank_labels(np.array(labels), np.array(bank, dtype=np.int64))


SUBSETS = ("--subset-images", 3, "--labels-per-image", 2, "--subset-steps", 6)
SHORT = ("--limit", 10, *SUBSETS, "--maps", "gae", "sight", *QUICK)


@pytest.fixture(scope="module")
def stressed(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stress")
    return folder, typed("stress", runs / "erm-0", *SHORT, "--out", folder)


def test_a_run_is_tested_from_the_command_line(stressed):
    folder, (code, out, _) = stressed
    assert code == 0
    for words in ("below random by", "map against true masks", "nearest neighbours", "no map sight", "More faithful"):
        assert words in out
    assert {path.name for path in (folder / "stress").iterdir()} == {
        "test.json", "test.csv", "test.png", "test-subsets.png",
    }  # fmt: skip
    with (folder / "stress" / "test.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 10
    assert {"image", "label", "predicted", "positive gae", "negative random", "mass gae", "10 neighbours"} <= set(
        lines[0]
    )


def test_results_can_be_read_back(stressed):
    results = json.loads((stressed[0] / "stress" / "test.json").read_text())
    found = StressResults.from_dict(results)
    about = ("fingerprint", "seed", "weights", "intervention")
    assert json.loads(json.dumps(found.to_dict())) == {k: v for k, v in results.items() if k not in about}
    assert {curve.map for curve in found.curves} == {"gae", "gae, true class", "random"}
    curve = found.curves[0]
    assert curve.mean.value == pytest.approx(np.mean([one.value for one in curve.accuracy]))
    assert found.subsets.n == 3
    assert found.subsets.labels == 1  # there is only one other class


def test_results_are_reproducible(runs, stressed, tmp_path):
    assert typed("stress", runs / "erm-0", *SHORT, "--no-figures", "--out", tmp_path)[0] == 0
    assert sorted(path.name for path in (tmp_path / "stress").iterdir()) == ["test.csv", "test.json"]
    for name in ("test.csv", "test.json"):
        assert (tmp_path / "stress" / name).read_bytes() == (stressed[0] / "stress" / name).read_bytes()


def test_only_the_requested_tests_run(runs, tmp_path):
    code, out, _ = typed("stress", runs / "erm-0", *SHORT, "--tests", "masks", "--out", tmp_path)
    assert code == 0
    results = json.loads((tmp_path / "stress" / "test.json").read_text())
    assert set(results["masks"]) == {"gae", "random"}
    assert not results["curves"]
    assert results["subsets"] is None
    assert "nearest" not in out


def test_neighbours_are_skipped_with_a_note_if_no_label_occurs_in_training(runs, toy, tmp_path):
    data = shutil.copytree(toy, tmp_path / "toy") / "rows.csv"
    header, *lines = data.read_text().splitlines(keepends=True)
    label, split = (header.strip().split(",").index(name) for name in ("label", "split"))
    first = lines[0].split(",")[label]
    apart = [line for line in lines if (line.split(",")[label] == first) == (line.split(",")[split].strip() == "train")]
    data.write_text("".join([header, *apart]))
    flags = (data, *SHORT, "--tests", "neighbours", "masks", "--out", tmp_path)
    code, out, err = typed("stress", runs / "erm-0", *flags)
    assert code == 0, err
    assert "neighbours: skipped: no label of these images occurs among the training images" in " ".join(out.split())
    results = json.loads((tmp_path / "stress" / "test.json").read_text())
    assert not results["neighbours"]
    assert results["masks"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--limit", -1), "--limit -1: must not be negative"),
        (("--labels-per-image", 0), "--labels-per-image 0: must be at least 1"),
        (("--confidence", 1), "--confidence 1.0: must lie between 0 and 1"),
        (("--subset-steps", 1), "--subset-steps 1: must be at least 2"),
    ],
)
def test_invalid_settings_are_refused(runs, tmp_path, flags, words):
    code, _, err = typed("stress", runs / "erm-0", *QUICK, *flags, "--out", tmp_path)
    assert code == 2
    assert words in err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same_images_and_maps(runs, stressed, tmp_path):
    flags = [word if word != "cpu" else "cuda" for word in SHORT]
    assert typed("stress", runs / "erm-0", *flags, "--no-figures", "--out", tmp_path)[0] == 0
    tables = [list(csv.DictReader((at / "stress" / "test.csv").open())) for at in (tmp_path, stressed[0])]
    assert [line["image"] for line in tables[0]] == [line["image"] for line in tables[1]]
    masses = [[float(line["mass gae"]) for line in table] for table in tables]
    assert masses[0] == pytest.approx(masses[1], abs=0.01)
