"""Methods of PEFT: those that add tokens are refused, and tokens that are trained are proven."""

import peft
import pytest
import transformers

import hf_packing as hfp
from tools.tiny_model import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed


def test_prompts_are_refused(tmp_path):
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama", "causal"), config)
    trainer = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(hfp.PackingError, match=r"trainer\.model: .* got PROMPT_TUNING; .*Padded rows would get theirs"):
        hfp.attach(trainer, None)


def test_gradients_are_proven_where_tokens_are_trained():
    """PEFT looks them up past the embedding's forward."""
    config = peft.TrainableTokensConfig(token_indices=[5, 9, 20], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama", "causal"), config)
    report = hfp.check_isolation(hfp.patch_model(model))
    assert (report.isolated, report.unproven, report.max_gradient_leak) == (True, "", 0.0)
