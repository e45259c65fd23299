"""Pictures of parts and of interventions.

    found = draw(Strips((Path("runs/k1"), Path("runs/k4"), Path("runs/k8"))))      # one page, in found.page

What the model would see of the same pictures: with other numbers of parts, on another background, without each part,
and without doubtful patches; and where each part usually is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..config import Strips
from ..data.drawing import as_seen, sheet, with_parts
from ..interventions.file import Intervention
from ..interventions.search import MOST_COLUMNS, WORDS, Search, Trial
from ..methods.base import PartMethod
from .contact_sheet import Line, Section, page, sheet_of, table_of_trials
from .figures import Easel

STRIP = (0.99, 0.97)
MOST_PIXELS = 224  # of a picture's side on a sheet of interventions


# ---- what the search has found ---------------------------------------------------------------------------------------


@torch.no_grad()
def strips(method: PartMethod, images: Tensor, found: Search) -> dict[str, Image.Image]:
    """`parts`: every part left out, and what that does on validation data; `quantiles`: more and more removed."""
    looked = method.find(images)
    plain = method.decide(images, looked)
    assert plain.parts is not None

    def row(intervention: Intervention) -> Tensor:
        return shrunk(as_seen(images, method.decide(images, looked, intervention.correction)))

    def captioned(trials: Iterable[Trial]) -> dict[str, Tensor]:
        what = WORDS[found.objective]
        return {f"{t.step}: {what} {100 * t.score:.1f} % ({t.gain.figure})": row(t.intervention) for t in trials}

    by_quantile = {trial.intervention.quantile: trial for trial in found.trials}
    whole = {"the picture": shrunk(images), "what the model sees": shrunk(as_seen(images, plain))}
    parts = whole | {"its parts": shrunk(with_parts(images, plain))}
    parts |= captioned(trial for trial in found.trials if trial.intervention.quantile is None)
    quantiles = whole | captioned(by_quantile[q] for q in STRIP if q in by_quantile)
    if found.chosen.changes:
        quantiles[f"chosen: {found.chosen.words}"] = row(found.chosen)
    return {"parts": sheet(parts), "quantiles": sheet(quantiles)}


def shrunk(images: Tensor, most: int = MOST_PIXELS) -> Tensor:
    """No larger than a sheet can bear; and tiny pictures larger, by whole pixels."""
    h, w = images.shape[2:]
    if max(h, w) <= most:
        times = max(1, most // 2 // max(h, w))
        return images.repeat_interleave(times, dim=2).repeat_interleave(times, dim=3)
    size = (round(most * h / max(h, w)), round(most * w / max(h, w)))
    return F.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)


def write_left_out(run: Path, measured: dict[str, Any]) -> Path:
    """What `intervene --find` measured and drew, in one file to be opened: the table, and its pictures."""
    from ..console.files import write
    from ..interventions.apply import SEARCH_FILE

    path = run / SEARCH_FILE.parent / "index.html"
    write(path, page(f"What each part of {run.name} is good for", [left_out_section(run, measured)]))
    return path


def left_out_section(run: Path, measured: dict[str, Any], called: str = "") -> Section:
    from ..interventions.apply import SEARCH_FILE

    what = WORDS[measured["objective"]]
    best = measured["steps"][-1] if measured["steps"] else None
    about = f"Each part left out, and doubtful patches, on {measured['split']} data; hidden is what is grey."
    if measured["gain"] is None and best:
        about += f" Nothing surely helps: the best, {best['step']}, may be chance."
    taken = [step["step"] for step in measured["steps"] if step["taken"]]
    about += f" Chosen: {', then '.join(taken)}." if taken else ""
    about += f" {measured['suspect']['sentence']}" if measured.get("suspect") else ""
    words = {"parts": "every part left out", "quantiles": "doubtful patches left out"}
    files = {name: run / SEARCH_FILE.parent / f"{name}.png" for name in words}
    pictures = {words[name]: Image.open(file).convert("RGB") for name, file in files.items() if file.exists()}
    return Section(
        f"{called or run.name}: parts left out", about, pictures, table_of_trials(measured, what, MOST_COLUMNS)
    )


# ---- a page about runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """What was drawn, and the page that shows all of it."""

    page: Path
    sheets: dict[str, Image.Image]
    notes: tuple[str, ...] = ()


def draw(command: Strips) -> Drawn:
    """The pictures asked for, of every run, as PNG files and on one page."""
    from ..console.files import make_folder, write

    runs, data = command.runs_and_data
    sections: dict[str, Section] = {}
    maps: list[Line] = []
    places: list[Line] = []
    notes: list[str] = []
    first: Easel | None = None
    for folder, called in zip(runs, told_apart(runs), strict=True):
        easel = Easel.open(command, folder, data, first, called)
        first = first or easel
        if "parts" in command.kinds:
            maps += easel.part_maps()[bool(maps) :]
        if "swapped" in command.kinds:
            lines, how = easel.swapped()
            about = f"{easel.name}. {how} Faded is what belongs to no part; green answers are right, red ones wrong."
            sections[f"swapped-{called}"] = Section("The same on another background", about, {"": sheet_of(lines)})
        if "occupancy" in command.kinds:
            places += easel.occupancy()
        if "left-out" in command.kinds:
            if measured := easel.measured:
                sections[f"left-out-{called}"] = left_out_section(folder, measured, called)
            else:
                notes.append(f"{folder}: nobody has left out its parts yet; `sightline intervene {folder} --find` does")
    about = {
        "parts": ("The parts of the same pictures", "A row for each run; faded is what belongs to no part.", maps),
        "occupancy": (
            "Where parts are",
            "How often each place belongs to a part, over all pictures; the brightest is as often as it says below. "
            "The line is around the places where things are at least half as often as where they are most often; the "
            "white cross is the part's mean place, the pink one that of things.",
            places,
        ),
    }
    shared = {k: Section(title, words, {"": sheet_of(lines)}) for k, (title, words, lines) in about.items() if lines}
    ordered = {k: v for kind in command.kinds for k, v in (shared | sections).items() if k.startswith(kind)}
    make_folder(command.folder)
    sheets = {k: v.pictures[""] for k, v in ordered.items() if "" in v.pictures}
    for name, picture in sheets.items():
        picture.save(command.folder / f"{name}.png")
    path = command.folder / "index.html"
    write(path, page(f"Parts of {', '.join(told_apart(runs))}", ordered.values()))
    return Drawn(path, sheets, tuple(notes))


def told_apart(runs: Sequence[Path]) -> list[str]:
    """Names for run folders: as much of the ends of their paths as it takes."""
    paths = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["-".join(parts[-length:]).strip("/") for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name}-{number}" for number, run in enumerate(runs)]  # the same one twice


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Strips) -> int:
    drawn = draw(command)
    print("\n".join([*drawn.notes, f"The pictures are in {drawn.page}: open it in a browser."]))
    return 0
