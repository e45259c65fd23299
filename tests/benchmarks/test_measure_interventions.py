"""What interventions do to a trained run is measured once, image by image."""

import csv
import json
import sys
from pathlib import Path

import numpy as np

from sightline.config import Ifam
from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.interventions.file import Intervention
from sightline.metrics.predictions import Predictions
from sightline.train import train

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from collect import interventions_of_row
from evidence import FOUND, SIGHT, SIGHTS, TEST, Evidence, outcomes_in
from jobs import lacking
from measure_interventions import cached, keypoints_of, measure_interventions, on_noise
from rows import Row, folder_of
from study import Context

# ---- measuring -------------------------------------------------------------------------------------------------------


def test_a_run_is_measured_under_every_intervention_once(tmp_path):
    data = write_toy(tmp_path / "toy", train=24, val=12, test=16, size=32)
    settings = {"size": 32, "epochs": 1, "batch": 12, "workers": 0, "device": "cpu", "sight": "patches", "parts": 2}
    path = folder_of(tmp_path / "runs" / "object", "iFAM K=8", 0)
    train(Ifam(data, out=path, backbone="random:nano", **settings))
    row = Row("object", "iFAM K=8", "ifam", measures=("interventions",))
    context = Context({}, {}, tmp_path / "runs", tmp_path / "cache", device="cpu", workers=0, noise=1)
    assert len(lacking(context, row)) == 4
    measure_interventions(context, row)
    assert lacking(context, row) == []
    found = json.loads((path / FOUND).read_text())
    assert set(found["searches"]) == {"parts", "quantile", "both"}
    assert found["searches"]["quantile"]["drop"] == []
    assert found["objects"] is None
    assert found["noise"]["searches"] == 1
    known = outcomes_in(path)
    assert list(known.correct) == ["plain", "q0.99", "q0.97", "parts", "quantile", "both", "parts, q0.99"]
    predicted = Predictions.load_csv(path / "predictions" / "test.csv", split="test")
    assert list(known.correct["plain"].values()) == predicted.correct.astype(float).tolist()
    figures = json.loads((path / SIGHT).read_text())["all"]
    assert list(figures) == ["plain", "q0.99", "q0.97"]
    assert figures["q0.97"]["coverage"]["value"] <= figures["plain"]["coverage"]["value"]
    table = interventions_of_row(Evidence(tmp_path / "runs"), "object", "iFAM K=8")
    assert {"all", "worst group", "pixel_iou", "coverage"} <= set(table["figures"]["q0.99"])
    times = [(path / name).stat().st_mtime_ns for name in (FOUND, TEST, SIGHT, SIGHTS)]
    measure_interventions(context, row)
    assert times == [(path / name).stat().st_mtime_ns for name in (FOUND, TEST, SIGHT, SIGHTS)]


def test_of_every_drawn_object_it_is_measured_how_much_each_part_has(tmp_path):
    """Here the objects are the birds themselves, by their background."""
    data = write_toy(tmp_path / "toy", train=24, val=12, test=16, size=32)
    with (data / "rows.csv").open(newline="") as file:
        lines = [line | {"object_mask": line["mask"]} for line in csv.DictReader(file)]
    with (data / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    settings = {"size": 32, "epochs": 1, "batch": 12, "workers": 0, "device": "cpu", "sight": "patches", "parts": 2}
    path = folder_of(tmp_path / "runs" / "object", "iFAM K=8", 0)
    train(Ifam(data, out=path, backbone="random:nano", **settings))
    context = Context({}, {}, tmp_path / "runs", tmp_path / "cache", device="cpu", workers=0)
    measure_interventions(context, Row("object", "iFAM K=8", "ifam"))
    found = json.loads((path / FOUND).read_text())["objects"]
    places = {line["group_place"] for line in lines}
    assert {*found} == places
    assert sum(one["n"] for one in found.values()) == 12
    for one in found.values():
        assert one["part"] == int(np.argmax(one["share_of_the_object"]))
        assert 0 <= sum(one["share_of_the_object"]) <= 1 + 1e-6
    assert max(max(one["share_of_the_object"]) for one in found.values()) > 0


def answers_of(right: np.ndarray) -> Predictions:
    labels, groups = np.arange(len(right)) % 2, np.arange(len(right)) % 4
    logits = 4.0 * np.eye(2)[np.where(right, labels, 1 - labels)]
    names = ("a/x", "b/x", "a/y", "b/y")
    return Predictions.from_logits([f"{i}.png" for i in range(len(right))], labels, logits, ("a", "b"), groups, names)


def test_the_same_intervention_is_asked_about_once_and_shuffled_labels_show_no_gain():
    asked = []

    def looked(some):
        asked.extend((one.drop, one.quantile) for one in some)
        # Without part 1 all is right, which shuffling must make worthless.
        return [answers_of(np.full(200, 1 in one.drop) | (np.arange(200) % 3 > 0)) for one in some]

    predictions = cached(looked)
    predictions([Intervention(), Intervention(drop=(1,))])
    noise = on_noise(predictions, 3, {0.99: (1.0, 1.0, 1.0)}, 3)
    assert noise == {"searches": 3, "found_something": 0}
    assert len(asked) == len(set(asked)) == 5


def test_key_points_of_birds_are_joined_by_number(tmp_path):
    (tmp_path / "cub224").mkdir()
    header = "id,path,split,x,y,w,h"
    (tmp_path / "cub224" / "cub.csv").write_text(f"{header}\n7,images/001.Tern/a.webp,train,1,1,5,5\n")
    points = ["id,part_id,part_name,x,y,visible", "7,1,back,3,4,1", "7,2,beak,0,0,0"]
    (tmp_path / "cub224" / "parts.csv").write_text("\n".join(points) + "\n")
    lines = ["image,label,split,bird", "original/a.jpg,001.Tern,train,7", "swapped/a.jpg,001.Tern,test,7"]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    found = keypoints_of(read_rows(tmp_path / "rows.csv"), tmp_path)
    assert found["keypoint_names"] == ("back", "beak")
    assert found["keypoints"].tolist() == [[[3, 4, 1], [0, 0, 0]]] * 2
