"""Benchmarks, and the reproductions of papers, run at toy size; the figures mean nothing there.

They run on one thread: two that wait for each other, beside tests on the other cores, take ten times as long.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import internals
import numpy as np
import pytest
import torch
from datasets import Dataset
from processes import run_script
from tiers import fast_only, rarely

import hf_packing as hfp

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

TOY = {
    "attention.py": ("--rounds 1 --shrink 16 --no-memory", "sdpa with mask"),
    "block_mask.py": ("--rounds 1 --shrink 16", "create_block_mask"),
    "trees.py": ("--sets short --number 2000 --rounds 1", "short, 67 tokens each            2,000"),
    "tree_training.py": (
        "--models llama --sets 'random pairs, prompt half' --tokens 1500 --rounds 1",
        "random pairs, prompt half",
    ),
    "tree_pairs.py": ("--pairs 2 --answer 5 --prompts 30 --hidden 32 --layers 1 --rounds 1", "times as fast"),
    "loader.py": ("--tokens 20000 --rows 8 --lengths 512 2048 --rounds 2", "documents    2,048        2"),
    "lazy.py": ("--tokens 40000 --lengths 512 --read 8000 --rounds 1", "0 of"),
    "samplers.py": ("--documents 3000 --ranks 2", "TokenBudget(16384)"),
    "long_documents.py": ("--documents 2000 --planned 2000 --ranks 8", "TokenBudget.lay_out"),
    "two_ranks.py": ("--tokens 64 --hidden 128 --layers 1 --steps 1 --rounds 1", "times as fast as on one"),
    "rollouts.py": (
        "--simulated 2 --hidden 64 --layers 1 --steps 1 --longest 16 --shrink 64 --rounds 1",
        "times as fast with level=True",
    ),
    "by_segment.py": ("--steps 2 --documents 4 --max-length 32 --sample 200 --threads 1", "Jamba: route: varlen"),
    "alignment.py": ("--documents 500", "align_tokens=128"),
    "shapes.py": ("--batches 2 --documents 500", "BestFit(16384, max_documents=255)"),
    "head.py": ("--tokens 512 --vocabulary 5000 --hidden 32 --rounds 1 --steps 1 --threads 1", "time of in chunks"),
    "training.py": (
        "--documents 40 --max-length 512 --longest 256 --hidden 64 --layers 1 --rounds 1 --steps 1 --sample 200",
        "times as fast as TRL packing",
    ),
    "startup.py": ("--documents 300 --tokens 512 --rounds 1", "hf_packing: TokenBudget is"),
    "patching.py": ("--models 70B --shrink 20 --tokens 256 --rounds 1", 'patch_model(prove="small")'),
    "first_batch.py": ("--hidden 64 --layers 1 --vocabulary 500 --tokens 512 --rounds 1", "peak memory of both proofs"),
    "padded_batches.py": ("--rows 8 --pairs 4 --rounds 1 --shrink 8", "kept for the backward pass"),
    "score.py": ("--documents 12 --max-tokens 1024 --rounds 1", "times as fast"),
    "score_trees.py": ("--questions 0 --max-tokens 512 --hidden 16 --rounds 1", "16 + 500 tokens"),
    "streams.py": ("--packs 20 --tokens 200000 --rounds 1 --documents 30", "64 logical"),
    "mixtures.py": ("--tokens 200000 --streams 2 --rounds 1", "2 logical streams, after 200,000"),
    "fleet_pack.py": ("--tokens 400000 --rounds 1 --sides local pack", "times as fast as load_dataset"),
    "lockstep.py": ("--steps 5 --rounds 1", "a step of 5 milliseconds in lockstep"),
    "masking.py": ("--documents 20 --tokens 1024 --rounds 1", "ms for 16,384 tokens"),
}


RARELY = {
    *("head.py", "two_ranks.py", "score_trees.py", "first_batch.py", "shapes.py", "lockstep.py", "by_segment.py"),
    *("patching.py", "padded_batches.py", "rollouts.py"),
}
"""Those that start many processes or patch many models run in the survey."""


@pytest.mark.parametrize("script", [*fast_only(each for each in TOY if each not in RARELY), *rarely(sorted(RARELY))])
def test_runs(script):
    flags, expected = TOY[script]
    done = run_script(BENCHMARKS / script, *shlex.split(flags))
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.parametrize("folder", ["benchmarks", "tools", "recipes/reproduce"])
def test_only_internals_reaches_into_the_package(folder):
    reaching = re.compile(r"^ *(from|import) hf_packing\.", re.MULTILINE)
    files = list((BENCHMARKS.parent / folder).rglob("*.py"))
    assert len(files) >= 5
    found = {file.name for file in files if reaching.search(file.read_text())}
    assert found == ({"internals.py"} if folder == "tools" else set())  # benchmarks import theirs by name


def test_benchmarks_use_all_that_they_reach_into():
    texts = [file.read_text() for file in BENCHMARKS.glob("*.py") if file.name != "internals.py"]
    used = "\n".join(text for text in texts if "internals" in text)
    for name in internals.HOME_OF:
        assert getattr(internals, name) is not None
        assert re.search(rf"\b{name}\b", used), name
    with pytest.raises(AttributeError, match="'internals' has no attribute 'nothing'"):
        internals.nothing  # noqa: B018


def test_every_benchmark_is_run_by_make():
    (names,) = re.findall(r"^BENCHMARKS := (.*)$", (BENCHMARKS.parent / "Makefile").read_text(), re.MULTILINE)
    scripts = {file.stem for file in BENCHMARKS.glob("*.py") if "__main__" in file.read_text()}
    assert set(names.split()) == scripts - {"gpu", "write_readme"}


@pytest.mark.slow
def test_what_is_kept_of_a_run(tmp_path):
    for folder in (BENCHMARKS, BENCHMARKS.parent / "recipes"):
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    (tmp_path / "benchmarks" / "results").mkdir()
    command = [sys.executable, "benchmarks/collate.py", "--rounds", "2", "--save", "--tokens", "512"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "benchmarks" / "results" / "collate.json").read_text())
    assert result["printed"] == done.stdout.splitlines()
    assert result["command"] == "python benchmarks/collate.py --rounds 2 --tokens 512"
    assert {"processor", "cores", "python", "versions"} <= set(result)
    assert len(result["figures"]) == 5
    assert all(len(each["milliseconds"]) == 2 for each in result["figures"])
    subprocess.run([sys.executable, "benchmarks/write_readme.py"], cwd=tmp_path, check=True)
    page = (tmp_path / "benchmarks" / "README.md").read_text()
    assert "## collate" in page
    assert done.stdout.strip() in page


def test_the_page_is_that_of_the_results():
    code = "from write_readme import page; print(page(), end='')"
    made = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert made.stdout == (BENCHMARKS / "README.md").read_text()


REPRODUCE = Path(__file__).parents[1] / "recipes" / "reproduce"
LPFHP_PACKS = {"2": 10_099_081, "3": 9_090_154, "8": 8_207_569, "any": 8_138_483}
"""Of the authors' code on the same histogram (arXiv 2107.02027)."""


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(REPRODUCE))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    yield
    sys.modules.pop("common", None)


def call(script, folder, *options, **environment):
    known = {"HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment
    return run_script(REPRODUCE / f"{script}.py", "--quick", "--output", folder, *options, **known)


def tables(script, folder, *options, result=None):
    """Run a script and read the tables it wrote: for each caption, cut at a colon or comma, the rows below the head."""
    done = call(script, folder, *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    written = (folder / f"{result or script}.md").read_text()
    assert f"Python 3.{sys.version_info.minor}" in written.splitlines()[0]
    assert f"hf-packing {hfp.__version__}" in written.splitlines()[0]
    assert written.strip() in done.stdout.replace("\n\n\n", "\n\n")
    found = {}
    for section in written.split("\n## ")[1:]:
        caption, *lines = section.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        found[caption] = rows[2:]
    return lambda begins: next(rows for caption, rows in found.items() if caption.startswith(begins))


def number(cell):
    return float(cell.strip("%").replace(",", ""))


@pytest.mark.slow
def test_bucket_pre_training(tmp_path):
    table = tables("bucket_pretraining", tmp_path)
    plans = {row[0]: row for row in table("Table 1")}
    for name, row in plans.items():
        if row[4] and name != "buckets":
            assert number(row[3]) == pytest.approx(number(row[4]), rel=0.05), name
    assert number(plans["buckets"][3]) < 0.3 < number(plans["multi-bucket"][3])
    assert [row[0] for row in table("Table 2")] == ["256", "512", "1024", "2048"]


@pytest.mark.slow
def test_krell(tmp_path, shared_data):  # noqa: ARG001
    table = tables("krell", tmp_path, "--data", "wikipedia")
    packs = {(row[0], row[1]): row for row in table("16,279,552 sequences")}
    assert {depth: int(number(packs["LPFHP", depth][2])) for depth in LPFHP_PACKS} == LPFHP_PACKS
    assert all(row[3] in ("", row[2]) for row in packs.values())
    losses = table("A BERT")
    assert all(abs(number(row[4])) < 1e-4 for row in losses)
    assert any(abs(number(row[5])) > 1e-4 for row in losses), "sequences that see each other train just as well"


@pytest.mark.slow
def test_packed_squad(tmp_path):
    table = tables("krell", tmp_path, "--data", "squad", result="packed_squad")
    packs = table("88,641 lengths like SQuAD's, 172.")
    assert len(packs) == 6
    assert all(number(row[2]) == pytest.approx(number(row[3]), rel=0.006) for row in packs)
    assert "is the same in all four: yes" in " ".join((tmp_path / "packed_squad.md").read_text().split())


@pytest.mark.slow
def test_fewer_truncations(tmp_path):
    table = tables("fewer_truncations", tmp_path)
    for row in table("Table 2"):
        concatenated, best_fit, longer = map(number, row[5:8])
        assert best_fit == longer < concatenated
    lengths = {row[0]: row for row in table("Documents cut")}
    assert number(lengths["513 to 1024"][2]) > 20 > number(lengths["513 to 1024"][3]) == 0
    assert (tmp_path / "fewer_truncations.png").stat().st_size > 10_000


@pytest.mark.slow
def test_packing_with_flash_attention(tmp_path, shared_data):  # noqa: ARG001
    table = tables("packing_with_flash_attention", tmp_path, "--sets", "math")
    methods = {row[0]: row for row in table("math: 24 documents")}
    assert len(methods) == 11
    padded, flat = methods["random + padding"], methods["minibatch + PosID"]
    assert (padded[1], flat[1]) == ("6", "6")
    assert [number(flat[place]) for place in (3, 4)] == pytest.approx(
        [number(padded[place]) for place in (3, 4)], abs=1e-3
    )
    assert methods["fixed length"][4] != methods["fixed length + PosID"][4]
    assert len(table("The paper's claims")) == 12
    assert [row[0] for row in table("math: validation loss by row length")] == ["64", "128"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "file"),
    [("krell", "bert_wikipedia_512_histogram.json"), ("packing_with_flash_attention", "math.jsonl.gz")],
)
def test_data_that_is_not_there_is_named(tmp_path, script, file):
    done = call(script, tmp_path, HF_PACKING_DATA=str(tmp_path))
    assert done.returncode == 1
    assert f"expected {file} in {tmp_path}" in done.stderr
    assert not list(tmp_path.glob("*.md"))


@pytest.mark.parametrize("max_length", [8, 100, 1024])
def test_the_papers_best_fit_has_as_many_packs_as_ours(modules, rng, max_length):  # noqa: ARG001
    from fewer_truncations import best_fit_packs

    for documents in (1, 7, 400):
        lengths = rng.integers(1, 2 * max_length, documents)
        assert best_fit_packs(lengths, max_length) == hfp.plan_packing(lengths, hfp.BestFit(max_length)).num_packs


def test_masks_and_the_loss_of_packed_bert(modules, rng):  # noqa: ARG001
    from krell import IGNORED, masked, mean_over_sequences

    tokens, mask = rng.integers(0, 100, 2000), 100
    document = masked(tokens.copy(), mask, rng)
    asked = document["labels"] != IGNORED
    assert asked.mean() == pytest.approx(0.15, abs=0.01)
    assert not asked[0]
    assert (document["labels"][asked] == tokens[asked]).all()
    assert (document["input_ids"][~asked] == tokens[~asked]).all()
    assert (document["input_ids"][asked] == mask).mean() == pytest.approx(0.8, abs=0.1)

    logits = torch.from_numpy(rng.normal(size=(1, 6, 9))).float()
    labels = torch.tensor([[3, 4, IGNORED, IGNORED, 5, IGNORED]])
    each = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none", ignore_index=IGNORED)
    loss = mean_over_sequences(logits, labels, torch.tensor([[0, 0, 0, 1, 2, 2]]))
    assert loss.item() == pytest.approx(((each[0] + each[1]) / 2 + each[4]).item() / 2)


def test_every_method_trains_on_every_token_once_and_needs_position_ids(modules, rng):  # noqa: ARG001
    from packing_with_flash_attention import METHODS, batch_of, rows_of

    documents = Dataset.from_dict({"input_ids": [rng.integers(1, 50, n).tolist() for n in rng.integers(1, 40, 60)]})
    tokens = Counter(token for document in documents["input_ids"] for token in document)
    assert len(METHODS) == 8
    for method in METHODS:
        rows = rows_of(method, documents, 64)
        batches = [batch_of(method, rows[begin : begin + 4])["input_ids"] for begin in range(0, len(rows), 4)]
        assert Counter(token for ids in batches for token in ids[ids > 0].tolist()) == tokens, method
    from packing_with_flash_attention import WITH, WITHOUT, batch_of, rows_of

    documents = Dataset.from_dict({"input_ids": [np.arange(1, 6).tolist()] * 8})
    borders = {
        method: batch_of(method, rows_of(method, documents, 20))["cu_seq_lens_q"].tolist() for method in (WITH, WITHOUT)
    }
    assert borders == {WITH: list(range(0, 45, 5)), WITHOUT: [0, 20, 40]}
