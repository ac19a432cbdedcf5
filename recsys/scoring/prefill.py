"""Scores with a cache, by a model in eager mode: `prefill`, `extend` and `score`.

The model must encode users, events and candidates separately, and its mixer must be able to use a cache.
"""

import logging
from typing import Any

from torch import Tensor, nn

from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.models.base import Model, layout_rule
from recsys.modules.cache import NotExtendableError, caches, require_caching
from recsys.scoring.cache import UserCache
from recsys.scoring.user_candidate_split import UserCandidateSplit

log = logging.getLogger(__name__)


def keeps_cache(model: nn.Module) -> bool:
    """Returns whether the model declares that it can score with a cache, and its mixer can use one."""
    if not isinstance(model, Model) or not model_of(model.pipeline).keeps_cache:
        return False
    return caches(model.mixer)


class CachedModel:
    """Scores candidates against caches with a model in evaluation mode. Call it under `torch.no_grad()`.

    Raises:
        ValueError: the mixer cannot score with a cache.
    """

    def __init__(self, model: Any):
        self.model, self.mixer = model, require_caching(model.mix)
        self.split = UserCandidateSplit(model.pipeline)

    @property
    def keeps_users(self) -> bool:
        """Whether caches hold USER features, from which encoders compute weights."""
        return self.model.preprocess.contextualized

    def prefill(self, batch: Batch) -> UserCache:
        """Encodes users and histories and returns the keys and values that candidates attend to.

        Candidates of the batch are ignored.

        Raises:
            RuntimeError: the model is in training mode.
        """
        batch = self.split.users(batch)
        with self.model.autocast():
            sequence, prefix = self.model.preprocess.prefix(self.model.embed(batch), batch)
            return UserCache(prefix, self.mixer.prefill(sequence))

    def require_extendable(self) -> None:
        """Checks that `extend` can equal `prefill`, unless a truncation drops more tokens than before.

        Raises:
            NotExtendableError: names the setting that prevents it.
        """
        for channel in layout_rule(self.model.pipeline).channels:
            if channel.max_events is not None:
                raise NotExtendableError(
                    f"a cache cannot be extended with max_events of channel {channel.name!r}, whose newest "
                    "events may replace older ones of the cache; encode the whole history"
                )
        self.model.preprocess.require_extendable()
        self.mixer.require_extendable(layout_rule(self.model.pipeline).num_contextual)

    @property
    def extends(self) -> bool:
        """Whether caches can be extended; see `require_extendable`."""
        try:
            self.require_extendable()
        except NotExtendableError as error:
            log.debug("histories that grow are encoded again: %s", error)
            return False
        return True

    def extend(self, batch: Batch, cache: UserCache) -> UserCache:
        """Returns the cache of the users with later events appended; `cache` does not change.

        The result equals `prefill` of the whole histories with the earlier USER features. The caller must
        bound the number of events of a row or channel.

        Args:
            batch: row b has the new events of user b of the cache, any number, oldest first.

        Raises:
            NotExtendableError: new events would change the cached keys and values of old tokens; the message
                names the setting.
        """
        batch = self.split.events(batch)
        with self.model.autocast():
            sequence = self.model.preprocess.events(self.model.embed(batch), batch, cache.prefix)
            return UserCache(cache.prefix.append(batch.sequences), self.mixer.extend(sequence, cache.mixer))

    def outputs(self, batch: Batch, cache: UserCache) -> Any:
        """Returns the model's outputs for candidates whose users and histories are in the cache.

        Args:
            batch: row b has the candidates of user b of the cache, any number. Users and events of the batch
                are ignored.

        Raises:
            TypeError, ValueError: number of rows, dtype or device differ from those of the cache.
            RuntimeError: the model is in training mode, or gradients are enabled.
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
        """Returns the predictions of `outputs` as float32 [N, tasks], like `Model.score`."""
        return self.outputs(batch, cache).scores()
