"""Describes what is done to values between their projection and the cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValueForm:
    """Says how a model's values differ from what is projected.

    Attributes:
        normed: Each head's is divided by its root mean square, without a weight.
        scale: Multiplies them.
    """

    normed: bool = False
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        return not self.normed and self.scale == 1.0


PLAIN_VALUES = ValueForm()
