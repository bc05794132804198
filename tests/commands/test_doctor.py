"""`bullet doctor`: a report on any machine, GPU or not, and the fix where something is missing."""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bulletserve.commands import doctor, gpu_report
from bulletserve.core.partition import Partition
from bulletserve.core.plan import Lane
from bulletserve.kernels.cuda import matmul_choice

NOT_YET = "not made yet (the first start takes minutes longer)"
PROC = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"


class Manager:
    """A GPU of 132 SMs with one split."""

    closed = 0

    def __init__(self, index: int) -> None:
        self.index = index

    def describe(self) -> str:
        return "green contexts on 132 SMs\nmore"

    def close(self) -> None:
        Manager.closed += 1


def seen(partition: Partition, lane: Lane, sms: int, *, ok: bool = True, keeps: bool = True) -> SimpleNamespace:
    sms_seen = frozenset(range(sms))
    return SimpleNamespace(partition=partition, lane=lane, sms_seen=sms_seen, graph_keeps_sms=keeps, ok=ok)


def torch_with(cuda: str | None, gpus: int) -> Any:
    card = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0)
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            get_device_properties=lambda index: card,
            mem_get_info=lambda index: (130 * 2**30, 140 * 2**30),
        ),
    )


class Machine:
    """What the report sees of a machine, to be changed by a test."""

    def __init__(self) -> None:
        self.torch: Any = torch_with("13.0", 1)
        self.packages = {
            "triton": "3.6.0",
            "flashinfer-python": "0.6.12",
            "cuda-bindings": "13.0.3",
            "nvidia-ml-py": "13.580.82",
        }
        self.results: list[SimpleNamespace] = []
        self.commands = {"nvcc": "/usr/bin/nvcc", "cc": "/usr/bin/cc"}

    def module(self, name: str) -> ModuleType | SimpleNamespace:
        made = {
            "torch": self.torch,
            "bulletserve.resources.manager": SimpleNamespace(PartitionManager=Manager),
            "bulletserve.resources.probe": SimpleNamespace(probe=lambda manager: self.results),
            "bulletserve.kernels.cuda.matmul_choice": matmul_choice,
        }
        if made.get(name) is None:
            raise ImportError(name)
        return made[name]

    def version(self, package: str) -> str:
        if package not in self.packages:
            raise importlib.metadata.PackageNotFoundError(package)
        return self.packages[package]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """A GPU machine on which all is well."""
    machine = Machine()
    (tmp_path / "version").write_text(PROC)
    monkeypatch.setattr(gpu_report, "_PROC", tmp_path / "version")
    monkeypatch.setattr(gpu_report, "_TOOLKIT", tmp_path)
    monkeypatch.setattr(gpu_report, "import_module", machine.module)
    monkeypatch.setattr(gpu_report, "version", machine.version)
    monkeypatch.setattr(shutil, "which", machine.commands.get)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        "CUDA_HOME",
        "CUDA_PATH",
        "CC",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
        "FLASHINFER_WORKSPACE_BASE",
        "XDG_CACHE_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    yield machine


def report() -> str:
    return "\n".join(gpu_report.gpu_report())


def test_a_report_of_this_very_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(argparse.Namespace()) == 0
    text = capsys.readouterr().out
    assert "torch" in text
    assert "triton" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_no_path_is_cut(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = "/a/very/long/folder" * 8
    monkeypatch.setattr(sys, "executable", place)
    monkeypatch.setenv("COLUMNS", "80")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert doctor.run(argparse.Namespace()) == 0
    text = capsys.readouterr().out
    assert "\u2026" not in text
    assert place in (re.sub(r"[\s\u2502]|\x1b\[[0-9;]*m", "", text) if terminal else text)


def test_a_machine_on_which_all_is_well(machine: Machine, tmp_path: Path) -> None:
    split, whole = Partition(100, 32), Partition(132, 0)
    machine.results = [seen(split, Lane.PREFILL, 100), seen(split, Lane.DECODE, 32), seen(whole, Lane.PREFILL, 132)]
    closed = Manager.closed
    lines = report().splitlines()
    assert lines[0] == "NVIDIA driver 580.159.04"
    assert "torch 2.11.0 is built for CUDA 13.0" in lines
    assert "GPU 0: NVIDIA H200, 132 SMs, compute capability 9.0, 130.0 of 140.0 GiB free" in lines
    assert "cuda-bindings 13.0.3" in lines
    assert "GPU 0, partitions: green contexts on 132 SMs" in lines
    assert "GPU 0, 100 + 32: kernels ran prefill on 100 SMs, decode on 32 SMs: as granted" in lines
    assert "GPU 0, 132 + 0: kernels ran prefill on 132 SMs: as granted" in lines
    assert f"Triton's kernels: {tmp_path}/.triton/cache, {NOT_YET}" in lines
    assert f"tables of tuned matmuls: {tmp_path}/.cache/bulletserve, {NOT_YET}" in lines
    assert not any("pip install" in line or "could not" in line for line in lines)
    assert Manager.closed == closed + 1
    table = tmp_path / ".cache" / "bulletserve" / "matmul-0.json"
    table.parent.mkdir(parents=True)
    table.touch()
    assert f"tables of tuned matmuls: {table.parent}, 1 there" in report()


def test_a_partition_that_is_not_as_granted(machine: Machine) -> None:
    split = Partition(100, 32)
    machine.results = [
        seen(split, Lane.PREFILL, 132, ok=False),
        seen(split, Lane.DECODE, 32, keeps=False),
    ]
    assert "decode on 32 SMs: NOT as granted; a CUDA graph does not keep its SMs" in report()


def test_a_cpu_build_of_torch_beside_a_gpu_gets_the_line_that_replaces_it(machine: Machine) -> None:
    machine.torch = torch_with(None, 0)
    text = report()
    assert "torch 2.11.0 is built for CPUs only" in text
    assert (
        f"{sys.executable} -m pip install --force-reinstall --index-url https://download.pytorch.org/whl/cu130 "
        "'torch==2.11.*'" in text
    )


def test_a_machine_without_a_gpu_is_not_told_to_install_anything(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "version").unlink()
    machine.torch, machine.packages = torch_with(None, 0), {}
    assert "bullet serves on the CPU here" in report()
    assert "pip install" not in report()
    assert "only a GPU needs it" in report()


def test_missing_packages_and_tools_come_with_their_fix(machine: Machine) -> None:
    machine.packages = {"flashinfer-python": "0.6.12"}
    machine.commands.clear()
    text = report()
    assert "cuda-bindings is not installed (green contexts, without it both lanes share all SMs): pip install" in text
    assert "no nvcc" in text
    assert "no C compiler" in text


def test_an_old_driver_is_told(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(PROC.replace("580.159.04", "535.104.05"))
    assert "NVIDIA driver 535.104.05: torch's CUDA 13 build needs 580 or newer" in report()


def test_the_driver_is_asked_for_where_its_file_is_hidden(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").unlink()
    machine.commands["nvidia-smi"] = "/usr/bin/nvidia-smi"
    answer = subprocess.CompletedProcess([], 0, "580.95.05\n580.95.05\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert report().startswith("NVIDIA driver 580.95.05\n")
    answer.returncode = 9
    assert "no NVIDIA driver is loaded" in report()


def test_without_torch_there_is_still_a_report(machine: Machine) -> None:
    machine.torch = None
    text = report()
    assert "torch is not installed" in text
    assert "triton 3.6.0" in text


def test_a_section_that_fails_is_a_line(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("the driver refused")

    monkeypatch.setattr(Manager, "__init__", lambda self, index: refuse(index))
    machine.torch.cuda.mem_get_info = refuse
    text = report()
    assert "GPU: could not be looked at (RuntimeError: the driver refused)" in text
    assert "partitions: could not be looked at (RuntimeError: the driver refused)" in text
    assert "FlashInfer's kernels" in text


def test_the_report_names_the_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    assert doctor.run(argparse.Namespace()) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "calibration for" in line)
    assert line.rstrip("│ ").endswith("bullet calibrate")
    monkeypatch.setattr(doctor, "import_module", lambda name: exec("raise RuntimeError('no')"))
    (row,) = doctor._calibration()
    assert row[1] == "could not be looked for (RuntimeError: no)"
