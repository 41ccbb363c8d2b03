"""A data set is trained on with the same optimizer steps on 1, 2 and 4 ranks, also by a run that changes them.

test_elastic_streams.py has the same for streams; test_slots.py has the laws of the plans.
"""

import pytest
import transformers
from packaging.version import Version
from processes import epochs_seen, losses, read, run
from training_process import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default::FutureWarning"),  # TRL uses names that transformers has renamed
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.18"),
        reason="transformers 5.17 cannot load a checkpoint on two CPUs",
    ),
]

THROUGH = ["trainer", "sft", "loop"]
SETTINGS = {"documents": 100, "max_tokens": 48, "epochs": 2, "dtype": "float64", "optimizer": "sgd"}


def runs(ranks, order=THROUGH, slots=4, **changes):
    """One run of each kind; if the processes are to be killed, the last run does it."""
    common = {**SETTINGS, "save_steps": 1, "accumulation": slots // ranks, **changes}
    killed = {order[-1]: {"kill": True}} if "stop_at" in changes else {}
    return {through: {**common, "through": through, **killed.get(through, {})} for through in order}


def documents_of_steps(folder):
    """The documents of each optimizer step over all ranks, as sets; a killed run may have begun a step twice."""
    steps = {}
    for rank in range(len(list(folder.glob("seen-*.jsonl")))):
        for line in read(folder, "seen", rank):
            steps.setdefault(line["step"], set()).update(tuple(ids) for ids, trained in line["documents"] if trained)
    return steps


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """The folder with the results of runs on one rank, with an accumulation of 4."""
    folder = tmp_path_factory.mktemp("one")
    for through, settings in runs(1).items():
        train(folder / through, **settings)
        counts, _ = epochs_seen(folder / through, ranks=1)
        assert all(set(count.values()) == {1} for count in counts.values())
        assert len(counts) == 2
    return folder


def assert_same_steps(found, expected):
    assert documents_of_steps(found) == documents_of_steps(expected)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-6)
    assert len(losses(expected)) >= 12


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_do_not_depend_on_ranks(on_one_rank, tmp_path, ranks):
    run(tmp_path, runs(ranks), ranks=ranks)
    for through in THROUGH:
        assert_same_steps(tmp_path / through, on_one_rank / through)


def test_killed_on_2_ranks_and_resumed_on_4_and_on_1(on_one_rank, tmp_path):
    in_first, in_second = 3, len(losses(on_one_rank / "loop")) // 2 + 2
    run(tmp_path, runs(2, ["sft", "trainer", "loop"], stop_at=in_first), ranks=2, fails=True)
    assert [max(losses(tmp_path / through)) for through in THROUGH] == [in_first] * 3
    run(tmp_path, runs(4, ["loop", "sft", "trainer"], stop_at=in_second, resume=True), ranks=4, fails=True)
    assert [max(losses(tmp_path / through)) for through in THROUGH] == [in_second] * 3
    for through, settings in runs(1, resume=True).items():
        train(tmp_path / through, **settings)
        assert_same_steps(tmp_path / through, on_one_rank / through)
