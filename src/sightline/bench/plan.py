"""The runs of a benchmark: methods as the user writes them, hyperparameter grids, seeds, and a folder for each run."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from ..cli import parse_flags
from ..config import Train
from ..config.bench import Bench
from ..config.flags import flag_names
from ..config.relevance import Tuned
from ..errors import UserError
from ..methods import trainable_methods
from ..training.run_folder import NEUTRAL, read_run


@dataclass(frozen=True)
class Entry:
    """One method of the table; with a grid, one setting of it."""

    name: str
    config: Train  # of the first seed, without its folder
    after: str = ""  # the entry whose run it starts from
    origin: str = ""  # the text of the user, if this is one setting of its grid

    @property
    def key(self) -> str:
        """Identifies the settings that may change the result, whatever the seed."""
        neutral = NEUTRAL | {"seed"}
        settings = {name: value for name, value in asdict(self.config).items() if name not in neutral}
        text = json.dumps([self.config.method, settings], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class BenchRun:
    entry: Entry
    config: Train  # with seed and folder

    @property
    def name(self) -> str:
        return f"{self.entry.name}, seed {self.config.seed}"

    @property
    def finished(self) -> bool:
        path = self.config.folder
        if not (path / "metrics.json").is_file() or not (path / "run.json").is_file():
            return False
        return read_run(path).facts.get("state") == "finished"


def read_entries(command: Bench) -> list[Entry]:
    """Each method once, in the given order."""
    if not command.methods or not command.seeds:
        raise UserError("--methods, --seeds: name at least one of each")
    for listed, flag in ((command.methods, "--methods"), (command.seeds, "--seeds")):
        if twice := next((one for one in listed if listed.count(one) > 1), None):
            raise UserError(f"{flag} {twice}: given twice")
    known = {flag for method in trainable_methods().values() for flag in flag_names(method.config)}
    if unknown := next((flag for flag, _ in named_flags(command.flags) if flag not in known), None):
        raise UserError(f"--flags: no method has {unknown}; `sightline train METHOD --help` lists flags")
    entries = [entry for text in command.methods for entry in entries_of(text, command)]
    by_key: dict[str, Entry] = {}
    for entry in entries:
        if by_key.setdefault(entry.key, entry) is not entry:
            first = by_key[entry.key].name
            raise UserError(f"--methods: {first!r} and {entry.name!r} are the same settings; leave out one")
    names = {entry.name for entry in entries}
    for entry in entries:
        if entry.after in {other.origin for other in entries if other.origin}:
            raise UserError(
                f"{entry.name}: {entry.after} has a grid, so it is not known which run to start from; give its "
                "hyperparameters in its text"
            )
        if entry.after and entry.after not in names:
            raise UserError(f"{entry.name}: --init-from @{entry.after}: no such method here; add it to --methods")
    return entries


def entries_of(text: str, command: Bench) -> list[Entry]:
    """The entry of a text; with --grid, one for each setting of the method's grid that the text leaves open."""
    config, after = parse_method(text, command)
    grid = type(config).grid if command.grid else {}
    given = {flag.partition("=")[0].lstrip("-").replace("-", "_") for flag in shlex.split(text) if flag[:2] == "--"}
    free = {name: values for name, values in grid.items() if name not in given}
    if not free:
        return [Entry(text, config, after)]
    found = []
    for values in product(*free.values()):
        chosen = dict(zip(free, values, strict=True))
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
        found.append(Entry(f"{text} {flags}", replace(config, **chosen), after, origin=text))
    return found


def parse_method(text: str, command: Bench) -> tuple[Train, str]:
    """The configuration of a method with its flags, and the method whose run it starts from."""
    try:
        method, *own = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--methods {text!r}: {error}; write a method with its flags in quotes") from None
    methods = trainable_methods()
    if method not in methods:
        raise UserError(f"--methods {text!r}: unknown method {method}; choose among {', '.join(methods)}")
    kind = methods[method].config
    shared = shared_flags(command, set(flag_names(kind)), own)
    config = parse_flags(kind, f"--methods {text!r}", [str(command.data), *shared, *own])
    origin = (config.init_from or "") if isinstance(config, Tuned) else ""
    if origin and "--backbone" not in own:
        config = replace(config, backbone="")
    return config, origin[1:] if origin.startswith("@") else ""


def shared_flags(command: Bench, known: set[str], own: list[str]) -> list[str]:
    """Flags of the command that the method has and its own flags do not set."""
    values = {
        "--backbone": command.backbone, "--layout": command.layout, "--split-seed": command.split_seed,
        "--workers": command.workers, "--device": command.device, "--precision": command.precision,
        "--cache": command.cache or command.folder / "cache",
    }  # fmt: skip
    set_here = {flag.partition("=")[0] for flag in own if flag.startswith("--")}
    given = named_flags(command.flags)
    found = {flag: str(value) for flag, value in values.items() if value is not None} | dict(given)
    return [word for flag, text in found.items() if flag in known and flag not in set_here for word in (flag, text)]


def named_flags(texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """Flags and their values, of NAME=VALUE."""
    found = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UserError(f"--flags {text}: write NAME=VALUE, such as epochs=10")
        found.append((f"--{name.lstrip('-').replace('_', '-')}", value))
    return found


# ---- runs ------------------------------------------------------------------------------------------------------------


def runs_of(entries: list[Entry], seeds: tuple[int, ...], command: Bench) -> list[BenchRun]:
    """Seed by seed, so that each method has one as early as possible; what others start from comes first."""
    ordered = sorted(entries, key=lambda entry: bool(entry.after))
    return [BenchRun(entry, config_of(entry, entries, seed, command)) for seed in seeds for entry in ordered]


def with_starts(some: list[Entry], entries: list[Entry]) -> list[Entry]:
    """These entries, and those whose runs they start from."""
    starts = {entry.after for entry in some}
    return [entry for entry in entries if entry.name in starts and entry not in some] + some


def config_of(entry: Entry, entries: list[Entry], seed: int, command: Bench) -> Train:
    config = replace(entry.config, seed=seed, out=folder_of(entry, seed, command), resume=True)
    if entry.after:
        start = next(other for other in entries if other.name == entry.after)
        config = replace(config, init_from=str(folder_of(start, seed, command)))
    return config


def folder_of(entry: Entry, seed: int, command: Bench) -> Path:
    """With other settings, another folder: nothing is overwritten."""
    name = re.sub(r"[^\w.=+-]+", "-", entry.name.replace("--", ""))[:60].strip("-.")
    return command.folder / "runs" / f"{name}-{entry.key}-{seed}"


def parse_shard(text: str | None) -> tuple[int, int]:
    """(number, count) of I/N."""
    if text is None:
        return 0, 1
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise UserError(f"--shard {text}: write I/N with I from 0 to N - 1, such as 0/8")
    return int(found[1]), int(found[2])
