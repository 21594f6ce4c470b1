"""Small task heads of all kinds with batches and targets, their networks, and pipelines."""

import re

import pytest
import torch
import torch.nn.functional as F
from bilm_models import make_tokenizer, seeded
from errors import refused

from modeling_elmo import (
    ELMoConfig,
    ELMoForCoreferenceResolution,
    ELMoForQuestionAnswering,
    ELMoForSemanticRoleLabeling,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
)
from modeling_elmo.heads.coreference_pipeline import ELMoCoreferencePipeline
from modeling_elmo.heads.packed_texts import PackedTexts
from modeling_elmo.heads.reader import SpanReader
from modeling_elmo.heads.role_labeler_pipeline import ELMoSemanticRolePipeline
from modeling_elmo.heads.spans import RankedSpans, gold_clusters, marginal_loss, mention_loss
from modeling_elmo.inputs import pad

NAMES = ["O", "B-X", "I-X", "B-Y", "I-Y"]
WORDS = [4, 0, 1, 3]  # in each row, between two markers
PAIRS = [(2, 3), (4, 1), (1, 1), (3, 5)]
PLACEMENTS = {
    "input": {"elmo_placement": "input"},
    "output": {"elmo_placement": "output"},
    "both": {"elmo_placement": "both"},
    "no_elmo": {"use_elmo": False},
}
PAPER_NETWORKS = {
    "tagger": (ELMoForTokenClassification, {}),
    "bcn": (ELMoForSequenceClassification, {"classifier": "bcn"}),
    "esim": (ELMoForSequenceClassification, {"classifier": "esim"}),
    "reader": (ELMoForQuestionAnswering, {}),
    "roles": (ELMoForSemanticRoleLabeling, {"task_num_layers": 3}),
}
HEADS = {
    f"{name}-{place}": (cls, {**network, **placement})
    for name, (cls, network) in PAPER_NETWORKS.items()
    for place, placement in PLACEMENTS.items()
}
HEADS["tagger-between"] = ELMoForTokenClassification, {"elmo_placement": "between"}
HEADS["tagger-linear"] = ELMoForTokenClassification, {"head": "linear"}
HEADS["sequence-linear"] = ELMoForSequenceClassification, {"head": "linear"}
HEADS["reader-linear"] = ELMoForQuestionAnswering, {"head": "linear"}
HEADS["roles-linear"] = ELMoForSemanticRoleLabeling, {"head": "linear"}
HEADS["sequence-paper-linear"] = ELMoForSequenceClassification, {"classifier": "linear"}
every_head = pytest.mark.parametrize("cls, options", HEADS.values(), ids=HEADS)
ON_ELMO = {name: head for name, head in HEADS.items() if head[1].get("use_elmo", True)}
every_head_on_elmo = pytest.mark.parametrize("cls, options", ON_ELMO.values(), ids=ON_ELMO)
every_paper_network = pytest.mark.parametrize("cls, options", PAPER_NETWORKS.values(), ids=PAPER_NETWORKS)
every_class = pytest.mark.parametrize("cls", dict.fromkeys(cls for cls, _ in PAPER_NETWORKS.values()))


def make_config(**overrides):
    """Without dropout."""
    sizes = {"char_cnn_filters": [[1, 3], [2, 5]], "max_word_length": 9, "char_vocab_size": 30, "vocab_size": 12}
    sizes |= {"lstm_hidden_size": 21, "projection_size": 7, "dropout": 0.0, "elmo_dropout": 0.0, "task_dropout": 0.0}
    sizes |= {"task_hidden_size": 5, "task_word_embedding_size": 4, "task_char_embedding_size": 3}
    sizes |= {"task_char_cnn_filters": [[2, 3], [3, 2]]}
    if not {"num_labels", "id2label"} & overrides.keys():
        sizes["id2label"] = dict(enumerate(NAMES))
    return ELMoConfig.from_preset("tiny", **{**sizes, **overrides})


def on_rows(network, x_BTD, mask_BT, *more):
    """What a network of packed texts gives at the tokens of padded rows, zeros at padding."""
    texts = PackedTexts(mask_BT, mask_BT)
    found = network(texts.pack(x_BTD[mask_BT]), texts, *(texts.pack(each[mask_BT]) for each in more))
    return pad(texts.unpack(found, int(mask_BT.sum())), mask_BT)


def make_model(cls, seed=0, **overrides):
    torch.manual_seed(seed)
    return cls(make_config(**overrides)).eval()


def make_batch(config, rows=WORDS, side="right", extra=0):
    """Rows of random words between markers. Two numbers make a row a pair; each word has one spelling."""
    generator = seeded()
    spelling = torch.randint(
        1, config.char_vocab_size, (config.vocab_size, config.max_word_length), generator=generator
    )
    spelling[config.pad_token_id] = 0
    ids, types = [], []
    for row in rows:
        counts = row if isinstance(row, tuple) else (row,)
        texts = [[1, *torch.randint(4, config.vocab_size, (n,), generator=generator).tolist(), 2] for n in counts]
        ids.append([word for text in texts for word in text])
        types.append([number for number, text in enumerate(texts) for _ in text])
    time = extra + max(map(len, ids))

    def padded(rows):
        rows = [torch.tensor(row) for row in rows]
        before = [(time - len(row)) * (side == "left") for row in rows]
        return torch.stack([F.pad(row, (n, time - len(row) - n)) for row, n in zip(rows, before, strict=True)])

    batch = {"input_ids": padded(ids), "attention_mask": padded([[1] * len(row) for row in ids])}
    batch["character_ids"] = spelling[batch["input_ids"]]
    return batch | ({"token_type_ids": padded(types)} if any(map(any, types)) else {})


def batch_of(model, **options):
    """Single texts for taggers, also with a predicate for roles; pairs for other networks."""
    is_tagger = isinstance(model, (ELMoForTokenClassification, ELMoForSemanticRoleLabeling))
    batch = make_batch(model.config, WORDS if is_tagger else PAIRS, **options)
    return marked(batch) if isinstance(model, ELMoForSemanticRoleLabeling) else batch


def marked(batch):
    """The batch with the second word of each row as its predicate, or its only word."""
    words = batch["input_ids"] >= 4
    chosen = words & (words.cumsum(1) == words.sum(1, keepdim=True).clamp(max=2))
    return {**batch, "token_type_ids": chosen.long()}


def text_of(model, batch):
    """What the biLM reads of a batch: not the marks of predicates."""
    is_roles = isinstance(model, ELMoForSemanticRoleLabeling)
    return {name: tensor for name, tensor in batch.items() if not (is_roles and name == "token_type_ids")}


def targets_of(model, batch):
    if isinstance(model, ELMoForQuestionAnswering):  # the last word, the first, none
        words = (batch["token_type_ids"] == 1) & (batch["input_ids"] >= 4)
        first, last = (places.byte().argmax(1) for places in (words, (words.cumsum(1) == words.sum(1, True)) & words))
        last[2] = first[2] = batch["attention_mask"][2].argmax()
        return {"start_positions": first, "end_positions": last}
    if isinstance(model, (ELMoForTokenClassification, ELMoForSemanticRoleLabeling)):
        ids, words = batch["input_ids"], batch["input_ids"] >= 4
        labels = {"labels": (ids % model.num_labels).masked_fill(~words, -100)}
        is_roles = isinstance(model, ELMoForSemanticRoleLabeling)
        return labels | ({"predicate_labels": (ids % 2).masked_fill(~words, -100)} if is_roles else {})
    return {"labels": torch.arange(len(batch["input_ids"])) % model.num_labels}


def logits_of(output):
    """Logits; for readers, starts and ends stacked."""
    return output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], -1)


def row_of(batch, number):
    """One row, without its padding."""
    real = batch["attention_mask"][number].bool()
    return {name: tensor[number][real][None] for name, tensor in batch.items()}


def stirred(model, std=1.0, seed=0):
    """The model with random layer weights, CRF and output layer."""
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_output = (
                name.startswith(("classifier.", "predicate_classifier.", "qa_outputs.", "reader."))
                and "layers" not in name
            )
            if "crf." in name or "_mix." in name or is_output:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model


def aligned(model):
    """The model with copies of its parameters. Loaded ones are views of a file, where MKL may round differently."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def read_by(model, module, batch):
    """The arguments of a module when the model reads the batch."""
    seen = []
    handle = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return seen[0]


def fails(message, model, *args, **kwargs):
    with refused(re.compile(message, re.DOTALL)):
        model(*args, **kwargs)


def check_weights_on_disk(model, call, folder, parts=None):
    """`device_map` may put each part on disk: its weights are there only inside the calls of its modules."""
    model.save_pretrained(folder)
    for part in parts or [name for name, part in model.named_children() if [*part.parameters()]]:
        parent = part.rpartition(".")[0]
        names = [name for name, _ in model.named_modules() if name.rpartition(".")[0] in ("", parent)]
        places = {name: "disk" if name == part else "cpu" for name in names if name not in ("", parent)}
        loaded = type(model).from_pretrained(folder, device_map=places, offload_folder=folder / "disk").eval()
        assert all(parameter.is_meta for parameter in loaded.get_submodule(part).parameters())
        with torch.no_grad():
            torch.testing.assert_close(call(loaded), call(model), msg=part)


# Networks without their models

WIDTH, ELMO, LABELS = 5, 4, 3
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


def make_network_inputs(layout, elmo=ELMO):
    """Words of both texts, with large values at padding."""
    generator = seeded(1)
    inputs = torch.randn(*layout.shape, WIDTH + elmo, generator=generator, dtype=torch.float64)
    inputs[layout == 0] = 1e3
    return inputs[..., :WIDTH], layout == 1, layout == 2, inputs[..., WIDTH:] if elmo else None


def run_network(network, inputs, first, second, elmo):
    """A network on padded rows: logits, or a reader's scores of starts and ends at all positions, and of no answer."""
    mask = torch.ones_like(first)  # a network reads the tokens of its texts alone
    words, vectors = inputs[mask], None if elmo is None else elmo[mask]
    if not isinstance(network, SpanReader):
        texts = PackedTexts(first if second is first else torch.cat([first, second]), mask)
        return network(words, texts, len(inputs), vectors)
    contexts = PackedTexts(second, mask)
    *scores, none = network(words, PackedTexts(first, mask), contexts, vectors)
    return *(contexts.unpack(each, len(words)).view(mask.shape) for each in scores), none


def mixed(layers, mix):
    """Equation 1."""
    shares = mix.weights.detach().exp() / mix.weights.detach().exp().sum()
    return mix.gamma.detach() * sum(share * layer for share, layer in zip(shares, layers, strict=True))


def losses_of_spans(spans: RankedSpans, gold):
    given = torch.tensor([[*span, cluster] for span, cluster in gold.items()]).view(-1, 3).unbind(1)
    kept = gold_clusters(spans.first_K, spans.last_K, *given)
    every = gold_clusters(*spans.candidates[:2], *given)
    return marginal_loss(spans, kept), mention_loss(spans.candidates[2], every)


def make_coreference_pipeline(
    side: str = "right", shift: float = -4.0, plain_signs: bool = False, **options
) -> ELMoCoreferencePipeline:
    """A random model that finds clusters of different sizes."""
    how = {"padding_side": side, "pre_tokenization": "treebank", "plain_signs": plain_signs}
    tokenizer = make_tokenizer(**how)
    torch.manual_seed(0)
    options = {"task_hidden_size": 6, "max_span_width": 3, "max_antecedents": 7, "train_singletons": True} | options
    model = ELMoForCoreferenceResolution(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), **options)).eval()
    with torch.no_grad():
        for parameter in model.ranker.parameters():
            parameter.normal_(std=0.3)
        model.ranker.pair_scorer.output.bias += shift  # some spans stay alone
    return ELMoCoreferencePipeline(model=model, tokenizer=tokenizer)


ROLE_NAMES = ["O", "B-ARG0", "I-ARG0", "B-V", "I-V", "B-C-V", "B-R-ARG0"]


def make_role_pipeline(side: str = "right", **options) -> ELMoSemanticRolePipeline:
    tokenizer = make_tokenizer(padding_side=side)
    torch.manual_seed(0)
    sizes = {"task_hidden_size": 6, "task_num_layers": 2, "dropout": 0.0, "id2label": dict(enumerate(ROLE_NAMES))}
    config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), **sizes, **options)
    model = ELMoForSemanticRoleLabeling(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("elmo."):
                parameter.normal_(std=0.7)
    return ELMoSemanticRolePipeline(model=model, tokenizer=tokenizer)
