"""The private names of `datasets` that streams use, and what of ours breaks when they change."""

import inspect

import numpy as np
from datasets import IterableDataset, concatenate_datasets, interleave_datasets, iterable_dataset
from document_streams import make_documents, stream_of, write_source

from hf_packing.upstream import datasets as upstream


def test_examples_of_a_stream_and_their_methods():
    """upstream.examples_of, stream_of: without them, packing cannot be put between a source and its readers."""
    stream = stream_of(make_documents(5))
    assert isinstance(upstream.examples_of(stream), iterable_dataset._BaseExamplesIterable)
    names = {"info", "split", "formatting", "distributed", "token_per_repo_id"}
    assert names < set(inspect.signature(IterableDataset).parameters)
    assert {"_formatting", "_distributed", "_token_per_repo_id", "_ex_iterable"} < set(vars(stream))
    # PackedExamples, LogicalStreams and MixedExamples define these; add one that datasets begins to call.
    base = {name for name in vars(iterable_dataset._BaseExamplesIterable) if not name.startswith("__")}
    assert base - {"sleep_on_threads_shutdown"} == {  # which datasets has since 5.0
        "_init_state_dict",
        "features",
        "is_typed",
        "iter_arrow",
        "load_state_dict",
        "num_shards",
        "reshard_data_sources",
        "shard_data_sources",
        "shuffle_data_sources",
        "split_shard_indices_by_worker",
        "state_dict",
    }


def test_states_are_merged_key_by_key():
    """state: a state is replaced as a whole only because datasets merges nothing but dicts and lists."""
    examples = stream_of(make_documents(5))._ex_iterable
    examples._init_state_dict()
    examples._state_dict["shard_idx"] = None
    examples._init_state_dict = lambda: None
    examples.load_state_dict({"shard_idx": (1, {"a": 2})})
    assert examples._state_dict["shard_idx"] == (1, {"a": 2})


def test_files_of_shards(tmp_path):
    """upstream.shard_files: without it, shares have different sizes, and changed files are not noticed."""
    for kind, suffix in (("parquet", ".parquet"), ("jsonl", ".jsonl"), ("mapped", ".parquet")):
        stream = write_source(tmp_path, kind)()
        files = upstream.shard_files(stream._ex_iterable)
        assert len(files) == stream.num_shards > 1
        assert all(file.endswith(suffix) and groups is None for file, groups in files)
    groups = upstream.shard_files(write_source(tmp_path, "row groups")()._ex_iterable)
    if upstream.has_exact_states():  # an older datasets does not divide files
        assert [group for _, group in groups][-2:] == [(4,), (5,)]
    assert upstream.shard_files(write_source(tmp_path, "generator")()._ex_iterable) is None


def test_epochs_come_as_a_generator():
    """PackedExamples.shuffle_data_sources: without it, all epochs would have one order."""
    seen = []
    examples = stream_of(make_documents(5))._ex_iterable

    class Noting(type(examples)):
        def shuffle_data_sources(self, generator):
            seen.append(int(np.random.default_rng(3).integers(2**63)) == int(generator.integers(2**63)))
            return self

    stream = IterableDataset(Noting(examples.generate_tables_fn, {}))
    stream.set_epoch(3)
    list(stream)
    assert seen[-1]


def test_positions_of_a_stream_and_what_depends_on_places():
    """upstream.position: without it, attach would ignore a state that was loaded into the stream."""
    stream = stream_of(make_documents(5))
    assert upstream.position(stream) == ""
    stream.load_state_dict(stream.state_dict())
    assert upstream.position(stream) == "at a loaded state"
    stream = stream_of(make_documents(5))
    stream.set_epoch(2)
    assert upstream.position(stream) == "in epoch 2"
    # upstream.depends_on_places: without it, ranks would read other documents than those of `take`.
    stream = stream_of(make_documents(5))
    fixed = [stream.take(2), stream.skip(2), stream.repeat(None), stream.map(lambda row, _: row, with_indices=True)]
    fixed += [interleave_datasets([stream, stream]), stream.batch(2, drop_last_batch=True)]
    assert all(upstream.depends_on_places(each.map(lambda row: row)._ex_iterable) for each in fixed)
    free = [stream, stream.repeat(2), stream.map(lambda row: row), concatenate_datasets([stream, stream])]
    assert not any(upstream.depends_on_places(each._ex_iterable) for each in free)
    # upstream.picks_by_place: without it, later epochs would read what `skip` has left out.
    picked = [concatenate_datasets([stream, stream.skip(2)]), interleave_datasets([stream, fixed[3]]), fixed[-1]]
    assert all(upstream.picks_by_place(each.map(lambda row: row)._ex_iterable) for each in picked)
    reordered = [*free, interleave_datasets([stream, stream])]
    assert not any(upstream.picks_by_place(each._ex_iterable) for each in reordered)
