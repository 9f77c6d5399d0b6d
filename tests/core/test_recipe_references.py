"""The functions that a recipe names: imported apart from each other, and named by what they depend on."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from vbpipe.errors import UsageError, VbpipeError
from vbpipe.recipe.references import resolve, source_digests


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def _modules_as_before() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def test_a_function_of_a_file_beside_the_recipe_is_imported(tmp_path: Path) -> None:
    write(tmp_path, {"models/minilm": "def build(): return 42"})
    path = list(sys.path)
    assert resolve("models/minilm.py:build", tmp_path)() == 42
    assert sys.path == path
    assert "minilm" not in sys.modules


def test_modules_beside_the_file_and_in_the_recipes_folder_can_be_imported(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "models/minilm": "import layers\nfrom common.base import START\nfrom .late import more\n"
            "def build():\n    from .later import END\n    return layers.SIZE + START + more() + END",
            "models/layers": "SIZE = 1",
            "models/late": "def more(): return 30",
            "models/later": "END = 400",
            "common/base": "START = 5000",
        },
    )
    assert resolve("models/minilm.py:build", tmp_path)() == 5431


def test_two_functions_of_one_file_share_its_module(tmp_path: Path) -> None:
    write(tmp_path, {"m": "seen = []\ndef build(): seen.append(1)\ndef count(): return len(seen)"})
    resolve("m.py:build", tmp_path)()
    assert resolve("m.py:count", tmp_path)() == 1


def test_a_changed_file_is_imported_anew(tmp_path: Path) -> None:
    write(tmp_path, {"m": "def build(): return 1"})
    assert resolve("m.py:build", tmp_path)() == 1
    write(tmp_path, {"m": "def build(): return 2"})
    assert resolve("m.py:build", tmp_path)() == 2


def test_equal_names_in_two_recipes_do_not_meet(tmp_path: Path) -> None:
    text = "import layers\ndef build(): return layers.SIZE"
    one = write(tmp_path / "one", {"m": text, "layers": "SIZE = 1"})
    two = write(tmp_path / "two", {"m": text, "layers": "SIZE = 2"})
    assert [resolve("m.py:build", root)() for root in (one, two)] == [1, 2]


def test_files_of_two_folders_of_a_recipe_share_what_lies_above_them(tmp_path: Path) -> None:
    text = "import common\nimport layers\ndef build(): return common.seen, layers.SIZE"
    write(tmp_path, {"a/m": text, "a/layers": "SIZE = 1", "b/m": text, "b/layers": "SIZE = 2", "common": "seen = []"})
    (one, first), (two, second) = (resolve(f"{folder}/m.py:build", tmp_path)() for folder in "ab")
    assert one is two
    assert (first, second) == (1, 2)


def test_another_recipes_module_is_not_found(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"m": "import layers\ndef build(): pass", "layers": ""})
    two = write(tmp_path / "two", {"m": "import layers\ndef build(): pass"})
    resolve("m.py:build", one)
    with pytest.raises(VbpipeError, match="No module named 'layers'"):
        resolve("m.py:build", two)


def test_a_function_of_an_installed_module_is_imported(tmp_path: Path) -> None:
    assert resolve("os.path:basename", tmp_path)("a/b") == "b"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("models/minilm2.py:build", "no file 'models/minilm2.py'"),
        ("models/minilm2.py:build", "Did you mean 'minilm.py'?"),
        ("models/minilm.py:biuld", "models/minilm.py has no 'biuld'. Did you mean 'build'?"),
        ("models/minilm.py:SIZE", "'SIZE' is a int, not a function."),
    ],
)
def test_a_reference_that_leads_nowhere_says_so(tmp_path: Path, reference: str, message: str) -> None:
    write(tmp_path, {"models/minilm": "SIZE = 1\ndef build(): pass"})
    with pytest.raises(UsageError) as caught:
        resolve(reference, tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{reference}: ")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("x = 1\nraise KeyError('weights')", 2, "importing it failed: KeyError: 'weights'."),
        ("import not_there_at_all", 1, "Install 'not_there_at_all', or put it beside the recipe."),
        ("def build(:\n  pass", 1, "SyntaxError"),
        ("import sys\n\nsys.exit(3)", 3, "ends the program"),
        ("import broken", 0, "ZeroDivisionError"),
    ],
)
def test_code_that_fails_to_import_is_named_by_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    write(tmp_path, {"m": text, "broken": "\n\n1 / 0"})
    path = list(sys.path)
    with pytest.raises(VbpipeError) as caught:
        resolve("m.py:build", tmp_path)
    where = f"{tmp_path / 'm.py'}:{line}" if line else f"{tmp_path / 'broken.py'}:3"
    assert caught.value.where == where
    assert message in str(caught.value)
    assert sys.path == path


def test_a_missing_module_is_a_usage_error_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(VbpipeError, match="Install 'no_such_package'"):
        resolve("no_such_package.models:build", tmp_path)


def test_digests_cover_local_modules_and_the_versions_of_packages(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "models/minilm": "import os, json\nimport numpy as np\nimport layers\nfrom models import tokens\n"
            "def build():\n    import yaml\n    from .late import more",
            "models/layers": "import layers  # itself\nimport pydantic.fields",
            "models/tokens": "from .late import more",
            "models/late": "import no_such_package",
            "models/unused": "",
            "common": "",
        },
    )
    found = source_digests("models/minilm.py:build", tmp_path)
    assert dict(found) == {
        **{
            f"source.models/{name}.py": hashlib.sha256((tmp_path / "models" / f"{name}.py").read_bytes()).hexdigest()
            for name in ("minilm", "layers", "tokens", "late")
        },
        "package.numpy": version("numpy"),
        "package.PyYAML": version("PyYAML"),
        "package.pydantic": version("pydantic"),
        "package.no_such_package": "absent",
    }


def test_a_change_in_an_imported_module_changes_the_digests(tmp_path: Path) -> None:
    write(tmp_path, {"m": "import a", "a": "import pkg.b", "pkg/b": "X = 1", "pkg/__init__": ""})
    before = source_digests("m.py:build", tmp_path)
    write(tmp_path, {"pkg/b": "X = 2"})
    after = source_digests("m.py:build", tmp_path)
    assert {key for key in before if before[key] != after[key]} == {"source.pkg/b.py"}
    assert "source.pkg/__init__.py" in before


def test_a_file_that_is_not_python_still_has_a_digest(tmp_path: Path) -> None:
    write(tmp_path, {"m": "def ("})
    assert list(source_digests("m.py:build", tmp_path)) == ["source.m.py"]


def test_named_files_and_packages_are_part_of_the_digests(tmp_path: Path) -> None:
    write(tmp_path, {"m": ""})
    (tmp_path / "weights.bin").write_bytes(b"123")
    found = source_digests("m.py:build", tmp_path, ("weights.bin",), ("PyYAML", "no-such-thing"))
    assert found["file.weights.bin"] == hashlib.sha256(b"123").hexdigest()
    assert (found["package.PyYAML"], found["package.no-such-thing"]) == (version("PyYAML"), "absent")
    with pytest.raises(UsageError, match=r"no file 'weight\.bin'.*Did you mean 'weights\.bin'"):
        source_digests("m.py:build", tmp_path, ("weight.bin",))


def test_an_installed_modules_digest_is_its_file_and_version(tmp_path: Path) -> None:
    found = source_digests("pydantic.fields:Field", tmp_path)
    assert set(found) == {"source.pydantic.fields", "package.pydantic"}


def test_a_module_under_development_is_followed_through_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        {
            "zoo/__init__": "",
            "zoo/nets": "from zoo.parts import x\nfrom . import more",
            "zoo/parts": "",
            "zoo/more": "",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = source_digests("zoo.nets:build", tmp_path / "elsewhere")
    assert set(found) == {f"source.zoo/{name}.py" for name in ("__init__", "nets", "parts", "more")}


def test_digests_import_nothing() -> None:
    code = (
        "import sys; from pathlib import Path; from vbpipe.recipe.references import source_digests\n"
        "found = source_digests('torch.nn.functional:relu', Path('.'))\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n" or "there is no module 'torch" in done.stderr
