"""Whatever keeps a node from starting is one line, whichever role the node has."""

from __future__ import annotations

import pytest

from edge.security.config import SecurityError
from edge.tracing.errors import TracingError
from engine.contracts.errors import CannotStartError, EngineDeadError
from engine.frontend.tokenizer import TokenizerError
from engine.node.grpc_server import PortInUse
from engine.node.process import run_node
from engine.node.settings.engine_settings import SettingsError


async def _failing(error: Exception) -> int:
    raise error


@pytest.mark.parametrize(
    "kind",
    [
        CannotStartError,
        EngineDeadError,
        OSError,
        PortInUse,
        SecurityError,
        SettingsError,
        TokenizerError,
        TracingError,
    ],
)
def test_a_start_that_fails_says_why(
    kind: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_node("prefill node", _failing(kind("the disk is on fire"))) == 1
    assert capfd.readouterr().err == "prefill node: the disk is on fire\n"


def test_a_fault_of_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_node("prefill node", _failing(ZeroDivisionError()))
