"""Data sets made from bird photographs and scenes: `build("waterbirds", Build(cub, out, scenes))`.

A set is a folder of pictures, masks, `rows.csv` and `about.json`. It appears under its name only when it is complete;
what a stopped build has made lies in `NAME.partial`, and the same build goes on from there.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path

import PIL
from PIL import Image

from ..config import Build, Data
from ..console.terminal import counted
from ..errors import UserError
from . import recipes as shifts
from .birds import Birds, Scenes, read_birds, read_scenes
from .paste import THINGS, Picture, paste
from .pool import in_processes

__all__ = ["BUILDERS", "Build", "Built", "Recipe", "build"]

FORMAT = 1  # of what a recipe makes: raised when the same options give other pictures
NOT_PART_OF_THE_SET = ("cub", "scenes", "out", "workers")
POOLED_FROM = 64  # pictures: fewer are made before a pool of processes has started


@dataclass(frozen=True)
class Recipe:
    """How a set is planned, and which options have a say in it."""

    plan: Callable[[Birds, Scenes, Build], list[Picture]]
    uses: tuple[str, ...]

    @property
    def about(self) -> str:
        return (self.plan.__doc__ or "").split("\n")[0]


@dataclass(frozen=True)
class Built:
    """A finished set."""

    folder: Path
    images: int
    reused: bool  # it was there already
    counts: dict[str, dict[str, int]]  # split, group


PLACES = ("scenes", "land", "water")
BUILDERS: dict[str, Recipe] = {
    "waterbirds": Recipe(shifts.waterbirds, (*PLACES, "correlation")),
    "cub-swapped": Recipe(shifts.cub_swapped, PLACES),
    "scenes-o2o": Recipe(shifts.scenes_o2o, ("scenes", "types")),
    "scenes-m2m": Recipe(shifts.scenes_m2m, ("scenes", "types")),
    "scenes-disjoint": Recipe(shifts.scenes_disjoint, ("scenes", "types")),
    "mixed": Recipe(shifts.mixed, (*PLACES, "correlation")),
    "displaced": Recipe(shifts.displaced, (*PLACES, "correlation", "distance", "moved")),
    "spurious-object": Recipe(shifts.spurious_object, ("correlation", "objects")),
    "si-score": Recipe(shifts.si_score, ("scenes", "types")),
}
ALWAYS_USED = ("cub", "out", "seed", "limit", "workers", "quality")


def build(name: str, options: Build) -> Built:
    """Make the set of this name, or find it made."""
    recipe = _recipe(name, options)
    birds = read_birds(options.cub)
    scenes = read_scenes(options.scenes) if "scenes" in recipe.uses and options.scenes else None
    identity = _identity(name, recipe, options, birds, scenes)
    if _is_there(options.out, identity):
        about = json.loads((options.out / "about.json").read_text())
        return Built(options.out, about["images"], True, about["counts"])
    pictures = shifts.sample(recipe.plan(birds, scenes, options), options.limit)  # ty: ignore[invalid-argument-type]
    unfinished = options.out.with_name(options.out.name + ".partial")
    try:
        _begin(unfinished, identity)
        rows = list(_made(pictures, birds, scenes, unfinished, options))
        counts = _counts(pictures)
        _write_rows(unfinished / "rows.csv", rows)
        about = identity | {"about": recipe.about, "images": len(rows), "counts": counts, "made with": _versions()}
        _write_json(unfinished / "about.json", about)
        unfinished.rename(options.out)
    except OSError as error:
        where = error.filename or unfinished
        raise UserError(f"{where}: cannot be written ({error.strerror}); what is made stays, run it again") from error
    return Built(options.out, len(rows), False, counts)


def _recipe(name: str, options: Build) -> Recipe:
    if name not in BUILDERS:
        raise UserError(f"no data set is called '{name}'; there are {', '.join(BUILDERS)}")
    recipe = BUILDERS[name]
    if "scenes" in recipe.uses and options.scenes is None:
        raise UserError(f"{name} needs scenes: say where they are with --scenes")
    for field in fields(options):
        default = field.default if field.default is not MISSING else None
        if field.name not in (*ALWAYS_USED, *recipe.uses, "scenes") and getattr(options, field.name) != default:
            takers = ", ".join(other for other, its in BUILDERS.items() if field.name in its.uses)
            raise UserError(f"{name} does not take --{field.name}; it belongs to {takers}")
    if not 1 <= options.quality <= 100:
        raise UserError(f"quality {options.quality}: from 1 to 100")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"limit {options.limit}: at least one bird")
    if options.correlation is not None and not 0 <= options.correlation <= 1:
        raise UserError(f"correlation {options.correlation:g}: from 0 to 1")
    unknown = set(options.objects) - {"none", *THINGS}
    if unknown or options.objects[0] == options.objects[1]:
        wrong = f"no object is called {', '.join(sorted(unknown))}" if unknown else "two classes with the same object"
        raise UserError(f"objects {' '.join(options.objects)}: {wrong}; choose two of none, {', '.join(THINGS)}")
    return recipe


def _identity(name: str, recipe: Recipe, options: Build, birds: Birds, scenes: Scenes | None) -> dict:
    """What makes two sets the same, in JSON's types; no paths."""
    used = (key for key in (*ALWAYS_USED, *recipe.uses) if key not in NOT_PART_OF_THE_SET)
    sources = {"birds": birds.about} | ({"scenes": scenes.about} if scenes else {})
    settings = {key: asdict(options)[key] for key in used}
    return json.loads(json.dumps({"recipe": name, "format": FORMAT, "options": settings, "sources": sources}))


def _is_there(out: Path, identity: dict) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    difference = _difference(out, identity)
    if difference:
        raise UserError(f"{out}: already there, and {difference}; choose another folder or remove it")
    return True


def _begin(unfinished: Path, identity: dict) -> None:
    if unfinished.exists():
        difference = _difference(unfinished, identity)
        if difference:
            raise UserError(f"{unfinished}: a stopped build, and {difference}; remove it to start afresh")
        for path in unfinished.rglob("*"):
            if path.suffix[1:].isdigit():  # half-written when it was stopped
                path.unlink()
        return
    unfinished.mkdir(parents=True)
    _write_json(unfinished / "about.json", identity)


def _difference(folder: Path, identity: dict) -> str:
    """What sets the set in this folder apart from the wanted one; nothing if it is the same."""
    try:
        there = json.loads((folder / "about.json").read_text())
        found, wanted = ({**about, **about["options"], **about["sources"]} for about in (there, identity))
    except (OSError, ValueError, KeyError, TypeError):
        return "not one of our data sets"
    keys = [key for key in wanted if key not in ("options", "sources") and found.get(key) != wanted[key]]
    return ", ".join(f"its {key} is {_short(found.get(key))}, not {_short(wanted[key])}" for key in keys[:2])


def _short(value: object) -> str:
    return f"{value['name']} ({value['sha256'][:8]})" if isinstance(value, dict) else str(value)


def _made(
    pictures: list[Picture], birds: Birds, scenes: Scenes | None, folder: Path, options: Build
) -> Iterator[dict[str, str]]:
    """The row of each picture, when it is on disk."""
    one = partial(_make, birds=Birds(birds.files, ()), scenes=scenes and Scenes(scenes.files, {}), folder=folder)
    one = partial(one, quality=options.quality)
    workers = options.workers or _cores()
    if workers == 1 or len(pictures) < POOLED_FROM:
        yield from _watched(map(one, pictures), len(pictures))
        return
    yield from _watched(in_processes(one, pictures, workers, chunk=16), len(pictures))


def _make(picture: Picture, birds: Birds, scenes: Scenes | None, folder: Path, quality: int) -> dict[str, str]:
    """Write a picture's files, the image last: where that is, the others are."""
    image = f"images/{picture.name}.{'webp' if quality == 100 else 'jpg'}"
    mask, thing = f"masks/{picture.name}.png", f"objects/{picture.name}.png" if picture.thing else ""
    box: tuple[float, ...] | None = picture.bird.box
    if not (folder / image).exists():
        pasted = paste(picture, birds, scenes)
        box = pasted.box
        if pasted.thing:
            _save(pasted.thing, folder / thing)
        _save(pasted.mask, folder / mask)
        _save(pasted.image, folder / image, quality)
    elif picture.pose:
        with Image.open(folder / mask) as made:
            box = made.getbbox()
    assert box is not None, "no mask is empty"
    row = {"image": image, "label": picture.label, "split": picture.split}
    row |= {f"group_{name}": value for name, value in picture.groups.items()}
    row |= {"mask": mask, "box": " ".join(f"{edge:g}" for edge in box)}
    row |= {"object_mask": thing} if "object" in picture.groups else {}
    return row | {"bird": str(picture.bird.id), "scene": picture.scene} | dict(picture.extra)


def _save(image: Image.Image, path: Path, quality: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    if quality is None:
        image.save(temporary, "PNG")
    elif quality == 100:
        image.save(temporary, "WEBP", lossless=True, quality=0, method=0, exact=True)
    else:
        image.save(temporary, "JPEG", quality=quality, subsampling=0)  # sharp colours where bird meets background
    temporary.replace(path)


def _counts(pictures: Iterable[Picture]) -> dict[str, dict[str, int]]:
    counter = Counter((p.split, "/".join((p.label, *p.groups.values()))) for p in pictures)
    counts: dict[str, dict[str, int]] = {split: {} for split in ("train", "val", "test")}
    for (split, group), number in sorted(counter.items()):
        counts[split][group] = number
    return counts


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _write_json(path: Path, value: dict) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)


def _watched(rows: Iterable[dict[str, str]], total: int) -> Iterable[dict[str, str]]:
    if not sys.stderr.isatty():
        return rows
    from rich.console import Console
    from rich.progress import track

    return track(rows, "making pictures", total, console=Console(stderr=True))


def _versions() -> dict[str, str]:
    from .. import __version__

    return {"sightline": __version__, "pillow": PIL.__version__}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- the command -----------------------------------------------------------------------------------------------------


MOST_GROUPS = 12  # named one by one


def run_command(command: Data) -> int:
    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "name"}
    built = build(command.name, Build(**options))
    print(f"{built.folder}: {counted(built.images)}{' (already there)' if built.reused else ''}")
    for split, counts in built.counts.items():
        print(f"  {split}: {in_a_line(counts)}")
    return 0


def in_a_line(counts: Mapping[str, int]) -> str:
    """How many pictures each group has; where groups are many, all classes together."""
    if len(counts) <= MOST_GROUPS:
        return ", ".join(f"{group} {count:,}" for group, count in counts.items())
    together: Counter[str] = Counter()
    for group, count in counts.items():
        together[group.partition("/")[2]] += count
    classes = len({group.partition("/")[0] for group in counts})
    return ", ".join(f"{group} {count:,}" for group, count in together.items()) + f", of {classes} classes"
