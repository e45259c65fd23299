"""`sightline convert`: pickles, run-length encodings, class numbers and MATLAB files into files that the readers read.

    sightline convert siim FOLDER                        # cxr_tube_dict.pkl and train-rle.csv
    sightline convert imagenet-s FOLDER                  # class numbers
    sightline convert imagenet-segmentation FILE.mat     # gtsegs_ijcv.mat
    sightline convert metashift-animals FOLDER           # full-candidate-subsets.pkl
    sightline convert metashift-indoor-outdoor FOLDER    # imageID_to_group.pkl

The new files are written beside the published ones, where `--layout` looks for them.
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
from ..console.files import save_image
from ..errors import UserError
from .imagenet import NO_CLASS, SEGMENTATION_FILE, write_imagenet_s_masks
from .metashift import CANDIDATES, GROUPS
from .pickles import pickle_to_json
from .reading import save_mask, wrong_folder
from .siim import MASKS, TABLE, TUBES, write_masks


def convert(layout: str, path: Path | str) -> list[str]:
    """Write the files that this layout's reader needs; returns a line about each of them."""
    return CONVERTERS[layout](Path(path).expanduser())


def _convert_siim(root: Path) -> list[str]:
    written = []
    if (root / f"{TUBES}.pkl").is_file():
        written += _convert_pickle(root, TUBES, "SIIM-ACR")
    if (root / TABLE).is_file():
        written.append(f"{root / MASKS}: {write_masks(root):,} masks")
    if not written:
        raise wrong_folder(root, "SIIM-ACR", f"{TABLE} or {TUBES}.pkl")
    return written


def _convert_imagenet_s(root: Path) -> list[str]:
    return [f"{root}: {write_imagenet_s_masks(root):,} masks"]


def _convert_pickle(root: Path, stem: str, layout: str) -> list[str]:
    source, target = root / f"{stem}.pkl", root / f"{stem}.json"
    if not source.is_file():
        raise wrong_folder(root, layout, source.name)
    pickle_to_json(source, target)
    return [str(target)]


# ---- ImageNet-Segmentation -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentedImage:
    """One image of gtsegs_ijcv.mat."""

    name: str
    wnid: str  # "" where the file has none
    pixels: np.ndarray  # uint8 [h, w, 3]
    mask: np.ndarray  # bool [h, w]
    annotations: int


def _convert_imagenet_segmentation(path: Path) -> list[str]:
    """Every image of the .mat file as images/WNID/NAME.png, its mask as masks/WNID/NAME.png, lossless."""
    file = path if path.is_file() else path / SEGMENTATION_FILE
    if not file.is_file():
        raise wrong_folder(path, "ImageNet-Segmentation", SEGMENTATION_FILE)
    targets = {name: file.parent / name for name in ("images", "masks")}
    # Renamed when the conversion is complete.
    partial = {name: file.parent / f"{name}.sightline.partial" for name in targets}
    for target in targets.values():
        if target.exists():
            raise UserError(f"{target}: exists already; remove it to convert {file.name} again")
    count = unclassed = several = 0
    try:
        for folder in partial.values():
            shutil.rmtree(folder, ignore_errors=True)
        for image in read_segmented(file):
            target = Path(image.wnid or NO_CLASS, f"{image.name}.png")
            _save_image(image, partial["images"] / target)
            save_mask(image.mask, partial["masks"] / target)
            count, unclassed, several = count + 1, unclassed + (not image.wnid), several + (image.annotations > 1)
        for name in ("masks", "images"):
            partial[name].rename(targets[name])
    except OSError as error:
        raise UserError(f"{file.parent}: cannot be written ({error.strerror or error})") from None
    written = [f"{targets['images']} and {targets['masks'].name}: {count:,} images and their masks"]
    if unclassed:
        written.append(f"{unclassed:,} of them have no class in the file: they can evaluate masks, not predictions")
    if several:
        written.append(f"{several:,} were annotated several times: the first mask is used, as in the papers")
    return written


def read_segmented(file: Path) -> Iterator[SegmentedImage]:
    """The images of a MATLAB 7.3 file, which is HDF5: cells are references, and every array is transposed."""
    try:
        import h5py
    except ImportError:
        raise UserError(f"{file}: MATLAB 7.3 needs h5py; install it with: pip install 'sightline[matlab]'") from None
    try:
        opened = h5py.File(file, "r")
    except OSError:
        raise UserError(f"{file}: not a MATLAB 7.3 file, or damaged; download it again") from None
    with opened as content:
        if "value/img" not in content or "value/gt" not in content:
            found = ", ".join(list(content)[:5]) or "nothing"
            raise UserError(f"{file}: not {SEGMENTATION_FILE}: expected value/img and value/gt; found {found}")
        if not len(content["value/img"]) or len(content["value/img"]) != len(content["value/gt"]):
            raise UserError(f"{file}: expected as many value/gt as value/img, at least one; download it again")
        for number in range(len(content["value/img"])):
            try:
                yield _segmented_image(content, number)
            except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
                raise UserError(f"{file}: image {number} of value/img cannot be read ({error})") from None


def _segmented_image(content: Any, number: int) -> SegmentedImage:
    pixels = np.asarray(content[content["value/img"][number, 0]]).transpose(2, 1, 0)
    annotations = content[content["value/gt"][number, 0]]
    mask = np.asarray(content[annotations[0, 0]]).transpose(1, 0)
    if pixels.dtype != np.uint8 or pixels.shape[2] != 3:
        raise ValueError(f"expected 8-bit RGB, found {pixels.shape[2]} channels of {pixels.dtype}")
    if mask.shape != pixels.shape[:2] or not np.isin(mask, (0, 1)).all():
        raise ValueError("expected a mask of the image's size with values 0 and 1 only")
    name = _text(content, "value/id", number) or f"{number:05}"
    candidates = [_text(content, "value/target", number), name.partition("_")[0]]
    wnid = next((word for word in candidates if re.fullmatch(r"n\d{8}", word)), "")
    return SegmentedImage(name, wnid, pixels, mask == 1, annotations.size)


def _text(content: Any, column: str, number: int) -> str:
    """MATLAB stores text as UTF-16; "" where there is none, or none that could be a file name."""
    if column not in content:
        return ""
    text = np.asarray(content[content[column][number, 0]])
    if text.dtype != np.uint16:
        return ""
    word = text.ravel().astype("<u2").tobytes().decode("utf-16-le")
    return word if re.fullmatch(r"\w[\w.-]*", word) else ""


def _save_image(image: SegmentedImage, file: Path) -> None:
    if file.exists():
        raise UserError(f"{file}: two images have this name in value/id; download {SEGMENTATION_FILE} again")
    save_image(file, Image.fromarray(image.pixels), sync=False, marked=False)


CONVERTERS: dict[str, Callable[[Path], list[str]]] = {
    "imagenet-s": _convert_imagenet_s,
    "imagenet-segmentation": _convert_imagenet_segmentation,
    "metashift-animals": lambda root: _convert_pickle(root, CANDIDATES, "MetaShift Animals"),
    "metashift-indoor-outdoor": lambda root: _convert_pickle(root, GROUPS, "MetaShift (indoor/outdoor)"),
    "siim": _convert_siim,
}


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Convert) -> int:
    print("\n".join(convert(command.layout, command.data)))
    return 0
