"""The benchmark: plans, grids, finished runs used again, interruptions, shards, tables and warnings."""

import csv
import json
from dataclasses import replace

import pytest

from sightline.bench.bench import bench
from sightline.bench.plan import parse_method, parse_shard, read_entries, runs_of
from sightline.bench.running import arguments_of, train_missing
from sightline.bench.table import latex_escaped
from sightline.cli import parse_flags
from sightline.config import Bench, Ifam, Shaping
from sightline.errors import UserError

from ..commands import typed
from ..small_runs import Stop, stopped_after

QUICK = {"backbone": "random:nano", "workers": 0, "device": "cpu", "figures": False}
FLAGS = ("size=32", "epochs=1", "batch=32")


def command(toy, out, *methods: str, **changes) -> Bench:
    return Bench(toy, methods=methods, out=out, **{"seeds": (0,), "flags": FLAGS} | QUICK | changes)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_own_flags_come_before_those_of_the_command_and_unknown_ones_of_other_methods_are_left_out(toy, tmp_path):
    here = command(toy, tmp_path, flags=("epochs=7", "lr=1e-3"))
    assert parse_method("erm --epochs 3", here)[0].epochs == 3
    assert parse_method("erm", here)[0].lr == 1e-3
    assert not hasattr(parse_method("probe", here)[0], "epochs")
    config, after = parse_method("masktune --init-from @erm", here)
    assert (config.backbone, after) == ("", "erm")


def test_a_grid_has_a_run_for_each_setting_that_the_text_leaves_open(toy, tmp_path):
    free = read_entries(command(toy, tmp_path, "jtt", "erm", grid="balanced"))
    assert [entry.name for entry in free] == ["jtt --upweight 5", "jtt --upweight 20", "jtt --upweight 50", "erm"]
    assert [entry.config.upweight for entry in free[:3]] == [5, 20, 50]
    assert len(read_entries(command(toy, tmp_path, "jtt --upweight 3", grid="balanced"))) == 1
    assert len(read_entries(command(toy, tmp_path, "jtt"))) == 1


def test_other_settings_have_other_folders_and_workers_do_not_matter(toy, tmp_path):
    def folder(*methods: str, **changes) -> str:
        here = command(toy, tmp_path, *methods, **changes)
        return runs_of(read_entries(here), (0,), here)[0].config.folder.name

    assert folder("erm") == folder("erm", workers=2)
    assert folder("erm") != folder("erm", flags=(*FLAGS, "lr=1e-3"))


@pytest.mark.parametrize(
    ("methods", "changes", "complaint"),
    [
        (("nothing",), {}, "unknown method nothing"),
        (("erm --what 3",), {}, "unknown flag --what"),
        (("erm", "erm"), {}, "given twice"),
        (("erm", "erm --epochs 1"), {}, "the same settings"),
        (("masktune --init-from @erm",), {}, "no such method here"),
        (("erm",), {"flags": ("epochs",)}, "write NAME=VALUE"),
        (("erm",), {"flags": ("epoch=1",)}, "no method has --epoch"),
        (("erm",), {"shard": "8/8"}, "write I/N"),
        (("jtt", "masktune --init-from @jtt"), {"grid": "balanced"}, "jtt has a grid"),
    ],
)
def test_what_cannot_be_planned_is_an_error(methods, changes, complaint, toy, tmp_path):
    with pytest.raises(UserError, match=complaint):
        bench(command(toy, tmp_path / "out", *methods, **changes))


def test_shards():
    assert (parse_shard(None), parse_shard("3/8")) == ((0, 1), (3, 8))


def test_a_configuration_is_typed_as_its_command_line(toy):
    config = Ifam(toy, parts=2, zoom=False, ema=None, shaping=Shaping(entropy=0.5), backbone="random:nano", resume=True)
    assert parse_flags(Ifam, "x", arguments_of(config)) == config


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_from_the_command_line_to_the_tables(toy, tmp_path):
    given = ["--backbone", "random:nano", "--workers", 0, "--device", "cpu", "--flags", *FLAGS, "--seeds", 0, 1]
    methods = ("--methods", "erm", "masktune --init-from @erm", "probe")
    code, out, err = typed("bench", toy, *methods, *given, "--out", tmp_path / "a")
    assert code == 0, err
    assert "erm, seed 1: finished" in out
    found = json.loads((tmp_path / "a" / "bench.json").read_text())
    assert {line["method"]: line["seeds"] for line in found["methods"]} == {key: [0, 1] for key in methods[1:]}
    worst = [line["metrics"]["worst_group"]["value"] for line in found["methods"]]
    assert worst == sorted(worst, reverse=True)
    first, *others = found["methods"]
    assert first["difference"] is None
    assert all("corrected for 2 comparisons" in line["difference"]["how"] for line in others)
    assert {(line["coverage"], line["blind"]) for line in found["methods"]} == {(1.0, False)}
    with (tmp_path / "a" / "table.csv").open(newline="") as file:
        assert [line["method"] for line in csv.DictReader(file)] == [line["method"] for line in found["methods"]]
    page = (tmp_path / "a" / "index.html").read_text()
    assert "data:image/png;base64," in page
    assert "masktune --init-from @erm" in page
    assert "\\begin{tabular}" in (tmp_path / "a" / "table.tex").read_text()
    again = typed("bench", toy, *methods, *given, "--out", tmp_path / "a")
    assert (again[0], "finished" in again[1]) == (0, False)  # nothing was trained


def test_an_interrupted_benchmark_goes_on_where_it_was(toy, tmp_path):
    here = command(toy, tmp_path, "erm", "erm --lr 1e-4", flags=("size=32", "epochs=2", "batch=32"))
    with pytest.raises(Stop), stopped_after(8):  # six steps each
        bench(here)
    runs = runs_of(read_entries(here), (0,), here)
    assert [run.finished for run in runs] == [True, False]
    before = (runs[0].config.folder / "metrics.json").stat().st_mtime_ns
    table, outcomes = bench(here)
    assert [outcome.run.name for outcome in outcomes] == ["erm --lr 1e-4, seed 0"]
    assert (runs[0].config.folder / "metrics.json").stat().st_mtime_ns == before
    assert {line.verdict for line in table.lines} == {"", "undecided (one seed)"}


def test_shards_share_the_runs_and_the_table_has_what_is_finished(toy, tmp_path):
    here = command(toy, tmp_path, "erm", "probe", flags=FLAGS)
    table, outcomes = bench(replace(here, shard="1/2"))
    assert [outcome.run.name for outcome in outcomes] == ["probe, seed 0"]
    assert [line.name for line in table.lines] == ["probe"]
    assert "not finished: erm, seed 0" in table.warnings
    assert len(bench(replace(here, shard="0/2"))[0].lines) == 2
    assert bench(replace(here, collect=True))[1] == []


def test_one_failure_does_not_stop_the_others_and_processes_report_theirs(toy, tmp_path):
    here = command(toy, tmp_path, "erm --lr -1", "probe", flags=FLAGS)
    runs = runs_of(read_entries(replace(here, methods=("erm --lr 1e30", "probe"))), (0,), here)
    errors = {outcome.run.entry.name: outcome.error for outcome in train_missing(runs, 2, lambda _: None)}
    assert errors["probe"] == ""
    assert "diverged" in errors["erm --lr 1e30"]
    assert ".log)" in errors["erm --lr 1e30"]


def test_the_best_of_a_grid_gets_the_line_and_an_inverted_shortcut_is_named(toy, tmp_path):
    table, outcomes = bench(command(toy, tmp_path, "jtt --first-epochs 1", "erm", grid="balanced"))
    assert len(outcomes) == 4
    assert len(table.lines) == 2
    assert any("selected among 3 settings by balanced on the validation data" in note for note in table.warnings)


def test_latex_is_escaped():
    assert latex_escaped("50 % & a_b −") == r"50 \% \& a\_b $-$"
