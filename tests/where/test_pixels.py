"""From patches to pixels: the guided filter against its definition, and what must hold of it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sightline.where.pixels import PixelSettings, guided_filter, pixel_foreground_probability, solve_3x3

SMOOTH = PixelSettings().edge_variance


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- the filter as it is written down --------------------------------------------------------------------------------


def bilinear(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[H, W] -> [h, w]: centres of pixels on centres of cells, the border repeated."""

    def along(values, length):
        places = ((np.arange(length) + 0.5) * len(values) / length - 0.5).clip(0, len(values) - 1)
        before = np.floor(places).astype(int)
        after = np.minimum(before + 1, len(values) - 1)
        part = (places - before)[:, None]
        return (1 - part) * values[before] + part * values[after]

    return along(along(values, size[0]).T, size[1]).T


def by_windows(probabilities: np.ndarray, image: np.ndarray, radius: int, smooth: float, step: int) -> np.ndarray:
    """The fast guided filter of one image [3, h, w], window by window (He and Sun, 2015, algorithm 2)."""
    size = h, w = image.shape[1:]
    small = image.reshape(3, h // step, step, w // step, step).mean(axis=(2, 4))
    coarse = bilinear(probabilities, small.shape[1:])
    r = max(1, round(radius / step))

    def window(y, x):
        return slice(max(0, y - r), y + r + 1), slice(max(0, x - r), x + r + 1)

    lines = np.zeros((4, *small.shape[1:]))
    for y, x in np.ndindex(*small.shape[1:]):
        colours = small[:, *window(y, x)].reshape(3, -1)
        share = coarse[window(y, x)].reshape(-1)
        apart = colours - colours.mean(axis=1, keepdims=True)
        n = len(share)
        slope = np.linalg.solve(apart @ apart.T / n + smooth * np.eye(3), apart @ (share - share.mean()) / n)
        lines[:, y, x] = *slope, share.mean() - slope @ colours.mean(axis=1)
    means = np.zeros_like(lines)
    for y, x in np.ndindex(*small.shape[1:]):
        means[:, y, x] = lines[:, *window(y, x)].mean(axis=(1, 2))
    means = np.stack([bilinear(line, size) for line in means])
    return (means[:3] * image).sum(axis=0) + means[3]


@pytest.mark.parametrize(
    ("size", "grid", "radius", "step"),
    [((32, 32), (4, 4), 8, 2), ((24, 40), (3, 5), 5, 2), ((64, 64), (4, 4), 16, 4), ((64, 72), (8, 9), 1, 4)],
)
@pytest.mark.parametrize("smooth", [SMOOTH, 0.1])
def test_it_is_the_fast_guided_filter(size, grid, radius, step, smooth):
    probabilities, images = drawn(2, *grid, dtype=torch.float64), drawn(2, 3, *size, seed=1, dtype=torch.float64)
    found = guided_filter(probabilities, images, radius, smooth)
    for one, share, image in zip(found, probabilities, images, strict=True):
        np.testing.assert_allclose(
            one.numpy(), by_windows(share.numpy(), image.numpy(), radius, smooth, step), atol=1e-9
        )


@pytest.mark.parametrize("kind", ["colours", "greys", "black and white"])
def test_single_precision_is_precise_enough(kind):
    """Without colour two of the three directions have no variance but the ridge."""
    blocks = drawn(2, 3, 8, 8, seed=2).repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    grey = blocks[:, :1].expand(-1, 3, -1, -1)
    images = {"colours": blocks, "greys": grey, "black and white": (grey > 0.5).float()}[kind]
    probabilities = drawn(2, 4, 4)
    precise = guided_filter(probabilities.double(), images.double(), 16, SMOOTH)
    assert (guided_filter(probabilities, images, 16, SMOOTH) - precise).abs().max() < 5e-5


@pytest.mark.parametrize("size", [(64, 64), (66, 70), (35, 37)])
def test_the_filter_is_symmetric(size):
    """Also where the picture's side is not a multiple of the filter's step."""
    probabilities, images = drawn(1, 4, 5), drawn(1, 3, *size, seed=1)
    for way in ([1], [2], [1, 2]):
        mirrored = guided_filter(probabilities.flip(way), images.flip([axis + 1 for axis in way]), 8, SMOOTH)
        torch.testing.assert_close(
            mirrored, guided_filter(probabilities, images, 8, SMOOTH).flip(way), atol=1e-4, rtol=0
        )
    transposed = guided_filter(probabilities.mT, images.mT, 8, SMOOTH)
    torch.testing.assert_close(transposed, guided_filter(probabilities, images, 8, SMOOTH).mT, atol=1e-4, rtol=0)


# ---- what must hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("guide", [0, 1, 16])
def test_constant_probabilities_stay_constant(share, guide):
    found = pixel_foreground_probability(
        torch.full((2, 4, 4), share), drawn(2, 3, 64, 64), PixelSettings(guide_radius=guide)
    )
    assert (found - share).abs().max() < 1e-4


def disc(side=96, radius=30) -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return (y - 45).square() + (x - 50).square() <= radius**2


def overlap(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a & b).sum() / (a | b).sum()).item()


def test_probabilities_follow_the_edges_of_the_image():
    thing = disc()
    ground, figure = torch.tensor([0.3, 0.5, 0.2])[:, None, None], torch.tensor([0.7, 0.4, 0.3])[:, None, None]
    image = (torch.where(thing, figure, ground) + 0.02 * drawn(3, 96, 96))[None]
    patches = (F.avg_pool2d(thing[None, None].float(), 16)[:, 0] >= 0.5).float()
    spread, followed = (
        pixel_foreground_probability(patches, image, PixelSettings(guide_radius=guide))[0] >= 0.5 for guide in (0, 16)
    )
    assert overlap(followed, thing) > 0.97 > 0.92 > overlap(spread, thing)
    inner, outer = disc(radius=28), disc(radius=32)
    assert followed[inner].float().mean() > 0.995, "two pixels inside all is kept,"
    assert followed[~outer].float().mean() < 0.005, "two pixels outside nothing"


def test_a_straight_edge_is_found_to_the_pixel():
    image = torch.zeros(1, 3, 64, 64)
    image[..., 27:] = torch.tensor([0.8, 0.3, 0.1])[:, None, None]
    halves = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(1, 4, 4)  # the border of patches is at 32
    kept = pixel_foreground_probability(halves, image, PixelSettings(guide_radius=16))[0] >= 0.5
    first = kept.float().argmax(dim=1)
    assert kept.any(dim=1).all()
    assert (first - 27).abs().max() <= 1
    assert (kept.long().diff(dim=1) >= 0).all(), "and nothing is hidden behind it"


@pytest.mark.parametrize("colour", [0.0, 0.5, 1.0])
def test_without_edges_probabilities_are_upsampled_smoothly(colour):
    probabilities = drawn(2, 4, 4).requires_grad_()
    found = pixel_foreground_probability(probabilities, torch.full((2, 3, 64, 64), colour), PixelSettings())
    found.sum().backward()
    assert found.isfinite().all()
    assert probabilities.grad.isfinite().all()
    assert found.diff(dim=1).abs().max() < 0.05
    assert found.diff(dim=2).abs().max() < 0.05
    assert probabilities.min() <= found.min()
    assert found.max() <= probabilities.max()


def test_probabilities_stay_between_0_and_1():
    sharp = (drawn(4, 8, 8) > 0.5).float()
    found = pixel_foreground_probability(sharp, drawn(4, 3, 64, 64, seed=1), PixelSettings())
    assert found.min() >= 0
    assert found.max() <= 1


def test_guide_radius_zero_is_bilinear_upsampling():
    probabilities, images = drawn(2, 4, 5), drawn(2, 3, 64, 80, seed=1)
    found = pixel_foreground_probability(probabilities, images, PixelSettings(guide_radius=0))
    expected = np.stack([bilinear(share.double().numpy(), (64, 80)) for share in probabilities])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert torch.equal(found, pixel_foreground_probability(probabilities, 1 - images, PixelSettings(guide_radius=0))), (
        "the image is not asked"
    )


def test_each_image_is_filtered_independently():
    probabilities, images = drawn(3, 4, 4), drawn(3, 3, 64, 64, seed=1)
    alone = torch.cat(
        [pixel_foreground_probability(probabilities[i : i + 1], images[i : i + 1], PixelSettings()) for i in range(3)]
    )
    torch.testing.assert_close(
        pixel_foreground_probability(probabilities, images, PixelSettings()), alone, atol=1e-6, rtol=0
    )


def test_the_gradient_is_right():
    probabilities = drawn(1, 3, 3, dtype=torch.float64).requires_grad_()
    images = drawn(1, 3, 12, 12, seed=1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: guided_filter(x, images, 4, SMOOTH), (probabilities,))
    assert torch.autograd.gradcheck(
        lambda x: guided_filter(probabilities.detach(), x, 4, 1e-2), (images.requires_grad_(),)
    )


def test_it_is_linear_in_the_probabilities():
    a, b, images = drawn(1, 4, 4), drawn(1, 4, 4, seed=1), drawn(1, 3, 64, 64, seed=2)
    both = guided_filter(2 * a - b, images, 16, SMOOTH)
    torch.testing.assert_close(
        both, 2 * guided_filter(a, images, 16, SMOOTH) - guided_filter(b, images, 16, SMOOTH), atol=1e-4, rtol=0
    )


def test_autocast_and_half_precision_do_not_round_it():
    probabilities, images = drawn(2, 4, 4), drawn(2, 3, 64, 64, seed=1)
    for how in (PixelSettings(), PixelSettings(guide_radius=0)):
        with torch.autocast("cpu", torch.bfloat16):
            under = pixel_foreground_probability(probabilities, images, how)
        assert under.dtype == torch.float32
        assert torch.equal(under, pixel_foreground_probability(probabilities, images, how))
        halves = probabilities.bfloat16(), images.bfloat16()
        found = pixel_foreground_probability(*halves, how)
        assert torch.equal(found, pixel_foreground_probability(*(x.float() for x in halves), how)), (
            "computed in float32"
        )


# ---- small systems ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_systems_are_solved(dtype):
    factors = drawn(50, 7, 3, 3, dtype=dtype) - 0.5
    matrices = factors @ factors.mT + 0.05 * torch.eye(3, dtype=dtype)
    vectors = drawn(50, 7, 3, seed=1, dtype=dtype)
    torch.testing.assert_close(
        solve_3x3(matrices, vectors), torch.linalg.solve(matrices, vectors), atol=1e-3, rtol=1e-4
    )


def test_nearly_singular_systems_are_solved_as_well_as_by_a_solver():
    along = drawn(200, 3) + 0.1
    matrices = along[..., None] * along[:, None] + 1e-4 * torch.eye(3)
    vectors = drawn(200, 3, seed=1)
    precise = torch.linalg.solve(matrices.double(), vectors.double())
    ours, solver = (
        ((x.double() - precise).norm(dim=1) / precise.norm(dim=1)).max()
        for x in (solve_3x3(matrices, vectors), torch.linalg.solve(matrices, vectors))
    )
    assert ours < 3 * solver
