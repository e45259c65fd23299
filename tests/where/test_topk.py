"""Perturbed top-k and the unrolled fit: their values and, above all, their gradients."""

import numpy as np
import pytest
import torch

from sightline.what.unrolled import fit_unrolled, safe_learning_rate, standardize_by
from sightline.where.topk import perturbed_top_k, top_k

SCORES = torch.tensor([[0.1, 0.5, 0.45, 0.3, 0.8, 0.2]], dtype=torch.float64)
WORTH = torch.tensor([[2.0, -1.0, 0.5, 3.0, 1.0, -2.0], [0.5, 1.5, -2.0, 1.0, 4.0, 0.0]], dtype=torch.float64)
SIGMA = 0.3


def drawn(scores, k, *, seed=0, draws=400_000, sigma=SIGMA, control=True):
    generator = torch.Generator().manual_seed(seed)
    return perturbed_top_k(scores, k, sigma=sigma, draws=draws, generator=generator, control=control)


def gradient(k, **settings) -> torch.Tensor:
    scores = SCORES.clone().requires_grad_()
    (drawn(scores, k, **settings) * WORTH[:k]).sum().backward()
    assert scores.grad is not None
    return scores.grad[0]


def differences(k, step=0.05) -> torch.Tensor:
    """Of the expectation itself, by the same draws on either side."""
    found = []
    for shift in step * torch.eye(6, dtype=torch.float64):
        above, below = ((drawn(SCORES + sign * shift, k) * WORTH[:k]).sum() for sign in (1, -1))
        found.append((above - below) / (2 * step))
    return torch.stack(found)


# ---- perturbed top-k -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
def test_the_gradient_is_that_of_the_expectation(k):
    expected, found = differences(k), gradient(k)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)
    assert expected.abs().max() > 1, "there is something to get wrong: the factor k, for one"


def test_centring_the_choices_adds_no_bias_and_takes_out_noise():
    centred, plain = (
        torch.stack([gradient(2, seed=seed, draws=20, control=control) for seed in range(3000)])
        for control in (True, False)
    )
    for found in (centred, plain):
        error = found.std(dim=0) / len(found) ** 0.5
        assert ((found.mean(dim=0) - gradient(2)).abs() < 5 * error + 0.02).all()
    assert (centred.var(dim=0) < 0.75 * plain.var(dim=0)).all()


def test_a_constant_has_no_gradient():
    scores = SCORES.clone().requires_grad_()
    drawn(scores, 2, draws=50).sum().backward()
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, torch.zeros_like(SCORES), atol=1e-12, rtol=0)


def test_rows_are_selection_frequencies_and_without_noise_the_choice():
    shares = drawn(SCORES, 2, draws=2000)[0]
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(2, dtype=torch.float64))
    places = shares @ torch.arange(6.0, dtype=torch.float64)
    assert places[0] < places[1]
    assert shares.sum(dim=0).max() <= 1, "nothing is chosen twice"
    hard = drawn(SCORES, 2, draws=10, sigma=1e-9)[0]
    assert torch.equal(hard, torch.eye(6, dtype=torch.float64)[[1, 4]])
    assert top_k(SCORES, 2).tolist() == [[1, 4]]


def test_rows_are_independent_and_the_generator_decides():
    scores = torch.cat([SCORES, SCORES.flip(1)]).requires_grad_()
    shares = drawn(scores, 2, draws=100)
    assert torch.equal(shares, drawn(scores, 2, draws=100))
    assert not torch.equal(shares, drawn(scores, 2, draws=100, seed=1))
    (shares[0] * WORTH).sum().backward()
    assert scores.grad is not None
    assert scores.grad[0].abs().max() > 0
    assert scores.grad[1].abs().max() == 0


def test_ties_go_to_the_first():
    assert top_k(torch.zeros(2, 100), 3).tolist() == [[0, 1, 2]] * 2


def test_too_few_draws_are_an_error():
    with pytest.raises(ValueError, match="1 draws are too few"):
        drawn(SCORES, 1, draws=1)


# ---- the unrolled fit ------------------------------------------------------------------------------------------------


def task(generator, classes, n=60, width=4) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    return centres[labels] + torch.randn(n, width, generator=generator, dtype=torch.float64), labels


@pytest.mark.parametrize(("classes", "rows"), [(2, 2), (3, 1)])
def test_with_enough_steps_it_converges_to_scikit_learns_solution(classes, rows, generator):
    from sklearn.linear_model import LogisticRegression

    features, labels = task(generator, classes)
    c = 0.5
    theirs = LogisticRegression(C=c, tol=1e-10, max_iter=10_000).fit(features.numpy(), labels.numpy())
    ridge = rows / (c * len(features))
    head = fit_unrolled(features, labels, classes, steps=4000, lr=safe_learning_rate(features, ridge), ridge=ridge)
    ours = head.logits(features).softmax(dim=1)
    np.testing.assert_allclose(ours.numpy(), theirs.predict_proba(features.numpy()), atol=1e-5)


def test_its_gradient_is_that_of_finite_differences(generator):
    features, labels = task(generator, 3, n=12, width=3)
    query, asked = task(generator, 3, n=6, width=3)

    def loss(support: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        head = fit_unrolled(standardize_by(support, support), labels, 3, steps=7, lr=0.8, ridge=0.01)
        return torch.nn.functional.cross_entropy(head.logits(standardize_by(query, support)), asked)

    assert torch.autograd.gradcheck(loss, (features.requires_grad_(), query.requires_grad_()))


def test_a_safe_step_never_overshoots_and_a_plain_one_does_on_correlated_features(generator):
    features = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    features = features @ torch.randn(3, 40, generator=generator, dtype=torch.float64)
    features, labels = standardize_by(features, features), torch.randint(3, (60,), generator=generator)

    def losses(lr: float | torch.Tensor) -> list[float]:
        heads = (fit_unrolled(features, labels, 3, steps=n, lr=lr) for n in range(12))
        return [torch.nn.functional.cross_entropy(head.logits(features), labels).item() for head in heads]

    assert losses(safe_learning_rate(features)) == sorted(losses(safe_learning_rate(features)), reverse=True)
    assert max(losses(1.0)) > losses(1.0)[0]


def test_standardize_by_by_itself_has_mean_0_and_spread_1_and_constants_stay_finite(generator):
    features = torch.randn(50, 3, generator=generator) * torch.tensor([1.0, 20.0, 0.0]) + 5
    found = standardize_by(features, features)
    torch.testing.assert_close(found.mean(dim=0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.std(dim=0, unbiased=False), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4, rtol=0)
