"""200 faults in every CI run; thousands with `python -m tests.faults --many 5000`."""

from functools import partial

import pytest

from sightline import cli

from .child import NO_FAULT, Fault, run_in_child
from .session import KINDS, Session, Trial, damage
from .workspace import COMMANDS, digests, make_workspace

CHUNKS, FAULTS = 4, 50
ELSEWHERE = {
    "stress": "writes as shape does, and slowly",
    "strips": "needs runs with parts",
    "intervene": "needs runs with parts",
    "bench": "trains as `train` does, several times",
    "distill": "needs runs with parts, and trains",
    "demo": "runs the others, for minutes",
    "pretrain": "trains as `train erm` does",
    "embed": "writes as predict does",
    "data": "needs published bird cut-outs",
    "convert": "needs published files",
    "import": "needs a published checkpoint",
    "app": "serves pages",
    "push": "needs a hub",
    "backbones": "writes nothing",
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def new_session(workspace, tmp_path_factory):
    """Sessions that share what the commands do without a fault."""
    return partial(Session, workspace, tmp_path_factory.mktemp("home"), slow=0.02, references={})


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_is_lost_or_mislabelled_whatever_goes_wrong(new_session, chunk):
    """With a fixed seed."""
    session = new_session(seed=chunk)
    failures = [failure for trial in session.trials(FAULTS) if (failure := session.run(trial)) is not None]
    assert not failures, "\n".join(f"{failure.trial}: {failure.reason}" for failure in failures)


def test_every_command_is_tried_or_has_a_reason_why_not():
    tried = {arguments[0] for arguments in COMMANDS.values()}
    assert tried | {*ELSEWHERE} == {*cli.COMMANDS}
    assert not tried & {*ELSEWHERE}


# ---- the harness itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code"),
    [(NO_FAULT, 0), (Fault("kill-at", 0), -9), (Fault("kill", after=0.0), -9), (Fault("error", 0, 28), 2),
     (Fault("read-only", 0, 30), 2), (Fault("disk", size=100), 2)],
)  # fmt: skip
def test_faults_happen(workspace, tmp_path, fault, code):
    session = Session(workspace, tmp_path, seed=0, slow=0)
    assert set(KINDS) == {"kill", "kill-at", "error", "read-only", "disk", "damage"}
    before = digests(workspace)
    ended = run_in_child((*COMMANDS["compare"][:-1], tmp_path / "out.json"), workspace, fault)
    assert ended.code == code, ended.stderr
    assert digests(workspace) == before
    assert session.before == before


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("compared.json", "neither what it was nor"),
        ("erm/metrics.json", "neither what it was nor"),
        ("data", "is gone"),
    ],
)
def test_what_must_not_happen_would_be_found(workspace, tmp_path, monkeypatch, path, reason):
    """Half a result, a changed file that the command does not own, a lost file."""
    session, trial = Session(workspace, tmp_path, seed=0, slow=0), Trial("compare", Fault("kill-at", 3, 28))
    session.reference("compare")

    def breaks(arguments, home, fault=NO_FAULT, limit=0.0):
        if path == "data":
            (home / "data" / "rows.csv").unlink()
        else:
            (home / path).write_text("half")
        return run_in_child(arguments, home, fault)

    monkeypatch.setattr("tests.faults.session.run_in_child", breaks)
    failure = session.run(trial)
    assert failure is not None
    assert reason in failure.reason


def test_damage_is_done(tmp_path):
    import random

    for how in ("flip", "cut", "empty", "remove", "garbage"):
        (tmp_path / "f").write_bytes(bytes(range(100)))
        damage(tmp_path / "f", how, random.Random(0))
        assert not (tmp_path / "f").exists() or (tmp_path / "f").read_bytes() != bytes(range(100))
