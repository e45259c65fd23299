"""Part discovery against numbers that the published iFAM code produced."""

import json

import pytest
import torch

from sightline.methods.base import backbone_groups
from sightline.methods.import_ import PUBLISHED_NAMES
from sightline.where.corrections import Correction, PartAssignment
from sightline.where.parts import freeze, hard_keep, pool, soft_keep, straight_through

from ..conftest import shared
from .conftest import CLOSE, golden, gradients_agree

OUR_NAMES = {f"stage_1.{theirs}": ours for theirs, ours in PUBLISHED_NAMES.items()}


def our_name(theirs: str) -> str:
    return OUR_NAMES.get(theirs, f"vit.{theirs.removeprefix('stage_1.')}")


@pytest.mark.parametrize("case", ["clean", "noisy"])
@torch.no_grad()
def test_maps_embeddings_scores_and_predictions(stage1, stage2, inputs, case):
    expected = {k.removeprefix(f"{case}."): v for k, v in golden("stage1.npz").items() if k.startswith(case)}
    images = inputs["inputs.images"]
    parts = stage1.discover(images, noise=expected.get("gumbel_maps"))
    embeddings = stage1.embed(parts)
    for name, ours in {
        "X": parts.features,
        "maps": parts.probabilities,
        "pooled": pool(parts.features, parts.probabilities),
        "modulated": embeddings,
        "part_scores": stage1.part_scores(embeddings),
        "class_logits": stage1.class_logits(embeddings),
    }.items():
        torch.testing.assert_close(ours, expected[name], **CLOSE, msg=lambda m, name=name: f"{name}: {m}")
    for name, ours in {"part_logits": parts.logits, "inner_products": stage1.inner_products(parts.features)}.items():
        torch.testing.assert_close(ours, expected[name], atol=1e-4, rtol=0)

    scores = stage1.scores(parts.logits, expected.get("gumbel_mask"))
    keep = hard_keep(scores)
    assert torch.equal(torch.stack([keep, ~keep], 1).float(), expected["mask_hard"])
    torch.testing.assert_close(soft_keep(scores), expected["mask_soft"][:, 0], **CLOSE)
    out = stage2(images, keep)
    torch.testing.assert_close(out.cls, expected["stage2_cls"], **CLOSE)
    torch.testing.assert_close(out.logits, expected["stage2_logits"], **CLOSE)


def without(scores: torch.Tensor, dropped: tuple[int, ...]) -> torch.Tensor:
    return Correction(drop=dropped).keep(PartAssignment(scores, torch.zeros_like(scores[:, 0])))


@pytest.mark.parametrize("case", ["rand", "maps"])
@pytest.mark.parametrize("removed", [(1,), (0, 2), (3,), (0, 1, 2, 3)])
def test_removed_parts_become_background(case, removed):
    expected = golden("masks.npz")
    theirs = expected[f"{case}.mask_removed_{'_'.join(map(str, removed))}"]
    assert torch.equal(without(expected[f"{case}.logits"], removed), theirs)
    assert torch.equal(without(expected[f"{case}.Y"], removed), theirs)


@pytest.mark.parametrize("removed", [(1,), (0, 2)])
@torch.no_grad()
def test_predictions_without_some_parts(stage1, stage2, inputs, removed):
    expected, name = golden("masks.npz"), "_".join(map(str, removed))
    images = inputs["inputs.images"]
    keep = without(stage1.discover(images).scores, removed)
    assert torch.equal(keep, expected[f"e2e.mask_removed_{name}"])
    torch.testing.assert_close(stage2(images, keep).logits, expected[f"e2e.stage2_logits_removed_{name}"], **CLOSE)


def test_masks_with_dropout_noise_and_a_single_part():
    expected = golden("masks.npz")
    rand = expected["rand.logits"]
    torch.testing.assert_close(rand.softmax(dim=1), expected["rand.Y"], **CLOSE)
    for case, scores, keep_parts in (
        ("rand", rand, None),
        ("maps", expected["maps.logits"], None),
        ("dropout", rand, expected["dropout.keep"]),
        ("noise", rand + expected["noise.gumbel"], None),
        ("k1", expected["k1.logits"], None),
    ):
        keep, theirs = hard_keep(scores, keep_parts), expected[f"{case}.mask"]
        assert torch.equal(keep, theirs), case
        if keep_parts is None:
            assert torch.equal(without(scores, ()), theirs), case
        if f"{case}.hard2" in expected:
            assert torch.equal(torch.stack([keep, ~keep], 1).float(), expected[f"{case}.hard2"]), case
        torch.testing.assert_close(soft_keep(scores, keep_parts), expected[f"{case}.soft2"][:, 0], **CLOSE)


@pytest.mark.parametrize("case", ["clean", "noisy", "dropout", "noisy_dropout"])
def test_straight_through(case):
    expected = golden("straight_through.npz")
    keep_parts = expected["keep"] if "dropout" in case else None
    fg, bg = expected[f"{case}.upstream_fg"], expected[f"{case}.upstream_bg"]

    def gradient(mask, upstream, forward):
        logits = expected["logits"].clone().requires_grad_()
        made = mask(logits + expected["gumbel"] if "noisy" in case else logits, keep_parts)
        torch.testing.assert_close(made, forward, **(CLOSE if mask is soft_keep else {"atol": 0, "rtol": 0}))
        (made * upstream).sum().backward()
        return logits.grad

    hard, soft = expected[f"{case}.hard2"][:, 0], expected[f"{case}.soft2"][:, 0]
    name = f"{case}.grad_logits_from"
    assert gradients_agree(gradient(straight_through, fg, hard), expected[f"{name}_hard_fg"])
    assert gradients_agree(gradient(straight_through, fg + bg, hard), expected[f"{name}_hard_both"])
    assert gradients_agree(gradient(soft_keep, fg, soft), expected[f"{name}_soft_fg_max"])


def test_learning_rates_decay_and_frozen_parameters(stage1):
    facts = json.loads(shared("golden", "optimizer_groups.json").read_text())
    published, all_frozen = facts["parameters"], facts["frozen_under_extra_flags"]["freeze_params_stage_1"]
    groups = [*backbone_groups(stage1.vit, 1e4), *stage1.part_groups(head_lr_factor=1e4, prototype_lr_factor=1e3)]
    ours = {id(p): (group.lr, group.decay) for group in groups for p in group.parameters}
    assert sum(len(group.parameters) for group in groups) == len(ours)
    named = dict(stage1.named_parameters())
    theirs = {our_name(name): facts for name, facts in published.items() if name.startswith("stage_1.")}
    assert set(named) == set(theirs)
    for name, facts in theirs.items():
        assert named[name].requires_grad == facts["trainable"], name
        if facts["trainable"]:
            assert ours[id(named[name])] == (facts["lr_multiplier"], facts["weight_decay"]), name
        else:
            assert id(named[name]) not in ours, name
    freeze(stage1.vit, tokens=True)
    assert {name for name, p in named.items() if not p.requires_grad} == {our_name(name) for name in all_frozen}
