"""The proof under stress: every method that claims to be blind is tried, a leak is counted, and no command line is
needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sightline.methods import METHODS
from sightline.sight import Sight
from sightline.verify.kernels import attention_kernels

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("_benchmarks_path")


@pytest.fixture
def _benchmarks_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


# Methods that hide nothing, and the one that is not blind: there is nothing to prove.
WHOLE_IMAGE = {
    "pdiscoformer", "late-mask", "robustvit", "rrr", "gradmask", "masktune", "erm", "probe", "s2", "aim", "ep", "dfr",
    "groupdro", "irm", "coral", "george", "jtt", "cvar", "lff", "zs", "pretrain",
}  # fmt: skip


def test_every_method_that_hides_is_tried():
    from proof_cases import MAKES

    tried = {config.method for _, config, _ in MAKES}
    assert tried >= {"ifam", "early-mask", "a2", "a2-dfr", "a2-zs", "a2-adapter", "centre-crop", "random-crop", "ttr"}
    assert not tried & WHOLE_IMAGE
    assert tried | WHOLE_IMAGE == {*METHODS}, "a new method hides something, or it is listed as hiding nothing"


def test_both_ways_of_hiding_are_tried(capsys):
    from proof_stress import parsed, prove

    arguments = parsed([
        "--methods", "early-mask, patches", "--architectures", "nano, 96 px", "--batches", "2", "--formats",
        "float32, bfloat16 autocast", "--redraws", "1", "--eager-only",
    ])  # fmt: skip
    found = prove(arguments)
    assert {row["hiding"] for row in found["rows"]} == {"removal", "mask"}
    assert (found["changed"], found["differing_bits"], found["controls_without_effect"]) == (0, 0, 0)
    assert found["redraws"] == 4 * 2 * 8, "one of each kind for each image"


def test_a_leak_is_counted_bit_by_bit():
    from proof_stress import KINDS, try_case

    images, keep = torch.rand(4, 3, 16, 16), torch.zeros(4, 2, 2, dtype=torch.bool)
    keep[:, 0, 0] = True
    sight = Sight(keep=keep)

    def leaks(x, _):
        return [x[:, :, :8, :8].mean(dim=(2, 3)) + 1e-6 * x[:, :, 15, 15].nan_to_num(posinf=1, neginf=1)]

    tally, control = try_case(leaks, images, sight, 2 * len(KINDS), seed=0)
    assert control
    assert tally.redraws == 4 * 2 * len(KINDS)
    assert tally.changed > 0
    assert tally.differing_bits > 0

    tally, control = try_case(lambda x, _: [x[:, :, :8, :8].mean(dim=(2, 3))], images, sight, len(KINDS), seed=0)
    assert (control, int(tally.changed), tally.differing_bits) == (True, 0, 0)

    tally, control = try_case(lambda x, _: [torch.zeros(4, 2)], images, sight, len(KINDS), seed=0)
    assert not control, "a model that sees nothing at all proves nothing"


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tyro", "gradio"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("tyro", "gradio") else real(name, *rest)
sys.path.insert(0, "benchmarks")
import proof_stress
sys.argv = ["proof_stress.py", *sys.argv[1:]]
sys.exit(proof_stress.main())
"""


def test_it_runs_without_a_command_line_package(tmp_path):
    out = tmp_path / "proof.json"
    flags = ["--methods", "centre-crop", "--architectures", "nano, 96 px", "--batches", "2"]
    flags += ["--formats", "float32", "--redraws", "100", "--eager-only", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *flags], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["configurations"] == 1
    assert found["redraws"] >= 100
    assert (found["changed"], found["differing_bits"], found["controls_without_effect"]) == (0, 0, 0)
    assert all(row["attention_kernels"] for row in found["rows"])


def test_kernels_are_those_that_run():
    q = torch.rand(1, 2, 8, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert attention_kernels(lambda: attend(q, q, q)) == ["flash (CPU)"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_kernels(lambda: attend(q, q, q)) == ["math"]
    assert attention_kernels(lambda: q.softmax(dim=-1)) == []
