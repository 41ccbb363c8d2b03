"""The recipes, run as a user runs them, on less."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk
from tiny_models import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import hf_packing as hfp

RECIPES = Path(__file__).parent.parent / "recipes"


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


def test_three_lines_of_hf_packing_in_sft():
    lines = [line for line in (RECIPES / "sft.py").read_text().splitlines() if "hfp" in line]
    assert len(lines) == 3


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


def sft(data, model, folder, pack_length):
    said = run(
        *("sft.py", "--data", data, "--model", model, "--pack_length", pack_length, "--output_dir", folder / "output"),
        *("--max_steps", 2, "--per_device_train_batch_size", 1, "--logging_steps", 1, "--report_to", "none"),
    )
    assert "'loss'" in said
    assert (folder / "output" / "model.safetensors").is_file()
    return said


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
