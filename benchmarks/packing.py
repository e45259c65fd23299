"""Results of runs without weights, in .tar.xz files, one or more for each dataset."""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evidence import TEST, Outcomes, facts_of, outcomes_in
from sightline.errors import UserError

PACKED = ".tar.xz"
MOST_BYTES = 12_000_000
MANY_CLASSES = 12  # then probabilities are rounded
RESULTS = (
    "run.json", "metrics.json", "log.jsonl", "predictions/*.csv", "localization.json", "localization/*.csv",
    "shape/*.csv", "shape/*.json", "stress/*.csv", "stress/*.json", "interventions/*", "certificate.json",
)  # fmt: skip


def pack_all(
    runs: Path, into: Path, *, outcomes: bool = False, digits: int | None = None, most: int = MOST_BYTES
) -> Iterator[dict[str, Any]]:
    """SET.tar.xz, and SET-2.tar.xz where it would be larger than allowed; a run is never divided. With `outcomes`, only
    whether each prediction is correct; with `digits`, finished runs alone, and probabilities have so many decimals."""
    into.mkdir(parents=True, exist_ok=True)
    for kind in sorted(path for path in runs.iterdir() if path.is_dir()):
        for before in into.glob(f"{kind.name}*{PACKED}"):
            if set_of(before) == kind.name:
                before.unlink()
        archives, room = [], 0
        for folder in sorted(path for path in kind.iterdir() if path.is_dir()):
            files = outcome_files(folder) if outcomes else result_files(folder, digits)
            if not files or (digits is not None and "metrics.json" not in files):
                continue
            size = len(as_archive({folder.name: files}, preset=0))
            if not archives or size > room:
                archives.append({})
                room = most
            archives[-1][folder.name] = files
            room -= size  # together they are smaller
        for number, some in enumerate(archives, 1):
            target = into / f"{kind.name}{f'-{number}' * (number > 1)}{PACKED}"
            target.write_bytes(as_archive(some))
            yield {"packed": target.name, "megabytes": round(target.stat().st_size / 1e6, 2)}


def as_archive(folders: Mapping[str, Mapping[str, bytes]], preset: int = 6) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:xz", preset=preset) as file:
        for folder, files in folders.items():
            for name, content in files.items():
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    return held.getvalue()


def result_files(folder: Path, digits: int | None = None) -> dict[str, bytes]:
    """By name in the run."""
    paths = [path for pattern in RESULTS for path in sorted(folder.glob(pattern))]
    found = {path.relative_to(folder).as_posix(): rounded(path, digits) for path in paths}
    if "run.json" in found and "data" in (facts := facts_of(folder)):  # whose folder is another one elsewhere
        facts["data"]["path"] = Path(facts["data"].get("path", "")).name
        found["run.json"] = json.dumps(facts, indent=1, ensure_ascii=False).encode()
    return found


def outcome_files(folder: Path) -> dict[str, bytes]:
    if not (folder / "metrics.json").exists():
        return {}
    found = result_files(folder)
    if TEST.as_posix() not in found:
        found[TEST.as_posix()] = outcomes_as_csv(outcomes_in(folder)).encode("utf-8", "surrogateescape")
    other = ("predictions/", "localization", "shape/", "stress/", "certificate")
    return {name: content for name, content in found.items() if not name.startswith(other)}


def rounded(path: Path, digits: int | None = None) -> bytes:
    """Predictions with the probabilities of many classes to three decimals, or as many as asked: they take most of the
    room, and no figure of the tables depends on them."""
    content = path.read_bytes()
    header = next(csv.reader([content.partition(b"\n")[0].decode("utf-8", "surrogateescape")]), [])
    likely = sum(name.startswith("p_") for name in header)
    if path.suffix != ".csv" or not likely or (likely <= MANY_CLASSES and digits is None):
        return content
    text = io.StringIO(newline="")
    lines = csv.reader(io.StringIO(content.decode("utf-8", "surrogateescape"), newline=""))
    out = csv.writer(text)
    out.writerow(next(lines))
    out.writerows([*line[:-likely], *(f"{float(value):.{digits or 3}f}" for value in line[-likely:])] for line in lines)
    return text.getvalue().encode("utf-8", "surrogateescape")


def as_csv(columns: Mapping[str, Sequence[Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def outcomes_as_csv(known: Outcomes) -> str:
    columns: dict[str, Sequence[Any]] = {"image": list(known.groups), "group": list(known.groups.values())}
    return as_csv(
        columns | {how: [int(right[image]) for image in known.groups] for how, right in known.correct.items()}
    )


# ---- unpacking -------------------------------------------------------------------------------------------------------


def set_of(archive: Path) -> str:
    return re.sub(r"-\d+$", "", archive.name.removesuffix(PACKED))


def unpack_all(archives: Path, runs: Path) -> None:
    """Runs that are there already stay as they are."""
    found = sorted(archives.glob(f"*{PACKED}"))
    if not found:
        raise UserError(f"{archives}: no *{PACKED} in it, which --pack writes")
    there = {path.parent for path in runs.glob("*/*/metrics.json")}
    for archive in found:
        target = runs / set_of(archive)
        with tarfile.open(archive) as file:
            new = [one for one in file if target / Path(one.name).parts[0] not in there]
            file.extractall(target, new, filter="data")


@contextmanager
def unpacked(folder: Path) -> Generator[Path]:
    """A folder of runs; of archives, a temporary one with the runs in them."""
    if not any(folder.glob(f"*{PACKED}")):
        yield folder
        return
    with TemporaryDirectory() as name:
        unpack_all(folder, Path(name))
        yield Path(name)
