"""Answers and models as notebooks show them: pictures, names, shares, tables."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, cast

from PIL import Image
from torch import Tensor

from ..data.drawing import as_seen, draw_sight, to_images
from ..sight import Prediction, Sight

if TYPE_CHECKING:
    from ..load import Model

MOST = 16  # pictures in one display
CLASSES = 5


@dataclass(frozen=True)
class ShownSight(Sight):
    """A sight that knows what it is a sight of."""

    pictures: Tensor | None = None  # [B, 3, h, w]

    def show(self, images: Tensor | None = None) -> Image.Image:
        return draw_sight(self, self.pictures if images is None else images)

    def _repr_png_(self) -> bytes:
        return png(self.show())


@dataclass(frozen=True)
class Answer(Prediction):
    """What a model says of some pictures, with its words for it."""

    sight: ShownSight
    classes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The class of every picture."""
        return [self.classes[label] for label in self.labels.tolist()]

    @property
    def name(self) -> str:
        """The class of the one picture."""
        if len(self) != 1:
            raise ValueError(f"these are answers for {len(self)} pictures: take their `names`")
        return self.names[0]

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, which: int | slice) -> Answer:
        if isinstance(which, int):
            which = range(len(self))[which]  # or an IndexError, so that loops end
            which = slice(which, which + 1)
        tokens = None if self.tokens is None else self.tokens[which]
        return Answer(self.logits[which], cast(ShownSight, self.sight[which]), tokens, self.classes)

    def __iter__(self) -> Iterator[Answer]:
        return (self[i] for i in range(len(self)))

    def _repr_html_(self) -> str:
        blocks = [f"{picture_html(one)}{shares_html(one)}" for one in self[:MOST]]
        more = f"<p>… and {len(self) - MOST:,} more.</p>" if len(self) > MOST else ""
        return f'<div style="display:flex;flex-wrap:wrap;gap:1em">{"".join(map(boxed, blocks))}</div>{more}'


def answer_of(prediction: Prediction, images: Tensor, classes: tuple[str, ...]) -> Answer:
    sight = ShownSight(**vars(prediction.sight), pictures=images)
    return Answer(prediction.logits, sight, prediction.tokens, classes)


# ---- HTML ------------------------------------------------------------------------------------------------------------


def boxed(content: str) -> str:
    return f'<div style="max-width:20em">{content}</div>'


def picture_html(one: Answer) -> str:
    assert one.sight.pictures is not None
    seen = as_seen(one.sight.pictures, one.sight)
    pages = [("the picture", one.sight.pictures), ("what the answer was made from", seen)]
    return "".join(
        f'<img alt="{words}" title="{words}" width="140" src="data:image/png;base64,{encoded(to_images(page)[0])}">'
        for words, page in pages
    )


def shares_html(one: Answer) -> str:
    """The likeliest classes, as words, bars and figures."""
    shares = one.probabilities[0]
    best = shares.argsort(descending=True)[:CLASSES].tolist()
    rows = "".join(
        f"<tr><td>{escape(one.classes[i])}</td><td><meter min=0 max=1 value={float(shares[i]):.4f}></meter></td>"
        f"<td>{100 * float(shares[i]):.1f} %</td></tr>"
        for i in best
    )
    return f"<table><caption><b>{escape(one.name)}</b></caption>{rows}</table>"


def model_html(model: Model) -> str:
    """What it is, and every group with its interval."""
    from ..metrics.estimates import Metrics, read_metrics

    facts = model.run.facts
    title = f"<b>{escape(facts['method'])}</b>, trained on {escape(facts['data']['name'])}"
    if said := facts.get("intervention"):
        title += f", corrected: {escape(said['words'])}"
    classes = ", ".join(model.classes[:20]) + (", …" if len(model.classes) > 20 else "")
    about = f"<p>{title}. Classes: {escape(classes)}.</p>"
    path = model.run.folder / (said["folder"] if said else "") / "metrics.json"
    if as_trained := bool(said) and not path.is_file():
        path = model.run.folder / "metrics.json"
    splits = read_metrics(path)["splits"] if path.is_file() else {}
    split = next((one for one in ("test", "val") if one in splits), None)
    if split is None:
        return f"{about}<p>It was not measured.</p>"
    metrics = Metrics.from_dict(splits[split])
    cells = ["".join(f"<td>{escape(value)}</td>" for value in row) for row in metrics.rows()]
    head = "<tr><th></th><th>value</th><th>95 % interval</th><th>n</th></tr>"
    caption = f"{escape(split)} data" + ", as trained" * as_trained
    table = f"<table><caption>{caption}</caption>{head}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    return f"{about}<p>{'As trained: ' * as_trained}{escape(metrics.headline())}.</p>{table}"


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def encoded(picture: Image.Image) -> str:
    return base64.b64encode(png(picture)).decode("ascii")
