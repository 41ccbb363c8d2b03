"""pack(..., length_schedule=...): rows whose documents are cut to a length that grows with the number of the row."""

import datasets
import pytest
from document_streams import make_documents, stream_of

import hf_packing as hfp

SCHEDULE = hfp.LengthSchedule(5, steps=4)
SCHEDULED = {"length_schedule": SCHEDULE, "rows_per_step": 3}
ROW = 64


def cut(lengths, limit):
    return [min(limit, length - begin) for length in lengths for begin in range(0, length, limit)]


def assert_cut(rows, whole, number_of=lambda row: row):
    """Rows have the tokens of the whole rows; segments are cut as the schedule says for the number of the row."""
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in whole]
    for number, (row, uncut) in enumerate(zip(rows, whole, strict=True)):
        limit = SCHEDULE.length_at(number_of(number) // 3, ROW) or ROW
        assert row["seq_lengths"] == cut(uncut["seq_lengths"], limit)
        positions = [place for length in row["seq_lengths"] for place in range(length)]
        assert row["position_ids"] == positions
        assert row["labels"] == [
            -100 if place == 0 else token for token, place in zip(row["input_ids"], positions, strict=True)
        ]
    assert len(rows) > 3 * SCHEDULE.steps
    assert rows[0]["seq_lengths"] != whole[0]["seq_lengths"]


def test_a_dataset():
    documents = datasets.Dataset.from_dict({"input_ids": make_documents(150)})
    whole = hfp.pack(documents, hfp.BestFit(ROW))
    packed = hfp.pack(documents, hfp.BestFit(ROW), **SCHEDULED)
    assert packed._fingerprint != whole._fingerprint
    assert_cut(list(packed), list(whole))
    assert hfp.unpack(packed)["input_ids"][:] == documents["input_ids"][:]


def test_a_stream_and_its_state():
    def packed(**options):
        return hfp.pack(stream_of(make_documents(150)), hfp.BestFit(ROW), window_packs=4, **options)

    whole, scheduled = packed(), packed(**SCHEDULED)
    rows = list(scheduled)
    assert_cut(rows, list(whole))
    for number, _ in enumerate(scheduled):
        state = scheduled.state_dict()
        if number == 7:
            break
    again = packed(**SCHEDULED)
    again.load_state_dict(state)
    assert list(again) == rows[8:]
    other = packed(length_schedule=SCHEDULE, rows_per_step=2)
    other.load_state_dict(state)
    with pytest.raises(hfp.PackingError, match=r"is made as now, by .*LengthSchedule\(start=5"):
        list(other)
    scheduled.set_epoch(1)
    whole.set_epoch(1)
    assert [row["seq_lengths"] for row in scheduled] == [row["seq_lengths"] for row in whole]


def test_logical_streams_are_numbered_in_turn():
    def packed(**options):
        return hfp.pack(stream_of(make_documents(150)), hfp.BestFit(ROW), window_packs=4, streams=2, **options)

    whole, scheduled = list(packed()), list(packed(**SCHEDULED))
    turns = min(len(whole), 2 * SCHEDULE.steps * 3)  # while no logical stream has ended
    assert_cut(scheduled[:turns], whole[:turns])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length_schedule": SCHEDULE}, "rows_per_step: expected the number of packed rows in an optimizer step"),
        ({"rows_per_step": 2}, "rows_per_step: expected None without length_schedule, .* got 2"),
        ({"length_schedule": 8, "rows_per_step": 2}, "length_schedule: expected LengthSchedule.* or None, got 8"),
        ({"length_schedule": SCHEDULE, "rows_per_step": 0}, "rows_per_step: expected .* got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    for documents in (datasets.Dataset.from_dict({"input_ids": [[1]]}), stream_of([[1]])):
        with pytest.raises(hfp.PackingError, match=message):
            hfp.pack(documents, hfp.BestFit(8), **arguments)
