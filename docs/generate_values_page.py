"""Writes helm/README.md from helm/values.yaml and helm/ci: each value with the comment above it,
each example with its first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent.parent / "helm"
PAGE = CHART / "README.md"

HEAD = """\
# tandem chart

Large language models on Kubernetes, with prefill and decode on separate hosts, scaled apart.

```sh
helm install tandem ./helm --set model.name=org/model
```

This page lists every value of the chart with its default. How to run it:
[docs/operations.md](../docs/operations.md).

`prefill`, `decode` and `node` inherit everything in `tierDefaults` and override it. Below
`settings` are the flags of the services, in camelCase:
[docs/configuration.md](../docs/configuration.md). `make docs` generates the tables from
`values.yaml` and `ci/`.

## Complete examples

| file | shows |
|---|---|
{examples}

## Values

| value | default | meaning |
|---|---|---|
"""


def example_rows() -> Iterator[tuple[str, str]]:
    """Name and opening comment of each complete example."""
    for path in sorted((CHART / "ci").glob("*-values.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        yield path.name, " ".join(line.strip("# ") for line in comment)


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Path and comment of each value that has one."""
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        note = re.match(r"^ *# ?(?:-- )?(.*)$", line)
        key = re.match(r"^( *)(\w+):", line)
        if note:
            if "# -- " in line:
                comment = []
            comment.append(note.group(1))
        elif key:
            path = [*path[: len(key.group(1)) // 2], key.group(2)]
            if comment:
                yield ".".join(path), " ".join(comment)
            comment = []
        else:
            comment = []


def default_of(values: dict[str, Any], path: str) -> str:
    found: Any = values
    for key in path.split("."):
        found = found[key]
    if isinstance(found, dict) and found:
        return ""
    return (
        ""
        if found in (None, "")
        else f"`{yaml.safe_dump(found, default_flow_style=True).splitlines()[0]}`"
    )


def main() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    lines = [
        f"| `{path}` | {default_of(values, path)} | {comment.replace('|', '/')} |"
        for path, comment in rows(text)
    ]
    examples = "\n".join(f"| `ci/{name}` | {shows} |" for name, shows in example_rows())
    PAGE.write_text(HEAD.format(examples=examples) + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
