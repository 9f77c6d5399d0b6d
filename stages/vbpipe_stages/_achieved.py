"""Compare the precision that a recipe asked for with the one that an engine computes in, module by module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TYPES = frozenset({"int8", "int4", "fp8", "fp16", "bf16"})
_NAMED = 4


@dataclass(frozen=True)
class Achieved:
    """What came of the modules that were to get another type.

    Args:
        asked: module to the types that its operators with weights were to have.
        missed: those of them that don't compute in one of these, to what they compute in instead.
        unknown: those of whose operators the engine shows nothing.
    """

    asked: Mapping[str, tuple[str, ...]]
    missed: Mapping[str, str]
    unknown: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        """Return whether not one of them computes in the type that it was to have."""
        return bool(self.asked) and len(self.missed) == len(self.asked)

    def describe(self) -> str:
        """Return a clause that names what was missed; empty where nothing was."""
        if not self.missed:
            return ""
        named = list(self.missed)[:_NAMED]
        more = f" and {len(self.missed) - len(named)} more" if len(self.missed) > len(named) else ""
        told = ", ".join(f"{name} ({' and '.join(self.asked[name])} asked, {self.missed[name]})" for name in named)
        return (
            f"{len(self.missed)} of {len(self.asked)} quantized modules don't compute in the type asked: {told}{more}"
        )


def compare(forms: Mapping[str, str], computed: Mapping[str, tuple[str, ...]]) -> Achieved:
    """Return what came of what was asked.

    Args:
        forms: module to its forms as the quantize step wrote them: "static int8; float".
        computed: module to what its operators compute in, see `Inspectable`.
    """
    asked = {module: types for module, text in forms.items() if (types := _types(text))}
    unknown = tuple(module for module in asked if module not in computed)
    missed = {
        module: " and ".join(computed[module])
        for module, types in asked.items()
        if module in computed and not set(types) <= set(computed[module])
    }
    return Achieved(asked, missed, unknown)


def _types(text: str) -> tuple[str, ...]:
    """Return the type of each form's weights: the first that is named, before "in fp16"."""
    found = (next((word for word in form.split() if word in TYPES), None) for form in text.split("; "))
    return tuple(dict.fromkeys(kind for kind in found if kind is not None))
