"""Items of /v1/responses change how answers are made: errors name the item."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decode_node.test_responses_api import RESPONSES, one_node

USER = {"role": "user", "content": "a"}


def update(**fields: Any) -> dict[str, Any]:
    return {"type": "configuration_update", **fields}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": 3}}}, "text.format.name"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ],
)
async def test_a_fault_is_named_in_the_item_that_has_it(fields: dict[str, Any], place: str) -> None:
    async with one_node() as node:
        for body, beginning in (
            ({"input": [USER, update(**fields)]}, "input.1."),
            ({"input": [update(), USER], **fields}, ""),
        ):
            response = await node.client.post(RESPONSES, json=body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == beginning + place, error
