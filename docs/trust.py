"""Writes the table of trust.md from benchmarks/results/trust.json, so that it cannot go stale.

python docs/trust.py

Rows of trust.json without a description here are shown by their name; whoever adds a row describes it below.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "trust.json"
BEGIN, END = "<!-- table: written by docs/trust.py -->", "<!-- end of the table -->"
COLUMNS = ("What was tried", "Tried", "Survived", "Failed", "Commit", "What others promise and test")
SQLITE = "SQLite: transactions are atomic through crashes and power failures; tested with simulated I/O errors, a full "
SQLITE += "disk, crashes and power loss."
SAFETENSORS = "safetensors: the header is checked against the file, no code runs; the format has no checksum."
SKLEARN = "scikit-learn: models are pickles, which only trusted sources may provide; nothing on interrupted writes."
DESCRIPTIONS = {  # row: what was tried, and what others promise
    "faults": (
        "Kills, I/O errors, full disks, read-only folders, and damaged or missing files, at random moments of the "
        "commands that write (`python -m tests.faults`)",
        f"{SQLITE} {SAFETENSORS} {SKLEARN}",
    ),
    **{
        f"hostile files: {kind}": (f"Valid files changed at random, {what} (`python -m tests.hostile`)", others)
        for kind, what, others in (
            ("table", "datasets as CSV", ""),
            ("predictions", "predictions as CSV", ""),
            ("image", "images", ""),
            ("mask", "masks", ""),
            ("config", "settings", ""),
            ("intervention", "`intervention.json`", ""),
            ("weights", "weights as safetensors", f"{SAFETENSORS} It is fuzzed."),
            ("pickle", "weights as `.pth`", SKLEARN),
            ("onnx", "`u2net:FILE.onnx`", ""),
            ("run", "`run.json`", ""),
            ("run and weights", "`run.json`, and the model loaded from it", SKLEARN),
        )
    },
    **{
        f"95 % intervals of {kind}, {seeds}": (
            f"95 % intervals of {kind}, {seeds}, in simulated test sets (`benchmarks/interval_coverage.py`); failed: "
            "the truth is outside, for which 5 % is nominal",
            "",
        )
        for kind in ("proportions, means and their differences", "AUROC", "minima and gaps to them")
        for seeds in ("1 seed", "2 seeds", "3 seeds")
    },
    "intervene --find in noise": (
        "`intervene --find` where every removal only adds noise; failed: it takes a step, at most 5 % by design",
        "",
    ),
}


def table(rows: list[dict]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        what, others = DESCRIPTIONS.get(row["row"], (row["row"], ""))
        counts = [f"{number:,}" for number in (row["tried"], row["tried"] - row["failed"], row["failed"])]
        commit = f"`{row['commit']}`"
        lines.append(f"| {' | '.join([what, *counts, commit, others])} |")
    return "\n".join(lines)


def with_table(page: str, rows: list[dict]) -> str:
    text = table(rows) if rows else "No long session has been recorded yet."
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.DOTALL)


def main() -> None:
    path = DOCS / "trust.md"
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    path.write_text(with_table(path.read_text(), rows))


if __name__ == "__main__":
    main()
