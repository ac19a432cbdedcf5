"""`UserCache`: encoded users and histories, against which candidates can be scored alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recsys.modules.cache import MixerCache
from recsys.modules.prefix import Prefix


@dataclass(frozen=True, eq=False)
class UserCache:
    """B users with their histories, as a prefill encodes them.

    It is a plain value: no model stores any part of it.

    Attributes:
        prefix: facts that the encoding of candidates and later events needs.
        mixer: keys and values of the mixer's layers.
    """

    prefix: Prefix
    mixer: MixerCache

    @property
    def batch_size(self) -> int:
        """The number of users, B."""
        return self.prefix.lengths.shape[1]

    @property
    def num_bytes(self) -> int:
        """The size of keys, values, timestamps and USER features in bytes."""
        users = self.prefix.users
        return self.mixer.num_bytes + (0 if users is None else users.nbytes)

    @classmethod
    def join(cls, caches: Sequence["UserCache"]) -> "UserCache":
        """Joins the users of caches of the same model, in order; a single cache is returned as it is."""
        if len(caches) == 1:
            return caches[0]
        mixer = MixerCache.join([cache.mixer for cache in caches])
        return cls(Prefix.join([cache.prefix for cache in caches]), mixer)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.prefix.lengths.device

    def select(self, rows: Sequence[int]) -> "UserCache":
        """Returns a copy with these users in this order; a user may occur more than once."""
        return UserCache(self.prefix.select(rows), self.mixer.select(rows))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "UserCache":
        """Returns a copy on a device or on the host."""
        return UserCache(self.prefix.to(device, non_blocking), self.mixer.to(device, non_blocking))
