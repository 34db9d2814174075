"""Names of types of numbers, which tools spell in many ways, under one name each."""

from __future__ import annotations

_SAME = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "e4m3fn": "e4m3",
    "e8m0fnu": "e8m0",
    "ue8m0": "e8m0",
}
_PREFIXES = ("float8_", "fp8_", "f8_")


def number_name(spelled: str) -> str:
    """Returns the one name of what a config file calls a type of numbers: `e4m3` of
    `torch.float8_e4m3fn`, `F8_E4M3` and `E4M3`. Other words come back in small letters."""
    name = spelled.strip().lower().removeprefix("torch.")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _SAME.get(name, name)
