"""The recipes, run as a user runs them, on less."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import accelerate_loop
import in_turn
import nbformat
import pretrain_bucket
import pytest
import quickstart
import sft
from accelerate.commands.config.config_args import load_config_from_file
from datasets import load_from_disk
from nbclient import NotebookClient
from processes import HANGS, run_script
from recipe_inputs import exits, save_tiny_model
from safetensors.torch import load_file

import hf_packing as hfp
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


def quickstart_with(monkeypatch, *arguments):
    """In this process."""
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *map(str, arguments)])
    quickstart.main()


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["best-fit", "first-come"])
def test_quickstart(text_file, tmp_path, strategy):
    output = tmp_path / "output"
    options = ("--data", text_file, "--max-length", 256, "--steps", 2, "--strategy", strategy, "--output", output)
    said = run("quickstart.py", *options)
    for name in ("padding, 16 a batch", "fixed length", "first come", "best fit"):
        assert name in said
    assert "stock model:   isolated=False" in said
    assert "patched model: isolated=True" in said
    assert number_after(said, "difference ") <= 1e-5
    assert "16 documents per step, 2 steps of each in turn: padded" in said
    assert number_after(said, "half of the pairs: ") <= number_after(said, "\npacked ")
    losses = said.split("loss of the last step: padded ")[1].split("\n")[0]
    padded, packed = (float(value) for value in losses.split(", packed "))
    assert packed == pytest.approx(padded, abs=1e-2)
    plan = hfp.PackingPlan.load(output / "plan")
    packed = load_from_disk(output / "packed")
    assert len(packed) == plan.num_packs < plan.num_documents == 300
    assert len(hfp.unpack(packed, plan)) == 300
    assert (output / "report.png").stat().st_size > 10_000


@pytest.mark.slow
def test_quickstart_on_own_model_and_prompts(tiny_model, tmp_path, rng):
    rows = [{"prompt": "What?" * int(n), "completion": "That." * int(n)} for n in rng.integers(1, 9, 80)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = ("--data", file, "--model", tiny_model, "--max-length", 128, "--steps", 2)
    assert "times as fast" in run("quickstart.py", *options, "--output", tmp_path / "output")


def sides(padded, packed):
    """Of a demo whose steps took so many seconds, and in whose steps nothing else happens."""
    taken = []

    class Recorded(in_turn.Side):
        def __post_init__(self):
            pass

        def step(self, number):
            taken.append(self.name)
            self.seconds.append(seconds[self.name][number])
            self.tokens.append(100)
            self.losses.append(1.0)

    seconds = {"padded": padded, "packed": packed}
    batches = [[{}] * 16] * len(padded)
    return [Recorded(name, None, batches, None, 1e-3) for name in seconds], taken


def test_the_demo_takes_its_steps_in_turn():
    both, taken = sides([1, 1, 1], [1, 1, 1])
    in_turn.in_turn(both)
    assert taken == ["padded", "packed"] * 3


def test_the_demo_does_not_count_what_others_do(monkeypatch):
    if in_turn.DEVICE != "cpu":
        pytest.skip("a card has no CPU seconds")
    began, wall = in_turn.now(), time.perf_counter()
    while time.perf_counter() < wall + 0.3:
        time.sleep(0.1)
    assert in_turn.now() - began < 0.2
    (side, _), threads = sides([1], [1])[0], []
    monkeypatch.setattr(type(side), "step", lambda *_: threads.append(in_turn.torch.get_num_threads()))
    before = in_turn.torch.get_num_threads()
    in_turn.torch.set_num_threads(2)
    try:
        in_turn.in_turn([side])
        assert (threads, in_turn.torch.get_num_threads()) == ([1], 2)
    finally:
        in_turn.torch.set_num_threads(before)


def test_a_busy_machine_does_not_change_what_the_demo_says():
    """It slows the second half of the demo to a third, and one step to a tenth."""
    idle, _ = sides([5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0, 6.0], [1.0] * 8)
    busy, _ = sides([5.0, 6.0, 5.0, 6.0, 15.0, 18.0, 15.0, 60.0], [1.0] * 4 + [3.0] * 4)
    said = []
    for both in (idle, busy):
        in_turn.in_turn(both)
        said.append(in_turn.summary(*both).split("packed ")[2].split("\n")[0])
    assert said[0].startswith("5.5 times as fast (median of pairs of steps; half of the pairs: 5.0 to 6.0)")
    assert said[1] == said[0]


@pytest.mark.slow
def test_documents_of_the_standard_library():
    from documents import read_documents

    functions = read_documents(None)["text"][:]
    assert len(functions) > 10_000
    assert all("def " in function for function in functions)


def test_functions_after_a_form_feed_are_cut_where_they_stand(tmp_path, monkeypatch):
    import documents

    (tmp_path / "module.py").write_text("def one():\n    pass\n\f\ndef two():\n    return 2\n")
    monkeypatch.setattr("documents.sysconfig.get_paths", lambda: {"stdlib": tmp_path})
    assert documents.standard_library_functions()["text"][:] == ["def one():\n    pass\n", "def two():\n    return 2\n"]


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r'the picture needs matplotlib: pip install "hf-packing\[plots\]"'
    with pytest.raises(hfp.MissingDependencyError, match=message):
        runpy.run_path(str(RECIPES / "quickstart.py"))


@pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed
def test_data_that_is_not_there(monkeypatch):
    nowhere = "--data: expected a file or a dataset's name, got 'nowhere.jsonl'"
    assert nowhere in exits(quickstart_with, monkeypatch, "--data", "nowhere.jsonl")
    assert "--data: expected a file ending in .jsonl" in exits(quickstart_with, monkeypatch, "--data", __file__)


@pytest.mark.slow
def test_a_recipe_that_refuses_ends_with_an_error():
    command = [sys.executable, str(RECIPES / "quickstart.py"), "--data", "nowhere.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--data: expected a file or a dataset's name, got 'nowhere.jsonl'" in done.stderr


@pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed
def test_arguments_that_do_not_fit(tmp_path, tiny_model, monkeypatch):
    file = tmp_path / "rows.jsonl"

    def quickstart_says(row, *arguments):
        file.write_text(json.dumps(row))
        return exits(quickstart_with, monkeypatch, "--data", file, "--output", tmp_path / "output", *arguments)

    def sft_says(row, *arguments):
        file.write_text(json.dumps(row))
        known = ("--data", file, "--model", tiny_model, "--output_dir", tmp_path, "--report_to", "none")
        return exits(sft.main, [str(each) for each in (*known, *arguments)])

    chat = {"messages": [{"role": "user", "content": "Q"}]}
    assert "--packing: expected False" in sft_says(chat, "--packing", "True")
    message = "--data: expected messages, or prompt and completion, got columns text"
    assert message in sft_says({"text": "a"})
    message = "--documents-per-step: expected at most 1, the documents that fit a row, got 16"
    assert message in quickstart_says({"text": "a" * 99})
    assert "got columns body" in quickstart_says({"body": "a"})
    assert "--tokenizer: expected one beside --data with input_ids" in quickstart_says({"input_ids": [1]})


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


LESS_OF_THE_NOTEBOOK = {"select(range(2000))": "select(range(300))", "max_steps=20": "max_steps=4"}


@pytest.mark.slow
def test_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(RECIPES))
    book = nbformat.read(RECIPES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    for whole, less in LESS_OF_THE_NOTEBOOK.items():
        (cell,) = (cell for cell in book.cells if whole in cell.source)
        cell.source = cell.source.replace(whole, less)
    NotebookClient(
        book, timeout=HANGS, startup_timeout=HANGS, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert "isolated: no" in printed
    assert "isolated: yes" in printed
    assert "utilization of the ranks" in printed
