"""A worker does what the program would have done, in a process of its own for each, and ends with the node."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest

from coterie.sites import worker

DOES = """
import json, os, signal, sys
from pathlib import Path
from coterie.sites import worker

def main():
    print(json.dumps([sys.argv[1:], os.environ["WHO"], os.getcwd(), os.getpid(), signal.getsignal(signal.SIGINT) is signal.default_int_handler]))
    print("to err", file=sys.stderr)
    sys.exit(3)

worker.serve(Path(sys.argv[1]), main, int(sys.argv[2]))
"""  # noqa: E501


@pytest.fixture
def bin(tmp_path: Path) -> Path:
    folder = tmp_path / ("a long name " * 12) / "bin"  # longer than the path of a socket may be
    folder.mkdir(parents=True)
    for name, text in worker.programs().items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    return folder


def call(bin: Path, *words: str, who: str) -> subprocess.CompletedProcess[str]:
    how = {"env": {**os.environ, "WHO": who}, "cwd": bin.parent.parent, "capture_output": True, "text": True}
    return subprocess.run([bin / "flwr-clientapp", *words], **how, timeout=300)


def interrupted(bin: Path) -> None:
    """A program that is ended while it says what it wants."""
    with socket.socket(socket.AF_UNIX) as caller, chdir(bin):
        caller.connect(worker.SOCKET)
        socket.send_fds(caller, [(100).to_bytes(8, "little")], [0, 1, 2])
        caller.sendall(b"[[")


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_a_worker_forks_with_the_callers_arguments_environment_folder_and_output(bin: Path):
    node = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", DOES, str(bin), str(node.pid)])
    while not (bin / worker.SOCKET).exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert (bin / worker.SOCKET).stat().st_mode & 0o077 == 0
    seen = []
    for who in ("one", "two"):
        done = call(bin, "--token", who, who=who)
        arguments, name, folder, pid, interruptible = json.loads(done.stdout)
        assert (arguments, name, folder, interruptible) == (["--token", who], who, str(bin.parent.parent), True)
        assert done.stderr == "to err\n"
        seen.append(pid)
    assert len({*seen, process.pid}) == 3
    interrupted(bin)
    end = time.monotonic() + 300
    while children(process.pid):
        assert time.monotonic() < end
        time.sleep(0.05)
    (bin / worker.SOCKET).unlink()
    (bin / worker.SOCKET).touch()  # another node's, started since
    node.communicate(b"\n")
    assert process.wait(300) == 0
    assert (bin / worker.SOCKET).exists()


@pytest.mark.full
def test_without_a_worker_the_program_does_it_itself(bin: Path):
    done = call(bin, "--help", who="")
    assert "--runtime-api-address" in done.stdout


def test_whatever_a_node_is_told_to_start_is_the_sites_own_and_only_one_of_them_does_anything(bin: Path):
    """A server that calls its run an agent's would otherwise have the code it sent run."""
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
    from flwr.supercore.superexec.plugin import AutoExecPlugin

    started = {TASK_TYPE_TO_COMMAND[TaskType(kind)] for kind in AutoExecPlugin.supported_task_types}
    path = f"{bin}{os.pathsep}{Path(sys.executable).parent}"
    for name in started:
        assert shutil.which(name, path=path) == str(bin / name)
        if name != "flwr-clientapp":
            done = subprocess.run(
                [name, "--token", "x"], env={"PATH": path}, capture_output=True, text=True, timeout=300
            )
            assert (done.returncode, done.stderr) == (1, "this site runs no code that it was sent\n")
