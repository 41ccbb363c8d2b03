"""The command line tool hf-packing, with the commands report, pack and check.

command.py    the parser, error messages, exit codes
screen.py     printing of lines, progress and JSON
given.py      turns command line flags into documents and strategies
report.py     hf-packing report: compares strategies on documents
pack.py       hf-packing pack: writes a packed dataset to disk; an interrupted run can be resumed
check.py      hf-packing check: checks whether a model isolates packed documents
"""

from hf_packing.cli.command import main

__all__ = ["main"]
