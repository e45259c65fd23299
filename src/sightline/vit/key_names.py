"""Mapping the parameter names of published checkpoints to ours (which are timm's).

One list of rules covers the files of timm, of Facebook's DINO, DINOv2 and DINOv3, of transformers (4 and 5), OpenAI
and OpenCLIP: their names do not contradict each other. What is not part of a backbone (decoders, text towers, training
heads) is ignored by name; any other unknown tensor makes the loader reject the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

# Prefixes of the backbone in files that contain more; the first one found is used.
TOWERS = ("vision_model.", "visual.trunk.", "visual.", "vit.", "dinov2_with_registers.", "dinov2.", "backbone.")
HEADS_OUTSIDE_TOWER = ("classifier.", "visual_projection.", "head.", "fc_norm.")
OTHER_TOWERS = re.compile(
    r"^(text|transformer\.|positional_embedding$|token_embedding|ln_final|logit_|decoder|visual\.head\.)"
)
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.|model\.(?=layer\.))+")

_RULES = [
    (r"^embeddings\.", ""),
    (r"^class_embedding$", "cls_token"),
    (r"^(register_tokens|storage_tokens)$", "reg_token"),
    (r"^(position_embeddings|position_embedding\.weight|positional_embedding)$", "pos_embed"),
    (r"^(patch_embeddings\.projection|patch_embeddings|patch_embedding|conv1)\.(weight|bias)$", r"patch_embed.proj.\2"),
    (r"^(pre_layrnorm|ln_pre)\.", "norm_pre."),
    (r"^(layernorm|post_layernorm|ln_post)\.", "norm."),
    (r"^(classifier|visual_projection)\.", "head."),
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # dinov2's large models number their blocks within chunks
    (r"^(encoder\.layers?|layers?|transformer\.resblocks)\.(\d+)\.", r"blocks.\2."),
    (r"\.(layernorm_before|layer_norm1|ln_1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2|ln_2)\.", ".norm2."),
    (r"\.(attention\.attention|attention|self_attn)\.(query|q_proj)\.", ".attn.q."),
    (r"\.(attention\.attention|attention|self_attn)\.(key|k_proj)\.", ".attn.k."),
    (r"\.(attention\.attention|attention|self_attn)\.(value|v_proj)\.", ".attn.v."),
    (r"\.(attention\.output\.dense|attention\.o_proj|self_attn\.out_proj|attn\.out_proj)\.", ".attn.proj."),
    (r"\.attn\.in_proj_(weight|bias)$", r".attn.qkv.\1"),
    (r"\.attn\.(q|v)_bias$", r".attn.\1.bias"),
    (r"\.(layer_scale|gamma_)(1|2)(\.lambda1)?$", r".ls\2.gamma"),
    (r"\.(intermediate\.dense|mlp\.c_fc|mlp\.w12|mlp\.weights_in)\.", ".mlp.fc1."),
    (r"\.(output\.dense|mlp\.c_proj|mlp\.w3|mlp\.weights_out|mlp\.down_proj)\.", ".mlp.fc2."),
    (r"\.mlp\.(gate_proj|fc1_g|w1)\.", ".mlp.gate."),
    (r"\.mlp\.(up_proj|fc1_x|w2)\.", ".mlp.up."),
]
RULES = [(re.compile(pattern), name) for pattern, name in _RULES]

IGNORED = re.compile(
    r"mask_token$|^pooler\.|^decoder|^text_|^logit_|^token_embedding|^ln_final|position_ids$"
    r"|rope_embed|^rope\.|bias_mask$|^local_cls_norm|^prefix_attn_mask$|^(dino_|ibot_)?head\.(mlp|last_layer)|^dino_head|^ibot_head"
)


def to_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename all tensors, then fuse or reshape those stored in another form."""
    named = {}
    for key, tensor in _select_tower(tensors).items():
        for pattern, name in RULES:
            key = pattern.sub(name, key)
        if not IGNORED.search(key):
            named[key] = tensor
    for prefix in sorted({key.rpartition(".mlp.")[0] for key in named if ".mlp." in key}):
        _fuse_mlp(named, f"{prefix}.mlp.")
    for prefix in sorted({key.rpartition(".attn.")[0] for key in named if ".attn." in key}):
        _fuse_qkv(named, f"{prefix}.attn.")
    return _reshape(named)


def _select_tower(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {WRAPPERS.sub("", key): tensor for key, tensor in tensors.items()}
    for tower in TOWERS:
        if any(key.startswith(tower) for key in tensors):
            inside = {}
            for key, tensor in tensors.items():
                if key.startswith((tower, *HEADS_OUTSIDE_TOWER)):
                    inside[WRAPPERS.sub("", key.removeprefix(tower))] = tensor
                elif not OTHER_TOWERS.search(key):
                    inside[f"outside the backbone: {key}"] = tensor  # unknown, so that the file is rejected
            return inside
    return tensors


def _fuse_qkv(named: dict[str, Tensor], at: str) -> None:
    weights, biases = ([f"{at}{part}.{kind}" for part in "qkv"] for kind in ("weight", "bias"))
    if all(name in named for name in weights):
        named[f"{at}qkv.weight"] = torch.cat([named.pop(name) for name in weights])
    query, key, value = biases
    if query in named and value in named:  # DINOv3 and BEiT have none for the key
        named.setdefault(key, torch.zeros_like(named[query]))
        named[f"{at}qkv.bias"] = torch.cat([named.pop(name) for name in biases])


def _fuse_mlp(named: dict[str, Tensor], at: str) -> None:
    for kind in ("weight", "bias"):
        halves = [named.pop(f"{at}{half}.{kind}") for half in ("gate", "up") if f"{at}{half}.{kind}" in named]
        if halves:  # `up` alone is an MLP without a gate
            named[f"{at}fc1.{kind}"] = torch.cat(halves)


def _reshape(named: dict[str, Tensor]) -> dict[str, Tensor]:
    if "proj" in named:  # CLIP's projection, stored transposed
        named["head.weight"] = named.pop("proj").T.contiguous()
    if "cls_token" in named:
        named["cls_token"] = named["cls_token"].reshape(1, 1, -1)
    if "reg_token" in named and not named["reg_token"].numel():
        del named["reg_token"]
    if "pos_embed" in named:
        positions = named["pos_embed"]
        positions = positions.reshape(1, -1, positions.shape[-1])
        if "cls_token" in named and not _is_square(positions.shape[1]) and _is_square(positions.shape[1] - 1):
            named["cls_token"] = named["cls_token"].float() + positions[:, :1].float()
            positions = positions[:, 1:]
        named["pos_embed"] = positions
    return named


def _is_square(n: int) -> bool:
    return n >= 0 and int(n**0.5 + 0.5) ** 2 == n
