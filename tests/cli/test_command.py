"""The command as a user meets it: what it prints and writes, its exit codes, and what it says of bad input."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from html import unescape
from pathlib import Path

import datasets
import pytest
from chat_templates import CHAT, CHATML, FROM_TRL, PLAIN, tokenizer_with
from transformers import PreTrainedTokenizerFast
from windows_rules import follow_windows_rules

import hf_packing as hfp
from hf_packing.cli import main


def test_report(capsys, tmp_path, data, tokenizer, monkeypatch):
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: "<svg></svg>")
    page = tmp_path / "out" / "report.html"
    given = ["report", data, "--tokenizer", tokenizer, "--max-length", "16", "32", "--output", str(page)]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "300 documents, 2,0" in printed
    assert "take BestFit(16)" in printed
    assert f"written: {page}" in printed
    assert page.is_file()
    with open(data, "a") as lines:
        lines.write("no JSON\n")
    assert main([*given, "--skip-bad"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "trained on" in line or "left out" in line]
    assert len(said) == 2
    assert all(line in unescape(page.read_text()) for line in said)
    # Lengths may be given twice and in any order.
    given = ["report", data, "--tokenizer", tokenizer, "--skip-bad", "--max-length", "32", "16", "32", "--json"]
    assert main([*given, "--strategy", "multipack", "bucket"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [row["strategy"] for row in found["strategies"]]
    assert names == ["Multipack(16)", "Multipack(32)", "Bucket((16, 32))"]
    assert found["lengths"]["documents"] == 300


@pytest.mark.slow
def test_warnings_are_one_line_and_letters_that_the_terminal_does_not_know_are_escaped(tmp_path, data, tokenizer):
    file = tmp_path / "雪.jsonl"
    os.rename(data, file)
    with file.open("a") as lines:
        lines.write('{"text": ""}\n')
    given = ["pack", str(file), "--tokenizer", tokenizer, "--output", str(tmp_path / "雪")]
    command = [sys.executable, "-m", "hf_packing.cli", *given]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert "warning: pack skips 1 document without a token\n" in done.stderr
    assert "pack.py" not in done.stderr
    assert f"written: {tmp_path}/\\u96ea, with the packing plan" in done.stdout


def test_a_missing_package_is_said_before_documents_are_read(capsys, tmp_path, data, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr("hf_packing.text.read.Documents.tokens", lambda *_: pytest.fail("documents are read"))
    for given in (["report", data], ["pack", data, "--output", str(tmp_path / "packed")]):
        assert main([*given, "--tokenizer", tokenizer, "--strategy", "optimal"]) == 2
        assert "needs scipy" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.jsonl", "tokenizer.json"]


def test_texts_end_with_a_token_where_the_tokenizer_has_one(capsys, tmp_path, data, tokenizer):
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "folder")
    short = "warning: 24 rows have no token to train on\n"  # those of a single token
    said = f"warning: 300 rows end without an end-of-sequence token, since the tokenizer has none\n{short}"
    for name, flags, warning, more in (
        (tokenizer, [], said, 0), (tokenizer, ["--no-eos"], short, 0), (str(tmp_path / "folder"), [], "", 300)
    ):  # fmt: skip
        assert main(["report", data, "--tokenizer", name, "--max-length", "16", "--json", *flags]) == 0
        printed = capsys.readouterr()
        assert printed.err == warning
        assert json.loads(printed.out)["lengths"]["tokens"] == sum(number % 13 + 1 for number in range(300)) + more


def test_bad_json_has_its_line_and_is_left_out_when_asked(capsys, tmp_path, tokenizer):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "one"}\n{"text": \n{"text": "two"}\n')
    given = ["report", str(file), "--tokenizer", tokenizer, "--max-length", "8"]
    assert main(given) == 2
    assert "bad.jsonl, line 2: expected JSON" in (said := capsys.readouterr().err)
    assert "; --skip-bad leaves out what cannot be read" in said
    assert main([*given, "--skip-bad"]) == 0
    assert "2 documents" in (printed := capsys.readouterr().out)
    assert "rows left out: 1; the first one: " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{folder}/none.jsonl"], "data: expected a file, a folder or a dataset's name"),
        (["report", "{data}"], "--tokenizer: expected one for documents with text, got none"),
        (["report", "{data}", "--tokenizer", "nobody/nothing"], "'nobody/nothing' cannot be loaded here"),
        (["report", "{data}", "--tokenizer", "{tokenizer}", "--field", "body"], "fields text; --field names the field"),
        (
            ["report", "{folder}/cut.jsonl.gz", "--tokenizer", "{tokenizer}"],
            "expected a file that can be read to its end",
        ),
        (
            ["pack", "{data}", "--tokenizer", "{tokenizer}", "--output", "{data}/packed"],
            "error: --output: expected to write to '{data}/packed', got the error: [Errno ",
        ),
        (["report", "{data}", "--max-length", "0"], "--max-length: expected an integer of at least 1, got '0'"),
        (["report", "{data}", "--ranks", "some"], "argument --ranks: expected an integer of at least 1, got 'some'"),
        (["report", "{data}", "--output", "{folder}"], "--output: expected a file in a writable folder"),
        (["report", "{data}", "--output", "{data}/a.html"], "--output: expected a file in a writable folder"),
        (
            ["report", "{data}", "--output", "{folder}/a.pdf"],
            "--output: expected a file that ends in .html or .htm, got",
        ),
        (
            ["report", "{folder}/page.html", "--tokenizer", "{tokenizer}", "--output", "{folder}/page.html"],
            "--output: expected another file than DATA, got",
        ),
        (["report", "{data}", "--train-on", "all"], "--train-on: expected None without a tokenizer, got 'all'"),
        (
            ["pack", "{data}", "--output", "{folder}/out", "--workers", "1", "--train-on", "all"],
            "--train-on: expected None without a tokenizer, got 'all'",
        ),
        (
            ["pack", "{data}", "--output", "{folder}/out", "--workers", "1", "--skip-bad"],
            "--skip-bad: expected False without a tokenizer, got True",
        ),
        (["report", "{data}", "--no-such-option"], "--no-such-option; hf-packing --help shows all options"),
        (["pack", "{data}"], "the following arguments are required: --output; hf-packing pack --help shows"),
        ([], "the following arguments are required: report | pack | check"),
        (["report", "{data}", "--strategy", "best"], "argument --strategy: invalid choice: 'best' (choose from"),
        (
            ["pack", "{data}", "--output", "{folder}/out", "--max-length", "8", "16"],
            "--max-length: expected a single number",
        ),
        (["pack", "{data}", "{data}", "--output", "{folder}/out"], "DATA"),
        (["pack", "{data}", "--output", "{folder}/out", "--task", "4/3"], "task: expected"),
        (["pack", "{data}", "--output", "{folder}/out", "--workers", "1", "--overwrite"], "--overwrite"),
        (["pack", "{data}", "--output", "{folder}/out", "--task", "1/2", "--tasks", "3"], "--tasks: expected 2"),
        (["check", "nobody/nothing"], "MODEL: expected a name on the hub, a folder, or an architecture such as llama"),
    ],
)
def test_bad_input_is_said_in_one_line(capsys, tmp_path, data, tokenizer, arguments, message):
    known = {"folder": tmp_path, "data": data, "tokenizer": tokenizer}
    (tmp_path / "page.html").write_text("one")
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00")
    assert main([argument.format(**known) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert message.format(**known) in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_the_command_is_installed():
    (script,) = [each for each in importlib.metadata.entry_points(group="console_scripts") if each.name == "hf-packing"]
    assert script.load() is main


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("report", ["2048 4096 8192", "fixed_length, first_come, best_fit, and bucket", "8", "train", "none"]),
        (
            "pack",
            [
                "4096",
                "best_fit",
                "stop at the first",
                "append an end-of",
                "the first found of prompt and completion, messages",
            ],
        ),
        ("check", ["make a small model of the same configuration", "refuse such code"]),
    ],
)
def test_help_shows_what_is_done_by_default(capsys, command, defaults):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(f"usage: hf-packing {command}")
    for default in defaults:
        assert f"(default: {default}" in shown


@pytest.mark.slow
def test_no_torch_is_loaded_to_report_with_a_tokenizer_file(data, tokenizer):
    code = (
        "import sys; from hf_packing.cli import main; "
        f"main(['report', {data!r}, '--tokenizer', {tokenizer!r}, '--max-length', '16', '--json']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.fixture
def given(tmp_path, data, tokenizer):
    return ["pack", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "packed")]


def test_pack(capsys, tmp_path, given, monkeypatch):
    """The plan is that of the rows, also where planning twice would give two plans, as with a time limit."""
    plans = []
    plan_lengths = hfp.BestFit.plan_lengths

    def planned(_, lengths):
        plans.append(lengths)
        return plan_lengths(hfp.BestFit(16, seed=len(plans)), lengths)

    monkeypatch.setattr(hfp.BestFit, "plan_lengths", planned)
    assert main(given) == 0
    assert "300 documents" in capsys.readouterr().out
    packed, plan = datasets.load_from_disk(tmp_path / "packed"), hfp.PackingPlan.load(tmp_path / "packed" / "plan")
    assert packed.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]
    assert hfp.unpack(packed, plan)["input_ids"][:] == [[2] * (number % 13 + 1) for number in range(300)]
    assert hfp.unpack(packed)["input_ids"][:] == hfp.unpack(packed, plan)["input_ids"][:]
    assert main(["report", str(tmp_path / "packed"), "--max-length", "16"]) == 0
    printed = capsys.readouterr().out
    assert str(plan) in printed
    assert "tokens are trained on" in printed
    assert len(plans) == 2, "once to see that the strategy can plan, and once for the documents"
    assert main(given) == 2
    assert "--output: expected a folder that does not exist" in capsys.readouterr().err
    assert main([*given, "--overwrite", "--strategy", "first_come", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_documents"], found["strategy"]) == (300, "FirstCome(16)")
    assert found["rows"] == found["num_packs"] == len(datasets.load_from_disk(tmp_path / "packed")) > len(packed)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.slow
def test_chats_are_trained_on_as_tokenize_does_it(capsys, tmp_path):
    """By pack, by pack with several processes, and by report; all three say how many tokens that are."""
    tokenizer = tokenizer_with(FROM_TRL["qwen3"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chats = [{"messages": PLAIN}, {"messages": PLAIN[:2]}] * 3
    (tmp_path / "chat.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    data = [str(tmp_path / "chat.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"), "--max-length", "256"]
    counts = []
    for name, flags in (("assistant", []), ("all", ["--train-on", "all"])):
        output = str(tmp_path / name)
        documents = hfp.tokenize(datasets.Dataset.from_list(chats), tokenizer, train_on=name)
        trained = sum(label != -100 for row in documents["labels"] for label in row[1:])
        said = f"{trained:,} of {sum(map(len, documents['input_ids'])):,} tokens are trained on"
        packs = ["pack", *data, "--output"]
        for given in ([*packs, output], [*packs, f"{output}-fleet", "--workers", "1"], ["report", *data]):
            assert main([*given, *flags]) == 0
            assert said in capsys.readouterr().out
        found = hfp.unpack(datasets.load_from_disk(output), hfp.PackingPlan.load(f"{output}/plan"))
        assert found["input_ids"][:] == documents["input_ids"][:]
        assert [row[1:] for row in found["labels"]] == [row[1:] for row in documents["labels"]]
        counts.append(trained)
    assert 0 < counts[0] < counts[1]
    assert main(["pack", *data, "--output", str(tmp_path / "none"), "--train-on", "completion"]) == 2
    assert "expected --train-on='assistant' or 'all' for documents with messages" in capsys.readouterr().err


def test_thinking_that_the_template_leaves_out_is_counted(capsys, tmp_path):
    tokenizer_with(CHATML).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    assert main(["report", str(tmp_path / "chat.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert "warning: 1 rows lack content, thinking or tool calls" in capsys.readouterr().err


@pytest.mark.filterwarnings("default:pack applies", "default:pack leaves out")
def test_masks_that_are_applied_and_columns_that_are_not_packed_are_named(capsys, tmp_path):
    row = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "completion_mask": [0, 0, 1], "id": 3, "weights": [0.5, 1, 1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row | {"attention_mask": [1, 1, 1]}) + "\n")
    given = ["pack", str(tmp_path / "a.jsonl"), "--max-length", "8", "--output", str(tmp_path / "packed"), "--json"]
    assert main(given) == 0
    said = capsys.readouterr()
    assert "warning: pack applies completion_mask to labels" in said.err
    assert "warning: pack leaves out columns without one number for each token: 'id'" in said.err
    found = json.loads(said.out)
    assert (found["loss_masks"], found["left_out"]) == (["completion_mask"], ["id"])
    (packed,) = datasets.load_from_disk(tmp_path / "packed")
    assert (packed["labels"], packed["weights"]) == ([-100, -100, 7], [0.5, 1, 1])


@pytest.mark.parametrize("flags", [[], ["--task", "1/1"]])
def test_lines_with_tokens_need_no_tokenizer(tmp_path, flags):
    """Of one file, and of many files."""
    (tmp_path / "a.jsonl").write_text('{"input_ids": [5, 6, 7]}\n{"input_ids": [8]}\n')
    given = ["pack", str(tmp_path / "a.jsonl"), "--max-length", "4", "--output", str(tmp_path / "packed")]
    assert main([*given, *flags]) == 0
    files = [str(file) for file in (tmp_path / "packed").glob("*.parquet" if flags else "*.arrow")]
    packed = datasets.load_dataset("parquet" if flags else "arrow", data_files=files, split="train")
    assert packed["input_ids"][:] == [[5, 6, 7, 8]]
    assert main([*given, *flags, "--skip-bad"]) == 2


def test_only_a_dataset_is_overwritten_and_links_are_followed(capsys, tmp_path, given):
    assert main([*given[:-1], str(tmp_path), "--overwrite"]) == 2
    assert "--overwrite: expected a saved dataset to replace" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.jsonl", "tokenizer.json"]
    datasets.Dataset.from_dict({"input_ids": [[1]]}).save_to_disk(tmp_path / "with_more")
    (tmp_path / "with_more" / "checkpoints").mkdir()
    assert main([*given[:-1], str(tmp_path / "with_more"), "--overwrite"]) == 2
    assert "also has 'checkpoints'" in capsys.readouterr().err
    assert len([*(tmp_path / "with_more").iterdir()]) == 4
    (tmp_path / "packed").symlink_to(tmp_path / "large_disk")
    assert [main(given), main(given), main([*given, "--overwrite"])] == [0, 2, 0]
    assert (tmp_path / "packed").is_symlink()
    assert len(datasets.load_from_disk(tmp_path / "large_disk")) > 0


@pytest.mark.parametrize("where", ["datasets.Dataset.save_to_disk", "hf_packing.files.put_in_place"])
def test_an_interrupted_run_leaves_nothing_and_changes_nothing(capsys, tmp_path, given, monkeypatch, where):
    for before in (set(), {"packed"}):
        if before:
            assert main(given) == 0
            rows = datasets.load_from_disk(tmp_path / "packed").to_dict()
        with monkeypatch.context() as patch:
            patch.setattr(where, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            assert main([*given, "--overwrite", "--strategy", "first_come"]) == 130
        assert capsys.readouterr().err.endswith("error: interrupted\n")
        assert {file.name for file in tmp_path.iterdir()} == {"data.jsonl", "tokenizer.json"} | before
    assert datasets.load_from_disk(tmp_path / "packed").to_dict() == rows


def test_what_another_run_has_written_meanwhile_is_not_overwritten(capsys, tmp_path, given, monkeypatch):
    save = datasets.Dataset.save_to_disk

    def save_twice(dataset, folder, **options):
        save(dataset, folder, **options)
        save(datasets.Dataset.from_dict({"input_ids": [[1]]}), tmp_path / "packed")

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", save_twice)
    assert main(given) == 2
    assert "--output: expected a folder that does not exist" in capsys.readouterr().err
    assert len(datasets.load_from_disk(tmp_path / "packed")) == 1


@pytest.mark.filterwarnings("default:pack skips")
def test_documents_without_tokens_are_refused(capsys, tmp_path, tokenizer):
    for text in ("", '{"text": ""}\n'):
        (tmp_path / "a.jsonl").write_text(text)
        given = ["pack", str(tmp_path / "a.jsonl"), "--tokenizer", tokenizer, "--output", str(tmp_path / "packed")]
        assert main(given) == 2
        assert "error: data: expected documents with tokens, got none" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()


@pytest.fixture
def saved(tmp_path):
    """A saved dataset of documents, and the arguments that pack it."""
    documents = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8]] * 50})
    documents.save_to_disk(tmp_path / "documents")
    return ["pack", str(tmp_path / "documents"), "--max-length", "4", "--output", str(tmp_path / "out" / "packed")]


def test_nothing_is_written_but_the_output(tmp_path, saved):
    """No second copy of the rows stays beside the documents, beside the output or in the cache."""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = {file for folder in (tmp_path, cache) for file in folder.rglob("*")}
    assert main(saved) == 0
    packed = hfp.pack(datasets.load_from_disk(tmp_path / "documents"), hfp.BestFit(4))
    written = datasets.load_from_disk(tmp_path / "out" / "packed")
    assert written[:] == packed[:]
    assert (written.features, written.info.description) == (packed.features, packed.info.description)
    shutil.rmtree(Path(packed.cache_files[0]["filename"]).parent)
    new = {file for folder in (tmp_path, cache) for file in folder.rglob("*")} - before
    output = tmp_path / "out"
    assert {file for file in new if not file.is_relative_to(output / "packed")} == {output}
    rows = [file for file in new if file.suffix == ".arrow"]
    assert [file.name for file in rows] == ["data-00000-of-00001.arrow"]


def test_the_command_follows_the_rules_of_windows(capsys, tmp_path, given, saved, monkeypatch):
    follow_windows_rules(monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert main(["report", *given[1:-2]]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.jsonl", "documents", "tokenizer.json"]
    for arguments, output in ((given, tmp_path / "packed"), (saved, tmp_path / "out" / "packed")):
        assert [main(arguments), main([*arguments, "--overwrite"])] == [0, 0]
        packed = datasets.load_from_disk(output)
        before = packed[:]
        capsys.readouterr()
        assert main([*arguments, "--overwrite"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"error: --output: expected to write to '{output}', got the error: [Errno 13] Access")
        assert packed[:] == before
        assert [file.name for file in output.parent.iterdir() if file.name.startswith(".")] == []


def test_what_a_killed_run_has_left_is_removed_after_a_day(tmp_path, saved):
    output, now = tmp_path / "out", time.time()
    output.mkdir()
    names = [f".packing-{'0' * 32}", f".packing-{'1' * 32}", f".packing-{'2' * 32}-0", ".packing-mine"]
    for name in names:
        (output / name).mkdir()
        (output / name / "rows.arrow").touch()
        age = 7_200 if "1" in name else 90_000
        for file in (output / name, output / name / "rows.arrow"):
            os.utime(file, (now - age,) * 2)
    assert main(saved) == 0
    assert sorted(file.name for file in output.iterdir()) == [names[1], names[3], "packed"]
