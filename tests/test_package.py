"""The public namespace, imports, and other packages: their oldest versions, and their names that are not public."""

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import datasets
import peft
import pyarrow as pa
import pytest
import torch
import transformers
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable
from tiny_models import build
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.data import DataLoader
from trainers import trainer_of
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    Trainer,
    TrainerState,
    modeling_flash_attention_utils,
)
from transformers.integrations.hub_kernels import is_kernel
from transformers.masking_utils import flash_attention_mask
from transformers.utils.chat_template_utils import render_jinja_template
from trl import SFTTrainer
from trl.trainer import sft_trainer

import hf_packing as hfp
from hf_packing.attention.layout import CACHES
from hf_packing.checks import OLDEST, refuse_older
from hf_packing.training.models import prepared_model
from hf_packing.training.resume import BatchesOfCheckpoint

PACKAGE = Path(hfp.__file__).parent

HEAVY = ["torch", "datasets", "transformers", "accelerate", "trl", "pyarrow", "scipy", "matplotlib"]

FLOORS = [
    ["errors", "files", "versions", "columns", "checks"],
    ["upstream"],
    ["planning"],
    ["strategies"],
    ["trees", "rows"],
    ["text", "streams", "fleet"],
    ["batch", "sampling"],
    ["attention"],
    ["training"],
    ["report"],
    ["cli"],
]
"""From the ground up; a module imports from its own floor and from those below."""

UPWARD = {
    ("strategies/base.py", "hf_packing.rows.map_batch"),  # a strategy is called by `datasets.map`
    ("rows/pack.py", "hf_packing.streams.logical"),
}
"""What a function imports from a floor above, when it is called."""

THIRD_PARTY = {
    "errors": set(),
    "files": {"fsspec"},
    "versions": set(),
    "columns": {"numpy"},
    "checks": {"numpy", "packaging"},
    "upstream": {"numpy", "packaging", "pyarrow", "torch", "datasets", "transformers", "accelerate", "trl", "peft"},
    "planning": {"numpy"},
    "strategies": {"numpy", "scipy", "tqdm"},
    "trees": {"numpy", "pyarrow", "datasets"},
    "rows": {"numpy", "pyarrow", "datasets"},
    "text": {
        *("numpy", "pyarrow", "datasets", "fsspec", "huggingface_hub", "tokenizers", "transformers"),
        "trl",  # its chat templates for training
    },
    "streams": {"numpy", "pyarrow", "datasets", "fsspec"},
    "fleet": {"numpy", "pyarrow", "fsspec", "ray", "tqdm"},
    "batch": {"numpy", "torch"},
    "sampling": {"numpy", "pyarrow", "datasets", "torch"},
    "attention": {"numpy", "torch", "transformers", "accelerate", "flash_attn", "flash_attn_interface", "tqdm"},
    "training": {"numpy", "torch", "transformers", "accelerate", "datasets"},
    "report": {"numpy", "datasets", "jinja2", "matplotlib"},
    "cli": {"pyarrow", "tqdm", "datasets", "torch", "transformers"},
}


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


LOADED = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"


def test_importing_and_planning_load_nothing_heavy():
    assert python(f"import hf_packing; {LOADED}") == "[]"
    code = f"import hf_packing as hfp; hfp.plan_packing([1, 2], hfp.BestFit(4)).metrics(); {LOADED}"
    assert python(code) == "[]"


@pytest.mark.slow
def test_that_the_import_test_would_see_torch():
    assert "torch" in python(f"import torch; import hf_packing; {LOADED}")


def test_namespace():
    assert sorted(hfp.__all__) == hfp.__all__
    assert {*hfp._HOME_OF, "fleet"} == set(hfp.__all__)
    for name in hfp._HOME_OF:
        assert getattr(hfp, name).__name__ == name
        assert getattr(hfp, name).__doc__
    assert {name for name in dir(hfp) if not name.startswith("__")} == set(hfp.__all__)
    with pytest.raises(AttributeError, match="module 'hf_packing' has no attribute 'Bestfit'"):
        hfp.Bestfit  # noqa: B018


@cache
def imports_of(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {f"{node.module}" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_imports_only_go_down():
    assert "hf_packing.planning.plan" in imports_of(PACKAGE / "planning" / "table.py")
    for file in PACKAGE.rglob("*.py"):
        if file == PACKAGE / "__init__.py":
            continue
        home = file.relative_to(PACKAGE).with_suffix("").parts[0]
        floor = next(number for number, names in enumerate(FLOORS) if home in names)
        allowed = {name for names in FLOORS[: floor + 1] for name in names}
        for name in imports_of(file):
            top, *inner = name.split(".")
            if top == "hf_packing":
                is_upward = (file.relative_to(PACKAGE).as_posix(), name) in UPWARD
                assert is_upward or not inner or inner[0] in allowed, f"{file} imports {name}"
            elif top not in sys.stdlib_module_names:
                assert top in THIRD_PARTY[home], f"{file} imports {name}"


def modules() -> dict[str, Path]:
    dotted = {file: ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for file, name in dotted.items()}


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    sorter, found, left = TopologicalSorter(imported), [], dict(imported)
    while True:
        try:
            sorter.prepare()
        except CycleError as error:
            circle = error.args[1]
            found.append(circle)
            left = {name: others - set(circle) for name, others in left.items() if name not in circle}
            sorter = TopologicalSorter(left)
        else:
            return found


def test_no_two_modules_import_each_other():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not circles({"a": {"b", "c"}, "b": {"c"}})
    files = modules()
    assert len(files) > 80
    called = {name for _, name in UPWARD}
    inside = {name: imports_of(file) & files.keys() - called for name, file in files.items() if name != "hf_packing"}
    assert sum(map(len, inside.values())) > 200
    assert not circles(inside)


@pytest.mark.parametrize("room", ["attention"])
def test_a_facade_is_the_only_door(room):
    callers = [file for name, file in modules().items() if not name.startswith(f"hf_packing.{room}")]
    doors = {name for file in callers for name in imports_of(file) if name.startswith(f"hf_packing.{room}")}
    assert doors == {f"hf_packing.{room}"}


def test_errors_are_what_callers_catch_and_types_are_installed():
    assert issubclass(hfp.PackingError, ValueError)
    assert issubclass(hfp.MissingDependencyError, ImportError)
    assert issubclass(hfp.ModelNotSupportedError, hfp.PackingError)
    assert (PACKAGE / "py.typed").is_file()


ROOT = Path(__file__).parents[1]


def test_files_that_name_the_version_agree():
    assert f"\nversion: {hfp.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    newest, *_ = re.findall("^## (?!Unreleased$).*$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert re.search(r"[\d.]+\w*", newest)[0] == hfp.__version__


def test_they_are_in_the_documentation_and_those_of_the_project():
    page = (ROOT / "docs" / "COMPATIBILITY.md").read_text("utf-8")
    table = page.split("| package | oldest version |")[1].split("\n\n")[0]
    assert dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", table, re.MULTILINE)) == OLDEST
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    lowest = dict(re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)[",]', text))
    assert {name: version for name, version in lowest.items() if name in OLDEST} == OLDEST


@pytest.fixture
def old(monkeypatch):
    found = metadata.version

    def make_old(**versions):
        monkeypatch.setattr("hf_packing.checks.version", lambda name: versions.get(name) or found(name))
        refuse_older.cache_clear()

    yield make_old
    refuse_older.cache_clear()


def test_older_versions_are_refused(old, monkeypatch):
    for installed in ("2.8.0+cpu", "1.13"):
        old(torch=installed)
        message = f'torch: expected version >=2.9, got {installed}; pip install "torch>=2.9"'
        with pytest.raises(hfp.PackingError, match=re.escape(message)):
            refuse_older("torch")
    for installed in (OLDEST["torch"], "2.9.0", "2.10.1+cu128", "3.0.0.dev20261101"):
        old(torch=installed)
        refuse_older("torch")
    old(datasets="5.0.0")
    message = 'datasets: expected version >=4.8.0,!=5.0.0, got 5.0.0; pip install "datasets>=4.8.0,!=5.0.0"'
    with pytest.raises(hfp.PackingError, match=re.escape(message)):
        refuse_older("datasets")
    monkeypatch.setitem(OLDEST, "no-such-package", "1.0")
    refuse_older("no-such-package")


FIRST_NAMES = {
    "numpy": "plan_packing",
    "pyarrow": "pack",
    "datasets": "mix",
    "torch": "TokenBudget",
    "transformers": "patch_model",
    "accelerate": "prepare_dataloader",
}

OLD = f"""
from importlib import metadata
import hf_packing as hfp
found = metadata.version
for package, name in {FIRST_NAMES}.items():
    metadata.version = lambda each: "0.9.1" if each == package else found(each)
    try:
        getattr(hfp, name)
    except hfp.PackingError as error:
        print(error)
"""


def test_the_first_name_that_needs_a_package_refuses_it():
    said = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, check=True).stdout.splitlines()
    for package, line in zip(FIRST_NAMES, said, strict=True):
        assert line.startswith(f"{package}: expected version >={OLDEST[package]}")
        assert "got 0.9.1; pip install" in line


@pytest.mark.filterwarnings("default::FutureWarning")  # PEFT uses names that transformers has renamed
def test_peft_is_refused_where_it_wraps_a_model(old):
    model = peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
    old(peft="0.17.1")
    hfp.patch_model(build("Llama"))
    with pytest.raises(hfp.PackingError, match=f"peft: expected version >={OLDEST['peft']}, got 0.17.1"):
        hfp.patch_model(model)


@pytest.mark.filterwarnings("default::FutureWarning")  # TRL does, too
@pytest.mark.parametrize("batching", [hfp.TokenBudget(64), None])
def test_trl_is_refused_where_a_trainer_is_attached(old, tmp_path, batching):
    of_transformers, of_trl = (trainer_of(tmp_path / kind.__name__, kind) for kind in (Trainer, SFTTrainer))
    old(trl="1.3.0")
    hfp.attach(of_transformers, batching)
    with pytest.raises(hfp.PackingError, match=f"trl: expected version >={OLDEST['trl']}, got 1.3.0"):
        hfp.attach(of_trl, batching)


def test_fingerprints_indices_tables_and_descriptions_of_a_dataset():
    """rows.cache.fingerprint_of: without it, packed rows cannot be cached by what they were made from."""
    one, same, other = (datasets.Dataset.from_dict({"input_ids": rows}) for rows in ([[1]], [[1]], [[2]]))
    assert isinstance(one._fingerprint, str)
    assert one._fingerprint == same._fingerprint != other._fingerprint
    assert isinstance(Hasher.hash((one._fingerprint, 1)), str)
    # rows.token_columns.row_numbers: without it, a shuffled dataset would be packed in the order of its table.
    dataset = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3]]})
    assert dataset._indices is None
    assert dataset.select([2, 0])._indices.column(0).to_pylist() == [2, 0]
    # rows.pack._pack_split: without it, the packed dataset is not memory-mapped.
    assert callable(MemoryMappedTable.from_file)
    assert {"arrow_table", "split", "fingerprint"} <= set(inspect.signature(datasets.Dataset.__init__).parameters)
    # rows.packing_trace: without it, packed rows that have lost their borders are taken for documents.
    info = datasets.DatasetInfo(description="Mine")
    one, other = (datasets.Dataset.from_dict({"a": [1], "b": [2]}, info=each) for each in (info, None))
    joined = datasets.concatenate_datasets([other, one])
    changed = (joined, one.select_columns("a"), one.map(lambda _: {"c": 1}), one.with_format("torch").shuffle())
    assert [each.info.description for each in changed] == ["Mine"] * 4


def test_loaders_and_models_that_an_accelerator_knows():
    """batch.loader.active_loader: without it, a patched model does not know the dataset that its batch is of."""
    accelerator = Accelerator(cpu=True)
    rows = [{"input_ids": torch.ones(2)}] * 2
    loader = accelerator.prepare(DataLoader(rows, batch_size=2, collate_fn=list))
    assert accelerator.gradient_state.active_dataloader is None
    for _ in loader:
        assert accelerator.gradient_state.active_dataloader is loader
        assert (loader.dataset, loader.collate_fn, loader.batch_sampler.batch_size) == (rows, list, 2)
    # training.models.prepared_model: without it, a loader proves isolation on a model without FSDP's wrapper.
    accelerator, model = Accelerator(cpu=True), build("Llama")
    assert prepared_model(accelerator, model) is model
    wrapper = torch.nn.Module()
    wrapper.module = model
    assert accelerator.prepare(model) is model
    assert accelerator._models == [model]
    accelerator._models[:] = [wrapper]
    assert prepared_model(accelerator, model) is wrapper


def test_batches_of_a_map():
    """rows.map_batch.pack_batch: without it, map hands out Python lists, and stores what it gets back as int64."""
    seen = []
    datasets.Dataset.from_dict({"input_ids": [[1]]}).map(lambda batch: seen.append(batch.pa_table), batched=True)
    assert isinstance(seen[0], pa.Table)
    # rows.map_batch: without their classes a row passes for a batch, without keys_to_format a change is lost.
    seen = []
    dataset = datasets.Dataset.from_dict({"input_ids": [[1]]})
    for batched in (False, True):
        dataset.map(seen.append, batched=batched)
    assert [type(each).__name__ for each in seen] == ["LazyRow", "LazyBatch"]
    assert seen[1].keys_to_format == {"input_ids"}
    seen[1]["labels"] = [[2]]
    assert set(seen[1]) == {"input_ids", "labels"}


def test_attention_of_models_and_flex_attention():
    """attention.function.register: without them, transformers cannot be told of our attention function."""
    assert callable(AttentionInterface.register)
    assert callable(AttentionMaskInterface.register)
    assert "attention_mask" in inspect.signature(flash_attention_mask).parameters
    # attention.flex: without these, masks cannot be made from borders, or would be compiled for each row again.
    (decoding,) = Path(torch.__file__).parent.glob("_inductor/kernel/flex/flex_decoding.py")  # importing it takes long
    assert {"seq_lengths", "full_q_indices", "mask_mod"} <= set(inspect.signature(BlockMask).parameters)
    assert "FORCE_USE_FLEX_ATTENTION" in decoding.read_text("utf-8")
    assert callable(torch._dynamo.mark_static)
    # attention.snapshot.attention_of: without it, a patch cannot be undone or refused.
    assert PreTrainedModel._can_set_attn_implementation is not None
    model = build("Llama")
    assert model._can_set_attn_implementation()
    assert isinstance(model.config._attn_implementation, str)
    assert isinstance(model.config.sub_configs, dict)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation_internal == "eager"


OTHER_CACHES = {"decoder_cache", "encoder_cache", "encoder_past_key_values", "padding_cache"}
"""Caches of models that read sound."""


def test_names_of_caches_and_kernels_from_the_hub(monkeypatch):
    """attention.layout.CACHES: under another name, a cache would be dropped, and logits would be wrong."""
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        forwards = re.findall(r"\n    def forward\(\n(.*?)\n    \)", path.read_text("utf-8"), re.DOTALL)
        taken = "\n".join(each for each in forwards if "input_ids" in each)
        found |= set(re.findall(r"^ +(\w+): [^=\n]*Cache", taken, re.MULTILINE))
    assert found >= {"past_buckets_states"}
    assert found & {"cache", "past_key_values"}
    assert found <= {*CACHES, *OTHER_CACHES}
    # attention.kernels.hub_kernel: without it, a model loaded with a hub kernel would run on another one.
    assert is_kernel("kernels-community/flash-attn2")
    assert not any(map(is_kernel, ("sdpa", "flash_attention_2", "hf_packing_varlen", None)))
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", "kernels-community/flash-attn2")
    monkeypatch.setattr(modeling_flash_attention_utils, "_flash_varlen_fn", print)
    functions = modeling_flash_attention_utils.lazy_import_flash_attention("kernels-community/flash-attn2")[0]
    assert functions[1] is print


class Told(torch.utils.data.Dataset):
    epoch = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_loaders_that_are_prepared():
    """sampling.rows.SampledRows: without it, a resumed epoch would have the order of another."""
    dataset = Told()
    batches = [[0], [1, 2], [3]]
    loader = prepare_data_loader(DataLoader(dataset, batch_sampler=batches), num_processes=1, process_index=0)
    loader.set_epoch(3)
    assert dataset.epoch == 3
    skipped = skip_first_batches(loader, 1)
    skipped.set_epoch(4)
    assert dataset.epoch == 4
    assert [batch.tolist() for batch in skipped] == batches[1:]
    # training.loader.PackedLoader: with a remainder, gather_for_metrics would cut the last batches.
    loader = prepare_data_loader(DataLoader(Told(), batch_sampler=[[0, 1, 2], [3]]), num_processes=1, process_index=0)
    list(loader)
    assert loader.remainder == -1


def test_what_trainers_call_and_compute():
    """training.trainer.PackedTrainer: without these, batches and losses would be the trainer's own again."""
    taken = list(inspect.signature(Trainer.get_batch_samples).parameters)
    assert taken == ["self", "epoch_iterator", "num_batches", "device"]
    source = inspect.getsource(Trainer)
    for call in ("self.get_train_dataloader()", "self.get_eval_dataloader(", "self.get_batch_samples("):
        assert call in source
    assert "self.current_gradient_accumulation_steps = " in source
    assert source.count("self._maybe_log_save_evaluate(") == 2
    condition = "if self.control.should_log and self.state.global_step > self._globalstep_last_logged:"
    assert condition in source
    assert "self.model_accepts_loss_kwargs" in source
    # training.trainer: its metrics would see a document that is none, and its loss could not be weighted.
    source = inspect.getsource(sft_trainer)
    assert "self._metrics[" in source
    assert "log_probs" in source


def test_what_callbacks_save_and_templates_mark(tmp_path):
    """training.resume.BatchesOfCheckpoint: without it, a resumed run could not compare its batches."""
    state = TrainerState(stateful_callbacks=[BatchesOfCheckpoint()])
    state.save_to_json(tmp_path / "state.json")
    found = TrainerState.load_from_json(tmp_path / "state.json").stateful_callbacks
    assert found == {"BatchesOfCheckpoint": {"args": {}, "attributes": {"batches": None}}}
    # text.render: without it, the marks of a chat template could not be read.
    template = "{% for message in messages %}<{% generation %}{{ message.content }}{% endgeneration %}>{% endfor %}"
    chats = [[{"role": "assistant", "content": "ab"}]]
    found = render_jinja_template(chats, chat_template=template, return_assistant_tokens_mask=True)
    assert found == (["<ab>"], [[(1, 3)]])
