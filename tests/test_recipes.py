"""The recipes, run as a user runs them, on less."""

import json
import os
import subprocess
import sys
from pathlib import Path

import accelerate_loop
import pretrain_bucket
import pytest
import sft
from accelerate.commands.config.config_args import load_config_from_file
from processes import HANGS, run_script
from recipe_inputs import exits, save_tiny_model
from safetensors.torch import load_file

from hf_packing.errors import PackingError

RECIPES = Path(__file__).parent.parent / "recipes"
CONFIGS = RECIPES / "configs"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


def run(recipe, *arguments):
    done = run_script(RECIPES / recipe, *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def number_after(text, words):
    return float(text.split(words, 1)[1].split()[0].rstrip(",").replace(",", ""))


@pytest.fixture
def text_file(tmp_path, rng):
    words = [chr(97 + i) * 3 for i in range(26)]
    rows = [{"text": " ".join(rng.choice(words, n))} for n in rng.integers(2, 90, 300)]
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def few_texts(text_file, tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text("\n".join(text_file.read_text().splitlines()[:80]))
    return file


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed
def test_arguments_that_do_not_fit(tmp_path, tiny_model):
    file = tmp_path / "rows.jsonl"

    def sft_says(row, *arguments):
        file.write_text(json.dumps(row))
        known = ("--data", file, "--model", tiny_model, "--output_dir", tmp_path, "--report_to", "none")
        return exits(sft.main, [str(each) for each in (*known, *arguments)])

    chat = {"messages": [{"role": "user", "content": "Q"}]}
    assert "--packing: expected False" in sft_says(chat, "--packing", "True")
    message = "--data: expected messages, or prompt and completion, got columns text"
    assert message in sft_says({"text": "a"})


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
    assert "utilization of the ranks" in said
    assert (folder / "output" / "model.safetensors").is_file()
    return said


def on_two_processes(recipe, *arguments):
    """As `launched` runs it, on processes that have imported torch already."""
    done = run_script(RECIPES / recipe, *arguments, ranks=2, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def launched(recipe, *arguments):
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", str(CONFIGS / "cpu.yaml")]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += [str(RECIPES / recipe), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=threads, timeout=HANGS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def weights(output):
    return {name: value.numpy().tobytes() for name, value in load_file(output / "model" / "model.safetensors").items()}


@pytest.mark.slow
def test_bucket_pre_training_on_two_processes_stops_and_goes_on(text_file, tiny_model, tmp_path):
    options = ("--data", text_file, "--tokenizer", tiny_model, "--model", tiny_model, "--save-every", 3)
    options += ("--buckets", 64, 128, 256, 512, "--tokens-per-batch", 512, "--steps", 0)
    said = launched("pretrain_bucket.py", *options, "--output", tmp_path / "whole")
    assert "on 2 processes, the same bucket on all of them each time: True" in said
    table = said.split("speed\n", 1)[1].split("\nspeed:")[0].splitlines()
    rows = {int(bucket): int(rows) for bucket, _, rows, *_ in map(str.split, table)}
    assert len(rows) >= 3
    assert all(each == 512 // bucket for bucket, each in rows.items())
    resume = ("--resume-from-checkpoint", tmp_path / "whole" / "before")
    rest = on_two_processes("pretrain_bucket.py", *options, "--output", tmp_path / "rest", *resume)
    assert 0 < number_after(rest, "resuming after ") < number_after(said, "\n")
    assert number_after(rest, "of the last ") == number_after(said, "of the last ")
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bucket_pre_training_stops_and_goes_on(few_texts, tiny_model, tmp_path, capsys, accumulation):
    """In the second epoch, too."""

    def run(name, steps, *more):
        options = ("--data", few_texts, "--model", tiny_model, "--buckets", 128, 512, "--tokens-per-batch", 1024)
        options += ("--accumulation", accumulation, "--output", tmp_path / name, "--steps", steps, *more)
        pretrain_bucket.main(list(map(str, options)))
        return number_after(capsys.readouterr().out, "of the last ")

    steps = 21 // accumulation
    whole = run("whole", steps)
    run("rest", 4)
    assert run("rest", steps - 2, "--resume") != whole
    assert run("rest", steps, "--resume-from-checkpoint", "last") == whole
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")
    assert (tmp_path / "rest" / "before").is_dir()
    assert exits(run, "rest", steps + 1) == (
        f"--output: expected a folder without a checkpoint, {str(tmp_path / 'rest')!r} has one of an earlier run, "
        "which this one would overwrite; --resume-from-checkpoint resumes from it"
    )
    assert f"--steps: expected more than the {steps} of" in exits(run, "rest", steps, "--resume")
    said = exits(run, "rest", steps + 1, "--resume", "--learning-rate", "0.5")
    assert said == "--learning-rate: expected 0.001, as in the checkpoint, got 0.5"
    assert "expected a checkpoint in" in exits(run, "none", steps, "--resume")
    assert "expected last, or a folder with a checkpoint" in exits(run, "none", steps, "--resume", tmp_path)
    with pytest.raises(PackingError, match="batching"):
        run("rest", steps + 1, "--resume", "--order", "short_to_long")


@pytest.mark.slow
def test_a_loop_on_two_processes_stops_and_goes_on(text_file, tiny_model, tmp_path):
    options = ("--data", text_file, "--model", tiny_model, "--max-tokens", 512, "--save-every", 2, "--loss", "sequence")
    whole = launched("accelerate_loop.py", *options, "--output", tmp_path / "whole")
    resume = ("--resume-from-checkpoint", tmp_path / "whole" / "before")
    rest = on_two_processes("accelerate_loop.py", *options, "--output", tmp_path / "rest", *resume)
    assert number_after(rest, "resuming in epoch 0 after ") > 0
    assert rest.split("evaluation loss ")[1] == whole.split("evaluation loss ")[1]
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_loop_that_stops_and_goes_on(few_texts, tiny_model, tmp_path, capsys):
    def run(name, *more):
        options = ("--data", few_texts, "--model", tiny_model, "--max-tokens", 1024, "--save-every", 2, "--epochs", 2)
        accelerate_loop.main(list(map(str, (*options, "--accumulation", 2, "--output", tmp_path / name, *more))))
        return capsys.readouterr().out

    whole = run("whole")
    run("rest", "--steps", 3)
    rest = run("rest", "--resume")
    assert "resuming in epoch 0 after 6 of" in rest
    assert rest.split("evaluation loss ")[-1] == whole.split("evaluation loss ")[-1]
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")
    assert "--output: expected a folder without a checkpoint" in exits(run, "rest")
    assert "--learning-rate: expected 0.001" in exits(run, "rest", "--resume", "--learning-rate", 1)
    assert "--epochs: expected more than the 2 of" in exits(run, "rest", "--resume", "--epochs", 1)


@pytest.mark.parametrize("flag", ["--max-tokens", "--accumulation", "--epochs", "--steps", "--save-every"])
def test_numbers_of_loops(flag, capsys):
    with pytest.raises(SystemExit):
        accelerate_loop.parse([flag, "0"])
    assert "expected an integer from 1, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu", "ddp", "fsdp2", "zero3"])
def test_accelerate_knows_the_configurations(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type.value == {"fsdp2": "FSDP", "zero3": "DEEPSPEED"}.get(name, "MULTI_GPU")
    assert config.use_cpu == (name == "cpu")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3
