"""Label information in the mask shape: detected where there is some, and not where there is none."""

import json

import numpy as np
import pytest
import torch

from sightline.config import Shape
from sightline.data.rows import Rows, read_rows
from sightline.datasets.toy import write_toy
from sightline.explain.shape import fit_shape_probe, mask_shapes, shape_run
from sightline.metrics.groups import evaluate
from sightline.metrics.inference import inference_batches
from sightline.sight import Method, Sight
from sightline.training.distributed import make_accelerator
from sightline.vit.model import Input
from tests.commands import QUICK, SMALL, typed

SIZES = {"train": 400, "val": 200, "test": 400}


def made_up_rows(labels: np.ndarray) -> Rows:
    splits = np.repeat(np.arange(3), list(SIZES.values()))
    return Rows("made up", None, [f"{i}.png" for i in range(len(labels))], labels, ("duck", "stork"), splits)


def shapes_by_split(rows: Rows, shape: np.ndarray) -> dict[str, np.ndarray]:
    return {split: shape[rows.split_indices(split)].astype(np.float32) for split in SIZES}


def balanced_of(rows: Rows, shape: np.ndarray):
    predictions, _ = fit_shape_probe(rows, shapes_by_split(rows, shape), "test")
    return evaluate(predictions).balanced


def test_a_label_encoded_in_one_patch_is_detected():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 1000)
    shape = generator.random((1000, 16)) < 0.5
    shape[:, 5] = labels
    assert balanced_of(made_up_rows(labels), shape).value == 1


def test_random_shapes_are_at_chance():
    generator = np.random.default_rng(1)
    labels, shape = generator.integers(0, 2, 1000), generator.random((1000, 16)) < 0.5
    found = balanced_of(made_up_rows(labels), shape)
    assert found.low < 0.5 < found.high


def test_class_priors_do_not_hide_what_the_shape_reveals_about_a_rare_class():
    generator = np.random.default_rng(2)
    labels = (generator.random(1000) < 0.1).astype(np.int64)
    shape = generator.random((1000, 1)) < np.where(labels, 0.8, 0.3)[:, None]
    assert balanced_of(made_up_rows(labels), shape).low > 0.6


class Corner(Method):
    """Keeps the top left patch, and another one in bright images of 32 pixels, in 4 × 4 patches."""

    blind = True

    def __init__(self, **sight):
        super().__init__()
        self.more = sight

    def look(self, images):
        keep = torch.zeros(len(images), 4, 4, dtype=torch.bool)
        keep[:, 0, 0] = True
        keep[:, 1, 1] = images.mean(dim=(1, 2, 3)) > 0.5
        return Sight(keep=keep, **{name: value.expand(len(images), -1, -1) for name, value in self.more.items()})

    def maps(self, images):
        return {}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=32, val=16, test=16, size=32)


def shapes_of(method, rows, indices, batch=64, cache=None):
    accelerator = make_accelerator("cpu")
    batches = inference_batches(rows, indices, Input(size=(32, 32)), accelerator, batch=batch, workers=0, cache=cache)
    return mask_shapes(method, batches, accelerator)


def test_the_probe_is_given_the_kept_patches_and_nothing_else(toy, tmp_path):
    rows = read_rows(toy)
    at = rows.split_indices("test")
    found, cached = (shapes_of(Corner(), rows, at, batch=5, cache=cache) for cache in (None, tmp_path))
    assert (found == cached).all()
    assert found.shape == (16, 16)
    assert (found[:, 0] == 1).all()
    assert set(np.unique(found)) <= {0.0, 1.0}
    assert not np.delete(found, [0, 5], axis=1).any()


def test_pixels_hidden_inside_a_patch_are_part_of_the_shape(toy):
    half = torch.ones(1, 32, 32, dtype=torch.bool)
    half[:, :, :4] = False
    rows = read_rows(toy)
    found = shapes_of(Corner(keep_pixels=half), rows, rows.split_indices("val"))
    assert (found[:, 0] == 0.5).all()


def test_the_command_measures_given_masks_and_refuses_models_that_see_everything(toy, tmp_path):
    masked, whole = tmp_path / "masked", tmp_path / "whole"
    for method, out in (("early-mask", masked), ("erm", whole)):
        code, _, err = typed("train", method, toy, *SMALL, "--epochs", 1, "--out", out)
        assert code == 0, err
    contents = set()
    for cache in ([], ["--cache", tmp_path / "cache"]):
        code, out, err = typed("shape", masked, *QUICK, *cache)
        assert code == 0, err
        contents.add((masked / "shape" / "test.csv").read_text())
    assert len(contents) == 1
    assert "Label predicted from the mask shape alone: class-balanced accuracy " in out
    assert "chance (50.0 %)" in out
    content = json.loads((masked / "shape" / "test.json").read_text())
    assert content["metrics"]["n"] == 16
    assert content["chance"] == 0.5
    assert len((masked / "shape" / "test.csv").read_text().splitlines()) == 17
    others = write_toy(tmp_path / "others", train=16, val=8, test=8, size=32, seed=1)
    for data, expected in ((toy, 0), (others, 2)):
        code, _, err = typed("shape", masked, data, "--out", tmp_path / "out", *QUICK)
        assert code == expected, err
    assert "test.json: holds results on other data (fingerprint" in err
    assert json.loads((tmp_path / "out" / "shape" / "test.json").read_text()) == content
    code, _, err = typed("shape", whole, *QUICK)
    assert code == 2
    assert "sees the whole image" in err


def test_known_shapes_are_not_computed_again(toy, tmp_path):
    run = tmp_path / "run"
    assert typed("train", "early-mask", toy, *SMALL, "--epochs", 1, "--out", run)[0] == 0
    seen, command = {}, Shape(run, split="val", workers=0, device="cpu")
    shape_run(command, seen)
    assert {split: len(shape) for split, shape in seen.items()} == {"train": 32, "val": 16}
    blank = {split: np.zeros_like(shape) for split, shape in seen.items()}
    again, _ = shape_run(command, blank)
    assert again.balanced.value == 0.5
