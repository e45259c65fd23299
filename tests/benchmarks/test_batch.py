"""What the benchmark of batch predictions computes from what it sees."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import batch


def test_all_images_of_the_collection_differ():
    generator = np.random.default_rng(0)
    bases = [generator.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(2)]
    made = [batch.distinct_image(bases, number) for number in range(3000)]
    assert len({Image.open(io.BytesIO(content)).tobytes() for content in made}) == 3000
    assert {Image.open(io.BytesIO(content)).size for content in made} == {(32, 32)}


def test_the_rate_is_counted_between_the_first_and_the_last_part(tmp_path):
    for number, at in enumerate((100, 101, 104)):
        part = tmp_path / f"part-{number:08d}.parquet"
        part.touch()
        os.utime(part, (at, at))
    assert batch.steady_rate(tmp_path) == pytest.approx(2 * batch.CHUNK / 4)


def test_cpu_time_per_image_is_that_between_the_first_and_the_last_point():
    seen = [(1, 5.0, 0.5), (3, 6.0, 0.7)]
    points = [{"parts": parts, "cpu_seconds": {"command": one, "workers": two}} for parts, one, two in seen]
    usage = batch.Usage(3, ray=False, points=points)
    images = 2 * batch.CHUNK
    assert usage.cpu_per_image() == pytest.approx({"command": 1000 / images, "workers": 200 / images})
