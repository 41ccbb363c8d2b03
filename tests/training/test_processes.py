"""Real processes: every document once an epoch on two ranks, killed and resumed runs, exact gradients.

test_splits.py has the same laws for one process. Most runs share one launch of two processes.
"""

from collections import Counter

import pytest
import torch
import transformers
from packaging.version import Version
from processes import epochs_seen, logged, losses, read, run, steps_of
from training_by_hand import gradients_of_a_padded_batch, largest_difference
from training_process import documents, train

pytestmark = pytest.mark.slow

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


@RESUMES_ON_CPUS
def test_killed_in_the_first_and_in_the_last_epoch(on_two_ranks, tmp_path):
    """All processes are killed in one of the runs; the others, which share them, end there without any warning."""
    steps = len(losses(on_two_ranks / "trainer")) // 3
    assert {len(losses(on_two_ranks / through)) for through in THROUGH} == {3 * steps}
    settings = {"documents": NUMBER, "save_steps": 1}

    def runs(order, **changes):
        killed = {"kill": True} if "stop_at" in changes else {}
        return {
            through: {**settings, **changes, **(killed if through == order[-1] else {}), "through": through}
            for through in order
        }

    run(tmp_path, runs(["sft", "trainer", "loop"], stop_at=2), ranks=2, fails=True)
    assert [max(losses(tmp_path / through)) for through in THROUGH] == [2] * 3
    run(tmp_path, runs(["loop", "sft", "trainer"], stop_at=2 * steps + 2, resume=True), ranks=2, fails=True)
    run(tmp_path, runs(THROUGH, resume=True), ranks=2)
    for through in THROUGH:
        assert losses(tmp_path / through) == losses(on_two_ranks / through)
        seen, trained = read(on_two_ranks / through, "seen", 1), read(tmp_path / through, "seen", 1)
        assert [line["documents"] for line in trained] == [line["documents"] for line in seen]


@RESUMES_ON_CPUS
def test_another_batching_is_refused_on_all_ranks(tmp_path):
    settings = {"documents": NUMBER, "save_steps": 1, "epochs": 1}
    train(tmp_path / "trainer", stop_at=2, **settings)
    run(tmp_path, {"trainer": {**settings, "max_tokens": 65, "resume": True, "fails": True}}, ranks=2)
    for rank in range(2):
        said = (tmp_path / "trainer" / f"error-{rank}.txt").read_text()
        expected, got = said.split("as when the checkpoint was saved, got")
        assert "batching: expected" in expected
        assert "max_tokens=64" in expected
        assert "max_tokens=65" in got


def test_the_gradient_of_sft_trainer_on_two_ranks(on_two_ranks):
    """Its fused head computes the loss in float32."""
    expected, _ = gradients_of_a_padded_batch(documents(NUMBER), "sequence")
    found = torch.load(on_two_ranks / "sft sequence" / "gradients.pt")
    assert largest_difference(found, expected) <= 1e-5


@pytest.mark.parametrize(
    "name", [name for name, settings in RUNS.items() if {**settings, **WHOLE, **EXACT} == settings]
)
def test_the_gradient_of_two_ranks_is_that_of_one_batch(on_two_ranks, name):
    expected, value = gradients_of_a_padded_batch(documents(NUMBER), RUNS[name]["loss"])
    folder = on_two_ranks / name
    assert len(read(folder, "seen", 0)) == 1
    assert largest_difference(torch.load(folder / "gradients.pt"), expected) <= 1e-12
    assert losses(folder)[1] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("through", ["trainer", "loop"])
@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_fixed_shapes_change_nothing_on_two_ranks(on_two_ranks, loss, through):
    plain, fixed = (on_two_ranks / f"{through} {name}" for name in (loss, f"fixed {loss}"))
    found, expected = (torch.load(folder / "gradients.pt") for folder in (fixed, plain))
    assert largest_difference(found, expected) <= 1e-12
    assert losses(fixed)[1] == pytest.approx(losses(plain)[1], rel=1e-12)
    assert [line["loss"] for line in read(fixed, "evaluated", 0)] == [
        line["loss"] for line in read(fixed, "evaluated", 1)
    ]


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
