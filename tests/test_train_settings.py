"""What a training may be told, and what it sees then."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.config import Erm, Probe
from sightline.data.augment import Pictures
from sightline.data.images import decode, read_image_file, to_tensor
from sightline.data.rows import read_rows
from sightline.errors import UserError
from sightline.train import train
from sightline.training.context import Trainable, answered_at_once, check_processes, validate_config, view
from sightline.vit.model import Input
from sightline.vit.weights import load_backbone

from .small_runs import log_of, small, stopped_after, table


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
        ({"accumulate": 0}, "--accumulate 0"),
        ({"batch": 0}, "--batch 0"),
        ({"lr": -1.0}, "--lr -1.0: must not be negative"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1"),
        ({"average": 1.0}, "--average 1.0: must lie between 0 and 1"),
        ({"average": 0.0}, "--average 0.0"),
        ({"patience": 0}, "--patience 0"),
        ({"device": "cuda"}, "no GPU"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(toy, tmp_path, wrong, said):
    if wrong == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=said):
        train(small(toy, tmp_path / "run", **wrong))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("classes", "wrong", "said"),
    [
        (("a", "b"), {"select": "worst-group"}, "--select worst-group: these data have no groups"),
        (("a", "b"), {"balance": "groups"}, "--balance groups: these data have no groups"),
        (("a", "b", "c"), {"select": "auc"}, "--select auc: is for two classes, and these data have 3"),
        (("a",), {}, "of one class, 'a'"),
    ],
)
def test_settings_that_do_not_go_with_the_data_are_refused_at_once(tmp_path, classes, wrong, said):
    with pytest.raises(UserError, match=said):
        train(small(table(tmp_path / "data", classes), tmp_path / "run", **wrong))
    assert not (tmp_path / "run").exists()


def test_auc_needs_both_classes_to_choose_by(tmp_path):
    data = table(tmp_path / "data", ("a", "b"))
    lines = (data / "rows.csv").read_text().splitlines()
    (data / "rows.csv").write_text("\n".join(line.replace(",b,val", ",a,val") for line in lines))
    with pytest.raises(UserError, match="all validation pictures are of one; select by balanced"):
        train(small(data, tmp_path / "run", select="auc"))
    assert not (tmp_path / "run").exists()
    validate_config(small(data, tmp_path / "run"), read_rows(data))
    validate_config(Probe(data, select="auc", plain=True), read_rows(data))


@pytest.mark.parametrize(
    ("batch", "accumulate", "processes", "advice"),
    [(32, 2, 3, "take 30"), (8, 4, 3, "lower --accumulate"), (9999, 5, 2, "take"), (30, 2, 3, None), (32, 1, 3, None),
     (31, 2, 1, None)],
)  # fmt: skip
def test_processes_must_cut_their_shares_into_as_many_pieces(toy, tmp_path, batch, accumulate, processes, advice):
    """Those that ask each other in every piece would wait for ever."""
    config, rows = small(toy, tmp_path / "run", batch=batch, accumulate=accumulate), read_rows(toy)
    if advice is None:
        check_processes(config, rows, processes)
        return
    with pytest.raises(UserError, match=f"divide evenly among {processes} processes and {accumulate} parts; {advice}"):
        check_processes(config, rows, processes)


@pytest.mark.parametrize(
    ("batch", "accumulate", "expected"), [(8, 1, 64), (2, 1, 16), (16, 4, 32), (8, 8, 8), (128, 8, 128)]
)
def test_what_learns_from_few_at_a_time_answers_more_at_a_time(toy, batch, accumulate, expected):
    assert answered_at_once(Erm(toy, batch=batch, accumulate=accumulate)) == expected
    assert answered_at_once(Probe(toy, batch=batch)) == batch, "it only answers, so that this is what was asked for"


@pytest.mark.parametrize("before", [False, True])
def test_torch_is_deterministic_only_while_a_run_asks_for_it(toy, tmp_path, before):
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


def test_the_division_into_splits_does_not_follow_the_training_seed(tmp_path):
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
    canvas, augment = view("none", expects)
    images = torch.stack([decode(rows, i, canvas).image for i in range(3)])
    seen = augment(Pictures(images), seed=0, epoch=0, indices=torch.arange(3)).images
    for i in range(3):
        assert torch.equal(seen[i], to_tensor(read_image_file(rows, i), expects))


def test_published_views_are_not_enlarged_and_have_black_corners():
    expects = Input(size=(28, 28), mean=(0.5, 0.5, 0.5))
    canvas, augment = view("published", expects)
    assert (canvas.size, augment.crop, augment.fill) == ((28, 28), 1.0, (0.0, 0.0, 0.0))
    canvas, augment = view("light", expects)
    assert (canvas.size, augment.crop, augment.fill) == ((32, 32), 0.875, (0.5, 0.5, 0.5))


def test_a_size_that_is_not_square_stays_so(monkeypatch):
    from sightline.methods import erm

    vit = load_backbone("random:nano", classes=2)
    wide = replace(vit.config, input=replace(vit.config.input, size=(2 * vit.config.patch, 3 * vit.config.patch)))
    vit.config = wide
    monkeypatch.setattr(erm, "load_backbone", lambda *_, **__: vit)
    assert erm.open_backbone(Erm(data=Path("data")), 2)[1].size == wide.input.size
    assert (
        erm.open_backbone(Erm(data=Path("data"), size=4 * vit.config.patch), 2)[1].size == (4 * vit.config.patch,) * 2
    )


def test_a_balanced_loss_leaves_how_common_classes_are_to_the_loss(generator):
    """Trained until pictures tell it nothing, an ordinary answer is how common the classes are; this one is even."""
    labels = torch.tensor([0] * 90 + [1] * 10)

    def learned(class_log_prior: torch.Tensor | None) -> torch.Tensor:
        learner, logits = Trainable(), torch.zeros(2, requires_grad=True)
        learner.class_log_prior = class_log_prior
        optimizer = torch.optim.LBFGS([logits], max_iter=50)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = learner.classification_loss(logits.expand(100, 2), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
        return logits.detach().softmax(dim=0)

    assert learned(None).tolist() == pytest.approx([0.9, 0.1], abs=1e-3)
    assert learned(torch.tensor([0.9, 0.1]).log()).tolist() == pytest.approx([0.5, 0.5], abs=1e-3)


def test_a_balanced_loss_is_told_how_common_the_classes_are_in_training(tmp_path):
    data, told = table(tmp_path / "data", ("a", "a", "a", "b")), []
    real = Trainable.classification_loss

    def heard(self, logits, labels):
        told.append(self.class_log_prior)
        return real(self, logits, labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainable, "answer_loss", heard)
        train(small(data, tmp_path / "run", epochs=1, balance="loss"))
    rows = read_rows(data)
    counts = np.bincount(rows.labels[rows.where("train")])
    assert told[0].exp().tolist() == pytest.approx((counts / counts.sum()).tolist())
    assert counts[0] > counts[1]
