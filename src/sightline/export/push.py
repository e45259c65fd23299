"""`sightline push RUN OWNER/NAME`: publish a run on the Hugging Face Hub, to be loaded as `hf:OWNER/NAME`.

Only what loading needs, metrics and a model card are published: no images, predictions, optimiser state, or paths of
the training machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any, cast

from torch import nn

from ..config import Push
from ..console.checksums import check_checksum, file_sha256
from ..console.terminal import bar, counted
from ..errors import UserError
from ..interventions.apply import load_intervention
from ..load import HUB, LOADED, LOG_IN, Model, check_repository_name, hub_error, load_as_trained
from ..report.card import card
from ..training.run_folder import check_results
from ..vit.weights import weights_sha256
from .export import certify, disc_masks, sample_images

ONNX = ("onnx/model.onnx", "onnx/model.json")


@dataclass(frozen=True)
class Pushed:
    address: str
    files: int
    bytes: int
    visibility: str


def push(command: Push, step: Callable[[int], None] | None = None) -> Pushed:
    """Publish the run; `step` is called after each of three steps."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    done = step or (lambda _: None)
    check_repository_name(command.repository)
    if get_token() is None:
        raise UserError(f"{command.repository}: you are not logged in to the Hugging Face Hub; {LOG_IN}")
    files = files_to_publish(load_as_trained(command.run), command)
    done(1)
    api = HfApi()
    try:
        api.create_repo(command.repository, private=not command.public, exist_ok=True)
        done(2)
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
        api.create_commit(command.repository, added, commit_message=command.message)
        private = bool(api.model_info(command.repository).private)
    except Exception as error:  # of several unrelated types: the hub's, httpx's, those of upload threads
        raise hub_error(command.repository, error) from error
    done(3)
    sizes = [len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values()]
    address = f"{api.endpoint}/{command.repository}"
    return Pushed(address, len(files), sum(sizes), "private" if private else "public")


def files_to_publish(model: Model, command: Push) -> dict[str, Path | bytes]:
    """By name in the repository: a file of the run folder, or its content."""
    folder = model.run.folder
    check_results(model.run, folder)
    if (folder / "localization.json").is_file():
        check_checksum(folder / "localization.json", "run `sightline localize` again")
    files: dict[str, Path | bytes] = {name: folder / name for name in LOADED if (folder / name).is_file()}
    files["run.json"] = json.dumps(without_paths(model.run.facts), indent=1, ensure_ascii=False).encode()
    files |= {name: folder / name for name in exported_files(model)}
    saved = load_intervention(model)
    images, checked_on = sample_images(model, command.images, command.limit)
    masks = disc_masks(len(images), model.expects.size) if model.method.needs_masks else None
    certificate = certify(model, saved, images, masks)
    files["README.md"] = card(model, saved, certificate, checked_on, where=f"{HUB}{command.repository}").encode()
    return files


def exported_files(model: Model) -> tuple[str, ...]:
    """The ONNX file in the run folder, if there is one; an error if it was exported from other weights."""
    path = model.run.folder / "onnx" / "model.json"
    if not path.is_file():
        return ()
    for name in ONNX:
        check_checksum(model.run.folder / name, "export again or remove the folder")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        weights = facts["weights_sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}); export again or remove the folder") from error
    if weights != weights_sha256(cast(nn.Module, model.method)):
        raise UserError(f"{path.parent}: was exported from other weights than the run's; export again or remove it")
    onnx = path.with_name("model.onnx")
    if not onnx.is_file() or facts.get("onnx_sha256") not in (None, file_sha256(onnx)):
        raise UserError(
            f"{path.parent}: model.onnx is missing, or not the file that {path.name} describes; export again"
        )
    return ONNX


def without_paths(value: Any) -> Any:
    """Replace every path, also one after a prefix such as `found:`, by its last component, for privacy."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    prefix, colon, path = value.partition(":")
    if colon and len(prefix) > 1 and is_path(path):  # one letter is a Windows drive
        return f"{prefix}:{without_paths(path)}"
    return PurePath(value.replace("\\", "/")).name if is_path(value) else value


def is_path(text: str) -> bool:
    return text.startswith(("/", "~")) or PureWindowsPath(text).is_absolute()


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Push) -> int:
    with bar("publishing", 3) as progress:
        pushed = push(command, progress)
    print(f"{counted(pushed.files, 'file')}, {pushed.bytes / 1e6:.1f} MB: {pushed.address} ({pushed.visibility}).")
    print(f'Load it with sightline.load("hf:{command.repository}").')
    return 0
