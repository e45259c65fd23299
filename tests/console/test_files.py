"""No command writes over what it reads or what is not its own; every file is written whole or not at all."""

import errno
import os
import re
import stat
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from PIL import Image

from sightline import cli
from sightline.config.flags import POSITIONAL, Writes, output_mark
from sightline.console import files
from sightline.console.files import append_line, claim, guarding, protect, replace_durably, save_image, write
from sightline.errors import UserError
from sightline.methods import trainable_methods
from sightline.training.checkpoint import save_tensors

from ..commands import typed

SOURCE = Path(cli.__file__).parent
KINDS = {name: command.config for name, command in cli.COMMANDS.items() if name != "train"}
KINDS |= {f"train {name}": method.config for name, method in trainable_methods().items()}
INPUTS = {
    "run", "runs", "data", "images", "masks", "mask", "more_backbones", "cub", "scenes", "class_names", "file",
    "suite_folder",
}  # fmt: skip


def outputs() -> dict[str, tuple[type, str, Writes]]:
    """Every flag of every command that names what is written."""
    found = {}
    for name, kind in KINDS.items():
        for field, hint in get_type_hints(kind, include_extras=True).items():
            if (mark := output_mark(hint)) is not None:
                found[f"{name} --{field.replace('_', '-')}"] = kind, field, mark
    return found


OUTPUTS = outputs()
CHECKED = {name: output for name, output in OUTPUTS.items() if output[2].files}


def names_path(hint) -> bool:
    return hint is Path or any(names_path(argument) for argument in get_args(hint))


def needed_arguments(kind: type, without: str) -> list[str]:
    """Something for every argument that a command needs, so that its flags can be parsed."""
    hints, arguments = get_type_hints(kind, include_extras=True), []
    for field in fields(kind):
        if field.name == without or field.default is not MISSING or field.default_factory is not MISSING:
            continue
        hint = hints[field.name]
        marks, plain = getattr(hint, "__metadata__", ()), get_args(hint)[0] if get_origin(hint) else hint
        value = str(get_args(plain)[0]) if get_origin(plain) is Literal else "nowhere"
        arguments += [value] if POSITIONAL in marks else [f"--{field.name.replace('_', '-')}", value]
    return arguments


def command_line(name: str, path: Path) -> list[str]:
    kind, field, _ = OUTPUTS[name]
    command = name.split(" --")[0].split(" ")
    return [*command, *needed_arguments(kind, field), f"--{field.replace('_', '-')}", str(path)]


# ---- every command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_every_path_that_a_command_takes_is_an_input_or_marked_as_an_output(name):
    """An output that is not marked would be taken for an input, and the command could not write it."""
    hints = get_type_hints(KINDS[name], include_extras=True)
    unmarked = {field for field, hint in hints.items() if names_path(hint) and output_mark(hint) is None}
    assert unmarked <= INPUTS, "mark it with Writes(...), or add it to INPUTS if the command only reads it"


def test_the_commands_with_output_files_are_those_known_today():
    methods = {name for name in CHECKED if name.startswith("train ")}
    assert {name.split(" --")[0] for name in methods} == {f"train {name}" for name in trainable_methods()}
    assert set(CHECKED) - methods == {
        "check --out", "evaluate --out", "compare --out", "compare --class-changes", "predict --out", "verify --out",
        "audit --out", "strips --out", "localize --out", "shape --out", "stress --out", "matrix --out",
        "pretrain --out", "export --out", "distill --out", "import --out", "bench --out",
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CHECKED if not name.startswith("train ") or "train erm" in name])
def test_no_command_replaces_a_file_that_is_not_its_own(name, tmp_path):
    """Refused before anything else is looked at, with one line."""
    for i, pattern in enumerate(CHECKED[name][2].files):
        path = tmp_path / str(i)
        precious = path / pattern.replace("*", "x") if pattern else path.with_suffix(".json")
        precious.parent.mkdir(parents=True, exist_ok=True)
        precious.write_text('{"mine": 1}\n')
        code, out, err = typed(*command_line(name, path if pattern else precious))
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert f"{precious}: exists, and is not of this command" in err
        assert precious.read_text() == '{"mine": 1}\n'


@pytest.mark.parametrize("name", ["check --out", "compare --out", "verify --out", "audit --out"])
def test_a_folder_or_a_device_is_no_output_file(name, tmp_path):
    assert "it is a folder" in typed(*command_line(name, tmp_path))[2]
    assert "not a regular file" in typed(*command_line(name, Path(os.devnull)))[2]
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_nothing_is_written_past_the_guard():
    """Every module writes with the functions of console/files.py."""
    past = re.compile(
        r"\.write_text\(|\.write_bytes\(|savefig\(|save_file\(|torch\.save\(|np\.save|\.tofile\("
        r"|open\([^)]*[\"'](w|a|x|r\+)[b+]*[\"']|\.save\((folder|path|file|partial|self|command)"
    )
    allowed = {"console/files.py", "data/cache.py", "training/run_lock.py", "bench/running.py"}  # names of their own
    found = []
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            known = (
                "partial" in line
                or "savefig(held," in line
                or re.search(r"(certificate|leak|complete|viewer|Intervention\(.*\))\.save\(", line)
            )
            if past.search(line) and name not in allowed and not known:
                found.append(f"{name}:{number}: {line.strip()}")
    assert found == []


# ---- the guard -------------------------------------------------------------------------------------------------------


@pytest.fixture
def photo(tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "images" / "x.png")
    return tmp_path / "images" / "x.png"


def test_an_input_is_never_replaced_whatever_it_is_called(photo, tmp_path):
    before = photo.read_bytes()
    (tmp_path / "link.png").symlink_to(photo)
    os.link(photo, tmp_path / "hard.png")
    names = [photo, tmp_path / "images" / ".." / "images" / "x.png", tmp_path / "link.png", tmp_path / "hard.png"]
    for given in ([photo], lambda: iter([photo])):
        with guarding(None):
            protect(given, "an image")
            for name in names:
                with pytest.raises(UserError, match="is an image, which this command reads"):
                    save_image(name, Image.new("RGB", (8, 8)))
            save_image(tmp_path / "other.png", Image.new("RGB", (8, 8)))
    assert photo.read_bytes() == before
    save_image(photo, Image.new("RGB", (8, 8)))  # no command is running


def test_overlays_go_into_their_folder_and_over_nothing_but_overlays(photo, tmp_path):
    save_image(tmp_path / "out" / "mine.png", Image.new("RGB", (8, 8)))
    claim(tmp_path / "out", ["mine.png", "new/a.png"])
    with pytest.raises(UserError, match=r"x\.png: is outside"):
        claim(tmp_path / "out", ["../images/x.png"])
    with pytest.raises(UserError, match="exists, and was not written by this command"):
        claim(tmp_path / "images", ["x.png"])
    (tmp_path / "out" / "sub").symlink_to(tmp_path / "images")
    with pytest.raises(UserError, match="is outside"):
        claim(tmp_path / "out", ["sub/new.png"])


def test_what_is_written_through_a_link_replaces_the_file_and_not_the_link(tmp_path):
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "t.json", "old")
    (tmp_path / "t.json").symlink_to(tmp_path / "real" / "t.json")
    write(tmp_path / "t.json", "new")
    assert (tmp_path / "t.json").is_symlink()
    assert (tmp_path / "real" / "t.json").read_text() == "new"


# ---- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_write_that_fails_leaves_the_old_file_whole(step, code, tmp_path, monkeypatch):
    write(tmp_path / "t.json", "old")

    def fails(*_, **__):
        raise OSError(code, os.strerror(code))

    owner, name = {"write": (Path, "write_text"), "fsync": (os, "fsync"), "replace": (Path, "replace")}[step]
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(UserError, match=r"t\.json: cannot be written"):
        write(tmp_path / "t.json", "new" * 1000)
    assert (tmp_path / "t.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_files_are_synced_before_they_are_renamed_and_their_folder_after(tmp_path, monkeypatch):
    calls, real_sync, real_replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(stat.S_ISDIR(os.fstat(fd).st_mode)), real_sync(fd)))
    monkeypatch.setattr(Path, "replace", lambda *both: (calls.append("renamed"), real_replace(*both))[1])
    write(tmp_path / "t.json", "x")
    assert calls == [False, "renamed", True]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_every_file_has_the_mode_of_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        write(tmp_path / "t.json", "x")
        save_tensors(tmp_path / "w.safetensors", {"a": torch.zeros(3)}, {})
    finally:
        os.umask(before)
    for name in ("t.json", "w.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    code = (
        "import os; from pathlib import Path; from sightline.console.files import replace_durably\n"
        "replace_durably(Path('t.json'), lambda partial: (partial.write_text('half'), os.kill(os.getpid(), 9)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == -9
    (left,) = tmp_path.iterdir()
    living = tmp_path / f"t.json.{files.mark_of_process()}-0.partial"
    mine = tmp_path / "notes.partial"
    living.touch(), mine.touch()
    write(tmp_path / "t.json", "whole")
    assert not left.exists()
    assert living.exists()
    assert mine.exists(), "not a name that we give"


def test_a_line_is_added_after_half_a_line(tmp_path):
    log = tmp_path / "log.jsonl"
    append_line(log, "1")
    with log.open("a") as file:
        file.write("half")
    append_line(log, "2")
    assert log.read_text() == "1\nhalf\n2\n"


def test_a_name_of_many_characters_can_be_written(tmp_path):
    path = tmp_path / f"{'n' * 240}.json"
    replace_durably(path, lambda partial: partial.write_text("x"))
    assert path.read_text() == "x"
