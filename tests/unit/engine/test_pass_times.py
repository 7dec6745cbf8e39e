"""Times of passes: time of a token from passes that others share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.engine.pass_times import SHARED_STEP, PassTimes

PROMPT, DECODE = 0.001, 0.02


def taken(found: PassTimes, decoding: int = 0, read: int = 0, times: int = 200, chosen: int = 0,
          accepted: int = 0, n: int = 1) -> None:
    """Record passes that last as long as these speeds make them."""
    owner: Any = SimpleNamespace(sample=SimpleNamespace(accepted=accepted))
    run = SimpleNamespace(whole=accepted > 0, owner=owner)
    ran: Any = SimpleNamespace(n=n + accepted, chosen=[7] * chosen, run=run)
    works: Any = [SimpleNamespace(is_prefill=False, counts=[1]) for _ in range(decoding)]
    results = [[ran] for _ in works]
    if read:
        works.append(SimpleNamespace(is_prefill=True, counts=[read]))
        results.append([])
    tokens = 1 + chosen + accepted
    seconds = read * PROMPT + tokens * DECODE * (1 + SHARED_STEP * (decoding - 1) if decoding else 0)
    for _ in range(times):
        found.took(works, results, seconds)


@pytest.mark.parametrize("decoding", [1, 2, 8])
def test_company_does_not_make_a_replica_slower(decoding: int) -> None:
    pass_times = PassTimes()
    pass_times.set(5 * PROMPT, 5 * DECODE)
    taken(pass_times, decoding, times=1000)
    taken(pass_times, decoding, read=256, times=100)
    assert pass_times.decode == pytest.approx(DECODE, rel=0.01) and pass_times.prompt == pytest.approx(PROMPT, rel=0.01)


def test_passes_of_several_tokens_and_of_drafts_count_each() -> None:
    for more in ({"chosen": 3}, {"accepted": 3}):
        pass_times = PassTimes()
        taken(pass_times, 2, times=1, **more)
        assert pass_times.decode == pytest.approx(DECODE) and not pass_times.prompt


def test_a_few_tokens_of_a_prompt_say_nothing() -> None:
    pass_times = PassTimes()
    taken(pass_times, read=2)
    taken(pass_times, 1, read=2)
    assert pass_times.prompt == pass_times.decode == 0
    taken(pass_times, read=64, times=1)
    assert pass_times.prompt == pytest.approx(PROMPT)


def test_scores_say_nothing() -> None:
    pass_times = PassTimes()
    taken(pass_times, 1, n=16)
    taken(pass_times, 1, read=64, n=16)
    assert pass_times.prompt == pass_times.decode == 0


def test_the_latest_passes_count() -> None:
    pass_times = PassTimes()
    pass_times.set(PROMPT / 3, DECODE / 3)
    taken(pass_times, read=256, times=4)
    taken(pass_times, 4, times=64)
    assert pass_times.prompt > 0.75 * PROMPT and pass_times.decode > 0.85 * DECODE
