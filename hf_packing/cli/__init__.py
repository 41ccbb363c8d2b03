"""The command line tool hf-packing, with the commands report, pack and check.

command.py    parses the command line, prints error messages, returns exit codes
flags.py      the documents and strategies that the flags describe; prints errors, warnings and JSON
report.py     hf-packing report: compares strategies on documents
pack.py       hf-packing pack: writes a packed dataset, or packs many files by many processes
check.py      hf-packing check: checks whether a model isolates packed documents
"""

from hf_packing.cli.command import main

__all__ = ["main"]
