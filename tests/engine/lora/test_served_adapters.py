"""Tests of which adapters of a node have changed."""

from __future__ import annotations

from engine.contracts.request_spec import AdapterRef
from engine.frontend.calls.served_adapters import ServedAdapters


def ref(name: str, digest: str = "a") -> AdapterRef:
    return AdapterRef(name, digest)


def test_what_changed_since_is_told_once_as_it_is_now() -> None:
    served = ServedAdapters()
    served.update({name: ref(name) for name in ("poet", "bard", "muse")})
    seen = served.num_changes
    assert served.since(seen) == []
    served["poet"] = ref("poet", "b")
    del served["bard"]
    served["poet"] = ref("poet", "c")
    served["new"] = ref("new")
    del served["new"]
    changes = served.since(seen)
    assert changes is not None
    assert dict(changes) == {"poet": ref("poet", "c"), "bard": None, "new": None}
    assert len(changes) == 3
    assert served.since(served.num_changes) == []


def test_an_adapter_is_there_while_a_name_stands_for_it() -> None:
    served = ServedAdapters()
    served.update({"poet": ref("poet", "a"), "bard": ref("bard", "a")})
    served["poet"] = ref("poet", "b")
    assert served.has("a") and served.has("b") and not served.has("c")
    del served["bard"]
    served["poet"] = ref("poet", "b")
    assert served.has("b") and not served.has("a")
    served.clear()
    assert not served.has("b")


def test_those_who_are_far_behind_are_told_of_all() -> None:
    served = ServedAdapters()
    served["first"] = ref("first")
    assert served.since(-1) is None
    assert served.since(0) == [("first", ref("first"))]
    for i in range(5000):
        served["other"] = ref("other", str(i))
    assert served.since(0) is not None  # Two names have changed, however often.
    for i in range(5000):
        served[f"lora-{i}"] = ref(f"lora-{i}")
    assert served.since(0) is None and served.since(1) is None
    known = served.since(served.num_changes - 10)
    assert known is not None and len(known) == 10
