"""Products in 8 bits against sums of integers; quantized models against float32, saved, loaded and refused."""

import copy
import pickle

import pytest
import torch
from bilm_models import dual, jvp, needs_int8, needs_numbers, tiny_model
from clean_python import new_environment, run
from errors import refused
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from transformers import AutoModel

from modeling_elmo import ELMoForTokenClassification, ELMoInt8Config, ELMoModel, ELMoTokenizer, elmo_backend
from modeling_elmo.kernels import int8
from modeling_elmo.kernels.int8 import Int8Linear
from modeling_elmo.kernels.plan import make_plan
from modeling_elmo.kernels.products import fast_linear, prepared, product

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")

TEXTS = ["He is in (London), Paris.", "Les naïfs ægithales", "밥 먹었어?"]


def plain_product(inputs, weight, bias=0):
    """With sums of integers."""
    row_scales, token_scales = (x.abs().amax(1, keepdim=True) / 127 for x in (weight, inputs))
    integers = (weight / row_scales).round().long()
    tokens = (inputs / token_scales.clamp(min=1e-30) + 0.5).floor().long()
    return (tokens @ integers.t()).double() * token_scales.double() * row_scales.t().double() + bias


def make_wide_model(cls=ELMoModel, **options):
    return tiny_model(cls, **{"lstm_hidden_size": 96, "projection_size": 32, "vocab_size": 60, **options})


@pytest.fixture
def quantized():
    return make_wide_model().quantize()


def make_inputs():
    return ELMoTokenizer()(TEXTS, padding=True, return_tensors="pt")


def top(model, **more):
    with torch.no_grad():
        return model(**make_inputs(), **more).last_hidden_state


def error_of(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@needs_int8
@pytest.mark.parametrize("rows, inner, outer", [(0, 17, 24), (1, 512, 1), (5, 17, 24), (130, 64, 33)])
def test_products_equal_the_definition(rows, inner, outer):
    torch.manual_seed(0)
    linear = nn.Linear(inner, outer)
    inputs = torch.randn(inner, rows).t() * torch.logspace(-3, 3, rows)[:, None]
    if rows > 1:
        inputs[1] = 0
    weight = linear.weight.detach()
    expected, other = plain_product(inputs, weight, linear.bias.detach()), torch.randn(rows, outer)
    layer = Int8Linear.from_linear(linear)
    packed = prepared(layer)
    close = {"rtol": 1e-5, "atol": 1e-4 if rows else 0}
    with torch.no_grad():
        for found in (layer(inputs), fast_linear(layer, inputs), product(inputs, packed, layer.bias)):
            assert_close(found.double(), expected, **close)
        raw = plain_product(inputs, weight)
        assert_close(product(inputs, packed).double(), raw, **close)
        assert_close(product(inputs, packed, plus_NG=other).double(), raw + other, **close)
        both = product(inputs, packed, layer.bias, plus_NG=other)
        assert_close(both.double(), expected + other, **close)
        clipped = product(inputs, packed, layer.bias, clip=0.5)
        assert_close(clipped.double(), expected.clamp(-0.5, 0.5), **close)
        with elmo_backend("int8"):
            assert_close(fast_linear(linear, inputs).double(), expected, **close)


def test_the_definition_is_within_its_rounding_of_a_linear_layer():
    torch.manual_seed(0)
    linear, inputs = nn.Linear(300, 200), torch.randn(2, 7, 300)
    layer = Int8Linear.from_linear(linear)
    assert error_of(layer(inputs), linear(inputs)) < 0.015
    assert layer.weight.dtype == torch.int8 and int(layer.weight.abs().max()) == 127
    assert_close(layer.to_linear().weight, linear.weight, rtol=0, atol=float(layer.scales.max()) / 2 + 1e-7)
    assert layer(inputs.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu"):
        assert torch.equal(layer(inputs), Int8Linear.from_linear(linear)(inputs))


@needs_int8
@pytest.mark.parametrize("projected", [True, False])
def test_a_quantized_model_is_near_float32_and_equals_the_backend(projected):
    sizes = {} if projected else {"lstm_hidden_size": 32}
    model = make_wide_model(**sizes)
    quantized = copy.deepcopy(model).quantize()
    expected, found = top(model), top(quantized)
    assert 1e-4 < error_of(found, expected) < 0.02
    with elmo_backend("int8"):
        assert torch.equal(top(model), found)
    with elmo_backend("reference"):  # a value between two integers may be rounded to the other one
        assert error_of(top(quantized), found) < 5e-3
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    layer, inputs = quantized.forward_lstm.layers[0], torch.ones(1, 32)
    assert make_plan(layer.children(), inputs) == ("int8", "fastest on cpu")


@needs_int8
def test_a_row_does_not_depend_on_its_batch(quantized):
    alone = top(quantized)
    rows, width = len(TEXTS), quantized.config.projection_size
    hidden, cell = torch.zeros(rows, 2, 2, width), torch.zeros(rows, 2, 2, quantized.config.lstm_hidden_size)
    hidden[1], hidden[2] = 1e6, torch.nan
    found = top(quantized, initial_states=(hidden, cell))
    assert found[2].isnan().any() and not found[:2].isnan().any()
    assert torch.equal(found[0], alone[0])


@needs_int8
@pytest.mark.parametrize("freeze_bilm", [True, False])
def test_saved_and_loaded(tmp_path, freeze_bilm):
    model = make_wide_model(ELMoForTokenClassification, freeze_bilm=freeze_bilm)
    model.save_pretrained(tmp_path / "float32")
    quantized = copy.deepcopy(model).quantize()
    quantized.save_pretrained(tmp_path / "int8")
    found = {name for name, module in quantized.named_modules() if isinstance(module, Int8Linear)}
    assert found and all(name.startswith("elmo.") for name in found)
    with torch.no_grad():
        expected = quantized(**make_inputs()).logits
        for folder, config in (("int8", None), ("float32", ELMoInt8Config())):
            loaded, info = ELMoForTokenClassification.from_pretrained(
                tmp_path / folder, output_loading_info=True, quantization_config=config
            )
            assert not info["missing_keys"] and not info["unexpected_keys"]
            assert loaded.num_parameters() == model.num_parameters()
            assert loaded.is_quantized and loaded.config.quantization_config.quant_method == "elmo_int8"
            assert torch.equal(loaded(**make_inputs()).logits, expected)
            assert loaded.dequantize() is loaded and not hasattr(loaded.config, "quantization_config")
            assert trainable(loaded) == trainable(model)
    assert type(loaded.elmo.forward_lstm.layers[0].projection) is nn.Linear
    loaded.train()(**make_inputs())
    saved = load_file(tmp_path / "int8" / "model.safetensors")
    assert saved["elmo.forward_lstm.layers.0.projection.weight"].dtype == torch.int8


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@needs_int8
def test_gradients_come_back_and_counts_stay():
    model = make_wide_model(word_embedding_size=3)
    model.freeze()
    model.scalar_mix.gamma.requires_grad_(False)
    for part in (model.char_encoder.highways, model.forward_lstm.layers[0].input_linear.bias):
        part.requires_grad_(True)
    expected = trainable(model)
    counts = [model.num_parameters(), model.num_parameters(exclude_embeddings=True)]
    model.quantize()
    assert counts == [model.num_parameters(), model.num_parameters(exclude_embeddings=True)]
    assert trainable(model) == ["scalar_mix.weights"]
    assert trainable(copy.deepcopy(model).dequantize()) == expected
    model.freeze()
    assert trainable(model.dequantize()) == ["scalar_mix.weights", "scalar_mix.gamma"]


@needs_int8
@pytest.mark.slow
def test_without_the_package(tmp_path, quantized):
    """transformers reads the folder with the code in it, which registers the quantizer."""
    quantized.save_pretrained(tmp_path / "model")
    torch.save((dict(make_inputs()), top(quantized)), tmp_path / "expected.pt")
    script = (
        "import torch; from transformers import AutoModel\n"
        "inputs, expected = torch.load('expected.pt')\n"
        "for _ in range(2):\n"  # the second time, the quantizer is registered already
        "    model = AutoModel.from_pretrained('model', trust_remote_code=True)\n"
        "    assert model.is_quantized\n"
        "    assert torch.equal(model(**inputs).last_hidden_state, expected)\n"
        "    model.save_pretrained('again')\n"
    )
    run(new_environment(tmp_path / "venv"), "-c", script, cwd=tmp_path, HF_HOME=str(tmp_path / "home"))
    assert torch.equal(top(AutoModel.from_pretrained(tmp_path / "again")), top(quantized))


@needs_int8
def test_copies_workers_and_other_processes(quantized):
    expected = top(quantized)
    for other in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert torch.equal(top(other), expected)
    other.forward_lstm.layers[0].projection.scales.mul_(2)
    assert error_of(top(other), expected) > 0.1  # the packed copy follows
    other.load_state_dict(quantized.state_dict())
    assert torch.equal(top(other), expected)
    loader = torch.utils.data.DataLoader([0], num_workers=1, collate_fn=lambda _: top(quantized))
    assert torch.equal(next(iter(loader)), expected)


@needs_int8
@needs_numbers
def test_a_quantized_model_refuses_tangents_of_functions(quantized):
    with refused("A quantized layer has no gradients"):
        jvp(quantized, *torch.randn(2, 1, 3, 32))


@needs_int8
def test_what_a_quantized_model_refuses(tmp_path):
    model = make_wide_model().quantize()
    model.save_pretrained(tmp_path)
    embeds, direction = torch.randn(2, 1, 3, 32)
    no_bilm = {"use_elmo": False, "task_word_embedding_size": 4}
    for message, call in (
        ("A quantized model cannot be trained", model.train),
        ("A quantized model cannot be converted to torch.", lambda: model.to(torch.bfloat16)),
        ("not supported for quantized model", model.half),
        ("A quantized layer has no gradients", lambda: dual(model, embeds, direction)),
        ("A quantized layer has no gradients", lambda: model(inputs_embeds=embeds.requires_grad_())),
        ("not with torch.bfloat16", lambda: ELMoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)),
        ("torch.bfloat16 on cpu", make_wide_model().bfloat16().quantize),
        ("use_elmo=False", make_wide_model(ELMoForTokenClassification, **no_bilm).quantize),
    ):
        with refused(message):
            call()
    with elmo_backend("int8"), refused("'int8' was forced, but gradients are needed."):
        make_wide_model()(**make_inputs())
    assert model.quantize() is model


@needs_int8
def test_a_processor_without_the_instructions(tmp_path, monkeypatch, caplog):
    model = make_wide_model()
    copy.deepcopy(model).quantize().save_pretrained(tmp_path)
    monkeypatch.setattr(int8, "question", lambda name: lambda: False)
    with elmo_backend("int8"), refused("'int8' was forced, but this processor has no VNNI instructions."):
        top(model)
    same = copy.deepcopy(model).quantize()
    assert not getattr(same, "is_quantized", False)
    assert "stays in float32: this processor has no VNNI" in caplog.text
    assert torch.equal(top(same), top(model))
    loaded = ELMoModel.from_pretrained(tmp_path).train()
    assert type(loaded.token_projection) is nn.Linear and not loaded.is_quantized
    assert "not fast here, because this processor has no VNNI" in caplog.text
    assert error_of(top(loaded.eval()), top(model)) < 0.02


@needs_int8
def test_a_vocabulary_cache_is_made_afterwards(tmp_path):
    model, tokenizer = make_wide_model(), ELMoTokenizer()
    model.cache_vocabulary(["Paris", "is"], tokenizer, save=True)
    model.quantize()
    assert model.vocabulary_cache is None and model.config.vocabulary_cache_size == 0
    expected = top(model)
    model.cache_vocabulary(["Paris", "is"], tokenizer, save=True)
    model.save_pretrained(tmp_path)
    loaded = ELMoModel.from_pretrained(tmp_path)
    for each in (model, loaded):
        assert error_of(top(each), expected) < 1e-3
        assert len(each.vocabulary_cache.words) == 4  # with the markers
    model.dequantize().save_pretrained(tmp_path)
    assert ELMoModel.from_pretrained(tmp_path).vocabulary_cache is None


@needs_int8
def test_compiled_under_autocast_and_elsewhere(quantized):
    expected = top(quantized)
    with torch.autocast("cpu", torch.bfloat16):
        assert error_of(top(quantized).float(), expected) < 0.03
    assert error_of(top(torch.compile(quantized, backend="eager")), expected) < 5e-3
    layer, inputs = Int8Linear.from_linear(nn.Linear(8, 4)).to("meta"), torch.ones(3, 8, device="meta")
    with torch.no_grad():
        assert make_plan([layer], inputs) == ("reference", "int8 is not built for torch.float32 on meta")
