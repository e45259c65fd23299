"""Runs on the Hugging Face hub: published with `sightline push RUN OWNER/NAME`, loaded as `hf:OWNER/NAME`.

What goes there is what loading needs, figures and a model card: no pictures, no answers about them, no state of
training, and no paths of the machine it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any, cast

from torch import nn

from ..config import Push
from ..console.terminal import bar, counted
from ..errors import UserError
from ..load import HUB, LOADED, LOG_IN, Model, check_odd_name, load_as_trained, refused
from ..report.card import card
from ..vit.weights import weights_sha256
from .export import certificate_of, discs, intervention_of, pictures_of

ONNX = ("onnx/model.onnx", "onnx/model.json")


@dataclass(frozen=True)
class Pushed:
    address: str
    files: int
    bytes: int
    seen_by: str


def push(command: Push, step: Callable[[int], None] | None = None) -> Pushed:
    """`step` is told when one of three steps is done."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    done = step or (lambda _: None)
    check_odd_name(command.repository)
    if get_token() is None:
        raise UserError(f"{command.repository}: you are not logged in at the Hugging Face hub; {LOG_IN}")
    files = to_publish(load_as_trained(command.run), command)
    done(1)
    api = HfApi()
    try:
        api.create_repo(command.repository, private=not command.public, exist_ok=True)
        done(2)
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
        api.create_commit(command.repository, added, commit_message=command.message)
        private = bool(api.model_info(command.repository).private)
    except Exception as error:  # of several unrelated types: the hub's, httpx's, of threads that upload
        raise refused(command.repository, error) from error
    done(3)
    sizes = [len(one) if isinstance(one, bytes) else one.stat().st_size for one in files.values()]
    address = f"{api.endpoint}/{command.repository}"
    return Pushed(address, len(files), sum(sizes), "private" if private else "for everybody to see")


def to_publish(model: Model, command: Push) -> dict[str, Path | bytes]:
    folder = model.run.folder
    files: dict[str, Path | bytes] = {name: folder / name for name in LOADED if (folder / name).is_file()}
    said = json.dumps(without_paths(model.run.facts), indent=1, ensure_ascii=False)
    files["run.json"] = said.encode()
    files |= {name: folder / name for name in exported(model)}
    kept = intervention_of(model)
    images, words = pictures_of(model, command.images, command.limit)
    masks = discs(len(images), model.expects.size) if model.method.needs_masks else None
    certificate = certificate_of(model, kept, images, masks)
    files["README.md"] = card(model, kept, certificate, words, where=f"{HUB}{command.repository}").encode()
    return files


def exported(model: Model) -> tuple[str, ...]:
    """The ONNX file in the run's folder, if there is one, and it is of these weights."""
    path = model.run.folder / "onnx" / "model.json"
    if not path.is_file():
        return ()
    try:
        weights = json.loads(path.read_text(encoding="utf-8"))["weights_sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}); export again, or remove the folder") from error
    if weights != weights_sha256(cast(nn.Module, model.method)):
        raise UserError(f"{path.parent}: is of other weights than the run has now; export again, or remove the folder")
    return ONNX


def without_paths(value: Any) -> Any:
    """Of a path, also one after a word and a colon, only its last name: the rest is nobody's business."""
    if isinstance(value, dict):
        return {key: without_paths(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_paths(one) for one in value]
    if not isinstance(value, str):
        return value
    word, colon, path = value.partition(":")
    if colon and len(word) > 1 and is_path(path):
        return f"{word}:{without_paths(path)}"
    return PurePath(value.replace("\\", "/")).name if is_path(value) else value


def is_path(text: str) -> bool:
    return text.startswith(("/", "~")) or PureWindowsPath(text).is_absolute()


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Push) -> int:
    with bar("publishing", 3) as progress:
        pushed = push(command, progress)
    print(f"{counted(pushed.files, 'file')}, {pushed.bytes / 1e6:.1f} MB: {pushed.address} ({pushed.seen_by}).")
    print(f'Load it with sightline.load("hf:{command.repository}").')
    return 0
