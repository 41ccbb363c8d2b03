"""Rows of trees on kernels that take other borders for keys than for queries: runs, faults, and models.

The kernels need CUDA. The functions of kernel_stand_ins stand in their place.
"""

from itertools import pairwise

import pytest
import torch
from compare_trees import CHAT, inputs_of
from forests import forests
from forms import check as check_documents
from forms import tree
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_stand_ins import NEWEST, TORCH, assert_equal_with_gradients, choose, half, of_flash_attn, stand_in, tensors
from patched_models import patched
from tiers import fast_only
from tiny_models import SUPPORTED, build

import hf_packing as hfp
from hf_packing.attention import choose_kernel, kernel_trials, path_keys, tree_attention
from hf_packing.attention.exact_tree_attention import attend_along_paths
from hf_packing.attention.kernel_trials import fails_trial
from hf_packing.attention.kernels import FlexKernel
from hf_packing.attention.path_keys import gather_keys, gather_plan, runs_of
from hf_packing.attention.tree_row import TreeRow
from hf_packing.attention.varlen import kernel_of
from hf_packing.trees.segments import TreeSegments

pytestmark = pytest.mark.usefixtures("on_hopper")

FLASH = stand_in("flash-attn 2", NEWEST)

limits = st.sampled_from([None, 1, 2, 3, 7])


def seen_by(trees, segment, depth, window, chunk):
    """The tokens that a token at some depth of a segment attends to, literally."""
    path = trees.path_of(segment)
    return [
        int(path[each])
        for each in range(depth + 1)
        if (window is None or depth - each < window) and (chunk is None or each // chunk == depth // chunk)
    ]


@given(forests(), limits, limits)
def test_every_query_has_the_keys_of_its_path(forest, window, chunk):
    trees = TreeSegments(*forest)
    runs = list(runs_of(trees, window, chunk))
    assert [place for run in runs for place in range(run.begin, run.end)] == list(range(trees.tokens))
    segment_of = [segment for segment, length in enumerate(trees.lengths) for _ in range(length)]
    for run in runs:
        queries = run.end - run.begin
        for number, token in enumerate(range(run.begin, run.end)):
            last = len(run.keys) - queries + number
            seen = run.keys[max(last - window + 1, 0) if window else 0 : last + 1].tolist()
            assert seen == seen_by(trees, segment_of[token], int(trees.position_ids[token]), window, chunk)
        of_first_query = len(run.keys) - queries + 1
        assert window is None or of_first_query <= window, "no key is gathered in vain"


def test_first_children_are_in_the_run_of_their_parent():
    """Without this, a chat of n turns would gather about n / 2 times its tokens."""
    chain = TreeSegments((4, 3, 2, 5), (-1, 0, 1, 2))
    assert [(run.begin, run.end, len(run.keys)) for run in runs_of(chain, None, None)] == [(0, 14, 14)]
    runs = [(run.begin, run.end, len(run.keys)) for run in runs_of(CHAT, None, None)]
    assert runs == [(0, 23, 23), (23, 46, 32), (46, 63, 32)]


@given(forests(), st.integers(1, 30))
def test_calls_gather_few_keys(forest, most):
    row = TreeRow.of(TreeSegments(*forest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_keys, "MOST_KEYS", most)
        plan = gather_plan(row, None, None, torch.device("cpu"))
    assert [token for each in plan for token in range(each.begin, each.end)] == list(range(row.tokens))
    for each in plan:
        assert each.cu_seq_lens_q.dtype == each.cu_seq_lens_k.dtype == torch.int32
        assert len(each.places) <= most or len(each.cu_seq_lens_k) == 2
        assert int(each.cu_seq_lens_k[-1]) == len(each.places)
        assert int(each.cu_seq_lens_q[-1]) == each.end - each.begin
    for one, other in pairwise(plan):
        assert len(one.places) + int(other.cu_seq_lens_k[1]) > most, "no call is smaller than it has to be"
    assert gather_plan(row, None, None, torch.device("cpu")) is plan


def check(kernel, trees, **how):
    """Compare a kernel with exact attention, in outputs and gradients."""
    inputs, row, how = tensors(tokens=trees.tokens), TreeRow.of(trees), {"scale": 0.3, **how}
    ours, expected = kernel.attend_in_trees(*inputs, row, dropout=0.0, **how), attend_along_paths(*inputs, row, **how)
    assert_equal_with_gradients(ours, expected, inputs)


@settings(max_examples=25)
@given(forests(), limits, limits, st.sampled_from([3, 20, 1000]))
def test_random_trees(forest, window, chunk, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_keys, "MOST_KEYS", most)
        check(FLASH, TreeSegments(*forest), window=window, chunk=chunk)


def test_keys_of_several_calls_are_gathered_again(monkeypatch):
    """The backward pass runs each call once more, so that only its own gathered keys are in memory."""
    calls = []
    kernel = stand_in("flash-attn 2", NEWEST, lambda given: calls.append(len(given["k"])) or of_flash_attn(given))
    check(kernel, CHAT)
    (keys,) = calls
    monkeypatch.setattr(path_keys, "MOST_KEYS", 40)
    calls.clear()
    check(kernel, CHAT)
    assert sorted(calls) == [23, 23, 32, 32, 32, 32]
    assert sum(calls) == 2 * keys
    calls.clear()
    with torch.no_grad():
        kernel.attend_in_trees(*tensors(tokens=CHAT.tokens), TreeRow.of(CHAT), scale=0.3)
    assert sum(calls) == keys


def test_gradients_of_shared_keys_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    key = torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = gather_keys(key, torch.tensor([0] * 600 + [1]))
    gathered.backward(torch.ones_like(gathered))
    assert key.grad.flatten().tolist() == [600, 1]
    assert key.grad.dtype == torch.bfloat16


def with_first_keys(given):
    """A kernel in which the queries of a segment belong to its first keys, as in flash-attn before 2.1."""
    first, keys = (given[f"cu_seqlens_{side}"].tolist() for side in "qk")
    queries = [b - a for a, b in pairwise(first)]
    places = [start + each for start, number in zip(keys, queries, strict=False) for each in range(number)]
    own = {f"cu_seqlens_{side}": given["cu_seqlens_q"] for side in "qk"}
    own |= {f"max_seqlen_{side}": given["max_seqlen_q"] for side in "qk"}
    return of_flash_attn(given | own | {each: given[each][places] for each in "kv"})


def with_window_from_first_keys(given):
    """A kernel that is right but for windows, which it measures as if queries belonged to the first keys."""
    return of_flash_attn(given) if given["window_size"][0] < 0 else with_first_keys(given)


@pytest.mark.parametrize(
    ("body", "case"),
    [(with_first_keys, {}), (with_window_from_first_keys, {"has_window": True})],
)
def test_kernels_that_are_right_only_where_queries_are_keys(body, case):
    kernel = stand_in("flash-attn 2", NEWEST, body)
    assert fails_trial(kernel, half(**case)) == ""
    assert fails_trial(kernel, half(**case, in_trees=True)).startswith("fails a trial with an error of ")
    for rows in kernel_trials._TREE_TRIALS:
        runs = list(runs_of(rows[0], None, None))
        assert any(run.end - run.begin < len(run.keys) for run in runs), "each row has fewer queries than keys"


def test_rows_and_trees_are_tried_apart():
    older = stand_in("flash-attn 2", NEWEST, with_first_keys)
    choose_kernel.KERNELS[:] = [older, stand_in("torch varlen_attn", TORCH["2.13.0"])]
    assert choose() == "flash-attn 2"
    message = r"an attention kernel failed in rows of trees \(flash-attn 2: fails a trial .*torch varlen_attn runs inst"
    with pytest.warns(UserWarning, match=message):
        assert choose(in_trees=True) == "torch varlen_attn"
    assert choose() == "flash-attn 2"


def test_dropout_runs_on_kernels_that_take_it():
    choose_kernel.KERNELS[:] = [stand_in("torch varlen_attn", TORCH["2.13.0"]), FLASH]
    assert choose(in_trees=True, dropout=0.1) == "flash-attn 2"
    given = {}
    kernel = stand_in("flash-attn 2", NEWEST, lambda own: given.update(own) or own["q"])
    kernel.attend_in_trees(*tensors(tokens=CHAT.tokens), TreeRow.of(CHAT), scale=0.3, dropout=0.1)
    assert given["dropout_p"] == 0.1
    assert "takes no dropout" in FlexKernel().refusal(half(in_trees=True, has_dropout=True))


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", fast_only(["Llama", "Mistral", "Gemma2"], "Mistral"))
def test_models_run_on_kernels(monkeypatch, name):
    choose_kernel.KERNELS[:] = [FLASH]
    layers = {} if "layer_types" in SUPPORTED[name] else {"num_hidden_layers": 1}
    stock, model = (make(name, torch.float64, **layers) for make in (build, patched))
    monkeypatch.setattr(tree_attention, "attend_along_paths", lambda *_, **__: pytest.fail("not on the kernel"))
    hfp.patch_model(model, trees=True)
    for most in (1000, 40):  # 40 keys at a time need several calls
        monkeypatch.setattr(path_keys, "MOST_KEYS", most)
        check_documents(stock, model, tree(), close=1e-5)
    report = hfp.check_isolation(model, trees=True)
    assert report.isolated
    assert str(report).endswith("\nkernel: flash-attn 2")


@pytest.mark.usefixtures("as_on_cuda")
def test_models_fall_back_to_exact_attention(monkeypatch):
    choose_kernel.KERNELS[:] = [stand_in("flash-attn 2", NEWEST, with_first_keys)]
    model, again = patched("Llama"), patched("Llama")
    with pytest.warns(UserWarning, match="attention in rows of trees runs path by path"):
        model(**inputs_of(CHAT))
    assert kernel_of(model) == "exact attention, path by path"
    monkeypatch.setattr(choose_kernel, "fails_trial", lambda *_: "")
    for each in (choose_kernel._chosen, choose_kernel._trials):
        each.clear()
    with pytest.raises(hfp.ModelNotSupportedError, match="between a tree and the document alone"):
        hfp.patch_model(again, trees=True)  # the proof would notice what the trial has caught
