"""Make documents and packing strategies from command line flags."""

import argparse
from collections.abc import Sequence
from typing import Any

from hf_packing.cli.screen import out, say, say_warning
from hf_packing.errors import PackingError
from hf_packing.strategies.base import Strategy, plan_packing, registered_strategies
from hf_packing.text.corpus import Corpus
from hf_packing.text.documents import Documents
from hf_packing.text.text_tokenizer import load_tokenizer
from hf_packing.trees.forest import check_fewest_shared

STRATEGIES = tuple(registered_strategies())


def corpus_of(given: argparse.Namespace) -> Corpus:
    """Return the documents that the command line flags describe. If the flags name a tokenizer, it is loaded."""
    documents = Documents(given.data, given.split, given.glob, given.skip_bad)
    tokenizer = load_tokenizer(given.tokenizer, given.trust_remote_code) if given.tokenizer else None
    return Corpus(documents, tokenizer, given.field, not given.no_eos, given.separator, given.train_on)


def check_that_it_plans(strategy: Strategy) -> None:
    """Pack one document of one token, to check that all packages for the strategy are installed.

    Raises:
        MissingDependencyError: a package that the strategy needs is not installed.
    """
    plan_packing([1], strategy)


def fewest_shared_of(given: argparse.Namespace, strategy: Strategy) -> int | None:
    """Return the fewest tokens that documents share; None without --share-prefixes.

    Raises:
        PackingError: the strategy cannot pack documents that share prefixes.
    """
    fewest = check_fewest_shared(given.share_prefixes)
    try:
        if fewest is not None:
            strategy.tree_limits()
    except PackingError as error:
        raise PackingError(f"--share-prefixes: {error}") from None
    return fewest


def warn_of_texts(corpus: Corpus) -> None:
    """Print warnings if documents get no end-of-sequence token, or if chats lack text that their messages have."""
    if corpus.should_end and not corpus.ends and corpus.tokenizer is not None:
        say_warning(f"{corpus.tokenizer.name} has no end-of-sequence token, so no such token is appended to documents")
    if corpus.lacking:
        left_out = "content, thinking or tool calls, which the chat template leaves out"
        say_warning(f"{corpus.lacking:,} chats lack {left_out}")


def print_skipped(skipped: Sequence[str]) -> None:
    """Print the number of rows or files that were left out, and the reason for the first one."""
    if skipped:
        say(out, f"rows or files left out: {len(skipped):,}; the first one: {skipped[0]}")


def strategies_named(names: Sequence[str], max_lengths: Sequence[int]) -> list[Strategy]:
    """Return one strategy for each name and each maximum row length.

    A strategy with buckets is returned only once for each name, with all lengths.
    """
    strategies: list[Strategy] = []
    for name in dict.fromkeys(names):
        strategy: Any = _strategy_class(name)
        lengths = sorted(set(max_lengths))
        strategies += [strategy(lengths)] if strategy.has_buckets else [strategy(length) for length in lengths]
    return strategies


def strategy_named(name: str, max_lengths: Sequence[int]) -> Strategy:
    """Return the strategy with this name and one maximum row length, or several if the strategy has buckets.

    Raises:
        PackingError: no strategy has this name, or a strategy without buckets is given several lengths.
    """
    if not _strategy_class(name).has_buckets and len(set(max_lengths)) > 1:
        raise PackingError(
            f"--max-length: expected a single number with {name}, got {', '.join(map(str, max_lengths))}"
        )
    return strategies_named([name], max_lengths)[0]


def _strategy_class(name: str) -> type[Any]:
    if name not in STRATEGIES:
        raise PackingError(f"--strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    return registered_strategies()[name]
