"""The training loop: what it learns, reproducibility, checkpoint selection, learning-rate schedule, EMA."""

import csv
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.config import Probe
from sightline.data.rows import read_rows
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.erm import Classifier
from sightline.metrics.predictions import Predictions
from sightline.train import train
from sightline.training.checkpoint import load_tensors, with_prefix
from sightline.training.distributed import make_accelerator
from sightline.training.schedule import cosine_decay, update_ema
from sightline.vit.weights import load_backbone, save_backbone
from sightline.what.features import cls_features

from .small_runs import files, log_of, loop, small, table


def test_the_run_folder_records_configuration_data_metrics_and_predictions(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run"))
    facts = json.loads((folder / "run.json").read_text())
    assert facts["method"] == "erm"
    assert facts["config"]["epochs"] == 3
    assert facts["state"] == "finished"
    assert facts["selection"] == {"metric": "balanced", "on": "val"}
    assert facts["data"]["counts"]["test"].keys() == set(facts["data"]["group_names"])
    assert {"torch", "sightline"} <= facts["versions"].keys()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 2, 3]
    assert log[-1]["loss"] < log[0]["loss"]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["selected_by"] == "balanced"
    with (folder / "predictions" / "test.csv").open(newline="") as file:
        predictions = list(csv.DictReader(file))
    assert len(predictions) == 48
    model = load(folder)
    prediction = model.predict(toy / predictions[0]["image"])
    assert model.classes[prediction.labels.item()] == predictions[0]["predicted"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(toy, tmp_path, whole):
    assert files(train(small(toy, tmp_path / "again"))) == whole
    other = files(train(small(toy, tmp_path / "other", seed=1)))
    assert other["best.safetensors"] != whole["best.safetensors"]


def test_caches_and_workers_change_nothing(toy, tmp_path, whole):
    assert files(train(small(toy, tmp_path / "cached", cache=tmp_path / "cache", workers=1))) == whole


def watched(monkeypatch, *scores: float) -> list[dict[str, torch.Tensor]]:
    """The weights that are validated after each epoch; the validation score is then the next of these."""
    seen: list[dict[str, torch.Tensor]] = []

    def validate(self, *_):
        seen.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
        return {"balanced": scores[len(seen) - 1]}

    monkeypatch.setattr(Classifier, "validate", validate)
    return seen


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def check_evaluated(folder: Path, data: Path) -> None:
    """The predictions in the run folder are those of the kept checkpoint."""
    names = read_rows(data).group_names
    stored = Predictions.load_csv(folder / "predictions" / "test.csv", split="test", group_names=names)
    again = load(folder).predict([data / image for image in stored.images])
    torch.testing.assert_close(torch.as_tensor(stored.probabilities), again.probabilities, atol=1e-4, rtol=0)


def test_the_checkpoint_of_the_best_validation_epoch_is_kept_and_evaluated(toy, tmp_path, monkeypatch):
    """The second of four: not the last, nor a later one that is only as good."""
    validated = watched(monkeypatch, 0.6, 0.8, 0.7, 0.8)
    folder = train(small(toy, tmp_path / "run", epochs=4, lr=3e-3))
    kept, facts = load_tensors(folder / "best.safetensors")
    assert (facts["epoch"], facts["score"]) == (2, 0.8)
    assert [same(kept, weights) for weights in validated] == [False, True, False, False]
    check_evaluated(folder, toy)


def test_the_final_metrics_have_the_best_score_of_the_log(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", epochs=4))
    best = max(line["balanced"] for line in log_of(folder))
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["splits"]["val"]["balanced"]["value"] == pytest.approx(best, abs=1e-9)


def test_the_averaged_weights_are_validated_kept_and_evaluated(toy, tmp_path, monkeypatch):
    """Those of the EMA, not those that are trained."""
    validated = watched(monkeypatch, 0.6, 0.8)
    folder = train(small(toy, tmp_path / "run", epochs=2, lr=3e-3, ema=0.9))
    kept, last = (load_tensors(folder / f"{name}.safetensors")[0] for name in ("best", "last"))
    averaged, trained = (with_prefix(prefix, last) for prefix in ("average.", "model."))
    assert same(validated[1], averaged)
    assert same(kept, averaged)
    assert not same(averaged, trained)
    untrained = load_backbone("random:nano", classes=2, seed=0).state_dict()
    assert not same(averaged, {f"vit.{name}": tensor for name, tensor in untrained.items()})
    check_evaluated(folder, toy)


def test_gradient_accumulation_computes_the_same_step(toy, tmp_path):
    whole = train(small(toy, tmp_path / "whole", epochs=1))
    parts = train(small(toy, tmp_path / "parts", epochs=1, grad_accum=4))
    losses = [json.loads((run / "log.jsonl").read_text())["loss"] for run in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_frozen_backbone_stays_as_it_was(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", freeze_backbone=True, epochs=1))
    before = load_backbone("random:nano", classes=2, seed=0).state_dict()
    after = load(folder).method.vit.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}


def test_early_stopping(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", epochs=30, patience=2, lr=0.0))
    assert len((folder / "log.jsonl").read_text().splitlines()) == 3


def test_cosine_decay_is_that_of_the_papers():
    assert cosine_decay(0, 90) == 1.0
    assert cosine_decay(45, 90) == pytest.approx(0.5)
    assert cosine_decay(89, 90) == pytest.approx(0.5 * (1 + np.cos(np.pi * 89 / 90)))


def test_probe_tuned_and_untuned(toy, tmp_path):
    for untuned in (True, False):
        config = Probe(
            data=toy, out=tmp_path / f"untuned-{untuned}", backbone="random:nano", workers=0, device="cpu",
            untuned=untuned, cache=tmp_path / "features",
        )  # fmt: skip
        folder = train(config)
        line = json.loads((folder / "log.jsonl").read_text())
        assert line["standardized"] is not untuned
        assert (line["c"] == 1.0) or not untuned
        metrics = json.loads((folder / "metrics.json").read_text())
        assert metrics["splits"]["val"]["balanced"]["value"] == pytest.approx(line["balanced"], abs=1e-9)
        assert metrics["selected_by"] == (None if untuned else "balanced")
        assert json.loads((train(replace(config, resume=True)) / "log.jsonl").read_text()) == line, "no second line"
    assert len(list((tmp_path / "features").glob("features-*.safetensors"))) == 2, "computed once for both"


def test_a_diverged_loss_stops_with_advice(toy, tmp_path, monkeypatch):
    broken = lambda self, batch: {"loss": self.vit(batch.images).logits.sum() * torch.nan}  # noqa: E731
    monkeypatch.setattr(Classifier, "forward", broken)
    with pytest.raises(UserError, match="lower --lr"):
        train(small(toy, tmp_path / "run", epochs=1))


@pytest.mark.parametrize("case", [{"workers": 0}, {"workers": 1}, {"cache": True}, {"split": "test"}, {"probe": True}])
def test_the_error_about_a_damaged_image_suggests_check(toy, tmp_path, case):
    data = shutil.copytree(toy, tmp_path / "toy")
    damaged = next((data / case.get("split", "train")).glob("*.png"))
    damaged.write_bytes(damaged.read_bytes()[:200])
    settings = {
        "epochs": 1,
        "workers": case.get("workers", 0),
        "cache": tmp_path / "cache" if "cache" in case else None,
    }
    config = small(data, tmp_path / "run", **settings)
    if "probe" in case:
        config = Probe(data, "random:nano", tmp_path / "run", workers=0, device="cpu")
    with pytest.raises(UserError) as caught:
        train(config)
    message = str(caught.value)
    assert message.startswith(f"{damaged}: damaged image (")
    assert message.endswith(f"; restore or remove it; `sightline check {data}` lists all such files")


def test_nothing_is_written_outside_the_run_folder(toy, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in toy.rglob("*")}
    train(small(toy, tmp_path / "run", epochs=1))
    assert {p: p.stat().st_mtime_ns for p in toy.rglob("*")} == before


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_the_ema_decay_ramps_up_as_published():
    model, ema = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    expected = None
    for step in range(6):
        torch.nn.init.constant_(model.weight, float(step))
        update_ema(ema, model, 0.6, step)
        decay = min(0.6, 1 - (1 + step) ** (-2 / 3))
        expected = float(step) if expected is None else decay * expected + (1 - decay) * step
        assert ema.weight.item() == pytest.approx(expected)


def test_warmup_is_linear_per_step_and_the_log_has_the_learning_rate(toy, tmp_path, monkeypatch):
    """Over one and a half epochs of three steps, under the cosine."""
    rates, real = [], loop().train_step

    def train_step(wrapped, batch, optimizer, *more):
        rates.append([group["lr"] for group in optimizer.param_groups])
        return real(wrapped, batch, optimizer, *more)

    monkeypatch.setattr(loop(), "train_step", train_step)
    log = log_of(train(small(toy, tmp_path / "run", warmup=1.5, head_lr_factor=4.0)))
    full = 3e-4 * (32 / 128) ** 0.5
    expected = [min(1, (step + 1) / 4.5) * cosine_decay(step // 3, 3) * full for step in range(9)]
    assert [min(groups) for groups in rates] == pytest.approx(expected)
    assert [max(groups) for groups in rates] == pytest.approx([4 * rate for rate in expected])
    assert [line["lr"] for line in log] == pytest.approx(expected[2::3])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="compiling for the CPU needs a C++ compiler")
def test_compiled_blocks_train_as_uncompiled_ones(toy, tmp_path):
    """All batches have one shape, so that every block is compiled once."""
    plain, compiled = (train(small(toy, tmp_path / str(how), epochs=1, batch=16, compile=how)) for how in (False, True))
    assert log_of(compiled)[0]["loss"] == pytest.approx(log_of(plain)[0]["loss"], rel=1e-4)
    ours, theirs = (load(run).method.state_dict() for run in (plain, compiled))
    assert ours.keys() == theirs.keys(), "names are as without compiling"
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-2, atol=1e-3)


def test_the_log_has_the_actual_learning_rate_and_batch_size(toy, tmp_path):
    """96 training images do not fill a batch of 512."""
    line = log_of(train(small(toy, tmp_path / "run", epochs=1, batch=512)))[0]
    assert line["batch"] == 96
    assert line["lr"] == pytest.approx(3e-4 * (96 / 128) ** 0.5)


def test_the_probe_predicts_in_full_precision_also_under_autocast(toy, tmp_path):
    config = Probe(data=toy, out=tmp_path / "run", backbone="random:nano", workers=0, device="cpu", precision="bf16")
    folder = train(config)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["splits"]["val"]["balanced"]["value"] == pytest.approx(log_of(folder)[0]["balanced"], abs=1e-9)
    model = load(folder)
    images = torch.rand(2, 3, *model.expects.size)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.method.judge(images, model.method.look(images)).logits.dtype == torch.float32


def test_features_of_files_that_changed_but_kept_their_size_are_computed_anew(toy, tmp_path):
    rows = read_rows(table(tmp_path / "data", ("a", "b")))
    vit, accelerator = load_backbone("random:nano", classes=2), make_accelerator("cpu")

    def features() -> np.ndarray:
        indices = np.arange(4)[::-1]
        return cls_features(
            vit, rows, indices, vit.config.input, accelerator, tmp_path / "cache", batch=3, workers=0
        )  # fmt: skip

    first = features()
    assert np.array_equal(features(), first)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    path, other = tmp_path / "data" / "3.png", (tmp_path / "data" / "2.png").read_bytes()
    path.write_bytes(other + b"\0" * (path.stat().st_size - len(other)))
    os.utime(path, ns=(1, 1))
    second = features()
    assert not np.array_equal(second[0], first[0]), "the order is that of the indices: row 3 first"
    np.testing.assert_array_equal(second[1:], first[1:])


def test_a_run_records_its_device_data_and_weights_file(toy, tmp_path):
    weights = tmp_path / "nano.safetensors"
    save_backbone(load_backbone("random:nano", seed=3), weights)
    folder = train(small(Path(os.path.relpath(toy)), tmp_path / "run", epochs=1, backbone=str(weights)))
    facts = json.loads((folder / "run.json").read_text())
    assert facts["processes"] == 1
    assert facts["device"] == "cpu"
    assert facts["data"]["path"] == str(toy.resolve())
    assert facts["backbone"]["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
