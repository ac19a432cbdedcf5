"""Quantizers against brute force in float64, chains by hand, and the definitions of their parts."""

import numpy as np
import pytest
import torch

from recsys.errors import ConfigError
from recsys.sid.quantizers import QUANTIZERS, Opq, RqKmeans, RqVae, kmeans
from recsys.sid.quantizers.base import decode_residuals, encode_residuals, nearest

SETTINGS = {
    "rq_kmeans": {"levels": 2, "size": 8, "balanced": False, "seed": 3},
    "rq_vae": {"levels": 2, "size": 8, "steps": 30, "balanced_last": False, "seed": 3},
    "opq": {"levels": 4, "size": 8, "seed": 3},
}


def blobs(items: int = 400, dim: int = 16, centers: int = 12, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(centers, dim, generator=generator)
    chosen = torch.randint(centers, (items,), generator=generator)
    return middle[chosen] + 0.3 * torch.randn(items, dim, generator=generator)


def test_assignment_is_that_of_brute_force_in_float64():
    vectors, centroids = blobs(5000).double(), blobs(20, seed=1).double()
    loops = [np.argmin([((v - c) ** 2).sum() for c in centroids.numpy()]) for v in vectors[:300].numpy()]
    assert nearest(vectors, centroids)[:300].tolist() == loops
    # More vectors than are in memory at a time.
    assert nearest(vectors, centroids).tolist() == torch.cdist(vectors, centroids).argmin(1).tolist()


def test_a_chain_of_residuals_by_hand():
    centroids = torch.tensor([[[0.0, 0.0], [10.0, 0.0]], [[1.0, 1.0], [-1.0, 0.0]]])
    vectors = torch.tensor([[9.2, 0.1], [0.7, 0.9], [11.0, 2.0]])
    # 9.2 is near 10 and leaves (-0.8, 0.1); (0.7, 0.9) is near 0 and leaves itself; 11 leaves (1, 2).
    codes = encode_residuals(vectors, centroids)
    assert codes.tolist() == [[1, 1], [0, 0], [1, 0]]
    assert decode_residuals(codes, centroids).tolist() == [[9, 0], [1, 1], [11, 1]]


def test_centroids_are_means_and_as_good_as_those_of_scikit_learn():
    cluster = pytest.importorskip("sklearn.cluster")
    vectors = blobs(600, centers=10).double()
    actual = kmeans.kmeans(vectors, 10, torch.Generator().manual_seed(0))
    for place in range(10):
        members = vectors[actual.assigned == place]
        torch.testing.assert_close(actual.centroids[place], members.mean(0))
    losses = []
    for seed in range(8):
        actual = kmeans.kmeans(vectors, 10, torch.Generator().manual_seed(seed))
        losses.append(float((vectors - actual.centroids[actual.assigned]).square().sum()))
    inertias = [
        cluster.KMeans(10, n_init=1, random_state=seed, max_iter=25).fit(vectors.numpy()).inertia_
        for seed in range(8)
    ]
    assert np.median(losses) <= 1.02 * np.median(inertias)


def test_an_empty_cluster_restarts_at_the_farthest_vector():
    vectors = torch.tensor([[0.0], [1.0], [8.0], [2.0]])
    centroids = torch.tensor([[1.0], [100.0]])
    moved = kmeans.means(vectors, torch.zeros(4, dtype=torch.long), centroids)
    assert moved.tolist() == [[2.75], [8.0]]


def test_a_plan_of_sinkhorn_has_uniform_marginals():
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(60, 12, generator=generator, dtype=torch.float64) ** 3
    plan = kmeans.sinkhorn(costs, iterations=2000)
    torch.testing.assert_close(plan.sum(1), torch.full((60,), 1 / 60, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(0), torch.full((12,), 1 / 12, dtype=torch.float64), rtol=1e-6, atol=0)
    # The plan is a scaled kernel: its logarithm differs from -cost / t by a term of each row and column.
    rest = plan.log() + costs / (
        kmeans.SINKHORN_TEMPERATURE * (costs - costs.min(1, keepdim=True).values).mean()
    )
    mixed = rest[1:, 1:] - rest[:1, 1:] - rest[1:, :1] + rest[:1, :1]
    assert mixed.abs().max() < 1e-9
    # The iterations of a fit come close in float32 too.
    short = kmeans.sinkhorn(costs.float())
    assert (short.sum(0) * 12 - 1).abs().max() < 0.05


def test_balanced_assignment_uses_codes_more_evenly():
    # One blob has most vectors: plain k-means gives its code most items.
    vectors = torch.cat([0.2 * blobs(360, centers=1), blobs(40, centers=7, seed=5)])
    largest = {}
    for balanced in (False, True):
        codes = RqKmeans.fit(vectors, levels=1, size=8, balanced=balanced, seed=0).codes[:, 0]
        largest[balanced] = torch.bincount(codes, minlength=8).max()
    assert largest[True] < 0.6 * largest[False] and largest[True] <= 75


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_same_seed_gives_the_same_codes_and_stored_tensors_give_the_same_quantizer(name):
    if name == "opq":
        pytest.importorskip("faiss")
    vectors = blobs()
    first, second = (QUANTIZERS[name].fit(vectors, **SETTINGS[name]) for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    codes, levels = first.codes, SETTINGS[name]["levels"]
    assert codes.shape == (400, levels) and codes.dtype == torch.long
    assert codes.min() >= 0 and codes.max() < 8
    assert torch.equal(first.quantizer.encode(vectors), codes)
    loaded = QUANTIZERS[name].load(first.quantizer.tensors())
    assert torch.equal(loaded.encode(vectors), codes)
    torch.testing.assert_close(loaded.decode(codes), first.quantizer.decode(codes), rtol=0, atol=0)
    reseeded = QUANTIZERS[name].fit(vectors, **{**SETTINGS[name], "seed": 4})
    assert name == "opq" or not torch.equal(reseeded.codes, codes)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_decoded_vectors_are_nearer_than_the_mean(name):
    """A quantizer that learns nothing decodes to the mean, with an error of 1."""
    if name == "opq":
        pytest.importorskip("faiss")
    vectors = blobs()
    vectors = vectors - vectors.mean(0)
    settings = {**SETTINGS[name], **({"steps": 120} if name == "rq_vae" else {})}
    fitted = QUANTIZERS[name].fit(vectors, **settings)
    error = (fitted.quantizer.decode(fitted.codes) - vectors).square().sum() / vectors.square().sum()
    assert error < {"rq_kmeans": 0.4, "opq": 0.5, "rq_vae": 0.4}[name]
    assert name == "rq_vae" or all(len(column.unique()) == 8 for column in fitted.codes.T), "a code is dead"


def test_balanced_last_level_of_the_autoencoder_is_even():
    fitted = RqVae.fit(blobs(), levels=2, size=8, steps=30, balanced_last=True, seed=0)
    counts = torch.bincount(fitted.codes[:, 1], minlength=8)
    assert counts.min() >= 25 and counts.max() <= 100


def test_the_rotation_of_opq_is_orthogonal_and_its_codes_are_the_nearest_of_each_part():
    pytest.importorskip("faiss")
    vectors = blobs()
    fitted = Opq.fit(vectors, levels=4, size=8, seed=0)
    tensors = fitted.quantizer.tensors()
    rotation, centroids = tensors["rotation"].double(), tensors["centroids"].double()
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(16, dtype=torch.float64), atol=1e-4, rtol=0)
    turned = vectors.double() @ rotation.T
    for row in range(0, 400, 37):
        for part in range(4):
            distances = (turned[row, 4 * part : 4 * part + 4] - centroids[part]).square().sum(1)
            assert distances[fitted.codes[row, part]] <= distances.min() + 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"levels": 5, "size": 8}, "cuts the 16 numbers"), ({"levels": 4, "size": 6}, "opq takes 2, 4, 8")],
)
def test_sizes_that_opq_cannot_have_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Opq.fit(blobs(), seed=0, **settings)
