"""What a checkpoint within an epoch stores of the losses so far."""

from types import SimpleNamespace

import pytest

from sightline.training.state import own_sum


def process(index: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(process_index=index, num_processes=count, is_main_process=index == 0)


def test_every_process_continues_its_own_sum_of_losses():
    """Rounded sums depend on their order: with one sum for all, the log would differ in its last digit."""
    stored = [0.1, 0.7]
    assert [own_sum(stored, process(k, 2)) for k in range(2)] == stored
    for count in (1, 3):  # another number of processes than before
        assert [own_sum(stored, process(k, count)) for k in range(count)] == [pytest.approx(0.8), *[0] * (count - 1)]
    assert [own_sum(0.8, process(k, 2)) for k in range(2)] == [0.8, 0]  # a checkpoint of an earlier version
