"""How token vectors are computed fast: convolutions by tables, each distinct word once, a cache of words.

`ELMoCharacterEncoder` and `ELMoModel.compute_words` are the definitions.

Shape suffixes: N tokens; U distinct words; W `max_word_length`; X the ids of a word: W characters, after the word's id
if used; C width of a character; R character ids; O positions of a filter; K its width; F filters; V words of a cache.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from .configuration_elmo import ELMoConfig
from .inputs import PackedBatch, check_range, on_host, pack, token_mask
from .kernels.products import remembered, sample_of
from .kernels.torch_state import is_hooked, product_dtype, to_device, version

logger = logging.get_logger(__name__)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a parameter's values
# On accelerators, sizes are rounded up to multiples: of words, below MANY_WORDS and from there on, and of positions.
FEW_WORDS, MANY_WORDS, FEW_POSITIONS = 64, 512, 8
CHUNK_WORDS = 128  # words of similar length per chunk: their windows stay in the CPU cache


def maxima_from_tables(embedding: nn.Embedding, convolutions: Iterable[nn.Module], characters_UW: Tensor) -> Tensor:
    """The maximum of each filter over its positions in a word, `(words, filters)`.

    Each column of a filter has one value per character, and a window is their sum.
    """
    characters_UW = to_device(characters_UW, embedding.weight.device)
    layers: list[Any] = list(convolutions)
    filters = [layer.weight for layer in layers]
    if torch.is_grad_enabled():  # through the module, which keeps its padding's gradient at 0
        every_id = torch.arange(embedding.num_embeddings, device=characters_UW.device)
        tables = _filter_tables(embedding(every_id), *filters)
    else:
        tables = remembered(_filter_tables, embedding.weight, *filters)
    widest = max(table.shape[0] for table in tables)
    lengths_U = _lengths(characters_UW)
    order_U = lengths_U.argsort()
    chunks = []
    for rows in order_U.split(CHUNK_WORDS):
        characters = characters_UW[rows, : int(lengths_U[rows[-1]]) + widest]
        chunks.append(torch.cat([_maxima(characters, table) for table in tables], dim=-1))
    bias_F = torch.cat([layer.bias for layer in layers])
    return (torch.cat(chunks) + bias_F)[order_U.argsort()].to(bias_F.dtype)


def maxima_in_few_sizes(
    embedding: nn.Embedding, convolutions: Iterable[nn.Module], characters_UW: Tensor, widest: int
) -> Tensor:
    """`ELMoCharacterEncoder.convolve` of a list of words, on accelerators.

    cuDNN plans a convolution for each new size, which takes the host longer than the device computes. So the numbers
    of words and positions are rounded up, the words by copies of the first one, whose results nothing reads.

    The gradient of a maximum is for one position. If several are equal, the first gets it all, and in the definition
    each an equal part, for which it reads all values four more times. A tie has no derivative, and both are
    subgradients.
    """
    multiple = FEW_WORDS if len(characters_UW) < MANY_WORDS else MANY_WORDS
    words_UW = cropped(characters_UW, widest, FEW_POSITIONS)
    words_UW = torch.cat([words_UW, words_UW[:1].expand(-len(words_UW) % multiple, -1)])
    embedded_UOC = embedding(to_device(words_UW, embedding.weight.device))
    # Cast and laid out once, which each convolution would do for itself.
    embedded_UCO = embedded_UOC.to(product_dtype(embedded_UOC)).transpose(1, 2).contiguous()
    maxima = [convolution(embedded_UCO).max(-1).values for convolution in convolutions]
    return torch.cat(maxima, dim=-1)[: len(characters_UW)]


def cropped(characters_UW: Tensor, widest: int, multiple: int = 1) -> Tensor:
    """Words without the positions that are padding in all of them; the widest filter keeps one window of padding.

    Words that are on an accelerator stay as they are: the model reads those of a text from the CPU.

    Args:
        multiple: what the number of positions is rounded up to, unless the words have fewer.
    """
    if characters_UW.device.type != "cpu":
        return characters_UW  # to read the lengths would wait for the device
    longest = int(_lengths(characters_UW).max()) if len(characters_UW) else 0
    length = longest + widest
    return characters_UW[:, : length + -length % multiple]


def _lengths(characters_UW: Tensor) -> Tensor:
    """The length of each word before the tail of padding that all words share.

    Cropping a word is exact if every filter keeps one window that is entirely in the tail.
    """
    differs_UW = characters_UW != characters_UW[:1, -1:]
    return (differs_UW * torch.arange(1, characters_UW.shape[1] + 1, device=characters_UW.device)).amax(1)


def _filter_tables(embedding_RC: Tensor, *filters_FCK: Tensor) -> list[Tensor]:
    """For each filter width, `(K, R, F)`: the value that a character adds to a window at each position."""
    wide = torch.promote_types(embedding_RC.dtype, torch.float32)  # a sum of rounded entries rounds several times
    with torch.autocast(embedding_RC.device.type, enabled=False):
        tables = [torch.einsum("rc,fck->krf", embedding_RC.to(wide), weight.to(wide)) for weight in filters_FCK]
        return [table_KRF.contiguous() for table_KRF in tables]


def _maxima(characters_UW: Tensor, table_KRF: Tensor) -> Tensor:
    width, size, _ = table_KRF.shape
    windows_UOK = characters_UW.unfold(1, width, 1) + size * torch.arange(width, device=characters_UW.device)
    sums = F.embedding_bag(windows_UOK.flatten(0, 1), table_KRF.flatten(0, 1), mode="sum")
    return sums.unflatten(0, windows_UOK.shape[:2]).amax(1)


class VocabularyCache(nn.Module):
    """Token vectors of distinct words, found by the ids of the words. `cache_vocabulary` makes it.

    Args:
        words_VX: rows of ids, as in `encode_words`.
        vectors_VP: the vectors of these words.
        parameters: the parameters that computed the vectors.
        persistent: whether the cache is part of the model's `state_dict`.
    """

    hashes: Tensor
    words: Tensor
    vectors: Tensor
    sample: Tensor

    def __init__(self, words_VX: Tensor, vectors_VP: Tensor, parameters: Sequence[Tensor], persistent: bool):
        super().__init__()
        hashes_V, order_V = row_hashes(words_VX).sort()
        self.register_buffer("hashes", hashes_V, persistent)
        self.register_buffer("words", words_VX[order_V].int(), persistent)
        self.register_buffer("vectors", vectors_VP[order_V], persistent)
        self.register_buffer("sample", sample_of(parameters), persistent)
        self.versions: list[float] | None = None
        self.sums: list[int] | None = None

    def find(self, words_UX: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each word is in the cache `(U,)`, and its row `(U,)`."""
        rows_U = torch.searchsorted(self.hashes, row_hashes(words_UX)).clamp_(max=len(self.hashes) - 1)
        return (self.words[rows_U] == words_UX).all(1), rows_U

    def suits(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the vectors are still valid for these parameters.

        The sample of the parameters moves with them to every device and dtype. Sums are computed only after a write.
        """
        if not torch.equal(sample_of(parameters).to(self.sample), self.sample):
            return False
        versions = [version(parameter) for parameter in parameters]
        if versions != self.versions:
            bits = [parameter.detach().view(INTEGERS[parameter.element_size()]) for parameter in parameters]
            sums = [int(each.sum()) for each in bits]  # exact on every device; some have no float64
            if self.sums is not None and sums != self.sums:
                return False
            self.versions, self.sums = versions, sums
        return True


class VocabularyCacheMixin:
    """The part of `ELMoModel` that remembers the token vectors of words (`x_k` of section 3.1)."""

    config: ELMoConfig
    char_encoder: Any
    word_embeddings: nn.Embedding | None
    token_projection: nn.Linear | None
    vocabulary_cache: VocabularyCache | None

    compute_words: Callable[[Tensor], Tensor]

    def word_ids(self, character_ids: Tensor, input_ids: Tensor) -> Tensor:
        """`ids_of_words` of this model."""
        return ids_of_words(self.config, character_ids, input_ids)

    def encode_words(self, words_UX: Tensor) -> Tensor:
        """Token vectors `(..., projection_size)` of rows of ids: the word id, if used, before the characters.

        Words of `cache_vocabulary` are looked up, unless they need a gradient or a hook is to see them.
        """
        self.check_words(words_UX)
        words_UX = words_UX.long()
        cache = self._usable_cache()
        if cache is None:
            return self.compute_words(words_UX)
        shape, words_UX = words_UX.shape[:-1], words_UX.flatten(0, -2)
        known_U, rows_U = cache.find(to_device(words_UX, cache.words.device))
        vectors_UP = cache.vectors[rows_U]
        if not known_U.all():
            unknown_UX = words_UX[~known_U.to(words_UX.device)]
            vectors_UP[~known_U] = self.compute_words(unknown_UX).to(vectors_UP)
        return vectors_UP.unflatten(0, shape)

    def check_words(self, words_UX: Tensor):
        """Raises a `ValueError` unless the model has a vector for each id, as in `encode_words`."""
        if self.word_embeddings is not None:
            check_range("input_ids", words_UX[..., 0], self.config.vocab_size)
        if self.char_encoder is not None:
            check_range("character_ids", words_UX[..., -self.config.max_word_length :], self.config.char_vocab_size)

    def token_encoder(self) -> list[nn.Module]:
        parts = (self.char_encoder, self.word_embeddings, self.token_projection)
        return [part for part in parts if part is not None]

    @torch.no_grad()
    def cache_vocabulary(self, words: Iterable[str], tokenizer, save: bool = False, batch_size: int = 1024):
        """Computes the token vectors of words once. The model then looks them up by their characters.

        Other words are computed as before. A cached word takes `4 * (max_word_length + projection_size) + 8` bytes
        (float32). The cache moves with the model. It is dropped, with a warning, if a parameter of the encoder changes.

        Args:
            words: the words, for example `tokenizer.get_vocab()`.
            tokenizer: the tokenizer that was saved with the model.
            save: whether `save_pretrained` saves the cache with the model.
            batch_size: number of words per batch.
        """
        if isinstance(words, str) or not callable(tokenizer):
            raise ValueError(
                f"`cache_vocabulary` received {type(words).__name__} and {type(tokenizer).__name__}; pass a list of "
                "words and the tokenizer that was saved with the model."
            )
        if obstacle := self._cache_obstacle():
            raise ValueError(f"`cache_vocabulary` cannot be used here: {obstacle}.")
        self.drop_cache()
        words = list(dict.fromkeys(words))
        rows = []
        for start in range(0, len(words), batch_size):
            encoding = tokenizer(words[start : start + batch_size], is_split_into_words=True, return_tensors="pt")
            inputs = encoding.get("character_ids"), encoding.get("input_ids")
            token_mask(self.config, *inputs)  # checks the tokenizer's output
            rows.append(self.word_ids(*inputs)[0])
        if not rows:
            raise ValueError("`cache_vocabulary` received no words; pass at least one.")
        distinct_UX = distinct_rows(torch.cat(rows))[0]
        batches = logging.tqdm(distinct_UX.split(batch_size), desc="Encoding the vocabulary", unit="batch")
        vectors_UP = torch.cat([self.encode_words(batch) for batch in batches])
        distinct_UX = distinct_UX.to(vectors_UP.device)
        self.vocabulary_cache = VocabularyCache(distinct_UX, vectors_UP, self._word_parameters(), persistent=save)
        self.config.vocabulary_cache_size = len(distinct_UX) if save else 0

    def drop_cache(self):
        self.vocabulary_cache = None
        self.config.vocabulary_cache_size = 0

    def empty_cache(self) -> VocabularyCache:
        """A cache of the right size, which `from_pretrained` fills."""
        config = self.config
        columns = (self.word_embeddings is not None) + (config.max_word_length if config.char_vocab_size else 0)
        words_VX = torch.zeros(config.vocabulary_cache_size, columns, dtype=torch.int32)
        vectors_VP = torch.zeros(len(words_VX), config.projection_size)
        return VocabularyCache(words_VX, vectors_VP, self._word_parameters(), persistent=True)

    def _usable_cache(self) -> VocabularyCache | None:
        if self.vocabulary_cache is None or self.vocabulary_cache.words.is_meta or self._cache_obstacle():
            return None
        cache, parameters = self.vocabulary_cache, self._word_parameters()
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
            return None
        if cache.suits(parameters):
            return cache
        logger.warning("The encoder's weights changed: its vocabulary cache is dropped. Call `cache_vocabulary` again.")
        self.drop_cache()
        return None

    def _cache_obstacle(self) -> str | None:
        """The reason why words are computed and not looked up, or `None`."""
        if any(map(is_hooked, self.token_encoder())):
            return "the token encoder has a hook, which is to see all words; remove the hook"
        if any(parameter.is_meta for parameter in self._word_parameters()):
            return "weights of the token encoder are offloaded by `device_map`; load them on a device"
        return "this is a replica of `nn.DataParallel`" if getattr(self, "_is_replica", False) else None

    def _word_parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.token_encoder() for parameter in part.parameters()]


def ids_of_words(config: ELMoConfig, character_ids: Any, input_ids: Any) -> Tensor:
    """All ids that a word's vector depends on: its word id, if the model has word vectors, then its characters."""
    ids = [input_ids[..., None]] if config.word_embedding_size else []
    return torch.cat([*ids, character_ids] if config.char_vocab_size else ids, dim=-1)


def pack_words(
    config: ELMoConfig, character_ids=None, input_ids=None, attention_mask=None, token_type_ids=None
) -> PackedBatch:
    """Checks the inputs of `ELMoModel.forward` but the range of ids, and packs the tokens and the distinct words.

    The host does it, and needs no model: a process that loads data can do it while a device computes.
    """
    character_ids, attention_mask, token_type_ids = map(on_host, (character_ids, attention_mask, token_type_ids))
    input_ids = on_host(input_ids) if config.word_embedding_size else input_ids
    mask_BT = token_mask(config, character_ids, input_ids, attention_mask, token_type_ids)
    batch = pack(mask_BT, token_type_ids)
    words_NX = ids_of_words(config, character_ids, input_ids).flatten(0, 1)[batch.positions_N]
    batch.ids_UX, batch.index_N = distinct_rows(words_NX)
    return batch


def row_hashes(rows_NX: Tensor) -> Tensor:
    """A hash `(N,)` of each row of integers."""
    multipliers_X = torch.full(rows_NX.shape[1:], 6364136223846793005, device="cpu")  # Knuth's, modulo 2^64
    return (rows_NX * multipliers_X.cumprod(0).to(rows_NX.device)).sum(1)


def distinct_rows(rows_NX: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows `(U, X)` of integers, and the distinct row `(N,)` of each row.

    Rows are found by their hashes, and the result is checked. Sorting whole rows would be several times slower.
    """
    hashes, inverse_N = torch.unique(row_hashes(rows_NX), return_inverse=True)
    rows_N = torch.arange(len(rows_NX), device=rows_NX.device)
    distinct_UX = rows_NX[rows_N.new_empty(len(hashes)).scatter_(0, inverse_N, rows_N)]
    if not torch.equal(distinct_UX[inverse_N], rows_NX):  # two rows share a hash
        return torch.unique(rows_NX, dim=0, return_inverse=True)
    return distinct_UX, inverse_N
