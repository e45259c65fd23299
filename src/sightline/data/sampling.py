"""Which images are measured or shown: drawn at random, or balanced over groups."""

from __future__ import annotations

import numpy as np


def sample_randomly(indices: np.ndarray, count: int, seed: int) -> np.ndarray:
    """At most `count` indices drawn without replacement, in their original order."""
    if len(indices) <= count:
        return indices
    return np.sort(np.random.default_rng([seed, 3]).choice(indices, count, replace=False))


def interleave_groups(groups: np.ndarray) -> np.ndarray:
    """An order of the images that takes the first of every group, then the second of every group, and so on."""
    return np.lexsort((groups, rank_in_group(groups)))


def rank_in_group(groups: np.ndarray) -> np.ndarray:
    ranks = np.empty(len(groups), dtype=np.int64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        ranks[members] = np.arange(len(members))
    return ranks


def sample_balanced(indices: np.ndarray, groups: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Random indices, equally many of every group (`groups` of all rows), sorted by group."""
    shuffled = generator.permutation(indices)
    own = groups[shuffled]
    # With more groups than images, this permutation decides at random which groups are represented.
    tie_break = generator.permutation(int(groups.max()) + 1)
    chosen = shuffled[np.lexsort((tie_break[own], rank_in_group(own)))[:count]]
    return chosen[np.argsort(groups[chosen], kind="stable")]
