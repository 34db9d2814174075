"""Whatever the schema admits either renders to valid objects that the services accept, or is
refused with a cure; what it does not admit is refused by name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from tests.helm.helm_engine import HelmError, HelmSdk
from tests.helm.kube_schemas import errors
from tests.helm.service_settings import check, containers
from tests.helm.value_strategies import paths, referred, schema, values

CALM = settings(
    max_examples=25,
    phases=[Phase.generate],  # to shrink would render hundreds of charts more
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@CALM
@given(values())
def test_valid_values_render_and_are_accepted_or_are_refused_with_a_cure(
    drawn: dict[str, Any],
) -> None:
    try:
        found = HelmSdk.shared().render(drawn)
    except HelmError as refusal:
        assert "These values do not fit together" in str(refusal), (drawn, str(refusal))
        event("refused")
        return
    event("rendered")
    wrong = [error for manifest in found.objects for error in errors(manifest, "1.34")]
    assert not wrong, (drawn, wrong)
    for service, container in containers(found).items():
        check(service, container)


@CALM
@given(values(), st.data())
def test_a_key_that_nobody_reads_is_refused_by_name(drawn: dict[str, Any], data: Any) -> None:
    place = data.draw(st.sampled_from(owned(drawn)))
    broken = deepcopy(drawn)
    at = broken
    for key in place:
        at = at[key]
    at["noSuchValue"] = 1
    try:
        HelmSdk.shared().render(broken)
    except HelmError as refusal:
        assert "noSuchValue" in str(refusal)
    else:
        raise AssertionError(f"{place} takes any key")


def owned(drawn: dict[str, Any]) -> list[tuple[str, ...]]:
    """Objects in which the schema knows every key."""

    def is_closed(place: tuple[str, ...]) -> bool:
        node = schema()
        for key in place:
            node = node["properties"][key]
            while "$ref" in node:
                node = referred(node["$ref"])
            if "properties" not in node:
                return False
        return node.get("additionalProperties") is False

    return [place for place in paths(drawn) if is_closed(place)]
