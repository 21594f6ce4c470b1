"""Question answering as a pipeline: `pipeline("question-answering", model=..., trust_remote_code=True)`.

transformers has none of that name any more; this one travels with every checkpoint of `ELMoForQuestionAnswering`.
"""

import math
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any

from transformers.pipelines.base import ChunkPipeline

from .elmo_head_reader import best_answers, characters_of_contexts


class ELMoQuestionAnsweringPipeline(ChunkPipeline):
    """Answers of contexts to questions.

        answer = pipe(question="Who wrote it?", context="It was written by Ada.")
        answers = pipe([{"question": ..., "context": ...}, ...], batch_size=8)

    An answer is a dictionary: `score`, the probability of its first and of its last word, multiplied; `start` and
    `end`, characters of the context; `answer`, the text between them. With `top_k` above 1 it is a list of them.

    Args:
        top_k: how many answers, the best first.
        max_answer_len: words of an answer (17 in the paper).
        handle_impossible_answer: whether "" is an answer too.
        max_seq_len: words of question, context and markers that the model reads at a time; a longer context is read in
            windows.
        doc_stride: words that neighbouring windows share; 128, or half of a window that is shorter.
    """

    default_input_names = "question,context"

    def __call__(self, *inputs: Any, question: Any = None, context: Any = None, **options: Any) -> Any:
        examples = self._examples(inputs, question, context)
        return [] if examples == [] else super().__call__(examples, **options)

    def _examples(self, inputs: tuple, question: Any, context: Any) -> Any:
        if inputs and (question is not None or context is not None) or len(inputs) > 1:
            raise ValueError("Pass question=... and context=..., or one dictionary with both, or a list of such.")
        if inputs:
            examples = inputs[0]
            if isinstance(examples, dict) or _is_single(examples):
                return _checked(examples)
            if isinstance(examples, Iterator):
                return (_checked(each) for each in examples)  # of all iterators the base class streams generators alone
            return [_checked(each) for each in examples]
        if question is None or context is None:
            raise ValueError("Pass both, question=... and context=..., or a dictionary with them.")
        if _is_single(question) and _is_single(context):
            return _checked({"question": question, "context": context})
        questions, contexts = ([each] if _is_single(each) else [*each] for each in (question, context))
        questions *= len(contexts) if _is_single(question) else 1
        contexts *= len(questions) if _is_single(context) else 1
        if len(questions) != len(contexts):
            raise ValueError(f"Received {len(questions)} questions and {len(contexts)} contexts; pass as many of each.")
        return [_checked({"question": q, "context": c}) for q, c in zip(questions, contexts, strict=True)]

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        of_windows, of_answers = ("max_seq_len", "doc_stride"), ("top_k", "max_answer_len", "handle_impossible_answer")
        unknown = [name for name in options if name not in (*of_answers, *of_windows)]
        if unknown:
            raise TypeError(
                f"Unknown options {', '.join(unknown)}; pass some of {', '.join((*of_answers, *of_windows))}."
            )
        for name, value in options.items():
            least = 0 if name == "doc_stride" else 1
            if name != "handle_impossible_answer" and (not isinstance(value, Integral) or value < least):
                raise ValueError(f"`{name}` is {value!r}; pass a whole number, at least {least}.")
        before, after = (
            {name: options[name] for name in names if name in options} for names in (of_windows, of_answers)
        )
        return before, {}, after

    def preprocess(
        self, example: dict[str, str], max_seq_len: int = 384, doc_stride: int | None = None
    ) -> Iterator[dict]:
        stride = min(128, max_seq_len // 2) if doc_stride is None else doc_stride
        try:
            windows = self.tokenizer(
                example["question"],
                example["context"],
                truncation="only_second",
                max_length=max_seq_len,
                stride=stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
        except ValueError as error:
            raise ValueError(
                f"The question {example['question']!r:.80} leaves too few words of its context in a window of "
                f"max_seq_len={max_seq_len} with doc_stride={stride}: {error}"
            ) from error
        if 1 not in windows.sequence_ids(0):
            raise ValueError(f"The tokenizer finds no word in the context {example['context']!r:.80}; pass other text.")
        offsets = characters_of_contexts(windows, self.tokenizer)
        names = [*self.tokenizer.model_input_names, "token_type_ids"]
        for number, characters in enumerate(offsets):
            inputs = self.tokenizer.pad({name: [windows[name][number]] for name in names}, return_tensors="pt")
            yield {"example": example, "offsets": characters, "is_last": number == len(offsets) - 1, **inputs}

    def _forward(self, window: dict[str, Any]) -> dict[str, Any]:
        kept = {name: window.pop(name) for name in ("example", "offsets", "is_last")}
        output = self.model(**window)
        return {**kept, "start": output.start_logits, "end": output.end_logits, "mask": window["attention_mask"]}

    def postprocess(
        self,
        windows: Iterable[dict[str, Any]],
        top_k: int = 1,
        max_answer_len: int = 17,
        handle_impossible_answer: bool = False,
    ) -> Any:
        windows = list(windows)
        parts = []
        for window in windows:
            real_T = window["mask"][0].bool()  # padding may stand on either side
            parts.append((window["start"][0][real_T], window["end"][0][real_T], window["offsets"]))
        found, none = best_answers(parts, max_answer_len, top_k)
        context = windows[0]["example"]["context"]
        answers: list[dict[str, Any]] = [
            {"score": math.exp(score), "start": start, "end": end, "answer": context[start:end]}
            for score, start, end in found
        ]
        if handle_impossible_answer:
            answers.append({"score": math.exp(none), "start": 0, "end": 0, "answer": ""})
        answers = sorted(answers, key=lambda answer: answer["score"], reverse=True)[:top_k]
        return answers if top_k > 1 else answers[0]


def _is_single(value: Any) -> bool:
    return isinstance(value, str) or not isinstance(value, Iterable)


def _checked(example: Any) -> dict[str, str]:
    if not isinstance(example, dict) or not {"question", "context"} <= set(example):
        raise ValueError(f"Received {example!r:.80}; pass a dictionary with `question` and `context`.")
    for name in ("question", "context"):
        if not isinstance(example[name], str) or not example[name].strip():
            raise ValueError(f"`{name}` is {example[name]!r:.80}; pass a text that is not empty.")
    return {name: example[name] for name in ("question", "context")}
