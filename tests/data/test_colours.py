"""Colour augmentation: within its ranges, like Pillow, and without any effect on geometry."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from sightline.data.augment import AnnotatedImages
from sightline.data.colours import NONLINEAR, OPERATIONS, illuminants

from .augmenting import COLOUR, OFF, augmented, squares


@pytest.mark.parametrize("config", COLOUR.values(), ids=COLOUR)
def test_colour_does_not_change_geometry(config, toys):
    seen = augmented(config, toys)
    assert torch.equal(seen.masks, toys.masks)
    torch.testing.assert_close(seen.keypoints, toys.keypoints)
    assert ((seen.images - toys.images / 255).abs().amax((1, 2, 3)) > 0.01).float().mean() > 0.7


def flat(*colour: float, count: int = 400) -> AnnotatedImages:
    return AnnotatedImages(torch.tensor(colour)[:, None, None].expand(count, 3, 4, 4))


def test_brightness_multiplies_within_its_range():
    factors = augmented(COLOUR["brightness"], flat(0.5, 0.2, 0.4)).images[..., 0, 0] / torch.tensor([0.5, 0.2, 0.4])
    torch.testing.assert_close(factors, factors[:, :1].expand(400, 3))
    assert 0.6 - 1e-6 < factors.min() < 0.62
    assert 1.38 < factors.max() < 1.4 + 1e-6


def test_contrast_is_about_the_mean_grey(toys):
    pale = AnnotatedImages(0.4 + toys.images / 255 * 0.2)
    seen = augmented(replace(OFF, contrast=0.4), pale).images
    ratio = seen.flatten(2).std(2) / pale.images.flatten(2).std(2)
    assert 0.6 - 1e-4 < ratio.min() < 0.8
    assert 1.2 < ratio.max() < 1.4 + 1e-4
    luma = torch.tensor([0.299, 0.587, 0.114])
    torch.testing.assert_close(seen.mean((2, 3)) @ luma, pale.images.mean((2, 3)) @ luma)


def test_the_combined_colour_matrix_equals_its_steps(toys):
    """Where nothing is clipped."""
    pale = AnnotatedImages(0.4 + toys.images / 255 * 0.1)
    once = augmented(replace(OFF, brightness=0.1, contrast=0.3, saturation=0.3, hue=0.2, planckian=1.0), pale)
    step = pale
    for setting in ("brightness", "contrast", "saturation", "hue", "planckian"):
        step = augmented(
            replace(OFF, **{setting: {"brightness": 0.1, "hue": 0.2, "planckian": 1.0}.get(setting, 0.3)}), step
        )
    assert once.images.max() < 1
    torch.testing.assert_close(once.images, step.images, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["saturation", "hue"])
def test_grey_and_luma_are_unchanged_by(name):
    torch.testing.assert_close(augmented(COLOUR[name], flat(0.3, 0.3, 0.3)).images, flat(0.3, 0.3, 0.3).images)
    luma = torch.tensor([0.299, 0.587, 0.114])
    seen = augmented(COLOUR[name], flat(0.5, 0.45, 0.4)).images[..., 0, 0]
    torch.testing.assert_close(seen @ luma, torch.full((400,), 0.45925))
    assert seen.std(0).max() > 0.01


def test_hue_rotation_turns_red_into_green_and_blue():
    seen = augmented(replace(OFF, hue=0.5), flat(0.6, 0.4, 0.4)).images[..., 0, 0]
    assert {0, 1, 2} == set(seen.argmax(1).tolist())


def test_illuminants_are_black_bodies():
    """Their chromaticities against the tabulated Planckian locus (CIE 1931)."""
    to_xyz = torch.tensor(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]], dtype=torch.float64
    )
    xyz = illuminants() @ to_xyz.T
    x, y = (xyz[:, :2] / xyz.sum(1, keepdim=True)).T
    assert len(x) == 25
    for kelvin, expected in ((3000, (0.4369, 0.4041)), (6500, (0.3135, 0.3237)), (10000, (0.2807, 0.2884))):
        row = (kelvin - 3000) // 500
        assert abs(x[row] - expected[0]) < 0.002
        assert abs(y[row] - expected[1]) < 0.002
    red, green, blue = illuminants().T
    assert (red.diff() < 0).all()
    assert (blue.diff() > 0).all()
    assert (green == 1).all()


def test_planckian_jitter_multiplies_red_and_blue_with_its_probability():
    given = torch.tensor([0.4, 0.5, 0.5])
    seen = augmented(replace(OFF, planckian=0.8), flat(*given.tolist())).images[..., 0, 0]
    lights = [tuple(row) for row in (seen / given).double().round(decimals=4).tolist()]
    known = {tuple(row) for row in illuminants().round(decimals=4).tolist()}
    changed = [light for light in lights if light != (1.0, 1.0, 1.0)]
    assert 0.73 < len(changed) / 400 < 0.87
    assert all(any(np.allclose(light, row, atol=2e-4) for row in known) for light in changed)
    assert len(set(changed)) >= 24
    assert augmented(replace(OFF, planckian=1.0), flat(0.9, 0.9, 0.9)).images.max() == 1


# RandAugment


def pillow(images: torch.Tensor, operation) -> torch.Tensor:
    results = [operation(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images]
    return torch.from_numpy(np.stack([np.asarray(result) for result in results])).permute(0, 3, 1, 2) / 255


def apply(name: str, images: torch.Tensor, amount: float) -> torch.Tensor:
    return NONLINEAR[name](images / 255, torch.full((len(images), 1, 1, 1), amount))


def test_equalize_equals_pillow(toys):
    images = torch.cat([toys.images, toys.images // 7, torch.full((1, 3, 64, 64), 9, dtype=torch.uint8)])
    assert torch.equal(apply("equalize", images, 0.3), pillow(images, ImageOps.equalize))


def test_posterize_and_solarize_equal_pillow(toys):
    for amount, bits in ((0.0, 8), (0.6, 6), (-1.0, 4)):
        expected = pillow(toys.images, lambda image, bits=bits: ImageOps.posterize(image, bits))
        assert torch.equal(apply("posterize", toys.images, amount), expected)
    expected = pillow(toys.images, lambda image: ImageOps.solarize(image, 105))
    torch.testing.assert_close(apply("solarize", toys.images, -0.59), expected)
    assert torch.equal(apply("solarize", toys.images, 0.0), toys.images / 255)


def test_auto_contrast_and_sharpening_equal_pillow_up_to_rounding(toys):
    pale = toys.images // 2 + 40
    assert (apply("auto_contrast", pale, 0.0) - pillow(pale, ImageOps.autocontrast)).abs().max() < 1.1 / 255
    for amount in (-1.0, 0.5, 1.0):
        expected = pillow(toys.images, lambda image, a=amount: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * a))
        assert (apply("sharpen", toys.images, amount) - expected).abs().max() < 2.1 / 255
    still = torch.full((1, 3, 8, 8), 77, dtype=torch.uint8)
    assert torch.equal(apply("auto_contrast", still, 0.0), still / 255)


def test_randaugment_moves_masks_with_their_squares():
    given = squares(100, (96, 96))
    seen = augmented(replace(OFF, randaugment=(2, 6.0)), given)
    moved = (seen.keypoints[:, 0, :2] - given.keypoints[:, 0, :2]).abs().amax(1) > 1
    assert 0.2 < moved.float().mean() < 0.8
    contrasts = [
        (image[:, mask].mean(1) - image[:, ~mask].mean(1)).abs().max().item()
        for image, mask in zip(seen.images, seen.masks, strict=True)
        if mask.any()
    ]
    assert len(contrasts) > 90
    assert np.mean(np.array(contrasts) > 0.4) > 0.9  # not all: pure red and blue both solarize to black


def test_randaugment_draws_operations_uniformly():
    from sightline.data.augment import _draw

    _, rounds = _draw(replace(OFF, randaugment=(2, 6.0)), 0, 0, torch.arange(10_000))
    for operation, amount in rounds:
        counts = torch.bincount(operation + 1, minlength=len(OPERATIONS) + 1)
        assert abs(counts[0] / 10_000 - 0.5) < 0.03
        assert ((counts[1:] / 10_000 - 0.5 / len(OPERATIONS)).abs() < 0.01).all()
        assert abs(amount.abs().mean() - 0.6) < 0.01
        assert abs(amount.abs().std() - 0.05) < 0.01
        assert abs((amount > 0).double().mean() - 0.5) < 0.03


def test_randaugment_without_operations_only_resamples(toys):
    seen = augmented(replace(OFF, randaugment=(0, 9.0)), toys)
    torch.testing.assert_close(seen.images, toys.images / 255, rtol=0, atol=1e-4)
