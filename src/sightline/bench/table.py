"""The table of a benchmark, from finished runs, as text for the terminal, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..console.files import as_csv
from ..metrics.comparison import compare, verdict
from ..metrics.estimates import Estimate, Metrics
from ..metrics.groups import evaluate_seeds
from ..metrics.predictions import Predictions
from ..training.run_folder import read_run, train_counts
from .plan import BenchRun
from .running import seconds_of

HEADER = (
    "method", "seeds", "n", "accuracy", "adjusted", "worst", "− best", "verdict", "selected by", "covers", "blind",
    "train min", "GFLOPs",
)  # fmt: skip
INVERTED = 0.1  # by which minority groups must exceed the others for a warning


@dataclass(frozen=True)
class Line:
    """One method over its finished seeds."""

    name: str
    seeds: tuple[int, ...]
    metrics: Metrics
    gain: Estimate | None  # of worst-group accuracy over the best method; None for the best
    verdict: str
    selection: str
    minutes: float  # of training, one run
    sees: dict[str, Any]  # coverage, blind, gflops

    @property
    def worst(self) -> Estimate:
        return self.metrics.worst_group or self.metrics.worst_class

    @property
    def cells(self) -> tuple[str, ...]:
        metrics, gain = self.metrics, self.gain
        return (
            self.name, str(len(self.seeds)), f"{metrics.n:,}", percent(metrics.accuracy), percent(metrics.adjusted),
            percent(self.worst), f"{100 * gain.value:+.1f} {gain.interval}" if gain else "best", self.verdict,
            self.selection, f"{100 * self.sees['coverage']:.0f} %", "yes" if self.sees["blind"] else "no",
            f"{self.minutes:.1f}", f"{self.sees['gflops']:.3g}",
        )  # fmt: skip


@dataclass(frozen=True)
class Table:
    data: str
    split: str
    worst_of: str  # "group" or "class"
    lines: tuple[Line, ...]
    warnings: tuple[str, ...]

    @property
    def header(self) -> tuple[str, ...]:
        return tuple(f"worst {self.worst_of}" if name == "worst" else name for name in HEADER)

    @property
    def caption(self) -> str:
        return (
            f"{self.data}, split {self.split}: per cent with 95 % intervals over images and seeds. “− best”: worst-"
            f"{self.worst_of} accuracy minus the best method's, paired on the same images and corrected for the number "
            "of methods. “covers”: the visible fraction of the image."
        )

    def markdown(self) -> str:
        rows = [self.header, tuple("---" for _ in self.header), *(line.cells for line in self.lines)]
        text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
        return f"{text}\n\n{self.caption}\n" + "".join(f"\n- {warning}" for warning in self.warnings) + "\n"

    def latex(self) -> str:
        rows = [" & ".join(map(latex_escaped, row)) + r" \\" for row in (self.header, *(o.cells for o in self.lines))]
        body = "\n".join([rows[0], r"\hline", *rows[1:]])
        columns = "l" + "r" * (len(self.header) - 1)
        return f"% {self.caption}\n\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n"

    def csv(self) -> str:
        """Numbers alone; a line for each method."""
        found = []
        for line in self.lines:
            figures = {"accuracy": line.metrics.accuracy, "adjusted": line.metrics.adjusted, "worst": line.worst}
            row: dict[str, Any] = {"method": line.name, "seeds": " ".join(map(str, line.seeds)), "n": line.metrics.n}
            for name, one in (figures | {"difference": line.gain}).items():
                parts = ("", "") if one is None else (one.low, one.high)
                row |= {name: "" if one is None else one.value, f"{name}_low": parts[0], f"{name}_high": parts[1]}
            row |= {"verdict": line.verdict, "selected_by": line.selection, **line.sees, "train_minutes": line.minutes}
            found.append(row)
        return as_csv(list(found[0]), found)

    def to_dict(self) -> dict[str, Any]:
        lines = [
            {
                "method": line.name, "seeds": list(line.seeds), "metrics": line.metrics.to_dict(),
                "difference": asdict(line.gain) if line.gain else None, "verdict": line.verdict,
                "selected_by": line.selection, "train_minutes": line.minutes, **line.sees,
            }
            for line in self.lines
        ]  # fmt: skip
        facts = {"data": self.data, "split": self.split, "worst_of": self.worst_of}
        return facts | {"methods": lines, "warnings": list(self.warnings)}


def percent(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{100 * estimate.value:.1f} {estimate.interval}"


def latex_escaped(text: str) -> str:
    text = re.sub(r"([%&_#$])", r"\\\1", text)
    return text.replace("−", "$-$").replace("–", "--")


def make_table(finished: Sequence[BenchRun], split: str, notes: Sequence[str] = ()) -> Table | None:
    """Methods by worst-group (or class) accuracy, the best first; None if nothing is finished."""
    by_name: dict[str, list[BenchRun]] = {}
    for run in finished:
        by_name.setdefault(run.entry.name, []).append(run)
    if not by_name:
        return None
    facts = read_run(finished[0].config.folder).facts
    counts = train_counts(read_run(finished[0].config.folder))
    predictions = {name: [predictions_of(run, split) for run in runs] for name, runs in by_name.items()}
    metrics = {name: evaluate_seeds(runs, train_group_counts=counts) for name, runs in predictions.items()}
    worst = {name: (one.worst_group or one.worst_class).value for name, one in metrics.items()}
    order = sorted(by_name, key=lambda name: -worst[name])
    gains: dict[str, Estimate | None] = dict.fromkeys(order)
    if len(order) > 1:
        found = compare(predictions, reference=order[0], train_group_counts=counts)
        gains = {entry.name: entry.worst_gain for entry in found.entries}
    lines = [line_of(name, by_name[name], metrics[name], gains[name], metrics[order[0]].seeds) for name in order]
    kind = "class" if lines[0].metrics.worst_group is None else "group"
    warnings = [*notes, *dict.fromkeys(text for line in lines for text in warnings_of(line))]
    return Table(facts["data"]["name"], split, kind, tuple(lines), tuple(warnings))


def line_of(name: str, runs: list[BenchRun], metrics: Metrics, gain: Estimate | None, best_seeds: int) -> Line:
    """A single training is not compared: training again moves the worst group by points."""
    found = "" if gain is None else verdict(gain)
    if gain is not None and min(metrics.seeds, best_seeds) == 1:
        found = "undecided (one seed)"
    folders = [run.config.folder for run in runs]
    rule = read_run(folders[0]).facts["selection"]
    selection = f"{rule['metric']} on {rule['on']}" if rule.get("metric") else "nothing"
    minutes = sum(seconds_of(folder) for folder in folders) / len(folders) / 60
    return Line(
        name, tuple(run.config.seed for run in runs), metrics, gain, found, selection, minutes, sees_of(runs[0])
    )


def sees_of(run: BenchRun) -> dict[str, Any]:
    """Coverage and cost of a prediction on some test images, measured once for each method and kept with the run."""
    from ..console.files import write_json
    from ..load import open_model
    from ..metrics.cost import measure_cost_on_rows
    from .running import TIMES, read_times

    known = read_times(run.config.folder)
    if "gflops" not in known:
        accelerator, model = open_model(run.config.folder, run.config.device)
        rows = rows_of(run)
        split = "test" if len(rows.split_indices("test")) else "val"
        cost = measure_cost_on_rows(
            model.method, rows, rows.split_indices(split), model.expects, accelerator.device, most=16
        )
        blind = bool(model.method.blind) and not model.method.sees_everything
        known |= {"coverage": cost.coverage, "blind": blind, "gflops": cost.gflops}
        write_json(run.config.folder / TIMES, known)
    return {name: known[name] for name in ("coverage", "blind", "gflops")}


def rows_of(run: BenchRun):
    from ..data.rows import read_rows

    return read_rows(run.config.data, layout=run.config.layout, seed=run.config.split_seed)


def predictions_of(run: BenchRun, split: str) -> Predictions:
    names = tuple(read_run(run.config.folder).facts["data"]["group_names"])
    return Predictions.load_csv(run.config.folder / "predictions" / f"{split}.csv", split=split, group_names=names)


def warnings_of(line: Line) -> Iterator[str]:
    """Where the rarest groups exceed the others by far, the shortcut is inverted, not removed."""
    groups, rare = line.metrics.groups, line.metrics.minority_worst_group
    if rare is None or not groups or line.metrics.adjusted is None:
        return
    gap = (line.metrics.mean_of_groups or line.metrics.accuracy).value - line.metrics.adjusted.value
    if gap > INVERTED / 2 and rare.value > line.worst.value:
        yield (
            f"{line.name}: rare groups are recognised better than frequent ones (mean of groups {100 * gap:.0f} points "
            "above the average weighted as in training): the shortcut is inverted rather than removed; weaken its "
            "reweighting, or select hyperparameters with --grid"
        )
