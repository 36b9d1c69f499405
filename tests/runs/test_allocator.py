"""Freed memory is kept: seen by what a process still holds after it freed four blocks of 20 MB."""

import platform
import subprocess
import sys

import pytest

HELD = """
import resource
from pathlib import Path

import torch
from coterie.runs.allocator import keep_freed_memory

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6

if {kept}:
    keep_freed_memory()
before = held()
[torch.ones(5_000_000) for _ in range(4)]
print(held() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's allocator that is told")
def test_blocks_that_were_freed_are_kept() -> None:
    megabytes = {}
    for kept in (False, True):
        done = subprocess.run([sys.executable, "-c", HELD.format(kept=kept)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        megabytes[kept] = float(done.stdout)
    assert megabytes[False] < 30
    assert megabytes[True] > 70
