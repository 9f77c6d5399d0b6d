"""Compose the JSON Schema of recipes from the model and the options of the installed plug-ins."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from vbpipe import plugins
from vbpipe.recipe.model import Recipe, Target
from vbpipe.recipe.options import recipe_stages

Schema = dict[str, Any]


def json_schema() -> Schema:
    """Return the schema (draft 2020-12) that editors complete recipes with; equal for equal plug-ins."""
    schema = Recipe.model_json_schema(schema_generator=_Documented)
    definitions: Schema = schema.setdefault("$defs", {})
    stages = {name: _plugin_schema(spec, f"stages.{name}", definitions) for name, spec in recipe_stages().items()}
    schema["properties"]["stages"] |= {"properties": stages, "additionalProperties": False}
    backends = {
        name: _target_schema(name, plugins.backend(name), definitions) for name in sorted(plugins.names("backends"))
    }
    definitions["Target"] = {"title": "Target", "description": inspect.getdoc(Target), "oneOf": list(backends.values())}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "vbpipe recipe, version 1",
    }


def render() -> str:
    """Return the schema as the text of `docs/reference/recipe.schema.json`, keys sorted."""
    return json.dumps(json_schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class _Documented(GenerateJsonSchema):
    """Adds the fields' docstrings, read from the source only now so that importing a model stays cheap."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        for name, text in _field_docs(schema["cls"]).items():
            if name in found.get("properties", {}):
                found["properties"][name].setdefault("description", text)
        return found


def _field_docs(cls: type[Any]) -> Mapping[str, str]:
    """Return field name to the string literal that follows the field, for the class and what it derives from."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            text = after.value if isinstance(after, ast.Expr) else None
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Constant)
            ):
                docs[field.target.id] = inspect.cleandoc(str(text.value))
    return docs


def _plugin_schema(spec: type[Any], prefix: str, definitions: Schema) -> Schema:
    """Return a plug-in's schema; what it defines moves into `definitions` under the plug-in's own prefix."""
    if not issubclass(spec, BaseModel):
        return {"type": "object"}
    found = spec.model_json_schema(schema_generator=_Documented, ref_template=f"#/$defs/{prefix}.{{model}}")
    for name, definition in found.pop("$defs", {}).items():
        definitions[f"{prefix}.{name}"] = definition
    return found


def _target_schema(name: str, backend: type[Any], definitions: Schema) -> Schema:
    own = Target.model_json_schema(schema_generator=_Documented)["properties"]
    options = _plugin_schema(backend, f"backends.{name}", definitions)
    return {
        "title": f"{name} target",
        "description": options.get("description", ""),
        "type": "object",
        "properties": {**options.get("properties", {}), **own, "backend": {"const": name}},
        "required": ["backend", *options.get("required", [])],
        "additionalProperties": False,
    }
