"""Models with any head on padded batches: every row has the outputs and gradients that it has alone."""

import copy
import inspect
import pickle

import pytest
import torch
import transformers
from forms import FORMS, alone, check, check_gradients, gradients_of
from leaky_models import with_embeddings
from model_inputs import LENGTHS, SEQUENCE, documents, padded
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import build

import hf_packing as hfp
from hf_packing.attention import borders_required
from hf_packing.attention.layout import CACHES, current_layout
from hf_packing.attention.route import route_of
from tools.tiny_model import tiny_model

HYBRID = ("gemma2", "jamba", "qwen3_next")


def few_layers(name):
    return {} if name in HYBRID else {"num_hidden_layers": 1}


def tiny(name, kind):
    return tiny_model(name, kind, **few_layers(name))


def patched_copy(name, kind):
    return patched_tiny(name, kind, padded=True, **few_layers(name))


def test_padding_that_a_head_reads_is_moved():
    """DistilBERT's classifier reads the first place of a row, also where it is padding."""
    stock = tiny_model("distilbert", SEQUENCE, torch.float64, n_layers=1)
    model, batch = hfp.patch_model(copy.deepcopy(stock)), FORMS["left"]()
    (wrong,) = stock(**batch.inputs).logits[:1]
    assert not torch.allclose(wrong, alone(stock, batch.documents[:1])[0][0], atol=1e-2)
    for side in ("left", "right", "both"):
        check(stock, model, FORMS[side]())
    assert route_of(model).facts.proven["padded batch"].to == "right"
    with pytest.raises(hfp.PackingError, match="start_positions: expected padding on the right beside numbers that"):
        model(**batch.inputs, start_positions=torch.zeros(len(batch.documents), dtype=torch.long))


def test_large_gradients_are_not_taken_for_wrong_ones():
    model = hfp.patch_model(with_embeddings(1e-3, torch.float32, 1 + 2e-5))
    assert route_of(model).facts.proven["padded batch"].to is None
    assert not route_of(model).facts.proven["padded batch"].by_length


@pytest.mark.parametrize(("name", "kind"), [("bert", SEQUENCE), ("llama", "causal")])
def test_rows_without_tokens_are_zeros(name, kind):
    model, batch = patched_copy(name, kind), padded([documents()[0], [], documents()[1]], "right")[0]
    without = model(**{key: value[::2] for key, value in batch.items()}).logits
    found = model(**batch, output_hidden_states=True)
    assert torch.allclose(found.logits[::2], without, atol=1e-5)
    assert found.logits.isfinite().all()
    assert not found.hidden_states[-1][1].any()


def test_positions_of_the_caller_are_kept():
    """GPT-2 has an embedding for each position."""
    stock, model = tiny("gpt2", "causal"), patched_copy("gpt2", "causal")
    batch, _ = padded(documents(), "right")
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) + 7
    expected, found = (each(**batch, position_ids=positions, use_cache=False).logits for each in (stock, model))
    kept = batch["attention_mask"].bool()
    assert torch.allclose(found[kept], expected[kept], atol=1e-5)
    assert not torch.allclose(found[kept], model(**batch).logits[kept], atol=1e-2)


def test_losses_and_gradients_of_a_language_model():
    """The model's own loss, of labels in a padded batch, and the loss of routers, which sees no padding."""
    stock = build("Mixtral", torch.float64, num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=0.5)
    model = hfp.patch_model(copy.deepcopy(stock), padded=True).train()
    batch, _ = padded(documents(), "right")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    losses = [each(**batch).loss for each in (stock.train(), model)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-7)
    check_gradients(gradients_of(model, [[losses[1]]]), gradients_of(stock, [[losses[0]]]), 1e-7)


FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "mistral", "mixtral", "gpt_neox", "mamba", "jamba", "qwen3_next")
WAYS = ({}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}, {"do_sample": True})


@pytest.mark.parametrize("name", fast_only(FAMILIES, "llama", "mamba"))
def test_generated_tokens_are_those_of_the_stock_model(name):
    stock, model = tiny(name, "causal"), patched_copy(name, "causal")
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


@pytest.mark.parametrize("beside", [(), ("attention_mask",), ("position_ids",), ("attention_mask", "position_ids")])
@pytest.mark.parametrize("name", fast_only(["llama", "mamba", "jamba", "bloom"], "llama"))
def test_a_loop_of_ones_own_generates_what_generate_does(name, beside):
    """It passes no use_cache, and on the cache that it got. A model whose configuration has none stays patched."""
    model = patched_copy(name, "causal")
    model.config.use_cache = True
    ids = torch.tensor([[5, 6, 7], [9, 8, 11]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4)
    taken = inspect.signature(tiny(name, "causal").forward).parameters
    text, cache, new = ids, {}, ids
    for _ in range(4):
        mask = torch.ones_like(text)
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -new.shape[1] :]}
        chosen = {each: value for each, value in given.items() if each in beside and (each in taken or not cache)}
        output = model(new, **chosen, **cache)
        (argument,) = set(CACHES) & set(output)
        new, cache = output.logits[:, -1:].argmax(-1), {argument: output[argument]}
        text = torch.cat([text, new], 1)
    assert torch.equal(text, expected)
    packed_row = hfp.PackingCollator()([{"input_ids": row} for row in ids.tolist()])
    assert not set(CACHES) & set(model(**packed_row))
    padded_rows, _ = padded(documents(), "left", extra=0)
    assert not set(CACHES) & set(model(**padded_rows))
    with borders_required():  # as in the step of a trainer
        assert not set(CACHES) & set(model(ids, attention_mask=torch.ones_like(ids)))
    layouts = []
    layer = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))[0]
    layer.register_forward_pre_hook(lambda *_: layouts.append(current_layout.get()))
    model.config.use_cache = False
    model(ids)
    assert [[*each.lengths] for each in layouts] == [[3, 3]]


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")  # the names before 5.24
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba"])
def test_text_begins_in_a_cache_of_the_caller(family):
    stock, model = tiny(family, "causal"), patched_copy(family, "causal")
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
    stock, model = tiny("bert", SEQUENCE), patched_copy("bert", SEQUENCE)
    before = {name: set(vars(module)) for name, module in stock.named_modules()}
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in stock.named_modules()]
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    batch, _ = padded(documents(), "right")
    expected = model(**batch).logits
    assert torch.allclose(loaded(**batch).logits, expected, atol=1e-6)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(**batch).logits, expected)
    with hfp.unpatch_model(model):
        assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(model(**batch).logits, expected)


def test_a_language_model_takes_padded_batches_once_they_are_proven():
    model, (batch, _) = patched("Llama"), padded(documents(), "left")
    with pytest.raises(hfp.PackingError, match=r"call patch_model\(model, padded=True\)"):
        model(**batch)
    hfp.patch_model(model, padded=True)
    proven = route_of(model).facts.proven["padded batch"]
    model(**batch)
    assert route_of(hfp.patch_model(model, padded=True)).facts.proven["padded batch"] is proven


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

    stock = tiny_model("llama", SEQUENCE, num_hidden_layers=4).train()
    assert kept(hfp.patch_model(copy.deepcopy(stock))) <= 0.5 * kept(stock)


@pytest.mark.parametrize("keep", [4, torch.arange(5, 9)], ids=["int", "tensor"])
def test_logits_of_some_tokens(keep):
    """Trainers ask models for a part of the logits, as that of distillation does; attention does not read it."""
    stock = build("Llama", torch.float64).eval()
    model = hfp.patch_model(copy.deepcopy(stock), padded=True)
    ids, mask = torch.randint(3, 90, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = mask[2, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = stock(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep).logits
        found = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits
        packed = hfp.PackingCollator()([{"input_ids": row.tolist()} for row in ids])
        alone = model(**{**packed, "labels": None, "logits_to_keep": torch.tensor([2, 11])}).logits
    assert found.shape == wanted.shape
    assert torch.allclose(found[mask[:, 5:] > 0], wanted[mask[:, 5:] > 0], rtol=1e-12)
    each = [stock(input_ids=ids[row : row + 1]).logits[0, 2] for row in (0, 1)]
    assert torch.allclose(alone[0], torch.stack(each), rtol=1e-10)
