"""Models with other heads than a language model's: what training loops say of them."""

import datasets
import peft
import pytest
import transformers
from accelerate import Accelerator
from tiers import fast_only
from tiny_models import SIZES

import hf_packing as hfp
from hf_packing.attention import is_patched

BERT = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"} | {"num_hidden_layers": 1}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}


def head(name):
    cls = getattr(transformers, name)
    sizes = T5 | {"decoder_start_token_id": 0} if name.startswith("T5") else BERT
    return cls(cls.config_class(**sizes))


OF_ROWS = (
    *("BertForSequenceClassification", "LlamaForSequenceClassification", "BertForQuestionAnswering"),
    *("BertForNextSentencePrediction", "ElectraForPreTraining", "BertModel", "T5EncoderModel", "BertForMultipleChoice"),
)
OF_TOKENS = ("BertForTokenClassification", "LlamaForTokenClassification")
SUPPORTED = "causal and masked language models are supported"


def says(error, *words):
    assert all(word in str(error.value) for word in (*words, SUPPORTED, "after patch_model(model)"))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
@pytest.mark.parametrize("name", fast_only([*OF_ROWS, *OF_TOKENS, "PEFT"], "BertModel", OF_TOKENS[0], "PEFT"))
def test_training_loops_take_no_other_heads(name):
    stock = model = head("LlamaForSequenceClassification" if name == "PEFT" else name)
    if name == "PEFT":  # a reward model
        model = peft.get_peft_model(stock, peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]] * 4, "labels": [0, 1] * 4})
    with pytest.raises(hfp.PackingError) as error:
        hfp.prepare_dataloader(Accelerator(cpu=True), data, hfp.TokenBudget(8), model=model)
    says(error, type(stock).__name__, *(["PackingCollator(keep_first_labels=True)"] if name in OF_TOKENS else []))
    assert not is_patched(stock)
