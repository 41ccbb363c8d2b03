"""What a patched forward adds to the operations of the stock model, and that it does not wait for the device."""

import copy
import pickle

import pytest
import torch
from accelerate.utils import send_to_device
from kernel_stand_ins import NEWEST, stand_in
from patched_models import patched
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_flash_attention_utils

import hf_packing as hfp
from hf_packing.attention import function

WAITS = ("equal", "nonzero", "item", "_local_scalar_dense", "is_nonzero", "unique", "masked_select")


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


def batch_of(seed, **shapes):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (6,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(5, 99, (length,), generator=generator).tolist()} for length in lengths]
    return hfp.PackingCollator(**shapes)(rows)


def operations_of(model, batches):
    """The operations of the last forward in training, and the number of those before the embedding."""
    *earlier, last = batches
    operations, before = Operations(), []
    for batch in earlier:
        model.train()(**batch)
    note = model.get_input_embeddings().register_forward_pre_hook(lambda *_: before.append(len(operations.names)))
    with operations:
        model.train()(**last)
    note.remove()
    return operations.names, before[0]


def use_kernel(monkeypatch):
    """A kernel of one operation, for models that are patched already, and for flash_attention_2 of transformers."""
    kernel = stand_in("flash-attn 2", NEWEST, lambda given: given["q"] * 2)
    monkeypatch.setattr(function, "choose", lambda *_, **__: kernel)
    imported = (None, kernel.function, None, None, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: imported)
    for name in ("_loaded_implementation", "_flash_varlen_fn", "_process_flash_kwargs_fn"):  # set at the first call
        monkeypatch.setattr(modeling_flash_attention_utils, name, None)


def stock_and_patched(layers):
    model = patched("Llama", torch.bfloat16, num_hidden_layers=layers)
    stock = copy.deepcopy(model)
    hfp.unpatch_model(stock)
    stock.config._attn_implementation_internal = "flash_attention_2"
    return stock, model


@pytest.mark.parametrize("shapes", [{}, {"tokens": 130, "max_segments": 9}])
def test_a_batch_of_the_collator(shapes, monkeypatch):
    batches = [batch_of(seed, **shapes) for seed in range(3)]
    models, counts = [stock_and_patched(layers) for layers in (1, 3)], []
    use_kernel(monkeypatch)
    for stock, model in models:
        operations, before = operations_of(model, batches)
        assert before <= 6
        assert not [name for name in operations if name in WAITS]
        counts.append((len(operations_of(stock, batches)[0]), len(operations)))
    of_layer = [(more - fewer) / 2 for fewer, more in zip(*counts, strict=True)]
    assert of_layer[1] <= of_layer[0] + 2


def test_the_first_batch_is_read_in_full():
    model = patched("Llama", torch.bfloat16)
    assert "nonzero" in operations_of(model, [batch_of(0)])[0]
    assert "nonzero" not in operations_of(model, [batch_of(1)])[0]
    other = {name: value for name, value in batch_of(2).items() if not name.startswith("max_length")}
    assert "nonzero" in operations_of(model, [other])[0], "lengths that do not come with the batch are read"


def test_lengths_that_are_not_those_of_the_batch_are_not_trusted():
    """As of a collator that cuts documents of our batches further."""
    model, batch = patched("Llama").eval(), hfp.PackingCollator()([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9]}])
    cut = {**batch, "position_ids": torch.tensor([[0, 1, 0, 1, 0]])}
    del cut["cu_seq_lens_q"], cut["cu_seq_lens_k"], cut["seq_idx"], cut["labels"]
    expected = model(torch.tensor([[7, 8]])).logits
    for _ in range(3):
        assert torch.allclose(model(**cut).logits[:, 2:4], expected, atol=1e-5)


def test_no_forward_goes_through_all_modules(monkeypatch):
    model = patched("Llama").train()
    model(**batch_of(0))
    monkeypatch.setattr(torch.nn.Module, "named_modules", None)
    model(**batch_of(1))


def test_lengths_travel_as_an_int():
    batch = batch_of(0)
    longest, lengths = batch["max_length_q"], tuple(batch["cu_seq_lens_q"].diff().tolist())
    assert longest == max(lengths)
    assert repr(longest) == str(max(lengths))
    copies = [pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), send_to_device(batch, "cpu")]
    for each in copies:
        assert each["max_length_q"].segments.lengths == [*lengths]
    (from_worker,) = torch.utils.data.DataLoader(
        [{"input_ids": [5, 6]}, {"input_ids": [7]}], batch_size=2, collate_fn=hfp.PackingCollator(), num_workers=1
    )
    assert from_worker["max_length_q"].segments.lengths == [2, 1]


def test_torch_compile_compiles_a_model_once_for_all_lengths():
    """Of an unpatched model, which gets the int as it is."""
    graphs = []

    def model(input_ids, max_length_q, max_length_k):
        return input_ids.new_zeros(max_length_q + max_length_k)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in range(5):
        batch = batch_of(seed)
        given = {name: batch[name] for name in ("max_length_q", "max_length_k")}
        assert len(compiled(torch.zeros(3), **given)) == 2 * batch["max_length_q"]
    assert len(graphs) == 1
    torch._dynamo.reset()
