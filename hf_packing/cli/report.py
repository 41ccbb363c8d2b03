"""`hf-packing report`: compare strategies on your documents, and show the result as a table, as JSON or as a page.

Of a folder that `hf-packing pack --workers` has packed, show what its manifest says.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from hf_packing.cli.fleet import say_packed
from hf_packing.cli.given import check_that_it_plans, corpus_of, print_skipped, strategies_named, warn_of_texts
from hf_packing.cli.screen import WIDE, counting_documents, out, print_json, say
from hf_packing.fleet.manifest import MANIFEST, read_manifest
from hf_packing.report.report import PackingReport, packing_report
from hf_packing.report.tables import REPORT_COLUMNS, headline, lengths_line, prefixes_line, report_cells, setup_line
from hf_packing.strategies.compare import aligned


def run_report(given: argparse.Namespace) -> int:
    """Compare packing strategies on documents, print the report, and save it if --output is given.

    Args:
        given: the parsed command line flags.

    Returns:
        The exit code, 0.
    """
    if (packed := _packed_corpus(given.data)) is not None:
        say_packed(packed, given.json)
        return 0
    strategies = strategies_named(given.strategy, given.max_length) if given.strategy else None
    for strategy in strategies or ():
        check_that_it_plans(strategy)
    if given.output:
        from hf_packing.report.page import check_page

        check_page(given.output)
    corpus = corpus_of(given)
    first: list[list[int]] = []
    with counting_documents("Tokenizing") as seen:
        lengths = corpus.lengths(seen, first)
    warn_of_texts(corpus)
    report = packing_report(
        lengths,
        given.max_length,
        strategies=strategies,
        ranks=given.ranks,
        source=str(given.data),
        documents=first,
    )
    skipped = corpus.documents.skipped
    if not given.json:
        _print_report(report)
        say(out, f"{corpus.trained:,} of {int(lengths.sum()):,} tokens are trained on")
        print_skipped(skipped)
    written = report.save(given.output) if given.output else []
    if given.json:
        print_json(
            report.to_dict()
            | {"trained_tokens": corpus.trained, "skipped": skipped, "files": [str(file) for file in written]}
        )
        return 0
    for file in written:
        say(out, f"written: {file}")
    return 0


def _packed_corpus(data: str) -> Any:
    """Return what the manifest of a packed corpus says; None if the data are not a packed corpus."""
    return read_manifest(data) if Path(data, MANIFEST).is_file() else None


def _print_report(report: PackingReport) -> None:
    say(out, f"{report.source}: {headline(report)}")
    say(out, lengths_line(report))
    if out.width < WIDE:
        say(out, aligned([REPORT_COLUMNS, *report_cells(report)]))
    else:
        table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
        for number, column in enumerate(REPORT_COLUMNS):
            header = column.replace(" ", "\n").replace("/", "/\n")
            table.add_column(header, justify="right" if number else "left", no_wrap=True, vertical="bottom")
        for cells in report_cells(report):
            table.add_row(*cells, style="bold green" if cells[0] == report.recommendation.strategy else None)
        out.print(table)
    say(out, setup_line(report))
    say(out, f"take {report.recommendation}")
    if said := prefixes_line(report):
        say(out, said)
