"""What a biLM says about words: the log-probabilities of a text, and the most likely words at each position.

Shape suffixes: N real tokens of the batch; M pairs of neighboring tokens; C a chunk of tokens; P `projection_size`; V
words of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput, logging

from .configuration_elmo import ELMoConfig
from .inputs import PackedBatch, States, check_range
from .kernels.torch_state import to_device
from .softmax import CHUNK_LOGITS, ELMoSoftmax

logger = logging.get_logger(__name__)


@dataclass
class ELMoScores(ModelOutput):
    """Output of `ELMoForPreTraining.score`. The sum over a row is the log-probability of its text.

    Shape:
        forward_log_probs: `(batch, time)`, of each word given the words before it, in nats; 0 at the first of a row.
        backward_log_probs: `(batch, time)`, of each word given the words after it; 0 at the last of a row.
    """

    forward_log_probs: Tensor | None = None
    backward_log_probs: Tensor | None = None


@dataclass
class ELMoPredictions(ModelOutput):
    """Output of `ELMoForPreTraining.predict_words`: `<PAD>` and 0 where nothing is predicted.

    Shape:
        word_ids: `(batch, time, top_k)`, the most likely words at each position, best first.
        log_probs: `(batch, time, top_k)`, in nats.
    """

    word_ids: Tensor | None = None
    log_probs: Tensor | None = None


class ELMoScoringMixin:
    """`score` and `predict_words` of `ELMoForPreTraining`."""

    config: ELMoConfig
    elmo: Any
    softmax: ELMoSoftmax
    training: bool

    @torch.no_grad()
    def score(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        initial_states: States | None = None,
    ) -> ELMoScores:
        """Log-probabilities of the words of a text in each direction, under the full softmax.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`. The words to score are
                `input_ids`; a word outside the vocabulary gets the probability of `<UNK>`.

        Raises:
            ValueError: the checkpoint has no softmax, or the model is in training mode.
        """
        batch, hidden = self._read_both_ways(character_ids, input_ids, attention_mask, initial_states)
        if input_ids is None:
            raise ValueError("Words are scored by their ids: pass `input_ids` with `character_ids`.")
        scores = []
        for direction, hidden_NP in enumerate(hidden):
            here_M, there_M = neighbor_tokens(direction, batch)
            positions_M = batch.host.positions_N[there_M]
            targets_M = input_ids.cpu().flatten()[positions_M].long()
            check_targets("input_ids", targets_M, self.config)
            _, losses_M = self.softmax(hidden_NP[to_device(here_M, hidden_NP.device)], targets_M)
            positions_M = to_device(positions_M, losses_M.device)
            scores.append(losses_M.new_zeros(batch.shape.numel()).index_copy_(0, positions_M, -losses_M))
        return ELMoScores(*(score.view(batch.shape) for score in scores))

    @torch.no_grad()
    def predict_words(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        initial_states: States | None = None,
        top_k: int = 5,
        direction: str = "both",
    ) -> ELMoPredictions:
        """The most likely words at each position, given the other words of the text.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`.
            top_k: number of words per position.
            direction: `"forward"`, given the words before; `"backward"`, given the words after; `"both"`, the
                normalized product of the two distributions, which are independent. The first and the last position of a
                row have one direction only.

        Raises:
            ValueError: as in `score`; an unknown direction; a `top_k` larger than the vocabulary.
        """
        directions = {"forward": [0], "backward": [1], "both": [0, 1]}.get(direction)
        if directions is None:
            raise ValueError(f"`direction` is {direction!r}; pass 'forward', 'backward' or 'both'.")
        if not 1 <= top_k < self.config.vocab_size:
            raise ValueError(f"`top_k` is {top_k}; pass 1 to {self.config.vocab_size - 1}, the words without <PAD>.")
        batch, hidden = self._read_both_ways(character_ids, input_ids, attention_mask, initial_states)
        sources = []  # by direction, the token that predicts each token, or -1
        for index in directions:
            here_M, there_M = (to_device(rows_M, hidden[index].device) for rows_M in neighbor_tokens(index, batch))
            sources.append(here_M.new_full((len(hidden[index]),), -1).index_copy_(0, there_M, here_M))
        word_ids = batch.positions_N.new_zeros(batch.shape.numel(), top_k) + self.config.pad_token_id
        log_probs = torch.zeros_like(word_ids, dtype=torch.promote_types(hidden[0].dtype, torch.float32))
        predicted_N = (torch.stack(sources) >= 0).any(0).nonzero()[:, 0]
        for some_C in predicted_N.split(max(1, CHUNK_LOGITS // self.config.vocab_size)):
            found = [  # 0 where a direction predicts nothing
                self.softmax(hidden[index][source_N[some_C]]).masked_fill((source_N[some_C] < 0)[:, None], 0)
                for index, source_N in zip(directions, sources, strict=True)
            ]
            log_probs_CV = sum(found).log_softmax(-1)
            positions_C = batch.positions_N[some_C]
            log_probs[positions_C], word_ids[positions_C] = log_probs_CV.topk(top_k)
        shape = *batch.shape, top_k
        return ELMoPredictions(word_ids.view(shape), log_probs.view(shape))

    def _read_both_ways(self, character_ids, input_ids, attention_mask, initial_states):
        """The token batch, and the top output `(tokens, projection_size)` of each direction in reading order."""
        if self.training:
            raise ValueError("The model is in training mode, with dropout; call `model.eval()` first.")
        self.prepare_softmax()
        batch = self.elmo.read_tokens(character_ids, input_ids, attention_mask)
        both = self.elmo.run(batch, initial_states=initial_states)
        tops = []
        for order_N, outputs in ((batch.forward_N, both.forward), (batch.backward_N, both.backward)):
            tops.append(torch.empty_like(outputs[-1]).index_copy_(0, order_N, outputs[-1]))
        return batch, tops

    def prepare_softmax(self):
        """Checks that the softmax can predict words. Training starts a new one if the checkpoint has none.

        Raises:
            ValueError: there is nothing to predict, or the softmax is not the one that the configuration asks for.
        """
        if self.config.vocab_size <= 4:
            raise ValueError(
                "The vocabulary has only special words, so there is nothing to predict. Build a vocabulary with `elmo "
                "vocabulary` and call `resize_token_embeddings(len(tokenizer))`; with `elmo pretrain` pass "
                "--vocabulary_size NUMBER, and for a checkpoint --vocabulary replace."
            )
        self.config.check_softmax()
        if not self.config.has_softmax and not self.training:
            raise ValueError("This checkpoint has no softmax for probabilities; convert it with one, or train one.")
        if not self.config.has_softmax:
            logger.warning("The checkpoint has no such softmax: training starts a new one.")
            self.config.has_softmax = True


def neighbor_tokens(direction: int, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The real tokens that predict a neighbor in their row, and these neighbors: next (0) or preceding (1).

    Both are `(M,)`, on the CPU.
    """
    rows_N = batch.host.positions_N // batch.shape[1]
    first_M = (rows_N[1:] == rows_N[:-1]).nonzero(as_tuple=True)[0]
    return (first_M + 1, first_M) if direction else (first_M, first_M + 1)


def check_targets(name: str, targets_M: Tensor, config: ELMoConfig):
    advice = "use the tokenizer that was saved with the model, or call `resize_token_embeddings(len(tokenizer))`"
    check_range(name, targets_M, config.vocab_size, advice)
    if (targets_M == config.pad_token_id).any():
        raise ValueError(f"`{name}` has <PAD> at a word, which is never predicted; pass -100 where nothing is.")
