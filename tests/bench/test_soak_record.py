"""The record of a soak: it goes on where it was, and its slopes are those of what remains."""

from __future__ import annotations

import random
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.serving.soak import all_held
from bench.serving.soaks.soak_record import Growth, Look, Record, growth, plot, record_figures
from cli.local_cluster.supervisor import Listener, Service, ServiceSpec


def looks(**growth_mib_s: float) -> list[Look]:
    """Makes looks of an hour, every minute, at two requests a second."""
    return [
        Look(
            at,
            int(2 * at),
            {name: 100 + by * at for name, by in growth_mib_s.items()},
            dict.fromkeys(growth_mib_s, 7),
        )
        for at in (60.0 * minute for minute in range(61))
    ]


def test_growth_is_per_hour_and_forgets_the_warm_up() -> None:
    run = looks(flat=0.0, grows=0.01)
    for look in run[:10]:
        look.private_mib["flat"] = 7.0
    run[-1].private_mib["late"] = 50.0
    found = growth(run)
    assert set(found) == {"flat", "grows"}
    assert found["flat"] == Growth(0.0, 0.0, 0.0, 0.0)
    assert found["grows"].mib_an_hour == pytest.approx(36.0)
    assert found["grows"].mib_per_1000_requests == pytest.approx(5.0)
    assert growth([]) == growth(run[:5]) == {}


def test_the_interval_has_the_growth_of_noisy_memory() -> None:
    """Draws 200 processes that grow by 3.6 MiB an hour, with noise: at least 9 in 10 have that in
    their interval of 95 %."""
    noise = random.Random(7)
    hits = 0
    for _ in range(200):
        run = looks(one=0.001)
        for look in run:
            look.private_mib["one"] += noise.gauss(0, 2)
        found = growth(run)["one"]
        hits += found.low <= 3.6 <= found.high
    assert hits >= 180


def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = Record.read(path)
    record.num_done, record.texts = 9, {"3": "three"}
    record.runs.append(looks(core=0.5))
    record.save(path)
    again = Record.read(path)
    assert again == record
    result = record_figures(again)
    assert result["hours"] == 1.0
    assert result["most_mib_an_hour"] == pytest.approx(1800.0)


def test_the_plot_has_a_line_for_each_process(tmp_path: Path) -> None:
    plot(looks(core=0.1, router=0.2), tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert "core" in drawn and "router" in drawn and drawn.rstrip().endswith("</svg>")


async def test_a_node_that_is_starting_at_the_end_is_waited_for() -> None:
    async def metrics(_: web.Request) -> web.Response:
        raise web.HTTPServiceUnavailable

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        argv = ("decode_node", "--port", str(server.port))
        node = Service(ServiceSpec("decode-0", argv, ""), Listener(), 1.0)
        assert await all_held(session, [node]) == {"decode-0 is starting": 1.0}
