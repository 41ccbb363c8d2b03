"""Models with any head on padded batches: every row has the outputs and gradients that it has alone."""

import copy
import inspect
import pickle
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from padded_models import CHOICE, LENGTHS, QUESTION, SEQUENCE, TOKEN, alone, documents, outputs_of, padded
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import build

import hf_packing as hfp
from hf_packing.attention.packed_row import CACHES
from hf_packing.attention.route import route_of
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.attention.unpadding import install_unpadding

SIDES = ("right", "left", "both")
HEADS = [
    *((name, SEQUENCE) for name in ("bert", "albert", "roberta", "deberta-v2", "llama", "qwen3", "gpt2")),
    *((name, TOKEN) for name in ("bert", "albert", "modernbert", "qwen3", "gpt2")),
    *((name, QUESTION) for name in ("bert", "roberta", "modernbert", "llama")),
    *((name, CHOICE) for name in ("bert", "albert", "deberta-v2")),
    *((name, "masked") for name in ("bert", "roberta", "deberta-v2")),
    *((name, "causal") for name in ("llama", "qwen3", "gpt2", "mamba")),
]
FAST = (("bert", SEQUENCE), ("albert", SEQUENCE), ("llama", SEQUENCE), ("bert", QUESTION), ("gpt2", "causal"))
CLOSE = {"llama": 1e-5, "qwen3": 1e-5, "modernbert": 1e-5, "mamba": 1e-5}
"""Models with parts in float32, such as rotary angles; the others agree to 1e-12."""


def gradients_of(model, outputs):
    generator = torch.Generator().manual_seed(1)
    model.zero_grad()
    score = sum(
        (each * torch.randn(each.shape, generator=generator, dtype=torch.float64)).sum()
        for row in outputs
        for each in row
    )
    score.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_rows(stock, model, kind, sides=SIDES, close=1e-12):
    rows = documents()
    expected = alone(stock, rows, kind)
    gradients = gradients_of(stock, expected)
    scale = max(float(each.abs().max()) for each in gradients.values())
    for side in sides:
        found = outputs_of(model, *padded(rows, side), kind)
        for one, other in zip(found, expected, strict=True):
            for left, right in zip(one, other, strict=True):
                assert left.shape == right.shape
                assert float((left - right).detach().abs().max()) <= close
        own = gradients_of(model, found)
        assert max(float((own[name] - each).abs().max()) for name, each in gradients.items()) <= close * scale


@pytest.mark.parametrize(("name", "kind"), fast_only(HEADS, *FAST))
def test_rows_are_what_they_are_alone(name, kind):
    stock = tiny_model(name, kind, torch.float64)
    model = patched_tiny(name, kind, torch.float64)
    refused = dict(route_of(model).unpadding.refused) if route_of(model).unpadding else {}
    sides = [side for side in SIDES if side not in refused]
    assert "right" in sides
    for module in (*stock.modules(), *model.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    check_rows(stock.train(), model.train(), kind, sides, CLOSE.get(name, 1e-12))


@pytest.mark.parametrize("name", fast_only(["bert", "albert", "roberta", "deberta-v2", "llama", "xlnet"], "albert"))
def test_backbones_without_a_head(name):
    torch.manual_seed(0)
    stock = copy.deepcopy(tiny_model(name, SEQUENCE, torch.float64).base_model)
    check_rows(stock, hfp.patch_model(copy.deepcopy(stock)), SEQUENCE, close=CLOSE.get(name, 1e-12))


@pytest.mark.parametrize(
    ("name", "kind"),
    fast_only(
        [("xlnet", SEQUENCE), ("funnel", SEQUENCE), ("bart", SEQUENCE), ("fnet", CHOICE), ("t5", TOKEN)],
        ("xlnet", SEQUENCE),
    ),
)
def test_backbones_that_take_no_packed_rows_run_by_length(name, kind):
    """Stock padding is wrong in some of them."""
    settings = {"t5": {"decoder_start_token_id": 0}, "xlnet": {"n_layer": 1}}.get(name, {})
    stock = tiny_model(name, kind, torch.float64, **settings)
    rows = [[*tokens[:-1], 2] for tokens in documents(lengths=(7, 20, 12, 7))]  # BART reads the end token
    model = hfp.patch_model(copy.deepcopy(stock))
    expected = alone(stock, rows, kind)
    for one, other in zip(outputs_of(model, *padded(rows, "right"), kind), expected, strict=True):
        assert all(torch.allclose(left, right, atol=1e-12) for left, right in zip(one, other, strict=True))


def test_padding_that_a_head_reads_is_refused():
    """DistilBERT's classifier reads the first place of a row, also where it is padding."""
    stock = tiny_model("distilbert", SEQUENCE, torch.float64, n_layers=1)
    model = hfp.patch_model(copy.deepcopy(stock))
    batch, _ = padded(documents(), "left")
    rows = alone(stock, documents(), SEQUENCE)
    assert not torch.allclose(stock(**batch).logits, torch.stack([each for (each,) in rows]), atol=1e-2)
    with pytest.raises(hfp.ModelNotSupportedError, match="padding before the tokens is not supported, since"):
        model(**batch)
    check_rows(stock, model, SEQUENCE, ("right",))


def with_embeddings(size, dtype, factor):
    """A model whose norms undo the size of its embeddings, so that gradients are large or small where outputs are not,
    and whose head multiplies the gradients of padded batches by a factor."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, pad_token_id=0, num_labels=3, **sizes)
    model = transformers.LlamaForSequenceClassification(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(size)

    def change(_, __, output):
        if len(output) > 1 and output.requires_grad:
            output.register_hook(lambda gradient: factor * gradient)

    model.score.register_forward_hook(change)
    return model.to(dtype)


def test_large_gradients_are_not_taken_for_wrong_ones():
    model = hfp.patch_model(with_embeddings(1e-3, torch.float32, 1 + 2e-5))
    assert not route_of(model).unpadding.refused
    assert not route_of(model).unpadding.by_length


def test_small_gradients_are_not_taken_for_right_ones():
    with pytest.raises(hfp.ModelNotSupportedError, match="a document's gradients differ by"):
        hfp.patch_model(with_embeddings(1e6, torch.float64, 2))


@pytest.mark.parametrize(("name", "kind"), [("bert", SEQUENCE), ("albert", SEQUENCE), ("llama", "causal")])
def test_rows_without_tokens_are_zeros(name, kind):
    model, rows = patched_tiny(name, kind), [documents()[0], [], documents()[1]]
    batch, places = padded(rows, "right")
    outputs = outputs_of(model, batch, places, kind)
    without = outputs_of(model, *padded([rows[0], rows[2]], "right"), kind)
    assert all(torch.allclose(one[0], other[0], atol=1e-5) for one, other in zip(outputs[::2], without, strict=True))
    found = model(**batch, output_hidden_states=True)
    assert found.logits.isfinite().all()
    assert not found.hidden_states[-1][1].any()


def mask_of(*rows):
    return {"attention_mask": torch.tensor(rows)}


PADDED = mask_of([1, 1, 1, 0], [1, 1, 1, 1])
RESTARTING = torch.tensor([[0, 1, 0, 1]] * 2)
EMBEDDED = {"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 64)}

LLAMA, BERT = ("llama", "causal"), ("bert", SEQUENCE)

REFUSED = [
    *((each, mask_of([1, 1, 1, 1], [1, 0, 0, 1]), "attention_mask") for each in (LLAMA, BERT)),
    *((each, mask_of([0] * 4, [0] * 4), "attention_mask") for each in (LLAMA, BERT)),
    *((each, mask_of([1, 1, 2, 1], [1] * 4), "attention_mask") for each in (LLAMA, BERT)),
    *((each, {"attention_mask": torch.ones(2, 4)}, "attention_mask") for each in (LLAMA, BERT)),
    *((each, {"attention_mask": torch.ones(2, 1, 4, 4).long()}, "attention_mask") for each in (LLAMA, BERT)),
    *((each, {"attention_mask": {"full_attention": None}}, "attention_mask") for each in (LLAMA, BERT)),
    *((each, PADDED | {"position_ids": RESTARTING}, "position_ids") for each in (LLAMA, BERT)),
    (BERT, mask_of([1] * 4, [1] * 4) | {"position_ids": RESTARTING}, "position_ids"),
    (LLAMA, PADDED | {"cu_seq_lens_q": torch.tensor([0, 2, 4])}, "cu_seq_lens_q"),
    (("bert", "masked"), PADDED | {"labels": torch.tensor([[9, 9, 9, -100], [9, 9, 9, 9]])}, "labels"),
    (("llama", SEQUENCE), PADDED | EMBEDDED, "inputs_embeds"),  # whose head looks for the pad token
]


@pytest.mark.parametrize(("model", "inputs", "argument"), REFUSED)
def test_what_does_not_fit_is_refused(model, inputs, argument):
    model = patched_tiny(*model).train(argument == "labels")
    with pytest.raises(hfp.PackingError, match=f"^{argument}: expected"):
        model(**{"input_ids": torch.full((2, 4), 9)} | inputs)


def test_packed_rows_for_a_classifier_of_rows_are_refused():
    model = patched_tiny("bert", SEQUENCE)
    batch = hfp.PackingCollator()([{"input_ids": tokens} for tokens in documents()])
    batch.pop("labels")
    with pytest.raises(hfp.PackingError, match="expected a padded batch with an attention_mask, got packed rows"):
        model(**batch)
    ids = torch.tensor([documents()[1], documents()[3]])
    stock = tiny_model("bert", SEQUENCE)
    assert torch.allclose(model(ids).logits, stock(ids).logits, atol=1e-5)  # without a mask, every row is a document


def test_positions_of_the_caller_are_kept():
    """GPT-2 has an embedding for each position."""
    stock, model = tiny_model("gpt2", "causal"), patched_tiny("gpt2", "causal")
    batch, _ = padded(documents(), "right")
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) + 7
    expected, found = (each(**batch, position_ids=positions, use_cache=False).logits for each in (stock, model))
    kept = batch["attention_mask"].bool()
    assert torch.allclose(found[kept], expected[kept], atol=1e-5)
    assert not torch.allclose(found[kept], model(**batch).logits[kept], atol=1e-2)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_losses_and_gradients_of_a_language_model(name):
    """The model's own loss, of labels in a padded batch; and the loss of routers, which sees no padding."""
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if name == "Mixtral" else {}
    stock = build(name, torch.float64, **routers)
    model = hfp.patch_model(copy.deepcopy(stock)).train()
    batch, _ = padded(documents(), "right")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    losses = []
    for each in (stock.train(), model):
        losses.append(each(**batch).loss)
        losses[-1].backward()
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=1e-7)
    for one, other in zip(stock.parameters(), model.parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(other.grad, one.grad, atol=1e-7)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_lora_and_checkpointing(use_reentrant):
    stock = tiny_model("llama", SEQUENCE, torch.float64, num_labels=1).train()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    torch.manual_seed(0)
    stock = peft.get_peft_model(stock, config)
    model = hfp.patch_model(copy.deepcopy(stock))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    check_rows(stock, model, SEQUENCE, close=1e-5)
    with model.disable_adapter(), stock.disable_adapter():
        check = [each(**padded(documents(), "right")[0]).logits for each in (stock, model)]
    assert torch.allclose(*check, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", fast_only(["bloom", "mamba"], "bloom"))
def test_checkpointing_of_a_backbone_that_runs_by_length(name):
    """The modules that run by segment in packed rows do not in the backward pass of rows that run by length."""
    model = patched_tiny(name, "causal", torch.float64)
    batch, places = padded(documents(), "right")
    model(**batch)  # proves padded batches
    assert route_of(model).by_segment
    install_unpadding(model, replace(route_of(model).unpadding, by_length=True))
    model.train()
    expected = gradients_of(model, outputs_of(model, batch, places, "causal"))
    for use_reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        found = gradients_of(model, outputs_of(model, batch, places, "causal"))
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[each], expected[each], rtol=1e-12, atol=1e-12) for each in expected)


FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "mistral", "mixtral", "gpt_neox", "mamba", "jamba", "qwen3_next")
WAYS = ({}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}, {"do_sample": True})


@pytest.mark.parametrize("name", fast_only(FAMILIES, "llama", "mamba"))
def test_generated_tokens_are_those_of_the_stock_model(name):
    stock, model = tiny_model(name, "causal"), patched_tiny(name, "causal")
    batch, _ = padded(documents(), "left", extra=0)
    for way in WAYS:
        found = []
        for each in (stock, model):
            torch.manual_seed(0)
            found.append(each.generate(**batch, max_new_tokens=6, min_new_tokens=6, **way))
        assert torch.equal(*found), way
    assert hfp.check_isolation(model).isolated
    stock.config.use_cache = model.config.use_cache = True
    one, other = (each(**batch, use_cache=True) for each in (stock, model))  # as a loop that generates text begins
    assert torch.equal(one.logits, other.logits)
    (name,) = set(CACHES) & set(one)
    more = torch.full((len(LENGTHS), 1), 9)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    next_one = stock(more, attention_mask=mask, **{name: one[name]}).logits
    assert torch.equal(next_one, model(more, attention_mask=mask, **{name: other[name]}).logits)
    assert not set(CACHES) & set(model.train()(**batch))


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")  # the names before 5.24
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba"])
def test_text_begins_in_a_cache_of_the_caller(family):
    stock, model = tiny_model(family, "causal"), patched_tiny(family, "causal")
    batch, _ = padded(documents(), "left", extra=0)
    names = {"cache_params" if family == "mamba" else "past_key_values"}
    for name in names | set(CACHES) & set(inspect.signature(stock.forward).parameters):
        begun, went_on = [], []
        for each in (stock, model):
            cache = transformers.DynamicCache(config=stock.config)
            begun.append(each(**batch, **{name: cache}).logits)
            went_on.append(each(batch["input_ids"][:, :1], use_cache=True, **{name: cache}).logits)
        assert torch.equal(*begun), name
        assert torch.equal(*went_on), name


def test_names_weights_and_methods_are_the_users(tmp_path):
    stock, model = tiny_model("bert", SEQUENCE), tiny_model("bert", SEQUENCE)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hfp.patch_model(model)
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in stock.named_modules()]
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    batch, _ = padded(documents(), "right")
    expected = model(**batch).logits
    assert torch.allclose(hfp.patch_model(loaded.eval())(**batch).logits, expected, atol=1e-6)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(**batch).logits, expected)
    with hfp.unpatch_model(model):
        assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(model(**batch).logits, expected)


def test_padded_batches_of_a_language_model_are_proven_once(monkeypatch):
    from hf_packing.attention import unpadding_proof
    from hf_packing.attention.patched_forward import Patch

    model, calls = patched("Llama"), []
    own = unpadding_proof.prove_unpadding
    monkeypatch.setattr(Patch, "prove_unpadding", staticmethod(lambda each: (calls.append(each), own(each))))
    batch, _ = padded(documents(), "left")
    for _ in range(2):
        model(**batch)
    assert calls == [model]


def test_memory_kept_for_the_backward_pass():
    """Padding is kept in one tensor, not in one for each layer."""
    from torch.autograd.graph import saved_tensors_hooks

    def kept(model):
        tensors = {}

        def note(tensor):
            tensors[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(**padded(documents(lengths=(120, 20, 30, 10)), "right")[0])
        weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
        assert output.logits.requires_grad
        return sum(size for place, size in tensors.items() if place not in weights)

    stock = tiny_model("llama", SEQUENCE, num_hidden_layers=6).train()
    assert kept(hfp.patch_model(copy.deepcopy(stock))) <= 0.5 * kept(stock)
