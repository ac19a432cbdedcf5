"""The routes without a package: errors that nobody foresaw, and what goes past the direct routes."""

from contextlib import contextmanager
from types import SimpleNamespace

from starlette.testclient import TestClient

from recsys.serving.application import ServingOptions, create_app
from recsys.serving.metrics import Metrics


@contextmanager
def failing():
    raise RuntimeError("a secret")
    yield


def client() -> TestClient:
    holder = SimpleNamespace(use=failing)
    experiment = SimpleNamespace(holders=[holder], first=SimpleNamespace(recommends=False), compares=False)
    options = ServingOptions(deadline=5.0, max_requests=4, max_body=1000, max_bodies=2000, token=None)
    return TestClient(create_app(experiment, Metrics(), options))


def test_an_unforeseen_error_is_logged_and_tells_the_client_nothing(caplog):
    answer = client().post("/score", json={"rows": []})
    assert answer.status_code == 500 and answer.json()["error"] == "internal error; the server's log has it"
    assert "a secret" not in answer.text and "a secret" in caplog.text


def test_other_methods_paths_and_bodies_get_their_answers():
    asked = client()
    assert asked.get("/score").status_code == 405
    assert asked.post("/scores", json={}).status_code == 404
    assert asked.post("/recommend", json={"rows": []}).status_code == 404
    assert asked.post("/score", content=b"x" * 1001).status_code == 413
