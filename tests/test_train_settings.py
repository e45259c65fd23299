"""Settings of training: validation of the configuration, views, logit adjustment."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.config import Dfr, Erm, Probe
from sightline.data.augment import AnnotatedImages
from sightline.data.images import decode, read_row_image, to_tensor
from sightline.data.rows import carve_validation, read_rows
from sightline.errors import UserError
from sightline.train import train
from sightline.training.batches import inference_batch_size, training_view
from sightline.training.checks import check_processes, validate_config
from sightline.training.trainable import Trainable
from sightline.vit.model import Input
from sightline.vit.weights import load_backbone

from .commands import typed
from .small_runs import log_of, small, stopped_after, table


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
        ({"grad_accum": 0}, "--grad-accum 0"),
        ({"batch": 0}, "--batch 0"),
        ({"lr": -1.0}, "--lr -1.0: must not be negative"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1"),
        ({"ema": 1.0}, "--ema 1.0: must lie between 0 and 1"),
        ({"ema": 0.0}, "--ema 0.0"),
        ({"patience": 0}, "--patience 0"),
        ({"device": "cuda"}, "no GPU"),
    ],
)
def test_invalid_settings_are_rejected_before_anything_is_written(toy, tmp_path, wrong, message):
    if wrong == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=message):
        train(small(toy, tmp_path / "run", **wrong))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("classes", "wrong", "message"),
    [
        (("a", "b"), {"select": "worst-group"}, "--select worst-group: the data have no group labels"),
        (("a", "b"), {"balance": "groups"}, "--balance groups: the data have no group labels"),
        (("a", "b", "c"), {"select": "auc"}, "--select auc: needs two classes, and the data have 3"),
        (("a",), {}, "of one class, 'a'"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_rejected_before_anything_is_written(tmp_path, classes, wrong, message):
    with pytest.raises(UserError, match=message):
        train(small(table(tmp_path / "data", classes), tmp_path / "run", **wrong))
    assert not (tmp_path / "run").exists()


def test_selection_by_auc_needs_both_classes_in_the_validation_data(tmp_path):
    data = table(tmp_path / "data", ("a", "b"))
    lines = (data / "rows.csv").read_text().splitlines()
    (data / "rows.csv").write_text("\n".join(line.replace(",b,val", ",a,val") for line in lines))
    with pytest.raises(UserError, match="all validation images are of one class; select by balanced"):
        train(small(data, tmp_path / "run", select="auc"))
    assert not (tmp_path / "run").exists()
    validate_config(small(data, tmp_path / "run"), read_rows(data))
    validate_config(Probe(data, select="auc", untuned=True), read_rows(data))


@pytest.mark.parametrize(
    ("batch", "grad_accum", "processes", "advice"),
    [(32, 2, 3, "use --batch 30"), (8, 4, 3, "lower --grad-accum"), (9999, 5, 2, "use"), (30, 2, 3, None),
     (32, 1, 3, None), (31, 2, 1, None)],
)  # fmt: skip
def test_all_processes_must_have_as_many_micro_batches(toy, tmp_path, batch, grad_accum, processes, advice):
    """Processes that communicate in every micro-batch would otherwise wait for ever."""
    config, rows = small(toy, tmp_path / "run", batch=batch, grad_accum=grad_accum), read_rows(toy)
    if advice is None:
        check_processes(config, rows, processes)
        return
    with pytest.raises(UserError, match=f"divisible by {processes} processes × {grad_accum} micro-batches; {advice}"):
        check_processes(config, rows, processes)


@pytest.mark.parametrize(
    ("batch", "grad_accum", "expected"), [(8, 1, 64), (2, 1, 16), (16, 4, 32), (8, 8, 8), (128, 8, 128)]
)
def test_inference_batches_may_be_larger_than_those_of_training(toy, batch, grad_accum, expected):
    assert inference_batch_size(Erm(toy, batch=batch, grad_accum=grad_accum)) == expected
    assert inference_batch_size(Probe(toy, batch=batch)) == batch, "inference only, so that the given size holds"


@pytest.mark.parametrize("before", [False, True])
def test_torch_is_deterministic_only_during_a_deterministic_run(toy, tmp_path, before):
    seen = []
    stopped = stopped_after(0, lambda: seen.append(torch.are_deterministic_algorithms_enabled()) or 1 / 0)
    torch.use_deterministic_algorithms(before, warn_only=before)
    try:
        with stopped, pytest.raises(ZeroDivisionError):
            train(small(toy, tmp_path / "run", epochs=1, deterministic=True))
        assert seen == [True]
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.is_deterministic_algorithms_warn_only_enabled() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_splits_do_not_depend_on_the_training_seed(tmp_path):
    data = table(tmp_path / "data", ("a", "b"), splits=False)
    runs = {"one": {}, "seed": {"seed": 1}, "split": {"split_seed": 1}}
    tested = {}
    for name, changes in runs.items():
        folder = train(small(data, tmp_path / name, epochs=1, batch=8, **changes))
        with (folder / "predictions" / "test.csv").open(newline="") as file:
            tested[name] = [line["image"] for line in csv.DictReader(file)]
    assert tested["one"] == tested["seed"]
    assert tested["one"] != tested["split"]


def test_one_python_process_trains_with_one_precision_after_the_other(toy, tmp_path):
    for precision in ("fp32", "bf16", "fp32"):
        folder = tmp_path / f"{precision}-{len(list(tmp_path.iterdir()))}"
        losses = [line["loss"] for line in log_of(train(small(toy, folder, epochs=1, precision=precision)))]
        assert np.isfinite(losses).all()


# ---- what is seen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crop", [1.0, 0.875])
def test_without_augmentation_training_sees_what_evaluation_sees(tmp_path, crop):
    rows = read_rows(table(tmp_path / "data", ("a", "b")))
    expects = Input(size=(28, 42), crop=crop, resample="bilinear")
    preprocess, augment = training_view("none", expects)
    images = torch.stack([decode(rows, i, preprocess).image for i in range(3)])
    seen = augment(AnnotatedImages(images), seed=0, epoch=0, indices=torch.arange(3)).images
    for i in range(3):
        assert torch.equal(seen[i], to_tensor(read_row_image(rows, i), expects))


def test_published_views_are_not_enlarged_and_have_black_corners():
    expects = Input(size=(28, 28), mean=(0.5, 0.5, 0.5))
    preprocess, augment = training_view("published", expects)
    assert (preprocess.size, augment.crop, augment.fill) == ((28, 28), 1.0, (0.0, 0.0, 0.0))
    preprocess, augment = training_view("light", expects)
    assert (preprocess.size, augment.crop, augment.fill) == ((32, 32), 0.875, (0.5, 0.5, 0.5))


def test_a_size_that_is_not_square_stays_so(monkeypatch):
    from sightline.methods import base

    vit = load_backbone("random:nano", classes=2)
    wide = replace(vit.config, input=replace(vit.config.input, size=(2 * vit.config.patch, 3 * vit.config.patch)))
    vit.config = wide
    monkeypatch.setattr(base, "load_backbone", lambda *_, **__: vit)
    assert base.open_backbone(Erm(data=Path("data")), 2)[1].size == wide.input.size
    assert (
        base.open_backbone(Erm(data=Path("data"), size=4 * vit.config.patch), 2)[1].size == (4 * vit.config.patch,) * 2
    )


def test_logit_adjustment_removes_the_class_priors_from_the_prediction():
    """Without information in the images, cross-entropy learns the class priors; with logit adjustment, even odds."""
    labels = torch.tensor([0] * 90 + [1] * 10)

    def learned(class_log_prior: torch.Tensor | None) -> torch.Tensor:
        model, logits = Trainable(), torch.zeros(2, requires_grad=True)
        model.class_log_prior = class_log_prior
        optimizer = torch.optim.LBFGS([logits], max_iter=50)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model.classification_loss(logits.expand(100, 2), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
        return logits.detach().softmax(dim=0)

    assert learned(None).tolist() == pytest.approx([0.9, 0.1], abs=1e-3)
    assert learned(torch.tensor([0.9, 0.1]).log()).tolist() == pytest.approx([0.5, 0.5], abs=1e-3)


def test_logit_adjustment_uses_the_class_priors_of_the_training_data(tmp_path):
    data, priors = table(tmp_path / "data", ("a", "a", "a", "b")), []
    real = Trainable.classification_loss

    def recorded(self, logits, labels):
        priors.append(self.class_log_prior)
        return real(self, logits, labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainable, "classification_loss", recorded)
        train(small(data, tmp_path / "run", epochs=1, balance="logit-adjustment"))
    rows = read_rows(data)
    counts = np.bincount(rows.labels[rows.split_indices("train")])
    assert priors[0].exp().tolist() == pytest.approx((counts / counts.sum()).tolist())
    assert counts[0] > counts[1]


def test_a_twentieth_of_train_can_take_the_place_of_the_validation_split(toy, tmp_path):
    rows = read_rows(toy)
    carved = carve_validation(rows, seed=0)
    counts = [len(carved.split_indices(split)) for split in ("train", "val", "test")]
    assert counts == [92, 4, 48]
    of = {rows.images[i] for i in rows.split_indices("train")}
    assert {carved.images[i] for i in carved.split_indices("val")} <= of
    assert np.bincount(carved.labels[carved.split_indices("val")]).tolist() == [2, 2]
    assert carve_validation(rows, seed=1).splits.tolist() != carved.splits.tolist()
    run = train(small(toy, tmp_path / "run", epochs=1, select_on="train-split"))
    facts = json.loads((run / "run.json").read_text())
    assert facts["selection"] == {"metric": "balanced", "on": "train-split"}
    assert facts["data"]["counts"]["train"] == {name: int(n) for name, n in zip(
        rows.group_names, np.bincount(rows.groups[rows.split_indices("train")]), strict=True)}  # fmt: skip
    assert json.loads((run / "metrics.json").read_text())["splits"]["val"]["n"] == 32  # the validation split, whole
    code, out, _ = typed("evaluate", run, "--split", "val", "--device", "cpu")
    assert (code, "selected by class-balanced held-out training accuracy" in out.replace("\n", " ")) == (0, True)


def test_dfr_says_itself_on_what_it_is_fitted(toy, tmp_path):
    with pytest.raises(UserError, match="--select-on train-split: dfr fits and tunes on the split that --fit-on names"):
        train(Dfr(toy, out=tmp_path / "run", backbone="random:nano", select_on="train-split"))
