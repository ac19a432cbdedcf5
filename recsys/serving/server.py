"""Runs the application: the socket, uvicorn, and an orderly shutdown."""

import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn

from recsys import protos as pb
from recsys.config import extensions
from recsys.errors import ConfigError, RecsysError
from recsys.serving.application import ServingOptions, create_app
from recsys.serving.batcher import BatchLimits
from recsys.serving.experiment import NAMES, Experiment
from recsys.serving.http import http_protocol
from recsys.serving.json_logs import json_lines
from recsys.serving.messages import Order
from recsys.serving.metrics import Metrics
from recsys.serving.model import ServingModel
from recsys.serving.page import Page
from recsys.serving.reload import ModelHolder
from recsys.serving.schema import RequestLimits

_CONNECTIONS = 1024
"""Most connections at a time; uvicorn answers 503 to further ones."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the process: its address, its files, and the time that a stop may take.

    Attributes:
        host, port: address to listen on; port 0 picks a free port.
        grace: seconds that requests in flight have to finish after SIGTERM.
        share: share of the users whom the second of two packages answers.
        page_rows: files with rows of the users that the page at `/` knows; empty for no page.
        item_names: file with the names of items for that page.
        verify_key: file of the public key that must have signed each package, also at a reload.
        store: fields that replace those of each package's store of users; None for what the package says.
        processes: number of processes that score with each package.
    """

    host: str
    port: int
    grace: float
    share: float = 0.0
    page_rows: Sequence[str] = ()
    item_names: str | None = None
    verify_key: Path | None = None
    store: pb.UserStore | None = None
    processes: int = 1


def serve(
    folders: Sequence[Path],
    settings: ServerSettings,
    options: ServingOptions,
    requests: RequestLimits,
    batches: BatchLimits,
    *,
    dry_run: bool = False,
) -> None:
    """Serves one package or two until SIGTERM or Ctrl-C; the requests in flight are answered first.

    A dry run loads the packages, binds the address and ends.

    Raises:
        ConfigError: two packages take different requests, or the page cannot be made.
        RecsysError: a package or the address cannot be used; requests were cut off because the grace period
            was over; or a process that scores has ended.
    """
    metrics = Metrics()

    def load(place: Path) -> ServingModel:
        level = logging.getLevelName(logging.getLogger("recsys").level)
        order = Order(place, settings.verify_key, settings.store, extensions.loaded(), level)
        model = ServingModel(order, requests, batches, metrics, settings.processes)
        _collect_garbage()
        return model

    with json_lines(), _listen(settings) as listening, ExitStack() as stack:
        models = []
        for folder in folders:
            models.append(load(folder))
            stack.callback(models[-1].kill)
        experiment = Experiment(
            [
                ModelHolder(model, load, partial(metrics.set_model, name))
                for name, model in zip(NAMES, models, strict=False)
            ],
            settings.share,
        )
        page = None
        if settings.page_rows:
            page = Page(experiment.first.pipeline, settings.page_rows, settings.item_names)
        if settings.host not in _LOOPBACK and options.token is None:
            log.warning("anyone who can reach %s can use this server: it requires no token", settings.host)
        host, port = listening.getsockname()[:2]
        fields = {"host": host, "port": port, "model": " ".join(model.version for model in models)}
        log.info("listening" if not dry_run else "dry run: would listen", extra={"fields": fields})
        if dry_run:
            experiment.close(settings.grace)
            return
        _answer(experiment, metrics, options, page, listening, settings.grace)
        _end(experiment, settings.grace)
        log.info("stopped")


def _answer(
    experiment: Experiment,
    metrics: Metrics,
    options: ServingOptions,
    page: Page | None,
    listening: socket.socket,
    grace: float,
) -> None:
    """Answers requests until a signal, or until a process that scores has ended."""
    server: uvicorn.Server | None = None

    async def stop_without_process() -> None:
        if server is not None and not experiment.is_alive:
            server.should_exit = True

    app = create_app(experiment, metrics, options, lambda: server is not None and server.should_exit, page)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=http_protocol(),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            limit_concurrency=_CONNECTIONS,
            # Longer than most clients keep idle connections: none then sends on a closing connection.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(grace)),
            # Called about once a second.
            callback_notify=stop_without_process,
            timeout_notify=0,
        )
    )
    with _quiet_sigterm():
        server.run(sockets=[listening])


def _end(experiment: Experiment, grace: float) -> None:
    """Ends the processes.

    Raises:
        RecsysError: a computation had to be cut off, or a process had ended before.
    """
    lost = [holder.current for holder in experiment.holders if not holder.current.is_alive]
    if not experiment.close(grace):
        raise RecsysError(f"a computation did not end within {grace:g} s and was cut off")
    for model in lost:
        raise RecsysError(
            f"{model.folder}: the process that scores {model.ending}. The server stops, so that "
            "whatever started it can start it again"
        )


def read_token(file: str | None, variable: str | None) -> str | None:
    """Reads the token from a file or an environment variable; None if neither is named.

    Raises:
        ConfigError: both are named, or there is no token where it should be.
    """
    if file is not None and variable is not None:
        raise ConfigError("--token-file and --token-env are given; give one of them")
    if file is None and variable is None:
        return None
    if file is not None:
        try:
            token, where = Path(file).read_text(encoding="utf-8"), f"--token-file {file}"
        except (OSError, ValueError) as error:
            raise ConfigError(f"--token-file {file}: cannot be read: {error}") from None
    else:
        token, where = os.environ.get(variable or "", ""), f"--token-env {variable}"
    token = token.strip()
    if not token:
        raise ConfigError(f"{where}: there is no token in it")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where}: a token is ASCII without spaces")
    return token


def _collect_garbage() -> None:
    """Collects garbage, and leaves out of later collections what is in memory now, such as schemas.

    A collection that goes through the 80,000 objects of libraries keeps requests waiting for 60 ms. Garbage
    of a package that has been replaced is collected at the next reload.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def _listen(settings: ServerSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Only if the protocol is named, asyncio sets TCP_NODELAY, without which an answer takes 40 ms longer.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((settings.host, settings.port))
            listening.listen(_CONNECTIONS)
        except OSError as error:
            where = f"--host {settings.host} --port {settings.port}"
            raise RecsysError(f"{where}: cannot listen there: {error.strerror or error}") from None
        yield listening


@contextmanager
def _quiet_sigterm() -> Iterator[None]:
    """Ignores SIGTERM outside of uvicorn, which stops on the signal and then raises it again."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
