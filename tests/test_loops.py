"""The training loops of recipes: buckets and accelerate, stopped, killed while they save, and resumed."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import accelerate_loop
import common
import pretrain_bucket
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from datasets import load_dataset
from processes import HANGS
from recipe_inputs import save_tiny_model, texts, weights, write
from transformers import AutoTokenizer

import hf_packing as hfp

RECIPES = Path(__file__).parent.parent / "recipes"
CPU = RECIPES / "configs" / "cpu.yaml"


@pytest.fixture
def few_texts(tmp_path):
    return write(tmp_path / "few.jsonl", texts(80))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


LAST = ("--resume_from_checkpoint", "last")


@pytest.mark.slow
def test_all_processes_have_the_same_bucket_each_time(tiny_model, tmp_path):
    """As accelerate starts them."""
    command = [Path(sys.executable).parent / "accelerate", "launch", "--config_file", CPU]
    command += [
        RECIPES / "pretrain_bucket.py",
        "--data",
        write(tmp_path / "text.jsonl", texts()),
        "--model",
        tiny_model,
        "--max_tokens",
        512,
    ]
    command += ["--buckets", 64, 128, 256, 512, "--output_dir", tmp_path / "out", "--max_steps", -1]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=HANGS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "on 2 processes, the same bucket on all of them each time: True" in done.stdout
    table = done.stdout.split("speed\n", 1)[1].split("\nspeed:")[0].splitlines()
    rows = {int(bucket): int(rows) for bucket, _, rows, *_ in map(str.split, table)}
    assert len(rows) >= 3
    assert all(each == 512 // bucket for bucket, each in rows.items())


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bucket_pre_training_goes_on_in_the_second_epoch(few_texts, tiny_model, tmp_path, capsys, accumulation):
    """Also after it was killed while it saved."""

    def run(name, steps, *more):
        options = ("--data", few_texts, "--model", tiny_model, "--buckets", 128, 512, "--max_tokens", 1024)
        options += ("--gradient_accumulation_steps", accumulation, "--output_dir", tmp_path / name)
        pretrain_bucket.main(list(map(str, (*options, "--max_steps", steps, *more))))
        return float(capsys.readouterr().out.split("of the last ", 1)[1].split()[0].rstrip(","))

    steps = 21 // accumulation
    whole = run("whole", steps)
    run("rest", 4)
    assert run("rest", steps - 2, *LAST) != whole
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(common.TrainerState, "save_to_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run("rest", steps, *LAST, "--save_steps", steps - 1)
    assert run("rest", steps, *LAST) == whole
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")
    kept = sorted(file.name for file in (tmp_path / "rest").iterdir() if file.is_dir())
    assert kept == sorted([f"checkpoint-{steps - 2}", f"checkpoint-{steps}"])
    with pytest.raises(hfp.PackingError, match="batching"):
        run("rest", steps + 1, *LAST, "--order", "short_to_long")


@pytest.mark.slow
def test_a_loop_goes_on_in_the_middle_of_an_epoch_and_between_two(few_texts, tiny_model, tmp_path, capsys):
    def run(name, *more):
        options = ("--data", few_texts, "--model", tiny_model, "--max_tokens", 1024, "--save_steps", 2)
        options += ("--gradient_accumulation_steps", 2, "--output_dir", tmp_path / name)
        accelerate_loop.main(list(map(str, (*options, *more))))
        return capsys.readouterr().out

    whole = run("whole", "--num_train_epochs", 2)
    run("rest", "--max_steps", 3)
    assert "checkpoint-3: in epoch 0 after 6 of" in run("rest", "--num_train_epochs", 1, *LAST)
    rest = run("rest", "--num_train_epochs", 2, *LAST)
    assert "in epoch 1 after 0 of" in rest
    assert rest.split("evaluation loss ")[-1] == whole.split("evaluation loss ")[-1]
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")


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
