"""Streams on 1, 2 and 4 processes: the same steps, also after kills and resumes on other numbers of ranks."""

import json
import os
import signal
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import Features, List, Value, load_dataset
from document_streams import make_documents, write_parquet
from processes import losses, on_ranks, read
from tiny_models import build, exact
from trainers import arguments
from training_process import Log, segments
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import hf_packing as hfp

SETTINGS = {
    "how": "trainer",
    "steps": 8,
    "accumulation": 1,
    "streams": 8,
    "packs": False,
    "shared": None,
    "rows": 1,
    "workers": 0,
    "dispatch": None,
    "save": None,
    "kill": None,
    "resume": False,
    "evaluate": False,
    "unreadable": None,
}
"""`steps`: how many are trained; `packs`: TokenBudget packs the documents; `shared`: they share prefixes of at least so
many tokens; `save`: after how many steps checkpoints are saved; `kill`: the step in which the first rank kills itself;
`unreadable`: how many documents the second rank, or with `dispatch` the first, can read."""

CAPACITY = 48


def documents_of(batch):
    """The documents of a batch that are trained on, or have a single token."""
    return [tokens for tokens, is_trained in segments(batch) if is_trained or len(tokens) == 1]


def open_stream(folder, settings, notes):
    features = Features({"input_ids": List(Value("int64"))})
    files = sorted(str(file) for file in (folder.parent / "data").glob("*.parquet"))
    stream = load_dataset("parquet", data_files=files, split="train", streaming=True)
    unreadable = settings["unreadable"] if notes.rank == (0 if settings["dispatch"] else 1) else None
    read = {"file": str(notes.folder / f"read-{notes.rank}.jsonl"), "unreadable": unreadable}
    stream = stream.select_columns(["input_ids"]).map(count_documents, fn_kwargs=read)
    if settings["packs"]:
        return stream.cast(features)
    strategy = hfp.BestFit(CAPACITY, overflow="split")
    shared = settings["shared"] or False
    return hfp.pack(stream.cast(features), strategy, streams=settings["streams"], window_packs=3, share_prefixes=shared)


def whole_stream(folder, settings, notes):
    """The stream to evaluate on, in larger rows."""
    documents = open_stream(folder, settings | {"packs": True}, notes)
    return hfp.pack(documents, hfp.BestFit(64), streams=8, share_prefixes=settings["shared"] or False)


def count_documents(row, file, unreadable):
    if unreadable and Path(file).exists() and len(Path(file).read_text().splitlines()) > unreadable:
        raise ValueError("an unreadable document")
    with open(file, "a") as lines:
        lines.write(json.dumps(row["input_ids"][:2]) + "\n")
    return row


def batching_of(settings):
    if not settings["packs"]:
        return hfp.TokenBudget(CAPACITY * settings["rows"])
    shared = settings["shared"] or False
    return hfp.TokenBudget(CAPACITY * settings["rows"], overflow="split", share_prefixes=shared)


def kill_at(step, rank, settings):
    if settings["kill"] == step and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def train_with_trainer(folder, settings):
    class Noting(Trainer):
        def training_step(self, model, inputs, *others):
            notes.write("seen", step=self.state.global_step, documents=documents_of(inputs))
            return super().training_step(model, inputs, *others)

    class Kills(TrainerCallback):
        def on_step_begin(self, args, state, control, **known):  # noqa: ARG002
            kill_at(state.global_step, args.process_index, settings)

    saved = {"save_strategy": "steps", "save_steps": settings["save"]} if settings["save"] else {}
    args = arguments(
        folder.parent / "checkpoints",
        learning_rate=1e-3,
        max_steps=settings["steps"],
        gradient_accumulation_steps=settings["accumulation"],
        dataloader_num_workers=settings["workers"],
        accelerator_config={"dispatch_batches": settings["dispatch"]},
        **saved,
    )
    notes = Log(folder, args.process_index)
    stream = open_stream(folder, settings, notes)
    trainer = Noting(exact(build("Llama").double()), args, train_dataset=stream, callbacks=[Kills()])
    summary = hfp.attach(trainer, batching_of(settings))
    assert summary.ranks == args.world_size
    trainer.train(resume_from_checkpoint=settings["resume"] or None)
    for line in trainer.state.log_history:
        if "loss" in line:
            notes.write("losses", step=line["step"], loss=line["loss"], epoch=line["epoch"])
    if settings["evaluate"]:
        notes.write("evaluated", loss=trainer.evaluate(whole_stream(folder, settings, notes))["eval_loss"])
    return trainer.accelerator


def train_in_a_loop(folder, settings):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=settings["accumulation"],
        dataloader_config=DataLoaderConfiguration(dispatch_batches=settings["dispatch"]),
    )
    notes = Log(folder, accelerator.process_index)
    model = exact(build("Llama").double())
    stream = open_stream(folder, settings, notes)
    loader = hfp.prepare_dataloader(
        accelerator, stream, batching_of(settings), model=model, num_workers=settings["workers"]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = 0
    if settings["resume"] and (last := get_last_checkpoint(folder.parent / "checkpoints")):
        accelerator.load_state(last)
        step = int(last.rpartition("-")[2])
    while step < settings["steps"]:
        for number, batch in enumerate(loader):
            if not number % settings["accumulation"]:
                kill_at(step, accelerator.process_index, settings)
                total = 0
            notes.write("seen", step=step, documents=documents_of(batch))
            with accelerator.accumulate(model):
                loss = hfp.compute_loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean") / settings["accumulation"]
            if accelerator.sync_gradients:
                step += 1
                notes.write("losses", step=step, loss=float(total))
                if settings["save"] and not step % settings["save"]:
                    accelerator.save_state(folder.parent / "checkpoints" / f"checkpoint-{step}")
                if step == settings["steps"]:
                    break
    if settings["evaluate"]:
        whole = whole_stream(folder, settings, notes)
        notes.write("evaluated", loss=hfp.evaluation_loss(accelerator, model, whole, rows_per_batch=2))
    return accelerator


def train(folder, settings):
    settings = SETTINGS | settings
    {"trainer": train_with_trainer, "loop": train_in_a_loop}[settings["how"]](folder, settings).free_memory()


FILES = {
    "even": [30] * 8,
    "one file 100 times another": [200, 2, 40, 40, 2, 30],
    "fewer files than ranks": [60, 50],
    "empty files": [0, 70, 0, 60, 0],
}


def write(folder, sizes, samples=1):
    """Write files with different documents of at most 30 tokens; return all documents.

    So many documents, one after the other, begin with the same tokens.
    """
    drawn = [[token % 90 for token in each[1:29]] for each in make_documents(sum(sizes))]
    documents = [[*divmod(number, 90), *each] for number, each in enumerate(drawn)]
    if samples > 1:
        begins = [documents[number - number % samples][:20] for number in range(len(documents))]
        documents = [[*begin, *each[:10]] for begin, each in zip(begins, documents, strict=True)]
    borders = [0, *accumulate(sizes)]
    write_parquet(folder / "data", [documents[begin:end] for begin, end in pairwise(borders)])
    return [tuple(each) for each in documents]


def run(folder, ranks, fails=False, **settings):
    """Train; what the processes note is in the folder, data and checkpoints are beside it."""
    assert settings.keys() <= SETTINGS.keys()
    return on_ranks(train, folder, settings, ranks=ranks, fails=fails)


def steps_of(folder, ranks):
    """The documents of each step, on all ranks together."""
    steps = {}
    for line in (line for rank in range(ranks) for line in read(folder, "seen", rank)):
        steps.setdefault(line["step"], Counter()).update(map(tuple, line["documents"]))
    return steps


def documents_read(folder, ranks):
    return [tuple(line) for rank in range(ranks) for line in read(folder, "read", rank)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "files", "streams", "shared"),
    [
        *(("trainer", files, streams, None) for files, streams in zip(FILES, (8, 4, 16, 12), strict=True)),
        ("loop", "even", 8, None),
        ("trainer", "even", 8, 3),
        ("loop", "empty files", 4, 3),
    ],
)
def test_steps_do_not_depend_on_ranks(tmp_path, files, how, streams, shared):
    documents = write(tmp_path, FILES[files], samples=shared or 1)
    found = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / f"{ranks} ranks"
        run(folder, ranks, how=how, steps=42, accumulation=4 // ranks, streams=streams, shared=shared, evaluate=True)
        found[ranks] = steps_of(folder, ranks), losses(folder), read(folder, "evaluated", 0)[0]["loss"]
    steps, alone, evaluated = found[1]
    counts = sum(steps.values(), Counter())
    assert set(counts) == set(documents)
    assert counts.total() > len(documents), "a second epoch has to begin"
    for ranks in (2, 4):
        assert found[ranks][0] == steps
        assert found[ranks][1] == pytest.approx(alone, rel=1e-6)
        assert found[ranks][2] == pytest.approx(evaluated, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "packs", "shared"),
    [("trainer", False, None), ("trainer", True, None), ("loop", False, None), ("trainer", True, 3)],
)
def test_killed_on_2_ranks_and_resumed_on_4_and_on_1(tmp_path, how, packs, shared):
    documents = write(tmp_path, FILES["one file 100 times another"], samples=shared or 1)
    settings = {"how": how, "steps": 40, "packs": packs, "shared": shared}
    run(tmp_path / "whole", 1, accumulation=4, **settings)
    steps, expected = steps_of(tmp_path / "whole", 1), losses(tmp_path / "whole")
    resumed = settings | {"save": 5, "resume": True}
    first = {"fails": True, "kill": 13, "dispatch": how == "loop"}
    run(tmp_path / "first", 2, accumulation=2, **first, **resumed | {"resume": False})
    if how == "loop":
        assert documents_read(tmp_path / "first", 1)
        assert not (tmp_path / "first" / "read-1.jsonl").exists(), "with dispatch, only the first rank reads"
    run(tmp_path / "second", 4, accumulation=1, fails=True, kill=27, workers=2, dispatch=packs, **resumed)
    run(tmp_path / "third", 1, accumulation=4, workers=1, **resumed)
    runs = {"first": (2, 0, 13), "second": (4, 10, 27), "third": (1, 25, 40)}
    for name, (ranks, begin, end) in runs.items():
        found = steps_of(tmp_path / name, ranks)
        assert {step: found[step] for step in range(begin, end)} == {step: steps[step] for step in range(begin, end)}
        assert min(found) == begin
    for name in ("second", "third") if how == "loop" else ("third",):  # a killed trainer has not written its losses
        for step, loss in losses(tmp_path / name).items():
            assert loss == pytest.approx(expected[step], rel=1e-6)
    assert len(documents_read(tmp_path / "third", 1)) < len(documents_read(tmp_path / "whole", 1))
    assert sum(steps.values(), Counter()).total() > len(documents)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_rank_that_cannot_read_stops_all(tmp_path, dispatch):
    write(tmp_path, FILES["even"])
    settings = {"how": "loop", "steps": 60, "unreadable": 60, "workers": 1, "dispatch": dispatch}
    done = run(tmp_path / "run", 2, fails=True, **settings)
    of_others = "the main process, which raised" if dispatch else "another rank could not read its next rows"
    assert "an unreadable document" in done.stderr or of_others in done.stderr
