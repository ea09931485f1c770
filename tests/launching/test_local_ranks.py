"""Real local ranks: results, environment, and every way in which a rank can fail without hanging its parent."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpkernels import config, launchers
from tpkernels.launching import local_ranks as launch_module
from tpkernels.launching.local_ranks import LaunchError, RankTeam, launch, pack_call
from tpkernels.launching.rank_process import RankDied, RankFailure, RankRaised, RankStuck

pytestmark = pytest.mark.gloo

REPOSITORY = Path(__file__).parents[2]


def join_group() -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    return dist.get_rank()


def describe_rank(word: str) -> tuple[object, ...]:
    total = torch.tensor([join_group() + 1.0])
    dist.all_reduce(total)
    return word, config.job_environment(), total.item()


def cores_and_threads() -> tuple[set[int], int]:
    return os.sched_getaffinity(0), torch.get_num_threads()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def rank_zero_fails(how: str) -> str:
    rank = join_group()
    if rank == 0:
        if how == "raises":
            raise FileNotFoundError("no such weights")
        if how == "segfaults":
            ctypes.string_at(0)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        if how == "calls sys.exit":
            sys.exit(4)
    dist.all_reduce(torch.ones(3))
    return "unreachable"


class DoesNotTravel(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_what_does_not_pickle() -> None:
    raise DoesNotTravel(1, 2)


def rank_zero_raises_while_others_sleep() -> None:
    if config.job_environment().rank == 0:  # type: ignore[union-attr]
        raise ValueError("boom")
    time.sleep(60)


def meet_in_the_store_after_rank_zero_is_dead() -> int:
    rank = config.job_environment().rank  # type: ignore[union-attr]
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
    store.set(f"pid{rank}", str(os.getpid()))
    pids = [int(store.get(f"pid{r}")) for r in range(3)]
    store.add("read", 1)
    if rank == 0:
        while store.add("read", 0) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    while is_running(pids[0]):
        time.sleep(0.01)
    store.set(f"alive{rank}", "yes")
    store.wait([f"alive{3 - rank}"], timedelta(seconds=50))
    return rank


def leave_with_a_code() -> None:
    atexit.register(os._exit, 5)


def leave_a_thread_running() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_results_come_by_rank_from_ranks_that_reach_each_other(forked: None) -> None:
    results = launch(describe_rank, 2, "hello")
    for rank, (word, place, total) in enumerate(results):
        assert word == "hello"
        assert place == launchers.Job(rank, rank, 2, 2)
        assert total == 1 + 2


@pytest.mark.usefixtures("forked")
def test_the_parent_environment_stays_as_it_was() -> None:
    before = dict(os.environ)
    launch(cores_and_threads, 1)
    assert dict(os.environ) == before


@pytest.mark.usefixtures("forked")
def test_large_arguments_and_results_arrive_whole() -> None:
    x = torch.arange(4_000_000, dtype=torch.float64)
    (doubled,) = launch(double, 1, x)
    assert torch.equal(doubled, 2 * x)


@pytest.mark.usefixtures("forked")
def test_ranks_are_pinned_to_cores_of_their_own_where_there_are_enough() -> None:
    cores = os.sched_getaffinity(0)
    (alone,) = launch(cores_and_threads, 1)
    assert alone == (cores, len(cores))
    if len(cores) >= 2:
        (first, first_threads), (second, second_threads) = launch(cores_and_threads, 2)
        assert first and second and not first & second
        assert first_threads == second_threads == len(cores) // 2
        assert [affinity for affinity, _ in launch(cores_and_threads, 2, pin=False)] == [cores, cores]


@pytest.mark.usefixtures("forked")
def test_more_ranks_than_cores_share_them_with_one_thread_each() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) > 4:
        pytest.skip(f"{len(cores)} cores would need as many ranks")
    assert launch(cores_and_threads, len(cores) + 1) == [(cores, 1)] * (len(cores) + 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("how", "said", "cause"),
    [
        ("raises", "rank 0 raised FileNotFoundError: no such weights", FileNotFoundError),
        ("segfaults", "rank 0 died by SIGSEGV (signal 11) before it returned", RankDied),
        ("is killed", "rank 0 died by SIGKILL (signal 9) before it returned", RankDied),
        ("exits", "rank 0 exited with code 3 before it returned", RankDied),
        ("calls sys.exit", "rank 0 raised SystemExit: 4", SystemExit),
    ],
)
def test_a_failing_rank_is_named_and_the_others_report_their_own_errors(
    request: pytest.FixtureRequest, how: str, said: str, cause: type[BaseException]
) -> None:
    if cause is not RankDied:  # a fork server sees a death later than the peers feel it
        request.getfixturevalue("forked")
    size = 3 if cause is not RankDied else 2  # interpreters that import torch
    with pytest.raises(LaunchError) as caught:
        launch(rank_zero_fails, size, how)
    message = str(caught.value)
    assert message.startswith(f"launch(rank_zero_fails, nproc={size}): {said}; rank ")
    assert type(caught.value.__cause__) is cause
    assert caught.value.failures[0].rank == 0
    assert sorted(failure.rank for failure in caught.value.failures) == list(range(size))
    assert all(f"rank {rank} raised RuntimeError" in message for rank in range(1, size))
    if how in ("raises", "segfaults"):
        assert 'test_local_ranks.py", line' in caught.value.failures[0].details
        assert "in rank_zero_fails" in caught.value.failures[0].details


@pytest.mark.usefixtures("forked")
def test_an_exception_that_does_not_pickle_keeps_its_name_and_traceback() -> None:
    with pytest.raises(LaunchError, match="rank 0 raised DoesNotTravel: 1 and 2") as caught:
        launch(raise_what_does_not_pickle, 1)
    assert type(caught.value.__cause__) is RankRaised
    assert "in raise_what_does_not_pickle" in str(caught.value)


@pytest.mark.usefixtures("forked")
def test_ranks_that_do_not_notice_a_failure_are_killed_after_the_grace_period() -> None:
    with pytest.raises(LaunchError) as caught:
        launch(rank_zero_raises_while_others_sleep, 2, grace=2)
    message = str(caught.value)
    assert "rank 0 raised ValueError: boom; rank 1 was still running 2 s after the first failure" in message
    assert "in rank_zero_raises_while_others_sleep" in caught.value.failures[1].details  # where it was
    assert isinstance(caught.value.failures[1].exception, RankStuck)


def test_a_timeout_covers_the_start_of_the_ranks() -> None:
    with pytest.raises(LaunchError, match=r"starting 2 ranks .* rank 0 was still running at the deadline"):
        launch(time.sleep, 2, 500, timeout=0.2)


@pytest.mark.usefixtures("forked")
def test_a_deadline_shows_where_each_rank_is() -> None:
    with RankTeam(2, pin=False, exit_on_failure=True) as team:
        calls = [pack_call(time.sleep, (500,))] * 2
        outcome = team.call(calls, deadline=time.monotonic() + 0.5, grace=0, grace_after_raise=True)
    assert not outcome.values
    assert [failure.rank for failure in outcome.failures] == [0, 1]
    assert all(isinstance(failure.exception, RankStuck) for failure in outcome.failures)
    assert all("in _serve" in failure.details for failure in outcome.failures)


@pytest.mark.usefixtures("forked")
def test_the_store_outlives_rank_zero() -> None:
    with pytest.raises(LaunchError) as caught:
        launch(meet_in_the_store_after_rank_zero_is_dead, 3, grace=60)
    assert [failure.rank for failure in caught.value.failures] == [0]


def test_a_rank_that_returns_but_ends_badly_is_reported() -> None:
    with pytest.raises(LaunchError, match="rank 0 exited with code 5 after it had returned"):
        launch(leave_with_a_code, 1)


@pytest.mark.usefixtures("forked")
def test_a_rank_that_returns_but_does_not_exit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "STOP_TIMEOUT_S", 1.0)
    with pytest.raises(LaunchError, match="rank 0 returned, but its process did not exit"):
        launch(leave_a_thread_running, 1)


@pytest.mark.parametrize("nproc", [0, -1, 1.5, True, "2"])
def test_a_wrong_number_of_ranks_is_refused(nproc: object) -> None:
    with pytest.raises(ValueError, match=r"nproc \(.*\) must be an int of at least 1"):
        launch(double, nproc, torch.ones(1))  # type: ignore[arg-type]


def test_what_cannot_be_sent_to_a_rank_is_refused_before_any_starts() -> None:
    with pytest.raises(ValueError, match=r"fn \(.*lambda.*\) and its arguments must pickle"):
        launch(lambda: None, 1)
    with pytest.raises(ValueError, match=r"timeout .* must be positive"):
        launch(double, 1, torch.ones(1), timeout=0)


SCRIPT = """
    import os, sys, time
    from tpkernels.launching.local_ranks import launch

    def work(seconds):
        os.write(1, f"rank pid={os.getpid()}\\n".encode())  # one write, so that lines of two ranks do not mix
        time.sleep(seconds)
        return os.getpid()

    def main():
        print("returned", len(launch(work, int(sys.argv[2]), float(sys.argv[1]))), flush=True)
"""
GUARD = """
    if __name__ == "__main__":
        main()
"""


@contextmanager
def running_script(
    folder: Path, seconds: float, ending: str = GUARD, *, nproc: int = 2
) -> Iterator[subprocess.Popen[str]]:
    script = folder / "job.py"
    script.write_text(textwrap.dedent(SCRIPT + ending))
    process = subprocess.Popen(
        [sys.executable, str(script), str(seconds), str(nproc)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(is_running(pid) for pid in pids):
        time.sleep(0.02)
    assert not [pid for pid in pids if is_running(pid)]


@pytest.mark.full("README's programs do so")
def test_a_script_launches_its_own_functions_and_ranks_print_to_its_output(tmp_path: Path) -> None:
    with running_script(tmp_path, 0) as process:
        out, err = process.communicate(timeout=120)
    assert out.count("rank pid=") == 2 and "returned 2" in out, err


@pytest.mark.slow("5 s of new interpreters")
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    with running_script(tmp_path, 0, ending="\n    main()\n", nproc=1) as process:
        out, err = process.communicate(timeout=120)
    assert "returned" not in out
    assert 'a script that starts ranks needs `if __name__ == "__main__":`' in err


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
@pytest.mark.slow("4 s of new interpreters")
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    with running_script(tmp_path, 300, nproc=1) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline().partition("pid=")[2])]
        assert all(is_running(pid) for pid in pids)
        os.kill(parent.pid, number)  # the parent alone: it must take its ranks along
        parent.wait(20)
        wait_until_gone(pids)
        _, err = parent.communicate(timeout=20)
    assert parent.returncode != 0
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in err


FROM_A_SESSION = """
import tpkernels as tpk
BASE = 40
def answer(more): return BASE + more
for _ in range(2):
    try: print(tpk.launch(answer, 1, 2, timeout=100))
    except ValueError as error: print("refused:", error)
    import sys; sys.modules["cloudpickle"] = None
"""


@pytest.mark.gloo
@pytest.mark.slow("8 s of new interpreters")
def test_a_function_of_an_interactive_session_is_sent_as_it_stands_or_refused_at_once() -> None:
    def run(code: str, *, on_stdin: bool = False) -> str:
        argv = [sys.executable, "-"] if on_stdin else [sys.executable, "-c", code]
        done = subprocess.run(argv, input=code if on_stdin else None, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    pytest.importorskip("cloudpickle", reason="the package cloudpickle is missing: pip install cloudpickle")
    answer, _, without = run(FROM_A_SESSION).partition("\n")
    assert answer == "[42]"
    assert "refused: fn (answer) is defined in a notebook or an interactive session" in without
    assert "%%writefile" in without and "pip install cloudpickle" in without
    assert "was read from <stdin>, which ranks cannot import" in run(FROM_A_SESSION, on_stdin=True)


@pytest.mark.cpu
def test_tracebacks_that_are_alike_are_shown_once_and_the_last_line_is_the_first_failure() -> None:
    stack = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n'
    failures = [
        RankFailure(2, "rank 2 raised KeyError: 7", None, stack + "KeyError: 7"),
        RankFailure(0, "rank 0 raised KeyError: 8", None, stack + "KeyError: 8\n"),
        RankFailure(1, "rank 1 raised ValueError: 9", None, stack + "  File y.py\nValueError: 9"),
    ]
    text = str(LaunchError("launch(f, nproc=3)", failures))
    assert text.count("line 3, in f") == 2 and "--- rank 0 ---" not in text and "--- rank 1 ---" in text
    assert text.splitlines()[0].endswith(
        "rank 2 raised KeyError: 7; rank 0 raised KeyError: 8; rank 1 raised ValueError: 9"
    )
    assert text.splitlines()[-1] == "first failure: rank 2 raised KeyError: 7"
