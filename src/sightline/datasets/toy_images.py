"""The toy images: birds drawn from parts on two kinds of background, with masks, part maps and key points.

The class (stork or duck) is determined by shape alone: colours and patterns have the same distribution for both.
The background (meadow or water) agrees with the class in most images: a shortcut that is easier to learn.
"""

from dataclasses import dataclass
from math import pi
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PART_NAMES = ("legs", "tail", "body", "wing", "beak", "head")  # from back to front: a later one hides an earlier one
CLASS_NAMES = ("stork", "duck")
BACKGROUND_NAMES = ("meadow", "water")
LEGS, TAIL, BODY, WING, BEAK, HEAD, BACKGROUND = range(len(PART_NAMES) + 1)

BLOCK = 16  # images drawn at once, always this many, so that image i does not depend on how many are drawn
MAX_CUT_OFF = 0.18  # of a bird's width or height, by the edge of the image
CELLS = 48  # random values along each side of a noise texture

# fmt: off
# Stork from, to, duck from, to, in hundredths: of a bird's unit of length, or of a radian; y points down.
BODY_PLAN = {
    "extent":     (66, 88, 46, 72),     "lean":       (-14, 14, -14, 14),   "wing_angle": (-25, 50, -25, 50),
    "body_long":  (85, 115, 80, 115),   "body_deep":  (50, 64, 66, 84),     "body_tilt":  (-60, -10, -30, 10),
    "neck_long":  (95, 145, 35, 65),    "neck_thick": (17, 23, 28, 36),     "neck_angle": (-160, -100, -140, -90),
    "neck_bend":  (-15, 65, -15, 35),   "head_size":  (31, 38, 44, 56),     "crest":      (30, 60, 0, 5),
    "gaze":       (-25, 50, -30, 30),   "gape":       (2, 20, 2, 30),       "beak_long":  (85, 125, 45, 65),
    "beak_deep":  (12, 16, 14, 19),     "beak_tip":   (1, 2, 13, 17),       "leg_long":   (150, 210, 45, 65),
    "leg_thick":  (7, 9, 8, 11),        "leg_bend":   (2, 22, 2, 30),       "stride":     (-28, 28, -40, 40),
    "lift":       (-200, 100, -200, 100), "toe_long": (34, 46, 34, 46),     "toe_wide":   (4, 5, 14, 18),
    "tail_long":  (65, 100, 55, 85),    "tail_angle": (-60, 0, 25, 85),     "wing_long":  (100, 125, 95, 120),
}
# The same for every class, in hundredths; a colour is hue from, to, saturation from, to, value from, to.
COAT = {
    "pattern": (0, 400), "pattern_scale": (180, 360), "pattern_angle": (0, 628), "pattern_strength": (45, 95),
    "belly": (0, 90), "hood": (-60, 100), "ink": (25, 65), "light": (5, 35), "shadow": (15, 45),
}
COAT_COLOURS = {"main": (0, 100, 5, 70, 40, 100), "other": (0, 100, 0, 65, 40, 100), "trim": (0, 100, 20, 85, 45, 100)}
# Meadow from, to, water from, to, in hundredths: of the image's side, or of a wave along it.
BACKGROUND_PLAN = {
    "horizon":      (12, 48, 12, 48),       "ridge":     (3, 16, 0, 2),         "light":       (85, 115, 80, 110),
    "far_rows":     (50, 250, 400, 900),    "light_x":   (-25, 25, -25, 25),    "far_columns": (900, 2000, 150, 400),
    "leaves":       (900, 2200, 400, 900),  "leafiness": (20, 70, 0, 35),       "light_y":     (-25, 25, -25, 25),
    "near_columns": (1400, 2200, 250, 600), "contrast":  (160, 350, 160, 350),  "near_rows":   (300, 700, 900, 2000),
    "shore":        (55, 150, 60, 150),     "glint":     (15, 70, 10, 80),      "shore_wave":  (5, 20, 5, 20),
    "puff_rise":    (-5, 4, 6, 30),         "puff_long": (0, 6, 5, 16),         "puff_deep":   (4, 11, 1, 4),
}
BACKGROUND_COLOURS = {
    "far":   (24, 40, 25, 60, 30, 70, 50, 62, 20, 55, 60, 98), "wood":  (5, 13, 20, 50, 20, 50, 50, 64, 0, 20, 85, 99),
    "leaf":  (20, 38, 35, 65, 40, 80, 52, 60, 5, 30, 75, 99), "near":  (20, 36, 40, 70, 45, 80, 49, 62, 35, 75, 45, 85),
    "dark":  (14, 34, 35, 65, 32, 65, 47, 64, 35, 75, 35, 75), "glint": (15, 25, 25, 60, 70, 95, 45, 60, 0, 20, 85, 99),
    "shore": (5, 11, 25, 55, 35, 65, 8, 13, 15, 45, 60, 92),   "puff":  (20, 38, 35, 65, 25, 60, 50, 64, 0, 12, 88, 99),
    "stone": (0, 99, 0, 25, 35, 85, 0, 99, 0, 25, 35, 85),     "stalk": (9, 36, 30, 65, 30, 80, 9, 36, 30, 65, 30, 80),
    "bloom": (0, 99, 10, 70, 75, 99, 5, 14, 10, 60, 40, 90),
}
# fmt: on


@dataclass(frozen=True)
class ToyImages:
    """n images of S x S pixels with their ground truth."""

    images: Tensor  # uint8 [n, 3, S, S]
    labels: Tensor  # int64 [n], into CLASS_NAMES
    backgrounds: Tensor  # int64 [n], into BACKGROUND_NAMES
    masks: Tensor  # bool [n, S, S]: the bird
    parts: Tensor  # uint8 [n, S, S]: the part in front, into PART_NAMES, or K = len(PART_NAMES) for background
    keypoints: Tensor  # float32 [n, K, 3]: x, y, visible; the visible pixel of a part nearest to their centre


def make_toy(
    count: int,
    *,
    size: int = 128,
    seed: int = 0,
    correlation: float = 0.95,
    displacement: float = 0.15,
    labels: Tensor | None = None, backgrounds: Tensor | None = None, first: int = 0,
) -> ToyImages:  # fmt: skip
    """Draw `count` images of `size` x `size` pixels; image i is the same however many are drawn.

    `correlation` is the probability that the background is the label's own. `displacement` is how far from the centre
    a bird may be, as a fraction of the size; the edge limits it. Giving `labels` or `backgrounds` changes nothing else:
    the same seed and label on another background is the same bird, pixel by pixel. Images before number `first`, a
    multiple of BLOCK, are left out.
    """
    _check(count, size, seed, correlation, displacement)
    label_draws, background_draws = (_uniform(np.random.default_rng((seed, stream)), count) for stream in (0, 1))
    labels = (label_draws < 0.5).long() if labels is None else _checked("labels", labels, count)
    drawn_backgrounds = labels ^ (background_draws >= correlation)
    backgrounds = drawn_backgrounds if backgrounds is None else _checked("backgrounds", backgrounds, count)

    images, parts = (torch.empty(count - first, *c, size, size, dtype=torch.uint8) for c in ((3,), ()))
    keypoints = torch.empty(count - first, len(PART_NAMES), 3)
    assert first % BLOCK == 0, "blocks are drawn whole"
    for start in range(first, count, BLOCK):
        block = slice(start, start + BLOCK)
        background_rng, bird_rng = (np.random.default_rng((seed, stream, start)) for stream in (2, 3))
        scenery, bird = _Canvas(size, tone=1.0), _Canvas(size, tone=0.0)
        _paint_scenery(scenery, backgrounds[block], background_rng)
        _paint_bird(bird, scenery, labels[block], displacement, bird_rng)
        bird.composite_over(scenery)
        for kept, drawn in zip((images, parts, keypoints), bird.render(), strict=True):
            kept[start - first : start - first + BLOCK] = drawn[: count - start]
    return ToyImages(images, labels[first:], backgrounds[first:], parts < BACKGROUND, parts, keypoints)


def _check(count: int, size: int, seed: int, correlation: float, displacement: float) -> None:
    if count < 1:
        raise ValueError(f"count is {count}: it must be at least 1")
    if size % 8 or not 32 <= size <= 256:
        raise ValueError(f"size is {size}: it must be a multiple of 8 from 32 to 256")
    if seed < 0:
        raise ValueError(f"seed is {seed}: it must not be negative")
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation is {correlation}: it must lie between 0 and 1")
    if not 0 <= displacement <= 0.4:
        raise ValueError(f"displacement is {displacement}: it must lie between 0 and 0.4 of the image's size")


def _checked(name: str, given: Tensor, count: int) -> Tensor:
    if tuple(given.shape) != (count,):
        raise ValueError(f"{name} has shape {list(given.shape)}: it must have one value per image, [{count}]")
    if not ((given == 0) | (given == 1)).all():
        raise ValueError(f"{name} contains {sorted(set(given.tolist()))}: only 0 and 1 are allowed")
    return given.to(torch.int64, copy=True)


def _uniform(generator: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(generator.random(shape, dtype=np.float32))


def _sample(table: dict, kinds: Tensor, generator: np.random.Generator, *, colours: bool = False) -> SimpleNamespace:
    """A random value [B, 1, 1], or colour [B, 3, 1, 1], from each range of the table for the kind of an image."""
    ranges = torch.tensor(list(table.values())).unflatten(1, (-1, 3, 2) if colours else (-1, 1, 2)) / 100
    low, high = ranges[:, F.pad(kinds, (0, BLOCK - len(kinds)))].unbind(-1)
    values = low + (high - low) * _uniform(generator, *low.shape)
    if colours:
        hue, saturation, value = values.split(1, dim=-1)
        sector = (hue * 6 + torch.tensor([5.0, 3.0, 1.0])) % 6
        values = (value * (1 - saturation * torch.minimum(sector, 4 - sector).clamp(0, 1)))[..., None]
    return SimpleNamespace(**dict(zip(table, values[..., None], strict=True)))


def _polar(angle: Tensor, length: Tensor | float) -> Tensor:
    return length * torch.exp(1j * angle)


class _Stroke(NamedTuple):
    """A brush stroke from one disc to another. Points are complex numbers, so that a rotation is a product."""

    start: Tensor
    end: Tensor
    start_radius: Tensor
    end_radius: Tensor

    def signed_distance(self, x: Tensor, y: Tensor) -> Tensor:
        x, y, direction = x - self.start.real, y - self.start.imag, self.end - self.start
        length = (direction * direction.conj()).real + 1e-6
        along = (x * (direction.real / length) + y * (direction.imag / length)).clamp_(0, 1)
        aside, below = (along * -direction.real).add_(x), (along * -direction.imag).add_(y)
        gap = aside.mul_(aside).addcmul_(below, below).sqrt_()
        return gap.sub_(self.start_radius).add_(along.mul_(self.start_radius - self.end_radius))


class _Canvas:
    """A block of images, painted back to front: their colour, and their tone (light and ink), which multiplies it."""

    def __init__(self, size: int, tone: float):
        self.size = size
        self.x = (torch.arange(size) + 0.5).expand(BLOCK, 1, size)
        self.y = self.x.mT
        self.colour, self.tone = torch.zeros(BLOCK, 3, size, size), torch.full((BLOCK, size, size), tone)
        self.front, self.uncovered = torch.full((BLOCK, size, size), -1.0), torch.ones(BLOCK, size, size)

    def blend(self, colour: Tensor, cover: Tensor) -> None:
        self.colour.lerp_(colour, cover[:, None])

    def paint(self, strokes: list[_Stroke], colour: Tensor, ink, light=1.0, *, part: int | None = None) -> Tensor:
        """Cover the union of the strokes, darker by `ink` at its edge."""
        distance = strokes[0].signed_distance(self.x, self.y)
        for stroke in strokes[1:]:
            distance = torch.minimum(distance, stroke.signed_distance(self.x, self.y))
        cover = (0.5 - distance).clamp_(0, 1)
        if part is not None:  # `part` where more than half is covered, elsewhere a value below any part
            torch.maximum(self.front, distance.sign().mul_(-part - 2).sub_(2), out=self.front)
            self.uncovered.mul_(1 - cover)
        self.blend(colour, cover)
        edge = distance.div_(max(0.016 * self.size, 1.0)).add_(1).clamp_(0, 1)
        self.tone.lerp_(edge.mul_(-ink).add_(1).mul_(light), cover)
        return cover

    def composite_over(self, scenery: "_Canvas") -> None:
        """Put the scenery behind the bird; it does not show through where all neighbouring pixels are the bird's."""
        self.uncovered.mul_(F.max_pool2d(-self.front, 3, stride=1, padding=1) > 0)
        self.colour.addcmul_(scenery.colour, self.uncovered[:, None])
        self.tone.addcmul_(scenery.tone, self.uncovered)

    def render(self) -> tuple[Tensor, Tensor, Tensor]:
        images = (self.colour * self.tone[:, None]).mul_(255).round_().clamp_(0, 255).byte()
        parts = torch.where(self.front < 0, BACKGROUND, self.front).byte()
        return images, parts, torch.stack([self.keypoint(part) for part in range(len(PART_NAMES))], 1)

    def keypoint(self, part: int) -> Tensor:
        inside = (1 - (self.front - part).abs_()).clamp_(min=0)
        area = inside.sum((1, 2), keepdim=True).clamp_(min=1)
        middle_x = (inside.sum(1, keepdim=True) * self.x).sum(2, keepdim=True) / area
        middle_y = (inside.sum(2, keepdim=True) * self.y).sum(1, keepdim=True) / area
        squared_distance = (self.x - middle_x) ** 2 + (self.y - middle_y) ** 2 - 1e6 * inside
        row = squared_distance.amin(2).argmin(1)
        nearest, column = squared_distance[torch.arange(BLOCK), row].min(1)
        return torch.stack([column, row, torch.ones_like(row)], 1) * (nearest < 0)[:, None].float()


def _paint_bird(canvas: _Canvas, scenery: _Canvas, labels: Tensor, displacement: float, generator) -> None:
    plan, coat = _sample(BODY_PLAN, labels, generator), _sample(COAT, 0 * labels, generator)
    colours = _sample(COAT_COLOURS, 0 * labels, generator, colours=True)
    pose_draws, cells = _uniform(generator, 3, BLOCK, 1, 1), _uniform(generator, BLOCK, CELLS, CELLS)
    bird, frame = _fit_to_canvas(_anatomy(plan), plan, pose_draws, displacement, canvas.size)

    rise = (frame.centre.imag - canvas.y) / frame.reach.imag
    light, ink = 1 + coat.light * rise.clamp(-1, 1), coat.ink
    belly = coat.belly * (0.3 + 1.6 * (canvas.y - frame.body.imag) / frame.scale).clamp(0, 1)
    pattern = _pattern(canvas, frame, coat, cells)
    hood = torch.where(coat.hood[:, None] > 0, colours.other, colours.main)
    shadow = ((canvas.x - frame.centre.real) / frame.reach.real / 0.9) ** 2
    shadow = shadow + ((rise + 0.97) * frame.reach.imag / frame.reach.real / 0.16) ** 2
    scenery.tone.mul_(1 - coat.shadow * (1 - shadow).clamp_(min=0))

    canvas.paint(bird["far leg"], colours.trim, ink, 0.75 * light, part=LEGS)
    canvas.paint(bird["near leg"], colours.trim, ink, light, part=LEGS)
    for feather in bird["tail"]:
        canvas.paint([feather], colours.other, ink, 0.9 * light, part=TAIL)
    cover = canvas.paint(bird["body"], colours.main, ink, light, part=BODY)
    canvas.blend(colours.other, cover * torch.maximum(belly, pattern))
    for feather in bird["wing"]:
        canvas.paint([feather], hood, ink, 0.88 * light, part=WING)
    canvas.paint(bird["beak"], colours.trim, ink, light, part=BEAK)
    canvas.paint(bird["crest"], colours.other, ink, light, part=HEAD)
    canvas.paint(bird["head"], hood, ink, light, part=HEAD)
    for disc, brightness in zip(bird["eye"], (0.97, 0.08, 1.0), strict=True):
        canvas.paint([disc], torch.tensor(brightness), 0.3 * ink)


def _anatomy(p: SimpleNamespace) -> dict[str, list[_Stroke]]:
    """The bird in its own units, its body at the origin, looking right."""
    chest = _polar(p.body_tilt, 0.4 * p.body_long)
    nape = chest + _polar(p.body_tilt - 0.7, 0.3 * p.body_deep)
    bend = nape + _polar(p.neck_angle - p.neck_bend, 0.2 * p.body_deep + 0.55 * p.neck_long)
    head = bend + _polar(p.neck_angle + p.neck_bend, 0.55 * p.neck_long)
    rump = -chest + _polar(p.body_tilt + pi, 0.35 * p.body_deep)
    shoulder = 0.3 * chest + _polar(p.body_tilt - pi / 2, 0.1 * p.body_deep)
    tail, wing = p.body_tilt + pi + p.tail_angle, p.body_tilt + pi + p.wing_angle
    return {
        "far leg": _leg_strokes(p, -0.12, p.stride, p.lift.clamp(min=0)),
        "near leg": _leg_strokes(p, 0.12, -p.stride, 0 * p.lift),
        "tail": [
            _Stroke(rump, rump + _polar(tail + fan, long * p.tail_long), 0.2 * p.body_deep, 0.17 * p.tail_long)
            for fan, long in ((-0.35, 0.85), (0.35, 0.85), (0, 1))
        ],
        "body": [
            _Stroke(-chest, chest, 0.72 * p.body_deep, p.body_deep),
            _Stroke(nape, bend, 0.75 * p.body_deep, p.neck_thick),
            _Stroke(bend, head, p.neck_thick, p.neck_thick),
        ],
        "wing": [
            _Stroke(shoulder, shoulder + _polar(wing + fan, long * p.wing_long), 0.4 * p.body_deep, wide * p.wing_long)
            for fan, long, wide in ((0, 1, 0.09), (-0.2, 0.82, 0.1), (-0.42, 0.62, 0.11), (-0.3, 0.3, 0.25))
        ],
        **_head_strokes(p, head, p.head_size),
    }


def _head_strokes(p: SimpleNamespace, head: Tensor, size: Tensor) -> dict[str, list[_Stroke]]:
    mouth, eye = head + _polar(p.gaze + 0.15, 0.7 * size), head + _polar(p.gaze - 0.65, 0.38 * size)
    lower, upper = mouth + _polar(p.gaze + p.gape, 0.86 * p.beak_long), mouth + _polar(p.gaze, p.beak_long)
    discs = ((eye, 0.34 * size), (eye, 0.23 * size), (eye + 0.09 * size * (1 - 1j), 0.09 * size))
    beak = [(lower, 0.8 * p.beak_deep, 0.7 * p.beak_tip), (upper, p.beak_deep, p.beak_tip)]
    return {
        "beak": [_Stroke(mouth, tip, thick, thin) for tip, thick, thin in beak],
        "crest": [
            _Stroke(head, head + _polar(p.gaze + angle, 0.8 * size + long * p.crest), 0.3 * size, 0.13 * size)
            for angle, long in ((-1.9, 0.75), (-2.3, 1), (-2.75, 0.9))
        ],
        "head": [_Stroke(head, head + _polar(p.gaze, 0.3 * size), size, 0.88 * size)],
        "eye": [_Stroke(centre, centre, radius, radius) for centre, radius in discs],
    }


def _leg_strokes(p: SimpleNamespace, offset: float, swing: Tensor, lift: Tensor) -> list[_Stroke]:
    hip = torch.complex(offset + 0 * swing, 0.7 * p.body_deep)
    knee = hip + _polar(pi / 2 + swing + p.leg_bend - 0.9 * lift, 0.5 * p.leg_long)
    foot = knee + _polar(pi / 2 + swing - p.leg_bend + 1.1 * lift, 0.5 * p.leg_long)
    toe, heel = (foot + _polar(turn + 0.5 * lift, long * p.toe_long) for turn, long in ((0.15, 1), (2.9, 0.4)))
    leg = [_Stroke(hip, knee, 1.9 * p.leg_thick, p.leg_thick), _Stroke(knee, foot, p.leg_thick, p.leg_thick)]
    return [*leg, _Stroke(foot, toe, p.leg_thick, p.toe_wide), _Stroke(foot, heel, p.leg_thick, 0.6 * p.leg_thick)]


def _fit_to_canvas(bird: dict, p: SimpleNamespace, pose_draws: Tensor, displacement: float, size: int) -> tuple:
    """The bird in pixels: leaning, perhaps mirrored, scaled, and displaced from the centre."""
    strokes = [stroke for strokes in bird.values() for stroke in strokes]
    ends = torch.stack([torch.stack(stroke[:2]) for stroke in strokes]) * _polar(p.lean, 1.0)
    radii = torch.stack([torch.stack(stroke[2:]) for stroke in strokes])
    ends = torch.where(pose_draws[0] < 0.5, -ends.conj(), ends)
    left, right = (ends.real - radii).amin((0, 1)), (ends.real + radii).amax((0, 1))
    top, bottom = (ends.imag - radii).amin((0, 1)), (ends.imag + radii).amax((0, 1))
    scale = p.extent * size / torch.maximum(right - left, bottom - top)
    reach = torch.complex(right - left, bottom - top) * scale / 2
    displaced = _polar(2 * pi * pose_draws[1], displacement * size * pose_draws[2].sqrt())
    room_x, room_y = ((size / 2 - (1 - 2 * MAX_CUT_OFF) * side).clamp(min=0) for side in (reach.real, reach.imag))
    centre = torch.complex(displaced.real.clamp(-room_x, room_x), displaced.imag.clamp(-room_y, room_y)) + size / 2 * (
        1 + 1j
    )
    body = centre - scale * torch.complex(left + right, top + bottom) / 2
    radii = (radii * scale).clamp(min=0.5)  # half a pixel is the thinnest line that holds together
    strokes_in_pixels = (_Stroke(*end, *radius) for end, radius in zip(body + scale * ends, radii, strict=True))
    fitted = {name: [next(strokes_in_pixels) for _ in strokes] for name, strokes in bird.items()}
    return fitted, SimpleNamespace(centre=centre, reach=reach, body=body, scale=scale)


def _pattern(canvas: _Canvas, frame: SimpleNamespace, coat: SimpleNamespace, cells: Tensor) -> Tensor:
    """Plain, striped, dotted or blotched; moves with the bird."""
    x, y = canvas.x - frame.body.real, canvas.y - frame.body.imag
    turn = _polar(coat.pattern_angle, coat.pattern_scale / frame.scale)
    waves = (x * turn.real + y * turn.imag, y * turn.real - x * turn.imag)
    across, along = ((wave - wave.floor()).sub_(0.5).abs_() for wave in waves)
    sharp, kind = frame.scale / coat.pattern_scale, coat.pattern.floor()
    stripes = (across - 0.25).mul_(sharp).add_(0.5).clamp_(0, 1)
    dots = (0.09 - across.mul_(across).addcmul_(along, along)).mul_(1.6 * sharp).add_(0.5).clamp_(0, 1)
    blotches = _noise(cells, CELLS / 2 + y.mT * turn.abs(), CELLS / 2 + x * turn.abs()).sub_(0.55).mul_(12).clamp_(0, 1)
    return (stripes * (kind == 1) + dots * (kind == 2) + blotches * (kind == 3)).mul_(coat.pattern_strength)


def _noise(cells: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Smooth noise: random values [B, CELLS, CELLS] read at these row and column positions, [B, 1, S] each."""
    weights = ((1 - (positions.mT - torch.arange(CELLS)).abs_()).clamp_(min=0) for positions in (rows, columns))
    by_row, by_column = (weight * weight * (3 - 2 * weight) for weight in weights)
    return by_row @ cells @ by_column.mT


def _paint_scenery(canvas: _Canvas, backgrounds: Tensor, generator: np.random.Generator) -> None:
    p = _sample(BACKGROUND_PLAN, backgrounds, generator)
    colours = _sample(BACKGROUND_COLOURS, backgrounds, generator, colours=True)
    cells = _uniform(generator, 5, BLOCK, CELLS, CELLS)
    _paint_wood_or_sky(canvas, p, colours, cells, generator)
    _paint_grass_or_water(canvas, p, colours, cells)
    _paint_stones_and_stalks(canvas, p, colours, generator)
    x, y = canvas.x / canvas.size - 0.5, canvas.y / canvas.size - 0.5
    canvas.tone.mul_(p.light * (1 + p.light_x * x + p.light_y * y))


def _paint_wood_or_sky(canvas, p, colours, cells, generator) -> None:
    size, steps = canvas.size, canvas.x / canvas.size
    trunks = _noise(cells[0], steps * p.far_rows, steps * p.far_columns).mul_(3).sub_(1).clamp_(0, 1)
    leaves = _noise(cells[1], steps * p.leaves, steps * p.leaves).mul_(3).sub_(1).clamp_(0, 1).mul_(p.leafiness)
    for colour, cover in ((colours.far, torch.ones_like(leaves)), (colours.wood, trunks), (colours.leaf, leaves)):
        canvas.blend(colour, cover)
    clouds = []
    for x, rise, long, deep in _uniform(generator, 5, 4, BLOCK, 1, 1):
        middle = torch.complex(x, p.horizon - p.puff_rise * (0.4 + 0.6 * rise)) * size
        half, radius = p.puff_long * (0.3 + long) * size, p.puff_deep * (0.6 + 0.8 * deep) * size
        clouds.append(_Stroke(middle - half, middle + half, radius, 0.8 * radius))
    canvas.paint(clouds, colours.puff, 0.0)


def _paint_grass_or_water(canvas, p, colours, cells) -> None:
    size, steps = canvas.size, canvas.x / canvas.size
    # The root makes the grain finer towards the horizon, as distance does.
    depth = ((steps - p.horizon + 0.05) / (1.05 - p.horizon)).clamp(min=0).sqrt()
    rows, columns = depth * p.near_rows, steps * p.near_columns
    grain = _noise(cells[2], rows, columns).lerp_(_noise(cells[3], 2 * rows, 2 * columns), 0.45)
    sky_wave, shore_wave = (_noise(cells[4], torch.full((BLOCK, 1, 1), row), steps * 9) - 0.5 for row in (0.0, 2.0))
    ground = (canvas.y - (p.horizon + p.ridge * sky_wave) * size).add_(0.5).clamp_(0, 1)
    shore = (canvas.y / size - p.shore - p.shore_wave * shore_wave).mul_(20).add_(0.5).clamp_(0, 1)
    canvas.blend(colours.near, ground)
    canvas.blend(colours.dark, (grain - 0.5).mul_(p.contrast).add_(0.5).clamp_(0, 1).mul_(ground))
    canvas.blend(colours.glint, (grain - 0.62).mul_(9).clamp_(0, 1).mul_(ground).mul_(p.glint))
    canvas.blend(colours.shore, grain.mul_(0.5).add_(0.75).clamp_(0, 1).mul_(shore))


def _paint_stones_and_stalks(canvas, p, colours, generator) -> None:
    stones, stalks, blooms, size = [], [], [], canvas.size
    for x, y, long, lot, lean in _uniform(generator, 4, 5, BLOCK, 1, 1):
        left, right = (torch.complex(side, p.horizon + 0.08 + (1 - p.horizon) * y) * size for side in (x, 1 - x))
        tip = left + _polar(0.5 * lean - 0.25 - pi / 2, (0.06 + 0.25 * long) * size)
        thick = (lot - 0.3) * size  # and a negative radius draws nothing
        stones.append(_Stroke(right, right + 0.08 * long * size, 0.06 * thick, 0.045 * thick))
        stalks.append(_Stroke(left, tip, 0.02 * thick, 0.01 * thick))
        blooms.append(_Stroke(tip, 0.85 * tip + 0.15 * left, 0.04 * thick, 0.025 * thick))
    for strokes, colour in ((stones, colours.stone), (stalks, colours.stalk), (blooms, colours.bloom)):
        canvas.paint(strokes, colour, 0.4)
