"""Trains a tagger on an ELMo model: named entities, parts of speech, any label a word.

    python -m modeling_elmo.run_scripts.run_ner --model_name_or_path elmo \
        --train_file train.conll --validation_file dev.conll --test_file test.conll --output_dir tagger

The network of the paper's named entities (section 4): biLSTMs and a CRF over `[x_k; ELMo_k]`. `--compare_baseline`
trains the same network without ELMo too; `--seeds 5` tells mean and deviation; `--ablation` gives the paper's tables.
"""

from collections.abc import Iterable

from transformers import DataCollatorForTokenClassification

from modeling_elmo import ELMoForTokenClassification
from modeling_elmo.run_scripts.fine_tuning.data import TaggingDataArguments, label_names, read_tagging, take_samples
from modeling_elmo.run_scripts.fine_tuning.experiments import ExperimentArguments, TaskTrainingArguments, fine_tune
from modeling_elmo.run_scripts.fine_tuning.metrics import marks_entities, tagging_scores
from modeling_elmo.run_scripts.fine_tuning.task import (
    HeadArguments,
    Predicted,
    Record,
    Task,
    log_mean_probabilities,
    source_of,
)
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run


def main(arguments: list[str] | None = None) -> list[Record]:
    parser = ProgramParser(
        HeadArguments, TaggingDataArguments, ExperimentArguments, TaskTrainingArguments, description=__doc__
    )
    head, data, experiment, training = parser.parse(arguments)
    return fine_tune(tagging_task(data, head.max_length), head, experiment, training)


def tagging_task(arguments: TaggingDataArguments, max_length: int | None = None) -> Task:
    data = read_tagging(arguments)
    labels = label_names(data, "tags")
    numbers = {label: number for number, label in enumerate(labels)}
    is_spans = marks_entities(labels)

    def encode(batch, tokenizer, is_training):
        limits = {"truncation": True, "max_length": max_length} if is_training and max_length is not None else {}
        encoding = tokenizer(batch["tokens"], is_split_into_words=True, **limits)
        tags = [[-100, *(numbers[tag] for tag in tags), -100] for tags in batch["tags"]]
        kept = [row[: len(ids) - 1] + [-100] for row, ids in zip(tags, encoding["input_ids"], strict=True)]
        return {**encoding, "labels": kept}

    def tags_of(found: Predicted) -> tuple[list[list[str]], list[list[str]]]:
        rows = zip(found.logits.argmax(-1), found.labels, strict=True)
        pairs = [(predicted[gold != -100], gold[gold != -100]) for predicted, gold in rows]
        predicted, wanted = ([[labels[number] for number in row] for row in side] for side in zip(*pairs, strict=True))
        return predicted, wanted

    def predictions(found: Predicted) -> Iterable[Record]:
        for example, tags in zip(found.examples, tags_of(found)[0], strict=True):
            yield {"tokens": example["tokens"], "tags": example["tags"], "predicted": tags}

    return Task(
        name="ner" if is_spans else "tagging",
        model_class=ELMoForTokenClassification,
        metric="f1" if is_spans else "accuracy",
        data=take_samples(data, arguments),
        source=source_of(arguments),
        settings=vars(arguments),
        config={"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": numbers},
        elmo_placement="input",
        scalar_mix_l2=0.1,
        words=lambda split, _: split["tokens"],
        encode=encode,
        collator=DataCollatorForTokenClassification,
        scores=lambda found: tagging_scores(*tags_of(found), are_entities=is_spans),
        predictions=predictions,
        average=log_mean_probabilities,
    )


if __name__ == "__main__":
    run(main)
