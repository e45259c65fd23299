"""Which folder may import which, functions included: no cycles, and *where* and *what* share nothing but the Sight."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A new arrow is a decision: add it here only if the folder really has to know the other.
ALLOWED = {
    "errors": "",
    "config": "errors",
    "console": "errors config",
    "vit": "errors config console",
    "data": "errors config console vit",
    "datasets": "errors config console data",
    "sight": "errors data",
    "metrics": "errors sight config console data vit",
    "training": "errors sight config console data metrics vit",
    "where": "errors sight config console data training vit",
    "what": "errors sight config console data metrics training vit",
    "methods": "errors sight config console data datasets metrics training vit what where",
    "interventions": "errors sight config console data methods metrics training vit where",
    "batch": "errors sight config console data metrics training vit",
    "verify": "errors sight config console data datasets methods metrics training vit what where",
    "explain": "errors sight config console data datasets methods metrics training vit what where",
    "bench": "errors config console data explain methods metrics training",
    "matrix": "errors sight config console data explain methods metrics training vit what where",
    "report": "errors sight config console data batch explain interventions methods metrics training verify vit where",
    "app": "errors sight config console data interventions methods metrics report training vit where",
    "export": (
        "errors sight config console data datasets interventions methods metrics report training verify vit what where"
    ),
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("import_graph", ROOT / "docs" / "import_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph(script):
    return script.module_graph()


def test_no_module_imports_itself_in_a_circle(script, graph):
    assert script.cycle_in(graph) == []


def test_a_circle_would_be_found(script):
    assert script.cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c", "a"]


def test_folders_import_only_what_they_may(script, graph):
    for folder, imported in script.folder_graph(graph).items():
        assert folder in ALLOWED, f"{folder}/ is new: say in ALLOWED what it may import"
        assert not imported - set(ALLOWED[folder].split()), f"{folder}/ imports what it may not"


def test_what_is_allowed_has_no_circle(script):
    assert script.cycle_in({folder: set(others.split()) for folder, others in ALLOWED.items()}) == []


def test_the_two_halves_never_meet_and_the_measuring_rooms_know_neither():
    for folder, forbidden in {"where": {"what"}, "what": {"where"}}.items():
        assert not forbidden & set(ALLOWED[folder].split())
    for folder in ("data", "metrics", "vit", "training"):
        assert not {"where", "what", "methods"} & set(ALLOWED[folder].split())


def test_function_level_imports_count_and_those_for_types_do_not(script, tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import t\ndef f():\n    from .a import g\n"
    )
    known = {f"sightline.{name}": path for name in "abx"}
    assert list(script.imports_of("sightline.x", path, known)) == ["sightline.a"]


def test_the_root_of_the_package_stays_small():
    assert len(list((ROOT / "src" / "sightline").glob("*.py"))) <= 14


def test_the_picture_in_the_pages_is_of_this_code(script, graph):
    assert script.PICTURE.read_text() == script.draw(script.folder_graph(graph)), "run `python docs/import_graph.py`"
