"""The reader against the papers' formulas in loops over rows and words, in double precision."""

import math

import pytest
import torch

from modeling_elmo.elmo_head_networks import SpanReader, TrilinearAttention

WIDTH, ELMO, HIDDEN = 5, 4, 3
# 1: question; 2: context; 0: markers and padding, on both sides.
LAYOUT = torch.tensor(
    [
        [0, 1, 1, 1, 0, 0, 2, 2, 2, 2, 0],
        [0, 0, 1, 0, 2, 2, 2, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 0, 2, 0],
    ]
)


def make_reader(elmo=ELMO, dropout=0.0) -> SpanReader:
    torch.manual_seed(0)
    reader = SpanReader(WIDTH, HIDDEN, dropout, elmo).double()
    for parameter in reader.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return reader.eval()


def make_inputs(garbage=1e3, elmo=ELMO):
    generator = torch.Generator().manual_seed(1)
    sizes = [WIDTH, elmo] if elmo else [WIDTH]
    found = [torch.randn(*LAYOUT.shape, size, generator=generator, dtype=torch.double) for size in sizes]
    found = [tensor.masked_fill((LAYOUT == 0)[..., None], garbage) for tensor in found]
    return found[0], LAYOUT == 1, LAYOUT == 2, found[1] if elmo else None


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    exponentials = [math.exp(value - top) for value in values]
    return [each / sum(exponentials) for each in exponentials]


def weighted(weights, vectors):
    return sum(weight * vector for weight, vector in zip(weights, vectors, strict=True))


def rnn(layer, words: list[torch.Tensor]) -> list[torch.Tensor]:
    """A torch biGRU over the words only."""
    return list(layer.layers[0](torch.stack(words)[:, None])[0][:, 0])


def score(attention: TrilinearAttention, x, y) -> float:
    vector = torch.cat([attention.own.weight[0], attention.other.weight[0], attention.product])
    return float(vector @ torch.cat([x, y, x * y]))


def plain(reader: SpanReader, words, elmo, question, context):
    """Scores of starts, ends and no answer for one row, from lists of word vectors and ELMo vectors."""

    def encoded(chosen):
        states = rnn(reader.encoder, [words[place] for place in chosen])
        return states if elmo is None else [torch.cat([s, elmo[p]]) for s, p in zip(states, chosen, strict=True)]

    h, q = encoded(context), encoded(question)
    scores = [[score(reader.attention, x, y) for y in q] for x in h]
    c = [weighted(softmax(row), q) for row in scores]
    summary = weighted(softmax([max(row) for row in scores]), h)
    x = [
        reader.attended(torch.cat([own, other, own * other, summary * other])).relu()
        for own, other in zip(h, c, strict=True)
    ]
    s = rnn(reader.self_encoder, x)
    z = []
    for i, own in enumerate(s):
        others = [j for j in range(len(s)) if j != i]
        weights = softmax([score(reader.self_attention, own, s[j]) for j in others]) if others else []
        found = weighted(weights, [s[j] for j in others]) if others else torch.zeros_like(own)
        z.append(x[i] + reader.self_attended(torch.cat([own, found, own * found])).relu())
    first = rnn(reader.start_encoder, z)
    last = rnn(reader.end_encoder, [torch.cat(pair) for pair in zip(first, z, strict=True)])
    starts, ends = [float(reader.start(v)) for v in first], [float(reader.end(v)) for v in last]
    pooled = [
        weighted(softmax(starts), first),
        weighted(softmax(ends), last),
        weighted(softmax([float(reader.pooling(v)) for v in z]), z),
    ]
    return starts, ends, float(reader.none(reader.none_hidden(torch.cat(pooled)).relu()))


@pytest.mark.parametrize("elmo", [ELMO, 0])
@torch.no_grad()
def test_scores_are_those_of_the_papers(elmo):
    reader = make_reader(elmo)
    inputs, question, context, elmo_vectors = make_inputs(elmo=elmo)
    found_starts, found_ends, found_none = reader(inputs, question, context, elmo_vectors)
    for row in range(len(LAYOUT)):
        places = [mask[row].nonzero().flatten().tolist() for mask in (question, context)]
        vectors = None if elmo_vectors is None else elmo_vectors[row]
        starts, ends, none = plain(reader, inputs[row], vectors, *places)
        torch.testing.assert_close(found_starts[row, places[1]].tolist(), starts)
        torch.testing.assert_close(found_ends[row, places[1]].tolist(), ends)
        assert float(found_none[row]) == pytest.approx(none)


def test_the_content_of_other_places_does_not_matter():
    reader = make_reader()
    found = []
    for garbage in (0.0, 1e3):
        reader.zero_grad()
        starts, ends, none = reader(*make_inputs(garbage))
        context = LAYOUT == 2
        (starts[context].sum() + ends[context].square().sum() + none.sum()).backward()
        gradients = [parameter.grad.clone() for parameter in reader.parameters()]
        found.append([starts[context], ends[context], none, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for (name, _), gradient in zip(reader.named_parameters(), found[0][3:], strict=True):
        assert gradient.isfinite().all() and gradient.any(), name


def test_dropout_shares_its_mask_over_time():
    reader = make_reader(dropout=0.5).train()
    pairs = []
    reader.dropout.register_forward_hook(lambda _, given, result: pairs.append((given[0], result)))
    first = reader(*make_inputs(0.0))
    assert len(pairs) == 6  # encoded question and context, inputs of three biGRUs and of the self-attention
    for before, after in pairs:
        is_kept = (after != 0).any(1, keepdim=True)
        torch.testing.assert_close(after, 2 * before * is_kept)
    assert not torch.allclose(first[2], reader(*make_inputs(0.0))[2])


def test_a_context_of_one_word_and_rows_without_any():
    """A single word attends to nothing. A window may have no context."""
    reader, (inputs, question, context, elmo) = make_reader(), make_inputs()
    none_there = torch.zeros_like(context)
    for masks in ((question, none_there), (none_there, context), (none_there, none_there)):
        for found in reader(inputs, *masks, elmo):
            assert found.isfinite().all()
        sum(found.sum() for found in reader(inputs, *masks, elmo)).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in reader.parameters())


def test_initialisation():
    reader = make_reader()
    reader.reset_parameters()
    for attention in (reader.attention, reader.self_attention):
        assert (attention.product == 0.25).all()
        bound = (6 / (len(attention.product) + 1)) ** 0.5  # Glorot
        assert 0.5 * bound < attention.own.weight.abs().max() <= bound
    assert not any(
        layer.bias.any() for layer in reader.modules() if isinstance(layer, torch.nn.Linear) and layer.bias is not None
    )
