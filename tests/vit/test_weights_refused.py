"""Files that are not weights, not a ViT, or another ViT: each rejected with a one-line error."""

import json
import re
from dataclasses import replace

import pytest
import torch

from sightline.vit.backbones import BACKBONES, Backbone
from sightline.vit.weights import METADATA_KEY, load_backbone, save_backbone

from ..conftest import small_vit
from ..weight_files import OTHER_INPUT, cut, refusal, rename, stored


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    message = refusal(tmp_path / "dino-s61")
    assert "no such file or backbone" in message
    assert all(name in message for name in BACKBONES)


def test_a_folder_without_weights(tmp_path):
    assert "no model.safetensors in this folder" in refusal(tmp_path)


def test_backbones_outside_the_hub_say_where_to_get_them():
    assert re.search(r"ibot-s16: not published .* github\.com/bytedance/ibot.* like='ibot-s16'", refusal("ibot-s16"))


GARBAGE = {
    "model.txt": (b"x", r"unknown format; weights must be \.safetensors, or tensors"),
    "empty.safetensors": (b"", "not a readable safetensors file"),
    "pointer.safetensors": (b"version https://git-lfs.github.com/spec/v1\n", "not a readable safetensors file"),
    "noise.safetensors": (bytes(range(256)), "not a readable safetensors file"),
    "none.safetensors": (b"\x02" + bytes(7) + b"{}", "contains no weights"),
    "empty.pth": (b"", r"not a file of plain tensors \(EOFError\)"),
    "page.pth": (b"<html>not found</html>", r"not a file of plain tensors \(.{1,60}\)\. .* as safetensors"),
    "list.safetensors.index.json": (b"[]", "not an index of safetensors shards"),
    "empty.safetensors.index.json": (b"{}", "not an index of safetensors shards"),
    "cut.safetensors.index.json": (b"{", "not an index of safetensors shards"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_files_without_weights(name, tmp_path):
    content, message = GARBAGE[name]
    (tmp_path / name).write_bytes(content)
    assert re.search(f"{re.escape(name)}: {message}", refusal(tmp_path / name))


def test_a_truncated_file(tmp_path):
    save_backbone(small_vit(), tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    for size in (len(content) - 1, 100, 8, 7):
        (tmp_path / "part.safetensors").write_bytes(content[:size])
        assert "is the download complete" in refusal(tmp_path / "part.safetensors")


class Bomb:
    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return open, (self.target, "w")


def test_no_code_from_a_pickle_is_run(tmp_path):
    crater, path = tmp_path / "crater", tmp_path / "model.pth"
    torch.save({"model": small_vit().state_dict(), "args": Bomb(crater)}, path)
    assert re.search(r"not a file of plain tensors \(.*open.*\)\. .* save its state dict as safetensors", refusal(path))
    assert not crater.exists()
    torch.load(path, weights_only=False)["args"].close()
    assert crater.exists()  # the file is really dangerous


TENSORLESS = [
    ({"epoch": 3}, "contains no tensors, only epoch$"),
    ({}, "contains no tensors$"),
    ([1], "contains a list, not a"),
]


@pytest.mark.parametrize(("content", "message"), TENSORLESS)
def test_pickles_without_tensors(content, message, tmp_path):
    torch.save(content, tmp_path / "model.pth")
    assert re.search(message, refusal(tmp_path / "model.pth"))


def test_weights_of_another_architecture(tmp_path):
    path = stored({"conv1.weight": torch.ones(4, 3, 3, 3), "fc.weight": torch.ones(2, 4)}, tmp_path / "r.safetensors")
    assert re.search(r"not a known Vision Transformer.*2 tensors.*fc\.weight", refusal(path))


def without(name, tensors):
    return {key: tensor for key, tensor in tensors.items() if key != name}


def cut_qkv(tensors):
    return cut(tensors, "attn.qkv", ["attn.q", "attn.k", "attn.v"])


MISFITS = {
    r"1 missing: blocks\.1\.norm1\.bias": lambda t: without("blocks.1.norm1.bias", t),
    r"1 missing: blocks\.0\.attn\.qkv\.bias": lambda t: without("blocks.0.attn.qkv.bias", t),
    r"1 missing: blocks\.1\.attn\.qkv\.weight": lambda t: without("blocks.1.attn.k.weight", cut_qkv(t)),
    r"1 missing: blocks\.1\.attn\.qkv\.bias": lambda t: without("blocks.1.attn.q.bias", cut_qkv(t)),
    r"1 unexpected: dist_token": lambda t: t | {"dist_token": torch.ones(1)},
    r"1 unexpected: blocks\.last\.scale": lambda t: t | {"blocks.last.scale": torch.ones(1)},
    r"2 missing: norm\.bias, .* 2 unexpected: last\.bias": lambda t: rename(t, {r"^norm\.": "last."}),
    r"1 of another shape: norm\.bias is \[33\] instead of \[32\]": lambda t: t | {"norm.bias": torch.ones(33)},
}


@pytest.mark.parametrize("message", MISFITS)
def test_a_vit_that_does_not_fit(message, tmp_path):
    vit = small_vit()
    path = stored(MISFITS[message](vit.state_dict()), tmp_path / "model.safetensors")
    message_shown = refusal(path, config=vit.config)
    assert re.search(message, message_shown)
    assert "It looks like a ViT of width 32, 3 blocks, patch 8, 2 registers" in message_shown


def test_a_header_of_another_version(tmp_path):
    header = {METADATA_KEY: json.dumps({"input": {}, "shape": "round"})}
    path = stored(small_vit().state_dict(), tmp_path / "model.safetensors", header)
    assert re.search(r"header is from another version of Sightline \(.*shape", refusal(path))


def test_a_file_that_fits_no_backbone_or_one_or_several(tmp_path, monkeypatch):
    vit = small_vit()
    path = stored(vit.state_dict(), tmp_path / "model.safetensors")
    assert re.search(r"contains a ViT of width 32, .* registers\. Give its architecture with config=$", refusal(path))
    assert re.search(r"like='vit': no such backbone; known .*dinov2-s14", refusal(path, like="vit"))
    monkeypatch.setitem(BACKBONES, "tiny", Backbone("tiny", vit.config))
    assert load_backbone(path).config == vit.config
    monkeypatch.setitem(BACKBONES, "tiny-other", Backbone("tiny-other", replace(vit.config, input=OTHER_INPUT)))
    assert re.search(r"\(like tiny, tiny-other\)\. Their preprocessing differs; choose one with like=$", refusal(path))
    assert load_backbone(path, like="tiny-other").config.input == OTHER_INPUT
    assert load_backbone(path, like="tiny").origin.name == "tiny"
