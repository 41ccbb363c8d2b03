"""Files that somebody else has written run no code, and lead to no file outside of their folder: see SECURITY.md."""

import ast
import json
import os
import pickle
import re
import shutil
import time
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from chat_templates import FROM_TRL, tokenizer_with
from trainers import documents

import hf_packing as hfp
from hf_packing.files import UNFINISHED, UNTOUCHED_FOR
from hf_packing.fleet.manifest import MANIFEST, read_manifest
from hf_packing.text.tokenize import load_tokenizer
from hf_packing.training.resume import ROWS_FILE, load_batches

PACKAGE = Path(hfp.__file__).parent


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """The file that a planted pickle makes; a test has to end without it."""
    pickle.loads(pickle.dumps(Planted(tmp_path / "control")))
    assert (tmp_path / "control").exists()
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists()


def pickled(file, planted):
    file.write_bytes(pickle.dumps(planted, protocol=2))  # that of torch.save


def object_array(file, planted):
    with file.open("wb") as opened:
        np.save(opened, np.array([planted], dtype=object), allow_pickle=True)


def zipped(file, planted):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", pickle.dumps(planted))


def by_torch(file, planted):
    torch.save({"epoch": planted}, file)


@pytest.mark.parametrize("plant", [pickled, object_array, zipped])
def test_arrays_of_plans_and_caches(mark, tmp_path, plant):
    plan = hfp.plan_packing([3, 4, 5], hfp.BestFit(8))
    plan.save(tmp_path / "plan")
    plant(tmp_path / "plan" / "segment_length.npy", Planted(mark))
    with pytest.raises(hfp.PackingError, match="expected a valid segment_length.npy"):
        hfp.PackingPlan.load(tmp_path / "plan")
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "labels": [[1, 2, 3], [4, 5]]})
    rows.save_to_disk(tmp_path / "rows")
    packed = hfp.pack(datasets.load_from_disk(tmp_path / "rows"), hfp.BestFit(4))
    assert hfp.unpack(packed)["labels"][:] == rows["labels"][:]
    plant(Path(packed.cache_files[0]["filename"]).parent / "first_labels.npy", Planted(mark))
    with pytest.raises(hfp.PackingError, match="packed: expected the files that pack"):
        hfp.unpack(packed)


@pytest.mark.parametrize("plant", [pickled, by_torch])
def test_states_in_checkpoints(mark, tmp_path, plant):
    plant(tmp_path / ROWS_FILE, Planted(mark))
    with pytest.raises(pickle.UnpicklingError):
        load_batches(tmp_path / ROWS_FILE)
    accelerator = Accelerator(cpu=True)
    loader = hfp.prepare_dataloader(accelerator, documents(9), hfp.TokenBudget(64))
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    saved = sorted(file.name for file in (tmp_path / "state").iterdir())
    assert saved == ["packed_loader_1.pt", "random_states_0.pkl"]  # accelerate loads the latter with weights_only
    plant(tmp_path / "state" / "packed_loader_1.pt", Planted(mark))
    with pytest.raises(pickle.UnpicklingError):
        accelerator.load_state(tmp_path / "state")
    file = tmp_path / "state" / "packed_loader_1.pt"
    other = shutil.copy(file, file.with_name("packed_loader_2.pt"))  # of a run with another loader
    with pytest.raises(hfp.PackingError, match="input_dir: expected a checkpoint .* this one, 1, got 2 in"):
        accelerator.load_state(tmp_path / "state")
    for each in (file, other):
        each.unlink()
    with pytest.raises(hfp.PackingError, match="input_dir: expected a checkpoint .* this one, 1, got 0 in"):
        accelerator.load_state(tmp_path / "state")
    assert loader.epoch == 0


UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}


def unsafe_calls(source):
    """The imports and calls in a source that may run what a file says."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (name for name in names if name.split(".")[0] in UNSAFE)
        if isinstance(node, ast.Call):
            called, keywords = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
            is_safe = called == "torch.load" and keywords.get("weights_only") == "True"
            if called in ("eval", "exec", "np.load", "torch.load") and not is_safe:
                yield called


def test_no_module_loads_pickles():
    assert [*unsafe_calls("import dill\nfrom pickle import load\ntorch.load(f)\nnp.load(f)\neval(x)")] == [
        *("dill", "pickle", "torch.load", "np.load", "eval")
    ]
    sources = {file: file.read_text() for file in PACKAGE.rglob("*.py")}
    assert any("torch.load" in source for source in sources.values())
    assert {file.name: found for file, source in sources.items() if (found := [*unsafe_calls(source)])} == {}


def test_code_of_tokenizers_is_run_only_if_asked_for(mark, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Own: ...\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.Own", None]}}))
    with pytest.raises(hfp.PackingError, match="trust_remote_code"):
        load_tokenizer(str(folder))


def test_chat_templates_run_in_a_sandbox():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = datasets.Dataset.from_list([{"messages": chat, "chat_template_kwargs": {"chat_template": "of the row"}}])
    made = tokenizer_with(FROM_TRL["qwen3"])
    with pytest.raises(hfp.PackingError, match="expected chat_template_kwargs that the chat template reads, got 'chat"):
        hfp.tokenize(rows, made)
    rows = rows.remove_columns("chat_template_kwargs")
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(hfp.PackingError, match="unsafe"):
        hfp.tokenize(rows, made, chat_template=template)


@pytest.mark.parametrize("name", ["../other.parquet", "/etc/passwd"])
def test_manifests_name_files_of_their_folder(tmp_path, name):
    documents(9).to_parquet(tmp_path / "documents.parquet")
    hfp.fleet.pack(str(tmp_path / "*.parquet"), hfp.BestFit(64), str(tmp_path / "out"), workers=1)
    file = tmp_path / "out" / MANIFEST
    assert len(read_manifest(str(tmp_path / "out")).data_files) == 1
    file.write_text(re.sub('"name": "[^"]*"', f'"name": "{name}"', file.read_text()))
    with pytest.raises(hfp.PackingError, match=f"manifests that name files of their own folder, got '{name}'"):
        read_manifest(str(tmp_path / "out"))
    file.write_text(file.read_text().replace('"remarks"', '"other"'))
    with pytest.raises(hfp.PackingError, match="expected files that this version of fleet.pack has written"):
        read_manifest(str(tmp_path / "out"))


def test_links_in_a_cache_are_not_followed_when_it_is_cleaned(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    documents(9).save_to_disk(tmp_path / "rows")
    left = tmp_path / "rows" / f"{UNFINISHED}{'0' * 32}"
    left.mkdir()
    links = [tmp_path / "rows" / f"{UNFINISHED}{'1' * 32}", left / "link"]
    for link in links:
        link.symlink_to(tmp_path / "mine")
    ago = time.time() - UNTOUCHED_FOR - 9
    for each in (tmp_path / "mine" / "file", tmp_path / "mine", left):
        os.utime(each, (ago, ago))
    os.utime(links[1], (ago, ago), follow_symlinks=False)
    hfp.pack(datasets.load_from_disk(tmp_path / "rows"), hfp.BestFit(64))
    assert not left.exists()
    assert (tmp_path / "mine" / "file").exists()
