"""Padded batches whose rows share prefixes: the same outputs, losses and gradients, with each prefix computed once."""

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from padded_models import SEQUENCE, padded
from patched_models import patched_tiny
from tiers import fast_only
from training_by_hand import gradients_of, largest_difference
from whole_rows import answers, dpo, grpo, pairs, step

import hf_packing as hfp
from hf_packing.attention import inner_model, share_prefixes
from hf_packing.attention.padded import PaddedRows
from hf_packing.trees.find import find_in_batch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def computed_tokens(model):
    """A list, to which every forward of the first layer's norm adds its number of tokens."""
    seen = []
    norm = next(each for each in inner_model(model).modules() if "Norm" in type(each).__name__)
    norm.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[:-1].numel()))
    return seen


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(DOCUMENTS, st.integers(1, 3))
def test_laws_of_trees_in_a_batch(documents, fewest):
    tokens = np.array([token for document in documents for token in document])
    found = find_in_batch(tokens, {}, [*map(len, documents)], fewest)
    assert (tokens[found.taken][found.given] == tokens).all()
    begin = 0
    for document in documents:
        path = found.given[begin : begin + len(document)]
        assert found.trees.position_ids[path].tolist() == [*range(len(document))]
        assert found.trees.predecessors[path].tolist() == [-1, *path[:-1]]
        begin += len(document)
    if fewest == 1:
        assert found.trees.tokens == len({tuple(each[: end + 1]) for each in documents for end in range(len(each))})


def test_other_values_of_tokens_split_a_prefix():
    tokens, types = np.array([5, 6, 7, 5, 6, 8]), np.array([0, 0, 0, 0, 1, 0])
    assert find_in_batch(tokens, {}, [3, 3], 1).trees.tokens == 4
    assert find_in_batch(tokens, {"token_type_ids": types}, [3, 3], 1).trees.tokens == 5


@pytest.mark.parametrize("side", fast_only(["right", "left"], "right"))
@pytest.mark.parametrize("name", fast_only(["gpt2", "llama", "mamba"], "gpt2"))
def test_rows_of_a_padded_batch(name, side):
    model = patched_tiny(name, "causal", torch.float64, padded=True)
    rng = np.random.default_rng(0)
    prompt, middle = (rng.integers(8, 100, n).tolist() for n in (20, 5))
    ends = [rng.integers(8, 100, n).tolist() for n in (3, 9, 1, 6)]
    documents = [prompt + ends[0], ends[1], prompt + middle + ends[1], prompt + ends[0], prompt + middle + ends[2]]
    batch, _ = padded(documents, side, extra=0)
    expected = model(**batch).logits
    share_prefixes(model, 4)
    seen = computed_tokens(model)
    found = model(**batch).logits
    assert seen == [20 + 3 + 3 + 9 + 5 + 9 + 1], "3 tokens are too few to share"
    real = batch["attention_mask"].bool()
    close = 1e-12 if name == "gpt2" else 1e-5
    assert float((found - expected)[real].detach().abs().max()) <= close * float(expected[real].detach().std())
    gradients = []
    for logits in (found, expected):
        model.zero_grad()
        weights = torch.randn(logits[real].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (logits[real] * weights).sum().backward()
        gradients.append(gradients_of(model))
    assert largest_difference(gradients[1], gradients[0]) <= 10 * close
    with hfp.unpatch_model(model):
        pass
    seen.clear()
    model(**batch)
    assert seen == [50], "the route keeps the setting"
    share_prefixes(model, None)
    model(**batch)
    assert seen[-1] == sum(map(len, documents))


def test_what_shares_nothing():
    model = patched_tiny("llama", padded=True, num_hidden_layers=1)
    share_prefixes(model, 2)
    documents = [[9, 10, 11, 12], [9, 10, 11, 13, 14]]
    batch, _ = padded(documents, "right", extra=0)
    seen = computed_tokens(model)
    model(**batch)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    model(inputs_embeds=embedded, attention_mask=batch["attention_mask"])
    model(**padded([[9, 10], [11, 12, 13]], "right", extra=0)[0])
    assert seen == [6, 9, 5]
    ids = torch.tensor([[5], [5]])
    rows = PaddedRows(np.ones((2, 1), dtype=bool), ids.device)
    others = {"labels": ids, "weights": ids.float(), "position_ids": ids.expand(3, 2, 1)}
    assert all(rows.sharing_prefixes({"input_ids": ids, name: value}, 1) is rows for name, value in others.items())
    assert rows.sharing_prefixes({"input_ids": ids, "types": ids}, 1).layout.tokens == 1


def proven_policy():
    return patched_tiny("llama", "causal", torch.float64, trees=True).train()


def test_pairs_share_their_prompt(tmp_path):
    trainer = dpo(tmp_path, proven_policy(), pairs(prompt=20, chosen=6))
    with hfp.unpatch_model(trainer.model), hfp.unpatch_model(trainer.ref_model):
        expected, gradients = step(trainer)
    shared = hfp.attach(trainer, None, share_prefixes=True)
    assert all("prefixes that rows share are computed once" in line for line in str(shared).splitlines())
    assert len(shared.models) == 2
    seen = computed_tokens(trainer.model)
    loss, found = step(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    assert seen[0] < 0.8 * int(batch["attention_mask"].sum())
    assert loss == pytest.approx(expected, rel=1e-6)
    assert largest_difference(found, gradients) <= 1e-6


def test_pairs_share_their_prompt_in_rows_of_a_budget(tmp_path):
    trainer = dpo(tmp_path, proven_policy(), pairs(prompt=20, chosen=6))
    summary = hfp.attach(trainer, hfp.TokenBudget(512, share_prefixes=2))
    assert "prefixes that rows share are computed once" in str(summary)
    seen = computed_tokens(trainer.model)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, batch)
    assert seen[0] < 0.8 * int(batch["attention_mask"].sum())


def test_samples_of_a_prompt_in_grpo(tmp_path):
    """Prompts padded on the left, completions on the right."""
    trainer, rng = grpo(tmp_path, proven_policy()), np.random.default_rng(0)
    prompts = [rng.integers(8, 120, n).tolist() for n in (12, 5)]
    completions = [rng.integers(8, 120, 1 + number).tolist() for number in range(8)]
    ids, mask = answers([prompts[number // 4] for number in range(8)], completions)
    hfp.attach(trainer, None)
    expected = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 9)[0]
    share_prefixes(trainer.model, 4)
    seen = computed_tokens(trainer.model)
    found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 9)[0]
    assert seen == [12 + 5 + sum(range(1, 9))]
    real = mask[:, 12:] != 0
    assert torch.allclose(found[real], expected[real], atol=1e-6)


def test_datasets_that_share_nothing_are_as_before(tmp_path):
    data = datasets.Dataset.from_list([{"prompt": "w9", "chosen": " w10", "rejected": " w11 w12"}] * 2)
    trainer = dpo(tmp_path, proven_policy(), data)
    hfp.attach(trainer, None, share_prefixes=True)
    seen = computed_tokens(trainer.model)
    step(trainer)
    assert seen[0] >= 10, "prompts of fewer than 16 tokens are computed again"


def test_models_without_outputs_for_each_token_are_refused():
    with pytest.raises(hfp.ModelNotSupportedError, match="only if the model returns outputs for each token"):
        share_prefixes(patched_tiny("llama", SEQUENCE, num_hidden_layers=1), 4)
