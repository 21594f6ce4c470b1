"""The ELMo tokenizer: a fast tokenizer whose tokens are words with their characters.

A batch without truncation is encoded in numpy, from a table of all words seen so far. The Rust library (the backend)
encodes all other batches, and computes `word_ids`, `char_to_token` and the like when they are asked for.
Shape suffixes: B texts, T tokens, W max_word_length.
"""

import json
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from itertools import chain
from numbers import Integral
from os import PathLike
from pathlib import Path
from types import NoneType
from weakref import WeakSet

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers.utils.versions import require_version

require_version("transformers>=5.17")  # here, because an older version lacks some of the next imports

from transformers import BatchEncoding, TensorType
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE, VERY_LARGE_INTEGER
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils import PaddingStrategy, logging

from ..folder_code import code_of_folder, saved_code
from .elmo_characters import (
    BOS_ID,
    BOS_WORD,
    CONTINUATION,
    EOS_ID,
    EOS_WORD,
    SPECIAL_WORDS,
    SURROGATES,
    UNK_ID,
    UNK_WORD,
    LazyEncodings,
    WordTable,
    as_batch,
    build_alphabet,
    by_part,
    check_strings,
    checked_max_length,
    most_frequent_words,
    needs_backend,
    order_vocabulary,
    read_vocabulary,
    texts_of_encodings,
    values_of_tokens,
    with_words,
)
from .elmo_pretokenization import TextSplitter, places_of, plain_word

logger = logging.get_logger(__name__)

SPECIAL_TOKENS = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_WORDS, strict=True))
FIXED_SETTINGS = SPECIAL_TOKENS | {f"{name}_id": index for index, name in enumerate(SPECIAL_TOKENS)}
CALLS = threading.RLock()
DISGUISE = "\U0010fffc"  # a private-use character, which texts do not contain

NOT_NFC = (
    "The text has unknown words that are not in Unicode's form NFC, such as Korean syllables or accented letters in "
    'parts. Models that were trained on NFC do not know them; pass unicodedata.normalize("NFC", text).'
)
# Tokenizers that gave this warning. Not an attribute, because the hash of a tokenizer in `datasets` must not depend on
# earlier calls.
TOLD_OF_FORM: WeakSet = WeakSet()
# Usual options of other tokenizers with the only value that this one respects.
FOREIGN_SETTINGS = {
    **dict.fromkeys(("do_lower_case", "do_lowercase", "do_lower", "lowercase", "lower_case", "lower"), False),
    **dict.fromkeys(("never_split", "strip_accents", "tokenize_chinese_chars"), False),
    **dict.fromkeys(("do_basic_tokenize", "add_bos_token", "add_eos_token"), True),
}
SAVE_AGAIN = "Save the tokenizer again with `save_pretrained`, or download the file again."


def one_call_at_a_time(method: Callable) -> Callable:
    """Threads take turns: the calls of a tokenizer share its word table and the settings of its backend."""

    @wraps(method)
    def locked(*args, **kwargs):
        with CALLS:
            return method(*args, **kwargs)

    return locked


class ELMoTokenizer(TokenizersBackend):
    """
    Splits text into words and gives each word its id and its characters.

    The model reads `character_ids`, which come with `input_ids` and `attention_mask`. With `return_tensors` they are
    int64 of shape `(batch, tokens, max_word_length)`. Without it, each text has a small integer array: of full width
    with `padding`, otherwise as wide as its longest word. `pad`, and every collator that calls it, widens such arrays.

    Each given word (`is_split_into_words=True`) is one token, whatever it contains.

    In raw text, an added token such as a marker `[E1]` is one word, also where it touches other words (`[E1]Obama`). An
    added token that is not special, and that the pre-tokenization does not split, only joins the vocabulary: `cat`, and
    each token without white space if `pre_tokenization` is `"whitespace"`.

    Args:
        vocab_file: one word per line, with `<S>`, `</S>` and `<UNK>` anywhere. Without `vocab_file`, `vocab` and
            `tokenizer_file`, the vocabulary has only the special words, and every word has the id of `<UNK>`.
        tokenizer_file: a saved `tokenizer.json`.
        vocab: the words of a vocabulary, as in `vocab_file`. A mapping must have the ids 0, 1, 2, ... with the special
            words first.
        alphabet: `"utf8"` (bytes) or `"lexicon"` (a dictionary of characters).
        max_word_length: maximum characters per word, including begin and end of word. Longer words are cut.
        pre_tokenization: how raw text is split: `"moses"` (`didn 't`), `"treebank"` (`did n't`) or `"whitespace"`. The
            words of a text do not depend on whether its letters are composed (NFC) or written in parts (NFD).
        literal_markers: whether `<S>` and `</S>` in a text are markers, as in the original code, or spelled out. With
            `alphabet="lexicon"` these words are `<bos>` and `<eos>`.
        cut_before_lookup: whether the id of a longer word is the id of its first `max_word_length - 2` code points, as
            in ELMoForManyLangs, or of the whole word.
        lexicon: for `alphabet="lexicon"`, ids of all characters, of `<bos>`, `<eos>`, `<oov>`, `<pad>`, and of the
            entries that `begin_of_word` and `end_of_word` name.
        begin_of_word, end_of_word: the entries of `lexicon` that begin and end a word. Models of ELMoForManyLangs have
            them swapped.
        lowercase_unknown: whether an unknown word gets the id of its lowercase form, for tasks with lowercase word
            vectors such as GloVe. This applies to encodings, not to `convert_tokens_to_ids`.
        plain_signs: whether words are looked up with plain signs, as models know them that have read no others: `won’t`
            as `won't`, “ as ", — as --, … as ..., and letters that are written in parts as one (NFC). The text, its
            words and their offsets stay. This also applies to encodings.
    """

    vocab_files_names = {"vocab_file": "vocab.txt", "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask", "character_ids", "token_type_ids"]
    add_bos_token = add_eos_token = True  # `update_post_processor` adds both
    code_file = "tokenization_elmo.py"  # of a saved folder

    def __init__(
        self,
        vocab_file: str | PathLike | None = None,
        tokenizer_file: str | PathLike | None = None,
        vocab: Sequence[str] | Mapping[str, int] | None = None,
        alphabet: str = "utf8",
        max_word_length: int = 50,
        pre_tokenization: str = "moses",
        literal_markers: bool = False,
        cut_before_lookup: bool = False,
        lexicon: Mapping[str, int] | None = None,
        begin_of_word: str = "<bow>",
        end_of_word: str = "<eow>",
        lowercase_unknown: bool = False,
        plain_signs: bool = False,
        **kwargs,
    ):
        options = {
            "alphabet": alphabet,
            "max_word_length": max_word_length,
            "pre_tokenization": pre_tokenization,
            "literal_markers": literal_markers,
            "cut_before_lookup": cut_before_lookup,
            "lexicon": dict(lexicon) if isinstance(lexicon, Mapping) else lexicon,
            "begin_of_word": begin_of_word,
            "end_of_word": end_of_word,
            "lowercase_unknown": lowercase_unknown,
            "plain_signs": plain_signs,
        }
        for name in kwargs:
            if similar := get_close_matches(name, ["vocab_file", "tokenizer_file", "vocab", *options], 1, 0.85):
                raise TypeError(f"ELMoTokenizer has no option `{name}`. Did you mean `{similar[0]}`?")
        for name in ("literal_markers", "cut_before_lookup", "lowercase_unknown", "plain_signs"):
            if not isinstance(options[name], bool):
                raise ValueError(f"{name}={options[name]!r}; pass True or False.")
        self._options = tuple(options)
        self.__dict__.update(options)  # `save_pretrained` writes all attributes with the name of a keyword
        characters = build_alphabet(alphabet, max_word_length, lexicon, begin_of_word, end_of_word)
        how = max_word_length, literal_markers, cut_before_lookup, plain_word if plain_signs else str
        self.word_table = WordTable(characters, self._id_of_word, *how)
        self._tokenizer = _load_backend(vocab, tokenizer_file, vocab_file)
        self.splitter = self._make_splitter()
        # Each call of the base class sets the flag of the backend to `split_special_tokens`.
        kwargs = {**SPECIAL_TOKENS, "split_special_tokens": True, **kwargs}
        kwargs.pop("auto_map", None)  # of the folder that is loaded: each saved folder names its own code
        for name, value in kwargs.items():
            _check_setting(name, value)
        super().__init__(**options, **kwargs)

    def __setattr__(self, key, value):
        """Refuses values that only some methods would respect."""
        _check_setting(key, value)
        if key == "model_max_length" and value is None:  # no limit, which sentence-transformers assigns as `None`
            value = VERY_LARGE_INTEGER
        if key in self.__dict__.get("_options", ()) and value != self.__dict__[key]:
            raise ValueError(
                f"`{key}` cannot change; use tokenizer.with_vocabulary(tokenizer.get_vocab(), {key}={value!r:.40})."
            )
        super().__setattr__(key, value)

    @classmethod
    def convert_to_native_format(cls, **kwargs):
        """Leaves `tokenizer_file` to `__init__`: the stock method would rebuild the vocabulary in Python."""
        return kwargs

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike, *args, **kwargs):
        """As the stock method, which reads a damaged file without a check."""
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except Exception:  # of any kind
            _check_files(Path(pretrained_model_name_or_path, kwargs.get("subfolder") or ""))
            raise

    @classmethod
    def _from_pretrained(cls, resolved_vocab_files, pretrained_model_name_or_path, *args, **kwargs):
        """Refuses a checkpoint without a vocabulary, which would make every word unknown."""
        files = kwargs | {name: file for name, file in resolved_vocab_files.items() if file}
        if not any(files.get(name) for name in ("tokenizer_file", "vocab_file", "vocab")):
            raise OSError(
                f"{pretrained_model_name_or_path} has no tokenizer.json or vocab.txt; save the model's tokenizer there."
            )
        return super()._from_pretrained(resolved_vocab_files, pretrained_model_name_or_path, *args, **kwargs)

    @property
    def _auto_map(self) -> dict[str, tuple[str, None]] | None:
        """For the stock method that saves: a folder names the class in its own code, if it has code."""
        reference = f"{Path(self.code_file).stem}.ELMoTokenizer"
        return {"AutoTokenizer": (reference, None)} if code_of_folder(self.code_file) else None

    def save_pretrained(self, save_directory: str | PathLike, *args, **kwargs) -> tuple[str, ...]:
        """Saves as the stock method does, and the tokenizer's code too."""
        for name in ("is_local", "local_files_only"):  # say how this one was loaded
            self.init_kwargs.pop(name, None)
        with saved_code(save_directory, TOKENIZER_CONFIG_FILE, self.code_file):
            return super().save_pretrained(save_directory, *args, **kwargs)

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps: dict[str, float], **options):
        files_timestamps.pop(self.code_file, None)  # written before the stock method noted the times of the files
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **options)

    @property
    def char_vocab_size(self) -> int:
        """Number of character ids, including 0 for padding words: the model's `char_vocab_size`."""
        return self.word_table.alphabet.size

    def update_post_processor(self):
        """`<S> a </S>`, and `<S> a </S> <S> b </S>` for pairs."""
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS_WORD} $A {EOS_WORD}",
            pair=f"{BOS_WORD} $A {EOS_WORD} {BOS_WORD}:1 $B:1 {EOS_WORD}:1",
            special_tokens=[(BOS_WORD, BOS_ID), (EOS_WORD, EOS_ID)],
        )

    def _make_splitter(self) -> TextSplitter:
        added = map(str, self._tokenizer.get_added_tokens_decoder().values())
        words = (token for token in added if token not in SPECIAL_WORDS)
        return TextSplitter(self.pre_tokenization, words, self.plain_signs)

    @one_call_at_a_time
    def _add_tokens(self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False) -> int:
        # A new token is a word of the vocabulary. The backend would search for it inside given words.
        words = list(filter(None, dict.fromkeys(map(str, new_tokens))))
        fresh = [word for word in words if self._tokenizer.token_to_id(word) is None]
        if fresh:
            vocab = self.get_vocab()
            self._tokenizer.model = _word_model([*sorted(vocab, key=vocab.__getitem__), *fresh])
            self.word_table.clear()
        special = {str(token) for token in new_tokens if special_tokens or getattr(token, "special", False)}
        # The backend ignores special tokens, which is why all words that the splitter must look for are special there.
        sought = [word for word in words if word in special or self.splitter.words(word) != [word]]
        self._tokenizer.add_special_tokens(list(map(_special_token, sought)))
        self.splitter = self._make_splitter()
        return len(fresh)

    def _id_of_word(self, word: str) -> int:
        if SURROGATES.search(word):  # in no vocabulary
            return UNK_ID
        index = self._tokenizer.token_to_id(self.disguised(word))
        if index is None and self.lowercase_unknown:
            index = self._tokenizer.token_to_id(self.disguised(word.lower()))
        if index is None and not unicodedata.is_normalized("NFC", word):
            self._warn_of_form()
        return UNK_ID if index is None else index

    def _warn_of_form(self) -> None:
        if self not in TOLD_OF_FORM:
            TOLD_OF_FORM.add(self)
            logger.warning(NOT_NFC)

    def disguised(self, word: str) -> str:
        """The word as the vocabulary may have it: a special word that a text spells out is an ordinary one there."""
        return DISGUISE + word[1:] if word in SPECIAL_WORDS else word

    @one_call_at_a_time
    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """
        Ids and characters of words, without markers: the fast path of pretraining and feature extraction.

        Shape:
            result: (words,), (words, max_word_length)
        """
        rows = self.word_table.rows(words)
        return self.word_table.input_ids(rows), self.word_table.character_ids(rows)

    @one_call_at_a_time
    def _encode_plus(
        self,
        text,
        text_pair=None,
        is_split_into_words: bool = False,
        return_tensors: str | TensorType | None = None,
        return_token_type_ids: bool | None = None,
        **kwargs,
    ) -> BatchEncoding:
        for name, value in kwargs.items():
            if value is not None:
                _check_setting(name, value)
        kwargs["max_length"] = checked_max_length(**kwargs)
        kwargs["padding_side"] = kwargs.get("padding_side") or self.padding_side
        batch, is_batched = as_batch(text, text_pair, is_split_into_words)
        if not batch:
            return self._empty_batch(return_tensors)
        most_parts = max(map(len, batch))
        kwargs["return_token_type_ids"] = most_parts == 2 if return_token_type_ids is None else return_token_type_ids
        words = batch if is_split_into_words else [list(map(self.splitter.words, parts)) for parts in batch]
        lengths = [list(map(len, parts)) for parts in words]
        flat = list(chain.from_iterable(chain.from_iterable(words)))
        rows = self.word_table.rows(flat)
        ids = self.word_table.input_ids(rows)
        encode_in_backend = partial(self._encode_in_backend, batch, words, lengths, ids, **kwargs)
        if needs_backend(lengths, **kwargs):
            encoded = encode_in_backend()
            token_rows = []
            for encoding, rows_of_words in texts_of_encodings(encoded, by_part(rows, lengths)):
                # The row number of a special word is its id.
                token_rows.append(np.array(values_of_tokens(encoding, rows_of_words, encoding.ids), dtype=np.int64))
        else:
            data, token_rows = self._encode_in_numpy(lengths, rows, **kwargs)
            if return_tensors is None:
                data = {key: [text.tolist() for text in texts] for key, texts in data.items()}
            encodings = LazyEncodings(len(batch), lambda: encode_in_backend().encodings)
            encoded = BatchEncoding(data, encodings, n_sequences=most_parts)
        if return_tensors is not None and len(set(map(len, token_rows))) == 1:
            encoded["character_ids"] = self.word_table.character_ids(np.stack(token_rows)).astype(np.int64)
        else:
            trim = kwargs.get("padding_strategy", PaddingStrategy.DO_NOT_PAD) == PaddingStrategy.DO_NOT_PAD
            encoded["character_ids"] = [self.word_table.character_ids(text, trim=trim) for text in token_rows]
        if return_tensors is not None:
            encoded.data = {key: _integers_or_list(value) for key, value in encoded.items()}
            return encoded.convert_to_tensors(return_tensors)
        if not is_batched and not kwargs.get("return_overflowing_tokens"):
            for key, value in encoded.items():
                if isinstance(value[0], (list, np.ndarray)):
                    encoded[key] = value[0]
        return encoded

    @one_call_at_a_time
    def _encode_in_backend(
        self, batch: list[Sequence], words: list[Sequence], lengths: list[list[int]], ids: np.ndarray, **kwargs
    ) -> BatchEncoding:
        """Encodes with the stock method, which truncates texts and counts words. What it knows of words is replaced."""
        if kwargs.get("return_overflowing_tokens"):
            require_version("tokenizers>=0.23.3", "0.23.1 and 0.23.2 lose the end of a text: pip install -U tokenizers")
        texts = []
        values = []
        for parts, words_of_parts, ids_of_parts in zip(batch, words, by_part(ids, lengths), strict=True):
            counted = [[DISGUISE] * len(part) for part in ids_of_parts]
            texts.append(tuple(counted) if len(counted) == 2 else counted[0])
            tokens = list(map(self.convert_ids_to_tokens, ids_of_parts))
            places = list(map(_characters_of_words, parts, words_of_parts))
            values.append((ids_of_parts, tokens, places))
        try:
            encoded = super()._encode_plus(texts, is_split_into_words=True, **kwargs)
        finally:  # saved files, and the hash in `datasets`, must not depend on earlier calls
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        encodings = [with_words(encoding, *of_text) for encoding, of_text in texts_of_encodings(encoded, values)]
        encoded["input_ids"] = [encoding.ids for encoding in encodings]
        if "offset_mapping" in encoded:
            encoded["offset_mapping"] = [encoding.offsets for encoding in encodings]
        return BatchEncoding(encoded.data, encodings)

    def _encode_in_numpy(
        self,
        lengths: list[list[int]],
        rows: np.ndarray,
        add_special_tokens: bool = True,
        padding_strategy: PaddingStrategy = PaddingStrategy.DO_NOT_PAD,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str = "right",
        return_token_type_ids: bool = False,
        return_attention_mask: bool | None = None,
        **_,
    ) -> tuple[dict[str, list], list[np.ndarray]]:
        """Encodes texts without truncation, several times faster than the backend; also the row of each token."""
        lengths_of_parts = np.array([length for parts in lengths for length in parts])
        if add_special_tokens:
            ends = np.cumsum(lengths_of_parts)
            markers_at = np.column_stack([ends - lengths_of_parts, ends]).ravel()
            rows = np.insert(rows, markers_at, np.tile([BOS_ID, EOS_ID], len(ends)))
            lengths_of_parts += 2
        first_parts = np.cumsum([0, *map(len, lengths)])[:-1]
        lengths_B = np.add.reduceat(lengths_of_parts, first_parts)
        padded_B = lengths_B
        if padding_strategy != PaddingStrategy.DO_NOT_PAD:
            target = max_length if padding_strategy == PaddingStrategy.MAX_LENGTH else None
            target = target or int(lengths_B.max())
            multiple = pad_to_multiple_of or 1
            padded_B = np.maximum(lengths_B, -(-target // multiple) * multiple)
        positions_T = np.arange(padded_B.max())
        starts_B = padded_B - lengths_B if padding_side == "left" else np.zeros_like(lengths_B)
        ends_B = starts_B + lengths_B
        mask_BT = (positions_T >= starts_B[:, None]) & (positions_T < ends_B[:, None])

        def arranged(tokens: np.ndarray) -> list[np.ndarray]:
            matrix_BT = np.zeros(mask_BT.shape, dtype=np.int64)
            matrix_BT[mask_BT] = tokens
            return [row_T[:length] for row_T, length in zip(matrix_BT, padded_B, strict=True)]

        data = {"input_ids": arranged(self.word_table.input_ids(rows))}
        if return_token_type_ids:
            types = np.concatenate([np.arange(len(parts)) for parts in lengths])
            data["token_type_ids"] = arranged(np.repeat(types, lengths_of_parts))
        if return_attention_mask or (return_attention_mask is None and "attention_mask" in self.model_input_names):
            data["attention_mask"] = arranged(np.ones_like(rows))
        return data, arranged(rows)

    def _empty_batch(self, return_tensors: str | TensorType | None) -> BatchEncoding:
        names = [name for name in self.model_input_names if name != "token_type_ids"]
        if return_tensors is None:
            return BatchEncoding({name: [] for name in names}, [])
        empty = {name: np.zeros((0, 0), dtype=np.int64) for name in names}
        empty["character_ids"] = np.zeros((0, 0, self.max_word_length), dtype=np.int64)
        return BatchEncoding(empty, [], tensor_type=return_tensors)

    def pad(self, encoded_inputs, *args, padding_side=None, return_tensors=None, **kwargs) -> BatchEncoding:
        """Pads as the stock method does, with `character_ids` in numpy instead of lists of integers."""
        padding_side = padding_side or self.padding_side
        _check_setting("padding_side", padding_side)
        if isinstance(encoded_inputs, (list, tuple)) and encoded_inputs and isinstance(encoded_inputs[0], Mapping):
            encoded_inputs = {key: [example[key] for example in encoded_inputs] for key in encoded_inputs[0]}
        inputs = dict(encoded_inputs)
        characters = inputs.pop("character_ids", None)
        padded = BatchEncoding(super().pad(inputs, *args, padding_side=padding_side, **kwargs))
        input_ids = padded["input_ids"]
        if return_tensors is None and not isinstance(input_ids, list):  # as in the stock method: arrays stay arrays
            return_tensors = "np" if isinstance(input_ids, np.ndarray) else "pt"
        if characters is not None:
            is_text = len(input_ids) > 0 and np.ndim(input_ids[0]) == 0
            lengths = [len(input_ids)] if is_text else list(map(len, input_ids))
            texts = self._padded_characters([characters] if is_text else characters, lengths, padding_side == "left")
            padded["character_ids"] = texts[0] if is_text else texts
            if return_tensors is not None and len(set(lengths)) == 1:
                # The stock conversion of a list reads every number.
                padded.data = {key: _integers_or_list(value) for key, value in padded.items()}
        return padded.convert_to_tensors(return_tensors)

    def _padded_characters(self, texts, lengths: list[int], is_left: bool) -> list[np.ndarray]:
        """`(tokens, at most max_word_length)` each, as `(length, max_word_length)` each."""
        padded = []
        for words, length in zip(map(np.asarray, texts), lengths, strict=True):
            missing = length - len(words)
            if missing < 0:
                raise ValueError(f"{len(words)} `character_ids` do not fit {length} `input_ids`; pass as many.")
            padded_TW = np.zeros((length, self.max_word_length), dtype=np.int64)
            first = missing if is_left else 0
            self.word_table.widen(words, out=padded_TW[first : first + len(words)])
            padded.append(padded_TW)
        return padded

    def convert_ids_to_tokens(self, ids, skip_special_tokens: bool = False) -> str | list[str]:
        """Words of ids. `skip_special_tokens` keeps `<UNK>`: a text must not lose words silently."""
        if isinstance(ids, (int, np.integer)):
            return self._word_of_id(int(ids))
        skipped = set()
        if skip_special_tokens:
            added = {index for index, token in self.added_tokens_decoder.items() if token.special}
            skipped = added.union(self.all_special_ids) - {self.unk_token_id}
        return [self._word_of_id(index) for index in map(int, ids) if index not in skipped]

    def _word_of_id(self, index: int) -> str:
        word = self._tokenizer.id_to_token(index) if index >= 0 else None
        if word is None:
            raise ValueError(f"The id {index} is out of range; the vocabulary has the ids 0 to {len(self) - 1}.")
        return word

    def _decode(self, token_ids, skip_special_tokens: bool = False, clean_up_tokenization_spaces=None, **_) -> str:
        text = " ".join(self.convert_ids_to_tokens(np.atleast_1d(token_ids), skip_special_tokens))
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        return self.clean_up_tokenization(text) if clean_up_tokenization_spaces else text

    def decode_characters(self, character_ids, skip_special_tokens: bool = False) -> list:
        """
        Words spelled by their characters, also outside the vocabulary. Long words stay cut.

        Args:
            character_ids: an array, a tensor or lists. Padding words (rows of zeros) are omitted.
            skip_special_tokens: whether to omit the markers `<S>` and `</S>` too.

        Shape:
            character_ids: (texts, tokens, width), (tokens, width)
            result: one list of words per text, or one list
        """
        array = np.asarray(character_ids)
        if array.ndim not in (2, 3) or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
            raise ValueError(f"`character_ids` are {array.dtype} {array.shape}; pass integers of 2 or 3 dimensions.")
        if array.ndim == 3:
            return [self.decode_characters(text, skip_special_tokens) for text in array]
        return self.word_table.decode(array, skip_special_tokens)

    def train_new_from_iterator(
        self,
        text_iterator: Iterable[str | Sequence[str]],
        vocab_size: int,
        length: int | None = None,
        new_special_tokens: Sequence[str | AddedToken] | None = None,
        special_tokens_map: Mapping[str, str] | None = None,
        min_frequency: int = 1,
    ) -> "ELMoTokenizer":
        """
        A tokenizer with the same options and the most frequent words of raw texts, or of batches of raw texts.

        Args:
            vocab_size: number of special and frequent words. Added tokens and `new_special_tokens` come on top.
            length: ignored; the stock signature has it for a progress bar.
            new_special_tokens: special words with the last ids.
            special_tokens_map: must be empty: the special words have fixed names.
            min_frequency: minimum occurrences of a word.
        """
        if special_tokens_map:
            raise ValueError(f"special_tokens_map={special_tokens_map}: the special words of ELMo have fixed names.")
        counts: Counter[str] = Counter()
        for texts in text_iterator:
            for text in [texts] if isinstance(texts, str) else texts:
                words = (word for word in self.splitter.words(text) if word not in self.splitter.added)
                counts.update(map(self.word_table.looked_up, words))
        options = {}
        if new_special_tokens:
            options["extra_special_tokens"] = [*self.extra_special_tokens, *new_special_tokens]
        return self.with_vocabulary(most_frequent_words(counts, vocab_size, min_frequency), **options)

    def with_vocabulary(self, words: Sequence[str], **options) -> "ELMoTokenizer":
        """A tokenizer with the words of another `vocab` and the same options, except those given here."""
        kept = {**self.init_kwargs, **self.special_tokens_map}
        for name in ("name_or_path", "backend"):
            kept.pop(name, None)
        if self.extra_special_tokens:
            kept["extra_special_tokens"] = self.extra_special_tokens
        new = type(self)(vocab=words, **{**kept, **options})
        new.add_tokens(list(self.splitter.added), special_tokens=True)
        return new


def _check_setting(name: str, value) -> None:
    if name in FIXED_SETTINGS and str(value) != str(FIXED_SETTINGS[name]):
        raise ValueError(f"{name}={value!r}: the special words of ELMo have fixed names; use {FIXED_SETTINGS[name]!r}.")
    if name == "split_special_tokens" and value is not True:
        raise ValueError(f"{name}={value!r}: special words are spelled out; see ELMoTokenizer(literal_markers=True).")
    if name in ("padding_side", "truncation_side") and value not in ("left", "right"):
        raise ValueError(f'{name}={value!r}; pass "left" or "right".')
    if value is not None and value != FOREIGN_SETTINGS.get(name, value):
        raise ValueError(
            f"{name}={value!r} has no effect; see `pre_tokenization`, `lowercase_unknown`, `add_special_tokens`."
        )


def _integers_or_list(values):
    """The values as an array if they are integers and not ragged, else unchanged, for the stock conversion."""
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        return values
    return array if array.dtype.kind == "i" else values


def _characters_of_words(part: str | Sequence[str], words: Sequence[str]) -> list[tuple[int, int]]:
    """First character and end of each word in its text or, if words were given, in itself."""
    if isinstance(part, str):
        return list(places_of(words, part))
    return [(0, len(word)) for word in words]


def _load_backend(vocab, tokenizer_file, vocab_file) -> Tokenizer:
    """The backend with the vocabulary of the first argument that is not None."""
    if isinstance(vocab, (str, PathLike)) or not isinstance(vocab, (Iterable, NoneType)):
        raise TypeError(f"`vocab` must be a list of words, got {vocab!r}; pass a path as `vocab_file`.")
    if vocab is None and tokenizer_file is not None:
        return _read_backend(tokenizer_file)
    if isinstance(vocab, Mapping):
        check_strings(list(vocab))
        _check_ids(vocab, "`vocab`")
        words = sorted(vocab, key=vocab.__getitem__)
    elif vocab is not None:
        words = order_vocabulary(list(vocab), "`vocab`")
    elif vocab_file is not None:
        words = read_vocabulary(vocab_file)
    else:
        words = list(SPECIAL_WORDS)
    backend = Tokenizer(_word_model(words))
    backend.add_special_tokens(list(map(_special_token, SPECIAL_WORDS)))
    return backend


def _read_backend(path: str | PathLike) -> Tokenizer:
    """The backend of a saved `tokenizer.json`."""
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the class of all errors of the Rust library
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}. {SAVE_AGAIN}") from error
    prefix = getattr(backend.model, "continuing_subword_prefix", None)
    if prefix != CONTINUATION or not backend.get_added_tokens_decoder():
        raise ValueError(f"{path} was not saved by ELMoTokenizer; pass its words as `vocab_file`.")
    _check_ids(backend.get_vocab(with_added_tokens=False), str(path))
    return backend


def _check_files(folder: Path) -> None:
    """Refuses damaged files of a saved tokenizer, by name."""
    path = folder / "tokenizer_config.json"
    try:
        if path.is_file() and not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError("another kind of value")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object in UTF-8: {error}. {SAVE_AGAIN}") from error
    if (folder / "tokenizer.json").is_file():
        _read_backend(folder / "tokenizer.json")


def _word_model(words: Sequence[str]) -> models.WordPiece:
    wrong = [word for word in words if word.startswith(CONTINUATION)]
    if wrong:
        raise ValueError(f"The words {wrong[:3]} start with U+10FFFD, which is reserved; remove these words.")
    return models.WordPiece(
        {word: index for index, word in enumerate(words)},
        unk_token=UNK_WORD,
        # A longer word is unknown at once; the backend would look up each of its prefixes.
        max_input_chars_per_word=max(map(len, words)),
        continuing_subword_prefix=CONTINUATION,
    )


def _special_token(word: str) -> AddedToken:
    return AddedToken(word, single_word=True, normalized=False, special=True)


def _check_ids(vocab: Mapping[str, int], source: str) -> None:
    ids = {index for index in vocab.values() if isinstance(index, Integral)}
    missing = sorted({*range(len(vocab))} - ids)
    special = {word: vocab.get(word) for word in SPECIAL_WORDS}
    if missing or [*special.values()] != [0, 1, 2, 3]:
        raise ValueError(
            f"{source} needs the ids 0 to {len(vocab) - 1}, special words first; got {special}, no ids {missing[:5]}."
        )
