"""Which libraries this process has loaded, as each operating system tells it.

Only Linux was run. What asks macOS and Windows is tested with stand-ins for their functions.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

_LONGEST = 32768  # characters of a path on Windows


def loaded_libraries(system: str | None = None) -> list[str]:
    """Paths of the libraries in this process; none where the system is not known."""
    ask = _ASK.get(system or platform.system())
    return ask() if ask else []


def with_names(paths: Iterable[str], words: Sequence[str]) -> list[str]:
    """Those whose file names have one of these words."""
    kinds = ((p, PureWindowsPath if "\\" in p else PurePosixPath) for p in paths)
    return [p for p, kind in kinds if any(word in kind(p).name for word in words)]


def linux_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """From the map of this process's memory."""
    if not maps.exists():
        return []
    lines = maps.read_text().splitlines()
    return sorted({line.split(maxsplit=5)[-1] for line in lines if "/" in line})


def macos_libraries(dyld: Any = None) -> list[str]:
    """From the dynamic linker, which counts images."""
    dyld = dyld or ctypes.CDLL(None)
    count, name = dyld["_dyld_image_count"], dyld["_dyld_get_image_name"]
    count.restype, name.restype, name.argtypes = ctypes.c_uint32, ctypes.c_char_p, [ctypes.c_uint32]
    found = (name(k) for k in range(count()))  # None for one that was removed meanwhile
    return [path.decode(errors="surrogateescape") for path in found if path]


def windows_libraries(kernel: Any = None) -> list[str]:
    """From the kernel, which fills in as many handles as there is room for."""
    kernel = kernel or ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    handle, number = ctypes.c_void_p, ctypes.c_uint32
    kernel.GetCurrentProcess.restype = handle
    kernel.K32EnumProcessModules.argtypes = [handle, handle, number, ctypes.POINTER(number)]
    kernel.GetModuleFileNameW.argtypes = [handle, ctypes.c_wchar_p, number]
    process, needed, width = kernel.GetCurrentProcess(), number(), ctypes.sizeof(handle)
    modules = (handle * 0)()
    while True:
        size = ctypes.sizeof(modules)
        if not kernel.K32EnumProcessModules(process, modules, size, ctypes.byref(needed)):
            return []
        if needed.value <= size:
            break
        modules = (handle * (needed.value // width))()
    path = ctypes.create_unicode_buffer(_LONGEST)
    loaded = modules[: needed.value // width]
    return [path.value for m in loaded if kernel.GetModuleFileNameW(m, path, _LONGEST)]


_ASK: Mapping[str, Callable[[], list[str]]] = {
    "Linux": linux_libraries,
    "Darwin": macos_libraries,
    "Windows": windows_libraries,
}
