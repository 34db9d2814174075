"""Reads the output of models: reasoning, content and tool calls, as they are generated.

    OutputProcessor ── pieces ──▶ OutputParser ── deltas ──▶ response format of an API

A parser is a pure function of the tokens: however they are cut into pushes, the deltas join to the
same result, so a resumed answer goes on exactly where it was, and a whole one equals its stream.
Start with `output_parsers.py` (one object a server) and `deltas.py` (what comes out).
"""
