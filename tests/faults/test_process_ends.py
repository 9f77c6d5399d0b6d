"""What is said of a process that ended without a result, and of one that says it has no memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vbpipe.processes import describe_exit, out_of_memory

LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29)); "

# How Python, numpy, C++, torch, ONNX Runtime, the kernel and the loader of libraries put it.
SAYINGS = [
    "MemoryError: ",
    "_ArrayMemoryError: Unable to allocate 64.0 MiB for an array",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:116] . DefaultCPUAllocator: can't allocate memory",
    "EngineError: ONNX Runtime failed: bad allocation",
    "EngineError: ONNX Runtime failed: Failed to allocate memory for requested buffer of size 4096",
    "OSError: [Errno 12] Cannot allocate memory",
    "ImportError: libtorch_cpu.so: failed to map segment from shared object",
]


@pytest.mark.parametrize("said", SAYINGS)
def test_whatever_says_that_there_is_no_memory_is_understood_and_the_limit_named(said: str) -> None:
    assert out_of_memory(said, 512) == "It ran out of memory: it was allowed 512 MiB."
    assert out_of_memory(said, None) == "It ran out of memory."
    assert "It ran out of memory: it was allowed 512 MiB." in describe_exit(-6, 512, said)


@pytest.mark.parametrize("said", ["ValueError: bad shape", "Fatal Python error: Segmentation fault", "", "remember me"])
def test_other_words_are_no_sign_of_memory(said: str) -> None:
    assert out_of_memory(said, 512) == ""


def test_an_end_without_words_names_the_limit_only_where_an_allocation_can_end_like_this() -> None:
    assert describe_exit(0, 512) == "its process ended with exit code 0 and no result."
    assert describe_exit(-11) == "its process was ended by SIGSEGV."
    assert "allowed 512 MiB" in describe_exit(-11, 512)
    assert describe_exit(-15, 512) == "its process was ended by SIGTERM."
    assert describe_exit(-64) == "its process was ended by SIGRTMAX."
    assert describe_exit(-99) == "its process was ended by signal 99."


def test_a_kill_as_the_kernel_does_it_hints_at_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], capture_output=True
    )
    assert describe_exit(done.returncode) == "its process was ended by SIGKILL. The machine may be out of memory."


def test_a_process_that_meets_its_limit_is_said_to_be_out_of_memory() -> None:
    code = LIMITED + "held = [bytearray(2**26) for _ in range(64)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert describe_exit(done.returncode, 512, done.stderr).endswith("It ran out of memory: it was allowed 512 MiB.")
