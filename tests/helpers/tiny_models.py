"""Tiny random models, one for each trait of attention that a packed row must survive."""

import torch
import transformers
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING


def enable_checkpointing(model, **settings):
    """Let a model compute its layers again in the backward pass. Newer transformers have another name for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(settings or None)


SPECIAL = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = SPECIAL | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
WINDOWS = {"sliding_window": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CAPPED = {"head_dim": 16, "attn_logit_softcapping": 50.0, "attn_implementation": "eager"}
GPT = SPECIAL | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
ROUTED |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1}

SUPPORTED = {
    "Llama": SIZES,
    "Mistral": SIZES | WINDOWS,
    "Mixtral": SIZES | EXPERTS,
    "Gemma2": SIZES | WINDOWS | LAYERS | CAPPED,
    "Qwen2": SIZES | WINDOWS | LAYERS | {"use_sliding_window": True},
    "Qwen3": SIZES | {"head_dim": 16},
    "Phi3": SIZES,
    "Olmo2": SIZES,
    "StableLm": SIZES,
    "GPTNeoX": {name: value for name, value in SIZES.items() if name != "num_key_value_heads"},
    "GPT2": GPT,
    "DeepseekV3": SIZES | LATENT | ROUTED,
    "GptOss": SIZES | WINDOWS | LAYERS | EXPERTS | {"head_dim": 16},
}
"""Class name without "ForCausalLM" or "LMHeadModel" -> arguments of its configuration."""


def build(name: str, dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """A model with weights large enough that attention matters, and changes to its configuration. The name is that of
    a class of transformers, or what stands before its "ForCausalLM" or "LMHeadModel"."""
    names = [name + ending for ending in ("", "ForCausalLM", "LMHeadModel")]
    head = next(cls for cls in (getattr(transformers, each, None) for each in names) if cls)
    config = head.config_class(**(SUPPORTED.get(name, SIZES) | changes))
    for field in vars(config):
        if "drop" in field and isinstance(getattr(config, field), float):
            setattr(config, field, 0.0)
    torch.manual_seed(0)
    model = head(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped one has no float64
        exact(model)
    return model.to(dtype)


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model compute its loss in the dtype of its logits, which transformers converts to float32."""
    if getattr(model, "loss_function", None) is LOSS_MAPPING["ForCausalLM"]:
        model.loss_function = _exact_loss
    return model


def _exact_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **_):
    labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits, labels = logits.view(-1, vocab_size), labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def with_loss_times(factor: float | None) -> PreTrainedModel:
    """A model whose own loss is the usual one times a factor; None for none."""
    model = build("Llama")
    usual = type(model)

    class Other(usual):
        def forward(self, *args, **inputs):
            outputs = usual.forward(self, *args, **inputs)
            if outputs.loss is not None:
                outputs.loss = None if factor is None else outputs.loss * factor
            return outputs

    model.__class__ = Other
    return model
