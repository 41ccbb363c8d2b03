"""Labels that are trained on: those of SFTTrainer, and none that only repeat tokens that a model sees."""

from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from chat_templates import MARKED, PLAIN, WITH_TOOLS, tokenizer_with
from documents_to_mask import hidden
from patched_models import patched, patched_tiny
from peft import LoraConfig, get_peft_model
from tiers import fast_only
from tiny_models import build
from trainers import Plain, arguments, attached, documents, loader_of, logged, trainer_of
from transformers import Trainer
from trl import SFTConfig, SFTTrainer
from whole_rows import BUDGET
from whole_rows import trainer_of as pairs

import hf_packing as hfp
from hf_packing.attention.route import route_of
from hf_packing.upstream.trl import cuts_in_collator
from tools.tiny_model import tiny_model

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
        begins = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist() if "position_ids" in batch else [0]
        borders = [*begins, whole.numel()] if len(whole) == 1 else [0, *whole.sum(1).cumsum(0).tolist()]
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
    with pytest.raises(hfp.PackingError, match="^column 'completion_mask': "):
        hfp.attach(trainer, hfp.TokenBudget(64))


@pytest.mark.parametrize("read", [lambda data: data, lambda data: data.with_transform(lambda batch: batch)])
def test_trainer_ignores_masks_and_so_is_refused(tmp_path, read):
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]], "assistant_masks": [[0, 1, 1]]})
    with pytest.raises(hfp.PackingError, match="'assistant_masks': expected labels that are -100 where the mask is 0"):
        attached(tmp_path, hfp.TokenBudget(8), data=read(data)).train()


def test_a_loop_of_ones_own_applies_them():
    rows = {"input_ids": [[5, 6, 7, 8]], "completion_mask": [[0, 1, 1, 1]], "assistant_masks": [[0, 0, 1, 1]]}
    for data in (datasets.Dataset.from_dict(rows), [{name: np.array(values[0]) for name, values in rows.items()}]):
        [batch] = loader_of(data, hfp.TokenBudget(8))
        assert batch["labels"].tolist() == [[-100, -100, 7, 8]]


REPEATED = "labels: expected labels that differ from input_ids, got .* sees .* mask tokens before packing"


def unlabeled():
    return documents(12).remove_columns("labels")


def bert():
    return tiny_model("bert", "masked", torch.float64)


def patched_bert():
    return patched_tiny("bert", "masked", torch.float64)


def masked_rows(rows):
    found = [hidden({"input_ids": ids}) for ids in rows["input_ids"]]
    return {name: [row[name] for row in found] for name in ("input_ids", "labels")}


DATA = {
    "documents without labels": unlabeled,
    "documents that are their labels": lambda: unlabeled().map(lambda row: {"labels": row["input_ids"]}),
    "packed without labels": lambda: hfp.pack(unlabeled(), hfp.BestFit(48)),
    "a list": lambda: unlabeled().to_list(),
    "labels made as rows are read": lambda: unlabeled().with_transform(
        lambda rows: rows | {"labels": rows["input_ids"]}
    ),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_that_teaches_to_copy(tmp_path, kind):
    data, model = DATA[kind](), patched_bert()
    for train, evaluated in ((data, None), (documents(12).map(hidden), data)):
        trainer = trainer_of(tmp_path, model=model, data=train)
        trainer.eval_dataset = evaluated
        with pytest.raises(hfp.PackingError, match=REPEATED):
            hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(hfp.PackingError, match=REPEATED):
        loader_of(data, model=model)
    with pytest.raises(hfp.PackingError, match=REPEATED):
        hfp.evaluation_loss(Accelerator(cpu=True), model, data)
    causal = patched("Llama", torch.float64)
    loader = loader_of(data, model=causal)
    assert not route_of(causal).facts.sees_labels
    assert torch.isfinite(hfp.compute_loss(causal, next(iter(loader))))


def test_masked_data_is_trained_on(tmp_path):
    data = documents(12).map(hidden)
    for each in (
        data,
        hfp.pack(data, hfp.BestFit(48), keep_first_labels=True),
        documents(12).with_transform(masked_rows),
    ):
        trainer = attached(tmp_path, model=patched_bert(), data=each)
        assert len(logged(trainer)) == 2
        assert np.isfinite(trainer.evaluate(each)["eval_loss"])


def test_a_loop_whose_loader_knows_no_model():
    """Also where Trainer calls a model by itself."""
    model = patched_bert().train()
    batch = next(iter(loader_of(unlabeled())))
    with pytest.raises(hfp.PackingError, match="keep_first_labels: expected True .* or pass it to prepare_dataloader"):
        hfp.compute_loss(model, batch)
    with pytest.raises(hfp.PackingError, match=REPEATED):
        model(**batch)
    model.eval()
    assert torch.isfinite(model(**batch).logits).all()


ROW = list(range(5, 45))


def in_training(model, ids, labels, lengths):
    row = {"input_ids": ids, "labels": labels, "seq_lengths": lengths}
    return model(**hfp.PackingCollator(keep_first_labels=True)([row])).loss


def test_labels_that_are_chosen_may_repeat_tokens_by_chance():
    model = patched_bert().train()
    kept = [token if place % 7 == 3 else -100 for place, token in enumerate(ROW)]
    for labels in (kept, [-100] * 40, [6, *ROW[1:]], [*ROW[:39], -100]):
        assert in_training(model, ROW, labels, [40]).dtype == torch.float64
    model = patched_bert().train()
    in_training(model, ROW[:2], ROW[:2], [1, 1])  # two tokens are too few to tell
    with pytest.raises(hfp.PackingError, match="got 3 labels that only repeat input_ids"):
        in_training(model, ROW[:3], ROW[:3], [1, 2])


@pytest.mark.parametrize(
    ("lengths", "first"), [([40], True), ([40], False), ([30, 10], True), ([30, 10], False), ([1] * 40, True)]
)
def test_first_labels_and_documents_without_labels_choose_nothing(lengths, first):
    labels = np.array(ROW)
    if not first:
        labels[np.cumsum([0, *lengths[:-1]])] = -100
    if lengths == [30, 10]:
        labels[30:] = -100
    with pytest.raises(hfp.PackingError, match=REPEATED):
        in_training(patched_bert().train(), ROW, labels, lengths)


def test_a_corrector_of_spelling_may_meet_rows_without_mistakes():
    """Its labels are all tokens, and other ones only where there is a mistake."""
    model = patched_bert().train()
    in_training(model, ROW, [6, *ROW[1:]], [40])
    assert torch.isfinite(in_training(model, ROW, ROW, [40]))


def test_a_loop_for_a_corrector_may_begin_without_mistakes():
    """Its loader knows the labels of rows from all over the data, whatever the first batch has."""
    model = patched_bert()
    rows = [{"input_ids": ROW[:12], "labels": [6 + number % 2, *ROW[1:12]]} for number in range(12)]
    data = [rows[number] if number % 3 == 0 else {**rows[0], "labels": ROW[:12]} for number in range(12)]
    loader = loader_of(data, hfp.TokenBudget(12), model=model)
    model.train()
    batches = list(loader)
    repeated = [torch.equal(batch["packed_targets"], batch["input_ids"]) for batch in batches]
    assert repeated[0], "this order begins with a mistake"
    assert not all(repeated)
    for batch in batches:
        assert torch.isfinite(hfp.compute_loss(model, batch))
    with pytest.raises(hfp.PackingError, match=REPEATED):
        loader_of(unlabeled(), model=model)


MODELS = {
    "an encoder with a causal loss": (lambda: build("BertLMHeadModel", torch.float64, is_decoder=False), True),
    "a decoder that is asked for its own tokens": (lambda: tiny_model("bart", "causal", torch.float64), True),
    "a masked model in float32": (lambda: tiny_model("modernbert", "masked"), True),
    "a masked model as it is initialised": (
        lambda: transformers.RobertaForMaskedLM(
            transformers.RobertaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        ),
        True,
    ),
    "a masked model with adapters": (lambda: get_peft_model(bert(), LoraConfig(target_modules=["query"])), True),
    "a masked model in half precision": (lambda: bert().to(torch.bfloat16), True),
    "experts whose router adds to the loss": (
        lambda: build("Mixtral", output_router_logits=True, router_aux_loss_coef=0.5),
        False,
    ),
    "a state": (lambda: tiny_model("mamba", "causal"), False),
    "a causal model in half precision": (lambda: build("Llama").to(torch.bfloat16), False),
}


@pytest.mark.parametrize(
    "kind", fast_only(MODELS, "a masked model in float32", "experts whose router adds to the loss")
)
def test_models_that_see_what_labels_ask_for(kind):
    make, sees = MODELS[kind]
    model = hfp.patch_model(make()).train()
    batch = hfp.PackingCollator()([{"input_ids": ROW}])
    if sees:
        with pytest.raises(hfp.PackingError, match=REPEATED):
            model(**batch)
    else:
        assert torch.isfinite(model(**batch).loss)
    again = hfp.patch_model(make())  # by a route that is known
    assert route_of(model).facts.sees_labels == route_of(again).facts.sees_labels == sees


def test_a_model_that_cannot_be_run_is_known_by_a_small_one():
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(bert().config)
    with pytest.warns(UserWarning, match="proved isolation on a small copy of BertForMaskedLM"):
        hfp.patch_model(model, prove="small")
    assert route_of(model).facts.sees_labels


TRUNCATED = hfp.TokenBudget(128, overflow="truncate")


def prompts(masked=200, trained=20, number=12, short=0):
    """Documents whose first tokens are not trained on, and short ones that are trained on but for their first token."""
    tokens = [3 + (row * 7 + place) % 90 for row in range(number) for place in range(masked + trained)]
    rows = [tokens[row * (masked + trained) : (row + 1) * (masked + trained)] for row in range(number)]
    labels = [[-100] * masked + row[masked:] for row in rows]
    rows, labels = [*rows, *[[5, 6, 7]] * short], [*labels, *[[5, 6, 7]] * short]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})


def with_mask(data, name="completion_mask"):
    masks = [[int(label != -100) for label in row] for row in data["labels"]]
    return data.remove_columns("labels").add_column(name, masks)


def table(rows):
    return datasets.Dataset.from_list(rows)


def as_transform(data):
    rows = data[:]
    return data.with_transform(lambda batch: {name: batch[name] for name in rows})


@pytest.mark.parametrize("kind", [table, Plain, lambda rows: as_transform(table(rows))])
@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_no_label_left_is_refused(tmp_path, kind, overflow):
    """A short document that stays has no labels."""
    data = kind([*prompts(), {"input_ids": [5, 6, 7], "labels": [-100] * 3}])
    budget = hfp.TokenBudget(128, overflow=overflow)
    with pytest.raises(hfp.PackingError, match="batching: 0 of 240 labels are left.*got TokenBudget"):
        hfp.attach(trainer_of(tmp_path, data=data), budget)
    with pytest.raises(hfp.PackingError, match="batching: 0 of 240 labels are left"):
        loader_of(data, budget)


def test_masks_of_trl_are_labels(tmp_path):
    trainer = trainer_of(tmp_path, SFTTrainer, data=with_mask(prompts()), completion_only_loss=True)
    with pytest.raises(hfp.PackingError, match="0 of 240 labels are left"):
        hfp.attach(trainer, TRUNCATED)
    trainer = trainer_of(tmp_path, SFTTrainer, data=with_mask(prompts()), completion_only_loss=False)
    labels = hfp.attach(trainer, TRUNCATED).labels
    assert (labels.left, labels.documents) == (12 * 127, 12 * 219)


def test_shared_prefixes_are_counted_too(tmp_path):
    budget = hfp.TokenBudget(128, overflow="truncate", share_prefixes=True)
    with pytest.raises(hfp.PackingError, match="0 of 240 labels are left"):
        hfp.attach(trainer_of(tmp_path, data=prompts()), budget)


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_what_is_left_is_said(tmp_path, kind):
    data = prompts(masked=120, short=2)
    summary = hfp.attach(trainer_of(tmp_path, kind, data=data), TRUNCATED)
    left = 12 * 8 + 2 * 2
    assert (summary.labels.left, summary.labels.documents) == (left, 244)
    assert f"144 tokens lost; {left} of 244 labels are left" in str(summary)


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("max_tokens", fast_only([20, 131, 300], 20, 131))
def test_counts_are_those_of_the_batches(max_tokens, overflow):
    data = prompts(masked=120, short=2)
    without = data.remove_columns("labels")
    packed = hfp.pack(data, hfp.BestFit(141, seed=0))
    lazy = datasets.concatenate_datasets([packed, packed])
    budget = hfp.TokenBudget(max_tokens, overflow=overflow)
    for each, total in ((data, 244), (without, 12 * 139 + 4), (packed, 244), (lazy, 488), (as_transform(data), 244)):
        if "seq_lengths" in each.column_names and overflow != "drop":
            continue
        loader = loader_of(each, budget)
        left = sum(int((batch["labels"] != -100).sum()) for batch in loader)
        assert left
        if (labels := loader.summary.labels) is None:
            assert not loader.summary.lost_tokens
        else:
            assert (labels.left, labels.documents) == (left, total)


@pytest.mark.parametrize("how", [{}, {"share_prefixes": True}, {"lazy": True}])
def test_pack(tmp_path, how):
    for data, left in ((prompts(masked=120, short=2), 100), (prompts(), 0)):
        if "lazy" in how:
            data.save_to_disk(tmp_path / str(left))
            data = datasets.load_from_disk(tmp_path / str(left))
        strategy = hfp.BestFit(128, overflow="truncate")
        if left:
            for _ in range(2):  # the second one is read from the cache
                with pytest.warns(UserWarning, match=f"drops 144 of .* tokens, as configured .*; {left} of 244 labels"):
                    packed = hfp.pack(data, strategy, **how)
            if not how:
                assert sum(label != -100 for row in packed["labels"] for label in row) == left
        else:
            with pytest.raises(hfp.PackingError, match="strategy: 0 of 240 labels are left"):
                hfp.pack(data, strategy, **how)


def test_map_and_streams():
    strategy, some = hfp.BestFit(128, overflow="truncate"), prompts(masked=120, short=2)
    with pytest.warns(UserWarning, match="drops 144 of 1,686 tokens of a batch, .*; 100 of 244 labels are left"):
        some.map(strategy, batched=True, batch_size=None, remove_columns=some.column_names)
    for streams in (None, 1):
        with pytest.warns(UserWarning, match="pack drops 144 of 1,686 tokens of a stream, .*; 144 labels are lost"):
            list(hfp.pack(some.to_iterable_dataset(), strategy, streams=streams))
        with pytest.raises(hfp.PackingError, match="0 of 240 labels are left"):
            list(hfp.pack(prompts().to_iterable_dataset(), strategy, streams=streams))


LIMIT = 20
BUDGET_OF_TOKENS = hfp.TokenBudget(64)
LENGTHS = [len(tokens) for tokens in documents(45)["input_ids"]]
IS_CUT = "more than" if cuts_in_collator() else "exactly"
CUT = sum(length > LIMIT if cuts_in_collator() else length >= LIMIT for length in LENGTHS)
CUT_REFUSED = r"max_length: expected SFTConfig\(max_length=None\), got 20\. .* and {} have " + IS_CUT + " 20 tokens"


def short():
    return documents(45).select([row for row, length in enumerate(LENGTHS) if length < LIMIT])


def cut_sft(folder, data, **changes):
    return trainer_of(folder, SFTTrainer, data=data, max_length=LIMIT, **changes)


LONG_PROMPTS = {"input_ids": [[5] * 30] * 3 + [[6] * 9] * 5, "labels": [[-100] * 25 + [5] * 5] * 3 + [[6] * 9] * 5}
"""The prompts of three documents are as long as max_length, so that no label is left of them."""


@pytest.mark.parametrize(
    ("data", "cut"),
    [
        (lambda: documents(45), CUT),
        (lambda: hfp.pack(documents(45), hfp.BestFit(64)), 8),
        (lambda: datasets.Dataset.from_dict(LONG_PROMPTS), 3),
    ],
)
def test_documents_that_sft_trainer_has_cut_or_dropped(tmp_path, data, cut):
    assert 0 < CUT < len(LENGTHS)
    trainer = cut_sft(tmp_path, data())
    with pytest.raises(hfp.PackingError, match=CUT_REFUSED.format(f"{cut} of .* documents in train_dataset")):
        hfp.attach(trainer, BUDGET_OF_TOKENS)


def test_shorter_documents_and_a_max_length_that_sft_trainer_does_not_apply_are_taken(tmp_path):
    summary = hfp.attach(cut_sft(tmp_path, short()), BUDGET_OF_TOKENS)
    assert (summary.tokens, summary.lost_tokens) == (sum(length for length in LENGTHS if length < LIMIT), 0)
    trainer = cut_sft(tmp_path, documents(45), dataset_kwargs={"skip_prepare_dataset": True})
    if not cuts_in_collator():
        assert hfp.attach(trainer, BUDGET_OF_TOKENS).tokens == sum(LENGTHS)


def test_evaluation_data_that_sft_trainer_has_cut(tmp_path):
    trainer = cut_sft(tmp_path, short(), per_device_eval_batch_size=2)
    trainer.eval_dataset = {"long": cut_sft(tmp_path, documents(45)).train_dataset}
    with pytest.raises(hfp.PackingError, match=CUT_REFUSED.format(rf"{CUT} of 45 documents in eval_dataset\['long'\]")):
        hfp.attach(trainer, BUDGET_OF_TOKENS)
    trainer.eval_dataset = None
    hfp.attach(trainer, BUDGET_OF_TOKENS)
    assert trainer.evaluate(short())["eval_loss"] > 0
    with pytest.raises(hfp.PackingError, match=CUT_REFUSED.format(f"{CUT} of 45 documents in eval_dataset")):
        trainer.evaluate(documents(45))


def test_predict_cuts_nothing(tmp_path):
    trainer = cut_sft(tmp_path, short(), per_device_eval_batch_size=2)
    hfp.attach(trainer, BUDGET_OF_TOKENS)
    exact = datasets.Dataset.from_dict({"input_ids": [list(range(3, 3 + LIMIT))] * 4})
    assert trainer.predict(exact).predictions.shape[0] == 2


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_pairs_that_are_cut_or_dropped_are_counted(kind, tmp_path):
    whole, trainer = pairs(kind, tmp_path).train_dataset, pairs(kind, tmp_path, patched=True, max_length=14)
    summary = hfp.attach(trainer, hfp.TokenBudget(BUDGET[kind]))
    prompt = np.array([len(row.get("prompt_ids", ())) for row in whole])
    sides = np.array([[len(row[name]) for name in ("chosen_ids", "rejected_ids")] for row in whole]) + prompt[:, None]
    dropped = prompt >= 14 if kind == "dpo" else (sides > 14).any(1)
    assert 0 < dropped.sum() < len(whole)
    dropped &= kind == "reward" or not cuts_in_collator()
    assert summary.left_out == dropped.sum()
    assert summary.documents == (~dropped).sum()
    assert summary.tokens + summary.lost_tokens == sides.sum()
    assert summary.lost_tokens > 0
    assert f"{summary.left_out} rows left out, {summary.lost_tokens:,} tokens lost" in str(summary)
