"""Times of a network: measured times are reproduced, and others are extrapolated and marked as such."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from networks import ideal, results

from commtrace.network import NetworkError
from commtrace.network.algorithms import Level, cost, steps
from commtrace.network.bench_operations import COLLECTIVES
from commtrace.network.bench_results import write_results
from commtrace.network.networks import (
    DescribedNetwork,
    MeasuredNetwork,
    Network,
    builtin_networks,
    hosts_of_group,
    open_network,
)
from commtrace.volume import busbw_factor


def total(network: Network, op: str, payload: int, ranks: int, hosts: int = 1) -> float:
    expected = network.expected(op, payload, ranks, hosts)
    assert expected is not None
    return expected.total_us


# ---- measured --------------------------------------------------------------------------------------------------------


def test_what_was_measured_comes_back() -> None:
    network = MeasuredNetwork("it", results([*ideal("all_reduce", 4), *ideal("send_recv", 2, gb_per_s=2.0)]))
    expected = network.expected("all_reduce", 1 << 20, 4, 1)
    assert expected is not None
    assert expected.source == "fitted"
    assert expected.latency_us == pytest.approx(10.0)
    assert expected.bandwidth_us == pytest.approx(1.5 * (1 << 20) / 1e3)
    for op in ("send", "recv"):  # in a group of any size
        assert total(network, op, 1 << 20, 16) == pytest.approx(10.0 + (1 << 20) / 2e3)
    assert network.expected("all_gather", 1 << 20, 4, 1) is None
    assert network.expected("scan", 1 << 20, 4, 1) is None


def test_nothing_leaves_a_group_of_one() -> None:
    expected = MeasuredNetwork("it", results(ideal("all_reduce", 4))).expected("all_reduce", 1 << 20, 1, 1)
    assert expected is not None
    assert (expected.total_us, expected.source) == (0.0, "local")


@pytest.mark.parametrize(
    ("alpha", "latency"),
    [(lambda ranks: 5.0 * (ranks - 1), 5.0 * 15), (lambda ranks: 9.0 * math.ceil(math.log2(ranks)), 9.0 * 4)],
)
def test_other_groups_follow_the_algorithm_that_was_seen(alpha: Any, latency: float) -> None:
    measured = results([*ideal("all_gather", 2, alpha=alpha), *ideal("all_gather", 8, alpha=alpha)])
    expected = MeasuredNetwork("it", measured).expected("all_gather", 1 << 20, 16, 1)
    assert expected is not None
    assert expected.source == "extrapolated"
    assert expected.latency_us == pytest.approx(latency)
    assert expected.bandwidth_us == pytest.approx(15 / 16 * (1 << 20) / 1e3)  # the bus bandwidth stays the same


def test_of_one_group_the_ring_is_taken() -> None:
    expected = MeasuredNetwork("it", results(ideal("all_reduce", 2))).expected("all_reduce", 0, 9, 1)
    assert expected is not None
    assert expected.latency_us == pytest.approx(80.0)
    assert expected.source == "extrapolated"


def test_sizes_beyond_those_measured_are_extrapolated() -> None:
    expected = MeasuredNetwork("it", results(ideal("all_reduce", 2))).expected("all_reduce", 1 << 30, 2, 1)
    assert expected is not None
    assert expected.source == "extrapolated"
    assert expected.total_us == pytest.approx(10.0 + (1 << 30) / 1e3)


def test_groups_over_hosts_are_not_told_from_groups_within_one() -> None:
    measured = results(
        [*ideal("all_reduce", 4, 1), *ideal("all_reduce", 4, 2, gb_per_s=0.1), *ideal("all_reduce", 8, 2, gb_per_s=0.1)]
    )
    network = MeasuredNetwork("it", measured)
    assert total(network, "all_reduce", 1 << 20, 4, 2) > 9 * total(network, "all_reduce", 1 << 20, 4, 1)
    assert total(network, "all_reduce", 1 << 24, 6, 3) == pytest.approx((5 / 3) * (1 << 24) / 1e2, rel=0.01)


# ---- algorithms ------------------------------------------------------------------------------------------------------


def test_steps() -> None:
    assert [steps("all_reduce", n, "ring") for n in (2, 5)] == [2, 8]
    assert [steps("all_reduce", n, "tree") for n in (2, 5, 8)] == [2, 6, 6]
    assert [steps("all_gather", n, "tree") for n in (2, 5, 8)] == [1, 3, 3]
    assert steps("gather", 8, "tree") == steps("all_to_all", 8, "ring") == 7
    assert steps("send_recv", 2, "ring") == 1


NEAR, FAR = Level(1.0, 100.0), Level(10.0, 10.0)


@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "broadcast"]
)
def test_on_one_host_a_large_message_has_the_links_bandwidth(op: str) -> None:
    payload = 1 << 34
    predicted = cost(op, payload, 8, 1, NEAR, FAR)
    factor = busbw_factor(op, 8)
    assert factor is not None
    assert payload * factor / predicted.total_us / 1e3 == pytest.approx(100.0, rel=0.001)


def test_over_hosts_a_ring_has_the_nics_of_all_its_ranks() -> None:
    payload, factor = 1 << 34, 2 * 31 / 32
    assert payload * factor / cost("all_reduce", payload, 32, 4, NEAR, FAR).total_us / 1e3 == pytest.approx(
        80.0, rel=0.01
    )
    alone = cost("all_reduce", payload, 4, 4, NEAR, FAR).total_us  # one rank of each host
    assert payload * 1.5 / alone / 1e3 == pytest.approx(10.0, rel=0.01)


def test_the_latency_over_hosts_is_that_of_the_faster_algorithm() -> None:
    assert cost("all_gather", 0, 32, 4, NEAR, FAR).latency_us == 28 * 1 + 3 * 10
    assert cost("all_reduce", 0, 32, 4, NEAR, FAR).latency_us == 2 * (7 * 1 + 2 * 10)  # the tree
    assert cost("broadcast", 4, 32, 4, NEAR, FAR).latency_us == 3 * 1 + 2 * 10


def test_an_all_to_all_sends_to_other_hosts_what_is_theirs() -> None:
    predicted = cost("all_to_all", 32 << 20, 32, 4, NEAR, FAR)
    assert predicted.bandwidth_us == pytest.approx((24 << 20) / 10e3)


def test_messages_within_a_host_and_between_two() -> None:
    assert cost("send_recv", 1 << 20, 2, 1, NEAR, FAR).total_us == pytest.approx(1.0 + (1 << 20) / 100e3)
    assert cost("send_recv", 1 << 20, 2, 2, NEAR, FAR).total_us == pytest.approx(10.0 + (1 << 20) / 10e3)


@pytest.mark.parametrize(
    ("op", "ranks", "us"), [("all_gather", 2, 3000), ("all_gather", 4, 3000), ("all_reduce", 2, 4000)]
)
def test_two_gloo_ranks_have_one_connection(op: str, ranks: int, us: float) -> None:
    """4 MB at 1 GB/s: half of them in an all_gather of two ranks, each half of which waits for half of the other's."""
    expected = open_network("1GB/s").over("gloo").expected(op, 4_000_000, ranks, 1)
    assert expected is not None
    assert expected.total_us == pytest.approx(us)


@pytest.mark.parametrize("op", [*COLLECTIVES, "send", "barrier"])
def test_more_hosts_ranks_and_bytes_never_take_less_time(op: str) -> None:
    network = open_network("ndr-infiniband")
    for payload in (4, 1 << 20, 1 << 28):
        assert total(network, op, payload, 16, 2) >= total(network, op, payload, 8, 1)
        assert total(network, op, 2 * payload, 16, 2) >= total(network, op, payload, 16, 2)
        assert total(network, op, payload, 32, 4) >= 0.999 * total(network, op, payload, 16, 2)


@pytest.mark.parametrize(
    ("ranks", "stride", "hosts"), [(8, 1, 1), (8, 2, 2), (8, 8, 8), (4, 16, 4), (9, 1, 2), (2, 4, 1)]
)
def test_ranks_fill_one_host_after_the_other(ranks: int, stride: int, hosts: int) -> None:
    assert hosts_of_group(ranks, stride, 8) == hosts


# ---- descriptions ----------------------------------------------------------------------------------------------------

DESCRIPTION: dict[str, Any] = {
    "format": "commtrace-network-description",
    "version": 1,
    "name": "mine",
    "ranks_per_node": 2,
    "intra_node": {"latency_us": 1, "bandwidth_gb_per_s": 100},
    "inter_node": {"latency_us": 5, "bandwidth_gb_per_s": 12.5},
}


def save(folder: Path, document: Any) -> str:
    path = folder / "mine.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_shipped_descriptions_have_a_source_for_each_figure() -> None:
    assert builtin_networks() == ["ndr-infiniband", "slingshot-11"]
    for name in builtin_networks():
        network = open_network(name)
        assert isinstance(network, DescribedNetwork)
        assert network.name == name
        figures = {
            f"{level}_node.{figure}" for level in ("intra", "inter") for figure in ("latency_us", "bandwidth_gb_per_s")
        }
        assert set(network.sources) == {*figures, "ranks_per_node", "start_us"}
        assert network.about[0].startswith("described: nodes of")


def test_an_own_description(tmp_path: Path) -> None:
    network = open_network(save(tmp_path, DESCRIPTION))
    expected = network.expected("send", 125_000, 2, 2)
    assert expected is not None
    assert (expected.latency_us, expected.bandwidth_us, expected.source) == (5.0, 10.0, "described")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node is 0; a whole number"),
        ({"ranks_per_node": None}, "ranks_per_node is None"),
        ({"version": 2}, "version is 2; this commtrace reads 1"),
        ({"format": "else"}, "neither a file of commtrace bench"),
        ({"latency": 3}, "unknown key latency; choose from"),
        ({"start_us": -1}, "start_us is -1; a number of at least 0"),
        ({"start_us": True}, "start_us is True"),
        ({"sources": []}, "sources is []"),
        ({"inter_node": None}, "inter_node is None; an object with latency_us and bandwidth_gb_per_s"),
        ({"inter_node": {"latency_us": 1}}, "inter_node.bandwidth_gb_per_s is None"),
        ({"inter_node": {"latency_us": 1, "bandwidth_gb_per_s": 0}}, "bandwidth_gb_per_s is 0; a number above 0"),
        ({"intra_node": {"latency_us": "1", "bandwidth_gb_per_s": 1}}, "intra_node.latency_us is '1'"),
        ({"intra_node": {"latency_us": 1, "bandwidth_gb_per_s": 1, "x": 1}}, "intra_node: unknown key x"),
    ],
)
def test_a_wrong_description_is_said(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = save(tmp_path, {**copy.deepcopy(DESCRIPTION), **change})
    with pytest.raises(NetworkError) as error:
        open_network(file)
    assert message in str(error.value)
    assert str(error.value).startswith(file)


def test_a_network_that_there_is_not() -> None:
    with pytest.raises(NetworkError, match=r"slingshot: no such file, .*choose from ndr-infiniband, slingshot-11"):
        open_network("slingshot")


def test_a_file_of_bench(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    write_results(results(ideal("all_reduce", 4)), path)
    network = open_network(str(path))
    assert isinstance(network, MeasuredNetwork)
    assert network.ranks_per_node == 4
    assert network.about == ("measured: gloo through torch, 4 ranks on 1 host, 2030-01-02",)
