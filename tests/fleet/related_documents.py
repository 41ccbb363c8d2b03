"""Files of documents that share prefixes, for tests of a fleet, and the rows that it makes of them, made literally."""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fleet.fleet_rows import documents_of

import hf_packing as hfp
from hf_packing.columns import INPUT_IDS
from hf_packing.planning.lengths import Pieces, cut_to_pieces
from hf_packing.rows.token_columns import find_token_columns
from hf_packing.trees.find import find_trees
from hf_packing.trees.forest import Forest, cut_large_trees, place_pieces
from hf_packing.trees.rows import tree_rows

GROUPS = (9, 0, 40, 1, 25)
"""Prompts of the files: uneven, and one file without documents."""


def write_related(
    folder: Path,
    groups: tuple[int, ...] = GROUPS,
    *,
    samples: int = 4,
    scattered: bool = False,
    labels: bool = True,
    seed: int = 0,
) -> list[str]:
    """Write parquet files of prompts with several answers each, some of them empty documents or equal.

    Args:
        folder: where to write.
        groups: number of prompts of each file.
        samples: answers to each prompt.
        scattered: whether the answers to a prompt are in different files; no two files share a prefix otherwise.
        labels: whether there are labels and weights, which differ between documents that share a prompt.
        seed: of the random tokens.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    documents: list[list[list[int]]] = [[] for _ in groups]
    for number, prompts in enumerate(groups):
        for _ in range(prompts):
            prompt = [number, *rng.integers(10, 9_000, rng.integers(10, 60)).tolist()]
            for sample in range(samples):
                answer = rng.integers(10, 9_000, rng.integers(0, 40)).tolist()
                file = (number + sample) % len(groups) if scattered else number
                documents[file].append(prompt + answer)
        if prompts > 20:
            documents[number].insert(3, [])
    files = []
    for number, of_file in enumerate(documents):
        columns = {"input_ids": [np.array(each, np.int32) for each in of_file]}
        if labels:
            columns["labels"] = [np.where(rng.random(len(each)) < 0.3, -100, each).astype(np.int32) for each in of_file]
            columns["weights"] = [np.full(len(each), 1, np.float32) for each in of_file]
        arrays = {
            name: pa.array(values, pa.list_(pa.float32() if name == "weights" else pa.int32()))
            for name, values in columns.items()
        }
        files.append(str(folder / f"{number}.parquet"))
        pq.write_table(pa.table({**arrays, "note": pa.array(["text"] * len(of_file), pa.string())}), files[-1])
    return files


def trees_by_pack(file: str, strategy: hfp.BestFit, least: int | bool = True) -> datasets.Dataset:
    """Return the rows that `pack` makes of one file."""
    return hfp.pack(documents_of([file]), strategy, share_prefixes=least, load_from_cache_file=False)


def joined(several: list[Forest] | list[Pieces]) -> dict[str, np.ndarray]:
    """Return the arrays of several forests or pieces, one after the other, by name."""
    return {name: np.concatenate([getattr(each, name) for each in several]) for name in vars(several[0])}


def literal_rows(files: list[str], strategy: hfp.BestFit, least: int = 16) -> pa.Table:
    """Return the rows of all files: trees of each file, and one plan for all trees."""
    documents = documents_of(files)
    columns = find_token_columns(documents.data.table.combine_chunks())
    lengths = columns[INPUT_IDS].length
    capacity, overflow = strategy.tree_limits()
    forests, found, before = [], [], 0
    for file in files:
        length = np.array([len(each) for each in pq.read_table(file).column("input_ids")], dtype=np.int64)
        pieces = cut_to_pieces(length, capacity, overflow)
        pieces = Pieces(pieces.document + before, pieces.start, pieces.length)
        forest = find_trees(columns, pieces, least).forest
        forest = cut_large_trees(forest, capacity)
        forests.append(Forest(forest.order + sum(len(each.document) for each in found), forest.length, forest.shared))
        found.append(pieces)
        before += len(length)
    forest = Forest(**joined(forests))
    pieces = Pieces(**joined(found))
    plan = place_pieces(forest, pieces, lengths, strategy.plan_lengths(forest.sizes))
    return (
        tree_rows(columns, plan, np.arange(plan.num_packs), bucket=strategy.has_buckets)
        .table.replace_schema_metadata()
        .combine_chunks()
    )
