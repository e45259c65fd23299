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
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    assert script.with_table(page, rows) == page, "run `python docs/trust.py`"
