"""The bounded protocol over a real socket: good requests pass, large heads end their connection."""

import asyncio

import pytest
import uvicorn

from recsys.serving.http import HEAD_BYTES, UNPARSED_BYTES, http_protocol

pytest.importorskip("httptools")


async def application(scope, receive, send):
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = f"{len(scope['headers'])} {size}".encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def answers(*requests: list[bytes]) -> list[bytes]:
    """The first bytes that each connection gets for the pieces that it sends."""

    async def ask(port: int, pieces: list[bytes]) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            pass
        answer = await asyncio.wait_for(reader.read(4096), 30)
        writer.close()
        return answer

    async def run() -> list[bytes]:
        config = uvicorn.Config(application, port=0, http=http_protocol(), log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        results = [await ask(port, pieces) for pieces in requests]
        server.should_exit = True
        await task
        return results

    return asyncio.run(run())


def test_heads_are_bounded_and_bodies_are_not():
    head, body = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n", b"x" * (UNPARSED_BYTES + 70_000)
    large = b"A: " + b"y" * (HEAD_BYTES // 2) + b"\r\n"
    with_body, endless = head % len(body) + b"\r\n" + body, [b"GET / HTTP/1.1\r\nA: "]
    pieces = [with_body[start : start + 50_000] for start in range(0, len(with_body), 50_000)]
    good, together, in_pieces, many, open_end = answers(
        [head % 0 + large + b"\r\n"],
        [with_body],
        pieces,
        [head % 0 + 3 * large + b"\r\n"],
        endless + [b"z" * 60_000] * (UNPARSED_BYTES // 60_000 + 2),
    )
    assert good.startswith(b"HTTP/1.1 200") and good.endswith(b"\r\n\r\n2 0")
    for answer in (together, in_pieces):
        assert answer.endswith(b"\r\n\r\n1 %d" % len(body))
    for answer in (many, open_end):
        assert answer.startswith(b"HTTP/1.1 400") and b"connection: close" in answer
