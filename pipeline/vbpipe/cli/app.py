"""The commands and their options; each command's work is imported when it is called."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from vbpipe.cli.amounts import seconds, share
from vbpipe.errors import UsageError

# typer brings its own copy of click since 0.26, and used the real one before: this finds the class of either.
_ParseError: type[Exception] = next(c for c in reversed(typer.BadParameter.__mro__) if hasattr(c, "format_message"))

# typer reads these annotations at run time: on Python 3.10 it needs Optional, not `X | None`, behind `from __future__`.


class Exit(Exception):
    """Ends a command with an exit code after it has said everything."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


app = typer.Typer(
    name="vbpipe",
    help="Build model variants into engines, measure every step against eager, ship only what is faster and right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Every error is one paragraph; --debug adds the traceback. Exit codes: 0 shipped as asked, 1 a gate failed, "
    "2 usage or recipe error, 3 a step failed, 4 could not tell, 5 measurement pending, 130 interrupted.",
)
store_app = typer.Typer(help="The cache: what it holds, why, and whether it is whole.", no_args_is_help=True)
app.add_typer(store_app, name="store")
worker_app = typer.Typer(help="Run one job: what a build does for each step.", no_args_is_help=True)
app.add_typer(worker_app, name="worker")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Variants = Annotated[list[str], typer.Option("--variant", help="Only this variant; may be given again.")]
Targets = Annotated[list[str], typer.Option("--target", help="Only this target; may be given again.")]
Sets = Annotated[list[str], typer.Option("--set", metavar="PATH=VALUE", help="Change the recipe for this run.")]
Outside = Annotated[bool, typer.Option("--allow-outside", help="Let the recipe name files outside its folder.")]
StorePath = Annotated[
    Path, typer.Option("--store", envvar="VBPIPE_STORE", help="The store's folder.", show_default=True)
]
DEFAULT_STORE = Path("artifacts/store")
DEFAULT_OUT = Path("artifacts")


def invoke(arguments: Sequence[str]) -> int:
    """Run the command line; raises UsageError for what can't be parsed, Exit for a code other than 0."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        result = app(args=list(arguments), standalone_mode=False)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except _ParseError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "vbpipe"
        message = error.format_message()  # type: ignore[attr-defined]  # the class found above has it
        raise UsageError(message, hint=f"See `{command} --help`.") from error
    return result if isinstance(result, int) else 0


def _version(wanted: bool) -> None:
    if wanted:
        from vbpipe import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[  # its callback does the work
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Build model variants into engines, measure every step against eager, ship only what is faster and right."""


@app.command()
def init(
    factory: Annotated[str, typer.Argument(help="models/net.py:build, a function that returns the nn.Module.")],
    out: Annotated[Path, typer.Option(help="Where to write it.")] = Path("recipe.yaml"),
) -> None:
    """Write a commented recipe for a factory, from what its model looks like."""
    from vbpipe.cli.init import write_recipe

    write_recipe(factory, out)


@app.command()
def check(
    recipe: RecipePath,
    sets: Sets = [],  # noqa: B006  # typer copies defaults
    allow_outside: Outside = False,
    json: Json = False,
) -> None:
    """Check a recipe and name everything wrong with it; loads nothing heavy."""
    from vbpipe.cli.check import check_recipe
    from vbpipe.cli.request import RecipeRequest

    check_recipe(RecipeRequest(recipe, tuple(sets), allow_outside), as_json=json)


@app.command()
def plan(
    recipe: RecipePath,
    variant: Variants = [],  # noqa: B006
    target: Targets = [],  # noqa: B006
    sets: Sets = [],  # noqa: B006
    allow_outside: Outside = False,
    store: StorePath = DEFAULT_STORE,
    layers: Annotated[
        bool, typer.Option("--layers", help="Instead: which rule decides for each module, and what it gets.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the steps, which are in the store, and what makes the others a miss."""
    from vbpipe.cli.plan import show_layers, show_plan
    from vbpipe.cli.request import RecipeRequest

    request = RecipeRequest(recipe, tuple(sets), allow_outside, tuple(variant), tuple(target))
    if layers:
        show_layers(request, as_json=json)
        return
    show_plan(request, store, as_json=json)


@app.command()
def where(
    recipe: RecipePath,
    module: Annotated[str, typer.Argument(metavar="MODULE", help="A path of named_modules(): encoder.layer.3.")],
    variant: Variants = [],  # noqa: B006
    target: Targets = [],  # noqa: B006
    sets: Sets = [],  # noqa: B006
    allow_outside: Outside = False,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Show which nodes of every built step compute a module of the PyTorch model."""
    from vbpipe.cli.request import RecipeRequest
    from vbpipe.cli.where import find_module

    request = RecipeRequest(recipe, tuple(sets), allow_outside, tuple(variant), tuple(target))
    find_module(request, module, store, as_json=json)


@app.command()
def build(
    recipe: RecipePath,
    variant: Variants = [],  # noqa: B006
    target: Targets = [],  # noqa: B006
    sets: Sets = [],  # noqa: B006
    allow_outside: Outside = False,
    store: StorePath = DEFAULT_STORE,
    out: Annotated[Path, typer.Option(help="Reports and bundles go to OUT/<recipe>/.")] = DEFAULT_OUT,
    jobs: Annotated[int, typer.Option(min=0, help="Steps at a time; 0: as many as there are cores, at most 4.")] = 0,
    timeout: Annotated[Optional[float], typer.Option(min=0.1, help="Seconds after which a step is stopped.")] = None,  # noqa: UP045
    allow_pending: Annotated[
        bool, typer.Option("--allow-pending", help="Exit 0, not 5, where only another host can measure.")
    ] = False,
    json: Json = False,
) -> None:
    """Run the plan: build, check and measure every step, then package what is faster and right."""
    from vbpipe.cli.build import BuildPlaces, build_recipe
    from vbpipe.cli.request import RecipeRequest

    request = RecipeRequest(recipe, tuple(sets), allow_outside, tuple(variant), tuple(target))
    places = BuildPlaces(store, out)
    raise Exit(build_recipe(request, places, jobs, timeout, as_json=json, allow_pending=allow_pending))


@app.command()
def bench(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|THING…",
            help="One recipe; or things: bundles, steps of the store, eager:RECIPE, .onnx and .pt (TorchScript) files.",
        ),
    ],
    variant: Variants = [],  # noqa: B006
    target: Targets = [],  # noqa: B006
    sets: Sets = [],  # noqa: B006
    allow_outside: Outside = False,
    store: StorePath = DEFAULT_STORE,
    inputs: Annotated[Optional[Path], typer.Option(help="For things: arrays (.npz, .safetensors).")] = None,  # noqa: UP045
    threads: Annotated[Optional[int], typer.Option(min=1, help="For things: the same for all.")] = None,  # noqa: UP045
    precision: Annotated[
        float, typer.Option(parser=share, metavar="SHARE", help="For things: half width to reach, 1% or 0.01.")
    ] = 0.02,
    budget: Annotated[
        float, typer.Option(parser=seconds, metavar="TIME", help="For things: the most to spend, 90s or 10m.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Measure again, here: a recipe's rows, or any things against the first of them."""
    from vbpipe.cli.bench import BenchRequest, bench_recipe, bench_things
    from vbpipe.cli.request import RecipeRequest

    if len(what) == 1 and Path(what[0]).suffix in (".yaml", ".yml"):
        request = RecipeRequest(Path(what[0]), tuple(sets), allow_outside, tuple(variant), tuple(target))
        raise Exit(bench_recipe(request, store, as_json=json))
    bench_things(BenchRequest(tuple(what), inputs, store, threads, precision, budget), as_json=json)


@app.command()
def report(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A report.json.")],
    format: Annotated[str, typer.Option(help="table, figures, precision, markdown, junit or json.")] = "table",  # noqa: A002
    out: Annotated[Optional[Path], typer.Option(help="Write it here instead of stdout.")] = None,  # noqa: UP045
    against: Annotated[Optional[Path], typer.Option(help="Compare it with this report.json.")] = None,  # noqa: UP045
    across_hosts: Annotated[
        bool, typer.Option("--across-hosts", help="For --against: also where the hosts are unequal, under a banner.")
    ] = False,
) -> None:
    """Print a report in another form, or compare it with another report."""
    if across_hosts and against is None:
        raise UsageError("it is for --against, which is missing.", where="--across-hosts")
    if against is not None:
        from vbpipe.cli.report import render_comparison

        render_comparison(report, against, format, out, across_hosts=across_hosts)
        return
    from vbpipe.cli.report import render_report

    render_report(report, format, out)


@app.command(name="run")
def run_bundle(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle's directory.")],
    inputs: Annotated[Optional[Path], typer.Option(help="A .safetensors or .npz file of named inputs.")] = None,  # noqa: UP045
    outputs: Annotated[Optional[Path], typer.Option(help="Write the outputs here (.safetensors or .npz).")] = None,  # noqa: UP045
    threads: Annotated[Optional[int], typer.Option(min=1, help="Instead of those it was measured with.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Check a bundle, open it and run it: on its golden samples, or on your inputs."""
    from vbpipe.cli.run import run_once

    run_once(bundle, inputs, outputs, threads, as_json=json)


@app.command()
def doctor(
    noise: Annotated[
        bool, typer.Option("--noise", help="Try the measuring here: a workload against copies of itself.")
    ] = False,
    trials: Annotated[int, typer.Option(min=1, help="For --noise: of each delay (0, 3 % and 5 %).")] = 5,
    budget: Annotated[
        float, typer.Option(parser=seconds, metavar="TIME", help="For --noise: a trial's time, 10s or 1m.")
    ] = 10.0,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure what this host can do at most; reports show shares of it."),
    ] = False,
    threads: Annotated[
        list[int],
        typer.Option(min=1, help="For --measure: threads; may be given again. Default: one, and all cores."),
    ] = [],  # noqa: B006
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Say what this host can build and run, and the command that adds what is missing."""
    if noise and measure:
        raise UsageError("--noise and --measure are two commands.", hint="Give one of them.")
    if threads and not measure:
        raise UsageError("it is for --measure, which is missing.", where="--threads")
    if measure:
        from vbpipe.cli.doctor import measure_here

        measure_here(threads, as_json=json)
        return
    if noise:
        from vbpipe.cli.noise import try_noise

        try_noise(trials, budget, as_json=json)
        return
    from vbpipe.cli.doctor import examine

    examine(store, as_json=json)


@app.command()
def schema() -> None:
    """Print the recipe's JSON Schema, for editors."""
    from vbpipe.recipe.schema import render

    typer.echo(render(), nl=False)


@store_app.command("ls")
def store_ls(store: StorePath = DEFAULT_STORE, json: Json = False) -> None:
    """List the entries, newest first."""
    from vbpipe.cli.store import list_entries

    list_entries(store, as_json=json)


@store_app.command("why")
def store_why(
    name: Annotated[str, typer.Argument(help='A step ("minilm/int8/cpu/quantize"), or the start of a digest.')],
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Say what a result was made from, and which part of its key changed since the one before."""
    from vbpipe.cli.store import explain_entry

    explain_entry(store, name, as_json=json)


@store_app.command("verify")
def store_verify(
    store: StorePath = DEFAULT_STORE,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set damaged entries aside; a build makes them again.")
    ] = False,
    json: Json = False,
) -> None:
    """Read every byte and name what is damaged; exits with 3 if anything is."""
    from vbpipe.cli.store import verify_store

    raise Exit(verify_store(store, repair=repair, as_json=json))


@store_app.command("gc")
def store_gc(
    store: StorePath = DEFAULT_STORE,
    keep: Annotated[list[str], typer.Option(help="A step or digest to keep; may be given again.")] = [],  # noqa: B006
    keep_days: Annotated[float, typer.Option(min=0, help="Keep what was used in the last days.")] = 30.0,
    newest: Annotated[int, typer.Option(min=0, help="Keep so many newest results of each step.")] = 1,
    grace_hours: Annotated[float, typer.Option(min=0, help="Touch nothing younger: a build may be using it.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove what nothing needs any more."""
    from vbpipe.cli.store import GcRequest, collect_garbage

    collect_garbage(store, GcRequest(tuple(keep), keep_days, newest, grace_hours, dry_run), as_json=json)


@worker_app.command("run")
def worker_run(job: Annotated[Path, typer.Argument(metavar="JOB", help="A job.json.")]) -> None:
    """Run one job again, as a failed step's message asks for; prints everything to the terminal."""
    from vbpipe.cli.worker import run_again

    raise Exit(run_again(job))


def _terminate(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
