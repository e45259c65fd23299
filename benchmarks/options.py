"""The options of `benchmarks/run.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from rows import Row
from sightline.errors import UserError


@dataclass(frozen=True)
class Benchmark:
    study: Positional[Literal["waterbirds", "interventions", "relevance", "a2", "v1"]]
    data: tuple[str, ...] = ()
    """SET=FOLDER: what `sightline data` built. `--list` shows the sets of a study; waterbirds takes any. a2: also
    family=FOLDER of `pretrain.py family --keep-every 3 --runs FOLDER`, and toy=FOLDER of `sightline toy`."""
    backbones: tuple[str, ...] = ()
    """NAME=FILE. Rows that name no backbone start from the first; TI, SELF and U2NET are named in rows. a2: attention
    and embeddings of every pair; crops of the first one are counted, resized and adapted."""
    runs: Path | None = None
    """Default: runs/STUDY."""
    cache: Path | None = None
    """Decoded images and features, which are large. Default: RUNS-cache."""
    sets: tuple[str, ...] = ()
    """Only these sets."""
    rows: tuple[str, ...] = ()
    """Only these rows, such as 'iFAM K=4' or 'cub: iFAM*'; waterbirds: of any table, with every seed."""
    seeds: tuple[int, ...] = ()
    """Only these seeds."""
    table: str = "papers"
    """waterbirds: papers, pixels, shifts or rivals."""
    rows_file: Path | None = None
    """waterbirds: JSON, name -> arguments of `sightline train`, in place of a table."""
    parallel: int = 6
    """Rows at once."""
    workers: int = 2
    """Processes that decode images, of each row."""
    device: str = "auto"
    precision: str = "bf16"
    compile: bool = False
    """Compile the blocks of the ViTs, but of rows that are timed."""
    epochs: int | None = None
    """To try things out: of every row."""
    minutes: float | None = None
    """Stop after so long; what is in training then is saved, and resumed by the next call."""
    splits: tuple[str, ...] = ("val", "test")
    """waterbirds: where the sight is measured; the table is of the last one."""
    train: bool = True
    """Or only measure what is trained."""
    measure: bool = True
    """Or only train."""
    packs: Path | None = None
    """interventions: where the birds come from, for their key points."""
    noise: int = 40
    """interventions: searches on shuffled labels."""
    val: int = 160
    """relevance: validation images of what trains with few masks."""
    limit: int = 600
    """relevance: test images whose maps, curves and neighbours are measured."""
    subsets: int = 32
    """relevance: images of ImageNet whose sufficient pixels are searched for."""
    list: bool = False
    """Only list the rows, and what they lack."""
    collect: bool = False
    """Run nothing; put together what is finished."""
    unpack: Path | None = None
    """First add the runs that --pack wrote into this folder."""
    pack: Path | None = None
    """A folder for the results of finished runs without weights, in .tar.xz files."""
    before: Path | None = None
    """interventions: a file that --out wrote: rows that are not there now, or not measured now, are taken from it; of
    rows that were trained again the figures of both are kept."""
    markdown: bool = False
    note: str = ""
    """Written beside the figures in --out."""
    out: Path | None = None

    @property
    def folder(self) -> Path:
        return self.runs or Path("runs") / self.study


def named(option: str, texts: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise UserError(f"{option} {text}: write NAME=PATH, such as TI=vit_ti16_augreg_in1k.safetensors")
        found[name] = value
    return found


def is_wanted(config: Benchmark, row: Row) -> bool:
    names = (row.name, f"{row.set}: {row.name}")
    by_name = not config.rows or any(fnmatchcase(name, pattern) for name in names for pattern in config.rows)
    return by_name and row.set in (config.sets or [row.set]) and row.seed in (config.seeds or [row.seed])
