"""TTR: clusters of the patches of recent images, and which of them shows the subject."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Clustering:
    clusters: int = 3
    components: int = 3
    rank: int = 16
    sigma: float = 0.72
    seed: int = 0


def cluster_tokens(tokens: Tensor, settings: Clustering) -> Tensor:
    """int64 [n]: the cluster of each of the tokens [n, P], ordered by image and patch (TTR, as published): principal
    components without centring, smoothed along the sequence of tokens, then k-means."""
    from scipy.ndimage import gaussian_filter1d
    from sklearn.cluster import KMeans

    tokens = tokens.float()
    with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []):
        torch.manual_seed(settings.seed)
        axes = torch.svd_lowrank(tokens, q=min(settings.rank, *tokens.shape))[2][:, : settings.components]
    smooth = gaussian_filter1d((tokens @ axes).detach().cpu().numpy(), settings.sigma, axis=0)
    labels = KMeans(settings.clusters, random_state=settings.seed, n_init="auto").fit_predict(smooth)
    return torch.from_numpy(labels.astype(np.int64)).to(tokens.device)


def subject_cluster(tokens: Tensor, labels: Tensor, general: Tensor) -> int:
    """The cluster of an image's tokens [N, P] that shows the subject: the one whose mean has the *lowest* inner product
    with the general prompt's embedding, because CLIP's patch tokens point away from what they show (TTR, as published).
    """
    present = labels.unique()
    means = torch.stack([tokens[labels == label].mean(dim=0) for label in present])
    return int(present[(means @ general.to(means.dtype)).argmin()])
