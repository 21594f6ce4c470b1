"""Inputs and numbers of the pipelines: what they read, and checks of options and scores."""

from collections.abc import Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset


def readable(inputs: Any) -> Any:
    """Several inputs as the base class reads them: a list at once, data sets and generators one at a time."""
    if isinstance(inputs, Dataset):
        return inputs
    return list(inputs) if hasattr(inputs, "__len__") else (each for each in inputs)


def join_words(words: Sequence[str], space: str = " ") -> tuple[str, list[tuple[int, int]]]:
    """The words joined by single spaces, with first character and end of each word."""
    starts = accumulate((len(word) + 1 for word in words), initial=0)
    return space.join(words), [(start, start + len(word)) for start, word in zip(starts, words, strict=False)]


def is_words(sentence: Any) -> bool:
    """Whether a sentence is a list of words, at least one and none empty."""
    is_list = isinstance(sentence, (list, tuple)) and len(sentence) > 0
    return is_list and all(isinstance(word, str) and word for word in sentence)


def check_integers(options: dict[str, Any], **least: int):
    for name in options.keys() & least:
        if not isinstance(options[name], Integral) or options[name] < least[name]:
            raise ValueError(f"`{name}` is {options[name]!r}; pass an integer of at least {least[name]}.")


def check_numbers(logits: Tensor):
    if not logits.isfinite().all():
        raise ValueError("Some logits are not finite: training diverged. Pass a smaller learning rate.")
