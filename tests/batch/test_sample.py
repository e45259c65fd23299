"""`audit --sample-of`: a random sample of any labelled collection becomes a data folder, which is reported on."""

import csv
import io
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sightline.batch.sample import draw_sample
from sightline.errors import UserError

from ..commands import copied, toy_pictures, typed

CLASSES = ("duck", "stork")


@pytest.fixture(scope="module")
def birds(toy, tmp_path_factory) -> Path:
    """A folder per class, 6 images each."""
    return toy_pictures(toy, tmp_path_factory.mktemp("sample") / "birds", 12)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def sample(given, tmp_path, count=8, seed=0):
    return draw_sample(str(given), CLASSES, count, seed, tmp_path / "samples")


def content(folder: Path) -> list[tuple[str, bytes]]:
    """Labels and pixels."""
    return [(row["label"], Image.open(folder / row["image"]).tobytes()) for row in rows_of(folder)]


def test_every_kind_of_collection_gives_the_same_sample(birds, tmp_path):
    files = {path.relative_to(birds).as_posix(): path.read_bytes() for path in sorted(birds.rglob("*.png"))}
    labels = [name.split("/")[0] for name in files]
    lines = [f"{birds / name},{label},{label}/land" for name, label in zip(files, labels, strict=True)]
    (tmp_path / "birds.csv").write_text("Image,Label,Group\n" + "\n".join(lines) + "\n")
    table = pa.table({"image": list(files.values()), "label": [CLASSES.index(label) for label in labels]})
    pq.write_table(table, tmp_path / "birds.parquet")
    (tmp_path / "shards").mkdir()
    for half in range(2):
        pq.write_table(table.slice(6 * half, 6), tmp_path / "shards" / f"{half}.parquet", row_group_size=4)
        with tarfile.open(tmp_path / f"birds-{half}.tar", "w") as archive:
            for number in range(6 * half, 6 * half + 6):
                add(archive, f"{number}.png", list(files.values())[number])
                add(archive, f"{number}.cls", str(CLASSES.index(labels[number])).encode())
    memory = fsspec.filesystem("memory")
    for name, data in files.items():
        memory.pipe_file(f"/labelled/{name}", data)

    expected = content(sample(birds, tmp_path))
    assert len(expected) == 8
    assert {label for label, _ in expected} == set(CLASSES)
    others = ("birds.csv", "birds.parquet", "shards", "birds-{0..1}.tar")
    for given in (*(tmp_path / name for name in others), "memory://labelled"):
        assert content(sample(given, tmp_path)) == expected, given
    assert all(row["group"] == f"{row['label']}/land" for row in rows_of(sample(tmp_path / "birds.csv", tmp_path)))
    assert content(sample(birds, tmp_path, seed=1)) != expected
    assert len(content(sample(birds, tmp_path, count=100))) == 12


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def test_a_label_that_the_model_does_not_know_is_refused_before_anything_is_copied(birds, tmp_path):
    image = next(birds.rglob("*.png")).read_bytes()
    for folder in ("goose", "1"):  # a folder is not the number of a class
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes(image)
        with pytest.raises(UserError, match=rf"'{folder}' is none of the model's classes \(duck, stork\); labels are"):
            sample(tmp_path / folder, tmp_path)
    pq.write_table(pa.table({"image": [image]}), tmp_path / "bare.parquet")
    with pytest.raises(UserError, match="has no column 'label'"):
        sample(tmp_path / "bare.parquet", tmp_path)
    pq.write_table(pa.table({"image": [image], "label": [2]}), tmp_path / "third.parquet")
    with pytest.raises(UserError, match="'2' is none of"):
        sample(tmp_path / "third.parquet", tmp_path)
    assert not (tmp_path / "samples").exists()


def test_an_unreadable_image_is_left_out_with_a_note(birds, tmp_path, capsys):
    images = [next(birds.rglob("*.png")).read_bytes(), b"not an image"]
    pq.write_table(pa.table({"image": images, "label": ["duck", "duck"]}), tmp_path / "x.parquet")
    assert len(content(sample(tmp_path / "x.parquet", tmp_path))) == 1
    assert "not in the sample: " in capsys.readouterr().err
    pq.write_table(pa.table({"image": images[1:], "label": ["duck"]}), tmp_path / "y.parquet")
    with pytest.raises(UserError, match="none of 1 image can be read"):
        sample(tmp_path / "y.parquet", tmp_path)


def test_audit_reports_on_a_sample_of_tar_shards(runs, birds, tmp_path):
    run = copied(runs / "erm-0", tmp_path / "run")
    rng = np.random.default_rng(0)
    with tarfile.open(tmp_path / "birds.tar", "w") as archive:
        for path in rng.permutation(sorted(birds.rglob("*.png"))).tolist():
            archive.add(path, path.relative_to(birds).as_posix())
    flags = ("--sample-of", tmp_path / "birds.tar", "--device", "cpu", "--workers", 0)
    code, printed, err = typed("audit", run, *flags, "--sample", 10, "--quick", "--examples", 4)
    assert code == 0, err
    assert "10 images of 12 drawn, seed 0" in err
    (report,) = run.glob("on-*/audit.html")
    assert str(report) in printed
    assert "n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}10" in report.read_text(encoding="utf-8")
    assert "takes the place of DATA" in typed("audit", run, tmp_path, *flags)[2]
    assert "--sample: needs --sample-of" in typed("audit", run, "--sample", 3, "--device", "cpu")[2]
