"""Turn a loaded recipe into steps: what runs, on what, in which order."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from pydantic import BaseModel

from vbpipe import plugins
from vbpipe.core import Stage, canonical
from vbpipe.decide import BASELINE
from vbpipe.errors import UsageError
from vbpipe.recipe.model import Recipe, Target
from vbpipe.runner import Runner, defining_runner, pending_on, runner_for

REFERENCE, ENGINE = "reference", "engine"
CHECKED_AGAINST = ("reference", "samples")
"""What every runnable step is compared with before anybody builds on it."""


@dataclass(frozen=True)
class Step:
    """One configured stage and the steps it reads. Variants and targets that would do the same share the step."""

    id: str
    label: str
    stage: Stage
    needs: Mapping[str, str]
    """Input name to step id."""
    identities: tuple[str, ...] = ()
    """"recipe/variant/target/label" of every chain that it belongs to."""
    runner: Runner | None = None
    """Who runs what it produces for the comparison with eager; None when nothing does, as for an engine that this host
    can't run. Steps that targets share are compared as the kind's format defines it, whatever the targets' options: the
    outcome must not depend on who asks first."""


@dataclass(frozen=True)
class Chain:
    """The steps of one variant on one target, in order."""

    variant: str
    target: str
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that a build does. `steps` is in an order in which each step follows what it needs."""

    recipe: str
    steps: Mapping[str, Step]
    chains: tuple[Chain, ...]
    rows: Mapping[str, Mapping[str, str]]
    """Target to row name ("int8/quantize") to step id: everything that is measured."""
    targets: Mapping[str, Target]
    finals: Mapping[str, Mapping[str, str]]
    """Target to stage name to step id, for the steps that close a target (benchmark, gate, package)."""
    pending: Mapping[str, str] = field(default_factory=dict)
    """Target to what its engines need and this host lacks; targets whose engines run here are not in it."""


@runtime_checkable
class SubjectStage(Protocol):
    """A stage of scope "each": it is configured anew for every artifact that it looks at."""

    def for_subject(self, kind: str, runner: Runner) -> Stage:
        """Return the stage that looks at an artifact of `kind`, run by `runner`."""


@runtime_checkable
class TargetStage(Protocol):
    """A stage of scope "target": it is told the rows of the target and how the variants' chains are made of them."""

    def for_target(self, layout: Layout) -> Stage:
        """Return the stage for this target."""


@dataclass(frozen=True)
class Layout:
    """What a target-wide stage is told."""

    target: str
    chains: Mapping[str, tuple[str, ...]]
    """Variant to its row names, first to last."""
    runners: Mapping[str, Runner]
    """Row name to who runs it on this target."""
    previous: Mapping[str, str]
    """Row name to the row that its step was made from."""
    pending: str | None = None
    """What the target's engines need and this host lacks: nothing is timed, and no engine is run."""


def make_plan(
    name: str,
    variants: Mapping[str, Recipe],
    *,
    only_variants: Sequence[str] = (),
    only_targets: Sequence[str] = (),
) -> Plan:
    """Return the plan of a recipe.

    Args:
        name: the recipe's name.
        variants: variant name to the recipe with that variant's changes applied, the reference first.
        only_variants: build just these; all when empty.
        only_targets: build just these; all when empty.

    Raises:
        UsageError: a variant or target that does not exist, or a stage whose input nothing makes.
    """
    chosen = _choose("variant", variants, only_variants)
    all_targets = next(iter(chosen.values())).targets
    draft = _Draft(name)
    for target_name, target in _choose("target", all_targets, only_targets).items():
        draft.add_target(target_name, target, chosen)
    return draft.finish()


def stage_order() -> tuple[str, ...]:
    """Return the names of all stages, each behind those it comes after."""
    pending = {name: set(plugins.stage(name).after) for name in sorted(plugins.names("stages"))}
    ordered: list[str] = []
    while pending:
        ready = [name for name, after in pending.items() if not after & pending.keys()]
        if not ready:
            raise UsageError(f"stages {sorted(pending)} wait for each other.", hint="Correct their `after`.")
        for name in ready:
            ordered.append(name)
            del pending[name]
    return tuple(ordered)


@dataclass
class _Draft:
    recipe: str
    steps: dict[str, Step] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    finals: dict[str, dict[str, str]] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)

    def add_target(self, target_name: str, target: Target, variants: Mapping[str, Recipe]) -> None:
        self.targets[target_name] = target
        lacking = pending_on(target)
        if lacking:
            self.pending[target_name] = lacking
        runnable: dict[str, list[tuple[str, str]]] = {}
        for variant, recipe in variants.items():
            runnable[variant] = self._add_chain(variant, recipe, target_name, recipe.targets[target_name])
        names = _row_names(runnable)
        self.rows[target_name] = {name: step for step, name in names.items()}
        # What closes a target is configured from the reference variant: gates and scenarios hold for all variants.
        reference = next(iter(variants.values()))
        chains = {variant: tuple(names[step] for step, _ in steps) for variant, steps in runnable.items()}
        self._add_finals(reference, target_name, self._layout(target_name, target, chains, names), names)

    def finish(self) -> Plan:
        return Plan(
            recipe=self.recipe,
            steps=self.steps,
            chains=tuple(self.chains),
            rows=self.rows,
            targets=self.targets,
            finals=self.finals,
            pending=self.pending,
        )

    def _add_chain(self, variant: str, recipe: Recipe, target_name: str, target: Target) -> list[tuple[str, str]]:
        newest: dict[str, str] = {}
        in_order: list[str] = []
        runnable: list[tuple[str, str]] = []
        for stage in _configured(recipe, target, "chain"):
            needs = _inputs(stage, newest, f"variant {variant}, target {target_name}")
            identity = f"{self.recipe}/{variant}/{target_name}/{stage.label()}"
            kind = stage.produces()
            elsewhere = kind == ENGINE and target_name in self.pending
            runner = _checking_runner(kind, target) if _is_runnable(kind) and not elsewhere else None
            if runner is not None and kind != REFERENCE:
                # Read by the comparison with eager that follows the step itself.
                needs |= {common: newest[common] for common in CHECKED_AGAINST if common in newest}
            step = self._add(stage, needs, identity, runner)
            newest[kind] = step
            in_order.append(step)
            if _is_runnable(kind):
                runnable.append((step, stage.label()))
        self.chains.append(Chain(variant, target_name, tuple(in_order)))
        if ENGINE not in newest:
            raise UsageError(f"no stage builds an engine for variant {variant!r}.", where=f"targets.{target_name}")
        self._add_probes(recipe, variant, target_name, target, runnable, newest)
        return runnable

    def _add_probes(
        self,
        recipe: Recipe,
        variant: str,
        target_name: str,
        target: Target,
        runnable: Sequence[tuple[str, str]],
        newest: Mapping[str, str],
    ) -> None:
        for template in _configured(recipe, target, "each"):
            baseline: str | None = None
            for subject, label in runnable:
                kind = self.steps[subject].stage.produces()
                if kind == ENGINE and target_name in self.pending:
                    continue
                stage = cast(SubjectStage, template).for_subject(kind, runner_for(kind, target))
                needs = {kind: newest[kind] for kind in sorted(stage.consumes()) if kind in newest}
                needs["subject"] = subject
                if baseline is not None:
                    needs["baseline"] = baseline
                identity = f"{self.recipe}/{variant}/{target_name}/{label}/{stage.label()}"
                added = self._add(stage, needs, identity, None)
                baseline = added if kind == REFERENCE else baseline

    def _layout(
        self, target_name: str, target: Target, chains: Mapping[str, tuple[str, ...]], names: Mapping[str, str]
    ) -> Layout:
        runners = {name: runner_for(self.steps[step].stage.produces(), target) for step, name in names.items()}
        previous = {name: names[before] for step, name in names.items() if (before := self._made_from(step, names))}
        pending = self.pending.get(target_name)
        return Layout(target=target_name, chains=chains, runners=runners, previous=previous, pending=pending)

    def _made_from(self, step_id: str, names: Mapping[str, str]) -> str | None:
        """Return the measured step whose result this one turns into its own; eager only where there is no other."""
        step = self.steps[step_id]
        read = [step.needs[kind] for kind in sorted(step.stage.consumes()) if step.needs.get(kind) in names]
        graphs = [i for i in read if self.steps[i].stage.produces() != REFERENCE]
        return next(iter(graphs or read), None)

    def _add_finals(self, recipe: Recipe, target_name: str, layout: Layout, names: Mapping[str, str]) -> None:
        target = recipe.targets[target_name]
        made: dict[str, str] = {}
        finals = self.finals.setdefault(target_name, {})
        for template in _configured(recipe, target, "target"):
            stage = cast(TargetStage, template).for_target(layout)
            wanted = stage.consumes()
            rows = self.rows[target_name]
            needs = {name: step for name, step in rows.items() if self.steps[step].stage.produces() in wanted}
            if "evaluation" in wanted:
                needs |= {f"{names[s.needs['subject']]}@{s.label}": s.id for s in self._probes(names)}
            if "samples" in wanted:
                needs["samples"] = self.steps[rows[BASELINE]].needs["samples"]
            needs |= {kind: step for kind, step in made.items() if kind in wanted}
            identity = f"{self.recipe}/*/{target_name}/{stage.label()}"
            made[stage.produces()] = finals[stage.name] = self._add(stage, needs, identity, None)

    def _probes(self, names: Mapping[str, str]) -> Iterator[Step]:
        for step in self.steps.values():
            if step.needs.get("subject") in names:
                yield step

    def _add(self, stage: Stage, needs: Mapping[str, str], identity: str, runner: Runner | None) -> str:
        assert isinstance(stage, BaseModel)
        text = json.dumps([stage.name, canonical(stage), sorted(needs.items())])
        step_id = hashlib.sha256(text.encode()).hexdigest()[:16]
        known = self.steps.get(step_id)
        identities = (*known.identities, identity) if known else (identity,)
        self.steps[step_id] = Step(step_id, stage.label(), stage, dict(needs), identities, runner)
        return step_id


def _choose(what: str, there: Mapping[str, Any], asked: Sequence[str]) -> dict[str, Any]:
    for name in asked:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"the recipe has no {what} {name!r}; it has {', '.join(there)}.{guess}", where=f"--{what}")
    return {name: value for name, value in there.items() if not asked or name in asked}


def _configured(recipe: Recipe, target: Target, scope: str) -> Iterator[Stage]:
    for name in stage_order():
        cls = plugins.stage(name)
        if cls.scope == scope:
            yield from cls.configure(recipe, target)


def _inputs(stage: Stage, newest: Mapping[str, str], where: str) -> dict[str, str]:
    missing = sorted(stage.consumes() - newest.keys())
    if missing:
        raise UsageError(
            f"step {stage.label()} reads {missing[0]!r}, which no step before it makes.",
            where=where,
            hint="Add the format to stages.export.formats, or leave that stage out.",
        )
    return {kind: newest[kind] for kind in sorted(stage.consumes())}


def _is_runnable(kind: str) -> bool:
    return any(kind in plugins.backend(name).runs for name in plugins.names("backends"))


def _checking_runner(kind: str, target: Target) -> Runner:
    return runner_for(kind, target) if kind == ENGINE else defining_runner(kind) or runner_for(kind, target)


def _row_names(runnable: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, str]:
    """Return step id to row name: the bare label where all variants share the step, else with who uses it.

    The reference variant's eager is "eager", which ratios are taken over, also where other variants have their own.
    """
    names: dict[str, str] = {}
    for variant, steps in runnable.items():
        for step, label in steps:
            users = [name for name, theirs in runnable.items() if any(step == other for other, _ in theirs)]
            bare = len(users) == len(runnable) > 1 or (label == BASELINE and BASELINE not in names.values())
            names.setdefault(
                step, label if bare else f"{'+'.join(users)}/{label}" if len(users) > 1 else f"{variant}/{label}"
            )
    return names
