"""Semantic role labeling as a pipeline: `pipeline("semantic-role-labeling", model=..., trust_remote_code=True)`.

It travels with all `ELMoForSemanticRoleLabeling` checkpoints. A sentence is read once to find its predicates, and then
in a row for each predicate. All these rows share one pass of a frozen biLM.

Shape suffixes: B sentences; P predicates that are labeled at once, a row for each; T positions of a row;
W words of a sentence.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers.pipelines.base import Pipeline

from ..inputs import NO_LABEL
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
        for result in pipe(dataset, batch_size=8): ...  # a torch `Dataset` or a generator of sentences
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
        are_words = {**self._preprocess_params, **options}.get("is_split_into_words", False)
        if isinstance(inputs, str) or are_words and is_words(inputs):
            return super().__call__([{"sentence": inputs, "predicates": predicates}], **options)[0]
        if not isinstance(inputs, (Iterable, Dataset)) or isinstance(inputs, Mapping):
            raise ValueError(f"Received {inputs!r:.80}; pass a sentence, a list of sentences, or a data set of them.")
        sentences = readable(inputs)
        if predicates is not None:
            examples = _with_predicates(sentences, predicates)
            sentences = list(examples) if isinstance(sentences, list) else examples
        if sentences == []:
            return []
        return super().__call__(sentences, **options)

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        return options, {}, {}

    def preprocess(self, example: Any, is_split_into_words: bool = False) -> dict[str, Any]:
        text = example
        predicates = None
        if isinstance(example, dict) and example.keys() == {"sentence", "predicates"}:
            text, predicates = example["sentence"], example["predicates"]
        if is_split_into_words and is_words(text):
            words = list(text)
            text, characters = join_words(words)
            inputs = self.tokenizer([words], is_split_into_words=True, return_tensors="pt")
        elif isinstance(text, str) and not is_split_into_words:
            inputs = self.tokenizer([text], return_offsets_mapping=True, return_tensors="pt")
            characters = inputs.pop("offset_mapping")[0, 1:-1].tolist()
            words = [text[first:end] for first, end in characters]
        else:
            raise ValueError(f"A sentence is {text!r:.80}; pass a text, or words with is_split_into_words=True.")
        if not words:
            raise ValueError(f"The sentence {text!r:.80} has no words; pass a sentence with words.")
        marks_BT = torch.full_like(inputs["input_ids"], FIND)
        if predicates is not None:
            predicates = _checked_predicates(predicates, len(words))
            marks_BT.fill_(0)
            marks_BT[:, [1 + word for word in predicates]] = 1
        sentence = {"text": text, "words": words, "characters": characters, "predicates": predicates}
        return {"sentence": sentence, "marks": marks_BT, **inputs}

    def _forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.model.eval()  # also if it was just trained
        sentences = batch.pop("sentence")
        marks_BT = batch.pop("marks")
        if self.model.config.use_elmo and self.model.config.freeze_bilm:
            inputs = (batch.get("character_ids"), batch["input_ids"], batch["attention_mask"])
            output = self.model.elmo(*inputs, return_dict=True)
            batch["elmo_hidden_states"] = torch.stack(output.hidden_states, dim=1)
        is_predicate_BT = marks_BT == 1
        if (marks_BT == FIND).any():
            scores_BT = self.model(**batch, return_dict=True).predicate_logits
            check_numbers(scores_BT)
            is_predicate_BT = is_predicate_BT | (marks_BT == FIND) & (scores_BT > 0)
        tagged: list[list[PredicateTags]] = [[] for _ in marks_BT]  # of each sentence
        time = marks_BT.shape[1]
        most_rows = max(1, MOST_TOKENS // time)
        for places_P2 in is_predicate_BT.nonzero().split(most_rows):
            sentences_P, words_P = places_P2.unbind(1)
            rows = {name: tensor[sentences_P] for name, tensor in batch.items()}
            rows["token_type_ids"] = F.one_hot(words_P, time)
            for number, tags in zip(sentences_P.tolist(), self._tagged(rows), strict=True):
                tagged[number].append(tags)
        return {"sentence": sentences, "tagged": tagged if isinstance(sentences, list) else tagged[0]}

    def _tagged(self, rows: dict[str, Tensor]) -> Iterator[PredicateTags]:
        output = self.model(**rows, return_dict=True)
        check_numbers(output.logits)
        labels_PT = output.predictions
        known_PT1 = labels_PT.clamp(min=0)[..., None]
        probabilities_PT = output.logits.gather(-1, known_PT1).squeeze(-1).exp()
        names = {**self.model.config.id2label, NO_LABEL: "O"}  # a marker that the sentence spells out is no word
        for row, real_T in enumerate(rows["attention_mask"]):
            words_W = real_T.nonzero()[1:-1, 0]  # without the markers
            predicate = int(rows["token_type_ids"][row, words_W].argmax())
            tags = [names[label] for label in labels_PT[row, words_W].tolist()]
            yield PredicateTags(predicate, tags, probabilities_PT[row, words_W].tolist())

    def postprocess(self, output: dict[str, Any]) -> dict[str, Any]:
        sentence = output["sentence"]
        by_word = {tags.predicate: tags for tags in output["tagged"]}
        predicates = by_word if sentence["predicates"] is None else sentence["predicates"]
        tagged = [by_word[word] for word in predicates]
        return labeled_sentence(sentence["text"], sentence["words"], sentence["characters"], tagged)


def labeled_sentence(
    text: str, words: Sequence[str], characters: Sequence[Sequence[int]], predicates: Iterable[PredicateTags]
) -> dict[str, Any]:
    """The words of a sentence, and for each predicate its word, description, tags and arguments."""
    verbs = []
    for predicate in predicates:
        parts = []
        arguments = []
        for role, first, end in role_spans(predicate.tags):
            part = " ".join(words[first:end])
            parts.append(f"[{role}: {part}]" if role else part)
            if role and role not in PREDICATE_ROLES:
                start, _ = characters[first]
                _, stop = characters[end - 1]
                probabilities = predicate.probabilities[first:end]
                arguments.append(
                    {
                        "role": role,
                        "start": start,
                        "end": stop,
                        "text": text[start:stop],
                        "score": sum(probabilities) / len(probabilities),
                    }
                )
        verbs.append(
            {
                "verb": words[predicate.predicate],
                "description": " ".join(parts),
                "tags": predicate.tags,
                "arguments": arguments,
            }
        )
    return {"words": list(words), "verbs": verbs}


def role_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """The spans of BIO tags: role, first word, end. Words outside are spans of one word with the role "".

    A span that begins with I- counts as one that begins with B-.
    """
    spans: list[tuple[str, int, int]] = []
    role = ""  # of the last span
    first = 0
    for word, tag in enumerate(tags):
        if role and tag == f"I-{role}":
            spans.pop()
        else:
            role = tag[2:]
            first = word
        spans.append((role, first, word + 1))
    return spans


def _with_predicates(sentences: Iterable[Any], predicates: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Each sentence with its predicates, `None` where the model is to find them."""
    if isinstance(sentences, Sized) and isinstance(predicates, Sized) and len(sentences) != len(predicates):
        raise ValueError(f"{len(sentences)} sentences have `predicates` for {len(predicates)}; pass a list for each.")
    for sentence, indices in zip(sentences, predicates, strict=True):
        yield {"sentence": sentence, "predicates": indices}


def _checked_predicates(predicates: Any, num_words: int) -> list[int]:
    words: list[int] = []
    given: Any = predicates if isinstance(predicates, (list, tuple)) else [None]
    for word in given:
        is_integer = isinstance(word, Integral)
        if not is_integer or not 0 <= word < num_words or word in words:
            needed = f"a list of different words, 0 to {num_words - 1}"
            raise ValueError(f"`predicates` are {predicates!r:.80}; pass {needed}.")
        words.append(int(word))
    return words
