"""``import trackbridge`` costs milliseconds and does nothing: no heavy package, thread, process, handler or variable."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

HEAVY = ("torch", "wandb", "mlflow", "tensorboard", "pandas", "pyarrow")

PROGRAM = """
import json, os, signal, sys, threading, time
environment = dict(os.environ)
handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
hooks = (sys.excepthook, sys.unraisablehook, threading.excepthook)
started = time.perf_counter()
import trackbridge
seconds = time.perf_counter() - started
import psutil
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "milliseconds": seconds * 1000,
    "threads": threading.active_count(),
    "children": len(psutil.Process().children(recursive=True)),
    "environment": environment == dict(os.environ),
    "handlers": handlers == {number: signal.getsignal(number) for number in signal.valid_signals()},
    "hooks": hooks == (sys.excepthook, sys.unraisablehook, threading.excepthook),
}))
"""


def look(program: str = PROGRAM) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy_and_does_nothing() -> None:
    seen = look()
    assert not set(HEAVY) & set(seen["modules"])
    assert seen["threads"] == 1
    assert seen["children"] == 0
    assert seen["environment"] and seen["handlers"] and seen["hooks"]


def test_import_is_quick() -> None:
    best = min(look()["milliseconds"] for _ in range(5))
    print(f"import trackbridge: {best:.1f} ms (best of 5)")
    assert best < 100


def test_the_command_line_loads_nothing_heavy() -> None:
    program = PROGRAM.replace("import trackbridge\n", "import trackbridge.cli\n")
    assert not set(HEAVY) & set(look(program)["modules"])


def test_the_check_would_notice() -> None:
    assert "torch" in look(PROGRAM.replace("import trackbridge\n", "import trackbridge.rng\n"))["modules"]
