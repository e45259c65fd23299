"""Files by URL (s3://, gs://, memory://, … by fsspec), and run folders by URL."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..console.files import replace_durably, save_text
from ..errors import UserError

SCHEME = re.compile(r"^([a-zA-Z][\w+.-]+)://")
PARTS_OF_A_RUN = ("run.json", "best.safetensors", "intervention.json", "metrics.json", "localization.json")
DIGESTS = "digests.json"  # of a copied run: written last, so that it marks a complete copy


class StorageError(UserError):
    """Storage that does not answer: nothing is known about the file, unlike a file that is missing or damaged."""


def is_url(text: str | Path) -> bool:
    return SCHEME.match(str(text)) is not None


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path in it. Asked for anew in every process: few survive a fork."""
    try:
        import fsspec
        from fsspec.core import url_to_fs
    except ImportError:
        raise UserError(f"{url}: URLs need fsspec; pip install 'sightline[cloud]'") from None
    matched = SCHEME.match(url)
    scheme = matched.group(1) if matched else "file"
    if scheme not in fsspec.available_protocols():
        raise UserError(f"{url}: unknown scheme {scheme}://; use s3://, gs://, memory:// or another one of fsspec")
    try:
        return url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{url}: {' '.join(str(error).split())}") from None
    except Exception as error:
        raise storage_error(url, error) from error


def storage_error(url: str, error: Exception) -> StorageError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return StorageError(f"{url}: the storage does not answer as expected ({reason}); check the URL and the credentials")


def read_bytes(place: str, start: int | None = None, size: int | None = None) -> bytes:
    """A file, or `size` bytes of it, from the disk or from a URL. FileNotFoundError if there is none."""
    if not is_url(place):
        with Path(place).open("rb") as file:
            file.seek(start or 0)
            return file.read(-1 if size is None else size)
    fs, path = filesystem(place)
    end = None if size is None else (start or 0) + size
    try:
        return fs.cat_file(path, start=start, end=end)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise storage_error(place, error) from error


def write_bytes(place: str, content: bytes) -> None:
    """In one step: a reader sees the old file, or the new one."""
    if not is_url(place):
        try:
            Path(place).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{place}: cannot be written ({error.strerror})") from error
        replace_durably(Path(place), lambda partial: partial.write_bytes(content))
        return
    fs, path = filesystem(place)
    try:
        fs.pipe_file(path, content)
    except Exception as error:
        raise storage_error(place, error) from error


def open_seekable(place: str) -> Any:
    """An open binary file, on the disk or at a URL, of which only what is read is fetched."""
    if not is_url(place):
        return Path(place).open("rb")
    fs, path = filesystem(place)
    try:
        return fs.open(path, "rb")
    except FileNotFoundError:
        raise UserError(f"{place}: no such file") from None
    except Exception as error:
        raise storage_error(place, error) from error


def names_in(folder: str) -> list[str]:
    """The names in a folder, sorted; none if it does not exist."""
    if not is_url(folder):
        return sorted(os.listdir(folder)) if Path(folder).is_dir() else []  # noqa: PTH208
    fs, path = filesystem(folder)
    try:
        fs.invalidate_cache()
        return sorted(Path(name).name for name in fs.ls(path, detail=False))
    except FileNotFoundError:
        return []
    except Exception as error:
        raise storage_error(folder, error) from error


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


# ---- run folders -----------------------------------------------------------------------------------------------------


def fetch_run(url: str) -> Path:
    """A local copy of the run folder at a URL, in the user's cache. It is copied again if a file there has changed, and
    checked against its digests whenever it is used."""
    fs, path = filesystem(url)
    wanted = [*PARTS_OF_A_RUN, *(f"predictions/{split}.csv" for split in ("val", "test"))]
    with contextlib.suppress(Exception):
        fs.invalidate_cache()
    found = {name: info for name in wanted if (info := _info(fs, url, join(path, name))) is not None}
    if "run.json" not in found:
        raise UserError(f"{url}: not a run folder (no run.json)")
    if "best.safetensors" not in found:
        raise UserError(f"{url}: no best.safetensors; the run has no checkpoint")
    state = json.dumps([url, sorted((name, version_of(info)) for name, info in found.items())])
    folder = cache_folder("runs") / hashlib.sha256(state.encode()).hexdigest()[:24]
    if not is_intact(folder):
        copy_files(url, found, folder)
    return folder


def cache_folder(kind: str) -> Path:
    """Where copies of what lies at URLs are kept, by kind: runs, caches."""
    return Path(os.environ.get("SIGHTLINE_CACHE", Path.home() / ".cache" / "sightline")) / kind


def _info(fs: Any, url: str, path: str) -> dict[str, Any] | None:
    try:
        return fs.info(path)
    except FileNotFoundError:
        return None
    except Exception as error:
        raise storage_error(url, error) from error


def version_of(info: dict[str, Any]) -> str:
    """What reveals a changed file without reading it: its size, and its ETag, checksum or time, as the storage has."""
    known = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
    return f"{info.get('size')}:{next((info[name] for name in known if info.get(name)), '')}"


def copy_files(url: str, names: Iterable[str], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix="partial-"))
    try:
        digests = {}
        for name in names:
            content = read_bytes(join(url, name))
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
            digests[name] = hashlib.sha256(content).hexdigest()
        save_text(partial / DIGESTS, json.dumps(digests))
        if folder.exists() and not is_intact(folder):
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: the copy of {url} cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_intact(folder: Path) -> bool:
    try:
        digests = json.loads((folder / DIGESTS).read_text())
        return all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == d for name, d in digests.items())
    except (OSError, ValueError):
        return False
