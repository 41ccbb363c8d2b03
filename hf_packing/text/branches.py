"""Turn conversations into one document for each assistant turn, as the model sees the turn at inference."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.text.render import (
    LACKS_TEXT,
    BadRowError,
    Fields,
    chat_of,
    check_begins_with,
    lacks_text,
    settings_of,
    weight_of,
)
from hf_packing.text.tokenize import Ids, TextTokenizer, Tokens, rows_of_batch, usable, warn_of
from hf_packing.versioned import versioned

_Turn = tuple[Ids, Ids, list[str]]


@versioned
def branches(
    conversations: Any,
    tokenizer: Any,
    *,
    text_field: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> Tokens:
    """Make one document for each assistant turn of conversations, trained on that turn only.

    A document begins with the tokens that the model is given when it is asked for the turn: the earlier messages as the
    chat template writes them, and the generation prompt. Their labels are -100. Then come the tokens that the model
    generates, up to the end token of the turn.

    Pass the function to `map`, as in `dataset.map(hfp.branches, batched=True, fn_kwargs={"tokenizer": tokenizer},
    remove_columns=dataset.column_names)`.

    Args:
        conversations: one conversation, a list of messages; or a batch that `map` passes, a mapping from column names
            to lists. Of `prompt` and `completion`, only assistant turns of the completion make documents. The columns
            `tools` and `chat_template_kwargs` are passed to the chat template, as in TRL.
        tokenizer: a tokenizer of transformers with a chat template.
        text_field: name of the column with the conversations; None for the first that a row has of `prompt` and
            `completion`, `messages`, and `conversations`.
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
    if not (hasattr(tokenizer, "all_special_tokens") and tokenizer.chat_template):
        raise PackingError(
            f"tokenizer: expected a tokenizer with a chat template, got {type(tokenizer).__name__}; set "
            "tokenizer.chat_template, or pass the tokenizer of a processor"
        )
    texts = TextTokenizer(tokenizer, text_field=text_field)
    if not isinstance(conversations, Mapping):
        conversations = {text_field or "messages": [conversations]}
    rows = rows_of_batch(conversations)
    of_rows, reasons = Counter[str](), list[str]()
    turns_of = partial(_turns_of, texts, chat_template_kwargs or {}, of_rows)
    turns = [*chain(*usable(rows, turns_of, reasons.append if skip_bad else None))]
    if reasons:
        of_rows[f"cannot be used and are left out, the first because of {reasons[0]}"] = len(reasons)
    warn_of(of_rows, "branches", f"{len(rows):,} conversations")
    of_turns = Counter(remark for *_, remarks in turns for remark in remarks)
    warn_of(of_turns, "branches", f"{len(turns):,} assistant turns")
    return {INPUT_IDS: [ids for ids, *_ in turns], LABELS: [labels for _, labels, _ in turns]}


def _turns_of(texts: TextTokenizer, settings: Fields, remarks: Counter[str], row: Fields) -> list[_Turn]:
    """Return the assistant turns of a row, and add to the remarks on rows."""
    _, before, after = texts.parts_of(row)
    messages, _, turns = chat_of(before, after)
    turn_of = partial(_turn_of, texts, {**settings, **settings_of(row)})
    chats = [(f"message {turn}", messages[: turn + 1]) for turn in turns if turn and weight_of(messages[turn])]
    found = [*usable(chats, turn_of)]
    remarks["open with an assistant turn, which is not trained on"] += 0 in turns
    remarks["have no later assistant turn to train on, and make no documents"] += not found
    return found


def _turn_of(texts: TextTokenizer, settings: Fields, messages: Sequence[Fields]) -> _Turn:
    """Return the last of some messages as a document: its input_ids, its labels, and what users should know of it.

    Raises:
        BadRowError: the turn does not begin with its generation prompt, or has no text; or tokens cannot end where the
            prompt ends.
    """
    before, _ = texts.write(messages[:-1], settings, ask=True)
    whole_text, _ = texts.write(messages, settings)
    check_begins_with(whole_text, before, len(messages) - 1)
    text = whole_text.removeprefix(before)
    if not text:
        raise BadRowError("expected a turn with text, but the chat template writes none for it")
    remarks = [LACKS_TEXT] * lacks_text(messages[-1], text)
    if text.rstrip().endswith(texts.special_tokens):
        text = text.rstrip()  # the model stops at the end token; a line break after it is the template's
    else:
        remarks.append("do not end with a special token, so the model does not learn where to stop")
    prompt, generated, whole = texts.encode([before, text, before + text])[INPUT_IDS]
    if whole[: len(prompt)] == prompt:
        generated = whole[len(prompt) :]
    else:  # a token spans the end of the prompt, which cannot happen at inference
        apart, together = texts.tokenizer.batch_decode([prompt + generated, whole], clean_up_tokenization_spaces=False)
        if apart != together:
            raise BadRowError(
                "expected a tokenizer that can tokenize a turn apart from its prompt, but "
                f"{before[-20:]!r} and {text[:20]!r} become other text"
            )
    return prompt + generated, [IGNORED_LABEL] * len(prompt) + generated, remarks
