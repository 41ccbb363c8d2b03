"""The table of kernels: calls with the signatures of all versions, the choice, failures, and what is said of them.

The kernels need CUDA. The functions of kernel_stand_ins stand in their place.
"""

import re
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from any_strategy import few_examples
from forms import check as check_documents
from forms import tree
from hypothesis import given
from hypothesis import strategies as st
from kernel_stand_ins import (
    KNOWN,
    LISTS,
    NEWEST,
    TORCH,
    VARLEN,
    assert_equal_with_gradients,
    choose,
    of_flash_attn,
    stand_in,
    tensors,
)
from model_inputs import CHAT, inputs_of
from patched_models import patched
from tiers import fast_only, slow
from tiny_models import build
from training_by_hand import batch_of
from tree_rows import forests

import hf_packing as hfp
from hf_packing.attention import exact, function, kernels, patch, prove_on_batch
from hf_packing.attention.exact import TracedRow, attend_exactly
from hf_packing.attention.kernels import FlexKernel, VarlenKernel, fallbacks, kernel_of
from hf_packing.attention.kinds.split import SplitLayout, exchange_of
from hf_packing.attention.kinds.trees import TreeLayout
from hf_packing.attention.layout import Layout
from hf_packing.attention.route import route_of
from hf_packing.planning.rank_layout import RowPart, lay_out
from hf_packing.trees.segments import TreeSegments
from tools.kernel_signatures import PAGE, call, newest_of_each_minor, with_tables
from tools.tiny_model import tiny_model

pytestmark = pytest.mark.usefixtures("on_gpu")


def test_all_signatures_are_called():
    assert 6 <= len(VARLEN) <= sum(map(len, KNOWN.values()))


LENGTHS = [5, 3, 4]

ARGUMENTS = {"window": 3, "softcap": 2.0}


@pytest.mark.parametrize(("name", "signature"), VARLEN)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("asked", [(), ("window",), ("softcap",), ("window", "softcap")])
def test_a_call_is_right_or_refused(name, signature, is_causal, asked):
    """In compiled code, too, which knows of the row only the borders and the longest length."""
    kernel = stand_in(name, signature)
    how = {each: ARGUMENTS[each] for each in asked}
    if refusal := kernel.refusal(call(*asked)):
        assert asked or refusal == "takes no scale"
        return
    row = Layout.of(LENGTHS)
    how |= {"scale": 0.3, "is_causal": is_causal}
    for dims in ((16, 16), (12, 6)):
        inputs = tensors(*dims, tokens=sum(LENGTHS))
        for each in (row, TracedRow(row.cu_seq_lens, max(LENGTHS))):
            assert_equal_with_gradients(
                kernel.attend(*inputs, each, **how), attend_exactly(*inputs, row, **how), inputs
            )


TORCH_KERNEL = "torch varlen_attn"

EXACT = "exact attention, segment by segment"


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        (TORCH_KERNEL, call("softcap"), "takes no softcap"),
        (TORCH_KERNEL, call("softcap", "sinks"), "takes no softcap and no sinks"),
        (TORCH_KERNEL, call(dtype=torch.float32), "takes no torch.float32"),
        (TORCH_KERNEL, call(head_dim=512), "takes head dimensions up to 256"),
        (TORCH_KERNEL, call("chunk"), "takes no chunk"),
        (TORCH_KERNEL, call("window"), ""),
        (TORCH_KERNEL, call("window on both sides"), "takes no window on both sides"),
        ("flash-attn 3", call("dropout"), "takes no dropout"),
        ("flash-attn 4", call("dropout"), "takes no dropout"),
        ("flash-attn 4", call("sinks"), "takes no sinks"),
        ("flash-attn 4", call("window", "softcap"), ""),
        ("kernels-community/vllm-flash-attn3", call("sinks"), "takes no sinks"),
    ],
)
def test_what_the_newest_kernels_take(name, asked, reason):
    assert stand_in(name, [*KNOWN[name].values()][-1]).refusal(asked) == reason
    assert VarlenKernel(name, lambda: None).refusal(asked) == "not installed"


def test_what_flex_attention_does_not_take():
    assert FlexKernel().refusal(call("window", "chunk", "softcap", "sinks")) == ""
    assert FlexKernel().refusal(call("window on both sides")) == "takes no window on both sides"


def test_dropout_and_determinism_are_passed_on():
    seen = []
    kernel = stand_in("flash-attn 2", NEWEST, lambda given: seen.append(given) or given["q"])
    torch.use_deterministic_algorithms(True)
    try:
        kernel.attend(*tensors(), Layout.of([12]), scale=1.0, is_causal=True, dropout=0.1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (seen[0]["deterministic"], seen[0]["dropout_p"]) == (True, 0.1)


def test_masks_are_made_with_arguments_that_all_versions_have():
    ours = ["self", "seq_lengths", *LISTS, "BLOCK_SIZE", "mask_mod"]  # by their places
    for signature in KNOWN["torch BlockMask"].values():
        positional, _, others = re.sub(r"=(\([^)]*\)|[^,]+)", "", signature).partition(", *")
        assert positional.split(", ") == ours
        assert others.count(", ") == signature.partition(", *")[2].count("=")
    for signature in KNOWN["torch flex_attention"].values():
        passed = {"score_mod", "block_mask", "scale", "enable_gqa", "return_aux", "kernel_options"}
        assert passed <= set(re.findall(r"\w+", signature))


def test_the_page_has_the_tables_of_these_signatures():
    page = PAGE.read_text()
    assert with_tables(page, KNOWN) == page, "run python -m tools.kernel_signatures --tables"


def test_the_newest_release_of_each_minor_version():
    listed = ["2.13.0+cpu", "2.13.0", "2.9.1", "2.9.0", "2.5.1", "2.10.0", "2.14.0rc1"]
    assert newest_of_each_minor(listed, "2.6") == ["2.9.1", "2.10.0", "2.13.0"]
    assert newest_of_each_minor([*listed, "2.14.0b7"], "2.6", prereleases=True) == ["2.14.0rc1"]


class FlexOnCpu(FlexKernel):
    """FlexAttention in place of exact attention, so that it is quick and gives gradients on a CPU."""

    attend = staticmethod(attend_exactly)


SECOND = stand_in(TORCH_KERNEL, TORCH["2.13.0"])


def use(*table):
    kernels.KERNELS[:] = table
    kernels._chosen.clear()


def test_the_first_kernel_that_takes_a_call_runs_it():
    absent = VarlenKernel("flash-attn 3", lambda: None)
    use(absent, stand_in("flash-attn 2", NEWEST), SECOND, FlexOnCpu())
    assert choose() == choose(window=3) == choose(softcap=2.0) == "flash-attn 2"
    assert choose(sinks=torch.zeros(4)) == "FlexAttention"
    use(absent, SECOND, FlexOnCpu())
    assert choose() == TORCH_KERNEL
    with pytest.warns(UserWarning, match="attention runs segment by segment"):
        assert choose(dropout=0.1) is None


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"dtype": torch.float32}, "takes no torch.float32.*Kernels need bfloat16 or float16"),
        ({"dropout": 0.1}, "takes no dropout.*for packed rows with it, run `pip install flash-attn"),
    ],
)
def test_a_warning_says_why_there_is_no_kernel(change, advice):
    use(SECOND)
    with pytest.warns(UserWarning, match=f"^attention runs segment by segment, which is exact, but slow .*{advice}"):
        assert choose(**change) is None
    assert choose(**change, window=3) is None, "without another warning"
    assert choose() == TORCH_KERNEL


def has_another_scale(given):
    return of_flash_attn(given | {"softmax_scale": 2 * given["softmax_scale"]})


def forgets_a_border(given):
    borders = given["cu_seqlens_q"][[0, -1]]
    joined = {f"cu_seqlens_{side}": borders for side in "qk"} | {f"max_seqlen_{side}": int(borders[1]) for side in "qk"}
    return of_flash_attn(given | joined)


def has_no_gradient_for_keys(given):
    return of_flash_attn(given | {"k": given["k"].detach()})


def llama(**changes):
    return tiny_model("llama", "causal", **changes)


def falls_back(name="flash-attn 2", reason=".*", to=TORCH_KERNEL):
    return pytest.warns(UserWarning, match=rf"^an attention kernel failed \({name}: {reason}\)\. {to} runs instead")


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (forgets_a_border, "changing one document changed the logits of another.*"),
        (has_no_gradient_for_keys, "a document's gradients differ by.*"),
        slow(has_another_scale, "a document's logits differ by.*"),
        slow(lambda _: 1 / 0, ".*division by.*"),
    ],
)
def test_the_proof_of_a_model_finds_kernels_that_fail(body, reason):
    """And takes the next one, on the same route, or exact attention. Another model does not try them again."""
    failing = [stand_in(name, NEWEST, body) for name in ("flash-attn 3", "flash-attn 2")]
    use(*failing, SECOND)
    with falls_back(reason=f"{reason}; flash-attn 2: {reason}", name="flash-attn 3"):
        model = hfp.patch_model(llama())
    for each in (model, hfp.patch_model(llama())):
        assert (route_of(each).name, kernel_of(each)) == ("varlen", TORCH_KERNEL)
    use(*failing)
    assert kernel_of(hfp.patch_model(llama())) == EXACT


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("body", [forgets_a_border, lambda _: 1 / 0])
def test_the_first_batch_finds_kernels_that_fail(body):
    """A kernel may only run there, since the route was found on a small copy on the CPU."""
    model = hfp.patch_model(llama())
    use(stand_in("flash-attn 2", NEWEST, body), SECOND)
    with falls_back():
        proof = prove_on_batch(model, batch_of([[5, 6, 7, 8], [9, 10, 11], [9, 7, 5]]))
    assert (proof.problem, proof.kernel) == ("", TORCH_KERNEL)


TWO = {"input_ids": torch.arange(5, 30)[None], "position_ids": torch.arange(25)[None] % 13}


@pytest.mark.usefixtures("as_on_cuda")
def test_kernels_are_not_to_blame_where_exact_attention_fails_too():
    """A model that leaks is refused on every kernel; they run again, as after an error."""
    use(stand_in("flash-attn 2", NEWEST), SECOND)
    model = hfp.patch_model(llama())
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output + output.mean(1, keepdim=True))
    report = hfp.check_isolation(model)
    assert (report.isolated, report.kernel) == (False, EXACT)
    model(**TWO)
    assert kernel_of(model) == "flash-attn 2"
    with pytest.raises(ZeroDivisionError), fallbacks(model) as fall_back:
        assert 1 / (not fall_back("a reason"))
    model(**TWO)
    assert kernel_of(model) == "flash-attn 2"


@pytest.mark.survey
@pytest.mark.filterwarnings("ignore:(?!an attention kernel)")  # of torch, while it traces
@pytest.mark.usefixtures("as_on_cuda")
def test_compiled_code_does_not_keep_a_kernel_that_has_failed():
    model = hfp.patch_model(llama(num_hidden_layers=1))
    expected = model(**TWO).logits
    use(stand_in("flash-attn 2", NEWEST, has_another_scale))
    compiled = torch.compile(model, backend="eager")
    assert not torch.allclose(compiled(**TWO).logits, expected, atol=1e-4)
    with falls_back(to=EXACT):
        hfp.patch_model(llama())
    assert torch.allclose(compiled(**TWO).logits, expected, atol=1e-4)


@pytest.mark.usefixtures("as_on_cuda", "on_cpu")
@pytest.mark.parametrize("kernel", [stand_in("flash-attn 2", NEWEST), FlexKernel()])
@pytest.mark.parametrize("name", fast_only(["Llama", "Mistral", "Gemma2"], "Llama"))
def test_rows_of_trees_run_on_kernels(monkeypatch, name, kernel):
    use(kernel)
    stock, model = build(name, torch.float64), patched(name, torch.float64)
    monkeypatch.setattr(function, "attend_exactly", lambda *_, **__: pytest.fail("not on the kernel"))
    hfp.patch_model(model, trees=True)
    check_documents(stock, model, tree(), close=1e-5)
    report = hfp.check_isolation(model, batch=inputs_of(CHAT))
    assert report.isolated
    assert str(report).endswith(f"\nkernel: {kernel.name}")


@few_examples
@given(forests(), st.none() | st.integers(1, 9), st.sampled_from([3, 1000]))
def test_keys_are_gathered_along_paths(forest, window, most):
    """In the backward pass once more, where they are many."""
    trees, how = TreeSegments(*forest), {"scale": 0.3, "is_causal": True, "window": window}
    row = (TreeLayout if trees.has_branches else Layout).of(trees)
    inputs = tensors(tokens=trees.tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MOST_KEYS", most)
        ours = stand_in("flash-attn 2", NEWEST).attend(*inputs, row, **how)
        assert_equal_with_gradients(ours, attend_exactly(*inputs, row, **how), inputs)


@pytest.mark.parametrize(("name", "signature"), VARLEN)
@pytest.mark.parametrize("how", [{"is_causal": True}, {"is_causal": True, "window": 3}, {"is_causal": False}], ids=str)
def test_the_parts_of_a_row_on_several_ranks_are_right_or_refused(name, signature, how):
    """A piece of a document has fewer queries than keys."""
    kernel, window = stand_in(name, signature), how.get("window")
    if kernel.refusal(call(*({"window"} & how.keys()))):
        return
    lengths = [9, 1, 14, 6]
    layout, inputs = lay_out(lengths, 3, 11, linear_cost=0), tensors(tokens=sum(lengths))
    whole = attend_exactly(*inputs, Layout.of(lengths), scale=0.3, **how)
    for rank in range(3):
        row = SplitLayout.of_part(RowPart(layout, rank), torch.device("cpu"))
        own, seen = layout.places(rank), exchange_of(row, how["is_causal"], window, None).seen
        assert len(own) < len(seen)
        query, key, value = (each[:, :, places] for each, places in zip(inputs, (own, seen, seen), strict=True))
        assert_equal_with_gradients(kernel.attend(query, key, value, row, scale=0.3, **how), whole[:, :, own], inputs)


def test_the_keys_of_a_chat_are_gathered_once():
    """Its first children are in the run of their parent; otherwise n turns would gather n / 2 times their tokens."""
    row = TreeLayout.of(TreeSegments((4, 3, 2, 5, 6), (-1, 0, 1, 2, 1)))
    places, queries, keys = exact.keys_along_paths(row, True, None, None, torch.device("cpu"))
    assert (queries.cu_seq_lens.tolist(), keys.cu_seq_lens.tolist(), keys.max_length) == ([0, 14, 20], [0, 14, 27], 14)
    assert places.tolist() == [*range(14), *range(7), *range(14, 20)]


def with_first_keys(given):
    """A kernel in which the queries of a segment belong to its first keys, as in flash-attn before 2.1."""
    first, keys = (given[f"cu_seqlens_{side}"].tolist() for side in "qk")
    queries = [b - a for a, b in pairwise(first)]
    places = [start + each for start, number in zip(keys, queries, strict=False) for each in range(number)]
    own = {f"cu_seqlens_{side}": given["cu_seqlens_q"] for side in "qk"}
    own |= {f"max_seqlen_{side}": given["max_seqlen_q"] for side in "qk"}
    return of_flash_attn(given | own | {each: given[each][places] for each in "kv"})


@pytest.mark.usefixtures("as_on_cuda")
def test_the_proof_of_trees_finds_kernels_that_are_right_only_in_packed_rows():
    use(stand_in("flash-attn 2", NEWEST, with_first_keys), FlexOnCpu())
    model = patched("Llama")
    with falls_back(to="FlexAttention"):
        hfp.patch_model(model, trees=True)
    model(**inputs_of(CHAT))
    assert kernel_of(model) == "FlexAttention"


def test_packages_are_loaded_if_they_are_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=print))
    for found in (print, None):
        assert kernels._find("flash_attn") is found
        assert kernels._find("flash_attn", "absent") is None
        monkeypatch.setitem(sys.modules, "flash_attn", None)


HUB = "kernels-community/flash-attn2"


def test_a_hub_kernel_that_the_model_was_loaded_with_comes_first(monkeypatch):
    """transformers has loaded it; no other name is ever asked for, and no other model runs on it."""
    layer, other, asked = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), []
    kernel = stand_in(HUB, KNOWN[HUB][next(iter(KNOWN[HUB]))])
    loaded = (None, kernel.function, None, None, None), None
    monkeypatch.setattr(kernels, "lazy_import_flash_attention", lambda name: asked.append(name) or loaded)
    use(SECOND)
    assert choose(layer=layer) == TORCH_KERNEL
    assert asked == []
    setattr(layer, kernels.HUB_KERNEL, HUB)
    assert choose(layer=layer) == HUB
    assert asked == [HUB]
    assert choose() == choose(layer=other) == TORCH_KERNEL
    with pytest.warns(UserWarning, match="attention runs segment by segment"):  # nor is it tried for another model
        assert choose(layer=other, dropout=0.1) is None
    monkeypatch.setattr(kernels, "lazy_import_flash_attention", lambda _: int("not trusted"))  # a ValueError
    setattr(other, kernels.HUB_KERNEL, "someone/else")
    assert choose(layer=other) == TORCH_KERNEL


@pytest.mark.parametrize(("attention", "asked"), [("sdpa", None), (HUB, HUB)])
def test_patch_model_asks_for_the_kernel_of_the_model(attention, asked):
    model = llama()
    model.config._attn_implementation_internal = attention
    patch._use_hub_kernels_of(model)
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaAttention"]
    assert [getattr(layer, kernels.HUB_KERNEL, None) for layer in layers] == [asked] * 4


def test_the_report_names_the_kernel(request, monkeypatch):
    """On a CPU, no kernel is looked for."""
    with monkeypatch.context() as on_cpu:
        on_cpu.setattr(kernels, "DEVICES", {"cuda"})
        on_cpu.setattr(kernels, "_choose", lambda *_: pytest.fail("looked for"))
        model = patched("Llama", trees=True)
        model(**inputs_of(CHAT))
        assert kernel_of(model) == "exact attention, segment by segment"
        report = hfp.check_isolation(model)
    assert report.kernel == kernel_of(model) == EXACT
    assert str(report).endswith(f"\nkernel: {EXACT}")
    request.getfixturevalue("as_on_cuda")
    use(SECOND)
    report = hfp.check_isolation(model)
    assert report.isolated
    assert report.kernel == kernel_of(model) == TORCH_KERNEL
    assert hfp.check_isolation(model, batch=batch_of([[5, 6, 7, 8], [9, 10, 11]])).kernel == TORCH_KERNEL
    unpatched = llama()
    report = hfp.check_isolation(unpatched)
    assert report.kernel == kernel_of(unpatched) == ""
    assert "kernel" not in str(report)
