"""Attentive probes: their pools by hand, and from the command line to predictions."""

import csv
import json

import pytest
import torch
import torch.nn.functional as F

from sightline.config import Aim, Ep
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.train import train
from sightline.what.attentive import AimPool, BatchStandardize, EpPool
from sightline.where.relevance import has_relevance_map

from ..commands import typed
from ..small_runs import Stop, files, in_two_processes, log_of, stopped_after

SETTINGS = {"backbone": "random:nano", "size": 32, "epochs": 2, "batch": 32, "workers": 0, "device": "cpu"}


def tokens(count: int = 5, width: int = 24) -> torch.Tensor:
    return torch.randn(3, count, width, generator=torch.Generator().manual_seed(0))


def test_tokens_are_standardised_like_batch_norm():
    ours, theirs = BatchStandardize(24), torch.nn.BatchNorm1d(24, eps=1e-6, affine=False)
    x = 3 + 2 * tokens()
    torch.testing.assert_close(ours(x), theirs(x.transpose(1, 2)).transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.mean, theirs.running_mean, rtol=1e-4, atol=1e-5)
    assert 1 < float(ours.variance.mean()) < 2  # on the way from 1 to 4
    ours.eval()
    torch.testing.assert_close(ours(x), (x - ours.mean) / (ours.variance + 1e-6).sqrt())


def test_aim_is_attention_of_one_query_with_several_heads():
    pool, x = AimPool(24, heads=3).eval(), tokens()
    pooled, attention = pool(x)
    x = x / (1 + 1e-6) ** 0.5
    keys, values = pool.key(x), pool.value(x)
    q, k, v = (one.view(3, -1, 3, 8).transpose(1, 2) for one in (pool.query.expand(3, 1, 24), keys, values))
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1)
    torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(attention.sum(dim=2), torch.ones(3, 3))


def test_each_query_of_ep_pools_channels_of_its_own():
    pool, x = EpPool(24, queries=4), tokens()
    pooled, attention = pool(x)
    values, parts = pool.value(x), []
    for q in range(4):
        weights = (x @ pool.query[q] / 24**0.5).softmax(dim=1)
        torch.testing.assert_close(attention[:, q], weights)
        parts.append((weights[..., None] * values[..., 6 * q : 6 * q + 6]).sum(dim=1))
    torch.testing.assert_close(pooled, pool.norm(torch.cat(parts, dim=1)))


@pytest.mark.parametrize("kind", [Aim, Ep])
def test_from_the_command_line_to_predictions_with_a_frozen_backbone(kind, toy, tmp_path):
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    code, _, err = typed("train", kind.method, toy, "--out", tmp_path / "whole", *flags)
    assert code == 0, err
    with pytest.raises(Stop), stopped_after(4):
        train(kind(toy, out=tmp_path / "stopped", save_minutes=0.0, **SETTINGS))
    train(kind(toy, out=tmp_path / "stopped", save_minutes=0.0, resume=True, **SETTINGS))
    assert files(tmp_path / "whole") == files(tmp_path / "stopped")
    model = load(tmp_path / "whole")
    with (tmp_path / "whole" / "predictions" / "test.csv").open(newline="") as file:
        line = next(csv.DictReader(file))
    assert model.predict(toy / line["image"]).name == line["predicted"]
    images = torch.rand(2, 3, *model.expects.size)
    (attention,) = model.method.maps(images).values()
    torch.testing.assert_close(attention.flatten(1).sum(dim=1), torch.ones(2))
    printed = typed("verify", tmp_path / "whole")[1]
    assert "No certificate: its sight hides nothing" in printed
    assert "keeps it" not in printed
    assert not has_relevance_map(model.method), "its prediction does not come through a CLS token"
    untouched = load_backbone_of(tmp_path / "whole")
    for name, tensor in model.method.backbone.state_dict().items():
        if not name.startswith("head."):
            torch.testing.assert_close(tensor, untouched[name], rtol=0, atol=0)


def load_backbone_of(run) -> dict[str, torch.Tensor]:
    from sightline.vit.weights import load_backbone

    classes = json.loads((run / "run.json").read_text())["data"]["classes"]
    return load_backbone("random:nano", classes=len(classes), seed=0).state_dict()


def test_heads_and_queries_must_divide_the_width(toy, tmp_path):
    with pytest.raises(UserError, match="--num-heads 11: must divide random:nano's width, 96, such as 8"):
        train(Aim(toy, out=tmp_path / "a", num_heads=11, **SETTINGS))
    with pytest.raises(UserError, match="--queries 0: must be at least 1"):
        train(Ep(toy, out=tmp_path / "b", queries=0, **SETTINGS))


@pytest.mark.slow
def test_two_processes_standardise_like_one(toy, tmp_path):
    one = train(Aim(toy, out=tmp_path / "one", **SETTINGS))
    in_two_processes(Aim(toy, out=tmp_path / "two", **SETTINGS))
    for mine, theirs in zip(log_of(one), log_of(tmp_path / "two"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
