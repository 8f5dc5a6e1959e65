"""A training leaves its loop at the first checkpoint after a lost machine came back."""

import pytest

from towers.hooks import rejoin


def test_the_loop_is_left_behind_a_checkpoint_that_is_newer_than_the_return():
    now, back, saved = [0.0], [False], [10]
    hook = rejoin.RejoinHook(lambda: back[0], lambda: saved[0], clock=lambda: now[0])

    def step(secs=1.0):
        now[0] += secs
        hook.after_run(None, None)

    step()
    saved[0] = 20
    step()  # nobody is back
    back[0] = True
    step(0.5)  # it does not look at each step
    saved[0] = 30
    step(0.5)
    step()  # back since this checkpoint
    back[0] = False
    step()  # gone again
    back[0], saved[0] = True, 40
    step()
    saved[0] = 50
    with pytest.raises(rejoin.Rejoin):
        step()
