"""`make dist`: build sdist and wheel, install the wheel into a new environment, try it there.

The new environment sees the packages of the one that runs this, so that nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torchair/py.typed", "torchair/serde/ge_ir.proto", "_torchair_command.py")
TRIAL = """
import pathlib, sys, torch, torchair
assert pathlib.Path(torchair.__file__).is_relative_to(sys.prefix), torchair.__file__
f = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="torchair")
x = torch.randn(4, 10)
torch.testing.assert_close(f(x), torch.softmax(x * 2, -1))
print("torchair", torchair.__version__, "works from the wheel")
"""


def build(folder: Path) -> tuple[Path, Path]:
    """An sdist and a wheel of this version."""
    isolated = ["--no-isolation"]  # setuptools of this environment: no network
    command = [sys.executable, "-m", "build", *isolated, "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_content(sdist: Path, wheel: Path) -> None:
    """What must be in them, and what must not."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith("METADATA"))
        text = archive.read(metadata).decode()
    missing = [n for n in NEEDED if n not in names]
    assert not missing, f"the wheel lacks {missing}"
    assert not any(n.startswith(("tests/", "bench/")) for n in names)
    for line in ("License-Expression: BSD-3-Clause", "Requires-Dist: llvmlite>=0.47", "Keywords:"):
        assert line in text, f"the metadata lacks {line}"
    with tarfile.open(sdist) as archive:
        inside = {n.partition("/")[2] for n in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "docs/environments.md", "tests/tools/layers.py"} <= inside


def try_wheel(wheel: Path) -> None:
    """Install it beside the packages at hand, and use it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        (own,) = Path(folder).glob("lib/python*/site-packages")
        theirs = [p for p in sys.path if p.endswith("site-packages")]
        (own / "packages_at_hand.pth").write_text("\n".join(theirs))
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*install, "--force-reinstall", wheel], check=True, cwd=folder)
        subprocess.run([python.with_name("torchair"), "--version"], check=True, cwd=folder)
        subprocess.run([python, "-c", TRIAL], check=True, cwd=folder)


def main() -> None:
    """Build into the folder that is named, and try what was built."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist")
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(Path(folder))
        check_content(sdist, wheel)
        try_wheel(wheel)
        target.mkdir(exist_ok=True)
        for file in (sdist, wheel):
            (target / file.name).write_bytes(file.read_bytes())
            print(target / file.name)


if __name__ == "__main__":
    main()
