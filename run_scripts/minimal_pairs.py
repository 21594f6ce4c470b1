"""Measures how often a biLM finds the good sentence of a pair the more probable one, by groups of pairs.

    elmo pairs blimp.tsv.gz --model elmo --output results/minimal_pairs.json

The table has the columns `good`, `bad` and, for groups, `phenomenon`, as in BLiMP (Warstadt et al. 2020): "Who
should Derek hug after shocking Richard?" and "Who should Derek hug Richard after shocking?". A sentence has a forward
and a backward probability; `both` is their product. Words outside the vocabulary are predicted as `<UNK>`; their share
is printed.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm
from transformers import AutoModelForPreTraining

from modeling_elmo.prediction import WordScore, score_texts
from modeling_elmo.run_scripts.cards.tables import markdown_table
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, print_conclusion, run
from modeling_elmo.run_scripts.program.data_files import ROW_READERS, format_suffix
from modeling_elmo.run_scripts.program.files import check_output, write_json
from modeling_elmo.run_scripts.vectors.embedding import load_model_and_tokenizer

ALL = "all"  # pairs of all groups
SHARES = ("forward", "backward", "both", "unknown words")


@dataclass(kw_only=True)
class PairsArguments:
    model: str = option(..., "Folder or Hub name of a model with a softmax.")
    group_column: str = option("phenomenon", "Column of the table that names the group of a pair.")
    output: str | None = option(None, "JSON file for the figures.")


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Returns the number of pairs, and shares between 0 and 1, of each group and of all."""
    parser = ProgramParser(PairsArguments, description=__doc__)
    parser.add_argument("pairs", metavar="TABLE", help="Table with the pairs: .tsv, .csv or .jsonl, also .gz or .zst.")
    parsed, positional = parser.parse(arguments)
    check_output(parsed.output)
    groups = read_pairs(Path(positional.pairs), parsed.group_column)
    model, tokenizer = load_model_and_tokenizer(parsed.model, auto_class=AutoModelForPreTraining)
    wins = {}
    unknown = {}
    for name, texts in tqdm(groups.items(), unit=" groups", desc="scoring"):
        scores = score_texts(model, tokenizer, texts)
        wins[name] = good_wins(scores)
        ids, _ = tokenizer.encode_words([word.word for words in scores for word in words[1:-1]])
        unknown[name] = ids == tokenizer.unk_token_id
    wins[ALL] = np.concatenate([*wins.values()])
    unknown[ALL] = np.concatenate([*unknown.values()])
    results = {}
    rows = [[parsed.group_column, "pairs", *SHARES]]
    for name, wins_of_group in wins.items():
        pairs = len(wins_of_group)
        shares = [*wins_of_group.mean(0).tolist(), float(unknown[name].mean())]
        results[name] = {"pairs": pairs, **dict(zip(SHARES, shares, strict=True))}
        cells = [f"{share:.1%}" for share in shares]
        rows.append([name, f"{pairs:,}", *cells])
    print(markdown_table(rows))
    share = results[ALL][SHARES[2]]
    print_conclusion(
        f"The model prefers the good sentence of {share:.1%} of the pairs; a guess is right in 50 %.",
        *("elmo", "perplexity", "--model", parsed.model, "--validation_file", "TEXT"),
    )
    if parsed.output:
        write_json(Path(parsed.output), results)
    return results


def good_wins(scores: list[list[WordScore]]) -> np.ndarray:
    """Whether each good sentence has the higher score: forward, backward, and in both. Shape: (pairs, 3)."""
    sums = []
    for words in scores:
        forward = sum(word.forward or 0 for word in words)
        backward = sum(word.backward or 0 for word in words)
        sums.append([forward, backward, forward + backward])
    good, bad = np.array(sums).reshape(-1, 2, 3).swapaxes(0, 1)
    return good > bad


def read_pairs(path: Path, group_column: str) -> dict[str, list[str]]:
    """The sentences of each group: good, bad, good, bad and so on."""
    groups = defaultdict(list)
    suffix = format_suffix(path)
    if suffix not in ROW_READERS:
        raise ValueError(f"{path}: unknown suffix; pass a table that ends in {', '.join(ROW_READERS)}, .gz or .zst.")
    for location, row in ROW_READERS[suffix](path):
        texts = []
        if group_column not in row:
            raise ValueError(f"{location} has no column {group_column!r}, only {list(row)}; pass --group_column.")
        for name in (group_column, "good", "bad"):
            text = row.get(name)
            if name == group_column and type(text) in (int, float):
                text = str(text)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{location} has no {name!r}: {row!r:.200}. Correct it, or pass another table.")
            texts.append(text.strip())
        group, good, bad = texts
        if group == ALL:
            raise ValueError(f"{location}: the group {ALL!r} has the name of the last row. Call it by another name.")
        if good == bad:
            raise ValueError(f"{location}: 'good' and 'bad' are the same: {good!r:.200}. Correct it, or leave it out.")
        groups[group] += good, bad
    if not groups:
        raise ValueError(f"{path} has no pairs; pass a table with columns good and bad.")
    return dict(groups)


if __name__ == "__main__":
    run(main)
