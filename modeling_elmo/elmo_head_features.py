"""The vectors `x_k` that a head's network reads beside ELMo (section 3.3): word vectors and character features."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_elmo import ELMoConfig
from .elmo_encoder import ELMoCharacterEncoder, distinct_rows, is_hooked


class TokenFeatures(nn.Module):
    """Word vectors for `input_ids` and a character CNN, both trained with the task. One of the two may be missing.

    Args:
        config: the head's options.
        word_vector_std: standard deviation of new word vectors. Default: vectors have length 1.
    """

    def __init__(self, config: ELMoConfig, word_vector_std: float | None = None):
        super().__init__()
        words, width = config.vocab_size, config.task_word_embedding_size
        self.word_vector_std = word_vector_std
        self.word_embeddings = nn.Embedding(words, width, config.pad_token_id) if width else None
        self.char_encoder = ELMoCharacterEncoder(_character_config(config)) if config.task_has_characters else None
        filters = config.task_char_cnn_filters if config.task_has_characters else []
        self.output_size = width + sum(number for _, number in filters)

    def reset_parameters(self):
        if self.word_embeddings is not None:
            std = self.word_vector_std or self.word_embeddings.embedding_dim**-0.5
            init.normal_(self.word_embeddings.weight, std=std)

    def forward(self, character_ids: Tensor | None, input_ids: Tensor | None, mask_BT: Tensor) -> Tensor:
        """`x_k` of every token: `(batch, time, output_size)`, zeros at padding."""
        features = []
        if self.word_embeddings is not None:
            assert input_ids is not None
            features.append(self.word_embeddings(input_ids.long()))
        if self.char_encoder is not None:
            assert character_ids is not None
            features.append(_encode_text(self.char_encoder, character_ids.long(), mask_BT))
        return torch.cat(features, dim=-1).masked_fill(~mask_BT[..., None], 0)


def _encode_text(encoder: ELMoCharacterEncoder, characters_BTW: Tensor, mask_BT: Tensor) -> Tensor:
    """Features `(batch, time, filters)`, from each distinct word once, or from each position if a hook is to see it."""
    if is_hooked(encoder):
        return encoder(characters_BTW)
    distinct_UW, index_N = distinct_rows(characters_BTW[mask_BT])
    features_NF = encoder(distinct_UW)[index_N]
    zeros_BTF = features_NF.new_zeros(*mask_BT.shape, features_NF.shape[1])
    return zeros_BTF.masked_scatter(mask_BT[..., None], features_NF)


def _character_config(config: ELMoConfig) -> ELMoConfig:
    """The configuration of the head's own character encoder."""
    return ELMoConfig(
        char_vocab_size=config.char_vocab_size,
        char_embedding_size=config.task_char_embedding_size,
        char_cnn_filters=config.task_char_cnn_filters,
        num_highway_layers=0,
        max_word_length=config.max_word_length,
    )
