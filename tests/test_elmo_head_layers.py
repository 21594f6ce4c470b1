"""A head's own layers: `x_k`, biRNNs and their kernels, variational dropout, the masked softmax.

Each is compared with its definition: loops over words, and torch.nn on each row alone.
"""

from unittest.mock import patch

import pytest
import torch
from accelerate import cpu_offload
from head_models import on_rows
from plain_elmo import PlainELMo
from torch import nn

from modeling_elmo import ELMoConfig, elmo_backend
from modeling_elmo.heads.packed_texts import PackedTexts, masked_softmax
from modeling_elmo.heads.recurrence import TaskGRU, TaskLSTM, VariationalDropout, read_both_ways
from modeling_elmo.heads.task_model import TokenFeatures
from modeling_elmo.kernels.products import product
from modeling_elmo.kernels.rnn import BothWaysGRU, BothWaysLSTM

MASK = torch.tensor(
    [
        [1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],  # left padding
        [0, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 1],  # gaps
        [0, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
    ]
).bool()
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def make_inputs(width=5, mask=MASK):
    x = torch.randn(*mask.shape, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.masked_fill(~mask[..., None], torch.nan)  # must never be read


def make_lstm(num_layers=1, cls=TaskLSTM, **options):
    torch.manual_seed(0)
    return cls(5, 3, num_layers, **options).double()


def torch_rnn(rnn):
    """The biRNN of torch.nn with the same layers and weights."""
    other = rnn.cell(5, 3, len(rnn.layers), bidirectional=True).double()
    for depth, layer in enumerate(rnn.layers):
        for name, parameter in layer.named_parameters():
            getattr(other, name.replace("_l0", f"_l{depth}")).data = parameter.detach().clone()
    return other


# biRNNs


@pytest.mark.parametrize("cls, num_layers", [(TaskLSTM, 3), (TaskGRU, 1), (TaskGRU, 3)])
@pytest.mark.parametrize("backend", ["training", "reference"])
def test_equals_torch_on_each_row_alone(cls, num_layers, backend):
    rnn = make_lstm(num_layers, cls)
    other = torch_rnn(rnn)
    ours, theirs = (make_inputs().requires_grad_() for _ in range(2))
    with elmo_backend(backend):
        outputs = on_rows(rnn, ours, MASK)
    assert outputs.shape == (6, 6, rnn.output_size) == (6, 6, 6)
    assert not outputs[~MASK].any()
    expected = [other(row[real])[0] for row, real in zip(theirs, MASK, strict=True) if real.any()]
    torch.testing.assert_close(outputs[MASK], torch.cat(expected), **EXACT)
    with elmo_backend("inference"), torch.no_grad():
        torch.testing.assert_close(on_rows(rnn, ours, MASK), outputs, **EXACT)
    outputs.sin().sum().backward()
    sum(rows.sin().sum() for rows in expected).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    for depth, layer in enumerate(rnn.layers):
        for name, parameter in layer.named_parameters():
            expected_grad = getattr(other, name.replace("_l0", f"_l{depth}")).grad
            torch.testing.assert_close(parameter.grad, expected_grad, **EXACT)


@pytest.mark.parametrize("backend", ["training", "reference"])
def test_vectors_enter_between_the_first_two_layers(backend):
    rnn = make_lstm(3, between_size=4)
    assert [layer.input_size for layer in rnn.layers] == [5, 10, 6] and make_lstm(1).layers[0].input_size == 5
    inputs, between = make_inputs(), make_inputs(width=4)
    with elmo_backend(backend):
        outputs = on_rows(rnn, inputs, MASK, between)
    for row, real in enumerate(MASK):
        if real.any():
            states, _ = rnn.layers[0](inputs[row, real])
            for layer, more in zip(rnn.layers[1:], ([between[row, real]], []), strict=True):
                states, _ = layer(torch.cat([states, *more], -1))
            torch.testing.assert_close(outputs[row, real], states, **EXACT)


def test_dropout_stands_between_layers_alone():
    one, two = make_lstm(1, dropout=0.9), make_lstm(2, dropout=0.9)
    inputs = make_inputs()
    torch.testing.assert_close(on_rows(one, inputs, MASK), on_rows(one.eval(), inputs, MASK))
    seen = []
    two.layers[1].register_forward_pre_hook(lambda _, packed: seen.append(packed[0].data))
    dropped = on_rows(two, inputs, MASK)
    assert (seen[0] == 0).any(1).all() and not (dropped == 0)[MASK].any()
    assert not torch.allclose(dropped, on_rows(two.eval(), inputs, MASK))


def test_initialization():
    lstm = TaskLSTM(50, 30, 2)
    loaded = lstm.layers[1].weight_hh_l0
    nn.init.constant_(loaded, 7.0)
    loaded._is_hf_initialized = True  # loading marks parameters of a checkpoint in this way
    lstm.initialize_parameters()
    assert (loaded == 7).all()
    for name, parameter in lstm.named_parameters():
        if "weight_ih" in name:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert 0.97 * bound < parameter.abs().max() <= bound and parameter.mean().abs() < 0.1 * bound
        elif "weight_hh" in name:
            for gate in parameter.chunk(4) if parameter is not loaded else ():
                torch.testing.assert_close(gate @ gate.t(), torch.eye(30), atol=1e-5, rtol=0)
        else:
            forget = 1.0 if "bias_ih" in name else 0.0
            assert [gate.unique().tolist() for gate in parameter.chunk(4)] == [[0.0], [forget], [0.0], [0.0]]


# VariationalDropout


def test_variational_dropout_has_one_mask_for_all_times():
    torch.manual_seed(0)
    x, text = torch.rand(40 * 7, 50) + 1, torch.arange(40).repeat_interleave(7)
    assert VariationalDropout(0.5).eval()(x, text) is x and VariationalDropout(0)(x, text) is x
    scale = (VariationalDropout(0.3)(x, text) / x).view(40, 7, 50)
    torch.testing.assert_close(scale, scale[:, :1].expand_as(scale))
    assert (scale[:, 0] == 0).logical_or((scale[:, 0] - 1 / 0.7).abs() < 1e-5).all()
    assert len(scale[:, 0].unique(dim=0)) == 40 and len(scale[:, 0].unique(dim=1).t()) == 50  # rows, features
    assert abs((scale[:, 0] == 0).float().mean() - 0.3) < 0.05


# masked_softmax


@pytest.mark.parametrize("dim", [0, 1])
def test_masked_softmax_is_one_of_what_is_allowed(dim):
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    scores = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = masked_softmax(scores, mask, dim)
    for line, given, allowed in zip(*(each.movedim(dim, -1) for each in (found, scores, mask)), strict=True):
        torch.testing.assert_close(line[allowed], given[allowed].softmax(0))
        assert not line[~allowed].any()
    assert torch.autograd.gradcheck(lambda scores: masked_softmax(scores, mask, dim), scores)
    with torch.autograd.set_detect_anomaly(True):  # raises at NaN inside the backward pass
        found.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_softmax_broadcasts_and_ignores_what_is_masked(dtype):
    scores = torch.tensor([[[-3e4, -3e4, torch.nan], [2.0, 1.0, 6e4]]], dtype=dtype).requires_grad_()
    found = masked_softmax(scores, torch.tensor([[True, True, False]])[:, None], -1)
    expected = torch.tensor([[[0.5, 0.5, 0.0], [0.7311, 0.2689, 0.0]]], dtype=dtype)
    torch.testing.assert_close(found, expected, atol=2e-3 if dtype == torch.bfloat16 else 1e-3, rtol=0)
    found.square().sum().backward()
    assert scores.grad.isfinite().all() and not scores.grad[..., 2].any()


# `x_k`: a table of words, and a convolution over the characters of each word

SIZES = {"vocab_size": 11, "char_vocab_size": 30, "max_word_length": 7, "task_word_embedding_size": 6}
SIZES |= {"task_char_embedding_size": 3, "task_char_cnn_filters": [[1, 4], [3, 5]]}


def make_config(**overrides) -> ELMoConfig:
    return ELMoConfig.from_preset("tiny", **{**SIZES, **overrides})


def make_features(**overrides) -> TokenFeatures:
    torch.manual_seed(0)
    features = TokenFeatures(make_config(**overrides))
    with torch.no_grad():
        for parameter in features.parameters():
            parameter.normal_()
    return features


def make_words():
    """Repeated words, with ids at masked positions too."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 11, (3, 5), generator=generator)
    spelling = torch.randint(1, 30, (11, 7), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 0, 1, 0, 1]]).bool()
    return spelling[words], words, mask


@pytest.mark.parametrize("missing", [None, "words", "characters", "filters"])
def test_features_are_a_table_and_a_convolution(missing):
    options = {"words": {"task_word_embedding_size": 0}, "filters": {"task_char_cnn_filters": []}}
    options["characters"] = {"char_vocab_size": 0, "word_embedding_size": 2}
    features = make_features(**options.get(missing, {}))
    characters, words, mask = make_words()
    found = features(
        None if missing in ("characters", "filters") else characters, None if missing == "words" else words, mask
    )
    assert found.shape == (mask.sum(), features.output_size)
    assert features.output_size == 6 * (missing != "words") + 9 * (missing in (None, "words"))
    filters = make_config(char_cnn_filters=SIZES["task_char_cnn_filters"], num_highway_layers=0)
    plain = PlainELMo(features.state_dict(), filters)
    for vector, (row, place) in zip(found, mask.nonzero().tolist(), strict=True):
        expected = [] if missing == "words" else [features.word_embeddings.weight[words[row, place]]]
        if features.char_encoder is not None:
            expected.append(torch.from_numpy(plain.token(characters[row, place].numpy())).float())
        torch.testing.assert_close(vector, torch.cat(expected))


def test_each_distinct_word_is_encoded_once_but_a_hook_sees_every_position():
    features, (characters, words, mask) = make_features(), make_words()
    with patch.object(features.char_encoder, "forward", wraps=features.char_encoder.forward) as encode:
        expected, seen = features(characters, words, mask), []
    assert len(encode.call_args.args[0]) == len(words[mask].unique()) < mask.sum()
    features.char_encoder.char_embeddings.register_forward_hook(lambda *call: seen.append(call[2]))
    torch.testing.assert_close(features(characters, words, mask), expected)
    assert seen[0].shape[:3] == characters.shape


@pytest.mark.parametrize("given, expected", [(None, 6**-0.5), (0.2, 0.2)])
def test_the_table_is_drawn_with_vectors_of_length_one_or_as_given(given, expected):
    features = TokenFeatures(make_config(vocab_size=2000), given)
    features.initialize_parameters()
    weight = features.word_embeddings.weight.detach()
    assert weight.std() == pytest.approx(expected, rel=0.02) and abs(weight.mean()) < 0.02


# The kernels of our biRNNs

LENGTHS = [7, 1, 4, 7, 2]
REAL = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
both_kinds = pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])


def make_layer(kind, inputs=5, size=3):
    torch.manual_seed(0)
    layer = kind(inputs, size, bidirectional=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    return layer


def make_rows(inputs=5):
    """Rows with random values after their ends."""
    x = torch.randn(len(LENGTHS), max(LENGTHS), inputs, generator=torch.Generator().manual_seed(1))
    return x.masked_fill(~REAL[..., None], 50.0)


def read(layer, x, real=REAL):
    return on_rows(lambda x_ND, texts: read_both_ways(layer, x_ND, texts), x, real)


@both_kinds
@pytest.mark.parametrize("few, rows", [(0, 5), (10**9, 1), (10**9, 5)])  # products of oneDNN, or a batch of both
def test_gradients_are_those_of_torchs_own(kind, few, rows, monkeypatch):
    monkeypatch.setattr("modeling_elmo.kernels.products.FEW_PRODUCTS", few)
    monkeypatch.setattr("modeling_elmo.kernels.products._is_intel", False)
    layer, x = make_layer(kind, 40, 30), make_rows(40)[:rows].requires_grad_()
    gradients = []
    for backend in ("reference", "training"):
        with elmo_backend(backend), patch("modeling_elmo.kernels.rnn.product", wraps=product) as products:
            outputs = read(layer, x, REAL[:rows])
            gradients.append(torch.autograd.grad(outputs.sin().sum(), [x, *layer.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    has_products = few == 0 and torch.backends.mkldnn.is_available()
    two_directions_two_ways = 4 * 7  # steps
    assert products.call_count == (two_directions_two_ways if has_products else 0)


@both_kinds
def test_torchs_own_is_taken_where_ours_cannot_be(kind, monkeypatch):
    layer, x = make_layer(kind), make_rows()
    expected = read(layer, x)
    calls = []
    monkeypatch.setattr(BothWaysGRU, "apply", lambda *_: calls.append("ours"))
    monkeypatch.setattr(BothWaysLSTM, "apply", lambda *_: calls.append("ours"))
    hook = layer.register_forward_hook(lambda *_: calls.append("hook"))
    torch.testing.assert_close(read(layer, x), expected)
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(read(layer, x).float(), expected, rtol=0.1, atol=0.1)
    cpu_offload(layer, execution_device=torch.device("cpu"))
    torch.testing.assert_close(read(layer, x), expected)
    assert calls == ["hook"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*quantized tensor creation")
@both_kinds
def test_modules_that_quantizers_changed_are_called(kind):
    quantization = pytest.importorskip("torch.ao.quantization")
    model, x = nn.Sequential(make_layer(kind)), make_rows()
    quantized = quantization.quantize_dynamic(model, {nn.GRU, nn.LSTM})
    found, expected = (read(each[0], x) for each in (quantized, model))
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05)


# Texts without padding


def test_pairs_are_grouped_by_length():
    """A long text does not pad the short ones, whatever the order; all pairs come once, beside the right partner."""
    lengths = torch.tensor([3, 0, 500, 4, 3, 0, 5, 2])
    mask = torch.arange(500) < lengths[:, None]
    texts, x = PackedTexts(mask, mask), torch.arange(1.0, 1 + int(lengths.sum()))[:, None]
    padded, found = 0, []
    for own, other in texts.pairs(texts, 4):
        padded += own.mask_RL.numel() * other.mask_RL.shape[1]
        sums = other.read(texts.pack(x)).sum((1, 2))
        found.append((own, own.read(texts.pack(x)) * 0 + sums[:, None, None]))
    real = (lengths * lengths.roll(4).clamp(min=1)).sum()
    assert padded < 2 * real + 2**14
    starts = [0, *lengths.cumsum(0).tolist()]
    totals = [x[begin:end].sum() for begin, end in zip(starts, starts[1:], strict=False)]
    expected = torch.stack(totals).roll(-4).repeat_interleave(lengths)
    torch.testing.assert_close(texts.unpack(texts.join(found), len(x))[:, 0], expected)
