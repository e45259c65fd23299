"""`sightline compare`: runs side by side and pairwise, on the same images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from .config import Compare
from .console.files import prepare_output, write_json
from .console.terminal import paragraph, present, print_notes
from .errors import UserError
from .metrics.comparison import Comparison, compare
from .metrics.estimates import read_metrics
from .metrics.predictions import Predictions
from .training.run_folder import NEUTRAL, Run, check_results, read_run, train_counts


def run_command(command: Compare) -> int:
    prepare_output(command.out)
    prepare_output(command.class_changes)
    console = Console(highlight=False)
    if command.suite is not None:
        return compare_on_suite(command, console)
    comparison = compare_runs(command)
    if command.out is not None:
        write_json(command.out, comparison.to_dict())
    present(command, comparison.to_dict(), lambda: show_comparison(comparison, command, console))
    if command.class_changes is not None:
        from .explain.class_changes import read_pair

        files = [folder / "predictions" / f"{command.split}.csv" for folder in two_runs(command)]
        draw_class_changes({command.split: read_pair(*files)}, command)
    return 0


def show_comparison(comparison: Comparison, command: Compare, console: Console) -> None:
    n = comparison.entries[0].metrics.n
    about = f"Split {command.split!r}, the same {n:,} images for all. Verdict: worst-{comparison.worst_of} accuracy "
    paragraph(console, f"{about}against {comparison.reference}.")
    console.print()
    console.print(comparison.table())
    console.print()
    paragraph(console, comparison.sentence, style="bold")
    if command.details:
        console.print(comparison.gains_table())
        print_notes(console, [note for entry in comparison.entries for note in entry.metrics.remarks])
    print_notes(console, comparison.warnings)


def compare_on_suite(command: Compare, console: Console) -> int:
    from .explain.suite import compare_suites

    assert command.suite is not None
    before, after = two_runs(command)
    comparison, pairs = compare_suites(before, after, command.suite)
    if command.out is not None:
        write_json(command.out, {"reference": before.name} | comparison.to_dict())
    present(command, comparison.to_dict(), lambda: console.print(comparison.table([before.name, after.name])))
    if command.class_changes is not None:
        draw_class_changes(pairs, command)
    return 0


def two_runs(command: Compare) -> tuple[Path, ...]:
    if len(command.runs) != 2:
        raise UserError(f"--class-changes and --suite compare two runs, not {len(command.runs)}; name two")
    return command.runs


def draw_class_changes(pairs, command: Compare) -> None:
    from .explain.class_changes import changes_summary, class_changes, draw_changes

    assert command.class_changes is not None
    before, after = two_runs(command)
    changes = {name: class_changes(*pair) for name, pair in pairs.items()}
    for name, changed in changes.items():
        print(f"{name}: {changes_summary(changed)}")
    draw_changes(changes, command.class_changes, f"from {before.name} to {after.name}")
    print(f"Figure of all classes: {command.class_changes}")


# ---- several runs ----------------------------------------------------------------------------------------------------


def compare_runs(command: Compare) -> Comparison:
    """Every method against the first; runs that differ only in their seed are one method."""
    if len(command.runs) < 2:
        raise UserError("compare needs at least two runs; name another")
    methods: dict[str, list[Run]] = {}
    for folder in command.runs:
        run = run_in(folder)
        methods.setdefault(settings_of(run), []).append(run)
    for runs in methods.values():
        check_distinct_seeds(runs)
    if len(methods) < 2:
        raise UserError("these runs differ only in their seed; name a run of another method to compare with")
    names = display_names(list(methods.values()))
    named = {
        name: [predictions_of(run, command.split) for run in runs]
        for name, runs in zip(names, methods.values(), strict=True)
    }
    counts = [train_counts(run) for runs in methods.values() for run in runs]
    if all(count == counts[0] for count in counts):
        return compare(named, train_group_counts=counts[0])
    comparison = compare(named)
    note = "training group sizes differ between the runs: no adjusted average accuracy, no minority groups"
    return replace(comparison, warnings=(*comparison.warnings, note))


def run_in(folder: Path) -> Run:
    """A run; or its results on other data, in the folder that `evaluate` made inside the run."""
    above = folder.resolve().parent
    if (folder / "run.json").exists() or not ((folder / "metrics.json").exists() and (above / "run.json").exists()):
        return read_run(folder)
    facts, content = read_run(above).facts, read_metrics(folder / "metrics.json")
    own = content.get("data", {}).get("own")
    data = facts["data"] | ({} if own else {"group_names": []})  # the groups of other data are not those of training
    return Run(folder, facts | {"data": data, "intervention": content.get("intervention")})


def settings_of(run: Run) -> str:
    """All settings that may change the result, except the seed. The splits are part of the data's fingerprint."""
    ignored = NEUTRAL | {"seed", "split_seed"}
    try:
        settings = {name: value for name, value in run.facts["config"].items() if name not in ignored}
        intervention = (run.facts.get("intervention") or {}).get("kind")
        identity = [run.facts["method"], settings, run.facts["data"]["fingerprint"], intervention]
        return json.dumps(identity, sort_keys=True)
    except KeyError as error:
        raise UserError(f"{run.folder / 'run.json'}: incomplete, {error} is missing; train this run again") from None


def check_distinct_seeds(runs: Sequence[Run]) -> None:
    by_seed: dict[int, Run] = {}
    for run in runs:
        other = by_seed.setdefault(run.facts["seed"], run)
        if other is not run:
            raise UserError(
                f"{other.folder} and {run.folder}: the same method, settings, data and seed ({run.facts['seed']}), "
                "which would count as two seeds; leave one out"
            )


def display_names(methods: Sequence[Sequence[Run]]) -> list[str]:
    """The folder of each method's first run, with as many parent folders as are needed to tell the methods apart."""
    paths = [runs[0].folder.resolve() for runs in methods]
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    names = [Path(*path.parts[-parts:]).as_posix() for path in paths]
    more = ["" if len(runs) == 1 else f" and {len(runs) - 1} more seed{'s' * (len(runs) > 2)}" for runs in methods]
    return [f"{name}{rest}" for name, rest in zip(names, more, strict=True)]


def predictions_of(run: Run, split: str) -> Predictions:
    path = run.folder / "predictions" / f"{split}.csv"
    if not path.exists():
        raise UserError(f"{path}: no such file; make it with `sightline evaluate {run.folder} --split {split}`")
    predictions = Predictions.load_csv(path, split=split, group_names=tuple(run.facts["data"]["group_names"]))
    check_results(run, run.folder)
    return predictions
