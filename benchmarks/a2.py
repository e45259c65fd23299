"""A² on birds whose scenes give the class away: controls, every pair of backbones, DFR, and what each step is worth.

    sightline data waterbirds --cub PACKS --scenes PACKS --out waterbirds        # and scenes-o2o, displaced, ...
    python benchmarks/a2.py waterbirds --backbones S=dino_s16_reg4.safetensors Ti=vit_ti16_augreg_in1k.safetensors \\
        --o2o scenes-o2o --disjoint scenes-disjoint --displaced displaced --out benchmarks/results/a2_h200.json
    python benchmarks/a2.py waterbirds --backbones ... --family runs/family --toy toy       # sizes pretrained alike
    python benchmarks/a2.py --collect --runs runs/a2 --out ... && python benchmarks/a2_claims.py runs/a2

The first backbone is the one whose crops are counted, resized and adapted. Several rows are run side by side, those
that are finished are skipped: call it again to go on. Which block and which heads a backbone looks with is chosen by
validation data, set by set, and written down with every row that uses it. `--family` takes the folder of
`benchmarks/pretrain.py family --keep-every 3 --runs ...`, `--toy` pictures like its own where the place gives the class
away.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional

from a2_family import family_rows, matched_backbones, members
from a2_jobs import Setting, do
from a2_results import collect, record_all, show_all
from a2_rows import RULE, Backbone, Look, Row, first_go, second_go
from lanes import Job, deadline_in, say, side_by_side
from sightline.errors import UserError
from waterbirds_results import pack

SETS = ("birds", "o2o", "m2m", "disjoint", "turned", "toy", "family")


@dataclass(frozen=True)
class A2Benchmark:
    data: Positional[Path | None] = None
    """Waterbirds, rebuilt."""
    backbones: tuple[str, ...] = ()
    """NAME=FILE, the self-supervised one first."""
    o2o: Path | None = None
    """`sightline data scenes-o2o`."""
    m2m: Path | None = None
    """`sightline data scenes-m2m`."""
    disjoint: Path | None = None
    """`sightline data scenes-disjoint`."""
    displaced: Path | None = None
    """`sightline data displaced`, for rows that were trained on Waterbirds."""
    turned_round: bool = True
    """Ask Waterbirds for the place, where the bird is the shortcut."""
    family: Path | None = None
    """Where `pretrain.py family --keep-every 3` has run."""
    toy: Path | None = None
    """Toy pictures for the family's pairs."""
    runs: Path = Path("runs/a2")
    cache: Path | None = None
    """Decoded pictures and features, which are large. Default: cache, beside the runs."""
    only: tuple[str, ...] = ()
    """These sets. Default: all that there are data for."""
    rows: tuple[str, ...] = ()
    """These rows; * stands for anything. Default: all."""
    parallel: int = 12
    workers: int = 2
    batch: int = 512
    device: str = "auto"
    precision: str = "bf16"
    minutes: float | None = None
    """End after so long: call it again to go on."""
    collect: bool = False
    """Run nothing; put together what is finished, also elsewhere."""
    pack: Path | None = None
    """A folder for the results, without weights, in .tgz files of at most 12 MB."""
    markdown: bool = False
    note: str = ""
    out: Path | None = None


# ---- what there is to do ---------------------------------------------------------------------------------------------


def backbones_of(config: A2Benchmark) -> list[Backbone]:
    return [known(*text.split("=", 1)) for text in config.backbones if "=" in text or refuse(text)]


def known(name: str, file: str) -> Backbone:
    from a2_jobs import opened_backbone

    shape = opened_backbone(file).config
    return Backbone(name, file, shape.heads, shape.depth, shape.input.size[0])


def refuse(text: str) -> bool:
    raise UserError(f"--backbones {text}: say NAME=FILE, such as S=dino_s16_reg4.safetensors")


def settings_of(config: A2Benchmark, backbones: dict[str, list[Backbone]]) -> dict[str, Setting]:
    cache = config.cache or config.runs.with_name(f"{config.runs.name}-cache")
    data: dict[str, Path | None] = {"birds": config.data, "o2o": config.o2o, "m2m": config.m2m}
    data["disjoint"] = config.disjoint
    if config.turned_round and config.data is not None and backbones["turned"]:
        data["turned"] = turned_round(config.data, cache / "turned")
    if config.family is not None:
        data |= {"family": config.family / "toy", "toy": config.toy}
    wanted = {name: path for name, path in data.items() if path is not None and name in (config.only or SETS)}
    return {
        name: Setting(
            path, config.runs / name, cache, {one.name: one.file for one in backbones[name]},
            config.displaced if name == "birds" else None, config.device, config.precision, config.batch,
            config.workers,
        )
        for name, path in wanted.items()
    }  # fmt: skip


def turned_round(data: Path, out: Path) -> Path:
    """The same pictures, asked for their place, in groups of what bird there is."""
    file = data / "rows.csv" if data.is_dir() else data
    out.mkdir(parents=True, exist_ok=True)
    with (
        file.open(newline="", encoding="utf-8") as before,
        (out / "rows.csv").open("w", newline="", encoding="utf-8") as after,
    ):
        lines = csv.DictReader(before)
        writer = csv.writer(after, lineterminator="\n")
        writer.writerow(["image", "label", "split", "group_bird", "mask"])
        for line in lines:
            image, mask = (os.path.relpath(file.parent / line[name], out) for name in ("image", "mask"))
            writer.writerow([image, line["group_place"], line["split"], line["label"], mask])
    return out


def chosen_looks(setting: Setting, backbones: Sequence[Backbone], kind: str) -> dict[str, tuple[Look, dict[str, Any]]]:
    """Per backbone, the look that scored best on validation data, and what else was tried; where all were."""
    from sightline.metrics.estimates import Metrics, read_metrics

    found = {}
    for backbone in backbones:
        tried: dict[Look, float] = {}
        for look in backbone.looks:
            row = Row(kind, f"A2 {backbone.name}>{backbone.name}, {look.words}", "")
            path = setting.folder(row) / "metrics.json"
            if path.exists():
                tried[look] = Metrics.from_dict(read_metrics(path)["splits"]["val"]).balanced.value
        if tried:
            best = max(tried, key=tried.__getitem__)  # the first of equals
            scores = {look.words: round(score, 5) for look, score in tried.items()}
            found[backbone.name] = best, {"chosen": best.words, "rule": RULE, "tried": scores}
    return found


# ---- doing it --------------------------------------------------------------------------------------------------------

Asked = tuple[Setting, Row, dict[str, Any] | None]


def is_wanted(row: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(row, pattern) for pattern in patterns)


def do_all(config: A2Benchmark, rows: Iterable[Asked], deadline: float | None) -> None:
    ordered = sorted(rows, key=lambda asked: not asked[1].name.startswith("adapter"))  # they take longest
    jobs = [
        Job(row.about, do, (setting, row, look))
        for setting, row, look in ordered
        if setting.lacks(row) and is_wanted(row.name, config.rows)
    ]
    side_by_side(jobs, config.parallel, deadline)


def run(config: A2Benchmark) -> None:
    deadline = deadline_in(config.minutes)
    birds, sizes = backbones_of(config), members(config.family)
    backbones = dict.fromkeys(SETS, birds) | {"toy": [known(*one) for one in sizes.final], "family": []}
    settings = settings_of(config, backbones)
    if "family" in settings:
        rows, files = family_rows(sizes)
        settings["family"] = replace(settings["family"], backbones=files)
        first = [(settings["family"], row, None) for row in rows]
    else:
        first = []
    plain = [name for name in SETS if name in settings and name != "family"]
    first += [(settings[name], row, None) for name in plain for row in first_go(name, backbones[name])]
    do_all(config, sorted(first, key=lambda job: job[1].set == "family"), deadline)
    second: list[Asked] = []
    looks = {name: chosen_looks(settings[name], backbones[name], name) for name in plain}
    for name in plain:
        by = {backbone: look for backbone, (look, _) in looks[name].items()}
        if len(by) < len(backbones[name]) and name != "turned":
            say({"set": name, "skipped": "no look was tried, so none can be chosen"})
            continue
        of_birds = looks.get("birds", {}).get(birds[0].name) if birds else None
        rows = second_go(name, backbones[name], by, of_birds[0] if of_birds else None)
        second += [(settings[name], row, noted(row, looks[name])) for row in rows]
    if "toy" in settings and "family" in settings:
        setting, rows = matched_backbones(settings["toy"], settings["family"].runs, sizes)
        second += [(setting, row, None) for row in rows]
    do_all(config, second, deadline)


def noted(row: Row, looks: dict[str, tuple[Look, dict[str, Any]]]) -> dict[str, Any] | None:
    """How its look was chosen, where it is of A² and was."""
    where = row.name.removeprefix("A2 ").partition(">")[0]
    return looks[where][1] if row.name.startswith("A2 ") and where in looks else None


def main() -> None:
    config = tyro.cli(A2Benchmark, description=__doc__)
    if not config.collect:
        if config.data is not None and not config.backbones:
            raise UserError("--backbones: name those that look and answer, such as S=dino_s16_reg4.safetensors")
        run(config)
    found = collect(config.runs)
    show_all(found, markdown=config.markdown)
    if config.out and found:
        record_all(config.out, found, config.note)
    if config.pack:
        for path in sorted(config.runs.iterdir()):
            parcels = pack(sorted(one for one in path.iterdir() if one.is_dir()), config.pack / path.name)
            for parcel in parcels:
                say({"packed": f"{path.name}/{parcel.name}", "megabytes": round(parcel.stat().st_size / 1e6, 2)})


if __name__ == "__main__":
    main()
