"""Runs the Helm Go SDK for `helm_engine.HelmSdk`: a JSON request a line in, an answer a line out.

A process of its own, because the SDK brings a Go runtime with its own threads and signal handlers
into whatever process loads it. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Any

from helm_python import Chart, Config, HelmError, _native, helm_sdk_version, lint


@cache
def _chart(path: str) -> Chart:
    return Chart.load(path)


@cache
def _config(kubeconfig: str, namespace: str) -> Config:
    return Config(kubeconfig_content=kubeconfig, namespace=namespace, qps=1000, burst_limit=1000)


def render(chart: str, values: dict[str, Any], options: dict[str, Any]) -> dict[str, str]:
    """Maps template path to text. The Python API has no capabilities, the native call has."""
    answer = _native.call_string(
        "helm_render", _chart(chart)._raw(), json.dumps(values), json.dumps(options)
    )
    return dict(json.loads(answer))


def lint_chart(chart: str, values: dict[str, Any], kube_version: str) -> list[str]:
    report = lint(chart, values=values, strict=True, kube_version=kube_version)
    return [f"{m['path']}: {m['error']}" for m in report["messages"] if m["severity"] > 1] + list(
        report["errors"]
    )


def release(
    method: str, kubeconfig: str, namespace: str, arguments: list[Any], options: dict[str, Any]
) -> Any:
    return getattr(_config(kubeconfig, namespace), method)(*arguments, **options)


def version() -> str:
    return str(helm_sdk_version())


OPERATIONS = {"render": render, "lint": lint_chart, "release": release, "version": version}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the library prints goes where people read it
    for line in sys.stdin:
        request = json.loads(line)
        operation = OPERATIONS[request.pop("operation")]
        try:
            answer = {"result": operation(**request)}
        except HelmError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
