"""BCN, ESIM and the reader against the papers' formulas in loops over rows and words, in double precision."""

import pytest
import torch

from modeling_elmo.heads.classifier import BiattentiveClassifier, ESIMClassifier
from modeling_elmo.heads.packed_texts import PackedTexts
from modeling_elmo.heads.reader import SpanReader, TrilinearAttention
from modeling_elmo.heads.recurrence import VariationalDropout

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
# 1: question; 2: context; 0: markers and padding, on both sides
SPANS = torch.tensor(
    [[0, 1, 1, 1, 0, 0, 2, 2, 2, 2, 0], [0, 0, 1, 0, 2, 2, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0, 0, 2, 0]]
)


def make_network(kind, elmo=ELMO, dropout=0.5):
    torch.manual_seed(0)
    sizes = (WIDTH, 3) if kind is SpanReader else (WIDTH, 6, LABELS)
    network = kind(*sizes, dropout, elmo).double().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network


def make_inputs(layout=LAYOUT, elmo=ELMO):
    """Words of both texts, with large values at padding."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(*layout.shape, WIDTH + elmo, generator=generator, dtype=torch.float64)
    inputs[layout == 0] = 1e3
    return inputs[..., :WIDTH], layout == 1, layout == 2, inputs[..., WIDTH:] if elmo else None


def run(network, inputs, first, second, elmo):
    """A network on padded rows: logits, or a reader's scores of starts and ends at all positions, and of no answer."""
    mask = torch.ones_like(first)  # a network reads the tokens of its texts alone
    words, vectors = inputs[mask], None if elmo is None else elmo[mask]
    if not isinstance(network, SpanReader):
        texts = PackedTexts(first if second is first else torch.cat([first, second]), mask)
        return network(words, texts, len(inputs), vectors)
    contexts = PackedTexts(second, mask)
    *scores, none = network(words, PackedTexts(first, mask), contexts, vectors)
    return *(contexts.unpack(each, len(words)).view(mask.shape) for each in scores), none


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
    classifier = make_network(kind, elmo)
    ours, theirs = (as_list(make_inputs(layout, elmo)) for _ in range(2))
    logits, expected = run(classifier, *ours), plain_logits(classifier, *theirs)
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
    classifier, (inputs, first, second, elmo) = make_network(kind), make_inputs()
    mask, read = first | second, []
    classifier.encoder.register_forward_pre_hook(lambda _, arguments: read.append(len(arguments[0])))
    logits = run(classifier, inputs, mask, mask, elmo)
    torch.testing.assert_close(logits, run(classifier, inputs, mask, mask.clone(), elmo))
    torch.testing.assert_close(logits, plain_logits(classifier, inputs, mask, mask, elmo))
    assert read == [mask.sum(), 2 * mask.sum()]


# Of pooled vectors; of sequences: a reader's are question and context, the inputs of three biGRUs, self-attention.
DROPOUTS = {BiattentiveClassifier: (3, 1), ESIMClassifier: (2, 1), SpanReader: (0, 6)}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_acts_in_training_alone_and_alike_at_all_words(kind):
    network, inputs, pooled, masks = make_network(kind), make_inputs(SPANS), [], []
    torch.testing.assert_close(run(network, *inputs), run(network, *inputs))
    for module in network.modules():
        if isinstance(module, VariationalDropout):
            module.register_forward_hook(lambda _, x, y: masks.append((*x, y)))
        elif isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, x, y: pooled.append((y == 0).any()))
    run(network.train(), *inputs)
    assert (len(pooled), len(masks)) == DROPOUTS[kind] and all(pooled)
    for before, text, after in masks:
        is_kept = torch.stack([(after[text == number] != 0).any(0) for number in range(int(text.max()) + 1)])
        torch.testing.assert_close(after, 2 * before * is_kept[text])
        assert (before != 0)[~is_kept[text]].any()


@pytest.mark.parametrize("kind", DROPOUTS)
def test_initialization_fills_linear_layers_and_leaves_the_rest(kind):
    network = make_network(kind)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    loaded, weight = next((name, each) for name, each in network.named_parameters() if ".layers." not in name)
    weight._is_hf_initialized = True  # loading marks parameters of a checkpoint in this way
    network.initialize_parameters()
    for name, parameter in network.named_parameters():
        if ".layers." in name or name == loaded:
            torch.testing.assert_close(parameter.detach(), before[name])
        elif name.endswith("bias"):
            assert not parameter.any()
        elif name.endswith("product"):
            assert (parameter == 0.25).all()
        else:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert 0.5 * bound < parameter.abs().max() <= bound


# The reader


def softmax(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.double).softmax(0).tolist()


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
    reader = make_network(SpanReader, elmo)
    inputs, question, context, elmo_vectors = make_inputs(SPANS, elmo)
    found_starts, found_ends, found_none = run(reader, inputs, question, context, elmo_vectors)
    for row in range(len(SPANS)):
        places = [mask[row].nonzero().flatten().tolist() for mask in (question, context)]
        vectors = None if elmo_vectors is None else elmo_vectors[row]
        starts, ends, none = plain_reader(reader, inputs[row], vectors, *places)
        torch.testing.assert_close(found_starts[row, places[1]].tolist(), starts)
        torch.testing.assert_close(found_ends[row, places[1]].tolist(), ends)
        assert float(found_none[row]) == pytest.approx(none)


def test_a_context_of_one_word_and_rows_without_any():
    """A single word attends to nothing. A window may have no context."""
    reader, (inputs, question, context, elmo) = make_network(SpanReader), make_inputs(SPANS)
    none_there = torch.zeros_like(context)
    for masks in ((question, none_there), (none_there, context), (none_there, none_there)):
        for found in run(reader, inputs, *masks, elmo):
            assert found.isfinite().all()
        sum(found.sum() for found in run(reader, inputs, *masks, elmo)).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in reader.parameters())
