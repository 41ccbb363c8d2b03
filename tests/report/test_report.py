"""packing_report: figures beside slow literal ones, the recommendation, tables, JSON, pictures."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import pytest
from any_strategy import few_examples
from hypothesis import given
from hypothesis import strategies as st
from tiers import slow

import hf_packing as hfp
from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.planning.rank_layout import LINEAR_COST
from hf_packing.report.plots import picture
from hf_packing.report.render import COLUMNS, report_cells
from hf_packing.report.work import Setup, packed_work, padded_work

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=80).map(np.array).filter(np.any)


@pytest.fixture
def chat(rng):
    """Lengths like those of chats."""
    return np.clip(rng.lognormal(6.9, 0.55, 4000), 1, 9000).astype(int)


def slowest(micro_batches, ranks):
    """Of (real tokens, cost) for each micro-batch in order: tokens, and time when ranks wait for each other."""
    tokens = sum(real for real, _ in micro_batches)
    whole = len(micro_batches) // ranks * ranks
    steps = [micro_batches[first : first + ranks] for first in range(0, whole, ranks)]
    last = sum(cost for _, cost in micro_batches[whole:]) / ranks  # as if it were shared evenly
    return tokens, sum(max(cost for _, cost in step) for step in steps) + last


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4))
def test_work_of_packs(lengths, ranks, linear):
    plan = hfp.plan_packing(lengths, hfp.BestFit(50))
    packs = np.split(plan.segment_length.astype(int), plan.pack_offsets[1:-1])
    tokens, time = slowest([(sum(pack), sum(linear * n + n * n for n in pack)) for pack in packs], ranks)
    work, leveled = packed_work(plan, Setup(ranks, 1, linear))
    assert (work.tokens, work.slots, work.steps) == (tokens, tokens, -(-len(packs) // ranks))
    assert work.time == pytest.approx(time)
    assert leveled.time <= time * (1 + 1e-12)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4), st.integers(1, 70))
def test_work_of_padding(lengths, ranks, rows, max_length):
    """All orders of equal documents are one order."""
    work = padded_work(lengths[lengths > 0], max_length, Setup(ranks, rows, 3.0))
    cut = [min(length, max_length) for length in lengths if length]
    assert work.tokens == sum(cut)
    assert sum(cut) <= work.slots <= max(cut) * len(cut)
    micro_batches = -(-len(cut) // rows)
    assert work.steps == -(-micro_batches // ranks)
    equal = padded_work(np.full(10, 8), max_length, Setup(2, 4, 3.0))
    length = min(8, max_length)
    batches = [(documents * length, documents * length * (3 + length)) for documents in (4, 4, 2)]
    assert (equal.tokens, equal.time) == slowest(batches, 2)


def test_figures_are_those_of_compare_and_speed_up_is_time_per_real_token(chat):
    report = hfp.packing_report(chat, [2048, 4096])
    compared = hfp.compare(chat, [row.compared.strategy for row in report.rows])
    assert [row.metrics for row in report.rows] == [row.metrics for row in compared]
    assert [row.name for row in report.rows] == [
        *("FixedLength(2048)", "FirstCome(2048)", "BestFit(2048)"),
        *("FixedLength(4096)", "FirstCome(4096)", "BestFit(4096)", "Bucket((2048, 4096))"),
    ]
    assert [padded.cut_documents for padded in report.padded] == [(chat > 2048).sum(), (chat > 4096).sum()]
    report = hfp.packing_report(chat, 4096, strategies=[hfp.BestFit(4096)], ranks=4, padded_rows=8)
    (row,) = report.rows
    setup = Setup(4, 8, LINEAR_COST)
    before = padded_work(chat, 4096, setup)
    _, after = packed_work(hfp.plan_packing(chat, hfp.BestFit(4096)), setup)
    assert row.speed_up == pytest.approx((before.time / before.tokens) / (after.time / after.tokens))
    assert row.speed_up > 1.5
    assert row.leveled.balance > row.work.balance


EQUAL, VARIED = [512] * 800, np.random.default_rng(0).integers(300, 701, 600)
BOTH = [hfp.FixedLength(2048), hfp.BestFit(2048)]


@pytest.mark.parametrize(
    ("lengths", "max_length", "strategies", "said"),
    [
        ([1025] * 4000, [2048, 8192], None, "BestFit(8192)"),  # short rows stay half empty
        ([100] * 9901 + [200_000] * 99, [2048, 8192], None, "BestFit(8192)"),  # and cut most of the tokens
        ([700] * 9 + [3000], None, [hfp.BestFit(2048, overflow="drop"), hfp.FirstCome(2048)], "FirstCome(2048)"),
        (VARIED, None, BOTH, "BestFit(2048)"),
        slow(VARIED, None, [*BOTH, hfp.Optimal(2048, time_limit=600)], "Optimal(2048, time_limit=600.0)"),
        (EQUAL, 512, None, "and provably needs as few packs as possible"),
        (
            EQUAL * 50 + [300, 300, 300, 130, 130],
            None,
            [hfp.FirstCome(512, order="dataset")],
            "less than 0.01% more packs",
        ),
        ([50] * 10, None, [hfp.FixedLength(64)], "% of the documents, leaves"),
    ],
)
def test_what_is_recommended_and_said(lengths, max_length, strategies, said):
    given = {"max_length": max_length} if max_length else {"strategies": strategies}
    assert said in str(hfp.packing_report(lengths, **given).recommendation)


def test_which_documents_count():
    report = hfp.packing_report([0, 100] * 100, 64, strategies=[hfp.FixedLength(64), hfp.BestFit(64)])
    cells = {row[0]: row for row in report_cells(report)}
    for found in report.to_dict()["strategies"]:
        assert cells[found["strategy"]][3] == f"{found['truncation_ratio']:.3%}" == "100.000%"
        assert cells[found["strategy"]][5] == f"{found['concatenation_ratio']:.2f}"
    assert cells["padding, at most 64"][3] == "100.000%"
    assert report.lengths.empty == 100
    for documents, length, padded_rows in ((800, 512, 1), (40, 3000, 16)):
        strategies = [hfp.BestFit(length)]
        report = hfp.packing_report(np.full(documents, length), strategies=strategies, padded_rows=padded_rows)
        assert report.rows[0].speed_up == pytest.approx(1)
    (row,) = hfp.packing_report([64] * 5, strategies=[hfp.BestFit(64)], ranks=500).rows
    assert row.work.balance == 1  # of the ranks that work in an incomplete step
    (row,) = hfp.packing_report([100] * 10, strategies=[hfp.FixedLength(64)], ranks=2).rows
    assert row.work.documents == 10
    (row,) = hfp.packing_report([100] * 10, strategies=[hfp.BestFit(64, overflow="drop")], ranks=2).rows
    assert (row.work.documents, row.work.documents_per_step) == (0, 0)


@few_examples
@given(LENGTHS, st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True))
def test_any_lengths_make_a_report(lengths, row_lengths):
    report = hfp.packing_report(lengths, row_lengths)
    assert report.lengths.documents + report.lengths.empty == len(lengths)
    assert report.recommendation.strategy in [row.name for row in report.rows]
    json.dumps(report.to_dict(), allow_nan=False)
    assert str(report).count("\n") >= len(report.rows)


def test_tables_and_steps_beside_their_documents(chat):
    report = hfp.packing_report([*chat.tolist(), 0], 2048, source="a <b>")
    text = str(report)
    assert text.startswith(f"a <b>: 4,000 documents, {chat.sum():,} tokens, and 1 empty documents")
    table = text.split("\n\n")[1].splitlines()
    assert len({len(line) for line in table}) == 1
    assert f"take {report.recommendation}" in text
    html = report._repr_html_()
    assert html.count("<tr") == 1 + len(report.padded) + len(report.rows)
    assert "class=taken" in html
    # A step of padding has 16 documents of each rank, one of packs a pack of each.
    report = hfp.packing_report([*chat.tolist(), 0], 2048, ranks=4)
    cells = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in report_cells(report)}
    facts = report.to_dict()
    for name, found in (("padding, at most 2048", facts["padding"][0]), ("BestFit(2048)", facts["strategies"][2])):
        assert cells[name]["steps"] == f"{found['steps_per_epoch']:,}"
        assert cells[name]["documents per step"] == f"{found['documents_per_step']:,.0f}"
        assert found["steps_per_epoch"] * found["documents_per_step"] == pytest.approx(4000)
    assert report.padded[0].work.documents_per_step == pytest.approx(64, rel=0.02)


def test_the_recommendation_names_its_gain_and_rows_as_long_as_documents_need(chat):
    report = hfp.packing_report(chat, [2048, 4096])
    speed_up, reason = report.taken.speed_up, report.recommendation.reason
    assert speed_up > 1.5
    assert reason.startswith(f"it is about {speed_up:.1f} times as fast as padding to at most 4,096 tokens (counted")
    assert report.to_dict()["recommendation"]["speed_up"] == speed_up
    equal = hfp.packing_report(EQUAL, 512, padded_rows=1).recommendation.reason
    assert equal.startswith("it is about as fast as padding to at most 512 tokens, since there is little to save")
    shares = {length: chat[chat > length].sum() / chat.sum() for length in (2048, 4096, 8192)}
    assert shares[2048] > shares[4096] > 0.01 > shares[8192]
    taken = hfp.packing_report(chat, [1024, 2048, 4096, 8192, 16384]).recommendation
    assert taken.strategy == "BestFit(8192)"
    assert (chat > 8192).sum() == 0
    assert "it cuts no document" in taken.reason
    short = hfp.packing_report(chat, [1024]).recommendation
    assert short.strategy == "BestFit(1024)"
    cuts = f"it cuts {(chat > 1024).mean():.2%} of the documents, the fewest of all strategies, those longer than a"
    assert cuts in short.reason


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("lengths", {"lengths": []}),
        ("lengths", {"lengths": [0, 0]}),
        ("max_length", {"max_length": []}),
        ("max_length", {"max_length": [0]}),
        ("ranks", {"ranks": 0}),
        ("padded_rows", {"padded_rows": 0}),
        ("strategy", {"strategies": ["best_fit"]}),
        ("strategies", {"strategies": []}),
    ],
)
def test_refused(argument, arguments):
    with pytest.raises(PackingError, match=f"^{argument}: expected "):
        hfp.packing_report(**{"lengths": [3], **arguments})


def test_the_picture_has_marks(chat):
    report = hfp.packing_report(chat, [2048, 4096])
    svg = picture(report)
    ids = [element.get("id", "") for element in ET.fromstring(svg).iter()]
    assert any(re.fullmatch(r"mark-\d+", each) for each in ids)
    assert svg == picture(report)


def test_without_matplotlib(chat, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        MissingDependencyError, match=r'the picture needs matplotlib: pip install "hf-packing\[plots\]"'
    ):
        hfp.packing_report(chat, 2048).save(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz", "report.md", "html"])
def test_other_files_than_pages_are_refused(tmp_path, name):
    report = hfp.packing_report([5, 6, 7], 8)
    with pytest.raises(
        PackingError, match=r"^path: expected a file that ends in .html or .htm, got '.*prints the page"
    ):
        report.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_where_a_page_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: "<svg></svg>")
    report = hfp.packing_report([5, 6, 7], 8)
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    for place in (tmp_path / "file" / "report.html", tmp_path / "folder.html"):
        with pytest.raises(PackingError, match=f"^path: expected a file in a writable folder.*, got '{place}'"):
            report.save(place)
    monkeypatch.setattr(Path, "write_text", mock.Mock(side_effect=OSError("full")))
    with pytest.raises(PackingError, match="^path: expected to write to '.*taken.html', got the error: full"):
        report.save(tmp_path / "taken.html")
    monkeypatch.undo()
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: "<svg></svg>")
    report.save(str(tmp_path / "new" / "REPORT.HTM"))
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["REPORT.HTM"]


DOCUMENTS = {"input_ids": [[1, 2, 3], [4, 5], [], [6]]}


@pytest.mark.parametrize(
    ("more", "trained"),
    [
        ({}, 3),  # all tokens but the first of each document
        ({"labels": [[1, -100, 3], [-100, 5], [], [6]]}, 2),
        ({"completion_mask": [[0, 0, 1], [0, 0], [], [1]]}, 1),
        ({"labels": [0, 1, 0, 1]}, None),  # one label for each document
        ({"labels": [[1], [1, 2, 3], [4], [5, 6]]}, None),  # of a model with a decoder
        ({"attention_mask": [[0, 1, 1], [1, 1], [], [1]]}, None),  # padded
    ],
)
def test_tokens_that_are_trained_on_are_counted(tmp_path, monkeypatch, more, trained):
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: "<svg></svg>")
    documents = datasets.Dataset.from_dict({name: rows + rows for name, rows in (DOCUMENTS | more).items()})
    report = hfp.packing_report(documents.select(range(4)), 4)
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert report.to_dict()["trained_tokens"] == report.trained_tokens == trained
    for shown in (str(report), report._repr_html_(), page):
        assert (f"{trained} of 6 tokens are trained on" in shown) == (trained is not None)
        assert ("are trained on" in shown) == (trained is not None)
    assert hfp.packing_report([3, 2, 0, 1], 4).trained_tokens is None


def test_rows_that_were_left_out_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: "<svg></svg>")
    skipped = ["a.jsonl, line 3: got '<b>'", "a.jsonl, line 5"]
    report = replace(hfp.packing_report([5, 6, 7], 8), skipped=skipped)
    report.save(tmp_path / "report.html")
    said = f"rows left out: 2; the first one: {skipped[0]}"
    assert said in str(report)
    assert report.to_dict()["skipped"] == skipped
    for shown in (report._repr_html_(), (tmp_path / "report.html").read_text()):
        assert said in unescape(shown)
        assert "<b>&#39;" not in shown
        assert "&lt;b&gt;" in shown
