"""score(share_prefixes=True): documents in rows of trees have the scores of each document alone."""

import numpy as np
import pytest
import torch
from documents_alone import alone, check
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched_tiny
from tiers import fast_only
from tree_documents import DOCUMENTS, LABELS

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.training.rows_to_score import rows_to_score

CLOSE = 1e-12
OF_FLOAT32_PARTS = dict.fromkeys(["gemma2", "mamba"], 1e-6)
"""Differences of models that round some results to float32, which packed documents have, too."""

SCORED = [
    [token if label != -100 else -100 for token, label in zip(tokens, labels, strict=True)]
    for tokens, labels in zip(DOCUMENTS, LABELS, strict=True)
]
"""Only answers are scored, each document's own."""

ANSWERS = [{"input_ids": tokens, "labels": labels} for tokens, labels in zip(DOCUMENTS, SCORED, strict=True)]


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
    """Twelve documents of up to 50 tokens that begin with the same 30, in groups that share a few more."""
    prompt = rng.integers(8, 100, 30).tolist()
    groups = [prompt + rng.integers(8, 100, each).tolist() for each in (0, 4, 9)]
    return [groups[number % 3] + rng.integers(8, 100, rng.integers(0, 11)).tolist() for number in range(12)]


MODELS = ["gpt2", "mamba", "gemma2", "mistral", "bloom", "rwkv", "falcon_h1", "recurrent_gemma"]
"""Gemma 2, Mistral and RecurrentGemma have a window of 8 tokens; Mamba, RWKV and Falcon-H1 are recurrent."""


@pytest.mark.parametrize("name", fast_only(MODELS, "gpt2", "mistral"))
def test_scores_are_those_of_each_document_alone(name, rng):
    model, stock, rows = (
        patched_tiny(name, "causal", torch.float64, trees=True),
        tiny_model(name, "causal", torch.float64),
        related(rng),
    )
    seen, expected = Seen(model), alone(stock, rows)
    for max_tokens in (4096, 64, 7):
        scores = hfp.score(model, rows, max_tokens=max_tokens, share_prefixes=True, progress=False)
        check(scores, expected, OF_FLOAT32_PARTS.get(name, CLOSE))
        assert any(seen.trees)
        assert sum(seen.tokens) < 0.8 * sum(map(len, rows))
        seen.tokens.clear()
        seen.trees.clear()


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
@pytest.mark.parametrize("hidden", ["mean", "first", "last", None])
def test_duplicates_and_documents_that_end_inside_others(name, hidden):
    """Only answers count; the answers of duplicates differ, and one document has none."""
    model = patched_tiny(name, "causal", torch.float64, trees=True)
    expected = alone(tiny_model(name, "causal", torch.float64), DOCUMENTS, SCORED)
    scores = hfp.score(model, ANSWERS, share_prefixes=2, hidden=hidden, progress=False)
    check(scores, expected, CLOSE)
    packed = hfp.score(model, ANSWERS, hidden=hidden, progress=False)
    assert np.allclose(scores.perplexity, packed.perplexity, rtol=CLOSE, equal_nan=True)
    if hidden is not None:
        pooled = {"mean": lambda each: each.mean(0), "first": lambda each: each[0], "last": lambda each: each[-1]}
        assert np.allclose(scores.hidden, torch.stack([pooled[hidden](each[3]) for each in expected]), atol=1e-6)
        assert np.allclose(scores.hidden, packed.hidden, atol=1e-7)


def test_greedy_matches_follow_the_path():
    """The most probable token after a shared prefix is that of one branch, which is not the first one in its row."""
    model = tiny_model("gpt2", "causal", torch.float64)
    prompt = torch.tensor([[9, 10, 11, 12]])
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    best = tokens[0].tolist()
    branches = [[*best[:4], (best[4] + step) % 100, *best[5:]] for step in (1, 2)]
    ends = [[*best[:-1], (best[-1] + step) % 100] for step in (1, 2)]
    rows = [*branches, best, best[:7], *ends]
    answers = [{"input_ids": each, "labels": [-100] * 4 + each[4:]} for each in rows]
    scores = hfp.score(model, answers, share_prefixes=2, progress=False)
    assert scores.greedy.tolist() == [False, False, True, True, False, False]
    assert scores.num_tokens.tolist() == [6, 6, 6, 3, 6, 6]
    assert not is_patched(model)  # as it was


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(8, 10), max_size=9), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 20)
)
def test_random_documents(model_and_stock, documents, fewest, max_tokens):
    model, stock = model_and_stock
    scores = hfp.score(model, documents, max_tokens=max_tokens, share_prefixes=fewest, progress=False)
    check(scores, alone(stock, documents), CLOSE)


@pytest.fixture(scope="module")
def model_and_stock():
    return patched_tiny("gpt2", "causal", torch.float64, trees=True), tiny_model("gpt2", "causal", torch.float64)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), unique=True, max_size=15),
    st.integers(1, 3),
    st.integers(1, 30),
)
def test_laws_of_rows(documents, fewest, max_tokens):
    """Every sequence is in one row, and reads its own tokens there; rows are no longer than they may be."""
    sequences = [np.array(each, dtype=np.int64) for each in documents]
    rows = rows_to_score(sequences, max_tokens, fewest)
    assert sorted(number for row in rows for number in row.sequences.tolist()) == list(range(len(sequences)))
    assert [row.tokens for row in rows] == sorted((row.tokens for row in rows), reverse=True)
    packed = rows_to_score(sequences, max_tokens, None)
    assert sum(row.tokens for row in rows) <= sum(row.tokens for row in packed) == sum(map(len, documents))
    for row in rows:
        inputs = row.inputs(sequences)
        tokens = inputs["input_ids"][0].numpy()
        assert len(tokens) == row.tokens
        assert ("parents" in inputs) == bool(row.paths.shared.any())
        for number, places in zip(row.sequences.tolist(), row.places(), strict=True):
            assert tokens[places].tolist() == list(documents[number])
        longest = max(len(documents[number]) for number in row.sequences.tolist())
        assert row.tokens <= max_tokens or longest > max_tokens
        assert row.tokens <= max_tokens + max(map(len, documents))


def test_what_is_shared_runs_once(rng):
    """The question of four options, which together are longer than a row; and a document that has no relatives."""
    model = patched_tiny("gpt2", "causal", torch.float64, trees=True)
    seen = Seen(model)
    question = rng.integers(8, 100, 40).tolist()
    options = [question + rng.integers(8, 100, 6).tolist() for _ in range(4)]
    hfp.score(model, [*options, [5, 6, 7]], max_tokens=44, share_prefixes=True, progress=False)
    assert (seen.tokens, seen.trees) == ([40 + 4 * 5, 2], [True, False])


@pytest.mark.parametrize("share", [False, True])
def test_documents_that_differ_in_the_last_token_run_once(share):
    model = patched_tiny("gpt2", "causal", torch.float64, trees=True)
    seen = Seen(model)
    rows = [[*range(9, 29), last] for last in (30, 31, 32, 31)]
    scores = hfp.score(model, rows, share_prefixes=share, progress=False)
    check(scores, alone(tiny_model("gpt2", "causal", torch.float64), rows), CLOSE)
    assert (seen.tokens, seen.trees) == ([20], [False])


def test_a_causal_model_without_a_head(rng):
    model, rows = tiny_model("llama", "causal", torch.float64).base_model, related(rng)
    seen = Seen(model, hidden="mean")  # patches the model
    packed = hfp.score(model, rows, hidden="mean", progress=False)
    assert not any(seen.trees)
    scores = hfp.score(model, rows, hidden="mean", share_prefixes=True, progress=False)
    assert any(seen.trees)
    assert np.allclose(scores.hidden, packed.hidden, atol=1e-7)
    assert np.isnan(scores.log_likelihood).all()


def test_nothing_to_share():
    model = patched_tiny("gpt2", "causal", torch.float64, trees=True)
    assert hfp.score(model, [], share_prefixes=True, progress=False).log_likelihood.shape == (0,)
    scores = hfp.score(model, [[], [5], [6, 7]], share_prefixes=True, progress=False)
    assert scores.num_tokens.tolist() == [0, 0, 1]


def test_refusals():
    rows = [[5, 6, 7], [5, 6, 8]]
    with pytest.raises(hfp.ModelNotSupportedError, match="BertModel: the outputs for a prefix are not stable"):
        hfp.score(tiny_model("bert", "masked").base_model, rows, hidden="mean", share_prefixes=True)
    with pytest.raises(hfp.PackingError, match="BertForMaskedLM sees the tokens that it predicts"):
        hfp.score(patched_tiny("bert", "masked"), rows, share_prefixes=True)
    for wrong in (0, -1, 1.5, "yes", None):
        with pytest.raises(hfp.PackingError, match="share_prefixes: expected False, True, or the fewest tokens"):
            hfp.score(patched_tiny("gpt2", "causal"), rows, share_prefixes=wrong)
