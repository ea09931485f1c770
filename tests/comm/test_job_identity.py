"""A job knows its own ranks: what others write into its store is ignored, and ranks of two jobs do not compute."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.comm.test_job_store import free_port, started
from tests.reliability.crew import Crew, Link, Raised, caught, group_of, together
from tpkernels import config
from tpkernels.comm.groups import resolve
from tpkernels.comm.job_identity import Foreign, JobIdentity
from tpkernels.launching import local_ranks
from tpkernels.testing.spawn import fork_server

SECRET = secrets.token_hex(16)
OTHER = secrets.token_hex(16)
WITHIN_S = 60.0


# ---------------------------------------------------------------- the code


@pytest.mark.cpu
def test_a_record_counts_in_its_place_alone_and_without_a_secret_as_it_stands() -> None:
    seal = JobIdentity("job", SECRET.encode()).seal("group")
    stored = seal.close("key", "text").encode()
    assert seal.open("key", stored) == "text"
    forged = {
        "another key": (seal, "other", stored),
        "another group": (JobIdentity("job", SECRET.encode()).seal("other"), "key", stored),
        "another secret": (JobIdentity("job", OTHER.encode()).seal("group"), "key", stored),
        "another text": (seal, "key", stored + b"!"),
        "a part of the key in the text": (seal, "ke", stored.replace(b":text", b":ytext")),
        "no code": (seal, "key", b"text"),
        "no text": (seal, "key", b"\xff\xfe"),
        "nothing": (seal, "key", b""),
    }
    for what, (by, key, found) in forged.items():
        with pytest.raises(Foreign):
            pytest.fail(f"{what}: {by.open(key, found)!r}")
    assert JobIdentity("job").seal("group").close("key", "text") == "text"


@pytest.mark.cpu
def test_the_secret_is_in_no_text() -> None:
    job = JobIdentity("job", SECRET.encode())
    assert SECRET not in f"{job!r} {job} {job.seal('group')!r}"


# ---------------------------------------------------------------- where it comes from


@pytest.mark.cpu
def test_the_secret_comes_from_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    environ = {config.JOB_SECRET_FILE: str(file), config.JOB_SECRET: OTHER}
    for mode in (0o640, 0o604, 0o620, 0o601):
        file.chmod(mode)
        with pytest.raises(ValueError, match=rf"{config.JOB_SECRET_FILE}.*mode {mode:04o}: chmod 600") as raised:
            config.job_secret(environ)
        assert SECRET not in str(raised.value)
    file.chmod(0o600)
    assert config.job_secret(environ) == SECRET.encode()
    assert config.job_secret({config.JOB_SECRET: OTHER}) == OTHER.encode()
    assert config.job_secret({config.JOB_SECRET: "", config.JOB_SECRET_FILE: ""}) is None


@pytest.mark.cpu
def test_a_file_without_a_secret_is_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ValueError, match=config.JOB_SECRET_FILE) as raised:
            config.job_secret({config.JOB_SECRET_FILE: str(path)})
        return str(raised.value)

    assert "cannot be read: No such file" in refusal(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "must be a regular file" in refusal(tmp_path / "pipe")
    assert "must be a regular file" in refusal(tmp_path)
    for text in ("", "short", "x" * 5000):
        (tmp_path / "file").write_text(text)
        (tmp_path / "file").chmod(0o600)
        assert "must have 16 to 4096 characters" in refusal(tmp_path / "file")
    with pytest.raises(ValueError, match=f"{config.JOB_SECRET} must have 16"):
        config.job_secret({config.JOB_SECRET: "short"})


@pytest.mark.cpu
def test_launchers_name_their_jobs() -> None:
    assert config.job_name({}) is None
    assert config.job_name({"TORCHELASTIC_RUN_ID": "none"}) is None
    assert config.job_name({"TORCHELASTIC_RUN_ID": "17"}) == "torchrun's run 17"
    slurm = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert config.job_name(slurm | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}) == "Slurm's job 5.0"
    assert config.job_name({"RANK": "3", "WORLD_SIZE": "2"}) is None  # tpk.init says what is wrong with it


# ---------------------------------------------------------------- a stranger in the store


def _keep_on(link: Link, secret: str | None) -> tuple[Raised | None, list[float], list[str]]:
    """Calls of new kinds while a stranger writes; what they raise and return, and what the log says."""
    if secret is not None:
        os.environ[config.JOB_SECRET] = secret
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tpkernels").addHandler(handler)
    group = group_of(timeout=10.0)
    tpk.all_reduce(torch.ones(2), group, implementation="unfused")
    link.say("met", resolve(group).key)
    link.hear(WITHIN_S)
    sums: list[float] = []

    def calls() -> None:
        for number in range(3):
            if link.rank == number % link.size:
                time.sleep(1.2)  # the others' monitors look around
            y = tpk.all_reduce(torch.full((3 + number,), link.rank + 1.0), group, implementation="unfused")
            sums.append(float(y[0]))

    raised, _ = caught(calls)
    return raised, sums, log


def _break_in(crew: Crew) -> None:
    """What a process of any user of this host can do, who finds the port of the store and lists its keys."""
    key = str(crew.expect("met", WITHIN_S)[0].value)
    intruder: Any = dist.TCPStore("127.0.0.1", crew._store.port, is_master=False)  # type: ignore[attr-defined]
    keys = intruder.list_keys()
    roots = {name.partition(key)[0] for name in keys if key in name} | {
        name.partition("tpkernels/meeting")[0] for name in keys if "tpkernels/meeting/0" in name
    }
    failed = {"kind": "GroupMismatch", "message": "forged", "ranks": [0]}
    for root in roots:
        for rank in range(2):
            note = {"who": json.dumps({"host": "x", "pid": 1, "started": 1}), "visit": 1, "failed": failed}
            intruder.set(f"{root}tpkernels/meeting/{rank}", json.dumps(note))
            intruder.set(f"{root}{key}/beat/{rank}", "[" * 100_000)
            intruder.set(f"{root}{key}/order/{rank}", b"\xff\xfe")
            for call in range(2, 8):
                intruder.set(f"{root}{key}/call/{call}/{rank}", '{"signature": "forged"')
        intruder.set(f"{root}tpkernels/meeting/alarm", "")
        for call in range(2, 8):
            intruder.set(f"{root}{key}/call/{call}/all", "")
            intruder.add(f"{root}{key}/call/{call}/count", 1)


@pytest.mark.gloo
def test_what_a_stranger_writes_into_the_store_is_ignored_and_reported() -> None:
    with Crew(2, _keep_on, SECRET, linger=True) as crew:
        _break_in(crew)
        for rank in range(2):
            crew.tell(rank, "go on")
        for said in crew.expect("returned", WITHIN_S):
            raised, sums, log = said.value
            assert raised is None and sums == [3.0] * 3
            assert any("a foreign record in the store was ignored" in line for line in log), log
            assert not any(SECRET in line for line in log)
        stored = " ".join(str(crew._store.get(key)) for key in crew._store.list_keys() if "count" not in key)
        assert SECRET not in stored and "hmac1:" in stored


@pytest.mark.gloo
def test_garbage_in_the_store_of_a_job_without_a_secret_ends_nothing() -> None:
    with Crew(2, _keep_on, None, linger=True) as crew:
        key = str(crew.expect("met", WITHIN_S)[0].value)
        for name in crew._store.list_keys():
            for rank in range(2):
                if "tpkernels/meeting/0" in name:
                    crew._store.set(
                        name.replace("meeting/0", f"meeting/{rank}"), '{"who": 1, "visit": [], "failed": 2}'
                    )
                    crew._store.set(name.replace("meeting/0", "meeting/alarm"), "")
                if f"{key}/beat/0" in name:
                    for odd, text in (("beat", "\0"), ("order", "[" * 100_000), ("call/2", "{}"), ("call/3", "[1]")):
                        crew._store.set(name.replace("beat/0", f"{odd}/{rank}"), text)
        for rank in range(2):
            crew.tell(rank, "go on")
        for said in crew.expect("returned", WITHIN_S):
            raised, sums, log = said.value
            assert raised is None and sums == [3.0] * 3
            assert any("a foreign record in the store was ignored" in line for line in log), log


# ---------------------------------------------------------------- two jobs


def _met_strangers(link: Link, jobs: list[dict[str, str]]) -> Raised | None:
    os.environ.update(jobs[link.rank])
    group = group_of(timeout=10.0)
    return caught(lambda: tpk.all_reduce(torch.ones(2), group))[0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "jobs",
    [
        [{config.JOB_SECRET: SECRET}, {config.JOB_SECRET: OTHER}],
        [{config.JOB_SECRET: SECRET}, {}],
        [{"TORCHELASTIC_RUN_ID": "one"}, {"TORCHELASTIC_RUN_ID": "two"}],
    ],
)
def test_ranks_of_two_jobs_that_have_met_compute_nothing(jobs: list[dict[str, str]]) -> None:
    for rank, raised in enumerate(together(2, _met_strangers, jobs, within=WITHIN_S)):
        assert raised is not None and raised.kind == "GroupMismatch", raised
        assert raised.ranks == (1 - rank,) and "Two jobs may have come to one port" in raised.text
        assert SECRET not in raised.text and OTHER not in raised.text


def _join(connection: Any, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    _await(environ["AFTER"], int(environ["MASTER_PORT"]))

    def calls() -> float:
        mesh = tpk.init(timeout=20.0)
        for _ in range(int(environ["CALLS"])):  # in step, as a training run is
            y = tpk.all_reduce(torch.ones(2), mesh["tp"])
            time.sleep(0.01)
        return float(y[0])

    found: list[float] = []
    raised, _ = caught(lambda: found.append(calls()))
    connection.send((raised.kind, raised.text) if raised is not None else ("ok", str(found)))


def _await(what: str, port: int) -> None:
    """That the first job's rank 0 serves its store, or that somebody has taken the place of its rank 1."""
    deadline = time.monotonic() + WITHIN_S
    while what and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            break
        time.sleep(0.01)
    if what == "place":
        store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        while not store.check(["tpkernels/job/1"]) and time.monotonic() < deadline:
            time.sleep(0.01)


def _two_jobs(first: dict[str, str], second: dict[str, str], after: tuple[str, ...]) -> list[tuple[str, str]]:
    """What two jobs of two ranks say that came to one port, by job and rank; ``after``: what each waits for."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CALLS": "400"}
    environs = [
        common | job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "AFTER": after[2 * number + rank]}
        for number, job in enumerate((first, second))
        for rank in range(2)
    ]
    return started(environs, _join)  # type: ignore[return-value]


@pytest.mark.gloo
def test_a_job_with_a_name_does_not_notice_another_one_at_its_port() -> None:
    named = [{"TORCHELASTIC_RUN_ID": name} for name in ("one", "two")]
    found = _two_jobs(named[0], named[1], after=("", "port", "port", "port"))
    assert [kind for kind, _ in found] == ["ok", "ok", "DistNetworkError", "ValueError"], found
    assert "met another job" in found[3][1] and "export MASTER_PORT" in found[3][1]


@pytest.mark.gloo
def test_ranks_of_two_jobs_without_names_that_have_met_hear_of_it() -> None:
    """The first job's rank 0 serves the store, and the other one's rank 1 comes before its own."""
    found = _two_jobs({}, {}, after=("", "place", "port", "port"))
    kinds = [kind for kind, _ in found]
    assert kinds[:3] == ["GroupMismatch", "ValueError", "DistNetworkError"], found
    assert kinds[3] in ("GroupMismatch", "PeerLost"), found  # rank 0 takes the store along when it ends
    assert "ranks of two jobs" in found[0][1] and "has come already" in found[1][1]


# ---------------------------------------------------------------- launch


def _look_for_the_secret() -> tuple[str, bool, bool]:
    tpk.all_reduce(torch.ones(2), tpk.init(timeout=30)["tp"])
    secret = os.environ[config.JOB_SECRET]
    store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    root = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
    texts = [root.get(key) for key in root.list_keys() if "tpkernels/" in key]
    store.set("done", "")
    in_command = secret.encode() in Path("/proc/self/cmdline").read_bytes()
    return secret, in_command, any(secret.encode() in text for text in texts)


@pytest.mark.gloo
def test_launch_gives_its_ranks_a_secret_of_their_own_that_no_command_line_and_no_store_has(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    if not full:
        monkeypatch.setattr(local_ranks, "new_interpreters", fork_server)  # in milliseconds
    first, second = tpk.launch(_look_for_the_secret, 2)
    assert first == second and len(first[0]) == 64 and first[1:] == (False, False)
    assert tpk.launch(_secret, 1) != [first[0]]


def _secret() -> str:
    return os.environ[config.JOB_SECRET]
