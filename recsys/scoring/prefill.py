"""Scoring with a cache, by a model in eager mode: `prefill`, `extend` and `score`.

The model must encode users, events and candidates apart from each other, and its mixer must keep a cache.
"""

from typing import Any

from torch import Tensor, nn

from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.models.base import Model
from recsys.modules.cache import CachingMixer, require_caching
from recsys.scoring.cache import UserCache
from recsys.scoring.user_candidate_split import UserCandidateSplit


def keeps_cache(model: nn.Module) -> bool:
    """Tells whether the model declares that it can score with a cache, and its mixer can keep one."""
    if not isinstance(model, Model) or not model_of(model.pipeline).keeps_cache:
        return False
    return isinstance(model.mixer, CachingMixer)


class CachedModel:
    """Scores candidates against caches with a model in evaluation mode; call it under `torch.no_grad()`.

    Raises:
        ValueError: the mixer keeps no cache.
    """

    def __init__(self, model: Any):
        self.model, self.mixer = model, require_caching(model.mix)
        self.split = UserCandidateSplit(model.pipeline)

    @property
    def keeps_users(self) -> bool:
        """Tells whether caches hold USER features, because encoders compute weights from them."""
        return self.model.preprocess.contextualized

    def prefill(self, batch: Batch) -> UserCache:
        """Encodes users and histories and returns the keys and values that candidates attend to.

        Candidates of the batch are ignored.

        Raises:
            RuntimeError: the model is in training.
        """
        batch = self.split.users(batch)
        with self.model.autocast():
            sequence, prefix = self.model.preprocess.prefix(self.model.embed(batch), batch)
            return UserCache(prefix, self.mixer.prefill(sequence))

    def extend(self, batch: Batch, cache: UserCache) -> UserCache:
        """Returns the cache of users with later events; `cache` stays as it is.

        The result equals `prefill` of the whole histories, with the USER features of before. The caller
        bounds how many events a row or a channel may have.

        Args:
            batch: row b has the new events of user b of the cache, any number, oldest first.

        Raises:
            ValueError: new events would change the cached keys and values of old tokens; names the setting.
        """
        batch = self.split.events(batch)
        with self.model.autocast():
            sequence = self.model.preprocess.events(self.model.embed(batch), batch, cache.prefix)
            return UserCache(cache.prefix.append(batch.sequences), self.mixer.extend(sequence, cache.mixer))

    def outputs(self, batch: Batch, cache: UserCache) -> Any:
        """Returns the model's outputs for candidates whose users and histories are in the cache.

        Args:
            batch: row b has the candidates of user b of the cache, any number; users and events of the batch
                are ignored.

        Raises:
            TypeError, ValueError: another number of rows, dtype or device. RuntimeError: the model is in
                training, or gradients are asked for.
        """
        model, batch = self.model, self.split.candidates(batch)
        rows = batch.num_candidates.shape[0]
        if rows != cache.batch_size:
            raise ValueError(f"the batch has {rows} rows, the cache {cache.batch_size}: select rows of it")
        with model.autocast():
            prepared = model.preprocess.candidates(model.embed(batch), batch, cache.prefix)
            mixed = self.mixer.score(prepared.sequence, cache.mixer)
            targets = model.postprocess(mixed.values, mixed.next_timestamps)
            return model.predict(model.head(targets, prepared.candidates))

    def score(self, batch: Batch, cache: UserCache) -> Tensor:
        """Returns the predictions of `outputs` as float32 [N, tasks], as `Model.score` does."""
        return self.outputs(batch, cache).scores()
