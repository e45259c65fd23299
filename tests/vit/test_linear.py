"""Linear layers by oneDNN: the same as PyTorch's own up to rounding, with all gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F

from sightline.vit import linear as module
from sightline.vit.linear import Linear, linear, multiplies_faster, multiply

available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_onednn = pytest.mark.skipif(not available, reason="PyTorch was built without oneDNN")


@pytest.fixture
def onednn(monkeypatch):
    """As on a processor with AVX-512 that is not Intel's."""
    monkeypatch.setattr(module, "mkl_lacks_avx512", lambda: True)


def strided():
    """Inputs and weights in every layout that a model may have."""
    torch.manual_seed(0)
    yield torch.randn(4, 5), torch.randn(7, 5), torch.randn(7)
    yield torch.randn(0, 5), torch.randn(7, 5), torch.randn(7)
    yield torch.randn(5), torch.randn(7, 5), None
    yield torch.randn(1, 5).expand(6, 5), torch.randn(5, 7).t(), torch.randn(7, 3)[:, 1]
    yield torch.randn(()).expand(6, 5), torch.randn(7, 12)[:, ::2][:, :5], torch.randn(1).expand(7)
    yield torch.randn(2, 5, 3, 4).permute(0, 2, 3, 1), torch.randn(7, 1).expand(7, 5), torch.randn(7)
    yield torch.randn(6, 3, 11)[:, 1, 2:7], torch.randn(1, 5), torch.randn(1)


@needs_onednn
def test_any_layout_gives_the_same_as_pytorch():
    for x, weight, bias in strided():
        assert torch.allclose(multiply(x, weight, bias), F.linear(x, weight, bias), atol=1e-5)


@needs_onednn
def test_gradients_and_their_gradients_are_those_of_pytorch(onednn):
    def gradients(function):
        torch.manual_seed(0)
        x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((2, 4, 5), (7, 5), (7,)))
        y = function(x, weight, bias).tanh()[:, 0].square().sum()  # a slice: most gradients of y are zero
        first = torch.autograd.grad(y, (x, weight, bias), create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight, bias))

    for ours, theirs in zip(gradients(linear), gradients(F.linear), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_only_the_gradients_that_are_needed(onednn):
    layer, x = Linear(5, 7).requires_grad_(False), torch.randn(3, 5, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.allclose(x.grad, layer.weight.sum(dim=0).expand(3, 5))
    assert not layer(x.detach()).requires_grad


@needs_onednn
def test_nothing_gives_a_gradient_of_zero(onednn):
    layer, x = Linear(5, 7), torch.randn(2, 0, 5, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert not layer.weight.grad.any()


def test_other_numbers_are_left_to_pytorch(onednn):
    x, weight = torch.randn(3, 5), torch.randn(7, 5)
    assert multiplies_faster(x, weight)
    assert not multiplies_faster(x.double(), weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not multiplies_faster(x, weight)
        assert linear(x, weight).dtype == torch.bfloat16


def test_intels_processors_keep_mkl(monkeypatch):
    monkeypatch.setattr(module, "processor", lambda: "vendor_id : GenuineIntel")
    module.mkl_lacks_avx512.cache_clear()
    assert not module.mkl_lacks_avx512()
    module.mkl_lacks_avx512.cache_clear()


@needs_onednn
def test_a_layer_is_an_ordinary_linear_layer(onednn):
    layer = Linear(5, 7)
    plain = torch.nn.Linear(5, 7)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 5)
    assert repr(layer) == repr(plain), "fingerprints of features contain it"
    assert torch.allclose(copy.deepcopy(layer)(x), plain(x), atol=1e-6)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), plain(x))
