"""Real processes: every document once an epoch on two ranks, killed and resumed runs, the gradients of one rank."""

from collections import Counter

import pytest
import transformers
from packaging.version import Version
from processes import (
    epochs_seen,
    evaluated,
    gradients_of_a_padded_batch,
    largest_difference,
    logged,
    losses,
    read,
    run,
    run_all,
    steps_of,
)
from training_process import EVALUATED, NUMBER, ONE_STEP, documents, train

pytestmark = pytest.mark.slow

RESUMES_ON_CPUS = Version(transformers.__version__) >= Version("5.18")
resumes_on_cpus = pytest.mark.skipif(
    not RESUMES_ON_CPUS, reason="transformers 5.17 cannot load a checkpoint on two CPUs"
)

THROUGH = ["trainer", "sft", "loop"]
ON_ONE_RANK = {"save_steps": 1, "epochs": 1}
RUNS = {
    **{through: {"through": through} for through in THROUGH},
    "packed": {"through": "sft", "packed": 48, "accumulation": 2},
    "gradient of sft": ONE_STEP | {"through": "sft", "loss": "sequence", "accumulation": 2, "max_tokens": 300},
    **{
        f"gradient of {through}, {loss}": ONE_STEP | {"through": through, "loss": loss, "max_tokens": 600}
        for through in ("trainer", "loop")
        for loss in ("token", "sequence")
    },
    **{f"evaluation of {through}": EVALUATED | {"through": through} for through in ("trainer", "loop")},
}
"""On two ranks, one after the other in the same processes."""


def trained_documents(number=NUMBER):
    """Each with at least one label to train on."""
    rows = documents(number)
    return Counter(
        tuple(ids) for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True) if set(labels[1:]) != {-100}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What two ranks have written in each of RUNS, by its name, and where checkpoints of one rank were resumed."""
    folder, runs = tmp_path_factory.mktemp("runs"), dict(RUNS)
    for through in ("trainer", "loop") if RESUMES_ON_CPUS else ():
        name = f"resumed {through}"
        train(folder / name, through=through, stop_at=2, **ON_ONE_RANK)
        runs[name] = ON_ONE_RANK | {"through": through, "resume": True}
    run_all(folder, runs, ranks=2)
    return {name: folder / name for name in runs}


@pytest.mark.parametrize("through", THROUGH)
def test_every_document_once_in_every_epoch_on_two_ranks(folders, through):
    folder = folders[through]
    counts, orders = epochs_seen(folder, ranks=2)
    assert list(counts) == [0, 1, 2]
    assert all(count == trained_documents() for count in counts.values())
    assert len({tuple(order) for order in orders.values()}) == 3
    assert steps_of(folder, 0) == steps_of(folder, 1)
    assert losses(folder, 0).keys() == set(range(1, len(steps_of(folder, 0)) + 1))


@pytest.mark.parametrize("through", ["trainer", "sft"])
def test_logs_are_about_all_ranks(folders, through):
    folder = folders[through]
    for rank in range(2):
        of_first_epoch = list(logged(folder, rank).values())[: len(losses(folder)) // 3]
        assert sum(facts["documents_per_step"] for facts in of_first_epoch) == NUMBER
        assert sum(facts["tokens_per_step"] for facts in of_first_epoch) == sum(
            map(len, documents(NUMBER)["input_ids"])
        )
        assert all(0.5 < facts["token_utilization"] <= 1 for facts in of_first_epoch)
        assert min(facts["attention_utilization"] for facts in of_first_epoch) < 1


def test_packed_rows_once_in_every_epoch_on_two_ranks(folders):
    counts, orders = epochs_seen(folders["packed"], ranks=2)
    assert all(count == trained_documents() for count in counts.values())
    assert len({tuple(order) for order in orders.values()}) == 3


@resumes_on_cpus
@pytest.mark.parametrize("through", ["sft", "loop"])
def test_killed_in_the_first_and_in_the_last_epoch(folders, tmp_path, through):
    expected = losses(folders[through])
    steps = len(expected) // 3
    folder, settings = tmp_path / "run", {"ranks": 2, "through": through, "save_steps": 1}
    run(folder, fails=True, kill_at=2, **settings)
    assert max(losses(folder)) == 2
    run(folder, fails=True, kill_at=2 * steps + 2, resume=True, **settings)
    run(folder, resume=True, **settings)
    assert losses(folder) == expected
    seen, trained = read(folders[through], "seen", 1), read(folder, "seen", 1)
    assert [line["documents"] for line in trained] == [line["documents"] for line in seen]


@resumes_on_cpus
@pytest.mark.parametrize("through", ["trainer", "loop"])
def test_another_number_of_ranks_is_refused_in_the_middle_of_an_epoch(folders, through):
    for rank in range(2):
        said = (folders[f"resumed {through}"] / f"refused-{rank}.txt").read_text()
        assert "world_size: expected 1, as when the checkpoint was saved, got 2" in said


def test_the_gradient_of_sft_trainer_on_two_ranks(folders):
    """Its fused head makes the loss in float32."""
    expected, _ = gradients_of_a_padded_batch("sequence")
    assert largest_difference(folders["gradient of sft"] / "gradients.pt", expected) <= 1e-5


@pytest.mark.parametrize("through", ["trainer", "loop"])
@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_the_gradient_does_not_depend_on_the_ranks(folders, loss, through):
    expected, value = gradients_of_a_padded_batch(loss)
    folder = folders[f"gradient of {through}, {loss}"]
    assert len(read(folder, "seen", 0)) == 1
    assert largest_difference(folder / "gradients.pt", expected) <= 1e-12
    assert losses(folder)[1] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("through", ["trainer", "loop"])
def test_evaluation_is_the_same_on_any_number_of_ranks(tmp_path, folders, through):
    train(tmp_path / "run", through=through, **EVALUATED)
    found = [*evaluated(tmp_path / "run"), *evaluated(folders[f"evaluation of {through}"])]
    assert len(found) == 6
    assert max(found) - min(found) <= 1e-9 * max(found)
