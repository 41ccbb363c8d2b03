"""score: log-likelihoods and embeddings of packed documents are those of each document alone."""

import datasets
import numpy as np
import pytest
import torch
from documents_alone import alone, check
from patched_models import patched_tiny
from processes import launch
from score_process import LENGTHS, documents, related_documents
from tiers import fast_only
from tiny_models import build

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.training import log_probs

CLOSE = {"gpt2": 1e-12, "bloom": 1e-12}
"""Models without parts in float32."""


@pytest.mark.parametrize("name", fast_only(["gpt2", "llama", "gemma2", "bloom", "mamba"], "gpt2", "gemma2"))
def test_scores_are_those_of_each_document_alone(name):
    """Gemma 2 caps its logits; chunks of 5 tokens; rows of 7 tokens are shorter than most documents."""
    model, rows = patched_tiny(name, "causal", torch.float64), documents()
    stock = tiny_model(name, "causal", torch.float64)
    if name == "gemma2":
        stock.set_attn_implementation("eager")  # transformers 5.17 lets "sdpa" ignore the soft cap
    expected = alone(stock, rows)
    for max_tokens in (16384, 45, 7):
        check(hfp.score(model, rows, max_tokens=max_tokens, progress=False), expected, CLOSE.get(name, 1e-5))
    assert any(each[2] for each in expected if each[1] == 0)


def test_chunks_and_whole_logits(monkeypatch):
    model, rows = patched_tiny("gpt2", "causal", torch.float64), documents()
    expected = alone(tiny_model("gpt2", "causal", torch.float64), rows)
    monkeypatch.setattr(log_probs, "_CHUNK_TOKENS", 5)
    check(hfp.score(model, rows, progress=False), expected, 1e-12)
    model.lm_head.register_forward_hook(lambda *_: None)  # which would see chunks
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


def test_greedy_documents():
    model = tiny_model("gpt2", "causal", torch.float64)
    prompt = torch.tensor([[9, 10, 11]])
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    row = tokens[0].tolist()
    labels = [-100] * 3 + row[3:]
    other = [*row[:-1], (row[-1] + 1) % 100]
    data = datasets.Dataset.from_dict({"input_ids": [row, row, other], "labels": [labels, row, [-100] * 3 + other[3:]]})
    scores = hfp.score(model, data, progress=False)
    assert scores.greedy.tolist() == [True, False, False]
    assert scores.num_tokens.tolist() == [6, 8, 6]
    check(scores, alone(model, data["input_ids"], data["labels"]), 1e-12)
    assert not is_patched(model)  # as it was


def test_perplexity_and_the_order_of_documents():
    model, rows = patched_tiny("gpt2", "causal", torch.float64), documents()
    scores = hfp.score(model, rows, progress=False)
    expected = [np.exp(-each[0] / each[1]) if each[1] else np.nan for each in alone(model_alone(), rows)]
    assert np.allclose(scores.perplexity, expected, equal_nan=True)
    order = np.random.default_rng(1).permutation(len(rows))
    moved = hfp.score(model, [rows[number] for number in order], max_tokens=60, progress=False)
    assert np.allclose(moved.log_likelihood, scores.log_likelihood[order], rtol=1e-12)


def model_alone():
    return tiny_model("gpt2", "causal", torch.float64)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_hidden_states(name):
    kind = "masked" if name == "bert" else "causal"
    stock = tiny_model(name, kind, torch.float64)
    model, rows = patched_tiny(name, kind, torch.float64), documents()
    states = []
    for tokens in filter(None, rows):
        with torch.no_grad():
            states.append(stock.base_model(torch.tensor([tokens])).last_hidden_state[0])
    pooled = {
        "mean": [each.mean(0) for each in states],
        "first": [each[0] for each in states],
        "last": [each[-1] for each in states],
    }
    for hidden, expected in pooled.items():
        scores = hfp.score(model, rows, hidden=hidden, max_tokens=40, progress=False)
        kept = [number for number, length in enumerate(LENGTHS) if length]
        assert np.allclose(scores.hidden[kept], torch.stack(expected), atol=1e-5)
        assert not scores.hidden[LENGTHS.index(0)].any()
        assert scores.hidden.dtype == np.float32
        assert np.isnan(scores.log_likelihood).all() == (name == "bert")


def test_the_model_is_as_before():
    model = patched_tiny("llama", "causal").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    scores = hfp.score(model, documents(), progress=False)
    assert [module.training for module in model.modules()] == modes
    assert is_patched(model)
    assert scores.hidden is None


def test_two_processes_share_the_documents(tmp_path):
    launch("score_process.py", tmp_path, ranks=2)
    model = patched_tiny("llama", "causal", torch.float64)
    for name, rows in (("packed", documents()), ("trees", related_documents())):
        expected = hfp.score(model, rows, hidden="mean", progress=False)
        for rank in range(2):
            found = np.load(tmp_path / f"{name}-{rank}.npz")
            assert np.allclose(found["log_likelihood"], expected.log_likelihood, rtol=1e-7)
            assert found["num_tokens"].tolist() == expected.num_tokens.tolist()
            assert found["greedy"].tolist() == expected.greedy.tolist()
            assert np.allclose(found["hidden"], expected.hidden, atol=1e-6)


def test_bad_arguments():
    model, rows = patched_tiny("gpt2", "causal"), documents()
    with pytest.raises(hfp.PackingError, match="hidden: expected None or one of mean, last, first, got 'max'"):
        hfp.score(model, rows, hidden="max")
    with pytest.raises(hfp.PackingError, match="max_tokens: "):
        hfp.score(model, rows, max_tokens=0)
    with pytest.raises(hfp.PackingError, match="documents: expected lists of token ids or a Dataset, got str"):
        hfp.score(model, "text")
    with pytest.raises(hfp.PackingError, match="'input_ids': expected a list of integers"):
        hfp.score(model, [["a", "b"]])
    with pytest.raises(
        hfp.PackingError, match="labels: expected a label for each of the 2 tokens of document 0, got 1"
    ):
        hfp.score(model, [{"input_ids": [5, 6], "labels": [5]}])
    with pytest.raises(
        hfp.PackingError, match="labels: expected the document's own tokens, or -100 .* got 7 for token 1"
    ):
        hfp.score(model, [{"input_ids": [5, 6], "labels": [-100, 7]}])
    with pytest.raises(hfp.PackingError, match="BertForMaskedLM sees the tokens that it predicts, .* hidden='mean'"):
        hfp.score(patched_tiny("bert", "masked"), rows)
    with pytest.raises(hfp.PackingError, match="BertModel has no head that predicts tokens; pass hidden='mean'"):
        hfp.score(tiny_model("bert", "masked").base_model, rows)
    assert hfp.score(model, [], progress=False).log_likelihood.shape == (0,)
