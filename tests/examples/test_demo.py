# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo, as a user starts it, around a small script that stands in for training."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import demo

DEMO = demo.__file__

TRAINING = """
import argparse, os, pathlib, sys, time
from opentelemetry import metrics, trace
from opentelemetry._logs import get_logger

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--checkpoint-dir")
parser.add_argument("--code", type=int, default=0)
parser.add_argument("--sleep", type=float, default=0)
parser.add_argument("--write")
args = parser.parse_args()
print("arguments", vars(args))
print("folder", os.getcwd())
tracer, meter = trace.get_tracer("stand-in"), metrics.get_meter("stand-in")
loss, step = meter.create_gauge("tunix.training.loss"), meter.create_gauge("tunix.training.step")
with tracer.start_as_current_span("tunix.run"):
    for number in range(1, args.steps + 1):
        with tracer.start_as_current_span("tunix.model.train") as span:
            span.set_attribute("tunix.host_only", True)
            loss.set(1 / number, {"tunix.training.mode": "train"})
            step.set(number, {"tunix.training.mode": "train"})
get_logger("stand-in").emit(event_name="tunix.run.start")
if args.write:
    pathlib.Path(args.write).write_text("kept")
print("trained", file=sys.stderr)
time.sleep(args.sleep)
sys.exit(args.code)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "training.py"
    path.write_text(TRAINING)
    return path


def environment(**settings: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PYTHON"))}
    return {**kept, **settings}


@contextmanager
def started(*arguments: str | Path, cwd: Path, **settings: str) -> Iterator[subprocess.Popen[str]]:
    # A test run in the background ignores SIGINT, and what it starts would inherit that.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, DEMO, *map(str, arguments)],
        cwd=cwd,
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, previous)
    try:
        yield process
    finally:
        # As a user would; it takes the script with it.
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def run_demo(*arguments: str | Path, cwd: Path, **settings: str) -> tuple[int, str, str]:
    with started(*arguments, cwd=cwd, **settings) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


def test_table_gauges_and_events_of_a_real_process_are_printed(
    script: Path, tmp_path: Path
) -> None:
    code, out, err = run_demo("--script", script, "--steps", "3", cwd=tmp_path)
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert ["tunix.run", "1"] in [line[:2] for line in lines]
    assert ["tunix.model.train", "3"] in [line[:2] for line in lines]
    assert ["tunix.training.loss", "mode=train", "0.33333", "3"] in lines
    assert ["tunix.training.step", "mode=train", "3"] in lines
    assert ["tunix.run.start", "1"] in lines
    assert "  tunix.model.train: time on the host only" in out
    # The script's own output passes through, before the tables.
    assert out.index("'steps': 3") < out.index("training.py ended with exit code 0")
    assert err == "trained\n"


def test_hint_repeats_the_command_with_paths_that_work_anywhere(
    script: Path, tmp_path: Path
) -> None:
    _, out, _ = run_demo("--script", "training.py", "--checkpoint-dir", "a b", cwd=tmp_path)
    hint = out[out.index("The same run, sent to a collector on this host:") :]
    assert f"  cd {tmp_path}\n" in hint
    assert "  export OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318\n" in hint
    assert "  export OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf\n" in hint
    assert f" training.py --checkpoint-dir '{tmp_path}/a b'\n" in hint


def test_script_runs_in_a_neutral_folder_with_path_flags_made_absolute(
    script: Path, tmp_path: Path
) -> None:
    # A folder `tunix` here would shadow the library if the script ran here.
    (tmp_path / "tunix").mkdir()
    _, out, _ = run_demo("--script", script, "--checkpoint-dir", "out", cwd=tmp_path)
    assert f"'checkpoint_dir': '{tmp_path}/out'" in out
    folder = Path(out.split("\nfolder ")[1].split("\n")[0])
    assert folder.name.startswith("tunix-demo-")
    assert not folder.exists()


def test_files_that_the_script_wrote_are_kept(script: Path, tmp_path: Path) -> None:
    _, out, _ = run_demo("--script", script, "--write", "file", cwd=tmp_path, TMPDIR=str(tmp_path))
    (kept,) = tmp_path.glob("tunix-demo-*/file")
    assert kept.read_text() == "kept"
    assert f"files that the script wrote are kept in {kept.parent}" in out


def test_everything_after_the_double_dash_goes_to_the_script(script: Path, tmp_path: Path) -> None:
    source = tmp_path / "echo.py"
    source.write_text("import sys; print('got', sys.argv[1:])")
    _, out, _ = run_demo("--script", source, "-x", "1", "--", "--script", "y", "--", cwd=tmp_path)
    assert "got ['-x', '1', '--script', 'y', '--']" in out


def test_exit_code_of_the_script_is_kept_and_its_telemetry_shown(
    script: Path, tmp_path: Path
) -> None:
    code, out, _ = run_demo("--script", script, "--code", "7", cwd=tmp_path)
    assert code == 7
    assert "ended with exit code 7" in out
    assert "tunix.model.train" in out


def test_settings_that_redirect_are_overridden_and_named(script: Path, tmp_path: Path) -> None:
    code, out, err = run_demo(
        *("--script", script),
        cwd=tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT="http://192.0.2.1:4317",
        OTEL_EXPORTER_OTLP_HEADERS="authorization=secret",
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="grpc",
        OTEL_METRICS_EXPORTER="console",
        OTEL_SDK_DISABLED="true",
        OTEL_SERVICE_NAME="mine",
        http_proxy="http://192.0.2.1:9",
    )
    assert code == 0, err
    assert err.splitlines()[0] == (
        "demo: overridden for this run: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS, "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_METRICS_EXPORTER, OTEL_SDK_DISABLED"
    )
    assert "secret" not in out + err
    hint = out[out.index("The same run, sent where your OTEL_* settings say:") :]
    assert "\n  export" not in hint


def test_silence_is_said_plainly_and_is_a_failure(tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("print('hello')")
    code, out, err = run_demo(
        "--script", silent, cwd=tmp_path, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="tunix"
    )
    assert code == 1
    assert "hello" in out
    assert "Nothing of Tunix arrived" in err
    assert "settings of the environment: OTEL_PYTHON_DISABLED_INSTRUMENTATIONS" in err


def test_script_that_fails_before_training_keeps_its_exit_code(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no such model')")
    code, _, err = run_demo("--script", broken, cwd=tmp_path)
    assert code == 1
    assert "no such model" in err
    assert "The script ended before it sent any" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_the_script_and_still_prints_what_arrived(
    script: Path, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ("--script", script, "--sleep", "600")
    with started(*arguments, cwd=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "trained\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "training.py ended with SIGINT" in out
    assert "tunix.model.train" in out


def test_script_that_ignores_interrupts_is_terminated_after_the_grace_period(
    tmp_path: Path,
) -> None:
    source = """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open("pid", "w").write(str(child.pid))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert demo.run(command, environment(), tmp_path, grace=0.5) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, previous)
    query = ["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text()]
    for _ in range(100):  # its end is the init process's to collect
        state = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        if state in ("", "Z"):
            break
        time.sleep(0.1)
    assert state in ("", "Z"), "its child must not outlive it"


def test_interrupt_while_the_script_is_being_started_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        process = real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        # 1 where the interpreter is interrupted in its own start-up.
        assert demo.run(command, environment(), tmp_path, grace=1) in (-2, -15, 1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--checkpoint-dir", "a"], ["--checkpoint-dir", "/home/a"]),
        (["--cache-dir=a", "b"], ["--cache-dir=/home/a", "b"]),
        (["--data-file", "/abs", "x-dir"], ["--data-file", "/abs", "x-dir"]),
        (["--out-path", "gs://bucket/x"], ["--out-path", "gs://bucket/x"]),
        (["--out-dir", "--steps", "2"], ["--out-dir", "--steps", "2"]),
        (["--out-dir=", "--steps", "2"], ["--out-dir=", "--steps", "2"]),
    ],
)
def test_only_values_of_path_flags_are_made_absolute(
    arguments: list[str], expected: list[str]
) -> None:
    assert demo.absolute_paths(arguments, Path("/home")) == expected


def test_child_environment_keeps_what_does_not_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    env = demo.child_environment(
        {"OTEL_TRACES_SAMPLER": "always_on", "PYTHONPATH": "src::/x", "NO_PROXY": "corp"},
        "http://127.0.0.1:1",
    )
    assert env["OTEL_TRACES_SAMPLER"] == "always_on"
    assert env["OTEL_SERVICE_NAME"] == "tunix-demo"
    assert env["PYTHONPATH"] == os.pathsep.join(["/src", "/x"])
    assert (env["NO_PROXY"], env["no_proxy"]) == ("corp,127.0.0.1",) * 2


def test_missing_script_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--script", str(tmp_path / "none.py")]) == 2
    output = capsys.readouterr()
    assert f"no such script: {tmp_path}/none.py" in output.err
    assert output.out == ""


def test_missing_packages_are_named_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(demo, "_executable", lambda: None)
    assert demo.main([]) == 2
    error = capsys.readouterr().err
    assert "opentelemetry-instrumentation-tunix is not installed" in error
    assert "neither google-tunix nor tunix-core is installed" in error
    assert f"there is no opentelemetry-instrument beside {sys.executable}" in error
    (remedy,) = [line for line in error.splitlines() if "remedy: " in line]
    assert " -m pip install " in remedy
    assert remedy.endswith(
        "opentelemetry-instrumentation-tunix google-tunix opentelemetry-exporter-otlp-proto-http "
        "opentelemetry-distro opentelemetry-instrumentation"
    )
