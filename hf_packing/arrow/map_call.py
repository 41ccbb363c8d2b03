"""What a call of `datasets.map` asks for: it gives its function the rows and nothing else, so its frame is read."""

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hf_packing.errors import PackingError


@dataclass(frozen=True)
class MapCall:
    """The arguments of the `map` that a strategy is called by."""

    batched: bool
    remove_columns: tuple[str, ...] = ()
    dataset: Any = None
    """The Dataset that is mapped; None for an IterableDataset."""
    makes_tables: bool = False
    """Whether an IterableDataset keeps what the strategy returns as a table, instead of adding it to the old columns.
    """

    def check_columns(self, given: list[str], packed: list[str]) -> None:
        """Refuse an IterableDataset.map that would lose packed columns, or keep columns of documents beside them.

        Args:
            given: columns of the batch.
            packed: columns of its packed rows.
        """
        if self.dataset is not None or not self.batched:
            return
        if self.makes_tables:
            if lost := [name for name in packed if name in self.remove_columns]:
                raise PackingError(
                    f"remove_columns: expected none of the packed rows' columns, got {lost}; in formats such as arrow "
                    "IterableDataset.map removes columns after packing, and packed rows have no others: leave it out"
                )
        elif kept := [name for name in given if name not in packed and name not in self.remove_columns]:
            raise PackingError(
                f"remove_columns: expected {kept} among them, since IterableDataset.map would keep these columns of "
                f"documents beside packed rows; call map(strategy, batched=True, remove_columns={kept})"
            )


def current_map_call() -> MapCall | None:
    """The call of `map` that handed over the batch; None where a strategy is called by anything else.

    A formatted dataset that calls it for one row, as its transform, counts as a map that is not batched.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_of(frame) == "hf_packing":
        frame = frame.f_back
    while frame is not None and module_of(frame) == "datasets":
        name, known = frame.f_code.co_name, frame.f_locals
        mapped: Any = known.get("self")
        if name == "_map_single" and known.keys() >= {"batched", "remove_columns", "shard"}:
            return MapCall(known["batched"], tuple(known["remove_columns"] or ()), known["shard"])
        if type(mapped).__name__ == "MappedExamplesIterable":
            tables = mapped.formatting is not None and mapped.formatting.is_table
            return MapCall(mapped.batched, tuple(mapped.remove_columns or ()), makes_tables=tables)
        if name == "format_row":
            return MapCall(batched=False)
        frame = frame.f_back
    return None


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]
