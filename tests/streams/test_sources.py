"""What users do to a stream before they pack it: no document is lost, repeated or read wrong in silence."""

import re
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import IterableDataset
from document_streams import make_documents, names_in, read_stream, write_jsonl, write_parquet
from tiers import fast_only

import hf_packing as hfp
from hf_packing.streams.reader import sizes_of_shards
from hf_packing.streams.upstream import examples_of

pytestmark = pytest.mark.filterwarnings("ignore:pack (leaves|reads):UserWarning")

DOCUMENTS = make_documents(90)
UNEVEN = [DOCUMENTS[:60], DOCUMENTS[60:70], DOCUMENTS[70:75], DOCUMENTS[75:]]


def first_half(row, number):  # noqa: ARG001
    return number < 45


CHANGES = {
    "take": lambda stream: stream.take(40),
    "skip": lambda stream: stream.skip(40),
    "take, then repeat": lambda stream: stream.take(40).repeat(2),
    "map after take": lambda stream: stream.take(40).map(lambda row: row),
    "by index": lambda stream: stream.filter(first_half, with_indices=True),
    "interleaved": lambda stream: datasets.interleave_datasets([stream, stream.take(20)]),
    "without the last batch": lambda stream: stream.map(
        lambda batch: batch, batched=True, batch_size=37, drop_last_batch=True
    ),
    "repeat": lambda stream: stream.repeat(3),
    "the end of one and the beginning": lambda stream: datasets.concatenate_datasets([stream.skip(70), stream.take(9)]),
}


@pytest.fixture
def stream(tmp_path):
    return read_stream("json", write_jsonl(tmp_path / "files", UNEVEN))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("streams", fast_only([None, 1, 3], None, 3))
def test_documents_are_those_of_the_plain_stream(stream, change, streams):
    changed = CHANGES[change](stream)
    expected = names_in(changed)
    packed = hfp.pack(changed, hfp.BestFit(64), window_packs=2, streams=streams)
    assert sorted(names_in(packed)) == sorted(expected)
    assert len(expected) not in (0, 90)


@pytest.mark.parametrize("streams", [None, 2])
def test_an_endless_stream_reads_every_document(stream, streams):
    packed = hfp.pack(stream.repeat(None), hfp.BestFit(64), window_packs=2, streams=streams)
    assert set(names_in(islice(packed, 120))) == set(range(90))


def generated(row_of):
    return IterableDataset.from_generator(lambda: (row_of(n, ids) for n, ids in enumerate(DOCUMENTS)))


LATER = {
    "labels": lambda ids: [-100] * len(ids),
    "completion_mask": lambda ids: np.zeros(len(ids), dtype=np.int64),
    "attention_mask": lambda ids: [0, *[1] * (len(ids) - 1)],
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("change", [lambda stream: stream, lambda stream: stream.map(lambda row: row)])
def test_labels_and_masks_of_later_documents_are_refused(name, change):
    made = generated(lambda n, ids: {"input_ids": ids, **({name: LATER[name](ids)} if n > 20 else {})})
    packed = hfp.pack(change(made), hfp.BestFit(64))
    with pytest.raises(hfp.PackingError, match=f"column '{name}': expected "):
        list(packed)


def test_other_columns_of_later_documents_do_no_harm():
    made = generated(lambda n, ids: {"input_ids": ids, **({"note": "late"} if n > 20 else {})})
    assert sorted(names_in(hfp.pack(made, hfp.BestFit(64)))) == list(range(90))


@pytest.mark.parametrize(
    ("row_of", "message"),
    [
        (
            lambda n, ids: {"input_ids": ids, "weights": [1 if n < 20 else 0.5] * len(ids)},
            "'weights'.* 0.5.* truncated",
        ),
        (lambda n, ids: {"input_ids": np.array(ids) + (0 if n < 20 else 0.5)}, "'input_ids'.* truncated"),
        (
            lambda n, ids: {"input_ids": [token + (2**33 if n > 20 else 0) for token in ids]},
            "'input_ids'.* not in range",
        ),
    ],
)
def test_values_of_later_documents_are_not_cut_off(row_of, message):
    with pytest.raises(hfp.PackingError, match=f"column {message}"):
        list(hfp.pack(generated(row_of), hfp.BestFit(64)))


def test_sizes_are_bytes(tmp_path):
    files = write_jsonl(tmp_path / "files", UNEVEN)
    assert sizes_of_shards(examples_of(read_stream("json", files))) == [Path(file).stat().st_size for file in files]
    (file,) = write_parquet(tmp_path / "parquet", [DOCUMENTS], rows_in_group=10)
    groups = sizes_of_shards(examples_of(read_stream("parquet", [file]).reshard()))
    assert groups == [Path(file).stat().st_size / 9] * 9
    assert sizes_of_shards(examples_of(generated(lambda _, ids: {"input_ids": ids}))) == [1]


def test_copies_of_files_do_and_files_of_other_sizes_do_not(tmp_path):
    def packed(folder, files):
        return hfp.pack(read_stream("json", write_jsonl(tmp_path / folder, files)), hfp.BestFit(64))

    stream = packed("files", UNEVEN)
    rows = list(stream)
    for _ in islice(stream, 3):
        pass
    copies, others = packed("copies", UNEVEN), packed("others", UNEVEN[::-1])
    for each in (copies, others):
        each.load_state_dict(stream.state_dict())
    assert list(copies) == rows[3:]
    with pytest.raises(hfp.PackingError, match="dataset: expected the files with which the state was saved"):
        list(others)


def test_numbers_in_errors_tell_the_place_in_the_stream():
    rows = [{"input_ids": ids, "labels": ids if n != 70 else ids[1:]} for n, ids in enumerate(make_documents(90, 1))]
    packed = hfp.pack(IterableDataset.from_generator(lambda: iter(rows)), hfp.BestFit(64), window_packs=1)
    with pytest.raises(hfp.PackingError, match="column 'labels'.*row") as error:
        list(packed)
    found = re.search(
        r"but row (\d+) has .*: (\d+) that have waited, then those from document (\d+) on", str(error.value)
    )
    row, waited, first = map(int, found.groups())
    assert first > 0
    assert first + row - waited == 70
