"""Labels that only repeat the tokens that a model sees would teach it to copy: refused wherever they come in."""

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from documents_to_mask import hidden
from patched_models import patched, patched_tiny
from peft import LoraConfig, get_peft_model
from tiers import fast_only
from tiny_models import build
from trainers import attached, documents, loader_of, logged, trainer_of

import hf_packing as hfp
from hf_packing.attention.route import route_of
from tools.tiny_model import tiny_model

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
    for each in (data, hfp.pack(data, hfp.BestFit(48)), documents(12).with_transform(masked_rows)):
        trainer = attached(tmp_path, model=patched_bert(), data=each)
        assert len(logged(trainer)) == 2
        assert np.isfinite(trainer.evaluate(each)["eval_loss"])


def test_a_loop_whose_loader_knows_no_model():
    """Also where Trainer calls a model by itself."""
    model = patched_bert().train()
    batch = next(iter(loader_of(unlabeled())))
    with pytest.raises(hfp.PackingError, match=REPEATED):
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
    repeated = [torch.equal(batch["targets"], batch["input_ids"]) for batch in batches]
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
"""By kind, a function that makes a model, and whether it sees what labels ask for."""


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
