"""Rows of single trees, joined, are the rows that are built of all trees at once."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from rows.test_tree_rows import tables

import hf_packing as hfp
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.token_columns import TokenColumn, find_token_columns
from hf_packing.trees.rows import join_rows, plan_trees, tree_rows


def one_tree_in_each_pack(plan):
    """Return a plan with the same trees in the same order, each in a pack of its own."""
    arrays = plan.arrays() | {"pack_offsets": plan.tree_offsets()}
    sizes = np.add.reduceat(plan.segment_own(), plan.tree_offsets()[:-1]) if plan.num_packs else plan.segment_length
    return PackingPlan(**arrays | {"pack_capacity": sizes})


@given(tables(), st.integers(1, 4), st.booleans(), st.data())
def test_joined_trees_are_the_rows_of_a_plan(dataset, least, large, data):
    columns = find_token_columns(dataset.data.table)
    plan = plan_trees(columns, hfp.BestFit(9, seed=data.draw(st.integers(0, 3))), least).plan
    rows = tree_rows(columns, plan).table
    alone = tree_rows(columns, one_tree_in_each_pack(plan)).table
    if large:
        alone, rows = (
            table.cast(pa.schema([pa.field(each.name, pa.large_list(each.type.value_type)) for each in table.schema]))
            for table in (alone, rows)
        )
    trees = np.diff(np.searchsorted(plan.tree_offsets(), plan.pack_offsets))
    order = np.array(data.draw(st.permutations(range(alone.num_rows))), dtype=np.int64)
    shuffled = alone.take(pa.array(order))  # trees come from anywhere, and are joined in the order of the plan
    given_rows = {name: TokenColumn(name, shuffled.column(name)) for name in shuffled.column_names}
    joined = join_rows(given_rows, np.argsort(order), trees)
    assert joined.equals(rows.combine_chunks())
    assert joined.num_rows == plan.num_packs


def test_rows_of_several_trees_and_documents(rng):
    """The property above would hold for rows of one tree, too."""
    prompts = [rng.integers(0, 99, 5).tolist() for _ in range(6)]
    documents = [prompt + [number] * (1 + number) for prompt in prompts for number in range(3)]
    table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})
    columns = find_token_columns(table)
    plan = plan_trees(columns, hfp.BestFit(24), 3).plan
    alone = tree_rows(columns, one_tree_in_each_pack(plan)).table
    trees = np.diff(np.searchsorted(plan.tree_offsets(), plan.pack_offsets))
    given_rows = {name: TokenColumn(name, alone.column(name)) for name in alone.column_names}
    joined = join_rows(given_rows, np.arange(alone.num_rows), trees)
    assert (trees == 2).all()
    assert joined.equals(tree_rows(columns, plan).table)
    assert joined.column("parents").to_pylist()[0][4:] == [-1, 4, 4, 4]
    assert max(joined.column("trained").to_pylist()[0][::3]) == 5
