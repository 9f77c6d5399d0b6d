"""Loading a recipe: every variant as values, or every problem at once and in its place."""

# ruff: noqa: E501  # a table of broken recipes reads by row

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vbpipe import plugins
from vbpipe.errors import RecipeError, UsageError
from vbpipe.recipe.load import LoadedRecipe, load
from vbpipe.recipe.schema import json_schema, render

HERE = Path(__file__).parent
DESIGN = (HERE / "recipe_plugins" / "design.yaml").read_text()


@pytest.fixture(scope="module", autouse=True)
def _plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed distribution with plug-ins of its own, so that no real stage is needed."""
    site = tmp_path_factory.mktemp("site")
    (site / "recipe_plugins").symlink_to(HERE / "recipe_plugins")
    info = site / "recipe_plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recipe-plugins\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vbpipe.plugins]\nfake = recipe_plugins\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        # The real stages are installed too and bring the same names.
        patch.setattr(plugins, "entry_points", lambda group: entry_points(group=group, name="fake"))
        plugins.names.cache_clear()
        yield
    plugins.names.cache_clear()
    for name in [name for name in sys.modules if name.startswith("recipe_plugins")]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "minilm.py").write_text(
        "import torch\ndef build(): pass\ndef calibration(): pass\ndef evaluate(run): pass\n"
    )
    return tmp_path


def of(folder: Path, text: str, *overrides: str, allow_outside: bool = False) -> LoadedRecipe:
    path = folder / "r.yaml"
    path.write_text(text)
    return load(path, overrides=overrides, allow_outside=allow_outside)


def problems(folder: Path, text: str, *overrides: str, allow_outside: bool = False) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        of(folder, text, *overrides, allow_outside=allow_outside)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def changed(*changes: tuple[str, str]) -> str:
    text = DESIGN
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_the_recipe_of_the_design_loads(folder: Path) -> None:
    loaded = of(folder, DESIGN)
    assert list(loaded.variants) == ["standard", "int4"]
    assert list(loaded.targets) == ["cpu", "ampere", "a100", "h100"]
    assert loaded.root == folder.resolve()
    standard, int4 = loaded.variants.values()
    assert list(standard.model.inputs) == ["input_ids", "attention_mask"]
    assert standard.stages["quantize"]["default"]["weight"] == "int8"
    assert int4.stages["quantize"]["default"] == {"weight": "int4", "group_size": 32}
    assert int4.stages["quantize"]["rules"] == standard.stages["quantize"]["rules"]
    assert standard.gates[1].min == 0.995


def test_a_loaded_recipe_survives_a_round_trip_through_json(folder: Path) -> None:
    for recipe in of(folder, DESIGN).variants.values():
        assert type(recipe).model_validate_json(recipe.model_dump_json()) == recipe


def test_the_digest_is_of_the_files_bytes(folder: Path) -> None:
    assert of(folder, DESIGN).digest == of(folder, DESIGN).digest
    assert of(folder, DESIGN).digest != of(folder, DESIGN + "# more\n").digest


def test_a_targets_further_keys_are_the_backends_options(folder: Path) -> None:
    text = changed(("{backend: onnxruntime, threads: 2}", "{backend: onnxruntime, threads: 2, optimization: basic}"))
    target = of(folder, text).targets["cpu"]
    assert (target.threads, dict(target.options)) == (2, {"optimization": "basic"})


def test_a_key_without_dots_merges_and_null_removes(folder: Path) -> None:
    text = changed(
        ("{stages.quantize.default: {weight: int4, group_size: 32}}", "{stages: {fuse: null, export: {opset: 21}}}")
    )
    int4 = of(folder, text).variants["int4"]
    assert "fuse" not in int4.stages
    assert int4.stages["export"] == {"formats": ["torchscript", "onnx"], "opset": 21}
    text = changed(("stages.quantize.default: {weight: int4, group_size: 32}", "stages.quantize: null"))
    assert "quantize" not in of(folder, text).variants["int4"].stages


def test_a_dotted_path_may_create_what_the_model_accepts(folder: Path) -> None:
    text = changed(("stages.quantize.default: {weight: int4, group_size: 32}", "data.samples: 3, model.args.depth: 2"))
    int4 = of(folder, text).variants["int4"]
    assert (int4.data.samples, dict(int4.model.args)) == (3, {"depth": 2})


def test_a_dotted_path_finds_names_that_hold_dots(folder: Path) -> None:
    text = changed(
        ("outputs: [embedding]", "outputs: [embedding, h]"),
        ("    attention_mask:", "    state.h: {dtype: int64, shape: [batch]}\n    attention_mask:"),
        ("stages.quantize.default: {weight: int4, group_size: 32}", "model.inputs.state.h.values: zeros"),
    )
    assert of(folder, text).variants["int4"].model.inputs["state.h"].values == "zeros"


def test_set_wins_over_the_file_and_over_variants(folder: Path) -> None:
    loaded = of(folder, DESIGN, "stages.fuse.level=none", "stages.quantize.default.group_size=64", "gates.1.min=0.5")
    assert [v.stages["fuse"]["level"] for v in loaded.variants.values()] == ["none", "none"]
    assert [v.stages["quantize"]["default"]["group_size"] for v in loaded.variants.values()] == [64, 64]
    assert loaded.variants["int4"].gates[1].min == 0.5


def test_set_reaches_into_variants_and_targets_and_removes(folder: Path) -> None:
    loaded = of(folder, DESIGN, "variants.int4={stages.fuse: null}", "targets.cpu.threads=8", "ship=")
    assert "fuse" not in loaded.variants["int4"].stages
    assert loaded.targets["cpu"].threads == 8
    assert not loaded.variants["standard"].ship


def test_without_variants_there_is_the_standard_one(folder: Path) -> None:
    text = re.sub(r"variants:.*?(?=targets:)", "", DESIGN, flags=re.DOTALL)
    assert list(of(folder, text).variants) == ["standard"]


INT4 = "stages.quantize.default: {weight: int4, group_size: 32}"

BROKEN = [
    # what is replaced, by what, line, path, a piece of the message
    ("name: minilm", "nam: minilm", 2, "nam", "no key 'nam'. Did you mean 'name'? Keys: data, gates, model, name"),
    ("name: minilm", "name: mini lm", 2, "name", "'mini lm' is no name"),
    ("name: minilm", "", 1, "name", "'name' is missing here."),
    ("name: minilm", "name: on\nname: minilm", 3, "name", "written twice"),
    ("name: minilm", "name: 12", 2, "name", "needs text, not 12. Put it in quotes."),
    ("recipe: 1", "recipe: 2", 1, "recipe", "this vbpipe understands recipe version 1, not 2."),
    ("recipe: 1", "recipe: '1'", 1, "recipe", "understands recipe version 1, not '1' in quotes."),
    ("recipe: 1", "", 1, "recipe", "Begin with 'recipe: 1'."),
    ("  factory: models", "  factry: models", 4, "model.factry", "no key 'factry'. Did you mean 'factory'?"),
    (":build  ", ":biuld  ", 4, "model.factory", "models/minilm.py defines no 'biuld'. Did you mean 'build'?"),
    ("minilm.py:build ", "minlm.py:build ", 4, "model.factory", "Did you mean 'models/minilm.py'?"),
    ("models/minilm.py:build ", "minilm ", 4, "model.factory", "is no reference: write file.py:function"),
    ("models/minilm.py:build ", "models.minilm:build ", 4, "model.factory", "Did you mean 'models/minilm.py'?"),
    ("models/minilm.py:build ", "../x.py:build ", 4, "model.factory", "leads out of the recipe's folder"),
    ("models/minilm.py:build ", "/etc/x.py:build ", 4, "model.factory", "leads out of the recipe's folder"),
    ("models/minilm.py:build ", "'bad\\0.py:build' ", 4, "model.factory", "no file"),
    ("{dtype: int64, shape: [batch, seq], values: ones}", "{dtype: int46, shape: [batch, seq]}", 8, "model.inputs.attention_mask.dtype", "Did you mean 'int64'?"),
    ("[batch, seq], values: ones", "[batch, sq], values: ones", 8, "model.inputs.attention_mask.shape[1]", "'sq' is not in model.shapes. Did you mean 'seq'? Symbols: batch, seq."),
    ("[batch, seq], values: ones", "[0, seq], values: ones", 8, "model.inputs.attention_mask.shape[0]", "must be at least 1, not 0."),
    ("[batch, seq], values: ones", "[1.5, seq], values: ones", 8, "model.inputs.attention_mask.shape[0]", "needs a whole number or text, not 1.5."),
    ("values: ones", "values: noes", 8, "model.inputs.attention_mask.values", "'noes' is not one of 'normal', 'ones' or 'zeros'. Did you mean 'ones'?"),
    ("values: ones", "values: [1]", 8, "model.inputs.attention_mask.values", "needs one of 'normal', 'ones' or 'zeros' or a mapping, not a list."),
    ("{low: 1000, high: 20000}", "{low: 1000}", 7, "model.inputs.input_ids.values.high", "'high' is missing here."),
    ("{low: 1000, high: 20000}", "{low: 1000, hi: 2}", 7, "model.inputs.input_ids.values.hi", "no key 'hi'. Did you mean 'high'?"),
    ("{low: 1000, high: 20000}", "{low: 5, high: 2}", 7, "model.inputs.input_ids.values", "low (5.0) must be below high (2.0)."),
    ("attention_mask:", "input_ids.x:   ", 8, "model.inputs.input_ids.x", "'input_ids' is a tensor, so nothing can be nested in it."),
    ("attention_mask:", "attention mask:", 8, "model.inputs.attention mask", "is no input name"),
    ("outputs: [embedding]", "outputs: []", 9, "model.outputs", "needs at least 1 entry."),
    ("outputs: [embedding]", "outputs: [a, b, a]", 9, "model.outputs[2]", "'a' is listed twice."),
    ("outputs: [embedding]", "outputs: embedding", 9, "model.outputs", "needs a list, not 'embedding'."),
    ("min: 2, opt: 128, max: 512", "min: 2, opt: 1, max: 512", 12, "model.shapes.seq", "min <= opt <= max does not hold for 2, 1, 512."),
    ("min: 2, opt: 128, max: 512", "min: 2, opt: '128', max: 512", 12, "model.shapes.seq.opt", "needs a whole number, not '128'."),
    ("min: 2, opt: 128, max: 512", "min: 2, opt: true, max: 512", 12, "model.shapes.seq.opt", "needs a whole number, not true."),
    ("    seq:   {min", "    heads: {min: 1, opt: 1, max: 1}\n    seq:   {min", 12, "model.shapes.heads", "no input has 'heads' in its shape."),
    ("data:\n", "data:\n  samples: 0\n", 14, "data.samples", "must be at least 1, not 0."),
    ("calibration: models/minilm.py:calibration", "calibration: models/minilm.py:calibrate", 14, "data.calibration", "Did you mean 'calibration'?"),
    ("standard: {}", "standard:", 17, "variants.standard", "needs a mapping, not nothing. Write {} for an empty one."),
    ("standard: {}", "stan dard: {}", 17, "variants.stan dard", "'stan dard' is no name"),
    (INT4, "stages.quantize.default: {weight: int3}", 18, "variants.int4.stages.quantize.default.weight", "'int3' is not one of 'int8' or 'int4'."),
    (INT4, "stages.quantize.default: {weight: int4}", 18, "variants.int4.stages.quantize.default", "int4 weights need a group_size."),
    (INT4, "stages.quantise.default: {}", 18, "variants.int4.stages.quantise.default", "no stage 'quantise'. Did you mean 'quantize'?"),
    (INT4, "stages: {quantize: {defualt: {}}}", 18, "variants.int4.stages.quantize.defualt", "no key 'defualt'. Did you mean 'default'?"),
    (INT4, "stages.quantize.ruls: null", 18, "variants.int4.stages.quantize.ruls", "there is no 'ruls' to remove. Did you mean 'rules'?"),
    (INT4, "model.outputs.x: 1", 18, "variants.int4.model.outputs.x", "leads through something that isn't a mapping."),
    (INT4, "targets.cpu.threads: 3", 18, "variants.int4.targets.cpu.threads", "a variant can't change 'targets'. It can change: data, model, stages."),
    (INT4, "stage.fuse.level: none", 18, "variants.int4.stage.fuse.level", "a variant can't change 'stage'. Did you mean 'stages'?"),
    (INT4, "stages.benchmark.budget_s: 3", 18, "variants.int4.stages.benchmark.budget_s", "'benchmark' looks at all variants together"),
    ("backend: onnxruntime, threads: 2", "backend: onxruntime, threads: 2", 20, "targets.cpu.backend", "no backend 'onxruntime'. Did you mean 'onnxruntime'? Backends: onnxruntime, tensorrt, tensorrt_rtx."),
    ("backend: onnxruntime, threads: 2", "backend: onnxruntime, thread: 2", 20, "targets.cpu.thread", "no key 'thread'. Did you mean 'threads'?"),
    ("backend: onnxruntime, threads: 2", "backend: onnxruntime, optimisation: all", 20, "targets.cpu.optimisation", "Did you mean 'optimization'?"),
    ("backend: onnxruntime, threads: 2", "backend: onnxruntime, providers: CPU", 20, "targets.cpu.providers", "needs a list, not 'CPU'."),
    ("backend: onnxruntime, threads: 2", "backend: onnxruntime, threads: 0", 20, "targets.cpu.threads", "must be at least 1, not 0."),
    ("backend: onnxruntime, threads: 2", "backnd: onnxruntime, threads: 2", 20, "targets.cpu.backnd", "Did you mean 'backend'?"),
    ("backend: onnxruntime, threads: 2", "threads: 2", 20, "targets.cpu.backend", "'backend' is missing here."),
    ("backend: onnxruntime, threads: 2", "backend: onnxruntime, providers: [], options: {providers: []}", 20, "targets.cpu.providers", "also written under options"),
    ("  cpu:    {", "  c pu:   {", 20, "targets.c pu", "'c pu' is no name"),
    ("opset: 20", "opst: 20", 25, "stages.export.opst", "no key 'opst'. Did you mean 'opset'? Keys: check, formats, opset."),
    ("opset: 20", "opset: 99", 25, "stages.export.opset", "must be at most 23, not 99."),
    ("opset: 20", "check: yes", 25, "stages.export.check", "needs true or false, not 'yes'. In YAML 1.2 only true and false are."),
    ("opset: 20", "inner: x", 25, "stages.export.inner", "no key 'inner'. Keys: check, formats, opset."),
    ("torchscript, onnx]", "torchscript, onxx]", 25, "stages.export.formats[1]", "Did you mean 'onnx'?"),
    ("  fuse:     {level: all}", "  fuze:     {level: all}", 26, "stages.fuze", "no stage 'fuze'. Did you mean 'fuse'? Stages: benchmark, export, fuse, quantize."),
    ("  fuse:     {level: all}", "  fuse:", 26, "stages.fuse", "needs a mapping, not nothing."),
    ("  fuse:     {level: all}", "  gate:     {}", 26, "stages.gate", "stage 'gate' has no options in a recipe."),
    ("{type: LayerNorm, keep: true}", "{type: LayerNorm, kep: true}", 31, "stages.quantize.rules[1].kep", "no key 'kep'. Did you mean 'keep'? Keys: keep, match, type."),
    ("{batch: 8, seq: 128}", "{batch: 32, seq: 128}", 33, "stages.benchmark.scenarios[2].batch", "32 is outside model.shapes.batch, which goes from 1 to 16."),
    ("{batch: 8, seq: 128}", "{bacth: 8, seq: 128}", 33, "stages.benchmark.scenarios[2].bacth", "Did you mean 'batch'?"),
    ("over: eager, min: 1.0", "over: int5, min: 1.0", 35, "gates[0].over", "there is no 'int5' to compare with. Did you mean 'int4'? There are: eager, int4, previous, standard."),
    ("over: eager, min: 1.0", "over: eager", 35, "gates[0]", "a gate needs one of min, max, max_drop."),
    ("over: eager, min: 1.0", "scenario: 'batch=1,seq=12', min: 1", 35, "gates[0].scenario", "Scenarios: batch=1,seq=128, batch=1,seq=16, batch=8,seq=128."),
    ("metric: speedup", "metric: speedpu", 35, "gates[0].metric", "'speedpu' looks like a misspelt 'speedup'."),
    ("triton: {max_batch_size: 16}", "triton: 16", 38, "ship.triton", "needs a mapping, not 16."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "message"), BROKEN, ids=[f"{b[3]}-{i}" for i, b in enumerate(BROKEN)]
)
def test_a_broken_recipe_is_refused_where_it_is_broken(
    folder: Path, old: str, new: str, line: int, path: str, message: str
) -> None:
    found = problems(folder, changed((old, new)))
    assert len(found) == 1, found
    match = re.fullmatch(r"r\.yaml:(\d+):(\d+): (.*?): (.*)", found[0])
    assert match, found
    assert (int(match[1]), match[3]) == (line, path)
    assert message in match[4]
    assert int(match[2]) > 0


def test_every_problem_is_reported_at_once_in_the_files_order(folder: Path) -> None:
    text = changed(
        ("name: minilm", "name: mini lm"),
        ("[batch, seq], values: ones", "[batch, sq], values: ones"),
        (INT4, "stages.quantize.default: {weight: int3}"),
        ("backend: onnxruntime", "backend: onxruntime"),
        ("opset: 20", "opst: 20, opst: !x 3"),
        ("metric: cosine,", "metric: cosin,"),
        ("  triton:", "  1: {}\n  triton:"),
    )
    found = problems(folder, text, "stages.fuse.level=some", "gates.9.min")
    assert [p.split(": ")[0] for p in found] == ["--set"]
    found = problems(folder, text, "stages.fuse.level=some")
    lines = [int(p.split(":")[1]) for p in found[:-1]]
    assert lines == [2, 8, 18, 20, 25, 25, 25, 36, 38]
    assert found[-1].startswith("--set: stages.fuse.level: 'some' is not one of 'none' or 'all'.")


def test_a_problem_of_one_variant_in_a_shared_line_names_the_variant(folder: Path) -> None:
    text = changed((INT4, "model.shapes.seq: {min: 2, opt: 16, max: 64}"))
    found = problems(folder, text)
    assert found == [
        f"r.yaml:33:{column}: stages.benchmark.scenarios[{index}].seq: 128 is outside model.shapes.seq, "
        "which goes from 2 to 64. (In variant int4.)"
        for index, column in ((1, 49), (2, 71))
    ]


def test_a_metric_is_unknown_where_nothing_evaluates(folder: Path) -> None:
    without = [("  evaluation:  models/minilm.py:evaluate     #", "  #")]
    text = changed(*without, ("metric: cosine,", "metric: accuracy,"))
    assert "no metric 'accuracy' without data.evaluation." in problems(folder, text)[0]
    of(folder, changed(("metric: cosine,", "metric: accuracy,")))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.fuse.level", "--set: 'stages.fuse.level' is not of the form a.b.c=value."),
        ("=3", "--set: '=3' is not of the form a.b.c=value."),
        ("stages.fuse.level=[", "--set: stages.fuse.level: not valid YAML"),
        ("stages.fuse.level=!x 1", "--set: stages.fuse.level: the tag '!x' is not allowed"),
        ("stages.fuse.levl=all", "--set: stages.fuse.levl: no key 'levl'. Did you mean 'level'?"),
        ("targets.cpu.provider=[]", "--set: targets.cpu.provider: no key 'provider'. Did you mean 'providers'?"),
        ("gates.7.min=1", "--set: gates.7.min: 'gates.7.min' leads through something that isn't a mapping."),
        ("stages.fus=", "--set: stages.fus: there is no 'fus' to remove. Did you mean 'fuse'?"),
    ],
)
def test_a_wrong_override_is_a_problem_of_the_command_line(folder: Path, override: str, message: str) -> None:
    found = problems(folder, DESIGN, override)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_file_that_is_not_python_is_named_by_its_own_line(folder: Path) -> None:
    (folder / "models" / "minilm.py").write_text("\ndef build(:\n  pass\n")
    found = problems(folder, DESIGN)
    assert len(found) == 1
    assert found[0].startswith("models/minilm.py:2:")
    assert "not valid Python" in found[0]


def test_files_stay_inside_the_folder_also_through_links(folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside.bin"
    outside.write_bytes(b"1")
    (folder / "link.bin").symlink_to(outside)
    (folder / "ring").symlink_to(folder / "ring")
    (folder / "weights.bin").write_bytes(b"1")
    named = f"../{outside.name}, link.bin, weights.bn, models, ring, weights.bin"
    text = changed(("  args: {}", f"  files: [{named}]"))
    found = problems(folder, text)
    shown = [re.sub(r"r\.yaml:5:\d+: model\.files\[(\d)\]: ", r"\1 ", problem) for problem in found]
    assert len(shown) == 5
    assert shown[4].startswith("4 'ring' can't be read: ")
    assert shown[:4] == [
        f"0 '../{outside.name}' leads out of the recipe's folder. Move it in there, or pass --allow-outside.",
        "1 'link.bin' leads out of the recipe's folder. Move it in there, or pass --allow-outside.",
        "2 no file 'weights.bn' beside the recipe. Did you mean 'weights.bin'?",
        "3 'models' is not a regular file.",
    ]
    allowed = changed(("  args: {}", f"  files: [../{outside.name}, link.bin]"))
    assert of(folder, allowed, allow_outside=True).variants["standard"].model.files[1] == "link.bin"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml:1:1: the file is empty."),
        ("- a\n", "r.yaml:1:1: a recipe is a mapping, not a list."),
        ("text", "r.yaml:1:1: a recipe is a mapping, not 'text'."),
        ("recipe: 1", "r.yaml:1:1: name: 'name' is missing here."),
        ("a: [", "not valid YAML"),
    ],
)
def test_what_is_no_recipe_at_all_is_said_so(folder: Path, text: str, message: str) -> None:
    assert message in problems(folder, text)[0]


def test_a_missing_file_is_a_usage_error_with_a_near_name(folder: Path) -> None:
    of(folder, DESIGN)
    with pytest.raises(UsageError, match=r"there is no such file\. Did you mean 'r\.yaml'\?"):
        load(folder / "r.yml")
    with pytest.raises(UsageError, match="this is a folder"):
        load(folder)


SNIPPETS = """recipe: 1
name: x
model:
  factory: a.py:b
  inputs: {x: {dtype: int8, shape: [b]}}
  outputs: [1]
  shapes: {b: {min: 1}}
data: []
variants: {a: {stages.x: 1}}
variants: 3
targets:
targets: {t: {backend: b}}
stages: [1]
stages: {fuse: 3}
gates: [{metric: m}]
x: !y
""".splitlines(keepends=True)


@given(
    text=st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=8), max_size=12).map("".join),
    override=st.text(max_size=12),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_nothing_but_a_recipe_error_comes_out_of_any_text(folder: Path, text: str, override: str) -> None:
    path = folder / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for overrides in ((), (f"a.b={override}",), (override,)):
        with pytest.raises(RecipeError) as caught:
            load(path, overrides=overrides)
        assert caught.value.problems


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(list(yaml.safe_load(DESIGN))), value=VALUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_value_under_any_key_loads_or_is_a_recipe_error(folder: Path, key: str, value: object) -> None:
    try:
        of(folder, yaml.safe_dump({**yaml.safe_load(DESIGN), key: value}, allow_unicode=True))
    except RecipeError as error:
        assert error.problems


def test_loading_imports_no_vendor_sdk(folder: Path) -> None:
    padding = "".join(f"      - {{match: layer.{n}, keep: true}}\n" for n in range(170))
    text = changed(("      - {type: LayerNorm", f"{padding}      - {{type: LayerNorm"))
    assert text.count("\n") > 200
    (folder / "r.yaml").write_text(text.replace("tensorrt_rtx", "onnxruntime").replace("tensorrt", "onnxruntime"))
    code = (
        "import sys; from pathlib import Path; from vbpipe.errors import RecipeError; from vbpipe.recipe.load import load\n"
        "try: load(Path(sys.argv[1]))\n"
        "except RecipeError as error: print(error, file=sys.stderr)\n"
        "print([name for name in ('torch', 'onnx', 'onnxruntime', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / "r.yaml")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr


def test_the_schema_accepts_the_recipe_of_the_design() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(DESIGN))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("opset: 20", "opst: 20"),
        ("opset: 20", "inner: x"),
        ("level: all", "level: some"),
        ("weight: int8", "weight: int3"),
        ("  fuse:  ", "  fuze:  "),
        ("threads: 2", "thread: 2"),
        ("backend: onnxruntime", "backend: onxruntime"),
        ("values: ones", "values: twos"),
        ("name: minilm", "nam: minilm"),
    ],
)
def test_the_schema_refuses_what_loading_refuses(old: str, new: str) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    assert not validator.is_valid(yaml.safe_load(changed((old, new))))


def test_the_schema_is_stable_and_describes_fields_by_their_docstrings() -> None:
    assert render() == render()
    stages = json_schema()["properties"]["stages"]["properties"]
    assert stages["export"]["properties"]["opset"]["description"] == "The ONNX operator set."
    assert "first is the reference" in json_schema()["properties"]["variants"]["description"]
    assert list(stages) == ["benchmark", "export", "fuse", "quantize"]
