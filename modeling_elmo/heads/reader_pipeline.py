"""Question answering as a pipeline: `pipeline("question-answering", model=..., trust_remote_code=True)`.

transformers removed its own pipeline of this name. This one travels with all `ELMoForQuestionAnswering` checkpoints and
always needs `trust_remote_code=True`. After `import modeling_elmo`, `"extractive-question-answering"` does not need it.

Shape suffixes: T positions of a window; K answers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.pipelines.base import ChunkPipeline

from .pipeline_inputs import check_integers, check_numbers, readable

WAYS_TO_ASK = "Pass question=... and context=..., or a dictionary with both, or a list of dictionaries."


class ELMoQuestionAnsweringPipeline(ChunkPipeline):
    """Answers questions from contexts.

        answer = pipe(question="Who wrote it?", context="It was written by Ada.")
        answers = pipe(question=["Who wrote it?", "What did she write?"], context="It was written by Ada.")
        answers = pipe([{"question": ..., "context": ...}, ...], batch_size=8)
        for answer in pipe(dataset, batch_size=8): ...  # a torch `Dataset` or a generator of such dictionaries

    An answer is a dictionary: `score`, the product of the probabilities of its first and its last word; `start` and
    `end`, character positions in the context; `answer`, the text between them. With `top_k` above 1 the pipeline
    returns a list of answers.

    Args:
        top_k: number of answers, best first.
        max_answer_len: maximum words per answer (17 in the paper).
        handle_impossible_answer: whether "" can be an answer.
        max_seq_len: maximum words per window, with question, context and markers. Longer contexts are read in windows.
        doc_stride: number of words that neighboring windows share. Default: 128, or half of a shorter window.
    """

    default_input_names = "question,context"

    def __call__(self, inputs: Any = None, question: Any = None, context: Any = None, **options: Any) -> Any:
        if inputs is None:
            inputs = _examples(question, context)
        elif question is not None or context is not None:
            raise ValueError(WAYS_TO_ASK)
        if isinstance(inputs, (Iterable, Dataset)) and not isinstance(inputs, (dict, str)):
            inputs = readable(inputs)
        if inputs == []:
            return []
        return super().__call__(inputs, **options)

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        check_integers(options, top_k=1, max_answer_len=1, max_seq_len=1, doc_stride=0)
        for_windows = {}
        for name in ("max_seq_len", "doc_stride"):
            if name in options:
                for_windows[name] = options.pop(name)
        return for_windows, {}, options

    def preprocess(
        self, example: dict[str, str], max_seq_len: int = 384, doc_stride: int | None = None
    ) -> Iterator[dict]:
        for name in ("question", "context"):
            text = example.get(name) if isinstance(example, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"`{name}` is {text!r:.80} in {example!r:.80}; pass a `question` and a `context`.")
        if doc_stride is None:
            doc_stride = min(128, max_seq_len // 2)
        windows = self.tokenizer(
            example["question"],
            example["context"],
            truncation="only_second",
            max_length=max_seq_len,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        if 1 not in windows.sequence_ids(0):
            raise ValueError(f"The context {example['context']!r:.80} has no words; pass a text with words.")
        offsets = characters_of_contexts(windows, self.tokenizer)
        for number, characters in enumerate(offsets):
            row = {name: [windows[name][number]] for name in self.tokenizer.model_input_names}
            inputs = self.tokenizer.pad(row, return_tensors="pt")
            is_last = number == len(offsets) - 1
            yield {"example": example, "offsets": characters, "is_last": is_last, **inputs}

    def _forward(self, window: dict[str, Any]) -> dict[str, Any]:
        result = {name: window.pop(name) for name in ("example", "offsets", "is_last")}
        self.model.eval()  # also if it was just trained
        output = self.model(**window, return_dict=True)
        result["start"] = output.start_logits
        result["end"] = output.end_logits
        result["mask"] = window["attention_mask"]
        return result

    def postprocess(
        self,
        windows: Iterable[dict[str, Any]],
        top_k: int = 1,
        max_answer_len: int = 17,
        handle_impossible_answer: bool = False,
    ) -> Any:
        windows = list(windows)
        context = windows[0]["example"]["context"]
        logits = []
        for window in windows:
            real_T = window["mask"][0].bool()  # padding may be on either side
            start_T = window["start"][0][real_T]
            end_T = window["end"][0][real_T]
            logits.append((start_T, end_T, window["offsets"]))
        best, none = best_answers(logits, max_answer_len, top_k)
        if handle_impossible_answer:
            best.append((none, 0, 0))
        best.sort(key=lambda answer: answer[0], reverse=True)
        answers = []
        for score, start, end in best[:top_k]:
            answer = {"score": math.exp(score), "start": start, "end": end, "answer": context[start:end]}
            answers.append(answer)
        return answers if top_k > 1 else answers[0]


def _examples(question: Any, context: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """One question or several, each with its context, or all with the same one."""
    if isinstance(question, str) and isinstance(context, str):
        return {"question": question, "context": context}
    if isinstance(question, str) or not isinstance(question, Iterable) or not isinstance(context, Iterable):
        raise ValueError(WAYS_TO_ASK)
    if isinstance(context, str):
        return [{"question": text, "context": context} for text in question]
    pairs = zip_longest(question, context)
    return [{"question": text, "context": context} for text, context in pairs]


def best_answers(
    windows: Iterable[tuple[Tensor, Tensor, Sequence[Sequence[int] | None]]], max_length: int, count: int
) -> tuple[list[tuple[float, int, int]], float]:
    """The best answers in all windows of one context.

    Args:
        windows: for each window the logits `start (time,)` and `end (time,)` without padding, and the offsets of each
            token in the context: first character and end, or `None` for a token that is not a word of the context.
        max_length: maximum words per answer.
        count: number of answers.

    Returns:
        Answers `(log-probability, first character, end)` in descending order, and the log-probability that there is no
        answer: the lowest of all windows.
    """
    best: dict[tuple[int, int], float] = {}  # score of each span of characters
    none = 0.0
    for start_T, end_T, offsets in windows:
        logits_2T = torch.stack([start_T, end_T])
        check_numbers(logits_2T)
        is_context_T = torch.tensor([characters is not None for characters in offsets])
        scores_TT, none_here = _span_scores(logits_2T, is_context_T, max_length)
        none = min(none, none_here)
        most = min(count, scores_TT.numel())
        scores_K, places_K = scores_TT.flatten().topk(most)
        for score, place in zip(scores_K.tolist(), places_K.tolist(), strict=True):
            if score > -torch.inf:
                first, last = divmod(place, len(offsets))
                characters = (offsets[first][0], offsets[last][1])
                best[characters] = max(score, best.get(characters, score))
    answers = [(score, start, end) for (start, end), score in best.items()]
    answers.sort(key=lambda answer: answer[0], reverse=True)
    return answers[:count], none


def _span_scores(logits_2T: Tensor, is_context_T: Tensor, max_length: int) -> tuple[Tensor, float]:
    """Log-probabilities of all spans of the context, by first and last word, and of "no answer", the first token."""
    is_outside_T = ~is_context_T
    is_outside_T[0] = False
    start_T, end_T = logits_2T.float().masked_fill(is_outside_T, -torch.inf).log_softmax(1)
    is_span_TT = is_context_T[:, None] & is_context_T
    is_span_TT = is_span_TT.triu().tril(max_length - 1)  # the first word before the last, and near
    scores_TT = start_T[:, None] + end_T
    none = float(scores_TT[0, 0])
    return scores_TT.masked_fill(~is_span_TT, -torch.inf), none


def characters_of_contexts(
    windows: BatchEncoding, tokenizer: PreTrainedTokenizerBase
) -> list[list[tuple[int, int] | None]]:
    """The offsets of each token in its context, for rows of a question and a window of the context.

    `None` for tokens that are not words of the context. A marker that the context spells out is not a word either.
    """
    markers = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    rows: list[list[tuple[int, int] | None]] = []
    for row, offsets in enumerate(windows["offset_mapping"]):
        tokens = zip(offsets, windows.sequence_ids(row), windows["input_ids"][row], strict=True)
        characters = []
        for pair, text, word in tokens:
            is_word = text == 1 and word not in markers
            characters.append(pair if is_word else None)
        rows.append(characters)
    return rows
