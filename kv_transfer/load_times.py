"""When one transfer process did what for a load from host memory."""

from __future__ import annotations

import msgspec


class LoadTimes(msgspec.Struct, frozen=True, array_like=True):
    """Holds CLOCK_MONOTONIC seconds, which all processes of a host share.

    Attributes:
        told: The process was told of it.
        begun: Loads before it were through, and its first copies were issued.
        first: Its first layer was copied and compared, and marked.
        compared: All checksums were.
        ended: All layers were copied, compared and marked.
    """

    told: float
    begun: float
    first: float
    compared: float
    ended: float
