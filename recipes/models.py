"""The models of the recipes: the user's, or a small Llama or BERT from scratch."""

from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}


def small_llama(vocabulary: int, **settings: Any) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **SIZES, **settings)


def small_bert(vocabulary: int, max_length: int, **settings: Any) -> BertConfig:
    return BertConfig(vocab_size=vocabulary, max_position_embeddings=max(512, max_length), **SIZES, **settings)


def load_model(name: str | None, vocabulary: int) -> PreTrainedModel:
    """Return a language model, with the same weights on every process.

    Args:
        name: name or folder; None for the small one.
        vocabulary: vocabulary size of the small one.
    """
    return load_with_head(AutoModelForCausalLM, name, small_llama(vocabulary))


def load_with_head(head: Any, name: str | None, small: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """Return a model with a head, with the same weights on every process.

    Args:
        head: one of the auto classes of transformers.
        name: name or folder; None for the small one.
        small: configuration of the small one.
        settings: fields of the configuration of the named one that are changed.
    """
    set_seed(0)
    if name:
        return head.from_pretrained(name, dtype=torch.float32, **settings)
    return head.from_config(small)
