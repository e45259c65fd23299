"""The predictions table: one row per image, and the CSV file that stores it."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..console.checksums import check_checksum, replace_with_checksum
from ..console.printable import from_cell, to_cell
from ..errors import UserError

NO_CLASS = -1  # predicted none of the classes, which is wrong whatever the label
NEEDED = ("image", "label", "predicted")


@dataclass(frozen=True, eq=False)
class Predictions:
    """One run's predictions for the n images of one split, C classes."""

    images: list[str]  # paths relative to the dataset's root
    labels: np.ndarray  # int64 [n], into `classes`
    probabilities: np.ndarray  # float32 [n, C]
    predicted: np.ndarray  # int64 [n], into `classes`, or NO_CLASS
    classes: tuple[str, ...]
    groups: np.ndarray | None = None  # int64 [n], into `group_names`
    group_names: tuple[str, ...] = ()
    split: str = "test"
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)  # more columns, such as `background`

    def __post_init__(self) -> None:
        n, classes = len(self.images), len(self.classes)
        assert len(self.labels) == len(self.predicted) == n, "one label and one prediction per image"
        assert self.probabilities.shape == (n, classes), "one probability per image and class"
        assert all(len(column) == n for column in self.extra.values()), "one value per image in every extra column"
        if n == 0:
            raise UserError(f"nothing to evaluate: split {self.split!r} has no images")
        assert 0 <= self.labels.min() <= self.labels.max() < classes, "labels are indices into `classes`"
        assert NO_CLASS <= self.predicted.min() <= self.predicted.max() < classes, "predictions index into `classes`"
        if self.groups is not None:
            assert len(self.groups) == n, "one group per image"
            assert 0 <= self.groups.min() <= self.groups.max() < len(self.group_names), (
                "groups index into `group_names`"
            )
        invalid = ~np.isfinite(self.probabilities).all(axis=1)
        if invalid.any():
            raise UserError(
                f"{invalid.sum()} of {n} predictions are not finite (the first: {self.images[invalid.argmax()]}): "
                "the model has diverged; train it again with a lower learning rate"
            )

    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    def from_logits(
        cls,
        images: list[str],
        labels: np.ndarray,
        logits: np.ndarray,
        classes: tuple[str, ...],
        groups: np.ndarray | None = None,
        group_names: tuple[str, ...] = (),
        split: str = "test",
        extra: Mapping[str, Sequence[str]] | None = None,
    ) -> Predictions:
        """Softmax probabilities and the most probable class."""
        with np.errstate(invalid="ignore"):  # infinities become NaN, which is an error
            powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
            probabilities = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
        predicted = logits.argmax(axis=1)
        return cls(images, labels, probabilities, predicted, classes, groups, group_names, split, extra or {})

    @property
    def correct(self) -> np.ndarray:
        return self.predicted == self.labels

    @property
    def margins(self) -> np.ndarray:
        """Log odds of the second class of a binary task; they rank predictions whose probabilities round to 1."""
        smallest = np.finfo(np.float32).smallest_subnormal
        first, second = np.log(self.probabilities.astype(np.float64).clip(min=smallest)).T
        return second - first

    def take(self, rows: Sequence[int] | np.ndarray) -> Predictions:
        """These rows, in this order."""
        return Predictions(
            [self.images[row] for row in rows],
            self.labels[rows],
            self.probabilities[rows],
            self.predicted[rows],
            self.classes,
            None if self.groups is None else self.groups[rows],
            self.group_names,
            self.split,
            {name: [column[row] for row in rows] for name, column in self.extra.items()},
        )

    def save_csv(self, path: str | Path) -> None:
        """One line per image, written in one step: an interrupted write leaves an existing file as it was."""

        def write_lines(partial: Path) -> None:
            with partial.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                csv.writer(file).writerows(self._lines())

        replace_with_checksum(Path(path), write_lines)

    def _lines(self) -> Iterator[list[str]]:
        assert not {*NEEDED, "group", "split"} & {*self.extra}, "an extra column must not repeat a standard one"
        assert not any(name.startswith("p_") for name in self.extra), "p_ is for probabilities"
        grouped = [] if self.groups is None else ["group"]
        yield [*NEEDED, *grouped, "split", *self.extra, *(f"p_{name}" for name in self.classes)]
        names = [*self.classes, ""]
        assert names[NO_CLASS] == ""
        columns: list[Sequence[str]] = [
            self.images,
            [names[k] for k in self.labels],
            [names[k] for k in self.predicted],
        ]
        if self.groups is not None:
            columns.append([self.group_names[k] for k in self.groups])
        columns.append([self.split] * len(self))
        for row, texts in enumerate(zip(*columns, *self.extra.values(), strict=True)):
            yield [
                *map(to_cell, texts),
                *(f"{p:.9g}" for p in self.probabilities[row].tolist()),
            ]  # 9 digits keep every float32

    @classmethod
    def load_csv(cls, path: str | Path, *, split: str | None = None, group_names: Sequence[str] = ()) -> Predictions:
        """`split` selects one of several; `group_names` fixes the order of groups and adds those without images."""
        path = Path(path)
        check_checksum(path, "restore it, or write it again with `sightline evaluate`")
        try:
            with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                return _read(path, csv.reader(file), split, tuple(group_names))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        except csv.Error as error:
            raise UserError(f"{path}: not a CSV file ({error})") from error


def _read(path: Path, reader, split: str | None, group_names: tuple[str, ...]) -> Predictions:
    header = next(reader, [])
    text_columns = _check_header(path, header)
    at, texts, probabilities = [], [], []
    for line in filter(None, reader):
        place = f"{path}:{reader.line_num}"
        if len(line) != len(header):
            raise UserError(f"{place}: {len(line)} values, but the header has {len(header)} columns")
        if split is not None and "split" in text_columns and line[text_columns.index("split")] != split:
            continue
        at.append(place)
        texts.append([from_cell(cell) for cell in line[: len(text_columns)]])
        probabilities.append(_floats(line[len(text_columns) :], place))
    if not texts:
        raise UserError(f"{path}: contains no predictions" + (f" for split {split!r}" if split else ""))

    columns = {name: list(column) for name, column in zip(text_columns, zip(*texts, strict=True), strict=True)}
    classes = tuple(name.removeprefix("p_") for name in header[len(text_columns) :])
    images, labels, predicted = (columns.pop(name) for name in NEEDED)
    labels = _numbers("label", labels, classes, at)
    predicted = _numbers("predicted", predicted, (*classes, ""), at)
    predicted[predicted == len(classes)] = NO_CLASS
    names, groups = columns.pop("group", None), None
    if names is not None:
        group_names = group_names or _in_order_of_labels(names, labels)
        groups = _numbers("group", names, group_names, at)
    splits = dict.fromkeys(columns.pop("split", [split or path.stem]))
    if len(splits) > 1:
        raise UserError(f"{path}: contains several splits ({', '.join(splits)}); name the one to read")
    probabilities = np.array(probabilities, dtype=np.float32)
    return Predictions(
        images, labels, probabilities, predicted, classes, groups, group_names if names else (), *splits, columns
    )


def _check_header(path: Path, header: list[str]) -> list[str]:
    """The columns before the probabilities."""
    text_columns = [name for name in header if not name.startswith("p_")]
    missing = [name for name in NEEDED if name not in text_columns]
    if missing:
        raise UserError(f"{path}:1: no column {' or '.join(missing)}; required are {','.join(NEEDED)},p_<class>…")
    if len(header) - len(text_columns) < 2 or header[: len(text_columns)] != text_columns:
        raise UserError(f"{path}:1: the last columns must be the probabilities, p_<class> for every class")
    twice = [name for name in header if header.count(name) > 1] if len(set(header)) < len(header) else []
    if twice:
        raise UserError(f"{path}:1: duplicate column {twice[0]!r}; rename one of them")
    return text_columns


def _floats(texts: list[str], place: str) -> list[float]:
    try:
        return [float(text) for text in texts]
    except ValueError as error:
        raise UserError(f"{place}: a probability is not a number ({error})") from error


def _numbers(column: str, values: list[str], names: tuple[str, ...], at: list[str]) -> np.ndarray:
    number = {name: k for k, name in enumerate(names)}
    for value, place in zip(values, at, strict=True):
        if value not in number:
            known = ", ".join(filter(None, names[:9])) + (", …" if len(names) > 9 else "")
            raise UserError(f"{place}: unknown {column} {value!r}; expected one of {known}")
    return np.array([number[value] for value in values], dtype=np.int64)


def _in_order_of_labels(names: list[str], labels: np.ndarray) -> tuple[str, ...]:
    """Group names in a dataset's order: by label, then by name."""
    first = {}
    for name, label in zip(names, labels.tolist(), strict=True):
        first[name] = min(label, first.get(name, label))
    return tuple(sorted(first, key=lambda name: (first[name], name)))


def align_runs(runs: Sequence[tuple[str, Predictions]]) -> list[Predictions]:
    """Every named run with its rows in the order of the first; an error if images, labels or groups differ."""
    assert runs, "at least one run"
    name, reference = runs[0]
    return [reference, *(_align(reference, name, run, other) for other, run in runs[1:])]


def _align(reference: Predictions, reference_name: str, run: Predictions, name: str) -> Predictions:
    if (run.classes, run.group_names) != (reference.classes, reference.group_names):
        raise UserError(f"{name} and {reference_name} have different classes or groups: they cannot be compared")
    if run.images != reference.images:
        if Counter(run.images) != Counter(reference.images):
            raise UserError(_difference(reference.images, reference_name, run.images, name))
        rows = np.empty(len(run), dtype=np.int64)
        rows[_sorted_rows(reference)] = _sorted_rows(run)
        run = run.take(rows)
    same = run.labels == reference.labels
    if run.groups is not None and reference.groups is not None:
        same &= run.groups == reference.groups
    if not same.all():
        image = run.images[same.argmin()]
        raise UserError(f"{image} has different labels or groups in {name} and {reference_name}: evaluate both again")
    return run


def _sorted_rows(run: Predictions) -> list[int]:
    groups = run.labels if run.groups is None else run.groups
    return sorted(range(len(run)), key=lambda row: (run.images[row], run.labels[row], groups[row]))


def _difference(left: list[str], left_name: str, right: list[str], right_name: str) -> str:
    for name, other_name, images, others in (
        (left_name, right_name, left, right),
        (right_name, left_name, right, left),
    ):
        alone = sorted({*images} - {*others})
        if alone:
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            return f"{name} predicts {alone[0]}{more}, {other_name} does not: evaluate both on the same images"
    return f"{left_name} and {right_name} predict some images more often than others: evaluate both on the same data"
