"""`hf-packing report`: compare strategies on your documents, and show the result as a table, as JSON or as a page.

Of a folder that `hf-packing pack` has packed, show its plan, or what the manifest of many files says.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_packing.checks import expect
from hf_packing.cli.flags import print_json, read_documents, strategies_named
from hf_packing.cli.pack import say_packed, say_plan
from hf_packing.errors import PackingError
from hf_packing.fleet.manifest import MANIFEST, read_manifest
from hf_packing.report.render import check_page, save_page
from hf_packing.report.report import packing_report
from hf_packing.rows.cache import Origin
from hf_packing.rows.token_columns import find_token_columns


def run(given: argparse.Namespace) -> int:
    """Compare packing strategies on documents, print the report, and save it if --output is given.

    Args:
        given: the parsed command line flags.

    Returns:
        The exit code, 0.
    """
    if Path(given.data, MANIFEST).is_file() and (packed := read_manifest(given.data)):
        say_packed(packed, given.json)
        return 0
    if (origin := Origin.beside(Path(given.data))) is not None:
        planned = "for rows that are packed, whose plan is printed"
        expect(None, planned, output=given.output, strategy=given.strategy, tokenizer=given.tokenizer)
        say_plan(origin, given.json)
        return 0
    lengths = given.max_length or [2048, 4096, 8192]
    strategies = strategies_named(given.strategy, lengths) if given.strategy else None
    if given.output:
        check_page(given.output, "--output")
        if given.output.resolve() == Path(given.data).resolve():
            raise PackingError(f"--output: expected another file than DATA, got {str(given.output)!r}")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        documents, skipped = read_documents(given.data, given, folder)
        find_token_columns(documents.data.table)  # refuses what `pack` refuses
        report = packing_report(documents, lengths, strategies=strategies, ranks=given.ranks, source=given.data)
        report = replace(report, skipped=skipped)
        del documents  # Windows removes no file that is open
    if not given.json:
        print(report)
    if given.output:
        save_page(report, given.output, "--output")
    if given.json:
        print_json(report.to_dict())
    elif given.output:
        print(f"written: {given.output}")
    return 0
