"""The application: its commands, and how a run ends.

stdout carries only data (text or JSON); progress and messages go to stderr. A user's mistake gives one `error:` line
and one `hint:` line. Exit codes: 0 done, 1 our own bug, 2 usage, 3 the model is not usable, 4 the budget cannot be met,
5 verification failed, 130 interrupted.

Commands import what they need when they run, so that `--help` stays quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from onnx_sublinear.cli.bench import bench
from onnx_sublinear.cli.inspect import inspect
from onnx_sublinear.cli.messages import debugging, say_error
from onnx_sublinear.cli.optimize import optimize
from onnx_sublinear.cli.passes import passes
from onnx_sublinear.cli.plan import plan
from onnx_sublinear.cli.verify import verify
from onnx_sublinear.errors import PassError, SublinearError

__all__ = ["app", "main"]

EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT

app = typer.Typer(
    name="onnx-sublinear",
    help="Make ONNX training graphs need a fraction of the memory when ONNX Runtime runs them.",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 usage, 3 model not usable, 4 budget cannot be met, 5 verification failed, 1 a bug.",
)
for _command in (optimize, inspect, verify, bench, passes, plan):
    app.command()(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from onnx_sublinear import __version__

        typer.echo(f"onnx-sublinear {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make ONNX training graphs need a fraction of the memory when ONNX Runtime runs them."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (default: those of the process); the exit code."""
    try:
        result = app(args=arguments, prog_name="onnx-sublinear", standalone_mode=False)
        sys.stdout.flush()
    except SublinearError as e:
        return _ended_by(e)
    except (KeyboardInterrupt, typer.Abort):
        result = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout went away. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        return _usage(e) if hasattr(e, "format_message") else _bug(e)
    if result == EXIT_INTERRUPTED:  # typer itself turns the interrupt into this code, by its version
        say_error("interrupted")
    return result if isinstance(result, int) else 0


def _ended_by(error: SublinearError) -> int:
    if debugging():
        import traceback

        traceback.print_exception(error)
    hint = error.hint
    if isinstance(error, PassError):
        hint = hint or "please report it together with the model's operators"
    say_error(error.message, hint)
    return error.exit_code


def _usage(error: Any) -> int:
    """A mistake that the argument parser found (typer's own classes or click's, by its version)."""
    message = str(error.format_message()).strip().replace("\n", " ")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "onnx-sublinear"
    say_error(message[:1].lower() + message[1:].rstrip("."), f"see: {command} --help")
    return EXIT_USAGE


def _bug(error: Exception) -> int:
    if debugging():
        import traceback

        traceback.print_exception(error)
    say_error(
        f"internal error: {type(error).__name__}: {' '.join(str(error).split())}",
        "this is a bug: please report it, with the traceback that ONNX_SUBLINEAR_DEBUG=1 prints",
    )
    return EXIT_BUG


def _terminate(signum: int, frame: object) -> NoReturn:  # noqa: ARG001
    raise SystemExit(128 + signum)  # unwinds, so that temporary files go


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run())
