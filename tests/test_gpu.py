"""What only a GPU can show."""

from collections.abc import Callable

import pytest
import torch

from sightline.config import A2Adapter, Ifam
from sightline.data.batches import CacheReader
from sightline.methods.erm import Classifier
from sightline.train import train

from .small_runs import log_of, loop, small

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
