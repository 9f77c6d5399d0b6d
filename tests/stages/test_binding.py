from __future__ import annotations

import pytest

from vbpipe.errors import VbpipeError
from vbpipe_stages._binding import bind, nest


def call(names: list[str], forward):
    """Call `forward` with the names themselves in place of tensors."""
    args, kwargs = bind(names, forward).fill(names)
    return forward(*args, **kwargs)


def test_names_that_are_parameters_arrive_there_in_any_order() -> None:
    assert call(["b", "a"], lambda a, b: (a, b)) == ("a", "b")


def test_names_that_are_no_parameters_arrive_in_order() -> None:
    assert call(["ids", "mask"], lambda x, y: (x, y)) == ("ids", "mask")
    assert call(["x", "b", "c"], lambda a, b, c: (a, b, c)) == ("x", "b", "c")


def test_positional_only_parameters_take_places_even_under_their_own_name() -> None:
    def forward(a, b, /, c):
        return a, b, c

    assert call(["a", "b", "c"], forward) == ("a", "b", "c")
    assert call(["p", "q", "c"], forward) == ("p", "q", "c")


def test_keyword_only_parameters_are_given_by_keyword() -> None:
    assert call(["x", "mask"], lambda x, *, mask, scale=2: (x, mask, scale)) == ("x", "mask", 2)


def test_variable_arguments_take_what_is_left() -> None:
    assert call(["x", "y", "z"], lambda x, *rest: (x, rest)) == ("x", ("y", "z"))
    assert call(["x", "mask"], lambda x, flag=None, **rest: (x, flag, rest)) == ("x", None, {"mask": "mask"})
    assert call(["x", "mask"], lambda *args, **rest: (args, rest)) == (("x", "mask"), {})


def test_defaults_between_given_parameters_stay() -> None:
    assert call(["a", "c"], lambda a, b=7, c=None: (a, b, c)) == ("a", 7, "c")


def test_dots_nest_and_digits_make_lists() -> None:
    names = ["state.h", "state.c", "past.0.k", "past.0.v", "past.1.k", "past.1.v"]
    assert nest(names) == {"state": {"h": 0, "c": 1}, "past": [{"k": 2, "v": 3}, {"k": 4, "v": 5}]}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["past.0", "past.2"], "without a gap"),
        (["past.0", "past.h"], "without a gap"),
        (["state", "state.h"], "lies inside another input"),
        (["state.h", "state"], "holds other inputs"),
    ],
)
def test_names_that_can_not_nest_are_refused(names, words) -> None:
    with pytest.raises(VbpipeError, match=words):
        nest(names)


def test_a_required_parameter_that_is_not_listed_is_named() -> None:
    with pytest.raises(VbpipeError, match=r"requires 'mask'.*lists \['x'\]"):
        bind(["x"], lambda x, mask: None)


def test_an_input_without_a_place_is_named_with_what_forward_takes() -> None:
    with pytest.raises(VbpipeError, match=r"no parameter 'extra' and no position left; it takes \['x'\]"):
        bind(["x", "extra"], lambda x: None)
