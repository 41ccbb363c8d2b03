"""Attention by segment against attention over the whole row with a dense mask, in float64, outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_packing.attention import kernels
from hf_packing.attention.exact_attention import attend_by_segment


def dense(query, key, value, lengths, *, scale, is_causal, window=None, softcap=None, sinks=None):
    """One softmax over the whole row; every rule is a mask on scores written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(segment))
    back = place[:, None] - place[None, :]
    sees = segment[:, None] == segment[None, :]
    if is_causal:
        sees &= back >= 0
    if window:
        sees &= back.abs() < window
    weights = scores.masked_fill(~sees, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp().view(1, -1, 1, 1)
    return weights / total @ value


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    how = {
        "scale": draw(st.sampled_from([0.3, 1.0])),
        "is_causal": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 1, 3, 8, 50])),
        "softcap": draw(st.sampled_from([None, 2.0])),
    }
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        how["sinks"] = torch.randn(heads[0], dtype=torch.float64, requires_grad=True)
    shapes = [
        (1, heads[0], sum(lengths), 8),
        (1, heads[1], sum(lengths), 8),
        (1, heads[1], sum(lengths), draw(st.sampled_from([8, 4]))),
    ]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes], lengths, how


@settings(max_examples=200)
@given(cases())
def test_by_segment_is_dense_with_a_mask(case):
    tensors, lengths, how = case
    inputs = [*tensors, *([how["sinks"]] if "sinks" in how else [])]
    ours, theirs = attend_by_segment(*tensors, lengths, **how), dense(*tensors, lengths, **how)
    assert torch.allclose(ours, theirs, atol=1e-12)
    weight = torch.randn_like(ours)
    for ours_grad, theirs_grad in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((theirs * weight).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(ours_grad, theirs_grad, atol=1e-11)


def test_dropout_drops_and_keeps_the_mean():
    torch.manual_seed(0)
    query = key = torch.zeros(1, 1, 2000, 4)
    value = torch.ones(1, 1, 2000, 4)
    for softcap in (None, 5.0):
        output = attend_by_segment(
            query, key, value, [1000, 1000], scale=1.0, is_causal=False, softcap=softcap, dropout=0.5
        )
        assert output.std() > 0.01
        assert output.mean() == pytest.approx(1, abs=0.01)


class TestKernels:
    """The calls to the CUDA kernels, made to functions of the same signature that run anywhere."""

    def call(self, **how):
        torch.manual_seed(0)
        lengths = [5, 3, 4]
        tensors = [torch.randn(1, heads, 12, dim, dtype=torch.float64) for heads, dim in ((4, 16), (2, 16), (2, 8))]
        borders = torch.tensor([0, 5, 8, 12], dtype=torch.int32)
        ours = kernels.attend_with_kernel(*tensors, borders, 5, scale=0.3, **how)
        assert torch.allclose(ours, dense(*tensors, lengths, scale=0.3, **how))

    @pytest.mark.parametrize(
        "how",
        [
            {"is_causal": True},
            {"is_causal": False},
            {"is_causal": True, "window": 3},
            {"is_causal": False, "window": 2},
        ],
    )
    def test_torch_varlen(self, monkeypatch, how):
        def varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1), enable_gqa=False
        ):
            assert enable_gqa
            assert query.shape[-1] == value.shape[-1]
            assert max_q == max_k == 5
            assert cu_seq_q is cu_seq_k
            return self.reference(query, key, value, cu_seq_q, scale, window_size)

        monkeypatch.setattr(kernels, "flash_attn_varlen", lambda: None)
        monkeypatch.setattr(kernels, "torch_varlen", lambda: varlen_attn)
        self.call(**how)

    @pytest.mark.parametrize("softcap", [None, 2.0])
    @pytest.mark.parametrize("window", [None, 3])
    def test_flash_attn(self, monkeypatch, window, softcap):
        def flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p=0.0,
            softmax_scale=None,
            causal=False,
            window_size=(-1, -1),
            softcap=0.0,
            deterministic=False,
        ):
            assert not deterministic
            assert q.shape[-1] == v.shape[-1]
            assert (max_seqlen_q, max_seqlen_k, dropout_p) == (5, 5, 0.0)
            assert causal
            assert cu_seqlens_q is cu_seqlens_k
            return self.reference(q, k, v, cu_seqlens_q, softmax_scale, window_size, softcap or None)

        monkeypatch.setattr(kernels, "flash_attn_varlen", lambda: flash_attn_varlen_func)
        self.call(is_causal=True, window=window, softcap=softcap)

    @pytest.mark.parametrize("softcap", [None, 2.0])
    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("is_causal", [True, False])
    def test_flash_attn_3(self, monkeypatch, is_causal, window, softcap):
        def flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q=None,
            seqused_k=None,
            softmax_scale=None,
            causal=False,
            qv=None,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            window_size=(-1, -1),
            attention_chunk=0,
            softcap=0.0,
            num_splits=1,
            pack_gqa=None,
            deterministic=False,
            sm_margin=0,
        ):
            assert (seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa) == (None,) * 7
            assert (attention_chunk, num_splits, sm_margin, deterministic) == (0, 1, 0, False)
            assert (max_seqlen_q, max_seqlen_k, causal) == (5, 5, is_causal)
            assert cu_seqlens_q is cu_seqlens_k
            return self.reference(q, k, v, cu_seqlens_q, softmax_scale, window_size, softcap or None), None

        monkeypatch.setattr(kernels, "flash_attn_3_varlen", lambda: flash_attn_varlen_func)
        monkeypatch.setattr(kernels, "runs_flash_3", lambda _: True)
        monkeypatch.setattr(kernels, "flash_attn_varlen", lambda: None)
        self.call(is_causal=is_causal, window=window, softcap=softcap)

    def reference(self, query, key, value, borders, scale, sides, softcap=None):
        causal, back = sides[1] == 0, sides[0]
        tensors = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        window = None if back < 0 else back + 1
        output = dense(*tensors, borders.diff().tolist(), scale=scale, is_causal=causal, window=window, softcap=softcap)
        return output[0].transpose(0, 1)

    def test_no_kernel_on_cpu(self):
        assert not kernels.has_kernel(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 8))

    @pytest.mark.parametrize(
        ("flash", "change", "expected"),
        [
            (None, {}, True),
            (None, {"softcap": 5.0}, False),
            (None, {"dropout": 0.1}, False),
            (print, {"softcap": 5.0}, True),
            (print, {"dropout": 0.1}, True),
            (print, {"softcap": 5.0, "dropout": 0.1}, False),
            (print, {"sinks": torch.zeros(4)}, False),
            (print, {"dtype": torch.float32}, False),
            (print, {"head_dim": 12}, False),
            (print, {"head_dim": 512}, False),
            ("3", {"softcap": 5.0}, True),
            ("3", {"dropout": 0.1}, False),
            ("3", {"sinks": torch.zeros(4)}, False),
        ],
    )
    def test_which_calls_a_kernel_takes(self, monkeypatch, flash, change, expected):
        class OnCuda:
            """What `has_kernel` looks at, of a tensor on a device that this machine may not have."""

            def __init__(self, dtype=torch.bfloat16, head_dim=64):
                self.device, self.dtype, self.shape = "a card", dtype, (1, 4, 10, head_dim)

        monkeypatch.setattr(kernels, "flash_attn_varlen", lambda: None if flash == "3" else flash)
        monkeypatch.setattr(kernels, "flash_attn_3_varlen", lambda: flash if flash == "3" else None)
        monkeypatch.setattr(kernels, "runs_flash_3", lambda device: device == "a card")
        monkeypatch.setattr(kernels, "torch_varlen", lambda: print)
        monkeypatch.setattr(kernels, "runs_flash", lambda device: device == "a card")
        made = {name: change[name] for name in ("dtype", "head_dim") if name in change}
        asked = {name: value for name, value in change.items() if name not in made}
        assert kernels.has_kernel(OnCuda(**made), OnCuda(**made), **asked) is expected
