"""Adapters of an engine that does nothing."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.messages import AdapterAnswer, AddAdapter, RemoveAdapter, ToEngineCore
from engine.frontend.calls.adapter_calls import AdapterCalls
from engine.frontend.calls.engine_calls import EngineCalls


class StillAdapters(AdapterCalls):
    """Every adapter that can be read is served at once.

    Attributes:
        told: What the engine core was told, in order.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, EngineCalls(self._answer))
        self.told: list[ToEngineCore] = []

    def _answer(self, call: ToEngineCore) -> None:
        assert isinstance(call, AddAdapter | RemoveAdapter)
        self.told.append(call)
        self._calls.on_answer(AdapterAnswer(call.call_id))
