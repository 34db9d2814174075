"""Tests aliases and splits of models: what the file may say, who gets which version, and that a
changed file is taken over or refused as a whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.http.errors import BadRequest, HttpError
from router.errors import ConfigurationError, ModelNotFound
from router.models.known_models import KnownModels, ModelTable
from router.models.model_rules import ModelRules, read_rules
from router.models.rules_file import RulesFile
from router.nodes.address import NodeRole
from router.nodes.registry import NodeRegistry
from router.request.info import read_request_info
from router.request.model_route import ModelRoute
from tests.router.factories import Fleet, address

CANARY = """
models = ["m-v1", "m-v2", "other"]
[aliases]
"gpt-4o" = "m"
fast = "other"
[splits.m]
m-v1 = 90
m-v2 = 10
"""


def split(**weights: float) -> ModelRoute:
    return ModelRoute("m", tuple(weights.items()))


def keys(count: int) -> list[bytes]:
    return [f"session {i}".encode() for i in range(count)]


# The file ----------------------------------------------------------------------------------------


def test_the_file_gives_aliases_and_splits() -> None:
    rules = read_rules(CANARY)
    assert rules.models == ("m-v1", "m-v2", "other")
    assert rules.aliases == {"gpt-4o": "m", "fast": "other"}
    assert rules.splits == {"m": (("m-v1", 90.0), ("m-v2", 10.0))}
    assert rules.targets() == {"m-v1", "m-v2", "other"}
    assert read_rules("") == ModelRules()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[aliases", "cannot be read"),
        ("a = " + "[" * 10_000, "cannot be read"),
        ("[alias]\na = 'b'", "alias"),
        ("[aliases]\ngpt-3.5 = 'b'", "quotes"),
        ("[aliases]\na = 3", "aliases"),
        ("[aliases]\na = ''", "the name ''"),
        ("[aliases]\na = 'a'", "'a', which is an alias"),
        ("[aliases]\na = 'b'\nb = 'c'", "'b', which is an alias"),
        ("models = ['a']\n[aliases]\na = 'b'", "hides the model"),
        ("models = ['a', 'a']", "'a' twice"),
        ("[aliases]\nm = 'x'\n[splits.m]\na = 1", "both as an alias and as a split"),
        ("[splits.m]", "no version"),
        ("[splits.m]\na = 0", "'a' of 'm' the weight 0"),
        ("[splits.m]\na = -1", "weight -1"),
        ("[splits.m]\na = nan", "weight nan"),
        ("[splits.m]\na = inf", "weight inf"),
        ("[splits.m]\na = '5'", "splits"),
        ("[splits.m]\na = 1\n[splits.a]\nb = 1", "'a' in the split 'm', which is a rule"),
        ("[aliases]\na = 'x'\n[splits.m]\na = 1", "'a' in the split 'm', which is a rule"),
        ('[splits."m\\u0007"]\na = 1', "the name"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_rules(text)
    assert named in str(caught.value)


def test_a_split_may_bear_the_name_of_its_own_version() -> None:
    rules = read_rules("models = ['m', 'm-v2']\n[splits.m]\nm = 95\nm-v2 = 5")
    table = ModelTable(rules=rules, served={"m": "m", "m-v2": "m-v2"})
    assert table.route("m").versions == (("m", 95.0), ("m-v2", 5.0))
    assert rules.hidden({"m", "m-v2"}) == set()
    assert rules.hidden({"gpt-4o"}) == set()
    assert read_rules(CANARY).hidden({"m", "m-v1", "fast"}) == {"m", "fast"}
    moved = ModelTable(
        rules=read_rules("models = ['m', 'm-v2']\n[splits.m]\nm-v2 = 1"),
        served={"m": "m", "m-v2": "m-v2"},
    )
    assert moved.route("m").versions == (("m-v2", 1.0),), "all sessions have moved"
    assert moved.versions() == {("m", "m-v2"), ("m-v2", "m-v2")}


def swap(folder: Path, name: str, text: str) -> None:
    """Changes a file as the kubelet changes a mounted ConfigMap: by a link to another folder."""
    (folder / name).mkdir()
    (folder / name / "rules.toml").write_text(text)
    (folder / "new").symlink_to(name)
    (folder / "new").replace(folder / "data")


def test_a_mounted_file_that_changes_is_taken_over_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rules.toml").symlink_to("data/rules.toml")
    swap(tmp_path, "one", "[splits.m]\na = 90\nb = 10")
    file = RulesFile(tmp_path / "rules.toml")
    assert file.reload() is False
    swap(tmp_path, "two", "[splits.m]\na = 80\nb = 20")
    assert file.reload() is True
    assert file.rules.splits["m"] == (("a", 80.0), ("b", 20.0))
    swap(tmp_path, "three", "[splits.m]\na = 80\nb = -20")
    assert file.reload() is False
    assert file.rules.splits["m"] == (("a", 80.0), ("b", 20.0))
    assert "weight -20" in caplog.text
    assert "stay as they were" in caplog.text
    assert figures(file) == {"broken": 1, "applied": 1, "refused": 1, "a": 0.8, "b": 0.2}
    (tmp_path / "data").unlink()
    assert file.reload() is False, "a file that is gone"
    assert file.rules.splits["m"] == (("a", 80.0), ("b", 20.0))
    swap(tmp_path, "four", "[splits.m]\na = 100")
    assert file.reload() is True
    assert figures(file) == {"broken": 0, "applied": 2, "refused": 2, "a": 1.0}


def figures(file: RulesFile) -> dict[str, float]:
    samples = [sample for family in file.collect() for sample in family.samples]
    return {
        sample.labels.get("version", sample.labels.get("outcome", "broken")): sample.value
        for sample in samples
    }


def test_a_router_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    for content in ("[splits.m]\na = 0", None):
        file = tmp_path / "rules.toml"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigurationError, match="model rules"):
            RulesFile(file)


# Who gets which version --------------------------------------------------------------------------

WEIGHTS = st.dictionaries(
    st.text("abcdefgh-0123456789", min_size=1, max_size=6),
    st.floats(0.01, 1000),
    min_size=1,
    max_size=5,
)


@given(WEIGHTS, st.randoms(use_true_random=False))
def test_versions_get_their_shares_in_whatever_order_they_are_written(
    weights: dict[str, float], rng: object
) -> None:
    names = list(weights)
    rng.shuffle(names)  # type: ignore[attr-defined]
    one = split(**weights)
    other = split(**{name: weights[name] for name in names})
    count = 1500
    got = Counter(one.version(key) for key in keys(count))
    assert got == Counter(other.version(key) for key in keys(count))
    total = sum(weights.values())
    for name, weight in weights.items():
        share = weight / total
        spread = 5 * (share * (1 - share) / count) ** 0.5
        assert abs(got[name] / count - share) <= spread + 0.003, name


@given(WEIGHTS, st.data())
def test_a_session_moves_only_to_a_version_that_grew_against_its_own(
    before: dict[str, float], data: st.DataObject
) -> None:
    after = {name: data.draw(st.floats(0.01, 1000)) for name in before}
    for key in keys(200):
        old, new = split(**before).version(key), split(**after).version(key)
        if old != new:
            assert after[new] / before[new] > after[old] / before[old]


@pytest.mark.parametrize(("less", "more"), [(5, 10), (10, 20), (20, 50), (50, 99)])
def test_a_canary_that_grows_loses_no_session(less: int, more: int) -> None:
    one, two = split(v1=100 - less, v2=less), split(v1=100 - more, v2=more)
    moves = Counter((one.version(key), two.version(key)) for key in keys(4000))
    assert moves["v2", "v1"] == 0
    assert moves["v1", "v2"] / 4000 == pytest.approx((more - less) / 100, abs=0.03)


def test_two_routers_agree_on_the_version_of_a_session_and_clients_may_use_any_alias() -> None:
    """Nothing goes from router to router, and neither knows what the other has seen."""
    tables = [known_models(CANARY, "m-v1", "m-v2").table for _ in range(2)]
    versions = set()
    for i in range(200):
        body = b'{"model": "%b", "messages": []}'
        headers = {"x-session-id": f"s{i}"}
        found = {
            read_request_info(
                "/v1/chat/completions", f"r{i}-{router}", headers, body % name, route=table.route
            ).model
            for router, table in enumerate(tables)
            for name in (b"m", b"gpt-4o")
        }
        assert len(found) == 1
        versions |= found
    assert versions == {"m-v1", "m-v2"}


def test_requests_without_a_session_are_split_by_their_ids() -> None:
    route = known_models(CANARY, "m-v1", "m-v2").table.route
    body = b'{"model": "m"}'
    got = Counter(
        read_request_info("/v1/completions", f"r{i}", {}, body, route=route).model
        for i in range(1000)
    )
    assert got["m-v2"] / 1000 == pytest.approx(0.1, abs=0.04)
    again = read_request_info("/v1/completions", "r7", {}, body, route=route)
    assert again.model == read_request_info("/v1/completions", "r7", {}, body, route=route).model


# Which models there are --------------------------------------------------------------------------


def known_models(rules: str, *served: str, fleet: Fleet | None = None) -> KnownModels:
    fleet = fleet or Fleet()
    for i, name in enumerate(served):
        fleet.add(f"d{i}", model_name=name)
    file = RulesFile()
    file.rules = read_rules(rules)
    return KnownModels(registry=fleet.registry, rules=file)


def test_an_unknown_model_is_refused_with_the_names_that_there_are() -> None:
    table = known_models(CANARY, "m-v1", "m-v2", "more").table
    with pytest.raises(ModelNotFound) as caught:
        table.route("gpt-9")
    for name in ("gpt-4o", "fast", "m", "m-v1", "m-v2", "more", "other"):
        assert repr(name) in str(caught.value)
    with pytest.raises(BadRequest, match="Name a model"):
        table.route("")
    assert known_models("", "only").table.route("").versions == (("only", 1.0),)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"lora_path": "zz"', "lora_path"),
        (b'"lora_path": null, "model": "zz"', "model"),
        (b'"model": null', "model"),
    ],
    ids=range(3),
)
def test_the_field_that_named_an_unknown_model_is_told(fields: bytes, param: str) -> None:
    table = known_models(CANARY, "m-v1", "m-v2").table
    with pytest.raises(HttpError) as caught:
        read_request_info("/generate", "r", {}, b"{%s}" % fields, route=table.route)
    assert caught.value.param == param


def test_a_model_whose_nodes_are_gone_is_expected_back_for_a_while() -> None:
    fleet = Fleet()
    known = known_models("", "stays", "goes", fleet=fleet)
    assert known.table.models() == {"goes", "stays"}
    fleet.registry.set_members([address("d0")])
    for later_s in (1.0, 590.0):
        fleet.clock.now += later_s
        assert known.table.route("goes").name == "goes"
    fleet.clock.now += 20
    with pytest.raises(ModelNotFound, match=r"There is: 'stays'\."):
        known.table.route("goes")


def test_models_that_the_rules_name_are_never_forgotten() -> None:
    fleet = Fleet()
    known = known_models(CANARY, "m-v1", fleet=fleet)
    fleet.clock.now += 10_000
    assert known.table.route("other").versions == (("other", 1.0),)
    assert known.table.route("fast").name == "other"
    assert dict(known.table.route("gpt-4o").versions) == {"m-v1": 90.0, "m-v2": 10.0}


def test_while_a_node_has_not_reported_no_model_is_called_unknown() -> None:
    fleet = Fleet()
    known = known_models("", "here", fleet=fleet)
    fleet.registry.set_members([address("d0"), address("new")])
    assert known.table.route("soon").name == "soon"
    with pytest.raises(ModelNotFound):
        known.table.route("x" * 600)
    fleet.clock.now += 11
    with pytest.raises(ModelNotFound):
        known.table.route("soon")


def test_a_first_name_is_never_taken_by_another_models_alias() -> None:
    fleet = Fleet()
    fleet.add("a", model_name="one", model_aliases=("two", "shared"))
    fleet.add("b", model_name="two", model_aliases=("shared",))
    table = known_models("", fleet=fleet).table
    assert table.route("two").name == "two"
    assert table.route("shared").name == "two"


def test_each_model_counts_its_own_computing_nodes() -> None:
    fleet = Fleet()
    fleet.add("a", model_name="one", fingerprint="1")
    fleet.add("b", model_name="two", fingerprint="2")
    fleet.add("c", model_name="two", fingerprint="2")
    fleet.add("twin", model_name="twin", fingerprint="2")
    for i in range(3):
        fleet.add(f"p{i}", NodeRole.PREFILL, model_name="folder", fingerprint="1")
    fleet.add("q", NodeRole.PREFILL, model_name="twin", fingerprint="2")
    known = known_models("", fleet=fleet)
    assert known.num_computing("one") == 3, "whatever the prefill nodes call it"
    assert known.num_computing("twin") == 1
    assert known.num_computing("two") == 1, "no prefill node of its name: those of its weights"
    assert known.num_computing("none") == 0


def test_a_restarted_router_needs_no_report_to_know_a_named_model() -> None:
    file = RulesFile()
    file.rules = read_rules(CANARY)
    known = KnownModels(registry=NodeRegistry(), rules=file)
    assert known.table.route("m").name == "m"
