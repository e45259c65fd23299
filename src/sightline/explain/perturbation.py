"""Perturbation curves: how accuracy falls as pixels are blackened in the order of an explanation map.

A faithful map makes accuracy fall early when its most relevant pixels go first (positive perturbation) and late when
its least relevant pixels go first (negative perturbation). A random map is the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..metrics.estimates import Estimate
from ..metrics.inference import sight_for, sight_for_prediction
from ..metrics.overlap import patch_grid
from ..sight import Method, Sight, cell_share
from .estimates import bootstrap_mean

SHARES = tuple(k / 10 for k in range(1, 10))
STEP = 0.1
MAX_TRAPEZOID = STEP * (len(SHARES) - 1)  # the area under a curve that is 1 throughout
Direction = Literal["positive", "negative"]
DIRECTIONS: tuple[Direction, ...] = ("positive", "negative")
CLASS_SPECIFIC = ("gae", "gradient")
TRUE_CLASS = ", true class"  # suffix of a map that explains the true class instead of the predicted one
RANDOM = "random"
Size = tuple[int, int]


# ---- maps ------------------------------------------------------------------------------------------------------------


def explanation_map(
    method: Method, images: Tensor, sight: Sight, name: str, classes: Tensor | None = None
) -> Tensor | None:
    """[B, H, W]: the map of this name; None if the method has none."""
    from ..where.relevance import MAPS, has_relevance_map

    if name in MAPS and has_relevance_map(method):
        return MAPS[name](method, images, classes)
    if name == "sight":
        return sight_map(sight, image_size(images))
    return method.maps(images).get(name)


def map_names(method: Method, images: Tensor, sight: Sight) -> list[str]:
    """Names of all maps that `explanation_map` can compute, and of the random map."""
    from ..where.relevance import MAPS, has_relevance_map

    relevance = MAPS if has_relevance_map(method) else ()
    of_sight = ["sight"] if sight_map(sight, image_size(images)) is not None else []
    return list(dict.fromkeys([*relevance, *of_sight, *method.maps(images), RANDOM]))


def sight_map(sight: Sight, size: Size) -> Tensor | None:
    """Visible fraction, or foreground probability, of every patch; None if the model sees everything by definition."""
    if sight.parts is not None:
        return 1 - sight.parts[:, -1].float()
    if sight.keep is not None and sight.keep[0].numel() > 1 and sight.keep_pixels is None:
        return sight.keep.float()
    if sight.keep_pixels is None and sight.boxes is None:
        return None
    return cell_share(sight.visible(size), patch_grid(sight, {}, size))


def random_maps(indices: Sequence[int], grid: Size, seed: int) -> Tensor:
    """[B, H, W]: one random map per image, the same whatever batch the image is in."""
    return torch.from_numpy(np.stack([np.random.default_rng([seed, 11, i]).random(grid) for i in indices])).float()


def compute_maps(
    method: Method, images: Tensor, sight: Sight, names: Sequence[str], random: Callable[[Size], Tensor],
    classes: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The named maps that the method has, and the random map on the same grid."""
    computed = {name: explanation_map(method, images, sight, name, classes) for name in names}
    maps = {name: one for name, one in computed.items() if one is not None}
    return maps | {RANDOM: random(patch_grid(sight, maps, image_size(images))).to(images.device)}


def upsample_map(maps: Tensor, size: Size) -> Tensor:
    return F.interpolate(maps[:, None].float(), size, mode="bilinear")[:, 0]


def image_size(images: Tensor) -> Size:
    return images.shape[2], images.shape[3]


# ---- perturbation ----------------------------------------------------------------------------------------------------


def pixel_ranks(maps: Tensor, size: Size, direction: Direction) -> Tensor:
    """int64 [B, h, w]: the position at which each pixel is blackened; ties in reading order."""
    pixels = upsample_map(maps, size).flatten(1)
    order = pixels.argsort(dim=1, descending=direction == "positive", stable=True)
    positions = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, positions).unflatten(1, size)


def blacken(images: Tensor, ranks: Tensor, share: float) -> Tensor:
    """Zero this share of the pixels on all channels, before normalisation (RobustViT, App. N)."""
    return images * (ranks >= int(share * ranks[0].numel()))[:, None]


def predict_classes(method: Method, images: Tensor, masks: Tensor | None) -> Tensor:
    return method.judge(images, sight_for_prediction(method, images, masks)).logits.argmax(dim=1)


@torch.no_grad()
def predictions_while_blackened(method: Method, images: Tensor, masks: Tensor | None, maps: Tensor) -> Tensor:
    """int64 [B, directions, shares]: predicted classes."""
    predictions = []
    for direction in DIRECTIONS:
        ranks = pixel_ranks(maps, image_size(images), direction)
        predictions += [predict_classes(method, blacken(images, ranks, share), masks) for share in SHARES]
    return torch.stack(predictions, dim=1).unflatten(1, (len(DIRECTIONS), len(SHARES)))


@torch.no_grad()
def perturb(
    method: Method, images: Tensor, masks: Tensor | None, labels: Tensor, names: Sequence[str],
    random: Callable[[Size], Tensor],
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Predictions [B] on the intact images; the maps; and the predictions under perturbation by each map.

    Class-specific maps are tested twice: explaining the predicted class, and explaining the true class.
    """
    sight = sight_for(method, images, masks)
    intact = predict_classes(method, images, masks)
    maps = compute_maps(method, images, sight, names, random, intact)
    predictions = {name: predictions_while_blackened(method, images, masks, one) for name, one in maps.items()}
    wrong = (intact != labels).nonzero()[:, 0]
    for name in [name for name in CLASS_SPECIFIC if name in maps]:
        predictions[name + TRUE_CLASS] = predictions[name].clone()
        if len(wrong):  # for correctly classified images both maps are the same
            true_map = explanation_map(method, images[wrong], sight[wrong], name, labels[wrong])
            assert true_map is not None
            own_masks = None if masks is None else masks[wrong]
            perturbed = predictions_while_blackened(method, images[wrong], own_masks, true_map)
            predictions[name + TRUE_CLASS][wrong] = perturbed
    return intact, maps, predictions


# ---- figures ---------------------------------------------------------------------------------------------------------


def trapezoid(correct: np.ndarray) -> np.ndarray:
    """[n]: the area under each image's curve [n, 9], from 0.1 to 0.9."""
    return STEP * (correct.sum(axis=1) - (correct[:, 0] + correct[:, -1]) / 2)


@dataclass(frozen=True)
class Curve:
    """Accuracy while pixels are blackened in the order of one map."""

    map: str
    direction: Direction
    accuracy: tuple[Estimate, ...]  # at each of SHARES
    mean: Estimate  # over SHARES
    trapezoid: Estimate  # the area from 0.1 to 0.9; at most 0.8
    unchanged: Estimate  # fraction of predictions equal to those on the intact images, averaged over SHARES
    gain: Estimate | None = None  # of the mean over the random map's; positive: more faithful than random


def curves(labels: np.ndarray, intact: np.ndarray, predictions: Mapping[str, np.ndarray]) -> list[Curve]:
    """From predictions [n, directions, shares] under every map, including the random one."""
    correct = {name: (some == labels[:, None, None]).astype(np.float64) for name, some in predictions.items()}
    found = []
    for name, predicted in predictions.items():
        same = (predicted == intact[:, None, None]).astype(np.float64)
        for k, direction in enumerate(DIRECTIONS):
            own, baseline = correct[name][:, k], correct[RANDOM][:, k].mean(axis=1)
            pair = (baseline, own.mean(axis=1)) if direction == "positive" else (own.mean(axis=1), baseline)
            found.append(
                Curve(
                    name, direction, tuple(bootstrap_mean(column) for column in own.T),
                    bootstrap_mean(own.mean(axis=1)), bootstrap_mean(trapezoid(own), maximum=MAX_TRAPEZOID),
                    bootstrap_mean(same[:, k].mean(axis=1)), bootstrap_mean(*pair) if name != RANDOM else None,
                )
            )  # fmt: skip
    return found


def per_image_columns(labels: np.ndarray, predictions: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Accuracy of every image averaged over SHARES, by which two runs are compared."""
    return {
        f"{direction} {name}": (predicted[:, k] == labels[:, None]).mean(axis=1)
        for name, predicted in predictions.items()
        for k, direction in enumerate(DIRECTIONS)
    }


def faithfulness_summary(found: Sequence[Curve]) -> str:
    """Which maps are significantly more faithful than a random map in both directions; empty without any map."""
    verdicts: dict[str, list[str]] = {"significantly": [], "not significantly": [], "significantly less": []}
    for name in dict.fromkeys(curve.map for curve in found if curve.gain is not None):
        gains = [curve.gain for curve in found if curve.map == name and curve.gain is not None]
        if all(gain.low > 0 for gain in gains):
            verdicts["significantly"].append(name)
        else:
            worse = any(gain.high < 0 for gain in gains)
            verdicts["significantly less" if worse else "not significantly"].append(name)
    listed = [f"{verdict}: {'; '.join(names)}" for verdict, names in verdicts.items() if names]
    if not listed:
        return ""
    n = found[0].mean.n
    return f"More faithful than a random map under positive and negative perturbation (n = {n:,}): {', '.join(listed)}."
