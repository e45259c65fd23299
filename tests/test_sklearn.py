"""Sightline as a scikit-learn estimator."""

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score

from sightline import SightlineClassifier
from sightline.errors import UserError

QUICK = {"backbone": "random:nano", "size": 32, "batch": 8, "device": "cpu"}


def coloured(count=24):
    """Red and blue images."""
    generator = np.random.default_rng(0)
    labels = np.arange(count) % 2
    colours = np.where(labels[:, None] == 0, (200, 30, 30), (30, 30, 200))
    noise = generator.integers(-20, 20, (count, 32, 32, 3))
    return (colours[:, None, None] + noise).astype(np.uint8), labels


@pytest.fixture(scope="module")
def fitted():
    images, labels = coloured()
    return SightlineClassifier("probe", **QUICK).fit(images, np.where(labels, 10, 2))


def test_fit_predict_and_score(fitted):
    images, labels = coloured()
    assert is_classifier(fitted)
    assert fitted.classes_.tolist() == [2, 10]  # as numbers, not as words
    assert fitted.predict(images).tolist() == np.where(labels, 10, 2).tolist()
    assert fitted.score(images, np.where(labels, 10, 2)) == 1
    probabilities = fitted.predict_proba(images)
    assert probabilities.shape == (24, 2)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    assert (probabilities.argmax(axis=1) == labels).all()
    assert fitted.predict_proba([]).shape == (0, 2)


def test_images_may_be_paths(fitted, tmp_path):
    images, labels = coloured(8)
    paths = [tmp_path / f"{i}.png" for i in range(8)]
    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image).save(path)
    other = SightlineClassifier("probe", **QUICK).fit([str(p) for p in paths], [("red", "blue")[k] for k in labels])
    assert set(other.predict(paths)) == {"red", "blue"}
    assert other.model_.predict(paths[0]).name == "red"
    assert not list(other.run_.parent.glob("images/*"))  # none is copied


def test_parameters_are_read_set_and_cloned():
    classifier = SightlineClassifier("erm", "random:nano", epochs=2, settings={"balance": "classes"})
    assert classifier.get_params()["epochs"] == 2
    copy = clone(classifier.set_params(epochs=3, seed=5))
    assert copy.get_params() == classifier.get_params()
    assert copy.epochs == 3
    with pytest.raises(NotFittedError):
        copy.predict([np.zeros((8, 8, 3), np.uint8)])
    with pytest.raises(ValueError, match="Invalid parameter"):
        copy.set_params(colour=1)


def test_it_works_inside_cross_validation():
    images, labels = coloured(16)
    assert cross_val_score(SightlineClassifier("probe", **QUICK), images, labels, cv=2).mean() == 1


def test_groups_and_masks_reach_the_run(tmp_path):
    images, labels = coloured()
    masks = np.zeros((24, 32, 32), bool)
    masks[:, 8:24, 8:24] = True
    configured = SightlineClassifier(
        "early-mask", **QUICK, epochs=1, settings={"sight": "pixels"}, folder=tmp_path / "kept"
    )
    configured.fit(images, labels, groups=labels // 1 + np.arange(24) % 2, masks=list(masks))
    facts = configured.model_.run.facts
    assert facts["config"]["sight"] == "pixels"
    assert len(facts["data"]["group_names"]) > 1
    assert (tmp_path / "kept" / "run" / "best.safetensors").is_file()
    with pytest.raises(UserError, match="not empty"):
        configured.fit(images, labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "magic"}, "method='magic': no such method; choose one of a2"),
        ({"settings": {"colour": 1}}, "colour: not a setting of probe, which has"),
        ({"epochs": 3}, "epochs: not a setting of probe"),
        ({"settings": {"out": "x"}}, "out: not a setting of probe"),
        ({"validation": 1.0}, "validation=1.0: must be a fraction between 0 and 1"),
        ({"method": "dfr"}, "groups: dfr needs a group for each image; use fit(..., groups=...)"),
        ({"select": "worst-group"}, "groups: select='worst-group' needs a group"),
        ({"method": "erm", "settings": {"balance": "groups"}}, "groups: balance='groups' needs a group"),
    ],
)
def test_invalid_settings_are_rejected(changes, message):
    images, labels = coloured(8)
    with pytest.raises(UserError) as error:
        SightlineClassifier(**{"method": "probe"} | QUICK | changes).fit(images, labels)
    assert message in str(error.value)


def test_labels_of_the_wrong_number_are_rejected():
    images, labels = coloured(8)
    with pytest.raises(UserError, match="y: 7 for 8 images"):
        SightlineClassifier("probe", **QUICK).fit(images, labels[:7])
    with pytest.raises(UserError, match="at least two classes"):
        SightlineClassifier("probe", **QUICK).fit(images, np.zeros(8))
    with pytest.raises(UserError, match="groups: 1 for 8 images"):
        SightlineClassifier("probe", **QUICK).fit(images, labels, groups=["a"])
