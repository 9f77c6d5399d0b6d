"""Write the files that are derived from code, or say which are out of date."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vbpipe.recipe.schema import json_schema, render

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


def kernel_reference() -> str:
    """Return the table of forms as Markdown."""
    from vbpipe_stages._kernels import KERNELS

    parts = [
        "# Forms by processor and GPU\n\nGenerated from `stages/vbpipe_stages/_kernels.py` by `make gen`. `quantize` "
        "refuses a form that is slow or gains nothing where it is to run unless the rule says `force: true`, and one "
        "that is absent always; the first row that meets a form decides, and what no row meets is let through. u8s8: "
        "unsigned activations, signed weights.\n",
        "| dialect | devices | operators | form | against float32 | why | instead | source |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in KERNELS:
        devices, operators = ", ".join(row.devices) or "all", ", ".join(row.operators) or "all"
        instead = f"`{row.instead}`" if row.instead else ""
        cells = (row.dialect, devices, operators, row.form, row.speed, row.why, instead, row.source)
        parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def recipe_reference() -> str:
    """Return every key of a recipe as Markdown, from the JSON Schema."""
    schema = json_schema()
    parts = [
        "# Recipes\n\nGenerated from the types by `make gen`. The example to start from is "
        "[recipes/minilm.yaml](../../recipes/minilm.yaml); `vbpipe init` writes one for your model.\n"
    ]
    sections = {"Recipe": schema, **dict(sorted(schema.get("$defs", {}).items()))}
    stages = schema["properties"]["stages"].get("properties", {})
    sections |= {f"stages.{name}": body for name, body in sorted(stages.items()) if "$ref" not in body}
    for name, body in sections.items():
        if not body.get("properties"):
            continue
        parts.append(f"## {name}\n\n{_sentence(body.get('description', ''))}\n")
        parts.append("| key | type | default | meaning |\n| --- | --- | --- | --- |")
        required = body.get("required", [])
        for key, field in body["properties"].items():
            default = (
                "required" if key in required else f"`{json.dumps(field['default'])}`" if "default" in field else ""
            )
            meaning = _sentence(field.get("description", ""))
            parts.append(f"| `{key}` | {_type(field)} | {default} | {meaning} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _sentence(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    for choice in ("anyOf", "oneOf"):
        if choice in field:
            return " or ".join(dict.fromkeys(_type(one) for one in field[choice]))
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}" if isinstance(field.get("items"), Mapping) else "list"
    if field.get("type") == "object":
        inner = field.get("additionalProperties")
        return f"mapping to {_type(inner)}" if isinstance(inner, Mapping) and inner else "mapping"
    return str(field.get("type", "any"))


GENERATED: Mapping[str, Callable[[], str]] = {
    "docs/reference/recipe.schema.json": render,
    "docs/reference/recipe.md": recipe_reference,
    "docs/reference/commands.md": command_reference,
    "docs/reference/forms.md": kernel_reference,
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
