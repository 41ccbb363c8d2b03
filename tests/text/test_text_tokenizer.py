"""Tokens of tokenizers with templates of their own: chats with tools, settings, and without the nulls of Arrow."""

import json

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from written_rows import write_lines

from hf_packing.errors import PackingError
from hf_packing.text.corpus import Corpus
from hf_packing.text.documents import Documents
from hf_packing.text.rendering import CHATML, Rendered, render
from hf_packing.text.text_tokenizer import TextTokenizer, load_tokenizer, text_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if style %}{{ style }}{% endif %}"
    "{% for message in messages %}{{ bos_token }}{{ message['role'] }} {{ message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant {% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds what is lost"}}]
USER = {"role": "user", "content": "one two"}


def call(**arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


CHAT = [USER, call(a=1), {"role": "tool", "content": "x"}, call(b="c")]


@pytest.fixture(scope="module")
def letters():
    """A token for every byte, so that whatever a template writes is seen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<", eos_token=">", chat_template=TEMPLATE)


@pytest.fixture
def loaded(tmp_path, letters):
    letters.save_pretrained(tmp_path / "tokenizer")
    return load_tokenizer(str(tmp_path / "tokenizer"))


def documents_of(tmp_path, rows, loaded):
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    corpus = Corpus(Documents(str(tmp_path / "a.jsonl")), loaded)
    lengths = corpus.lengths(lambda _: None).tolist()
    (block,) = corpus.blocks()
    input_ids, labels = corpus.tokens_of(block)
    assert lengths == list(map(len, input_ids))
    return input_ids, labels


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_and_settings_reach_the_template(tmp_path, letters, loaded, tools):
    settings = {"style": "brief"}
    row = {"messages": CHAT, "tools": tools, "chat_template_kwargs": settings}
    (ids,), _ = documents_of(tmp_path, [row], loaded)
    assert ids == letters.apply_chat_template(CHAT, tools=TOOLS, **settings)["input_ids"]
    assert "Finds what is lost" in letters.decode(ids)
    row = {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": tools}
    (ids,), (labels,) = documents_of(tmp_path, [row], loaded)
    assert ids == letters.apply_chat_template(CHAT, tools=TOOLS)["input_ids"]
    asked = letters.apply_chat_template(CHAT[:1], tools=TOOLS, add_generation_prompt=True)["input_ids"]
    assert labels == [-100] * len(asked) + ids[len(asked) :]


@pytest.mark.parametrize("write", ["to_parquet", "to_json", "save_to_disk"])
def test_nulls_that_arrow_puts_into_messages_are_not_written(tmp_path, letters, loaded, write):
    chat = json.loads(json.dumps(CHAT, sort_keys=True))  # datasets before 5.1 sorts keys
    tools = [{"function": {"parameters": {name: {"type": "string"}}}, "type": "function"} for name in "xy"]
    saved = datasets.Dataset.from_list([{"messages": chat, "tools": tools}])
    assert saved[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    path = tmp_path / {"to_parquet": "b.parquet", "to_json": "b.jsonl", "save_to_disk": "b"}[write]
    getattr(saved, write)(path)
    corpus = Corpus(Documents(str(path)), loaded)
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block)[0] == [letters.apply_chat_template(chat, tools=tools)["input_ids"]]
    corpus = Corpus(Documents(str(path)), TextTokenizer("letters", loaded.backend))
    (block,) = corpus.blocks()
    assert "null" not in block[0].text


def test_another_special_token_is_another_template(tmp_path, letters, loaded):
    """An interrupted run must not go on with it."""
    (tmp_path / "other").mkdir()
    other = PreTrainedTokenizerFast(tokenizer_object=letters.backend_tokenizer, bos_token="!", chat_template=TEMPLATE)
    other.save_pretrained(tmp_path / "other")
    assert load_tokenizer(str(tmp_path / "other")).template_text != loaded.template_text


def test_prompts_end_where_they_do_for_a_tokenizer_that_leaves_characters_out(tmp_path):
    """Its offsets drift: 'two' would lie within the prompt."""
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate("onetw")}, []))
    (ids,), (labels,) = documents_of(
        tmp_path, [{"prompt": "######one", "completion": "two"}], TextTokenizer("letters", backend)
    )
    assert ids == [0, 1, 2, 3, 4, 0]
    assert labels == [-100, -100, -100, 3, 4, 0]


def test_loading_tokenizers(tmp_path, tokenizer):
    file = tmp_path / "tokenizer.json"
    tokenizer.backend.enable_truncation(1)
    tokenizer.backend.enable_padding(length=9)
    tokenizer.backend.save(str(file))
    assert load_tokenizer(str(file)).tokens([Rendered("one two three")], ended=False) == ([[2, 3, 4]], [[2, 3, 4]])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PackingError, match="tokenizer: expected a tokenizer.json file, .* cannot be loaded: "):
        load_tokenizer(str(tmp_path / "broken.json"))
    with pytest.raises(
        PackingError, match="tokenizer: expected a name on the hub, .*'nobody/nothing' cannot be loaded"
    ):
        load_tokenizer("nobody/nothing")


def test_a_folder_with_a_tokenizer_brings_its_template(tmp_path, tokenizer):
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token="<end>", unk_token="[UNK]")
    saved.chat_template = "{% for message in messages %}{{ message.content }} three {% endfor %}"
    saved.save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(str(tmp_path / "tokenizer"))
    assert loaded.end == 1
    file = write_lines(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "one two"}]}])
    corpus = Corpus(Documents(str(file)), loaded)
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block)[0] == [[2, 3, 4]]


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


def test_a_tokenizer_in_python():
    row = {"prompt": "ab", "completion": "c"}
    tokens = text_tokenizer(Spelled()).tokens([render(row, "prompt", CHATML, "\n")], ended=True)
    assert tokens == ([list(map(ord, "<ab\nc>"))], [[*[-100] * 4, ord("c"), ord(">")]])
    assert text_tokenizer(Spelled()).tokens([render({"text": "a"}, "text", CHATML)], ended=True)[0] == [
        list(map(ord, "<a>"))
    ]


def test_pieces_end_where_their_tokens_do(letters):
    """Of a chat that is trained on in turns."""
    turns = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ab"}] * 2
    tokenizer = text_tokenizer(letters)
    rendered = render({"messages": turns}, "messages", tokenizer.template)
    (ids,), (labels,) = tokenizer.tokens([rendered], ended=True)
    assert ids == letters.apply_chat_template(turns)["input_ids"]
    assert letters.decode([label for label in labels if label != -100]) == "ab ab "
