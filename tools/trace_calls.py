"""Count the files and functions of hf_packing that a call enters, and that a reader of the code has to follow.

    python -m tools.trace_calls                     # every call
    python -m tools.trace_calls pack attach --list  # with the files, in the order in which they are entered

Each call runs in a new process, right after all imports. Module and class bodies are not counted.
"""

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

import hf_packing as hfp

PACKAGE = Path(hfp.__file__).parent

Entered = dict[str, list[str]]
"""Names of functions by file. Files and functions are in the order in which they are first entered."""


class Tracer:
    """Records the functions of the package that are entered while it is active, in all threads."""

    def __init__(self) -> None:
        self.entered: Entered = {}
        self._seen: set[CodeType] = set()

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG002
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        path = Path(code.co_filename)
        if not code.co_flags & inspect.CO_OPTIMIZED or PACKAGE not in path.parents:  # module bodies lack this flag
            return
        functions = self.entered.setdefault(path.relative_to(PACKAGE).as_posix(), [])
        if not code.co_name.endswith(("comp>", "genexpr>")):  # comprehensions are part of a function
            functions.append(code.co_qualname.replace("<locals>.", ""))

    @contextmanager
    def active(self) -> Iterator[None]:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def trace(call: Callable[[], object]) -> Entered:
    """Run a call; return the files and functions that the call entered."""
    tracer = Tracer()
    with tracer.active():
        call()
    return tracer.entered


def _documents() -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({"input_ids": [list(range(1, length)) for length in (9, 4, 12, 6, 3, 8)]})


def _tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))


def _plan_packing(folder: Path) -> Callable[[], object]:  # noqa: ARG001
    plan_packing, strategy = hfp.plan_packing, hfp.BestFit(16)
    return lambda: plan_packing([9, 4, 12, 6, 3, 8], strategy)


def _pack(folder: Path) -> Callable[[], object]:  # noqa: ARG001
    pack, documents, strategy = hfp.pack, _documents(), hfp.BestFit(16)
    return lambda: pack(documents, strategy)


def _patch_model(folder: Path) -> Callable[[], object]:  # noqa: ARG001
    patch_model, model = hfp.patch_model, _tiny_llama()
    return lambda: patch_model(model)


def _attach(folder: Path) -> Callable[[], object]:
    import transformers

    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to="none")
    trainer = transformers.Trainer(_tiny_llama(), arguments, train_dataset=_documents())
    attach, batching = hfp.attach, hfp.TokenBudget(32)
    return lambda: attach(trainer, batching)


def _patched_forward(folder: Path) -> Callable[[], object]:  # noqa: ARG001
    model = hfp.patch_model(_tiny_llama())
    batch = hfp.PackingCollator()([{"input_ids": list(range(1, length))} for length in (9, 4, 12)])
    return lambda: model(**batch)


PREPARE: dict[str, Callable[[Path], Callable[[], object]]] = {
    "plan_packing": _plan_packing,
    "pack": _pack,
    "patch_model": _patch_model,
    "attach": _attach,
    "patched forward": _patched_forward,
}
"""For the name of each call: a function that prepares the call in a temporary folder and returns the call."""


def trace_here(name: str) -> Entered:
    """Trace one call in this process."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if name in ("pack", "attach"):
            import datasets

            datasets.config.HF_DATASETS_CACHE = Path(folder)
        return trace(PREPARE[name](Path(folder)))


def trace_in_own_process(name: str) -> Entered:
    """Trace one call as the first one in a new process."""
    code = f"import json, tools.trace_calls as t; print(json.dumps(t.trace_here({name!r})))"
    root = PACKAGE.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"tracing {name} failed:\n{done.stderr}")
    entered: Entered = json.loads(done.stdout.splitlines()[-1])
    return entered


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("calls", nargs="*", metavar="CALL", help=f"some of {', '.join(PREPARE)}; default: all")
    parser.add_argument("--list", action="store_true", help="print the files and functions that each call enters")
    given = parser.parse_args(arguments)
    if unknown := set(given.calls) - set(PREPARE):
        parser.error(f"CALL: expected names from {', '.join(PREPARE)}, got {', '.join(sorted(unknown))}")
    console = Console()
    table = Table("call", "files", "functions", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in given.calls or PREPARE:
        entered = trace_in_own_process(name)
        table.add_row(name, str(len(entered)), str(sum(map(len, entered.values()))))
        if given.list:
            console.print(f"{name}: {len(entered)} files", style="bold")
            for file, functions in entered.items():
                console.print(f"  {file}: {', '.join(functions)}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


if __name__ == "__main__":
    main()
