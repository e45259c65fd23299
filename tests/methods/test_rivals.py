"""RRR and GradMask teach through a gradient's gradient; MaskTune hides what was most relevant."""

import json

import pytest
import torch
import torch.nn.functional as F

from sightline.config import Gradmask, Masktune, Rrr
from sightline.data.rows import read_rows
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.erm import Classifier
from sightline.methods.input_gradients import GradMask, RrrClassifier
from sightline.methods.masktune import LessRelevantSight, MaskTune, relevance_threshold
from sightline.train import train
from sightline.training.trainable import StepInfo, TrainBatch
from sightline.where.relevance import relevance_map

from ..commands import QUICK, typed
from ..conftest import small_vit
from ..small_runs import log_of

KINDS = {
    "rrr": (RrrClassifier, Rrr),
    "gradmask": (GradMask, Gradmask),
}


def learner(name: str, **changes):
    kind, config = KINDS[name]
    return kind(small_vit(), lambda rows: rows, config("data", **changes))


@pytest.fixture
def train_batch(generator) -> TrainBatch:
    masks = torch.zeros(4, 32, 32, dtype=torch.bool)
    masks[:, 8:24, 8:20] = True
    labels, at = torch.tensor([3, 0, 4, 1]), torch.arange(4)
    return TrainBatch(
        torch.rand(4, 3, 32, 32, generator=generator), labels, None, masks, at, StepInfo(0, 0, 0, 1, 1, at)
    )


def by_hand(model, train_batch: TrainBatch, name: str) -> torch.Tensor:
    """[4]: the penalty, image by image, to pixels that are normalised outside of the ViT."""
    vit, found = model.vit, []
    for image, label, mask in zip(train_batch.images, train_batch.labels, train_batch.masks, strict=True):
        seen = ((image - vit.mean) / vit.std)[None].requires_grad_()
        logits = vit(seen * vit.std + vit.mean).logits[0]
        score = logits.log_softmax(dim=0).sum() if name == "rrr" else logits[label]
        (gradient,) = torch.autograd.grad(score, seen)
        outside = gradient[0, :, ~mask]
        found.append(outside.square().sum() if name == "rrr" else outside.norm())
    return torch.stack(found)


# ---- gradients of inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_the_penalty_is_the_papers_at_background_pixels_alone(train_batch, name):
    model = learner(name, background_weight=0.5)
    losses = model(train_batch)
    assert losses["background"].item() == pytest.approx(by_hand(model, train_batch, name).mean().item(), rel=1e-3)
    classification = F.cross_entropy(model.vit(train_batch.images).logits, train_batch.labels)
    assert losses["classification"].item() == pytest.approx(classification.item(), rel=1e-4)
    assert losses["loss"].item() == pytest.approx((losses["classification"] + 0.5 * losses["background"]).item())


def test_gradmask_can_take_the_mean_of_squares_as_the_code_does(train_batch):
    norms, squares = (learner("gradmask", penalty=penalty) for penalty in ("norm", "squares"))
    lengths = by_hand(norms, train_batch, "gradmask")
    assert squares(train_batch)["background"].item() == pytest.approx(
        (lengths**2).mean().item() / (3 * 32 * 32), rel=1e-3
    )


@pytest.mark.parametrize("name", KINDS)
def test_the_penalty_has_a_gradient_only_with_double_backward(train_batch, name):
    trained, released = learner(name), learner(name, double_backward=False)
    weight = trained.vit.blocks[0].mlp.fc1.weight
    (found,) = torch.autograd.grad(trained(train_batch)["background"], weight)
    assert found.abs().max() > 0
    assert not released(train_batch)["background"].requires_grad
    released(train_batch)["loss"].backward()
    plain = Classifier(small_vit())
    plain(train_batch)["loss"].backward()
    for mine, theirs in zip(released.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_second_order_gradient_is_the_slope_of_the_penalty(train_batch, name):
    model = learner(name)
    weight = model.vit.blocks[1].attn.qkv.weight
    (found,) = torch.autograd.grad(model(train_batch)["background"], weight)
    step, ends = 1e-2 * found / found.norm(), []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step
        ends.append(model(train_batch)["background"].item())
        with torch.no_grad():
            weight -= sign * step
    assert (ends[0] - ends[1]) / (2 * step.norm().item()) == pytest.approx(found.norm().item(), rel=0.02)


def test_steps_against_the_penalty_make_it_smaller(train_batch):
    model = learner("gradmask", background_weight=10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(10):
        losses = model(train_batch)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        seen.append(losses["background"].item())
    assert seen[-1] < 0.9 * seen[0]


# ---- MaskTune --------------------------------------------------------------------------------------------------------


def test_the_threshold_uses_positive_values_alone():
    maps = torch.tensor([[[0.0, 0.0, 1.0], [3.0, 0.0, 5.0]], [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]])
    assert relevance_threshold(maps, 2.0).tolist() == pytest.approx([3 + 2 * (8 / 3) ** 0.5, 2])


def test_the_most_relevant_pixels_are_hidden(train_batch):
    vit = small_vit()
    keep = LessRelevantSight(vit, deviations=1.0).look(train_batch.images).keep_pixels
    maps = F.interpolate(relevance_map(vit, train_batch.images)[:, None], (32, 32), mode="bilinear")[:, 0]
    assert 0 < (~keep).float().mean() < 0.4
    assert all(one[k].max() <= one[~k].min() for one, k in zip(maps, keep, strict=True) if not k.all())


def test_masktune_trains_on_masked_images(train_batch):
    model = MaskTune(small_vit(), lambda rows: rows)
    expected = F.cross_entropy(model.vit(train_batch.images * train_batch.masks[:, None]).logits, train_batch.labels)
    assert model(train_batch)["loss"].item() == pytest.approx(expected.item())


def test_masktune_masks_training_images_with_its_initial_weights(toy, runs, tmp_path):
    flags = ("--init-from", runs / "erm-0", "--batch", 32, "--out", tmp_path / "run", *QUICK)
    code, _, err = typed("train", "masktune", toy, *flags)
    assert code == 0, err
    made = list((tmp_path / "run" / "masks").rglob("*.png"))
    assert len(made) == len(read_rows(toy).split_indices("train"))
    assert type(load(tmp_path / "run").method) is Classifier
    weights = [load(folder).method.vit.head.weight for folder in (tmp_path / "run", runs / "erm-0")]
    assert not torch.equal(*weights)


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_runs_are_classifiers_that_record_what_they_started_from(toy, runs, tmp_path, name):
    flags = (
        "--init-from",
        runs / "erm-0",
        "--epochs",
        1,
        "--masks-per-class",
        8,
        "--batch",
        8,
        "--out",
        tmp_path / "run",
        *QUICK,
    )
    code, _, err = typed("train", name, toy, *flags)
    assert code == 0, err
    assert type(load(tmp_path / "run").method) is Classifier
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["began_with"]["run"] == str((runs / "erm-0").resolve())
    assert facts["learnt_from"]["n"] == 16
    (line,) = log_of(tmp_path / "run")
    assert 0.3 < line["background"] / facts["penalty_at_first"] < 3
    assert line["loss"] == pytest.approx(
        line["classification"] + line["background"] / facts["penalty_at_first"], rel=1e-3
    )
    code, out, err = typed("localize", tmp_path / "run", *QUICK)
    assert code == 0, err
    assert "Map gae: attention mass inside the mask" in out


@pytest.mark.parametrize(
    ("config", "message"),
    [(Rrr, "--background-weight -1.0: must not be negative"), (Masktune, "--deviations -1.0: must not be negative")],
)
def test_invalid_settings_are_errors(toy, runs, tmp_path, config, message):
    wrong = {"background_weight": -1.0} if config is Rrr else {"deviations": -1.0}
    with pytest.raises(UserError, match=message):
        train(config(toy, init_from=str(runs / "erm-0"), out=tmp_path / "run", device="cpu", workers=0, **wrong))
