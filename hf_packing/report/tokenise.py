"""Texts -> tokens, with whatever tokenizer the user names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.report.documents import one_line
from hf_packing.report.rendering import BadRowError, Rendered, Settings, Template, chatml


@dataclass(frozen=True)
class TextTokenizer:
    """What the commands need of a tokenizer."""

    name: str
    backend: Tokenizer
    template: Template = chatml
    template_text: str = "ChatML"
    """What the template is, and the special tokens it may write, to tell templates apart."""
    end: int | None = None
    """The token that ends a document, where the tokenizer has one; a chat template ends its own."""

    def lengths(self, rendered: Sequence[Rendered], ended: bool) -> IntArray:
        """int64 [documents], tokens; ended: whether each gets a token at its end."""
        pairs = zip(rendered, self.encode(rendered, self.backend.encode_batch_fast), strict=True)
        lengths = [len(encoding) + len(self.end_of(each, encoding.ids, ended)) for each, encoding in pairs]
        return np.array(lengths, dtype=np.int64)

    def tokens(self, rendered: Sequence[Rendered], ended: bool) -> tuple[list[list[int]], list[list[int]]]:
        """input_ids and labels of documents; labels are -100 within prompts, which end where TRL has them end."""
        encode = self.backend.encode_batch_fast
        asked = [each for each in rendered if each.prompt]
        prompts = iter(self.encode([each._replace(text=each.text[: each.prompt]) for each in asked], encode))
        input_ids, labels = [], []
        for each, encoding in zip(rendered, self.encode(rendered, encode), strict=True):
            ids, end = encoding.ids, self.end_of(each, encoding.ids, ended)
            masked = shared(ids, before_end(next(prompts))) if each.prompt else 0
            input_ids.append([*ids, *end])
            labels.append([*[IGNORED_LABEL] * masked, *ids[masked:], *end])
        return input_ids, labels

    def encode(self, rendered: Sequence[Rendered], encode_batch: Callable[..., list[Encoding]]) -> list[Encoding]:
        """With the tokens that the tokenizer puts around a text; a chat template has written its own."""
        encodings: list[Encoding] = []
        for complete, group in groupby(rendered, key=lambda each: each.complete):
            encodings += encode_batch([each.text for each in group], add_special_tokens=not complete)
        return encodings

    def end_of(self, document: Rendered, ids: Sequence[int], ended: bool) -> list[int]:
        """The token that is put at its end, unless it is there."""
        there = document.complete or self.end is None or (ids and ids[-1] == self.end)
        return [] if there or not ended or self.end is None else [self.end]


def before_end(prompt: Encoding) -> list[int]:
    """Its tokens without those that the tokenizer puts after a text."""
    special = np.array(prompt.special_tokens_mask, dtype=bool)
    within = np.flatnonzero(~special)
    return prompt.ids[: within[-1] + 1] if len(within) else prompt.ids


def shared(ids: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens both begin with. Offsets do not tell: they drift where a tokenizer leaves out a character."""
    pairs = zip(ids, prompt, strict=False)
    return next((number for number, (token, other) in enumerate(pairs) if token != other), min(len(ids), len(prompt)))


def load_tokenizer(name: str, trust_remote_code: bool = False) -> TextTokenizer:
    """A tokenizer by its name on the hub, a folder, or a tokenizer.json file.

    Args:
        name: of one of these.
        trust_remote_code: whether code that comes with the tokenizer is run; without, such a one is refused.

    Raises:
        PackingError: there is none, or it cannot be loaded without a network.
    """
    path = Path(name)
    if path.is_file():
        try:
            return TextTokenizer(name, without_limits(Tokenizer.from_file(str(path))))
        except Exception as error:  # tokenizers raises bare exceptions
            raise PackingError(f"--tokenizer: expected a tokenizer.json, {name!r} is none: {one_line(error)}") from None
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # of the hub, of the network, of files
        raise PackingError(
            f"--tokenizer: expected a name on the hub, a folder or a tokenizer.json, {name!r} cannot be loaded here: "
            f"{one_line(error)}"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise PackingError(f"--tokenizer: expected a fast tokenizer, {name!r} is a {type(loaded).__name__}")
    template = template_of(loaded) if loaded.chat_template else chatml
    written_with = f"{loaded.chat_template} {loaded.special_tokens_map}"
    return TextTokenizer(name, without_limits(backend), template, written_with, loaded.eos_token_id)


def template_of(tokenizer: Any) -> Template:
    def render(messages: Sequence[Any], ask: bool, settings: Settings) -> str:
        usual = {"tokenize": False, "add_generation_prompt": ask}
        try:
            return str(tokenizer.apply_chat_template(list(messages), **{**settings, **usual}))
        except Exception as error:  # templates raise what they like
            raise BadRowError(f"expected messages that the chat template takes, {one_line(error)}") from None

    return render


def without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """Files may ask for padding and for cutting, which would hide how long documents are."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
