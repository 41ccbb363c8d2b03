"""Pack many files by many processes, on one machine or on many.

    files --groups of about equal size--> tasks --each by itself: read, tokenize, plan, build rows--> parquet files

A task is packed as `hf_packing.pack` packs the documents of its files. Tasks share nothing but the output folder, so
any engine can do them: processes of this machine, Ray, array jobs of a scheduler.

pack_files.py  fleet.pack: divide files into tasks, do the tasks, on any engine
manifest.py    the output folder, whose files appear whole or not at all; the manifest of what belongs together
"""

from hf_packing.fleet.manifest import PackedCorpus
from hf_packing.fleet.pack_files import pack_files as pack

__all__ = ["PackedCorpus", "pack"]
