"""The command as a user meets it: what it prints, its exit codes, and what is left after an interruption."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time

import datasets
import pytest
from filelock import FileLock
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_packing as hfp
from hf_packing.attention.survey.tiny import tiny_model
from hf_packing.cli import main

WORDS = {word: number for number, word in enumerate(["[UNK]", "<end>", "one", "two", "three"])}


@pytest.fixture
def tokenizer(tmp_path):
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(f'{{"text": "{"one " * (number % 13 + 1)}"}}\n' for number in range(300)))
    return str(file)


def test_report(capsys, tmp_path, data, tokenizer):
    page = tmp_path / "out" / "report.html"
    given = ["report", data, "--tokenizer", tokenizer, "--max-length", "16", "32", "--output", str(page)]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "300 documents, 2,0" in printed
    assert "take BestFit(16)" in printed
    assert f"written: {page}" in printed
    assert page.is_file()
    assert all((page.parent / "report-pictures" / f"{name}.png").is_file() for name in ("lengths", "fill", "ranks"))


def test_report_as_json(capsys, data, tokenizer):
    given = ["report", data, "--tokenizer", tokenizer, "--max-length", "16", "32", "--json"]
    assert main([*given, "--strategy", "multipack", "bucket"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [row["strategy"] for row in found["strategies"]]
    assert names == ["Multipack(16)", "Multipack(32)", "Bucket((16, 32))"]
    assert found["lengths"]["documents"] == 300


def test_pack(capsys, tmp_path, data, tokenizer):
    given = ["pack", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "packed")]
    assert main(given) == 0
    assert "300 documents" in capsys.readouterr().out
    packed = datasets.load_from_disk(tmp_path / "packed")
    lengths = [number % 13 + 1 for number in range(300)]
    assert sorted(length for row in packed["seq_lengths"][:] for length in row) == sorted(lengths)
    assert set(packed.column_names) == {"input_ids", "labels", "position_ids", "seq_lengths"}
    assert (
        hfp.unpack(packed, hfp.PackingPlan.load(tmp_path / "packed" / "plan"))["input_ids"][12] == [WORDS["one"]] * 13
    )
    assert main(given) == 2
    assert "--output: expected a folder that does not exist" in capsys.readouterr().err
    assert main([*given, "--overwrite", "--strategy", "first_come", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == 300
    assert len(datasets.load_from_disk(tmp_path / "packed")) > len(packed)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_warnings_are_one_line_on_the_error_stream(tmp_path, data, tokenizer):
    with open(data, "a") as file:
        file.write('{"text": ""}\n')
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "packed"), "--json"]
    command = [sys.executable, "-m", "hf_packing.cli", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning: pack skips 1 documents without a token\n" in done.stderr
    assert "packed_dataset.py" not in done.stderr
    assert json.loads(done.stdout)["num_documents"] == 301


def test_packing_texts_ends_them_where_the_tokenizer_can(tmp_path, data, tokenizer):
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "folder")
    given = ["pack", data, "--tokenizer", str(tmp_path / "folder"), "--max-length", "16", "--output"]
    assert main([*given, str(tmp_path / "ended")]) == 0
    assert main([*given, str(tmp_path / "not"), "--no-eos"]) == 0
    ended, not_ended = (datasets.load_from_disk(tmp_path / name) for name in ("ended", "not"))
    assert sum(ids.count(WORDS["<end>"]) for ids in ended["input_ids"]) == 300
    assert sum(map(len, ended["input_ids"])) == sum(map(len, not_ended["input_ids"])) + 300


def test_only_a_dataset_is_overwritten(capsys, tmp_path, data, tokenizer):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("...")
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "precious"), "--overwrite"]
    assert main(given) == 2
    assert "--overwrite: expected a saved dataset to replace" in capsys.readouterr().err
    assert (tmp_path / "precious" / "thesis.tex").is_file()


def test_the_plan_is_that_of_the_rows(capsys, tmp_path, data, tokenizer, monkeypatch):
    """Also where planning twice would give two plans, as with a time limit."""
    from hf_packing.report import packed_dataset

    plans = iter(range(9))
    plan_packing = packed_dataset.plan_packing
    monkeypatch.setattr(
        packed_dataset, "plan_packing", lambda lengths, _: plan_packing(lengths, hfp.BestFit(16, seed=next(plans)))
    )
    given = ["pack", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "packed")]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    packed, plan = datasets.load_from_disk(tmp_path / "packed"), hfp.PackingPlan.load(tmp_path / "packed" / "plan")
    assert found["rows"] == found["num_packs"] == len(packed) == plan.num_packs
    assert found["strategy"] == "BestFit(16)"
    lengths = [number % 13 + 1 for number in range(300)]
    assert list(map(len, hfp.unpack(packed, plan)["input_ids"][:])) == lengths
    assert next(plans) == 1, "planned once"


def test_a_missing_package_is_said_before_documents_are_read(capsys, tmp_path, data, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr("hf_packing.report.corpus.Corpus.blocks", lambda _: pytest.fail("documents are read"))
    for given in (["report", data], ["pack", data, "--output", str(tmp_path / "packed")]):
        assert main([*given, "--tokenizer", tokenizer, "--strategy", "optimal"]) == 2
        assert "needs scipy" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.jsonl", "tokenizer.json"]


def test_a_tokenizer_without_an_end_is_said(capsys, data, tokenizer):
    given = ["report", data, "--tokenizer", tokenizer, "--max-length", "16"]
    command = [sys.executable, "-m", "hf_packing.cli", *given]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert said == f"warning: {tokenizer} names no end-of-sequence token: documents end without one\n"
    assert main([*given, "--no-eos"]) == 0
    assert capsys.readouterr().err == ""


def test_a_configuration_that_makes_no_model(capsys, tmp_path):
    config = tiny_model("llama", "causal").config
    config.hidden_act = "nosuch"
    config.save_pretrained(tmp_path / "model")
    assert main(["check", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert "MODEL: expected a configuration that makes a model" in said
    assert said.count("\n") == 1


def test_an_interrupted_run_goes_on(capsys, tmp_path, data, tokenizer, monkeypatch):
    monkeypatch.setattr("hf_packing.report.corpus.CHARACTERS_AT_ONCE", 1000)
    given = [
        "pack",
        data,
        "--tokenizer",
        tokenizer,
        "--max-length",
        "16",
        "--output",
        str(tmp_path / "packed"),
        "--json",
    ]
    from hf_packing.report import packed_dataset

    write, written = packed_dataset.write_shard, []

    def interrupted(file, *columns):
        if len(written) == 3:
            raise KeyboardInterrupt
        write(file, *columns)
        written.append(file)

    monkeypatch.setattr(packed_dataset, "write_shard", interrupted)
    assert main(given) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert not (tmp_path / "packed").exists()
    assert (tmp_path / ".packed.partial").is_dir()
    written.clear()
    monkeypatch.setattr(packed_dataset, "write_shard", lambda file, *columns: written.append(write(file, *columns)))
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["tokenised_before"] < found["num_documents"] == 300
    whole = datasets.load_from_disk(tmp_path / "packed")
    given[given.index("--output") + 1] = str(tmp_path / "at_once")
    assert main(given) == 0
    assert whole.to_dict() == datasets.load_from_disk(tmp_path / "at_once").to_dict()


@pytest.mark.parametrize("where", ["datasets.Dataset.save_to_disk", "hf_packing.report.packed_dataset.replace"])
def test_interrupted_after_packing_it_goes_on_as_well(tmp_path, data, tokenizer, monkeypatch, where):
    given = ["pack", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "packed")]
    monkeypatch.setattr(where, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(given) == 130
    monkeypatch.undo()
    assert main(given) == 0
    assert len(datasets.load_from_disk(tmp_path / "packed")) > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.jsonl", "packed", "tokenizer.json"]


def test_what_is_replaced_comes_back(tmp_path, data, tokenizer, monkeypatch):
    given = ["pack", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "packed")]
    assert main(given) == 0
    before = datasets.load_from_disk(tmp_path / "packed").to_dict()
    monkeypatch.setattr(
        "hf_packing.report.packed_dataset.put_in_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert main([*given, "--overwrite", "--strategy", "first_come"]) == 130
    assert datasets.load_from_disk(tmp_path / "packed").to_dict() == before


def test_two_runs_at_once(capsys, tmp_path, data, tokenizer):
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "packed")]
    with FileLock(tmp_path / ".packed.lock"):
        assert main(given) == 2
    assert "--output: expected one that no other run writes" in capsys.readouterr().err


def test_another_end_of_sequence_tokenises_anew(capsys, tmp_path, data, tokenizer, monkeypatch):
    given = ["pack", data, "--output", str(tmp_path / "packed"), "--json", "--tokenizer", str(tmp_path / "folder")]
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "folder")
    monkeypatch.setattr("datasets.Dataset.save_to_disk", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(given) == 130
    monkeypatch.undo()
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="one").save_pretrained(tmp_path / "folder")
    capsys.readouterr()
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["tokenised_before"] == 0


def test_files_that_cannot_be_read_or_written(capsys, tmp_path, data, tokenizer):
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00")
    (tmp_path / "file").write_text("no folder")
    for given in (
        ["report", str(tmp_path / "cut.jsonl.gz"), "--tokenizer", tokenizer],
        ["report", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "file" / "a.html")],
        ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "file" / "packed")],
    ):
        assert main(given) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1


def test_shards_of_other_documents_are_not_used(capsys, tmp_path, data, tokenizer, monkeypatch):
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "packed"), "--json"]
    monkeypatch.setattr(
        "hf_packing.report.packed_dataset.pack_one", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert main(given) == 130
    monkeypatch.undo()
    with open(data, "a") as file:
        file.write('{"text": "two"}\n')
    capsys.readouterr()
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokenised_before"], found["num_documents"]) == (0, 301)


def test_ctrl_c_leaves_nothing_that_looks_complete(tmp_path, tokenizer):
    data = tmp_path / "large.jsonl"
    data.write_text('{"text": "one two three"}\n' * 400_000)
    output = tmp_path / "packed"
    command = [
        sys.executable,
        "-m",
        "hf_packing.cli",
        "pack",
        str(data),
        "--tokenizer",
        tokenizer,
        "--output",
        str(output),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 120
    while not (tmp_path / ".packed.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip().endswith("error: interrupted")
    assert "Traceback" not in said
    assert not output.exists()


def test_bad_json_has_its_line(capsys, tmp_path, tokenizer):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "one"}\n{"text": \n{"text": "two"}\n')
    given = ["report", str(file), "--tokenizer", tokenizer, "--max-length", "8"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "bad.jsonl, line 2: expected JSON" in said
    assert main([*given, "--skip-bad"]) == 0
    printed = capsys.readouterr().out
    assert "2 documents" in printed
    assert "left out: 1, the first: " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{folder}/none.jsonl"], "DATA: expected a file, a folder or a dataset's name"),
        (["report", "{data}"], "--tokenizer: expected one for documents with text, got none"),
        (["report", "{data}", "--tokenizer", "nobody/nothing"], "'nobody/nothing' cannot be loaded here"),
        (["report", "{data}", "--tokenizer", "{tokenizer}", "--field", "body"], "expected body, the fields are text"),
        (["report", "{data}", "--max-length", "0"], "argument --max-length: expected an integer from 1, got '0'"),
        (["report", "{data}", "--ranks", "some"], "argument --ranks: expected an integer from 1, got 'some'"),
        (["report", "{data}", "--output", "{folder}"], "--output: expected a file for the page, such as report.html"),
        (["report", "{data}", "--output", "{data}/a.html"], "--output: expected a folder to write to"),
        (["report", "{data}", "--no-such-option"], "--no-such-option; hf-packing --help shows what there is"),
        (["pack", "{data}"], "the following arguments are required: --output; hf-packing pack --help shows"),
        ([], "the following arguments are required: report | pack | check"),
        (
            ["report", "{data}", "--tokenizer", "{tokenizer}", "--strategy", "best"],
            "--strategy: expected one of best_fit",
        ),
        (
            ["pack", "{data}", "--tokenizer", "{tokenizer}", "--output", "{folder}/out", "--max-length", "8", "16"],
            "--max-length: expected one with best_fit, got 8, 16",
        ),
        (["check", "nobody/nothing"], "MODEL: expected a name on the hub, a folder, or an architecture such as llama"),
    ],
)
def test_bad_input_is_said_in_one_line(capsys, tmp_path, data, tokenizer, arguments, message):
    known = {"folder": tmp_path, "data": data, "tokenizer": tokenizer}
    assert main([argument.format(**known) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["report", "{data}", "--tokenizer", "nobody/nothing"], ["report", "nobody/data"], ["check", "nobody/x"]],
)
def test_a_hub_out_of_reach_is_said_once(data, arguments):
    known = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", "hf_packing.cli", *(argument.format(data=data) for argument in arguments)]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(command, env=known | nowhere, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "code", "route"), [("llama", 0, "varlen"), ("jamba", 0, "varlen + segments"), ("mra", 1, None)]
)
def test_check_of_an_architecture(capsys, model, code, route):
    assert main(["check", model, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["isolated"], found["route"]) == (code == 0, route)
    assert bool(found["refusal"]) == (code == 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [[], ["--weights"]])
def test_check_of_a_folder(capsys, tmp_path, options):
    tiny_model("bert", "masked").save_pretrained(tmp_path / "model")
    assert main(["check", str(tmp_path / "model"), *options]) == 0
    printed = capsys.readouterr().out
    assert ("the model itself" if options else "a small BertForMaskedLM of this configuration") in printed
    assert "stock: isolated: no" in printed
    assert "after patch_model: isolated: yes" in printed
    assert "route: varlen" in printed


CONFIGURATION = """
from transformers import LlamaConfig

class BorrowedConfig(LlamaConfig):
    model_type = "borrowed"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_borrowed import BorrowedConfig

class BorrowedForCausalLM(LlamaForCausalLM):
    config_class = BorrowedConfig
"""


@pytest.fixture
def model_with_code(tmp_path):
    """A folder as those of models on the hub that bring their own code."""
    folder = tmp_path / "borrowed"
    folder.mkdir()
    (folder / "configuration_borrowed.py").write_text(CONFIGURATION)
    (folder / "modeling_borrowed.py").write_text(MODELING)
    code = {
        "AutoConfig": "configuration_borrowed.BorrowedConfig",
        "AutoModelForCausalLM": "modeling_borrowed.BorrowedForCausalLM",
    }
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts = {"model_type": "borrowed", "architectures": ["BorrowedForCausalLM"], "auto_map": code, "vocab_size": 99}
    (folder / "config.json").write_text(json.dumps(facts | sizes))
    return str(folder)


@pytest.mark.filterwarnings("ignore")
def test_code_that_comes_with_a_model_is_run_only_when_asked(capsys, model_with_code, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert main(["check", model_with_code, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "trust_remote_code" in captured.err
    assert captured.err.count("\n") == 1
    assert main(["check", model_with_code, "--trust-remote-code"]) == 0
    assert "a small BorrowedForCausalLM of this configuration" in capsys.readouterr().out


def test_lengths_may_be_given_twice_and_in_any_order(capsys, data, tokenizer):
    given = ["report", data, "--tokenizer", tokenizer, "--max-length", "32", "16", "32", "--json"]
    assert main([*given, "--strategy", "bucket", "best_fit"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in found["strategies"]] == ["Bucket((16, 32))", "BestFit(16)", "BestFit(32)"]


@pytest.mark.filterwarnings("ignore")
def test_a_classifier_is_looked_at_as_the_language_model_it_came_from(capsys, tmp_path):
    config = tiny_model("bert", "masked").config
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path / "model")
    assert main(["check", str(tmp_path / "model")]) == 0
    assert "a small BertForMaskedLM of this configuration" in capsys.readouterr().out


def test_the_command_is_installed():
    (script,) = [each for each in importlib.metadata.entry_points(group="console_scripts") if each.name == "hf-packing"]
    assert script.load() is main


@pytest.mark.parametrize("command", ["report", "pack", "check"])
def test_help(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "usage: hf-packing" in capsys.readouterr().out


def test_no_torch_is_loaded_to_report_with_a_tokenizer_file(data, tokenizer):
    code = (
        "import sys; from hf_packing.cli import main; "
        f"main(['report', {data!r}, '--tokenizer', {tokenizer!r}, '--max-length', '16', '--json']); "
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip().endswith("[]")
