"""Writes requirements.lock: the pinned versions of constraints.txt with the SHA-256 of each of their files on PyPI.

python .ci/lock.py

Every file of a version is listed, for all platforms. torch is left out: which of its builds is installed (CPU, CUDA)
depends on the machine, and builds that are not from PyPI have other hashes. Its version is pinned by constraints.txt.
"""

from __future__ import annotations

import html
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://pypi.org/simple"
LINK = re.compile(r"<a [^>]*?href=\"[^\"#]*#sha256=([0-9a-f]{64})\"[^>]*>([^<]+)</a>")
UNLOCKED = ("torch",)
HEAD = """\
# Written by `make lock` from constraints.txt: the SHA-256 of every file of each version on PyPI, so that nothing else
# is installed by `make test` and `make demo`. Without torch, whose build depends on the machine.
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(constraints: str) -> dict[str, str]:
    """Version by normalized name."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    return {normalized(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def version_of(file: str, name: str) -> str:
    """The version in the name of a wheel or an sdist; empty for other files."""
    stem = re.sub(r"\.(whl|tar\.gz|zip|tar\.bz2)$", "", file)
    if file.endswith(".whl"):
        return stem.split("-")[1]
    given, _, version = stem.rpartition("-")
    return version if normalized(given) == name and stem != file else ""


def hashes(page: str, name: str, version: str) -> list[str]:
    """Of the files of this version on a page of the index (PEP 503)."""
    files = ((digest, html.unescape(file).strip()) for digest, file in LINK.findall(page))
    return sorted({digest for digest, file in files if version_of(file, name) == version})


def locked(name: str, version: str) -> str:
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=120) as answer:
        found = hashes(answer.read().decode(), name, version)
    if not found:
        raise SystemExit(f"{name}=={version}: {INDEX} lists no file of it with a hash")
    return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in found)])


def main() -> int:
    wanted = {n: v for n, v in pins((ROOT / "constraints.txt").read_text()).items() if n not in UNLOCKED}
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(locked, wanted, wanted.values()))
    (ROOT / "requirements.lock").write_text(HEAD + "\n".join(entries) + "\n")
    print(f"requirements.lock: {len(entries)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
