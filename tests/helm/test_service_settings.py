"""Every value is honoured: what the chart renders, the services take, and nothing else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import huggingface_hub.constants as hub
import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic_settings import BaseSettings

from docs.generate_values_schema import FLAGS, NOT_OFFERED, SERVICES, flags_text, offered
from edge.tracing.export.resource import KUBERNETES_VARIABLES
from tests.helm.helm_engine import HelmCli, HelmSdk
from tests.helm.scenarios import SCENARIOS, overlay, rendered, values_of
from tests.helm.service_settings import (
    PREFIXES,
    PROGRAMS,
    WrongSettings,
    check,
    containers,
    environment,
    settings_of,
)

RAY_VARIABLES = {
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_memory_monitor_refresh_ms",
    "RAY_DEDUP_LOGS",
}
NCCL_VARIABLES = {
    "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC",
    "NCCL_IB_ROCE_VERSION_NUM", "NCCL_SOCKET_IFNAME",
}  # fmt: skip
CACHES = {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
POD_VARIABLES = {"POD_IP", "TZ", *KUBERNETES_VARIABLES}
LIBRARY_VARIABLES = CACHES | POD_VARIABLES | RAY_VARIABLES | NCCL_VARIABLES | {
    name for name in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN")
    if name in Path(hub.__file__).read_text(encoding="utf-8")
}  # fmt: skip
"""Besides our own settings: what libraries read, command lines refer to, and spans tell. TZ is a
scenario's."""
MINIMAL = {"model": {"name": "org/model"}}


@pytest.mark.parametrize("helm", [HelmSdk.shared, HelmCli])
def test_what_is_json_may_be_written_as_yaml(helm: Callable[[], HelmSdk | HelmCli]) -> None:
    given = {
        "speculativeConfig": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": True},
        "overrideGenerationConfig": {"temperature": 0.6, "max_new_tokens": 1_000_000},
    }
    shared = {"speculativeConfig": {"method": "ngram", "num_speculative_tokens": 5}}
    values = {"tierDefaults": {"settings": shared}, "decode": {"settings": given}}
    found = helm().render(overlay(MINIMAL, values))
    taken = check("decode", containers(found)["decode"])
    for name, setting in (("speculativeConfig", "speculative_config"),
                          ("overrideGenerationConfig", "override_generation_config")):  # fmt: skip
        assert json.loads(taken[setting]) == given[name]
    of_prefill = check("prefill", containers(found)["prefill"])
    assert json.loads(of_prefill["speculative_config"]) == shared["speculativeConfig"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_services_take_what_a_scenario_renders(name: str) -> None:
    values = values_of(name)
    defaults = values.get("tierDefaults", {}).get("settings", {})
    for service, effective in settings_of(name).items():
        wanted = values.get(service, {}).get("settings", {})
        if service != "router":
            wanted = {**defaults, **wanted}
        for value, setting in offered(service).items():
            if value in wanted:
                assert effective[setting] == wanted[value], (service, value)


@pytest.mark.parametrize("name", SCENARIOS)
def test_environment_is_known_to_who_reads_it(name: str) -> None:
    for service, container in containers(rendered(name)).items():
        fields = SERVICES[service][0].model_fields
        ours = {f"{PREFIXES[service]}{field.upper()}" for field in fields}
        assert set(environment(container)) <= ours | LIBRARY_VARIABLES


def test_an_unknown_flag_and_a_wrong_value_would_be_found() -> None:
    container = containers(rendered("default"))["prefill"]
    for flag in ("--no-such-flag=1", "--max-num-seqs=many", "--kv-lease-s=-1"):
        with pytest.raises(WrongSettings):
            check("prefill", {**container, "args": [*container["args"], flag]})
    with pytest.raises(WrongSettings, match="--kv-host"):
        check("prefill", {**container, "args": ["--model=m", "--host=0.0.0.0"]})


def test_addresses_ports_and_drains_agree_between_the_services() -> None:
    found = settings_of("production")
    prefill, decode, router = found["prefill"], found["decode"], found["router"]
    assert prefill["host"] == prefill["kv_host"] == decode["host"] == "10.1.2.3"
    assert (router["host"], router["admin_host"]) == ("0.0.0.0", "0.0.0.0")
    assert (router["port"], router["admin_port"]) == (8000, 8001)
    assert router["prefill"] == f"k8s://llm-prefill.default:{prefill['port']}"
    assert router["decode"] == f"k8s://llm-decode.default:{decode['port']}/{decode['grpc_port']}"
    by_dns = settings_of("decode-only")["router"]
    assert by_dns["decode"] == "dns://tandem-decode.default.svc.cluster.local:8100/8200"
    assert (prefill["model"], prefill["device"]) == ("/models/llama-3.3-70b-instruct", "cuda")
    for service in (prefill, decode):
        assert service["tensor_parallel_size"] == 4
        assert service["served_model_name"] == "llama-70b"
        assert (service["dtype"], service["kv_cache_dtype"]) == ("bfloat16", "fp8")
        assert service["max_model_len"] == 32768
        assert service["drain_timeout_s"] == 120
    assert (router["drain_delay_s"], router["drain_timeout_s"]) == (10, 150)


def test_secrets_are_in_no_command_line() -> None:
    for name in SCENARIOS:
        for container in containers(rendered(name)).values():
            assert not any("key=" in text or "keys=" in text for text in container["args"])


def other_than_default(settings: type[BaseSettings], name: str) -> Any:
    """Returns a valid value that the setting does not have by itself."""
    field = settings.model_fields[name]
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, "", *field.metadata])
    default = field.get_default(call_default_factory=True)
    if name in {"model_rules_file", "chat_template"}:
        return os.devnull  # Files are read at once.
    candidates = [
        True, False, 3, 0.25, 0.75, 65536, 3 << 20, "mistral", "debug", "warning", "dummy",
        "auto", "nccl",
        "triton", "priority", "text", [1, 2, 8], "/a/path", "float16", "10.0.0.0/8", "stream",
        "https://a.example", 32, ["sql=/adapters/sql"], '{"temperature": 0.5}',
        '{"method": "ngram", "num_speculative_tokens": 3}', '{"num_redundant_experts": 3}',
    ]  # fmt: skip
    enums = get_args(field.annotation)
    words = [word for part in (field.annotation, *enums) for word in get_args(part)]
    texts = [word for word in words if isinstance(word, str)]
    for candidate in [*candidates, *texts, *([text] for text in texts)]:
        if isinstance(candidate, bool) and bool not in (field.annotation, *enums):
            continue
        try:
            value = adapter.validate_python(candidate, strict=not isinstance(candidate, list | str))
        except ValidationError:
            continue
        if value != default:
            return candidate
    raise AssertionError(f"no value for {name}: add one to the candidates")


def without_moving_experts(wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the same without what is refused beside --deterministic."""
    refused = {"enableEplb": False, "eplbConfig": None}
    return {**wanted, **{name: value for name, value in refused.items() if name in wanted}}


@pytest.mark.parametrize("service", ["router", "prefill", "decode", "node"])
def test_every_setting_that_is_offered_arrives(service: str) -> None:
    settings, _ = SERVICES[service]
    wanted = {value: other_than_default(settings, name) for value, name in offered(service).items()}
    if service == "node":
        wanted["speculativeConfig"] = None  # Refused: see test_mistakes.py.
    if service in ("node", "prefill"):
        wanted["kvSharePrefixes"] = "off"  # Or the cache, whose default is on, must stay on.
    wanted = without_moving_experts(wanted)
    values = overlay({**MINIMAL, "node": {"replicas": 1}}, {service: {"settings": wanted}})
    effective = check(service, containers(HelmSdk.shared().render(values))[service])
    for value, name in offered(service).items():
        got = effective[name]
        same = math.isclose(got, wanted[value]) if isinstance(got, float) else got == wanted[value]
        assert same, f"{value}: {got} instead of {wanted[value]}"


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_every_common_setting_goes_to_both_tiers(service: str) -> None:
    settings, _ = SERVICES["common"]
    wanted = {
        value: other_than_default(settings, name) for value, name in offered("common").items()
    }
    # Shared prefixes need it on decode nodes.
    wanted["enablePrefixCaching"] = True
    wanted = without_moving_experts(wanted)
    values = overlay(MINIMAL, {"tierDefaults": {"settings": wanted}})
    effective = check(service, containers(HelmSdk.shared().render(values))[service])
    assert {value: effective[name] for value, name in offered("common").items()} == wanted


def test_each_setting_is_offered_set_by_the_chart_or_left_out_on_purpose() -> None:
    """A setting that nobody thought of is offered by itself; a name that is gone is noticed."""
    for service, (settings, excluded) in SERVICES.items():
        known = set(settings.model_fields)
        assert known == set(offered(service).values()) | (excluded & known)
    every = {name for settings, _ in SERVICES.values() for name in settings.model_fields}
    for _, excluded in SERVICES.values():
        assert excluded <= every
    assert every >= NOT_OFFERED


def test_extra_arguments_are_checked_by_what_the_parsers_take_now() -> None:
    assert FLAGS.read_text(encoding="utf-8") == flags_text(), "run `make docs`"
    known = json.loads(flags_text())
    assert known.keys() == {*PROGRAMS, "bench"}
    for service, program in known.items():
        if service != "bench":
            settings, _ = SERVICES[service]
            flags = {f"--{name.replace('_', '-')}" for name in settings.model_fields} - {"--check"}
            taken = {*program["values"], *program["switches"]}
            assert flags <= taken <= flags | {f"--no-{flag[2:]}" for flag in flags}
