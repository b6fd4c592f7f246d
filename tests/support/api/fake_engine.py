"""An engine process for the client's tests: speaks the protocol, computes nothing, imports no torch.

`python fake_engine.py MODE SOCKET`. A request is answered with `max_tokens` tokens, one a delta: the request's prompt
repeated. A first prompt token of 666 kills the process, 667 makes it fall silent, 668 sends garbage, 669 reports a lost
device, 670 quarantines a path, 671 never answers and says that it is submitted first, 672 takes half a second. In mode
`slow` steps take 20 seconds, in mode `silent` it is ready and no more, in mode `hang` it is never ready.
"""

import os
import queue
import signal
import socket
import sys
import threading
import time

from server.protocol import wire
from server.protocol.messages import (
    Attest,
    AttestationReport,
    Cancel,
    ChangeQuarantine,
    Configure,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineRefused,
    FinishReason,
    FromEngine,
    Heartbeat,
    PlanChanged,
    QuarantineChanged,
    Shutdown,
    StepOutput,
    StepRecord,
    Submit,
    ToEngine,
    TokenDelta,
)

BEAT_S = 0.05


def receive(connection: socket.socket) -> ToEngine | None:
    with connection.makefile("rb") as stream:
        header = stream.read(wire.HEADER.size)
        return wire.to_engine(stream.read(*wire.HEADER.unpack(header))) if header else None


def record(step: int, quarantined: list[tuple[str, str]]) -> StepRecord:
    return StepRecord(step, time.monotonic(), 0.0, [], 0, 0, 0, 0, 1, 0, 0, 0, quarantined=quarantined)


class Fake:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self.step = 0

    def send(self, message: FromEngine) -> None:
        self.connection.sendall(wire.frame(message))

    def read(self, stream: "socket.SocketIO") -> None:
        while header := stream.read(wire.HEADER.size):
            self.inbox.put(wire.to_engine(stream.read(*wire.HEADER.unpack(header)) or b""))
        self.inbox.put(None)

    def run(self, mode: str) -> None:
        stream = self.connection.makefile("rb")
        threading.Thread(target=self.read, args=(stream,), daemon=True).start()
        configure = self.inbox.get()
        assert isinstance(configure, Configure)
        self.send(EngineProgress("quarantined", repr(configure.quarantined)))
        self.send(EngineProgress("overridden", repr(configure.quarantined_by_operator)))
        if mode == "refuse":
            self.send(EngineRefused("unproven", "no path for prefill", []))
            return
        if mode == "hang":
            time.sleep(60)
        fingerprint: dict[str, str | int | None] = {"device": "cpu"}
        longest_silence_s = 20.0 if mode == "slow" else 0.0
        ready = EngineReady(
            os.getpid(), "fake", 64, 4, 16, fingerprint, None, "none", [], 2, longest_silence_s=longest_silence_s
        )
        self.send(ready)
        while True:
            try:
                message = self.inbox.get(timeout=60 if mode == "silent" else BEAT_S)
            except queue.Empty:
                self.send(Heartbeat(self.step, time.monotonic(), 0, 0))
                continue
            if message is None or isinstance(message, Shutdown):
                return
            if isinstance(message, Submit):
                self.answer(message)
            elif isinstance(message, Attest):
                lies = [("fake.decode", "a shape")]
                self.send(AttestationReport("request", "mismatch", time.time(), 0.1, [], lies))
            elif isinstance(message, ChangeQuarantine):
                self.send(PlanChanged([]))
                self.send(QuarantineChanged(message.request, [], message.add))
            elif isinstance(message, Cancel):
                self.send(EngineProgress("cancelled", message.request_id))

    def answer(self, message: Submit) -> None:
        prompt = message.prompt_token_ids
        if prompt[0] >= 666:
            self.send(EngineProgress("submitted", message.request_id))
        if prompt[0] == 666:
            os.kill(os.getpid(), signal.SIGKILL)
        elif prompt[0] == 667:
            time.sleep(60)
        elif prompt[0] == 668:
            self.connection.sendall(wire.HEADER.pack(3) + b"???")
            time.sleep(60)
        elif prompt[0] == 669:
            self.send(EngineFailed("illegal memory access", [("fake.decode", "a shape")]))
            sys.exit(70)
        elif prompt[0] == 671:
            return
        elif prompt[0] == 672:
            time.sleep(0.5)
        quarantined = [("fake.prefill", "another shape")] if prompt[0] == 670 else []
        for i in range(message.sampling.max_tokens):
            self.step += 1
            reason = FinishReason.LENGTH if i + 1 == message.sampling.max_tokens else None
            delta = TokenDelta(message.request_id, [prompt[i % len(prompt)]], reason)
            self.send(StepOutput(record(self.step, quarantined), [delta]))


def main() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[2])
        Fake(connection).run(sys.argv[1])


if __name__ == "__main__":
    main()
