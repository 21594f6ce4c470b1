"""Inputs and numbers of the pipelines: what they read, and checks of options and scores."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset


def readable(inputs: Any) -> Any:
    """Several inputs as the base class reads them: a list at once, data sets and generators one at a time."""
    if isinstance(inputs, Dataset):
        return inputs
    if hasattr(inputs, "__len__"):
        return list(inputs)
    return (example for example in inputs)


def join_words(words: Sequence[str], space: str = " ") -> tuple[str, list[tuple[int, int]]]:
    """The words joined by single spaces, with first character and end of each word."""
    characters = []
    start = 0
    for word in words:
        end = start + len(word)
        characters.append((start, end))
        start = end + len(space)
    return space.join(words), characters


def is_words(sentence: Any) -> bool:
    """Whether a sentence is a list of words, at least one and none empty."""
    if not isinstance(sentence, (list, tuple)) or not sentence:
        return False
    return all(isinstance(word, str) and word for word in sentence)


def check_integers(options: dict[str, Any], **minima: int):
    """Raises an error if one of these options is given and is not an integer, or below its minimum."""
    for name, minimum in minima.items():
        value = options.get(name, minimum)
        if not isinstance(value, Integral) or value < minimum:
            raise ValueError(f"`{name}` is {value!r}; pass an integer of at least {minimum}.")


def check_numbers(logits: Tensor):
    if not logits.isfinite().all():
        raise ValueError("Some logits are not finite: training diverged. Pass a smaller learning rate.")
