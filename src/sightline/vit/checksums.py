"""The checksum inside safetensors files: over names, types, shapes and contents of the tensors, and over the header's
texts. A file of an earlier version, or of somebody else, has none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..console.files import FREE_SPACE, replace_durably
from ..errors import UserError

KEY = "sha256"


def content_sha256(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        if name != KEY:
            digest.update(f"{name}\0{text}\0".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_with_checksum(
    path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str], *, remedy: str = FREE_SPACE
) -> None:
    """Contiguous tensors on the CPU."""
    from safetensors.torch import save_file

    header = {**metadata, KEY: content_sha256(tensors, metadata)}

    def save(partial: Path) -> None:
        save_file(tensors, str(partial), metadata=header)
        _sort_metadata(partial)

    replace_durably(path, save, remedy=remedy)


def _sort_metadata(path: Path) -> None:
    """safetensors writes metadata in random order; sorted, the same content is always the same bytes."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, "the same JSON in another order"
        file.seek(8)
        file.write(text.ljust(length))


def check_content(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], remedy: str) -> None:
    if KEY in metadata and content_sha256(tensors, metadata) != metadata[KEY]:
        raise UserError(f"{path}: damaged: its content does not match its checksum; {remedy}")


def stored_checksum(path: Path) -> str | None:
    """The checksum in a file's header; None if it has none. The content is not read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return (file.metadata() or {}).get(KEY)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it, or train again") from error
