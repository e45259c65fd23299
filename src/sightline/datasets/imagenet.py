"""ImageNet-1k and the test sets made for it; labels are its 1,000 classes in the order of their sorted WordNet ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from ..data.rows import TEST, TRAIN, VAL, Rows
from ..errors import UserError
from .pickles import command_for
from .reading import (
    Folder,
    class_folders,
    existing,
    image_names,
    locate,
    read_json,
    read_text,
    rows_from_folders,
    save_mask,
    wrong_folder,
)

ANNOTATIONS = ("Annotations/CLS-LOC/val", "Annotations/val", "Annotations")
# fmt: off
IMAGENET9_CLASSES = (
    "dog", "bird", "wheeled vehicle", "reptile", "carnivore", "insect", "musical instrument", "primate", "fish",
)
IMAGENET9_VARIANTS = (
    "original", "mixed_same", "mixed_rand", "mixed_next", "only_fg", "no_fg", "only_bg_b", "only_bg_t",
)
# fmt: on
IMAGENET9_MIXED = ("mixed_same", "mixed_rand")  # their difference in accuracy is the background gap
# First and last label of each run of classes. Vehicles and instruments are scattered: see the released file.
IMAGENET9_RANGES = {
    "dog": ((151, 170), (173, 268)),
    "bird": ((7, 24), (87, 100), (127, 146)),
    "reptile": ((33, 68),),
    "carnivore": ((269, 280), (286, 299), (356, 362), (387, 388)),
    "insect": ((300, 326),),
    "primate": ((365, 384),),
    "fish": ((0, 6), (389, 397)),
}
IMAGENET_S_SPLITS = {"train-semi": TRAIN, "validation": VAL, "test": TEST}
IMAGENET_S_IGNORED = 1000
SEGMENTED = ("train-semi", "validation")
SEGMENTATION_FILE = "gtsegs_ijcv.mat"
NO_CLASS = "unknown"  # the folder of images whose class is not known
OBJECTNET_MAPPINGS = (
    "folder_to_objectnet_label.json",
    "objectnet_to_imagenet_1k.json",
    "pytorch_to_imagenet_2012_id.json",
    "imagenet_to_label_2012_v2",
)
SI_SCORE_FOLDERS = {
    "location": ("object_location", "location20_area02_min0pc", "location"),
    "rotation": ("object_rotation", "rotation"),
    "size": ("object_size", "area", "size"),
}
# SI-Score's names where they differ from ImageNet's.
SI_SCORE_NAMES = {
    "band-aid": "Band Aid", "billiard table": "pool table", "common fig": "fig", "computer mouse": "mouse",
    "eraser": "rubber eraser", "filing cabinet": "file", "flowerpot": "pot", "hair dryer": "hand blower",
    "hedgehog": "porcupine", "hot dog": "hotdog", "jeans": "jean", "light switch": "switch", "lighthouse": "beacon",
    "maracas": "maraca", "microwave oven": "microwave", "mobile phone": "cellular telephone",
    "pencil case": "pencil box", "pig": "hog", "pitcher (container)": "pitcher", "polar bear": "ice bear",
    "red panda": "lesser panda", "ruler": "rule", "saxophone": "sax", "taxi": "cab", "teddy bear": "teddy",
    "toilet paper": "toilet tissue", "volleyball (ball)": "volleyball", "washing machine": "washer",
}  # fmt: skip


# ---- the 1,000 classes -----------------------------------------------------------------------------------------------


@cache
def imagenet_classes() -> dict[str, str]:
    """Each WordNet id with a short name, in the order of the labels."""
    return json.loads(Path(__file__).with_name("imagenet_classes.json").read_text(encoding="utf-8"))


@cache
def imagenet_labels() -> dict[str, int]:
    """Each WordNet id with its label."""
    return {wnid: label for label, wnid in enumerate(imagenet_classes())}


def _class_names() -> tuple[str, ...]:
    return tuple(imagenet_classes().values())


def _wnid_folders(root: Path, path: str, split: int, layout: str) -> list[Folder]:
    folder, labels = root / path, imagenet_labels()
    wnids = class_folders(folder)
    if not wnids or not all(wnid in labels for wnid in wnids):
        raise wrong_folder(folder, layout, "a folder for each class, named by its wnid (n01440764)")
    return [Folder(f"{path}/{wnid}" if path else wnid, labels[wnid], split) for wnid in wnids]


def _count_note(folders: Sequence[Folder], published: int) -> list[str]:
    count = len({folder.label for folder in folders})
    return [] if count == published else [f"{count:,} of the {published:,} published classes are present"]


# ---- ImageNet itself -------------------------------------------------------------------------------------------------


def read_imagenet(root: Path) -> Rows:
    """train/WNID and val/WNID; the published validation images are the test split, as in the papers."""
    layout = "ImageNet-1k"
    folder = locate(root, layout, ("train", "val"), inside=("Data/CLS-LOC", "ILSVRC/Data/CLS-LOC"))
    folders = _wnid_folders(folder, "train", TRAIN, layout) + _wnid_folders(folder, "val", TEST, layout)
    notes = ["the published validation images are the test split, as in the papers; validation comes from train"]
    rows = rows_from_folders("imagenet", folder, _class_names(), folders, notes + _count_note(folders, 1000))
    bases = (folder, folder.resolve().parent.parent)
    annotations = next((base / path for base in bases for path in ANNOTATIONS if (base / path).is_dir()), None)
    return rows if annotations is None else _with_boxes(rows, annotations)


def _with_boxes(rows: Rows, annotations: Path) -> Rows:
    """Add the boxes of the test images from ILSVRC's XML, one file per image."""
    boxes = [np.zeros((0, 4), np.float32)] * len(rows)
    test = rows.split_indices("test")
    names = [f"{Path(rows.images[row]).stem}.xml" for row in test]
    files = existing(annotations, names)
    for row, file in zip(test, files, strict=True):
        if file:
            boxes[row] = _read_boxes(annotations / file)
    if not any(files):
        raise wrong_folder(annotations, "ILSVRC's boxes", f"a file for each image in val ({names[0]})")
    missing = files.count("")
    note = (f"no box file for {missing:,} of the test images",) if missing else ()
    return replace(rows, boxes=boxes, notes=rows.notes + note)


def _read_boxes(file: Path) -> np.ndarray:
    try:
        elements = ElementTree.parse(file).iter("bndbox")
        corners = [[float(box.findtext(side) or "") for side in ("xmin", "ymin", "xmax", "ymax")] for box in elements]
    except ElementTree.ParseError as error:
        raise UserError(f"{file}:{error.position[0]}: not XML ({error})") from None
    except ValueError:
        raise UserError(f"{file}: a bndbox lacks one of the numbers xmin, ymin, xmax, ymax") from None
    return np.array(corners, np.float32).reshape(-1, 4)


# ---- test sets with ImageNet's labels --------------------------------------------------------------------------------


def read_imagenet_v2(root: Path) -> Rows:
    """Folders 0 to 999, one for each label."""
    names = class_folders(root)
    if not names or not all(name.isdecimal() and int(name) < 1000 for name in names):
        raise wrong_folder(root, "ImageNet-V2", "a folder for each label, 0 to 999")
    folders = [Folder(name, int(name), TEST) for name in sorted(names, key=int)]
    return rows_from_folders("imagenet-v2", root, _class_names(), folders, _count_note(folders, 1000))


def _read_wnids(root: Path, name: str, layout: str, published: int, inside: Sequence[str] = ()) -> Rows:
    folder = next((root / inner for inner in (*inside, name) if (root / inner).is_dir()), root)
    folders = _wnid_folders(folder, "", TEST, layout)
    notes = _count_note(folders, published)
    if published < 1000:
        notes.append(f"predictions are over all 1,000 classes; the authors restrict them to its {published} classes")
    return rows_from_folders(name, folder, _class_names(), folders, notes)


def _read_si_score(root: Path, factor: str) -> Rows:
    """Folders named by the object, as in `ambulance/17.jpg`."""
    folder = next((root / inner for inner in SI_SCORE_FOLDERS[factor] if (root / inner).is_dir()), root)
    label_of = {name.lower(): label for label, name in enumerate(_class_names())}
    label_of |= {name: label_of[other.lower()] for name, other in SI_SCORE_NAMES.items()}
    names = class_folders(folder)
    if not names or not all(name in label_of for name in names):
        raise wrong_folder(folder, f"SI-Score ({factor})", "a folder for each object (ambulance, armadillo, ...)")
    folders = [Folder(name, label_of[name], TEST) for name in names]
    return rows_from_folders(f"si-score-{factor}", folder, _class_names(), folders)


read_imagenet_a = partial(_read_wnids, name="imagenet-a", layout="ImageNet-A", published=200)
read_imagenet_r = partial(_read_wnids, name="imagenet-r", layout="ImageNet-R", published=200)
read_imagenet_sketch = partial(
    _read_wnids, name="imagenet-sketch", layout="ImageNet-Sketch", published=1000, inside=("sketch",)
)
read_si_score_location, read_si_score_rotation, read_si_score_size = (
    partial(_read_si_score, factor=factor) for factor in SI_SCORE_FOLDERS
)


# ---- ImageNet-9 ------------------------------------------------------------------------------------------------------


def read_imagenet9(root: Path, variant: str = "") -> Rows:
    """One variant of the backgrounds challenge: the folder of all variants and a name, or the variant's own folder.

    `mixed` is mixed_same and mixed_rand together, as groups: their difference in accuracy is the background gap.
    """
    if variant and variant not in (*IMAGENET9_VARIANTS, "mixed"):
        known = f"{', '.join(IMAGENET9_VARIANTS)}, and mixed (same and rand, for the background gap)"
        raise UserError(f"{variant}: not a variant of ImageNet-9; the variants are {known}")
    if not variant and (root / "original" / "val").is_dir():
        variant = "original"
    mapping = "predictions of a 1,000-class model are mapped by in_to_in9.json"
    if variant == "mixed":
        folders = [folder for name in IMAGENET9_MIXED for folder in _imagenet9_folders(root, name, attribute=name)]
        note = f"variants {' and '.join(IMAGENET9_MIXED)}; {mapping}"
        return rows_from_folders("imagenet9", root, IMAGENET9_CLASSES, folders, [note])
    notes = [f"variant {variant or root.resolve().name}; {mapping}"]
    notes += ["for the background gap, evaluate with --layout imagenet9:mixed"] if variant in IMAGENET9_MIXED else []
    return rows_from_folders("imagenet9", root, IMAGENET9_CLASSES, _imagenet9_folders(root, variant), notes)


def _imagenet9_folders(root: Path, variant: str, attribute: str = "") -> list[Folder]:
    """00_dog to 08_fish, under val or not."""
    path = f"{variant}/" if variant else ""
    path += "val/" if (root / path / "val").is_dir() else ""
    folder = root / path
    names = [f"{number:02}_{name}" for number, name in enumerate(IMAGENET9_CLASSES)]
    if not folder.is_dir() or list(class_folders(folder)) != names:
        expected = f"{Path(variant, 'val', names[0])} to {Path(variant, 'val', names[-1])}"
        raise wrong_folder(folder if folder.is_dir() else root, "ImageNet-9", expected)
    return [Folder(f"{path}{name}", label, TEST, attribute) for label, name in enumerate(names)]


def imagenet_to_imagenet9(root: Path) -> np.ndarray:
    """int64 [1000]: the ImageNet-9 class of each ImageNet class, or -1, according to the released in_to_in9.json."""
    folders = [root, root.resolve().parent, root.resolve().parent.parent]
    file = next((folder / "in_to_in9.json" for folder in folders if (folder / "in_to_in9.json").is_file()), None)
    if file is None:
        raise UserError(f"{root}: no in_to_in9.json here or above; copy it from the backgrounds challenge's repository")
    released = read_json(file)
    complete = isinstance(released, dict) and set(released) == {str(label) for label in range(1000)}
    if not complete or not all(nine in range(-1, 9) for nine in released.values()):
        raise UserError(f"{file}: expected every class from 0 to 999 with a number from -1 to 8")
    if missing := sorted(set(range(9)) - set(released.values())):
        raise UserError(f"{file}: not the released file: no class is mapped to {IMAGENET9_CLASSES[missing[0]]}")
    nine = np.array([released[str(label)] for label in range(1000)], np.int64)
    for name, ranges in IMAGENET9_RANGES.items():
        members = np.concatenate([np.arange(first, last + 1) for first, last in ranges])
        if not np.array_equal(np.flatnonzero(nine == IMAGENET9_CLASSES.index(name)), members):
            raise UserError(f"{file}: not the released file: other classes are mapped to {name}")
    return nine


# ---- with masks ------------------------------------------------------------------------------------------------------


def read_imagenet_s(root: Path) -> Rows:
    """ImageNetS50, ImageNetS300 or ImageNetS919: train-semi, validation and test, with masks for the first two."""
    folder = locate(root, "ImageNet-S", ("train-semi", "validation"), inside=("ImageNetS919",))
    splits = {path: split for path, split in IMAGENET_S_SPLITS.items() if (folder / path).is_dir()}
    folders = []
    for path, split in splits.items():
        folders += _wnid_folders(folder, path, split, "ImageNet-S")
    note = "only the annotated images of train are read"
    rows = rows_from_folders("imagenet-s", folder, _class_names(), folders, [note])
    masks = existing(folder, [_imagenet_s_mask(image) for image in rows.images])
    if not any(masks):
        command = command_for("imagenet-s", folder)
        note = f"no masks yet: they are published as class numbers; convert them: {command}"
        return replace(rows, notes=(*rows.notes, note))
    missing = sum(not mask and split != TEST for mask, split in zip(masks, rows.splits, strict=True))
    notes = [f"no mask for {missing:,} of the train and validation images"] if missing else []
    return replace(rows, masks=masks, notes=(*rows.notes, "no masks are published for the test split", *notes))


def write_imagenet_s_masks(root: Path) -> int:
    """Write ImageNet-S's class numbers as masks (train-semi-mask, validation-mask); returns how many there are."""
    from ..data.images import read_image

    needs, count = [f"{split}-segmentation" for split in SEGMENTED], 0
    folder = locate(root, "ImageNet-S", needs, inside=("ImageNetS919",))
    for split in SEGMENTED:
        source = folder / f"{split}-segmentation"
        for wnid in _wnid_folders(source, "", TRAIN, "ImageNet-S's annotation"):
            for name in image_names(source / wnid.path, (".png",)):
                red, green, _ = np.moveaxis(np.asarray(read_image(source / wnid.path / name), np.int64), 2, 0)
                number = red + 256 * green
                target = folder / f"{split}-mask" / wnid.path / name
                save_mask((number > 0) & (number != IMAGENET_S_IGNORED), target)
                count += 1
    return count


def _imagenet_s_mask(image: str) -> str:
    split, _, rest = image.partition("/")
    return f"{split}-mask/{rest.rpartition('.')[0]}.png"


def read_imagenet_segmentation(root: Path) -> Rows:
    """The images and masks of gtsegs_ijcv.mat as files: images/WNID/NAME.png and masks/WNID/NAME.png."""
    layout = "ImageNet-Segmentation"
    published = root if root.suffix == ".mat" and root.is_file() else root / SEGMENTATION_FILE
    if not (root / "images").is_dir() and published.exists():
        raise UserError(f"{published}: convert it first: {command_for('imagenet-segmentation', published)}")
    folder = locate(root, layout, ("images", "masks"))
    labels, wnids = imagenet_labels(), class_folders(folder / "images")
    if not wnids or not all(wnid == NO_CLASS or (wnid[0] == "n" and wnid[1:].isdecimal()) for wnid in wnids):
        raise wrong_folder(folder / "images", layout, "a folder for each class, named by its wnid (n01440764)")
    others = [wnid for wnid in wnids if wnid not in labels]
    label_of = labels | {wnid: 1000 + index for index, wnid in enumerate(others)}
    folders = [Folder(f"images/{wnid}", label_of[wnid], TEST) for wnid in wnids]
    purpose = "so this dataset can evaluate masks, not predictions"
    notes = [f"{len(others)} classes are not among ImageNet's 1,000, {purpose}"] if others else []
    if NO_CLASS in others:
        notes = [f"the class of some images is unknown, {purpose}"]
    rows = rows_from_folders("imagenet-segmentation", folder, (*_class_names(), *others), folders, notes)
    masks = [f"masks/{image.partition('/')[2].rpartition('.')[0]}.png" for image in rows.images]
    missing = sorted(set(masks) - set(existing(folder, masks)))
    if missing:
        raise UserError(f"{folder / missing[0]}: the mask of an image does not exist ({len(missing):,} are missing)")
    return replace(rows, masks=masks)


# ---- ObjectNet -------------------------------------------------------------------------------------------------------


def read_objectnet(root: Path) -> Rows:
    """The objects that have an ImageNet class; the label is the first of an object's classes."""
    needs = ("images", *(f"mappings/{name}" for name in OBJECTNET_MAPPINGS))
    folder = locate(root, "ObjectNet", needs, inside=("objectnet-1.0",))
    labels_of, names = objectnet_labels(folder), class_folders(folder / "images")
    folders = [Folder(f"images/{name}", labels_of[name][0], TEST) for name in names if name in labels_of]
    if not folders:
        raise wrong_folder(folder / "images", "ObjectNet", f"folders such as {', '.join(sorted(labels_of)[:3])}")
    several = sum(len(labels_of[name]) > 1 for name in names if name in labels_of)
    notes = [
        f"{len(names) - len(folders)} objects without an ImageNet class are left out",
        f"{several} objects have several ImageNet classes: the label is the first, the others count as errors",
        "every image has a red border of 2 pixels",
    ]
    return rows_from_folders("objectnet", folder, _class_names(), folders, notes)


def objectnet_labels(root: Path) -> dict[str, tuple[int, ...]]:
    """The ImageNet labels that are correct for each object folder, for the objects that have any."""
    folder_names, in_imagenet, line_of_label, lines = (root / "mappings" / name for name in OBJECTNET_MAPPINGS)
    try:
        title_of_line = read_text(lines).splitlines()
        label_of = {title_of_line[line].strip(): int(label) for label, line in read_json(line_of_label).items()}
        titles_of = {name: text.split("; ") for name, text in read_json(in_imagenet).items()}
        objects = read_json(folder_names).items()
        known = [(folder, titles_of[name]) for folder, name in objects if name in titles_of]
        labels = {folder: tuple(label_of[title.strip()] for title in titles) for folder, titles in known}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{root / 'mappings'}: the four files do not fit together ({error!r}); restore them") from None
    if not labels:
        raise UserError(f"{root / 'mappings'}: these files give no object an ImageNet class; restore them")
    return labels
