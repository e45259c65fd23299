"""Predictions and models as notebooks display them: images, class names, probabilities, tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, cast

from PIL import Image
from torch import Tensor

from ..data.drawing import draw_sight, grey_out_hidden, to_pil_images
from ..sight import Prediction, Sight
from .contact_sheet import data_uri, encode_image

if TYPE_CHECKING:
    from ..load import Model

MAX_IMAGES = 16  # images in one display
CLASSES = 5


@dataclass(frozen=True)
class ImageSight(Sight):
    """A sight with the images it belongs to, so that it can be displayed."""

    images: Tensor | None = None  # [B, 3, h, w]

    def show(self, images: Tensor | None = None) -> Image.Image:
        return draw_sight(self, self.images if images is None else images)

    def _repr_png_(self) -> bytes:
        return encode_image(self.show(), "png")


@dataclass(frozen=True)
class ImagePredictions(Prediction):
    """A model's predictions for images, with their class names."""

    sight: ImageSight
    classes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The predicted class of every image."""
        return [self.classes[label] for label in self.labels.tolist()]

    @property
    def name(self) -> str:
        """The predicted class of a single image."""
        if len(self) != 1:
            raise ValueError(f"there are predictions for {len(self)} images: use `names`")
        return self.names[0]

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, which: int | slice) -> ImagePredictions:
        if isinstance(which, int):
            which = range(len(self))[which]  # raises IndexError, which ends a loop
            which = slice(which, which + 1)
        tokens = None if self.tokens is None else self.tokens[which]
        return ImagePredictions(self.logits[which], cast(ImageSight, self.sight[which]), tokens, self.classes)

    def __iter__(self) -> Iterator[ImagePredictions]:
        return (self[i] for i in range(len(self)))

    def _repr_html_(self) -> str:
        blocks = [f"{images_html(one)}{probabilities_html(one)}" for one in self[:MAX_IMAGES]]
        more = f"<p>… and {len(self) - MAX_IMAGES:,} more.</p>" if len(self) > MAX_IMAGES else ""
        return f'<div style="display:flex;flex-wrap:wrap;gap:1em">{"".join(map(box_html, blocks))}</div>{more}'


def predictions_with_images(prediction: Prediction, images: Tensor, classes: tuple[str, ...]) -> ImagePredictions:
    sight = ImageSight(**vars(prediction.sight), images=images)
    return ImagePredictions(prediction.logits, sight, prediction.tokens, classes)


# ---- HTML ------------------------------------------------------------------------------------------------------------


def box_html(content: str) -> str:
    return f'<div style="max-width:20em">{content}</div>'


def images_html(one: ImagePredictions) -> str:
    assert one.sight.images is not None
    seen = grey_out_hidden(one.sight.images, one.sight)
    pages = {
        name: data_uri(encode_image(to_pil_images(page)[0], "png"), "png")
        for name, page in (("image", one.sight.images), ("sight", seen))
    }
    return "".join(f'<img alt="{name}" title="{name}" width="140" src="{uri}">' for name, uri in pages.items())


def probabilities_html(one: ImagePredictions) -> str:
    """The most probable classes, with bars."""
    probabilities = one.probabilities[0]
    best = probabilities.argsort(descending=True)[:CLASSES].tolist()
    rows = "".join(
        f"<tr><td>{escape(one.classes[i])}</td><td><meter min=0 max=1 value={float(probabilities[i]):.4f}></meter></td>"
        f"<td>{100 * float(probabilities[i]):.1f} %</td></tr>"
        for i in best
    )
    return f"<table><caption><b>{escape(one.name)}</b></caption>{rows}</table>"


def model_summary_html(model: Model) -> str:
    """The method, its data and classes, and the accuracy of every group."""
    from ..metrics.estimates import Metrics, read_metrics

    facts = model.run.facts
    title = f"<b>{escape(facts['method'])}</b>, trained on {escape(facts['data']['name'])}"
    if applied := facts.get("intervention"):
        title += f", with intervention: {escape(applied['words'])}"
    classes = ", ".join(model.classes[:20]) + (", …" if len(model.classes) > 20 else "")
    about = f"<p>{title}. Classes: {escape(classes)}.</p>"
    path = model.run.folder / (applied["folder"] if applied else "") / "metrics.json"
    if as_trained := bool(applied) and not path.is_file():
        path = model.run.folder / "metrics.json"
    splits = read_metrics(path)["splits"] if path.is_file() else {}
    split = next((one for one in ("test", "val") if one in splits), None)
    if split is None:
        return f"{about}<p>Not evaluated yet.</p>"
    metrics = Metrics.from_dict(splits[split])
    cells = ["".join(f"<td>{escape(value)}</td>" for value in row) for row in metrics.rows()]
    head = "<tr><th></th><th>value</th><th>95 % interval</th><th>n</th></tr>"
    caption = f"{escape(split)} data" + ", as trained" * as_trained
    table = f"<table><caption>{caption}</caption>{head}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    return f"{about}<p>{'As trained: ' * as_trained}{escape(metrics.headline())}</p>{table}"
