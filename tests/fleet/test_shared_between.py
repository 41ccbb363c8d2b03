"""The estimate of the tokens that files share with each other."""

import numpy as np
import pyarrow as pa
import pytest
from fleet.fleet_rows import Here, documents_of
from fleet.related_documents import write_related
from hypothesis import given
from hypothesis import strategies as st
from literal_trie import forests

import hf_packing as hfp
from hf_packing.fleet.shared_between import SharedBetween, sample_prefixes
from hf_packing.rows.token_columns import find_token_columns
from hf_packing.trees.rows import plan_trees

pytestmark = pytest.mark.filterwarnings("ignore:(pack|exchange):UserWarning")


def estimated(files, fewest=16):
    """Return the estimate for files, which are lists of documents."""
    between = SharedBetween(fewest)
    for documents in files:
        between.add(sampled(documents, fewest))
    return between.tokens()


def sampled(documents, fewest=16):
    columns = find_token_columns(pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))}))
    return sample_prefixes(columns, plan_trees(columns, hfp.BestFit(4096), fewest).plan, fewest)


def prefixes_of(documents, step):
    """Return the prefixes of documents, literally."""
    return {tuple(each[:end]) for each in documents for end in range(step, len(each) + 1, step)}


@given(st.lists(forests(), min_size=1, max_size=4), st.integers(1, 4))
def test_few_prefixes_are_all_compared(files, step):
    expected, known = 0, set()
    for documents in files:
        found = prefixes_of(documents, step)
        assert len(sampled(documents, step)) == len(found)
        expected += step * len(found & known)
        known |= found
    assert estimated(files, step) == expected


def test_answers_to_the_same_prompts_in_different_files(tmp_path):
    """What one plan of all documents would not repeat, within the distance of the lengths that are compared."""
    files = write_related(tmp_path / "files", (10, 8, 12), samples=3, scattered=True, labels=False)
    with pytest.warns(UserWarning, match=r"pack repeats about .* that documents of different files"):
        packed = hfp.fleet.pack(files, hfp.BestFit(4096), tmp_path / "out", share_prefixes=True, executor=Here())
    together = hfp.pack(documents_of(files), hfp.BestFit(4096), share_prefixes=True, load_from_cache_file=False)
    repeated = sum(file.tokens for file in packed.files) - sum(map(len, together["tree_input_ids"][:]))
    assert repeated > 1_000
    assert 0.8 * repeated < packed.shared_between <= repeated
    share = packed.shared_between / sum(file.tokens for file in packed.files)
    said = f"repeated: about {packed.shared_between:,} tokens ({share:.2%} of the rows) that documents of"
    assert said in str(packed)


def test_a_prompt_of_all_files(rng):
    """A file repeats a prompt once, however many of its documents begin with it."""
    prompt = rng.integers(0, 9, 1_000).tolist()
    files = [[[*prompt, 10 + document] for document in range(5)] for _ in range(4)]
    assert estimated(files) == pytest.approx(3 * 1_000, rel=0.25)
    assert estimated(files) <= 3 * 1_000
    assert estimated(files[:1]) == 0


def test_files_that_share_less_than_the_fewest_tokens(rng):
    prompt = rng.integers(0, 9, 15).tolist()
    files = [[[*prompt, 10 * number + each] for each in range(5)] for number in range(1, 4)]
    assert estimated(files) == 0
    assert estimated(files, 15) == 2 * 15


@pytest.mark.parametrize("known", [1 << 16, 500])
def test_more_prefixes_than_are_kept(known, rng, monkeypatch):
    """Half of the prompts are in two files. The memory of the estimate is bounded."""
    monkeypatch.setattr("hf_packing.fleet.shared_between._KNOWN", known)
    prompts = rng.integers(0, 9_000, (2_000, 32)).tolist()
    files = [prompts[first : first + 400] for first in range(0, 1_800, 200)]
    shared = 32 * 200 * (len(files) - 1)
    assert estimated(files) != shared
    assert estimated(files) == pytest.approx(shared, rel=0.15)
    between = SharedBetween(16)
    for documents in files:
        prefixes = sampled(documents)
        assert len(prefixes) == 513
        assert prefixes == sorted(set(prefixes))
        between.add(prefixes)
        assert len(between._repeated) <= known
    assert between._limit < 1 << 64


def test_hashes_are_spread_evenly(rng):
    """Otherwise a share of the hashes would not be the same share of the prefixes."""
    hashes = np.array(sampled(rng.integers(0, 3, (40, 160)).tolist()), dtype=np.float64) / 2.0**64
    assert len(hashes) == 400
    assert np.abs(np.sort(hashes) - np.arange(400) / 400).max() < 0.1
