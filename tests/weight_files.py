"""Weights on disk, for tests of reading them."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from sightline.errors import UserError
from sightline.vit.model import Input, ViT
from sightline.vit.weights import load_backbone

OTHER_INPUT = Input(size=(32, 64), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), resample="bilinear", crop=0.9)


def stored(tensors, path, metadata=None):
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, metadata=metadata)
    return path


def assert_same_bits(loaded: ViT, vit: ViT) -> None:
    theirs, ours = loaded.state_dict(), vit.state_dict()
    assert theirs.keys() == ours.keys()
    assert not [name for name in ours if not torch.equal(theirs[name], ours[name])]


def refusal(path, **settings) -> str:
    with pytest.raises(UserError) as caught:
        load_backbone(path, **settings)
    message = str(caught.value)
    assert message.isprintable()  # one line, without colours
    assert "  " not in message
    return message


def rename(tensors, rules):
    for pattern, name in rules.items():
        tensors = {re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}
    return tensors


def cut(tensors, fused, names):
    """Cut what is fused into equal parts; a part without a name is left out."""
    out = {key: tensor for key, tensor in tensors.items() if fused not in key}
    for key in tensors.keys() - out.keys():
        parts = zip(names, tensors[key].chunk(len(names)), strict=True)
        out |= {key.replace(fused, name): part for name, part in parts if name}
    return out


def in_shards(vit, folder):
    halves = {"a.safetensors": sorted(vit.state_dict())[:20], "b.safetensors": sorted(vit.state_dict())[20:]}
    for file, names in halves.items():
        stored({name: vit.state_dict()[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
