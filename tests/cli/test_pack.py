"""hf-packing pack: the dataset it leaves, and what is left after an interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import pytest
from chat_templates import CHAT, CHATML, FROM_TRL, PLAIN, tokenizer_with
from filelock import FileLock
from transformers import PreTrainedTokenizerFast

import hf_packing as hfp
from hf_packing.cli import main
from hf_packing.rows.packing import Packing


def test_pack(capsys, tmp_path, data, tokenizer, words):
    given = ["pack", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "packed")]
    assert main(given) == 0
    assert "300 documents" in capsys.readouterr().out
    packed = datasets.load_from_disk(tmp_path / "packed")
    lengths = [number % 13 + 1 for number in range(300)]
    assert sorted(length for row in packed["seq_lengths"][:] for length in row) == sorted(lengths)
    assert set(packed.column_names) == {"input_ids", "labels", "position_ids", "seq_lengths"}
    assert (
        hfp.unpack(packed, hfp.PackingPlan.load(tmp_path / "packed" / "plan"))["input_ids"][12] == [words["one"]] * 13
    )
    assert main(given) == 2
    assert "--output: expected a folder that does not exist" in capsys.readouterr().err
    assert main([*given, "--overwrite", "--strategy", "first_come", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == 300
    assert len(datasets.load_from_disk(tmp_path / "packed")) > len(packed)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.slow
def test_chats_are_trained_on_as_tokenize_does_it(capsys, tmp_path):
    """By pack, by pack with several processes, and by report; all three say how many tokens that are."""
    tokenizer = tokenizer_with(FROM_TRL["qwen3"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chats = [{"messages": PLAIN}, {"messages": PLAIN[:2]}] * 3
    (tmp_path / "chat.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    data = [str(tmp_path / "chat.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    packs = ["--max-length", "256", "--output"]
    counts = []
    for name, flags in (("assistant", []), ("all", ["--train-on", "all"])):
        assert main(["pack", *data, *packs, str(tmp_path / name), *flags]) == 0
        said = [capsys.readouterr().out]
        packed, plan = datasets.load_from_disk(tmp_path / name), hfp.PackingPlan.load(tmp_path / name / "plan")
        documents = hfp.tokenize(datasets.Dataset.from_list(chats), tokenizer, train_on=name)
        found = hfp.unpack(packed, plan)
        assert found["input_ids"][:] == documents["input_ids"][:]
        assert [row[1:] for row in found["labels"]] == [row[1:] for row in documents["labels"]]
        trained = sum(label != -100 for row in documents["labels"] for label in row[1:])
        assert main(["pack", *data, *packs, str(tmp_path / f"{name}-fleet"), "--workers", "1", *flags]) == 0
        said.append(capsys.readouterr().out)
        assert main(["report", *data, "--max-length", "256", *flags]) == 0
        said.append(capsys.readouterr().out)
        total = sum(map(len, documents["input_ids"]))
        for each in said:
            assert f"{trained:,} of {total:,} tokens are trained on" in each
        counts.append(trained)
    assert 0 < counts[0] < counts[1]
    assert main(["pack", *data, *packs, str(tmp_path / "none"), "--train-on", "completion"]) == 2
    assert "expected train_on='assistant' or 'all' for documents with messages" in capsys.readouterr().err


def test_thinking_that_the_template_leaves_out_is_counted(capsys, tmp_path):
    tokenizer_with(CHATML).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    given = ["pack", str(tmp_path / "chat.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"), "--max-length", "256"]
    assert main([*given, "--output", str(tmp_path / "packed")]) == 0
    assert "warning: 1 chats lack content, thinking or tool calls" in capsys.readouterr().err


def test_loss_masks_are_applied_and_named(capsys, tmp_path):
    row = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "completion_mask": [0, 0, 1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    given = ["pack", str(tmp_path / "a.jsonl"), "--max-length", "8", "--output", str(tmp_path / "packed")]
    assert main(given) == 0
    assert "loss masks applied to labels: completion_mask" in capsys.readouterr().out
    assert datasets.load_from_disk(tmp_path / "packed")["labels"][:] == [[-100, -100, 7]]
    assert main([*given, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss_masks"] == ["completion_mask"]


def test_columns_that_are_not_packed_are_named(capsys, tmp_path):
    row = {"input_ids": [5, 6, 7], "weights": [0.5, 1, 1], "id": 3, "attention_mask": [1, 1, 1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    given = ["pack", str(tmp_path / "a.jsonl"), "--max-length", "8", "--output", str(tmp_path / "packed"), "--json"]
    assert main(given) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["left_out"] == ["weights", "id"]
    assert "warning: columns left out of the packed dataset: weights, id; the Python function" in found.err


def test_packing_texts_ends_them_where_the_tokenizer_can(tmp_path, data, tokenizer, words):
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "folder")
    given = ["pack", data, "--tokenizer", str(tmp_path / "folder"), "--max-length", "16", "--output"]
    assert main([*given, str(tmp_path / "ended")]) == 0
    assert main([*given, str(tmp_path / "not"), "--no-eos"]) == 0
    ended, not_ended = (datasets.load_from_disk(tmp_path / name) for name in ("ended", "not"))
    assert sum(ids.count(words["<end>"]) for ids in ended["input_ids"]) == 300
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
    plans, plan_documents = iter(range(9)), Packing.plan

    def plan_anew(packing, columns):
        return plan_documents(replace(packing, strategy=hfp.BestFit(16, seed=next(plans))), columns)

    monkeypatch.setattr(Packing, "plan", plan_anew)
    given = ["pack", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "packed")]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    packed, plan = datasets.load_from_disk(tmp_path / "packed"), hfp.PackingPlan.load(tmp_path / "packed" / "plan")
    assert found["rows"] == found["num_packs"] == len(packed) == plan.num_packs
    assert found["strategy"] == "BestFit(16)"
    lengths = [number % 13 + 1 for number in range(300)]
    assert list(map(len, hfp.unpack(packed, plan)["input_ids"][:])) == lengths
    assert next(plans) == 1, "planned once"


def test_an_interrupted_run_goes_on(capsys, tmp_path, data, tokenizer, monkeypatch):
    monkeypatch.setattr("hf_packing.text.corpus._CHARACTERS_AT_ONCE", 1000)
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
    from hf_packing.cli import pack

    write, written = pack._write_shard, []

    def interrupted(file, *columns):
        if len(written) == 3:
            raise KeyboardInterrupt
        write(file, *columns)
        written.append(file)

    monkeypatch.setattr(pack, "_write_shard", interrupted)
    assert main(given) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert not (tmp_path / "packed").exists()
    assert (tmp_path / ".packed.partial").is_dir()
    written.clear()
    monkeypatch.setattr(pack, "_write_shard", lambda file, *columns: written.append(write(file, *columns)))
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["tokenized_before"] < found["num_documents"] == 300
    whole = datasets.load_from_disk(tmp_path / "packed")
    given[given.index("--output") + 1] = str(tmp_path / "at_once")
    assert main(given) == 0
    assert whole.to_dict() == datasets.load_from_disk(tmp_path / "at_once").to_dict()


@pytest.mark.parametrize("where", ["datasets.Dataset.save_to_disk", "hf_packing.cli.pack._replace"])
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
    monkeypatch.setattr("hf_packing.cli.pack.put_in_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main([*given, "--overwrite", "--strategy", "first_come"]) == 130
    assert datasets.load_from_disk(tmp_path / "packed").to_dict() == before


def test_what_a_killed_run_had_put_aside_comes_back(capsys, tmp_path, data, tokenizer, monkeypatch):
    """Whatever the next run is asked to do; here it packs other data, and does not come far."""
    given = ["pack", data, "--tokenizer", tokenizer, "--max-length", "16", "--output", str(tmp_path / "packed")]
    assert main(given) == 0
    before = datasets.load_from_disk(tmp_path / "packed").to_dict()

    def killed(output, _fresh, aside):
        output.rename(aside)
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_packing.cli.pack._replace", killed)
    assert main([*given, "--overwrite", "--strategy", "first_come"]) == 130
    assert not (tmp_path / "packed").exists()
    monkeypatch.undo()
    (tmp_path / "other.jsonl").write_text("no JSON")
    given[1] = str(tmp_path / "other.jsonl")
    assert main([*given, "--overwrite"]) == 2
    assert datasets.load_from_disk(tmp_path / "packed").to_dict() == before
    capsys.readouterr()
    assert main(given) == 2
    assert "--overwrite replaces a saved dataset" in capsys.readouterr().err


def test_two_runs_at_once(capsys, tmp_path, data, tokenizer):
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "packed")]
    with FileLock(tmp_path / ".packed.lock"):
        assert main(given) == 2
    assert "--output: expected a folder that no other run writes to" in capsys.readouterr().err


def test_another_end_of_sequence_tokenizes_anew(capsys, tmp_path, data, tokenizer, monkeypatch):
    given = ["pack", data, "--output", str(tmp_path / "packed"), "--json", "--tokenizer", str(tmp_path / "folder")]
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "folder")
    monkeypatch.setattr("datasets.Dataset.save_to_disk", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(given) == 130
    monkeypatch.undo()
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="one").save_pretrained(tmp_path / "folder")
    capsys.readouterr()
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["tokenized_before"] == 0


def test_shards_of_other_documents_are_not_used(capsys, tmp_path, data, tokenizer, monkeypatch):
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "packed"), "--json"]
    monkeypatch.setattr("hf_packing.cli.pack.pack_split", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(given) == 130
    monkeypatch.undo()
    with open(data, "a") as file:
        file.write('{"text": "two"}\n')
    capsys.readouterr()
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokenized_before"], found["num_documents"]) == (0, 301)


def test_other_documents_of_the_same_size_and_time_are_seen(capsys, tmp_path, data, tokenizer, monkeypatch):
    """As copying that keeps times leaves them."""
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "packed"), "--json"]
    pack_one = "hf_packing.cli.pack.pack_split"
    monkeypatch.setattr(pack_one, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(given) == 130
    monkeypatch.undo()
    stat, text = os.stat(data), Path(data).read_text()
    Path(data).write_text(text.replace("one", "two"))
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (os.stat(data).st_size, os.stat(data).st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    capsys.readouterr()
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["tokenized_before"] == 0


def test_documents_that_change_while_they_are_read(capsys, tmp_path, data, tokenizer, monkeypatch):
    from hf_packing.cli import pack

    tokenize = pack._tokenize

    def changed(*given):
        done = tokenize(*given)
        with open(data, "a") as file:
            file.write('{"text": "two"}\n')
        return done

    monkeypatch.setattr(pack, "_tokenize", changed)
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "packed"), "--json"]
    assert main(given) == 2
    assert "DATA: expected files that do not change, but some files changed" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == 301


def test_a_dataset_is_written_where_a_link_points(capsys, tmp_path, data, tokenizer):
    (tmp_path / "link").symlink_to(tmp_path / "large_disk")
    given = ["pack", data, "--tokenizer", tokenizer, "--output", str(tmp_path / "link")]
    assert main(given) == 0
    assert main(given) == 2
    assert main([*given, "--overwrite"]) == 0
    assert (tmp_path / "link").is_symlink()
    assert len(datasets.load_from_disk(tmp_path / "large_disk")) > 0
    capsys.readouterr()


@pytest.mark.slow
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
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background inherits that it is ignored
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, env=os.environ, preexec_fn=heard)
    deadline = time.monotonic() + 120
    while not (tmp_path / ".packed.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip().endswith("error: interrupted")
    assert "Traceback" not in said
    assert not output.exists()
