"""README, docs and docstrings: Python runs and prints what they say, links resolve, pictures are drawn.

HF_PACKING_WRITE_PAGES=1 python -m pytest tests/test_documentation.py writes what is printed into the pages.
"""

import ast
import contextlib
import doctest
import importlib
import io
import json
import os
import re
import string
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import trl
import yaml
from accelerate import Accelerator
from chat_templates import FROM_TRL
from matplotlib import image
from tiers import fast_only
from tiny_models import SIZES, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainers import documents
from transformers import PreTrainedTokenizerFast

import hf_packing as hfp
from hf_packing.attention.route import known_routes
from hf_packing.training.step_counts import StepCounts
from hf_packing.upstream.trl import hides_logits

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed

ROOT, PACKAGE = Path(__file__).parent.parent, Path(hfp.__file__).parent
DOCS, PICTURES = ROOT / "docs", ROOT / "docs" / "pictures"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    *sorted(DOCS.rglob("*.md")),
]
PYTHON = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
"""A block of Python; a block of text right after it is what it prints."""
TEST = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
QUICK = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False}
QUICK |= {"dataloader_pin_memory": False, "disable_tqdm": True, "logging_strategy": "no"}


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WORDS = ["user", "assistant", "<think>", "</think>", "\n\n", "What", " is", " packing"]
WORDS += ["Many", " documents", " in", " one", " row"]
"""Tokens that Qwen3 has, too: the chat of the README has as many tokens as with the tokenizer that it names."""


def tokenizer(vocabulary: int = 128) -> PreTrainedTokenizerFast:
    """One token for each of `WORDS` and other bytes, as far as the vocabulary of the tiny models goes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [each for each in alphabet if each in string.printable or each in "ĠĊ"]
    known = {each: number for number, each in enumerate(["<pad>", "<bos>", "<eos>", "<mask>", *letters][:vocabulary])}
    made = Tokenizer(models.BPE(known, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "mask_token": "<mask>", "chat_template": FROM_TRL["qwen3"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **named)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(WORDS)
    return tokenizer


def masked_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


@pytest.fixture
def page_names(tmp_path, monkeypatch) -> dict:
    """What a reader of the pages has: small files, tiny models by any name, and the names that pages use."""
    monkeypatch.chdir(tmp_path)
    known_routes.clear()  # a reader runs a page in a new process
    rng = np.random.default_rng(0)
    texts = ["lorem ipsum " * int(times) for times in rng.integers(1, 9, 60)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "files").mkdir()
    for number in range(8):
        lines = [json.dumps({"text": text}) for text in texts[number::8]]
        (tmp_path / "files" / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "tokens").mkdir()
    for number in range(3):
        documents(20 + number).to_parquet(tmp_path / "tokens" / f"{number}.parquet")
    chats = ({"prompt": text[:20], "completion": text[20:40]} for text in texts)
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(chat) for chat in chats))
    for name, made in {
        "AutoModelForCausalLM": lambda *_, **__: build("Llama"),
        "AutoModelForMaskedLM": lambda *_, **__: masked_model(),
        "AutoTokenizer": lambda *_, **__: tokenizer(),
        "AutoProcessor": lambda *_, **__: tokenizer(),
    }.items():
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", made)
    shown = hides_logits(trl.SFTConfig("out", **QUICK)) and {"loss_type": "nll"}  # as attach asks for before TRL 1.16
    for arguments, more in ((transformers.TrainingArguments, {}), (trl.SFTConfig, shown or {})):
        init, also = arguments.__init__, QUICK | more
        monkeypatch.setattr(
            arguments, "__init__", lambda self, *a, init=init, also=also, **k: init(self, *a, **(k | also))
        )
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    tokenized = documents(60)
    lengths = np.clip(rng.lognormal(6, 0.8, 500), 1, 4096).astype(int)
    return {
        "__name__": "__main__",
        "tokenized": tokenized,
        "packed": hfp.pack(tokenized, hfp.BestFit(64)),
        "lengths": lengths.tolist(),
        "model": build("Llama"),
        "trainer": transformers.Trainer(build("Llama"), transformers.TrainingArguments("out"), train_dataset=tokenized),
        "accelerator": Accelerator(),
    }


def run(page: Path, names_of_page: dict) -> str:
    """The page, with what its blocks print where it says what they print."""

    def printed(block: re.Match[str]) -> str:
        # on the lines that the block has in the page, for tracebacks
        code = "\n" * page_text[: block.start()].count("\n") + "\n" + block["code"]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, str(page), "exec"), names_of_page)
        said = block["printed"]
        if said is None or doctest.OutputChecker().check_output(said, output.getvalue(), doctest.ELLIPSIS):
            return block[0]
        return block[0].replace(f"```text\n{said}", f"```text\n{output.getvalue()}")

    page_text = page.read_text()
    return PYTHON.sub(printed, page_text)


WITH_PYTHON = [page for page in PAGES if PYTHON.search(page.read_text())]


@pytest.mark.parametrize("page", fast_only(WITH_PYTHON, ROOT / "README.md", DOCS / "guides" / "pack.md"), ids=names)
def test_python_runs_and_prints_what_the_page_says(page, page_names):
    text = run(page, page_names)
    if os.environ.get("HF_PACKING_WRITE_PAGES"):
        page.write_text(text)
    assert text == page.read_text()


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./~%=?&+-]*)?", target), f"{page.name}: {target}"
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name}: {target}"
        assert found.is_relative_to(ROOT), f"{page.name}: {target}"
        if anchor:
            there = TEST.findall(found.read_text()) if found.suffix == ".py" else anchors(found)
            assert anchor in there, f"{page.name}: {target}#{anchor}"


def test_rows_about_versions_and_features_name_a_test():
    text = (DOCS / "COMPATIBILITY.md").read_text()
    tables = re.findall(r"^\|[^\n]* shown by \|\n\|[-|]+\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(tables) == 2
    assert len(rows) > 40
    for row in rows:
        assert "](../tests/" in row.split(" | ")[-1], row


VARIES = re.compile(r"\.\.\.|'[^']*'|\d[\d,]*")
"""What messages on a page stand for differs from run to run."""


def texts_of(file: Path) -> list[str]:
    """The texts in a file, with a null where a value is put in."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    parts = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    parts += [[node] for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [
        "".join(getattr(part, "value", "") if isinstance(part, ast.Constant) else "\0" for part in of) for of in parts
    ]


def has_in_order(parts: list[str], text: str) -> bool:
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_messages_that_troubleshooting_quotes_are_those_of_the_package():
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`", "", (DOCS / "TROUBLESHOOTING.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    quoted = [re.sub(r"\s+", " ", each) for each in re.findall(r'"([^"]*)"', text)]
    messages = [text for file in sorted(PACKAGE.rglob("*.py")) for text in texts_of(file)]
    assert len(quoted) > 25

    def is_said(words):
        return any(has_in_order(VARIES.split(words), message) for message in messages)

    assert not is_said("trainer: expected a thing that nobody expects")
    assert not [words for words in quoted if not is_said(words)]


def navigation(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in navigation(each)]


def test_every_page_is_in_the_navigation_of_the_site():
    pages = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(page for page in pages if (DOCS / page).exists()) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )
    assert all((DOCS / page).exists() or (ROOT / page).exists() for page in pages)


def test_make_targets_and_files_that_pages_name_exist():
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for page in PAGES:
        for target in re.findall(r"\bmake ([a-z][\w-]*)`|^make ([\w-]+)", page.read_text(), flags=re.MULTILINE):
            assert "".join(target) in targets, f"{page.name}: make {''.join(target)}"
    tops = (PACKAGE, ROOT / "tests", ROOT / "tools", DOCS)
    files = [f"/{path.as_posix()}" for top in tops for path in top.rglob("*.py")]
    text = "".join(page.read_text() for page in (DOCS / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"))
    for name in re.findall(r"`([a-z_/]+\.py)`", text):
        assert any(path.endswith(f"/{name}") for path in files), name


def test_the_readme_is_short_and_the_reference_complete():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    cells = re.findall(r"^\| (`.*?) \|", (DOCS / "API.md").read_text(), re.MULTILINE)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)[`(]", cell)) == hfp.__all__
    blocks = [block for page in PAGES for block in PYTHON.finditer(page.read_text())]
    assert len(blocks) > 40
    assert sum(block["printed"] is not None for block in blocks) > 10
    facts = StepCounts()
    facts.add(torch.ones(2, 1, 4, dtype=torch.int64))
    logged = facts.take(max_tokens=4)
    assert len(logged) == 5
    text = (DOCS / "guides" / "train.md").read_text()
    assert all(f"\n| `{name}` | " in text for name in logged)


@pytest.mark.slow
def test_pictures_are_those_of_their_script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PICTURES))
    draw = __import__("draw")
    draw.main(tmp_path)
    for name in draw.PICTURES:
        made, kept = tmp_path / name, PICTURES / name
        if name.endswith(".svg"):
            words = re.compile("<!-- (.*?) -->")
            assert words.findall(made.read_text()) == words.findall(kept.read_text())
            continue
        made, kept = image.imread(made), image.imread(kept)
        assert made.shape == kept.shape
        assert np.abs(made - kept).mean() < 0.02, name  # fonts differ between machines


def test_every_picture_is_shown_and_every_strategy_has_a_section():
    text = "".join(page.read_text() for page in PAGES)
    for picture in [*PICTURES.glob("*.png"), *PICTURES.glob("*.svg")]:
        assert f"pictures/{picture.name})" in text, picture.name
    classes = {name: getattr(hfp, name) for name in hfp.__all__ if isinstance(getattr(hfp, name), type)}
    strategies = [name for name, each in classes.items() if "Strategy" in (base.__name__ for base in each.__mro__)]
    assert len(strategies) >= 9
    overview, *sections = (DOCS / "guides" / "strategies.md").read_text().split("\n## ")
    pictures = dict(section.split("\n", 1) for section in sections)
    for name in strategies:
        file = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        assert f"](../pictures/{file}.png)" in pictures[name]
        assert f"(#{name.lower()})" in overview


FILES = [file.relative_to(PACKAGE.parent) for file in sorted(PACKAGE.rglob("*.py")) if ">>>" in file.read_text()]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_examples(file):
    name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    failed, run = doctest.testmod(importlib.import_module(name))
    assert run
    assert not failed


WITHOUT_EXAMPLE = {
    "ComparedStrategy",
    "Comparison",
    "EpochPlan",
    "EpochSummary",
    "IsolationReport",
    "PackedLoader",
    "PackingMetrics",
    "PackingError",
    "MissingDependencyError",
    "ModelNotSupportedError",
}
"""Returned or raised, never called by a user."""


def test_public_names_have_an_example():
    assert ">>>" in hfp.fleet.PackedCorpus.__doc__
    names = {name for name in hfp._HOME_OF if ">>>" not in (getattr(hfp, name).__doc__ or "")}
    assert names <= WITHOUT_EXAMPLE
