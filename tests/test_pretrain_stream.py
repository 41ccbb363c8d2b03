"""recipes/pretrain_stream.py: the rows of files as a stream, and a run that is killed and resumed on other numbers."""

import json
from pathlib import Path

import datasets
import pretrain_stream
import pytest
from processes import IN_THE_FAMILY, run_script
from safetensors.torch import load_file
from torch.testing import assert_close

RECIPE = Path(pretrain_stream.__file__)


@pytest.fixture
def files(tmp_path):
    """Short texts in parquet files, and long ones as JSON Lines."""
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
