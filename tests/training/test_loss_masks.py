"""Labels that are trained on, beside those that SFTTrainer makes of the same chats, completions and calls of tools."""

from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from chat_templates import MARKED, PLAIN, WITH_TOOLS, tokenizer_with
from tiers import fast_only
from tiny_models import build
from trainers import arguments, attached, loader_of, trainer_of
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp

TOKENIZER = tokenizer_with(MARKED)
CHATS = [PLAIN, [WITH_TOOLS[0], *PLAIN[:2]], PLAIN[2:]]
TEXTS = [("2 + 2 =", " 4"), ("The capital of France is", " Paris."), ("a", "b")]
COMPLETIONS = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
ASSISTANT_ONLY = {"assistant_only_loss": True}
KINDS = {
    "chats": ([{"messages": chat} for chat in CHATS], ASSISTANT_ONLY),
    "tool calls": ([{"messages": messages} for messages in (WITH_TOOLS, PLAIN)], ASSISTANT_ONLY),
    "completions": ([{"prompt": given, "completion": wanted} for given, wanted in TEXTS], {}),
    "completions of chats": (COMPLETIONS, {}),
    "completions and assistants": (COMPLETIONS, ASSISTANT_ONLY),
}


def sft(folder, data, padding_free=False, **config):
    config = arguments(folder, SFTConfig, padding_free=padding_free, per_device_train_batch_size=4, **config)
    model = build("Llama", vocab_size=512)
    return SFTTrainer(model, config, train_dataset=data, processing_class=TOKENIZER)


def tokenised(documents):
    """As TRL tokenises them, with its masks and without labels."""

    def tokenise(row):
        whole = row.get("messages") or row["prompt"] + row["completion"]
        if isinstance(whole, str):
            whole = whole + TOKENIZER.eos_token
            masks, ids = {}, TOKENIZER(whole)["input_ids"]
        else:
            known = TOKENIZER.apply_chat_template(whole, return_assistant_tokens_mask=True, return_dict=True)
            masks, ids = {"assistant_masks": known["assistant_masks"]}, known["input_ids"]
        if "prompt" in row:
            prompt = row["prompt"]
            given = (
                TOKENIZER(prompt)["input_ids"]
                if isinstance(prompt, str)
                else TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            )
            masks["completion_mask"] = [0] * len(given) + [1] * (len(ids) - len(given))
        return {"input_ids": ids, **masks}

    return documents.map(tokenise, remove_columns=documents.column_names)


def trained_on(trainer):
    """Of each document of an epoch, by its tokens: the labels, the first of which counts for nobody."""
    found = {}
    for batch in trainer.get_train_dataloader():
        whole = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        borders = batch.get("cu_seq_lens_q", torch.cat([torch.zeros(1), whole.sum(1).cumsum(0)])).int().tolist()
        ids, labels = batch["input_ids"][whole].tolist(), batch["labels"][whole].tolist()
        found |= {tuple(ids[begin:end]): labels[begin + 1 : end] for begin, end in pairwise(borders)}
    return found


@pytest.mark.parametrize("kind", fast_only(KINDS, "chats", "completions"))
def test_labels_are_those_of_trl(tmp_path, kind):
    rows, settings = KINDS[kind]
    documents = datasets.Dataset.from_list(rows)
    expected = trained_on(sft(tmp_path, documents, **settings))
    labels = [label for each in expected.values() for label in each]
    assert len(expected) == len(documents)
    assert 0 < sum(label == -100 for label in labels) < len(labels)

    attached = sft(tmp_path, documents, **settings)
    hfp.attach(attached, hfp.TokenBudget(4096))
    assert trained_on(attached) == expected

    masks = tokenised(documents)
    if not settings and "assistant_masks" in masks.column_names:
        masks = masks.remove_columns("assistant_masks")
    with pytest.warns(UserWarning, match="to labels"):
        packed = hfp.pack(masks, hfp.BestFit(512))
    with pytest.warns(UserWarning, match="to labels"):
        mapped = masks.map(hfp.BestFit(512), batched=True, remove_columns=masks.column_names)
    assert {"completion_mask", "assistant_masks"}.isdisjoint([*packed.column_names, *mapped.column_names])
    assert max(map(len, packed["seq_lengths"])) > 1
    for rows in (packed, mapped):
        assert trained_on(sft(tmp_path, rows, padding_free=True)) == expected
        attached = sft(tmp_path, rows)
        hfp.attach(attached, hfp.TokenBudget(4096))
        assert trained_on(attached) == expected


MASKED = datasets.Dataset.from_dict(
    {"input_ids": [[5, 6, 7, 8], [9, 10, 11]], "completion_mask": [[0, 0, 1, 1], [0, 1, 1]]}
)
APPLIED = MASKED.add_column("labels", [[-100, -100, 7, 8], [-100, 10, 11]])
NOT_APPLIED = MASKED.add_column("labels", MASKED["input_ids"][:])


def asked_for(folder, asked, data=None):
    return trainer_of(folder, SFTTrainer, data=data, completion_only_loss=asked)


@pytest.mark.parametrize(("asked", "expected"), [(True, [[-100, 7, 8], [10, 11]]), (False, [[6, 7, 8], [10, 11]])])
@pytest.mark.parametrize("kind", ["prepared by TRL", "transform"])
def test_completion_only_loss_decides(tmp_path, asked, expected, kind):
    trainer = asked_for(tmp_path, asked, MASKED)
    if kind == "transform":
        trainer.train_dataset = MASKED.with_transform(lambda batch: batch)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert sorted(trained_on(trainer).values()) == sorted(expected)


def test_first_labels_contradict_nothing(tmp_path):
    packed = hfp.pack(MASKED.remove_columns("completion_mask"), hfp.BestFit(8))
    trainer = asked_for(tmp_path, False, packed)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert sorted(map(len, trained_on(trainer).values())) == [2, 3]


@pytest.mark.filterwarnings("ignore:pack applies")
@pytest.mark.parametrize("data", [lambda: APPLIED, lambda: hfp.pack(MASKED, hfp.BestFit(4))])
def test_labels_that_are_given_are_trained_on(tmp_path, data):
    """TRL leaves them as they are, whatever completion_only_loss says."""
    found = []
    for packs in (False, True):
        trainer = trainer_of(tmp_path, SFTTrainer, data=data(), completion_only_loss=False, padding_free=not packs)
        if packs:
            hfp.attach(trainer, hfp.TokenBudget(64))
        found.append(trained_on(trainer))
    assert found[0] == found[1]
    assert sorted(found[0].values()) == [[-100, 7, 8], [10, 11]]


def test_labels_that_do_not_follow_completion_only_loss_are_refused(tmp_path):
    trainer = asked_for(tmp_path, True)
    hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(hfp.PackingError, match="^column 'completion_mask': "):
        trainer.evaluate(NOT_APPLIED)
    trainer = asked_for(tmp_path, True, NOT_APPLIED)
    hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(hfp.PackingError, match="^column 'completion_mask': "):
        trainer.train()


@pytest.mark.parametrize("read", [lambda data: data, lambda data: data.with_transform(lambda batch: batch)])
def test_trainer_ignores_masks_and_so_is_refused(tmp_path, read):
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]], "assistant_masks": [[0, 1, 1]]})
    trainer = attached(tmp_path, hfp.TokenBudget(8), data=read(data))
    with pytest.raises(hfp.PackingError, match="'assistant_masks': expected labels that are -100 where the mask is 0"):
        trainer.train()


def test_a_loop_of_ones_own_applies_them():
    rows = {"input_ids": [[5, 6, 7, 8]], "completion_mask": [[0, 1, 1, 1]], "assistant_masks": [[0, 0, 1, 1]]}
    for data in (datasets.Dataset.from_dict(rows), [{name: np.array(values[0]) for name, values in rows.items()}]):
        [batch] = loader_of(data, hfp.TokenBudget(8))
        assert batch["labels"].tolist() == [[-100, -100, 7, 8]]
