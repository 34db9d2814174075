"""A stand-in for the engine core's process, as `AsyncLLM` sees it."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.contracts.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    FromEngineCore,
    ToEngineCore,
)
from engine.frontend.output_delivery import Delivered


class NoHistory:
    """Takes the place of `StepHistory`."""

    def delivered(self, delivered: Delivered) -> None:
        """Forgets it."""


class FakeCore:
    """Takes the place of `EngineCoreClient`: keeps what was sent, and says what the test says."""

    pid = 1
    crash = None

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[FromEngineCore], None],
        on_dead: Callable[[str], None],
    ) -> None:
        self.say = on_message
        self.die = on_dead
        self.sent: list[ToEngineCore] = []
        self.history = NoHistory()
        self.say(EngineReady(num_blocks=7))

    def send(self, message: ToEngineCore) -> None:
        self.sent.append(message)

    def given_up(self, reason: str) -> None:
        """Does nothing: nobody reports."""

    async def shutdown(self) -> None:
        """Does nothing, as there is no process."""

    def tokens(self, request_id: str, token_ids: list[int], finish_reason: str = "") -> None:
        output = EngineCoreOutput(request_id, token_ids, finish_reason)
        self.say(EngineCoreOutputs(outputs=[output]))

    def take(self) -> list[ToEngineCore]:
        sent, self.sent = self.sent, []
        return sent
