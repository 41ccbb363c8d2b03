"""score: log-likelihoods and embeddings are those of each document alone, in packed rows and in rows of trees."""

import copy

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched_tiny
from processes import on_ranks
from tiers import fast_only
from tiny_models import build
from tree_rows import DOCUMENTS, LABELS

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.training import head
from tools.tiny_model import tiny_model

LENGTHS = (5, 30, 0, 1, 12, 44, 2, 19, 7)


def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(8, 120, length).tolist() for length in LENGTHS]


def alone(model, rows, labels=None):
    found = []
    for number, tokens in enumerate(rows):
        states = []
        handle = model.base_model.register_forward_hook(lambda _, __, output, to=states: to.append(output[0][0]))
        with torch.no_grad():
            logits = model(torch.tensor([tokens or [8]]), use_cache=False).logits[0].double().log_softmax(-1)
        handle.remove()
        scored = [n for n in range(1, len(tokens)) if labels is None or labels[number][n] != -100]
        likelihood = sum(float(logits[n - 1, tokens[n]]) for n in scored)
        greedy = all(int(logits[n - 1].argmax()) == tokens[n] for n in scored)
        found.append((likelihood, len(scored), greedy, states[0] if tokens else states[0][:0]))
    return found


def check(scores, expected, close=1e-6):
    assert np.allclose(scores.log_likelihood, [each[0] for each in expected], rtol=close, atol=0)
    assert scores.num_tokens.tolist() == [each[1] for each in expected]
    assert scores.greedy.tolist() == [each[2] for each in expected]
    assert scores.log_likelihood.dtype == np.float64


class Seen:
    """The tokens of each row that a model runs once it is proven, and whether it is a row of trees."""

    def __init__(self, model, **options):
        hfp.patch_model(model, trees=True)
        hfp.score(model, [[5, 6]], progress=False, **options)  # tests the output layer
        self.tokens, self.trees = [], []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _, __, inputs):
        self.tokens.append(inputs["input_ids"].shape[1])
        self.trees.append("parents" in inputs)


def related(rng):
    prompt = rng.integers(8, 100, 30).tolist()
    groups = [prompt + rng.integers(8, 100, each).tolist() for each in (0, 4, 9)]
    return [groups[number % 3] + rng.integers(8, 100, rng.integers(0, 11)).tolist() for number in range(12)]


CASES = [
    *((name, False) for name in ("gpt2", "llama", "gemma2", "bloom", "mamba")),
    *((name, True) for name in ("gpt2", "mamba", "gemma2", "mistral", "bloom", "rwkv", "falcon_h1", "recurrent_gemma")),
]
"""Architectures, and whether rows are trees. Gemma 2, Mistral and RecurrentGemma have a window of 8 tokens; Mamba, RWKV
and Falcon-H1 are recurrent."""
CLOSE = dict.fromkeys(["llama", "gemma2", "mamba"], 1e-5)
"""Differences of models that round some results to float32."""


@pytest.mark.parametrize(("name", "trees"), fast_only(CASES, ("gemma2", False), ("mistral", True)))
def test_scores_are_those_of_each_document_alone(name, trees, rng):
    """Gemma 2 caps its logits; rows of 7 tokens are shorter than most documents."""
    model, stock = patched_tiny(name, "causal", torch.float64, trees), tiny_model(name, "causal", torch.float64)
    if name == "gemma2":
        stock.set_attn_implementation("eager")  # transformers 5.17 lets "sdpa" ignore the soft cap
    rows = related(rng) if trees else documents()
    expected = alone(stock, rows)
    seen = Seen(model) if trees else None
    for max_tokens in (16384, 45, 7):
        scores = hfp.score(model, rows, max_tokens=max_tokens, share_prefixes=trees, progress=False)
        check(scores, expected, CLOSE.get(name, 1e-12))
        if trees:
            assert any(seen.trees)
            assert sum(seen.tokens) < 0.8 * sum(map(len, rows))
            assert max(seen.tokens) <= max(max_tokens, *map(len, rows))
            seen.tokens.clear()
            seen.trees.clear()


@pytest.fixture(scope="module")
def model_and_stock():
    return patched_tiny("gpt2", "causal", torch.float64, trees=True), tiny_model("gpt2", "causal", torch.float64)


def test_chunks_and_whole_logits(monkeypatch, model_and_stock):
    model, rows = patched_tiny("gpt2", "causal", torch.float64), documents()
    expected = alone(model_and_stock[1], rows)
    assert any(each[2] for each in expected if each[1] == 0)
    for change in (
        lambda: monkeypatch.setattr(head, "_CHUNK_TOKENS", 5),
        lambda: model.lm_head.register_forward_hook(lambda *_: None),  # which would see chunks
        lambda: setattr(model, "get_output_embeddings", lambda: None),
    ):
        change()
        check(hfp.score(model, rows, progress=False), expected, 1e-12)


def test_a_document_may_be_one_token_longer_than_the_positions():
    """The last token predicts nothing, and GPT-2 would have no position for it."""
    model = build("GPT2", n_positions=64)
    rows = [list(range(9, 74)), [20], [21, 22]]
    found = hfp.score(model, rows, max_tokens=64, progress=False)
    with torch.no_grad():
        log_probs = model(torch.tensor([rows[0][:-1]]), use_cache=False).logits[0].log_softmax(-1)
    assert found.log_likelihood[0] == pytest.approx(
        float(log_probs.gather(1, torch.tensor(rows[0][1:])[:, None]).sum())
    )
    assert found.num_tokens.tolist() == [64, 0, 1]


def test_the_order_of_documents(model_and_stock):
    model, rows = model_and_stock[0], documents()
    scores = hfp.score(model, rows, progress=False)
    assert scores.hidden is None
    order = np.random.default_rng(1).permutation(len(rows))
    moved = hfp.score(model, [rows[number] for number in order], max_tokens=60, progress=False)
    assert np.allclose(moved.log_likelihood, scores.log_likelihood[order], rtol=1e-12)
    has_tokens = scores.num_tokens > 0
    assert np.allclose((np.log(scores.perplexity) * scores.num_tokens)[has_tokens], -scores.log_likelihood[has_tokens])
    assert np.isnan(scores.perplexity[~has_tokens]).all()


POOLED = {"mean": lambda each: each.mean(0), "first": lambda each: each[0], "last": lambda each: each[-1]}


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_hidden_states(kind):
    name = "bert" if kind == "masked" else "gpt2"
    model, rows = patched_tiny(name, kind, torch.float64), documents()
    states = [each[3] for each in alone(tiny_model(name, kind, torch.float64), rows) if len(each[3])]
    for hidden, pool in POOLED.items():
        scores = hfp.score(model, rows, hidden=hidden, max_tokens=40, progress=False)
        kept = [number for number, length in enumerate(LENGTHS) if length]
        assert np.allclose(scores.hidden[kept], torch.stack([*map(pool, states)]), atol=1e-5)
        assert not scores.hidden[LENGTHS.index(0)].any()
        assert scores.hidden.dtype == np.float32
        assert np.isnan(scores.log_likelihood).all() == (name == "bert")


def test_the_model_is_as_before():
    model = patched_tiny("llama", "causal").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    hfp.score(model, documents(), progress=False)
    assert [module.training for module in model.modules()] == modes
    assert is_patched(model)


ON_RANKS = {
    "packed": (documents(), False),
    "trees": (related(np.random.default_rng(1)), True),
    "one document": ([[5, 6, 7]], False),
}
"""Documents, and whether they share prefixes; one document is fewer than there are processes."""


def scores_of(rows, **how):
    model = patched_tiny("llama", "causal", torch.float64, trees=bool(how.get("share_prefixes")))
    return hfp.score(model, rows, hidden="mean", progress=False, **how)


def check_equal(found, expected):
    assert np.allclose(found.log_likelihood, expected.log_likelihood, rtol=1e-7)
    assert np.array_equal(found.num_tokens, expected.num_tokens)
    assert np.array_equal(found.greedy, expected.greedy)
    assert np.allclose(found.hidden, expected.hidden, atol=1e-6)


def score_on_rank(folder):
    rank = Accelerator(cpu=True).process_index
    found = [scores_of(rows, max_tokens=50, share_prefixes=share) for rows, share in ON_RANKS.values()]
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.slow
def test_two_processes_share_the_documents(tmp_path):
    on_ranks(score_on_rank, tmp_path, ranks=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for (rows, _), *found in zip(ON_RANKS.values(), *ranks, strict=True):
        for each in found:
            check_equal(each, scores_of(rows))


SCORED = [
    [token if label != -100 else -100 for token, label in zip(tokens, labels, strict=True)]
    for tokens, labels in zip(DOCUMENTS, LABELS, strict=True)
]
ANSWERS = [{"input_ids": tokens, "labels": labels} for tokens, labels in zip(DOCUMENTS, SCORED, strict=True)]


@pytest.mark.parametrize("hidden", POOLED)
def test_duplicates_and_documents_that_end_inside_others(hidden):
    """Only answers count; the answers of duplicates differ, and one document has none."""
    expected = alone(tiny_model("mistral", "causal", torch.float64), DOCUMENTS, SCORED)
    model = patched_tiny("mistral", "causal", torch.float64, trees=True)
    scores = hfp.score(model, ANSWERS, share_prefixes=2, hidden=hidden, progress=False)
    check(scores, expected, 1e-12)
    assert np.allclose(scores.hidden, torch.stack([POOLED[hidden](each[3]) for each in expected]), atol=1e-6)


@pytest.mark.parametrize("share", [False, 2])
def test_greedy_documents(share, model_and_stock):
    """The most probable token after a shared prefix is that of one branch, which is not the first one in its row."""
    model, stock = model_and_stock
    model = copy.deepcopy(model) if share else stock
    prompt = torch.tensor([[9, 10, 11, 12]])
    tokens = stock.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    best = tokens[0].tolist()
    branches = [[*best[:4], (best[4] + step) % 100, *best[5:]] for step in (1, 2)]
    ends = [[*best[:-1], (best[-1] + step) % 100] for step in (1, 2)]
    rows = [*branches, best, best[:7], *ends]
    answers = [{"input_ids": each, "labels": [-100] * 4 + each[4:]} for each in rows]
    scores = hfp.score(model, answers, share_prefixes=share, progress=False)
    assert scores.greedy.tolist() == [False, False, True, True, False, False]
    assert scores.num_tokens.tolist() == [6, 6, 6, 3, 6, 6]
    assert is_patched(model) == bool(share)  # as it was


@settings(max_examples=12)
@given(
    st.lists(st.lists(st.integers(8, 10), max_size=9), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 20)
)
def test_random_documents_in_rows_of_trees(model_and_stock, documents, fewest, max_tokens):
    model, stock = model_and_stock
    scores = hfp.score(model, documents, max_tokens=max_tokens, share_prefixes=fewest, progress=False)
    check(scores, alone(stock, documents), 1e-12)


def test_what_is_shared_runs_once(rng, model_and_stock):
    """The question of four options, beside a document without relatives; and documents that differ in the last token,
    which share all that runs in any case."""
    model = patched_tiny("gpt2", "causal", torch.float64, trees=True)
    seen = Seen(model)
    question = rng.integers(8, 100, 40).tolist()
    options = [question + rng.integers(8, 100, 6).tolist() for _ in range(4)]
    hfp.score(model, [*options, [5, 6, 7]], max_tokens=60, share_prefixes=True, progress=False)
    ends = [[*range(9, 29), last] for last in (30, 31, 32, 31)]
    for share in (False, True):
        scores = hfp.score(model, ends, share_prefixes=share, progress=False)
        check(scores, alone(model_and_stock[1], ends), 1e-12)
    assert seen.tokens == [40 + 4 * 5, 2, 20, 20]
    assert seen.trees == [True, False, False, False]


def test_a_causal_model_without_a_head(rng):
    model, rows = tiny_model("llama", "causal", torch.float64, num_hidden_layers=1).base_model, related(rng)
    seen = Seen(model, hidden="mean")  # patches the model
    packed = hfp.score(model, rows, hidden="mean", progress=False)
    assert not any(seen.trees)
    scores = hfp.score(model, rows, hidden="mean", share_prefixes=True, progress=False)
    assert any(seen.trees)
    assert np.allclose(scores.hidden, packed.hidden, atol=1e-7)
    assert np.isnan(scores.log_likelihood).all()
