"""A model that was proven or evaluated trains as if it never was: bit by bit, with all gradients, and with hooks that
have seen nothing but the user's own steps."""

from collections import defaultdict, deque
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from changing_layers import Merging, Packing, Replacing
from tiers import fast_only
from tiny_models import build
from torch import nn
from trainers import Gradients, documents, loader_of, trainer_of
from training_by_hand import DOCUMENTS, batch_of, gradients_of, losses_alone, losses_and_gradients

import hf_packing as hfp
from hf_packing.attention.snapshot import WeightSnapshot, in_mode

ROWS = [row[:12] for row in documents(6)["input_ids"]]


def model_with(kind, is_inert=False):
    model = build("Llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = kind(layer.self_attn.q_proj, is_inert)
        layer.mlp.up_proj = kind(layer.mlp.up_proj, is_inert)
    return model.train()


def identities(model):
    """Parameters, where their data are, and what they and the layers hold."""
    found = {}
    for name, module in model.named_modules():
        own = {key: repr(value) for key, value in vars(module).items() if key in ("merged", "state", "training")}
        found[name] = own
    for name, each in model.named_parameters():
        scales = getattr(each, "scales", None)
        held = None if scales is None else (id(scales), {key: id(value) for key, value in vars(scales).items()})
        found[name] = id(each), each.data_ptr(), tuple(each.shape), each.requires_grad, set(vars(each)), held
    return found


def patch_model(model, _):
    hfp.patch_model(model)
    return losses_and_gradients(model, [batch_of(DOCUMENTS)])[1]


def attach(model, folder):
    seen = Gradients()
    trainer = trainer_of(folder, model=model, data=documents(12), callbacks=[seen], max_steps=1)
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.train()
    return seen.gradients


def prepare_dataloader(model, _):
    batch = next(iter(loader_of(documents(12), model=model)))
    hfp.compute_loss(model, batch).backward()
    return gradients_of(model)


def in_a_loop(evaluate, model):
    patch_model(model, None)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)
    for _ in range(2):
        losses_and_gradients(model, [batch_of(DOCUMENTS)])
        optimizer.step()
        evaluate(model)
    return losses_and_gradients(model, [batch_of(DOCUMENTS)])[1]


def evaluation_loss(model, _):
    return in_a_loop(lambda model: hfp.evaluation_loss(Accelerator(cpu=True), model, documents(6)), model)


def score(model, _):
    return in_a_loop(lambda model: hfp.score(model, ROWS, progress=False), model)


def score_with_prefixes(model, _):
    return in_a_loop(lambda model: hfp.score(model, ROWS, share_prefixes=True, progress=False), model)


ENTRIES = [patch_model, attach, prepare_dataloader, evaluation_loss, score, score_with_prefixes]


@pytest.mark.parametrize("kind", fast_only([Merging, Replacing, Packing], Packing))
@pytest.mark.parametrize("entry", fast_only(ENTRIES, attach, evaluation_loss, score))
def test_a_model_trains_as_if_it_was_never_in_evaluation_mode(entry, kind, tmp_path):
    expected, model = model_with(kind, is_inert=True), model_with(kind)
    before, changes = identities(model), Merging.changes
    wanted = entry(expected, tmp_path)
    assert Merging.changes == changes
    found = entry(model, tmp_path)
    assert Merging.changes > changes + 1
    assert identities(model) == before
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(each.any() for each in found.values())
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_gradients_after_a_proof_are_those_of_documents_alone():
    model = model_with(Merging)
    _, alone = losses_alone(deepcopy(model))
    found = patch_model(model, None)
    assert found.keys() == alone.keys()
    assert max(float((found[name] - alone[name]).abs().max()) for name in alone) < 1e-3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("entry", fast_only([patch_model, evaluation_loss, score], score))
def test_frozen_modules_keep_their_mode(entry, training):
    model = model_with(Merging).train(training)
    frozen = model.model.layers[0].train(not training).self_attn.q_proj
    assert frozen.merged == training
    model.model.layers[1].mlp.training = not training  # without its inner modules
    modes, before = [each.training for each in model.modules()], identities(model)
    weights = [each.detach().clone() for each in model.parameters()]
    hfp.patch_model(model)
    if entry is evaluation_loss:
        hfp.evaluation_loss(Accelerator(cpu=True), model, documents(6))
    elif entry is score:
        hfp.score(model, ROWS, progress=False)
    assert [each.training for each in model.modules()] == modes
    assert identities(model) == before
    assert all(torch.equal(each, old) for each, old in zip(model.parameters(), weights, strict=True))


def test_a_module_that_keeps_a_mode_keeps_it():
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(mode and False)

    model = nn.Sequential(Frozen(2).train(), nn.BatchNorm1d(2)).train()
    with in_mode(model, training=False):
        assert not any(each.training for each in model.modules())
    assert [each.training for each in model.modules()] == [True, False, True]


def test_what_forwards_keep_in_evaluation_mode_stays_if_weights_stay():
    model = nn.Sequential(nn.Linear(2, 2)).train()
    with in_mode(model, training=False):
        model.seen, model[0].seen = 1, [2]
    assert (model.seen, model[0].seen) == (1, [2])
    with in_mode(model, training=False, probed=True):
        model.seen = 3
        model[0].seen.append(3)
    assert (model.seen, model[0].seen) == (1, [2])


def test_a_large_weight_is_copied_only_if_it_is_written():
    model = nn.Linear(2**11, 2**11)
    with WeightSnapshot(model) as kept:
        model(torch.zeros(1, 2**11))
        assert not kept._copies
        model.weight.data = model.weight.data * 2
        assert not kept._copies
        model.bias.data += 1
        assert len(kept._copies) == 1


RAN = np.zeros(1, int)
"""Arrays are data, which is not undone: what shows that hooks run in proofs."""
SEEN, COUNT = [], 0


def note():
    SEEN.append(1)


class Collector:
    def __init__(self):
        self.calls, self.values, self.inner = 0, [], SimpleNamespace(by_name=defaultdict(list))

    def method(self, *_):
        RAN[0] += 1
        self.calls += 1
        self.values.append(self.calls)
        self.inner.by_name["all"].append(1)

    def __call__(self, *_):
        self.method()


def in_a_closure():
    values, by_name, latest, kinds, count = [], {"layers": {"first": []}}, deque(maxlen=50), set(), 0
    total = torch.zeros(1)

    def hook(*_):
        nonlocal count
        RAN[0] += 1
        count += 1
        values.append(count)
        by_name["layers"]["first"].append(1)
        by_name.setdefault(f"call {count}", []).append(1)
        latest.append(1)
        kinds.add(count)
        total.add_(1)

    def counts():
        nested = len(by_name["layers"]["first"])
        return [count, len(values), nested, len(by_name) - 1, len(latest), len(kinds), int(total)]

    return hook, counts


def in_globals():
    global COUNT
    SEEN.clear()
    COUNT = 0

    def hook(*_):
        global COUNT
        RAN[0] += 1
        COUNT += 1
        note()

    return hook, lambda: [COUNT, len(SEEN)]


def in_attributes(called):
    made = Collector()
    hook = made if called else made.method
    return hook, lambda: [made.calls, len(made.values), len(made.inner.by_name["all"])]


def in_arguments():
    values, others = [], []

    def hook(first, *_, second=others):
        RAN[0] += 1
        first.append(1)
        second.append(1)
        hook.calls = getattr(hook, "calls", 0) + 1

    return partial(hook, values), lambda: [len(values), len(others), hook.calls]


COLLECTING = {
    "closure": in_a_closure,
    "globals": in_globals,
    "method": partial(in_attributes, False),
    "object": partial(in_attributes, True),
    "arguments": in_arguments,
}

KINDS = {
    "forward": lambda module, hook: module.register_forward_hook(lambda *_: hook()),
    "always": lambda module, hook: module.register_forward_hook(lambda *_: hook(), always_call=True),
    "with arguments": lambda module, hook: module.register_forward_hook(lambda *_: hook(), with_kwargs=True),
    "before": lambda module, hook: module.register_forward_pre_hook(lambda *_: hook()),
    "before, with arguments": lambda module, hook: module.register_forward_pre_hook(
        lambda *_: hook(), with_kwargs=True
    ),
    "backward": lambda module, hook: module.register_full_backward_hook(lambda *_: hook()),
    "before backward": lambda module, hook: module.register_full_backward_pre_hook(lambda *_: hook()),
    "of all modules": lambda module, hook: nn.modules.module.register_module_forward_hook(
        lambda called, *_: hook() if called is module else None
    ),
}


def check_calls(entry, register, make, folder):
    model = build("Llama").train()
    hook, counts = make()
    handle = register(model.model.layers[0].mlp, hook)
    ran = RAN[0]
    try:
        entry(model, folder)
    finally:
        handle.remove()
    assert RAN[0] > ran + 1
    assert counts() == [1] * len(counts())


@pytest.mark.parametrize("make", COLLECTING.values(), ids=COLLECTING)
@pytest.mark.parametrize("entry", fast_only([patch_model, attach, prepare_dataloader], attach))
def test_hooks_have_seen_only_the_step_of_the_user(entry, make, tmp_path):
    check_calls(entry, lambda module, hook: module.register_forward_hook(hook), make, tmp_path)


@pytest.mark.parametrize("kind", fast_only(KINDS, "always", "before backward"))
def test_hooks_of_all_kinds_have_seen_only_the_step_of_the_user(kind, tmp_path):
    check_calls(attach, KINDS[kind], in_a_closure, tmp_path)


def test_hooks_of_weights_do_not_run_in_proofs(tmp_path):
    model, calls = build("Llama").train(), np.zeros(2, int)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda _: calls.__setitem__(0, calls[0] + 1))
    weight.register_post_accumulate_grad_hook(lambda _: calls.__setitem__(1, calls[1] + 1))
    attach(model, tmp_path)
    assert calls.tolist() == [1, 1]


def test_hooks_keep_what_they_see_in_an_evaluation():
    model = hfp.patch_model(build("Llama"))
    hook, counts = in_a_closure()
    model.model.layers[0].mlp.register_forward_hook(hook)
    hfp.evaluation_loss(Accelerator(cpu=True), model, documents(6))
    assert counts() == [6] * len(counts())


@pytest.mark.slow
def test_a_hook_that_leaks_is_still_found():
    model, last = build("Llama"), []

    def hook(_, __, output):
        last.append(output.mean())
        return output + 10 * last[-2] if len(last) > 1 else output

    model.model.layers[0].mlp.register_forward_hook(hook)
    with pytest.raises(hfp.ModelNotSupportedError):
        hfp.patch_model(model)
    assert not last
