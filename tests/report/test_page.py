"""The page of a report: pictures with marks and titles, nothing fetched, light and dark."""

import re

import numpy as np
import pytest

import hf_packing as hfp
from hf_packing.report.plots import PICTURES


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.9, 0.55, 4000), 1, 9000).astype(int)
    report = hfp.packing_report(lengths, [2048, 4096, 8192], source="a-rather-long-name-of-a-data-set/" * 3)
    file = tmp_path_factory.mktemp("page") / "report.html"
    assert report.save(file) == [file, *(file.parent / "report-pictures" / f"{name}.png" for name in PICTURES)]
    return file


def test_names_of_elements_are_unique_and_pictures_have_titles(page):
    text = page.read_text()
    names = re.findall(r'\sid="([^"]+)"', text)
    assert len(names) == len(set(names)) > 20
    referred = re.findall(r'(?:url\(#|href="#)([^)"]+)', text)
    assert referred
    assert set(referred) <= set(names)
    titles = re.findall("<h3>(.*?)</h3>", text)
    assert re.findall(r'<svg role="img" aria-label="([^"]+)"', text) == titles
    assert len(titles) == len(PICTURES)
    assert all(f'id="{name}-mark-' in text for name in PICTURES), "a picture shows nothing"
    assert not re.search(r'(src|href)="(?!data:|#|https://)', text), "fetched when the page is opened"
    assert "@media (prefers-color-scheme: dark)" in text


def test_what_pictures_leave_out_is_said(page):
    said = re.search(r"with the same row length as BestFit\((\d+)\); not shown: (.*)\.", page.read_text())
    other = {"2048", "4096", "8192"} - {said[1]}
    assert {f"BestFit({length})" for length in other} <= set(said[2].split(", "))
    assert f"FirstCome({said[1]})" not in said[2]


@pytest.mark.parametrize(
    ("source", "title"), [("chat & <b>.jsonl.gz", "chat &amp; &lt;b&gt;.jsonl.gz"), ("", "3 documents, 18 t")]
)
def test_the_title_is_the_source_of_the_data_and_escaped(tmp_path, monkeypatch, source, title):
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: ("<svg></svg>", b""))
    hfp.packing_report([5, 6, 7], 8, source=source).save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f"<title>{title}" in page
    assert f"<h1>{title}" in page
