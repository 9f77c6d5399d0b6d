"""Turn pydantic's findings into located problems in the words of a recipe's author."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vbpipe.errors import Problem, VbpipeError
from vbpipe.recipe.document import Node, Steps, child, entries, locate, plain, quote

Spec = TypeVar("Spec", bound=BaseModel)


def check(model: type[Spec], node: Node, also: frozenset[str] = frozenset()) -> tuple[Spec | None, list[Problem]]:
    """Return the node as a `model` and no problems, or None and all that is wrong, in people's words.

    Args:
        model: what the node should be.
        node: a mapping.
        also: keys that may be written beside the model's own, to be offered for a misspelt one.
    """
    try:
        # JSON mode, because strict Python mode would want tuples where a recipe can only have lists.
        return model.model_validate_json(json.dumps(plain(node)), strict=True), []
    except ValidationError as error:
        findings = [_finding(details, node) for details in error.errors(include_url=False)]
        author = _Author(model, node, also)
        return None, [author.problem(finding) for finding in author.without_echoes(_of_unions(findings))]
    except VbpipeError as error:
        return None, [node.place.problem(str(error))]


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest choice, and nothing where none is near."""
    near = nearest(name, choices)
    return f" Did you mean {quote(near)}?" if near else ""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that looks most like `name`, None where none does."""
    folded = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), folded, n=1)
    return folded[found[0]] if found else None


def listing(label: str, choices: Iterable[str]) -> str:
    """Return " Labels: a, b." in alphabetical order; nothing where there are no choices."""
    names = sorted(choices)
    return f" {label}: {', '.join(names)}." if names else ""


def known_keys(model: type[BaseModel], steps: Steps = ()) -> set[str]:
    """Return the keys that `model` knows for the mapping at `steps`, by way of its JSON Schema."""
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})
    places = _alternatives(schema, definitions)
    for step in steps:
        places = [below for place in places for below in _below(place, step, definitions)]
    return {key for place in places for key in place.get("properties", {})}


@dataclass(frozen=True)
class _Finding:
    type: str
    steps: Steps
    union: tuple[Steps, str] | None
    """Where a union's member was tried, and which one."""
    is_key: bool
    context: Mapping[str, Any]
    message: str
    kind_differs: bool
    """The value isn't even of the kind that was wanted: text where a number belongs."""


_KINDS = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "model": "a mapping",
    "dict": "a mapping",
    "mapping": "a mapping",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen_set": "a list",
}
_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "is no name: use letters, digits, '.', '_', '-'; start with a letter or digit.",
    r"^[^:\s]+:[A-Za-z_][A-Za-z0-9_]*$": "is no reference: write file.py:function or package.module:function.",
}


def _finding(details: Mapping[str, Any], node: Node) -> _Finding:
    """Follow pydantic's location through the value; what doesn't exist there is the name of a union's member."""
    found: Node | None = node
    steps: list[str | int] = []
    union: tuple[Steps, str] | None = None
    location = details["loc"]
    is_key = location[-1:] == ("[key]",)
    for index, step in enumerate(location[:-1] if is_key else location):
        below = child(found, step) if found else None
        last = index == len(location) - 1
        if below is not None or (last and details["type"] == "missing"):
            steps.append(step)
            found = below
        else:
            union = union or (tuple(steps), str(step))
    kind = details["type"]
    differs = _kind(kind) in _KINDS or (kind == "literal_error" and not isinstance(details["input"], str))
    return _Finding(kind, tuple(steps), union, is_key, details.get("ctx", {}), details["msg"], differs)


def _kind(error_type: str) -> str:
    return re.sub(r"_(type|parsing|parsing_size|from_float|attributes_type|sub_type)$", "", error_type)


def _of_unions(findings: Sequence[_Finding]) -> list[_Finding]:
    """Keep, of each union, the member that was most likely meant."""
    kept: list[_Finding] = []
    done: set[Steps] = set()
    for finding in findings:
        if finding.union is None:
            kept.append(finding)
        elif finding.union[0] not in done:
            done.add(finding.union[0])
            kept += _likely([other for other in findings if other.union and other.union[0] == finding.union[0]])
    return kept


def _likely(findings: Sequence[_Finding]) -> list[_Finding]:
    members: dict[str, list[_Finding]] = {}
    for finding in findings:
        assert finding.union is not None
        members.setdefault(finding.union[1], []).append(finding)
    fitting = [
        member
        for member in members.values()
        if not any(finding.kind_differs and finding.union and finding.steps == finding.union[0] for finding in member)
    ]
    if fitting:
        return min(fitting, key=len)
    first = findings[0]
    wanted = dict.fromkeys(_wanted(member[0]) for member in members.values())
    message = " or ".join(wanted)
    return [_Finding("union", first.steps, None, False, {"wanted": message}, message, True)]


def _wanted(finding: _Finding) -> str:
    if finding.type == "literal_error":
        expected = str(finding.context["expected"])
        return f"one of {expected}" if "," in expected or " or " in expected else expected
    return _KINDS.get(_kind(finding.type), "something else")


@dataclass(frozen=True)
class _Author:
    """What was written, and what it should have been."""

    model: type[BaseModel]
    node: Node
    also: frozenset[str]

    def without_echoes(self, findings: Sequence[_Finding]) -> Iterator[_Finding]:
        """Leave out "x is missing" where a misspelt x beside it is reported anyway."""
        misspelt = set()
        for finding in findings:
            if finding.type == "extra_forbidden":
                *parent, key = finding.steps
                misspelt.add((*parent, nearest(str(key), self._free_keys(tuple(parent)))))
        for finding in findings:
            if finding.type != "missing" or finding.steps not in misspelt:
                yield finding

    def problem(self, finding: _Finding) -> Problem:
        steps = finding.steps
        found = locate(self.node, *steps)
        if found is None:
            parent = locate(self.node, *steps[:-1])
            assert parent is not None, "only the last step of a finding may be missing"
            return parent.place.problem(f"{quote(str(steps[-1]))} is missing here.", steps[-1])
        if finding.type == "extra_forbidden":
            return found.place.problem(self._unknown_key(tuple(steps[:-1]), str(steps[-1])))
        return found.place.problem(_message(finding, plain(found)))

    def _unknown_key(self, parent: Steps, key: str) -> str:
        meant = suggest(key, self._free_keys(parent)) or suggest(key, self._keys(parent))
        return f"no key {quote(key)}.{meant}{listing('Keys', self._keys(parent))}"

    def _free_keys(self, parent: Steps) -> set[str]:
        """Return the keys that could still be written there."""
        return self._keys(parent) - set(entries(locate(self.node, *parent)))

    def _keys(self, parent: Steps) -> set[str]:
        return known_keys(self.model, parent) | (set() if parent else self.also)


def _message(finding: _Finding, value: object) -> str:
    context = finding.context
    if finding.type in ("value_error", "assertion_error"):
        return _sentence(str(context.get("error", finding.message)))
    if finding.type == "string_pattern_mismatch":
        shown = quote(finding.steps[-1] if finding.is_key else value)
        return f"{shown} {_PATTERNS.get(context['pattern'], 'does not match the pattern ' + context['pattern'])}"
    if finding.type == "literal_error":
        choices = re.findall("'([^']*)'", context["expected"])
        return f"{quote(value)} is not {_wanted(finding)}.{suggest(str(value), choices)}"
    if finding.type == "union":
        return f"needs {context['wanted']}, not {quote(value)}.{_kind_hint(value)}"
    if _kind(finding.type) in _KINDS:
        return f"needs {_KINDS[_kind(finding.type)]}, not {quote(value)}.{_kind_hint(value, finding.type)}"
    return _limit(finding, value) or _sentence(finding.message.removeprefix("Input ").removeprefix("should "))


def _kind_hint(value: object, error_type: str = "") -> str:
    kind = _kind(error_type)
    if kind == "bool" and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return " In YAML 1.2 only true and false are."
    if value is None and kind in ("model", "dict", "mapping"):
        return " Write {} for an empty one."
    if kind == "string" and isinstance(value, bool | int | float):
        return " Put it in quotes."
    return ""


_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
    "multiple_of": ("a multiple of", "multiple_of"),
}
_LENGTHS = {
    "too_short": ("at least", "min_length", "entry", "entries"),
    "too_long": ("at most", "max_length", "entry", "entries"),
    "string_too_short": ("at least", "min_length", "character", "characters"),
    "string_too_long": ("at most", "max_length", "character", "characters"),
}


def _limit(finding: _Finding, value: object) -> str:
    if finding.type in _LIMITS:
        word, key = _LIMITS[finding.type]
        return f"must be {word} {finding.context[key]}, not {quote(value)}."
    if finding.type in _LENGTHS:
        word, key, one, many = _LENGTHS[finding.type]
        count = finding.context[key]
        return f"needs {word} {count} {one if count == 1 else many}."
    return ""


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _below(schema: Mapping[str, Any], step: str | int, definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if isinstance(step, int):
        prefix = schema.get("prefixItems", [])
        found = prefix[step] if step < len(prefix) else schema.get("items")
    else:
        found = schema.get("properties", {}).get(step, schema.get("additionalProperties"))
        for pattern in schema.get("patternProperties", {}).values():
            found = found if isinstance(found, dict) else pattern
    return _alternatives(found, definitions) if isinstance(found, dict) else []


def _alternatives(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "$ref" in schema:
        return _alternatives(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    members = [*schema.get("anyOf", []), *schema.get("oneOf", []), *schema.get("allOf", [])]
    return [schema, *(found for member in members for found in _alternatives(member, definitions))]
