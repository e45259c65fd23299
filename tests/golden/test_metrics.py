"""Figures about parts against numbers that the published iFAM code produced."""

import numpy as np
import pytest
import torch

from sightline.metrics.keypoints import (
    Places,
    adjusted_rand_index,
    contingency,
    dense_parts,
    keypoint_errors,
    normalised_mutual_information,
    parts_at,
)
from sightline.metrics.localization import estimates
from sightline.metrics.overlap import pooled_iou

from ..conftest import shared

CLOSE = 1e-4  # of figures in per cent


@pytest.fixture(scope="module")
def golden():
    with np.load(shared("golden", "metrics.npz")) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def size(golden):
    return tuple(golden["kp.image_size"].tolist())


def places(golden, split, size) -> Places:
    parts, keypoints, boxes = (torch.from_numpy(golden[f"kp.{split}.{name}"]) for name in ("maps", "landmarks", "bbox"))
    corners = torch.cat([boxes[:, 1:3], boxes[:, 1:3] + boxes[:, 3:]], dim=1)
    return Places.of(parts, keypoints[..., 1:], corners, size, published=True)


def test_centres_activity_and_landmarks(golden, size):
    fit = places(golden, "fit", size)
    np.testing.assert_allclose(fit.centres.reshape(40, -1), golden["kp.fit.centers"], atol=1e-6)
    np.testing.assert_array_equal(np.repeat(fit.active, 2, axis=1), golden["kp.fit.active"])
    np.testing.assert_allclose(fit.landmarks.reshape(40, -1), golden["kp.fit.annotations_normalised"], atol=1e-6)


def test_keypoint_error(golden, size):
    errors = keypoint_errors(places(golden, "fit", size), places(golden, "eval", size))
    assert 100 * np.nanmean(errors) == pytest.approx(float(golden["kp.value"]), abs=CLOSE)
    columns = np.stack([np.nansum(errors, axis=1), np.isfinite(errors).sum(axis=1)], axis=1)
    found = estimates({"keypoint_error": columns}, resamples=50)["keypoint_error"]
    assert 100 * found.value == pytest.approx(float(golden["kp.value"]), abs=CLOSE)


def agreement(found, true, counted) -> list[float]:
    """NMI and ARI in per cent."""
    counts = contingency(found, true, counted, (int(true.max()) + 1, 4)).sum(axis=0)
    return [100 * float(figure(counts)) for figure in (normalised_mutual_information, adjusted_rand_index)]


def test_parts_at_key_points(golden, size):
    keypoints = torch.from_numpy(golden["kp.eval.landmarks"])[..., 1:]
    found = parts_at(torch.from_numpy(golden["kp.eval.maps"]), keypoints, size, published=True).numpy()
    true = np.broadcast_to(np.arange(found.shape[1]), found.shape)
    expected = [float(golden["nmi.value"]), float(golden["ari.value"])]
    assert agreement(found, true, (keypoints[..., 2] > 0).numpy()) == pytest.approx(expected, abs=CLOSE)


def test_parts_at_every_pixel(golden, size):
    found = dense_parts(torch.from_numpy(golden["kp.eval.maps"]), size).numpy()
    true = golden["dense.gt_label"].astype(np.int64)
    expected = [float(golden["dense.nmi"]), float(golden["dense.ari"])]
    assert agreement(found, true, np.ones(true.shape, dtype=bool)) == pytest.approx(expected, abs=CLOSE)


def test_pooled_iou(golden):
    found = pooled_iou(torch.from_numpy(golden["kp.eval.maps"]), torch.from_numpy(golden["iou.gt_mask"]))
    expected = (float(golden["iou.fg_value"]), float(golden["iou.bg_value"]))
    assert [100 * value for value in found] == pytest.approx(expected, abs=CLOSE)
