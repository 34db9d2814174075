"""Adapters of an engine that does nothing."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.messages import AdapterAnswer, AddAdapter, RemoveAdapter, ToEngineCore
from engine.frontend.calls.adapter_calls import AdapterCalls
from engine.frontend.calls.engine_calls import EngineCalls


class StillAdapters(AdapterCalls):
    """Serves every adapter that can be read at once, or between `hold` and `release` none.

    Attributes:
        told: What the engine core was told, in order.
        forgets: Whether adapters that are taken out of use are forgotten: no request runs.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, EngineCalls(self._answer))
        self.told: list[ToEngineCore] = []
        self.forgets = True
        self._held: list[int] | None = None

    def _answer(self, call: ToEngineCore) -> None:
        assert isinstance(call, AddAdapter | RemoveAdapter)
        self.told.append(call)
        if self._held is not None and isinstance(call, AddAdapter):
            self._held.append(call.call_id)
            return
        if isinstance(call, RemoveAdapter) and not self.forgets:
            return
        self._calls.on_answer(AdapterAnswer(call.call_id))

    def hold(self) -> None:
        self._held = []

    def release(self, error: str = "") -> None:
        """Answers the calls that are held, with `error`."""
        held, self._held = self._held or [], None
        for call_id in held:
            self._calls.on_answer(AdapterAnswer(call_id, error))
