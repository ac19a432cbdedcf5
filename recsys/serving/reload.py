"""The served package, and its replacement by another one without a lost request.

All methods run in the event loop, except for the loading itself, so no locks are needed.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from recsys.errors import RecsysError
from recsys.serving.model import ServingModel

log = logging.getLogger(__name__)


class ReloadError(RecsysError):
    """A package could not replace the served one."""


class ModelHolder:
    """Holds the model that answers, and earlier ones as long as requests use them.

    Args:
        model: the first model.
        load: loads a package; runs in a thread.
        observe: called with the version of each model that takes over.

    Attributes:
        current: the model that answers new requests.
        accept: called with each loaded model before it takes over; may raise a RecsysError.
    """

    accept: Callable[[ServingModel], None]

    def __init__(
        self,
        model: ServingModel,
        load: Callable[[Path], ServingModel],
        observe: Callable[[str], None] = lambda version: None,
    ) -> None:
        self.current = model
        self.accept = lambda model: None
        self._root = model.folder.resolve().parent
        self._folder = model.folder
        self._load, self._observe = load, observe
        self._users: dict[ServingModel, int] = {}
        self._loading = False
        self._closing: set[asyncio.Task[bool]] = set()
        observe(model.version)

    @contextmanager
    def use(self) -> Iterator[ServingModel]:
        """Yields the current model for one request, and keeps it alive until the block ends."""
        model = self.current
        self._users[model] = self._users.get(model, 0) + 1
        try:
            yield model
        finally:
            self._users[model] -= 1
            self._close_unused()

    async def reload(self, name: str | None) -> ServingModel:
        """Loads a package and switches to it; requests in flight finish on the old one.

        Args:
            name: a folder beside the first package, by its name; None for the first package's own folder,
                which an export has replaced.

        Raises:
            ReloadError: the name is a path, another package is being loaded, or this one cannot be used.
                The old one stays in use.
        """
        folder = self._folder if name is None else self._beside(name)
        if self._loading:
            raise ReloadError("another package is being loaded; ask again later")
        self._loading = True
        try:
            model = await asyncio.to_thread(self._load, folder)
            self._require_accepted(model)
        except (RecsysError, OSError) as error:
            log.error("%s was not loaded, %s stays in use: %s", folder, self.current.version, error)
            raise ReloadError(str(error)) from error
        finally:
            self._loading = False
        before, self.current = self.current, model
        self._users.setdefault(before, 0)
        self._observe(model.version)
        log.info("%s takes over from %s", model.version, before.version)
        self._close_unused()
        return model

    def close(self, timeout: float) -> bool:
        """Answers waiting requests and ends the processes; returns False after `timeout` seconds."""
        ended = [model.close(timeout) for model in {self.current, *self._users}]
        return all(ended)

    def _require_accepted(self, model: ServingModel) -> None:
        """Ends the process of a model that may not take over, and raises the error that says why."""
        try:
            self.accept(model)
        except RecsysError:
            model.close()
            raise

    def _beside(self, name: str) -> Path:
        """Returns a folder beside the first package. Packages are native code, so no other place is safe."""
        folder = self._root / name
        if Path(name).name != name or name in ("", ".", "..") or folder.resolve().parent != self._root:
            raise ReloadError(f"package: give the name of a folder in {self._root}, not a path")
        return folder

    def _close_unused(self) -> None:
        for model in [model for model, count in self._users.items() if count == 0]:
            del self._users[model]
            if model is not self.current:
                task = asyncio.get_running_loop().create_task(asyncio.to_thread(model.close))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
