"""Small documents, tiny models and the shared data, for all tests."""

import gc
import itertools
import json
import logging
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start: as many run as there are cores

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("default", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=150)  # before a release
settings.load_profile("default")

ROOT = Path(__file__).parent.parent
NUMBERS = itertools.count()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage while files are imported: each time, it would look at all that has been imported before."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    """Files that take longest begin first: a process has a whole file, and none should wait for the last one."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: -slow[item.path] / tests[item.path])


def pytest_terminal_summary(terminalreporter):
    """Say how many tests were skipped, in one line for each reason."""
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, tests in skipped.most_common():
        terminalreporter.write_line(f"{tests} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Datasets in memory are cached in a folder of the test's own, which is there once something is cached."""
    folder = tmp_path_factory.getbasetemp() / f"datasets-cache-{next(NUMBERS)}"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch  # the process that hands out the tests needs none

    torch.set_num_threads(1)
    trace = logging.getLogger("torch.__trace")  # pytest would listen to it, and torch write down all that it compiles
    trace.propagate = True
    trace.handlers.clear()


@pytest.fixture(scope="module", autouse=True)
def few_objects_for_the_garbage_collector():
    """Every training collects garbage, and takes longer over what is imported than for the rest of a tiny training."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def shared_data() -> Path:
    """The folder with real text and lengths; a clone elsewhere has none."""
    folder = Path(os.environ.get("HF_PACKING_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder}; HF_PACKING_DATA names its folder")
    return folder


@pytest.fixture
def bert_wikipedia(shared_data) -> np.ndarray:
    """Counts by length of BERT's Wikipedia sequences at 512 tokens (arXiv 2107.02027)."""
    histogram = json.loads((shared_data / "bert_wikipedia_512_histogram.json").read_text())
    return np.array([0, *histogram["wikipedia_bert_512"]["counts"]])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
