"""The report's pictures: small JPEGs inside the page, with what is seen bright and the rest faded.

Which pictures are shown is drawn at random within groups, so that a gallery flatters nobody.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.drawing import to_images
from ..explain.background_swaps import EXAMPLES, KINDS
from ..interventions.file import Intervention
from ..metrics.predictions import NO_CLASS
from .case import Case, hides
from .survey import Survey, part_of_pixels

SIDE = 160  # of a thumbnail in pixels
MOST_BYTES = 14_000  # of a JPEG, so that 200 stay under 5 MB whatever they show
FADED = 0.95  # the grey that hidden content fades into
LINE = (0.86, 0.08, 0.55)  # around what is seen: a colour that few photographs have
GLOW = (0.88, 0.16, 0.02)  # where a map is high
MISTAKES = 12
OF_PART = 16  # pictures
OF_SIGHT = 40


@dataclass(frozen=True)
class Shown:
    """A picture on the page."""

    uri: str
    alt: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class Gallery:
    about: str
    pictures: list[Shown]


@dataclass(frozen=True)
class Mistake:
    picture: Shown
    seen: Shown
    label: str
    answer: str
    sure: float
    group: str
    name: str


@dataclass(frozen=True)
class Galleries:
    overview: Gallery
    parts: dict[int, Gallery] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    wrong: int = 0

    @property
    def count(self) -> int:
        return sum(len(one.pictures) for one in (self.overview, *self.parts.values())) + 2 * len(self.mistakes)


# ---- which pictures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Rows of the answers to show, by gallery."""

    overview: np.ndarray
    parts: dict[int, np.ndarray]
    mistakes: np.ndarray

    @property
    def all(self) -> np.ndarray:
        return np.unique(np.concatenate([self.overview, self.mistakes, *self.parts.values()]).astype(np.int64))


def plan(found: Survey, pictures: int, seed: int, intervention: Intervention) -> Plan:
    """At most so many pictures: a fifth for mistakes, which are shown twice, and the rest for what is looked at."""
    generator, answers = np.random.default_rng(seed), found.answers
    cells = answers.labels if answers.groups is None else answers.groups
    wrong = np.flatnonzero(~answers.correct)
    surest = wrong[np.argsort(-answers.probabilities[wrong].max(axis=1), kind="stable")]
    mistakes = surest[: min(MISTAKES, pictures // 10)]
    left = pictures - 2 * len(mistakes)
    numbers = [] if found.areas is None else [k for k in range(found.areas.shape[1]) if k not in intervention.drop]
    each = min(OF_PART, left // (len(numbers) + 1)) if numbers else 0
    parts = {}
    for part in numbers:
        assert found.areas is not None
        parts[part] = drawn(np.flatnonzero(found.areas[:, part] > 0), cells, each, generator)
    count = min(OF_PART if numbers else OF_SIGHT, left - sum(map(len, parts.values())))
    return Plan(drawn(np.arange(len(answers)), cells, count, generator), parts, mistakes)


def examples_of_swaps(pictures: int) -> int:
    """How many pictures are shown before every background: of all that are shown, at most a quarter is for these."""
    return min(EXAMPLES, pictures // (4 * len(KINDS)))


def drawn(among: np.ndarray, cells: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """At random, as many of every cell as of the others, in the order of the cells."""
    mixed = generator.permutation(among)
    turn = np.empty(len(mixed), dtype=np.int64)
    for cell in np.unique(cells[mixed]):
        own = np.flatnonzero(cells[mixed] == cell)
        turn[own] = np.arange(len(own))
    lot = generator.permutation(int(cells.max()) + 1)  # where there are more cells than pictures, chance chooses
    chosen = mixed[np.lexsort((lot[cells[mixed]], turn))[:count]]
    return chosen[np.argsort(cells[chosen], kind="stable")]


# ---- how they are drawn ----------------------------------------------------------------------------------------------


def galleries(case: Case, found: Survey) -> Galleries:
    pictures = case.command.pictures - len(KINDS) * examples_of_swaps(case.command.pictures)
    chosen = plan(found, pictures, case.command.seed, case.intervention)
    if not len(chosen.all):
        return Galleries(Gallery("", []), wrong=int((~found.answers.correct).sum()))
    artist = Artist(case, found, chosen)
    parts = {part: Gallery("", [artist.part(row, part) for row in rows]) for part, rows in chosen.parts.items()}
    overview = Gallery(artist.about, [artist.overview(row) for row in chosen.overview])
    mistakes = [artist.mistake(row) for row in chosen.mistakes]
    return Galleries(overview, parts, mistakes, int((~found.answers.correct).sum()))


@dataclass(frozen=True)
class View:
    """One picture, thumbnail size, and what is known of it there."""

    image: Tensor  # [3, h, w]
    visible: Tensor  # bool [h, w]
    part: Tensor | None  # int64 [h, w], -1 where hidden
    light: Tensor | None  # [h, w] in [0, 1]: a map, where the method has nothing else to show


class Artist:
    """Draws the chosen pictures, which are looked at once more."""

    def __init__(self, case: Case, found: Survey, chosen: Plan):
        self.case, self.found = case, found
        self.hides, self.map_name = False, ""
        self.views: dict[int, View] = {}
        rows = chosen.all
        at = 0
        for images, sight, maps in case.looked_at(case.indices[rows]):
            size = (images.shape[2], images.shape[3])
            self.hides = hides(sight)
            part = None if sight.parts is None else part_of_pixels(sight, size)
            light = None
            if not self.hides:
                self.map_name, light = self.map_of(images, maps)
            for k, view in enumerate(small_views(images, sight.visible(size), part, light)):
                self.views[int(rows[at + k])] = view
            at += len(images)
        self.parts = 0 if found.areas is None else found.areas.shape[1]
        self.names = case.intervention

    def map_of(self, images: Tensor, maps: Mapping[str, Tensor]) -> tuple[str, Tensor | None]:
        from ..where.relevance import MAPS, can_be_explained

        if can_be_explained(self.case.method):
            return "relevance", MAPS["gae"](self.case.method, images).detach()
        name = next(iter(maps), "")
        return name, maps[name] if name else None

    @property
    def about(self) -> str:
        if self.parts:
            return "Each part in its colour; what is faded is hidden from the answer."
        if self.hides:
            return "Bright and outlined: what the answer is made from. Faded: hidden from it."
        if self.map_name:
            return (
                f"The redder, the more {self.map_name} a place has. The model sees the whole picture, whatever "
                "this map shows: a map explains a little, and proves nothing."
            )
        return "The model sees the whole picture, and has no map to show."

    def overview(self, row: int) -> Shown:
        view = self.views[int(row)]
        return self.shown(row, self.seen(view), self.seen_words(row))

    def seen(self, view: View) -> Tensor:
        if view.part is not None:
            return painted(view, self.parts)
        if view.light is not None:
            return glowing(view.image, view.light)
        return outlined(faded(view.image, view.visible), view.visible, LINE) if self.hides else view.image

    def seen_words(self, row: int) -> str:
        share = f"{100 * self.found.coverage[row]:.0f} % of the picture in sight"
        if self.hides or self.parts:
            return share
        return f"coloured by {self.map_name}" if self.map_name else "all of it in sight"

    def part(self, row: int, part: int) -> Shown:
        assert self.found.areas is not None
        view, share = self.views[int(row)], self.found.areas[row, part]
        assert view.part is not None
        own = view.part == part
        picture = outlined(faded(view.image, own), own, colour_of(part, self.parts))
        return self.shown(row, picture, f"{self.names.part(part)} outlined, {100 * share:.1f} % of the picture")

    def mistake(self, row: int) -> Mistake:
        answers, view = self.found.answers, self.views[int(row)]
        label, number = answers.classes[answers.labels[row]], answers.predicted[row]
        answer = "none of the classes" if number == NO_CLASS else answers.classes[number]
        return Mistake(
            self.shown(row, view.image, f"the picture, taken for {answer}"),
            self.shown(row, self.seen(view), self.seen_words(row)),
            label, answer, float(answers.probabilities[row].max()), self.cell(row), answers.images[row],
        )  # fmt: skip

    def shown(self, row: int, picture: Tensor, what: str) -> Shown:
        cell, name = self.cell(row), self.found.answers.images[row]
        return Shown(jpeg_uri(picture), f"{cell}, {name}: {what}", cell, picture.shape[2], picture.shape[1])

    def cell(self, row: int) -> str:
        answers = self.found.answers
        if answers.groups is None:
            return answers.classes[answers.labels[row]]
        return answers.group_names[answers.groups[row]]


def small_views(images: Tensor, visible: Tensor, part: Tensor | None, light: Tensor | None) -> Iterator[View]:
    """Everything at the size of a thumbnail: pictures smoothly, masks by the nearest pixel."""
    h, w = images.shape[2:]
    size = (max(1, round(SIDE * h / max(h, w))), max(1, round(SIDE * w / max(h, w))))

    def smooth(some: Tensor) -> Tensor:
        return F.interpolate(some.float(), size, mode="bicubic", antialias=True).clamp(0, 1).cpu()

    def nearest(some: Tensor) -> Tensor:
        return F.interpolate(some[:, None].float(), size, mode="nearest-exact")[:, 0].cpu()

    pictures, lights = smooth(images), None
    if light is not None:  # each picture's highest place is 1
        light = light.float().clamp_min(0)[:, None]
        lights = smooth((light / light.amax(dim=(2, 3), keepdim=True).clamp_min(1e-12)).pow(0.75))[:, 0]
    masks, parts = nearest(visible) > 0.5, None if part is None else nearest(part).round().long()
    for k in range(len(images)):
        yield View(pictures[k], masks[k], None if parts is None else parts[k], None if lights is None else lights[k])


def faded(image: Tensor, keep: Tensor) -> Tensor:
    """[3, h, w]: grey and pale where not kept, but still to be recognised."""
    grey = image.mean(dim=0, keepdim=True).expand_as(image)
    return torch.where(keep, image, 0.35 * grey + 0.65 * FADED)


def glowing(image: Tensor, light: Tensor) -> Tensor:
    """[3, h, w]: red where a map is high, over the picture in grey."""
    grey = 0.7 * image.mean(dim=0, keepdim=True) + 0.3
    return grey + 0.85 * light * (torch.tensor(GLOW).view(3, 1, 1) - grey)


def outlined(image: Tensor, keep: Tensor, colour: Sequence[float], width: int = 2) -> Tensor:
    """A line just outside of what is kept."""
    reach = 2 * width + 1
    near = F.max_pool2d(keep[None, None].float(), reach, stride=1, padding=width)[0, 0] > 0
    return torch.where(near & ~keep, torch.tensor(colour).view(3, 1, 1), image)


def painted(view: View, parts: int) -> Tensor:
    """All parts, tinted and outlined in their colours."""
    assert view.part is not None
    picture = faded(view.image, view.part >= 0)
    for part in range(parts):
        own, colour = view.part == part, colour_of(part, parts)
        tint = 0.62 * view.image + 0.38 * torch.tensor(colour).view(3, 1, 1)
        picture = torch.where(own, tint, picture)
    return picture


def colour_of(part: int, parts: int) -> tuple[float, float, float]:
    """As everywhere: evenly around the wheel."""
    return hsv_to_rgb(part / parts, 0.9, 1.0)


def css_colour(part: int, parts: int) -> str:
    return "#" + "".join(f"{round(255 * level):02x}" for level in colour_of(part, parts))


def jpeg_uri(picture: Tensor) -> str:
    """A picture [3, h, w] that travels inside the page; the busier it is, the more is left out of it."""
    image = to_images(picture[None])[0]
    for quality in (82, 70, 55, 40, 25):
        content = io.BytesIO()
        image.save(content, "JPEG", quality=quality, optimize=True)
        if content.tell() <= MOST_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
