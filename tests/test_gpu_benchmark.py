"""benchmarks/gpu.py without a GPU: the dry run as a whole, and what happens to sides and parts that fail."""

import json
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import gpu
import gpu_part
import numpy as np
import pytest
import torch
from gpu_page import page, summary
from gpu_part import AGAIN, CannotRunError, Results, Scale, Side, compare, tokens_for
from gpu_tests import Kept
from gpu_training import lengths_for, padded_batches
from processes import run_script
from tree_data import Documents

BENCHMARKS = Path(gpu.__file__).parent
DRY = Scale.of(True, 0)


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "part.json")


def raising(error, after=0):
    """A side that raises in a step."""
    calls = iter(range(after))

    def step():
        if next(calls, None) is None:
            raise error
        return 10

    return lambda: Side(step)


def refused():
    raise CannotRunError("not installed")


def good():
    return Side(lambda: 7, lambda: {"kernel": "some"})


def test_sides_that_fail_are_left_out(results):
    sides = {
        "refused": refused,
        "full": raising(torch.OutOfMemoryError("CUDA out of memory. Tried ...")),
        "good": good,
        "late": raising(RuntimeError("one\ntwo"), after=3),
    }
    compare(results, DRY, "title", sides, reference="good")
    found = json.loads(results.file.read_text())["comparisons"]["title"]
    reasons = {name: entry.get("not_run") for name, entry in found["sides"].items()}
    assert reasons == {
        "refused": "not installed",
        "full": "out of memory",
        "good": None,
        "late": "failed: RuntimeError: one",
    }
    assert [len(found["sides"][name]["seconds"]) for name in ("good", "late")] == [DRY.rounds, 1]
    assert found["sides"]["good"]["tokens"] == [7] * DRY.rounds
    assert found["sides"]["good"]["kernel"] == "some"
    assert found["reference"] == "good"


def test_a_part_whose_device_failed_goes_on_without_that_side(results, monkeypatch):
    compare(results, DRY, "before", {"good": good}, reference="good")
    sides = {"good": good, "illegal": raising(RuntimeError("illegal memory access"))}
    with monkeypatch.context() as failed:
        waits = iter([0.0, 0.0, 0.0])  # of both sides' first steps
        failed.setattr(gpu_part, "now", lambda: next(waits))
        with pytest.raises(SystemExit) as ended:
            compare(results, DRY, "title", sides, reference="good")
    assert ended.value.code == AGAIN == gpu.AGAIN
    again = Results(results.file)
    compare(again, DRY, "before", {"good": refused}, reference="good")
    compare(again, DRY, "title", sides, reference="good")
    before, title = (again.found["comparisons"][each]["sides"] for each in ("before", "title"))
    assert len(before["good"]["seconds"]) == len(title["good"]["seconds"]) == DRY.rounds
    assert title["illegal"] == {"not_run": "failed: RuntimeError: illegal memory access"}


@pytest.mark.parametrize(
    ("gibibytes", "tokens"), [(139.8, 16_384), (79.1, 8192), (39.4, 4096), (23.6, 2048), (4, 1024)]
)
def test_tokens_of_a_step_by_the_memory_of_the_card(gibibytes, tokens):
    assert tokens_for(int(gibibytes * 2**30)) == tokens


def test_padded_batches_have_every_document_in_turn(rng):
    lengths = lengths_for(DRY)
    tokens = rng.integers(1, 500, int(lengths.sum()), dtype=np.int32)
    left = tokens.tolist()
    for batch in padded_batches(Documents(tokens, lengths, np.zeros_like(lengths)), DRY):
        assert batch["input_ids"].numel() <= DRY.tokens
        assert batch["attention_mask"].any(0).all(), "padded to the longest, and not beyond"
        real = batch["input_ids"][batch["attention_mask"].bool()].tolist()
        assert (batch["labels"] == torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)).all()
        if len(left) < len(real):
            break
        assert real == left[: len(real)]
        left = left[len(real) :]
    assert len(left) < DRY.tokens


def test_counts_of_tests(results):
    kept = Kept(results)
    kept.pytest_collection_finish(SimpleNamespace(items=range(5)))

    def report(name, when, outcome, longrepr=None):
        known = {each: each == outcome for each in ("passed", "failed", "skipped")}
        kept.pytest_runtest_logreport(SimpleNamespace(nodeid=name, when=when, longrepr=longrepr, **known))

    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="assert 1 == 2\n  where"))
    for name, reprs in {"a": None, "b": crash, "c": None}.items():
        report(name, "setup", "passed")
        report(name, "call", "failed" if reprs else "passed", reprs)
        report(name, "teardown", "passed")
    report("d", "setup", "skipped", ("file", 1, "Skipped: not installed"))
    report("d", "teardown", "passed")
    wanted = {"collected": 5, "passed": 2, "failed": {"b": "assert 1 == 2"}, "skipped": {"not installed": 1}}
    assert json.loads(results.file.read_text()) == wanted


def test_a_part_that_takes_too_long_is_ended(tmp_path):
    log = tmp_path / "log"
    code = "import time; print('begun', flush=True); time.sleep(600)"
    with log.open("w") as file, log.open() as printed:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=file, start_new_session=True)
        assert gpu.wait(process, printed, time.monotonic() + 1) is None
        assert process.poll() is None
        gpu.end(process)
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("error", "has_begun", "kept"),
    [
        (CannotRunError("needs 2 cards"), False, {"not_run": "needs 2 cards"}),
        (ModuleNotFoundError("No module named 'x'", name="x"), False, {"not_run": "x is not installed"}),
        (ValueError("one\ntwo"), False, {"not_run": "failed: ValueError: one; see some.log"}),
        (ValueError("one"), True, {"stopped": "failed: ValueError: one; see some.log"}),
    ],
)
def test_why_a_part_ended(tmp_path, monkeypatch, error, has_begun, kept):
    def run(results, scale):  # noqa: ARG001
        if has_begun:
            results.comparison("title")
        raise error

    monkeypatch.setitem(sys.modules, "some_part", SimpleNamespace(run=run))
    monkeypatch.setattr(gpu, "PARTS", {"some": gpu.Part(1, "some_part")})
    ends = pytest.raises(ValueError, match="one") if isinstance(error, ValueError) else nullcontext()
    with ends:
        gpu.run_part("some", tmp_path / "some.json", SimpleNamespace(dry_run=True, seconds=0, tokens=None))
    found = json.loads((tmp_path / "some.json").read_text())
    assert found.pop("comparisons", None) == ({"title": {"sides": {}}} if has_begun else None)
    assert found == kept


def side(speed, tokens, **more):
    return {"seconds": [tokens / speed] * 3, "tokens": [tokens] * 3, "gibibytes": 2.0, **more}


@pytest.fixture
def result():
    """A made-up result of a card."""
    training = {"padding": side(1000, 500, kernel="sdpa"), "TRL packing": {"not_run": "out of memory"}}
    training |= {"hf_packing": side(5000, 1000, kernel="torch varlen_attn"), "late": {"not_run": "failed: <b>"}}
    kernel = {"exact attention": side(1e6, 1000, error=0.004), "flash-attn 2": {"not_run": "not installed"}}
    return {
        "dry_run": False,
        "command": "python benchmarks/gpu.py",
        "date": "2026-11-27",
        "minutes": 9.5,
        "cards": [{"name": "NVIDIA H100 80GB HBM3", "gibibytes": 79.1, "cuda": "13.0"}] * 2,
        "processor": "some processor",
        "python": "3.12.3",
        "versions": {"torch": "2.11.0"},
        "parts": {
            "tests": {
                "collected": 9,
                "passed": 5,
                "failed": {"test_x": "assert <0>"},
                "skipped": {"not installed": 1},
                "stopped": "stopped after 3.0 minutes",
            },
            "training": {
                "settings": "596.0 million parameters",
                "comparisons": {"documents": {"reference": "padding", "step_tokens": 1000, "sides": training}},
            },
            "trees": {
                "comparisons": {
                    "pairs": {
                        "reference": "packed",
                        "fewer": 1.5,
                        "sides": {"packed": side(100, 30), "trees": side(140, 30)},
                    }
                }
            },
            "ranks": {"not_run": "needs 2 cards; this machine has 1"},
            "kernels": {"comparisons": {"one of 1,000": {"reference": "exact attention", "sides": kernel}}},
        },
    }


def rows_of(html):
    cells = [re.findall("<t[hd]>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", html)]
    return {row[0]: row[1:] for row in cells}


def test_the_page_and_what_is_printed(result):
    html, lines = page(result), summary(result)
    rows = rows_of(html)
    assert rows["padding"] == ["1,000", "1", "50%", "2.0", "sdpa"]
    assert rows["hf_packing"] == ["5,000", "5.0 (5.0 to 5.0)", "100%", "2.0", "torch varlen_attn"]
    assert rows["trees"] == ["140", "1.4 (1.4 to 1.4)", "2.0"]
    assert rows["exact attention"] == ["1.00", "0.4%"]
    text = unescape(html)
    for each in (
        "hf_packing on 2 x NVIDIA H100 80GB HBM3",
        "2026-11-27, 79 GiB, CUDA 13.0, some processor, Python 3.12.3, torch 2.11.0",
        "5 of 9 passed, 1 failed, 1 skipped, 2 not reached; 1 skipped: not installed",
    ):
        assert each in text
        assert each in lines
    assert "Training with hf_packing is 5.0 (5.0 to 5.0) times as fast as padding." in text
    assert "Pairs: trees are 1.4 (1.4 to 1.4) times as fast, with 1.5 times fewer tokens." in text
    assert "Left out: TRL packing (out of memory), late (failed: <b>)." in text
    assert "failed: <b>" not in html, "what is not ours is escaped"
    assert "Not run: needs 2 cards; this machine has 1." in html
    assert "Not finished: stopped after 3.0 minutes." in html
    assert re.findall(r'<i style="width:(.*?)%">', html) == ["20.0", "100.0", "2.0", "2.8"]
    assert "  TRL packing: out of memory" in lines
    assert "One document on two cards: needs 2 cards; this machine has 1" in lines
    assert not re.search(r'(src|href)="', html), "fetched when the page is opened"
    assert "dry run" not in html


def test_the_page_of_a_run_in_which_nothing_ran(result):
    result["parts"] = {name: {"not_run": "interrupted"} for name in result["parts"]}
    assert page(result).count("Not run: interrupted.") == 5
    result |= {"dry_run": True, "cards": []}
    assert "A dry run: the figures mean nothing." in page(result)
    assert summary(result)[0].startswith("A dry run: the figures mean nothing.")


def test_a_reference_that_did_not_run_is_replaced(result):
    sides = result["parts"]["training"]["comparisons"]["documents"]["sides"]
    sides["padding"] = {"not_run": "out of memory"}
    assert rows_of(page(result))["hf_packing"][1] == "1"
    assert "times as fast as hf_packing" in page(result)


@pytest.mark.survey
def test_dry_run(tmp_path):
    done = run_script(BENCHMARKS / "gpu.py", "--dry-run", "--minutes", 30, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["dry_run"]
    assert list(found["parts"]) == list(gpu.PARTS)
    assert not any({"not_run", "stopped"} & set(part) for part in found["parts"].values()), done.stdout[-4000:]
    tests = found["parts"]["tests"]
    assert tests["collected"] == sum(tests["skipped"].values()) > 100
    sides = {
        (name, title): each["sides"]
        for name, part in found["parts"].items()
        for title, each in part.get("comparisons", {}).items()
    }
    assert [name for name, _ in sides] == ["kernels"] * 4 + ["training"] + ["trees"] * 2 + ["ranks"]
    left_out = [(name, side["not_run"]) for each in sides.values() for name, side in each.items() if "not_run" in side]
    assert left_out == [("sdpa with a mask", "takes no trees")]
    assert all(len(side["seconds"]) >= 2 for each in sides.values() for side in each.values() if "seconds" in side)
    html = (tmp_path / "gpu.html").read_text()
    assert html == page(found)
    assert "A dry run: the figures mean nothing." in html
    assert {"padding", "TRL packing", "hf_packing", "packed", "trees", "one card", "two cards"} <= set(rows_of(html))
    printed = "\n".join(found["printed"])
    assert printed in done.stdout
    code = f"import json, write_readme; print(write_readme.section(json.load(open({str(tmp_path / 'gpu.json')!r}))))"
    section = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert section.stdout.startswith("## gpu\n\nEverything that needs a GPU")
    assert printed in section.stdout


@pytest.mark.slow
def test_parts_that_do_not_run_say_why(tmp_path):
    script = BENCHMARKS / "gpu.py"
    done = run_script(
        script, "--dry-run", "--minutes", 0.01, "--only", "trees", "ranks", "--skip", "ranks", "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts["trees"]["stopped"] == "stopped after 0.0 minutes"
    left_out = {name: "left out by --only or --skip" for name in gpu.PARTS if name != "trees"}
    assert {name: part.get("not_run") for name, part in parts.items() if name != "trees"} == left_out
    done = run_script(script, "--dry-run", "--save")
    assert done.returncode == 2
    assert "--save: expected a card, got a dry run, whose figures mean nothing" in done.stderr
