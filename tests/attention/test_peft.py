"""LoRA over a patched model, and a patch inside a LoRA model."""

import peft
import pytest
import torch
import transformers
from tiers import fast_only
from training_by_hand import DOCUMENTS, batch_of, losses_and_gradients

import hf_packing as hfp
from hf_packing.attention.tiny_model import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed

ARCHITECTURES = {
    "llama": ["q_proj", "o_proj"],
    "jamba": ["in_proj", "out_proj", "x_proj"],
    "mamba": ["in_proj", "x_proj"],
    "opt": ["q_proj", "out_proj"],
    "bloom": ["query_key_value", "dense"],
}


def lora_of(model, modules):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def packed_and_alone(model, patch):
    """Losses and gradients of a LoRA model, all documents alone and in one patched row."""
    alone = [{"input_ids": torch.tensor([d]), "labels": torch.tensor([d]), "use_cache": False} for d in DOCUMENTS]
    expected = losses_and_gradients(model, alone)
    patch()
    return losses_and_gradients(model, [batch_of(DOCUMENTS)]), expected


@pytest.mark.parametrize("before", fast_only([True, False], False))
@pytest.mark.parametrize("architecture", fast_only(ARCHITECTURES, "llama"))
def test_lora(architecture, before):
    base = tiny_model(architecture, "causal")
    if before:
        hfp.patch_model(base)
        model = lora_of(base, ARCHITECTURES[architecture]).eval()
        hfp.unpatch_model(model)
        unpatched = hfp.unpatch_model(hfp.patch_model(model))

        def patch():
            unpatched.__exit__(None, None, None)
    else:
        model = lora_of(base, ARCHITECTURES[architecture]).eval()

        def patch():
            hfp.patch_model(model)

    found, expected = packed_and_alone(model, patch)
    assert hfp.check_isolation(model).isolated
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    trained = [name for name in found[1] if "lora" in name]
    assert trained
    assert trained == list(found[1])
    for name in trained:
        assert torch.allclose(found[1][name], expected[1][name], atol=1e-4 * float(expected[1][name].abs().max())), name


def test_prompts_are_refused(tmp_path):
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama", "causal"), config)
    with pytest.raises(hfp.PackingError, match="model: expected a PEFT method that adds no tokens, got PROMPT_TUNING"):
        hfp.patch_model(model)
    trainer = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(hfp.PackingError, match=r"trainer\.model: .* got PROMPT_TUNING; .*Padded rows would get theirs"):
        hfp.attach(trainer, None)


def test_an_adapter_that_begins_at_its_tokens_is_refused():
    model = tiny_model("llama", "causal")
    config = peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    for call in (hfp.patch_model, hfp.check_isolation):
        with pytest.raises(
            hfp.PackingError, match=r"adapters without alora_invocation_tokens, but adapter 'default' has \[7, 8\]"
        ):
            call(model)


def test_gradients_are_proven_where_tokens_are_trained():
    """PEFT looks them up past the embedding's forward."""
    config = peft.TrainableTokensConfig(token_indices=[5, 9, 20], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama", "causal"), config)
    report = hfp.check_isolation(hfp.patch_model(model))
    assert (report.isolated, report.unproven, report.max_gradient_leak) == (True, "", 0.0)
