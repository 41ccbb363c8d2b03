"""Streams on 1, 2 and 4 processes: the same steps, also after kills and resumes on other numbers of ranks."""

import json
from collections import Counter
from itertools import accumulate, pairwise

import elastic_process
import pytest
from document_streams import make_documents, write_parquet
from processes import launch, losses, read

FILES = {
    "even": [30] * 8,
    "one file 100 times another": [200, 2, 40, 40, 2, 30],
    "fewer files than ranks": [60, 50],
    "empty files": [0, 70, 0, 60, 0],
}


def write(folder, sizes, samples=1):
    """Write files with different documents of at most 30 tokens; return all documents.

    So many documents, one after the other, begin with the same tokens.
    """
    drawn = [[token % 90 for token in each[1:29]] for each in make_documents(sum(sizes))]
    documents = [[*divmod(number, 90), *each] for number, each in enumerate(drawn)]
    if samples > 1:
        begins = [documents[number - number % samples][:20] for number in range(len(documents))]
        documents = [[*begin, *each[:10]] for begin, each in zip(begins, documents, strict=True)]
    borders = [0, *accumulate(sizes)]
    write_parquet(folder / "data", [documents[begin:end] for begin, end in pairwise(borders)])
    return [tuple(each) for each in documents]


def run(folder, ranks, fails=False, **settings):
    """Train; what the processes note is in the folder, data and checkpoints are beside it."""
    assert settings.keys() <= elastic_process.SETTINGS.keys()
    launch("elastic_process.py", folder, json.dumps(settings), ranks=ranks, fails=fails)


def steps_of(folder, ranks):
    """The documents of each step, on all ranks together."""
    steps = {}
    for line in (line for rank in range(ranks) for line in read(folder, "seen", rank)):
        steps.setdefault(line["step"], Counter()).update(map(tuple, line["documents"]))
    return steps


def documents_read(folder, ranks):
    return [tuple(line) for rank in range(ranks) for line in read(folder, "read", rank)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "files", "streams", "shared"),
    [
        *(("trainer", files, streams, None) for files, streams in zip(FILES, (8, 4, 16, 12), strict=True)),
        ("loop", "even", 8, None),
        ("trainer", "even", 8, 3),
        ("loop", "empty files", 4, 3),
    ],
)
def test_steps_do_not_depend_on_ranks(tmp_path, files, how, streams, shared):
    documents = write(tmp_path, FILES[files], samples=shared or 1)
    found = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / f"{ranks} ranks"
        run(folder, ranks, how=how, steps=42, accumulation=4 // ranks, streams=streams, shared=shared, evaluate=True)
        found[ranks] = steps_of(folder, ranks), losses(folder), read(folder, "evaluated", 0)[0]["loss"]
    steps, alone, evaluated = found[1]
    counts = sum(steps.values(), Counter())
    assert set(counts) == set(documents)
    assert counts.total() > len(documents), "a second epoch has to begin"
    for ranks in (2, 4):
        assert found[ranks][0] == steps
        assert found[ranks][1] == pytest.approx(alone, rel=1e-6)
        assert found[ranks][2] == pytest.approx(evaluated, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "packs", "shared"),
    [("trainer", False, None), ("trainer", True, None), ("loop", False, None), ("trainer", True, 3)],
)
def test_killed_on_2_ranks_and_resumed_on_4_and_on_1(tmp_path, how, packs, shared):
    documents = write(tmp_path, FILES["one file 100 times another"], samples=shared or 1)
    settings = {"how": how, "steps": 40, "packs": packs, "shared": shared}
    run(tmp_path / "whole", 1, accumulation=4, **settings)
    steps, expected = steps_of(tmp_path / "whole", 1), losses(tmp_path / "whole")
    resumed = settings | {"save": 5, "resume": True}
    first = {"fails": True, "kill": 13, "dispatch": how == "loop"}
    run(tmp_path / "first", 2, accumulation=2, **first, **resumed | {"resume": False})
    if how == "loop":
        assert documents_read(tmp_path / "first", 1)
        assert not (tmp_path / "first" / "read-1.jsonl").exists(), "with dispatch, only the first rank reads"
    run(tmp_path / "second", 4, accumulation=1, fails=True, kill=27, workers=2, dispatch=packs, **resumed)
    run(tmp_path / "third", 1, accumulation=4, workers=1, **resumed)
    runs = {"first": (2, 0, 13), "second": (4, 10, 27), "third": (1, 25, 40)}
    for name, (ranks, begin, end) in runs.items():
        found = steps_of(tmp_path / name, ranks)
        assert {step: found[step] for step in range(begin, end)} == {step: steps[step] for step in range(begin, end)}
        assert min(found) == begin
    for name in ("second", "third") if how == "loop" else ("third",):  # a killed trainer has not written its losses
        for step, loss in losses(tmp_path / name).items():
            assert loss == pytest.approx(expected[step], rel=1e-6)
    assert len(documents_read(tmp_path / "third", 1)) < len(documents_read(tmp_path / "whole", 1))
    assert sum(steps.values(), Counter()).total() > len(documents)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_rank_that_cannot_read_stops_all(tmp_path, dispatch):
    write(tmp_path, FILES["even"])
    settings = {"how": "loop", "steps": 60, "unreadable": 60, "workers": 1, "dispatch": dispatch}
    done = launch("elastic_process.py", tmp_path / "run", json.dumps(settings), ranks=2, fails=True)
    of_others = "the main process, which raised" if dispatch else "another rank could not read its next rows"
    assert "an unreadable document" in done.stderr or of_others in done.stderr
