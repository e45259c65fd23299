"""Self-distillation: its losses by hand, a teacher that follows, and no collapse."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sightline.config import Pretrain
from sightline.data.batches import Batch
from sightline.datasets.toy_images import make_toy
from sightline.methods.dino import (
    Dino,
    crop_geometry,
    draw_hidden_patches,
    knn_correct,
    koleo,
    self_distillation,
    sinkhorn,
)
from sightline.metrics.attention import mass_and_hit
from sightline.training.trainable import StepInfo
from sightline.vit.model import ViT, ViTConfig

from ..conftest import small_vit

TINY = Pretrain(
    data=Path("pictures"),
    patch=8,
    size=32,
    global_size=24,
    local_size=16,
    local_crops=2,
    prototypes=48,
    head_width=32,
    full_size_fraction=0.25,
)


def learner(**changes) -> Dino:
    torch.manual_seed(0)
    return Dino(small_vit(classes=0), replace(TINY, **changes)).train()


def batch_of(count: int = 8) -> Batch:
    toy = make_toy(count, size=40)
    return Batch(toy.images, toy.labels, None, None, torch.arange(count))


def at(step: int, count: int = 8, epochs: int = 2, steps: int = 4) -> StepInfo:
    return StepInfo(0, step // steps, step % steps, epochs, steps, torch.arange(count))


def test_the_loss_is_the_mean_cross_entropy_of_pairs_of_different_crops(generator):
    student = torch.randn(3, 5, 7, generator=generator)
    targets = torch.randn(3, 2, 7, generator=generator).softmax(-1)
    pairs = [
        F.cross_entropy(student[:, s] / 0.1, targets[:, t]) for s in range(5) for t in range(2) if s != t
    ]  # views 0 and 1 are the teacher's own
    assert torch.allclose(self_distillation(student, targets), torch.stack(pairs).mean())


def test_koleo_is_the_log_distance_to_the_nearest_other():
    angles = torch.tensor([0.0, 0.1, 1.5])
    points = torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([[1.0], [5.0], [2.0]])
    chords = [2 * math.sin(gap / 2) for gap in (0.1, 0.1, 1.4)]
    assert koleo(points).item() == pytest.approx(-sum(map(math.log, chords)) / 3, rel=1e-4)


def test_koleo_pushes_neighbours_apart(generator):
    points = torch.randn(6, 4, generator=generator).requires_grad_()
    before = koleo(points)
    before.backward()
    with torch.no_grad():
        points -= 0.05 * points.grad
    assert koleo(points) < before


def test_sinkhorn_uses_every_prototype_and_every_image_equally(generator):
    predictions = sinkhorn(torch.randn(64, 8, generator=generator), iterations=50)
    assert torch.allclose(predictions.sum(1), torch.ones(64), atol=1e-5)
    assert torch.allclose(predictions.sum(0), torch.full((8,), 8.0), atol=1e-2)


def test_the_teacher_is_an_ema_with_rising_momentum():
    dino = learner()
    with torch.no_grad():
        for p in dino.student.parameters():
            p.add_(1.0)
    before = [p.clone() for p in dino.teacher.parameters()]
    for step in (0, 4):
        share = (1 - TINY.teacher_momentum) * (1 + math.cos(math.pi * step / 8)) / 2
        expected = [b.lerp(s, share) for b, s in zip(before, dino.student.parameters(), strict=True)]
        dino.after_step(at(step))
        for teacher, wanted in zip(dino.teacher.parameters(), expected, strict=True):
            assert torch.allclose(teacher, wanted, atol=1e-6)
            assert teacher.dtype == torch.float32
        before = [p.clone() for p in dino.teacher.parameters()]


def test_only_the_student_is_trained():
    dino = learner(ibot=1.0)
    losses = dino(dino.make_train_batch(batch_of(), None, at(0)))
    losses["loss"].backward()
    assert all(p.grad is None for p in dino.teacher.parameters())
    without = [name for name, p in dino.named_parameters() if p.requires_grad and p.grad is None]
    assert without == [], "several processes would wait for these"
    grouped = {id(p) for group in dino.parameter_groups(1.0) for p in group.parameters}
    assert grouped == {id(p) for p in dino.parameters() if p.requires_grad}


def test_losses_are_computed_in_full_precision_under_autocast():
    dino = learner(ibot=1.0)
    train_batch = dino.make_train_batch(batch_of(), None, at(0))
    with torch.autocast("cpu", torch.bfloat16):
        losses = dino(train_batch)
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    dino.after_step(at(0))
    assert {p.dtype for p in dino.teacher.parameters()} == {torch.float32}
    assert dino.centre.dtype == torch.float32


def test_the_centre_follows_the_teachers_outputs_in_training_only():
    dino = learner()
    train_batch = dino.make_train_batch(batch_of(), None, at(0))
    with torch.no_grad():
        predictions = dino.teacher.head(dino.teacher.vit(train_batch.crops[0].flatten(0, 1)).cls).mean(0)
    dino(train_batch)
    assert torch.allclose(dino.centre, predictions, atol=1e-6), "the first one is that of the first batch"
    with torch.no_grad():
        dino.centre.zero_()
    dino(replace(train_batch, info=at(40, epochs=20)))
    assert torch.allclose(dino.centre, 0.1 * predictions, atol=1e-6)
    before = dino.centre.clone()
    dino.eval()(train_batch)
    assert torch.equal(dino.centre, before)


def test_the_last_fraction_of_the_steps_has_full_size_crops():
    dino = learner()
    assert [dino.make_train_batch(batch_of(), None, at(step)).crops[0].shape[-1] for step in (0, 5, 6, 7)] == [
        24,
        24,
        32,
        32,
    ]


@pytest.mark.parametrize(("size", "sides"), [("nano", (8, 96, 64, 32, 96, 48)), ("s", (16, 224, 112, 48, 224, 96))])
def test_the_family_has_the_crops_of_the_documentation(size, sides):
    patch, pixels, early, late = crop_geometry(Pretrain(data=Path("x"), arch=size))
    assert (patch, pixels, early.large, early.small, late.large, late.small) == sides


def test_hidden_patches_are_equally_many_and_replaced():
    hidden = draw_hidden_patches(at(0), 6)
    assert hidden.shape == (8, round(0.3 * 36))
    assert all(len(set(row.tolist())) == hidden.shape[1] for row in hidden)
    dino = learner(ibot=1.0)
    with torch.no_grad():
        dino.hidden_patch.fill_(7.0)
    images = torch.zeros(8, 3, 48, 48)
    painted = dino._hide_patches(images, hidden)
    cells = painted[:, 0].unfold(1, 8, 8).unfold(2, 8, 8).flatten(3).eq(7).all(-1).flatten(1)
    assert torch.equal(cells.nonzero()[:, 1].view(8, -1), hidden.sort(1).values)
    assert painted.eq(7).float().mean() == pytest.approx(hidden.shape[1] / 36)


def test_mass_and_hit():
    masks = torch.zeros(1, 16, 16, dtype=torch.bool)
    masks[0, :8, :12] = True
    on, off, even = (torch.zeros(2, 2) for _ in range(3))
    on[0, 0], off[1, 0], even[:] = 1.0, 1.0, 1.0
    mass, hit = mass_and_hit(torch.stack([on, off, even])[None], masks)
    assert mass[0, 2].item() == pytest.approx(8 * 12 / 256)
    assert mass[0, 0] > 0.7 > 0.3 > mass[0, 1]
    assert hit[0, :2].tolist() == [1.0, 0.0]


def test_neighbours_vote_and_an_image_is_not_its_own_neighbour(generator):
    labels = torch.arange(60) % 3
    features = F.normalize(F.one_hot(labels, 8) + 0.05 * torch.randn(60, 8, generator=generator), dim=1)
    assert knn_correct(features, labels).all()
    assert not knn_correct(features, labels, features, (labels + 1) % 3).any()
    lonely = torch.tensor([0, 1, 1])
    assert not knn_correct(features[:3], lonely)[0]


@pytest.mark.parametrize("changes", [{}, {"centring": "sinkhorn"}, {"ibot": 0.5}], ids=["mean", "sinkhorn", "masked"])
def test_it_learns_and_does_not_collapse(changes):
    """The loss falls, and the teacher gives different predictions to different images, using many prototypes."""
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=32, depth=2, heads=2, patch=8, grid=(4, 4), registers=2))
    dino = Dino(vit, replace(TINY, teacher_momentum=0.95, **changes)).train()
    optimizer = torch.optim.AdamW([p for p in dino.parameters() if p.requires_grad], lr=1e-3)
    losses, batch = [], batch_of(24)
    for step in range(50):
        when = StepInfo(0, step, 0, 100, 1, torch.arange(24))
        train_batch = dino.make_train_batch(batch, None, when)
        found = dino(train_batch)
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        dino.after_step(when)
        losses.append(found["loss"].item())
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    with torch.no_grad():
        logits = dino.teacher.head(dino.teacher.vit(train_batch.crops[0].flatten(0, 1)).cls)
    predictions = ((logits - logits.mean(0)) / 0.04).softmax(-1)
    used = torch.special.entr(predictions.mean(0)).sum().exp()
    each = torch.special.entr(predictions).sum(1).mean().exp()
    assert used > 12
    assert each < 0.97 * used, "all images have the same answer"
