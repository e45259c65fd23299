"""Tests of explanations: pixels that turn black, pixels that are enough, neighbours, and maps held against masks."""

import csv
import json
import shutil
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from sightline.errors import UserError
from sightline.explain.neighbours import named_rightly
from sightline.explain.perturbation import (
    RANDOM,
    SHARES,
    blackened,
    curves,
    explained,
    in_words,
    mean_over,
    perturbed,
    random_maps,
    ranks,
    trapezoid,
)
from sightline.explain.segmentation import average_precision, figures_of, outlined
from sightline.explain.stress import check_strangers
from sightline.explain.stress_results import Stressed
from sightline.explain.sufficient_subsets import other_labels, sufficient, summary
from sightline.sight import Prediction, Sight

from ..commands import QUICK, typed

SIDE, CELL = 16, 4


class Corner(nn.Module):
    """Bright in the upper left cell is class 1. Its map `right` knows that, and its map `wrong` says the contrary."""

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


# ---- pixels that turn black ------------------------------------------------------------------------------------------


def test_pixels_take_turns_by_relevance_and_equals_by_their_place():
    maps = torch.tensor([[[0.2, 0.9], [0.2, 0.1]]])
    assert ranks(maps, (2, 2), "positive").tolist() == [[[1, 0], [2, 3]]]
    assert ranks(maps, (2, 2), "negative").tolist() == [[[1, 3], [2, 0]]]


@pytest.mark.parametrize("share", SHARES)
def test_so_many_pixels_are_black_as_the_share_says_rounded_down(share):
    images = torch.ones(2, 3, 15, 15)
    dark = blackened(images, ranks(torch.rand(2, 5, 5), (15, 15), "positive"), share)
    assert ((dark == 0).all(dim=1).sum(dim=(1, 2)) == int(share * 225)).all()


def test_a_map_that_knows_the_reason_beats_chance_and_its_contrary_does_worse():
    images, labels = bright(40), torch.ones(40, dtype=torch.int64)
    first, _, answers = perturbed(Corner(), images, None, labels, ["right", "wrong", "sight"], random_of(40))
    found = {(c.map, c.direction): c for c in curves(labels.numpy(), first.numpy(), numbers(answers))}
    assert found["right", "positive"].accuracy[1].value == 0  # the corner is gone, and with it the answer
    assert found["right", "negative"].accuracy[-1].value == 1  # all but the corner is gone
    for direction in ("positive", "negative"):
        assert found["right", direction].gain.low > 0
        assert found["wrong", direction].gain.high < 0
        assert found["sight", direction].gain.low > 0
        assert found[RANDOM, direction].gain is None
    said = in_words(list(found.values()))
    assert "surely: right; sight" in said
    assert "surely less: wrong" in said


def numbers(answers):
    return {name: one.numpy() for name, one in answers.items()}


def test_the_map_of_the_true_class_differs_only_where_the_answer_is_wrong(monkeypatch):
    method, asked = Corner(), []

    def of_a_class(method, images, sight, name, classes=None):
        asked.append(classes.tolist())
        return torch.rand(len(images), CELL, CELL, generator=torch.Generator().manual_seed(len(asked)))

    monkeypatch.setattr("sightline.explain.perturbation.explained", of_a_class)
    labels = torch.tensor([1, 0, 1])
    _, _, answers = perturbed(method, bright(3), None, labels, ["gae"], random_of(3))
    assert asked == [[1, 1, 1], [0]]
    assert torch.equal(answers["gae"][[0, 2]], answers["gae, true class"][[0, 2]])


def test_a_random_map_is_each_pictures_own_whatever_batch_it_is_in():
    together, alone = random_maps([3, 8], (4, 4), seed=1), random_maps([8], (4, 4), seed=1)
    assert torch.equal(together[1:], alone)
    assert not torch.equal(together[0], together[1])


def test_the_trapezoid_is_the_area_from_a_tenth_to_nine_tenths():
    right = np.random.default_rng(0).random((5, 9))
    area = [sum((a + b) / 2 * 0.1 for a, b in pairwise(line)) for line in right]
    assert trapezoid(right) == pytest.approx(area)
    assert trapezoid(np.ones((1, 9))) == pytest.approx(0.8)


def test_a_difference_on_the_same_pictures_is_surer_than_two_figures_apart():
    values = np.random.default_rng(0).random(200)
    gain = mean_over(np.clip(values + 0.05, 0, 1), values)
    assert gain.low > 0
    assert mean_over(np.clip(values + 0.05, 0, 1)).low < mean_over(values).high


def test_a_method_that_sees_everything_has_no_map_of_its_sight():
    images = bright(2)
    assert explained(Corner(), images, Sight.everything(images), "sight") is None
    assert explained(Corner(), images, Sight.everything(images), "unknown") is None


# ---- pixels that are enough ------------------------------------------------------------------------------------------


class Balance(nn.Module):
    """Class 1 by its left half, class 0 by its right half; of class 2 it can never be sure."""

    def look(self, images):
        return Sight.everything(images)

    def judge(self, images, sight):
        left, right = images[..., : SIDE // 2].mean(dim=(1, 2, 3)), images[..., SIDE // 2 :].mean(dim=(1, 2, 3))
        return Prediction(20 * torch.stack([right, left, left * 0 - 1], dim=1), sight)

    def maps(self, images):
        return {}


def test_some_pixels_are_enough_for_either_label_and_none_for_one_that_is_out_of_reach():
    images = torch.full((3, 3, SIDE, SIDE), 0.5)
    found = sufficient(Balance(), images, None, torch.tensor([0, 1, 2]), (0.0, 0.0, 0.0), steps=16)
    assert found.sure.tolist() == [True, True, False]
    assert found.share[:2].max() < 0.5
    assert found.share[2] == 0
    assert not found.visible[0, :, : SIDE // 2].any()  # what speaks for the other label went first
    assert not found.visible[1, :, SIDE // 2 :].any()
    kept = images[:1] * found.visible[:1, None]
    assert Balance().judge(kept, None).probabilities[0, 0] >= 0.9


def test_labels_are_drawn_among_the_others_and_the_same_again():
    labels = other_labels(5, 2, 10, 4, seed=0)
    assert len(set(labels.tolist())) == 4
    assert 2 not in labels
    assert labels.tolist() == other_labels(5, 2, 10, 4, seed=0).tolist()
    assert other_labels(5, 1, 2, 4, seed=0).tolist() == [0]


def test_pixels_that_reach_any_label_are_said_to_explain_nothing():
    sure, share = np.ones((20, 3), dtype=bool), np.full((20, 3), 0.1)
    found = summary(sure, share, 0.9, 100)
    assert found.explains_nothing
    assert found.sentence.startswith("Some pixels, 10.0 % of them on average, make the model 90 % sure")
    assert "explains nothing" in found.sentence
    sure[:, 1:] = False
    assert not (rarely := summary(sure, share, 0.9, 100)).explains_nothing
    assert rarely.size is None
    assert rarely.own_size.value == pytest.approx(0.1)


# ---- neighbours ------------------------------------------------------------------------------------------------------


def test_neighbours_are_sought_in_the_bank_or_among_the_others():
    angles = torch.tensor([0.0, 0.1, 3.0, 3.1])
    points, labels = torch.stack([angles.cos(), angles.sin()], dim=1), torch.tensor([0, 0, 1, 1])
    assert named_rightly(points, labels)[1].all()
    assert not named_rightly(points, torch.tensor([0, 1, 0, 1]))[1].any()
    assert named_rightly(points, labels, points.flip(0), labels.flip(0))[1].all()
    assert not named_rightly(points, labels, points, 1 - labels)[1].any()


def test_no_more_neighbours_are_named_than_there_are():
    points, labels = torch.eye(10), torch.arange(10) % 2
    assert set(named_rightly(points, labels)) == {1, 9}
    assert set(named_rightly(points, labels, points, labels)) == {1, 10}
    assert set(named_rightly(points[:2], labels[:2])) == {1}


# ---- against masks ---------------------------------------------------------------------------------------------------


def test_average_precision_is_scikit_learns_of_both_answers_to_every_pixel(generator):
    from sklearn.metrics import average_precision_score

    scores = torch.randint(0, 5, (4, 50), generator=generator).float()  # quarters: many are exactly equal
    true = torch.rand(4, 50, generator=generator) > 0.6
    for found, score, label in zip(average_precision(scores, true), scores.double(), true, strict=True):
        unit = (score - score.min()) / (score.max() - score.min())
        expected = average_precision_score(torch.cat([~label, label]), torch.cat([1 - unit, unit]))
        assert found.item() == pytest.approx(expected)


def test_a_map_that_is_the_mask_outlines_it_and_its_contrary_does_not():
    masks = torch.zeros(3, 32, 32, dtype=torch.bool)
    masks[:, 8:20, 4:16] = True
    figures = [
        figures_of({name: column.numpy() for name, column in outlined(maps, masks).items()})
        for maps in (masks.float(), 1 - masks.float())
    ]
    assert [round(one.value, 6) for one in figures[0].values()] == [1, 1, 1, 1, 1]
    assert figures[1]["accuracy"].value == figures[1]["miou"].value == figures[1]["hit"].value == 0


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "bank", "why"),
    [
        ([3, 4, 3], [0, 1, 2], "no label of these pictures occurs among the training pictures: none could be named"),
        ([3, 4, 5], [], "no two of these pictures have the same label: none could be named rightly"),
        ([3, 4, 3], [4, 4], "all pictures to seek them among are of one class"),
        ([3, 3, 3], [], "all pictures to seek them among are of one class"),
        ([3, 4, 3], [0, 4], None),
        ([3, 4, 3], [], None),
    ],
)
def test_neighbours_are_not_sought_where_the_outcome_is_known_before(labels, bank, why):
    with pytest.raises(UserError, match=why) if why else nullcontext():
        check_strangers(np.array(labels), np.array(bank, dtype=np.int64))


SHORT = ("--limit", 10, "--subsets", 3, "--labels", 2, "--steps", 6, "--maps", "gae", "sight", *QUICK)


@pytest.fixture(scope="module")
def stressed(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stress")
    return folder, typed("stress", runs / "erm-0", *SHORT, "--out", folder)


def test_a_run_is_tested_from_the_command_line(stressed):
    folder, (code, out, _) = stressed
    assert code == 0
    for words in ("below random by", "held against masks", "nearest neighbours", "no map sight", "More faithful"):
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


def test_what_was_found_can_be_read_again(stressed):
    said = json.loads((stressed[0] / "stress" / "test.json").read_text())
    found = Stressed.from_dict(said)
    about = ("fingerprint", "seed", "weights", "intervention")
    assert json.loads(json.dumps(found.to_dict())) == {k: v for k, v in said.items() if k not in about}
    assert {curve.map for curve in found.curves} == {"gae", "gae, true class", "random"}
    curve = found.curves[0]
    assert curve.mean.value == pytest.approx(np.mean([one.value for one in curve.accuracy]))
    assert found.subsets.n == 3
    assert found.subsets.labels == 1  # there is only one other class


def test_the_same_question_gets_the_same_answer(runs, stressed, tmp_path):
    assert typed("stress", runs / "erm-0", *SHORT, "--no-pictures", "--out", tmp_path)[0] == 0
    assert sorted(path.name for path in (tmp_path / "stress").iterdir()) == ["test.csv", "test.json"]
    for name in ("test.csv", "test.json"):
        assert (tmp_path / "stress" / name).read_bytes() == (stressed[0] / "stress" / name).read_bytes()


def test_only_what_is_asked_for_is_done(runs, tmp_path):
    code, out, _ = typed("stress", runs / "erm-0", *SHORT, "--tests", "masks", "--out", tmp_path)
    assert code == 0
    said = json.loads((tmp_path / "stress" / "test.json").read_text())
    assert set(said["masks"]) == {"gae", "random"}
    assert not said["curves"]
    assert said["subsets"] is None
    assert "nearest" not in out


def test_data_whose_classes_were_never_shown_have_no_neighbours_and_it_says_why(runs, toy, tmp_path):
    data = shutil.copytree(toy, tmp_path / "toy") / "rows.csv"
    header, *lines = data.read_text().splitlines(keepends=True)
    label, split = (header.strip().split(",").index(name) for name in ("label", "split"))
    first = lines[0].split(",")[label]
    apart = [line for line in lines if (line.split(",")[label] == first) == (line.split(",")[split].strip() == "train")]
    data.write_text("".join([header, *apart]))
    told = (data, *SHORT, "--tests", "neighbours", "masks", "--out", tmp_path)
    code, out, err = typed("stress", runs / "erm-0", *told)
    assert code == 0, err
    assert "neighbours: none were sought: no label of these pictures occurs among the training pictures" in " ".join(
        out.split()
    )
    said = json.loads((tmp_path / "stress" / "test.json").read_text())
    assert not said["neighbours"]
    assert said["masks"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--limit", -1), "--limit -1: must be at least 0"),
        (("--labels", 0), "--labels 0: must be at least 1"),
        (("--confidence", 1), "--confidence 1: must be between 0 and 1"),
        (("--steps", 1), "--steps 1: at least 2"),
    ],
)
def test_hopeless_questions_are_refused(runs, tmp_path, flags, words):
    code, _, err = typed("stress", runs / "erm-0", *QUICK, *flags, "--out", tmp_path)
    assert code == 2
    assert words in err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same_pictures_and_maps(runs, stressed, tmp_path):
    told = [word if word != "cpu" else "cuda" for word in SHORT]
    assert typed("stress", runs / "erm-0", *told, "--no-pictures", "--out", tmp_path)[0] == 0
    tables = [list(csv.DictReader((at / "stress" / "test.csv").open())) for at in (tmp_path, stressed[0])]
    assert [line["image"] for line in tables[0]] == [line["image"] for line in tables[1]]
    masses = [[float(line["mass gae"]) for line in table] for table in tables]
    assert masses[0] == pytest.approx(masses[1], abs=0.01)
