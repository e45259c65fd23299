"""The leak finder on models from other libraries."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sightline.errors import UserError
from sightline.sight import Sight
from sightline.verify.leaks import find_leak

from ..conftest import small_vit


@pytest.fixture
def images(generator):
    return torch.rand(4, 3, 56, 56, generator=generator)


@pytest.fixture
def sight(generator):
    return Sight(torch.rand(4, 4, 4, generator=generator) < 0.5)


@pytest.fixture
def dinov2(generator):
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=56, patch_size=14, num_labels=4
    )
    model = transformers.Dinov2WithRegistersForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model


def test_a_plain_vit_leaks_at_its_first_attention(dinov2, images, sight):
    leak = find_leak(dinov2, images, sight)
    assert leak.leaks
    assert leak.changed == leak.trials
    assert leak.module == "dinov2_with_registers.encoder.layer.0.attention"
    assert leak.what.startswith("a kept token")
    assert leak.relative_change > 0.01
    assert leak.module in leak.sentence


def test_a_vit_masked_in_every_layer_still_leaks_where_its_head_averages_all_patches(dinov2, images, sight):
    """Its classifier reads the CLS token beside the mean of all patches, hidden ones too."""
    from transformers import AttentionInterface

    visible = torch.cat([torch.ones(4, 5, dtype=torch.bool), sight.keep.flatten(1)], dim=1)[:, None, None]

    def blindfolded(module, q, k, v, attention_mask, scaling=None, **rest):
        return F.scaled_dot_product_attention(q, k, v, visible, scale=scaling).transpose(1, 2).contiguous(), None

    AttentionInterface.register("blindfolded", blindfolded)
    dinov2.set_attn_implementation("blindfolded")
    leak = find_leak(dinov2, images, sight)
    assert leak.leaks
    assert (leak.module, leak.kind) == ("the model itself", "Dinov2WithRegistersForImageClassification")
    assert leak.what == "the pooled feature vector changes before its classifier"

    # Its CLS token alone is blind to any number, but not to what is none: a masked weight of 0 times NaN is NaN.
    cls = find_leak(dinov2, images, sight, call=lambda x: dinov2.dinov2_with_registers(x).pooler_output)
    assert (cls.changed, cls.largest_change) == (3 * 4, 0.0)
    assert "only where hidden pixels were NaN or infinite" in cls.sentence
    assert cls.module == "dinov2_with_registers.encoder.layer.0.attention"


def test_ours_with_its_mask_does_not_leak_and_without_it_does(generator):
    vit, images = small_vit(), torch.rand(4, 3, 32, 32, generator=generator)
    sight = Sight(torch.rand(4, 4, 4, generator=generator) < 0.5)
    blind = find_leak(vit, images, sight, call=lambda x: vit(x, sight.keep).logits)
    assert not blind.leaks
    assert (blind.module, blind.largest_change) == (None, 0.0)
    assert blind.sentence.startswith("No leak found")
    assert find_leak(vit, images, sight).module == "blocks.0.attn"


def test_overlapping_patches_leak_in_the_embedding(images, sight):
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 8, 28, 14, padding=7)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x):
            return self.norm(self.embed(x)).mean(dim=(2, 3))

    assert find_leak(Stem().eval(), images, sight).module == "embed"


def test_mixing_between_tokens_outside_any_submodule_is_attributed_to_the_caller(images, sight):
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Conv2d(3, 8, 14, 14), nn.Linear(8, 8)

        def forward(self, x):
            tokens = self.embed(x).flatten(2).transpose(1, 2)
            tokens = self.out(tokens + tokens.mean(dim=1, keepdim=True))
            return tokens[:, 0]

    leak = find_leak(Mixer().eval(), images, sight)
    assert (leak.module, leak.kind) == ("the model itself", "Mixer")
    assert leak.what == "a kept token changes before its out"


def test_a_model_that_is_not_deterministic_is_an_error(images, sight):
    model = nn.Sequential(nn.Conv2d(3, 4, 14, 14), nn.Dropout(0.5)).train()
    with pytest.raises(UserError, match="Sequential is not deterministic on the same images"):
        find_leak(model, images, sight)


def test_a_model_without_floating_point_output_is_an_error(images, sight):
    class Labels(nn.Module):
        def forward(self, x):
            return x.mean(dim=(1, 2, 3)) > 0.5

    with pytest.raises(UserError, match="no floating-point tensor"):
        find_leak(Labels(), images, sight)


def test_a_trivial_result_is_an_error(images, sight):
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones(len(x), 3) + 0 * x.nan_to_num(0, 0, 0).mean()

    with pytest.raises(UserError, match="does not depend on visible pixels either"):
        find_leak(Constant(), images, sight)
    model = nn.Sequential(nn.Conv2d(3, 4, 14, 14), nn.Flatten())
    with pytest.raises(UserError, match="hides nothing"):
        find_leak(model, images, Sight(torch.ones(4, 4, 4, dtype=torch.bool)))
    with pytest.raises(UserError, match="not finite"):
        find_leak(model, images * torch.nan, sight)


def test_outputs_of_any_shape(images, sight):
    class Scores(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.shape, self.embed = shape, nn.Conv2d(3, 1, 14, 14)

        def forward(self, x):
            tokens = self.embed(x).flatten(1)
            return {"one": tokens.mean(dim=1), "patches": tokens, "loss": tokens.mean(), "all": (tokens.mean(1), 3)}[
                self.shape
            ]

    for shape in ("one", "all", "patches"):
        leak = find_leak(Scores(shape), images, sight)
        assert leak.leaks, shape
        assert "NaN" not in leak.to_json()
    assert find_leak(Scores("one"), images, sight).module == "the model itself"
    with pytest.raises(UserError, match="a row for each image"):
        find_leak(Scores("loss"), images, sight)


def test_hooks_are_removed_and_state_untouched(dinov2, images, sight):
    before = {name: tensor.clone() for name, tensor in dinov2.state_dict().items()}
    find_leak(dinov2, images, sight, draws=1)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in dinov2.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in dinov2.state_dict().items())
