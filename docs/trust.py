"""Writes the tables of trust.md from benchmarks/results, so that they cannot go stale.

python docs/trust.py

Rows of trust.json without a description here are shown by their name; whoever adds a row describes it below.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "trust.json"
COVERAGE = DOCS.parent / "benchmarks" / "results" / "interval_coverage.json"
BEGIN, END = "<!-- table: written by docs/trust.py -->", "<!-- end of the table -->"
BEGIN_COVERAGE = "<!-- coverage: written by docs/trust.py -->"
COLUMNS = ("What was tried", "Tried", "Survived", "Failed", "Commit", "What others promise and test")
SQLITE = "SQLite: transactions are atomic through crashes and power failures; tested with simulated I/O errors, a full "
SQLITE += "disk, crashes and power loss."
SQLITE_FILES = "SQLite: malformed database files are errors, not crashes; tested with damaged files and fuzzers."
SAFETENSORS = "safetensors: the header is checked against the file, no code runs; the format has no checksum."
SKLEARN = "scikit-learn: models are pickles, which only trusted sources may provide; nothing on interrupted writes."
NO_INTERVALS = "scikit-learn: its metrics have no intervals."
OUTSIDE = "in simulated test sets (`benchmarks/interval_coverage.py`); failed: the truth is outside, for which 5 % is "
OUTSIDE += "nominal"
DESCRIPTIONS = {  # row: what was tried, and what others promise
    "faults": (
        "Kills, I/O errors, full disks, read-only folders, and damaged or missing files, at random moments of the "
        "commands that write (`python -m tests.faults`)",
        f"{SQLITE} {SAFETENSORS} {SKLEARN}",
    ),
    **{
        f"hostile files: {kind}": (f"Valid files changed at random, {what} (`python -m tests.hostile`)", others)
        for kind, what, others in (
            ("table", "datasets as CSV", SQLITE_FILES),
            ("predictions", "predictions as CSV", ""),
            ("image", "images", ""),
            ("mask", "masks", ""),
            ("config", "settings", ""),
            ("intervention", "`intervention.json`", ""),
            ("weights", "weights as safetensors", f"{SAFETENSORS} It is fuzzed, and was audited."),
            ("pickle", "weights as `.pth`", SKLEARN),
            ("onnx", "`u2net:FILE.onnx`", ""),
            ("run", "`run.json`", ""),
            ("run and weights", "`run.json`, and the model loaded from it", SKLEARN),
        )
    },
    **{
        f"95 % intervals of {kind}, {seeds}": (f"95 % intervals of {kind}, {seeds}, {OUTSIDE}", NO_INTERVALS)
        for seeds in ("1 seed", "2 seeds", "3 seeds")
        for kind in ("proportions, means and their differences", "AUROC", "minima and gaps to them")
    },
    **{
        f"95 % intervals of {kind}": (f"95 % intervals of {kind}, {OUTSIDE}", NO_INTERVALS)
        for kind in (
            "precision, recall, F1, of one run",
            "the calibration error (ECE), of one run",
            "differences in group accuracy, of one run",
            "means over 50 images, their differences, and ratios of sums",
        )
    },
    "intervene --find in noise": (
        "`intervene --find` where every removal only adds noise; failed: it takes a step, at most 5 % by design",
        "",
    ),
    "intervene --find in noise, suspects": (
        "The same; failed: it names a part whose removal improves a group, at most 5 % by design",
        "",
    ),
    "proof under stress, cpu": (
        "Redraws of the pixels outside the sight, on the CPU: every method that hides × size × way of hiding × number "
        "format × batch, and compiled blocks and ONNX files (`benchmarks/proof_stress.py`); failed: any bit differs",
        "",
    ),
}


def table(rows: list[dict]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    order = {name: place for place, name in enumerate(DESCRIPTIONS)}
    for row in sorted(rows, key=lambda row: order.get(row["row"], len(order))):
        what, others = DESCRIPTIONS.get(row["row"], (row["row"], ""))
        counts = [f"{number:,}" for number in (row["tried"], row["tried"] - row["failed"], row["failed"])]
        commit = f"`{row['commit']}`"
        lines.append(f"| {' | '.join([what, *counts, commit, others])} |")
    return "\n".join(lines)


def coverage_table(rows: list[dict]) -> str:
    """Of every kind of interval, by the number of runs."""
    seeds = sorted({row["seeds"] for row in rows})
    found = {(row["interval"], row["seeds"]): 100 * row["held"] / row["tried"] for row in rows}
    lines = ["| Interval | " + " | ".join(f"{count} run{'s' * (count > 1)}" for count in seeds) + " |"]
    lines.append(f"|---|{'---:|' * len(seeds)}")
    for name in dict.fromkeys(name for name, _ in found):
        values = [f"{found[name, count]:.1f}" if (name, count) in found else "–" for count in seeds]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(values)} |")
    tried = sorted({row["tried"] for row in rows})
    lines.append(f"\nPer cent of {' or '.join(f'{number:,}' for number in tried)} intervals that hold the truth.")
    return "\n".join(lines)


def with_table(page: str, rows: list[dict]) -> str:
    return replaced(page, BEGIN, table(rows) if rows else "No long session has been recorded yet.")


def with_coverage(page: str, rows: list[dict]) -> str:
    return replaced(page, BEGIN_COVERAGE, coverage_table(rows) if rows else "Not simulated yet.")


def replaced(page: str, begin: str, text: str) -> str:
    return re.sub(f"{begin}.*?{END}", lambda _: f"{begin}\n\n{text}\n\n{END}", page, flags=re.DOTALL)


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text()) if path.exists() else []


def main() -> None:
    path = DOCS / "trust.md"
    path.write_text(with_coverage(with_table(path.read_text(), read(RESULTS)), read(COVERAGE)))


if __name__ == "__main__":
    main()
