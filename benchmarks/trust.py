"""The results of the long sessions of tests/faults, tests/hostile and others: one object per row in trust.json."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "trust.json"


def record(path: Path, row: str, tried: int, failed: int) -> None:
    """Add a row, or replace the row of this name."""
    rows = json.loads(path.read_text()) if path.exists() else []
    new = {"row": row, "tried": tried, "failed": failed, "commit": commit()}
    at = next((i for i, old in enumerate(rows) if old["row"] == row), len(rows))
    rows[at : at + 1] = [new]
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


@cache
def commit() -> str:
    """Of the code that is tested, as it is when this is called first: long sessions do so when they begin. With a plus
    sign if it has changes that are not committed. SIGHTLINE_COMMIT is for a machine without the history."""
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout.strip()

    known = git("rev-parse", "--short=12", "HEAD") or os.environ.get("SIGHTLINE_COMMIT", "unknown")[:12]
    return known + ("+" if git("status", "--porcelain", "--", "src") else "")
