"""The forward direction of a biLM as a causal language model, for clients that measure surprisal.

Shape suffixes: B rows; T time; N real tokens of the batch, row after row; M some of them; P projection; S rows in the
order of packing; U different words.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from .inputs import (
    forward_of_model,
    on_host,
    option_that_takes_labels,
    pad,
    starting_states,
    states_of_sequences,
    warn_once,
)
from .modeling_elmo import ELMoForPreTraining, shifted_targets
from .softmax import CHUNK_LOGITS


class ELMoForCausalLM(ELMoForPreTraining):
    """Predicts each word from the words before it: the forward direction of the biLM (section 3.1).

    `<S>` predicts the first word, and the last word `</S>`. The backward direction is there and frozen, so that a saved
    folder is whole; `score` reads both. There is no `generate`: the model reads the characters of words, and predicts
    words of a vocabulary.
    """

    def _freeze_as_configured(self):
        self.elmo.backward_lstm.requires_grad_(False)

    @forward_of_model
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutput:
        """Computes log-probabilities of the next word, and the mean loss of the words if `labels` are given.

        Args:
            character_ids, input_ids, attention_mask: as in `ELMoModel`. Padding may be on either side.
            labels: `(batch, time)`, the word id at each position (pass `input_ids`), -100 where nothing is predicted.
                They are shifted inside. A word outside the vocabulary is `<UNK>`.
            output_hidden_states: whether to return the forward half of each layer, `(batch, time, projection_size)`.
            logits_to_keep: number of last positions that have logits. 0: all.
            num_items_in_batch: number of predictions in all accumulated batches; the loss is divided by it.
            use_cache: accepted for compatibility; there is no cache.

        Returns:
            `loss`, in nats. `logits` `(batch, time, vocab_size)`, log-probabilities under the full softmax: zeros at
            padding, and `None` in training with labels, which needs the loss only. `hidden_states`, on request.

        Raises:
            ValueError: the checkpoint has no softmax, or `labels` or `logits_to_keep` do not fit.
        """
        self.prepare_softmax()
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise ValueError(f"`logits_to_keep` is {logits_to_keep!r}; pass a number of positions, 0 for all.")
        labels = on_host(labels)
        batch = self.elmo.read_tokens(on_host(character_ids), input_ids, attention_mask)
        states = starting_states(self.config, None, batch.words_UP, batch.shape[0])
        start = states_of_sequences(states, 0, batch.rows_S)
        packed_outputs, *_ = self.elmo.forward_lstm(batch.left_to_right(), *start)
        outputs = []  # in reading order
        for output_NP in packed_outputs:
            outputs.append(torch.empty_like(output_NP).index_copy(0, batch.forward_N, output_NP))
        loss = logits = None
        if labels is not None:
            predictions = [(outputs[-1], shifted_targets(labels, 0, batch, self.config))]
            loss, _ = self._losses(predictions, num_items_in_batch, candidates=None)
        elif self.training and torch.is_grad_enabled():
            self._warn_without_labels()
        if labels is None or not self.training:
            first = max(0, batch.shape[1] - logits_to_keep) if logits_to_keep else 0
            top_NP = F.dropout(outputs[-1], self.config.dropout, self.training)
            kept_NP = top_NP[batch.positions_N % batch.shape[1] >= first]
            some = kept_NP.split(max(1, CHUNK_LOGITS // self.config.vocab_size))
            logits = pad(torch.cat([self.softmax(each_MP) for each_MP in some]), batch.mask_BT[:, first:])
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        layers = [F.embedding(batch.index_N, batch.words_UP), *outputs] if show else []
        hidden_states = tuple(pad(layer_NP, batch.mask_BT) for layer_NP in layers) or None
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=hidden_states)

    def _warn_without_labels(self):
        reason = "A loss of your own must shift the labels, because `logits` predict the next word."
        if option_that_takes_labels() == "label_smoothing_factor":
            reason = (
                "Trainer takes them away for its `label_smoothing_factor`, and does not shift them, so that the model "
                "would learn to repeat words; leave this option out."
            )
        warn_once(self, f"ELMoForCausalLM receives no `labels` in training. {reason}")

    def generate(self, *_: Any, **__: Any):
        raise NotImplementedError("ELMo does not generate text; `predict_words` gives the likely words at a position.")
