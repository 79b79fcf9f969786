"""What /proc and /sys say about a host, from folders that have their form."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from waiting_threads import waiting, waiting_for_a_file

from commtrace.process_setup import processor_limits
from commtrace.process_setup.devices import read_devices
from commtrace.process_setup.network_interfaces import Link, read_interfaces, read_links
from commtrace.process_setup.processor_limits import core_list, read_limits, read_processors
from commtrace.process_setup.setup_reader import SetupReader, library_facts
from commtrace.process_setup.system_files import waits_for_storage


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_limits_of_version_2_are_the_lowest_of_all_parents(tmp_path: Path) -> None:
    groups, membership = tmp_path / "cgroup", tmp_path / "membership"
    write(groups / "job", cpu_DOT_max="250000 100000", memory_DOT_max="max")
    write(groups / "job/task", cpu_DOT_max="max 100000", memory_DOT_max="8589934592")
    membership.write_text("0::/job/task\n")
    assert read_limits(str(groups), str(membership)) == {"cpus": 2.5, "memory_bytes": 8 << 30}


def test_limits_of_version_1(tmp_path: Path) -> None:
    groups, membership = tmp_path / "cgroup", tmp_path / "membership"
    write(groups / "cpu,cpuacct/job", cpu_DOT_cfs_quota_us="400000", cpu_DOT_cfs_period_us="100000")
    write(groups / "cpu,cpuacct", cpu_DOT_cfs_quota_us="-1", cpu_DOT_cfs_period_us="100000")
    write(groups / "memory", memory_DOT_limit_in_bytes="9223372036854771712")
    write(groups / "memory/job", memory_DOT_limit_in_bytes="1073741824")
    membership.write_text("5:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/x\n")
    assert read_limits(str(groups), str(membership)) == {"cpus": 4.0, "memory_bytes": 1 << 30}


@pytest.mark.parametrize(("limits", "cores"), [({}, 8), ({"cpus": 2.5}, 3), ({"cpus": 0.1}, 1), ({"cpus": 64.0}, 8)])
def test_a_part_of_a_host_has_fewer_usable_cores(
    limits: dict[str, float], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_limits, "read_limits", lambda: limits)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)}, raising=False)
    assert processor_limits.usable_cores() == cores


@pytest.mark.parametrize("text", ["", "garbage\n", "0::\n", "1:cpu:/a\n2:memory:/../..\n"])
def test_limits_that_are_not_set_are_missing(tmp_path: Path, text: str) -> None:
    membership = tmp_path / "membership"
    membership.write_text(text)
    assert read_limits(str(tmp_path / "none"), str(membership)) == {}


def test_interfaces(tmp_path: Path) -> None:
    write(tmp_path / "ens1", address="02:00:00:00:00:01", speed="100000", device__vendor="0x15b3")
    write(tmp_path / "ens2", address="02:00:00:00:00:02", speed="-1", device__vendor="0x15b3")
    write(tmp_path / "bond7", address="02:00:00:00:00:03", speed="50000", bonding__mode="802.3ad 4")
    write(tmp_path / "br-4f1a", address="02:00:00:00:00:04", bridge__bridge_id="8000")
    write(tmp_path / "veth3a9f", address="02:00:00:00:00:05", speed="10000")
    write(tmp_path / "eth0", address="02:00:00:00:00:06", speed="400000", device__vendor="0x15b3")
    links = {
        "lo": Link(True, 65536, "00:00:00:00:00:00", "127.0.0.1"),
        "ens1": Link(True, 9000, "02:00:00:00:00:01", "10.0.0.1"),
        "ens2": Link(False, 1500, "02:00:00:00:00:02", ""),
        "bond7": Link(True, 1500, "02:00:00:00:00:03", ""),
        "br-4f1a": Link(True, 1500, "02:00:00:00:00:04", "172.17.0.1"),
        "veth3a9f": Link(True, 1500, "02:00:00:00:00:05", ""),
        "eth0": Link(True, 1500, "02:00:00:00:00:77", "10.1.0.1"),  # that of /sys is in another namespace
    }
    assert read_interfaces(links, str(tmp_path)) == [
        {"name": "bond7", "state": "up", "speed": 50000, "mtu": 1500},
        {"name": "ens1", "state": "up", "speed": 100000, "mtu": 9000},
        {"name": "ens2", "state": "down", "mtu": 1500},
        {"name": "eth0", "state": "up", "mtu": 1500},
        {"name": "lo", "state": "up", "mtu": 65536},
    ]


def test_the_loopback_interface_of_this_process() -> None:
    link = read_links()["lo"]
    assert (link.hardware, link.address) == ("00:00:00:00:00:00", "127.0.0.1")
    assert link.mtu > 0


def test_devices(tmp_path: Path) -> None:
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    for address in ("0000:3b:00.0", "0000:5e:00.0"):
        write(gpus / address, information="Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 120")
    write(tmp_path / "sys/bus/pci/devices/0000:3b:00.0", numa_node="0")
    write(tmp_path / "sys/bus/pci/devices/0000:5e:00.0", numa_node="-1")
    write(tmp_path / "sys/module/nvidia", version="550.54.15")
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0", properties="cpu_cores_count 64\ngfx_target_version 0")
    write(nodes / "1", properties="simd_count 304\ngfx_target_version 90402")
    port = {"ports__1__state": "4: ACTIVE", "ports__1__rate": "400 Gb/sec (4X NDR)", "device__numa_node": "1"}
    write(tmp_path / "sys/class/infiniband/mlx5_0", ports__1__link_layer="InfiniBand", **port)
    h100, link = "NVIDIA H100 80GB HBM3", {"rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    assert read_devices(str(tmp_path)) == {
        "gpus": [{"model": h100, "numa_node": 0}, {"model": h100}, {"model": "AMD gfx942"}],
        "drivers": {"nvidia": "550.54.15"},
        "rdma_ports": [{"name": "mlx5_0:1", "state": "ACTIVE", **link, "numa_node": 1}],
    }
    assert read_devices(str(tmp_path / "none")) == {}


def test_this_process() -> None:
    assert core_list()
    assert read_processors()["memory_nodes"]


def test_a_row_is_repeated_only_if_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SetupReader()
    assert reader.changed_row() is not None
    assert reader.changed_row() is None
    monkeypatch.setitem(library_facts, "a library", lambda: {"threads": 3})
    row = reader.changed_row()
    assert row is not None
    assert row["threads"] == 3


def test_what_cannot_be_read_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library_facts, "a library", lambda: {"threads": 1 // 0})
    monkeypatch.setattr("commtrace.process_setup.setup_reader.read_limits", lambda: 1 // 0)
    row = SetupReader().changed_row()
    assert row is not None
    assert not {"threads", "limits"} & {*row}


def test_a_thread_that_waits_for_a_file() -> None:
    with waiting_for_a_file() as thread:
        assert waits_for_storage(f"/proc/self/task/{thread}")


def test_a_thread_that_waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    with waiting(lock.acquire, lock.release) as thread:
        assert not waits_for_storage(f"/proc/self/task/{thread}")


def test_a_thread_that_runs_or_has_ended() -> None:
    assert not waits_for_storage(f"/proc/self/task/{threading.get_native_id()}")
    assert not waits_for_storage("/proc/self/task/0")
