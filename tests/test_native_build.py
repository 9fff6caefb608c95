"""How the native code is built: without warnings, as the real headers say, clean under the sanitizers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from standins.world import HERE, compiler

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xllm_hier" / "acl_headers"
WHEEL = "torch-npu==2.13.0"


def build(folder: Path, flags: str) -> Path:
    """The extensions in a package of its own under `folder`, which is returned; setup.py is the one of the project, and
    so are all other modules."""
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}", f"--build-temp={folder}/objects"]
    done = subprocess.run(
        [*command, "--parallel=2"],
        cwd=ROOT,
        env={**os.environ, "XLLM_NATIVE_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "xllm_hier" / "__init__.py").write_text(f"__path__.append({str(ROOT / 'xllm_hier')!r})\n")
    return folder


def sanitizer_runtime() -> str:
    """What to preload: libasan and, so that it finds the throw of exceptions, libstdc++; empty without libasan."""
    if not compiler():
        return ""
    paths = []
    for library in ("libasan.so", "libstdc++.so.6"):
        command = [compiler(), f"-print-file-name={library}"]
        paths.append(Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).resolve())
    return " ".join(map(str, paths)) if all(path.exists() for path in paths) else ""


SANITIZED = ("test_native.py", "test_native_devices.py", "test_row_kernels.py")


@pytest.mark.slow
def test_the_laws_hold_under_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    runtime = sanitizer_runtime()
    if not runtime:
        pytest.skip("this compiler has no AddressSanitizer")
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g"
    folder = build(tmp_path, flags)
    passed = [passed_under(folder, runtime, name) for name in SANITIZED]
    assert sum(passed) >= 450


def passed_under(folder: Path, runtime: str, name: str) -> int:
    """Run a file of tests with the sanitized extension of `folder`; returns how many passed, none may fail."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-qx", "--capture=sys", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml")),
            str(ROOT / "tests" / name),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself never frees all
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "XLLM_NATIVE_FLAGS": "-fsanitize=address,undefined",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    return int(found[1])


@pytest.mark.slow
@pytest.mark.skipif(not compiler(), reason="no C++ compiler")
def test_the_extension_builds_without_a_warning(tmp_path: Path) -> None:
    build(tmp_path, "-Werror")


def compare_with_headers(source: str, include: Path) -> None:
    done = subprocess.run(
        [
            *(compiler(), "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"),
            *(f"-I{ROOT / 'native'}", f"-I{HERE}", "-isystem", str(include), str(HERE / source)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not compiler(), reason="no C++ compiler")
def test_the_cuda_declarations_agree_with_cuda_h() -> None:
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *sorted(Path("/usr/local").glob("cuda-*"))]
    for include in (place / "include" for place in reversed(places)):
        header = include / "cuda.h"
        version = re.search(r"#define CUDA_VERSION (\d+)", header.read_text()) if header.exists() else None
        if version and int(version[1]) >= 12080:
            return compare_with_headers("abi_cuda.cpp", include)
    pytest.skip("no cuda.h of CUDA 12.8 or later (CUDA_HOME)")


@pytest.mark.skipif(not compiler(), reason="no C++ compiler")
def test_the_acl_declarations_agree_with_the_headers_of_torch_npu() -> None:
    if not (CACHE / "acl" / "acl_rt.h").exists():
        if os.environ.get("XLLM_TEST_ACL_HEADERS") != "1":
            pytest.skip(f"no ACL headers; XLLM_TEST_ACL_HEADERS=1 fetches those of {WHEEL}")
        fetch_acl_headers()
    compare_with_headers("abi_acl.cpp", CACHE)


def fetch_acl_headers() -> None:
    """The headers of the wheel, which is not installed: that would break `import torch` where there is no CANN."""
    CACHE.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(CACHE), WHEEL]
    subprocess.run(pip, check=True, capture_output=True, text=True, timeout=600)
    for wheel in CACHE.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("torch_npu/include/acl/") and name.endswith(".h"):
                    target = CACHE / name.removeprefix("torch_npu/include/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
        wheel.unlink()


def test_the_extension_links_no_device_library() -> None:
    spec = importlib.util.find_spec("xllm_hier._native")
    assert spec is not None and spec.origin is not None
    raw = Path(spec.origin).read_bytes()
    assert b"cuGetProcAddress_v2" in raw and b"libcuda.so.1" in raw and b"libascendcl.so" in raw
    linked = subprocess.run(["ldd", spec.origin], capture_output=True, text=True, check=False).stdout
    assert not re.search("cuda|ascend|torch", linked.replace(str(ROOT), ""))
