"""The recipes, run as a user runs them, on less."""

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from processes import run_script
from recipe_inputs import save_tiny_model

RECIPES = Path(__file__).parent.parent / "recipes"
CONFIGS = RECIPES / "configs"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


def run(recipe, *arguments):
    done = run_script(RECIPES / recipe, *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
def test_sft_on_real_problems(shared_data, tiny_model, tmp_path):
    said = run_sft(shared_data / "math.jsonl.gz", tiny_model, tmp_path, 4096)
    assert "1 x " in said
    assert "0 tokens lost" in said


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["none", "best_fit"])
def test_sft_from_a_yaml_file(tiny_model, tmp_path, strategy):
    rows = [{"prompt": "What?" * (n % 7 + 1), "completion": "That." * (n % 9 + 1)} for n in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "data": str(tmp_path / "prompts.jsonl"),
        "model_name_or_path": str(tiny_model),
        "strategy": strategy,
        "max_tokens": 128,
        "loss": "sequence",
        "output_dir": str(tmp_path / "output"),
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "report_to": "none",
    }
    (tmp_path / "sft.yaml").write_text("\n".join(f"{name}: {value}" for name, value in settings.items()))
    said = run("sft.py", "--config", tmp_path / "sft.yaml")
    assert "the largest with 12" in said


def run_sft(data, model, folder, max_tokens):
    said = run(
        *("sft.py", "--data", data, "--model_name_or_path", model, "--max_tokens", max_tokens),
        *("--output_dir", folder / "output", "--max_steps", 2, "--logging_steps", 1, "--report_to", "none"),
    )
    assert "'loss'" in said
    assert "micro-batches (ranks x micro-batches per rank)" in said
    assert (folder / "output" / "model.safetensors").is_file()
    return said


@pytest.mark.parametrize("name", ["cpu", "ddp", "fsdp2", "zero3"])
def test_accelerate_knows_the_configurations(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type.value == {"fsdp2": "FSDP", "zero3": "DEEPSPEED"}.get(name, "MULTI_GPU")
    assert config.use_cpu == (name == "cpu")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3
