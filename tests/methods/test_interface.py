"""Every method of the table has what the rest of the package relies on."""

import dataclasses
import importlib

import pytest
import torch

from sightline.config import Train
from sightline.methods import METHODS, builder_of, maker_of, trainable_methods
from sightline.sight import Method, Prediction, Sight


def methods_in(module: str) -> list[type[Method]]:
    """The classes of a module of methods that are `Method`s and are defined there."""
    imported = importlib.import_module(f"sightline.methods.{module}")
    found = [value for value in vars(imported).values() if isinstance(value, type) and issubclass(value, Method)]
    return [value for value in found if value.__module__ == imported.__name__]


@pytest.mark.parametrize("name", METHODS)
def test_the_configuration_has_the_method_name_and_documented_flags(name):
    config = METHODS[name].config
    assert dataclasses.is_dataclass(config)
    assert config.__dataclass_params__.frozen
    assert config.method == name
    assert METHODS[name].help.endswith((".", ":"))
    assert {"data", "out", "seed", "device"} <= {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_can_be_made_and_built(name):
    assert callable(builder_of(name))
    if METHODS[name].command == "train":
        assert callable(maker_of(name))


@pytest.mark.parametrize("module", sorted({entry.module for entry in METHODS.values()} | {"pair"}))
def test_every_method_class_declares_blind_and_the_three_functions(module):
    for kind in methods_in(module):
        if kind.judge is not Method.judge:
            assert hasattr(kind, "blind"), f"{kind.__name__} does not declare `blind`"
        for function in ("look", "judge", "maps"):
            assert getattr(kind, function) is not getattr(Method, function), f"{kind.__name__}.{function}"


def test_the_methods_of_train_are_all_but_pretraining():
    assert METHODS.keys() - trainable_methods().keys() == {"pretrain"}
    assert all(issubclass(entry.config, Train) or name == "pretrain" for name, entry in METHODS.items())


class Undeclared(Method):
    def look(self, images):
        return Sight.everything(images)

    def judge(self, images, sight):
        return Prediction(images.mean(dim=(2, 3)), sight)

    def maps(self, images):
        return {}


def test_a_method_without_blind_is_an_error():
    with pytest.raises(TypeError, match="Undeclared must declare `blind`"):
        Undeclared()
    declared = type("Declared", (Undeclared,), {"blind": False})()
    images = torch.rand(2, 3, 8, 8)
    assert declared.judge(images, declared.look(images)).logits.shape == (2, 3)
