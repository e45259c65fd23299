"""Defaults that depend on the machine."""

from __future__ import annotations

import os

MOST_WORKERS = 8  # more hardly help one training, and each takes memory


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """One data-loading process per core, but at least two, so that loading also overlaps with a single core's waits."""
    return min(MOST_WORKERS, max(2, available_cores()))
