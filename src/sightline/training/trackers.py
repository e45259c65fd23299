"""The figures of a run as TensorBoard draws them, for who asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ..errors import UserError
from .run_folder import Run

Board = Callable[[str, float, int], object]  # is told a name, a figure and the epoch


def tensorboard(run: Run, wanted: bool, to_close: ExitStack) -> Board:
    if not wanted:
        return lambda *_: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard: install it first: pip install 'sightline[tensorboard]'") from None
    writer = SummaryWriter(str(run.folder / "tensorboard"))
    to_close.callback(writer.close)
    return writer.add_scalar
