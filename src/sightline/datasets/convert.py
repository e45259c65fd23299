"""Pickles, runs of pixels, class numbers, MATLAB: what some data sets are published as, made into files to read.

    sightline convert siim FOLDER                        # cxr_tube_dict.pkl and train-rle.csv
    sightline convert imagenet-s FOLDER                  # class numbers
    sightline convert imagenet-segmentation FILE.mat     # gtsegs_ijcv.mat
    sightline convert metashift-animals FOLDER           # full-candidate-subsets.pkl
    sightline convert metashift-indoor-outdoor FOLDER    # imageID_to_group.pkl

What is made lies beside what it is made from, where `--layout` looks for it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..config import Convert
from ..errors import UserError
from .cub import save_mask, wrong_folder
from .imagenet import NO_CLASS, SEGMENTATION_FILE, write_imagenet_s_masks
from .metashift import CANDIDATES, GROUPS
from .pickles import pickle_to_json
from .siim import MASKS, TABLE, TUBES, write_masks


def convert(layout: str, path: Path | str) -> list[str]:
    """Make what this layout needs; a line for each thing that was made."""
    return CONVERTERS[layout](Path(path).expanduser())


def _siim(root: Path) -> list[str]:
    made = []
    if (root / f"{TUBES}.pkl").is_file():
        made += _pickle(root, TUBES, "SIIM-ACR")
    if (root / TABLE).is_file():
        made.append(f"{root / MASKS}: {write_masks(root):,} masks")
    if not made:
        raise wrong_folder(root, "SIIM-ACR", f"{TABLE} or {TUBES}.pkl")
    return made


def _imagenet_s(root: Path) -> list[str]:
    return [f"{root}: {write_imagenet_s_masks(root):,} masks"]


def _pickle(root: Path, stem: str, layout: str) -> list[str]:
    source, target = root / f"{stem}.pkl", root / f"{stem}.json"
    if not source.is_file():
        raise wrong_folder(root, layout, source.name)
    pickle_to_json(source, target)
    return [str(target)]


# ---- ImageNet-Segmentation -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segmented:
    """One picture of gtsegs_ijcv.mat."""

    name: str
    wnid: str  # "" where the file says none
    pixels: np.ndarray  # uint8 [h, w, 3]
    mask: np.ndarray  # bool [h, w]
    annotations: int


def _imagenet_segmentation(path: Path) -> list[str]:
    """Every picture of the .mat file as images/WNID/NAME.png, its mask as masks/WNID/NAME.png, lossless."""
    file = path if path.is_file() else path / SEGMENTATION_FILE
    if not file.is_file():
        raise wrong_folder(path, "ImageNet-Segmentation", SEGMENTATION_FILE)
    targets = {name: file.parent / name for name in ("images", "masks")}
    parts = {name: file.parent / f"{name}.part" for name in targets}  # so that half a conversion is not taken for one
    for target in targets.values():
        if target.exists():
            raise UserError(f"{target}: is there already; remove it to convert {file.name} again")
    count = unclassed = several = 0
    try:
        for part in parts.values():
            shutil.rmtree(part, ignore_errors=True)
        for picture in read_segmented(file):
            place = Path(picture.wnid or NO_CLASS, f"{picture.name}.png")
            _save_picture(picture, parts["images"] / place)
            save_mask(picture.mask, parts["masks"] / place)
            count, unclassed, several = count + 1, unclassed + (not picture.wnid), several + (picture.annotations > 1)
        for name in ("masks", "images"):
            parts[name].rename(targets[name])
    except OSError as error:
        raise UserError(f"{file.parent}: cannot be written ({error.strerror or error})") from None
    made = [f"{targets['images']} and {targets['masks'].name}: {count:,} pictures and their masks"]
    made += [f"{unclassed:,} of them have no class in the file: for measuring masks, not answers"] if unclassed else []
    made += [f"{several:,} were annotated several times: the first mask is taken, as in the papers"] if several else []
    return made


def read_segmented(file: Path) -> Iterator[Segmented]:
    """The pictures in MATLAB 7.3's form, which is HDF5: cells are references, and every array is transposed."""
    try:
        import h5py
    except ImportError:
        raise UserError(f"{file}: MATLAB 7.3 needs h5py; install it with: pip install 'sightline[matlab]'") from None
    try:
        opened = h5py.File(file, "r")
    except OSError:
        raise UserError(f"{file}: not a MATLAB 7.3 file, or a damaged one; download it again") from None
    with opened as content:
        if "value/img" not in content or "value/gt" not in content:
            found = ", ".join(list(content)[:5]) or "nothing"
            raise UserError(f"{file}: not {SEGMENTATION_FILE}: expected value/img and value/gt; found {found}")
        if not len(content["value/img"]) or len(content["value/img"]) != len(content["value/gt"]):
            raise UserError(f"{file}: expected as many value/gt as value/img, and some; download it again")
        for number in range(len(content["value/img"])):
            try:
                yield _segmented(content, number)
            except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
                raise UserError(f"{file}: picture {number} of value/img cannot be read ({error})") from None


def _segmented(content: Any, number: int) -> Segmented:
    pixels = np.asarray(content[content["value/img"][number, 0]]).transpose(2, 1, 0)
    annotations = content[content["value/gt"][number, 0]]
    mask = np.asarray(content[annotations[0, 0]]).transpose(1, 0)
    if pixels.dtype != np.uint8 or pixels.shape[2] != 3:
        raise ValueError(f"expected RGB of 8 bits, found {pixels.shape[2]} channels of {pixels.dtype}")
    if mask.shape != pixels.shape[:2] or not np.isin(mask, (0, 1)).all():
        raise ValueError("expected a mask of its size, with 0 and 1 only")
    name = _text(content, "value/id", number) or f"{number:05}"
    told = [_text(content, "value/target", number), name.partition("_")[0]]
    wnid = next((word for word in told if re.fullmatch(r"n\d{8}", word)), "")
    return Segmented(name, wnid, pixels, mask == 1, annotations.size)


def _text(content: Any, column: str, number: int) -> str:
    """MATLAB keeps text as UTF-16; "" where there is none, or none that could be a file's name."""
    if column not in content:
        return ""
    text = np.asarray(content[content[column][number, 0]])
    if text.dtype != np.uint16:
        return ""
    word = text.ravel().astype("<u2").tobytes().decode("utf-16-le")
    return word if re.fullmatch(r"\w[\w.-]*", word) else ""


def _save_picture(picture: Segmented, file: Path) -> None:
    if file.exists():
        raise UserError(f"{file}: two pictures have this name in value/id; download {SEGMENTATION_FILE} again")
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.pixels).save(file)


CONVERTERS: dict[str, Callable[[Path], list[str]]] = {
    "imagenet-s": _imagenet_s,
    "imagenet-segmentation": _imagenet_segmentation,
    "metashift-animals": lambda root: _pickle(root, CANDIDATES, "MetaShift Animals"),
    "metashift-indoor-outdoor": lambda root: _pickle(root, GROUPS, "MetaShift (indoor/outdoor)"),
    "siim": _siim,
}


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Convert) -> int:
    print("\n".join(convert(command.layout, command.data)))
    return 0
