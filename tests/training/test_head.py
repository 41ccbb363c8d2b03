"""Losses of logits that are computed in chunks are those of whole logits, and so are their gradients.

Whoever else reads the logits gets the values of the whole row, with a place in the graph. So it is inside of DDP and
FSDP, on two processes with different documents.
"""

import copy
import gc
import json
import logging
import pickle
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from chunks import WHOLE, chunks_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patched_models import patched, patched_tiny
from processes import on_ranks
from tiers import fast_only, rarely
from tiny_models import build, exact
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import attached, logged
from training_by_hand import gradients_of, largest_difference
from trl import SFTTrainer
from trl.trainer import utils

import hf_packing as hfp
from hf_packing.attention import takes_argument
from hf_packing.training import head as module
from hf_packing.training.head import Logits, observed_logits
from hf_packing.training.model_loss import own_loss_of, predicts_next
from tools.tiny_model import architectures, tiny_model

DOCUMENTS = [[11, 5, 9, 30, 31, 12, 13], [7, 8, 21], list(range(40, 60))]
LABELS = [[*DOCUMENTS[0]], [-100, 17, 22], [-100] * 9 + list(range(50, 61))]
LABELED = 19


def batch_for(model, labels=LABELS, documents=DOCUMENTS):
    rows = [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(documents, labels, strict=True)]
    return hfp.PackingCollator(keep_first_labels=not predicts_next(model))(rows)


def result_of(model, batch, loss="token"):
    model.zero_grad()
    found = hfp.compute_loss(model, batch, loss=loss)
    found.backward()
    return found.item(), gradients_of(model)


def check_equal(model, batch=None, close=1e-12, tokens=5, called=None):
    """Compare the results in chunks and from whole logits, for both losses, also of wrappers; return the gradients."""
    batch = batch_for(model) if batch is None else batch
    called = model if called is None else called
    for loss in ("sequence", "token"):
        with chunks_of(WHOLE, model) as chunks:
            expected, gradients = result_of(called, batch, loss)
        assert not chunks
        with chunks_of(tokens, model) as chunks:
            value, found = result_of(called, batch, loss)
        assert [size for _, size in chunks if size == tokens]
        check_same(value, found, expected, gradients, close)
        assert any(each.any() for each in gradients.values()) or (batch["labels"] == -100).all()
    return found


def check_same(value, found, expected, gradients, close=1e-12):
    assert value == pytest.approx(expected, rel=close, abs=0)
    assert found.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert all(float((found[name] - gradients[name]).abs().max()) <= close * largest for name in found)


def check_whole(model, reason, caplog, called=None):
    """The loss and gradients are right, whole logits are computed, and the log says why, once."""
    batch = batch_for(model)
    with chunks_of(WHOLE, model):
        expected, gradients = result_of(model, batch)
    module._warn_once.cache_clear()
    with chunks_of(5, model) as chunks, caplog.at_level(logging.INFO, logger=module.__name__):
        for _ in range(2):
            value, found = result_of(model if called is None else called, batch)
    assert [entry.getMessage() for entry in caplog.records if entry.name == module.__name__] == [
        f"{type(model).__name__}: the loss needs the logits of whole rows, since {reason}"
    ]
    check_same(value, found, expected, gradients, 1e-5)
    assert not chunks


@settings(max_examples=8)
@given(
    st.lists(st.lists(st.sampled_from([-100, 5, 60]), min_size=1, max_size=8), min_size=2, max_size=4),
    st.integers(1, 9),
)
@example(labels=[[-100] * 3, [-100] * 8], tokens=5)  # nothing to train on
def test_any_labels_and_any_size_of_chunks(labels, tokens):
    labels = [*labels, [-100] * 10]  # a row that does not fit into one chunk
    documents = [[3 + place for place in range(len(row))] for row in labels]
    model = patched("Llama", torch.float64)
    check_equal(model, batch_for(model, labels, documents), tokens=tokens)


CHANGED = {
    "Gemma2": {"final_logit_softcapping": 3.0},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 4.0},
    "Phi": {"num_key_value_heads": 4},
    "GPT2": {},
    "Llama": {"tie_word_embeddings": True},
}
"""Models that change their logits, or whose head is tied."""
HEADS = {
    "causal": ("bamba", "falcon_h1", "minicpm3", "mpt", "opt", "bart", "xlm"),
    "masked": ("bert", "modernbert", "distilbert", "deberta-v2", "xlm"),
}


def checkpointing():
    model = patched("Llama", torch.float64).train()
    model.gradient_checkpointing_enable()
    return model


CHUNKED = {
    **{name: partial(patched, name, torch.float64, **changes) for name, changes in CHANGED.items()},
    **{f"{kind} {name}": partial(patched_tiny, name, kind, torch.float64) for kind in HEADS for name in HEADS[kind]},
    "experts": partial(patched_tiny, "qwen3_moe"),  # they have no float64
    "float32": patched,
    "checkpointing": checkpointing,
}
CLOSE = {"experts": 1e-5, "float32": 2e-6}


@pytest.mark.parametrize("name", fast_only(CHUNKED, "Gemma2", "Llama", "masked bert", "float32", "checkpointing"))
def test_models_and_heads(name):
    """Some losses convert logits to float32."""
    check_equal(CHUNKED[name](), close=CLOSE.get(name, 1e-6 if " " in name else 1e-12))


@pytest.mark.parametrize("where", ["autocast", "weights"])
def test_half_precision_with_scaled_gradients(where):
    model = patched() if where == "autocast" else patched().half()
    with torch.autocast("cpu", torch.float16, enabled=where == "autocast"), chunks_of(5, model) as chunks:
        result_of(model, batch_for(model))
    assert not chunks


def loss_of(model, inputs, labels):
    items = {"num_items_in_batch": 23.0} if takes_argument(model, "num_items_in_batch") else {}
    with observed_logits(model, labels.shape):
        return model(**inputs, labels=labels, **items).loss


@pytest.mark.survey
@pytest.mark.parametrize(("kind", "fewest"), [("causal", 150), ("masked", 35)])
def test_every_architecture(kind, fewest):
    """Without a patch, which takes longer and has no effect on the head."""
    whole, differences = set(), []
    for architecture in architectures(kind):
        try:
            model = exact(tiny_model(architecture, kind, torch.float64, experts_implementation="eager"))
            ids = torch.arange(3, 26)[None]
            inputs = {"input_ids": ids} | ({"use_cache": False} if takes_argument(model, "use_cache") else {})
            with chunks_of(WHOLE, model):
                expected = loss_of(model, inputs, ids)
            expected.backward()
        except Exception:  # it cannot be built, or has no float64
            continue
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        with chunks_of(5, model) as chunks:
            loss = loss_of(model, inputs, ids)
        if not chunks:
            whole.add(architecture)
        loss.backward()
        differences.append(abs(float(loss.detach() / expected.detach()) - 1))
        known = [each.abs().max() for each in gradients if each is not None and each.isfinite().all()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None), architecture
            if gradient is not None and gradient.isfinite().all():  # Longformer's are not
                # some gradients, such as those of biases of keys, are 0 but for rounding
                assert float((parameter.grad - gradient).abs().max()) <= 1e-6 * float(max(known)), architecture
    assert len(differences) >= fewest
    assert max(differences) <= 1e-6  # the logits of a few are in float32
    assert whole <= {"prophetnet"}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # PEFT 0.18, of any such model
@pytest.mark.parametrize("how", ["lora", "dora", "saved"])
def test_adapters_on_the_output_layer(how):
    base = patched("Llama", torch.float64)
    modules = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]} if how == "saved" else {}
    config = {"target_modules": ["lm_head", "q_proj"], **modules, "use_dora": how == "dora"}
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **config))
    model.to(torch.float64)
    found = check_equal(base, called=model)
    trained = [name for name in found if "lm_head" in name]
    assert trained
    assert not [name for name in trained if "base_layer" in name or "original" in name]
    assert all(float(found[name].abs().max()) > 0 for name in trained)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # as above
@pytest.mark.parametrize("reference_first", [True, False])
def test_a_reference_pass_with_the_adapters_off(reference_first):
    """Its logits are read when the adapters are on again, and those of the student after it."""
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["lm_head", "q_proj"])
    torch.manual_seed(0)
    model = peft.get_peft_model(patched("Llama", torch.float64), config).to(torch.float64).train()
    batch = batch_for(model)
    inputs = {name: each for name, each in batch.items() if name != "labels"}

    def reference():
        with torch.no_grad(), model.disable_adapter():
            return model(**inputs).logits

    def loss():
        other = reference() if reference_first else None
        student = model(**inputs).logits
        other = reference() if other is None else other
        return F.kl_div(student.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="batchmean")

    found = []
    for observed in (True, False):
        model.zero_grad()
        with observed_logits(model, batch["input_ids"].shape) if observed else nullcontext() as head:
            if observed:
                head.is_read_later = True  # as by the compute_loss of a trainer
            value = loss()
        value.backward()
        found.append((value.item(), gradients_of(model)))
    assert found[1][0] > 0
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    assert largest_difference(found[0][1], found[1][1]) < 1e-9


def test_a_frozen_model_below_a_trained_head_and_above_a_frozen_one():
    model = patched("Llama", torch.float64)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert list(check_equal(model)) == ["lm_head.weight"]
    model.lm_head.requires_grad_(False)
    model.model.requires_grad_(True)
    assert "lm_head.weight" not in check_equal(model)


@pytest.mark.parametrize("where", ["around the loss", "in the model"])
def test_autocast(where):
    """In bfloat16, gradients differ from those in float32 no more than those of whole logits do, and a little."""
    model, dtypes = patched(), set()
    batch = batch_for(model)
    right = result_of(model, batch)[1]
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: [logits := head(hidden), dtypes.add(logits.dtype)][0]
    around, found = torch.autocast("cpu", torch.bfloat16), []
    if where == "in the model":  # as accelerate does
        model.forward, around = around(model.forward), nullcontext()
    for tokens in (WHOLE, 5):
        with around, chunks_of(tokens, model) as chunks:
            found.append(result_of(model, batch))
    assert chunks
    assert dtypes == {torch.bfloat16}
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-2)
    for name, gradient in right.items():
        whole, in_chunks = (float((each[1][name] - gradient).norm()) for each in found)
        assert in_chunks <= 1.5 * whole + 1e-3 * float(gradient.norm()), name


class LargestTensor(TorchDispatchMode):
    """Notes the bytes in the memory of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        found = result if isinstance(result, (tuple, list)) else [result]
        sizes = [
            each.untyped_storage().nbytes() for each in found if isinstance(each, torch.Tensor) and not each.is_meta
        ]
        self.bytes = max([self.bytes, *sizes])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_whole_row_are_never_in_memory(dtype):
    model = patched("Llama", dtype, vocab_size=4_000, num_hidden_layers=1)
    batch = batch_for(model, [list(range(128))] * 4, [list(range(128))] * 4)
    weight = model.lm_head.weight.numel() * 4  # its gradient is summed in float32
    for tokens, expected in ((WHOLE, 4 * 128 * 4_000 * 4), (4, weight)):
        with chunks_of(tokens, model), LargestTensor() as largest:
            result_of(model, batch)
        assert largest.bytes == expected


def test_a_backward_pass_may_run_again():
    model = patched("Llama", torch.float64)
    with chunks_of(5, model):
        loss = hfp.compute_loss(model, batch_for(model), num_items_in_batch=LABELED)
        loss.backward(retain_graph=True)
        once = gradients_of(model)
        loss.backward()
    assert largest_difference(gradients_of(model), {name: 2 * each for name, each in once.items()}) <= 1e-12


def test_the_model_is_left_as_it_was():
    model = patched().train()
    before = [dict(vars(each)) for each in model.modules()]
    hooks = [(dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in model.modules()]
    with chunks_of(5, model) as chunks:
        result_of(model, batch_for(model))
    assert chunks[-1] == (LABELED, 5), "of 30 tokens; those without labels have no logits"
    assert [(dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in model.modules()] == hooks
    assert [vars(each).keys() for each in model.modules()] == [each.keys() for each in before]
    assert all(each.training for each in model.modules())


def changed(change):
    """A patched model whose forward does something with its logits before it computes the loss."""
    model = build("Llama", torch.float64, num_hidden_layers=1)

    class Changed(type(model)):
        def forward(self, labels=None, num_items_in_batch=None, **inputs):
            outputs = super().forward(**inputs)
            outputs.logits = change(outputs.logits)
            if labels is not None:
                outputs.loss = self.loss_function(
                    outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch=num_items_in_batch
                )
            return outputs

    model.__class__ = Changed
    return hfp.patch_model(model)


def one_after_the_other(logits):
    return 2 * (-logits.float().double() / 3.0).tanh().contiguous()


def without_some(logits):
    logits[..., :7] = -1e4
    return logits


def in_place(logits):
    logits.div_(2)
    logits *= 3
    return logits


def written_out(logits):
    torch.mul(logits.detach(), 3, out=logits.data)
    return logits


def with_a_trained_scale():
    scale = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    model = changed(lambda logits: logits * scale)
    model.scale = scale
    return model


def with_a_head_that_is_called_twice():
    heads = []
    model = changed(lambda logits: logits + sum(head(logits[..., :64].detach()) for head in heads))
    heads.append(model.lm_head)
    return model


def cut(logits):
    return logits[..., :-2]


@pytest.mark.parametrize("change", [one_after_the_other, cut])
def test_functions_of_single_logits_are_kept_for_later(change):
    model = changed(change)
    before = result_of(patched("Llama", torch.float64, num_hidden_layers=1), batch_for(model))[0]
    assert abs(result_of(model, batch_for(model))[0] - before) > 1e-3
    check_equal(model, close=1e-6 if change is one_after_the_other else 1e-12)


@pytest.mark.parametrize(
    "make", [*(partial(changed, change) for change in (without_some, in_place, written_out)), with_a_trained_scale]
)
def test_all_other_functions_get_the_values(make):
    model = make()
    batch = batch_for(model)
    for loss in ("token", "sequence"):
        with chunks_of(WHOLE, model):
            expected = result_of(model, batch, loss)
        with chunks_of(5, model):
            check_same(*result_of(model, batch, loss), *expected)


def test_a_sum_of_two_heads():
    """The loss is that of whole logits, but cannot be weighted."""
    model = with_a_head_that_is_called_twice()
    batch = batch_for(model)
    with chunks_of(WHOLE, model):
        expected = result_of(model, batch)
    with chunks_of(5, model):
        check_same(*result_of(model, batch), *expected)
        with pytest.raises(hfp.PackingError, match="computes 0"):
            hfp.compute_loss(model, batch, loss="sequence")


class DTensor(torch.nn.Parameter):
    """Stands for a weight that is distributed by tensor parallelism."""


def model_with(**attributes):
    model = patched()
    for name, value in attributes.items():
        setattr(model.lm_head if name == "weight" else model.lm_head.weight, name, value)
    return model


def with_output_embeddings(find):
    model = patched()
    model.get_output_embeddings = lambda: find(model)
    return model


def with_a_hook_on_a_weight():
    """It would see the gradient of each chunk, and then of the sum."""
    model = patched()
    model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(max=0.01))
    return model


WHOLE_LOGITS = {
    "the input of the output layer is not a tensor [1, tokens, width]": lambda: with_output_embeddings(
        lambda model: model.model.embed_tokens
    ),
    "the model's get_output_embeddings returns no output layer": lambda: with_output_embeddings(lambda _: None),
    "a weight of the output layer has a hook": with_a_hook_on_a_weight,
    "DeepSpeed ZeRO-3 shards the output layer": lambda: model_with(ds_id=0),
    "the output layer is distributed by tensor parallelism": lambda: model_with(
        weight=DTensor(patched().lm_head.weight.detach())
    ),
}


@pytest.mark.parametrize("reason", WHOLE_LOGITS)
def test_whole_logits_are_computed_where_chunks_would_be_wrong(reason, caplog):
    check_whole(WHOLE_LOGITS[reason](), reason, caplog)


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


COMPILED = {
    "layers": compile_layers,
    "model": lambda model: torch.compile(model, backend="eager"),
    "in place": lambda model: model.compile(backend="eager"),
    "forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    "head": lambda model: model.lm_head.compile(backend="eager"),
}


RARE = ["in place", "forward"]


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, while they are traced
@pytest.mark.parametrize("how", [*fast_only((each for each in COMPILED if each not in RARE), "head"), *rarely(RARE)])
def test_compiled_models(how, caplog):
    torch._dynamo.reset()
    model = patched(num_hidden_layers=1)
    compiled = COMPILED[how](model)
    if how == "layers":
        check_equal(model, close=2e-6)
    else:
        check_whole(model, "the output layer is compiled", caplog, compiled)
    torch._dynamo.reset()


def without_loss():
    model = patched()
    model.loss_function = lambda *_, **__: {}["no loss"]
    with pytest.raises(hfp.PackingError, match="expected a causal or a masked language model") as found:
        predicts_next(model)
    assert "got LlamaForCausalLM ('no loss'); " in str(found.value)
    return weakref.ref(model)


def test_why_the_loss_of_a_model_is_not_known_is_said_and_not_kept():
    model = without_loss()
    gc.collect()
    assert model() is None


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_on_the_output_layer(caplog):
    """Those of the forward see all tokens, and change the logits of all of them."""
    model = patched("Llama", torch.float64)
    seen = []
    own_loss_of(model)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.lm_head.register_forward_hook(lambda _, args, output: seen.append((args[0].shape[1], output.shape[1])))
    model.lm_head.register_forward_hook(lambda _, __, output: output * 2)
    check_equal(model)
    assert set(seen) == {(30, 30)}
    model.lm_head.register_full_backward_hook(lambda *_: None)
    check_whole(model, "the output layer, or a module around it, has a backward hook", caplog)


@pytest.mark.skipif(not hasattr(utils, "add_fused_lm_head"), reason="an older TRL has no fused head")
def test_the_fused_head_of_trl_is_left_alone(tmp_path):
    trainer = attached(tmp_path, kind=SFTTrainer)
    with chunks_of(5, trainer.model) as chunks:
        assert len(logged(trainer)) == 2
        trainer.evaluate(trainer.train_dataset)
    assert not chunks


def run_later(model, batch, tokens=5):
    with chunks_of(tokens, model), observed_logits(model, batch["input_ids"].shape):
        outputs = model(**batch)
    assert tokens == WHOLE or (isinstance(outputs.logits, Logits) and outputs.logits.known is None)
    return outputs


def view_and_change(logits):
    view = logits.view(1, 30, 128)
    logits.mul_(0.5)
    return view


def change_view(logits):
    logits.view(-1, 128)[3:].mul_(0.5)
    return logits


def copy_and_change(logits):
    taken = logits[:, torch.arange(30)]
    logits.mul_(0.5)
    return taken


CHANGES = (view_and_change, change_view, copy_and_change)
READERS = {
    "entropy": lambda logits, _: (logits.softmax(-1) * F.log_softmax(logits, -1)).sum(),
    "smoothing": lambda logits, labels: F.cross_entropy(logits[0], labels[0], label_smoothing=0.3),
    "single losses": lambda logits, labels: (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").square().sum()
    ),
    "classes before tokens": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "tokens by mask": lambda logits, labels: F.cross_entropy(logits[labels != -100], labels[labels != -100]),
    "last token": lambda logits, _: logits[:, -1].square().sum(),
    **{
        each.__name__: lambda logits, labels, change=each: F.cross_entropy(change(logits)[0], labels[0])
        for each in CHANGES
    },
    "two": lambda logits, labels: F.cross_entropy(logits[0], labels[0]) * torch.logsumexp(input=logits, dim=-1).mean(),
}


@pytest.mark.parametrize("name", READERS)
def test_anybody_else_who_reads_logits(name):
    model = patched("Llama", torch.float64)
    batch = batch_for(model)
    labels = torch.cat([batch["labels"][:, 1:], torch.tensor([[-100]])], 1)
    found = []
    for run in (lambda each: model(**each), partial(run_later, model, tokens=WHOLE), partial(run_later, model)):
        model.zero_grad()
        outputs = run(batch)
        loss = READERS[name](outputs.logits, labels) + 0.5 * outputs.loss
        loss.backward()
        found.append((loss.item(), gradients_of(model)))
        check_same(*found[-1], *found[0])


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(_, logits):
        return logits.clone()

    @staticmethod
    def backward(_, gradient):
        return -gradient


class Doubled(Copied):
    @staticmethod
    def forward(_, logits):
        return logits * 2


@pytest.mark.parametrize("function", [Copied, Doubled])
def test_a_custom_function_of_logits(function):
    """Its backward pass would not run, or get no gradient; it takes the values of whole rows."""
    model = patched("Llama", torch.float64)
    batch = batch_for(model)
    with pytest.raises(hfp.PackingError, match="no custom autograd function"):
        F.cross_entropy(function.apply(run_later(model, batch).logits)[0], batch["labels"][0]).backward()
    function.apply(torch.cat([run_later(model, batch).logits])).sum().backward()


def test_logits_that_are_read_without_a_graph_keep_theirs():
    model = patched("Llama", torch.float64)
    batch = batch_for(model)
    outputs = run_later(model, batch)
    with torch.no_grad():
        accuracy = (outputs.logits.argmax(-1) == batch["labels"]).double().mean()
    assert not accuracy.requires_grad
    outputs.logits.square().sum().backward()
    found = gradients_of(model)
    model.zero_grad()
    loss = run_later(model, batch, WHOLE).logits.square().sum()
    loss.backward()
    check_same(loss.item(), found, loss.item(), gradients_of(model))


def test_logits_are_printed_pickled_and_copied_as_tensors():
    model = patched("Llama", torch.float64)
    batch = batch_for(model)
    again = [
        lambda logits: pickle.loads(pickle.dumps({"logits": logits}))["logits"],  # made here
        copy.deepcopy,
        lambda logits: torch.from_numpy(logits.numpy()),
    ]
    with torch.no_grad():
        expected = run_later(model, batch, WHOLE).logits
        assert repr(run_later(model, batch).logits) == repr(expected)
        assert f"{run_later(model, batch).logits[0, 0, 0]:.3f}" == f"{expected[0, 0, 0]:.3f}"
        for make in again:
            found = make(run_later(model, batch).logits)
            assert torch.equal(found.values() if isinstance(found, Logits) else found, expected)
    outputs = run_later(model, batch)
    with pytest.raises(RuntimeError, match="explicitly by the user"):  # as for all tensors with a graph
        copy.deepcopy(outputs.logits)


def test_hooks_on_logits_before_their_loss():
    """They get the gradient, and may change it."""
    model = patched("Llama", torch.float64)
    batch, seen = batch_for(model), []

    def halve(gradient):
        seen.append(gradient)
        return gradient / 2

    def gradients(tokens):
        model.zero_grad()
        logits = run_later(model, {**batch, "labels": None}, tokens).logits
        logits.register_hook(halve)
        F.cross_entropy(logits[0], batch["labels"][0]).backward()
        return [each.grad for each in model.parameters()]

    for whole, found in zip(gradients(WHOLE), gradients(5), strict=True):
        assert torch.allclose(whole, found, atol=1e-12)
    assert len(seen) == 2
    assert torch.allclose(*seen, atol=1e-12)
    assert seen[0].any()


def test_hooks_on_logits_after_their_loss():
    """There is no gradient then."""
    model = patched("Llama", torch.float64)
    batch = batch_for(model)
    with pytest.raises(hfp.PackingError, match="expected no hook"):
        run_later(model, batch).logits.retain_grad()
    with pytest.raises(hfp.PackingError, match=r"gradient of logits .* got register_hook; give it torch\.cat"):
        run_later(model, batch).logits.register_hook(lambda gradient: gradient * 2)
    logits = torch.cat([run_later(model, batch).logits])
    logits.retain_grad()
    F.cross_entropy(logits[0], batch["labels"][0]).backward()
    assert logits.grad.any()


@pytest.mark.parametrize("library", ["deepspeed.runtime.utils", "lightning.fabric.wrappers"])
def test_hooks_of_libraries_on_all_outputs(library):
    """They wait for the first gradient of an output, that of the loss."""
    model, called = patched("Llama", torch.float64), []

    def hook(gradient):
        called.append(gradient.shape)
        return gradient

    hook.__module__ = library
    batch = batch_for(model)
    expected = result_of(model, batch)
    model.zero_grad()
    outputs = run_later(model, batch)
    for output in (outputs.logits, outputs.loss):
        output.register_hook(hook)
    outputs.loss.backward()
    assert called[0] == outputs.loss.shape
    check_same(outputs.loss.item(), gradients_of(model), *expected)


def weighted_by_hand(logits, labels):
    losses = F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")
    return (losses * (labels[0, 1:] != -100)).sum()


def smoothed_by_torch(logits, labels):
    return F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum", label_smoothing=0.1)


@pytest.mark.parametrize("tokens", [5, WHOLE])
@pytest.mark.parametrize("function", [weighted_by_hand, smoothed_by_torch])
def test_a_cross_entropy_that_cannot_be_weighted(function, tokens):
    model = patched("Llama", torch.float64)
    model.loss_function = lambda logits, labels, *_, num_items_in_batch=1, **__: (
        function(logits, labels) / num_items_in_batch
    )
    batch = batch_for(model)
    own_loss_of(model)
    with chunks_of(tokens, model), pytest.raises(hfp.PackingError, match="expected a cross-entropy"):
        hfp.compute_loss(model, batch, loss="sequence")
    assert hfp.compute_loss(model, batch, loss="token") > 0


def on_cuda(test):
    """Skipped where there is no device; in float32, attention runs segment by segment there."""
    without = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(without(pytest.mark.filterwarnings("ignore:attention runs segment by segment")(test)))


def batch_on_cuda(documents):
    batch = hfp.PackingCollator()([{"input_ids": ids} for ids in documents])
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@on_cuda
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_gradients_on_a_device_are_those_of_whole_logits(monkeypatch, how):
    """In bfloat16, they differ from those in float32 no more than those of whole logits do, and a little."""
    monkeypatch.setattr(module, "_warn_once", pytest.fail)  # no whole logits
    batch = batch_on_cuda([list(range(3, 60)), list(range(40, 90)), [5, 6, 7]])
    found = {}
    for case, tokens, rounded in (("exact", 1000, False), ("whole", 1000, True), ("chunks", 7, True)):
        model = patched().cuda()
        if rounded and how == "bfloat16":
            model.bfloat16()
        monkeypatch.setattr(module, "CHUNK_LOGITS", tokens * model.config.vocab_size)
        with torch.autocast("cuda", torch.bfloat16, enabled=rounded and how == "autocast"):
            loss = hfp.compute_loss(model, batch)
        loss.backward()
        found[case] = [parameter.grad.float() for parameter in model.parameters()]
    for right, whole, in_chunks in zip(*found.values(), strict=True):
        allowed = 2 * (whole - right).norm() + 1e-2 * right.norm()
        assert (in_chunks - right).norm() <= allowed


@on_cuda
def test_logits_of_a_whole_row_are_never_in_memory_of_a_device(monkeypatch):
    model = hfp.patch_model(build("Llama", torch.bfloat16, vocab_size=100_000).cuda())
    batch, peaks = batch_on_cuda([list(range(3, 203))] * 40), []
    for tokens in (10_000, 200):
        monkeypatch.setattr(module, "CHUNK_LOGITS", tokens * 100_000)
        for _ in range(2):  # the first call asks the model for its loss on a short document
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            hfp.compute_loss(model, batch).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 0.25 * peaks[0]


OF_RANKS = ([[11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34]], [[41, 42, 43]])
"""The documents of the second process fit into one chunk."""
STEPS = 2
"""More than one, since wrappers keep state from step to step."""


def sharded(model, *groups, **options):
    """FSDP2 on every layer, on groups of modules, and on the rest."""
    policy = {"mp_policy": options.pop("mp_policy")} if "mp_policy" in options else {}
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    for group in groups:
        fully_shard(group, **options, **policy)
    return fully_shard(model, **policy)


def first_version(model, *kinds):
    policy = ModuleWrapPolicy(set(kinds)) if kinds else None
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=True, auto_wrap_policy=policy, device_id=cpu)


def as_accelerate(model):
    fully_shard(model.model.embed_tokens)
    return sharded(model, [model.model.norm, model.lm_head], reshard_after_forward=False)


IN_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
CASES = {
    "DDP": lambda model: DistributedDataParallel(model),
    "DDP that looks for unused weights": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "DDP with a static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "FSDP2, head in the root": sharded,
    "FSDP2, head alone": lambda model: sharded(model, model.lm_head),
    "FSDP2, head alone and kept": lambda model: sharded(model, model.lm_head, reshard_after_forward=False),
    "FSDP2, norm and head": lambda model: sharded(model, [model.model.norm, model.lm_head]),
    "FSDP2 as accelerate does": as_accelerate,
    "FSDP2, tied": lambda model: sharded(
        model, [model.model.norm, model.model.embed_tokens, model.lm_head], reshard_after_forward=False
    ),
    "FSDP2 in bfloat16": lambda model: sharded(model, [model.model.norm, model.lm_head], mp_policy=IN_BFLOAT16),
    "FSDP1, head in the root": lambda model: first_version(model, type(model.model.layers[0])),
    "FSDP1, head alone": lambda model: first_version(model, torch.nn.Linear),
}


def gradients_of_sharded(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {name: each.grad.clone() for name, each in model.named_parameters()}
    return {name: getattr(each.grad, "full_tensor", each.grad.clone)() for name, each in model.named_parameters()}


def result_of_sharded(case, batch, tokens):
    inner = hfp.patch_model(build("Llama", tie_word_embeddings=True)) if "tied" in case else patched()
    with chunks_of(tokens, inner) as chunks, patch.object(module, "_warn_once") as warn:
        model = CASES[case](inner.train())
        for _ in range(STEPS):
            model.zero_grad()
            loss = hfp.compute_loss(model, batch, num_items_in_batch=5)
            loss.backward()
    in_chunks = tokens == 3 and case != "FSDP1, head alone"
    assert [of_chunk for _, of_chunk in chunks[-1:]] == [3] * in_chunks
    return loss.item(), gradients_of_sharded(model), warn.call_args and warn.call_args.args[1]


def measure(case, batch):
    expected, gradients, _ = result_of_sharded(case, batch, WHOLE)
    loss, of_sharded, reason = result_of_sharded(case, batch, 3)
    return expected, loss, largest_difference(of_sharded, gradients), reason


def refusal(batch):
    model = DistributedDataParallel(patched())
    with torch.no_grad():
        hfp.compute_loss(model, batch)
    hfp.compute_loss(model, batch, num_items_in_batch=10 / dist.get_world_size()).backward()
    try:
        hfp.compute_loss(model, batch)
    except hfp.PackingError as error:
        return str(error)


def measure_on_rank(folder):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # with whole logits
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    state = PartialState(cpu=True)
    batch = hfp.PackingCollator()([{"input_ids": ids} for ids in OF_RANKS[state.process_index]])
    of_sharded = {case: measure(case, batch) for case in CASES}
    of_sharded["compute_loss"] = refusal(batch)
    if state.is_main_process:
        (folder / "of_sharded.json").write_text(json.dumps(of_sharded))


@pytest.fixture(scope="module")
def of_sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    on_ranks(measure_on_rank, folder, ranks=2)
    return json.loads((folder / "of_sharded.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_whole_logits(of_sharded, case):
    expected, loss, difference, reason = of_sharded[case]
    rounded = case == "FSDP2 in bfloat16"
    assert loss == pytest.approx(expected, rel=1e-3 if rounded else 1e-6)
    assert difference <= (2e-2 if rounded else 5e-6)
    alone = "the first version of FSDP shards the output layer on its own"
    assert reason == (alone if case == "FSDP1, head alone" else None)


@pytest.mark.slow
def test_a_batch_is_no_whole_step_on_two_ranks(of_sharded):
    message = "num_items_in_batch: expected the number of items of the whole optimizer step divided by the 2"
    assert of_sharded["compute_loss"].startswith(message)
