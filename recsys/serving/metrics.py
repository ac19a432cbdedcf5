"""The server's metrics, in Prometheus's text format."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from recsys.serving.messages import Scored

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        # Memory, CPU time and open files of the process that speaks HTTP.
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "recsys_requests", "Answered requests.", ["route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "recsys_request_seconds",
            "Time from a request's head to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.batch_rows = Histogram(
            "recsys_batch_rows", "Rows that were scored together.", buckets=_ROWS, registry=self._registry
        )
        self._batch_seconds = Histogram(
            "recsys_batch_seconds",
            "Time of a batch in the process that scores, to convert and to score its rows.",
            ["stage"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.scoring_memory = Gauge(
            "recsys_scoring_resident_memory_bytes",
            "Memory of the processes that score with a package, A or B.",
            ["package"],
            registry=self._registry,
        )
        self.waiting_rows = Gauge(
            "recsys_queue_rows", "Rows that wait to be scored.", registry=self._registry
        )
        self.reloads = Counter("recsys_reloads", "Reloads by outcome.", ["outcome"], registry=self._registry)
        self.rows = Counter(
            "recsys_rows", "Answered rows by package, A or B.", ["package"], registry=self._registry
        )
        self._store_rows = Counter(
            "recsys_user_store_rows",
            "Rows by how the store of users served them: reused, extended, encoded, or without it.",
            ["way"],
            registry=self._registry,
        )
        self._model = Gauge(
            "recsys_model_info",
            "1 for a package that is served.",
            ["package", "version"],
            registry=self._registry,
        )
        self._versions: dict[str, str] = {}

    def set_model(self, package: str, version: str) -> None:
        """Sets the version of a served package, `A` or `B`."""
        if package in self._versions:
            self._model.remove(package, self._versions[package])
        self._versions[package] = version
        self._model.labels(package, version).set(1)

    def observe(self, scored: Scored) -> None:
        """Counts what a process that scores tells about a batch."""
        for stage, seconds in scored.seconds.items():
            self._batch_seconds.labels(stage).observe(seconds)
        for way, rows in scored.ways.items():
            self._store_rows.labels(way).inc(rows)

    def text(self) -> bytes:
        """Returns all metrics as text."""
        return generate_latest(self._registry)
