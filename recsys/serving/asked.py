"""Answers the rows of a request with the packages that are served."""

import asyncio
from contextlib import ExitStack
from typing import Any

from recsys.serving.arrow_schema import ArrowBody
from recsys.serving.experiment import NAMES, Experiment
from recsys.serving.metrics import Metrics
from recsys.serving.model import Body, Prepared, ServingModel, users_of

_SMALL, _SMALL_STREAM = 1 << 16, 1 << 20
"""Largest body in bytes, JSON or an Arrow stream, that is parsed in the event loop. Larger ones would keep
other requests waiting."""


class Asked:
    """Answers the body of a request.

    Args:
        experiment: the packages.
        metrics: counts answered rows.
    """

    def __init__(self, experiment: Experiment, metrics: Metrics) -> None:
        self._experiment, self._metrics = experiment, metrics

    @property
    def recommends(self) -> bool:
        """Whether the packages search items."""
        return self._experiment.first.recommends

    async def answer(self, body: Body, until: float) -> dict[str, Any]:
        """Validates a request and scores its rows; returns the body of the response.

        Args:
            body: JSON, the object that it would describe, or an Arrow stream.
            until: deadline, a time of `time.monotonic`.

        Raises:
            InvalidRequestError: the body does not fit, or a row is bad.
            QueueFullError, ClosedError, DeadlineError: as `Batcher.submit`.
        """
        with ExitStack() as stack:
            models = [stack.enter_context(holder.use()) for holder in self._experiment.holders]
            first = models[0]
            if _is_small(body):
                prepared = first.prepare(body)
            else:
                prepared = await asyncio.to_thread(first.prepare, body)
            if not self._experiment.compares:
                rows = await self._score(0, first, prepared, until)
                return {"model": first.version, "rows": rows}
            return await self._divide(models, prepared, until)

    async def _divide(self, models: list[ServingModel], prepared: Prepared, until: float) -> dict[str, Any]:
        """Sends each row to the package of its user, and returns the answers in the order of the rows."""
        arms = [self._experiment.arm(user) for user in users_of(models[0].schema, prepared.rows)]
        parts = {}
        for arm in sorted(set(arms)):
            places = [place for place, its in enumerate(arms) if its == arm]
            parts[arm] = Prepared(prepared.rows.take(places), prepared.k, places)
        answers = await asyncio.gather(
            *(self._score(arm, models[arm], part, until) for arm, part in parts.items())
        )
        coming = {arm: iter(rows) for arm, rows in zip(parts, answers, strict=True)}
        return {
            "model": models[arms[0]].version if len(parts) == 1 else None,
            "models": [models[arm].version for arm in arms],
            "rows": [next(coming[arm]) for arm in arms],
        }

    async def _score(
        self, arm: int, model: ServingModel, prepared: Prepared, until: float
    ) -> list[dict[str, Any]]:
        columns = await model.batcher.submit(prepared, len(prepared.rows), until)
        rows = model.answer_rows(prepared, columns)
        self._metrics.rows.labels(NAMES[arm]).inc(len(rows))
        return rows


def _is_small(body: Body) -> bool:
    if isinstance(body, ArrowBody):
        return len(body.stream) <= _SMALL_STREAM
    return isinstance(body, dict) or len(body) <= _SMALL
