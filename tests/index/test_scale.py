"""The scale benchmark runs. Its times depend on the machine and are not checked."""

from __future__ import annotations

import json

from examples.benchmarks.index_scale import WORK, main


def test_the_benchmark_of_the_index_runs(tmp_path, capsys):
    options = ["--sizes", "2000", "--policies", "pgdsf", "--noisy"]
    main([*options, "--out", str(tmp_path)])
    assert "| pgdsf" in capsys.readouterr().out
    row = json.loads((tmp_path / "index_scale.json").read_text())["figures"][
        "pgdsf 2000"
    ]
    assert row.keys() == {*WORK, "bytes per node"}
    assert row["bytes per node"] < 700
