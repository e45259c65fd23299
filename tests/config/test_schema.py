"""run.json and intervention.json that were damaged or made by a stranger: one line, before anything is built."""

import copy
import json
import re
import time

import pytest

from sightline.config.schema import RunFacts, json_misfit
from sightline.errors import UserError
from sightline.interventions.file import Intervention
from sightline.load import load
from sightline.train import train
from sightline.training.run_folder import read_run

from ..commands import typed
from ..small_runs import small


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory):
    return train(small(toy, tmp_path_factory.mktemp("schema") / "run", epochs=1))


def changed(facts: dict, place: str, value: object) -> dict:
    facts = copy.deepcopy(facts)
    *path, last = place.split(".")
    inside = facts
    for key in path:
        inside = inside[key]
    inside[last] = value
    return facts


WRONG = [
    ("method", 7, "method is 7: must be text"),
    ("method", "evil", "unknown method 'evil'"),
    ("config", [], "config is .*: must be an object"),
    ("config.batch", "many", "damaged .*--batch many: must be a whole number"),
    ("config.batch", -1, "damaged .*--batch -1: must be at least 1"),
    ("config.lr", None, "damaged .*--lr None: must be a number"),
    ("config.size", 10**9, "damaged .*--size 1000000000: must be at most 16,384"),
    ("config.select", ["x"], "damaged .*--select x: must be one of"),
    ("data", "here", "data is here: must be an object"),
    ("data.classes", "ab", "data.classes is ab: must be a list"),
    ("data.classes", [1, 2], r"data.classes\[0\] is 1: must be text"),
    ("data.counts", {"train": 3}, "data.counts.train is 3: must be an object"),
    ("data.counts", {"train": {"a": -3}}, "data.counts.train.a is -3: must not be negative"),
    ("seed", "zero", "seed is zero: must be a whole number"),
    ("format", "two", "format is two: must be a whole number"),
    ("format", 99, "made by a later version"),
    ("selection", 3, "selection is 3: must be an object"),
    ("vit", [1], r"vit is 1: must be an object"),
    ("vit.depth", 10**6, "impossible architecture .depth 1000000: must be at most 1,000"),
    ("vit.depth", 1000, "does not fit: width 96, 1,000 blocks need [0-9,]+ numbers, and the file has [0-9,]+"),
    ("vit.width", 10**9, "impossible architecture .width 1000000000: must be at most 65,536"),
    ("vit.width", 3 * 2**14, "does not fit: width 49,152"),
    ("vit.heads", 0, "impossible architecture .heads 0: must be at least 1"),
    ("vit.depth", 5, "not the weights that run.json describes"),
    ("vit.input", {}, None),
    ("vit.input", "big", "header is from another version"),
    ("vit.input.size", [2**14, 2**14], "impossible architecture .size 16384 16384: must be at most 4,096"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG, ids=[f"{p}={str(v)[:20]}" for p, v, _ in WRONG])
def test_a_wrong_run_is_refused_in_one_line(place, value, message, run, tmp_path):
    facts = json.loads((run / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(changed(facts, place, value)))
    (tmp_path / "best.safetensors").symlink_to(run / "best.safetensors")
    began = time.process_time()
    if message is None:
        load(tmp_path)
        return
    with pytest.raises(UserError, match=message) as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600
    assert time.process_time() - began < 5


@pytest.mark.parametrize("key", ["method", "config", "data", "seed"])
def test_missing_keys_are_named(key, run, tmp_path):
    facts = json.loads((run / "run.json").read_text())
    del facts[key]
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=rf"run\.json: damaged \(has no {key}\); restore it, or train again"):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", "7", '"x"', "{", "[" * 100_000, "{}", "\x00", '{"a": 1e999}'])
def test_what_is_not_a_run_is_one_line_from_every_command(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    for command in ("evaluate", "audit", "predict", "intervene"):
        code, _, err = typed(command, tmp_path, *([tmp_path] if command == "predict" else []))
        assert (code, err.count("\n")) == (2, 1), err
        assert re.search(r"run\.json: (damaged|cannot be read)", err)


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(UserError, match="larger than 64 MiB"):
        read_run(tmp_path)


BAD_INTERVENTIONS = [
    "[]", "7", "{}", "[" * 100_000, '{"drop": 3}', '{"drop": [-1]}', '{"drop": ["a"]}', '{"thresholds": "x"}',
    '{"drop": [1e99]}', '{"names": {"a": "b"}}', '{"names": {"1": 2}}', '{"facts": 3}', '{"quantile": "half"}',
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_INTERVENTIONS, ids=[text[:24] for text in BAD_INTERVENTIONS])
def test_a_wrong_intervention_is_refused_in_one_line(text, tmp_path):
    whole = {"drop": [], "force": [], "quantile": None, "thresholds": None, "names": {}, "facts": {}}
    try:
        values = whole | json.loads(text) if text not in ("{}", "[]", "7") else json.loads(text)
        text = json.dumps(values)
    except (RecursionError, TypeError):
        pass
    (tmp_path / "intervention.json").write_text(text)
    with pytest.raises(UserError, match=r"intervention\.json: damaged") as refused:
        Intervention.load(tmp_path / "intervention.json")
    assert len(str(refused.value)) < 400


def test_what_is_unknown_is_ignored():
    assert json_misfit({"later": object(), "data": {"more": 1}}, RunFacts) is None
