"""The place of a run in its epochs, from the number of an optimizer step, also if steps had other sizes before."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from hf_packing.sampling.steps_of_epochs import StepsOfEpochs

COUNTS = st.integers(1, 1000)


@st.composite
def runs(draw):
    steps, rest, epoch = draw(COUNTS), draw(COUNTS), draw(st.integers(0, 5))
    trained = draw(st.lists(st.tuples(st.integers(1, 64), COUNTS), max_size=3))
    share = draw(st.floats(0, 0.999)) if trained else 0.0
    return StepsOfEpochs(steps, rest, epoch, draw(st.integers(0, 10**6)), share, tuple(trained))


@given(COUNTS, st.integers(0, 5000), st.floats(0.01, 9))
def test_without_a_change_places_are_those_of_a_division(steps, step, epochs):
    run = StepsOfEpochs(steps, rest=steps)
    assert run.counts_from_zero
    assert run.place(step) == (step // steps, step % steps, steps)
    assert math.isclose(run.epochs_at(step), step / steps)
    assert math.ceil(steps * epochs) - run.until(epochs) in ((0, 1) if steps * epochs % 1 < 1e-6 else (0,))


@given(runs(), st.integers(0, 5))
def test_epochs_end_after_all_of_their_steps(run, more):
    ends = run.began + run.rest + more * run.steps
    assert run.until(run.epoch + 1 + more) == ends
    assert run.place(ends) == (run.epoch + 1 + more, 0, run.steps)
    assert run.epochs_at(ends) == run.epoch + 1 + more
    before = run.place(ends - 1)
    assert (before.epoch, before.done + 1) == (run.epoch + more, before.steps)
    assert run.epochs_at(ends - 1) < run.epochs_at(ends)


@given(runs(), st.integers(0, 3000))
def test_a_part_of_an_epoch_ends_where_it_was_counted(run, step):
    step += run.began
    assert run.until(run.epochs_at(step)) in (step, step + 1)  # a step is less than what rounding may add
    assert run.until(run.epoch) == run.began


@given(runs())
def test_saved_as_json(run):
    assert StepsOfEpochs.from_saved(json.loads(json.dumps(run.to_saved()))) == run
