"""Whether the hub is asked once, and what follows where it does not answer."""

import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import datasets
import huggingface_hub
import pytest

from hf_packing.errors import PackingError
from hf_packing.text.documents import Documents, hub_answers
from hf_packing.text.text_tokenizer import load_tokenizer

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def online(monkeypatch):
    """Where the hub is looked for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()

    def look_at(endpoint):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)

    yield look_at
    huggingface_hub.close_session()


@pytest.fixture
def asked():
    """A hub that knows nothing, and what it is asked."""
    seen = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith(("/api/models", "/api/datasets")):  # huggingface_hub also asks about itself
                seen.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


def test_a_hub_that_answers(online, asked):
    endpoint, seen = asked
    online(endpoint)
    assert hub_answers("nobody/nothing")
    assert hub_answers("nobody/nothing", "dataset")
    assert seen == ["/api/models/nobody/nothing", "/api/datasets/nobody/nothing"]
    assert hub_answers("no/such/name"), "an answer of huggingface_hub itself"


def test_a_hub_that_is_silent_is_not_waited_for(monkeypatch):
    def repo_info(*_, timeout, **__):
        waits.append(timeout)
        raise TimeoutError

    waits = []
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    assert not hub_answers("nobody/nothing")
    assert len(waits) == 1
    assert waits[0] <= 10


def test_a_hub_out_of_reach_costs_one_try(online, caplog):
    online(NOBODY)
    began = time.monotonic()
    assert not hub_answers("nobody/nothing")
    with pytest.raises(PackingError, match="tokenizer: .*'nobody/nothing' cannot be loaded here"):
        load_tokenizer("nobody/nothing")
    with pytest.raises(PackingError, match="expected a file, a folder or a dataset, got 'nobody/nothing'"):
        list(Documents("nobody/nothing"))
    assert time.monotonic() - began < 5, "huggingface_hub would retry for 24 seconds and more"
    assert not caplog.records
    assert not datasets.config.HF_HUB_OFFLINE


def test_what_the_user_says_stays(asked, online, monkeypatch):
    endpoint, seen = asked
    online(endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not hub_answers("nobody/nothing")
    assert seen == []
