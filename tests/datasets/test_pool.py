"""Worker processes that draw images."""

import os

import pytest

from sightline.datasets.pool import map_in_processes
from sightline.errors import UserError


def test_results_come_in_the_order_of_the_tasks():
    assert list(map_in_processes(abs, [-3, 2, -1, 0, 5], 2, chunk=2)) == [3, 2, 1, 0, 5]


def test_an_exception_in_a_worker_is_raised_in_the_parent():
    with pytest.raises(ZeroDivisionError):
        list(map_in_processes((0).__rfloordiv__, [1], 2))


def test_a_killed_worker_is_a_user_error():
    with pytest.raises(
        UserError, match="a worker process was killed; run the command again, perhaps with fewer workers"
    ):
        list(map_in_processes(os._exit, [3], 2))
