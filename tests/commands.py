"""Commands as a user types them, run in this process."""

import contextlib
import io
import sys

import pytest

from sightline import cli

SMALL = ("--backbone", "random:nano", "--workers", 0, "--device", "cpu", "--batch", 16)
QUICK = ("--workers", 0, "--device", "cpu")


def typed(*arguments) -> tuple[int, str, str]:
    """Exit code, output and errors of `sightline ARGUMENTS`, on a screen wide enough not to wrap."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["sightline", *map(str, arguments)])
        patch.setenv("COLUMNS", "250")
        try:
            cli.main()
        except SystemExit as exit_:
            return int(exit_.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("every command ends with an exit code")
