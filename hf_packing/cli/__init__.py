"""The command: hf-packing report, hf-packing pack and hf-packing check.

command.py    the parser, error messages, exit codes
screen.py     streams, lines, progress and JSON
given.py      flags -> documents and strategies
report.py     hf-packing report
pack.py       hf-packing pack: documents -> a packed dataset on disk, resumable
check.py      hf-packing check: whether a model isolates packed documents
"""

from hf_packing.cli.command import main

__all__ = ["main"]
