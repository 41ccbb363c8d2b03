"""What the package computes equals what is stored. `python tests/goldens/make.py --write` stores it anew."""

import pytest
from goldens.make import SUBJECTS, differences, make, stored
from goldens.plans import SCIPY, THIS_SCIPY
from tiers import rarely, slow

SLOW = ("trainings", "streams", "mixtures", "command", "epochs")


@pytest.mark.parametrize(
    "subject", [slow(each) if each in SLOW else each for each in SUBJECTS if each != "forwards"] + rarely(["forwards"])
)
def test_results_are_the_stored_ones(subject, tmp_path):
    expected = stored(subject)
    if expected.get(SCIPY, THIS_SCIPY) != THIS_SCIPY:
        pytest.skip(f"the stored plans are of scipy {expected[SCIPY]}, and this is scipy {THIS_SCIPY}")
    found = differences(expected, make(subject, tmp_path))
    assert not found, f"{len(found)} cases of {subject} differ:\n" + "\n".join(found)


def test_differences_are_named():
    found = differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"})
    assert found == ["b: 2 -> 4", "c: 3 -> not made", "d: not stored -> 5"]
    found = differences({"a": [1.0, 0.0], "b": [2.0], "c": [1.0]}, {"a": [1.0 + 1e-7, 1e-7], "b": [2.1], "c": []})
    assert found == ["b: [2.0] -> [2.1]", "c: [1.0] -> []"]
