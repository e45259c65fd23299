"""Result files: figures with the command, the commit and the machine that made them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

NUMBERS = re.compile(r"\[\s[-\d.,e\s]+\]")  # lists of them, such as intervals, which are read in one line


def record(path: Path, device: str, content: dict[str, Any]) -> None:
    commit = _git("rev-parse", "HEAD") or os.environ.get("SIGHTLINE_COMMIT", "")  # for a machine without the history
    changed = [line for line in _git("status", "--porcelain", "--", "src", "benchmarks/*.py").splitlines() if line]
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    facts = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_without_folders, sys.argv[1:])]),
        "commit": (commit or "unknown") + (" with changes" if changed else ""),
        "device": cpu if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts | content, indent=1, ensure_ascii=False) + "\n"
    path.write_text(NUMBERS.sub(lambda found: " ".join(found[0].split()), text), encoding="utf-8")


def _git(*arguments: str) -> str:
    """Of this project, wherever it is called from."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _without_folders(argument: str) -> str:
    """Other people have other folders."""
    return Path(argument).name if "/" in argument else argument
