"""Models on the meta device and sharded ones: proven on a small copy, and never left waiting."""

import copy
import json
import warnings

import accelerate
import pytest
import torch
import transformers
from patched_models import patched_tiny
from processes import on_ranks
from tiers import fast_only
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from training_by_hand import batch_of, check_packed, losses_alone

import hf_packing as hfp
from hf_packing.attention.by_segment import refuse_uneven_gathers
from hf_packing.attention.route import packed_share, route_of
from tools.tiny_model import tiny_model

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


@pytest.mark.parametrize("architecture", fast_only(["llama", "jamba", "mamba2", "opt", "gemma3_text"], "llama"))
def test_a_model_patched_on_meta_is_right_once_it_has_weights(architecture):
    known = tiny_model(architecture, "causal")
    alone = losses_alone(known)
    model = on_meta(known)
    with pytest.warns(UserWarning, match=ON_A_SMALL_ONE):
        assert hfp.patch_model(model, prove="small") is model
    model = filled(model, known)
    check_packed(model, alone)
    report = hfp.check_isolation(model)
    assert report.isolated
    assert report.route.describe() == route_of(hfp.patch_model(known)).describe()
    hfp.unpatch_model(model)
    assert not any("forward" in vars(module) for module in model.modules())


def with_fsdp():
    model = tiny_model("llama", "causal")
    layer = model.model.layers[0]
    layer.__class__ = type("FSDPLayer", (FSDPModule, type(layer)), {})
    return model


def with_zero_3():
    model = tiny_model("llama", "causal")
    model.lm_head.weight.ds_id = 7
    return model


def without_a_known_rope():
    model = on_meta(tiny_model("llama", "causal"))
    model.config.rope_parameters = {"rope_type": "no such type", "rope_theta": 1.0}
    return model


def with_another_module():
    model = on_meta(tiny_model("jamba", "causal"))
    model.model.layers[0].mamba = torch.nn.Identity()
    return model


REFUSED = [
    (lambda: on_meta(tiny_model("llama", "causal")), "model", "weights of LlamaForCausalLM are on the meta"),
    (with_fsdp, "model", "LlamaForCausalLM are sharded over processes.*prove='small'"),
    (with_zero_3, "model", "LlamaForCausalLM are sharded over processes.*prove='small'"),
    (without_a_known_rope, "small", "no copy can be built: .*no such type"),
    (with_another_module, "small", "expected model.layers.0.mamba to be of class JambaMambaMixer .* got Identity"),
    (lambda: on_meta(tiny_model("mra", "masked")), "small", "on a small copy of the model: MraForMaskedLM"),
]


@pytest.mark.parametrize(("make", "prove", "message"), fast_only(REFUSED, *REFUSED[:4]))
def test_what_cannot_be_proven_is_refused(make, prove, message):
    with pytest.raises(hfp.PackingError, match=message):
        hfp.patch_model(make(), prove=prove)


@pytest.mark.slow
def test_an_offloaded_model_is_proven():
    model = accelerate.cpu_offload(tiny_model("jamba", "causal"), execution_device="cpu")
    assert any(parameter.is_meta for parameter in model.parameters())
    assert hfp.check_isolation(hfp.patch_model(model)).isolated


LARGE = {
    "wide": ("LlamaForCausalLM", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}),
    "many words": ("LlamaForCausalLM", {"vocab_size": 128256, "eos_token_id": 128001, "bos_token_id": 128000}),
    "experts": ("Qwen3MoeForCausalLM", {"num_experts": 128, "moe_intermediate_size": 768, "num_hidden_layers": 6}),
    "attention and a state": ("JambaForCausalLM", {"hidden_size": 1024, "num_hidden_layers": 8}),
    "a state": ("Mamba2ForCausalLM", {"hidden_size": 1024, "num_heads": 32, "num_hidden_layers": 6}),
}


@pytest.mark.parametrize("size", fast_only(LARGE, "wide"))
def test_configurations_of_large_models(size):
    architecture, sizes = LARGE[size]
    cls = getattr(transformers, architecture)
    with torch.device("meta"):
        model = cls(cls.config_class(**{"num_hidden_layers": 4, **sizes}))
    with pytest.warns(UserWarning, match=ON_A_SMALL_ONE):
        hfp.patch_model(model, prove="small")
    assert all(parameter.is_meta for parameter in model.parameters())
    route = route_of(model)
    assert route.packed_share == packed_share(model, route.by_segment)
    mixers = [name for name, module in model.named_modules() if type(module).__name__.endswith("Mixer")]
    assert [step.name for step in route.by_segment] == mixers


OF_RANKS = ([[11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34]], [[41, 42, 43], [51, 52, 53, 54, 55, 56, 57, 58]])
"""The documents of two processes."""
SHARDED = [("llama", "outside"), ("jamba", "outside"), ("jamba", "inside")]


def sharded_model(architecture, folder, where):
    """A model of the meta device that is patched, sharded by FSDP2, and then filled."""
    warnings.simplefilter("ignore")
    known = torch.load(folder / f"{architecture}.pt")
    model = hfp.patch_model(on_meta(tiny_model(architecture, "causal")), prove="small")
    for layer in model.model.layers:
        if where == "inside" and hasattr(layer, "mamba"):
            fully_shard(layer.mamba.conv1d)
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    set_model_state_dict(model, known["weights"], options=StateDictOptions(full_state_dict=True))
    for name, buffer in model.named_buffers():
        buffer.copy_(known["buffers"][name])
    return model


def losses_of_sharded(folder):
    """Write the loss of each of SHARDED and whether the model is isolated, or why it is refused."""
    state, found = accelerate.PartialState(cpu=True), []
    for architecture, where in SHARDED:
        try:
            model = sharded_model(architecture, folder, where)
            loss = model(**batch_of(OF_RANKS[state.process_index])).loss
            loss.backward()
            found.append({"loss": loss.item(), "isolated": hfp.check_isolation(model).isolated})
        except hfp.PackingError as error:
            found.append({"refused": str(error)})
        state.wait_for_everyone()
    (folder / f"found-{state.process_index}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def of_fsdp(tmp_path_factory):
    """What two processes have found in each of the cases of SHARDED."""
    folder = tmp_path_factory.mktemp("fsdp")
    for architecture in ("llama", "jamba"):
        known = tiny_model(architecture, "causal")
        saved = {"weights": known.state_dict(), "buffers": dict(known.named_buffers())}
        torch.save(saved, folder / f"{architecture}.pt")
    on_ranks(losses_of_sharded, folder, ranks=2)
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]
    return dict(zip(SHARDED, zip(*found, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "jamba"])
def test_two_processes_of_fsdp_with_other_numbers_of_documents(of_fsdp, architecture):
    known = patched_tiny(architecture, "causal")
    for documents, of_rank in zip(OF_RANKS, of_fsdp[architecture, "outside"], strict=True):
        expected = known(**batch_of(documents)).loss.item()
        assert of_rank["isolated"]
        assert of_rank["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_fsdp_inside_a_module_that_runs_by_segment_is_refused(of_fsdp):
    words = "expected all weights of JambaMambaMixer to be gathered at once, but those of"
    assert all(words in of_rank["refused"] for of_rank in of_fsdp["jamba", "inside"])


def test_zero_3_inside_a_module_that_runs_by_segment_is_refused(monkeypatch):
    """But not of what stays packed inside, nor where the module is a leaf."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    model = patched_tiny("jamba", "causal")
    steps = route_of(model).by_segment
    assert all(step.packed_modules() == ["in_proj", "out_proj"] for step in steps)
    for step in steps:
        model.get_submodule(step.name).in_proj.weight.ds_id = 0  # as DeepSpeed marks it
    refuse_uneven_gathers(model, steps)
    model.get_submodule(steps[0].name).conv1d.weight.ds_id = 0
    with pytest.raises(hfp.PackingError, match="those of Conv1d .* are gathered at every call"):
        refuse_uneven_gathers(model, steps)
    for parameter in model.parameters():
        parameter.ds_id = 0
    with pytest.raises(hfp.PackingError, match=r"set_z3_leaf_modules\(model, \[JambaMambaMixer\]\)"):
        refuse_uneven_gathers(model, steps)
    for step in steps:
        model.get_submodule(step.name.rpartition(".")[0])._z3_leaf = True
    refuse_uneven_gathers(model, steps)
