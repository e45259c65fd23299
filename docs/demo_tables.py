"""The demo's screen and its seeds in docs/index.md, from benchmarks/results."""

from __future__ import annotations

from pathlib import Path

from birds_tables import read, table


def screen(results: Path) -> str:
    """As `make demo` prints it, with its default seed."""
    return f"```\n{(results / 'demo_screen.txt').read_text(encoding='utf-8').strip()}\n```"


def seeds(results: Path) -> str:
    """Worst-group accuracy with every seed, and the medians over them."""
    found = read(results, "demo_seeds.json")
    numbers = sorted({row["seed"] for row in found["rows"]})
    head = ["method", *(f"seed {number}" for number in numbers), "median", "accuracy, median", "sees, median"]
    lines = []
    for method, median in found["median"].items():
        rows = {row["seed"]: row for row in found["rows"] if row["method"] == method}
        worst = [f"{100 * rows[number]['worst_group']:.1f}" for number in numbers]
        lines.append(
            [next(iter(rows.values()))["name"], *worst, f"{100 * median['worst_group']:.1f}",
             f"{100 * median['accuracy']:.1f}", f"{100 * median['coverage']:.0f}"]
        )  # fmt: skip
    return table(head, lines)


TABLES = {"screen": screen, "seeds": seeds}
