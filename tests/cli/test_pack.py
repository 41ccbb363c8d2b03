"""hf-packing pack: the dataset that it writes, whole or not at all."""

import json

import datasets
import pytest
from chat_templates import CHAT, CHATML, FROM_TRL, PLAIN, tokenizer_with

import hf_packing as hfp
from hf_packing.cli import main


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
    assert "warning: 1 chats lack content, thinking or tool calls" in capsys.readouterr().err


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
    (tmp_path / "packed").symlink_to(tmp_path / "large_disk")
    assert [main(given), main(given), main([*given, "--overwrite"])] == [0, 2, 0]
    assert (tmp_path / "packed").is_symlink()
    assert len(datasets.load_from_disk(tmp_path / "large_disk")) > 0


@pytest.mark.parametrize("where", ["datasets.Dataset.save_to_disk", "hf_packing.cli.pack.put_in_place"])
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

    def save_twice(dataset, folder):
        save(dataset, folder)
        save(dataset.select([0]), tmp_path / "packed")

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
        assert "error: DATA: expected documents with tokens, got none" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()
