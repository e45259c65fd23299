"""TTR: which patches belong together, which of them show the subject, and what is remembered."""

import csv

import pytest
import torch
from PIL import Image

from sightline.config import Ttr
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods import ttr
from sightline.train import train
from sightline.what.zeroshot import ZeroShot
from sightline.where.clusters import Clustering, cluster_tokens, subject_cluster

from .test_zeroshot import clip, folder, settings, toy  # noqa: F401 (fixtures)


def test_the_subject_is_the_cluster_with_the_lowest_text_similarity():
    general = torch.tensor([0.6, 0.8])
    tokens = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, -1.0], [0.0, -2.0], [-1.0, 0.0], [-1.2, 0.0]])
    labels = torch.tensor([2, 2, 0, 0, 1, 1])
    # Means (2, 0), (0, −1.5), (−1.1, 0): products 1.2, −1.2, −0.66. Normalised means would say 0.6, −0.8, −0.6.
    assert subject_cluster(tokens, labels, general) == 0
    tokens[4:] *= 2  # (−2.2, 0) has −1.32, although its direction is as it was
    assert subject_cluster(tokens, labels, general) == 1
    assert subject_cluster(tokens[:2], labels[:2], general) == 2  # the others are not in this image


def test_clusters_are_of_uncentred_components_smoothed_along_the_row_of_tokens(monkeypatch):
    from scipy import ndimage
    from sklearn import cluster as sklearn_cluster

    tokens = torch.tensor([[4.0, 0.0, 0.0], [4.0, 1.0, 0.0], [4.0, -1.0, 0.0], [4.0, 0.0, 0.1]])
    seen = []

    class Watched(sklearn_cluster.KMeans):
        def fit_predict(self, rows):
            seen.append(rows)
            return super().fit_predict(rows)

    monkeypatch.setattr(sklearn_cluster, "KMeans", Watched)
    cluster_tokens(tokens, Clustering(clusters=2, components=1, sigma=0.72))
    # Uncentred, the first axis is that of the fours (a centred one would be the second); a Gaussian keeps a constant.
    assert seen[0].shape == (4, 1)
    assert abs(seen[0][:, 0]).tolist() == pytest.approx([4.0] * 4, abs=1e-3)
    cluster_tokens(tokens, Clustering(clusters=2, components=2, sigma=0.72))
    # By hand: weights exp(−d²/(2·0.72²)) over their sum are .5536, .2110, .0117, …; the row is mirrored at its ends.
    weights = torch.tensor([0, 1, 2, 3]).square().div(-2 * 0.72**2).exp()
    weights = weights / (2 * weights.sum() - 1)
    assert weights[:3].tolist() == pytest.approx([0.5536, 0.2110, 0.0117], abs=1e-3)
    second = torch.tensor([0.0, 1.0, -1.0, 0.0])
    mirrored = torch.cat([second.flip(0), second, second.flip(0)])
    by_hand = [float(sum(weights[abs(d)] * mirrored[4 + i + d] for d in range(-3, 4))) for i in range(4)]
    assert abs(seen[1][:, 1]).tolist() == pytest.approx([abs(value) for value in by_hand], abs=1e-2)
    assert ndimage.gaussian_filter1d(second.numpy(), 0.72).tolist() == pytest.approx(by_hand, abs=1e-3)


def test_clusters_do_not_touch_the_global_generator_and_are_the_same_every_time(generator):
    tokens, before = torch.randn(64, 24, generator=generator), torch.get_rng_state()
    found = cluster_tokens(tokens, Clustering())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(cluster_tokens(tokens, Clustering()), found)
    assert sorted(found.unique().tolist()) == [0, 1, 2]


def recaller(clip, queue: int = 3):  # noqa: F811
    images = torch.rand(queue, 3, 64, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        start = ttr.patch_tokens(clip.vit, images)
    what = ZeroShot(clip.vit, (64, 64), clip.class_embeddings(["cat", "dog"], ["{}"]), clip.scale)
    return ttr.TtrClassifier(what, clip.embed(["a pet"])[0], start, Clustering()).eval()


@torch.no_grad()
def test_the_queue_holds_the_last_images_whatever_the_batch_size(clip, generator, monkeypatch):  # noqa: F811
    images, seen = torch.rand(5, 3, 64, 64, generator=generator), []

    def watched(tokens, how):
        seen.append(tokens)
        return cluster_tokens(tokens, how)

    monkeypatch.setattr(ttr, "cluster_tokens", watched)
    together, apart = recaller(clip), recaller(clip)
    tokens = ttr.patch_tokens(clip.vit, images)
    keep = together.look(images).keep
    torch.testing.assert_close(seen[0], torch.cat([together.start[1], together.start[2], tokens[0]]))
    torch.testing.assert_close(seen[4], tokens[2:].flatten(0, 1))
    as_list = torch.cat([apart.look(images[i : i + 1]).keep for i in range(5)])
    assert torch.equal(keep, as_list)
    for image, labels in zip(keep, [cluster_tokens(each, Clustering())[-16:] for each in seen[:5]], strict=True):
        assert len(labels[image.flatten()].unique()) == 1  # one cluster, and all of it
        assert not (labels[~image.flatten()] == labels[image.flatten()][0]).any()


def test_several_processes_are_an_error(clip, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="run it in one process"):
        recaller(clip).look(torch.zeros(1, 3, 64, 64))


def test_an_image_of_another_size_than_the_queue_is_an_error(clip):  # noqa: F811
    with pytest.raises(ValueError, match="images of 16 patches, and these have 4"):
        recaller(clip).look(torch.zeros(1, 3, 32, 32))


def test_the_queue_starts_with_the_last_validation_images(toy, tmp_path, folder):  # noqa: F811
    run = train(
        Ttr(**settings(toy, tmp_path / "run", folder, general_prompt="a bird", queue=20))
    )  # more than there are
    model = load(run)
    assert model.method.start.shape == (20, 16, 24)
    torch.testing.assert_close(model.method.start[:4], model.method.start[16:])  # 16 images, and round again
    with (run / "predictions" / "val.csv").open(newline="") as file:
        last = [row["image"] for row in csv.DictReader(file)][-1]
    model.method.look(torch.zeros(1, 3, 64, 64))
    assert torch.equal(model.method.recent[0], model.method.start[1])
    photo = Image.open(toy / last).convert("RGB")
    fresh = load(run)
    fresh.predict(photo)
    torch.testing.assert_close(fresh.method.recent[-1], fresh.method.start[-1], atol=1e-4, rtol=0)


def test_more_clusters_than_patches_are_an_error_before_anything_is_saved(toy, tmp_path, folder):  # noqa: F811
    """Pictures of 4 × 4 patches."""
    options = settings(toy, tmp_path / "run", folder, general_prompt="a bird", queue=3)
    with pytest.raises(UserError, match="--clusters 49: more than the 48 patches of a queue of 3 images"):
        train(Ttr(**options, clusters=49))
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert load(train(Ttr(**options, clusters=48))).method.clustering.clusters == 48
