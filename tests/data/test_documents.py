"""Documents from files and folders, as text and as tokens, and what cannot be read."""

import bz2
import gzip
import json
import lzma
import random

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hf_packing.errors import PackingError
from hf_packing.report.corpus import Corpus
from hf_packing.report.documents import Documents
from hf_packing.report.rendering import Rendered, chatml, kind_of_row, render
from hf_packing.report.tokenise import TextTokenizer, load_tokenizer

ROWS = [{"text": "one two"}, {"text": "three"}, {"text": ""}]
WORDS = ["[UNK]", "<end>", "one", "two", "three", "user", "assistant"]


@pytest.fixture
def tokenizer():
    """A token for every word."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextTokenizer("words", backend)


def write_lines(file, rows):
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def write_gzip(file, rows):
    file.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    return file


def write_array(file, rows):
    file.write_text(json.dumps(rows))
    return file


def write_parquet(file, rows):
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def write_saved(folder, rows):
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return folder


def write_splits(folder, rows):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_lines),
        ("a.json", write_lines),
        ("a.json", write_array),
        ("a.jsonl.gz", write_gzip),
        ("a.parquet", write_parquet),
        ("saved", write_saved),
        ("splits", write_splits),
    ],
)
def test_rows_of_every_format(tmp_path, name, write):
    documents = Documents(str(write(tmp_path / name, ROWS)))
    assert list(documents) == ROWS
    assert list(documents) == ROWS
    assert documents.skipped == []


def test_a_text_file_has_a_document_in_each_line(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\nthree\n")
    assert [row["text"] for row in Documents(str(tmp_path / "a.txt"))] == ["one two", "", "three"]


def test_a_line_that_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\nt\xffwo\nthree")
    with pytest.raises(PackingError, match=r"a.txt, line 2: expected text in UTF-8"):
        list(Documents(str(tmp_path / "a.txt")))
    documents = Documents(str(tmp_path / "a.txt"), skip_bad=True)
    assert [row["text"] for row in documents] == ["one", "three"]
    assert len(documents.skipped) == 1


def test_links_to_folders_are_followed_once(tmp_path):
    for folder in ("data/within/deep", "elsewhere/below", "data/.hidden"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text(folder)
    links = {"to_elsewhere": "elsewhere", "again": "elsewhere/below", "to_within": "data/within/deep", "loop": "data"}
    for link, target in links.items():
        (tmp_path / "data" / link).symlink_to(tmp_path / target)
    (tmp_path / "data" / ".hidden_link").symlink_to(tmp_path / "elsewhere")
    texts = sorted(row["text"] for row in Documents(str(tmp_path / "data"), glob="*.txt"))
    assert texts == ["data/within/deep", "elsewhere/below"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2"])
def test_damage_is_said_and_ends_a_file(tmp_path, name):
    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[name.split(".")[-1]]
    lines = "".join(f'{{"text": "{random.Random(number).random()}"}}\n' for number in range(9000))
    damaged = bytearray(pack(lines.encode()))
    middle = len(damaged) // 2
    damaged[middle : middle + 999] = bytes(999)
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(PackingError, match=f"{name}.*: expected "):
        list(Documents(str(tmp_path / name)))


def test_a_cut_file_keeps_what_is_whole(tmp_path):
    lines = "".join(f'{{"text": "{random.Random(number).random()}"}}\n' for number in range(9000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    documents = Documents(str(tmp_path / "a.jsonl.gz"), skip_bad=True)
    assert 5000 < len(list(documents)) < 9000
    assert "expected a file that can be read to its end" in documents.skipped[-1]


def test_an_array_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf [{"text": "one"}]')
    assert list(Documents(str(tmp_path / "a.json"))) == [{"text": "one"}]
    (tmp_path / "b.json").write_text("[" * 100_000)
    with pytest.raises(PackingError, match="b.json: expected a JSON array, "):
        list(Documents(str(tmp_path / "b.json")))


def test_a_pattern_is_of_names_in_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    for data, pattern in ((tmp_path, "/abs*"), (tmp_path / "a.txt", "*.txt"), ("nobody/nothing", "*.txt")):
        with pytest.raises(PackingError, match="--glob: expected a "):
            Documents(str(data), glob=pattern)
    with pytest.raises(PackingError, match="DATA: expected a file, a folder or a dataset's name, .* does not exist"):
        Documents(str(tmp_path / "none"), glob="*.txt")


def test_a_folder_of_texts_has_a_document_in_each_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("three\n")
    (tmp_path / "a.md").write_text("one\ntwo\n")
    (tmp_path / "settings.json").write_text('{"of": "no document"}')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    for left_out in (".git", "__pycache__", "site-packages"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "c.txt").write_text("not a document")
    documents = Documents(str(tmp_path))
    assert [row["text"] for row in documents] == ["one\ntwo\n", '{"of": "no document"}', "three\n"]
    assert len(documents.skipped) == 1
    assert "picture.png: expected text in UTF-8" in documents.skipped[0]
    assert [row["text"] for row in Documents(str(tmp_path), glob="*.py")] == ["three\n"]


def test_a_folder_with_rows_has_nothing_but_rows(tmp_path):
    write_lines(tmp_path / "b.JSONL", ROWS[1:])
    write_parquet(tmp_path / "a.parquet", ROWS[:1])
    (tmp_path / "README.md").write_text("about the rows")
    documents = Documents(str(tmp_path))
    assert list(documents) == ROWS
    assert documents.skipped == [f"{tmp_path / 'README.md'}: not read beside files with rows"]


def test_a_line_that_is_no_json(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"\n[3]\n{"text": "three"}\n')
    with pytest.raises(PackingError, match=r"a.jsonl, line 2: expected JSON, .*got '\{\"text\": \"two\"'; --skip-bad"):
        list(Documents(str(file)))
    documents = Documents(str(file), skip_bad=True)
    assert [row["text"] for row in documents] == ["one", "three"]
    assert len(documents.skipped) == 2
    assert "line 3: expected an object with fields, got '[3]'" in documents.skipped[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[1, 2", "a.json: expected a JSON array, "),
        ("a.parquet", b"no", "a.parquet: expected a parquet file, "),
        ("a.txt", b"\xff\xfe\xff", "a.txt, line 1: expected text in UTF-8"),
    ],
)
def test_files_that_are_damaged(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PackingError, match=message):
        list(Documents(str(tmp_path / name)))


def test_places_that_are_none(tmp_path):
    with pytest.raises(PackingError, match="DATA: expected a file, a folder or a dataset's name, .* does not exist"):
        Documents(str(tmp_path / "a.jsonl"))
    with pytest.raises(PackingError, match="DATA: expected files like \\*.py, the folder .* has none"):
        Documents(str(tmp_path), glob="*.py")
    write_splits(tmp_path / "splits", ROWS)
    with pytest.raises(PackingError, match="--split: expected one of train, got 'test'"):
        list(Documents(str(tmp_path / "splits"), split="test"))


def test_a_dataset_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda _: (_ for _ in ()).throw(ConnectionError("offline\nmore")))
    with pytest.raises(PackingError, match="'nobody/nothing' is no file, no folder and no dataset: offline more$"):
        list(Documents("nobody/nothing"))


def test_tables_are_no_texts(tmp_path):
    (tmp_path / "a.csv").write_text("text\none\n")
    with pytest.raises(PackingError, match="a.csv: expected JSONL, parquet or text, a .csv file is none of them"):
        list(Documents(str(tmp_path / "a.csv")))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "expected documents without padding"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "expected documents without padding, .* has a 2"),
        ({"input_ids": [5, 6], "seq_idx": [0, 1]}, "rows with seq_idx are packed already"),
        ({"input_ids": [5, 6], "seq_lengths": [2]}, "rows with seq_lengths are packed already"),
        ({"input_ids": [5, 6], "labels": [5]}, "expected as many labels as the 2 input_ids, got 1"),
        ({"input_ids": "abc"}, "expected a list of integers from 0 to 2\\*\\*31 - 1 in input_ids, got abc"),
        ({"input_ids": [1.5]}, "expected a list of integers"),
        ({"input_ids": [2**31]}, "expected a list of integers from 0 to"),
        ({"input_ids": [-5, 2]}, "expected a list of integers from 0 to"),
        ({"input_ids": [[1], [1, 2]]}, "expected a list of integers from 0 to"),
        ({"input_ids": [1, 2], "labels": [1, -(2**40)]}, "expected a list of integers from -100 to .* in labels"),
        (
            {"input_ids": [1, 2], "completion_mask": [0, 2]},
            "expected a list of integers from 0 to 1 in completion_mask",
        ),
        ({"input_ids": [1, 2], "attention_mask": 1}, "expected a list of integers from 0 to .* in attention_mask"),
        (
            {"input_ids": [1, 2], "attention_mask": [[1, 1]]},
            "expected a list of integers from 0 to .* in attention_mask",
        ),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "expected as many attention_mask as the 2 input_ids, got 1"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1, 1]}, "expected as many completion_mask as the 2 input_ids"),
        ({"text": "\ud800"}, "expected Unicode, "),
        (
            {"messages": [{"from": "human", "value": "one"}]},
            "expected messages with role and content, one has from, value",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected parts of a message that are text"),
        ({"prompt": "one", "completion": [{"role": "assistant", "content": "two"}]}, "expected a list of messages"),
    ],
)
def test_rows_that_would_be_misread(tmp_path, tokenizer, row, message):
    file = write_lines(tmp_path / "a.jsonl", [row])
    with pytest.raises(PackingError, match=message):
        Corpus(Documents(str(file)), None if "input_ids" in row else tokenizer).lengths(lambda _: None)


def test_loss_masks_are_applied_to_labels(tmp_path):
    both = {"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}
    for row, labels in (
        ({"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}, [-100, 6, 7]),
        ({"input_ids": [8, 9], "assistant_masks": [1, 0], "labels": [8, 9]}, [8, -100]),
        ({"input_ids": [8, 9, 10], **both}, [-100, 9, -100]),
    ):
        corpus = Corpus(Documents(str(write_lines(tmp_path / "a.jsonl", [row]))))
        (block,) = corpus.blocks()
        assert corpus.tokens_of(block)[1] == [labels]
        assert corpus.loss_masks == [name for name in both if name in row]


@pytest.mark.parametrize("given", [{"labels": [-100, 6]}, {"completion_mask": [0, 1]}, {"assistant_masks": [0, 1]}])
def test_a_row_without_the_labels_of_others_is_not_trained_on_as_a_whole(tmp_path, given):
    rows = [{"input_ids": [5, 6], **given}, {"input_ids": [7, 8]}]
    (name,) = given
    for first, second, expected, got in ((0, 1, name, "no labels"), (1, 0, "no labels", name)):
        file = write_lines(tmp_path / "a.jsonl", [rows[first], rows[second]])
        message = f"line 2: expected {expected} beside input_ids as in the rows before, got {got}; --skip-bad"
        with pytest.raises(PackingError, match=message):
            Corpus(Documents(str(file))).lengths(lambda _: None)
    corpus = Corpus(Documents(str(file), skip_bad=True))
    assert lengths_of(corpus) == [2]
    assert len(corpus.documents.skipped) == 1


def test_options_without_effect_are_refused(tmp_path, tokenizer):
    tokens = str(write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6], "text": "one two three"}]))
    with pytest.raises(PackingError, match="--tokenizer: expected none for documents with input_ids, .*--field names"):
        Corpus(Documents(tokens), tokenizer).lengths(lambda _: None)
    assert lengths_of(Corpus(Documents(tokens), tokenizer, "text")) == [3]
    with pytest.raises(PackingError, match="--separator: expected documents with prompt and completion, .* have text"):
        Corpus(Documents(tokens), tokenizer, "text", separator="").lengths(lambda _: None)


def test_what_messages_hold():
    calls = [{"name": "find", "arguments": {}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    text = chatml(messages)
    assert "user\none two<|im_end|>" in text
    assert json.dumps(calls) in text


def test_kinds_of_rows():
    assert kind_of_row({"id": 1, "text": "a"}, None) == "text"
    assert kind_of_row({"prompt": "a", "completion": "b"}, None) == "prompt"
    assert kind_of_row({"messages": []}, None) == "messages"
    assert kind_of_row({"text": "a", "input_ids": [1]}, None) == "input_ids"
    assert kind_of_row({"text": "a", "content": "b"}, "content") == "content"
    with pytest.raises(PackingError, match="expected prompt and completion, the fields are prompt"):
        kind_of_row({"prompt": "a"}, "prompt")
    for row in ({"prompt": "a"}, {"body": "a"}, {"text": None, "body": "a"}):
        with pytest.raises(
            PackingError, match="expected text, prompt and completion, .* the fields are .*--field names"
        ):
            kind_of_row(row, None)
    with pytest.raises(PackingError, match="expected body, the fields are text"):
        kind_of_row({"text": "a"}, "body")


def test_what_is_rendered():
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None}]
    assert render({"text": "one"}, "text", chatml) == ("one", 0, False)
    assert render({"prompt": "one", "completion": "two"}, "prompt", chatml) == ("one\ntwo", 4, False)
    assert render({"prompt": "one", "completion": "two"}, "prompt", chatml, "") == ("onetwo", 3, False)
    assert render({"messages": messages}, "messages", chatml).text == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    )
    both = render({"prompt": messages[:1], "completion": messages[1:]}, "prompt", chatml)
    assert both.text[: both.prompt] == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    for row, kind in (({"text": 5}, "text"), ({"messages": "one"}, "messages"), ({"messages": ["one"]}, "messages")):
        with pytest.raises(PackingError, match="expected "):
            render(row, kind, chatml)


def lengths_of(corpus):
    seen = []
    lengths = corpus.lengths(seen.append)
    assert sum(seen) == len(lengths)
    return lengths.tolist()


def test_lengths_and_tokens(tmp_path, tokenizer):
    file = write_lines(tmp_path / "a.jsonl", ROWS)
    corpus = Corpus(Documents(str(file)), tokenizer)
    assert lengths_of(corpus) == [2, 1, 0]
    assert not corpus.ended
    ended = Corpus(Documents(str(file)), TextTokenizer("words", tokenizer.backend, end=1))
    assert lengths_of(ended) == [3, 2, 1]
    assert lengths_of(Corpus(Documents(str(file)), ended.tokenizer, end_documents=False)) == [2, 1, 0]
    (block,) = ended.blocks()
    assert ended.tokens_of(block) == ([[2, 3, 1], [4, 1], [1]],) * 2


def test_prompts_are_not_trained_on(tmp_path, tokenizer):
    rows = [{"prompt": "one two", "completion": "three"}, {"prompt": "", "completion": "one"}]
    corpus = Corpus(
        Documents(str(write_lines(tmp_path / "a.jsonl", rows))), TextTokenizer("words", tokenizer.backend, end=1)
    )
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block) == ([[2, 3, 4, 1], [2, 1]], [[-100, -100, 4, 1], [2, 1]])


def test_tokens_that_the_tokenizer_puts_around_a_text(tmp_path, tokenizer):
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="user $A <end>", special_tokens=[("user", 5), ("<end>", 1)]
    )
    rows = [{"prompt": "one two", "completion": "three"}, {"prompt": "", "completion": "one"}]
    corpus = Corpus(
        Documents(str(write_lines(tmp_path / "a.jsonl", rows))), TextTokenizer("words", tokenizer.backend, end=1)
    )
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block) == ([[5, 2, 3, 4, 1], [5, 2, 1]], [[-100, -100, -100, 4, 1], [-100, 2, 1]])
    assert lengths_of(corpus) == [5, 3]
    chat = [{"messages": [{"role": "user", "content": "one"}]}]
    corpus = Corpus(Documents(str(write_lines(tmp_path / "b.jsonl", chat))), corpus.tokenizer)
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block)[0][0][0] != 5, "a chat template has its own"
    assert lengths_of(corpus) == [len(corpus.tokens_of(block)[0][0])]


def test_tokens_that_are_there_already(tmp_path):
    rows = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}]
    corpus = Corpus(Documents(str(write_lines(tmp_path / "a.jsonl", rows))))
    assert lengths_of(corpus) == [2, 1]
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block) == ([[5, 6], [7]], [[-100, 6], [7]])


def test_rows_without_text(tmp_path, tokenizer):
    file = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"body": "two"}, {"text": "three"}])
    message = "a.jsonl, line 2: expected text as in the rows before, the fields are body"
    with pytest.raises(PackingError, match=f"{message}.*--skip-bad"):
        Corpus(Documents(str(file)), tokenizer).lengths(lambda _: None)
    skipping = Corpus(Documents(str(file), skip_bad=True), tokenizer)
    assert lengths_of(skipping) == [1, 1]
    assert len(skipping.documents.skipped) == 1
    with pytest.raises(PackingError, match="--tokenizer: expected one for documents with text, got none"):
        Corpus(Documents(str(file))).lengths(lambda _: None)


def test_many_blocks_are_one_corpus(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("hf_packing.report.corpus.CHARACTERS_AT_ONCE", 10)
    rows = [{"text": "one " * number} for number in range(9)]
    corpus = Corpus(Documents(str(write_lines(tmp_path / "a.jsonl", rows))), tokenizer)
    assert len(list(corpus.blocks())) > 3
    assert lengths_of(corpus) == list(range(9))


def test_loading_tokenizers(tmp_path, tokenizer):
    file = tmp_path / "tokenizer.json"
    tokenizer.backend.enable_truncation(1)
    tokenizer.backend.enable_padding(length=9)
    tokenizer.backend.save(str(file))
    assert load_tokenizer(str(file)).tokens([Rendered("one two three")], ended=False) == ([[2, 3, 4]], [[2, 3, 4]])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PackingError, match="--tokenizer: expected a tokenizer.json, .* is none: "):
        load_tokenizer(str(tmp_path / "broken.json"))
    with pytest.raises(
        PackingError, match="--tokenizer: expected a name on the hub, .*'nobody/nothing' cannot be loaded"
    ):
        load_tokenizer("nobody/nothing")


def test_a_folder_with_a_tokenizer_brings_its_template(tmp_path, tokenizer):
    from transformers import PreTrainedTokenizerFast

    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token="<end>", unk_token="[UNK]")
    saved.chat_template = "{% for message in messages %}{{ message.content }} three {% endfor %}"
    saved.save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(str(tmp_path / "tokenizer"))
    assert loaded.end == 1
    file = write_lines(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "one two"}]}])
    corpus = Corpus(Documents(str(file)), loaded)
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block)[0] == [[2, 3, 4]]


@pytest.mark.parametrize("name", ["chat", "instruct", "math", "toolcall", "wiki"])
def test_lengths_of_real_documents(shared_data, name):
    corpus = Corpus(
        Documents(str(shared_data / f"{name}.jsonl.gz")), load_tokenizer(str(shared_data / "tokenizer.json"))
    )
    assert np.array_equal(corpus.lengths(lambda _: None), np.load(shared_data / "lengths" / f"{name}.npy"))
