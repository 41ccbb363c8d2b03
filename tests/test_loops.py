"""The recipes with buckets, a loop of accelerate and streams: stopped, killed, and resumed, on other numbers too."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import accelerate_loop
import common
import datasets
import nbformat
import numpy as np
import pretrain_bucket
import pretrain_stream
import pytest
import quickstart
import torch
from accelerate.commands.config.config_args import load_config_from_file
from datasets import load_dataset
from nbclient import NotebookClient
from processes import HANGS, IN_THE_FAMILY, RECIPES, run_script
from recipe_inputs import chats, prompts, save_tiny_model, texts, weights, write
from safetensors.torch import load_file
from tiers import fast_only
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
    with pytest.raises(hfp.PackingError, match="order: expected"):
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
    held_out = write(tmp_path / "held_out.jsonl", texts(9))
    flags = [
        *flags_of(files, tmp_path / "out"),
        "--max_steps",
        "10",
        "--max_length",
        "64",
        "--eval_data",
        str(held_out),
    ]
    trainer = pretrain_stream.main([*flags, *schedule])
    printed = capsys.readouterr().out
    assert "stream: 4 logical streams, 4 on each of 1 ranks" in printed
    assert "length of segments: 8 tokens in the first step, whole documents after 5 steps" in printed
    first, logs = (line for line in trainer.state.log_history if "loss" in line)
    assert f"loss: {first['loss']:.3f} at first, {logs['loss']:.3f} at last" in printed
    documents = hfp.tokenize(load_dataset("json", data_files=str(held_out), split="train"), trainer.processing_class)
    found = hfp.evaluation_loss(trainer.accelerator, trainer.model, documents)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(found, rel=1e-5)
    assert f"eval_loss = {found:.4f}" in " ".join(printed.split())
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


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


def numbers_after(text, words):
    found = [each.strip(",%") for each in text.split(words, 1)[1].split("\n")[0].split()]
    return [float(each.replace(",", "")) for each in found if each[0].isdigit()]


@pytest.mark.slow
def test_quickstart(tmp_path):
    data, output = write(tmp_path / "text.jsonl", texts()), tmp_path / "output"
    flags = ("--data", data, "--max_length", 256, "--steps", 2, "--output_dir", output)
    done = run_script(RECIPES / "quickstart.py", *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = done.stdout
    assert "300 documents, " in said
    rows = {name: numbers_after(said, name)[0] for name in ("padding, 16 a batch", "FixedLength(256)", "BestFit(256)")}
    assert rows["padding, 16 a batch"] == 300 > rows["BestFit(256)"] >= rows["FixedLength(256)"]
    assert numbers_after(said, "packed into ")[0] == rows["BestFit(256)"]
    assert said.index("stock model: isolated=False") < said.index("patched model: isolated=True")
    assert "times as fast (medians of 2 steps)" in said
    first, last, *packed = numbers_after(said, "loss of the first and of the last step: ")
    assert packed == pytest.approx([first, last], abs=1e-3)
    assert last < first
    assert f"picture: {output}/report.png" in said
    assert (output / "report.png").stat().st_size > 10_000
    assert said.index("seconds in all") < said.index("Next:")


@pytest.mark.parametrize("rows", fast_only([prompts(80), chats(80)], prompts(80)), ids=["prompts", "chats"])
def test_both_sides_take_the_same_documents_in_turn(rows, tmp_path, monkeypatch):
    taken, threads = [], set()

    def recorded(name, collate):
        def call(rows):
            taken.append((name, [row["input_ids"] for row in rows]))
            threads.add(torch.get_num_threads())
            return collate(rows)

        return call

    padding, packing = quickstart.DataCollatorForSeq2Seq, hfp.PackingCollator
    monkeypatch.setattr(quickstart, "DataCollatorForSeq2Seq", lambda *given: recorded("padded", padding(*given)))
    monkeypatch.setattr(hfp, "PackingCollator", lambda: recorded("packed", packing()))
    torch.set_num_threads(2)
    data = write(tmp_path / "rows.jsonl", rows)
    _, losses = quickstart.main(["--data", str(data), "--steps", "3", "--output_dir", str(tmp_path / "output")])
    assert [name for name, _ in taken] == ["padded", "packed"] * 3
    assert all(padded == packed for (_, padded), (_, packed) in zip(taken[::2], taken[1::2], strict=True))
    assert len({str(ids) for _, ids in taken}) == 3
    assert losses["packed"] == pytest.approx(losses["padded"], abs=1e-3)
    assert losses["packed"][0] == pytest.approx(losses["padded"][0], abs=1e-5)
    assert threads == {1}


def test_a_busy_machine_does_not_change_what_the_demo_says():
    """It slows the second half of the demo to a third, and one step to a tenth."""
    lengths = np.full((8, 16), 10)
    idle = {"padded": [5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0, 6.0], "packed": [1.0] * 8}
    busy = {"padded": [5.0, 6.0, 5.0, 6.0, 15.0, 18.0, 15.0, 60.0], "packed": [1.0] * 4 + [3.0] * 4}
    said = [quickstart.speeds(lengths, seconds) for seconds in (idle, busy)]
    assert all(each.endswith("5.5 times as fast") for each in said)
    after_three_steps = {name: seconds[:3] for name, seconds in idle.items()}
    assert quickstart.speeds(lengths, after_three_steps).startswith("padded 32, packed 160 tokens per ")


def test_what_does_not_fit(tmp_path):
    def says(row, *flags):
        data = write(tmp_path / "rows.jsonl", [row])
        with pytest.raises((ValueError, hfp.PackingError)) as refused:
            quickstart.main(["--data", str(data), "--output_dir", str(tmp_path / "output"), *flags])
        return str(refused.value)

    assert "--documents_per_step: expected at most 1, which fit a row, got 16" in says({"text": "a" * 99})
    assert "--steps: expected an integer from 1, got 0" in says({"text": "a"}, "--steps", "0")
    assert "got the fields body" in says({"body": "a"})
    with pytest.raises(ValueError, match="--data: expected a file ending in .jsonl"):
        quickstart.main(["--data", __file__])
    with pytest.raises(ValueError, match="--data: expected a file or a dataset's name, got 'nowhere.jsonl'"):
        quickstart.main(["--data", "nowhere.jsonl"])


def test_files_of_a_pattern(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"{name} one\n{name} two\n")
    assert common.read(str(tmp_path / "*.txt"))["text"][:] == ["a one", "a two", "b one", "b two"]
    with pytest.raises(ValueError, match="--data: expected a file or a dataset's name, got .*c.txt', which does not"):
        common.read(str(tmp_path / "c.txt"))


@pytest.mark.slow
def test_documents_of_the_standard_library():
    functions = common.functions()["text"][:]
    assert len(functions) > 10_000
    assert all("def " in function for function in functions)


def test_functions_after_a_form_feed_are_cut_where_they_stand(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text("def one():\n    pass\n\f\ndef two():\n    return 2\n")
    monkeypatch.setattr("common.sysconfig.get_paths", lambda: {"stdlib": tmp_path})
    assert common.functions()["text"][:] == ["def one():\n    pass\n", "def two():\n    return 2\n"]


@pytest.mark.slow
def test_the_notebook(tmp_path, monkeypatch):
    """The committed outputs are those of a run; HF_PACKING_WRITE_PAGES=1 writes them anew."""
    monkeypatch.setenv("PYTHONPATH", f"{RECIPES}{os.pathsep}{RECIPES.parent}")
    file = RECIPES / "quickstart.ipynb"
    book = nbformat.read(file, as_version=4)
    committed, metadata = [kinds_of_outputs(cell) for cell in book.cells], copy.deepcopy(book.metadata)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=HANGS, startup_timeout=HANGS, resources=folder, record_timing=False).execute()
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert printed.index("isolated: no") < printed.index("isolated: yes")
    assert 0 < numbers_after(printed, "packed: ")[0] < numbers_after(printed, "padded: ")[0]
    assert sum("image/png" in kinds for cell in book.cells for kinds in kinds_of_outputs(cell)) == 1
    for cell in book.cells:
        if cell.cell_type == "code":  # not the progress bars
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    if os.environ.get("HF_PACKING_WRITE_PAGES"):
        book.metadata = metadata
        file.write_text(json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n")  # a cell is one line
    else:
        assert [kinds_of_outputs(cell) for cell in book.cells] == committed


def kinds_of_outputs(cell):
    """The kinds of the outputs one after another; what a cell prints comes in pieces of any number."""
    kinds = [sorted(output.get("data", [output.output_type])) for output in cell.get("outputs", [])]
    return [each for each, same in groupby(kinds) for _ in (same if each != ["stream"] else [same])]
