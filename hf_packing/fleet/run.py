"""A run: what is packed, how, and where. Everything that tasks need to know is in files under the output folder.

    .fleet/run.json             the key and the settings; the first driver to write this file owns the output folder
    .fleet/tokenizer-HASH       the tokenizer, if documents are texts
    .fleet/KEY/inputs           names of the files to pack
    .fleet/KEY/count-00000      documents of each length in a file, and what the file was when it was read
    .fleet/KEY/tokens-00000     the tokens of a file of texts
    .fleet/KEY/trees-00000      the trees of a file, if documents share prefixes
    .fleet/KEY/plan             the plan, made of all counts
    .fleet/KEY/before           documents of each length in all earlier files, for every file
    .fleet/KEY/deal-00000       the segments of a file, by the output file that they go to
    .fleet/KEY/packed-00000     rows, tokens and digest of an output file
    packed-KEY-00000-of-00016.parquet
    manifest.json               written last: the output files that belong together

The key is a hash of the names of the files, the strategy, the settings, the tokenizer and the version of hf_packing.
"""

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.fleet.parts import DamagedFileError, read_part, read_parts, write_parts
from hf_packing.fleet.store import Store
from hf_packing.strategies.base import Strategy

WORK = ".fleet"
_RUN = f"{WORK}/run.json"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The settings by which texts and chats become tokens."""

    tokenizer: str
    """A hash of the tokenizer and its chat template; "" if the rows of the files have input_ids."""
    text_field: str | None
    end_documents: bool
    separator: str | None
    train_on: str | None
    skip_bad: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run."""

    strategy: str
    """The strategy's repr."""
    strategy_class: tuple[str, str]
    """Module and name of the strategy's class."""
    strategy_fields: Mapping[str, Any]
    has_buckets: bool
    shards: int | None
    """The number of output files; None to have one for about 2**25 tokens."""
    exchange: bool
    position_ids: bool
    share_prefixes: int | None
    """The fewest tokens that documents of a file share; None if documents share no prefixes."""
    texts: Texts | None
    """How texts become tokens; None if the files are tables with input_ids."""

    def build_strategy(self) -> Strategy:
        """Return the strategy.

        Raises:
            PackingError: a worker cannot import the strategy's class.
        """
        module, name = self.strategy_class
        try:
            strategy: Strategy = getattr(importlib.import_module(module), name)(**self.strategy_fields)
        except (ImportError, AttributeError):
            raise PackingError(
                f"strategy: expected a class that workers can import, to pack each file by itself, got {name} of the "
                f"module {module}"
            ) from None
        return strategy


def settings_of(strategy: Strategy, **others: Any) -> Settings:
    """Return the settings of a run with this strategy."""
    kind = type(strategy)
    return Settings(
        strategy=repr(strategy),
        strategy_class=(kind.__module__, kind.__qualname__),
        strategy_fields={field.name: getattr(strategy, field.name) for field in fields(strategy) if field.init},
        has_buckets=strategy.has_buckets,
        **others,
    )


@dataclass(frozen=True)
class Run:
    """A run, as its files in the output folder describe it."""

    store: Store
    key: str
    settings: Settings
    num_inputs: int

    def file(self, stage: str, number: int | None = None) -> str:
        """Return the name of a file of intermediate results, such as count-00003."""
        return f"{WORK}/{self.key}/{stage}" + ("" if number is None else f"-{number:05d}")

    def input(self, number: int) -> str:
        """Return the name of a file to pack."""
        try:
            return read_part(self.store, self.file("inputs"), number).decode()
        except DamagedFileError as error:
            raise PackingError(
                f"output: expected a readable list of files, but {self.store.path_of(error.name)!r} is gone or "
                "damaged; start the run again, which writes the list"
            ) from None

    def output(self, number: int, shards: int) -> str:
        """Return the name of an output file."""
        return f"packed-{self.key}-{number:05d}-of-{shards:05d}.parquet"


def key_of(inputs: Sequence[str], settings: Settings) -> str:
    """Return the key of a run: a hash of what is packed and how."""
    given = {"version": hf_packing.__version__, "inputs": list(inputs), "settings": asdict(settings)}
    return hashlib.sha256(json.dumps(given, sort_keys=True, default=repr).encode()).hexdigest()[:12]


def claim_run(store: Store, inputs: Sequence[str], settings: Settings) -> Run:
    """Begin a run in an output folder, or go on with the run that has begun there.

    Raises:
        PackingError: another run has begun in the output folder.
    """
    key = key_of(inputs, settings)
    known = {"key": key, "version": hf_packing.__version__, "inputs": len(inputs), "settings": asdict(settings)}
    if not store.exists(_RUN):
        write_names(Run(store, key, settings, len(inputs)), inputs)
        store.put_new(_RUN, json.dumps(known, indent=1, default=repr).encode())
    found = open_run(store)
    if found.key != key:
        raise PackingError(
            f"output: expected a new folder, or the folder of this run, but in {store.url!r} another run has begun, "
            f"{_difference(found, settings, len(inputs))}; choose another folder, or remove this one"
        )
    return found


def open_run(store: Store) -> Run:
    """Return the run that has begun in an output folder.

    Raises:
        PackingError: no run has begun there, or a run of another version.
    """
    try:
        known = json.loads(store.read(_RUN))
        texts = known["settings"].pop("texts")
        module, name = known["settings"].pop("strategy_class")
        settings = Settings(
            **known["settings"], strategy_class=(module, name), texts=None if texts is None else Texts(**texts)
        )
        return Run(store, known["key"], settings, known["inputs"])
    except FileNotFoundError:
        raise PackingError(f"output: expected a folder in which a run has begun, got {store.url!r}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise PackingError(
            f"output: expected a run of hf_packing {hf_packing.__version__}, but {store.path_of(_RUN)!r} cannot be "
            f"read: {error!r}"
        ) from None


def write_names(run: Run, inputs: Sequence[str]) -> None:
    """Write the names of the files to pack, unless they are there, for workers."""
    file, names = run.file("inputs"), [name.encode() for name in inputs]
    with suppress(DamagedFileError):
        if list(read_parts(run.store, file, len(names))) == names:
            return
    write_parts(run.store, file, ([name] for name in names), len(names))


def _difference(found: Run, settings: Settings, inputs: int) -> str:
    """Return the first setting in which two runs differ, as text."""
    if found.num_inputs != inputs:
        return f"of {found.num_inputs} files, not {inputs}"
    for name, value in asdict(settings).items():
        other = asdict(found.settings)[name]
        if json.dumps(other, default=repr) != json.dumps(value, default=repr):
            return f"with {name} {other!r}, not {value!r}"
    return "with other files, or another version of hf_packing"
