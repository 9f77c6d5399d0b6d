"""Read YAML text as a tree of plain values that know where they were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import yaml
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

from vbpipe.errors import Problem, RecipeError

MAX_BYTES = 2**20
MAX_NODES = 20_000
"""Counted after aliases are expanded, so an alias bomb meets it too."""
MAX_DEPTH = 40
MAX_ALIASES = 32
MAX_KEY_CHARS = 200

Steps = tuple["str | int", ...]
"""The way to a value: ("model", "outputs", 0)."""

Scalar = None | bool | int | float | str


@dataclass(frozen=True)
class Place:
    """Where a value was written. `line` and `column` count from 1 and point at a mapping entry's key; 0 is unknown."""

    file: str
    line: int
    column: int
    steps: Steps
    """The way to the value as written, which for a variant's change is not the way to what it changes."""

    def problem(self, message: str, *further: str | int) -> Problem:
        """Return a problem here, `further` steps below this place."""
        return Problem(self.file, self.line, self.column, dotted((*self.steps, *further)), message)


@dataclass(frozen=True)
class Node:
    """A value and its place; mappings keep the order of the file."""

    place: Place
    value: Scalar | Mapping[str, Node] | tuple[Node, ...]


@dataclass(frozen=True)
class Document:
    """What could be read, and what is wrong with the text. Refused values are None in the tree."""

    root: Node
    problems: tuple[Problem, ...]


def parse(text: bytes, file: str) -> Document:
    """Read one YAML 1.2 document of the core schema: `NO`, `on`, `1:30` and `2024-01-01` are the text they look like.

    Refused: duplicate, empty and non-text keys, `<<`, tags beyond the core schema, numbers that JSON can't carry,
    control characters, and anything over the limits above.

    Raises:
        RecipeError: the text isn't YAML at all, so there is no tree.
    """
    loader = _Loader(_decode(text, file))
    try:
        tree = loader.single_document()
    except _RefusedError as error:
        raise RecipeError([_at_mark(file, error.event.start_mark, error.message)]) from error
    except yaml.MarkedYAMLError as error:
        raise RecipeError([_at_mark(file, error.problem_mark or error.context_mark, _syntax_message(error))]) from error
    except (ValueError, OverflowError) as error:
        # PyYAML computes chr() and int() of escapes and directives without looking at their size first.
        raise RecipeError(
            [_at_mark(file, loader.get_mark(), "an escape or directive that YAML does not have.")]
        ) from error
    finally:
        loader.dispose()
    if tree is None:
        raise RecipeError([Problem(file, 1, 1, "", "the file is empty. `vbpipe init` writes a first recipe.")])
    conversion = _Conversion(file)
    root = conversion.node(tree, Place(file, 1, 1, ()), depth=0)
    return Document(root, tuple(conversion.problems))


def plain(node: Node) -> object:
    """Return the value without its places: dict, list, str, int, float, bool or None."""
    if isinstance(node.value, Mapping):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(child) for child in node.value]
    return node.value


def child(node: Node, step: str | int) -> Node | None:
    """Return what is one step below, None where there is nothing."""
    if isinstance(node.value, Mapping) and isinstance(step, str):
        return node.value.get(step)
    if isinstance(node.value, tuple) and isinstance(step, int) and 0 <= step < len(node.value):
        return node.value[step]
    return None


def locate(node: Node, *steps: str | int) -> Node | None:
    """Return what is all these steps below, None where there is nothing."""
    found: Node | None = node
    for step in steps:
        found = child(found, step) if found else None
    return found


def entries(node: Node | None) -> Mapping[str, Node]:
    """Return the entries of a mapping; none where it is something else."""
    return node.value if node is not None and isinstance(node.value, Mapping) else {}


def items(node: Node | None) -> tuple[Node, ...]:
    """Return the items of a list; none where it is something else."""
    return node.value if node is not None and isinstance(node.value, tuple) else ()


def dotted(steps: Steps) -> str:
    """Return the way as people write it: "model.outputs[0]"."""
    text = ""
    for step in steps:
        part = f"[{step}]" if isinstance(step, int) else quote(step, marks="")
        text += part if isinstance(step, int) or not text else f".{part}"
    return text


def quote(value: object, marks: str = "'") -> str:
    """Return a value as an error shows it, cut to a readable length."""
    text = value if isinstance(value, str) else _yaml_like(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{marks}{text}{marks}" if isinstance(value, str) else text


def _yaml_like(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else str(value)


_YAML = "tag:yaml.org,2002:"


class _Mark(Protocol):
    """PyYAML's marks, of which there are two classes. Counts from 0."""

    line: int
    column: int


class _RefusedError(Exception):
    def __init__(self, event: yaml.Event, message: str) -> None:
        super().__init__(message)
        self.event = event
        self.message = message


class _Loader(yaml.SafeLoader):
    """PyYAML resolves YAML 1.1; these are the rules of YAML 1.2's core schema (yaml.org/spec/1.2.2, 10.3.2)."""

    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]  # the stubs call it an instance's; PyYAML reads the class
        None: [
            (f"{_YAML}null", re.compile(r"(?:null|Null|NULL|~|)\Z")),
            (f"{_YAML}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")),
            (f"{_YAML}int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")),
            (f"{_YAML}float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")),
            (f"{_YAML}float", re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")),
        ]
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._aliases = self._depth = 0

    def single_document(self) -> yaml.Node | None:
        """Return the document's node, None for an empty file."""
        self.get_event()  # type: ignore[no-untyped-call]  # the stubs lack it
        if self.check_event(yaml.StreamEndEvent):
            return None
        node = self.compose_document()
        if not self.check_event(yaml.StreamEndEvent):
            raise _RefusedError(self._next_event(), "a second document starts here; a recipe is one document.")
        return node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self._next_event()
        self._nodes += 1
        self._aliases += isinstance(event, yaml.AliasEvent)
        if self._nodes > MAX_NODES:
            raise _RefusedError(event, f"more than {MAX_NODES} values; a recipe is smaller than that.")
        if self._aliases > MAX_ALIASES:
            raise _RefusedError(event, f"more than {MAX_ALIASES} aliases; write the values out.")
        if self._depth >= MAX_DEPTH:
            raise _RefusedError(event, f"nested more than {MAX_DEPTH} deep.")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def _next_event(self) -> yaml.Event:
        return self.peek_event()  # type: ignore[no-untyped-call,no-any-return]  # the stubs lack it


class _Conversion:
    """One walk from PyYAML's nodes to ours; holds what the walk has found so far."""

    def __init__(self, file: str) -> None:
        self.problems: list[Problem] = []
        self._file = file
        self._count = 0

    def node(self, source: yaml.Node, place: Place, depth: int) -> Node:
        self._count += 1
        if self._count > MAX_NODES or depth > MAX_DEPTH:
            # Only aliases get here: what is written out was counted while it was composed.
            raise RecipeError([*self.problems, place.problem("aliases here stand for too much; write the values out.")])
        if isinstance(source, MappingNode) and source.tag == f"{_YAML}map":
            return Node(place, self._entries(source, place, depth))
        if isinstance(source, SequenceNode) and source.tag == f"{_YAML}seq":
            found = enumerate(source.value)
            return Node(place, tuple(self.node(item, self._place(item, place, i), depth + 1) for i, item in found))
        if isinstance(source, ScalarNode):
            return Node(place, self._scalar(source, place))
        self._refuse_tag(source, place)
        return Node(place, None)

    def _entries(self, source: MappingNode, place: Place, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for key_node, value_node in source.value:
            key = self._key(key_node, place)
            if key is None:
                continue
            at = self._place(key_node, place, key)
            if key in found:
                self.problems.append(at.problem(f"written twice; the first is in line {found[key].place.line}."))
            found.setdefault(key, self.node(value_node, at, depth + 1))
        return found

    def _key(self, node: yaml.Node, parent: Place) -> str | None:
        mark = node.start_mark
        at = Place(self._file, mark.line + 1, mark.column + 1, parent.steps)
        text = node.value if isinstance(node, ScalarNode) else ""
        if not isinstance(node, ScalarNode):
            message = "a key is text, not a list or a mapping."
        elif text == "<<" and not node.style:
            message = "merge keys (<<) are not part of YAML 1.2; write the entries out."
        elif node.tag != f"{_YAML}str":
            message = f'the key {quote(text, marks="")} is not text; write "{quote(text, marks="")}" in quotes.'
        elif not text:
            message = "an empty key."
        elif len(text) > MAX_KEY_CHARS:
            message = f"a key of more than {MAX_KEY_CHARS} characters."
        elif _CONTROL.search(text):
            message = "a key with a control character."
        else:
            return str(text)
        self.problems.append(at.problem(message))
        return None

    def _scalar(self, node: ScalarNode, place: Place) -> Scalar:
        text: str = node.value
        tag = node.tag.removeprefix(_YAML)
        if tag == "str" and _CONTROL.search(text):
            self.problems.append(place.problem("text with a control character."))
        elif tag == "str":
            return text
        elif tag in _CONSTANTS:
            if text.lower() in _CONSTANTS[tag]:
                return _CONSTANTS[tag][text.lower()]
            self.problems.append(place.problem(f"{quote(text)} is no {tag}."))
        elif tag in ("int", "float"):
            return self._number(text, tag, place)
        else:
            self._refuse_tag(node, place)
        return None

    def _number(self, text: str, tag: str, place: Place) -> int | float | None:
        try:
            if tag == "float":
                number: int | float = float(text.replace(".inf", "inf").replace(".nan", "nan"))
            else:
                number = int(text, 0 if text[:2] in ("0x", "0o") else 10)
        except ValueError:
            # Too many digits for Python, or `!!int abc`.
            number = float("inf")
        if -(2**63) <= number < 2**63 or (tag == "float" and abs(number) < float("inf")):
            return number
        self.problems.append(place.problem(f"{quote(text)} is not a finite number of at most 64 bits."))
        return None

    def _refuse_tag(self, node: yaml.Node, place: Place) -> None:
        tag = node.tag.replace(_YAML, "!!")
        self.problems.append(
            place.problem(f"the tag {quote(tag)} is not allowed here: a recipe is plain data. Remove it.")
        )

    def _place(self, node: yaml.Node, parent: Place, step: str | int) -> Place:
        return Place(self._file, node.start_mark.line + 1, node.start_mark.column + 1, (*parent.steps, step))


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_CONSTANTS: Mapping[str, Mapping[str, Scalar]] = {
    "null": {"": None, "~": None, "null": None},
    "bool": {"true": True, "false": False},
}


def _decode(text: bytes, file: str) -> str:
    if len(text) > MAX_BYTES:
        raise RecipeError([Problem(file, 0, 0, "", f"over {MAX_BYTES // 2**20} MiB; that is no recipe.")])
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _line_column(text[: error.start].decode("utf-8", "replace"))
        raise RecipeError(
            [Problem(file, line, column, "", "not UTF-8 from here on. Save the file as UTF-8.")]
        ) from error
    unprintable = yaml.reader.Reader.NON_PRINTABLE.search(decoded)
    if unprintable:
        line, column = _line_column(decoded[: unprintable.start()])
        code = f"U+{ord(unprintable.group()):04X}"
        raise RecipeError([Problem(file, line, column, "", f"the character {code} can't be in YAML. Remove it.")])
    return decoded


def _line_column(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _at_mark(file: str, mark: _Mark | None, message: str) -> Problem:
    return Problem(file, mark.line + 1 if mark else 0, mark.column + 1 if mark else 0, "", message)


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    what = (error.problem or "not YAML").strip()
    if "\\t" in what:
        return "a tab; YAML is indented with spaces."
    what = what.replace("<", "").replace(">", "")
    within = f" {error.context}" if error.context else ""
    return f"not valid YAML: {what}{within}."
