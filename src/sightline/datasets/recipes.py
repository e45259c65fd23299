"""The recipes of `sightline data`: which bird goes on which scene, in which pose and split; no pixels (`paste.py`).

Every random draw is a hash of the seed, the bird's number and the name of the draw, and a share of the birds is the
birds with the lowest hashes, so the image of a bird never depends on other birds. No scene photograph is in two splits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import cos, pi, sin

from ..config import Build
from ..errors import UserError
from .birds import SPLIT_PERCENT, Bird, Birds, Scenes
from .paste import ImagePlan, Pose, SpuriousObject

PUBLISHED_CORRELATION = 0.95  # of class and background in Waterbirds' training split; 0.5 in validation and test
VALIDATION_SHARE = 0.2  # of CUB's training photographs
SPECIES_VALIDATION_SHARE = 0.125  # for 200 species: four of their thirty training photographs
# Four families of many species, recognised by the last word of their names.
FAMILIES = {
    "blackbird": ("blackbird", "bobolink", "cowbird", "grackle", "meadowlark", "oriole"),
    "gull": ("gull", "kittiwake", "tern"),
    "sparrow": ("sparrow",),
    "warbler": ("warbler",),
}
ENVIRONMENTS = (0.97, 0.87)  # Spawrious: how often a class is on its own scene type, in two halves of the training set
LOCATIONS = tuple(point for point in product((0.2, 0.5, 0.8), repeat=2) if point != (0.5, 0.5))
ANGLES = tuple(range(45, 360, 45))
EXTENTS = (0.1, 0.15, 0.2, 0.3, 0.6, 0.8)
USUAL_EXTENT = 0.4
REPEATS = 2  # values of each factor that a test bird is shown with


def waterbirds(birds: Birds, scenes: Scenes, options: Build) -> list[ImagePlan]:
    """Landbirds and waterbirds on land and water: class and background are correlated in training, not in the test."""
    backgrounds = _land_and_water(scenes, options)
    return [
        ImagePlan(bird, split, _class_of(bird), {"place": background}, backgrounds.pick(background, split, bird))
        for bird, split, background in _assign_backgrounds(birds, options)
    ]


def cub_swapped(birds: Birds, scenes: Scenes, options: Build) -> list[ImagePlan]:
    """200 species in their own photographs; in the test also on the background where they do not live."""
    backgrounds = _land_and_water(scenes, options)
    original, swapped = {"background": "original"}, {"background": "swapped"}
    plans = []
    for bird, split in _cub_splits(birds.all, options.seed, SPECIES_VALIDATION_SHARE, lambda bird: bird.species):
        plans.append(ImagePlan(bird, split, bird.species, original, variant="original"))
        if split == "test":
            scene = backgrounds.pick(_background_of(bird, own=False), split, bird)
            plans.append(ImagePlan(bird, split, bird.species, swapped, scene, variant="swapped"))
    return plans


def scenes_o2o(birds: Birds, scenes: Scenes, options: Build) -> list[ImagePlan]:
    """One to one, after Spawrious: each of four families has its own scene type in training, another one in the test.

    The rest of the training images (3 % in one half, 13 % in the other) are on a scene type that all families share.
    """
    types = _six_types(options)
    own = dict(zip(FAMILIES, types, strict=False))
    other = dict(zip(FAMILIES, types[1:4] + types[:1], strict=True))
    backgrounds = Backgrounds(scenes, options.seed, {name: (name,) for name in types[:5]})
    family_splits = list(_family_splits(birds, options))
    cells: dict[tuple[str, str], list[Bird]] = {}
    for bird, split in family_splits:
        cells.setdefault((split, _family(bird)), []).append(bird)
    type_of, environment = {}, {}
    for (split, family), members in cells.items():
        first = sample_share(members, 0.5, options.seed, "environment")
        for number, share in enumerate(ENVIRONMENTS):
            half = [bird for bird in members if (bird.id in first) == (number == 0)]
            usual = sample_share(half, 1.0 if split == "test" else share, options.seed, "filler")
            for bird in half:
                scene_type = other[family] if split == "test" else own[family]
                type_of[bird.id] = scene_type if bird.id in usual else types[4]
                environment[bird.id] = "" if split == "test" else str(number)
    plans = []
    for bird, split in family_splits:
        scene_type, extra = type_of[bird.id], {"environment": environment[bird.id]}
        scene = backgrounds.pick(scene_type, split, bird)
        plans.append(ImagePlan(bird, split, _family(bird), {"scene": scene_type}, scene, extra=extra))
    return plans


def scenes_m2m(birds: Birds, scenes: Scenes, options: Build) -> list[ImagePlan]:
    """Many to many, after Spawrious: two families share two scene types, two others share two; swapped in the test."""
    types, first_two = _six_types(options), list(FAMILIES)[:2]
    pairs = (types[1], types[2]), (types[0], types[3])
    choices = lambda family, split: pairs[(family in first_two) == (split == "test")]  # noqa: E731
    return _plans_by_type(birds, scenes, options, types[:4], choices)


def scenes_disjoint(birds: Birds, scenes: Scenes, options: Build) -> list[ImagePlan]:
    """Four families on three scene types in training and validation, and on three others in the test."""
    types = _six_types(options)
    choices = lambda _, split: types[1::2] if split == "test" else types[::2]  # noqa: E731
    return _plans_by_type(birds, scenes, options, types, choices)


def _plans_by_type(
    birds: Birds, scenes: Scenes, options: Build, types: Sequence[str], choices: Callable[[str, str], Sequence[str]]
) -> list[ImagePlan]:
    """Every bird of the four families on a scene of a random type among the `choices` for its family and split."""
    backgrounds = Backgrounds(scenes, options.seed, {name: (name,) for name in types})
    plans = []
    for bird, split in _family_splits(birds, options):
        scene_type = _choice(choices(_family(bird), split), options.seed, bird.id, "type")
        scene = backgrounds.pick(scene_type, split, bird)
        plans.append(ImagePlan(bird, split, _family(bird), {"scene": scene_type}, scene))
    return plans


def mixed(birds: Birds, scenes: Scenes, options: Build) -> list[ImagePlan]:
    """For the background gap: trained as Waterbirds, tested on the photograph, a scene of the class, and any scene.

    In training, `same` is a scene of the bird's class and `other` one of the other class.
    """
    backgrounds = _land_and_water(scenes, options)
    plans = []
    for bird, split, background in _assign_backgrounds(birds, options):
        own = _background_of(bird)
        if split == "test":
            random = _choice(("land", "water"), options.seed, bird.id, "class")
            versions = {"original": ""}
            for name, version in (("same", own), ("rand", random)):
                versions[name] = backgrounds.pick(version, split, bird, name)
        else:
            versions = {"same" if background == own else "other": backgrounds.pick(background, split, bird)}
        for name, scene in versions.items():
            variant = name if split == "test" else split
            plans.append(ImagePlan(bird, split, _class_of(bird), {"background": name}, scene, variant))
    return plans


def displaced(birds: Birds, scenes: Scenes, options: Build) -> list[ImagePlan]:
    """Waterbirds with birds moved off the centre; in the test also centred at the same size, for comparison.

    To make room, birds are shrunk to at most 0.4 of the image's width and height. Distance 0.3 reaches the edge.
    """
    furthest = (1 - USUAL_EXTENT) / 2
    if not 0 <= options.distance <= furthest:
        raise UserError(f"--distance {options.distance:g}: birds stay inside the image only from 0 to {furthest:g}")
    backgrounds = _land_and_water(scenes, options)
    plans = []
    for bird, split, background in _assign_backgrounds(birds, options):
        angle = 2 * pi * draw(options.seed, bird.id, "direction") / 2**64
        x, y = 0.5 + options.distance * cos(angle), 0.5 + options.distance * sin(angle)
        away, centred = Pose(USUAL_EXTENT, x, y, enlarge=False), Pose(USUAL_EXTENT, enlarge=False)
        poses: dict[str, Pose | None] = {"displaced": away}
        if split == "test":
            poses["centred"] = centred
        elif options.moved == "test":
            poses = {"kept": None}
        for name, pose in poses.items():
            groups, scene = {"place": background, "position": name}, backgrounds.pick(background, split, bird)
            plans.append(ImagePlan(bird, split, _class_of(bird), groups, scene, name, pose))
    return plans


def spurious_object(birds: Birds, scenes: Scenes | None, options: Build) -> list[ImagePlan]:  # noqa: ARG001 (a Recipe's signature)
    """Landbirds and waterbirds in their own photographs, with a drawn object correlated with the class in training."""
    plans = []
    for bird, split, background in _assign_backgrounds(birds, options):
        kind = options.objects[background == "water"]  # drawn as for Waterbirds, with objects instead of backgrounds
        spurious = None if kind == "none" else SpuriousObject(kind, draw(options.seed, bird.id, "object"))
        plans.append(ImagePlan(bird, split, _class_of(bird), {"object": kind}, spurious=spurious))
    return plans


def si_score(birds: Birds, scenes: Scenes, options: Build) -> list[ImagePlan]:
    """Four families, trained on photographs; tested as cut-outs on any scene: moved, rotated or resized, one at a time.

    Every test bird is shown upright in the centre at 0.4 of the image (`none`), at 2 of 8 other locations, at 2 of 7
    angles and in 2 of 6 sizes, always on the same scene.
    """
    backgrounds = Backgrounds(scenes, options.seed, {name: (name,) for name in _six_types(options)})
    factors = {
        "location": {f"{x:g} {y:g}": Pose(USUAL_EXTENT, x, y) for x, y in LOCATIONS},
        "rotation": {f"{angle}": Pose(USUAL_EXTENT, angle=angle) for angle in ANGLES},
        "size": {f"{extent:g}": Pose(extent) for extent in EXTENTS},
    }
    plans = []
    for bird, split in _family_splits(birds, options):
        if split != "test":
            plans.append(ImagePlan(bird, split, _family(bird), {"shift": "photograph"}, variant="photograph"))
            continue
        scene = backgrounds.pick(_choice(_six_types(options), options.seed, bird.id, "type"), split, bird)
        poses = [("none", Pose(USUAL_EXTENT))]
        for factor, values in factors.items():
            names = sorted(values, key=partial(draw, options.seed, bird.id, factor))[:REPEATS]
            poses += [(f"{factor} {name}", values[name]) for name in names]
        for name, pose in poses:
            variant = name.replace(" ", "_")
            plans.append(ImagePlan(bird, split, _family(bird), {"shift": name}, scene, variant, pose))
    return plans


def limit_birds(plans: list[ImagePlan], limit: int | None) -> list[ImagePlan]:
    """The images of this many birds; a larger sample contains every smaller one."""
    birds = {plan.bird.id for plan in plans}
    if limit is None or limit >= len(birds):
        return plans
    chosen = set(sorted(birds, key=lambda bird: draw("sample", bird))[:limit])
    return [plan for plan in plans if plan.bird.id in chosen]


def draw(*key: object) -> int:
    """64 random bits that depend on the key alone. The words in the keys are part of the recipes: never change them."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, key)).encode()).digest()[:8], "big")


def sample_share(birds: Sequence[Bird], share: float, seed: int, name: str) -> set[int]:
    """The ids of this share of the birds: the share is exact, the seed and the name of the draw decide which birds."""
    order = sorted((bird.id for bird in birds), key=lambda number: draw(seed, number, name))
    return set(order[: round(share * len(order))])


class Backgrounds:
    """Scene photographs by background and split; no photograph is in two of these pools."""

    def __init__(self, scenes: Scenes, seed: int, names_of: dict[str, tuple[str, ...]]):
        self.seed, self.pools = seed, {}
        owner: dict[str, str] = {}
        for background, names in names_of.items():
            folders = sorted({folder for name in names for folder in scenes.folders_named(name)})
            for folder in folders:
                if owner.setdefault(folder, background) != background:
                    both = f"{owner[folder]} and {background}"
                    raise UserError(f"the scenes in '{folder}' cannot be both {both}; choose others")
            self.pools |= {(background, split): scenes.photos_for(split, folders) for split in SPLIT_PERCENT}

    def pick(self, background: str, split: str, bird: Bird, *key: str) -> str:
        pool = self.pools[background, split]
        return pool[draw(self.seed, bird.id, *key) % len(pool)]


def _land_and_water(scenes: Scenes, options: Build) -> Backgrounds:
    return Backgrounds(scenes, options.seed, {"land": options.land, "water": options.water})


def _assign_backgrounds(birds: Birds, options: Build) -> Iterator[tuple[Bird, str, str]]:
    """Each bird with its split and background: from Waterbirds' label file if there is one, else drawn as published."""
    if options.correlation is None and all(bird.split and bird.background for bird in birds.all):
        yield from ((bird, bird.split, bird.background) for bird in birds.all if bird.split and bird.background)
        return
    correlation = PUBLISHED_CORRELATION if options.correlation is None else options.correlation
    split_of = {bird.id: split for bird, split in _cub_splits(birds.all, options.seed, VALIDATION_SHARE, _class_of)}
    cells: dict[tuple[str, bool], list[Bird]] = {}
    for bird in birds.all:
        cells.setdefault((split_of[bird.id], bird.waterbird), []).append(bird)
    on_own = set()
    for (split, _), members in cells.items():
        on_own |= sample_share(members, correlation if split == "train" else 0.5, options.seed, "place")
    for bird in birds.all:
        yield bird, split_of[bird.id], _background_of(bird, own=bird.id in on_own)


def _cub_splits(
    birds: Iterable[Bird], seed: int, validation: float, stratum: Callable[[Bird], str]
) -> Iterator[tuple[Bird, str]]:
    """CUB's own test split; validation is this share of its training split, stratified, at least one per stratum."""
    birds, strata = list(birds), {}
    for bird in birds:
        if not bird.in_test:
            strata.setdefault(stratum(bird), []).append(bird)
    held_out = set()
    for members in strata.values():
        share = max(validation, 1 / len(members)) if len(members) > 1 else 0
        held_out |= sample_share(members, share, seed, "val")
    for bird in birds:
        yield bird, "test" if bird.in_test else "val" if bird.id in held_out else "train"


def _family_splits(birds: Birds, options: Build) -> Iterator[tuple[Bird, str]]:
    return _cub_splits(_balanced_families(birds, options.seed), options.seed, VALIDATION_SHARE, _family)


def _balanced_families(birds: Birds, seed: int) -> list[Bird]:
    """The birds of the four families, subsampled to the smallest family within CUB's training and its test split."""
    cells: dict[tuple[str, bool], list[Bird]] = {
        (family, in_test): [] for family in FAMILIES for in_test in (False, True)
    }
    for bird in birds.all:
        if family := _family(bird):
            cells[family, bird.in_test].append(bird)
    chosen = set()
    for (family, in_test), members in cells.items():
        if not members:
            raise UserError(f"{birds.files.root}: no {'test' if in_test else 'training'} photographs of a {family}")
        fewest = min(len(others) for (_, same), others in cells.items() if same == in_test)
        chosen |= sample_share(members, fewest / len(members), seed, "family")
    return [bird for bird in birds.all if bird.id in chosen]


def _family(bird: Bird) -> str:
    return next((family for family, kinds in FAMILIES.items() if bird.kind in kinds), "")


def _six_types(options: Build) -> tuple[str, ...]:
    if len(options.types) != 6:
        raise UserError(f"--types names {len(options.types)} scene folders; this dataset needs six")
    return options.types


def _choice(options: Sequence[str], *key: object) -> str:
    return options[draw(*key) % len(options)]


def _class_of(bird: Bird) -> str:
    return "waterbird" if bird.waterbird else "landbird"


def _background_of(bird: Bird, *, own: bool = True) -> str:
    return "water" if bird.waterbird == own else "land"
