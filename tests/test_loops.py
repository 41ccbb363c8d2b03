"""The training loops of recipes: buckets and accelerate, stopped, killed while they save, and resumed."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import accelerate_loop
import common
import pretrain_bucket
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from datasets import load_dataset
from processes import HANGS, run_script
from recipe_inputs import save_tiny_model
from safetensors.torch import load_file
from transformers import AutoTokenizer

import hf_packing as hfp

RECIPES = Path(__file__).parent.parent / "recipes"
CPU = RECIPES / "configs" / "cpu.yaml"


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


def on_two_processes(recipe, *arguments):
    """As `launched` runs it, on processes that have imported torch already."""
    done = run_script(RECIPES / recipe, *arguments, ranks=2, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def launched(recipe, *arguments):
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", str(CPU)]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += [str(RECIPES / recipe), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=threads, timeout=HANGS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def weights(output):
    return {name: value.numpy().tobytes() for name, value in load_file(output / "model.safetensors").items()}


def options_of(data, model):
    return "--data", data, "--model", model, "--max_tokens", 512


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more", "at_last"),
    [
        ("pretrain_bucket.py", ("--save_steps", 3, "--max_steps", -1, "--buckets", 64, 128, 256, 512), "of the last "),
        ("accelerate_loop.py", ("--save_steps", 2, "--loss", "sequence"), "evaluation loss "),
    ],
)
def test_a_run_on_two_processes_stops_and_goes_on(text_file, tiny_model, tmp_path, recipe, more, at_last):
    options = (*options_of(text_file, tiny_model), *more)
    said = launched(recipe, *options, "--output_dir", tmp_path / "whole")
    before, last = common.complete_checkpoints(tmp_path / "whole")
    resume = ("--output_dir", tmp_path / "rest", "--resume_from_checkpoint", before)
    rest = on_two_processes(recipe, *options, *resume)
    assert number_after(rest, f"resuming {before}: in epoch 0 after ") > 0
    assert number_after(rest, at_last) == number_after(said, at_last)
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")
    refused = run_script(RECIPES / recipe, *options, *resume, "--learning_rate", 1, ranks=2)
    assert refused.returncode == 1
    assert refused.stderr.count("--learning_rate: expected 0.001, as in the checkpoint, got 1.0") == 1
    done = on_two_processes(recipe, *options, *resume[:2], "--resume_from_checkpoint", "last")
    assert done.count(f"{last.name} has the last step of the run: nothing is left to train") == 1


@pytest.mark.slow
def test_all_processes_have_the_same_bucket_each_time(text_file, tiny_model, tmp_path):
    options = (*options_of(text_file, tiny_model), "--buckets", 64, 128, 256, 512, "--output_dir", tmp_path / "out")
    said = on_two_processes("pretrain_bucket.py", *options, "--max_steps", -1)
    assert "on 2 processes, the same bucket on all of them each time: True" in said
    table = said.split("speed\n", 1)[1].split("\nspeed:")[0].splitlines()
    rows = {int(bucket): int(rows) for bucket, _, rows, *_ in map(str.split, table)}
    assert len(rows) >= 3
    assert all(each == 512 // bucket for bucket, each in rows.items())


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bucket_pre_training_stops_and_goes_on(few_texts, tiny_model, tmp_path, capsys, monkeypatch, accumulation):
    """In the second epoch, and after it was killed while it saved, too."""
    resume = ("--resume_from_checkpoint", "last")

    def run(name, steps, *more):
        options = ("--data", few_texts, "--model", tiny_model, "--buckets", 128, 512, "--max_tokens", 1024)
        options += ("--gradient_accumulation_steps", accumulation, "--output_dir", tmp_path / name)
        pretrain_bucket.main(list(map(str, (*options, "--max_steps", steps, *more))))
        return number_after(capsys.readouterr().out, "of the last ")

    steps = 21 // accumulation
    whole = run("whole", steps)
    run("rest", 4)
    assert run("rest", steps - 2, *resume) != whole
    with monkeypatch.context() as killed:
        killed.setattr(common.TrainerState, "save_to_json", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("rest", steps, *resume, "--save_steps", steps - 1)
    assert run("rest", steps, *resume) == whole
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")
    kept = sorted(file.name for file in (tmp_path / "rest").iterdir() if file.is_dir())
    assert kept == sorted([f"checkpoint-{steps - 2}", f"checkpoint-{steps}"])
    with pytest.raises(ValueError, match="--output_dir: expected a folder without checkpoints, .* has some of an earl"):
        run("rest", steps + 1)
    with pytest.raises(SystemExit) as finished:
        run("rest", steps, *resume)
    assert finished.value.code == 0
    assert f"checkpoint-{steps} has the last step of the run: nothing is left to train" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--learning_rate: expected 0.001, as in the checkpoint, got 0.5"):
        run("rest", steps + 1, *resume, "--learning_rate", "0.5")
    with pytest.raises(ValueError, match="expected a checkpoint in .*none', got 'last'"):
        run("none", steps, *resume)
    with pytest.raises(ValueError, match="expected a checkpoint"):
        run("none", steps, "--resume_from_checkpoint", tmp_path)
    with pytest.raises(hfp.PackingError, match="batching"):
        run("rest", steps + 1, *resume, "--order", "short_to_long")


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_loop_that_stops_and_goes_on(few_texts, tiny_model, tmp_path, capsys):
    """In the middle of an epoch, and between two epochs."""
    resume = ("--resume_from_checkpoint", "last")

    def run(name, *more):
        options = ("--data", few_texts, "--model", tiny_model, "--max_tokens", 1024, "--save_steps", 2)
        options += ("--gradient_accumulation_steps", 2, "--output_dir", tmp_path / name)
        accelerate_loop.main(list(map(str, (*options, *more))))
        return capsys.readouterr().out

    whole = run("whole", "--num_train_epochs", 2)
    run("rest", "--max_steps", 3)
    assert "checkpoint-3: in epoch 0 after 6 of" in run("rest", "--num_train_epochs", 1, *resume)
    rest = run("rest", "--num_train_epochs", 2, *resume)
    assert "in epoch 1 after 0 of" in rest
    assert rest.split("evaluation loss ")[-1] == whole.split("evaluation loss ")[-1]
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")
    with pytest.raises(ValueError, match="--output_dir: expected a folder without checkpoints"):
        run("rest")
    with pytest.raises(ValueError, match="--learning_rate: expected 0.001"):
        run("rest", "--num_train_epochs", 3, *resume, "--learning_rate", 1)
    for epochs in (1, 2):
        with pytest.raises(SystemExit) as finished:
            run("rest", "--num_train_epochs", epochs, *resume)
        assert finished.value.code == 0


def test_a_loop_on_tokens(few_texts, tiny_model, tmp_path):
    """Rows may have input_ids already; then a tokenizer has to be named."""
    rows = load_dataset("json", data_files=str(few_texts), split="train")
    hfp.tokenize(rows, AutoTokenizer.from_pretrained(tiny_model)).save_to_disk(tmp_path / "tokens")
    flags = ["--data", str(tmp_path / "tokens"), "--max_steps", "1", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="--tokenizer: expected one beside --data with input_ids, got none"):
        accelerate_loop.main(flags)
    accelerate_loop.main([*flags, "--model", str(tiny_model)])
    assert weights(tmp_path / "out")


@pytest.mark.parametrize("name", ["cpu", "ddp", "fsdp2", "zero3"])
def test_accelerate_knows_the_configurations(name):
    config = load_config_from_file(str(CPU.with_stem(name)))
    assert config.distributed_type.value == {"fsdp2": "FSDP", "zero3": "DEEPSPEED"}.get(name, "MULTI_GPU")
    assert config.use_cpu == (name == "cpu")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3


@pytest.mark.parametrize("recipe", [accelerate_loop, pretrain_bucket])
def test_every_flag_is_explained_with_its_default(recipe, capsys):
    with pytest.raises(SystemExit):
        recipe.main(["--help"])
    explained = " ".join(capsys.readouterr().out.split("options:")[1].split())
    for field in dataclasses.fields(recipe.Arguments):
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        says = field.metadata["help"]
        assert (says if "default:" in says else f"{says} (default: {default})") in explained


@pytest.mark.parametrize("recipe", [accelerate_loop, pretrain_bucket])
@pytest.mark.parametrize("flag", ["--gradient_accumulation_steps", "--num_train_epochs", "--save_steps"])
def test_numbers_of_loops(recipe, flag):
    with pytest.raises(ValueError, match=f"{flag}: expected an integer from 1, got 0"):
        recipe.main([flag, "0"])
