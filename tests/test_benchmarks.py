"""Benchmarks that train, attend or need trainers run at toy size; the figures mean nothing there.

They run on one thread: two that wait for each other, beside tests on the other cores, take ten times as long.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import internals
import pytest
from processes import run_script

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
    "by_segment.py": ("--steps 2 --documents 4 --max-length 32 --sample 200 --threads 1", "Jamba: route: varlen"),
    "shapes.py": ("--batches 3 --documents 2000", "BestFit(16384, max_documents=255)"),
    "head.py": ("--tokens 1024 --vocabulary 20000 --hidden 64 --rounds 1 --steps 1 --threads 1", "time of in chunks"),
    "training.py": (
        "--documents 40 --max-length 512 --longest 256 --hidden 64 --layers 1 --rounds 1 --steps 1 --sample 200",
        "times as fast as TRL packing",
    ),
    "startup.py": ("--documents 300 --tokens 512 --rounds 1", "hf_packing: TokenBudget is"),
    "patching.py": ("--models 70B --shrink 20 --tokens 256 --rounds 1", 'patch_model(prove="small")'),
    "first_batch.py": ("--hidden 64 --layers 1 --vocabulary 500 --tokens 512 --rounds 1", "peak memory of the proof"),
    "padded_batches.py": ("--rows 8 --pairs 4 --rounds 1 --shrink 8", "kept for the backward pass"),
    "score.py": ("--documents 12 --max-tokens 1024 --rounds 1", "times as fast"),
    "score_trees.py": ("--questions 0 --max-tokens 512 --hidden 16 --rounds 1", "16 + 500 tokens"),
    "streams.py": ("--packs 20 --tokens 200000 --rounds 1 --documents 30", "64 logical"),
    "mixtures.py": ("--tokens 200000 --streams 2 --rounds 1", "2 logical streams, after 200,000"),
    "fleet_pack.py": ("--tokens 400000 --rounds 1 --sides local pack", "times as fast as load_dataset"),
    "lockstep.py": ("--steps 20 --rounds 1", "a step of 5 milliseconds in lockstep"),
    "masking.py": ("--documents 20 --tokens 1024 --rounds 1", "ms for 16,384 tokens"),
    "gpu_train.py": ("--tokens 256 --row 64 --hidden 128 --layers 2 --vocabulary 256 --steps 2", "ideal"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", TOY)
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
    assert set(names.split()) == scripts - {"gpu_train", "write_readme"}


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
