"""Augmentation: a function of (seed, epoch, index) only, and no change without a setting."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from PIL import Image

from sightline.data.augment import PRESETS, AnnotatedImages, Augment, uniforms
from sightline.data.images import mask_to_tensor, to_tensor
from sightline.datasets.toy_images import make_toy
from sightline.errors import UserError
from sightline.vit.model import Input

from .augmenting import OFF, augmented, overlap

# Random draws


def test_uniforms_are_splitmix64_computed_with_plain_integers():
    def mix64(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert mix64(0) == 0xE220A8397B1DCDAF  # SplitMix64's published first number for seed 0
    for seed, epoch, index in ((0, 0, 0), (-7, 12, 10**12), (2**63 + 5, 3, 77)):
        key = mix64(mix64(mix64(seed % 2**64) ^ epoch) ^ index)
        expected = [(mix64((key + i * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for i in range(5)]
        assert uniforms(seed, epoch, torch.tensor([index]), 5)[0].tolist() == expected


def test_uniforms_are_uniform_in_every_column():
    draws = uniforms(1, 2, torch.arange(20_000), 8)
    assert draws.dtype == torch.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.stack([torch.histc(column, 20, 0, 1) for column in draws.T])
    chi_squared = ((counts - 1000) ** 2 / 1000).sum(1)
    assert (chi_squared < 44).all()  # 19 degrees of freedom: one in a thousand


def test_uniforms_of_neighbouring_seeds_epochs_indices_and_columns_are_uncorrelated():
    n = torch.arange(20_000)
    base = uniforms(1, 2, n, 2)
    others = [base[:, 1], base[:, 0].roll(1), uniforms(2, 2, n, 1)[:, 0], uniforms(1, 3, n, 1)[:, 0]]
    others += [uniforms(2, 1, n, 1)[:, 0], uniforms(1, 2, n + 1, 2)[:, 1], uniforms(1, 2, n ^ 1, 1)[:, 0]]
    correlation = torch.corrcoef(torch.stack([base[:, 0], *others]))
    assert (correlation - torch.eye(len(correlation))).abs()[0].max() < 0.03


def test_uniforms_do_not_depend_on_the_other_indices_or_the_count():
    full = uniforms(9, 4, torch.arange(100), 6)
    some = torch.tensor([71, 3, 3, 99])
    assert torch.equal(uniforms(9, 4, some, 3), full[some, :3])


@pytest.mark.parametrize("name", PRESETS)
def test_an_image_is_augmented_alike_in_every_batch(name, toys):
    config = replace(PRESETS[name], size=(48, 40))
    together = config(toys, seed=3, epoch=2, indices=100 + torch.arange(12))
    some = torch.tensor([7, 0, 11, 4, 5])
    subset = AnnotatedImages(toys.images[some], toys.masks[some], toys.boxes[some], toys.keypoints[some])
    apart = config(subset, seed=3, epoch=2, indices=100 + some)
    torch.testing.assert_close(apart.images, together.images[some], rtol=0, atol=1e-6)
    assert torch.equal(apart.masks, together.masks[some])
    assert torch.equal(apart.boxes.nan_to_num(-1), together.boxes[some].nan_to_num(-1))
    assert torch.equal(apart.keypoints, together.keypoints[some])


@pytest.mark.parametrize("name", ["light", "published", "imagenet"])
def test_seed_epoch_and_index_determine_the_images(name, toys):
    first = augmented(PRESETS[name], toys, seed=1, epoch=1).images
    assert torch.equal(augmented(PRESETS[name], toys, seed=1, epoch=1).images, first)
    for other in ({"seed": 2, "epoch": 1}, {"seed": 1, "epoch": 2}, {"indices": 50 + torch.arange(12)}):
        changed = (augmented(PRESETS[name], toys, **{"seed": 1, "epoch": 1} | other).images != first).flatten(1).any(1)
        assert changed.float().mean() > 0.8


def test_the_draws_of_a_setting_do_not_depend_on_other_settings(toys):
    plain = augmented(replace(OFF, flip=0.5, degrees=20.0), toys)
    more = augmented(replace(OFF, flip=0.5, degrees=20.0, hue=0.1, planckian=0.8, randaugment=(0, 5.0)), toys)
    assert torch.equal(plain.masks, more.masks)
    assert torch.equal(plain.keypoints, more.keypoints)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PRESETS)
def test_the_gpu_gives_the_same_images(name, toys):
    on_gpu = AnnotatedImages(*(value.cuda() for value in (toys.images, toys.masks, toys.boxes, toys.keypoints)))
    here, seen = (augmented(PRESETS[name], given, (48, 40), seed=6) for given in (toys, on_gpu))
    assert seen.images.device.type == "cuda"
    assert (here.images - seen.images.cpu()).abs().mean() < 1e-4  # posterize may fall one level apart here and there
    assert (here.masks != seen.masks.cpu()).float().mean() < 1e-3
    torch.testing.assert_close(here.boxes, seen.boxes.cpu(), equal_nan=True)
    torch.testing.assert_close(here.keypoints, seen.keypoints.cpu())


def test_global_generators_are_left_alone(toys):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    augmented(PRESETS["imagenet"], toys)
    assert torch.equal(torch.get_rng_state(), before)


# What does not change


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.float16])
def test_without_augmentation_nothing_changes(dtype, toys):
    images = toys.images if dtype == torch.uint8 else (toys.images / 255).to(dtype)
    same = augmented(OFF, replace(toys, images=images))
    assert same.images.dtype == torch.float32
    assert torch.equal(same.images, toys.images / 255 if dtype == torch.uint8 else images.float())
    assert torch.equal(same.masks, toys.masks)
    torch.testing.assert_close(same.boxes, toys.boxes, equal_nan=True)
    torch.testing.assert_close(same.keypoints, toys.keypoints)


@pytest.mark.parametrize("name", PRESETS)
def test_empty_batches_and_empty_annotations(name, toys):
    none = AnnotatedImages(toys.images[:0], toys.masks[:0], toys.boxes[:0], toys.keypoints[:0])
    assert augmented(PRESETS[name], none, (40, 30)).images.shape == (0, 3, 40, 30)
    boxless = AnnotatedImages(toys.images, boxes=toys.boxes[:, :0], keypoints=toys.keypoints[:, :0])
    seen = augmented(PRESETS[name], boxless)
    assert (seen.boxes.shape, seen.keypoints.shape) == ((12, 0, 4), (12, 0, 3))


def test_missing_annotations_stay_missing(toys):
    seen = augmented(PRESETS["published"], AnnotatedImages(toys.images))
    assert (seen.masks, seen.boxes, seen.keypoints) == (None, None, None)


@pytest.mark.parametrize("name", PRESETS)
def test_the_input_is_not_modified(name, toys):
    given = replace(toys, images=toys.images / 255)
    kept = [value.clone() for value in (given.images, given.masks, given.boxes, given.keypoints)]
    augmented(PRESETS[name], given, (40, 40))
    for value, before in zip((given.images, given.masks, given.boxes, given.keypoints), kept, strict=True):
        torch.testing.assert_close(value, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("source", [(150, 150), (97, 140), (180, 121)])
@pytest.mark.parametrize("crop", [1.0, 0.875])
def test_the_none_preset_equals_to_tensor(source, crop):
    toy = make_toy(1, size=184, seed=1)
    image, mask = toy.images[0, :, : source[0], : source[1]], toy.masks[0, : source[0], : source[1]]
    expects = Input(size=(90, 84), crop=crop, resample="bilinear")
    seen = augmented(replace(PRESETS["none"], crop=crop), AnnotatedImages(image[None], mask[None]), (90, 84))
    file = to_tensor(Image.fromarray(image.permute(1, 2, 0).numpy()), expects)
    assert (seen.images[0] - file).abs().max() < 1.6 / 255  # Pillow rounds twice
    mask_file = mask_to_tensor(Image.fromarray(mask.numpy()), expects)
    assert overlap(seen.masks, mask_file[None]).item() > 0.99


@pytest.mark.parametrize("name", PRESETS)
def test_values_stay_between_0_and_1(name, toys):
    seen = augmented(PRESETS[name], toys, (50, 45)).images
    assert seen.shape == (12, 3, 50, 45)
    assert seen.min() >= 0
    assert seen.max() <= 1


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"flip": 1.5}, "flip 1.5"),
        ({"scale": (1.2, 0.8)}, "scale"),
        ({"random_resized_crop": (0.0, 1.0)}, "random_resized_crop"),
        ({"hue": 0.7}, "hue 0.7"),
        ({"size": (0, 224)}, "size"),
        ({"contrast": -0.1}, "contrast"),
        ({"randaugment": (2, 11.0)}, "randaugment"),
        ({"degrees": float("nan")}, "degrees"),
        ({"fill": (124, 116, 104)}, "fill"),
    ],
)
def test_invalid_settings_are_rejected_by_name(wrong, named):
    with pytest.raises(UserError, match=named):
        Augment(**wrong)


def test_inconsistent_shapes_are_rejected():
    for wrong in (
        {"images": torch.zeros(2, 1, 8, 8)},
        {"images": torch.zeros(2, 3, 8, 8), "masks": torch.zeros(2, 8, 8)},
        {"images": torch.zeros(2, 3, 8, 8), "masks": torch.zeros(2, 8, 9, dtype=torch.bool)},
        {"images": torch.zeros(2, 3, 8, 8), "boxes": torch.zeros(1, 1, 4)},
        {"images": torch.zeros(2, 3, 8, 8), "keypoints": torch.zeros(2, 5, 2)},
    ):
        with pytest.raises(ValueError, match="must be"):
            AnnotatedImages(**wrong)


@pytest.mark.parametrize("name", PRESETS)
def test_settings_round_trip_through_json(name, toys):
    back = Augment(**json.loads(json.dumps(asdict(replace(PRESETS[name], size=(40, 40))))))
    assert torch.equal(
        back(toys, seed=0, epoch=0, indices=torch.arange(12)).images, augmented(PRESETS[name], toys, (40, 40)).images
    )
