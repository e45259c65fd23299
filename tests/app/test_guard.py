"""What the app answers and what it refuses: other hosts, other origins, no token, too much."""

import asyncio

import pytest

from sightline.app.guard import COOKIE, STARTED, Guard, new_token
from sightline.config import App


async def plain(scope, receive, send):
    """Reads the whole body, then answers."""
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


def ask(guard, path="/", *, query="", body=(b"",), kind="http", **headers):
    """The status and the headers of the answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {"type": kind, "path": path, "query_string": query.encode(), "method": "POST"}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in names.items()]
    pieces, sent = list(body), []

    async def receive():
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message):
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    first = sent[0]
    return first.get("status", first.get("code")), dict(first.get("headers", []))


LOCAL = Guard(plain, host="127.0.0.1", token=None, most_bytes=1000)
OPEN = Guard(plain, host="0.0.0.0", token="right", most_bytes=1000)


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:7860", "[::1]:7860", "LOCALHOST"])
def test_this_machine_is_answered(host):
    assert ask(LOCAL, host=host)[0] == 200
    assert ask(LOCAL, host=host, origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "[", "10.0.0.5:7860"]
)
def test_other_names_are_refused(host):
    """DNS rebinding: the name of another site that now leads to this machine."""
    assert ask(LOCAL, host=host)[0] == 403
    assert ask(LOCAL, host=host, kind="websocket")[0] == 1008


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1.evil.example"]
)
def test_other_origins_are_refused(origin):
    assert ask(LOCAL, "/gradio_api/queue/join", host="127.0.0.1:7860", origin=origin)[0] == 403


def test_others_need_the_token():
    host = {"host": "192.168.0.7:7860"}
    assert ask(OPEN, **host)[0] == 401
    assert ask(OPEN, query="token=wrong", **host)[0] == 401
    assert ask(OPEN, "/gradio_api/upload", query="token=right", **host)[0] == 401, (
        "only the page takes it from its address"
    )
    status, headers = ask(OPEN, query="token=right", **host)
    assert (status, headers[b"location"]) == (303, b"/")
    cookie = headers[b"set-cookie"].decode()
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask(OPEN, "/gradio_api/upload", cookie=cookie.partition(";")[0], **host)[0] == 200
    assert ask(OPEN, cookie=f"{COOKIE}=wrong", **host)[0] == 401
    assert ask(OPEN, cookie=f"{COOKIE}=right", host="evil.example")[0] == 403
    assert ask(OPEN, STARTED, **host)[0] == 200


def test_bodies_are_bounded_with_and_without_a_length():
    host = {"host": "localhost"}
    assert ask(LOCAL, content_length="1001", **host)[0] == 413
    assert ask(LOCAL, content_length="-1", **host)[0] == 413
    assert ask(LOCAL, content_length="1000", body=[bytes(1000)], **host)[0] == 200
    assert ask(LOCAL, body=[bytes(600), bytes(600)], **host)[0] == 413
    assert ask(LOCAL, body=[bytes(400), bytes(400)], **host)[0] == 200


def test_a_token_only_where_others_can_reach_it():
    assert [new_token(host) for host in ("127.0.0.1", "localhost", "::1", App("run").host)] == [None] * 4
    assert new_token("0.0.0.0") != new_token("0.0.0.0")
    assert len(new_token("my-workstation") or "") >= 32
