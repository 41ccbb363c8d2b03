"""Models on the meta device and sharded ones: proven on a small copy, and never left waiting."""

import copy
import subprocess
import sys
from pathlib import Path

import accelerate
import fsdp_process
import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from training_by_hand import DOCUMENTS, batch_of, losses_and_gradients

import hf_packing as hfp
from hf_packing.attention.by_segment import refuse_uneven_gathers
from hf_packing.attention.route import packed_share, route_of
from hf_packing.attention.tiny_model import tiny_model

ON_A_SMALL_ONE = "proved isolation on a small"


def on_meta(model):
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config)).eval()


def filled(model, known):
    """A model of the meta device with another one's weights and buffers."""
    model.to_empty(device="cpu")
    model.tie_weights()
    model.load_state_dict(known.state_dict())
    for name, buffer in model.named_buffers():
        buffer.copy_(known.get_buffer(name))
    return model


@pytest.mark.parametrize("architecture", ["llama", "jamba", "mamba2", "qwen3_moe", "gpt2", "opt", "gemma3_text"])
def test_a_model_patched_on_meta_is_right_once_it_has_weights(architecture):
    known = tiny_model(architecture, "causal")
    alone = [{"input_ids": torch.tensor([d]), "labels": torch.tensor([d]), "use_cache": False} for d in DOCUMENTS]
    expected, gradients = losses_and_gradients(known, alone)
    model = on_meta(known)
    with pytest.warns(UserWarning, match=ON_A_SMALL_ONE):
        assert hfp.patch_model(model, prove=False) is model
    model = filled(model, known)
    loss, found = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    assert loss == pytest.approx(expected, rel=1e-5)
    assert found.keys() == gradients.keys()
    largest = max(float(each.abs().max()) for each in gradients.values())
    assert all(float((found[name] - gradients[name]).abs().max()) <= 1e-4 * largest for name in gradients)
    report = hfp.check_isolation(model)
    assert report.isolated
    assert report.route.describe() == hfp.check_isolation(hfp.patch_model(known)).route.describe()


def test_unpatching_a_model_that_was_patched_unproven():
    model = on_meta(tiny_model("jamba", "causal"))
    with pytest.warns(UserWarning, match=ON_A_SMALL_ONE):
        hfp.patch_model(model, prove=False)
    hfp.unpatch_model(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())


def test_large_models_are_patched_where_they_have_no_weights():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=20, **sizes))
    with pytest.warns(UserWarning, match=ON_A_SMALL_ONE):
        hfp.patch_model(model, prove=False)
    assert model.config.hidden_size == 8192
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_on_meta_is_refused_where_it_has_to_be_proven():
    model = on_meta(tiny_model("llama", "causal"))
    with pytest.raises(hfp.PackingError, match=r"weights in memory, those of LlamaForCausalLM are on the meta device"):
        hfp.patch_model(model)


@pytest.mark.parametrize("how", ["FSDP", "ZeRO-3"])
def test_a_sharded_model_is_refused_where_it_has_to_be_proven(how):
    model = tiny_model("llama", "causal")
    if how == "FSDP":
        layer = model.model.layers[0]
        layer.__class__ = type("FSDPLayer", (FSDPModule, type(layer)), {})
    else:
        model.lm_head.weight.ds_id = 7
    with pytest.raises(hfp.PackingError, match=r"LlamaForCausalLM are sharded over processes.*prove=False"):
        hfp.patch_model(model)


def test_an_offloaded_model_is_proven():
    model = accelerate.cpu_offload(tiny_model("jamba", "causal"), execution_device="cpu")
    assert any(parameter.is_meta for parameter in model.parameters())
    assert hfp.check_isolation(hfp.patch_model(model)).isolated


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("LlamaForCausalLM", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}),
        ("LlamaForCausalLM", {"vocab_size": 128256, "eos_token_id": 128001, "bos_token_id": 128000}),
        ("Qwen3MoeForCausalLM", {"num_experts": 128, "moe_intermediate_size": 768, "num_hidden_layers": 6}),
        ("JambaForCausalLM", {"hidden_size": 1024, "num_hidden_layers": 8}),
        ("Mamba2ForCausalLM", {"hidden_size": 1024, "num_heads": 32, "num_hidden_layers": 6}),
    ],
)
def test_configurations_of_large_models(architecture, sizes):
    cls = getattr(transformers, architecture)
    with torch.device("meta"):
        model = cls(cls.config_class(**{"num_hidden_layers": 4, **sizes}))
    with pytest.warns(UserWarning, match=ON_A_SMALL_ONE):
        hfp.patch_model(model, prove=False)
    route = route_of(model)
    assert route.packed_share == packed_share(model, route.by_segment)
    mixers = [name for name, module in model.named_modules() if type(module).__name__.endswith("Mixer")]
    assert [step.name for step in route.by_segment] == mixers


def test_no_small_model_can_be_built():
    model = on_meta(tiny_model("llama", "causal"))
    model.config.rope_parameters = {"rope_type": "no such type", "rope_theta": 1.0}
    with pytest.raises(hfp.ModelNotSupportedError, match="none can be built: .*no such type"):
        hfp.patch_model(model, prove=False)


def test_a_small_model_with_other_modules():
    model = on_meta(tiny_model("jamba", "causal"))
    model.model.layers[0].mamba = torch.nn.Identity()
    with pytest.raises(hfp.ModelNotSupportedError, match=r"runs JambaMambaMixer .*, and this one has Identity there"):
        hfp.patch_model(model, prove=False)


def test_what_cannot_be_proven_is_refused_there_too():
    model = on_meta(tiny_model("mra", "masked"))
    with pytest.raises(hfp.ModelNotSupportedError, match="a small copy of the model in torch.float32"):
        hfp.patch_model(model, prove=False)


def run_processes(tmp_path, architecture, where):
    known = tiny_model(architecture, "causal")
    file = tmp_path / "known.pt"
    torch.save({"weights": known.state_dict(), "buffers": dict(known.named_buffers())}, file)
    script = Path(fsdp_process.__file__)
    commands = [[sys.executable, str(script), str(rank), "2", str(file), architecture, where] for rank in range(2)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    return known, [(*process.communicate(timeout=300), process.returncode) for process in processes]


@pytest.mark.parametrize("architecture", ["llama", "jamba"])
def test_two_processes_of_fsdp_with_other_numbers_of_documents(tmp_path, architecture):
    known, ran = run_processes(tmp_path, architecture, "outside")
    hfp.patch_model(known)
    for rank, (printed, errors, code) in enumerate(ran):
        assert code == 0, errors
        number, loss, isolated = printed.split()
        expected = known(**batch_of(fsdp_process.DOCUMENTS[rank])).loss.item()
        assert (int(number), isolated) == (rank, "True")
        assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_fsdp_inside_a_module_that_runs_by_segment_is_refused(tmp_path):
    _, ran = run_processes(tmp_path, "jamba", "inside")
    for _, errors, code in ran:
        assert code != 0
        assert "expected FSDP around JambaMambaMixer, which runs by segment, or further out; it is around" in errors


def test_zero_3_inside_a_module_that_runs_by_segment_is_refused(monkeypatch):
    model = hfp.patch_model(tiny_model("jamba", "causal"))
    steps = hfp.check_isolation(model).route.by_segment
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    refuse_uneven_gathers(model, steps)
    for parameter in model.parameters():
        parameter.ds_id = 0  # as DeepSpeed marks it
    with pytest.raises(hfp.PackingError, match=r"set_z3_leaf_modules\(model, \[JambaMambaMixer\]\)"):
        refuse_uneven_gathers(model, steps)
    for step in steps:
        model.get_submodule(step.name.rpartition(".")[0])._z3_leaf = True
    refuse_uneven_gathers(model, steps)


def test_zero_3_of_what_stays_packed_inside(monkeypatch):
    model = hfp.patch_model(tiny_model("jamba", "causal"))
    steps = hfp.check_isolation(model).route.by_segment
    assert all(step.packed_modules() == ["in_proj", "out_proj"] for step in steps)
    for step in steps:
        model.get_submodule(step.name).in_proj.weight.ds_id = 0
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    refuse_uneven_gathers(model, steps)
    model.get_submodule(steps[0].name).conv1d.weight.ds_id = 0
    with pytest.raises(hfp.PackingError, match="it gathers Conv1d"):
        refuse_uneven_gathers(model, steps)
