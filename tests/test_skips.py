"""What CI demands of the tests: none may be skipped but for want of a GPU."""

import pytest

from .conftest import failed_unless_for_a_gpu, skip_or_fail


def skipped(reason: str) -> pytest.TestReport:
    where = ("test_x.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("test_x.py::test_x", where, {}, "skipped", where, "call")


@pytest.mark.parametrize(
    ("reason", "outcome"), [("needs Chromium: make browser", "failed"), ("needs a GPU", "skipped")]
)
def test_in_ci_only_a_missing_gpu_is_a_reason_to_skip(reason, outcome, monkeypatch):
    monkeypatch.delenv("SIGHTLINE_ONLY_GPU_SKIPS", raising=False)
    assert failed_unless_for_a_gpu(skipped(reason)).outcome == "skipped"
    monkeypatch.setenv("SIGHTLINE_ONLY_GPU_SKIPS", "1")
    assert failed_unless_for_a_gpu(skipped(reason)).outcome == outcome


def test_missing_data_or_browser_skips_a_test_and_fails_it_where_they_are_required(monkeypatch):
    monkeypatch.delenv("SIGHTLINE_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs Chromium"):
        skip_or_fail("needs Chromium", "SIGHTLINE_REQUIRE_BROWSER")
    monkeypatch.setenv("SIGHTLINE_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="needs Chromium"):
        skip_or_fail("needs Chromium", "SIGHTLINE_REQUIRE_BROWSER")
