"""Processes that make pictures."""

import os

import pytest

from sightline.datasets.pool import in_processes
from sightline.errors import UserError


def test_results_come_in_the_order_of_the_tasks():
    assert list(in_processes(abs, [-3, 2, -1, 0, 5], 2, chunk=2)) == [3, 2, 1, 0, 5]


def test_what_goes_wrong_in_a_process_goes_wrong_here():
    with pytest.raises(ZeroDivisionError):
        list(in_processes((0).__rfloordiv__, [1], 2))


def test_a_process_that_dies_is_said_in_a_line():
    with pytest.raises(UserError, match="a worker process was killed; run it again, perhaps with fewer workers"):
        list(in_processes(os._exit, [3], 2))
