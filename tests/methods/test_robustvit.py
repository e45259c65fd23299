"""RobustViT: its losses, what it begins with, what it learns from, and that relevance moves onto the thing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from sightline.config import Robustvit
from sightline.data import batches
from sightline.data.batches import Batch
from sightline.data.images import Preprocess, decode
from sightline.data.rows import read_rows
from sightline.datasets.imagenet import imagenet_classes
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.erm import Classifier
from sightline.methods.robustvit import (
    RobustViT,
    add_training_masks,
    background_loss,
    confidence_loss,
    find_masks,
    foreground_loss,
    load_backbone_with_head,
    sample_training_images,
)
from sightline.metrics.inference import inference_batches
from sightline.train import train
from sightline.training.distributed import make_accelerator
from sightline.training.trainable import TrainContext
from sightline.vit.weights import save_backbone
from sightline.where.attention import min_max_scale

from ..commands import QUICK, typed
from ..conftest import small_vit
from ..small_runs import Stop, log_of, stopped_after


def config(data, out=None, **changes) -> Robustvit:
    settings = {"epochs": 1, "batch": 16, "size": 32, "workers": 0, "device": "cpu", "augment": "none"}
    return Robustvit(data, out=out, **settings | changes)


def model(**changes) -> RobustViT:
    return RobustViT(small_vit(), lambda rows: rows, config("data", **changes))


def share_inside(folder) -> float:
    assert typed("localize", folder, "--split", "val", *QUICK)[0] == 0
    found = json.loads((folder / "localization.json").read_text())
    return found["splits"]["val"]["maps"]["gae"]["mass"]["value"]


@pytest.fixture
def train_batch(generator):
    masks = torch.zeros(4, 32, 32, dtype=torch.bool)
    masks[:, 8:24, 8:20] = True
    return torch.rand(4, 3, 32, 32, generator=generator), torch.tensor([3, 0, 4, 1]), masks


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_the_losses_ask_for_relevance_1_inside_and_0_outside():
    maps = torch.tensor([[[1.0, 0.5], [0.0, 0.2]]])
    masks = torch.tensor([[[True, True], [False, False]]])
    assert background_loss(maps, masks).tolist() == pytest.approx([0.2**2 / 4])
    assert foreground_loss(maps, masks).tolist() == pytest.approx([0.5**2 / 4])
    assert background_loss(masks.float(), masks) == foreground_loss(masks.float(), masks) == 0


def test_the_confidence_loss_has_a_temperature():
    logits = torch.tensor([[1.0, 3.0, 0.0]])
    expected = F.cross_entropy(logits / 0.65, torch.tensor([1]))
    assert confidence_loss(logits, 0.65).item() == pytest.approx(expected.item())


def test_min_max_scaling_is_per_map_and_differentiable():
    maps = torch.tensor([[[2.0, 4.0], [6.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]], requires_grad=True)
    found = min_max_scale(maps, (1, 2))
    assert found[0].flatten().tolist() == [0, 0.5, 1, 0.25]
    assert found[1].abs().max() == 0
    found[0, 0, 1].backward()
    assert maps.grad[0].flatten().tolist() == pytest.approx([-0.125, 0.25, -0.125, 0])


@pytest.mark.parametrize("name", ["gae", "rollout", "attention"])
def test_the_loss_is_the_published_sum(train_batch, name):
    found = model(relevance=name).losses(*train_batch)
    explaining = 2 * found["background"] + 0.3 * found["foreground"]
    assert torch.allclose(found["loss"], 0.8 * explaining + 0.2 * found["classification"])
    assert all(each.shape == (4,) for each in found.values())


def test_each_loss_can_be_left_out_or_be_the_only_one(train_batch):
    only = model(background_weight=0.0, foreground_weight=1.0, relevance_weight=1.0, classification_weight=0.0).losses(
        *train_batch
    )
    assert torch.equal(only["loss"], only["foreground"])
    labels = model(classification_target="label", relevance_weight=0.0, classification_weight=1.0)
    assert torch.allclose(
        labels.losses(*train_batch)["loss"],
        F.cross_entropy(labels.vit(train_batch[0]).logits, train_batch[1], reduction="none"),
    )


def test_every_weight_has_a_gradient_whatever_is_left_out(train_batch):
    learner = model(classification_weight=0.0)
    learner.losses(*train_batch)["loss"].sum().backward()
    assert all(p.grad is not None for p in learner.parameters())
    assert learner.vit.blocks[0].attn.qkv.weight.grad.abs().max() > 0


def test_second_order_changes_the_gradient_and_not_the_loss(train_batch):
    losses, gradients = [], []
    for second_order in (False, True):
        learner = model(double_backward=second_order)
        loss = learner.losses(*train_batch)["loss"].sum()
        loss.backward()
        losses.append(loss.item())
        gradients.append(learner.vit.blocks[0].mlp.fc1.weight.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not torch.allclose(*gradients, rtol=0.05)


def test_background_masks_are_inverted_where_there_are_any(train_batch):
    images, labels, masks = train_batch
    has = torch.tensor([True, True, True, False])
    batch = Batch(images, labels, None, ~masks & has[:, None, None], torch.arange(4), has_mask=has)
    found = RobustViT(small_vit(), lambda rows: rows, config("data", mask_marks="background")).object_masks(batch)
    assert torch.equal(found[:3], masks[:3])
    assert not found[3].any()


# ---- what it learns from ---------------------------------------------------------------------------------------------


def test_classes_and_images_are_sampled_by_the_seed(toy):
    rows = read_rows(toy)
    at = rows.split_indices("train")
    drawn = [sample_training_images(rows, at, config(toy, masks_per_class=3, seed=seed)) for seed in (0, 0, 1)]
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert np.bincount(rows.labels[drawn[0]]).tolist() == [3, 3]
    alone = sample_training_images(rows, at, config(toy, mask_classes=1))
    assert len(np.unique(rows.labels[alone])) == 1
    assert np.array_equal(sample_training_images(rows, at, config(toy)), at)


def test_a_folder_may_have_masks_for_some_images_only(toy, tmp_path):
    rows = read_rows(toy)
    first = rows.images[0]
    (tmp_path / first).parent.mkdir(parents=True)
    shutil.copy(toy / rows.masks[0], (tmp_path / first).with_suffix(".png"))
    found = find_masks(rows, tmp_path)
    assert (rows.root / found[0]).resolve() == (tmp_path / first).with_suffix(".png").resolve()
    assert not any(found[1:])


def test_missing_training_or_validation_masks_are_an_error(toy, runs, tmp_path):
    start = str(runs / "erm-0")
    with pytest.raises(UserError, match="no training image has a mask"):
        train(config(toy, tmp_path / "none", init_from=start, masks=str(tmp_path)))
    rows = read_rows(toy)
    at = int(rows.split_indices("train")[0])
    target = (tmp_path / "some" / rows.images[at]).with_suffix(".png")
    target.parent.mkdir(parents=True)
    shutil.copy(toy / rows.masks[at], target)
    with pytest.raises(UserError, match="--select relevance: no validation image has a mask"):
        train(config(toy, tmp_path / "few", init_from=start, masks=str(tmp_path / "some")))
    folder = train(config(toy, tmp_path / "one", init_from=start, masks=str(tmp_path / "some"), select="balanced"))
    assert json.loads((folder / "run.json").read_text())["learnt_from"]["n"] == 1


def test_metrics_count_all_training_images(toy, runs, tmp_path):
    folder = train(config(toy, tmp_path / "run", init_from=str(runs / "erm-0"), masks_per_class=1))
    expected = json.loads((folder / "metrics.json").read_text())["splits"]["test"]
    assert typed("evaluate", folder, *QUICK)[0] == 0
    assert json.loads((folder / "metrics.json").read_text())["splits"]["test"] == expected


def masks_with(toy, folder: Path, change) -> str:
    """All masks of the toy set, changed, in a folder of their own."""
    for mask in read_rows(toy).masks:
        target = folder / mask.removeprefix("masks/")
        target.parent.mkdir(parents=True, exist_ok=True)
        change(Image.open(toy / mask).convert("L")).save(target)
    return str(folder)


def test_empty_masks_are_not_used(toy, runs, tmp_path):
    start, dark = str(runs / "erm-0"), masks_with(toy, tmp_path / "dark", lambda mask: mask.point(lambda level: 0))
    for bright, change in (("object", 0), ("background", 255)):
        made = masks_with(toy, tmp_path / bright, lambda mask, change=change: mask.point(lambda level: change))
        with pytest.raises(UserError, match=r"all training masks are empty, such as .*\.png"):
            train(config(toy, tmp_path / f"run-{bright}", init_from=start, masks=made, mask_marks=bright))
    rows = read_rows(toy)
    kept = [int(rows.split_indices("train")[k]) for k in (1, 4, 7)]
    for index in kept:
        shutil.copy(toy / rows.masks[index], Path(dark) / rows.masks[index].removeprefix("masks/"))
    with pytest.raises(UserError, match="--select relevance: all validation masks are empty"):
        train(config(toy, tmp_path / "no-val", init_from=start, masks=dark))
    configured = add_training_masks(rows, config(toy, masks=dark, select="balanced"), None)
    assert [configured.images[i] for i in configured.split_indices("train")] == [rows.images[i] for i in kept]


def test_an_unreadable_mask_is_reported_with_its_image_and_line(toy, runs, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(toy, data)
    lines = (data / "rows.csv").read_text().splitlines()
    (data / "rows.csv").write_text("\n".join([lines[0], lines[1].replace("masks/train/00000.png", "nan"), *lines[2:]]))
    with pytest.raises(UserError, match=r"data/nan: no such file \(the mask of train/00000\.png, .*/rows\.csv:2\)"):
        train(config(data, tmp_path / "run", init_from=str(runs / "erm-0")))


def test_masks_of_0_and_1_equal_those_of_0_and_255(toy, runs, tmp_path):
    ones = masks_with(toy, tmp_path / "ones", lambda mask: mask.point(lambda level: level // 255))
    common = {"init_from": str(runs / "erm-0"), "masks_per_class": 4, "batch": 8}
    one = train(config(toy, tmp_path / "one", **common))
    other = train(config(toy, tmp_path / "other", masks=ones, **common))
    assert (one / "predictions/test.csv").read_bytes() == (other / "predictions/test.csv").read_bytes()


# ---- what it begins with ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "give either --init-from RUN"),
        ({"init_from": "erm-0", "backbone": "random:nano"}, "give either --init-from RUN"),
        ({"backbone": "random:nano"}, "has no head, and the dataset has 2 classes"),
        ({"init_from": "erm-0", "compile": True}, "--compile"),
        ({"init_from": "erm-0", "size": 30}, "--size 30: must be a multiple of the model's patch, 8, such as 24"),
        ({"init_from": "erm-0", "masks_per_class": 0}, "--masks-per-class 0: must be at least 1"),
        (
            {"init_from": "erm-0", "mask_marks": "background"},
            "--mask-marks background: the dataset's own masks",
        ),
        ({"init_from": "erm-0", "background_weight": -1.0}, "--background-weight -1.0: must not be negative"),
        ({"init_from": "erm-0", "relevance_weight": 0.0, "classification_weight": 0.0}, "all losses are disabled"),
        (
            {"init_from": "erm-0", "relevance": "rollout", "double_backward": True},
            "--double-backward: is for gae; rollout",
        ),
        ({"init_from": "nowhere"}, "not a run folder"),
    ],
)
def test_an_unsuitable_starting_classifier_is_an_error(toy, runs, tmp_path, monkeypatch, wrong, message):
    monkeypatch.chdir(runs)
    with pytest.raises(UserError, match=message):
        train(config(toy, tmp_path / "run", **wrong))


def test_a_run_with_other_classes_is_an_error(toy, runs, tmp_path):
    for name in ("rows.csv", "train", "val", "test"):
        source = toy / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    table = (tmp_path / "rows.csv").read_text().replace(",duck,", ",goose,")
    (tmp_path / "rows.csv").write_text(table)
    with pytest.raises(UserError, match="has 2 classes"):
        train(config(tmp_path, tmp_path / "run", init_from=str(runs / "erm-0"), masks=str(toy)))


def test_a_backbone_with_a_head_can_be_started_from_if_the_class_order_agrees(toy, tmp_path):
    save_backbone(small_vit(classes=2), tmp_path / "two.safetensors")
    rows = read_rows(toy)
    vit, _ = load_backbone_with_head(config(toy, backbone=str(tmp_path / "two.safetensors")), rows)
    assert vit.head is not None
    save_backbone(small_vit(classes=1000), tmp_path / "all.safetensors")
    names = tuple(imagenet_classes().values())
    configured = config(toy, backbone=str(tmp_path / "all.safetensors"))
    load_backbone_with_head(configured, replace(rows, classes=names))
    with pytest.raises(UserError, match="ImageNet's classes in another order"):
        load_backbone_with_head(configured, replace(rows, classes=tuple(sorted(names))))


def test_the_starting_run_may_depend_on_the_seed(toy):
    assert config(toy, init_from="runs/erm-{seed}", seed=3).started_from == "runs/erm-3"
    assert config(toy, init_from="runs/erm-{seed}", seed=3).folder.name == f"{toy.stem}-robustvit-erm-3-3"


# ---- end to end ------------------------------------------------------------------------------------------------------


def test_relevance_moves_onto_the_object_and_the_run_is_a_classifier(toy, runs, tmp_path):
    start, out = runs / "erm-0", tmp_path / "run"
    flags = (
        "--init-from",
        start,
        "--epochs",
        3,
        "--batch",
        16,
        "--lr",
        "2e-3",
        "--augment",
        "none",
        "--out",
        out,
        *QUICK,
    )
    code, _, err = typed("train", "robustvit", toy, *flags)
    assert code == 0, err
    shutil.copytree(start, tmp_path / "before")
    before, after = share_inside(tmp_path / "before"), share_inside(out)
    assert after > 1.2 * before
    method = load(out).method
    assert type(method) is Classifier
    facts = json.loads((out / "run.json").read_text())
    assert facts["began_with"]["run"] == str(start.resolve())
    assert facts["selection"] == {"metric": "relevance", "on": "val"}
    lines = log_of(out)
    assert {"background", "foreground", "classification", "relevance", "balanced"} <= set(lines[0])
    assert lines[-1]["relevance"] > lines[0]["relevance"]
    assert typed("evaluate", out, *QUICK)[0] == 0


def test_masks_can_be_made_unsupervised_and_only_where_needed(toy, runs, tmp_path):
    configured = config(
        toy, tmp_path / "run", init_from=str(runs / "erm-0"), masks="tokencut:random:nano", masks_per_class=2, batch=4
    )
    folder = train(configured)
    rows, learnt = read_rows(toy), json.loads((folder / "run.json").read_text())["learnt_from"]
    assert (learnt["n"], len(learnt["images"])) == (4, 4)
    made = {
        path.relative_to(folder / "masks").as_posix().split("/", 1)[1] for path in (folder / "masks").rglob("*.png")
    }
    needed = {*learnt["images"], *(rows.images[i] for i in rows.split_indices("val"))}
    assert made == {f"{name}.png" for name in needed}


def test_validation_images_are_decoded_once_whatever_the_chunk_size(toy, monkeypatch):
    learner = RobustViT(small_vit(classes=2), lambda rows: rows, config(toy, batch=4))
    rows, accelerator, decoded = read_rows(toy), make_accelerator("cpu"), []
    expects = replace(learner.vit.config.input, size=(32, 32))
    monkeypatch.setattr(batches, "decode", lambda *given, **more: (decoded.append(1), decode(*given, **more))[1])
    found = []
    for at_once in (1, 7, 64):
        monkeypatch.setattr("sightline.methods.robustvit.images_per_pass", lambda *_, count=at_once: count)
        exam = inference_batches(rows, rows.split_indices("val"), expects, accelerator, batch=24, workers=0, masks=True)
        found.append(learner.validate(exam, TrainContext(rows, None, accelerator, expects), "relevance"))
    assert len(decoded) == 3 * len(rows.split_indices("val"))
    assert set(found[0]) == {"balanced", "accuracy", "relevance"}
    assert found[1:] == [pytest.approx(found[0], rel=1e-6)] * 2
    whole = batches.Decoder(rows, Preprocess.of(expects), masks=True)(rows.split_indices("val"))
    losses = learner.losses(whole.images.float() / 255, whole.labels, whole.masks)["loss"]
    assert found[0]["relevance"] == pytest.approx(1 - losses.mean().item(), rel=1e-5)


def test_masks_of_either_polarity_train_the_same(toy, runs, tmp_path):
    dark = masks_with(toy, tmp_path / "dark", ImageOps.invert)
    common = {"init_from": str(runs / "erm-0"), "masks_per_class": 4, "batch": 8, "augment": "light"}
    one = train(config(toy, tmp_path / "bright", **common))
    other = train(config(toy, tmp_path / "turned", masks=dark, mask_marks="background", **common))
    assert (one / "predictions/test.csv").read_bytes() == (other / "predictions/test.csv").read_bytes()


def test_an_interrupted_run_ends_with_the_same_bits(toy, runs, tmp_path):
    configured = config(
        toy, tmp_path / "whole", init_from=str(runs / "erm-0"), masks_per_class=8, batch=8, ema=0.9, epochs=2
    )
    whole = train(configured)
    broken = replace(configured, out=tmp_path / "broken", save_minutes=0.0)
    with stopped_after(3), pytest.raises(Stop):
        train(broken)
    resumed = train(replace(broken, save_minutes=10.0, resume=True))
    for name in ("best.safetensors", "last.safetensors", "log.jsonl"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
