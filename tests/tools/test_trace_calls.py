"""The tracer counts what a call enters: functions by file, in order, and nothing that only defines things."""

import threading

import pytest

import hf_packing as hfp
from tools import trace_calls


def test_files_and_functions_in_the_order_of_entry():
    plan_packing, strategy = hfp.plan_packing, hfp.BestFit(8)
    entered = trace_calls.trace(lambda: plan_packing([3, 4, 5], strategy))
    assert next(iter(entered)) == "strategies/base.py"
    assert entered["strategies/base.py"][0] == "plan_packing"
    assert any(name.endswith("__post_init__") for name in entered["planning/plan.py"])


def test_other_code_and_class_bodies_do_not_count():
    source = "class Defined:\n    inner = [each for each in range(3)]\n"
    assert trace_calls.trace(lambda: sorted([2, 1], key=lambda each: -each)) == {}
    body = compile(source, str(trace_calls.PACKAGE / "body.py"), "exec")
    entered = trace_calls.trace(lambda: exec(body, {"__name__": "body"}))
    assert all(not functions for functions in entered.values())


def test_threads_are_traced():
    plan = hfp.plan_packing([3, 4, 5], hfp.BestFit(8))

    def in_thread() -> None:
        thread = threading.Thread(target=plan.metrics)
        thread.start()
        thread.join()

    assert any(name.endswith("metrics") for name in trace_calls.trace(in_thread)["planning/plan.py"])


def test_the_table(monkeypatch, capsys):
    monkeypatch.setattr(trace_calls, "trace_in_own_process", lambda _: {"a.py": ["f"], "b.py": ["g", "h"]})
    trace_calls.main(["pack", "--list"])
    shown = capsys.readouterr().out
    assert "b.py: g, h" in shown
    assert shown.split()[-3:] == ["pack", "2", "3"]
    with pytest.raises(SystemExit):
        trace_calls.main(["packing"])


@pytest.mark.slow
def test_a_call_in_its_own_process():
    assert "strategies/base.py" in trace_calls.trace_in_own_process("plan_packing")
