"""TensorBoard logging of a run, with --tensorboard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ..errors import UserError
from .run_folder import Run

LogScalar = Callable[[str, float, int], object]  # takes a name, a value and the epoch


def tensorboard_logger(run: Run, wanted: bool, to_close: ExitStack) -> LogScalar:
    if not wanted:
        return lambda *_: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard: not installed; pip install 'sightline[tensorboard]'") from None
    writer = SummaryWriter(str(run.folder / "tensorboard"))
    to_close.callback(writer.close)
    return writer.add_scalar
