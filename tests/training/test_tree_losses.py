"""Losses, log-probabilities and gradients of rows of trees are those of the same documents, each run alone."""

import copy
import warnings
from functools import cache, partial

import datasets
import peft
import pytest
import torch
from accelerate import Accelerator
from chunks import WHOLE, chunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched, patched_once
from processes import on_ranks
from tiers import fast_only
from tiny_models import build
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from trainers import documents, logged, trainer_of
from training_by_hand import gradients_of, largest_difference
from training_process import segments
from transformers import CONFIG_MAPPING, Trainer
from transformers.modeling_outputs import CausalLMOutput
from tree_rows import DOCUMENTS, LABELS, OTHER, documents_of, labeled_documents, tree_row
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.training.kinds import labels_of
from hf_packing.training.losses import ITEMS, TARGETS, WEIGHTS
from hf_packing.training.step_counts import micro_batch_counts

pytestmark = [
    pytest.mark.filterwarnings("ignore:pack applies:UserWarning"),
    pytest.mark.filterwarnings("ignore:pack shares:UserWarning"),
]


def exact(name):
    """Return a model in float64, without the parts of Llama that compute in float32 whatever the model's dtype."""
    model = build(name, torch.float64)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(_norm, module)
    return model


def patched_with_stock(name):
    stock, model = exact(name), copy.deepcopy(patched_once(exact, True, name))
    share_parameters(stock, model)
    model.stock = [stock]  # in a list, so that it is no module of the model
    return model


def oracle(name):
    """Return a patched model that runs each document of a row of trees alone, without a patch.

    The hidden state of a shared token is that of the last document on whose path it is.
    """
    model = patched_with_stock(name)
    (stock,) = model.stock
    without_trees = model.forward

    def forward(
        input_ids, segment_lengths=None, parents=None, position_ids=None, labels=None, num_items_in_batch=None, **others
    ):
        if parents is None:
            items = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            return without_trees(input_ids=input_ids, position_ids=position_ids, labels=labels, **items, **others)
        assert not others
        hidden = [None] * input_ids.shape[1]
        row = {
            "tree_input_ids": input_ids[0].tolist(),
            "segment_lengths": segment_lengths.tolist(),
            "parents": parents.tolist(),
            "ends": [*range(len(parents))],
            "trained": [],
        }
        for tokens, _, path in documents_of(row):
            assert position_ids[0, path].tolist() == [*range(len(path))]
            states = stock.base_model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
            for place, state in zip(path, states, strict=True):
                hidden[place] = state
        logits = model.lm_head(torch.stack(hidden)[None])
        if labels is None:
            return CausalLMOutput(logits=logits)
        vocabulary = model.config.vocab_size
        loss = model.loss_function(logits, labels, vocabulary, num_items_in_batch=num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)

    model.forward = forward
    return model


def _norm(module, hidden):
    return F.rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


def share_parameters(model, other):
    parameters = dict(other.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name in [name for name, own in module._parameters.items() if own is not None]:
            module._parameters[name] = parameters[f"{prefix}.{name}".removeprefix(".")]


def losses_alone(model, documents, labels):
    found = []
    for tokens, wanted in zip(documents, labels, strict=True):
        logits = model.stock[0](input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        each = F.cross_entropy(logits[:-1], torch.tensor(wanted[1:], dtype=torch.int64), reduction="none")
        found.append(each[torch.tensor(wanted[1:], dtype=torch.int64) != -100])
    return found


def loss_alone(model, documents, labels, loss):
    losses = losses_alone(model, documents, labels)
    if loss == "sequence":
        losses = [each.mean()[None] for each in losses if len(each)]
    joined = torch.cat([torch.zeros(0), *losses])
    return joined.sum() / max(len(joined), 1), len(joined)


def gradients(model):
    found = gradients_of(model)
    model.zero_grad()
    return found


LOSSES = ["token", "sequence"]
ALL = DOCUMENTS + OTHER[0]
ALL_LABELS = LABELS + OTHER[1]

KINDS = {"oracle": oracle, "patched": patched_with_stock}


@cache
def model_of(name, kind="oracle"):
    return KINDS[kind](name)


def batch_of(*sets):
    return hfp.PackingCollator()([tree_row(documents, labels)[0] for documents, labels in sets])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("name", "size"),
    fast_only(
        [("GPT2", WHOLE), ("GPT2", 4), ("Llama", WHOLE), ("Llama", 1), ("Llama", 4)],
        *(("GPT2", 4), ("Llama", WHOLE), ("Llama", 4)),
    ),
)
def test_the_loss_of_two_rows(name, size, loss):
    """In one batch, in the two batches of a step, and in these as a planned loader gives them out."""
    model = model_of(name, "patched")
    expected, items = loss_alone(model, ALL, ALL_LABELS, loss)
    expected.backward()
    wanted = gradients(model)
    whole, parts = batch_of((DOCUMENTS, LABELS), OTHER), [batch_of((DOCUMENTS, LABELS)), batch_of(OTHER)]
    assert int(labels_of(whole).items(loss)) == items
    planned = [labels_of(batch).with_share(loss, torch.tensor(float(items)), keep_labels=True) for batch in parts]
    assert all(batch.keys() >= {ITEMS, TARGETS, WEIGHTS} and "tree_labels" not in batch for batch in planned)
    for batches, known in (
        ([whole], {"loss": loss}),
        (parts, {"loss": loss, "num_items_in_batch": items}),
        (planned, {}),
    ):
        with chunks_of(size, model) as chunks:
            total = sum(hfp.compute_loss(model, batch, **known) for batch in batches)
        assert all(of_chunk == size for _, of_chunk in chunks)
        assert size is WHOLE or 0 < sum(predicting for predicting, _ in chunks) <= (whole["tree_labels"] != -100).sum()
        total.backward()
        assert total.item() == pytest.approx(expected.item(), rel=1e-12, abs=0)
        assert largest_difference(gradients(model), wanted) <= 1e-12


FORMS = [("oracle", "trees"), ("patched", "trees"), ("patched", "packed")]


@settings(max_examples=20)
@given(labeled_documents(tokens=5), st.sampled_from(LOSSES), st.sampled_from([WHOLE, 1, 3]), st.sampled_from(FORMS))
def test_random_documents(case, loss, size, how):
    """The loss, whose items and weights are those of each document, and the log-probabilities."""
    model = model_of("Llama", how[0])
    expected, items = loss_alone(model, *case, loss)
    batch, order = batch_and_order(how[1], *case)
    with chunks_of(size, model):
        logps = hfp.document_logps(model, batch).detach()
        found = hfp.compute_loss(model, batch, loss=loss)
    assert int(labels_of(batch).items(loss)) == items
    assert torch.allclose(logps, sums_alone(model, *case)[order], rtol=1e-12, atol=1e-12)
    found.backward()
    actual = gradients(model)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12, abs=0)
    if not items:
        assert not any(each.any() for each in actual.values())
        return
    expected.backward()
    assert largest_difference(actual, gradients(model)) <= 1e-12


def test_roots_only_cost_what_packed_documents_cost():
    documents = [[1, 2, 3], [4, 5], [6]]
    packed = hfp.PackingCollator()([{"input_ids": each} for each in documents])
    trees = batch_of((documents, documents))
    for loss in LOSSES:
        assert micro_batch_counts([trees], loss).tolist() == micro_batch_counts([packed], loss).tolist()
        assert torch.equal(labels_of(trees).weights(loss), labels_of(packed).weights(loss))


def sums_alone(model, documents, labels):
    return torch.stack([-each.sum() for each in losses_alone(model, documents, labels)])


def batch_and_order(form, documents=DOCUMENTS, labels=LABELS):
    if form == "trees":
        row, order = tree_row(documents, labels)
        return hfp.PackingCollator()([row]), order
    shapes = {"tokens": 60, "max_segments": 9} if form == "fixed shapes" else {}
    rows = [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(documents, labels, strict=True)]
    return hfp.PackingCollator(**shapes)(rows), [*range(len(rows))]


@pytest.mark.parametrize("size", fast_only([WHOLE, 1, 3], WHOLE, 3))
@pytest.mark.parametrize("form", ["trees", "packed", "fixed shapes"])
def test_log_probabilities(form, size):
    """Their gradients are those of a sum in which each document has a factor of its own."""
    model = model_of("Llama", "patched")
    batch, order = batch_and_order(form)
    expected = sums_alone(model, DOCUMENTS, LABELS)[order]
    assert 0 < (expected == 0).sum() < len(expected)
    factors = torch.linspace(-1, 2, len(expected), dtype=torch.float64)
    (expected * factors).sum().backward()
    wanted = gradients(model)
    with chunks_of(size, model):
        found = hfp.document_logps(model, batch)
        with torch.no_grad():
            assert torch.equal(hfp.document_logps(model, batch), found)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    (found * factors).sum().backward()
    assert largest_difference(gradients(model), wanted) <= 1e-10


def test_log_probabilities_are_scores():
    batch = hfp.PackingCollator()([{"input_ids": each} for each in DOCUMENTS])
    planned = labels_of(batch).with_share("sequence", torch.tensor(3.0), keep_labels=False)
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model = patched("Llama", dtype)
        found = hfp.document_logps(model, batch)
        assert found.dtype == dtype
        assert torch.equal(hfp.document_logps(model, planned), found)
        scores = hfp.score(model, DOCUMENTS, progress=False).log_likelihood
        assert found.tolist() == pytest.approx(scores.tolist(), rel=close)


def kept_for_the_backward_pass(model, batch):
    """The number of values of all logits that are kept, whole or in chunks of 4 tokens."""
    kept, weight = [], model.lm_head.weight

    def note(tensor):
        if tensor.shape[-1:] == (128,) and tensor.data_ptr() != weight.data_ptr():
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hfp.document_logps(model, batch)
    return sum(kept)


def test_logits_of_chunks_are_not_kept_for_the_backward_pass():
    model = patched("Llama", torch.float64)
    for layer in (model.lm_head, model.model.embed_tokens):
        layer.requires_grad_(False)
    batch = hfp.PackingCollator()([{"input_ids": [*range(3, 60)]}])
    assert kept_for_the_backward_pass(model, batch) >= 57 * 128
    with chunks_of(4, model):
        hfp.document_logps(model, batch)  # the first call tests the model
        assert kept_for_the_backward_pass(model, batch) < 57 * 128


def batches():
    rows = datasets.Dataset.from_dict({"input_ids": ALL, "labels": ALL_LABELS})
    packed = hfp.pack(rows, hfp.BestFit(16, seed=1), share_prefixes=2)
    assert len(packed) > 1
    assert sum(map(len, packed["tree_input_ids"])) < sum(map(len, ALL))
    return list(torch.utils.data.DataLoader(packed, batch_size=-(-len(packed) // 2), collate_fn=hfp.PackingCollator()))


def with_lora(model):
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@pytest.mark.parametrize(
    ("name", "loss"),
    fast_only([("GPT2", "token"), ("Llama", "sequence"), ("LoRA", "token")], ("Llama", "sequence"), ("LoRA", "token")),
)
def test_checkpointing_and_lora(name, loss):
    if name == "LoRA":
        stock, model = with_lora(exact("Llama")), hfp.patch_model(with_lora(exact("Llama")), trees=True)
        share_parameters(stock, model)
    else:
        stock, model = None, patched_with_stock(name)
    model.train()
    model.gradient_checkpointing_enable()
    parts = batches()
    items = sum(int(labels_of(batch).items(loss)) for batch in parts)
    total = sum(hfp.compute_loss(model, batch, loss=loss, num_items_in_batch=items) for batch in parts)
    total.backward()
    found = gradients(model)
    if stock is not None:
        model.stock = [stock]
    expected, _ = loss_alone(model, ALL, ALL_LABELS, loss)
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert ("lora" in min(found)) == (name == "LoRA")
    assert largest_difference(found, gradients(model)) <= 1e-12


def log_probabilities_on_rank(folder):
    rank = Accelerator(cpu=True).process_index
    model = DistributedDataParallel(hfp.patch_model(exact("Llama")))
    hfp.document_logps(model, batch_of([(DOCUMENTS, LABELS), OTHER][rank])).sum().backward()
    torch.save(gradients(model.module), folder / f"gradients-{rank}.pt")


@pytest.mark.slow
def test_log_probabilities_on_two_ranks(tmp_path):
    on_ranks(log_probabilities_on_rank, tmp_path, ranks=2)
    model = patched_with_stock("Llama")
    (sums_alone(model, ALL, ALL_LABELS).sum() / 2).backward()  # DDP averages over ranks
    wanted = gradients(model)
    for rank in range(2):
        assert largest_difference(torch.load(tmp_path / f"gradients-{rank}.pt"), wanted) <= 1e-12


DATA = documents(12, samples=3)
RAW = sum(map(len, DATA["input_ids"]))
ONE_STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}


def weights_after(folder, kind, data, budget, loss="token", **changes):
    model = patched("GPT2", torch.float64, trees=True)
    trainer = trainer_of(folder, kind, model, data, gradient_accumulation_steps=3, **ONE_STEP | changes)
    summary = hfp.attach(trainer, budget, loss=loss)
    assert summary.optimizer_steps == 1
    trainer.train()
    return summary, {name: each.detach().clone() for name, each in model.named_parameters()}


def check_equal(found, expected):
    before = build("GPT2", torch.float64).state_dict()
    largest = max(float((each - before[name]).abs().max()) for name, each in expected.items())
    assert largest > 1e-3, "the step has to change the weights"
    assert max(float((found[name] - each).abs().max()) for name, each in expected.items()) <= 1e-11 * largest


CASES = [(kind, loss) for kind in (Trainer, SFTTrainer) for loss in ("token", "sequence")]


@pytest.mark.parametrize(("kind", "loss"), fast_only(CASES, (Trainer, "token"), (SFTTrainer, "sequence")))
def test_a_step_is_that_of_the_documents_alone(tmp_path, kind, loss):
    summary, expected = weights_after(tmp_path, Trainer, DATA, hfp.TokenBudget(2048), loss)
    assert summary.tokens == RAW
    shared, found = weights_after(tmp_path, kind, DATA, hfp.TokenBudget(2048, share_prefixes=2), loss)
    assert (shared.documents, shared.trees.documents, shared.trees.raw_tokens) == (36, 36, RAW)
    assert shared.tokens == shared.trees.unique_tokens < 0.6 * RAW
    assert "documents of a tree are in one optimizer step" in str(shared)
    check_equal(found, expected)
    packed = hfp.pack(DATA, hfp.BestFit(128), share_prefixes=2)
    if kind is Trainer:  # SFTTrainer expects tokens or text in its dataset
        rows, found = weights_after(tmp_path, kind, packed, hfp.TokenBudget(2048), loss)
        assert (rows.documents, rows.tokens) == (36, sum(map(len, packed["tree_input_ids"])))
        check_equal(found, expected)


def test_lost_documents_are_counted(tmp_path):
    rows = {"input_ids": [[*range(3, 40)], [*range(3, 30), 50], [5] * 90, [], [7, 8]]}
    data = datasets.Dataset.from_dict(rows)
    trainer = trainer_of(tmp_path, data=data)
    with pytest.raises(hfp.PackingError, match="90"):
        hfp.attach(trainer, hfp.TokenBudget(64, share_prefixes=True))
    summary = hfp.attach(trainer, hfp.TokenBudget(64, share_prefixes=True, overflow="drop"))
    assert (summary.left_out, summary.lost_tokens, summary.tokens) == (2, 90, 38 + 2)


@pytest.mark.skipif("axk2" not in CONFIG_MAPPING, reason="an older transformers does not have the model")
def test_prefixes_that_are_not_stable_are_refused(tmp_path):
    from tools.tiny_model import tiny_model

    trainer = trainer_of(tmp_path, model=tiny_model("axk2", "causal", num_hidden_layers=1), data=DATA)
    with pytest.raises(hfp.ModelNotSupportedError, match="the outputs for a prefix are not stable"):
        hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=2))
    assert type(trainer) is Trainer
    assert not is_patched(trainer.model)


def test_what_is_not_exact_is_said_once(tmp_path):
    model = build("Mixtral", output_router_logits=True, num_hidden_layers=1)
    model.config.attention_dropout = 0.1
    trainer = trainer_of(tmp_path, model=model, data=DATA)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=2))
        trainer.train()
    for start in ("dropout: documents that share a prefix", "output_router_logits: the balancing loss"):
        assert sum(str(each.message).startswith(start) for each in said) == 1
    assert trainer.state.log_history[0]["loss"] > 0


@pytest.mark.parametrize(("share", "column"), [(False, "input_ids"), (2, "tree_input_ids")])
def test_buckets(tmp_path, share, column):
    packed = hfp.pack(DATA, hfp.Bucket([32, 64, 128], padding_threshold=1), share_prefixes=share)
    assert len(set(packed["bucket"])) > 1
    trainer = trainer_of(tmp_path, data=packed)
    summary = hfp.attach(trainer, hfp.BucketBatches(tokens_per_batch=128))
    assert (summary.documents, summary.tokens) == (36, sum(map(len, packed[column])))
    assert len(logged(trainer)) == 2


def stream(shards=2):
    return DATA.to_iterable_dataset(num_shards=shards)


def packed(streams=2):
    return hfp.pack(stream(), hfp.BestFit(96), share_prefixes=2, streams=streams, window_packs=4)


def epoch_of(data, budget, loss="token"):
    model = patched("GPT2", torch.float64, trees=True)
    batches = list(hfp.prepare_dataloader(Accelerator(cpu=True), data, budget, loss=loss))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(batches))
    for batch in hfp.prepare_dataloader(accelerator, data, budget, loss=loss, model=model):
        accelerator.backward(hfp.compute_loss(model, batch))
    return batches, {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("loss", fast_only(["token", "sequence"], "sequence"))
def test_an_epoch_is_that_of_the_documents_alone(loss):
    _, expected = epoch_of(DATA, hfp.TokenBudget(8192), loss)
    for data, budget in (
        (DATA, hfp.TokenBudget(2048, share_prefixes=2)),
        (stream(shards=1), hfp.TokenBudget(96, share_prefixes=2)),
        (packed(streams=1), hfp.TokenBudget(96)),
        (packed(streams=1), hfp.TokenBudget(200)),  # two rows in a batch
    ):
        batches, found = epoch_of(data, budget, loss)
        assert sorted(ids for batch in batches for ids, _ in segments(batch)) == sorted(DATA["input_ids"])
        assert sum(batch["input_ids"].shape[1] for batch in batches) < 0.7 * RAW
        assert largest_difference(found, expected) <= 1e-12


@pytest.mark.parametrize("kind", fast_only([Trainer, SFTTrainer], SFTTrainer))
def test_a_trainer_trains_on_the_rows_of_the_stream(tmp_path, kind):
    rows = list(packed())
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}} if kind is SFTTrainer else {}
    trainer = trainer_of(tmp_path, kind, patched("Llama"), packed(), max_steps=len(rows), **options)
    summary = hfp.attach(trainer, hfp.TokenBudget(96))
    assert "share_prefixes=2" in str(summary)
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(tuple(inputs["input_ids"][0].tolist())), with_kwargs=True
    )
    losses = logged(trainer)
    assert [loss > 0 for loss in losses] == [True] * len(rows)
    expected = [tuple(row["tree_input_ids"]) for row in rows]
    assert list(dict.fromkeys(each for each in seen if each in expected)) == expected  # the first batch is also proven
