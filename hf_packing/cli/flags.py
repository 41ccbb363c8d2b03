"""The flags that several commands of `hf-packing` have."""

import argparse

from hf_packing.text.rendering import TRAIN_ON


def add_documents(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add the flags that say which documents to read."""
    command.add_argument(
        "data",
        nargs=nargs,
        metavar="DATA",
        help="a JSONL, parquet, CSV or text file, a folder of files, a saved dataset, or a dataset's name on the hub",
    )
    command.add_argument("--split", help="split of a dataset to read (default: train)")
    command.add_argument("--glob", metavar="PATTERN", help="files of a folder to read, such as '*.py' (default: all)")
    add_texts(command)


def add_texts(command: argparse.ArgumentParser) -> None:
    """Add the flags that say how rows become tokens."""
    command.add_argument(
        "--tokenizer",
        metavar="T",
        help="tokenizer: a name on the hub, a folder, or a tokenizer.json file; needed unless rows have input_ids",
    )
    command.add_argument(
        "--field", help="field with the text (default: the first found of text, prompt and completion, messages)"
    )
    command.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out rows that cannot be read, and count these rows (default: stop at the first such row)",
    )
    command.add_argument(
        "--no-eos",
        action="store_true",
        help="append no end-of-sequence token to texts (default: append an end-of-sequence token)",
    )
    command.add_argument("--separator", metavar="TEXT", help="text between a prompt and its completion (default: none)")
    command.add_argument(
        "--train-on",
        choices=TRAIN_ON,
        help="tokens to train on (default: the assistant's turns of messages, completions, and whole texts)",
    )
    add_usual(command)


def add_max_length(command: argparse.ArgumentParser, default: list[int], meaning: str) -> None:
    """Add the flag for the length of rows."""
    shown = " ".join(map(str, default))
    command.add_argument(
        "--max-length", type=positive, metavar="N", nargs="+", default=default, help=f"{meaning} (default: {shown})"
    )


def add_share_prefixes(command: argparse.ArgumentParser) -> None:
    """Add the flag that packs documents as trees."""
    command.add_argument(
        "--share-prefixes",
        type=positive,
        metavar="N",
        nargs="?",
        const=True,
        default=False,
        help="pack documents that begin with the same N tokens as trees (default of N: 16)",
    )


def add_usual(command: argparse.ArgumentParser) -> None:
    """Add the flags of all commands."""
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with a tokenizer or a model (default: refuse such code)",
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def positive(text: str) -> int:
    """Return a text as an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)
