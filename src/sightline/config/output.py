"""What a command prints."""

from __future__ import annotations

from dataclasses import dataclass

from .limits import Checked


@dataclass(frozen=True, kw_only=True)
class Output(Checked):
    """Settings of all commands that print a table."""

    quiet: bool = False
    """Print nothing but errors: no table, no progress."""
    json: bool = False
    """Print the result as JSON on standard output, in place of tables; progress stays on standard error."""
