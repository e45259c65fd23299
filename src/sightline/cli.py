"""The command line: every command is a dataclass of `config`, and what it does is in `commands`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import Annotated

import tyro

from . import commands
from .config import (
    A2,
    S2,
    A2Adapter,
    A2Dfr,
    A2Zs,
    Aim,
    App,
    Audit,
    Backbones,
    CentreCrop,
    Check,
    Compare,
    Convert,
    Cvar,
    Data,
    Demo,
    Dfr,
    EarlyMask,
    Ep,
    Erm,
    Evaluate,
    Export,
    Gradmask,
    Groupdro,
    Ifam,
    Import,
    Intervene,
    Jtt,
    LateMask,
    Lff,
    Localize,
    Masktune,
    Matrix,
    Pdiscoformer,
    Predict,
    Pretrain,
    Probe,
    Push,
    RandomCrop,
    Robustvit,
    Rrr,
    Shape,
    Stress,
    Strips,
    Suite,
    Toy,
    Train,
    Ttr,
    Verify,
    Zs,
)  # fmt: skip
from .console import fail
from .errors import UserError

sub = tyro.conf.subcommand
Command = (
    Annotated[Check, sub("check")]
    | Annotated[
        Annotated[Erm, sub("erm")]
        | Annotated[Probe, sub("probe")]
        | Annotated[S2, sub("s2")]
        | Annotated[Dfr, sub("dfr")]
        | Annotated[Aim, sub("aim")]
        | Annotated[Ep, sub("ep")]
        | Annotated[A2, sub("a2")]
        | Annotated[A2Adapter, sub("a2-adapter")]
        | Annotated[A2Dfr, sub("a2-dfr")]
        | Annotated[A2Zs, sub("a2-zs")]
        | Annotated[CentreCrop, sub("centre-crop")]
        | Annotated[RandomCrop, sub("random-crop")]
        | Annotated[Zs, sub("zs")]
        | Annotated[Ttr, sub("ttr")]
        | Annotated[Ifam, sub("ifam")]
        | Annotated[Pdiscoformer, sub("pdiscoformer")]
        | Annotated[EarlyMask, sub("early-mask")]
        | Annotated[LateMask, sub("late-mask")]
        | Annotated[Groupdro, sub("groupdro")]
        | Annotated[Jtt, sub("jtt")]
        | Annotated[Cvar, sub("cvar")]
        | Annotated[Lff, sub("lff")]
        | Annotated[Robustvit, sub("robustvit")]
        | Annotated[Rrr, sub("rrr")]
        | Annotated[Gradmask, sub("gradmask")]
        | Annotated[Masktune, sub("masktune")],
        sub("train", description="Train a classifier."),
    ]
    | Annotated[Pretrain, sub("pretrain")]
    | Annotated[Data, sub("data")]
    | Annotated[Toy, sub("toy")]
    | Annotated[Convert, sub("convert")]
    | Annotated[Import, sub("import")]
    | Annotated[Suite, sub("evaluate")]
    | Annotated[Localize, sub("localize")]
    | Annotated[Matrix, sub("matrix")]
    | Annotated[Shape, sub("shape")]
    | Annotated[Stress, sub("stress")]
    | Annotated[Intervene, sub("intervene")]
    | Annotated[Strips, sub("strips")]
    | Annotated[Audit, sub("audit")]
    | Annotated[App, sub("app")]
    | Annotated[Predict, sub("predict")]
    | Annotated[Compare, sub("compare")]
    | Annotated[Verify, sub("verify")]
    | Annotated[Export, sub("export")]
    | Annotated[Push, sub("push")]
    | Annotated[Backbones, sub("backbones")]
    | Annotated[Demo, sub("demo")]
)


def main() -> None:
    command, about = None, "Image classifiers that can only see what they show you."
    try:
        command = tyro.cli(Command, prog="sightline", description=about)
        code = run(command)
        atexit.register(part_company)
        sys.exit(code)
    except UserError as error:
        sys.exit(fail(str(error), 2))
    except BrokenPipeError:  # whoever read along, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(fail("stopped; go on with --resume" if isinstance(command, Train) else "stopped", 130))


def part_company() -> None:
    """Where several processes worked together: threads that talk to the others must not outlive this one's work."""
    together = sys.modules.get("torch.distributed")
    if together is not None and together.is_available() and together.is_initialized():
        gc.collect()  # models hold the group, too
        together.destroy_process_group()


def run(command) -> int:
    """0: as it should be. 1: the answer is bad news. 2: the question was."""
    actions = {
        Check: commands.check,
        Data: commands.data,
        Toy: commands.toy,
        Convert: commands.convert,
        Import: commands.import_,
        Backbones: commands.backbones,
        Pretrain: commands.pretrain,
        Train: commands.train,
        Evaluate: commands.evaluate,
        Suite: commands.suite,
        Localize: commands.localize,
        Matrix: commands.matrix,
        Shape: commands.shape,
        Stress: commands.stress,
        Intervene: commands.intervene,
        Strips: commands.strips,
        Audit: commands.audit,
        App: commands.app,
        Predict: commands.predict,
        Compare: commands.compare,
        Verify: commands.verify,
        Export: commands.export,
        Push: commands.push,
        Demo: commands.demo,
    }
    # Pretraining is a kind of training, and methods are: the nearest ancestor's action.
    return next(actions[kind] for kind in type(command).__mro__ if kind in actions)(command)
