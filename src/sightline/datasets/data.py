"""`sightline data`: datasets with a known shortcut, built from bird cut-outs and scenes.

    build("waterbirds", Build(cub, out, scenes))

A dataset is a folder of images, masks, `rows.csv` and `about.json`. It gets its name only when it is complete; an
interrupted build leaves `NAME.partial`, and the same command continues from there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import PIL
from PIL import Image

from ..config import Build, Data
from ..config.machine import available_cores
from ..console.files import as_csv, inside, save_image, write
from ..console.terminal import counted, watched
from ..errors import UserError
from . import recipes
from .birds import Birds, Scenes, read_birds, read_scenes
from .paste import OBJECTS, ImagePlan, paste
from .pool import map_in_processes

FORMAT = 1  # of the recipes: raised when the same options give other images
NOT_IN_IDENTITY = ("cub", "scenes", "out", "workers")
MIN_FOR_POOL = 64  # images: fewer are made before a pool of processes has started


@dataclass(frozen=True)
class Recipe:
    """How the images of a dataset are planned, and which options it uses."""

    plan: Callable[[Birds, Scenes, Build], list[ImagePlan]]
    uses: tuple[str, ...]

    @property
    def summary(self) -> str:
        return (self.plan.__doc__ or "").split("\n")[0]


@dataclass(frozen=True)
class BuiltDataset:
    """A finished dataset."""

    folder: Path
    images: int
    reused: bool  # it existed already
    counts: dict[str, dict[str, int]]  # split, group


LAND_AND_WATER = ("scenes", "land", "water")
BUILDERS: dict[str, Recipe] = {
    "waterbirds": Recipe(recipes.waterbirds, (*LAND_AND_WATER, "correlation")),
    "cub-swapped": Recipe(recipes.cub_swapped, LAND_AND_WATER),
    "scenes-o2o": Recipe(recipes.scenes_o2o, ("scenes", "types")),
    "scenes-m2m": Recipe(recipes.scenes_m2m, ("scenes", "types")),
    "scenes-disjoint": Recipe(recipes.scenes_disjoint, ("scenes", "types")),
    "mixed": Recipe(recipes.mixed, (*LAND_AND_WATER, "correlation")),
    "displaced": Recipe(recipes.displaced, (*LAND_AND_WATER, "correlation", "distance", "moved")),
    "spurious-object": Recipe(recipes.spurious_object, ("correlation", "objects")),
    "si-score": Recipe(recipes.si_score, ("scenes", "types")),
}
ALWAYS_USED = ("cub", "out", "seed", "limit", "workers", "quality")


def build(name: str, options: Build) -> BuiltDataset:
    """Build the dataset of this name, or reuse it if it is already there."""
    recipe = _check_options(name, options)
    birds = read_birds(options.cub)
    scenes = read_scenes(options.scenes) if "scenes" in recipe.uses and options.scenes else None
    identity = _identity(name, recipe, options, birds, scenes)
    if _already_built(options.out, identity):
        about = json.loads((options.out / "about.json").read_text())
        return BuiltDataset(options.out, about["images"], True, about["counts"])
    plans = recipe.plan(birds, scenes, options)  # ty: ignore[invalid-argument-type]
    plans = recipes.limit_birds(plans, options.limit)
    unfinished = options.out.with_name(options.out.name + ".partial")
    try:
        _start_or_continue(unfinished, identity)
        rows = list(_write_images(plans, birds, scenes, unfinished, options))
        counts = _count_groups(plans)
        write(unfinished / "rows.csv", as_csv(list(rows[0]), rows))
        about = identity | {"about": recipe.summary, "images": len(rows), "counts": counts, "made with": _versions()}
        _write_json(unfinished / "about.json", about)
        unfinished.rename(options.out)
    except OSError as error:
        path = error.filename or unfinished
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); finished images are kept, run the command again"
        ) from error
    return BuiltDataset(options.out, len(rows), False, counts)


def _check_options(name: str, options: Build) -> Recipe:
    if name not in BUILDERS:
        raise UserError(f"no dataset is called '{name}'; the datasets are {', '.join(BUILDERS)}")
    recipe = BUILDERS[name]
    if "scenes" in recipe.uses and options.scenes is None:
        raise UserError(f"{name} needs scene photographs: give their folder with --scenes")
    for field in fields(options):
        default = field.default if field.default is not MISSING else None
        if field.name not in (*ALWAYS_USED, *recipe.uses, "scenes") and getattr(options, field.name) != default:
            users = ", ".join(other for other, its in BUILDERS.items() if field.name in its.uses)
            raise UserError(f"{name} does not use --{field.name}; it belongs to {users}")
    unknown = set(options.objects) - {"none", *OBJECTS}
    if unknown or options.objects[0] == options.objects[1]:
        problem = (
            f"no object is called {', '.join(sorted(unknown))}" if unknown else "both classes have the same object"
        )
        raise UserError(f"--objects {' '.join(options.objects)}: {problem}; choose two of none, {', '.join(OBJECTS)}")
    return recipe


def _identity(name: str, recipe: Recipe, options: Build, birds: Birds, scenes: Scenes | None) -> dict:
    """What makes two datasets the same, in JSON types and without paths."""
    used = (key for key in (*ALWAYS_USED, *recipe.uses) if key not in NOT_IN_IDENTITY)
    sources = {"birds": birds.identity} | ({"scenes": scenes.identity} if scenes else {})
    settings = {key: asdict(options)[key] for key in used}
    return json.loads(json.dumps({"recipe": name, "format": FORMAT, "options": settings, "sources": sources}))


def _already_built(out: Path, identity: dict) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    difference = _difference(out, identity)
    if difference:
        raise UserError(f"{out}: exists already, and {difference}; choose another folder or remove it")
    return True


def _start_or_continue(unfinished: Path, identity: dict) -> None:
    if unfinished.exists():
        difference = _difference(unfinished, identity)
        if difference:
            raise UserError(f"{unfinished}: an interrupted build, and {difference}; remove it to start again")
        for path in unfinished.rglob("*"):
            if path.suffix == ".partial":  # half-written at the interruption
                path.unlink()
        return
    unfinished.mkdir(parents=True)
    _write_json(unfinished / "about.json", identity)


def _difference(folder: Path, identity: dict) -> str:
    """How the dataset in this folder differs from the wanted one; "" if it is the same."""
    try:
        about = json.loads((folder / "about.json").read_text())
        found, wanted = ({**facts, **facts["options"], **facts["sources"]} for facts in (about, identity))
    except (OSError, ValueError, KeyError, TypeError):
        return "it is not a dataset built by sightline data"
    keys = [key for key in wanted if key not in ("options", "sources") and found.get(key) != wanted[key]]
    return ", ".join(f"its {key} is {_short(found.get(key))}, not {_short(wanted[key])}" for key in keys[:2])


def _short(value: object) -> str:
    return f"{value['name']} ({value['sha256'][:8]})" if isinstance(value, dict) else str(value)


def _write_images(
    plans: list[ImagePlan], birds: Birds, scenes: Scenes | None, folder: Path, options: Build
) -> Iterator[dict[str, str]]:
    """The row of each image, once its files are on disk."""
    job = partial(
        _write_image,
        birds=Birds(birds.files, ()),
        scenes=scenes and Scenes(scenes.files, {}),
        folder=folder,
        quality=options.quality,
    )
    workers = options.workers or available_cores()
    pooled = workers > 1 and len(plans) >= MIN_FOR_POOL
    rows = map_in_processes(job, plans, workers, chunk=16) if pooled else map(job, plans)
    yield from watched(rows, len(plans), "making images")


def _write_image(plan: ImagePlan, birds: Birds, scenes: Scenes | None, folder: Path, quality: int) -> dict[str, str]:
    """Write an image and its masks; the image comes last, so where it exists, the masks do."""
    image = f"images/{plan.name}.{'webp' if quality == 100 else 'jpg'}"
    mask, object_mask = f"masks/{plan.name}.png", f"objects/{plan.name}.png" if plan.spurious else ""
    for name in filter(None, (image, mask, object_mask)):  # names of birds come from the source
        inside(folder, name)
    box: tuple[float, ...] | None = plan.bird.box
    if not (folder / image).exists():
        pasted = paste(plan, birds, scenes)
        box = pasted.box
        if pasted.object_mask:
            _save(pasted.object_mask, folder / object_mask)
        _save(pasted.mask, folder / mask)
        _save(pasted.image, folder / image, quality)
    elif plan.pose:
        with Image.open(folder / mask, formats=["PNG"]) as saved:
            box = saved.getbbox()
    assert box is not None, "no mask is empty"
    row = {"image": image, "label": plan.label, "split": plan.split}
    row |= {f"group_{name}": value for name, value in plan.groups.items()}
    row |= {"mask": mask, "box": " ".join(f"{edge:g}" for edge in box)}
    row |= {"object_mask": object_mask} if "object" in plan.groups else {}
    return row | {"bird": str(plan.bird.id), "scene": plan.scene} | dict(plan.extra)


def _save(image: Image.Image, path: Path, quality: int | None = None) -> None:
    options: dict[str, Any] = {}
    if quality == 100:
        options = {"lossless": True, "quality": 0, "method": 0, "exact": True}
    elif quality is not None:
        options = {"quality": quality, "subsampling": 0}  # sharp colours where bird meets background
    save_image(path, image, sync=False, marked=False, **options)


def _count_groups(plans: Iterable[ImagePlan]) -> dict[str, dict[str, int]]:
    counter = Counter((plan.split, "/".join((plan.label, *plan.groups.values()))) for plan in plans)
    counts: dict[str, dict[str, int]] = {split: {} for split in ("train", "val", "test")}
    for (split, group), number in sorted(counter.items()):
        counts[split][group] = number
    return counts


def _write_json(path: Path, value: dict) -> None:
    write(path, json.dumps(value, indent=1) + "\n")


def _versions() -> dict[str, str]:
    from .. import __version__

    return {"sightline": __version__, "pillow": PIL.__version__}


# ---- the command -----------------------------------------------------------------------------------------------------


MAX_GROUPS = 12  # listed one by one


def run_command(command: Data) -> int:
    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "name"}
    built = build(command.name, Build(**options))
    print(f"{built.folder}: {counted(built.images)}{' (already there)' if built.reused else ''}")
    for split, counts in built.counts.items():
        print(f"  {split}: {format_counts(counts)}")
    return 0


def format_counts(counts: Mapping[str, int]) -> str:
    """The number of images in each group; where there are many groups, all classes together."""
    if len(counts) <= MAX_GROUPS:
        return ", ".join(f"{group} {count:,}" for group, count in counts.items())
    by_attribute: Counter[str] = Counter()
    for group, count in counts.items():
        by_attribute[group.partition("/")[2]] += count
    classes = len({group.partition("/")[0] for group in counts})
    return ", ".join(f"{group} {count:,}" for group, count in by_attribute.items()) + f", of {classes} classes"
