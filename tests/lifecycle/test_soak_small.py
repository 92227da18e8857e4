"""Every scenario of `make soak` at a small size: the same code with a fixed seed, in a few seconds each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from tests.soak.report import Outcome
from tests.soak.scenarios.cancels import cancels
from tests.soak.scenarios.combinations import combinations
from tests.soak.scenarios.kills import kills, recall
from tests.soak.scenarios.outages import cuts, restarts
from tests.soak.scenarios.poison import poison
from tests.soak.scenarios.subscribers import subscribers
from tests.soak.scenarios.takeover import stopped, takeover

SEED = 5


def quiet(done: int, total: int, what: str) -> None:
    """Report no progress."""


@pytest.mark.parametrize(
    ("scenario", "sizes"),
    [
        pytest.param(kills, {"n_kills": 6, "n_jobs": 40, "n_workers": 2}, id="workers die in every phase"),
        pytest.param(
            recall,
            {"n_kills": 2, "n_jobs": 16, "n_probes": 5, "n_workers": 2},
            id="answers are those of an undisturbed run",
        ),
        pytest.param(
            takeover, {"n_kills": 1, "lease_s": 1.0, "target_s": 15}, id="the jobs of a dead worker continue soon"
        ),
        pytest.param(stopped, {"n_stops": 1}, id="a worker that comes back is refused"),
        pytest.param(restarts, {"n_restarts": 2}, id="redis is killed"),
        pytest.param(cuts, {"n_cuts": 8}, id="connections are cut"),
        # A worker that stands still for one and a half leases, as on a machine that is busy, counts as dead.
        pytest.param(poison, {"n_jobs": 12, "lease_s": 3.0}, id="a job kills its workers"),
        pytest.param(cancels, {"n_each": 5}, id="jobs are cancelled in every state"),
        pytest.param(
            combinations, {"n_rounds": 3, "n_jobs": 12, "grammar_share": 0}, id="settings and options are combined"
        ),
        pytest.param(subscribers, {"n_subscribers": 40, "n_jobs": 4, "n_tokens": 40}, id="subscribers come and go"),
    ],
)
async def test_a_small_soak_finds_no_violation(
    scenario: Callable[..., Awaitable[Outcome]], sizes: dict[str, float]
) -> None:
    outcome = await scenario(SEED, quiet, **sizes)
    assert outcome.verdict.is_clean, str(outcome)
    assert outcome.verdict.n_jobs > 0
