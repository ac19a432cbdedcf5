"""Divides users between the packages that are served, for an A/B test."""

import hashlib
from collections.abc import Sequence
from typing import Any

from recsys.errors import ConfigError
from recsys.serving.model import ServingModel
from recsys.serving.reload import ModelHolder, ReloadError

NAMES = ("A", "B")
"""Names of the packages in metrics."""


class Experiment:
    """One package for all users, or two of which the second one answers a share of the users.

    Args:
        holders: one or two.
        share: share of the users that the second package answers, from 0 to 1.

    Attributes:
        holders: the packages, A and then B.

    Raises:
        ConfigError: two packages take different requests or give different answers.
    """

    def __init__(self, holders: Sequence[ModelHolder], share: float = 0.0) -> None:
        self.holders, self._share = list(holders), share
        if self.compares:
            first, second = self.holders
            _require_same_requests(first.current, second.current)
            first.accept = lambda model: _require_same_requests(model, second.current)
            second.accept = lambda model: _require_same_requests(first.current, model)

    @property
    def compares(self) -> bool:
        """Whether there are two packages."""
        return len(self.holders) > 1

    @property
    def first(self) -> ServingModel:
        """Package A, whose schema is that of both."""
        return self.holders[0].current

    @property
    def is_alive(self) -> bool:
        """Whether the processes of all packages are running."""
        return all(holder.current.is_alive for holder in self.holders)

    def arm(self, user: Any) -> int:
        """Returns the index of the package that answers a user, always the same for a user and share.

        Args:
            user: the value of the first key column; a row without it (None) is answered by A.
        """
        if not self.compares or user is None:
            return 0
        digest = hashlib.blake2b(str(user).encode(), digest_size=8).digest()
        return int(int.from_bytes(digest, "big") < self._share * 2**64)

    async def reload(self, name: str | None) -> list[ServingModel]:
        """Loads the packages anew, or another one in place of the only one; see `ModelHolder.reload`.

        Raises:
            ReloadError: a package cannot be used, and the one before stays; or a name is given for two.
        """
        if self.compares and name is not None:
            raise ReloadError("two packages are compared: give no name, and both are loaded anew")
        loaded = []
        for holder in self.holders:
            try:
                loaded.append(await holder.reload(name))
            except ReloadError as error:
                raise ReloadError(f"{holder.current.version} stays in use: {error}") from error
        return loaded

    def close(self, timeout: float) -> bool:
        """Ends the processes of all packages; False if `timeout` seconds were not enough for one."""
        ended = [holder.close(timeout) for holder in self.holders]
        return all(ended)


def _require_same_requests(first: ServingModel, second: ServingModel) -> None:
    for what, schemas in (
        ("read different rows", (first.schema.request, second.schema.request)),
        ("give different answers", (first.schema.answer, second.schema.answer)),
    ):
        described = [schema.model_json_schema() for schema in schemas]
        if described[0] != described[1]:
            raise ConfigError(
                f"--package: {first.folder} and {second.folder} {what}, so a request cannot go to either of "
                "them: serve them on two ports"
            )
