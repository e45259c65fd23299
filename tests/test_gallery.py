"""The gallery notebook runs from top to bottom, and what it says of itself is true."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

GALLERY = Path(__file__).parents[1] / "examples" / "gallery.ipynb"
KILOBYTES = 300
FOLDERS = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|usr|Users)/")  # of somebody's machine


def text_of(cell) -> str:
    """What a cell prints and displays as text."""
    texts = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.get("outputs", [])]
    return "".join(texts)


def pictures_in(notebook) -> int:
    kinds = [one.get("data", {}) for cell in notebook.cells for one in cell.get("outputs", [])]
    return sum("image/png" in kind or "<img" in kind.get("text/html", "") for kind in kinds)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    notebook = nbformat.read(GALLERY, as_version=4)
    folder = tmp_path_factory.mktemp("gallery")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        ).execute()
    return notebook, folder


def test_the_gallery_corrects_proves_and_exports_a_model(executed):
    notebook, folder = executed
    printed = "\n".join(text_of(cell) for cell in notebook.cells)
    assert "Blind outside its sight" in printed
    assert "changed no bit of the file's output" in printed
    assert (folder / "runs" / "storks" / "onnx" / "model.onnx").is_file()
    assert (folder / "runs" / "storks" / "audit.html").is_file()
    difference = re.search(r"largest difference from PyTorch on \d+ images: (\S+)", printed)
    assert difference is not None
    assert float(difference.group(1)) < 1e-3
    assert pictures_in(notebook) >= 4


def test_removing_the_part_on_the_tag_helps_those_whom_it_misled(executed):
    _, folder = executed
    run = folder / "runs" / "storks"
    corrected = next(path.parent for path in run.glob("*/metrics.json"))

    def accuracy(folder: Path, group: str) -> float:
        content = json.loads((folder / "metrics.json").read_text())
        return content["splits"]["test"]["groups"][group]["value"]

    assert accuracy(corrected, "duck/tag") > accuracy(run, "duck/tag") + 0.1


def test_the_stored_outputs_are_small_and_name_no_folder_of_a_machine():
    notebook = nbformat.read(GALLERY, as_version=4)
    assert GALLERY.stat().st_size <= KILOBYTES * 1000
    assert 25 <= len(notebook.cells) <= 40
    assert pictures_in(notebook) >= 4
    assert not [cell.id for cell in notebook.cells if FOLDERS.search(str(cell))]
