"""The protocol of kernels/collective/push.py, simulated: stores that arrive in any order that a GPU may choose."""

from collections.abc import Iterator
from random import Random

import pytest

PROGRAMS = 2
WORDS = 2  # of a row
EMPTY = None
PLENTY = 60_000  # steps; a right run takes a fifth


class Wrong(Exception):
    """A rank read what was not sent for it."""


class Simulation:
    """`world` GPUs that make the same calls. A store arrives at any time, at the latest when its kernel has ended."""

    def __init__(self, world: int, calls: list[int], random: Random, *, buffers: int = 2, clears: bool = True) -> None:
        """`calls`: the rows of each."""
        self.world, self.calls, self.random, self.buffers, self.clears = world, calls, random, buffers, clears
        self.inboxes: list[dict[tuple[int, ...], object]] = [{} for _ in range(world)]
        self.turns = [[0] * PROGRAMS for _ in range(world)]
        self.stores: list[list[tuple[int, tuple[int, ...], object]]] = [[] for _ in range(world)]
        self.num_summed = 0

    def run(self) -> None:
        """Raises Wrong, and TimeoutError where ranks wait for ever."""
        at = [0] * self.world
        running = [self.programs(rank, 0) for rank in range(self.world)]
        for _ in range(PLENTY):
            live = [rank for rank in range(self.world) if at[rank] < len(self.calls)]
            if not live:
                return
            rank = self.random.choice(live)
            if self.stores[rank] and self.random.random() < 0.4:
                self.arrive(rank, self.random.randrange(len(self.stores[rank])))
            program = self.random.choice(running[rank])
            if next(program, "ended") == "ended":
                running[rank].remove(program)
            if not running[rank]:
                while self.stores[rank]:
                    self.arrive(rank, 0)
                at[rank] += 1
                if at[rank] < len(self.calls):
                    running[rank] = self.programs(rank, at[rank])
        raise TimeoutError

    def programs(self, rank: int, call: int) -> list[Iterator[None]]:
        return [self.program(rank, call, it) for it in range(min(self.calls[call], PROGRAMS))]

    def program(self, rank: int, call: int, index: int) -> Iterator[None]:
        rows = range(index, self.calls[call], PROGRAMS)
        buffer = self.turns[rank][index] % self.buffers
        others = [it for it in range(self.world) if it != rank]
        for row in rows:
            for peer in others:
                for word in range(WORDS):
                    self.stores[rank].append((peer, (buffer, rank, row, word), (call, rank, row, word)))
                    yield
        for row in rows:
            places = [(buffer, source, row, word) for source in others for word in range(WORDS)]
            for place in places:
                while (found := self.inboxes[rank].get(place, EMPTY)) is EMPTY:
                    yield
                if found != (call, *place[1:]):
                    raise Wrong(f"rank {rank}, call {call}: found {found} in {place}")
            for place in places:
                if self.clears:
                    self.stores[rank].append((rank, place, EMPTY))
                yield
            self.num_summed += 1
        self.turns[rank][index] += 1

    def arrive(self, rank: int, index: int) -> None:
        """Stores of one rank to one address arrive in their order."""
        inbox, place, _ = self.stores[rank][index]
        index = next(i for i, store in enumerate(self.stores[rank]) if store[:2] == (inbox, place))
        inbox, place, value = self.stores[rank].pop(index)
        self.inboxes[inbox][place] = value


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_read_what_was_sent_for_this_call(world: int) -> None:
    for seed in range(40):
        random = Random(seed)
        calls = [random.randint(1, 5) for _ in range(6)]
        simulation = Simulation(world, calls, random)
        simulation.run()
        assert simulation.num_summed == world * sum(calls)
        assert all(value is EMPTY for inbox in simulation.inboxes for value in inbox.values())


@pytest.mark.parametrize("fault", [{"buffers": 1}, {"clears": False}], ids=["one buffer", "never cleared"])
def test_simulation_finds_what_two_buffers_prevent(fault: dict[str, int]) -> None:
    found = set()
    for seed in range(40):
        try:
            Simulation(2, [1, 1, 2, 1, 1, 2], Random(seed), **fault).run()  # type: ignore[arg-type]
        except (Wrong, TimeoutError) as error:
            found.add(type(error))
    assert Wrong in found or TimeoutError in found
