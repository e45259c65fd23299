"""Foreground without training: cluster patch tokens, then let image edges correct the result.

    foreground = find_foreground(features, images)             # [N, D, H, W] and [N, 3, h, w]; takes seconds
    foreground.masks                                           # bool [N, h, w]: of these images
    start = learn_foreground(features, foreground.masks, 4)    # perhaps of other features, which cost less
    start.gate                                                 # a linear foreground classifier of patch tokens
    start.prototypes                                           # [K, D]: parts, clustered inside the foreground

1. k-means with more clusters than parts. Several of them are background, so that no single one has to be all of it.
2. Backgrounds continue beyond the image, objects usually do not: patches whose clusters lie on the border of the image
   less often than others are foreground. A cluster may hold some of both by chance, so k-means starts several times and
   every patch has the mean over its clusters. Otsu's threshold separates the two kinds: there is no constant to tune.
3. The foreground mask is aligned with image edges by the guided filter, and a logistic regression on patch tokens is
   fitted to it (as FOUND does; Siméoni et al., 2023). Once: every further round loses thin structures. These may be the
   tokens of an earlier block and of smaller images than those that were clustered: they predict the mask as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..sight import cell_share
from ..vit.linear import linear
from .pixels import PixelSettings, pixel_foreground_probability

CLUSTERS = 32
STARTS = 8  # of k-means
SAMPLE = 50_000  # tokens that each start of k-means learns its clusters from
RIDGE = 1e-4  # of the logistic regression
CHUNK = 64  # images at a time


@dataclass(frozen=True)
class Foreground:
    """The foreground of some images, found without labels, masks or gradient steps on the ViT."""

    masks: Tensor  # bool [N, h, w]
    border_ratio: tuple[float, ...]  # deciles over the patches: 1 = their clusters touch the border as often as chance
    threshold: float  # patches with a smaller border ratio are foreground


@dataclass(frozen=True)
class ForegroundStart:
    """A selector, learned from the foreground of some images."""

    gate: Tensor  # [D + 1]: weights and bias of the foreground logit of a patch token
    prototypes: Tensor  # [K, D]: mean tokens of the parts
    coverage: float  # fraction of the patches that are foreground, over the images it was learned from


@torch.no_grad()
def find_foreground(
    features: Tensor, images: Tensor, *, clusters: int = CLUSTERS, starts: int = STARTS, seed: int = 0
) -> Foreground:
    """From patch tokens [N, D, H, W] of images [N, 3, h, w] in [0, 1]."""
    N, _, H, W = features.shape
    tokens, ratio = F.normalize(as_rows(features), dim=1), torch.zeros(N * H * W, device=features.device)
    for start in range(starts):
        cluster = kmeans(tokens, clusters, starts * seed + start)
        ratio += border_ratio(cluster, clusters, (N, H, W)).clamp(max=1.0)[cluster] / starts
    threshold = otsu(ratio)
    masks = align_with_edges((ratio < threshold).float().view(N, H, W), images)
    deciles = np.quantile(ratio.cpu().numpy(), np.linspace(0, 1, 11))
    return Foreground(masks, tuple(round(float(value), 3) for value in deciles), threshold)


@torch.no_grad()
def learn_foreground(features: Tensor, masks: Tensor, parts: int, *, seed: int = 0) -> ForegroundStart:
    """From patch tokens [N, D, H, W] of the images with these masks, bool [N, h, w]."""
    tokens, share = as_rows(features), cell_share(masks, features.shape[2:])
    gate = fit_logistic(tokens, share.flatten())
    logit = tokens @ gate[:-1] + gate[-1]
    foreground = logit > 0
    if int(foreground.sum()) < parts:  # too little to divide: the most likely tokens stand for it
        foreground = torch.zeros_like(foreground).scatter(0, logit.topk(parts).indices, True)
    part = kmeans(F.normalize(tokens[foreground], dim=1), parts, seed)
    prototypes = cluster_means(tokens[foreground], part, parts)
    return ForegroundStart(gate, prototypes, float(foreground.float().mean()))


def as_rows(features: Tensor) -> Tensor:
    """[N, D, H, W] -> [N·H·W, D], in full precision."""
    return features.permute(0, 2, 3, 1).flatten(0, 2).float()


def kmeans(points: Tensor, count: int, seed: int, iterations: int = 30) -> Tensor:
    """int64 [n]: the cluster of every point (Lloyd's algorithm from k-means++), on the points' device.

    Written here because scikit-learn's runs on the CPU, where a quarter of a million tokens take minutes.
    """
    generator = torch.Generator(points.device).manual_seed(seed)
    sample = points[torch.randperm(len(points), generator=generator, device=points.device)[:SAMPLE]]
    centres, squares = sample[:1], sample.square().sum(dim=1)
    distance = squared_distances(sample, squares, centres[0])
    for _ in range(count - 1):
        chosen = torch.multinomial(distance + 1e-12, 1, generator=generator)
        centres = torch.cat([centres, sample[chosen]])
        distance = torch.minimum(distance, squared_distances(sample, squares, centres[-1]))
    cluster = nearest(sample, centres)
    for _ in range(iterations):
        centres, before = cluster_means(sample, cluster, count, empty=centres), cluster
        cluster = nearest(sample, centres)
        if torch.equal(cluster, before):
            break  # nothing will change any more
    return nearest(points, centres)


def squared_distances(points: Tensor, squares: Tensor, centre: Tensor) -> Tensor:
    """[n]: from one point; `squares` are those of the lengths of `points`, so that these are read only once."""
    return (squares + centre.square().sum() - 2 * (points @ centre)).clamp_(min=0)


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """int64 [n]: of the centres; a matrix product, so that memory stays [n, k]."""
    return linear(points, 2 * centres).sub_(centres.square().sum(dim=1)).argmax(dim=1)


def cluster_means(points: Tensor, cluster: Tensor, count: int, empty: Tensor | None = None) -> Tensor:
    """[k, D]; clusters without members keep the row of `empty`."""
    members = torch.bincount(cluster, minlength=count)
    means = torch.zeros(count, points.shape[1], device=points.device).index_add_(0, cluster, points)
    means = means / members.clamp(min=1)[:, None]
    return means if empty is None else torch.where(members[:, None] > 0, means, empty)


def border_ratio(cluster: Tensor, count: int, shape: tuple[int, int, int]) -> Tensor:
    """[k]: how often each cluster's patches lie on the border of the image, relative to chance."""
    border = torch.ones(shape, dtype=torch.bool, device=cluster.device)
    border[:, 1:-1, 1:-1] = False
    members = torch.bincount(cluster, minlength=count).float().clamp(min=1)
    on_border = torch.bincount(cluster[border.flatten()], minlength=count).float()
    return on_border / members / border.float().mean()


def otsu(values: Tensor) -> float:
    """The threshold with the largest variance between the values on its two sides (Otsu, 1979); no value is below it if
    all are equal."""
    values, counts = values.double().unique(return_counts=True)
    if len(values) == 1:
        return float(values)
    below, sums, total = counts.cumsum(0)[:-1].double(), (counts * values).cumsum(0), counts.sum()
    between = (sums[-1] * below - total * sums[:-1]).square() / (below * (total - below))
    best = int(between.argmax())
    return float(values[best] + values[best + 1]) / 2


def align_with_edges(mask: Tensor, images: Tensor) -> Tensor:
    """bool [N, h, w]: a mask of patches [N, H, W] at the pixels, where it follows the edges of the image."""
    chunks = zip(mask.split(CHUNK), images.split(CHUNK), strict=True)
    return torch.cat([pixel_foreground_probability(*chunk, PixelSettings()) >= 0.5 for chunk in chunks])


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
