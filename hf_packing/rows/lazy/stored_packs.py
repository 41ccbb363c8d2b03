"""The folder of lazy packs on disk: which documents are in which pack, and where their tokens lie.

A segment takes 12 bytes: the number of its first token (4, or 8 above 2**32 tokens), the number of its document (4) and
its length (4, in the column seq_lengths of the rows). A pack takes 28 bytes, for its cells. Folders are written beside
their final path, and renamed when complete.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets.table import MemoryMappedTable

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS, POSITION_IDS, SEQ_LENGTHS, apply_loss_masks
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, offsets_of
from hf_packing.planning.storage import put_in_place
from hf_packing.rows.cache import work_folder
from hf_packing.rows.lazy.token_files import SourceFile, StoredColumn, TokenFiles, TokenReader
from hf_packing.rows.packed_rows import FACT_NAMES, LABELS_LEFT, Origin, as_int32, describe_changes, positions_of

_ROWS = "rows.arrow"
_FACTS = "packs.json"
_ARRAYS = ("begin", "document", "first_token", "file_of_chunk", "places")
_FORMAT = 1
_ROWS_KEPT = 8
"""The input_ids of so many rows are kept, since their labels are made from them, and are mostly read next."""


@dataclass(frozen=True)
class StoredPacks:
    """The path of a folder with lazy packs, which may be missing or incomplete."""

    folder: Path

    def open(self) -> MemoryMappedTable | None:
        """Return the rows; None if the folder is incomplete or was moved, or if a file of the documents has changed."""
        open_packs.cache_clear()  # another process may have written the folder again
        try:
            packs = LazyPacks(self.folder)
            return MemoryMappedTable.from_file(str(self.folder / _ROWS)) if packs.is_of(self.folder) else None
        except (OSError, ValueError, KeyError, TypeError, EOFError, pa.ArrowException):  # PackingError is a ValueError
            return None

    def write(self, rows: pa.Table, origin: Origin, begin: IntArray, tokens: TokenFiles) -> MemoryMappedTable:
        """Write the folder and return its rows.

        A complete folder with the same packs is kept, since other processes may be reading its files.

        Args:
            rows: one row for each pack.
            origin: the plan, and other facts about the rows.
            begin: int64 [segments]: the number of each segment's first token.
            tokens: where the tokens lie.
        """
        facts = {
            "format": _FORMAT,
            "folder": str(self.folder),
            "files": [asdict(file) for file in tokens.files],
            "columns": {name: asdict(column) for name, column in tokens.columns.items()},
            "plan": origin.plan.fingerprint,
            "documents": origin.plan.num_documents,
            "packing": origin.facts(),
        }
        small = begin.astype(np.uint32) if tokens.first_token[-1] < 2**32 else begin
        arrays = (small, origin.plan.segment_document, tokens.first_token, tokens.file_of_chunk, tokens.places)
        with work_folder(self.folder) as work:
            fresh = work / self.folder.name
            fresh.mkdir()
            for name, array in zip(_ARRAYS, arrays, strict=True):
                np.save(fresh / f"{name}.npy", array)
            with pa.OSFile(str(fresh / _ROWS), "wb") as file, pa.ipc.new_stream(file, rows.schema) as stream:
                stream.write_table(rows)
            (fresh / _FACTS).write_text(json.dumps(facts) + "\n")
            put_in_place(fresh, self.folder, unless=lambda: self._holds(facts, begin))
        open_packs.cache_clear()
        return MemoryMappedTable.from_file(str(self.folder / _ROWS))

    def describe_changes(self) -> list[str]:
        """Return what `pack` did to the documents, as `describe_changes` of rows.packed_rows words it."""
        return describe_changes(_read_facts(self.folder)["packing"])

    def _holds(self, facts: dict[str, Any], begin: IntArray) -> bool:
        """Return whether the folder on disk is complete and holds these packs."""
        if self.open() is None:
            return False
        packs = LazyPacks(self.folder)
        return packs.facts == facts and np.array_equal(packs.begin, begin)


class LazyPacks:
    """Packs whose rows are read from the documents' own files.

    Args:
        folder: a folder that `StoredPacks.write` made.

    Attributes:
        facts: the content of packs.json.
        pack_offsets: integers [packs + 1]: the segments of pack p are pack_offsets[p]:pack_offsets[p + 1].
        segment_length: int32 [segments].
        begin: uint32 or int64 [segments]: the number of each segment's first token.
        document: integers [segments]: the number of each segment's document.

    Raises:
        OSError, ValueError, pa.ArrowException: a file of the folder is missing, or is not as it was written.
        PackingError: a file of the documents is gone, or has changed since they were packed.
    """

    def __init__(self, folder: Path) -> None:
        self.facts = _read_facts(folder)
        first_token, file_of_chunk, places = (_load(folder, name) for name in _ARRAYS[2:])
        self.begin, self.document = (_load(folder, name) for name in _ARRAYS[:2])
        self.pack_offsets, self.segment_length = _read_seq_lengths(folder)
        if not len(self.segment_length) == len(self.begin) == len(self.document):
            raise ValueError(f"{str(folder)!r} has arrays of different lengths")
        files = tuple(SourceFile(**file) for file in self.facts["files"])
        columns = {name: StoredColumn(**column) for name, column in self.facts["columns"].items()}
        self._reader = TokenReader(TokenFiles(files, columns, first_token, file_of_chunk, places))
        masks = self.facts["packing"]["loss_masks"]
        self._of_labels = [name for name in (LABELS, *masks) if name in columns]
        self._kept: dict[int, npt.NDArray[np.int32]] = {}

    def is_of(self, folder: Path) -> bool:
        """Return whether the packs were written to this folder, rather than to one that was moved or copied here."""
        return bool(self.facts["folder"] == str(folder))

    @cached_property
    def pack_tokens(self) -> IntArray:
        """int64 [packs]: the number of tokens in each pack."""
        before = offsets_of(self.segment_length)
        return np.diff(before[self.pack_offsets])

    def row(self, column: str, pack: int, check_after: float = 0) -> npt.NDArray[Any]:
        """Return a column of a packed row, [tokens of the pack], in an array that is read-only if it is kept.

        Args:
            column: name of the column.
            pack: number of the pack.
            check_after: seconds for which a file of documents need not be checked again.

        Raises:
            PackingError: a file of the documents is gone, or has changed since they were packed.
        """
        begin, length = self._segments(pack)
        if column == POSITION_IDS:
            return positions_of(length)
        if column == LABELS:
            ids = None if self._of_labels else self._kept.get(pack)
            labels = self.read(LABELS, begin, length, check_after) if ids is None else ids.copy()
            labels[length.cumsum() - length] = IGNORED_LABEL
            return labels
        values = self.read(column, begin, length, check_after)
        if column == INPUT_IDS:
            values.flags.writeable = False
            if len(self._kept) == _ROWS_KEPT:
                self._kept.clear()
            self._kept[pack] = values
        return values

    def _segments(self, pack: int) -> tuple[IntArray, IntArray]:
        """Return the numbers of the first tokens of a pack's segments, and the lengths of the segments."""
        segments = slice(self.pack_offsets[pack], self.pack_offsets[pack + 1])
        return self.begin[segments], self.segment_length[segments]

    def read(self, column: str, begin: IntArray, length: IntArray, check_after: float = 0) -> npt.NDArray[Any]:
        """Return slices of a column of the documents, concatenated, as a copy; of labels, with loss masks applied.

        Args:
            column: name of a token column, or "labels".
            begin: int64 [slices]: number of the first token of each slice.
            length: int32 [slices]: tokens of each slice.
            check_after: seconds for which a file of documents need not be checked again.
        """
        if column != LABELS:
            values = self._reader.read(column, begin, length, check_after)
            return as_int32(column, values) if column == INPUT_IDS else values
        given = {name: self._reader.read(name, begin, length, check_after) for name in self._of_labels}
        if LABELS in given:
            labels = as_int32(LABELS, given.pop(LABELS))
        else:
            labels = self.read(INPUT_IDS, begin, length, check_after)
        return apply_loss_masks(labels, given) if given else labels


@lru_cache(maxsize=256)
def open_packs(folder: str) -> LazyPacks:
    """Return the packs in a folder. A process opens a folder once.

    Raises:
        PackingError: the folder is gone or incomplete, or a file of the documents is gone or has changed.
    """
    try:
        return LazyPacks(Path(folder))
    except PackingError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, pa.ArrowException) as error:
        raise PackingError(
            f"lazy: expected the plan of these packs in the folder {folder!r}, which pack() wrote, got the error: "
            f"{error}; pack the documents again. Rows that have to outlive this folder need pack(..., lazy=False)"
        ) from error


def number_of(folder: str) -> int:
    """Return a number from 0 to 2**31 - 1 that stands for a folder in the cells of its rows."""
    return zlib.crc32(Path(folder).name.encode()) & 0x7FFF_FFFF


def _read_facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / _FACTS).read_text())
    if facts["format"] != _FORMAT or facts["packing"].keys() - {LABELS_LEFT} != FACT_NAMES:
        raise ValueError(f"{str(folder / _FACTS)!r} is of another version of hf_packing")
    return facts


def _load(folder: Path, name: str) -> npt.NDArray[Any]:
    """Return a memory-mapped array, as a plain one, which is faster to index."""
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


def _read_seq_lengths(folder: Path) -> tuple[IntArray, IntArray]:
    """Return the borders of packs, [packs + 1], and the lengths of segments, from the rows, which hold both."""
    with pa.memory_map(str(folder / _ROWS)) as file:
        column = pa.ipc.open_stream(file).read_all().column(SEQ_LENGTHS)
    if not column.num_chunks:
        return np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    (lists,) = column.chunks
    return lists.offsets.to_numpy(), lists.values.to_numpy()
