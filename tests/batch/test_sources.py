"""What a collection consists of: every kind of input gives the same images, from the disk and by URL."""

import io
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sightline.batch.sources import list_items, read_item
from sightline.data.remote import StorageError, is_url, read_bytes
from sightline.errors import UserError


def pictures(count: int = 5) -> dict[str, bytes]:
    """PNG files by name, each of one colour."""
    made = {}
    for i in range(count):
        buffer = io.BytesIO()
        Image.new("RGB", (8 + i, 8), (40 * i, 90, 255 - 40 * i)).save(buffer, "png")
        made[f"{'a' if i % 2 else 'b'}/{i}.png"] = buffer.getvalue()
    return made


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
            label = tarfile.TarInfo(name.replace(".png", ".cls"))
            archive.addfile(label, io.BytesIO())
    return path


def colours(inputs) -> list[tuple[int, int, int]]:
    return [read_item(item).getpixel((0, 0)) for item in list_items(inputs)]


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, content in pictures().items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "images"


def test_all_kinds_of_input_give_the_same_images(folder, tmp_path):
    expected = colours([folder])
    ordered = dict(sorted(pictures().items()))
    (tmp_path / "list.csv").write_text("image\n" + "".join(f"images/{name}\n" for name in ordered))
    pq.write_table(pa.table({"image": [f"images/{name}" for name in ordered]}), tmp_path / "paths.parquet")
    pq.write_table(pa.table({"image": list(ordered.values())}), tmp_path / "bytes.parquet", row_group_size=2)
    structs = [{"bytes": content, "path": name} for name, content in ordered.items()]
    pq.write_table(pa.table({"image": structs}), tmp_path / "structs.parquet")
    write_tar(tmp_path / "all.tar", ordered)
    halves = list(ordered.items())
    (tmp_path / "shards").mkdir()
    for k in range(2):
        write_tar(tmp_path / "shards" / f"s-{k:03d}.tar", dict(halves[3 * k : 3 * k + 3]))
    assert len(expected) == 5
    tables = ("list.csv", "paths.parquet", "bytes.parquet", "structs.parquet")
    for name in (*tables, "all.tar", "shards", "shards/s-{000..001}.tar"):
        assert colours([tmp_path / name]) == expected, name
    keys = [item.key for item in list_items([tmp_path / "all.tar"])]
    assert keys == [f"{tmp_path}/all.tar/{name}" for name in ordered]
    assert list_items([tmp_path / "bytes.parquet"])[3].key == f"{tmp_path}/bytes.parquet#3"


def test_urls_give_the_same_images_as_the_disk(folder, tmp_path):
    memory = fsspec.filesystem("memory")
    for name, content in pictures().items():
        memory.pipe_file(f"/sources/images/{name}", content)
    write_tar(tmp_path / "all.tar", dict(sorted(pictures().items())))
    memory.pipe_file("/sources/shards/all.tar", (tmp_path / "all.tar").read_bytes())
    listed = "image\n" + "".join(f"images/{name}\n" for name in sorted(pictures()))
    memory.pipe_file("/sources/list.csv", listed.encode())
    expected = colours([folder])
    for url in ("images", "list.csv", "shards/all.tar", "shards"):
        assert colours([f"memory://sources/{url}"]) == expected, url
    before = list_items(["memory://sources/images"])
    memory.pipe_file("/sources/images/a/1.png", pictures()["b/2.png"])
    after = list_items(["memory://sources/images"])
    assert [a == b for a, b in zip(before, after, strict=True)] == ["/a/1.png" not in a.key for a in before]


def test_a_changed_image_is_noticed(folder):
    before = list_items([folder])
    (folder / "a" / "1.png").write_bytes(pictures()["b/2.png"])
    assert [a.version == b.version for a, b in zip(before, list_items([folder]), strict=True)].count(False) == 1


def test_what_cannot_be_read_is_one_clear_line(tmp_path):
    (tmp_path / "broken.tar").write_bytes(b"x" * 2000)
    (tmp_path / "broken.parquet").write_bytes(b"x" * 100)
    pq.write_table(pa.table({"picture": ["a"]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"image": np.arange(3)}), tmp_path / "numbers.parquet")
    write_tar(tmp_path / "empty.tar", {})
    (tmp_path / "list.xlsx").write_bytes(b"x")
    for given, message in (
        ("list.xlsx", "unknown extension .xlsx; use an image"),
        ("broken.tar", "not an uncompressed tar file"),
        ("empty.tar", "no images in this tar file"),
        ("broken.parquet", "not a Parquet file"),
        ("other.parquet", "no column 'image' among picture"),
        ("numbers.parquet", "of type int64"),
        ("absent.tar", "no such file"),
        ("absent", "no such file or folder"),
        ("s-{3..1}.tar", "must not be larger"),
    ):
        with pytest.raises(UserError, match=message) as error:
            list_items([tmp_path / given])
        assert "\n" not in str(error.value)
    for url, message in (
        ("nowhere://x/y", "unknown scheme nowhere://"),
        ("memory://empty/folder", "no images there"),
        ("memory://empty/list.csv", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            list_items([url])
    assert not is_url("C:/images")
    with pytest.raises(StorageError, match="does not answer"):
        read_bytes("http://127.0.0.1:9/a.png")
