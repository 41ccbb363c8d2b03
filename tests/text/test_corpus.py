"""Documents as tokens and labels, block by block, and rows that are refused."""

import numpy as np
import pytest
from tokenizers import processors
from written_rows import ROWS, write_lines

from hf_packing.errors import PackingError
from hf_packing.text.corpus import Corpus
from hf_packing.text.documents import Documents
from hf_packing.text.text_tokenizer import TextTokenizer, load_tokenizer


def lengths_of(corpus):
    seen = []
    lengths = corpus.lengths(seen.append)
    assert sum(seen) == len(lengths)
    return lengths.tolist()


def test_lengths_and_tokens(tmp_path, tokenizer):
    file = write_lines(tmp_path / "a.jsonl", ROWS)
    corpus = Corpus(Documents(str(file)), tokenizer)
    assert lengths_of(corpus) == [2, 1, 0]
    assert not corpus.ends
    ended = Corpus(Documents(str(file)), TextTokenizer("words", tokenizer.backend, end=1))
    assert lengths_of(ended) == [3, 2, 1]
    assert lengths_of(Corpus(Documents(str(file)), ended.tokenizer, end_documents=False)) == [2, 1, 0]
    (block,) = ended.blocks()
    assert ended.tokens_of(block) == ([[2, 3, 1], [4, 1], [1]],) * 2


def test_prompts_are_not_trained_on(tmp_path, tokenizer):
    rows = [{"prompt": "one two", "completion": " three"}, {"prompt": "", "completion": "one"}]
    corpus = Corpus(
        Documents(str(write_lines(tmp_path / "a.jsonl", rows))), TextTokenizer("words", tokenizer.backend, end=1)
    )
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block) == ([[2, 3, 4, 1], [2, 1]], [[-100, -100, 4, 1], [2, 1]])


def test_tokens_that_the_tokenizer_puts_around_a_text(tmp_path, tokenizer):
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="user $A <end>", special_tokens=[("user", 5), ("<end>", 1)]
    )
    rows = [{"prompt": "one two", "completion": " three"}, {"prompt": "", "completion": "one"}]
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
    message = "a.jsonl, line 2: expected the field text, as in earlier rows, got the fields body"
    with pytest.raises(PackingError, match=f"{message}.*skip_bad=True"):
        Corpus(Documents(str(file)), tokenizer).lengths(lambda _: None)
    skipping = Corpus(Documents(str(file), skip_bad=True), tokenizer)
    assert lengths_of(skipping) == [1, 1]
    assert len(skipping.documents.skipped) == 1
    with pytest.raises(PackingError, match="tokenizer: expected a tokenizer for documents with text, got none"):
        Corpus(Documents(str(file))).lengths(lambda _: None)


def test_many_blocks_are_one_corpus(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("hf_packing.text.corpus._CHARACTERS_AT_ONCE", 10)
    rows = [{"text": "one " * number} for number in range(9)]
    corpus = Corpus(Documents(str(write_lines(tmp_path / "a.jsonl", rows))), tokenizer)
    assert len(list(corpus.blocks())) > 3
    assert lengths_of(corpus) == list(range(9))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "expected documents without padding"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "expected documents without padding, got a 2 in"),
        ({"input_ids": [5, 6], "seq_idx": [0, 1]}, "got packed rows: only packed rows have the column seq_idx"),
        ({"input_ids": [5, 6], "seq_lengths": [2]}, "got packed rows: only packed rows have the column seq_lengths"),
        ({"input_ids": [5, 6], "labels": [5]}, "expected labels with one value for each of the 2 input_ids, got 1"),
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
        ({"input_ids": [1, 2], "attention_mask": [1]}, "expected attention_mask with one value for .* got 1"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1, 1]}, "expected completion_mask with one value for each"),
        ({"text": "\ud800"}, "expected Unicode, "),
        (
            {"messages": [{"from": "human", "value": "one"}]},
            "expected messages with a role, .* got a message with from, value",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected only text parts in a message"),
        (
            {"prompt": "one", "completion": [{"role": "assistant", "content": "two"}]},
            "expected a list of messages, got str",
        ),
        ({"messages": ["one", "two"]}, "expected a list of messages, .* got a list with an item of type str"),
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
        message = f"line 2: expected {expected} in addition to input_ids, as in earlier rows, got {got}; skip_bad=True"
        with pytest.raises(PackingError, match=message):
            Corpus(Documents(str(file))).lengths(lambda _: None)
    corpus = Corpus(Documents(str(file), skip_bad=True))
    assert lengths_of(corpus) == [2]
    assert len(corpus.documents.skipped) == 1


def test_options_without_effect_are_refused(tmp_path, tokenizer):
    tokens = str(write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6], "text": "one two three"}]))
    with pytest.raises(PackingError, match="tokenizer: expected no tokenizer, since documents with input_ids"):
        Corpus(Documents(tokens), tokenizer).lengths(lambda _: None)
    assert lengths_of(Corpus(Documents(tokens), tokenizer, "text")) == [3]
    with pytest.raises(PackingError, match="separator: expected documents with prompt and completion, got .* text"):
        Corpus(Documents(tokens), tokenizer, "text", separator="").lengths(lambda _: None)


@pytest.mark.parametrize(
    "name", ["toolcall", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chat", "instruct", "math", "wiki"))]
)
def test_lengths_of_real_documents(shared_data, name):
    separator = "\n" if name in ("instruct", "math") else None
    documents, tokenizer = (
        Documents(str(shared_data / f"{name}.jsonl.gz")),
        load_tokenizer(str(shared_data / "tokenizer.json")),
    )
    corpus = Corpus(documents, tokenizer, separator=separator)
    assert np.array_equal(corpus.lengths(lambda _: None), np.load(shared_data / "lengths" / f"{name}.npy"))
