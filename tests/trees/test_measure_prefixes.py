"""How much documents would shrink, as compare, the report and the command say it."""

import json

import datasets
import numpy as np
import pytest
from datasets import Dataset

import hf_packing as hfp
import hf_packing.trees.find as measure_module
from hf_packing.cli import main
from hf_packing.trees.find import measure_shared_prefixes

HEADER = list(range(100, 160))
DOCUMENTS = [[*HEADER, question, answer] for question in range(10) for answer in range(2)]
LENGTHS = [len(document) for document in DOCUMENTS]
SHRUNK = "documents share prefixes: with share_prefixes=True, your data would shrink"


def test_the_ratio_is_that_of_packed_rows(monkeypatch):
    dataset = Dataset.from_dict({"input_ids": DOCUMENTS})
    packed = hfp.pack(dataset, hfp.BestFit(80), share_prefixes=True)
    ratio = 20 * 62 / sum(map(len, packed["tree_input_ids"]))
    assert ratio == 20 * 62 / 160  # two rows, with the header in each
    for documents in (dataset, DOCUMENTS, [np.array(document) for document in DOCUMENTS]):
        found = measure_shared_prefixes(documents, 80)
        assert (found.ratio, found.documents, found.is_sample) == (ratio, 20, False)
    assert measure_shared_prefixes(dataset.select(range(0, 20, 2)), 80).documents == 10
    assert measure_shared_prefixes([[1, 2], [3]], 80).ratio == 1
    assert measure_shared_prefixes([[1, 2], [3]], 80).sentence() == ""
    assert measure_shared_prefixes([], 80).ratio == 1
    monkeypatch.setattr(measure_module, "MEASURED_TOKENS", 310)
    found = measure_shared_prefixes(DOCUMENTS, 800)
    assert (found.documents, found.is_sample) == (4, True)
    assert found.sentence().endswith("times (measured on the first 4 documents)")


def test_compare_and_the_report_say_it(tmp_path, monkeypatch):
    comparison = hfp.compare(LENGTHS, [hfp.BestFit(80), hfp.BestFit(800)], documents=DOCUMENTS)
    assert comparison.shared.ratio == 20 * 62 / (60 + 40)
    assert repr(comparison).splitlines()[-1] == f"{SHRUNK} 12.4 times"
    assert f"{SHRUNK} 12.4 times</pre>" in comparison._repr_html_()
    unlike = [[number] * 9 for number in range(9)]
    for alone in (hfp.compare(LENGTHS, [hfp.BestFit(80)]), hfp.compare([9] * 9, [hfp.BestFit(80)], documents=unlike)):
        assert "shrink" not in repr(alone)
    report = hfp.packing_report(LENGTHS, 800, documents=DOCUMENTS)
    assert str(report).splitlines()[-1] == f"{SHRUNK} 12.4 times"
    assert f"<p>{SHRUNK} 12.4 times</p>" in report._repr_html_()
    assert report.to_dict()["shared_prefixes"] == {"ratio": 12.4, "documents": 20, "is_sample": False}
    assert hfp.packing_report(LENGTHS, 800).to_dict()["shared_prefixes"] is None
    sample = hfp.packing_report(LENGTHS, 800, documents=DOCUMENTS[:6])
    assert "(measured on the first 6 documents)" in str(sample)
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: ("<svg></svg>", b""))
    report.save(tmp_path / "report.html")
    assert f"<p>{SHRUNK} 12.4 times.</p>" in (tmp_path / "report.html").read_text()


def test_the_command_reports_and_packs(tmp_path, capsys):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in DOCUMENTS))
    assert main(["report", str(file), "--max-length", "800"]) == 0
    assert f"{SHRUNK} 12.4 times" in capsys.readouterr().out.replace("\n", " ")
    given = ["pack", str(file), "--max-length", "80", "--output", str(tmp_path / "packed")]
    assert main([*given, "--share-prefixes"]) == 0
    assert "prefixes shared: 7.75 times fewer tokens in packs" in capsys.readouterr().out
    packed = datasets.load_from_disk(tmp_path / "packed")
    plan = hfp.PackingPlan.load(tmp_path / "packed" / "plan")
    assert hfp.unpack(packed, plan)["input_ids"][:] == DOCUMENTS
    assert main([*given, "--overwrite", "--share-prefixes", "61", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shared_ratio"] == 20 * 62 / (10 * 63)


@pytest.mark.parametrize("documents", ["text", 3, [["a"]], Dataset.from_dict({"text": ["a"]})])
def test_documents_without_tokens(documents):
    with pytest.raises(hfp.PackingError, match="documents: expected|column 'input_ids': expected"):
        hfp.compare([1], [hfp.BestFit(8)], documents=documents)
