"""Run one group: start a fresh worker per candidate, warm all up, then time them in turn."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

from vbpipe.measure import facts, messages, placement, planning
from vbpipe.measure.process import Ask, Failure, Worker, close_all, exchange
from vbpipe.measure.record import Candidate, Group, Outcome, Scenario, ScenarioRun, Settings, WorkerRun

Progress = Callable[[float | None, str], None]

_START_SLOTS = 2
_PATIENCE = 10  # times what a request should take, on top of the limit for one call

ReplyType = TypeVar("ReplyType", bound=messages.Reply)


@dataclass(frozen=True)
class Bench:
    """What stays the same over all groups. `deadline` is on the monotonic clock.

    `standing` is what the groups so far say, for people who watch.
    """

    scenarios: tuple[Scenario, ...]
    expected: Mapping[str, Path]
    settings: Settings
    logs: Path
    deadline: float
    progress: Progress
    standing: str = ""

    def tell(self, index: int, message: str) -> None:
        """Report on group `index`: how far the whole is, and what is going on."""
        self.progress(_share_done(self, index), f"{self.standing}group {index + 1}: {message}")


def run_group(
    bench: Bench, candidates: Sequence[Candidate], before: Sequence[Group]
) -> tuple[Group, tuple[Outcome, ...]]:
    """Run the group that follows `before`; return it and what became of the candidates that failed in it."""
    begin, load_1m = time.monotonic(), facts.load_1m()
    settings, index = bench.settings, len(before)
    chance = random.Random(f"{settings.seed}/{index}")  # noqa: S311  # an order, not a secret
    logs = [bench.logs / f"{index}-{place}.log" for place in range(len(candidates))]
    crew = _Crew({one.name: Worker(log, settings.threads) for one, log in zip(candidates, logs, strict=True)})
    orderly = False
    try:
        bench.tell(index, f"starting {len(candidates)} workers")
        opened = _open(bench, crew, chance.sample(list(candidates), len(candidates)))
        start_s = time.monotonic() - begin
        allowed_s = _allowed_s(bench, before, start_s)
        bench.tell(index, "warming up")
        warmed = _warm(bench, crew, opened, allowed_s, chance)
        _pin(bench, crew, chance)
        warm_s = time.monotonic() - begin - start_s
        call_s, scatter = _call_s(warmed), planning.round_scatter(before)
        plan = planning.plan_blocks(call_s, allowed_s - warm_s, start_s + warm_s, scatter, settings)
        blocks = _time_blocks(bench, crew, plan, call_s, chance, index)
        switching_s = _PATIENCE * 2 * sum(call_s.values())
        finishing = {name: messages.Finish() for name in crew.live}
        finished = crew.ask(finishing, messages.Finished, _START_SLOTS, settings, switching_s)
        work_s = time.monotonic() - begin - start_s
        orderly = True
    finally:
        close_all(list(crew.workers.values()), at_once=not orderly)
    wall_s = time.monotonic() - begin
    runs = tuple(
        _worker_run(name, crew.workers[name], opened[name], finished[name], warmed, blocks) for name in finished
    )
    group = Group(
        workers=runs,
        orders=blocks.orders,
        wall_s=wall_s,
        overhead_s=wall_s - work_s,
        load_1m=load_1m,
        steal_share=blocks.load.steal_share,
        throttled=blocks.load.throttled,
        other_cpus=blocks.load.other_cpus,
    )
    return group, tuple(crew.failed.values())


def opening(
    candidate: Candidate, scenarios: Sequence[Scenario], expected: Mapping[str, Path], settings: Settings
) -> messages.Open:
    """Return the request that opens a candidate; `expected` holds for candidates without outputs of their own."""
    right = expected if candidate.expected is None else candidate.expected
    return messages.Open(
        backend=candidate.backend,
        options=candidate.options,
        kind=candidate.kind,
        path=candidate.path,
        root=candidate.root,
        threads=settings.threads,
        cpus=settings.cpus,
        memory_limit_mib=settings.memory_limit_mib,
        min_cosine=candidate.min_cosine,
        slowdown=candidate.slowdown,
        loads=tuple(messages.Load(one.name, one.inputs, right.get(one.name)) for one in scenarios),
    )


class _Crew:
    """The workers of one group, and which of them have failed."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self.workers = workers
        self.failed: dict[str, Outcome] = {}

    @property
    def live(self) -> list[str]:
        """Return the names of the candidates whose workers have not failed."""
        return [name for name in self.workers if name not in self.failed]

    def ask(
        self,
        requests: Mapping[str, messages.Request],
        expected: type[ReplyType],
        slots: int,
        settings: Settings,
        extra_s: float = 0.0,
    ) -> dict[str, ReplyType]:
        """Put one request to each named worker and return the answers; a worker without one is killed and out."""
        timeout_s = settings.call_timeout_s + extra_s
        asks = [Ask(self.workers[name], request, timeout_s) for name, request in requests.items()]
        replies = exchange(asks, slots)
        answers: dict[str, ReplyType] = {}
        for name in requests:
            reply = replies[self.workers[name]]
            if isinstance(reply, Failure):
                self.workers[name].kill()
                self.failed[name] = Outcome(name, reply.status, reply.message, reply.log_tail)
            else:
                assert isinstance(reply, expected), "a worker answers what it was asked"
                answers[name] = reply
        return answers


@dataclass(frozen=True)
class _Blocks:
    """Times of all rounds, by candidate and scenario."""

    ns: Mapping[planning.Pair, tuple[tuple[int, ...], ...]]
    cpus_used: Mapping[planning.Pair, float]
    orders: Mapping[str, tuple[tuple[str, ...], ...]]
    load: _Load


@dataclass(frozen=True)
class _Load:
    """What else went on during the blocks; see `Group`."""

    steal_share: float
    throttled: int
    other_cpus: float


@dataclass(frozen=True)
class _Ticks:
    """Processor time so far: the host's, that of this process and its workers, and the wall clock."""

    host: facts.CpuTicks
    own: int
    throttled: int
    at_s: float = field(default_factory=time.monotonic)


def _open(bench: Bench, crew: _Crew, order: Sequence[Candidate]) -> dict[str, messages.Opened]:
    settings = bench.settings
    requests: dict[str, messages.Request] = {
        one.name: opening(one, bench.scenarios, bench.expected, settings) for one in order
    }
    extra_s = max(0.0, settings.start_timeout_s - settings.call_timeout_s)
    return crew.ask(requests, messages.Opened, _START_SLOTS, settings, extra_s)


def _allowed_s(bench: Bench, before: Sequence[Group], start_s: float) -> float:
    groups_left = max(1, bench.settings.min_groups - len(before))
    # The least so far: in a group where a worker hung, starting took as long as the limit.
    overhead_s = min(group.overhead_s for group in before) if before else 1.05 * start_s
    return planning.allowance_s(bench.deadline - time.monotonic(), groups_left, overhead_s)


def _warm(
    bench: Bench, crew: _Crew, opened: Mapping[str, messages.Opened], allowed_s: float, chance: random.Random
) -> dict[planning.Pair, messages.Warmed]:
    """Warm all workers up, two at a time where the cores suffice for both."""
    settings = bench.settings
    cores = len(settings.cpus or facts.affinity())
    slots = max(1, min(2, cores // settings.threads))
    limit_s = planning.warmup_limit_s(allowed_s, len(crew.live) * len(bench.scenarios), slots, settings)
    warmed: dict[planning.Pair, messages.Warmed] = {}
    for scenario in bench.scenarios:
        request = messages.Warm(scenario.name, settings.warmup_min_calls, min(settings.warmup_min_s, limit_s), limit_s)
        order = chance.sample(crew.live, len(crew.live))
        slowest_s = max((opened[name].first_call_ms[scenario.name] / 1e3 for name in order), default=0.0)
        extra_s = limit_s + _PATIENCE * slowest_s
        answers = crew.ask(dict.fromkeys(order, request), messages.Warmed, slots, settings, extra_s)
        warmed.update(((name, scenario.name), answer) for name, answer in answers.items())
    return {pair: answer for pair, answer in warmed.items() if pair[0] in crew.live}


def _pin(bench: Bench, crew: _Crew, chance: random.Random) -> None:
    """Move the workers to cores that they share. Starting and warming up, two at a time, had all that are allowed."""
    settings = bench.settings
    cores = placement.choose_cores(settings.cpus or facts.affinity(), settings.threads, chance)
    crew.ask(dict.fromkeys(crew.live, messages.Pin(tuple(sorted(cores)))), messages.Pinned, _START_SLOTS, settings)


def _call_s(warmed: Mapping[planning.Pair, messages.Warmed]) -> dict[planning.Pair, float]:
    """Estimate the time of a call from the later half of the warm-up."""
    return {pair: median(answer.ns[len(answer.ns) // 2 :]) / 1e9 for pair, answer in warmed.items()}


def _time_blocks(
    bench: Bench,
    crew: _Crew,
    plan: planning.BlockPlan,
    call_s: Mapping[planning.Pair, float],
    chance: random.Random,
    index: int,
) -> _Blocks:
    ns: dict[planning.Pair, list[messages.Timed]] = {pair: [] for pair in plan.calls}
    orders: dict[str, tuple[tuple[str, ...], ...]] = {}
    begin = _ticks(crew)
    for scenario in bench.scenarios:
        taken: list[tuple[str, ...]] = []
        order: list[str] = []
        for turn in range(plan.rounds):
            bench.tell(index, f"{scenario.name}, round {turn + 1}/{plan.rounds}")
            order = order[::-1] if turn % 2 else chance.sample(crew.live, len(crew.live))
            for name in order:
                pair = (name, scenario.name)
                if name in crew.live:
                    ns[pair] += _time_block(bench.settings, crew, plan, pair, plan.block_s(pair, call_s[pair]))
            taken.append(tuple(order))
        orders[scenario.name] = tuple(taken)
    load = _load_between(begin, _ticks(crew))
    return _Blocks(
        ns={pair: tuple(block.ns for block in blocks) for pair, blocks in ns.items()},
        cpus_used={pair: _cpus_used(blocks) for pair, blocks in ns.items()},
        orders=orders,
        load=load,
    )


def _time_block(
    settings: Settings, crew: _Crew, plan: planning.BlockPlan, pair: planning.Pair, expected_s: float
) -> list[messages.Timed]:
    """Time one block, which should take `expected_s`; empty when the worker failed in it."""
    name, scenario = pair
    request = messages.Time(scenario, plan.lead[pair], plan.calls[pair], planning.settle_s(settings))
    return list(crew.ask({name: request}, messages.Timed, 1, settings, _PATIENCE * expected_s).values())


def _cpus_used(blocks: Sequence[messages.Timed]) -> float:
    wall_ns = sum(sum(block.ns) for block in blocks)
    return sum(block.cpu_ns for block in blocks) / wall_ns if wall_ns else 0.0


def _ticks(crew: _Crew) -> _Ticks:
    own = sum(facts.process_ticks(pid) for pid in (os.getpid(), *(crew.workers[name].pid for name in crew.live)))
    return _Ticks(facts.cpu_ticks(), own, facts.throttled_periods() or 0)


def _load_between(begin: _Ticks, end: _Ticks) -> _Load:
    """Compare two readings. Ticks are 10 ms: over less than a second the answer is only "nothing much"."""
    wall_s = end.at_s - begin.at_s
    total = end.host.total - begin.host.total
    foreign = (end.host.busy - begin.host.busy) - (end.own - begin.own)
    return _Load(
        steal_share=(end.host.steal - begin.host.steal) / total if total > 0 else 0.0,
        throttled=end.throttled - begin.throttled,
        other_cpus=max(0.0, foreign / os.sysconf("SC_CLK_TCK") / wall_s) if wall_s >= 0.5 and total > 0 else 0.0,
    )


def _worker_run(
    name: str,
    worker: Worker,
    opened: messages.Opened,
    finished: messages.Finished,
    warmed: Mapping[planning.Pair, messages.Warmed],
    blocks: _Blocks,
) -> WorkerRun:
    runs = {
        scenario: ScenarioRun(
            first_call_ms=first_call_ms,
            warmup_ns=warmed[name, scenario].ns,
            warmup_stable=warmed[name, scenario].stable,
            blocks_ns=blocks.ns[name, scenario],
            cpus_used=blocks.cpus_used[name, scenario],
            switch_ms=finished.switch_ms.get(scenario),
        )
        for scenario, first_call_ms in opened.first_call_ms.items()
    }
    return WorkerRun(
        candidate=name,
        start_s=worker.start_s,
        load_s=opened.load_s,
        peak_rss_mib=finished.peak_rss_mib,
        preempted=finished.preempted,
        major_faults=finished.major_faults,
        affinity=finished.affinity,
        runs=runs,
    )


def _share_done(bench: Bench, index: int) -> float:
    """Return the share of the work done, by groups or by the clock, whichever is further."""
    spent = 1 - (bench.deadline - time.monotonic()) / bench.settings.budget_s
    return max(0.0, min(1.0, max(spent, index / bench.settings.max_groups)))
