"""The recipes: which bird is shown on which scene, where, in which split. Pixels come later (`paste.py`).

Every draw is a hash of the seed and the bird's number (and of what is drawn), and shares are the birds with the lowest
hashes, so the same bird always gives the same picture. No scene photograph serves two splits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import cos, pi, sin

from ..config import Build
from ..errors import UserError
from .birds import PARTS, Bird, Birds, Scenes
from .paste import Picture, Pose, Thing

PUBLISHED_CORRELATION = 0.95  # of Waterbirds, in training; none in validation and test
PUBLISHED_VAL = 0.2  # of CUB's training photographs
SPECIES_VAL = 0.125  # for 200 species: four of their thirty training photographs
# Four families of many species, told by the last word of their names.
FAMILIES = {
    "blackbird": ("blackbird", "bobolink", "cowbird", "grackle", "meadowlark", "oriole"),
    "gull": ("gull", "kittiwake", "tern"),
    "sparrow": ("sparrow",),
    "warbler": ("warbler",),
}
ENVIRONMENTS = (0.97, 0.87)  # Spawrious: how often a class is on its own scene, in two halves of the training set
LOCATIONS = tuple(place for place in product((0.2, 0.5, 0.8), repeat=2) if place != (0.5, 0.5))
ANGLES = tuple(range(45, 360, 45))
EXTENTS = (0.1, 0.15, 0.2, 0.3, 0.6, 0.8)
USUAL_EXTENT = 0.4
REPEATS = 2  # cells of each shift that a test bird is shown in


def waterbirds(birds: Birds, scenes: Scenes, options: Build) -> list[Picture]:
    """Landbirds and waterbirds, on land and on water: class and place go together in training, not in the test."""
    grounds = Grounds(scenes, options.seed, {"land": options.land, "water": options.water})
    return [
        Picture(bird, split, _side(bird), {"place": place}, grounds.pick(place, split, bird))
        for bird, split, place in _placed(birds, options)
    ]


def cub_swapped(birds: Birds, scenes: Scenes, options: Build) -> list[Picture]:
    """200 species in their own photographs; in the test also on a scene of the other place, where they do not live."""
    grounds = Grounds(scenes, options.seed, {"land": options.land, "water": options.water})
    original, swapped = {"background": "original"}, {"background": "swapped"}
    pictures = []
    for bird, split in _official(birds.all, options.seed, SPECIES_VAL, lambda bird: bird.species):
        pictures.append(Picture(bird, split, bird.species, original, variant="original"))
        if split == "test":
            scene = grounds.pick(_other_place(bird), split, bird)
            pictures.append(Picture(bird, split, bird.species, swapped, scene, variant="swapped"))
    return pictures


def scenes_o2o(birds: Birds, scenes: Scenes, options: Build) -> list[Picture]:
    """One to one, after Spawrious: each of four families has its own scene in training, and another's in the test.

    In training the rest (3 % in one half, 13 % in the other) is on a scene that all share.
    """
    types = _six(options)
    own = dict(zip(FAMILIES, types, strict=False))
    other = dict(zip(FAMILIES, types[1:4] + types[:1], strict=True))
    grounds = Grounds(scenes, options.seed, {name: (name,) for name in types[:5]})
    split_birds = list(_official(_families(birds, options.seed), options.seed, PUBLISHED_VAL, _family))
    halves: dict[tuple[str, str], list[Bird]] = {}
    for bird, split in split_birds:
        halves.setdefault((split, _family(bird)), []).append(bird)
    place, environment = {}, {}
    for (split, family), members in halves.items():
        first = lowest(members, 0.5, options.seed, "environment")
        for number, share in enumerate(ENVIRONMENTS):
            half = [bird for bird in members if (bird.id in first) == (number == 0)]
            usual = lowest(half, 1.0 if split == "test" else share, options.seed, "filler")
            for bird in half:
                scene = other[family] if split == "test" else own[family]
                place[bird.id] = scene if bird.id in usual else types[4]
                environment[bird.id] = "" if split == "test" else str(number)
    pictures = []
    for bird, split in split_birds:
        scene, extra = place[bird.id], {"environment": environment[bird.id]}
        shown = grounds.pick(scene, split, bird)
        pictures.append(Picture(bird, split, _family(bird), {"scene": scene}, shown, extra=extra))
    return pictures


def scenes_m2m(birds: Birds, scenes: Scenes, options: Build) -> list[Picture]:
    """Many to many, after Spawrious: two families share two scenes, two others two others; swapped in the test."""
    types = _six(options)
    grounds = Grounds(scenes, options.seed, {name: (name,) for name in types[:4]})
    pairs = (types[1], types[2]), (types[0], types[3])
    pictures = []
    for bird, split in _official(_families(birds, options.seed), options.seed, PUBLISHED_VAL, _family):
        first = _family(bird) in list(FAMILIES)[:2]
        scene = _choice(pairs[first == (split == "test")], options.seed, bird.id, "type")
        pictures.append(Picture(bird, split, _family(bird), {"scene": scene}, grounds.pick(scene, split, bird)))
    return pictures


def scenes_disjoint(birds: Birds, scenes: Scenes, options: Build) -> list[Picture]:
    """Four families on three types of scenes in training and validation, and on three others in the test."""
    types = _six(options)
    grounds = Grounds(scenes, options.seed, {name: (name,) for name in types})
    pictures = []
    for bird, split in _official(_families(birds, options.seed), options.seed, PUBLISHED_VAL, _family):
        scene = _choice(types[1::2] if split == "test" else types[::2], options.seed, bird.id, "type")
        pictures.append(Picture(bird, split, _family(bird), {"scene": scene}, grounds.pick(scene, split, bird)))
    return pictures


def mixed(birds: Birds, scenes: Scenes, options: Build) -> list[Picture]:
    """For the background gap: trained as Waterbirds, tested on the photograph, a scene of the class, and any scene.

    In training, `same` is a scene of the bird's class and `other` one of the other class.
    """
    grounds = Grounds(scenes, options.seed, {"land": options.land, "water": options.water})
    pictures = []
    for bird, split, place in _placed(birds, options):
        own = _own_place(bird)
        if split == "test":
            anywhere = _choice(("land", "water"), options.seed, bird.id, "class")
            versions = {name: grounds.pick(on, split, bird, name) for name, on in (("same", own), ("rand", anywhere))}
            versions = {"original": ""} | versions
        else:
            versions = {"same" if place == own else "other": grounds.pick(place, split, bird)}
        for name, scene in versions.items():
            variant = name if split == "test" else split
            pictures.append(Picture(bird, split, _side(bird), {"background": name}, scene, variant))
    return pictures


def displaced(birds: Birds, scenes: Scenes, options: Build) -> list[Picture]:
    """Waterbirds with birds moved off the centre; in the test also at the centre, just as large, to compare with.

    To have room, birds are shrunk to at most 0.4 of the picture's width and height. Distance 0.3 is to the edge.
    """
    furthest = (1 - USUAL_EXTENT) / 2
    if not 0 <= options.distance <= furthest:
        raise UserError(f"a distance of {options.distance:g}: birds stay in the picture from 0 to {furthest:g}")
    grounds = Grounds(scenes, options.seed, {"land": options.land, "water": options.water})
    pictures = []
    for bird, split, place in _placed(birds, options):
        angle = 2 * pi * chance(options.seed, bird.id, "direction")
        x, y = 0.5 + options.distance * cos(angle), 0.5 + options.distance * sin(angle)
        away, centred = Pose(USUAL_EXTENT, x, y, enlarge=False), Pose(USUAL_EXTENT, enlarge=False)
        poses: dict[str, Pose | None] = {"displaced": away}
        if split == "test":
            poses["centred"] = centred
        elif options.moved == "test":
            poses = {"kept": None}
        for name, pose in poses.items():
            groups, scene = {"place": place, "position": name}, grounds.pick(place, split, bird)
            pictures.append(Picture(bird, split, _side(bird), groups, scene, name, pose))
    return pictures


def spurious_object(birds: Birds, scenes: Scenes | None, options: Build) -> list[Picture]:  # noqa: ARG001 (alike)
    """Landbirds and waterbirds in their own photographs, with a drawn object that goes with the class in training."""
    pictures = []
    for bird, split, place in _placed(birds, options):
        thing = options.objects[place == "water"]  # the draw is the same, with things in place of places
        drawn = None if thing == "none" else Thing(thing, draw(options.seed, bird.id, "object"))
        pictures.append(Picture(bird, split, _side(bird), {"object": thing}, thing=drawn))
    return pictures


def si_score(birds: Birds, scenes: Scenes, options: Build) -> list[Picture]:
    """Four families, trained on photographs; tested as cut-outs on any scene: moved, turned or resized, one at a time.

    Every test bird is shown upright in the centre at 0.4 of the picture (`none`), at 2 of 8 other locations, at 2 of 7
    angles and in 2 of 6 sizes, on the same scene throughout.
    """
    grounds = Grounds(scenes, options.seed, {name: (name,) for name in _six(options)})
    shifts = {
        "location": {f"{x:g} {y:g}": Pose(USUAL_EXTENT, x, y) for x, y in LOCATIONS},
        "rotation": {f"{angle}": Pose(USUAL_EXTENT, angle=angle) for angle in ANGLES},
        "size": {f"{extent:g}": Pose(extent) for extent in EXTENTS},
    }
    pictures = []
    for bird, split in _official(_families(birds, options.seed), options.seed, PUBLISHED_VAL, _family):
        if split != "test":
            pictures.append(Picture(bird, split, _family(bird), {"shift": "photograph"}, variant="photograph"))
            continue
        scene = grounds.pick(_choice(_six(options), options.seed, bird.id, "type"), split, bird)
        poses = [("none", Pose(USUAL_EXTENT))]
        for shift, cells in shifts.items():
            names = sorted(cells, key=partial(draw, options.seed, bird.id, shift))[:REPEATS]
            poses += [(f"{shift} {name}", cells[name]) for name in names]
        for name, pose in poses:
            variant = name.replace(" ", "_")
            pictures.append(Picture(bird, split, _family(bird), {"shift": name}, scene, variant, pose))
    return pictures


def sample(pictures: list[Picture], limit: int | None) -> list[Picture]:
    """The pictures of so many birds: a larger sample contains the smaller."""
    birds = {picture.bird.id for picture in pictures}
    if limit is None or limit >= len(birds):
        return pictures
    chosen = set(sorted(birds, key=lambda bird: draw("sample", bird))[:limit])
    return [picture for picture in pictures if picture.bird.id in chosen]


def draw(*what: object) -> int:
    """64 bits that depend on nothing else."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, what)).encode()).digest()[:8], "big")


def chance(*what: object) -> float:
    return draw(*what) / 2**64


def lowest(birds: Sequence[Bird], share: float, seed: int, what: str) -> set[int]:
    """This share of the birds, by number: exact shares, whichever birds a seed takes."""
    order = sorted((bird.id for bird in birds), key=lambda number: draw(seed, number, what))
    return set(order[: round(share * len(order))])


class Grounds:
    """Scenes by place and split, each in its own pool."""

    def __init__(self, scenes: Scenes, seed: int, places: dict[str, tuple[str, ...]]):
        self.seed = seed
        folders = {place: sorted({f for name in names for f in scenes.named(name)}) for place, names in places.items()}
        owner: dict[str, str] = {}
        for place, names in folders.items():
            for folder in names:
                if folder in owner:
                    raise UserError(
                        f"the scenes in '{folder}' cannot be both {owner[folder]} and {place}; choose others"
                    )
                owner[folder] = place
        self.pools = {(place, split): scenes.pool(folders[place], split) for place in places for split in PARTS}

    def pick(self, place: str, split: str, bird: Bird, *what: str) -> str:
        pool = self.pools[place, split]
        return pool[draw(self.seed, bird.id, *what) % len(pool)]


def _placed(birds: Birds, options: Build) -> Iterator[tuple[Bird, str, str]]:
    """Split and place of each bird: from the label file where there is one, else drawn as published."""
    if options.correlation is None and all(bird.split and bird.place for bird in birds.all):
        yield from ((bird, bird.split, bird.place) for bird in birds.all if bird.split and bird.place)
        return
    share = PUBLISHED_CORRELATION if options.correlation is None else options.correlation
    split_of = {bird.id: split for bird, split in _official(birds.all, options.seed, PUBLISHED_VAL, _side)}
    cells: dict[tuple[str, bool], list[Bird]] = {}
    for bird in birds.all:
        cells.setdefault((split_of[bird.id], bird.waterbird), []).append(bird)
    own = set()
    for (split, _), members in cells.items():
        own |= lowest(members, share if split == "train" else 0.5, options.seed, "place")
    for bird in birds.all:
        yield bird, split_of[bird.id], _own_place(bird) if bird.id in own else _other_place(bird)


def _official(
    birds: Iterable[Bird], seed: int, val: float, stratum: Callable[[Bird], str]
) -> Iterator[tuple[Bird, str]]:
    """CUB's own test split; validation is this share of its training split, the same in every stratum, one at least."""
    birds, strata = list(birds), {}
    for bird in birds:
        if not bird.tested:
            strata.setdefault(stratum(bird), []).append(bird)
    held_out = set()
    for members in strata.values():
        held_out |= lowest(members, max(val, 1 / len(members)) if len(members) > 1 else 0, seed, "val")
    for bird in birds:
        yield bird, "test" if bird.tested else "val" if bird.id in held_out else "train"


def _families(birds: Birds, seed: int) -> list[Bird]:
    """The birds of the four families: as many of each as of the smallest, in CUB's training and its test split."""
    cells: dict[tuple[str, bool], list[Bird]] = {
        (family, tested): [] for family in FAMILIES for tested in (False, True)
    }
    for bird in birds.all:
        if family := _family(bird):
            cells[family, bird.tested].append(bird)
    chosen = set()
    for (family, tested), members in cells.items():
        if not members:
            raise UserError(f"{birds.files.root}: no {'test' if tested else 'training'} photographs of a {family}")
        fewest = min(len(others) for (_, same), others in cells.items() if same == tested)
        chosen |= lowest(members, fewest / len(members), seed, "family")
    return [bird for bird in birds.all if bird.id in chosen]


def _family(bird: Bird) -> str:
    return next((family for family, kinds in FAMILIES.items() if bird.kind in kinds), "")


def _six(options: Build) -> tuple[str, ...]:
    if len(options.types) != 6:
        raise UserError(f"{len(options.types)} types of scenes; these sets take six")
    return options.types


def _choice(among: Sequence[str], *what: object) -> str:
    return among[draw(*what) % len(among)]


def _side(bird: Bird) -> str:
    return "waterbird" if bird.waterbird else "landbird"


def _own_place(bird: Bird) -> str:
    return "water" if bird.waterbird else "land"


def _other_place(bird: Bird) -> str:
    return "land" if bird.waterbird else "water"
