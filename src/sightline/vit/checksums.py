"""The checksum inside safetensors files: over names, types, shapes and contents of the tensors, and over the header's
texts. A file of an earlier version, or of somebody else, has none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console.files import FREE_SPACE, replace_durably
from ..errors import UserError

KEY = "sha256"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def content_sha256(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        if name != KEY:
            digest.update(f"{name}\0{text}\0".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(content(tensor))
    return digest.hexdigest()


def content(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def save_with_checksum(
    path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str], *, remedy: str = FREE_SPACE
) -> None:
    """Tensors on the CPU. The safetensors library would write the header's texts in a random order: the same content
    would not be the same file."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {
        "__metadata__": dict(sorted({**metadata, KEY: content_sha256(tensors, metadata)}.items()))
    }
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in ordered:
                file.write(content(tensor))

    replace_durably(path, write, remedy=remedy)


def check_content(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], remedy: str, *, required: bool = False
) -> None:
    if required and KEY not in metadata:
        raise UserError(f"{path}: damaged: it was written with a checksum, and has none; {remedy}")
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
