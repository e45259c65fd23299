"""Collections, runs and results in S3, on a local server."""

import shutil
import tarfile

import fsspec
import pytest

import sightline
from sightline.batch.parts import read_tables
from sightline.config import Predict

from ..commands import toy_pictures, typed


@pytest.fixture(scope="module")
def bucket():
    """An empty bucket; the addresses are in the environment, as on a cluster."""
    moto = pytest.importorskip("moto.server", reason="needs moto: pip install 'sightline[dev]'")
    pytest.importorskip("s3fs", reason="needs s3fs: pip install 'sightline[dev]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.mkdir("birds")
        yield fs
    server.stop()


def test_a_cache_in_s3_is_filled_once(bucket, runs, toy, tmp_path, monkeypatch):
    run = shutil.copytree(runs / "erm-0", tmp_path / "run")
    flags = ("--device", "cpu", "--workers", 0, "--cache", "s3://birds/cache")
    found = []
    for machine in ("one", "two"):
        monkeypatch.setenv("SIGHTLINE_CACHE", str(tmp_path / machine))
        code, _, err = typed("evaluate", run, "--split", "val", *flags)
        assert code == 0, err
        bucket.invalidate_cache()
        found.append({info["name"]: info["LastModified"] for info in bucket.ls("birds/cache", detail=True)})
        assert len(list((tmp_path / machine / "caches").glob("*/decoded-*.bin"))) == 1
    assert len(found[0]) == 1
    assert found[0] == found[1]
    code, _, err = typed("evaluate", run, "--split", "val", *flags[:-1], "s3://nowhere/cache")
    assert (code, "s3://nowhere/cache/decoded-" in err, len(err.strip().splitlines())) == (2, True, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions_in_s3_are_those_of_the_disk(bucket, runs, toy, tmp_path, monkeypatch, workers):
    monkeypatch.setenv("SIGHTLINE_CACHE", str(tmp_path / "cache"))
    run = shutil.copytree(runs / "erm-0", tmp_path / "run")
    images = toy_pictures(toy, tmp_path / "images", 12)
    (images / "duck" / "broken.png").write_text("not an image")
    settings = {"chunk": 5, "batch": 3, "device": "cpu"}
    sightline.predict(Predict(run, (images,), out=tmp_path / "parts", workers=0, **settings))
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for path in sorted(images.rglob("*.png")):
            archive.add(path, path.relative_to(images).as_posix())
    bucket.put(str(run), f"birds/{workers}/run", recursive=True)
    bucket.put(str(images), f"birds/{workers}/images", recursive=True)
    bucket.put(str(tmp_path / "shard.tar"), f"birds/{workers}/shard.tar")
    base = f"s3://birds/{workers}"
    names = ("predicted", "probabilities", "distance", "calibrated", "weights", "coverage")
    on_disk = [row for table in read_tables(str(tmp_path / "parts")) for row in table.to_pylist()]
    expected = [[row[name] for name in names] for row in on_disk]
    for number, given in enumerate(("images", "shard.tar")):
        out = f"{base}/out-{number}"
        command = Predict(f"{base}/run", (f"{base}/{given}",), out=out, workers=workers, **settings)
        for _ in range(2):  # the second time everything is there
            table = sightline.predict(command)
            assert (table.images, table.unreadable) == (13, 1)
        rows = [row for table in read_tables(out) for row in table.to_pylist()]
        assert [[row[name] for name in names] for row in rows] == expected
        assert all(row["image"].startswith(f"{base}/{given}") for row in rows)
