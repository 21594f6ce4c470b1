"""Semantic role labeling as a pipeline: `pipeline("semantic-role-labeling", model=..., trust_remote_code=True)`.

It travels with all `ELMoForSemanticRoleLabeling` checkpoints. A sentence is read once to find its predicates, and then
in a row for each predicate. All these rows share one pass of a frozen biLM.

Shape suffixes: B sentences; P predicates that are labeled at once, a row for each; T positions of a row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers.pipelines.base import Pipeline

from .pipeline_inputs import check_numbers, is_words, join_words, readable

PREDICATE_ROLES = ("V", "C-V")  # spans of the predicate itself, which are no arguments
FIND = -1  # in place of the mark of a predicate: the model is to find it
MOST_TOKENS = 4096  # of the rows that are labeled at once, so that memory does not grow with the number of predicates


@dataclass
class PredicateTags:
    """The BIO tags of a sentence for one of its predicates, and their probabilities."""

    predicate: int  # index of its first word
    tags: list[str]
    probabilities: list[float]


class ELMoSemanticRolePipeline(Pipeline):
    """Finds the predicates of a sentence and their arguments: who did what to whom.

        pipe("The cat ate the fish.")
        pipe(["The cat ate the fish.", "It rained."], batch_size=8)
        for found in pipe(dataset, batch_size=8): ...  # a torch `Dataset` or a generator of sentences
        pipe(["The", "cat", "ate", "the", "fish", "."], is_split_into_words=True, predicates=[2])

    A result is a dictionary. `words` are the words of the sentence. `verbs` has a dictionary for each predicate, verb
    or not: `verb`, its word; `description`, the sentence with its roles in brackets; `tags`, a BIO tag per word;
    `arguments`, each with `role`, `start` and `end` (characters of the sentence, the end excluded), `text` and `score`,
    the mean probability of its words' tags. Continued arguments (`C-ARG1`) and referring ones (`R-ARG1`) have entries
    of their own. The spans of the predicate itself, `V` and `C-V`, are in `tags` and `description` only.

    Args:
        predicates: indices of the words that are predicates; for several sentences, a list of indices for each. The
            results have the same order. By default the model finds the predicates.
        is_split_into_words: whether a sentence is a list of words. Characters are then counted in the words joined by
            single spaces.
    """

    def __call__(self, inputs: Any, predicates: Any = None, **options: Any) -> Any:
        has_words = {**self._preprocess_params, **options}.get("is_split_into_words", False)
        if isinstance(inputs, str) or has_words and is_words(inputs):
            return super().__call__([{"sentence": inputs, "predicates": predicates}], **options)[0]
        if not isinstance(inputs, (Iterable, Dataset)) or isinstance(inputs, Mapping):
            raise ValueError(f"Received {inputs!r:.80}; pass a sentence, a list of sentences, or a data set of them.")
        sentences = readable(inputs)
        if predicates is not None:
            examples = _with_predicates(sentences, predicates)
            sentences = list(examples) if isinstance(sentences, list) else examples
        return [] if sentences == [] else super().__call__(sentences, **options)

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        return options, {}, {}

    def preprocess(self, example: Any, is_split_into_words: bool = False) -> dict[str, Any]:
        text, chosen = example, None
        if isinstance(example, dict) and example.keys() == {"sentence", "predicates"}:
            text, chosen = example["sentence"], example["predicates"]
        if not (is_words(text) if is_split_into_words else isinstance(text, str)):
            raise ValueError(f"A sentence is {text!r:.80}; pass a text, or words with is_split_into_words=True.")
        if is_split_into_words:
            words = list(text)
            inputs = self.tokenizer([words], is_split_into_words=True, return_tensors="pt")
            text, characters = join_words(words)
        else:
            inputs = self.tokenizer([text], return_offsets_mapping=True, return_tensors="pt")
            characters = [tuple(pair) for pair in inputs.pop("offset_mapping")[0, 1:-1].tolist()]
            words = [text[first:end] for first, end in characters]
        if not words:
            raise ValueError(f"The sentence {text!r:.80} has no words; pass a sentence with words.")
        predicates = _checked_predicates(chosen, len(words))
        marks_BT = torch.full_like(inputs["input_ids"], FIND if predicates is None else 0)
        marks_BT[:, [1 + word for word in predicates or ()]] = 1
        sentence = {"text": text, "words": words, "characters": characters, "predicates": predicates}
        return {"sentence": sentence, "marks": marks_BT, **inputs}

    def _forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.model.eval()  # also if it was just trained
        sentences, marks_BT = batch.pop("sentence"), batch.pop("marks")
        config = self.model.config
        if config.use_elmo and config.freeze_bilm:
            inputs = (batch.get("character_ids"), batch["input_ids"], batch["attention_mask"], None, None)
            batch["elmo_hidden_states"] = torch.stack(self.model.elmo(*inputs, return_dict=True).hidden_states, dim=1)
        if (marks_BT == FIND).any():
            output = self.model(**batch, return_dict=True)
            marks_BT = torch.where(marks_BT == FIND, (output.predicate_logits > 0).to(marks_BT), marks_BT)
            check_numbers(output.predicate_logits)
        found: list[list[PredicateTags]] = [[] for _ in marks_BT]
        time = marks_BT.shape[1]
        for places_P2 in (marks_BT == 1).nonzero().split(max(1, MOST_TOKENS // time)):
            rows_P, words_P = places_P2.unbind(1)
            rows = {name: tensor[rows_P] for name, tensor in batch.items()}
            rows["token_type_ids"] = F.one_hot(words_P, time)
            for row, tags in zip(rows_P.tolist(), self._tagged(rows), strict=True):
                found[row].append(tags)
        return {"sentence": sentences, "found": found if isinstance(sentences, list) else found[0]}

    def _tagged(self, rows: dict[str, Tensor]) -> Iterator[PredicateTags]:
        output = self.model(**rows, return_dict=True)
        check_numbers(output.logits)
        words = rows["attention_mask"].bool()
        probabilities_PT = output.logits.gather(-1, output.predictions.clamp(min=0)[..., None])[..., 0].exp()
        columns = (output.predictions, probabilities_PT, rows["token_type_ids"])
        names = {**self.model.config.id2label, -100: "O"}  # a marker that the sentence spells out is no word
        for real_T, *row in zip(words, *columns, strict=True):
            labels, probabilities, marks = (column_T[real_T][1:-1].tolist() for column_T in row)
            yield PredicateTags(marks.index(1), [names[label] for label in labels], probabilities)

    def postprocess(self, output: dict[str, Any]) -> dict[str, Any]:
        sentence, found = output["sentence"], {tags.predicate: tags for tags in output["found"]}
        order = found if sentence["predicates"] is None else sentence["predicates"]
        return labeled_sentence(
            sentence["text"], sentence["words"], sentence["characters"], [found[index] for index in order]
        )


def labeled_sentence(
    text: str, words: Sequence[str], characters: Sequence[tuple[int, int]], predicates: Iterable[PredicateTags]
) -> dict[str, Any]:
    """The words of a sentence, and for each predicate its word, description, tags and arguments."""
    verbs = []
    for predicate in predicates:
        spans = role_spans(predicate.tags)
        arguments = []
        for role, first, end in spans:
            if role and role not in PREDICATE_ROLES:
                start, stop = characters[first][0], characters[end - 1][1]
                score = sum(predicate.probabilities[first:end]) / (end - first)
                arguments.append({"role": role, "start": start, "end": stop, "text": text[start:stop], "score": score})
        shown = [(role, " ".join(words[first:end])) for role, first, end in spans]
        description = " ".join(f"[{role}: {part}]" if role else part for role, part in shown)
        verb = {"verb": words[predicate.predicate], "description": description, "tags": predicate.tags}
        verbs.append({**verb, "arguments": arguments})
    return {"words": list(words), "verbs": verbs}


def role_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """The spans of BIO tags: role, first word, end. Words outside are spans of one word with the role "".

    A span that begins with I- counts as one that begins with B-.
    """
    befores = ["O", *tags]
    starts = [index for index, tag in enumerate(tags) if tag != f"I-{befores[index][2:]}"]
    return [(tags[first][2:], first, end) for first, end in pairwise([*starts, len(tags)])]


def _with_predicates(sentences: Iterable[Any], predicates: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Each sentence with its predicates, `None` where the model is to find them."""
    if isinstance(sentences, Sized) and isinstance(predicates, Sized) and len(sentences) != len(predicates):
        raise ValueError(f"{len(sentences)} sentences have `predicates` for {len(predicates)}; pass a list for each.")
    for sentence, chosen in zip(sentences, predicates, strict=True):
        yield {"sentence": sentence, "predicates": chosen}


def _checked_predicates(predicates: Any, num_words: int) -> list[int] | None:
    if predicates is None:
        return None
    valid = isinstance(predicates, (list, tuple)) and all(isinstance(word, Integral) for word in predicates)
    if not valid or not {*predicates} <= {*range(num_words)} or len({*predicates}) < len(predicates):
        raise ValueError(f"`predicates` are {predicates!r:.80}; pass a list of different words, 0 to {num_words - 1}.")
    return [int(word) for word in predicates]
