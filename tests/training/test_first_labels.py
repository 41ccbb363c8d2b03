"""Labels of first tokens, which models that do not predict the next token need: kept on every way to a batch, or an
error."""

import json
from functools import partial
from itertools import pairwise

import accelerate
import datasets
import numpy as np
import pytest
import torch
from tiers import fast_only
from torch.nn import functional as F
from trainers import trainer_of

import hf_packing as hfp
from hf_packing.cli import main
from tools.tiny_model import tiny_model

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(2, 15, 30)
IDS = [RNG.integers(10, 100, length).tolist() for length in LENGTHS]
TAGS = [RNG.integers(0, 2, length).tolist() for length in LENGTHS]


def tagged():
    return datasets.Dataset.from_dict({"input_ids": IDS, "labels": TAGS})


def by_fleet(documents, keep, folder):
    documents.to_parquet(folder / "documents.parquet")
    hfp.fleet.pack(folder / "documents.parquet", hfp.BestFit(64), folder / "out", keep_first_labels=keep)
    return datasets.Dataset.from_parquet([*map(str, (folder / "out").glob("*.parquet"))])


def by_command(documents, keep, folder):
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    flags = ["--keep-first-labels"] * keep
    paths = [str(folder / "documents.jsonl"), "--output", str(folder / "rows")]
    assert main(["pack", *paths, "--max-length", "64", *flags]) == 0
    return datasets.load_from_disk(folder / "rows")


WAYS = {
    "pack": lambda documents, keep, _: hfp.pack(documents, hfp.BestFit(64), keep_first_labels=keep),
    "lazily": lambda documents, keep, _: hfp.pack(documents, hfp.BestFit(64), keep_first_labels=keep, lazy=True),
    "map": lambda documents, keep, _: documents.map(
        hfp.BestFit(64),
        batched=True,
        remove_columns=documents.column_names,
        fn_kwargs={"keep_first_labels": True} if keep else {},
    ),
    "stream": lambda documents, keep, _: hfp.pack(
        documents.to_iterable_dataset(), hfp.BestFit(64), keep_first_labels=keep
    ),
    "fleet": by_fleet,
    "command": by_command,
}


@pytest.mark.parametrize("way", fast_only(WAYS, "pack", "lazily", "map", "stream"))
@pytest.mark.parametrize("keep", [True, False])
def test_all_labels_of_a_tagger_are_in_the_rows_or_they_are_refused(way, keep, tmp_path):
    rows = list(WAYS[way](tagged(), keep, tmp_path))
    found = {}
    for row in rows:
        for first, end in pairwise(np.cumsum([0, *row["seq_lengths"]]).tolist()):
            found[tuple(row["input_ids"][first:end])] = row["labels"][first:end]
    wanted = {tuple(ids): tags if keep else [-100, *tags[1:]] for ids, tags in zip(IDS, TAGS, strict=True)}
    assert found == wanted
    collate = hfp.PackingCollator(keep_first_labels=True)
    if keep:
        assert int((collate(rows)["labels"] != -100).sum()) == sum(LENGTHS)
    else:
        with pytest.raises(hfp.PackingError, match="labels: .* got 30 segments without one, of which 100% have one at"):
            collate(rows)


def test_unpacked_and_counted():
    packed = hfp.pack(tagged(), hfp.BestFit(64), keep_first_labels=True)
    assert hfp.unpack(packed)["labels"][:] == TAGS
    with pytest.warns(UserWarning, match=r"drops .*; (\d+) of (\d+) labels are left") as caught:
        hfp.pack(tagged(), hfp.BestFit(8, overflow="truncate"), keep_first_labels=True)
    left = sum(min(length, 8) for length in LENGTHS)
    assert f"{left} of {sum(LENGTHS)} labels are left" in str(caught[0].message)


def test_trees_keep_none():
    with pytest.raises(hfp.PackingError, match="keep_first_labels: expected False with share_prefixes, .*, got True"):
        hfp.pack(tagged(), hfp.BestFit(64), share_prefixes=True, keep_first_labels=True)


@pytest.mark.parametrize("kind", ["token classification", "masked"])
def test_a_loss_without_first_labels_is_refused(kind):
    model = hfp.patch_model(tiny_model("bert", kind, torch.float64).eval())
    documents = [{"input_ids": ids, "labels": tags} for ids, tags in zip(IDS, TAGS, strict=True)]
    batch = hfp.PackingCollator(keep_first_labels=True)(documents)
    with torch.no_grad():
        alone = [
            F.cross_entropy(model(input_ids=torch.tensor([ids])).logits[0], torch.tensor(tags), reduction="sum")
            for ids, tags in zip(IDS, TAGS, strict=True)
        ]
        assert float(hfp.compute_loss(model, batch)) == pytest.approx(float(sum(alone)) / sum(LENGTHS), rel=1e-5)
    other = hfp.patch_model(tiny_model("bert", kind).train())
    with pytest.raises(hfp.PackingError, match="keep_first_labels: expected True in PackingCollator, .* got False"):
        hfp.compute_loss(other, hfp.PackingCollator()(documents))


def test_what_lost_nothing_trains():
    """Documents that begin with the same token; prompts without labels; and few labels, at random places."""
    collate, rng = hfp.PackingCollator(keep_first_labels=True), np.random.default_rng(0)
    rows = [{"input_ids": [3, *ids], "labels": [-100, *tags]} for ids, tags in zip(IDS, TAGS, strict=True)]
    assert int((collate(rows)["labels"] != -100).sum()) == sum(LENGTHS)
    rows = [{"input_ids": [*ids, 5], "labels": [-100] * len(ids) + [1]} for ids in IDS]
    assert int((collate(rows)["labels"] != -100).sum()) == 30
    for _ in range(50):
        few = [np.where(rng.random(len(tags)) < 0.15, tags, -100).tolist() for tags in TAGS]
        collate([{"input_ids": ids, "labels": tags} for ids, tags in zip(IDS, few, strict=True)])


def test_a_masked_model_refuses_rows_that_lost_them(tmp_path):
    def trainer(keep):
        rows = hfp.pack(tagged(), hfp.BestFit(64), keep_first_labels=keep)
        made = trainer_of(tmp_path, model=tiny_model("bert", "masked"), data=rows)
        hfp.attach(made, hfp.TokenBudget(64))
        return made

    assert "labels" in next(iter(trainer(True).get_train_dataloader()))
    with pytest.raises(hfp.PackingError, match="labels: expected labels at first tokens"):
        trainer(False)


LOST = "labels: expected labels at first tokens .*, got (rows that were packed without them|.* segments without one)"


@pytest.mark.parametrize("way", ["pack", "lazily", "stream"])
def test_rows_of_pack_say_whether_they_lost_them(way, tmp_path):
    """A guess from a few rows would need many segments, and labels at many of their second tokens."""
    few = tagged().select(range(2)) if way != "stream" else tagged()
    for keep in (True, False):
        rows = WAYS[way](few, keep, tmp_path)
        if way == "stream":
            rows = hfp.pack(few.to_iterable_dataset(), hfp.BestFit(64), keep_first_labels=keep, streams=1)
        made = trainer_of(tmp_path, model=tiny_model("bert", "masked"), data=rows)
        if keep:
            hfp.attach(made, hfp.TokenBudget(64))
        else:
            with pytest.raises(hfp.PackingError, match=LOST):
                hfp.attach(made, hfp.TokenBudget(64))


def test_rows_to_evaluate_on(tmp_path):
    lost = hfp.pack(tagged().select(range(3)), hfp.BestFit(64))
    made = trainer_of(tmp_path, model=tiny_model("bert", "masked"), data=tagged())
    hfp.attach(made, hfp.TokenBudget(64))
    with pytest.raises(hfp.PackingError, match=LOST):
        made.evaluate(lost)
    accelerator, model = accelerate.Accelerator(cpu=True), hfp.patch_model(tiny_model("bert", "masked"))
    with pytest.raises(hfp.PackingError, match=LOST):
        hfp.evaluation_loss(accelerator, model, lost)
    with pytest.raises(hfp.PackingError, match=LOST):
        hfp.prepare_dataloader(accelerator, lost, hfp.TokenBudget(64), model=model)


def test_a_stock_trainer_refuses_rows_of_one_document(tmp_path):
    rows = hfp.pack(tagged(), hfp.BestFit(64, max_documents=2))
    model = hfp.patch_model(tiny_model("bert", "token classification"))
    made = trainer_of(tmp_path, model=model, data=rows, per_device_train_batch_size=1)
    made.data_collator = hfp.PackingCollator(keep_first_labels=True)
    with pytest.raises(hfp.PackingError, match=LOST):
        made.train()


@pytest.mark.parametrize("training", [True, False])
def test_a_collator_for_another_model_is_refused(training):
    documents = [{"input_ids": IDS[0], "labels": TAGS[0]}, {"input_ids": IDS[1], "labels": TAGS[1]}]
    keeping, losing = (hfp.PackingCollator(keep_first_labels=keep)(documents) for keep in (True, False))
    causal, masked, tagger = (
        hfp.patch_model(tiny_model(*of)).train(training)
        for of in (("llama", "causal"), ("bert", "masked"), ("bert", "token classification"))
    )
    hfp.compute_loss(causal, losing), hfp.compute_loss(masked, keeping), hfp.compute_loss(tagger, keeping)
    with pytest.raises(hfp.PackingError, match="keep_first_labels: expected False .* predicts the next .* got True"):
        hfp.compute_loss(causal, keeping)
    for of in (partial(hfp.compute_loss, masked), partial(hfp.compute_loss, tagger), lambda batch: tagger(**batch)):
        with pytest.raises(hfp.PackingError, match="keep_first_labels: expected True .* does not predict .* got False"):
            of(losing)
