"""Training on streams: rows, states, logs, refusals, dispatching; test_processes has several processes."""

import copy
import json
import re
from functools import partial
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
import trainers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from document_streams import make_documents, read_stream, stream_of, write_parquet
from patched_models import patched
from processes import on_ranks
from tiers import fast_only
from trainers import attached, documents_in, logged, trainer_of
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.training.streams import RankTurns
from hf_packing.upstream.datasets import has_exact_states

CAPACITY = 48
DOCUMENTS = [[token % 90 + 1 for token in document[:40]] for document in make_documents(160)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("files"), [DOCUMENTS[a : a + 20] for a in range(0, 160, 20)])


def open_files(files):
    return read_stream("parquet", files).select_columns(["input_ids"])


PLAIN = hfp.BestFit(CAPACITY)


def packed(files, strategy=PLAIN, **more):
    settings = {"streams": 8, "window_packs": 2} | more
    return hfp.pack(open_files(files), strategy, **settings)


loader_of = partial(trainers.loader_of, batching=hfp.TokenBudget(CAPACITY))


def tokens_in(batches):
    return [batch["input_ids"][0].tolist() for batch in batches]


def endless(loader):
    while True:
        yield from loader


def test_rows_come_in_the_order_of_the_stream(files):
    rows = [row["input_ids"] for row in packed(files)]
    assert tokens_in(loader_of(packed(files))) == rows
    two = tokens_in(loader_of(packed(files), batching=hfp.TokenBudget(2 * CAPACITY + 5)))
    assert two[:5] == [rows[number] + rows[number + 1] for number in range(0, 10, 2)]
    assert [token for row in two for token in row] == [token for row in rows for token in row]


def test_documents_and_packed_rows_are_filled_up(files):
    aligned = hfp.TokenBudget(CAPACITY + 8, align_tokens=8)
    for data in (open_files(files), packed(files)):
        batches = list(loader_of(data, batching=aligned))
        assert max(batch["input_ids"].shape[1] for batch in batches) <= CAPACITY + 8
        assert not any(batch["input_ids"].shape[1] % 8 for batch in batches)
        assert any((batch["seq_idx"] == -1).any() for batch in batches)
        real = [batch["input_ids"][batch["seq_idx"] >= 0].tolist() for batch in batches]
        assert sorted(token for each in real for token in each) == sorted(token for each in DOCUMENTS for token in each)
    with pytest.raises(hfp.PackingError, match="max_tokens: expected at least 50, the capacity .* of 10, got 49"):
        loader_of(packed(files), batching=hfp.TokenBudget(CAPACITY + 1, align_tokens=10))


@pytest.mark.parametrize("streams", [8, 1])
def test_every_epoch_has_every_document_in_another_order(files, streams):
    """Also where the order of files is fixed."""
    rows = open_files(files) if streams == 8 else open_files(files).take(160)
    loader = loader_of(hfp.pack(rows, hfp.BestFit(CAPACITY), streams=streams, window_packs=2))
    first, second = ([ids for batch in loader for ids in documents_in(batch)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(DOCUMENTS)
    assert first != second
    assert loader.epoch == 2


@pytest.mark.parametrize(
    ("rows", "workers", "usable"), [(1, 3, 2), (1, 8, 8), (2, 4, 4), (2, 3, 2), (3, 4, 1), (1, 0, 0)]
)
def test_workers_that_share_logical_streams(files, rows, workers, usable):
    streams = loader_of(packed(files)).dataset.streams
    assert RankTurns(streams, {}, rows, None, []).usable_workers(workers) == usable


@pytest.mark.parametrize(("workers", "kind"), [(2, "rows"), (0, "documents")])
def test_resumed_at_any_step(files, workers, kind):
    def open_loader(count):
        few = files[:4]
        rows = packed(few, streams=4) if kind == "rows" else open_files(few)
        return loader_of(rows, accumulation=2, num_workers=count)

    of_epochs = [len(tokens_in(each)) for each in [open_loader(0)] * 2]
    expected = tokens_in(islice(endless(open_loader(0)), sum(of_epochs)))
    for stop in (2, of_epochs[0], of_epochs[0] + 2):
        first, second = open_loader(workers), open_loader(0)
        assert tokens_in(islice(endless(first), stop)) == expected[:stop]
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert tokens_in(islice(endless(second), sum(of_epochs) - stop)) == expected[stop:]


class Counted:
    """A function of rows that counts its calls, in all copies together."""

    reads = 0

    def __call__(self, row):
        Counted.reads += 1
        return row


@pytest.mark.skipif(not has_exact_states(), reason="an older datasets reads shards from their beginning")
def test_a_resumed_loader_does_not_read_what_was_read(tmp_path):
    files = write_parquet(tmp_path / "large", [DOCUMENTS * 2] * 2, rows_in_group=20)
    total = 2 * 2 * len(DOCUMENTS)

    def open_loader():
        stream = open_files(files).map(Counted())
        stream = stream.cast(datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))}))
        return loader_of(hfp.pack(stream, hfp.BestFit(CAPACITY), streams=2, window_packs=2))

    first, second, whole = open_loader(), open_loader(), open_loader()
    Counted.reads = 0  # opening reads a small stream, to count its documents
    batches = len(tokens_in(whole))
    assert Counted.reads == total
    list(islice(first, batches * 3 // 4))
    Counted.reads = 0
    second.load_state_dict(first.state_dict())
    assert len(tokens_in(second)) == batches - batches * 3 // 4
    window = 2 * 32 + 20  # two packs' worth of at least 16 documents each, and the row group in which it begins
    assert Counted.reads <= total / 4 + 2 * 2 * window


@pytest.mark.filterwarnings("ignore:pack reads:UserWarning")
def test_masked_batches_when_the_streams_of_a_rank_have_ended():
    few = [{"input_ids": [5, 6, 7]}] * 6
    stream = datasets.IterableDataset.from_generator(lambda: iter(few))
    stream = hfp.pack(stream, hfp.BestFit(3), streams=4, window_packs=1)
    loader = loader_of(stream, batching=hfp.TokenBudget(3), accumulation=4)
    batches = list(loader)
    trained = [batch for batch in batches if (batch["labels"] != -100).any()]
    assert tokens_in(trained) == [[5, 6, 7]] * 6
    assert len(batches) % 4 == 0
    assert len(batches) > 6


def test_documents_are_packed_with_level_attention(files, tmp_path):
    lengths = np.clip(np.random.default_rng(1).lognormal(5, 1.2, 800), 4, 2048).astype(int)
    documents = [[number % 90 + 1] * length for number, length in enumerate(lengths.tolist())]
    files = write_parquet(tmp_path / "uneven", [documents[a::8] for a in range(8)])

    def work(balance):
        batching = hfp.TokenBudget(2048, balance=balance, linear_cost=0.0, seed=1)
        loader = loader_of(open_files(files), batching=batching)
        squares = [float((batch["cu_seq_lens_q"].diff().double() ** 2).sum()) for batch in loader]
        rounds = np.array(squares[: len(squares) // 8 * 8 - 32]).reshape(-1, 8)
        return float((rounds.mean(1) / rounds.max(1)).mean())

    assert work("attention") > 1.5 * work("tokens")


def test_what_a_loop_is_told(files):
    loader = loader_of(packed(files))
    assert str(loader.summary).startswith("stream: 8 logical streams, 8 on each of 1 ranks\ndocuments of each")
    assert str(loader.summary).endswith("of at most 48 tokens")
    list(islice(loader, 3))
    resumed = loader_of(packed(files))
    resumed.load_state_dict(loader.state_dict())
    done = (loader.epoch, loader.steps_done, loader.micro_batches_done)
    assert (resumed.epoch, resumed.steps_done, resumed.micro_batches_done) == done == (0, 3, 3)


def test_a_trainer_and_a_loop_take_the_same_steps(files, tmp_path):
    model = partial(patched, "Llama", torch.float64)
    known = {"max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    trainer = trainer_of(tmp_path, model=model(), data=packed(files), weight_decay=0.0, **known)
    summary = hfp.attach(trainer, hfp.TokenBudget(CAPACITY))
    first, second, *_ = str(summary).splitlines()
    assert first == "stream: 8 logical streams, 8 on each of 1 ranks"
    assert re.fullmatch(r"documents of each logical stream: \d+ to \d+ of the stream", second)
    trainer.train()
    looped, by_hand = model(), model()
    loader = loader_of(packed(files), model=looped)
    steps = zip(loader, packed(files), range(4), strict=False)
    rows = [(batch, hfp.PackingCollator()([row])) for batch, row, _ in steps]
    for trained, number in ((looped, 0), (by_hand, 1)):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, weight_decay=0.0)
        for batches in rows:
            hfp.compute_loss(trained, batches[number]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, two, three in zip(trainer.model.parameters(), looped.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(two, three)
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


def test_sft_trainer_with_masks_of_completions(tmp_path):
    rows = datasets.Dataset.from_dict(
        {
            "input_ids": DOCUMENTS[:80],
            "labels": [[-100, *each[1:]] for each in DOCUMENTS[:80]],
            "completion_mask": [[0] + [1] * (len(each) - 1) for each in DOCUMENTS[:80]],
        }
    )

    def train(stream, **more):
        known = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_steps": 3, **more}
        return logged(attached(tmp_path, hfp.TokenBudget(CAPACITY), kind=SFTTrainer, data=stream, **known))

    assert all(loss > 0 for loss in train(rows.to_iterable_dataset(num_shards=8)))


def test_a_callback_with_a_loader_of_its_own_does_not_change_the_state(files, tmp_path):
    class Samples(TrainerCallback):
        def on_step_end(self, args, state, control, **known):  # noqa: ARG002
            next(iter(trainer.get_train_dataloader()))

    known = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer = attached(tmp_path, hfp.TokenBudget(CAPACITY), data=packed(files), callbacks=[Samples()], **known)
    trainer.train()
    with torch.serialization.safe_globals([bytes]):
        assert torch.load(tmp_path / "checkpoint-4" / "packed_stream.pt", weights_only=True)["steps"] == 4


def test_refused_states(files):
    loader = loader_of(packed(files), accumulation=2)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    wide = loader_of(packed(files))
    wide._ranks = 4
    for other, known, message in (
        (loader_of(packed(files, streams=4)), state, "in 8 logical streams; make the stream as before"),
        (loader_of(packed(files, window_packs=3)), state, "that is made as now, by BestFit"),
        (wide, state, "the 2 rows that were read cannot be divided among 4 ranks"),
        (loader_of(packed(files[::-1])), state, "expected the files with which the state was saved"),
    ):
        with pytest.raises(hfp.PackingError, match=message):
            other.load_state_dict(known)


EQUAL = [[number + 1] * (3 + number % 5) for number in range(24)]


def packed_stream():
    stream = datasets.IterableDataset.from_generator(
        lambda: iter({"input_ids": tokens, "attention_mask": [1] * len(tokens)} for tokens in EQUAL)
    )
    return stream.map(hfp.BestFit(16), batched=True, batch_size=24, remove_columns=["attention_mask"])


def train(folder, steps, **settings):
    seen = []

    class Noting(Trainer):
        def compute_loss(self, model, inputs, *args, **more):
            seen.append(documents_in(inputs))
            return super().compute_loss(model, inputs, *args, **more)

    known = {"max_steps": steps, "per_device_train_batch_size": 1, **settings}
    trainer = trainer_of(folder, Noting, data=packed_stream(), **known)
    trainer.data_collator = hfp.PackingCollator()
    trainer.train()
    return seen


def train_on_rank(folder, steps):
    seen = train(folder, steps, **NOT_DISPATCHED)
    (folder / f"seen-{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))


REFUSED = "dispatch_batches: expected False, .* accelerator_config={'dispatch_batches': False}"
NOT_DISPATCHED = {"accelerator_config": {"dispatch_batches": False}}
PACKS = len(list(packed_stream()))


@pytest.mark.parametrize("workers", fast_only([0, 1], 0))
def test_trainer(tmp_path, workers):
    with pytest.raises(hfp.PackingError, match=REFUSED):
        train(tmp_path, PACKS, dataloader_num_workers=workers)
    seen = train(tmp_path, PACKS, dataloader_num_workers=workers, **NOT_DISPATCHED)
    assert sorted(document for step in seen for document in step) == sorted(EQUAL)
    assert max(map(len, seen)) > 1


def test_loop():
    collator = hfp.PackingCollator()
    rows = list(packed_stream())
    for dispatch in (True, False):
        settings = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        for dataset in (packed_stream(), rows):
            loader = accelerator.prepare(torch.utils.data.DataLoader(dataset, collate_fn=collator))
            if dispatch:
                with pytest.raises(hfp.PackingError, match=REFUSED):
                    list(loader)
            else:
                assert len(list(loader)) == PACKS


def test_another_loader_may_be_dispatched():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(3)))
    batches = [hfp.PackingCollator()([{"input_ids": number.tolist()}]) for number in loader]
    assert [batch["input_ids"].item() for batch in batches] == [0, 1, 2]


@pytest.mark.parametrize("kind", fast_only([Trainer, SFTTrainer], SFTTrainer))
def test_a_packed_stream_trains_like_its_rows(kind, tmp_path, monkeypatch):
    documents = [[token % 90 + 1 for token in document] for document in make_documents(80)]
    packed = hfp.pack(stream_of(documents), hfp.BestFit(64), window_packs=2)
    rows = datasets.Dataset.from_list(list(packed), features=packed.features)
    monkeypatch.setattr(kind, "_get_train_sampler", lambda *_: torch.utils.data.SequentialSampler(rows))
    settings = {"max_steps": len(rows) // 2, "per_device_train_batch_size": 2, **NOT_DISPATCHED}
    settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}} if kind is SFTTrainer else {}

    def losses(dataset):
        trainer = trainer_of(tmp_path, kind, data=dataset, **settings)
        trainer.data_collator = hfp.PackingCollator()
        return logged(trainer)

    found = losses(packed)
    assert len(set(found)) > 5
    assert found == losses(rows)


@pytest.mark.slow
def test_two_processes(tmp_path):
    on_ranks(train_on_rank, tmp_path, PACKS // 2, ranks=2)
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    documents = [document for steps in seen for step in steps for document in step]
    packs = [sorted(step) for steps in seen for step in steps]
    assert len(packs) == PACKS // 2 * 2
    assert len({str(document) for document in documents}) == len(documents)
    assert PACKS % 2 or sorted(documents) == sorted(EQUAL)
