"""What only a GPU can show."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend

from sightline.config import A2Adapter, Ifam
from sightline.data.batches import CacheReader
from sightline.datasets.toy_images import make_toy
from sightline.methods.erm import Classifier
from sightline.sight import Sight
from sightline.train import train
from sightline.verify.verify import verify
from sightline.vit.weights import random_backbone
from sightline.what.masked import MaskedViT
from sightline.what.pool import LateMaskedViT

from .conftest import small_vit
from .small_runs import log_of, loop, small
from .vit.test_packing import padded_only, scene

KERNELS = {
    SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "mem_efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.MATH: "math",
}  # fmt: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def never_waiting(work: Callable, calls: list[str]) -> Callable:
    """The same, but an error where the CPU would wait for the device."""

    def watched(*arguments):
        calls.append(work.__qualname__)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


@pytest.mark.parametrize("augment", ["none", "light", "published", "imagenet"])
@pytest.mark.parametrize("size", [None, 64])
def test_no_step_of_training_waits_for_the_device(toy, tmp_path, monkeypatch, augment, size):
    """From images in a cache on the device to the optimiser's step."""
    calls: list[str] = []
    for owner, name in ((CacheReader, "__call__"), (Classifier, "make_train_batch"), (loop(), "train_step")):
        monkeypatch.setattr(owner, name, never_waiting(getattr(owner, name), calls))
    settings = {"augment": augment, "size": size, "precision": "bf16", "cache": tmp_path / "cache", "device": "cuda"}
    folder = train(small(toy, tmp_path / "run", epochs=1, **settings))
    assert calls.count("train_step") == 3
    assert {"CacheReader.__call__", "Trainable.make_train_batch"} < {*calls}
    assert log_of(folder)[0]["loss"] > 0


def test_a_mask_learns_through_a_frozen_second_stage(toy, tmp_path):
    settings = {"freeze_predictor": True, "sight": "patches", "parts": 2, "precision": "bf16", "device": "cuda"}
    folder = train(Ifam(toy, backbone="random:nano", out=tmp_path / "run", epochs=1, batch=8, workers=0, **settings))
    assert log_of(folder)[0]["loss"] > 0


def test_the_adapter_learns_on_the_device(toy, tmp_path):
    run = train(A2Adapter(toy, backbone="sightline-nano", out=tmp_path / "run", steps=3, workers=0, device="cuda"))
    assert (run / "metrics.json").exists()


FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("hide", ["removal", "mask"])
@pytest.mark.parametrize("batch", [1, 5, 16])
def test_a_masked_vit_is_blind_on_the_device(dtype, hide, batch):
    """As many kernels as formats and shapes select; the certificate names those that ran."""
    vit = random_backbone("nano", 4, seed=0)
    toy = make_toy(16, size=96, seed=0)
    images = (toy.images.float() / 255).to("cuda", dtype)
    sight = Sight.of_pixels(toy.masks, vit.grid(images)).to("cuda")
    certificate = verify(MaskedViT(vit, hide).to("cuda", dtype), images, sight, draws=2, batch=batch)
    assert certificate.verdict == "blind", certificate.sentence
    assert certificate.largest_gradient == 0
    assert set(certificate.conditions["attention_kernels"]) <= {*KERNELS.values(), "flash (variable length)"}


@pytest.mark.parametrize("backend", list(KERNELS))
def test_every_attention_kernel_is_named_and_blind(backend):
    """Each kernel by itself; those that do not support this case are refused by PyTorch, not by us."""
    vit = random_backbone("nano", 4, seed=0)
    toy = make_toy(8, size=96, seed=0)
    images = (toy.images.float() / 255).to("cuda", torch.bfloat16)
    sight = Sight.of_pixels(toy.masks, vit.grid(images)).to("cuda")
    method = MaskedViT(vit, "mask").to("cuda", torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(backend):
        try:
            method.judge(images, sight)
        except RuntimeError as error:
            pytest.skip(str(error))
        certificate = verify(method, images, sight, draws=1)
    assert certificate.verdict == "blind", certificate.sentence
    assert certificate.conditions["attention_kernels"] == [KERNELS[backend]]


def test_a_late_mask_leaks_on_the_device():
    toy = make_toy(8, size=96, seed=0)
    vit = random_backbone("nano", 0, seed=0)
    images = (toy.images.float() / 255).cuda()
    sight = Sight.of_pixels(toy.masks, vit.grid(images)).to("cuda")
    assert verify(LateMaskedViT(vit, 4).cuda(), images, sight, draws=1).verdict == "leaks"


FLASH = "removal, packed, variable-length flash attention"
HEADS = {"plain": {}, "rotary": {"positions": "rotary", "qkv_bias": "no_key", "mlp": "swiglu", "layer_scale": 1.0}}


@pytest.mark.parametrize("name", HEADS)
def test_packed_equals_padded_with_gradients(name, monkeypatch):
    images, keep = scene("cuda", torch.bfloat16)
    vit, found = small_vit(**HEADS[name]).to("cuda", torch.bfloat16), {}
    for way in ("packed", "padded"):
        vit.zero_grad()
        out = vit(images, keep)
        out.logits.float().square().mean().backward()
        found[way] = out.path, out.tokens.detach(), vit.blocks[0].attn.qkv.weight.grad.clone()
        padded_only(monkeypatch)
    (path, *packed), (reference, *padded) = found["packed"], found["padded"]
    assert (path, reference) == (FLASH, "removal, padded")
    for one, other in zip(packed, padded, strict=True):
        assert ((one - other).float().norm() / other.float().norm()) < 0.03


def test_the_packed_path_is_proved_and_float32_stays_padded():
    images, keep = scene("cuda", torch.bfloat16)
    what = MaskedViT(small_vit()).to("cuda", torch.bfloat16)
    certificate = verify(what, images, Sight(keep))
    assert (certificate.verdict, certificate.conditions["paths"]) == ("blind", [FLASH])
    certificate = verify(what.float(), images.float(), Sight(keep))
    assert (certificate.verdict, certificate.conditions["paths"]) == ("blind", ["removal, padded"])


def test_weighted_hiding_has_the_same_gradient_with_the_bias_as_a_channel():
    images, keep = scene()
    found = {}
    for device in ("cpu", "cuda"):
        weights = keep.float().clamp(0.1, 0.9).to(device).requires_grad_()
        small_vit().to(device)(images.to(device), weights).logits.square().mean().backward()
        found[device] = weights.grad.cpu()
    torch.testing.assert_close(found["cpu"], found["cuda"], atol=1e-5, rtol=1e-2)
