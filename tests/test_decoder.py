"""The decoder of pixels: nothing at first, taught by the answer and by what shapes parts, and never able to peek."""

import math
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from onnx.numpy_helper import from_array

from sightline.audit.session import Viewer
from sightline.config import App, Ifam, Shaping
from sightline.data.toyset import write_toy
from sightline.errors import UserError
from sightline.export_check import compare
from sightline.export_graph import to_onnx, traceable
from sightline.intervene import intervened
from sightline.interventions import Intervention
from sightline.load import load
from sightline.methods.ifam import IFam, build_ifam, decoder_of, refuse_hopeless_pixels
from sightline.methods.pdiscoformer import Draws
from sightline.train import train
from sightline.verify import verify
from sightline.where.corrections import Correction
from sightline.where.decoder import Decoder, pixel_losses

from .commands import QUICK, typed
from .conftest import small_vit
from .exporting import tiny
from .test_ifam_pixels import BRIGHT, DARK, LABELS, draws, settings, things
from .test_ifam_pixels import ifam as without_decoder
from .training import Stop, files, stopped_after

EVERY_WAY = pytest.mark.parametrize(("guide", "look_again"), list(product([0, 16], [False, True])))


def ifam(**changes) -> IFam:
    """Tells bright things from dark ground, and has a decoder."""
    told = {"decoder": 4} | changes
    model = without_decoder(**told)
    model.decoder = decoder_of(settings(**told))
    return model


def drawing(model: IFam) -> IFam:
    """The same, once its decoder has learnt something, whatever it is."""
    assert model.decoder is not None
    with torch.no_grad():
        model.decoder.last.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture
def images(generator):
    """Bright discs, a little blurred."""
    soft = F.avg_pool2d(things()[:, None].float(), 5, 1, 2)
    bright, dark = (torch.tensor(colour).view(3, 1, 1) for colour in (BRIGHT, DARK))
    return soft * bright + (1 - soft) * dark + 0.1 * torch.rand(4, 3, 32, 32, generator=generator)


def without_noise(model: IFam, images) -> Draws:
    drawn = draws(model, images)
    return replace(drawn, noise=0 * drawn.noise, noise_moved=0 * drawn.noise, noise_mask=0 * drawn.noise)


# ---- what it may do --------------------------------------------------------------------------------------------------


def test_at_first_shares_are_the_same_to_the_bit(generator):
    shares, images = torch.rand(3, 35, 32, generator=generator), torch.rand(3, 3, 35, 32, generator=generator)
    shares[:, 0], shares[:, 1] = 0.0, 1.0
    assert torch.equal(Decoder(8)(shares, images), shares)


def test_later_it_moves_doubtful_pixels_and_sure_ones_keep_their_side(generator):
    decoder = Decoder(8)
    with torch.no_grad():
        decoder.last.weight.normal_(0, 100.0, generator=generator)
    shares, images = torch.rand(3, 35, 33, generator=generator), torch.rand(3, 3, 35, 33, generator=generator)
    shares[:, 0], shares[:, 1] = 0.0, 1.0
    drawn = decoder(shares, images)
    assert drawn.shape == (3, 35, 33)
    assert (drawn[:, 0] == 0).all(), "what is hidden for certain, such as a dropped part"
    assert (drawn[:, 1] == 1).all()
    assert (drawn[shares < 0.0999] < 0.5).all()
    assert (drawn[shares > 0.9001] > 0.5).all()
    doubtful = (shares > 0.2) & (shares < 0.8)
    assert ((drawn[doubtful] >= 0.5) != (shares[doubtful] >= 0.5)).any()
    assert not torch.equal(drawn, decoder(shares, 1 - images)), "it looks at the picture"


def test_it_cannot_learn_to_see_more_of_everything(generator):
    shares, images = torch.rand(3, 32, 32, generator=generator), torch.rand(3, 3, 32, 32, generator=generator)
    wishful, other = Decoder(8), Decoder(8)
    with torch.no_grad():
        wishful.first.bias.fill_(1.0)
        wishful.last.weight.fill_(0.1)
        other.last.weight.normal_(0, 0.01, generator=generator)
    seen = torch.sigmoid(shares.logit() + Decoder.REACH / 2).mean()
    assert seen - shares.mean() > 0.15, "what it wishes for"
    assert (wishful(shares, images) - shares).mean(dim=(1, 2)).abs().max() < 0.02
    moved = other(shares, images) - shares
    assert moved.abs().mean() > 0.001
    assert (moved.mean(dim=(1, 2)).abs() < 0.05 * moved.abs().mean(dim=(1, 2))).all()


def test_it_is_light_and_precise_and_drawn_from_its_seed_alone(generator):
    shares, images = torch.rand(2, 16, 16, generator=generator), torch.rand(2, 3, 16, 16, generator=generator)
    before = torch.get_rng_state()
    one, same, other = Decoder(16, seed=1), Decoder(16, seed=1), Decoder(16, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(p.numel() for p in one.parameters()) == 7536
    assert torch.equal(one.first.weight, same.first.weight)
    assert not torch.equal(one.first.weight, other.first.weight)
    with torch.no_grad():
        one.last.weight.normal_(generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            under = one(shares, images)
        assert torch.equal(under, one(shares, images))


@EVERY_WAY
@torch.no_grad()
def test_with_it_iFAM_begins_as_without(images, guide, look_again):
    one, plain = (ifam(guide=guide, look_again=look_again, decoder=decoder) for decoder in (4, None))
    for name, weights in plain.state_dict().items():
        assert torch.equal(one.state_dict()[name], weights)
    assert torch.equal(one.look(images).keep_pixels, plain.look(images).keep_pixels)
    drawn = drawing(one).look(images).keep_pixels
    assert (drawn != plain.look(images).keep_pixels).any()
    share = one.in_pixels(Correction().foreground(one.find(images).maps), images)
    assert share.min() >= 0
    assert share.max() <= 1


@EVERY_WAY
def test_it_is_blind_and_dropped_parts_stay_dropped(images, guide, look_again):
    model = drawing(ifam(guide=guide, look_again=look_again))
    certificate = verify(model, images, draws=1, ascent_steps=1)
    assert certificate.verdict == "blind", certificate.sentence
    assert {row.level for row in certificate.tried if row.trials} == {"patches", "pixels"}
    with torch.no_grad():
        found = model.find(images)
        assert model.decide(images, found).keep_pixels.any()
        assert not model.decide(images, found, Correction(drop=(0, 1, 2))).keep_pixels.any()
        told = torch.rand(4, 32, 32) > 0.5
        assert torch.equal(model.look_at(images, told).keep_pixels, told), "a user's mask is not redrawn"


# ---- what teaches it -------------------------------------------------------------------------------------------------


@EVERY_WAY
def test_the_answer_and_what_shapes_parts_teach_it(images, guide, look_again):
    model = ifam(guide=guide, look_again=look_again)
    for learnt in (False, True):
        losses = (drawing(model) if learnt else model).losses(images, LABELS, without_noise(model, images))
        for name in ("answer", "pixel_total_variation", "pixel_entropy"):
            gradients = torch.autograd.grad(losses[name], list(model.decoder.parameters()), retain_graph=True)
            named = dict(zip((n for n, _ in model.decoder.named_parameters()), gradients, strict=True))
            assert all(g.isfinite().all() for g in gradients)
            assert all((g.abs().max() > 0) == (learnt or n.startswith("last.")) for n, g in named.items()), name


@pytest.mark.parametrize("look_again", [False, True])
def test_the_answer_teaches_the_parts_only_if_asked_to_and_pixel_losses_never(images, look_again):
    for told, teaches in (({}, False), ({"mask_gradient": True}, True)):
        model = drawing(ifam(look_again=look_again, **told))
        losses = model.losses(images, LABELS, without_noise(model, images))
        (gradient,) = torch.autograd.grad(
            losses["answer"], [model.where.prototypes], retain_graph=True, allow_unused=True
        )
        assert (gradient is not None) == teaches
        pixels = losses["pixel_total_variation"] + losses["pixel_entropy"]
        assert torch.autograd.grad(pixels, [model.where.prototypes], allow_unused=True) == (None,)


@EVERY_WAY
def test_training_sees_what_judging_sees(images, guide, look_again):
    model = drawing(ifam(guide=guide, look_again=look_again))
    answer = model.losses(images, LABELS, without_noise(model, images))["answer"].item()
    with torch.no_grad():
        logits = model.judge(images, model.look(images)).logits
    assert answer == pytest.approx(F.cross_entropy(logits, LABELS).item(), rel=1e-4)


def test_what_shapes_parts_shapes_pixels():
    weights = Shaping(total_variation=3.0, entropy=2.0, total_variation_at=37)
    halves = torch.zeros(2, 16, 16)
    halves[:, :, 8:] = 1.0
    losses = pixel_losses(halves, weights)
    assert losses["pixel_total_variation"].item() == pytest.approx(3 * 2 * 16 / 16**2 * 16 / 37)
    assert losses["pixel_entropy"].item() == 0
    assert pixel_losses(halves, replace(weights, total_variation_at=0))["pixel_total_variation"] == 3 * 2 * 16 / 16**2
    assert pixel_losses(0.5 + 0 * halves, weights)["pixel_entropy"].item() == pytest.approx(2 * math.log(2))
    assert pixel_losses(halves, Shaping.none()) == {}


# ---- asked for, or not -----------------------------------------------------------------------------------------------


def test_by_default_there_is_none(images):
    model = ifam(decoder=Ifam(Path("data")).decoder)
    assert model.decoder is None
    assert not any(name.startswith("decoder") for name in model.state_dict())
    assert not any(name.startswith("pixel_") for name in model.losses(images, LABELS, without_noise(model, images)))
    old = {name: value for name, value in asdict(Ifam(Path("data"))).items() if name != "decoder"}
    facts = {"config": old, "data": {"classes": ["a", "b", "c"]}}
    assert build_ifam(small_vit(classes=0).config, facts).decoder is None


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"decoder": 16, "sight": "patches"}, "--decoder: draws pixels, so it needs --sight pixels"),
        ({"decoder": 16, "preset": "published"}, "--decoder: draws pixels"),
        ({"decoder": 0}, "--decoder 0: channels, such as 16"),
    ],
)
def test_what_cannot_be_is_refused(told, said):
    with pytest.raises(UserError, match=said):
        refuse_hopeless_pixels(Ifam(Path("data"), **told))


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=16, val=8, test=8, size=32)


def asked(toy, folder: Path, **changes) -> Ifam:
    recipe = {"epochs": 2, "batch": 8, "parts": 2, "sure": 0.7, "prototype_lr": 100.0, "decoder": 4}
    return Ifam(toy, tiny(folder.parent, depth=1), folder, size=32, workers=0, device="cpu", **recipe | changes)


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    return train(asked(toy, tmp_path_factory.mktemp("runs") / "run"))


def test_an_interrupted_run_ends_with_the_same_bits(trained, toy, tmp_path):
    config = asked(toy, tmp_path / "run", save_minutes=0.0)
    with stopped_after(3), pytest.raises(Stop):
        train(config)
    assert files(train(replace(config, save_minutes=10.0, resume=True))) == files(trained)


def test_from_the_run_to_the_proof(trained, toy, tmp_path):
    model = load(trained).method
    assert model.decoder.last.weight.abs().max() > 0, "it has learnt something"
    before = (trained / "predictions" / "test.csv").read_bytes()
    code, _, err = typed("evaluate", trained, *QUICK)
    assert (code, (trained / "predictions" / "test.csv").read_bytes()) == (0, before), err
    code, _, err = typed("predict", trained, toy / "test", "--device", "cpu", "--overlay", tmp_path / "seen")
    assert (code, len(list((tmp_path / "seen").rglob("*.png")))) == (0, 8), err
    code, out, err = typed("verify", trained, toy / "test", "--draws", 1, "--limit", 4)
    assert (code, "blind" in out.lower()) == (0, True), out + err


def test_the_app_answers_as_it_does(trained, toy):
    viewer, model = Viewer.open(App(trained, device="cpu")), load(trained)
    picture, wish = viewer.read(next((toy / "val").glob("*.png"))), Intervention(drop=(1,))
    image, corrected = picture.pixels[None].float() / 255, intervened(model.method, wish)
    with torch.no_grad():
        told = corrected.judge(image, corrected.look(image))
    assert torch.equal(viewer.answer(picture, wish).probabilities, told.probabilities[0])


def test_an_exported_file_answers_as_it_does(images):
    model = drawing(ifam(look_again=False, zoom=False))
    del model.where.vit.blocks[1:], model.what.vit.blocks[1:]  # quicker to trace
    traced = traceable(model, "run")
    file = to_onnx(traced, replace(model.what.vit.config.input, size=(32, 32)))
    for name, value in traced.more_inputs((32, 32)).items():
        file.graph.initializer.append(from_array(value.numpy(), name))
    agreement = compare(file.SerializeToString(), traced, model, None, images, None)
    assert agreement.probabilities < 1e-4
    assert agreement.sight == 0
