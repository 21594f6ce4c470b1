"""Measures the perplexity of a biLM on held-out text, with everything that is needed to compare it.

    elmo perplexity --model elmo --validation_file heldout.txt --is_split_into_words

The softmax is always over all words, never over a sample. The predictions are the words, and `</S>` forward or `<S>`
backward. `--context sentence` reads each sentence on its own from a zero state, as the model does at inference.
`--context stream` carries the states from sentence to sentence, as the original does. Both directions read the
sentences in file order. With `--per_device_eval_batch_size 1` the figure is what bilm-tf's `test()` computes.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from modeling_elmo import ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.corpus import Corpus, HeldOutArguments
from modeling_elmo.run_scripts.pretraining.evaluation import Perplexity, check_context, evaluate, held_out_batches
from modeling_elmo.run_scripts.program.command_line import ProgramParser, option, print_conclusion, run
from modeling_elmo.run_scripts.program.files import check_output, write_json
from modeling_elmo.run_scripts.program.models import check_model, load_pretrained
from modeling_elmo.run_scripts.program.processes import check_processes, has_accelerator

BATCH_SIZES = {"sentence": "per_device_eval_batch_tokens", "stream": "per_device_eval_batch_size"}


@dataclass(kw_only=True)
class PerplexityArguments(HeldOutArguments):
    model: str = option(..., "Folder or Hub name of a model with a softmax, and of its tokenizer.")
    per_device_eval_batch_tokens: int = option(4096, "Maximum tokens per batch, including padding (context sentence).")
    per_device_eval_batch_size: int = option(16, "Number of pieces of text read in parallel (context stream).")
    output: str | None = option(None, "JSON file for the figures.")

    def __post_init__(self):
        check_context(self, self.context, {context: [size] for context, size in BATCH_SIZES.items()})
        if self.validation_file and self.dataset is not None:
            raise ValueError("Received --validation_file and --dataset; pass one of them.")
        check_output(self.output)


def main(arguments: list[str] | None = None) -> Perplexity:
    parsed = ProgramParser(PerplexityArguments, description=__doc__).parse(arguments)
    accelerator = Accelerator(cpu=not has_accelerator())
    check_processes(accelerator.num_processes)
    check_model(parsed.model)
    tokenizer = load_pretrained(ELMoTokenizer, parsed.model)
    model = load_pretrained(ELMoForPreTraining, parsed.model, dtype=torch.float32).to(accelerator.device)
    size = getattr(parsed, BATCH_SIZES[parsed.context])
    corpus = Corpus.held_out(parsed)
    batches = held_out_batches(corpus, parsed.is_split_into_words, parsed.context, size, tokenizer, accelerator)
    batches = tqdm(batches, unit=" batches", desc="reading", disable=not accelerator.is_main_process)
    found = evaluate(model, batches, accelerator)
    if not math.isfinite(found.perplexity):
        raise ValueError(f"{parsed.model}: the perplexity is {found.perplexity}. Pass a model that was trained.")
    accelerator.print(f"{parsed.model}: {found}")
    if accelerator.is_main_process:
        words = f"{found.perplexity:,.1f} equally likely words"
        print_conclusion(
            f"The model hesitates between {words} of {found.vocabulary_size:,}; compare models of one vocabulary only.",
            *("elmo", "ner", "--model_name_or_path", parsed.model),
            *("--train_file", "TRAIN", "--validation_file", "DEV", "--output_dir", "tagger"),
        )
    if parsed.output and accelerator.is_main_process:
        write_json(Path(parsed.output), asdict(found))
    return found


if __name__ == "__main__":
    run(main)
