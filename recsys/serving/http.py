"""Chooses uvicorn's parser of HTTP: httptools with bounds on heads, or h11, which has its own."""

from importlib.util import find_spec
from typing import Any

HEAD_BYTES = 64 * 1024
"""Most bytes of the names and values of a request's headers, as in h11."""

UNPARSED_BYTES = 512 * 1024
"""Most bytes that may arrive without the end of the head, in several pieces: one header without an end."""


def http_protocol() -> Any:
    """Returns uvicorn's setting `http`: its protocol for httptools with bounds, else "h11".

    httptools takes about half of h11's CPU time, but stores headers without a bound, and so does uvicorn.
    """
    if find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedProtocol(HttpToolsProtocol):
        """Answers 400 and closes the connection if a head is too large."""

        _in_head, _head_bytes, _unparsed_bytes = True, 0, 0

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._unparsed_bytes = self._unparsed_bytes + len(data) if self._in_head else 0
            if self._unparsed_bytes > UNPARSED_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > HEAD_BYTES:
                raise ValueError("the head of the request is too large")  # uvicorn answers 400
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head, self._unparsed_bytes = True, 0
            super().on_message_complete()

    return BoundedProtocol
