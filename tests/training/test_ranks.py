"""Ranks that bring different data or settings: refused on all of them, before the first batch; no rank hangs."""

import json
import re
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from patched_models import patched
from processes import launch
from ranks_process import DATA, SAME, Rank, loop
from tiny_models import build
from trainers import trainer_of

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.errors import PackingError
from hf_packing.training import ranks as training_ranks

FACTS = {
    "shard": r"rank 0 has \d+ rows and \d+ tokens, but rank 1 has \d+ rows and \d+ tokens",
    "shuffle": "ranks 0 and 1 have as many tokens, but rows of different lengths",
    "40 against 48": r"rank 0 has 40 rows and 414 tokens, but rank \d has 48 rows and 531 tokens",
    "12 against 64": r"rank 0 has 12 rows and 150 tokens, but rank \d has 64 rows and 789 tokens",
    "fewer rows than ranks": r"rank 0 has 1 rows and 12 tokens, but rank \d has 64 rows",
    "a row too long": r"rank 0 has 64 rows and 789 tokens, but rank \d has 64 rows and 850 tokens",
    "other tokens": r"ranks 0 and \d have rows of the same lengths, but with different tokens or labels",
    "other labels": r"ranks 0 and \d have rows of the same lengths, but with different tokens or labels",
    "list": r"rank 0 has \d+ rows and \d+ tokens, but rank 1 has",
    "list of other labels": r"ranks 0 and \d have rows of the same lengths, but with different tokens or labels",
    "torch dataset": r"ranks? 0",
    "torch dataset of as many rows": "ranks 0 and 1 have rows of the same lengths, but with different tokens",
    "random transform": "ranks 0 and 1 have as many tokens, but rows of different lengths",
    "packed": r"rank 0 has \d+ rows and \d+ tokens, but rank 1 has",
}
SETTINGS = {
    "seed": r"batching: .* rank 0 has TokenBudget\(seed=0, .*rank 1 has TokenBudget\(seed=1",
    "max_tokens": r"batching: .* rank 0 has TokenBudget\(.*max_tokens=64.* rank \d has TokenBudget\(.*max_tokens=72",
    "a budget too small": r"batching: .* rank 0 has .*max_tokens=64.* rank \d has .*max_tokens=8",
    "overflow": r"batching: .* rank 0 has .*overflow='error'.* rank \d has .*overflow='drop'",
    "no batching": r"batching: expected TokenBudget\(...\) or BucketBatches",
    "tokens": r"tokens: expected the same value on all ranks; rank 0 has 64, rank \d has 72",
    "max_segments": r"max_segments: expected the same value on all ranks; rank 0 has 8, rank \d has 9",
    "loss": r"loss: expected the same value on all ranks; rank 0 has token, rank \d has sequence",
    "no loss": r"loss: expected one of token, sequence, got 'mean'",
    "accumulation": r"gradient_accumulation_steps: expected the same value on all ranks; rank 0 has 1, rank \d has 2",
    "model": r"batching: .* rank 0 has .*linear_cost=240.0.* rank \d has .*linear_cost=",
}


class NotedError(Exception):
    """A rank has said what it planned from, and waits for the others."""


def on_ranks(monkeypatch, calls):
    """Make a call for each rank, as if each of them were a process; return the error of each, or None.

    Every call runs twice: until it has to wait for the other ranks, and with what all of them have said.
    """
    reports = []

    def note(own):
        reports.extend(own)
        raise NotedError

    monkeypatch.setattr(training_ranks, "is_initialized", lambda: True)
    monkeypatch.setattr(training_ranks, "PartialState", lambda: SimpleNamespace(num_processes=len(calls)))
    monkeypatch.setattr(training_ranks, "gather_object", note)
    for call in calls:
        with suppress(NotedError):
            call()
    assert len(reports) == len(calls)
    monkeypatch.setattr(training_ranks, "gather_object", lambda _: reports)
    return [error_of(call) for call in calls]


def error_of(call):
    try:
        call()
    except Exception as error:
        return {"message": f"{type(error).__name__}: {error}"}
    return {"message": None}


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("case", FACTS)
def test_different_data_of_a_loop(monkeypatch, case, number):
    data = [Rank(rank, number).data()[case]() for rank in range(number)]
    for of_rank in on_ranks(monkeypatch, [lambda each=each: loop(each) for each in data]):
        check(of_rank, rf"dataset: expected the same rows on all ranks; .*{FACTS[case]}")
        check(of_rank, r"Give every rank the whole dataset, without .shard\(\)")


@pytest.mark.parametrize("case", SAME)
def test_the_same_data_of_a_loop(monkeypatch, case):
    def prepare():
        hfp.prepare_dataloader(Accelerator(cpu=True), SAME[case](), hfp.TokenBudget(64))

    assert [of_rank["message"] for of_rank in on_ranks(monkeypatch, [prepare] * 2)] == [None] * 2


@pytest.mark.parametrize("case", [name for name in SETTINGS if name not in ("accumulation", "model")])
def test_different_batchings_of_a_loop(monkeypatch, case):
    given = [Rank(rank, 2).batching()[case] for rank in range(2)]
    calls = [lambda each=each: loop(DATA, each[0] or 64, **each[1]) for each in given]
    for of_rank in on_ranks(monkeypatch, calls):
        check(of_rank, SETTINGS[case])


def test_a_rank_that_attaches_without_a_batching(monkeypatch, tmp_path):
    trainers = [trainer_of(tmp_path, model=build("Llama")) for _ in range(2)]
    batchings = [hfp.TokenBudget(64), None]
    calls = [partial(hfp.attach, *each) for each in zip(trainers, batchings, strict=True)]
    for of_rank in on_ranks(monkeypatch, calls):
        check(of_rank, r"batching: expected the same value on all ranks; rank 0 has TokenBudget.*, rank 1 has None")
    assert not any(is_patched(trainer.model) for trainer in trainers)


def test_different_accumulations_and_models_of_a_loop(monkeypatch):
    for of_rank in on_ranks(monkeypatch, [lambda last=last: loop(DATA, accumulation=1 + last) for last in range(2)]):
        check(of_rank, SETTINGS["accumulation"])
    models = [build("Llama", intermediate_size=96 + 32 * last) for last in range(2)]
    for of_rank in on_ranks(monkeypatch, [lambda each=each: loop(DATA, model=each) for each in models]):
        check(of_rank, SETTINGS["model"])


def test_different_data_of_an_evaluation(monkeypatch):
    model = patched()
    shards = [DATA.shard(2, rank) for rank in range(2)]
    calls = [lambda each=each: hfp.evaluation_loss(Accelerator(cpu=True), model, each) for each in shards]
    for of_rank in on_ranks(monkeypatch, calls):
        check(of_rank, "dataset: expected the same rows on all ranks; rank 0 has")


def test_an_error_of_one_rank_reaches_the_others_in_one_process(monkeypatch):
    def fail(_):
        raise PackingError("batching: expected TokenBudget")

    calls = [lambda: training_ranks.on_all_ranks(lambda _: 1), lambda: training_ranks.on_all_ranks(fail)]
    other, failed = on_ranks(monkeypatch, calls)
    check(other, "^PackingError: rank 1 of 2 raised PackingError: batching: expected TokenBudget")
    check(failed, "^PackingError: batching: expected TokenBudget")


def test_only_the_first_loader_of_a_collective_call_is_compared():
    collective = training_ranks.CollectiveCall()
    assert collective.runner() is not training_ranks.on_all_ranks
    with collective.active():
        assert collective.runner() is training_ranks.on_all_ranks
        assert collective.runner() is not training_ranks.on_all_ranks
    with collective.active():
        pass
    assert collective.runner()(lambda planned_from: planned_from.compared) is False


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By case, what each of three ranks was told, and how many steps it had trained before."""
    folder = tmp_path_factory.mktemp("ranks")
    done = launch("ranks_process.py", folder, ranks=3, fails=True)
    ranks = [json.loads((folder / f"ranks-{rank}.json").read_text()) for rank in range(3)]
    assert all(of_rank.keys() == ranks[0].keys() for of_rank in ranks), done.stderr[-3000:]
    return {case: [of_rank[case] for of_rank in ranks] for case in ranks[0]}


def of_kind(told, kind):
    """What was told by who was asked and what was different."""
    found = {tuple(case.split(": ")): ranks for case, ranks in told.items()}
    return {(who, case): ranks for (who, which, case), ranks in found.items() if which == kind}


@pytest.mark.slow
def test_different_data_is_refused_on_all_ranks_before_the_first_batch(told):
    found = of_kind(told, "data")
    assert {case for who, case in found if who == "loop"} == FACTS.keys()
    assert {who for who, case in found if case == "shard"} == {"Trainer", "SFTTrainer", "loop", "tensor parallel ranks"}
    for (_, case), ranks in found.items():
        for of_rank in ranks:
            assert of_rank["steps"] == 0
            check(of_rank, rf"dataset: expected the same rows on all ranks; .*{FACTS[case]}")
            check(of_rank, r"Give every rank the whole dataset, without .shard\(\)")


@pytest.mark.slow
def test_every_process_ends_with_the_error(told):
    for of_rank in told["loop: end: shard"]:
        check(of_rank, "PackingError: dataset: expected the same rows on all ranks; rank 0 has")


@pytest.mark.slow
def test_different_batchings_are_refused_on_all_ranks(told):
    found = of_kind(told, "batching")
    assert {case for who, case in found if who == "loop"} == SETTINGS.keys()
    for (_, case), ranks in found.items():
        for of_rank in ranks:
            assert of_rank["steps"] == 0
            check(of_rank, SETTINGS[case])


@pytest.mark.slow
def test_an_error_of_one_rank_is_told_to_the_others(told):
    *others, failed = told["Trainer: batching: no batching"]
    number = len(others)
    for of_rank in others:
        check(of_rank, rf"rank {number} of {number + 1} raised PackingError: batching: expected TokenBudget")
    check(failed, "PackingError: batching: expected TokenBudget")
    *others, failed = told["Trainer: later: another collator on one rank"]
    for of_rank in others:
        check(
            of_rank, rf"rank {number} of {number + 1} raised PackingError: data_collator: expected the collator set by"
        )
    check(failed, "PackingError: data_collator: expected the collator set by attach")


@pytest.mark.slow
def test_different_data_of_evaluations_is_refused_on_all_ranks(told):
    found = of_kind(told, "evaluation")
    expected = {
        "eval_dataset": r"eval_dataset: expected the same rows on all ranks; rank 0 has",
        "one of several": r"eval_dataset\['some'\]: expected the same rows on all ranks; rank 0 has",
        "no eval_dataset": r"eval_dataset: expected a dataset on all ranks, but rank 0 has a dataset and rank \d",
        "evaluate": r"eval_dataset: expected the same rows on all ranks; ranks 0 and 1 have as many tokens",
        "evaluate nothing": r"eval_dataset: expected the same rows on all ranks; rank 0 has 64 rows",
        "predict": r"test_dataset: expected the same rows on all ranks; ranks 0 and 1 have as many tokens",
        "predict nothing": r"test_dataset: expected the same rows on all ranks; rank 0 has 64 rows",
        "shard": r"dataset: expected the same rows on all ranks; rank 0 has",
    }
    assert {case for _, case in found} == expected.keys()
    for (_, case), ranks in found.items():
        for of_rank in ranks:
            check(of_rank, expected[case])


@pytest.mark.slow
def test_data_that_changes_later_is_refused_on_all_ranks(told):
    for kind in ("Trainer", "SFTTrainer"):
        for of_rank in told[f"{kind}: later: another train_dataset"]:
            check(of_rank, r"train_dataset: expected the same rows on all ranks; rank 0 has 64 rows")
    for of_rank in told["loop: later: rows on one rank"]:
        check(of_rank, "dataset: expected 64 rows, as when batches were planned, got 73")


@pytest.mark.slow
def test_the_same_data_is_trained_on(told):
    """Also after refusals, and where rows are random at each reading."""
    found = {case: ranks for case, ranks in told.items() if case.split(": ")[1] in ("same", "trained")}
    assert len(found) == 16
    for case, ranks in found.items():
        assert [of_rank["message"] for of_rank in ranks] == [None] * len(ranks), case
        if ": trained: " in case:
            assert [of_rank["steps"] for of_rank in ranks] == [1] * len(ranks)


def check(of_rank, pattern):
    assert re.search(pattern, of_rank["message"] or "nothing"), (pattern, of_rank)
