"""The documents that a command is given: flags -> a corpus, and what is said of it."""

import argparse
from collections.abc import Sequence

from hf_packing.cli.screen import out, say, say_warning
from hf_packing.data.corpus import Corpus
from hf_packing.data.documents import Documents
from hf_packing.data.tokenize import load_tokenizer
from hf_packing.strategies.base import Strategy, plan_packing


def corpus_of(given: argparse.Namespace) -> Corpus:
    """Return the corpus that the flags name, with its tokenizer loaded."""
    documents = Documents(given.data, given.split, given.glob, given.skip_bad)
    tokenizer = load_tokenizer(given.tokenizer, given.trust_remote_code) if given.tokenizer else None
    return Corpus(documents, tokenizer, given.field, end_documents=not given.no_eos, separator=given.separator)


def check_that_it_plans(strategy: Strategy) -> None:
    """Have a strategy that needs a package say so before documents are read.

    Raises:
        MissingDependencyError: it is not installed.
    """
    plan_packing([1], strategy)


def warn_without_end(corpus: Corpus) -> None:
    """Warn that documents end without a token, where the tokenizer names none."""
    if corpus.should_end and not corpus.ends and corpus.tokenizer is not None:
        say_warning(f"{corpus.tokenizer.name} names no end-of-sequence token: documents end without one")


def print_skipped(skipped: Sequence[str]) -> None:
    """Print how much was left out."""
    if skipped:
        say(out, f"left out: {len(skipped):,}, the first: {skipped[0]}")
