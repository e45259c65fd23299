"""The data loader: same images, same order, for any number of processes and after any interruption."""

import os
import threading
import time
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.data.batches import Batch, Batches, Workers, balanced_weights
from sightline.data.cache import Cache
from sightline.data.images import Preprocess, decode
from sightline.errors import UserError

from .test_images import one_row, write_rows, zipped

PREPROCESS = Preprocess((16, 24))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("noise"), 23)


def batches_of(rows, batch=5, **changes) -> Batches:
    settings = {"indices": np.arange(len(rows)), "preprocess": PREPROCESS, "shuffle": True, "seed": 0}
    return Batches(rows, batch=batch, **settings | changes)


def assert_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        first, second = getattr(one, field.name), getattr(other, field.name)
        assert (first is None) == (second is None), field.name
        if first is not None:
            assert first.dtype == second.dtype
            assert torch.equal(first.nan_to_num(-1), second.nan_to_num(-1)), field.name


def assert_all_same(batches, expected) -> None:
    for one, other in zip(batches, expected, strict=True):
        assert_same(one, other)


def test_a_batch_holds_its_decoded_rows(rows):
    batch = next(batches_of(rows, 7).epoch(0))
    for k, i in enumerate(batch.indices.tolist()):
        sample = decode(rows, i, PREPROCESS)
        assert torch.equal(batch.images[k], sample.image)
        assert batch.has_mask[k] == (i != len(rows) - 1)
        assert torch.equal(batch.masks[k], torch.zeros(16, 24).bool() if sample.mask is None else sample.mask)
        assert torch.equal(batch.boxes[k, : i % 3].nan_to_num(-1), sample.boxes.nan_to_num(-1))
        assert batch.boxes[k, i % 3 :].isnan().all()
        assert torch.equal(batch.keypoints[k], sample.keypoints)
        assert (batch.labels[k], batch.groups[k]) == (i % 3, i % 2)
    assert batch.images.dtype == torch.uint8
    assert batch.labels.dtype == batch.groups.dtype == batch.indices.dtype == torch.int64


def test_missing_annotations_are_none(tmp_path):
    write_rows(tmp_path, 1)
    batch = next(batches_of(one_row(tmp_path, "0.png")).epoch(0))
    missing = ("groups", "masks", "has_mask", "boxes", "keypoints")
    assert [getattr(batch, name) for name in missing] == [None] * 5
    assert len(batch) == 1


def test_masks_can_be_left_out(rows):
    assert next(batches_of(rows, masks=False).epoch(0)).masks is None


def test_an_epoch_is_a_permutation_by_seed_and_epoch(rows):
    orders = {(seed, epoch): batches_of(rows, seed=seed).order(epoch) for seed in (0, 1) for epoch in (0, 1)}
    for order in orders.values():
        assert sorted(order) == list(range(23))
    assert len({tuple(order) for order in orders.values()}) == 4
    again = batches_of(rows)
    for _ in again.epoch(0):
        pass
    assert np.array_equal(again.order(1), orders[0, 1])
    assert np.array_equal(batches_of(rows, shuffle=False).order(3), np.arange(23))


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_equals_an_uninterrupted_epoch(rows, workers):
    loaded = batches_of(rows, workers=workers)
    whole = list(loaded.epoch(2))
    assert len(whole) == len(loaded) == 5
    for start in (0, 1, 4, 5):
        assert_all_same(loaded.epoch(2, start), whole[start:])
    loaded.close()


def test_workers_do_not_change_the_batches(rows):
    single, several = batches_of(rows), batches_of(rows, workers=2)
    for epoch in (0, 1):
        assert_all_same(single.epoch(epoch), several.epoch(epoch))
    assert_all_same(single.epoch(2), batches_of(rows, ahead=0).epoch(2))
    several.close()


def test_an_epoch_may_be_abandoned(rows):
    loaded = batches_of(rows, 2, workers=2)
    expected = list(batches_of(rows, 2).epoch(1))
    for first, _ in zip(range(3), loaded.epoch(0), strict=False):
        assert first < 3
    assert_all_same(loaded.epoch(1), expected)
    in_thread = batches_of(rows, 2)
    next(in_thread.epoch(0))
    assert_all_same(in_thread.epoch(1), expected)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    loaded.close()


def test_two_concurrent_epochs_are_a_programming_error(rows):
    loaded = batches_of(rows, 2, workers=1)
    one, other = loaded.epoch(0), loaded.epoch(1)
    next(one), next(other)
    with pytest.raises(AssertionError, match="another epoch was started meanwhile"):
        next(one)
    loaded.close()


def test_workers_stay_alive_between_epochs():
    pool = Workers(_process_id, 2)
    first, second = (set(pool.run(range(6))) for _ in range(2))
    assert os.getpid() not in first
    assert first == second
    pool.close()


def _process_id(task) -> int:
    return os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_generators_are_not_used(rows, workers):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    loaded = batches_of(rows, workers=workers, weights=np.ones(len(rows)))
    list(loaded.epoch(0))
    loaded.close()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 17),
    world=st.integers(1, 5),
    drop_last=st.booleans(),
    weighted=st.booleans(),
)
def test_the_ranks_together_see_what_one_process_sees(count, batch, world, drop_last, weighted):
    if batch < world or (drop_last and count < batch):
        return
    rows = replace(_without_files, images=["-"] * count, labels=np.zeros(count, int), splits=np.zeros(count, np.int8))
    settings = {"drop_last": drop_last, "weights": np.arange(1.0, count + 1) if weighted else None, "seed": 3}
    single = batches_of(rows, batch, **settings).rank_batches(1)
    ranks = [batches_of(rows, batch, rank=rank, world=world, **settings) for rank in range(world)]
    shares = [rank.rank_batches(1) for rank in ranks]
    assert {len(share) for share in shares} == {len(single)} == {len(rank) for rank in ranks}
    for whole, *parts in zip(single, *shares, strict=True):
        assert np.array_equal(np.concatenate(parts), whole)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    if not drop_last and not weighted:
        assert sorted(np.concatenate(single)) == list(range(count))


_without_files = one_row(None, "-")


@pytest.mark.parametrize("world", [2, 3])
def test_the_batches_of_all_ranks_concatenate_to_the_batch(rows, world):
    ranks = [batches_of(rows, 11, rank=rank, world=world).epoch(4) for rank in range(world)]
    for whole, *parts in zip(batches_of(rows, 11).epoch(4), *ranks, strict=True):
        for name in ("images", "labels", "groups", "masks", "indices", "keypoints"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_the_batch_of_a_rank_may_be_empty(rows):
    batch = list(batches_of(rows, 11, rank=2, world=3).epoch(0))[-1]
    assert len(batch) == 0
    assert batch.images.shape == (0, 3, 16, 24)
    assert batch.masks.shape == (0, 16, 24)
    assert batch.keypoints.shape == (0, 2, 3)


def test_drop_last(rows):
    assert [len(batch) for batch in batches_of(rows).epoch(0)] == [5, 5, 5, 5, 3]
    assert [len(batch) for batch in batches_of(rows, drop_last=True).epoch(0)] == [5, 5, 5, 5]


def test_balanced_weights_draw_classes_equally_often():
    labels = np.array([0] * 900 + [1] * 90 + [2] * 10)
    rows = replace(_without_files, images=["-"] * 1000, labels=labels, splits=np.zeros(1000, np.int8))
    chosen = np.arange(0, 1000, 2)
    loaded = batches_of(rows, indices=chosen, weights=balanced_weights(labels, chosen))
    draws = np.concatenate([loaded.order(epoch) for epoch in range(20)])
    assert set(draws) <= set(chosen)
    fractions = np.bincount(labels[draws]) / len(draws)
    four_sigma = 4 * np.sqrt(2 / 9 / len(draws))
    assert np.abs(fractions - 1 / 3).max() < four_sigma
    assert not np.array_equal(loaded.order(0), loaded.order(1))


def test_a_row_of_weight_zero_is_never_drawn(rows):
    weights = np.zeros(23)
    weights[[4, 9]] = 1
    assert set(batches_of(rows, weights=weights).order(0)) == {4, 9}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_a_one_line_error_wherever_it_is_decoded(tmp_path, workers):
    rows = write_rows(tmp_path, 12)
    (tmp_path / "7.png").write_bytes((tmp_path / "7.png").read_bytes()[:200])
    loaded = batches_of(rows, 4, shuffle=False, workers=workers)
    epoch = loaded.epoch(0)
    assert len(next(epoch)) == 4
    with pytest.raises(UserError, match=r"^[^\n]*7.png: damaged image [^\n]*$"):
        next(epoch)
    loaded.close()


def test_a_dead_worker_is_a_one_line_error():
    pool = Workers(_die, 1)
    with pytest.raises(UserError, match=r"^a data-loading worker died [^\n]*; lower --workers[^\n]*$"):
        list(pool.run([0]))
    pool.close()


def _die(task) -> None:
    os._exit(1)


def test_programming_errors_in_a_worker_keep_their_traceback():
    pool = Workers(_mistake, 1)
    with pytest.raises(ZeroDivisionError, match="_mistake"):
        list(pool.run([0]))
    pool.close()


def _mistake(task) -> float:
    return 1 / 0


def test_archives_can_be_read_by_several_workers(tmp_path):
    rows = write_rows(tmp_path, 20, masks=False)
    zipped(tmp_path)
    packed = replace(rows, images=[f"pack.zip/images/{path}" for path in rows.images])
    expected = list(batches_of(rows, 3).epoch(0))
    list(batches_of(packed, 3).epoch(0))  # so that the workers inherit an open archive
    loaded = batches_of(packed, 3, workers=2)
    assert_all_same(loaded.epoch(0), expected)
    loaded.close()


@pytest.mark.parametrize("indices", [np.arange(23), np.array([3, 20, 22, 7, 1, 15])])
def test_a_cache_does_not_change_the_batches(rows, indices, tmp_path):
    cache = Cache.open(rows, PREPROCESS, tmp_path, indices)
    cached = batches_of(rows, indices=indices, cache=cache)
    direct = batches_of(rows, indices=indices)
    for epoch in (0, 1):
        assert_all_same(cached.epoch(epoch), direct.epoch(epoch))
    assert_all_same(batches_of(rows, indices=indices, cache=cache.to("cpu")).epoch(0), direct.epoch(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_and_resident_batches_are_the_same(rows, tmp_path):
    cache = Cache.open(rows, PREPROCESS, tmp_path, np.arange(23))
    direct = list(batches_of(rows).epoch(0))
    resident = cache.to("cuda")
    assert resident.device.type == "cuda"
    for source in ({"cache": resident}, {"cache": cache, "pin": True}, {"pin": True}, {"pin": True, "workers": 2}):
        loaded = batches_of(rows, **source)
        for batch, expected in zip(loaded.epoch(0), direct, strict=True):
            assert batch.images.is_cuda if source.get("cache") is resident else batch.images.is_pinned()
            assert_same(batch.to("cpu"), expected)
        loaded.close()


def test_wait_time_is_measured_and_reduced_by_prefetching(rows):
    class Slow:
        def __call__(self, task):
            time.sleep(0.02)
            return task

    waits = {}
    for ahead in (0, 2):
        loaded = batches_of(rows)
        loaded._workers = Workers(Slow(), 0, ahead=ahead)
        for _ in loaded.epoch(0):
            time.sleep(0.04)
        waits[ahead] = loaded.wait_seconds
    assert waits[0] >= 5 * 0.02
    assert waits[2] < waits[0] - 0.04


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": np.array([], dtype=int)}, "noise: no images to load; check its splits"),
        ({"batch": 2, "world": 3}, "batch size 2 is too small for 3 processes; use at least 3"),
        ({"batch": 24, "drop_last": True}, "noise: 23 images do not fill a batch of 24"),
        ({"weights": np.zeros(23)}, "noise: sampling weights must be 0 or more, and not all 0"),
    ],
)
def test_invalid_arguments_are_explained(rows, changes, message):
    with pytest.raises(UserError, match=message):
        batches_of(rows, **changes)
