"""Ranks that bring different data or settings are refused before the first batch, and all take the same steps."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain, count, repeat, zip_longest
from random import Random
from threading import local
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from patched_models import patched
from processes import on_ranks as call_on_ranks
from tiny_models import build
from trainers import documents, loader_of, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.training import lockstep, sources
from hf_packing.training import ranks as training_ranks
from hf_packing.training.lockstep import Answer, in_lockstep

DATA = documents(64)
SEVEN = hfp.TokenBudget(64, max_documents=7)


class Rows(torch.utils.data.Dataset):
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
    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.last = rank == ranks - 1

    def at_fault(self, error):
        ranks = self.ranks
        return f"^PackingError: {error}" if self.last else f"rank {ranks - 1} of {ranks} raised PackingError: {error}"

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
        """By case, what is named, the batching of this rank, and further settings."""
        last, usual = self.last, hfp.TokenBudget(64)
        return {
            "seed": ("batching", hfp.TokenBudget(64, seed=self.rank), {}),
            "max_tokens": ("batching", hfp.TokenBudget(64 + 8 * last), {}),
            "a budget too small": ("batching", hfp.TokenBudget(8 if last else 64), {}),
            "overflow": ("batching", hfp.TokenBudget(64, overflow="drop" if last else "error"), {}),
            "tokens": ("tokens", usual, {"tokens": 64 + 8 * last, "max_segments": 9}),
            "max_segments": ("max_segments", SEVEN, {"tokens": 64, "max_segments": 8 + last}),
            "no batching": ("batching", 64 if last else usual, {}),
            "loss": ("loss", usual, {"loss": "sequence" if last else "token"}),
            "no loss": ("loss", usual, {"loss": "mean" if last else "token"}),
        }


SAME = {
    "table": lambda: DATA,
    "list": lambda: DATA.to_list(),
    "torch dataset": lambda: Rows(range(64)),
    "random transform": lambda: DATA.with_transform(masked_at_random),
}
"""Data that all ranks have, which they train on: none of these is refused."""


CASES = [*Rank(0, 2).data()]
DIFFERENT = "dataset: expected the same on all ranks; "


class Log:
    """What this process is told in each case, beside a pattern of what it should be told; None for nothing."""

    def __init__(self, folder, rank):
        self.file = folder / f"ranks-{rank}.json"
        self.told = {}

    def expect(self, pattern, case, act):
        self.told[case] = (pattern, message_of(act))
        self.file.write_text(json.dumps(self.told))


def message_of(call):
    try:
        call()
    except Exception as error:  # that is what is written down
        return f"{type(error).__name__}: {error}"


def matches(pattern, message):
    return message is None if pattern is None else re.search(pattern, message or "nothing")


def attach(trainer, batching=None, **settings):
    hfp.attach(trainer, batching or hfp.TokenBudget(64), **settings)


def attach_and_train(trainer):
    attach(trainer)
    assert trainer.train().global_step == 1


def through_trainer(log, made, kind, own):
    for case in ("shard", "shuffle", "40 against 48", "12 against 64", "other tokens"):
        log.expect(DIFFERENT, f"{kind}: {case}", partial(attach, made(own.data()[case]())))
    trainer = made(gradient_accumulation_steps=1 + own.last)
    log.expect("gradient_accumulation_steps: ", f"{kind}: accumulation", partial(attach, trainer))
    for case, (argument, batching, settings) in own.batching().items():
        pattern = own.at_fault("batching: expected") if case == "no batching" else f"{argument}: "
        log.expect(pattern, f"{kind}: {case}", partial(attach, made(), batching, **settings))


def evaluations(log, made, kind, own):
    shard = DATA.shard(own.ranks, own.rank)
    for case, name, evaluated in (
        ("eval_dataset", "eval_dataset", shard),
        ("one of several", r"eval_dataset\['some'\]", {"all": DATA, "some": shard}),
        ("no eval_dataset", "eval_dataset", None if own.last else DATA),
    ):
        trainer = made()
        trainer.eval_dataset = evaluated
        log.expect(f"{name}: expected", f"{kind}: {case}", partial(attach, trainer))
    trainer = made()
    attach(trainer)
    for call, name in ((trainer.evaluate, "eval_dataset"), (trainer.predict, "test_dataset")):
        log.expect(None, f"{kind}: the same {name}", partial(call, documents(9)))
        log.expect(f"{name}: expected", f"{kind}: another {name}", partial(call, DATA.shuffle(seed=own.rank)))
        if kind == "Trainer":  # SFTTrainer prepares what it evaluates, and other ranks wait for that
            log.expect(f"{name}: expected", f"{kind}: no {name}", partial(call, [] if own.last else DATA))
    trainer.train_dataset = documents(50) if own.last else DATA
    pattern = own.at_fault("train_dataset: expected .*, as when attach was called, got ")
    log.expect(pattern, f"{kind}: another train_dataset later", trainer.train)
    trainer.train_dataset = DATA
    trainer.data_collator = None if own.last else trainer.data_collator
    pattern = own.at_fault("data_collator: expected .*, as when attach was called, got ")
    log.expect(pattern, f"{kind}: another collator later", trainer.train)
    trainer.data_collator = trainer.attached.collator
    if own.rank == 0:
        assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 1  # no other rank waits for it
    pattern = "trainer: expected a model in DistributedDataParallel"  # which evaluate() has left out
    log.expect(pattern, f"{kind}: after all that", trainer.train)


def loops(log, own):
    for case in CASES:
        log.expect(DIFFERENT, f"loop: {case}", lambda case=case: loader_of(own.data()[case]()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "shuffles_of_numpy", lambda: "others" if own.last else "usual")
        log.expect("shuffles_of_numpy: expected the same on all ranks", "loop: another NumPy", lambda: loader_of(DATA))
    accelerator, shard, rows = Accelerator(cpu=True), DATA.shard(own.ranks, own.rank), DATA.to_list()
    model = patched()
    log.expect(DIFFERENT, "loop: evaluation", lambda: hfp.evaluation_loss(accelerator, model, shard))
    loader = loader_of(rows)
    rows.extend(rows[:9] if own.last else [])
    pattern = "dataset: expected 64 rows, as when batches were planned, got 73"
    log.expect(pattern, "loop: rows of one rank later", lambda: next(iter(loader)))
    log.expect(None, "loop: same evaluation", lambda: hfp.evaluation_loss(accelerator, model, documents(9)))

    def shared(data):
        loader = hfp.prepare_dataloader(accelerator, data, hfp.TokenBudget(64))
        assert len(list(loader.plan.micro_batches(0))) == 13

    accelerator.state.parallelism_config = SimpleNamespace(tp_size=own.ranks, cp_size=1, sp_size=1)
    log.expect(DIFFERENT, "tensor parallel ranks: shard", lambda: shared(shard))
    log.expect(None, "tensor parallel ranks: table", lambda: shared(DATA))
    accelerator.state.parallelism_config = None


def tell(folder):
    """Write what this rank is told in each case; the last one is not caught, so that every process ends with it."""
    state = PartialState(cpu=True, timeout=timedelta(seconds=120))
    own = Rank(state.process_index, state.num_processes)
    log = Log(folder, own.rank)
    for kind in (Trainer, SFTTrainer):
        made = partial(one_step_trainer, folder, kind)
        through_trainer(log, made, kind.__name__, own)
        evaluations(log, made, kind.__name__, own)
    for case, data in SAME.items():
        log.expect(None, f"Trainer: same {case}", partial(attach_and_train, one_step_trainer(folder, Trainer, data())))
    loops(log, own)
    log.expect(None, "all cases", lambda: None)
    state.wait_for_everyone()  # the first process that ends takes the others with it
    loader_of(DATA.shard(own.ranks, own.rank))


def one_step_trainer(folder, kind, data=DATA, **changes):
    return trainer_of(folder, kind, data=data, max_steps=1, **changes)


class NotedError(Exception):
    """A rank has said what it planned from, and waits for the others."""


def check_on_ranks(monkeypatch, pattern, calls):
    """Make a call for each rank, until it has to wait for the others, and again with what all of them have said."""
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
    for call in calls:
        message = message_of(call)
        assert matches(pattern, message), message


@pytest.mark.parametrize("case", CASES)
def test_different_data_of_a_loop(monkeypatch, case):
    data = [Rank(rank, 2).data()[case]() for rank in range(2)]
    pattern = DIFFERENT
    if case == "40 against 48":
        pattern += r"rank 0 has 40 rows and 414 tokens, but rank \d has 48 rows and 531 tokens"
    check_on_ranks(monkeypatch, pattern, [partial(loader_of, each) for each in data])


@pytest.mark.parametrize("case", Rank(0, 2).batching())
def test_different_batchings_of_a_loop(monkeypatch, case):
    (argument, *first), (_, *second) = (Rank(rank, 2).batching()[case] for rank in range(2))
    calls = [partial(loader_of, DATA, batching, **settings) for batching, settings in (first, second)]
    check_on_ranks(monkeypatch, f"{argument}: ", calls)


def test_a_rank_that_attaches_without_a_batching(monkeypatch, tmp_path):
    trainers = [trainer_of(tmp_path, model=build("Llama")) for _ in range(2)]
    batchings = [hfp.TokenBudget(64), None]
    pattern = r"batching: expected the same on all ranks; rank 0 has TokenBudget.*, but rank 1 has None"
    calls = [partial(hfp.attach, *each) for each in zip(trainers, batchings, strict=True)]
    check_on_ranks(monkeypatch, pattern, calls)
    assert not any(is_patched(trainer.model) for trainer in trainers)


def test_different_accumulations_and_models_of_a_loop(monkeypatch):
    calls = [partial(loader_of, DATA, accumulation=number) for number in (1, 2)]
    check_on_ranks(monkeypatch, "gradient_accumulation_steps: ", calls)
    models = [build("Llama", intermediate_size=size) for size in (96, 128)]
    calls = [partial(loader_of, DATA, model=model) for model in models]
    check_on_ranks(monkeypatch, r"batching: .* rank 0 has .*linear_cost=240.0", calls)


@pytest.mark.slow
def test_three_ranks(tmp_path):
    """Each says what it should: what differs is refused on all of them, also after training, and no rank waits."""
    done = call_on_ranks(tell, tmp_path, ranks=3, fails=True)
    told = [json.loads((tmp_path / f"ranks-{rank}.json").read_text()) for rank in range(3)]
    for of_rank in told:
        assert of_rank.keys() == told[0].keys(), done.stderr[-3000:]
        assert "all cases" in of_rank
        for case, (pattern, message) in of_rank.items():
            assert matches(pattern, message), (case, pattern, message)
    assert f"PackingError: {DIFFERENT}rank 0 has" in done.stderr


THREADS = 3


def drawn_case(random):
    most_ahead = random.choice([1, 2, 4, 5, 8])
    held = [
        random.choices([Answer.ROW, Answer.NO_ROW], [4, 1], k=random.choice([0, random.randrange(40)]))
        for _ in range(THREADS)
    ]
    fails_at = [random.randrange(40) if random.random() < 0.2 else None for _ in range(THREADS)]
    return {"held": held, "fails_at": fails_at, "most_ahead": most_ahead}


def expected(held, fails_at):
    agreed = [max(answers) for answers in zip_longest(*held, fillvalue=Answer.ENDED)]
    first = min((step for step in fails_at if step is not None), default=len(agreed) + 1)
    steps = [[step, answer == Answer.ROW] for step, answer in enumerate(agreed[:first])]
    return steps, first if first <= len(agreed) else None


def run_rank(rank, held, fails_at, most_ahead):
    answers, number, steps, last_read, ahead = chain(held[rank], repeat(Answer.ENDED)), count(), [], [0], 0

    def read():
        last_read[0] = next(number)
        if last_read[0] == fails_at[rank]:
            raise ValueError(f"rank {rank} cannot read")
        return last_read[0], Answer(next(answers))

    try:
        for step, is_run in in_lockstep(read, THREADS, torch.device("cpu"), most_ahead):
            steps.append([step, is_run])
            ahead = max(ahead, last_read[0] - step)
    except Exception as error:
        return {"steps": steps, "error": str(error), "ahead": ahead}
    return {"steps": steps, "error": None, "ahead": ahead}


def test_all_ranks_run_the_same_steps_and_stop_at_the_same_error(monkeypatch):
    """Ranks are threads, each with a process group of its own that meets those of the others in a store."""
    cases, store, of_thread = [drawn_case(Random(seed)) for seed in range(60)], dist.HashStore(), local()

    def all_reduce(tensor, op, async_op):
        assert async_op
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return of_thread.group.allreduce([tensor], options)

    def run_cases(rank):
        of_thread.group = dist.ProcessGroupGloo(store, rank, THREADS, timedelta(seconds=60))
        return [run_rank(rank, **case) for case in cases]

    monkeypatch.setattr(lockstep, "all_reduce", all_reduce)
    with ThreadPoolExecutor(THREADS) as ranks:
        found = [*ranks.map(run_cases, range(THREADS))]
    failed = 0
    for number, case in enumerate(cases):
        steps, fails = expected(case["held"], case["fails_at"])
        for rank in range(THREADS):
            ran = found[rank][number]
            assert ran["steps"] == steps
            assert ran["ahead"] <= case["most_ahead"]
            if fails is None:
                assert ran["error"] is None
            elif case["fails_at"][rank] == fails:
                assert ran["error"] == f"rank {rank} cannot read"
            else:
                assert "another rank could not read its next rows" in ran["error"]
        failed += fails is not None
    assert 6 < failed < 54
    assert max(each["ahead"] for each in found[0]) == 8, "steps have to be read ahead"


def test_a_rank_alone_raises_its_own_error_in_its_turn():
    answers = iter([Answer.ROW, Answer.NO_ROW, Answer.ROW])

    def step():
        try:
            return "step", next(answers)
        except StopIteration:
            raise ValueError("unreadable") from None

    found = []
    with pytest.raises(ValueError, match="unreadable"):
        found.extend(is_run for _, is_run in in_lockstep(step, 1, torch.device("cpu"), 4))
    assert found == [True, False, True]
