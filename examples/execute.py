"""Execute gallery.ipynb in an empty folder and store it with its outputs, its pictures with fewer colours.

python examples/execute.py
"""

import base64
import io
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

GALLERY = Path(__file__).with_name("gallery.ipynb")
COLOURS = 64


def with_fewer_colours(png: str) -> str:
    """The same picture, base64-encoded, in about a third of the bytes."""
    small = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(COLOURS).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    notebook = nbformat.read(GALLERY, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop("image/jpeg", None)
            if "image/png" in data:
                data["image/png"] = with_fewer_colours(data["image/png"])
            if "text/html" in data:
                data["text/plain"] = "(pictures and a table)"
    nbformat.write(notebook, GALLERY)


if __name__ == "__main__":
    main()
