"""The routes of the server, as a FastAPI application.

POST /score, /recommend     one of the two: the package either scores candidates or searches items
GET  /                      a page about the users of a file, if there is one
POST /reload                needs a token
GET  /healthz, /readyz      alive; ready to answer
GET  /metrics               Prometheus
GET  /openapi.json          describes the columns that the package reads
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

import recsys
from recsys.serving.arrow_schema import CONTENT_TYPE, ArrowBody
from recsys.serving.asked import Asked
from recsys.serving.batcher import ClosedError, DeadlineError, QueueFullError
from recsys.serving.experiment import NAMES, Experiment
from recsys.serving.guard import Bodies, Guard, failure
from recsys.serving.metrics import Metrics
from recsys.serving.model import ServingModel
from recsys.serving.page import Page
from recsys.serving.reload import ReloadError
from recsys.serving.schema import Failure, InvalidRequestError
from recsys.serving.scoring_process import ScoringEndedError

SCORE, RECOMMEND, RELOAD = "/score", "/recommend", "/reload"
_ROUTES = frozenset({"/", SCORE, RECOMMEND, RELOAD, "/healthz", "/readyz", "/metrics", "/openapi.json"})
_REFERENCE = "#/components/schemas/{model}"
_FAILURES = {
    400: "The body is not JSON, or not the Arrow stream that its Content-Type says.",
    401: "The token is missing or wrong.",
    413: "The body is too large.",
    422: "The request does not fit; `findings` name field and row.",
    503: "The queue is full, or the server stops; Retry-After says when to ask again.",
    504: "The deadline passed.",
}

_ARROW = (
    "As an Arrow IPC stream, the columns are the properties of Row, with a row for each of `rows`: integers, "
    "floating-point numbers, texts and lists of them, not compressed and without dictionaries."
)
_ENDED = "a process that scores has ended"
_UNANSWERED = InvalidRequestError, QueueFullError, ClosedError, DeadlineError, ScoringEndedError

_Route = Callable[[Request], Awaitable[Response]]
_OnError = Callable[[Request, Any], Awaitable[Response]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingOptions:
    """Options of the application.

    Attributes:
        deadline: seconds from a request's head to its answer.
        max_requests: most requests at a time. Further ones get a 503 before their body is read, because
            validating a body also takes time of the event loop.
        max_body: most bytes of a request's body.
        max_bodies: most bytes of all bodies in memory.
        token: token that all requests but health checks must carry; None to require none and to turn
            reloads off.
    """

    deadline: float
    max_requests: int
    max_body: int
    max_bodies: int
    token: str | None


class ReloadRequest(BaseModel):
    """The body of /reload, which may be empty."""

    model_config = ConfigDict(extra="forbid", strict=True)

    package: str | None = None
    """Name of a folder beside the package that the server was started with; None reloads that package."""


def create_app(
    experiment: Experiment,
    metrics: Metrics,
    options: ServingOptions,
    is_stopping: Callable[[], bool] = lambda: False,
    page: Page | None = None,
) -> ASGIApp:
    """Creates the application.

    Args:
        experiment: the packages that answer.
        metrics: counts requests.
        options: limits, token.
        is_stopping: returns whether the server is about to stop; it is then no longer ready.
        page: what is shown at `/`; None for no page.
    """
    app = FastAPI(title="recsys", version=recsys.__version__, docs_url=None, redoc_url=None)
    bodies = Bodies(options.max_body, options.max_bodies)
    in_flight: set[Request] = set()
    asked = Asked(experiment, metrics)

    async def ask(request: Request, recommends: bool) -> Response:
        if len(in_flight) >= options.max_requests:
            return _busy("too many requests at once; ask again later")
        in_flight.add(request)
        until = time.monotonic() + options.deadline
        try:
            return await asyncio.wait_for(
                _answer(request, asked, bodies, recommends, until), options.deadline
            )
        except (asyncio.TimeoutError, DeadlineError):
            return failure(504, f"no answer within {1000 * options.deadline:g} ms")
        except (QueueFullError, ClosedError):
            return _busy("the queue is full; ask again later")
        except ScoringEndedError:
            return _busy(f"{_ENDED}; ask again later")
        finally:
            in_flight.discard(request)

    @app.post(SCORE, summary="Scores the candidates of each row.")
    async def score(request: Request) -> Response:
        return await ask(request, recommends=False)

    @app.post(RECOMMEND, summary="Recommends the best of all items for each row.")
    async def recommend(request: Request) -> Response:
        return await ask(request, recommends=True)

    @app.post(RELOAD, summary="Loads the package again, or another one, and switches to it.")
    async def reload(request: Request) -> Response:
        return await _reload(request, experiment, bodies, metrics, options)

    @app.get("/healthz", summary="Tells whether the server works.")
    async def healthz() -> Response:
        return JSONResponse({"status": "ok"}) if experiment.is_alive else failure(500, _ENDED)

    @app.get("/readyz", summary="Tells whether the server accepts requests.")
    async def readyz() -> Response:
        if is_stopping():
            return _busy("the server is stopping")
        if not experiment.is_alive:
            return _busy(_ENDED)
        versions = [holder.current.version for holder in experiment.holders]
        return JSONResponse({"status": "ready", "model": " ".join(versions)})

    @app.get("/metrics", summary="Metrics in Prometheus's text format.")
    async def show_metrics() -> Response:
        waiting = [holder.current.batcher.waiting_rows for holder in experiment.holders]
        metrics.waiting_rows.set(sum(waiting))
        for name, holder in zip(NAMES, experiment.holders, strict=False):
            if (memory := holder.current.memory_bytes) is not None:
                metrics.scoring_memory.labels(name).set(memory)
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    if page is not None:

        @app.get("/", include_in_schema=False)
        async def show_page(user: str | None = None) -> Response:
            row = None if user is None else page.row(user)
            if row is None:
                return HTMLResponse(page.html(user), 200 if user is None else 404)
            try:
                answer = await asked.answer({"rows": [row]}, time.monotonic() + options.deadline)
            except _UNANSWERED as error:
                return HTMLResponse(page.html(user, error=_told(error)), 503)
            return HTMLResponse(page.html(user, answer))

    @app.exception_handler(InvalidRequestError)
    async def invalid(request: Request, error: InvalidRequestError) -> Response:
        answer = JSONResponse(error.failure.model_dump(), error.status)
        if error.status in (413, 415, 503):
            # The rest of the body is not read.
            answer.headers["Connection"] = "close"
        if error.status == 503:
            answer.headers["Retry-After"] = "1"
        return answer

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return JSONResponse(Failure(error=str(error.detail)).model_dump(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return failure(500, "internal error; the server's log has it")

    app.openapi = lambda: _openapi(app, experiment.first)
    direct = _Direct(app, {SCORE: score, RECOMMEND: recommend}, invalid, unexpected)
    return Guard(direct, metrics, _ROUTES, options.token)


class _Direct:
    """Calls the routes that answer rows without FastAPI's middleware and routing, which take the event loop
    longer than the routes do; all other requests go to FastAPI.

    Args:
        app: the FastAPI application, which has these routes, too.
        routes: path -> what answers a POST.
        invalid: makes the answer to an InvalidRequestError.
        unexpected: makes the answer to any other error.
    """

    def __init__(
        self, app: ASGIApp, routes: dict[str, _Route], invalid: _OnError, unexpected: _OnError
    ) -> None:
        self._app, self._routes = app, routes
        self._invalid, self._unexpected = invalid, unexpected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await route(request)
        except InvalidRequestError as error:
            response = await self._invalid(request, error)
        except Exception as error:  # noqa: BLE001  logged, and answered with a status of 500
            response = await self._unexpected(request, error)
        await response(scope, receive, send)


async def _answer(request: Request, asked: Asked, bodies: Bodies, recommends: bool, until: float) -> Response:
    """Reads, validates and scores one request."""
    body = await bodies.read(request)
    try:
        if asked.recommends != recommends:
            fit, does = (RECOMMEND, "searches items") if asked.recommends else (SCORE, "scores candidates")
            return failure(404, f"the package {does}: POST {fit}")
        asked_for = ArrowBody(body, request.query_params.get("k")) if _is_arrow(request) else body
        # `json.dumps` takes .7 ms for 256 candidates and four tasks, pydantic an eighth of that.
        return Response(to_json(await asked.answer(asked_for, until)), media_type="application/json")
    finally:
        bodies.release(body)


async def _reload(
    request: Request, experiment: Experiment, bodies: Bodies, metrics: Metrics, options: ServingOptions
) -> Response:
    if options.token is None:
        return failure(403, "start the server with --token-file or --token-env to allow reloads")
    body = await bodies.read(request)
    bodies.release(body)
    try:
        asked = ReloadRequest.model_validate_json(body) if body else ReloadRequest()
        models = await experiment.reload(asked.package)
    except ValidationError as error:
        return failure(422, "; ".join(entry["msg"] for entry in error.errors(include_url=False)))
    except ReloadError as error:
        metrics.reloads.labels("refused").inc()
        return failure(409, str(error))
    metrics.reloads.labels("done").inc()
    return JSONResponse({"model": " ".join(model.version for model in models)})


def _is_arrow(request: Request) -> bool:
    """Returns whether a body is an Arrow stream. Any other body is JSON, whatever its type."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == CONTENT_TYPE


def _told(error: Exception) -> str:
    """Returns what the page says about an error."""
    if isinstance(error, InvalidRequestError):
        return "; ".join(f"{finding.field}: {finding.message}" for finding in error.failure.findings)
    return "The server is busy; try again."


def _busy(error: str) -> JSONResponse:
    answer = failure(503, error)
    answer.headers["Retry-After"] = "1"
    return answer


def _openapi(app: FastAPI, model: ServingModel) -> dict[str, Any]:
    """Returns the OpenAPI description, with the request and answer schemas of the served package."""
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    served_path, unserved_path = (RECOMMEND, SCORE) if model.recommends else (SCORE, RECOMMEND)
    del described["paths"][unserved_path]
    models = [(model.schema.request, "validation"), (model.schema.answer, "serialization")]
    models += [(Failure, "serialization"), (ReloadRequest, "validation")]
    _, definitions = models_json_schema(models, ref_template=_REFERENCE)
    described.setdefault("components", {})["schemas"] = definitions["$defs"]

    def content(name: str) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model=name)}}}}

    failures = {
        str(code): {"description": description, **content("Failure")}
        for code, description in _FAILURES.items()
    }
    operation = described["paths"][served_path]["post"]
    operation["requestBody"] = {"required": True, **content("Request"), "description": _ARROW}
    operation["requestBody"]["content"][CONTENT_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    if model.recommends:
        described_k = definitions["$defs"]["Request"]["properties"]["k"]
        about = "Items a row, if the body is an Arrow stream."
        operation["parameters"] = [{"name": "k", "in": "query", "description": about, "schema": described_k}]
    operation["responses"] = {"200": {"description": "Scores.", **content("Answer")}, **failures}
    described["paths"][RELOAD]["post"]["requestBody"] = {"required": False, **content("ReloadRequest")}
    return described
