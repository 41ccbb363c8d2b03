"""The loss in chunks inside of DDP and FSDP, on two processes."""

import json

import pytest
from chunks_process import CASES
from processes import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    launch("chunks_process.py", folder, ranks=2)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_whole_logits(found, case):
    result = found[case]
    rounded = case == "FSDP2 in bfloat16"
    assert result["loss"] == pytest.approx(result["expected"], rel=1e-3 if rounded else 1e-6)
    assert result["difference"] <= (2e-2 if rounded else 5e-6)
    alone = "the first version of FSDP shards the output layer on its own"
    assert result["whole logits since"] == (alone if case == "FSDP1, head alone" else None)


def test_a_batch_is_no_whole_step_on_two_ranks(found):
    message = "num_items_in_batch: expected the number of trainable tokens of the whole optimizer step divided by the 2"
    assert found["compute_loss"].startswith(message)
