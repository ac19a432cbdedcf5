"""The ASGI layer around the application: it checks the token, counts and logs answers, and bounds bodies."""

import hmac
import logging
import re
import secrets
import time

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recsys.serving.metrics import Metrics
from recsys.serving.schema import Failure, InvalidRequestError

OPEN_ROUTES = ("/healthz", "/readyz")
"""Routes that need no token, for the health checks of whatever starts and stops servers."""

_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")

log = logging.getLogger(__name__)


class Guard:
    """Answers 401 without the token, counts every answer, and logs a line for each.

    Args:
        app: the application.
        metrics: counts answers.
        routes: existing paths. Requests to other paths are counted as "other", so that clients cannot create
            new metric labels.
        token: token that requests must carry in `Authorization: Bearer TOKEN`, except for OPEN_ROUTES; None
            to require none.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str], token: str | None) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8).encode()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        path = scope["path"]
        try:
            if self._may_pass(path, headers.get(b"authorization", b"")):
                await self._app(scope, receive, send_with_id)
            else:
                refused = failure(401, "give the token: Authorization: Bearer TOKEN")
                refused.headers["WWW-Authenticate"] = "Bearer"
                await refused(scope, receive, send_with_id)
        finally:
            route = path if path in self._routes else "other"
            seconds = time.perf_counter() - started
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            if path not in OPEN_ROUTES or status != 200:
                fields = {"route": route, "status": status, "ms": round(1000 * seconds, 3)}
                log.info("request", extra={"fields": {**fields, "request_id": request_id.decode()}})

    def _may_pass(self, path: str, given: bytes) -> bool:
        if self._expected is None or path in OPEN_ROUTES:
            return True
        return hmac.compare_digest(given, self._expected)


class Bodies:
    """Reads bodies; bounds the size of each, and of all that are in memory at a time.

    Args:
        max_bytes: most bytes of one body.
        max_total: most bytes of all bodies of requests without an answer yet.
    """

    def __init__(self, max_bytes: int, max_total: int) -> None:
        self._max_bytes, self._free_bytes = max_bytes, max_total

    async def read(self, request: Request) -> bytes:
        """Returns the body of a request. Call `release` when it is no longer needed.

        Raises:
            InvalidRequestError: 413 if the body is too large, by its header or as it arrives; 503 if all
                bodies together are too large; 415 if it is compressed.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise _invalid(415, "send the body without Content-Encoding")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 15 or int(declared) > self._max_bytes):
            raise self._too_large()
        body = bytearray()
        try:
            async for chunk in request.stream():
                if len(body) + len(chunk) > self._max_bytes:
                    raise self._too_large()
                if len(chunk) > self._free_bytes:
                    raise _invalid(503, "too many bodies at once; ask again later")
                self._free_bytes -= len(chunk)
                body += chunk
        except BaseException:
            self._free_bytes += len(body)
            raise
        return bytes(body)

    def release(self, body: bytes) -> None:
        """Subtracts a body from the total in memory."""
        self._free_bytes += len(body)

    def _too_large(self) -> InvalidRequestError:
        return _invalid(413, f"the body has more than {self._max_bytes:,} bytes: send fewer rows at a time")


def failure(status: int, error: str) -> JSONResponse:
    """Returns a response that reports an error."""
    return JSONResponse(Failure(error=error).model_dump(), status)


def _invalid(status: int, error: str) -> InvalidRequestError:
    return InvalidRequestError(status, Failure(error=error))
