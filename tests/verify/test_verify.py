"""The proof must hold for methods that are blind outside their sight, and fail for all others."""

import importlib
import json

import pytest
import torch
from torch import nn

import sightline
from sightline.methods.pair import Pair
from sightline.sight import Method, Prediction, Sight, cells_to_pixels
from sightline.verify.verify import fingerprint, verify
from sightline.vit.model import Input
from sightline.what.masked import MaskedViT
from sightline.what.pool import LateMaskedViT
from sightline.where.attention import AttentionSight

from ..conftest import small_vit


@pytest.fixture
def images(generator):
    return torch.rand(5, 3, 32, 32, generator=generator)


@pytest.fixture
def patches(generator):
    return Sight(torch.rand(5, 4, 4, generator=generator) < 0.5)


@pytest.fixture
def pixels(generator):
    whole = torch.rand(5, 4, 4, generator=generator) < 0.6
    inside = torch.rand(5, 32, 32, generator=generator) < 0.5
    return Sight.of_pixels(inside & cells_to_pixels(whole, (32, 32)), (4, 4))


class Dummy(Method):
    """A method in ten lines: its sight is the left half, its logits are the mean colour."""

    blind = True

    def look(self, images):
        keep = torch.zeros(len(images), 2, 2, dtype=torch.bool)
        keep[:, :, 0] = True
        return Sight(keep)

    def judge(self, images, sight):
        visible = sight.visible(images.shape[-2:])[:, None]
        return Prediction(torch.where(visible, images, 0).sum(dim=(2, 3)) / visible.sum(dim=(2, 3)), sight)

    def maps(self, images):
        return {"brightness": images.mean(dim=1)}


class Cheat(Dummy):
    """Blind except for a millionth of the mean colour."""

    def judge(self, images, sight):
        honest = super().judge(images, sight)
        return Prediction(honest.logits + 1e-6 * images.mean(dim=(2, 3)), sight)


def test_a_ten_line_method_is_proved(images):
    certificate = verify(Dummy(), images)
    assert certificate.verdict == "blind"
    assert certificate.largest_gradient == 0
    assert certificate.end_to_end["redrawn_with"]["grey"] == {
        "n": 5, "prediction_changed": 0, "sight_changed": 0, "sight_iou": 1.0,
        "prediction_changed_interval": [0.0, 0.4345], "sight_changed_interval": [0.0, 0.4345],
    }  # fmt: skip


def test_the_smallest_cheat_is_found(images):
    certificate = verify(Cheat(), images)
    assert certificate.verdict == "leaks"
    assert certificate.largest_gradient > 0


def test_a_leak_into_the_kept_tokens_alone_is_found(images):
    """The logits are honest; the tokens hold the mean colour of the whole image, without a gradient to show for it."""

    class LeakyTokens(Dummy):
        def judge(self, images, sight):
            honest = super().judge(images, sight)
            return Prediction(honest.logits, sight, tokens=images.detach().mean(dim=(2, 3))[:, None])

    certificate = verify(LeakyTokens(), images, draws=1)
    assert certificate.verdict == "leaks"
    assert certificate.largest_gradient == 0
    assert all(row.changed == row.trials > 0 for row in certificate.tried)


def test_a_gradient_at_hidden_pixels_is_a_leak_even_where_no_redraw_changes_a_bit(images):
    class GradientOnly(Dummy):
        def judge(self, images, sight):
            leak = images.nan_to_num(0.0, 0.0, 0.0).mean(dim=(2, 3))
            return Prediction(super().judge(images, sight).logits + (leak - leak.detach()), sight)

    certificate = verify(GradientOnly(), images, draws=1)
    assert {row.changed for row in certificate.tried} == {0}
    assert certificate.largest_gradient > 0
    assert certificate.verdict == "leaks"


def test_gradients_of_the_kept_tokens_count_too(images):
    class TokensOnly(Dummy):
        def judge(self, images, sight):
            leak = images.nan_to_num(0.0, 0.0, 0.0).mean(dim=(2, 3))
            return Prediction(super().judge(images, sight).logits, sight, tokens=(leak - leak.detach())[:, None])

    certificate = verify(TokensOnly(), images, draws=1)
    assert certificate.largest_gradient > 0
    assert certificate.verdict == "leaks"


def test_the_largest_gradient_is_that_of_all_hidden_pixels_and_all_batches(images):
    """A single pixel of the first image has a gradient: not the first pixel that is hidden, nor in the last batch."""
    images[0, :, 0, 0] = 1.0

    class OnePixel(Dummy):
        def judge(self, images, sight):
            leak = images[:, :, -1, -1].nan_to_num(0.0, 0.0, 0.0) * (images[:, :, 0, 0] == 1)
            return Prediction(super().judge(images, sight).logits + (leak - leak.detach()), sight)

    certificate = verify(OnePixel(), images, draws=1, batch=1)
    assert {row.changed for row in certificate.tried} == {0}
    assert certificate.largest_gradient > 0
    assert certificate.verdict == "leaks"


def test_gradient_ascent_moves_all_hidden_pixels_one_way_as_noise_does_not(images):
    """Ten steps of 0.1 on the hidden half move the mean colour by 10 · 0.1 · ½; noise would average out to 0.01."""

    class MeanColour(Dummy):
        def judge(self, images, sight):
            return Prediction(images.mean(dim=(2, 3)), sight)

    certificate = verify(MeanColour(), images, draws=1, ascent_steps=10)
    (ascent,) = (row for row in certificate.tried if row.kind == "gradient ascent")
    assert ascent.largest_change == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("hide", ["removal", "mask"])
@pytest.mark.parametrize("level", ["patches", "pixels"])
def test_early_masking_is_proved(images, hide, level, request):
    certificate = verify(MaskedViT(small_vit(), hide), images, request.getfixturevalue(level), draws=2)
    assert certificate.verdict == "blind"
    assert certificate.sentence.startswith("Blind outside its sight")
    assert {row.level for row in certificate.tried} == {"patches", level}
    assert {row.changed for row in certificate.tried} == {0}
    assert certificate.largest_gradient == 0
    assert certificate.control == {"trials": 5, "changed": 5}
    assert certificate.conditions["hiding"] == [hide]
    assert certificate.end_to_end is None


def test_every_kind_of_redraw_is_tried_as_often_as_said(images, pixels):
    certificate = verify(MaskedViT(small_vit()), images, pixels, draws=3, ascent_steps=4, batch=2)
    per_level = {
        "noise of scale 0.01": 15, "noise of scale 0.1": 15, "noise of scale 1": 15, "noise of scale 100": 15,
        "NaN": 5, "+infinity": 5, "-infinity": 5, "another image's pixels": 4, "mirrored pixels": 3,
        "gradient ascent": 20,
    }  # fmt: skip
    for level in ("patches", "pixels"):
        assert {row.kind: row.trials for row in certificate.tried if row.level == level} == per_level
    assert certificate.trials == 2 * sum(per_level.values())


@pytest.mark.parametrize(("level", "place"), [("patches", "vit.blocks.0.attn"), ("pixels", "vit")])
def test_late_masking_fails_and_the_module_is_named(images, level, place, request):
    certificate = verify(LateMaskedViT(small_vit(), 5), images, request.getfixturevalue(level), draws=1)
    assert certificate.verdict == "leaks"
    assert certificate.leak["module"] == place
    assert f"They enter at {place} (" in certificate.sentence
    assert certificate.largest_gradient > 0
    assert all(row.changed == row.trials for row in certificate.tried)


def test_a_patch_mask_does_not_pass_for_a_pixel_mask(images, pixels):
    class WholePatches(MaskedViT):
        def judge(self, images, sight):
            return super().judge(images, Sight(sight.keep))

    certificate = verify(WholePatches(small_vit()), images, pixels, draws=1)
    by_level = {level: sum(r.changed for r in certificate.tried if r.level == level) for level in ("patches", "pixels")}
    assert certificate.verdict == "leaks"
    assert by_level["patches"] == 0
    assert by_level["pixels"] > 0


def test_weighted_hiding_is_refused(images, patches):
    certificate = verify(MaskedViT(small_vit(), "weighted"), images, patches, draws=1)
    assert certificate.verdict == "refused"
    assert "hides by weighting" in certificate.sentence


def test_what_cannot_be_proved_is_refused(images, patches):
    vit = small_vit()
    assert "hides nothing" in verify(MaskedViT(vit), images, Sight.everything(images)).sentence

    class Constant(Dummy):
        def judge(self, images, sight):
            return Prediction(torch.ones(len(images), 2), sight)

    assert "visible pixels do not change the output" in verify(Constant(), images, patches).sentence

    class Moody(Dummy):
        def judge(self, images, sight):
            honest = super().judge(images, sight)
            return Prediction(honest.logits + torch.rand(1), sight)

    assert "not deterministic on the same images" in verify(Moody(), images, patches).sentence

    class Broken(Dummy):
        def judge(self, images, sight):
            return Prediction(super().judge(images, sight).logits * torch.nan, sight)

    assert "the logits are not finite" in verify(Broken(), images, patches).sentence
    with pytest.raises(ValueError, match="give verify the sight"):
        verify(MaskedViT(vit), images)


def test_images_that_hide_nothing_are_no_trials(images):
    keep = torch.ones(5, 4, 4, dtype=torch.bool)
    keep[0, 0, 0] = False
    certificate = verify(MaskedViT(small_vit()), images, Sight(keep), draws=1, ascent_steps=1)
    assert {row.trials for row in certificate.tried} == {1}
    assert certificate.verdict == "blind"


def test_an_empty_sight_on_all_images_is_refused(images):
    certificate = verify(MaskedViT(small_vit()), images, Sight(torch.zeros(5, 4, 4, dtype=torch.bool)), draws=1)
    assert certificate.verdict == "refused"
    assert "nothing is visible in any of these images" in certificate.sentence
    assert certificate.control == {"trials": 0, "changed": 0}


def test_one_empty_sight_among_others_is_allowed(images):
    keep = torch.zeros(5, 4, 4, dtype=torch.bool)
    keep[1:, 1:3] = True
    assert verify(MaskedViT(small_vit()), images, Sight(keep), draws=1).verdict == "blind"


def test_bfloat16(images, pixels):
    what = MaskedViT(small_vit()).to(torch.bfloat16)
    certificate = verify(what, images.to(torch.bfloat16), pixels, draws=1)
    assert certificate.verdict == "blind"
    assert certificate.conditions["weights_in"] == ["bfloat16"]
    assert certificate.conditions["predictions_in"] == ["bfloat16"]


def test_a_selector_is_followed_end_to_end(images):
    vit = small_vit()
    certificate = verify(Pair(AttentionSight(vit, share=0.3), MaskedViT(vit)), images, draws=1)
    assert certificate.verdict == "blind"
    rows = certificate.end_to_end["redrawn_with"]
    assert set(rows) == {"uniform noise", "grey", "another image's pixels"}
    assert any(row["sight_changed"] for row in rows.values()), "attention sees the whole image"
    for row in rows.values():
        low, high = row["sight_changed_interval"]
        assert low <= row["sight_changed"] / row["n"] <= high
        assert 0 <= row["sight_iou"] <= 1


def test_selector_and_predictor_may_have_other_patches(images):
    method = Pair(AttentionSight(small_vit(patch=16, grid=(2, 2)), share=0.5), MaskedViT(small_vit()))
    assert verify(method, images, draws=1).verdict == "blind"


def test_certificates_are_reproducible_json_and_tied_to_the_weights(images, patches, tmp_path):
    what = MaskedViT(small_vit())
    one, two = (verify(what, images, patches, draws=1, seed=3).to_json() for _ in range(2))
    assert one == two
    verify(what, images, patches, draws=1, seed=3).save(tmp_path / "certificate.json")
    content = json.loads((tmp_path / "certificate.json").read_text(encoding="utf-8"))
    assert content == json.loads(one)
    assert content["conditions"]["batch_shapes"] == [[5, 3, 32, 32]]
    with torch.no_grad():
        what.vit.blocks[0].mlp.fc1.weight[0, 0] += 1e-3
    other = verify(what, images, patches, draws=1).model
    assert other["weights_sha256"] != content["model"]["weights_sha256"]
    assert other["architecture_sha256"] == content["model"]["architecture_sha256"]


@pytest.mark.parametrize(
    "changes",
    [{"heads": 8}, {"mlp": "quick_gelu"}, {"input": Input(mean=(0.5, 0.5, 0.5))}, {"positions": "bicubic_offset"}],
)  # fmt: skip
def test_another_architecture_has_another_fingerprint(changes):
    one, two = fingerprint(MaskedViT(small_vit())), fingerprint(MaskedViT(small_vit(**changes)))
    assert one["architecture_sha256"] != two["architecture_sha256"]
    assert fingerprint(MaskedViT(small_vit(), "mask"))["architecture_sha256"] != one["architecture_sha256"]


def test_batch_norms_counters_are_hashed_too():
    class Counting(MaskedViT):
        def __init__(self, vit):
            super().__init__(vit)
            self.norm = nn.BatchNorm1d(4)

    one, two = Counting(small_vit()), Counting(small_vit())
    two.norm.num_batches_tracked += 1
    assert fingerprint(one)["weights_sha256"] != fingerprint(two)["weights_sha256"]


def test_a_method_without_a_gradient_gets_no_ascent_trials(images, patches):
    class Detached(Dummy):
        @torch.no_grad()
        def judge(self, images, sight):
            return super().judge(images, sight)

    certificate = verify(Detached(), images, patches, draws=1)
    assert certificate.verdict == "blind"
    assert certificate.largest_gradient is None
    assert "gradient ascent" not in {row.kind for row in certificate.tried}


def test_a_gradient_that_is_not_finite_is_refused(images, patches):
    class Odd(Dummy):
        def judge(self, images, sight):
            honest = super().judge(images, sight)
            nothing = images.mean() - images.mean().detach()  # 0, and with sqrt a gradient that is not a number
            return Prediction(honest.logits + 0 * nothing.abs().sqrt(), sight)

    assert "gradient at hidden pixels is not finite" in verify(Odd(), images, patches, draws=1).sentence


def test_images_that_are_all_the_same_are_no_swaps(patches):
    same = torch.rand(1, 3, 32, 32).expand(5, -1, -1, -1).contiguous()
    certificate = verify(MaskedViT(small_vit()), same, patches, draws=2)
    assert {row.kind: row.trials for row in certificate.tried}["another image's pixels"] == 0


def test_training_mode_is_restored(images, patches):
    what = MaskedViT(small_vit()).train()
    what.vit.blocks[0].eval()
    verify(what, images, patches, draws=1)
    assert what.training
    assert what.vit.blocks[1].training
    assert not what.vit.blocks[0].training


def test_a_module_with_noise_is_refused_not_raised(images, patches):
    class Noisy(MaskedViT):
        def judge(self, images, sight):
            out = super().judge(images, sight)
            return Prediction(out.logits + torch.rand(1), sight, out.tokens)

    certificate = verify(Noisy(small_vit()), images, patches, draws=1)
    assert certificate.verdict == "refused"
    assert "not deterministic on the same images" in certificate.sentence


def test_weighted_hiding_barely_changes_the_output_and_is_refused_all_the_same(images, patches):
    """At a weight of 1e-10 hidden patches change the last bits at most: too little to rely on a trial."""
    certificate = verify(MaskedViT(small_vit(), "weighted"), images, patches, draws=1)
    assert certificate.verdict == "refused"
    assert max(row.largest_change or 0.0 for row in certificate.tried if "100" not in row.kind) < 1e-3


def test_leaks_are_valid_json_too(images, patches):
    text = verify(LateMaskedViT(small_vit(), 5), images, patches, draws=1).to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_verify_switches_to_evaluation_mode(images, patches):
    class Noisy(MaskedViT):
        def __init__(self, vit):
            super().__init__(vit)
            self.dropout = nn.Dropout(0.5)

        def judge(self, images, sight):
            out = super().judge(images, sight)
            return Prediction(self.dropout(out.logits), sight, out.tokens)

    assert verify(Noisy(small_vit()).train(), images, patches, draws=1).verdict == "blind"


def test_sightline_verify_is_the_function():
    importlib.import_module("sightline.verify.verify")  # the file of the same name must not shadow it
    assert callable(sightline.verify)
    assert sightline.Sight is Sight
