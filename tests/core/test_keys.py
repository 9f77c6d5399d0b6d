"""Cache keys: what must change them does, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from vbpipe.core import Spec, canonical
from vbpipe.recipe.model import Model


class Options(Spec):
    a: int = 1
    b: str | None = None
    c: Mapping[str, Any] = {}


class MoreOptions(Options):
    new: int | None = None


def test_an_optional_field_that_is_new_and_unset_changes_no_key() -> None:
    assert canonical(Options()) == canonical(MoreOptions())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"p": None}, {}),
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({"a[0]": 1}, {"a": [1]}),
        ({"a": 1}, {"a": "1"}),
        ({"a": True}, {"a": 1}),
        ({"a": []}, {"a": {}}),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
    ],
)
def test_different_values_of_users_have_different_leaves(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(Options(c=one)) != canonical(Options(c=other))


def test_the_order_of_inputs_is_part_of_the_key_because_forward_binds_by_position() -> None:
    inputs = {"x": {"dtype": "float32", "shape": [2]}, "y": {"dtype": "float32", "shape": [2]}}
    given = {"factory": "net.py:build", "outputs": ["z"]}
    one = Model.model_validate({**given, "inputs": inputs})
    other = Model.model_validate({**given, "inputs": dict(reversed(inputs.items()))})
    assert canonical(one) != canonical(other)
