"""Logistic regression on frozen features: of the whole image, of several scales (S²), or of crops alone (A²)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sight import Prediction, Sight
from ..vit.model import ViT

C_GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # inverse regularisation strengths to choose from


@dataclass(frozen=True)
class Linear:
    """Class logits = weight · x + bias of raw features, whether or not they were standardised for the fit."""

    weight: np.ndarray  # float64 [C, D]
    bias: np.ndarray  # float64 [C]
    c: float
    standardized: bool

    def logits(self, features: np.ndarray) -> np.ndarray:
        return (features @ self.weight.T + self.bias).astype(np.float32)

    @classmethod
    def of(cls, present: np.ndarray, coef: np.ndarray, intercept: np.ndarray, classes: int, c: float) -> Linear:
        """From scikit-learn's coefficients, which exist only for classes with examples; one row for two classes."""
        weight, bias = np.zeros((classes, coef.shape[1])), np.full(classes, -np.inf)
        if len(present) == 2:  # the log odds of the second class
            weight[present[1]], bias[present] = coef[0], (0.0, intercept[0])
        else:
            weight[present], bias[present] = coef, intercept
        bias[np.isinf(bias)] = bias[np.isfinite(bias)].min() - 1e4  # classes without an example are never predicted
        return cls(weight, bias, c, standardized=False)

    def on_raw(self, mean: np.ndarray, std: np.ndarray) -> Linear:
        """The same logits from features that are not standardised."""
        weight = self.weight / std
        return replace(self, weight=weight, bias=self.bias - weight @ mean, standardized=True)


def standardize_features(features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standardised features (float64), and the means and standard deviations that were removed."""
    features = features.astype(np.float64)
    mean, std = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-12)
    return (features - mean) / std, mean, std


def fit_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, *, c: float = 1.0, standardize: bool
) -> Linear:
    """Multinomial logistic regression with an L2 penalty, to convergence (scikit-learn's default of 100 iterations is
    too few for raw features)."""
    from sklearn.linear_model import LogisticRegression

    def fit(x: np.ndarray) -> Linear:
        model = LogisticRegression(C=c, max_iter=10_000).fit(x, labels)
        return Linear.of(model.classes_, model.coef_, model.intercept_, classes, c)

    if not standardize:
        return fit(features.astype(np.float64))
    x, mean, std = standardize_features(features)
    return fit(x).on_raw(mean, std)


def tune_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, score: Callable[[Linear], float]
) -> tuple[Linear, dict[float, float]]:
    """On standardised features, with the C that has the best validation score; ties go to the stronger penalty."""
    fitted = {c: fit_logistic(features, labels, classes, c=c, standardize=True) for c in C_GRID}
    scores = {c: score(linear) for c, linear in fitted.items()}
    best = max(scores, key=lambda c: (scores[c], -c))
    return fitted[best], scores


# ---- scales ----------------------------------------------------------------------------------------------------------


class ScaleProbe(nn.Module):
    """S²: the image at several scales, the larger ones in tiles of `size`; a linear head on the tiles' mean CLS tokens,
    concatenated over scales. Without classes it has no head and only embeds.
    """

    blind = True

    def __init__(self, vit: ViT, size: tuple[int, int], scales: Sequence[int] = (1, 2), classes: int = 0):
        super().__init__()
        self.vit, self.size, self.scales = vit, size, tuple(scales)
        self.head = nn.Linear(len(self.scales) * vit.config.width, classes) if classes else None

    def embed(self, images: Tensor) -> Tensor:
        """[B, scales·D] (Shi et al. 2024, sec. 3.1)"""
        h, w = self.size
        features = []
        for scale in self.scales:
            rows = resize_bicubic(images, (scale * h, scale * w)).split(h, dim=2)
            tokens = [self.vit(tile.contiguous()).cls for row in rows for tile in row.split(w, dim=3)]
            features.append(torch.stack(tokens).mean(dim=0))
        return torch.cat(features, dim=1)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        assert self.head is not None, "a predictor needs a head"
        tokens = self.embed(images)
        with torch.autocast(images.device.type, enabled=False):  # as in BoxProbe
            logits = self.head(tokens.to(self.head.weight.dtype))
        return Prediction(logits, sight, tokens.unflatten(1, (len(self.scales), -1)))

    def extra_repr(self) -> str:
        return f"size={self.size}, scales={self.scales}"


def resize_bicubic(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic, as in S², and antialiased for downsampling. The same tensor if it has that size already."""
    if images.shape[-2:] == size:
        return images
    downsampling = size[0] < images.shape[-2]
    return F.interpolate(images.float(), size, mode="bicubic", antialias=downsampling).to(images.dtype)


# ---- boxes -----------------------------------------------------------------------------------------------------------


class BoxProbe(nn.Module):
    """Each box is cropped and resized to `size` by itself; a linear head on their concatenated CLS tokens. Without
    classes it has no head and only embeds."""

    blind = True

    def __init__(self, vit: ViT, size: tuple[int, int], boxes: int = 1, classes: int = 0):
        super().__init__()
        self.vit, self.size, self.boxes = vit, size, boxes
        self.head = nn.Linear(boxes * vit.config.width, classes) if classes else None

    def embed(self, images: Tensor, sight: Sight) -> Tensor:
        """[B, k·D] (A², sec. 3)"""
        if sight.boxes is None or sight.boxes.shape[1] != self.boxes:
            found = "no boxes" if sight.boxes is None else f"{sight.boxes.shape[1]} boxes"
            raise ValueError(f"this probe needs {self.boxes} boxes per image, and the sight has {found}")
        if sight.keep is not None or sight.keep_pixels is not None:  # these hide pixels inside the boxes as well
            visible = sight.visible(tuple(images.shape[-2:]))
            images = torch.where(visible[:, None], images, self.vit.mean.to(images.dtype))
        return torch.cat(
            [self.vit(crop_and_resize(images, box, self.size)).cls for box in sight.boxes.unbind(dim=1)], dim=1
        )

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        assert self.head is not None, "a predictor needs a head"
        tokens = self.embed(images, sight)
        # In full precision also under autocast, as the head was fitted.
        with torch.autocast(images.device.type, enabled=False):
            logits = self.head(tokens.to(self.head.weight.dtype))
        return Prediction(logits, sight, tokens.unflatten(1, (self.boxes, -1)))

    def extra_repr(self) -> str:
        return f"size={self.size}, boxes={self.boxes}"


def crop_and_resize(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, c, *size]: one box [B, 4] of each image, cropped before it is resized (bilinear), so that nothing leaks
    in."""
    h, w = images.shape[-2:]
    if bool((boxes[:, :2] < 0).any() or (boxes[:, 2:] > boxes.new_tensor([w, h])).any()):
        raise ValueError(f"boxes extend beyond their images of {h}×{w} pixels")
    result = images.new_empty(*images.shape[:2], *size)
    shapes = boxes[:, 2:] - boxes[:, :2]
    for width, height in torch.unique(shapes, dim=0).tolist():  # mostly one shape for all
        same = ((shapes[:, 0] == width) & (shapes[:, 1] == height)).nonzero()[:, 0]
        left, top = boxes[same, 0], boxes[same, 1]
        rows = top[:, None] + torch.arange(height, device=boxes.device)
        columns = left[:, None] + torch.arange(width, device=boxes.device)
        crops = images[same[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
        if (height, width) != size:
            crops = F.interpolate(crops.float(), size, mode="bilinear", antialias=True).to(images.dtype)
        result[same] = crops
    return result
