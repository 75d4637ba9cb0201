# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the instrumentor adds to the start of every Python process of an instrumented tree.

Whole processes, interleaved, against one that imports only what every instrumentation imports.
"""

from __future__ import annotations

import compileall
import statistics
import subprocess
import sys
import tempfile
import time

from opentelemetry.instrumentation import tunix

BASE = "import opentelemetry.instrumentation.instrumentor"
ARMS = {
    "base": BASE,
    "control": BASE,
    "import": f"{BASE}; import opentelemetry.instrumentation.tunix",
    "import + instrument()": (
        f"{BASE}; from opentelemetry.instrumentation.tunix import TunixInstrumentor; "
        "TunixInstrumentor().instrument()"
    ),
}
ROUNDS = 31
LIMIT_MS = 15.0


def main() -> int:
    """Prints the median of each arm and its difference to the base.

    Returns:
        1 when the instrumentor costs more than the limit, else 0.
    """
    # As an installed package has it; where writing bytecode is switched off, the compiler would be
    # measured instead.
    for folder in tunix.__path__:
        compileall.compile_dir(folder, quiet=1)
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, code in ARMS.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)
                times[name].append((time.perf_counter() - start) * 1e3)
    base = statistics.median(times["base"])
    print(f"{'arm':<22}{'median ms':>10}{'over base':>11}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<22}{median:>10.1f}{median - base:>+11.1f}")
    added = statistics.median(times["import + instrument()"]) - base
    print(f"limit {LIMIT_MS} ms: {'kept' if added <= LIMIT_MS else 'EXCEEDED'}")
    return int(added > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
