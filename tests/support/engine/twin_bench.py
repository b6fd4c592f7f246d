"""An engine over a runner without a model, whose pages are counted after every step."""

from collections.abc import Iterable
from concurrent.futures import Future

from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.matcher import Matcher
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import Runner
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.protocol.messages import Fork, Grammar, SamplingParams, StepOutput, Submit, TokenDelta

PAGE_SIZE, VOCAB = 4, 97


def tokens(deltas: Iterable[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class Bench:
    """Drives the engine, and collects its outputs."""

    def __init__(
        self,
        runner: Runner,
        *,
        pages: int = 32,
        seqs: int = 8,
        model_len: int = 64,
        step_tokens: int = 32,
        most: int = 0,
        chunk: int | None = None,
        ahead: bool = True,
        matcher: Matcher | None = None,
    ) -> None:
        """`most` drafted tokens of a sequence, by `engine.drafter`; all that a grammar binds is by this `matcher`."""

        def compiled(_: Grammar) -> Future[Matcher]:
            found: Future[Matcher] = Future()
            assert matcher is not None
            found.set_result(matcher)
            return found

        self.pool = PagePool(pages, PAGE_SIZE)
        limits = SchedulerLimits(model_len, seqs, step_tokens, max_drafted_tokens=most, chunk=chunk)
        self.scheduler = Scheduler(limits, self.pool, shares_pages=True)
        options = EngineOptions(VOCAB, (), seed=0, runs_ahead=ahead)
        self.engine = Engine(self.scheduler, runner, options, compile_grammar=compiled)
        self.outputs: list[StepOutput] = []

    def submit(self, name: str, prompt: list[int], forks: Iterable[str] = (), **sampling: object) -> None:
        """Submit a prompt of which six greedy tokens are wanted, or what `sampling` changes of that."""
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        self.engine.submit(Submit(name, prompt, params, forks=[Fork(it, None) for it in forks]))

    def step(self) -> None:
        output = self.engine.step()
        self.scheduler.check_integrity()
        if output is not None:
            self.outputs.append(output)

    def drain(self) -> dict[str, list[TokenDelta]]:
        """Step until all is done, and return what came of each request so far."""
        while self.engine.has_work:
            self.step()
        assert self.engine.step() is None
        assert self.pool.num_used == 0
        found: dict[str, list[TokenDelta]] = {}
        for output in self.outputs:
            for delta in output.deltas:
                found.setdefault(delta.request_id, []).append(delta)
        return found
