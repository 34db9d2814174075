"""Writes helm/values.schema.json: the chart's own values, and every setting of the services; and
helm/files/flags.json: what the parsers of programs take, by which `extraArgs` are checked.

A setting that is added to a service becomes a value of the chart by this alone: `settings` of the
router and of each tier are turned into flags by the templates.
"""

from __future__ import annotations

import argparse
import json
import re
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic.alias_generators import to_camel
from pydantic_settings import BaseSettings, CliSettingsSource

from decode_node.config import DecodeNodeSettings
from engine.node.settings.engine_settings import EngineSettings
from engine.speed.__main__ import make_parser
from prefill_node.config import PrefillNodeSettings
from role_node.config import RoleNodeSettings
from router.config import RouterSettings

CHART = Path(__file__).parent.parent / "helm"
SOURCE = CHART / "values.schema.yaml"
SCHEMA = CHART / "values.schema.json"
VALUES = CHART / "values.yaml"
FLAGS = CHART / "files" / "flags.json"
KUBERNETES = "v1.37.0-local-strict"
LONGEST_LINE = 400
"""Of the file, in characters, where an object can be cut."""
MAY_BE_TAKEN_AWAY = "resources", "resourcesPerRank"
"""Values that have defaults and may be null."""

ROUTER_SETS = {
    "host", "port", "admin_host", "admin_port", "prefill", "decode", "api_key_file",
    "node_api_key", "drain_delay_s", "drain_timeout_s", "https_cert_file", "https_key_file",
    "response_store",
    "batch_store",
}  # fmt: skip
SECURITY_SETS = {
    "tls_cert_file", "tls_key_file", "tls_ca_file", "tls_identity", "cluster_token_file",
    "allow_plaintext", "accept_missing_token", "accept_missing_tls",
}  # fmt: skip
TIER_SETS = {
    "model", "revision", "served_model_name", "dtype", "kv_cache_dtype", "max_model_len", "host",
    "port", "metrics_port", "grpc_port", "kv_host", "kv_network_status", "tensor_parallel_size",
    "device", "drain_timeout_s", "api_key_file", "distributed_executor_backend", "ray_address",
    "kv_port", "crash_report_dir", "pipeline_parallel_size", "data_parallel_size",
    "kv_host_memory_bytes", "kv_host_memory_path", "kv_disk_path", "kv_disk_bytes", "kv_store",
    "role",
}  # fmt: skip
"""Settings that have a value of their own in the chart, which turns it into the flag."""

NOT_OFFERED = {
    "check",  # a node that only checks never becomes ready
    "first_gpu",  # a container sees its own GPUs, counted from 0
    "api_keys",  # a secret on a command line
}
"""Besides, in nodes that decode: `prefill`, since routers name prefill nodes with each request."""

SERVICES: dict[str, tuple[type[BaseSettings], set[str]]] = {
    "router": (RouterSettings, ROUTER_SETS | SECURITY_SETS | NOT_OFFERED),
    "common": (EngineSettings, TIER_SETS | SECURITY_SETS | NOT_OFFERED),
    "prefill": (PrefillNodeSettings, TIER_SETS | SECURITY_SETS | NOT_OFFERED),
    "decode": (DecodeNodeSettings, TIER_SETS | SECURITY_SETS | NOT_OFFERED | {"prefill"}),
    "node": (RoleNodeSettings, TIER_SETS | SECURITY_SETS | NOT_OFFERED | {"prefill"}),
}


JSON_TEXTS = {"speculative_config", "eplb_config", "override_generation_config"}
"""Settings that are JSON, which values may write as YAML."""


def offered(service: str) -> dict[str, str]:
    """Value below `settings` to the name of the setting."""
    settings, excluded = SERVICES[service]
    return {to_camel(name): name for name in settings.model_fields if name not in excluded}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Program to the parser of its command line."""
    found = {"bench": make_parser()}
    for service, (settings, _) in SERVICES.items():
        if service != "common":
            source: Any = CliSettingsSource(settings, cli_parse_args=[])
            found[service] = source.root_parser
    return found


def flags_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The flags that take a value, and those that take none, of a program that then runs."""
    found: dict[str, list[str]] = {"values": [], "switches": []}
    for action in parser._actions:
        if action.dest not in ("help", "check"):
            found["switches" if action.nargs == 0 else "values"] += action.option_strings
    return {kind: sorted(flags) for kind, flags in found.items()}


def flags_text() -> str:
    """Returns files/flags.json, by program."""
    found = {program: flags_of(parser) for program, parser in sorted(parsers().items())}
    return written(found) + "\n"


def property_of(settings: type[BaseSettings], name: str) -> dict[str, Any]:
    """A setting's type, bounds and meaning. null stands for "not given"."""
    found = deepcopy(settings.model_json_schema()["properties"][name])
    for word in ("title", "default"):
        found.pop(word, None)
    variants = found.pop("anyOf", None)
    if variants:
        found.update(next(variant for variant in variants if variant["type"] != "null"))
    if "enum" in found:
        found.pop("type", None)
        found["enum"] = [*found["enum"], None]
    else:
        kinds = [found["type"], *(["object"] if name in JSON_TEXTS else ())]
        found["type"] = [*kinds, "null"]
    return found


def settings_objects() -> dict[str, Any]:
    """Definition to what a service's settings are. What an earlier one has, a later one refers to:
    Helm compiles the schema for each render, and keeps it in the secret of each release."""
    found: dict[str, Any] = {}
    for service, (settings, _) in SERVICES.items():
        own = {value: property_of(settings, name) for value, name in offered(service).items()}
        for earlier, known in found.items():
            for value, meaning in own.items():
                if meaning == known["properties"].get(value):
                    own[value] = {"$ref": f"#/definitions/{earlier}/properties/{value}"}
        found[f"{service}Settings"] = {
            "type": "object",
            "additionalProperties": False,
            "properties": own,
        }
    return found


class KubernetesTypes:
    """The types of Kubernetes that values pass through, with those that they are made of.

    They are of the newest version that we know, and strict: a field with a spelling mistake is
    refused here as it would be by an API server, but before anything is installed.
    """

    def __init__(self) -> None:
        folder = files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES
        self._known = json.loads((folder / "_definitions.json").read_text())["$defs"]
        self.found: dict[str, Any] = {}

    def ref(self, kind: str) -> dict[str, str]:
        """Returns a reference to a type by its last name."""
        (name,) = (
            name
            for name in self._known
            if re.fullmatch(rf"io\.k8s\.api\.(core|networking)\.v1\.{kind}", name)
        )
        return {"$ref": self._take(name)}

    def _take(self, name: str) -> str:
        short = f"kubernetes.{name.rpartition('.')[2]}"
        if short not in self.found:
            self.found[short] = {}
            self.found[short].update(self._own(self._known[name]))
        return f"#/definitions/{short}"

    def _own(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self._own(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return {"$ref": self._take(node["$ref"].rpartition("/")[2])}
        told = ("description", "format", "x-kubernetes")
        return {
            key: self._own(value)
            for key, value in node.items()
            if not (key.startswith(told) and not isinstance(value, dict))
        }


def resolve(node: Any, tier: dict[str, Any], types: KubernetesTypes) -> Any:
    """Replaces `$setting`, `$tier` and `$kubernetes` wherever they stand."""
    if isinstance(node, list):
        return [resolve(item, tier, types) for item in node]
    if not isinstance(node, dict):
        return node
    if "$setting" in node:
        return property_of(EngineSettings, node["$setting"])
    if "$kubernetes" in node:
        return types.ref(node["$kubernetes"])
    if "$tier" in node:
        kind = resolve(tier, tier, types)
        kind["properties"].update(node.get("properties", {}))
        ports = kind["properties"]["ports"]["properties"]
        ports.update(dict.fromkeys(node.get("ports", ()), ports["grpc"]))
        kind["properties"]["settings"] = {"$ref": f"#/definitions/{node['$tier']}Settings"}
        return kind
    return {key: resolve(value, tier, types) for key, value in node.items()}


def schema() -> dict[str, Any]:
    source = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    tier = source["definitions"].pop("tier")
    types = KubernetesTypes()
    found: dict[str, Any] = resolve(source, tier, types)
    found["definitions"].update(sorted(types.found.items()))
    found["definitions"].update(settings_objects())
    defaults = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
    found["allOf"] = [presence(defaults, found, found)]
    return found


def presence(defaults: dict[str, Any], root: dict[str, Any], at: dict[str, Any]) -> dict[str, Any]:
    """Returns what requires the values that have defaults: Helm takes a default away where a key is
    there without a value, as it is when all below it is a comment. Objects of Kubernetes may lose
    what they like, and containers all their resources."""
    name = at.get("$ref", "").removeprefix("#/definitions/")
    own = at if not name or name.startswith("kubernetes.") else root["definitions"][name]
    known = own.get("properties", {})
    deeper = {
        key: presence(value, root, known[key])
        for key, value in defaults.items()
        if isinstance(value, dict) and key in known and key not in MAY_BE_TAKEN_AWAY
    }
    required = [
        key for key, value in defaults.items() if value is not None and key not in MAY_BE_TAKEN_AWAY
    ]
    return {"required": sorted(required) if known else [], "properties": deeper}


def written(found: dict[str, Any], depth: int = 0) -> str:
    """Returns JSON in which what fits has one line: Helm keeps spaces, too."""
    members = []
    for key, member in found.items():
        text = json.dumps(member)
        if isinstance(member, dict) and len(text) > LONGEST_LINE:
            text = written(member, depth + 1)
        members.append(f"{' ' * depth} {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(members) + f"\n{' ' * depth}}}"


def main() -> None:
    SCHEMA.write_text(written(schema()) + "\n", encoding="utf-8")
    FLAGS.write_text(flags_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
