"""Published pickles become JSON, and code in them is never run."""

import json
import os
import pickle
from collections import defaultdict

import numpy as np
import pytest

from sightline.datasets.pickles import pickle_to_json, read_pickle
from sightline.errors import UserError

from .published import (
    put,
)


@pytest.mark.parametrize("protocol", range(6))
def test_published_pickles_become_json(protocol, tmp_path):
    subsets = defaultdict(set, {"dog(frisbee)": {"2", "1", "10"}, "cat(sofa)": set()})
    content = {"tubes": {"a": True, "b": False}, "subsets": subsets, ("cat", 3): (1, None, 2.5), 7: frozenset({3, 1})}
    put(tmp_path, "a.pkl", content=pickle.dumps(content, protocol=protocol))
    pickle_to_json(tmp_path / "a.pkl", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "tubes": {"a": True, "b": False},
        "subsets": {"dog(frisbee)": ["1", "10", "2"], "cat(sofa)": []},
        "cat,3": [1, None, 2.5],
        "7": [1, 3],
    }


class Malicious:
    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_does_nothing_and_the_error_names_its_function(protocol, tmp_path):
    trace = tmp_path / "trace"
    touch = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    for function, arguments, name in (
        (exec, (touch,), "exec"),
        (eval, (touch,), "eval"),
        (os.system, (f"touch {trace}",), r"\.system"),
        (getattr, (dict, "get"), "getattr"),
        (np.float64, (1.0,), r"numpy\.\w+"),
    ):
        put(tmp_path, "a.pkl", content=pickle.dumps({"x": Malicious(function, *arguments)}, protocol=protocol))
        with pytest.raises(UserError, match=rf"a\.pkl: it refers to .*{name}"):
            pickle_to_json(tmp_path / "a.pkl", tmp_path / "a.json")
    assert not trace.exists()
    assert not (tmp_path / "a.json").exists()


def test_the_malicious_pickle_works_with_the_standard_unpickler(tmp_path):
    trace = tmp_path / "trace"
    harm = pickle.dumps(Malicious(exec, f"__import__('pathlib').Path({str(trace)!r}).touch()"))
    pickle.loads(harm)
    assert trace.exists()


def test_a_pickle_cannot_modify_the_allowed_classes(tmp_path):
    # defaultdict, then BUILD with a state for its slots: sets an attribute on whatever stands for defaultdict
    put(
        tmp_path,
        "a.pkl",
        content=b"\x80\x02ccollections\ndefaultdict\nN}U\x05tracek\x01s\x86b.".replace(b"k\x01", b"K\x01"),
    )
    found = read_pickle(tmp_path / "a.pkl")
    put(tmp_path, "b.pkl", content=b"\x80\x02ccollections\ndefaultdict\n.")
    assert found.trace == 1
    assert not hasattr(read_pickle(tmp_path / "b.pkl"), "trace")


def shared_lists() -> list:
    """Forty lists that JSON would write as 2^40."""
    laughs = ["ha"]
    for _ in range(40):
        laughs = [laughs, laughs]
    return laughs


def recursive_list() -> list:
    inside: list = []
    inside.append(inside)
    return inside


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"not a pickle", "damaged"),
        (pickle.dumps({"a": 1})[:-3], "damaged"),
        (pickle.dumps({"a": b"bytes"}), "(it refers to|a value of type bytes)"),
        (pickle.dumps({1: "a", "1": "b"}), "two of its keys"),
        (pickle.dumps(float("nan")), "no JSON form"),
        (pickle.dumps({frozenset({1}): 1}), "a key of type frozenset"),
        (pickle.dumps(recursive_list()), "contains itself"),
        (pickle.dumps(shared_lists()), r"more than 10,000,000 values"),
    ],
)
def test_values_that_json_cannot_represent_are_an_error(content, message, tmp_path):
    put(tmp_path, "a.pkl", content=content)
    with pytest.raises(UserError, match=message):
        pickle_to_json(tmp_path / "a.pkl", tmp_path / "a.json")
