"""Figures about parts against numbers that the published iFAM code produced."""

import numpy as np
import pytest
import torch

from sightline.data.batches import Batch
from sightline.metrics.keypoints import (
    PartLocations,
    adjusted_rand_index,
    contingency,
    dense_parts,
    keypoint_errors,
    normalised_mutual_information,
    parts_at_keypoints,
)
from sightline.metrics.localization import bootstrap_metrics
from sightline.metrics.overlap import localization_columns
from sightline.sight import Sight

from ..conftest import shared

CLOSE = 1e-4  # of figures in per cent


@pytest.fixture(scope="module")
def golden():
    with np.load(shared("golden", "metrics.npz")) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def size(golden):
    return tuple(golden["kp.image_size"].tolist())


def places(golden, split, size) -> PartLocations:
    parts, keypoints, boxes = (torch.from_numpy(golden[f"kp.{split}.{name}"]) for name in ("maps", "landmarks", "bbox"))
    corners = torch.cat([boxes[:, 1:3], boxes[:, 1:3] + boxes[:, 3:]], dim=1)
    return PartLocations.of(parts, keypoints[..., 1:], corners, size, published=True)


def test_centres_activity_and_landmarks(golden, size):
    fit = places(golden, "fit", size)
    np.testing.assert_allclose(fit.centres.reshape(40, -1), golden["kp.fit.centers"], atol=1e-6)
    np.testing.assert_array_equal(np.repeat(fit.active, 2, axis=1), golden["kp.fit.active"])
    np.testing.assert_allclose(fit.landmarks.reshape(40, -1), golden["kp.fit.annotations_normalised"], atol=1e-6)


def test_keypoint_error(golden, size):
    errors = keypoint_errors(places(golden, "fit", size), places(golden, "eval", size))
    assert 100 * np.nanmean(errors) == pytest.approx(float(golden["kp.value"]), abs=CLOSE)
    columns = np.stack([np.nansum(errors, axis=1), np.isfinite(errors).sum(axis=1)], axis=1)
    found = bootstrap_metrics({"keypoint_error": columns}, resamples=50)["keypoint_error"]
    assert 100 * found.value == pytest.approx(float(golden["kp.value"]), abs=CLOSE)


def agreement(found, true, counted) -> list[float]:
    """NMI and ARI in per cent."""
    counts = contingency(found, true, counted, (int(true.max()) + 1, 4)).sum(axis=0)
    return [100 * float(figure(counts)) for figure in (normalised_mutual_information, adjusted_rand_index)]


def test_parts_at_key_points(golden, size):
    keypoints = torch.from_numpy(golden["kp.eval.landmarks"])[..., 1:]
    found = parts_at_keypoints(torch.from_numpy(golden["kp.eval.maps"]), keypoints, size, published=True).numpy()
    true = np.broadcast_to(np.arange(found.shape[1]), found.shape)
    expected = [float(golden["nmi.value"]), float(golden["ari.value"])]
    assert agreement(found, true, (keypoints[..., 2] > 0).numpy()) == pytest.approx(expected, abs=CLOSE)


def test_parts_at_every_pixel(golden, size):
    found = dense_parts(torch.from_numpy(golden["kp.eval.maps"]), size).numpy()
    true = golden["dense.gt_label"].astype(np.int64)
    expected = [float(golden["dense.nmi"]), float(golden["dense.ari"])]
    assert agreement(found, true, np.ones(true.shape, dtype=bool)) == pytest.approx(expected, abs=CLOSE)


def test_pooled_iou(golden):
    masks, n = torch.from_numpy(golden["iou.gt_mask"]).bool(), len(golden["iou.gt_mask"])
    sight = Sight(torch.ones(n, 1, 1, dtype=torch.bool), parts=torch.from_numpy(golden["kp.eval.maps"]))
    truth = Batch(torch.zeros(n, 3, *masks.shape[1:]), torch.zeros(n), None, masks, torch.arange(n))
    both, either = localization_columns(sight, {}, truth)["pooled_iou"].sum(axis=0)
    assert 100 * both / either == pytest.approx(float(golden["iou.fg_value"]), abs=CLOSE)
