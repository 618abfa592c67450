"""Back-offs: how long the pauses are, and how they end."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from headwater.model.backoff import Backoff


def test_pauses_double_up_to_the_longest_until_an_attempt_succeeds() -> None:
    """Without jitter they are exact."""
    backoff = Backoff(0.1, 1.0, jitter=0.0)
    assert [backoff.next_s() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next_s() == 0.1


@given(st.floats(0.001, 1.0), st.floats(1.0, 60.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0, exclude_max=True))
def test_jitter_shortens_a_pause_by_at_most_its_share(
    first: float, longest: float, jitter: float, drawn: float
) -> None:
    """No pause is longer than it would be without jitter, and jitter does not change those that follow."""
    exact, shortened = Backoff(first, longest, jitter=0.0), Backoff(first, longest, jitter=jitter, random=lambda: drawn)
    for _ in range(8):
        whole = exact.next_s()
        pause = shortened.next_s()
        assert whole * (1 - jitter) <= pause <= whole
        assert jitter * drawn < 1e-9 or pause < whole


def test_clients_that_fail_together_do_not_return_together() -> None:
    """Each back-off draws numbers of its own."""
    assert len({Backoff(1.0, 1.0).next_s() for _ in range(20)}) > 15


def test_a_sleep_ends_early_where_the_caller_has_less_time() -> None:
    """It never sleeps for less than nothing."""
    slept = list[float]()
    backoff = Backoff(0.5, 2.0, jitter=0.0, sleep=slept.append)
    backoff.sleep()
    backoff.sleep(0.25)
    backoff.sleep(-1.0)
    assert slept == [0.5, 0.25, 0.0]


def test_a_wait_ends_when_its_event_is_set() -> None:
    """So a capture that waits for its database stops at once."""
    stop = threading.Event()
    stop.set()
    Backoff(60.0, 60.0).wait(stop)
