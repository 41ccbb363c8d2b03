"""Models that cannot be patched are refused with the reason, and are as they were before."""

import itertools

import datasets
import pytest
import torch
import transformers
from accelerate import Accelerator
from leaky_models import NormOfTokens, with_embeddings
from model_state import state_of
from peft import LoraConfig, PolyConfig, PromptTuningConfig, get_peft_model
from tiers import fast_only
from tiny_models import SIZES, build
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.attention.report import predicts_tokens
from tools.tiny_model import small_config, tiny_model


def llama(**changes):
    return build("Llama", num_hidden_layers=1, **changes)


def tiny(model_type, kind="causal", **changes):
    return lambda: tiny_model(model_type, kind, **changes)


def with_mlp(module, *hooks):
    """A model with another module, and hooks, behind an MLP."""
    model = llama(use_cache=False)
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, module)
    for hook in hooks:
        model.model.layers[0].mlp.register_forward_hook(hook)
    return model


def centred(module, _, hidden):
    return hidden - hidden.mean(1, keepdim=True) if module.training else hidden


def noisy(module, _, hidden):
    return hidden + torch.randn_like(hidden) if module.training else hidden


def clock():
    """Another function each time in training."""
    calls = itertools.count()
    return lambda module, _, hidden: hidden * (1 + next(calls) % 7 * 0.1) if module.training else hidden


class MovingAverage(nn.Module):
    """Updated, then used; or used, then updated."""

    def __init__(self, used_before):
        super().__init__()
        self.used_before = used_before
        self.register_buffer("average", torch.zeros(64))

    def forward(self, hidden):
        average = self.average.clone()
        if self.training:
            self.average.mul_(0.9).add_(0.1 * hidden.detach().mean((0, 1)))
        return hidden - (average if self.used_before else self.average.clone())


class Counting(nn.Module):
    """Remembers in an attribute."""

    average = 0.0

    def forward(self, hidden):
        if self.training:
            self.average = 0.9 * self.average + 0.1 * hidden.detach().mean()
        return hidden - self.average


def changed(gradient):
    return gradient * (1.5 if gradient.shape[1] > 30 else 1.0)


def crossing(gradient):
    return gradient + 0.5 * gradient.roll(1, dims=1)


def with_gradient(change, only_training=False):
    """A model whose last norm has another gradient, always or in training mode alone."""

    def hook(norm, _, output):
        if output.requires_grad and (norm.training or not only_training):
            output.register_hook(change)

    model = llama(use_cache=False)
    model.model.norm.register_forward_hook(hook)
    return model


def with_weights(name, value):
    def make():
        model = llama()
        nn.init.constant_(model.model.layers[0].get_parameter(name), value)
        return model

    return make


class Own(transformers.PreTrainedModel):
    """A model without attention, whose configuration knows no vocabulary."""

    config_class = transformers.PretrainedConfig

    def __init__(self, returns_tuples):
        super().__init__(transformers.PretrainedConfig())
        self.returns_tuples = returns_tuples
        self.tokens, self.out = nn.Embedding(99, 16), nn.Linear(16, 99)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids=None, labels=None):
        logits, loss = self.out(self.tokens(input_ids)), None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.returns_tuples:
            return (logits,) if loss is None else (loss, logits)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def with_tuples():
    model = llama()
    model.config.return_dict = False
    return model


def that_needs_a_mask():
    model = llama()
    model.register_forward_pre_hook(lambda _, __, kwargs: kwargs["attention_mask"].sum() and None, with_kwargs=True)
    return model


def that_mixes_rows():
    model = tiny_model("bert", "sequence classification", num_hidden_layers=1)
    model.classifier.register_forward_pre_hook(lambda _, given: (given[0] + 0.01 * given[0].mean(0),))
    return model


class TokenAfterNext(LlamaForCausalLM):
    """Labels are shifted by two in a second loss."""

    only_training = False

    def forward(self, input_ids=None, position_ids=None, labels=None, **others):
        output = super().forward(input_ids, position_ids=position_ids, labels=labels, **others)
        if labels is not None and (self.training or not self.only_training):
            later = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            output.loss = output.loss + self.loss_function(output.logits, later, 128)
        return output


class TokenAfterNextInTraining(TokenAfterNext):
    only_training = True


class ReadsBefore(nn.Module):
    """Every token of a row of more than `above` tokens reads the token before it."""

    def __init__(self, inner, above):
        super().__init__()
        self.inner, self.above = inner, above

    def forward(self, hidden):
        before = nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return self.inner(hidden) + (0.1 * before if hidden.shape[1] > self.above else 0)


class OfLongRows(MistralForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp = ReadsBefore(self.model.layers[0].mlp, config.sliding_window)


class MixesLongRows(MistralForCausalLM):
    """The model itself, which cannot run by segment, mixes the documents of long rows."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **others):
        outputs = super().forward(input_ids, attention_mask, position_ids, use_cache=use_cache, **others)
        if outputs.logits.shape[1] > self.config.sliding_window:
            outputs.logits = outputs.logits + outputs.logits.mean(1, keepdim=True)
        return outputs


def of_long_rows(kind, layers):
    """A model that changes with the length of rows, with a module of the user's own that its small copy lacks."""
    torch.manual_seed(0)
    model = kind(MistralConfig(**SIZES | {"num_hidden_layers": layers, "sliding_window": 64})).eval()
    model.model.layers[-1].mlp = ReadsBefore(model.model.layers[-1].mlp, 0)
    return model


def with_two_heads(kind):
    """For rows of several choices, each with several tokens."""
    cls = getattr(transformers, f"{kind}DoubleHeadsModel")
    return cls(cls.config_class(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=64)).eval()


def head(name):
    cls = getattr(transformers, name)
    return cls(small_config(cls.config_class, "head", {"num_layers": 1} if "T5" in name else {}))


POLY = PolyConfig(target_modules=["q_proj"], r=4, n_tasks=2, n_skills=2, n_splits=1, task_type="CAUSAL_LM")
LORA = LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
PROMPTS = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
ALONE = "called with input_ids alone: "
UNTESTED = "isolation cannot be tested, since changing the first tokens"
TRAINING = "in training mode, "
OTHER = "changing one document changed the logits of another"
REMEMBERS = f"{TRAINING}the same tokens gave other logits .* or depends on earlier batches"
STREAMS = f"ProphetNetForCausalLM: .* {OTHER} .* ProphetNetNgramSelfAttention .* cannot run on a single segment"

REFUSED = {
    "random hashing": (tiny("reformer", attn_layers=["lsh", "local"]), "same tokens gave other logits the second time"),
    "streams of the row's length": (tiny("prophetnet", num_decoder_layers=1), STREAMS),
    "no kernel": (tiny("mra", "masked", num_hidden_layers=1), f"MraForMaskedLM: .* {UNTESTED}"),
    "no effect": (with_weights("self_attn.o_proj.weight", 1e-12), UNTESTED),
    "nan": (with_weights("mlp.down_proj.weight", float("nan")), "LlamaForCausalLM returns no finite logits"),
    "a mask that it needs": (that_needs_a_mask, "called on a packed row: 'attention_mask'"),
    "two texts": (lambda: head("T5ForConditionalGeneration"), f"{ALONE}.* takes two texts"),
    "few positions": (lambda: build("GPT2", n_positions=12), f"{ALONE}index out of range"),
    "tuples": (with_tuples, "return_dict: expected True in the configuration of LlamaForCausalLM"),
    "its own tuples": (lambda: Own(True), "expected a ModelOutput, .* it returns a tuple"),
    "no attention and no vocab_size": (lambda: Own(False), "the model never called the attention function"),
    "two heads": (lambda: with_two_heads("GPT2"), "one head, .* returns also mc_logits"),
    "two heads of GPT": (lambda: with_two_heads("OpenAIGPT"), "one head, .* returns also mc_logits"),
    "rows of a batch that it mixes": (that_mixes_rows, "padded batches are not supported: changing one"),
    "other gradients": (lambda: with_gradient(changed), "a document's gradients differ by"),
    "small gradients": (lambda: with_embeddings(1e6, torch.float64, 2), "a document's gradients differ by"),
    "gradients that cross": (lambda: with_gradient(crossing), "gradients of one document reach another"),
    "those in training": (lambda: with_gradient(crossing, True), f"{TRAINING}gradients of one document reach another"),
    "batch norm": (lambda: with_mlp(NormOfTokens()), TRAINING + OTHER),
    "centred in training": (lambda: with_mlp(nn.Identity(), centred), TRAINING + OTHER),
    "centred beside noise": (lambda: with_mlp(nn.Identity(), noisy, centred), TRAINING + OTHER),
    "a clock beside noise": (
        lambda: with_mlp(nn.Identity(), noisy, clock()),
        f"{TRAINING}the same tokens gave other logits",
    ),
    "average": (lambda: with_mlp(MovingAverage(False)), REMEMBERS),
    "late average": (lambda: with_mlp(MovingAverage(True)), REMEMBERS),
    "attribute": (lambda: with_mlp(Counting()), REMEMBERS),
    "another loss": (lambda: TokenAfterNext(LlamaConfig(**SIZES)), "TokenAfterNext: the model's own loss"),
    "another loss in training": (lambda: TokenAfterNextInTraining(LlamaConfig(**SIZES)), "Training: the model's own"),
    "a module that the small copy lacks": (lambda: of_long_rows(OfLongRows, 2), OTHER),
    "long documents that it mixes": (lambda: of_long_rows(MixesLongRows, 1), "small copy of the model: MixesLongRows"),
    "prompts": (lambda: get_peft_model(llama(), PROMPTS), "expected a PEFT method that adds no tokens, got PROMPT_TUN"),
    "an adapter of tasks": (lambda: get_peft_model(llama(), POLY), f"{ALONE}task_ids should not be None"),
    "an adapter of some tokens": (lambda: get_peft_model(llama(), LORA), r"alora_invocation_tokens, .* has \[7, 8\]"),
}
SLOW = {
    "two heads of GPT",
    "rows of a batch that it mixes",
    "batch norm",
    "centred in training",
    "average",
    "attribute",
    "gradients that cross",
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
@pytest.mark.parametrize("trait", fast_only(REFUSED, *(REFUSED.keys() - SLOW)))
def test_refused_and_left_as_it_was(request, trait):
    make, message = REFUSED[trait]
    if trait not in ("random hashing", "no kernel"):
        request.getfixturevalue("one_method")
    model = make()
    before = state_of(model)
    for _ in range(2 if trait == "long documents that it mixes" else 1):
        with pytest.raises(hfp.PackingError, match=message):
            hfp.patch_model(model)
        assert state_of(model) == before
        assert not is_patched(model)


def test_a_language_model_without_vocab_size():
    assert predicts_tokens(Own(False))


OF_TRAINING = [trait for trait, (_, message) in REFUSED.items() if message.startswith(TRAINING)]


@pytest.mark.parametrize("trait", fast_only(OF_TRAINING, "late average", "those in training"))
def test_leaks_of_training_are_seen(trait):
    report = hfp.check_isolation(REFUSED[trait][0]())
    assert (report.isolated, report.modes) == (False, ("training",))
    assert report.reason.startswith("in training mode, ")
    if trait == "those in training":
        assert report.max_leak < 1e-4 < 1e-3 < report.max_gradient_leak


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_check_isolation_says_it_too():
    for trait in ("two texts", "gradients that cross"):
        report = hfp.check_isolation(REFUSED[trait][0]())
        assert not report.isolated
        assert REFUSED[trait][1].startswith(ALONE) or REFUSED[trait][1] in report.reason
    with pytest.raises(hfp.PackingError, match="alora_invocation_tokens"):
        hfp.check_isolation(REFUSED["an adapter of some tokens"][0]())


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
        model = get_peft_model(stock, LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]] * 4, "labels": [0, 1] * 4})
    with pytest.raises(hfp.PackingError) as error:
        hfp.prepare_dataloader(Accelerator(cpu=True), data, hfp.TokenBudget(8), model=model)
    said = [type(stock).__name__, "causal and masked language models are supported", "after patch_model(model)"]
    said += ["PackingCollator(keep_first_labels=True)"] if name in OF_TOKENS else []
    assert all(words in str(error.value) for words in said)
    assert not is_patched(stock)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trainers_take_no_prompts(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = transformers.Trainer(get_peft_model(llama(), PROMPTS), arguments)
    with pytest.raises(hfp.PackingError, match=r"trainer\.model: .* got PROMPT_TUNING; .*Padded rows would get theirs"):
        hfp.attach(trainer, None)
