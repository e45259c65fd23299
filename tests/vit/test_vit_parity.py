"""Our ViT against transformers' own models with the same random weights."""

import pytest
import torch

from sightline.vit.key_names import to_our_names
from sightline.vit.model import ViT, ViTConfig

from ..conftest import PLAIN

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 96}
OURS = {"width": 48, "depth": 3, "heads": 3, "hidden": 96, "input": PLAIN}


def dinov2(**changes):
    config = transformers.Dinov2Config(**SMALL, image_size=56, patch_size=14, **{"mlp_ratio": 2} | changes)
    ours = ViTConfig(**OURS, patch=14, grid=(4, 4), layer_scale=1.0, positions="bicubic")
    return transformers.Dinov2Model(config), ours, {}


def dinov2_swiglu():
    theirs, _, call = dinov2(use_swiglu_ffn=True, mlp_ratio=4)
    ours = {**OURS, "hidden": 128}
    return theirs, ViTConfig(**ours, patch=14, grid=(4, 4), layer_scale=1.0, positions="bicubic", mlp="swiglu"), call


def dinov2_with_registers():
    config = transformers.Dinov2WithRegistersConfig(
        **SMALL, image_size=56, patch_size=14, mlp_ratio=2, num_register_tokens=4
    )
    ours = ViTConfig(**OURS, patch=14, grid=(4, 4), layer_scale=1.0, registers=4, positions="bicubic_antialias")
    return transformers.Dinov2WithRegistersModel(config), ours, {}


def dinov3(gated: bool = False):
    config = transformers.DINOv3ViTConfig(
        **SMALL,
        image_size=64,
        patch_size=16,
        num_register_tokens=4,
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
    )
    ours = ViTConfig(
        **OURS, patch=16, registers=4, layer_scale=1.0, positions="rotary", qkv_bias="no_key", norm_eps=1e-5,
        mlp="swiglu" if gated else "gelu",
    )  # fmt: skip
    return transformers.DINOv3ViTModel(config), ours, {}


def vit():
    config = transformers.ViTConfig(**SMALL, image_size=64, patch_size=16)
    ours = ViTConfig(**OURS, patch=16, grid=(4, 4), norm_eps=1e-12, positions="bicubic")
    return transformers.ViTModel(config, add_pooling_layer=False), ours, {"interpolate_pos_encoding": True}


def mae():
    config = transformers.ViTMAEConfig(**SMALL, image_size=64, patch_size=16, mask_ratio=0.0)
    ours = ViTConfig(**OURS, patch=16, grid=(4, 4), norm_eps=1e-12, positions="bicubic")
    return transformers.ViTMAEModel(config), ours, {"interpolate_pos_encoding": True}


def clip():
    config = transformers.CLIPVisionConfig(**SMALL, image_size=64, patch_size=16)
    ours = ViTConfig(
        **OURS,
        patch=16,
        grid=(4, 4),
        norm_eps=1e-5,
        positions="bicubic",
        pre_norm=True,
        patch_bias=False,
        mlp="quick_gelu",
    )
    return transformers.CLIPVisionModel(config), ours, {"interpolate_pos_encoding": True}


FAMILIES = {
    "dinov2": dinov2,
    "dinov2-swiglu": dinov2_swiglu,
    "dinov2-registers": dinov2_with_registers,
    "dinov3": dinov3,
    "dinov3-gated": lambda: dinov3(gated=True),
    "vit": vit,
    "mae": mae,
    "clip": clip,
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if ("norm" in name and name.endswith("weight")) or "lambda1" in name else 0.0
            parameter.normal_(centre, 0.15, generator=generator)


def their_outputs(theirs, images, call):
    """Their features after the final norm, and the last layer's CLS attention."""
    grid = (images.shape[-2] // theirs.config.patch_size) * (images.shape[-1] // theirs.config.patch_size)
    if "MAE" in type(theirs).__name__:  # undo its random order of patches
        call = call | {"noise": torch.arange(grid).float().expand(len(images), -1)}
    out = theirs(images, output_attentions=True, **call)
    features = out.last_hidden_state
    if "CLIP" in type(theirs).__name__:  # theirs norms only the CLS token
        features = theirs.post_layernorm(features)
        torch.testing.assert_close(features[:, 0], out.pooler_output)
    return features, out.attentions[-1][:, :, 0]


@pytest.mark.parametrize("size", ["native", "larger", "not-square", "smaller"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_same_features_and_attention_as_transformers(family, size, generator):
    theirs, config, call = FAMILIES[family]()
    randomise(theirs, generator)
    theirs.set_attn_implementation("eager")
    theirs.eval()
    ours = ViT(config).eval()
    ours.load_state_dict(to_our_names(theirs.state_dict()))

    p = config.patch
    h, w = {"native": (4, 4), "larger": (7, 7), "not-square": (5, 8), "smaller": (3, 2)}[size]
    images = torch.rand(2, 3, h * p, w * p, generator=generator)
    features, attention = their_outputs(theirs, images, call)
    out = ours(images, cls_attention=[-1])
    torch.testing.assert_close(out.tokens, features, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.cls_attention[:, 0], attention, atol=1e-5, rtol=0)
