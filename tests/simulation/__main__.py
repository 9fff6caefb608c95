"""Look for failures among many seeds: `python -m simulation FIRST LAST [FAMILY...] [--first]`, run in `tests/`.

Each failure is shrunk and printed as a script to replay; `--first` stops at the first one, as it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from . import pd_scripts, scripts


def same_failure(kit: Any, kind: str) -> Callable[[Any], bool]:
    """Says whether a script fails in this way."""
    return lambda script: (kit.failure_of(script) or "").startswith(kind)


def main() -> int:
    first, last, *families = [word for word in sys.argv[1:] if word != "--first"]
    failed = 0
    for family in families or [*scripts.FAMILIES, *pd_scripts.PD_FAMILIES]:
        start, kit = time.perf_counter(), pd_scripts if family in pd_scripts.PD_FAMILIES else scripts
        for seed in range(int(first), int(last)):
            script: Any = kit.draw(family, seed)
            problem = kit.failure_of(script)
            if problem is None:
                continue
            failed += 1
            if "--first" in sys.argv:
                print(f"{family}, seed {seed}: {problem}")
                return 1
            kind = problem.partition(":")[0]
            small: Any = kit.shrink(script, same_failure(kit, kind), 300)
            print(f"{family}, seed {seed}: {kit.failure_of(small)}\n{small}\n", flush=True)
            if failed >= 5:
                return 1
        print(f"{family}: {(time.perf_counter() - start) / (int(last) - int(first)) * 1000:.1f} ms each", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
