#!/usr/bin/env bash
# transformers 5.24.0: Exaone4Config refuses the form of `sliding_window_pattern` that its docstring gives first.
#
# The docstring allows a string of L and G ("LLLG", as LGAI-EXAONE/EXAONE-4.0-32B publishes it) and says that it is
# the same as the number 4. Without `layer_types`, the number gives three local layers and a global one, and the
# string ends in a TypeError: the pattern is used as a divisor. A checkpoint's config.json works because it has
# `layer_types` besides; whoever makes a config by the docstring meets it.
#
# Seen on 2026-11-28 with Python 3.11:
#     4: ['sliding_attention', 'sliding_attention', 'sliding_attention', 'full_attention']
#     LLLG: TypeError: unsupported operand type(s) for %: 'int' and 'str'
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install 'transformers==5.24.0'
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from transformers import Exaone4Config


def layers(pattern):
    try:
        config = Exaone4Config(
            num_hidden_layers=4, sliding_window=16, sliding_window_pattern=pattern
        )
    except TypeError as error:
        return f"TypeError: {error}"
    return config.layer_types


by_number, by_text = layers(4), layers("LLLG")
print(f"4: {by_number}", f"LLLG: {by_text}", sep="\n")
expected = ["sliding_attention"] * 3 + ["full_attention"]
is_as_seen = by_number == expected and str(by_text).startswith("TypeError: unsupported operand")
sys.exit(0 if is_as_seen else 1)
PYTHON
