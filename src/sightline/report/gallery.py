"""Galleries of the report: small JPEGs inside the page, the visible content bright and the rest faded.

Images are drawn at random within groups, so that no gallery is hand-picked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.drawing import to_pil_images
from ..data.sampling import sample_balanced
from ..explain.background_swaps import CONDITIONS, EXAMPLES
from ..interventions.file import Intervention
from ..metrics.predictions import NO_CLASS
from .case import ReportContext, hides_something
from .contact_sheet import data_uri, encode_image
from .survey import SurveyResults, part_of_pixels

SIDE = 160  # of a thumbnail in pixels
MAX_BYTES = 14_000  # of a JPEG, so that 200 stay under 5 MB
FADED = 0.95  # the grey into which hidden content is faded
LINE = (0.86, 0.08, 0.55)  # outline of the sight: a colour that is rare in photographs
HEAT = (0.88, 0.16, 0.02)  # where a map is high
MAX_ERRORS = 12
PER_PART = 16  # images
OVERVIEW = 32


@dataclass(frozen=True)
class Thumbnail:
    """An image on the page."""

    uri: str
    alt: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class Gallery:
    about: str
    images: list[Thumbnail]


@dataclass(frozen=True)
class ShownError:
    image: Thumbnail
    seen: Thumbnail
    label: str
    predicted: str
    confidence: float
    group: str
    name: str


@dataclass(frozen=True)
class ReportGalleries:
    overview: Gallery
    parts: dict[int, Gallery] = field(default_factory=dict)
    errors: list[ShownError] = field(default_factory=list)
    wrong: int = 0


# ---- selection of images ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Rows of the predictions to show, by gallery."""

    overview: np.ndarray
    parts: dict[int, np.ndarray]
    errors: np.ndarray

    @property
    def all(self) -> np.ndarray:
        return np.unique(np.concatenate([self.overview, self.errors, *self.parts.values()]).astype(np.int64))


def select_images(found: SurveyResults, most: int, seed: int, intervention: Intervention) -> Selection:
    """At most `most` thumbnails: a fifth for the most confident errors, which are shown twice; of
    the rest a third for the overview of all groups, two thirds for parts."""
    generator, predictions = np.random.default_rng(seed), found.predictions
    cells = predictions.labels if predictions.groups is None else predictions.groups
    wrong = np.flatnonzero(~predictions.correct)
    by_confidence = wrong[np.argsort(-predictions.probabilities[wrong].max(axis=1), kind="stable")]
    errors = by_confidence[: min(MAX_ERRORS, most // 10)]
    left = most - 2 * len(errors)
    numbers = [] if found.areas is None else [k for k in range(found.areas.shape[1]) if k not in intervention.drop]
    count = min(OVERVIEW, left // 3 if numbers else left)
    per_part = min(PER_PART, (left - count) // len(numbers)) if numbers else 0
    parts = {}
    for part in numbers:
        assert found.areas is not None
        parts[part] = sample_balanced(np.flatnonzero(found.areas[:, part] > 0), cells, per_part, generator)
    return Selection(sample_balanced(np.arange(len(predictions)), cells, count, generator), parts, errors)


def swap_example_count(most: int) -> int:
    """Images shown in every condition of the background swaps: at most a quarter of all thumbnails."""
    return min(EXAMPLES, most // (4 * len(CONDITIONS)))


# ---- drawing ---------------------------------------------------------------------------------------------------------


def galleries(context: ReportContext, found: SurveyResults) -> ReportGalleries:
    most = context.command.examples - len(CONDITIONS) * swap_example_count(context.command.examples)
    chosen = select_images(found, most, context.command.seed, context.intervention)
    wrong = int((~found.predictions.correct).sum())
    if not len(chosen.all):
        return ReportGalleries(Gallery("", []), wrong=wrong)
    builder = GalleryBuilder(context, found, chosen)
    parts = {part: Gallery("", [builder.part(row, part) for row in rows]) for part, rows in chosen.parts.items()}
    overview = Gallery(builder.about, [builder.overview(row) for row in chosen.overview])
    return ReportGalleries(overview, parts, [builder.error(row) for row in chosen.errors], wrong)


@dataclass(frozen=True)
class View:
    """One image at thumbnail size, with its sight, parts and map."""

    image: Tensor  # [3, h, w]
    visible: Tensor  # bool [h, w]
    part: Tensor | None  # int64 [h, w], -1 where hidden
    heat: Tensor | None  # [h, w] in [0, 1]: a map, if the method sees everything


class GalleryBuilder:
    """Runs the model on the selected images once more and draws them."""

    def __init__(self, context: ReportContext, found: SurveyResults, chosen: Selection):
        self.context, self.found = context, found
        self.hides, self.map_name = False, ""
        self.views: dict[int, View] = {}
        rows = chosen.all
        at = 0
        for images, sight, maps in context.iterate_sights(context.indices[rows]):
            size = (images.shape[2], images.shape[3])
            self.hides = hides_something(sight)
            part = None if sight.parts is None else part_of_pixels(sight, size)
            heat = None
            if not self.hides:
                self.map_name, heat = self.map_of(images, maps)
            for k, view in enumerate(thumbnail_views(images, sight.visible(size), part, heat)):
                self.views[int(rows[at + k])] = view
            at += len(images)
        self.parts = 0 if found.areas is None else found.areas.shape[1]

    def map_of(self, images: Tensor, maps: Mapping[str, Tensor]) -> tuple[str, Tensor | None]:
        from ..where.relevance import MAPS, has_relevance_map

        if has_relevance_map(self.context.method):
            return "relevance", MAPS["gae"](self.context.method, images).detach()
        name = next(iter(maps), "")
        return name, maps[name] if name else None

    @property
    def about(self) -> str:
        if self.parts:
            return "Each part in its colour; faded content is hidden from the prediction."
        if self.hides:
            return "Bright and outlined: the sight, from which the prediction is made. Faded: hidden."
        if self.map_name:
            return (
                f"Red: high {self.map_name}. The model sees the whole image, whatever this map shows; a map is an "
                "approximate explanation and proves nothing."
            )
        return "The model sees the whole image and has no map to show."

    def overview(self, row: int) -> Thumbnail:
        return self.thumbnail(row, self.draw_seen(self.views[int(row)]), self.describe_seen(row))

    def draw_seen(self, view: View) -> Tensor:
        if view.part is not None:
            return tint_view(view, self.parts)
        if view.heat is not None:
            return overlay_heat(view.image, view.heat)
        return draw_outline(fade(view.image, view.visible), view.visible, LINE) if self.hides else view.image

    def describe_seen(self, row: int) -> str:
        if self.hides or self.parts:
            return f"{100 * self.found.coverage[row]:.0f} % of the image visible"
        return f"coloured by {self.map_name}" if self.map_name else "the whole image visible"

    def part(self, row: int, part: int) -> Thumbnail:
        assert self.found.areas is not None
        view, area = self.views[int(row)], self.found.areas[row, part]
        assert view.part is not None
        own = view.part == part
        image = draw_outline(fade(view.image, own), own, part_colour(part, self.parts))
        name = self.context.intervention.part_name(part)
        return self.thumbnail(row, image, f"{name} outlined, {100 * area:.1f} % of the image")

    def error(self, row: int) -> ShownError:
        predictions, view = self.found.predictions, self.views[int(row)]
        label, number = predictions.classes[predictions.labels[row]], predictions.predicted[row]
        predicted = "none of the classes" if number == NO_CLASS else predictions.classes[number]
        return ShownError(
            self.thumbnail(row, view.image, f"predicted {predicted}"),
            self.thumbnail(row, self.draw_seen(view), self.describe_seen(row)),
            label, predicted, float(predictions.probabilities[row].max()), self.group(row), predictions.images[row],
        )  # fmt: skip

    def thumbnail(self, row: int, image: Tensor, text: str) -> Thumbnail:
        group, name = self.group(row), self.found.predictions.images[row]
        return Thumbnail(jpeg_uri(image), f"{group}, {name}: {text}", group, image.shape[2], image.shape[1])

    def group(self, row: int) -> str:
        predictions = self.found.predictions
        if predictions.groups is None:
            return predictions.classes[predictions.labels[row]]
        return predictions.group_names[predictions.groups[row]]


def thumbnail_views(images: Tensor, visible: Tensor, part: Tensor | None, heat: Tensor | None) -> Iterator[View]:
    """Everything at thumbnail size: images by bicubic, masks by nearest-neighbour interpolation."""
    h, w = images.shape[2:]
    size = (max(1, round(SIDE * h / max(h, w))), max(1, round(SIDE * w / max(h, w))))

    def smooth(pixels: Tensor) -> Tensor:
        return F.interpolate(pixels.float(), size, mode="bicubic", antialias=True).clamp(0, 1).cpu()

    def nearest(values: Tensor) -> Tensor:
        return F.interpolate(values[:, None].float(), size, mode="nearest-exact")[:, 0].cpu()

    small, heats = smooth(images), None
    if heat is not None:  # scaled so that the maximum of every image is 1
        heat = heat.float().clamp_min(0)[:, None]
        heats = smooth((heat / heat.amax(dim=(2, 3), keepdim=True).clamp_min(1e-12)).pow(0.75))[:, 0]
    masks, parts = nearest(visible) > 0.5, None if part is None else nearest(part).round().long()
    for k in range(len(images)):
        yield View(small[k], masks[k], None if parts is None else parts[k], None if heats is None else heats[k])


def fade(image: Tensor, keep: Tensor) -> Tensor:
    """[3, h, w]: grey and pale where not kept, but still recognisable."""
    grey = image.mean(dim=0, keepdim=True).expand_as(image)
    return torch.where(keep, image, 0.35 * grey + 0.65 * FADED)


def overlay_heat(image: Tensor, heat: Tensor) -> Tensor:
    """[3, h, w]: red where a map is high, over the greyscale image."""
    grey = 0.7 * image.mean(dim=0, keepdim=True) + 0.3
    return grey + 0.85 * heat * (torch.tensor(HEAT).view(3, 1, 1) - grey)


def draw_outline(image: Tensor, keep: Tensor, colour: Sequence[float], width: int = 2) -> Tensor:
    """A line just outside the kept pixels."""
    reach = 2 * width + 1
    near = F.max_pool2d(keep[None, None].float(), reach, stride=1, padding=width)[0, 0] > 0
    return torch.where(near & ~keep, torch.tensor(colour).view(3, 1, 1), image)


def tint_view(view: View, parts: int) -> Tensor:
    """All parts, tinted in their colours."""
    assert view.part is not None
    image = fade(view.image, view.part >= 0)
    for part in range(parts):
        tint = 0.62 * view.image + 0.38 * torch.tensor(part_colour(part, parts)).view(3, 1, 1)
        image = torch.where(view.part == part, tint, image)
    return image


def part_colour(part: int, parts: int) -> tuple[float, float, float]:
    """Evenly spaced hues, the same in all figures."""
    return hsv_to_rgb(part / parts, 0.9, 1.0)


def part_css_colour(part: int, parts: int) -> str:
    return "#" + "".join(f"{round(255 * level):02x}" for level in part_colour(part, parts))


def jpeg_uri(pixels: Tensor) -> str:
    """An image [3, h, w] as a data URI, at the highest quality that fits MAX_BYTES."""
    image = to_pil_images(pixels[None])[0]
    for quality in (82, 70, 55, 40, 25):
        content = encode_image(image, quality=quality, optimize=True)
        if len(content) <= MAX_BYTES:
            break
    return data_uri(content)
