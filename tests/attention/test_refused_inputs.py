"""Inputs that a patched model refuses, with the name of the argument."""

import pytest
import torch
from model_inputs import CHAT, SEQUENCE, inputs_of
from patched_models import patched, patched_tiny
from transformers import DynamicCache

import hf_packing as hfp
from hf_packing.attention.layout import CACHES, Layout, current_layout, within
from hf_packing.attention.route import route_of

ROW = {"input_ids": torch.tensor([[5, 6, 7]])}
ROWS = {"input_ids": torch.full((2, 4), 9)}
TREE = inputs_of(CHAT)

PADDED = {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
RESTARTING = {"position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}
NO_PADDING = {"attention_mask": torch.ones(1, 3).long()}
ONES = torch.ones(1, CHAT.tokens, dtype=torch.long)


def borders(*places):
    return {"cu_seq_lens_q": torch.tensor(places)}


def positions(*places):
    return {"position_ids": torch.tensor([places])}


MASKS = [
    torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]]),
    torch.tensor([[0] * 4] * 2),
    torch.tensor([[1, 1, 2, 1], [1] * 4]),
    *(torch.ones(2, 4), torch.ones(2, 9).long(), torch.ones(2, 1, 4, 4).long(), {"full_attention": None}),
]

LLAMA, BERT = ("llama", "causal"), ("bert", SEQUENCE)

REFUSED = [
    *((model, ROWS, {"attention_mask": mask}, "attention_mask") for model in (LLAMA, BERT) for mask in MASKS),
    *((LLAMA, ROW, borders(*places), "cu_seq_lens_q") for places in ([0, 2], [0, 4], [0, 2, 1, 3], [1, 3])),
    (LLAMA, ROW, borders(0, 3) | {"cu_seq_lens_k": torch.tensor([0, 1, 3])}, "cu_seq_lens_k"),
    (LLAMA, ROW, borders(0, 3) | positions(0, 1, 0), "position_ids"),
    (LLAMA, ROW, {"position_ids": torch.arange(3)}, "position_ids"),
    (LLAMA, ROW, positions(0, 1, 2) | {"seq_idx": torch.tensor([[0, 0, 1]])}, "position_ids"),
    (LLAMA, ROW, positions(0, 1, 2) | {"seq_lengths": torch.tensor([[2, 1]])}, "position_ids"),
    (LLAMA, ROW, {"encoder_hidden_states": torch.zeros(1, 3, 4)}, "encoder_hidden_states"),
    (LLAMA, ROW, {"input_ids": None}, "input_ids"),
    (LLAMA, ROW, {"attention": "eager"}, "attention"),
    (LLAMA, ROW, {"training": True}, "position_ids"),
    (("bart", "causal"), ROW, positions(5, 6, 5) | borders(0, 2, 3), "position_ids"),  # which counts by itself
    (LLAMA, ROWS, RESTARTING | {"logits_to_keep": 1}, "logits_to_keep"),
    *((model, ROWS, PADDED | RESTARTING, "position_ids") for model in (LLAMA, BERT)),
    (BERT, ROWS, RESTARTING | {"attention_mask": torch.ones(2, 4).long()}, "position_ids"),
    *((model, ROWS, PADDED | borders(0, 2, 4), "cu_seq_lens_q") for model in (LLAMA, BERT)),
    (BERT, ROW, borders(0, 1, 3), "cu_seq_lens_q"),
    (("llama", SEQUENCE), TREE, {}, "parents"),
    (("bert", "masked"), TREE, {}, "parents"),
    *((LLAMA, ROW, borders(0, 3) | {name: DynamicCache()}, name) for name in CACHES),
    *((LLAMA, ROW, positions(0, 1, 0) | mask | {"use_cache": True}, "use_cache") for mask in ({}, NO_PADDING)),
    (LLAMA, ROW, positions(0, 1, 0) | NO_PADDING | {"past_key_values": DynamicCache()}, "past_key_values"),
    (("mamba", "causal"), ROW, positions(0, 1, 0) | {"cache_params": [torch.zeros(1)]}, "cache_params"),
    (LLAMA, ROW, {"attention_mask": torch.tensor([[1, 1, 2]]), "use_cache": True}, "attention_mask"),
    (LLAMA, ROWS, PADDED | RESTARTING | {"use_cache": True}, "position_ids"),
    (LLAMA, ROW, {"past_key_values": DynamicCache(), "training": True}, "past_key_values"),
    (("bert", "masked"), ROWS, PADDED | {"labels": torch.full((2, 4), 9), "training": True}, "labels"),
    (("llama", SEQUENCE), ROWS, PADDED | {"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 64)}, "inputs_embeds"),
    *((("gpt2", "causal"), TREE, {name: ONES}, name) for name in ("labels", "seq_idx")),
    (("gpt2", "causal"), TREE, borders(0, 63), "cu_seq_lens_q"),
    (("gpt2", "causal"), TREE, {"attention_mask": 1 - ONES.tril()}, "parents"),
    (("gpt2", "causal"), TREE, {"parents": None}, "segment_lengths"),
    (("gpt2", "causal"), TREE, {"parents": torch.tensor([-1, 2, 0, 2, 2, 4])}, "parents"),
    (("gpt2", "causal"), TREE, {"segment_lengths": [63]}, "parents"),
    (("gpt2", "causal"), TREE, {"segment_lengths": torch.tensor([9, 14, 6, 17, 5, 11])}, "segment_lengths"),
    (("gpt2", "causal"), TREE, {"position_ids": ONES.cumsum(1) - 1}, "position_ids"),
    (("gpt2", "causal"), TREE, {"input_ids": None}, "input_ids"),
]


@pytest.mark.parametrize(("model", "inputs", "changes", "argument"), REFUSED)
def test_what_does_not_fit_is_refused(model, inputs, changes, argument):
    model, changes = patched_tiny(*model, padded=model[1] == "masked", num_hidden_layers=1), dict(changes)
    model.train(changes.pop("training", False))
    if other := changes.pop("attention", None):
        model.set_attn_implementation(other)
    with pytest.raises(hfp.PackingError, match=rf"^(column ')?{argument}'?: expected"):
        model(**inputs | changes)


def test_borders_given_again_are_checked_again():
    """The same tensor with other tokens is not taken for the one that was checked."""
    model, given = patched("Llama").eval(), torch.tensor([0, 2, 5], dtype=torch.int32)
    model(torch.tensor([[5, 6, 7, 8, 9]]), cu_seq_lens_q=given)
    with pytest.raises(hfp.PackingError, match="rise from 0 to 4 tokens"):
        model(torch.tensor([[5, 6, 7, 8]]), cu_seq_lens_q=given)


def test_modules_that_run_by_segment_refuse_calls_that_were_not_proven():
    model = patched_tiny("jamba", "causal", num_hidden_layers=1)
    name = route_of(model).by_segment[0].name
    module, hidden = model.get_submodule(name), torch.zeros(1, 5, 64)
    with pytest.raises(hfp.PackingError, match=rf"JambaMambaMixer \({name}\) was called outside its model"):
        module(hidden)
    unknown = "JambaMambaMixer: the tensor 1.gate of shape .* did not occur when"
    with within(current_layout, Layout.of([2, 3])), pytest.raises(hfp.PackingError, match=unknown):
        module(hidden_states=hidden, gate=torch.zeros(1, 5))


def test_more_arguments_than_a_forward_has():
    with pytest.raises(hfp.PackingError, match="forward: expected at most"):
        patched_tiny(*LLAMA, num_hidden_layers=1)(ROW["input_ids"], *[None] * 19)
