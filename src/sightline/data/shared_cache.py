"""A cache at a URL (s3://bucket/cache): a folder on the disk, into which a file is fetched when it is needed, and from
which it is published when it is new. A cache on the disk is used as it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..config.limits import as_url
from ..console.files import make_folder, replace_durably, save_text
from ..errors import UserError
from .remote import cache_folder, filesystem, is_url, join, storage_error

ORIGIN = "url.txt"  # in the folder on the disk: the URL that it belongs to


def is_shared(folder: str | Path | None) -> bool:
    return folder is not None and is_url(as_url(folder))


def on_disk(folder: str | Path) -> Path:
    """The folder itself, or the one that stands for a URL."""
    url = as_url(folder)
    if not is_url(url):
        return Path(folder)
    filesystem(url)  # an unknown scheme is an error before any work is done
    local = cache_folder("caches") / hashlib.sha256(url.encode()).hexdigest()[:24]
    make_folder(local)
    if not (local / ORIGIN).is_file():
        save_text(local / ORIGIN, url)
    return local


def url_of(file: Path) -> str | None:
    """Where a file of a shared cache belongs; None for any other file."""
    try:
        return join((file.parent / ORIGIN).read_text(encoding="utf-8"), file.name)
    except OSError:
        return None


def fetch(file: Path) -> None:
    """Copy a file of a shared cache to the disk, unless it is there already, or nowhere."""
    if file.exists() or (url := url_of(file)) is None:
        return
    fs, path = filesystem(url)
    try:
        fs.invalidate_cache()
        if fs.exists(path):
            replace_durably(file, lambda partial: fs.get_file(path, str(partial)))
    except UserError:
        raise
    except Exception as error:
        raise storage_error(url, error) from error


def publish(file: Path) -> None:
    """Copy a new file of a shared cache to its URL."""
    if (url := url_of(file)) is None:
        return
    fs, path = filesystem(url)
    try:
        fs.put_file(str(file), path)
    except Exception as error:
        raise storage_error(url, error) from error
