"""hf-packing check: which model is looked at, what is found, and the exit code."""

import json

import pytest

from hf_packing.attention.survey.tiny import tiny_model
from hf_packing.cli import main


def test_a_configuration_that_makes_no_model(capsys, tmp_path):
    config = tiny_model("llama", "causal").config
    config.hidden_act = "nosuch"
    config.save_pretrained(tmp_path / "model")
    assert main(["check", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert "MODEL: expected a configuration that makes a model" in said
    assert said.count("\n") == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "code", "route"), [("llama", 0, "varlen"), ("jamba", 0, "varlen + segments"), ("mra", 1, None)]
)
def test_check_of_an_architecture(capsys, model, code, route):
    assert main(["check", model, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["isolated"], found["route"]) == (code == 0, route)
    assert bool(found["refusal"]) == (code == 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [[], ["--weights"]])
def test_check_of_a_folder(capsys, tmp_path, options):
    tiny_model("bert", "masked").save_pretrained(tmp_path / "model")
    assert main(["check", str(tmp_path / "model"), *options]) == 0
    printed = capsys.readouterr().out
    assert ("the model itself" if options else "a small BertForMaskedLM of this configuration") in printed
    assert "stock: isolated: no" in printed
    assert "after patch_model: isolated: yes" in printed
    assert "route: varlen" in printed


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
    code = {
        "AutoConfig": "configuration_borrowed.BorrowedConfig",
        "AutoModelForCausalLM": "modeling_borrowed.BorrowedForCausalLM",
    }
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts = {"model_type": "borrowed", "architectures": ["BorrowedForCausalLM"], "auto_map": code, "vocab_size": 99}
    (folder / "config.json").write_text(json.dumps(facts | sizes))
    return str(folder)


@pytest.mark.filterwarnings("ignore")
def test_code_that_comes_with_a_model_is_run_only_when_asked(capsys, model_with_code, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert main(["check", model_with_code, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "trust_remote_code" in captured.err
    assert captured.err.count("\n") == 1
    assert main(["check", model_with_code, "--trust-remote-code"]) == 0
    assert "a small BorrowedForCausalLM of this configuration" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_classifier_is_looked_at_as_the_language_model_it_came_from(capsys, tmp_path):
    config = tiny_model("bert", "masked").config
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path / "model")
    assert main(["check", str(tmp_path / "model")]) == 0
    assert "a small BertForMaskedLM of this configuration" in capsys.readouterr().out
