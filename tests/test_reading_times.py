"""The example script of reading times, on made-up stories: its figures against scikit-learn and scipy."""

import gzip
import runpy
import sys
from collections import Counter

import numpy as np
import pytest
from bilm_models import make_tokenizer, save, tiny_model
from places import ROOT
from scipy.stats import norm
from sklearn.linear_model import LinearRegression

from modeling_elmo import ELMoForPreTraining

SCRIPT = ROOT / "docs" / "reading_times.py"
CORPUS = "The cat sat .\nWe saw the dog , does n't it ?\n" * 3 + "the the"
VOCABULARY = ["the", "The", "cat", "dog", "sat", "saw", "does", "n't", "we", "very", "quietly", ".", ",", "?", "'"]
ENDINGS = [".", "?'", ",."]


def make_words(random) -> dict[tuple[int, int], list[str]]:
    """Tokens by story and place in it: some words end a sentence, and some are unknown."""
    words = {}
    for story in (1, 2):
        for zone in range(1, 651):
            ends = random.random() < 0.15 or zone == 650
            words[story, zone] = [random.choice([*VOCABULARY[:11], "Zyx"]), *(random.choice(ENDINGS) if ends else "")]
    return words


def surprisals_of(words, model, tokenizer) -> dict[str, list[float]]:
    """Those of each word, which are sums over its tokens."""
    sentences = [[]]
    for word in words.values():
        sentences[-1].append(word)
        if len(word) > 1:
            sentences.append([])
    found = {"forward": [], "backward": []}
    for sentence in sentences[:-1]:
        tokens = [token for word in sentence for token in word]
        scores = model.score(**tokenizer(tokens, is_split_into_words=True, return_tensors="pt"))
        for name, surprisals in found.items():
            of_tokens = iter(getattr(scores, f"{name}_log_probs")[0, 1:-1].tolist())
            surprisals += [-sum(next(of_tokens) for _ in word) for word in sentence]
    return found


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("stories"), np.random.default_rng(0)
    tokenizer = make_tokenizer(*VOCABULARY)
    model = tiny_model(ELMoForPreTraining, vocab_size=len(tokenizer))
    save(folder / "model", model, tokenizer)
    words = make_words(random)
    surprisals = surprisals_of(words, model, tokenizer)
    forward, gpt3 = surprisals["forward"], random.exponential(5, len(words))
    slow = np.array(forward) / np.std(forward) + gpt3 / np.std(gpt3) / 2 + random.normal(size=len(words))
    log_times = slow / 10 + 6
    codes, pieces, times = [], ["token,logprob,story"], []
    for ((story, zone), word), surprisal, log_time in zip(words.items(), gpt3, log_times, strict=True):
        codes += [f"{story}.{zone}.whole\t{' '.join(word)}", f"{story}.{zone}.word\t{word[0]}"]
        codes += [f"{story}.{zone}.{number}\t{token}" for number, token in enumerate(word, 1)]
        letters = "".join(word)
        pieces += [f'" {letters[:2]}",{-surprisal},{story - 1}', f'"{letters[2:]}",0,{story - 1}']
        times.append(f"{letters}\t{zone}\t{story}\t{np.exp(log_time)}")
    (folder / "words.tsv").write_text("\n".join(codes))
    (folder / "times").mkdir()
    times = ["word\tzone\titem\tgmeanItemRT", *random.permutation(times)]
    (folder / "times" / "processed_wordinfo.tsv").write_text("\n".join(times))
    (folder / "all_stories_gpt3.csv.gz").write_bytes(gzip.compress("\n".join(pieces).encode()))
    (folder / "corpus.txt").write_text(CORPUS)
    return folder, list(words.items()), log_times, {**surprisals, "GPT-3": gpt3}


def expected(words, log_times, surprisals, names):
    """The gain, its standard error and the number of words, a word at a time."""
    counts = Counter(CORPUS.lower().split())
    rows = []
    for index, ((_, zone), _) in enumerate(words):
        three = [words[index - lag][1] for lag in range(3)] if zone > 2 else [["Zyx"]]
        if any(token not in VOCABULARY for word in three for token in word):
            continue
        sizes = [sum(character.isalnum() for character in "".join(word)) for word in three]
        frequencies = [sum(np.log((counts[token.lower()] + 1) / counts.total()) for token in word) for word in three]
        added = [surprisals[name][index - lag] for name in names for lag in range(3)]
        rows.append([log_times[index], zone, *sizes, *frequencies, *added])
    rows, found = np.array(rows), []
    for columns in (rows[:, 1:], rows[:, 1:8]):
        found.append([])
        for test in np.array_split(np.arange(len(rows)), 10):
            train = [row for row in range(len(rows)) if row not in test]
            line = LinearRegression().fit(columns[train], rows[train, 0])
            scale = np.std(rows[train, 0] - line.predict(columns[train]))
            found[-1] += norm.logpdf(rows[test, 0], line.predict(columns[test]), scale).tolist()
    gains = 1000 * np.subtract(*found)
    blocks = [gains[start : start + 100].mean() for start in range(0, len(gains) - 99, 100)]
    return gains.mean(), np.std(blocks, ddof=1) / np.sqrt(len(blocks)), len(gains)


def test_gains_are_those_of_an_independent_regression(parts, monkeypatch, capsys):
    folder, words, log_times, surprisals = parts
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder), str(folder / "model"), str(folder / "corpus.txt")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    first, *lines = capsys.readouterr().out.splitlines()
    cases = [["forward"], ["backward"], ["forward", "backward"], ["GPT-3"]]
    for line, names in zip(lines, cases, strict=True):
        gain, error, number = expected(words, log_times, surprisals, names)
        assert first == f"gain in 1e-3 nats per word over {number:,} words, and its standard error" and number > 500
        assert line == f"{' and '.join(names):20} {gain:5.1f} ± {error:.1f}"
        assert "backward" in names or gain > 3 * error  # the times were made from these two
