"""Logistic regression on frozen features: of the whole picture, at scales (S²), or of nothing but boxes in it (A²)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sight import Prediction, Sight
from ..vit.model import ViT

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

    @classmethod
    def of(cls, present: np.ndarray, coef: np.ndarray, intercept: np.ndarray, classes: int, c: float) -> Linear:
        """From the rows that scikit-learn gives for the classes there are examples of; one row is for two classes."""
        weight, bias = np.zeros((classes, coef.shape[1])), np.full(classes, -np.inf)
        if len(present) == 2:  # the log odds of the second class
            weight[present[1]], bias[present] = coef[0], (0.0, intercept[0])
        else:
            weight[present], bias[present] = coef, intercept
        bias[np.isinf(bias)] = bias[np.isfinite(bias)].min() - 1e4  # classes without an example are never the answer
        return cls(weight, bias, c, standardized=False)

    def on_raw(self, mean: np.ndarray, std: np.ndarray) -> Linear:
        """The same answers from features as they were before they were standardised."""
        weight = self.weight / std
        return replace(self, weight=weight, bias=self.bias - weight @ mean, standardized=True)


def standardised(features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features (float64), and the means and deviations that have been taken out of them."""
    features = features.astype(np.float64)
    mean, std = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-12)
    return (features - mean) / std, mean, std


def fit_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, *, c: float = 1.0, standardize: bool
) -> Linear:
    """Multinomial, L2, to convergence: scikit-learn's usual 100 steps stop short on raw features."""
    from sklearn.linear_model import LogisticRegression

    def fit(x: np.ndarray) -> Linear:
        model = LogisticRegression(C=c, max_iter=10_000).fit(x, labels)
        return Linear.of(model.classes_, model.coef_, model.intercept_, classes, c)

    if not standardize:
        return fit(features.astype(np.float64))
    x, mean, std = standardised(features)
    return fit(x).on_raw(mean, std)


def tune_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, score: Callable[[Linear], float]
) -> tuple[Linear, dict[float, float]]:
    """Standardised, with the C that scores best on validation data (the stronger penalty where they tie)."""
    fitted = {c: fit_logistic(features, labels, classes, c=c, standardize=True) for c in STRENGTHS}
    scores = {c: score(linear) for c, linear in fitted.items()}
    best = max(scores, key=lambda c: (scores[c], -c))
    return fitted[best], scores


# ---- scales ----------------------------------------------------------------------------------------------------------


class ScaleProbe(nn.Module):
    """The picture at several scales, the larger ones in tiles of `size`; a linear head answers from the tiles' mean CLS
    tokens, scale beside scale (S²). Without classes it has no head and only embeds.
    """

    blind = True

    def __init__(self, vit: ViT, size: tuple[int, int], scales: Sequence[int] = (1, 2), classes: int = 0):
        super().__init__()
        self.vit, self.size, self.scales = vit, size, tuple(scales)
        self.head = nn.Linear(len(self.scales) * vit.config.width, classes) if classes else None

    def embed(self, images: Tensor) -> Tensor:
        """[B, scales·D] (Shi et al. 2024, sec. 3.1)"""
        h, w = self.size
        found = []
        for scale in self.scales:
            rows = bicubic(images, (scale * h, scale * w)).split(h, dim=2)
            tokens = [self.vit(tile.contiguous()).cls for row in rows for tile in row.split(w, dim=3)]
            found.append(torch.stack(tokens).mean(dim=0))
        return torch.cat(found, dim=1)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        assert self.head is not None, "a predictor needs a head"
        tokens = self.embed(images)
        with torch.autocast(images.device.type, enabled=False):  # as of boxes, below
            logits = self.head(tokens.to(self.head.weight.dtype))
        return Prediction(logits, sight, tokens.unflatten(1, (len(self.scales), -1)))

    def extra_repr(self) -> str:
        return f"size={self.size}, scales={self.scales}"


def bicubic(images: Tensor, size: tuple[int, int]) -> Tensor:
    """As S² enlarges; antialiased where it makes smaller. The same tensor where it has that size."""
    if images.shape[-2:] == size:
        return images
    smaller = size[0] < images.shape[-2]
    return F.interpolate(images.float(), size, mode="bicubic", antialias=smaller).to(images.dtype)


# ---- boxes -----------------------------------------------------------------------------------------------------------


class BoxProbe(nn.Module):
    """Each box is cut out and brought to `size` by itself; a linear head answers from their CLS tokens, side by side.

    Without classes it has no head and only embeds.
    """

    blind = True

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
