"""The recipes for classifiers and preferences, run as a user runs them, on less."""

import json
import shutil
from pathlib import Path

import classify
import dpo
import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from processes import run_script
from recipe_inputs import save_tiny_model, write
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


RECIPES = Path(__file__).parent.parent / "recipes"


def labeled(number=60, pair=False):
    rng = np.random.default_rng(0)
    rows = []
    for n in range(number):
        words = " ".join(rng.choice(["aa", "bb", "cc"], rng.integers(1, 20)))
        rows.append({"text": words, "label": ["no", "yes"][n % 2], **({"text_pair": "dd"} if pair else {})})
    return rows


def preferred(number=24):
    return [
        {"prompt": f"say {n} ", "chosen": "yes " * (n % 5 + 1), "rejected": "no " * (n % 3 + 1)} for n in range(number)
    ]


def of_dpo(folder, *more):
    data, model = write(folder / "pairs.jsonl", preferred()), save_tiny_model(folder / "model")
    known = ("--data", data, "--model_name_or_path", model, "--max_tokens", 400, "--output_dir", folder / "out")
    return [*map(str, (*known, *more))]


@pytest.mark.parametrize("pair", [False, True])
def test_classify(pair, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", labeled(pair=pair))
    known = ("--data", data, "--max_tokens", 256, "--max_length", 20, "--output_dir", tmp_path / "out")
    flags = [*map(str, known), "--num_train_epochs", "2", "--match_documents_per_step", "9"]
    metrics = classify.main(flags)
    assert 0 <= metrics["eval_accuracy"] <= 1
    said = capsys.readouterr().out
    assert "of 60 texts have 20 tokens or were truncated to it" in said
    assert not said.startswith("0 of 60")
    assert "the loss is a mean of labeled rows" in said
    assert "each with 9.0 documents" in said
    assert "accuracy on 6 rows" in said
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.label2id == {"no": 0, "yes": 1}
    with pytest.raises(SystemExit) as ended:
        classify.main([*flags, "--resume_from_checkpoint", "last"])
    assert ended.value.code == 0
    assert "has the last step of the run: nothing is left to train" in capsys.readouterr().out


def test_classify_refuses(tmp_path):
    data = write(tmp_path / "rows.jsonl", [{"text": "a"}] * 20)
    output = ("--output_dir", str(tmp_path / "out"))
    with pytest.raises(ValueError, match="^--data: expected columns text, label, got no label$"):
        classify.main(["--data", str(data), *output])
    data, other = (write(tmp_path / name, rows) for name, rows in (("a.jsonl", labeled()), ("b.jsonl", labeled()[:3])))
    other.write_text(json.dumps({"text": "a", "label": "maybe"}))
    with pytest.raises(ValueError, match="--eval_data: expected labels of --data, got 'maybe' too"):
        classify.main(["--data", str(data), "--eval_data", str(other), *output])


def test_dpo(tmp_path, capsys):
    flags = of_dpo(tmp_path, "--max_steps", 2, "--max_length", 25)
    write(tmp_path / "pairs.jsonl", [*preferred(), {"prompt": "say " * 9, "chosen": "yes", "rejected": "no"}])
    trainer = dpo.main(flags)
    assert trainer.state.global_step == 2
    said = capsys.readouterr().out
    assert "1 rows left out, 89 tokens lost" in said  # 79 of the long pair, and 10 that are cut from four answers
    assert "the loss is a mean of rows" in said
    assert "ref_model: LlamaForCausalLM" in said


def test_dpo_with_lora(tmp_path, capsys):
    trainer = dpo.main(of_dpo(tmp_path, "--max_steps", 2, "--use_peft", "--lora_r", 4, "--learning_rate", 0.01))
    assert trainer.model.peft_config["default"].r == 4
    assert "ref_model" not in capsys.readouterr().out
    trained = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in trained.items() if "lora_B" in name)
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").get_base_model()
    before = load_file(tmp_path / "model" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(saved.model.norm.weight, before)


def test_dpo_evaluates(tmp_path, capsys):
    data = write(tmp_path / "test.jsonl", [*preferred(7), {"prompt": "say " * 9, "chosen": "yes", "rejected": "no"}])
    flags = of_dpo(tmp_path, "--max_steps", 2, "--eval_data", data, "--eval_strategy", "steps", "--eval_steps", 1)
    trainer = dpo.main([*flags, "--max_length", "25"])
    assert sum("eval_loss" in logged for logged in trainer.state.log_history) == 2
    assert "evaluation: 1 of 7 pairs are truncated, 1 left out" in capsys.readouterr().out


def test_resume(tmp_path):
    data = write(tmp_path / "rows.jsonl", labeled())
    flags = ["--data", str(data), "--max_tokens", "100", "--output_dir", str(tmp_path / "out"), "--max_length", "32"]
    whole = classify.main([*flags, "--max_steps", "4", "--save_steps", "2"])
    with pytest.raises(ValueError, match="has some of an earlier run"):
        classify.main([*flags, "--max_steps", "4"])
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    again = classify.main([*flags, "--max_steps", "4", "--resume_from_checkpoint", "last"])
    assert again["eval_loss"] == whole["eval_loss"]
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(ValueError, match="--resume_from_checkpoint: expected a checkpoint in"):
        classify.main([*flags, "--resume_from_checkpoint", "last"])


def test_dpo_refuses(tmp_path):
    data = write(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b"}] * 9)
    with pytest.raises(ValueError, match="^--data: expected columns chosen, rejected, got no rejected$"):
        dpo.main(["--data", str(data), "--output_dir", str(tmp_path / "out")])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["classify.py", "dpo.py"])
def test_two_processes(recipe, tmp_path):
    """Without the name of a model; resumed when finished."""
    rows = labeled() if recipe == "classify.py" else preferred()
    data = write(tmp_path / "rows.jsonl", rows)
    flags = ("--data", data, "--max_tokens", 400, "--max_length", 64, "--output_dir", tmp_path / "out")
    done = run_script(RECIPES / recipe, *flags, ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "2 x " in done.stdout  # ranks x micro-batches
    assert (tmp_path / "out" / "model.safetensors").exists()
    again = run_script(RECIPES / recipe, *flags, "--resume_from_checkpoint", "last", ranks=2)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-4000:]
    assert again.stdout.count("nothing is left to train") == 1
    refused = run_script(RECIPES / recipe, *flags, ranks=2)
    assert refused.returncode == 1
    assert (refused.stdout + refused.stderr).count("has some of an earlier run") == 1
