"""Isolation proven on the first batch of a training: leaks are refused before a step, on all ranks, by their name."""

import contextlib
import io
import json
import os
import re

import accelerate
import datasets
import pytest
import torch
from aligned_layers import with_aligned_layers
from leaky_models import LEAKS, NOT_NAMED, leaky
from model_inputs import documents as random_documents
from patched_models import patched
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from tiers import fast_only
from tiny_models import build, enable_checkpointing
from torch import nn
from torch.distributed.fsdp import fully_shard
from trainers import attached, documents_in, loader_of, logged, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import patch

UNPROVEN = "isolation and the step: to be proven on the first batch"
LENGTHS = [200, 40, 200, 7, 40, 120, 210, 33] * 2
BUDGET = hfp.TokenBudget(900)
LONG = {"max_position_embeddings": 1024, "num_hidden_layers": 1}


def documents(lengths=LENGTHS):
    return datasets.Dataset.from_dict({"input_ids": random_documents(lengths=lengths)})


def attached_to(folder, model, how=None, **changes):
    return attached(folder, BUDGET, how, model=model, data=documents(), **changes)


@pytest.mark.parametrize("regime", fast_only(sorted(LEAKS), "distance", "second call"))
def test_attach_refuses_a_leak_before_the_first_step(tmp_path, regime):
    model, module = leaky(regime)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = trainer_of(tmp_path, model=model, data=documents(), bf16=regime == "autocast")
    summary = hfp.attach(trainer, BUDGET)
    assert str(summary).endswith(UNPROVEN)
    with pytest.raises(hfp.ModelNotSupportedError, match="the first batch shows that packed documents") as found:
        trainer.train()
    assert (f"the difference begins in {module}. Short documents" in str(found.value)) == (regime not in NOT_NAMED)
    assert trainer.state.global_step == 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluations_and_loops_refuse_a_leak_too(tmp_path):
    model, module = leaky("distance")
    with pytest.raises(hfp.ModelNotSupportedError, match=f"in evaluation mode.*{re.escape(module)}"):
        attached_to(tmp_path, model, per_device_eval_batch_size=8).evaluate(documents())
    model, module = leaky("row length")
    loader = loader_of(documents(), BUDGET, model=model)
    with pytest.raises(hfp.ModelNotSupportedError, match=re.escape(module)):
        next(iter(loader))


def test_training_is_the_same_as_without_the_proof(tmp_path):
    losses = [
        logged(attached_to(tmp_path, build("Llama", **LONG), {"prove": prove})) for prove in ("first batch", "model")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_a_batch_of_one_document_proves_the_step_alone(tmp_path):
    """Its documents are those of several batches."""
    trainer = trainer_of(tmp_path, model=patched(**LONG), data=documents([210] * 4), max_steps=1)
    summary = hfp.attach(trainer, hfp.TokenBudget(210))
    trainer.train()
    last = str(summary).splitlines()[-1]
    assert last.startswith("step: proven on the first training batch: 3 documents of 63 tokens")
    assert "isolation" not in str(summary)


def test_the_first_batch_with_several_documents_counts():
    budget = hfp.TokenBudget(210, seed=0)  # the single document comes first
    loader = loader_of(documents([210, 100, 90]), budget, model=patched(**LONG))
    found = [(len(documents_in(batch)), str(loader.first_batch_proof)) for batch in loader]
    assert "isolation" not in found[0][1]
    assert f"{PROVEN}training batch: 2 documents of up to 100 tokens, 190 in all" in found[1][1]


PROVEN = "isolation: proven on the first "


@pytest.mark.parametrize(("kind", "stream"), [(Trainer, True), (SFTTrainer, False)])
def test_one_line_for_each_mode_is_printed(tmp_path, capsys, kind, stream):
    data = documents().to_iterable_dataset(num_shards=2) if stream else documents()
    trainer = trainer_of(tmp_path, kind, patched(**LONG), data, logging_strategy="no")
    summary = hfp.attach(trainer, BUDGET)
    capsys.readouterr()
    for _ in range(2):
        trainer.train()
        trainer.evaluate(documents(LENGTHS[:8]))
    proven = trainer.attached.first_batch_proof
    printed = [line for line in capsys.readouterr().out.splitlines() if "proven on" in line]
    assert printed == str(proven).splitlines()
    assert [line.split(" batch")[0] for line in printed] == [
        f"{what}: proven on the first {mode}" for mode in ("training", "evaluation") for what in ("isolation", "step")
    ]
    assert f": {proven.proofs[PROVEN + 'training batch'].documents} documents of up to " in printed[0]
    assert "in training mode and float32; no document changes the logits or gradients of another" in printed[0]
    assert str(summary).endswith("\n".join(printed))


def test_loops_print_one_line(capsys):
    rows = documents()
    for data in (rows, rows.to_iterable_dataset(num_shards=2)):
        accelerator = accelerate.Accelerator(cpu=True)
        model = patched(**LONG)
        loader = hfp.prepare_dataloader(accelerator, data, BUDGET, model=model)
        accelerator.prepare(model)
        capsys.readouterr()
        for _ in range(2):
            assert all("input_ids" in batch for batch in loader)
        assert capsys.readouterr().out == f"{loader.first_batch_proof}\n"


def test_a_progress_bar_goes_on_below_the_line(tmp_path, capfd):
    model = patched(**LONG)
    attached_to(tmp_path, model, disable_tqdm=False, logging_strategy="no").train()
    printed, drawn = capfd.readouterr()
    assert printed.count(PROVEN) == 1
    before, after = drawn.split("\r" + " " * 10, 1)  # tqdm clears the bar before it prints
    assert "0/2" in before
    assert "2/2" in after


@pytest.mark.filterwarnings("ignore:patch_model proved isolation on a small copy")
@pytest.mark.parametrize(
    ("prove", "said", "stream"),
    [("model", "when the model was patched", True), ("small", "on a small copy of the model", False)],
)
def test_the_summary_says_that_isolation_was_proven_before(tmp_path, prove, said, stream):
    data = documents().to_iterable_dataset(num_shards=2) if stream else documents()
    trainer = trainer_of(tmp_path, Trainer, build("Llama", **LONG), data)
    assert str(hfp.attach(trainer, BUDGET, prove=prove)).endswith(f"\nisolation: proven {said}")


class Smooth(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden + 0.5 * nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])


def test_modules_that_a_small_copy_lacks_are_refused_unless_they_are_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(patch, "_FEW_PARAMETERS", 0)
    for prove in ("first batch", "model"):
        model = build("Llama", **LONG)
        model.model.layers[0].mlp = Smooth(model.model.layers[0].mlp)
        trainer = attached_to(tmp_path, model, {"prove": prove})
        if prove == "model":
            assert hfp.check_isolation(model).route.modules == {"Smooth": 1}
            trainer.train()
            continue
        with pytest.raises(hfp.ModelNotSupportedError, match="packed documents are not isolated.*mlp"):
            trainer.train()


def test_a_large_model_with_layers_that_take_only_multiples(tmp_path, monkeypatch):
    """The copy has no such layers; the batch says which multiples there are."""
    monkeypatch.setattr(patch, "_FEW_PARAMETERS", 0)
    found = []
    for multiple in (1, 32):
        model = with_aligned_layers(build("Llama", torch.float64, **LONG), multiple)
        trainer = attached(tmp_path, hfp.TokenBudget(900, align_tokens=32), model=model, data=documents())
        found.append((logged(trainer), str(trainer.attached.first_batch_proof)))
    assert found[0] == found[1]
    assert "documents of 7, 210 tokens are the same alone" in found[1][1]


def test_a_model_without_a_small_copy_is_patched_itself(tmp_path, monkeypatch):
    class Odd(type(build("Llama"))):
        def __init__(self, config, needed=None):
            if needed is None:
                raise ValueError("needed")
            super().__init__(config)

    monkeypatch.setattr(patch, "_FEW_PARAMETERS", 0)
    model = Odd(build("Llama").config, needed=True)
    attached_to(tmp_path, model)
    assert hfp.check_isolation(model).isolated


OF_RANKS = [600, 100, 200, 310, 310, 450] + [20] * 60
"""So that ranks get batches with different numbers of documents, and so different numbers of lengths."""


def with_adapters(case):
    model = build("Llama", **LONG) if case in ("stock", "broken") else leaky(case)[0]
    enable_checkpointing(model, use_reentrant=False)
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train_case(case, folder):
    accelerator = accelerate.Accelerator(cpu=True)
    model = with_adapters(case)
    budget = hfp.TokenBudget(900, seed=3)  # the first batch of each rank has several documents
    loader = hfp.prepare_dataloader(accelerator, documents(OF_RANKS), budget, model=model)
    if case == "broken":
        if accelerator.process_index:
            model.base_model.model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    else:
        for each in (*model.base_model.model.model.layers, model):
            fully_shard(each)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    found = {"losses": []}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            for batch in loader:
                loss = hfp.compute_loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found["losses"].append(loss.item())
        except (hfp.PackingError, ZeroDivisionError) as error:
            found["refused"] = str(error)
    found["printed"] = printed.getvalue()
    found["proven"] = str(loader.first_batch_proof)
    found["sharded"] = all(type(each).__name__ == "DTensor" for each in model.parameters())
    (folder / f"{case}-{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()


def train_sharded(folder, cases):
    for case in cases:
        train_case(case, folder)
    os._exit(0)  # gloo may wait at the end


@pytest.mark.slow
def test_ranks_that_share_a_model(tmp_path):
    """Two processes with FSDP2, LoRA and checkpointing: all of them go on, or all of them stop. So do others if one of
    them raises an error."""
    cases = ["broken", "stock", "distance", "gradients", "segments"]
    on_ranks(train_sharded, tmp_path, cases, ranks=2)
    found = {case: [json.loads((tmp_path / f"{case}-{rank}.json").read_text()) for rank in range(2)] for case in cases}
    assert len(found["stock"][0]["losses"]) == len(found["stock"][1]["losses"]) > 1
    assert all(each["sharded"] and "logits or gradients" in each["proven"] for each in found["stock"])
    refused = [each["refused"] for each in found["broken"]]
    assert refused == ["rank 1 of 2 raised ZeroDivisionError: division by zero", "division by zero"]
    assert found["stock"][0]["proven"] == found["stock"][1]["proven"]
    assert [each["printed"] for each in found["stock"]] == [found["stock"][0]["proven"] + "\n", ""]
    assert not any(each["printed"] for case in cases[2:] for each in found[case])
    for case in cases[2:]:
        assert found[case][0]["refused"] == found[case][1]["refused"]
        assert (leaky(case)[1] in found[case][0]["refused"]) == (case not in NOT_NAMED)
        assert found[case][0]["losses"] == found[case][1]["losses"] == []


def train_whole(folder, _):
    """The logged losses, and the gradients of the first step, of a model whose own weights FSDP2 shards, too."""
    for prove in ("first batch", "model"):
        trainer = trainer_of(folder, model=build("Llama", **LONG), data=documents(), optim="sgd", learning_rate=0.1)
        hfp.attach(trainer, BUDGET, prove=prove)
        for each in (*trainer.model.model.layers, trainer.model):
            fully_shard(each)
        trainer.accelerator.prepare_model = lambda model, **_: model  # accelerate has FSDP for GPUs only
        with contextlib.redirect_stdout(io.StringIO()):
            found = logged(trainer)
        proof = trainer.attached.first_batch_proof
        assert (proof is None) == (prove == "model")
        result = [found, proof and proof.proofs["step: proven on the first training batch"].parameters]
        (folder / f"{prove}-{trainer.args.process_index}.json").write_text(json.dumps(result))
    os._exit(0)  # gloo may wait at the end


@pytest.mark.slow
def test_no_gradient_is_left_in_a_sharded_model(tmp_path):
    """The proof of isolation leaves the weights of the whole model gathered, whose gradients are in other tensors."""
    on_ranks(train_whole, tmp_path, None, ranks=2)
    for rank in range(2):
        with_proof, without = (
            json.loads((tmp_path / f"{prove}-{rank}.json").read_text()) for prove in ("first batch", "model")
        )
        assert with_proof[0] == without[0]
        assert with_proof[1] == len([*build("Llama", **LONG).parameters()])


class FailsOnOneRank(Trainer):
    def compute_loss(self, *args, **kwargs):
        if self.args.process_index == 1:
            raise ZeroDivisionError("of rank 1")
        return super().compute_loss(*args, **kwargs)


def fail_on_one_rank(folder, _):
    trainer = trainer_of(folder, model=build("Llama", **LONG), data=documents(), kind=FailsOnOneRank)
    hfp.attach(trainer, BUDGET)
    for each in (*trainer.model.model.layers, trainer.model):
        fully_shard(each)
    trainer.accelerator.prepare_model = lambda model, **_: model
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            trainer.train()
        except Exception as error:  # on the other rank, whatever an exchange raises whose partner has gone
            (folder / str(trainer.args.process_index)).write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.slow
def test_a_rank_that_fails_in_a_sharded_step_ends(tmp_path):
    """It does not wait for ranks that wait for it in the model."""
    on_ranks(fail_on_one_rank, tmp_path, None, ranks=2)
    assert (tmp_path / "1").read_text() == "ZeroDivisionError: of rank 1"
    assert (tmp_path / "0").exists()
