"""`sightline strips`: figures of discovered parts and of interventions.

    found = draw(Strips((Path("runs/k1"), Path("runs/k4"), Path("runs/k8"))))      # one page, in found.page

The sight on the same images: with different numbers of parts, on another background, with each part removed, and with
token removal; and where each part usually lies.
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
from ..data.drawing import grey_out_hidden, image_grid, tint_parts
from ..interventions.file import Intervention
from ..interventions.search import MOST_COLUMNS, OBJECTIVE_LABELS, Search, Trial
from ..methods.base import PartMethod
from .contact_sheet import Section, SheetRow, draw_sheet, page, table_of_trials
from .figures import PartFigures

STRIP = (0.99, 0.97)
MAX_SIDE = 224  # pixels of an image on a sheet of interventions


# ---- results of the search -------------------------------------------------------------------------------------------


@torch.no_grad()
def strips(method: PartMethod, images: Tensor, found: Search) -> dict[str, Image.Image]:
    """`parts`: every part removed, with its effect on validation data; `quantiles`: token removal."""
    detections = method.detect(images)
    plain = method.sight_from(images, detections)
    assert plain.parts is not None

    def row(intervention: Intervention) -> Tensor:
        sight = method.sight_from(images, detections, intervention.correction)
        return resize_for_sheet(grey_out_hidden(images, sight))

    def captioned(trials: Iterable[Trial]) -> dict[str, Tensor]:
        what = OBJECTIVE_LABELS[found.objective]
        return {f"{t.step}: {what} {100 * t.score:.1f} % ({t.gain.value_text})": row(t.intervention) for t in trials}

    by_quantile = {trial.intervention.quantile: trial for trial in found.trials}
    first = {"image": resize_for_sheet(images), "sight": resize_for_sheet(grey_out_hidden(images, plain))}
    parts = first | {"parts": resize_for_sheet(tint_parts(images, plain))}
    parts |= captioned(trial for trial in found.trials if trial.intervention.quantile is None)
    quantiles = first | captioned(by_quantile[q] for q in STRIP if q in by_quantile)
    if found.chosen.changes:
        quantiles[f"selected: {found.chosen.description}"] = row(found.chosen)
    return {"parts": image_grid(parts), "quantiles": image_grid(quantiles)}


def resize_for_sheet(images: Tensor, most: int = MAX_SIDE) -> Tensor:
    """At most `most` pixels; tiny images are enlarged by a whole factor."""
    h, w = images.shape[2:]
    if max(h, w) <= most:
        times = max(1, most // 2 // max(h, w))
        return images.repeat_interleave(times, dim=2).repeat_interleave(times, dim=3)
    size = (round(most * h / max(h, w)), round(most * w / max(h, w)))
    return F.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)


def write_search_page(run: Path, measured: dict[str, Any]) -> Path:
    """A page with the results of `intervene --find`: the table, and its figures."""
    from ..console.files import write
    from ..interventions.apply import SEARCH_FILE

    path = run / SEARCH_FILE.parent / "index.html"
    write(path, page(f"Part removal in {run.name}", [part_removal_section(run, measured)]))
    return path


def part_removal_section(run: Path, measured: dict[str, Any], name: str = "") -> Section:
    from ..interventions.apply import SEARCH_FILE

    what = OBJECTIVE_LABELS[measured["objective"]]
    best = measured["steps"][-1] if measured["steps"] else None
    about = f"Effect of part removal and token removal on {measured['split']} data; hidden content is grey."
    if measured["gain"] is None and best:
        about += f" No intervention helps significantly; the best is {best['step']}."
    taken = [step["step"] for step in measured["steps"] if step["taken"]]
    about += f" Selected: {', then '.join(taken)}." if taken else ""
    about += f" {measured['suspect']['sentence']}" if measured.get("suspect") else ""
    captions = {"parts": "part removal", "quantiles": "token removal"}
    files = {name: run / SEARCH_FILE.parent / f"{name}.png" for name in captions}
    images = {
        captions[name]: Image.open(file, formats=["PNG"]).convert("RGB")
        for name, file in files.items()
        if file.exists()
    }
    return Section(
        f"{name or run.name}: part removal and token removal",
        about,
        images,
        table_of_trials(measured, what, MOST_COLUMNS),
    )


# ---- the page of runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StripsPage:
    """The sheets that were drawn, and the page that shows them."""

    page: Path
    sheets: dict[str, Image.Image]
    notes: tuple[str, ...] = ()


def draw(command: Strips) -> StripsPage:
    """The requested figures of every run, as PNG files and on one page."""
    from ..console.files import make_folder, save_image, write

    runs, data = command.runs_and_data
    sections: dict[str, Section] = {}
    maps: list[SheetRow] = []
    locations: list[SheetRow] = []
    notes: list[str] = []
    first: PartFigures | None = None
    for folder, name in zip(runs, distinct_names(runs), strict=True):
        figures = PartFigures.open(command, folder, data, first, name)
        first = first or figures
        if "parts" in command.kinds:
            maps += figures.part_maps()[bool(maps) :]
        if "swapped" in command.kinds:
            rows, method = figures.swapped()
            about = f"{figures.name}. {method} Faded: background. Green: correct predictions; red: wrong ones."
            sections[f"swapped-{name}"] = Section("Background swaps", about, {"": draw_sheet(rows)})
        if "occupancy" in command.kinds:
            locations += figures.occupancy()
        if "left-out" in command.kinds:
            if measured := figures.measured:
                sections[f"left-out-{name}"] = part_removal_section(folder, measured, name)
            else:
                notes.append(f"{folder}: part removal has not been measured; run `sightline intervene {folder} --find`")
    about = {
        "parts": ("Discovered parts on the same images", "One row per run. Faded: background.", maps),
        "occupancy": (
            "Part locations",
            "How often each position belongs to a part, over all images; the maximum is given below each map. "
            "The line encloses the positions where objects are at least half as frequent as at their most frequent "
            "position. White cross: mean position of the part; pink cross: mean position of the objects.",
            locations,
        ),
    }
    shared = {k: Section(title, words, {"": draw_sheet(rows)}) for k, (title, words, rows) in about.items() if rows}
    ordered = {k: v for kind in command.kinds for k, v in (shared | sections).items() if k.startswith(kind)}
    make_folder(command.folder)
    sheets = {k: v.images[""] for k, v in ordered.items() if "" in v.images}
    for name, image in sheets.items():
        save_image(command.folder / f"{name}.png", image)
    path = command.folder / "index.html"
    write(path, page(f"Parts of {', '.join(distinct_names(runs))}", ordered.values()))
    return StripsPage(path, sheets, tuple(notes))


def distinct_names(runs: Sequence[Path]) -> list[str]:
    """Short distinct names of run folders: as much of the ends of their paths as needed."""
    paths = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["-".join(parts[-length:]).strip("/") for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name}-{number}" for number, run in enumerate(runs)]  # the same run twice


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Strips) -> int:
    drawn = draw(command)
    print("\n".join([*drawn.notes, f"Figures saved to {drawn.page}; open it in a browser."]))
    return 0
