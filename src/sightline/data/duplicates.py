"""Pictures that look the same: a perceptual hash, and the pairs of hashes a few bits apart without trying all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
from PIL import Image

SIDE = 32  # pixels of the small grey picture that is hashed
BITS = 64
NEAR = 4  # bits; scaled, recompressed or slightly brightened copies
FLAT = 2.0  # grey levels of spread: below, a picture is of one colour and looks like every other such
CROWD = 5000  # look-alikes: of more than that, each is still compared with that many
BLOCKS = 6  # of bits; hashes up to NEAR bits apart agree in at least two of them
ONES = np.array([number.bit_count() for number in range(256)], np.uint8)


def cosines() -> np.ndarray:
    """The discrete cosine transform (II) along one side: [frequency, pixel]."""
    pixel, frequency = np.arange(SIDE) + 0.5, np.arange(SIDE)
    return np.cos(np.pi / SIDE * np.outer(frequency, pixel)).astype(np.float32)


def lowest_frequencies() -> tuple[np.ndarray, np.ndarray]:
    """The 64 lowest two-dimensional frequencies but the constant one."""
    down, across = np.divmod(np.arange(SIDE * SIDE), SIDE)
    order = np.lexsort((down, down + across))[1 : BITS + 1]
    return down[order], across[order]


COSINES, LOWEST = cosines(), lowest_frequencies()


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits: which low frequencies are above their median. None for a picture of one colour."""
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("L"), np.float32)
    if small.std() < FLAT:
        return None
    strengths = (COSINES @ small @ COSINES.T)[LOWEST]
    return int.from_bytes(np.packbits(strengths > np.median(strengths)).tobytes(), "big")


def bits_apart(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """In how many bits two columns of hashes differ, row by row."""
    return ONES[(some ^ others)[:, None].view(np.uint8)].sum(axis=1)


def near_pairs(
    hashes: np.ndarray, sides: np.ndarray, within: int = NEAR
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pairs of different hashes (uint64) near each other and not on one and the same side; and how far apart they are.

    `sides` are sets as bits: which splits a hash occurs in. Sorted by every two of six blocks of bits, near hashes
    become neighbours, so that a million of them take seconds. A pair may come several times, a hash once per batch.
    """
    assert within <= BLOCKS - 2, "only then do near hashes agree in two blocks"
    edges = np.linspace(0, BITS, BLOCKS + 1).round().astype(int)
    blocks = [((1 << int(high - low)) - 1) << int(low) for low, high in pairwise(edges)]
    for one, other in combinations(blocks, 2):
        keys = hashes & np.uint64(one | other)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        start = np.arange(len(keys))
        for step in range(1, CROWD):
            start = start[start + step < len(keys)]
            start = start[keys[start] == keys[start + step]]
            if not len(start):
                break
            some, others = order[start], order[start + step]
            apart = bits_apart(hashes[some], hashes[others])
            near = (apart <= within) & _on_two_sides(sides[some] | sides[others])
            if near.any():
                yield some[near], others[near], apart[near]


def twins_across(hashes: np.ndarray, splits: np.ndarray, count: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each (later, earlier) split: the pictures of the later one with a twin in the earlier one, and that twin."""
    different, number = np.unique(hashes, return_inverse=True)
    first = np.full((count, len(different)), -1)
    first[splits[::-1], number[::-1]] = np.arange(len(hashes))[::-1]
    twin, best = first.copy(), np.where(first >= 0, 0, BITS + 1).astype(np.uint8)
    sides = ((first >= 0) << np.arange(count)[:, None]).sum(axis=0)
    for some, others, apart in near_pairs(different, sides):
        for one, other in ((some, others), (others, some)):
            for split in range(count):
                nearer = (first[split, other] >= 0) & (apart < best[split, one])
                best[split, one[nearer]] = apart[nearer]
                twin[split, one[nearer]] = first[split, other[nearer]]
    found = {}
    for earlier, later in combinations(range(count), 2):
        at = np.flatnonzero(splits == later)
        nearest = twin[earlier, number[at]]
        found[later, earlier] = list(zip(at[nearest >= 0].tolist(), nearest[nearest >= 0].tolist(), strict=True))
    return found


def _on_two_sides(sides: np.ndarray) -> np.ndarray:
    return (sides & (sides - 1)) != 0
