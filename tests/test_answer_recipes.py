"""The recipes that answer questions and embed texts, run as a user runs them, on less."""

import shutil
from pathlib import Path

import common
import datasets
import numpy as np
import pytest
import squad
from processes import run_script
from recipe_inputs import SMALLER, questions, write
from transformers import EvalPrediction

import hf_packing as hfp

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

RECIPES = Path(__file__).parent.parent / "recipes"
FUNCTIONS = [
    '    def area(self, width, height=2):\n        """Return it.\n\n        In m2."""\n        return width * height\n',
    "def nothing():\n    pass\n",
    'def größe(text, *, encoding="ü"):\n    é = len(text)\n    return (é, encoding)\n',
    "def two(x):\n    if x:\n        return 1\n    return 2\n",
    "def stars(*args):\n    return args\n",
]


def test_squad(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common, "SIZES", SMALLER)
    data = write(tmp_path / "rows.jsonl", questions())
    flags = ["--data", data, "--max_length", 32, "--doc_stride", 8, "--num_train_epochs", 1]
    flags = [*map(str, flags), "--output_dir", str(tmp_path / "out")]
    metrics = squad.main(flags)
    assert 0 <= metrics["eval_exact_match"] <= metrics["eval_f1"] <= 100
    said = capsys.readouterr().out
    assert "36 questions, 29 answered, in " in said
    assert "4 questions, 3 answered, in " in said
    assert said.count(" windows have no answer, 0 answers are in no window") == 2
    assert "its tokens run as one packed row" in said
    assert "on 4 questions: exact match" in said
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_answers_are_in_the_windows_that_have_them():
    rows = datasets.Dataset.from_list(questions())
    tokenizer = common.load_tokenizer(None, rows["context"], masked=True)
    found = squad.cut(rows, tokenizer, length=24, stride=8)
    assert len(found) > len(rows)
    right = 0
    for window in found:
        row, start, end = rows[window["row"]], window["start_positions"], window["end_positions"]
        assert window["input_ids"][0] == tokenizer.cls_token_id
        text = tokenizer.decode(window["input_ids"][start : end + 1])
        in_context = [place for place in window["offsets"] if place[0] >= 0]
        first, last = in_context[0][0], in_context[-1][1]
        gold = row["answers"]["answer_start"]
        if gold and first <= gold[0] and gold[0] + len("gold") <= last:
            assert text.strip() == "gold"
            right += 1
        else:
            assert start == end == 0
    assert right >= 32

    logits = np.full((2, len(found), 24), -9.0)
    for number, (first, last) in enumerate(zip(found["start_positions"], found["end_positions"], strict=True)):
        logits[:, number, [first, last]] = [[9 + (first > 0)], [9 + (last > 0)]]
    predicted = EvalPrediction(predictions=tuple(logits), label_ids=None)
    assert squad.scores(predicted, found, rows, longest=8) == {"exact_match": 100, "f1": 100}
    assert squad.scores(predicted, found, rows, longest=0)["exact_match"] == 20  # no span: right where is no answer


@pytest.mark.parametrize(
    ("text", "right", "scores"),
    [
        ("The  Gold.", ["silver", "gold"], (1, 1)),
        ("gold and silver", ["gold"], (0, 0.5)),
        ("", [], (1, 1)),
        ("gold", [], (0, 0)),
        ("", ["gold"], (0, 0)),
    ],
)
def test_words_are_compared_as_squad_does(text, right, scores):
    assert squad.compare(text, right) == pytest.approx(scores)


def test_questions_and_descriptions_of_functions(monkeypatch):
    texts = FUNCTIONS[:1] + FUNCTIONS[:3] + FUNCTIONS[2:]
    monkeypatch.setattr(common, "functions", lambda: datasets.Dataset.from_dict({"text": texts}))
    rows = list(common.questions())
    found = {row["question"]: row["answers"]["text"][0] for row in rows}
    assert found == {
        "What does area return?": "width * height",
        "Which arguments does area take?": "self, width, height=2",
        "Which arguments does größe take?": 'text, *, encoding="ü"',
        "What does größe return?": "(é, encoding)",
        "What does two return?": "1",
        "Which arguments does stars take?": "*args",
    }
    for row in rows:
        start, text = row["answers"]["answer_start"][0], row["answers"]["text"][0]
        assert row["context"][start : start + len(text)] == text
    monkeypatch.setattr(common, "functions", lambda: datasets.Dataset.from_dict({"text": FUNCTIONS}))
    (row,) = common.described()
    assert row == {
        "anchor": "Return it.",
        "positive": "    def area(self, width, height=2):\n        return width * height\n",
    }


def pairs(folder, number=60):
    rng = np.random.default_rng(1)
    names = [f"{chr(97 + n % 26)}{n}" for n in range(number)]
    rows = [{"anchor": f"about {name}", "positive": f"{name} " * int(rng.integers(1, 12))} for name in names]
    known = {
        "data": write(folder / "pairs.jsonl", rows),
        "per_device_train_batch_size": 8,
        "max_length": 32,
        "max_steps": 4,
    }
    return [text for name, value in (known | {"save_steps": 2}).items() for text in (f"--{name}", str(value))]


@pytest.mark.slow
def test_embed(tmp_path, capsys):
    pytest.importorskip("sentence_transformers")
    import embed

    flags = [*pairs(tmp_path), "--output_dir", str(tmp_path / "out")]
    whole = embed.main(flags)
    said = capsys.readouterr().out
    assert "its tokens run as one packed row" in said
    assert "0 of 108 texts have 32 tokens or are truncated to it" in said
    assert f"{whole['cosine_accuracy@1']:.1%} of 6 anchors are closest to their own text among all of them" in said
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert embed.main([*flags, "--resume_from_checkpoint", "last"]) == whole
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    with pytest.raises(SystemExit) as ended:
        embed.main([*flags, "--resume_from_checkpoint", "last"])
    assert ended.value.code == 0


@pytest.mark.slow
def test_embed_on_two_processes(tmp_path):
    pytest.importorskip("sentence_transformers")
    done = run_script(RECIPES / "embed.py", *pairs(tmp_path), "--output_dir", tmp_path / "out", ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("anchors are closest") == 1


@pytest.mark.slow
def test_embeddings_are_those_of_the_encoder_without_the_patch(tmp_path):
    transformers = pytest.importorskip("sentence_transformers")
    texts = [f"word {n} " * (n % 7 + 1) for n in range(40)]
    model = transformers.SentenceTransformer(common.save_small(str(tmp_path), texts, encoder=True)).double()
    alone = np.concatenate([model.encode([text]) for text in texts])
    hfp.patch_model(model[0].auto_model)
    for side in ("right", "left"):
        model.tokenizer.padding_side = side
        assert np.abs(model.encode(texts, batch_size=8) - alone).max() < 1e-12
    tokens = model.tokenizer(texts)["input_ids"]
    assert np.abs(hfp.score(model[0].auto_model, tokens, hidden="mean").hidden - alone).max() < 1e-6
