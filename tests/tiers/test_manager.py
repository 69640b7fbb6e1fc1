"""The tier manager: reuse, holes, budgets, eviction order, what a lease leaves."""

from __future__ import annotations

import logging
import weakref

import pytest

from pcr_core.errors import ConfigError
from pcr_core.tiers import HostPool, InlineIo, SlabPlan, TierManager, open_tiers
from pcr_core.tiers.slabs import PAGE
from tests.tiers.registrars import FakeRegistrar, until


def test_second_request_reads_dram(kit):
    manager = kit.manager()
    tokens = [*kit.prompt(1, 2, 3), 9]
    first, second = kit.serve(manager, tokens), kit.serve(manager, tokens)
    assert (first.tiers, first.sinks) == ({}, [0, 1, 2])
    assert (second.tiers, second.sinks) == ({0: "dram", 1: "dram", 2: "dram"}, [])
    stats = manager.snapshot()
    assert (stats.dram_hit_tokens, stats.miss_tokens) == (12, 14)
    assert (stats.requests, stats.written, stats.holes) == (2, 3, 0)


def test_last_chunk_of_an_exact_multiple_is_kept_but_not_read(kit):
    manager = kit.manager()
    tokens = kit.prompt(1, 2)
    kit.serve(manager, tokens)
    again = kit.serve(manager, tokens)
    assert (again.tiers, again.sinks) == ({0: "dram"}, [])
    longer = kit.serve(manager, [*tokens, 9])
    assert longer.tiers == {0: "dram", 1: "dram"}


def test_restart_reads_ssd_then_dram(kit):
    tokens = [*kit.prompt(1, 2, 3), 9]
    first = kit.manager()
    kit.serve(first, tokens)
    first.close()
    second = kit.manager()
    assert second.match(kit.keys_of(tokens)) == ["ssd"] * 3
    assert kit.serve(second, tokens).tiers == {0: "ssd", 1: "ssd", 2: "ssd"}
    assert kit.serve(second, tokens).tiers == {0: "dram", 1: "dram", 2: "dram"}
    stats = second.snapshot()
    assert (stats.read, stats.written, stats.ssd_hit_tokens) == (3, 0, 12)
    assert stats.read_bytes == 3 * kit.file_nbytes
    assert second.check().ok


def test_without_ssd(kit):
    manager = kit.manager(ssd_chunks=0)
    tokens = [*kit.prompt(1, 2), 9]
    kit.serve(manager, tokens)
    assert kit.serve(manager, tokens).tiers == {0: "dram", 1: "dram"}
    assert manager.flush()
    assert manager.check().ok


def test_a_hole_costs_only_itself(kit):
    tokens = [*kit.prompt(1, 2, 3, 4), 9]
    first = kit.manager()
    kit.serve(first, tokens)
    first.close()
    (kit.folder / "chunks" / f"{kit.keys_of(tokens)[1].hex()}.safetensors").unlink()
    second = kit.manager()
    served = kit.serve(second, tokens)
    assert (served.tiers, served.sinks) == ({0: "ssd", 2: "ssd", 3: "ssd"}, [1])
    assert second.snapshot().holes == 1
    assert second.match(kit.keys_of(tokens)) == ["dram"] * 4


def test_a_file_lost_under_a_running_manager_is_a_hole(kit):
    tokens = [*kit.prompt(1, 2, 3), 9]
    kit.serve(kit.manager(), tokens)
    manager = kit.manager(folder=kit.folder)
    (kit.folder / "chunks" / f"{kit.keys_of(tokens)[1].hex()}.safetensors").unlink()
    served = kit.serve(manager, tokens)
    assert (served.tiers, served.sinks) == ({0: "ssd", 2: "ssd"}, [1])
    assert manager.snapshot().missing == 1
    assert manager.check().ok


def test_a_corrupt_chunk_is_removed_recomputed_and_stored_again(kit):
    tokens = [*kit.prompt(1, 2, 3), 9]
    first = kit.manager()
    kit.serve(first, tokens)
    first.close()
    path = kit.folder / "chunks" / f"{kit.keys_of(tokens)[2].hex()}.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    second = kit.manager()
    assert kit.serve(second, tokens).tiers == {0: "ssd", 1: "ssd"}
    assert second.snapshot().corrupt == 1
    assert second.snapshot().written == 1
    assert second.check().ok
    second.close()
    assert kit.serve(kit.manager(), tokens).tiers == {0: "ssd", 1: "ssd", 2: "ssd"}


def test_a_corrupt_chunk_that_nobody_recomputes_is_removed_too(kit):
    tokens = [*kit.prompt(1, 2), 9]
    first = kit.manager()
    kit.serve(first, tokens)
    first.close()
    damaged = kit.folder / "chunks" / f"{kit.keys_of(tokens)[1].hex()}.safetensors"
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    second = kit.manager()
    second.lease(kit.keys_of(tokens), tokens, 2).close()
    assert not damaged.exists()
    assert second.match(kit.keys_of(tokens)) == ["dram", "none"]
    assert second.snapshot().corrupt == 1
    assert second.check().ok


def test_match_changes_nothing(kit):
    manager = kit.manager(slots=3, ssd_chunks=0)
    for number in (1, 2, 3):
        kit.serve(manager, [*kit.prompt(number), 9])
    for _ in range(10):
        assert manager.match(kit.keys_of(kit.prompt(1))) == ["dram"]
    before = manager.snapshot()
    kit.serve(manager, [*kit.prompt(4), 9])
    assert manager.match(kit.keys_of(kit.prompt(1))) == ["none"]
    assert before.dram_hit_tokens == 0


def test_leaves_go_first_and_expose_their_parents(kit):
    manager = kit.manager(slots=4, ssd_chunks=0)
    long = kit.prompt(1, 2, 3)
    kit.serve(manager, [*long, 9])
    kit.serve(manager, [*kit.prompt(4), 9])
    left = []
    for number in (5, 6, 7):
        kit.serve(manager, [*kit.prompt(number), 9])
        left.append(manager.match(kit.keys_of(long)).count("dram"))
    assert left == [2, 1, 0]
    assert manager.match(kit.keys_of(kit.prompt(4))) == ["dram"]


def test_exactly_the_shortfall_is_evicted(kit):
    manager = kit.manager(slots=4, ssd_chunks=0)
    kit.serve(manager, [*kit.prompt(1), 9])
    kit.serve(manager, [*kit.prompt(2), 9])
    kit.serve(manager, [*kit.prompt(3, 4, 5), 9])
    assert manager.snapshot().dram_evictions == 1
    assert manager.match(kit.keys_of(kit.prompt(2))) == ["dram"]


def test_a_prompt_longer_than_dram_keeps_its_head(kit):
    manager = kit.manager(slots=2, ssd_chunks=3)
    tokens = [*kit.prompt(1, 2, 3, 4, 5), 9]
    first = kit.serve(manager, tokens)
    assert first.sinks == [0, 1]
    assert manager.snapshot().bypassed_inserts == 3
    assert kit.serve(manager, tokens).tiers == {0: "dram", 1: "dram"}
    assert manager.check().ok


def test_ssd_keeps_the_head_of_a_path_and_is_not_written_in_circles(kit):
    manager = kit.manager(slots=8, ssd_chunks=2)
    tokens = [*kit.prompt(1, 2, 3, 4), 9]
    kit.serve(manager, tokens)
    kit.serve(manager, tokens)
    stats = manager.snapshot()
    assert (stats.written, stats.ssd_evictions, stats.ssd_chunks) == (2, 0, 2)
    assert kit.file_bytes(kit.folder) <= 2 * kit.file_nbytes
    manager.close()
    assert kit.serve(kit.manager(ssd_chunks=2), tokens).tiers == {0: "ssd", 1: "ssd"}


def test_ssd_budget_evicts_least_recently_used_leaf_first(kit):
    manager = kit.manager(slots=8, ssd_chunks=3)
    kit.serve(manager, [*kit.prompt(1, 2), 9])
    kit.serve(manager, [*kit.prompt(3), 9])
    kit.serve(manager, [*kit.prompt(4), 9])
    assert kit.file_bytes(kit.folder) == 3 * kit.file_nbytes
    names = {path.stem for path in kit.chunk_files(kit.folder)}
    one, two = kit.keys_of(kit.prompt(1, 2))
    assert one.hex() in names
    assert two.hex() not in names


def test_recency_survives_a_restart(kit):
    clock = kit.Clock()
    first = kit.manager(ssd_chunks=3, clock=clock)
    for number in (1, 2, 3, 1):
        kit.serve(first, [*kit.prompt(number), 9])
    first.close()
    second = kit.manager(ssd_chunks=3, clock=clock)
    kit.serve(second, [*kit.prompt(4), 9])
    states = [second.match(kit.keys_of(kit.prompt(n)))[0] for n in (1, 2, 3, 4)]
    assert states == ["ssd", "none", "ssd", "dram"]


def test_a_smaller_budget_evicts_at_open(kit):
    first = kit.manager(ssd_chunks=6)
    kit.serve(first, [*kit.prompt(1, 2, 3), 9])
    kit.serve(first, [*kit.prompt(4), 9])
    first.close()
    second = kit.manager(ssd_chunks=2)
    assert kit.file_bytes(kit.folder) == 2 * kit.file_nbytes
    assert second.match(kit.keys_of(kit.prompt(1, 2, 3))) == ["ssd", "none", "none"]
    assert second.match(kit.keys_of(kit.prompt(4))) == ["ssd"]
    assert second.check().ok


def test_interrupted_prefill_keeps_what_was_filled(kit):
    manager = kit.manager()
    tokens = [*kit.prompt(1, 2, 3), 9]
    kit.serve(manager, tokens, fail=True)
    assert manager.match(kit.keys_of(tokens)) == ["dram", "none", "none"]
    report = manager.check()
    assert report.ok, str(report)
    assert kit.serve(manager, tokens).tiers == {0: "dram"}


def test_lease_left_without_waiting_still_gets_its_reads(kit):
    tokens = [*kit.prompt(1, 2), 9]
    first = kit.manager()
    kit.serve(first, tokens)
    first.close()
    second = kit.manager()
    with second.lease(kit.keys_of(tokens), tokens, 2) as lease:
        assert set(lease.sources) == {0, 1}
    assert second.match(kit.keys_of(tokens)) == ["dram", "dram"]
    assert second.snapshot().ssd_hit_tokens == 2 * kit.layout.chunk_tokens
    assert second.check().ok


def test_open_lease_is_pinned_against_eviction(kit):
    manager = kit.manager(slots=2, ssd_chunks=0)
    tokens = [*kit.prompt(1, 2), 9]
    kit.serve(manager, tokens)
    with manager.lease(kit.keys_of(tokens), tokens, 2) as lease:
        assert kit.serve(manager, [*kit.prompt(3), 9]).sinks == []
        assert bytes(lease.sources[1].view) == kit.content(kit.keys_of(tokens)[1])
        assert manager.check().ok
    assert manager.snapshot().bypassed_inserts == 1
    assert kit.serve(manager, [*kit.prompt(3), 9]).sinks == [0]


def test_a_lease_that_outlives_its_manager_ends_quietly(kit):
    tokens = [*kit.prompt(1, 2, 3), 9]
    kit.serve(kit.manager(), tokens)
    manager = kit.manager()
    lease = manager.lease(kit.keys_of(tokens), tokens, 1)
    lease.wait()
    assert set(lease.sinks) == {1, 2}
    lease.filled(1)
    manager.close()
    lease.close()
    lease.close()
    assert not lease.pending


def test_second_lease_on_a_filling_chunk_treats_it_as_absent(kit):
    manager = kit.manager()
    tokens = [*kit.prompt(1, 2), 9]
    keys = kit.keys_of(tokens)
    with manager.lease(keys, tokens, 2) as first:
        with manager.lease(keys, tokens, 2) as second:
            assert (dict(second.sources), dict(second.sinks)) == ({}, {})
        for index, slot in first.sinks.items():
            slot.view[:] = kit.content(keys[index])
            first.filled(index)
    assert kit.serve(manager, tokens).tiers == {0: "dram", 1: "dram"}
    assert manager.check().ok


def test_filled_wants_a_sink(kit):
    manager = kit.manager()
    tokens = [*kit.prompt(1), 9]
    with (
        manager.lease(kit.keys_of(tokens), tokens, 1) as lease,
        pytest.raises(KeyError, match="no sink"),
    ):
        lease.filled(1)


@pytest.mark.parametrize("usable", [-1, 3])
def test_lease_refuses_arguments_that_do_not_fit(kit, usable):
    manager = kit.manager()
    tokens = kit.prompt(1, 2)
    with pytest.raises(ValueError, match="usable"):
        manager.lease(kit.keys_of(tokens), tokens, usable)
    with pytest.raises(ValueError, match="prompt of 7"):
        manager.lease(kit.keys_of(tokens), tokens[:-1], 0)
    assert manager.check().ok


def test_ssd_budget_below_one_chunk_names_both_numbers(kit):
    with pytest.raises(ConfigError, match=rf"1 bytes .* {kit.file_nbytes}"):
        open_tiers(
            kit.layout,
            kit.namespace,
            dram_bytes=PAGE,
            cache_dir=kit.folder,
            ssd_bytes=1,
        )


def test_open_builds_both_tiers_with_threads(kit):
    tokens = [*kit.prompt(1, 2, 3), 9]
    for expected in ({}, {0: "ssd", 1: "ssd", 2: "ssd"}):
        manager = open_tiers(
            kit.layout,
            kit.namespace,
            dram_bytes=2 * PAGE,
            cache_dir=kit.folder,
            ssd_bytes=16 * kit.file_nbytes,
        )
        assert kit.serve(manager, tokens).tiers == expected
        assert manager.flush(timeout=60)
        assert manager.check().ok
        manager.close()
        manager.close()


def test_dram_is_pinned_behind_it_and_given_back_at_the_end(kit):
    driver = FakeRegistrar()
    driver.gate.clear()
    manager = open_tiers(
        kit.layout,
        kit.namespace,
        dram_bytes=2 * PAGE,
        cache_dir=kit.folder,
        ssd_bytes=16 * kit.file_nbytes,
        registrar=driver,
    )
    assert manager.snapshot().dram_allocated == 0
    tokens = [*kit.prompt(1, 2, 3), 9]
    kit.serve(manager, tokens)
    before = manager.snapshot()
    assert (before.dram_allocated, before.dram_pinned) == (2 * PAGE, 0)
    memory = weakref.ref(manager._pool._slabs[0][0].bytes.obj)
    driver.gate.set()
    until(lambda: manager.snapshot().dram_pinned == 2 * PAGE)
    assert kit.serve(manager, tokens).tiers == {0: "dram", 1: "dram", 2: "dram"}
    manager.close()
    assert memory() is None, "although somebody holds the closed manager"
    assert [what for what, _ in driver.calls] == ["register", "unregister"]
    assert not driver.mistakes


def test_a_budget_that_no_machine_has_is_refused(kit):
    with pytest.raises(ConfigError, match="cannot be had"):
        open_tiers(
            kit.layout,
            kit.namespace,
            dram_bytes=2**60,
            cache_dir=kit.folder,
            ssd_bytes=0,
        )


def test_other_namespaces_share_the_budget_but_not_the_chunks(kit):
    from pcr_core.index.chunk import Namespace, chunk_keys
    from pcr_core.tiers import ChunkStore

    kit.serve(kit.manager(ssd_chunks=2), [*kit.prompt(1, 2), 9])
    other = Namespace.of([("test", b"other")])
    store = ChunkStore(kit.folder, 2 * kit.file_nbytes)
    pool = HostPool(kit.layout, SlabPlan(4, kit.layout.nbytes))
    clock = kit.Clock(start=10**9)
    manager = TierManager(kit.layout, other, pool, store, InlineIo(store), clock=clock)
    tokens = [*kit.prompt(1), 9]
    keys = chunk_keys(other, tokens, kit.layout.chunk_tokens)
    assert manager.match(keys) == ["none"]
    with manager.lease(keys, tokens, 1) as lease:
        lease.sinks[0].view[:] = bytes(kit.layout.nbytes)
        lease.filled(0)
    assert manager.snapshot().ssd_evictions == 1
    assert kit.file_bytes(kit.folder) == 2 * kit.file_nbytes
    assert manager.check().ok
    manager.close()


def test_memory_stays_bounded_by_what_is_held(kit):
    manager = kit.manager(slots=2, ssd_chunks=2)
    for number in range(50):
        kit.serve(manager, [*kit.prompt(number, number + 1000, number + 2000), 9])
    # Two chunks per tier, their ancestors, and the namespace's own node.
    assert len(manager._tree) <= 2 * 3 + 2 * 3 + 1


def test_trouble_is_logged_once_per_kind(kit, caplog):
    files = kit.FaultyFiles()
    manager = kit.manager(files=files)
    files.broken["fsync"] = 5
    with caplog.at_level(logging.WARNING, logger="pcr_core.tiers"):
        for number in (1, 2, 3):
            kit.serve(manager, [*kit.prompt(number), 9])
    assert manager.snapshot().write_errors == 3
    assert len(caplog.records) == 1
    assert "could not be written" in caplog.text


def test_statistics_print(kit):
    manager = kit.manager()
    kit.serve(manager, [*kit.prompt(1), 9])
    before = manager.snapshot()
    kit.serve(manager, [*kit.prompt(1), 9])
    after = manager.snapshot()
    assert (before.hit_tokens, after.hit_tokens) == (0, 4)
    assert after.hit_rate == pytest.approx(0.4)
    assert "4 DRAM" in str(after)
    assert "<table>" in after._repr_html_()
