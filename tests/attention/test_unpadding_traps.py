"""What users bring to padded batches, each of which would be wrong without an error if it were overlooked."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import MethodType

import peft
import pytest
import torch
import transformers
from forms import Batch, alone, check, outputs_of
from forms import packed as packed_rows
from model_inputs import CHOICE, SEQUENCE, TOKEN, documents, padded
from patched_models import patched_tiny
from tiers import fast_only

import hf_packing as hfp
from tools.tiny_model import tiny_config, tiny_model

DOUBLE = torch.float64

tiny = partial(tiny_model, num_hidden_layers=1)
patched = partial(patched_tiny, num_hidden_layers=1, padded=True)


def both(name, kind, **changes):
    return tiny(name, kind, DOUBLE, **changes), patched(name, kind, DOUBLE, **changes)


def rows_of(rows, side="right", **how):
    """A padded batch to be compared with its rows."""
    inputs, places = padded(rows, side, **how)
    return Batch(inputs, rows, [*enumerate(places)])


def test_another_pad_token_than_that_of_the_configuration():
    """Classifiers of decoders look for the last token that is not the pad token; the mask says where it is."""
    stock, model = both("llama", SEQUENCE)
    rows = documents()
    batch = rows_of(rows, pad=3)  # the pad token of the configuration is 0
    wrong = stock(**batch.inputs).logits
    assert not torch.allclose(wrong, torch.stack([each for (each,) in alone(stock, rows, SEQUENCE)]), atol=1e-2)
    check(stock, model, batch, SEQUENCE, close=1e-5)


def test_a_pooler_that_looks_for_the_end_token():
    """CLIP's text model pools at the first end token of each row."""
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tokens = {"eos_token_id": 99, "bos_token_id": 0, "pad_token_id": 1}
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(num_attention_heads=4, projection_dim=16, **sizes, **tokens)
    stock = transformers.CLIPTextModel(config).double().eval()
    model = hfp.patch_model(copy.deepcopy(stock))
    rows = [[0, 5, 6, 7, 99], [0, 8, 9, 10, 11, 12, 99], [0, 99]]
    check(stock, model, rows_of(rows, pad=1), SEQUENCE, close=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("one_method")
def test_two_texts_are_refused():
    model = hfp.patch_model(tiny_model("bart", SEQUENCE, DOUBLE).base_model)
    batch, _ = padded([[5, 6, 7, 8, 2], [9, 2]], "right", pad=1)
    with pytest.raises(hfp.PackingError, match="decoder_input_ids: expected a padded batch of one text for each row"):
        model(**batch, decoder_input_ids=batch["input_ids"])


def test_a_loop_that_generates_in_another_thread():
    stock, model = both("llama", "causal")
    rows, done = documents(), threading.Event()
    expected = [each.detach() for each, *_ in alone(stock, rows)]

    def generate():
        while not done.is_set():
            model.generate(torch.tensor([[9, 10, 11]]), max_new_tokens=2, do_sample=False)

    @torch.no_grad()
    def logits_of(batch):
        return [each for each, *_ in outputs_of(model, batch)]

    with ThreadPoolExecutor(4) as threads:
        generating = threads.submit(generate)
        batches = [rows_of(rows), rows_of(rows), packed_rows(rows)] * 5
        for found in [threads.submit(logits_of, batch) for batch in batches]:
            for one, other in zip(found.result(), expected, strict=True):
                assert torch.allclose(one, other, atol=1e-5)
        done.set()
        generating.result()


def test_a_mask_that_the_model_changes_is_refused():
    class Masking(transformers.BertForSequenceClassification):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **others):
            if attention_mask is not None:
                attention_mask = attention_mask * (input_ids != 102).long()
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **others)

    model = Masking(tiny_config("bert", SEQUENCE, vocab_size=100, num_hidden_layers=1))  # the proof has no such token
    hfp.patch_model(model)
    model.resize_token_embeddings(128)
    model(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(hfp.PackingError, match="attention_mask: expected the same mask for BertModel"):
        model(input_ids=torch.tensor([[5, 102, 7]]), attention_mask=torch.ones(1, 3, dtype=torch.long))


def test_a_patched_model_inside_another_one():
    """As a teacher whose forward a student calls."""
    rows, others = documents(lengths=(5, 9, 3)), documents(1, (9, 2, 9))
    for kind in (SEQUENCE, "causal"):
        outer, inner = patched("bert", SEQUENCE, DOUBLE), patched("gpt2", kind, DOUBLE)
        batch, places = padded(others, "right")
        expected = alone(tiny("gpt2", kind, DOUBLE), others, kind)
        for place in (outer.classifier, outer.bert.encoder.layer[0]):
            found = []
            handle = place.register_forward_hook(lambda *_, to=found, i=inner, b=batch: to.append(i(**b).logits))
            outer(**padded(rows, "right")[0])
            handle.remove()
            for number, (tokens, (logits, *_)) in enumerate(zip(places, expected, strict=True)):
                own = found[0][number] if kind == SEQUENCE else found[0][number, tokens]
                assert torch.allclose(own, logits, atol=1e-9)


def test_types_that_all_rows_share():
    stock, model = both("bert", SEQUENCE)
    batch, _ = padded(documents(lengths=(2, 2)), "right", extra=2)
    types = torch.tensor([[0, 1, 1, 1]])  # as many as there are tokens without padding
    expected = stock(**batch, token_type_ids=types.expand(2, 4)).logits
    assert torch.allclose(model(**batch, token_type_ids=types).logits, expected)


def test_an_encoder_that_was_replaced_is_refused():
    """It makes the rows of the pooler."""
    model = patched("bert", SEQUENCE)
    model.bert.encoder = copy.deepcopy(tiny("bert", SEQUENCE).bert.encoder)
    with pytest.raises(hfp.PackingError, match="encoder: expected the modules that were there when"):
        model(**padded(documents(), "left")[0])


def test_packed_rows_are_the_same_before_and_after_a_padded_batch():
    stock = transformers.AlbertForPreTraining(tiny_config("albert", "masked")).double().eval()
    model, batch = hfp.patch_model(copy.deepcopy(stock)), packed_rows(documents())
    before = model(**batch.inputs).prediction_logits
    hfp.patch_model(model, padded=True)
    check(stock, model, rows_of(documents()), SEQUENCE, close=1e-5)
    assert torch.equal(model(**batch.inputs).prediction_logits, before)
    assert before.shape[:2] == batch.inputs["input_ids"].shape


def test_a_generate_of_the_users():
    def mine(*_, **__):
        return "mine"

    model = tiny("llama", "causal")
    model.generate = MethodType(mine, model)
    hfp.patch_model(model)
    assert model.generate() == "mine"
    hfp.unpatch_model(model)
    assert model.generate() == "mine"
    model = hfp.patch_model(tiny("llama", "causal"), padded=True)
    wrapped = model.generate
    model.generate = lambda *args, **kwargs: wrapped(*args, **kwargs)
    own = model.generate
    hfp.unpatch_model(model)
    assert model.generate is own
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, min_new_tokens=2).shape == (1, 4)


def test_a_forward_that_accelerate_makes_a_method():
    """As unwrap_model does with keep_fp32_wrapper=False."""
    model = patched("bert", SEQUENCE)
    batch, _ = padded(documents(), "right")
    expected = model(**batch).logits
    model.forward = MethodType(model.forward, model)
    assert torch.equal(model(**batch).logits, expected)
    assert torch.equal(model(batch["input_ids"], batch["attention_mask"]).logits, expected)
    hfp.unpatch_model(model)
    assert "forward" not in vars(model)
    assert torch.allclose(model(**batch).logits, expected, atol=1e-5)


def test_positions_beside_a_batch_without_padding():
    stock, model = both("bert", SEQUENCE)
    for lengths in ((7, 7, 5), (7, 7, 7)):
        batch = rows_of(documents(lengths=lengths), extra=0)
        given = batch.inputs | {"position_ids": torch.arange(7)[None].expand(3, 7)}
        assert torch.allclose(model(**given).logits, stock(**given).logits, atol=1e-9)
        check(stock, model, batch, SEQUENCE, close=1e-5)


def test_routers_of_rows_of_one_token():
    stock, model = tiny("mixtral", "causal"), patched("mixtral", "causal")
    batch = rows_of(documents(lengths=(1, 1, 1)), extra=2)
    found = model(**batch.inputs, output_router_logits=True)
    assert all(len(each) == batch.inputs["input_ids"].numel() for each in found.router_logits)
    check(stock, model, batch, close=1e-5)


def test_several_choices_in_each_row():
    stock, model = both("bert", CHOICE)
    rows = documents(lengths=(5, 9, 3, 9, 2, 7))
    batch, _ = padded(rows, "right")
    batch = {name: value.view(2, 3, -1) for name, value in batch.items()}
    expected = torch.stack([each[0] for each in alone(stock, rows, CHOICE)]).view(2, 3)
    assert torch.allclose(model(**batch).logits, expected, atol=1e-12)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
def test_adapters_for_each_row_are_refused_beside_padding():
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = hfp.patch_model(peft.get_peft_model(tiny_model("llama", "causal"), config), padded=True).eval()
    batch, _ = padded(documents(), "right")
    with pytest.raises(ValueError, match="`adapter_names` should be the same as the number of inputs"):
        model(**batch, adapter_names=["default"] * len(batch["input_ids"]))


NO_WEIGHTS = "output_attentions: expected False on a patched model and"
WEIGHTS = [("gpt2", "causal"), ("llama", "causal"), ("bloom", "causal"), ("bert", SEQUENCE), ("t5", TOKEN)]


@pytest.mark.parametrize(("name", "kind"), fast_only(WEIGHTS, ("gpt2", "causal"), ("bloom", "causal")))
def test_attention_weights_are_refused_on_every_route(name, kind):
    """They would be none at all, or those of the packed row."""
    stock = tiny(name, kind, **({"decoder_start_token_id": 0} if name == "t5" else {}))
    with suppress(ValueError):  # T5 has no other
        stock.set_attn_implementation("eager")
    model = hfp.patch_model(copy.deepcopy(stock), padded=True)
    rows, refused = documents(), partial(pytest.raises, hfp.PackingError, match=NO_WEIGHTS)
    batches = [padded(rows, "right")[0]]
    if kind == "causal":
        batches.append(packed_rows(rows).inputs)
        filled = {"input_ids": torch.tensor([[5, 6, 7]]), "use_cache": True, "output_attentions": True}
        assert torch.equal(model(**filled).attentions[0], stock(**filled).attentions[0])  # as without the patch
    for batch in batches:
        with refused():
            model(**batch, output_attentions=True)
        model(**batch, output_attentions=False)
        model.config.__dict__["_output_attentions"] = True  # as a configuration that was loaded with it
        with refused():
            model(**batch)
        model.config.__dict__["_output_attentions"] = False
    with hfp.unpatch_model(model):
        assert len(model(**batches[0], output_attentions=True).attentions[0]) == len(rows)
    stock.config.output_attentions = True
    with refused():
        hfp.patch_model(stock)
