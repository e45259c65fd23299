"""Pictures that look the same are found among many; pictures that do not are not."""

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from sightline.data.duplicates import NEAR, bits_apart, near_pairs, perceptual_hash, twins_across
from sightline.datasets.toy_images import make_toy


def test_near_pairs_are_those_of_trying_all_pairs():
    generator = np.random.default_rng(0)
    hashes = generator.integers(0, 2**64, 600, dtype=np.uint64)
    near = hashes[:300].copy()
    for i in range(300):
        for bit in generator.choice(64, i % 7, replace=False):
            near[i] ^= np.uint64(1 << int(bit))
    hashes = np.unique(np.concatenate([hashes, near]))
    sides = np.int64(1) << generator.integers(0, 3, len(hashes))
    sides[:50] = 5
    apart = np.array([bits_apart(hashes, np.full_like(hashes, one)) for one in hashes])
    on_two_sides = np.array([[bin(a | b).count("1") > 1 for b in sides] for a in sides])
    expected = np.argwhere(np.triu((apart <= NEAR) & on_two_sides, k=1))
    assert len(expected) > 50
    pairs = [
        (min(i, j), max(i, j), bits) for batch in near_pairs(hashes, sides) for i, j, bits in zip(*batch, strict=True)
    ]
    assert {pair[:2] for pair in pairs} == set(map(tuple, expected))
    assert all(apart[i, j] == bits for i, j, bits in pairs)
    assert list(near_pairs(hashes[:0], sides[:0])) == []


def test_twins_name_the_nearest_picture():
    hashes = np.array([0b0, 0b111, 0b11, 255 << 40, 0b1111], np.uint64)
    splits = np.array([0, 0, 2, 2, 1], np.int8)
    assert twins_across(hashes, splits, 3) == {(1, 0): [(4, 1)], (2, 0): [(2, 1)], (2, 1): [(2, 4)]}
    again = np.concatenate([hashes, hashes[:1]])
    assert twins_across(again, np.append(splits, np.int8(2)), 3)[2, 0] == [(2, 1), (5, 0)]
    assert twins_across(hashes[:0], splits[:0], 3) == {(1, 0): [], (2, 0): [], (2, 1): []}


def test_a_hash_survives_scaling_compression_and_light_but_tells_pictures_apart():
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in make_toy(24, size=64, seed=3).images]

    def squeezed(image: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=60)
        return Image.open(buffer)

    changes = [squeezed, lambda p: p.resize((160, 160)), lambda p: ImageEnhance.Brightness(p).enhance(1.05)]
    hashes = [perceptual_hash(picture) for picture in pictures]
    assert None not in hashes
    for change in changes:
        apart = [
            (one ^ perceptual_hash(change(picture))).bit_count() for one, picture in zip(hashes, pictures, strict=True)
        ]
        assert np.mean(np.array(apart) <= NEAR) > 0.9
    others = [(one ^ other).bit_count() for i, one in enumerate(hashes) for other in hashes[:i]]
    assert min(others) > NEAR
    assert np.mean(others) == pytest.approx(32, abs=6)
