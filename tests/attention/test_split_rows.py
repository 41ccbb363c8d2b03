"""Rows on several ranks: logits and gradients of every token are those of the row on one rank."""

import json
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from tiers import rarely, slow
from tiny_models import enable_checkpointing

import hf_packing as hfp
from hf_packing.attention import inner_model, route_of
from hf_packing.attention.kinds.split import ON_RANKS, block_of
from hf_packing.columns import MAX_LENGTHS
from hf_packing.planning.lengths import Pieces
from hf_packing.planning.rank_layout import RankLayout, RowPart, lay_out, plan_exchange
from hf_packing.training.kinds.split import part_of
from tools.tiny_model import tiny_model

WINDOW = {"sliding_window": 6}
FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONG_ROPE = {"rope_parameters": FACTORS, "original_max_position_embeddings": 24}
"""Other positions in documents of more than 24 tokens than in shorter ones."""
CASES = {
    "gpt2": ("gpt2", "causal", {}),
    "llama": ("llama", "causal", {}),
    "llama, checkpointing": ("llama", "causal", {}),
    "llama, LoRA": ("llama", "causal", {}),
    "qwen3": ("qwen3", "causal", {}),
    "phi3, scaled positions": ("phi3", "causal", LONG_ROPE),
    "mistral, windows": ("mistral", "causal", WINDOW),
    "gemma2, soft caps, windows": ("gemma2", "causal", WINDOW),
    "gpt_oss, sinks": ("gpt_oss", "causal", WINDOW),
    "llama4, chunks": ("llama4_text", "causal", {"attention_chunk_size": 7}),
    "deepseek_v3": ("deepseek_v3", "causal", {}),
    "qwen3_moe": ("qwen3_moe", "causal", {}),
    "mamba": ("mamba", "causal", {}),
    "mamba2": ("mamba2", "causal", {}),
    "jamba": ("jamba", "causal", {}),
    "qwen3_next": ("qwen3_next", "causal", {}),
    "lfm2": ("lfm2", "causal", {}),
    "bert": ("bert", "masked", {}),
    "modernbert, windows": ("modernbert", "masked", {"local_attention": 8}),
}
FAST = ["llama", "llama, checkpointing"]
ROWS = {
    "odd lengths, one-token documents": ([7, 1, 13, 9, 1, 6], None),
    "a document over all ranks": ([1, 29, 3], None),
    "a document over three ranks of four": ([3, 20, 9], None),
    "borders on the edges of slices": ([8, 16, 8], None),
    "no exchange": ([8, 8, 8, 8], None),
    "uneven slices": ([7, 1, 13, 9, 1, 6], [3, 4, 20]),
    "planned": ([23, 2, 1, 4, 3, 2, 6], "planned"),
}


def layout_of(lengths, cuts, ranks):
    """Equal slices of the row, slices that begin at some places, or as planned."""
    tokens, begins = sum(lengths), np.cumsum([0, *lengths])
    if cuts == "planned":
        return lay_out(lengths, ranks, -(-tokens // ranks) + 1, 8.0)
    cuts = [tokens * rank // ranks for rank in range(1, ranks)] if cuts is None else cuts[: ranks - 1]
    borders = np.unique([*begins, *cuts])
    document = np.searchsorted(begins, borders[:-1], side="right") - 1
    pieces = Pieces(document, borders[:-1] - begins[document], np.diff(borders))
    return RankLayout(np.array(lengths), pieces, np.searchsorted(cuts, borders[:-1], side="right"), ranks)


@contextmanager
def all_float64():
    """Within the block, code of models that computes in float32 computes in float64, so that all differences are those
    of float64."""
    before = torch.float32, torch.float, torch.Tensor.float
    torch.float32, torch.float, torch.Tensor.float = torch.float64, torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = before


def run(model, inputs, weights):
    """The logits, and the gradients of a weighted sum of them."""
    model.zero_grad()
    logits = model(**inputs).logits[0]
    (logits * weights[:, None] * torch.arange(logits.shape[-1]).cos()).sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return logits.detach(), found


def needs_others(layout):
    return plan_exchange(layout).num_received > 0


def alone(part):
    """The part as a packed row of its own, whose tokens see no others: the exchange is left out."""
    return {**part, **dict.fromkeys(MAX_LENGTHS, int(part["max_length_q"]))} | {"position_ids": None, "seq_idx": None}


def compare(folder, names):
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    rank, ranks = state.process_index, state.num_processes
    block_of(ranks)
    found = {}
    for name in names:
        architecture, kind, changes = CASES[name]
        model = tiny_model(architecture, kind, **changes).double().train()
        model.set_experts_implementation("eager")  # the grouped one has no float64
        if name.endswith("checkpointing"):
            enable_checkpointing(model)
        if name.endswith("LoRA"):
            adapters = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
            model = get_peft_model(model, adapters).double()
        hfp.patch_model(model)
        facts = route_of(inner_model(model)).facts
        facts.proven[ON_RANKS] = ranks
        for row, (lengths, cuts) in ROWS.items():
            generator = np.random.default_rng(0)
            batch = hfp.PackingCollator()([{"input_ids": generator.integers(8, 100, length)} for length in lengths])
            del batch["labels"]
            weights = torch.from_numpy(generator.normal(size=sum(lengths)))
            layout = layout_of(lengths, cuts, ranks)
            places = torch.from_numpy(layout.places(rank))
            part = part_of(batch, RowPart(layout, rank))
            with all_float64():
                expected, wanted = run(model, batch, weights)
                with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
                    logits, own = run(model, part, weights[places])
            gradients = torch.cat([gradient.flatten() for gradient in wanted.values()])
            got = torch.cat([own.get(each, torch.zeros_like(like)).flatten() for each, like in wanted.items()])
            dist.all_reduce(got)
            apart = float((got - gradients).abs().max() / gradients.abs().max())
            without = run(model, alone(part), weights[places])[0] if needs_others(layout) else expected[places] + 1
            changed = (without - expected[places]).abs().max() > 1e-3
            dist.all_reduce(seen := changed.int(), op=dist.ReduceOp.MAX)
            apart = max(apart, float((logits - expected[places]).abs().max()))
            found[f"{name}: {row}"] = apart, bool(seen), exchange.call_count
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("ranks", "names"),
    [slow(2, FAST), slow(4, FAST), *rarely([(4, [*CASES])])],
    ids=["few models on 2", "few models on 4", "all models on 4"],
)
def test_outputs_and_gradients_are_those_of_one_rank(ranks, names, tmp_path):
    """The exchange runs again where a checkpointed layer does."""
    on_ranks(compare, tmp_path, names, ranks=ranks)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == len(names) * len(ROWS)
        for name, (apart, seen, _) in found.items():
            assert apart < 1e-12, (name, apart)
            assert seen, f"{name} would also pass without an exchange"
        if "llama" in names:
            kept, again = (found[f"{name}: planned"][2] for name in ("llama", "llama, checkpointing"))
            assert 2 * again == 3 * kept > 0
