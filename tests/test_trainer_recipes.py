"""The recipes that train, run as a user runs them: what each does, what it refuses, and how it stops and goes on."""

import shutil

import accelerate_loop
import classify
import common
import datasets
import dpo
import grpo
import long_context
import mlm
import numpy as np
import pretrain_bucket
import pytest
import reward
import sft
import squad
import torch
import trl
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from processes import RECIPES, run_script
from recipe_inputs import SMALLER, prompts, questions, save_tiny_model, weights, write
from safetensors.torch import load_file
from tiers import fast_only
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    EvalPrediction,
)

import hf_packing as hfp
from hf_packing.upstream.trl import cuts_in_collator

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CPU = ("--use_cpu", "True", "--bf16", "False", "--report_to", "none", "--disable_tqdm", "True")


@pytest.fixture(autouse=True)
def smaller_models(monkeypatch):
    """Models from scratch, whose proofs take most of the time."""
    monkeypatch.setattr(common, "SIZES", SMALLER)


refuse_lost_pieces = common.refuse_lost_pieces


@pytest.fixture(autouse=True)
def skipped_where_pieces_are_lost(monkeypatch):
    """Skip tests of recipes that refuse the installed tokenizers."""

    def skip():
        try:
            refuse_lost_pieces()
        except hfp.PackingError as error:
            pytest.skip(str(error))

    monkeypatch.setattr(common, "refuse_lost_pieces", skip)


def test_tokenizers_that_loses_pieces_is_refused(monkeypatch):
    """Of a text of 10 tokens, in pieces of 4, tokenizers 0.23.1 and 0.23.2 return the first piece alone."""
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(10)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(4)
    pieces = tokenizer.encode(" ".join(map(str, range(10)))).overflowing
    if [piece.ids for piece in pieces] == [[4, 5, 6, 7], [8, 9]]:
        refuse_lost_pieces()
        monkeypatch.setattr(common, "version", {"tokenizers": "0.23.1"}.get)
    with pytest.raises(hfp.PackingError, match=r"tokenizers: expected a version .*, got 0\.23\.[12], which loses most"):
        refuse_lost_pieces()


def words(number, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(["aa", "bb", "cc."], rng.integers(1, 20))) for _ in range(number)]


def labeled(pair=False):
    more = {"text_pair": "dd"} if pair else {}
    return [{"text": text, "label": ["no", "yes"][n % 2], **more} for n, text in enumerate(words(60))]


def preferred(number=31, **more):
    answers = zip(words(number, 1), words(number, 2), strict=True)
    return [{"chosen": chosen, "rejected": rejected, **more} for chosen, rejected in answers]


def pairs(number=24):
    return [
        {"prompt": f"say {n} ", "chosen": "yes " * (n % 5 + 1), "rejected": "no " * (n % 3 + 1)} for n in range(number)
    ]


LONG = {"prompt": "say " * 9, "chosen": "yes", "rejected": "no"}


def texts(number=40):
    return [{"text": text} for text in words(number)]


GENERATED = ("--max_completion_length", 8, "--num_generations", 4, "--per_device_train_batch_size", 8)
BUCKETS = ("--max_tokens", 128, "--buckets", 16, 32, 64, "--model", "{model}")
RUNS = {
    classify: (labeled(), ("--max_tokens", 256, "--max_length", 20), "accuracy on 6 rows"),
    dpo: (pairs(), ("--max_tokens", 400), "2 x "),  # ranks x micro-batches
    reward: (preferred(prompt="say "), ("--max_tokens", 200, "--max_length", 40), "accuracy on 4 of 4 pairs"),
    mlm: (texts(), ("--max_tokens", 100, "--max_length", 16, "--whole_words"), "loss on "),
    grpo: ([{"prompt": "say " * (n % 4 + 1)} for n in range(12)], GENERATED, "mean reward: "),
    squad: (questions(), ("--max_length", 32, "--doc_stride", 8), "on 4 questions: exact match"),
    sft: (prompts(), ("--max_tokens", 80, *CPU, "--model_name_or_path", "{model}"), "2 x "),
    accelerate_loop: (texts(80), ("--max_tokens", 512, "--loss", "sequence", "--model", "{model}"), "evaluation loss "),
    pretrain_bucket: (texts(300), BUCKETS, "of the last "),
    long_context: (texts(300), ("--max_tokens", 40, "--model", "{model}"), "on held-out documents"),
}
"""Of each recipe: rows, flags, and what one of two processes prints once at the end."""
MAIN = {recipe.__name__: recipe.main for recipe in RUNS}
RUN_OF = {recipe.__name__: run for recipe, run in RUNS.items()}


def flags_of(recipe, folder, *more, rows=None):
    own_rows, flags, _ = RUN_OF[recipe]
    data, model = write(folder / "rows.jsonl", rows or own_rows), folder / "model"
    if "{model}" in flags and not model.exists():
        save_tiny_model(model)
    known = [str(each).format(model=model) for each in flags]
    return [*map(str, ("--data", data, *known, "--output_dir", folder / "out", *more))]


@pytest.mark.parametrize("pair", fast_only([False, True], True))
def test_classify(pair, tmp_path, capsys):
    flags = flags_of("classify", tmp_path, "--num_train_epochs", 1, rows=labeled(pair))
    metrics = classify.main([*flags, "--match_documents_per_step", "9"])
    assert 0 <= metrics["eval_accuracy"] <= 1
    said = capsys.readouterr().out
    assert not said.startswith("0 of 60")
    for text in ("of 60 texts have 20", "a mean of labeled rows", "each with 9.0 documents", "accuracy on 6 rows"):
        assert text in said
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.label2id == {"no": 0, "yes": 1}


def test_dpo(tmp_path, capsys):
    test = write(tmp_path / "test.jsonl", [*pairs(7), LONG])
    model = save_tiny_model(tmp_path / "model", num_hidden_layers=1)
    flags = ("--max_steps", 2, "--max_length", 25, "--model_name_or_path", model)
    flags += ("--eval_data", test, "--eval_strategy", "steps", "--eval_steps", 1)
    trainer = dpo.main(flags_of("dpo", tmp_path, *flags, rows=[*pairs(), LONG]))
    assert trainer.state.global_step == 2
    assert sum("eval_loss" in logged for logged in trainer.state.log_history) == 2
    said = capsys.readouterr().out
    if cuts_in_collator():  # older TRL leaves out no pair: 29 tokens of the long one are cut
        assert "0 rows left out, 39 tokens lost" in said
        assert "evaluation: 2 of 8 pairs are truncated, 0 left out" in said
    else:
        assert "1 rows left out, 89 tokens lost" in said  # 79 of the long pair, and 10 that are cut from four answers
        assert "evaluation: 1 of 7 pairs are truncated, 1 left out" in said
    assert "the loss is a mean of rows" in said
    assert "ref_model: LlamaForCausalLM" in said


def test_reward(tmp_path, capsys):
    """The accuracy is that of the saved model on each pair alone; long pairs are counted."""
    pairs = preferred(26)
    long = {"chosen": "aa " * 99, "rejected": "bb"}
    train = write(tmp_path / "train.jsonl", [*preferred(), long])  # without prompts
    test = write(tmp_path / "test.jsonl", [*pairs, long])
    flags = flags_of("reward", tmp_path, "--eval_data", test, "--max_steps", 3, "--match_documents_per_step", 5)
    accuracy = reward.main([*flags, "--data", str(train)])["eval_accuracy"]
    said = capsys.readouterr().out
    assert "1 rows left out, " in said
    assert "the loss is a mean of rows" in said
    assert f"accuracy on 26 of 27 pairs: {accuracy:.3f}" in said
    model, tokenizer = (
        kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )

    def rewarded(text):
        with torch.no_grad():
            return model(**tokenizer(text + tokenizer.eos_token, return_tensors="pt")).logits.item()

    assert accuracy == np.mean([rewarded(row["chosen"]) > rewarded(row["rejected"]) for row in pairs])
    assert 0 < accuracy < 1


@pytest.mark.parametrize("masked", [True, False])
def test_splitting_loses_no_token(masked):
    rows = datasets.Dataset.from_list(texts())
    tokenizer = common.load_tokenizer(None, rows["text"], masked)
    documents = mlm.tokenize(rows, tokenizer, 7, whole_words=False)
    assert max(map(len, documents["input_ids"])) == 7
    kept = [np.array(row["input_ids"])[np.array(row["special_tokens_mask"]) == 0] for row in documents]
    whole = [token for text in rows["text"] for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert np.concatenate(kept).tolist() == whole


def test_whole_words_of_tokens_that_begin_with_a_space():
    tokenizer = common.load_tokenizer(None, ["x"], masked=True)  # a token for each byte
    (document,) = mlm.tokenize(datasets.Dataset.from_list([{"text": "aa" + " bb" * 40}]), tokenizer, 200, True)
    torch.manual_seed(0)
    ids, special, places = (
        torch.tensor([document[name]]) for name in ("input_ids", "special_tokens_mask", "offset_mapping")
    )
    masks = {"mlm_probability": 0.3, "whole_word_mask": True, "mask_replace_prob": 1, "random_replace_prob": 0}
    _, labels = DataCollatorForLanguageModeling(tokenizer, **masks).torch_mask_tokens(ids, special, places)
    of_word = [set(word.tolist()) for word in (labels[0] != -100)[1:-1].split([2] + [3] * 40)]
    assert all(len(chosen) == 1 for chosen in of_word)
    assert {True} in of_word
    assert {False} in of_word


LORA = [("dpo", AutoPeftModelForCausalLM, {}), ("reward", AutoPeftModelForSequenceClassification, {"num_labels": 1})]


@pytest.mark.parametrize(("recipe", "kind", "options"), fast_only(LORA, LORA[1]))
def test_adapters(recipe, kind, options, tmp_path, capsys):
    model = save_tiny_model(tmp_path / "model", num_hidden_layers=1)
    flags = flags_of(recipe, tmp_path, "--max_steps", 2, "--model_name_or_path", model, "--use_peft", "--lora_r", 4)
    MAIN[recipe]([*flags, "--learning_rate", "0.01"])
    assert "ref_model" not in capsys.readouterr().out
    trained = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in trained.items() if "lora_B" in name)
    assert any("score" in name for name in trained) == (recipe == "reward")  # a new head is trained and saved whole
    found = kind.from_pretrained(tmp_path / "out", **options)
    assert found.peft_config["default"].r == 4
    before = load_file(tmp_path / "model" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(found.get_base_model().model.norm.weight, before)


@pytest.mark.parametrize("lora", fast_only([False, True], False))
def test_grpo(tmp_path, capsys, lora):
    model = save_tiny_model(tmp_path / "model", num_hidden_layers=1)
    flags = ("--max_steps", 1, "--reward", "length:20", "--beta", 0.1, "--model_name_or_path", model)
    trainer = grpo.main(flags_of("grpo", tmp_path, *flags, *(["--use_peft"] if lora else [])))
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() == lora
    said = capsys.readouterr().out
    assert "model: LlamaForCausalLM, its tokens run as one packed row" in said
    assert ("ref_model: LlamaForCausalLM, its tokens run as one packed row" in said) != lora
    assert f"mean reward: {trainer.state.log_history[0]['rewards/reward/mean']:.3f} in the first 1 steps" in said


def test_distill(tmp_path, capsys):
    if not hasattr(trl, "DistillationTrainer"):
        pytest.skip("an older TRL")
    import distill

    model, teacher = (
        save_tiny_model(tmp_path / name, num_hidden_layers=layers) for name, layers in (("a", 1), ("b", 2))
    )
    data = write(tmp_path / "rows.jsonl", [{"prompt": "say " * (n % 4 + 1)} for n in range(12)])
    flags = ["--data", data, "--output_dir", tmp_path / "out", "--max_completion_length", 8, "--max_steps", 2]
    named = ["--model_name_or_path", model]
    trainer = distill.main([*map(str, [*flags, *named, "--teacher", teacher])])
    said = capsys.readouterr().out
    assert "teacher_model: LlamaForCausalLM, its tokens run as one packed row" in said
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert f"loss: {losses[0]:.4f} in the first 1 steps, {losses[1]:.4f} in the last 1" in said
    with pytest.raises(ValueError, match="--teacher: expected one beside --model_name_or_path"):
        distill.main([*map(str, [*flags[:2], "--output_dir", tmp_path / "other", *named])])


def test_rewards_of_grpo():
    assert grpo.reward_of("length:4")(["abcd", "abc", "abcdef", "", "a" * 9]) == [1, 0.75, 0.5, 0, 0]
    assert grpo.reward_of("regex:a:?b+")(["abbc", "a:b", "", "c"]) == [0.75, 1, 0, 0]
    assert grpo.reward_of("length:2")([[{"role": "assistant", "content": "ab"}]]) == [1]
    for wrong in ("length:0", "length:x", "regex:", "regex:(", "short"):
        with pytest.raises(ValueError, match="--reward: expected"):
            grpo.reward_of(wrong)


MODEL = "{folder}/model"
REFUSED = [
    ("classify", [{"text": "a"}] * 20, (), "--data: expected columns text, label, got no label"),
    ("classify", None, ("--eval_data", "{folder}/maybe.jsonl"), "--eval_data: expected labels of --data, got 'maybe'"),
    ("classify", None, ("--resume_from_checkpoint", "last"), "--resume_from_checkpoint: expected a checkpoint in"),
    ("dpo", [{"prompt": "a", "chosen": "b"}], (), "--data: expected columns chosen, rejected, got no rejected"),
    ("grpo", [{"text": "a"}], (), "--data: expected columns prompt, got no prompt"),
    ("reward", [{"text": "a"}], (), "--data: expected columns chosen, rejected, got no chosen"),
    (
        "long_context",
        None,
        ("--compare", "--max_ranks_per_document", 2, "--gradient_accumulation_steps", 3),
        "--gradient_accumulation_steps: expected n x 2 with --compare, got 3",
    ),
    ("mlm", [{"prompt": "a"}], (), "--data: expected columns text, got no text"),
    ("mlm", None, ("--model", MODEL), "--model: expected one whose tokenizer has a mask token"),
    ("mlm", None, ("--mlm_probability", "1.5"), "mlm_probability should be between 0 and 1"),
    ("mlm", None, ("--no_such_flag", "1"), "--no_such_flag"),
    *(
        (loop, None, (flag, "0"), f"{flag}: expected an integer from 1, got 0")
        for loop in ("accelerate_loop", "pretrain_bucket")
        for flag in ("--gradient_accumulation_steps", "--num_train_epochs", "--save_steps")
    ),
    ("squad", [{"question": "a", "context": "b"}], (), "--data: expected columns question, context, answers, got no a"),
    (
        "squad",
        [{**row, "answers": {"text": ["gold"], "answer_start": [999]}} for row in questions(20)],
        (),
        "--data: expected answer 'gold' to 'where [0-9]+' at character 999, got ''",
    ),
    ("squad", None, ("--max_length", 10), "--max_length: expected more than the .* the 8 of --doc_stride, got 10"),
]


@pytest.mark.parametrize(("recipe", "rows", "flags", "message"), REFUSED)
def test_refused(tmp_path, recipe, rows, flags, message):
    write(tmp_path / "maybe.jsonl", [{"text": "a", "label": "maybe"}])
    if MODEL in flags:
        save_tiny_model(tmp_path / "model", "Bert")
    flags = [str(each).format(folder=tmp_path) for each in flags]
    with pytest.raises(ValueError, match=message):
        MAIN[recipe](flags_of(recipe, tmp_path, *flags, rows=rows))


LAST = ("--resume_from_checkpoint", "last")


@pytest.mark.parametrize("recipe", fast_only(MAIN, "classify"))
def test_a_resumed_run_is_the_unbroken_one(recipe, tmp_path, capsys):
    """A finished run trains nothing, and a checkpoint that was not written to its end is not the last."""
    flags, out = flags_of(recipe, tmp_path, "--max_steps", 2, "--save_steps", 1), tmp_path / "out"
    flags += ["--gradient_accumulation_steps", "2"]
    whole, trained = MAIN[recipe](flags), weights(out)
    written = out.stat().st_mtime_ns, (out / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match="--output_dir: expected .* has some of an earlier run"):
        MAIN[recipe](flags)
    with pytest.raises(SystemExit, match="^0$"):
        MAIN[recipe]([*flags, *LAST])
    assert "has the last step of the run: nothing is left to train" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--learning_rate: expected .*, as in the checkpoint, got 0.5"):
        MAIN[recipe]([*flags, *LAST, "--learning_rate", "0.5", "--max_steps", "3"])
    assert written == (out.stat().st_mtime_ns, (out / "model.safetensors").stat().st_mtime_ns)
    (out / "model.safetensors").unlink()  # as if it was killed before it saved the model
    if (out / "checkpoint-2" / "training_args.bin").is_file():  # a Trainer's checkpoints are models, too
        with pytest.raises(SystemExit, match="^0$"):
            MAIN[recipe]([*flags, *LAST])
        assert weights(out) == trained
        (out / "model.safetensors").unlink()
    state = out / "checkpoint-2" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    (out / "checkpoint-3").mkdir()
    assert weights(out / "checkpoint-1") != trained
    again = MAIN[recipe]([*flags, *LAST])
    assert weights(out) == trained
    if isinstance(whole, dict):
        assert again["eval_loss"] == whole["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MAIN)
def test_two_processes(recipe, tmp_path):
    """Without the name of a model. What is refused, and a run that is finished, are told by one of them."""

    def run(*more):
        flags = flags_of(recipe, tmp_path, "--save_steps", 1, *more)
        done = run_script(RECIPES / f"{recipe}.py", *flags, ranks=2, ACCELERATE_USE_CPU="true")
        return done.returncode, done.stdout + done.stderr

    short = ("--max_steps", 2) if recipe in ("sft", "accelerate_loop", "pretrain_bucket") else ()
    code, said = run(*short)
    assert code == 0, said[-6000:]
    assert said.count(RUN_OF[recipe][2]) == 1
    if short:
        trained = weights(tmp_path / "out")
        code, said = run(*short, *LAST)
        assert code == 0, said[-6000:]
        assert said.count("nothing is left to train") == 1
        code, said = run(*short)
        assert code == 1
        assert said.count("has some of an earlier run") == 1
        assert "Traceback" not in said
        first = ("--resume_from_checkpoint", tmp_path / "out" / "checkpoint-1", "--output_dir", tmp_path / "rest")
        code, said = run(*short, *first)
        assert code == 0, said[-6000:]
        assert weights(tmp_path / "rest") == trained
        code, said = run(*short, *first, "--learning_rate", 1)
        assert code == 1
        assert said.count("--learning_rate: expected") == 1


@pytest.mark.slow
def test_long_documents_have_the_losses_that_they_have_on_one_process(tmp_path):
    flags = flags_of("long_context", tmp_path, "--max_steps", 3, "--compare")
    done = run_script(RECIPES / "long_context.py", *flags, ranks=2, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    before, table = done.stdout.split("loss with documents on up to 2 processes   on one\n")
    assert int(before.split("blocks of 2 ranks: ")[1].split()[0]) > 50
    losses = np.array([line.split()[-2:] for line in table.splitlines()], dtype=float)
    assert len({*losses[:, 0]}) == 3 + 1  # steps and evaluation
    assert losses[:, 0] == pytest.approx(losses[:, 1], abs=2e-6)


def test_some_functions_are_joined_to_long_documents(monkeypatch):
    texts = [f"function {number}" for number in range(500)]
    monkeypatch.setattr(common, "functions", lambda: datasets.Dataset.from_dict({"text": texts}))
    joined = long_context.long_and_short()["text"]
    assert "\n".join(joined).split("\n") == texts
    assert {text.count("\n") + 1 for text in joined[:-1]} == {1, 2, 4, 20}


FUNCTIONS = [
    '    def area(self, width, height=2):\n        """Return it.\n\n        In m2."""\n        return width * height\n',
    "def nothing():\n    pass\n",
    'def größe(text, *, encoding="ü"):\n    é = len(text)\n    return (é, encoding)\n',
    "def two(x):\n    if x:\n        return 1\n    return 2\n",
    "def stars(*args):\n    return args\n",
]


def test_squad(tmp_path, capsys):
    metrics = squad.main(flags_of("squad", tmp_path, "--num_train_epochs", 1))
    assert 0 <= metrics["eval_exact_match"] <= metrics["eval_f1"] <= 100
    said = capsys.readouterr().out
    assert said.count(" windows have no answer, 0 answers are in no window") == 2
    for text in ("36 questions, 29", "4 questions, 3", "run as one packed row", "on 4 questions: exact match"):
        assert text in said
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


def named_pairs(folder, number=60):
    rng = np.random.default_rng(1)
    names = [f"{chr(97 + n % 26)}{n}" for n in range(number)]
    rows = [{"anchor": f"about {name}", "positive": f"{name} " * int(rng.integers(1, 12))} for name in names]
    known = {
        "data": write(folder / "named_pairs.jsonl", rows),
        "per_device_train_batch_size": 8,
        "max_length": 32,
        "max_steps": 4,
    }
    return [text for name, value in (known | {"save_steps": 2}).items() for text in (f"--{name}", str(value))]


@pytest.mark.slow
def test_embed(tmp_path, capsys):
    pytest.importorskip("sentence_transformers")
    import embed

    flags = [*named_pairs(tmp_path), "--output_dir", str(tmp_path / "out")]
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
    done = run_script(RECIPES / "embed.py", *named_pairs(tmp_path), "--output_dir", tmp_path / "out", ranks=2)
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
