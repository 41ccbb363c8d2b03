"""attach(trainer, None, level=True): rows change places within an optimizer step, and nothing else changes."""

import copy
import os

import numpy as np
import pytest
import torch
import trl
from accelerate import PartialState
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from processes import on_ranks
from tiers import slow
from trainers import tokenizer, trainer_of
from whole_rows import arguments, policy, texts
from whole_rows import trainer_of as rows_trainer_of

import hf_packing as hfp
from hf_packing.training import leveling
from hf_packing.training.leveling import _SAMPLED, divide

pytestmark = pytest.mark.filterwarnings("ignore")


SIDES = "prompt", "completion"


def scripted(input_ids, generation_config, **_):
    """Completions of 1 to 16 tokens, which follow from the prompts and from their place in the batch."""
    most, rows = generation_config.max_new_tokens, []
    for place, prompt in enumerate(input_ids.tolist()):
        rng = np.random.default_rng([place, *filter(None, prompt)])
        answer = rng.integers(8, 120, int(np.clip(rng.lognormal(1.5, 1), 1, most - 1))).tolist()
        rows.append([*prompt, *answer, 2, *[0] * (most - 1 - len(answer))])
    return torch.tensor(rows)


def reward(completions, **_):
    return [float(len(each) % 7) - 3 for each in completions]


def sampling(folder, kind=trl.GRPOTrainer, config=trl.GRPOConfig, accumulation=4, architecture="llama", **options):
    sizes = {"num_generations": 2, "max_completion_length": 16, "per_device_train_batch_size": 2}
    sizes |= {"gradient_accumulation_steps": accumulation, "max_steps": 3, "logging_steps": 1}
    model = policy(architecture)
    own = folder / f"reference-{os.environ.get('RANK', 0)}"  # from where TRL loads it
    model.save_pretrained(own)
    model.config._name_or_path = str(own)
    trainer = kind(
        model,
        reward_funcs=reward,
        args=arguments(folder, config, **sizes | options),
        train_dataset=texts(48, prompt=9),
        processing_class=tokenizer(),
    )
    trainer.model.generate = scripted
    return trainer


def unpaired(folder, **changes):
    """A KTOTrainer whose rows do not divide into full steps, and whose KL term is not 0."""
    model, reference = policy("llama"), policy("llama")
    with torch.no_grad():
        reference.lm_head.weight *= 3
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "max_length": None}
    return trl.KTOTrainer(
        model,
        args=arguments(folder, trl.KTOConfig, **sizes | {"max_steps": -1, "num_train_epochs": 1} | changes),
        train_dataset=texts(25, prompt=4, completion=20).add_column("label", [True, False, False, True, False] * 5),
        processing_class=tokenizer(),
        ref_model=reference,
    )


has_lists = Version(trl.__version__) < Version("1.9")  # KTOTrainer

KINDS = {
    **{loss: (trl.GRPOTrainer, trl.GRPOConfig, {"loss_type": loss}) for loss in ("grpo", "dr_grpo", "dapo")},
    "several steps of a rollout": (trl.GRPOTrainer, trl.GRPOConfig, {"steps_per_generation": 8, "num_iterations": 2}),
    "reference": (trl.GRPOTrainer, trl.GRPOConfig, {"beta": 0.1}),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, {}),
}

UNPAIRED = {
    "kto": {},
    "kto without a KL term": {"loss_type": "apo_zero_unpaired"},
}


def train(folder, name, level):
    if name in UNPAIRED:
        trainer = unpaired(folder, **UNPAIRED[name])
    else:
        kind, config, options = KINDS[name]
        trainer = sampling(folder, kind, config, **options)
    hfp.attach(trainer, None, level=level)
    seen, own = [], trainer._prepare_inputs

    def note(inputs):
        seen.append(own(inputs))
        return seen[-1]

    trainer._prepare_inputs = note
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [each.detach().clone() for each in trainer.model.parameters()], seen, logs


def rows_of(batches):
    """The tokens of all rows, and what belongs to a row."""
    found = []
    for batch in batches:
        if "label" in batch:
            columns = [batch[name] for name in ("input_ids", "KL_input_ids", "label") if name in batch]
            found += [
                [str([*filter(None, np.ravel(each).tolist())]) for each in row] for row in zip(*columns, strict=True)
            ]
            continue
        for row in range(len(batch["prompt_mask"])):
            ids = [
                batch[f"{side}_ids"][row][batch[f"{side}_mask"][row] > 0].tolist() for side in ("prompt", "completion")
            ]
            found.append((*ids, round(batch["advantages"][row].item(), 3)))
    return found


def tokens_of(batches):
    return [sum(int(batch[f"{side}_mask"].sum()) for side in SIDES) for batch in batches]


@pytest.mark.parametrize(
    "name", ["dapo", *map(slow, ["grpo", "dr_grpo", "several steps of a rollout", "reference", "rloo"])]
)
def test_micro_batches_of_one_process_are_leveled(name, tmp_path):
    (wanted, stock, _), (found, leveled, logs) = (train(tmp_path, name, level) for level in (False, True))
    assert all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(found, wanted, strict=True))
    assert len(stock) == len(leveled)
    for first in range(0, len(stock), 4):
        before, after = stock[first : first + 4], leveled[first : first + 4]
        assert sorted(rows_of(before)) == sorted(rows_of(after))
        assert max(tokens_of(after)) <= max(tokens_of(before))
        assert {len(b["prompt_mask"]) for b in after} == {2}
        assert all(b[f"{side}_mask"].any(0)[edge] for b in after for side, edge in zip(SIDES, (0, -1), strict=True))
    assert all(
        entry["utilization"] == entry["utilization_without_level"] == 1 for entry in logs if "utilization" in entry
    )
    assert logs[0]["largest_micro_batch"] == max(
        int(b["prompt_mask"].sum() + b["completion_mask"].sum()) for b in leveled[:4]
    )


@pytest.mark.parametrize(
    "options",
    [{"loss_type": "bnpo"}, {"top_entropy_quantile": 0.3}, {"entropy_coef": 0.01}],
    ids=lambda each: next(iter(each)),
)
def test_known_means_over_the_tokens_of_a_micro_batch_are_refused(options, tmp_path):
    if not hasattr(trl.GRPOConfig, next(iter(options))):
        pytest.skip("an older TRL")
    trainer = sampling(tmp_path, **options)
    with pytest.raises(hfp.PackingError, match=f"{next(iter(options))}: expected .* with level=True"):
        hfp.attach(trainer, None, level=True)


def test_router_losses_are_refused(tmp_path):
    trainer = sampling(tmp_path, architecture="mixtral")
    if not getattr(trainer, "aux_loss_enabled", False):
        pytest.skip("GRPO of an older TRL without a router loss")
    with pytest.raises(hfp.PackingError, match="router_aux_loss_coef: expected 0.0 with level=True"):
        hfp.attach(trainer, None, level=True)


def test_other_means_are_shown_by_the_first_rollouts_of_uneven_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_packing.training.attach.check_can_level", lambda _: None)
    trainer = sampling(tmp_path, loss_type="bnpo")
    hfp.attach(trainer, None, level=True)
    with pytest.raises(hfp.PackingError, match="level: expected a loss that does not depend on which rows share"):
        trainer.train()


class Later(trl.GRPOTrainer):
    """Adds a mean over the tokens of each micro-batch, which is 0 in two steps, as where a policy is its reference."""

    def compute_loss(self, model, inputs, *args, **named):
        loss = super().compute_loss(model, inputs, *args, **named)
        mask = inputs["completion_mask"]
        return loss + (self.state.global_step > 1) * (mask * inputs["advantages"][:, None]).sum() / mask.sum()


def test_terms_that_are_0_at_first_are_found_later(tmp_path):
    trainer = sampling(tmp_path, Later, max_steps=9)
    hfp.attach(trainer, None, level=True)
    with pytest.raises(hfp.PackingError, match="level: expected a loss that does not depend on which rows share"):
        trainer.train()
    assert trainer.attached.leveling.proven_after is not None
    assert trainer.state.global_step > 1


class Copies(trl.GRPOTrainer):
    def _prepare_inputs(self, inputs):
        return dict(super()._prepare_inputs(inputs))


def test_rollouts_that_a_trainer_copies_are_refused(tmp_path):
    trainer = sampling(tmp_path, Copies)
    hfp.attach(trainer, None, level=True)
    with pytest.raises(hfp.PackingError, match="that of Copies returns another object; leave level out"):
        trainer.train()
    with pytest.raises(hfp.PackingError, match="batch: expected a batch of rollouts for a trainer that samples"):
        hfp.check_step(trainer)


def test_losses_that_show_nothing_are_no_proof(tmp_path):
    """Of whole groups in each micro-batch, whose advantages add up to 0."""
    options = {"loss_type": "grpo", "accumulation": 1, "num_generations": 4, "per_device_train_batch_size": 8}
    trainer = sampling(tmp_path, **options)
    hfp.attach(trainer, None, level=True)
    trainer.train()
    assert trainer.attached.leveling.proven_after is None


def train_on_ranks(folder, names):
    for name in names:
        for level in (False, True):
            weights, seen, logs = train(folder / "checkpoints", name, level)
            busy = [
                (entry["utilization_without_level"], entry["utilization"]) for entry in logs if "utilization" in entry
            ]
            kl = [entry["kl"] for entry in logs if "kl" in entry]
            torch.save((weights, rows_of(seen), busy, kl), folder / f"{name}-{level}-{PartialState().process_index}.pt")


def trained_alike(folder, name, ranks):
    """What each rank has saved, without and with level, once it is sure that parameters are the same."""
    of = {level: [torch.load(folder / f"{name}-{level}-{rank}.pt") for rank in range(ranks)] for level in (False, True)}
    wanted, found = of[False][0][0], of[True][0][0]
    alike = [torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(found, wanted, strict=True)]
    assert all(alike), name
    return of


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_ranks_are_leveled(ranks, tmp_path):
    names = ["grpo", "dr_grpo", "dapo", "rloo"]
    on_ranks(train_on_ranks, tmp_path, names, ranks=ranks)
    for name in names:
        of = trained_alike(tmp_path, name, ranks)
        rows = [sorted(row for _, rows, *_ in each for row in rows) for each in of.values()]
        assert rows[0] == rows[1]
        assert of[False][0][1] != of[True][0][1]
        assert not of[False][0][2]
        for before, after in of[True][0][2]:
            assert before < after <= 1


def test_kto_on_one_process_trains_on_its_rows_as_they_are(tmp_path):
    if has_lists:
        with pytest.raises(hfp.PackingError, match="level: expected micro-batches of texts, .* which is not"):
            train(tmp_path, "kto", level=True)
        return
    (wanted, stock, _), (found, leveled, logs) = (train(tmp_path, "kto", level) for level in (False, True))
    assert all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(found, wanted, strict=True))
    assert of_rounds([rows_of(stock)]) == of_rounds([rows_of(leveled)])
    assert all(entry["utilization"] == 1 for entry in logs[:-1])


def of_rounds(of_ranks):
    """The rows of micro-batches that run at the same time, of two rows on each rank."""
    return [
        sorted(row for rows in of_ranks for row in rows[first : first + 2]) for first in range(0, len(of_ranks[0]), 2)
    ]


@pytest.mark.skipif(has_lists, reason="TRL before 1.9")
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(2, [*UNPAIRED]), (4, ["kto"])], ids=str)
def test_rows_of_kto_change_ranks_and_keep_their_micro_batch(ranks, names, tmp_path):
    on_ranks(train_on_ranks, tmp_path, names, ranks=ranks)
    for name in names:
        of = trained_alike(tmp_path, name, ranks)
        stock, leveled = ([rows for _, rows, *_ in each] for each in of.values())
        assert of_rounds(stock) == of_rounds(leveled)
        assert stock[0] != leveled[0]
        assert stock[0][-2:] == leveled[0][-2:]  # of the uneven last step
        assert all(before <= after <= 1 for before, after in of[True][0][2])
        assert any(before < after for before, after in of[True][0][2])
        assert (max(of[True][0][3]) > 0) == ("without" not in name)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 5))
def test_each_micro_batch_has_as_many_rows(costs, rounds, ranks):
    cost = np.array(costs * rounds * ranks)
    places = divide(cost, rounds, ranks)
    assert places.shape == (rounds, ranks, len(costs))
    assert sorted(places.ravel().tolist()) == [*range(len(cost))]
    # no micro-batch is fuller than the mean by more than the largest row
    totals = cost[places].sum(2)
    assert totals.max() <= totals.mean() + cost.max() + 1e-9


def test_what_cannot_be_leveled_is_refused(tmp_path):
    with pytest.raises(
        hfp.PackingError, match="level: expected False for RewardTrainer, which samples no rows, and is no KTO"
    ):
        hfp.attach(rows_trainer_of("reward", tmp_path), None, level=True)
    with pytest.raises(hfp.PackingError, match="level: expected False beside a batching"):
        hfp.attach(trainer_of(tmp_path), hfp.TokenBudget(64), level=True)
    mask = torch.ones(2, 3, dtype=torch.long)
    batch = {
        "prompt_mask": mask,
        "completion_mask": mask[:, :2],
        "advantages": torch.ones(2),
        "number": torch.tensor(1),
    }
    leveling._check([batch], _SAMPLED)
    for more in ({"pixel_values": torch.ones(9, 4)}, {"images": [None, None]}, {"completion_logps": torch.ones(2, 3)}):
        with pytest.raises(hfp.PackingError, match=f"got {next(iter(more))!r}, which is not"):
            leveling._check([copy.copy(batch) | more], _SAMPLED)
    with pytest.raises(hfp.PackingError, match="with prompt_mask and completion_mask"):
        leveling._check([{"input_ids": mask}], _SAMPLED)
