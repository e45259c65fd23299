"""Zoom and fill: a closer look at what may be seen, and nothing of what may not."""

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sightline.config.methods import Fill
from sightline.datasets.toy import write_toy
from sightline.load import load_as_trained as load
from sightline.methods.pair import Pair
from sightline.metrics.cost import measure_cost
from sightline.sight import Sight
from sightline.verify.verify import fingerprint, verify
from sightline.what.masked import MaskedViT
from sightline.what.zoom import Zoom, zoom_in, zoom_windows

from ..commands import QUICK, SMALL, typed
from ..conftest import small_vit

GREY = torch.full((3, 1, 1), 0.5)


@pytest.fixture
def images(generator):
    return torch.rand(4, 3, 32, 32, generator=generator)


@pytest.fixture
def masks():
    """Discs that cut through patches: small, large, in a corner, and a speck."""
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    discs = [(12, 14, 5), (16, 16, 13), (3, 29, 6), (20, 9, 1)]
    return torch.stack([(y - b).square() + (x - a).square() <= r * r for b, a, r in discs])


@pytest.fixture(params=["pixels", "patches", "boxes"])
def sight(request, masks):
    pixels = Sight.of_pixels(masks, (4, 4), at_least=0.01)
    kinds = {
        "pixels": pixels,
        "patches": Sight(pixels.keep),
        "boxes": replace(pixels, boxes=torch.tensor([[[0, 0, 16, 16], [8, 8, 31, 30]]] * 4)),
    }
    return kinds[request.param]


# ---- windows ---------------------------------------------------------------------------------------------------------

specks = st.sampled_from([False] * 9 + [True])
squares = st.integers(1, 9).flatmap(lambda n: arrays.arrays(bool, (n, n), elements=specks, fill=st.nothing()))
mask_arrays = arrays.array_shapes(min_dims=2, max_dims=2, max_side=9).flatmap(
    lambda shape: arrays.arrays(bool, shape, elements=specks, fill=st.nothing())
)


@settings(deadline=None, max_examples=150)
@given(squares)
def test_without_margin_the_window_is_the_smallest_that_holds_all(mask):
    n = len(mask)
    left, top, right, bottom = zoom_windows(torch.tensor(mask)[None], margin=0, smallest=1e-6)[0].tolist()
    holding = (
        side
        for side in range(1, n + 1)
        for y in range(n - side + 1)
        for x in range(n - side + 1)
        if mask.any() and mask[y : y + side, x : x + side].sum() == mask.sum()
    )
    assert right - left == bottom - top == next(holding, n)
    assert mask[top:bottom, left:right].sum() == mask.sum()


@settings(deadline=None, max_examples=100)
@given(mask_arrays, st.floats(0, 1), st.floats(0.01, 1))
def test_a_window_lies_in_the_picture_with_its_margin_where_there_is_room(mask, margin, smallest):
    h, w = mask.shape
    left, top, right, bottom = zoom_windows(torch.tensor(mask)[None], margin=margin, smallest=smallest)[0].tolist()
    assert 0 <= left <= right <= w
    assert 0 <= top <= bottom <= h
    assert mask[top:bottom, left:right].sum() == mask.sum()
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return
    around = max((rows[-1] + 1 - rows[0]) / h, (columns[-1] + 1 - columns[0]) / w) * (1 + 2 * margin)
    share = min(max(around, smallest), 1)
    assert abs(right - left - share * w) <= 0.501
    assert abs(bottom - top - share * h) <= 0.501
    for first, last, seen, side in ((left, right, columns, w), (top, bottom, rows, h)):
        off_centre = first + last - seen[0] - seen[-1] - 1
        assert -1 <= off_centre <= 0 or first == 0 or last == side


def test_each_image_has_its_own_window(masks):
    together = zoom_windows(masks, margin=0.1, smallest=0.25)
    assert torch.equal(together, torch.cat([zoom_windows(one[None], margin=0.1, smallest=0.25) for one in masks]))
    assert (together[:, 2:] - together[:, :2]).tolist() == [[13, 13], [32, 32], [12, 12], [8, 8]]


def test_where_nothing_is_visible_the_window_is_the_image():
    assert (
        zoom_windows(torch.zeros(2, 6, 8, dtype=torch.bool), margin=0.1, smallest=0.25).tolist() == [[0, 0, 8, 6]] * 2
    )


@pytest.mark.parametrize("wrong", [{"margin": -0.1}, {"smallest": 0.0}, {"smallest": 1.5}])
def test_invalid_zoom_settings_are_errors(wrong):
    with pytest.raises(ValueError, match="smallest"):
        Zoom(**wrong)


# ---- zooming ---------------------------------------------------------------------------------------------------------


def sampled(layers, boxes, size):
    """The same windows by torch's own sampling."""
    h, w = layers.shape[2:]
    left, top, right, bottom = boxes.to(layers.dtype).unbind(1)
    y = top[:, None] + (torch.arange(size[0]) + 0.5) * (bottom - top)[:, None] / size[0]
    x = left[:, None] + (torch.arange(size[1]) + 0.5) * (right - left)[:, None] / size[1]
    at = torch.stack(torch.broadcast_tensors(2 * x[:, None] / w - 1, 2 * y[:, :, None] / h - 1), dim=-1)
    return F.grid_sample(layers, at, padding_mode="border", align_corners=False)


@pytest.mark.parametrize("size", [(32, 32), (48, 40)])
def test_a_window_is_resampled_as_torch_does(images, masks, size):
    boxes = zoom_windows(masks, margin=0.1, smallest=0.25)
    zoomed, visible = zoom_in(images, masks, boxes, size, GREY)
    painted = torch.where(masks[:, None], images, GREY)
    assert torch.allclose(zoomed, sampled(painted, boxes, size), atol=1e-5)
    assert torch.equal(visible, sampled(masks[:, None].float(), boxes, size)[:, 0] >= 0.5)


@pytest.mark.parametrize("hidden", [0.0, torch.nan, torch.inf, -1e30])
def test_hidden_pixels_do_not_bleed_into_visible_ones(images, masks, hidden):
    boxes = zoom_windows(masks, margin=0.1, smallest=0.25)
    one, _ = zoom_in(images, masks, boxes, (32, 32), GREY)
    two, _ = zoom_in(torch.where(masks[:, None], images, hidden), masks, boxes, (32, 32), GREY)
    assert torch.equal(one, two)


def test_windows_are_made_in_full_precision_under_autocast(images, masks):
    arguments = (masks, zoom_windows(masks, margin=0.1, smallest=0.25), (32, 32), GREY)
    with torch.autocast("cpu", torch.bfloat16):
        under = zoom_in(images, *arguments)
    assert all(torch.equal(a, b) for a, b in zip(under, zoom_in(images, *arguments), strict=True))
    half, _ = zoom_in(images.bfloat16(), *arguments)
    assert half.dtype == torch.bfloat16


def test_float_masks_see_the_same_and_pass_the_gradient_of_the_surrogate(images, masks, generator):
    boxes = zoom_windows(masks, margin=0.1, smallest=0.25)
    images, grey, flat = images.double(), GREY.double(), masks.double()
    visible = masks.double().requires_grad_()
    zoomed, seen = zoom_in(images, visible, boxes, (32, 32), grey)
    as_told, as_hidden = zoom_in(images, masks, boxes, (32, 32), grey)
    assert torch.equal(zoomed, as_told)
    assert torch.equal(seen, as_hidden.double())
    a, b, way = (torch.randn(s, generator=generator).double() for s in (zoomed.shape, seen.shape, masks.shape))
    ((a * zoomed).sum() + (b * seen).sum()).backward()

    def surrogate(visible):
        layers = torch.cat([grey + visible[:, None] * (images - grey), visible[:, None]], dim=1)
        there = sampled(layers, boxes, (32, 32))
        return (a * there[:, :3]).sum() + (b * there[:, 3]).sum()

    slope = (surrogate(flat + 1e-3 * way) - surrogate(flat - 1e-3 * way)) / 2e-3
    assert (visible.grad * way).sum().item() == pytest.approx(slope.item(), rel=1e-4)


# ---- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", get_args(Fill))
@pytest.mark.parametrize("hide", ["removal", "mask"])
def test_zooming_in_is_blind(images, sight, fill, hide):
    certificate = verify(MaskedViT(small_vit(), hide, zoom=Zoom(), fill=fill), images, sight, draws=1, ascent_steps=2)
    assert certificate.verdict == "blind", certificate.sentence
    assert certificate.largest_gradient == 0


@torch.no_grad()
def test_the_prediction_reports_its_window(images, sight):
    what = MaskedViT(small_vit(), zoom=Zoom())
    prediction = what.judge(images, sight)
    visible = sight.visible((32, 32))
    assert torch.equal(prediction.sight.visible((32, 32)), visible)
    assert torch.equal(prediction.sight.boxes[:, 0], zoom_windows(visible, margin=0.1, smallest=0.25))
    assert torch.equal(what.judge(images, prediction.sight).logits, prediction.logits), "looking again is no other look"


@torch.no_grad()
def test_small_objects_are_enlarged(images, masks):
    sight = Sight.of_pixels(masks, (4, 4), at_least=0.01)
    plain, closer = MaskedViT(small_vit()), MaskedViT(small_vit(), zoom=Zoom())
    seen = closer.masked_input(images, sight.keep, sight.keep_pixels)
    before, after = masks.float().mean(dim=(1, 2)), seen.keep_pixels.float().mean(dim=(1, 2))
    assert (after[[0, 2, 3]] > 4 * before[[0, 2, 3]]).all()
    assert after[1] == before[1], "it filled the image already"
    assert torch.allclose(*(what.judge(images, sight).logits[1] for what in (plain, closer)), atol=1e-5)
    look = Pair(Look(sight[[0]]), closer), Pair(Look(sight[[0]]), plain)
    costs = [measure_cost(method, images[:1]) for method in look]
    assert costs[0].gflops > costs[1].gflops, "more tokens are used"
    assert costs[0].coverage == costs[1].coverage, "but no more of the image is seen"


class Look:
    def __init__(self, sight):
        self.sight = sight

    def look(self, images):
        return self.sight

    def maps(self, images):
        return {}


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 32), (32, 48)])
def test_the_whole_image_or_an_empty_mask_is_not_zoomed(generator, size):
    images = torch.rand(3, 3, *size, generator=generator)
    plain, closer = MaskedViT(small_vit()), MaskedViT(small_vit(), zoom=Zoom())
    grid = closer.vit.grid(images)
    for sight in (Sight.everything(images), Sight(torch.zeros(3, *grid, dtype=torch.bool))):
        assert torch.allclose(closer.judge(images, sight).logits, plain.judge(images, sight).logits, atol=1e-5)


@pytest.mark.parametrize("fill", ["mean", "noise"])
@pytest.mark.parametrize("closer", [None, Zoom()])
def test_training_sees_what_judge_sees_and_trains_the_selector(images, masks, fill, closer):
    what = MaskedViT(small_vit(), zoom=closer, fill=fill)
    sight = Sight.of_pixels(masks, (4, 4))
    hard = what.masked_input(images, sight.keep, sight.keep_pixels)
    keep, pixels = (mask.float().requires_grad_() for mask in (sight.keep, sight.keep_pixels))
    seen = what.masked_input(images, keep, pixels)
    assert torch.equal(seen.images, hard.images)
    assert torch.equal(seen.keep > 0, hard.keep)
    logits = what.vit(seen.images, seen.keep, seen.keep_pixels).logits
    assert torch.allclose(logits, what.judge(images, sight).logits, atol=1e-4)
    logits.square().sum().backward()
    assert all(mask.grad.isfinite().all() and mask.grad.any() for mask in (keep, pixels))
    assert what.masked_input(images, sight.keep, pixels).keep.dtype == torch.bool, "removal stays removal"


# ---- what hidden pixels look like ------------------------------------------------------------------------------------


@torch.no_grad()
def test_by_default_the_vit_itself_fills_in_its_mean(images, masks):
    vit, sight = small_vit(), Sight.of_pixels(masks, (4, 4))
    assert torch.equal(MaskedViT(vit).judge(images, sight).logits, vit(images, sight.keep, masks).logits)
    assert MaskedViT(vit).state_dict().keys() == {f"vit.{name}" for name in vit.state_dict()}
    assert MaskedViT(vit).extra_repr() == "hide=removal"


@torch.no_grad()
@pytest.mark.parametrize(("fill", "level"), [("black", 0.0), ("grey", 0.5), ("white", 1.0)])
def test_hidden_pixels_have_the_configured_fill(images, masks, fill, level):
    vit, sight = small_vit(), Sight.of_pixels(masks, (4, 4))
    painted = torch.where(masks[:, None], images, level)
    assert torch.equal(MaskedViT(vit, fill=fill).judge(images, sight).logits, vit(painted, sight.keep).logits)


@torch.no_grad()
def test_noise_is_always_the_same_and_fits_every_size(images, masks):
    empty = torch.zeros(4, 32, 32, dtype=torch.bool)
    keep = torch.ones(4, 4, 4, dtype=torch.bool)
    one, two = (MaskedViT(small_vit(seed), fill="noise") for seed in (0, 1))
    noise = one.masked_input(images, keep, empty).images
    assert torch.equal(noise, two.masked_input(1 - images, keep, empty).images)
    assert torch.equal(noise[0], noise[3])
    assert noise.std() > 0.2
    large = one.masked_input(
        torch.rand(1, 3, 256, 64), torch.ones(1, 32, 8, dtype=torch.bool), empty.new_zeros(1, 256, 64)
    )
    assert torch.equal(large.images[0, :, :32, :32], noise[0])
    assert torch.equal(large.images[0, :, 224:, :32], noise[0])


def test_another_look_is_another_architecture():
    kinds = [{}, {"zoom": Zoom()}, {"zoom": Zoom(0.2)}, {"fill": "black"}]
    assert len({fingerprint(MaskedViT(small_vit(), **kind))["architecture_sha256"] for kind in kinds}) == 4


# ---- from the command line -------------------------------------------------------------------------------------------


def test_early_masking_with_zoom_from_training_to_proof(tmp_path):
    toy = write_toy(tmp_path / "toy", train=16, val=8, test=8)
    arguments = (
        "--masks",
        "found:random:nano",
        "--sight",
        "pixels",
        "--patch-threshold",
        0.1,
        "--zoom",
        "--fill",
        "noise",
    )
    run = tmp_path / "run"
    code, _, err = typed("train", "early-mask", toy, *SMALL, "--size", 64, "--epochs", 1, *arguments, "--out", run)
    assert code == 0, err
    what = load(run).method.what
    assert (what.zoom, what.fill) == (Zoom(), "noise")
    before = (run / "predictions" / "test.csv").read_bytes()
    for command in ("evaluate", "localize", "shape"):
        code, _, err = typed(command, run, *QUICK)
        assert code == 0, err
    assert (run / "predictions" / "test.csv").read_bytes() == before
    assert "GFLOPs" in typed("evaluate", run, "--details", *QUICK)[1]
    code, out, err = typed("predict", run, toy / "test", "--device", "cpu", "--overlay", tmp_path / "seen")
    assert (code, len(list((tmp_path / "seen").rglob("*.png")))) == (0, 8), err
    code, out, err = typed("verify", run, toy / "test", "--draws", 1, "--limit", 4)
    assert (code, "blind" in out.lower()) == (0, True), out + err


def test_runs_from_before_there_was_zoom_still_load(tmp_path):
    toy = write_toy(tmp_path / "toy", train=16, val=8, test=8)
    assert typed("train", "early-mask", toy, *SMALL, "--epochs", 1, "--out", tmp_path / "run")[0] == 0
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    for new in ("zoom", "fill"):
        facts["config"].pop(new)
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    what = load(tmp_path / "run").method.what
    assert (what.zoom, what.fill) == (None, "mean")
