"""The command line: every command is a dataclass of `config`; its code is `run_command` in the module of its name.

Only the module of the chosen command is imported, so that help does not import torch.
"""

from __future__ import annotations

import atexit
import difflib
import errno
import gc
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import tyro

from . import config
from .config.flags import flag_names
from .config.limits import raising_afterwards
from .config.recipes import with_recipe
from .console.files import guarding
from .console.printable import only_printable
from .console.terminal import SCREEN, fail
from .errors import UserError
from .methods import trainable_methods

ABOUT = "Image classifiers that can only see what they show you."


@dataclass(frozen=True)
class Command:
    """The dataclass of its flags, and the module with its `run_command`."""

    config: type
    module: str

    @property
    def help(self) -> str:
        """The first line of the configuration's docstring."""
        return (self.config.__doc__ or "").strip().splitlines()[0]


COMMANDS = {
    "demo": Command(config.Demo, "demo"),
    "check": Command(config.Check, "data.check"),
    "train": Command(config.Train, "train"),
    "evaluate": Command(config.Suite, "evaluate"),
    "compare": Command(config.Compare, "compare"),
    "predict": Command(config.Predict, "predict"),
    "embed": Command(config.Embed, "batch.embed"),
    "verify": Command(config.Verify, "verify.verify"),
    "audit": Command(config.Audit, "report.audit"),
    "app": Command(config.App, "app.app"),
    "intervene": Command(config.Intervene, "intervene"),
    "strips": Command(config.Strips, "report.strips"),
    "localize": Command(config.Localize, "explain.localize"),
    "shape": Command(config.Shape, "explain.shape"),
    "stress": Command(config.Stress, "explain.stress"),
    "bench": Command(config.Bench, "bench.bench"),
    "matrix": Command(config.Matrix, "matrix.matrix"),
    "pretrain": Command(config.Pretrain, "pretrain"),
    "backbones": Command(config.Backbones, "vit.backbones"),
    "distill": Command(config.Distill, "methods.distill"),
    "export": Command(config.Export, "export.export"),
    "push": Command(config.Push, "export.push"),
    "import": Command(config.Import, "methods.import_"),
    "data": Command(config.Data, "datasets.data"),
    "toy": Command(config.Toy, "datasets.toy"),
    "convert": Command(config.Convert, "datasets.convert"),
}


def main() -> None:
    """Exit code 0: success. 1: success, with a negative finding. 2: the command could not be carried out."""
    name = ""
    try:
        name, command = parse(sys.argv[1:])
        SCREEN.quiet = getattr(command, "quiet", False)
        with guarding(command), only_printable():
            code = importlib.import_module(f".{COMMANDS[name].module}", __package__).run_command(command)
        atexit.register(leave_process_group)
        sys.exit(code)
    except UserError as error:
        sys.exit(fail(str(error), 2))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        sys.exit(fail(f"{name}: not enough memory ({one_line(error)}); use smaller images or batches", 2))
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        sys.exit(fail(f"{name}: {system_error(error)}", 2))
    except KeyboardInterrupt:
        sys.exit(fail("stopped; continue with --resume" if name in ("train", "pretrain") else "stopped", 130))


def out_of_memory(error: BaseException) -> bool:
    """PyTorch has an error of its own for the GPU, and a RuntimeError for the CPU."""
    kind = type(error).__name__
    return isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)


def system_error(error: OSError) -> str:
    """What the system refused, and for which file."""
    file = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    remedies = {errno.ENOSPC: "free space, or choose another folder", errno.EACCES: "change its permissions"}
    remedy = remedies.get(error.errno or 0, "check the path, its permissions and the free space")
    return f"{file}{error.strerror or one_line(error)}; {remedy}"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def parse(arguments: list[str]) -> tuple[str, Any]:
    """The command's name, and its configuration."""
    commands = {name: command.help for name, command in COMMANDS.items()}
    name, rest = choose("sightline", ABOUT, "COMMAND", commands, arguments)
    if name != "train":
        return name, parse_flags(COMMANDS[name].config, f"sightline {name}", rest)
    methods = {name: entry.help for name, entry in trainable_methods().items()}
    method, rest = choose("sightline train", COMMANDS["train"].help, "METHOD", methods, rest)
    return name, parse_flags(trainable_methods()[method].config, f"sightline train {method}", rest)


def choose(prog: str, about: str, what: str, choices: dict[str, str], arguments: list[str]) -> tuple[str, list[str]]:
    """The first argument, which must be one of the choices, and the rest; with --help, the list of choices."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print_choices(prog, about, what, choices)
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version" and prog == "sightline":
        from . import __version__

        print(f"sightline {__version__}")
        sys.exit(0)
    if arguments[0] not in choices:
        near = difflib.get_close_matches(arguments[0], choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"`{prog} --help` lists them"
        raise UserError(f"{prog}: unknown {what.lower()} {arguments[0]}; {hint}")
    return arguments[0], arguments[1:]


def print_choices(prog: str, about: str, what: str, choices: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for name, help_ in choices.items():
        table.add_row(name, help_)
    console = Console(highlight=False)
    console.print(f"usage: {prog} {what} ...\n\n{about}\n", markup=False)
    console.print(table)
    console.print(f"\nFor its flags: {prog} {what} --help", markup=False)


def parse_flags(kind: type, prog: str, arguments: list[str]) -> Any:
    """The configuration; an unknown flag is an error of one line that names the nearest known one."""
    known = {"--help", *flag_names(kind)}
    for argument in arguments:
        if argument == "--":
            break
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag.replace("_", "-") not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"`{prog} --help` lists the flags"
            raise UserError(f"{prog}: unknown flag {flag}; {hint}")
    with raising_afterwards():
        return tyro.cli(kind, prog=prog, args=with_recipe(kind, arguments))


def leave_process_group() -> None:
    """With several processes: the threads that communicate must not outlive this process's work."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        gc.collect()  # models hold the process group, too
        distributed.destroy_process_group()
