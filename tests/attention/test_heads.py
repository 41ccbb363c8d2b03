"""Models with other heads than a language model's: packed rows, and what training loops say of them."""

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from tiers import fast_only
from tiny_models import SIZES

import hf_packing as hfp
from hf_packing.attention import is_patched

BERT = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def head(name, **changes):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    sizes = T5 | {"decoder_start_token_id": 0} if name.startswith("T5") else BERT
    return cls(cls.config_class(**sizes | changes))


OF_ROWS = (
    *("BertForSequenceClassification", "LlamaForSequenceClassification", "BertForQuestionAnswering"),
    *("BertForNextSentencePrediction", "ElectraForPreTraining", "BertModel", "T5EncoderModel"),
)
SUPPORTED = "causal and masked language models are supported"


def lora(model, target, task):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=[target], task_type=task))


def says(error, *words):
    assert all(word in str(error.value) for word in (*words, SUPPORTED, "after patch_model(model)"))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
@pytest.mark.parametrize("name", fast_only([*OF_ROWS, "BertForMultipleChoice", "PEFT"], "BertModel", "PEFT"))
def test_training_loops_take_no_heads_of_whole_rows(name):
    if name == "PEFT":  # a reward model
        name = "LlamaForSequenceClassification"
        model = lora(head(name, num_labels=1), "q_proj", "SEQ_CLS")
    else:
        model = head(name)
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]] * 4, "labels": [0, 1] * 4})
    with pytest.raises(hfp.PackingError) as error:
        hfp.prepare_dataloader(Accelerator(cpu=True), data, hfp.TokenBudget(8), model=model)
    says(error, name)


def test_an_encoder_decoder_takes_two_texts():
    name, words = (
        "T5ForConditionalGeneration",
        "T5ForConditionalGeneration is an encoder-decoder, which takes two texts",
    )
    with pytest.raises(hfp.ModelNotSupportedError) as error:
        hfp.patch_model(head(name))
    says(error, words)
    report = hfp.check_isolation(head(name))
    assert not report.isolated
    assert words in report.reason


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "name",
    fast_only(["BertForTokenClassification", "LlamaForTokenClassification", "PEFT"], "LlamaForTokenClassification"),
)
def test_classifiers_of_tokens_are_patched(name):
    def make():
        return lora(head("BertForTokenClassification"), "query", "TOKEN_CLS") if name == "PEFT" else head(name)

    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(3, 99, n), "labels": rng.integers(0, 2, n)} for n in (7, 12, 5, 20)]
    model, data = make(), datasets.Dataset.from_list(rows)
    with pytest.raises(hfp.PackingError) as error:
        hfp.prepare_dataloader(Accelerator(cpu=True), data, hfp.TokenBudget(30), model=model)
    says(error, "got", "TokenClassification", "PackingCollator(keep_first_labels=True)")
    assert not is_patched(model.get_base_model() if name == "PEFT" else model)
    batch = {name: torch.as_tensor(np.concatenate([row[name] for row in rows]))[None] for name in rows[0]}
    with torch.no_grad():
        alone = [make().eval()(**{name: torch.as_tensor(row[name])[None] for name in row}) for row in rows]
    expected = sum(each.loss * each.logits.shape[1] for each in alone) / batch["labels"].numel()
    hfp.patch_model(model).eval()
    with torch.no_grad():
        packed = model(**hfp.PackingCollator(keep_first_labels=True)(rows))
    assert float(packed.loss) == pytest.approx(float(expected), rel=1e-5)
    assert torch.allclose(packed.logits[0], torch.cat([each.logits[0] for each in alone]), atol=1e-5)
