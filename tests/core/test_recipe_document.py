"""YAML text in, a tree with places out: the core schema of YAML 1.2, and nothing that could hurt."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbpipe.errors import RecipeError
from vbpipe.recipe.document import MAX_BYTES, dotted, locate, parse, plain


def read(text: str) -> object:
    document = parse(text.encode(), "r.yaml")
    assert document.problems == ()
    return plain(document.root)


def problems(text: str | bytes) -> list[str]:
    try:
        found = parse(text if isinstance(text, bytes) else text.encode(), "r.yaml").problems
    except RecipeError as error:
        found = error.problems
    return [str(problem) for problem in found]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NO", "NO"),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("=", "="),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1e3", 1000.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("'12'", "12"),
        ('"true"', "true"),
        ("!!str 12", "12"),
        ("!!float 12", 12.0),
    ],
)
def test_a_scalar_is_read_by_the_core_schema(text: str, value: object) -> None:
    found = read(f"key: {text}")
    assert found == {"key": value}
    assert isinstance(found, dict)
    assert type(found["key"]) is type(value)


def test_a_key_that_looks_like_a_yaml_1_1_boolean_stays_text() -> None:
    assert read("on: 1\nNO: 2\n1:30: 3") == {"on": 1, "NO": 2, "1:30": 3}


def test_an_entrys_place_is_that_of_its_key_and_an_items_that_of_the_item() -> None:
    document = parse(b"a:\n  b: [x, {c: 1}]\n", "r.yaml")
    found = {}
    for steps in (("a",), ("a", "b"), ("a", "b", 0), ("a", "b", 1), ("a", "b", 1, "c")):
        node = locate(document.root, *steps)
        assert node is not None
        found[dotted(steps)] = (node.place.line, node.place.column)
        assert node.place.steps == steps
    assert found == {"a": (1, 1), "a.b": (2, 3), "a.b[0]": (2, 7), "a.b[1]": (2, 10), "a.b[1].c": (2, 11)}


def test_a_few_aliases_are_expanded() -> None:
    assert read("a: &x {b: 1}\nc: *x\nd: [*x, *x]") == {"a": {"b": 1}, "c": {"b": 1}, "d": [{"b": 1}, {"b": 1}]}


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    document = parse(b"\xef\xbb\xbfa: 1", "r.yaml")
    node = locate(document.root, "a")
    assert node is not None
    assert (node.place.line, node.place.column) == (1, 1)


BOMB = f"a: &a [{'x,' * 100}]\nb: &b [{'*a,' * 15}]\nc: [{'*b,' * 15}]\n"
MANY_ALIASES = f"a: &a x\nb: [{'*a,' * 33}]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "r.yaml:1:1: the file is empty"),
        ("# only a comment\n", "r.yaml:1:1: the file is empty"),
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3:1: a: written twice; the first is in line 1."),
        ("x:\n  a: {b: 1, b: 1}\n", "r.yaml:2:13: x.a.b: written twice"),
        ("a: {<<: {b: 1}}\n", "r.yaml:1:5: a: merge keys (<<) are not part of YAML 1.2"),
        ("a: !!python/object/apply:os.system [ls]\n", "r.yaml:1:1: a: the tag '!!python/object/apply:os.system'"),
        ("a: !foo bar\n", "r.yaml:1:1: a: the tag '!foo' is not allowed"),
        ("a: !!binary aGk=\n", "r.yaml:1:1: a: the tag '!!binary' is not allowed"),
        ("a: !!set {b}\n", "r.yaml:1:1: a: the tag '!!set' is not allowed"),
        ("a: !!int many\n", "r.yaml:1:1: a: 'many' is not a finite number"),
        ("a: !!bool many\n", "r.yaml:1:1: a: 'many' is no bool."),
        ("a: 1\n---\nb: 2\n", "r.yaml:2:1: a second document starts here"),
        ("a:\n  1: x\n", 'r.yaml:2:3: a: the key 1 is not text; write "1" in quotes.'),
        ("a: {true: x}\n", "r.yaml:1:5: a: the key true is not text"),
        ("? [a]\n: 1\n", "r.yaml:1:3: a key is text, not a list or a mapping."),
        ("a: {'': 1}\n", "r.yaml:1:5: a: an empty key."),
        ("k" * 201 + ": 1\n", "r.yaml:1:1: a key of more than 200 characters."),
        ("a: " + "[" * 60 + "]" * 60, "r.yaml:1:43: nested more than 40 deep."),
        ("a: &a [*a]\n", "aliases here stand for too much"),
        (BOMB, "aliases here stand for too much"),
        (MANY_ALIASES, "more than 32 aliases"),
        ("a: [" + "1," * 20_001 + "]", "more than 20000 values"),
        ("a:\n\t- 1\n", "r.yaml:2:1: a tab; YAML is indented with spaces."),
        ("a: [1, 2\nb: 3\n", "r.yaml:2:2: not valid YAML"),
        ("a: b: c\n", "r.yaml:1:5: not valid YAML: mapping values are not allowed here."),
        ("a: *b\n", "r.yaml:1:4: not valid YAML: found undefined alias"),
        ("a: .nan\n", "r.yaml:1:1: a: '.nan' is not a finite number"),
        ("a: -.inf\n", "r.yaml:1:1: a: '-.inf' is not a finite number"),
        ("a: 1e999\n", "r.yaml:1:1: a: '1e999' is not a finite number"),
        ("a: " + "9" * 5000, "is not a finite number of at most 64 bits."),
        ('a: "\\0"\n', "r.yaml:1:1: a: text with a control character."),
        ('a: "\\ud800"\n', "r.yaml:1:1: a: text with a control character."),
        ('a: "\\UFFFFFFFF"\n', "an escape or directive that YAML does not have."),
        (b"a: \xff\n", "r.yaml:1:4: not UTF-8 from here on."),
        (b"a: 1\nb: \x07\n", "r.yaml:2:4: the character U+0007 can't be in YAML."),
        ("a: 1\n".encode("utf-16"), "r.yaml:1:1: not UTF-8 from here on."),
        (b"#" * (MAX_BYTES + 1), "r.yaml: over 1 MiB; that is no recipe."),
    ],
)
def test_a_trap_is_refused_where_it_is(text: str | bytes, expected: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert expected in found[0]


def test_all_traps_of_a_file_are_reported() -> None:
    text = "a: !foo 1\nb: {1: x}\nc: .inf\nc: 2\n"
    assert [problem.split(": ")[0] for problem in problems(text)] == [
        f"r.yaml:{n}:{c}" for n, c in ((1, 1), (2, 5), (3, 1), (4, 1))
    ]


@given(st.binary(max_size=200) | st.text(alphabet="ab:-[]{}&*!<>|?#,'\"\\ \n\t%@`019.eU", max_size=80).map(str.encode))
def test_any_bytes_are_a_document_or_a_recipe_error(text: bytes) -> None:
    try:
        document = parse(text, "r.yaml")
    except RecipeError as error:
        assert error.problems
    else:
        value = plain(document.root)
        assert not isinstance(value, float) or math.isfinite(value)
