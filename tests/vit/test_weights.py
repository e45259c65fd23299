"""Loading checkpoints of all known formats into our ViT."""

import re
from dataclasses import replace

import pytest
import torch

from sightline.errors import UserError
from sightline.vit import backbones
from sightline.vit.backbones import BACKBONES, BY_REPOSITORY
from sightline.vit.model import ViT
from sightline.vit.weights import config_for_file, has_shape, load_backbone, save_backbone, shape_of

from ..conftest import small_vit
from ..weight_files import OTHER_INPUT, assert_same_bits, cut, in_shards, refusal, rename, stored
from .test_vit_parity import FAMILIES, SMALL, randomise, their_outputs, transformers

DINOV2 = {"layer_scale": 1.0, "classes": 0}
DINOV3 = {"positions": "rotary", "layer_scale": 1.0, "qkv_bias": "no_key", "classes": 0}
CLIP = {"pre_norm": True, "patch_bias": False, "mlp": "quick_gelu", "registers": 0, "head_bias": False}


def prefixed(tensors, prefix):
    return {prefix + key: tensor for key, tensor in tensors.items()}


def with_position_for_cls(tensors):
    position = torch.arange(32).view(1, 1, -1) / 64
    covering = torch.cat([position, tensors["pos_embed"]], dim=1)
    return tensors | {"cls_token": tensors["cls_token"] - position, "pos_embed": covering}


def dinov2(tensors):
    return rename(with_position_for_cls(tensors), {"^reg_token": "register_tokens"}) | {"mask_token": torch.ones(1, 32)}


def dinov2_giant(tensors):
    tensors = rename(dinov2(tensors), {r"mlp\.fc1": "mlp.w12", r"mlp\.fc2": "mlp.w3"})
    return rename(tensors, {r"^blocks\.([01])\.": r"blocks.0.\1.", r"^blocks\.2\.": "blocks.1.2."})  # chunks of two


def dinov3(tensors):
    extra = ["mask_token", "rope_embed.periods", "local_cls_norm.bias", "blocks.0.attn.qkv.bias_mask"]
    return rename(tensors, {"^reg_token": "storage_tokens"}) | {name: torch.ones(96) for name in extra}


def dinov3_gated(tensors):
    return rename(cut(dinov3(tensors), "mlp.fc1", ["mlp.w1", "mlp.w2"]), {r"mlp\.fc2": "mlp.w3"})


def timm_dinov3(tensors):
    return rename(tensors, {r"ls(\d)\.gamma": r"gamma_\1"})


def timm_dinov3_gated(tensors):
    return cut(timm_dinov3(tensors), "mlp.fc1", ["mlp.fc1_g", "mlp.fc1_x"])


def timm_dinov3_biased(tensors):
    return cut(timm_dinov3(tensors), "qkv.bias", ["q_bias", None, "v_bias"])


def open_clip(tensors):
    names = {"^cls_token": "class_embedding", "^pos_embed": "positional_embedding", r"^patch_embed\.proj": "conv1"}
    names |= {r"^norm_pre\.": "ln_pre.", r"^norm\.": "ln_post.", r"\.norm(\d)\.": r".ln_\1.", r"^head\.weight": "proj"}
    names |= {r"qkv\.": "in_proj_", r"attn\.proj": "attn.out_proj", "fc1": "c_fc", "fc2": "c_proj"}
    visual = rename(with_position_for_cls(tensors), names | {r"^blocks\.": "transformer.resblocks."})
    for name, reshape in (
        ("class_embedding", torch.flatten),
        ("positional_embedding", torch.squeeze),
        ("proj", torch.t),
    ):
        visual[name] = reshape(visual[name])
    text = ["transformer.resblocks.0.ln_1.weight", "token_embedding.weight", "positional_embedding", "logit_scale"]
    return prefixed(visual, "visual.") | {name: torch.ones(7, 7) for name in [*text, "text_projection"]}


def timm_in_open_clip(tensors):
    return prefixed(tensors, "visual.trunk.") | {"visual.head.proj.weight": torch.ones(7, 32), "text.x": torch.ones(1)}


def in_training(wrapper):
    dino_head = {"head.mlp.0.weight": torch.ones(7, 32), "head.last_layer.weight_g": torch.ones(7, 1)}
    return lambda tensors: prefixed(tensors, wrapper) | dino_head


STYLES = {
    "timm": (with_position_for_cls, {}),
    "timm without a position for CLS": (dict, {}),
    "dinov2": (dinov2, DINOV2),
    "dinov2 giant": (dinov2_giant, DINOV2 | {"mlp": "swiglu"}),
    "dinov3": (dinov3, DINOV3),
    "dinov3 gated": (dinov3_gated, DINOV3 | {"mlp": "swiglu"}),
    "timm dinov3": (timm_dinov3, DINOV3 | {"qkv_bias": "none"}),
    "timm dinov3 gated": (timm_dinov3_gated, DINOV3 | {"qkv_bias": "none", "mlp": "swiglu"}),
    "timm dinov3 with biases": (timm_dinov3_biased, DINOV3),
    "open_clip": (open_clip, CLIP),
    "open_clip around timm": (timm_in_open_clip, {"classes": 0}),
}
WRAPPERS = ["module.", "backbone.", "_orig_mod.", "module.backbone.", "_orig_mod.module.", "backbone._orig_mod."]


STYLES |= {wrapper: (in_training(wrapper), {"classes": 0}) for wrapper in WRAPPERS}


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_other_parameter_names_give_identical_weights(style, tmp_path):
    rename_to, changes = STYLES[style]
    vit = small_vit(**changes)
    vit.cls_token.mul_(64).round_().div_(64)  # so that token and position add up without rounding
    for block in vit.blocks if vit.config.qkv_bias == "no_key" else []:
        block.attn.qkv.bias.view(3, -1)[1] = 0
    path = stored(rename_to(vit.state_dict()), tmp_path / "model.safetensors")
    assert_same_bits(load_backbone(path, config=vit.config), vit)


NATIVE = {**SMALL, "image_size": 64, "patch_size": 16}
WHOLE = {  # a model with more than a backbone, its attribute with the backbone, the family, and the head
    "vit with pooler": lambda t: (t.ViTModel(t.ViTConfig(**NATIVE)), None, "vit", None),
    "vit with classifier": lambda t: (
        t.ViTForImageClassification(t.ViTConfig(**NATIVE, num_labels=7)), "vit", "vit",
        lambda theirs, images: theirs(images).logits,
    ),
    "mae with decoder": lambda t: (
        t.ViTMAEForPreTraining(t.ViTMAEConfig(**NATIVE, mask_ratio=0.0, decoder_num_hidden_layers=1)),
        "vit", "mae", None,
    ),
    "clip with projection": lambda t: (
        t.CLIPVisionModelWithProjection(t.CLIPVisionConfig(**NATIVE, projection_dim=24)), "vision_model", "clip",
        lambda theirs, images: theirs(images).image_embeds,
    ),
    "clip with text": lambda t: (
        t.CLIPModel(t.CLIPConfig(text_config=SMALL, vision_config=NATIVE, projection_dim=24)), "vision_model", "clip",
        lambda theirs, images: theirs.visual_projection(theirs.vision_model(images).pooler_output),
    ),
}  # fmt: skip


@pytest.mark.parametrize("saved", [*FAMILIES, *WHOLE])
@torch.no_grad()
def test_files_of_transformers_give_the_same_features_and_logits(saved, tmp_path, generator):
    theirs, tower, family, head = WHOLE[saved](transformers) if saved in WHOLE else (None, None, saved, None)
    bare, config, call = FAMILIES[family]()
    theirs = theirs or bare
    randomise(theirs, generator)
    theirs.set_attn_implementation("eager")
    theirs.eval().save_pretrained(tmp_path)  # under the hub's names, which are not those of the object

    images = torch.rand(2, 3, 4 * config.patch, 4 * config.patch, generator=generator)
    out = load_backbone(tmp_path, config=config)(images)
    features, _ = their_outputs(getattr(theirs, tower) if tower else theirs, images, call)
    torch.testing.assert_close(out.tokens, features, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.logits, head(theirs, images) if head else None, atol=1e-5, rtol=0)


def test_the_position_of_cls_is_added_in_float32(tmp_path):
    vit = small_vit()
    tensors = {name: tensor.half() for name, tensor in vit.state_dict().items()}
    tensors["cls_token"] = torch.ones(1, 1, 32, dtype=torch.half)
    tensors["pos_embed"] = torch.full((1, 17, 32), 2**-12, dtype=torch.half)  # 1 + 2**-12 is 1 in float16
    path = stored(tensors, tmp_path / "half.safetensors")
    assert (load_backbone(path, config=vit.config).cls_token == 1 + 2**-12).all()


CONTAINERS = {
    "plain": lambda tensors: tensors,
    "teacher": lambda tensors: {"teacher": prefixed(tensors, "backbone."), "student": {}, "epoch": 3},
    "state_dict": lambda tensors: {"state_dict": prefixed(tensors, "module."), "arch": "vit"},
    "model": lambda tensors: {"best": torch.ones(()), "model": tensors},
    "nested": lambda tensors: {"model": {"state_dict": tensors}},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_pickles_of_tensors(container, tmp_path):
    vit = small_vit(classes=0)
    torch.save(CONTAINERS[container](vit.state_dict()), tmp_path / "model.pth")
    assert_same_bits(load_backbone(tmp_path / "model.pth", config=vit.config), vit)


# ---- our own files, heads, parts of files ----------------------------------------------------------------------------


OWN = {
    "input": {"input": OTHER_INPUT},
    "no head": {"classes": 0},
    "norm before the head": {"head_bias": False, "head_norm": True},
    "oblong": {"grid": (2, 5)},  # as many positions as 3×3 and one for CLS
    "rotary": DINOV3 | {"mlp": "swiglu", "hidden": 48},
    "clip": CLIP,
}


@pytest.mark.parametrize("changes", OWN.values(), ids=OWN)
def test_our_own_files_are_self_describing(changes, tmp_path):
    vit = small_vit(**changes)
    save_backbone(vit, tmp_path / "full.safetensors")
    full = load_backbone(tmp_path / "full.safetensors")
    assert full.config == vit.config
    assert_same_bits(full, vit)
    assert not full.training
    assert full.origin.file == "full.safetensors"

    save_backbone(vit, tmp_path / "half.safetensors", torch.float16)
    half = load_backbone(tmp_path / "half.safetensors")
    assert half.config == vit.config
    for name, tensor in half.state_dict().items():
        torch.testing.assert_close(tensor, vit.state_dict()[name], rtol=2**-11, atol=2**-14)


@pytest.mark.parametrize("changes", [{}, {"classes": 0}, {"head_norm": True}, CLIP])
def test_classes_give_a_new_head_and_keep_the_rest(changes, tmp_path):
    vit = small_vit(**changes)
    path = stored(vit.state_dict(), tmp_path / "model.safetensors")
    config = replace(vit.config, classes=3, head_bias=True)
    assert_same_bits(load_backbone(path, config=config), vit)  # the file's own head, or none

    loaded = load_backbone(path, config=config, classes=9)
    assert loaded.config == replace(config, classes=9)
    assert loaded.head.weight.shape == (9, 32)
    assert loaded.head.bias.shape == (9,)
    rest = {name: tensor for name, tensor in vit.state_dict().items() if not name.startswith(("head.", "fc_norm."))}
    assert not [name for name, tensor in rest.items() if not torch.equal(loaded.state_dict()[name], tensor)]
    assert load_backbone(path, config=config, classes=0).head is None


def test_a_prefix_selects_one_of_two_models(tmp_path):
    first, second = small_vit(1), small_vit(2)
    both = prefixed(first.state_dict(), "stage_1.") | prefixed(second.state_dict(), "stage_2.")
    path = stored(both, tmp_path / "model.safetensors")
    assert_same_bits(load_backbone(path, config=first.config, prefix="stage_1."), first)
    assert_same_bits(load_backbone(path, config=first.config, prefix="stage_2."), second)
    assert "contains no weights under 'stage_3.'" in refusal(path, config=first.config, prefix="stage_3.")


def test_shards(tmp_path):
    vit = small_vit()
    in_shards(vit, tmp_path)
    assert_same_bits(load_backbone(tmp_path, config=vit.config), vit)
    (tmp_path / "b.safetensors").unlink()
    assert re.search(r"b\.safetensors: not a readable .* is the download complete", refusal(tmp_path))


# ---- the registry ----------------------------------------------------------------------------------------------------


def on_meta(name: str) -> ViT:
    with torch.device("meta"):
        return ViT(BACKBONES[name].config)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_file_of_a_registered_backbone_is_recognised(name, tmp_path):
    config, tensors = BACKBONES[name].config, on_meta(name).state_dict()
    assert has_shape(config, shape_of(tensors))
    assert config_for_file(tensors, {}, name, tmp_path) == config
    similar = [other for other in BACKBONES if has_shape(BACKBONES[other].config, shape_of(tensors))]
    if {BACKBONES[other].config for other in similar} == {config}:
        assert config_for_file(tensors, {}, None, tmp_path) == config
    else:
        with pytest.raises(
            UserError, match=rf"\(like {', '.join(similar)}\)\. Their preprocessing differs; choose one with like="
        ):
            config_for_file(tensors, {}, None, tmp_path)


def test_backbones_that_cannot_be_distinguished_by_their_files():
    shape = shape_of(on_meta("dino-s16").state_dict())
    similar = {name for name, backbone in BACKBONES.items() if has_shape(backbone.config, shape)}
    assert similar == {"dino-s16", "ibot-s16", "augreg-s16", "deit-s16"}


def test_names_and_repositories_are_unique_and_revisions_are_commits():
    listed = backbones._ALL
    assert len(BACKBONES) == len(listed)
    assert len(BY_REPOSITORY) == sum(backbone.repository is not None for backbone in listed)
    for backbone in listed:
        assert backbone.revision is None or re.fullmatch("[0-9a-f]{40}", backbone.revision)
        assert backbone.repository or backbone.note
        assert backbone.file.endswith(".safetensors")


PUBLISHED = {  # parameters in millions, without heads
    "dinov2-s14": 22.1, "dinov2-b14": 86.6, "dinov2-l14": 304.4, "dinov2-g14": 1136.5, "dinov3-s16": 21.6,
    "dinov3-h16plus": 840.6, "dinov3-7b16": 6716.5, "augreg-ti16": 5.5, "clip-l14": 303.2,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_backbones_have_their_published_size(name):
    count = sum(parameter.numel() for parameter in on_meta(name).parameters())
    assert count / 1e6 == pytest.approx(PUBLISHED[name], abs=0.06)


def test_arguments_without_effect_are_rejected(tmp_path):
    path = tmp_path / "small.safetensors"
    save_backbone(small_vit(), path)
    assert "revision='v1' is only for backbones on the Hugging Face hub" in refusal(path, revision="v1")
    assert "like='dino-b16' is only for local files" in refusal("dino-s16", like="dino-b16")
    with pytest.raises(UserError, match=r"weights are saved as \.safetensors"):
        save_backbone(small_vit(), tmp_path / "small.pth")


def test_loading_does_not_change_the_callers_random_state(tmp_path):
    path = tmp_path / "new" / "small.safetensors"
    save_backbone(small_vit(), path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    heads = [load_backbone(path, classes=3, seed=seed).head.weight for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_tensors_outside_the_backbone_are_not_dropped_silently(tmp_path):
    vit = small_vit()
    tensors = {f"backbone.{name}": t for name, t in vit.state_dict().items()} | {"decode_head.weight": torch.ones(2)}
    path = stored(tensors, tmp_path / "more.safetensors")
    assert "1 unexpected: outside the backbone: decode_head.weight" in refusal(path, config=vit.config)
    assert_same_bits(load_backbone(path, config=vit.config, prefix="backbone."), vit)


def test_a_head_beside_the_backbone_is_found(tmp_path):
    vit = small_vit()
    tensors = {name if name.startswith("head.") else f"backbone.{name}": t for name, t in vit.state_dict().items()}
    assert_same_bits(load_backbone(stored(tensors, tmp_path / "beside.safetensors"), config=vit.config), vit)
