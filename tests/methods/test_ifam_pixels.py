"""iFAM to the pixel: what it keeps inside its patches, looking again, and that it is as blind as ever."""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sightline.config import Ifam
from sightline.config.stored import stored_config
from sightline.data.augment import Affine
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.base import PartSettings, RandomDraws, make_selector
from sightline.methods.ifam import IFam, build_ifam, check_pixel_config, make_predictor, paste_windows, pixel_settings
from sightline.sight import cell_share
from sightline.verify.verify import verify
from sightline.what.zoom import Zoom, zoom_in, zoom_windows
from sightline.where.parts import foreground_probability
from sightline.where.pixels import PixelSettings, pixel_foreground_probability

from ..commands import QUICK, SMALL, typed
from ..conftest import small_vit

BRIGHT, DARK = (0.85, 0.8, 0.2), (0.1, 0.2, 0.3)
LABELS = torch.tensor([0, 1, 2, 0])
NEW = ("sight", "guide_radius", "pixel_threshold", "zoom", "refine", "selector_size")
EVERY_WAY = pytest.mark.parametrize(("zoom", "refine"), list(product([False, True], repeat=2)))


def settings(**changes) -> Ifam:
    return Ifam(Path("data"), **{"parts": 3, "selector": "learned"} | changes)


def ifam(**changes) -> IFam:
    """A tiny iFAM that has learned to tell bright objects from dark background."""
    config, vit = settings(**{"guide_radius": 16} | changes), small_vit(classes=0)
    model = IFam(
        make_selector(vit, config, 3, config.selector_size),
        make_predictor(vit, config, 3),
        PartSettings.of(config),
        pixel_settings(config),
    ).eval()
    bright, dark = (torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 32, 32) for colour in (BRIGHT, DARK))
    with torch.no_grad():
        thing, ground = (model.where.discover(flat).features.mean(dim=(0, 2, 3)) for flat in (bright, dark))
        model.where.prototypes.copy_(torch.stack([thing] * model.where.parts + [ground]) + model.where.prototypes)
    model.where.temperature = 5.0
    return model


def things() -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    discs = [(12, 14, 8), (16, 16, 12), (9, 22, 8), (20, 10, 6)]
    return torch.stack([(y - b).square() + (x - a).square() <= r * r for b, a, r in discs])


@pytest.fixture
def images(generator):
    """Bright discs that end inside of patches, and less and less sharply."""
    soft = things()[:, None].float()
    for i in range(1, 4):
        soft[i:] = F.avg_pool2d(soft[i:], 3, 1, 1)
    bright, dark = (torch.tensor(colour).view(3, 1, 1) for colour in (BRIGHT, DARK))
    return soft * bright + (1 - soft) * dark + 0.1 * torch.rand(4, 3, 32, 32, generator=generator)


def draws(model: IFam, images, **changes) -> RandomDraws:
    noise = model.where.draw_noise(images, torch.Generator().manual_seed(0))
    everything = torch.ones(len(images), model.where.parts, dtype=torch.bool)
    return replace(RandomDraws(noise, noise, noise, Affine(20.0, 1.0, 2.0, 1.1), everything, everything), **changes)


# ---- what is asked for -----------------------------------------------------------------------------------------------


def test_by_default_pixels_are_hidden_and_the_sight_is_zoomed_and_refined():
    model = ifam()
    assert model.pixels == PixelSettings(pixel_threshold=0.5, patch_threshold=0.1, guide_radius=16, refine=True)
    assert model.what.zoom == Zoom()
    assert not model.settings.mask_gradient
    plain = ifam(zoom=False, refine=False, pixel_threshold=0.7, guide_radius=4, mask_gradient=True)
    assert plain.pixels == PixelSettings(pixel_threshold=0.7, guide_radius=4, refine=False)
    assert plain.what.zoom is None
    assert plain.settings.mask_gradient


@pytest.mark.parametrize("settings", [{"preset": "published"}, {"soft_mask": True}, {"sight": "patches"}])
def test_papers_published_code_and_soft_masks_hide_patches(settings, images):
    model = ifam(**settings)
    assert model.pixels is None
    assert getattr(model.what, "zoom", None) is None
    assert model.look(images).keep_pixels is None


def test_pixels_and_zoom_work_with_every_preset():
    assert settings(preset="published", sight="pixels").hides_pixels
    patches = ifam(sight="patches", zoom=True)
    assert (patches.pixels, patches.what.zoom) == (None, Zoom())


def test_runs_from_before_there_were_pixels_hide_patches(images):
    old = {name: value for name, value in asdict(settings()).items() if name not in NEW}
    old["shaping"] = {name: value for name, value in old["shaping"].items() if name != "total_variation_grid"}
    assert settings().hides_pixels
    config = stored_config(Ifam, old)
    assert not config.hides_pixels
    model = build_ifam(small_vit(classes=0).config, config, {"data": {"classes": ["a", "b", "c"]}}).eval()
    assert (model.pixels, model.what.zoom, model.where.size) == (None, None, None)
    assert model.settings.mask_gradient
    assert model.look(images).keep_pixels is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"soft_mask": True, "sight": "pixels"}, "--soft-mask"),
        ({"soft_mask": True, "zoom": True}, "--soft-mask"),
        ({"soft_mask": True, "selector": "clusters"}, "--soft-mask"),
        ({"selector": "clusters", "mask_gradient": True}, "--selector clusters: is not trained"),
        ({"sight": "patches", "refine": True}, "--refine"),
        ({"sight": "patches", "selector": "clusters", "refine": True}, "--refine"),
        ({"preset": "published", "refine": True}, "--refine"),
        ({"sight": "patches", "selector_size": 64}, "--selector-size"),
        ({"sight": "patches", "pixel_threshold": 0.9}, "--pixel-threshold: needs pixel masks"),
        ({"sight": "patches", "guide_radius": 0}, "--guide-radius: needs pixel masks"),
        ({"pixel_threshold": 0.0}, "--pixel-threshold 0.0"),
        ({"pixel_threshold": 1.0}, "--pixel-threshold 1.0"),
        ({"guide_radius": -1}, "--guide-radius -1"),
    ],
)
def test_invalid_arguments_are_errors(settings, message):
    with pytest.raises(UserError, match=message):
        check_pixel_config(Ifam(Path("data"), **settings))


WHOLE = {"sight": "patches", "selector": "clusters", "selector_size": 64, "pixel_threshold": 0.9, "guide_radius": 0}


@pytest.mark.parametrize(
    "settings", [{}, {"soft_mask": True}, {"preset": "published"}, {"sight": "patches", "zoom": True}, WHOLE]
)
def test_valid_settings_are_accepted(settings):
    check_pixel_config(Ifam(Path("data"), **settings))


# ---- looking and judging ---------------------------------------------------------------------------------------------


@EVERY_WAY
def test_it_is_blind_to_the_pixel(images, zoom, refine):
    certificate = verify(ifam(zoom=zoom, refine=refine), images, draws=1, ascent_steps=2)
    assert certificate.verdict == "blind", certificate.sentence
    assert {row.level for row in certificate.tried if row.trials} == {"patches", "pixels"}
    assert certificate.largest_gradient == 0


@EVERY_WAY
@torch.no_grad()
def test_look_is_deterministic_and_patches_and_pixels_agree(images, zoom, refine):
    model = ifam(zoom=zoom, refine=refine)
    sight, again = model.look(images), model.look(images)
    assert torch.equal(sight.keep_pixels, again.keep_pixels)
    assert torch.equal(sight.keep, cell_share(sight.keep_pixels, (4, 4)) >= 0.1)
    assert (sight.keep_pixels.dtype, sight.keep_pixels.shape) == (torch.bool, (4, 32, 32))
    overlap = (sight.keep_pixels & things()).sum(dim=(1, 2)) / (sight.keep_pixels | things()).sum(dim=(1, 2))
    assert (overlap[:3] > 0.85).all(), "it sees the discs, as long as they are not too small for it"
    assert (cell_share(sight.keep_pixels, (4, 4))[sight.keep] < 1).any(), "finer than patches"
    one = model.look(images[:1])
    assert (one.keep_pixels != sight.keep_pixels[:1]).float().mean() < 0.01, "whoever else is in the batch"


@EVERY_WAY
@torch.no_grad()
def test_predictions_do_not_depend_on_hidden_pixels(images, zoom, refine):
    model = ifam(zoom=zoom, refine=refine)
    sight = model.look(images)
    prediction, hidden = model.judge(images, sight), ~sight.visible((32, 32))[:, None]
    for anything in (torch.nan, torch.inf, -1e30):
        other = model.judge(images.masked_fill(hidden, anything), sight)
        assert torch.equal(other.logits, prediction.logits)
        assert torch.equal(other.tokens, prediction.tokens)
    assert not torch.equal(model.judge(1 - images, sight).logits, prediction.logits)


@torch.no_grad()
def test_a_higher_pixel_threshold_keeps_less(images):
    model = ifam(refine=False)
    seen = []
    for sure in (0.3, 0.5, 0.7):
        model.pixels = replace(model.pixels, pixel_threshold=sure)
        seen.append(model.look(images).keep_pixels)
    assert not (seen[1] & ~seen[0]).any()
    assert not (seen[2] & ~seen[1]).any()
    assert seen[0].sum() > seen[1].sum() > seen[2].sum() > 0


@torch.no_grad()
@pytest.mark.parametrize("refine", [False, True])
def test_parts_can_be_discovered_in_larger_images(images, refine):
    usual, finer = ifam(refine=refine), ifam(selector_size=64, refine=refine)
    sight = finer.look(images)
    assert usual.look(images).parts.shape[2:] == (4, 4)
    assert sight.parts.shape[2:] == (8, 8)
    assert sight.keep.shape[1:] == (4, 4), "but predictions are made from the images as they are"
    assert torch.equal(finer.where.resize(images[..., :1, :1]).flatten(2).amin(2), images[..., 0, 0])
    assert verify(finer, images, draws=1, ascent_steps=1).verdict == "blind"
    losses = finer.losses(images, LABELS, finer_draws := draws(finer, images))
    assert finer_draws.noise_mask.shape[2:] == (8, 8)
    assert all(loss.isfinite() for loss in losses.values())


def test_the_images_own_size_as_selector_size_changes_nothing(images):
    one, two = ifam(), ifam(selector_size=32)
    assert torch.equal(one.look(images).keep_pixels, two.look(images).keep_pixels)


@EVERY_WAY
def test_an_empty_sight_has_a_prediction_and_a_gradient(images, zoom, refine):
    model = ifam(zoom=zoom, refine=refine, mask_gradient=True)
    with torch.no_grad():
        model.where.prototypes[:-1] += 100.0
        sight = model.look(images)
        assert not sight.keep_pixels.any()
        assert not sight.keep.any()
        logits = model.judge(images, sight).logits
    assert logits.isfinite().all()
    assert torch.equal(logits, logits[:1].expand_as(logits)), "nothing seen, the same answer"
    torch.stack(list(model.losses(images, LABELS, draws(model, images)).values())).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
def test_the_pixels_of_a_dropped_part_disappear():
    model = ifam(refine=False)
    stripes = torch.tensor([[0.9, 0.1, 0.1], [0.9, 0.1, 0.1], [0.1, 0.9, 0.1], [0.1, 0.1, 0.9]])
    images = stripes.T[None, :, None].repeat_interleave(8, dim=3).expand(-1, -1, 32, -1)
    scores = torch.full((1, 4, 4, 4), -20.0)
    scores[:, 0, :, :2] = scores[:, 1, :, 2:3] = scores[:, -1, :, 3:] = 20.0
    for kept, columns in (([1, 1, 1], slice(0, 24)), ([0, 1, 1], slice(16, 24)), ([1, 0, 1], slice(0, 16))):
        drawn = draws(model, images, keep_masked=torch.tensor([kept], dtype=torch.bool))
        keep, pixels = model.pixel_masks(images, scores, drawn)
        expected = torch.zeros(1, 32, 32, dtype=torch.bool)
        expected[..., columns] = True
        assert torch.equal(keep, cell_share(pixels, (4, 4)) >= 0.1)
        assert torch.equal(pixels, expected)
    drawn = draws(model, images, keep_masked=torch.zeros(1, 3, dtype=torch.bool))
    assert not any(mask.any() for mask in model.pixel_masks(images, scores, drawn))


# ---- looking again ---------------------------------------------------------------------------------------------------

WINDOWS = torch.tensor([[4, 8, 20, 24], [0, 0, 32, 32], [22, 21, 32, 31], [0, 5, 27, 32]])


def waves() -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    return torch.stack([0.5 + 0.5 * torch.sin((a * x + b * y) / 9) for a, b in ((1, 0), (0, 1), (1, 1), (0.5, -1))])


def test_refined_values_are_pasted_back_in_place():
    maps, everything = waves(), torch.ones(4, 32, 32, dtype=torch.bool)
    enlarged = zoom_in(maps[:, None].expand(-1, 3, -1, -1), everything, WINDOWS, (32, 32), torch.zeros(3, 1, 1))[0]
    back = paste_windows(enlarged[:, 0], WINDOWS)
    for (left, top, right, bottom), found, true in zip(WINDOWS.tolist(), back, maps, strict=True):
        inside = slice(top, bottom), slice(left, right)
        assert (found[inside] - true[inside]).abs().max() < 0.05
        assert (found[inside] - true[inside])[1:-1, 1:-1].abs().max() < 0.01
        assert torch.count_nonzero(found) == torch.count_nonzero(found[inside]), "nothing outside of the window"
    assert torch.equal(back[1], enlarged[1, 0]), "of the whole image, it is the same"


def test_a_window_of_the_whole_image_is_the_image():
    back = paste_windows(torch.ones(4, 32, 32), WINDOWS)
    for full, (left, top, right, bottom) in zip(back, WINDOWS.tolist(), strict=True):
        expected = torch.zeros(32, 32)
        expected[top:bottom, left:right] = 1
        assert torch.allclose(full, expected, atol=1e-6)


def test_pasting_windows_is_precise_under_autocast_and_has_a_gradient(generator):
    found = torch.rand(4, 32, 32, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        under = paste_windows(found, WINDOWS)
    assert torch.equal(under, paste_windows(found, WINDOWS))
    some = found[:2, ::4, ::4].double().requires_grad_()
    assert torch.autograd.gradcheck(paste_windows, (some, torch.tensor([[1, 2, 5, 6], [0, 0, 8, 8]])))


@torch.no_grad()
def test_refinement_looks_at_the_window_around_the_first_mask(images):
    model = ifam()
    foreground = torch.zeros(4, 32, 32)
    foreground[:, 10:18, 6:16] = 1.0
    closer, windows = model.zoomed_views(images, foreground)
    assert windows.tolist() == zoom_windows(foreground > 0, margin=0.25, smallest=0.3).tolist() == [[3, 6, 18, 21]] * 4
    cut = F.interpolate(images[..., 6:21, 3:18], (32, 32), mode="bilinear")
    assert (closer - cut)[..., 3:-3, 3:-3].abs().max() < 1e-5, "of which it may see all"


# ---- where the gradient goes -----------------------------------------------------------------------------------------


@EVERY_WAY
def test_without_mask_gradient_stage_1_gets_none_from_stage_2(images, zoom, refine):
    for settings, teaches in (({}, False), ({"mask_gradient": True}, True)):
        model = ifam(zoom=zoom, refine=refine, **settings)
        loss = model.losses(images, LABELS, draws(model, images))["classification"]
        (gradient,) = torch.autograd.grad(loss, [model.where.prototypes], allow_unused=True)
        assert (gradient is not None) == teaches
        assert not teaches or (gradient.abs().amax(dim=1) > 0).all()


@EVERY_WAY
def test_training_sees_what_judge_sees(images, zoom, refine):
    """Without noise and dropout; with or without the mask's gradient."""
    for trained in (False, True):
        model = ifam(zoom=zoom, refine=refine, mask_gradient=trained)
        drawn = draws(model, images)
        drawn = replace(drawn, noise=0 * drawn.noise, noise_mask=0 * drawn.noise_mask)
        loss = model.losses(images, LABELS, drawn)["classification"].item()
        with torch.no_grad():
            logits = model.judge(images, model.look(images)).logits
        assert loss == pytest.approx(F.cross_entropy(logits, LABELS).item(), rel=1e-4)


@EVERY_WAY
def test_the_gradient_is_that_of_the_pixel_probabilities(images, zoom, refine):
    """Hard forward; backward, the loss as a function of both masks × slopes of the probabilities: by differences."""
    model, images = ifam(zoom=zoom, refine=refine, mask_gradient=True).double(), images.double()
    where, kept = model.where, torch.tensor([[True, False, True]]).expand(4, -1)
    drawn = draws(model, images, keep_masked=kept)
    (gradient,) = torch.autograd.grad(model.losses(images, LABELS, drawn)["classification"], [where.prototypes])

    with torch.no_grad():
        parts = where.discover(images, noise=drawn.noise_mask)
        masks = [mask.requires_grad_() for mask in model.pixel_masks(images, parts.scores, drawn)]
        views, windows = images, None
        if refine:
            first = pixel_foreground_probability(foreground_probability(parts.scores, kept), images, model.pixels)
            views, windows = model.zoomed_views(images, first)
        features = where.discover(views).features
    seen = model.what.masked_input(images, *masks)
    logits = model.what.vit(seen.images, seen.keep, seen.keep_pixels).logits
    upstream = torch.autograd.grad(F.cross_entropy(logits, LABELS), masks)

    def surrogate() -> float:
        squares = (features[:, None] - where.prototypes[:, :, None, None]).square().sum(dim=2)
        probabilities = ((drawn.noise_mask - squares) / where.temperature).softmax(dim=1)[:, [0, 2]].sum(dim=1)
        foreground = pixel_foreground_probability(probabilities, views, model.pixels)
        foreground = foreground if windows is None else paste_windows(foreground, windows)
        return float((upstream[0] * F.avg_pool2d(foreground, 8)).sum() + (upstream[1] * foreground).sum())

    for k, d in ((0, 3), (1, 7), (3, 0)):
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                before = where.prototypes[k, d].item()
                where.prototypes[k, d] += step
                values.append(surrogate())
                where.prototypes[k, d] = before
        assert gradient[k, d].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-9)


# ---- from the command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [(), ("--selector-size", 64, "--zoom", False, "--pixel-threshold", 0.4)], ids=["default", "coarser"]
)
def test_from_training_to_proof(tmp_path, flags):
    toy, run = write_toy(tmp_path / "toy", train=16, val=8, test=8), tmp_path / "run"
    recipe = ("--epochs", 1, "--lr", 1e-4, "--head-lr-factor", 10, "--prototype-lr-factor", 10, "--selector", "learned")
    code, _, err = typed("train", "ifam", toy, *SMALL, "--size", 64, *recipe, *flags, "--out", run)
    assert code == 0, err
    model = load(run).method
    assert model.pixels.refine
    assert (model.what.zoom is None, model.where.size) == ((True, 64) if flags else (False, 128))
    before = (run / "predictions" / "test.csv").read_bytes()
    for command in ("evaluate", "localize", "shape"):
        code, _, err = typed(command, run, *QUICK)
        assert code == 0, err
    assert (run / "predictions" / "test.csv").read_bytes() == before
    code, _, err = typed("predict", run, toy / "test", "--device", "cpu", "--overlay", tmp_path / "seen")
    assert (code, len(list((tmp_path / "seen").rglob("*.png")))) == (0, 8), err
    code, out, err = typed("verify", run, toy / "test", "--draws", 1, "--limit", 4)
    assert (code, "blind" in out.lower()) == (0, True), out + err


def test_invalid_flags_are_errors_on_the_command_line(tmp_path):
    toy = write_toy(tmp_path / "toy", train=16, val=8, test=8)
    code, _, err = typed("train", "ifam", toy, *SMALL, "--sight", "patches", "--selector-size", 128)
    assert code != 0
    assert "--selector-size" in err


def test_a_drawn_mask_is_exact_to_the_pixel_however_small():
    model, images = ifam(), torch.rand(1, 3, 32, 32)
    speck = torch.zeros(1, 32, 32, dtype=torch.bool)
    speck[0, 5, 9] = True
    assert torch.equal(model.look_at(images, speck).visible((32, 32)), speck)
