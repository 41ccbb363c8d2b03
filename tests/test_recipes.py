"""The recipes, run as a user runs them, on less."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from datasets import load_from_disk
from nbclient import NotebookClient
from tiny_models import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import hf_packing as hfp

RECIPES = Path(__file__).parent.parent / "recipes"
CONFIGS = RECIPES / "configs"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


def run(recipe, *arguments):
    command = [sys.executable, str(RECIPES / recipe), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
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


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder with a tiny model and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1]).save_pretrained(
        folder
    )
    build("Llama", vocab_size=300, pad_token_id=1, bos_token_id=None, eos_token_id=0).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", ["best-fit", "first-come"])
def test_quickstart(text_file, tmp_path, strategy):
    output = tmp_path / "output"
    said = run(
        "quickstart.py",
        "--data",
        text_file,
        "--max-length",
        256,
        "--steps",
        2,
        "--strategy",
        strategy,
        "--output",
        output,
    )
    for name in ("padding, 16 a batch", "fixed length", "first come", "best fit"):
        assert name in said
    assert "stock model:   isolated=False" in said
    assert "patched model: isolated=True" in said
    assert number_after(said, "difference ") <= 1e-5
    assert "16 documents per step, 32 documents: padded" in said
    losses = said.split("loss of the last step: padded ")[1].split("\n")[0]
    padded, packed = (float(value) for value in losses.split(", packed "))
    assert packed == pytest.approx(padded, abs=1e-2)
    plan = hfp.PackingPlan.load(output / "plan")
    packed = load_from_disk(output / "packed")
    assert len(packed) == plan.num_packs < plan.num_documents == 300
    assert len(hfp.unpack(packed, plan)) == 300
    assert (output / "report.png").stat().st_size > 10_000


def test_quickstart_on_own_model_and_prompts(tiny_model, tmp_path, rng):
    rows = [{"prompt": "What?" * int(n), "completion": "That." * int(n)} for n in rng.integers(1, 9, 80)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    said = run(
        "quickstart.py",
        "--data",
        file,
        "--model",
        tiny_model,
        "--max-length",
        128,
        "--steps",
        2,
        "--output",
        tmp_path / "output",
    )
    assert "times as fast" in said


def test_documents_of_the_standard_library():
    from documents import read_documents, standard_library_functions

    functions = standard_library_functions()["text"][:]
    assert len(functions) > 10_000
    assert read_documents(None)[0]["text"] == functions[0]
    assert all("def " in function for function in functions)


def test_functions_after_a_form_feed_are_cut_where_they_stand(tmp_path, monkeypatch):
    import documents

    (tmp_path / "module.py").write_text("def one():\n    pass\n\f\ndef two():\n    return 2\n")
    monkeypatch.setattr("documents.sysconfig.get_paths", lambda: {"stdlib": tmp_path})
    assert documents.standard_library_functions()["text"][:] == ["def one():\n    pass\n", "def two():\n    return 2\n"]


def test_a_missing_extra_is_named():
    code = f"import sys, runpy; sys.modules['matplotlib'] = None; runpy.run_path({str(RECIPES / 'quickstart.py')!r})"
    home = {**os.environ, "PYTHONPATH": str(RECIPES)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=home, check=False)
    assert 'MissingDependencyError: the picture needs matplotlib: pip install "hf-packing[plots]"' in done.stderr


@pytest.mark.parametrize(
    ("recipe", "data", "message"),
    [
        ("sft.py", "nowhere.jsonl", "--data: expected a file or a dataset's name, got 'nowhere.jsonl'"),
        ("quickstart.py", "nowhere.jsonl", "--data: expected a file or a dataset's name, got 'nowhere.jsonl'"),
        ("quickstart.py", __file__, "--data: expected a file ending in .jsonl"),
    ],
)
def test_data_that_is_not_there(recipe, data, message):
    more = ["--model", "none", "--output_dir", "none"] if recipe == "sft.py" else []
    command = [sys.executable, str(RECIPES / recipe), "--data", data, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr


def test_arguments_that_do_not_fit(tmp_path, tiny_model):
    def said(recipe, row, *arguments):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row))
        command = [sys.executable, str(RECIPES / recipe), "--data", str(file), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        assert done.returncode == 1
        return done.stderr

    sft_arguments = ["--model", tiny_model, "--output_dir", tmp_path, "--report_to", "none"]
    chat = {"messages": [{"role": "user", "content": "Q"}]}
    assert "--packing: expected False" in said("sft.py", chat, *sft_arguments, "--packing", "True")
    assert "--data: expected messages, or prompt and completion, got columns text" in said(
        "sft.py", {"text": "a"}, *sft_arguments
    )
    assert "got columns body" in said("quickstart.py", {"body": "a"}, "--output", tmp_path / "output")
    assert "--tokenizer: expected one beside --data with input_ids" in said("quickstart.py", {"input_ids": [1]})


def test_sft_on_chats(tiny_model, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "Hi" * n}, {"role": "assistant", "content": "Ho" * n}] * (1 + n % 2)}
        for n in range(1, 40)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    said = sft(file, tiny_model, tmp_path, 512)
    assert "39 documents in" in said


def test_sft_on_real_problems(shared_data, tiny_model, tmp_path):
    said = sft(shared_data / "math.jsonl.gz", tiny_model, tmp_path, 4096)
    assert "7,473 documents in" in said


@pytest.mark.parametrize("strategy", ["best_fit", "bucket"])
def test_sft_from_a_yaml_file(tiny_model, tmp_path, strategy):
    rows = [{"prompt": "What?" * (n % 7 + 1), "completion": "That." * (n % 9 + 1)} for n in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "data": str(tmp_path / "prompts.jsonl"),
        "model": str(tiny_model),
        "strategy": strategy,
        "pack_length": 128,
        "loss": "sequence",
        "output_dir": str(tmp_path / "output"),
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "report_to": "none",
    }
    (tmp_path / "sft.yaml").write_text("\n".join(f"{name}: {value}" for name, value in settings.items()))
    said = run("sft.py", "--config", tmp_path / "sft.yaml")
    assert "60 documents in" in said
    assert "the largest of 128 tokens" in said or "the largest of 12" in said


def sft(data, model, folder, pack_length):
    said = run(
        *("sft.py", "--data", data, "--model", model, "--pack_length", pack_length, "--output_dir", folder / "output"),
        *("--max_steps", 2, "--logging_steps", 1, "--report_to", "none"),
    )
    assert "'loss'" in said
    assert "ranks busy while the busiest works" in said
    assert (folder / "output" / "model.safetensors").is_file()
    return said


def on_two_processes(recipe, *arguments):
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", str(CONFIGS / "cpu.yaml")]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += [str(RECIPES / recipe), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=threads, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_bucket_pre_training_on_two_processes(text_file, tiny_model):
    said = on_two_processes(
        *("pretrain_bucket.py", "--data", text_file, "--tokenizer", tiny_model, "--model", tiny_model),
        *("--buckets", 64, 128, 256, 512, "--tokens-per-batch", 512, "--steps", 0),
    )
    assert "steps on 2 processes, the same bucket on all of them at every step: True" in said
    table = said.split("speed\n", 1)[1].split("\nspeed:")[0].splitlines()
    rows = {int(bucket): int(rows) for bucket, _, rows, *_ in map(str.split, table)}
    assert len(rows) >= 3
    assert all(each == 512 // bucket for bucket, each in rows.items())


def test_a_loop_that_stops_and_goes_on(text_file, tiny_model, tmp_path):
    options = ("--data", text_file, "--model", tiny_model, "--max-tokens", 512, "--output", tmp_path, "--save-every", 2)
    whole = on_two_processes("accelerate_loop.py", *options, "--loss", "sequence")
    on_two_processes("accelerate_loop.py", *options, "--loss", "sequence", "--steps", 5)
    rest = on_two_processes("accelerate_loop.py", *options, "--loss", "sequence", "--resume")
    assert "going on in epoch 0 after 5 of" in rest
    assert rest.split("evaluation loss ")[1] == whole.split("evaluation loss ")[1]
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["cpu", "ddp", "fsdp2", "zero3"])
def test_accelerate_knows_the_configurations(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type.value == {"fsdp2": "FSDP", "zero3": "DEEPSPEED"}.get(name, "MULTI_GPU")
    assert config.use_cpu == (name == "cpu")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3


def test_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(RECIPES))
    book = nbformat.read(RECIPES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert "isolated: no" in printed
    assert "isolated: yes" in printed
    assert "ranks busy while the busiest works" in printed


def test_prompts_are_masked(tiny_model):
    from sft import CHATML, IGNORED, tokenise

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    tokenizer.chat_template = CHATML

    def trained_text(row):
        encoded = tokenise(row, tokenizer)
        assert len(encoded["labels"]) == len(encoded["input_ids"])
        return tokenizer.decode([label for label in encoded["labels"] if label != IGNORED]), tokenizer.decode(
            encoded["input_ids"]
        )

    user, assistant = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    assert trained_text({"prompt": "Q", "completion": "A"}) == ("A<|endoftext|>", "Q\nA<|endoftext|>")
    chat = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    assert trained_text({"messages": [user, assistant]}) == ("A<|im_end|>\n", chat)
    assert trained_text({"messages": [user, assistant] * 2}) == ("A<|im_end|>\n" * 2, chat * 2)
    assert trained_text({"prompt": [user, assistant, user], "completion": [assistant]}) == ("A<|im_end|>\n", chat * 2)
