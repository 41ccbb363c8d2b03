"""Whole rows on two processes: each once an epoch, the steps of the padded batch, and exact resume."""

import json
from collections import Counter

import pytest
import torch
from padded_steps import apart, by_hand, read_rows
from processes import launch
from whole_rows_process import ROWS, trainer_of

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.slow
def test_evaluation_loss_on_two_processes(tmp_path):
    """Rows that accelerate repeats, so that both processes have as many, count once in a mean of labeled tokens."""
    size = 4
    assert ROWS % (2 * size)
    run = {"kind": "tokens", "evaluate": True, "per_device_eval_batch_size": size}
    launch("whole_rows_process.py", tmp_path, json.dumps({"eval": run}), ranks=2)
    found = [json.loads((tmp_path / "eval" / f"metrics-{rank}.json").read_text())["eval_loss"] for rank in range(2)]
    trainer = trainer_of("tokens", tmp_path)
    whole = trainer.data_collator(list(trainer.get_train_dataloader().dataset))
    with torch.no_grad():
        expected = float(trainer.model.eval()(**whole).loss)
    assert found == pytest.approx([expected] * 2, rel=1e-6)


ON_TWO = ("classifier", "dpo", "reward")


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory):
    """A folder with runs of each kind: an epoch, a few steps, and an unbroken run beside one that was killed."""
    folder = tmp_path_factory.mktemp("two")
    whole = {"max_steps": -1, "num_train_epochs": 1}
    save = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "dropout": 0.1}
    runs = {"epoch": whole, "few": {"gradient_accumulation_steps": 2}, "unbroken": save}
    unbroken = {f"{kind}/{name}": run | {"kind": kind} for kind in ON_TWO for name, run in runs.items()}
    launch("whole_rows_process.py", folder, json.dumps(unbroken), ranks=2)
    for kind in ON_TWO:
        cut = {f"{kind}/cut": save | {"kind": kind, "kill": 3}}
        launch("whole_rows_process.py", folder, json.dumps(cut), ranks=2, fails=True)
        assert not (folder / kind / "cut" / "parameters.pt").exists()
    resumed = {f"{kind}/cut": save | {"kind": kind, "resume": True} for kind in ON_TWO}
    launch("whole_rows_process.py", folder, json.dumps(resumed), ranks=2)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("exact_log_probs")
@pytest.mark.parametrize("kind", ON_TWO)
def test_two_processes(kind, on_two_processes, tmp_path):
    """Each row once an epoch; parameters are those of one process with padded batches; a killed run resumes exactly."""
    folder = on_two_processes / kind
    seen = [read_rows(folder / "epoch" / f"rows-{rank}.jsonl") for rank in range(2)]
    assert len(seen[0]) == len(seen[1]) > 1
    counts = Counter(json.dumps(row) for rank in seen for batch in rank for row in batch)
    assert len(counts) == ROWS
    assert set(counts.values()) == {1}

    first, second = (read_rows(folder / "few" / f"rows-{rank}.jsonl") for rank in range(2))
    assert len(first) == len(second) >= 6  # accelerate reads one more than it needs
    steps = [[row for batch in (*first[n : n + 2], *second[n : n + 2]) for row in batch] for n in (0, 2, 4)]
    assert apart(torch.load(folder / "few" / "parameters.pt"), by_hand(kind, tmp_path, steps)) < 1e-12

    unbroken, resumed = (torch.load(folder / name / "parameters.pt") for name in ("unbroken", "cut"))
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
