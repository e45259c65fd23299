"""Part discovery: which patch belongs to which part, what may be seen of it, and where gradients go."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sightline.config import Shaping
from sightline.data.augment import Affine, warp_affine
from sightline.errors import UserError
from sightline.methods.import_ import PUBLISHED_NAMES, load_stage1
from sightline.vit.backbones import BACKBONES, Backbone
from sightline.vit.model import Input
from sightline.where.part_losses import shaping_losses
from sightline.where.parts import (
    PartDiscovery,
    freeze,
    gumbel_noise,
    hard_keep,
    soft_keep,
    straight_through,
)

from ..conftest import small_vit


def small(parts: int = 4, **changes) -> PartDiscovery:
    """Prototypes among the features, so that no part is out of reach."""
    model = PartDiscovery(small_vit(classes=0), parts, 5, **changes)
    with torch.no_grad():
        model.prototypes.copy_(model.discover(made_images()).features.flatten(2)[0].T[: parts + 1])
    return model


def made_images(count: int = 3) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def scores(generator, parts: int = 4, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(3, parts + 1, 6, 6, generator=generator)


# ---- discovery -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_logits_are_negative_squared_distances_and_maps_their_softmax():
    model = small(temperature=0.5)
    parts = model.discover(made_images())
    distances = (parts.features[:, None] - model.prototypes[None, :, :, None, None]).square().sum(dim=2)
    torch.testing.assert_close(parts.logits, -distances, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(parts.probabilities, (parts.logits / 0.5).softmax(dim=1))


@torch.no_grad()
def test_evaluation_is_the_same_every_time():
    model, images = small(), made_images()
    torch.manual_seed(0)
    first = model.look(images)
    torch.manual_seed(1)
    again = model.look(images)
    assert torch.equal(first.keep, again.keep)
    assert torch.equal(first.parts, again.parts)


@torch.no_grad()
def test_a_patch_is_seen_unless_it_is_nearest_to_the_background():
    model, images = small(), made_images()
    sight = model.look(images)
    assert torch.equal(sight.keep, sight.parts.argmax(dim=1) != 4)
    assert 0 < sight.keep.float().mean() < 1
    assert list(model.maps(images)) == ["part 0", "part 1", "part 2", "part 3", "background"]


def test_gumbel_noise_selects_a_part_with_its_probability(generator):
    logits = torch.tensor([1.0, 0.0, -1.0])
    draws = (logits[:, None] + gumbel_noise((3, 50_000), generator=generator)).argmax(dim=0)
    torch.testing.assert_close(draws.bincount() / 50_000, logits.softmax(dim=0), atol=0.01, rtol=0)


def test_noise_is_finite_even_where_the_generator_gives_zero(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_())
    assert gumbel_noise((3,)).isfinite().all()


def test_draws_follow_their_generator_and_rate(generator):
    model, images = small(parts=8), made_images(2)
    assert model.draw_noise(images, generator).shape == (2, 9, 4, 4)
    many = images[:1].expand(2000, -1, -1, -1)
    kept = model.draw_keep_parts(many, generator=generator)
    assert kept.dtype == torch.bool
    assert abs(kept.float().mean() - 0.7) < 0.02
    assert model.draw_keep_parts(many, 0.0).all()
    again = [model.draw_keep_parts(images, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*again)


@torch.no_grad()
def test_transformed_images_are_filled_with_the_mean_colour():
    vit = small_vit(classes=0, input=Input(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25)))
    model, images, affine = PartDiscovery(vit, 2, 5), made_images(), Affine(30.0, 3.0, -2.0, 0.8)
    normalised = warp_affine((images - vit.mean) / vit.std, affine)
    expected = model.discover(normalised * vit.std + vit.mean).probabilities
    caught = {}
    model.discover = lambda images, noise=None: caught.setdefault("parts", PartDiscovery.discover(model, images))
    moved = model.discover_transformed(images, affine)
    torch.testing.assert_close(caught["parts"].probabilities, expected, atol=1e-4, rtol=1e-4)
    assert moved.shape == expected.shape


@torch.no_grad()
def test_the_identity_transformation_changes_nothing():
    model, images = small(), made_images()
    probabilities = model.discover(images).probabilities
    torch.testing.assert_close(model.discover_transformed(images, Affine()), probabilities, atol=1e-4, rtol=1e-4)


# ---- classification --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_dropped_parts_have_no_logits_and_others_are_scaled():
    model = small(dropout=0.25)
    embeddings = model.embed(model.discover(made_images()))
    keep_parts = torch.tensor([[True, False, True, True]]).expand(3, -1)
    all_of_them, some = model.part_scores(embeddings), model.part_scores(embeddings, keep_parts)
    assert not some[:, :, 1].any()
    torch.testing.assert_close(some[:, :, 0], all_of_them[:, :, 0] / 0.75)
    torch.testing.assert_close(model.class_logits(embeddings, keep_parts), some.sum(dim=2) / 4)


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def test_pooling_never_makes_a_feature_map_per_part():
    model = small(parts=15)
    forbidden = 3 * 32 * 16 * 4 * 4
    with Largest() as largest:
        parts = model.discover(made_images())
        embeddings = model.embed(parts)
        losses = shaping_losses(parts, embeddings, parts.probabilities, Shaping())
        (sum(losses.values()) + model.class_logits(embeddings).sum()).backward()
    assert 0 < largest.numel < forbidden
    with Largest() as naive:
        _ = parts.features[:, :, None] * parts.probabilities[:, None]
    assert naive.numel == forbidden


# ---- what may be seen ------------------------------------------------------------------------------------------------


def test_the_mask_is_exactly_0_or_1_in_any_precision(generator):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        some = scores(generator, spread=5.0).to(dtype)
        assert torch.equal(straight_through(some), hard_keep(some).to(dtype))


def test_ties_are_foreground():
    assert hard_keep(torch.zeros(1, 3, 2, 2)).all()


def test_a_patch_of_a_dropped_part_stays_only_if_another_part_beats_the_background(generator):
    some = scores(generator)
    keep_parts = torch.tensor([[True, False, False, True]] * 3)
    expected = some[:, [0, 3]].amax(dim=1) >= some[:, 4]
    assert torch.equal(hard_keep(some, keep_parts), expected)
    assert not torch.equal(expected, hard_keep(some))
    assert not hard_keep(some, torch.zeros(3, 4, dtype=torch.bool)).any()
    assert torch.equal(hard_keep(some.softmax(dim=1), keep_parts), expected)


def test_dropping_works_where_all_other_probabilities_underflow():
    far = torch.tensor([0.0, -900.0, -500.0]).view(1, 3, 1, 1)  # parts 0 and 1, background: shares 1, 0 and 0
    assert not hard_keep(far, torch.tensor([[False, True]])).any()
    assert hard_keep(far, torch.tensor([[True, False]])).all()


def test_soft_keep_is_the_probability_of_the_likeliest_part(generator):
    some = scores(generator)
    torch.testing.assert_close(soft_keep(some), some.softmax(dim=1)[:, :-1].amax(dim=1))


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_the_predictors_loss_alone_reaches_the_prototypes():
    """And it is the gradient of the surrogate, by finite differences in float64."""
    model, predictor, images = small().double(), small_vit(seed=2).double(), made_images().double()
    freeze(model.vit)
    noise = model.draw_noise(images, torch.Generator().manual_seed(0)).double()
    keep_parts = torch.tensor([[True, True, False, True]] * 3)
    keep = straight_through(model.discover(images, noise=noise).scores, keep_parts)
    keep.retain_grad()
    F.cross_entropy(predictor(images, keep).logits, torch.tensor([0, 1, 2])).backward()
    gradient, upstream = model.prototypes.grad, keep.grad
    assert gradient.abs().max() > 0
    for token in (model.vit.cls_token, model.vit.reg_token, model.vit.pos_embed):
        assert token.grad.abs().max() > 0
    assert model.vit.patch_embed.proj.weight.grad is None

    @torch.no_grad()
    def surrogate(step, direction):
        start = model.prototypes.clone()
        model.prototypes.add_(step * direction)
        probabilities = model.discover(images, noise=noise).probabilities[:, :-1] * keep_parts[:, :, None, None]
        model.prototypes.copy_(start)
        return float((upstream * probabilities.sum(dim=1)).sum())

    for seed in range(3):
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        slope = (surrogate(1e-6, direction) - surrogate(-1e-6, direction)) / 2e-6
        assert math.isclose(slope, float((gradient * direction).sum()), rel_tol=1e-5)


def test_no_gradient_comes_through_parts_that_are_dropped(generator):
    some = scores(generator).requires_grad_()
    straight_through(some, torch.zeros(3, 4, dtype=torch.bool)).sum().backward()
    assert not some.grad.any()


def test_only_the_tokens_of_a_frozen_backbone_are_trained():
    vit = small_vit(classes=0)
    freeze(vit)
    learning = {name for name, p in vit.named_parameters() if p.requires_grad}
    assert learning == {"cls_token", "reg_token", "pos_embed"}
    freeze(vit, tokens=True)
    assert not any(p.requires_grad for p in vit.parameters())


# ---- precision -------------------------------------------------------------------------------------------------------


def everything(model, images, noise):
    parts = model.discover(images, noise=noise)
    embeddings = model.embed(parts)
    losses = shaping_losses(parts, embeddings, parts.probabilities.flip(3), replace(Shaping(), concentration=1.0))
    return parts, embeddings, losses | {"class": F.cross_entropy(model.class_logits(embeddings), torch.arange(3))}


def test_bfloat16_stays_close_to_float32_and_decides_in_float32():
    model, images = small(), made_images()
    noise = model.draw_noise(images, torch.Generator().manual_seed(0))
    exact, _, exact_losses = everything(model, images, noise)
    with torch.autocast("cpu", torch.bfloat16):
        parts, embeddings, losses = everything(model, images, noise)
    made = [parts.features, parts.logits, parts.scores, parts.probabilities, embeddings, *losses.values()]
    assert {t.dtype for t in made} == {torch.float32}
    assert ((parts.probabilities - exact.probabilities).abs() > 0.1).float().mean() < 0.05
    for name, loss in losses.items():
        torch.testing.assert_close(
            loss, exact_losses[name], rtol=0.1, atol=0.02, msg=lambda m, name=name: f"{name}: {m}"
        )
    sum(losses.values()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_autocast_changes_nothing_after_the_backbone():
    """Given the same features, bit by bit."""
    model, images = small(), made_images()
    features = model.vit(images).patches.detach()
    model.vit.forward = lambda images: replace_features(features)
    noise = model.draw_noise(images, torch.Generator().manual_seed(0))
    exact, exact_embeddings, exact_losses = everything(model, images, noise)
    with torch.autocast("cpu", torch.bfloat16):
        parts, embeddings, losses = everything(model, images, noise)
    assert torch.equal(parts.probabilities, exact.probabilities)
    assert torch.equal(embeddings, exact_embeddings)
    assert all(torch.equal(loss, exact_losses[name]) for name, loss in losses.items())


def replace_features(features):
    class Out:
        feature_map = features.transpose(1, 2).unflatten(2, (4, 4))

    return Out


def test_probabilities_that_underflow_leave_all_gradients_finite():
    model, images = small(), made_images()
    with torch.no_grad():
        model.vit.norm.weight.mul_(100)
        model.prototypes.mul_(100)
    parts, _, losses = everything(model, images, None)
    assert (parts.probabilities == 0).any()
    (sum(losses.values()) + straight_through(parts.scores).square().sum()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# ---- building and loading --------------------------------------------------------------------------------------------


def test_the_seed_decides_how_it_starts_and_global_randomness_is_left_alone():
    vit = small_vit(classes=0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (PartDiscovery(vit, 3, 5, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("prototypes", "head.weight"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_invalid_settings_are_errors():
    with pytest.raises(ValueError, match="own head"):
        PartDiscovery(small_vit(), 4, 5)
    for wrong in ({"parts": 0}, {"dropout": 1.0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="invalid: "):
            PartDiscovery(small_vit(classes=0), **{"parts": 4, "classes": 5} | wrong)


@torch.no_grad()
def test_published_files_load(tmp_path, monkeypatch):
    """As the trainer saves them, with the positions of another grid than the backbone is known for."""
    model, theirs = small(), {ours: theirs for theirs, ours in PUBLISHED_NAMES.items()}
    tensors = {theirs.get(name, name.removeprefix("vit.")): t for name, t in model.state_dict().items()}
    tensors["fc_landmarks.weight"] = tensors["fc_landmarks.weight"][..., None, None]
    saved = {"model_state": {f"module.stage_1.{name}": t for name, t in tensors.items()}, "finished_epoch": 3}
    torch.save(saved, tmp_path / "snapshot_best.pt")
    config = replace(model.vit.config, grid=(9, 9), classes=3)
    monkeypatch.setitem(BACKBONES, "small", Backbone("small", config))
    loaded = load_stage1(tmp_path / "snapshot_best.pt", prefix="stage_1.", like="small")
    assert torch.equal(loaded.discover(made_images()).logits, model.discover(made_images()).logits)
    with pytest.raises(UserError, match=r"no part discovery under ''.*fc_landmarks"):
        load_stage1(tmp_path / "snapshot_best.pt", like="small")
