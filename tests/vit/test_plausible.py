"""Weights files that claim more than they hold: each is refused in one line, in little time and memory."""

import json
import re
import time
import zipfile
from dataclasses import asdict, replace

import pytest
import torch

from sightline.errors import UserError
from sightline.vit.backbones import BACKBONES
from sightline.vit.model import ViT, ViTConfig
from sightline.vit.plausible import parameter_count
from sightline.vit.weights import METADATA_KEY, load_backbone, save_backbone

from ..conftest import small_vit
from ..weight_files import refusal, stored


@pytest.mark.parametrize("name", ["augreg-ti16", "dinov2-s14-reg", "dinov3-s16plus", "clip-b32"])
def test_the_estimate_is_close_to_the_true_number(name):
    config = BACKBONES[name].config
    with torch.device("meta"):
        true = sum(p.numel() for p in ViT(config).parameters())
    assert 0.95 * true < parameter_count(config) < 1.02 * true


ABSURD = [
    ({"depth": 10**6}, "depth 1000000: must be at most 1,000"),
    ({"width": 10**9}, "width 1000000000: must be at most 65,536"),
    ({"depth": 1000}, r"does not fit: width 32, 1,000 blocks need [\d,]+ numbers, and the file has [\d,]+$"),
    ({"width": 2**16}, "does not fit: width 65,536, 3 blocks"),
    ({"classes": -1}, "classes -1: must be at least 0|classes -1: must not be negative"),
    ({"heads": 5}, "heads 5: must divide the width, 32"),
    ({"depth": "3"}, "depth 3: must be a whole number"),
    ({"grid": [10**6, 10**6]}, "grid .*: must be at most 4,096"),
    ({"patch": 0}, "patch 0: must be at least 1"),
    ({"norm_eps": float("nan")}, "norm_eps nan: must be a finite number"),
    ({"mlp": "evil"}, "mlp evil: must be one of gelu"),
    ({"input": {"size": [10**9, 1]}}, "size 1000000000 1: must be at most 4,096"),
    ({"input": [1]}, "header is from another version"),
]


@pytest.mark.parametrize(("changes", "message"), ABSURD, ids=[str(changes) for changes, _ in ABSURD])
def test_absurd_headers_are_refused_before_anything_is_built(changes, message, tmp_path):
    vit = small_vit()
    header = json.loads(json.dumps(asdict(vit.config))) | changes
    path = stored(vit.state_dict(), tmp_path / "model.safetensors", {METADATA_KEY: json.dumps(header)})
    began = time.process_time()
    assert re.search(message, refusal(path))
    assert time.process_time() - began < 5


def test_a_header_that_nests_deeply(tmp_path):
    header = {METADATA_KEY: "[" * 100_000}
    assert "header is from another version" in refusal(
        stored(small_vit().state_dict(), tmp_path / "m.safetensors", header)
    )


def test_containers_that_contain_themselves(tmp_path):
    content = {"epoch": 1}
    content["model"] = content
    torch.save(content, tmp_path / "loop.pth")
    assert re.search("more than 8 containers within each other", refusal(tmp_path / "loop.pth"))


def test_shared_nested_lists(tmp_path):
    laughs = ["ha"]
    for _ in range(40):
        laughs = [laughs, laughs]
    torch.save({"model": {"list": laughs}, "list": [laughs] * 10}, tmp_path / "laughs.pth")
    began = time.process_time()
    message = refusal(tmp_path / "laughs.pth")
    assert len(message) < 500
    assert time.process_time() - began < 5


def test_tensors_that_repeat_one_number(tmp_path):
    weights = small_vit().state_dict() | {"head.weight": torch.zeros(1).expand(100_000, 10_000)}
    torch.save(weights, tmp_path / "thin.pth")
    assert (tmp_path / "thin.pth").stat().st_size < 10**6
    assert "head.weight [100000, 10000] is not stored in full" in refusal(tmp_path / "thin.pth")


def test_archives_that_unpack_to_more_than_they_are(tmp_path):
    torch.save(small_vit().state_dict(), tmp_path / "plain.pth")
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
        for member in plain.infolist():
            bomb.writestr(member.filename, plain.read(member), zipfile.ZIP_DEFLATED)
        bomb.writestr("archive/data/99", bytes(50_000_000), zipfile.ZIP_DEFLATED)
    assert "not a file of PyTorch (it unpacks to" in refusal(tmp_path / "bomb.pth")
    assert load_backbone(tmp_path / "plain.pth", config=small_vit().config).config == small_vit().config


def test_shards_outside_the_folder(tmp_path):
    save_backbone(small_vit(), tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), 7):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "not an index of safetensors shards" in refusal(index)


def test_python_refuses_the_same_architectures():
    with pytest.raises(UserError, match=r"^depth 1000000: must be at most 1,000$"):
        ViTConfig(depth=10**6)
    with pytest.raises(UserError, match=r"^heads 7: must divide the width, 384$"):
        replace(ViTConfig(), heads=7)
