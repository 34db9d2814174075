"""Templates have bounds of time and text, whichever way they make much of little; templates of the
usual kind say what Jinja says."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.frontend.templates.bounded_templates import BoundedEnvironment
from engine.frontend.templates.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateTooCostly,
)
from engine.frontend.templates.template_budget import rendering_within

SECONDS = 0.2
MESSAGES = [{"role": "user", "content": "hello\nyou"}, {"role": "assistant", "content": "hi"}]


def loop(body: str, items: str = "range(90000)") -> str:
    return f"{{% for a in {items} %}}{body}{{% endfor %}}"


def grown(by: str, start: str = "'aaaa'") -> str:
    """Returns a template that sets a variable again and again."""
    change = f"{{% set ns.x = {by} %}}"
    return f"{{% set ns = namespace(x={start}) %}}" + loop(change, "range(300)")


MUCH = {
    "loops in loops": loop(loop("")),
    "output in loops": loop(loop("aaaaaa")),
    "a set block in loops": "{% set x %}" + loop("{{ 'a' * 9000 }}") + "{% endset %}",
    "loops of messages": loop(loop("{% if a == b %}{% endif %}", "many"), "many"),
    "filters in loops": loop("{{ many | map('length') | sum }}", "many"),
    "macros that call themselves": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "times": "{{ 'a' * 10**9 }}",
    "times, turned": "{{ (10**9) * 'a' }}",
    "a long list": "{{ ([1] * 10**9) | length }}",
    "powers": "{{ 10 ** (10**9) }}",
    "powers of powers": grown("ns.x * ns.x", "9**99"),
    "doubled by +": grown("ns.x + ns.x"),
    "doubled by ~": grown("ns.x ~ ns.x"),
    "lists doubled": grown("ns.x + ns.x", "[1]"),
    "kept": grown("ns.x + ['a' * (9**7 + a)]", "[]"),
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000s' | format('a') }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format of a width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "tabs": r"{{ ('\t' * 10**6).expandtabs(10**4) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "replace nothing": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "replace filter": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "join": "{{ ('a' * 10**5).join(many) }}",
    "join filter": "{{ many | join('a' * 10**5) }}",
    "indent": r"{{ ('\n' * 10**6) | indent(9999) }}",
    "indent by name": r"{{ ('\n' * 10**6) | indent(first=true, width=9999) }}",
    "batch": "{{ many | batch(10**9, 'a') | list | length }}",
    "tojson": "{{ many | tojson(indent=10**6) }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 10**7}) }}",
}


def render(source: str, **variables: Any) -> str:
    with rendering_within(SECONDS):
        return ChatTemplate(source, {}).render(MESSAGES, variables=variables)


@pytest.mark.parametrize("name", MUCH)
def test_what_makes_too_much_is_refused_before_it_has(name: str) -> None:
    many = [f"message {i}" for i in range(30_000)]
    began = time.thread_time()
    with pytest.raises(ChatTemplateTooCostly, match="too much of these messages"):
        render(MUCH[name], many=many)
    # A look at the time is taken now and then; and this machine may have other work.
    assert time.thread_time() - began < 20 * SECONDS


@pytest.mark.parametrize("name", [name for name in MUCH if "loop" not in name])
def test_memory_is_not_taken_first(name: str) -> None:
    many = [f"message {i}" for i in range(30_000)]
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateTooCostly):
            render(MUCH[name], many=many)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 400 << 20, "texts of 256 Mi characters together may be kept"


USUAL = [
    "{{ loop.index }}/{{ loop.length }}{{ ', ' if not loop.last }}{{ a.role }}",
    "{{ loop.previtem }}{{ loop.nextitem }}{% if loop.first %}{% continue %}{% endif %};",
    "{{ a.content ~ 1 ~ none ~ [2] }}{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}",
    "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ messages | join(',', attribute='role') }}",
    "{{ 'a b' | replace('a', 'c') | indent(2, first=True) | center(9) }}",
    "{{ '100%% of %d 123456' % 5 }}{{ '{} 123456: {:>5}'.format(1700000000, 'x') }}",
    "{{ ['a', 'b'] | batch(2) | list }}{{ 2 ** 10 * 3 }}{{ 7 % 4 }}{{ ('ab' * 3) ~ 'c' * 2 }}",
    "{% macro f(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}"
    "{% call f(2) %}!{% endcall %}",
    "{% set block %}{{ a.content | upper }}{% endset %}{{ block | trim }}{{ [1] + [2] }}",
    "{{ 'a-b'.split('-') | join('+') }}{{ a | tojson }}{{ 'x'.center(5) }}",
]


@pytest.mark.parametrize("items", ["messages", "messages if a.role == 'user'", "missing", "'abc'"])
@pytest.mark.parametrize("body", USUAL)
def test_usual_templates_say_what_jinja_says(body: str, items: str) -> None:
    source = loop(body, items)
    options = {"trim_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    expected = ImmutableSandboxedEnvironment(**options).from_string(source)
    found = BoundedEnvironment(**options).from_string(source)
    assert _said(found) == _said(expected)


def _said(template: jinja2.Template) -> str:
    try:
        return template.render(messages=MESSAGES)
    except (jinja2.UndefinedError, TypeError) as error:
        return f"{type(error)} {error}"


def test_without_a_bound_of_time_texts_are_bounded_all_the_same() -> None:
    with pytest.raises(ChatTemplateTooCostly, match="more than 16777216 characters"):
        ChatTemplate("{{ 'a' * 10**8 }}", {}).render(MESSAGES)
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        render("{{ 1 / 0 }}")
