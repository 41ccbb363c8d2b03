"""Packed streams through Trainer and PackingCollator: accelerate must not dispatch their batches."""

import json
from itertools import pairwise

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from document_streams import make_documents, stream_of
from processes import on_ranks
from tiers import fast_only
from trainers import logged, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp

DOCUMENTS = [[number + 1] * (3 + number % 5) for number in range(24)]


def packed_stream():
    stream = datasets.IterableDataset.from_generator(
        lambda: iter({"input_ids": tokens, "attention_mask": [1] * len(tokens)} for tokens in DOCUMENTS)
    )
    return stream.map(hfp.BestFit(16), batched=True, batch_size=24, remove_columns=["attention_mask"])


def train(folder, steps, **settings):
    """The documents of each step of this rank."""
    seen = []

    class Noting(Trainer):
        def compute_loss(self, model, inputs, *args, **more):
            borders, tokens = inputs["cu_seq_lens_q"].tolist(), inputs["input_ids"][0].tolist()
            seen.append([tokens[a:b] for a, b in pairwise(borders)])
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
    assert sorted(document for step in seen for document in step) == sorted(DOCUMENTS)
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
    assert PACKS % 2 or sorted(documents) == sorted(DOCUMENTS)
