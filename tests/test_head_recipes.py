"""The recipes for classifiers and preferences, run as a user runs them, on less."""

import json
import shutil
from pathlib import Path

import classify
import dpo
import numpy as np
import pytest
from processes import run_script
from recipe_inputs import exits, save_tiny_model, write

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


@pytest.mark.parametrize("pair", [False, True])
def test_classify(pair, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", labeled(pair=pair))
    flags = ["--data", data, "--max_tokens", 256, "--max_length", 32, "--output_dir", tmp_path / "out", "--epochs", 2]
    metrics = classify.main([*map(str, flags), "--rows_per_step", "9"])
    assert 0 <= metrics["eval_accuracy"] <= 1
    said = capsys.readouterr().out
    assert "the loss is a mean of labeled rows" in said
    assert "accuracy on 6 rows" in said
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_classify_refuses(tmp_path):
    data = write(tmp_path / "rows.jsonl", [{"text": "a"}] * 20)
    assert exits(classify.main, ["--data", str(data)]) == "--data: expected columns text and label, got text"
    data, other = (write(tmp_path / name, rows) for name, rows in (("a.jsonl", labeled()), ("b.jsonl", labeled()[:3])))
    other.write_text(json.dumps({"text": "a", "label": "maybe"}))
    assert "got 'maybe' too" in exits(classify.main, ["--data", str(data), "--eval_data", str(other)])


def test_dpo(tmp_path, capsys):
    data = write(tmp_path / "pairs.jsonl", preferred())
    model = save_tiny_model(tmp_path / "model")
    flags = ["--data", data, "--model", model, "--max_tokens", 400, "--output_dir", tmp_path / "out", "--max_steps", 2]
    trainer = dpo.main([*map(str, flags)])
    assert trainer.state.global_step == 2
    said = capsys.readouterr().out
    assert "the loss is a mean of rows" in said
    assert "ref_model: LlamaForCausalLM" in said


def test_resume(tmp_path):
    data = write(tmp_path / "rows.jsonl", labeled())
    flags = ["--data", str(data), "--max_tokens", "100", "--output_dir", str(tmp_path / "out"), "--max_length", "32"]
    whole = classify.main([*flags, "--max_steps", "4", "--save_steps", "2"])
    assert "has one of an earlier run" in exits(classify.main, [*flags, "--max_steps", "4"])
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    again = classify.main([*flags, "--max_steps", "4", "--resume_from_checkpoint"])
    assert again["eval_loss"] == whole["eval_loss"]
    shutil.rmtree(tmp_path / "out")
    assert "there is none" in exits(classify.main, [*flags, "--resume_from_checkpoint"])


def test_dpo_refuses(tmp_path):
    data = write(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b"}] * 9)
    expected = "--data: expected columns prompt, chosen, rejected, got no rejected"
    assert exits(dpo.main, ["--data", str(data)]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["classify.py", "dpo.py"])
def test_two_processes(recipe, tmp_path):
    rows = labeled() if recipe == "classify.py" else preferred()
    data = write(tmp_path / "rows.jsonl", rows)
    flags = ("--data", data, "--max_tokens", 400, "--max_length", 64, "--output_dir", tmp_path / "out")
    done = run_script(RECIPES / recipe, *flags, ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "2 x " in done.stdout  # ranks x micro-batches
    assert (tmp_path / "out" / "model.safetensors").exists()
