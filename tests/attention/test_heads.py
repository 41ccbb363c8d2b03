"""Models with other heads than a language model's: what training loops say of them."""

import datasets
import peft
import pytest
import transformers
from accelerate import Accelerator
from tiers import fast_only

import hf_packing as hfp
from hf_packing.attention import is_patched
from tools.tiny_model import small_config


def head(name):
    cls = getattr(transformers, name)
    return cls(small_config(cls.config_class, "head", {}))


OF_ROWS = (
    *("BertForSequenceClassification", "LlamaForSequenceClassification", "BertForQuestionAnswering"),
    *("BertForNextSentencePrediction", "ElectraForPreTraining", "BertModel", "T5EncoderModel", "BertForMultipleChoice"),
)
OF_TOKENS = ("BertForTokenClassification", "LlamaForTokenClassification")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
@pytest.mark.parametrize("name", fast_only([*OF_ROWS, *OF_TOKENS, "PEFT"], "BertModel", OF_TOKENS[0], "PEFT"))
def test_training_loops_take_no_other_heads(name):
    stock = model = head("LlamaForSequenceClassification" if name == "PEFT" else name)
    if name == "PEFT":  # a reward model
        model = peft.get_peft_model(stock, peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]] * 4, "labels": [0, 1] * 4})
    with pytest.raises(hfp.PackingError) as error:
        hfp.prepare_dataloader(Accelerator(cpu=True), data, hfp.TokenBudget(8), model=model)
    said = [type(stock).__name__, "causal and masked language models are supported", "after patch_model(model)"]
    said += ["PackingCollator(keep_first_labels=True)"] if name in OF_TOKENS else []
    assert all(words in str(error.value) for words in said)
    assert not is_patched(stock)
