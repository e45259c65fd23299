"""Training across machines: two nodes in network namespaces of their own, stopped by SIGTERM; FSDP; as one run."""

import ctypes
import importlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from sightline.training.checkpoint import load_tensors

from ..small_runs import command_line, files, in_processes, log_of, loop

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Nodes:
    """Where two nodes run: in two network namespaces that see nothing but each other, or both on loopback."""

    names: tuple[str, ...]
    address: str | None

    def enter(self) -> None:
        """Move this process to the node of its rank."""
        if self.names:
            name = self.names[int(os.environ["RANK"])]
            os.environ["GLOO_SOCKET_IFNAME"] = name
            with Path("/run/netns", name).open() as namespace:
                assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) == 0


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def nodes() -> Generator[Nodes]:
    """Namespaces need root and iproute2; without, loopback is the network, and the rest of the test is the same."""
    names = tuple(f"sl{os.getpid() % 100000}{end}" for end in "ab")
    made = bool(shutil.which("ip")) and os.geteuid() == 0 and all(ip("netns", "add", name) for name in names)
    made = made and ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
    for k, name in enumerate(names if made else ()):
        made = made and ip("-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", name)
        made = made and all(ip("-n", name, "link", "set", device, "up") for device in ("lo", name))
    yield Nodes(names, "10.77.0.1") if made else Nodes((), None)
    for name in names:
        ip("netns", "del", name)


def stopped_at(count: int, rank: int, nodes: Nodes) -> None:
    """On its node, the process of this rank is sent SIGTERM, twice, in step `count`, as a launcher would repeat it."""
    nodes.enter()
    steps, real = [], loop().train_step
    importlib.import_module("sightline.training.stopping").SECONDS = 0  # agree after every step

    def train_step(*arguments):
        steps.append(1)
        if len(steps) == count and int(os.environ["RANK"]) == rank:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    loop().train_step = train_step


def on_nodes(nodes: Nodes, *command, prepare: Callable[[], None] | None = None) -> tuple[list[int], str]:
    return in_processes(2, *command, prepare=prepare or nodes.enter, address=nodes.address)


def test_a_run_of_two_nodes_that_is_stopped_and_requeued_ends_with_the_same_bits(toy, tmp_path, nodes):
    """Only the second node gets the signal; both save in the same step. The same command continues, as a requeued job
    does. With decoding processes, and noise in every step."""
    flags = ("--epochs", "2", "--ema", "0.9", "--resume", "--deterministic")
    codes, errors = on_nodes(nodes, *command_line(toy, tmp_path / "whole", *flags))
    assert codes == [0, 0], errors[-3000:]
    command = command_line(toy, tmp_path / "stopped", *flags)
    codes, errors = on_nodes(nodes, *command, prepare=partial(stopped_at, 2, 1, nodes))
    assert codes == [130, 130], errors[-3000:]
    assert errors.count("stopped; continue with --resume") == 2
    _, facts = load_tensors(tmp_path / "stopped" / "last.safetensors")
    assert (facts["epoch"], facts["step"]) == (0, 2)
    assert not (tmp_path / "stopped" / "metrics.json").exists()
    codes, errors = on_nodes(nodes, *command)
    assert codes == [0, 0], errors[-3000:]
    whole, stopped = files(tmp_path / "whole"), files(tmp_path / "stopped")
    assert [name for name in whole if whole[name] != stopped[name]] == []


def test_fsdp_trains_as_ddp_does_and_shares_its_checkpoints(toy, tmp_path):
    """The second epoch is trained with the other of the two, from the same checkpoint."""
    flags = ("--epochs", "2", "--save-minutes", "0")
    stop = partial(stopped_at, 4, 0, Nodes((), None))
    for name, first, second in (("ddp", (), ()), ("fsdp", ("--fsdp",), ("--fsdp",)), ("mixed", ("--fsdp",), ())):
        command = command_line(toy, tmp_path / name, *flags)
        if name == "mixed":
            codes, errors = in_processes(2, *command, *first, prepare=stop)
            assert codes == [130, 130], errors[-3000:]
        codes, errors = in_processes(2, *command, *second, "--resume")
        assert codes == [0, 0], errors[-3000:]
    one, _ = load_tensors(tmp_path / "ddp" / "last.safetensors")
    for name in ("fsdp", "mixed"):
        other, _ = load_tensors(tmp_path / name / "last.safetensors")
        assert {key: value.shape for key, value in other.items()} == {key: value.shape for key, value in one.items()}
        for key, tensor in one.items():
            torch.testing.assert_close(tensor, other[key], rtol=1e-2, atol=2e-4)
        for mine, theirs in zip(log_of(tmp_path / "ddp"), log_of(tmp_path / name), strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_fsdp_is_refused_where_it_would_not_work(toy, tmp_path):
    codes, errors = in_processes(1, *command_line(toy, tmp_path / "one", "--fsdp"))
    assert codes == [2], errors
    assert "--fsdp: divides a model among processes, and there is only one" in errors
    codes, errors = in_processes(2, *command_line(toy, tmp_path / "ema", "--fsdp", "--ema", "0.9"))
    assert codes == [2, 2], errors
    assert "--fsdp: not with --ema" in errors
