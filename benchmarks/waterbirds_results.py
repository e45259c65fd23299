"""From run folders to the Waterbirds table: needs their answers and what was measured, neither weights nor pictures."""

from __future__ import annotations

import csv
import io
import json
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sightline.compare import compare
from sightline.compare import verdict as said_of
from sightline.metrics.estimates import Estimate, Metrics
from sightline.metrics.groups import across_seeds
from sightline.metrics.predictions import Answers
from waterbirds_rows import PAIRS, folders_of

Z = 1.959964
MOST = 12_000_000  # bytes of a parcel
MANY = 12  # with more groups the table is of attributes, and with more classes parcels hold rounded probabilities
RESULTS = (
    "run.json", "metrics.json", "log.jsonl", "predictions/*.csv", "localization.json", "localization/*.csv",
    "shape/*.csv", "shape/*.json", "stress/*.csv", "stress/*.json", "certificate.json",
)  # fmt: skip
SIGHT = {"grid_iou": "grid IoU", "pixel_iou": "pixel IoU", "coverage": "coverage"}


def facts_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def about(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The backbone, the data, how weights were selected and where it was trained, without anybody's folders."""
    backbone = dict(facts["backbone"] or {})
    backbone["file"] = Path(backbone.get("file") or "").name
    data = {name: value for name, value in facts["data"].items() if name not in ("path", "notes")}
    versions = facts.get("versions", {})
    on_gpu = facts.get("device", "").startswith("cuda")
    trained = {"device": versions.get("device", "") if on_gpu else "CPU", "torch": versions.get("torch", "")}
    return {"selection": facts["selection"], "backbone": backbone, "data": data, "trained_on": trained}


def answers_in(folder: Path, path: str, split: str) -> Answers:
    """From a CSV file in a run folder, with the groups in the order of the data."""
    return Answers.load_csv(folder / path, split=split, group_names=facts_of(folder)["data"]["group_names"])


def answers_of(folders: Sequence[Path], split: str) -> list[Answers]:
    return [answers_in(folder, f"predictions/{split}.csv", split) for folder in folders]


def by_attribute(answers: Answers) -> dict[str, Answers]:
    """Where there are too many groups to list, the answers to the pictures of each attribute, whatever their label."""
    if answers.groups is None or len(np.unique(answers.groups)) <= MANY:
        return {}
    attributes = np.array([name.rpartition("/")[2] for name in answers.group_names])[answers.groups]
    return {str(one): answers.take(np.flatnonzero(attributes == one)) for one in np.unique(attributes)}


def each_attribute(runs: Sequence[Answers]) -> dict[str, list[Answers]]:
    divided = [by_attribute(run) for run in runs]
    return {attribute: [one[attribute] for one in divided] for attribute in divided[0]}


def sights_of(folders: Sequence[Path], split: str) -> list[dict[str, Estimate]]:
    """What `localize` found of each seed; of those that have been looked at."""
    found = []
    for folder in folders:
        path = folder / "localization.json"
        splits = json.loads(path.read_text(encoding="utf-8"))["splits"] if path.exists() else {}
        if split in splits:
            found.append({name: Estimate(**one) for name, one in splits[split]["figures"].items()})
    return found


def mean_over_seeds(seeds: Sequence[Estimate]) -> Estimate:
    """More seeds make the share of seeds in its variance smaller, not that of the pictures, which are the same."""
    values = np.array([one.value for one in seeds])
    variance = np.mean([((one.high - one.low) / (2 * Z)) ** 2 for one in seeds])
    variance += values.var(ddof=1) / len(values) if len(values) > 1 else 0.0
    half, how = Z * math.sqrt(variance), "normal, over images" + (" and over seeds" if len(values) > 1 else "")
    return Estimate(values.mean(), values.mean() - half, values.mean() + half, seeds[0].n, how)


def result_of(runs: Path, row: str, line: str, splits: tuple[str, ...], seeds: Sequence[int]) -> dict[str, Any] | None:
    """The figures of a row over its trained seeds; None if there is none."""
    folders = {seed: folder for seed, folder in folders_of(runs, row, splits).items() if seed in seeds}
    if not folders:
        return None
    paths, facts = list(folders.values()), [facts_of(folder) for folder in folders.values()]
    found: dict[str, Any] = {"row": row, "command": line, "seeds": list(folders), "metrics": {}, "sight": {}}
    for split in splits:
        answers, counts = answers_of(paths, split), facts[0]["data"]["counts"]["train"]
        metrics = across_seeds(answers, train_group_counts=counts)
        if attributes := {name: across_seeds(some).accuracy for name, some in each_attribute(answers).items()}:
            metrics = replace(metrics, groups={}, classes={})
            found.setdefault("attributes", {})[split] = {name: asdict(one) for name, one in attributes.items()}
        found["metrics"][split] = metrics.to_dict()
        looked = sights_of(paths, split)
        if len(looked) == len(paths):
            there = [name for name in looked[0] if all(name in one for one in looked)]
            means = {name: mean_over_seeds([one[name] for one in looked]) for name in there}
            found["sight"][split] = {name: asdict(one) for name, one in means.items()}
    return found | {"speed": [one.get("speed") for one in facts]}


def paired(runs: Path, rows: Mapping[str, str], split: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The differences of the PAIRS whose first row is asked for, where both have been trained."""
    found = []
    for ours, theirs in PAIRS:
        blocks = {
            row: [folder for seed, folder in folders_of(runs, row, (split,)).items() if seed in seeds]
            for row in (theirs, ours)
        }
        if ours in rows and all(blocks.values()):
            answers = {row: answers_of(folders, split) for row, folders in blocks.items()}
            found.append(
                {"row": ours, "against": theirs, "split": split}
                | {"seeds": {row: len(folders) for row, folders in blocks.items()}}
                | {name: asdict(gain) | {"verdict": said_of(gain)} for name, gain in gains_of(answers).items() if gain}
            )
    return found


def gains_of(answers: Mapping[str, Sequence[Answers]]) -> dict[str, Estimate | None]:
    """Of the second row over the first: on the worst group, or on each attribute where groups are many; and on all."""
    entry = compare(answers).entries[1]
    divided = {row: each_attribute(runs) for row, runs in answers.items()}
    gains = {
        attribute: compare({row: some[attribute] for row, some in divided.items()}).entries[1].accuracy_gain
        for attribute in next(iter(divided.values()))
    }
    return (gains or {"worst_group": entry.worst_gain}) | {"accuracy": entry.accuracy_gain}


# ---- to be read ------------------------------------------------------------------------------------------------------


def table_cells(results: Sequence[dict[str, Any]], split: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table, in per cent with 95 % intervals."""
    every = [Metrics.from_dict(found["metrics"][split]) for found in results]
    groups = list(dict.fromkeys(group for metrics in every for group in metrics.groups))
    attributes = list(dict.fromkeys(name for found in results for name in _attributes(found, split)))
    header = ["", "seeds", "accuracy", *(attributes or [*groups, "mean of groups", "worst group"]), *SIGHT.values()]
    lines = []
    for found, metrics in zip(results, every, strict=True):
        sight, accuracies = found["sight"].get(split, {}), _attributes(found, split)
        figures = [metrics.mean_of_groups, metrics.worst_group or metrics.worst_class]
        lines.append(
            [
                found["row"],
                str(metrics.seeds),
                _short(metrics.accuracy),
                *(f"{100 * metrics.groups[group].value:.1f}" if group in metrics.groups else "" for group in groups),
                *map(_short, map(accuracies.get, attributes) if attributes else figures),
                *(_short(Estimate(**sight[name])) if name in sight else "" for name in SIGHT),
            ]
        )
    return header, lines


def _attributes(found: Mapping[str, Any], split: str) -> dict[str, Estimate]:
    return {name: Estimate(**one) for name, one in found.get("attributes", {}).get(split, {}).items()}


def paired_cells(pairs: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    named = list(dict.fromkeys(name for pair in pairs for name in pair if "verdict" in pair[name]))
    header = ["", "against", "seeds", *(text for name in named for text in (name.replace("_", " "), ""))]
    return header, [
        [pair["row"], pair["against"], " and ".join(str(pair["seeds"][pair[name]]) for name in ("row", "against"))]
        + [text for name in named for text in (_short(_gain(pair, name)), pair[name]["verdict"])]
        for pair in pairs
    ]


def _gain(pair: Mapping[str, Any], name: str) -> Estimate:
    return Estimate(**{key: value for key, value in pair[name].items() if key != "verdict"})


def _short(one: Estimate | None) -> str:
    if one is None:
        return ""
    return f"{100 * one.value:{'+' if one.difference else ''}.1f} {one.interval}"


def show(results: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]], split: str, *, markdown: bool) -> None:
    titles = f"On the {split} data, per cent:", "Differences on the same pictures, points:"
    for title, (header, lines) in zip(titles, (table_cells(results, split), paired_cells(pairs)), strict=True):
        if not lines:
            continue
        if markdown:
            print("\n".join([title, "", *as_markdown(header, lines), ""]))
            continue
        table = Table(*header, box=None, pad_edge=False)
        for line in lines:
            table.add_row(*line)
        Console(highlight=False, width=240).print(title, table, markup=False)


def as_markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    columns = zip(*lines, strict=True)
    rule = ["--:" if any(cell[:1] in set("+-0123456789") for cell in column) else "---" for column in columns]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)]


# ---- to be carried away ----------------------------------------------------------------------------------------------


def pack(folders: Sequence[Path], into: Path, most: int = MOST) -> list[Path]:
    """The results of these runs, without weights, in parcels of at most so many bytes, in place of those that were
    there before. A run is never divided. Of many classes, the probabilities are rounded."""
    parcels: list[list[Path]] = []
    room = 0
    for folder in folders:
        size = len(as_tgz([folder]))  # of many together it is less than the sum: each has an end of its own
        if not parcels or size > room:
            parcels.append([])
            room = most
        parcels[-1].append(folder)
        room -= size
    into.mkdir(parents=True, exist_ok=True)
    for before in into.glob("runs-*.tgz"):
        before.unlink()
    paths = [into / f"runs-{number}.tgz" for number in range(1, len(parcels) + 1)]
    for path, some in zip(paths, parcels, strict=True):
        path.write_bytes(as_tgz(some))
    return paths


def as_tgz(folders: Sequence[Path]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz", compresslevel=6) as file:
        for folder in folders:
            for path in (path for pattern in RESULTS for path in sorted(folder.glob(pattern))):
                name, content = Path(folder.name, path.relative_to(folder)).as_posix(), rounded(path)
                if content is None:
                    file.add(path, name)
                else:
                    entry = file.gettarinfo(path, name)
                    entry.size = len(content)
                    file.addfile(entry, io.BytesIO(content))
    return held.getvalue()


def rounded(path: Path) -> bytes | None:
    """A table of answers with the probabilities of many classes to three decimals: they take most of the room, and
    no figure of the tables is made of them; None if it is something else."""
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file)
        header = next(lines, []) if path.suffix == ".csv" else []
        likely = sum(name.startswith("p_") for name in header)
        if likely <= MANY:
            return None
        text = io.StringIO(newline="")
        out = csv.writer(text)
        out.writerow(header)
        out.writerows([*line[:-likely], *(f"{float(value):.3f}" for value in line[-likely:])] for line in lines)
    return text.getvalue().encode("utf-8", "surrogateescape")
