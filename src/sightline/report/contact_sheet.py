"""Contact sheets of captioned images, heat maps, and a self-contained page that holds them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..data.drawing import to_pil_images
from ..metrics.estimates import Estimate

GAP = 8
RIGHT, WRONG, PLAIN = (20, 120, 50), (190, 30, 30), (60, 60, 60)
# Viridis: perceptually uniform, from dark blue over green to yellow.
HEAT = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
JPEG: dict[str, Any] = {"quality": 88, "subsampling": 0, "optimize": True}
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Note:
    """The text below an image."""

    text: str
    colour: Colour = PLAIN


@dataclass(frozen=True)
class SheetRow:
    """A row of images [n, 3, h, w] below its caption."""

    caption: str
    images: Tensor
    notes: Sequence[Note] = ()
    legend: Sequence[tuple[str, Colour]] = ()  # beside the caption


def draw_sheet(rows: Sequence[SheetRow]) -> Image.Image:
    """Rows below each other, with columns as wide as the widest image."""
    font, small = ImageFont.load_default(size=15), ImageFont.load_default(size=12)
    column_width = max(row.images.shape[3] for row in rows) + GAP
    heads = [24 * bool(row.caption) + 18 * bool(row.legend) for row in rows]
    feet = [18 * bool(row.notes) for row in rows]
    heights = [head + row.images.shape[2] + foot + GAP for head, foot, row in zip(heads, feet, rows, strict=True)]
    captions = [font.getlength(row.caption) for row in rows]
    legends = [sum(small.getlength(word) + 28 for word, _ in row.legend) for row in rows]
    width = max(*(column_width * len(row.images) for row in rows), *map(int, captions + legends)) + 2 * GAP
    page = Image.new("RGB", (width, sum(heights) + GAP), "white")
    draw, top = ImageDraw.Draw(page), GAP
    for row, head, height in zip(rows, heads, heights, strict=True):
        draw.text((GAP, top), row.caption, fill="black", font=font)
        _legend(draw, (GAP, top + 22 * bool(row.caption)), row.legend, small)
        for column, image in enumerate(to_pil_images(row.images)):
            page.paste(image, (GAP + column * column_width, top + head))
        for column, note in enumerate(row.notes):
            text = shorten(note.text, column_width - GAP, small)
            draw.text((GAP + column * column_width, top + head + row.images.shape[2] + 1), text, note.colour, small)
        top += height
    return page


def _legend(draw: ImageDraw.ImageDraw, at: tuple[int, int], legend: Sequence[tuple[str, Colour]], font: Any) -> None:
    x, y = at
    for word, colour in legend:
        draw.rectangle((x, y, x + 12, y + 12), fill=colour, outline=(90, 90, 90))
        draw.text((x + 16, y - 1), word, PLAIN, font)
        x += int(font.getlength(word)) + 28


def shorten(text: str, room: float, font: Any) -> str:
    """Cut at the beginning if there is no room: names usually differ at the end."""
    if font.getlength(text) <= room:
        return text
    while text and font.getlength("…" + text) > room:
        text = text[1:]
    return "…" + text


# ---- heat maps -------------------------------------------------------------------------------------------------------


def heat_map(shares: Tensor, side: int) -> Tensor:
    """[3, side', side]: a map [H, W] in colours scaled to its maximum, with its cells visible."""
    level = (shares / shares.max().clamp(min=1e-12)).clamp(0, 1)[None, None]
    at = F.interpolate(level, (round(side * shares.shape[0] / shares.shape[1]), side), mode="nearest-exact")[0, 0]
    colours = torch.tensor(HEAT, dtype=torch.float32) / 255
    place = at * (len(HEAT) - 1)
    low = place.floor().long().clamp(max=len(HEAT) - 2)
    mixed = torch.lerp(colours[low], colours[low + 1], (place - low)[..., None])
    return mixed.movedim(-1, 0)


def centre_of_mass(shares: Tensor) -> tuple[float, float] | None:
    """x and y of a map's centre of mass, relative to the image size; None if the map is empty."""
    total = float(shares.sum())
    if total == 0:
        return None
    y, x = ((torch.arange(n) + 0.5) / n for n in shares.shape)
    return float((shares.sum(dim=0) @ x) / total), float((shares.sum(dim=1) @ y) / total)


def draw_cross(image: Tensor, centre: tuple[float, float] | None, colour: Sequence[float], reach: int = 5) -> Tensor:
    """The image with a cross at a relative position."""
    if centre is None:
        return image
    made, (h, w) = image.clone(), image.shape[1:]
    x, y = min(int(centre[0] * w), w - 1), min(int(centre[1] * h), h - 1)
    paint = torch.tensor(colour).view(3, 1, 1)
    made[:, max(0, y - 1) : y + 1, max(0, x - reach) : x + reach] = paint
    made[:, max(0, y - reach) : y + reach, max(0, x - 1) : x + 1] = paint
    return made


# ---- a page ----------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #222 }
img { max-width: 100%; height: auto; border: 1px solid #ddd }
table { border-collapse: collapse; margin: 1rem 0 } caption { text-align: left; caption-side: bottom; color: #555 }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee }
td:first-child, th:first-child { text-align: left } .scroll { overflow-x: auto } p { max-width: 50rem }
"""


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    images: Mapping[str, Image.Image]  # by caption
    table: str = ""  # HTML


def page(title: str, sections: Iterable[Section]) -> str:
    """A self-contained HTML page."""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="generator" content="Sightline">'
        f"<title>{escape(title)}</title>"
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n'
        + "\n".join(map(_section, sections))
        + "\n</html>\n"
    )


def _section(one: Section) -> str:
    uris = {escape(caption): data_uri(encode_image(image, **JPEG)) for caption, image in one.images.items()}
    figures = [f'<p>{text}</p><img alt="{text}" src="{uri}" loading="lazy">' for text, uri in uris.items()]
    return "\n".join([f"<h2>{escape(one.title)}</h2>", f"<p>{escape(one.about)}</p>", one.table, *figures])


def encode_image(image: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind.upper(), **options)
    return content.getvalue()


def data_uri(content: bytes, kind: str = "jpeg") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def table_of_trials(measured: Mapping[str, Any], what: str, most: int) -> str:
    """The effect of every part removal and token removal, as an HTML table."""
    trials = measured["trials"]
    kind = "groups" if trials and trials[0]["groups"] else "classes"
    cells = list(trials[0][kind]) if trials else []
    all_columns = len(cells) <= most
    header = ["", what, "gain", *(cells if all_columns else ["largest gain", "largest loss"])]
    rows = []
    for trial in trials:
        by = {name: Estimate(**one) for name, one in trial[kind].items()}
        order = sorted(by, key=lambda name: by[name].value, reverse=True)
        ends = [f"{name} {points(by[name])}" for name in (order[0], order[-1])]
        cells = map(points, by.values()) if all_columns else ends
        rows.append([trial["step"], f"{100 * trial['score']:.1f} %", points(Estimate(**trial["gain"])), *cells])
    caption = (
        f"Change in points, with 95 % intervals, against {100 * measured['before']:.1f} % {what} as trained; "
        f"{measured['split']} data, n = {measured['n']:,}."
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table></div>'


def points(gain: Estimate) -> str:
    return f"{100 * gain.value:+.1f} {gain.interval}"
