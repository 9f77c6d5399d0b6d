"""The command line: one file per command; this file is the one place that prints errors."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence

from vbpipe.errors import Interrupted, RecipeError, VbpipeError


def main() -> None:
    """Run `vbpipe` on the process's arguments and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; every error becomes one paragraph on stderr."""
    from vbpipe.cli.app import Exit, invoke

    debug = "--debug" in arguments or bool(os.environ.get("VBPIPE_DEBUG"))
    rest = [argument for argument in arguments if argument != "--debug"]
    try:
        return invoke(rest)
    except Exit as done:
        return done.code
    except VbpipeError as error:
        if debug:
            traceback.print_exc()
        _say(_paragraph(error))
        if "--json" in arguments and not (isinstance(error, RecipeError) and "check" in arguments):
            _say_json(error)
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted.")
        return Interrupted.exit_code
    except BrokenPipeError:
        # The reader of our output is gone (`vbpipe … | head`); nothing is wrong with us.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  # the one boundary: a bug still gets one paragraph and a way to report it
        if debug:
            traceback.print_exc()
        _say(f"vbpipe: a bug: {type(error).__name__}: {error}. Run again with --debug for the traceback.")
        return 3


def _paragraph(error: VbpipeError) -> str:
    if isinstance(error, RecipeError):
        count = len(error.problems)
        return str(error) if count == 1 else f"{error}\n{count} problems."
    return f"vbpipe: {error}"


def _say_json(error: VbpipeError) -> None:
    """Give programs a document too; `check` has printed its own, with every problem."""
    body = {"error": {"what": error.what, "where": error.where, "hint": error.hint}, "exit_code": error.exit_code}
    print(json.dumps(body, indent=1))  # noqa: T201  # the one place that prints errors


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201  # the one place that prints errors
