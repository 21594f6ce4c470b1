"""BCN, ESIM and the reader against the papers' formulas in loops over rows and words, in double precision."""

import math

import pytest
import torch

from modeling_elmo.elmo_head_networks import BiattentiveClassifier, ESIMClassifier, SpanReader, TrilinearAttention

CLASSIFIERS = [BiattentiveClassifier, ESIMClassifier]
WIDTH, ELMO, LABELS = 5, 4, 3

# 1 and 2: words of the first and the second text; 0: padding
LAYOUT = torch.tensor(
    [
        [1, 1, 1, 1, 2, 2, 2, 0, 0],
        [0, 0, 0, 1, 1, 2, 2, 2, 2],  # left padding
        [0, 1, 0, 1, 2, 0, 0, 2, 0],  # gaps
        [2, 1, 1, 0, 2, 0, 1, 2, 2],  # interleaved
        [1, 2, 0, 0, 0, 0, 0, 0, 0],
    ]
)
EMPTY = torch.tensor([[1, 1, 0], [0, 2, 2], [0, 0, 0], [1, 1, 2]])


def make_classifier(kind, elmo=ELMO, dropout=0.5):
    torch.manual_seed(0)
    classifier = kind(WIDTH, 6, LABELS, dropout, elmo).double().eval()
    for parameter in classifier.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return classifier


def make_inputs(layout=LAYOUT, elmo=ELMO):
    """Words of both texts, with large values at padding."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(*layout.shape, WIDTH + elmo, generator=generator, dtype=torch.float64)
    inputs[layout == 0] = 1e3
    return inputs[..., :WIDTH], layout == 1, layout == 2, inputs[..., WIDTH:] if elmo else None


def gradients(classifier, logits):
    classifier.zero_grad()
    logits.sin().sum().backward()
    return [parameter.grad.clone() for parameter in classifier.parameters()]


# The formulas


def bilstm(lstm, words):
    return list(lstm.layers[0](torch.stack(words))[0]) if words else []


def attended(query, words, zeros):
    """The words, weighted by a softmax of their products with the query."""
    powers = [(query @ word).exp() for word in words]
    return sum((power / sum(powers) * word for power, word in zip(powers, words, strict=True)), zeros)


def maximum(words, like):
    return torch.stack([max(values) for values in zip(*words, strict=True)]) if words else like


def mean(words, like):
    return sum(words) / len(words) if words else like


def with_elmo(words, elmo):
    return [torch.cat(pair) for pair in zip(words, elmo, strict=True)] if len(elmo) else words


def plain_biattentive(model, x, y, x_elmo, y_elmo):
    zeros = torch.zeros(model.integrator.output_size, dtype=torch.float64)
    x, y = ([model.feedforward(word).relu() for word in text] for text in (x, y))
    x = with_elmo(bilstm(model.encoder, x), x_elmo)
    y = with_elmo(bilstm(model.encoder, y), y_elmo)
    pooled = []
    for text, other in ((x, y), (y, x)):
        compared = []
        for word in text:
            context = attended(word, other, torch.zeros_like(word))
            compared.append(torch.cat([word, word - context, word * context]))
        words = bilstm(model.integrator, compared)
        attentive = attended(model.attention.weight[0], words, zeros)
        minimum = -maximum([-word for word in words], zeros)
        pooled += [maximum(words, zeros), mean(words, zeros), minimum, attentive]
    first, second = model.joint
    return model.output(second(first(torch.cat(pooled)).relu()).relu())


def plain_esim(model, a, b, a_elmo, b_elmo):
    zeros = torch.zeros(model.composition.output_size, dtype=torch.float64)
    a, b = with_elmo(bilstm(model.encoder, a), a_elmo), with_elmo(bilstm(model.encoder, b), b_elmo)
    pooled = []
    for text, other in ((a, b), (b, a)):
        local = []
        for word in text:
            aligned = attended(word, other, torch.zeros_like(word))
            local.append(model.projection(torch.cat([word, aligned, word - aligned, word * aligned])).relu())
        words = bilstm(model.composition, local)
        pooled += [mean(words, zeros), maximum(words, zeros)]
    return model.output(model.joint(torch.cat(pooled)).tanh())


PLAIN = {BiattentiveClassifier: plain_biattentive, ESIMClassifier: plain_esim}


def plain_logits(classifier, inputs, first, second, elmo):
    plain, rows = PLAIN[type(classifier)], []
    for row in range(len(inputs)):
        texts = [list(inputs[row, mask[row]]) for mask in (first, second)]
        elmos = [[] if elmo is None else list(elmo[row, mask[row]]) for mask in (first, second)]
        rows.append(plain(classifier, *texts, *elmos))
    return torch.stack(rows)


def as_list(tensors):
    return [None if tensor is None else tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize("layout, elmo", [(LAYOUT, ELMO), (LAYOUT[:, :7], 0), (EMPTY, ELMO), (EMPTY[2:3], ELMO)])
def test_logits_and_gradients_equal_the_formulas(kind, layout, elmo):
    classifier = make_classifier(kind, elmo)
    ours, theirs = (as_list(make_inputs(layout, elmo)) for _ in range(2))
    logits, expected = classifier(*ours), plain_logits(classifier, *theirs)
    assert logits.shape == (len(layout), LABELS)
    torch.testing.assert_close(logits, expected)
    if (layout != 0).any():
        for mine, yours in zip(gradients(classifier, logits), gradients(classifier, expected), strict=True):
            torch.testing.assert_close(mine, yours)
        torch.testing.assert_close(ours[0].grad, theirs[0].grad)
        if elmo:
            torch.testing.assert_close(ours[3].grad, theirs[3].grad)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_single_text_is_compared_with_itself_and_computed_once(kind):
    classifier, (inputs, first, second, elmo) = make_classifier(kind), make_inputs()
    mask, read = first | second, []
    classifier.encoder.register_forward_pre_hook(lambda _, arguments: read.append(len(arguments[0])))
    logits = classifier(inputs, mask, mask, elmo)
    torch.testing.assert_close(logits, classifier(inputs, mask, mask.clone(), elmo))
    torch.testing.assert_close(logits, plain_logits(classifier, inputs, mask, mask, elmo))
    assert read == [len(inputs), 2 * len(inputs)]


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_dropout_acts_in_training_alone(kind):
    classifier, inputs = make_classifier(kind), make_inputs()
    torch.testing.assert_close(classifier(*inputs), classifier(*inputs))
    classifier.train()
    assert not torch.allclose(classifier(*inputs), classifier(*inputs))
    masks = []
    classifier.sequence_dropout.register_forward_hook(lambda _, x, y: masks.append((x[0], y)))
    pooled = []
    classifier.dropout.register_forward_hook(lambda _, x, y: pooled.append((y == 0).any()))
    classifier(*inputs)
    ((before, after),) = masks
    is_kept = (after != 0).any(1, keepdim=True)  # the same mask at all time steps
    torch.testing.assert_close(after, 2 * before * is_kept)
    assert (before != 0).any(1)[~is_kept[:, 0]].any()
    assert len(pooled) == (3 if kind is BiattentiveClassifier else 2) and all(pooled)
    plain = make_classifier(kind, dropout=0.0).train()
    torch.testing.assert_close(plain(*inputs), plain(*inputs))


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_initialisation_fills_linear_layers_and_leaves_the_rest(kind):
    classifier = make_classifier(kind)
    before = {name: parameter.detach().clone() for name, parameter in classifier.named_parameters()}
    classifier.output.weight._is_hf_initialized = True  # loading marks parameters of a checkpoint in this way
    classifier.reset_parameters()
    for name, parameter in classifier.named_parameters():
        if ".layers." in name or name == "output.weight":
            torch.testing.assert_close(parameter.detach(), before[name])
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert 0.7 * bound < parameter.abs().max() <= bound and len(parameter.unique()) == parameter.numel()


# The reader

HIDDEN = 3
# 1: question; 2: context; 0: markers and padding, on both sides.
SPANS = torch.tensor(
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


def reader_inputs(garbage=1e3, elmo=ELMO):
    generator = torch.Generator().manual_seed(1)
    sizes = [WIDTH, elmo] if elmo else [WIDTH]
    found = [torch.randn(*SPANS.shape, size, generator=generator, dtype=torch.double) for size in sizes]
    found = [tensor.masked_fill((SPANS == 0)[..., None], garbage) for tensor in found]
    return found[0], SPANS == 1, SPANS == 2, found[1] if elmo else None


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


def plain_reader(reader: SpanReader, words, elmo, question, context):
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
    inputs, question, context, elmo_vectors = reader_inputs(elmo=elmo)
    found_starts, found_ends, found_none = reader(inputs, question, context, elmo_vectors)
    for row in range(len(SPANS)):
        places = [mask[row].nonzero().flatten().tolist() for mask in (question, context)]
        vectors = None if elmo_vectors is None else elmo_vectors[row]
        starts, ends, none = plain_reader(reader, inputs[row], vectors, *places)
        torch.testing.assert_close(found_starts[row, places[1]].tolist(), starts)
        torch.testing.assert_close(found_ends[row, places[1]].tolist(), ends)
        assert float(found_none[row]) == pytest.approx(none)


def test_the_content_of_other_places_does_not_matter():
    reader = make_reader()
    found = []
    for garbage in (0.0, 1e3):
        reader.zero_grad()
        starts, ends, none = reader(*reader_inputs(garbage))
        context = SPANS == 2
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
    first = reader(*reader_inputs(0.0))
    assert len(pairs) == 6  # encoded question and context, inputs of three biGRUs and of the self-attention
    for before, after in pairs:
        is_kept = (after != 0).any(1, keepdim=True)
        torch.testing.assert_close(after, 2 * before * is_kept)
    assert not torch.allclose(first[2], reader(*reader_inputs(0.0))[2])


def test_a_context_of_one_word_and_rows_without_any():
    """A single word attends to nothing. A window may have no context."""
    reader, (inputs, question, context, elmo) = make_reader(), reader_inputs()
    none_there = torch.zeros_like(context)
    for masks in ((question, none_there), (none_there, context), (none_there, none_there)):
        for found in reader(inputs, *masks, elmo):
            assert found.isfinite().all()
        sum(found.sum() for found in reader(inputs, *masks, elmo)).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in reader.parameters())


def test_initialisation_of_a_reader():
    reader = make_reader()
    reader.reset_parameters()
    for attention in (reader.attention, reader.self_attention):
        assert (attention.product == 0.25).all()
        bound = (6 / (len(attention.product) + 1)) ** 0.5  # Glorot
        assert 0.5 * bound < attention.own.weight.abs().max() <= bound
    assert not any(
        layer.bias.any() for layer in reader.modules() if isinstance(layer, torch.nn.Linear) and layer.bias is not None
    )
