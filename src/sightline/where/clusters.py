"""TTR's clusters: which patches of recent pictures belong together, and which of them show the subject."""

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


def cluster(tokens: Tensor, how: Clustering) -> Tensor:
    """int64 [n]: of tokens [n, P] in the order of pictures and patches (TTR, as published): principal components
    without centring, smoothed along the row of tokens, then k-means."""
    from scipy.ndimage import gaussian_filter1d
    from sklearn.cluster import KMeans

    tokens = tokens.float()
    with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []):
        torch.manual_seed(how.seed)
        axes = torch.svd_lowrank(tokens, q=min(how.rank, *tokens.shape))[2][:, : how.components]
    smooth = gaussian_filter1d((tokens @ axes).detach().cpu().numpy(), how.sigma, axis=0)
    found = KMeans(how.clusters, random_state=how.seed, n_init="auto").fit_predict(smooth)
    return torch.from_numpy(found.astype(np.int64)).to(tokens.device)


def subject(tokens: Tensor, labels: Tensor, general: Tensor) -> int:
    """Which of the clusters in a picture, tokens [N, P], holds the subject: the one whose mean has the *lowest* product
    with the words, for CLIP's patches are opposed to what they show (TTR, as published)."""
    here = labels.unique()
    means = torch.stack([tokens[labels == each].mean(dim=0) for each in here])
    return int(here[(means @ general.to(means.dtype)).argmin()])
