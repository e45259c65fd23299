"""ImageNet-1k and the test sets made for it; labels are its 1,000 classes in the order of their sorted wnids."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from ..data.rows import TEST, TRAIN, VAL, Rows
from ..errors import UserError
from .cub import Folder, class_folders, locate, pictures, present, rows_of_folders, save_mask, wrong_folder
from .pickles import command_for, read_json

ANNOTATIONS = ("Annotations/CLS-LOC/val", "Annotations/val", "Annotations")
IMAGENET9_CLASSES = (
    "dog",
    "bird",
    "wheeled vehicle",
    "reptile",
    "carnivore",
    "insect",
    "musical instrument",
    "primate",
    "fish",
)
IMAGENET9_VARIANTS = (
    "original",
    "mixed_same",
    "mixed_rand",
    "mixed_next",
    "only_fg",
    "no_fg",
    "only_bg_b",
    "only_bg_t",
)
IMAGENET9_MIXED = ("mixed_same", "mixed_rand")  # the two that the background gap lies between
# First and last index of each run of classes; vehicles and instruments are scattered: the released file has them.
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
NO_CLASS = "unknown"  # the folder of pictures without one
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


@functools.cache
def imagenet_classes() -> dict[str, str]:
    """Each wnid with a short name, in the order of the labels."""
    return json.loads(Path(__file__).with_name("imagenet_classes.json").read_text(encoding="utf-8"))


@functools.cache
def imagenet_labels() -> dict[str, int]:
    """Each wnid with its label."""
    return {wnid: label for label, wnid in enumerate(imagenet_classes())}


def _names() -> tuple[str, ...]:
    return tuple(imagenet_classes().values())


def _wnid_folders(root: Path, path: str, split: int, layout: str) -> list[Folder]:
    here, labels = root / path, imagenet_labels()
    found = class_folders(here)
    strange = [name for name in found if name not in labels]
    if strange or not found:
        raise wrong_folder(here, layout, "a folder for each class, named by its wnid (n01440764)")
    return [Folder(f"{path}/{wnid}" if path else wnid, labels[wnid], split) for wnid in found]


def _count_note(folders: Sequence[Folder], published: int) -> list[str]:
    count = len({folder.label for folder in folders})
    return [] if count == published else [f"{count:,} of the {published:,} published classes are here"]


# ---- ImageNet itself -------------------------------------------------------------------------------------------------


def read_imagenet(root: Path) -> Rows:
    """train/WNID and val/WNID; the published validation pictures are the test split, as in every paper."""
    layout = "ImageNet-1k"
    folder = locate(root, layout, ("train", "val"), inside=("Data/CLS-LOC", "ILSVRC/Data/CLS-LOC"))
    folders = _wnid_folders(folder, "train", TRAIN, layout) + _wnid_folders(folder, "val", TEST, layout)
    notes = ["ImageNet's val is the test split here, as in the papers; a val split has to come from train"]
    rows = rows_of_folders("imagenet", folder, _names(), folders, notes + _count_note(folders, 1000))
    around = (folder, folder.resolve().parent.parent)
    annotations = next((base / path for base in around for path in ANNOTATIONS if (base / path).is_dir()), None)
    return rows if annotations is None else _with_boxes(rows, annotations)


def _with_boxes(rows: Rows, annotations: Path) -> Rows:
    """Boxes of the test pictures from ILSVRC's XML, one file per picture."""
    none = np.zeros((0, 4), np.float32)
    boxes = [none] * len(rows)
    test = rows.where("test")
    files = [f"{Path(rows.images[row]).stem}.xml" for row in test]
    there = present(annotations, files)
    for row, file, found in zip(test, files, there, strict=True):
        if found:
            boxes[row] = _boxes(annotations / file)
    if not any(there):
        raise wrong_folder(annotations, "ILSVRC's boxes", f"a file for each picture in val ({files[0]})")
    lacking = len(there) - sum(there)
    note = (f"no box file for {lacking:,} of the pictures of the test split",) if lacking else ()
    return replace(rows, boxes=boxes, notes=rows.notes + note)


def _boxes(file: Path) -> np.ndarray:
    try:
        found = ElementTree.parse(file).iter("bndbox")
        corners = [[float(box.findtext(side) or "") for side in ("xmin", "ymin", "xmax", "ymax")] for box in found]
    except ElementTree.ParseError as error:
        raise UserError(f"{file}:{error.position[0]}: not XML ({error})") from None
    except ValueError:
        raise UserError(f"{file}: a bndbox without the four numbers xmin, ymin, xmax, ymax") from None
    return np.array(corners, np.float32).reshape(-1, 4)


# ---- test sets with ImageNet's labels --------------------------------------------------------------------------------


def read_imagenet_v2(root: Path) -> Rows:
    """Folders 0 to 999, one for each label."""
    found = class_folders(root)
    if not found or not all(name.isdecimal() and int(name) < 1000 for name in found):
        raise wrong_folder(root, "ImageNet-V2", "a folder for each label, 0 to 999")
    folders = [Folder(name, int(name), TEST) for name in sorted(found, key=int)]
    return rows_of_folders("imagenet-v2", root, _names(), folders, _count_note(folders, 1000))


def read_imagenet_a(root: Path) -> Rows:
    return _read_wnids(root, "imagenet-a", "ImageNet-A", 200)


def read_imagenet_r(root: Path) -> Rows:
    return _read_wnids(root, "imagenet-r", "ImageNet-R", 200)


def read_imagenet_sketch(root: Path) -> Rows:
    return _read_wnids(root, "imagenet-sketch", "ImageNet-Sketch", 1000, inside=("sketch",))


def _read_wnids(root: Path, name: str, layout: str, published: int, inside: Sequence[str] = ()) -> Rows:
    folder = next((root / inner for inner in (*inside, name) if (root / inner).is_dir()), root)
    folders = _wnid_folders(folder, "", TEST, layout)
    notes = _count_note(folders, published)
    if published < 1000:
        notes.append(f"any of 1,000 answers may be given here; its authors allow only the {published} classes it has")
    return rows_of_folders(name, folder, _names(), folders, notes)


def read_si_score_location(root: Path) -> Rows:
    return _read_si_score(root, "location")


def read_si_score_rotation(root: Path) -> Rows:
    return _read_si_score(root, "rotation")


def read_si_score_size(root: Path) -> Rows:
    return _read_si_score(root, "size")


def _read_si_score(root: Path, change: str) -> Rows:
    """Folders named by the object, as in `ambulance/17.jpg`."""
    folder = next((root / inner for inner in SI_SCORE_FOLDERS[change] if (root / inner).is_dir()), root)
    label_of = {name.lower(): label for label, name in enumerate(_names())}
    label_of |= {name: label_of[other.lower()] for name, other in SI_SCORE_NAMES.items()}
    found = class_folders(folder)
    if not found or not all(name in label_of for name in found):
        raise wrong_folder(folder, f"SI-Score ({change})", "a folder for each object (ambulance, armadillo, ...)")
    folders = [Folder(name, label_of[name], TEST) for name in found]
    return rows_of_folders(f"si-score-{change}", folder, _names(), folders)


# ---- ImageNet-9 ------------------------------------------------------------------------------------------------------


def read_imagenet9(root: Path, variant: str = "") -> Rows:
    """One variant of the backgrounds challenge: the folder of all of them and a name, or the variant's own folder.

    `mixed` is both mixed_same and mixed_rand, as groups: the background gap lies between them.
    """
    if variant and variant not in (*IMAGENET9_VARIANTS, "mixed"):
        known = f"{', '.join(IMAGENET9_VARIANTS)}, and mixed (same and rand, for the background gap)"
        raise UserError(f"{variant}: no variant of ImageNet-9; there are {known}")
    if not variant and (root / "original" / "val").is_dir():
        variant = "original"
    through = "a model of 1,000 classes answers through in_to_in9.json"
    if variant == "mixed":
        folders = [folder for name in IMAGENET9_MIXED for folder in _nine_folders(root, name, attribute=name)]
        note = f"variants {' and '.join(IMAGENET9_MIXED)}; {through}"
        return rows_of_folders("imagenet9", root, IMAGENET9_CLASSES, folders, [note])
    notes = [f"variant {variant or root.resolve().name}; {through}"]
    notes += ["for the background gap, evaluate with --layout imagenet9:mixed"] if variant in IMAGENET9_MIXED else []
    return rows_of_folders("imagenet9", root, IMAGENET9_CLASSES, _nine_folders(root, variant), notes)


def _nine_folders(root: Path, variant: str, attribute: str = "") -> list[Folder]:
    """00_dog to 08_fish, under val or not."""
    path = f"{variant}/" if variant else ""
    path += "val/" if (root / path / "val").is_dir() else ""
    here = root / path
    expected = [f"{number:02}_{name}" for number, name in enumerate(IMAGENET9_CLASSES)]
    if not here.is_dir() or list(class_folders(here)) != expected:
        nine = f"{Path(variant, 'val', expected[0])} to {Path(variant, 'val', expected[-1])}"
        raise wrong_folder(here if here.is_dir() else root, "ImageNet-9", nine)
    return [Folder(f"{path}{name}", label, TEST, attribute) for label, name in enumerate(expected)]


def imagenet_to_imagenet9(root: Path) -> np.ndarray:
    """int64 [1000]: which of the nine each ImageNet class belongs to, or -1, by the released in_to_in9.json."""
    places = [root, root.resolve().parent, root.resolve().parent.parent]
    file = next((place / "in_to_in9.json" for place in places if (place / "in_to_in9.json").is_file()), None)
    if file is None:
        raise UserError(f"{root}: no in_to_in9.json here or above; copy it from the backgrounds challenge's repository")
    released = read_json(file)
    keys = {str(label) for label in range(1000)}
    whole = isinstance(released, dict) and set(released) == keys
    if not whole or not all(nine in range(-1, 9) for nine in released.values()):
        raise UserError(f"{file}: expected every class from 0 to 999 with a number from -1 to 8")
    if lacking := sorted(set(range(9)) - set(released.values())):
        raise UserError(f"{file}: not the released file: no class counts as {IMAGENET9_CLASSES[lacking[0]]} in it")
    nine = np.array([released[str(label)] for label in range(1000)], np.int64)
    for name, ranges in IMAGENET9_RANGES.items():
        members = np.concatenate([np.arange(first, last + 1) for first, last in ranges])
        if not np.array_equal(np.flatnonzero(nine == IMAGENET9_CLASSES.index(name)), members):
            raise UserError(f"{file}: not the released file: other classes count as {name} in it")
    return nine


# ---- with masks ------------------------------------------------------------------------------------------------------


def read_imagenet_s(root: Path) -> Rows:
    """ImageNetS50, ImageNetS300 or ImageNetS919: train-semi, validation and test, with masks for the first two."""
    folder = locate(root, "ImageNet-S", ("train-semi", "validation"), inside=("ImageNetS919",))
    here = {path: split for path, split in IMAGENET_S_SPLITS.items() if (folder / path).is_dir()}
    folders = [found for path, split in here.items() for found in _wnid_folders(folder, path, split, "ImageNet-S")]
    rows = rows_of_folders("imagenet-s", folder, _names(), folders, ["only the annotated pictures of train are read"])
    masks = [_imagenet_s_mask(image) for image in rows.images]
    there = present(folder, masks)
    if any(there):
        lacking = sum(not found and split != TEST for found, split in zip(there, rows.splits, strict=True))
        notes = [f"no mask for {lacking:,} of the pictures of train and val"] if lacking else []
        masks = [mask if found else "" for mask, found in zip(masks, there, strict=True)]
        return replace(rows, masks=masks, notes=(*rows.notes, "the test split has no published masks", *notes))
    how = command_for("imagenet-s", folder)
    return replace(rows, notes=(*rows.notes, f"no masks yet: they are published as class numbers; convert them: {how}"))


def write_imagenet_s_masks(root: Path | str) -> int:
    """Write ImageNet-S's class numbers as masks beside them (train-semi-mask, validation-mask); how many there are."""
    from ..data.images import read_image

    needs, count = [f"{split}-segmentation" for split in SEGMENTED], 0
    folder = locate(Path(root), "ImageNet-S", needs, inside=("ImageNetS919",))
    for split in SEGMENTED:
        source = folder / f"{split}-segmentation"
        for found in _wnid_folders(source, "", TRAIN, "ImageNet-S's annotation"):
            for name in pictures(source / found.path, (".png",)):
                red, green, _ = np.moveaxis(np.asarray(read_image(source / found.path / name), np.int64), 2, 0)
                number = red + 256 * green
                target = folder / f"{split}-mask" / found.path / name
                save_mask((number > 0) & (number != IMAGENET_S_IGNORED), target)
                count += 1
    return count


def _imagenet_s_mask(image: str) -> str:
    split, _, rest = image.partition("/")
    return f"{split}-mask/{rest.rpartition('.')[0]}.png"


def read_imagenet_segmentation(root: Path) -> Rows:
    """The pictures and masks of gtsegs_ijcv.mat as files: images/WNID/NAME.png and masks/WNID/NAME.png."""
    layout = "ImageNet-Segmentation"
    published = root if root.suffix == ".mat" and root.is_file() else root / SEGMENTATION_FILE
    if not (root / "images").is_dir() and published.exists():
        raise UserError(f"{published}: convert it first: {command_for('imagenet-segmentation', published)}")
    folder = locate(root, layout, ("images", "masks"))
    labels, found = imagenet_labels(), class_folders(folder / "images")
    others = [wnid for wnid in found if wnid not in labels]
    if not found or not all(wnid == NO_CLASS or (wnid[0] == "n" and wnid[1:].isdecimal()) for wnid in found):
        raise wrong_folder(folder / "images", layout, "a folder for each class, named by its wnid (n01440764)")
    label_of = labels | {wnid: 1000 + place for place, wnid in enumerate(others)}
    folders = [Folder(f"images/{wnid}", label_of[wnid], TEST) for wnid in found]
    purpose = "so these data are for measuring masks, not answers"
    notes = [f"{len(others)} classes are not among ImageNet's 1,000, {purpose}"] if others else []
    if NO_CLASS in others:
        notes = [f"the class of some pictures is unknown, {purpose}"]
    rows = rows_of_folders("imagenet-segmentation", folder, (*_names(), *others), folders, notes)
    masks = [f"masks/{image.partition('/')[2].rpartition('.')[0]}.png" for image in rows.images]
    lacking = [mask for mask, there in zip(masks, present(folder, masks), strict=True) if not there]
    if lacking:
        raise UserError(f"{folder / lacking[0]}: no mask for its picture ({len(lacking):,} are missing)")
    return replace(rows, masks=masks)


# ---- ObjectNet -------------------------------------------------------------------------------------------------------


def read_objectnet(root: Path) -> Rows:
    """The objects that ImageNet has a class for; the label is the first of an object's classes."""
    needs = ("images", *(f"mappings/{name}" for name in OBJECTNET_MAPPINGS))
    folder = locate(root, "ObjectNet", needs, inside=("objectnet-1.0",))
    answers, found = objectnet_answers(folder), class_folders(folder / "images")
    folders = [Folder(f"images/{name}", answers[name][0], TEST) for name in found if name in answers]
    if not folders:
        raise wrong_folder(folder / "images", "ObjectNet", f"folders such as {', '.join(sorted(answers)[:3])}")
    several = sum(len(answers[name]) > 1 for name in found if name in answers)
    notes = [
        f"{len(found) - len(folders)} objects without an ImageNet class are left out",
        f"{several} objects have several ImageNet classes: the label is the first, others count as wrong answers",
        "every picture has a red border of 2 pixels",
    ]
    return rows_of_folders("objectnet", folder, _names(), folders, notes)


def objectnet_answers(root: Path) -> dict[str, tuple[int, ...]]:
    """For each folder of an object that ImageNet knows: every label that is a right answer."""
    folder_names, in_imagenet, line_of_label, lines = (root / "mappings" / name for name in OBJECTNET_MAPPINGS)
    try:
        title_of_line = lines.read_text(encoding="utf-8").splitlines()
        label_of = {title_of_line[line].strip(): int(label) for label, line in read_json(line_of_label).items()}
        titles = {name: text.split("; ") for name, text in read_json(in_imagenet).items()}
        objects = read_json(folder_names).items()
        known = [(folder, titles[name]) for folder, name in objects if name in titles]
        answers = {folder: tuple(label_of[title.strip()] for title in some) for folder, some in known}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{root / 'mappings'}: the four files do not fit together ({error!r}); restore them") from None
    if not answers:
        raise UserError(f"{root / 'mappings'}: no object has an ImageNet class by these files; restore them")
    return answers
