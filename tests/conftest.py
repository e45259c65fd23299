"""Where tests find real data, and small things they share."""

import os
from pathlib import Path

import pytest
import torch

import sightline
from sightline.datasets.toy import write_toy
from sightline.vit.model import Input, ViT, ViTConfig

from .commands import SMALL, typed
from .small_runs import files, small

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach out
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests, and the programs they start, run side by side
torch.set_num_threads(1)

SHARED = Path(os.environ.get("SIGHTLINE_SHARED", Path(__file__).parents[2] / "shared"))
PLAIN = Input(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def shared(*parts: str) -> Path:
    """A file of the shared data, or a skip that says what is missing."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        reason = f"needs {Path('shared', *parts)} (set SIGHTLINE_SHARED to the folder that holds it)"
        if os.environ.get("SIGHTLINE_REQUIRE_DATA"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def small_vit(seed: int = 0, **changes) -> ViT:
    """A tiny ViT with weights large enough that every token matters."""
    settings = {"width": 32, "depth": 3, "heads": 4, "patch": 8, "grid": (4, 4), "registers": 2, "classes": 5}
    vit = ViT(ViTConfig(**settings | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            scale = 1.0 if "token" in name or "pos_embed" in name else parameter[0].numel() ** -0.5
            centre = 1.0 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "gamma")) else 0.0
            parameter.normal_(centre, scale if parameter.ndim > 1 else 0.1, generator=generator)
    return vit.eval()


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A small data set on disk: 64 pixels, the shortcut right nine times out of ten."""
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=96, val=32, test=48)


@pytest.fixture(scope="session")
def runs(toy, tmp_path_factory) -> Path:
    """A probe, and two seeds of ERM, trained from the command line. Not to be written to."""
    folder = tmp_path_factory.mktemp("runs")
    one_epoch = ("erm", toy, *SMALL, "--epochs", 1)
    jobs = {"probe": ("probe", toy, *SMALL), "erm-0": one_epoch, "erm-1": (*one_epoch, "--seed", 1)}
    for name, told in jobs.items():
        assert typed("train", *told, "--out", folder / name)[0] == 0
    return folder


@pytest.fixture(scope="session")
def whole(request, toy, tmp_path_factory) -> dict[str, bytes]:
    """The files of a run of three epochs that nothing interrupted, perhaps with other settings."""
    return files(sightline.train(small(toy, tmp_path_factory.mktemp("whole") / "run", **getattr(request, "param", {}))))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
