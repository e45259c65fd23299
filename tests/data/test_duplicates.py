"""Near-duplicate images are found, different images are not."""

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from sightline.data.duplicates import MAX_DISTANCE, find_near_duplicates, hamming_distance, near_pairs, perceptual_hash
from sightline.datasets.toy_images import make_toy


def test_near_pairs_equal_the_comparison_of_all_pairs():
    generator = np.random.default_rng(0)
    hashes = generator.integers(0, 2**64, 600, dtype=np.uint64)
    near = hashes[:300].copy()
    for i in range(300):
        for bit in generator.choice(64, i % 7, replace=False):
            near[i] ^= np.uint64(1 << int(bit))
    hashes = np.unique(np.concatenate([hashes, near]))
    split_sets = np.int64(1) << generator.integers(0, 3, len(hashes))
    split_sets[:50] = 5
    distance = np.array([hamming_distance(hashes, np.full_like(hashes, one)) for one in hashes])
    in_two_splits = np.array([[bin(a | b).count("1") > 1 for b in split_sets] for a in split_sets])
    expected = np.argwhere(np.triu((distance <= MAX_DISTANCE) & in_two_splits, k=1))
    assert len(expected) > 50
    pairs = [
        (min(i, j), max(i, j), bits)
        for batch in near_pairs(hashes, split_sets)
        for i, j, bits in zip(*batch, strict=True)
    ]
    assert {pair[:2] for pair in pairs} == set(map(tuple, expected))
    assert all(distance[i, j] == bits for i, j, bits in pairs)
    assert list(near_pairs(hashes[:0], split_sets[:0])) == []


def test_near_duplicates_name_the_nearest_image():
    hashes = np.array([0b0, 0b111, 0b11, 255 << 40, 0b1111], np.uint64)
    splits = np.array([0, 0, 2, 2, 1], np.int8)
    assert find_near_duplicates(hashes, splits, 3) == {(1, 0): [(4, 1)], (2, 0): [(2, 1)], (2, 1): [(2, 4)]}
    again = np.concatenate([hashes, hashes[:1]])
    assert find_near_duplicates(again, np.append(splits, np.int8(2)), 3)[2, 0] == [(2, 1), (5, 0)]
    assert find_near_duplicates(hashes[:0], splits[:0], 3) == {(1, 0): [], (2, 0): [], (2, 1): []}


def test_the_hash_is_robust_to_scaling_compression_and_brightness_but_distinguishes_images():
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in make_toy(24, size=64, seed=3).images]

    def squeezed(image: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=60)
        return Image.open(buffer)

    changes = [squeezed, lambda p: p.resize((160, 160)), lambda p: ImageEnhance.Brightness(p).enhance(1.05)]
    hashes = [perceptual_hash(image) for image in images]
    assert None not in hashes
    for change in changes:
        distances = [
            (one ^ perceptual_hash(change(image))).bit_count() for one, image in zip(hashes, images, strict=True)
        ]
        assert np.mean(np.array(distances) <= MAX_DISTANCE) > 0.9
    others = [(one ^ other).bit_count() for i, one in enumerate(hashes) for other in hashes[:i]]
    assert min(others) > MAX_DISTANCE
    assert np.mean(others) == pytest.approx(32, abs=6)
