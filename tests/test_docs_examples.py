"""The complete examples in docs/ run as they stand, on images that the tests make."""

import re
from pathlib import Path

import numpy as np
from PIL import Image

from sightline.datasets.toy import write_toy

from .small_runs import python_in

DOCS = Path(__file__).parents[1] / "docs"


def test_the_reader_of_add_a_dataset_reads_and_checks_a_dataset(tmp_path):
    (example,) = re.findall(r"^```py\n(.*?)^```", (DOCS / "add-a-dataset.md").read_text(encoding="utf-8"), re.S | re.M)
    assert len(example.splitlines()) <= 60
    (tmp_path / "shells.py").write_text(example, encoding="utf-8")

    rng, lines = np.random.default_rng(0), ["file,species,background,split"]
    for folder in ("photos", "outlines"):
        (tmp_path / "shells" / folder).mkdir(parents=True)
    for i in range(48):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / f"shells/photos/{i}.png")
        if i:
            Image.fromarray(rng.random((32, 32)) < 0.5).save(tmp_path / f"shells/outlines/{i}.png")
        lines.append(f"{i}.png,{('cockle', 'mussel')[i % 2]},{('sand', 'rock')[i // 2 % 2]},{i // 4 % 3}")
    (tmp_path / "shells/labels.csv").write_text("\n".join(lines) + "\n")

    use = "import shells; from sightline.data.rows import read_rows; rows = read_rows('shells', layout='shells'); "
    read = python_in(
        tmp_path, "-c", use + "print(len(rows), rows.group_names, rows.masks.count(''), rows.splits.tolist()[::4])"
    )
    groups = ("cockle/sand", "cockle/rock", "mussel/sand", "mussel/rock")
    assert read.stdout.strip() == f"48 {groups} 1 {[0, 1, 2] * 4}", read.stderr

    checked = python_in(tmp_path, "shells.py", "check", "shells", "--layout", "shells", "--workers", "0")
    assert "48 rows, 2 classes, 4 groups" in checked.stdout, checked.stderr
    assert "no mask for 1 of the images" in checked.stdout + checked.stderr

    (tmp_path / "shells/photos/7.png").unlink()
    missing = python_in(tmp_path, "shells.py", "check", "shells", "--layout", "shells")
    assert missing.returncode == 2
    assert re.search(r"labels\.csv:9: .*photos/7\.png does not exist; restore it", missing.stderr)


def test_the_method_of_add_a_method_trains_loads_predicts_and_is_proved_blind(tmp_path):
    text = (DOCS / "add-a-method.md").read_text(encoding="utf-8")
    method, use = re.findall(r"^```py\n(.*?)^```", text, re.S | re.M)
    assert len(method.splitlines()) <= 60
    (tmp_path / "centre_window.py").write_text(method, encoding="utf-8")
    (tmp_path / "use.py").write_text(use, encoding="utf-8")
    write_toy(tmp_path / "toy", train=16, val=8, test=8)

    used = python_in(tmp_path, "use.py")
    assert used.stdout.splitlines()[-1] == "blind", used.stdout + used.stderr

    options = ("--backbone", "random:nano", "--epochs", "1", "--workers", "0", "--device", "cpu", "--out", "runs/60")
    trained = python_in(tmp_path, "centre_window.py", "train", "centre-window", "toy", "--side", "0.6", *options)
    assert trained.returncode == 0, trained.stderr
    assert '"side": 0.6' in (tmp_path / "runs/60/run.json").read_text()
    assert python_in(tmp_path, "centre_window.py", "verify", "runs/60", "--limit", "4").returncode == 0
    unknown = python_in(tmp_path, "-m", "sightline", "verify", "runs/60")
    assert "unknown method 'centre-window'" in unknown.stderr
