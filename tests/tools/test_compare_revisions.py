"""The comparison runs each tree's own package, in turn, and every workload runs on this one."""

from pathlib import Path

import pytest

import hf_packing as hfp
from tools import compare_revisions
from tools.compare_revisions import ROOT, WORKLOADS, _time_revision, compare


def test_medians_of_rounds_in_turn(monkeypatch):
    order = []

    def timed(root, names):
        order.append(root)
        return dict.fromkeys(names, float(len(order)))

    monkeypatch.setattr(compare_revisions, "_time_revision", timed)
    other = Path("other")
    assert compare(other, ["plan"], 3) == {"plan": (3.0, 4.0)}  # 2, 3 and 6 against 1, 4 and 5
    assert order == [ROOT, other, other, ROOT, ROOT, other]


@pytest.mark.slow
def test_a_tree_is_timed_in_a_process_of_its_own():
    assert _time_revision(ROOT, ["plan"])["plan"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map", "collate", "read", "patch"])
def test_workloads_run(name):
    WORKLOADS[name][1](hfp)()
