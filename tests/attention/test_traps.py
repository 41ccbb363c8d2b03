"""Setups of stock transformers that let packed documents read each other: check_isolation sees each of them."""

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from patched_models import patched
from tiers import fast_only
from tiny_models import build
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TrlCollator

import hf_packing as hfp
from hf_packing.attention.exact import attend_exactly
from hf_packing.attention.layout import Layout


def stacked(rows, names=("input_ids", "position_ids")):
    return {name: torch.tensor([row[name] for row in rows]) for name in names}


def with_mask(mask, columns=0):
    """A function that stacks rows, with a mask and columns of padding."""

    def collate(rows):
        batch = {name: functional.pad(value, (0, columns)) for name, value in stacked(rows).items()}
        return batch if mask is None else batch | {"attention_mask": mask(batch["input_ids"], rows)}

    return collate


def ones(ids, _):
    return torch.ones_like(ids)


def ones_and_zeros(ids, _):
    return torch.ones_like(ids).index_fill(1, torch.arange(ids.shape[1])[-5:], 0)


def numbers(_, rows):
    """1, 1, 2, 2, ..., the number of the document."""
    return torch.tensor([[number + 1 for number, n in enumerate(row["seq_lengths"]) for _ in range(n)] for row in rows])


def with_positions_that_go_on(rows):
    batch = stacked(rows)
    return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}


LEAKS = {
    "a mask of ones": with_mask(ones),
    "a mask of a padded packed row": with_mask(ones_and_zeros, 5),
    "a mask of numbers": with_mask(numbers),
    "positions that go on": with_positions_that_go_on,
    "input_ids alone": lambda rows: stacked(rows, ["input_ids"]),
}
HOLDS = {"positions": stacked, "right padding without a mask": with_mask(None, 5), "ours": hfp.PackingCollator()}


@pytest.mark.parametrize("attention", fast_only(["eager", "sdpa"], "sdpa"))
@pytest.mark.parametrize("setup", [*LEAKS, *HOLDS])
def test_stock_models_leak_or_hold(setup, attention):
    model = build("Llama", num_hidden_layers=1, use_cache=False, attn_implementation=attention)
    report = hfp.check_isolation(model, collator=(LEAKS | HOLDS)[setup], rows=2 if setup == "positions" else 1)
    assert report.isolated == (setup in HOLDS)
    assert report.isolated or report.max_leak > 1e-2


@pytest.mark.parametrize("trap", LEAKS)
def test_patched_is_right_or_raises(trap):
    model = patched("Llama")
    if trap in ("a mask of a padded packed row", "a mask of numbers"):
        words = "position_ids: expected positions that rise by 1|attention_mask: expected only 1 for tokens and 0"
        with pytest.raises(hfp.PackingError, match=words):
            hfp.check_isolation(model, collator=LEAKS[trap])
    else:  # where nothing tells of documents, they are one
        assert hfp.check_isolation(model, collator=LEAKS[trap]).isolated == (trap == "a mask of ones")


def test_two_rows_of_positions_leak_with_flash_attention(monkeypatch):
    """transformers looks for packed rows only where there is one; its kernels are stood in for here."""

    def plain(q, k, v, *_, softmax_scale=None, causal=True, **__):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        how = {"is_causal": causal, "scale": softmax_scale, "enable_gqa": True}
        return functional.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

    def varlen(q, k, v, cu_seqlens_q, *_, softmax_scale=None, causal=True, **__):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        layout = Layout.of(cu_seqlens_q.diff().tolist())
        attended = attend_exactly(q, k, v, layout, scale=softmax_scale or q.shape[-1] ** -0.5, is_causal=causal)
        return attended[0].transpose(0, 1)

    kernels = plain, varlen, None, flash_utils._pad_input, flash_utils._unpad_input
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    AttentionInterface.register("stand_in", flash_attention_forward)
    AttentionMaskInterface.register("stand_in", flash_attention_mask)
    model = build("Llama", torch.bfloat16, num_hidden_layers=1, use_cache=False)
    model.set_attn_implementation("stand_in")
    assert hfp.check_isolation(model, collator=stacked).isolated
    assert not hfp.check_isolation(model, collator=stacked, rows=2).isolated
    hfp.patch_model(model)
    assert hfp.check_isolation(model, collator=stacked, rows=2).isolated
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)


@pytest.mark.parametrize("name", fast_only(["Llama", "Mistral", "Gemma2", "GptOss"], "Llama"))
def test_collators_of_others_on_patched_models(name):
    model = patched(name)
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    trl = TrlCollator(pad_token_id=0, padding_free=True)
    assert hfp.check_isolation(model, collator=trl).isolated
    assert hfp.check_isolation(model, collator=trl, rows=2).isolated

    def one_document_a_row(rows):
        return flattening(
            [
                {"input_ids": tokens.tolist()}
                for row in rows
                for tokens in torch.tensor(row["input_ids"]).split(list(row["seq_lengths"]))
            ]
        )

    assert hfp.check_isolation(model, collator=one_document_a_row).isolated
