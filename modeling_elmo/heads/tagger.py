"""Tags of words: biLSTMs and a CRF (Peters et al. 2018, section 4, named entities), or a linear layer.

For the shape suffixes, see `task_model.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..configuration_elmo import ELMoConfig
from ..inputs import NO_LABEL, pad, warn_once, word_mask
from .crf import LinearChainCRF, bio_constraints, tags_that_are_not_bio
from .packed_texts import rows_as_texts, with_elmo
from .recurrence import TaskLSTM, VariationalDropout
from .task_model import ELMoTaskModel, TaskInputs, reads_batch


@dataclass
class ELMoTokenClassifierOutput(ModelOutput):
    """Output of `ELMoForTokenClassification`.

    Shape:
        loss: `()`. Linear head: mean cross-entropy of the labels. CRF: mean over rows of `-log p(labels)`.
        logits: `(batch, time, num_labels)`. CRF in eval mode: log-probabilities. Otherwise: scores.
        predictions: `(batch, time)`, the best label sequence of a CRF in eval mode, -100 at positions without a word.
        hidden_states: as in `ELMoModelOutput`, on request.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    predictions: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class ELMoForTokenClassification(ELMoTaskModel):
    """Labels each word: biLSTMs over `[x_k; ELMo_k]` and a CRF (section 4, named entities), or a linear layer.

    With the CRF in eval mode, `logits` are the log-probability of each label at each word given the whole text, under
    the constraints of label names such as `B-LOC` and `I-LOC`. At each word, the label of the best sequence (Viterbi)
    is swapped with the most likely label. The result is still a distribution, and its argmax is `predictions`.

    Leave Trainer's `label_smoothing_factor` at 0: it replaces the CRF's loss by a loss of single labels.
    """

    network = "tagger"

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        # Trainer divides a CRF's loss, a mean over rows, by the accumulation steps.
        self.accepts_loss_kwargs = self.is_linear
        self.encoder = None
        self.crf = None
        size = self.input_size
        if not self.is_linear:
            between_size = config.hidden_size if self.between_mix else 0
            self.encoder = TaskLSTM(size, self.task_hidden_size, self.task_num_layers, self.task_dropout, between_size)
            self.encoder_dropout = VariationalDropout(self.task_dropout)
            self.crf = LinearChainCRF(config.num_labels)
            size = self.encoder.output_size + self.output_elmo_size
        self.classifier = nn.Linear(size, config.num_labels)
        self.post_init()

    def label_layers(self) -> list[nn.Module]:
        return [layer for layer in (self.classifier, self.crf) if layer is not None]

    def save_pretrained(self, *args, **kwargs):
        """As in `ELMoPreTrainedModel`, with a warning if transformers' pipeline cannot group the labels."""
        labels = list(map(str, self.config.id2label.values()))
        prefixes = {label[:2] for label in labels}  # the pipeline joins equal labels without prefixes
        if prefixes & {"E-", "S-", "L-", "U-", "M-"} and prefixes & {"O", "B-", "I-"}:
            others = tags_that_are_not_bio(labels)
            warn_once(
                self,
                f"The labels {others} are not BIO tags (B-PER, I-PER), and transformers' pipeline groups the words of "
                "BIO entities only: others are returned in pieces. Train with BIO tags, or group the words yourself.",
            )
        super().save_pretrained(*args, **kwargs)

    @reads_batch
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        elmo_hidden_states: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ELMoTokenClassifierOutput:
        """Computes the logits of every label, and the loss if `labels` are given.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds: as in `ELMoModel`. A CRF needs
                `input_ids` to leave the markers out of its chain.
            elmo_hidden_states: `(batch, layers + 1, time, hidden_size)`, layers of the frozen biLM, computed before.
            labels: `(batch, time)`, label ids, -100 where there is none. At a word, -100 means unknown: the CRF's
                likelihood is then the sum over all labels of the word.
            output_hidden_states: whether to return the layers of the biLM.
            num_items_in_batch: linear head: number of labels in all accumulated batches; the loss is divided by it.
        """
        inputs = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        logits = pad(self._scores(inputs), inputs.mask_BT)
        loss = None
        predictions = None
        if labels is None:
            self._warn_without_labels(None if self.crf is None else "the CRF")
        else:
            labels = self._checked_labels(labels, inputs.mask_BT)
        if self.crf is not None:
            words_BT = word_mask(self.config, inputs.mask_BT, input_ids, inputs_embeds)
            if labels is not None:
                loss = self.penalty() - self.crf.log_likelihood(logits, labels, words_BT).mean()
            if not self.training:
                logits, predictions = self._decode(logits, words_BT)
        elif labels is not None:
            loss = self._linear_loss(logits, labels, num_items_in_batch)
        return ELMoTokenClassifierOutput(
            loss=loss,
            logits=logits,
            predictions=predictions,
            hidden_states=self._requested(inputs, output_hidden_states),
        )

    def _scores(self, inputs: TaskInputs) -> Tensor:
        if self.encoder is None:
            return self.classifier(inputs.tokens_ND)
        texts = rows_as_texts(inputs.mask_BT)
        between_NE = None if inputs.between_NE is None else texts.pack(inputs.between_NE)
        hidden_NH = self.encoder(texts.pack(inputs.tokens_ND), texts, between_NE)
        hidden_NH = self.encoder_dropout(hidden_NH, texts.text_N)
        hidden_NH = with_elmo(hidden_NH, texts, inputs.output_NE)
        return texts.unpack(self.classifier(hidden_NH), hidden_NH.shape[0])

    def _linear_loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        count = (labels != NO_LABEL).sum()
        if num_items_in_batch is None:
            num_items_in_batch = count
        items = torch.as_tensor(num_items_in_batch, device=count.device).clamp(min=1)
        loss = self.loss_function(logits, labels, self.config, num_items_in_batch=items)
        return loss + count / items * self.penalty()

    def _decode(self, emissions: Tensor, words_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities in which each word's label of the best sequence has the highest, and the best sequence."""
        predictions, logits = self.crf.decode(emissions, words_BT, bio_constraints(self.label_names()))
        likeliest = logits.argmax(-1, keepdim=True)
        best = predictions[..., None]
        best = torch.where(best == NO_LABEL, likeliest, best)
        swapped = logits.scatter(-1, likeliest, logits.gather(-1, best))
        swapped = swapped.scatter(-1, best, logits.gather(-1, likeliest))
        return swapped, predictions
