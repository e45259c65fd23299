"""What an prediction relies on: the spec's numbers, the definition, its gradient, many images at once, any ViT."""

import pytest
import torch
import torch.nn.functional as F

from sightline.errors import UserError
from sightline.methods.erm import Classifier
from sightline.methods.probe import ScaleClassifier
from sightline.methods.zeroshot import WholeZeroShot
from sightline.where import relevance
from sightline.where.attention import cls_attention_map
from sightline.where.relevance import (
    KINDS,
    MAPS,
    RelevanceSight,
    accumulate_relevance,
    gae,
    has_relevance_map,
    positive_contribution,
    relevance_map,
    rollout_row,
)

from ..commands import QUICK, typed
from ..conftest import small_vit

VITS = {
    "registers": {},
    "plain": {"registers": 0},
    "rotary": {"positions": "rotary", "qkv_bias": "no_key"},
    "swiglu": {"mlp": "swiglu", "layer_scale": 0.5, "head_norm": True},
}


@pytest.fixture
def images(generator) -> torch.Tensor:
    return torch.rand(4, 3, 32, 40, generator=generator)


def by_definition(vit, image: torch.Tensor, label: int) -> torch.Tensor:
    """GAE of one image, with whole matrices: R ← R + mean((∇A ⊙ A)⁺) R."""
    out = vit(image[None], attention=range(vit.config.depth))
    R = torch.eye(out.attention[0].shape[-1])
    for a, g in zip(out.attention, torch.autograd.grad(out.logits[0, label], out.attention), strict=True):
        R = R + (a * g).clamp(min=0)[0].mean(dim=0) @ R
    return R[0, vit.prefix :].view(out.grid).detach()


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_the_toy_vectors_of_the_specification():
    attention = torch.tensor(
        [[[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]], [[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.25, 0.25, 0.5]]]
    )
    gradients = torch.tensor([[[1, -2, 0.5], [0, 1, -1], [2, 0, 1]], [[-1, 1, 2], [1, 1, 1], [0, -1, 0]]])
    shares = positive_contribution(attention[None], gradients[None])
    assert torch.allclose(shares[0], torch.tensor([[0.3, 0.25, 0.325], [0.15, 0.4, 0.2], [0.1, 0, 0.4]]))
    assert torch.allclose(accumulate_relevance([shares, shares]), torch.tensor([[1.76, 0.675, 0.9275]]))


def test_rollout_is_the_first_row_of_the_product_with_rows_that_sum_to_one(generator):
    blocks = torch.rand(3, 2, 5, 5, generator=generator).softmax(dim=-1)
    product = torch.eye(5)
    for block in blocks:
        with_itself = block + torch.eye(5)
        product = with_itself / with_itself.sum(dim=-1, keepdim=True) @ product
    found = rollout_row(list(blocks))
    assert torch.allclose(found, product[:, 0], atol=1e-6)
    assert torch.allclose(found.sum(dim=1), torch.ones(2))


@pytest.mark.parametrize("name", VITS)
def test_one_backward_pass_per_batch_equals_the_definition_per_image(images, name):
    vit, classes = small_vit(**VITS[name]), torch.tensor([3, 0, 4, 3])
    expected = torch.stack([by_definition(vit, one, int(c)) for one, c in zip(images, classes, strict=True)])
    assert torch.allclose(MAPS["gae"](vit, images, classes), expected, rtol=1e-3, atol=1e-6)


def test_gradient_times_input_is_of_the_pixels_that_the_vit_sees(images):
    vit, classes = small_vit(), torch.tensor([1, 2, 3, 4])
    seen = ((images - vit.mean) / vit.std).requires_grad_()
    logits = vit(seen * vit.std + vit.mean).logits
    (found,) = torch.autograd.grad(logits[torch.arange(4), classes].sum(), seen)
    pixels = (found * seen).sum(dim=1).abs()
    assert torch.allclose(MAPS["gradient"](vit, images, classes), F.avg_pool2d(pixels, 8), rtol=1e-3, atol=1e-6)


def test_inference_mode_is_an_error_for_gradient_maps(images):
    with torch.inference_mode(), pytest.raises(UserError, match=r"gae: needs gradients.*use torch.no_grad\(\)"):
        MAPS["gae"](small_vit(classes=4), images)


def test_attention_is_that_of_the_last_block_whatever_the_class(images):
    vit = small_vit()
    found = MAPS["attention"](vit, images)
    shares = found / found.sum(dim=(1, 2), keepdim=True)
    assert torch.allclose(shares, cls_attention_map(vit, images), atol=1e-6)
    assert torch.equal(found, MAPS["attention"](vit, images, torch.tensor([0, 1, 2, 3])))


# ---- the gradient of the map -----------------------------------------------------------------------------------------


def sloped(value, parameters, step: float = 1e-2) -> float:
    """The slope of `value()` along its own gradient there, from two values around it."""
    found = torch.autograd.grad(value(), parameters, allow_unused=True)
    directions = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    length = torch.sqrt(sum(d.square().sum() for d in directions))
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p += sign * step * d / length
            ends.append(float(value()))
            for p, d in zip(parameters, directions, strict=True):
                p -= sign * step * d / length
    return (ends[0] - ends[1]) / (2 * step) / float(length)  # 1 where the gradient is right


@pytest.fixture
def scene(images, generator):
    vit, classes = small_vit(), torch.tensor([3, 0, 4, 3])
    weights = torch.randn(4, 4, 5, generator=generator)
    parameters = [vit.blocks[0].attn.qkv.weight, vit.blocks[1].mlp.fc1.weight, vit.blocks[2].attn.qkv.weight]
    return vit, images, classes, weights, parameters


def test_first_order_has_the_gradient_of_a_map_whose_gradients_are_constants(scene):
    vit, images, classes, weights, parameters = scene
    out = vit(images, attention=range(3))
    chosen = out.logits.gather(1, classes[:, None]).sum()
    constants = [g.detach() for g in torch.autograd.grad(chosen, out.attention)]

    def with_constants():
        attention = vit(images, attention=range(3)).attention
        row = accumulate_relevance([positive_contribution(a, g) for a, g in zip(attention, constants, strict=True)])
        return (row[:, vit.prefix :].view_as(weights) * weights).sum()

    assert sloped(with_constants, parameters) == pytest.approx(1, abs=0.02)
    (expected, found) = (
        torch.autograd.grad(value, parameters, allow_unused=True)
        for value in (with_constants(), (gae(vit, images, classes).maps * weights).sum())
    )
    assert all(torch.allclose(e, f, rtol=1e-3, atol=1e-5) for e, f in zip(expected, found, strict=True))


def test_second_order_has_the_gradient_of_the_map_itself_and_first_order_has_not(scene):
    vit, images, classes, weights, parameters = scene

    def whole():
        with torch.enable_grad():
            return (gae(vit, images, classes, second_order=True).maps * weights).sum()

    def published():
        with torch.enable_grad():
            return (gae(vit, images, classes).maps * weights).sum()

    assert sloped(whole, parameters) == pytest.approx(1, abs=0.02)
    assert abs(sloped(published, parameters) - 1) > 0.1


# ---- whose, and how many ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_maps_have_no_graph_and_do_not_depend_on_the_chunk_size(images, kind, monkeypatch):
    vit = small_vit().requires_grad_(False)
    with torch.no_grad():
        whole = MAPS[kind](vit, images)
    assert whole.shape == (4, 4, 5)
    assert not whole.requires_grad
    assert (whole >= 0).all()
    assert whole.std() > 0
    monkeypatch.setattr(relevance, "MAX_BYTES", 1)
    assert torch.allclose(MAPS[kind](small_vit(), images), whole, rtol=1e-4, atol=1e-7)
    assert images.grad is None


@pytest.mark.parametrize("kind", ["gae", "gradient"])
def test_by_default_the_predicted_class_is_explained(images, kind):
    vit = small_vit()
    predictions = vit(images).logits.argmax(dim=1)
    assert torch.equal(MAPS[kind](vit, images), MAPS[kind](vit, images, predictions))
    others = (predictions + 1) % 5
    assert not torch.allclose(MAPS[kind](vit, images, predictions), MAPS[kind](vit, images, others), rtol=0.1)


def test_a_method_is_explained_by_its_own_logits(images, generator):
    vit = small_vit()
    assert torch.equal(relevance_map(Classifier(vit), images), relevance_map(vit, images))
    words = F.normalize(torch.randn(7, 5, generator=generator), dim=1)
    clip = WholeZeroShot(vit, (32, 40), words, scale=10.0)
    label = torch.full((4,), 6)
    out = vit(images[:1], attention=range(3))
    score = (10 * F.normalize(out.logits, dim=1) @ words[6]).sum()
    row = accumulate_relevance(
        [positive_contribution(a, torch.autograd.grad(score, a, retain_graph=True)[0]) for a in out.attention]
    )
    expected = row[:, vit.prefix :].view(1, 4, 5)
    assert torch.allclose(relevance_map(clip, images, label)[:1], expected, rtol=1e-3, atol=1e-6)


def test_other_methods_have_no_relevance_map(images):
    scales = ScaleClassifier(small_vit(classes=0), (32, 32), (1, 2), 5)
    assert not has_relevance_map(scales)
    with pytest.raises(UserError, match="ScaleClassifier: has no relevance map"):
        relevance_map(scales, images)


def test_a_relevance_sight_keeps_the_most_relevant_patches(images):
    vit = small_vit()
    maps = relevance_map(vit, images)
    keep = RelevanceSight(vit, share=0.25).look(images).keep
    assert keep.flatten(1).sum(dim=1).tolist() == [5] * 4
    assert all(one[k].min() >= one[~k].max() for one, k in zip(maps, keep, strict=True))
    assert torch.equal(RelevanceSight(vit).look(images).keep, maps > maps.mean(dim=(1, 2), keepdim=True))


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_localize_measures_relevance_where_a_run_sees_everything(runs, toy, tmp_path):
    code, out, err = typed("localize", runs / "erm-0", toy, "--out", tmp_path / "found", *QUICK)
    assert code == 0, err
    assert "Map gae: attention mass inside the mask" in out
    assert "Map gae: hit rate (maximum inside the mask)" in out
