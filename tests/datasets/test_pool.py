"""Worker processes that draw images."""

import os
import subprocess
import sys

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


def test_a_worker_has_one_thread_even_where_the_script_imports_torch(tmp_path):
    """torch reads OMP_NUM_THREADS when it is imported, and workers import the script before anything else."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from sightline.datasets.pool import map_in_processes\n\n"
        "def threads(_): return torch.get_num_threads()\n\n"
        "if __name__ == '__main__': print(*map_in_processes(threads, [0, 1], 2))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.stdout == "1 1\n", done.stderr
