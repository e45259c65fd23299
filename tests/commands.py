"""Commands as a user types them, run in this process, and the data they are run on."""

import contextlib
import csv
import io
import json
import shutil
import sys

import pytest

from sightline import cli

SMALL = ("--backbone", "random:nano", "--size", 32, "--workers", 0, "--device", "cpu", "--batch", 16)
QUICK = ("--workers", 0, "--device", "cpu")


def typed(*arguments) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `sightline ARGUMENTS`, on a terminal wide enough not to wrap."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["sightline", *map(str, arguments)])
        patch.setenv("COLUMNS", "250")
        try:
            cli.main()
        except SystemExit as exit_:
            return int(exit_.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("every command ends with an exit code")


def toy_pictures(toy, folder, count=12, column=None):
    """Some of the toy images as class folders; with a group column of this name also as rows.csv."""
    folder.mkdir(parents=True)
    lines = [f"image,label,{column}"]
    with (toy / "rows.csv").open(newline="") as file:
        for i, row in enumerate(list(csv.DictReader(file))[:count]):
            target = folder / row["label"] / f"{i}.png"
            target.parent.mkdir(exist_ok=True)
            shutil.copy(toy / row["image"], target)
            lines.append(f"{row['label']}/{i}.png,{row['label']},{'odd' if i % 2 else 'even'}")
    if column:
        (folder / "rows.csv").write_text("\n".join(lines))
    return folder


def edit(path, text):
    """Change a result by hand, which its checksum would otherwise reveal."""
    path.write_text(text)
    path.with_name(f"{path.name}.sha256").unlink(missing_ok=True)


def copied(run, folder, **facts):
    """A copy of a run with other facts in its run.json."""
    shutil.copytree(run, folder)
    known = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**known, **facts}))
    return folder
