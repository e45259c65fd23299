"""Near-duplicate images: a perceptual hash, and a search for similar hashes that does not compare all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
from PIL import Image

SIDE = 32  # pixels of the small grey image that is hashed
BITS = 64
MAX_DISTANCE = 4  # bits, for near-duplicates: scaled, recompressed or slightly brightened copies
MIN_CONTRAST = 2.0  # standard deviation in grey levels; an image below is of one colour and similar to all such images
MAX_NEIGHBOURS = 5000  # in a larger set of similar hashes, each is compared with this many
BLOCKS = 6  # of bits; hashes up to MAX_DISTANCE bits apart agree in at least two of them
POPCOUNT = np.array([number.bit_count() for number in range(256)], np.uint8)

# The discrete cosine transform (II), [frequency, pixel], and its 64 lowest 2-D frequencies except the constant one.
COSINES = np.cos(np.pi / SIDE * np.outer(np.arange(SIDE), np.arange(SIDE) + 0.5)).astype(np.float32)
_DOWN, _ACROSS = np.divmod(np.arange(SIDE * SIDE), SIDE)
_ORDER = np.lexsort((_DOWN, _DOWN + _ACROSS))[1 : BITS + 1]
LOWEST = _DOWN[_ORDER], _ACROSS[_ORDER]


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits: which low frequencies are above their median. None for an image of one colour."""
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("L"), np.float32)
    if small.std() < MIN_CONTRAST:
        return None
    strengths = (COSINES @ small @ COSINES.T)[LOWEST]
    return int.from_bytes(np.packbits(strengths > np.median(strengths)).tobytes(), "big")


def hamming_distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The number of differing bits of two columns of hashes, row by row."""
    return POPCOUNT[(first ^ second)[:, None].view(np.uint8)].sum(axis=1)


def near_pairs(
    hashes: np.ndarray, split_sets: np.ndarray, within: int = MAX_DISTANCE
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pairs of different hashes (uint64) near each other that are not both in one and the same split; and distances.

    `split_sets` are bit sets: the splits a hash occurs in. Sorted by every two of six blocks of bits, near hashes
    become neighbours, so that a million of them take seconds. A pair may come several times, a hash once per batch.
    """
    assert within <= BLOCKS - 2, "only then do near hashes agree in two blocks"
    edges = np.linspace(0, BITS, BLOCKS + 1).round().astype(int)
    blocks = [((1 << int(high - low)) - 1) << int(low) for low, high in pairwise(edges)]
    for block, other_block in combinations(blocks, 2):
        keys = hashes & np.uint64(block | other_block)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        start = np.arange(len(keys))
        for step in range(1, MAX_NEIGHBOURS):
            start = start[start + step < len(keys)]
            start = start[keys[start] == keys[start + step]]
            if not len(start):
                break
            first, second = order[start], order[start + step]
            distance = hamming_distance(hashes[first], hashes[second])
            splits = split_sets[first] | split_sets[second]
            near = (distance <= within) & ((splits & (splits - 1)) != 0)  # more than one bit: more than one split
            if near.any():
                yield first[near], second[near], distance[near]


def find_near_duplicates(
    hashes: np.ndarray, splits: np.ndarray, count: int
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each (later, earlier) split: images of the later one with a near-duplicate in the earlier one, and that."""
    distinct, number = np.unique(hashes, return_inverse=True)
    example = np.full((count, len(distinct)), -1)  # the first image of each split with this hash
    example[splits[::-1], number[::-1]] = np.arange(len(hashes))[::-1]
    nearest, best = example.copy(), np.where(example >= 0, 0, BITS + 1).astype(np.uint8)
    split_sets = ((example >= 0) << np.arange(count)[:, None]).sum(axis=0)
    for first, second, distance in near_pairs(distinct, split_sets):
        for query, candidate in ((first, second), (second, first)):
            for split in range(count):
                nearer = (example[split, candidate] >= 0) & (distance < best[split, query])
                best[split, query[nearer]] = distance[nearer]
                nearest[split, query[nearer]] = example[split, candidate[nearer]]
    pairs = {}
    for earlier, later in combinations(range(count), 2):
        at = np.flatnonzero(splits == later)
        match = nearest[earlier, number[at]]
        pairs[later, earlier] = list(zip(at[match >= 0].tolist(), match[match >= 0].tolist(), strict=True))
    return pairs
