"""Whether a text was split into words by other rules than a tokenizer's."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from transformers.utils import logging

logger = logging.get_logger(__name__)

# How the rules split English contractions: an example, and the words that show it in a text.
CONTRACTIONS = {"moses": ("didn 't", "'t after didn"), "treebank": ("did n't", "n't or -LRB-")}
TREEBANK_SIGNS = {"-LRB-": "(", "-RRB-": ")", "``": '"'}  # and those of raw text, which no rules change
# Words that show how a text was split, each with the name under which it is counted.
SIGNS_OF_SPLITTING = {
    **dict.fromkeys(["n't", "N'T", "n’t"], "treebank"),
    **dict.fromkeys(["couldn", "didn", "doesn", "don", "hasn", "isn", "wasn", "weren", "wouldn"], "before 't"),
    **dict.fromkeys(["can't", "couldn't", "didn't", "doesn't", "don't"], "raw"),
    **dict.fromkeys(["he's", "i'm", "isn't", "it's", "that's"], "raw"),
    **{sign: sign for sign in ("'t", "'s", ".", *TREEBANK_SIGNS, *TREEBANK_SIGNS.values())},
}
FEW_LINES, SMALL_SHARE = 3, 1e-4  # fewer lines with such words may only mention or quote them


def signs_of(words: Iterable[str]) -> list[str]:
    """The signs of splitting in a sentence, as its words are in the text."""
    signs = [SIGNS_OF_SPLITTING[word] for word in SIGNS_OF_SPLITTING.keys() & words]
    if "'t" in signs and "before 't" in signs:  # 't alone is a word of Dutch
        signs.append("moses")
    return signs


@dataclass
class SplitCheck:
    """Compares the words of a text, if it was split before, with those that a tokenizer makes of raw text.

    Args:
        rules: of the tokenizer. `whitespace` fits every text, because it leaves the splitting to the user.
        lines: the number of sentences.
        lines_with: the number of sentences with each sign of `signs_of`.
        is_split_again: whether rules read some of the sentences as raw text.
    """

    rules: str
    lines: int
    lines_with: Counter[str]
    is_split_again: bool

    def warn(self, source: object):
        """Warns if raw text will have other words than this one, and names the options that fit."""
        if self.rules == "whitespace":
            return
        rules, number = self._rules_of_the_text()
        if rules is not None and rules != self.rules:
            _, signs = CONTRACTIONS[rules]
            of_raw_text, _ = CONTRACTIONS[self.rules]
            again = " --is_split_into_words" if self.is_split_again else ""
            logger.warning(
                f"{source} is split into words as by the rules {rules} ({signs} in {number:,} lines), but the "
                f"tokenizer's rules, {self.rules}, make {of_raw_text} of a raw didn't: words that this text does not "
                f"have. Pass --pre_tokenization {rules}{again} for a new model; a model with the rules {self.rules} "
                "needs text that they have split."
            )
        elif self.rules == "moses" and self.is_split_again and (rules == "moses" or self._is_split("'s")):
            logger.warning(
                f"{source} is split into words already, and the tokenizer's rules, moses, split words such as 's "
                "again, into ' and s. They make other words of raw text. Pass --is_split_into_words."
            )
        spelled = [word for word in TREEBANK_SIGNS if self._is_instead_of_its_sign(word)]
        if spelled:
            signs = " and ".join(TREEBANK_SIGNS[word] for word in spelled)
            logger.warning(
                f"{source} has {' and '.join(spelled)} where raw text has {signs}, which this text lacks. Write "
                f"{signs} in the text."
            )

    def _rules_of_the_text(self) -> tuple[str | None, int]:
        """The rules by which the text was split, or `None`, and the number of lines that show it."""
        numbers = {name: self.lines_with[name] for name in ("treebank", "moses", "raw")}
        if self._is_split("'s"):  # of both rules, in English
            numbers["treebank"] += self.lines_with["-LRB-"]
        if 2 * numbers["moses"] <= self.lines_with["'t"]:
            numbers["moses"] = 0
        rules = max(numbers, key=numbers.__getitem__)
        if rules == "raw" or not self._is_frequent(numbers[rules]):
            return None, 0
        return rules, numbers[rules]

    def _is_split(self, word: str) -> bool:
        """Whether the text has a word because it was split. Raw Dutch has 's, too, but no period after a space."""
        return self._is_frequent(self.lines_with[word]) and 2 * self.lines_with["."] > self.lines

    def _is_instead_of_its_sign(self, word: str) -> bool:
        number = self.lines_with[word]
        return self._is_frequent(number) and number > self.lines_with[TREEBANK_SIGNS[word]]

    def _is_frequent(self, number: int) -> bool:
        return number >= max(FEW_LINES, SMALL_SHARE * self.lines)
