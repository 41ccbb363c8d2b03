"""`hf-packing pack` with many files, which are packed by many processes, or one task at a time in array jobs."""

import argparse
import warnings

from hf_packing.cli.flags import strategy_named
from hf_packing.cli.screen import out, print_json, say
from hf_packing.errors import PackingError
from hf_packing.fleet import PackedCorpus, pack


def is_fleet(given: argparse.Namespace) -> bool:
    """Return whether a flag for many files is given.

    Raises:
        PackingError: a flag has no effect.
    """
    if fleet := any((given.workers, given.ray, given.task)):
        for flag in ("split", "glob", "overwrite"):
            if getattr(given, flag):
                raise PackingError(f"--{flag}: expected no --{flag} with --workers, --ray or --task")
    elif len(given.data) > 1:
        raise PackingError("DATA: expected one file, folder or dataset, or --workers, --ray or --task with several")
    return fleet


def run_fleet(given: argparse.Namespace) -> None:
    """Pack the files of `hf-packing pack`, and print what was packed."""
    task, tasks = given.task or (None, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pack ", UserWarning)  # they are printed below
        packed = pack(
            given.data,
            strategy_named(given.strategy, given.max_length),
            str(given.output),
            tokenizer=given.tokenizer,
            executor="ray" if given.ray else None,
            workers=given.workers,
            tasks=tasks,
            task=task,
            share_prefixes=given.share_prefixes,
            text_field=given.field,
            end_documents=not given.no_eos,
            separator=given.separator,
            train_on=given.train_on,
            skip_bad=given.skip_bad,
            trust_remote_code=given.trust_remote_code,
        )
    say_packed(packed, given.json)


def say_packed(packed: PackedCorpus, as_json: bool) -> None:
    """Print what was packed: as text, or as JSON."""
    if as_json:
        facts = {"rows": packed.num_rows, "strategy": packed.strategy, "changes": packed.changes()}
        print_json(facts | packed.counts | {"data_files": packed.data_files})
        return
    say(out, str(packed))
    say(out, f"written: {packed.folder.url}")
