# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a small model under `opentelemetry-instrument` and shows the telemetry it sent.

Starts an OTLP receiver on a free loopback port, runs the example as a process of its own with its
output on this terminal, and prints what arrived: spans by name, the last value of each metric,
events, and the lines that send the same run to a collector.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

_EXAMPLES: Final = Path(__file__).resolve().parent
_SFT: Final = _EXAMPLES / "sft_smollm2.py"
_INSTRUMENTOR: Final = "opentelemetry-instrumentation-tunix"
_COMMAND: Final = "opentelemetry-instrument"
_SERVICE: Final = "tunix-demo"
# Flags of an example whose values are paths; they mean paths below the user's current folder.
_PATH_FLAGS: Final = ("-dir", "-file", "-path")
# What would send telemetry elsewhere, or nowhere. Everything under OTEL_EXPORTER_ as well.
_REDIRECTING: Final = frozenset(
    {
        "OTEL_CONFIG_FILE",
        "OTEL_EXPERIMENTAL_CONFIG_FILE",
        "OTEL_LOGS_EXPORTER",
        "OTEL_METRICS_EXPORTER",
        "OTEL_METRIC_EXPORT_INTERVAL",
        "OTEL_SDK_DISABLED",
        "OTEL_TRACES_EXPORTER",
    }
)
_GRACE_SECONDS: Final = 30.0

_EPILOG: Final = """\
Flags that are not listed here go to the example, for instance --steps 20 --checkpoint-dir out;
everything after -- does; the example's own --help lists them. It runs in an empty folder: values of
flags that end in -dir, -file or -path are made absolute first, other relative paths mean that one.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and returns the exit code of the example, or 1 when nothing arrived."""
    script, script_arguments = _parse(sys.argv[1:] if arguments is None else arguments)
    problems = missing_requirements()
    if not script.is_file():
        problems.append(f"no such script: {script}")
    if problems:
        print("demo: cannot start:", *problems, sep="\n  ", file=sys.stderr)
        return 2

    # Not before the requirements were looked at: these two need opentelemetry-proto.
    from otlp_receiver import HttpReceiver
    from otlp_report import report

    overridden = sorted(name for name in os.environ if _redirects(name))
    if overridden:
        print(f"demo: overridden for this run: {', '.join(overridden)}", file=sys.stderr)
    with HttpReceiver() as receiver, _working_folder() as folder:
        command = [_executable() or _COMMAND, sys.executable, str(script), *script_arguments]
        print(f"demo: receiving OTLP on {receiver.endpoint}; running {script.name}", flush=True)
        code = run(command, child_environment(os.environ, receiver.endpoint), folder)

    ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    print(f"\ndemo: {script.name} ended with {ended}.\n")
    if receiver.requests:
        print(report(receiver), end="\n\n", flush=True)
    # As a shell counts: 128 and the number of the signal.
    shell_code = code if code >= 0 else 128 - code
    names = [item.name for item in (*receiver.spans, *receiver.metric_points)]
    if not any(name.startswith("tunix.") for name in names):
        print(_nothing_arrived(code), file=sys.stderr)
        return shell_code or 1
    print(collector_hint(script, script_arguments))
    return shell_code


def _parse(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    own, rest = list(arguments), []
    if "--" in own:
        split = own.index("--")
        own, rest = own[:split], own[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EPILOG,
        usage="%(prog)s [-h] [--script PATH] [flags of the example] [-- more of them]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--script",
        type=Path,
        default=_SFT,
        metavar="PATH",
        help="run another script instead of the SFT example",
    )
    options, unknown = parser.parse_known_args(own)
    return options.script.absolute(), absolute_paths([*unknown, *rest], Path.cwd())


def absolute_paths(arguments: Sequence[str], folder: Path) -> list[str]:
    """Makes the values of path flags absolute; URLs such as gs://bucket and the rest stay."""

    def absolute(value: str) -> str:
        return str(folder / value) if value and "://" not in value else value

    result: list[str] = []
    path_expected = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        is_path_flag = flag.startswith("--") and flag.endswith(_PATH_FLAGS)
        if path_expected and not argument.startswith("-"):
            result.append(absolute(argument))
        elif is_path_flag and equals:
            result.append(f"{flag}={absolute(value)}")
        else:
            result.append(argument)
        path_expected = is_path_flag and not equals
    return result


def missing_requirements() -> list[str]:
    """What is not installed, one line each, and as the last line how to install it."""

    def installed(*names: str) -> bool:
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                importlib.metadata.distribution(name)
                return True
        return False

    problems: list[str] = []
    remedies: list[str] = []
    if not installed(_INSTRUMENTOR):
        problems.append(f"{_INSTRUMENTOR} is not installed")
        checkout = _EXAMPLES.parent / _INSTRUMENTOR
        remedies.append(str(checkout) if checkout.is_dir() else _INSTRUMENTOR)
    if not installed("google-tunix", "tunix-core"):
        problems.append("neither google-tunix nor tunix-core is installed")
        remedies.append("google-tunix")
    if not installed("opentelemetry-exporter-otlp-proto-http"):
        problems.append("opentelemetry-exporter-otlp-proto-http is not installed")
        remedies.append("opentelemetry-exporter-otlp-proto-http")
    if not importlib.metadata.entry_points(group="opentelemetry_configurator"):
        problems.append("nothing that sets up the SDK, such as opentelemetry-distro, is installed")
        remedies.append("opentelemetry-distro")
    if _executable() is None:
        problems.append(f"there is no {_COMMAND} beside {sys.executable}")
        remedies.append("opentelemetry-instrumentation")
    if problems:
        problems.append(
            f"remedy: {shlex.join([sys.executable, '-m', 'pip', 'install', *remedies])}"
        )
    return problems


def _executable() -> str | None:
    return shutil.which(_COMMAND, path=str(Path(sys.executable).parent))


def _redirects(name: str) -> bool:
    return name in _REDIRECTING or name.startswith("OTEL_EXPORTER_")


def child_environment(environment: Mapping[str, str], endpoint: str) -> dict[str, str]:
    """The environment of the example: the user's, with telemetry sent to `endpoint`."""
    result = {name: value for name, value in environment.items() if not _redirects(name)}
    result |= _exporter_settings(endpoint)
    result["OTEL_METRIC_EXPORT_INTERVAL"] = "1000"
    result.setdefault("OTEL_SERVICE_NAME", _SERVICE)
    # A proxy could not reach this machine's loopback address.
    direct = environment.get("no_proxy") or environment.get("NO_PROXY")
    result["no_proxy"] = result["NO_PROXY"] = f"{direct},127.0.0.1" if direct else "127.0.0.1"
    # The example runs in another folder; what is relative here must still be found.
    if path := environment.get("PYTHONPATH"):
        entries = [str(Path(entry).absolute()) for entry in path.split(os.pathsep) if entry]
        result["PYTHONPATH"] = os.pathsep.join(entries)
    # Progress shows as it is made, also through a pipe.
    result["PYTHONUNBUFFERED"] = "1"
    return result


def _exporter_settings(endpoint: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_LOGS_EXPORTER": "otlp",
    }


@contextlib.contextmanager
def _working_folder() -> Iterator[Path]:
    """An empty folder for the example to run in; kept where the example left files in it.

    `opentelemetry-instrument` puts the current folder on the path, and a folder `tunix` there, as
    in the root of this repository, would be imported instead of the installed library.
    """
    folder = Path(tempfile.mkdtemp(prefix="tunix-demo-"))
    try:
        yield folder
    finally:
        try:
            folder.rmdir()
        except OSError:
            print(f"demo: files that the script wrote are kept in {folder}")


def run(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, grace: float = _GRACE_SECONDS
) -> int:
    """Runs `command` on this terminal and returns its exit code, negative for a signal.

    Ctrl-C, and a request to terminate, are passed on as SIGINT, so that the command can flush its
    telemetry. It is terminated when it has not ended after `grace` seconds or at another Ctrl-C.
    """
    with _stop_requests() as requests:
        # A session of its own: the terminal's Ctrl-C would else reach it a second time.
        child = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True
        )
        forever = float("inf")
        stages = (None, forever), (signal.SIGINT, grace), (signal.SIGTERM, 5), (signal.SIGKILL, 5)
        for stage, (number, patience) in enumerate(stages):
            if number is signal.SIGINT:
                print("\ndemo: stopping; Ctrl-C again to stop at once", file=sys.stderr)
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
            deadline = time.monotonic() + patience
            while len(requests) <= stage and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(0.2)
        return child.wait()


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP, except those that whoever started the demo ignores.

    Collected, not raised: an exception could come between the start of a process and the first
    line that would stop it again.
    """
    requests: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: requests.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _nothing_arrived(code: int) -> str:
    message = "Nothing of Tunix arrived: no span and no metric whose name starts with tunix."
    if code:
        return f"{message} The script ended before it sent any; its own output is above."
    kept = sorted(name for name in os.environ if name.startswith("OTEL_") and not _redirects(name))
    return "\n  ".join(
        [
            f"{message} Likely causes:",
            "- the script trained nothing, or ended without exit handlers (os._exit)",
            "- the script sets up OpenTelemetry providers of its own",
            f"- {_COMMAND} could not load {_INSTRUMENTOR}: its message is above",
            f"- OTEL_* settings of the environment: {', '.join(kept) or 'none here'}",
        ]
    )


def collector_hint(script: Path, arguments: Sequence[str]) -> str:
    """How to send the same run to a real collector, as lines to paste."""
    settings = {"OTEL_SERVICE_NAME": _SERVICE, **_exporter_settings("http://localhost:4318")}
    # With an endpoint of the user's own, protocol and exporters are theirs too.
    own = any(
        name == "OTEL_CONFIG_FILE" or (name.startswith("OTEL_EXPORTER_") and "ENDPOINT" in name)
        for name in os.environ
    )
    exports = [
        f"export {name}={shlex.quote(value)}"
        for name, value in settings.items()
        if name not in os.environ and not (own and _redirects(name))
    ]
    # Whole paths: this process may have a PATH (tox gives it one) that the user's shell has not.
    programs = (_executable() or _COMMAND, sys.executable)
    command = shlex.join([*programs, script.name, *arguments])
    return "\n  ".join(
        [
            "The same run, sent "
            + ("where your OTEL_* settings say:" if own else "to a collector on this host:"),
            *exports,
            f"cd {shlex.quote(str(script.parent))}",
            command,
            "# export OTEL_LOGS_EXPORTER=none where no logs are taken; likewise TRACES, METRICS",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
