"""`sightline predict`: answers about pictures that have no labels, and pictures of what was seen of them."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .config import Predict
from .console.files import as_csv, make_folder, make_way, write
from .console.terminal import counted, fail
from .data.drawing import as_seen, to_images
from .data.images import find_images, read_image, to_tensor
from .errors import UserError
from .load import load_corrected
from .sight import Sight
from .training.distributed import make_accelerator


@dataclass(frozen=True)
class Guesses:
    """What `predict` says of many pictures."""

    text: str  # CSV or JSON, a line per picture that could be read
    pictures: int
    unreadable: int
    unseen: tuple[Path, ...] = ()  # of which the model saw nothing


def predict(command: Predict) -> Guesses:
    """A line per picture: the answer and the probability of every class."""
    device = make_accelerator(command.device).device
    correctable = command.intervention and command.mask is None  # a mask takes the place of all that there is
    model = load_corrected(command.run, str(device), correctable)
    if command.overlay is not None and (model.method.sees_everything or not model.method.blind):
        raise UserError("--overlay: this method sees the whole picture, so there is nothing to draw")
    paths = find_images(command.images)
    names = overlay_names(paths, command.images)
    columns = ["image", "predicted", *(f"p_{name}" for name in model.classes)]
    lines: list[dict[str, Any]] = []
    unseen: list[Path] = []
    for start in range(0, len(paths), command.batch):
        pictures = read_those_that_can(paths, range(start, min(start + command.batch, len(paths))))
        if not pictures:
            continue
        prediction = model.predict(list(pictures.values()), *filter(None, [command.mask]))
        for i, shares in zip(pictures, prediction.probabilities.cpu().tolist(), strict=True):
            values = [str(paths[i]), model.classes[int(np.argmax(shares))], *shares]
            lines.append(dict(zip(columns, values, strict=True)))
        seen = prediction.sight.visible(model.expects.size).flatten(1).any(dim=1).tolist()
        unseen += [paths[i] for i, any_of_it in zip(pictures, seen, strict=True) if not any_of_it]
        if command.overlay is not None:
            images = torch.stack([to_tensor(picture, model.expects) for picture in pictures.values()]).to(device)
            draw_overlays(command.overlay, [names[i] for i in pictures], images, prediction.sight)
    as_json = command.out is not None and command.out.suffix == ".json"
    text = json.dumps(lines, indent=1, ensure_ascii=False) + "\n" if as_json else as_csv(columns, lines)
    return Guesses(text, len(paths), len(paths) - len(lines), tuple(unseen))


def check_to_replace(path: Path | None) -> None:
    """Anything but earlier answers: a slip of the finger would cost somebody's table."""
    if path is None or not path.is_file() or not path.stat().st_size:
        return
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = json.load(file) if path.suffix == ".json" else [next(csv.reader(file), [])]
        known = not lines or "predicted" in lines[0]
    except (OSError, ValueError, LookupError, TypeError, csv.Error):
        known = False
    if not known:
        raise UserError(f"{path}: exists, and does not hold answers of `sightline predict`; choose another --out")


def read_those_that_can(paths: Sequence[Path], which: Sequence[int]) -> dict[int, Image.Image]:
    """One damaged picture does not spoil the others: it is named, and left out."""
    pictures = {}
    for i in which:
        try:
            pictures[i] = read_image(paths[i])
        except UserError as error:
            print(f"sightline: {error}", file=sys.stderr)
    return pictures


def overlay_names(paths: Sequence[Path], given: Sequence[Path]) -> list[Path]:
    """Where each picture's overlay goes: the folders under the given one are kept, and no name is used twice."""
    names, taken = [], set()
    folders = [one.parent if one.suffix.lower() == ".csv" else one for one in given]
    for path in paths:
        folder = next((one for one in folders if one.is_dir() and path.is_relative_to(one)), path.parent)
        stem = path.relative_to(folder).with_suffix("")
        name, number = stem, 1
        while str(name).lower() in taken:
            number += 1
            name = stem.with_name(f"{stem.name}-{number}")
        taken.add(str(name).lower())
        names.append(name.with_name(f"{name.name}.png"))
    return names


def draw_overlays(folder: Path, names: Sequence[Path], images: torch.Tensor, sight: Sight) -> None:
    """What was seen of each picture."""
    for name, picture in zip(names, to_images(as_seen(images, sight)), strict=True):
        make_folder((folder / name).parent)
        try:
            picture.save(folder / name)
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be written ({error.strerror or error})") from error


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Predict) -> int:
    make_way(command.out)
    check_to_replace(command.out)
    guesses = predict(command)
    if command.out is None:
        sys.stdout.write(guesses.text)
    else:
        write(command.out, guesses.text)
        print(f"The answers are in {command.out}.")
    if guesses.unseen:
        few = f"{counted(len(guesses.unseen))} of which nothing was seen, such as {guesses.unseen[0]}"
        print(f"note: {few}: the answer is a guess", file=sys.stderr)
    if guesses.unreadable:
        return fail(f"{guesses.unreadable:,} of {guesses.pictures:,} pictures could not be read", 1)
    return 0
