"""Build hook of the package: the native copier and the CPU's row kernels (docs/native.md); metadata: pyproject.toml.

The extensions need a C++17 compiler and pybind11's headers, nothing of CUDA, CANN or PyTorch: device libraries, and
torch's own for the row kernels, are opened at run time. Environment: XLLM_NATIVE_FLAGS adds compiler and linker flags (sanitizers).
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent


def pybind11_include() -> str | None:
    """pybind11's own headers, or the copy that PyTorch carries (a machine without a package index has that one)."""
    for package, folder in (("pybind11", "include"), ("torch", "include")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            include = Path(spec.origin).parent / folder
            if (include / "pybind11" / "pybind11.h").exists():
                return str(include)
    return None


def extensions() -> list[Extension]:
    """Both extensions, or nothing without pybind11."""
    include = pybind11_include()
    if include is None:
        print("setup.py: no pybind11 headers: the package is built WITHOUT its native code", file=sys.stderr)
        return []
    extra = shlex.split(os.environ.get("XLLM_NATIVE_FLAGS", ""))
    flags = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", f"-isystem{include}"]

    def extension(name: str, folder: Path, *more: str, optional: bool = False) -> Extension:
        return Extension(
            name,
            sources=sorted(str(path.relative_to(ROOT)) for path in folder.glob("*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in folder.iterdir() if path.suffix in (".h", ".inc")),
            extra_compile_args=[*flags, *more, *extra],
            extra_link_args=["-pthread", "-ldl", *(extra or ["-s"])],
            language="c++",
            optional=optional,
        )

    return [
        extension("xllm_hier._native", ROOT / "native"),
        # GCC's own AVX-512 header warns about itself.
        extension("xllm_hier._cpu_kernels", ROOT / "native" / "kernels", "-Wno-maybe-uninitialized", optional=True),
    ]


setup(ext_modules=extensions())
