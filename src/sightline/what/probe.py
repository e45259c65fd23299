"""Logistic regression on frozen features: of the whole picture, or of nothing but boxes in it (A²)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sight import Prediction, Sight
from ..vit import ViT

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # of C, the inverse of the penalty


@dataclass(frozen=True)
class Linear:
    """Class scores = weight · x + bias, for raw features, whatever was done to them while fitting."""

    weight: np.ndarray  # float64 [C, D]
    bias: np.ndarray  # float64 [C]
    c: float
    standardized: bool

    def logits(self, features: np.ndarray) -> np.ndarray:
        return (features @ self.weight.T + self.bias).astype(np.float32)


def fit_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, *, c: float = 1.0, standardize: bool
) -> Linear:
    """Multinomial, L2, to convergence: scikit-learn's usual 100 steps stop short on raw features."""
    from sklearn.linear_model import LogisticRegression

    features = features.astype(np.float64)
    mean, std = np.zeros(features.shape[1]), np.ones(features.shape[1])
    if standardize:
        mean, std = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-12)
    model = LogisticRegression(C=c, max_iter=10_000).fit((features - mean) / std, labels)
    weight, bias = np.zeros((classes, features.shape[1])), np.full(classes, -np.inf)
    if len(model.classes_) == 2:  # one row of coefficients: the log odds of the second class
        weight[model.classes_[1]], bias[model.classes_[0]] = model.coef_[0], 0.0
        bias[model.classes_[1]] = model.intercept_[0]
    else:
        weight[model.classes_], bias[model.classes_] = model.coef_, model.intercept_
    bias[np.isinf(bias)] = bias[np.isfinite(bias)].min() - 1e4  # classes without an example are never the answer
    return Linear(weight / std, bias - (weight / std) @ mean, c, standardize)


def tune_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, score: Callable[[Linear], float]
) -> tuple[Linear, dict[float, float]]:
    """Standardised, with the C that scores best on validation data (the stronger penalty where they tie)."""
    fitted = {c: fit_logistic(features, labels, classes, c=c, standardize=True) for c in STRENGTHS}
    scores = {c: score(linear) for c, linear in fitted.items()}
    best = max(scores, key=lambda c: (scores[c], -c))
    return fitted[best], scores


# ---- boxes -----------------------------------------------------------------------------------------------------------


class BoxProbe(nn.Module):
    """Each box is cut out and brought to `size` by itself; a linear head answers from their CLS tokens, side by side.

    Without classes it has no head and only embeds.
    """

    def __init__(self, vit: ViT, size: tuple[int, int], boxes: int = 1, classes: int = 0):
        super().__init__()
        self.vit, self.size, self.boxes = vit, size, boxes
        self.head = nn.Linear(boxes * vit.config.width, classes) if classes else None

    def embed(self, images: Tensor, sight: Sight) -> Tensor:
        """[B, k·D] (A², sec. 3)"""
        if sight.boxes is None or sight.boxes.shape[1] != self.boxes:
            found = "no boxes" if sight.boxes is None else f"{sight.boxes.shape[1]} boxes"
            raise ValueError(f"this looks at {self.boxes} boxes in each picture, and the sight has {found}")
        if sight.keep is not None or sight.keep_pixels is not None:  # they hide something of the boxes as well
            visible = sight.visible(tuple(images.shape[-2:]))
            images = torch.where(visible[:, None], images, self.vit.mean.to(images.dtype))
        return torch.cat([self.vit(cut_out(images, box, self.size)).cls for box in sight.boxes.unbind(dim=1)], dim=1)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        assert self.head is not None, "a predictor needs a head"
        tokens = self.embed(images, sight)
        # In full precision also under autocast: a head that was fitted elsewhere must answer here as it did there.
        with torch.autocast(images.device.type, enabled=False):
            logits = self.head(tokens.to(self.head.weight.dtype))
        return Prediction(logits, sight, tokens.unflatten(1, (self.boxes, -1)))

    def extra_repr(self) -> str:
        return f"size={self.size}, boxes={self.boxes}"


def cut_out(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, c, *size]: one box [B, 4] of each image. Cut first, resized (bilinear) then, so that nothing leaks in."""
    h, w = images.shape[-2:]
    if bool((boxes[:, :2] < 0).any() or (boxes[:, 2:] > boxes.new_tensor([w, h])).any()):
        raise ValueError(f"boxes reach beyond their images of {h}×{w} pixels")
    result = images.new_empty(*images.shape[:2], *size)
    shapes = boxes[:, 2:] - boxes[:, :2]
    for width, height in torch.unique(shapes, dim=0).tolist():  # mostly one, the same for all
        alike = ((shapes[:, 0] == width) & (shapes[:, 1] == height)).nonzero()[:, 0]
        left, top = boxes[alike, 0], boxes[alike, 1]
        rows = top[:, None] + torch.arange(height, device=boxes.device)
        columns = left[:, None] + torch.arange(width, device=boxes.device)
        cut = images[alike[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
        if (height, width) != size:
            cut = F.interpolate(cut.float(), size, mode="bilinear", antialias=True).to(images.dtype)
        result[alike] = cut
    return result
