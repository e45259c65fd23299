"""iFAM: two stages trained as one, a second stage that is blind, and every ablation of the papers as a flag."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro

from sightline.config import Ifam, Pdiscoformer, Shaping
from sightline.data.augment import Affine
from sightline.methods.base import PartSettings, RandomDraws, make_selector
from sightline.methods.ifam import IFam, make_predictor, pixel_settings
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.sight import Sight
from sightline.training.trainable import StepInfo, TrainBatch
from sightline.verify.verify import verify

from ..conftest import small_vit

CLASSES = 3


def ifam(**changes) -> IFam:
    """As in the papers: whole patches are hidden."""
    settings = Ifam(Path("data"), **{"parts": 3, "sight": "patches"} | changes)
    vit = small_vit(classes=0)
    how = PartSettings.of(settings), pixel_settings(settings)
    return IFam(make_selector(vit, settings, CLASSES), make_predictor(vit, settings, CLASSES), *how)


def pdiscoformer(**changes) -> PDiscoFormer:
    settings = Pdiscoformer(Path("data"), **{"parts": 3} | changes)
    return PDiscoFormer(make_selector(small_vit(classes=0), settings, CLASSES), PartSettings.of(settings))


@pytest.fixture
def images(generator):
    return torch.rand(4, 3, 32, 32, generator=generator)


LABELS = torch.tensor([0, 1, 2, 0])


def draws(model, images, seed: int = 0, **changes) -> RandomDraws:
    generator = torch.Generator().manual_seed(seed)
    noise, moved, mask = (model.where.draw_noise(images, generator) for _ in range(3))
    everything = torch.ones(len(images), model.where.parts, dtype=torch.bool)
    drawn = RandomDraws(noise, moved, mask, Affine(20.0, 1.0, 2.0, 1.1), everything, everything)
    return replace(drawn, **changes)


def train_batch(images) -> TrainBatch:
    when = StepInfo(seed=0, epoch=0, step=0, epochs=1, steps=1, positions=torch.arange(len(images)))
    return TrainBatch(images, LABELS, None, None, torch.arange(len(images)), when)


# ---- where the gradient goes -----------------------------------------------------------------------------------------


def gradient_of_the_answer(model: IFam, images) -> torch.Tensor | None:
    losses = model.losses(images, LABELS, draws(model, images))
    prototypes = model.where.prototypes
    (gradient,) = torch.autograd.grad(losses["classification"], [prototypes], allow_unused=True)
    return gradient


def test_the_stage_2_loss_reaches_the_prototypes_through_the_mask(images):
    gradient = gradient_of_the_answer(ifam(), images)
    assert (gradient.abs().amax(dim=1) > 0).all(), "every prototype, also the background's"


@pytest.mark.parametrize("without", [{"mask_gradient": False}, {"preset": "published"}])
def test_without_mask_gradient_the_prototypes_get_none(images, without):
    assert gradient_of_the_answer(ifam(**without), images) is None
    published = ifam(**{"mask_gradient": True} | {k: v for k, v in without.items() if k == "preset"})
    assert gradient_of_the_answer(published, images).abs().max() > 0, "a flag wins over the preset"


def test_soft_masks_have_a_gradient_unless_disabled(images):
    assert gradient_of_the_answer(ifam(soft_mask=True), images).abs().max() > 0
    assert gradient_of_the_answer(ifam(soft_mask=True, mask_gradient=False), images) is None


def test_the_gradient_is_that_of_the_kept_parts_probabilities(images):
    """Hard forward; backward, the loss as a function of mask × slope of the probabilities: by finite differences."""
    model = ifam().double()
    images = images.double()
    drawn = draws(model, images)
    keep_masked = torch.tensor([[True, False, True]]).expand(len(images), -1)
    drawn = replace(drawn, keep_masked=keep_masked)
    gradient = torch.autograd.grad(model.losses(images, LABELS, drawn)["classification"], [model.where.prototypes])[0]

    with torch.no_grad():
        features = model.where.discover(images).features
    weight = model.stage2_input(images, model.where.discover(images), drawn)[1].detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(model.what.vit(images, weight).logits, LABELS)
    (upstream,) = torch.autograd.grad(loss, [weight])

    def surrogate() -> float:
        scores = model.where.scores(model.where._assign(features, None).logits, drawn.noise_mask)
        probabilities = scores.softmax(dim=1)[:, :-1] * keep_masked[..., None, None]
        return float((upstream * probabilities.sum(dim=1)).sum())

    step = 1e-5
    for k, d in ((0, 3), (1, 7), (3, 0)):
        with torch.no_grad():
            model.where.prototypes[k, d] += step
            above = surrogate()
            model.where.prototypes[k, d] -= 2 * step
            below = surrogate()
            model.where.prototypes[k, d] += step
        assert gradient[k, d].item() == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-9)


# ---- presets and flags -----------------------------------------------------------------------------------------------


def test_presets_follow_the_papers_and_the_published_code():
    ours = PartSettings.of(Ifam(Path("data")))
    papers, published = (
        PartSettings.of(Ifam(Path("data"), preset=preset, sight=sight))
        for preset, sight in (("papers", "patches"), ("published", None))
    )
    assert ours == replace(papers, mask_gradient=False, clusters=True)
    assert (papers.share_noise, papers.eval_noise, papers.mask_gradient) == (True, False, True)
    assert (published.share_noise, published.eval_noise, published.mask_gradient) == (False, True, False)
    assert (papers.shaping.orthogonality_over, published.shaping.orthogonality_over) == ("parts", "channels")
    assert (papers.shaping.total_variation_grid, published.shaping.total_variation_grid) == (37, 0)
    weights = [replace(how.shaping, orthogonality_over=None, total_variation_grid=None) for how in (papers, published)]
    assert weights == [Shaping(1, 1, 1, 1, 1, 2, 0)] * 2


def test_flags_override_the_preset():
    flags = ["data", "--preset", "published", "--share-noise", "True", "--eval-noise", "False"]
    flags += ["--shaping.orthogonality-over", "parts", "--mask-gradient", "True"]
    how = PartSettings.of(tyro.cli(Ifam, args=flags))
    assert (how.share_noise, how.eval_noise, how.mask_gradient, how.shaping.orthogonality_over) == (
        True,
        False,
        True,
        "parts",
    )


def test_noise_is_shared_or_drawn_twice(images):
    torch.manual_seed(0)
    drawn = ifam().draw(train_batch(images))
    assert drawn.noise_mask is drawn.noise
    drawn = ifam(preset="published").draw(train_batch(images))
    assert not torch.equal(drawn.noise_mask, drawn.noise)


def test_dropout_of_parts_and_of_the_mask_have_rates_of_their_own(images):
    many = train_batch(images[:1].expand(2000, -1, -1, -1))

    def kept(**changes) -> list[float]:
        torch.manual_seed(0)
        drawn = ifam(**changes).draw(many)
        return [drawn.keep_parts.float().mean().item(), drawn.keep_masked.float().mean().item()]

    assert kept() == pytest.approx([0.7, 0.7], abs=0.03)
    assert kept(part_dropout=0.0) == [1.0, 1.0]
    assert kept(part_dropout=0.3, mask_dropout=0.0) == pytest.approx([0.7, 1.0], abs=0.03)
    assert kept(mask_dropout=0.5) == pytest.approx([0.7, 0.5], abs=0.03)


def test_ablations_leave_out_what_they_name(images):
    def names(**changes) -> set[str]:
        model = ifam(**changes)
        return set(model.losses(images, LABELS, draws(model, images)))

    shaping = {"total_variation", "entropy", "equivariance", "orthogonality", "presence", "background"}
    assert names() == shaping | {"parts", "classification"}
    assert names(shaping=Shaping.none()) == {"parts", "classification"}
    assert names(shaping=Shaping(entropy=0, concentration=1)) == shaping - {"entropy"} | {
        "concentration", "parts", "classification",
    }  # fmt: skip
    assert names(classify_parts=0) == shaping | {"classification"}


def test_parameters_without_a_loss_are_frozen(images):
    """Several processes would wait for its gradient in vain."""
    for changes in (
        {}, {"preset": "published"}, {"classify_parts": 0}, {"shaping": Shaping.none()}, {"soft_mask": True},
        {"shaping": Shaping.none(), "classify_parts": 0}, {"tune_selector": "all"},
        {"tune_selector": "none"}, {"freeze_predictor": True},
        {"parts": 1}, {"registers": False},
    ):  # fmt: skip
        model = ifam(**changes)
        model(train_batch(images))["loss"].backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, (changes, name)
            assert parameter.grad is None or parameter.grad.isfinite().all(), (changes, name)
        grouped = [p for group in model.parameter_groups(10.0) for p in group.parameters]
        assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p.requires_grad}
        assert len(grouped) == len({id(p) for p in grouped})


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_frozen_parameters():
    tokens = {f"where.vit.{name}" for name in ("cls_token", "reg_token", "pos_embed")}
    parts = {"where.prototypes", "where.modulation.weight", "where.modulation.bias", "where.head.weight"}
    second = {f"what.vit.{name}" for name, _ in ifam().what.vit.named_parameters()}
    assert trained(ifam()) == tokens | parts | second
    head = {"what.vit.head.weight", "what.vit.fc_norm.weight", "what.vit.fc_norm.bias"}
    assert trained(ifam(freeze_predictor=True)) == tokens | parts | head
    assert trained(ifam(tune_selector="all")) == {name for name, _ in ifam().named_parameters()}
    assert not any("reg_token" in name for name, _ in ifam(registers=False).named_parameters())
    assert len(ifam(parts=5).where.prototypes) == 6


def test_both_stages_start_with_the_backbones_weights():
    model, vit = ifam(), small_vit(classes=0)
    for name, tensor in vit.state_dict().items():
        assert torch.equal(model.where.vit.state_dict()[name], tensor)
        assert torch.equal(model.what.vit.state_dict()[name], tensor)
    assert model.what.vit.head.bias is None


@pytest.mark.parametrize("parts", [1, 3])
def test_empty_masks_are_fine(images, parts):
    model = ifam(parts=parts)
    nothing = torch.zeros(len(images), parts, dtype=torch.bool)
    for how in (model.settings, replace(model.settings, mask_gradient=False), replace(model.settings, soft_mask=True)):
        model.settings = how
        drawn = draws(model, images, keep_masked=nothing, keep_parts=nothing)
        losses = model.losses(images, LABELS, drawn)
        torch.stack(list(losses.values())).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    empty = Sight(keep=torch.zeros(len(images), 4, 4, dtype=torch.bool))
    logits = model.eval().judge(images, empty).logits
    assert torch.equal(logits, logits[:1].expand_as(logits)), "nothing seen, the same answer"


# ---- evaluation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_evaluation_is_deterministic_and_removal_equals_masking(images):
    for preset in ("papers", "published"):
        model = ifam(preset=preset).eval()
        sight = model.look(images)
        assert torch.equal(sight.keep, model.look(images).keep)
        assert 0 < sight.keep.float().mean() < 1
        first, second = (model.judge(images, sight).logits for _ in range(2))
        assert torch.equal(first, second)
        masked = model.what.vit(images, sight.keep, hide="mask").logits
        torch.testing.assert_close(first, masked, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(first, model.what.vit(images, sight.keep.float()).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_published_evaluation_has_noise_and_its_map_is_not_its_mask(images):
    papers, published = ifam().eval(), ifam(preset="published").eval()
    assert torch.equal(papers.look(images).keep, papers.where.look(images).keep)
    sight = published.look(images)
    assert not torch.equal(sight.keep, papers.look(images).keep)
    assert not torch.equal(sight.keep, sight.parts.argmax(dim=1) < published.where.parts)
    shared = ifam(preset="published", share_noise=True).eval().look(images)
    assert torch.equal(shared.keep, shared.parts.argmax(dim=1) < published.where.parts)


def test_bfloat16_weights_look_and_judge(images):
    model = ifam().to(torch.bfloat16).eval()
    certificate = verify(model, images.bfloat16(), draws=1)
    assert certificate.verdict == "blind"
    assert certificate.conditions["weights_in"] == ["bfloat16"]
    other = pdiscoformer().to(torch.bfloat16).eval()
    assert other.judge(images.bfloat16(), other.look(images.bfloat16())).logits.isfinite().all()


def test_ifam_is_blind_and_pdiscoformer_and_soft_masks_are_not(images):
    for preset in ("papers", "published"):
        assert verify(ifam(preset=preset).eval(), images, draws=1).verdict == "blind"
    certificate = verify(pdiscoformer().eval(), images, draws=1)
    assert certificate.verdict == "leaks"
    soft = ifam(soft_mask=True).eval()
    sight = soft.look(images)
    assert torch.equal(sight.keep, sight.parts[:, :-1].amax(dim=1) > 0.5)
    assert verify(soft, images, draws=1).verdict != "blind"
