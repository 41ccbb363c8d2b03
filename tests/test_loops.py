"""The recipes with buckets, a loop of accelerate and streams: stopped, killed, and resumed, on other numbers too."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import accelerate_loop
import common
import datasets
import pretrain_bucket
import pretrain_stream
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from datasets import load_dataset
from processes import HANGS, IN_THE_FAMILY, RECIPES, run_script
from recipe_inputs import save_tiny_model, texts, weights, write
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoTokenizer

import hf_packing as hfp

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
    command = [Path(sys.executable).parent / "accelerate", "launch", "--config_file", CPU]
    command += [RECIPES / "pretrain_bucket.py", "--data", write(tmp_path / "text.jsonl", texts()), "--max_tokens", 512]
    command += ["--buckets", 64, 128, 256, 512, "--output_dir", tmp_path / "out", "--max_steps", -1]
    command += ["--model", tiny_model]
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


RECIPE = Path(pretrain_stream.__file__)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(4):
        short = [f"short {number} {row} " * (1 + row % 5) for row in range(60)]
        rows = datasets.Dataset.from_dict({"text": short, "number": list(range(60))})
        rows.to_parquet(tmp_path / "data" / f"short-{number}.parquet")
        long = [f"the long text {number} {row} " * (20 + row % 30) for row in range(20)]
        lines = "\n".join(json.dumps({"text": text}) for text in long)
        (tmp_path / "data" / f"long-{number}.jsonl").write_text(lines)
    return [f"short={tmp_path}/data/short-*.parquet", f"long={tmp_path}/data/long-*.jsonl"]


def flags_of(files, output, *more):
    sizes = ["--max_length", "128", "--rows_per_step", "4", "--streams", "4", "--window_packs", "4"]
    steps = ["--max_steps", "18", "--save_steps", "6", "--output_dir", str(output), "--report_to", "none"]
    return ["--data", *files, "--shares", "0.5", "0.5", *sizes, *steps, *more]


def test_a_run(files, tmp_path, capsys):
    schedule = ["--start_length", "8", "--growth_steps", "5"]
    flags = [*flags_of(files, tmp_path / "out"), "--max_steps", "10", "--max_length", "64"]
    trainer = pretrain_stream.main([*flags, *schedule])
    printed = capsys.readouterr().out
    assert "stream: 4 logical streams, 4 on each of 1 ranks" in printed
    assert "length of segments: 8 tokens in the first step, whole documents after 5 steps" in printed
    first, logs = (line for line in trainer.state.log_history if "loss" in line)
    assert f"loss: {first['loss']:.3f} at first, {logs['loss']:.3f} at last" in printed
    assert logs["source_short"] == pytest.approx(0.5, abs=0.1)
    assert logs["packing_efficiency"] > 0.9
    with pytest.raises(ValueError, match="--output_dir: expected a folder without checkpoints"):
        pretrain_stream.main(flags_of(files, tmp_path / "out"))
    with pytest.raises(SystemExit) as finished:
        pretrain_stream.main([*flags, *schedule, "--resume_from_checkpoint", "last"])
    assert finished.value.code == 0
    assert "checkpoint-10 has the last step of the run: nothing is left to train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "a=nowhere/*.parquet"], "--data: expected NAME=FILES, .* got 'a=nowhere/*.parquet'"),
        (["--data", "a={folder}/data/*"], "--data: expected NAME=FILES, with files ending in .jsonl, "),
        (["--data", "web/*.parquet"], "--data: expected NAME=FILES, .* got 'web/*.parquet'"),
        (["--data", "{short}", "--text_field", "body"], "expected body, got the fields text, number; text_field"),
        (["--data", "{short}", "--shares", "0.5", "0.5"], "--shares: expected 1 numbers, one for each source, got 2"),
        (["--start_length", "8"], "--start_length, --growth_steps: expected both or neither"),
        (["--gradient_accumulation_steps", "4"], "expected none, since --rows_per_step decides that, got 4"),
        (["--per_device_train_batch_size", "4"], "--per_device_train_batch_size: expected none"),
        (["--rows_per_step", "0"], "--rows_per_step: expected n x 1 processes, got 0"),
    ],
)
def test_bad_flags(files, tmp_path, flags, said):
    flags = [each.format(folder=tmp_path, short=files[0]) for each in flags]
    with pytest.raises(ValueError, match=said.replace("*.parquet", r"\*.parquet")):
        pretrain_stream.main([*flags, "--output_dir", str(tmp_path / "out"), "--report_to", "none"])


@pytest.mark.slow
def test_killed_on_2_processes_and_resumed_on_4_and_on_1(files, tmp_path):
    flags = flags_of(files, tmp_path / "out")
    whole = run_script(RECIPE, *flags_of(files, tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr[-4000:]
    for ranks, steps, more in ((2, 8, []), (4, 14, ["--resume_from_checkpoint", "last"])):
        killed = run_script(IN_THE_FAMILY / "killed_recipe.py", steps, RECIPE, *flags, *more, ranks=ranks)
        assert killed.returncode, killed.stdout
        errors = [line for line in killed.stderr.splitlines() if "Error" in line]
        assert all("Connection" in line for line in errors), killed.stderr[-4000:]  # to the rank that was killed first
    done = run_script(RECIPE, *flags, "--resume_from_checkpoint", "last", "--dataloader_num_workers", "1")
    assert done.returncode == 0, done.stderr[-4000:]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out")]
    for name, expected in weights[0].items():
        assert_close(weights[1][name], expected, rtol=1e-3, atol=1e-4)
