"""`tokenize`: tokens and labels of SFTTrainer, and texts of rows; `branches`: what the model sees and generates."""

import bz2
import gzip
import importlib.metadata
import io
import json
import lzma
import pickle
import random
import re
import warnings
import zipfile
from collections import Counter
from itertools import groupby
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import (
    ALTERNATING,
    CALL,
    CHAT,
    CHATML,
    FROM_TRL,
    MARKED,
    OPENED,
    PLAIN,
    STRIPPED,
    TOKENIZERS,
    TOOLS,
    WITH_TOOLS,
    assistant,
    tokenizer_with,
    user,
)
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import build
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp
from hf_packing.text.read import Documents
from hf_packing.text.render import CHATML as OWN_CHATML
from hf_packing.text.render import Rendered, Renderer
from hf_packing.text.tokenize import TextTokenizer, load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CHATS = [{"messages": PLAIN}, {"messages": PLAIN[:2]}, {"messages": [*PLAIN, *PLAIN]}]
PAIRS = [{"prompt": PLAIN[:3], "completion": PLAIN[3:]}, {"prompt": PLAIN[:1], "completion": PLAIN[1:]}]
TEXTS = [{"prompt": "one two", "completion": " three"}, {"prompt": "", "completion": "four<|im_end|>"}]
FAMILIES = [name for name in FROM_TRL if f"{name}_training" in FROM_TRL]
WORDS = ["[UNK]", "<end>", "one", "two", "three", "user", "assistant"]


@pytest.fixture
def words():
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="<end>")


def columns(dataset):
    return dataset["input_ids"][:], dataset["labels"][:]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """SFTTrainer makes the folder for its outputs as soon as it is built."""
    monkeypatch.chdir(tmp_path)


def of_trl(rows, tokenizer, **settings):
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none"}
    args = SFTConfig("unused", max_length=None, shuffle_dataset=False, **quiet, **settings)
    model, data = build("Llama", vocab_size=len(tokenizer)), datasets.Dataset.from_list(rows)
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    if "labels" in trainer.train_dataset.column_names:
        return trainer.train_dataset
    batches = [trainer.data_collator([row]) for row in trainer.train_dataset]  # the collator makes labels in older TRL
    return datasets.Dataset.from_list(
        [{name: batch[name][0].tolist() for name in ("input_ids", "labels")} for batch in batches]
    )


def ours(rows, template=CHATML, **settings):
    return hfp.tokenize(datasets.Dataset.from_list(rows), tokenizer_with(template), **settings)


@pytest.mark.parametrize(
    ("rows", "train_on", "settings"),
    [
        (CHATS, "assistant", {"assistant_only_loss": True}),
        (CHATS, "all", {}),
        (PAIRS, "completion", {}),
        (PAIRS, "assistant", {"assistant_only_loss": True}),
        (PAIRS, "all", {"completion_only_loss": False}),
        (TEXTS, "completion", {}),
        (TEXTS, "all", {"completion_only_loss": False}),
        ([{"text": "one two"}, {"text": "three<|im_end|>"}], "all", {}),
    ],
)
def test_tokens_and_labels_are_those_of_sft_trainer(rows, train_on, settings):
    expected = columns(of_trl(rows, tokenizer_with(MARKED), **settings))
    assert columns(ours(rows, MARKED, train_on=train_on)) == expected
    assert columns(ours(rows, CHATML, train_on=train_on)) == expected, "a template without marks"
    labels = [label for row in expected[1] for label in row]
    assert any(label != -100 for label in labels)
    assert train_on == "all" or -100 in labels


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "toolcall", "instruct"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3", None])
def test_real_documents_are_tokenized_as_by_sft_trainer(shared_data, name, family):
    rows = datasets.load_dataset("json", data_files=str(shared_data / f"{name}.jsonl.gz"), split="train")
    rows = rows.select(range(60)).remove_columns({"id", "source"} & set(rows.column_names))
    tokenizer = tokenizer_with(FROM_TRL[family] if family else MARKED)
    expected = of_trl(rows.to_list(), tokenizer, **({} if name == "instruct" else {"assistant_only_loss": True}))
    assert columns(hfp.tokenize(rows, tokenizer)) == columns(expected)


@pytest.mark.filterwarnings("ignore:tokenize")
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_are_found_without_marks(family, monkeypatch):
    """Those of TRL's training version, but for white space after a turn, and for what the generation prompt writes."""
    tokenizer = tokenizer_with(FROM_TRL[family])
    try:
        marked = hfp.tokenize({"messages": [PLAIN]}, tokenizer)
    except hfp.PackingError:
        pytest.skip("the template refuses the chat")
    monkeypatch.setattr("trl.get_training_chat_template", lambda _: None)
    try:
        found = hfp.tokenize({"messages": [PLAIN]}, tokenizer)
    except hfp.PackingError as error:
        pytest.skip("the template rewrites earlier turns" if "rewrites the first" in str(error) else str(error))
    if found["input_ids"] != marked["input_ids"]:
        pytest.skip("the training version writes other text")
    asked = tokenizer.apply_chat_template(PLAIN, tokenize=False, add_generation_prompt=True).removeprefix(
        tokenizer.apply_chat_template(PLAIN, tokenize=False)
    )
    for ids, ours, theirs in zip(*found.values(), marked["labels"], strict=True):
        assert any(own != -100 for own in ours)
        for token, own, other in zip(ids, ours, theirs, strict=True):
            if own != other:
                text = tokenizer.decode([token])
                assert (text in asked) if own == -100 else not text.strip()


def test_datasets_streams_and_map_are_the_same():
    rows, tokenizer = datasets.Dataset.from_list(CHATS), tokenizer_with(CHATML)
    whole = hfp.tokenize(rows, tokenizer)
    assert whole.column_names == ["input_ids", "labels"]
    assert columns(hfp.tokenize(rows, tokenizer, num_proc=2)) == columns(whole)
    assert list(hfp.tokenize(rows.to_iterable_dataset(), tokenizer)) == whole.to_list()
    of_dict = hfp.tokenize(datasets.DatasetDict(train=rows, test=rows.select([1])), tokenizer)
    assert of_dict["train"].to_list() == whole.to_list()
    assert of_dict["test"].to_list() == whole.to_list()[1:2]
    mapped = rows.map(hfp.tokenize, batched=True, fn_kwargs={"tokenizer": tokenizer}, remove_columns=rows.column_names)
    assert columns(mapped) == columns(whole)
    assert hfp.tokenize(rows, tokenizer)._fingerprint == whole._fingerprint, "not tokenized again"
    assert len(hfp.pack(whole, hfp.BestFit(512))) == 1


def test_streams_keep_their_shards_and_templates_may_be_others():
    """Each logical stream reads its own; `pack` would warn of shards that several have to read."""
    stream = datasets.Dataset.from_list(CHATS).to_iterable_dataset(num_shards=3)
    packed = hfp.pack(hfp.tokenize(stream, tokenizer_with(CHATML)), hfp.BestFit(512), streams=3)
    assert len(list(packed)) == 3
    shouted = CHATML.replace("message.content", "message.content + '!'")
    assert columns(ours(CHATS, chat_template=shouted)) == columns(ours(CHATS, shouted))


def test_text_that_the_template_leaves_out_is_counted():
    with pytest.warns(UserWarning, match="tokenize: 1 of 2 rows lack content, thinking or tool calls"):
        ours([{"messages": PLAIN}, {"messages": CHAT}])
    with pytest.warns(UserWarning, match="tokenize: 1 of 1 rows have no token to train on"):
        ours([{"messages": PLAIN[:1]}])


@pytest.mark.parametrize("template", [STRIPPED, OPENED])
def test_templates_that_rewrite_earlier_turns(template):
    message = "row 1: expected a chat template that begins .*, and leaves earlier turns .*hf_packing.branches"
    with pytest.raises(hfp.PackingError, match=message):
        ours([{"messages": [{"role": "user", "content": "a"}]}, {"messages": CHAT}], template)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (CHATS, {"train_on": "user"}, "row 0: .*train_on='assistant' or 'all' .*train_on='user'"),
        (CHATS, {"train_on": "completion"}, "row 0: .*train_on='completion'"),
        ([{"body": "a"}], {}, "row 0: .*text_field"),
        ([{"messages": PLAIN, "tools": TOOLS}], {}, "row 0: expected a chat template that writes tools"),
    ],
)
def test_refused(rows, settings, message):
    with pytest.raises(hfp.PackingError, match=message):
        ours(rows, **settings)
    with pytest.raises(hfp.PackingError, match="batch, row 1: 'utf-8' codec can't encode .* surrogates not allowed"):
        hfp.tokenize({"text": ["a", "\ud800"]}, tokenizer_with(CHATML))


def test_what_is_no_dataset_or_tokenizer(tmp_path):
    with pytest.raises(hfp.PackingError, match="dataset: .*batched=True, got list"):
        hfp.tokenize([PLAIN], tokenizer_with(CHATML))
    with pytest.raises(hfp.PackingError, match="batched=True"):
        datasets.Dataset.from_list([{"text": "a"}]).map(hfp.tokenize, fn_kwargs={"tokenizer": tokenizer_with(CHATML)})
    with pytest.raises(hfp.PackingError, match="tokenizer: expected a tokenizer of transformers, got str"):
        hfp.tokenize(datasets.Dataset.from_list(CHATS), "gpt2")
    (tmp_path / "broken.json").write_text("{")
    for name in (str(tmp_path / "broken.json"), "nobody/nothing"):
        with pytest.raises(hfp.PackingError, match="tokenizer: expected a name on the hub, a folder or a tokenizer"):
            load_tokenizer(name)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_and_settings_reach_the_template(tools):
    tokenizer, settings = tokenizer_with("{{ style }}{{ tools | tojson }}" + CHATML), {"style": "brief"}
    row = {"prompt": PLAIN[:3], "completion": PLAIN[3:], "tools": tools, "chat_template_kwargs": settings}
    (ids,), (labels,) = hfp.tokenize({name: [value] for name, value in row.items()}, tokenizer).values()
    assert ids == tokenizer.apply_chat_template(PLAIN, tools=TOOLS, **settings)["input_ids"]
    settings |= {"tools": TOOLS, "add_generation_prompt": True}
    asked = tokenizer.apply_chat_template(PLAIN[:3], **settings)["input_ids"]
    assert labels == [-100] * len(asked) + ids[len(asked) :]


def test_nulls_that_arrow_puts_into_messages_are_not_written():
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in ({"a": 1}, {"b": "c"})]
    chat = [PLAIN[0], *({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)]
    tools = [{"function": {"parameters": {name: {"type": "string"}}}, "type": "function"} for name in "xy"]
    rows = datasets.Dataset.from_list([{"messages": chat, "tools": tools}])
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    written = "{{ messages | tojson }}{{ tools | tojson }}"
    for template in (written, None):
        (ids,), _ = columns(hfp.tokenize(rows, tokenizer_with(template), train_on="all"))
        assert "null" not in tokenizer_with(template).decode(ids)
    tokenizer = tokenizer_with(written)
    expected = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False, tools=rows[0]["tools"])
    assert "null" in expected


def test_tokens_that_the_tokenizer_puts_around_a_text(words):
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="user $A <end>", special_tokens=[("user", 5), ("<end>", 1)]
    )
    rows = {"prompt": ["one two", ""], "completion": [" three", "one"]}
    assert hfp.tokenize(rows, words) == {
        "input_ids": [[5, 2, 3, 4, 1], [5, 2, 1]],
        "labels": [[-100, -100, -100, 4, 1], [-100, 2, 1]],
    }
    chat = hfp.tokenize({"messages": [[{"role": "user", "content": "one"}]]}, words, train_on="all")
    assert chat["input_ids"][0][0] != 5, "a chat template has its own"


def test_padding_and_truncation_of_a_tokenizer_are_switched_off(tmp_path, words):
    words.backend_tokenizer.enable_truncation(1)
    words.backend_tokenizer.enable_padding(length=9)
    words.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(load_tokenizer(str(tmp_path / "tokenizer.json")))
    tokens = tokenizer.tokens([Rendered("one two three")], Counter())
    assert tokens == {"input_ids": [[2, 3, 4]], "labels": [[2, 3, 4]]}


def test_tokenizers_in_python_and_those_that_leave_characters_out():
    """Its offsets drift: 'two' would lie within the prompt."""
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate("onetw")}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.warns(UserWarning, match="tokenize: 1 of 1 rows end without an end-of-sequence token"):
        found = hfp.tokenize({"prompt": ["######one"], "completion": ["two"]}, tokenizer)
    assert found == {"input_ids": [[0, 1, 2, 3, 4, 0]], "labels": [[-100, -100, -100, 3, 4, 0]]}
    tokenizer = TextTokenizer(Spelled(), separator="\n")
    tokens = tokenizer.tokens([tokenizer.render({"prompt": "ab", "completion": "c"})], Counter())
    assert tokens == {"input_ids": [list(map(ord, "<ab\nc>"))], "labels": [[*[-100] * 4, ord("c"), ord(">")]]}
    assert TextTokenizer(Spelled()).tokens([Rendered("a")], Counter())["input_ids"] == [list(map(ord, "<a>"))]


@pytest.mark.parametrize(
    "said",
    [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"trainable": False}, {"masked": True}],
)
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_messages_that_say_not_to_train_on_them(said, template):
    """A message without such a field, or with the other value, is trained on."""
    other = {name: 1 if name == "weight" else not value for name, value in said.items()}
    chat = [*PLAIN[:1], {**PLAIN[1], **said}, *PLAIN[2:3], {**PLAIN[3], **other}]
    tokenizer = tokenizer_with(template)
    (both,), (all_labels,) = hfp.tokenize({"messages": [PLAIN]}, tokenizer).values()
    (ids,), (labels,), *_ = hfp.tokenize({"messages": [chat]}, tokenizer).values()  # floats have a column of their own
    assert ids == both
    last = hfp.tokenize({"prompt": [PLAIN[:3]], "completion": [PLAIN[3:]]}, tokenizer)["labels"][0]
    assert labels == last
    assert labels != all_labels
    (only,), _ = hfp.branches({"messages": [chat]}, tokenizer).values()
    assert only == hfp.branches(PLAIN, tokenizer)["input_ids"][1]
    pair = {"prompt": [chat[:3]], "completion": [chat[3:]]}
    assert hfp.tokenize(pair, tokenizer)["labels"] == [last], "the prompt is not trained on anyway"
    rows = datasets.Dataset.from_list([{"messages": chat}, {"messages": PLAIN}])
    assert hfp.tokenize(rows, tokenizer)["labels"][:] == [last, all_labels], "where Arrow adds nulls"
    with pytest.raises(hfp.PackingError, match="batch, row 0: expected train_on='assistant' for messages with weights"):
        hfp.tokenize({"messages": [chat]}, tokenizer, train_on="all")


@pytest.mark.parametrize("weight", ["1", float("nan"), float("inf"), -1e300, 10**400])
def test_weights_of_messages_are_finite_numbers(weight):
    chat = [PLAIN[0], {**PLAIN[1], "weight": weight}]
    said = re.escape(f"weight: expected a finite number in a message, of at most 3e+38, got {weight!r:.20}")
    with pytest.raises(hfp.PackingError, match=said):
        hfp.tokenize({"messages": [chat]}, tokenizer_with(CHATML))


@pytest.mark.parametrize(
    "calls", ["abc", {"name": "f"}, [["a"]], [{"function": "f"}], [{"function": None, "name": "f"}]]
)
@pytest.mark.parametrize("function", [hfp.tokenize, hfp.branches])
def test_calls_of_tools_that_are_none_are_named(function, calls):
    chat = [PLAIN[0], {**PLAIN[1], "tool_calls": calls}]
    with pytest.raises(hfp.PackingError, match="row 0: message 1: expected a list of calls in tool_calls, got"):
        function({"messages": [chat]}, tokenizer_with(CHATML))


@pytest.mark.parametrize("name", ["chat_template", "add_generation_prompt", "continue_final_message"])
def test_arguments_that_the_template_does_not_read_are_refused(name):
    row = {"messages": [PLAIN], "chat_template_kwargs": [{name: True}]}
    said = f"expected chat_template_kwargs that the chat template reads, got '{name}'"
    with pytest.raises(hfp.PackingError, match=said):
        hfp.tokenize(row, tokenizer_with(CHATML))
    with pytest.raises(hfp.PackingError, match=said):
        hfp.branches({"messages": [PLAIN]}, tokenizer_with(CHATML), chat_template_kwargs={name: True})


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.5}, {"train": False}, {"masked": True}])
def test_a_weight_of_prompts_does_not_train_on_messages_with_marks_of_their_own(mark):
    row = {"prompt": [PLAIN[0], {**PLAIN[1], **mark}, PLAIN[2]], "completion": [PLAIN[3]]}
    rows = {name: [value] for name, value in row.items()}
    with pytest.raises(hfp.PackingError, match="row 0: prompt_weight: expected prompts of messages without weights"):
        hfp.tokenize(rows, tokenizer_with(CHATML), prompt_weight=0.1)
    (labels,) = hfp.tokenize(rows, tokenizer_with(CHATML))["labels"]
    assert {*labels} > {-100}


@pytest.mark.parametrize("name", ["train", "trainable", "masked"])
@pytest.mark.parametrize("value", ["false", "", 2, []])
def test_flags_of_messages_are_true_or_false(name, value):
    chat = [PLAIN[0], {**PLAIN[1], name: value}]
    said = re.escape(f"batch, row 0: {name}: expected true or false in a message, got {value!r}")
    for make in (hfp.tokenize, hfp.branches):
        with pytest.raises(hfp.PackingError, match=said):
            make({"messages": [chat]}, tokenizer_with(CHATML))


@pytest.mark.parametrize("form", ["numpy", "pandas", "arrow"])
@pytest.mark.parametrize("make", [hfp.tokenize, hfp.branches])
def test_errors_of_formats_say_how_to_take_them_away(form, make):
    rows = datasets.Dataset.from_list([{"messages": PLAIN}]).with_format(form)
    settings = {"batched": True, "fn_kwargs": {"tokenizer": tokenizer_with(CHATML)}, "remove_columns": ["messages"]}
    for dataset in (rows, rows.to_iterable_dataset()):
        with pytest.raises(hfp.PackingError, match=r"(?s)got \w+.*dataset\.with_format\(None\) has rows"):
            list(dataset.map(make, **settings))
        assert len(list(dataset.with_format(None).map(make, **settings)))


def weighted_chats():
    """Two chats, and what they weigh; those of a chat that no message of says anything about weigh 1."""
    weights = [0.5, -2.0]
    chat = [PLAIN[0], {**PLAIN[1], "weight": weights[0]}, PLAIN[2], {**PLAIN[3], "weight": weights[1]}]
    return datasets.Dataset.from_list([{"messages": PLAIN}, {"messages": chat}]), weights


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_tokens_have_the_weight_of_their_message(template):
    rows, weights = weighted_chats()
    tokenizer = tokenizer_with(template)
    made = hfp.tokenize(rows, tokenizer)
    plain = hfp.tokenize(rows.select([0, 0]), tokenizer)
    assert (made["input_ids"][:], made["labels"][:]) == (plain["input_ids"][:], plain["labels"][:])
    assert made.features["loss_weights"].feature.dtype == "float32"
    labels, (ones, found) = made["labels"][1], made["loss_weights"]
    assert ones == [label != -100 for label in made["labels"][0]]
    turns = [[*group] for is_trained, group in groupby(range(len(labels)), lambda at: labels[at] != -100) if is_trained]
    assert [{found[at] for at in turn} for turn in turns] == [{weight} for weight in weights]
    (batch,) = [hfp.tokenize(rows.to_dict(), tokenizer)]
    assert batch["loss_weights"] == made["loss_weights"][:]
    stream = hfp.tokenize(rows.to_iterable_dataset(), tokenizer)
    assert [row["loss_weights"] for row in stream] == made["loss_weights"][:]


def test_weights_that_are_whole_numbers_make_no_column_and_are_0_or_1():
    def chat_of(weight):
        return [PLAIN[0], {**PLAIN[1], "weight": weight}, PLAIN[2], {**PLAIN[3], "weight": 1}]

    tokenizer = tokenizer_with(CHATML)
    rows = datasets.Dataset.from_list([{"messages": PLAIN}, {"messages": chat_of(0)}])
    assert hfp.tokenize(rows, tokenizer).column_names == ["input_ids", "labels"]
    of_documents = rows.add_column("weight", [0.5, 0.5])
    assert hfp.tokenize(of_documents, tokenizer).column_names == ["input_ids", "labels"]
    said = (
        "weight: expected 0, 1 or floats in messages, got 2; .* if the features of the dataset say that they are floats"
    )
    for dataset in (datasets.Dataset.from_list([{"messages": chat_of(2)}]), {"messages": [chat_of(2)]}):
        with pytest.raises(hfp.PackingError, match=said):
            hfp.tokenize(dataset, tokenizer)
    with pytest.raises(hfp.PackingError, match="expected train_on='assistant' for messages with weights, got 'all'"):
        hfp.tokenize({"messages": [chat_of(0.5)]}, tokenizer, train_on="all")


@pytest.fixture
def file_of_weights(tmp_path):
    """JSON lines in which only turns of the assistant have a weight, so that `datasets` leaves the types of messages
    open."""
    rows = [{"messages": [PLAIN[0], {**PLAIN[1], "weight": weight}], "note": "x"} for weight in (1, 0.5)]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(tmp_path / "chats.jsonl")


def test_weights_of_json_and_of_large_lists(file_of_weights):
    tokenizer = tokenizer_with(CHATML)
    rows = datasets.load_dataset("json", data_files=file_of_weights, split="train")
    message = {**{name: datasets.Value("string") for name in PLAIN[0]}, "weight": datasets.Value("float32")}
    large = datasets.Features({"messages": datasets.LargeList(message)})
    for dataset in (rows, datasets.Dataset.from_dict({"messages": rows["messages"][:]}, large)):
        made = hfp.tokenize(dataset, tokenizer)
        assert [weights[-1] for weights in made["loss_weights"]] == [1, 0.5]
    assert "loss_weights" not in hfp.tokenize(rows.select([0]), tokenizer).column_names


def test_the_error_of_weights_in_a_stream_has_a_line_that_helps(file_of_weights):
    dataset = datasets.load_dataset("json", data_files=file_of_weights, split="train", streaming=True)
    with pytest.raises(hfp.PackingError, match="weight: expected 0, 1 or floats in messages, got 0.5") as refused:
        list(hfp.tokenize(dataset, tokenizer_with(CHATML)))
    (line,) = re.findall(r"as after (dataset\..*)", str(refused.value))
    made = list(hfp.tokenize(eval(line), tokenizer_with(CHATML)))
    assert [row["loss_weights"][-1] for row in made] == [1, 0.5]


def test_columns_that_a_format_hides_are_not_read():
    tokenizer = tokenizer_with(FROM_TRL["qwen3"])
    rows = datasets.Dataset.from_dict({"messages": [PLAIN], "tools": [json.dumps(TOOLS)]})
    shown, plain = rows.with_format("numpy", columns=["messages"]), rows.remove_columns("tools")
    assert hfp.tokenize(shown, tokenizer)[:] == hfp.tokenize(plain, tokenizer)[:] != hfp.tokenize(rows, tokenizer)[:]


@pytest.mark.parametrize("weight", [0.1, -1])
@pytest.mark.parametrize("is_chat", [False, True])
def test_prompts_with_a_weight(weight, is_chat):
    row = {"prompt": PLAIN[:3], "completion": PLAIN[3:]} if is_chat else {"prompt": "a b", "completion": " c"}
    rows, tokenizer = datasets.Dataset.from_list([row]), tokenizer_with(CHATML)
    (plain,), (made,) = hfp.tokenize(rows, tokenizer), hfp.tokenize(rows, tokenizer, prompt_weight=weight)
    assert made["input_ids"] == plain["input_ids"] == made["labels"]
    wanted = [weight if label == -100 else 1 for label in plain["labels"]]
    assert len({*wanted}) == 2
    assert made["loss_weights"] == pytest.approx(wanted)
    assert hfp.tokenize(rows, tokenizer, prompt_weight=0).column_names == ["input_ids", "labels"]
    for other, how in (({"messages": PLAIN}, {}), ({"text": "a"}, {}), (row, {"train_on": "all"})):
        with pytest.raises(hfp.PackingError, match="row 0: prompt_weight: expected rows with prompt and completion"):
            hfp.tokenize(datasets.Dataset.from_list([other]), tokenizer, prompt_weight=weight, **how)
    with pytest.raises(hfp.PackingError, match="prompt_weight: expected a finite number, got nan"):
        hfp.tokenize(rows, tokenizer, prompt_weight=float("nan"))


@pytest.mark.filterwarnings("ignore:tokenize")
def test_marks_that_are_not_those_of_the_turns_are_refused_where_a_turn_is_left_out():
    halves = MARKED.replace("{{ message.content or '' }}", "a{% endgeneration %}{% generation %}b")
    chat = [*PLAIN[:3], {**PLAIN[3], "weight": 0}]
    assert hfp.tokenize({"messages": [PLAIN]}, tokenizer_with(halves))
    with pytest.raises(hfp.PackingError, match="expected a chat template that marks 2 turns, but it marks 4"):
        hfp.tokenize({"messages": [chat]}, tokenizer_with(halves))


def calling(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [user("one"), {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "gptoss", "glm4moe", "gemma4"])
@pytest.mark.parametrize("arguments", [{"a": 1, "b": {"c": [None, "x"]}}, {}, {"b": None, "a": "y"}])
def test_arguments_of_tools_that_are_json_are_written_once(name, arguments):
    """As transformers' documentation says: templates expect a mapping."""
    if name not in FROM_TRL:
        pytest.skip("an older TRL does not have the template")
    tokenizer = tokenizer_with(FROM_TRL[name])
    batch = {"messages": [calling(json.dumps(arguments))], "tools": [TOOLS]}
    found = hfp.tokenize(batch, tokenizer, train_on="all")["input_ids"][0]
    assert found == tokenizer.apply_chat_template(calling(arguments), tools=TOOLS)["input_ids"]
    assert batch["messages"][0][1]["tool_calls"][0]["function"]["arguments"] == json.dumps(arguments), "not changed"


@pytest.mark.parametrize("arguments", ["no JSON", "[1, 2]", "3", ""])
def test_arguments_that_are_no_mapping_are_given_as_they_are(arguments):
    found = hfp.tokenize({"messages": [calling(arguments)]}, tokenizer_with(MARKED), train_on="all")["input_ids"][0]
    assert found == tokenizer_with(MARKED).apply_chat_template(calling(arguments))["input_ids"]


@pytest.mark.filterwarnings("ignore:tokenize")
def test_a_template_that_joins_arguments_to_text_gets_them_as_text():
    joins = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    joins += "{{ 'call ' + c.function.arguments + '!' }}{% endfor %}{% endfor %}"
    (ids,), _ = hfp.tokenize({"messages": [calling('{"a":  1}')]}, tokenizer_with(joins), train_on="all").values()
    assert tokenizer_with(joins).decode(ids) == 'onecall {"a":  1}!'


def test_nulls_of_the_data_stay_and_those_of_arrow_go(tmp_path):
    written = tokenizer_with("{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}{{ tools | tojson }}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None, "enum": ["a", None]}}}]
    chats = [[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {each: None}}]}] for each in ("a", "b")]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(f"{json.dumps({'messages': chat, 'tools': tools})}\n" for chat in chats))
    tokens = Documents(str(lines)).tokens(TextTokenizer(written, train_on="all"), tmp_path / "tokens.arrow")
    batch = hfp.tokenize({"messages": chats, "tools": [tools] * 2}, written, train_on="all")
    assert tokens["input_ids"][:] == batch["input_ids"]
    for ids, chat in zip(batch["input_ids"], chats, strict=True):
        assert ids == written.apply_chat_template(chat, tools=tools)["input_ids"]
    features = datasets.Features({"messages": datasets.Json(), "tools": datasets.Json()})
    typed = datasets.Dataset.from_list([{"messages": chat, "tools": tools} for chat in chats], features=features)
    assert hfp.tokenize(typed, written, train_on="all")["input_ids"][:] == batch["input_ids"]
    mixed = [{"messages": calling({"a": 1})}, {"messages": calling({"b": "x"})}]
    mixed = json.loads(json.dumps(mixed, sort_keys=True))  # as pyarrow 21 sorts the fields
    rows = datasets.Dataset.from_list(mixed)
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["b"] is None
    found = hfp.tokenize(rows, tokenizer_with(MARKED))
    assert found.to_dict() == hfp.tokenize({"messages": [each["messages"] for each in mixed]}, tokenizer_with(MARKED))


@pytest.mark.parametrize(
    ("text", "twice"),
    [("<s> one", True), ("one </s>", True), ("<s> one </s>", True), ("one", False), ("one <s> two", False)],
)
def test_special_tokens_that_are_in_a_text_already(text, twice):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "<s>": 2, "one": 3, "two": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("</s>", 1), ("<s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    rows = {"text": ["two", text, text]}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = hfp.tokenize(rows, tokenizer)["input_ids"]
    assert found[1] == tokenizer(text)["input_ids"]
    expected = ["tokenize: 2 of 3 rows have the tokenizer's special tokens twice at an end"] * twice
    assert [str(each.message).split(", since")[0] for each in said] == expected
    plain = hfp.tokenize(rows, tokenizer, add_special_tokens=False)["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert plain[1] == (ids if ids[-1] == 1 else [*ids, 1])


@pytest.mark.parametrize("form", ["numpy", "pandas", "arrow", "polars", "torch"])
def test_formats_of_datasets_do_not_change_tokens(form):
    if form == "polars":
        pytest.importorskip("polars")
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two three"}])
    tokenizer = tokenizer_with(CHATML)
    assert hfp.tokenize(rows.with_format(form), tokenizer).to_dict() == hfp.tokenize(rows, tokenizer).to_dict()
    chats = datasets.Dataset.from_list(CHATS)
    assert hfp.tokenize(chats.with_format(form), tokenizer).to_dict() == hfp.tokenize(chats, tokenizer).to_dict()


@pytest.mark.filterwarnings("ignore:tokenize")
def test_empty_splits_and_streams_that_begin_with_blank_rows():
    rows, tokenizer = datasets.Dataset.from_list(CHATS), tokenizer_with(CHATML)
    both = hfp.tokenize(datasets.DatasetDict(train=rows, test=rows.select([])), tokenizer)
    assert len(both["test"]) == 0
    assert both["test"].features == both["train"].features
    assert len(datasets.concatenate_datasets([*both.values()])) == len(rows)
    texts = [{"text": ""}] * 5 + [{"text": "one two"}]
    stream = datasets.Dataset.from_list(texts).to_iterable_dataset()
    expected = hfp.tokenize(datasets.Dataset.from_list(texts), tokenizer, add_special_tokens=False).to_list()
    assert list(hfp.tokenize(stream, tokenizer)) == expected
    assert sum(map(len, (row["input_ids"] for row in hfp.pack(hfp.tokenize(stream, tokenizer), hfp.BestFit(64))))) > 1


def test_cached_tokens_depend_on_the_versions(monkeypatch):
    rows, tokenizer = datasets.Dataset.from_list(CHATS), tokenizer_with(CHATML)
    settings = {"batched": True, "fn_kwargs": {"tokenizer": tokenizer}, "remove_columns": rows.column_names}

    def keys():
        return [
            hfp.tokenize(rows, tokenizer)._fingerprint,
            rows.map(hfp.tokenize, **settings)._fingerprint,
            rows.map(hfp.branches, **settings)._fingerprint,
        ]

    now = keys()
    assert keys() == now
    real, given = importlib.metadata.version, {}
    monkeypatch.setattr("hf_packing.versioned.version", lambda name: given.get(name) or real(name))
    seen = [now]
    for package in ("hf-packing", "transformers", "trl", "jinja2", "tokenizers"):
        given[package] = "0.0.1"
        seen.append(keys())
    assert all(len(set(each)) == len(seen) for each in zip(*seen, strict=True)), "tokenized anew each time"
    monkeypatch.setattr("hf_packing.versioned.version", real)
    assert keys() == now
    tokenizer.chat_template = MARKED
    assert all(map(str.__ne__, keys(), now))


def test_functions_whose_results_are_cached_can_be_pickled():
    for function in (hfp.tokenize, hfp.branches):
        assert pickle.loads(pickle.dumps(function)) is function  # written above


@pytest.mark.parametrize("template", [CHATML, ALTERNATING + "{% if add_generation_prompt %} {% endif %}"])
def test_long_chats_are_rendered_in_linear_time(template, monkeypatch):
    """The messages that are written for a chat are about four times those of half of it, if each is asked about all."""
    written = []
    real = Renderer.write
    monkeypatch.setattr(
        Renderer, "write", lambda own, chat, *rest, **more: written.append(len(chat)) or real(own, chat, *rest, **more)
    )

    def asked(turns):
        chat = [message for number in range(turns) for message in (user(f"a{number}"), assistant(f"b{number}"))]
        written.clear()
        rendered = Renderer(tokenizer_with(template)).render({"messages": chat})
        assert [rendered.text[begin:end].strip().split("<")[0] for begin, end in rendered.trained] == [
            f"b{number}" for number in range(turns)
        ]
        return sum(written)

    assert asked(80) < 2.2 * asked(40)


def test_turns_that_depend_on_their_number_are_found():
    """What the template adds to the first messages is not what the text has."""
    numbered = "{% for m in messages %}{{ loop.index }} {{ m.role }} {{ m.content }};{% endfor %}"
    numbered += "{% if add_generation_prompt %}{{ messages | length + 1 }} assistant {% endif %}"
    chat = [message for number in range(5) for message in (user("a"), assistant(f"b{number}"))]
    rendered = Renderer(tokenizer_with(numbered)).render({"messages": chat})
    assert [rendered.text[begin:end] for begin, end in rendered.trained] == [f"b{number};" for number in range(5)]


class Spelled(PreTrainedTokenizer):
    """A tokenizer in Python: a token for every letter, with one around them."""

    vocab_size = 256

    def get_vocab(self):
        return {chr(number): number for number in range(self.vocab_size)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):  # noqa: ARG002
        return [ord("<"), *token_ids_0, ord(">")]

    def get_special_tokens_mask(self, token_ids_0, token_ids_1=None, already_has_special_tokens=False):  # noqa: ARG002
        return [1, *[0] * len(token_ids_0), 1]


@pytest.mark.parametrize("special", ["$A </s>", "<s> $A </s>"])
def test_special_tokens_that_end_a_prompt_alone_take_no_label_from_its_completion(special):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "<s>": 2, "one": 3, "two": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single=special, special_tokens=[("</s>", 1), ("<s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    completions = {"": [1], " two": [4, 1], " </s> two": [1, 4, 1]}
    rows = [{"prompt": "one", "completion": completion} for completion in completions]
    tokens = hfp.tokenize(datasets.Dataset.from_list(rows), tokenizer)
    assert [[label for label in row if label != -100] for row in tokens["labels"]] == list(completions.values())


PLAIN_TOKENIZER = tokenizer_with(None)


def render(row, source=OWN_CHATML, **options):
    return Renderer(PLAIN_TOKENIZER, source, **options).render(row)


def test_chatml_is_the_template_of_those_without_one_and_separators_belong_to_prompts():
    calls = [{"name": "find", "arguments": {}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    text = render({"messages": messages}, train_on="all").text
    assert text == (f"<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n{json.dumps(calls)}<|im_end|>\n")
    text = render({"messages": [USER], "tools": TOOLS}).text
    assert text == f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n{ASKED}"
    assert render({"messages": [USER], "tools": None}).text == ASKED
    assert render({"prompt": "one", "completion": "two"}, separator="\n")[:2] == ("one\ntwo", "one\n")


USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
ASKED, BEGUN, ANSWERED = "<|im_start|>user\nQ<|im_end|>\n", "<|im_start|>assistant\n", "A<|im_end|>\n"
TURN = ASKED + BEGUN + ANSWERED
PAIR = {"prompt": [USER], "completion": [ASSISTANT]}


@pytest.mark.parametrize(
    ("row", "field", "text"),
    [
        ({"id": 1, "text": "a"}, None, "a"),
        ({"text": "a", "prompt": "b", "completion": "c"}, None, "bc"),
        ({"text": "a", "prompt": "b"}, None, "a"),
        ({"text": "a", "messages": [USER]}, None, ASKED),
        ({"text": "a", "conversations": [{"from": "user", "value": "Q"}]}, None, ASKED),
        ({"conversations": [ASSISTANT], "messages": [USER], "text": "a"}, None, ASKED),
        ({"text": "a", "dialog": [USER]}, "dialog", ASKED),
        ({"text": "a", "content": "b"}, "content", "b"),
        ({"text": "a", "input_ids": [1]}, "text", "a"),
        ({"text": None, "prompt": "a", "completion": "b"}, None, "ab"),
    ],
)
def test_the_first_field_that_a_row_has_is_its_text(row, field, text):
    assert render(row, text_field=field).text == text


@pytest.mark.parametrize(
    ("row", "train_on", "text"),
    [
        ({"prompt": "one", "completion": "two"}, None, "one[two]"),
        ({"messages": [USER, ASSISTANT]}, "all", TURN),
        ({"messages": [USER, ASSISTANT] * 2}, None, f"{ASKED}{BEGUN}[{ANSWERED}]" * 2),
        ({"messages": [USER, ASSISTANT, USER]}, "assistant", f"{ASKED}{BEGUN}[{ANSWERED}]{ASKED}"),
        ({"messages": [ASSISTANT, USER]}, None, f"{BEGUN}[{ANSWERED}]{ASKED}"),
        ({"messages": [USER]}, "assistant", ASKED),
        (PAIR, None, f"{ASKED}{BEGUN}[{ANSWERED}]"),
        (PAIR, "all", TURN),
        ({"prompt": [USER], "completion": [ASSISTANT, USER]}, "completion", f"{ASKED}{BEGUN}[{ANSWERED}{ASKED}]"),
        (PAIR | {"prompt": [USER, ASSISTANT, USER]}, "assistant", f"{TURN}{ASKED}{BEGUN}[{ANSWERED}]"),
    ],
)
def test_what_is_trained_on(row, train_on, text):
    """It stands in brackets, but for rows of which all is trained on."""
    rendered = render(row, train_on=train_on)
    marked = rendered.text
    start = len(rendered.prompt or "")
    assert marked.startswith(rendered.prompt or "")
    spans = [(start, len(marked))] * (rendered.prompt is not None) if rendered.trained is None else rendered.trained
    for begin, end in reversed(spans):
        if end > start:
            marked = f"{marked[:begin]}[{marked[begin:end]}]{marked[end:]}"
    assert marked == text


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"prompt": "a"}, {}, "prompt or messages .* a prompt needs a completion"),
        ({"prompt": "a"}, {"text_field": "prompt"}, "prompt, got the fields prompt; .* a prompt needs a completion"),
        ({"text": "a"}, {"text_field": "body"}, "body"),
        ({}, {}, "prompt or messages or conversations or text, got the fields none"),
        ({"input_ids": [1]}, {}, "prompt or messages"),
        ({"text": 5}, {}, "text or a list of messages, got int"),
        ({"messages": "one"}, {}, "a list of messages"),
        ({"messages": ["one"]}, {}, "messages with a role"),
        ({"messages": [{"from": "human", "value": "one"}]}, {}, "got 'human'; rename human to user"),
        ({"conversations": [{"from": "user", "text": "one"}]}, {}, "messages with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "text, got a part .*image"),
        ({"prompt": "one", "completion": [ASSISTANT]}, {}, "a list of messages"),
        ({"prompt": [USER], "completion": []}, {}, "at least one message, got an empty list"),
        ({"text": "a"}, {"separator": ""}, "separator"),
        ({"messages": [USER]}, {"train_on": "completion"}, "train_on='assistant' or 'all'"),
        ({"prompt": "a", "completion": "b"}, {"train_on": "assistant"}, "train_on='completion' or 'all'"),
        ({"text": "a"}, {"train_on": "assistant"}, "train_on='all'"),
        ({"messages": [USER], "tools": "{"}, {}, "tools"),
        ({"messages": [USER], "tools": {"name": "find"}}, {}, "[Tt]ools"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, {}, "chat_template_kwargs"),
    ],
)
def test_rows_that_are_refused(row, options, reason):
    with pytest.raises(hfp.PackingError, match=f"expected .*{reason}|^{reason}: expected "):
        render(row, **options)


def asked(tokenizer, messages, **settings):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **settings)["input_ids"]


def answered(tokenizer, messages, **settings):
    asked = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True, **settings)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    assert whole.startswith(asked)
    return whole.removeprefix(asked)


def trained(tokenizer, documents):
    return [tokenizer.decode([label for label in labels if label != -100]) for labels in documents["labels"]]


def check(tokenizer, documents, messages, turns, end="\n", **settings):
    assert len(documents["input_ids"]) == len(documents["labels"]) == len(turns)
    generated = trained(tokenizer, documents)
    for ids, labels, text, turn in zip(*documents.values(), generated, turns, strict=True):
        prompt = asked(tokenizer, messages[:turn], **settings)
        assert ids[: len(prompt)] == prompt
        assert labels == [-100] * len(prompt) + ids[len(prompt) :]
        assert text == answered(tokenizer, messages[: turn + 1], **settings).removesuffix(end)
        assert text


any_texts = st.text("abc \n<>é", max_size=6)


@given(st.sampled_from([*TOKENIZERS]), st.lists(st.tuples(any_texts, any_texts, any_texts), max_size=4), st.booleans())
@pytest.mark.filterwarnings("ignore:branches")
def test_documents_are_what_the_model_sees_and_generates(name, exchanges, ends_with_user):
    tokenizer = TOKENIZERS[name]
    messages = [each for ask, answer, thinking in exchanges for each in (user(ask), assistant(answer, thinking))]
    documents = hfp.branches(messages + [user("bye")] * ends_with_user, tokenizer)
    check(tokenizer, documents, messages, range(1, len(messages), 2), "" if name == "alternating" else "\n")


@given(any_texts, any_texts)
@pytest.mark.filterwarnings("ignore:branches")
def test_documents_are_the_tokens_of_their_text(ask, answer):
    """Where the prompt's tokens are the first ones of the whole text, no token differs from those of the template."""
    for tokenizer in TOKENIZERS["chatml"], TOKENIZERS["stripped"]:
        messages = [user(ask), assistant(f"<{answer}>", "one"), user(ask), assistant(f"<{answer}>", "two")]
        (_, last), _ = hfp.branches(messages, tokenizer).values()
        assert [*last, *tokenizer.encode("\n")] == tokenizer.apply_chat_template(messages)["input_ids"]


def test_tokens_at_the_end_of_the_prompt_and_of_the_turn():
    """The prompt ends with a line break, and the generated text begins with one: together, they would be one token."""
    tokenizer = TOKENIZERS["opened"]
    breaks = tokenizer.encode("\n\n")
    assert len(breaks) == 1
    messages = [user("one"), assistant("two", "")]
    (ids,), (labels,) = hfp.branches(messages, tokenizer).values()
    prompt = asked(tokenizer, messages[:1])
    merged = tokenizer.apply_chat_template(messages)["input_ids"]
    assert merged[: len(prompt)] == [*prompt[:-1], *breaks]
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids) == tokenizer.decode(merged).removesuffix("\n")
    assert tokenizer.decode(labels[len(prompt) :]) == "\n</think>\n\ntwo<|im_end|>"
    # As `<|end|>` of Phi-3 does.
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", rstrip=True, special=True)]})
    (ids,), _ = hfp.branches(PLAIN[:2], tokenizer).values()
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|end|>")


REFUSED_TEMPLATES = {"deepseek_r1_distill", "deepseekv3", "llava_next"}
"""The first two open the thinking in the generation prompt, but not in turns. The last one needs lists of parts."""


assert len(FROM_TRL) > 30  # of TRL 1.4; later ones have twice as many
assert all(name in FROM_TRL for name in REFUSED_TEMPLATES if f"{name}_training" in FROM_TRL)


@pytest.mark.filterwarnings("ignore:branches")
@pytest.mark.parametrize("name", FROM_TRL)
def test_templates_of_published_models(name):
    special = re.findall(r"<[|\uff5c][^<>]*?[|\uff5c]>|<turn\|>|<(?:end_of_turn|end_of_utterance)>", FROM_TRL[name])
    tokenizer = tokenizer_with(FROM_TRL[name], ["<s>", *sorted({*special, "<|endoftext|>"})])
    messages = [
        {**each, "thinking": each["reasoning_content"]} if "reasoning_content" in each else each for each in CHAT
    ]
    if name.removesuffix("_training") in REFUSED_TEMPLATES:
        with pytest.raises(hfp.PackingError, match="^batch, row 0: message 1: expected "):
            hfp.branches(messages, tokenizer)
        return
    if "nothink" in name or "2b_and_below" in name:  # as TRL 1.4 calls it
        messages = PLAIN
    documents = hfp.branches(messages, tokenizer)
    check(tokenizer, documents, messages, (1, 3))


@pytest.fixture(scope="module")
def qwen3():
    return tokenizer_with(FROM_TRL["qwen3"])


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_system_messages_and_several_turns_in_a_row(qwen3, tools):
    batch = {"messages": [WITH_TOOLS], "tools": [tools]}
    documents = hfp.branches(batch, qwen3)
    check(qwen3, documents, WITH_TOOLS, (2, 4, 5), tools=TOOLS)
    last = qwen3.decode(documents["input_ids"][-1])
    assert "Finds what is lost" in last
    assert "I look." in last, "the template keeps thinking since the last question"
    assert hfp.branches({"messages": [WITH_TOOLS]}, qwen3, chat_template_kwargs={"tools": TOOLS}) == documents


def test_arguments_for_the_template(qwen3):
    plain = PLAIN[:2]
    quiet = {"enable_thinking": False}
    documents = hfp.branches(plain, qwen3, chat_template_kwargs=quiet)
    check(qwen3, documents, plain, (1,), **quiet)
    assert trained(qwen3, documents) == ["two<|im_end|>"]
    batch = {"messages": [plain] * 2, "chat_template_kwargs": [{"enable_thinking": True}, None]}
    any_texts = trained(qwen3, hfp.branches(batch, qwen3, chat_template_kwargs=quiet))
    assert any_texts == ["<think>\n\n</think>\n\ntwo<|im_end|>", "two<|im_end|>"]
    with pytest.raises(
        hfp.PackingError, match=r"message 1: .*for the first 1 messages, and .*'enable_thinking': False"
    ):
        hfp.branches(CHAT, qwen3, chat_template_kwargs=quiet)


def test_turns_of_the_completion_alone_and_through_map():
    tokenizer = TOKENIZERS["stripped"]
    batch = {"prompt": [CHAT[:3], CHAT[:1]], "completion": [CHAT[3:], CHAT[1:]], "other": [1, 2]}
    both = hfp.branches(CHAT, tokenizer)
    assert hfp.branches(batch, tokenizer) == {name: [last, first, last] for name, (first, last) in both.items()}
    tokenizer = TOKENIZERS["stripped"]
    rows = datasets.Dataset.from_list(
        [{"id": n, "chat": [{"role": "user", "content": "one"}, *CHAT[1 : 2 * n]]} for n in (1, 2, 2, 1)]
    )
    options = {"batched": True, "batch_size": 3, "remove_columns": rows.column_names}
    options["fn_kwargs"] = {"tokenizer": tokenizer, "text_field": "chat"}
    documents = rows.map(hfp.branches, **options)
    assert documents.column_names == ["input_ids", "labels"]
    assert len(documents) == 6
    check(tokenizer, documents[1:3], CHAT, (1, 3))
    assert [*rows.to_iterable_dataset().map(hfp.branches, **options)] == documents.to_list()
    assert hfp.unpack(hfp.pack(documents, hfp.BestFit(128)))["labels"][:] == documents["labels"][:]


def test_conversations_and_turns_that_lack_something_are_counted():
    tokenizer = TOKENIZERS["chatml"]
    batch = {"messages": [[], [user("one")], [assistant("Hi")], [assistant("Hi"), *PLAIN]]}
    with pytest.warns(UserWarning, match="branches: ") as found:
        documents = hfp.branches(batch, tokenizer)
    assert [str(each.message) for each in found] == [
        "branches: 2 of 4 conversations open with an assistant turn, which is not trained on",
        "branches: 3 of 4 conversations have no later assistant turn to train on, and make no documents",
    ]
    assert Path(found[0].filename) == Path(__file__)
    check(tokenizer, documents, batch["messages"][3], (2, 4))
    template = "{% for message in messages %}{{ message.role }}: {{ message.text }}\n{% endfor %}"
    tokenizer = tokenizer_with(template + "{% if add_generation_prompt %}assistant:{% endif %}")
    chat = [user("one"), assistant("two"), user("three"), assistant("")]
    with pytest.warns(UserWarning, match="branches: ") as found:
        documents = hfp.branches(chat, tokenizer)
    assert sorted(str(each.message) for each in found) == [
        "branches: 1 of 2 assistant turns lack content, thinking or tool calls, which the chat template leaves out",
        "branches: 2 of 2 assistant turns do not end with a special token, so the model does not learn where to stop",
    ]
    check(tokenizer, documents, chat, (1, 3), end="")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "two"},
        {"content": "<think>\nlost</think>\n two "},
        {"content": [{"type": "text", "text": "two"}]},
        {"content": None},
        {"content": "two", "tool_calls": [{"name": "two"}]},
    ],
)
def test_what_a_turn_must_have(message):
    template = "{% for message in messages %}two<|im_end|>{% endfor %}{% if add_generation_prompt %}{% endif %}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hfp.branches([user("one"), {"role": "assistant", **message}], tokenizer_with(template))
    for lost in ({"thinking": "lost"}, {"tool_calls": [CALL]}, {"content": [{"type": "text", "text": "lost"}]}):
        with pytest.warns(UserWarning, match="1 of 1 assistant turns lack content, thinking or tool calls"):
            hfp.branches([user("one"), {"role": "assistant", **message, **lost}], tokenizer_with(template))


PICTURE = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "What is it?"}]


@pytest.mark.parametrize(
    ("template", "conversations", "named"),
    [
        (
            "alternating",
            [user("one"), user("two"), assistant("")],
            "batch, row 0: message 2: .*roles must alternate",
        ),
        ("alternating", [WITH_TOOLS[0], *CHAT], "batch, row 0: message 2: .*roles must alternate"),
        ("chatml", {"messages": [PLAIN, [user(PICTURE), *PLAIN]]}, "batch, row 1: message 0: .*'image'"),
        ("chatml", {"messages": [["one"]]}, "batch, row 0: .*role"),
        ("chatml", {"messages": [CHAT], "tools": ["{"]}, "batch, row 0: .*tools"),
        ("chatml", {"prompt": ["one"], "completion": ["two"]}, "batch, row 0: .*list of messages"),
        ("chatml", {"prompt": "one", "completion": "two"}, "dataset: .*batched=True"),
        ("chatml", {"messages": CHAT}, "batch, row 0: .*got dict.* batched=True"),
        ("chatml", {"text": ["one"]}, "batch, row 0: expected text or a list of messages, got str"),
        (
            "chatml",
            {"prompt": [CHAT]},
            "batch, row 0: expected prompt or .* got the fields prompt; .* a prompt needs",
        ),
        ("chatml", "one", "batch, row 0: expected text or a list of messages, got str"),
    ],
)
def test_refused_conversations(template, conversations, named):
    with pytest.raises(hfp.PackingError, match=f"^{named}"):
        hfp.branches(conversations, TOKENIZERS[template])


def test_turns_that_cannot_stand_apart_from_their_prompt_are_refused():
    unopened = tokenizer_with(OPENED.replace("<think>\n{{", "{{"))
    with pytest.raises(hfp.PackingError, match=r"message 1: .* writes 'im_.*<think>\\n' .* and 'im_start.*thought one"):
        hfp.branches(CHAT, unopened)
    rewriting = tokenizer_with("{{ messages | length }}" + CHATML)
    with pytest.raises(hfp.PackingError, match="it writes '1<.*' for the first 1 messages, and '2<"):
        hfp.branches(CHAT, rewriting)
    silent = tokenizer_with(CHATML.replace("{{ message.content }}<|im_end|>\n", ""))
    with pytest.raises(hfp.PackingError, match="message 1: expected a turn with text, but the chat template writes"):
        hfp.branches([user("one"), assistant("")], silent)
    # It writes a space at the beginning of each text.
    known = {each: number for number, each in enumerate(["▁", "A", "b", "▁A", "Ab", "▁Ab", "</s>"])}
    backend = Tokenizer(models.BPE(known, [("▁", "A"), ("▁A", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    template = "{{ messages[1].content }}A{% if not add_generation_prompt %}{{ messages[-1].content }}{% endif %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    with pytest.raises(hfp.PackingError, match=r"message 2: .* tokenize a turn apart from .*, but 'A' and 'b</s>'"):
        hfp.branches([user(""), user(""), assistant("b</s>")], tokenizer)


def test_bad_conversations_are_left_out_and_tokenizers_without_a_template_refused():
    tokenizer = TOKENIZERS["alternating"]
    batch = {"messages": [PLAIN, [user("one"), *PLAIN], [assistant("one")] * 3, PLAIN[:2]]}
    with pytest.raises(hfp.PackingError, match="^batch, row 1: message 2: "):
        hfp.branches(batch, tokenizer)
    with pytest.warns(UserWarning, match="2 of 4 conversations cannot be used .* batch, row 1: message 2: "):
        documents = hfp.branches(batch, tokenizer, skip_bad=True)
    assert documents == hfp.branches({"messages": [PLAIN, PLAIN[:2]]}, tokenizer)
    for tokenizer in tokenizer_with(None), object():
        with pytest.raises(hfp.PackingError, match=f"tokenizer with a chat template, got {type(tokenizer).__name__}"):
            hfp.branches(CHAT, tokenizer)


OPEN_TABLES = pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
"""datasets 5.0 leaves tables for pandas to close."""


ROWS = [{"text": "one two"}, {"text": "three"}, {"text": ""}]


def write(path, rows):
    """Write rows in the format that the name says; return the path."""
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    if path.name in ("saved", "splits"):
        data = datasets.Dataset.from_list(rows)
        (data if path.name == "saved" else datasets.DatasetDict({"train": data})).save_to_disk(path)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in rows))
    elif path.suffix == ".tsv":
        path.write_text("text\tn\n" + "".join(f"{row['text']}\t1\n" for row in rows))
    elif path.name == "array.json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text(lines)
    return path


def zipped(*texts):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for number, text in enumerate(texts):
            archive.writestr(zipfile.ZipInfo(f"{number}.txt"), text)  # without the time, which is in the name of a test
    return written.getvalue()


@pytest.fixture
def read(tmp_path, words):
    def read_texts(data, **options):
        documents = Documents(str(data), **options)
        tokens = documents.tokens(TextTokenizer(words, end_documents=False), tmp_path / "tokens.arrow")
        return [words.decode(ids) for ids in tokens["input_ids"]], documents

    return read_texts


@OPEN_TABLES
@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "A.NDJSON", "a.json", "array.json", "a.jsonl.gz", "a.parquet", "saved", "splits"),
        *("data.v2/a.jsonl", "a.csv", "a.tsv"),
    ],
)
def test_rows_of_every_format(tmp_path, read, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write(tmp_path / name, ROWS)
    found, documents = read(tmp_path / name)
    assert found == [row["text"] for row in ROWS]
    assert documents.skipped == []
    assert documents.remarks == {"have no token to train on": 2}


def test_values_are_not_changed(tmp_path):
    """Arrow has one type, and one order of fields, for all rows."""

    def call(**arguments):
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    rows = [{"messages": [call(a=1, b=2)]}, {"messages": [call(b=2, a=1.5)]}, {"messages": [call(a="1")]}]
    rows += [{"text": "2024-01-01", "number": 2**70}, {"text": 3}]
    for name in ("a.json", "array.json"):
        documents = Documents(str(write(tmp_path / name, rows)))
        assert [repr(row) for _, row in documents._lines()] == list(map(repr, rows))


def test_text_files_and_folders_of_one_kind(tmp_path, read):
    """What is blank is no document."""
    (tmp_path / "data" / ".hidden").mkdir(parents=True)
    (tmp_path / "data" / "sub").mkdir()
    (tmp_path / "data" / "a.md").write_bytes(b"\xef\xbb\xbfone\ntwo\n\n  \r\nthree\n")
    (tmp_path / "data" / "sub" / "b.md").write_text("three\n")
    (tmp_path / "data" / "sub" / "c.md").write_text("\n \n")
    (tmp_path / "data" / ".hidden" / "d.md").write_text("not a document")
    assert read(tmp_path / "data" / "a.md")[0] == ["one two three"]
    assert read(tmp_path / "data")[0] == ["one two three", "three"]
    (tmp_path / "data" / "notes.txt").write_text("two")
    for pattern in ("*.md", "**/*.md"):
        assert read(tmp_path / "data", glob=pattern)[0] == ["one two three", "three"]
    assert read(tmp_path / "data", glob="sub/*")[0] == ["three"]
    (tmp_path / "lines").mkdir()
    for name in ("a.txt", "b.TXT"):
        (tmp_path / "lines" / name).write_bytes(b"\xef\xbb\xbfone\ntwo\n\n  \r\nthree\n")
        assert read(tmp_path / "lines" / name)[0] == ["one", "two", "three"]
    assert read(tmp_path / "lines")[0] == ["one", "two", "three"] * 2
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "b.jsonl", ROWS)
    (tmp_path / "rows" / "README.md").write_text("about the rows")
    with pytest.raises(hfp.PackingError, match="data: expected files of one kind, got JSON and text"):
        Documents(str(tmp_path / "rows"))
    assert len(read(tmp_path / "rows", glob="*.jsonl")[0]) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "content", "kept", "reason"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": "two"\n{"text": "three"}', ["one", "three"], "line 2: expected JSON"),
        ("a.jsonl", b'{"text": "one"}\n[3]\n', ["one"], "line 2, row 0: expected a JSON object"),
        ("a.json", b'[{"text": "one"}, 3]', ["one"], "row 1: expected a JSON object"),
        ("a.json", b"\xef\xbb\xbf" + b"[" * 100_000, [], "a.json: expected JSON"),
        (
            "a.jsonl",
            b'{"text": "one"}\n{"body": "two"}\n',
            ["one"],
            "line 2: expected prompt or .* got the fields body",
        ),
        ("a.txt", b"one\r\nt\xffwo\nthree", ["one", "three"], "line 2: expected text in UTF-8"),
        ("a.txt", "one\ntwo\n".encode("utf-16-le"), [], "line 1: expected text in UTF-8.*NUL bytes"),
        ("a.tar", b"one\0\0\0", [], "a.tar: expected text in UTF-8"),
        ("a.zip", zipped("one\n", "two\n"), [], "a.zip: expected text in UTF-8"),
    ],
)
def test_lines_and_rows_that_cannot_be_used_are_named_or_left_out(tmp_path, read, name, content, kept, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(hfp.PackingError, match=f"{reason}.*skip_bad=True leaves out"):
        read(tmp_path / name)
    found, documents = read(tmp_path / name, skip_bad=True)
    assert found == kept
    assert documents.skipped


@OPEN_TABLES
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "b.parquet", "b.csv"])
def test_a_damaged_file_is_named(tmp_path, read, name):
    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}.get(name.split(".")[-1], bytes)
    lines = "".join(f'{{"text": "{random.Random(number).random()}"}}\n' for number in range(9000))
    damaged = bytearray(pack(lines.encode()) if name[0] == "a" else b'text,n\n"one,1\ntwo')
    middle = len(damaged) // 2
    damaged[middle : middle + 999] = bytes(999)
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(hfp.PackingError, match=f"{name}.*: "):
        read(tmp_path / name)


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow"])
def test_the_format_of_a_saved_dataset_does_not_change_rows(tmp_path, read, form):
    saved = datasets.Dataset.from_dict({"text": ["one"], "input_ids": [[1]]})
    saved.with_format(form, columns=["text"]).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved")[0] == ["one"], "hidden columns stay hidden"


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"data": "{folder}/none.jsonl"}, "data"),
        ({"data": "{folder}/none", "glob": "*.txt"}, "glob"),
        ({"data": "{folder}", "glob": "*.none"}, "data"),
        ({"data": "{folder}", "glob": "/abs*"}, "data"),
        ({"data": "{folder}/a.txt", "glob": "*.txt"}, "glob"),
        ({"data": "{folder}/a.txt", "split": "test"}, "split"),
        ({"data": "{folder}/splits", "split": "test"}, "data"),
        ({"data": "{folder}/saved", "split": "test"}, "data"),
        ({"data": "nobody/nothing"}, "data"),
        ({"data": "{folder}/a.txt", "tokenizer": None}, "tokenizer"),
        ({"data": "{folder}/tokens.jsonl"}, "tokenizer"),
        ({"data": "{folder}/tokens.jsonl", "tokenizer": None, "skip_bad": True}, "skip_bad"),
    ],
)
def test_data_that_is_refused(tmp_path, words, options, argument):
    (tmp_path / "a.txt").write_text("one")
    write(tmp_path / "tokens.jsonl", [{"input_ids": [1, 2]}])
    write(tmp_path / "splits", ROWS)
    write(tmp_path / "saved", ROWS)
    options = {name: value.format(folder=tmp_path) if name == "data" else value for name, value in options.items()}
    tokenizer = options.pop("tokenizer", words)
    with pytest.raises(hfp.PackingError, match=f"^{argument}: expected "):
        Documents(options.pop("data"), **options).tokens(tokenizer and TextTokenizer(tokenizer), tmp_path / "t.arrow")


@pytest.mark.parametrize("name", ["org/Name-2.5", "org/data.v2", "Name-1.5-sft", "org/v1.0-en"])
def test_names_on_the_hub_may_have_dots(name):
    assert Documents(name).files == []


def test_tokens_are_those_of_tokenize(tmp_path, words, monkeypatch):
    """However many blocks they are tokenized in; and so are labels."""
    monkeypatch.setattr("hf_packing.text.read._DOCUMENTS_AT_ONCE", 2)
    rows = [{"prompt": "one " * number, "completion": " two"} for number in range(9)]
    seen = []
    documents = Documents(str(write(tmp_path / "a.jsonl", rows)))
    found = documents.tokens(TextTokenizer(words), tmp_path / "tokens.arrow", seen.append)
    assert found.to_dict() == hfp.tokenize(datasets.Dataset.from_list(rows), words).to_dict()
    assert sum(seen) == 9
    assert len(seen) > 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved"])
def test_rows_with_tokens_are_given_as_they_are(tmp_path, words, name):
    rows = [{"input_ids": [5, 6], "labels": [-100, 6], "text": "one"}, {"input_ids": [7], "labels": [7], "text": "two"}]
    data = str(write(tmp_path / name, rows))
    assert Documents(data).tokens(None, tmp_path / "tokens.arrow").to_list() == rows
    tokenizer = TextTokenizer(words, text_field="text")
    tokenized = Documents(data).tokens(tokenizer, tmp_path / "tokens.arrow")
    assert tokenized["input_ids"][:] == [[2, 1], [3, 1]]


@pytest.mark.parametrize(
    "name", ["toolcall", *(pytest.param(name, marks=pytest.mark.slow) for name in ("math", "wiki"))]
)
def test_lengths_of_real_documents(shared_data, tmp_path, name):
    separator = "\n" if name == "math" else None
    tokenizer = TextTokenizer(load_tokenizer(str(shared_data / "tokenizer.json")), separator=separator)
    tokens = Documents(str(shared_data / f"{name}.jsonl.gz")).tokens(tokenizer, tmp_path / "tokens.arrow")
    lengths = np.array(list(map(len, tokens["input_ids"])))
    assert np.array_equal(lengths, np.load(shared_data / "lengths" / f"{name}.npy"))
