"""The adapter: what it changes, what it learns, and a run from data to proof."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sightline.config import A2Adapter
from sightline.datasets.toy import write_toy
from sightline.datasets.toy_images import make_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.a2_adapter import (
    AdapterData,
    AdapterSettings,
    parse_candidate_grid,
    result_sentence,
    selected_candidates,
    train_adapter,
)
from sightline.sight import Method, inside_boxes
from sightline.train import train
from sightline.verify.verify import verify
from sightline.vit.weights import load_backbone, save_backbone
from sightline.what.probe import BoxProbe
from sightline.where.adapter import AdaptedSight, Adapter, CandidateBoxes, FrozenAttention, box_means
from sightline.where.attention import cls_attention_map

from ..commands import SMALL, typed
from ..conftest import small_vit

QUICK = {"steps": 3, "support": 8, "query": 8, "noise_samples": 10, "candidates": ("1/4", "1/2")}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=32, val=16, test=16)


def config(toy: Path, out: Path, **changes) -> A2Adapter:
    settings = {"backbone": "random:nano", "workers": 0, "device": "cpu", "untuned": True, "batch": 16}
    return A2Adapter(data=toy, out=out, **settings | QUICK | changes)


def log_of(folder: Path) -> dict:
    (line,) = (folder / "log.jsonl").read_text().splitlines()
    return json.loads(line)


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("tokens", 3089), ("map", 2821)])
def test_it_has_as_many_parameters_as_in_the_paper(kind, count):
    assert sum(p.numel() for p in Adapter(kind, width=384, patches=256).parameters()) == count


@pytest.mark.parametrize("width", [96, 128, 192, 384, 768, 1024, 1536])
def test_it_has_about_3000_parameters_whatever_the_backbone(width):
    assert abs(sum(p.numel() for p in Adapter("tokens", width, 256).parameters()) - 3000) < 100


@pytest.mark.parametrize("kind", ["tokens", "map"])
def test_an_untrained_adapter_is_plain_attention_with_a_gradient(kind, generator):
    vit, images = small_vit(classes=0), torch.rand(3, 3, 32, 32, generator=generator)
    sight = AdaptedSight(
        FrozenAttention(vit, 1, 2), CandidateBoxes([(0.25, None)]), Adapter(kind, 32, 16).initialize(generator)
    )
    attention, tokens = sight.glance(images)
    assert torch.equal(attention, cls_attention_map(vit, images, 1, 2))
    adapted = sight.adapter(attention, tokens)
    torch.testing.assert_close(adapted, attention / attention.amax(dim=(1, 2), keepdim=True))
    (adapted * torch.rand(3, 4, 4, generator=generator)).sum().backward()
    gradient = sight.adapter.out.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0


def test_candidates_are_those_of_the_paper():
    boxes = CandidateBoxes([parse_candidate_grid("1/7"), parse_candidate_grid("2/7")]).boxes((224, 224))
    assert len(boxes) == 49 + 9
    assert boxes[8].tolist() == [32, 32, 64, 64]
    assert boxes[-1].tolist() == [160, 160, 224, 224]
    as_printed = CandidateBoxes([parse_candidate_grid("32x3"), parse_candidate_grid("64x7")]).boxes((224, 224))
    assert len(as_printed) == 9 + 49
    assert ((as_printed[:, 2] - as_printed[:, 0]) == 32).sum() == 9
    assert CandidateBoxes([parse_candidate_grid("0.5x1")]).boxes((40, 60)).tolist() == [[20, 10, 40, 30]]


@pytest.mark.parametrize("side", [96, 112, 160, 224, 252, 256, 336, 384, 448, 518])
def test_seven_crops_of_a_seventh_fit_at_every_size(side):
    boxes = CandidateBoxes([parse_candidate_grid("1/7"), parse_candidate_grid("2/7")]).boxes((side, side))
    assert len(boxes) == 49 + 9
    for some, share in ((boxes[:49], 1 / 7), (boxes[49:], 2 / 7)):
        seen = inside_boxes(some[None], (side, side)).sum()
        assert seen == len(some) * (some[0, 2] - some[0, 0]) ** 2, "they overlap"
        assert some[0, :2].tolist() == [0, 0]
        assert some[-1, 2:].tolist() == [side, side]
        assert abs(some[0, 2] - share * side) < 1
    assert len(CandidateBoxes([parse_candidate_grid("1/7")]).boxes((96, 192))) == 7 * 14
    assert len(CandidateBoxes([parse_candidate_grid("0.001")]).boxes((8, 8))) == 64


def test_a_candidates_score_is_the_mean_of_the_map_in_it(generator):
    maps, size = torch.rand(3, 4, 5, generator=generator), (32, 50)
    boxes = CandidateBoxes([(0.25, None), (12, 3)]).boxes(size)
    pixels = F.interpolate(maps[:, None], size, mode="bilinear")[:, 0]
    expected = [[one[t:b, left:r].mean().item() for left, t, r, b in boxes.tolist()] for one in pixels]
    torch.testing.assert_close(box_means(maps, boxes, size), torch.tensor(expected))


def test_it_looks_at_the_candidates_with_the_highest_scores(generator):
    sight = AdaptedSight(
        FrozenAttention(small_vit(classes=0)), CandidateBoxes([(0.25, 7), (0.5, 2)]), Adapter("tokens", 32, 16), 2
    )
    torch.nn.init.normal_(sight.adapter.out.weight, generator=generator)
    sight.adapter.initialize(generator)
    images = torch.rand(4, 3, 32, 32, generator=generator)
    boxes, scores = sight.candidates.boxes((32, 32)), sight.scores(*sight.glance(images), (32, 32))
    assert scores.amin(dim=1).tolist() == [0] * 4
    assert scores.amax(dim=1).tolist() == [1] * 4
    for found, row in zip(sight.look(images).boxes, scores, strict=True):
        assert torch.equal(found, boxes[row.topk(2).indices.sort().values])
    for name, drawn in sight.maps(images).items():
        torch.testing.assert_close(drawn.sum(dim=(1, 2)), torch.ones(4), msg=name)
        assert (drawn >= 0).all()


# ---- learning --------------------------------------------------------------------------------------------------------


def learned_on(toy, labels: torch.Tensor, vit, seed: int) -> tuple[float, float]:
    """The share of what is seen that lies around the creatures, before and after, on images not learned from."""
    sight, size = AdapterSettings(("1/4",), 1, "tokens", -1, "mean", 144).selector(vit), tuple(toy.images.shape[-2:])
    sight.adapter.initialize(torch.Generator().manual_seed(seed))
    images, what = toy.images.float() / 255, BoxProbe(vit, (24, 24), 16).eval()
    with torch.no_grad():
        attention, tokens = sight.glance(images)
        crops = what.embed(images, sight.candidates.look(images)).unflatten(1, (16, -1))
    known, others = (
        AdapterData(*(t[part] for t in (attention, tokens, crops, labels)), size)
        for part in (slice(96), slice(96, None))
    )

    def around() -> float:
        boxes = sight.candidates.boxes(size)[selected_candidates(sight, others)]
        visible = inside_boxes(boxes, size)
        return ((visible & ~toy.masks[96:]).sum() / visible.sum()).item()

    before = around()
    settings = A2Adapter(Path(), steps=60, lr=5e-3, support=48, query=48, noise_samples=100, seed=seed)
    assert train_adapter(sight, known, 2, settings).moved > 0.2
    return before, around()


@pytest.mark.slow
def test_the_adapter_learns_to_look_at_what_the_labels_depend_on():
    """Claim A11 in miniature. Attention likes the birds; asked for the place, it must look around them."""
    vit = load_backbone("sightline-nano", classes=0)
    tempting, fair = (make_toy(144, size=96, seed=5, correlation=c, displacement=0.1) for c in (0.9, 0.5))
    before, asked_for_places = learned_on(tempting, tempting.backgrounds, vit, seed=0)
    assert before < 0.75
    assert asked_for_places > 0.9
    assert learned_on(fair, fair.labels, vit, seed=0)[1] < 0.8, "asked for birds, it goes on looking at them"


def told_by_tokens(generator, n=128) -> tuple[AdaptedSight, AdapterData, torch.Tensor]:
    """One of 16 cells holds the object and another all attention; tokens say which is which."""
    sight = AdaptedSight(
        FrozenAttention(small_vit(classes=0)), CandidateBoxes([(0.25, None)]), Adapter("tokens", 32, 16)
    )
    sight.adapter.initialize(generator)
    places = torch.stack([torch.randperm(16, generator=generator)[:2] for _ in range(n)])
    target, attended = F.one_hot(places, 16).float().unbind(dim=1)
    kinds = torch.randn(3, 32, generator=generator)
    labels = torch.arange(n) % 2
    tokens = kinds[0] + target[..., None] * kinds[1] + attended[..., None] * kinds[2]
    crops = torch.randn(n, 16, 8, generator=generator)
    crops[..., 0] += 6 * target * (2 * labels[:, None] - 1)
    attention = torch.maximum(torch.rand(n, 16, generator=generator), 1.5 * attended).view(n, 4, 4)
    return (
        sight,
        AdapterData(attention / attention.sum(dim=(1, 2), keepdim=True), tokens, crops, labels, (32, 32)),
        places,
    )


def test_the_adapter_finds_the_informative_cell_that_attention_ignores(generator):
    sight, images, places = told_by_tokens(generator)
    before = selected_candidates(sight, images)[:, 0] == places.T
    settings = A2Adapter(Path(), steps=150, lr=3e-3, support=64, query=64, noise_samples=50, noise=0.2)
    learned = train_adapter(sight, images, 2, settings)
    after = selected_candidates(sight, images)[:, 0] == places.T
    assert before.float().mean(dim=1).tolist() == pytest.approx([0, 1], abs=0.15)
    assert after.float().mean(dim=1).tolist() == pytest.approx([1, 0], abs=0.1)
    assert learned.moved > 0.8
    assert learned.losses[-1] < learned.losses[0] / 2


def test_without_exploration_nothing_is_learned_and_the_user_is_told(generator):
    sight, images, places = told_by_tokens(generator)
    peaks = F.one_hot(places[:, 1], 16).float().view(-1, 4, 4)
    images = replace(images, attention=peaks)
    learned = train_adapter(sight, images, 2, A2Adapter(Path(), steps=3, support=64, query=64, noise_samples=50))
    assert learned.explored == 0
    assert learned.moved == 0
    assert "a larger --noise would explore more" in result_sentence(learned, 3000)


def test_the_same_seed_trains_the_same(generator):
    state, weights = generator.get_state(), []
    for seed in (0, 0, 1):
        sight, images, _ = told_by_tokens(generator.set_state(state), n=32)
        train_adapter(sight, images, 2, A2Adapter(Path(), steps=3, support=16, query=16, noise_samples=5, seed=seed))
        weights.append(sight.adapter.out.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# ---- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "map"])
def test_a_loaded_run_predicts_the_same_and_is_blind(toy, tmp_path, kind):
    folder = train(config(toy, tmp_path / "run", adapter=kind, crop_count=2, where="sightline-nano", lr=0.1))
    model = load(folder)
    assert isinstance(model.method, Method)
    with (folder / "predictions" / "test.csv").open(newline="") as file:
        outputs = list(csv.DictReader(file))
    given = model.predict([toy / row["image"] for row in outputs])
    assert [model.classes[i] for i in given.labels] == [row["predicted"] for row in outputs]
    expected = torch.tensor([[float(row[f"p_{name}"]) for name in model.classes] for row in outputs])
    torch.testing.assert_close(given.probabilities, expected, atol=1e-4, rtol=0)
    assert given.sight.boxes.shape == (16, 2, 4)
    assert verify(model.method, torch.rand(2, 3, 64, 64), draws=1).verdict == "blind"
    assert len(log_of(folder)["losses"]) == 3


def test_cached_features_serve_other_seeds_and_the_same_seed_makes_the_same_run(toy, tmp_path):
    save_backbone(load_backbone("random:nano"), file := tmp_path / "nano.safetensors")
    same = {"cache": tmp_path / "cache", "backbone": str(file)}
    runs = [train(config(toy, tmp_path / str(i), seed=seed, lr=0.1, **same)) for i, seed in enumerate((0, 0, 1))]
    first, again, other = ((run / "best.safetensors").read_bytes() for run in runs)
    assert first == again
    assert first != other
    files = list((tmp_path / "cache").glob("features-*"))
    assert len(files) == 2 + 2 + 2  # glances and candidates; the chosen crops in train and val, for each seed


def test_without_a_step_it_is_plain_attention_among_the_same_candidates(toy, tmp_path):
    model = load(train(config(toy, tmp_path / "run", steps=0)))
    images = torch.rand(4, 3, 64, 64)
    attention, size = model.method.maps(images)["attention"], (64, 64)
    boxes = CandidateBoxes([(0.25, None), (0.5, None)]).boxes(size)
    best = box_means(attention, boxes, size).argmax(dim=1)
    assert torch.equal(model.method.look(images).boxes[:, 0], boxes[best])
    assert log_of(tmp_path / "run")["losses"] == []


def test_a_run_from_when_shares_were_rounded_up_keeps_its_candidates(toy, tmp_path):
    folder = train(config(toy, tmp_path / "run", candidates=("1/6", "1/2x3"), train_images=8, steps=0))
    file, facts = folder / "run.json", json.loads((folder / "run.json").read_text())
    assert facts["adapted"]["of_candidates"] == 36 + 9
    assert len(load(folder).method.where.candidates.boxes((64, 64))) == 36 + 9
    facts["adapted"]["of_candidates"] = 25 + 9
    file.write_text(json.dumps(facts))
    boxes = load(folder).method.where.candidates.boxes((64, 64))
    assert len(boxes) == 25 + 9
    starts = [round(i * 53 / 4) for i in range(5)]
    assert boxes[:25].tolist() == [[x, y, x + 11, y + 11] for y in starts for x in starts]


def test_the_adapter_can_be_trained_on_few_images(toy, tmp_path):
    folder = train(config(toy, tmp_path / "run", train_images=12))
    assert log_of(folder)["images"] == 12
    assert np.isfinite(log_of(folder)["losses"]).all()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"candidates": ("big",)}, "--candidates big: a side is a fraction"),
        ({"candidates": ("1/4x0",)}, "--candidates 1/4x0: a side is a fraction"),
        ({"candidates": ()}, "--candidates: give at least one side"),
        ({"candidates": ("65",)}, "--candidates 65: larger than the image, 64 pixels"),
        ({"crop_count": 20}, "--crop-count 20: must be 1 to 19, of 20 candidates"),
        ({"layer": 9}, "--layer 9: there are 6 blocks"),
        ({"heads": "many"}, "--heads many: mean, entropy, lowest, max"),
        ({"noise_samples": 1}, "--noise-samples 1: must be at least 2"),
        ({"noise": 0.0}, "--noise 0.0: must be above 0"),
        ({"fit_steps": 0}, "--fit-steps 0: must be at least 1"),
        ({"steps": -1}, "--steps -1: must not be negative"),
    ],
)
def test_invalid_settings_are_errors_before_anything_is_computed(toy, tmp_path, more, complaint):
    with pytest.raises(UserError, match=complaint):
        train(config(toy, tmp_path / "run", **more))
    assert not (tmp_path / "run" / "features").exists()


def test_from_the_command_line_to_a_proof(toy, tmp_path):
    run = tmp_path / "run"
    quick = ("--steps", 2, "--support", 8, "--query", 8, "--noise-samples", 5, "--candidates", "1/4", "1/2x3")
    code, out, err = typed("train", "a2-adapter", toy, *SMALL, "--where", "random:nano", *quick, "--out", run)
    assert (code, err) == (0, "")
    assert "The adapter (3,039 parameters) selects other crops in" in out
    code, out, _ = typed("verify", run, "--limit", 2, "--draws", 1)
    assert code == 0
    assert "Blind outside its sight" in out
    assert typed("evaluate", run, "--workers", 0, "--device", "cpu")[0] == 0
    code, out, _ = typed("localize", run, "--workers", 0, "--device", "cpu")
    assert code == 0
    assert "adapted" in out


def test_runs_of_two_pairs_of_backbones_do_not_share_a_folder():
    small, large = (A2Adapter(Path("birds"), "large", where=where).folder for where in ("small", None))
    assert small == Path("runs/birds-a2-adapter-small-large-0")
    assert large == Path("runs/birds-a2-adapter-large-0")
