"""What each command does: reads its question, has it answered, prints what a person wants to know.

Heavy imports wait until a command is chosen. 0: as it should be. 1: the answer is bad news. 2: the question was.
"""

from .making import backbones, check, convert, data, demo, import_, pretrain, toy, train
from .measuring import compare, evaluate, localize, matrix, predict, shape, stress, suite, verify
from .showing import app, audit, export, intervene, push, strips

__all__ = [
    "app",
    "audit",
    "backbones",
    "check",
    "compare",
    "convert",
    "data",
    "demo",
    "evaluate",
    "export",
    "import_",
    "intervene",
    "localize",
    "matrix",
    "predict",
    "pretrain",
    "push",
    "shape",
    "stress",
    "strips",
    "suite",
    "toy",
    "train",
    "verify",
]
