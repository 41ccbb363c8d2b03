"""Pack a corpus of many files on many machines, each row exactly once.

    files --count--> documents of each length --plan--> packs --deal--> segments by output file --gather--> rows

Each stage but the plan is a task per file, which any process can do, on any machine, at any time, again and again: all
that it needs and makes is in files under the output folder (`run`). An engine (`engines`) only chooses who does which
task. The rows of the output files in order are those of `hf_packing.pack`.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME_OF = {
    "LocalExecutor": ("engines", "LocalExecutor"),
    "PackedCorpus": ("manifest", "PackedCorpus"),
    "RayExecutor": ("engines", "RayExecutor"),
    "local": ("engines", "local"),
    "open": ("manifest", "open_packed"),
    "pack": ("pack_files", "pack_files"),
    "ray": ("engines", "ray"),
}

if TYPE_CHECKING:
    from hf_packing.fleet.engines import LocalExecutor, RayExecutor, local, ray
    from hf_packing.fleet.manifest import PackedCorpus
    from hf_packing.fleet.manifest import open_packed as open  # noqa: A004
    from hf_packing.fleet.pack_files import pack_files as pack

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
