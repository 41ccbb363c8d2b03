"""The part of gpu.py that runs the tests marked `gpu`, and says which failed or were skipped, and why."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_part import CannotRunError, Results, Scale

ROOT = Path(__file__).parent.parent


def run(results: Results, scale: Scale) -> None:  # noqa: ARG001
    """Run the tests in this process. What a test has found is kept at once, since they may be stopped."""
    try:
        import pytest
    except ImportError as error:
        raise CannotRunError('pytest is not installed: pip install -e ".[dev]"') from error
    os.chdir(ROOT)
    kept, flags = Kept(results), ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    for file in sorted(Path("tests").rglob("test_*.py")):
        if "mark.gpu" in file.read_text():  # one by one: a folder whose conftest.py needs another package stops pytest
            status = pytest.main([*flags, str(file)], plugins=[kept])
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                results.found["failed"].setdefault(
                    str(file), f"pytest ended with {pytest.ExitCode(status).name}; see tests.log"
                )


class Kept:
    """A plugin of pytest that counts tests in the results.

    Args:
        results: which get the counts, the tests that failed, and the reasons of those skipped.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        results.found |= {"collected": 0, "passed": 0, "failed": {}, "skipped": {}}

    def pytest_collectreport(self, report: Any) -> None:
        """Keep why a file could not be imported."""
        if report.failed:
            self.results.found["failed"][report.nodeid] = str(report.longrepr).strip().splitlines()[-1][:300]

    def pytest_collection_finish(self, session: Any) -> None:
        self.results.found["collected"] += len(session.items)
        self.results.save()

    def pytest_runtest_logreport(self, report: Any) -> None:
        found = self.results.found
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
            found["failed"][report.nodeid] = text.partition("\n")[0][:300]
        elif report.skipped:
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            found["skipped"] = dict(Counter(found["skipped"]) + Counter([reason]))
        elif report.when == "call":
            found["passed"] += 1
        if report.when == "teardown":
            self.results.save()
