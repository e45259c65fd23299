"""MetaShift: cats and dogs (two splits that cannot be compared), and eight animals, in named contexts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from ..data.rows import TEST, TRAIN, Rows
from ..errors import UserError
from .cub import NO_VAL, Folder, class_folders, locate, pictures, present, rows_of_folders, wrong_folder
from .pickles import read_converted

CATS_AND_DOGS = ("cat", "dog")
DISC = {
    "train": {"cat": ("bed", "sofa"), "dog": ("bench", "bike")},
    "test": {"cat": ("shelf",), "dog": ("shelf",)},
}
INDOOR_OUTDOOR = {
    "train": {"cat": ("indoor",), "dog": ("outdoor",)},
    "test": {"cat": ("outdoor",), "dog": ("indoor",)},
}
SPLIT_NUMBERS = {"train": TRAIN, "test": TEST}
ANIMALS = ("bear", "bird", "cow", "elephant", "giraffe", "horse", "sheep", "zebra")
CANDIDATES = "full-candidate-subsets"
GROUPS = "imageID_to_group"
PICTURES = ("images", "allImages/images")
SMALLEST = 25  # pictures in a subset, MetaShift's own default


def read_metashift_disc(root: Path) -> Rows:
    """The split of DISC, iFAM and TTR: train on sofas, beds, benches and bikes, test on shelves."""
    needs = [f"{split}/{pet}" for split in DISC for pet in CATS_AND_DOGS]
    folder = locate(root, "MetaShift (DISC)", needs, inside=("MetaDatasetCatDog",))
    folders = _contexts(folder, DISC, "MetaShift (DISC)", {split: split for split in DISC})
    files = Counter((f.split, f.label, name) for f in folders for name in pictures(folder / f.path))
    twice = sum(count - 1 for count in files.values())
    notes = [f"{NO_VAL}; DISC takes 15 % of the test pictures for it, which is not done here"]
    notes += [f"pictures in two contexts of one class, counted in both: {twice:,}"] if twice else []
    used = {f.path for f in folders}
    others = [name for path in needs for name in class_folders(folder / path) if f"{path}/{name}" not in used]
    notes += [f"contexts of other experiments are left out ({', '.join(others[:4])})"] if others else []
    return rows_of_folders("metashift-disc", folder, CATS_AND_DOGS, folders, notes)


def read_metashift_indoor_outdoor(root: Path) -> Rows:
    """The split of A²: all training cats indoors and dogs outdoors, and the other way round in the test."""
    layout = "MetaShift (indoor/outdoor)"
    folder = locate(root, layout, ("train/cat", "train/dog"), inside=("MetaShift-Cat-Dog-indoor-outdoor",))
    test = next((name for name in ("test", "val_out_of_domain") if (folder / name).is_dir()), "test")
    needs = [f"{split}/{pet}" for split in ("train", test) for pet in CATS_AND_DOGS]
    locate(folder, layout, needs)
    if any(class_folders(folder / path) for path in needs):
        folders = _contexts(folder, INDOOR_OUTDOOR, layout, {"train": "train", "test": test})
    else:
        folders = _without_context_folders(folder, test)
    return rows_of_folders("metashift-indoor-outdoor", folder, CATS_AND_DOGS, folders, [NO_VAL])


def read_metashift_animals(root: Path, seed: int | str = 0) -> Rows:
    """Eight animals, tested in contexts they were not trained in; which context is whose is drawn from the seed.

    A picture in several contexts makes several rows. No training picture is in any test context.
    """
    if not str(seed).isdecimal():
        raise UserError(f"{seed}: no seed of MetaShift Animals; expected a number, as in metashift-animals:3")
    needs_it = f"{CANDIDATES}.json and pictures as images/ID.jpg"
    subsets = _candidates(root, needs_it)
    pictures_in = next((path for path in PICTURES if (root / path).is_dir()), None)
    if pictures_in is None:
        raise wrong_folder(root, "MetaShift Animals", needs_it)
    contexts = _divide(root, subsets, np.random.default_rng(int(seed)))
    tested = {picture for split, name in contexts if split == TEST for picture in subsets[name]}
    folders, dropped = [], 0
    for split, name in contexts:
        animal, context = _parsed(name)
        kept = [picture for picture in subsets[name] if split == TEST or picture not in tested]
        dropped += len(subsets[name]) - len(kept)
        files = tuple(f"{picture}.jpg" for picture in sorted(kept))
        _refuse_missing(root, pictures_in, files, name)
        folders.append(Folder(pictures_in, ANIMALS.index(animal), split, context, files))
    notes = [
        f"{NO_VAL}; neither is the division of the contexts: this one is drawn with seed {seed}",
        f"rows taken from train because their pictures are in a test context: {dropped:,}",
        "a picture in several contexts makes several rows",
    ]
    several = _with_several_animals(folders)
    notes += [f"pictures that show several of the animals and are rows of each: {several:,}"] if several else []
    return rows_of_folders("metashift-animals", root, ANIMALS, folders, notes)


def _contexts(folder: Path, scheme: dict, layout: str, folder_of: dict[str, str]) -> list[Folder]:
    """Folders such as train/cat/cat(sofa)."""
    folders = []
    for split, pets in scheme.items():
        for label, pet in enumerate(CATS_AND_DOGS):
            wanted = [f"{pet}({context})" for context in pets[pet]]
            path = f"{folder_of[split]}/{pet}"
            if not set(wanted) <= set(class_folders(folder / path)):
                raise wrong_folder(folder / path, layout, f"{', '.join(wanted)} (MetaShift has several splits)")
            folders += [
                Folder(f"{path}/{name}", label, SPLIT_NUMBERS[split], context)
                for name, context in zip(wanted, pets[pet], strict=True)
            ]
    return folders


def _without_context_folders(folder: Path, test: str) -> list[Folder]:
    """Pictures right in train/cat: this split's by their place, unless imageID_to_group says they are mixed."""
    group_of: dict = {}
    if any((folder / f"{GROUPS}.{ending}").exists() for ending in ("json", "pkl")):
        group_of = read_converted(folder, GROUPS, "metashift-indoor-outdoor")
    folders = []
    for split, name in (("train", "train"), ("test", test)):
        for label, pet in enumerate(CATS_AND_DOGS):
            path, (context,) = f"{name}/{pet}", INDOOR_OUTDOOR[split][pet]
            for file in pictures(folder / path):
                told = group_of.get(Path(file).stem, [f"{pet}({context})"])
                if f"{pet}({context})" not in told:
                    raise UserError(
                        f"{folder / path / file}: is {told[0]} by {GROUPS}.json, so this is the mixed variant "
                        f"(MetaShift-subpopulation-shift); expected only {pet}({context}) in {path}"
                    )
            folders.append(Folder(path, label, SPLIT_NUMBERS[split], context))
    return folders


def _candidates(root: Path, expected: str) -> dict[str, list[str]]:
    """The pictures of each large enough subset of our animals."""
    if not any((root / f"{CANDIDATES}.{ending}").exists() for ending in ("json", "pkl")):
        raise wrong_folder(root, "MetaShift Animals", expected)
    subsets = {}
    for name, ids in read_converted(root, CANDIDATES, "metashift-animals").items():
        if _parsed(name)[0] not in ANIMALS:
            continue
        if not isinstance(ids, list) or not all(isinstance(picture, str) for picture in ids):
            raise UserError(f"{root / CANDIDATES}.json: {name} is no list of picture ids")
        if len(set(ids)) >= SMALLEST:
            subsets[name] = sorted(set(ids))
    return subsets


def _parsed(name: str) -> tuple[str, str]:
    """`dog(fire hydrant)` is a dog beside a fire hydrant."""
    animal, _, context = name.partition("(")
    return animal.strip(), context.removesuffix(")")


def _divide(root: Path, subsets: dict[str, list[str]], generator: np.random.Generator) -> list[tuple[int, str]]:
    """Each subset with its split: half of an animal's contexts to train, drawn at random; an odd one goes to test."""
    divided = []
    for animal in ANIMALS:
        names = sorted(name for name in subsets if _parsed(name)[0] == animal)
        if len(names) < 2:
            raise UserError(
                f"{root / CANDIDATES}.json: {len(names)} contexts of {animal} have {SMALLEST} pictures; it needs two"
            )
        generator.shuffle(names)
        half = len(names) // 2
        divided += [(TRAIN if place < half else TEST, name) for place, name in enumerate(names)]
    return sorted(divided)


def _refuse_missing(root: Path, folder: str, files: tuple[str, ...], subset: str) -> None:
    paths = [f"{folder}/{file}" for file in files]
    lacking = [path for path, there in zip(paths, present(root, paths), strict=True) if not there]
    if lacking:
        raise UserError(f"{root / CANDIDATES}.json: {subset} lists {lacking[0]}, which is not there; restore it")


def _with_several_animals(folders: list[Folder]) -> int:
    labels: dict[str, set[int]] = {}
    for folder in folders:
        for file in folder.names or ():
            labels.setdefault(file, set()).add(folder.label)
    return sum(len(found) > 1 for found in labels.values())
