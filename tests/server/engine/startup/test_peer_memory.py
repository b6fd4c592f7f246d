"""An engine whose ranks share no memory: planned again without, or refused where only what was wanted may serve."""

from typing import Any

import pytest

from kernels.collective.inboxes import PeerMemoryError
from qualification.decision.decision import Policy
from server.engine.startup.builder import BuiltEngine, build_or_without_peer_memory
from server.errors import SettingsError
from server.settings import Settings

ERROR = "cuIpcGetMemHandle failed with CUDA's error 801 on rank 1 of 2"


class Builds:
    """Notes with what reason it is asked to build."""

    def __init__(self, built: Any) -> None:
        self.reasons: list[str | None] = []
        self._built = built

    def __call__(self, unshared: str | None) -> BuiltEngine:
        self.reasons.append(unshared)
        if unshared is None:
            raise PeerMemoryError(ERROR)
        built: BuiltEngine = self._built
        return built


@pytest.mark.parametrize("policy", [Policy.QUALIFY, Policy.DEGRADE])
def test_it_is_planned_again_with_the_reason(policy: Policy) -> None:
    build = Builds(built := object())
    assert build_or_without_peer_memory(build, Settings(on_unproven=policy)) is built
    assert build.reasons[0] is None
    assert ERROR in str(build.reasons[1])
    assert len(build.reasons) == 2


def test_refuse_ends_with_one_line() -> None:
    build = Builds(None)
    with pytest.raises(SettingsError) as refused:
        build_or_without_peer_memory(build, Settings(on_unproven=Policy.REFUSE))
    assert ERROR in refused.value.message
    assert "\n" not in refused.value.message
    assert build.reasons == [None]
