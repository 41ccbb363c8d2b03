"""The table of kernels: calls with the signatures of all versions, trials, the choice, and what is said of it.

The kernels need CUDA. The functions of kernel_stand_ins stand in their place.
"""

import re
import sys
import warnings
from itertools import accumulate
from types import ModuleType

import pytest
import torch
from compare_trees import inputs_of
from kernel_stand_ins import (
    KNOWN,
    NEWEST,
    TORCH,
    VARLEN,
    assert_equal_with_gradients,
    choose,
    half,
    of_flash_attn,
    stand_in,
    tensors,
)
from patched_models import patched, patched_tiny
from tiers import fast_only

import hf_packing as hfp
from hf_packing.attention import choose_kernel, patch
from hf_packing.attention.choose_kernel import use_hub_kernel
from hf_packing.attention.exact_attention import attend_by_segment
from hf_packing.attention.exact_tree_attention import attend_along_paths
from hf_packing.attention.kernel_trials import fails_trial
from hf_packing.attention.kernels import FlexKernel, VarlenKernel
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.attention.tree_row import TreeRow
from hf_packing.attention.varlen import kernel_of, packed_varlen
from hf_packing.trees.segments import TreeSegments
from tools.kernel_signatures import CASES, PAGE, call, newest_of_each_minor, with_tables

pytestmark = pytest.mark.usefixtures("on_hopper")


def test_all_signatures_are_called():
    assert 8 <= len(VARLEN) <= sum(map(len, KNOWN.values()))


LENGTHS = [5, 3, 4]

TREES = TreeSegments((4, 5, 3, 6, 2, 4), (-1, 0, 0, 2, 2, 4))

ARGUMENTS = {"window": 3, "softcap": 2.0, "sinks": torch.arange(4) / 2, "chunk": 7, "is_causal": False}

ASKED = [(), ("window",), ("softcap",), ("window", "softcap"), ("sinks",)]


def attended(kernel, inputs, in_trees, **how):
    """By the kernel, with and without the longest length, and exactly."""
    how["scale"] = 0.3
    if in_trees:
        row = TreeRow.of(TREES)
        return kernel.attend_in_trees(*inputs, row, dropout=0.0, **how), attend_along_paths(*inputs, row, **how)
    borders, how = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32), {"is_causal": True} | how
    ours = [kernel.attend(*inputs, borders, longest, **how) for longest in (max(LENGTHS), None)]
    return *ours, attend_by_segment(*inputs, LENGTHS, **how)


@pytest.mark.parametrize(("name", "signature"), VARLEN)
@pytest.mark.parametrize(
    ("in_trees", "asked"),
    [*((False, each) for each in ASKED), *((False, ("is_causal", *each)) for each in ASKED)]
    + [*((True, each) for each in ASKED), (True, ("chunk",))],
)
def test_a_call_is_right_or_refused(name, signature, in_trees, asked):
    kernel = stand_in(name, signature)
    how = {each: ARGUMENTS[each] for each in asked}
    described = {"has_window": "window" in how, "has_softcap": "softcap" in how, "in_trees": in_trees}
    described |= {"is_causal": "is_causal" not in how}
    if kernel.refusal(call(**described, sinks=torch.bfloat16 if "sinks" in how else None)):
        assert asked or "requires" in kernel.refusal(call())
        return
    for dims in ((16, 16), (12, 6)):
        inputs = tensors(*dims, tokens=TREES.tokens if in_trees else sum(LENGTHS))
        *ours, expected = attended(kernel, inputs, in_trees, **how)
        for each in ours:
            assert_equal_with_gradients(each, expected, inputs)


HUB_SINKS, TORCH_KERNEL = "kernels-community/vllm-flash-attn3", "torch varlen_attn"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (TORCH_KERNEL, {"has_softcap": True}, "takes no softcap"),
        (TORCH_KERNEL, {"has_softcap": True, "sinks": torch.bfloat16}, "takes no softcap and no sinks"),
        (TORCH_KERNEL, {"dtype": torch.float32}, "takes no float32"),
        (TORCH_KERNEL, {"head_dim": 512}, "takes head dimensions up to 256"),
        (TORCH_KERNEL, {"has_dropout": True, "has_softcap": True}, "takes no soft cap together with dropout"),
        (TORCH_KERNEL, {"is_deterministic": True}, ""),
        (HUB_SINKS, {"sinks": torch.bfloat16}, ""),
        (HUB_SINKS, {"sinks": torch.bfloat16, "trains_sinks": True}, "takes sinks only"),
        (HUB_SINKS, {"sinks": torch.float32}, "takes sinks only"),
    ],
)
def test_what_the_newest_kernels_take(name, change, reason):
    refusal = stand_in(name, [*KNOWN[name].values()][-1]).refusal(call(**change))
    assert refusal.startswith(reason)
    assert bool(refusal) == bool(reason)


def test_capabilities_and_missing_packages(monkeypatch):
    only_hopper = VarlenKernel("flash-attn 3", lambda: print, from_capability=(9, 0), below_capability=(10, 0))
    for capability, runs in {(8, 0): False, (9, 0): True, (10, 0): False}.items():
        monkeypatch.setattr(type(call()), "capability", capability)
        assert ("does not run on a GPU of compute capability" not in only_hopper.refusal(call())) is runs
    assert VarlenKernel("flash-attn 2", lambda: None).refusal(call()) == "not installed"


def test_deterministic_kernels():
    older, newer = (stand_in("flash-attn 2", KNOWN["flash-attn 2"][version]) for version in ("2.3.6", "2.8.3.post2"))
    asked = call(is_deterministic=True)
    assert older.refusal(asked) == "takes no deterministic"
    assert not newer.refusal(asked)
    seen = []
    kernel = stand_in("flash-attn 2", NEWEST, lambda given: seen.append(given) or given["q"])
    torch.use_deterministic_algorithms(True)
    try:
        kernel.attend(*tensors(), torch.tensor([0, 12], dtype=torch.int32), 12, scale=1.0, is_causal=True, dropout=0.1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (seen[0]["deterministic"], seen[0]["dropout_p"]) == (True, 0.1)


def test_masks_are_made_with_arguments_that_all_versions_have():
    ours = {"seq_lengths", "BLOCK_SIZE", "mask_mod"}
    ours |= {
        f"{full}{side}_{each}" for full in ("", "full_") for side in ("kv", "q") for each in ("num_blocks", "indices")
    }
    for signature in KNOWN["torch BlockMask"].values():
        required = set(re.sub(r", \*|, \w+=[^,(]+|, \w+=\([^)]*\)", "", signature).split(", ")) - {"self"}
        assert required <= ours <= set(re.findall(r"\w+", signature))
    for signature in KNOWN["torch flex_attention"].values():
        assert {"score_mod", "block_mask", "scale", "enable_gqa", "return_aux", "kernel_options"} <= set(
            re.findall(r"\w+", signature)
        )


def test_the_page_has_the_tables_of_these_signatures():
    page = PAGE.read_text()
    assert with_tables(page, KNOWN) == page, "run python -m tools.kernel_signatures --tables"


def test_the_newest_release_of_each_minor_version():
    listed = ["2.13.0+cpu", "2.13.0", "2.9.1", "2.9.0", "2.5.1", "2.10.0", "2.14.0rc1"]
    assert newest_of_each_minor(listed, "2.6") == ["2.9.1", "2.10.0", "2.13.0"]


NEWEST_OF_EACH = {each.values[0]: each.values for each in reversed([*VARLEN])}


@pytest.mark.parametrize(("name", "signature"), fast_only(NEWEST_OF_EACH.values(), NEWEST_OF_EACH["flash-attn 2"]))
@pytest.mark.parametrize("in_trees", [False, True])
def test_right_kernels_pass_their_trials(name, signature, in_trees):
    kernel = stand_in(name, signature)
    random = torch.get_rng_state()
    for case in (*CASES.values(), {"sinks": torch.bfloat16}, {"is_causal": in_trees}):
        kind = half(**case, in_trees=in_trees)
        assert kernel.refusal(kind) or fails_trial(kernel, kind) == ""
    assert torch.equal(torch.get_rng_state(), random)


def changed(**changes):
    return lambda given: of_flash_attn(given | {name: make(given) for name, make in changes.items()})


WRONG = {
    "forgets the scale": (changed(softmax_scale=lambda _: None), {}),
    "forgets to be causal": (changed(causal=lambda _: False), {}),
    "has a window that is too small": (
        changed(window_size=lambda given: tuple(max(side - 1, 0) for side in given["window_size"])),
        {"has_window": True, "is_causal": False},
    ),
    "forgets the soft cap": (changed(softcap=lambda _: 0.0), {"has_softcap": True}),
    "has no gradient for keys": (changed(k=lambda given: given["k"].detach() * given["k"].mean() ** 0), {}),
    "has no gradient for keys in trees": (changed(k=lambda given: given["k"].detach()), {"in_trees": True}),
    "forgets a border": (lambda given: of_flash_attn(given | joined(given)), {}),
    "returns nan": (lambda given: of_flash_attn(given) * torch.nan, {}),
    "raises": (lambda _: of_flash_attn({}), {}),
}


def joined(given):
    borders = given["cu_seqlens_q"][[0, -1]]
    return {f"cu_seqlens_{side}": borders for side in "qk"} | {f"max_seqlen_{side}": int(borders[1]) for side in "qk"}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_kernels_fail_their_trials(fault):
    body, case = WRONG[fault]
    assert fails_trial(stand_in("flash-attn 2", NEWEST), half(**case)) == ""
    reason = fails_trial(stand_in("flash-attn 2", NEWEST, body), half(**case))
    words = {"raises": "with KeyError", "has no gradient for keys in trees": "with RuntimeError"}
    assert reason.startswith(f"fails {words.get(fault, 'a trial with an error of ')}")


def test_the_first_kernel_that_takes_a_call_runs_it():
    choose_kernel.KERNELS[:] = [
        VarlenKernel("flash-attn 3", lambda: None),
        stand_in("flash-attn 2", KNOWN["flash-attn 2"]["2.5.9.post1"]),
        stand_in("torch varlen_attn", TORCH["2.13.0"]),
        FlexOnCpu(),
    ]
    assert choose() == choose(window=3) == "flash-attn 2"
    assert choose(softcap=2.0) == choose(sinks=torch.zeros(4)) == "FlexAttention"
    choose_kernel.KERNELS[1] = VarlenKernel("flash-attn 2", lambda: None)
    choose_kernel._chosen.clear()
    assert choose() == "torch varlen_attn"
    with pytest.warns(UserWarning, match="attention runs segment by segment"):
        assert choose(dropout=0.1) is None


class FlexOnCpu(FlexKernel):
    """FlexAttention in place of exact attention, so that the trial is quick and gives gradients on a CPU."""

    def attend(self, query, key, value, cu_seq_lens, _, **options):
        return attend_by_segment(query, key, value, cu_seq_lens.diff().tolist(), **options)


def test_a_trial_is_made_once(monkeypatch):
    tried = []
    monkeypatch.setattr(choose_kernel, "fails_trial", lambda kernel, _: tried.append(kernel.name) or "")
    choose_kernel.KERNELS[:] = [stand_in("torch varlen_attn", TORCH["2.13.0"])]
    for _ in range(3):
        assert choose() == "torch varlen_attn"
    assert tried == ["torch varlen_attn"]
    choose(window=3)
    assert tried == ["torch varlen_attn"] * 2


ADVICE = [
    ({"dtype": torch.float32}, "takes no float32.*Load the model in bfloat16, or train with bf16=True or fp16=True"),
    (
        {"dropout": 0.1},
        "takes no dropout.*attention dropout in the model's configuration to 0, or run `pip install flash",
    ),
    ({"softcap": 2.0}, "Run `pip install flash-attn --no-build-isolation`, or `pip install --upgrade torch`"),
    ({"softcap": 2.0, "in_trees": True}, "Run `pip install flash-attn"),
    ({"capability": (7, 5)}, r"GPU of compute capability 7.5\). The kernels need a GPU of .* 8.0 or newer"),
]


@pytest.mark.parametrize(("change", "advice"), ADVICE)
def test_one_warning_says_why_there_is_no_kernel(monkeypatch, change, advice):
    """Rows of trees have a warning of their own."""
    change = dict(change)
    capability = change.pop("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    choose_kernel.KERNELS[:] = [stand_in("torch varlen_attn", TORCH["2.13.0"])]
    slowly = "in rows of trees runs path by path" if "in_trees" in change else "runs segment by segment"
    with pytest.warns(UserWarning, match=f"^attention {slowly}, which is exact, but slow .*{advice}"):
        assert choose(**change) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(**change, window=3) is None
    if "in_trees" in change:
        assert choose() == "torch varlen_attn"


def test_a_kernel_that_fails_is_passed_over_with_a_warning():
    broken = stand_in("flash-attn 2", NEWEST, lambda _: 1 / 0)
    choose_kernel.KERNELS[:] = [broken, stand_in("torch varlen_attn", TORCH["2.13.0"])]
    message = (
        r"an attention kernel failed \(flash-attn 2: fails with ZeroDivisionError: .*torch varlen_attn runs instead"
    )
    with pytest.warns(UserWarning, match=message):
        assert choose() == "torch varlen_attn"


def test_while_torch_compile_traces_nothing_is_tried(monkeypatch):
    choose_kernel.KERNELS[:] = [stand_in("flash-attn 2", KNOWN["flash-attn 2"]["2.5.9.post1"]), FlexOnCpu()]
    monkeypatch.setattr(choose_kernel, "fails_trial", lambda *_: pytest.fail("a trial"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose() == "flash-attn 2"
    with pytest.warns(UserWarning, match="FlexAttention: has had no trial"):
        assert choose(softcap=2.0) is None
    monkeypatch.undo()
    monkeypatch.setattr(choose_kernel, "KERNELS", [FlexOnCpu()])
    assert choose(softcap=2.0) == "FlexAttention"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose(softcap=2.0) == "FlexAttention"


def test_packages_are_loaded_if_they_are_installed(monkeypatch):
    for module, load in {
        "flash_attn_interface": choose_kernel._load_flash_attn_3,
        "flash_attn": choose_kernel._load_flash_attn_2,
        "torch.nn.attention.varlen": choose_kernel._load_torch_varlen,
    }.items():
        installed = ModuleType(module)
        installed.flash_attn_varlen_func = installed.varlen_attn = print
        monkeypatch.setitem(sys.modules, module, installed)
        assert load() is print
        monkeypatch.setitem(sys.modules, module, None)
        assert load() is None


HUB = "kernels-community/flash-attn2"


def test_a_hub_kernel_that_the_model_was_loaded_with_comes_first(monkeypatch):
    """transformers has loaded it; no other name is ever asked for, and no other model runs on it."""
    layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    kernel = stand_in(HUB, KNOWN[HUB][next(iter(KNOWN[HUB]))])
    asked = []
    monkeypatch.setattr(
        choose_kernel,
        "lazy_import_flash_attention",
        lambda name: asked.append(name) or ((None, kernel.function, None, None, None), None),
    )
    choose_kernel.KERNELS[:] = [stand_in("torch varlen_attn", TORCH["2.13.0"])]
    assert choose(layer=layer) == "torch varlen_attn"
    assert asked == []
    for _ in range(2):
        use_hub_kernel(layer, HUB)
    assert choose(layer=layer) == HUB
    assert asked == [HUB]
    assert choose() == choose(layer=other) == "torch varlen_attn"
    with pytest.warns(UserWarning, match="attention runs segment by segment"):  # nor is it tried for another model
        assert choose(layer=other, softcap=2.0) is None
    monkeypatch.setattr(choose_kernel, "lazy_import_flash_attention", lambda _: int("not trusted"))  # a ValueError
    use_hub_kernel(other, "someone/else")
    assert choose(layer=other) == "torch varlen_attn"


@pytest.mark.parametrize(("attention", "asked"), [("sdpa", []), (HUB, [HUB])])
def test_patch_model_asks_for_the_kernel_of_the_model(monkeypatch, attention, asked):
    model = tiny_model("llama", "causal")
    model.config._attn_implementation_internal = attention
    monkeypatch.setattr(patch, "find_and_prove", lambda _: None)
    hfp.patch_model(model)
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaAttention"]
    assert len(layers) > 1
    assert all(getattr(layer, choose_kernel.HUB_KERNEL, None) == (asked or [None])[0] for layer in layers)


def test_the_report_names_the_kernel(request):
    model = patched_tiny("llama", "causal", num_hidden_layers=1)
    report = hfp.check_isolation(model)
    assert report.kernel == kernel_of(model) == "exact attention, segment by segment"
    assert str(report).endswith("\nkernel: exact attention, segment by segment")
    request.getfixturevalue("as_on_cuda")
    choose_kernel.KERNELS[:] = [stand_in("torch varlen_attn", TORCH["2.13.0"])]
    report = hfp.check_isolation(model)
    assert report.isolated
    assert report.kernel == kernel_of(model) == "torch varlen_attn"
    batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10, 11]}])
    assert hfp.check_isolation(model, batch=batch).kernel == "torch varlen_attn"
    unpatched = tiny_model("llama", "causal", num_hidden_layers=1)
    report = hfp.check_isolation(unpatched)
    assert report.kernel == kernel_of(unpatched) == ""
    assert "kernel" not in str(report)


def test_no_kernel_is_looked_for_on_a_cpu(monkeypatch):
    monkeypatch.setattr("hf_packing.attention.varlen.choose_kernel", lambda *_, **__: pytest.fail("looked for"))
    packed_varlen(torch.nn.Identity(), *tensors(), None, cu_seq_lens_q=torch.tensor([0, 5, 8, 12]))
    monkeypatch.setattr("hf_packing.attention.tree_attention.choose_kernel", lambda *_, **__: pytest.fail("looked for"))
    model = patched("Llama", trees=True)
    model(**inputs_of(TREES))
    assert kernel_of(model) == "exact attention, path by path"
