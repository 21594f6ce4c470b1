"""Does surprisal explain mean reading times better than length, frequency and position alone?

    python docs/reading_times.py naturalstories model_cards/elmo-small-en corpus.txt.gz

The folder is your copy of github.com/languageMIT/naturalstories; the corpus, with spaces between tokens, counts words.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
from transformers import AutoModelForPreTraining, AutoTokenizer

from modeling_elmo import score_texts
from modeling_elmo.run_scripts.program.texts import numbered_lines

folder, name, *corpora = sys.argv[1:]
files = [next(Path(folder).rglob(f"{stem}*")) for stem in ("words.tsv", "processed_wordinfo.tsv", "all_stories_gpt3")]
tokens = pd.read_csv(files[0], sep="\t", names=["code", "token"], quoting=3, keep_default_na=False)
tokens[["item", "zone", "part"]] = tokens.code.str.split(".", expand=True)  # story, word in it, token of the word
tokens = tokens[tokens.part.str.isdigit()].astype({"item": int, "zone": int}).set_index(["item", "zone"])
times = pd.read_csv(files[1], sep="\t", quoting=3).set_index(["item", "zone"]).gmeanItemRT
gpt3 = pd.read_csv(files[2], keep_default_na=False)
model, tokenizer = (each.from_pretrained(name) for each in (AutoModelForPreTraining, AutoTokenizer))
ends = tokens.token.isin([".", "?", "!"]).groupby(["item", "zone"]).any()
sentences = tokens.token.groupby(["item", (ends.cumsum() - ends).reindex(tokens.index)]).agg(list)
scores = [score[1:] for sentence in score_texts(model, tokenizer, sentences) for score in sentence[1:-1]]
counts = Counter(token for path in corpora for _, line in numbered_lines(Path(path)) for token in line.lower().split())
tokens[["forward", "backward"]] = -np.array(scores)
tokens["letters"] = [sum(map(str.isalnum, token)) for token in tokens.token]
tokens["frequency"] = [np.log((counts[token.lower()] + 1) / counts.total()) for token in tokens.token]
tokens["unknown"] = tokenizer.encode_words([*tokens.token])[0] == tokenizer.unk_token_id
words = tokens.groupby(["item", "zone"]).sum(numeric_only=True)
spelled = tokens.token.map(len).groupby(["item", "zone"]).sum().cumsum()
owners = np.searchsorted(spelled, gpt3.token.str.strip().map(len).cumsum())  # the word of each of GPT-3's tokens
words["GPT-3"] = np.bincount(owners, -pd.to_numeric(gpt3.logprob).fillna(0))
lags = [words.groupby("item").shift(lag) for lag in range(3)]  # the word, the word before it, and the one before that
chosen = sum(lag.unknown for lag in lags) == 0  # without unknown words, and not at the beginning of a story
target = np.log(times[words.index[chosen]].to_numpy())
base = np.column_stack([np.ones(len(target)), words.index[chosen].get_level_values("zone")])  # the place in the story


def log_likelihoods(*names):
    """Of each time, under a linear regression on the other nine of ten contiguous parts."""
    columns = [lag.loc[chosen, ["letters", "frequency", *names]] for lag in lags]
    predictors, found = np.column_stack([base, *columns]), np.empty(len(target))
    for test in np.array_split(np.arange(len(target)), 10):
        train = np.delete(np.arange(len(target)), test)
        errors = (target - predictors @ np.linalg.lstsq(predictors[train], target[train], rcond=None)[0]) ** 2
        found[test] = -(np.log(2 * np.pi * errors[train].mean()) + errors[test] / errors[train].mean()) / 2
    return found


print(f"gain in 1e-3 nats per word over {len(target):,} words, and its standard error")
for names in (["forward"], ["backward"], ["forward", "backward"], ["GPT-3"]):
    gains = 1000 * (log_likelihoods(*names) - log_likelihoods())
    blocks = gains[: len(gains) // 100 * 100].reshape(-1, 100).mean(1)
    print(f"{' and '.join(names):20} {gains.mean():5.1f} ± {blocks.std(ddof=1) / len(blocks) ** 0.5:.1f}")
