"""What decides runs on a laptop: no module of the pure folders loads torch, however indirectly."""

import subprocess
import sys
from pathlib import Path

import pytest

import bulletserve

PACKAGE = Path(bulletserve.__file__).parent
PURE = (
    "core", "estimator", "scheduler", "simulator", "telemetry", "workload", "formats", "transport", "server", "client",
    "grammar",
)  # fmt: skip

NO_TORCH = """
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder

class NoTorch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError("a pure module imports torch")
        return None

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    import_module(name)
assert "torch" not in sys.modules
"""


def modules_of(folder: str) -> list[str]:
    """Every module below a folder of the package, by its import name."""
    names = []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def import_in_a_fresh_process(*names: str) -> None:
    command = [sys.executable, "-W", "error", "-c", NO_TORCH, *names]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_package_itself_is_cheap_to_import() -> None:
    import_in_a_fresh_process("bulletserve", "bulletserve.cli")


@pytest.mark.parametrize("folder", [folder for folder in PURE if (PACKAGE / folder).is_dir()])
def test_a_pure_folder_imports_no_torch(folder: str) -> None:
    names = modules_of(folder)
    assert names
    import_in_a_fresh_process(*names)


def test_this_test_can_fail() -> None:
    with pytest.raises(AssertionError, match="a pure module imports torch"):
        import_in_a_fresh_process("torch")
