"""What the parts of gpu.py share: the device, the sizes, the file of a part, and sides that run in turn."""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GIB = 2**30
AGAIN = 75
"""The exit status of a part whose device has failed. Started again, it leaves out the side on which that happened."""

MEMORY_PER_TOKEN = GIB // 128
"""8 MiB of the card for each token of a step. On an H200, steps of a model of this size took 4.5 at most."""
MOST_TOKENS, FEWEST_TOKENS = 16_384, 1024
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Scale:
    """How large everything is: the sizes of Qwen3-0.6B on a card, and a tiny model in a dry run."""

    tokens: int
    """Most tokens of a step."""
    longest: int
    """Most tokens of a document."""
    documents: int
    rounds: int
    """Most rounds of a comparison, if there is time."""
    seconds: float
    """For the rounds of a part."""
    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936

    @classmethod
    def of(cls, is_dry: bool, seconds: float, tokens: int | None = None) -> "Scale":
        """Return the sizes for this machine, or for a dry run."""
        if is_dry:
            tiny = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": 512}
            return cls(tokens or 256, 128, 60, 2, 0, **tiny)
        tokens = tokens or tokens_for(torch.cuda.get_device_properties(0).total_memory)
        return cls(tokens, min(4096, tokens // 2), 200 * tokens // 1024, 30, seconds)

    def attention(self) -> dict[str, Any]:
        return {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim}


def tokens_for(memory: int) -> int:
    """Return how many tokens a step has on a card with so many bytes of memory, a power of 2."""
    return max(FEWEST_TOKENS, min(MOST_TOKENS, 1 << (memory // MEMORY_PER_TOKEN).bit_length() - 1))


class CannotRunError(Exception):
    """A side or a part that cannot run here. The text says why."""


class Results:
    """What a part has found, in a file that is written anew after every round.

    Args:
        file: which may be there already, of a process whose device has failed.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def save(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.found, default=float))
        os.replace(new, self.file)

    def comparison(self, title: str, **about: Any) -> dict[str, Any]:
        """Return the entry of a comparison, with those of its sides."""
        found: dict[str, Any] = self.found.setdefault("comparisons", {}).setdefault(title, {"sides": {}, **about})
        return found


class Side(NamedTuple):
    """One side of a comparison."""

    step: Callable[[], int]
    """Runs once, and returns the number of tokens of documents that it took."""
    facts: Callable[[], dict[str, Any]] = dict
    """Returns what else is to be kept of the side, after its first step."""


def compare(results: Results, scale: Scale, title: str, makers: dict[str, Callable[[], Side]], **about: Any) -> None:
    """Time sides in turn, until the time is up or there were enough rounds.

    A side that raises is left out from then on, and the reason is kept.

    Args:
        results: of the part, which get the comparison.
        scale: with the time for it.
        title: of the comparison.
        makers: make the sides, by their names. They raise CannotRunError if a side cannot run on this machine.
        about: what is to be kept of the comparison besides.
    """
    found = results.comparison(title, **about)
    if found.get("is_done"):
        return
    sides: dict[str, Side] = {}
    for name, make in makers.items():
        entry = found["sides"].setdefault(name, {})
        if "not_run" not in entry:
            with left_out_if_it_fails(results, entry):
                sides[name] = begun(make, entry)
            free()
        print(f"{title}, {name}: {entry.get('not_run', 'runs')}", flush=True)
        results.save()
    deadline = time.monotonic() + scale.seconds
    for number in range(scale.rounds):
        if number >= FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        for name in [*sides]:
            entry = found["sides"][name]
            with left_out_if_it_fails(results, entry):
                time_once(sides[name], entry)
            if "not_run" in entry:
                del sides[name]
                free()
        results.save()
    for name in sides:
        entry = found["sides"][name]
        speed = sum(entry["tokens"]) / sum(entry["seconds"])
        print(f"{title}, {name}: {speed:,.0f} tokens/s in {len(entry['seconds'])} rounds", flush=True)
    found["is_done"] = True
    results.save()


def begun(make: Callable[[], Side], entry: dict[str, Any]) -> Side:
    """Make a side, and run it twice: kernels are compiled, isolation is proven, and caches are filled."""
    side, begin = make(), now()
    side.step()
    entry |= {"first_seconds": now() - begin, **side.facts(), "seconds": [], "tokens": [], "gibibytes": 0.0}
    side.step()
    return side


def time_once(side: Side, entry: dict[str, Any]) -> None:
    """Run a side once, and add its time, its tokens, and the memory that it took besides what was taken before."""
    before = reset_peak()
    begin = now()
    tokens = side.step()
    entry["seconds"].append(now() - begin)
    entry["tokens"].append(tokens)
    entry["gibibytes"] = max(entry["gibibytes"], (peak() - before) / GIB)


@contextmanager
def left_out_if_it_fails(results: Results, entry: dict[str, Any]) -> Iterator[None]:
    """Keep the reason why a side does not run; if the device has failed as well, end this process with AGAIN."""
    try:
        yield
        return
    except torch.OutOfMemoryError:
        entry["not_run"] = "out of memory"
    except CannotRunError as reason:
        entry["not_run"] = str(reason)
    except Exception as error:
        entry["not_run"] = reason_of(error)
    try:
        now()
    except Exception:
        results.save()
        sys.exit(AGAIN)


def reason_of(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {error}".partition("\n")[0][:300]


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def now() -> float:
    """Return the time in seconds, when the device has done all that it was asked for."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak() -> int:
    """Begin to watch the memory of the device, or else of the process; return how many bytes are taken."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return 0


def peak() -> int:
    """Return the most bytes that were taken since `reset_peak`, or by the process."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
