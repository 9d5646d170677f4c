"""Where compilation leaves traces: pass timings, and the TORCH_COMPILE_DEBUG directory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from torchair.flags import Flags
from torchair.log import add_debug_file
from torchair.store import atomic_write


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool


@dataclass
class Trace:
    """Records of one compilation, and its debug directory when that is switched on."""

    phase: str = "forward"
    directory: Path | None = None
    records: list[PassRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._count = itertools.count()

    def write(self, what: str, kind: str, text: str) -> None:
        """One numbered file of this phase, `NNN_aot_<phase>_<what>.<kind>`."""
        if self.directory is None:
            return
        name = f"{next(self._count):03d}_aot_{self.phase}_{what}.{kind}"
        atomic_write(self.directory / self.phase / name, text.encode())

    @property
    def writes(self) -> bool:
        """Whether files are wanted at all."""
        return self.directory is not None


_models = itertools.count()


def model_directory() -> Path | None:
    """A new `model__<k>` folder in torch's debug directory, None when debugging is off."""
    if not Flags.read().compile_debug:
        return None
    root = debug_root()
    return root / f"model__{next(_models)}"


def debug_root() -> Path:
    """The `torchair` folder of torch's debug run directory."""
    from torch._dynamo.utils import get_debug_dir
    from torch.distributed import get_rank, is_available, is_initialized

    base = get_debug_dir()
    if is_available() and is_initialized():
        base += f"-rank_{get_rank()}"
    return Path(base) / "torchair"


def start_debug_log() -> None:
    """Copy log lines into `debug.log` when debugging is on."""
    if Flags.read().compile_debug:
        root = debug_root()
        root.mkdir(parents=True, exist_ok=True)
        add_debug_file(str(root / "debug.log"))
