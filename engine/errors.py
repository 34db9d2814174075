"""How an engine ends, and why it does not begin."""

from __future__ import annotations


class CannotStartError(Exception):
    """The engine cannot do what it was told with what is there. The message says what is missing
    and what to change, so nobody needs to see where in the code it was noticed."""


class EngineDeadError(Exception):
    """This engine cannot go on; every request of it fails with this. The message names who died
    and why. There is no way back but a new process: end, and let the supervisor start one."""
