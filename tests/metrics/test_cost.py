"""Compute cost of predictions, for the fraction of the image that is really seen."""

import json
from pathlib import Path

import pytest
import torch

from sightline.config import Ifam, Pdiscoformer
from sightline.datasets.toy import write_toy
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.erm import Classifier
from sightline.methods.given_mask import GivenMask, MaskSettings
from sightline.methods.ifam import IFam, make_predictor
from sightline.methods.pair import Pair
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.metrics.cost import Cost, measure_cost
from sightline.metrics.inference import sight_for_prediction
from sightline.sight import Sight
from sightline.vit.model import ViT, ViTConfig
from sightline.what.masked import MaskedViT
from sightline.what.pool import LateMaskedViT

from ..commands import QUICK, SMALL, typed
from ..conftest import small_vit

SMALL_16 = ViTConfig(classes=1000)  # ViT-S/16 at 224


@pytest.fixture(scope="module")
def vit() -> ViT:
    return ViT(SMALL_16).eval()


@pytest.fixture(scope="module")
def images():
    return torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))


class Corner:
    """A sight in a corner, at no cost."""

    def __init__(self, side: int):
        self.side = side

    def look(self, images):
        keep = torch.zeros(len(images), 14, 14, dtype=torch.bool)
        keep[:, : self.side, : self.side] = True
        return Sight(keep)

    def maps(self, images):
        return {}


def by_hand(config: ViTConfig, patches: int) -> float:
    """Two operations per multiplication with addition: the embedding, and 12 D² + 2 T D per token and block."""
    D, T = config.width, patches + 1
    block = T * (12 * D**2 + 2 * T * D)
    return 2 * (patches * 3 * config.patch**2 * D + config.depth * block + D * config.classes) / 1e9


def test_a_dense_vit_has_the_published_cost(vit, images):
    found = measure_cost(Classifier(vit), images)
    assert found.gflops == pytest.approx(9.2, rel=0.01)
    assert found.gflops == pytest.approx(by_hand(SMALL_16, 196), rel=1e-3)
    assert (found.coverage, found.n) == (1.0, 1)
    assert found.sentence == "9.2 GFLOPs per image, 100 % of it visible (mean of 1 image)."


def test_a_quarter_of_the_patches_costs_less_than_a_quarter(vit, images):
    found = measure_cost(Pair(Corner(7), MaskedViT(vit)), images)
    assert found.coverage == 0.25
    assert found.gflops == pytest.approx(by_hand(SMALL_16, 49), rel=1e-3)
    assert found.gflops == pytest.approx(9.2 / 4, rel=0.06)
    assert measure_cost(Pair(Corner(0), MaskedViT(vit)), images).gflops < 0.06


def test_ifam_pays_for_its_selector_and_for_what_it_sees():
    settings, vit = Ifam(Path("data"), parts=3, sight="patches"), small_vit(classes=0)
    model = IFam(make_selector(vit, settings, 3), make_predictor(vit, settings, 3), PartSettings.of(settings)).eval()
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    both, dense = measure_cost(model, images), measure_cost(Classifier(small_vit(classes=3)), images)
    look = measure_cost(Pair(model.where, Constant()), images)
    judge = measure_cost(Pair(Fixed(model.look(images)), model.what), images[:1])
    assert both.coverage == pytest.approx(model.look(images).keep.float().mean().item())
    assert look.gflops == pytest.approx(dense.gflops, rel=0.02), "a dense ViT, and a little for the prototypes"
    assert dense.gflops < both.gflops < 2 * dense.gflops
    assert judge.gflops < dense.gflops


def test_pdiscoformer_discovers_its_parts_once_and_predicts_the_same():
    settings, vit = Pdiscoformer(Path("data"), parts=3), small_vit(classes=0)
    model = PDiscoFormer(make_selector(vit, settings, 3), PartSettings.of(settings)).eval()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found, dense = measure_cost(model, images), measure_cost(Classifier(small_vit(classes=3)), images)
    assert found.gflops == pytest.approx(dense.gflops, rel=0.02), "a dense ViT, and a little for the prototypes"
    assert found.coverage == 1
    prediction = model.judge(images, model.look(images)).logits
    assert model.judge(images, sight_for_prediction(model, images, None)).logits.equal(prediction)


def test_soft_ifam_still_looks_as_its_weights_come_from_the_parts():
    settings, vit = Ifam(Path("data"), parts=3, soft_mask=True), small_vit(classes=0)
    model = IFam(make_selector(vit, settings, 3), make_predictor(vit, settings, 3), PartSettings.of(settings)).eval()
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    dense = measure_cost(Classifier(small_vit(classes=3)), images)
    assert measure_cost(model, images).gflops == pytest.approx(2 * dense.gflops, rel=0.02)


class Constant:
    blind = True

    def judge(self, images, sight):
        return None


class Fixed:
    def __init__(self, sight: Sight):
        self.sight = sight

    def look(self, images):
        return self.sight[: len(images)]

    def maps(self, images):
        return {}


def test_images_are_not_padded_to_each_others_length(vit):
    """Each image alone: the cost is the mean of both, not that of the larger."""
    vit = small_vit()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(2, 32, 32, dtype=torch.bool)
    masks[0, :8, :8], masks[1] = True, True
    early = GivenMask(MaskedViT(vit), MaskSettings("data", 0.5, False), add_masks=lambda rows: rows, where=None)
    late = GivenMask(LateMaskedViT(vit, 5), early.settings, early.with_masks, None)
    assert measure_cost(late, images, masks).coverage == 1, "late masking sees the whole image"
    both = measure_cost(early, images, masks)
    alone = [measure_cost(early, images[i : i + 1], masks[i : i + 1]) for i in range(2)]
    assert both.gflops == pytest.approx((alone[0].gflops + alone[1].gflops) / 2)
    assert alone[0].gflops < alone[1].gflops
    assert both.coverage == pytest.approx((1 / 16 + 1) / 2)


def test_global_settings_are_restored(vit, images):
    before = [p.requires_grad for p in vit.parameters()]
    measure_cost(Classifier(vit), images)
    assert [p.requires_grad for p in vit.parameters()] == before
    assert torch.backends.cuda.flash_sdp_enabled()
    assert Cost(3.1, 0.244, 16).sentence == "3.1 GFLOPs per image, 24 % of it visible (mean of 16 images)."


def test_evaluate_prints_the_cost_of_a_prediction(tmp_path):
    toy = write_toy(tmp_path / "toy", train=8, val=8, test=20)
    flags = (*SMALL, "--batch", 8, "--epochs", 1)
    for method in ("ifam", "early-mask"):
        run = tmp_path / method
        assert typed("train", method, toy, *flags, "--out", run)[0] == 0
        for split, n in (("test", 16), ("val", 8)):
            code, out, err = typed("evaluate", run, *QUICK, "--split", split, "--details")
            assert code == 0, err
            assert f"of it visible (mean of {n} images)." in out
        found = json.loads((run / "metrics.json").read_text())["cost"]
        assert [found[split]["n"] for split in ("test", "val")] == [16, 8]
        assert 0 < found["test"]["coverage"] < 1
        assert 0 < found["test"]["gflops"] < 1.5  # iFAM looks twice, in twice the size
