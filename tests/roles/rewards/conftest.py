"""Data of nltk for the rewards of instructions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

_STOP_WORDS = "a has high i is the this"
"""Of nltk's, those that the cases have."""


@pytest.fixture(scope="module")
def language_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """nltk's own is a download: sentences end as they do without known abbreviations, and one word is a verb."""
    import nltk
    from langdetect import detector_factory

    from rondo.roles.rewards.hub import instructions

    folder = tmp_path_factory.mktemp("nltk")
    tagger = f"taggers/{(name := 'averaged_perceptron_tagger_eng')}/{name}"
    files = dict.fromkeys(("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"), "")
    files = {f"tokenizers/punkt_tab/english/{name}": text for name, text in files.items()} | {
        "tokenizers/punkt/none": "", "corpora/stopwords/english": "\n".join(_STOP_WORDS.split()),
        f"{tagger}.weights.json": "{}", f"{tagger}.tagdict.json": '{"Does": "VBZ"}',
        f"{tagger}.classes.json": '["NN"]',
    }  # fmt: skip
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    instructions._checkers.cache_clear()
    nltk.data.path.insert(0, str(folder))
    assert detector_factory._factory is not None  # what takes most of a second is there before the first answer
    yield
    nltk.data.path.remove(str(folder))
