"""Plans a cluster: how many prefill and decode nodes traffic needs, and what clients will see.

    tandem plan --rate 20 --input 2000 --output 150 --hit-share 0.3 \\
                --slo-ttft-ms 500 --slo-itl-ms 20 --profile profile.json
    tandem plan --trace requests.jsonl --profile h200-llama-3.1-8b --price 4.2

Speeds come from `tandem bench` on your GPU (--profile FILE), from a running cluster (--metrics URL)
or, for a first look, from a profile that comes along (--profile NAME). The router's own placement
runs on simulated nodes with those speeds. See docs/planning.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import get_args

from rich.console import Console

from engine.config import PromptOrderName
from engine.speed.profile import ProfileError, SpeedProfile, load_profile
from planner.errors import NoPlan, PlanError
from planner.evaluation import Evaluator, Objectives
from planner.live_metrics import live_profile
from planner.plot import write_plot
from planner.report import Report
from planner.search import Search
from planner.shipped_profiles import shipped_profile, shipped_profiles
from planner.traffic.described import Description, read_lengths
from planner.traffic.trace_file import read_trace
from planner.traffic.traffic import Traffic

_DEFAULT_PROFILE = "h200-llama-3.1-8b"
_MAX_BLOCK_TOKENS = 65536
_FEWEST_REQUESTS, _MOST_REQUESTS = 3000, 20_000
"""Are simulated where nothing says how many."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns 0 with a plan, 1 when there is none, 2 when asked wrongly."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        report = _plan(arguments)
        if arguments.plot is not None:
            write_plot(report, arguments.plot)
    except NoPlan as error:
        print(f"tandem plan: {error}", file=sys.stderr)
        return 1
    except (PlanError, ProfileError) as error:
        print(f"tandem plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        json.dump(report.as_json(), sys.stdout, indent=1)
        print()
    else:
        report.print(Console())
    return 0


def _plan(arguments: argparse.Namespace) -> Report:
    objectives = _objectives(arguments)
    profile, is_example = _profile(arguments)
    traffic = simulated = _traffic(arguments, objectives)
    if arguments.trace is not None:
        count = _num_requests(arguments, objectives, traffic.rate, traffic.mean_output)
        simulated = traffic.busiest(count)
    console = Console(stderr=True)
    with console.status("reading the traffic") as status:
        search = Search(
            Evaluator(profile, simulated, objectives, prompt_order=arguments.prompt_order),
            arguments.max_nodes,
            lambda nodes: status.update(f"simulating {nodes} ..."),
        )
        plan = search.plan()
    return Report(
        plan=plan,
        traffic=traffic,
        simulated=simulated,
        profile=profile,
        objectives=objectives,
        price=arguments.price,
        store_gb_per_s=arguments.kv_store_gb_per_s,
        is_example=is_example,
    )


def _objectives(arguments: argparse.Namespace) -> Objectives:
    for name in ("slo_ttft_ms", "slo_itl_ms"):
        value = getattr(arguments, name)
        if not math.isfinite(value) or value <= 0:
            flag = "--" + name.replace("_", "-")
            raise PlanError(f"{flag} {value:g}: it is in milliseconds, more than 0")
    if not math.isfinite(arguments.price) or arguments.price < 0:
        raise PlanError(f"--price {arguments.price:g}: it is the price of a GPU for an hour")
    rate = arguments.kv_store_gb_per_s
    if not math.isfinite(rate) or rate < 0:
        raise PlanError(f"--kv-store-gb-per-s {rate:g}: it is in GB/s, 0 or more")
    if not 1 <= arguments.max_nodes <= 1000:
        raise PlanError(f"--max-nodes {arguments.max_nodes}: it is a number of nodes, 1 to 1000")
    if not 50 <= arguments.percentile < 100:
        raise PlanError(f"--percentile {arguments.percentile:g}: it is 50 to less than 100")
    needed = round(100 / (100 - arguments.percentile))
    count = _FEWEST_REQUESTS if arguments.requests is None else arguments.requests
    if count < needed:
        raise PlanError(
            f"--requests {count}: percentile {arguments.percentile:g} needs {needed} at least"
        )
    return Objectives(arguments.slo_ttft_ms / 1e3, arguments.slo_itl_ms / 1e3, arguments.percentile)


def _num_requests(
    arguments: argparse.Namespace, objectives: Objectives, rate: float, mean_output: float
) -> int:
    """Returns the number of requests to simulate: as many as come while nodes fill up, within what
    can be waited for."""
    if arguments.requests is not None:
        return int(arguments.requests)
    num_settled = rate * objectives.settled_s(mean_output)
    return math.ceil(min(_MOST_REQUESTS, max(_FEWEST_REQUESTS, num_settled)))


def _traffic(arguments: argparse.Namespace, objectives: Objectives) -> Traffic:
    if arguments.trace is not None:
        if arguments.rate is not None:
            raise PlanError("give either --trace or --rate")
        if not 1 <= arguments.block_tokens <= _MAX_BLOCK_TOKENS:
            raise PlanError(
                f"--block-tokens {arguments.block_tokens}: it is the tokens that one hash "
                f"stands for, 1 to {_MAX_BLOCK_TOKENS}"
            )
        return read_trace(arguments.trace, block_tokens=arguments.block_tokens, load=arguments.load)
    if arguments.rate is None:
        raise PlanError("say what the traffic is: --trace FILE, or --rate, --input and --output")
    output = read_lengths(arguments.output)
    return Description(
        rate=arguments.rate,
        prompt=read_lengths(arguments.input),
        output=output,
        hit_share=arguments.hit_share,
        burstiness=arguments.burstiness,
        count=_num_requests(arguments, objectives, arguments.rate, output.mean),
        seed=arguments.seed,
    ).traffic()


def _profile(arguments: argparse.Namespace) -> tuple[SpeedProfile, bool]:
    """Returns the speeds, and whether they are an example's."""
    if arguments.metrics:
        return live_profile(arguments.metrics), False
    name = arguments.profile or _DEFAULT_PROFILE
    if name in shipped_profiles():
        return shipped_profile(name), True
    path = Path(name)
    if not path.exists():
        known = ", ".join(shipped_profiles())
        raise PlanError(
            f"--profile {name}: there is no such file, and the profiles that come along are {known}"
        )
    return load_profile(path), False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--trace", type=Path, help="JSONL of tandem or Mooncake, or a result of "
                         "bench.serving.goodput --dump")  # fmt: skip
    traffic.add_argument("--load", default="", help="one of several loads of such a result")
    traffic.add_argument("--block-tokens", type=int, default=512, help="of prefix_hashes")
    traffic.add_argument("--rate", type=float, help="requests in a second")
    traffic.add_argument("--input", default="2000", metavar="LENGTH", help="prompt tokens: 2000, "
                         "2000~0.8 (mean, coefficient of variation) or 100-4000")  # fmt: skip
    traffic.add_argument(
        "--output", default="150", metavar="LENGTH", help="answer tokens, likewise"
    )
    traffic.add_argument("--hit-share", type=float, default=0.0, help="part of each prompt that "
                         "all share")  # fmt: skip
    traffic.add_argument("--burstiness", type=float, default=1.0, help="coefficient of variation "
                         "of the times between requests; 1: Poisson")  # fmt: skip
    traffic.add_argument("--requests", type=int, help="that are simulated; of a longer trace the "
                         "busiest part. Default: 3000, or those of 10 s and of two answers, "
                         "20000 at most")  # fmt: skip
    traffic.add_argument("--seed", type=int, default=1)
    speed = parser.add_argument_group("speed of a node")
    speed.add_argument("--profile", default="", help="a file that `tandem bench` wrote, or one of: "
                       + ", ".join(shipped_profiles()))  # fmt: skip
    speed.add_argument("--metrics", action="append", default=[], metavar="URL", help="/metrics of "
                       "a prefill node and of a decode node under load, one flag each")  # fmt: skip
    speed.add_argument("--kv-store-gb-per-s", type=float, default=0.0, help="that a node gets "
                       "from a KV store (docs/kv_tiers.md): does it pay?")  # fmt: skip
    speed.add_argument(
        "--prompt-order",
        choices=get_args(PromptOrderName),
        default="shortest",
        help="the setting of the nodes",
    )
    goal = parser.add_argument_group("objectives")
    goal.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="of the first token")
    goal.add_argument("--slo-itl-ms", type=float, default=50.0, help="between two tokens")
    goal.add_argument("--percentile", type=float, default=99.0, help="of first tokens, and of "
                      "times between tokens, that keep the objectives")  # fmt: skip
    goal.add_argument("--price", type=float, default=0.0, help="of one GPU for an hour")
    goal.add_argument("--max-nodes", type=int, default=64, help="of a tier")
    result = parser.add_argument_group("result")
    result.add_argument("--json", action="store_true", help="print JSON")
    result.add_argument("--plot", type=Path, help="write a picture to this SVG file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
