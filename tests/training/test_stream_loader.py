"""Training on streams in one process: rows, states, logs and refusals; test_elastic_streams has several processes."""

import copy
from functools import partial
from itertools import islice, pairwise

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from document_streams import make_documents, read_stream, write_parquet
from patched_models import patched
from trainers import logged, trainer_of
from transformers import TrainerCallback
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.training.streams import RankTurns

CAPACITY = 48
DOCUMENTS = [[token % 90 + 1 for token in document[:40]] for document in make_documents(160)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Eight files with 20 documents each."""
    return write_parquet(tmp_path_factory.mktemp("files"), [DOCUMENTS[a : a + 20] for a in range(0, 160, 20)])


def open_files(files):
    return read_stream("parquet", files).select_columns(["input_ids"])


def packed(files, **more):
    settings = {"streams": 8, "window_packs": 2} | more
    return hfp.pack(open_files(files), hfp.BestFit(CAPACITY), **settings)


def loader_of(stream, batching=None, accumulation=1, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    return hfp.prepare_dataloader(accelerator, stream, batching or hfp.TokenBudget(CAPACITY), **options)


def tokens_in(batches):
    return [batch["input_ids"][0].tolist() for batch in batches]


def documents_in(batches):
    found = []
    for batch in batches:
        borders, tokens = batch["cu_seq_lens_q"].tolist(), batch["input_ids"][0].tolist()
        found += [tokens[a:b] for a, b in pairwise(borders)]
    return found


def endless(loader):
    while True:
        yield from loader


def test_rows_come_in_the_order_of_the_stream(files):
    rows = [row["input_ids"] for row in packed(files)]
    assert tokens_in(loader_of(packed(files))) == rows
    two = tokens_in(loader_of(packed(files), hfp.TokenBudget(2 * CAPACITY + 5)))
    assert two[:5] == [rows[number] + rows[number + 1] for number in range(0, 10, 2)]
    assert [token for row in two for token in row] == [token for row in rows for token in row]


@pytest.mark.parametrize("streams", [8, 1])
def test_every_epoch_has_every_document_in_another_order(files, streams):
    """Also where the order of files is fixed."""
    rows = open_files(files) if streams == 8 else open_files(files).take(160)
    loader = loader_of(hfp.pack(rows, hfp.BestFit(CAPACITY), streams=streams, window_packs=2))
    first, second = (documents_in(loader) for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(DOCUMENTS)
    assert first != second
    assert loader.epoch == 2


@pytest.mark.parametrize(
    ("rows", "workers", "usable"), [(1, 3, 2), (1, 8, 8), (2, 4, 4), (2, 3, 2), (3, 4, 1), (1, 0, 0)]
)
def test_workers_that_share_logical_streams(files, rows, workers, usable):
    streams = loader_of(packed(files)).dataset.streams
    assert RankTurns(streams, {}, rows, None, [], 0).usable_workers(workers) == usable


@pytest.mark.parametrize(("workers", "kind"), [(2, "rows"), (0, "documents")])
def test_resumed_at_any_step(files, workers, kind):
    def open_loader(count):
        few = files[:4]
        rows, documents = (packed(few, streams=4), None), (open_files(few), hfp.TokenBudget(CAPACITY))
        return loader_of(*(rows if kind == "rows" else documents), accumulation=2, num_workers=count)

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


def test_a_resumed_loader_does_not_read_what_was_read(tmp_path):
    files = write_parquet(tmp_path / "large", [DOCUMENTS * 2] * 2, rows_in_group=20)
    total = 2 * 2 * len(DOCUMENTS)

    def open_loader():
        stream = open_files(files).map(Counted())
        stream = stream.cast(datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))}))
        return loader_of(hfp.pack(stream, hfp.BestFit(CAPACITY), streams=2, window_packs=2))

    first, second = open_loader(), open_loader()
    batches = len(tokens_in(open_loader()))
    assert Counted.reads == total
    list(islice(first, batches * 3 // 4))
    Counted.reads = 0
    second.load_state_dict(first.state_dict())
    assert len(tokens_in(second)) == batches - batches * 3 // 4
    window = 2 * 32 + 20  # two packs' worth of at least 16 documents each, and the row group in which it begins
    assert Counted.reads <= total / 4 + 2 * 2 * window


@pytest.mark.filterwarnings("ignore:pack reads:UserWarning")
def test_masked_batches_when_the_streams_of_a_rank_have_ended():
    few = [{"input_ids": [5, 6, 7]}] * 3
    stream = datasets.IterableDataset.from_generator(lambda: iter(few))
    stream = hfp.pack(stream, hfp.BestFit(3), streams=4, window_packs=1)
    loader = loader_of(stream, hfp.TokenBudget(3), accumulation=4)
    batches = list(loader)
    trained = [batch for batch in batches if (batch["labels"] != -100).any()]
    assert tokens_in(trained) == [[5, 6, 7]] * 3
    assert len(batches) % 4 == 0
    assert len(batches) > 3


def test_documents_are_packed_with_level_attention(files, tmp_path):
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 800), 4, 2048).astype(int)
    documents = [[number % 90 + 1] * length for number, length in enumerate(lengths.tolist())]
    files = write_parquet(tmp_path / "uneven", [documents[a::8] for a in range(8)])

    def work(balance):
        batching = hfp.TokenBudget(2048, balance=balance, linear_cost=0.0)
        loader = loader_of(open_files(files), batching)
        squares = [float((batch["cu_seq_lens_q"].diff().double() ** 2).sum()) for batch in loader]
        rounds = np.array(squares[: len(squares) // 8 * 8 - 32]).reshape(-1, 8)
        return float((rounds.mean(1) / rounds.max(1)).mean())

    assert work("attention") > 1.5 * work("tokens")


def test_a_trainer_and_a_loop_take_the_same_steps(files, tmp_path):
    model = partial(patched, "Llama", torch.float64)
    known = {"max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    trainer = trainer_of(tmp_path, model=model(), data=packed(files), weight_decay=0.0, **known)
    summary = hfp.attach(trainer, hfp.TokenBudget(CAPACITY))
    assert str(summary).startswith("stream: 8 logical streams, 8 on each of 1 ranks\n")
    trainer.train()
    accelerator = Accelerator(cpu=True)
    looped = model()
    loader = hfp.prepare_dataloader(accelerator, packed(files), hfp.TokenBudget(CAPACITY), model=looped)
    by_hand = model()
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
        trainer = trainer_of(tmp_path, SFTTrainer, data=stream, **known)
        hfp.attach(trainer, hfp.TokenBudget(CAPACITY))
        return logged(trainer)

    assert all(loss > 0 for loss in train(rows.to_iterable_dataset(num_shards=8)))


def test_the_share_of_each_source_is_logged(tmp_path):
    """It is the share of the tokens that were trained on since the last log."""
    rows = {"a": [[5, *range(6, 6 + length)] for length in (3, 4, 5) * 9], "b": [[60, 61, 62]] * 27}
    sources = {name: datasets.Dataset.from_dict({"input_ids": ids}) for name, ids in rows.items()}
    mixed = hfp.mix(sources, {"a": 0.75, "b": 0.25})
    data = hfp.pack(mixed, hfp.BestFit(CAPACITY), streams=1, window_packs=1)
    trainer = trainer_of(tmp_path, data=data, max_steps=2, logging_steps=2, gradient_accumulation_steps=2)
    hfp.attach(trainer, hfp.TokenBudget(CAPACITY))
    step, seen = trainer.training_step, []

    def noted(model, inputs, *others):
        seen.extend(inputs["input_ids"][0].tolist())
        return step(model, inputs, *others)

    trainer.training_step = noted
    trainer.train()
    logs = next(line for line in trainer.state.log_history if "loss" in line)
    assert logs["source_b"] == pytest.approx(np.mean(np.array(seen) >= 60))
    assert logs["source_a"] + logs["source_b"] == pytest.approx(1)


def test_a_callback_with_a_loader_of_its_own_does_not_change_the_state(files, tmp_path):
    class Samples(TrainerCallback):
        def on_step_end(self, args, state, control, **known):  # noqa: ARG002
            next(iter(trainer.get_train_dataloader()))

    known = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer = trainer_of(tmp_path, data=packed(files), callbacks=[Samples()], **known)
    hfp.attach(trainer, hfp.TokenBudget(CAPACITY))
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
