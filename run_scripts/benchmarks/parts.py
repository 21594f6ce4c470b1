"""What `benchmark_elmo.py` measures: in each part the implementations that take turns, and the floor below them.

Shape suffixes: N real tokens of a batch; D width of a product's input; G width of its output; P `projection_size`.
"""

import copy
import multiprocessing
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers import BatchEncoding, BertTokenizer, logging

from modeling_elmo import ELMoConfig, ELMoModel, ELMoTokenizer, elmo_backend
from modeling_elmo.elmo_backends import packed, product
from modeling_elmo.elmo_encoder import distinct_rows
from modeling_elmo.elmo_inputs import TokenBatch
from modeling_elmo.elmo_lstm import ELMoLSTMLayer, _chunks
from modeling_elmo.tokenization.elmo_pretokenization import TextSplitter

Sentence = list[str]
Outputs = dict[str, Tensor]
Peer = dict[str, Any]  # see `--peer` in benchmark_elmo.py
REFERENCE, FLOOR, TORCH_LSTM = "reference", "floor", "torch.nn.LSTM (unclipped)"
TOKENIZER = ELMoTokenizer(pre_tokenization="whitespace")
MOST_TEXTS, TEXTS_IN_A_BATCH = 10_000, 1000  # of the tokenizers
PEAK = Path("/proc/self/clear_refs")  # of this process; 5 forgets it
# transformers imports nothing before a name of it is asked for.
PLAIN_IMPORTS = "import torch; from transformers import PreTrainedModel, PreTrainedTokenizerFast"
IMPORTS = {"torch, transformers": PLAIN_IMPORTS, "and modeling_elmo": f"{PLAIN_IMPORTS}; import modeling_elmo"}


class Run(NamedTuple):
    """What is timed. Every output that `expected` holds too must be equal to it."""

    implementation: str
    dtype: str | None
    call: Callable[[], Any]
    expected: Outputs | None = None


class Contest(NamedTuple):
    """Runs that take turns; each has its ratio to the first run of each of `bases`."""

    part: str
    batch: str
    counts: dict[str, int]
    bases: list[str]
    runs: list[Run]


class Bench(NamedTuple):
    """What the parts work on: sentences, batches of them by name, a model for each dtype, peers by name."""

    sentences: list[Sentence]
    batches: dict[str, list[Sentence]]
    training_batches: dict[str, list[Sentence]]
    models: dict[str, ELMoModel]
    dtypes: list[str]
    peers: dict[str, Peer]
    folder: Path  # where the float32 model is saved


def encode(batch: list[Sentence]) -> BatchEncoding:
    return TOKENIZER(batch, is_split_into_words=True, padding=True, return_tensors="pt")


def model_contests(part: str, bench: Bench) -> Iterator[Contest]:
    for name, batch in (bench.training_batches if part == "training" else bench.batches).items():
        yield model_contest(part, name, encode(batch), bench)


def model_contest(part: str, name: str, encoding: BatchEncoding, bench: Bench) -> Contest:
    """Both backends in every dtype; peers in float32, or `torch.nn.LSTM`; the floor."""
    # The hand-written backward pass knows no bfloat16.
    backend, dtypes = ("training", ["float32"]) if part == "training" else ("inference", bench.dtypes)
    with torch.no_grad():
        read = {dtype: model.read_tokens(**encoding) for dtype, model in bench.models.items()}
    inputs = read if part == "lstm" else dict.fromkeys(read, encoding)
    expected = OURS[part](bench.models["float32"], REFERENCE, inputs["float32"])
    runs = [
        Run(used, dtype, partial(OURS[part], bench.models[dtype], used, inputs[dtype]), expected)
        for dtype in dtypes
        for used in (REFERENCE, backend)
    ]
    others = list(torch_lstm_runs(bench, read) if part == "lstm" else peer_runs(part, bench, encoding, expected))
    if part == "encoder":
        cached = copy.deepcopy(bench.models["float32"])
        cached.cache_vocabulary([word for words in bench.batches[name] for word in words], TOKENIZER)
        runs.append(Run("vocabulary cache", "float32", partial(encoder, cached, "inference", encoding), expected))
    products = PRODUCTS[part](bench.models["float32"].config, encoding)
    floors = [Run(FLOOR, dtype, floor(products, dtype)) for dtype in dtypes]
    counts = {"tokens": int(encoding.attention_mask.sum()), "distinct_words": num_distinct(encoding)}
    bases = dict.fromkeys([REFERENCE, *(run.implementation for run in others)])
    return Contest(part, name, counts, list(bases), [*runs, *others, *floors])


@torch.no_grad()
def inference(model: ELMoModel, backend: str, encoding: BatchEncoding) -> Outputs:
    """The whole model's top layer."""
    with elmo_backend(backend):
        return {"vectors": model(**encoding).last_hidden_state}


def training(model: ELMoModel, backend: str, encoding: BatchEncoding) -> Outputs:
    """Forward and backward without an optimizer, dropout off: every weight's gradient."""
    with elmo_backend(backend):
        return with_gradients(model(**encoding).last_hidden_state, dict(model.named_parameters()))


def with_gradients(vectors: Tensor, parameters: dict[str, Tensor]) -> Outputs:
    gradients = torch.autograd.grad(vectors.square().sum(), list(parameters.values()))
    return {"vectors": vectors.detach(), **dict(zip(parameters, gradients, strict=True))}


@torch.no_grad()
def encoder(model: ELMoModel, backend: str, encoding: BatchEncoding) -> Outputs:
    """Characters to token vectors, each distinct word once."""
    with elmo_backend(backend):
        text = model.read_tokens(**encoding)
    return {"tokens": text.words_UP[text.index_N]}


@torch.no_grad()
def lstm(model: ELMoModel, backend: str, text: TokenBatch) -> Outputs:
    """The last layer of each direction, from token vectors that are there."""
    states = model.starting_states(None, text.words_UP, len(text.mask_BT))
    orders = (text.packing.forward_N, text.packing.backward_N)
    with elmo_backend(backend):
        ways = [model.run_direction(number, text, order_N, states) for number, order_N in enumerate(orders)]
    return {name: outputs[-1] for name, (outputs, *_) in zip(("forward", "backward"), ways, strict=True)}


OURS: dict[str, Callable[..., Outputs]] = {each.__name__: each for each in (inference, training, encoder, lstm)}


def peer_runs(part: str, bench: Bench, encoding: BatchEncoding, expected: Outputs) -> Iterator[Run]:
    """Of the peers that have what the part needs."""
    needed, compute = {
        "inference": ("model", peer_inference),
        "training": ("parameters", peer_training),
        "encoder": ("encoder", peer_encoder),
    }[part]
    for name, peer in bench.peers.items():
        if needed in peer:
            prepared = peer["prepare"](encoding) if "prepare" in peer else encoding
            yield Run(name, "float32", partial(compute, peer, prepared, encoding.attention_mask.bool()), expected)


@torch.no_grad()
def peer_inference(peer: Peer, prepared: Any, mask_BT: Tensor) -> Outputs:
    return {"vectors": peer["model"](prepared)}


def peer_training(peer: Peer, prepared: Any, mask_BT: Tensor) -> Outputs:
    return with_gradients(peer["model"](prepared), peer["parameters"])


@torch.no_grad()
def peer_encoder(peer: Peer, prepared: Any, mask_BT: Tensor) -> Outputs:
    return {"tokens": peer["encoder"](prepared)[mask_BT]}


def torch_lstm_runs(bench: Bench, texts: dict[str, TokenBatch]) -> Iterator[Run]:
    """`torch.nn.LSTM` knows no clips, so it is compared with a copy of our model that has none."""
    unclipped = copy.deepcopy(bench.models["float32"])
    for module in unclipped.modules():
        if isinstance(module, ELMoLSTMLayer):
            module.cell_clip = module.projection_clip = None
    expected = lstm(unclipped, REFERENCE, texts["float32"])
    for dtype in bench.dtypes:
        model = bench.models[dtype]
        layers = [torch_layer(layer) for layer in (*model.forward_lstm.layers, *model.backward_lstm.layers)]
        yield Run(TORCH_LSTM, dtype, partial(torch_lstm, model, layers, texts[dtype]), expected)


@torch.no_grad()
def torch_lstm(model: ELMoModel, layers: list[nn.LSTM], text: TokenBatch) -> Outputs:
    """One `torch.nn.LSTM` a layer, since between its own layers it has no skip connections."""
    outputs, depth = {}, model.config.num_hidden_layers
    ways = {"forward": (layers[:depth], text.packing.forward_N), "backward": (layers[depth:], text.packing.backward_N)}
    for name, (stack, order_N) in ways.items():
        vectors_NP = text.words_UP[text.index_N[order_N]]
        for number, layer in enumerate(stack):
            sequences = PackedSequence(vectors_NP, torch.tensor(text.packing.batch_sizes))
            outputs_NP = layer(sequences)[0].data
            skips = number and model.config.use_skip_connections
            vectors_NP = outputs_NP + vectors_NP if skips else outputs_NP
        outputs[name] = vectors_NP
    return outputs


def torch_layer(layer: ELMoLSTMLayer) -> nn.LSTM:
    """Our weights in its order of gates: i, f, g, o."""
    outer, inner = layer.input_linear.in_features, layer.input_linear.out_features // 4
    other = nn.LSTM(outer, inner, proj_size=outer, dtype=layer.input_linear.weight.dtype)
    state = {"weight_hr_l0": layer.projection.weight}
    gates = {
        "weight_ih_l0": layer.input_linear.weight,
        "weight_hh_l0": layer.state_linear.weight,
        "bias_ih_l0": layer.input_linear.bias,
    }
    for name, weight in gates.items():
        i, f, o, g = weight.detach().chunk(4)
        state[name] = torch.cat([i, f, g, o])
    state["bias_hh_l0"] = torch.zeros(4, inner).index_fill(0, torch.tensor(1), layer.forget_bias).flatten()
    other.load_state_dict(state)
    return other


class Product(NamedTuple):
    """`rows` vectors times a weight, `(rows, width) x (width, out)`; products of one weight share its packed copy."""

    weight: str
    rows: int
    width: int
    out: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.width * self.out


def encoder_products(config: ELMoConfig, encoding: BatchEncoding) -> list[Product]:
    """Those of each distinct word. The convolutions are none: they can be looked up in tables and summed."""
    words, width = num_distinct(encoding), config.num_features
    names = [f"{layer} {gate}" for layer in range(config.num_highway_layers) for gate in ("transform", "carry")]
    highways = [Product(name, words, width, width) for name in names]
    return [*highways, Product("tokens", words, width, config.projection_size)]


def lstm_products(config: ELMoConfig, encoding: BatchEncoding) -> list[Product]:
    """The first layer's inputs once a distinct word, later ones in chunks; then step by step state and projection."""
    outer, inner = config.projection_size, config.lstm_hidden_size
    batch_sizes = encoding.attention_mask.sum(0).tolist()  # padding stands on the right
    chunks, products = [sum(sizes) for _, sizes in _chunks(batch_sizes)], []
    for layer in [f"{way} {depth}" for way in ("forward", "backward") for depth in range(config.num_hidden_layers)]:
        for size in [num_distinct(encoding)] if layer.endswith(" 0") else chunks:
            products.append(Product(f"{layer} input", size, outer, 4 * inner))
        for size in batch_sizes:
            products.append(Product(f"{layer} state", size, outer, 4 * inner))
            products.append(Product(f"{layer} projection", size, inner, outer))
    return products


def all_products(config: ELMoConfig, encoding: BatchEncoding) -> list[Product]:
    return encoder_products(config, encoding) + lstm_products(config, encoding)


def training_products(config: ELMoConfig, encoding: BatchEncoding) -> list[Product]:
    """Three times the arithmetic: forward; each input's gradient; the gradient of each weight, as one product."""
    forward = all_products(config, encoding)
    backward = [Product(f"{weight} back", rows, out, width) for weight, rows, width, out in reversed(forward)]
    rows: Counter[str] = Counter()
    for each in forward:
        rows[each.weight] += each.rows
    weights = {each.weight: each for each in forward}.values()
    gradients = [Product(f"{w.weight} gradient", w.out, rows[w.weight], w.width) for w in weights]
    return forward + backward + gradients


PRODUCTS = {
    "inference": all_products,
    "training": training_products,
    "encoder": encoder_products,
    "lstm": lstm_products,
}


def num_distinct(encoding: BatchEncoding) -> int:
    return len(distinct_rows(encoding.character_ids[encoding.attention_mask.bool()])[0])


def floor(products: list[Product], dtype: str) -> Callable[[], None]:
    """The products alone, by the function that the model uses."""
    kind = getattr(torch, dtype)
    most_rows = {each.width: each.rows for each in sorted(products, key=lambda each: each.rows)}
    inputs = {width: torch.randn(rows, width, dtype=kind) for width, rows in most_rows.items()}
    shapes = {each.weight: (each.out, each.width) for each in products}
    weights = {name: packed(torch.randn(shape, dtype=kind), keep=False) for name, shape in shapes.items()}

    def call():
        for each in products:
            product(inputs[each.width][: each.rows], weights[each.weight])

    return call


def tokenizer_contests(bench: Bench) -> Iterator[Contest]:
    """Raw text to padded tensors, after one pass that fills the caches of ours."""
    texts = [" ".join(words) for words in bench.sentences[:MOST_TEXTS]]
    batches = [texts[start : start + TEXTS_IN_A_BATCH] for start in range(0, len(texts), TEXTS_IN_A_BATCH)]
    tokenizers: dict[str, Callable] = {"BertTokenizer": bert_tokenizer(texts)}
    for pre_tokenization in ("whitespace", "moses", "treebank"):
        tokenizers[f"ELMoTokenizer {pre_tokenization}"] = ours = ELMoTokenizer(pre_tokenization=pre_tokenization)
        check_words(ours, batches[0])
    runs = [Run(name, None, partial(tokenize, tokenizer, batches)) for name, tokenizer in tokenizers.items()]
    counts = {"words": sum(len(text.split()) for text in texts)}
    yield Contest("tokenizer", f"{len(texts)} texts", counts, ["BertTokenizer"], runs)


def tokenize(tokenizer: Callable, batches: list[list[str]]):
    for batch in batches:
        tokenizer(batch, padding=True, return_tensors="pt")


def bert_tokenizer(texts: list[str]) -> BertTokenizer:
    """With a vocabulary of the texts' own words, so that nearly every one is a single piece: its best case."""
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})
    characters = sorted(set("".join(words)))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters), *words]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocab, do_lower_case=False)


def check_words(tokenizer: ELMoTokenizer, texts: list[str]):
    """The characters spell the words that the pre-tokenization alone finds, where none of them is cut."""
    name, room = tokenizer.pre_tokenization, tokenizer.max_word_length - 2
    splitter = TextSplitter(name)
    characters = tokenizer(texts, padding=True, return_tensors="pt").character_ids
    for text, row in zip(texts, characters, strict=True):
        words, found = splitter.words(text), tokenizer.decode_characters(row, skip_special_tokens=True)
        if found != words and all(len(word.encode()) <= room for word in words):
            raise RuntimeError(f"{name}: {text!r} became {found}, not {words}; no figures are given.")


def start_contests(bench: Bench) -> Iterator[Contest]:
    """Imports in fresh processes, and loading the model from the page cache."""
    path = f"import sys; sys.path[:] = {sys.path}; "
    commands = {name: [sys.executable, "-c", path + code] for name, code in IMPORTS.items()}
    runs = [Run(name, None, partial(subprocess.run, command, check=True)) for name, command in commands.items()]
    yield Contest("start", "import", {}, list(IMPORTS)[:1], runs)
    files, weights = list(bench.folder.glob("*.safetensors")), bench.models["float32"].state_dict()
    runs = [Run("Path.read_bytes", None, lambda: [file.read_bytes() for file in files])]
    for name, reads in (("from_pretrained", False), ("and touching all weights", True)):
        runs.append(Run(name, "float32", partial(load, bench.folder, reads), weights))
    yield Contest("start", "load", {}, ["Path.read_bytes"], runs)


def load(folder: Path, reads: bool) -> Outputs:
    """Loading alone maps the file: its pages come when they are first touched."""
    state = ELMoModel.from_pretrained(folder, add_mixing_layer=False).state_dict()
    return {name: weight.clone() for name, weight in state.items()} if reads else state


def can_measure_memory() -> bool:
    if not PEAK.exists():
        print(f"\nmemory is not measured: there is no {PEAK}, which only Linux has")
    return PEAK.exists()


def memory_rows(bench: Bench, name: str) -> Iterator[dict[str, Any]]:
    """How far a batch raises the peak of a fresh process over its state after loading."""
    for dtype in bench.dtypes:
        for backend in (REFERENCE, "inference"):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
                arguments = (bench.folder, backend, dtype, bench.batches[name], torch.get_num_threads())
                figures = fresh.submit(memory_of, *arguments).result()
            yield {"part": "memory", "batch": name, "implementation": backend, "dtype": dtype, **figures}


@torch.no_grad()
def memory_of(folder: Path, backend: str, dtype: str, batch: list[Sentence], threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    model = ELMoModel.from_pretrained(folder, add_mixing_layer=False, dtype=dtype).eval()
    encoding = encode(batch)
    # Adding up touches all pages, which may still be in the file alone.
    weights = sum(parameter.nbytes for parameter in model.parameters() if parameter.sum().isfinite())
    PEAK.write_text("5", encoding="ascii")  # the peak is counted from here
    before = resident_bytes("VmRSS")
    with elmo_backend(backend):
        layers = model(**encoding).hidden_states
    rise, outputs = resident_bytes("VmHWM") - before, sum(layer.nbytes for layer in layers)
    return {
        "weights_megabytes": weights / 1e6,
        "outputs_megabytes": outputs / 1e6,
        "rise_megabytes": rise / 1e6,
        "multiple_of_weights_and_outputs": (weights + rise) / (weights + outputs),
        "multiple_at_two_weights": (2 * weights + outputs) / (weights + outputs),
    }


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kilobytes)


PARTS: dict[str, Callable[[Bench], Iterator[Contest]]] = {
    **{part: partial(model_contests, part) for part in OURS},
    "tokenizer": tokenizer_contests,
    "start": start_contests,
}
