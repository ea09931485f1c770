"""The network lab: a real rate limit, results and failures by rank, and nothing left behind even after SIGKILL."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpkernels.measure import links, netlab

PAYLOAD_BYTES = 2_500_000


def test_rates_and_delays_are_parsed_and_bad_ones_name_the_value() -> None:
    spec = links.LinkSpec.parse("1gbit", "0.1ms")
    assert spec.rate_bits == 10**9
    assert spec.delay_s == pytest.approx(1e-4)
    assert links.parse_rate("2.5Gbit") == 2_500_000_000
    assert links.parse_rate(" 500mbit") == 500_000_000
    for bad in ("1gb", "fast", "0mbit", "-1gbit", ""):
        with pytest.raises(ValueError, match="rate must look like"):
            links.parse_rate(bad)
    with pytest.raises(ValueError, match=r"delay must look like.*'5'"):
        links.parse_delay("5")


def test_a_lab_of_one_or_nine_hosts_is_refused() -> None:
    for nproc in (1, 9):
        with pytest.raises(ValueError, match=rf"nproc must be 2\.\.8.*{nproc}"):
            netlab.Netlab(nproc)


def test_without_capabilities_the_lab_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "missing_capability", lambda: "needs root (CAP_NET_ADMIN missing)")
    assert netlab.unavailable_reason() == "needs root (CAP_NET_ADMIN missing)"
    with pytest.raises(netlab.NetlabUnavailable, match="needs root"):
        netlab.run_in_netlab(_rank_and_hosts, 2)


def _rank_and_hosts() -> tuple[int, int, list[str], int]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    seen: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, dist.get_rank())
    interfaces = sorted(links.read_counters())
    assert seen == list(range(dist.get_world_size()))
    return dist.get_rank(), dist.get_world_size(), interfaces, torch.get_num_threads()


@pytest.mark.usefixtures("forked")
@pytest.mark.netns
@pytest.mark.slow("3 s of new interpreters")
def test_values_come_back_by_rank_and_every_rank_is_alone_on_its_host(lab_possible: None) -> None:
    results = netlab.run_in_netlab(_rank_and_hosts, 3, timeout=60)
    assert results == [(rank, 3, ["eth0", "lo"], 1) for rank in range(3)]


def _seconds_to_send_one_way() -> float:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    payload = torch.ones(PAYLOAD_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(payload, 1)
        else:
            dist.recv(payload, 0)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return sorted(times)[1]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.netns
@pytest.mark.parametrize("rate", ["100mbit", "400mbit"])
@pytest.mark.slow("4 s of transfers")
def test_the_link_carries_its_rate_and_no_more(lab_possible: None, rate: str) -> None:
    lab = netlab.Netlab(2, rate=rate, sample_interval_s=0.005)
    with lab:
        seconds = min(lab.run(_seconds_to_send_one_way, timeout=60))
    ideal = PAYLOAD_BYTES * 8 / lab.spec.rate_bits
    # The bucket may be full at the start, so one burst passes free; headers and the barrier cost the other way.
    assert seconds > ideal - lab.spec.burst_bytes * 8 / lab.spec.rate_bits
    assert seconds < 1.5 * ideal + 0.02
    samples = lab.samples[0]
    assert samples[-1].tx_bytes - samples[0].tx_bytes > 3 * PAYLOAD_BYTES
    assert samples[-1].rx_bytes < 0.1 * PAYLOAD_BYTES  # rank 0 only sent
    assert all(a.time_ns < b.time_ns and a.tx_bytes <= b.tx_bytes for a, b in itertools.pairwise(samples))


def _round_trip_seconds() -> float:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ball = torch.zeros(1)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for sender in (0, 1):
            if dist.get_rank() == sender:
                dist.send(ball, 1 - sender)
            else:
                dist.recv(ball, sender)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.usefixtures("forked")
@pytest.mark.netns
@pytest.mark.slow("2 s: hosts as network namespaces")
def test_a_delay_is_added_to_every_trip_or_its_absence_is_explained(lab_possible: None) -> None:
    try:
        seconds = netlab.run_in_netlab(_round_trip_seconds, 2, delay="5ms", timeout=60)
    except netlab.NetlabUnavailable as error:
        assert "sch_netem" in str(error)
    else:
        assert all(0.01 <= s < 0.03 for s in seconds)


def _fail_on_rank_one() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


@pytest.mark.usefixtures("forked")
@pytest.mark.netns
@pytest.mark.slow("2 s: hosts as network namespaces")
def test_the_failing_rank_is_named_with_its_traceback(lab_possible: None) -> None:
    with pytest.raises(netlab.NetlabError, match=r"rank 1 failed(.|\n)*_fail_on_rank_one(.|\n)*KeyError: 'the cause'"):
        netlab.run_in_netlab(_fail_on_rank_one, 2, timeout=60)


def _die_on_rank_zero() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.usefixtures("forked")
@pytest.mark.netns
@pytest.mark.slow("2 s: hosts as network namespaces")
def test_a_rank_that_dies_is_named_without_waiting_for_the_others(lab_possible: None) -> None:
    start = time.monotonic()
    with pytest.raises(netlab.NetlabError, match="rank 0 died with exit code -9"):
        netlab.run_in_netlab(_die_on_rank_zero, 2, timeout=60)
    assert time.monotonic() - start < 50


def _hang_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


@pytest.mark.usefixtures("forked")
@pytest.mark.netns
@pytest.mark.slow("2 s: hosts as network namespaces")
def test_a_rank_that_hangs_is_named_when_the_time_is_over(lab_possible: None) -> None:
    with pytest.raises(netlab.NetlabError, match="rank 1 did not report 'done'"):
        netlab.run_in_netlab(_hang_on_rank_one, 2, timeout=2)


def _announce_and_send_forever(folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    payload = torch.ones(100_000, dtype=torch.uint8)
    rank = dist.get_rank()
    Path(folder, f"rank{rank}").write_text(f"{os.getpid()} {os.readlink('/proc/self/ns/net')}")
    while True:
        dist.all_reduce(payload)


# Ranks are forks: how interpreters of ranks end with their parent, tests/launching/test_local_ranks.py shows.
_PARENT = """
import multiprocessing, sys
from tpkernels.launching import local_ranks
from tpkernels.measure.netlab import run_in_netlab
from tests.measure.test_netlab import _announce_and_send_forever
if __name__ == "__main__":
    local_ranks.new_interpreters = lambda: multiprocessing.get_context("fork")
    run_in_netlab(_announce_and_send_forever, 2, sys.argv[1], rate="100mbit")
"""


def _network_namespaces() -> dict[str, int]:
    """Every network namespace that some process is in: {name: one pid}."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[os.readlink(entry / "ns" / "net")] = int(entry.name)
            except OSError:
                continue  # the process ended meanwhile
    return found


def _interfaces_here() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


@pytest.mark.netns
@pytest.mark.slow("3 s of new interpreters")
def test_sigkill_of_the_parent_leaves_no_process_no_namespace_and_no_veth(lab_possible: None, tmp_path: Path) -> None:
    interfaces_before = _interfaces_here()
    named_before = set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 150  # an idle machine needs five
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline and parent.poll() is None:
            time.sleep(0.05)
        time.sleep(0.3)  # in the middle of the traffic
        members = _session_members(parent.pid)
        namespaces = {line.read_text().split()[1] for line in tmp_path.iterdir()}
        here = os.readlink("/proc/self/ns/net")
        namespaces |= {os.readlink(f"/proc/{pid}/ns/net") for pid in members} - {here}
        assert len(members) >= 4, "parent, switch and two ranks"
        assert len(namespaces) == 3, "switch and two hosts"
        assert namespaces <= set(_network_namespaces())
        assert _interfaces_here() == interfaces_before, "the lab must not touch the caller's network"
    finally:
        parent.kill()  # SIGKILL: no handler, no finally of the lab runs
        parent.wait(timeout=10)
    deadline = time.monotonic() + 10
    while _session_members(parent.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _session_members(parent.pid) == []
    assert not namespaces & set(_network_namespaces()), "a namespace survived its last process"
    assert _interfaces_here() == interfaces_before
    assert (set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()) == named_before
