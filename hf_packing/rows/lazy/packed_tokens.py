"""PackedTokens, a feature of datasets: a cell is the number of a pack, and its value is a column of the packed row."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.rows.lazy.stored_packs import LazyPacks, number_of, open_packs
from hf_packing.rows.lazy.upstream import register

_PACK_BITS = 32
"""A cell is the number of a folder, shifted by so many bits, plus the number of a pack in this folder."""
_LAST_PACK = (1 << _PACK_BITS) - 1


@dataclass(eq=False)
class PackedTokens:
    """The feature of columns of `pack(..., lazy=True)`, whose values are read from the documents' own files.

    Rows have lists if the dataset has no format, as those of `pack` have, and NumPy arrays, tensors and so on in other
    formats. The format "arrow", and methods that read the table, such as `to_dict` and `to_pandas`, show numbers.

    datasets reads a saved dataset with this feature only if the feature is registered. `import hf_packing` registers it
    if datasets has been imported before; `from hf_packing import PackedTokens` registers it in any case.

    Args:
        column: name of the column in the packed rows.
        folders: the folders with the plans of the packs; several if datasets of lazy packs are concatenated.
        values: NumPy's name of the type of the values.
        id: not used.

    Raises:
        PackingError: when a row is read, if its folder, or a file of the documents, is gone or has changed.

    Example:
        >>> import datasets, tempfile, hf_packing as hfp
        >>> folder = tempfile.mkdtemp()
        >>> datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]}).save_to_disk(folder)
        >>> packed = hfp.pack(datasets.load_from_disk(folder), hfp.BestFit(4, seed=None), lazy=True)
        >>> isinstance(packed.features["input_ids"], hfp.PackedTokens), packed["input_ids"][:]
        (True, [[1, 2, 3, 6], [4, 5]])
    """

    column: str
    folders: list[str]
    values: str = "int32"
    id: str | None = field(default=None, repr=False)
    dtype: ClassVar[str] = "int64"
    pa_type: ClassVar[Any] = pa.int64()
    _type: str = field(default="PackedTokens", init=False, repr=False)

    def __post_init__(self) -> None:
        self._folder_of = {number_of(folder): folder for folder in self.folders}

    def __call__(self) -> pa.DataType:
        return self.pa_type

    def __eq__(self, other: object) -> bool:
        """Return whether the columns hold the same kind of values. Both features then know the folders of both.

        datasets concatenates columns whose features are equal, and keeps the first feature only.
        """
        if not isinstance(other, PackedTokens):
            return NotImplemented
        if (self.column, self.values) != (other.column, other.values):
            return False
        known = {**other._folder_of, **self._folder_of}
        if {Path(folder).name for folder in (*self.folders, *other.folders)} != {Path(f).name for f in known.values()}:
            return False  # two folders have the same number
        for feature in (self, other):
            feature._folder_of = known | feature._folder_of
            feature.folders = list(feature._folder_of.values())
        return True

    __hash__ = None  # type: ignore[assignment]

    def encode_example(self, value: Any) -> int:
        """Return a cell unchanged.

        Raises:
            PackingError: the value is not the number of a pack.
        """
        if isinstance(value, (int, np.integer)):
            return int(value)
        raise PackingError(
            f"column {self.column!r}: expected the number of a pack, since lazy packs cannot be written to, got "
            f"{type(value).__name__}; write to another column, or pack the documents with lazy=False"
        )

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Any:  # noqa: ARG002
        """Return the values of a cell: a list if the cell is an int, as in rows without format, else a NumPy array."""
        row = self.read(int(value))
        if not isinstance(value, np.generic):
            return row.tolist()
        return row if row.flags.writeable else row.copy()

    def embed_storage(
        self,
        storage: pa.Array,
        token_per_repo_id: Any = None,  # noqa: ARG002
        local_files: bool = True,  # noqa: ARG002
        remote_files: bool = False,
    ) -> pa.Array:
        """Return cells as datasets is to write them: unchanged for save_to_disk.

        push_to_hub also embeds remote files. Versions of datasets before 4.8.5 do not tell the two apart, and upload
        cells that nobody can read.

        Raises:
            PackingError: datasets is about to upload the cells.
        """
        if remote_files:
            raise PackingError(
                f"column {self.column!r}: expected tokens to upload, but lazy packs only refer to files on this "
                "machine; pack the documents with lazy=False, and upload the result"
            )
        return storage

    def read(self, cell: int, check_after: float = 0) -> npt.NDArray[Any]:
        """Return the values of a cell, [tokens of the pack], in an array that may be read-only.

        Args:
            cell: the cell.
            check_after: seconds for which a file of documents need not be checked again.
        """
        return self.packs(cell >> _PACK_BITS).row(self.column, cell & _LAST_PACK, check_after)

    def packs(self, number: int) -> LazyPacks:
        """Return the packs in the folder with this number; see `folder`."""
        return open_packs(self.folder(number))

    def folder(self, number: int) -> str:
        """Return the folder with this number.

        Raises:
            PackingError: the feature knows no such folder.
        """
        if number not in self._folder_of:
            raise PackingError(
                f"column {self.column!r}: expected a row of {', '.join(self.folders)}, got one of another folder; "
                "concatenate datasets of lazy packs with datasets.concatenate_datasets"
            )
        return self._folder_of[number]


def cells_of(folder: Path, num_packs: int) -> npt.NDArray[np.int64]:
    """Return the cells of all packs in a folder, int64 [packs]."""
    return (number_of(str(folder)) << _PACK_BITS) + np.arange(num_packs, dtype=np.int64)


def split_cells(cells: npt.NDArray[np.int64]) -> Iterable[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
    """Yield the number of each folder in cells, the indices of its cells, and the numbers of their packs."""
    folders = cells >> _PACK_BITS
    for number in np.unique(folders).tolist():
        of_folder = np.flatnonzero(folders == number)
        yield number, of_folder, cells[of_folder] & _LAST_PACK


register(PackedTokens, PackedTokens.__name__)
