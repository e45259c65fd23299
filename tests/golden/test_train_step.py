"""One whole step of iFAM's published training: maps, losses and the gradient of every parameter."""

import torch
import torch.nn.functional as F

from sightline.config import Shaping
from sightline.data.augment import Affine
from sightline.where.part_losses import shaping_losses
from sightline.where.parts import OFFICIAL, hard_keep, soft_keep

from .conftest import CLOSE, LOSS, golden, gradients_agree


def published_step(stage1, stage2, images, labels, draws):
    """What the published trainer does: two draws of noise, hard masks without a gradient, channels decorrelated."""
    angle, x, y, scale, *_ = draws["transform"].tolist()
    parts = stage1.discover(images, noise=draws["gumbel_maps"])
    moved = stage1.discover_moved(images, Affine(angle, x, y, scale), noise=draws["gumbel_maps_warped"])
    embeddings = stage1.embed(parts)
    scores = stage1.scores(parts.logits, draws["gumbel_mask"])
    keep = hard_keep(scores, draws["keep_mask"])
    logits = stage2(images, keep, hide="mask").logits
    losses = shaping_losses(parts, embeddings, moved, Shaping(orthogonal="channels"))
    losses["stage1"] = F.cross_entropy(stage1.class_logits(embeddings, draws["keep_classifier"]), labels)
    losses["stage2"] = F.cross_entropy(logits, labels)
    return parts, moved, embeddings, scores, keep, logits, losses


def test_every_value_and_gradient(stage1, stage2, inputs):
    expected = golden("train_step.npz")
    images, labels = inputs["inputs.images"], inputs["inputs.targets"]
    parts, _, embeddings, scores, keep, logits, losses = published_step(
        stage1.train(), stage2.train(), images, labels, expected
    )
    torch.testing.assert_close(parts.shares, expected["maps"], **CLOSE)
    torch.testing.assert_close(embeddings, expected["modulated"], **CLOSE)
    ours = stage1.part_scores(embeddings, expected["keep_classifier"])
    torch.testing.assert_close(ours, expected["part_scores"], **CLOSE)
    assert torch.equal(torch.stack([keep, ~keep], 1).float(), expected["mask_hard2"])
    torch.testing.assert_close(soft_keep(scores, expected["keep_mask"]), expected["mask_soft2"][:, 0], **CLOSE)
    torch.testing.assert_close(logits, expected["stage2_logits"], **CLOSE)

    for theirs, value in {
        "ce_stage1": losses["stage1"],
        "ce_stage2": losses["stage2"],
        "total_variation": losses["total_variation"],
        "entropy": losses["entropy"],
        "equivariance": losses["equivariance"],
        "orthogonality_transposed": losses["orthogonality"],
        "presence_fg": losses["presence"],
        "presence_bg_unweighted": losses["background"] / 2,
        "total_published": sum(losses.values()),
    }.items():
        torch.testing.assert_close(value, expected[f"loss.{theirs}"], **LOSS, msg=lambda m, name=theirs: f"{name}: {m}")

    sum(losses.values()).backward()
    ours = {f"stage_2.{name}": p for name, p in stage2.named_parameters()}
    ours |= {f"stage_1.{name}": p for name, p in stage1.vit.named_parameters() if p.requires_grad}
    ours |= {f"stage_1.{theirs}": stage1.get_parameter(name) for theirs, name in OFFICIAL.items()}
    gradients = {name.removeprefix("grad."): g for name, g in expected.items() if name.startswith("grad.")}
    assert set(ours) == set(gradients)
    for name, gradient in gradients.items():
        assert gradients_agree(ours[name].grad, gradient.view_as(ours[name])), name
    norm = torch.nn.utils.get_total_norm([p.grad for p in ours.values()])
    torch.testing.assert_close(norm.double(), expected["grad_global_norm"], rtol=1e-5, atol=0)


def test_the_moved_images_are_seen_as_published(stage1, inputs):
    expected, losses = golden("train_step.npz"), golden("losses.npz")
    warped = stage1.discover(losses["warp.images_warped"], noise=expected["gumbel_maps_warped"]).shares
    torch.testing.assert_close(warped, expected["maps_warped"], **CLOSE)


def test_parts_are_decorrelated_by_default(stage1, stage2, inputs):
    expected = golden("train_step.npz")
    parts, moved, embeddings, *_ = published_step(
        stage1, stage2, inputs["inputs.images"], inputs["inputs.targets"], expected
    )
    ours = shaping_losses(parts, embeddings, moved, Shaping())
    torch.testing.assert_close(ours["orthogonality"], expected["loss.orthogonality_parts"], **LOSS)
    other = expected["loss.total_with_parts_orthogonality"] - expected["loss.ce_stage1"] - expected["loss.ce_stage2"]
    torch.testing.assert_close(sum(ours.values()), other, **LOSS)
