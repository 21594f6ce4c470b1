"""The paper's network for coreference: spans of words, ranked as mentions and as antecedents (Lee et al. 2017).

Shape suffixes: W words of the document; N candidate spans; K kept spans; A antecedents of a span; C its choices, no
antecedent and A antecedents; P pairs of a span and an antecedent; M gold mentions; O words of the widest span; H width
of a word's state; X width of a head word; G width of a span's vector; F width of a feature; L width of a scorer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..configuration_elmo import ELMoConfig
from ..kernels.products import fast_linear
from ..kernels.torch_state import fetched
from .packed_texts import masked_softmax
from .recurrence import glorot_

FEATURE_SIZE = 20  # section 7.2 of Lee et al. 2017
SCORER_SIZE = 150  # the same section
# The least distance of each bin but the first, whose distance is 0: 1, 2, 3, 4, 5-7, 8-15, 16-31, 32-63, 64+.
DISTANCES = (1, 2, 3, 4, 5, 8, 16, 32, 64)
PIECE = 2048  # rows that are computed at a time, so that memory does not grow with the number of pairs


class RankedSpans(NamedTuple):
    """The kept spans of a document in document order.

    Shape:
        first_K, last_K: `(spans,)`, the number of each span's first and last word in the document.
        mentions_K: `(spans,)`, mention scores.
        antecedents_KA: `(spans, antecedents)`, numbers of earlier spans, nearest first; -1: none.
        scores_KC: `(spans, 1 + antecedents)`, the score of no antecedent, 0, and of each antecedent; minus infinity
            where there is none.
        candidates: first words, last words and mention scores of all spans of the document, `(candidates,)` each.
    """

    first_K: Tensor
    last_K: Tensor
    mentions_K: Tensor
    antecedents_KA: Tensor
    scores_KC: Tensor
    candidates: tuple[Tensor, Tensor, Tensor]


class SplitScorer(nn.Module):
    """`w . relu(W_2 relu(W_1 [a; b; ...] + b_1) + b_2) + b_3`, with dropout after each relu.

    `W_1 [a; b; ...] = W_a a + W_b b + ...`: a part that many rows share is multiplied once, and no row is concatenated.
    """

    def __init__(self, sizes: Sequence[int], hidden_size: int, dropout: float):
        super().__init__()
        self.sizes = list(sizes)
        self.first = nn.Linear(sum(sizes), hidden_size)
        self.second = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, 1)
        self.dropout = nn.Dropout(dropout)

    def blocks(self) -> tuple[Tensor, ...]:
        """The matrix of each part: `(hidden_size, size)`."""
        return fetched(self.first, "weight").split(self.sizes, 1)

    def forward(self, product_NL: Tensor) -> Tensor:
        """Scores `(rows,)` for the sum of the parts' products, `(rows, hidden_size)`."""
        first_NL = product_NL + fetched(self.first, "bias")
        second_NL = fast_linear(self.second, self.dropout(first_NL.relu()))
        return self.output(self.dropout(second_NL.relu())).squeeze(-1)


class SpanRanker(nn.Module):
    """Scores spans as mentions, keeps the best, and scores pairs of them.

        a_t = w_a . x*_t;  x^_i = sum of softmax(a_t) x_t over the span's words             head word
        g_i = [x*_start; x*_end; x^_i; width]                                               span
        s_m(i) = FFNN(g_i);  s_a(i, j) = FFNN([g_i; g_j; g_i * g_j; features])              scores
        s(i, j) = s_m(i) + s_m(j) + s_a(i, j);  s(i, none) = 0

    (sections 4 and 5 of Lee et al. 2017), with states `x*` and word embeddings `x`. Features of a pair: the distance,
    which counts kept spans as the published code does; with `config.use_speakers`, whether the speaker is the same;
    with `config.num_genres`, the genre of the document.
    """

    def __init__(self, config: ELMoConfig, state_size: int, head_size: int, dropout: float):
        super().__init__()
        self.max_width = config.max_span_width
        self.max_antecedents = config.max_antecedents
        self.spans_per_word = config.spans_per_word
        parts = [state_size, state_size, head_size, FEATURE_SIZE]
        size = sum(parts)
        self.head_scores = nn.Linear(state_size, 1, bias=False)  # a softmax cancels a bias
        self.widths = nn.Embedding(self.max_width, FEATURE_SIZE)
        self.distances = nn.Embedding(len(DISTANCES) + 1, FEATURE_SIZE)
        self.same_speaker = nn.Embedding(2, FEATURE_SIZE) if config.use_speakers else None
        self.genres = nn.Embedding(config.num_genres, FEATURE_SIZE) if config.num_genres else None
        feature_size = FEATURE_SIZE * (1 + bool(config.use_speakers) + bool(config.num_genres))
        self.mention_scorer = SplitScorer(parts, SCORER_SIZE, dropout)
        self.pair_scorer = SplitScorer([size, size, size, feature_size], SCORER_SIZE, dropout)
        self.dropout = nn.Dropout(dropout)

    def initialize_parameters(self):
        """Glorot-uniform matrices and feature tables, biases 0."""
        glorot_(self, nn.Linear, nn.Embedding)

    def forward(
        self,
        states_WH: Tensor,
        heads_WX: Tensor,
        sentences_W: Tensor,
        speakers_W: Tensor | None = None,
        genre: Tensor | None = None,
    ) -> RankedSpans:
        """Ranks the spans of one document.

        Args:
            states_WH: `(words, state_size)`.
            heads_WX: `(words, head_size)`.
            sentences_W: `(words,)`, the number of each word's sentence, ascending.
            speakers_W: `(words,)`, the number of each word's speaker.
            genre: `()`, the number of the document's genre.
        """
        first_N, last_N = candidate_spans(sentences_W, self.max_width)
        widths_NF = self.dropout(self.widths(last_N - first_N))
        head_scores_W = self.head_scores(states_WH).squeeze(-1)
        mentions_N = self._mention_scores(states_WH, heads_WX, head_scores_W, first_N, last_N, widths_NF)
        count = int(self.spans_per_word * len(sentences_W))
        best_K = best_spans(mentions_N, first_N, last_N, count)
        first_K = first_N[best_K]
        last_K = last_N[best_K]
        mentions_K = mentions_N[best_K]
        parts = [
            states_WH[first_K],
            states_WH[last_K],
            attended_words(heads_WX, head_scores_W, first_K, last_K, self.max_width),
            widths_NF[best_K],
        ]
        spans_KG = torch.cat(parts, -1)
        speakers_K = None if speakers_W is None else speakers_W[first_K]
        antecedents_KA = nearest_antecedents(len(spans_KG), self.max_antecedents, spans_KG.device)
        scores_KA = self._pair_scores(spans_KG, antecedents_KA, speakers_K, genre)
        scores_KA = scores_KA + mentions_K[:, None] + mentions_K[antecedents_KA]
        scores_KA = scores_KA.masked_fill(antecedents_KA < 0, -torch.inf)
        scores_KC = F.pad(scores_KA, (1, 0))
        return RankedSpans(
            first_K=first_K,
            last_K=last_K,
            mentions_K=mentions_K,
            antecedents_KA=antecedents_KA,
            scores_KC=scores_KC,
            candidates=(first_N, last_N, mentions_N),
        )

    def _mention_scores(
        self,
        states_WH: Tensor,
        heads_WX: Tensor,
        head_scores_W: Tensor,
        first_N: Tensor,
        last_N: Tensor,
        widths_NF: Tensor,
    ) -> Tensor:
        """`s_m` of each span: `(N,)`."""
        of_first, of_last, of_head, of_width = self.mention_scorer.blocks()
        firsts_WL = fast_linear(self.mention_scorer.first, states_WH, of_first)
        lasts_WL = fast_linear(self.mention_scorer.first, states_WH, of_last)
        heads_WL = fast_linear(self.mention_scorer.first, heads_WX, of_head)

        def scores(first_N: Tensor, last_N: Tensor, widths_NF: Tensor) -> Tensor:
            # The attention is linear in the words, so that it may come after the scorer's first layer.
            head_NL = attended_words(heads_WL, head_scores_W, first_N, last_N, self.max_width)
            product_NL = F.embedding(first_N, firsts_WL) + F.embedding(last_N, lasts_WL)
            product_NL = product_NL + head_NL + F.linear(widths_NF, of_width)
            return self.mention_scorer(product_NL)

        return in_pieces(scores, first_N, last_N, widths_NF)

    def _pair_scores(
        self, spans_KG: Tensor, antecedents_KA: Tensor, speakers_K: Tensor | None, genre: Tensor | None
    ) -> Tensor:
        """`s_a` of each span and antecedent, 0 where there is none: `(K, A)`."""
        of_span, of_antecedent, of_both, of_features = self.pair_scorer.blocks()
        spans_KL = fast_linear(self.pair_scorer.first, spans_KG, of_span)
        antecedents_KL = fast_linear(self.pair_scorer.first, spans_KG, of_antecedent)
        bounds = torch.tensor(DISTANCES, device=spans_KG.device)

        def scores(span_P: Tensor, antecedent_P: Tensor) -> Tensor:
            both_PG = F.embedding(span_P, spans_KG) * F.embedding(antecedent_P, spans_KG)
            bins_P = torch.bucketize(span_P - antecedent_P, bounds, right=True)
            features = [self.distances(bins_P)]
            if self.same_speaker is not None and speakers_K is not None:
                is_same_P = speakers_K[span_P] == speakers_K[antecedent_P]
                features.append(self.same_speaker(is_same_P.long()))
            if self.genres is not None and genre is not None:
                features.append(self.genres(genre.expand_as(span_P)))
            features_PF = self.dropout(torch.cat(features, -1))
            product_PL = fast_linear(self.pair_scorer.first, both_PG, of_both)
            product_PL = product_PL + F.linear(features_PF, of_features)
            product_PL = product_PL + F.embedding(span_P, spans_KL)
            product_PL = product_PL + F.embedding(antecedent_P, antecedents_KL)
            return self.pair_scorer(product_PL)

        is_real_KA = antecedents_KA >= 0
        span_P, _ = is_real_KA.nonzero(as_tuple=True)
        scores_P = in_pieces(scores, span_P, antecedents_KA[is_real_KA])
        return torch.zeros_like(is_real_KA, dtype=scores_P.dtype).masked_scatter(is_real_KA, scores_P)


def in_pieces(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`function(*rows)` for a function of single rows, `PIECE` rows at a time.

    In training, the backward pass computes each piece again, so that no piece keeps its intermediate results.
    """
    if torch.is_grad_enabled():
        function = partial(checkpoint, function, use_reentrant=False)
    pieces = zip(*(tensor.split(PIECE) for tensor in rows), strict=True)
    return torch.cat([function(*piece) for piece in pieces])


def candidate_spans(sentences_W: Tensor, max_width: int) -> tuple[Tensor, Tensor]:
    """The first and the last word of every span up to `max_width` words in a sentence, `(N,)` each, in document order.

    Args:
        sentences_W: `(words,)`, the number of each word's sentence, ascending.
    """
    words = len(sentences_W)
    words_W = torch.arange(words, device=sentences_W.device)
    widths_O = words_W[:max_width]
    first_WO = words_W[:, None].expand(-1, len(widths_O))
    last_WO = first_WO + widths_O
    clamped_WO = last_WO.clamp(max=words - 1)
    is_in_sentence_WO = sentences_W[clamped_WO] == sentences_W[:, None]
    is_span_WO = (clamped_WO == last_WO) & is_in_sentence_WO
    return first_WO[is_span_WO], last_WO[is_span_WO]


def attended_words(values_WX: Tensor, scores_W: Tensor, first_N: Tensor, last_N: Tensor, max_width: int) -> Tensor:
    """The sum of each span's words, weighted by a softmax of their scores: `(N, X)`."""
    last_N1 = last_N[:, None]
    offsets_O = torch.arange(max_width, device=first_N.device)
    words_NO = first_N[:, None] + offsets_O
    is_inside_NO = words_NO <= last_N1
    words_NO = torch.minimum(words_NO, last_N1)
    weights_NO = masked_softmax(scores_W[words_NO], is_inside_NO, 1).to(values_WX.dtype)
    return F.embedding_bag(words_NO, values_WX, mode="sum", per_sample_weights=weights_NO)


@torch.no_grad()
def best_spans(scores_N: Tensor, first_N: Tensor, last_N: Tensor, count: int) -> Tensor:
    """Numbers of the `count` best spans in document order. A span that crosses a better one is skipped.

    Two spans cross if they share words and each also has words of its own. There may be fewer than `count`.
    """
    firsts = first_N.tolist()
    lasts = last_N.tolist()
    words = max(lasts, default=0) + 1
    latest = [-1] * words  # last word of the longest chosen span that begins with each word
    earliest = [words] * words  # first word of the longest chosen span that ends with each word
    chosen: list[int] = []
    for span in scores_N.argsort(descending=True, stable=True).tolist():
        if len(chosen) >= count:
            break
        first = firsts[span]
        last = lasts[span]
        latest_inside = max(latest[first + 1 : last + 1], default=-1)
        earliest_inside = min(earliest[first:last], default=words)
        if latest_inside <= last and earliest_inside >= first:
            chosen.append(span)
            latest[first] = max(latest[first], last)
            earliest[last] = min(earliest[last], first)
    return torch.tensor(sorted(chosen), dtype=torch.long, device=scores_N.device)


def nearest_antecedents(spans: int, most: int, device: torch.device | None = None) -> Tensor:
    """Up to `most` spans before each span, nearest first, -1 where there is none: `(K, A)`."""
    spans_K = torch.arange(spans, device=device)
    distances_A = spans_K[1 : most + 1]
    return (spans_K[:, None] - distances_A).clamp(min=-1)


def gold_clusters(first_N: Tensor, last_N: Tensor, first_M: Tensor, last_M: Tensor, clusters_M: Tensor) -> Tensor:
    """The gold cluster of each span, -1 if it is not a mention: `(N,)`. All words are numbers in the document."""
    if not len(clusters_M):
        return torch.full_like(first_N, -1)
    words = int(last_M.max()) + 1
    gold_M, order_M = (first_M * words + last_M).sort()  # spans that end later than all mentions may have any number
    spans_N = torch.where(last_N < words, first_N * words + last_N, -1)
    places_N = torch.searchsorted(gold_M, spans_N).clamp(max=len(gold_M) - 1)
    clusters_N = clusters_M[order_M][places_N]
    return torch.where(gold_M[places_N] == spans_N, clusters_N, -1)


def marginal_loss(spans: RankedSpans, clusters_K: Tensor) -> Tensor:
    """`-log P(any gold antecedent)`, summed over the kept spans (equation 9 of Lee et al. 2017): `()`.

    A span without a gold antecedent among its candidates has the gold choice of no antecedent.
    """
    clusters_K1 = clusters_K[:, None]
    is_pair_KA = (spans.antecedents_KA >= 0) & (clusters_K1 >= 0)
    is_gold_KA = is_pair_KA & (clusters_K[spans.antecedents_KA] == clusters_K1)
    has_none_K1 = ~is_gold_KA.any(1, keepdim=True)
    is_gold_KC = torch.cat([has_none_K1, is_gold_KA], 1)
    gold_scores_KC = spans.scores_KC.masked_fill(~is_gold_KC, -torch.inf)
    return (spans.scores_KC.logsumexp(1) - gold_scores_KC.logsumexp(1)).sum()


def mention_loss(mentions_N: Tensor, clusters_N: Tensor) -> Tensor:
    """Binary cross-entropy of the mention scores, summed over all candidates: `()`. It also teaches singletons.

    Among the kept spans only, a gold mention that is not kept would have no gradient, and never be found.
    """
    is_mention_N = (clusters_N >= 0).to(mentions_N)
    return F.binary_cross_entropy_with_logits(mentions_N, is_mention_N, reduction="sum")


def best_antecedents(scores_KC: Tensor, antecedents_KA: Tensor) -> Tensor:
    """The antecedent of each span with the highest score, -1 if no antecedent scores higher: `(K,)`."""
    choices_KC = F.pad(antecedents_KA, (1, 0), value=-1)
    return choices_KC.gather(1, scores_KC.argmax(1, keepdim=True)).squeeze(1)


@torch.no_grad()
def predicted_clusters(spans: RankedSpans, with_singletons: bool) -> Tensor:
    """The cluster of each kept span, -1 if it has none: `(K,)`. Clusters are counted in document order.

    A span joins the cluster of its best antecedent. With singletons, a span with a positive mention score that joins no
    other and is joined by none has a cluster of its own.
    """
    best_K = best_antecedents(spans.scores_KC, spans.antecedents_KA)
    begins: list[int] = []  # the first span of each span's cluster
    for span, antecedent in enumerate(best_K.tolist()):
        begins.append(span if antecedent < 0 else begins[antecedent])
    begins_K = torch.tensor(begins, dtype=torch.long, device=spans.first_K.device)
    sizes_K = begins_K.bincount(minlength=len(begins))  # of the cluster that begins with each span
    is_cluster_K = sizes_K > 1
    if with_singletons:
        is_cluster_K = is_cluster_K | (sizes_K == 1) & (spans.mentions_K > 0)
    numbers_K = is_cluster_K.cumsum(0) - 1
    return torch.where(is_cluster_K[begins_K], numbers_K[begins_K], -1)
