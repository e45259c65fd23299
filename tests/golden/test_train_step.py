"""One whole step of iFAM's published training, by the method that users train: losses and every gradient."""

import json
from pathlib import Path

import pytest
import torch

from sightline.config import Ifam, Shaping
from sightline.data.augment import Affine
from sightline.methods.base import PartSettings, RandomDraws
from sightline.methods.ifam import IFam
from sightline.methods.import_ import PUBLISHED_NAMES
from sightline.train import make_optimizer, set_learning_rate
from sightline.training.trainable import StepInfo
from sightline.what.masked import MaskedViT
from sightline.where.parts import soft_keep

from ..conftest import shared
from .conftest import CLOSE, LOSS, golden, gradients_agree

PUBLISHED = Ifam(Path("data"), preset="published", head_lr_factor=1e4, prototype_lr_factor=1e3, lr=2.828e-6, epochs=90)


@pytest.fixture
def model(stage1, stage2) -> IFam:
    return IFam(stage1, MaskedViT(stage2), PartSettings.of(PUBLISHED)).train()


@pytest.fixture
def expected():
    return golden("train_step.npz")


@pytest.fixture
def draws(expected) -> RandomDraws:
    angle, x, y, scale, *_ = expected["transform"].tolist()
    return RandomDraws(
        noise=expected["gumbel_maps"],
        noise_moved=expected["gumbel_maps_warped"],
        noise_mask=expected["gumbel_mask"],
        affine=Affine(angle, x, y, scale),
        keep_parts=expected["keep_classifier"],
        keep_masked=expected["keep_mask"],
    )


def by_official_names(model: IFam) -> dict[str, torch.nn.Parameter]:
    named = {f"stage_2.{name}": p for name, p in model.what.vit.named_parameters()}
    named |= {f"stage_1.{name}": p for name, p in model.where.vit.named_parameters()}
    return named | {f"stage_1.{theirs}": model.where.get_parameter(ours) for theirs, ours in PUBLISHED_NAMES.items()}


def test_intermediate_values_of_the_step(model, inputs, draws, expected):
    images, labels = inputs["inputs.images"], inputs["inputs.targets"]
    parts, _ = model.discovery(images, labels, draws)
    embeddings = model.where.embed(parts)
    torch.testing.assert_close(parts.probabilities, expected["maps"], **CLOSE)
    torch.testing.assert_close(embeddings, expected["modulated"], **CLOSE)
    scores = model.where.part_scores(embeddings, draws.keep_parts)
    torch.testing.assert_close(scores, expected["part_scores"], **CLOSE)
    keep = model.stage2_input(images, parts, draws)[1]
    assert keep.dtype == torch.bool
    assert torch.equal(torch.stack([keep, ~keep], 1).float(), expected["mask_hard2"])
    weights = soft_keep(model.where.scores(parts.logits, draws.noise_mask), draws.keep_masked)
    torch.testing.assert_close(weights, expected["mask_soft2"][:, 0], **CLOSE)
    torch.testing.assert_close(model.what.vit(images, keep).logits, expected["stage2_logits"], **CLOSE)


def test_every_loss_and_gradient(model, inputs, draws, expected):
    losses = model.losses(inputs["inputs.images"], inputs["inputs.targets"], draws)
    total = torch.stack(list(losses.values())).sum()
    for theirs, value in {
        "ce_stage1": losses["parts"],
        "ce_stage2": losses["classification"],
        "total_variation": losses["total_variation"],
        "entropy": losses["entropy"],
        "equivariance": losses["equivariance"],
        "orthogonality_transposed": losses["orthogonality"],
        "presence_fg": losses["presence"],
        "presence_bg_unweighted": losses["background"] / 2,
        "total_published": total,
    }.items():
        torch.testing.assert_close(value, expected[f"loss.{theirs}"], **LOSS, msg=lambda m, name=theirs: f"{name}: {m}")
    assert len(losses) == 8

    total.backward()
    ours = {name: p for name, p in by_official_names(model).items() if p.requires_grad}
    gradients = {name.removeprefix("grad."): g for name, g in expected.items() if name.startswith("grad.")}
    assert set(ours) == set(gradients)
    for name, gradient in gradients.items():
        assert gradients_agree(ours[name].grad, gradient.view_as(ours[name])), name
    norm = torch.nn.utils.get_total_norm([p.grad for p in ours.values()])
    torch.testing.assert_close(norm.double(), expected["grad_global_norm"], rtol=1e-5, atol=0)


def test_the_transformed_images_are_as_published(stage1, expected):
    warped = golden("losses.npz")["warp.images_warped"]
    probabilities = stage1.discover(warped, noise=expected["gumbel_maps_warped"]).probabilities
    torch.testing.assert_close(probabilities, expected["maps_warped"], **CLOSE)


def test_parts_are_decorrelated_by_default(stage1, stage2, inputs, draws, expected):
    all_grids_alike = Shaping(total_variation_grid=0)
    how = PartSettings.of(Ifam(Path("data"), selector="learned", share_noise=False, shaping=all_grids_alike))
    ours = IFam(stage1, MaskedViT(stage2), how).losses(inputs["inputs.images"], inputs["inputs.targets"], draws)
    torch.testing.assert_close(ours["orthogonality"], expected["loss.orthogonality_parts"], **LOSS)
    total = torch.stack(list(ours.values())).sum()
    torch.testing.assert_close(total, expected["loss.total_with_parts_orthogonality"], **LOSS)


# ---- the optimiser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def groups() -> dict:
    return json.loads(shared("golden", "optimizer_groups.json").read_text())


def test_rates_and_decay_of_every_parameter_are_the_published_ones(model, groups):
    names = {id(p): name for name, p in by_official_names(model).items()}
    ours = {
        names[id(p)]: (group.lr, group.decay)
        for group in model.parameter_groups(PUBLISHED.head_lr_factor)
        for p in group.parameters
    }
    theirs = {n: (p["lr_multiplier"], p["weight_decay"]) for n, p in groups["parameters"].items() if p["trainable"]}
    assert ours == theirs


def test_the_schedule_and_the_decay_are_the_published_ones(model, groups):
    recipe = groups["recipe"]
    steps = recipe["dataset_size"] // recipe["total_batch"]
    batches = [None] * steps
    optimizer = make_optimizer(model, PUBLISHED, Sized(batches, recipe["total_batch"]), torch.device("cpu"))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == tuple(recipe["betas"])
    assert optimizer.defaults["eps"] == recipe["eps"]
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert sorted(decays) == pytest.approx([0.0, groups["effective_weight_decay"]])
    for epoch in range(recipe["epochs"]):
        set_learning_rate(optimizer, StepInfo(0, epoch, 0, recipe["epochs"], steps, torch.arange(0)), warmup=0.0)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert min(rates) == pytest.approx(groups["lr_per_epoch_backbone"][epoch], rel=1e-9)
        assert max(rates) == pytest.approx(groups["lr_per_epoch_heads"][epoch], rel=1e-9)


class Sized(list):
    """As many batches as an epoch has, and how large they are."""

    def __init__(self, batches: list, batch: int):
        super().__init__(batches)
        self.batch = batch
