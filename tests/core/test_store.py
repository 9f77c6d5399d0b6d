"""What goes into the store comes out byte for byte, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vbpipe.core import Artifact, CacheKey, Meta
from vbpipe.errors import StoreError
from vbpipe.store import Store, contents, tree_digest

KEY = CacheKey({"stage": "export", "options.opset": "20"})
FILES = {"model.onnx": b"graph" * 50, "weights/w.bin": bytes(range(256)), "empty": b""}


def fill(root: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def put(
    store: Store,
    key: CacheKey = KEY,
    files: Mapping[str, bytes] = FILES,
    identity: str = "m/standard/cpu/export",
    meta: Meta = MappingProxyType({"nodes": 7}),
) -> Artifact:
    with store.workspace() as work:
        out = work / "out"
        out.mkdir()
        fill(out, files)
        return store.put(key, identity, kind="onnx", source_dir=out, meta=meta, seconds=1.5)


def bytes_under(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def stored_file(store: Store, name: str) -> Path:
    entry = store.entries()[0]
    if name == "entry":
        return store.layout.entry(entry.key.digest)
    return store.layout.object(entry.digest) / name


def flip(path: Path, offset: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_result_comes_back_with_its_files_and_facts(tmp_path: Path) -> None:
    kept = put(Store(tmp_path))
    found = Store(tmp_path).get(KEY)
    assert found == kept
    assert found.kind == "onnx"
    assert found.meta == {"nodes": 7}
    assert bytes_under(found.path) == FILES
    assert found.digest == tree_digest(contents(found.path)) == found.path.name
    assert {path.stat().st_mode & 0o777 for path in found.path.rglob("*") if path.is_file()} == {0o444}


def test_a_fresh_result_has_the_facts_that_a_hit_will_have(tmp_path: Path) -> None:
    kept = put(Store(tmp_path), meta={"shape": (1, 2), "cosine": 0.1 + 0.2})
    found = Store(tmp_path).get(KEY)
    assert found is not None
    assert kept.meta == found.meta == {"shape": [1, 2], "cosine": 0.1 + 0.2}


def test_an_unknown_key_is_a_miss_and_looking_makes_no_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.get(KEY) is None
    assert store.peek(KEY) is None
    assert store.explain(KEY, "m/standard/cpu/export").state == "never built"
    assert store.verify().ok
    assert store.entries() == ()
    assert not store.root.exists()


def test_equal_bytes_under_two_keys_are_stored_once(tmp_path: Path) -> None:
    store, other = Store(tmp_path), CacheKey({"stage": "export", "options.opset": "21"})
    first, second = put(store), put(store, key=other, meta={"nodes": 8})
    assert first.path == second.path
    assert (store.get(KEY), store.get(other)) == (first, second)
    assert store.verify().objects == 1


def test_a_second_result_for_a_key_replaces_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = put(store), put(store, files={"model.onnx": b"other"})
    assert store.get(KEY) == second != first
    assert store.verify().orphans == (first.path,)


def test_a_workspace_is_gone_after_its_block_even_when_the_step_fails(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ZeroDivisionError), store.workspace() as work:
        (work / "half").write_bytes(b"written")
        _ = 1 / 0
    assert list(store.layout.tmp.iterdir()) == []


def test_a_sweep_leaves_the_workspace_of_a_live_process(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.workspace() as work:
        (work / "file").write_bytes(b"x")
        assert Store(tmp_path).sweep() == 0
        with Store(tmp_path).workspace():
            assert (work / "file").read_bytes() == b"x"


@pytest.mark.parametrize("oddity", ["symbolic link", "linked folder", "hard link", "special file"])
def test_what_could_change_behind_the_store_is_refused(tmp_path: Path, oddity: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"x")
    store = Store(tmp_path / "store")
    with store.workspace() as out:
        if oddity == "symbolic link":
            (out / "odd").symlink_to(outside / "file")
        elif oddity == "linked folder":
            (out / "odd").symlink_to(outside)
        elif oddity == "hard link":
            os.link(outside / "file", out / "odd")
        else:
            os.mkfifo(out / "odd")
        with pytest.raises(StoreError, match="'odd' is a"):
            store.put(KEY, "i", kind="onnx", source_dir=out, meta={}, seconds=0)
    assert store.get(KEY) is None
    assert (outside / "file").stat().st_mode & 0o200


@pytest.mark.parametrize("meta", [{"loss": float("nan")}, {"path": Path("x")}])
def test_facts_that_are_not_json_are_refused(tmp_path: Path, meta: Meta) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="can't be kept"):
        put(store, meta=meta)
    assert store.get(KEY) is None
    assert store.verify().entries == 0


@pytest.mark.parametrize("name", ["entry", "model.onnx", "weights/w.bin"])
def test_a_flipped_byte_at_any_offset_of_any_file_is_noticed(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    put(store)
    path = stored_file(store, name)
    original = path.read_bytes()
    path.chmod(0o644)
    for offset in range(len(original)):
        damaged = bytearray(original)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        assert store.explain(KEY, "i", among=()).state == "damaged", offset
        assert [damage.path for damage in store.verify().damaged][:1] == [path], offset
    path.write_bytes(original)
    assert store.verify().ok


@pytest.mark.parametrize("where", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", ["entry", "model.onnx", "weights/w.bin"])
def test_a_damaged_result_is_a_miss_with_a_warning_and_can_be_made_again(
    tmp_path: Path, name: str, where: float
) -> None:
    warnings: list[str] = []
    store = Store(tmp_path, warnings.append)
    kept = put(store)
    path = stored_file(store, name)
    flip(path, int(where * (path.stat().st_size - 1)), 0x80)
    assert store.get(KEY) is None
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert put(store) == kept == store.get(KEY)
    assert store.verify().ok


def _truncate(folder: Path) -> None:
    (folder / "model.onnx").chmod(0o644)
    os.truncate(folder / "model.onnx", 3)


def _link(folder: Path) -> None:
    (folder / "model.onnx").rename(folder.parent.parent.parent / "elsewhere")
    (folder / "model.onnx").symlink_to(folder.parent.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (_truncate, "has 3 bytes instead of 250"),
        (_link, "is not a regular file any more"),
        (lambda folder: (folder / "empty").unlink(), "is missing"),
        (lambda folder: (folder / "extra").write_bytes(b""), "was not there when this was stored"),
        (lambda folder: (folder / "folder").mkdir(), "was not there when this was stored"),
        (shutil.rmtree, "is missing"),
    ],
    ids=["truncated", "linked", "deleted", "added", "folder added", "all gone"],
)
def test_a_directory_that_changed_is_a_miss(tmp_path: Path, harm: object, problem: str) -> None:
    warnings: list[str] = []
    store = Store(tmp_path, warnings.append)
    kept = put(store)
    harm(kept.path)  # type: ignore[operator]
    assert store.peek(KEY) is None
    assert problem in str(store.explain(KEY, "i"))
    assert [damage.problem for damage in store.verify().damaged] == [problem]
    assert store.get(KEY) is None
    assert problem in warnings[0]
    assert put(store) == kept


def test_a_put_does_not_trust_the_bytes_that_are_there_already(tmp_path: Path) -> None:
    store, other = Store(tmp_path), CacheKey({"stage": "other"})
    put(store)
    flip(stored_file(store, "weights/w.bin"), 9)
    kept = put(store, key=other)
    assert store.get(KEY) == store.get(other) == kept


def test_damage_to_shared_files_is_a_miss_for_every_key_until_one_is_made_again(tmp_path: Path) -> None:
    store, other = Store(tmp_path, lambda _: None), CacheKey({"stage": "other"})
    put(store)
    shared = put(store, key=other)
    flip(stored_file(store, "model.onnx"), 5)
    assert store.get(KEY) is None
    assert store.get(other) is None
    put(store)
    assert store.get(other) == shared


def test_an_entry_copied_to_another_key_is_not_believed(tmp_path: Path) -> None:
    store, other = Store(tmp_path, lambda _: None), CacheKey({"stage": "other"})
    put(store)
    shutil.copy(store.layout.entry(KEY.digest), store.layout.entry(other.digest))
    assert store.get(other) is None


def test_verify_names_strangers_and_repair_sets_them_aside(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = put(store)
    (store.layout.entries / "notes.txt").write_text("hello")
    (store.layout.objects / "ab").mkdir(exist_ok=True)
    (store.layout.objects / "ab" / "junk").write_text("hello")
    assert len(store.verify().damaged) == 2
    report = store.verify(repair=True)
    assert report.repaired
    assert store.verify().ok
    assert store.get(KEY) == kept


def test_repair_makes_room_for_the_next_build(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = put(store)
    flip(kept.path / "model.onnx", 0)
    assert store.verify(repair=True).damaged[0].path == kept.path / "model.onnx"
    assert not kept.path.exists()
    assert put(store) == kept
    assert store.verify().ok


def test_damage_in_an_object_that_no_entry_names_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = put(store)
    store.layout.entry(KEY.digest).unlink()
    assert store.verify().orphans == (kept.path,)
    flip(kept.path / "model.onnx", 7)
    report = store.verify()
    assert [damage.path for damage in report.damaged] == [kept.path]
    assert report.orphans == ()


def test_a_failed_step_leaves_its_log_until_it_succeeds_and_is_never_a_hit(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for text in ("first", "second"):
        (tmp_path / "log").write_text(text)
        folder = store.fail(KEY, tmp_path / "log", {"stage": "export", "root": tmp_path})
    assert store.get(KEY) is None
    assert store.failure(KEY) == folder
    assert (folder / "log.txt").read_text() == "second"
    assert "export" in (folder / "job.json").read_text()
    put(store)
    assert store.failure(KEY) is None


def test_a_file_in_place_of_the_store_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a store")
    store = Store(tmp_path / "store")
    with pytest.raises(StoreError, match="A file is where the store needs a folder"):
        store.get(KEY)
    with pytest.raises(StoreError, match="A file is where the store needs a folder"):
        put(store)


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..")
)
trees = st.dictionaries(
    names,
    st.recursive(st.binary(max_size=60), lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=6),
    max_size=4,
)


def write_tree(root: Path, tree: Mapping[str, object]) -> None:
    for name, node in tree.items():
        if isinstance(node, bytes):
            (root / name).write_bytes(node)
        else:
            (root / name).mkdir()
            write_tree(root / name, node)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees, meta=st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.booleans(), max_size=3))
def test_any_tree_comes_back_as_it_was(tmp_path: Path, tree: Mapping[str, object], meta: Meta) -> None:
    store, key = Store(tmp_path / "store"), CacheKey({"n": repr(tree), "m": ascii(meta)})
    with store.workspace() as work:
        (work / "out").mkdir()
        write_tree(work / "out", tree)
        before = bytes_under(work / "out")
        kept = store.put(key, "i", kind="k", source_dir=work / "out", meta=meta, seconds=0.25)
    found = store.get(key)
    assert found == kept
    assert found.meta == meta
    assert bytes_under(found.path) == before
    assert store.explain(key, "i").state == "hit"
