"""Foreground without training: cluster patch tokens, then let image edges correct the result.

    start = discover_foreground(features, images, parts=4)     # [N, D, H, W] and [N, 3, h, w]; takes seconds
    start.gate                                                 # a linear foreground classifier of patch tokens
    start.prototypes                                           # [K, D]: parts, clustered inside the foreground

1. k-means with more clusters than parts. Several of them are background, so that no single one has to be all of it.
2. Backgrounds continue beyond the image, objects usually do not: clusters that lie on the border of the image less
   often than the others are foreground. Otsu's threshold separates the two kinds, so there is no constant to tune.
3. The foreground mask is aligned with image edges by the guided filter, and a logistic regression on the tokens is
   fitted to it (as FOUND does; Siméoni et al., 2023). Once: every further round loses thin structures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .pixels import PixelSettings, pixel_foreground_probability

CLUSTERS = 16
RIDGE = 1e-4  # of the logistic regression
CHUNK = 64  # images at a time


@dataclass(frozen=True)
class ForegroundStart:
    """A selector found without labels, masks or gradient steps on the ViT."""

    gate: Tensor  # [D + 1]: weights and bias of the foreground logit of a patch token
    prototypes: Tensor  # [K, D]: mean tokens of the parts
    coverage: float  # fraction of the patches that are foreground, over the images it was found in
    border_ratio: tuple[float, ...]  # of each cluster: how often it touches the border, 1 = as often as chance


@torch.no_grad()
def discover_foreground(
    features: Tensor, images: Tensor, *, parts: int, clusters: int = CLUSTERS, seed: int = 0
) -> ForegroundStart:
    """From patch tokens [N, D, H, W] of images [N, 3, h, w] in [0, 1]."""
    N, D, H, W = features.shape
    tokens = features.permute(0, 2, 3, 1).reshape(-1, D).float()
    directions = F.normalize(tokens, dim=1)
    cluster = kmeans(directions, clusters, seed)
    ratio, size = border_ratio(cluster, clusters, (N, H, W))
    mask = (ratio < otsu(ratio.clamp(max=1.0), size))[cluster].float().view(N, H, W)
    gate = fit_logistic(tokens, align_with_edges(mask, images).flatten())
    logit = tokens @ gate[:-1] + gate[-1]
    foreground = logit > 0
    if int(foreground.sum()) < parts:  # too little to divide: the most likely tokens stand for it
        foreground = torch.zeros_like(foreground).scatter(0, logit.topk(parts).indices, True)
    part = kmeans(directions[foreground], parts, seed)
    prototypes = cluster_means(tokens[foreground], part, parts)
    ratios = tuple(round(float(value), 3) for value in ratio)
    return ForegroundStart(gate, prototypes, float(foreground.float().mean()), ratios)


def kmeans(points: Tensor, count: int, seed: int, iterations: int = 30) -> Tensor:
    """int64 [n]: the cluster of every point (Lloyd's algorithm from k-means++), on the points' device.

    Written here because scikit-learn's runs on the CPU, where a quarter of a million tokens take minutes.
    """
    generator = torch.Generator(points.device).manual_seed(seed)
    sample = points[torch.randperm(len(points), generator=generator, device=points.device)[:50_000]]
    centres = sample[:1]
    distance = (sample - centres).square().sum(dim=1)
    for _ in range(count - 1):
        chosen = torch.multinomial(distance + 1e-12, 1, generator=generator)
        centres = torch.cat([centres, sample[chosen]])
        distance = torch.minimum(distance, (sample - centres[-1]).square().sum(dim=1))
    for _ in range(iterations):
        centres = cluster_means(points, nearest(points, centres), count, empty=centres)
    return nearest(points, centres)


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """int64 [n]: of the centres; a matrix product, so that memory stays [n, k]."""
    return (2 * points @ centres.T - centres.square().sum(dim=1)).argmax(dim=1)


def cluster_means(points: Tensor, cluster: Tensor, count: int, empty: Tensor | None = None) -> Tensor:
    """[k, D]; clusters without members keep the row of `empty`."""
    members = torch.bincount(cluster, minlength=count)
    means = torch.zeros(count, points.shape[1], device=points.device).index_add_(0, cluster, points)
    means = means / members.clamp(min=1)[:, None]
    return means if empty is None else torch.where(members[:, None] > 0, means, empty)


def border_ratio(cluster: Tensor, count: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """[k]: how often each cluster's patches lie on the border of the image, relative to chance; and its size."""
    border = torch.ones(shape, dtype=torch.bool, device=cluster.device)
    border[:, 1:-1, 1:-1] = False
    members = torch.bincount(cluster, minlength=count).float().clamp(min=1)
    on_border = torch.bincount(cluster[border.flatten()], minlength=count).float()
    return on_border / members / border.float().mean(), members / len(cluster)


def otsu(values: Tensor, weights: Tensor) -> float:
    """The threshold with the largest weighted variance between the two sides (Otsu, 1979)."""
    order = values.argsort()
    values, weights = values[order], weights[order]
    below, total = weights.cumsum(0)[:-1], weights.sum()
    mean_below = (weights * values).cumsum(0)[:-1] / below
    mean_above = ((weights * values).sum() - below * mean_below) / (total - below)
    between = below * (total - below) * (mean_below - mean_above).square()
    best = int(between.argmax())
    return float(values[best] + values[best + 1]) / 2


def align_with_edges(mask: Tensor, images: Tensor) -> Tensor:
    """[N, H, W]: the fraction of each patch inside the mask once the mask follows the edges of the image."""
    (H, W), aligned = mask.shape[1:], []
    for patches, image in zip(mask.split(CHUNK), images.split(CHUNK), strict=True):
        pixels = pixel_foreground_probability(patches, image, PixelSettings()) >= 0.5
        aligned.append(F.adaptive_avg_pool2d(pixels[:, None].float(), (H, W))[:, 0])
    return torch.cat(aligned)


@torch.enable_grad()
def fit_logistic(tokens: Tensor, target: Tensor) -> Tensor:
    """[D + 1]: logistic regression with soft targets and a ridge, on standardised tokens, by L-BFGS."""
    mean, scale = tokens.mean(dim=0), tokens.std(dim=0) + 1e-6
    x = (tokens - mean) / scale
    weight, bias = torch.zeros_like(mean, requires_grad=True), torch.zeros((), device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x @ weight + bias, target) + RIDGE * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    weight = (weight / scale).detach()
    return torch.cat([weight, (bias - weight @ mean).detach()[None]])
