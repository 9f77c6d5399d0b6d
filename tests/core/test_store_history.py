"""The store says why a step is a miss, where a result is from, and removes only what no one needs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vbpipe.core import Artifact, CacheKey
from vbpipe.errors import StoreError
from vbpipe.store import Change, Store

DAY_S = 86400
NAME = "m/standard/cpu/quantize"


def key(**parts: str) -> CacheKey:
    return CacheKey({"stage": "quantize", **parts})


def put(store: Store, made_by: CacheKey, identity: str = NAME, data: str = "") -> Artifact:
    with store.workspace() as out:
        (out / "model.onnx").write_text(data or made_by.digest)
        return store.put(made_by, identity, kind="onnx", source_dir=out, meta={}, seconds=2)


def age(store: Store, days: float) -> None:
    """Make everything in the store look `days` older."""
    for path in [*store.layout.entries.glob("*"), *store.layout.objects.glob("??/*")]:
        then = path.stat().st_mtime - days * DAY_S
        os.utime(path, (then, then))


def kept_keys(store: Store) -> set[str]:
    return {entry.key.digest for entry in store.entries()}


def test_a_miss_names_the_parts_that_changed_against_the_newest_of_its_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, key(group="64", tool="1.0", gone="x"))
    put(store, key(group="32", tool="1.0", gone="x"))
    put(store, key(group="99"), identity="m/other/cpu/quantize")
    explanation = store.explain(key(group="32", tool="1.1", extra="y"), NAME)
    assert explanation.state == "changed"
    assert explanation.changes == (Change("extra", None, "y"), Change("gone", "x", None), Change("tool", "1.0", "1.1"))
    assert str(explanation) == "extra is new (y); gone is gone (was x); tool was 1.0, is 1.1"


def test_a_step_that_was_never_built_and_one_that_is_there_say_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, key(group="64"))
    assert str(store.explain(key(group="32"), "m/new/cpu/quantize")) == "never built"
    assert str(store.explain(key(group="64"), "m/new/cpu/quantize")) == "hit"


def test_a_step_shared_by_variants_is_in_the_history_of_each(tmp_path: Path) -> None:
    store, other = Store(tmp_path), "m/int4/cpu/quantize"
    first = put(store, key(group="64"))
    assert store.get(key(group="64"), other) == first
    assert store.explain(key(group="32"), other).changes == (Change("group", "64", "32"),)
    assert store.entries()[0].identity == NAME
    assert set(store.entries()[0].identities) == {NAME, other}
    put(store, key(group="64"))
    assert set(store.entries()[0].identities) == {NAME, other}
    assert store.verify().ok


def test_a_glance_takes_bytes_on_trust_and_a_look_does_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = put(store, key(), data="abc").path / "model.onnx"
    path.chmod(0o644)
    path.write_text("abd")
    assert store.explain(key(), NAME, hashed=False).state == "hit"
    assert store.explain(key(), NAME).state == "damaged"
    assert path.exists()


def test_why_finds_by_name_key_and_artifact_and_says_what_changed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, key(group="64"))
    newest = put(store, key(group="32"))
    by_name = store.why(NAME)
    assert [found.entry.key.parts["group"] for found in by_name] == ["32", "64"]
    assert by_name[0].changes == (Change("group", "64", "32"),)
    assert by_name[1].previous is None
    assert store.why(newest.digest[:10]) == store.why(key(group="32").digest[:10]) == by_name[:1]
    with pytest.raises(StoreError, match=f"Did you mean {NAME}"):
        store.why("m/standard/cpu/quantise")


def test_a_collection_keeps_the_newest_of_each_name_and_what_was_used_lately(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, key(group="1"))
    put(store, key(group="2"))
    put(store, key(group="3"))
    age(store, 40)
    assert store.get(key(group="1")) is not None
    report = store.gc(keep_days=30, newest=1)
    assert [entry.key for entry in report.entries] == [key(group="2")]
    assert len(report.objects) == 1
    assert report.freed == 64
    assert kept_keys(store) == {key(group="1").digest, key(group="3").digest}
    assert store.verify().orphans == ()
    assert store.verify().ok


def test_a_collection_keeps_what_it_is_told_to_and_what_that_was_made_from(tmp_path: Path) -> None:
    store = Store(tmp_path)
    source = put(store, key(n="source"), identity="m/export")
    put(store, CacheKey({"stage": "build", "input.onnx": source.digest}), identity="m/build")
    put(store, key(n="unrelated"), identity="m/unrelated")
    age(store, 40)
    report = store.gc(keep=["m/build"], newest=0)
    assert [entry.identity for entry in report.entries] == ["m/unrelated"]
    assert report.kept == 2


def test_the_grace_period_protects_what_a_running_build_uses(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, key(n="old"))
    age(store, 0.5)
    assert store.gc(keep_days=0, newest=0, grace_s=DAY_S).kept == 1
    age(store, 1)
    assert store.get(key(n="old")) is not None
    assert store.gc(keep_days=0, newest=0, grace_s=DAY_S).kept == 1
    age(store, 2)
    assert store.gc(keep_days=0, newest=0, grace_s=DAY_S).kept == 0


def test_an_object_without_entry_goes_only_after_the_grace_period(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = put(store, key())
    store.layout.entry(key().digest).unlink()
    assert store.gc().objects == ()
    age(store, 2)
    assert store.gc().objects == (kept.digest,)
    assert not kept.path.exists()


def test_a_locked_step_is_never_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, key())
    age(store, 100)
    with store.locked(key()):
        assert store.gc(keep_days=0, newest=0, grace_s=0).kept == 1
        assert store.layout.key_lock(key().digest).exists()
    assert store.gc(keep_days=0, newest=0, grace_s=0).kept == 0
    assert not store.layout.key_lock(key().digest).exists()


def test_files_shared_with_an_entry_that_stays_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, key(n="1"), data="same")
    put(store, key(n="2"), data="same")
    age(store, 40)
    report = store.gc(newest=1)
    assert (len(report.entries), report.objects) == (1, ())
    assert store.get(key(n="2")) is not None


def test_a_dry_run_says_the_same_and_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, key(n="1"))
    put(store, key(n="2"))
    age(store, 40)
    would = store.gc(dry_run=True)
    assert store.verify().entries == 2
    did = store.gc()
    assert (would.entries, would.objects, would.freed, would.kept) == (did.entries, did.objects, did.freed, did.kept)
    assert len(did.entries) == 1


def test_a_collection_removes_what_was_set_aside_and_old_failures(tmp_path: Path) -> None:
    store = Store(tmp_path, lambda _: None)
    store.fail(key(n="bad"), tmp_path / "no-log", {})
    path = put(store, key()).path / "model.onnx"
    path.unlink()
    assert store.get(key()) is None
    assert len(list(store.layout.damaged.iterdir())) == 1
    store.gc()
    assert len(list(store.layout.damaged.iterdir())) == 1
    assert store.failure(key(n="bad")) is not None
    time.sleep(0.01)
    store.gc(keep_days=0, grace_s=0)
    assert list(store.layout.damaged.iterdir()) == []
    assert store.failure(key(n="bad")) is None
