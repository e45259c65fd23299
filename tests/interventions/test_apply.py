"""Interventions: what part and token removal hide, that stage 1 runs once per image, and the intervention file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.config import Ifam, Pdiscoformer
from sightline.data.rows import Rows
from sightline.errors import UserError
from sightline.interventions.apply import CachedLook, apply_intervention, calibrate
from sightline.interventions.file import DistanceSketch, Intervention, parse_names
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.ifam import IFam, make_predictor, pixel_settings
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.training.distributed import make_accelerator
from sightline.verify.verify import verify
from sightline.where.corrections import Correction, PartAssignment
from sightline.where.parts import foreground_probability, hard_keep

from ..conftest import small_vit

COLOURS = ((0.9, 0.8, 0.1), (0.1, 0.8, 0.9), (0.9, 0.1, 0.6), (0.1, 0.15, 0.2))  # three parts and the background
WAYS = {
    "patches": {"sight": "patches"},
    "published": {"preset": "published"},
    "pixels": {"selector": "learned", "refine": False, "zoom": False},
    "refined": {"selector": "learned"},
    "soft": {"soft_mask": True},
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def trained(model, temperature=5.0):
    """Prototypes that tell the colours apart."""
    flat = torch.tensor(COLOURS)[:, :, None, None].expand(-1, 3, 32, 32)
    with torch.no_grad():
        model.where.prototypes.copy_(model.where.discover(flat).features.mean(dim=(2, 3)))
    model.where.temperature = temperature
    return model.eval()


def ifam(way="refined", **changes) -> IFam:
    settings, vit = Ifam(Path("data"), **{"parts": 3} | WAYS[way] | changes), small_vit(classes=0)
    return trained(
        IFam(
            make_selector(vit, settings, 2),
            make_predictor(vit, settings, 2),
            PartSettings.of(settings),
            pixel_settings(settings),
        )
    )


def pdiscoformer() -> PDiscoFormer:
    settings = Pdiscoformer(Path("data"), parts=3)
    return trained(PDiscoFormer(make_selector(small_vit(classes=0), settings, 2), PartSettings.of(settings)))


@pytest.fixture
def images(generator):
    """Each has all three colours, in patches of 8 pixels, on the background."""
    photos = torch.tensor(COLOURS[3])[:, None, None].repeat(4, 1, 32, 32).clone()
    for i, image in enumerate(photos):
        for part, (row, column) in enumerate([(i % 2, 1), (2, 1 + i % 2), (3 * (i // 2), 3)]):
            colour = torch.tensor(COLOURS[part])[:, None, None]
            image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = colour
    return (photos + 0.05 * torch.rand(photos.shape, generator=generator)).clamp(0, 1)


def assignment(generator, parts=4, spread=1.0) -> PartAssignment:
    scores = spread * torch.randn(2, parts + 1, 8, 8, generator=generator)
    return PartAssignment(scores, torch.rand(2, 8, 8, generator=generator))


# ---- part removal, token removal, forced parts -----------------------------------------------------------------------


def test_patches_of_a_dropped_part_become_background_and_no_other_parts(generator):
    some = assignment(generator, spread=0.1)
    correction = Correction(drop=(1, 3))
    assert torch.equal(correction.keep(some), hard_keep(some.scores) & (some.part != 1) & (some.part != 3))
    assert not correction.foreground_probability(some)[correction.removed(some)].any()


def test_part_removal_hides_what_part_dropout_hides_and_what_other_parts_would_take_over(generator):
    some = assignment(generator)
    correction = Correction(drop=(2,))
    keep_parts = torch.tensor([[True, True, False, True]] * 2)
    assert torch.equal(correction.keep_parts(some), keep_parts)
    in_training = hard_keep(some.scores, keep_parts)
    assert torch.equal(correction.keep(some), in_training & (some.part != 2))
    assert (in_training & (some.part == 2)).any()


def test_patches_too_far_from_their_own_part_become_background(generator):
    some = assignment(generator)
    limits = (0.5, math.inf, math.nan, -1.0)
    far = some.distances > torch.tensor([0.5, 2.0, 2.0, -1.0])[some.part]
    correction = Correction(max_distances=limits)
    assert torch.equal(correction.keep(some), hard_keep(some.scores) & ~far)
    assert far.any()
    likely = foreground_probability(some.scores) >= 0.5
    assert (likely & ~hard_keep(some.scores)).any(), "all parts together may beat the background where none does alone"
    assert correction.foreground_probability(some)[far].max() < 0.5, "nor do their pixels stay visible"
    assert not correction.foreground_probability(some)[far & likely].any()
    assert torch.equal(Correction(max_distances=(math.nan,) * 4).keep(some), hard_keep(some.scores))


def test_part_and_token_removal_together_remove_what_either_does(generator):
    some = assignment(generator)
    either = [Correction(drop=(0,)), Correction(max_distances=(0.6,) * 4)]
    both = Correction(drop=(0,), max_distances=(0.6,) * 4)
    assert torch.equal(both.removed(some), either[0].removed(some) | either[1].removed(some))
    assert torch.equal(both.keep(some), either[0].keep(some) & either[1].keep(some))


def test_a_forced_part_keeps_what_it_claims_whatever_the_background_says_unless_it_is_too_far(generator):
    some = assignment(generator)
    forced = Correction(force=(1,))
    assert torch.equal(forced.keep(some), hard_keep(some.scores) | (some.part == 1))
    assert (forced.keep(some) != hard_keep(some.scores)).any()
    near = Correction(force=(1,), max_distances=(math.inf, 0.5, math.inf, math.inf)).keep(some)
    assert torch.equal(near, forced.keep(some) & ~((some.part == 1) & (some.distances > 0.5)))
    assert (forced.foreground_probability(some)[some.part == 1] == 1).all()


def test_part_maps_give_to_the_background_what_they_take_from_parts(generator):
    some = assignment(generator)
    assert torch.equal(Correction().probabilities(some), some.scores.softmax(dim=1))
    correction = Correction(drop=(0,), force=(3,), max_distances=(0.7,) * 4)
    probabilities = correction.probabilities(some)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(2, 8, 8))
    assert not probabilities[:, 0].any()
    gone = probabilities.movedim(1, -1)[correction.removed(some)]
    assert len(gone)
    assert torch.equal(gone, torch.eye(5)[-1].expand_as(gone))


# ---- methods ---------------------------------------------------------------------------------------------------------


@EVERY_WAY
def test_an_intervention_that_changes_nothing_changes_no_bit(way, images):
    model = ifam(way)
    same = apply_intervention(model, Intervention(names={0: "head"}))
    ours, theirs = same.look(images), model.look(images)
    for name in ("keep", "keep_pixels", "parts"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is b is None) or torch.equal(a, b)
    assert torch.equal(same.judge(images, ours).logits, model.judge(images, theirs).logits)


@EVERY_WAY
def test_a_dropped_part_leaves_the_sight_and_only_that(way, images):
    model = ifam(way)
    before, after = model.look(images), apply_intervention(model, Intervention(drop=(1,))).look(images)
    assert not (after.keep & ~before.keep).any()
    own = before.parts.argmax(dim=1)
    assert before.keep[own == 1].any()
    if way in ("patches", "soft"):
        assert torch.equal(after.keep, before.keep & (own != 1))
    else:
        assert (before.visible((32, 32)) & ~after.visible((32, 32))).any()
    assert after.keep[own == 0].any()


@pytest.mark.parametrize("way", ["patches", "published", "pixels", "refined"])
def test_an_intervention_leaves_the_method_blind(way, images):
    model = apply_intervention(ifam(way), Intervention(drop=(2,), quantile=0.9, thresholds=(9.0, 9.0, 9.0)))
    assert model.blind
    certificate = verify(model, images, draws=1, ascent_steps=2)
    assert certificate.verdict == "blind", certificate.sentence


def test_removed_parts_of_pdiscoformer_do_not_contribute_to_the_prediction(images):
    model = pdiscoformer()
    found = model.detect(images)
    corrected = apply_intervention(model, Intervention(drop=(1,)))
    assert not corrected.blind
    sight = corrected.look(images)
    assert torch.equal(sight.keep, hard_keep(found.mask_assignment.scores) & (found.mask_assignment.part != 1))
    embeddings = model.where.embed(model.discover(images)[0])
    in_training = model.where.class_logits(embeddings, torch.tensor([[True, False, True]] * 4))
    ours = corrected.judge(images, sight).logits
    torch.testing.assert_close(ours * 2 / 3, in_training * (1 - model.where.dropout))
    plain = model.judge(images, model.look(images)).logits
    assert torch.equal(model.predict_from(images, found).logits, plain)
    pooled = apply_intervention(model, Intervention(quantile=0.9, thresholds=(0.0, math.nan, math.nan)))
    assert not torch.allclose(pooled.judge(images, sight).logits, plain)


def test_maps_have_the_given_part_names(images):
    model = apply_intervention(ifam(), Intervention(drop=(1,), names={2: "tag"}))
    assert [*model.maps(images)] == ["part 0", "part 2 (tag)", "background"]


def test_a_given_mask_replaces_the_sight(images):
    mask = torch.zeros(4, 32, 32, dtype=torch.bool)
    mask[:, :12, :20] = True
    for way in ("patches", "refined"):
        model = ifam(way)
        sight = apply_intervention(model, Intervention(drop=(0,))).look_at(images, mask)
        assert torch.equal(sight.visible((32, 32))[:, 16:], torch.zeros(4, 16, 32, dtype=torch.bool))
        assert model.judge(images, sight).logits.isfinite().all()
    assert torch.equal(sight.keep_pixels, mask)
    with pytest.raises(UserError, match="takes no masks"):
        apply_intervention(pdiscoformer(), Intervention(drop=(0,))).look_at(images, mask)


# ---- stage 1 runs once per image -------------------------------------------------------------------------------------


class Some:
    """Batches of images in memory."""

    def __init__(self, images, size=2):
        self.images, self.size, self.indices = images, size, np.arange(len(images))

    def __len__(self):
        return -(-len(self.images) // self.size)

    def epoch(self, _):
        for start in range(0, len(self.images), self.size):
            yield One((255 * self.images[start : start + self.size]).round(), torch.arange(start, start + self.size))


class One:
    masks = None

    def __init__(self, images, indices):
        self.images, self.indices = images, indices[: len(images)]

    def __len__(self):
        return len(self.images)

    def to(self, _):
        return self


def rows_for(images) -> Rows:
    labels = np.arange(len(images)) % 2
    return Rows("made up", None, [f"{i}.png" for i in labels], labels, ("a", "b"), np.ones(len(images), dtype=np.int8))


def looked(model, images, **more) -> CachedLook:
    return CachedLook(model, rows_for(images), Some(images), make_accelerator("cpu"), **more)


def counting(vit) -> list[int]:
    seen = []
    vit.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    return seen


@pytest.mark.parametrize(("way", "looks"), [("patches", 1), ("pixels", 1), ("refined", 2), ("published", 1)])
@pytest.mark.parametrize("parts", [1, 3], ids=["one part", "all parts"])
def test_stage_1_runs_once_per_image_and_look_however_many_interventions(way, looks, parts, images):
    model = ifam(way)
    seen, answers_to = counting(model.where.vit), looked(model, images)
    many = [Intervention(drop=(k,)) for k in range(parts)]
    many += [Intervention(quantile=q, thresholds=(5.0,) * 3) for q in (0.9, 0.99)]
    answers_to(many)
    answers_to([Intervention(drop=(0, 1))])
    assert sum(seen) == looks * len(images)


@pytest.mark.parametrize("method", [*WAYS, "pdiscoformer"])
def test_cached_detections_predict_bit_for_bit_as_the_method_with_the_intervention(method, images):
    model = pdiscoformer() if method == "pdiscoformer" else ifam(method)
    images = (255 * images).round() / 255
    intervention = Intervention(drop=(1,), quantile=0.9, thresholds=(6.0, 6.0, 6.0))
    corrected, found = apply_intervention(model, intervention), model.detect(images).for_cache()
    assert found.views is None
    held = model.restore_views(images, found)
    with torch.no_grad():
        ours, sight = model.predict_from(images, held, intervention.correction), corrected.look(images)
        assert torch.equal(ours.sight.visible((32, 32)), corrected.judge(images, sight).sight.visible((32, 32)))
        assert torch.equal(ours.logits, corrected.judge(images, sight).logits)


def test_without_a_cache_the_predictions_are_the_same(images):
    model = ifam()
    plenty, none = looked(model, images), looked(model, images, most_bytes=0)
    for interventions in ([Intervention(drop=(0,))], [Intervention(drop=(1,))]):
        a, b = plenty(interventions)[0], none(interventions)[0]
        assert (a.probabilities == b.probabilities).all()
    assert (len(plenty.held), len(none.held)) == (2, 0)


# ---- distances of training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.5, 0.9, 0.97, 0.99])
def test_quantiles_in_one_pass_are_exact_to_a_thousandth(q):
    generator = np.random.default_rng(0)
    values = np.concatenate([generator.lognormal(2, 1.5, 3000), generator.normal(40, 3, 5000).clip(1)])
    parts = np.repeat([0, 1], [3000, 5000])
    sketch, order = DistanceSketch.empty(3), generator.permutation(8000)
    for some in np.array_split(order, 7):
        sketch.add(parts[some], values[some])
    found = sketch.quantile(q)
    for part in (0, 1):
        exact = np.quantile(values[parts == part], q, method="lower")
        assert abs(found[part] / exact - 1) <= DistanceSketch.ERROR * 1.0001
    assert math.isnan(found[2])


@pytest.mark.parametrize("q", [0.9, 0.95, 0.97, 0.99])
def test_distances_that_lie_close_together_are_told_apart_by_rank(q):
    values = np.random.default_rng(0).normal(11.42, 0.08, 40_000)
    sketch = DistanceSketch.empty(1)
    sketch.add(np.zeros(len(values), int), values)
    assert abs((values > sketch.quantile(q)[0]).mean() - (1 - q)) < 0.001
    sketch.add(np.zeros(10**6, int), np.full(10**6, 11.5))
    assert not (np.array([11.5]) > sketch.quantile(q)).any(), "the distance of nearly all patches is not far"


def test_distances_are_those_of_patches_that_belong_to_a_part_in_the_look_that_decides(images):
    images = (255 * images).round() / 255
    model = ifam()
    sketch = calibrate(model, Some(images), make_accelerator("cpu"))
    found = model.detect(images).mask_assignment
    own = hard_keep(found.scores)
    assert sketch.counts.sum(axis=1).tolist() == [int((own & (found.part == k)).sum()) for k in range(3)]
    exact = np.quantile(found.distances[own & (found.part == 0)].detach().numpy(), 0.9, method="lower")
    assert sketch.quantile(0.9)[0] == pytest.approx(exact, rel=2e-3)


def test_token_removal_removes_colours_unlike_those_of_training(images):
    """A stain between the colours of part 0 and the background is assigned to a part, but far from its prototype."""
    model = ifam("patches")
    sketch = calibrate(model, Some(images), make_accelerator("cpu"))
    corrected = apply_intervention(model, Intervention(quantile=0.99, thresholds=sketch.quantile(0.99)))
    stained = images.clone()
    stained[:, :, 16:24, :8] = torch.tensor([1.0, 1.0, 0.6])[:, None, None]
    assert model.look(stained).keep[:, 2, 0].all()
    assert not corrected.look(stained).keep[:, 2, 0].any()


# ---- the file --------------------------------------------------------------------------------------------------------


def test_an_intervention_round_trips_through_its_file(tmp_path):
    one = Intervention((3, 1), 0.99, (1.5, math.nan, 2.0, 3.0), (2,), {2: "head"}, {"weights": "abc"})
    one.save(tmp_path / "one.json")
    back = Intervention.load(tmp_path / "one.json")
    assert back.drop == (1, 3)
    assert (back.force, back.names, back.facts) == ((2,), {2: "head"}, {"weights": "abc"})
    assert math.isnan(back.thresholds[1])
    assert repr(back) == repr(one)
    (tmp_path / "one.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        Intervention.load(tmp_path / "one.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop": (3,)}, "part 3: does not exist; the model has parts 0 to 2"),
        ({"drop": (-1,)}, "part -1"),
        ({"force": (7,)}, "part 7"),
        ({"names": {5: "head"}}, "part 5"),
        ({"drop": (0, 1, 2)}, "keep at least one"),
        ({"drop": (1,), "force": (1,)}, "cannot be both removed and forced"),
        ({"quantile": 1.5}, "quantile 1.5"),
        ({"quantile": 0.9}, "needs the distances of training patches"),
        ({"quantile": 0.9, "thresholds": (1.0,)}, "1 distance thresholds for 3 parts"),
    ],
)
def test_an_impossible_intervention_is_an_error(settings, message):
    with pytest.raises(UserError, match=message):
        apply_intervention(ifam("patches"), Intervention(**settings))


@pytest.mark.parametrize("text", ["head", "x=head", "2=", "=head"])
def test_part_names_are_parsed(text):
    with pytest.raises(UserError, match="such as 2=head"):
        parse_names((text,))
    assert parse_names(("2=head", "0=left wing")) == {2: "head", 0: "left wing"}
