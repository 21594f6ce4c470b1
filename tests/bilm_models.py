"""Small biLMs with batches, their LSTMs with packed sequences, tangents of models, and sizes of tensors."""

from contextlib import contextmanager, nullcontext
from functools import cache
from unittest.mock import patch

import pytest
import torch
from packaging import version
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoModel, ELMoTokenizer, elmo_backend
from modeling_elmo.inputs import pack
from modeling_elmo.kernels import lstm_cuda
from modeling_elmo.kernels.int8 import int8_obstacle
from modeling_elmo.kernels.lstm_loop import Arithmetic
from modeling_elmo.kernels.sequences import Steps, Stream
from modeling_elmo.modeling_elmo import ELMoLSTM

LENGTHS = [6, 1, 4]  # of texts
LSTM_LENGTHS = [5, 1, 9, 3, 9, 1]  # of an LSTM's sequences
LSTM_KERNELS = ("fused", "persistent", "grouped")
both_classes = pytest.mark.parametrize("cls", [ELMoModel, ELMoForPreTraining])  # heads: tests/test_task_heads.py


needs_int8 = pytest.mark.skipif(int8_obstacle() is not None, reason=f"8 bits are not fast here: {int8_obstacle()}")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@contextmanager
def computed_by(kernel):
    """Computes with this kernel where it is possible, as on the device and in the mode that it is made for."""
    if kernel == "reference":
        with elmo_backend("reference"):
            yield
        return

    def fastest(inputs, differentiable, is_lstm):
        if kernel in LSTM_KERNELS:
            return "fused" if is_lstm else "training" if differentiable else "inference"
        return kernel

    obstacle = "forced" if kernel == "fused" else None
    with (
        patch("modeling_elmo.kernels.plan._fastest", fastest),
        patch("modeling_elmo.kernels.plan._layer_obstacle", lambda *_: obstacle),
        elmo_backend("trial") if kernel == "grouped" else nullcontext(),
    ):
        yield


@contextmanager
def filled_with_nan():
    """What is read before it was written is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def layers_by_steps(functions=None):
    """Inside, `LayerArithmetic` calls the definition, on every device, where it launches a kernel."""
    forward, backward = functions[-2:] if functions else (layer_forward, layer_backward)

    def launch(_, kernel, tensors, rooms, rows, weights, cell_KSH, steps, clips, **options):
        if kernel is lstm_cuda._layer_forward:
            *given, values_KNG, _ = tensors
            forward(given, [values_KNG, *rooms], steps.on_device, clips)
        else:
            backward([*tensors[2:]], [*tensors[:2], *rooms], steps.on_device, clips)
        return True

    with patch.object(lstm_cuda.LayerArithmetic, "_launch", launch):
        yield


def layer_forward(given, rooms, sizes, clips):
    """What a kernel computes, which reads the sizes of the steps when it runs."""
    gates_KNG, state_weight, projection, hidden_KSP, cell_KSH = given
    values_KNG, outputs_KNP, cells_KNH = rooms
    steps, rows = steps_of(sizes)
    of_tokens = gates_KNG[:, rows].clone(), (state_weight, projection), hidden_KSP, cell_KSH
    written = outputs_KNP[:, rows], cells_KNH[:, rows]
    kept_KNG = Arithmetic().forward_steps(*of_tokens, *written, steps, clips, True)
    if values_KNG.numel():
        values_KNG[:, rows] = kept_KNG


def layer_backward(given, rooms, sizes, clips):
    state_weight, projection, cell_KSH, values_KNG, cells_KNH, outputs_KNP = given
    grad_projected_KNP, grad_cell_KSH, grad_gates_KNG, raw_KNH, grad_hidden_KSP = rooms
    steps, rows = steps_of(sizes)
    kept = outputs_KNP[:, rows], cells_KNH[:, rows], values_KNG[:, rows].to(cell_KSH.dtype), cell_KSH
    found = Arithmetic().backward_steps(
        grad_projected_KNP[:, rows], grad_cell_KSH, (state_weight, projection), *kept, steps, clips
    )
    grad_gates_KNG[:, rows], raw_KNH[:, rows], grad_hidden_KSP[:] = found


def steps_of(sizes):
    sizes = sizes[1 : 1 + sizes[0]].tolist()
    return Steps(sizes, torch.device("cpu")), slice(0, sum(sizes))


def tiny_model(cls=ELMoModel, seed=0, **overrides):
    """Of the preset, without dropout. It reads what `ELMoTokenizer()` writes."""
    torch.manual_seed(seed)
    return cls(ELMoConfig.from_preset("tiny", **{"dropout": 0.0, **overrides})).eval()


def make_tokenizer(*words, **options):
    """With these words after the special ones."""
    return ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", *words], **options)


def save(folder, *parts):
    """Saves a model, its tokenizer or other parts in one folder."""
    for part in parts:
        part.save_pretrained(folder)
    return folder


@cache
def pair_in(folder, cls=ELMoModel):
    """The model and the tokenizer of a folder, which must not change afterwards."""
    return cls.from_pretrained(folder).eval(), ELMoTokenizer.from_pretrained(folder)


@torch.no_grad()
def plain_layers(folder, text):
    """The layers of one text, raw or as words, without markers: `(layers, words, hidden_size)`."""
    model, tokenizer = pair_in(folder)
    inputs = tokenizer([text], is_split_into_words=not isinstance(text, str), return_tensors="pt")
    return torch.stack(model(**inputs).hidden_states)[:, 0, 1:-1]


def make_config(**overrides):
    """Without dropout, and smaller than the preset."""
    sizes = {"char_cnn_filters": [[1, 3], [2, 5], [4, 6]], "max_word_length": 9, "char_vocab_size": 30}
    sizes |= {"lstm_hidden_size": 21, "projection_size": 7, "vocab_size": 12, "dropout": 0.0}
    return ELMoConfig.from_preset("tiny", **{**sizes, **overrides})


def make_model(cls=ELMoModel, seed=0, **overrides):
    torch.manual_seed(seed)
    return cls(make_config(**overrides)).eval()


def make_batch(config, lengths=LENGTHS, seed=0, side="right"):
    """Random words of 1 to max_word_length characters; id 29 after the end of a word, 0 at padding words."""
    generator = seeded(seed)
    width = config.max_word_length
    time = max(lengths)
    characters = torch.randint(1, 29, (len(lengths), time, width), generator=generator)
    ends = torch.randint(1, width + 1, (len(lengths), time, 1), generator=generator)
    characters = characters.where(torch.arange(width) < ends, 29)
    mask = torch.arange(time) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    words = torch.randint(4, config.vocab_size, mask.shape, generator=generator) * mask
    return {"character_ids": characters * mask[..., None], "input_ids": words, "attention_mask": mask.long()}


def make_lstm(config, scale=1.0, dtype=torch.float32, seed=0):
    generator = seeded(seed)
    lstm = ELMoLSTM(config)
    for parameter in lstm.parameters():
        spread = scale * (parameter.shape[1] ** -0.5 if parameter.dim() > 1 else 0.4)
        parameter.data = (spread * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return lstm


def make_sequences(config, dtype=torch.float32, seed=1):
    """Ragged sequences, their packing, and a state: tokens are `(batch, time, projection_size)`."""
    generator = seeded(seed)
    mask = torch.arange(max(LSTM_LENGTHS)) < torch.tensor(LSTM_LENGTHS)[:, None]
    tokens = torch.randn(len(LSTM_LENGTHS), max(LSTM_LENGTHS), config.projection_size, generator=generator).to(dtype)
    shape = (config.num_hidden_layers, len(LSTM_LENGTHS))
    hidden = torch.randn(*shape, config.projection_size, generator=generator).to(dtype)
    cell = torch.randn(*shape, config.lstm_hidden_size, generator=generator).to(dtype)
    return tokens, mask, hidden, cell


def run_lstm(lstm, tokens, mask, hidden, cell, order="forward_N"):
    """Packs, runs and unpacks: outputs `(batch, time, projection_size)` of each layer, states in batch order."""
    packing = pack(mask)
    order_N = packing.positions_N[getattr(packing, order)]
    rows = packing.rows_S
    stream = Stream(tokens.flatten(0, 1), packing.steps, order_N)
    outputs, hidden_LSP, cell_LSH = lstm(stream, hidden[:, rows], cell[:, rows])
    unpacked = [torch.zeros_like(tokens).flatten(0, 1).index_copy(0, order_N, out).view_as(tokens) for out in outputs]
    back = rows.argsort()
    return unpacked, hidden_LSP[:, back], cell_LSH[:, back]


needs_numbers = pytest.mark.skipif(
    version.parse(torch.__version__) < version.parse("2.10"), reason="torch 2.8 and 2.9 read no lengths inside a jvp"
)


def jvp(model, embeds, direction):
    return torch.func.jvp(lambda x: model(inputs_embeds=x).elmo_embeddings, (embeds,), (direction,))[1]


def dual(model, embeds, direction):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(inputs_embeds=forward_ad.make_dual(embeds, direction))[1]).tangent


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return result
