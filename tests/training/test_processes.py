"""Every document once an epoch, and gradients, losses and evaluations that do not depend on how a batch is split.

On one process, and on two and four: most runs of two share one launch. Killed runs go on with the same steps, also on
another number of ranks; test_elastic_streams.py has the same for streams.
"""

from collections import Counter

import pytest
import torch
import transformers
from packaging.version import Version
from processes import epochs_seen, logged, losses, read, run, steps_of
from training_by_hand import gradients_of_a_padded_batch, largest_difference
from training_process import documents, train

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed
RESUMES_ON_CPUS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="transformers 5.17 cannot load a checkpoint on two CPUs"
)

THROUGH = ["trainer", "sft", "loop"]
NUMBER = 45
WHOLE = {"documents": NUMBER, "max_tokens": 600, "match_documents_per_step": NUMBER, "epochs": 1}
EXACT = {"dtype": "float64", "optimizer": "sgd"}
RUNS = {
    **{through: {"through": through, "documents": NUMBER} for through in THROUGH},
    "packed": {"through": "sft", "packed": 48, "documents": NUMBER, "accumulation": 2},
    "sft sequence": {**WHOLE, **EXACT, "through": "sft", "loss": "sequence", "max_tokens": 300, "accumulation": 2},
    **{
        f"{through} {loss}": {**WHOLE, **EXACT, "through": through, "loss": loss}
        for through in ("trainer", "loop")
        for loss in ("token", "sequence")
    },
    **{
        f"{through} {loss} in chunks": {**WHOLE, **EXACT, "through": through, "loss": loss, "in_chunks": True}
        for through, loss in (("trainer", "token"), ("loop", "sequence"))
    },
    **{
        f"{through} fixed {loss}": {
            **WHOLE,
            **EXACT,
            "through": through,
            "loss": loss,
            "shapes": {"tokens": 640, "max_segments": 40},
            "eval_batch_sizes": [1],
        }
        for through in ("trainer", "loop")
        for loss in ("token", "sequence")
    },
    **{
        f"{through} evaluation": {
            **EXACT,
            "through": through,
            "documents": 44,
            "max_tokens": 2000,
            "match_documents_per_step": 44,
            "epochs": 1,
            "eval_batch_sizes": [1, 2, 4],
            "in_chunks": through == "trainer",
        }
        for through in ("trainer", "loop")
    },
}


def trained_documents(number=NUMBER):
    """Each with at least one label to train on."""
    rows = documents(number)
    return Counter(
        tuple(ids) for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True) if set(labels[1:]) != {-100}
    )


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """The folder with the results of RUNS."""
    folder = tmp_path_factory.mktemp("two")
    run(folder, RUNS, ranks=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*THROUGH, "packed"])
def test_every_document_once_in_every_epoch_on_two_ranks(on_two_ranks, name):
    folder = on_two_ranks / name
    counts, orders = epochs_seen(folder, ranks=2)
    assert list(counts) == [0, 1, 2]
    assert all(count == trained_documents() for count in counts.values())
    assert len({tuple(order) for order in orders.values()}) == 3
    assert steps_of(folder, 0) == steps_of(folder, 1)
    if name != "packed":
        assert losses(folder, 0).keys() == set(range(1, len(steps_of(folder, 0)) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("through", ["trainer", "sft"])
def test_logs_are_about_all_ranks(on_two_ranks, through):
    folder = on_two_ranks / through
    for rank in range(2):
        of_first_epoch = list(logged(folder, rank).values())[: len(losses(folder)) // 3]
        assert sum(facts["documents_per_step"] for facts in of_first_epoch) == NUMBER
        assert sum(facts["tokens_per_step"] for facts in of_first_epoch) == sum(
            map(len, documents(NUMBER)["input_ids"])
        )
        assert all(0.5 < facts["token_utilization"] <= 1 for facts in of_first_epoch)
        assert min(facts["attention_utilization"] for facts in of_first_epoch) < 1


@pytest.mark.slow
def test_the_gradient_of_sft_trainer_on_two_ranks(on_two_ranks):
    """Its fused head computes the loss in float32."""
    expected, _ = gradients_of_a_padded_batch(documents(NUMBER), "sequence")
    found = torch.load(on_two_ranks / "sft sequence" / "gradients.pt")
    assert largest_difference(found, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, settings in RUNS.items() if {**settings, **WHOLE, **EXACT} == settings]
)
def test_the_gradient_of_two_ranks_is_that_of_one_batch(on_two_ranks, name):
    expected, value = gradients_of_a_padded_batch(documents(NUMBER), RUNS[name]["loss"])
    folder = on_two_ranks / name
    assert len(read(folder, "seen", 0)) == 1
    assert largest_difference(torch.load(folder / "gradients.pt"), expected) <= 1e-12
    assert losses(folder)[1] == pytest.approx(value, rel=1e-6)
    if RUNS[name].get("eval_batch_sizes"):
        assert read(folder, "evaluated", 0) == read(folder, "evaluated", 1)


@pytest.mark.slow
@pytest.mark.parametrize("through", ["trainer", "loop"])
def test_evaluation_is_the_same_at_any_batch_size_and_on_any_number_of_ranks(on_two_ranks, tmp_path, through):
    train(tmp_path / "one", **RUNS[f"{through} evaluation"])
    found = [
        line["loss"]
        for folder in (on_two_ranks / f"{through} evaluation", tmp_path / "one")
        for line in read(folder, "evaluated", 0)
    ]
    assert len(found) == 6
    assert max(found) - min(found) <= 1e-9 * max(found)


FEW = 24


@pytest.mark.parametrize("through", ["trainer", "sft", "loop"])
def test_every_document_once_in_every_epoch(tmp_path, through):
    train(tmp_path, through=through, documents=FEW, accumulation=2)
    counts, orders = epochs_seen(tmp_path, ranks=1)
    rows = documents(FEW)
    trained = zip(rows["input_ids"], rows["labels"], strict=True)
    expected = Counter(tuple(ids) for ids, labels in trained if set(labels[1:]) != {-100})
    assert list(counts) == [0, 1, 2]
    assert all(count == expected for count in counts.values())
    assert len({tuple(order) for order in orders.values()}) == 3


@pytest.mark.parametrize(("loss", "through"), [("token", "trainer"), ("sequence", "loop")])
def test_the_gradient_does_not_depend_on_the_split(tmp_path, loss, through):
    expected, value = gradients_of_a_padded_batch(documents(FEW), loss)
    for accumulation, max_tokens in [(1, 1000), (4, 150)]:
        folder = tmp_path / str(accumulation)
        settings = {"accumulation": accumulation, "max_tokens": max_tokens, "match_documents_per_step": FEW}
        settings |= {"epochs": 1, "dtype": "float64", "optimizer": "sgd"}
        train(folder, through=through, loss=loss, documents=FEW, **settings)
        assert len(read(folder, "seen", 0)) == accumulation
        assert largest_difference(torch.load(folder / "gradients.pt"), expected) <= 1e-12
        assert losses(folder)[1] == pytest.approx(value, rel=1e-6)


def test_the_gradient_of_sft_trainer(tmp_path):
    """Its fused head computes the loss in float32."""
    expected, _ = gradients_of_a_padded_batch(documents(FEW), "sequence")
    settings = {"accumulation": 4, "max_tokens": 150, "match_documents_per_step": FEW, "epochs": 1}
    train(tmp_path, through="sft", loss="sequence", documents=FEW, dtype="float64", optimizer="sgd", **settings)
    assert largest_difference(torch.load(tmp_path / "gradients.pt"), expected) <= 1e-5


def test_evaluation_of_a_loop_is_the_same_at_any_batch_size(tmp_path):
    settings = {"epochs": 1, "optimizer": "sgd", "dtype": "float64", "match_documents_per_step": FEW}
    train(tmp_path, through="loop", documents=FEW, max_tokens=1000, eval_batch_sizes=[1, 2, 4], **settings)
    found = [line["loss"] for line in read(tmp_path, "evaluated", 0)]
    assert len(found) == 3
    assert max(found) - min(found) <= 1e-9 * max(found)


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
