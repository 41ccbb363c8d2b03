"""hf-packing check: which model is looked at, what is found, and the exit code."""

import json
import re

import pytest
import torch
import transformers
from tiers import fast_only

import hf_packing as hfp
from hf_packing.attention import patched_copy_of, route_of, small_copy_of
from hf_packing.cli import main
from tools.tiny_model import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


def one_line(printed):
    """Lines are wrapped."""
    return " ".join(printed.split())


def saved(folder, config, architectures):
    """A folder with this configuration, which names these classes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": architectures}))
    return str(folder)


@pytest.mark.slow
def test_models_that_cannot_be_made_or_patched(capsys, tmp_path):
    config = tiny_model("llama", "causal").config
    config.hidden_act = "nosuch"
    assert main(["check", saved(tmp_path / "model", config, ["LlamaForCausalLM"])]) == 2
    said = capsys.readouterr().err
    assert "MODEL: expected a name on the hub, a folder, or an architecture" in said
    assert "nosuch" in said
    assert said.count("\n") == 1
    config = tiny_model("t5", "token classification", decoder_start_token_id=0).config
    folder = saved(tmp_path / "t5", config, ["T5ForConditionalGeneration"])
    assert main(["check", folder]) == 1
    assert "patch_model refuses the model" in one_line(capsys.readouterr().out)
    assert main(["check", folder, "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["refusal"]
    assert found["max_leak"] is None


@pytest.mark.parametrize(
    ("model", "code", "route"),
    [
        ("llama", 0, "varlen"),
        pytest.param("jamba", 0, "varlen + segments", marks=pytest.mark.survey),
        pytest.param("zamba2", 0, "varlen + segments", marks=pytest.mark.slow),
        pytest.param("qwen3_next", 0, "varlen + segments", marks=pytest.mark.survey),
        pytest.param("mra", 1, None, marks=pytest.mark.slow),
    ],
)
def test_check_of_an_architecture(capsys, model, code, route):
    assert main(["check", model, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["isolated"], found["route"]) == (code == 0, route)
    assert bool(found["refusal"]) == (code == 1)


@pytest.mark.slow
def test_architectures_that_make_no_model_or_no_copy(capsys):
    assert main(["check", "nemotron"]) == 2
    said = capsys.readouterr().err
    assert "got 'nemotron': its usual configuration makes no model; pass a folder with a config.json: TypeErr" in said
    assert main(["check", "reformer"]) == 1
    said = one_line(capsys.readouterr().out)
    assert "patch_model refuses the model: ReformerForMaskedLM: isolation has to be tested on a small copy" in said
    assert "no copy can be built: Make sure that config.axial_pos_embds factors: (64, 192) sum to" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["longformer", "nystromformer"])
def test_copies_have_the_windows_and_landmarks_of_the_model(name):
    with torch.device("meta"):
        model = transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.for_model(name))
    assert hfp.check_isolation(patched_copy_of(model)).isolated
    small = small_copy_of(model).config.to_dict()
    if name == "longformer":
        assert small["attention_window"] == [8] * 12
    else:
        assert small["segment_means_seq_len"] == small["num_landmarks"] == 8


@pytest.mark.slow
def test_an_encoder_decoder_is_refused(capsys):
    assert main(["check", "t5", "--json"]) == 1
    assert "an encoder-decoder takes two texts" in json.loads(capsys.readouterr().out)["refusal"]


@pytest.mark.slow
def test_a_size_that_a_small_model_derives(capsys, tmp_path):
    """Of a hidden size that a small copy keeps."""
    config = tiny_model("zamba2", "causal").config
    assert config.hidden_size == 64
    assert main(["check", saved(tmp_path / "model", config, ["Zamba2ForCausalLM"])]) == 0
    config = tiny_model("bart", "sequence classification").config
    assert main(["check", saved(tmp_path / "bart", config, ["BartForConditionalGeneration"])]) == 1
    assert "an encoder-decoder takes two texts" in one_line(capsys.readouterr().out)


@pytest.mark.slow
def test_the_share_that_stays_packed_is_that_of_the_whole_model(capsys, tmp_path):
    config = tiny_model("jamba", "causal", intermediate_size=2000).config
    main(["check", saved(tmp_path / "model", config, ["JambaForCausalLM"])])
    (shown,) = re.findall(r"route: varlen \+ segments, (\d+)% of", capsys.readouterr().out)
    model = hfp.patch_model(transformers.JambaForCausalLM(config))
    assert int(shown) == round(100 * route_of(model).packed_share) > 85


def test_what_is_printed_of_a_model_and_its_weights(capsys, tmp_path):
    """But for the first, which may have a path."""
    main(["check", "llama"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "llama: a small LlamaForCausalLM with as many layers and random weights"
    printed = one_line("\n".join(lines))
    assert printed.startswith("stock: isolated: no")
    assert "after patch_model: isolated: yes" in printed
    assert "route: varlen" in printed
    assert "patch_model(model)" not in printed, "which is what comes next"
    model, missing = tiny_model("llama", "causal"), "model.layers.0.mlp.down_proj.weight"
    weights = {name: value for name, value in model.state_dict().items() if name != missing}
    model.save_pretrained(tmp_path / "model", state_dict=weights)
    assert main(["check", str(tmp_path / "model"), "--weights"]) == 0
    expected = "the model itself, with random values for 1 weights that are missing in its files"
    assert expected in capsys.readouterr().out


CONFIGURATION = """
from transformers import LlamaConfig

class BorrowedConfig(LlamaConfig):
    model_type = "borrowed"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_borrowed import BorrowedConfig

class BorrowedForCausalLM(LlamaForCausalLM):
    config_class = BorrowedConfig
"""


@pytest.fixture
def model_with_code(tmp_path):
    """A folder as those of models on the hub that bring their own code."""
    folder = tmp_path / "borrowed"
    folder.mkdir()
    (folder / "configuration_borrowed.py").write_text(CONFIGURATION)
    (folder / "modeling_borrowed.py").write_text(MODELING)
    code = {"AutoConfig": "configuration_borrowed.BorrowedConfig"}
    code["AutoModelForCausalLM"] = "modeling_borrowed.BorrowedForCausalLM"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts = {"model_type": "borrowed", "architectures": ["BorrowedForCausalLM"], "auto_map": code, "vocab_size": 99}
    (folder / "config.json").write_text(json.dumps(facts | sizes))
    return str(folder)


def test_code_that_comes_with_a_model_is_run_only_when_asked(capsys, model_with_code, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert main(["check", model_with_code, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--trust-remote-code" in captured.err
    assert captured.err.count("\n") == 1
    assert main(["check", model_with_code, "--trust-remote-code"]) == 0
    assert "a small BorrowedForCausalLM with as many" in capsys.readouterr().out


NAMED = {
    "BertForSequenceClassification": ("bert", "masked"),
    "LlamaForQuestionAnswering": ("llama", "causal"),
    "BertModel": ("bert", "masked"),
    "BertForMultipleChoice": ("bert", "masked"),
    "LLaMAForCausalLM": ("llama", "causal"),
    None: ("llama", "causal"),
    "BartForSequenceClassification": ("bart", "causal"),
}


@pytest.mark.parametrize("name", fast_only(NAMED, "LlamaForQuestionAnswering"))
def test_the_class_that_a_configuration_names(capsys, tmp_path, name):
    """Or a language model of its type, where it names no class that transformers knows."""
    named = name and [name]
    checked = "LlamaForCausalLM" if name in ("LLaMAForCausalLM", None) else name
    assert main(["check", saved(tmp_path / "model", tiny_model(*NAMED[name]).config, named)]) == 0
    printed = one_line(capsys.readouterr().out)
    assert f"a small {checked} with as many layers" in printed
    assert "after patch_model: isolated: yes" in printed
    assert ("padded batch: " in printed) == (named == [checked])
