"""Gradients and evaluation losses that do not depend on how a step is split into micro-batches."""

import pytest
from processes import evaluated, gradients_of_a_padded_batch, largest_difference, losses, read
from training_process import EVALUATED, ONE_STEP, train


@pytest.mark.parametrize("through", ["trainer", "loop"])
@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_the_gradient_does_not_depend_on_the_split(tmp_path, loss, through):
    expected, value = gradients_of_a_padded_batch(loss)
    for accumulation, max_tokens in [(1, 2000), (4, 300)]:
        folder, settings = tmp_path / f"{accumulation}", {"accumulation": accumulation, "max_tokens": max_tokens}
        train(folder, through=through, loss=loss, **ONE_STEP, **settings)
        assert len(read(folder, "seen", 0)) == accumulation
        assert largest_difference(folder / "gradients.pt", expected) <= 1e-12
        assert losses(folder)[1] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("through", ["trainer", "loop"])
def test_evaluation_is_the_same_at_any_batch_size(tmp_path, through):
    train(tmp_path / "run", through=through, **EVALUATED)
    found = evaluated(tmp_path / "run")
    assert len(found) == 3
    assert max(found) - min(found) <= 1e-9 * max(found)
