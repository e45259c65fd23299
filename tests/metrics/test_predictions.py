"""Predictions round-trip through their CSV file, and a faulty file is an error that names the line."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.errors import UserError
from sightline.metrics.predictions import Predictions

from ..answering import PLACES, answered, made, scored


def test_predictions_round_trip_through_csv_with_awkward_names(tmp_path):
    classes = ("Möwe, graue", 'der "Rest"', "鳥")
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 30)
    predictions = Predictions.from_logits(
        [f"Ordner, {k}/bild\n{k}é.jpg" for k in range(30)],
        labels,
        generator.normal(0, 20, (30, 3)).astype(np.float32),
        classes,
        labels * 2 + (np.arange(30) % 2),
        tuple(f"{name}; {place}" for name in classes for place in ("Land", "Wasser, tief")),
        "prüfung",
        {"background": ["mixed_same", "mixed, rand"] * 15, "": ["leer"] * 30},
    )
    predictions.predicted[3] = -1
    predictions.save_csv(tmp_path / "predictions.csv")
    for again in (
        Predictions.load_csv(tmp_path / "predictions.csv"),
        Predictions.load_csv(tmp_path / "predictions.csv", split="prüfung", group_names=predictions.group_names),
    ):
        assert (again.images, again.classes, again.split) == (predictions.images, classes, "prüfung")
        assert again.group_names == predictions.group_names
        for name in ("labels", "predicted", "probabilities", "groups"):
            assert np.array_equal(getattr(again, name), getattr(predictions, name)), name
            assert getattr(again, name).dtype == getattr(predictions, name).dtype
        assert again.extra == predictions.extra
    assert {path.name for path in tmp_path.iterdir()} == {"predictions.csv", "predictions.csv.sha256"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=2, unique=True))
def test_any_names_round_trip(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("predictions") / "predictions.csv"
    labels = np.arange(len(names))
    predictions = answered(labels, labels > 0, tuple(names), labels, tuple(names), split=names[0])
    predictions.save_csv(path)
    again = Predictions.load_csv(path, group_names=names)
    assert (again.classes, again.group_names, again.split) == (tuple(names), tuple(names), names[0])
    assert np.array_equal(again.predicted, predictions.predicted)


def test_the_file_has_the_documented_columns(tmp_path):
    made((1, 1, 1, 0), (1, 1, 1, 1)).save_csv(tmp_path / "predictions.csv")
    lines = (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "image,label,predicted,group,split,p_landbird,p_waterbird"
    assert lines[4] == "000003.jpg,waterbird,landbird,waterbird on water,test,0.899999976,0.100000001"


HEADER = "image,label,predicted,group,p_cat,p_dog\n"


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", ":1:", "no column image or label or predicted"),
        ("image,label,p_cat,p_dog\n", ":1:", "no column predicted"),
        ("image,label,predicted\n", ":1:", "the last columns must be the probabilities"),
        ("image,p_cat,p_dog,label,predicted\n", ":1:", "the last columns must be the probabilities"),
        ("image,label,predicted,group,group,p_cat,p_dog\n", ":1:", "duplicate column 'group'"),
        (HEADER, ":", "contains no predictions"),
        (HEADER + "a,cat,dog,x,0.1,0.9\nb,cat,dog,x,0.1\n", ":3:", "5 values, but the header has 6 columns"),
        (HEADER + "a,cat,dog,x,0.1,0.9\nb,cow,dog,x,0.1,0.9\n", ":3:", "unknown label 'cow'; expected one of cat, dog"),
        (HEADER + "\na,cat,cow,x,0.1,0.9\n", ":3:", "unknown predicted 'cow'"),
        (HEADER + 'a,cat,dog,"x\ny",0.1,0.9\nb,cat,dog,x,0.1,much\n', ":4:", "a probability is not a number"),
        (HEADER + "a,,dog,x,0.1,0.9\n", ":2:", "unknown label ''"),
    ],
)
def test_a_faulty_file_is_an_error_that_names_the_line(tmp_path, text, place, message):
    path = tmp_path / "predictions.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refusal:
        Predictions.load_csv(path)
    assert str(refusal.value).startswith(f"{path}{place}")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_unknown_group_is_an_error_that_names_the_line(tmp_path):
    made((1, 1, 1, 0), (1, 1, 1, 1)).save_csv(tmp_path / "predictions.csv")
    with pytest.raises(UserError, match=r"predictions\.csv:4: unknown group 'waterbird on land'"):
        Predictions.load_csv(tmp_path / "predictions.csv", group_names=PLACES[:2])


def test_a_file_from_a_spreadsheet_is_read(tmp_path):
    text = "image,label,predicted,p_cat,p_dog\r\na.jpg,cat,dog,0,1\r\n"
    (tmp_path / "predictions.csv").write_text(text, encoding="utf-8-sig", newline="")
    predictions = Predictions.load_csv(tmp_path / "predictions.csv")
    assert (predictions.images, predictions.classes, predictions.groups, predictions.split) == (
        ["a.jpg"],
        ("cat", "dog"),
        None,
        "predictions",
    )


def test_one_of_several_splits_must_be_selected(tmp_path):
    path = tmp_path / "predictions.csv"
    lines = ["image,label,predicted,split,p_cat,p_dog", "a,cat,cat,val,1,0", "b,dog,dog,test,0,1", "c,dog,cat,test,1,0"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert Predictions.load_csv(path, split="test").images == ["b", "c"]
    with pytest.raises(UserError, match=r"contains several splits \(val, test\)"):
        Predictions.load_csv(path)
    with pytest.raises(UserError, match="no predictions for split 'train'"):
        Predictions.load_csv(path, split="train")


def test_files_that_cannot_be_read_or_written_are_errors(tmp_path):
    predictions = made((1, 1, 1, 0), (1, 1, 1, 1))
    with pytest.raises(UserError, match="cannot be read"):
        Predictions.load_csv(tmp_path / "nowhere.csv")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be"):
        predictions.save_csv(tmp_path / "file" / "predictions.csv")


def test_an_interrupted_write_leaves_the_old_file_unchanged(tmp_path):
    predictions = made((1, 1, 1, 0), (1, 1, 1, 1))
    predictions.save_csv(tmp_path / "predictions.csv")
    before = (tmp_path / "predictions.csv").read_bytes()
    with pytest.raises(AssertionError, match="p_ is for probabilities"):
        replace(predictions, extra={"p_value": ["", "", "", ""]}).save_csv(tmp_path / "predictions.csv")
    assert (tmp_path / "predictions.csv").read_bytes() == before


def test_a_diverged_model_and_an_empty_split_are_errors():
    with pytest.raises(UserError, match=r"1 of 2 predictions are not finite \(the first: 000001.jpg\)"):
        scored([0.0, np.inf], [0, 1])
    with pytest.raises(UserError, match="nothing to evaluate: split 'test' has no images"):
        answered(np.zeros(0, dtype=int), np.zeros(0, dtype=bool))
