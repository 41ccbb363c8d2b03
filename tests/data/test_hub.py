"""Whether the hub is looked for, and what follows where it is not there."""

import os
import socket

import pytest

from hf_packing.report.hub import is_reachable, look_for_hub


@pytest.fixture
def endpoint(monkeypatch):
    """Something that listens, in place of the hub."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")] + ["HF_HUB_OFFLINE"]:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_reachable(endpoint):
    assert is_reachable(endpoint)
    assert not is_reachable("http://127.0.0.1:9")
    assert not is_reachable("http://")


def test_what_lies_behind_a_proxy_is_not_asked(endpoint, monkeypatch):  # noqa: ARG001
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert is_reachable("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("names", "there", "offline"),
    [
        (["nobody/nothing", None], False, True),
        (["nobody/nothing", None], True, False),
        (["{folder}", None], False, False),
        (["{folder}", "gpt2"], False, True),
    ],
)
def test_offline_only_where_the_hub_is_needed_and_away(endpoint, monkeypatch, tmp_path, names, there, offline):
    monkeypatch.setenv("HF_ENDPOINT", endpoint if there else "http://127.0.0.1:9")
    look_for_hub(*(name and name.format(folder=tmp_path) for name in names))
    assert ("HF_HUB_OFFLINE" in os.environ) == offline


def test_what_the_user_says_stays(endpoint, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    look_for_hub("nobody/nothing")
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert endpoint
