"""The command line tool hf-packing, with the commands report, pack and check.

command.py    parses the command line, prints error messages, returns exit codes
screen.py     prints lines, progress and JSON
given.py      makes documents and strategies from command line flags
report.py     hf-packing report: compares strategies on documents
pack.py       hf-packing pack: writes a packed dataset to disk; an interrupted run can be resumed
check.py      hf-packing check: checks whether a model isolates packed documents
"""

from hf_packing.cli.command import main

__all__ = ["main"]
