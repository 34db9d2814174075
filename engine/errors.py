"""The engine's own end."""

from __future__ import annotations


class EngineDeadError(Exception):
    """This engine cannot go on; every request of it fails with this. The message names who died
    and why. There is no way back but a new process: end, and let the supervisor start one."""
