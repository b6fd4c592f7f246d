"""Paths that would change places by their times are timed in turns first."""

import time
from dataclasses import replace

import torch

from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.path import KernelPath, Tier
from qualification.evidence.evidence import Evidence, Timing
from qualification.measure.costs.rivals import Rivals
from support.qualification_fakes import SHAPE, checks, evidence, path

CPU = torch.device("cpu")
FIRST = path("first")
RIVAL = replace(path("rival", Tier.FALLBACK), competes_on=frozenset({Device.CPU}))
OTHER = path("other", Tier.FALLBACK)


class Turns:
    def __init__(self) -> None:
        self.order: list[str] = []

    def rivals(self, machine: Device = Device.CPU) -> Rivals:
        def make_call(_: object, run: object) -> object:
            return lambda: (self.order.append(run.__name__), time.sleep(0.001))

        return Rivals(machine, CPU, make_call, 0.01)


def named(kernel: KernelPath) -> KernelPath:
    def run(*_: object) -> None: ...

    run.__name__ = kernel.name
    return replace(kernel, run=run)


def again(rivals: Rivals, *found: tuple[KernelPath, Evidence]) -> list[Evidence]:
    return [entry for kernel, one in found for entry in rivals.timed_again(named(kernel), one)]


def test_winning_rival_is_timed_in_turns_with_first_tier() -> None:
    for order in ((0, 1), (1, 0)):
        pairs = [(FIRST, evidence(SHAPE, FIRST, 50.0)), (RIVAL, evidence(SHAPE, RIVAL, 10.0))]
        turns = Turns()
        found = again(turns.rivals(), *(pairs[index] for index in order))
        assert [entry.path for entry in found] == ["first", "rival"]
        assert all(entry.timing.p50_us >= 1000 for entry in found)  # of the call in turns
        assert turns.order[:4] == ["first", "rival", "first", "rival"]


def test_nothing_else_is_timed_again() -> None:
    slow, fast = evidence(SHAPE, FIRST, 50.0), evidence(SHAPE, RIVAL, 10.0)
    doubted = replace(fast, timing=Timing(10.0, 0.3, 20))
    wrong = replace(fast, checks=checks(2.0))
    for rival in (evidence(SHAPE, RIVAL, 45.0), doubted, wrong):
        assert again(Turns().rivals(), (FIRST, slow), (RIVAL, rival)) == []
    assert again(Turns().rivals(), (FIRST, slow), (OTHER, evidence(SHAPE, OTHER, 10.0))) == []
    assert again(Turns().rivals(Device.CUDA), (FIRST, slow), (RIVAL, fast)) == []
    elsewhere = replace(SHAPE, head_dim=32)
    assert again(Turns().rivals(), (FIRST, slow), (RIVAL, evidence(elsewhere, RIVAL, 10.0))) == []
