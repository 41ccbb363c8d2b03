"""Every document once an epoch, and gradients, losses and evaluations that do not depend on how a batch is split.

On one process, and on two and four: most runs of two share one launch. Killed runs go on with the same steps, also on
another number of ranks, and so do those of streams.
"""

from collections import Counter
from itertools import accumulate, pairwise

import pytest
import torch
import transformers
from document_streams import make_documents, write_parquet
from packaging.version import Version
from processes import documents_of_steps, epochs_seen, losses, read, run
from tiers import fast_only, rarely
from trainers import documents
from training_by_hand import gradients_of_a_padded_batch, largest_difference
from training_process import train

RESUMES_ON_CPUS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="transformers 5.17 cannot load a checkpoint on two CPUs"
)

THROUGH = ["trainer", "sft", "loop"]
NUMBER = 45
EXACT = {"dtype": "float64", "optimizer": "sgd"}


def one_step(number, **more):
    return {**EXACT, "documents": number, "match_documents_per_step": number, "epochs": 1, "max_tokens": 600, **more}


EPOCHS = {through: {"through": through, "documents": NUMBER} for through in THROUGH}
EPOCHS["packed"] = {"through": "sft", "packed": 48, "documents": NUMBER, "accumulation": 2}
HOW = {
    "whole": {},
    "in chunks": {"in_chunks": True},
    "fixed": {"shapes": {"tokens": 640, "max_segments": 40}, "eval_batch_sizes": [1]},
}
STEPS = {
    f"{through} {loss} {how}": one_step(NUMBER, through=through, loss=loss, **HOW[how])
    for through in ("trainer", "loop")
    for loss in ("token", "sequence")
    for how in HOW
}
STEPS["sft sequence"] = one_step(NUMBER, through="sft", loss="sequence", max_tokens=300, accumulation=2)
EVALUATIONS = {
    through: one_step(44, through=through, eval_batch_sizes=[1, 2, 4], max_tokens=2000)
    for through in ("trainer", "loop")
}


def check_every_document_once_an_epoch(folder, number, ranks):
    rows = documents(number)
    pairs = zip(rows["input_ids"], rows["labels"], strict=True)
    counts, orders = epochs_seen(folder, ranks)
    expected = Counter(tuple(ids) for ids, labels in pairs if set(labels[1:]) != {-100})
    assert counts == dict.fromkeys(range(3), expected)
    assert len({tuple(order) for order in orders.values()}) == 3


def check_step(folder, settings):
    """The gradient and the loss are those of a padded batch; the fused head of SFTTrainer computes in float32."""
    close = 1e-5 if settings["through"] == "sft" else 1e-12
    expected, value = gradients_of_a_padded_batch(documents(settings["documents"]), settings["loss"])
    assert len(read(folder, "seen", 0)) == settings.get("accumulation", 1)
    assert largest_difference(torch.load(folder / "gradients.pt"), expected) <= close
    assert losses(folder)[1] == pytest.approx(value, rel=max(close, 1e-6))


@pytest.mark.parametrize("through", fast_only(THROUGH, "trainer", "loop"))
def test_every_document_once_in_every_epoch(tmp_path, through):
    train(tmp_path, through=through, documents=24, accumulation=2)
    check_every_document_once_an_epoch(tmp_path, 24, ranks=1)


@pytest.mark.parametrize(("loss", "through"), [("token", "trainer"), ("sequence", "loop"), ("sequence", "sft")])
def test_the_gradient_does_not_depend_on_the_split(tmp_path, loss, through):
    for accumulation, max_tokens in [(1, 1000), (4, 150)]:
        split = {"accumulation": accumulation, "max_tokens": max_tokens}
        settings = one_step(24, through=through, loss=loss, **split)
        train(tmp_path / str(accumulation), **settings)
        check_step(tmp_path / str(accumulation), settings)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    evaluations = {f"evaluation {through}": settings for through, settings in EVALUATIONS.items()}
    run(folder, {**EPOCHS, **STEPS, **evaluations}, ranks=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", EPOCHS)
def test_every_document_once_in_every_epoch_on_two_ranks(on_two_ranks, name):
    folder = on_two_ranks / name
    check_every_document_once_an_epoch(folder, NUMBER, ranks=2)
    one, other = ([line["step"] for line in read(folder, "seen", rank)] for rank in range(2))
    assert one == other
    if name != "packed":
        assert losses(folder, 0).keys() == set(range(1, len(one) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("through", ["trainer", "sft"])
def test_logs_are_about_all_ranks(on_two_ranks, through):
    folder, tokens = on_two_ranks / through, sum(map(len, documents(NUMBER)["input_ids"]))
    for rank in range(2):
        of_first_epoch = read(folder, "logged", rank)[: len(losses(folder)) // 3]
        assert sum(facts["documents_per_step"] for facts in of_first_epoch) == NUMBER
        assert sum(facts["tokens_per_step"] for facts in of_first_epoch) == tokens
        assert all(0.5 < facts["token_utilization"] <= 1 for facts in of_first_epoch)
        assert min(facts["attention_utilization"] for facts in of_first_epoch) < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_gradient_of_two_ranks_is_that_of_one_batch(on_two_ranks, name):
    check_step(on_two_ranks / name, STEPS[name])
    if "eval_batch_sizes" in STEPS[name]:
        assert read(on_two_ranks / name, "evaluated", 0) == read(on_two_ranks / name, "evaluated", 1)


@pytest.mark.slow
@pytest.mark.parametrize("through", EVALUATIONS)
def test_evaluation_is_the_same_at_any_batch_size_and_on_any_number_of_ranks(on_two_ranks, tmp_path, through):
    train(tmp_path / "one", **EVALUATIONS[through])
    folders = (on_two_ranks / f"evaluation {through}", tmp_path / "one")
    found = [line["loss"] for folder in folders for line in read(folder, "evaluated", 0)]
    assert len(found) == 6
    assert max(found) - min(found) <= 1e-9 * max(found)


def runs(ranks, order=THROUGH, **changes):
    """One run of each kind, in steps of 4 micro-batches; if processes are to be killed, the last run does it."""
    common = {**EXACT, "documents": 100, "max_tokens": 48, "epochs": 2, "save_steps": 1, "accumulation": 4 // ranks}
    killed = {order[-1]: {"kill": True}} if "stop_at" in changes else {}
    return {through: {**common, **changes, "through": through, **killed.get(through, {})} for through in order}


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    for through, settings in runs(1).items():
        train(folder / through, **settings)
    return folder


def assert_same_steps(found, expected):
    assert documents_of_steps(found) == documents_of_steps(expected)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-6)
    assert len(losses(expected)) >= 12


@pytest.mark.slow
@RESUMES_ON_CPUS
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_do_not_depend_on_ranks(on_one_rank, tmp_path, ranks):
    run(tmp_path, runs(ranks), ranks=ranks)
    for through in THROUGH:
        assert_same_steps(tmp_path / through, on_one_rank / through)


@pytest.mark.slow
@RESUMES_ON_CPUS
def test_killed_on_2_ranks_and_resumed_on_4_and_on_1(on_one_rank, tmp_path):
    in_first, in_second = 3, len(losses(on_one_rank / "loop")) // 2 + 2
    run(tmp_path, runs(2, ["sft", "trainer", "loop"], stop_at=in_first), ranks=2, fails=True)
    assert [max(losses(tmp_path / through)) for through in THROUGH] == [in_first] * 3
    run(tmp_path, runs(4, ["loop", "sft", "trainer"], stop_at=in_second, resume=True), ranks=4, fails=True)
    assert [max(losses(tmp_path / through)) for through in THROUGH] == [in_second] * 3
    for through, settings in runs(1, resume=True).items():
        train(tmp_path / through, **settings)
        assert_same_steps(tmp_path / through, on_one_rank / through)


TREES = {"documents": 12, "samples": 3, "share_prefixes": 2, "epochs": 5}
ON_SEVERAL_RANKS = {"max_tokens": 24, "max_ranks": 2}
RESUMED = {"documents": 40, "max_tokens": 96, "save_steps": 2}


@pytest.mark.slow
@RESUMES_ON_CPUS
@pytest.mark.parametrize(
    ("ranks", "through", "more"),
    [
        *((2, each, {}) for each in THROUGH),
        (2, "trainer", TREES),
        (4, "loop", ON_SEVERAL_RANKS),
    ],
    ids=str,
)
def test_killed_and_resumed_on_as_many_ranks(tmp_path, ranks, through, more):
    """Bit for bit on two ranks. In which order more of them sum gradients depends on DDP, which forms other buckets
    after its first step."""
    settings = {**RESUMED, "through": through, **more}
    run(tmp_path, {"whole": settings}, ranks)
    run(tmp_path, {"killed": settings | {"kill": True, "stop_at": 5}}, ranks, fails=True)
    run(tmp_path, {"killed": settings | {"resume": True}}, ranks)
    assert len(losses(tmp_path / "whole")) > 8
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6 if ranks > 2 else 0, abs=0)
    steps = documents_of_steps(tmp_path / "whole")
    assert documents_of_steps(tmp_path / "killed") == steps
    rows = documents(settings["documents"], settings.get("samples", 1)).to_dict()
    trained = {tuple(ids) for ids, labels in zip(*rows.values(), strict=True) if set(labels[1:]) != {-100}}
    found = set().union(*steps.values())
    if "max_ranks" in more:  # found are the pieces of documents
        assert not found <= trained
    else:
        assert found == trained


@pytest.mark.slow
@RESUMES_ON_CPUS
def test_another_batching_is_refused_on_all_ranks_when_a_run_resumes(tmp_path):
    saved = {through: {**RESUMED, "through": through, "steps": 4} for through in THROUGH}
    run(tmp_path, saved, ranks=2)
    other = {"max_tokens": 104, "resume": True, "fails": True, "steps": 6}
    run(tmp_path, {through: settings | other for through, settings in saved.items()}, ranks=2)
    for through in THROUGH:
        for rank in range(2):
            assert (tmp_path / through / f"error-{rank}.txt").read_text().startswith("max_tokens: ")


FILES = {
    "even": [15] * 8,
    "one file 100 times another": [100, 1, 20, 20, 1, 15],
    "fewer files than ranks": [30, 25],
    "empty files": [0, 35, 0, 30, 0],
}
CAPACITY = 48
OF_STREAMS = {"dtype": "float64", "max_tokens": CAPACITY, "packed": CAPACITY}


def write_files(folder, sizes, samples):
    """Write files with different documents of 2 to 30 tokens; so many after each other begin with the same ones."""
    drawn = [[token % 90 for token in each[1:29]] for each in make_documents(sum(sizes))]
    documents = [[*divmod(number, 90), *each] for number, each in enumerate(drawn)]
    if samples:
        begins = [documents[number - number % samples][:20] for number in range(len(documents))]
        documents = [[*begin, *each[:10]] for begin, each in zip(begins, documents, strict=True)]
    borders = [0, *accumulate(sizes)]
    write_parquet(folder / "data", [documents[begin:end] for begin, end in pairwise(borders)], rows_in_group=20)
    return {"files": str(folder / "data"), "share_prefixes": samples}, {tuple(each) for each in documents}


def check_all_are_seen(steps, documents):
    assert set().union(*steps.values()) == documents
    assert sum(map(len, steps.values())) > len(documents), "a second epoch has to begin"


STREAMS = {
    f"{through}, {files}{', trees' if shared else ''}": (through, files, streams, shared)
    for through, files, streams, shared in (
        *(("trainer", files, streams, False) for files, streams in zip(FILES, (8, 4, 16, 12), strict=True)),
        ("trainer", "even", 8, 3),
        ("loop", "empty files", 4, 3),
    )
}


@pytest.fixture(scope="module")
def streams_on_ranks(tmp_path_factory):
    """A folder with the runs of streams on so many ranks, and by the name of a run, its documents."""
    folder, runs, documents = tmp_path_factory.mktemp("streams"), {}, {}
    for name, (through, files, streams, shared) in STREAMS.items():
        data, documents[name] = write_files(folder / name, FILES[files], shared)
        runs[name] = {
            **OF_STREAMS,
            **data,
            "through": through,
            "steps": 26,
            "streams": streams,
            "eval_batch_sizes": [2],
        }
    for ranks in (1, 2, 4):
        accumulation = {"accumulation": 4 // ranks}
        run(folder / str(ranks), {name: settings | accumulation for name, settings in runs.items()}, ranks)
    return folder, documents


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_steps_of_streams_do_not_depend_on_ranks(streams_on_ranks, name):
    folder, documents = streams_on_ranks
    alone, *others = (folder / str(ranks) / name for ranks in (1, 2, 4))
    steps, evaluated = documents_of_steps(alone), read(alone, "evaluated", 0)[0]["loss"]
    check_all_are_seen(steps, documents[name])
    for found in others:
        assert documents_of_steps(found) == steps
        assert losses(found) == pytest.approx(losses(alone), rel=1e-6)
        assert read(found, "evaluated", 0)[0]["loss"] == pytest.approx(evaluated, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("through", "packed", "shared"),
    [("trainer", CAPACITY, False), *rarely([("loop", CAPACITY, False)]), ("trainer", 0, 3)],
)
def test_streams_killed_on_2_ranks_and_resumed_on_4_and_on_1(tmp_path, through, packed, shared):
    data, documents = write_files(tmp_path, FILES["one file 100 times another"], shared)
    settings = {**OF_STREAMS, **data, "through": through, "steps": 26, "packed": packed}
    run(tmp_path, {"whole": settings | {"accumulation": 4}}, 1)
    resumed = settings | {"save_steps": 3, "resume": True}
    for ranks, more in (
        (2, {"resume": False, "kill": True, "stop_at": 7}),
        (4, {"kill": True, "stop_at": 16, "workers": 2}),
        (1, {"workers": 1}),
    ):
        run(tmp_path, {"killed": resumed | more | {"accumulation": 4 // ranks}}, ranks, fails="kill" in more)
    steps = documents_of_steps(tmp_path / "whole")
    check_all_are_seen(steps, documents)
    assert documents_of_steps(tmp_path / "killed") == steps
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


@pytest.mark.slow
def test_a_rank_that_cannot_read_stops_all(tmp_path):
    data, _ = write_files(tmp_path, FILES["even"], False)
    # 120 documents are read to count them
    settings = {**OF_STREAMS, **data, "through": "loop", "steps": 60, "readable": 160, "workers": 1}
    done = run(tmp_path, {"a": settings}, ranks=2, fails=True)
    assert "an unreadable document" in done.stderr
    assert "another rank could not read its next rows" in done.stderr
