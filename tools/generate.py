"""Write the files that are derived from code, or say which are out of date."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from vbpipe.recipe.schema import render

ROOT = Path(__file__).parent.parent


def command_reference() -> str:
    """Return the help of every command as Markdown."""
    import os

    os.environ["COLUMNS"] = "100"
    from typer.main import get_command
    from typer.testing import CliRunner

    from vbpipe.cli.app import app

    runner, root = CliRunner(), get_command(app)
    parts = ["# Commands\n\nGenerated from the program's own help by `make gen`.\n"]
    names = [(), *((name,) for name in root.commands if name not in ("store", "worker"))]  # type: ignore[attr-defined]
    names += [(group, name) for group in ("store", "worker") for name in root.commands[group].commands]  # type: ignore[attr-defined]
    for name in names:
        shown = " ".join(("vbpipe", *name))
        text = runner.invoke(app, [*name, "--help"], prog_name="vbpipe").output
        parts.append(f"## `{shown}`\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(parts)


GENERATED: Mapping[str, Callable[[], str]] = {
    "docs/reference/recipe.schema.json": render,
    "docs/reference/commands.md": command_reference,
}


def main(arguments: list[str]) -> int:
    """Write every generated file; with --check, only compare, and return 1 when one differs."""
    stale = 0
    for name, make in GENERATED.items():
        path, text = ROOT / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in arguments:
            print(f"{name} is out of date: run `make gen`")
            stale = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{name} written")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
