"""Which files are read, and that nothing of a folder is read twice or passed over without a word."""

import gzip
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import datasets
import pytest

from hf_packing.errors import PackingError
from hf_packing.text.documents import Documents
from hf_packing.text.files import find_files


def texts(documents):
    return [row["text"] for row in documents]


def test_a_link_to_a_file_of_the_folder_is_not_read_again(tmp_path):
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "a.txt").write_text("one")
    (tmp_path / "latest.txt").symlink_to(tmp_path / "within" / "a.txt")
    documents = Documents(str(tmp_path))
    assert texts(documents) == ["one"]
    assert documents.skipped == [f"{tmp_path / 'latest.txt'}: a link to another file in the folder, so not read"]


def test_links_that_lead_out_of_the_folder_are_read(tmp_path):
    """The hub's cache has equal files once: two names lead to it, and both are documents."""
    (tmp_path / "blob").write_text("one")
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "blob")
    assert texts(Documents(str(tmp_path / "data"))) == ["one", "one"]


def test_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(PackingError, match="gone.txt: expected a file, got a broken link; skip_bad=True"):
        list(Documents(str(tmp_path)))
    documents = Documents(str(tmp_path), skip_bad=True)
    assert texts(documents) == ["one"]
    assert len(documents.skipped) == 1
    (tmp_path / "a.txt").unlink()
    with pytest.raises(PackingError, match="got none; .*gone.txt: expected a file, got a broken link"):
        Documents(str(tmp_path), skip_bad=True)


@pytest.mark.slow
def test_a_folder_that_may_not_be_read(tmp_path):
    """In a process of a user who may not."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "b.txt").write_text("two")
    (tmp_path / "closed").chmod(0)
    code = "import sys; from hf_packing.text.documents import Documents; Documents(sys.argv[1])"
    nobody = "import os; os.setgid(65534); os.setuid(65534); " if os.getuid() == 0 else ""
    for folder in [tmp_path, *tmp_path.parents][:4]:
        folder.chmod(folder.stat().st_mode | 0o055)
    try:
        loaded = "import hf_packing.text.documents; "
        command = [sys.executable, "-c", loaded + nobody + code, str(tmp_path)]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    finally:
        (tmp_path / "closed").chmod(0o755)
    assert re.search(
        r"DATA: expected folders that can be read, but reading '.*closed' failed: Permission denied", said
    ), said


def test_links_to_folders_that_lie_in_each_other(tmp_path):
    """Whichever comes first."""
    (tmp_path / "outside" / "below").mkdir(parents=True)
    for file in ("outside/a.txt", "outside/below/b.txt"):
        (tmp_path / file).write_text(file)
    for number, (first, second) in enumerate([("outside", "outside/below"), ("outside/below", "outside")]):
        folder = tmp_path / f"folder-{number}"
        folder.mkdir()
        for name, target in (("one", first), ("two", second)):
            (folder / name).symlink_to(tmp_path / target)
        assert sorted(texts(Documents(str(folder)))) == ["outside/a.txt", "outside/below/b.txt"]


def test_patterns_find_names_at_any_depth(tmp_path):
    for file in ("a.py", "x/b.py", "x/y/c.py", "x/d.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    for pattern in ("*.py", "**/*.py"):
        assert texts(Documents(str(tmp_path), glob=pattern)) == ["a.py", "x/b.py", "x/y/c.py"]
    assert texts(Documents(str(tmp_path), glob="x/*")) == ["x/b.py", "x/d.txt"]
    with pytest.raises(PackingError, match=r"--glob: expected a relative pattern .* got 'x/\*\*/\*.py'"):
        Documents(str(tmp_path), glob="x/**/*.py")


def test_something_that_is_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        PackingError,
        match="DATA: expected a file or a folder, .* is neither and cannot be read twice; save the content in a file",
    ):
        Documents(str(tmp_path / "pipe"))
    (tmp_path / "a.txt").write_text("one")
    documents = Documents(str(tmp_path))
    assert texts(documents) == ["one"]
    assert documents.skipped == [f"{tmp_path / 'pipe'}: not a regular file, so not read"]


def test_a_saved_dataset_in_a_folder_is_no_text(tmp_path):
    datasets.Dataset.from_dict({"input_ids": [[1]]}).save_to_disk(tmp_path / "packed")
    with pytest.raises(PackingError, match="got none; for a saved dataset in the folder, pass its path"):
        Documents(str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    documents = Documents(str(tmp_path))
    assert texts(documents) == ["one"]
    assert documents.skipped == [f"{tmp_path / 'packed'}: a saved dataset within a folder, so not read"]


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.zst", "utf16.txt", "numbers"])
def test_archives_and_other_encodings_are_no_lines_of_text(tmp_path, name, skip_bad):
    """Most of their bytes are UTF-8, too."""
    (tmp_path / "one.txt").write_text("one\ntwo\n")
    file = tmp_path / "data" / name
    file.parent.mkdir()
    if ".tar" in name:
        with tarfile.open(file, "w:gz" if name.endswith("gz") else "w") as archive:
            archive.add(tmp_path / "one.txt", "one.txt")
    else:
        content = {
            "a.zst": b"(\xb5\x2f\xfd\nno\ntext",
            "utf16.txt": "one\ntwo\n".encode("utf-16-le"),
            "numbers": b"\0a\n",
        }
        file.write_bytes(content[name])
    documents = Documents(str(file), skip_bad=skip_bad)
    if skip_bad:
        assert texts(documents) == []
        assert len(documents.skipped) == 1
    else:
        with pytest.raises(PackingError, match=f"{name}: expected .*text"):
            list(documents)
    with pytest.raises(PackingError, match="--split: expected a saved dataset or a name on the hub, .* without splits"):
        Documents(str(file), split="test")


def test_endings_in_capitals(tmp_path):
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    assert texts(Documents(str(tmp_path / "A.JSONL.GZ"))) == ["one"]


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow"])
def test_rows_of_a_saved_dataset_are_those_without_its_format(tmp_path, form):
    rows = [{"messages": [{"role": "user", "content": "one"}], "input_ids": [1, 2]}]
    datasets.Dataset.from_list(rows).with_format(form).save_to_disk(tmp_path / "saved")
    assert list(Documents(str(tmp_path / "saved"))) == rows


def test_columns_that_a_format_hides_stay_hidden(tmp_path):
    saved = datasets.Dataset.from_dict({"text": ["one"], "input_ids": [[1]]}).with_format(columns=["text"])
    saved.save_to_disk(tmp_path / "saved")
    assert list(Documents(str(tmp_path / "saved"))) == [{"text": "one"}]


def test_options_that_a_saved_dataset_does_not_have(tmp_path):
    datasets.Dataset.from_dict({"text": ["one"]}, split="train").save_to_disk(tmp_path / "saved")
    with pytest.raises(PackingError, match="--split: expected train or no --split, .* only one split, got 'test'"):
        list(Documents(str(tmp_path / "saved"), split="test"))
    assert texts(Documents(str(tmp_path / "saved"), split="train")) == ["one"]
    with pytest.raises(PackingError, match="--glob: expected a folder as DATA"):
        Documents(str(tmp_path / "saved"), glob="*.txt")


@pytest.mark.parametrize("name", ["org/Name-2.5", "org/data.v2", "Name-1.5-sft", "org/v1.0-en"])
def test_names_on_the_hub_may_have_dots(name):
    assert find_files(Path(name), None).to_read == []


@pytest.mark.parametrize(
    "name", ["a.jsonl", "org/a.txt", "a.md", "org/a.parquet", "a.csv.gz", "a/b/c", "../a", "x.tar"]
)
def test_names_of_files_are_not_looked_up_on_the_hub(name):
    with pytest.raises(PackingError, match="does not exist"):
        find_files(Path(name), None)


@pytest.mark.parametrize("url", ["s3://bucket/a.jsonl", "hf://datasets/org/name", "https://example.com/a.jsonl"])
def test_urls_are_for_the_fleet(url):
    with pytest.raises(PackingError, match=f"got the URL '{url}'; hf_packing.fleet.pack"):
        Documents(url)


@pytest.mark.parametrize("name", ["data.v2", "Name-2.5", "a.b/c.d"])
def test_folders_with_dots(tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "a.jsonl").write_text('{"text": "one"}\n')
    assert list(Documents(str(tmp_path / name))) == [{"text": "one"}]
