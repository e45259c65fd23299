"""Sequences of unequal length without padding: the same result as the padded reference, and as blind."""

import pytest
import torch
import torch.nn.functional as F

from sightline.sight import Sight
from sightline.verify.leaks import bits_differ
from sightline.verify.verify import verify
from sightline.vit import model as vit_model
from sightline.vit.blocks import with_key_bias
from sightline.what.masked import MaskedViT

from ..conftest import small_vit
from .test_vit import VITS, visible


def scene(device="cpu", dtype=torch.float32):
    """Five images with different numbers of visible patches: none, some, and all."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(5, 3, 32, 32, generator=generator)
    order = torch.rand(5, 16, generator=generator).argsort(dim=1)
    keep = order < torch.tensor([0, 3, 6, 11, 16])[:, None]
    return images.to(device, dtype), keep.view(5, 4, 4).to(device)


def padded_only(monkeypatch):
    monkeypatch.setattr(vit_model, "can_pack", lambda *_: False)


@pytest.mark.parametrize("name", VITS)
@torch.no_grad()
def test_packed_equals_padded(name, monkeypatch):
    images, keep = scene()
    pixels = torch.rand(5, 32, 32, generator=torch.Generator().manual_seed(1)) < 0.5
    packed = VITS[name](images, keep, pixels)
    padded_only(monkeypatch)
    padded = VITS[name](images, keep, pixels)
    assert (packed.path, padded.path) == ("removal, packed, image by image", "removal, padded")
    for field in ("cls", "registers", "patches", "logits"):
        torch.testing.assert_close(getattr(packed, field), getattr(padded, field), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_an_image_alone_gets_the_tokens_it_gets_in_a_batch():
    images, keep = scene()
    together = VITS["plain"](images, keep).tokens
    for k in range(len(images)):
        alone = VITS["plain"](images[k : k + 1], keep[k : k + 1])
        assert alone.path == "removal"
        torch.testing.assert_close(alone.tokens[0], together[k], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_hidden_nans_change_no_bit_of_what_is_packed():
    images, keep = scene()
    poisoned = torch.where(visible(keep)[:, None], images, torch.nan)
    one, two = VITS["plain"](images, keep), VITS["plain"](poisoned, keep)
    assert one.layout.startswith("packed")
    assert not bits_differ(one.tokens, two.tokens).any()


def test_the_certificate_names_the_path():
    images, keep = scene()
    certificate = verify(MaskedViT(small_vit()), images, Sight(keep), draws=1)
    assert certificate.verdict == "blind"
    assert certificate.conditions["paths"] == ["removal, packed, image by image"]
    same_length = torch.zeros_like(keep)
    same_length[:, 0] = True
    assert verify(MaskedViT(small_vit()), images, Sight(same_length), draws=1).conditions["paths"] == ["removal"]


def test_training_on_a_cpu_and_requested_attention_stay_padded():
    images, keep = scene()
    assert VITS["plain"](images, keep).path == "removal, padded"
    with torch.no_grad():
        assert VITS["plain"](images, keep, cls_attention=[-1]).path == "removal, padded"


def test_a_key_bias_as_a_channel_has_the_same_result_and_gradients():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    keep = torch.rand(2, 7, generator=generator, dtype=torch.float64).requires_grad_()
    gradients = []
    for folded in (False, True):
        bias = torch.log(keep + 1e-10)[:, None, None]
        pair = with_key_bias(q, k, bias, 0.25) if folded else (q, k)
        out = F.scaled_dot_product_attention(*pair, v, attn_mask=None if folded else bias, scale=0.25)
        gradients.append((out, *torch.autograd.grad((out * v.sin()).sum(), keep)))
    for plain, other in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, other)
