"""Coreference resolution on ELMo: span ranking (Lee et al. 2017) over one document.

Shape suffixes: S sentences of the document; T time; W words of the document; M gold mentions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..configuration_elmo import ELMoConfig
from ..inputs import check_ids, check_range, word_mask
from .packed_texts import PackedTexts
from .recurrence import TaskLSTM
from .spans import RankedSpans, SpanRanker, gold_clusters, marginal_loss, mention_loss, predicted_clusters
from .task_model import ELMoTaskModel, reads_batch


@dataclass
class ELMoCoreferenceOutput(ModelOutput):
    """Output of `ELMoForCoreferenceResolution`: the kept spans of one document, in document order.

    Shape:
        loss: `()`, summed over the kept spans.
        clusters: `(1, spans, 4)`, in eval mode: sentence, first token, last token, cluster; cluster -1: none.
        mention_scores: `(1, spans)`.
        antecedent_scores: `(1, spans, 1 + antecedents)`: no antecedent, 0, then each antecedent; minus infinity where
            there is none.
        antecedents: `(1, spans, antecedents)`, numbers of earlier spans, nearest first; -1: none.
        hidden_states: as in `ELMoModelOutput`, on request.
    """

    loss: Tensor | None = None
    clusters: Tensor | None = None
    mention_scores: Tensor | None = None
    antecedent_scores: Tensor | None = None
    antecedents: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class ELMoForCoreferenceResolution(ELMoTaskModel):
    """Finds the mentions of a document and who is who: end-to-end span ranking (Lee et al. 2017).

    The rows of a batch are the sentences of one document, in order. ELMo enters at the input of the biLSTM, which reads
    the words of each sentence. The head words of a span are sums of `x_k`, without ELMo; if the model has neither word
    vectors nor characters of its own, of the biLSTM's outputs. The biLSTM is an ordinary one: the published cell ties
    its input and forget gate and drops out its state.

    With `config.train_singletons`, mentions without an antecedent are also learned and found.
    """

    custom_pipelines = {
        "coreference-resolution": {
            "impl": "modeling_elmo.ELMoCoreferencePipeline",
            "pt": ["AutoModelForTokenClassification"],
        }
    }

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        self.feature_dropout = nn.Dropout(config.lexical_dropout)
        self.encoder = TaskLSTM(self.input_size, self.task_hidden_size, self.task_num_layers, self.task_dropout)
        self.encoder_dropout = nn.Dropout(self.task_dropout)
        state_size = self.encoder.output_size + self.output_elmo_size
        self.head_size = self.token_features.output_size if self.token_features else 0
        self.ranker = SpanRanker(config, state_size, self.head_size or state_size, self.task_dropout)
        self.post_init()

    @classmethod
    def network_name(cls, config: ELMoConfig) -> str:
        if config.head == "linear":
            raise ValueError("Coreference resolution has no linear head, but head is 'linear'; pass head='paper'.")
        return "coreference"

    @reads_batch
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        elmo_hidden_states: Tensor | None = None,
        mentions: Tensor | None = None,
        speaker_ids: Tensor | None = None,
        genre_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> ELMoCoreferenceOutput:
        """Ranks the spans of a document, and computes the loss if `mentions` are given.

        Args:
            character_ids, input_ids, attention_mask: as in `ELMoModel`, a row for each sentence. `input_ids` show the
                markers, which belong to no span.
            elmo_hidden_states, output_hidden_states: as in `ELMoForTokenClassification`.
            mentions: `(1, mentions, 4)`, or without the 1, gold mentions: sentence, first token, last token, cluster.
                Tokens are positions in the row: with right padding, the first word is token 1, after its marker. A
                mention wider than `config.max_span_width` is never found.
            speaker_ids: `(sentences,)` or `(sentences, time)`, numbers of speakers. Read with `config.use_speakers`.
            genre_ids: `()`, number of the document's genre. Read with `config.num_genres`.
        """
        inputs = self.read(character_ids, input_ids, attention_mask, None, None, elmo_hidden_states)
        words_ST = word_mask(self.config, inputs.mask_BT, input_ids, None)
        texts = PackedTexts(words_ST, inputs.mask_BT)
        is_word_N = words_ST[inputs.mask_BT]
        encoded_MH = self.encoder(texts.pack(inputs.tokens_ND), texts)
        read_ND = texts.unpack(encoded_MH, len(is_word_N))
        states_WH = self.encoder_dropout(read_ND[is_word_N])
        if inputs.output_NE is not None:
            states_WH = torch.cat([states_WH, inputs.output_NE[is_word_N]], -1)
        heads_WX = inputs.tokens_ND[is_word_N, : self.head_size] if self.head_size else states_WH
        places_W2 = words_ST.nonzero()
        speakers_W = self._speakers(speaker_ids, words_ST)
        genre = self._genre(genre_ids)
        spans = self.ranker(states_WH, heads_WX, places_W2[:, 0], speakers_W, genre)
        return ELMoCoreferenceOutput(
            loss=None if mentions is None else self._loss(spans, mentions, words_ST),
            clusters=None if self.training else self._clusters(spans, places_W2)[None],
            mention_scores=spans.mentions_K[None],
            antecedent_scores=spans.scores_KC[None],
            antecedents=spans.antecedents_KA[None],
            hidden_states=self._requested(inputs, output_hidden_states),
        )

    def _drop_out(self, features_ND: Tensor, mask_BT: Tensor) -> Tensor:
        return self.feature_dropout(features_ND)

    def _clusters(self, spans: RankedSpans, places_W2: Tensor) -> Tensor:
        """Sentence, first token, last token and cluster of each kept span: `(K, 4)`."""
        first_K2 = places_W2[spans.first_K]
        last_K1 = places_W2[spans.last_K, 1:]
        clusters_K = predicted_clusters(spans, self.config.train_singletons)
        return torch.cat([first_K2, last_K1, clusters_K[:, None]], 1)

    def _loss(self, spans: RankedSpans, mentions: Tensor, words_ST: Tensor) -> Tensor:
        if isinstance(mentions, Tensor) and mentions.dim() == 3 and len(mentions) == 1:
            mentions = mentions[0]  # Trainer gathers and pads labels whose first dimension counts examples
        gold = _checked_mentions(mentions, words_ST)
        clusters_K = gold_clusters(spans.first_K, spans.last_K, *gold)
        loss = marginal_loss(spans, clusters_K) + self.penalty()
        if not self.config.train_singletons:
            return loss
        first_N, last_N, mentions_N = spans.candidates
        clusters_N = gold_clusters(first_N, last_N, *gold)
        return loss + mention_loss(mentions_N, clusters_N)

    def _speakers(self, speaker_ids: Tensor | None, words_ST: Tensor) -> Tensor | None:
        if not self.config.use_speakers:
            return None
        if speaker_ids is None:
            raise ValueError("This model reads speakers: pass `speaker_ids`; if all words have one speaker, zeros.")
        if isinstance(speaker_ids, Tensor) and speaker_ids.dim() == 2:
            check_ids("speaker_ids", speaker_ids, tuple(words_ST.shape))
        else:
            check_ids("speaker_ids", speaker_ids, (len(words_ST),))
            speaker_ids = speaker_ids[:, None].expand_as(words_ST)
        return speaker_ids[words_ST]

    def _genre(self, genre_ids: Tensor | None) -> Tensor | None:
        if not self.config.num_genres:
            return None
        if genre_ids is None:
            raise ValueError(f"This model knows {self.config.num_genres} genres: pass `genre_ids` of shape ().")
        check_ids("genre_ids", genre_ids, ())
        check_range("genre_ids", genre_ids, self.config.num_genres, "load it with num_genres=...")
        return genre_ids.long()


def _checked_mentions(mentions: Tensor, words_ST: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of each mention's first and last word in the document, and its cluster: `(M,)` each."""
    check_ids("mentions", mentions, ("mentions", 4))
    sentence_M, first_M, last_M, cluster_M = mentions.long().unbind(1)
    sentences, time = words_ST.shape
    valid_M = (sentence_M >= 0) & (sentence_M < sentences) & (cluster_M >= 0)
    valid_M &= (first_M >= 0) & (first_M <= last_M) & (last_M < time)
    if valid_M.any():
        for token_M in (first_M, last_M):
            valid_M &= words_ST[sentence_M * valid_M, token_M * valid_M]  # an invalid place would be out of range
    _, numbers_M, counts = mentions[:, :3].unique(dim=0, return_inverse=True, return_counts=True)
    valid_M &= counts[numbers_M] == 1
    if not valid_M.all():
        row = int((~valid_M).nonzero()[0])
        raise ValueError(
            f"`mentions` has {mentions[row].tolist()} in row {row}, which is not a span with a cluster from 0, "
            "or occurs twice. Pass (sentence, first token, last token, cluster), tokens as positions in `input_ids`."
        )
    numbers_ST = (words_ST.flatten().cumsum(0) - 1).view_as(words_ST)
    return numbers_ST[sentence_M, first_M], numbers_ST[sentence_M, last_M], cluster_M
