"""Streams on 1, 2 and 4 processes: the same steps, also after kills and resumes on other numbers of ranks."""

from itertools import accumulate, pairwise

import pytest
from document_streams import make_documents, write_parquet
from processes import documents_of_steps, losses, read, run

FILES = {
    "even": [30] * 8,
    "one file 100 times another": [200, 2, 40, 40, 2, 30],
    "fewer files than ranks": [60, 50],
    "empty files": [0, 70, 0, 60, 0],
}
CAPACITY = 48
STREAM = {"dtype": "float64", "max_tokens": CAPACITY, "packed": CAPACITY}


def write(folder, sizes, samples):
    """Write files with different documents of 2 to 30 tokens; so many after each other begin with the same ones."""
    drawn = [[token % 90 for token in each[1:29]] for each in make_documents(sum(sizes))]
    documents = [[*divmod(number, 90), *each] for number, each in enumerate(drawn)]
    if samples:
        begins = [documents[number - number % samples][:20] for number in range(len(documents))]
        documents = [[*begin, *each[:10]] for begin, each in zip(begins, documents, strict=True)]
    borders = [0, *accumulate(sizes)]
    write_parquet(folder / "data", [documents[begin:end] for begin, end in pairwise(borders)])
    return {"files": str(folder / "data"), "share_prefixes": samples}, {tuple(each) for each in documents}


def check_all_are_seen(steps, documents):
    assert set().union(*steps.values()) == documents
    assert sum(map(len, steps.values())) > len(documents), "a second epoch has to begin"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("through", "files", "streams", "shared"),
    [
        *(("trainer", files, streams, False) for files, streams in zip(FILES, (8, 4, 16, 12), strict=True)),
        ("loop", "even", 8, False),
        ("trainer", "even", 8, 3),
        ("loop", "empty files", 4, 3),
    ],
)
def test_steps_do_not_depend_on_ranks(tmp_path, through, files, streams, shared):
    data, documents = write(tmp_path, FILES[files], shared)
    settings = {**STREAM, **data, "through": through, "steps": 42, "streams": streams, "eval_batch_sizes": [2]}
    for ranks in (1, 2, 4):
        run(tmp_path / str(ranks), {"a": settings | {"accumulation": 4 // ranks}}, ranks)
    alone, *others = (tmp_path / str(ranks) / "a" for ranks in (1, 2, 4))
    steps, evaluated = documents_of_steps(alone), read(alone, "evaluated", 0)[0]["loss"]
    check_all_are_seen(steps, documents)
    for folder in others:
        assert documents_of_steps(folder) == steps
        assert losses(folder) == pytest.approx(losses(alone), rel=1e-6)
        assert read(folder, "evaluated", 0)[0]["loss"] == pytest.approx(evaluated, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("through", "packed", "shared"),
    [("trainer", CAPACITY, False), ("trainer", 0, False), ("loop", CAPACITY, False), ("trainer", 0, 3)],
)
def test_killed_on_2_ranks_and_resumed_on_4_and_on_1(tmp_path, through, packed, shared):
    data, documents = write(tmp_path, FILES["one file 100 times another"], shared)
    settings = {**STREAM, **data, "through": through, "steps": 40, "packed": packed}
    run(tmp_path, {"whole": settings | {"accumulation": 4}}, 1)
    resumed = settings | {"save_steps": 5, "resume": True}
    for ranks, more in (
        (2, {"resume": False, "kill": True, "stop_at": 13}),
        (4, {"kill": True, "stop_at": 27, "workers": 2}),
        (1, {"workers": 1}),
    ):
        run(tmp_path, {"killed": resumed | more | {"accumulation": 4 // ranks}}, ranks, fails="kill" in more)
    steps = documents_of_steps(tmp_path / "whole")
    check_all_are_seen(steps, documents)
    assert documents_of_steps(tmp_path / "killed") == steps
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


@pytest.mark.slow
def test_a_rank_that_cannot_read_stops_all(tmp_path):
    data, _ = write(tmp_path, FILES["even"], False)
    settings = {**STREAM, **data, "through": "loop", "steps": 60, "readable": 60, "workers": 1}
    done = run(tmp_path, {"a": settings}, ranks=2, fails=True)
    assert "an unreadable document" in done.stderr
    assert "another rank could not read its next rows" in done.stderr
