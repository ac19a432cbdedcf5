"""`UserCache`: users and their histories, encoded once, so that candidates can be scored alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recsys.modules.cache import MixerCache, Prefix


@dataclass(frozen=True, eq=False)
class UserCache:
    """B users with their histories, as a prefill leaves them. It is a value: no model stores any part of it.

    Attributes:
        prefix: facts for the encoders of candidates and of later events.
        mixer: keys and values for the layers.
    """

    prefix: Prefix
    mixer: MixerCache

    @property
    def batch_size(self) -> int:
        """B."""
        return self.prefix.lengths.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and timestamps, and of USER features."""
        users = self.prefix.users
        return self.mixer.num_bytes + (0 if users is None else users.nbytes)

    def select(self, rows: Sequence[int]) -> "UserCache":
        """Returns a copy with these users in this order; a user may be named more than once."""
        return UserCache(self.prefix.select(rows), self.mixer.select(rows))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "UserCache":
        """Returns a copy on a device, or in the host's memory."""
        return UserCache(self.prefix.to(device, non_blocking), self.mixer.to(device, non_blocking))
