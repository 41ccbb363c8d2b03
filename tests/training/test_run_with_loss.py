"""The loss in chunks of tokens is that of whole logits, and so are its gradients, or whole logits are computed."""

import logging

import peft
import pytest
import torch
from chunks import chunks_of
from hf_packing.training.run_with_loss import run_with_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import build
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import logged, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import architectures, takes_argument
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.training import run_with_loss as module
from hf_packing.training.losses import predicts_next, weights_of

DOCUMENTS = [[11, 5, 9, 30, 31, 12, 13], [7, 8, 21], list(range(40, 60))]
LABELS = [[*DOCUMENTS[0]], [-100, 17, 22], [-100] * 9 + list(range(50, 61))]


def batch_for(model, labels=LABELS, documents=DOCUMENTS):
    rows = [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(documents, labels, strict=True)]
    return hfp.PackingCollator(keep_first_labels=not predicts_next(model))(rows)


def result_of(model, batch, keep_logits=False):
    """Loss, gradients by parameter, and the model's outputs."""
    model.zero_grad()
    weights = weights_of(batch, "sequence") / 3
    loss, outputs = run_with_loss(model, batch, batch["labels"], weights, keep_logits=keep_logits)
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), gradients, outputs


def check_equal(model, batch=None, close=1e-12, tokens=5):
    """Compare the results in chunks and from whole logits; return the gradients."""
    batch = batch_for(model) if batch is None else batch
    expected, gradients, outputs = result_of(model, batch, keep_logits=True)
    assert outputs.logits.shape[1] == batch["labels"].shape[1]
    with chunks_of(tokens, model) as chunks:
        loss, found, outputs = result_of(model, batch)
    assert [size for _, size in chunks if size == tokens], module._REPORTED.get(model)
    assert outputs.get("logits") is None
    assert loss == pytest.approx(expected, rel=close, abs=0)
    assert found.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0 or (batch["labels"] == -100).all()
    assert all(float((found[name] - gradients[name]).abs().max()) <= close * largest for name in found)
    return found


def check_whole(model, reason, caplog, call=None):
    """The loss and gradients are right, whole logits are computed, and the log says why, once."""
    batch = batch_for(model)
    expected, gradients, _ = result_of(model, batch, keep_logits=True)
    with chunks_of(5, model) as chunks, caplog.at_level(logging.INFO, logger=module.__name__):
        for _ in range(2):
            loss, found, outputs = result_of(model if call is None else call, batch)
    assert [entry.getMessage() for entry in caplog.records if entry.name == module.__name__] == [
        f"{type(model).__name__}: the loss needs the logits of whole rows, since {reason}"
    ]
    assert outputs.logits.shape[1] == batch["labels"].shape[1]
    assert loss == pytest.approx(expected, rel=1e-5)
    found = {name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()}
    assert all(torch.allclose(found[name], gradients[name], atol=1e-5) for name in gradients)
    return chunks


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from([-100, 5, 60]), min_size=1, max_size=8), min_size=2, max_size=4),
    st.integers(1, 9),
)
def test_any_labels_and_any_size_of_chunks(labels, tokens):
    labels = [*labels, [-100] * 10]  # a row that does not fit into one chunk
    documents = [[3 + place for place in range(len(row))] for row in labels]
    model = patched("Llama", torch.float64)
    check_equal(model, batch_for(model, labels, documents), tokens=tokens)


MODELS = [
    ("Gemma2", {"final_logit_softcapping": 3.0}),
    ("Cohere", {"logit_scale": 0.3}),
    ("Granite", {"logits_scaling": 4.0}),
    ("Phi", {"num_key_value_heads": 4}),
    ("GPT2", {}),
    ("Llama", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize("name", fast_only([name for name, _ in MODELS], "Gemma2", "Llama"))
def test_models_that_change_their_logits(name):
    model = hfp.patch_model(build(name, torch.float64, **dict(MODELS)[name]))
    check_equal(model)


HEADS = [
    ("causal", "bamba"),
    ("causal", "falcon_h1"),
    ("causal", "minicpm3"),
    ("causal", "mpt"),
    ("causal", "opt"),
    ("causal", "qwen3_moe"),
    ("causal", "bart"),
    ("causal", "xlm"),
    ("masked", "bert"),
    ("masked", "modernbert"),
    ("masked", "distilbert"),
    ("masked", "deberta-v2"),
    ("masked", "xlm"),
]


@pytest.mark.parametrize(("kind", "architecture"), fast_only(HEADS, ("masked", "bert")))
def test_heads_of_many_architectures(kind, architecture):
    in_float64 = architecture != "qwen3_moe"  # its experts have no float64
    model = patched_tiny(architecture, kind, torch.float64 if in_float64 else torch.float32)
    check_equal(model, close=1e-12 if in_float64 else 1e-5)


@pytest.mark.survey
@pytest.mark.parametrize(("kind", "fewest"), [("causal", 150), ("masked", 35)])
def test_every_architecture(kind, fewest):
    """Without a patch, which takes longer and has no effect on the head."""
    whole, differences = set(), []
    for architecture in architectures(kind):
        try:
            model = tiny_model(architecture, kind, torch.float64, experts_implementation="eager")
            ids = torch.arange(3, 26)[None]
            inputs = {"input_ids": ids} | ({"use_cache": False} if takes_argument(model, "use_cache") else {})
            expected = run_with_loss(model, inputs, ids, torch.ones(1, 23), keep_logits=True)[0]
            expected.backward()
        except Exception:  # it cannot be built, or has no float64
            continue
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        with chunks_of(5, model):
            loss, outputs = run_with_loss(model, inputs, ids, torch.ones(1, 23))
        if outputs.get("logits") is not None:
            whole.add(architecture)
            continue
        loss.backward()
        differences.append(abs(float(loss.detach() / expected.detach()) - 1))
        known = [each.abs().max() for each in gradients if each is not None and each.isfinite().all()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None), architecture
            if gradient is not None and gradient.isfinite().all():  # Longformer's are not
                # some gradients, such as those of biases of keys, are 0 but for rounding
                assert float((parameter.grad - gradient).abs().max()) <= 1e-9 * float(max(known)), architecture
    assert len(differences) >= fewest
    assert max(differences) <= 1e-6  # the logits of a few are in float32
    assert whole <= {"prophetnet"}


def test_single_precision():
    check_equal(patched(), close=2e-6)


@pytest.mark.slow
def test_routers_of_experts():
    model = hfp.patch_model(build("Mixtral", torch.float64, output_router_logits=True, router_aux_loss_coef=0.5))
    check_equal(model)
    batch = batch_for(model)
    found = []
    for tokens in (5, 1000):
        with chunks_of(tokens, model):
            found.append(hfp.compute_loss(model, batch).detach())
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-12)
    outputs = result_of(model, batch)[2]
    assert float(outputs.aux_loss.detach()) > 0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
@pytest.mark.parametrize("how", ["lora", "dora", "saved"])
def test_adapters_on_the_output_layer(how):
    base = patched("Llama", torch.float64)
    modules = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]} if how == "saved" else {}
    config = {"target_modules": ["lm_head", "q_proj"], **modules, "use_dora": how == "dora"}
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **config))
    model.to(torch.float64)
    found = check_equal_of_wrapped(model, base)
    trained = [name for name in found if "lm_head" in name]
    assert trained
    assert not [name for name in trained if "base_layer" in name or "original" in name]
    assert all(float(found[name].abs().max()) > 0 for name in trained)


def check_equal_of_wrapped(model, inner):
    batch = batch_for(inner)
    expected, gradients, _ = result_of(model, batch, keep_logits=True)
    with chunks_of(5, inner) as chunks:
        loss, found, _ = result_of(model, batch)
    assert chunks
    assert loss == pytest.approx(expected, rel=1e-12)
    assert found.keys() == gradients.keys()
    assert all(torch.allclose(found[name], gradients[name], rtol=0, atol=1e-12) for name in found)
    return found


def test_a_frozen_model_below_a_trained_head_and_above_a_frozen_one():
    model = patched("Llama", torch.float64)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert list(check_equal(model)) == ["lm_head.weight"]
    model.lm_head.requires_grad_(False)
    model.model.requires_grad_(True)
    assert "lm_head.weight" not in check_equal(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers has renamed gradient_checkpointing
def test_activation_checkpointing():
    model = patched("Llama", torch.float64).train()
    model.gradient_checkpointing_enable()
    check_equal(model)


def test_autocast():
    """In bfloat16, gradients differ from those in float32 no more than those of whole logits do, and a little."""
    model = patched()
    batch = batch_for(model)
    exact = result_of(model, batch, keep_logits=True)[1]
    found = []
    for keep_logits in (True, False):
        with torch.autocast("cpu", torch.bfloat16), chunks_of(5, model) as chunks:
            found.append(result_of(model, batch, keep_logits))
    assert chunks
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-2)
    for name, gradient in exact.items():
        whole, in_chunks = (float((each[1][name] - gradient).norm()) for each in found)
        assert in_chunks <= 1.5 * whole + 1e-3 * float(gradient.norm()), name


def test_autocast_inside_of_the_model():
    """As accelerate puts it around the forward."""
    model = patched()
    stock, dtypes = model.forward, []
    model.lm_head.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    forward = model.lm_head.forward

    def noting(hidden):
        dtypes.append(forward(hidden).dtype)
        return forward(hidden)

    model.lm_head.forward = noting
    model.forward = torch.autocast("cpu", torch.bfloat16)(stock)
    with chunks_of(5, model) as chunks:
        result_of(model, batch_for(model))
    assert chunks
    assert set(dtypes) == {torch.bfloat16}


def test_nothing_to_train_on():
    model = patched("Llama", torch.float64)
    batch = batch_for(model, [[-100] * len(row) for row in DOCUMENTS])
    gradients = check_equal(model, batch)
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    assert all(not gradient.any() for gradient in gradients.values())


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        found = result if isinstance(result, (tuple, list)) else [result]
        self.elements = max([self.elements, *(each.numel() for each in found if isinstance(each, torch.Tensor))])
        return result


def test_logits_of_a_whole_row_are_never_in_memory():
    model = hfp.patch_model(build("Llama", vocab_size=20_000))
    batch = batch_for(model, [list(range(128))], [list(range(128))])
    for keep_logits, expected in ((True, 128 * 20_000), (False, model.lm_head.weight.numel())):
        with chunks_of(4, model), LargestTensor() as largest:
            result_of(model, batch, keep_logits)
        assert largest.elements == expected


def test_tokens_without_labels_have_no_logits():
    model = patched()
    with chunks_of(5, model) as chunks:
        result_of(model, batch_for(model))
    assert chunks[-1] == (19, 5)  # of 30 tokens


def test_small_rows_and_callers_of_logits_are_left_alone():
    model = patched()
    batch = batch_for(model)
    for tokens, keep_logits in ((30, False), (5, True)):
        with chunks_of(tokens, model) as chunks:
            assert result_of(model, batch, keep_logits)[2].logits.shape[:2] == (1, 30)
        assert not chunks


def test_evaluation():
    model = patched("Llama", torch.float64)
    batch, found = batch_for(model), []
    for tokens in (5, 1000):
        with torch.no_grad(), chunks_of(tokens, model) as chunks:
            loss, _ = run_with_loss(model, batch, batch["labels"], weights_of(batch, "token"))
        assert bool(chunks) == (tokens == 5)
        assert not loss.requires_grad
        found.append(float(loss))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_the_model_is_left_as_it_was():
    model = patched().train()
    before = [dict(vars(each)) for each in model.modules()]
    hooks = [(dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in model.modules()]
    with chunks_of(5, model) as chunks:
        result_of(model, batch_for(model))
    assert chunks
    assert [(dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in model.modules()] == hooks
    assert [vars(each).keys() for each in model.modules()] == [each.keys() for each in before]
    assert all(each.training for each in model.modules())


def changed(change, only_in_training=False):
    """A model whose forward does something with its logits."""
    model = build("Llama", torch.float64)

    class Changed(type(model)):
        def forward(self, *args, **inputs):
            outputs = super().forward(*args, **inputs)
            if self.training or not only_in_training:
                outputs.logits = change(outputs.logits)
            return outputs

    model.__class__ = Changed
    return model


def in_place(logits):
    logits.div_(2)
    return logits


def sliced_and_mixed(logits):
    largest = torch.tensor(2.0, dtype=logits.dtype)
    return (
        torch.sigmoid(logits)[..., -128:] * logits[..., -128:].clamp(min=-2, max=largest) + logits.mean(-1)[..., None]
    )


@pytest.mark.parametrize("change", [in_place, sliced_and_mixed])
def test_functions_of_logits_are_repeated(change):
    check_equal(hfp.patch_model(changed(change)))


def test_a_trained_scale():
    model = changed(lambda logits: logits * model.scale)
    model.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    assert float(check_equal(model)["scale"]) != 0


def without_some(logits):
    logits[..., :7] = -1e4
    return logits


def one_of_two(logits):
    return torch.stack([logits, logits])[0]


def over_tokens(logits):
    return logits.cumsum(1)


def by_length(logits):
    return logits * logits.shape[1]


MORE = "a short document in chunks raises UnsupportedHeadError: the forward does more with the logits than functions of"
DIFFERENT = "on a short document, the loss in chunks is not the loss of whole logits"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_some, f"{MORE} single tokens"),
        (one_of_two, f"{MORE} single tokens"),
        (over_tokens, DIFFERENT),
        (by_length, DIFFERENT),
    ],
)
def test_functions_that_cannot_be_repeated(change, reason, caplog):
    check_whole(changed(change), reason, caplog)


def test_a_forward_that_is_another_one_in_training(caplog):
    model = changed(without_some, only_in_training=True)
    check_equal(model.eval())
    reason = "the forward does more with the logits than functions of single tokens"
    check_whole(model.train(), reason, caplog)


def test_an_output_layer_that_is_called_twice(caplog):
    model = changed(lambda logits: logits + 0 * model.lm_head(torch.zeros(1, 1, 64, dtype=torch.float64)))
    reason = "a short document in chunks raises UnsupportedHeadError: the forward calls the output layer more than once"
    check_whole(model, reason, caplog)


def test_an_output_layer_that_is_not_called(caplog):
    model = build("Llama")
    model.get_output_embeddings = lambda: model.model.embed_tokens
    check_whole(model, "the input of the output layer is not a tensor [1, tokens, width]", caplog)
    model = build("Llama")
    model.get_output_embeddings = lambda: None
    caplog.clear()
    check_whole(model, "the model's get_output_embeddings returns no output layer", caplog)


def test_a_hook_on_a_weight(caplog):
    """It would see the gradient of each chunk, and then of the sum."""
    model = patched()
    model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(max=0.01))
    chunks = check_whole(model, "a weight of the output layer has a hook", caplog)
    assert not chunks


@pytest.mark.parametrize("where", ["autocast", "weights"])
def test_half_precision_with_scaled_gradients(where):
    model = patched() if where == "autocast" else patched().half()
    batch = batch_for(model)
    with torch.autocast("cpu", torch.float16, enabled=where == "autocast"), chunks_of(5, model) as chunks:
        outputs = result_of(model, batch)[2]
    assert outputs.logits.shape[1] == 30
    assert not chunks
    assert module._REPORTED[model] == "gradients in float16 have to be scaled before they are computed"


def test_an_output_layer_of_deepspeed_or_of_tensor_parallelism(caplog, monkeypatch):
    model = patched()
    model.lm_head.weight.ds_id = 7
    monkeypatch.setattr(module, "model_to_test", lambda _: pytest.fail("tested"))
    check_whole(model, "DeepSpeed ZeRO-3 shards the output layer", caplog)


def test_an_output_layer_that_is_distributed(caplog):
    class DTensor(torch.nn.Parameter):
        pass

    model = patched()
    model.lm_head.weight = DTensor(model.lm_head.weight.detach())
    check_whole(model, "the output layer is distributed by tensor parallelism", caplog)


COMPILED = {
    "model": lambda model: torch.compile(model, backend="eager"),
    "in place": lambda model: model.compile(backend="eager"),
    "forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    "head": lambda model: model.lm_head.compile(backend="eager"),
}


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, while they are traced
@pytest.mark.parametrize("how", fast_only(COMPILED, "head"))
def test_compiled_models(how, caplog):
    torch._dynamo.reset()
    model = build("Llama")
    called = COMPILED[how](model)
    called = model if called is None else called
    chunks = check_whole(model, "the output layer is compiled", caplog, called)
    assert not chunks
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers():
    torch._dynamo.reset()
    model = patched()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    check_equal(model, close=2e-6)
    torch._dynamo.reset()


def test_a_model_is_tested_once_and_again_if_its_head_changes(monkeypatch):
    model, calls, stock = patched("Llama", torch.float64), [], module._test
    monkeypatch.setattr(module, "_test", lambda each: calls.append(each) or stock(each))
    batch = batch_for(model)
    with chunks_of(5, model):
        for _ in range(3):
            result_of(model, batch)
        assert len(calls) == 1
        model.lm_head = torch.nn.Linear(64, 128, dtype=torch.float64)
        result_of(model, batch)
        assert len(calls) == 2
        model.lm_head.register_forward_hook(lambda _, __, output: output * 2)
        assert result_of(model, batch)[2].logits.shape[1] == 30  # the hook is not called for chunks
    assert module._REPORTED[model] == DIFFERENT


def test_a_model_without_weights_in_memory():
    """It is tested by a small model of the same class, or not at all."""
    with torch.device("meta"):
        model = type(build("Llama"))(build("Llama").config)
    assert module._test(model) == ""
    with torch.device("meta"):
        model = tiny_model("llama", "causal").to("meta")
    assert module._test(model) == ""


def test_why_a_model_cannot_be_tested(monkeypatch):
    monkeypatch.setattr(module, "model_to_test", lambda _: None)
    assert module._test(patched()) == "the weights are not in memory, and no small model of the same class can be built"


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_a_trainer_trains_in_chunks(tmp_path, loss):
    found = []
    for tokens in (5, 1000):
        trainer = trainer_of(tmp_path, model=patched("Llama", torch.float64), max_steps=3)
        hfp.attach(trainer, hfp.TokenBudget(64), loss=loss)
        with chunks_of(tokens, trainer.model) as chunks:
            found.append(logged(trainer))
        assert bool(chunks) == (tokens == 5)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed
@pytest.mark.parametrize("kind", [SFTTrainer, OwnLoss])
def test_a_trainer_with_a_loss_of_its_own_keeps_it(tmp_path, kind):
    trainer = trainer_of(tmp_path, kind)
    hfp.attach(trainer, hfp.TokenBudget(64))
    with chunks_of(5, trainer.model) as chunks:
        assert len(logged(trainer)) == 2
        trainer.evaluate(trainer.train_dataset)
    assert not chunks
