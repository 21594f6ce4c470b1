"""Other devices than the CPU, on a simulated one (`fakegpu.py`): values, gradients, launches and waits.

Nothing here needs a GPU. Every case runs on the CPU, whose results other tests compare with definitions, and there.
`ELMO_TEST_DEVICE=cuda pytest -m slow tests/test_devices.py` runs the cases on a GPU; launches and waits are simulated.
"""

import json
import os
import shutil
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from unittest.mock import patch

import h5py
import pytest
import torch
from accelerate.state import AcceleratorState
from bilm_models import (
    computed_by,
    layer_backward,
    layer_forward,
    layers_by_steps,
    make_batch,
    make_model,
    save,
    tiny_model,
)
from head_models import HEADS, make_coreference_pipeline, make_role_pipeline, stirred
from head_models import batch_of as batch_of_head
from head_models import make_model as make_head
from head_models import targets_of as targets_of_head
from pretraining_worker import assert_same, contents, pretrain
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from transformers import Trainer, TrainingArguments

from modeling_elmo import (
    ELMoConfig,
    ELMoForPreTraining,
    ELMoForQuestionAnswering,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
    elmo_backend,
)
from modeling_elmo.heads.reader_pipeline import ELMoQuestionAnsweringPipeline
from modeling_elmo.kernels import lstm_cuda
from modeling_elmo.run_scripts import benchmark, embed
from modeling_elmo.run_scripts.pretraining.loop import Pretraining
from modeling_elmo.run_scripts.pretraining.optimization import OptimizationArguments, clip_gradients, make_optimizers
from modeling_elmo.run_scripts.vectors.embedding import compute_block, encode_block, finish_block
from modeling_elmo.run_scripts.vectors.lines import to_line

DEVICE = os.environ.get("ELMO_TEST_DEVICE", "fakegpu")
IS_SIMULATED = DEVICE == "fakegpu"
MISSING = [tool for tool in ("g++", "ninja") if IS_SIMULATED and shutil.which(tool) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the simulated device is built with {' and '.join(MISSING)}"),
]
simulated = pytest.mark.skipif(not IS_SIMULATED, reason="counts what the simulated device is told")
WITHOUT_DROPOUT = {"dropout": 0.0, "elmo_dropout": 0.0, "task_dropout": 0.0}
WORD_LEVEL = {"char_vocab_size": 0, "word_embedding_size": 6}
SAMPLED = {"softmax_type": "sampled", "num_sampled": 16, "vocab_size": 60}
SOFTMAXES = {
    "full": {},
    "sampled": SAMPLED,
    "adaptive": {"softmax_type": "adaptive", "vocab_size": 60, "adaptive_cutoffs": [20]},
}
both_modes = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])


@pytest.fixture(scope="module", autouse=True)
def fakegpu():
    if not IS_SIMULATED:
        torch.backends.cudnn.allow_tf32 = False  # torch's own choice; with it, the case bcn-both-train differed by more
        return None
    import fakegpu  # builds it

    return fakegpu


def bilm(cls=ELMoModel, **options):
    return make_model(cls, **{**WITHOUT_DROPOUT, **options})


def moved(values, device):
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)


def outcome(model, batch, train=False, call=None, autocast=False):
    """Outputs, and gradients by name, on the CPU, when the model has run where it is."""
    device = model.device
    model.train(train).zero_grad()
    precision = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
    with torch.set_grad_enabled(train), precision:
        output = (call or (lambda model, batch: model(**batch)))(model, moved(batch, device))
    found = [value for value in tree_leaves(dict(output)) if isinstance(value, torch.Tensor)]
    assert {value.device for value in found} == {device}
    if train:
        floats = [value for value in found if value.is_floating_point() and value.requires_grad]
        (output["loss"] if "loss" in output else sum(value.float().square().mean() for value in floats)).backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    gradients = {name: (grad.to_dense() if grad.is_sparse else grad).cpu() for name, grad in named.items()}
    return [value.detach().cpu() for value in found], gradients


def check(make, batch, backend=None, **options):
    """The same values and gradients on both devices; `backend` on the simulated one."""
    expected = outcome(make(), batch, **options)
    with nullcontext() if backend is None else elmo_backend(backend):
        found = outcome(make().to(DEVICE), batch, **options)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if options.get("autocast") else {"rtol": 1e-3, "atol": 1e-4}
    assert found[1].keys() == expected[1].keys() and bool(found[1]) == bool(options.get("train"))
    torch.testing.assert_close(found, expected, **tolerance)


def cases():
    """Options of the model, and a batch."""
    batch, generator = make_batch(bilm().config), torch.Generator().manual_seed(0)
    holes = batch["attention_mask"].clone()
    holes[0, 2] = 0
    hidden, cell = (torch.randn(3, 2, 2, size, generator=generator) for size in (7, 21))
    words = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return {
        "holes": ({}, {**batch, "attention_mask": holes}),
        "left": ({"scalar_mix_layer_norm": "allennlp", "lstm_hidden_size": 7}, make_batch(bilm().config, side="left")),
        "pairs": ({"cell_clip": None}, {**batch, "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1]] * 3)}),
        "without a mask": ({"scalar_mix_layer_norm": "token"}, {"character_ids": batch["character_ids"]}),
        "states": ({"scalar_mix_layer_norm": "bilm"}, {**batch, "initial_states": (hidden, cell)}),
        "vectors": ({"projection_clip": 0.1}, {"inputs_embeds": torch.randn(2, 5, 7, generator=generator)}),
        "words": (WORD_LEVEL, words),
    }


@both_modes
@pytest.mark.parametrize("options, batch", cases().values(), ids=cases())
def test_model(options, batch, train):
    check(lambda: bilm(**options), batch, train=train)


def language_batch(options, streams=False):
    batch = make_batch(bilm(**options).config)
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)
    if not streams:
        return {**batch, "labels": labels}
    backward = make_batch(bilm(**options).config, seed=1)["character_ids"]
    return {
        "character_ids": batch["character_ids"],
        "backward_character_ids": backward,
        "forward_targets": labels,
        "backward_targets": labels,
        "initial_states": (torch.ones(3, 2, 2, 7), torch.ones(3, 2, 2, 21)),
    }


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize(
    "streams, autocast, train", [(False, False, False), (True, False, True), (True, True, True), (False, True, True)]
)
def test_pretraining(softmax, streams, autocast, train):
    options = SOFTMAXES[softmax]

    def call(model, batch):
        model.softmax.sparse_gradients = softmax == "sampled"
        candidates = model.softmax.sample(torch.Generator().manual_seed(0)) if softmax == "sampled" else None
        return model(**batch, candidates=candidates)

    batch = language_batch(options, streams)
    check(lambda: bilm(ELMoForPreTraining, **options), batch, call=call, autocast=autocast, train=train)


@pytest.mark.parametrize("softmax", ["full", "adaptive"])
@pytest.mark.parametrize("call", [ELMoForPreTraining.score, ELMoForPreTraining.predict_words])
def test_probabilities(call, softmax):
    options, batch = SOFTMAXES[softmax], make_batch(bilm(**SOFTMAXES[softmax]).config)
    check(lambda: bilm(ELMoForPreTraining, **options), batch, call=lambda model, batch: call(model, **batch))


@both_modes
@pytest.mark.parametrize("cls, options", HEADS.values(), ids=HEADS)
def test_heads(cls, options, train):
    def make(**more):
        return stirred(make_head(cls, **options, **more), 0.3)

    batch = batch_of_head(make())
    batch |= targets_of_head(make(), batch)
    check(lambda: make(freeze_bilm=False), batch, train=train)
    check(lambda: make(scalar_mix_l2=0.1), batch, train=train, call=lambda model, _: model(**batch))  # moves its inputs
    if "linear" in options.values() or options.get("elmo_placement") == "input":
        check(lambda: make(freeze_bilm=False), batch, train=train, autocast=True)


@pytest.mark.parametrize("inner", [21, 7])
@pytest.mark.parametrize("train", [True, False])
def test_the_definition(inner, train):
    check(lambda: bilm(ELMoForPreTraining, lstm_hidden_size=inner), language_batch({}), "reference", train=train)


@contextmanager
def on_accelerate(device):
    """Gives accelerate a device, as a machine with a GPU would."""
    AcceleratorState._reset_state(True)
    with patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": device}):
        yield
    AcceleratorState._reset_state(True)


RUN = {"max_steps": 8, "eval_steps": 4, "save_steps": 4, "logging_steps": 2, "config_overrides": {"dropout": 0.0}}
RUN["no_tf32"] = True  # the program's own choice on CUDA is TF32, with differences of 6e-5


def run_on(device, folder, **options):
    folder.mkdir(exist_ok=True)
    with on_accelerate(device):
        run = pretrain(folder, use_cpu=False, **{**RUN, **options})
    assert run.plain_model.device.type == device
    return run


def figures_of(run):
    names = ("loss", "sampled_loss", "gradient_norm", "perplexity")
    return [entry[name] for entry in run.progress.log for name in names if name in entry]


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_type": "sampled", "optim": "adagrad"},
        {"softmax_type": "adaptive", "config_overrides": {"dropout": 0.0, "adaptive_cutoffs": [30]}},
        {"context": "stream", "gradient_accumulation_steps": 2},
        {"context": "stream", "bf16": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "default",
)
def test_pretraining_runs(options, tmp_path):
    expected = figures_of(run_on("cpu", tmp_path / "cpu", **options))
    found = figures_of(run_on(DEVICE, tmp_path / DEVICE, **options))
    assert len(found) == 11
    torch.testing.assert_close(found, expected, rtol=1e-2 if "bf16" in options else 1e-5, atol=0)


def test_trainer(tmp_path):
    model = make_head(ELMoForTokenClassification)
    batch = batch_of_head(model)
    batch |= targets_of_head(model, batch)
    rows = [{name: values[row] for name, values in batch.items()} for row in range(4)]
    options, losses = {"max_steps": 3, "save_steps": 2, "report_to": "none", "disable_tqdm": True}, []
    for device in ("cpu", DEVICE):
        with on_accelerate(device):
            model = make_head(ELMoForTokenClassification)
            # On a machine with a GPU, its Trainer takes the CPU only if it is told to, whatever accelerate has.
            arguments = TrainingArguments(tmp_path / device, use_cpu=device == "cpu", **options)
            trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
            trainer.train()
            losses.append(trainer.evaluate()["eval_loss"])
        assert model.device.type == device
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["questions", "roles", "coreference"])
def test_pipelines(kind):
    if kind == "questions":
        config = ELMoConfig.from_preset("tiny", task_hidden_size=6, **WITHOUT_DROPOUT)
        parts = {"model": ELMoForQuestionAnswering(config), "tokenizer": ELMoTokenizer()}
        pipe, texts = ELMoQuestionAnsweringPipeline(**parts), [{"question": "Who?", "context": "Ada, in London."}] * 2
    else:
        pipe = make_role_pipeline() if kind == "roles" else make_coreference_pipeline()
        texts = ["The cat ate the fish.", "Snow fell."]
    expected = pipe(texts, batch_size=2)
    moved_pipe = type(pipe)(model=pipe.model, tokenizer=pipe.tokenizer, device=DEVICE)
    found = moved_pipe(texts, batch_size=2)
    assert moved_pipe.model.device.type == DEVICE
    (values, shape), (expected_values, expected_shape) = map(tree_flatten, (found, expected))
    assert shape == expected_shape and values == pytest.approx(expected_values, abs=1e-5)


def test_save_and_load(tmp_path):
    model = bilm(ELMoForPreTraining).to(DEVICE)
    batch = moved(make_batch(model.config), DEVICE)
    model.save_pretrained(tmp_path)
    again = ELMoForPreTraining.from_pretrained(tmp_path).to(DEVICE)
    mapped = ELMoForPreTraining.from_pretrained(tmp_path, device_map={"": f"{DEVICE}:0"})
    scores = [each.eval().score(**batch).forward_log_probs.cpu() for each in (model, again, mapped)]
    assert scores[0].any() and scores[0].equal(scores[1]) and scores[0].equal(scores[2])
    model.resize_token_embeddings(40)
    assert model.softmax.weight.device.type == DEVICE


def test_models_built_on_the_device():
    with torch.device(DEVICE):
        model = bilm(ELMoForPreTraining, **SAMPLED).train()
    assert {parameter.device.type for parameter in model.parameters()} == {DEVICE}
    model(**moved(language_batch(SAMPLED), DEVICE)).loss.backward()


@torch.no_grad()
def test_vocabulary_cache(tmp_path):
    model, tokenizer = tiny_model(), ELMoTokenizer()
    batch = tokenizer([["a", "cat"], ["dogs"]], is_split_into_words=True, padding=True, return_tensors="pt")
    expected = model(**batch).last_hidden_state
    model.to(DEVICE).cache_vocabulary(["a", "cat", "the"], tokenizer, save=True)
    model.save_pretrained(tmp_path)
    for each, device in ((model, DEVICE), (ELMoModel.from_pretrained(tmp_path), DEVICE), (model, "cpu")):
        found = each.to(device)(**moved(dict(batch), device)).last_hidden_state.cpu()
        assert each.vocabulary_cache is not None
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@simulated
def test_launches_and_waits_of_a_step(fakegpu, monkeypatch):
    """A training step of 128 x 20 tokens on two streams; the definition alone has 4,461 launches and 32 waits.

    The model is narrow: launches and waits do not depend on widths.
    """
    for name in ("cell_forward", "cell_backward"):
        monkeypatch.setattr(lstm_cuda, name, fakegpu.as_one_launch(getattr(lstm_cuda, name)))
    torch.manual_seed(0)
    sizes = {"char_embedding_size": 4, "char_cnn_filters": [[width, 4] for width in range(1, 8)]}
    sizes |= {"lstm_hidden_size": 32, "projection_size": 8, "vocab_size": 500}
    model = ELMoForPreTraining(ELMoConfig(**sizes)).to(DEVICE).train()
    optimizers, states = make_optimizers(model, OptimizationArguments()), None
    spelling = torch.randint(1, 256, (500, 50))
    for _ in range(2):  # optimizers make their states in the first step
        ids = torch.randint(4, 500, (2, 128, 20))
        names = ("character_ids", "backward_character_ids", "forward_targets", "backward_targets")
        inputs = dict(zip(names, [*spelling[ids], *ids], strict=True))
        with fakegpu.recording() as seen:
            output = model(**inputs, initial_states=states)
            output.loss.backward()
            clip_gradients(model.parameters(), 10.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        states = tuple(state.detach() for state in output.final_states)
    assert seen.launches["cell_forward"] == seen.launches["cell_backward"] == 40
    assert seen.num_launches <= 765 and seen.num_waits == 0, f"{seen.num_launches}, {seen.waits}"


WAITS = {  # of the host, by what CUDA does
    "x.cpu()": 1,
    "x.tolist()": 1,
    "x[0, 0].item()": 1,
    "torch.equal(x, x)": 1,
    "bool(mask.any())": 1,
    "mask.nonzero()": 1,
    "rows.unique()": 1,
    "x[mask]": 1,
    "x.masked_select(mask[:, None])": 1,
    "x.__setitem__(mask, x[:3])": 1,
    "x.repeat_interleave(rows.new_ones(6), 0)": 1,
    "x[host_rows]": 1,
    "torch.tensor([1, 2], device=x.device)": 1,
    "host.to(x.device, non_blocking=True)": 1,  # pageable
    "host.pin_memory().to(x.device)": 1,
    "host.pin_memory()[2:].to(x.device, non_blocking=True)": 0,
    "x.to('cpu', non_blocking=True)": 0,  # torch pins the result
    "mask.any()": 0,
    "x.sort()": 0,
    "rows.argsort()": 0,
    "x[rows]": 0,
    "x.__setitem__(rows, x[:2])": 0,
    "x.__setitem__(mask, 0.0)": 0,
    "x.masked_fill(mask[:, None], 0)": 0,
    "x.repeat_interleave(rows.new_ones(6), 0, output_size=6)": 0,
    "x + torch.tensor(1.0)": 0,
}


@simulated
@pytest.mark.parametrize("code, waits", WAITS.items())
def test_what_waits(code, waits, fakegpu):
    names = {"torch": torch, "host": torch.ones(6, 3), "host_rows": torch.tensor([1, 2])}
    names |= {"x": torch.ones(6, 3).to(DEVICE), "mask": torch.tensor([True, False] * 3).to(DEVICE)}
    names["rows"] = names["host_rows"].to(DEVICE)
    with fakegpu.recording() as seen:
        eval(code, names)
    assert seen.num_waits == waits, seen.waits


@simulated
@pytest.mark.parametrize("way, launches", [("steps", 760), ("layers", 622), ("graph", 176)])
def test_launches_and_waits_of_pretraining(way, launches, fakegpu, monkeypatch, tmp_path):
    """A step of `elmo pretrain`: sentences, an adaptive softmax, bfloat16, Muon. Only an entry of the log waits."""
    if way == "steps":
        for name in ("cell_forward", "cell_backward"):
            monkeypatch.setattr(lstm_cuda, name, fakegpu.as_one_launch(getattr(lstm_cuda, name)))
    recorded = {"_step": [], "_log": []}

    def record(name, method):
        def call(*arguments):
            with fakegpu.recording() as seen:
                method(*arguments)
            recorded[name].append(seen)

        monkeypatch.setattr(Pretraining, name, call)

    for name in recorded:
        record(name, getattr(Pretraining, name))
    filters = {"char_embedding_size": 4, "char_cnn_filters": [[width, 4] for width in range(1, 8)]}
    overrides = {**filters, "projection_size": 16, "adaptive_cutoffs": [30, 60]}
    options = {"softmax_type": "adaptive", "optim": "muon", "bf16": True, "config_overrides": overrides}
    options |= {"per_device_train_batch_tokens": 400, "max_steps": 11, "cuda_graph": way == "graph"}
    with computed_by("fused") if way == "steps" else one_launch_a_layer():
        run_on(DEVICE, tmp_path, **options, logging_steps=1)
    seen, log = recorded["_step"][2 if way == "steps" else -1], recorded["_log"][-2]
    # Both directions of two layers at once, in 8 steps or in one launch.
    counted = {"steps": ("cell_forward", 16), "layers": ("layer_forward", 2), "graph": ("graph", 1)}
    name, number = counted[way]
    assert seen.launches[name] == number
    assert seen.num_launches <= launches and seen.num_waits == 0, f"{seen.launches}, {seen.waits}"
    assert log.num_waits == 1, log.waits  # the last call, after training, has nothing to log


GRAPHS = {
    "full": ({"gradient_accumulation_steps": 2}, 1e-5),
    "adaptive": (
        {"softmax_type": "adaptive", "optim": "muon", "config_overrides": {"adaptive_cutoffs": [30, 60]}},
        1e-5,
    ),
    "bfloat16": ({"bf16": True, "gradient_scale": 3.0}, 1e-2),
    "words": ({"config_overrides": {"word_embedding_size": 8}}, 1e-5),
}
IN_GRAPHS = {"max_steps": 14, "save_steps": 12}  # the first 9 batches decide about the room


@contextmanager
def one_launch_a_layer():
    """And graphs, which are simulated, too."""
    if not IS_SIMULATED:
        with elmo_backend("trial"):
            yield
        return
    import fakegpu

    with computed_by("persistent"), layers_by_steps(layers_as_operators()), fakegpu.cuda_graphs():
        yield


@cache
def layers_as_operators():
    """Operators of torch, which a graph of the simulated device records and calls again."""
    library = torch.library.Library("elmo_tests", "DEF")
    for function in (layer_forward, layer_backward):
        library.define(f"{function.__name__}(Tensor[] given, Tensor(a!)[] rooms, Tensor sizes, float[] clips) -> ()")
        library.impl(function.__name__, function, "CPU")
    return library, torch.ops.elmo_tests.layer_forward, torch.ops.elmo_tests.layer_backward


@pytest.mark.parametrize("options, tolerance", GRAPHS.values(), ids=GRAPHS)
def test_pretraining_in_a_graph(options, tolerance, tmp_path):
    widths = {"projection_size": 16, "lstm_hidden_size": 32, "dropout": 0.0}
    options = {**IN_GRAPHS, **options, "config_overrides": {**widths, **options.get("config_overrides", {})}}
    with one_launch_a_layer():
        expected = run_on(DEVICE, tmp_path / "steps", **options)
        found = run_on(DEVICE, tmp_path / "graph", **options, cuda_graph=True)
    assert figures_of(found) == pytest.approx(figures_of(expected), rel=tolerance)
    shares = [entry["in_cuda_graph"] for entry in found.progress.log if "in_cuda_graph" in entry]
    assert shares[0] == 0 and shares[-1] == 1


def test_a_graph_repeats_its_steps_bit_for_bit(tmp_path):
    """Also dropout: the random numbers of a step depend on its seed."""
    options = {**RUN, **IN_GRAPHS, "cuda_graph": True, "config_overrides": {"dropout": 0.5}, "use_cpu": False}
    with one_launch_a_layer(), on_accelerate(DEVICE):
        run = pretrain(tmp_path, **options)
        graph, parameters = run.graph, list(run.plain_model.train().parameters())
        batch = next(iter(run._batches()))
        [prepared] = graph.prepare([batch.inputs], batch.num_predictions)
        found = []
        for compute in (partial(graph.run, prepared), graph._backward):
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                losses = compute()
                found.append([losses.cpu(), *(parameter.grad.cpu().clone() for parameter in parameters)])
                run.plain_model.zero_grad(set_to_none=False)
    replayed, again, other, computed, *_, computed_other = found
    for expected, same in ((replayed, again), (replayed, computed), (other, computed_other)):
        torch.testing.assert_close(same, expected, rtol=0, atol=0)
    assert not replayed[0].equal(other[0])


def test_a_run_in_a_graph_resumes_exactly(tmp_path):
    """The room is part of a checkpoint: another one would round differently."""
    options = {**RUN, **IN_GRAPHS, "cuda_graph": True, "config_overrides": {"dropout": 0.5}, "use_cpu": False}
    again = tmp_path / "again"
    with one_launch_a_layer(), on_accelerate(DEVICE):
        pretrain(tmp_path, **options)
        shutil.copytree(tmp_path / "run" / "checkpoint-12", again / "checkpoint-12")
    with one_launch_a_layer(), on_accelerate(DEVICE):
        pretrain(tmp_path, **options, output_dir=again, resume_from_checkpoint="last")
    assert_same(*(contents(folder / "checkpoint-14") for folder in (again, tmp_path / "run")))


@pytest.mark.parametrize("layers", ["all", "mixed"])
def test_embedding(layers, tmp_path):
    """`elmo embed` writes the same vectors on both devices."""
    text = tmp_path / "c.txt"
    text.write_text("".join("a cat sat on the mat\n"[: 3 + n % 18] + "\n" for n in range(40)))
    save(tmp_path / "m", tiny_model(), ELMoTokenizer())
    options = ["--model", str(tmp_path / "m"), "--input", str(text), "--layers", layers, "--batch_tokens", "20"]
    vectors = []
    for device in ("cpu", DEVICE):
        output = tmp_path / f"{device}.hdf5"
        embed.main([*options, "--output", str(output), "--device", device])
        with h5py.File(output) as file:
            vectors.append({name: torch.from_numpy(file[name][()]) for name in file if name.isdigit()})
    assert len(vectors[0]) == 40
    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-3, atol=1e-4)


@simulated
@pytest.mark.parametrize("layers", ["all", "top", "average", "mixed"])
def test_waits_of_embedding(layers, fakegpu):
    """A block of several batches waits once, for the copies of its vectors into pinned memory."""
    model, tokenizer = tiny_model().to(DEVICE), ELMoTokenizer()
    lines = [to_line("", "a cat " * (1 + n % 7), False, "word") for n in range(30)]
    block = encode_block(lines, tokenizer, 40)
    compute_block(block, model, layers)  # tables of the encoder
    with fakegpu.recording() as seen:
        computed = compute_block(block, model, layers)
    assert len(block.batches) > 5 and seen.num_waits == 0, seen.waits
    assert all(layer.is_pinned() for batch in computed.layers for layer in batch)
    with fakegpu.recording() as seen:
        finish_block(computed, "none", "float32")
    assert [kind for kind, _ in seen.waits] == ["event"] and seen.num_waits == 1, seen.waits


@simulated
def test_the_benchmark_of_a_device(monkeypatch, tmp_path):
    """Every path is right, and a wrong kernel gets no figure."""
    options = ["--device", DEVICE, "--preset", "tiny", "--rounds", "1", "--batches", "2x6", "--training_batches", "4x6"]
    figures = benchmark.main([*options, "--output", str(tmp_path / "report.json")])
    stored = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert stored["rows"] == figures["rows"] and stored["conditions"]["device"] == DEVICE
    names = {f"this package, {precision}" for precision in ("float32", "bfloat16")}
    for part, batch in (("inference", "2x6"), ("training", "4x6")):
        rows = {row["implementation"]: row for row in stored["rows"] if (row["part"], row["batch"]) == (part, batch)}
        assert len(rows) == 9 and rows.keys() >= names and all(name in "\n".join(stored["tables"]) for name in rows)
        assert {"launches", "megabytes"} <= rows["this package, float32"].keys()
    monkeypatch.setattr(lstm_cuda, "cell_forward", lambda *rooms: [room.zero_() for room in rooms[2:5]])
    with pytest.raises(ValueError, match="'this package, float32' is wrong.*no speed is reported"):
        benchmark.main(options)
