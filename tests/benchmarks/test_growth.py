"""How cost grows: exponents are those of the data."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import growth


@pytest.mark.parametrize(("power", "count"), [(0, 3), (1, 4), (2, 6)])
def test_an_exponent_is_the_slope_where_fixed_costs_are_small(power, count):
    sizes = [10**k for k in range(count)]
    assert growth.exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power, abs=0.01)
    if count > 4:
        assert growth.exponent(sizes, [5 + 3.0 * size**power for size in sizes]) == pytest.approx(power, abs=0.01)


def test_the_curves_are_measured_and_drawn(monkeypatch, tmp_path):
    for name, sizes in (("SIDES", (32, 48)), ("PARTS", (1, 2)), ("CLASS_COUNTS", (2, 5)), ("IMAGE_COUNTS", (3, 30))):
        monkeypatch.setattr(growth, name, sizes)
    rows = growth.measure(rounds=1)
    assert [len(row["sizes"]) for row in rows] == [2] * 5
    assert rows[0]["sizes"] == [16, 36]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"rows": rows}))
    growth.draw(path, tmp_path / "x.svg")
    assert "<svg" in (tmp_path / "x.svg").read_text()
