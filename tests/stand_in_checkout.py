"""A copy of the checkout's top level whose `.venv/bin/python` is a stand-in: for the tests of `./quickstart`."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]

# Says the torch of `torch.txt`; logs every call of pip, writes its report, and sleeps while `slow` exists.
STAND_IN = """#!/bin/sh
here=$(dirname "$0")
case "$1 $2" in
    "-c "*) exit 0 ;;
    "-I -c") cat "$here/torch.txt"; exit 0 ;;
esac
echo "$@" >> {log}
case "$*" in
    *--report*) cp "$here/resolution.json" "$here/../quickstart-resolution.json" ;;
    *torch==2.13.0|*torch\\>=2.11)
        while [ -e "$here/slow" ]; do sleep 0.02; done
        echo "['2.13.0+cpu']" > "$here/torch.txt" ;;
    *build_ext*)
        echo "$PATH" > "$here/path.txt"
        while [ -e "$here/building" ]; do sleep 0.02; done
        echo "quickstart-build: setup.py build_ext has ended" >> {log} ;;
esac
case "$*" in *"{fails}"*) exit 1 ;; esac
"""


def _heeds_interrupts() -> None:
    """A shell's background job ignores Ctrl-C, and so would what these tests start from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Checkout:
    """A copy of the checkout's top level in `folder`, with a stand-in environment where asked for."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        folder.mkdir()
        for name in ("quickstart", "pyproject.toml", "setup.py"):
            shutil.copy2(ROOT / name, folder / name)
        self.log = folder / "calls.log"
        self.venv = folder / ".venv"
        self.bin = self.venv / "bin"

    def make_environment(self, *, torch: str | None = None, ours: bool = True, fails: str = "nothing") -> None:
        self.bin.mkdir(parents=True)
        self.bin.joinpath("python").write_text(STAND_IN.format(log=self.log, fails=fails))
        self.bin.joinpath("tpkernels").write_text(f'#!/bin/sh\necho "ran in $PWD: $@" >> {self.log}\nexit 7\n')
        for program in ("python", "tpkernels"):
            self.bin.joinpath(program).chmod(0o755)
        self.bin.joinpath("torch.txt").write_text(f"{[torch] if torch else []}\n")
        self.resolve_to("torch", "sympy")
        if ours:
            self.write_record(running=None)

    def resolve_to(self, *packages: str) -> None:
        report = {"install": [{"metadata": {"name": package}} for package in packages]}
        self.bin.joinpath("resolution.json").write_text(json.dumps(report))

    def write_record(self, *, ours: bool = True, running: str | None) -> None:
        record = {"ours": ours, "running": running, "done": {}}
        self.venv.joinpath("quickstart.json").write_text(json.dumps(record))

    def record(self) -> dict[str, object]:
        return json.loads(self.venv.joinpath("quickstart.json").read_text())

    def write_core_record(self, **fields: object) -> None:
        self.root.joinpath("tpkernels").mkdir(exist_ok=True)
        self.root.joinpath("tpkernels", "_native_build.json").write_text(json.dumps(fields))

    def calls(self) -> list[str]:
        """What was called, but for the build that runs beside it."""
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        return [call for call in calls if "quickstart-build" not in call]

    def builds(self) -> list[str]:
        return [call for call in self.log.read_text().splitlines() if "setup.py build_ext" in call]

    def start(self, *args: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.root / "quickstart"), *args],
            cwd=cwd or self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            preexec_fn=_heeds_interrupts,
        )  # fmt: skip

    def run(self, *args: str, cwd: Path | None = None) -> tuple[int, str, list[str]]:
        """Its exit code, what it printed, and what it called."""
        before = len(self.calls())
        process = self.start(*args, cwd=cwd)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output, self.calls()[before:]

    def load(self) -> ModuleType:
        """The script as a module of its own, rooted in this checkout."""
        loader = SourceFileLoader(f"quickstart_in_{self.root.name}", str(self.root / "quickstart"))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
