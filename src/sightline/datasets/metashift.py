"""MetaShift: cats and dogs (two splits that are not comparable), and eight animals, in named contexts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from ..data.rows import TEST, TRAIN, Rows
from ..errors import UserError
from .pickles import read_converted
from .reading import (
    NO_VALIDATION,
    Folder,
    class_folders,
    existing,
    image_names,
    locate,
    rows_from_folders,
    wrong_folder,
)

CATS_AND_DOGS = ("cat", "dog")
DISC = {
    "train": {"cat": ("bed", "sofa"), "dog": ("bench", "bike")},
    "test": {"cat": ("shelf",), "dog": ("shelf",)},
}
INDOOR_OUTDOOR = {
    "train": {"cat": ("indoor",), "dog": ("outdoor",)},
    "test": {"cat": ("outdoor",), "dog": ("indoor",)},
}
SPLIT_OF = {"train": TRAIN, "test": TEST}
ANIMALS = ("bear", "bird", "cow", "elephant", "giraffe", "horse", "sheep", "zebra")
CANDIDATES = "full-candidate-subsets"
GROUPS = "imageID_to_group"
IMAGE_FOLDERS = ("images", "allImages/images")
SMALLEST = 25  # images in a subset, MetaShift's own default


def read_metashift_disc(root: Path) -> Rows:
    """The split of DISC, iFAM and TTR: train on sofas, beds, benches and bikes, test on shelves."""
    needs = [f"{split}/{pet}" for split in DISC for pet in CATS_AND_DOGS]
    folder = locate(root, "MetaShift (DISC)", needs, inside=("MetaDatasetCatDog",))
    folders = _context_folders(folder, DISC, "MetaShift (DISC)", {split: split for split in DISC})
    files = Counter((f.split, f.label, name) for f in folders for name in image_names(folder / f.path))
    repeated = sum(count - 1 for count in files.values())
    notes = [f"{NO_VALIDATION}; DISC takes 15 % of the test images for validation, which is not done here"]
    notes += [f"images in two contexts of one class, counted in both: {repeated:,}"] if repeated else []
    used = {f.path for f in folders}
    unused = [name for path in needs for name in class_folders(folder / path) if f"{path}/{name}" not in used]
    notes += [f"contexts of other experiments are left out ({', '.join(unused[:4])})"] if unused else []
    return rows_from_folders("metashift-disc", folder, CATS_AND_DOGS, folders, notes)


def read_metashift_indoor_outdoor(root: Path) -> Rows:
    """The split of A²: all training cats indoors and dogs outdoors, and the other way round in the test."""
    layout = "MetaShift (indoor/outdoor)"
    folder = locate(root, layout, ("train/cat", "train/dog"), inside=("MetaShift-Cat-Dog-indoor-outdoor",))
    test = next((name for name in ("test", "val_out_of_domain") if (folder / name).is_dir()), "test")
    needs = [f"{split}/{pet}" for split in ("train", test) for pet in CATS_AND_DOGS]
    locate(folder, layout, needs)
    if any(class_folders(folder / path) for path in needs):
        folders = _context_folders(folder, INDOOR_OUTDOOR, layout, {"train": "train", "test": test})
    else:
        folders = _without_context_folders(folder, test)
    return rows_from_folders("metashift-indoor-outdoor", folder, CATS_AND_DOGS, folders, [NO_VALIDATION])


def read_metashift_animals(root: Path, seed: int | str = 0) -> Rows:
    """Eight animals, tested in contexts they were not trained in; the contexts are divided at random by the seed.

    An image in several contexts makes several rows. No training image is in any test context.
    """
    if not str(seed).isdecimal():
        raise UserError(f"{seed}: not a seed for MetaShift Animals; expected a number, as in metashift-animals:3")
    expected = f"{CANDIDATES}.json and images as images/ID.jpg"
    subsets = _read_subsets(root, expected)
    image_folder = next((path for path in IMAGE_FOLDERS if (root / path).is_dir()), None)
    if image_folder is None:
        raise wrong_folder(root, "MetaShift Animals", expected)
    contexts = _divide_contexts(root, subsets, np.random.default_rng(int(seed)))
    test_images = {image for split, name in contexts if split == TEST for image in subsets[name]}
    folders, dropped = [], 0
    for split, name in contexts:
        animal, context = _parse_subset(name)
        kept = [image for image in subsets[name] if split == TEST or image not in test_images]
        dropped += len(subsets[name]) - len(kept)
        files = tuple(f"{image}.jpg" for image in sorted(kept))
        _check_subset(root, image_folder, files, name)
        folders.append(Folder(image_folder, ANIMALS.index(animal), split, context, files))
    notes = [
        f"{NO_VALIDATION}, nor is the division of the contexts: this one is drawn with seed {seed}",
        f"rows removed from train because their images are in a test context: {dropped:,}",
        "an image in several contexts makes several rows",
    ]
    several = _with_several_animals(folders)
    notes += [f"images that show several of the animals and are rows of each: {several:,}"] if several else []
    return rows_from_folders("metashift-animals", root, ANIMALS, folders, notes)


def _context_folders(folder: Path, scheme: dict, layout: str, folder_of: dict[str, str]) -> list[Folder]:
    """Folders such as train/cat/cat(sofa)."""
    folders = []
    for split, contexts_of in scheme.items():
        for label, pet in enumerate(CATS_AND_DOGS):
            names = [f"{pet}({context})" for context in contexts_of[pet]]
            path = f"{folder_of[split]}/{pet}"
            if not set(names) <= set(class_folders(folder / path)):
                raise wrong_folder(folder / path, layout, f"{', '.join(names)} (MetaShift has several splits)")
            folders += [
                Folder(f"{path}/{name}", label, SPLIT_OF[split], context)
                for name, context in zip(names, contexts_of[pet], strict=True)
            ]
    return folders


def _without_context_folders(folder: Path, test: str) -> list[Folder]:
    """Images directly in train/cat: the folder implies the context, unless imageID_to_group contradicts it."""
    contexts_of: dict = {}
    if any((folder / f"{GROUPS}.{ending}").exists() for ending in ("json", "pkl")):
        contexts_of = read_converted(folder, GROUPS, "metashift-indoor-outdoor")
    folders = []
    for split, name in (("train", "train"), ("test", test)):
        for label, pet in enumerate(CATS_AND_DOGS):
            path, (context,) = f"{name}/{pet}", INDOOR_OUTDOOR[split][pet]
            for file in image_names(folder / path):
                contexts = contexts_of.get(Path(file).stem, [f"{pet}({context})"])
                if f"{pet}({context})" not in contexts:
                    raise UserError(
                        f"{folder / path / file}: is {contexts[0]} according to {GROUPS}.json, so this is the mixed "
                        f"variant (MetaShift-subpopulation-shift); expected only {pet}({context}) in {path}"
                    )
            folders.append(Folder(path, label, SPLIT_OF[split], context))
    return folders


def _read_subsets(root: Path, expected: str) -> dict[str, list[str]]:
    """The images of each subset of the eight animals that is large enough."""
    if not any((root / f"{CANDIDATES}.{ending}").exists() for ending in ("json", "pkl")):
        raise wrong_folder(root, "MetaShift Animals", expected)
    subsets = {}
    for name, ids in read_converted(root, CANDIDATES, "metashift-animals").items():
        if _parse_subset(name)[0] not in ANIMALS:
            continue
        if not isinstance(ids, list) or not all(isinstance(image, str) for image in ids):
            raise UserError(f"{root / CANDIDATES}.json: {name} is not a list of image ids")
        if len(set(ids)) >= SMALLEST:
            subsets[name] = sorted(set(ids))
    return subsets


def _parse_subset(name: str) -> tuple[str, str]:
    """`dog(fire hydrant)` is a dog beside a fire hydrant."""
    animal, _, context = name.partition("(")
    return animal.strip(), context.removesuffix(")")


def _divide_contexts(root: Path, subsets: dict[str, list[str]], rng: np.random.Generator) -> list[tuple[int, str]]:
    """Each subset with its split: half of an animal's contexts go to train, at random; an odd one goes to test."""
    divided = []
    for animal in ANIMALS:
        names = sorted(name for name in subsets if _parse_subset(name)[0] == animal)
        if len(names) < 2:
            raise UserError(
                f"{root / CANDIDATES}.json: {len(names)} contexts of {animal} have at least {SMALLEST} images; "
                "two are needed"
            )
        rng.shuffle(names)
        half = len(names) // 2
        divided += [(TRAIN if index < half else TEST, name) for index, name in enumerate(names)]
    return sorted(divided)


def _check_subset(root: Path, folder: str, files: tuple[str, ...], subset: str) -> None:
    paths = [f"{folder}/{file}" for file in files]
    missing = sorted(set(paths) - set(existing(root, paths)))
    if missing:
        raise UserError(f"{root / CANDIDATES}.json: {subset} lists {missing[0]}, which does not exist; restore it")


def _with_several_animals(folders: list[Folder]) -> int:
    labels: dict[str, set[int]] = {}
    for folder in folders:
        for file in folder.names or ():
            labels.setdefault(file, set()).add(folder.label)
    return sum(len(several) > 1 for several in labels.values())
