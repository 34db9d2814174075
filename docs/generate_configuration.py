"""Writes docs/configuration.md from the settings classes: one definition, one page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from cli.local_cluster.cluster import UpSettings
from decode_node.config import DecodeNodeSettings
from prefill_node.config import PrefillNodeSettings
from role_node.config import RoleNodeSettings
from router.config import RouterSettings

PAGE = Path(__file__).parent / "configuration.md"

HEAD = """\
# Configuration

Every setting is a flag and an environment variable, the name of which is the flag's in capitals,
with underscores, behind a prefix that each section names: `--log-level` of a router is
`TANDEM_ROUTER_LOG_LEVEL`. A flag wins. `make docs` generates this page from the settings classes.
Settings of each command are in three groups: those that **one sets** for nearly every cluster,
those that one **may set** for a need of one's own, and those for **experts**, whose defaults were
measured or are derived from the machine. Commands that are no services explain their flags with
`--help`.

"""

SET = frozenset(
    [
        "model",
        "host",
        "port",
        "grpc_port",
        "metrics_port",
        "prefill",
        "decode",
        "tp",
        "device",
        "api_key",
        "api_keys",
        "api_key_file",
        "cluster_token_file",
        "tls_cert_file",
        "tls_key_file",
        "tls_ca_file",
        "served_model_name",
        "max_model_len",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "quantization",
        "kv_cache_dtype",
        "enable_prefix_caching",
        "log_level",
        "log_format",
        "response_store",
        "batch_store",
        "switchable",
        "num_routers",
        "reasoning_parser",
        "tool_call_parser",
        "max_num_seqs",
    ]
)
"""Settings that nearly every cluster has of its own."""
EXPERT = frozenset(
    [
        "ejection_failures",
        "ejection_base_s",
        "ejection_max_s",
        "ejection_max_fraction",
        "retry_burst",
        "migration_burst",
        "resume_timeout_s",
        "watch_interval_s",
        "dns_linger_s",
        "upstream_keepalive_s",
        "decode_choices",
        "max_prefill_candidates",
        "default_prefill_tokens_per_s",
        "short_prompt_tokens",
        "max_index_entries",
        "prefill_start_s",
        "prefill_hold_s",
        "stall_after_s",
        "all_reduce",
        "num_threads",
        "kv_chunk_bytes",
        "kv_streams",
        "kv_processes",
        "kv_pull_transport",
        "kv_offer_answers_s",
        "kv_lease_s",
        "kv_stall_timeout_s",
        "kv_cache_metrics_sample",
        "device_peak_tflops",
        "device_peak_gbps",
        "image_cache_tokens",
        "encoder_budget",
        "frozen_after_s",
        "handshake_timeout_s",
        "disabled_fast_paths",
        "deterministic",
        "attention_backend",
        "max_header_bytes",
        "header_timeout_s",
        "body_timeout_s",
        "send_timeout_s",
        "max_connections_without_key",
        "trace_file_max_bytes",
        "trace_file_backups",
        "retry_budget",
        "max_migrations",
        "stream_stall_s",
        "stuck_after_s",
        "full_step_tokens",
        "cudagraph_capture_sizes",
        "kv_nixl_window_bytes",
        "kv_staging_bytes",
        "response_lease_s",
        "batch_lease_s",
        "batch_store_timeout_s",
        "batch_idle_window_s",
        "batch_reserve",
        "num_blocks",
    ]
)
"""Settings whose defaults were measured, or follow from the machine."""

SERVICES: list[tuple[str, type[BaseSettings]]] = [
    ("tandem up", UpSettings),
    ("tandem router", RouterSettings),
    ("tandem prefill", PrefillNodeSettings),
    ("tandem decode", DecodeNodeSettings),
    ("tandem node", RoleNodeSettings),
]
_NODES = "tandem prefill and tandem decode"
PARENTS: dict[type[BaseSettings], str] = {RoleNodeSettings: "tandem decode"}
"""Those that only add to another service's settings, or say what differs."""


def flag(name: str, field: FieldInfo) -> str:
    """As it is typed: positional arguments in capitals."""
    if any("CliPositionalArg" in repr(mark) for mark in field.metadata):
        return name.upper()
    return "--" + name.replace("_", "-")


def type_name(field: FieldInfo) -> str:
    text = getattr(field.annotation, "__name__", None) or str(field.annotation)
    if not isinstance(field.annotation, type):
        text = str(field.annotation)
    literal = re.fullmatch(r"typing\.Literal\[(.*)\]", text)
    if literal:
        return literal.group(1).replace("'", "").replace(", ", " / ")
    return text.replace("typing.", "").replace(" | ", " or ")


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if "/demo_checkpoint" in str(value):
        return "the demo checkpoint"
    return "" if value in (None, "") else f"`{value}`"


def row(name: str, field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|").replace("\n", " ")
    return f"| `{flag(name, field)}` | {type_name(field)} | {default(field)} | {meaning} |"


def rows(settings: type[BaseSettings]) -> dict[str, str]:
    """Returns the row of each setting, by its name."""
    return {
        name: row(name, field)
        for name, field in settings.model_fields.items()
        if settings not in PARENTS or name in settings.__annotations__
    }


def shared(*settings: type[BaseSettings]) -> dict[str, str]:
    """Returns the rows that are the same in all of these."""
    first, *others = map(rows, settings)
    return {
        name: text
        for name, text in first.items()
        if all(other.get(name) == text for other in others)
    }


def table(found: dict[str, str]) -> list[str]:
    """Returns the lines of a table in up to three parts: one sets, may set, expert."""
    groups = {
        "One sets": [text for name, text in found.items() if name in SET],
        "May set": [text for name, text in found.items() if name not in SET | EXPERT],
        "Expert": [text for name, text in found.items() if name in EXPERT],
    }
    lines = ["| flag | type | default | meaning |", "|---|---|---|---|"]
    for title, texts in groups.items():
        if texts:
            lines += [f"| **{title}** | | | |", *texts]
    return [*lines, ""]


def section(title: str, found: dict[str, str], before: str) -> str:
    return "\n".join([f"## {title}", "", before, "", *table(found)])


def sections() -> list[str]:
    """Returns what all services have, what nodes have, and what each command has besides."""
    of_all = shared(RouterSettings, PrefillNodeSettings, DecodeNodeSettings)
    of_nodes = shared(PrefillNodeSettings, DecodeNodeSettings)
    made = [
        section("All services", of_all, "With the prefix of each: `TANDEM_ROUTER_`, `TANDEM_`.")
    ]
    for title, settings in SERVICES:
        prefix = f"`{settings.model_config.get('env_prefix', '')}`"
        is_node = settings in (PrefillNodeSettings, DecodeNodeSettings)
        known = of_all | (of_nodes if is_node else {})
        if settings is PrefillNodeSettings:
            only = {name: text for name, text in of_nodes.items() if name not in of_all}
            made.append(section(_NODES, only, f"{prefix}, and the settings of all services."))
        found = {name: text for name, text in rows(settings).items() if known.get(name) != text}
        parent = PARENTS.get(settings, _NODES if is_node else "")
        if settings is RouterSettings:
            parent = "all services"
        made.append(
            section(title, found, f"{prefix}, and the settings of {parent}." if parent else prefix)
        )
    return made


def main() -> None:
    known = {name for _, settings in SERVICES for name in settings.model_fields}
    if unknown := (SET | EXPERT) - known:
        raise SystemExit(f"no such settings: {', '.join(sorted(unknown))}")
    PAGE.write_text(HEAD + "\n".join(sections()).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
