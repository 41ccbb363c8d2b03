"""Ranks that bring different data or settings: refused on all of them, before the first batch; no rank hangs."""

import json
import re
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from patched_models import patched
from processes import on_ranks as call_on_ranks
from tiny_models import build
from trainers import documents, trainer_of
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.training import ranks as training_ranks

DATA = documents(64)


class Rows(torch.utils.data.Dataset):
    """Rows of one length, made as they are read."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"input_ids": [self.numbers[index] % 90 + 3] * 12}


def masked_at_random(batch):
    labels = [[token if np.random.random() < 0.5 else -100 for token in row] for row in batch["input_ids"]]
    return {"input_ids": batch["input_ids"], "labels": labels}


def longer(data):
    return datasets.Dataset.from_dict({"input_ids": [*data["input_ids"][:-1], list(range(65))]})


def other(column):
    return lambda row: {column: [token if token == -100 else token + 1 for token in row[column]]}


class Rank:
    """What one of several ranks brings along."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.last = rank == ranks - 1

    def shifted(self, column):
        return DATA.map(other(column), load_from_cache_file=False) if self.last else DATA

    def data(self):
        """By case, a function that makes the data of this rank, which others have in part or not at all."""
        rank, ranks, last = self.rank, self.ranks, self.last
        return {
            "shard": lambda: DATA.shard(ranks, rank),
            "shuffle": lambda: DATA.shuffle(seed=rank),
            "40 against 48": lambda: documents(40 + 8 * last),
            "12 against 64": lambda: documents(64 if last else 12),
            "fewer rows than ranks": lambda: documents(64 if last else 1),
            "a row too long": lambda: longer(DATA) if last else DATA,
            "other tokens": lambda: self.shifted("input_ids"),
            "other labels": lambda: self.shifted("labels"),
            "list": lambda: DATA.to_list()[rank::ranks],
            "list of other labels": lambda: self.shifted("labels").to_list(),
            "torch dataset": lambda: Rows(range(rank, 64, ranks)),
            "torch dataset of as many rows": lambda: Rows(range(rank * 32, rank * 32 + 32)),
            "random transform": lambda: DATA.shuffle(seed=rank).with_transform(masked_at_random),
            "packed": lambda: hfp.pack(DATA.shard(ranks, rank), hfp.BestFit(48), load_from_cache_file=False),
        }

    def batching(self):
        """By case, the batching of this rank and further settings."""
        last = self.last
        return {
            "seed": (hfp.TokenBudget(64, seed=self.rank), {}),
            "max_tokens": (hfp.TokenBudget(64 + 8 * last), {}),
            "a budget too small": (hfp.TokenBudget(8 if last else 64), {}),
            "overflow": (hfp.TokenBudget(64, overflow="drop" if last else "error"), {}),
            "tokens": (hfp.TokenBudget(64), {"tokens": 64 + 8 * last, "max_segments": 9}),
            "max_segments": (hfp.TokenBudget(64, max_documents=7), {"tokens": 64, "max_segments": 8 + last}),
            "no batching": (64 if last else hfp.TokenBudget(64), {}),
            "loss": (hfp.TokenBudget(64), {"loss": "sequence" if last else "token"}),
            "no loss": (hfp.TokenBudget(64), {"loss": "mean" if last else "token"}),
        }


SAME = {
    "table": lambda: DATA,
    "list": lambda: DATA.to_list(),
    "torch dataset": lambda: Rows(range(64)),
    "random transform": lambda: DATA.with_transform(masked_at_random),
}
"""Data that all ranks have, which they train on: none of these is refused."""


class Steps(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_begin(self, *_, **__):
        self.steps += 1


class Log:
    """What this process was told in each case."""

    def __init__(self, folder, rank):
        self.file = folder / f"ranks-{rank}.json"
        self.told = {}

    def told_of(self, name, act, steps=None):
        failure = None
        try:
            act()
        except Exception as error:  # that is what is written down
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        self.told[name] = {"message": message, "steps": 0 if steps is None else steps.steps}
        self.file.write_text(json.dumps(self.told))
        return failure


def trainer(folder, kind, data=None, steps=None, **changes):
    made = trainer_of(folder, kind, data=data, max_steps=1, **changes)
    if steps is not None:
        made.add_callback(steps)
    return made


def attach_and_train(made, batching=None, **settings):
    hfp.attach(made, hfp.TokenBudget(64) if batching is None else batching, **settings)
    made.train()


def through_trainer(log, folder, kind, own):
    for name in ("shard", "shuffle", "40 against 48", "12 against 64", "other tokens"):
        steps = Steps()
        made = trainer(folder, kind, own.data()[name](), steps)
        log.told_of(f"{kind.__name__}: data: {name}", lambda made=made: attach_and_train(made), steps)
    steps = Steps()
    made = trainer(folder, kind, DATA, steps, gradient_accumulation_steps=1 + own.last)
    log.told_of(f"{kind.__name__}: batching: accumulation", lambda: attach_and_train(made), steps)
    for name, (given, settings) in own.batching().items():
        made = trainer(folder, kind, DATA)
        log.told_of(
            f"{kind.__name__}: batching: {name}",
            lambda made=made, given=given, settings=settings: hfp.attach(made, given, **settings),
        )


def evaluations(log, folder, kind, own):
    for name, evaluated in {
        "eval_dataset": DATA.shard(own.ranks, own.rank),
        "one of several": {"all": DATA, "some": DATA.shard(own.ranks, own.rank)},
        "no eval_dataset": None if own.last else DATA,
    }.items():
        made = trainer(folder, kind, DATA)
        made.eval_dataset = evaluated
        log.told_of(f"{kind.__name__}: evaluation: {name}", lambda made=made: hfp.attach(made, hfp.TokenBudget(64)))
    made = trainer(folder, kind, DATA)
    hfp.attach(made, hfp.TokenBudget(64))
    for method in ("evaluate", "predict"):
        call = getattr(made, method)
        log.told_of(f"{kind.__name__}: same: {method}", lambda call=call: call(documents(9)))
        log.told_of(f"{kind.__name__}: evaluation: {method}", lambda call=call: call(DATA.shuffle(seed=own.rank)))
        if kind is Trainer:  # SFTTrainer prepares what it evaluates, and other ranks wait for that
            log.told_of(f"Trainer: evaluation: {method} nothing", lambda call=call: call([] if own.last else DATA))
    made.train_dataset = documents(50) if own.last else DATA
    log.told_of(f"{kind.__name__}: later: another train_dataset", made.train)
    made.train_dataset = DATA
    made.data_collator = None if own.last else made.data_collator
    log.told_of(f"{kind.__name__}: later: another collator on one rank", made.train)
    made.data_collator = made.planned_batches.collator
    if own.rank == 0:
        assert next(iter(made.get_train_dataloader()))["input_ids"].shape[0] == 1  # no other rank waits for it
    log.told_of(f"{kind.__name__}: same: after all that", made.train)


def loop(data, batching=None, **settings):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings.pop("accumulation", 1))
    for _ in hfp.prepare_dataloader(accelerator, data, batching or hfp.TokenBudget(64), **settings):
        pass


def loops(log, own):
    for name, data in own.data().items():
        log.told_of(f"loop: data: {name}", lambda data=data: loop(data()))
    for name, data in SAME.items():
        log.told_of(f"loop: same: {name}", lambda data=data: loop(data()))
    for name, (given, settings) in own.batching().items():
        given = 64 if given is None else given
        log.told_of(f"loop: batching: {name}", lambda given=given, settings=settings: loop(DATA, given, **settings))
    log.told_of("loop: batching: accumulation", lambda: loop(DATA, accumulation=1 + own.last))
    model, other_model = build("Llama"), build("Llama", intermediate_size=96 + 32 * own.last)
    log.told_of("loop: batching: model", lambda: loop(DATA, model=other_model))
    accelerator, shard = Accelerator(cpu=True), DATA.shard(own.ranks, own.rank)
    hfp.patch_model(model)
    log.told_of("loop: evaluation: shard", lambda: hfp.evaluation_loss(accelerator, model, shard))
    rows = DATA.to_list()
    loader = hfp.prepare_dataloader(accelerator, rows, hfp.TokenBudget(64))
    rows.extend(rows[:9] if own.last else [])
    log.told_of("loop: later: rows on one rank", lambda: next(iter(loader)))
    log.told_of("loop: same: evaluation", lambda: hfp.evaluation_loss(accelerator, model, documents(9)))

    def shared(data):
        assert len(list(hfp.prepare_dataloader(accelerator, data, hfp.TokenBudget(64)).plan.micro_batches(0))) == 13

    accelerator.state.parallelism_config = SimpleNamespace(tp_size=own.ranks, cp_size=1, sp_size=1)
    log.told_of("tensor parallel ranks: data: shard", lambda: shared(shard))
    log.told_of("tensor parallel ranks: same: table", lambda: shared(DATA))
    accelerator.state.parallelism_config = None


def tell(folder):
    """Write what this rank is told in each case; the last one is not caught, so that every process ends with it."""
    state = PartialState(cpu=True, timeout=timedelta(seconds=120))
    own = Rank(state.process_index, state.num_processes)
    log = Log(folder, own.rank)
    for kind in (Trainer, SFTTrainer):
        through_trainer(log, folder, kind, own)
        evaluations(log, folder, kind, own)
    for name, data in SAME.items():
        steps = Steps()
        made = trainer(folder, Trainer, data(), steps)
        log.told_of(f"Trainer: trained: {name}", lambda made=made: attach_and_train(made), steps)
    loops(log, own)
    accelerator, shard = Accelerator(cpu=True), DATA.shard(own.ranks, own.rank)
    end = log.told_of("loop: end: shard", lambda: hfp.prepare_dataloader(accelerator, shard, hfp.TokenBudget(64)))
    state.wait_for_everyone()  # the first process that ends takes the others with it
    raise end


ARGUMENTS = {
    **dict.fromkeys(["seed", "max_tokens", "a budget too small", "overflow", "no batching"], "batching"),
    "tokens": "tokens",
    "max_segments": "max_segments",
    "loss": "loss",
    "no loss": "loss",
}
"""What is named where ranks have different batchings or settings, by case of `Rank.batching`."""
CASES = [*Rank(0, 2).data()]
DIFFERENT = "dataset: expected the same rows on all ranks; "


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
@pytest.mark.parametrize("case", CASES)
def test_different_data_of_a_loop(monkeypatch, case, number):
    data = [Rank(rank, number).data()[case]() for rank in range(number)]
    for of_rank in on_ranks(monkeypatch, [lambda each=each: loop(each) for each in data]):
        check(of_rank, DIFFERENT)
    if case == "40 against 48":
        check(of_rank, r"rank 0 has 40 rows and 414 tokens, but rank \d has 48 rows and 531 tokens")


@pytest.mark.parametrize("case", SAME)
def test_the_same_data_of_a_loop(monkeypatch, case):
    def prepare():
        hfp.prepare_dataloader(Accelerator(cpu=True), SAME[case](), hfp.TokenBudget(64))

    assert [of_rank["message"] for of_rank in on_ranks(monkeypatch, [prepare] * 2)] == [None] * 2


@pytest.mark.parametrize("case", ARGUMENTS)
def test_different_batchings_of_a_loop(monkeypatch, case):
    given = [Rank(rank, 2).batching()[case] for rank in range(2)]
    calls = [lambda each=each: loop(DATA, each[0] or 64, **each[1]) for each in given]
    for of_rank in on_ranks(monkeypatch, calls):
        check(of_rank, f"{ARGUMENTS[case]}: ")


def test_a_rank_that_attaches_without_a_batching(monkeypatch, tmp_path):
    trainers = [trainer_of(tmp_path, model=build("Llama")) for _ in range(2)]
    batchings = [hfp.TokenBudget(64), None]
    calls = [partial(hfp.attach, *each) for each in zip(trainers, batchings, strict=True)]
    for of_rank in on_ranks(monkeypatch, calls):
        check(of_rank, r"batching: expected the same value on all ranks; rank 0 has TokenBudget.*, rank 1 has None")
    assert not any(is_patched(trainer.model) for trainer in trainers)


def test_different_accumulations_and_models_of_a_loop(monkeypatch):
    for of_rank in on_ranks(monkeypatch, [lambda last=last: loop(DATA, accumulation=1 + last) for last in range(2)]):
        check(of_rank, "gradient_accumulation_steps: ")
    models = [build("Llama", intermediate_size=96 + 32 * last) for last in range(2)]
    for of_rank in on_ranks(monkeypatch, [lambda each=each: loop(DATA, model=each) for each in models]):
        check(of_rank, r"batching: .* rank 0 has .*linear_cost=240.0")


def test_different_data_of_an_evaluation(monkeypatch):
    model = patched()
    shards = [DATA.shard(2, rank) for rank in range(2)]
    calls = [lambda each=each: hfp.evaluation_loss(Accelerator(cpu=True), model, each) for each in shards]
    for of_rank in on_ranks(monkeypatch, calls):
        check(of_rank, "dataset: expected the same rows on all ranks; rank 0 has")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By case, what each of three ranks was told, and how many steps it had trained before."""
    folder = tmp_path_factory.mktemp("ranks")
    done = call_on_ranks(tell, folder, ranks=3, fails=True)
    ranks = [json.loads((folder / f"ranks-{rank}.json").read_text()) for rank in range(3)]
    assert all(of_rank.keys() == ranks[0].keys() for of_rank in ranks), done.stderr[-3000:]
    return {case: [of_rank[case] for of_rank in ranks] for case in ranks[0]}


def of_kind(told, kind):
    """What was told by who was asked and what was different."""
    found = {tuple(case.split(": ")): ranks for case, ranks in told.items()}
    return {(who, case): ranks for (who, which, case), ranks in found.items() if which == kind}


@pytest.mark.slow
def test_what_differs_is_refused_on_all_ranks_before_the_first_batch(told):
    found = of_kind(told, "data")
    assert {case for who, case in found if who == "loop"} == set(CASES)
    assert {who for who, case in found if case == "shard"} == {"Trainer", "SFTTrainer", "loop", "tensor parallel ranks"}
    settings = of_kind(told, "batching")
    names = ARGUMENTS | {"accumulation": "gradient_accumulation_steps", "model": "batching"}
    assert {case for who, case in settings if who == "loop"} == names.keys()
    for (who, case), ranks in (found | settings).items():
        for of_rank in ranks:
            assert of_rank["steps"] == 0
            check(of_rank, DIFFERENT if (who, case) in found else f"{names[case]}: ")
    for of_rank in told["loop: end: shard"]:
        check(of_rank, f"PackingError: {DIFFERENT}rank 0 has")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "argument"),
    [
        ("Trainer: batching: no batching", "batching: expected TokenBudget"),
        ("Trainer: later: another collator on one rank", "data_collator: expected the collator set by attach"),
    ],
)
def test_an_error_of_one_rank_is_told_to_the_others(told, case, argument):
    *others, failed = told[case]
    for of_rank in others:
        check(of_rank, rf"rank {len(others)} of {len(others) + 1} raised PackingError: {argument}")
    check(failed, f"PackingError: {argument}")


@pytest.mark.slow
def test_different_data_of_evaluations_is_refused_on_all_ranks(told):
    found = of_kind(told, "evaluation")
    cases = {"eval_dataset", "one of several", "no eval_dataset", "evaluate", "evaluate nothing", "shard"}
    assert {case for _, case in found} == cases | {"predict", "predict nothing"}
    for (_, case), ranks in found.items():
        name = {"shard": "dataset", "one of several": r"eval_dataset\['some'\]"}.get(case, "eval_dataset")
        for of_rank in ranks:
            check(of_rank, rf"{name.replace('eval', 'test') if 'predict' in case else name}: expected")


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
