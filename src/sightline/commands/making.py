"""What commands do that make something: data, backbones, runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields

from ..config import Backbones, Check, Convert, Data, Demo, Import, Pretrain, Toy, Train
from ..console import bar, counted, is_main_process, make_way, show_metrics, write
from ..errors import UserError


def check(command: Check) -> int:
    import json

    from ..data.check import check as look_over
    from ..data.rows import read_rows

    make_way(command.out)
    rows = read_rows(command.data, layout=command.layout)
    with bar("opening pictures", len(rows)) as progress:
        report = look_over(rows, open_images=not command.no_images, workers=command.workers, progress=progress)
    print("\n".join(report.lines()))
    if command.out is not None:
        write(command.out, json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return int(not report.ok)


def data(command: Data) -> int:
    from ..datasets.data import Build, build

    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "name"}
    built = build(command.name, Build(**options))
    print(f"{built.folder}: {counted(built.images)}{' (already there)' if built.reused else ''}")
    for split, counts in built.counts.items():
        print(f"  {split}: {in_a_line(counts)}")
    return 0


MOST_GROUPS = 12  # named one by one


def in_a_line(counts: Mapping[str, int]) -> str:
    """How many pictures each group has; where groups are many, all classes together."""
    if len(counts) <= MOST_GROUPS:
        return ", ".join(f"{group} {count:,}" for group, count in counts.items())
    together: Counter[str] = Counter()
    for group, count in counts.items():
        together[group.partition("/")[2]] += count
    classes = len({group.partition("/")[0] for group in counts})
    return ", ".join(f"{group} {count:,}" for group, count in together.items()) + f", of {classes} classes"


def toy(command: Toy) -> int:
    from ..datasets.toy import write_toy

    if command.out.exists():
        raise UserError(f"{command.out}: is there already; choose another folder")
    settings = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "out"}
    count = command.train + command.val + command.test
    print(f"{write_toy(command.out, **settings)}: {counted(count)} and rows.csv")
    return 0


def convert(command: Convert) -> int:
    from ..datasets.convert import convert as make

    print("\n".join(make(command.layout, command.data)))
    return 0


def import_(command: Import) -> int:
    from ..methods.import_ import import_published

    print(f"The run is in {import_published(command)}.")
    return 0


def backbones(_: Backbones) -> int:
    from rich.console import Console
    from rich.table import Table

    from ..vit.backbones import KNOWN

    table = Table("name", "width", "blocks", "patch", "registers", "picture", "weights", box=None, pad_edge=False)
    for known in KNOWN.values():
        c = known.config
        picture = f"{c.input.size[0]} px"
        table.add_row(
            known.name, *map(str, (c.width, c.depth, c.patch, c.registers)), picture, known.repository or known.note
        )
    Console(highlight=False).print(table)
    return 0


def pretrain(command: Pretrain) -> int:
    import json

    from ..pretrain import pretrain as run_pretraining
    from ..training.progress import figures_of_pretraining
    from ..training.run_folder import read_run

    folder = run_pretraining(command)
    if is_main_process():
        run = read_run(folder)
        last = json.loads(run.log_file.read_text(encoding="utf-8").splitlines()[-1])
        if found := figures_of_pretraining(last):
            print(", ".join(found))
        print(f"The backbone is {folder / 'backbone.safetensors'}: give that to --backbone.")
    return 0


def train(command: Train) -> int:
    from ..train import train as run_training

    folder = run_training(command)
    if is_main_process():
        show_metrics(folder, "test")
        print(f"The run is in {folder}.")
    return 0


def demo(command: Demo) -> int:
    from ..demo import demo as run_demo

    return run_demo(command)
