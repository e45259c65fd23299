"""The affine warp of iFAM's equivariance loss and its inverse, as published."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sightline.data.augment import Affine, random_affine, uniforms, unwarp_affine, warp_affine

from ..conftest import shared
from .augmenting import overlap, squares


def golden() -> dict[str, np.ndarray]:
    with np.load(shared("golden", "losses.npz")) as file:
        return {key: file[key] for key in file.files}


def test_warp_equals_the_published_one():
    file = golden()
    angle, x, y, scale, *_ = file["warp.params"].tolist()
    images = load_file(shared("golden", "ifam_tiny.safetensors"))["inputs.images"]
    warped = warp_affine(images, Affine(angle, x, y, scale))
    torch.testing.assert_close(warped, torch.from_numpy(file["warp.images_warped"]), rtol=0, atol=1e-4)


def test_unwarp_equals_the_published_one_exactly():
    file = golden()
    cases = [key.split(".")[0] for key in file if key.endswith(".equiv_maps")]
    assert len(cases) == 9
    for case in cases:
        angle, x, y, scale, h, w = file[f"{case}.transform"].tolist()
        maps = unwarp_affine(torch.from_numpy(file[f"{case}.equiv_maps"]), Affine(angle, x, y, scale), (int(h), int(w)))
        assert torch.equal(maps, torch.from_numpy(file[f"{case}.equiv_maps_inverted"])), case


def test_unwarp_undoes_warp():
    masks = squares(12, (96, 128)).masks
    for step in range(5):
        affine = random_affine((96, 128), seed=0, step=step)
        back = unwarp_affine(warp_affine(masks[:, None].float(), affine), affine, (96, 128))[:, 0] > 0.5
        valid = unwarp_affine(warp_affine(torch.ones(12, 1, 96, 128), affine), affine, (96, 128))[:, 0] > 0.5
        assert (overlap(back, masks & valid) > 0.9).all()


def test_random_affine_ranges_and_determinism():
    draws = [random_affine((84, 112), seed=4, step=step) for step in range(400)]
    assert draws[7] == random_affine((84, 112), seed=4, step=7)
    assert draws[7] != random_affine((84, 112), seed=5, step=7)
    of_images = torch.cat([uniforms(4, epoch, torch.arange(10), 20).flatten() for epoch in range(10)])
    assert (of_images - (draws[7].angle / 90 + 1) / 2).abs().min() > 1e-9
    angle, x, y, scale = np.array([(a.angle, a.x, a.y, a.scale) for a in draws]).T
    assert (x == x.round()).all()
    for values, low, high in ((angle, -90, 90), (x, -12, 12), (y, -9, 9), (scale, 0.8, 1.4)):
        assert low <= values.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < values.max() <= high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_warp_and_unwarp_are_differentiable_in_any_dtype(dtype):
    affine = Affine(20.0, 1.0, 0.0, 1.1)
    maps = torch.rand(2, 3, 80, 90, dtype=dtype, generator=torch.Generator().manual_seed(0), requires_grad=True)
    back = unwarp_affine(warp_affine(maps, affine), affine, (80, 90))
    assert back.dtype == dtype
    torch.testing.assert_close(
        warp_affine(maps, affine).double(), warp_affine(maps.double(), affine), rtol=0.01, atol=1e-4
    )
    back.sum().backward()
    assert (maps.grad != 0).float().mean() > 0.5
