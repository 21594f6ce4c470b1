"""The span ranker against the papers' formulas in loops over all spans and pairs, in double precision."""

import math
import random

import pytest
import torch
import torch.utils.checkpoint
from bilm_models import Largest
from head_models import losses_of_spans
from torch.testing import assert_close

from modeling_elmo import ELMoConfig
from modeling_elmo.heads.spans import (
    RankedSpans,
    SpanRanker,
    SplitScorer,
    nearest_antecedents,
    predicted_clusters,
)

STATES, HEADS = 6, 5
DOCUMENTS = {"three sentences": [6, 1, 9], "one sentence": [12], "words": [1] * 9, "two words": [1, 1]}
SPEAKERS = {"use_speakers": True, "num_genres": 3}
OPTIONS = {
    "nearest": {"max_antecedents": 3},
    "all": {"max_antecedents": 250},
    "features": {"max_antecedents": 4, **SPEAKERS},
}


def make_ranker(dropout=0.0, **options) -> SpanRanker:
    torch.manual_seed(0)
    config = ELMoConfig(**{"max_span_width": 4, "spans_per_word": 0.8, **options})
    ranker = SpanRanker(config, STATES, HEADS, dropout).double()
    for parameter in ranker.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return ranker


def make_document(lengths):
    generator = torch.Generator().manual_seed(1)
    sentences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    vectors = torch.randn(len(sentences), STATES + HEADS, generator=generator, dtype=torch.double)
    states, heads = (part.clone().requires_grad_() for part in vectors.split([STATES, HEADS], 1))
    speakers = torch.randint(2, (len(sentences),), generator=generator)
    return states, heads, sentences, speakers, torch.tensor(2)


# The formulas, span by span


def network(scorer: SplitScorer, vector):
    return scorer.output(scorer.second(scorer.first(vector).relu()).relu())[0]


def crosses(one, other):
    return one[0] < other[0] <= one[1] < other[1] or other[0] < one[0] <= other[1] < one[1]


def distance_bin(distance):
    bounds = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 7), (8, 15), (16, 31), (32, 63), (64, math.inf)]
    return next(number for number, (low, high) in enumerate(bounds) if low <= distance <= high)


def plain(ranker: SpanRanker, states, heads, sentences, speakers, genre):
    """The mention score of each span; the kept spans, and a dictionary from antecedents to scores for each of them."""
    vectors, scores = {}, {}
    for first in range(len(states)):
        for last in range(first, len(states)):
            if last - first < ranker.max_width and sentences[first] == sentences[last]:
                weights = torch.stack([ranker.head_scores.weight[0] @ states[t] for t in range(first, last + 1)]).exp()
                weights = weights / weights.sum()
                head = sum(weights[t - first] * heads[t] for t in range(first, last + 1))
                width = ranker.widths.weight[last - first]
                vectors[first, last] = torch.cat([states[first], states[last], head, width])
                scores[first, last] = network(ranker.mention_scorer, vectors[first, last])
    kept = []
    for span in sorted(scores, key=lambda span: -scores[span].item()):
        if len(kept) < math.floor(ranker.spans_per_word * len(states)) and not any(crosses(span, k) for k in kept):
            kept.append(span)
    kept.sort()
    pairs = []
    for number, span in enumerate(kept):
        pairs.append({})
        for j in range(number)[-ranker.max_antecedents :]:
            features = [ranker.distances.weight[distance_bin(number - j)]]
            if ranker.same_speaker is not None:
                same = int(speakers[span[0]] == speakers[kept[j][0]])
                features += [ranker.same_speaker.weight[same], ranker.genres.weight[genre]]
            one, other = vectors[span], vectors[kept[j]]
            pair = network(ranker.pair_scorer, torch.cat([one, other, one * other, *features]))
            pairs[-1][j] = scores[span] + scores[kept[j]] + pair
    return scores, kept, pairs


def plain_loss(mentions, kept, pairs, gold):
    """Both losses, from a dictionary of gold mentions."""
    marginal = mention = torch.zeros((), dtype=torch.double)
    one = torch.ones((), dtype=torch.double)
    for span, antecedents in zip(kept, pairs, strict=True):
        right = [value for j, value in antecedents.items() if span in gold and gold.get(kept[j]) == gold[span]]
        total = sum((value.exp() for value in antecedents.values()), one)
        marginal = marginal - ((sum(value.exp() for value in right) if right else one) / total).log()
    for span, score in mentions.items():
        chance = 1 / (1 + (-score).exp())
        mention = mention - (chance if span in gold else 1 - chance).log()
    return marginal, mention


def make_gold(kept, words):
    """Two clusters and singletons: kept spans, and spans that may not be kept."""
    generator = random.Random(0)
    spans = {*generator.sample(kept, k=len(kept) * 3 // 4), *((word, word) for word in range(0, words, 4))}
    return {span: min(number, 5) % 3 if number < 8 else number for number, span in enumerate(sorted(spans))}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_spans_scores_and_losses_are_those_of_the_papers(lengths, options):
    ranker, document = make_ranker(**options), make_document(lengths)
    found, (mentions, kept, pairs) = ranker(*document), plain(ranker, *document)
    assert list(zip(found.first_K.tolist(), found.last_K.tolist(), strict=True)) == kept
    first_N, last_N, mentions_N = found.candidates
    assert list(zip(first_N.tolist(), last_N.tolist(), strict=True)) == list(mentions)
    for ours, spans in ((mentions_N, mentions), (found.mentions_K, kept)):
        assert_close(ours, torch.stack([mentions[span] for span in spans]) if spans else ours)
    for number, expected in enumerate(pairs):
        real = found.antecedents_KA[number] >= 0
        antecedents = found.antecedents_KA[number][real].tolist()
        assert antecedents == sorted(expected, reverse=True)
        assert found.scores_KC[number, 0] == 0 and (found.scores_KC[number, 1:][~real] == -torch.inf).all()
        for antecedent, score in zip(antecedents, found.scores_KC[number, 1:][real], strict=True):
            assert_close(score, expected[antecedent])
    gold = make_gold(kept, sum(lengths))
    wanted = plain_loss(mentions, kept, pairs, gold)
    assert_close(losses_of_spans(found, gold), wanted)
    leaves = [*ranker.parameters(), *document[:2]]
    gradients = [
        torch.autograd.grad(sum(each), leaves, materialize_grads=True)
        for each in (losses_of_spans(found, gold), wanted)
    ]
    assert_close(*gradients)
    if max(lengths) > 5:
        assert all(gradient.any() for gradient in gradients[0][:-2])


# Parts


@pytest.mark.parametrize(
    "with_singletons, expected", [(False, [-1, 0, 1, 1, -1, 0, 1]), (True, [0, 1, 2, 2, -1, 1, 2])]
)
def test_clusters_are_chains_of_best_antecedents(with_singletons, expected):
    chosen = torch.tensor([-2, -2, -2, 2, -2, 1, 3])
    antecedents = nearest_antecedents(7, 6)
    scores = torch.zeros(7, 7)  # not better than no antecedent
    scores[:, 1:][antecedents == chosen[:, None]] = 1.0
    scores[:, 1:][antecedents < 0] = -torch.inf
    mentions = torch.tensor([0.1, -1, -1, 2, 0, 1, -1])
    spans = RankedSpans(torch.arange(7), torch.arange(7), mentions, antecedents, scores, candidates=None)
    assert predicted_clusters(spans, with_singletons).tolist() == expected


@pytest.mark.parametrize("lengths", [[], [1], [1, 0, 1]])
def test_documents_without_kept_spans(lengths):
    ranker = make_ranker(spans_per_word=0.4, **SPEAKERS)
    spans = ranker(*make_document(lengths))
    assert [tuple(each.shape) for each in spans[:5]] == [(0,), (0,), (0,), (0, 0), (0, 1)]
    assert predicted_clusters(spans, True).shape == (0,)
    marginal, mention = losses_of_spans(spans, {(0, 0): 0} if lengths else {})
    assert marginal == 0 and (mention > 0) == bool(lengths)


# Pieces


def test_pieces_change_nothing(monkeypatch):
    """With dropout, so that the backward pass must draw the same masks again."""
    ranker, document = make_ranker(0.3, **OPTIONS["features"]), make_document([6, 1, 9])
    leaves, found = [*ranker.parameters(), *document[:2]], []
    for checkpoint in (torch.utils.checkpoint.checkpoint, lambda function, *rows, use_reentrant: function(*rows)):
        monkeypatch.setattr("modeling_elmo.heads.spans.checkpoint", checkpoint)
        monkeypatch.setattr("modeling_elmo.heads.spans.PIECE", 7)
        torch.manual_seed(3)
        spans = ranker(*document)
        loss = sum(losses_of_spans(spans, make_gold([(0, 0), (1, 2), (8, 9), (10, 10)], 16)))
        found.append([loss, *torch.autograd.grad(loss, leaves, materialize_grads=True)])
    assert_close(*found, rtol=0, atol=0)
    ranker.eval()
    expected = ranker(*document)
    monkeypatch.setattr("modeling_elmo.heads.spans.PIECE", 2048)
    assert_close(ranker(*document), expected)


def test_no_tensor_has_a_vector_for_each_pair(monkeypatch):
    monkeypatch.setattr("modeling_elmo.heads.spans.PIECE", 64)
    ranker, document = make_ranker(max_span_width=10), make_document([20] * 10)
    with Largest() as largest:
        spans = ranker(*document)
        losses_of_spans(spans, {(0, 0): 0, (5, 5): 0})[0].backward()
    pairs, width = int((spans.antecedents_KA >= 0).sum()), 2 * STATES + HEADS + 20
    assert pairs > 10000 and largest.numel < pairs * width / 5


def test_initialization():
    ranker = make_ranker(**SPEAKERS)
    ranker.initialize_parameters()
    for module in ranker.modules():
        if hasattr(module, "weight"):
            bound = (6 / sum(module.weight.shape)) ** 0.5  # Glorot
            assert 0.8 * bound < module.weight.abs().max() <= bound
        assert getattr(module, "bias", None) is None or not module.bias.any()
