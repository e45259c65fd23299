"""What tests share: real data and a browser where there are any, a toy dataset, a few trained runs."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import pytest
import torch

import sightline
from sightline.datasets.toy import write_toy
from sightline.vit.model import Input, ViT, ViTConfig

from .browser import chromium
from .commands import SMALL, typed
from .small_runs import files, small

if TYPE_CHECKING:
    from playwright.sync_api import Browser

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach out
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests, and the programs they start, run side by side
torch.set_num_threads(1)

SHARED = Path(os.environ.get("SIGHTLINE_SHARED", Path(__file__).parents[2] / "shared"))
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
PLAIN = Input(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def skip_or_fail(reason: str, required: str) -> NoReturn:
    """Skip a test for what this machine lacks; fail it where the environment variable `required` is set."""
    if os.environ.get(required):
        pytest.fail(reason)
    pytest.skip(reason)


def shared(*parts: str) -> Path:
    """A file of the shared data, or a skip that names what is missing."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        named = Path("shared", *parts)
        skip_or_fail(f"needs {named} (set SIGHTLINE_SHARED to the folder that holds it)", "SIGHTLINE_REQUIRE_DATA")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return failed_unless_for_a_gpu((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return failed_unless_for_a_gpu((yield))  # a whole file may be skipped, by importorskip


def failed_unless_for_a_gpu(report: Report) -> Report:
    """In CI (SIGHTLINE_ONLY_GPU_SKIPS) a test may be skipped for want of a GPU only: any other skip is a failure."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("SIGHTLINE_ONLY_GPU_SKIPS"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "GPU" not in reason:
            report.outcome, report.longrepr = "failed", f"{report.nodeid}: must not be skipped in CI. {reason}"
    return report


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


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Generator[None]:
    """No test cuts the power, and waiting until files are on the disk takes minutes in all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A small dataset on disk: 64 pixels, the background agrees with the class in nine images of ten."""
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=96, val=32, test=48)


@pytest.fixture(scope="session")
def runs(toy, tmp_path_factory) -> Path:
    """A linear probe, and ERM with two seeds, trained from the command line. Read-only."""
    folder = tmp_path_factory.mktemp("runs")
    one_epoch = ("erm", toy, *SMALL, "--epochs", 1)
    jobs = {"probe": ("probe", toy, *SMALL), "erm-0": one_epoch, "erm-1": (*one_epoch, "--seed", 1)}
    for name, arguments in jobs.items():
        assert typed("train", *arguments, "--out", folder / name)[0] == 0
    return folder


@pytest.fixture(scope="session")
def whole(request, toy, tmp_path_factory) -> dict[str, bytes]:
    """The files of an uninterrupted run of three epochs; `indirect` parametrisation changes its settings."""
    return files(sightline.train(small(toy, tmp_path_factory.mktemp("whole") / "run", **getattr(request, "param", {}))))


@pytest.fixture(scope="module")  # while it is open, Playwright's event loop is in the way of every other one
def browser() -> "Generator[Browser]":
    """Chromium, driven by Playwright; `make browser` installs it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'sightline[dev]'")
    executable = chromium()
    if executable is None:
        skip_or_fail("needs Chromium: make browser", "SIGHTLINE_REQUIRE_BROWSER")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
