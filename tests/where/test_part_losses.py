"""What each of the losses that shape parts is zero for, punishes and survives."""

import math
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sightline.config import Shaping
from sightline.where.part_losses import (
    background,
    concentration,
    entropy,
    equivariance,
    orthogonality,
    presence,
    shaping_losses,
    total_variation,
)
from sightline.where.parts import Parts

NAMES = [f.name for f in fields(Shaping) if isinstance(f.default, float)]


def one_hot(assigned: torch.Tensor, parts: int) -> torch.Tensor:
    """[B, H, W] -> [B, parts + 1, H, W]"""
    return nn.functional.one_hot(assigned, parts + 1).permute(0, 3, 1, 2).float()


def softmaxed(generator, parts: int = 3, count: int = 4) -> torch.Tensor:
    return torch.randn(count, parts + 1, 6, 7, generator=generator).softmax(dim=1)


def test_total_variation_counts_borders():
    assigned = torch.full((2, 6, 7), 1)
    assert total_variation(one_hot(assigned, 1)) == 0
    assigned[0, 2, 3] = 0  # four borders, in both maps
    torch.testing.assert_close(total_variation(one_hot(assigned, 1)), torch.tensor(8 / (2 * 6 * 7)))


def test_no_loss_remembers_an_earlier_batch(generator):
    probabilities = softmaxed(generator)
    first = total_variation(probabilities[:2])
    total_variation(probabilities)
    assert total_variation(probabilities[:2]) == first


def test_entropy_is_highest_for_undecided_patches_and_zero_for_decided_ones():
    assert math.isclose(entropy(torch.full((1, 4, 5, 5), 0.25)), math.log(4), rel_tol=1e-6)
    assert entropy(one_hot(torch.zeros(1, 5, 5, dtype=torch.long), 3)) == 0


def test_equivariance_is_zero_for_maps_that_move_along(generator):
    probabilities = softmaxed(generator)
    assert abs(equivariance(probabilities, probabilities)) < 1e-6
    assert equivariance(probabilities, probabilities.flip(0)) > 0.05
    other_background = torch.cat([probabilities[:, :-1], probabilities[:, -1:].flip(0)], dim=1)
    assert abs(equivariance(probabilities, other_background)) < 1e-6


def test_orthogonal_parts_cost_nothing_and_their_length_does_not_matter(generator):
    vectors = torch.linalg.qr(torch.randn(2, 16, 5, generator=generator)).Q * torch.arange(1, 6)
    assert orthogonality(vectors) < 1e-12
    assert orthogonality(vectors.mT) > 0.01  # what iFAM's published code computes
    same = torch.ones(2, 16, 5)
    torch.testing.assert_close(orthogonality(same), torch.tensor(20 / 25))


def test_presence_wants_every_part_in_some_image_of_the_batch():
    assigned = torch.full((2, 6, 7), 2)
    assigned[0, :3, :3] = 0
    assert presence(one_hot(assigned, 2)) == 0.5
    assigned[1, 2:5, 3:6] = 1
    assert presence(one_hot(assigned, 2)) == 0
    assigned[1, 3, 4] = 2  # a hole
    torch.testing.assert_close(presence(one_hot(assigned, 2)), torch.tensor(1 / 18))


def test_background_belongs_into_the_corners_of_every_image():
    assigned = torch.zeros(1, 7, 7, dtype=torch.long)
    centre, edge, corner = assigned.clone(), assigned.clone(), assigned.clone()
    centre[0, 2:5, 2:5] = edge[0, :3, 2:5] = corner[0, :3, :3] = 1
    assert background(one_hot(corner, 1)) == 0
    torch.testing.assert_close(background(one_hot(edge, 1)), torch.tensor(math.log(2)))
    assert background(one_hot(centre, 1)) > background(one_hot(edge, 1))
    assert background(one_hot(assigned, 1)) == 100
    assert background(one_hot(torch.cat([corner, assigned]), 1)) == 50


def test_a_vanishing_background_still_has_a_gradient():
    logits = torch.zeros(1, 2, 6, 6)
    logits[:, 1] = -60
    logits.requires_grad_()
    background(logits.softmax(dim=1)).backward()
    torch.testing.assert_close(logits.grad[0, 1].sum(), torch.tensor(-1.0))
    gone = (100 * logits.detach()).requires_grad_()
    background(gone.softmax(dim=1)).backward()
    assert gone.grad.isfinite().all()


def test_concentration_prefers_compact_parts_and_ignores_absent_ones():
    together, apart = torch.full((1, 6, 8), 2), torch.full((1, 6, 8), 2)
    together[0, 2:4, 2:4] = 0
    apart[0, [0, 0, 5, 5], [0, 7, 0, 7]] = 0
    loss = [concentration(one_hot(assigned, 2)) for assigned in (together, apart)]
    assert 0 < loss[0] < loss[1]
    logits = torch.zeros(1, 3, 6, 6)
    logits[:, 0] = -1000
    logits.requires_grad_()
    value = concentration(logits.softmax(dim=1))
    value.backward()
    assert value.isfinite()
    assert logits.grad.isfinite().all()
    one_part = concentration(logits.detach()[:, 1:].softmax(dim=1))
    torch.testing.assert_close(value, one_part / 2)


def found(generator) -> tuple[Parts, torch.Tensor, torch.Tensor]:
    probabilities = softmaxed(generator)
    parts = Parts(torch.zeros(4, 16, 6, 7), probabilities.log(), probabilities.log(), probabilities)
    return parts, torch.randn(4, 16, 4, generator=generator), probabilities.flip(0)


def test_weights_multiply_and_zero_leaves_out(generator):
    parts, embeddings, unwarped = found(generator)
    plain = shaping_losses(parts, embeddings, unwarped, Shaping(*[1.0] * 7))
    assert list(plain) == NAMES
    papers = shaping_losses(parts, embeddings, unwarped, Shaping())
    assert set(plain) - set(papers) == {"concentration"}
    assert papers["background"] == 2 * plain["background"]
    for name in NAMES:
        only = shaping_losses(parts, embeddings, unwarped, replace(Shaping.none(), **{name: 3.0}))
        assert list(only) == [name]
        torch.testing.assert_close(only[name], 3 * plain[name])
    assert shaping_losses(parts, embeddings, None, Shaping.none()) == {}


def test_total_variation_is_scaled_to_the_grid(generator):
    parts, embeddings, unwarped = found(generator)
    plain, scaled = (
        shaping_losses(parts, embeddings, unwarped, Shaping(total_variation_grid=at))["total_variation"]
        for at in (0, 37)
    )
    torch.testing.assert_close(scaled, plain * (6 * 7) ** 0.5 / 37)
    with pytest.raises(AssertionError, match="transformed images"):
        shaping_losses(parts, embeddings, None, Shaping())


def test_channels_can_be_decorrelated_instead_of_parts(generator):
    parts, embeddings, unwarped = found(generator)
    published = shaping_losses(parts, embeddings, unwarped, Shaping(orthogonality_over="channels"))["orthogonality"]
    torch.testing.assert_close(published, orthogonality(embeddings.mT))
    assert shaping_losses(parts, embeddings, unwarped, Shaping())["orthogonality"] == orthogonality(embeddings)


# ---- several processes -----------------------------------------------------------------------------------------------


class Maps(nn.Module):
    """Prototypes of a kind: shares of K+1 parts from features."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        with torch.no_grad():
            for seed, p in enumerate(self.parameters()):
                p.normal_(generator=torch.Generator().manual_seed(seed))

    def forward(self, features):
        return presence(self.linear(features).softmax(dim=3).permute(0, 3, 1, 2))


def features_of(case: str) -> torch.Tensor:
    features = torch.randn(6, 5, 6, 8, generator=torch.Generator().manual_seed(7))
    return features if case == "different" else torch.cat([features[:3], features[:3]])


def one_process(rank: int, folder: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    made = {}
    for case in cases:
        model = DistributedDataParallel(Maps())
        loss = model(features_of(case)[3 * rank : 3 * rank + 3])
        loss.backward()
        made[case] = (loss.detach(), [p.grad for p in model.parameters()])
        del model, loss  # whoever destroys the process group last waits for its threads: with Python's lock, for ever
    torch.save(made, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_presence_over_two_processes_is_that_of_one(tmp_path):
    """In value and gradient, also where both processes hold the same maximum."""
    cases = ["different", "same"]
    work = partial(one_process, folder=str(tmp_path), cases=cases)
    mp.start_processes(work, nprocs=2, start_method="spawn")
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for case in cases:
        alone = Maps()
        features = features_of(case)
        expected = alone(features)
        expected.backward()
        assert case == "same" or not torch.isclose(expected, alone(features[:3]))
        for made in results:
            loss, gradients = made[case]
            torch.testing.assert_close(loss, expected.detach())
            for gradient, p in zip(gradients, alone.parameters(), strict=True):
                torch.testing.assert_close(gradient, p.grad, atol=1e-7, rtol=1e-5)
