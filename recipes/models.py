"""The model of the recipes with their own training loop: the user's, or a small Llama from scratch."""

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel


def load_model(name: str | None, vocabulary: int) -> PreTrainedModel:
    """Return the model, with the same weights on every process.

    Args:
        name: name or folder; None for the small one.
        vocabulary: vocabulary size of the small one.
    """
    set_seed(0)
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **sizes))
