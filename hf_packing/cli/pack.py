"""`hf-packing pack`: write documents to disk as a packed dataset."""

import argparse
from pathlib import Path

from hf_packing.cli.flags import documents_of, print_skipped, strategy_named
from hf_packing.cli.fleet import is_fleet, run_fleet
from hf_packing.cli.screen import out, print_json, say
from hf_packing.errors import PackingError
from hf_packing.files import put_in_place
from hf_packing.rows.cache import StoredRows
from hf_packing.rows.pack import pack
from hf_packing.rows.token_columns import is_token_type
from hf_packing.strategies.compare import name_of

_PLAN = "plan"


def run(given: argparse.Namespace) -> int:
    """Read, tokenize and pack documents, and save the rows with their plan. The output appears whole or not at all.

    Args:
        given: the parsed command line flags.

    Returns:
        The exit code, 0.
    """
    if is_fleet(given):
        run_fleet(given)
        return 0
    given.data, given.output = given.data[0], Path(given.output)
    strategy = strategy_named(given.strategy, given.max_length)
    output = given.output.resolve()  # a folder cannot be renamed onto a link
    _check_output(output, given.overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    with documents_of(given, beside=output) as read:
        packed = pack(read.tokens, strategy, share_prefixes=given.share_prefixes)
        origin = StoredRows(Path(packed.cache_files[0]["filename"]).parent).load()
        if not origin.plan.num_packs:
            raise PackingError(f"data: expected documents with tokens, got none in {given.data!r}")
        packed.save_to_disk(read.folder / "packed")
        origin.plan.save(read.folder / "packed" / _PLAN)
        _check_output(output, given.overwrite)  # another run may have made the output meanwhile
        put_in_place(read.folder / "packed", output)
    if given.json:
        schema = read.tokens.features.arrow_schema
        facts = {
            "output": str(given.output),
            "strategy": name_of(strategy),
            "rows": len(packed),
            "trained_tokens": origin.facts["trained_tokens"],
            "skipped": read.skipped,
            "loss_masks": origin.facts["loss_masks"],
            "left_out": [field.name for field in schema if not is_token_type(field.type)],
        }
        print_json(facts | vars(origin.plan.metrics()))
        return 0
    say(out, str(origin.plan))
    say(out, f"{origin.facts['trained_tokens']:,} of {origin.plan.metrics().num_tokens:,} tokens are trained on")
    print_skipped(read.skipped)
    say(out, f"written: {given.output}, with the packing plan in {given.output / _PLAN}")
    return 0


def _check_output(output: Path, overwrite: bool) -> None:
    """Raise PackingError unless the output is new, or a saved dataset that may be overwritten."""
    if output.exists() and not overwrite:
        raise PackingError(
            f"--output: expected a folder that does not exist, but {str(output)!r} exists; --overwrite replaces a "
            "saved dataset"
        )
    if output.exists() and not (output / "dataset_info.json").is_file():
        raise PackingError(f"--overwrite: expected a saved dataset to replace, but {str(output)!r} is not one")
