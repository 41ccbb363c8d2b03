"""The recipe for lm-evaluation-harness gives the answers of the harness's own model, on local tasks."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from processes import on_ranks
from recipe_inputs import save_tiny_model, write
from tiers import fast_only

import hf_packing as hfp

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning")

WORDS = ["ocean", "apple", "river", "cloud", "stone", "amber", "eagle", "winter", "lantern", "meadow"]


def task(kind, text, target, *metrics, **more):
    metrics = [{"metric": each} for each in metrics]
    return {"output_type": kind, "doc_to_text": text, "doc_to_target": target, "metric_list": metrics, **more}


WORD, THREE_TOKENS = "{{choices[answer]}}", {"until": ["."], "max_gen_toks": 3}
TASKS = {
    "continuations": task("multiple_choice", "{{question}}", "answer", "acc", "acc_norm", doc_to_choice="choices"),
    "letters": task(  # choices that share all tokens but the last one
        "multiple_choice", "{{question}} Answer:", "answer", "acc", "acc_mutual_info", doc_to_choice=[*"ABCD"]
    ),
    "last_word": task("loglikelihood", "{{question}}", WORD, "perplexity", "acc"),
    "texts": task("loglikelihood_rolling", "", "{{text}}", "word_perplexity", "bits_per_byte"),
    "written": task("generate_until", "Say {{question}}", WORD, "exact_match", generation_kwargs=THREE_TOKENS),
}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_tiny_model(root / "Llama", max_position_embeddings=96)
    save_tiny_model(root / "GPT2", "GPT2", n_positions=96)
    save_tiny_model(root / "Gemma2", "Gemma2", max_position_embeddings=96)
    return root


@pytest.fixture
def tasks(tmp_path, rng):
    """A folder of tasks. Some documents are longer than the model takes, and one has no question."""
    rows = []
    for number in range(10):
        words = rng.choice(WORDS, int(rng.integers(1, 25)))
        row = {"question": " ".join(words) if number else "", "answer": int(rng.integers(4))}
        row["choices"] = [" ".join(rng.choice(WORDS, int(rng.integers(1, 4)))) for _ in range(4)]
        row["text"] = " ".join(rng.choice(WORDS, int(rng.integers(1, 50))))
        rows.append(row)
    data = write(tmp_path / "rows.jsonl", rows)
    home = tmp_path / "tasks"
    home.mkdir()
    for name, task in TASKS.items():
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (home / f"{name}.yaml").write_text(json.dumps(source | {"test_split": "test", **task}))
    return home


def stock(path, **options):
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(path), device="cpu", dtype="float32", batch_size=4, **options)


def packed(path, **options):
    from evaluate_packed import PackedHFLM

    return PackedHFLM(str(path), device="cpu", dtype="float32", **options)


SHARES = ([(None, [5], [6, 7]), (None, [8, 9], [5]), (None, [8, 9], [6])], [(None, [5, 7, 7], [9, 8, 6])])


def evaluated(model, tasks):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


def numbers_of(results):
    return {
        (task, name): value
        for task, found in results["results"].items()
        for name, value in found.items()
        if isinstance(value, float)
    }


CASES = [(name, share) for name in ("Llama", "GPT2", "Gemma2") for share in (False, True)]


@pytest.mark.parametrize(("name", "share"), fast_only(CASES, *CASES[::2], ("Gemma2", True)))
def test_metrics_and_answers_are_those_of_the_harness(folder, tasks, name, share):
    expected = evaluated(stock(folder / name), tasks)
    found = evaluated(packed(folder / name, max_tokens=300, share_prefixes=share), tasks)
    assert numbers_of(found) == pytest.approx(numbers_of(expected), rel=1e-4, abs=1e-6)
    assert {task for task, _ in numbers_of(found)} == set(TASKS)
    for task in TASKS:
        for ours, theirs in zip(found["samples"][task], expected["samples"][task], strict=True):
            check_answers(*([answer[0] for answer in each["resps"]] for each in (ours, theirs)))


def check_answers(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, (tuple, list)):
            check_answers(one, other)
        else:
            assert one == (pytest.approx(other, abs=1e-4, rel=1e-5) if isinstance(other, float) else other)


def requests_of(model):
    """Greedy continuations, longer ones than the model takes, equal ones, and some that differ in the last token."""
    from lm_eval.api.instance import Instance

    prompt = torch.tensor([model.tok_encode("a river and a stone")])
    tokens = model.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False, eos_token_id=None
    )
    greedy = tokens[0].tolist()
    plain = [((str(n), "x"), greedy[:-n], greedy[-n:]) for n in (1, 2, 3)]
    ends = [((f"end {n}", "x"), greedy[:-2], [greedy[-2], n]) for n in (greedy[-1], 40, 41)]
    long = [((f"long {n}", "x"), [5 + k % 90 for k in range(n)], [7, 8, 9]) for n in (92, 93, 94, 95, 200)]
    whole = [(("whole", "x"), [6], [5 + k % 90 for k in range(96)])]
    windows = [(None, [0], [9, 10, 11]), (None, [0], [9, 10, 11])]
    strings = [Instance("loglikelihood", {}, each, 0) for each in [("", "amber"), ("eagle ", "cloud"), ("a", "b")]]
    return [*long, *plain, *whole, *ends, *windows, *plain], strings


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 128, 16384])
def test_requests(folder, name, max_tokens, share):
    """Without the harness's own sharing, which takes logits of a wrong place if equal tokens are cut differently."""
    model, other = (
        packed(folder / name, max_tokens=max_tokens, share_prefixes=share),
        stock(folder / name, logits_cache=False),
    )
    requests, strings = requests_of(other)
    kept = {}
    model.cache_hook = SimpleNamespace(add_partial=lambda kind, key, answer: kept.update({(kind, key): answer}))
    found = model._loglikelihood_tokens(requests, disable_tqdm=True)
    check_answers(found, other._loglikelihood_tokens(requests, disable_tqdm=True))
    assert sum(greedy for _, greedy in found) == 7
    assert kept == {("loglikelihood", key): answer for (key, _, _), answer in zip(requests, found, strict=True) if key}
    check_answers(model.loglikelihood(strings), other.loglikelihood(strings))
    assert model._loglikelihood_tokens([], disable_tqdm=True) == []


@pytest.mark.parametrize(("share", "expected"), [(False, [8 * 22]), (True, [8 * 2 + 20])])
def test_what_is_shared_runs_once(folder, share, expected):
    """Requests that differ in the last token run once; with share_prefixes, so do the examples of all prompts."""
    model = packed(folder / "Llama", max_tokens=512, share_prefixes=share)
    model._loglikelihood_tokens([(None, [5], [6])], True)  # tests the output layer
    sizes = []
    model.model.register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    prompts = [[*range(40, 60), 5 + n, 8] for n in range(8)]
    model._loglikelihood_tokens([(("", ""), each, [last]) for each in prompts for last in (20, 21, 22)], True)
    assert sizes == expected


@pytest.mark.slow  # reads the names of all tasks of the harness
def test_the_command(folder, tasks, tmp_path, capsys, monkeypatch):
    import evaluate_packed

    monkeypatch.setattr("sys.argv", [])
    options = ["--include_path", str(tasks), "--device", "cpu", "--limit", "5", "--tasks", "letters,texts"]
    arguments = f"pretrained={folder / 'Llama'},dtype=float32"
    evaluate_packed.main(
        [*options, "--model_args", f"{arguments},max_tokens=512,share_prefixes=True", "--output_path", str(tmp_path)]
    )
    printed = capsys.readouterr().out
    assert "packed (" in printed
    assert "word_perplexity" in printed
    (written,) = tmp_path.glob("**/results_*.json")
    found = json.loads(written.read_text())["results"]
    expected = lm_eval.simple_evaluate(
        stock(folder / "Llama"),
        tasks=["letters", "texts"],
        limit=5,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
    )
    assert numbers_of({"results": found}) == pytest.approx(numbers_of(expected), rel=1e-4, abs=1e-6)


def test_requests_that_are_cut_or_wrong(folder):
    requests = [(None, [5] * length, [6, 7]) for length in (94, 95, 96, 97)]
    with pytest.warns(UserWarning, match="2 of 4 requests are longer than 96 tokens, and cut"):
        packed(folder / "Llama")._loglikelihood_tokens(requests, disable_tqdm=True)
    model = packed(folder / "Llama")
    with pytest.raises(hfp.PackingError, match="continuation of 1 to 96 tokens, got 1 and 97 tokens"):
        model._loglikelihood_tokens([(None, [5], [6] * 97)])
    with pytest.raises(hfp.PackingError, match="expected a context .* got 0 and 1 tokens"):
        model._loglikelihood_tokens([(None, [], [6])])


def answer_share(folder):
    accelerator = Accelerator(cpu=True)
    model = packed(folder / "Llama", max_tokens=16)
    model._rank, model._world_size = accelerator.process_index, accelerator.num_processes
    answers = model._loglikelihood_tokens(SHARES[model.rank], disable_tqdm=True)
    (folder / f"answers-{model.rank}.json").write_text(json.dumps(answers))


@pytest.mark.slow
def test_each_process_gets_its_own_answers(tmp_path):
    save_tiny_model(tmp_path / "Llama", max_position_embeddings=96)
    on_ranks(answer_share, tmp_path, ranks=2)
    expected = stock(tmp_path / "Llama")
    for rank, requests in enumerate(SHARES):
        found = json.loads((tmp_path / f"answers-{rank}.json").read_text())
        check_answers(found, expected._loglikelihood_tokens(requests, disable_tqdm=True))


logging.getLogger("lm_eval").setLevel(logging.ERROR)
