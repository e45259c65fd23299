"""Work beside its forward passes: all of it is measured."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import speed_passes


def test_every_work_is_compared_with_its_passes(monkeypatch, tmp_path):
    given = ["--backbone", "nano", "--batch", "2", "--rounds", "1", "--out", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", ["speed_passes.py", *given])
    speed_passes.main()
    rows = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert {row["work"]: row["passes"] for row in rows} == {"A² pipeline": 2, "localize": 1, "leave-one-out": 6}
    assert all(row["met"] == (row["ratio"] <= row["goal"]) for row in rows)
