"""Look for failures among many seeds: `python -m simulation FIRST LAST [FAMILY...] [--first]`, run in `tests/`.

Each failure is shrunk and printed as a script to replay; `--first` stops at the first one, as it is.
"""

from __future__ import annotations

import sys
import time

from .scripts import FAMILIES, draw, failure_of, shrink


def main() -> int:
    first, last, *families = [word for word in sys.argv[1:] if word != "--first"]
    failed = 0
    for family in families or FAMILIES:
        start = time.perf_counter()
        for seed in range(int(first), int(last)):
            script = draw(family, seed)
            problem = failure_of(script)
            if problem is None:
                continue
            failed += 1
            if "--first" in sys.argv:
                print(f"{family}, seed {seed}: {problem}")
                return 1
            kind = problem.partition(":")[0]
            small = shrink(script, lambda other, kind=kind: (failure_of(other) or "").startswith(kind), 300)
            print(f"{family}, seed {seed}: {failure_of(small)}\n{small}\n", flush=True)
            if failed >= 5:
                return 1
        print(f"{family}: {(time.perf_counter() - start) / (int(last) - int(first)) * 1000:.1f} ms each", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
