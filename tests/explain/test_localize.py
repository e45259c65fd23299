"""Localisation: figures with known values, all kinds of methods, and the command."""

import csv
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from sightline import cli
from sightline.data.batches import Batch
from sightline.data.rows import Rows, read_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.explain.localize import localize
from sightline.metrics.attention import attention_columns
from sightline.metrics.keypoints import (
    PartLocations,
    adjusted_rand_index,
    contingency,
    keypoint_errors,
    normalised_mutual_information,
    part_centres,
    parts_at_keypoints,
)
from sightline.metrics.localization import Localization, bootstrap_metrics
from sightline.metrics.overlap import localization_columns, patch_grid
from sightline.sight import Method, Sight, cell_share
from sightline.training.distributed import make_accelerator
from sightline.vit.model import Input

SIDE = 32
EXPECTS = Input(size=(SIDE, SIDE))


def truth(masks: torch.Tensor, **more) -> Batch:
    n = len(masks)
    return Batch(torch.zeros(n, 3, *masks.shape[1:]), torch.zeros(n), None, masks, torch.arange(n), **more)


def square(left: int, top: int, side: int) -> torch.Tensor:
    mask = torch.zeros(1, SIDE, SIDE, dtype=torch.bool)
    mask[:, top : top + side, left : left + side] = True
    return mask


def ratio(columns, name):
    return columns[name][:, 0].sum() / columns[name][:, 1].sum()


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_a_patch_is_true_when_at_least_half_of_it_is_inside():
    mask = torch.zeros(1, SIDE, SIDE, dtype=torch.bool)
    mask[0, :8, :4] = True  # half of the first patch
    mask[0, :8, 8:11] = True  # less than half of the second
    keep = torch.zeros(1, 4, 4, dtype=torch.bool)
    keep[0, 0, 0] = True
    columns = localization_columns(Sight(keep=keep), {}, truth(mask))
    assert ratio(columns, "grid_iou") == 1
    assert ratio(columns, "pixel_iou") == pytest.approx(32 / (64 + 24))
    assert ratio(columns, "coverage") == pytest.approx(1 / 16)


def test_per_image_and_pooled_iou_differ_as_they_should():
    masks = torch.cat([square(0, 0, 8), square(0, 0, 16)])
    seen = torch.cat([square(0, 0, 8), square(0, 0, 8)])
    columns = localization_columns(Sight(keep_pixels=seen), {}, truth(masks))
    assert ratio(columns, "pixel_iou") == pytest.approx((1 + 0.25) / 2)
    assert ratio(columns, "pooled_iou") == pytest.approx(128 / 320)


def test_images_without_ground_truth_do_not_count():
    masks = torch.cat([square(0, 0, 16), torch.zeros(1, SIDE, SIDE, dtype=torch.bool)])
    found = bootstrap_metrics(localization_columns(Sight(keep_pixels=masks), {}, truth(masks)), resamples=100)
    assert (found["pixel_iou"].value, found["pixel_iou"].n) == (1, 1)
    assert (found["coverage"].value, found["coverage"].n) == (pytest.approx(1 / 8), 2)


def test_parts_are_measured_beside_a_sight_that_shows_everything():
    mask = square(0, 0, 16)
    shares = torch.full((1, 3, 4, 4), 0.1)
    shares[:, 2] = 0.8
    shares[:, :, :2, :2] = torch.tensor([0.8, 0.1, 0.1]).view(1, 3, 1, 1)
    sight = Sight(keep=torch.ones(1, 1, 1, dtype=torch.bool), parts=shares)
    columns = localization_columns(sight, {}, truth(mask))
    assert ratio(columns, "parts_grid_iou") == 1
    assert ratio(columns, "grid_iou") == ratio(columns, "pixel_iou") == 0.25
    assert ratio(columns, "coverage") == 1


def test_mass_hit_and_entropy_of_known_maps():
    mask = square(8, 8, 8)
    uniform, peak = torch.ones(1, 4, 4), mask.float()
    even, sharp = attention_columns(uniform, mask), attention_columns(peak, mask)
    assert even["mass"][0, 0] == pytest.approx(64 / SIDE**2)
    assert even["entropy"][0, 0] == pytest.approx(1)
    assert (sharp["mass"][0, 0], sharp["hit"][0, 0]) == (1, 1)
    assert sharp["entropy"][0, 0] == pytest.approx(np.log(64) / np.log(SIDE**2))
    elsewhere = attention_columns(square(24, 24, 8).float(), mask)
    assert (elsewhere["mass"][0, 0], elsewhere["hit"][0, 0]) == (0, 0)
    assert torch.isfinite(attention_columns(torch.zeros(1, 4, 4), mask)["entropy"]).all()


def test_the_patch_grid_is_that_of_the_method():
    everything = Sight(keep=torch.ones(2, 1, 1, dtype=torch.bool))
    pixels = Sight(keep_pixels=torch.ones(2, SIDE, SIDE, dtype=torch.bool))
    assert patch_grid(Sight(keep=torch.ones(2, 8, 8, dtype=torch.bool)), {}, (SIDE, SIDE)) == (8, 8)
    assert patch_grid(everything, {"attention": torch.ones(2, 4, 4)}, (SIDE, SIDE)) == (4, 4)
    assert patch_grid(pixels, {"salience": torch.ones(2, SIDE, SIDE)}, (SIDE, SIDE)) == (2, 2)


@pytest.mark.parametrize(("side", "cells"), [(518, 14), (252, 14), (224, 14), (56, 2), (12, 1)])
def test_boxes_are_measured_on_a_grid_that_divides_the_image(side, cells):
    boxes, odd = Sight(boxes=torch.tensor([[[0, 0, 5, 5]]])), {"attention": torch.ones(1, 5, 5)}
    assert patch_grid(boxes, {}, (side, side)) == patch_grid(boxes, odd, (side, side)) == (cells, cells)
    mask = torch.ones(1, side, side, dtype=torch.bool)
    assert ratio(localization_columns(boxes, odd, truth(mask)), "pixel_iou") == pytest.approx(25 / side**2)


def test_cluster_agreement_equals_scikit_learn():
    generator = np.random.default_rng(0)
    true, found = generator.integers(0, 5, (30, 12)), generator.integers(0, 4, (30, 12))
    found[:, :6] = np.minimum(true[:, :6], 3)
    counted = generator.random((30, 12)) < 0.8
    counts = contingency(found, true, counted, (5, 4)).sum(axis=0)
    pair = true[counted], found[counted]
    assert normalised_mutual_information(counts) == pytest.approx(normalized_mutual_info_score(*pair))
    assert adjusted_rand_index(counts) == pytest.approx(adjusted_rand_score(*pair))
    assert normalised_mutual_information(np.diag([3, 4])) == adjusted_rand_index(np.diag([3, 4])) == pytest.approx(1)
    assert np.isnan(adjusted_rand_index(np.zeros((2, 2))))


# ---- key points ------------------------------------------------------------------------------------------------------


def test_a_part_in_one_cell_has_its_centre_in_the_cells_middle():
    parts = torch.zeros(1, 2, 4, 4)
    parts[0, 0, 1, 2] = 1
    assert part_centres(parts, (SIDE, SIDE))[0, 0].tolist() == [20, 12]
    assert part_centres(parts, (SIDE, SIDE), half_cell=False)[0, 0].tolist() == [16, 8]


def test_a_key_point_lies_in_the_part_around_it():
    parts = torch.zeros(1, 2, 4, 4)
    parts[:, 1] = 1
    parts[0, :, 1, 2] = torch.tensor([1.0, 0.0])
    inside, outside = [18.4, 11.6, 1], [2.0, 2.0, 1]
    assert parts_at_keypoints(parts, torch.tensor([[inside, outside]]), (SIDE, SIDE)).tolist() == [[0, 1]]


def places_following(generator, n: int, noise: float) -> PartLocations:
    centres = generator.random((n, 2, 2))
    landmarks = np.stack([centres[:, 0] * 0.5 + 0.2, centres.mean(axis=1)], axis=1)
    landmarks = landmarks + noise * generator.standard_normal(landmarks.shape)
    return PartLocations(centres, np.ones((n, 2), dtype=bool), landmarks, np.ones((n, 2), dtype=bool))


def test_key_points_that_follow_the_parts_are_predicted():
    generator = np.random.default_rng(0)
    exact = keypoint_errors(places_following(generator, 50, 0), places_following(generator, 20, 0))
    noisy = keypoint_errors(places_following(generator, 500, 0.1), places_following(generator, 500, 0.1))
    assert exact.max() < 1e-12
    assert noisy.mean() == pytest.approx(0.1 * np.sqrt(np.pi / 2), rel=0.1)  # the mean length of such a deviation


def test_key_points_never_seen_have_no_error():
    generator = np.random.default_rng(0)
    fit, test = places_following(generator, 50, 0), places_following(generator, 20, 0)
    fit.visible[:, 1] = False
    test.visible[3, 0] = False
    errors = keypoint_errors(fit, test)
    assert np.isnan(errors[:, 1]).all()
    assert np.isnan(errors[3, 0])
    assert np.isfinite(np.delete(errors[:, 0], 3)).all()


# ---- methods ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=8, val=4, test=24, size=SIDE)


@pytest.fixture(scope="module")
def rows(toy):
    return read_rows(toy)


@pytest.fixture(scope="module")
def accelerator():
    return make_accelerator("cpu")


class Masked(Method):
    """Takes masks as input, of its own choice."""

    blind = needs_masks = accepts_masks = True

    def __init__(self, choose=lambda rows: rows):
        super().__init__()
        self.with_masks = choose

    def look_at(self, images, masks):
        return Sight(keep_pixels=masks)

    def look(self, images):
        raise AssertionError("it takes masks as input")

    def maps(self, images):
        return {}


class LeftHalf(Method):
    """Keeps the left half, with a map of it."""

    blind = True

    def look(self, images):
        return Sight(keep=self.half(images) > 0)

    def maps(self, images):
        return {"left": self.half(images)}

    def half(self, images):
        half = torch.zeros(len(images), 4, 4)
        half[:, :, :2] = 1
        return half


class ByColour(LeftHalf):
    """Two parts: red pixels, and green ones; the rest is background."""

    def look(self, images):
        red, green = (cell_share(images[:, i] > 0.5, (8, 8)) for i in (0, 1))
        return Sight(keep=red + green > 0, parts=torch.stack([red, green, 1 - red - green], dim=1))

    def maps(self, images):
        return {}


def test_a_method_that_takes_the_true_masks_has_an_iou_of_1(rows, accelerator):
    found = localize(Masked(), rows, rows.split_indices("test"), EXPECTS, accelerator, resamples=100)
    assert found.figures["pixel_iou"].value == found.figures["pooled_iou"].value == 1
    assert (found.n, found.split) == (24, "test")


def test_a_method_that_takes_other_masks_is_measured_against_the_true_ones_cached_or_not(
    rows, accelerator, tmp_path, monkeypatch
):
    shifted = Masked(lambda rows: replace(rows, masks=rows.masks[1:] + rows.masks[:1]))
    arguments = shifted, rows, rows.split_indices("test"), EXPECTS, accelerator
    found = [localize(*arguments, resamples=100, cache=cache) for cache in (None, tmp_path)]
    for module in ("batches", "cache"):
        monkeypatch.setattr(f"sightline.data.{module}.decode", None)  # by now there is nothing to decode
    found.append(localize(*arguments, resamples=100, cache=tmp_path))
    assert 0.02 < found[0].figures["pixel_iou"].value < 0.8
    assert all((one, one.per_image) == (found[0], found[0].per_image) for one in found)


def test_neither_batch_nor_order_matters_and_every_figure_has_an_interval(rows, accelerator):
    one, other = (
        localize(LeftHalf(), rows, indices, EXPECTS, accelerator, resamples=100, batch=size)
        for indices, size in ((rows.split_indices("test"), 24), (rows.split_indices("test")[::-1], 5))
    )
    assert json.dumps(one.to_dict()) == json.dumps(other.to_dict())
    assert set(one.maps["left"]) == {"mass", "hit", "entropy"}
    assert one.figures["coverage"].value == 0.5
    for figure in [*one.figures.values(), *one.maps["left"].values()]:
        assert figure.low <= figure.value <= figure.high
        assert figure.n == 24 or figure is one.figures["grid_iou"]  # some birds fill half of no patch
    assert Localization.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def dots(folder, n: int) -> Rows:
    """Black images with a red and a green square, whose middles are key points; the mask is both."""
    generator = np.random.default_rng(0)
    images, masks, keypoints = [], [], []
    for i in range(n):
        pixels = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
        middles = []
        for colour, half in ((0, 0), (1, SIDE // 2)):
            left, top = half + 4 * generator.integers(0, 3), 4 * generator.integers(0, 7)
            pixels[top : top + 8, left : left + 8, colour] = 255
            middles.append([left + 3.5, top + 3.5, 1])
        Image.fromarray(pixels).save(folder / f"{i}.png")
        Image.fromarray(pixels.any(axis=2)).save(folder / f"mask{i}.png")
        images, masks, keypoints = [*images, f"{i}.png"], [*masks, f"mask{i}.png"], [*keypoints, middles]
    splits = np.repeat([0, 2], [n // 2, n - n // 2]).astype(np.int8)
    return Rows("dots", folder, images, np.zeros(n, np.int64), ("a",), splits, masks=masks,
                keypoints=np.array(keypoints, np.float32), keypoint_names=("red", "green"))  # fmt: skip


@pytest.mark.parametrize(("published", "cache"), [(False, None), (True, None), (False, "cache")])
def test_parts_that_coincide_with_the_key_points_score_1(tmp_path, accelerator, published, cache):
    rows = dots(tmp_path, 40)
    settings = {"published": published, "resamples": 100, "cache": tmp_path / cache if cache else None}
    test, train = rows.split_indices("test"), rows.split_indices("train")
    found = localize(ByColour(), rows, test, EXPECTS, accelerator, fit=train, **settings).figures
    assert found["pixel_iou"].value == found["parts_grid_iou"].value == 1
    assert found["nmi"].value == pytest.approx(1)
    assert found["ari"].value == pytest.approx(1)
    assert found["keypoint_error"].value < 1e-5
    assert found["keypoint_error"].n == 20


def test_without_rows_to_fit_on_there_is_no_keypoint_error(tmp_path, accelerator):
    rows = dots(tmp_path, 8)
    found = localize(ByColour(), rows, rows.split_indices("test"), EXPECTS, accelerator, resamples=20)
    assert "keypoint_error" not in found.figures
    assert "nmi" in found.figures
    assert found.notes == ("no key point error: its regression needs training rows other than those measured",)
    test, train = rows.split_indices("test"), rows.split_indices("train")
    fitted = localize(ByColour(), rows, test, EXPECTS, accelerator, fit=train, resamples=20)
    assert fitted.notes == ()


def test_images_without_masks_are_left_out_with_a_note(rows, accelerator):
    some = replace(rows, masks=["" if i % 3 == 0 else mask for i, mask in enumerate(rows.masks)])
    found = localize(LeftHalf(), some, some.split_indices("test"), EXPECTS, accelerator, resamples=20)
    assert found.n == 16
    assert "without a mask, not measured: 8 of 24 images" in found.notes[0]
    with pytest.raises(UserError, match="no masks to compare with"):
        localize(LeftHalf(), replace(rows, masks=None), rows.split_indices("test"), EXPECTS, accelerator)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sightline(capsys, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sightline", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return run


def test_the_command_writes_every_split_and_prints_a_table(sightline, toy, tmp_path):
    run = tmp_path / "run"
    common = ["--backbone", "random:nano", "--workers", "0", "--device", "cpu"]
    assert sightline("train", "probe", toy, *common, "--untuned", "--out", run)[0] == 0
    for split in ("val", "test"):
        more = ["--per-map", "--cache", tmp_path / "cache"] if split == "test" else []
        code, out, _ = sightline("localize", run, "--split", split, "--workers", 0, "--device", "cpu", *more)
        assert code == 0
        assert "Map attention: hit rate (maximum inside the mask)" in out
    content = json.loads((run / "localization.json").read_text())
    assert set(content["splits"]) == {"val", "test"}
    found = Localization.from_dict(content["splits"]["test"])
    assert (found.n, found.figures["coverage"].value) == (24, 1)
    with (run / "localization" / "test.csv").open(newline="") as file:
        photos = list(csv.DictReader(file))
    assert [line["image"] for line in photos] == [image for image in read_rows(toy).images if "test/" in image]
    for name, figure in (("grid_iou", found.figures["grid_iou"]), ("mass attention", found.maps["attention"]["mass"])):
        counted = [float(line[name]) for line in photos if line[name]]
        assert (len(counted), np.mean(counted)) == (figure.n, pytest.approx(figure.value, rel=1e-3))
    assert "pooled_iou" not in photos[0]
    in_brief = (run / "localization" / "val.csv").read_text().splitlines()
    assert in_brief[0] == "image,grid_iou,pixel_iou,coverage"
    assert max(len(value) for line in in_brief[1:] for value in line.split(",")[1:]) <= len("0.01234")
    for image in (toy / "test").iterdir():
        other = tmp_path / "plain" / "duck" / image.name
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(image.read_bytes())
    code, _, err = sightline("localize", run, tmp_path / "plain", "--workers", 0, "--device", "cpu")
    assert code == 2
    assert "no masks to compare with" in err
    before = (run / "localization.json").read_bytes()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "localization.json").write_bytes(before)
    others = write_toy(tmp_path / "others", train=2, val=2, test=4, size=SIDE, seed=1)
    code, _, err = sightline("localize", run, others, "--out", tmp_path / "out", "--workers", 0, "--device", "cpu")
    assert (code, "localization.json: holds results on other data (fingerprint" in err) == (2, True)
    assert (tmp_path / "out" / "localization.json").read_bytes() == before
