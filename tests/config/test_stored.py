"""Configurations in run.json: the table of renamed settings, and runs of format 1 that load, evaluate and resume."""

import csv
import json
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from sightline.config import Evaluate, Ifam, Matrix, Shaping
from sightline.config.stored import FORMAT, RENAMED, renamed_facts, renamed_keys, stored_config
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.evaluate import evaluate
from sightline.methods import METHODS
from sightline.train import train
from sightline.training.run_folder import read_run

OLD_RUNS = Path(__file__).parent.parent / "fixtures" / "format1"


def names_in(kind: type, prefix: str = "") -> set[str]:
    """The settings of a configuration, those of nested dataclasses with a prefix."""
    names = set()
    hints = get_type_hints(kind)
    for field in fields(kind):
        names.add(prefix + field.name)
        if is_dataclass(hints[field.name]):
            names |= names_in(hints[field.name], f"{field.name}.")
    return names


KINDS = {name: entry.config for name, entry in METHODS.items()} | {"matrix": Matrix}
SETTINGS = {method: names_in(kind) for method, kind in KINDS.items()}


def renamed_of(method: str) -> dict[str, str]:
    """Old and new names with their prefixes, as they apply to a method."""
    table = RENAMED[""] | RENAMED.get(method, {})
    return {old: old.rpartition(".")[0] + "." * ("." in old) + new for old, (new, _) in table.items()}


def test_every_new_name_is_a_setting_and_no_old_name_is():
    for old, new in renamed_of("").items():
        assert any(new in names for names in SETTINGS.values()), f"{old} -> {new}: no such setting"
    for method, table in RENAMED.items():
        for old in table:
            assert not method or renamed_of(method)[old] in SETTINGS[method], f"{method}: {old}"
    for method, names in SETTINGS.items():
        stale = {old for old, new in renamed_of(method).items() if old != new and old in names}
        assert stale <= ({"size"} if method == "pretrain" else set()), "a name is not reused with another meaning"


@pytest.mark.parametrize("method", sorted(SETTINGS))
def test_present_names_are_not_renamed_again(method):
    """Except for pretrain, whose --size became --arch and --pixels became --size."""
    values = {name: None for name in SETTINGS[method] if "." not in name}
    expected = set(values) - {"size"} if method == "pretrain" else set(values)
    assert set(renamed_keys(method, values)) == expected


def test_values_are_renamed_as_well():
    old = {"balance": "loss", "tune_selector": "nothing", "soft": False, "shaping": {"orthogonal": "channels"}}
    expected = {"balance": "logit-adjustment", "tune_selector": "none", "soft_mask": False}
    assert renamed_keys("ifam", old) == expected | {"shaping": {"orthogonality_over": "channels"}}
    assert renamed_keys("ifam", {"tune_selector": True}) == {"tune_selector": "all"}
    assert renamed_keys("early-mask", {"pixels": True}) == {"sight": "pixels"}
    assert renamed_keys("pretrain", {"size": "s", "pixels": 224}) == {"arch": "s", "size": 224}
    assert renamed_keys("zs", {"clip": "openclip-l14"}) == {"clip": "openclip-l14"}
    assert renamed_keys("erm", {"clip": 2.0}) == {"clip_grad": 2.0}
    assert renamed_keys("robustvit", {"bright": "thing", "answer": "confidence"}) == {
        "mask_marks": "object", "classification_target": "prediction",
    }  # fmt: skip


def test_stored_settings_are_typed_again():
    values = {"data": "x", "out": "y", "shaping": {"entropy": 0.0, "gone": 1}, "gone": 2}
    config = stored_config(Ifam, values)
    assert (config.data, config.out, config.shaping) == (Path("x"), Path("y"), Shaping(entropy=0.0))
    assert config.sight == "patches", "what iFAM did before there was a choice"


# ---- runs of format 1 ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def old_home(tmp_path_factory) -> Path:
    """Runs made before the settings were renamed, with their data and backbone, in a folder of their own."""
    home = tmp_path_factory.mktemp("format1")
    shutil.copytree(OLD_RUNS, home, dirs_exist_ok=True)
    for path in home.glob("*/run.json"):
        path.write_text(path.read_text().replace("HOME", str(home)))
    write_toy(home / "toy", train=32, val=16, test=16, size=32)
    return home


def predictions(path: Path) -> dict[str, list[float]]:
    with path.open(newline="") as file:
        return {
            row["image"]: [float(row[name]) for name in row if name.startswith("p_")] for row in csv.DictReader(file)
        }


def assert_same_predictions(run: Path) -> None:
    found, expected = predictions(run / "predictions" / "test.csv"), predictions(run / "predictions" / "expected.csv")
    assert found.keys() == expected.keys()
    for image, probabilities in expected.items():
        assert found[image] == pytest.approx(probabilities, abs=1e-5)


def test_keys_of_run_json_that_were_renamed_after_format_2():
    old = {
        "look_size": 48,
        "pictures": 12,
        "selection": {"metric": "auc", "pictures": {"a": 1}},
        "data": {"pictures": 3},
    }
    new = {
        "selector_size": 48,
        "images": 12,
        "selection": {"metric": "auc", "images": {"a": 1}},
        "data": {"pictures": 3},
    }
    assert renamed_facts(old) == new
    assert renamed_facts({"selection": None}) == {"selection": None}


def test_a_run_of_format_1_loads_and_evaluates(old_home):
    run = old_home / "early-mask"
    assert "format" not in json.loads((run / "run.json").read_text())
    assert read_run(run).facts["format"] == FORMAT
    assert evaluate(Evaluate(run, workers=0, device="cpu")) == run
    assert_same_predictions(run)


def test_a_run_of_format_1_resumes(old_home):
    """Interrupted after 3 of 4 steps, it ends with the predictions of the uninterrupted run."""
    run = old_home / "ifam"
    config = Ifam(
        old_home / "toy", str(old_home / "tiny.safetensors"), run, parts=2, epochs=2, batch=16, workers=0, device="cpu",
        resume=True, selector="learned", guide_radius=16,
    )  # fmt: skip
    assert train(config) == run
    assert_same_predictions(run)
    assert len((run / "log.jsonl").read_text().splitlines()) == 2


def test_a_run_of_a_later_format_is_an_error(old_home, tmp_path):
    facts = json.loads((old_home / "early-mask" / "run.json").read_text()) | {"format": FORMAT + 1}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="later version of Sightline"):
        read_run(tmp_path)
