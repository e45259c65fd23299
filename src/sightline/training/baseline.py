"""The baseline of a method that hides most of the image: a linear probe on the same backbone, which sees all of it.

It takes about a minute, is re-used by later runs beside it, and shows whether the sight loses what matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config import Probe, Train
from ..console.checksums import write_json_with_checksum
from ..console.terminal import say
from ..errors import UserError
from ..metrics.comparison import compare, verdict
from ..metrics.estimates import Estimate, read_metrics
from ..metrics.predictions import Predictions
from .run_folder import Run, read_run

FOLDER = "baseline"  # in the run, unless a run beside it has the same probe already
SAME = ("backbone", "size", "select", "split_seed")  # settings that make it the same probe
SHARED = (*SAME, "data", "layout", "seed", "workers", "cache", "device", "precision")


def compare_with_baseline(config: Train, train: Callable[[Train], Path], main: bool) -> None:
    """Train the probe, or find it, and add the comparison to metrics.json. On every process."""
    run = read_run(config.folder)
    found = next(equal_probes(run), None)
    if found is None:
        if main:
            say("Baseline: a linear probe on the same backbone, which sees the whole image (--no-baseline: without)")
        settings = {name: getattr(config, name) for name in SHARED}
        try:
            found = train(Probe(**settings, out=run.folder / FOLDER))
        except UserError as error:
            if main:
                say(f"note: no baseline: {error}")
            return
    if main:
        path = run.folder / "metrics.json"
        write_json_with_checksum(path, read_metrics(path) | {"baseline": comparison(run, read_run(found))})


def equal_probes(run: Run) -> Iterator[Path]:
    """Finished probes on the same data with the same settings, in this run or in those beside it."""
    beside = run.folder.resolve().parent
    patterns = (f"{run.folder.resolve().name}/{FOLDER}/run.json", "*/run.json", f"*/{FOLDER}/run.json")
    for path in (path for pattern in patterns for path in sorted(beside.glob(pattern))):
        try:
            facts = read_run(path.parent).facts
        except UserError:
            continue
        if facts.get("method") != Probe.method or facts.get("state") != "finished":
            continue
        same = all(facts["config"].get(name) == run.facts["config"].get(name) for name in SAME)
        if same and not facts["config"].get("untuned") and same_data(facts, run.facts):
            yield path.parent


def same_data(facts: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return facts["data"]["fingerprint"] == others["data"]["fingerprint"]


def comparison(run: Run, baseline: Run) -> dict[str, Any]:
    """By split: the accuracies of the baseline, and what the run gains over it on the same images."""
    splits = {}
    for path in sorted((run.folder / "predictions").glob("*.csv")):
        other = baseline.folder / "predictions" / path.name
        if not other.is_file():
            continue
        names = tuple(run.facts["data"]["group_names"])
        ours, theirs = (Predictions.load_csv(one, split=path.stem, group_names=names) for one in (path, other))
        reference, entry = compare({"baseline": [theirs], "run": [ours]}).entries
        splits[path.stem] = {
            "accuracy": vars(reference.metrics.accuracy), "worst": vars(reference.worst),
            "accuracy_gain": vars(entry.accuracy_gain), "worst_gain": vars(entry.worst_gain),
        }  # fmt: skip
    return {"run": str(baseline.folder), "method": Probe.method, "splits": splits}


def loses_what_matters(found: Mapping[str, Any]) -> bool:
    """Significantly less accurate than the baseline, without being better in the worst group."""
    gains = [verdict(Estimate(**found[name])) for name in ("accuracy_gain", "worst_gain")]
    return gains[0] == "worse" and gains[1] != "better"


def baseline_sentence(found: Mapping[str, Any]) -> str:
    """The comparison on one split, for a reader."""
    accuracy, worst, gain, worst_gain = (
        Estimate(**found[name]) for name in ("accuracy", "worst", "accuracy_gain", "worst_gain")
    )
    probe = "a linear probe on the same backbone, which sees the whole image"
    if loses_what_matters(found):
        return (
            f"The sight loses what matters: {probe}, has an accuracy of {accuracy.value_text}, this model "
            f"{gain.value_text} {gain.interval}."
        )
    return (
        f"Against {probe} (accuracy {accuracy.value_text}, worst {worst.of} {worst.value_text}): "
        f"{gain.value_text} {gain.interval}, in the worst {worst_gain.value_text} {worst_gain.interval}."
    )
