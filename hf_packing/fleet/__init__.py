"""Pack a corpus of many files on many machines, each row exactly once.

    files --count--> documents of each length --plan--> packs --deal--> segments by output file --gather--> rows

All stages but the plan are tasks, one for each file, which any process can do, on any machine, at any time, again and
again: all that a task needs and makes is in files under the output folder. An engine only chooses who does which task.
The rows of the output files in order are those of `hf_packing.pack`.

store.py       files by name in the output folder, local or in an object store; each whole or not there
parts.py       files of numbered parts with checksums, of which a task reads one
inputs.py      finds the files to pack, tells whether they have changed, and reads tables
tokenizer.py   keeps the tokenizer of a run in its store
run.py         Run: what is packed, how, and the names of all files of a run
trees.py       the trees of a file, whose documents share prefixes
shared_between.py an estimate of the tokens that files share with each other
count.py       the first stage, which also tokenizes
plan.py        the plan, made of all counts
tree_parts.py  the trees of a file by output file, and the rows that they are joined to
deal.py        the segments of one file, by output file
gather.py      the rows of one output file
tasks.py       a task, and what is done already
engines.py     fleet.local and fleet.ray, which make engines
local_processes.py the engine of processes of this machine
worker.py      such a process
ray_tasks.py   the engine of a Ray cluster
in_order.py    calls a function in threads, for many files
manifest.py    PackedCorpus: what the manifest says; fleet.open
progress.py    shows how many tasks are done
drive.py       the driver, from the first stage to the manifest
pack_files.py  fleet.pack
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME_OF = {
    "LocalExecutor": ("local_processes", "LocalExecutor"),
    "PackedCorpus": ("manifest", "PackedCorpus"),
    "RayExecutor": ("ray_tasks", "RayExecutor"),
    "local": ("engines", "local"),
    "open": ("manifest", "open_packed"),
    "pack": ("pack_files", "pack_files"),
    "ray": ("engines", "ray"),
}

if TYPE_CHECKING:
    from hf_packing.fleet.engines import local, ray
    from hf_packing.fleet.local_processes import LocalExecutor
    from hf_packing.fleet.manifest import PackedCorpus
    from hf_packing.fleet.manifest import open_packed as open  # noqa: A004
    from hf_packing.fleet.pack_files import pack_files as pack
    from hf_packing.fleet.ray_tasks import RayExecutor

__all__ = ["LocalExecutor", "PackedCorpus", "RayExecutor", "local", "open", "pack", "ray"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hf_packing.fleet' has no attribute {name!r}")
    module, inner = _HOME_OF[name]
    value = getattr(importlib.import_module(f"hf_packing.fleet.{module}"), inner)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
