"""`fleet.pack`: check the arguments, begin the run or go on with it, and drive it to its end."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.fleet.drive import drive
from hf_packing.fleet.engines import Executor, local
from hf_packing.fleet.inputs import find_inputs, has_tokens
from hf_packing.fleet.manifest import MANIFEST, PackedCorpus
from hf_packing.fleet.run import Run, Texts, claim_run, settings_of, write_names
from hf_packing.fleet.store import Store
from hf_packing.fleet.tokenizer import save_tokenizer
from hf_packing.strategies.base import Strategy, check_counting
from hf_packing.trees.forest import check_fewest_shared


def pack_files(
    files: str | Path | Sequence[str | Path],
    strategy: Strategy,
    output: str | Path,
    *,
    shards: int | None = None,
    executor: Executor | None = None,
    exchange: bool = True,
    position_ids: bool = True,
    share_prefixes: bool | int = False,
    tokenizer: Any = None,
    text_field: str | None = None,
    end_documents: bool = True,
    separator: str | None = None,
    train_on: str | None = None,
    skip_bad: bool = False,
    trust_remote_code: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> PackedCorpus:
    """Pack many files with one plan, by processes of one or many machines. Each row is written exactly once.

    The rows of the output files, in order, are the rows that `hf_packing.pack` makes of all files. Workers, nodes and
    the driver may die at any time: the same call goes on with what is missing.

    Args:
        files: parquet or Arrow files with `input_ids` and other token columns; or, with a tokenizer, files of texts,
            prompts or chats as for `hf-packing pack`. A list in its order, or a folder or a pattern such as
            "s3://bucket/*.parquet", whose files are sorted by name.
        strategy: a strategy that needs only counts of lengths, such as BestFit(4096).
        output: folder for the packed rows, local or a URL of fsspec. All workers must reach it.
        shards: number of output files; None to have one for about 33 million tokens.
        executor: `hf_packing.fleet.local(workers)` or `hf_packing.fleet.ray(address)`; None for local processes, one
            per core.
        exchange: whether documents of different files may share a pack. With False, each file is packed by itself into
            one output file, and the result says how many more packs there are.
        position_ids: whether packed rows get a column `position_ids`. Rows of trees never get one.
        share_prefixes: True if documents of the same file that begin with the same tokens share these tokens in a row,
            so that a model computes them once; or the fewest tokens to share, 16 for True. Rows are trees, as those of
            `hf_packing.pack`. The trees of all files are packed with one plan; with exchange=False, the rows of a file
            are those that `pack` makes of it. The result says how many tokens files share with each other.
        tokenizer: a name on the hub, a folder, a tokenizer.json file, or a fast tokenizer of transformers; None if the
            rows of the files have input_ids.
        text_field: name of the field with the text; None to use the first of text, prompt and messages that a row has.
        end_documents: whether to append the end-of-sequence token to texts.
        separator: the text between a prompt and a completion; None for no text.
        train_on: "assistant", "completion" or "all", as for `tokenize`.
        skip_bad: whether to leave out, and count, rows that cannot be read or used; False to raise an error.
        trust_remote_code: whether to run code that comes with the tokenizer.
        storage_options: arguments for file systems that are not local, such as {"endpoint_url": ...}.

    Returns:
        PackedCorpus: the output files and the metrics of the plan. Warnings say what was left out, dropped, skipped or
        applied.

    Raises:
        PackingError: an argument is wrong, a file cannot be packed or has changed since its documents were counted,
            or another run has begun in the output folder.
    """
    store, strategy = (
        Store(str(output), dict(storage_options or {})),
        check_counting(strategy, "the order of the documents of all files"),
    )
    inputs = find_inputs(files, store.options)
    if shards is not None:
        check_whole_number("shards", shards)
        if not exchange:
            raise PackingError(
                f"shards: expected None with exchange=False, which packs each file by itself, got {shards}"
            )
    run = begin_run(
        inputs,
        strategy,
        store,
        shards=shards,
        exchange=exchange,
        position_ids=position_ids,
        share_prefixes=share_prefixes,
        tokenizer=tokenizer,
        text_field=text_field,
        end_documents=end_documents,
        separator=separator,
        train_on=train_on,
        skip_bad=skip_bad,
        trust_remote_code=trust_remote_code,
    )
    packed = drive(run, local() if executor is None else executor)
    for change in packed.changes():
        warnings.warn(f"pack {change}", stacklevel=2)
    return packed


def begin_run(
    inputs: Sequence[str],
    strategy: Strategy,
    store: Store,
    *,
    shards: int | None,
    exchange: bool,
    position_ids: bool,
    share_prefixes: bool | int,
    tokenizer: Any,
    text_field: str | None,
    end_documents: bool,
    separator: str | None,
    train_on: str | None,
    skip_bad: bool,
    trust_remote_code: bool,
) -> Run:
    """Begin a run, or go on with it. The arguments are those of `pack_files`."""
    fewest_shared = check_fewest_shared(share_prefixes)
    if fewest_shared is not None:
        strategy.tree_limits()
    texts = None
    if tokenizer is not None or not all(map(has_tokens, inputs)):
        texts = Texts(
            tokenizer="" if tokenizer is None else save_tokenizer(store, tokenizer, trust_remote_code),
            text_field=text_field,
            end_documents=end_documents,
            separator=separator,
            train_on=train_on,
            skip_bad=skip_bad,
        )
    settings = settings_of(
        strategy,
        shards=shards,
        exchange=exchange,
        position_ids=position_ids,
        share_prefixes=fewest_shared,
        texts=texts,
    )
    run = claim_run(store, inputs, settings)
    if not store.exists(MANIFEST):
        write_names(run, inputs)
    return run
