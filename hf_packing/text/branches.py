"""Turn conversations into one document for each assistant turn, as the model sees the turn at inference."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_packing.checks import check_type
from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS, rows_of
from hf_packing.errors import PackingError
from hf_packing.text.render import BadRowError, Message, Settings, lacks_text, messages_of, settings_of
from hf_packing.text.tokenize import TextTokenizer, num_shared, text_tokenizer

_PROMPT, _COMPLETION, _ASSISTANT = "prompt", "completion", "assistant"
_SHOWN = 20
"""Number of characters that an error shows of two texts before they differ; it shows twice as many after that."""


def branches(
    conversations: Any,
    tokenizer: Any,
    *,
    column: str = "messages",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> dict[str, list[list[int]]]:
    """Make one document for each assistant turn of conversations, trained on that turn only.

    A document begins with the tokens that the model is given when it is asked for the turn: the earlier messages as the
    chat template writes them, and the generation prompt. Their labels are -100. Then come the tokens that the model
    generates, up to the end token of the turn.

    Pass the function to `map`, as in `dataset.map(hfp.branches, batched=True, fn_kwargs={"tokenizer": tokenizer},
    remove_columns=dataset.column_names)`.

    Args:
        conversations: one conversation, a list of messages; or a batch that `map` passes, a mapping from column names
            to lists. A batch has the column `column`, or the columns `prompt` and `completion` with lists of messages;
            then only assistant turns of the completion make documents. The columns `tools` and `chat_template_kwargs`
            are passed to the chat template, as in TRL.
        tokenizer: a tokenizer of transformers with a chat template.
        column: name of the column with the conversations.
        chat_template_kwargs: arguments for the chat template, such as `{"enable_thinking": False}`. The row's own
            arguments take precedence.
        skip_bad: True to leave out conversations that cannot be used, and to warn with their number and the first
            reason; False to raise an error.

    Returns:
        `input_ids` and `labels`: one list of integers [tokens] for each document, in the order of the turns.

    Raises:
        PackingError: the tokenizer has no chat template; the columns are missing; the chat template does not accept a
            conversation; or a turn, as the template writes it, does not begin with its generation prompt. Such a turn
            would be trained on in a way that the model never sees at inference.

    Warns:
        UserWarning: some conversations have no assistant turn; or some turns do not end with a special token, or lack
            text of their message, such as the thinking. The warnings give the numbers.

    Example:
        >>> import hf_packing as hfp
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> backend = Tokenizer(models.WordLevel({"user": 0, "assistant": 1, "<end>": 2, "Hi": 3, "Bye": 4}))
        >>> backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> template = (
        ...     "{% for message in messages %}{{ message.role }} {{ message.content }} <end> {% endfor %}"
        ...     "{% if add_generation_prompt %}assistant {% endif %}"
        ... )
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=template)
        >>> chat = [{"role": role, "content": text} for text in ("Hi", "Bye") for role in ("user", "assistant")]
        >>> documents = hfp.branches(chat, tokenizer)
        >>> documents["input_ids"]
        [[0, 3, 2, 1, 3, 2], [0, 3, 2, 1, 3, 2, 0, 4, 2, 1, 4, 2]]
        >>> documents["labels"][1]
        [-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, 4, 2]
    """
    if not getattr(tokenizer, "chat_template", None) or not hasattr(tokenizer, "all_special_tokens"):
        raise PackingError(
            f"tokenizer: expected a tokenizer with a chat template, got {type(tokenizer).__name__}; set "
            "tokenizer.chat_template, or pass the tokenizer of a processor"
        )
    texts = text_tokenizer(tokenizer)
    rows = _rows_of(conversations, column)
    turns: list[_Turn] = []
    bad, num_empty, num_opening = [], 0, 0
    for number, row in enumerate(rows):
        try:
            prompt = messages_of(row[_PROMPT])
            messages = [*prompt, *messages_of(row[_COMPLETION])]
            later = range(max(1, len(prompt)), len(messages))
            numbers = [each for each in later if messages[each]["role"] == _ASSISTANT]
            found = _turns_of(texts, messages, numbers, {**(chat_template_kwargs or {}), **settings_of(row)})
        except BadRowError as error:
            bad.append(f"row {number} of the batch, {error}" if isinstance(conversations, Mapping) else str(error))
            if not skip_bad:
                raise BadRowError(bad[0]) from None
            continue
        turns += found
        num_empty += not found
        num_opening += not prompt and bool(messages) and messages[0]["role"] == _ASSISTANT
    of_rows, of_turns = f"of {len(rows):,} conversations", f"of {len(turns):,} assistant turns"
    for number, text in (
        (len(bad), f"{of_rows} cannot be used and are left out, the first because of {''.join(bad[:1])}"),
        (num_empty, f"{of_rows} have no assistant turn after another message, and make no documents"),
        (num_opening, f"{of_rows} open with an assistant turn, which is not trained on"),
        (
            sum(not turn.has_end for turn in turns),
            f"{of_turns} do not end with a special token, so the model does not learn where to stop",
        ),
        (
            sum(turn.lacks_text for turn in turns),
            f"{of_turns} lack content, thinking or tool calls, which the chat template leaves out",
        ),
    ):
        if number:
            warnings.warn(f"branches: {number:,} {text}", stacklevel=2)
    return {
        INPUT_IDS: [turn.prompt + turn.generated for turn in turns],
        LABELS: [[IGNORED_LABEL] * len(turn.prompt) + turn.generated for turn in turns],
    }


class _Turn(NamedTuple):
    """An assistant turn of a conversation."""

    prompt: list[int]
    """The tokens of the earlier messages and of the generation prompt."""
    generated: list[int]
    """The tokens that the model generates."""
    has_end: bool
    """True if the generated text ends with a special token."""
    lacks_text: bool
    """True if the generated text lacks some text of the message."""


def _turns_of(
    texts: TextTokenizer, messages: Sequence[Message], numbers: Sequence[int], settings: Settings
) -> list[_Turn]:
    """Return the given messages of a conversation as turns."""
    written = [_write_turn(texts, messages, number, settings) for number in numbers]
    prompts = _encode(texts, [prompt for prompt, _ in written])
    wholes = _encode(texts, [prompt + generated for prompt, generated in written])
    turns = []
    for number, (before, text), prompt, whole in zip(numbers, written, prompts, wholes, strict=True):
        generated = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:  # a token spans the end of the prompt, which cannot happen at inference
            (generated,) = _encode(texts, [text])
            apart, together = (
                texts.renderer.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                for ids in (prompt + generated, whole)
            )
            if apart != together:
                raise BadRowError(
                    f"message {number}: expected a tokenizer that can tokenize a turn apart from its prompt, but "
                    f"{before[-_SHOWN:]!r} and {text[:_SHOWN]!r} become other text"
                )
        has_end = text.endswith(texts.renderer.special_tokens)
        turns.append(_Turn(prompt, generated, has_end, lacks_text(messages[number], text)))
    return turns


def _write_turn(texts: TextTokenizer, messages: Sequence[Message], number: int, settings: Settings) -> tuple[str, str]:
    """Return the text before an assistant turn, with the generation prompt, and the text that the model generates.

    Raises:
        BadRowError: the turn does not begin with its generation prompt.
    """
    try:
        prompt, _ = texts.renderer.write(messages[:number], settings, ask=True)
        whole, _ = texts.renderer.write(messages[: number + 1], settings)
    except BadRowError as error:
        raise BadRowError(f"message {number}: {error}") from None
    if not whole.startswith(prompt):
        same = num_shared(prompt, whole)
        shown = slice(max(0, same - _SHOWN), same + 2 * _SHOWN)
        raise BadRowError(
            f"message {number}: expected a chat template whose turns begin with their generation prompt, but the "
            f"prompt has {prompt[shown]!r} where the turn has {whole[shown]!r}. The model would be trained on text "
            "that it never sees at inference; use another template, or chat_template_kwargs such as "
            "{'enable_thinking': False}"
        )
    generated = whole[len(prompt) :]
    if not generated:
        raise BadRowError(f"message {number}: expected a turn with text, but the chat template writes none for it")
    stripped = generated.rstrip()
    # the model stops at the end token; a line break after it is the template's
    return prompt, stripped if stripped.endswith(texts.renderer.special_tokens) else generated


def _encode(texts: TextTokenizer, given: list[str]) -> list[list[int]]:
    return [each.ids for each in texts.backend.encode_batch_fast(given, add_special_tokens=False)]


def _rows_of(conversations: Any, column: str) -> list[dict[str, Any]]:
    """Return the rows of a batch, or one row for a conversation, with the messages in `prompt` and `completion`."""
    if isinstance(conversations, Sequence) and not isinstance(conversations, str):
        return [{_PROMPT: (), _COMPLETION: conversations}]
    check_type("conversations", conversations, Mapping, "a list of messages, or a batch")
    batch = dict(conversations)
    if column in batch:
        batch |= {_COMPLETION: batch[column], _PROMPT: [()] * len(batch[column])}
    if not {_PROMPT, _COMPLETION} <= batch.keys():
        raise PackingError(
            f"conversations: expected the column {column!r}, or the columns 'prompt' and 'completion', got the columns "
            f"{', '.join(conversations)}"
        )
    if isinstance(batch[_COMPLETION], str) or isinstance(next(iter(batch[_COMPLETION]), None), Mapping):
        raise PackingError("conversations: expected a batch, got a single row; call map with batched=True")
    return rows_of(batch)
