"""The replacement of a served package, with stand-ins for packages and their processes."""

import asyncio

import pytest

from recsys.errors import ConfigError
from recsys.serving.reload import ModelHolder, ReloadError


class Model:
    """A model that counts how often it is closed."""

    def __init__(self, folder, version: str) -> None:
        self.folder, self.version, self.closed = folder, version, 0

    def close(self, timeout=None) -> bool:
        self.closed += 1
        return True


def test_a_loaded_package_that_may_not_take_over_is_closed(tmp_path):
    first, second = Model(tmp_path, "first"), Model(tmp_path, "second")
    seen = []
    holder = ModelHolder(first, lambda folder: second, seen.append)

    def refuse(model):
        assert model is second
        raise ConfigError("it reads other rows")

    holder.accept = refuse
    with pytest.raises(ReloadError, match="it reads other rows"):
        asyncio.run(holder.reload(None))
    assert holder.current is first and seen == ["first"]
    assert (first.closed, second.closed) == (0, 1)


def test_the_package_before_is_closed_once_its_last_request_has_an_answer(tmp_path):
    first, second = Model(tmp_path, "first"), Model(tmp_path, "second")
    holder = ModelHolder(first, lambda folder: second)

    async def reload_during_a_request() -> int:
        with holder.use() as model:
            assert await holder.reload(None) is second and model is first
            await asyncio.sleep(0.05)
            closed = first.closed
        await asyncio.sleep(0.05)
        return closed

    assert asyncio.run(reload_during_a_request()) == 0
    assert (first.closed, second.closed) == (1, 0)
