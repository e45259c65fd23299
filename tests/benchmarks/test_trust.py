"""The rows of trust.json, and the table that is made from them."""

import importlib.util
import json
from pathlib import Path

from benchmarks.trust import RESULTS, record

ROOT = Path(__file__).parents[2]


def docs_script():
    spec = importlib.util.spec_from_file_location("docs_trust", ROOT / "docs" / "trust.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_is_replaced_when_it_is_measured_again(tmp_path):
    path = tmp_path / "trust.json"
    for row, tried, failed in (("faults", 10, 1), ("fuzz", 20, 0), ("faults", 30, 2)):
        record(path, row, tried, failed)
    rows = json.loads(path.read_text())
    assert [(one["row"], one["tried"], one["failed"]) for one in rows] == [("faults", 30, 2), ("fuzz", 20, 0)]
    assert all(len(one["commit"]) >= 12 for one in rows)


def test_the_table_has_a_line_per_row_and_replaces_the_old_one():
    script = docs_script()
    rows = [{"row": "faults", "tried": 5000, "failed": 3, "commit": "abc"},
            {"row": "new", "tried": 1, "failed": 0, "commit": "def"}]  # fmt: skip
    page = f"before\n{script.BEGIN}\nOUTDATED\n{script.END}\nafter\n"
    once = script.with_table(page, rows)
    assert "| 5,000 | 4,997 | 3 | `abc` |" in once
    assert "| new | 1 | 1 | 0 | `def` |" in once
    assert "OUTDATED" not in once
    assert script.with_table(once, rows) == once


def test_the_page_is_of_the_committed_results():
    script = docs_script()
    page = (ROOT / "docs" / "trust.md").read_text()
    new = script.with_coverage(script.with_table(page, script.read(RESULTS)), script.read(script.COVERAGE))
    assert new == page, "run `python docs/trust.py`"


def test_every_row_is_described():
    script = docs_script()
    assert [row["row"] for row in script.read(RESULTS) if row["row"] not in script.DESCRIPTIONS] == []


def test_the_table_of_coverage_has_a_column_for_each_number_of_runs():
    script = docs_script()
    rows = [{"interval": name, "seeds": seeds, "tried": 1000, "held": held}
            for name, seeds, held in (("worst_group", 1, 950), ("worst_group", 2, 961), ("F1", 1, 940))]  # fmt: skip
    lines = script.coverage_table(rows).splitlines()
    assert lines[0] == "| Interval | 1 run | 2 runs |"
    assert lines[2:4] == ["| worst group | 95.0 | 96.1 |", "| F1 | 94.0 | – |"]
    assert "of 1,000 intervals" in lines[-1]
