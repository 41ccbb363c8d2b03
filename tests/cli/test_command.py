"""The command as a user meets it: what it prints, its exit codes, and what it says of bad input."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from hf_packing.cli import main


def test_report(capsys, tmp_path, data, tokenizer, monkeypatch):
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: ("<svg></svg>", b""))
    page = tmp_path / "out" / "report.html"
    given = ["report", data, "--tokenizer", tokenizer, "--max-length", "16", "32", "--output", str(page)]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "300 documents, 2,0" in printed
    assert "take BestFit(16)" in printed
    assert f"written: {page}" in printed
    assert page.is_file()
    assert all((page.parent / "report-pictures" / f"{name}.png").is_file() for name in ("lengths", "fill", "ranks"))
    # Lengths may be given twice and in any order.
    given = ["report", data, "--tokenizer", tokenizer, "--max-length", "32", "16", "32", "--json"]
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
    said = f"warning: {tokenizer} has no end-of-sequence token, so no such token is appended to documents\n"
    for name, flags, warning, more in (
        (tokenizer, [], said, 0), (tokenizer, ["--no-eos"], "", 0), (str(tmp_path / "folder"), [], "", 300)
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
        (["report", "{folder}/none.jsonl"], "DATA: expected a file, a folder or a dataset's name"),
        (["report", "{data}"], "--tokenizer: expected one for documents with text, got none"),
        (["report", "{data}", "--tokenizer", "nobody/nothing"], "'nobody/nothing' cannot be loaded here"),
        (["report", "{data}", "--tokenizer", "{tokenizer}", "--field", "body"], "fields text; --field names the field"),
        (
            ["report", "{folder}/cut.jsonl.gz", "--tokenizer", "{tokenizer}"],
            "expected a file that can be read to its end",
        ),
        (["pack", "{data}", "--tokenizer", "{tokenizer}", "--output", "{data}/packed"], "Error: [Errno "),
        (["report", "{data}", "--max-length", "0"], "--max-length: expected an integer of at least 1, got '0'"),
        (["report", "{data}", "--ranks", "some"], "argument --ranks: expected an integer of at least 1, got 'some'"),
        (["report", "{data}", "--output", "{folder}"], "--output: expected a file in a writable folder"),
        (["report", "{data}", "--output", "{data}/a.html"], "--output: expected a file in a writable folder"),
        (["report", "{data}", "--no-such-option"], "--no-such-option; hf-packing --help shows all options"),
        (["pack", "{data}"], "the following arguments are required: --output; hf-packing pack --help shows"),
        ([], "the following arguments are required: report | pack | check"),
        (["report", "{data}", "--strategy", "best"], "argument --strategy: invalid choice: 'best' (choose from"),
        (
            ["pack", "{data}", "--output", "{folder}/out", "--max-length", "8", "16"],
            "--max-length: expected a single number",
        ),
        (["pack", "{data}", "{data}", "--output", "{folder}/out"], "DATA"),
        (["pack", "{data}", "--output", "{folder}/out", "--task", "4/3"], "--task"),
        (["pack", "{data}", "--output", "{folder}/out", "--workers", "1", "--overwrite"], "--overwrite"),
        (["check", "nobody/nothing"], "MODEL: expected a name on the hub, a folder, or an architecture such as llama"),
    ],
)
def test_bad_input_is_said_in_one_line(capsys, tmp_path, data, tokenizer, arguments, message):
    known = {"folder": tmp_path, "data": data, "tokenizer": tokenizer}
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00")
    assert main([argument.format(**known) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_the_command_is_installed():
    (script,) = [each for each in importlib.metadata.entry_points(group="console_scripts") if each.name == "hf-packing"]
    assert script.load() is main


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("report", ["2048 4096 8192", "fixed_length, first_come, best_fit, and bucket", "8", "train", "none"]),
        ("pack", ["4096", "best_fit", "stop at the first", "append an end-of", "the first found of text, prompt"]),
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
